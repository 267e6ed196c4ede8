//! The few system calls that the gate needs and the standard library lacks. The only unsafe code
//! of this crate; everything outside is safe over owned file descriptors and slices.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use tidelock_protocol::ids::MonoNanos;

/// Turns the -1 of a system call into its error.
fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    let fd: RawFd = checked(result)?;
    // SAFETY: the system call has just returned this descriptor to us, so it is open and nobody
    // else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn socklen(bytes: usize) -> libc::socklen_t {
    libc::socklen_t::try_from(bytes).expect("sizes of socket structures are small")
}

/// The processor's time stamp counter, where it has one.
pub(crate) fn time_stamp_counter() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every processor of this architecture has the instruction, and Linux lets every process use it unless the
        // process itself has asked for the contrary (PR_SET_TSC), which this one does not.
        Some(unsafe { core::arch::x86_64::_rdtsc() })
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Now, on the clock that leases are counted on: it never steps and counts suspended time.
#[must_use]
pub fn now() -> MonoNanos {
    let mut at = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the pointer is valid for writing one timespec.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, at.as_mut_ptr()) };
    assert_eq!(result, 0, "CLOCK_BOOTTIME exists since Linux 2.6.39");
    // SAFETY: clock_gettime succeeded, so it has filled `at`.
    let at = unsafe { at.assume_init() };
    MonoNanos(at.tv_sec.unsigned_abs() * 1_000_000_000 + at.tv_nsec.unsigned_abs())
}

/// The wall clock, in milliseconds since the Unix epoch; it may step.
pub(crate) fn wall_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// Wakes an epoll loop from another thread.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(Self)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the pointer is valid for reading the 8 bytes. The one possible error, a full
        // counter, means that the loop is to wake already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    pub(crate) fn drain(&self) {
        drain_counter(&self.0);
    }
}

/// Ends an epoll wait at a time of [`now`]'s clock.
#[derive(Debug)]
pub(crate) struct TimerFd(OwnedFd);

impl TimerFd {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
        // SAFETY: no memory is passed.
        owned(unsafe { libc::timerfd_create(libc::CLOCK_BOOTTIME, flags) }).map(Self)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Rings once at `at`, or never.
    pub(crate) fn arm(&self, at: Option<MonoNanos>) -> io::Result<()> {
        // A value of 0 disarms; a time that has passed rings at once.
        let ns = at.map_or(0, |at| at.0.max(1));
        let to = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let spec = libc::itimerspec {
            it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: libc::timespec {
                tv_sec: to(ns / 1_000_000_000),
                tv_nsec: to(ns % 1_000_000_000),
            },
        };
        // SAFETY: `spec` is valid for reading, and a null old value is allowed.
        checked(unsafe {
            libc::timerfd_settime(
                self.0.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const spec,
                std::ptr::null_mut(),
            )
        })
        .map(drop)
    }

    pub(crate) fn drain(&self) {
        drain_counter(&self.0);
    }
}

fn drain_counter(fd: &OwnedFd) {
    let mut count = [0u8; 8];
    // SAFETY: the pointer is valid for writing the 8 bytes. The descriptor does not block; that
    // it had nothing to read is fine.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
}

/// Waits for several descriptors, level triggered.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Self)
    }

    /// Reports `token` when `fd` can be read. The caller keeps `fd` open while it is waited for:
    /// a closed one leaves the set by itself.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: token };
        // SAFETY: `event` is valid for reading, and both descriptors are open.
        checked(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event)
        })
        .map(drop)
    }

    /// Waits and puts the tokens of what is ready into `ready`. `timeout_ms` of -1 waits for ever.
    pub(crate) fn wait(&self, ready: &mut Vec<u64>, timeout_ms: i32) -> io::Result<()> {
        const EVENTS_MAX: usize = 32;
        ready.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        // SAFETY: the pointer is valid for writing EVENTS_MAX events.
        let count = checked(unsafe {
            libc::epoll_wait(
                self.0.as_raw_fd(),
                events.as_mut_ptr(),
                EVENTS_MAX as libc::c_int,
                timeout_ms,
            )
        });
        match count {
            Ok(count) => {
                ready.extend(events.iter().take(count.unsigned_abs() as usize).map(|e| e.u64));
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// A non-blocking netlink socket.
#[derive(Debug)]
pub(crate) struct NetlinkSocket(OwnedFd);

impl NetlinkSocket {
    /// One that speaks with a subsystem of the kernel (`NETLINK_NETFILTER`, `NETLINK_ROUTE`).
    pub(crate) fn open(subsystem: libc::c_int) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no memory is passed.
        let fd = owned(unsafe { libc::socket(libc::AF_NETLINK, kind, subsystem) })?;
        let socket = Self(fd);
        let address = kernel_address();
        // SAFETY: `address` is a valid sockaddr_nl of the length that is passed.
        checked(unsafe {
            libc::bind(
                socket.0.as_raw_fd(),
                (&raw const address).cast(),
                socklen(size_of::<libc::sockaddr_nl>()),
            )
        })?;
        // Error messages then repeat the header of what failed, not all of it.
        socket.set_option(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, 1)?;
        Ok(socket)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Also receives what the kernel tells to all of this multicast group.
    pub(crate) fn join(&self, group: libc::c_int) -> io::Result<()> {
        self.set_option(libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, group)
    }

    /// Asks for a receive buffer beyond the system's limit, or, without the privilege, up to it.
    pub(crate) fn set_receive_buffer(&self, bytes: i32) -> io::Result<()> {
        self.set_option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes)
            .or_else(|_| self.set_option(libc::SOL_SOCKET, libc::SO_RCVBUF, bytes))
    }

    fn set_option(
        &self,
        level: libc::c_int,
        name: libc::c_int,
        value: libc::c_int,
    ) -> io::Result<()> {
        // SAFETY: the pointer is valid for reading one c_int, which is the length that is passed.
        checked(unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                socklen(size_of::<libc::c_int>()),
            )
        })
        .map(drop)
    }

    /// Sends one or several netlink messages to the kernel, which acts on them before it returns.
    pub(crate) fn send(&self, messages: &[u8]) -> io::Result<()> {
        let address = kernel_address();
        loop {
            // SAFETY: `messages` is valid for reading its length, `address` is a sockaddr_nl.
            let sent = unsafe {
                libc::sendto(
                    self.0.as_raw_fd(),
                    messages.as_ptr().cast(),
                    messages.len(),
                    0,
                    (&raw const address).cast(),
                    socklen(size_of::<libc::sockaddr_nl>()),
                )
            };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives what is there, up to [`Slots::COUNT`] datagrams, without waiting. `WouldBlock` if
    /// there is nothing.
    pub(crate) fn receive(&self, slots: &mut Slots) -> io::Result<()> {
        slots.received.clear();
        let mut senders = [kernel_address(); Slots::COUNT];
        let base = slots.memory.as_mut_ptr();
        let mut vectors: [libc::iovec; Slots::COUNT] = std::array::from_fn(|slot| libc::iovec {
            // SAFETY: the memory is COUNT * bytes long, so each slot lies within it.
            iov_base: unsafe { base.add(slot * slots.bytes) }.cast(),
            iov_len: slots.bytes,
        });
        // SAFETY: all zeros is a valid mmsghdr: null pointers with length 0.
        let mut headers: [libc::mmsghdr; Slots::COUNT] = unsafe { std::mem::zeroed() };
        for ((header, vector), sender) in headers.iter_mut().zip(&mut vectors).zip(&mut senders) {
            header.msg_hdr.msg_iov = vector;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_name = (&raw mut *sender).cast();
            header.msg_hdr.msg_namelen = socklen(size_of::<libc::sockaddr_nl>());
        }
        let count = loop {
            // SAFETY: each header points to one vector and one address, each vector to a slot of
            // its own; all of them outlive the call, and nothing else refers to the slots.
            let result = unsafe {
                libc::recvmmsg(
                    self.0.as_raw_fd(),
                    headers.as_mut_ptr(),
                    Slots::COUNT as libc::c_uint,
                    libc::MSG_DONTWAIT,
                    std::ptr::null_mut(),
                )
            };
            match checked(result) {
                Ok(count) => break count.unsigned_abs() as usize,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        };
        for (header, sender) in headers[..count].iter().zip(&senders) {
            let whole = header.msg_hdr.msg_flags & libc::MSG_TRUNC == 0;
            // Only the kernel has port 0: nobody else tells us of packets.
            let from_kernel = sender.nl_pid == 0;
            let len = if whole && from_kernel { header.msg_len as usize } else { 0 };
            slots.received.push(len.min(slots.bytes));
        }
        Ok(())
    }
}

fn kernel_address() -> libc::sockaddr_nl {
    // SAFETY: all zeros is a valid sockaddr_nl; port 0 is the kernel.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address
}

/// Memory for a run of received datagrams.
pub(crate) struct Slots {
    memory: Vec<u8>,
    /// Of each.
    bytes: usize,
    received: Vec<usize>,
}

impl Slots {
    /// How many datagrams are received at once.
    pub(crate) const COUNT: usize = 64;
    /// The longest datagram of a queue: a packet's headers and what the kernel tells of it.
    pub(crate) const PACKET_BYTES: usize = 2048;

    /// For datagrams of up to so many bytes.
    pub(crate) fn of(bytes: usize) -> Self {
        Self { memory: vec![0; Self::COUNT * bytes], bytes, received: Vec::new() }
    }

    pub(crate) fn clear(&mut self) {
        self.received.clear();
    }

    /// The received datagrams in order. What was too long, or not from the kernel, is empty.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = &[u8]> + '_ {
        self.memory.chunks_exact(self.bytes).zip(&self.received).map(|(slot, len)| &slot[..*len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_is_seen_once() {
        let (epoll, event) = (Epoll::new().unwrap(), EventFd::new().unwrap());
        epoll.add(event.fd(), 7).unwrap();
        let mut ready = Vec::new();
        epoll.wait(&mut ready, 0).unwrap();
        assert!(ready.is_empty());
        event.wake();
        event.wake();
        epoll.wait(&mut ready, -1).unwrap();
        assert_eq!(ready, [7]);
        event.drain();
        epoll.wait(&mut ready, 0).unwrap();
        assert!(ready.is_empty());
    }

    #[test]
    fn a_timer_rings_at_a_time_of_our_clock() {
        let (epoll, timer) = (Epoll::new().unwrap(), TimerFd::new().unwrap());
        epoll.add(timer.fd(), 1).unwrap();
        let mut ready = Vec::new();
        let at = now().plus_ms(5);
        timer.arm(Some(at)).unwrap();
        epoll.wait(&mut ready, -1).unwrap();
        assert_eq!(ready, [1]);
        assert!(now() >= at, "it rang early");
        timer.drain();
        timer.arm(Some(MonoNanos(0))).unwrap();
        epoll.wait(&mut ready, -1).unwrap();
        assert_eq!(ready, [1], "a time long past rings at once");
        timer.drain();
        timer.arm(Some(now().plus_ms(3_600_000))).unwrap();
        timer.arm(None).unwrap();
        epoll.wait(&mut ready, 0).unwrap();
        assert!(ready.is_empty());
    }
}
