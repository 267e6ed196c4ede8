//! Ground of an owner loop's driver: a ring, and the parts of the daemon around the loop.

use super::disk::OpenDisk;
use crate::nbd_tap::ConnectionId;
use bytes::Bytes;
use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::owner::driver::{DiskFile, GuestIo};
use tidelock_daemon_core::sequencer::{Action, DiskError, RequestId};
use tidelock_nbd::Cookie;
use tidelock_uring::{
    AlignedBuf, Completion, Durability, FallocateMode, LocalFile, Ring, SendBufs, SharedFd,
    SyncKind,
};

/// A ring: operations on files and sockets begin by these calls, and end in any order as completions with their token.
/// [`Ring`] is the kernel's; the simulator has another one.
pub trait IoRing {
    /// A file or a socket.
    type Fd: Clone + Debug;
    /// A protected disk.
    type File: DiskFile;

    /// The file of a disk.
    fn fd(file: &Self::File) -> &Self::Fd;

    /// Reads into this range of the buffer.
    fn read(&mut self, token: u64, fd: &Self::Fd, buf: AlignedBuf, range: Range<usize>, at: u64);
    /// Writes.
    fn write(&mut self, token: u64, fd: &Self::Fd, data: Bytes, at: u64, how: Durability);
    /// Makes a range read as zeroes.
    fn zero(&mut self, token: u64, fd: &Self::Fd, mode: FallocateMode, range: Range<u64>);
    /// Makes durable what writes had completed before.
    fn sync(&mut self, token: u64, fd: &Self::Fd);
    /// The operation on a file that was begun first: its token, and for how long it has been under way.
    fn oldest_file_op(&mut self) -> Option<(u64, Duration)>;

    /// Accepts one connection.
    fn accept(&mut self, token: u64, listener: &Self::Fd);
    /// Receives into this range of the buffer; `all`: as much as the range has, unless the stream ends before.
    fn receive(
        &mut self,
        token: u64,
        fd: &Self::Fd,
        buf: AlignedBuf,
        range: Range<usize>,
        all: bool,
    );
    /// Sends.
    fn send(&mut self, token: u64, fd: &Self::Fd, bufs: SendBufs);

    /// Ends after this time.
    fn timeout(&mut self, token: u64, after: Duration);
    /// Begins what was asked for, and waits until so many operations have ended.
    fn submit_and_wait(&mut self, min_complete: usize) -> io::Result<()>;
    /// The next operation that has ended.
    fn next_completion(&mut self) -> Option<Completion<Self::Fd>>;

    /// True if the other end of a connection has closed it. Does not wait.
    fn has_hung_up(&self, fd: &Self::Fd) -> bool;
    /// Ends a connection at once, also for a receive that is in flight.
    fn hang_up(&mut self, fd: Self::Fd);
    /// Sets the time of a file's last writing.
    fn touch(&mut self, fd: &Self::Fd) -> io::Result<()>;
}

/// The daemon around a loop.
pub trait Around {
    /// Gives a message to the link.
    fn to_link(&mut self, message: ToLink);
    /// A record waits until a later time is on record as the ceiling.
    fn want_ceiling(&mut self);
    /// Removes the activity log's file, durably.
    fn remove_log(&mut self) -> io::Result<()>;

    /// The sequencer's next action, before it is carried out. For whoever checks the loop, as is all that follows.
    fn observe(&mut self, _: &Action) {}
    /// The tap has taken a request, of this connection and with this name there.
    fn observe_request(&mut self, _: &GuestIo, _: impl FnOnce() -> (ConnectionId, Cookie)) {}
    /// The loop answers a request.
    fn observe_answer(&mut self, _: RequestId, _: &Result<Bytes, DiskError>) {}
}

impl IoRing for Ring {
    type Fd = SharedFd;
    type File = OpenDisk;

    fn fd(file: &Self::File) -> &SharedFd {
        LocalFile::fd(file)
    }

    fn read(&mut self, token: u64, fd: &SharedFd, buf: AlignedBuf, range: Range<usize>, at: u64) {
        Ring::read(self, token, fd, buf, range, at);
    }

    fn write(&mut self, token: u64, fd: &SharedFd, data: Bytes, at: u64, how: Durability) {
        Ring::write(self, token, fd, data, at, how);
    }

    fn zero(&mut self, token: u64, fd: &SharedFd, mode: FallocateMode, range: Range<u64>) {
        self.fallocate(token, fd, mode, range.start, range.end - range.start);
    }

    fn sync(&mut self, token: u64, fd: &SharedFd) {
        self.fsync(token, fd, SyncKind::Data);
    }

    fn oldest_file_op(&mut self) -> Option<(u64, Duration)> {
        Ring::oldest_file_op(self)
    }

    fn accept(&mut self, token: u64, listener: &SharedFd) {
        Ring::accept(self, token, listener);
    }

    fn receive(
        &mut self,
        token: u64,
        fd: &SharedFd,
        buf: AlignedBuf,
        range: Range<usize>,
        all: bool,
    ) {
        match all {
            true => self.recv_full(token, fd, buf, range),
            false => self.recv(token, fd, buf, range),
        }
    }

    fn send(&mut self, token: u64, fd: &SharedFd, bufs: SendBufs) {
        Ring::send(self, token, fd, bufs);
    }

    fn timeout(&mut self, token: u64, after: Duration) {
        Ring::timeout(self, token, after);
    }

    fn submit_and_wait(&mut self, min_complete: usize) -> io::Result<()> {
        Ring::submit_and_wait(self, min_complete)
    }

    fn next_completion(&mut self) -> Option<Completion> {
        Ring::next_completion(self)
    }

    fn has_hung_up(&self, fd: &SharedFd) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(fd, PollFlags::RDHUP)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let hung_up = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(hung_up)
    }

    fn hang_up(&mut self, fd: SharedFd) {
        // A socket that the client has already closed is as good.
        let _ = rustix::net::shutdown(&*fd, rustix::net::Shutdown::Both);
    }

    fn touch(&mut self, fd: &SharedFd) -> io::Result<()> {
        use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
        let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let times =
            Timestamps { last_access: time(UTIME_OMIT), last_modification: time(UTIME_NOW) };
        Ok(rustix::fs::futimens(fd, &times)?)
    }
}
