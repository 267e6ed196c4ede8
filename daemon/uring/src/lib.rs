//! Local disk and sockets through io_uring, for one owner loop.
//!
//! A protected VM has one owner loop: one thread that serves its NBD sockets, its local disks and the
//! wake-ups from other threads. This crate is what that loop stands on. It is also the only place of
//! the daemon's data path that needs `unsafe`; nothing unsafe is asked of its users.
//!
//! **Invariant.** Memory that the kernel may read or write, and file descriptors that it may use, are
//! owned by the [`Ring`] from the call that starts an operation until its completion was taken from
//! the kernel, whatever the outcome, and also when the ring is dropped in between. So no caller can
//! free, reuse or change a buffer under an operation.
//!
//! | part | purpose |
//! |---|---|
//! | [`BufPool`], [`AlignedBuf`] | memory fit for direct I/O, which goes back to its pool from any thread |
//! | [`Ring`], [`Completion`] | start operations, submit and wait with one system call, take completions |
//! | [`EventFd`] | other threads wake the loop |
//! | [`LocalFile`] | opens and locks a disk image or block device and finds out what it can do |
//!
//! The idea that operations own their buffers is that of cloud-hypervisor's `async_io` and
//! firecracker's `io_uring`. DESIGN 2 ("the way of one write") says why the buffers are shared: the
//! same memory is written to the local disk and sent to the backup.

mod align;
mod error;
mod event;
mod extents;
mod file;
mod in_use;
mod mark;
mod ops;
mod probe;
mod ring;
mod setup;
mod sys;

pub use align::{Alignment, IoMode, WhyBuffered};
pub use error::{FileError, FileErrorKind, RingError, RingErrorKind};
pub use event::EventFd;
pub use file::{FileKind, LocalFile, OpenRequest, SizeRule};
pub use ops::{
    Buffer, Completion, PollFor, SEND_BUFS_MAX, SendBufs, SharedFd, SyncKind, skip_sent,
};
pub use ring::{Completions, Ring};
pub use setup::RingMode;
/// Memory and words of operations, which loops know without a ring.
pub use tidelock_buffers::{
    AlignedBuf, BufPool, CAPACITY_MAX_BYTES, CAPACITY_MIN_BYTES, Durability, Extent, ExtentKind,
    FallocateMode, PoolUsage,
};
