//! The purpose of each operation of the ring, as the number that its completion comes back with.

use crate::nbd_tap::ConnectionId;
use tidelock_daemon_core::owner::driver::{DiskOp, Timer};
use tidelock_daemon_core::sequencer::{OpId, RequestId};
use tidelock_protocol::ids::DiskId;

/// The purpose of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// The wake-up.
    Wake,
    /// A timer of the loop.
    Timer(Timer),
    /// The time to look at clients.
    Clients,
    /// A client for this disk, by its place.
    Accept(usize),
    /// Bytes of a client.
    Receive(ConnectionId),
    /// Bytes for a client.
    Send(ConnectionId),
    /// The loop's.
    Disk(DiskOp),
}

impl Token {
    const KIND_SHIFT: u32 = 56;
    const DISK_SHIFT: u32 = 40;

    /// The number.
    #[must_use]
    pub fn to_u64(self) -> u64 {
        let (kind, id) = match self {
            Token::Wake => (0, 0),
            Token::Timer(Timer::Tick) => (1, 0),
            Token::Timer(Timer::Idle) => (2, 0),
            Token::Clients => (3, 0),
            Token::Accept(disk) => (4, disk as u64),
            Token::Receive(id) => (5, id.0),
            Token::Send(id) => (6, id.0),
            Token::Disk(DiskOp::Read(request)) => (7, request.0),
            Token::Disk(DiskOp::Flush(request)) => (8, request.0),
            Token::Disk(DiskOp::Local(op)) => (9, op.0),
            Token::Disk(DiskOp::LogWrite) => (10, 0),
            Token::Disk(DiskOp::LogFlush(disk, number)) => {
                debug_assert!(number < 1 << Self::DISK_SHIFT);
                (11, u64::from(disk.0) << Self::DISK_SHIFT | number)
            }
        };
        debug_assert!(id < 1 << Self::KIND_SHIFT);
        kind << Self::KIND_SHIFT | id
    }

    /// The purpose that has this number.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn from_u64(token: u64) -> Token {
        let id = token & ((1 << Self::KIND_SHIFT) - 1);
        match token >> Self::KIND_SHIFT {
            0 => Token::Wake,
            1 => Token::Timer(Timer::Tick),
            2 => Token::Timer(Timer::Idle),
            3 => Token::Clients,
            4 => Token::Accept(id as usize),
            5 => Token::Receive(ConnectionId(id)),
            6 => Token::Send(ConnectionId(id)),
            7 => Token::Disk(DiskOp::Read(RequestId(id))),
            8 => Token::Disk(DiskOp::Flush(RequestId(id))),
            9 => Token::Disk(DiskOp::Local(OpId(id))),
            10 => Token::Disk(DiskOp::LogWrite),
            11 => {
                let number = id & ((1 << Self::DISK_SHIFT) - 1);
                let disk = DiskId((id >> Self::DISK_SHIFT) as u16);
                Token::Disk(DiskOp::LogFlush(disk, number))
            }
            kind => unreachable!("token of kind {kind}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive() {
        let id = (1 << 40) + 7;
        for token in [
            Token::Wake,
            Token::Timer(Timer::Tick),
            Token::Timer(Timer::Idle),
            Token::Clients,
            Token::Accept(3),
            Token::Receive(ConnectionId(id)),
            Token::Send(ConnectionId(id)),
            Token::Disk(DiskOp::Read(RequestId(u32::MAX.into()))),
            Token::Disk(DiskOp::Flush(RequestId(0))),
            Token::Disk(DiskOp::Local(OpId(id))),
            Token::Disk(DiskOp::LogWrite),
            Token::Disk(DiskOp::LogFlush(DiskId(63), (1 << 40) - 1)),
        ] {
            assert_eq!(Token::from_u64(token.to_u64()), token);
        }
    }
}
