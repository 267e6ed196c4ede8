//! Hybrid logical clock (Retroscope 2, after Kulkarni et al.): 64 bits, ordered as an integer.
//!
//! The upper 48 bits are l, the largest physical time in milliseconds since the Unix epoch that
//! this node has heard of; the lower 16 are c, which orders what happens within one l. Every event
//! gets a time greater than every event that happened before it, and l stays close to the
//! physical clock.

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
    /// From physical milliseconds since the Unix epoch and the logical counter.
    #[must_use]
    pub fn new(physical_ms: u64, logical: u16) -> Hlc {
        assert!(physical_ms < 1 << 48, "the year is past 10889");
        Hlc(physical_ms << COUNTER_BITS | u64::from(logical))
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
        self.last = Hlc::new(physical_ms, 0).max(Hlc(self.last.0 + 1));
        self.last
    }

    /// The time of the receipt of something that was sent at `remote`.
    pub fn tick_on_receive(&mut self, physical_ms: u64, remote: Hlc) -> Hlc {
        self.last = self.last.max(remote);
        self.tick(physical_ms)
    }

    /// The last time given out.
    #[must_use]
    pub fn last(&self) -> Hlc {
        self.last
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

    proptest! {
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
