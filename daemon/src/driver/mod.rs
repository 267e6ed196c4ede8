//! The drivers of the loops: of an owner loop (one thread per member), and of the link ([`link`], one for the host).
//!
//! NBD sockets, local disks, timers and the wake-ups of other threads are operations of one io_uring; a round is one
//! system call. What has ended is told to the loop ([`crate::owner::Owner`]), which then takes its turn.

mod clients;
mod connection;
mod disk;
pub mod link;
mod requests;
mod token;

pub use clients::HANDSHAKES_MAX;
pub use disk::DiskSetup;

use crate::link::port::ToLink;
use crate::owner::Clocks;
use crate::owner::driver::{DiskOp, Driver, GuestIo, Taking, Timer};
use crate::owner::{Owner, OwnerParts, ToOwner};
use crate::sequencer::{DiskError, RequestId};
use crate::stats::OwnerStats;
use crate::{clock, durable};
use bytes::Bytes;
use connection::{Connection, ConnectionId};
use requests::Requests;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use thiserror::Error;
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_uring::{
    AlignedBuf, BufPool, Buffer, Completion, Durability, EventFd, FallocateMode, LocalFile, Ring,
    RingError, SyncKind,
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
    /// Its path.
    pub path: PathBuf,
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
    member: String,
    ring: Ring,
    pool: BufPool,
    disks: Vec<DiskSetup>,
    log_file: Option<LogFile>,
    link: mpsc::UnboundedSender<(Channel, ToLink)>,
    channel: Channel,
    ceiling_wanted: Arc<Notify>,
    stats: Arc<OwnerStats>,
    now: MonoNanos,
    // The state of clients (`clients.rs`).
    taking: Taking,
    listens: bool,
    connections: HashMap<ConnectionId, Connection>,
    next_connection: u64,
    requests: Requests,
    /// Requests that the loop has not taken yet.
    asked: Vec<GuestIo>,
    /// Connections with something to send, so that a round looks at no others.
    touched: Vec<ConnectionId>,
    /// Disks whose sockets do not accept, because a client came while nothing was taken.
    unaccepted: Vec<usize>,
    /// Disks whose sockets accept again at the next look.
    accept_later: Vec<usize>,
    looks_later: bool,
    /// By disk, the last time that a line about its clients was logged.
    said_at: HashMap<usize, MonoNanos>,
    turned_away: bool,
}

/// Runs a member's loop until it has ended. `wake` and sockets are looked at on this thread alone.
pub fn run(parts: Parts) -> Result<(), DriverError> {
    let Parts { owner: of_owner, disks, log_file, messages, wake, .. } = parts;
    let mut ring = Ring::new(RING_ENTRIES)?;
    tracing::debug!(member = of_owner.member, ring = ?ring.mode(), "owner loop");
    ring.wait_event(Token::Wake.to_u64(), &wake);
    let driver = UringDriver {
        member: of_owner.member.clone(),
        ring,
        pool: of_owner.pool.clone(),
        disks,
        log_file,
        link: parts.link,
        channel: parts.channel,
        ceiling_wanted: parts.ceiling_wanted,
        stats: of_owner.stats.clone(),
        now: clock::mono_now(),
        taking: Taking::Nothing,
        listens: false,
        connections: HashMap::new(),
        next_connection: 0,
        requests: Requests::default(),
        asked: Vec::new(),
        touched: Vec::new(),
        unaccepted: Vec::new(),
        accept_later: Vec::new(),
        looks_later: false,
        said_at: HashMap::new(),
        turned_away: false,
    };
    let mut owner = Owner::new(of_owner, driver, clocks());
    owner.begin();
    let ended = run_rounds(&mut owner, &messages, &wake);
    owner.driver().hang_up_all();
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
        owner.driver().now = clocks.now;
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
    let mut asked = std::mem::take(&mut owner.driver().asked);
    let any = !asked.is_empty();
    asked.drain(..).for_each(|request| owner.ask(request));
    // Its memory is used again.
    owner.driver().asked = asked;
    any
}

impl UringDriver {
    fn client_event(&mut self, token: Token, completion: Completion) {
        let Completion { result, buffer, .. } = completion;
        match token {
            Token::Accept(disk) => self.accepted(disk, result, buffer),
            Token::Receive(id) => self.received(id, result, buffer),
            Token::Send(id) => self.sent(id, result, buffer),
            Token::Clients => self.look_at_clients(),
            Token::Wake | Token::Timer(_) | Token::Disk(_) => unreachable!("the loop's"),
        }
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
        if let Some(LogFile { path, .. }) = &self.log_file {
            let with_path =
                |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
            durable::remove(path).map_err(with_path)?;
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
        self.reply(request, answer);
    }

    fn take(&mut self, what: Taking) {
        self.set_taking(what);
    }

    fn has_sent_answers(&self) -> bool {
        self.connections.values().all(Connection::is_flushed)
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
