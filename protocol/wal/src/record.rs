//! Heads of records. The layout is in the crate's documentation.

use crate::item::Xid;
use crate::lsn::Lsn;

/// The greatest length of a record: what PostgreSQL can allocate at once, without which it could not replay it. From 16
/// on PostgreSQL writes none of more than 1020 MiB.
pub const RECORD_BYTES_MAX: u32 = (1 << 30) - 1;

pub(crate) const HEAD_BYTES: usize = 24;
/// Bytes of the head that the checksum covers.
pub(crate) const CHECKED_BYTES: usize = 20;

/// The manager of records about the log itself.
pub(crate) const MANAGER_LOG: u8 = 0;
/// The manager of transactions' records.
pub(crate) const MANAGER_TRANSACTIONS: u8 = 1;
/// The manager of messages that clients put into the log.
pub(crate) const MANAGER_MESSAGES: u8 = 21;

/// The head of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub xid: Xid,
    /// Begin of the record before.
    pub before: Lsn,
    pub info: u8,
    pub manager: u8,
    pub checksum: u32,
}

impl Head {
    pub fn decode(head: &[u8; HEAD_BYTES]) -> Head {
        Head {
            xid: Xid(u32_at(head, 4)),
            before: Lsn(u64_at(head, 8)),
            info: head[16],
            manager: head[17],
            checksum: u32_at(head, 20),
        }
    }
}

/// True of a length that a record can have.
pub(crate) fn is_possible(bytes: u32) -> bool {
    (HEAD_BYTES as u32..=RECORD_BYTES_MAX).contains(&bytes)
}

/// Little-endian numbers at a place that the caller knows to be inside.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
