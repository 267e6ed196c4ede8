//! The file system, as everything that writes sees it, and no more of it than that needs.
//!
//! | module | what it is for |
//! |---|---|
//! | [`files`] | a directory of the file system |
//! | `memory` | a disk in memory that crashes, for the simulator and tests (feature `memory-storage`) |
//! | [`open_files`] | files that are open by name, within what the process may have open |
//! | [`reserve`] | room that only folding, retention and recovery may use |
//! | [`json`] | small files of JSON, each replaced as a whole |
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

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::ops::Range;

/// A directory tree. Paths are relative to it and use `/`.
pub trait Storage: Clone + Debug {
    /// An open file. Clones refer to the same file, also after it was removed.
    type File: StorageFile;

    /// Makes a directory; fine if it exists.
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
