//! Making and moving snapshots, each in a thread of its own.

use super::ask::key;
use super::{Key, Snapshots};
use crate::server::clock;
use crate::server::qemu::{self, QemuImage};
use crate::server::travel;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tidelock_replica::travel::copy::{Done, Image};
use tidelock_replica::travel::digest::Table;
use tidelock_replica::travel::making::{Images, Making, Opened, Step, open_raw};
use tidelock_replica::travel::snapshot::{DiskRecord, Format, Record, Stage};
use tidelock_storage::Storage;
use tidelock_storage::files::OpenFile;

/// Jobs that read and write at the same time; others wait.
const WORKING_MAX: usize = 2;
/// How long a job sleeps before it looks whether it is to end.
const NAP: Duration = Duration::from_millis(50);
/// How often a group that does not answer is asked again.
const TRIES: u32 = 30;
const RETRY: Duration = Duration::from_secs(1);

/// A job under way.
#[derive(Debug, Default)]
pub struct Job {
    pub(super) is_waiting: AtomicBool,
    pub(super) done_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    cancelled: AtomicBool,
}

impl Job {
    pub(super) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Sleeps until then, unless it is to end.
    fn sleep_until(&self, when: Instant) -> Result<(), End> {
        loop {
            if self.is_cancelled() {
                return Err(End::Cancelled);
            }
            let left = when.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(NAP));
        }
    }
}

/// Why a job ends before its end.
enum End {
    Cancelled,
    /// It may be better in a moment.
    Again(String),
    Failed(String),
}

impl Snapshots {
    /// Starts what was begun and is not paused.
    pub(super) fn go_on(self: &Arc<Self>) {
        let mut together: BTreeMap<(String, u64), Vec<String>> = BTreeMap::new();
        let mut alone = Vec::new();
        for ((group, name), entry) in self.lock().iter() {
            let record = &entry.record;
            match (record.stage, record.together) {
                (Stage::Whole, _) => {}
                _ if record.paused => {}
                (Stage::Making, Some(id)) => {
                    together.entry((group.clone(), id)).or_default().push(name.clone());
                }
                _ => alone.push((group.clone(), vec![name.clone()])),
            }
        }
        let together = together.into_iter().map(|((group, _), names)| (group, names));
        for (group, names) in together.chain(alone) {
            self.start(&group, names);
        }
    }

    /// Starts a job for these, but for those that have one. Returns those that it is for.
    pub(super) fn start(self: &Arc<Self>, group: &str, mut names: Vec<String>) -> Vec<String> {
        let job = Arc::new(Job::default());
        {
            let mut all = self.lock();
            names.retain(|name| {
                let entry = all.get_mut(&key(group, name)).filter(|entry| entry.job.is_none());
                entry.is_some_and(|entry| {
                    entry.record.paused = false;
                    entry.failed = None;
                    entry.job = Some(Arc::clone(&job));
                    true
                })
            });
        }
        if names.is_empty() {
            return names;
        }
        let (this, of, started) = (Arc::clone(self), group.to_owned(), names.clone());
        let run = move || this.run(&of, names, &job);
        let thread = std::thread::Builder::new().name(format!("snapshot-{group}")).spawn(run);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => tracing::error!(group, "no thread for a snapshot: {error}"),
        }
        started
    }

    /// Ends a snapshot's job, if it has one, and waits until it has ended. It is gone on with when somebody asks.
    pub fn pause(&self, group: &str, name: &str) {
        let key = key(group, name);
        let job = match self.lock().get_mut(&key) {
            Some(entry) => {
                entry.record.paused = entry.record.stage != Stage::Whole;
                entry.job.clone()
            }
            None => return,
        };
        let Some(job) = job else { return };
        job.cancel();
        while self.lock().get(&key).is_some_and(|entry| entry.job.is_some()) {
            std::thread::sleep(NAP);
        }
    }

    fn run(self: &Arc<Self>, group: &str, names: Vec<String>, job: &Job) {
        let mut tries = 0;
        let ended = loop {
            match self.work(group, &names, job) {
                Err(End::Again(reason)) => {
                    tries += 1;
                    if tries == TRIES {
                        break Err(End::Failed(reason));
                    }
                    if let Err(end) = job.sleep_until(Instant::now() + RETRY) {
                        break Err(end);
                    }
                }
                ended => break ended,
            }
        };
        let stopping = self.stopping.load(Ordering::Acquire);
        for name in &names {
            let (record, holds) = {
                let mut all = self.lock();
                let Some(entry) = all.get_mut(&key(group, name)) else { continue };
                entry.written_bytes = job.written_bytes.load(Ordering::Relaxed);
                if let Err(End::Failed(reason)) = &ended {
                    tracing::error!(group, snapshot = name, "not made: {reason}");
                    entry.failed = Some(reason.clone());
                }
                // A command that served itself is over; a server that stops goes on when it starts.
                entry.record.paused |= stopping && !self.goes_on;
                let holds = match entry.record.stage {
                    Stage::Whole => std::mem::take(&mut entry.holds),
                    _ => Vec::new(),
                };
                (entry.record.clone(), holds)
            };
            if record.stage == Stage::Whole {
                self.release(group, name);
                tracing::info!(group, snapshot = name, "the snapshot is whole");
            } else if let Err(error) = self.save(name, &record) {
                tracing::warn!(group, snapshot = name, "its record: {error}");
            }
            drop(holds);
            if let Some(entry) = self.lock().get_mut(&key(group, name)) {
                entry.job = None;
            }
        }
    }

    /// Waits for its time and for others, and does it.
    fn work(&self, group: &str, names: &[String], job: &Job) -> Result<(), End> {
        job.is_waiting.store(true, Ordering::Relaxed);
        let records = self.records(group, names);
        let not_before =
            records.iter().filter_map(|(_, record)| record.pace.not_before_unix_ms).max();
        loop {
            let wait_ms = not_before.unwrap_or(0).saturating_sub(clock::now().unix_ms);
            if wait_ms == 0 {
                break;
            }
            job.sleep_until(Instant::now() + Duration::from_millis(wait_ms.min(1000)))?;
        }
        let taken = |working: usize| (working < WORKING_MAX).then_some(working + 1);
        while self.working.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).is_err() {
            job.sleep_until(Instant::now() + NAP)?;
        }
        job.is_waiting.store(false, Ordering::Relaxed);
        let done = self.make_all(group, records, job);
        self.working.fetch_sub(1, Ordering::AcqRel);
        done
    }

    fn records(&self, group: &str, names: &[String]) -> Vec<(String, Record)> {
        let all = self.lock();
        let record =
            |name: &String| Some((name.clone(), all.get(&key(group, name))?.record.clone()));
        names.iter().filter_map(record).collect()
    }

    fn make_all(&self, group: &str, records: Vec<(String, Record)>, job: &Job) -> Result<(), End> {
        let pace = Pacer::new(&records, job);
        let mut making = {
            let look = travel::look(&self.registry, group);
            let look = self.runtime.block_on(look).map_err(End::Again)?;
            // Afterwards views hold what is read; the images may move otherwise.
            Making::begin(&look.history, records).map_err(|e| End::Failed(e.to_string()))?
        };
        let mut images = InFiles { snapshots: self };
        loop {
            match making.step(&mut images) {
                Ok(Step::Looked(bytes)) => {
                    pace.step(bytes, making.done())?;
                    self.check_room(0).map_err(End::Failed)?;
                }
                Ok(Step::Whole) => return Ok(()),
                Err(error) if making.is_revoked() => return Err(End::Again(error.to_string())),
                Err(error) => return Err(self.explain(&error)),
            }
        }
    }

    /// Makes an image over the base's, if it is not there, and its digests, which are those of the base to begin with.
    fn overlay(
        &self,
        name: &str,
        record: &Record,
        disk: &DiskRecord,
        path: &Path,
    ) -> io::Result<Table<OpenFile>> {
        let base = record.base.as_deref().unwrap_or_default();
        let entry = self.lock().get(&key(&record.group, base)).map(|entry| entry.record.clone());
        let of = entry.as_ref().and_then(|of| of.disks.iter().find(|of| of.name == disk.name));
        let of =
            of.ok_or_else(|| io::Error::other(format!("its base {base} is not there any more")))?;
        let digests = tidelock_storage::join(&Self::place(&record.group, name), &disk.digests());
        match self.files.open(&digests) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            file => return Table::open(file?, disk.size_bytes),
        }
        // The table comes last: without it all is made anew.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let backing = Path::new("..").join(base).join(&of.file);
        qemu::create(path, disk.size_bytes, Some((&backing, of.format.word())))?;
        std::fs::File::open(path)?.sync_all()?;
        let theirs = tidelock_storage::join(&Self::place(&record.group, base), &of.digests());
        let theirs = Table::open(self.files.open(&theirs)?, disk.size_bytes)?;
        let unfinished = format!("{digests}.new");
        match self.files.remove(&unfinished) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let table = Table::open(self.files.create(&unfinished)?, disk.size_bytes)?;
        table.copy(&theirs)?;
        table.sync()?;
        self.files.rename(&unfinished, &digests)?;
        Ok(table)
    }

    /// Where sockets of `qemu-nbd` are made.
    pub(super) fn sockets(&self) -> io::Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        let dir = self.registry.config().exports_dir.join("@images");
        std::fs::create_dir_all(&dir)?;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
        Ok(dir)
    }

    fn explain(&self, error: &io::Error) -> End {
        if tidelock_storage::is_full(error) {
            return End::Failed(format!(
                "the file system of {} is full: make room and ask for the snapshot again, what is there is kept",
                self.dir.display()
            ));
        }
        End::Failed(error.to_string())
    }
}

/// Images in the server's directory of snapshots.
#[derive(Debug)]
struct InFiles<'a> {
    snapshots: &'a Snapshots,
}

impl Images for InFiles<'_> {
    type Image = Box<dyn Image + Send>;
    type File = OpenFile;

    fn open(
        &mut self,
        name: &str,
        record: &Record,
        disk: &DiskRecord,
    ) -> io::Result<Opened<Self::Image, OpenFile>> {
        let all = self.snapshots;
        let place = Snapshots::place(&record.group, name);
        match disk.format {
            Format::Raw => {
                let Opened { image, digests, is_new } = open_raw(&all.files, &place, disk)?;
                Ok(Opened { image: Box::new(image), digests, is_new })
            }
            Format::Qcow2 => {
                let path = all.path(&record.group, name).join(&disk.file);
                let digests = all.overlay(name, record, disk, &path)?;
                let image = QemuImage::open(&path, disk.format.word(), false, &all.sockets()?)?;
                all.files.sync_dir(&place)?;
                Ok(Opened { image: Box::new(image), digests, is_new: false })
            }
        }
    }

    fn close(
        &mut self,
        name: &str,
        record: &Record,
        disk: &DiskRecord,
        image: Self::Image,
    ) -> io::Result<()> {
        // QEMU writes the last of its metadata when it closes the image.
        drop(image);
        let path = self.snapshots.path(&record.group, name).join(&disk.file);
        std::fs::File::open(path)?.sync_all()
    }

    fn keep(&mut self, name: &str, record: &Record) -> io::Result<()> {
        let all = self.snapshots;
        all.files.sync_dir(&Snapshots::place(&record.group, name))?;
        all.save(name, record)?;
        if let Some(entry) = all.lock().get_mut::<Key>(&key(&record.group, name)) {
            entry.record = record.clone();
        }
        Ok(())
    }
}

/// Slows a job down to what was asked for.
struct Pacer<'a> {
    job: &'a Job,
    since: Instant,
    rate_bytes_s: Option<u64>,
    over: Option<Duration>,
    all_bytes: u64,
}

impl<'a> Pacer<'a> {
    fn new(records: &[(String, Record)], job: &'a Job) -> Self {
        let paces = || records.iter().map(|(_, record)| record.pace);
        let disks = records.first().map_or(&[][..], |(_, record)| &record.disks[..]);
        job.done_bytes.store(0, Ordering::Relaxed);
        Self {
            job,
            since: Instant::now(),
            rate_bytes_s: paces().filter_map(|pace| pace.rate_bytes_s).min(),
            over: paces().filter_map(|pace| pace.over_ms).max().map(Duration::from_millis),
            all_bytes: disks.iter().map(|disk| disk.size_bytes).sum(),
        }
    }

    /// So many bytes of the disks were looked at.
    fn step(&self, bytes: u64, done: Done) -> Result<(), End> {
        let looked_at = self.job.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.job.written_bytes.store(done.written_bytes, Ordering::Relaxed);
        let mut until = self.since;
        if let Some(over) = self.over {
            until = self.since + over.mul_f64(looked_at as f64 / self.all_bytes.max(1) as f64);
        }
        if let Some(rate) = self.rate_bytes_s {
            let moved = done.written_bytes.max(done.read_bytes);
            until =
                until.max(self.since + Duration::from_secs_f64(moved as f64 / rate.max(1) as f64));
        }
        self.job.sleep_until(until)
    }
}
