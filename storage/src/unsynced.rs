//! A directory whose files are never synced: a killed process loses nothing of them, a power loss anything. The daemon keeps
//! its backlog in one ([`Directory`]); the simulator has a directory of its own, which loses what a power loss may take.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory of small names. Nothing of it is ever synced.
pub trait UnsyncedDir: fmt::Debug + Send + Sync {
    /// The path, for people.
    fn path(&self) -> &Path;
    /// Makes it, if it is missing.
    fn make(&self) -> io::Result<()>;
    /// What is in it; `None`: it is missing.
    fn names(&self) -> io::Result<Option<Vec<String>>>;
    /// Whether there is a file of this name.
    fn has(&self, name: &str) -> bool;
    /// Makes an empty file, which must not be there.
    fn create(&self, name: &str) -> io::Result<Box<dyn UnsyncedFile>>;
    /// Opens one that is there. What is open is read also when it was removed since.
    fn open(&self, name: &str) -> io::Result<Box<dyn UnsyncedFile>>;
    /// Removes one that is there.
    fn remove(&self, name: &str) -> io::Result<()>;
}

/// A file of an [`UnsyncedDir`].
pub trait UnsyncedFile: fmt::Debug + Send + Sync {
    /// Writes all of this at the end. After a failure any part of it may be there.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Reads from there on, as `pread` does.
    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Its size.
    fn len_bytes(&self) -> io::Result<u64>;
    /// Cuts it off there.
    fn truncate(&mut self, len_bytes: u64) -> io::Result<()>;
}

/// A directory of the host.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// The directory of this path.
    pub fn at(path: impl Into<PathBuf>) -> Arc<dyn UnsyncedDir> {
        Arc::new(Self(path.into()))
    }

    fn opened(
        &self,
        name: &str,
        options: &mut fs::OpenOptions,
    ) -> io::Result<Box<dyn UnsyncedFile>> {
        let file = options.read(true).append(true).mode(0o600).open(self.0.join(name))?;
        Ok(Box::new(HostFile(file)))
    }
}

impl UnsyncedDir for Directory {
    fn path(&self) -> &Path {
        &self.0
    }

    fn make(&self) -> io::Result<()> {
        // An earlier version, or an operator, may have made it for others to read.
        fs::DirBuilder::new().mode(0o700).recursive(true).create(&self.0)?;
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o700))
    }

    fn names(&self) -> io::Result<Option<Vec<String>>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // Whatever is no text is none of ours.
            names.extend(entry?.file_name().into_string());
        }
        Ok(Some(names))
    }

    fn has(&self, name: &str) -> bool {
        self.0.join(name).exists()
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn UnsyncedFile>> {
        self.opened(name, File::options().create_new(true))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn UnsyncedFile>> {
        self.opened(name, &mut File::options())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.0.join(name))
    }
}

#[derive(Debug)]
struct HostFile(File);

impl UnsyncedFile for HostFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(into, offset)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn truncate(&mut self, len_bytes: u64) -> io::Result<()> {
        self.0.set_len(len_bytes)
    }
}
