//! The NBD tap's sockets, as operations of the ring.

use super::token::Token;
use crate::nbd_tap::{ConnectionId, Network};
use std::ops::Range;
use std::time::Duration;
use tidelock_uring::{AlignedBuf, Ring, SendBufs, SharedFd};

/// The ring, and the sockets of the disks.
pub(super) struct Sockets<'a> {
    pub(super) ring: &'a mut Ring,
    pub(super) listeners: &'a [SharedFd],
}

impl Network for Sockets<'_> {
    type Socket = SharedFd;

    fn accept(&mut self, disk: usize) {
        self.ring.accept(Token::Accept(disk).to_u64(), &self.listeners[disk]);
    }

    fn receive(
        &mut self,
        id: ConnectionId,
        socket: &SharedFd,
        buf: AlignedBuf,
        range: Range<usize>,
        all: bool,
    ) {
        let token = Token::Receive(id).to_u64();
        match all {
            true => self.ring.recv_full(token, socket, buf, range),
            false => self.ring.recv(token, socket, buf, range),
        }
    }

    fn send(&mut self, id: ConnectionId, socket: &SharedFd, bufs: SendBufs) {
        self.ring.send(Token::Send(id).to_u64(), socket, bufs);
    }

    fn look_after(&mut self, after: Duration) {
        self.ring.timeout(Token::Clients.to_u64(), after);
    }

    fn has_hung_up(&self, socket: &SharedFd) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let hung_up = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(hung_up)
    }

    fn hang_up(&mut self, socket: SharedFd) {
        // A socket that the client has already closed is as good.
        let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
    }
}
