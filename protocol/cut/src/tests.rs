//! Cuts of a few records, and of random histories against the definition.

use super::*;
use proptest::prelude::*;
use tidelock_protocol::hlc::HlcClock;
use tidelock_protocol::ids::{DiskId, Epoch};
use tidelock_protocol::record::{DiskChange, Effect};

fn record(writer: u16, seq: u64, deps: &[(u16, u64)]) -> Record {
    Record {
        writer: WriterId(writer),
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(0),
        deps: deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect(),
        body: DiskChange {
            disk: DiskId(0),
            offset: 0,
            copy: false,
            flushed: false,
            effect: Effect::Zero { len_bytes: 1, no_hole: false },
        },
    }
}

fn vector(seqs: &[u64]) -> CountVector {
    seqs.iter().enumerate().map(|(i, s)| (WriterId(i as u16), Seq(*s))).collect()
}

/// The writers of a group, after its last record.
struct State {
    form: Form,
    writers: Vec<(Seq, Writer)>,
}

impl Writers for State {
    fn form(&self) -> Form {
        self.form
    }

    fn count(&self) -> usize {
        self.writers.len()
    }

    fn get(&self, writer: WriterId) -> Option<Writer> {
        self.writers.get(writer.index()).map(|(_, writer)| *writer)
    }
}

impl State {
    fn new(writers: usize, form: Form) -> Self {
        let new = Writer {
            committed: Seq::ZERO,
            hlc: Hlc(0),
            copy: CopyState::Empty,
            is_joining: false,
            is_removed: false,
        };
        Self { form, writers: vec![(Seq::ZERO, new); writers] }
    }

    fn apply(&mut self, record: &Record) {
        let (seq, writer) = &mut self.writers[record.writer.index()];
        assert_eq!(record.seq, seq.next());
        *seq = record.seq;
        writer.hlc = record.hlc;
        if record.role() == Role::CopyDone {
            writer.copy = CopyState::Whole;
        } else if writer.copy == CopyState::Empty {
            writer.copy = CopyState::Partial;
        }
        if writer.copy != CopyState::Resyncing {
            writer.committed = record.seq;
        }
    }

    fn committed(&self) -> CountVector {
        (0..).map(WriterId).zip(self.writers.iter().map(|(_, writer)| writer.committed)).collect()
    }

    fn received(&self) -> CountVector {
        (0..).map(WriterId).zip(self.writers.iter().map(|(seq, _)| *seq)).collect()
    }
}

/// Records as they come: the state, and the tracker that follows it.
struct Journal {
    state: State,
    tracker: CutTracker,
}

impl Journal {
    fn new(writers: u16, form: Form) -> Self {
        let state = State::new(writers.into(), form);
        let tracker = CutTracker::new(&state);
        Self { state, tracker }
    }

    fn add(&mut self, record: &Record) {
        self.tracker.record(&self.state, record);
        self.state.apply(record);
    }

    fn done(&mut self, writer: u16, seq: u64, hlc: u64, deps: &[(u16, u64)]) {
        let hlc = Hlc(hlc);
        self.add(&Record {
            hlc,
            body: DiskChange {
                copy: true,
                flushed: false,
                effect: Effect::CopyDone,
                ..record(writer, seq, deps).body
            },
            ..record(writer, seq, deps)
        });
    }

    fn at(&mut self, writer: u16, seq: u64, hlc: u64) {
        self.add(&Record { hlc: Hlc(hlc), ..record(writer, seq, &[]) });
    }

    fn resync(&mut self, writer: u16) {
        let (_, writer) = &mut self.state.writers[usize::from(writer)];
        assert_eq!(writer.copy, CopyState::Whole);
        writer.copy = CopyState::Resyncing;
    }

    fn remove(&mut self, writer: u16) {
        self.state.writers[usize::from(writer)].1.is_removed = true;
        self.tracker.reshape(&self.state);
    }

    fn cut(&mut self) -> CountVector {
        let committed = self.state.committed();
        self.tracker.settle(&committed).clone()
    }
}

#[test]
fn a_record_waits_for_what_it_depends_on_and_takes_its_successors_along() {
    let state = State::new(3, Form::Vector);
    let mut t = CutTracker::new(&state);
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
fn a_resync_that_is_in_the_cut_stays_there_when_the_next_one_has_ended_too() {
    for form in [Form::Vector, Form::Hlc] {
        // With the cut settled in between, as a server does, and only at the end, as one that has
        // been restarted.
        let cuts = [true, false].map(|settles| {
            let mut j = Journal::new(2, form);
            j.done(0, 1, 10, &[]);
            j.done(1, 1, 11, &[]);
            j.resync(0);
            j.at(0, 2, 20);
            // It waits for the other one, still when the next resync begins.
            j.done(0, 3, 21, &[(1, 2)]);
            assert!(!settles || j.cut().get(WriterId(0)) == Seq(1), "{form}");
            j.resync(0);
            j.at(0, 4, 30);
            j.at(1, 2, 31);
            assert!(!settles || j.cut().get(WriterId(0)) == Seq(3), "{form}");
            j.done(0, 5, 40, &[(1, 3)]);
            j.cut()
        });
        assert_eq!(cuts[0].get(WriterId(0)), Seq(3), "{form}");
        assert_eq!(cuts[0], cuts[1], "{form}");
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
    j.add(&Record {
        hlc: Hlc(55),
        body: DiskChange { effect: Effect::Idle, ..record(2, 2, &[]).body },
        ..record(2, 2, &[])
    });
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

/// Records of a writer at 5,000 each second, not evenly, while another one says nothing.
fn a_long_wait(j: &mut Journal, writer: u16, of: u64, records: u64) {
    let mut clock = HlcClock::after(Hlc::new(1 << 40, 0));
    for nth in 0..records {
        let (ms, jitter) = ((1 << 40) + nth / 5, nth * nth % 7 / 5);
        let hlc = clock.tick(ms + jitter);
        let deps = [(of as u16, nth + 2)];
        let deps = if j.state.form == Form::Vector { &deps[..] } else { &[] };
        j.add(&Record { hlc, ..record(writer, nth + 2, deps) });
    }
}

#[test]
fn what_waits_takes_little() {
    const RECORDS: u64 = 200_000;
    for (form, bytes_max) in [(Form::Hlc, 1.6), (Form::Vector, 48.0)] {
        let mut j = Journal::new(2, form);
        (0..2).for_each(|writer| j.done(writer, 1, 10, &[]));
        a_long_wait(&mut j, 0, 1, RECORDS);
        assert_eq!(j.cut().get(WriterId(0)), Seq(1));
        let bytes = j.tracker.bytes() as f64 / RECORDS as f64;
        println!("{form}: {bytes:.2} bytes for each record that waits");
        assert!(bytes < bytes_max, "{form}: {bytes}");
        // And the cut is exact when it moves.
        let (seq, at) = (Seq(RECORDS / 2), Hlc::new((1 << 40) + RECORDS / 10, 0));
        match form {
            Form::Hlc => j.at(1, 2, at.0),
            Form::Vector => {
                (2..=seq.0).for_each(|seq| j.at(1, seq, 0));
            }
        }
        let reached = j.cut().get(WriterId(0));
        let is_near = reached.0.abs_diff(seq.0) < 20;
        assert!(is_near && (form == Form::Hlc || reached == seq), "{form}: {reached}");
    }
}

#[test]
fn what_waits_is_not_looked_through_again_and_again() {
    // The first waits for the third, whose first record waits for the second, which says nothing.
    const RECORDS: u64 = 1000;
    let mut j = Journal::new(3, Form::Vector);
    (0..3).for_each(|writer| j.done(writer, 1, 10, &[]));
    j.add(&record(2, 2, &[(1, 2)]));
    (3..RECORDS).for_each(|seq| j.add(&record(2, seq, &[])));
    a_long_wait(&mut j, 0, 2, RECORDS - 2);
    j.tracker.looks.set(0);
    assert_eq!(j.cut(), vector(&[1, 1, 1]));
    assert_eq!(j.tracker.waited_for(WriterId(1)), Seq(2));
    assert!(j.tracker.looks.get() < 20, "{} looks", j.tracker.looks.get());
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
        let deps: Vec<_> =
            knows[i].entries().filter(|(w, _)| w.0 != *writer).map(|(w, s)| (w.0, s.0)).collect();
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
            .map(|w| (WriterId(w), Seq(durable[usize::from(w)]).min(j.state.writers[usize::from(w)].0)))
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
                let least = j.state.writers.iter().map(|(_, w)| w.hlc).min().unwrap();
                prop_assert_eq!(j.tracker.watermark(), least);
                let up_to = |r: &Record| r.hlc <= least;
                prop_assert!(all.iter().all(|(r, _)| up_to(r) == (r.seq <= cut.get(r.writer))));
            }
            last = cut;
        }
        if !hlc {
            prop_assert_eq!(last, j.state.received());
        }
    }
}
