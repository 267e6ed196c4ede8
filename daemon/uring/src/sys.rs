//! The few system calls that the standard library lacks, as safe functions.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

/// Turns the C convention of -1 and `errno` into a `Result`.
pub(crate) fn check<T: PartialOrd + Default>(result: T) -> io::Result<T> {
    if result < T::default() { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Repeats a call that a signal interrupted.
pub(crate) fn retry_eintr<T: PartialOrd + Default>(mut call: impl FnMut() -> T) -> io::Result<T> {
    loop {
        match check(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => return result,
        }
    }
}

/// Sets or clears `O_DIRECT`. EINVAL: the file system has no direct I/O.
pub(crate) fn set_direct(fd: impl AsFd, direct: bool) -> io::Result<()> {
    set_status_flag(fd, libc::O_DIRECT, direct)
}

/// Clears `O_NONBLOCK`, which io_uring would take as a wish never to wait.
pub(crate) fn clear_nonblock(fd: impl AsFd) -> io::Result<()> {
    set_status_flag(fd, libc::O_NONBLOCK, false)
}

fn set_status_flag(fd: impl AsFd, flag: i32, on: bool) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: F_GETFL and F_SETFL take no pointers.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    let flags = if on { flags | flag } else { flags & !flag };
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }).map(drop)
}

/// Takes a write lock on the whole file for this open file description (OFD lock). EAGAIN or EACCES:
/// another description, of this or another process, holds one.
///
/// QEMU marks images with locks of the same kind (on single bytes), so either side refuses an
/// image that the other has open.
pub(crate) fn lock_whole(fd: impl AsFd) -> io::Result<()> {
    // SAFETY: `flock` is plain data, for which all zeroes are valid.
    let mut lock: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    lock.l_type = libc::F_WRLCK as _;
    lock.l_whence = libc::SEEK_SET as _;
    // l_start and l_len of zero: from the first byte to the end, however far it moves.
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: F_OFD_SETLK reads one `flock`, which lives through the call.
    retry_eintr(|| unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) }).map(drop)
}

/// What `statx` knows of direct I/O on a file.
pub(crate) enum DioAlign {
    /// The kernel or the file system does not tell.
    Untold,
    /// There is no direct I/O on this file.
    None,
    /// Alignment of memory, and of offsets and lengths.
    Bytes { memory: u32, offset: u32 },
}

/// Asks for the alignment that direct I/O needs (Linux 6.1).
pub(crate) fn dio_align(fd: impl AsFd) -> io::Result<DioAlign> {
    let mut stx = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH names `fd`; the kernel writes at most one `statx`.
    check(unsafe {
        libc::statx(
            fd.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            stx.as_mut_ptr(),
        )
    })?;
    // SAFETY: `statx` is plain data; it was zeroed and then filled by the kernel.
    let stx = unsafe { stx.assume_init() };
    if stx.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(DioAlign::Untold);
    }
    match (stx.stx_dio_mem_align, stx.stx_dio_offset_align) {
        (0, _) | (_, 0) => Ok(DioAlign::None),
        (memory, offset) => Ok(DioAlign::Bytes { memory, offset }),
    }
}

/// Size of a block device.
pub(crate) fn block_device_len_bytes(fd: impl AsFd) -> io::Result<u64> {
    let mut len_bytes = 0u64;
    // SAFETY: BLKGETSIZE64 writes one u64.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), BLKGETSIZE64 as _, &raw mut len_bytes) })?;
    Ok(len_bytes)
}

/// `_IOR(0x12, 114, size_t)`; libc does not name it for every target.
const BLKGETSIZE64: u64 = ior(0x12, 114, size_of::<usize>() as u64);

/// The encoding of a reading ioctl. The architectures with an encoding of their own are excluded.
#[cfg(not(any(
    target_arch = "mips",
    target_arch = "mips64",
    target_arch = "powerpc",
    target_arch = "powerpc64",
    target_arch = "sparc",
    target_arch = "sparc64"
)))]
const fn ior(group: u64, number: u64, size: u64) -> u64 {
    (2 << 30) | (size << 16) | (group << 8) | number
}

/// Logical block size of a block device.
pub(crate) fn block_device_sector_bytes(fd: impl AsFd) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::BLKSSZGET as _, &raw mut bytes) })?;
    u32::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Which end of a data range to look for.
#[derive(Clone, Copy)]
pub(crate) enum Seek {
    Data,
    Hole,
}

/// The next data or hole at or behind `offset`. `None`: there is none before the end of the file.
///
/// This moves the file position, which nothing here uses.
pub(crate) fn seek(fd: impl AsFd, offset: u64, what: Seek) -> io::Result<Option<u64>> {
    let whence = match what {
        Seek::Data => libc::SEEK_DATA,
        Seek::Hole => libc::SEEK_HOLE,
    };
    let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: no pointers are involved.
    match check(unsafe { libc::lseek64(fd.as_fd().as_raw_fd(), offset, whence) }) {
        Ok(found) => Ok(Some(found as u64)),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `fallocate(2)`.
pub(crate) fn fallocate(fd: impl AsFd, mode: i32, offset: u64, len: u64) -> io::Result<()> {
    let einval = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let (offset, len) =
        (i64::try_from(offset).map_err(einval)?, i64::try_from(len).map_err(einval)?);
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: no pointers are involved.
    retry_eintr(|| unsafe { libc::fallocate64(fd, mode, offset, len) }).map(drop)
}
