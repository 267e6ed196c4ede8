//! [`Storage`] on a directory of the file system, through the page cache.

use crate::open_files::{Handle, OpenFiles};
use crate::reserve::Reserve;
use crate::{Storage, StorageFile};
use rustix::fs::{FallocateFlags, SeekFrom};
use std::fs::{self, DirBuilder, File};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most parts that one system call takes.
const IOV_MAX: usize = 1024;
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A directory.
#[derive(Clone, Debug)]
pub struct Files {
    root: Arc<Path>,
    reserve: Option<Arc<Reserve>>,
}

/// An open file. It is closed meanwhile if it is not used and there are too many ([`crate::open_files`]).
#[derive(Clone, Debug)]
pub struct OpenFile(Arc<Handle>);

impl Files {
    /// The directory must exist.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root: root.into(), reserve: None }
    }

    /// Makes the directory and those above it, durably, and for the owner alone.
    pub fn make(root: PathBuf) -> io::Result<Self> {
        make_dir(&root)?;
        Ok(Self::new(root))
    }

    /// The same with a reserve beside it.
    #[must_use]
    pub fn with_reserve(self, reserve: Arc<Reserve>) -> Self {
        Self { reserve: Some(reserve), ..self }
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// A directory that its owner alone reads, with any umask: files tell of guests' data.
fn private_dir() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// Makes a directory, and its name durable, also if one is there: the process that made it may have been killed before.
fn make_dir(dir: &Path) -> io::Result<()> {
    let above = match dir.parent() {
        None => return Ok(()),
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
    };
    if !dir.exists() {
        make_dir(above)?;
        match private_dir().create(dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
    }
    File::open(above)?.sync_all()
}

impl Storage for Files {
    type File = OpenFile;

    fn create_dir(&self, dir: &str) -> io::Result<()> {
        private_dir().recursive(true).create(self.root.join(dir))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.root.join(dir))? {
            // A name that is not UTF-8 is not ours.
            if let Ok(name) = entry?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn create(&self, path: &str) -> io::Result<OpenFile> {
        Ok(OpenFile(OpenFiles::of_process().open(self.root.join(path), true)?))
    }

    fn open(&self, path: &str) -> io::Result<OpenFile> {
        Ok(OpenFile(OpenFiles::of_process().open(self.root.join(path), false)?))
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        OpenFiles::of_process().remove(&self.root.join(path))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        OpenFiles::of_process().rename(&self.root.join(from), &self.root.join(to))
    }

    fn sync_dir(&self, dir: &str) -> io::Result<()> {
        File::open(self.root.join(dir))?.sync_all()
    }

    fn display_path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn fresh_id(&self) -> u64 {
        let mut bytes = [0; 8];
        let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        assert_eq!(got, Ok(bytes.len()), "the kernel's random numbers");
        u64::from_le_bytes(bytes)
    }

    fn use_reserve(&self) {
        self.reserve.iter().for_each(|reserve| reserve.use_for(&self.root));
    }

    fn end_use_of_reserve(&self) {
        self.reserve.iter().for_each(|reserve| reserve.end_use_for(&self.root));
    }

    fn keep_reserve(&self) -> io::Result<()> {
        self.reserve.as_ref().map_or(Ok(()), |reserve| reserve.keep())
    }
}

impl StorageFile for OpenFile {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.0.file()?.metadata()?.len())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.file()?.read_exact_at(buf, offset)
    }

    fn write_at(&self, mut parts: &[IoSlice<'_>], mut offset: u64) -> io::Result<()> {
        let file = self.0.file_to_change()?;
        // Bytes of parts[0] that were written already.
        let mut done = 0;
        while !parts.is_empty() {
            let written = if done > 0 {
                file.write_at(&parts[0][done..], offset)
            } else {
                let some = &parts[..parts.len().min(IOV_MAX)];
                rustix::io::pwritev(&*file, some, offset).map_err(io::Error::from)
            };
            let mut written = match written {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Ok(0) if parts[0].len() > done => return Err(io::ErrorKind::WriteZero.into()),
                written => written?,
            };
            offset += written as u64;
            written += done;
            while let Some(part) = parts.first().filter(|part| part.len() <= written) {
                written -= part.len();
                parts = &parts[1..];
            }
            done = written;
        }
        Ok(())
    }

    fn zero_at(&self, offset: u64, len_bytes: u64, keep_allocated: bool) -> io::Result<()> {
        let how = if keep_allocated {
            FallocateFlags::ZERO_RANGE
        } else {
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE
        };
        let file = self.0.file_to_change()?;
        match rustix::fs::fallocate(&*file, how, offset, len_bytes) {
            // This file system cannot: write them.
            Err(rustix::io::Errno::OPNOTSUPP) => {
                let end = offset + len_bytes;
                let mut at = offset;
                while at < end {
                    let len = (end - at).min(ZEROES.len() as u64);
                    file.write_all_at(&ZEROES[..len as usize], at)?;
                    at += len;
                }
                Ok(())
            }
            result => Ok(result?),
        }
    }

    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        self.0.file_to_change()?.set_len(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let file = self.0.file()?;
        // Moving the file's own position harms nobody: everything else names its offset.
        let start = match rustix::fs::seek(&*file, SeekFrom::Data(offset)) {
            Err(rustix::io::Errno::NXIO) => return Ok(None),
            start => start?,
        };
        // A hole may be punched right now: then this one byte is data no more, which is fine.
        let end = rustix::fs::seek(&*file, SeekFrom::Hole(start))?;
        Ok(Some(start..end.max(start + 1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_of_many_parts_arrive_whole() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path().to_owned());
        let file = files.create("f").unwrap();
        assert_eq!(files.create("f").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let parts: Vec<Vec<u8>> = (0..3000u32).map(|n| n.to_le_bytes()[..3].to_vec()).collect();
        let slices: Vec<_> = parts.iter().map(|p| IoSlice::new(p)).collect();
        file.write_at(&slices, 10).unwrap();
        let mut back = vec![0; 9000];
        file.read_at(&mut back, 10).unwrap();
        assert_eq!(back, parts.concat());
        assert_eq!(file.size_bytes().unwrap(), 9010);
        let past = file.read_at(&mut [0; 2], 9009).unwrap_err();
        assert_eq!(past.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn holes_are_found_and_made() {
        let dir = tempfile::tempdir().unwrap();
        let file = Files::new(dir.path().to_owned()).create("f").unwrap();
        file.set_size(1 << 20).unwrap();
        assert_eq!(file.next_data(0).unwrap(), None);
        file.write_at(&[IoSlice::new(&[1; 8192])], 65536).unwrap();
        assert_eq!(file.next_data(0).unwrap(), Some(65536..65536 + 8192));
        file.zero_at(65536, 4096, false).unwrap();
        assert_eq!(file.next_data(0).unwrap(), Some(65536 + 4096..65536 + 8192));
        file.zero_at(65536 + 4096, 4096, true).unwrap();
        let mut back = [9; 8192];
        file.read_at(&mut back, 65536).unwrap();
        assert_eq!(back, [0; 8192]);
    }
}
