//! Reasons for which the receiver gives a connection up.

use crate::frame::FrameError;
use crate::terms::{Position, SlotName};
use std::fmt;
use tidelock_wal::{HistoryError, Lsn, TimelineId};

/// The oldest version whose server end is understood, as `server_version_num`: `READ_REPLICATION_SLOT` came with it.
pub const SERVER_VERSION_MIN: u32 = 150_000;

/// Error or refusal, as the server worded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerError {
    /// SQLSTATE: five characters.
    pub sqlstate: String,
    /// The server's message and, behind a colon, its detail. Its language is the server's.
    pub text: String,
}

impl ServerError {
    /// True of an error after which the server ends the connection, by the class of its SQLSTATE.
    pub(crate) fn ends_session(&self) -> bool {
        self.sqlstate.starts_with("57P") || self.sqlstate.starts_with("08")
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the server says: {} ({})", self.text, self.sqlstate)
    }
}

/// Part of the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Start-up message and authentication.
    Login,
    /// `IDENTIFY_SYSTEM` and `SHOW`.
    Identify,
    /// `TIMELINE_HISTORY`.
    History,
    /// `READ_REPLICATION_SLOT`.
    ReadSlot,
    /// `CREATE_REPLICATION_SLOT`.
    CreateSlot,
    /// `START_REPLICATION`, up to the first byte of the log.
    Start,
    /// The log streams.
    Stream,
    /// The end of a timeline.
    End,
    /// The connection waits for the owner of the receiver.
    Idle,
    /// A query of a client that is no replication client.
    Query,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Login => "at the login",
            Phase::Identify => "while it was asked who it is",
            Phase::History => "while it was asked for a timeline's history",
            Phase::ReadSlot => "while it was asked for the slot",
            Phase::CreateSlot => "while the slot was made",
            Phase::Start => "at the start of the stream",
            Phase::Stream => "while the log streamed",
            Phase::End => "at the end of a timeline",
            Phase::Idle => "while nothing was asked",
            Phase::Query => "during a query",
        })
    }
}

/// The connection is of no use any more. Whatever was handed out before remains true.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The stream is no sequence of messages.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// A message has no meaning at this point.
    #[error("message {tag:?} came {phase}, where it means nothing: this is no walsender")]
    Unexpected {
        /// Tag of the message, or kind of it within the stream.
        tag: char,
        /// Point at which it came.
        phase: Phase,
    },
    /// A message does not have the form of its kind.
    #[error("message {tag:?} that came {phase} does not have the form of its kind")]
    Malformed {
        /// Tag of the message.
        tag: char,
        /// Point at which it came.
        phase: Phase,
    },
    /// The server wants a proof that this end does not give.
    #[error("the server wants to be logged in to by {method}, which {reason}")]
    Authentication {
        /// The server's method.
        method: &'static str,
        /// Reason, as the end of a sentence.
        reason: &'static str,
    },
    /// The server knows nothing of the password. An impostor, or a proxy.
    #[error(
        "the server did not prove that it knows the password: this may be an impostor, nothing was received from it"
    )]
    ServerNotProven,
    /// Wrong password, or no such user.
    #[error("the password of the replication user is wrong, or there is no such user; {0}")]
    PasswordWrong(ServerError),
    /// The server does not let this user replicate from here.
    #[error(
        "this user may not replicate from here: pg_hba.conf needs a line for \"replication\", and the role \
         the attribute REPLICATION; {0}"
    )]
    NotAllowed(ServerError),
    /// The server's places are taken, every one.
    #[error("the server has no place for one more standby: max_wal_senders, or connections; {0}")]
    NoPlace(ServerError),
    /// The server starts, recovers, or shuts down.
    #[error("the server takes no connections now; {0}")]
    NotReady(ServerError),
    /// The server has shut down in order, or somebody has ended this connection at the server.
    #[error("the server has ended the stream: it shuts down, or was told to")]
    ServerEnded,
    /// The server is too old.
    #[error(
        "PostgreSQL {found} at the other end, {SERVER_VERSION_MIN} (15) is the oldest that is understood"
    )]
    Version {
        /// `server_version_num`.
        found: u32,
    },
    /// The server says something about itself that cannot be.
    #[error("the server says {text:?} for its {of}, which cannot be")]
    Setting {
        /// Name of the fact.
        of: &'static str,
        /// The server's answer, cut off.
        text: String,
    },
    /// Another database cluster is at the other end.
    #[error(
        "database system {found} at the other end, not {expected}: this is another cluster, or it was made anew"
    )]
    WrongSystem {
        /// System identifier of the server.
        found: u64,
        /// System identifier that is demanded.
        expected: u64,
    },
    /// The server has less log than this side.
    #[error(
        "the server's log ends at {server}, and this side has it up to {ours}: this is a standby that is behind"
    )]
    ServerBehind {
        /// End of the server's log.
        server: Position,
        /// Position that was to be the start.
        ours: Position,
    },
    /// The server is on an earlier timeline than this side.
    #[error(
        "the server is at {server}, and this side at {ours}: this is a primary from before a promotion, it \
         must not go on"
    )]
    OldTimeline {
        /// End of the server's log.
        server: Position,
        /// Position that was to be the start.
        ours: Position,
    },
    /// The server's history has parted from the log that this side has.
    #[error(
        "the server's timeline {server} does not contain {ours}: {}; a new base backup is needed",
        left(*.left_at)
    )]
    Diverged {
        /// Timeline of the server.
        server: TimelineId,
        /// Position that was to be the start.
        ours: Position,
        /// Position at which the server left this side's timeline, if it ever was on it.
        left_at: Option<Lsn>,
    },
    /// The history file of the server's timeline is none.
    #[error("the server sent a timeline's history that cannot be: {0}")]
    History(#[from] HistoryError),
    /// The slot is not there, and was not to be made.
    #[error(
        "slot \"{slot}\" does not exist on the server: it was dropped, and the server keeps no log for this side \
         any more"
    )]
    SlotMissing {
        /// Name of the slot.
        slot: SlotName,
    },
    /// Another client uses the slot.
    #[error("slot \"{slot}\" is in use by another connection; {error}")]
    SlotInUse {
        /// Name of the slot.
        slot: SlotName,
        /// The server's words.
        error: ServerError,
    },
    /// The slot can no longer be streamed from.
    #[error(
        "slot \"{slot}\" is lost: the server no longer keeps the log that this side needs; a new base backup is \
         needed{}",
        said(.error.as_ref())
    )]
    SlotLost {
        /// Name of the slot.
        slot: SlotName,
        /// The server's words, if it said so itself.
        error: Option<ServerError>,
    },
    /// The slot is of another kind.
    #[error("slot \"{slot}\" is not a physical one; choose another name, or drop it")]
    SlotKind {
        /// Name of the slot.
        slot: SlotName,
    },
    /// No slot can be made.
    #[error("the server cannot make one more slot: raise max_replication_slots; {0}")]
    SlotsFull(ServerError),
    /// The log from the start on is gone.
    #[error(
        "the server no longer has its log from {from} on: a new base backup is needed; {error}"
    )]
    WalRemoved {
        /// Position that was to be the next one.
        from: Position,
        /// The server's words.
        error: ServerError,
    },
    /// Another error of the server.
    #[error("error {phase}; {error}")]
    Server {
        /// Point at which it came.
        phase: Phase,
        /// The server's words.
        error: ServerError,
    },
    /// The stream skips a part of the log.
    #[error(
        "the server sent the log from {found} on, the next byte is {expected}: a part is missing"
    )]
    Gap {
        /// Begin of the part that came.
        found: Lsn,
        /// Position of the next byte.
        expected: Lsn,
    },
    /// The stream goes back.
    #[error("the server sent the log from {found} on again, the next byte is {expected}")]
    Backwards {
        /// Begin of the part that came.
        found: Lsn,
        /// Position of the next byte.
        expected: Lsn,
    },
    /// A part of the log reaches past the last position that there is.
    #[error("the server sent {bytes} bytes of log from {at} on: no log is so long")]
    PositionOverflow {
        /// Begin of the part that came.
        at: Lsn,
        /// Length of the part.
        bytes: usize,
    },
    /// The server ends the timeline at another place than the log that it sent.
    #[error("the server left timeline {from} for {to} at {said}, its log of it ends at {at}")]
    WrongEnd {
        /// Timeline that ended.
        from: TimelineId,
        /// The next timeline, by the server.
        to: TimelineId,
        /// Begin of the next timeline, by the server.
        said: Lsn,
        /// Position of the next byte.
        at: Lsn,
    },
    /// The server was silent for too long.
    #[error("nothing was heard of the server for {seconds} s")]
    Silent {
        /// Time without a sign.
        seconds: u64,
    },
    /// The connection has ended.
    #[error("the connection ended {phase}")]
    Closed {
        /// Point at which it ended.
        phase: Phase,
    },
}

fn left(at: Option<Lsn>) -> String {
    match at {
        Some(at) => {
            format!("it branched off at {at}, before the end of the log that this side has")
        }
        None => "that timeline is not in its history".into(),
    }
}

fn said(error: Option<&ServerError>) -> String {
    error.map_or_else(String::new, |error| format!("; {error}"))
}

impl Failure {
    /// A stable name for logs and metrics.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Frame(_) => "frame",
            Self::Unexpected { .. } => "unexpected-message",
            Self::Malformed { .. } => "malformed-message",
            Self::Authentication { .. } => "authentication",
            Self::ServerNotProven => "server-not-proven",
            Self::PasswordWrong(_) => "password-wrong",
            Self::NotAllowed(_) => "not-allowed",
            Self::NoPlace(_) => "no-place",
            Self::NotReady(_) => "not-ready",
            Self::ServerEnded => "server-ended",
            Self::Version { .. } => "version",
            Self::Setting { .. } => "setting",
            Self::WrongSystem { .. } => "wrong-system",
            Self::ServerBehind { .. } => "server-behind",
            Self::OldTimeline { .. } => "old-timeline",
            Self::Diverged { .. } => "diverged",
            Self::History(_) => "history",
            Self::SlotMissing { .. } => "slot-missing",
            Self::SlotInUse { .. } => "slot-in-use",
            Self::SlotLost { .. } => "slot-lost",
            Self::SlotKind { .. } => "slot-kind",
            Self::SlotsFull(_) => "slots-full",
            Self::WalRemoved { .. } => "wal-removed",
            Self::Server { .. } => "server-error",
            Self::Gap { .. } => "gap",
            Self::Backwards { .. } => "backwards",
            Self::PositionOverflow { .. } => "position-overflow",
            Self::WrongEnd { .. } => "wrong-end",
            Self::Silent { .. } => "silent",
            Self::Closed { .. } => "closed",
        }
    }

    /// True if another attempt, at this server or another one of the shard, may succeed without anybody's help.
    #[must_use]
    pub const fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::NoPlace(_)
                | Self::NotReady(_)
                | Self::ServerEnded
                | Self::ServerBehind { .. }
                | Self::OldTimeline { .. }
                | Self::SlotInUse { .. }
                | Self::Silent { .. }
                | Self::Closed { .. }
        )
    }
}
