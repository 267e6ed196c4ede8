//! Whether a file can be used with direct I/O, and with which alignment.
//!
//! Direct I/O keeps guest data out of the page cache: a completed write is at the device, and the
//! daemon's memory use stays flat. Sources, in this order: what `statx` says (Linux 6.1), the logical
//! block size of the device, 4096. Whatever the source, a read with that alignment must work.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::file::FileKind;
use crate::sys::{self, DioAlign};
use tidelock_buffers::{BufPool, CAPACITY_MIN_BYTES};

/// What every transfer must be aligned to, in bytes. Powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// The address of the memory. Every [`AlignedBuf`](crate::AlignedBuf) satisfies it.
    pub memory_bytes: u32,
    /// Offset in the file, and length.
    pub offset_bytes: u32,
}

impl Alignment {
    /// Buffered I/O takes anything.
    pub const ANY: Alignment = Alignment { memory_bytes: 1, offset_bytes: 1 };

    /// Whether a transfer satisfies this.
    pub fn allows(&self, memory: *const u8, offset: u64, len: usize) -> bool {
        let offset_mask = u64::from(self.offset_bytes) - 1;
        memory.addr() & (self.memory_bytes as usize - 1) == 0
            && (offset | len as u64) & offset_mask == 0
    }
}

/// Why a file is used through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyBuffered {
    /// The caller asked for it.
    Asked,
    /// The file system has no direct I/O, or not for this file.
    NoDirectIo,
    /// The file's end is not aligned, so its tail could not be written.
    SizeNotAligned {
        /// What the size would have to be a multiple of.
        offset_bytes: u32,
    },
    /// The file system wants a larger alignment than guests and buffers have.
    AlignmentTooLarge(Alignment),
}

impl fmt::Display for WhyBuffered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WhyBuffered::Asked => f.write_str("as configured"),
            WhyBuffered::NoDirectIo => f.write_str("the file system has no direct I/O for it"),
            WhyBuffered::SizeNotAligned { offset_bytes } => {
                write!(f, "its size is not a multiple of {offset_bytes} bytes")
            }
            WhyBuffered::AlignmentTooLarge(alignment) => write!(
                f,
                "direct I/O on it needs an alignment of {} bytes, more than the {CAPACITY_MIN_BYTES} \
                 that guests use",
                alignment.memory_bytes.max(alignment.offset_bytes)
            ),
        }
    }
}

/// How a file is read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoMode {
    /// Past the page cache (`O_DIRECT`).
    Direct,
    /// Through the page cache.
    Buffered(WhyBuffered),
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoMode::Direct => f.write_str("direct I/O"),
            IoMode::Buffered(why) => write!(f, "buffered I/O ({why})"),
        }
    }
}

/// Switches the file to direct I/O if that works, and says how it is used from now on.
pub(crate) fn choose(
    file: &File,
    kind: FileKind,
    len_bytes: u64,
) -> io::Result<(IoMode, Alignment)> {
    let buffered = |why| Ok((IoMode::Buffered(why), Alignment::ANY));
    let Some(alignment) = needed(file, kind)? else {
        return buffered(WhyBuffered::NoDirectIo);
    };
    if alignment.memory_bytes.max(alignment.offset_bytes) as usize > CAPACITY_MIN_BYTES {
        return buffered(WhyBuffered::AlignmentTooLarge(alignment));
    }
    if !len_bytes.is_multiple_of(u64::from(alignment.offset_bytes)) {
        return buffered(WhyBuffered::SizeNotAligned { offset_bytes: alignment.offset_bytes });
    }
    if let Err(error) = sys::set_direct(file, true) {
        return match error.raw_os_error() {
            Some(libc::EINVAL) => buffered(WhyBuffered::NoDirectIo),
            _ => Err(error),
        };
    }
    match settle(file, alignment)? {
        Some(alignment) => Ok((IoMode::Direct, alignment)),
        None => {
            sys::set_direct(file, false)?;
            buffered(WhyBuffered::NoDirectIo)
        }
    }
}

/// What the system says that direct I/O needs. `None`: it says that there is none.
fn needed(file: &File, kind: FileKind) -> io::Result<Option<Alignment>> {
    let both = |bytes| Alignment { memory_bytes: bytes, offset_bytes: bytes };
    // A statx that fails (an old kernel, a strict file system) tells nothing.
    match sys::dio_align(file).unwrap_or(DioAlign::Untold) {
        DioAlign::None => return Ok(None),
        DioAlign::Bytes { memory, offset }
            if memory.is_power_of_two() && offset.is_power_of_two() =>
        {
            return Ok(Some(Alignment { memory_bytes: memory, offset_bytes: offset }));
        }
        DioAlign::Bytes { .. } | DioAlign::Untold => {}
    }
    let sector_bytes = match kind {
        FileKind::BlockDevice => Some(sys::block_device_sector_bytes(file.as_fd())?),
        FileKind::Regular => sector_below_file(file.metadata()?.dev()),
    };
    let usable = |bytes: &u32| bytes.is_power_of_two() && *bytes >= 512;
    Ok(Some(both(sector_bytes.filter(usable).unwrap_or(CAPACITY_MIN_BYTES as u32))))
}

/// Logical block size of the device that a file system lies on, if it lies on one.
fn sector_below_file(device: u64) -> Option<u32> {
    queue_attribute(device, "logical_block_size")?.parse().ok()
}

/// An attribute of a block device's queue. A partition's queue is that of its disk.
pub(crate) fn queue_attribute(device: u64, name: &str) -> Option<String> {
    let device = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| std::fs::read_to_string(format!("{device}/{queue}/{name}")).ok())
        .map(|value| value.trim().to_owned())
}

/// The least alignment, from `alignment` up, with which a direct read works. Reads change nothing.
fn settle(file: &File, mut alignment: Alignment) -> io::Result<Option<Alignment>> {
    let pool = BufPool::new(0);
    loop {
        let mut buf = pool.get(CAPACITY_MIN_BYTES);
        buf.extend_zeroed(alignment.offset_bytes as usize);
        match file.read_at(&mut buf, 0) {
            Ok(_) => return Ok(Some(alignment)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => return Err(error),
        }
        let next = alignment.offset_bytes * 2;
        if next as usize > CAPACITY_MIN_BYTES {
            return Ok(None);
        }
        alignment =
            Alignment { memory_bytes: alignment.memory_bytes.max(next), offset_bytes: next };
    }
}
