//! The directory of a backlog on disk, on a disk of its host. Nothing of it is ever synced: a process that is killed leaves
//! all that it had written, the last append maybe in part; a power loss leaves any sectors of any files, also of such as
//! were removed.

use crate::disk::SECTOR_BYTES;
use crate::rng::Rng;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use tidelock_daemon_core::backlog::HEADER_BYTES;
use tidelock_storage::unsynced::{UnsyncedDir, UnsyncedFile};

/// So many files that were removed may be there again after a power loss.
const REMOVED_MAX: usize = 4;

type Content = Arc<Mutex<Vec<u8>>>;

/// A directory.
#[derive(Debug)]
pub struct SimFiles {
    path: PathBuf,
    there: Mutex<There>,
    health: Arc<Mutex<Health>>,
}

#[derive(Debug, Default)]
struct There {
    files: BTreeMap<String, Content>,
    removed: VecDeque<(String, Content)>,
}

/// What goes wrong.
#[derive(Debug)]
struct Health {
    rng: Rng,
    /// There is no room for one append of so many; 0: there is.
    full_one_in: u64,
    /// The process is killed within the next append.
    dies: bool,
    /// It was: nothing of what it does now happens.
    is_dead: bool,
    /// The living process had no room for an append.
    ran_full: bool,
}

impl SimFiles {
    /// An empty one.
    #[must_use]
    pub fn new(name: &str, rng: Rng) -> Self {
        let health = Health { rng, full_one_in: 0, dies: false, is_dead: false, ran_full: false };
        Self {
            path: PathBuf::from(format!("{name}.backlog")),
            there: Mutex::default(),
            health: Arc::new(Mutex::new(health)),
        }
    }

    fn there(&self) -> MutexGuard<'_, There> {
        self.there.lock().expect("one thread")
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().expect("one thread")
    }

    fn alive(&self) -> io::Result<()> {
        self.health().alive()
    }

    fn handle(&self, content: &Content) -> Box<dyn UnsyncedFile> {
        Box::new(SimFile { content: content.clone(), health: self.health.clone() })
    }

    /// There is no room for one append of so many; 0: there is.
    pub fn is_full_for(&self, one_in: u64) {
        self.health().full_one_in = one_in;
    }

    /// The process is killed within its next append.
    pub fn dies_within_next(&self) {
        self.health().dies = true;
    }

    /// Whether the living process has had no room for an append since it was asked last.
    pub fn take_ran_full(&self) -> bool {
        std::mem::take(&mut self.health().ran_full)
    }

    /// The process is killed now.
    pub fn dies(&self) {
        self.health().is_dead = true;
    }

    /// True if the process was killed so.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.health().is_dead
    }

    /// True if some record is on disk.
    #[must_use]
    pub fn has_records(&self) -> bool {
        let there = self.there();
        let mut files = there.files.values();
        files.any(|file| file.lock().expect("one thread").len() > HEADER_BYTES)
    }

    /// It is gone, and another one may come.
    pub fn process_ends(&self) {
        let mut health = self.health();
        (health.dies, health.is_dead) = (false, false);
    }

    /// The host loses power.
    pub fn power_loss(&self, rng: &mut Rng) {
        let mut there = self.there();
        let live = std::mem::take(&mut there.files);
        let before = live.keys().cloned().collect::<Vec<_>>();
        let removed = std::mem::take(&mut there.removed).into_iter();
        let gone = removed.filter(|(name, _)| !before.contains(name)).map(|of| (of, 30));
        let keep_percent = *rng.pick(&[0, 50, 95, 100]);
        for ((name, content), stays_percent) in live.into_iter().map(|of| (of, 80)).chain(gone) {
            if !rng.chance(stays_percent, 100) {
                continue;
            }
            let mut bytes = content.lock().expect("one thread").clone();
            for sector in bytes.chunks_mut(SECTOR_BYTES as usize) {
                if !rng.chance(keep_percent, 100) {
                    sector.fill(0);
                }
            }
            if rng.chance(1, 3) {
                bytes.truncate(rng.below(bytes.len() as u64 + 1) as usize);
            }
            there.files.insert(name, Arc::new(Mutex::new(bytes)));
        }
    }
}

impl Health {
    fn alive(&self) -> io::Result<()> {
        if self.is_dead { Err(io::Error::other("the process was killed")) } else { Ok(()) }
    }

    /// How much of an append is written, and what its process hears.
    fn append(&mut self, len: usize) -> (usize, io::Result<()>) {
        if let Err(dead) = self.alive() {
            return (0, Err(dead));
        }
        let is_full = self.full_one_in > 0 && self.rng.chance(1, self.full_one_in);
        if self.dies || is_full {
            self.is_dead = self.dies;
            self.ran_full |= !self.dies;
            let failed = Err(io::ErrorKind::StorageFull.into());
            return (self.rng.index(len), failed);
        }
        (len, Ok(()))
    }
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl UnsyncedDir for SimFiles {
    fn path(&self) -> &Path {
        &self.path
    }

    fn make(&self) -> io::Result<()> {
        self.alive()
    }

    fn names(&self) -> io::Result<Option<Vec<String>>> {
        Ok(Some(self.there().files.keys().cloned().collect()))
    }

    fn has(&self, name: &str) -> bool {
        self.there().files.contains_key(name)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn UnsyncedFile>> {
        self.alive()?;
        if self.has(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let content = Content::default();
        self.there().files.insert(name.to_owned(), content.clone());
        Ok(self.handle(&content))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn UnsyncedFile>> {
        self.there().files.get(name).map(|content| self.handle(content)).ok_or_else(missing)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.alive()?;
        let mut there = self.there();
        let removed = there.files.remove_entry(name).ok_or_else(missing)?;
        there.removed.push_back(removed);
        if there.removed.len() > REMOVED_MAX {
            there.removed.pop_front();
        }
        Ok(())
    }
}

#[derive(Debug)]
struct SimFile {
    content: Content,
    health: Arc<Mutex<Health>>,
}

impl SimFile {
    fn content(&self) -> MutexGuard<'_, Vec<u8>> {
        self.content.lock().expect("one thread")
    }
}

impl UnsyncedFile for SimFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (written, result) = self.health.lock().expect("one thread").append(bytes.len());
        self.content().extend_from_slice(&bytes[..written]);
        result
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let content = self.content();
        let from = content.get(offset as usize..).unwrap_or_default();
        let len = from.len().min(into.len());
        into[..len].copy_from_slice(&from[..len]);
        Ok(len)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.content().len() as u64)
    }

    fn truncate(&mut self, len_bytes: u64) -> io::Result<()> {
        self.health.lock().expect("one thread").alive()?;
        self.content().truncate(len_bytes as usize);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_tears_the_last_append_and_a_power_loss_anything() {
        let files = SimFiles::new("vm", Rng::new(1));
        let mut a = files.create("a").unwrap();
        a.append(&[1; 1500]).unwrap();
        files.dies_within_next();
        assert!(a.append(&[2; 100]).is_err());
        let len = a.len_bytes().unwrap();
        assert!((1500..1600).contains(&len), "{len}");
        assert!(a.append(&[3; 1]).is_err() && files.remove("a").is_err(), "it is dead");
        files.process_ends();
        assert_eq!(files.open("a").unwrap().len_bytes().unwrap(), len);
        files.remove("a").unwrap();
        assert_eq!(a.len_bytes().unwrap(), len, "what is open is read");
        let (mut back, mut torn) = (0, 0);
        for seed in 0..100 {
            let after = SimFiles::new("vm", Rng::new(2));
            after.create("b").unwrap().append(&[1; 1500]).unwrap();
            after.create("c").unwrap();
            after.remove("c").unwrap();
            after.power_loss(&mut Rng::new(seed));
            back += usize::from(after.has("c"));
            let b = after.open("b").map(|b| b.len_bytes().unwrap());
            torn += usize::from(b.is_ok_and(|len| len < 1500));
        }
        assert!(back > 10 && torn > 10, "{back} {torn}");
    }
}
