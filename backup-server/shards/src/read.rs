//! Entries of one shard, in order.

use std::collections::VecDeque;
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{Entry, LogIndex, ShardEntry};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::journal::{
    Damage, Entry as Item, Journal, JournalBatch, JournalError, Position, Reader,
};

/// A log that cannot be read from where it was asked for.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The journal does not reach back so far: a newer copy of the shard is needed.
    #[error("the journal does not reach back so far: a newer copy of the shard is needed")]
    Forgotten,
    /// The watermark has not reached that time.
    #[error("{stamp} is ahead of the watermark, {watermark}")]
    Ahead {
        /// The time.
        stamp: Hlc,
        /// The watermark.
        watermark: Hlc,
    },
    /// The store has no such shard.
    #[error("there is no shard {0}")]
    NoShard(u16),
    /// The journal is damaged, or cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An entry of the journal is damaged.
    #[error("the journal is damaged: {0}")]
    Damage(Damage),
}

/// Reads a shard's entries, each with the end of the one before it.
#[derive(Debug)]
pub struct EntryReader<F> {
    shard: u16,
    after: LogIndex,
    up_to: LogIndex,
    reader: Reader<F, ShardEntry>,
    read: VecDeque<Entry>,
    is_over: bool,
}

impl<F: StorageFile> EntryReader<F> {
    /// Entries that end after `after` and not after `up_to`.
    pub(crate) fn new<S: Storage<File = F>>(
        journal: &Journal<S>,
        shard: u16,
        after: LogIndex,
        up_to: LogIndex,
    ) -> Result<Self, ReadError> {
        let of =
            |state: &tidelock_store::journal::State| state.shards.get(usize::from(shard)).copied();
        of(journal.state()).ok_or(ReadError::NoShard(shard))?;
        // A shard that was added later begins inside a segment.
        let starts =
            journal.starts().map(|(segment, state)| (segment, of(state).unwrap_or_default()));
        let (segment, _) =
            starts.take_while(|(_, at)| at.index <= after).last().ok_or(ReadError::Forgotten)?;
        let from = Position { segment, offset: 0 };
        let reader = journal.reader(from, journal.durable_end());
        Ok(Self { shard, after, up_to, reader, read: VecDeque::new(), is_over: false })
    }

    /// Takes the shard's entries out of a batch.
    fn take(&mut self, batch: JournalBatch<F, ShardEntry>) -> Result<(), ReadError> {
        for item in batch.entries {
            let Item::Record { head, payload, .. } = item.map_err(ReadError::Damage)? else {
                continue;
            };
            let body = &head.peek().body;
            if body.shard != self.shard || body.end <= self.after {
                continue;
            }
            if body.end > self.up_to {
                self.is_over = true;
                return Ok(());
            }
            self.after = body.end;
            let record = head.finish(payload).map_err(|e| ReadError::Damage(Damage::Record(e)))?;
            self.read.push_back(ShardEntry::entry(record));
        }
        Ok(())
    }
}

impl<F: StorageFile> Iterator for EntryReader<F> {
    type Item = Result<Entry, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.read.pop_front() {
                return Some(Ok(entry));
            }
            if self.is_over {
                return None;
            }
            let taken = match self.reader.next() {
                None => {
                    self.is_over = true;
                    Ok(())
                }
                Some(Ok(batch)) => self.take(batch),
                Some(Err(error)) => Err(error.into()),
            };
            if let Err(error) = taken {
                self.is_over = true;
                self.read.clear();
                return Some(Err(error));
            }
        }
    }
}
