//! One disk that a group is seeded with: opened, seen not to be in use, and made the group's image.

use crate::cli::export::explain;
use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressBar;
use rustix::fs::{
    CWD, FlockOperation, OFlags, RenameFlags, SeekFrom, fcntl_lock, ioctl_ficlone, renameat_with,
    seek, statvfs,
};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_replica::text;
use tidelock_store::image::SECTOR_BYTES;

/// An image that is not whole.
pub(super) const UNFINISHED: &str = ".unfinished";
/// What is copied at a time.
const COPY_BYTES: usize = 1 << 20;

/// How a disk became an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Moved,
    /// The file system shares the blocks.
    Reflinked,
    Copied,
    /// Of an attempt that was killed.
    Kept,
}

impl How {
    pub(super) fn word(self) -> &'static str {
        match self {
            How::Moved => "moved",
            How::Reflinked => "reflinked",
            How::Copied => "copied",
            How::Kept => "kept",
        }
    }
}

/// A disk that can be taken.
#[derive(Debug)]
pub(super) struct Source {
    /// MEMBER.DISK
    pub(super) name: String,
    /// As given.
    pub(super) file: PathBuf,
    /// What becomes of it.
    pub(super) image: PathBuf,
    pub(super) size_bytes: u64,
    /// Locked as long as this is there. `None`: the image is whole, and the file is gone.
    open: Option<File>,
    moves: bool,
}

impl Source {
    /// Opens it and sees that it can be taken. Changes nothing.
    pub(super) fn open(name: String, file: &Path, image: &Path, moves: bool) -> Result<Self> {
        let kept = match image.symlink_metadata() {
            Ok(kept) => Some(kept.len()),
            Err(_) => None,
        };
        let source = |open, size_bytes| {
            let (file, image) = (file.to_owned(), image.to_owned());
            Self { name, file, image, size_bytes, open, moves }
        };
        let opened = match (open(file), kept) {
            (Err(error), Some(size_bytes)) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(source(None, size_bytes));
            }
            (opened, _) => opened.with_context(|| format!("cannot open {}", file.display()))?,
        };
        check_unused(&opened, file)?;
        let size_bytes = seek(&opened, SeekFrom::End(0))
            .with_context(|| format!("the size of {}", file.display()))?;
        ensure!(
            size_bytes > 0 && size_bytes.is_multiple_of(SECTOR_BYTES),
            "{} has {size_bytes} bytes: the size of a disk is a multiple of {SECTOR_BYTES}. Is it a raw image?",
            file.display()
        );
        if kept.is_some_and(|kept| kept != size_bytes) {
            bail!(
                "{} is left of a seed that was killed and has another size than {}: move it away first",
                image.display(),
                file.display()
            );
        }
        if moves && kept.is_none() {
            check_movable(&opened, file, image)?;
        }
        Ok(source(Some(opened), size_bytes))
    }

    pub(super) fn is_same_file(&self, other: &Source) -> bool {
        let id = |source: &Source| {
            let found = source.open.as_ref()?.metadata().ok()?;
            Some((found.dev(), found.ino(), found.rdev()))
        };
        id(self).is_some_and(|own| id(other) == Some(own))
    }

    /// Makes it the image, on stable storage.
    pub(super) fn take(&self, bar: &ProgressBar, stop: &AtomicBool) -> Result<How> {
        let explained = |error: io::Error| explain(error, &self.image);
        let open = match &self.open {
            Some(open) if self.image.symlink_metadata().is_err() => open,
            _ => {
                bar.inc(self.size_bytes);
                return Ok(How::Kept);
            }
        };
        if self.moves {
            renameat_with(CWD, &self.file, CWD, &self.image, RenameFlags::NOREPLACE)
                .map_err(|e| explained(e.into()))?;
            // What guests wrote is nobody else's business.
            let private = fs::set_permissions(&self.image, fs::Permissions::from_mode(0o600));
            if let Err(error) = private.and_then(|()| open.sync_all()) {
                // Back it goes: the caller undoes only what it was told of.
                let _ = renameat_with(CWD, &self.image, CWD, &self.file, RenameFlags::NOREPLACE);
                return Err(explained(error));
            }
            bar.inc(self.size_bytes);
            return Ok(How::Moved);
        }
        let unfinished = self.unfinished();
        let copied = self.copy(open, &unfinished, bar, stop).and_then(|how| {
            fs::rename(&unfinished, &self.image).map_err(explained)?;
            Ok(how)
        });
        if copied.is_err() {
            // Not there if it could not be made.
            let _ = fs::remove_file(&unfinished);
        }
        copied
    }

    fn unfinished(&self) -> PathBuf {
        let mut name = self.image.as_os_str().to_owned();
        name.push(UNFINISHED);
        name.into()
    }

    fn copy(&self, from: &File, path: &Path, bar: &ProgressBar, stop: &AtomicBool) -> Result<How> {
        let explained = |error: io::Error| explain(error, &self.image);
        let to = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let to = to.map_err(explained)?;
        let how = if ioctl_ficlone(&to, from).is_ok() {
            bar.inc(self.size_bytes);
            How::Reflinked
        } else {
            self.check_room(from, path)?;
            to.set_len(self.size_bytes).map_err(explained)?;
            self.copy_data(from, &to, bar, stop)?;
            How::Copied
        };
        to.sync_all().map_err(explained)?;
        Ok(how)
    }

    fn check_room(&self, from: &File, to: &Path) -> Result<()> {
        let found = from.metadata()?;
        let needed = if found.is_file() { found.blocks() * 512 } else { self.size_bytes };
        let of = statvfs(to)?;
        let free = of.f_bavail * of.f_frsize;
        ensure!(
            needed <= free,
            "{} has {} of data, and the file system of {} has {} left. Make room, or give --move if it is on the \
             same file system",
            self.file.display(),
            text::bytes(needed),
            self.image.display(),
            text::bytes(free)
        );
        Ok(())
    }

    fn copy_data(
        &self,
        from: &File,
        to: &File,
        bar: &ProgressBar,
        stop: &AtomicBool,
    ) -> Result<()> {
        let mut buf = vec![0; COPY_BYTES];
        let mut at = 0;
        while let Some(data) = next_data(from, at, self.size_bytes)? {
            bar.inc(data.start - at);
            at = data.start;
            while at < data.end {
                ensure!(!stop.load(Ordering::Acquire), "stopped");
                let part = &mut buf[..COPY_BYTES.min((data.end - at) as usize)];
                let read = from.read_exact_at(part, at);
                read.with_context(|| format!("cannot read {} at {at}", self.file.display()))?;
                if part.iter().any(|byte| *byte != 0) {
                    to.write_all_at(part, at).map_err(|e| explain(e, &self.image))?;
                }
                at += part.len() as u64;
                bar.inc(part.len() as u64);
            }
        }
        bar.inc(self.size_bytes - at);
        Ok(())
    }
}

/// For reading, and for writing if that may be: only then it can be seen that nobody else has it open to read.
fn open(file: &Path) -> io::Result<File> {
    let is_device = fs::metadata(file)?.file_type().is_block_device();
    let exclusive = if is_device { OFlags::EXCL.bits() as i32 } else { 0 };
    let open =
        |write| OpenOptions::new().read(true).write(write).custom_flags(exclusive).open(file);
    open(true).or_else(|error| match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => open(false),
        _ => Err(error),
    })
}

/// Tidelock's daemon and QEMU lock what they have open.
fn check_unused(open: &File, file: &Path) -> Result<()> {
    let found = open.metadata()?;
    let kind = found.file_type();
    ensure!(kind.is_file() || kind.is_block_device(), "{} is no disk image", file.display());
    let lock = match fcntl_lock(open, FlockOperation::NonBlockingLockExclusive) {
        // It may only be read.
        Err(Errno::BADF) => fcntl_lock(open, FlockOperation::NonBlockingLockShared),
        locked => locked,
    };
    match lock {
        Err(Errno::AGAIN | Errno::ACCESS) => {
            bail!("{} is in use: stop the VM, or the daemon, that has it open", file.display())
        }
        // A file system without locks.
        Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS) | Ok(()) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot lock {}", file.display())),
    }
}

fn check_movable(open: &File, file: &Path, image: &Path) -> Result<()> {
    let found = open.metadata()?;
    ensure!(found.is_file(), "{} is a block device: give --copy", file.display());
    let link = file.symlink_metadata()?.is_symlink();
    ensure!(!link, "{} is a symbolic link: name the file itself", file.display());
    ensure!(found.nlink() == 1, "{} has other names (hard links): give --copy", file.display());
    let to = image.parent().unwrap_or(Path::new("."));
    ensure!(
        fs::metadata(to)?.dev() == found.dev(),
        "{} is on another file system than {}: give --copy",
        file.display(),
        to.display()
    );
    Ok(())
}

pub(super) fn no_room(dir: &Path) -> anyhow::Error {
    anyhow::anyhow!("the file system of {} is full: make room", dir.display())
}

/// The next part from `at` on that may not be zero.
fn next_data(file: &File, at: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    if at >= end {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(at)) {
        Err(Errno::NXIO) => return Ok(None),
        // A block device: all of it.
        Err(Errno::INVAL) => return Ok(Some(at..end)),
        start => start?,
    };
    let hole = seek(file, SeekFrom::Hole(start))?;
    Ok(Some(start.min(end)..hole.clamp(start + 1, end.max(start + 1)).min(end)))
}
