//! The ceiling of a writer's times: what is on record of them, so that a restart never goes back.
//!
//! A restart after an unclean stop knows the record only, and begins [`CARRIES_MS`] above it. So no time may be
//! given out that is not below that, whatever it comes from:
//! - the wall clock is followed up to the ceiling. One record of it serves for half of [`AHEAD_MS`] while the member
//!   writes; at the ceiling, as after an idle spell, times count on;
//! - what others' clocks say may be beyond. It is taken over when the ceiling is above it, and what must come
//!   after it waits until then ([`BoundedClock::waits`]);
//! - counting on carries into milliseconds. When half of [`CARRIES_MS`] is used up, it waits, too.

use tidelock_protocol::hlc::{Hlc, HlcClock};

/// How far it is put ahead of the wall clock. So far ahead, and by what carries add, begins the next run
/// after an unclean stop, at most.
pub const AHEAD_MS: u64 = 2_000;
/// How far it is kept ahead of times that have passed the wall clock: for what carries of the
/// counter may add between two looks, 65,536 records each. Less than a start takes.
pub const CARRIES_MS: u64 = 100;
/// How often it is looked at: far oftener than it is reached.
pub const LOOK_EVERY_MS: u64 = AHEAD_MS / 8;

/// Of a run that begins after one with `before_ms` on record; 0: after none.
#[must_use]
pub fn first(before_ms: u64, wall_ms: u64) -> u64 {
    ahead_of(before_ms, wall_ms)
}

/// Below every time of a run that begins after an unclean stop.
#[must_use]
pub fn floor_above(before_ms: u64) -> Hlc {
    if before_ms == 0 { Hlc(0) } else { Hlc::new(before_ms + CARRIES_MS, 0) }
}

/// What is to be on record when the greatest time that was given out, or is to be, is `last`. `wall_ms`: the
/// wall clock as far as it is believed. Whoever waits for it need not any more.
#[must_use]
pub fn raised(ceiling_ms: u64, last: Hlc, wall_ms: u64) -> u64 {
    let last_ms = last.physical_ms();
    let room_ms = if last_ms > wall_ms { CARRIES_MS / 2 } else { AHEAD_MS / 2 };
    if last_ms + room_ms <= ceiling_ms {
        return ceiling_ms;
    }
    ahead_of(last_ms, wall_ms).max(ceiling_ms)
}

/// Ahead of the wall clock, not of the times: those of a run that follows an unclean stop begin ahead of
/// the wall clock themselves, and several such runs must not add up. Peers drop what is too far
/// ahead.
fn ahead_of(last_ms: u64, wall_ms: u64) -> u64 {
    (wall_ms + AHEAD_MS).max(last_ms + CARRIES_MS)
}

/// The clock of one writer.
#[derive(Clone, Debug, Default)]
pub struct BoundedClock {
    clock: HlcClock,
    /// What is on record; `None`: nothing is kept, and nothing bounds it.
    ceiling_ms: Option<u64>,
    /// What was heard and is beyond it; 0: nothing.
    beyond: Hlc,
}

impl BoundedClock {
    /// Something was heard of that happened at `remote`: what is given out from now on is later, unless this
    /// [`waits`](Self::waits).
    pub fn observe(&mut self, remote: Hlc) {
        if self.is_below_limit(remote) {
            self.clock.observe(remote);
        } else {
            self.beyond = self.beyond.max(remote);
        }
    }

    /// A ceiling is on record.
    pub fn set_ceiling(&mut self, physical_ms: u64) {
        self.ceiling_ms = Some(self.ceiling_ms.map_or(physical_ms, |old| old.max(physical_ms)));
        let heard = std::mem::take(&mut self.beyond);
        self.observe(heard);
    }

    /// What comes after all that was heard has to wait for a higher ceiling. What does not depend on it need not:
    /// it gets a time that is not after.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.beyond > Hlc(0) || !self.is_below_limit(self.clock.last())
    }

    /// The time of a local event.
    pub fn tick(&mut self, wall_ms: u64) -> Hlc {
        self.clock.tick(self.ceiling_ms.map_or(wall_ms, |ceiling_ms| wall_ms.min(ceiling_ms)))
    }

    /// The last time given out.
    #[must_use]
    pub fn last(&self) -> Hlc {
        self.clock.last()
    }

    /// The greatest time that was given out or heard: what the ceiling is to be ahead of.
    #[must_use]
    pub fn greatest(&self) -> Hlc {
        self.last().max(self.beyond)
    }

    /// The rest up to the beginning of the next run is for what does not wait: what is in flight already, which is
    /// far less than 65,536 records for each millisecond.
    fn is_below_limit(&self, hlc: Hlc) -> bool {
        self.ceiling_ms.is_none_or(|ceiling_ms| hlc.physical_ms() < ceiling_ms + CARRIES_MS / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_wall_clock_is_followed_up_to_the_ceiling() {
        let mut clock = BoundedClock::default();
        clock.set_ceiling(10);
        clock.set_ceiling(8);
        assert_eq!(clock.tick(9), Hlc::new(9, 0));
        assert_eq!(clock.tick(500), Hlc::new(10, 0));
        assert_eq!(clock.tick(500), Hlc::new(10, 1), "it counts on");
        assert!(!clock.waits());
        clock.set_ceiling(400);
        assert_eq!(clock.tick(500), Hlc::new(400, 0));
    }

    #[test]
    fn what_others_say_waits_for_a_ceiling_above_it() {
        let mut clock = BoundedClock::default();
        clock.set_ceiling(1_000);
        clock.observe(Hlc::new(1_049, 7));
        assert!(!clock.waits());
        assert_eq!(clock.tick(900), Hlc::new(1_049, 8));
        let heard = Hlc::new(9_000, 3);
        clock.observe(heard);
        assert!(clock.waits());
        assert_eq!((clock.last(), clock.greatest()), (Hlc::new(1_049, 8), heard));
        assert_eq!(clock.tick(900), Hlc::new(1_049, 9), "it does not depend on what was heard");
        clock.set_ceiling(raised(1_000, clock.greatest(), 900));
        assert!(!clock.waits());
        assert_eq!(clock.tick(900), Hlc(heard.0 + 1));
    }

    #[test]
    fn carries_wait_before_they_are_where_the_next_run_begins() {
        let mut clock = BoundedClock::default();
        clock.set_ceiling(1_000);
        while !clock.waits() {
            clock.tick(5_000);
        }
        assert_eq!(clock.last(), Hlc::new(1_000 + CARRIES_MS / 2, 0));
        clock.set_ceiling(raised(1_000, clock.greatest(), 5_000));
        assert!(!clock.waits());
    }

    proptest! {
        /// Whatever is heard, whenever the ceiling is raised and whenever the run is killed: no time is given out
        /// twice, and what was heard comes before what waited for it.
        #[test]
        fn no_run_gives_out_a_time_of_an_earlier_one(
            steps in prop::collection::vec((0..5u8, 0u64..4_000), 1..300)
        ) {
            let (mut wall_ms, mut greatest) = (100_000, Hlc(0));
            let mut recorded_ms = first(0, wall_ms);
            let mut clock = BoundedClock::default();
            clock.set_ceiling(recorded_ms);
            for (what, ms) in steps {
                match what {
                    0 => wall_ms += ms,
                    1 => clock.observe(Hlc::new(wall_ms + ms, 5)),
                    2 => {
                        recorded_ms = raised(recorded_ms, clock.greatest(), wall_ms);
                        clock.set_ceiling(recorded_ms);
                        prop_assert!(!clock.waits());
                    }
                    // The wall clock may go back over it.
                    3 => {
                        wall_ms -= ms.min(wall_ms - 50_000) / 2;
                        let floor = floor_above(recorded_ms);
                        recorded_ms = first(recorded_ms, wall_ms);
                        clock = BoundedClock::default();
                        clock.set_ceiling(recorded_ms);
                        clock.observe(floor);
                        prop_assert!(!clock.waits());
                    }
                    _ => {}
                }
                let heard = clock.greatest();
                let at = clock.tick(wall_ms);
                prop_assert!(at > greatest && at < floor_above(recorded_ms));
                prop_assert!(at > heard || clock.waits());
                greatest = at;
            }
        }
    }
}
