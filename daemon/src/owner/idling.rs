//! When a writer that has nothing to write says so, in the HLC form.
//!
//! The watermark is the least time that every writer has reached, so a packet of one member waits
//! for all the others. A writer is asked for by the frontier, the greatest time of any record that
//! is not idle, which the backup tells with C. It speaks while it is behind it, and for a while
//! after it has moved, so that while the group is busy its times follow the clock and a packet waits
//! for one interval and one round trip. In a quiet group nobody speaks: idle records do not move
//! the frontier. Nothing of this depends on packets.

use std::time::Duration;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;

/// For so long after the last record of anybody a group counts as busy.
const BUSY_FOR: Duration = Duration::from_secs(1);

/// What a writer knows of the frontier.
#[derive(Debug, Default)]
pub struct Idling {
    /// The greatest time of any record that is not idle, as last heard.
    pub frontier: Hlc,
    moved_at: MonoNanos,
    /// The timer runs.
    pub armed: bool,
}

impl Idling {
    /// The frontier is at least here.
    pub fn heard(&mut self, frontier: Hlc, now: MonoNanos) {
        if frontier > self.frontier {
            (self.frontier, self.moved_at) = (frontier, now);
        }
    }

    /// Whether the others wait for this writer, or may soon.
    pub fn wants(&self, last: Hlc, now: MonoNanos) -> bool {
        let is_busy =
            self.frontier > Hlc(0) && u128::from(now.since_ns(self.moved_at)) < BUSY_FOR.as_nanos();
        self.is_behind(last) || is_busy
    }

    /// Whether the others wait for this writer. One that is to end says no more than that.
    pub fn is_behind(&self, last: Hlc) -> bool {
        self.frontier > last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_speaks_while_it_is_behind_or_the_group_is_busy() {
        let at = |ms: u64| MonoNanos(ms * 1_000_000);
        let mut idling = Idling::default();
        assert!(!idling.wants(Hlc(0), at(1)), "nobody has written");
        idling.heard(Hlc(5), at(10));
        assert!(idling.wants(Hlc(4), at(60_000)), "behind, however long ago");
        assert!(idling.wants(Hlc(6), at(900)), "busy");
        assert!(!idling.wants(Hlc(6), at(1_010)), "quiet");
        assert!(idling.is_behind(Hlc(4)) && !idling.is_behind(Hlc(5)), "busy or not");
        idling.heard(Hlc(5), at(2_000));
        assert!(!idling.wants(Hlc(6), at(2_001)), "the same frontier is no news");
    }
}
