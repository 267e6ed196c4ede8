//! What is known of the sites being equal.

use super::CopyStatus;
use crate::verified::Verified;
use serde::{Deserialize, Serialize};

/// A writer's verifications.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VerifyStatus {
    /// The one that runs.
    pub running: Option<CopyStatus>,
    /// The last one that has looked at everything, of whatever run of the daemon.
    pub last: Option<Verified>,
    /// Time since the last verification ended.
    pub age_ms: Option<u64>,
    /// How many have ended since the daemon started.
    pub ended: u64,
    /// Why the last of these was given up, if it was.
    pub given_up: Option<String>,
    /// Time from one to the next, which begins by itself.
    pub every_ms: Option<u64>,
}
