//! The drivers of the loops: of an owner loop (one thread per member), and of the link ([`link`], one for the host).
//!
//! NBD sockets, local disks, timers and the wake-ups of other threads are operations of one ring. What has ended is
//! told to the loop ([`tidelock_daemon_core::owner::Owner`]) and its tap, which then take their turn. [`RingDriver`] does so on any
//! ring ([`IoRing`]); [`thread`] is the member's thread around it, where the ring is an io_uring and a round is one
//! system call.

mod disk;
pub mod link;
pub mod ring;
mod sockets;
pub mod thread;
pub mod token;

pub use disk::{DiskSetup, OpenDisk};

use crate::nbd_tap::NbdTap;
use bytes::Bytes;
use ring::{Around, IoRing};
use sockets::Sockets;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::owner::driver::{DiskOp, Driver, Taking, Timer};
use tidelock_daemon_core::owner::{Clocks, Owner};
use tidelock_daemon_core::sequencer::{Action, DiskError, RequestId};
use tidelock_planted::Bug;
use tidelock_uring::{AlignedBuf, BufPool, Buffer, Completion, Durability, FallocateMode};
use token::Token;

/// One member's ring, and what it is for.
pub struct RingDriver<R: IoRing, A> {
    /// The ring.
    pub ring: R,
    /// The daemon around the loop.
    pub around: A,
    pool: BufPool,
    /// The sockets of disks, by their places.
    listeners: Vec<R::Fd>,
    tap: NbdTap<R::Fd, R::File>,
    /// The activity log's file, if there is one.
    log_file: Option<R::Fd>,
}

/// Tells the loop the time.
pub fn set_time<R: IoRing, A: Around>(owner: &mut Owner<RingDriver<R, A>>, clocks: Clocks) {
    owner.set_time(clocks);
    owner.driver().tap.set_now(clocks.now);
}

/// An operation of the loop or of its tap has ended.
pub fn completed<R: IoRing, A: Around>(
    owner: &mut Owner<RingDriver<R, A>>,
    completion: Completion<R::Fd>,
) {
    let Completion { token, result, buffer } = completion;
    match Token::from_u64(token) {
        Token::Timer(timer) => owner.due(timer),
        Token::Disk(op) => {
            let buffer = match buffer {
                Buffer::Aligned(buf) => Some(buf),
                _ => None,
            };
            owner.completed(op, result, buffer);
        }
        Token::Accept(disk) => {
            let (tap, mut sockets) = owner.driver().tap();
            tap.accepted(&mut sockets, disk, result.map(|_| buffer.into_fd()));
        }
        Token::Receive(id) => {
            let (tap, mut sockets) = owner.driver().tap();
            tap.received(&mut sockets, id, result, buffer.into_aligned());
        }
        Token::Send(id) => owner.driver().tap.sent(id, result, buffer.into_many()),
        Token::Clients => {
            let (tap, mut sockets) = owner.driver().tap();
            tap.look(&mut sockets);
        }
        Token::Wake => unreachable!("the thread's"),
    }
    take_requests(owner);
}

/// The loop does what follows from all that it was told, and answers leave.
pub fn turn<R: IoRing, A: Around>(owner: &mut Owner<RingDriver<R, A>>) -> io::Result<()> {
    owner.turn()?;
    owner.driver().send_replies();
    // A connection may have had room for more requests.
    while take_requests(owner) && !owner.has_ended() {
        owner.turn()?;
        owner.driver().send_replies();
    }
    Ok(())
}

/// The loop has ended, or is to: clients' connections are closed.
pub fn end<R: IoRing, A: Around>(owner: &mut Owner<RingDriver<R, A>>) {
    let (tap, mut sockets) = owner.driver().tap();
    tap.hang_up_all(&mut sockets);
}

/// Returns whether there were any.
fn take_requests<R: IoRing, A: Around>(owner: &mut Owner<RingDriver<R, A>>) -> bool {
    let mut asked = std::mem::take(owner.driver().tap.asked());
    let any = !asked.is_empty();
    for request in asked.drain(..) {
        let RingDriver { around, tap, .. } = owner.driver();
        around.observe_request(&request, || tap.origin(request.id));
        owner.ask(request);
    }
    // Its memory is used again.
    *owner.driver().tap.asked() = asked;
    any
}

impl<R: IoRing, A: Around> RingDriver<R, A> {
    /// The driver of a loop whose clients come to these sockets, in the order of the tap's disks.
    pub fn new(
        ring: R,
        around: A,
        pool: BufPool,
        listeners: Vec<R::Fd>,
        tap: NbdTap<R::Fd, R::File>,
        log_file: Option<R::Fd>,
    ) -> Self {
        Self { ring, around, pool, listeners, tap, log_file }
    }

    fn tap(&mut self) -> (&mut NbdTap<R::Fd, R::File>, Sockets<'_, R>) {
        (&mut self.tap, Sockets { ring: &mut self.ring, listeners: &self.listeners })
    }

    fn send_replies(&mut self) {
        let (tap, mut sockets) = self.tap();
        tap.send_replies(&mut sockets);
    }
}

impl<R: IoRing, A: Around> Driver for RingDriver<R, A> {
    type File = R::File;

    fn read(&mut self, op: DiskOp, file: &R::File, buf: AlignedBuf, range: Range<usize>, at: u64) {
        self.ring.read(Token::Disk(op).to_u64(), R::fd(file), buf, range, at);
    }

    fn write(&mut self, op: DiskOp, file: &R::File, data: Bytes, at: u64, how: Durability) {
        let how = if tidelock_planted::is(Bug::FuaForgotten) { Durability::Cached } else { how };
        self.ring.write(Token::Disk(op).to_u64(), R::fd(file), data, at, how);
    }

    fn zero(&mut self, op: DiskOp, file: &R::File, mode: FallocateMode, range: Range<u64>) {
        self.ring.zero(Token::Disk(op).to_u64(), R::fd(file), mode, range);
    }

    fn sync(&mut self, op: DiskOp, file: &R::File) {
        self.ring.sync(Token::Disk(op).to_u64(), R::fd(file));
    }

    fn write_log(&mut self, block: &[u8], at: u64) {
        let file = self.log_file.as_ref().expect("a log that is on has a file");
        let data = self.pool.copy_of(block).freeze_all();
        self.ring.write(
            Token::Disk(DiskOp::LogWrite).to_u64(),
            file,
            data,
            at,
            Durability::Durable,
        );
    }

    fn touch_log(&mut self) -> io::Result<()> {
        match &self.log_file {
            Some(file) => self.ring.touch(file),
            None => Ok(()),
        }
    }

    fn remove_log(&mut self) -> io::Result<()> {
        if self.log_file.is_some() {
            self.around.remove_log()?;
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
        self.around.observe_answer(request, &answer);
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
        self.around.want_ceiling();
    }

    fn observe(&mut self, action: &Action) {
        self.around.observe(action);
    }

    fn to_link(&mut self, message: ToLink) {
        self.around.to_link(message);
    }
}
