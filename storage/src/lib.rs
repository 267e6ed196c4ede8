//! The file system, as everything that writes sees it, and no more of it than that needs.
//!
//! | module | what it is for |
//! |---|---|
//! | [`files`] | a directory of the file system |
//! | `memory` | a disk in memory that crashes, for the simulator and tests (feature `memory-storage`) |
//! | [`open_files`] | files that are open by name, within what the process may have open |
//! | [`reserve`] | room that only folding, retention and recovery may use |
//! | [`json`] | small files of JSON, each replaced as a whole |
//! | [`unsynced`] | directories whose files are never synced |
//!
//! The traits are synchronous and small so that the same code runs on files in production
//! ([`files`]) and, in the simulator and in crash tests, on a disk in memory that keeps what is
//! written apart from what is durable (`memory`).
//!
//! What may be relied on after a crash, and nothing else:
//! - the bytes and the size of a file as of its last successful [`StorageFile::sync`];
//! - the entries of a directory as of its last successful [`Storage::sync_dir`].
//!
//! Anything later may be there in any part, at the granularity of a sector.
#![forbid(unsafe_code)]

pub mod files;
pub mod json;
#[cfg(any(test, feature = "memory-storage"))]
pub mod memory;
pub mod open_files;
pub mod reserve;
pub mod unsynced;

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::path::PathBuf;

/// A directory tree. Paths are relative to it and use `/`.
pub trait Storage: Clone + Debug {
    /// An open file. Clones refer to the same file, also after it was removed.
    type File: StorageFile;

    /// Makes a directory and those above it, for the owner alone; fine if it exists.
    fn create_dir(&self, dir: &str) -> io::Result<()>;
    /// The names in a directory, in any order.
    fn list(&self, dir: &str) -> io::Result<Vec<String>>;
    /// Makes a new, empty file. Fails if the name exists.
    fn create(&self, path: &str) -> io::Result<Self::File>;
    /// Opens a file for reading and writing.
    fn open(&self, path: &str) -> io::Result<Self::File>;
    /// Removes a name.
    fn remove(&self, path: &str) -> io::Result<()>;
    /// Gives a file another name, replacing what has it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Makes the entries of a directory durable.
    fn sync_dir(&self, dir: &str) -> io::Result<()>;
    /// The path as people know it.
    fn display_path(&self, path: &str) -> PathBuf;
    /// A number that was never given out before, here or elsewhere.
    fn fresh_id(&self) -> u64;
    /// Frees the reserve for folding, retention and recovery, until [`Storage::end_use_of_reserve`].
    fn use_reserve(&self);
    /// This user of the reserve needs it no more; the reserve stays free until [`Storage::keep_reserve`].
    fn end_use_of_reserve(&self);
    /// Allocates the reserve again if it is free. While that fails nothing may be ingested: the room belongs to
    /// folding and recovery. The error is [`io::ErrorKind::ResourceBusy`] while another user has the reserve.
    fn keep_reserve(&self) -> io::Result<()>;
}

/// An open file.
pub trait StorageFile: Clone + Debug {
    /// Its size.
    fn size_bytes(&self) -> io::Result<u64>;
    /// Fills the whole buffer; `UnexpectedEof` where the file ends before.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all the parts, one after the other. After an error any part of it may be written.
    fn write_at(&self, parts: &[IoSlice<'_>], offset: u64) -> io::Result<()>;
    /// Makes a range inside the file read as zeroes; its blocks stay allocated if so asked.
    fn zero_at(&self, offset: u64, len_bytes: u64, keep_allocated: bool) -> io::Result<()>;
    /// Sets the size. A file that grows reads as zeroes there.
    fn set_size(&self, size_bytes: u64) -> io::Result<()>;
    /// Makes everything written durable (fdatasync).
    fn sync(&self) -> io::Result<()>;
    /// The first range at or after `offset` that may hold anything but zeroes.
    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>>;
}

/// Whether an error says that there is no room, which can get better.
#[must_use]
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Replaces a small file as a whole: after a crash it is the old one or the new one.
pub fn replace<S: Storage>(storage: &S, dir: &str, name: &str, content: &[u8]) -> io::Result<()> {
    let (tmp, path) = (join(dir, &format!("{name}.new")), join(dir, name));
    // Left over from a crash or a full disk.
    match storage.remove(&tmp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let file = storage.create(&tmp)?;
    file.write_at(&[IoSlice::new(content)], 0)?;
    file.sync()?;
    storage.rename(&tmp, &path)?;
    storage.sync_dir(dir)
}

/// Makes a directory and those above it, durably, also if one is there: the process that made it may have been killed
/// before it was durable.
pub fn create_dirs<S: Storage>(storage: &S, dir: &str) -> io::Result<()> {
    storage.create_dir(dir)?;
    let mut above = dir;
    while !above.is_empty() {
        above = above.rsplit_once('/').map_or("", |(above, _)| above);
        storage.sync_dir(above)?;
    }
    Ok(())
}

/// Removes a small file durably, if it is there. The process that removed one may have been killed before that was durable.
pub fn forget<S: Storage>(storage: &S, dir: &str, name: &str) -> io::Result<()> {
    let or_missing = |result: io::Result<()>| match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    };
    or_missing(storage.remove(&join(dir, name)))?;
    or_missing(storage.sync_dir(dir))
}

/// Reads a small file as a whole. `None`: there is none.
pub fn read_all<S: Storage>(storage: &S, path: &str) -> io::Result<Option<Vec<u8>>> {
    let file = match storage.open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut content = vec![0; usize::try_from(file.size_bytes()?).map_err(io::Error::other)?];
    file.read_at(&mut content, 0)?;
    Ok(Some(content))
}

/// `dir/name`; the empty `dir` is the root.
#[must_use]
pub fn join(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Memory, each_power_loss};

    /// Contents that have been promised, one after the other; the last one of a call that has not returned is possible, too.
    fn live(disk: &Memory) -> Vec<Option<&'static str>> {
        let mut promised = vec![None];
        let mut done = |content: Option<&'static str>, result: io::Result<()>| {
            promised.push(content);
            result.is_ok()
        };
        let replaced = |content: &'static str| replace(disk, "a/b", "f", content.as_bytes());
        let _ = done(None, create_dirs(disk, "a/b"))
            && done(Some("one"), replaced("one"))
            && done(Some("another one"), replaced("another one"))
            && done(None, forget(disk, "a/b", "f"))
            && done(None, forget(disk, "a/b", "f"))
            && done(None, Ok(()));
        promised
    }

    #[test]
    fn a_file_is_what_it_was_or_what_it_becomes_wherever_the_power_is_lost() {
        let ways = each_power_loss(live, |promised, left| {
            let found = read_all(&left, "a/b/f").unwrap();
            let possible = &promised[promised.len() - 2..];
            assert!(
                possible.iter().any(|content| content.map(str::as_bytes) == found.as_deref()),
                "{found:?} of {possible:?}"
            );
        });
        assert!(ways > 30, "{ways}");
    }

    #[test]
    fn directories_are_their_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let mode =
            |path: &str| dir.path().join(path).metadata().unwrap().permissions().mode() & 0o7777;
        let files = files::Files::make(dir.path().join("root/below")).unwrap();
        create_dirs(&files, "a/b").unwrap();
        replace(&files, "a/b", "f", b"one").unwrap();
        for made in ["root", "root/below", "root/below/a", "root/below/a/b"] {
            assert_eq!(mode(made), 0o700, "{made}");
        }
        assert_eq!(mode("root/below/a/b/f"), 0o600);
        forget(&files, "missing", "f").unwrap();
    }
}
