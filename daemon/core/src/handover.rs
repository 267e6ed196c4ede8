//! What a host does next when its group is switched over to the backup site as planned.
//!
//! ```text
//!              all is at the backup    all are so far      on record      in force         answered
//!  draining ─────────[awaiting]──────▶ recording ────────▶ shutting ────▶ giving up ─────▶ over
//!     │         │            │  ▲          │
//!     │         │ too long   ▼  │ too late │
//!     │         └──────▶ taking back       │ it cannot be put on record
//!     ▼                      ▼             ▼
//!  going on  ◀───────────────┴─────────────┘   requests are taken again, nothing has changed
//! ```
//!
//! A group that is spread over several hosts is handed over by all of them: each is told by its operator, and once it is
//! drained it says so to the backup, which tells all to go on when all are (`backup-server/replica/src/group/switching.rs`).
//! Nobody who was told so goes back by itself, and nobody goes on without.
//!
//! Invariant (rule 4): the lease is given up only after the gate is shut and is known to stay so, also by the next run
//! of the daemon: the record is on stable storage first.
//!
//! Pure: what is seen goes in, what is to be done comes out. `host/switching.rs` does it, and the simulator.

use crate::link::port::Agreement;
use std::sync::Arc;
use std::time::Duration;
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;

/// So long the gate's thread may take to shut, and the backup to answer, once nothing can be taken back.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The longest drain that may be asked for, and the longest wait for other hosts.
pub const DRAIN_MAX: Duration = Duration::from_secs(3600);

/// What is seen of the group on this host.
pub trait Sight {
    /// Why nobody wants the switch any more, if so.
    fn unwanted(&self) -> Option<String>;
    /// Whether its writers take nothing, and the backup has all that they have taken. `Err`: it does not come to that.
    fn is_drained(&mut self) -> Result<bool, String>;
    /// Whether packets are held here.
    fn is_held(&self) -> bool;
    /// Why there can be no switch now, if so.
    fn obstacle(&self) -> Option<String>;
    /// What the backup lacks.
    fn lacks(&self) -> String;
    /// Whether the backup has all members attached.
    fn is_attached(&self) -> bool;
    /// These members, with their hosts.
    fn with_hosts(&self, members: Vec<String>) -> Vec<String>;
    /// Whether the gate's thread has shut.
    fn is_shut(&self) -> bool;
    /// Whether the backup has said of all members that it knows their leases to be given up.
    fn is_answered(&mut self) -> Result<bool, LinkEnded>;
}

/// The answer will not be heard: the link has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkEnded;

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// To look again soon.
    Wait,
    /// The members here are to say whether they are ready. Answers go to [`Handover::agreement`].
    Say(bool),
    /// It is to be put on record that the group is switched over, and then [`Handover::recorded`] to be called.
    Record,
    /// The gate is to be shut for good.
    Shut,
    /// The backup is to be told that the leases are given up.
    GiveUp,
    /// The group is switched over.
    Over,
    /// It has not come to pass: requests are taken again.
    GoOn(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Draining,
    Awaiting,
    /// Because of this.
    TakingBack(String, MonoNanos),
    Recording,
    Shutting,
    GivingUp,
    Over,
    GoesOn,
}

/// What a switch took so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Took {
    /// Until the backup had everything and nothing was held.
    pub drained: Duration,
    /// From then until all other hosts were so far, too.
    pub others: Duration,
    /// From then until it was on record, and the gate was shut.
    pub shut: Duration,
    /// The same until the backup knew.
    pub gave_up: Duration,
}

/// One switch of a group on one host.
#[derive(Debug)]
pub struct Handover {
    stage: Stage,
    drain_max: Duration,
    others_max: Duration,
    /// Of this host.
    members: usize,
    /// Other hosts have members, too: what they have told.
    agreement: Option<Arc<Agreement>>,
    /// When the stage that goes on began, as far as it is measured.
    since: MonoNanos,
    took: Took,
    problem: Option<String>,
}

fn since(now: MonoNanos, earlier: MonoNanos) -> Duration {
    Duration::from_nanos(now.since_ns(earlier))
}

impl Handover {
    /// Writers are told to hold. `members`: how many are on this host. `is_spread`: others are elsewhere.
    #[must_use]
    pub fn begin(
        members: usize,
        is_spread: bool,
        drain_max: Duration,
        others_max: Duration,
        now: MonoNanos,
    ) -> Self {
        Self {
            stage: Stage::Draining,
            drain_max: drain_max.min(DRAIN_MAX),
            others_max: others_max.min(DRAIN_MAX),
            members,
            agreement: is_spread.then(Arc::default),
            since: now,
            took: Took::default(),
            problem: None,
        }
    }

    fn awaits_others(&self) -> bool {
        self.agreement.is_some() && !tidelock_planted::is(Bug::OthersNotAwaited)
    }

    /// To be called often.
    pub fn look(&mut self, sight: &mut dyn Sight, now: MonoNanos) -> Step {
        match &self.stage {
            Stage::Draining => self.look_while_draining(sight, now),
            Stage::Awaiting => self.look_at_others(sight, now),
            Stage::TakingBack(why, until) => {
                let (why, is_late) = (why.clone(), now >= *until);
                self.look_whether_taken_back(sight, why, is_late, now)
            }
            Stage::Shutting if sight.is_shut() => {
                self.took.shut = since(now, self.since);
                self.stage = Stage::GivingUp;
                Step::GiveUp
            }
            Stage::Shutting if since(now, self.since) < ANSWER_MAX => Step::Wait,
            Stage::Shutting => {
                self.took.shut = since(now, self.since);
                let why = "the gate's thread does not answer: the lease is not given up";
                self.is_over(Some(why), now)
            }
            Stage::GivingUp => match sight.is_answered() {
                Ok(true) => self.is_over(None, now),
                Ok(false) if since(now, self.since) < ANSWER_MAX => Step::Wait,
                _ => {
                    let why = "the backup has not answered; it is told again until it does";
                    self.is_over(Some(why), now)
                }
            },
            Stage::Recording | Stage::Over | Stage::GoesOn => Step::Wait,
        }
    }

    fn look_while_draining(&mut self, sight: &mut dyn Sight, now: MonoNanos) -> Step {
        let is_drained = match sight.is_drained() {
            Ok(is_drained) => is_drained,
            Err(why) => return self.goes_on(why),
        };
        if is_drained && !sight.is_held() {
            if let Some(why) = sight.obstacle() {
                return self.goes_on(why);
            }
            self.took.drained = since(now, self.since);
            self.since = now;
            if !self.awaits_others() {
                return self.goes_over(now);
            }
            self.stage = Stage::Awaiting;
            return Step::Say(true);
        }
        if let Some(why) = sight.unwanted() {
            return self.goes_on(why);
        }
        if since(now, self.since) < self.drain_max {
            return Step::Wait;
        }
        let (limit, why) = (self.drain_max, sight.lacks());
        self.goes_on(format!("the backup did not get everything within {limit:?}: {why}"))
    }

    fn look_at_others(&mut self, sight: &mut dyn Sight, now: MonoNanos) -> Step {
        if self.is_agreed() {
            return self.goes_over(now);
        }
        let why = if let Some(why) = sight.unwanted() {
            why
        } else if since(now, self.since) >= self.others_max {
            let awaited = sight.with_hosts(self.awaited());
            let who = match awaited.is_empty() {
                true => "the backup did not answer".to_owned(),
                false => format!("{} did not get ready", awaited.join(", ")),
            };
            format!("{who} within {:?}", self.others_max)
        } else {
            return Step::Wait;
        };
        let until = now.plus_ms(ANSWER_MAX.as_millis() as u64);
        self.stage = Stage::TakingBack(why, until);
        Step::Say(false)
    }

    /// The backup may have told all of them to go on by now.
    fn look_whether_taken_back(
        &mut self,
        sight: &mut dyn Sight,
        why: String,
        is_late: bool,
        now: MonoNanos,
    ) -> Step {
        let released = self.agreement.as_ref().map_or(0, |agreement| agreement.released());
        if released >= self.members {
            return self.goes_on(why);
        }
        if self.is_agreed() {
            return self.goes_over(now);
        }
        if is_late || !sight.is_attached() {
            return self.goes_on(format!(
                "{why}. The backup could not be asked whether the other hosts go on: if tidelock-backup status \
                 says that a part of the group is switched over, run this again"
            ));
        }
        Step::Wait
    }

    fn goes_over(&mut self, now: MonoNanos) -> Step {
        self.took.others = since(now, self.since);
        self.since = now;
        self.stage = Stage::Recording;
        Step::Record
    }

    /// It is on record: no run after this one opens the gate. Or it could not be put there.
    pub fn recorded(&mut self, result: Result<(), String>) -> Step {
        debug_assert_eq!(self.stage, Stage::Recording);
        match result {
            Ok(()) => {
                self.stage = Stage::Shutting;
                Step::Shut
            }
            Err(why) if self.agreement.is_some() => self.goes_on(format!(
                "{why}. The other hosts have switched over: mend this, and run it again"
            )),
            Err(why) => self.goes_on(why),
        }
    }

    fn is_over(&mut self, problem: Option<&str>, now: MonoNanos) -> Step {
        self.took.gave_up = since(now, self.since);
        self.problem = problem.map(str::to_owned);
        self.stage = Stage::Over;
        Step::Over
    }

    fn goes_on(&mut self, why: String) -> Step {
        self.stage = Stage::GoesOn;
        Step::GoOn(why)
    }

    /// Where the answers to [`Step::Say`] go; `None`: there is only this host.
    #[must_use]
    pub fn agreement(&self) -> Option<&Arc<Agreement>> {
        self.agreement.as_ref()
    }

    fn is_agreed(&self) -> bool {
        self.agreement.as_ref().is_some_and(|agreement| agreement.is_reached())
    }

    /// Whether it waits for other hosts.
    #[must_use]
    pub fn is_awaiting(&self) -> bool {
        matches!(self.stage, Stage::Awaiting | Stage::TakingBack(..))
    }

    /// Members elsewhere that are not ready.
    #[must_use]
    pub fn awaited(&self) -> Vec<String> {
        self.agreement.as_ref().map(|agreement| agreement.awaited()).unwrap_or_default()
    }

    /// What it took so far.
    #[must_use]
    pub fn took(&self) -> Took {
        self.took
    }

    /// Once it is over: why it is not certain that the backup knows.
    #[must_use]
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with one member.
    #[derive(Clone, Debug, Default)]
    struct Fake {
        unwanted: bool,
        drained: bool,
        fails: bool,
        held: bool,
        obstacle: bool,
        detached: bool,
        shut: bool,
        answered: bool,
    }

    impl Sight for Fake {
        fn unwanted(&self) -> Option<String> {
            self.unwanted.then(|| "unwanted".to_owned())
        }
        fn is_drained(&mut self) -> Result<bool, String> {
            if self.fails { Err("failed".to_owned()) } else { Ok(self.drained) }
        }
        fn is_held(&self) -> bool {
            self.held
        }
        fn obstacle(&self) -> Option<String> {
            self.obstacle.then(|| "obstacle".to_owned())
        }
        fn lacks(&self) -> String {
            "two writes".to_owned()
        }
        fn is_attached(&self) -> bool {
            !self.detached
        }
        fn with_hosts(&self, members: Vec<String>) -> Vec<String> {
            members
        }
        fn is_shut(&self) -> bool {
            self.shut
        }
        fn is_answered(&mut self) -> Result<bool, LinkEnded> {
            Ok(self.answered)
        }
    }

    const DRAIN: Duration = Duration::from_secs(3);
    const OTHERS: Duration = Duration::from_secs(4);

    fn at(s: u64) -> MonoNanos {
        MonoNanos(s * 1_000_000_000)
    }

    fn begin(is_spread: bool) -> Handover {
        Handover::begin(1, is_spread, DRAIN, OTHERS, at(0))
    }

    fn drained() -> Fake {
        Fake { drained: true, ..Fake::default() }
    }

    fn is_back(step: &Step, why: &str) -> bool {
        matches!(step, Step::GoOn(text) if text.contains(why))
    }

    /// One that waits for the others, and where it hears of them.
    fn awaiting() -> (Handover, Arc<Agreement>) {
        let mut handover = begin(true);
        assert_eq!(handover.look(&mut drained(), at(1)), Step::Say(true));
        assert!(handover.is_awaiting());
        let agreement = handover.agreement().expect("others").clone();
        (handover, agreement)
    }

    #[test]
    fn a_host_that_is_alone_goes_over_when_it_is_drained() {
        let (mut handover, mut seen) = (begin(false), Fake { held: true, ..Fake::default() });
        assert_eq!(handover.look(&mut seen, at(0)), Step::Wait);
        seen.drained = true;
        assert_eq!(handover.look(&mut seen, at(1)), Step::Wait, "packets are held");
        seen.held = false;
        assert_eq!(handover.look(&mut seen, at(2)), Step::Record);
        assert_eq!(handover.recorded(Ok(())), Step::Shut);
        assert_eq!(handover.look(&mut seen, at(3)), Step::Wait, "not in force");
        seen.shut = true;
        assert_eq!(handover.look(&mut seen, at(4)), Step::GiveUp);
        assert_eq!(handover.look(&mut seen, at(5)), Step::Wait, "no answer");
        // From here on there is no way back.
        seen.unwanted = true;
        seen.answered = true;
        assert_eq!(handover.look(&mut seen, at(6)), Step::Over);
        assert_eq!(handover.problem(), None);
        let s = Duration::from_secs;
        assert_eq!(
            handover.took(),
            Took { drained: s(2), others: s(0), shut: s(2), gave_up: s(4) }
        );
    }

    #[test]
    fn before_it_is_drained_it_goes_on_for_any_reason() {
        let goes_on = |seen: Fake, s: u64, why: &str| {
            let step = begin(true).look(&mut seen.clone(), at(s));
            assert!(is_back(&step, why), "{seen:?} after {s} s: {step:?}");
        };
        goes_on(Fake { unwanted: true, ..Fake::default() }, 1, "unwanted");
        goes_on(Fake { fails: true, ..Fake::default() }, 1, "failed");
        goes_on(Fake { obstacle: true, ..drained() }, 1, "obstacle");
        goes_on(Fake::default(), 3, "two writes");
        assert_eq!(begin(true).look(&mut Fake::default(), at(2)), Step::Wait);
    }

    #[test]
    fn nobody_goes_over_before_all_are_ready() {
        let (mut handover, agreement) = awaiting();
        agreement.told("a", vec!["b".to_owned()]);
        assert_eq!(handover.look(&mut drained(), at(4)), Step::Wait);
        assert_eq!(handover.awaited(), ["b"]);
        agreement.told("a", Vec::new());
        assert_eq!(handover.look(&mut drained(), at(4)), Step::Record);
        assert_eq!(handover.took().others, Duration::from_secs(3));
    }

    #[test]
    fn it_is_taken_back_when_nobody_counts_on_it_any_more() {
        let (mut handover, agreement) = awaiting();
        agreement.told("a", vec!["b".to_owned()]);
        assert_eq!(handover.look(&mut drained(), at(5)), Step::Say(false));
        assert_eq!(handover.look(&mut drained(), at(6)), Step::Wait, "it may be too late");
        agreement.told("a", vec!["a".to_owned(), "b".to_owned()]);
        let step = handover.look(&mut drained(), at(6));
        assert!(is_back(&step, "b did not get ready within 4s"), "{step:?}");
    }

    #[test]
    fn it_is_too_late_to_take_it_back_when_all_were_ready() {
        let (mut handover, agreement) = awaiting();
        let mut seen = Fake { unwanted: true, ..drained() };
        assert_eq!(handover.look(&mut seen, at(1)), Step::Say(false));
        agreement.told("a", Vec::new());
        assert_eq!(handover.look(&mut seen, at(1)), Step::Record);
    }

    #[test]
    fn a_backup_that_cannot_be_asked_is_not_waited_for() {
        let (mut handover, _) = awaiting();
        let mut seen = Fake { unwanted: true, ..drained() };
        assert_eq!(handover.look(&mut seen, at(1)), Step::Say(false));
        assert_eq!(handover.look(&mut seen, at(10)), Step::Wait);
        let step = handover.look(&mut seen, at(11));
        assert!(is_back(&step, "could not be asked"), "{step:?}");
        let (mut handover, _) = awaiting();
        assert_eq!(handover.look(&mut seen, at(1)), Step::Say(false));
        seen.detached = true;
        let step = handover.look(&mut seen, at(1));
        assert!(is_back(&step, "could not be asked"), "{step:?}");
    }

    #[test]
    fn without_a_record_there_is_no_switch() {
        let (mut handover, agreement) = awaiting();
        agreement.told("a", Vec::new());
        assert_eq!(handover.look(&mut drained(), at(1)), Step::Record);
        let step = handover.recorded(Err("no space".to_owned()));
        assert!(is_back(&step, "no space. The other hosts have switched over"), "{step:?}");
    }

    #[test]
    fn a_gate_or_a_backup_that_does_not_answer_is_told() {
        let over = |seen: &mut Fake| {
            let mut handover = begin(false);
            assert_eq!(handover.look(seen, at(0)), Step::Record);
            assert_eq!(handover.recorded(Ok(())), Step::Shut);
            let step = handover.look(seen, at(9));
            assert_eq!(step, if seen.shut { Step::GiveUp } else { Step::Wait });
            assert_eq!(handover.look(seen, at(10)), Step::Over);
            handover.problem().expect("a problem").to_owned()
        };
        assert!(over(&mut drained()).contains("the lease is not given up"));
        let problem = over(&mut Fake { shut: true, ..drained() });
        assert!(problem.contains("told again"), "{problem}");
    }
}
