//! The clock that dates what arrives.
//!
//! Hosts' clocks order records and do not date them. Points in time that people name, the window and the ends of pins
//! are by the time at which records arrived here. It never goes back, and while the server runs it goes on as time
//! passes, whatever is done to the wall clock: a step costs no part of the window and moves no point. The wall clock
//! counts when a group is opened, unless something has arrived later by the clock of then.

use super::Now;
use tidelock_protocol::ids::MonoNanos;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArrivalClock {
    began_ms: u64,
    began: MonoNanos,
    /// How far the wall clock is ahead of this one, in milliseconds.
    wall_ahead_ms: i64,
}

impl ArrivalClock {
    /// Begins now, and not before what has arrived.
    pub(super) fn new(now: Now, arrived_ms: u64) -> Self {
        let mut clock =
            Self { began_ms: now.unix_ms.max(arrived_ms), began: now.mono, wall_ahead_ms: 0 };
        clock.tick(now);
        clock
    }

    /// The time, in milliseconds since the Unix epoch.
    pub(super) fn tick(&mut self, now: Now) -> u64 {
        let now_ms = self.began_ms.saturating_add(now.mono.since_ns(self.began) / 1_000_000);
        self.wall_ahead_ms = now.unix_ms as i64 - now_ms as i64;
        now_ms
    }

    /// How far the wall clock is ahead of it; negative: behind.
    pub(super) fn wall_ahead_ms(&self) -> i64 {
        self.wall_ahead_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_whatever_is_done_to_the_wall_clock() {
        let at = |mono_ms: u64, unix_ms| Now { mono: MonoNanos(mono_ms * 1_000_000), unix_ms };
        let mut clock = ArrivalClock::new(at(5, 1000), 0);
        assert_eq!(clock.tick(at(15, 1010)), 1010);
        assert_eq!(clock.tick(at(25, 90_000)), 1020, "a step ahead");
        assert_eq!(clock.tick(at(35, 30)), 1030, "a step back");
        assert_eq!(clock.wall_ahead_ms(), -1000);
        // The next run begins after what has arrived.
        let mut clock = ArrivalClock::new(at(0, 40), 1030);
        assert_eq!(clock.tick(at(10, 50)), 1040);
        assert_eq!(clock.wall_ahead_ms(), -990);
    }
}
