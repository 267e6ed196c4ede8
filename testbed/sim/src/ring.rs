//! The ring that production's driver of an owner loop stands on here, and the daemon around it. Both write down what
//! they are asked for, in order, and the world carries it out ([`crate::local`], [`crate::tap`], [`crate::owner`]).

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
use tidelock_daemon::driver::RingDriver;
use tidelock_daemon::driver::ring::{Around, IoRing};
use tidelock_daemon::driver::token::Token;
use tidelock_daemon::held_gate::PendingEntry;
use tidelock_daemon::nbd_tap::ConnectionId;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::owner::PublishPending;
use tidelock_daemon_core::owner::driver::{DiskFile, DiskOp, GuestIo};
use tidelock_daemon_core::sequencer::{Action, DiskError, RequestId};
use tidelock_nbd::Cookie;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Seq};
use tidelock_protocol::vector::CountVector;
use tidelock_uring::{
    AlignedBuf, Completion, Durability, Extent, ExtentKind, FallocateMode, SendBufs,
};

/// Production's driver, on the ring of the simulator.
pub(crate) type SimDriver = RingDriver<SimRing, SimAround>;

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

/// A socket between a client and the tap, as the tap has it.
#[derive(Debug)]
pub(crate) struct SimSocket {
    pub(crate) number: u64,
    /// The client has closed its end.
    pub(crate) has_hung_up: Cell<bool>,
}

/// A descriptor.
#[derive(Clone, Debug)]
pub(crate) enum SimFd {
    Disk(DiskId),
    /// The activity log's file.
    Log,
    /// The socket of the disk at this place.
    Listener(usize),
    Client(Rc<SimSocket>),
}

impl SimFd {
    fn client(&self) -> &Rc<SimSocket> {
        match self {
            SimFd::Client(socket) => socket,
            other => panic!("{other:?} is no client's socket"),
        }
    }
}

/// A disk's file. Its bytes are the world's.
#[derive(Clone, Debug)]
pub(crate) struct SimFile {
    pub(crate) disk: DiskId,
    pub(crate) fd: SimFd,
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

/// A receive that is under way.
#[derive(Debug)]
pub(crate) struct Receiving {
    pub(crate) token: u64,
    pub(crate) buf: AlignedBuf,
    pub(crate) range: Range<usize>,
    pub(crate) all: bool,
}

/// A thing that the loop or its tap has asked for, or that it has shown.
#[derive(Debug)]
pub(crate) enum Asked {
    Saw(Action),
    /// The tap has taken a request, of this connection and with this name there.
    Request(GuestIo, ConnectionId, u64),
    Disk(DiskOp, Io),
    Answer {
        request: RequestId,
        ok: bool,
        /// P of the writer at that moment.
        published: Seq,
    },
    Accept(u64, usize),
    Receive(u64, Receiving),
    Send(u64, u64, SendBufs),
    Timer(u64, Duration),
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

/// Operations that were asked for and are not carried out.
#[derive(Debug, Default)]
pub(crate) struct Asks(RefCell<Queue>);

#[derive(Debug, Default)]
struct Queue {
    asked: VecDeque<Asked>,
    /// The directory of its backlog, if it has one.
    files: Option<Arc<SimFiles>>,
    /// The process is to be killed at the next record.
    tear: Option<Tear>,
    /// The process is being killed at this record.
    dying: Option<Death>,
    /// The process was killed: nothing of what the loop asks for from then on happens.
    died: Option<Death>,
    /// Planted: but for local writes.
    writes_unkept: bool,
}

impl Asks {
    /// Ring of a process with this backlog, if any. `writes_unkept`: planted, local writes happen after its death.
    pub(crate) fn new(files: Option<Arc<SimFiles>>, writes_unkept: bool) -> Rc<Self> {
        Rc::new(Self(RefCell::new(Queue { files, writes_unkept, ..Queue::default() })))
    }

    /// The next thing that was asked for.
    pub(crate) fn next(&self) -> Option<Asked> {
        self.0.borrow_mut().asked.pop_front()
    }

    /// The process is to be killed at the next record, or not any more.
    pub(crate) fn tears(&self, tear: Option<Tear>) {
        self.0.borrow_mut().tear = tear;
    }

    /// Its death, if it was killed.
    pub(crate) fn died(&self) -> Option<Death> {
        let mut queue = self.0.borrow_mut();
        queue.die();
        queue.died
    }

    fn push(&self, asked: Asked) {
        self.0.borrow_mut().push(asked);
    }
}

impl Queue {
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
        let is_write = matches!(asked, Asked::Disk(_, Io::Write { .. }));
        if self.died.is_none() || self.writes_unkept && is_write {
            self.asked.push_back(asked);
        }
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
}

/// The ring.
pub(crate) struct SimRing(pub(crate) Rc<Asks>);

fn disk_op(token: u64) -> DiskOp {
    match Token::from_u64(token) {
        Token::Disk(op) => op,
        other => panic!("{other:?} is no operation on a file"),
    }
}

impl IoRing for SimRing {
    type Fd = SimFd;
    type File = SimFile;

    fn fd(file: &SimFile) -> &SimFd {
        &file.fd
    }

    fn read(&mut self, token: u64, fd: &SimFd, buf: AlignedBuf, range: Range<usize>, at: u64) {
        debug_assert_eq!(buf.len(), range.start);
        let SimFd::Disk(disk) = *fd else { panic!("{fd:?} is not read") };
        self.0.push(Asked::Disk(disk_op(token), Io::Read { disk, buf, len: range.len(), at }));
    }

    fn write(&mut self, token: u64, fd: &SimFd, data: Bytes, at: u64, how: Durability) {
        let durable = how == Durability::Durable;
        let io = match *fd {
            SimFd::Disk(disk) => Io::Write { disk, data, at, durable },
            // Only a block that is durable before the next one can be read again after a crash.
            SimFd::Log if durable => Io::Log { block: data.to_vec(), at },
            _ => panic!("{fd:?} is written, durably {durable}"),
        };
        self.0.push(Asked::Disk(disk_op(token), io));
    }

    fn zero(&mut self, token: u64, fd: &SimFd, _: FallocateMode, range: Range<u64>) {
        let SimFd::Disk(disk) = *fd else { panic!("{fd:?} is not zeroed") };
        self.0.push(Asked::Disk(disk_op(token), Io::Zero { disk, range }));
    }

    fn sync(&mut self, token: u64, fd: &SimFd) {
        let SimFd::Disk(disk) = *fd else { panic!("{fd:?} is not synced") };
        self.0.push(Asked::Disk(disk_op(token), Io::Sync { disk }));
    }

    fn oldest_file_op(&mut self) -> Option<(u64, Duration)> {
        None
    }

    fn accept(&mut self, token: u64, listener: &SimFd) {
        let SimFd::Listener(disk) = *listener else { panic!("{listener:?} accepts nobody") };
        self.0.push(Asked::Accept(token, disk));
    }

    fn receive(&mut self, token: u64, fd: &SimFd, buf: AlignedBuf, range: Range<usize>, all: bool) {
        let receiving = Receiving { token, buf, range, all };
        self.0.push(Asked::Receive(fd.client().number, receiving));
    }

    fn send(&mut self, token: u64, fd: &SimFd, bufs: SendBufs) {
        self.0.push(Asked::Send(fd.client().number, token, bufs));
    }

    fn timeout(&mut self, token: u64, after: Duration) {
        self.0.push(Asked::Timer(token, after));
    }

    fn submit_and_wait(&mut self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn next_completion(&mut self) -> Option<Completion<SimFd>> {
        None
    }

    fn has_hung_up(&self, fd: &SimFd) -> bool {
        fd.client().has_hung_up.get()
    }

    /// The world sees that nobody has it any more.
    fn hang_up(&mut self, _: SimFd) {}

    fn touch(&mut self, _: &SimFd) -> io::Result<()> {
        Ok(())
    }
}

/// The daemon around the loop.
pub(crate) struct SimAround {
    pub(crate) asks: Rc<Asks>,
    pub(crate) published: Published,
    pub(crate) ends: Rc<Ends>,
}

impl Around for SimAround {
    fn to_link(&mut self, message: ToLink) {
        self.asks.push(Asked::Link(message));
    }

    fn want_ceiling(&mut self) {
        self.asks.push(Asked::Ceiling);
    }

    fn remove_log(&mut self) -> io::Result<()> {
        let fails = self.ends.fails.get();
        self.asks.push(Asked::LogRemoved(!fails));
        if fails { Err(io::Error::other("the disk fails")) } else { Ok(()) }
    }

    fn observe(&mut self, action: &Action) {
        self.asks.0.borrow_mut().observe(action);
    }

    fn observe_request(
        &mut self,
        request: &GuestIo,
        origin: impl FnOnce() -> (ConnectionId, Cookie),
    ) {
        let (connection, cookie) = origin();
        self.asks.push(Asked::Request(request.clone(), connection, cookie.0));
    }

    fn observe_answer(&mut self, request: RequestId, answer: &Result<Bytes, DiskError>) {
        let PendingEntry { pending, writer } = &self.published.entry;
        let published = pending.read().get(*writer);
        self.asks.push(Asked::Answer { request, ok: answer.is_ok(), published });
    }
}
