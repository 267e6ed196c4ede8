//! What goes into a [`Sequencer`](super::Sequencer) and what comes out of it.

use super::Extent;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{Message, Mode};
use tidelock_protocol::record::{Effect, Record};

/// The caller's name for a guest's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// The sequencer's name for an operation on the local disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// An error of the local disk, as the guest will see it (an errno).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskError(pub i32);

/// The disk did not do it.
pub const EIO: i32 = 5;
/// The operation cannot be done on this disk.
pub const EOPNOTSUPP: i32 = 95;

impl DiskError {
    /// The same as the system has told it; without a number, [`EIO`].
    #[must_use]
    pub fn of(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(EIO))
    }
}

/// What Tidelock reads of a disk for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// To send it.
    Copy,
    /// To send it unless it is all zeroes: the backup's disk is known to be.
    CopyUnlessZero,
    /// To have it compared with the backup's.
    Digest,
    /// Nothing but where its storage begins: if it begins with a hole, the backup is asked whether
    /// it has zeroes there, too.
    Hole,
}

/// How the disk begins in an extent that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// So many bytes have no storage, and read as zeroes.
    Hole(u64),
    /// So many bytes may hold anything.
    Data(u64),
}

/// What is to be done, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Store P\[self\] where the gate reads it, with the time of that write.
    Publish(Seq, Hlc),
    /// Start the local write; then call [`written`](super::Sequencer::written).
    Write {
        /// To be named when done.
        op: OpId,
        /// Where.
        extent: Extent,
        /// The guest's data or zeroes.
        effect: Effect,
        /// The guest wants it on stable storage (FUA).
        fua: bool,
    },
    /// Read the local disk; then call [`read_done`](super::Sequencer::read_done).
    Read {
        /// To be named when done.
        op: OpId,
        /// Where.
        extent: Extent,
    },
    /// Look how the disk begins there; then call [`looked`](super::Sequencer::looked).
    FindHole {
        /// To be named when done.
        op: OpId,
        /// Where.
        extent: Extent,
    },
    /// Give the record to the sender.
    Send(Record),
    /// Give the message to the sender, at this place among the records.
    SendInOrder(Message),
    /// Complete the guest's request.
    Complete(RequestId, Result<(), DiskError>),
    /// A copy or a digest check has been sent (or was not needed).
    Copied {
        /// Where.
        extent: Extent,
        /// What was done.
        outcome: CopyOutcome,
    },
    /// The local disk failed a write and could not be read back, or there was no room for what it would have shown:
    /// until the extent is copied again the sites may differ there. The guest got an error for it.
    Suspect(Extent),
}

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOutcome {
    /// Sent as a record.
    Sent,
    /// All zeroes at both sites.
    Zero,
    /// A digest check is on its way.
    Asked,
    /// A hole of so many bytes was found, and the backup is asked for zeroes there.
    AskedForZeroes(u64),
    /// So many bytes are no hole, and are to be read.
    HasData(u64),
    /// The local disk could not be read.
    Unreadable,
    /// Not read: nothing is recorded meanwhile ([`stop_recording`](super::Sequencer::stop_recording)).
    Withdrawn,
}

/// How far the backup is behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lag {
    /// Records that are not durable.
    pub writes: u64,
    /// Their payload bytes.
    pub bytes: u64,
    /// When the oldest guest's write among them was admitted.
    pub oldest: Option<MonoNanos>,
}

/// Sizes and identity.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Whose writes these are.
    pub writer: WriterId,
    /// The mode at start.
    pub mode: Mode,
    /// The bound of admitted bytes that are not durable.
    pub backlog_limit_bytes: u64,
    /// Locks are held for whole blocks of this size, because unaligned writes read, change and
    /// write whole blocks.
    pub lock_align_bytes: u64,
}
