//! The cut at a stamp: of each shard the end of the last entry with an effective stamp up to it.
//!
//! Effective stamps of a shard never fall, so every segment of the journal begins with all shards' stamps at or below
//! those at the beginning of the next: the scan begins at the last segment whose beginning is not beyond the stamp.

use crate::read::ReadError;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{ApplyTo, LogIndex, LogPoint, ShardEntry};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::journal::{Entry, Journal, Position, Reader, State};

/// The end of each shard's log in a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Entries up to this effective stamp are in it.
    pub stamp: Hlc,
    /// By shard: the end of the last entry in it.
    pub ends: Vec<LogIndex>,
}

/// The last segment at whose beginning no shard is beyond the stamp, with the state there.
fn begin<S: Storage>(journal: &Journal<S>, stamp: Hlc) -> Option<(Position, &State)> {
    let is_before = |state: &State| state.shards.iter().all(|shard| shard.stamp <= stamp);
    let starts = journal.starts().take_while(|(_, state)| is_before(state));
    let (segment, state) = starts.last()?;
    Some((Position { segment, offset: 0 }, state))
}

/// A search for the cut at a stamp. The files of the journal are its own, so it may run on any thread.
#[derive(Debug)]
pub struct CutSearch<F> {
    stamp: Hlc,
    found: Vec<ApplyTo>,
    reader: Reader<F, ShardEntry>,
}

impl<F: StorageFile> CutSearch<F> {
    /// # Errors
    /// The journal does not reach back so far.
    pub(crate) fn new<S: Storage<File = F>>(
        journal: &Journal<S>,
        stamp: Hlc,
    ) -> Result<Self, ReadError> {
        let (from, state) = begin(journal, stamp).ok_or(ReadError::Forgotten)?;
        let mut found: Vec<_> =
            state.shards.iter().map(|shard| ApplyTo::after(shard.index)).collect();
        found.resize_with(journal.state().shards.len(), ApplyTo::default);
        found.iter_mut().for_each(|shard| shard.advance(stamp));
        Ok(Self { stamp, found, reader: journal.reader(from, journal.end()) })
    }

    /// Reads on until this is true.
    fn read(&mut self, is_enough: impl Fn(&[ApplyTo]) -> bool) -> Result<(), ReadError> {
        for batch in self.reader.by_ref() {
            for entry in batch?.entries {
                if let Entry::Record { head, .. } = entry.map_err(ReadError::Damage)? {
                    let record = head.peek();
                    let point = LogPoint { index: record.body.end, stamp: record.hlc };
                    let shard = self.found.get_mut(usize::from(record.body.shard));
                    shard.ok_or(ReadError::NoShard(record.body.shard))?.committed(point);
                }
            }
            if is_enough(&self.found) {
                break;
            }
        }
        Ok(())
    }

    /// Entries of each shard that may be applied at the stamp, and all those that wait there.
    pub(crate) fn all(mut self) -> Result<Vec<ApplyTo>, ReadError> {
        self.read(|_| false)?;
        Ok(self.found)
    }

    /// The cut.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn find(mut self) -> Result<Cut, ReadError> {
        // Behind a stamp that is greater there is none in that shard.
        self.read(|found| found.iter().all(|shard| shard.waiting() > 0))?;
        Ok(Cut { stamp: self.stamp, ends: self.found.iter().map(ApplyTo::apply_to).collect() })
    }
}
