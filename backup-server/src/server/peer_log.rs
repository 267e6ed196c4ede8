//! The log of what peers cause: whatever they do, a few lines a second.

use super::clock;
use std::sync::{Mutex, PoisonError};
use tidelock_protocol::rate::RateLimit;

/// What may write such lines.
#[derive(Debug)]
pub(super) struct PeerLog(Mutex<RateLimit>);

/// Of peers that have not said who they are.
pub(super) static STRANGERS: PeerLog = PeerLog::new();
/// Of hosts.
pub(super) static HOSTS: PeerLog = PeerLog::new();
/// The limit for lines about standbys of stores' shards, whose copies came from another site.
pub(super) static STANDBYS: PeerLog = PeerLog::new();
/// The limit for lines about clients of exported disks: a guest can read a damaged place again and again.
pub(super) static NBD_CLIENTS: PeerLog = PeerLog::new();

impl PeerLog {
    const fn new() -> Self {
        Self(Mutex::new(RateLimit::new(3, 50)))
    }

    /// Whether a line may be written now. Says before it how many were not.
    pub(super) fn may_write(&self) -> bool {
        let mut limit = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let left_out = limit.take(clock::now().mono);
        drop(limit);
        if let Some(lines @ 1..) = left_out {
            tracing::warn!(lines, "lines about peers were left out of the log: too many at once");
        }
        left_out.is_some()
    }
}

/// A line of the log that a peer causes: `peer_log!(HOSTS, warn, ...)`.
macro_rules! peer_log {
    ($whose:ident, $level:ident, $($line:tt)*) => {
        if $crate::server::peer_log::$whose.may_write() {
            tracing::$level!($($line)*);
        }
    };
}
pub(super) use peer_log;
