//! The machine's clocks.

use rustix::time::{ClockId, clock_gettime};
use std::time::{SystemTime, UNIX_EPOCH};
use tidelock_protocol::ids::MonoNanos;
use tidelock_replica::group::Now;

/// Both clocks now.
#[must_use]
pub fn now() -> Now {
    let boot = clock_gettime(ClockId::Boottime);
    let nanos = boot.tv_sec as u64 * 1_000_000_000 + boot.tv_nsec as u64;
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Now { mono: MonoNanos(nanos), unix_ms: unix.as_millis() as u64 }
}
