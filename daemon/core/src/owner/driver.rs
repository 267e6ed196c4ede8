//! The boundary of the owner loop: what it asks of whoever drives it, and what it is told.
//!
//! The loop itself does no I/O and reads no clock. In production a driver over io_uring, sockets and timers carries out
//! what it asks for (`daemon/src/driver`); the simulator is another driver of the same loop.

use crate::sequencer::{Action, DiskError, Extent, OpId, RequestId};
use bytes::Bytes;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tidelock_buffers::{AlignedBuf, Durability, FallocateMode};
use tidelock_protocol::ids::DiskId;
use tidelock_protocol::record::Payload;

use crate::link::port::ToLink;

/// One request of a guest, whichever tap it came through.
#[derive(Clone, Debug)]
pub struct GuestIo {
    /// Its number; free again when it is answered.
    pub id: RequestId,
    /// The disk and the range. A flush is of the disk as a whole, and its range is empty.
    pub extent: Extent,
    /// The operation.
    pub op: GuestOp,
}

/// An operation that a guest may ask of a disk.
#[derive(Clone, Debug)]
pub enum GuestOp {
    /// The data of the range.
    Read,
    /// New data. The tap has copied it out of the guest's memory.
    Write {
        /// The data, as long as the range.
        data: Payload,
        /// Answered when it is on stable storage.
        fua: bool,
    },
    /// The range reads as zeroes from now on.
    Zero {
        /// Its storage is kept.
        no_hole: bool,
        /// Refused if zeroes would have to be written.
        only_if_fast: bool,
        /// Answered when it is on stable storage.
        fua: bool,
    },
    /// The range is not needed any more: a hint.
    Discard {
        /// Answered when it is on stable storage.
        fua: bool,
    },
    /// Everything that was answered is on stable storage before this is.
    Flush,
}

/// An operation on a local disk or on the activity log's file that the driver has been asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DiskOp {
    /// A step of an operation of the sequencer.
    Local(OpId),
    /// A guest's read.
    Read(RequestId),
    /// A guest's flush.
    Flush(RequestId),
    /// A block of the activity log.
    LogWrite,
    /// A flush that the activity log waits for, of this disk, with this number.
    LogFlush(DiskId, u64),
}

/// A timer of the loop. There is one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// The time to try again what cannot go on by itself.
    Tick,
    /// A writer that has nothing to write may have to say so.
    Idle,
}

/// The treatment of guests by a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taking {
    /// Requests are taken.
    All,
    /// No new requests; those that were taken are answered.
    Nothing,
    /// Clients that connect are turned away: the group was switched over.
    TurnAway,
}

/// The file or device of a protected disk.
pub trait DiskFile: Debug {
    /// Direct reads and writes begin and end at multiples of this, in bytes.
    fn align_bytes(&self) -> u64;
    /// True if this data can be written there as it lies in memory.
    fn allows(&self, data: &[u8], at: u64) -> bool;
    /// True if ranges can be given back to the file system.
    fn can_punch_hole(&self) -> bool;
    /// True if ranges can be zeroed without writing, with their storage kept.
    fn can_zero_range(&self) -> bool;
    /// The pieces of a range, in order and without a gap, `max` of them at most: the last may end before the range does.
    fn extents(&self, range: Range<u64>, max: usize) -> io::Result<Vec<tidelock_buffers::Extent>>;
    /// The identity of the file as it is now: it changes when somebody else replaces or writes to it.
    fn mark(&self) -> io::Result<String>;
    /// Makes everything written durable, and waits for that: at a clean end.
    fn sync(&self) -> io::Result<()>;
}

/// The operations that the loop asks for. Those on disks end with [`super::Owner::completed`], in any order.
pub trait Driver {
    /// A protected disk's file.
    type File: DiskFile;

    /// Reads into this range of the buffer. The end may come with fewer bytes; the buffer's length says how many it has.
    fn read(
        &mut self,
        op: DiskOp,
        file: &Self::File,
        buf: AlignedBuf,
        range: Range<usize>,
        at: u64,
    );
    /// Writes. The end may come with fewer bytes.
    fn write(&mut self, op: DiskOp, file: &Self::File, data: Bytes, at: u64, how: Durability);
    /// Makes a range read as zeroes without writing them.
    fn zero(&mut self, op: DiskOp, file: &Self::File, mode: FallocateMode, range: Range<u64>);
    /// Makes everything written durable.
    fn sync(&mut self, op: DiskOp, file: &Self::File);
    /// Writes a block of the activity log, durably; ends as [`DiskOp::LogWrite`].
    fn write_log(&mut self, block: &[u8], at: u64);
    /// Sets the time of the log's file: a local write begins.
    fn touch_log(&mut self) -> io::Result<()>;
    /// Removes the log's file, durably.
    fn remove_log(&mut self) -> io::Result<()>;
    /// The operation on a protected disk that has been under way longest, and since when it was.
    fn oldest_op(&mut self) -> Option<(DiskOp, Duration)>;
    /// Begins what was asked for. Nothing has to wait for more.
    fn submit(&mut self) -> io::Result<()>;

    /// Answers a guest's request; with data if it was a read.
    fn answer(&mut self, request: RequestId, answer: Result<Bytes, DiskError>);
    /// Requests are taken from now on, or not.
    fn take(&mut self, what: Taking);
    /// True if all answers have left.
    fn has_sent_answers(&self) -> bool;

    /// Calls [`super::Owner::due`] after this time.
    fn set_timer(&mut self, timer: Timer, after: Duration);
    /// A record waits until a later time is on record as the ceiling.
    fn want_ceiling(&mut self);
    /// The sequencer's next action, before it is carried out. For whoever checks the loop.
    fn observe(&mut self, _action: &Action) {}
    /// Gives a message to the link.
    fn to_link(&mut self, message: ToLink);
}
