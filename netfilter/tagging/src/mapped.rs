//! Kernel maps as memory of this process, and calls that only C has. The only unsafe code of this crate.
#![allow(unsafe_code)]

use crate::layout::{CommittedCells, CrossingCells, PendingCells};
use libbpf_rs::{AsRawLibbpf, Link, Program};
use std::ffi::{CStr, CString};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// A type that may be laid over a map's value.
///
/// # Safety
/// It is `repr(C)`, and all of it is [`AtomicU64`](std::sync::atomic::AtomicU64): every pattern
/// of bits is valid, and others may change it at any time.
pub unsafe trait Cells {}

// SAFETY: repr(C), and nothing but atomics.
unsafe impl Cells for PendingCells {}
// SAFETY: the same.
unsafe impl Cells for CommittedCells {}
// SAFETY: the same.
unsafe impl Cells for CrossingCells {}

/// The one value of an array map, mapped into memory.
#[derive(Debug)]
pub struct Mapped<T: Cells>(NonNull<T>);

// SAFETY: what it points to is nothing but atomics, and the memory stays mapped while it lives.
unsafe impl<T: Cells> Send for Mapped<T> {}
// SAFETY: the same.
unsafe impl<T: Cells> Sync for Mapped<T> {}

impl<T: Cells> Mapped<T> {
    /// Maps the value of an array map with one entry, `BPF_F_MMAPABLE`, of this value size.
    /// The kernel refuses a longer mapping than the map has bytes.
    pub(crate) fn new(map: BorrowedFd<'_>) -> io::Result<Self> {
        Self::mapping(libc::MAP_SHARED, map.as_raw_fd())
    }

    /// Zeros that no kernel program sees, for programs that run elsewhere.
    pub fn anonymous() -> io::Result<Self> {
        Self::mapping(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn mapping(flags: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing of ours.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<T>(),
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(NonNull::new(address.cast()).expect("a mapping is never at 0")))
    }
}

impl<T: Cells> Deref for Mapped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped in `new`, page aligned, long enough (mmap rounds up to whole pages, and
        // the map's memory is as long), unmapped only by `drop`; Cells are valid for all bits.
        unsafe { self.0.as_ref() }
    }
}

impl<T: Cells> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the address and length of the mapping of `new`, and nobody borrows it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}

/// Of linux/magic.h.
const BPF_FS_MAGIC: u32 = 0xcafe_4a11;

/// Whether a path lies on the file system that kernel maps are pinned in.
pub(crate) fn is_bpffs(path: &Path) -> io::Result<bool> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the path ends with 0, and `found` is valid for writing.
    if unsafe { libc::statfs(path.as_ptr(), found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: statfs succeeded, so it has filled `found`.
    let found = unsafe { found.assume_init() };
    Ok(u32::try_from(found.f_type) == Ok(BPF_FS_MAGIC))
}

/// Mounts a file system for pinned maps.
pub(crate) fn mount_bpffs(at: &Path) -> io::Result<()> {
    let at = CString::new(at.as_os_str().as_bytes())?;
    // SAFETY: all strings end with 0; data may be null.
    let result = unsafe {
        libc::mount(c"tidelock".as_ptr(), at.as_ptr(), c"bpf".as_ptr(), 0, std::ptr::null())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a program at the head of what tcx runs on an interface. Which way is said by the program's section.
pub(crate) fn attach_tcx(program: &Program<'_>, interface: i32) -> io::Result<Link> {
    let options = libbpf_sys::bpf_tcx_opts {
        sz: size_of::<libbpf_sys::bpf_tcx_opts>() as libbpf_sys::size_t,
        flags: libbpf_sys::BPF_F_BEFORE,
        ..Default::default()
    };
    // SAFETY: the program lives, and the options are valid for the call.
    let link = unsafe {
        let program = program.as_libbpf_object().as_ptr();
        libbpf_sys::bpf_program__attach_tcx(program, interface, &raw const options)
    };
    let link = NonNull::new(link).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the call has succeeded, and nobody else has what it returned.
    Ok(unsafe { Link::from_ptr(link) })
}

/// The index of an interface in the calling thread's network namespace.
pub(crate) fn interface_index(name: &str) -> io::Result<i32> {
    let name = CString::new(name)?;
    // SAFETY: the name ends with 0.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => i32::try_from(index).map_err(|_| io::ErrorKind::InvalidData.into()),
    }
}

/// The name of the interface that has an index, there.
pub(crate) fn interface_name(index: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    // SAFETY: there is room for the longest name and the 0 at its end.
    let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    Some(CStr::from_bytes_until_nul(&name).ok()?.to_string_lossy().into_owned())
}

/// The MTU of an interface in the calling thread's network namespace.
pub(crate) fn interface_mtu(name: &str) -> io::Result<u32> {
    // SAFETY: all zeros is a valid ifreq: an empty name and an empty union.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte of the name stays 0.
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let socket =
        std::net::UdpSocket::bind("[::]:0").or_else(|_| std::net::UdpSocket::bind("0.0.0.0:0"))?;
    // SAFETY: this request reads the name and writes the number, both within `request`.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the request has succeeded, so this member of the union was written.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}
