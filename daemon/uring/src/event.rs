//! Waking the owner loop from other threads.
//!
//! The pattern: another thread puts work into a queue, then calls [`EventFd::signal`]. The owner loop
//! keeps one [`Ring::wait_event`](crate::Ring::wait_event) in flight; when it completes, the loop
//! takes everything from the queue and waits again.
//!
//! Invariant: after `signal` returns, an event wait completes that was not yet reported when `signal`
//! was called. Signals between two reports are merged, and a merged one costs no system call.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use crate::ops::SharedFd;
use crate::sys::{self, retry_eintr};

#[derive(Debug)]
struct Inner {
    fd: SharedFd,
    /// The counter is (or is about to be) nonzero and no completion has reported it yet.
    signalled: AtomicBool,
}

/// A wake-up flag of the kernel (`eventfd`). A clone is another handle to the same flag.
#[derive(Clone, Debug)]
pub struct EventFd(Arc<Inner>);

impl EventFd {
    /// A flag that is not set.
    pub fn new() -> io::Result<EventFd> {
        // The descriptor must be blocking: on one that is not, io_uring completes a read with
        // EAGAIN at once instead of waiting.
        // SAFETY: no pointers are involved.
        let fd = sys::check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })?;
        // SAFETY: `fd` was just returned by the kernel and nobody else owns it.
        let fd = Arc::new(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(EventFd(Arc::new(Inner { fd, signalled: AtomicBool::new(false) })))
    }

    /// Wakes the loop that waits, or the next one that does. From any thread.
    pub fn signal(&self) -> io::Result<()> {
        self.0.signal()
    }

    pub(crate) fn fd(&self) -> &SharedFd {
        &self.0.fd
    }

    /// The owner loop is about to learn of the signals so far. Returns whether there were any.
    pub fn take(&self) -> bool {
        self.0.signalled.swap(false, Ordering::AcqRel)
    }
}

impl Inner {
    fn signal(&self) -> io::Result<()> {
        // AcqRel pairs with `take`: if the flag was already set, the loop clears it before it looks
        // at the queue, so it sees what this thread put there before.
        if self.signalled.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes, as many as are named.
        let wrote = retry_eintr(|| unsafe {
            libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len())
        });
        if let Err(error) = wrote {
            // Nobody was woken: the next signal must try again.
            self.signalled.store(false, Ordering::Release);
            return Err(error);
        }
        Ok(())
    }
}

impl Wake for Inner {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A signal fails only when so many are waiting that one more says nothing new.
        let _ = self.signal();
    }
}

/// For whoever knows a loop's wake-up and no ring.
impl From<EventFd> for Waker {
    fn from(event: EventFd) -> Self {
        event.0.into()
    }
}
