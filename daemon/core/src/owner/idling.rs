//! When a writer that has nothing to write says so, in the HLC form.
//!
//! The watermark is the least time that every writer has reached, so a packet of one member waits
//! for all the others. A writer is asked for by the frontier, the greatest time of any record that
//! is not idle, which the backup tells with C. It speaks while it is behind it, and for a while
//! after it has moved, so that while the group is busy its times follow the clock and a packet waits
//! for one interval and one round trip. In a quiet group nobody speaks: idle records do not move
//! the frontier. Nothing of this depends on packets.

use super::replication::Clocks;
use crate::ceiling;
use crate::sequencer::Sequencer;
use std::time::Duration;
use tidelock_protocol::bounds::CLOCK_BOUND_MS;
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

/// What a writer says at its end to those on other hosts, which may be about to end, too.
///
/// In the HLC form each of them waits until every writer has passed what it has admitted. Who has left passes nothing
/// any more. So its last record is idle and ahead by [`LastWord::AHEAD_MS`] of its clock and of the frontier, because another
/// host's clock may be the one that is ahead: whoever ends at the same time has admitted nothing that is later. The
/// next run begins above it, as after every clean end.
#[derive(Debug, Default)]
pub struct LastWord {
    is_wanted: bool,
    is_said: bool,
}

impl LastWord {
    /// By so much, in milliseconds: what one write of the state file serves for.
    pub const AHEAD_MS: u64 = ceiling::AHEAD_MS / 2;

    /// Says it, once it may: its time must be on record first. Returns whether it was said before; then all is done when
    /// it is durable.
    pub fn say(&mut self, sequencer: &mut Sequencer, frontier: Hlc, clocks: Clocks) -> bool {
        if self.is_said {
            return true;
        }
        if !std::mem::replace(&mut self.is_wanted, true) {
            // Never so far ahead that the backup would refuse it.
            let most_ms = clocks.wall_ms + CLOCK_BOUND_MS - Self::AHEAD_MS;
            let frontier_ms = frontier.physical_ms().min(most_ms);
            let ahead_ms = frontier_ms.max(clocks.wall_ms) + Self::AHEAD_MS;
            sequencer.observe(Hlc::new(ahead_ms, 0));
        }
        if !sequencer.waits_for_ceiling() {
            sequencer.idle(clocks.now, clocks.wall_ms);
            self.is_said = true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequencer::Settings;
    use tidelock_protocol::ids::{Epoch, Seq, WriterId};
    use tidelock_protocol::message::Mode;

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

    #[test]
    fn the_last_word_is_ahead_of_the_clock_and_said_once_it_is_on_record() {
        let clocks = |wall_ms| Clocks { now: MonoNanos(1), wall_ms };
        let mut sequencer = Sequencer::new(Settings {
            writer: WriterId(0),
            mode: Mode::Pipelined,
            backlog_limit_bytes: 1 << 20,
            lock_align_bytes: 512,
        });
        sequencer.set_ceiling(3_000, MonoNanos(1), 1_000);
        sequencer.start(Epoch(1), Seq(7), Hlc::new(1_000, 0), MonoNanos(1), 1_000);
        // An hour without a write: what is on record is far behind.
        let hour_ms = 3_600_000;
        let mut word = LastWord::default();
        assert!(
            !word.say(&mut sequencer, Hlc(0), clocks(hour_ms)) && sequencer.waits_for_ceiling()
        );
        assert!(!word.say(&mut sequencer, Hlc(0), clocks(hour_ms + 5)));
        assert_eq!(sequencer.last_seq(), Seq(7), "it waits");
        let ceiling_ms = ceiling::raised(3_000, sequencer.greatest_hlc(), hour_ms + 10);
        sequencer.set_ceiling(ceiling_ms, MonoNanos(1), hour_ms + 10);
        assert!(!word.say(&mut sequencer, Hlc(0), clocks(hour_ms + 10)));
        assert_eq!(sequencer.last_seq(), Seq(8));
        assert!(sequencer.last_hlc() > Hlc::new(hour_ms + LastWord::AHEAD_MS, 0));
        assert!(sequencer.last_hlc().physical_ms() <= ceiling_ms);
        assert!(word.say(&mut sequencer, Hlc(0), clocks(hour_ms + 20)), "it was said");
        assert_eq!(sequencer.last_seq(), Seq(8), "once");
    }

    #[test]
    fn the_last_word_is_ahead_of_what_others_have_said_too() {
        let said = |heard_ms| {
            let mut sequencer = Sequencer::new(Settings {
                writer: WriterId(0),
                mode: Mode::Pipelined,
                backlog_limit_bytes: 1 << 20,
                lock_align_bytes: 512,
            });
            sequencer.set_ceiling(u64::MAX >> 16, MonoNanos(1), 1_000);
            sequencer.start(Epoch(1), Seq(7), Hlc::new(1_000, 0), MonoNanos(1), 1_000);
            let mut word = LastWord::default();
            let clocks = Clocks { now: MonoNanos(1), wall_ms: 1_000 };
            assert!(!word.say(&mut sequencer, Hlc::new(heard_ms, 0), clocks));
            sequencer.last_hlc().physical_ms()
        };
        assert_eq!(said(1_500), 1_500 + LastWord::AHEAD_MS);
        assert_eq!(said(500), 1_000 + LastWord::AHEAD_MS);
        let bound_ms = 1_000 + CLOCK_BOUND_MS;
        assert_eq!(said(bound_ms - 10), bound_ms, "as far as the backup takes it");
    }
}
