//! Positions, stamps and entries of a shard's log.

use serde::{Deserialize, Serialize};
use std::fmt;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Payload;

/// The stamp of a time in nanoseconds since the Unix epoch, rounded down: milliseconds, and 2^-16 of them (15 ns). Clocks
/// of stamps and those of records of disks have one scale, so that one bound judges both.
#[must_use]
pub fn stamp_at(unix_ns: u64) -> Hlc {
    let (ms, rest) = (unix_ns / 1_000_000, unix_ns % 1_000_000);
    Hlc::new(ms, ((rest << 16) / 1_000_000) as u16)
}

/// The time of a stamp in nanoseconds since the Unix epoch, rounded up: `stamp_at` of it is the stamp.
#[must_use]
pub fn unix_ns_of(stamp: Hlc) -> u64 {
    let rest = (u64::from(stamp.logical()) * 1_000_000).div_ceil(1 << 16);
    stamp.physical_ms().saturating_mul(1_000_000).saturating_add(rest)
}

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
    /// True of a NOP: no client wrote it, so it is no reason for a NOP of another shard.
    pub nop: bool,
}

impl Entry {
    /// An entry with content that a client has written.
    #[must_use]
    pub fn update(end: LogIndex, stamp: Hlc, data: Payload) -> Self {
        Self { end, stamp, data: Some(data), nop: false }
    }

    /// The beginning of a log: what is before it is in a copy of the shard.
    #[must_use]
    pub fn begins(at: LogPoint) -> Self {
        Self { end: at.index, stamp: at.stamp, data: None, nop: true }
    }

    /// Its end and stamp.
    #[must_use]
    pub fn point(&self) -> LogPoint {
        LogPoint { index: self.end, stamp: self.stamp }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stamps_are_times_in_order(ns in 0u64..1 << 62) {
            let stamp = stamp_at(ns);
            prop_assert!(stamp <= stamp_at(ns + 1));
            prop_assert!(stamp < stamp_at(ns + 1000), "a microsecond is told apart");
            prop_assert!(unix_ns_of(stamp) <= ns && ns - unix_ns_of(stamp) < 16);
            prop_assert_eq!(stamp_at(unix_ns_of(stamp)), stamp);
        }
    }
}
