//! Random histories with crashes: nothing that was told is ever lost.

use super::*;

/// A step of a group's random life.
#[derive(Clone, Debug)]
enum Step {
    /// A writer writes; `true`: after it has heard of everything that was written.
    Write(u16, bool),
    /// So many of its records arrive.
    Arrive(u16, usize),
    Idle(u16),
    Flush,
    Fold,
    /// The server is killed and started again.
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u16..3, any::<bool>()).prop_map(|(w, hears)| Step::Write(w, hears)),
        6 => (0u16..3, 1usize..4).prop_map(|(w, n)| Step::Arrive(w, n)),
        1 => (0u16..3).prop_map(Step::Idle),
        3 => Just(Step::Flush),
        2 => Just(Step::Fold),
        1 => Just(Step::Reopen),
    ]
}

/// Three writers on three hosts, and what they really know of each other.
struct Life {
    shape: Shape,
    sent: [usize; 3],
    /// By writer: its records, each with all that it depends on.
    streams: [Vec<(Record, CountVector)>; 3],
    clocks: [HlcClock; 3],
    knows: [CountVector; 3],
    latest: Hlc,
    told: CountVector,
    told_watermark: Hlc,
}

impl Life {
    fn new(form: Form) -> Self {
        let mut life = Self {
            shape: Shape { writers: 3, form },
            sent: [0; 3],
            streams: Default::default(),
            clocks: Default::default(),
            knows: Default::default(),
            latest: Hlc(0),
            told: CountVector::new(),
            told_watermark: Hlc(0),
        };
        (0..3).for_each(|writer| life.push(writer, false, Effect::CopyDone));
        life
    }

    fn push(&mut self, writer: u16, hears: bool, effect: Effect) {
        let i = usize::from(writer);
        if hears {
            let all: CountVector = (0..3u16)
                .map(|w| (WriterId(w), Seq(self.streams[usize::from(w)].len() as u64)))
                .collect();
            self.knows[i].merge(&all);
            self.clocks[i].observe(self.latest);
        }
        let hlc = self.clocks[i].tick(self.streams[i].len() as u64 + 7 * u64::from(writer));
        self.latest = self.latest.max(hlc);
        let seq = self.streams[i].len() as u64 + 1;
        let known: Vec<_> = self.knows[i]
            .entries()
            .filter(|(w, _)| w.0 != writer)
            .map(|(w, s)| (w.0, s.0))
            .collect();
        let deps = if self.shape.form == Form::Vector { &known[..] } else { &[] };
        let copy = effect == Effect::CopyDone;
        let payload = record(writer, seq, hlc.0, deps);
        let record = match effect {
            Effect::Write(_) => payload,
            effect => Record { body: DiskChange { effect, copy, ..payload.body }, ..payload },
        };
        let known = known.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect();
        self.streams[i].push((record, known));
    }

    fn attach(&mut self, group: &mut Group<Memory>) -> Option<()> {
        for writer in 0..3u16 {
            let run = LastRun::Continues { from: Seq(1) };
            group.attach(at_ms(0), link(writer), &host(writer), &self.shape.writer(writer, 1, run));
            let said = told(&group.take_outputs(), link(writer));
            let attached = said.iter().find_map(|m| match m {
                Message::Attached(attached) => Some(attached.progress.durable),
                _ => None,
            });
            self.sent[usize::from(writer)] = attached?.0 as usize;
        }
        Some(())
    }

    fn listen(&mut self, group: &mut Group<Memory>) {
        let outputs = group.take_outputs();
        for writer in 0..3 {
            if let Some(progress) = progress(&told(&outputs, link(writer))) {
                self.told.merge(&progress.committed);
                self.told_watermark = self.told_watermark.max(progress.watermark);
            }
        }
    }

    fn run(&mut self, disk: &Memory, steps: &[Step]) -> Option<()> {
        let mut group = self.shape.create(disk)?;
        self.attach(&mut group)?;
        for step in steps {
            match step {
                Step::Write(writer, hears) => {
                    let effect = Effect::Write(Payload::new(vec![1].into()));
                    self.push(*writer, *hears, effect);
                }
                Step::Idle(writer) => self.push(*writer, true, Effect::Idle),
                Step::Arrive(writer, count) => {
                    let i = usize::from(*writer);
                    for _ in 0..*count {
                        let Some((record, _)) = self.streams[i].get(self.sent[i]) else { break };
                        send(&mut group, record.clone());
                        self.sent[i] += 1;
                    }
                }
                Step::Flush => {
                    group.flush();
                    self.listen(&mut group);
                }
                Step::Fold => {
                    if let Some(job) = group.fold_job(at_ms(0)) {
                        let cut = job.cut.clone();
                        self.check_closed(&cut);
                        let result = job.run();
                        group.fold_done(cut, result);
                    }
                }
                Step::Reopen => {
                    drop(group);
                    group = Group::open(disk.clone(), at_ms(0), options()).ok()??.0;
                    self.attach(&mut group)?;
                }
            }
            if group.broken().is_some() {
                return None;
            }
        }
        group.flush();
        self.listen(&mut group);
        Some(())
    }

    fn check_closed(&self, cut: &CountVector) {
        for (record, known) in self.streams.iter().flatten() {
            if record.seq <= cut.get(record.writer) {
                assert!(cut.covers(known), "{cut} has {} of {}", record.seq, record.writer);
            }
        }
    }

    /// Rules 1 and 2: what a recovery takes is closed under what really depends on what, and has
    /// all that any host was told.
    fn check(&self, disk: &Memory) {
        let Ok(Some((mut group, _))) = Group::open(disk.clone(), at_ms(0), options()) else {
            assert_eq!(self.told, CountVector::new());
            return;
        };
        if self.shape.form != group.state().form {
            assert_eq!(self.told, CountVector::new(), "before the first attachment was answered");
            return;
        }
        assert!(group.cut().covers(&self.told), "{} was told, {} is left", self.told, group.cut());
        assert!(group.cut.watermark() >= self.told_watermark);
        self.check_closed(&group.cut().clone());
        for (record, _) in self.streams.iter().flatten() {
            let is_in = record.seq <= group.cut().get(record.writer);
            assert!(is_in || record.hlc > self.told_watermark);
        }
        match group.recover(at_ms(0), true) {
            Ok(recovery) => {
                let cut = recovery.writers.iter().zip(0..).map(|(w, i)| (WriterId(i), w.recovered));
                let cut: CountVector = cut.collect();
                assert!(cut.covers(&self.told));
                self.check_closed(&cut);
            }
            Err(RecoverError::Initialising { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn whatever_happens_the_cut_is_closed_and_nothing_told_is_lost(
        steps in prop::collection::vec(step(), 1..80),
        at in 0u64..250,
        hlc: bool,
        seed: u64,
    ) {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let mut life = Life::new(if hlc { Form::Hlc } else { Form::Vector });
        life.run(&disk, &steps);
        let mut state = seed | 1;
        for threshold in [0, u64::MAX / 2, u64::MAX] {
            life.check(&disk.crash(&mut || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state < threshold
            }));
        }
    }
}
