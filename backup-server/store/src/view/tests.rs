//! Views through maps against arrays of bytes: random histories with several disks, extents that
//! overlap, recoveries, resyncs, folds, kills and power losses while indexes and maps are written.

use super::*;
use crate::damage::ImageDamage;
use crate::fold::FoldJob;
use crate::journal::{
    Compress, Compressed, EpochStart, IndexJob, Journal, Note, Options, Position,
    SEGMENT_HEADER_BYTES, SegmentHeader, State,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::message::CopyState;
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_storage::{Storage, StorageFile};

const SIZE: usize = 2048;
const KEYS: [(u16, u16); 4] = [(0, 0), (0, 1), (1, 0), (1, 1)];

fn key((writer, disk): (u16, u16)) -> DiskKey {
    DiskKey { writer: WriterId(writer), disk: DiskId(disk) }
}

type Bytes = BTreeMap<DiskKey, Vec<u8>>;

/// A record that counts, and where it is.
#[derive(Clone)]
struct Kept {
    record: Record,
    segment: u64,
}

fn apply(disks: &mut Bytes, record: &Record) {
    let Some(disk) = disks.get_mut(&DiskKey::of(record)) else { return };
    let part = &mut disk[record.body.offset as usize..][..record.body.len_bytes() as usize];
    match &record.body.effect {
        Effect::Write(payload) => part.copy_from_slice(payload.data()),
        _ => part.fill(0),
    }
}

fn empty() -> Bytes {
    KEYS.iter().map(|k| (key(*k), vec![0; SIZE])).collect()
}

/// A view that stays open, and what it must show.
struct Open {
    overlay: SharedOverlay<MemoryFile>,
    expected: Bytes,
    /// A fold must not pass this segment.
    beyond: u64,
}

struct World {
    disk: Memory,
    journal: Journal<Memory>,
    images: BTreeMap<DiskKey, Image<MemoryFile>>,
    live: SharedOverlay<MemoryFile>,
    kept: Vec<Kept>,
    open: Vec<Open>,
    base: u64,
    folded: CountVector,
    rng: u64,
}

const OPTIONS: Options = Options { segment_bytes: 400 };

impl World {
    fn new(seed: u64) -> Self {
        let disk = Memory::new();
        let journal = Journal::create(disk.clone(), "journal", State::new(2), OPTIONS).unwrap();
        let mut images = BTreeMap::new();
        for at in KEYS {
            let image = Image::create(&disk, &format!("{}.{}", at.0, at.1), SIZE as u64).unwrap();
            images.insert(key(at), image);
        }
        let live =
            Arc::new(RwLock::new(Overlay::live(&journal.tail(), journal.state(), 0).unwrap()));
        let (kept, open, folded) = (Vec::new(), Vec::new(), CountVector::new());
        let mut world =
            Self { disk, journal, images, live, kept, open, base: 0, folded, rng: seed | 1 };
        for writer in 0..2 {
            world.write(writer, Effect::CopyDone);
        }
        world
    }

    fn random(&mut self, below: u64) -> u64 {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        self.rng % below
    }

    fn write(&mut self, writer: u16, effect: Effect) {
        let of = self.journal.state().writers[usize::from(writer)];
        let len_bytes = match &effect {
            Effect::Write(payload) => payload.data().len() as u64,
            Effect::Zero { len_bytes, .. } => u64::from(*len_bytes),
            _ => 0,
        };
        let (disk, offset) = match len_bytes {
            0 => (0, 0),
            _ => (self.random(2) as u16, self.random((SIZE as u64 - len_bytes) / 8 + 1) * 8),
        };
        let record = Record {
            writer: WriterId(writer),
            seq: of.seq.next(),
            epoch: self.journal.state().epoch,
            hlc: Hlc(of.seq.0 + 1),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(disk),
                offset,
                copy: effect == Effect::CopyDone,
                flushed: false,
                effect,
            },
        };
        self.journal.stage_record(record.clone()).unwrap();
        let mut live = self.live.write().unwrap();
        self.journal.write(|placed| live.placed(&placed)).unwrap();
        drop(live);
        self.journal.sync().unwrap();
        self.kept.push(Kept { record, segment: self.journal.end().segment });
    }

    fn writes(&mut self, count: u64) {
        for _ in 0..count {
            let (writer, fill) = (self.random(2) as u16, self.random(250) as u8 + 1);
            let len = (1 + self.random(40)) * 8;
            let effect = match self.random(5) {
                0 => Effect::Zero { len_bytes: len as u32 * 2, no_hole: false },
                _ => {
                    // Each byte tells where in the payload it was.
                    let data: Vec<u8> =
                        (0..len).map(|at| fill.wrapping_add(at as u8 / 8)).collect();
                    Effect::Write(Payload::new(data.into()))
                }
            };
            self.write(writer, effect);
        }
    }

    fn note(&mut self, note: &Note) {
        if self.journal.stage_note(note).is_ok() {
            self.journal.write(|_| {}).unwrap();
            self.journal.sync().unwrap();
        }
    }

    /// A cut between what is folded and what is committed.
    fn cut(&mut self) -> CountVector {
        let committed = self.journal.state().committed();
        let entry = |writer: u16, world: &mut Self| {
            let (low, high) =
                (world.folded.get(WriterId(writer)).0, committed.get(WriterId(writer)).0);
            let seq = match world.random(3) {
                0 => high,
                _ => low + world.random(high - low + 1),
            };
            (WriterId(writer), Seq(seq))
        };
        [entry(0, self), entry(1, self)].into_iter().collect()
    }

    /// Recovers to some cut: what comes after it is void.
    fn recover(&mut self) {
        let cut = self.cut();
        let state = self.journal.state();
        let start = EpochStart {
            epoch: Epoch(state.epoch.0 + 1),
            cut: cut.clone(),
            journaled: state.journaled(),
            resyncing: Vec::new(),
            at_unix_ms: 0,
            primary_declared_dead: false,
            exposed: Vec::new(),
        };
        self.note(&Note::EpochStart(start));
        self.journal.note_void();
        self.kept.retain(|kept| kept.record.seq <= cut.get(kept.record.writer));
        let (tail, base) = (self.journal.tail(), self.base);
        *self.live.write().unwrap() = Overlay::live(&tail, self.journal.state(), base).unwrap();
    }

    fn next_job(&mut self) -> Option<IndexJob<Memory>> {
        let base = self.base;
        self.journal.index_job(base, |_| None).or_else(|| self.journal.map_job(base))
    }

    /// So many indexes and maps are written. Whether all went well.
    fn jobs(&mut self, count: u64) -> bool {
        for _ in 0..count {
            let Some(job) = self.next_job() else { return true };
            let segment = job.segment();
            match job.run() {
                Ok(made) => self.journal.made(made),
                Err(_) => {
                    self.journal.not_made(segment);
                    return false;
                }
            }
            let (tail, base) = (self.journal.tail(), self.base);
            self.live.write().unwrap().refresh(&tail, self.journal.state(), base).unwrap();
        }
        true
    }

    /// So many segments are compressed. Whether all went well.
    fn compress(&mut self, count: u64) -> bool {
        let how = Compress { after_ms: 0, block_bytes: 512, percent_max: 1_000 };
        for _ in 0..count {
            let after = self.base.max(self.journal.segments()[0].index) - 1;
            let Some((segment, _)) = self.journal.next_plain(after) else { return true };
            let job = self.journal.compress_job(segment, how).expect("it is sealed");
            match job.run() {
                Ok(Compressed::Cold(file)) => {
                    if self.journal.compressed(segment, file).is_err() {
                        return false;
                    }
                }
                Ok(other) => panic!("{other:?}"),
                Err(_) => return false,
            }
            let (tail, base) = (self.journal.tail(), self.base);
            self.live.write().unwrap().refresh(&tail, self.journal.state(), base).unwrap();
        }
        true
    }

    /// Folds all records before some segment, or some of them until the power goes off.
    fn fold(&mut self, power_off_after: Option<u64>) {
        let committed = self.journal.state().committed();
        let first = self.base.max(1);
        let wanted = first + self.random(self.journal.end().segment - first + 1);
        let beyond = |kept: &&Kept| kept.record.seq > committed.get(kept.record.writer);
        let limit = self.kept.iter().find(beyond).map_or(u64::MAX, |kept| kept.segment);
        let limit = self.open.iter().map(|open| open.beyond).fold(limit, u64::min);
        let to = wanted.min(limit);
        if to <= first {
            return;
        }
        // A recovery does not take back what may be in the images.
        for Kept { record, .. } in self.kept.iter().filter(|k| (self.base..to).contains(&k.segment))
        {
            self.folded.raise(record.writer, record.seq);
        }
        let to_position = Position { segment: to, offset: SEGMENT_HEADER_BYTES as u64 };
        let job = FoldJob {
            tail: self.journal.tail(),
            from: self.floor(),
            to: to_position,
            state: self.journal.state().clone(),
            starts: self.journal.starts_after(0).map(|(n, state)| (n, state.clone())).collect(),
            cut: committed,
            images: self.images.clone(),
            damaged: ImageDamage::default(),
            budget_bytes: u64::MAX,
            gives_up: false,
        };
        let Some(after) = power_off_after else {
            assert_eq!(job.run().unwrap().position, to_position);
            self.base = to;
            self.after_fold();
            return;
        };
        // The outcome does not matter: the position is not put on record.
        self.disk.sync_dir("").unwrap();
        let faults = Faults { power_off_at: Some(self.disk.ops() + after), ..Faults::default() };
        self.disk.set_faults(faults);
        let _ = job.run();
        self.crash();
    }

    fn after_fold(&mut self) {
        let (tail, base) = (self.journal.tail(), self.base);
        self.live.write().unwrap().refresh(&tail, self.journal.state(), base).unwrap();
        self.journal.remove_before(self.floor()).unwrap();
    }

    fn floor(&self) -> Position {
        match self.base {
            0 => Position::default(),
            segment => Position { segment, offset: SEGMENT_HEADER_BYTES as u64 },
        }
    }

    /// The power goes off after so many operations of writing indexes and maps.
    fn power_loss(&mut self, after: u64) {
        self.disk.sync_dir("").unwrap();
        let faults = Faults { power_off_at: Some(self.disk.ops() + after), ..Faults::default() };
        self.disk.set_faults(faults);
        match after % 3 {
            0 => self.compress(u64::MAX),
            _ => self.jobs(u64::MAX) && self.compress(u64::MAX),
        };
        self.crash();
    }

    fn crash(&mut self) {
        let mut rng = self.rng;
        let disk = self.disk.crash(&mut || {
            rng = rng.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            rng >> 63 == 1
        });
        self.reopen(disk);
    }

    fn reopen(&mut self, disk: Memory) {
        // What held the images went with the server.
        self.open.clear();
        let opened = Journal::open(disk.clone(), "journal", self.floor(), OPTIONS).unwrap();
        assert_eq!(opened.journal.state(), self.journal.state());
        self.journal = opened.journal;
        for at in KEYS {
            let image = Image::open(&disk, &format!("{}.{}", at.0, at.1), SIZE as u64).unwrap();
            self.images.insert(key(at), image);
        }
        self.disk = disk;
        let (tail, base) = (self.journal.tail(), self.base);
        let live = Overlay::live(&tail, self.journal.state(), base).unwrap();
        self.live = Arc::new(RwLock::new(live));
    }

    fn look(&mut self) {
        let cut = self.cut();
        let is_in = |kept: &&Kept| kept.record.seq <= cut.get(kept.record.writer);
        let mut expected = empty();
        for kept in self.kept.iter().filter(is_in) {
            apply(&mut expected, &kept.record);
        }
        let last = self.kept.iter().filter(is_in).map(|kept| kept.segment).max();
        let end = last.unwrap_or(0).max(self.base);
        let beyond = self.kept.iter().find(|kept| !is_in(kept)).map(|kept| kept.segment);
        let state = self.journal.state();
        let overlay = Overlay::past(&self.journal.tail(), state, self.base..end + 1, &cut).unwrap();
        let overlay = Arc::new(RwLock::new(overlay));
        let beyond = beyond.unwrap_or(self.journal.end().segment);
        self.check(&overlay, &expected, &format!("at {cut}"));
        if self.open.len() < 3 {
            self.open.push(Open { overlay, expected, beyond });
        }
    }

    fn check(&mut self, overlay: &SharedOverlay<MemoryFile>, expected: &Bytes, what: &str) {
        for (key, want) in expected {
            let image = self.images[key].clone();
            let view = View::new(*key, SIZE as u64, image, Arc::clone(overlay));
            let from = self.random(SIZE as u64) as usize;
            let to = from + self.random((SIZE - from) as u64 + 1) as usize;
            for range in [0..SIZE, from..to] {
                let mut found = vec![0xee; range.len()];
                view.read(range.start as u64, &mut found).unwrap();
                assert_eq!(found, want[range.clone()], "{key:?} {what}, bytes {range:?}");
                let mut at = range.start;
                let all = range.start as u64..range.end as u64;
                view.describe(all, |len, content| {
                    let part = &want[at..at + len as usize];
                    assert!(content == Content::Data || part.iter().all(|byte| *byte == 0));
                    at += len as usize;
                    true
                })
                .unwrap();
                assert_eq!(at, range.end, "without a hole");
            }
        }
    }

    fn check_all(&mut self) {
        let mut expected = empty();
        for kept in &self.kept {
            apply(&mut expected, &kept.record);
        }
        let live = Arc::clone(&self.live);
        self.check(&live, &expected, "live");
        for nth in 0..self.open.len() {
            let (overlay, expected) =
                (Arc::clone(&self.open[nth].overlay), self.open[nth].expected.clone());
            self.check(&overlay, &expected, "open");
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64),
    Look,
    Close,
    Jobs(u64),
    Compress(u64),
    Fold,
    BrokenFold(u64),
    Recover,
    Resync(u16),
    Whole(u16),
    Kill,
    PowerLoss(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1u64..14).prop_map(Step::Write),
        5 => Just(Step::Look),
        2 => Just(Step::Close),
        6 => (1u64..30).prop_map(Step::Jobs),
        3 => (1u64..6).prop_map(Step::Compress),
        2 => Just(Step::Fold),
        3 => (0u64..40).prop_map(Step::BrokenFold),
        1 => Just(Step::Recover),
        1 => (0u16..2).prop_map(Step::Resync),
        2 => (0u16..2).prop_map(Step::Whole),
        1 => Just(Step::Kill),
        1 => (1u64..40).prop_map(Step::PowerLoss),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn a_view_is_what_a_replay_gives_whatever_maps_there_are(
        steps in prop::collection::vec(step(), 1..60),
        seed: u64,
    ) {
        let mut world = World::new(seed);
        for step in steps {
            match step {
                Step::Write(count) => world.writes(count),
                Step::Look => world.look(),
                Step::Close => drop(world.open.pop()),
                Step::Jobs(count) => assert!(world.jobs(count)),
                Step::Compress(count) => assert!(world.compress(count)),
                Step::Fold => world.fold(None),
                Step::BrokenFold(after) => world.fold(Some(after)),
                Step::Recover => world.recover(),
                Step::Resync(writer) => {
                    let (writer, copy) = (WriterId(writer), CopyState::Resyncing);
                    world.note(&Note::Copy { writer, copy });
                }
                Step::Whole(writer) => world.write(writer, Effect::CopyDone),
                Step::Kill => world.reopen(world.disk.killed()),
                Step::PowerLoss(after) => world.power_loss(after),
            }
            world.check_all();
        }
        world.jobs(u64::MAX);
        world.check_all();
        (0..4).for_each(|_| world.look());
    }
}

/// A long journal whose maps are all there.
fn long(records: u64) -> World {
    let mut world = World::new(7);
    for _ in 0..records {
        world.writes(1);
        assert!(world.jobs(u64::MAX));
    }
    world
}

#[test]
fn a_look_up_looks_at_few_files_however_long_the_journal_is() {
    let mut world = long(1200);
    let segments = world.journal.segments().len();
    assert!(segments > 8 * 8 * 8, "{segments} segments");
    let live = world.live.read().unwrap().extents();
    assert!(live < 8, "{live} extents of {segments} segments in memory");
    let mut most = 0;
    for _ in 0..100 {
        let cut = world.cut();
        let is_in = |kept: &&Kept| kept.record.seq <= cut.get(kept.record.writer);
        let end = world.kept.iter().filter(is_in).map(|kept| kept.segment).max().unwrap_or(1);
        let state = world.journal.state();
        let overlay = Overlay::past(&world.journal.tail(), state, 0..end + 1, &cut).unwrap();
        most = most.max(overlay.layers());
    }
    // Of four levels seven each, and the segment in which the cut falls.
    assert!(most <= 4 * 7 + 1, "{most} layers");
    world.check_all();
    (0..20).for_each(|_| world.look());
}

#[test]
fn a_journal_without_maps_is_whole_and_gets_them_again() {
    let mut world = long(80);
    let maps = |disk: &Memory| {
        let mut names = disk.list("journal").unwrap();
        names.retain(|name| name.ends_with(".map"));
        names.sort();
        names
    };
    let all = maps(&world.disk);
    assert!(all.iter().any(|name| name.ends_with(".01.map")), "{all:?}");
    for damage in 0..4u64 {
        let disk = world.disk.killed();
        for (nth, name) in all.iter().enumerate().filter(|(nth, _)| *nth as u64 % 4 != damage) {
            let path = format!("journal/{name}");
            let end = disk.open(&path).unwrap().size_bytes().unwrap();
            match nth % 3 {
                0 => disk.remove(&path).unwrap(),
                1 => disk.flip(&path, end - 20),
                _ => disk.rename(&path, &format!("{path}.new")).unwrap(),
            }
        }
        world.reopen(disk);
        world.check_all();
        world.look();
        assert!(world.jobs(u64::MAX));
        assert_eq!(maps(&world.disk), all);
        world.check_all();
        world.look();
    }
}

#[test]
fn a_map_that_cannot_be_read_is_an_error_and_is_made_again() {
    let mut world = long(30);
    let mut names = world.disk.list("journal").unwrap();
    names.retain(|name| name.ends_with(".00.map"));
    // A block of it: opening does not read that.
    names.iter().for_each(|name| world.disk.flip(&format!("journal/{name}"), 30));
    let view = |world: &World, at| {
        let live = Arc::clone(&world.live);
        View::new(key(at), SIZE as u64, world.images[&key(at)].clone(), live)
    };
    let mut buf = vec![0; SIZE];
    let errors = KEYS.iter().filter_map(|at| view(&world, *at).read(0, &mut buf).err());
    let errors: Vec<String> = errors.map(|error| error.to_string()).collect();
    assert!(
        !errors.is_empty() && errors.iter().all(|e| e.contains(".map of the journal")),
        "{errors:?}"
    );
    // With the next segments.
    for _ in 0..60 {
        world.writes(1);
        world.jobs(u64::MAX);
        let _ = KEYS.map(|at| view(&world, at).read(0, &mut buf).is_ok());
    }
    world.check_all();
}

#[test]
fn damaged_data_is_never_handed_out_and_its_segment_is_named() {
    let mut world = World::new(1);
    let data: Vec<u8> = (0..1024u32).map(|n| n as u8).collect();
    world.write(0, Effect::Write(Payload::new(data.into())));
    let record = world.kept.last().unwrap().record.clone();
    world.writes(1);
    world.jobs(u64::MAX);
    let segment = world.journal.segments().last().unwrap().clone();
    let of = world.kept[2].segment;
    let segment =
        world.journal.segments().iter().find(|s| s.index == of).unwrap_or(&segment).clone();
    let name = SegmentHeader::file_name(segment.index, segment.id);
    let cut = CountVector::of(WriterId(0), record.seq);
    let overlay =
        Overlay::past(&world.journal.tail(), world.journal.state(), 0..of + 1, &cut).unwrap();
    let key = DiskKey::of(&record);
    let overlay = Arc::new(RwLock::new(overlay));
    let view = View::new(key, SIZE as u64, world.images[&key].clone(), overlay);
    let mut part = [0; 8];
    view.read(record.body.offset + 512, &mut part).unwrap();
    assert_eq!(part, record.payload().unwrap().data()[512..520]);
    // Somewhere else in the same record.
    world.disk.flip(&format!("journal/{name}"), segment.len_bytes.min(1100));
    let error = view.read(record.body.offset + 512, &mut part).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("damaged at byte"), "{error}");
    let beside = (record.body.offset + 1024) % SIZE as u64;
    if beside >= 8 {
        view.read(beside, &mut part[..((SIZE as u64 - beside).min(8)) as usize]).unwrap();
    }
}

/// The fold ends before a batch that is not in the cut as a whole, and a state that has none of that batch can be seen.
#[test]
fn a_fold_brings_nothing_of_a_batch_that_has_a_record_beyond_the_cut() {
    let mut world = World::new(1);
    let from = world.journal.end();
    for (writer, byte) in [(1, 7), (0, 8)] {
        let record = Record {
            writer: WriterId(writer),
            seq: Seq(2),
            epoch: Epoch(1),
            hlc: Hlc(2),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(0),
                offset: 0,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(vec![byte; 64].into())),
            },
        };
        world.journal.stage_record(record).unwrap();
    }
    world.journal.write(|_| {}).unwrap();
    world.journal.sync().unwrap();
    let mut cut = CountVector::of(WriterId(0), Seq(1));
    let fold = |world: &World, cut: &CountVector| {
        let job = FoldJob {
            tail: world.journal.tail(),
            from,
            to: world.journal.end(),
            state: world.journal.state().clone(),
            starts: BTreeMap::new(),
            cut: cut.clone(),
            images: world.images.clone(),
            damaged: ImageDamage::default(),
            budget_bytes: u64::MAX,
            gives_up: false,
        };
        let position = job.run().unwrap().position;
        let mut found = vec![0; 64];
        world.images[&key((1, 0))].read_at(&mut found, 0).unwrap();
        (position, found[0])
    };
    cut.raise(WriterId(1), Seq(2));
    assert_eq!(fold(&world, &cut), (from, 0));
    cut.raise(WriterId(0), Seq(2));
    assert_eq!(fold(&world, &cut), (world.journal.end(), 7));
}
