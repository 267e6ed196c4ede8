//! The drivers of the loops: of an owner loop (one thread per member), and of the link ([`link`], one for the host).
//!
//! NBD sockets, local disks, timers and the wake-ups of other threads are operations of one io_uring; a round is one
//! system call. What has ended is told to the loop ([`crate::owner::Owner`]), which then takes its turn.

mod disk;
pub mod link;
mod sockets;
mod token;

pub use disk::DiskSetup;

use crate::activity::place::LogPlace;
use crate::clock;
use crate::link::port::ToLink;
use crate::nbd_tap::NbdTap;
use crate::owner::Clocks;
use crate::owner::driver::{DiskOp, Driver, Taking, Timer};
use crate::owner::{Owner, OwnerParts, ToOwner};
use crate::sequencer::{DiskError, RequestId};
use bytes::Bytes;
use sockets::Sockets;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use thiserror::Error;
use tidelock_protocol::ids::Channel;
use tidelock_storage::files::Files;
use tidelock_uring::{
    AlignedBuf, BufPool, Buffer, Completion, Durability, EventFd, FallocateMode, LocalFile, Ring,
    RingError, SharedFd, SyncKind,
};
use token::Token;
use tokio::sync::{Notify, mpsc};

/// Operations that fit into one submission.
const RING_ENTRIES: u32 = 512;

/// The activity log's file, open.
#[derive(Debug)]
pub struct LogFile {
    /// The file, locked.
    pub file: LocalFile,
    /// Its place.
    pub place: LogPlace<Files>,
}

/// The parts of a member's thread.
pub struct Parts {
    /// The loop.
    pub owner: OwnerParts<Arc<LocalFile>>,
    /// The sockets of its disks, by id.
    pub disks: Vec<DiskSetup>,
    /// The activity log's file, if there is one.
    pub log_file: Option<LogFile>,
    /// Messages for the loop.
    pub messages: Receiver<ToOwner>,
    /// Signalled when there is something.
    pub wake: EventFd,
    /// To the link.
    pub link: mpsc::UnboundedSender<(Channel, ToLink)>,
    /// The member's number there.
    pub channel: Channel,
    /// Told when writes wait for a higher ceiling of their times.
    pub ceiling_wanted: Arc<Notify>,
}

/// Why a member's thread has ended.
#[derive(Debug, Error)]
pub enum DriverError {
    /// There is no ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The loop cannot go on, or the ring.
    #[error(transparent)]
    Loop(#[from] io::Error),
}

/// One member's ring, and what it is for.
pub struct UringDriver {
    ring: Ring,
    pool: BufPool,
    /// The sockets of disks, by their numbers.
    listeners: Vec<SharedFd>,
    tap: NbdTap<SharedFd, Arc<LocalFile>>,
    log_file: Option<LogFile>,
    link: mpsc::UnboundedSender<(Channel, ToLink)>,
    channel: Channel,
    ceiling_wanted: Arc<Notify>,
}

/// Runs a member's loop until it has ended. `wake` and sockets are looked at on this thread alone.
pub fn run(parts: Parts) -> Result<(), DriverError> {
    let Parts { owner: of_owner, disks, log_file, messages, wake, .. } = parts;
    let mut ring = Ring::new(RING_ENTRIES)?;
    tracing::debug!(member = of_owner.member, ring = ?ring.mode(), "owner loop");
    ring.wait_event(Token::Wake.to_u64(), &wake);
    let listeners = disks.iter().map(|disk| disk.listener.clone()).collect();
    let tap = NbdTap::new(
        of_owner.member.clone(),
        disks.into_iter().map(|disk| disk.tap).collect(),
        of_owner.pool.clone(),
        of_owner.stats.clone(),
        clock::mono_now(),
    );
    let driver = UringDriver {
        ring,
        pool: of_owner.pool.clone(),
        listeners,
        tap,
        log_file,
        link: parts.link,
        channel: parts.channel,
        ceiling_wanted: parts.ceiling_wanted,
    };
    let mut owner = Owner::new(of_owner, driver, clocks());
    owner.begin();
    let ended = run_rounds(&mut owner, &messages, &wake);
    let (tap, mut sockets) = owner.driver().tap();
    tap.hang_up_all(&mut sockets);
    Ok(ended?)
}

fn run_rounds(
    owner: &mut Owner<UringDriver>,
    messages: &Receiver<ToOwner>,
    wake: &EventFd,
) -> io::Result<()> {
    while !owner.has_ended() {
        owner.driver().ring.submit_and_wait(1)?;
        let clocks = clocks();
        owner.set_time(clocks);
        owner.driver().tap.set_now(clocks.now);
        while let Some(completion) = owner.driver().ring.next_completion() {
            match Token::from_u64(completion.token) {
                Token::Wake => {
                    owner.driver().ring.wait_event(completion.token, wake);
                    messages.try_iter().for_each(|message| owner.hear(message));
                }
                Token::Timer(timer) => owner.due(timer),
                Token::Disk(op) => ended(owner, op, completion),
                token => owner.driver().client_event(token, completion),
            }
            take_requests(owner);
        }
        owner.turn()?;
        owner.driver().send_replies();
        // A connection may have had room for more requests.
        while take_requests(owner) && !owner.has_ended() {
            owner.turn()?;
            owner.driver().send_replies();
        }
    }
    Ok(())
}

fn clocks() -> Clocks {
    Clocks { now: clock::mono_now(), wall_ms: clock::wall_ms() }
}

fn ended(owner: &mut Owner<UringDriver>, op: DiskOp, completion: Completion) {
    let buffer = match completion.buffer {
        Buffer::Aligned(buf) => Some(buf),
        _ => None,
    };
    owner.completed(op, completion.result, buffer);
}

/// Returns whether there were any.
fn take_requests(owner: &mut Owner<UringDriver>) -> bool {
    let mut asked = std::mem::take(owner.driver().tap.asked());
    let any = !asked.is_empty();
    asked.drain(..).for_each(|request| owner.ask(request));
    // Its memory is used again.
    *owner.driver().tap.asked() = asked;
    any
}

impl UringDriver {
    fn tap(&mut self) -> (&mut NbdTap<SharedFd, Arc<LocalFile>>, Sockets<'_>) {
        (&mut self.tap, Sockets { ring: &mut self.ring, listeners: &self.listeners })
    }

    fn client_event(&mut self, token: Token, completion: Completion) {
        let Completion { result, buffer, .. } = completion;
        let (tap, mut sockets) = self.tap();
        let sockets = &mut sockets;
        match token {
            Token::Accept(disk) => {
                let accepted = result.map(|_| buffer.into_fd().map(Arc::new));
                tap.accepted(sockets, disk, accepted);
            }
            Token::Receive(id) => tap.received(sockets, id, result, buffer.into_aligned()),
            Token::Send(id) => tap.sent(id, result, buffer.into_many()),
            Token::Clients => tap.look(sockets),
            Token::Wake | Token::Timer(_) | Token::Disk(_) => unreachable!("the loop's"),
        }
    }

    fn send_replies(&mut self) {
        let (tap, mut sockets) = self.tap();
        tap.send_replies(&mut sockets);
    }
}

impl Driver for UringDriver {
    type File = Arc<LocalFile>;

    fn read(
        &mut self,
        op: DiskOp,
        file: &Self::File,
        buf: AlignedBuf,
        range: Range<usize>,
        at: u64,
    ) {
        self.ring.read(Token::Disk(op).to_u64(), file.fd(), buf, range, at);
    }

    fn write(&mut self, op: DiskOp, file: &Self::File, data: Bytes, at: u64, how: Durability) {
        self.ring.write(Token::Disk(op).to_u64(), file.fd(), data, at, how);
    }

    fn zero(&mut self, op: DiskOp, file: &Self::File, mode: FallocateMode, range: Range<u64>) {
        let (token, len_bytes) = (Token::Disk(op).to_u64(), range.end - range.start);
        self.ring.fallocate(token, file.fd(), mode, range.start, len_bytes);
    }

    fn sync(&mut self, op: DiskOp, file: &Self::File) {
        self.ring.fsync(Token::Disk(op).to_u64(), file.fd(), SyncKind::Data);
    }

    fn write_log(&mut self, block: &[u8], at: u64) {
        let file = &self.log_file.as_ref().expect("a log that is on has a file").file;
        let data = self.pool.copy_of(block).freeze_all();
        let token = Token::Disk(DiskOp::LogWrite).to_u64();
        self.ring.write(token, file.fd(), data, at, Durability::Durable);
    }

    fn touch_log(&mut self) -> io::Result<()> {
        use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
        let Some(LogFile { file, .. }) = &self.log_file else { return Ok(()) };
        let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times =
            Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
        Ok(rustix::fs::futimens(file.fd(), &times)?)
    }

    fn remove_log(&mut self) -> io::Result<()> {
        if let Some(LogFile { place, .. }) = &self.log_file {
            let with_path =
                |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", place.path().display()));
            place.remove().map_err(with_path)?;
            self.log_file = None;
        }
        Ok(())
    }

    fn oldest_op(&mut self) -> Option<(DiskOp, Duration)> {
        let (token, waited) = self.ring.oldest_file_op()?;
        match Token::from_u64(token) {
            Token::Disk(op) => Some((op, waited)),
            _ => None,
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        self.send_replies();
        self.ring.submit_and_wait(0)
    }

    fn answer(&mut self, request: RequestId, answer: Result<Bytes, DiskError>) {
        self.tap.reply(request, answer);
    }

    fn take(&mut self, what: Taking) {
        let (tap, mut sockets) = self.tap();
        tap.set_taking(&mut sockets, what);
    }

    fn has_sent_answers(&self) -> bool {
        self.tap.has_sent_answers()
    }

    fn set_timer(&mut self, timer: Timer, after: Duration) {
        self.ring.timeout(Token::Timer(timer).to_u64(), after);
    }

    fn want_ceiling(&mut self) {
        self.ceiling_wanted.notify_one();
    }

    fn to_link(&mut self, message: ToLink) {
        // The link ends after the owner loops, or with the daemon.
        let _ = self.link.send((self.channel, message));
    }
}
