//! Reasons for which a server is given up, and for which a shard stands, each with what to do.

use crate::belief::Doubt;
use tidelock_pgstream::{Failure, Phase, ServerError, SlotName};
use tidelock_wal::{Lsn, WalError};

/// A server is of no use now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostFailure {
    /// No connection can be made.
    #[error("no connection: {0}")]
    Unreachable(String),
    /// The connection that streams the log.
    #[error("{0}")]
    Stream(Failure),
    /// The connection that looks at the server.
    #[error("look at the server: {0}")]
    Look(Failure),
    /// The server has refused a query.
    #[error("the server refused to be looked at; {0}")]
    Refused(ServerError),
    /// The answer to a query is not what PostgreSQL 15 or later answers.
    #[error("the server's answer to a look has not the form of one")]
    NotALook,
    /// The server is a standby.
    #[error("the server is a standby: it replays another server's log")]
    InRecovery,
    /// The role does not see the standbys.
    #[error("synchronous_standby_names is set, and the role may not see what the standbys have")]
    StandbysHidden,
    /// The log is damaged.
    #[error("{0}")]
    Wal(WalError),
    /// The server has less log than the backup.
    #[error("the server's log ends at {server}, and the backup has it up to {backup}")]
    BehindBackup {
        /// End of the server's log.
        server: Lsn,
        /// End of the backup's.
        backup: Lsn,
    },
}

impl HostFailure {
    /// A stable name for logs and metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Unreachable(_) => "unreachable",
            Self::Stream(failure) | Self::Look(failure) => failure.kind(),
            Self::Refused(_) => "query-refused",
            Self::NotALook => "not-a-look",
            Self::InRecovery => "in-recovery",
            Self::StandbysHidden => "standbys-hidden",
            Self::Wal(error) => error.fault.kind(),
            Self::BehindBackup { .. } => "behind-backup",
        }
    }

    /// True if it may pass without anybody's help.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::InRecovery | Self::BehindBackup { .. } => true,
            Self::Stream(failure) | Self::Look(failure) => failure.is_passing(),
            Self::Refused(_) | Self::NotALook | Self::StandbysHidden | Self::Wal(_) => false,
        }
    }

    /// Advice to the operator.
    #[must_use]
    pub fn advice(&self, slot: &SlotName) -> String {
        match self {
            Self::Unreachable(_) => "start the server, or correct its address".into(),
            Self::InRecovery => "promote it, if it is to take the primary's place".into(),
            Self::StandbysHidden => "GRANT pg_monitor to the agent's role".into(),
            Self::Refused(_) => "GRANT pg_monitor to the agent's role, and see the server's log".into(),
            Self::NotALook => "connect to PostgreSQL itself, not to a proxy".into(),
            Self::Wal(_) => "check the server's disk (pg_waldump shows the place); if the log is damaged, fail over to \
                 a standby, or restore and copy the shard anew"
                .into(),
            Self::BehindBackup { .. } => "this is an old primary or a restored one: start the server that took its \
             place"
                .into(),
            Self::Stream(failure) | Self::Look(failure) => of_stream(failure, slot),
        }
    }
}

fn of_stream(failure: &Failure, slot: &SlotName) -> String {
    match failure {
        Failure::SlotMissing { .. } => format!(
            "find out who dropped it; slot {slot} is made again, by tidelockd itself: if the server still has the log, it \
             goes on without a gap, otherwise the shard is copied anew"
        ),
        Failure::SlotLost { .. } => format!(
            "raise max_slot_wal_keep_size, or find out what held the backup up for so long; tidelockd does the rest by \
             itself: SELECT pg_drop_replication_slot('{slot}'), and the backup takes a new copy of the shard"
        ),
        Failure::WalRemoved { .. } => {
            "the log goes on behind the gap, and the backup copies the shard anew; until then it cannot be recovered".into()
        }
        Failure::SlotsFull(_) => "raise max_replication_slots and restart the server".into(),
        Failure::SlotKind { .. } => "configure another slot name".into(),
        Failure::SlotInUse { .. } => "end the other client of the slot, if it stays".into(),
        Failure::OldTimeline { .. } => {
            "an old primary has come back: stop it, and make it a standby of the promoted one (pg_rewind)".into()
        }
        Failure::Diverged { .. } => "the backup has log that this server never had: if this server is the primary \
         now, copy the shard anew; otherwise stop it"
            .into(),
        Failure::WrongSystem { .. } => "correct the address, or copy the shard anew as another store".into(),
        Failure::PasswordWrong(_) | Failure::Authentication { .. } | Failure::ServerNotProven => {
            "correct user, password, and pg_hba.conf".into()
        }
        Failure::NotAllowed(_) => {
            "pg_hba.conf needs lines for \"replication\" and for the database, the role REPLICATION".into()
        }
        Failure::NoPlace(_) => "raise max_wal_senders and max_connections".into(),
        Failure::Server { phase: Phase::Login, .. } => {
            "pg_hba.conf needs a line for the database that is looked at, and the database must exist".into()
        }
        Failure::Version { .. } => "upgrade PostgreSQL to 15 or later".into(),
        _ => "see the server's log".into(),
    }
}

/// Reason for which nothing new of a shard counts at the backup: its watermark stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stand {
    /// The store was recovered at the backup.
    Fenced,
    /// No server of the list can be used.
    NoServer,
    /// The backup is not connected.
    NoBackup,
    /// The backup has no room.
    BackupFull,
    /// The backup has more log than the server.
    BackupAhead,
    /// Stamps are not believed.
    Clock(ClockStand),
    /// Synchronous standbys lack what was committed.
    Standbys {
        /// Standbys that are connected.
        connected: usize,
        /// Standbys that are needed.
        needed: usize,
    },
    /// The backlog is full: the backup or the way to it is slower than the shard.
    BacklogFull,
}

/// Reason for which stamps are not believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClockStand {
    pub(crate) doubt: Doubt,
    /// Ends of transactions that wait for the clock.
    pub held: usize,
}

impl Stand {
    /// A stable name for logs and metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Fenced => "fenced",
            Self::NoServer => "no-server",
            Self::NoBackup => "no-backup",
            Self::BackupFull => "backup-full",
            Self::BackupAhead => "backup-ahead",
            Self::Clock(ClockStand { doubt, .. }) => match doubt {
                Doubt::NoVerdict => "clock-not-judged",
                Doubt::Clock(_) => "clock-not-believed",
                Doubt::Settling => "clock-settling",
                Doubt::Stamp { .. } => "stamp-not-of-this-clock",
                Doubt::LogAhead => "clock-behind-log",
            },
            Self::Standbys { .. } => "standbys-missing",
            Self::BacklogFull => "backlog-full",
        }
    }

    /// Text for people: what happened, what it means, what to do.
    #[must_use]
    pub fn text(&self, slot: &SlotName) -> String {
        match self {
            Self::Fenced => format!(
                "the store was recovered at the backup: this primary ships nothing any more; stop it, or drop its slot \
                 ({slot}), which keeps all its log"
            ),
            Self::NoServer => "no server of the shard can be used".into(),
            Self::NoBackup => format!(
                "the backup is not connected: the server's slot {slot} keeps the log; watch the server's disk"
            ),
            Self::BackupFull => "the backup has no room for more: it waits for another shard, or its disk is \
             full".into(),
            Self::BackupAhead => {
                "the backup has more of the log than the server: this is not the primary that wrote it".into()
            }
            Self::Clock(stand) => stand.text(),
            Self::Standbys { connected, needed } => format!(
                "{connected} synchronous standbys are connected, {needed} are needed: the server's clients wait, \
                 too; start the standbys, or change synchronous_standby_names"
            ),
            Self::BacklogFull => format!(
                "the shard writes faster than the backup takes: the server's slot {slot} keeps the rest; watch its disk"
            ),
        }
    }
}

impl ClockStand {
    fn text(&self) -> String {
        let held = format!("{} ends of transactions wait, and no later cut is served", self.held);
        match self.doubt {
            Doubt::NoVerdict => format!(
                "the clock of the server's host is not judged; {held}; check tidelockd there"
            ),
            Doubt::Clock(why) => format!(
                "the clock of the server's host is not believed ({why}): its commits have no order with other shards'; \
                 {held}; check ptp4l or chronyd"
            ),
            Doubt::Settling => format!(
                "the clock of the server's host is believed again, for a moment only; {held}"
            ),
            Doubt::Stamp { ahead_us } => format!(
                "a commit's stamp is {ahead_us} us beyond what the clock that is judged can have said; {held}; is the \
                 server on another host?"
            ),
            Doubt::LogAhead => format!(
                "the log has stamps that the clock has not reached: the clock was ahead, or was set back; {held}; \
                 it goes on when the clock is there"
            ),
        }
    }
}
