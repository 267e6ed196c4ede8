//! Snapshots of groups that this server makes and keeps: copies at a point, outside of the journal.
//!
//! | module | what it is for |
//! |---|---|
//! | this | which there are; what is read from and written to their directory |
//! | [`ask`] | what is asked for, checked and put on record |
//! | [`job`] | making and moving one, in a thread |
//! | [`serve`] | requests on the control socket |
//! | [`tend`] | removal of those whose time is over |
//! | [`told`] | what is told of them |
//!
//! Invariants: see [`tidelock_replica::travel::snapshot`]. A snapshot has one job at a time at most. Replication is not touched:
//! what is read are views, and a file system without room is told before it is full.
//!
//! Source: Retroscope 3 (instant, retrospective, incremental, rolling and concurrent snapshots) and 7 (deferred ones).

mod ask;
mod job;
mod serve;
mod tend;
mod told;

pub use ask::Wanted;
pub use job::Job;
pub use serve::Ask;
pub(in crate::server) use serve::serve;
pub use told::{Phase, SnapshotDisk, SnapshotStatus, VerifiedDisk};

use super::inbox::Event;
use super::registry::Registry;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use tidelock_protocol::bounds;
use tidelock_replica::history::Hold;
use tidelock_replica::travel::snapshot::{self, Record};
use tidelock_storage::Storage;
use tidelock_storage::files::Files;
use tokio::runtime::Handle;

/// Snapshots of one group.
const SNAPSHOTS_MAX: usize = 1024;

/// A directory that begins so is being removed.
const REMOVED: &str = ".removed-";

/// Group and name.
type Key = (String, String);

/// One snapshot.
#[derive(Debug)]
struct Entry {
    record: Record,
    job: Option<Arc<Job>>,
    /// Why its last job has ended before its end.
    failed: Option<String>,
    /// What that job had written.
    written_bytes: u64,
    /// What it needs of the journal.
    holds: Vec<Hold>,
}

impl Entry {
    fn new(record: Record) -> Self {
        Self { record, job: None, failed: None, written_bytes: 0, holds: Vec::new() }
    }
}

/// All snapshots.
#[derive(Debug)]
pub struct Snapshots {
    registry: Arc<Registry>,
    dir: PathBuf,
    files: Files,
    runtime: Handle,
    all: Mutex<BTreeMap<Key, Entry>>,
    /// Held while something is asked for until it is on record.
    asking: Mutex<()>,
    /// Jobs that read and write.
    working: AtomicUsize,
    stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// What was begun goes on by itself; else only when it is asked for.
    goes_on: bool,
}

impl Snapshots {
    /// Those on record. To be called in a runtime.
    pub fn open(registry: &Arc<Registry>, goes_on: bool) -> io::Result<Arc<Self>> {
        let dir = registry.config().snapshots_dir.clone();
        std::fs::create_dir_all(&dir)?;
        let files = Files::new(dir.clone());
        let mut all = BTreeMap::new();
        for group in directories(&dir)?.into_iter().filter(|group| bounds::is_name(group)) {
            for name in directories(&dir.join(&group))? {
                let path = format!("{group}/{name}");
                if name.starts_with(REMOVED) {
                    remove_files(&dir.join(&path))?;
                    continue;
                }
                match snapshot::read(&files, &path) {
                    Ok(Some(record)) => {
                        all.insert((group.clone(), name), Entry::new(record));
                    }
                    // It never came to be, or is somebody else's.
                    Ok(None) => {}
                    Err(error) => tracing::error!("the snapshot is left alone: {error}"),
                }
            }
        }
        let snapshots = Arc::new(Self {
            registry: Arc::clone(registry),
            dir,
            files,
            runtime: Handle::current(),
            all: Mutex::new(all),
            asking: Mutex::default(),
            working: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            threads: Mutex::default(),
            goes_on,
        });
        if goes_on {
            snapshots.go_on();
        }
        Ok(snapshots)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Entry>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A snapshot's directory.
    fn path(&self, group: &str, name: &str) -> PathBuf {
        self.dir.join(group).join(name)
    }

    /// The same as the storage calls it.
    fn place(group: &str, name: &str) -> String {
        format!("{group}/{name}")
    }

    /// Puts a record on record.
    fn save(&self, name: &str, record: &Record) -> io::Result<()> {
        snapshot::write(&self.files, &Self::place(&record.group, name), record)
    }

    /// Nothing of the journal is needed for it any more.
    fn release(&self, group: &str, name: &str) {
        if let Some(owner) = self.registry.get(group) {
            owner.inbox.push(Event::SnapshotOver { name: name.to_owned() });
        }
    }

    /// Those whose images are over this one's.
    fn over(all: &BTreeMap<Key, Entry>, group: &str, name: &str) -> Vec<String> {
        let over = |((of, _), entry): &(&Key, &Entry)| {
            of == group && entry.record.base.as_deref() == Some(name)
        };
        all.iter().filter(over).map(|((_, name), _)| name.clone()).collect()
    }

    /// Takes one out, and its files. Not one that others are over.
    pub fn remove(&self, group: &str, name: &str) -> Result<(), String> {
        let cannot = |e: io::Error| format!("cannot remove snapshot {name}: {e}; remove it again");
        let _one = self.asking.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let all = self.lock();
            if !all.contains_key(&(group.to_owned(), name.to_owned())) {
                return Err(unknown(&all, group, name));
            }
            let over = Self::over(&all, group, name);
            if !over.is_empty() {
                return Err(format!(
                    "snapshot {name} is the base of {}: remove {} first",
                    over.join(", "),
                    if over.len() == 1 { "that" } else { "those" }
                ));
            }
        }
        self.pause(group, name);
        // First it is nothing any more.
        let removed = format!("{REMOVED}{name}");
        self.files
            .rename(&Self::place(group, name), &Self::place(group, &removed))
            .map_err(cannot)?;
        self.files.sync_dir(group).map_err(cannot)?;
        self.lock().remove(&(group.to_owned(), name.to_owned()));
        self.release(group, name);
        remove_files(&self.path(group, &removed)).map_err(cannot)
    }

    /// Ends all jobs. What was begun goes on when a server runs again.
    pub fn stop(&self) {
        use std::sync::atomic::Ordering;
        self.stopping.store(true, Ordering::Release);
        let jobs: Vec<_> = self.lock().values().filter_map(|entry| entry.job.clone()).collect();
        jobs.iter().for_each(|job| job.cancel());
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// What snapshots of a group need of its journal, by their names.
pub(super) fn needs(dir: &Path, group: &str) -> Vec<(String, Record)> {
    let files = Files::new(dir.to_owned());
    let mut names = directories(&dir.join(group)).unwrap_or_default();
    names.retain(|name| !name.starts_with(REMOVED));
    let read = |name: String| match snapshot::read(&files, &format!("{group}/{name}")) {
        Ok(record) => record.map(|record| (name, record)),
        Err(error) => {
            tracing::error!(group, "what this snapshot needs is not known: {error}");
            None
        }
    };
    names.into_iter().filter_map(read).collect()
}

/// The names of the directories in one; none if that is not there.
fn directories(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Removes a directory with its files; other directories in it stay.
fn remove_files(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            std::fs::remove_file(entry.path())?;
        }
    }
    std::fs::remove_dir(dir)
}

fn unknown(all: &BTreeMap<Key, Entry>, group: &str, name: &str) -> String {
    let of_group = all.keys().filter(|(of, _)| of == group);
    let names: Vec<_> = of_group.map(|(_, name)| name.as_str()).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    format!("there is no snapshot {name} of group {group}; there are: {names}")
}
