//! The system calls that the standard library does not have: namespaces, TAP devices, `ppoll`.
//!
//! All of the crate's `unsafe` is here. Each block passes the kernel a descriptor that is borrowed for the
//! call and memory that is owned by the caller of the block.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

/// `struct ifreq` as TUNSETIFF reads it: a name and flags, padded to the union's size.
#[repr(C)]
struct IfReq {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    pad: [u8; 22],
}

/// Opens a TAP device of this name in a network namespace: `ip netns`'s names, or a path.
///
/// The device is gone when the file is closed. Frames carry a `virtio_net_hdr`; reads do not block.
pub fn open_tap(netns: &str, ifname: &str) -> io::Result<File> {
    let (netns, ifname) = (netns.to_owned(), ifname.to_owned());
    // A namespace belongs to a thread: use one that ends at once.
    std::thread::spawn(move || {
        enter_netns(&netns)?;
        create_tap(&ifname)
    })
    .join()
    .unwrap_or_else(|_| Err(io::Error::other("the thread that opens a TAP panicked")))
}

fn enter_netns(netns: &str) -> io::Result<()> {
    let path = if netns.contains('/') {
        PathBuf::from(netns)
    } else {
        PathBuf::from("/run/netns").join(netns)
    };
    let file = File::open(path)?;
    // SAFETY: `file` is an open descriptor for the duration of the call; setns reads no memory of ours.
    check(unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) })
}

fn create_tap(ifname: &str) -> io::Result<File> {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    let mut request = IfReq {
        name: [0; libc::IFNAMSIZ],
        flags: (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short,
        pad: [0; 22],
    };
    if ifname.len() >= libc::IFNAMSIZ {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface name too long"));
    }
    request.name[..ifname.len()].copy_from_slice(ifname.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq` (40 bytes), which `request` is and outlives the call.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) })?;
    Ok(tap)
}

/// Lets the kernel pass 64 KiB frames with unfinished checksums through a TAP, or makes it send single packets.
pub fn set_offload(tap: &File, on: bool) -> io::Result<()> {
    let flags = if on { libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 } else { 0 };
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    check(unsafe {
        libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(flags))
    })
}

/// Makes this thread's timeouts as exact as the kernel can; the default is 50 us late.
pub fn use_exact_timers() -> io::Result<()> {
    // SAFETY: PR_SET_TIMERSLACK takes its arguments by value.
    check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong) })
}

/// Waits until a file can be read or the time is over.
pub fn wait_readable(files: [BorrowedFd<'_>; 2], timeout: Option<Duration>) -> io::Result<()> {
    let mut polled =
        files.map(|file| libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 });
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let timeout_ptr = timeout.as_ref().map_or(std::ptr::null(), |t| t as *const _);
    // SAFETY: `polled` has as many entries as is said, `timeout_ptr` is null or points to a live timespec, and a
    // null signal mask is allowed.
    let result = check(unsafe {
        libc::ppoll(
            polled.as_mut_ptr(),
            polled.len() as libc::nfds_t,
            timeout_ptr,
            std::ptr::null(),
        )
    });
    match result {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        other => other,
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
