//! The kernel's packet queue (nfnetlink_queue), over a netlink socket of our own.
//!
//! Only headers are copied to user space; GSO packets come whole. The kernel never lets a packet
//! through by itself: no fail-open, so a full queue drops at its tail, and a closed socket drops
//! what was queued. Drops are counted by the kernel ([`kernel_counters`]), packets lost between
//! the kernel and us by [`Received::Overrun`].

mod wire;

use crate::packet::HEADERS_MAX_BYTES;
use crate::sys::{NetlinkSocket, Slots};
use crate::verdicts::Verdicts;
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use wire::Incoming;

/// The number of a kernel queue; the rules name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueNumber(pub u16);

impl std::fmt::Display for QueueNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The longest queue that may be asked for, in packets.
pub const QUEUE_LEN_MAX: u32 = 1 << 20;
/// The socket's buffer: some 40 000 packets between two turns of the loop.
const RECEIVE_BUFFER_BYTES: i32 = 64 << 20;
/// How long the kernel may take to answer a request.
const ANSWER_WAIT_MS: i32 = 5_000;
/// The most verdicts of one send, far below the socket's send buffer.
const SEND_MAX_BYTES: usize = 16 << 10;

const BIND: &str = "bind it";

/// What can go wrong with a kernel queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The process may not do this.
    #[error(
        "not allowed to bind packet queue {queue}: run tidelockd as root or with CAP_NET_ADMIN \
         in the network namespace of the guest's interface"
    )]
    NotAllowed {
        /// The queue.
        queue: QueueNumber,
    },
    /// The kernel has no packet queues.
    #[error(
        "the kernel has no packet queues: load the module with `modprobe nfnetlink_queue`, or use \
         a kernel with CONFIG_NETFILTER_NETLINK_QUEUE"
    )]
    Missing,
    /// Somebody else listens on it.
    #[error(
        "packet queue {queue} is in use by another process ({} shows its netlink port): stop that \
         process, or configure another queue number",
        COUNTERS_PATH
    )]
    InUse {
        /// The queue.
        queue: QueueNumber,
    },
    /// A length that the kernel would take, but we do not.
    #[error("packet queue {queue}: a length of {len} is outside 1 to {QUEUE_LEN_MAX}")]
    BadLength {
        /// The queue.
        queue: QueueNumber,
        /// The length that was asked for.
        len: u32,
    },
    /// The kernel did not answer.
    #[error("packet queue {queue}: the kernel did not answer a request to {doing}")]
    NoAnswer {
        /// The queue.
        queue: QueueNumber,
        /// What it was asked for.
        doing: &'static str,
    },
    /// Anything else.
    #[error("packet queue {queue}: cannot {doing}")]
    Io {
        /// The queue.
        queue: QueueNumber,
        /// What was tried.
        doing: &'static str,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// A packet as the kernel tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuedPacket<'a> {
    /// The kernel's number.
    pub id: crate::release_queue::PacketId,
    /// The EtherType of its network header.
    pub ethertype: u16,
    /// Its first bytes, from the network header on.
    pub head: &'a [u8],
    /// Its whole length.
    pub len_bytes: u32,
}

/// What a turn of receiving found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// Packets, and perhaps more to come.
    Some,
    /// Nothing more for now.
    Nothing,
    /// The socket's buffer was full and the kernel dropped packets.
    Overrun,
}

/// A queue of packets that wait for verdicts, in the order of their numbers.
pub trait PacketQueue {
    /// Takes up what has been queued, without waiting. [`packets`](Self::packets) has it.
    fn receive(&mut self) -> Result<Received, QueueError>;

    /// Hands over each packet of the last [`receive`](Self::receive), in the order of the queue.
    fn packets(&mut self, each: impl FnMut(QueuedPacket<'_>));

    /// Sends verdicts, in order. They are carried out when this returns.
    fn send(&mut self, verdicts: &Verdicts) -> Result<(), QueueError>;

    /// The number of verdicts that named no packet any more.
    fn refused_verdicts(&self) -> u64;

    /// The number of messages that were not understood.
    fn unread(&self) -> u64;
}

/// A bound kernel queue.
pub struct Nfqueue {
    queue: QueueNumber,
    socket: NetlinkSocket,
    slots: Slots,
    /// Datagrams that came while an answer was awaited.
    early: VecDeque<Vec<u8>>,
    outgoing: Vec<u8>,
    refused_verdicts: u64,
    unread: u64,
}

impl Nfqueue {
    /// Binds the queue: from now on its packets come here.
    pub fn bind(queue: QueueNumber, len_max: u32) -> Result<Self, QueueError> {
        if !(1..=QUEUE_LEN_MAX).contains(&len_max) {
            return Err(QueueError::BadLength { queue, len: len_max });
        }
        let socket = NetlinkSocket::open(libc::NETLINK_NETFILTER)
            .map_err(|e| explain(queue, "open the socket", e))?;
        socket
            .set_receive_buffer(RECEIVE_BUFFER_BYTES)
            .map_err(|e| explain(queue, "set the receive buffer", e))?;
        let mut this = Self {
            queue,
            socket,
            slots: Slots::of(Slots::PACKET_BYTES),
            early: VecDeque::new(),
            outgoing: Vec::new(),
            refused_verdicts: 0,
            unread: 0,
        };
        this.request(BIND, wire::bind)?;
        this.request("ask for whole GSO packets", wire::flags)?;
        this.request("set its length", |out, q| wire::len_max(out, q, len_max))?;
        // Last: until it knows what to copy, the kernel queues nothing.
        this.request("set the copy mode", |out, q| wire::copy(out, q, HEADERS_MAX_BYTES))?;
        Ok(this)
    }

    /// The queue's number.
    #[must_use]
    pub fn number(&self) -> QueueNumber {
        self.queue
    }

    /// The descriptor to wait on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    fn flush(&mut self) -> Result<(), QueueError> {
        let sent = self.socket.send(&self.outgoing);
        self.outgoing.clear();
        sent.map_err(|e| explain(self.queue, "send verdicts", e))
    }

    fn request(
        &mut self,
        doing: &'static str,
        build: impl FnOnce(&mut Vec<u8>, QueueNumber),
    ) -> Result<(), QueueError> {
        let queue = self.queue;
        self.outgoing.clear();
        build(&mut self.outgoing, queue);
        self.socket.send(&self.outgoing).map_err(|e| explain(queue, doing, e))?;
        let epoll = crate::sys::Epoll::new().map_err(|e| explain(queue, doing, e))?;
        epoll.add(self.fd(), 0).map_err(|e| explain(queue, doing, e))?;
        let mut ready = Vec::new();
        loop {
            epoll.wait(&mut ready, ANSWER_WAIT_MS).map_err(|e| explain(queue, doing, e))?;
            match self.socket.receive(&mut self.slots) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err(QueueError::NoAnswer { queue, doing });
                }
                // Packets were lost, and perhaps the answer: try once more to find it.
                Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => continue,
                Err(e) => return Err(explain(queue, doing, e)),
            }
            let mut answer = None;
            for datagram in self.slots.datagrams() {
                match wire::parse(datagram) {
                    Some(Incoming::Answer { errno }) => answer = Some(errno),
                    Some(Incoming::Packet(_)) => self.early.push_back(datagram.to_vec()),
                    None => {}
                }
            }
            self.slots.clear();
            match answer {
                Some(0) => return Ok(()),
                Some(errno) => {
                    return Err(explain(queue, doing, io::Error::from_raw_os_error(errno)));
                }
                None => {}
            }
        }
    }
}

impl PacketQueue for Nfqueue {
    fn receive(&mut self) -> Result<Received, QueueError> {
        match self.socket.receive(&mut self.slots) {
            Ok(()) => Ok(Received::Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.slots.clear();
                Ok(if self.early.is_empty() { Received::Nothing } else { Received::Some })
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => {
                self.slots.clear();
                Ok(Received::Overrun)
            }
            Err(e) => Err(explain(self.queue, "receive packets", e)),
        }
    }

    fn packets(&mut self, mut each: impl FnMut(QueuedPacket<'_>)) {
        let early = std::mem::take(&mut self.early);
        let datagrams = early.iter().map(Vec::as_slice).chain(self.slots.datagrams());
        for datagram in datagrams {
            match wire::parse(datagram) {
                Some(Incoming::Packet(packet)) => each(packet),
                // A verdict came too late: the interface went down and its packets with it.
                Some(Incoming::Answer { errno }) if errno != 0 => self.refused_verdicts += 1,
                Some(Incoming::Answer { .. }) => {}
                None => self.unread += 1,
            }
        }
        self.slots.clear();
    }

    fn send(&mut self, verdicts: &Verdicts) -> Result<(), QueueError> {
        self.outgoing.clear();
        for verdict in verdicts.as_slice() {
            wire::verdict(&mut self.outgoing, self.queue, *verdict);
            if self.outgoing.len() >= SEND_MAX_BYTES {
                self.flush()?;
            }
        }
        if self.outgoing.is_empty() { Ok(()) } else { self.flush() }
    }

    fn refused_verdicts(&self) -> u64 {
        self.refused_verdicts
    }

    fn unread(&self) -> u64 {
        self.unread
    }
}

fn explain(queue: QueueNumber, doing: &'static str, source: io::Error) -> QueueError {
    match source.raw_os_error() {
        // The kernel refuses a queue of another process in the same words as a lack of rights.
        Some(libc::EPERM) if doing == BIND && is_bound(queue) => QueueError::InUse { queue },
        Some(libc::EPERM | libc::EACCES) => QueueError::NotAllowed { queue },
        Some(libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT) => QueueError::Missing,
        // nfnetlink answers so when nobody has registered the subsystem.
        Some(libc::EINVAL) if doing == BIND => QueueError::Missing,
        Some(libc::EBUSY) => QueueError::InUse { queue },
        _ => QueueError::Io { queue, doing, source },
    }
}

fn is_bound(queue: QueueNumber) -> bool {
    kernel_counters(queue).is_ok_and(|counters| counters.is_some())
}

/// Where the kernel shows its counters, for the network namespace of the thread that reads it.
const COUNTERS_PATH: &str = "/proc/thread-self/net/netfilter/nfnetlink_queue";

/// The kernel's counters of one queue since it was bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCounters {
    /// Packets in the kernel's queue now.
    pub queued: u64,
    /// Packets dropped because the queue was full.
    pub dropped_full: u64,
    /// Packets dropped because the netlink socket was full.
    pub dropped_socket: u64,
}

/// Reads the kernel's counters. `None`: nobody has bound this queue.
pub fn kernel_counters(queue: QueueNumber) -> Result<Option<KernelCounters>, QueueError> {
    let text = std::fs::read_to_string(COUNTERS_PATH).map_err(|source| {
        if source.kind() == io::ErrorKind::NotFound {
            QueueError::Missing
        } else {
            explain(queue, "read its counters", source)
        }
    })?;
    Ok(parse_counters(&text, queue))
}

/// Columns: queue, port, queued, copy mode, copy range, dropped (full), dropped (socket), last id.
fn parse_counters(text: &str, queue: QueueNumber) -> Option<KernelCounters> {
    text.lines().find_map(|line| {
        let columns: Vec<u64> = line.split_whitespace().map_while(|c| c.parse().ok()).collect();
        (columns.len() >= 8 && columns[0] == u64::from(queue.0)).then(|| KernelCounters {
            queued: columns[2],
            dropped_full: columns[5],
            dropped_socket: columns[6],
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_queue() {
        let text = "   40   1022     3 2   160    17     2      900  1\n\
                    \x20 41  99999     0 2   160     0     0        0  1\n";
        assert_eq!(
            parse_counters(text, QueueNumber(40)),
            Some(KernelCounters { queued: 3, dropped_full: 17, dropped_socket: 2 })
        );
        assert_eq!(parse_counters(text, QueueNumber(4)), None);
        assert_eq!(parse_counters("", QueueNumber(0)), None);
    }

    #[test]
    fn lengths_at_and_past_the_limit() {
        for len in [0, QUEUE_LEN_MAX + 1] {
            assert!(matches!(
                Nfqueue::bind(QueueNumber(1), len),
                Err(QueueError::BadLength { .. })
            ));
        }
    }
}
