//! The NBD tap's sockets, as operations of the ring.

use super::ring::IoRing;
use super::token::Token;
use crate::nbd_tap::{ConnectionId, Network};
use std::ops::Range;
use std::time::Duration;
use tidelock_uring::{AlignedBuf, SendBufs};

/// The ring, and the sockets of the disks.
pub(super) struct Sockets<'a, R: IoRing> {
    pub(super) ring: &'a mut R,
    pub(super) listeners: &'a [R::Fd],
}

impl<R: IoRing> Network for Sockets<'_, R> {
    type Socket = R::Fd;

    fn accept(&mut self, disk: usize) {
        self.ring.accept(Token::Accept(disk).to_u64(), &self.listeners[disk]);
    }

    fn receive(
        &mut self,
        id: ConnectionId,
        socket: &R::Fd,
        buf: AlignedBuf,
        range: Range<usize>,
        all: bool,
    ) {
        self.ring.receive(Token::Receive(id).to_u64(), socket, buf, range, all);
    }

    fn send(&mut self, id: ConnectionId, socket: &R::Fd, bufs: SendBufs) {
        self.ring.send(Token::Send(id).to_u64(), socket, bufs);
    }

    fn look_after(&mut self, after: Duration) {
        self.ring.timeout(Token::Clients.to_u64(), after);
    }

    fn has_hung_up(&self, socket: &R::Fd) -> bool {
        self.ring.has_hung_up(socket)
    }

    fn hang_up(&mut self, socket: R::Fd) {
        self.ring.hang_up(socket);
    }
}
