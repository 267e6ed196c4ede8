//! State of an agent, for operators.

use crate::agent::{Phase, ShardAgent, index};
use crate::backlog::Backlog;
use crate::failure::{ClockStand, HostFailure, Stand};
use crate::look::{SlotStanding, WalStatus};
use crate::server::Home;
use serde::Serialize;
use tidelock_shard::unix_ns_of;

/// State of an agent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    /// Reason for which nothing new counts at the backup. `None`: all is well.
    pub stands: Option<StandStatus>,
    /// Dangers, with what to do.
    pub warnings: Vec<String>,
    /// Host that is tried or used, from 0.
    pub host: usize,
    /// The server that streams.
    pub server: Option<ServerStatus>,
    /// Last failure of each host since it streamed last.
    pub failures: Vec<Option<FailureStatus>>,
    /// The slot.
    pub slot: Option<SlotStanding>,
    /// `synchronous_standby_names`, if it is set.
    pub synchronous_standby_names: Option<String>,
    /// End of the server's log, as far as it is known.
    pub server_end: u64,
    /// End of what was received.
    pub received: u64,
    /// End of what may be sent: stamps are believed, and synchronous standbys have it.
    pub committed: u64,
    /// End of what was sent. `None`: the backup has not said where it stands.
    pub sent: Option<u64>,
    /// b-commit: end of what is durable at the backup, and reported to the server's slot.
    pub b_commit: u64,
    /// Bytes of the server's log that are not durable at the backup.
    pub lag_bytes: u64,
    /// Age of the last stamp that is durable at the backup, while there is more; 0 without.
    pub lag_us: u64,
    /// Bytes in the backlog.
    pub backlog_bytes: usize,
    /// True while nothing is read from the server because the backlog is full.
    pub is_backlog_full: bool,
    /// ε of the clock of the server's host, while it is believed.
    pub epsilon_ns: Option<u64>,
    /// True if the server's stamps are believed.
    pub is_clock_trusted: bool,
    /// Ends of transactions that wait for the clock.
    pub held: usize,
    /// The store's watermark, in microseconds since the Unix epoch.
    pub watermark_us: u64,
}

/// A reason for which a shard stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StandStatus {
    /// A stable name.
    pub kind: &'static str,
    /// Text for people, with what to do.
    pub text: String,
    /// Milliseconds since it stands for this reason.
    pub for_ms: u64,
}

/// A failure of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailureStatus {
    /// A stable name.
    pub kind: &'static str,
    /// Text for people.
    pub text: String,
    /// Advice to the operator.
    pub advice: String,
}

/// The server that streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ServerStatus {
    /// System identifier.
    pub system: u64,
    /// Timeline.
    pub timeline: u32,
    /// `server_version_num`.
    pub version: u32,
}

impl ShardAgent {
    /// State for operators.
    #[must_use]
    pub fn status(&self) -> Status {
        let stands = self.stand().map(|stand| StandStatus {
            kind: stand.kind(),
            text: self.stand_text(&stand),
            for_ms: self.stands_since().map_or(0, |since| {
                u64::try_from(self.now.mono.saturating_sub(since).as_millis()).unwrap_or(u64::MAX)
            }),
        });
        let of_failure = |failure: &HostFailure| FailureStatus {
            kind: failure.kind(),
            text: failure.to_string(),
            advice: failure.advice(&self.config.slot),
        };
        let server = self.identity.filter(|_| self.phase == Phase::Streaming);
        let names = self.look.as_ref().map(|look| look.standby_names.clone());
        let received = self.end().unwrap_or_default().0;
        let b_commit = self.psa.b_commit().0;
        let is_behind = received > b_commit && b_commit > 0;
        let wall_ns = self.now.wall.unix_ns().and_then(|ns| u64::try_from(ns).ok()).unwrap_or(0);
        let age_ns = wall_ns.saturating_sub(unix_ns_of(self.committed.stamp));
        Status {
            stands,
            warnings: self.warnings(),
            host: self.host,
            server: server.map(|identity| ServerStatus {
                system: identity.system,
                timeline: identity.end.timeline.0,
                version: identity.version,
            }),
            failures: self.failures.iter().map(|of| of.as_ref().map(of_failure)).collect(),
            slot: self.look.as_ref().and_then(|look| look.slot),
            synchronous_standby_names: names.filter(|names| !names.is_empty()),
            server_end: self.server_end.0,
            received,
            committed: self.backlog.as_ref().map_or(0, |backlog| self.home_end(backlog)),
            sent: self.psa.sent().map(|(sent, _)| sent.0),
            b_commit,
            lag_bytes: self.server_end.0.saturating_sub(b_commit),
            lag_us: if is_behind { age_ns / 1000 } else { 0 },
            backlog_bytes: self.backlog.as_ref().map_or(0, Backlog::bytes),
            is_backlog_full: self.is_full(),
            epsilon_ns: self.belief.epsilon_ns(),
            is_clock_trusted: self.belief.is_trusted(),
            held: self.backlog.as_ref().map_or(0, Backlog::held),
            watermark_us: unix_ns_of(self.watermark) / 1000,
        }
    }

    /// Dangers that do not hold the log back yet.
    fn warnings(&self) -> Vec<String> {
        let Some(look) = &self.look else { return vec![] };
        let slot = &self.config.slot;
        let mut warnings = vec![];
        match look.slot {
            Some(SlotStanding { wal_status: WalStatus::Unreserved, .. }) => warnings.push(format!(
                "slot {slot} is beyond max_slot_wal_keep_size: the next checkpoint may remove log that the backup \
                 lacks; raise the limit now"
            )),
            Some(SlotStanding { safe_wal_bytes: Some(safe), kept_bytes: Some(kept), .. })
                if u64::try_from(safe).unwrap_or(0) < kept =>
            {
                warnings.push(format!(
                    "slot {slot} keeps {kept} bytes of log, and is lost after {safe} more (max_slot_wal_keep_size): \
                     the backup is behind"
                ));
            }
            _ => {}
        }
        if look.is_synchronous_itself {
            let name = &self.config.login.application_name;
            warnings.push(format!(
                "synchronous_standby_names matches {name}: clients of this shard wait for the backup; name the \
                 standbys of the site instead"
            ));
        }
        warnings
    }

    fn home_end(&self, backlog: &Backlog) -> u64 {
        match self.home {
            Home::Unknown => 0,
            Home::All => backlog.sendable().0,
            Home::UpTo(at) => backlog.sendable().min(index(at)).0,
        }
    }

    /// Reason for which nothing new counts at the backup, the one that stands first in its way.
    #[must_use]
    pub fn stand(&self) -> Option<Stand> {
        if self.psa.is_fenced() {
            return Some(Stand::Fenced);
        }
        if self.phase != Phase::Streaming && self.failures.iter().any(Option::is_some) {
            return Some(Stand::NoServer);
        }
        if !self.is_backup_there {
            return Some(Stand::NoBackup);
        }
        if self.psa.is_backup_full() {
            return Some(Stand::BackupFull);
        }
        let streams = self.phase == Phase::Streaming;
        let received = self.end().unwrap_or_default();
        let at_server = received.max(index(self.server_end));
        if streams && self.psa.ahead().is_some_and(|ahead| ahead > at_server) {
            return Some(Stand::BackupAhead);
        }
        if let Some((doubt, _)) = self.belief.doubted().filter(|_| streams) {
            let held = self.backlog.as_ref().map_or(0, Backlog::held);
            return Some(Stand::Clock(ClockStand { doubt, held }));
        }
        if let Some(Err(few)) = self.look.as_ref().map(|look| look.synchronous()) {
            return Some(Stand::Standbys { connected: few.connected, needed: few.needed });
        }
        self.is_full().then_some(Stand::BacklogFull)
    }

    pub(crate) fn stand_text(&self, stand: &Stand) -> String {
        let mut text = stand.text(&self.config.slot);
        if *stand == Stand::NoServer {
            for (host, failure) in self.failures.iter().enumerate() {
                if let Some(failure) = failure {
                    let advice = failure.advice(&self.config.slot);
                    text += &format!("; host {host}: {failure} ({advice})");
                }
            }
        }
        text
    }
}
