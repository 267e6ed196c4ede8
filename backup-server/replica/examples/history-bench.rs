//! What the past costs: ingest with index and window against a plain append, views of long journals, folding. `make bench
//! ONLY=n` runs it and says what it means. It prints one JSON object.
//!
//! `history-bench DIR ROUNDS TURN_MIB [SIZE[/N]...]`: DIR must be empty. For ingest sixteen turns of a quarter of TURN_MIB in
//! each of ROUNDS, ROUNDS turns of TURN_MIB folded; a journal of each SIZE (MiB) for the views, one after the other. Without
//! a SIZE it is ingest alone. All writes are 4 KiB at random places of a disk of 16 GiB. `/N`: one record in N has a payload,
//! the others write zeroes, where the disk is short.

use bytes::Bytes;
use serde_json::{Value, json};
use std::error::Error;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tidelock_protocol::frame::Frame;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{
    Channel, DiskId, Epoch, Incarnation, MonoNanos, Nonce, Seq, WriterId,
};
use tidelock_protocol::message::{Attach, DiskSpec, LastRun, Message, Mode, Role, Writing};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::{ConnectionId, Group, GroupOptions, Link, Now, Output, Retention};
use tidelock_replica::history::At;
use tidelock_storage::files::{Files, OpenFile};
use tidelock_store::journal::{IndexJob, Journal, JournalError, Made, Options, State};

const DISK_BYTES: u64 = 16 << 30;
const FOLD_DISK_BYTES: u64 = 4 << 30;
const BLOCK: u64 = 4096;
/// Of a record.
const HEADER: u64 = 60;
/// Records that are made durable together, as under a load of so many writes in flight.
const BATCH: u64 = 64;
/// By the records' own clock: about 40 MB/s.
const BATCH_MS: u64 = 6;
const BEGAN_MS: u64 = 1_700_000_000_000;
const LINK: Link = Link { connection: ConnectionId(1), channel: Channel(1) };
const VIEWS: usize = 40;
const READS: usize = 200;
const RAW_BYTES: u64 = 1 << 30;
/// Of the writes with payload, one in so many is kept in mind, to be read again.
const SAMPLE: u64 = 512;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Where a disk is written.
#[derive(Clone, Copy)]
struct Places {
    disk_bytes: u64,
    /// Of all writes, four of five go to a fifth of the disk's blocks, which are all over it (Retroscope, VI).
    skewed: bool,
}

impl Places {
    const ALL: Self = Self { disk_bytes: DISK_BYTES, skewed: false };

    fn pick(self, random: &mut Random) -> u64 {
        let blocks = self.disk_bytes / BLOCK;
        let nth = match self.skewed {
            false => random.below(blocks),
            true if random.below(5) > 0 => random.below(blocks / 5),
            true => blocks / 5 + random.below(blocks - blocks / 5),
        };
        // A number that is odd permutes those below a power of two.
        nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks * BLOCK
    }
}

/// What is folded, and into what.
struct Fold {
    name: &'static str,
    /// The image was written before, as by the first copy of a disk: none of its blocks must be found a place.
    written: bool,
    skewed: bool,
}

const FOLDS: [Fold; 3] = [
    Fold { name: "fresh", written: false, skewed: false },
    Fold { name: "written", written: true, skewed: false },
    Fold { name: "skewed", written: true, skewed: true },
];

fn record(seq: u64, ms: u64, offset: u64, effect: Effect) -> Record {
    Record {
        writer: WriterId(0),
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc::new(ms, 0),
        deps: CountVector::new(),
        body: DiskChange {
            disk: DiskId(0),
            offset,
            copy: effect == Effect::CopyDone,
            flushed: false,
            effect,
        },
    }
}

/// Indexes and maps are made on a thread beside, as the server does.
struct Beside {
    jobs: mpsc::Sender<IndexJob<Files>>,
    made: mpsc::Receiver<(u64, Result<Made<OpenFile>, JournalError>)>,
    busy: bool,
}

impl Beside {
    fn new() -> Self {
        let (jobs, waiting) = mpsc::channel::<IndexJob<Files>>();
        let (done, made) = mpsc::channel();
        std::thread::spawn(move || {
            for job in waiting {
                let segment = job.segment();
                if done.send((segment, job.run())).is_err() {
                    return;
                }
            }
        });
        Self { jobs, made, busy: false }
    }
}

struct Fed {
    group: Group<Files>,
    places: Places,
    beside: Beside,
    data: Bytes,
    random: Random,
    seq: u64,
    ms: u64,
    /// One record in so many has a payload.
    one_in: u64,
    /// Indexes and maps are made.
    tends: bool,
    /// Some of the writes with payload: when, and where.
    sample: Vec<(u64, u64)>,
}

impl Fed {
    fn new(
        dir: &Path,
        window_ms: u64,
        places: Places,
        one_in: u64,
    ) -> Result<Self, Box<dyn Error>> {
        std::fs::create_dir_all(dir)?;
        let size_bytes = places.disk_bytes;
        let disk = DiskSpec { id: DiskId(0), name: "root".into(), size_bytes };
        let attach = Attach {
            group: "g".into(),
            group_id: None,
            member: "db".into(),
            writers: vec!["db".into()],
            epoch: Epoch(0),
            lease_ms: 10_000,
            grace_ms: 15_000,
            machine: None,
            tagging: None,
            role: Role::Writer(Writing {
                writer: WriterId(0),
                disks: vec![disk],
                incarnation: Incarnation(1),
                nonce: Nonce(0, 0),
                before: None,
                marks: Vec::new(),
                last_run: LastRun::Unknown,
                mode: Mode::Pipelined,
            }),
        };
        let retention = Retention { window_ms, ..Retention::default() };
        let segment_bytes = segment_bytes(one_in);
        let options = GroupOptions {
            journal: Options { segment_bytes },
            retention,
            unfolded_max_bytes: u64::MAX / 2,
            fold_min_bytes: 1,
            ..GroupOptions::default()
        };
        let now = Now { mono: MonoNanos(0), unix_ms: BEGAN_MS };
        let mut group = Group::create(Files::new(dir.into()), "host", &attach, now, options)
            .map_err(|error| format!("{error:?}"))?;
        group.attach(now, LINK, "host", &attach);
        let data = Bytes::from(vec![7; BLOCK as usize]);
        let random = Random(0x9e37_79b9_7f4a_7c15);
        let (beside, seq, ms) = (Beside::new(), 0, BEGAN_MS);
        let (tends, sample) = (true, vec![]);
        let mut fed = Self { group, places, beside, data, random, seq, ms, one_in, tends, sample };
        fed.send(0, Effect::CopyDone)?;
        fed.group.flush();
        Ok(fed)
    }

    fn now(&self) -> Now {
        Now { mono: MonoNanos((self.ms - BEGAN_MS) * 1_000_000), unix_ms: self.ms }
    }

    fn send(&mut self, offset: u64, effect: Effect) -> Result<(), Box<dyn Error>> {
        self.seq += 1;
        let record = record(self.seq, self.ms, offset, effect);
        match self.group.receive(self.now(), LINK, Frame::Record(LINK.channel, record)) {
            None => Ok(()),
            Some(_) => Err("the group does not accept".into()),
        }
    }

    fn batch(&mut self) -> Result<(), Box<dyn Error>> {
        self.ms += BATCH_MS;
        for _ in 0..BATCH {
            let offset = self.places.pick(&mut self.random);
            if !self.seq.is_multiple_of(self.one_in) {
                self.send(offset, Effect::Zero { len_bytes: BLOCK as u32, no_hole: false })?;
                continue;
            }
            if (self.seq / self.one_in).is_multiple_of(SAMPLE) {
                self.sample.push((self.ms, offset));
            }
            self.send(offset, Effect::Write(Payload::new(self.data.clone())))?;
        }
        self.group.flush();
        let refused = |output: &Output| {
            matches!(output, Output::Refuse(..) | Output::Send(_, Message::Stalled { .. }))
        };
        match self.group.take_outputs().into_iter().find(refused) {
            Some(output) => Err(format!("{output:?}").into()),
            None => Ok(()),
        }
    }

    /// What the owner of a group does between batches.
    fn tend(&mut self) {
        if let Ok((segment, made)) = self.beside.made.try_recv() {
            self.group.index_done(segment, made);
            self.beside.busy = false;
        }
        if !self.beside.busy
            && let Some(job) = self.group.index_job()
        {
            self.beside.busy = self.beside.jobs.send(job).is_ok();
        }
    }

    fn feed(&mut self, bytes: u64) -> Result<(), Box<dyn Error>> {
        for _ in 0..bytes / (BATCH * BLOCK) {
            self.batch()?;
            if self.tends {
                self.tend();
            }
        }
        Ok(())
    }

    /// Waits until all indexes and maps are there.
    fn settle(&mut self) -> Result<(), Box<dyn Error>> {
        self.tend();
        while self.beside.busy {
            let (segment, made) = self.beside.made.recv()?;
            self.group.index_done(segment, made);
            self.beside.busy = false;
            self.tend();
        }
        Ok(())
    }
}

/// The journal alone.
struct Plain {
    journal: Journal<Files>,
    data: Bytes,
    random: Random,
    seq: u64,
}

impl Plain {
    fn new(dir: PathBuf) -> Result<Self, Box<dyn Error>> {
        std::fs::create_dir_all(&dir)?;
        let journal =
            Journal::create(Files::new(dir), "journal", State::new(1), Options::default())?;
        let data = Bytes::from(vec![7; BLOCK as usize]);
        Ok(Self { journal, data, random: Random(0x9e37_79b9_7f4a_7c15), seq: 0 })
    }

    fn feed(&mut self, bytes: u64) -> Result<(), Box<dyn Error>> {
        for _ in 0..bytes / (BATCH * BLOCK) {
            for _ in 0..BATCH {
                self.seq += 1;
                let effect = Effect::Write(Payload::new(self.data.clone()));
                let ms = BEGAN_MS + self.seq;
                let offset = Places::ALL.pick(&mut self.random);
                self.journal.stage_record(record(self.seq, ms, offset, effect))?;
            }
            self.journal.write(|_| {})?;
            self.journal.sync()?;
        }
        Ok(())
    }
}

fn micros(times: &[Duration]) -> Vec<f64> {
    times.iter().map(|time| (time.as_nanos() as f64) / 1e3).collect()
}

fn mib_per_s(bytes: u64, took: Duration) -> f64 {
    bytes as f64 / f64::from(1 << 20) / took.as_secs_f64()
}

/// Of `/proc/self/FILE`: a line that begins with the name, as a number.
fn of_self(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(name));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

/// Turns of all, side by side, in an order that is turned around each time.
fn ingest(dir: &Path, rounds: u64, turn: u64) -> Result<Value, Box<dyn Error>> {
    let mut plain = Plain::new(dir.join("plain"))?;
    let fed = |name| Fed::new(&dir.join(name), u64::MAX / 4, Places::ALL, 1);
    let (mut fed, mut bare) = (fed("window")?, fed("bare")?);
    bare.tends = false;
    let mut rates = [const { Vec::new() }; 3];
    for round in 0..rounds {
        for nth in 0..3 {
            let nth = if round % 2 == 0 { nth } else { 2 - nth };
            let since = Instant::now();
            match nth {
                0 => plain.feed(turn)?,
                1 => fed.feed(turn)?,
                _ => bare.feed(turn)?,
            }
            rates[nth].push(mib_per_s(turn, since.elapsed()));
        }
    }
    drop((plain, fed, bare));
    for name in ["plain", "window", "bare"] {
        std::fs::remove_dir_all(dir.join(name))?;
    }
    let [plain, window, bare] = rates;
    Ok(json!({
        "plain_mib_per_s": plain, "window_mib_per_s": window, "without_indexes_mib_per_s": bare,
    }))
}

/// All that left the window at once, beside what came in.
fn fold(dir: &Path, rounds: u64, turn: u64, how: &Fold) -> Result<Value, Box<dyn Error>> {
    let places = Places { disk_bytes: FOLD_DISK_BYTES, skewed: how.skewed };
    let mut fed = Fed::new(dir, 0, places, 1)?;
    if how.written {
        let images: Vec<_> = std::fs::read_dir(dir.join("images"))?.collect::<Result<_, _>>()?;
        let [image] = &images[..] else { return Err("one image is expected".into()) };
        write_all(&std::fs::File::options().write(true).open(image.path())?, FOLD_DISK_BYTES)?;
    }
    let written_before = of_self("io", "wchar:");
    let (mut ingested, mut folded, mut changed) = (Vec::new(), Vec::new(), 0);
    for _ in 0..rounds {
        let since = Instant::now();
        fed.feed(turn)?;
        ingested.push(mib_per_s(turn, since.elapsed()));
        let since = Instant::now();
        while let Some(job) = fed.group.fold_job(fed.now()) {
            let cut = job.cut.clone();
            let result = job.run();
            changed += result.as_ref().map_or(0, |folded| folded.written_bytes);
            fed.group.fold_done(cut, result);
        }
        folded.push(mib_per_s(turn, since.elapsed()));
    }
    fed.settle()?;
    let written = of_self("io", "wchar:") - written_before;
    let of_all = |bytes: u64| bytes as f64 / (rounds * turn) as f64;
    let told = json!({
        "name": how.name, "ingest_mib_per_s": ingested, "fold_mib_per_s": folded,
        "left_bytes": fed.group.unfolded_bytes(), "write_amplification": of_all(written),
        "written_of_all": of_all(changed),
    });
    drop(fed);
    std::fs::remove_dir_all(dir)?;
    Ok(told)
}

/// The files of a directory whose names end like this.
fn bytes_of(dir: &Path, ends: &str) -> Result<u64, Box<dyn Error>> {
    let mut sum = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().ends_with(ends) {
            sum += entry.metadata()?.len();
        }
    }
    Ok(sum)
}

/// A raw file that nothing stands before: what a first read costs without us.
fn raw_file(path: &Path) -> Result<std::fs::File, Box<dyn Error>> {
    let file = std::fs::File::options().create_new(true).write(true).read(true).open(path)?;
    write_all(&file, RAW_BYTES)?;
    Ok(file)
}

fn write_all(file: &std::fs::File, bytes: u64) -> std::io::Result<()> {
    let block = vec![5; 1 << 20];
    for at in (0..bytes).step_by(block.len()) {
        file.write_all_at(&block, at)?;
    }
    file.sync_all()
}

/// Views at random instants of one long journal.
fn views(dir: &Path, bytes: u64, one_in: u64) -> Result<Value, Box<dyn Error>> {
    std::fs::create_dir_all(dir)?;
    let before_kib = of_self("status", "VmRSS:");
    let mut fed = Fed::new(&dir.join("group"), u64::MAX / 4, Places::ALL, one_in)?;
    fed.feed(bytes)?;
    fed.settle()?;
    let held_kib = of_self("status", "VmRSS:");
    let file = raw_file(&dir.join("raw"))?;
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let (mut taking, mut resolving, mut opening) = (vec![], vec![], vec![]);
    let (mut first, mut later, mut plain, mut open) = (vec![], vec![], vec![], vec![]);
    for _ in 0..VIEWS {
        // Not so early that nothing has been sampled yet.
        let early = fed.sample[SAMPLE as usize % fed.sample.len()].0;
        let at = early + random.below(fed.ms - early);
        let since = Instant::now();
        let history = fed.group.history()?;
        taking.push(since.elapsed());
        let since = Instant::now();
        let point = history.resolve(&At::WallMs(at))?;
        resolving.push(since.elapsed());
        let since = Instant::now();
        let view = history.open(&point)?.into_values().next().ok_or("no disk")?;
        opening.push(since.elapsed());
        let seen = fed.sample.partition_point(|(ms, _)| *ms < at) as u64;
        let mut buf = [0; BLOCK as usize];
        for nth in 0..READS {
            let (_, offset) = fed.sample[random.below(seen) as usize];
            let since = Instant::now();
            tidelock_replica::travel::disk::Disk::read(&view, offset, &mut buf)?;
            if nth == 0 {
                first.push(since.elapsed())
            } else {
                later.push(since.elapsed())
            }
            if one_in == 1 && buf != [7; BLOCK as usize] {
                return Err(format!("the view of {at} has something else at {offset}").into());
            }
        }
        let offset = random.below(RAW_BYTES / BLOCK) * BLOCK;
        let since = Instant::now();
        file.read_exact_at(&mut buf, offset)?;
        plain.push(since.elapsed());
        open.push(view);
    }
    let open_kib = of_self("status", "VmRSS:").saturating_sub(held_kib);
    let journal = dir.join("group/journal");
    let of = |ends| bytes_of(&journal, ends);
    let told = json!({
        "mib": bytes >> 20, "one_in": one_in, "records": fed.seq,
        "segments": fed.group.journal().segments().len(),
        "disk_bytes": { "segments": of(".seg")?, "indexes": of(".idx")?, "maps": of(".map")? },
        "formula_bytes": formula(fed.seq, one_in),
        "take_us": micros(&taking), "resolve_us": micros(&resolving), "open_us": micros(&opening),
        "first_read_us": micros(&first), "later_reads_us": micros(&later), "raw_first_read_us": micros(&plain),
        "held_kib": held_kib.saturating_sub(before_kib), "views": VIEWS, "views_kib": open_kib,
    });
    drop((open, fed));
    std::fs::remove_dir_all(dir)?;
    Ok(told)
}

/// Segments that have as many records as if all had a payload.
fn segment_bytes(one_in: u64) -> u64 {
    Options::default().segment_bytes * (BLOCK + HEADER * one_in) / ((BLOCK + HEADER) * one_in)
}

/// What the documentation says that so much takes at most (docs/manual/backup-disk.md, "Sizing").
fn formula(records: u64, one_in: u64) -> Value {
    let payload = records / one_in * BLOCK;
    let segments = (payload + HEADER * records).div_ceil(segment_bytes(one_in));
    let levels = (1..).take_while(|level| 8_u64.pow(*level) <= segments).count() as u64 + 1;
    json!({ "segments": payload + HEADER * records, "indexes": 45 * records, "maps": 18 * levels * records })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "history-bench DIR ROUNDS TURN_MIB [SIZE_MIB...]";
    let dir = PathBuf::from(args.next().ok_or(usage)?);
    let mut number = || args.next().ok_or(usage)?.parse::<u64>().map_err(|_| usage);
    let (rounds, turn) = (number()?, number()? << 20);
    let sizes = args.map(|size| {
        let (mib, one_in) = size.split_once('/').unwrap_or((&size, "1"));
        Ok((mib.parse::<u64>()? << 20, one_in.parse()?))
    });
    let sizes: Vec<(u64, u64)> = sizes.collect::<Result<_, std::num::ParseIntError>>()?;
    // Many short turns, as a disk's speed changes from one second to the next.
    let ingest = ingest(&dir, rounds * 16, turn / 4)?;
    let folds = if sizes.is_empty() { &[][..] } else { &FOLDS };
    let folds = folds.iter().map(|how| fold(&dir.join("fold"), rounds, turn, how));
    let folds = folds.collect::<Result<Vec<_>, _>>()?;
    let views = sizes.into_iter().map(|(bytes, one_in)| views(&dir.join("views"), bytes, one_in));
    let views = views.collect::<Result<Vec<_>, _>>()?;
    println!(
        "{}",
        json!({ "turn_mib": turn >> 20, "ingest": ingest, "folds": folds, "views": views })
    );
    Ok(())
}
