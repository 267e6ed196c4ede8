//! The cut: what a recovery would take now, and so what hosts are told as C (DESIGN 2.9, rules 1
//! and 2).
//!
//! What is durable is so for each writer by itself. The cut is the greatest part of it that
//! - is downward closed: with a record come all that it may depend on;
//! - has of a resync all or nothing: in the middle of one the disks are no state that they ever
//!   had.
//!
//! In the **vector form** a record names what it depends on. In the **HLC form** it does not: every
//! record that it may depend on has a smaller time, so the records up to the watermark, the least
//! time that every writer has reached, are closed.
//!
//! The cut only grows, and it is a function of the journal alone, so a restart finds at least the
//! cut that was told before. The fold goes up to it, too.

use crate::journal::{Standing, State};
use crate::planted::{self, Bug};
use std::collections::VecDeque;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form};
use tidelock_protocol::record::{Effect, Record};
use tidelock_protocol::vector::CountVector;

/// A record beyond the cut. In the vector form only those that depend on other writers.
#[derive(Clone, Debug)]
struct Waiting {
    seq: Seq,
    hlc: Hlc,
    deps: CountVector,
}

/// A resync that is not in the cut yet.
#[derive(Clone, Copy, Debug)]
struct Resync {
    /// The last seq before it.
    from: Seq,
    /// Its last record.
    done: Option<(Seq, Hlc)>,
}

#[derive(Clone, Debug, Default)]
struct Track {
    waiting: VecDeque<Waiting>,
    /// The time of the last record that does not wait any more.
    below: Hlc,
    resync: Option<Resync>,
    /// The end of an initial copy that is not in the cut yet.
    whole_at: Option<Seq>,
    removed: bool,
}

impl Track {
    /// The time that the writer has reached with this seq, in the HLC form.
    fn hlc_at(&self, seq: Seq) -> Hlc {
        let reached = self.waiting.partition_point(|w| w.seq <= seq);
        reached.checked_sub(1).map_or(self.below, |last| self.waiting[last].hlc)
    }
}

/// The cut of a group, and the records beyond it.
#[derive(Clone, Debug, Default)]
pub struct CutTracker {
    form: Form,
    tracks: Vec<Track>,
    cut: CountVector,
    watermark: Hlc,
}

impl CutTracker {
    /// Of a journal whose every record is in the cut.
    #[must_use]
    pub fn new(state: &State) -> Self {
        let mut tracker = Self::default();
        tracker.reshape(state);
        tracker
    }

    /// The group's writers or its form have changed; in the latter case every record is in the
    /// cut.
    pub fn reshape(&mut self, state: &State) {
        // What the guests of a recovered group write depends on nothing that is not there.
        let form = if state.recovered().is_some() { Form::Vector } else { state.form };
        self.tracks.resize_with(state.writers.len(), Track::default);
        for (track, writer) in self.tracks.iter_mut().zip(&state.writers) {
            track.removed = writer.standing == Standing::Removed;
            if form != self.form {
                track.waiting.clear();
            }
            if track.waiting.is_empty() {
                track.below = writer.hlc;
            }
        }
        self.form = form;
    }

    /// The next record of the journal, which is not void, and the state before it.
    pub fn record(&mut self, before: &State, record: &Record) {
        let i = record.writer.index();
        let (Some(track), Some(writer)) = (self.tracks.get_mut(i), before.writers.get(i)) else {
            return;
        };
        if writer.copy == CopyState::Resyncing && track.resync.is_none() {
            track.resync = Some(Resync { from: writer.committed, done: None });
        }
        if record.effect == Effect::CopyDone {
            match (&mut track.resync, writer.copy) {
                (Some(resync), CopyState::Resyncing) => {
                    resync.done = Some((record.seq, record.hlc));
                }
                (_, CopyState::Empty | CopyState::Partial) => track.whole_at = Some(record.seq),
                _ => {}
            }
        }
        if self.form == Form::Hlc || record.deps.entries().next().is_some() {
            let (seq, hlc, deps) = (record.seq, record.hlc, record.deps.clone());
            track.waiting.push_back(Waiting { seq, hlc, deps });
        }
    }

    /// The cut under what is committed for each writer by itself.
    pub fn settle(&mut self, committed: &CountVector) -> &CountVector {
        let mut cut = match self.form {
            Form::Vector => self.settle_vectors(committed),
            Form::Hlc => self.settle_times(committed),
        };
        if planted::is(Bug::CutOfEachMaximum) {
            cut.clone_from(committed);
        }
        for (i, track) in self.tracks.iter_mut().enumerate() {
            let have = cut.get(WriterId(i as u16));
            while let Some(first) = track.waiting.front().filter(|w| w.seq <= have) {
                track.below = first.hlc;
                track.waiting.pop_front();
            }
            track.resync = track.resync.filter(|r| r.done.is_none_or(|(done, _)| done > have));
            track.whole_at = track.whole_at.filter(|done| *done > have);
        }
        // C only grows, and so does this.
        self.cut.merge(&cut);
        &self.cut
    }

    fn settle_vectors(&self, committed: &CountVector) -> CountVector {
        let mut cut: Vec<Seq> =
            (0..self.tracks.len()).map(|i| committed.get(WriterId(i as u16))).collect();
        let is_there = |cut: &[Seq], writer: WriterId, seq| {
            let (Some(have), Some(track)) =
                (cut.get(writer.index()), self.tracks.get(writer.index()))
            else {
                return false;
            };
            *have >= seq || track.removed
        };
        // From above: take away what depends on what is not there, until nothing does.
        loop {
            let mut fell = false;
            for (i, track) in self.tracks.iter().enumerate() {
                let blocked = track.waiting.iter().find(|w| {
                    w.seq <= cut[i] && !w.deps.entries().all(|(of, seq)| is_there(&cut, of, seq))
                });
                if let Some(blocked) = blocked {
                    cut[i] = Seq(blocked.seq.0 - 1);
                    fell = true;
                }
                if let Some(Resync { from, done: Some((done, _)) }) = track.resync
                    && (from.next()..done).contains(&cut[i])
                {
                    cut[i] = from;
                    fell = true;
                }
            }
            if !fell {
                break;
            }
        }
        (0..).map(WriterId).zip(cut).collect()
    }

    fn settle_times(&mut self, committed: &CountVector) -> CountVector {
        let mut limit: Vec<Seq> =
            (0..self.tracks.len()).map(|i| committed.get(WriterId(i as u16))).collect();
        // From above, as with vectors: a resync is in only if every other writer has reached the
        // time of its end.
        let watermark = loop {
            let speaks = |track: &Track| {
                !track.waiting.is_empty() || !planted::is(Bug::WatermarkIgnoresIdle)
            };
            let reached = self.tracks.iter().zip(&limit);
            let reached = reached.filter(|(track, _)| !track.removed && speaks(track));
            let least = reached.map(|(track, seq)| track.hlc_at(*seq)).min().unwrap_or_default();
            let mut fell = false;
            for (track, limit) in self.tracks.iter().zip(&mut limit) {
                if let Some(Resync { from, done: Some((done, at)) }) = track.resync
                    && *limit >= done
                    && at > least
                {
                    *limit = from;
                    fell = true;
                }
            }
            if !fell {
                break least;
            }
        };
        // A writer that was added is behind at first; what was true stays true.
        self.watermark = self.watermark.max(watermark);
        let cut = self.tracks.iter().zip(limit).map(|(track, limit)| {
            let beyond = track.waiting.partition_point(|w| w.hlc <= self.watermark);
            let first = track.waiting.get(beyond);
            first.map_or(limit, |first| limit.min(Seq(first.seq.0 - 1)))
        });
        (0..).map(WriterId).zip(cut).collect()
    }

    /// The cut as last settled.
    #[must_use]
    pub fn cut(&self) -> &CountVector {
        &self.cut
    }

    /// Every record up to this time is in the cut; 0 in the vector form.
    #[must_use]
    pub fn watermark(&self) -> Hlc {
        self.watermark
    }

    /// The last seq before a resync of this writer that is not in the cut, if there is one.
    #[must_use]
    pub fn resync_from(&self, writer: WriterId) -> Option<Seq> {
        Some(self.tracks.get(writer.index())?.resync?.from)
    }

    /// The greatest seq of this writer that a record beyond the cut depends on.
    #[must_use]
    pub fn waited_for(&self, writer: WriterId) -> Seq {
        let waiting = self.tracks.iter().flat_map(|track| &track.waiting);
        waiting.map(|w| w.deps.get(writer)).max().unwrap_or_default()
    }

    /// Whether the end of its initial copy is still beyond the cut.
    #[must_use]
    pub fn is_copying(&self, writer: WriterId) -> bool {
        self.tracks.get(writer.index()).is_some_and(|track| track.whole_at.is_some())
    }

    /// Records that are kept because they are beyond the cut: a measure of memory.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.tracks.iter().map(|track| track.waiting.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Note, Shape};
    use proptest::prelude::*;
    use tidelock_protocol::hlc::HlcClock;
    use tidelock_protocol::ids::{DiskId, Epoch};

    fn record(writer: u16, seq: u64, deps: &[(u16, u64)]) -> Record {
        Record {
            writer: WriterId(writer),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(0),
            deps: deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect(),
            disk: DiskId(0),
            offset: 0,
            copy: false,
            effect: Effect::Zero { len_bytes: 1, no_hole: false },
        }
    }

    fn vector(seqs: &[u64]) -> CountVector {
        seqs.iter().enumerate().map(|(i, s)| (WriterId(i as u16), Seq(*s))).collect()
    }

    /// A journal in memory: the state, and the tracker that follows it.
    struct Journal {
        state: State,
        tracker: CutTracker,
    }

    impl Journal {
        fn new(writers: u16, form: Form) -> Self {
            let mut state = State::new(writers.into());
            let shape = Shape { writers, removed: Vec::new(), joining: false, form };
            state.apply_note(&Note::Shape(shape)).unwrap();
            let tracker = CutTracker::new(&state);
            Self { state, tracker }
        }

        fn add(&mut self, record: &Record) {
            self.tracker.record(&self.state, record);
            self.state.apply_record(record).unwrap();
        }

        fn done(&mut self, writer: u16, seq: u64, hlc: u64, deps: &[(u16, u64)]) {
            let hlc = Hlc(hlc);
            self.add(&Record {
                hlc,
                copy: true,
                effect: Effect::CopyDone,
                ..record(writer, seq, deps)
            });
        }

        fn at(&mut self, writer: u16, seq: u64, hlc: u64) {
            self.add(&Record { hlc: Hlc(hlc), ..record(writer, seq, &[]) });
        }

        fn resync(&mut self, writer: u16) {
            let (writer, copy) = (WriterId(writer), CopyState::Resyncing);
            self.state.apply_note(&Note::Copy { writer, copy }).unwrap();
        }

        fn remove(&mut self, writer: u16) {
            let shape = Shape {
                writers: self.state.writers.len() as u16,
                removed: vec![WriterId(writer)],
                joining: false,
                form: self.state.form,
            };
            self.state.apply_note(&Note::Shape(shape)).unwrap();
            self.tracker.reshape(&self.state);
        }

        fn cut(&mut self) -> CountVector {
            let committed = self.state.committed();
            self.tracker.settle(&committed).clone()
        }
    }

    #[test]
    fn a_record_waits_for_what_it_depends_on_and_takes_its_successors_along() {
        let mut t = CutTracker::new(&State::new(3));
        let state = State::new(3);
        t.record(&state, &record(0, 2, &[(1, 5)]));
        t.record(&state, &record(2, 1, &[(0, 2)]));
        assert_eq!(*t.settle(&vector(&[4, 4, 3])), vector(&[1, 4, 0]));
        assert_eq!(*t.settle(&vector(&[4, 5, 3])), vector(&[4, 5, 3]));
    }

    #[test]
    fn of_a_resync_all_is_in_the_cut_or_nothing() {
        for form in [Form::Vector, Form::Hlc] {
            let mut j = Journal::new(2, form);
            j.done(0, 1, 10, &[]);
            j.done(1, 1, 11, &[]);
            j.at(0, 2, 12);
            j.at(1, 2, 13);
            let before = j.cut();
            j.resync(0);
            j.at(0, 3, 20);
            assert_eq!(j.cut().get(WriterId(0)), before.get(WriterId(0)), "{form}: in the middle");
            // What it knew before its stop is beyond what the other has sent.
            j.done(0, 4, 30, &[(1, 4)]);
            j.at(0, 5, 31);
            j.at(1, 3, 25);
            assert_eq!(j.cut().get(WriterId(0)), before.get(WriterId(0)), "{form}: not closed");
            assert_eq!(j.tracker.resync_from(WriterId(0)), Some(Seq(2)));
            j.at(1, 4, 33);
            assert_eq!(j.cut().get(WriterId(0)), Seq(5), "{form}");
            assert_eq!(j.tracker.resync_from(WriterId(0)), None);
        }
    }

    #[test]
    fn two_resyncs_that_depend_on_each_other_end_together() {
        for form in [Form::Vector, Form::Hlc] {
            let mut j = Journal::new(2, form);
            j.done(0, 1, 10, &[]);
            j.done(1, 1, 11, &[]);
            let before = j.cut();
            j.resync(0);
            j.resync(1);
            j.at(0, 2, 20);
            j.at(1, 2, 21);
            // Each depends on the beginning of the other's.
            j.done(0, 3, 30, &[(1, 2)]);
            assert_eq!(j.cut(), before, "{form}");
            j.done(1, 3, 31, &[(0, 2)]);
            j.at(0, 4, 40);
            j.at(1, 4, 41);
            assert!(j.cut().covers(&vector(&[4, 3])), "{form}");
        }
    }

    #[test]
    fn a_writer_that_says_nothing_holds_the_watermark_until_an_idle_record() {
        let mut j = Journal::new(3, Form::Hlc);
        (0..3).for_each(|writer| j.done(writer, 1, 10 + u64::from(writer), &[]));
        j.at(0, 2, 50);
        j.at(1, 2, 60);
        assert_eq!(j.cut(), vector(&[1, 1, 1]));
        assert_eq!(j.tracker.watermark(), Hlc(12), "the third has said nothing since");
        j.add(&Record { hlc: Hlc(55), effect: Effect::Idle, ..record(2, 2, &[]) });
        assert_eq!((j.cut(), j.tracker.watermark()), (vector(&[2, 1, 1]), Hlc(50)));
    }

    #[test]
    fn who_was_removed_is_waited_for_no_more() {
        for form in [Form::Vector, Form::Hlc] {
            let mut j = Journal::new(2, form);
            j.done(0, 1, 10, &[]);
            j.done(1, 1, 11, &[]);
            j.add(&Record { hlc: Hlc(20), ..record(0, 2, &[(1, 7)]) });
            assert_eq!(j.cut().get(WriterId(0)), Seq(1), "{form}");
            j.remove(1);
            assert_eq!(j.cut().get(WriterId(0)), Seq(2), "{form}");
        }
    }

    /// A step of a history: who writes, and whether it has heard of everything before.
    type Steps = Vec<(u16, bool)>;

    /// The records of a history, each with what it really depends on: all or nothing of what was
    /// there, and its own earlier ones. Times follow the HLC's rules on clocks that differ.
    fn history(steps: &Steps, form: Form) -> Vec<(Record, CountVector)> {
        let mut clocks = [0, 1, 2].map(|_| HlcClock::default());
        let (mut have, mut knows) = (CountVector::new(), [0, 1, 2].map(|_| CountVector::new()));
        let (mut latest, mut all) = (Hlc(0), Vec::new());
        for (nth, (writer, hears)) in steps.iter().enumerate() {
            let i = usize::from(*writer);
            if *hears {
                knows[i].merge(&have);
                clocks[i].observe(latest);
            }
            let seq = have.get(WriterId(*writer)).next();
            // Writer 2's clock is far ahead.
            let hlc = clocks[i].tick(nth as u64 + if i == 2 { 20 } else { 0 });
            latest = latest.max(hlc);
            have.raise(WriterId(*writer), seq);
            let deps: Vec<_> = knows[i]
                .entries()
                .filter(|(w, _)| w.0 != *writer)
                .map(|(w, s)| (w.0, s.0))
                .collect();
            let known = deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect();
            let deps = if form == Form::Vector { &deps[..] } else { &[] };
            all.push((Record { hlc, ..record(*writer, seq.0, deps) }, known));
        }
        all
    }

    fn is_closed(all: &[(Record, CountVector)], cut: &CountVector) -> bool {
        all.iter().filter(|(r, _)| r.seq <= cut.get(r.writer)).all(|(_, deps)| cut.covers(deps))
    }

    fn steps() -> impl Strategy<Value = Steps> {
        prop::collection::vec((0u16..3, any::<bool>()), 1..40)
    }

    proptest! {
        /// Vectors, against the definition.
        #[test]
        fn equals_the_definition(
            steps in steps(),
            durable in prop::collection::vec(0u64..15, 3),
        ) {
            let all = history(&steps, Form::Vector);
            let mut j = Journal::new(3, Form::Vector);
            all.iter().for_each(|(record, _)| j.add(record));
            let committed: CountVector = (0..3)
                .map(|w| (WriterId(w), Seq(durable[usize::from(w)]).min(j.state.writers[usize::from(w)].seq)))
                .collect();
            let cut = j.tracker.settle(&committed).clone();
            prop_assert!(committed.covers(&cut));
            prop_assert!(is_closed(&all, &cut));
            // The greatest: the closed cuts below C have a least upper bound that is closed.
            for a in 0..=committed.get(WriterId(0)).0 {
                for b in 0..=committed.get(WriterId(1)).0 {
                    for c in 0..=committed.get(WriterId(2)).0 {
                        let other = vector(&[a, b, c]);
                        prop_assert!(!is_closed(&all, &other) || cut.covers(&other), "{} and {}", cut, other);
                    }
                }
            }
        }

        /// Either form: records arrive in any order that keeps each writer's own, the cut is
        /// closed under what each record really depends on, and it only grows. In the HLC form
        /// it has every record up to the watermark, and the watermark is what all have reached.
        #[test]
        fn every_cut_on_the_way_is_closed(
            steps in steps(),
            order in prop::collection::vec(0usize..3, 60),
            hlc: bool,
        ) {
            let form = if hlc { Form::Hlc } else { Form::Vector };
            let all = history(&steps, form);
            let mut streams: Vec<VecDeque<_>> = (0..3)
                .map(|w| all.iter().filter(|(r, _)| r.writer == WriterId(w)).map(|(r, _)| r).collect())
                .collect();
            let mut j = Journal::new(3, form);
            let mut last = CountVector::new();
            for pick in order.into_iter().chain((0..3).cycle().take(200)) {
                let Some(record) = streams[pick].pop_front() else { continue };
                j.add(record);
                let cut = j.cut();
                prop_assert!(cut.covers(&last) && j.state.committed().covers(&cut));
                prop_assert!(is_closed(&all, &cut), "{}", cut);
                if hlc {
                    let least = j.state.writers.iter().map(|w| w.hlc).min().unwrap();
                    prop_assert_eq!(j.tracker.watermark(), least);
                    let up_to = |r: &Record| r.hlc <= least;
                    prop_assert!(all.iter().all(|(r, _)| up_to(r) == (r.seq <= cut.get(r.writer))));
                }
                last = cut;
            }
            if !hlc {
                prop_assert_eq!(last, j.state.journaled());
            }
        }
    }
}
