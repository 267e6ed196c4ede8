//! The guard: answers of the source and the time in, believed or not believed out.
//!
//! ```text
//!               asked, answered, no answer
//!                          │
//!   source ──► window of samples ──► ε ──► ε ≤ max_clock_error? ──► Believed { ε } | NotBelieved { why }
//!                          │          ▲
//!                 contradictions?     └── reading of the wall clock and the raw clock, now
//! ```
//!
//! **Fails closed.** Without an answer, without a locked servo, without `samples_min` samples over `settle_ns` since the
//! servo locked: not believed. The window is emptied when the servo loses its lock, so samples of a clock that was being
//! pulled in count for nothing. A servo that steps the clock by a sync that was queued looks like one that sets it right,
//! until the delay has been measured anew: hence the time to settle, in which `ptp4l` measures the delay ten times. No
//! other hysteresis is needed: samples leave the window by age.
//!
//! **Steps and drift.** A verdict is for one reading of the clocks, and [`ClockGuard::verdict`] is a few additions, so
//! take it *for each stamp*. A step of the wall clock after the last sample is then part of ε before the first stamp
//! after it is believed: a step beyond `max_clock_error` is noticed before any stamp of it is believed, a smaller one
//! makes ε larger by itself. Whoever keeps a verdict for a while notices a step at the next verdict.
//!
//! A source may go on saying that all is well: it measures another clock than the wall clock, or it is stuck. So a
//! sample must not *contradict* an earlier one. Each sample says that the error of the clock was at most |offset| +
//! delay + dispersion. Between two samples the wall clock can therefore have moved against the raw clock by the sum of
//! both, and by what the raw clock drifts. If it moved further, one of the two is wrong, and the clock is not believed
//! until a sample agrees again with the older one: when the clock was set back; or when so much time has passed that
//! the raw clock may have drifted as far (with 200 ppm, 50 s for 10 ms, 208 days for 1 h); or when the operator says
//! so ([`ClockGuard::forget`]). Every sample of the window is compared, so a drift beyond `drift_ppm` shows as well.
//!
//! A *master* that is stepped is noticed in the same way. Its first sample says that the clock is wrong by the step, and
//! the clock has not moved: such a sample must not explain that the servo takes the clock there. So the clock must also
//! have moved by the difference of the two *offsets*, up to the delays, the drift and `max_clock_error`, which is for
//! syncs that were queued. Hosts that follow a stepped master are then believed when the raw clock allows it, not when
//! each of them is locked again: a master that goes back would stamp later writes before earlier ones.

use crate::bound::{ErrorBound, drift_ns};
use crate::reading::Reading;
use crate::sample::{Answer, MasterId, NoSample, Sample, Servo, Taken};
use serde::Serialize;
use std::collections::VecDeque;

/// Samples of a window, at most; older ones leave it early.
const SAMPLES_MAX: usize = 512;

/// The clock that the source measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampled {
    /// The wall clock of this host.
    ThisClock,
    /// Another one, such as that of a network card, which something else copies into the wall clock.
    Other {
        /// Distance between the two, at most: the operator's word.
        hop_ns: u64,
    },
}

/// Limits of belief.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// ε up to which the clock is believed.
    pub max_clock_error_ns: u64,
    /// Greatest frequency error of the raw clock.
    pub drift_ppm: u32,
    /// Age up to which a sample counts for the maxima of ε.
    pub window_ns: u64,
    /// Samples since the servo locked, at least.
    pub samples_min: usize,
    /// Time over which there were samples since the servo locked, at least.
    pub settle_ns: u64,
    /// Time without an answer after which the source is gone.
    pub silence_max_ns: u64,
    /// The clock that the source measures.
    pub sampled: Sampled,
}

impl Limits {
    /// Usual limits, with this greatest ε.
    #[must_use]
    pub fn new(max_clock_error_ns: u64) -> Self {
        Self {
            max_clock_error_ns,
            drift_ppm: 200,
            window_ns: 30_000_000_000,
            samples_min: 4,
            settle_ns: 10_000_000_000,
            silence_max_ns: 5_000_000_000,
            sampled: Sampled::ThisClock,
        }
    }

    fn hop_ns(&self) -> u64 {
        match self.sampled {
            Sampled::ThisClock => 0,
            Sampled::Other { hop_ns } => hop_ns,
        }
    }
}

/// Judgement of a stamp of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// The wall clock is wrong by ε at most.
    Believed {
        /// ε.
        epsilon_ns: u64,
    },
    /// The error of the clock is unknown, or too large.
    NotBelieved {
        /// The reason.
        #[serde(flatten)]
        why: Why,
    },
}

impl Verdict {
    /// ε, if the clock is believed.
    #[must_use]
    pub fn epsilon_ns(&self) -> Option<u64> {
        match *self {
            Verdict::Believed { epsilon_ns } => Some(epsilon_ns),
            Verdict::NotBelieved { .. } => None,
        }
    }
}

/// Reason why the clock is not believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Why {
    /// No answer yet.
    #[error("no source of time has answered yet")]
    NoAnswerYet,
    /// No answer any more.
    #[error("the source of time has not answered for {for_ns} ns")]
    SourceGone {
        /// Since the last answer.
        for_ns: u64,
    },
    /// The clock follows nobody.
    #[error("the clock follows no master")]
    NoMaster,
    /// The clock is being pulled to its master.
    #[error("the servo of the clock is not locked")]
    NotLocked,
    /// The clock moved, and the source's samples do not say so: somebody stepped the clock, or the master's.
    #[error("the clock moved by {by_ns} ns more than its source says")]
    ClockMoved {
        /// Since the last sample, or since the sample that is contradicted.
        by_ns: i64,
    },
    /// The source measures another clock than the wall clock.
    #[error("the source measures another clock, which is {apart_ns} ns from the wall clock")]
    OtherClock {
        /// Measured clock less wall clock, about.
        apart_ns: i64,
    },
    /// The source measures the clock of a network card, and nothing says what the wall clock has to do with it.
    #[error(
        "the source measures the clock of a network card, and nothing says how far the wall clock is from it"
    )]
    CardClock,
    /// The source is locked, and has no sample.
    #[error("the source has no sample: {reason:?}")]
    NoSample {
        /// The source's reason.
        reason: NoSample,
    },
    /// Not enough samples since the servo locked.
    #[error("{have} of {need} samples since the servo locked")]
    TooFewSamples {
        /// Number of samples.
        have: usize,
        /// Number that is needed.
        need: usize,
    },
    /// Enough samples, in too short a time since the servo locked.
    #[error("the servo of the clock has been locked for {for_ns} of {need_ns} ns")]
    Settling {
        /// Time from the first sample to the last.
        for_ns: u64,
        /// Time that is needed.
        need_ns: u64,
    },
    /// ε is known, and too large.
    #[error("the clock may be wrong by {epsilon_ns} ns, more than {max_ns} ns")]
    AboveMax {
        /// ε.
        epsilon_ns: u64,
        /// `max_clock_error`.
        max_ns: u64,
    },
}

/// State of the guard, for operators.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Status {
    /// Judgement of the clock.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// State of the servo.
    pub servo: Servo,
    /// ε by its terms, also where it is too large; `None` without a sample.
    pub bound: Option<ErrorBound>,
    /// Offset of the last sample.
    pub offset_ns: Option<i64>,
    /// Age of the last sample, at most.
    pub age_ns: Option<u64>,
    /// Samples in the window.
    pub samples: usize,
    /// The grandmaster.
    pub master: Option<MasterId>,
    /// Samples that contradicted an earlier one, since the start.
    pub contradictions: u64,
}

/// A sample, and between which readings it was taken.
#[derive(Clone, Copy, Debug)]
struct Entry {
    sample: Sample,
    /// The last look that still had the sample before.
    after: Reading,
    /// The first look that had this one.
    seen: Reading,
}

impl Entry {
    /// Error of the clock at this sample, at most.
    fn error_ns(&self, hop_ns: u64) -> u64 {
        let Sample { offset_ns, delay_ns, dispersion_ns, .. } = self.sample;
        let terms = [offset_ns.unsigned_abs(), delay_ns, dispersion_ns, hop_ns];
        terms.into_iter().fold(0, u64::saturating_add)
    }

    /// Error of what this sample measured, at most: nobody knows the delay of a sync in one direction.
    fn uncertainty_ns(&self, hop_ns: u64) -> u64 {
        [self.sample.delay_ns, self.sample.dispersion_ns, hop_ns]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// Distance by which the clock moved further since an earlier sample than the two samples say, if it cannot have.
    fn contradicts(&self, earlier: &Entry, limits: &Limits) -> Option<i64> {
        let hop_ns = limits.hop_ns();
        let drifted = [
            drift_ns(self.seen.since(&earlier.after), limits.drift_ppm),
            self.seen.slop_with(&earlier.seen),
        ];
        let within =
            |terms: [u64; 3]| terms.into_iter().chain(drifted).fold(0, u64::saturating_add);
        let moved = self.seen.moved_since(&earlier.seen);
        if moved.unsigned_abs() > within([self.error_ns(hop_ns), earlier.error_ns(hop_ns), 0]) {
            return Some(moved);
        }
        let beyond = self.moved_beyond(earlier);
        let uncertain = [self.uncertainty_ns(hop_ns), earlier.uncertainty_ns(hop_ns)];
        let allowed = within([uncertain[0], uncertain[1], limits.max_clock_error_ns]);
        (beyond.unsigned_abs() > allowed).then_some(beyond)
    }

    /// Distance by which the clock moved further since an earlier sample than the offsets of both say, at least: each
    /// was measured between two looks.
    fn moved_beyond(&self, earlier: &Entry) -> i64 {
        let told = self.sample.offset_ns.saturating_sub(earlier.sample.offset_ns);
        let (mut low, mut high) = (i64::MAX, i64::MIN);
        for from in [&earlier.after, &earlier.seen] {
            for to in [&self.after, &self.seen] {
                let moved = to.moved_since(from);
                (low, high) = (low.min(moved), high.max(moved));
            }
        }
        told.clamp(low, high).saturating_sub(told)
    }
}

/// Sample of the last look, by which the next look knows a new one.
#[derive(Clone, Copy, Debug)]
struct LastLook {
    /// Time of the measured clock at the sample.
    taken_ns: i64,
    /// The moment before the source was asked: the next sample is younger.
    asked: Reading,
}

/// A contradiction that stands.
#[derive(Clone, Copy, Debug)]
struct Distrust {
    /// The last sample that is trusted.
    trusted: Entry,
    moved_ns: i64,
}

/// Follows one source of time.
#[derive(Clone, Debug)]
pub struct ClockGuard {
    limits: Limits,
    servo: Servo,
    /// The last look with an answer.
    answered: Option<Reading>,
    last: Option<LastLook>,
    window: VecDeque<Entry>,
    /// The look that had the first sample since the window was empty.
    begun: Reading,
    /// ε as of the last sample of the window.
    at_sample: ErrorBound,
    /// The last sample, also of a window that was emptied.
    trusted: Option<Entry>,
    distrust: Option<Distrust>,
    /// Distance of a measured clock that is not the wall clock.
    apart_ns: Option<i64>,
    /// True if the last sample is of a network card's clock.
    is_card_clock: bool,
    /// Reason of the last answer without a sample.
    no_sample: Option<NoSample>,
    master: Option<MasterId>,
    contradictions: u64,
}

impl ClockGuard {
    /// A guard that knows nothing and believes nothing.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            servo: Servo::Unknown,
            answered: None,
            last: None,
            window: VecDeque::new(),
            begun: Reading::default(),
            at_sample: ErrorBound::default(),
            trusted: None,
            distrust: None,
            apart_ns: None,
            is_card_clock: false,
            no_sample: None,
            master: None,
            contradictions: 0,
        }
    }

    /// The source has answered.
    ///
    /// `asked` was read before the question was sent, `answered` after the answer had come.
    pub fn on_answer(&mut self, asked: Reading, answered: Reading, answer: &Answer) {
        self.answered = Some(answered);
        self.servo = answer.servo;
        self.no_sample = answer.sample.err();
        let sample = answer.sample.ok();
        let after = sample.and_then(|sample| self.new_sample(&sample, asked));
        if self.servo != Servo::Locked {
            self.window.clear();
            return;
        }
        let (Some(sample), Some(after)) = (sample, after) else { return };
        self.add(Entry { sample, after, seen: answered });
    }

    /// Reading after which a sample was taken, if it is new and that is known.
    fn new_sample(&mut self, sample: &Sample, asked: Reading) -> Option<Reading> {
        let (Taken::At(taken_ns) | Taken::OnCard(taken_ns)) = sample.taken else {
            return Some(asked);
        };
        let before = self.last.replace(LastLook { taken_ns, asked })?;
        (before.taken_ns != taken_ns).then_some(before.asked)
    }

    fn add(&mut self, entry: Entry) {
        if self.master != entry.sample.master {
            // Another master may have another time, and the samples before say nothing of it. A clock that moved
            // without a reason before has still to be explained.
            self.master = entry.sample.master;
            self.window.clear();
            self.trusted = None;
        }
        self.apart_ns = self.apart_ns(&entry);
        self.is_card_clock = matches!(entry.sample.taken, Taken::OnCard(_));
        if self.is_other_clock() {
            self.window.clear();
            return;
        }
        if let Some(distrust) = &mut self.distrust {
            if let Some(moved_ns) = entry.contradicts(&distrust.trusted, &self.limits) {
                distrust.moved_ns = moved_ns;
                return;
            }
            self.distrust = None;
        }
        // The youngest of those that are contradicted: it allows the least drift.
        let mut known = self.trusted.iter().chain(self.window.iter().rev());
        let contradicted =
            known.find_map(|earlier| Some((*earlier, entry.contradicts(earlier, &self.limits)?)));
        if let Some((trusted, moved_ns)) = contradicted {
            self.distrust = Some(Distrust { trusted, moved_ns });
            self.contradictions += 1;
            self.window.clear();
            return;
        }
        if self.window.is_empty() {
            self.begun = entry.seen;
        }
        self.trusted = Some(entry);
        self.window.push_back(entry);
        self.prune(&entry.seen);
        self.at_sample = self.bound_at_sample();
    }

    /// True if the source measures another clock, and nobody has said how far it is from the wall clock.
    fn is_other_clock(&self) -> bool {
        let is_card = self.is_card_clock && self.limits.sampled == Sampled::ThisClock;
        self.apart_ns.is_some() || is_card
    }

    /// Distance between the measured clock and the wall clock, if they are not the same: a sample was taken between
    /// two looks, and so is what the clock showed then.
    fn apart_ns(&self, entry: &Entry) -> Option<i64> {
        let (Sampled::ThisClock, Taken::At(taken_ns)) = (self.limits.sampled, entry.sample.taken)
        else {
            return None;
        };
        // The clock may have been stepped between the two looks, before or after the sample: that shows elsewhere.
        let elapsed = entry.seen.since(&entry.after);
        let low = entry.after.wall_ns.min(entry.seen.wall_ns.saturating_sub_unsigned(elapsed));
        let high = entry.seen.wall_ns.max(entry.after.wall_ns.saturating_add_unsigned(elapsed));
        let apart = taken_ns.saturating_sub(taken_ns.clamp(low, high));
        (apart.unsigned_abs() > self.limits.max_clock_error_ns).then_some(apart)
    }

    fn prune(&mut self, now: &Reading) {
        while self.window.len() > SAMPLES_MAX.max(self.limits.samples_min) {
            self.window.pop_front();
        }
        while self.window.len() > self.limits.samples_min
            && self.window.front().is_some_and(|e| now.since(&e.after) > self.limits.window_ns)
        {
            self.window.pop_front();
        }
    }

    /// The source has not answered, or with garbage.
    pub fn on_no_answer(&mut self, now: Reading) {
        let silent = self.answered.is_some_and(|at| now.since(&at) > self.limits.silence_max_ns);
        if silent {
            self.servo = Servo::Gone;
            self.window.clear();
        }
    }

    /// The operator knows why the clock has moved: the next samples begin anew.
    pub fn forget(&mut self) {
        self.distrust = None;
        self.trusted = None;
        self.window.clear();
    }

    /// Judges a stamp that is taken from this reading.
    #[must_use]
    pub fn verdict(&self, now: Reading) -> Verdict {
        match self.why_not(now) {
            Some(why) => Verdict::NotBelieved { why },
            None => self.judge(now),
        }
    }

    fn judge(&self, now: Reading) -> Verdict {
        let epsilon_ns = self.bound(now).map_or(u64::MAX, |bound| bound.total_ns());
        let max_ns = self.limits.max_clock_error_ns;
        if epsilon_ns <= max_ns {
            return Verdict::Believed { epsilon_ns };
        }
        let by_ns = self.window.back().map_or(0, |last| now.moved_since(&last.after));
        let is_step = by_ns.unsigned_abs() > max_ns;
        let above = Why::AboveMax { epsilon_ns, max_ns };
        Verdict::NotBelieved { why: if is_step { Why::ClockMoved { by_ns } } else { above } }
    }

    fn why_not(&self, now: Reading) -> Option<Why> {
        let Some(answered) = &self.answered else { return Some(Why::NoAnswerYet) };
        let for_ns = now.since(answered);
        if for_ns > self.limits.silence_max_ns {
            return Some(Why::SourceGone { for_ns });
        }
        match self.servo {
            Servo::Locked => {}
            Servo::Unknown | Servo::Gone => return Some(Why::SourceGone { for_ns }),
            Servo::NoMaster => return Some(Why::NoMaster),
            Servo::Locking => return Some(Why::NotLocked),
        }
        if let Some(apart_ns) = self.apart_ns {
            return Some(Why::OtherClock { apart_ns });
        }
        if self.is_other_clock() {
            return Some(Why::CardClock);
        }
        if let Some(Distrust { moved_ns, .. }) = self.distrust {
            return Some(Why::ClockMoved { by_ns: moved_ns });
        }
        if let Some(reason) = self.no_sample {
            return Some(Why::NoSample { reason });
        }
        let (have, need) = (self.window.len(), self.limits.samples_min.max(1));
        if have < need {
            return Some(Why::TooFewSamples { have, need });
        }
        let for_ns = self.window.back().map_or(0, |last| last.seen.since(&self.begun));
        let need_ns = self.limits.settle_ns;
        (for_ns < need_ns).then_some(Why::Settling { for_ns, need_ns })
    }

    /// ε for a reading; `None` without a sample.
    #[must_use]
    pub fn bound(&self, now: Reading) -> Option<ErrorBound> {
        let last = self.window.back()?;
        Some(ErrorBound {
            moved_ns: now.moved_since(&last.after).unsigned_abs(),
            drift_ns: drift_ns(now.since(&last.after), self.limits.drift_ppm),
            reading_ns: now.slop_with(&last.after),
            ..self.at_sample
        })
    }

    /// Distance by which the wall clock strayed from a straight line against the raw clock, from end to end.
    fn wander_ns(&self) -> u64 {
        let (Some(first), Some(last)) = (self.window.front(), self.window.back()) else { return 0 };
        let span = i128::from(last.seen.since(&first.seen)).max(1);
        let total = i128::from(last.seen.moved_since(&first.seen));
        let strayed = self.window.iter().map(|entry| {
            let straight = total * i128::from(entry.seen.since(&first.seen)) / span;
            i128::from(entry.seen.moved_since(&first.seen)) - straight
        });
        let (low, high) = strayed.fold((0, 0), |(low, high), at| (at.min(low), at.max(high)));
        u64::try_from(high - low).unwrap_or(u64::MAX)
    }

    /// The terms of ε that only a sample changes.
    fn bound_at_sample(&self) -> ErrorBound {
        let mut bound = ErrorBound { hop_ns: self.limits.hop_ns(), ..ErrorBound::default() };
        let (mut offset_change, mut delay_change) = (0, 0);
        let mut before: Option<&Sample> = None;
        for Entry { sample, .. } in &self.window {
            bound.offset_ns = bound.offset_ns.max(sample.offset_ns.unsigned_abs());
            bound.delay_ns = bound.delay_ns.max(sample.delay_ns);
            bound.dispersion_ns = sample.dispersion_ns;
            bound.grandmaster_ns = sample.master_error_ns.unwrap_or(0);
            if let Some(before) = before.replace(sample) {
                offset_change = offset_change.max(sample.offset_ns.abs_diff(before.offset_ns));
                delay_change = delay_change.max(sample.delay_ns.abs_diff(before.delay_ns));
            }
        }
        bound.variation_ns = offset_change.saturating_add(delay_change);
        bound.wander_ns = self.wander_ns();
        bound
    }

    /// State as of a reading.
    #[must_use]
    pub fn status(&self, now: Reading) -> Status {
        let last = self.window.back();
        let is_silent = matches!(self.why_not(now), Some(Why::SourceGone { .. }));
        Status {
            verdict: self.verdict(now),
            servo: if is_silent { Servo::Gone } else { self.servo },
            bound: self.bound(now),
            offset_ns: last.map(|entry| entry.sample.offset_ns),
            age_ns: last.map(|entry| now.since(&entry.after)),
            samples: self.window.len(),
            master: self.master,
            contradictions: self.contradictions,
        }
    }
}
