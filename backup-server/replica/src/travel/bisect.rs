//! The search for the first bad instant, as `git bisect run` does it, over the times of the hybrid logical
//! clock instead of commits (Retroscope 1: "identify a clean snapshot").
//!
//! Times are positions from a good one to a bad one. Most of them name the same state as the one before: what
//! differs are the cuts, and each cut has a first time at which it is the answer, its *beginning*. So the caller
//! resolves a time, says where its cut begins, and tests the cut if it is a new one; times are halved until no
//! cut is left between the last good and the first bad. That is exact to one record, and costs one test for each
//! halving that meets a new cut.
//!
//! ```text
//!  next ──time──▶ resolved ──new──▶ tested(good | bad | skip) ──▶ next
//!                    └──seen──▶ next                                └──none left──▶ Outcome
//! ```
//!
//! Invariants: `low` was good, `high` was bad; nothing outside of them is asked for. Without skips the outcome's
//! two cuts are neighbours, whatever the check says in between (also if it is good again later). A search ends:
//! each step takes at least one time away.

use std::ops::RangeInclusive;

/// What the check says of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is still good.
    Good,
    /// It is bad already.
    Bad,
    /// It cannot be said: try another one.
    Skip,
}

impl Verdict {
    /// From a command's exit code, as `git bisect run` reads it: 0 good, 125 cannot say, 1 to 127 bad. `None`
    /// otherwise (128 and above, or killed by a signal): the search must end.
    #[must_use]
    pub fn of_exit_code(code: Option<i32>) -> Option<Self> {
        match code? {
            0 => Some(Self::Good),
            125 => Some(Self::Skip),
            1..=127 => Some(Self::Bad),
            _ => None,
        }
    }
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The last time that was good.
    pub good: u64,
    /// The beginning of the first cut that was bad.
    pub bad: u64,
    /// Beginnings of cuts in between of which nothing could be said: the first bad one may be one of them.
    pub skipped: Vec<u64>,
    /// Whether there may be cuts in between that were not tried: too many could not be said, or they are not
    /// complete yet.
    pub is_given_up: bool,
}

/// The search.
#[derive(Clone, Debug)]
pub struct Bisect {
    low: u64,
    high: u64,
    /// Times between `low` and `high` that need no look any more: sorted, apart from each other.
    seen: Vec<RangeInclusive<u64>>,
    skipped: Vec<u64>,
    skips_max: usize,
    skips: usize,
    is_open: bool,
}

impl Bisect {
    /// Between a time that is good and one that is bad and later. After so many skips it gives up.
    #[must_use]
    pub fn new(good: u64, bad: u64, skips_max: usize) -> Self {
        assert!(good < bad, "the good time must be before the bad one");
        let (seen, skipped) = (Vec::new(), Vec::new());
        Self { low: good, high: bad, seen, skipped, skips_max, skips: 0, is_open: false }
    }

    /// The time to look at next: the middle of the widest part that was not looked at. `None`: the search has
    /// ended.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        if self.skips > self.skips_max {
            return None;
        }
        let widest = self.gaps().max_by_key(|gap| gap.end() - gap.start())?;
        Some(widest.start() + (widest.end() - widest.start()) / 2)
    }

    /// The cut of a time that was asked for begins here. Whether it must be tested: if not, it was seen already.
    pub fn resolved(&mut self, time: u64, beginning: u64) -> bool {
        assert!(beginning <= time && self.low < time && time < self.high, "not what was asked for");
        let is_known =
            beginning <= self.low || self.seen.iter().any(|seen| seen.contains(&beginning));
        if is_known {
            // What is between is of the same cut.
            self.mark_seen(beginning, time);
        }
        !is_known
    }

    /// A cut that had to be tested was.
    pub fn tested(&mut self, time: u64, beginning: u64, verdict: Verdict) {
        match verdict {
            Verdict::Good => self.low = time,
            Verdict::Bad => {
                self.high = beginning;
                // What cannot be looked at is later.
                self.is_open = false;
            }
            Verdict::Skip => {
                self.skips += 1;
                self.skipped.push(beginning);
                self.mark_seen(beginning, time);
            }
        }
        let (low, high) = (self.low, self.high);
        self.skipped.retain(|at| low < *at && *at < high);
        self.seen.retain(|seen| *seen.end() > low && *seen.start() < high);
    }

    /// Times from here on cannot be looked at, but for the bad one: records may still arrive there.
    pub fn unknown_from(&mut self, time: u64) {
        self.is_open = true;
        self.mark_seen(time.min(self.high - 1), self.high - 1);
    }

    /// What is known, at the end or before it.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let mut skipped = self.skipped.clone();
        skipped.sort_unstable();
        let is_given_up = self.is_open || self.gaps().next().is_some();
        Outcome { good: self.low, bad: self.high, skipped, is_given_up }
    }

    fn gaps(&self) -> impl Iterator<Item = RangeInclusive<u64>> + '_ {
        let ends = self.seen.iter().map(|seen| (*seen.start(), *seen.end()));
        let mut from = self.low + 1;
        ends.chain([(self.high, self.high)]).filter_map(move |(start, end)| {
            let gap = from..=start.saturating_sub(1);
            from = from.max(end.saturating_add(1));
            (gap.start() <= gap.end()).then_some(gap)
        })
    }

    fn mark_seen(&mut self, start: u64, end: u64) {
        let start = start.max(self.low + 1);
        let at = self.seen.partition_point(|seen| seen.end().saturating_add(1) < start);
        let touching =
            self.seen[at..].partition_point(|seen| *seen.start() <= end.saturating_add(1));
        let merged = self.seen.drain(at..at + touching).fold(start..=end, |all, seen| {
            *all.start().min(seen.start())..=*all.end().max(seen.end())
        });
        self.seen.insert(at, merged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cuts by the times at which they begin, with what the check says of each. The first is good, the last bad.
    #[derive(Debug)]
    struct Past(Vec<(u64, Verdict)>);

    impl Past {
        fn index(&self, time: u64) -> usize {
            self.0.partition_point(|(beginning, _)| *beginning <= time) - 1
        }

        fn run(&self, mut bisect: Bisect) -> (Outcome, usize) {
            let mut tests = 0;
            let mut looks = 0;
            while let Some(time) = bisect.next() {
                looks += 1;
                assert!(looks < 100_000, "it does not end: {bisect:?}");
                let (beginning, verdict) = self.0[self.index(time)];
                if bisect.resolved(time, beginning) {
                    tests += 1;
                    bisect.tested(time, beginning, verdict);
                }
            }
            (bisect.outcome(), tests)
        }

        fn whole(&self, skips_max: usize) -> Bisect {
            Bisect::new(self.0[0].0, self.0.last().unwrap().0, skips_max)
        }
    }

    #[test]
    fn exit_codes_are_gits() {
        for (code, verdict) in [
            (Some(0), Some(Verdict::Good)),
            (Some(1), Some(Verdict::Bad)),
            (Some(124), Some(Verdict::Bad)),
            (Some(125), Some(Verdict::Skip)),
            (Some(126), Some(Verdict::Bad)),
            (Some(127), Some(Verdict::Bad)),
            (Some(128), None),
            (Some(255), None),
            (None, None),
        ] {
            assert_eq!(Verdict::of_exit_code(code), verdict, "{code:?}");
        }
    }

    #[test]
    fn neighbours_need_no_test_and_one_between_needs_one() {
        let past = Past(vec![(5, Verdict::Good), (6, Verdict::Bad)]);
        assert_eq!(past.run(past.whole(0)).1, 0);
        let past = Past(vec![(0, Verdict::Good), (77, Verdict::Good), (u64::MAX, Verdict::Bad)]);
        let (outcome, tests) = past.run(past.whole(0));
        assert_eq!((outcome.bad, tests), (u64::MAX, 1));
        assert!(outcome.good >= 77 && outcome.skipped.is_empty() && !outcome.is_given_up);
    }

    #[test]
    fn too_many_skips_end_it_with_what_is_known() {
        let cuts = (0..200).map(|n| (n * 10, Verdict::Skip));
        let mut past = Past(cuts.collect());
        past.0[0].1 = Verdict::Good;
        past.0[199].1 = Verdict::Bad;
        let (outcome, tests) = past.run(past.whole(7));
        assert_eq!(tests, 8);
        assert!(outcome.is_given_up && outcome.skipped.len() == 8);
        assert_eq!((outcome.good, outcome.bad), (0, 1990));
    }

    #[test]
    fn what_is_not_complete_yet_is_left_out_and_said() {
        let past = Past(vec![(0, Verdict::Good), (40, Verdict::Good), (1000, Verdict::Bad)]);
        let mut bisect = past.whole(0);
        while let Some(time) = bisect.next() {
            if time > 100 {
                bisect.unknown_from(101);
            } else if bisect.resolved(time, past.0[past.index(time)].0) {
                bisect.tested(time, 40, Verdict::Good);
            }
        }
        let outcome = bisect.outcome();
        assert_eq!((outcome.good, outcome.bad, outcome.is_given_up), (50, 1000, true));
        // A bad one before it makes it exact again.
        let mut bisect = past.whole(0);
        bisect.unknown_from(101);
        bisect.tested(50, 50, Verdict::Bad);
        bisect.tested(49, 40, Verdict::Good);
        assert_eq!((bisect.next(), bisect.outcome().is_given_up), (None, false));
    }

    fn any_past() -> impl Strategy<Value = Past> {
        let verdict = prop_oneof![
            4 => Just(Verdict::Good), 4 => Just(Verdict::Bad), 1 => Just(Verdict::Skip)
        ];
        let between = prop::collection::vec((1u64..5000, verdict), 0..60);
        (0u64..1000, between, 1u64..5000).prop_map(|(first, between, last)| {
            let mut cuts = vec![(first, Verdict::Good)];
            for (gap, verdict) in between {
                cuts.push((cuts.last().unwrap().0 + gap, verdict));
            }
            cuts.push((cuts.last().unwrap().0 + last, Verdict::Bad));
            Past(cuts)
        })
    }

    proptest! {
        /// Whatever the check says, also non-monotone: the outcome is a change from good to bad with nothing
        /// but skipped cuts in between.
        #[test]
        fn a_change_is_found_and_nothing_is_left_out(past in any_past()) {
            let (outcome, tests) = past.run(past.whole(usize::MAX));
            let (good, bad) = (past.index(outcome.good), past.index(outcome.bad));
            prop_assert!(!outcome.is_given_up);
            prop_assert_eq!(past.0[good].1, Verdict::Good);
            prop_assert_eq!(past.0[bad].1, Verdict::Bad);
            prop_assert_eq!(past.0[bad].0, outcome.bad, "the bad cut's beginning");
            let between = &past.0[good + 1..bad];
            prop_assert!(between.iter().all(|(_, verdict)| *verdict == Verdict::Skip));
            let beginnings: Vec<_> = between.iter().map(|(at, _)| *at).collect();
            prop_assert_eq!(outcome.skipped, beginnings);
            prop_assert!(tests < past.0.len(), "no cut is tested twice");
        }

        /// A check that changes once: the oracle is a look at each cut.
        #[test]
        fn the_first_bad_cut_is_found_in_few_tests(mut past in any_past(), first in any::<prop::sample::Index>()) {
            let first = 1 + first.index(past.0.len() - 1);
            for (n, cut) in past.0.iter_mut().enumerate() {
                cut.1 = if n < first { Verdict::Good } else { Verdict::Bad };
            }
            let (outcome, tests) = past.run(past.whole(0));
            prop_assert_eq!(outcome.bad, past.0[first].0);
            prop_assert_eq!(past.index(outcome.good), first - 1);
            let span = past.0.last().unwrap().0 - past.0[0].0;
            prop_assert!(tests <= 1 + span.ilog2() as usize, "{} tests of {} times", tests, span);
        }
    }
}
