//! The cut at a stamp: of each shard the end of the last entry with an effective stamp up to it.
//!
//! Effective stamps of a shard never fall, so every segment of the journal begins with all shards' stamps at or below
//! those at the beginning of the next: the scan begins at the last segment whose beginning is not beyond the stamp.

use crate::read::ReadError;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{ApplyTo, LogIndex, LogPoint, ShardEntry};
use tidelock_storage::Storage;
use tidelock_store::journal::{Entry, Journal, Position, State};

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

/// Entries of each shard that may be applied at a stamp, and those that wait there.
///
/// # Errors
/// The journal cannot be read, or does not reach back so far.
pub(crate) fn at<S: Storage>(journal: &Journal<S>, stamp: Hlc) -> Result<Vec<ApplyTo>, ReadError> {
    let (from, state) = begin(journal, stamp).ok_or(ReadError::Forgotten)?;
    let mut found: Vec<_> = state.shards.iter().map(|shard| ApplyTo::after(shard.index)).collect();
    found.resize_with(journal.state().shards.len(), ApplyTo::default);
    found.iter_mut().for_each(|shard| shard.advance(stamp));
    for batch in journal.reader::<ShardEntry>(from, journal.end()) {
        for entry in batch?.entries {
            if let Entry::Record { head, .. } = entry.map_err(ReadError::Damage)? {
                let record = head.peek();
                let point = LogPoint { index: record.body.end, stamp: record.hlc };
                let shard = found.get_mut(usize::from(record.body.shard));
                shard.ok_or(ReadError::NoShard(record.body.shard))?.committed(point);
            }
        }
    }
    Ok(found)
}
