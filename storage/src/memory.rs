//! A disk in memory that crashes: what is written and what is durable are kept apart.
//!
//! A crash keeps, of everything that was not synced, any part: each sector of each write and each
//! change of a directory entry by itself ([`Chooser`]). That is harsher than most file systems,
//! and all that POSIX promises. With a directory goes what is in it. One that nobody has made was always there. Faults (no room, I/O errors, power loss at the n-th operation) are
//! injected with [`Memory::set_faults`].

use crate::{Storage, StorageFile};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

/// What the disk writes atomically.
pub const SECTOR_BYTES: u64 = 512;

const WORD_BYTES: usize = 4;

/// The inode of each directory.
const DIRECTORY: u64 = 0;

/// Decides at a crash what survives.
pub trait Chooser {
    /// Whether this unsynced sector or directory entry made it to the disk.
    fn survives(&mut self) -> bool;
}

impl<F: FnMut() -> bool> Chooser for F {
    fn survives(&mut self) -> bool {
        self()
    }
}

/// Faults to come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Bytes that all files together may take; beyond it writes fail with "no space".
    pub capacity_bytes: Option<u64>,
    /// The power goes off right before the operation with this number (see [`Memory::ops`]):
    /// that one and all after it fail. A write that it hits is done in part.
    pub power_off_at: Option<u64>,
    /// Syncs fail, and forget what they should have written, as Linux does.
    pub sync_fails: bool,
    /// Files are not read.
    pub read_fails: bool,
}

/// The disk. Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct Memory(Arc<Mutex<Disk>>);

/// An open file of it.
#[derive(Clone, Debug)]
pub struct MemoryFile {
    disk: Memory,
    inode: u64,
}

#[derive(Clone, Debug, Default)]
struct Disk {
    inodes: BTreeMap<u64, Inode>,
    live: BTreeMap<String, u64>,
    durable: BTreeMap<String, u64>,
    /// All names in which the two may differ.
    unsynced: BTreeSet<String>,
    next: u64,
    ops: u64,
    faults: Faults,
    /// What the reserve takes if it is there.
    reserve_bytes: u64,
    reserve_is_free: bool,
    reserve_is_used: bool,
}

#[derive(Clone, Debug, Default)]
struct Inode {
    // Disks that came of a crash share what nobody has written since.
    live: Arc<Vec<u8>>,
    durable: Arc<Vec<u8>>,
    unsynced: Vec<Change>,
}

#[derive(Clone, Debug)]
enum Change {
    Write { offset: u64, data: Vec<u8> },
    Size(u64),
}

impl Memory {
    /// An empty disk.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the faults to come.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// The faults that it has now.
    #[must_use]
    pub fn faults(&self) -> Faults {
        self.lock().faults
    }

    /// Reserves so much for folding and recovery.
    pub fn set_reserve(&self, bytes: u64) {
        self.lock().reserve_bytes = bytes;
    }

    /// What all files that have a name take.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.lock().used_bytes()
    }

    /// Operations so far that change anything: writes, syncs, directory changes.
    #[must_use]
    pub fn ops(&self) -> u64 {
        self.lock().ops
    }

    /// How many independent choices [`Memory::crash`] would ask for now.
    #[must_use]
    pub fn crash_choices(&self) -> usize {
        let mut count = 0;
        let _ = self.crash(&mut || {
            count += 1;
            false
        });
        count
    }

    /// A new disk as this one is after power was lost now. This one is not changed; what is still
    /// open refers to it.
    #[must_use]
    pub fn crash(&self, chooser: &mut impl Chooser) -> Memory {
        let disk = self.lock();
        let mut after = Disk { next: disk.next, durable: disk.durable.clone(), ..Disk::default() };
        for name in &disk.unsynced {
            if disk.live.get(name) != disk.durable.get(name) && chooser.survives() {
                match disk.live.get(name) {
                    Some(inode) => after.durable.insert(name.clone(), *inode),
                    None => after.durable.remove(name),
                };
            }
        }
        let lost_dirs: BTreeSet<_> = (disk.live.iter().chain(&disk.durable))
            .filter(|(name, inode)| **inode == DIRECTORY && !after.durable.contains_key(*name))
            .map(|(name, _)| format!("{name}/"))
            .collect();
        after.durable.retain(|name, _| !lost_dirs.iter().any(|dir| name.starts_with(dir)));
        for inode in after.durable.values().filter(|inode| **inode != DIRECTORY) {
            let mut content = disk.inodes[inode].durable.clone();
            let unsynced = &disk.inodes[inode].unsynced;
            if !unsynced.is_empty() {
                let content = Arc::make_mut(&mut content);
                unsynced.iter().for_each(|change| change.survive(content, chooser));
            }
            let kept = Inode { live: content.clone(), durable: content, unsynced: Vec::new() };
            after.inodes.insert(*inode, kept);
        }
        after.live = after.durable.clone();
        Memory(Arc::new(Mutex::new(after)))
    }

    /// The disk as a process that was killed (not the machine) finds it again.
    #[must_use]
    pub fn killed(&self) -> Memory {
        let mut disk = self.lock().clone();
        disk.faults = Faults::default();
        Memory(Arc::new(Mutex::new(disk)))
    }

    /// The bytes that a file has after every crash, if nothing unsynced survives; `None`: no such name is certain.
    #[must_use]
    pub fn durable(&self, path: &str) -> Option<Arc<Vec<u8>>> {
        let disk = self.lock();
        disk.durable.get(path).map(|inode| disk.inodes[inode].durable.clone())
    }

    /// Damages one byte where it is durable and where it is read.
    pub fn flip(&self, path: &str, at: u64) {
        let mut disk = self.lock();
        let inode = disk.live[path];
        let inode = disk.inodes.get_mut(&inode).expect("live");
        Arc::make_mut(&mut inode.live)[at as usize] ^= 0x40;
        Arc::make_mut(&mut inode.durable)[at as usize] ^= 0x40;
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().expect("no panic while the disk is locked")
    }
}

/// Runs `live` on empty disks, with the power lost before each operation in turn, and calls `check` with the result of `live`
/// and each disk that the loss may leave. Returns the number of these disks.
pub fn each_power_loss<T>(live: impl Fn(&Memory) -> T, mut check: impl FnMut(&T, Memory)) -> usize {
    let mut count = 0;
    for power_off_at in 0.. {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(power_off_at), ..Faults::default() });
        let result = live(&disk);
        let mut choices: Vec<bool> = Vec::new();
        loop {
            let mut nth = 0;
            let left = disk.crash(&mut || {
                if nth == choices.len() {
                    choices.push(false);
                }
                nth += 1;
                choices[nth - 1]
            });
            check(&result, left);
            count += 1;
            while choices.last() == Some(&true) {
                choices.pop();
            }
            match choices.last_mut() {
                Some(last) => *last = true,
                None => break,
            }
        }
        if disk.ops() < power_off_at {
            break;
        }
    }
    count
}

impl Change {
    fn apply(&self, content: &mut Vec<u8>) {
        match self {
            Change::Size(size) => content.resize(*size as usize, 0),
            Change::Write { offset, data } => put(content, *offset, data),
        }
    }

    fn survive(&self, content: &mut Vec<u8>, chooser: &mut impl Chooser) {
        let Change::Write { offset, data } = self else {
            if chooser.survives() {
                self.apply(content);
            }
            return;
        };
        let mut at = 0;
        while at < data.len() {
            let sector_end = (offset + at as u64) / SECTOR_BYTES * SECTOR_BYTES + SECTOR_BYTES;
            let end = data.len().min((sector_end - offset) as usize);
            if chooser.survives() {
                put(content, offset + at as u64, &data[at..end]);
            }
            at = end;
        }
    }
}

fn put(content: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + data.len());
    if content.len() < end {
        content.resize(end, 0);
    }
    content[start..end].copy_from_slice(data);
}

impl Disk {
    fn op(&mut self) -> io::Result<()> {
        if self.faults.power_off_at.is_some_and(|at| self.ops >= at) {
            return Err(io::Error::other("the power is off"));
        }
        self.ops += 1;
        Ok(())
    }

    fn used_bytes(&self) -> u64 {
        let reserve = if self.reserve_is_free { 0 } else { self.reserve_bytes };
        // What has no name any more goes.
        let named: BTreeSet<u64> = self.live.values().copied().collect();
        let files = named.iter().filter(|inode| **inode != DIRECTORY);
        reserve + files.map(|inode| self.inodes[inode].live.len() as u64).sum::<u64>()
    }

    fn change(&mut self, inode: u64, change: Change) -> io::Result<()> {
        let off = self.op();
        let grows = match &change {
            Change::Size(size) => *size,
            Change::Write { offset, data } => offset + data.len() as u64,
        }
        .saturating_sub(self.inodes[&inode].live.len() as u64);
        let full = self.faults.capacity_bytes.is_some_and(|c| self.used_bytes() + grows > c);
        let (change, result) = match (change, off, full) {
            (change, Ok(()), false) => (change, Ok(())),
            // Half of a write that fails is there. No disk tears a word.
            (Change::Write { offset, mut data }, off, _) => {
                data.truncate(data.len() / 2 / WORD_BYTES * WORD_BYTES);
                (Change::Write { offset, data }, off.and(Err(io::ErrorKind::StorageFull.into())))
            }
            (Change::Size(_), off, _) => {
                return off.and(Err(io::ErrorKind::StorageFull.into()));
            }
        };
        let inode = self.inodes.get_mut(&inode).expect("open files are kept");
        change.apply(Arc::make_mut(&mut inode.live));
        inode.unsynced.push(change);
        result
    }
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Storage for Memory {
    type File = MemoryFile;

    fn create_dir(&self, dir: &str) -> io::Result<()> {
        let mut disk = self.lock();
        let ends = dir.match_indices('/').map(|(at, _)| at).chain([dir.len()]);
        for name in ends.map(|end| dir[..end].to_owned()) {
            if !disk.live.contains_key(&name) {
                disk.op()?;
                disk.live.insert(name.clone(), DIRECTORY);
                disk.unsynced.insert(name);
            }
        }
        Ok(())
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let prefix = if dir.is_empty() { String::new() } else { format!("{dir}/") };
        let disk = self.lock();
        let names = disk.live.keys().filter_map(|path| path.strip_prefix(&prefix));
        Ok(names.filter(|name| !name.contains('/')).map(str::to_owned).collect())
    }

    fn create(&self, path: &str) -> io::Result<MemoryFile> {
        let mut disk = self.lock();
        disk.op()?;
        if disk.live.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        disk.next += 1;
        let inode = disk.next;
        disk.inodes.insert(inode, Inode::default());
        disk.live.insert(path.to_owned(), inode);
        disk.unsynced.insert(path.to_owned());
        Ok(MemoryFile { disk: self.clone(), inode })
    }

    fn open(&self, path: &str) -> io::Result<MemoryFile> {
        let inode = *self.lock().live.get(path).ok_or_else(missing)?;
        if inode == DIRECTORY {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        Ok(MemoryFile { disk: self.clone(), inode })
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        let mut disk = self.lock();
        disk.op()?;
        disk.live.remove(path).ok_or_else(missing)?;
        disk.unsynced.insert(path.to_owned());
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = self.lock();
        disk.op()?;
        let inode = disk.live.remove(from).ok_or_else(missing)?;
        disk.live.insert(to.to_owned(), inode);
        disk.unsynced.extend([from.to_owned(), to.to_owned()]);
        Ok(())
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        let mut disk = self.lock();
        disk.op()?;
        if disk.faults.sync_fails {
            return Err(io::Error::other("injected sync failure"));
        }
        let inside = |path: &String| path.rsplit_once('/').map_or("", |(d, _)| d) == dir;
        let (synced, rest) = std::mem::take(&mut disk.unsynced).into_iter().partition(inside);
        disk.unsynced = rest;
        let synced: BTreeSet<String> = synced;
        for path in synced {
            match disk.live.get(&path).copied() {
                Some(inode) => disk.durable.insert(path, inode),
                None => disk.durable.remove(&path),
            };
        }
        Ok(())
    }

    fn display_path(&self, path: &str) -> PathBuf {
        PathBuf::from(path)
    }

    fn fresh_id(&self) -> u64 {
        let mut disk = self.lock();
        disk.next += 1;
        // Spread, so that it is not mistaken for a small number elsewhere.
        disk.next.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn use_reserve(&self) {
        let mut disk = self.lock();
        (disk.reserve_is_free, disk.reserve_is_used) = (true, true);
    }

    fn end_use_of_reserve(&self) {
        self.lock().reserve_is_used = false;
    }

    fn keep_reserve(&self) -> io::Result<()> {
        let mut disk = self.lock();
        if !disk.reserve_is_free {
            return Ok(());
        }
        if disk.reserve_is_used {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let used = disk.used_bytes() + disk.reserve_bytes;
        if disk.faults.capacity_bytes.is_some_and(|capacity| used > capacity) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        disk.reserve_is_free = false;
        Ok(())
    }
}

impl StorageFile for MemoryFile {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.disk.lock().inodes[&self.inode].live.len() as u64)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let disk = self.disk.lock();
        if disk.faults.read_fails {
            return Err(io::Error::other("the disk does not read"));
        }
        let content = &disk.inodes[&self.inode].live;
        let end = offset as usize + buf.len();
        let part = content.get(offset as usize..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(part);
        Ok(())
    }

    fn write_at(&self, parts: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        let mut data = Vec::with_capacity(parts.iter().map(|part| part.len()).sum());
        parts.iter().for_each(|part| data.extend_from_slice(part));
        self.disk.lock().change(self.inode, Change::Write { offset, data })
    }

    fn zero_at(&self, offset: u64, len_bytes: u64, _keep_allocated: bool) -> io::Result<()> {
        self.write_at(&[IoSlice::new(&vec![0; len_bytes as usize])], offset)
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.disk.lock().change(self.inode, Change::Size(size_bytes))
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.disk.lock();
        disk.op()?;
        let fails = disk.faults.sync_fails;
        let inode = disk.inodes.get_mut(&self.inode).expect("open files are kept");
        let unsynced = std::mem::take(&mut inode.unsynced);
        if fails {
            // The page cache still shows it, and no later sync will write it.
            return Err(io::Error::other("injected sync failure"));
        }
        if !unsynced.is_empty() {
            let durable = Arc::make_mut(&mut inode.durable);
            unsynced.iter().for_each(|change| change.apply(durable));
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let size = self.size_bytes()?;
        Ok((offset < size).then_some(offset..size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_synced_is_certain() {
        let disk = Memory::new();
        let file = disk.create("d/f").unwrap();
        file.write_at(&[IoSlice::new(&[1; 1024])], 0).unwrap();
        file.sync().unwrap();
        assert!(disk.crash(&mut || false).open("d/f").is_err(), "its name was not synced");
        disk.sync_dir("d").unwrap();
        file.write_at(&[IoSlice::new(&[2; 1024])], 256).unwrap();
        let mut nth = 0;
        let after = disk.crash(&mut || {
            nth += 1;
            nth == 2
        });
        let mut back = [0; 1024];
        after.open("d/f").unwrap().read_at(&mut back, 0).unwrap();
        assert_eq!((nth, back[511], back[512], back[1023]), (3, 1, 2, 2), "torn by sectors");
        disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
        assert!(file.sync().is_err());
        disk.set_faults(Faults::default());
        file.sync().unwrap();
        disk.killed().open("d/f").unwrap().read_at(&mut back, 0).unwrap();
        assert_eq!(back[256], 2, "the page cache still shows what the disk never got");
        disk.crash(&mut || true).open("d/f").unwrap().read_at(&mut back, 0).unwrap();
        assert_eq!(back[256], 1, "a later sync does not bring it back");
    }
}
