//! What each operation of the ring is for, as the number that its completion comes back with.

use super::connection::ConnectionId;
use super::requests::Slot;
use crate::sequencer::OpId;

/// The operations of the ring, as tokens: kind in the upper byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Wake,
    Tick,
    Accept(usize),
    Receive(ConnectionId),
    Send(ConnectionId),
    Read(Slot),
    Flush(Slot),
    Local(OpId),
    Idle,
    LogWrite,
    /// A disk and the number of the flush.
    LogFlush(u16, u64),
}

impl Token {
    const KIND_SHIFT: u32 = 56;
    const DISK_SHIFT: u32 = 40;

    pub(super) fn to_u64(self) -> u64 {
        let (kind, id) = match self {
            Token::Wake => (0, 0),
            Token::Tick => (1, 0),
            Token::Accept(disk) => (2, disk as u64),
            Token::Receive(id) => (3, id.0),
            Token::Send(id) => (4, id.0),
            Token::Read(slot) => (5, u64::from(slot.0)),
            Token::Flush(slot) => (6, u64::from(slot.0)),
            Token::Local(op) => (7, op.0),
            Token::Idle => (8, 0),
            Token::LogWrite => (9, 0),
            Token::LogFlush(disk, number) => {
                debug_assert!(number < 1 << Self::DISK_SHIFT);
                (10, u64::from(disk) << Self::DISK_SHIFT | number)
            }
        };
        debug_assert!(id < 1 << Self::KIND_SHIFT);
        kind << Self::KIND_SHIFT | id
    }

    pub(super) fn from_u64(token: u64) -> Token {
        let id = token & ((1 << Self::KIND_SHIFT) - 1);
        match token >> Self::KIND_SHIFT {
            0 => Token::Wake,
            1 => Token::Tick,
            2 => Token::Accept(id as usize),
            3 => Token::Receive(ConnectionId(id)),
            4 => Token::Send(ConnectionId(id)),
            5 => Token::Read(Slot(id as u32)),
            6 => Token::Flush(Slot(id as u32)),
            7 => Token::Local(OpId(id)),
            8 => Token::Idle,
            9 => Token::LogWrite,
            10 => {
                let number = id & ((1 << Self::DISK_SHIFT) - 1);
                Token::LogFlush((id >> Self::DISK_SHIFT) as u16, number)
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
            Token::Tick,
            Token::Accept(3),
            Token::Receive(ConnectionId(id)),
            Token::Send(ConnectionId(id)),
            Token::Read(Slot(u32::MAX)),
            Token::Flush(Slot(0)),
            Token::Local(OpId(id)),
            Token::Idle,
            Token::LogWrite,
            Token::LogFlush(63, (1 << 40) - 1),
        ] {
            assert_eq!(Token::from_u64(token.to_u64()), token);
        }
    }
}
