//! A local disk: a raw image or a block device, opened for this daemon alone.
//!
//! Invariant: while a [`LocalFile`] or an operation on it exists, no second daemon and no QEMU that
//! locks its images can open the same one. (A block device is also refused while it is mounted.)

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::align::{self, Alignment, IoMode, WhyBuffered};
use crate::error::{FileError, FileErrorKind};
use crate::extents;
use crate::ops::SharedFd;
use crate::probe::{self, Abilities};
use crate::{in_use, mark, sys};
use tidelock_buffers::Extent;

const LOCK_RETRY_EVERY: Duration = Duration::from_millis(10);

/// What a disk is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A raw image.
    Regular,
    /// A block device.
    BlockDevice,
}

/// Which size is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeRule {
    /// Whatever the file has.
    Any,
    /// This many bytes.
    Exactly(u64),
    /// This many bytes or more.
    AtLeast(u64),
}

/// How to open a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    /// Which size is right.
    pub size: SizeRule,
    /// Use direct I/O where it works.
    pub direct: bool,
    /// It is a guest's disk: refused while a loop device is over it. Nothing that locks shows that.
    pub alone: bool,
    /// Refuse a file that begins as one of QEMU's formats other than raw.
    pub raw: bool,
    /// How long to wait for the disk's last user to be gone. After a daemon was killed, the kernel
    /// ends what it had in flight, and only then lets go of the lock; a child process between
    /// `fork` and `exec` also has it for a moment.
    pub lock_wait_max: Duration,
}

impl Default for OpenRequest {
    fn default() -> Self {
        OpenRequest {
            size: SizeRule::Any,
            direct: true,
            alone: false,
            raw: false,
            lock_wait_max: Duration::from_secs(2),
        }
    }
}

/// A disk that is open and locked.
#[derive(Debug)]
pub struct LocalFile {
    fd: SharedFd,
    path: PathBuf,
    kind: FileKind,
    len_bytes: u64,
    io_mode: IoMode,
    alignment: Alignment,
    abilities: Abilities,
    mark: String,
}

impl LocalFile {
    /// Opens and locks the disk, and finds out what it can do. Changes nothing in it. Blocks while
    /// somebody else has the disk, up to the limit in the request: call it where that is no harm.
    pub fn open(path: impl AsRef<Path>, request: &OpenRequest) -> Result<LocalFile, FileError> {
        let path = path.as_ref();
        let (file, kind) = open_patiently(path, request.lock_wait_max)?;
        let len_bytes = match kind {
            FileKind::Regular => file.metadata().map(|meta| meta.len()),
            FileKind::BlockDevice => sys::block_device_len_bytes(&file),
        }
        .map_err(|source| os_error(path, "cannot find out its size", source))?;
        check_size(path, len_bytes, request.size)?;
        if kind == FileKind::BlockDevice {
            let sector_bytes = sys::block_device_sector_bytes(&file)
                .map_err(|source| os_error(path, "cannot find out its sectors", source))?;
            check_sectors(path, len_bytes, sector_bytes)?;
        }
        if request.alone
            && let Some(who) = in_use::by_others(&file, path)
        {
            return Err(in_use_by(path, &who, io::Error::from_raw_os_error(libc::EBUSY)));
        }
        if let Some(format) = in_use::foreign_format(&file).filter(|_| request.raw) {
            return Err(foreign(path, format));
        }
        let mark = mark::of(&file, kind, len_bytes)
            .map_err(|source| os_error(path, "cannot find out its identity", source))?;

        let (io_mode, alignment) = if request.direct {
            align::choose(&file, kind, len_bytes)
                .map_err(|source| os_error(path, "cannot set up direct I/O", source))?
        } else {
            (IoMode::Buffered(WhyBuffered::Asked), Alignment::ANY)
        };
        let abilities = match kind {
            FileKind::Regular => probe::of_regular_file(&file, path, len_bytes),
            FileKind::BlockDevice => probe::of_block_device(&file),
        };
        let fd = Arc::new(OwnedFd::from(file));
        let path = path.to_owned();
        Ok(LocalFile { fd, path, kind, len_bytes, io_mode, alignment, abilities, mark })
    }

    /// Its identity when it was opened: inode, size and times of an image, what there is of a device.
    pub fn mark_when_opened(&self) -> &str {
        &self.mark
    }

    /// Its identity now. It stays the same until it is written to, if it was synced before.
    pub fn mark(&self) -> io::Result<String> {
        let file = File::from(self.fd.try_clone()?);
        mark::of(&file, self.kind, self.len_bytes)
    }

    /// The descriptor, for operations of a [`Ring`](crate::Ring).
    pub fn fd(&self) -> &SharedFd {
        &self.fd
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Its size when it was opened.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Direct or buffered, and why.
    pub fn io_mode(&self) -> IoMode {
        self.io_mode
    }

    /// What reads and writes must be aligned to.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Whether [`PunchHole`](crate::FallocateMode::PunchHole) is known to work.
    pub fn can_punch_hole(&self) -> bool {
        self.abilities.punch_hole
    }

    /// Whether [`ZeroRange`](crate::FallocateMode::ZeroRange) is known to work.
    pub fn can_zero_range(&self) -> bool {
        self.abilities.zero_range
    }

    /// What has storage, from the start of `range` on; at most `max` extents, so the answer may end
    /// before the range does. A block device is all allocated.
    ///
    /// # Panics
    /// If the range reaches beyond the disk, or `max` is 0.
    pub fn extents(&self, range: Range<u64>, max: usize) -> io::Result<Vec<Extent>> {
        assert!(max > 0, "an answer has at least one extent");
        assert!(range.end <= self.len_bytes, "{range:?} reaches beyond the disk");
        if range.is_empty() {
            return Ok(Vec::new());
        }
        match self.kind {
            FileKind::BlockDevice => Ok(vec![extents::all_allocated(range)]),
            FileKind::Regular => match extents::of_file(&self.fd, range.clone(), max) {
                // A file system that cannot tell.
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) =>
                {
                    Ok(vec![extents::all_allocated(range)])
                }
                answer => answer,
            },
        }
    }
}

fn open_patiently(path: &Path, wait_max: Duration) -> Result<(File, FileKind), FileError> {
    let deadline = Instant::now() + wait_max;
    loop {
        match open_and_lock(path) {
            Err(error) if error.kind == FileErrorKind::InUse && Instant::now() < deadline => {
                std::thread::sleep(LOCK_RETRY_EVERY);
            }
            result => return result,
        }
    }
}

fn open_and_lock(path: &Path) -> Result<(File, FileKind), FileError> {
    // Looked at before it is opened: opening some devices has effects.
    let meta = std::fs::metadata(path).map_err(|source| open_error(path, source))?;
    let kind = kind_of(path, &meta)?;
    let exclusive = match kind {
        // Claims the device against mounts, RAID and other claims.
        FileKind::BlockDevice => libc::O_EXCL,
        FileKind::Regular => 0,
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(exclusive | libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(path)
        .map_err(|source| open_error(path, source))?;
    let meta = file.metadata().map_err(|source| open_error(path, source))?;
    if kind_of(path, &meta)? != kind {
        let source = io::Error::from_raw_os_error(libc::ESTALE);
        return Err(os_error(path, "it was replaced while it was being opened; try again", source));
    }
    sys::clear_nonblock(&file).map_err(|source| open_error(path, source))?;
    sys::lock_whole(&file).map_err(|source| match source.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => in_use(path, source),
        _ => os_error(path, "cannot lock it", source),
    })?;
    Ok((file, kind))
}

fn kind_of(path: &Path, meta: &Metadata) -> Result<FileKind, FileError> {
    let file_type: FileType = meta.file_type();
    if file_type.is_file() {
        Ok(FileKind::Regular)
    } else if file_type.is_block_device() {
        Ok(FileKind::BlockDevice)
    } else {
        Err(FileError {
            kind: FileErrorKind::NotADisk,
            path: path.to_owned(),
            context: "it is neither a regular file nor a block device; name a raw disk image or \
                      a block device"
                .to_owned(),
            source: io::Error::from_raw_os_error(libc::ENOTBLK),
        })
    }
}

/// The kernel reads and writes whole sectors only: a rest at the end can neither be read nor copied.
fn check_sectors(path: &Path, len_bytes: u64, sector_bytes: u32) -> Result<(), FileError> {
    let rest_bytes = len_bytes % u64::from(sector_bytes.max(1));
    if rest_bytes == 0 {
        return Ok(());
    }
    Err(FileError {
        kind: FileErrorKind::WrongSize,
        path: path.to_owned(),
        context: format!(
            "it has {len_bytes} bytes, and its sectors have {sector_bytes}: the last {rest_bytes} bytes cannot be read; \
             make its size a multiple of {sector_bytes} bytes, or its sectors smaller (of a loop device with \
             `losetup --sector-size 512`)"
        ),
        source: io::Error::from_raw_os_error(libc::EINVAL),
    })
}

fn check_size(path: &Path, len_bytes: u64, rule: SizeRule) -> Result<(), FileError> {
    let (wanted, right) = match rule {
        SizeRule::Any => return Ok(()),
        SizeRule::Exactly(wanted) => (wanted, len_bytes == wanted),
        SizeRule::AtLeast(wanted) => (wanted, len_bytes >= wanted),
    };
    if right {
        return Ok(());
    }
    let relation = if len_bytes < wanted { "smaller" } else { "larger" };
    Err(FileError {
        kind: FileErrorKind::WrongSize,
        path: path.to_owned(),
        context: format!(
            "it has {len_bytes} bytes and is {relation} than the {wanted} bytes that are \
             configured; correct the configured size, or check that this is the right disk"
        ),
        source: io::Error::from_raw_os_error(libc::EINVAL),
    })
}

fn open_error(path: &Path, source: io::Error) -> FileError {
    if source.raw_os_error() == Some(libc::EBUSY)
        && let Some(who) = in_use::holder_of(path)
    {
        return in_use_by(path, &who, source);
    }
    let (kind, context) = match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => {
            (FileErrorKind::NotFound, "there is no such file; create the disk image first")
        }
        Some(libc::EACCES | libc::EPERM) => (
            FileErrorKind::Permission,
            "it may not be opened for writing; give the daemon's user access to it",
        ),
        Some(libc::EROFS) => (FileErrorKind::Permission, "it lies on a read-only file system"),
        Some(libc::EBUSY | libc::ETXTBSY) => return in_use(path, source),
        _ => return os_error(path, "cannot open it", source),
    };
    FileError { kind, path: path.to_owned(), context: context.to_owned(), source }
}

fn in_use(path: &Path, source: io::Error) -> FileError {
    FileError {
        kind: FileErrorKind::InUse,
        path: path.to_owned(),
        context: "another process uses it (a second daemon, a QEMU that has it open itself, or a \
                  mount); find it with `fuser -v` or `lsof`, and stop it"
            .to_owned(),
        source,
    }
}

fn in_use_by(path: &Path, who: &str, source: io::Error) -> FileError {
    let context = format!("somebody else may write to it: {who}");
    FileError { kind: FileErrorKind::InUse, path: path.to_owned(), context, source }
}

fn foreign(path: &Path, format: &str) -> FileError {
    FileError {
        kind: FileErrorKind::WrongFormat,
        path: path.to_owned(),
        context: format!(
            "it begins as a {format} image, and guests would be given the file as it is; convert it (`qemu-img convert -O \
             raw`), or, if the guest itself has written that into a raw disk, set `format = \"raw\"` for the disk"
        ),
        source: io::Error::from_raw_os_error(libc::EINVAL),
    }
}

fn os_error(path: &Path, context: &str, source: io::Error) -> FileError {
    let path = path.to_owned();
    FileError { kind: FileErrorKind::Os, path, context: context.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_ends_inside_a_sector_is_refused_and_the_remedy_named() {
        let path = Path::new("/dev/loop7");
        let refused = check_sectors(path, (8 << 20) + 512, 4096).unwrap_err();
        assert_eq!(refused.kind, FileErrorKind::WrongSize);
        let said = refused.to_string();
        assert!(said.contains("the last 512 bytes cannot be read"), "{said}");
        assert!(said.contains("a multiple of 4096 bytes"), "{said}");
        for (len_bytes, sector_bytes) in [((8 << 20) + 512, 512), (8 << 20, 4096)] {
            assert!(check_sectors(path, len_bytes, sector_bytes).is_ok());
        }
    }
}
