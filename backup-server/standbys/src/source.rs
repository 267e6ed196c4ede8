//! Bytes of a shard's log at a position, out of the journal.
//!
//! A reader of the journal goes from one place of it to what is durable when it is made. Who has read it to its end
//! asks for another one from there on; the first one begins with the segment in which the log's position is found.

use crate::failure::Failure;
use std::collections::VecDeque;
use tidelock_shard::ShardEntry;
use tidelock_shard_logs::StoreLog;
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::journal::{Entry, JournalBatch, Position, Reader, State};
use tidelock_wal::Lsn;

/// A reader that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Begin with the segment of the journal that has the byte at this position of the log.
    From(Lsn),
    /// Begin at this place in the journal.
    After(Position),
}

/// Answer to an [`Ask`].
#[derive(Debug)]
pub enum Supply<F> {
    /// The reader, and the place to which it reads. It owns its files, so segments may be removed meanwhile.
    Reader(Reader<F, ShardEntry>, Position),
    /// The journal does not reach back so far.
    Forgotten,
    /// The store has no such shard.
    NoShard,
}

impl Ask {
    /// Answers on the thread of the store. `None`: the journal has nothing more yet.
    #[must_use]
    pub fn answer<S: Storage>(self, log: &StoreLog<S>, shard: u16) -> Option<Supply<S::File>> {
        if shard >= log.shards() {
            return Some(Supply::NoShard);
        }
        let journal = log.journal();
        let end = journal.durable_end();
        let from = match self {
            Self::After(position) if position >= end => return None,
            // Segments that were removed since leave a gap in the shard's log, if they had any of it: `fill` finds it.
            Self::After(position) => position,
            Self::From(at) => {
                // A shard that was added later begins inside a segment.
                let of = |state: &State| {
                    state.shards.get(usize::from(shard)).copied().unwrap_or_default()
                };
                let mut starts =
                    journal.starts().take_while(|(_, state)| of(state).index.0 <= at.0);
                match starts.by_ref().last() {
                    Some((segment, _)) => Position { segment, offset: 0 },
                    None => return Some(Supply::Forgotten),
                }
            }
        };
        Some(Supply::Reader(journal.reader(from, end), end))
    }
}

/// The log of a shard, read from some position on.
#[derive(Debug)]
pub(crate) struct Source<F> {
    shard: u16,
    /// Position of the next byte.
    at: Lsn,
    reader: Option<(Reader<F, ShardEntry>, Position)>,
    /// Place in the journal behind all that was read of it.
    next: Option<Position>,
    /// Entries of one batch that are not given out.
    read: VecDeque<ShardEntry>,
}

impl<F: StorageFile> Source<F> {
    pub fn new(shard: u16) -> Self {
        Self { shard, at: Lsn(0), reader: None, next: None, read: VecDeque::new() }
    }

    /// The reader that is needed to go on. `None`: one is there.
    pub fn ask(&self) -> Option<Ask> {
        match (&self.reader, self.next) {
            (Some(_), _) => None,
            (None, Some(position)) => Some(Ask::After(position)),
            (None, None) => Some(Ask::From(self.at)),
        }
    }

    /// Takes what was asked for.
    pub fn supply(&mut self, supply: Supply<F>) -> Result<(), Failure> {
        match supply {
            Supply::Reader(reader, end) => self.reader = Some((reader, end)),
            Supply::Forgotten => return Err(Failure::CopyAnew { at: self.at }),
            Supply::NoShard => return Err(Failure::NoShard { shard: self.shard }),
        }
        Ok(())
    }

    /// Goes to a position, to read on from there.
    pub fn seek(&mut self, at: Lsn) {
        if at != self.at || (self.reader.is_none() && self.next.is_none()) {
            *self = Self { at, ..Self::new(self.shard) };
        }
    }

    /// Appends the log from where the last call ended. Fewer bytes than that: see [`ask`](Self::ask).
    pub fn fill(&mut self, bytes_max: usize, out: &mut Vec<u8>) -> Result<(), Failure> {
        while out.len() < bytes_max {
            let Some(front) = self.read.front() else {
                if self.read_batch()? {
                    continue;
                }
                return Ok(());
            };
            if front.end.0 <= self.at.0 {
                self.read.pop_front();
                continue;
            }
            let missing = Failure::CopyAnew { at: self.at };
            let (Some(begin), Some(data)) = (front.begin(), &front.data) else {
                return Err(missing);
            };
            if data.data().len() != front.span as usize {
                let (end, bytes, span) = (Lsn(front.end.0), data.data().len(), front.span);
                return Err(Failure::Content { end, bytes, span });
            }
            let Some(before) = self.at.0.checked_sub(begin.0) else { return Err(missing) };
            // Less than the span.
            let rest = data.data().get(before as usize..).unwrap_or_default();
            let part = &rest[..rest.len().min(bytes_max - out.len())];
            out.extend_from_slice(part);
            self.at.0 += part.len() as u64;
        }
        Ok(())
    }

    /// Reads up to the shard's next entry, which nobody waits for yet. Damage there is met again when somebody does.
    pub fn read_ahead(&mut self) {
        while self.read.front().is_some_and(|front| front.end.0 <= self.at.0) {
            self.read.pop_front();
        }
        while self.read.is_empty() {
            let before = self.reader.as_ref().map(|(reader, _)| Reader::position(reader));
            match self.read_batch() {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => {
                    self.read.clear();
                    (self.reader, self.next) = (None, before);
                    return;
                }
            }
        }
    }

    /// Reads the next batch of the journal. False: there is none yet.
    fn read_batch(&mut self) -> Result<bool, Failure> {
        let Some((reader, end)) = &mut self.reader else { return Ok(false) };
        let batch = reader.next();
        let at = Reader::position(reader);
        if batch.is_none() || at >= *end {
            // The next one is asked for before it is missed.
            self.next = Some(at);
            self.reader = None;
        }
        let Some(batch) = batch else { return Ok(false) };
        self.take(batch?)?;
        Ok(true)
    }

    /// Takes the shard's entries out of a batch.
    fn take(&mut self, batch: JournalBatch<F, ShardEntry>) -> Result<(), Failure> {
        for item in batch.entries {
            let Entry::Record { head, payload, .. } = item.map_err(Failure::Damage)? else {
                continue;
            };
            let body = &head.peek().body;
            if body.shard != self.shard || body.end.0 <= self.at.0 {
                continue;
            }
            let record = head.finish(payload).map_err(|error| Failure::Damage(error.into()))?;
            self.read.push_back(record.body);
        }
        Ok(())
    }
}
