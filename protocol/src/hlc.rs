//! Hybrid logical clock (Retroscope 2, after Kulkarni et al.): 64 bits, ordered as an integer.
//!
//! The upper 48 bits are l, the largest physical time in milliseconds since the Unix epoch that
//! this node has heard of; the lower 16 are c, which orders what happens within one l. Every event
//! gets a time greater than every event that happened before it, and l stays close to the
//! physical clock.
//!
//! Bounds:
//! - c: a full counter carries into l, so l runs ahead of the wall clock by at most a millisecond
//!   for every 65,536 events within one (Retroscope 2 bounds c by the events within the clocks'
//!   offset; 16 bits hold far more than this system has).
//! - l against the own wall clock: [`WallClock`] follows no jump beyond a bound.
//! - l against others' clocks: what another node said is always taken over, because an order that
//!   has happened cannot be refused; [`HlcClock::lead_ms`] says how far ahead it has brought us.
//! - a restart: [`HlcClock::after`] goes on from a time that is on record. Who cannot record each one keeps a ceiling
//!   on record and stays below it (`daemon/core/src/ceiling.rs`).

use crate::ids::MonoNanos;
use serde::{Deserialize, Serialize};
use std::fmt;

const COUNTER_BITS: u32 = 16;

/// A time of the hybrid logical clock.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Hlc(pub u64);

impl Hlc {
    /// From physical milliseconds since the Unix epoch and the logical counter. Times past the year 10889 are that year's
    /// end.
    #[must_use]
    pub fn new(physical_ms: u64, logical: u16) -> Hlc {
        let physical_ms = physical_ms.min((1 << 48) - 1);
        Hlc(physical_ms << COUNTER_BITS | u64::from(logical))
    }

    /// The least time after this one. At the end of time there is none, and this one stays.
    #[must_use]
    pub fn next(self) -> Hlc {
        Hlc(self.0.saturating_add(1))
    }

    /// l: milliseconds since the Unix epoch.
    #[must_use]
    pub fn physical_ms(self) -> u64 {
        self.0 >> COUNTER_BITS
    }

    /// c: the order within one l.
    #[must_use]
    pub fn logical(self) -> u16 {
        self.0 as u16
    }
}

impl fmt::Display for Hlc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.physical_ms(), self.logical())
    }
}

/// One node's clock.
#[derive(Clone, Debug, Default)]
pub struct HlcClock {
    last: Hlc,
}

impl HlcClock {
    /// A clock that continues after `last`, so that a restart never goes back.
    #[must_use]
    pub fn after(last: Hlc) -> Self {
        Self { last }
    }

    /// The time of a local event. `physical_ms` is the wall clock; it may stand still or go back.
    ///
    /// A full counter carries into l: the integer stays ordered, and l runs ahead of the wall
    /// clock by a millisecond for every 65,536 events in one.
    pub fn tick(&mut self, physical_ms: u64) -> Hlc {
        self.last = Hlc::new(physical_ms, 0).max(self.last.next());
        self.last
    }

    /// Something was heard of that happened at `remote`: whatever follows here is later.
    pub fn observe(&mut self, remote: Hlc) {
        self.last = self.last.max(remote);
    }

    /// How far l is ahead of the wall clock, which is by what others' clocks are ahead.
    #[must_use]
    pub fn lead_ms(&self, physical_ms: u64) -> u64 {
        self.last.physical_ms().saturating_sub(physical_ms)
    }

    /// The time of the receipt of something that was sent at `remote`.
    pub fn tick_on_receive(&mut self, physical_ms: u64, remote: Hlc) -> Hlc {
        self.observe(remote);
        self.tick(physical_ms)
    }

    /// The last time given out.
    #[must_use]
    pub fn last(&self) -> Hlc {
        self.last
    }
}

/// A wall clock that is not believed when it jumps.
///
/// Between two readings it must have gone as far as the clock that never steps, give or take the
/// bound. If not, the last good reading is carried on by that clock until the two agree again, so
/// that one wrong step of a time server does not throw a whole group's times far ahead: times
/// never go back, so such a step could not be undone.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    bound_ms: u64,
    good: Option<(u64, MonoNanos)>,
    refused_ms: i64,
}

impl WallClock {
    /// A clock that has not been read.
    #[must_use]
    pub fn new(bound_ms: u64) -> Self {
        Self { bound_ms, good: None, refused_ms: 0 }
    }

    /// The time, from readings of both clocks: milliseconds since the Unix epoch.
    pub fn read(&mut self, wall_ms: u64, now: MonoNanos) -> u64 {
        let Some((good_ms, at)) = self.good else {
            self.good = Some((wall_ms, now));
            return wall_ms;
        };
        let expected_ms = good_ms.saturating_add(now.since_ns(at) / 1_000_000);
        let off_ms = wall_ms.cast_signed().saturating_sub(expected_ms.cast_signed());
        if off_ms.unsigned_abs() <= self.bound_ms {
            (self.good, self.refused_ms) = (Some((wall_ms, now)), 0);
            return wall_ms;
        }
        self.refused_ms = off_ms;
        expected_ms
    }

    /// By how much the wall clock is off what is believed, if it is not believed.
    #[must_use]
    pub fn refused_ms(&self) -> Option<i64> {
        (self.refused_ms != 0).then_some(self.refused_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn counter_orders_events_within_one_millisecond_and_carries() {
        let mut clock = HlcClock::default();
        let first = clock.tick(7);
        assert_eq!((first.physical_ms(), first.logical()), (7, 0));
        for _ in 0..65_535 {
            clock.tick(7);
        }
        let carried = clock.tick(7);
        assert_eq!((carried.physical_ms(), carried.logical()), (8, 0));
        assert_eq!(clock.tick(9), Hlc::new(9, 0), "the wall clock takes over again");
    }

    #[test]
    fn what_others_say_is_taken_over() {
        let mut clock = HlcClock::after(Hlc::new(5, 0));
        assert_eq!(clock.tick_on_receive(20, Hlc::new(30, 7)), Hlc::new(30, 8));
        assert_eq!((clock.lead_ms(20), clock.lead_ms(40)), (10, 0));
    }

    #[test]
    fn a_wall_clock_that_jumps_is_not_believed_until_it_comes_back() {
        let at = |ms: u64| MonoNanos(ms * 1_000_000);
        let mut wall = WallClock::new(100);
        assert_eq!(wall.read(1_000_000, at(0)), 1_000_000);
        assert_eq!(wall.read(1_000_600, at(500)), 1_000_600, "at the bound");
        assert_eq!(wall.refused_ms(), None);
        assert_eq!(wall.read(1_000_801, at(600)), 1_000_700, "a step beyond it");
        assert_eq!(wall.refused_ms(), Some(101));
        assert_eq!(wall.read(9_000_000, at(1_600)), 1_001_700, "carried on");
        assert_eq!(wall.read(10, at(2_600)), 1_002_700, "back is a jump, too");
        assert!(wall.refused_ms().is_some_and(|off| off < -1_000_000));
        assert_eq!(wall.read(1_003_650, at(3_600)), 1_003_650);
        assert_eq!(wall.refused_ms(), None);
    }

    proptest! {
        /// Whatever the wall clock says, what is believed stays near the clock that never steps,
        /// and an HLC made from it within the bound and its own carries.
        #[test]
        fn what_is_believed_drifts_by_less_than_the_bound_for_each_reading(
            readings in prop::collection::vec((1u64..50, 0u64..100_000), 1..100)
        ) {
            let mut wall = WallClock::new(20);
            let (mut now_ms, mut believed) = (0, wall.read(50_000, MonoNanos(0)));
            let mut clock = HlcClock::default();
            for (step_ms, wall_ms) in readings {
                now_ms += step_ms;
                let next = wall.read(wall_ms, MonoNanos(now_ms * 1_000_000));
                prop_assert!(next.abs_diff(believed + step_ms) <= 20);
                believed = next;
                let at = clock.tick(believed);
                prop_assert!(at.physical_ms() >= believed);
            }
        }

        #[test]
        fn times_grow_whatever_the_wall_clock_does(
            events in prop::collection::vec((0u64..50, prop::option::of(0u64..60 << 16)), 1..200)
        ) {
            let mut clock = HlcClock::default();
            let mut last = Hlc(0);
            for (wall_ms, remote) in events {
                let at = match remote {
                    Some(r) => {
                        let at = clock.tick_on_receive(wall_ms, Hlc(r));
                        prop_assert!(at > Hlc(r));
                        at
                    }
                    None => clock.tick(wall_ms),
                };
                prop_assert!(at > last);
                prop_assert!(at.physical_ms() >= wall_ms);
                last = at;
            }
        }
    }
}
