//! A guest's cable as QEMU's own virtio-net makes one: a tap on the host, and somebody who carries each frame
//! between it and the guest, with what the guest's driver says of segments and checksums that are still to be made. Here
//! the guest's end is a tap, too, in its namespace.

use crate::lab::in_namespace;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::mpsc;

/// A virtio-net header and the longest packet, with its Ethernet header.
const FRAME_MAX_BYTES: usize = 10 + 14 + (1 << 16);
/// What the kernel's buffers begin with.
const PAGE_BYTES: usize = 4096;

/// Makes both taps and carries frames until their namespaces are gone, or the process is. Neither is up yet. Returns the
/// threads that carry.
pub fn connect(
    host: &str,
    host_interface: &str,
    guest: &str,
    guest_interface: &str,
) -> [libc::pid_t; 2] {
    let at_host = in_namespace(host, || tap(host_interface));
    let at_guest = in_namespace(guest, || tap(guest_interface));
    let both = |file: &File| file.try_clone().expect("another descriptor");
    let ways = [(both(&at_guest), both(&at_host)), (at_host, at_guest)];
    ways.map(|(from, to)| {
        let (begins, begun) = mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: the call takes nothing and always succeeds.
            begins.send(unsafe { libc::gettid() }).expect("somebody waits");
            carry(from, to);
        });
        begun.recv().expect("a thread")
    })
}

/// Through a buffer that begins with a page, as the kernel's own do. Where the two addresses of a copy are nearly alike
/// within their pages, some processors take half as long again for it: an allocator that happens to choose such a buffer
/// would make a guest slow for all of its life, with or without a gate.
fn carry(mut from: File, mut to: File) {
    let mut room = vec![0; PAGE_BYTES + FRAME_MAX_BYTES];
    let skipped = room.as_ptr().align_offset(PAGE_BYTES);
    let frame = &mut room[skipped..];
    // A tap that is gone has nothing to read.
    while let Ok(len) = from.read(frame) {
        // One that is down, or full, loses it, as a network does.
        let _ = to.write(&frame[..len]);
    }
}

/// A tap that takes segments and checksums as they come from a guest with `host_tso4` and `host_tso6`.
fn tap(name: &str) -> File {
    let file =
        OpenOptions::new().read(true).write(true).open("/dev/net/tun").expect("a tun device");
    // SAFETY: all zeros is a valid value: no name, no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the descriptor is open, and the request is of this call's type.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    assert_eq!(made, 0, "tap {name}: {}", std::io::Error::last_os_error());
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    // SAFETY: the descriptor is a tap's, and the call takes a number.
    let told = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads))
    };
    assert_eq!(told, 0, "offloads of tap {name}: {}", std::io::Error::last_os_error());
    file
}
