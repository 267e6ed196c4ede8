//! The ring: starts operations, submits and waits with one system call, hands out completions.
//!
//! Invariants:
//! - An operation's `Op` stays in `slots` from before the kernel can see its SQE until its CQE was
//!   taken. Every operation here has exactly one CQE.
//! - `user_data` names a slot and the slot's generation, so a stale CQE cannot be mistaken.
//! - No completion is lost: the kernel keeps what does not fit into the completion queue
//!   (`IORING_FEAT_NODROP`, required at setup) and each wait fetches it.
//! - SQEs that do not fit go to `backlog`, in order. It is bounded by the operations in flight,
//!   which their callers bound; see [`Ring::in_flight`].

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use bytes::Bytes;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, opcode};

use crate::error::RingError;
use crate::event::EventFd;
use crate::ops::{
    Completion, HeapCell, Held, Op, PollFor, SendBufs, SendHeader, SharedFd, SyncKind,
    TRANSFER_MAX_BYTES, range_for_kernel, raw_mode,
};
use crate::setup::{self, RingMode};
use tidelock_buffers::{AlignedBuf, Durability, FallocateMode};

/// `user_data` of the ring's own cancel requests, whose completions nobody waits for.
const INTERNAL: u64 = u64::MAX;

/// How long a dropped ring waits for operations that it has cancelled. Sockets, events and timeouts
/// end at once; a disk request ends when the disk answers.
const DROP_WAIT_MAX: Duration = Duration::from_secs(10);
/// How often a dropped ring repeats its cancel requests.
const DROP_CANCEL_EVERY: Duration = Duration::from_millis(50);

/// Operations that have ended may be so many more in the list by age, before they are dropped from it.
const FILE_OPS_SPARE: usize = 64;

/// Send headers kept for the next sends.
const SPARE_HEADERS_MAX: usize = 64;

struct Slot {
    /// Counts the slot's users.
    generation: u32,
    op: Option<Op>,
}

/// An io_uring instance that belongs to the thread that made it.
///
/// Operations take a `token` that comes back with the [`Completion`]; tokens may repeat. An
/// operation is submitted by the next [`submit_and_wait`](Ring::submit_and_wait), or before, when
/// the queue is full. Operations in flight may complete in any order: whoever needs an order waits.
///
/// # Dropping
/// Dropping the ring cancels what is in flight and waits for it, because the kernel may write into
/// the buffers until then. What the kernel does not give back within ten seconds (a disk that
/// hangs) is leaked instead: memory that the kernel may still write to must never be reused, and a
/// daemon that is asked to stop must stop.
///
/// # Threads
/// A ring stays on its thread; other threads reach it through an [`EventFd`].
/// ```compile_fail
/// let ring = tidelock_uring::Ring::new(8).unwrap();
/// std::thread::spawn(move || drop(ring)); // `Ring` is not `Send`
/// ```
pub struct Ring {
    uring: IoUring,
    mode: RingMode,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    backlog: VecDeque<Entry>,
    /// Operations on files in the order in which they were started, with those that have ended since.
    file_ops: VecDeque<(u64, Instant)>,
    /// When the kernel was left last.
    left_kernel_at: Instant,
    spare_headers: Vec<HeapCell<SendHeader>>,
    /// A ring set up for a single issuer serves only the thread that made it.
    _not_send: PhantomData<*const ()>,
}

impl Ring {
    /// A ring whose submission queue holds `entries` (rounded up to a power of two), in the best
    /// mode that the kernel has.
    pub fn new(entries: u32) -> Result<Ring, RingError> {
        Ring::with_mode(entries, RingMode::Deferred)
    }

    /// Like [`new`](Ring::new), but in no better mode than `best`. For tests of the older modes.
    pub fn with_mode(entries: u32, best: RingMode) -> Result<Ring, RingError> {
        let (uring, mode) = setup::set_up(entries.max(1), best)?;
        Ok(Ring {
            uring,
            mode,
            slots: Vec::with_capacity(entries as usize),
            vacant: Vec::new(),
            backlog: VecDeque::new(),
            file_ops: VecDeque::new(),
            left_kernel_at: Instant::now(),
            spare_headers: Vec::new(),
            _not_send: PhantomData,
        })
    }

    /// The mode in use, for status and logs.
    pub fn mode(&self) -> RingMode {
        self.mode
    }

    /// Operations that were started and whose completion was not taken yet.
    ///
    /// The ring sets no limit of its own: a caller bounds its operations, as it bounds the buffers
    /// that they hold.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Of the reads, writes, syncs and allocations in flight that which was started first: its token, and for how long
    /// it was in flight when the kernel was left last. No clock is read for it.
    pub fn oldest_file_op(&mut self) -> Option<(u64, Duration)> {
        while let Some((user_data, since)) = self.file_ops.front().copied() {
            if let Some(op) = self.op(user_data) {
                return Some((op.token, self.left_kernel_at.duration_since(since)));
            }
            self.file_ops.pop_front();
        }
        None
    }

    /// How many operations fit into one submission.
    pub fn entries(&self) -> usize {
        self.uring.params().sq_entries() as usize
    }

    /// Reads from `offset` of the file into `range` of the buffer, and sets the buffer's length to
    /// the end of what was read. For the rest of a short read, read again with a smaller range.
    ///
    /// # Panics
    /// If `range` reaches beyond the buffer's capacity, or `offset` beyond `i64::MAX`.
    pub fn read(
        &mut self,
        token: u64,
        fd: &SharedFd,
        mut buf: AlignedBuf,
        range: Range<usize>,
        offset: u64,
    ) {
        let (ptr, len) = range_for_kernel(&mut buf, &range);
        let sqe = opcode::Read::new(raw(fd), ptr, len).offset(file_offset(offset)).build();
        self.start_on_file(sqe, token, fd, Held::Into { buf, range });
    }

    /// Writes `data` at `offset` of the file. For the rest of a short write, write again.
    ///
    /// # Panics
    /// If `offset` exceeds `i64::MAX`.
    pub fn write(
        &mut self,
        token: u64,
        fd: &SharedFd,
        data: Bytes,
        offset: u64,
        durability: Durability,
    ) {
        let len = data.len().min(TRANSFER_MAX_BYTES) as u32;
        let flags = match durability {
            Durability::Cached => 0,
            Durability::Durable => libc::RWF_DSYNC,
        };
        let sqe = opcode::Write::new(raw(fd), data.as_ptr(), len)
            .offset(file_offset(offset))
            .rw_flags(flags)
            .build();
        self.start_on_file(sqe, token, fd, Held::From(data));
    }

    /// Makes durable what writes had completed **before this call**. A write in flight may or may
    /// not be covered.
    pub fn fsync(&mut self, token: u64, fd: &SharedFd, kind: SyncKind) {
        let flags = match kind {
            SyncKind::Data => FsyncFlags::DATASYNC,
            SyncKind::All => FsyncFlags::empty(),
        };
        let sqe = opcode::Fsync::new(raw(fd)).flags(flags).build();
        self.start_on_file(sqe, token, fd, Held::Nothing);
    }

    /// Zeroes, frees or allocates a range of the file.
    ///
    /// # Panics
    /// If `offset` exceeds `i64::MAX`.
    pub fn fallocate(
        &mut self,
        token: u64,
        fd: &SharedFd,
        mode: FallocateMode,
        offset: u64,
        len: u64,
    ) {
        let sqe = opcode::Fallocate::new(raw(fd), len)
            .offset(file_offset(offset))
            .mode(raw_mode(mode))
            .build();
        self.start_on_file(sqe, token, fd, Held::Nothing);
    }

    /// Receives what is there, at least one byte, into `range` of the buffer, and sets the buffer's
    /// length to the end of what arrived. `buf.len()..buf.capacity()` appends. A result of 0 is the
    /// end of the stream (or an empty range).
    ///
    /// # Panics
    /// If `range` reaches beyond the buffer's capacity.
    pub fn recv(&mut self, token: u64, fd: &SharedFd, buf: AlignedBuf, range: Range<usize>) {
        self.start_recv(token, fd, buf, range, 0);
    }

    /// Like [`recv`](Ring::recv), but waits until the range is full, so that a large payload needs
    /// one completion. It can still come short: at the end of the stream, at an error after some
    /// bytes, when cancelled, and on kernels before 5.19 at any time.
    ///
    /// # Panics
    /// If `range` reaches beyond the buffer's capacity.
    pub fn recv_full(&mut self, token: u64, fd: &SharedFd, buf: AlignedBuf, range: Range<usize>) {
        self.start_recv(token, fd, buf, range, libc::MSG_WAITALL);
    }

    fn start_recv(
        &mut self,
        token: u64,
        fd: &SharedFd,
        mut buf: AlignedBuf,
        range: Range<usize>,
        flags: i32,
    ) {
        let (ptr, len) = range_for_kernel(&mut buf, &range);
        let sqe = opcode::Recv::new(raw(fd), ptr, len).flags(flags).build();
        self.start(sqe, token, Some(fd), Held::Into { buf, range });
    }

    /// Sends the parts in order, and waits until the socket took them all. It can still come short:
    /// at an error after some bytes, when cancelled, with more than
    /// [`SEND_BUFS_MAX`](crate::SEND_BUFS_MAX) parts, and on kernels before 5.19 at any time. The
    /// rest is then sent with [`skip_sent`](crate::skip_sent). Sends on one socket must not overlap
    /// in time, or their bytes mix. A peer that is gone is `BrokenPipe`, never a signal.
    pub fn send(&mut self, token: u64, fd: &SharedFd, bufs: impl Into<SendBufs>) {
        let bufs = bufs.into();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        if let [one] = bufs.as_slice() {
            let len = one.len().min(TRANSFER_MAX_BYTES) as u32;
            let sqe = opcode::Send::new(raw(fd), one.as_ptr(), len).flags(flags).build();
            self.start(sqe, token, Some(fd), Held::Send { bufs, header: None });
            return;
        }
        let mut header = self.spare_headers.pop().unwrap_or_else(SendHeader::new);
        let msg = header.point_at(&bufs);
        let sqe = opcode::SendMsg::new(raw(fd), msg).flags(flags as u32).build();
        self.start(sqe, token, Some(fd), Held::Send { bufs, header: Some(header) });
    }

    /// Accepts one connection on a listening socket. It comes as [`Buffer::Fd`](crate::Buffer::Fd).
    pub fn accept(&mut self, token: u64, listener: &SharedFd) {
        let sqe = opcode::Accept::new(raw(listener), std::ptr::null_mut(), std::ptr::null_mut())
            .flags(libc::SOCK_CLOEXEC)
            .build();
        self.start(sqe, token, Some(listener), Held::Accept);
    }

    /// Waits until the descriptor is ready. The result has the `poll(2)` bits.
    pub fn poll(&mut self, token: u64, fd: &SharedFd, what: PollFor) {
        let events = match what {
            PollFor::Readable => libc::POLLIN,
            PollFor::Writable => libc::POLLOUT,
        };
        let sqe = opcode::PollAdd::new(raw(fd), events as u32).build();
        self.start(sqe, token, Some(fd), Held::Nothing);
    }

    /// Waits until the event is signalled. One completion may stand for many signals; look at
    /// everything that a signal may have meant, and wait again.
    pub fn wait_event(&mut self, token: u64, event: &EventFd) {
        let counter = HeapCell::new(0u64);
        let sqe = opcode::Read::new(raw(event.fd()), counter.as_ptr().cast(), 8).build();
        let held = Held::Event { event: event.clone(), _counter: counter };
        self.start(sqe, token, Some(event.fd()), held);
    }

    /// Completes with 0 after `after`.
    pub fn timeout(&mut self, token: u64, after: Duration) {
        let timespec = HeapCell::new(Timespec::from(after));
        let sqe = opcode::Timeout::new(timespec.as_ptr()).build();
        self.start(sqe, token, None, Held::Timeout { _after: timespec });
    }

    /// Asks the kernel to end every operation in flight that has this token, and returns how many
    /// those are. Each still completes by itself: with `ECANCELED`, with the bytes that were
    /// already moved, or normally when it was too late. Disk requests usually run to their end.
    ///
    /// This looks at every operation in flight: it is for rare events.
    pub fn cancel(&mut self, token: u64) -> usize {
        self.cancel_where(|op| op.token == token)
    }

    fn cancel_where(&mut self, choose: impl Fn(&Op) -> bool) -> usize {
        let chosen: Vec<u64> = (0u32..)
            .zip(&self.slots)
            .filter(|(_, slot)| slot.op.as_ref().is_some_and(&choose))
            .map(|(index, slot)| user_data(index, slot.generation))
            .collect();
        for target in &chosen {
            self.push(opcode::AsyncCancel::new(*target).build().user_data(INTERNAL));
        }
        chosen.len()
    }

    /// Submits what was started, and waits until `min_complete` operations are complete (fewer, if
    /// fewer are in flight). With 0 it does not wait. One system call.
    ///
    /// May return early, with less to take than was asked for: look at what is there, and call again.
    pub fn submit_and_wait(&mut self, min_complete: usize) -> io::Result<()> {
        self.enter(min_complete, None)
    }

    /// Like [`submit_and_wait`](Ring::submit_and_wait), for no longer than `wait_max`. That time
    /// passes is not an error.
    pub fn submit_and_wait_for(
        &mut self,
        min_complete: usize,
        wait_max: Duration,
    ) -> io::Result<()> {
        self.enter(min_complete, Some(wait_max))
    }

    /// The next completion that is there. Does not enter the kernel.
    pub fn next_completion(&mut self) -> Option<Completion> {
        let (op, raw_result) = self.next_ended()?;
        let (completion, header) = op.complete(raw_result);
        if let Some(header) = header
            && self.spare_headers.len() < SPARE_HEADERS_MAX
        {
            self.spare_headers.push(header);
        }
        Some(completion)
    }

    /// Takes the completions that are there. To start operations while going through them, use
    /// `while let Some(completion) = ring.next_completion()`.
    pub fn completions(&mut self) -> Completions<'_> {
        Completions { ring: self }
    }

    fn start_on_file(&mut self, sqe: Entry, token: u64, fd: &SharedFd, held: Held) {
        let user_data = self.start(sqe, token, Some(fd), held);
        if self.file_ops.len() > 2 * self.in_flight() + FILE_OPS_SPARE {
            let mut file_ops = std::mem::take(&mut self.file_ops);
            file_ops.retain(|(user_data, _)| self.op(*user_data).is_some());
            self.file_ops = file_ops;
        }
        self.file_ops.push_back((user_data, self.left_kernel_at));
    }

    /// The operation in flight that has this `user_data`.
    fn op(&self, user_data: u64) -> Option<&Op> {
        let slot = self.slots.get(user_data as u32 as usize)?;
        slot.op.as_ref().filter(|_| slot.generation == (user_data >> 32) as u32)
    }

    /// Returns its `user_data`.
    fn start(&mut self, sqe: Entry, token: u64, fd: Option<&SharedFd>, held: Held) -> u64 {
        let op = Op { token, _fd: fd.cloned(), held };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.slots[index as usize].op = Some(op);
                index
            }
            None => {
                let index = u32::try_from(self.slots.len()).expect("fewer than 2^32 operations");
                self.slots.push(Slot { generation: 0, op: Some(op) });
                index
            }
        };
        let user_data = user_data(index, self.slots[index as usize].generation);
        self.push(sqe.user_data(user_data));
        user_data
    }

    /// The next operation that has ended, and the kernel's answer.
    fn next_ended(&mut self) -> Option<(Op, i32)> {
        loop {
            let cqe = self.uring.completion().next()?;
            if cqe.user_data() == INTERNAL {
                continue;
            }
            let (index, generation) = (cqe.user_data() as u32, (cqe.user_data() >> 32) as u32);
            let slot = &mut self.slots[index as usize];
            assert_eq!(slot.generation, generation, "a completion came twice");
            let op = slot.op.take().expect("a completion belongs to an operation");
            slot.generation = slot.generation.wrapping_add(1);
            self.vacant.push(index);
            return Some((op, cqe.result()));
        }
    }

    /// Queues an SQE whose memory is already in `slots`. A full queue is handed to the kernel.
    fn push(&mut self, sqe: Entry) {
        if self.backlog.is_empty() {
            if self.push_to_queue(&sqe) {
                return;
            }
            // A refusal (the completion queue is full, no memory) comes again, and is reported,
            // in the next wait.
            let submitted = self.enter_once(0, EnterFlags::empty(), None);
            if submitted.is_ok() && self.push_to_queue(&sqe) {
                return;
            }
        }
        self.backlog.push_back(sqe);
    }

    fn push_to_queue(&mut self, sqe: &Entry) -> bool {
        // SAFETY: everything the entry points to is owned by an `Op` in `slots`, at a stable
        // address, until its completion was taken (see the module's invariants). Requests of the
        // ring itself (cancel) point to nothing.
        unsafe { self.uring.submission().push(sqe) }.is_ok()
    }

    fn enter(&mut self, min_complete: usize, wait_max: Option<Duration>) -> io::Result<()> {
        // Waiting for more than can ever complete would not end.
        let min_complete = min_complete.min(self.in_flight());
        loop {
            while let Some(sqe) = self.backlog.pop_front() {
                if !self.push_to_queue(&sqe) {
                    self.backlog.push_front(sqe);
                    break;
                }
            }
            let want = if self.backlog.is_empty() { min_complete } else { 0 };
            // GETEVENTS also without waiting: deferred work and overflown completions are only
            // delivered by it.
            let entered = self.enter_once(want, EnterFlags::GETEVENTS, wait_max);
            self.left_kernel_at = Instant::now();
            let submitted = match entered {
                Ok(submitted) => submitted,
                Err(error) => {
                    return match error.raw_os_error() {
                        // A signal, or the time is over.
                        Some(libc::EINTR | libc::ETIME) => Ok(()),
                        // The kernel takes nothing more before some completions are taken.
                        Some(libc::EBUSY | libc::EAGAIN) if !self.uring.completion().is_empty() => {
                            Ok(())
                        }
                        _ => Err(error),
                    };
                }
            };
            if self.backlog.is_empty() || submitted == 0 {
                return Ok(());
            }
        }
    }

    fn enter_once(
        &mut self,
        want: usize,
        flags: EnterFlags,
        wait_max: Option<Duration>,
    ) -> io::Result<usize> {
        let to_submit = self.uring.submission().len() as u32;
        let submitter = self.uring.submitter();
        match wait_max {
            Some(wait_max) => {
                let timespec = Timespec::from(wait_max);
                let args = SubmitArgs::new().timespec(&timespec);
                let flags = flags | EnterFlags::EXT_ARG;
                // SAFETY: EXT_ARG announces exactly this argument type, which outlives the call.
                unsafe { submitter.enter(to_submit, want as u32, flags.bits(), Some(&args)) }
            }
            // SAFETY: without EXT_ARG the argument is a signal mask, and none is given.
            None => unsafe {
                submitter.enter::<libc::sigset_t>(to_submit, want as u32, flags.bits(), None)
            },
        }
    }

    /// Ends what is in flight; `false` if some of it is still with the kernel.
    fn wind_down(&mut self, wait_max: Duration) -> bool {
        let deadline = Instant::now() + wait_max;
        let mut lost_events = Vec::new();
        while self.in_flight() > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            // Repeated: a request can slip past a cancel while it moves between kernel queues.
            self.cancel_where(|_| true);
            let asked = self.submit_and_wait(0);
            self.discard_completions(&mut lost_events);
            // The completions of the cancel requests are out of the way; now wait for the others.
            let waited = self.submit_and_wait_for(self.in_flight(), DROP_CANCEL_EVERY);
            self.discard_completions(&mut lost_events);
            if asked.and(waited).is_err() {
                std::thread::sleep(DROP_CANCEL_EVERY); // the kernel lacks resources: do not spin
            }
        }
        // A wake-up that this ring took and nobody saw is passed on to the event's next waiter.
        for event in lost_events {
            let _ = event.signal(); // there is nobody left to tell; the counter cannot be full
        }
        true
    }

    /// Never frees what the kernel may still use.
    fn leak_what_is_in_flight(&mut self) {
        std::mem::forget(std::mem::take(&mut self.slots));
        self.vacant.clear();
    }

    /// Takes what completed while the ring is being dropped.
    fn discard_completions(&mut self, lost_events: &mut Vec<EventFd>) {
        while let Some((op, raw_result)) = self.next_ended() {
            let event = op.event();
            let (completion, _) = op.complete(raw_result);
            if let (Some(event), Ok(_)) = (event, completion.result) {
                lost_events.push(event);
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.in_flight() > 0 && !self.wind_down(DROP_WAIT_MAX) {
            self.leak_what_is_in_flight();
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("mode", &self.mode)
            .field("entries", &self.entries())
            .field("in_flight", &self.in_flight())
            .finish()
    }
}

/// Takes completions that are there; see [`Ring::completions`].
#[derive(Debug)]
pub struct Completions<'a> {
    ring: &'a mut Ring,
}

impl Iterator for Completions<'_> {
    type Item = Completion;

    fn next(&mut self) -> Option<Completion> {
        self.ring.next_completion()
    }
}

fn user_data(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

fn raw(fd: &SharedFd) -> Fd {
    Fd(fd.as_raw_fd())
}

/// Kernel file offsets are signed, and -1 would mean "the file position".
fn file_offset(offset: u64) -> u64 {
    assert!(i64::try_from(offset).is_ok(), "file offset {offset} is out of range");
    offset
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;
    use tidelock_buffers::BufPool;

    /// What drop does with an operation that the kernel does not end: here the time is up at once.
    #[test]
    fn what_the_kernel_does_not_give_back_is_leaked() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let fd: SharedFd = Arc::new(OwnedFd::from(ours));
        let pool = BufPool::new(0);
        let mut ring = Ring::new(8).unwrap();
        ring.recv(1, &fd, pool.get(1), 0..1);
        ring.submit_and_wait(0).unwrap();
        assert!(!ring.wind_down(Duration::ZERO));
        ring.leak_what_is_in_flight();
        drop(ring);
        assert_eq!(pool.usage().in_use_bytes, 4096, "the memory is not used for anything else");
        assert_eq!(Arc::strong_count(&fd), 2, "nor is the descriptor's number");
        // What the kernel may still do now, it does to memory that nobody else has.
        let _ = std::io::Write::write_all(&mut theirs, b"late");
    }
}
