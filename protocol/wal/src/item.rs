//! Items that the reader hands out.

use crate::lsn::Lsn;
use crate::stamp::PgTimestamp;
use crate::timeline::TimelineId;
use std::fmt;

/// The number of a transaction; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u32);

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A part of the log that ends where the log can be cut: a record, with what must stand between it and the next one.
///
/// Items follow each other without a gap, but for heads of pages: what is between the end of one and the begin of the
/// next is the head of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WalItem {
    /// Begin of the record; of the rest of an earlier record, the begin of the stream.
    pub begin: Lsn,
    /// Earliest begin of the next record: behind padding; behind a switch, the next segment. Everything before it has
    /// arrived.
    pub end: Lsn,
    /// The transaction that the record's head names. None of a rest, and of a record that was given up.
    pub xid: Xid,
    /// Kind of the record, as far as it matters.
    pub kind: Kind,
}

impl WalItem {
    /// The stamp of a transaction's end.
    #[must_use]
    pub fn stamp(&self) -> Option<PgTimestamp> {
        match &self.kind {
            Kind::Transaction(transaction) => Some(transaction.stamp),
            _ => None,
        }
    }
}

/// Kinds of records, as far as they matter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Any record that is not listed here.
    Other,
    /// The stream began within a record, and this is its rest. It was not verified, but for the heads of its pages.
    Rest,
    /// The end of a transaction, or its prepare.
    Transaction(Transaction),
    /// The log goes on in the next segment.
    Switch,
    /// A crash left this record without its end. It counts for nothing.
    GivenUp,
    /// The record in the place of the rest of the one that was given up.
    Overwrites {
        /// Begin of the record that was given up.
        given_up: Lsn,
    },
    /// A server that has replayed the log begins to write a new timeline.
    EndOfRecovery(TimelineChange),
    /// A server was shut down, or has ended its recovery with a checkpoint. The timeline changes only then.
    ShutdownCheckpoint(TimelineChange),
    /// A client has put a message into the log (`pg_logical_emit_message`).
    Message {
        /// True if the message counts only once its transaction commits.
        is_transactional: bool,
        /// The prefix that the client gave, cut off after 200 bytes.
        prefix: Box<[u8]>,
    },
}

/// The timeline of a record, and the one before it; the same, if the timeline does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelineChange {
    /// The record's timeline.
    pub timeline: TimelineId,
    /// The timeline before.
    pub before: TimelineId,
}

/// The end of a transaction, or its prepare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Commit or abort, prepared or not.
    pub ending: Ending,
    /// Time by the clock of the server. PostgreSQL takes it before it places the record: stamps are not in the order
    /// of records.
    pub stamp: PgTimestamp,
    /// The prepared transaction, of a prepare and of what ends one.
    pub two_phase: Option<TwoPhase>,
}

/// Ends of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// Committed.
    Commit,
    /// Rolled back.
    Abort,
    /// Prepared: it has not ended yet, and can no longer fail.
    Prepare,
    /// Committed after it was prepared.
    CommitPrepared,
    /// Rolled back after it was prepared.
    AbortPrepared,
}

impl Ending {
    /// True if clients may see the transaction's writes from here on.
    #[must_use]
    pub const fn is_commit(self) -> bool {
        matches!(self, Ending::Commit | Ending::CommitPrepared)
    }
}

/// A prepared transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TwoPhase {
    /// Number of the transaction. The head of the record that ends it names none.
    pub xid: Xid,
    /// Global identifier. The record that ends the transaction has it only with `wal_level = logical`.
    pub gid: Option<Gid>,
}

/// The global identifier of a prepared transaction: up to 199 bytes, in the encoding of its database.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Gid(Box<[u8]>);

impl Gid {
    /// An identifier of these bytes.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Gid {
        Gid(bytes.into())
    }

    /// The bytes that the client gave.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}
