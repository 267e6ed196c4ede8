//! Reasons for which a standby gets nothing more.

use std::io;
use thiserror::Error;
use tidelock_pgstream::{Position, SenderEnd};
use tidelock_store::journal::{Damage, JournalError};
use tidelock_wal::{Lsn, TimelineId};

/// The end of a standby's connection.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Failure {
    /// The journal does not have the log that the standby needs next.
    #[error(
        "the journal does not have the log from {at} on: the standby must be made anew from a newer copy of the shard"
    )]
    CopyAnew {
        /// Position of the first byte that is missing.
        at: Lsn,
    },
    /// The standby has log that must not be applied.
    #[error(
        "the standby has the log up to {standby}, which is ahead of apply-to, {apply_to}: it must be made anew"
    )]
    Ahead {
        /// End of what the standby has.
        standby: Lsn,
        /// End of what may be applied.
        apply_to: Lsn,
    },
    /// The standby is on a timeline that this log has left before, or has never had.
    #[error(
        "the standby wants the log from {from} on, which is not in this shard's history: it must be made anew"
    )]
    OtherHistory {
        /// Position that the standby asked for.
        from: Position,
    },
    /// The standby has left when it was told whose log this is.
    #[error(
        "the standby has left when it was told that this is the log of system {system} on timeline {timeline}: it is \
         probably a copy of another system, or ahead of that timeline, which its own log says"
    )]
    LeftWhenTold {
        /// System identifier.
        system: u64,
        /// Timeline at apply-to.
        timeline: TimelineId,
    },
    /// The store has no such shard.
    #[error("there is no shard {shard}")]
    NoShard {
        /// The shard.
        shard: u16,
    },
    /// The primary has not told yet whose log this is, or apply-to is not known yet. The standby tries again.
    #[error("the timelines of shard {shard}, or its apply-to, are not known yet")]
    NotYet {
        /// The shard.
        shard: u16,
    },
    /// The bound on connections is reached.
    #[error("{connections} standbys are connected already")]
    Crowded {
        /// Number of connections.
        connections: usize,
    },
    /// The server stops, or the socket is withdrawn.
    #[error("the log is not served here any more")]
    Withdrawn,
    /// The content of an entry is not the log that it stands for.
    #[error(
        "the entry of the journal that ends at {end} has {bytes} bytes, and stands for {span} bytes of log"
    )]
    Content {
        /// End of the entry.
        end: Lsn,
        /// Bytes that there are.
        bytes: usize,
        /// Bytes that there should be.
        span: u32,
    },
    /// The journal cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An entry of the journal is damaged.
    #[error("the journal is damaged: {0}")]
    Damage(Damage),
    /// The connection has ended.
    #[error(transparent)]
    Connection(#[from] SenderEnd),
    /// The socket has failed.
    #[error("the socket of the standby has failed: {0}")]
    Socket(#[from] io::Error),
}

impl Failure {
    /// A stable name for logs and metrics.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::CopyAnew { .. } => "copy-anew",
            Self::Ahead { .. } => "ahead",
            Self::OtherHistory { .. } => "other-history",
            Self::LeftWhenTold { .. } => "left-when-told",
            Self::NoShard { .. } => "no-shard",
            Self::NotYet { .. } => "not-yet",
            Self::Crowded { .. } => "crowded",
            Self::Withdrawn => "withdrawn",
            Self::Content { .. } => "content",
            Self::Journal(_) => "journal",
            Self::Damage(_) => "journal-damaged",
            Self::Connection(end) => end.kind(),
            Self::Socket(_) => "socket",
        }
    }

    /// True if the standby can only be removed and copied from the primary again.
    #[must_use]
    pub const fn needs_copy(&self) -> bool {
        matches!(self, Self::CopyAnew { .. } | Self::Ahead { .. } | Self::OtherHistory { .. })
    }

    /// Words for the standby.
    pub(crate) fn told(&self) -> SenderEnd {
        match self {
            Self::CopyAnew { at } => SenderEnd::LogRemoved { at: *at },
            Self::Connection(end) => end.clone(),
            other => SenderEnd::Owner { reason: other.to_string() },
        }
    }
}
