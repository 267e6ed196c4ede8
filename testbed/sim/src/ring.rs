//! The driver of a member's owner loop: it writes down what the loop asks for, in order, and the world carries it out
//! ([`crate::local`], [`crate::owner`]).

use crate::disk::SECTOR_BYTES;
use crate::files::SimFiles;
use bytes::Bytes;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tidelock_daemon::held_gate::PendingEntry;
use tidelock_daemon::link::port::ToLink;
use tidelock_daemon::owner::PublishPending;
use tidelock_daemon::owner::driver::{DiskFile, DiskOp, Driver, Taking, Timer};
use tidelock_daemon::sequencer::{Action, DiskError, RequestId};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Seq};
use tidelock_protocol::vector::CountVector;
use tidelock_uring::{AlignedBuf, Durability, Extent, ExtentKind, FallocateMode};

/// A writer's entry in the P of a member.
pub(crate) struct Published {
    pub(crate) entry: PendingEntry,
    /// The directory of its backlog, which knows that its process was killed: it publishes nothing any more.
    pub(crate) files: Option<Arc<SimFiles>>,
}

impl Published {
    fn is_dead(&self) -> bool {
        self.files.as_ref().is_some_and(|files| files.is_dead())
    }
}

impl PublishPending for Published {
    fn publish(&self, seq: Seq, hlc: Hlc) {
        if !self.is_dead() {
            self.entry.publish(seq, hlc);
        }
    }

    fn read(&self, p: &mut CountVector) -> Hlc {
        self.entry.read(p)
    }

    fn raise(&self, p: &CountVector, hlc: Hlc) {
        if !self.is_dead() {
            self.entry.raise(p, hlc);
        }
    }
}

/// A disk as far as the loop can see it without reading.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    pub(crate) size_bytes: u64,
    /// The ranges that have storage, in order.
    pub(crate) allocated: Vec<Range<u64>>,
}

/// A disk's file. Its bytes are the world's.
#[derive(Debug)]
pub(crate) struct SimFile {
    pub(crate) disk: DiskId,
    pub(crate) shape: Rc<RefCell<Shape>>,
    pub(crate) ends: Rc<Ends>,
}

/// The disks at a clean end, where the loop waits for the answer.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// A sync fails, and so does the removal of an activity log.
    pub(crate) fails: Cell<bool>,
    /// Disks that were synced.
    pub(crate) synced: RefCell<Vec<DiskId>>,
}

impl DiskFile for SimFile {
    fn align_bytes(&self) -> u64 {
        SECTOR_BYTES
    }

    fn allows(&self, data: &[u8], at: u64) -> bool {
        at.is_multiple_of(SECTOR_BYTES) && (data.len() as u64).is_multiple_of(SECTOR_BYTES)
    }

    fn can_punch_hole(&self) -> bool {
        true
    }

    /// Some disks can, and on others zeroes have to be written.
    fn can_zero_range(&self) -> bool {
        self.disk.0.is_multiple_of(2)
    }

    fn extents(&self, range: Range<u64>, max: usize) -> io::Result<Vec<Extent>> {
        let shape = self.shape.borrow();
        let (mut found, mut at) = (Vec::new(), range.start);
        while at < range.end && found.len() < max {
            let next = shape.allocated.iter().find(|piece| piece.end > at);
            let (kind, end) = match next {
                Some(piece) if piece.start <= at => (ExtentKind::Allocated, piece.end),
                Some(piece) => (ExtentKind::Hole, piece.start),
                None => (ExtentKind::Hole, range.end),
            };
            let end = end.min(range.end);
            found.push(Extent { offset: at, len: end - at, kind });
            at = end;
        }
        Ok(found)
    }

    fn mark(&self) -> io::Result<String> {
        let size_bytes = self.shape.borrow().size_bytes;
        Ok(format!("image inode={} bytes={size_bytes}", self.disk.0))
    }

    fn sync(&self) -> io::Result<()> {
        if self.ends.fails.get() {
            return Err(io::Error::other("the disk fails"));
        }
        self.ends.synced.borrow_mut().push(self.disk);
        Ok(())
    }
}

/// An operation on a disk or on the activity log's file.
#[derive(Debug)]
pub(crate) enum Io {
    Read { disk: DiskId, buf: AlignedBuf, len: usize, at: u64 },
    Write { disk: DiskId, data: Bytes, at: u64, durable: bool },
    Zero { disk: DiskId, range: Range<u64> },
    Sync { disk: DiskId },
    Log { block: Vec<u8>, at: u64 },
}

/// A thing that the loop has asked for.
#[derive(Debug)]
pub(crate) enum Asked {
    Saw(Action),
    Disk(DiskOp, Io),
    Answer {
        request: RequestId,
        answer: Result<Bytes, DiskError>,
        /// P of the writer at that moment.
        published: Seq,
    },
    Take(Taking),
    Timer(Timer, Duration),
    Ceiling,
    Link(ToLink),
    /// The activity log's file is removed, or cannot be.
    LogRemoved(bool),
}

/// The place where a process is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tear {
    /// Within the append of a record to its backlog on disk.
    Within,
    /// Right behind it, before its local write.
    Behind,
}

/// A process that was killed so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Death {
    pub(crate) tear: Tear,
    pub(crate) seq: Seq,
    /// Some record is on disk, and the stream can be gone on with.
    pub(crate) has_records: bool,
}

/// The driver.
pub(crate) struct SimDriver {
    asked: VecDeque<Asked>,
    published: Published,
    ends: Rc<Ends>,
    /// The directory of its backlog, if it has one.
    files: Option<Arc<SimFiles>>,
    /// The process is to be killed at the next record.
    pub(crate) tear: Option<Tear>,
    /// The process is being killed at this record.
    dying: Option<Death>,
    /// The process was killed: nothing of what the loop asks for from then on happens.
    died: Option<Death>,
    /// Planted: but for local writes.
    pub(crate) writes_unkept: bool,
}

impl SimDriver {
    pub(crate) fn new(published: Published, ends: Rc<Ends>, files: Option<Arc<SimFiles>>) -> Self {
        Self {
            asked: VecDeque::new(),
            published,
            ends,
            files,
            tear: None,
            dying: None,
            died: None,
            writes_unkept: false,
        }
    }

    /// The next thing that was asked for.
    pub(crate) fn next(&mut self) -> Option<Asked> {
        self.asked.pop_front()
    }

    /// Its death, if it was killed.
    pub(crate) fn died(&mut self) -> Option<Death> {
        self.die();
        self.died
    }

    /// The record at which it is to be killed is on disk, or as much of it as there will ever be.
    fn die(&mut self) {
        let (Some(death), Some(files)) = (self.dying.take(), &self.files) else { return };
        files.dies();
        let has_records = death.has_records || death.tear == Tear::Behind && files.has_records();
        // A loop that had no room for an append has said, before this, that the stream cannot be gone on with.
        let has_records = has_records && !files.take_ran_full();
        self.died = Some(Death { has_records, ..death });
    }

    fn push(&mut self, asked: Asked) {
        self.die();
        if self.died.is_none() {
            self.asked.push_back(asked);
        }
    }
}

impl Driver for SimDriver {
    type File = SimFile;

    fn read(&mut self, op: DiskOp, file: &SimFile, buf: AlignedBuf, range: Range<usize>, at: u64) {
        debug_assert_eq!(buf.len(), range.start);
        let io = Io::Read { disk: file.disk, buf, len: range.len(), at };
        self.push(Asked::Disk(op, io));
    }

    fn write(&mut self, op: DiskOp, file: &SimFile, data: Bytes, at: u64, how: Durability) {
        let io = Io::Write { disk: file.disk, data, at, durable: how == Durability::Durable };
        self.die();
        if self.died.is_some() && self.writes_unkept {
            return self.asked.push_back(Asked::Disk(op, io));
        }
        self.push(Asked::Disk(op, io));
    }

    fn zero(&mut self, op: DiskOp, file: &SimFile, _: FallocateMode, range: Range<u64>) {
        self.push(Asked::Disk(op, Io::Zero { disk: file.disk, range }));
    }

    fn sync(&mut self, op: DiskOp, file: &SimFile) {
        self.push(Asked::Disk(op, Io::Sync { disk: file.disk }));
    }

    fn write_log(&mut self, block: &[u8], at: u64) {
        let io = Io::Log { block: block.to_vec(), at };
        self.push(Asked::Disk(DiskOp::LogWrite, io));
    }

    fn touch_log(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn remove_log(&mut self) -> io::Result<()> {
        let fails = self.ends.fails.get();
        self.push(Asked::LogRemoved(!fails));
        if fails { Err(io::Error::other("the disk fails")) } else { Ok(()) }
    }

    fn oldest_op(&mut self) -> Option<(DiskOp, Duration)> {
        None
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn answer(&mut self, request: RequestId, answer: Result<Bytes, DiskError>) {
        let PendingEntry { pending, writer } = &self.published.entry;
        let published = pending.read().get(*writer);
        self.push(Asked::Answer { request, answer, published });
    }

    fn take(&mut self, what: Taking) {
        self.push(Asked::Take(what));
    }

    fn has_sent_answers(&self) -> bool {
        true
    }

    fn set_timer(&mut self, timer: Timer, after: Duration) {
        self.push(Asked::Timer(timer, after));
    }

    fn want_ceiling(&mut self) {
        self.push(Asked::Ceiling);
    }

    fn observe(&mut self, action: &Action) {
        self.die();
        if self.died.is_some() {
            return;
        }
        if let (Action::Send(record), Some(tear), Some(files)) = (action, self.tear, &self.files) {
            self.tear = None;
            self.dying = Some(Death { tear, seq: record.seq, has_records: files.has_records() });
            if tear == Tear::Within {
                // The oracle hears nothing of it.
                return files.dies_within_next();
            }
        }
        self.asked.push_back(Asked::Saw(action.clone()));
    }

    fn to_link(&mut self, message: ToLink) {
        self.push(Asked::Link(message));
    }
}
