//! Word from the kernel that somebody has changed the packet filter.
//!
//! nftables tells of every change, whoever made it; iptables-nft is one of its users. Legacy iptables tells nobody: its
//! rules have to be looked at now and then.

use crate::sys::{Epoll, NetlinkSocket, Slots};
use std::io;
use std::time::{Duration, Instant};

/// Hears of changes in one network namespace.
pub struct RuleChanges {
    socket: NetlinkSocket,
    slots: Slots,
    epoll: Epoll,
}

impl RuleChanges {
    /// Listens, from now on, in the network namespace of the calling thread.
    pub fn open() -> io::Result<RuleChanges> {
        let socket = NetlinkSocket::open()?;
        socket.join(libc::NFNLGRP_NFTABLES)?;
        let epoll = Epoll::new()?;
        epoll.add(socket.fd(), 0)?;
        Ok(RuleChanges { socket, slots: Slots::new(), epoll })
    }

    /// Whether anything has changed since the last call. What it was is not said: look at the rules.
    pub fn drain(&mut self) -> bool {
        let mut has_changed = false;
        loop {
            match self.socket.receive(&mut self.slots) {
                Ok(()) => has_changed = true,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return has_changed,
                // There were more than the socket takes.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => has_changed = true,
                // Whatever this is, a look does no harm.
                Err(_) => return true,
            }
        }
    }

    /// Waits for a change, but no longer than this. Whether anything has changed since the last call.
    pub fn wait(&mut self, at_most: Duration) -> bool {
        let (until, mut ready) = (Instant::now() + at_most, Vec::new());
        loop {
            if self.drain() {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // Rounded up: what is left must not be waited for in no time.
            let timeout_ms = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            if self.epoll.wait(&mut ready, timeout_ms).is_err() {
                // It cannot be waited for: then for the time alone.
                std::thread::sleep(left);
                return true;
            }
        }
    }
}
