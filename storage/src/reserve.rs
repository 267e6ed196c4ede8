//! Room on the disk that only folding, retention and recovery may use.
//!
//! A full disk must not keep from happening what makes room: a fold writes its position and some blocks of the images
//! before a segment can go, and a recovery is put on record. So one preallocated file stands beside the groups of a
//! server. It is removed while a group folds on a full disk or is recovered, and allocated again before anything more
//! is ingested.

use rustix::fs::FallocateFlags;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Of a small file system the reserve takes this part at most.
const PART: u64 = 5;

/// The reserve of a server's data directory.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
    wanted_bytes: u64,
    is_there: AtomicBool,
    /// Group directories that use it.
    users: Mutex<BTreeSet<PathBuf>>,
}

impl Reserve {
    /// The reserve in this directory, with what an earlier run has left of it. It is allocated if there is room.
    pub fn open(dir: &Path, wanted_bytes: u64) -> io::Result<Self> {
        let of = rustix::fs::statvfs(dir)?;
        let part = of.f_blocks.saturating_mul(of.f_frsize) / PART;
        let reserve = Self {
            path: dir.join("reserve"),
            wanted_bytes: wanted_bytes.min(part),
            is_there: AtomicBool::new(false),
            users: Mutex::default(),
        };
        // Another size may be configured by now.
        if let Ok(file) = File::open(&reserve.path) {
            let is_whole = file.metadata()?.len() == reserve.wanted_bytes;
            reserve.is_there.store(is_whole, Ordering::Release);
        }
        if let Err(error) = reserve.keep() {
            tracing::warn!(
                path = %reserve.path.display(),
                bytes = reserve.wanted_bytes,
                "no room for the reserve: nothing is taken from hosts until there is ({error})"
            );
        }
        Ok(reserve)
    }

    /// Frees it for this user.
    pub fn use_for(&self, user: &Path) {
        let mut users = self.lock();
        users.insert(user.to_owned());
        self.is_there.store(false, Ordering::Release);
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                tracing::error!(path = %self.path.display(), "the reserve cannot be freed: {e}");
            }
            _ => {}
        }
    }

    /// The user needs it no more.
    pub fn end_use_for(&self, user: &Path) {
        self.lock().remove(user);
    }

    /// Writes something small that a recovery needs: on a full disk in the reserve's room.
    pub fn write_anyway<T>(
        &self,
        user: &Path,
        mut write: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        match write() {
            Err(error) if crate::is_full(&error) => {
                self.use_for(user);
                let written = write();
                self.end_use_for(user);
                written
            }
            written => written,
        }
    }

    /// Allocates it if it is free and nobody uses it.
    pub fn keep(&self) -> io::Result<()> {
        if self.is_there.load(Ordering::Acquire) {
            return Ok(());
        }
        let users = self.lock();
        if !users.is_empty() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let made = self.allocate();
        if made.is_err() {
            let _ = fs::remove_file(&self.path);
        }
        self.is_there.store(made.is_ok(), Ordering::Release);
        made
    }

    fn allocate(&self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&self.path)?;
        if self.wanted_bytes == 0 {
            return Ok(());
        }
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, self.wanted_bytes) {
            // This file system cannot: the blocks are written.
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let zeroes = vec![0; 1 << 20];
                let mut at = 0;
                while at < self.wanted_bytes {
                    let len = (self.wanted_bytes - at).min(zeroes.len() as u64);
                    file.write_all_at(&zeroes[..len as usize], at)?;
                    at += len;
                }
                file.sync_data()
            }
            made => Ok(made?),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_free_while_somebody_uses_it_and_there_again_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let size = || fs::metadata(dir.path().join("reserve")).map(|of| of.len()).ok();
        let reserve = Reserve::open(dir.path(), 1 << 20).unwrap();
        assert_eq!(size(), Some(1 << 20));
        reserve.use_for(Path::new("a"));
        reserve.use_for(Path::new("b"));
        reserve.end_use_for(Path::new("a"));
        assert_eq!(size(), None);
        assert_eq!(reserve.keep().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        reserve.end_use_for(Path::new("b"));
        reserve.keep().unwrap();
        assert_eq!(size(), Some(1 << 20));
        drop(reserve);
        Reserve::open(dir.path(), 2 << 20).unwrap();
        assert_eq!(size(), Some(2 << 20), "the size that is configured now");
    }

    #[test]
    fn what_a_recovery_writes_on_a_full_disk_has_the_reserves_room() {
        let dir = tempfile::tempdir().unwrap();
        let reserve = Reserve::open(dir.path(), 1 << 20).unwrap();
        let file = dir.path().join("reserve");
        let mut attempts = 0;
        let mut write = || {
            attempts += 1;
            match file.exists() {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(reserve.keep().unwrap_err().kind()),
            }
        };
        let kept = reserve.write_anyway(Path::new("guests"), &mut write).unwrap();
        assert_eq!(kept, io::ErrorKind::ResourceBusy, "nobody takes the room meanwhile");
        assert_eq!(attempts, 2);
        reserve.keep().unwrap();
        assert!(file.exists());
        let other = || Err::<(), _>(io::ErrorKind::PermissionDenied.into());
        assert!(reserve.write_anyway(Path::new("guests"), other).is_err() && file.exists());
    }
}
