//! What is on a cable, packet by packet as a network card without offloads would send it.
#![allow(unsafe_code)]

use crate::lab::{in_namespace, run};
use std::io::Error;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// More than any test sends while it looks: what is not read at once waits here.
const BUFFER_BYTES: libc::c_int = 128 << 20;
const IPV6_BYTES: usize = 40;

/// A packet as it left, from its network header on.
#[derive(Clone, Debug)]
pub struct Packet(pub Vec<u8>);

impl Packet {
    pub fn is_ipv6(&self) -> bool {
        self.0[0] >> 4 == 6
    }

    /// Whether the tag is where members write it.
    pub fn has_tag(&self) -> bool {
        if self.is_ipv6() {
            self.0[6] == 60 && self.0[IPV6_BYTES + 2] == 0x1e
        } else {
            self.0[0] & 15 > 5 && self.0[20] == 158
        }
    }

    /// Where the header behind the network's lies, and which it is. Of IPv6 extension headers the tag's is stepped over.
    fn transport(&self) -> (usize, u8) {
        let p = &self.0;
        match (self.is_ipv6(), self.has_tag()) {
            (false, _) => (usize::from(p[0] & 15) * 4, p[9]),
            (true, false) => (IPV6_BYTES, p[6]),
            (true, true) => (IPV6_BYTES + (usize::from(p[41]) + 1) * 8, p[40]),
        }
    }

    /// A TCP segment that carries something.
    pub fn has_tcp_data(&self) -> bool {
        let (at, protocol) = self.transport();
        protocol == 6 && self.0.len() > at + usize::from(self.0[at + 12] >> 4) * 4
    }

    pub fn is_fragment(&self) -> bool {
        if self.is_ipv6() {
            self.transport().1 == 44
        } else {
            u16::from_be_bytes([self.0[6], self.0[7]]) & 0x3fff != 0
        }
    }
}

/// Sees all that an interface sends, from now on.
pub struct Wire(OwnedFd);

impl Wire {
    pub fn of(namespace: &str, interface: &str) -> Wire {
        in_namespace(namespace, || Wire(open(interface).unwrap_or_else(|e| panic!("{e}"))))
    }

    /// The same, of a network card without offloads: GSO packets are cut before they are seen.
    pub fn of_plain_card(namespace: &str, interface: &str) -> Wire {
        in_namespace(namespace, || {
            run(&format!("ethtool -K {interface} tso off gso off gro off tx-udp-segmentation off"));
        });
        Wire::of(namespace, interface)
    }

    /// What it has sent since the last time that it was asked.
    pub fn sent(&self) -> Vec<Packet> {
        let mut packets = Vec::new();
        loop {
            let mut buffer = [0; 1 << 16];
            // SAFETY: all zeros is a valid address.
            let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            let mut from_bytes = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            // SAFETY: the kernel writes at most as many bytes as each of the two holds.
            let len = unsafe {
                libc::recvfrom(
                    self.0.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_DONTWAIT,
                    (&raw mut from).cast(),
                    &raw mut from_bytes,
                )
            };
            let Ok(len) = usize::try_from(len) else {
                let error = Error::last_os_error();
                assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
                assert_eq!(self.missed(), 0, "the capture is not whole");
                return packets;
            };
            let protocol = i32::from(u16::from_be(from.sll_protocol));
            if from.sll_pkttype == libc::PACKET_OUTGOING
                && [libc::ETH_P_IP, libc::ETH_P_IPV6].contains(&protocol)
            {
                packets.push(Packet(buffer[..len].to_vec()));
            }
        }
    }

    fn missed(&self) -> u32 {
        // SAFETY: all zeros is a valid tpacket_stats.
        let mut stats: libc::tpacket_stats = unsafe { std::mem::zeroed() };
        let mut bytes = size_of_val(&stats) as libc::socklen_t;
        // SAFETY: the kernel writes at most as many bytes as `stats` has.
        let result = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut stats).cast(),
                &raw mut bytes,
            )
        };
        assert_eq!(result, 0, "{}", Error::last_os_error());
        stats.tp_drops
    }
}

pub fn raw_socket(family: i32, kind: i32, protocol: i32) -> Result<OwnedFd, Error> {
    // SAFETY: no pointers are passed.
    let socket = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) };
    if socket < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: it was just opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(socket) })
}

fn open(interface: &str) -> Result<OwnedFd, Error> {
    let all = (libc::ETH_P_ALL as u16).to_be();
    // Nothing is seen before it is bound to one interface.
    let socket = raw_socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0)?;
    let name = std::ffi::CString::new(interface)?;
    // SAFETY: all zeros is a valid address.
    let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    at.sll_family = libc::AF_PACKET as u16;
    at.sll_protocol = all;
    // SAFETY: the name ends with 0.
    at.sll_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) } as i32;
    // SAFETY: the number and the address are valid for reading, and as long as is said.
    let results = unsafe {
        [
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                std::ptr::from_ref(&BUFFER_BYTES).cast(),
                size_of_val(&BUFFER_BYTES) as libc::socklen_t,
            ),
            libc::bind(
                socket.as_raw_fd(),
                (&raw const at).cast(),
                size_of_val(&at) as libc::socklen_t,
            ),
        ]
    };
    if results == [0, 0] { Ok(socket) } else { Err(Error::last_os_error()) }
}

/// What is sent by this socket leaves its kernel as one GSO packet, of datagrams that are as long as this.
pub fn cut_into_datagrams(socket: &UdpSocket, bytes: usize) {
    let bytes = i32::try_from(bytes).expect("a datagram");
    // SAFETY: the number is valid for reading, and as long as is said.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            (&raw const bytes).cast(),
            size_of_val(&bytes) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "{}", Error::last_os_error());
}
