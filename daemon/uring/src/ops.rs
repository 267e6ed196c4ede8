//! What an operation holds while the kernel works on it, and what its completion gives back.
//!
//! Invariant: everything that an SQE points to is owned by its `Op`, at an address that does not
//! change when the `Op` moves: block memory, the heap behind a `Bytes`, or a [`HeapCell`].

#![allow(unsafe_code)]

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use io_uring::types::Timespec;
use smallvec::SmallVec;
use tidelock_buffers::{AlignedBuf, FallocateMode};

use crate::event::EventFd;

/// A descriptor that an operation keeps open while it is in flight.
///
/// Sockets must be in blocking mode (as `accept` returns them): on a non-blocking one, io_uring
/// completes with `WouldBlock` at once instead of waiting. The thread never blocks in either case.
pub type SharedFd = Arc<OwnedFd>;

/// The parts of one send, in order. A reply header and its payload fit without an allocation.
pub type SendBufs = SmallVec<[Bytes; 2]>;

/// One send takes this many parts at most (the kernel's `UIO_MAXIOV`); the rest is not sent, and
/// the completion's count says so.
pub const SEND_BUFS_MAX: usize = 1024;

/// The kernel cuts a larger transfer to this length (its `MAX_RW_COUNT` for 4 KiB pages).
pub(crate) const TRANSFER_MAX_BYTES: usize = 0x7fff_f000;

/// Removes from the front what was sent, so that the rest can be sent next.
///
/// # Panics
/// If there is less than `sent` bytes.
pub fn skip_sent(bufs: &mut SendBufs, mut sent: usize) {
    let mut whole = 0;
    for buf in bufs.iter_mut() {
        if sent < buf.len() {
            buf.advance(sent);
            sent = 0;
            break;
        }
        sent -= buf.len();
        whole += 1;
    }
    assert_eq!(sent, 0, "more was sent than there was");
    bufs.drain(..whole);
}

/// What a sync covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncKind {
    /// The data and what is needed to find it (`fdatasync`).
    Data,
    /// Also times and other metadata (`fsync`).
    All,
}

/// The mode of `fallocate`.
pub(crate) fn raw_mode(mode: FallocateMode) -> i32 {
    match mode {
        FallocateMode::PunchHole => libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
        FallocateMode::ZeroRange => libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE,
        FallocateMode::Allocate => 0,
    }
}

/// The address of `range`, for an operation that owns this buffer.
///
/// # Panics
/// If the range reaches beyond the capacity: the kernel must never be given such a range.
pub(crate) fn range_for_kernel(buf: &mut AlignedBuf, range: &Range<usize>) -> (*mut u8, u32) {
    let slice = &mut buf.whole_mut()[range.clone()];
    let len = slice.len() as u32; // capacities are far below 4 GiB
    (slice.as_mut_ptr(), len)
}

/// What to wait for on a descriptor. Errors and hang-ups always end the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollFor {
    /// Something can be read.
    Readable,
    /// Something can be written.
    Writable,
}

/// Value that comes back with a completion, whatever the result. `F`: a descriptor.
#[derive(Debug)]
pub enum Buffer<F = SharedFd> {
    /// The operation held no buffer.
    None,
    /// The buffer of a read or receive; its length covers what arrived.
    Aligned(AlignedBuf),
    /// The data of a write.
    Bytes(Bytes),
    /// The parts of a send, as they were given.
    Many(SendBufs),
    /// The connection that was accepted.
    Fd(F),
}

impl<F: Debug> Buffer<F> {
    /// The buffer of a read or receive.
    ///
    /// # Panics
    /// If the completion is that of something else.
    pub fn into_aligned(self) -> AlignedBuf {
        match self {
            Buffer::Aligned(buf) => buf,
            other => panic!("expected the buffer of a read, got {other:?}"),
        }
    }

    /// The data of a write.
    ///
    /// # Panics
    /// If the completion is that of something else.
    pub fn into_bytes(self) -> Bytes {
        match self {
            Buffer::Bytes(bytes) => bytes,
            other => panic!("expected the data of a write, got {other:?}"),
        }
    }

    /// The parts of a send.
    ///
    /// # Panics
    /// If the completion is that of something else.
    pub fn into_many(self) -> SendBufs {
        match self {
            Buffer::Many(bufs) => bufs,
            other => panic!("expected the parts of a send, got {other:?}"),
        }
    }

    /// The accepted connection; `None` if there is none (the accept failed).
    pub fn into_fd(self) -> Option<F> {
        match self {
            Buffer::Fd(fd) => Some(fd),
            _ => None,
        }
    }
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion<F = SharedFd> {
    /// What the caller named the operation.
    pub token: u64,
    /// Bytes moved for reads, writes, receives and sends, which may be fewer than asked for; the
    /// ready bits for a poll; otherwise 0. `ECANCELED` after a cancel.
    pub result: io::Result<u32>,
    /// What the operation held.
    pub buffer: Buffer<F>,
}

/// A heap value whose address stays valid for the kernel when its owner moves.
///
/// A `Box` would do in practice, but moving one formally invalidates pointers derived before.
pub(crate) struct HeapCell<T>(NonNull<T>);

impl<T> HeapCell<T> {
    pub(crate) fn new(value: T) -> Self {
        HeapCell(NonNull::from(Box::leak(Box::new(value))))
    }

    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for HeapCell<T> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a Box, is owned by `self` alone, and the operation that used
        // it has completed, because the ring keeps it until then.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// What `sendmsg` reads: the message header and the vector it points to.
pub(crate) struct SendHeader {
    header: libc::msghdr,
    parts: Vec<libc::iovec>,
}

impl SendHeader {
    pub(crate) fn new() -> HeapCell<SendHeader> {
        // SAFETY: `msghdr` is plain data, for which all zeroes are valid.
        let header = unsafe { std::mem::zeroed() };
        HeapCell::new(SendHeader { header, parts: Vec::new() })
    }
}

impl HeapCell<SendHeader> {
    /// Points the header at `bufs` and returns its address.
    pub(crate) fn point_at(&mut self, bufs: &SendBufs) -> *const libc::msghdr {
        // SAFETY: the cell is alive and `&mut self` makes this the only access: no operation uses
        // the header, or it would be inside the operation.
        let this = unsafe { &mut *self.as_ptr() };
        this.parts.clear();
        this.parts.extend(bufs.iter().take(SEND_BUFS_MAX).map(|buf| libc::iovec {
            iov_base: buf.as_ptr().cast_mut().cast(), // sendmsg only reads
            iov_len: buf.len(),
        }));
        this.header.msg_iov = this.parts.as_mut_ptr();
        this.header.msg_iovlen = this.parts.len() as _;
        &raw const this.header
    }
}

/// What the kernel may touch on behalf of an operation.
pub(crate) enum Held {
    /// Nothing but the descriptor.
    Nothing,
    /// A read or receive into `range`.
    Into { buf: AlignedBuf, range: Range<usize> },
    /// A write.
    From(Bytes),
    /// A send, with a header if there are several parts.
    Send { bufs: SendBufs, header: Option<HeapCell<SendHeader>> },
    /// An accept: the result is a descriptor that must not be lost.
    Accept,
    /// A read of an event counter.
    Event { event: EventFd, _counter: HeapCell<u64> },
    /// A timeout: its expiry is its success.
    Timeout { _after: HeapCell<Timespec> },
}

/// One operation in flight.
pub(crate) struct Op {
    pub(crate) token: u64,
    /// Kept open until the operation is over.
    pub(crate) _fd: Option<SharedFd>,
    pub(crate) held: Held,
}

impl Op {
    /// Turns the kernel's answer into a completion. A send header comes back for the next send.
    pub(crate) fn complete(self, raw: i32) -> (Completion, Option<HeapCell<SendHeader>>) {
        let mut result = match raw {
            0.. => Ok(raw as u32),
            error => Err(io::Error::from_raw_os_error(-error)),
        };
        let mut spare_header = None;
        let buffer = match self.held {
            Held::Nothing => Buffer::None,
            Held::Into { mut buf, range } => {
                if let Ok(count) = result {
                    buf.set_len(range.start + count as usize);
                }
                Buffer::Aligned(buf)
            }
            Held::From(bytes) => Buffer::Bytes(bytes),
            Held::Send { bufs, header } => {
                spare_header = header;
                Buffer::Many(bufs)
            }
            Held::Accept => match result {
                Ok(fd) => {
                    result = Ok(0);
                    // SAFETY: a successful accept returns a new descriptor, reported only here.
                    Buffer::Fd(Arc::new(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
                }
                Err(_) => Buffer::None,
            },
            Held::Event { event, .. } => {
                if result.is_ok() {
                    event.take();
                    result = Ok(0);
                }
                Buffer::None
            }
            Held::Timeout { .. } => {
                if raw == -libc::ETIME {
                    result = Ok(0);
                }
                Buffer::None
            }
        };
        (Completion { token: self.token, result, buffer }, spare_header)
    }

    /// The event that this operation waits for, so that a wake-up is not lost with a dropped ring.
    pub(crate) fn event(&self) -> Option<EventFd> {
        match &self.held {
            Held::Event { event, .. } => Some(event.clone()),
            _ => None,
        }
    }
}
