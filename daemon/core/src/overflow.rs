//! What becomes of guests when their backlog on disk is at its limit: the stream stands, and where they write is kept in
//! the activity log, until the backup has all of the stream and can be asked to compare the rest.
//!
//! ```text
//!            full, and: the backup has taken nothing for [`AWAY`],
//!            or all is well but that (whole, and calm since the last time)        the gate is shut
//!  recording ───────────────────────────────────────────────────────► shutting ─────────────────► standing
//!      ▲                                                                                             │
//!      │  attached: what the map has is compared                 the backup has the whole stream,    ▼
//!      └──────────────────────────────────────────────────────── nothing of it is under way ────── asking
//! ```
//!
//! Pure: what is seen goes in, what is to be done comes out.
//!
//! **No oscillation, and the way back makes progress.** While the comparison runs writes are recorded, and a backup that
//! takes records is waited for: guests' writes wait at the limit then, so the comparison ends however much they write. Only
//! if the backup takes nothing for [`AWAY`] the stream stands again. A link that carries records, only fewer than guests
//! write, has the stream stand again not before the sites were equal for [`CALM`] times as long as it took last time from
//! the stand until they were. So guests of such a link are unrecorded or compared for a part of 1 / (1 + [`CALM`]) of the
//! time at most. Meanwhile the limit is that of memory ([`Overflow::is_apart`]), and copies have a share of it: a copy takes
//! its turn behind what waits, and until the sites are equal the order of what waits is worth nothing to a recovery. (What DRBD's pull-ahead does without such a rule: LINBIT/drbd issue 46.)

use std::time::Duration;
use tidelock_protocol::ids::{MonoNanos, Seq};

/// At the limit a backup that has taken nothing for so long is not there.
pub const AWAY: Duration = Duration::from_secs(5);

/// So many times as long as one stand, with its way back, there is none after it on a link that carries records.
pub const CALM: u64 = 4;

/// What a turn sees.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// The time.
    pub now: MonoNanos,
    /// A guest's write waits because the backlog is at its limit.
    pub is_full: bool,
    /// Guests may be served without a record.
    pub may_stand: bool,
    /// The last seq that the backup has.
    pub durable: Seq,
    /// The backup is there and has all that was recorded, and nothing is under way that has a record or may get one.
    pub is_drained: bool,
    /// The sites are equal but for what is on its way.
    pub is_whole: bool,
    /// What was told to the gate is in force.
    pub is_applied: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing may leave from now on, and no later process may go on with what is on disk.
    Shut,
    /// From now on nothing is recorded.
    Stand,
    /// The backup is to be told that the disks differ.
    Ask,
    /// The sites are equal again. It took so long.
    Over(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Recording,
    Shutting,
    Standing,
    Asking,
}

/// How a member stands.
#[derive(Clone, Copy, Debug)]
pub struct Overflow {
    stage: Stage,
    full_since: Option<MonoNanos>,
    /// The last acknowledgement, and when it was seen first.
    durable: Seq,
    moved_at: MonoNanos,
    /// From the first stand until the sites are equal.
    began_at: Option<MonoNanos>,
    /// It stood before, and they were not equal since.
    was_apart: bool,
    /// When that was over last, and how long it took.
    last: Option<(MonoNanos, u64)>,
    not_before: MonoNanos,
}

impl Overflow {
    /// Everything is recorded.
    #[must_use]
    pub fn new(now: MonoNanos) -> Self {
        Self {
            stage: Stage::Recording,
            full_since: None,
            durable: Seq::ZERO,
            moved_at: now,
            began_at: None,
            was_apart: false,
            last: None,
            not_before: now,
        }
    }

    /// To be called in each turn.
    pub fn look(&mut self, sight: &Sight) -> Option<Step> {
        if sight.durable > self.durable {
            (self.durable, self.moved_at) = (sight.durable, sight.now);
        }
        match self.stage {
            Stage::Recording => self.look_while_recording(sight),
            Stage::Shutting if sight.is_applied => {
                self.stage = Stage::Standing;
                Some(Step::Stand)
            }
            Stage::Standing if sight.is_drained => {
                self.stage = Stage::Asking;
                Some(Step::Ask)
            }
            Stage::Shutting | Stage::Standing | Stage::Asking => None,
        }
    }

    fn look_while_recording(&mut self, sight: &Sight) -> Option<Step> {
        let now = sight.now;
        if let Some(began_at) = self.began_at.take_if(|_| sight.is_whole) {
            let took_ns = now.since_ns(began_at);
            self.last = Some((now, took_ns));
            return Some(Step::Over(Duration::from_nanos(took_ns)));
        }
        if !sight.is_full || !sight.may_stand {
            self.full_since = None;
            return None;
        }
        let full_since = *self.full_since.get_or_insert(now);
        let nothing_since = full_since.max(self.moved_at);
        let is_away = now.since_ns(nothing_since) >= AWAY.as_nanos() as u64;
        if now < self.not_before || !(is_away || self.is_calm(now)) {
            return None;
        }
        self.stage = Stage::Shutting;
        self.full_since = None;
        self.was_apart = self.began_at.is_some();
        self.began_at.get_or_insert(now);
        Some(Step::Shut)
    }

    fn is_calm(&self, now: MonoNanos) -> bool {
        let is_over = |(at, took_ns): (MonoNanos, u64)| now.since_ns(at) >= took_ns * CALM;
        self.began_at.is_none() && self.last.is_none_or(is_over)
    }

    /// What must be done before the stream stands cannot be done now. It is tried again after [`AWAY`].
    pub fn put_off(&mut self, now: MonoNanos) {
        self.stage = Stage::Recording;
        if !self.was_apart {
            self.began_at = None;
        }
        self.not_before = now.plus_ms(AWAY.as_millis() as u64);
    }

    /// The backup has attached the member to compare: what is admitted from now on is recorded.
    pub fn returns(&mut self) {
        debug_assert!(self.stands());
        self.stage = Stage::Recording;
    }

    /// Whether nothing is recorded.
    #[must_use]
    pub fn stands(&self) -> bool {
        matches!(self.stage, Stage::Standing | Stage::Asking)
    }

    /// Whether everything is recorded, and nothing else is in sight.
    #[must_use]
    pub fn records(&self) -> bool {
        self.stage == Stage::Recording
    }

    /// It stood, and the sites are not equal since.
    #[must_use]
    pub fn is_apart(&self) -> bool {
        self.began_at.is_some()
    }

    /// Whether something only goes on when time passes.
    #[must_use]
    pub fn needs_tick(&self) -> bool {
        self.full_since.is_some() || self.stage == Stage::Shutting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn at(seconds: u64) -> MonoNanos {
        MonoNanos(seconds * S)
    }

    /// All is well.
    fn sight(seconds: u64) -> Sight {
        Sight {
            now: at(seconds),
            is_full: false,
            may_stand: true,
            durable: Seq(1),
            is_drained: false,
            is_whole: true,
            is_applied: true,
        }
    }

    fn full(seconds: u64) -> Sight {
        Sight { is_full: true, ..sight(seconds) }
    }

    fn drained(seconds: u64) -> Sight {
        Sight { is_drained: true, is_whole: false, ..sight(seconds) }
    }

    fn stand(o: &mut Overflow, sight: &Sight) {
        assert_eq!(o.look(sight), Some(Step::Shut));
        assert!(!o.stands() && !o.records());
        assert_eq!(o.look(&Sight { is_applied: false, ..*sight }), None, "the gate is open");
        assert!(o.needs_tick());
        assert_eq!(o.look(sight), Some(Step::Stand));
        assert!(o.stands());
    }

    /// It has stood from `from` on, and the comparison has begun at `to`.
    fn came_back(from: u64, to: u64) -> Overflow {
        let mut o = Overflow::new(at(0));
        stand(&mut o, &full(from));
        assert_eq!(o.look(&drained(to)), Some(Step::Ask));
        o.returns();
        o
    }

    #[test]
    fn the_first_time_it_stands_at_once_and_returns_when_the_backup_has_the_stream() {
        let mut o = Overflow::new(at(0));
        assert_eq!(o.look(&sight(1)), None);
        stand(&mut o, &full(2));
        assert_eq!(o.look(&full(3)), None, "it stands already");
        assert_eq!(o.look(&sight(90)), None, "the stream is not at the backup");
        assert_eq!(o.look(&drained(100)), Some(Step::Ask));
        assert_eq!(o.look(&drained(101)), None, "once");
        assert!(o.stands(), "until the backup has answered");
        o.returns();
        assert!(!o.stands());
        assert_eq!(o.look(&Sight { is_whole: false, ..sight(110) }), None);
        assert_eq!(o.look(&sight(122)), Some(Step::Over(Duration::from_secs(120))));
        assert_eq!(o.look(&sight(123)), None);
    }

    #[test]
    fn where_it_may_not_stand_writes_wait() {
        let mut o = Overflow::new(at(0));
        for seconds in 0..100 {
            assert_eq!(o.look(&Sight { may_stand: false, ..full(seconds) }), None);
        }
        assert!(!o.needs_tick());
        stand(&mut o, &full(100));
    }

    #[test]
    fn a_comparison_is_waited_for_while_the_backup_takes_records() {
        let mut o = came_back(1, 2);
        for seconds in 3..1000 {
            let sight = Sight { is_whole: false, durable: Seq(seconds / 4), ..full(seconds) };
            assert_eq!(o.look(&sight), None, "at {seconds} s");
            assert!(o.needs_tick());
        }
    }

    #[test]
    fn a_backup_that_is_lost_during_a_comparison_stops_no_guest_for_longer_than_away() {
        let mut o = came_back(1, 2);
        let compared = |seconds| Sight { is_whole: false, ..full(seconds) };
        assert_eq!(o.look(&compared(20)), None, "full since now");
        assert_eq!(o.look(&compared(24)), None);
        stand(&mut o, &compared(25));
        assert_eq!(o.look(&drained(30)), Some(Step::Ask));
        o.returns();
        assert_eq!(o.look(&sight(40)), Some(Step::Over(Duration::from_secs(39))), "from the first");
    }

    #[test]
    fn room_in_between_begins_the_wait_anew() {
        let mut o = came_back(1, 2);
        let compared = |seconds| Sight { is_whole: false, ..full(seconds) };
        assert_eq!(o.look(&compared(20)), None);
        assert_eq!(o.look(&Sight { is_whole: false, ..sight(23) }), None);
        assert_eq!(o.look(&compared(24)), None);
        assert_eq!(o.look(&compared(28)), None);
        stand(&mut o, &compared(29));
    }

    /// A link that carries less than guests write, for ever.
    #[test]
    fn on_a_slow_link_it_stands_for_a_bounded_part_of_the_time() {
        let mut o = Overflow::new(at(0));
        let (mut behind, mut stood, mut since) = (0u64, 0, 0);
        for second in 1..20_000 {
            let moves = Seq(second);
            let is_back = o.stands() && second >= since + 60;
            let is_whole = !o.stands() && second >= since + 100;
            let sight = Sight {
                durable: moves,
                is_full: !o.stands(),
                is_drained: is_back,
                is_whole,
                ..sight(second)
            };
            match o.look(&sight) {
                Some(Step::Stand) => {
                    (since, stood) = (second, stood + 1);
                }
                Some(Step::Ask) => o.returns(),
                Some(Step::Shut | Step::Over(_)) | None => {}
            }
            behind += u64::from(o.began_at.is_some());
        }
        assert!(stood > 10, "it comes back, and stands again: {stood}");
        assert!(behind <= 20_000 / (1 + CALM) + 100, "{behind} s of 20,000");
    }

    #[test]
    fn what_could_not_be_begun_is_tried_again_later() {
        let mut o = Overflow::new(at(0));
        assert_eq!(o.look(&full(1)), Some(Step::Shut));
        o.put_off(at(1));
        assert!(o.records());
        assert_eq!(o.look(&full(5)), None);
        stand(&mut o, &full(6));
    }
}
