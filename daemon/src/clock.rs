//! The two clocks of the daemon.

use std::time::{SystemTime, UNIX_EPOCH};
use tidelock_protocol::ids::MonoNanos;

/// `CLOCK_BOOTTIME`: never steps, and counts the time that the host was suspended, so a lease
/// ends during a suspension, too.
#[must_use]
pub fn mono_now() -> MonoNanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    MonoNanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Milliseconds since the Unix epoch by the wall clock, which may step.
#[must_use]
pub fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}
