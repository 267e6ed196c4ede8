//! What status says of a writer's heartbeats.

use crate::heartbeat::HeartbeatSettings;
use crate::heartbeat::{Missing, Pulse};
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::MonoNanos;

/// A writer's heartbeats.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatStatus {
    /// Time from one to the next, if nothing else was sent; `None`: they are off.
    pub interval_ms: Option<u64>,
    /// After how long one that has not come back is missed.
    pub alarm_after_ms: Option<u64>,
    /// Time since the newest that has come back had been sent; `None`: none has.
    pub age_ms: Option<u64>,
    /// How many have come back, with guests' writes that were as good.
    pub returned: u64,
    /// How many of them were sent because nothing else was.
    pub sent: u64,
    /// One is missing, and was last seen there.
    pub missing: Option<MissingStatus>,
}

/// Place where a heartbeat was last seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissingStatus {
    /// This daemon's loop has not admitted it.
    Daemon,
    /// It was admitted, and the backup does not acknowledge it.
    Backup,
}

impl HeartbeatStatus {
    /// As the watch has told.
    #[must_use]
    pub fn of(pulse: &Pulse, settings: Option<HeartbeatSettings>, now: MonoNanos) -> Self {
        let Some(settings) = settings else { return Self::default() };
        Self {
            interval_ms: Some(settings.interval.as_millis() as u64),
            alarm_after_ms: Some(settings.alarm_after.as_millis() as u64),
            age_ms: pulse.newest().map(|at| now.since_ns(at) / 1_000_000),
            returned: pulse.returned(),
            sent: pulse.asked(),
            missing: pulse.lost().map(|missing| match missing {
                Missing::Owner => MissingStatus::Daemon,
                Missing::Backup => MissingStatus::Backup,
            }),
        }
    }
}
