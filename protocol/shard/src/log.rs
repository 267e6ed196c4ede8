//! Positions, stamps and entries of a shard's log.

use serde::{Deserialize, Serialize};
use std::fmt;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Payload;

/// A position in the log of a primary shard (p-log-idx): the end of an entry. 0 is the beginning.
///
/// The store decides what is counted: bytes (PostgreSQL's LSN) or entries (a Raft log). Of two entries the later has the
/// greater one, on every replica of the shard the same.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct LogIndex(pub u64);

impl fmt::Display for LogIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The end of an entry, and the effective stamp there: the greatest stamp of the log up to this entry.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct LogPoint {
    /// The end of the entry.
    pub index: LogIndex,
    /// The effective stamp.
    pub stamp: Hlc,
}

/// An entry of a shard's log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Its end.
    pub end: LogIndex,
    /// The store's stamp, taken when the append of the entry began; between agents the effective stamp. An entry that no
    /// client waits for, such as a part of a transaction before its commit, has the stamp 0.
    pub stamp: Hlc,
    /// The content, as the store made it. `None`: there is nothing to apply up to the end of this entry, or a copy of the
    /// shard has it.
    pub data: Option<Payload>,
}

impl Entry {
    /// Its end and stamp.
    #[must_use]
    pub fn point(&self) -> LogPoint {
        LogPoint { index: self.end, stamp: self.stamp }
    }
}
