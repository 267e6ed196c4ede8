//! Ethernet frames of guests, and the addresses of everybody on the network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use tidelock_netfilter::release_queue::Kind;

/// The longest packet that every way between members takes, from its network header on.
pub const PATH_MTU: usize = 1500;

/// The header before the network header.
pub const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
const IPV4_OPTIONS_MAX_BYTES: usize = 40;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const SOLICITATION_BYTES: u8 = 24;
const UDP: u8 = 17;
const TCP: u8 = 6;
const TCP_ACK: u8 = 0x10;
const TCP_PUSH_ACK: u8 = 0x18;
const IPV4_NOTHING: u8 = 1;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    Four,
    /// IPv6.
    Six,
}

/// Somebody on the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// A VM.
    Vm(usize),
    /// A client of VMs.
    Client,
    /// Nobody of a group, who sends tags all the same.
    Stranger,
}

impl Node {
    /// Its address.
    #[must_use]
    pub fn address(self, family: Family) -> IpAddr {
        let host = match self {
            Node::Vm(vm) => u16::try_from(vm).expect("few VMs") + 1,
            Node::Client => 0x1001,
            Node::Stranger => 0x1002,
        };
        let [high, low] = host.to_be_bytes();
        match family {
            Family::Four => Ipv4Addr::new(10, 0, high, low).into(),
            Family::Six => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host).into(),
        }
    }

    fn link_address(self) -> [u8; 6] {
        let IpAddr::V4(address) = self.address(Family::Four) else { unreachable!("it is one") };
        let [.., high, low] = address.octets();
        [2, 0, 0, 0, high, low]
    }
}

/// An obstacle to a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Nothing.
    Enough,
    /// The packet is as long as the path takes.
    Full,
    /// The header's options take all the room, or a hop-by-hop header must stay the first one.
    Options,
}

/// A packet to be made.
#[derive(Clone, Copy, Debug)]
pub struct Sketch {
    /// The family of both addresses.
    pub family: Family,
    /// Its sender.
    pub from: Node,
    /// Its receiver.
    pub to: Node,
    /// Data, or an acknowledgement.
    pub kind: Kind,
    /// An obstacle to a tag.
    pub room: Room,
    /// Number in its payload, so that no two are the same.
    pub number: u64,
}

impl Sketch {
    /// The frame as its sender's network card has it.
    #[must_use]
    pub fn frame(self) -> Vec<u8> {
        if self.kind == Kind::NeverHeld {
            return self.solicitation();
        }
        let (protocol, mut body) = self.body();
        if self.room == Room::Full {
            let network = if self.family == Family::Four { IPV4_BYTES } else { IPV6_BYTES };
            body.resize(PATH_MTU - network, 0x2e);
            if protocol == UDP {
                let len = u16::try_from(body.len()).expect("short").to_be_bytes();
                body[4..6].copy_from_slice(&len);
            }
        }
        let before = match (self.family, self.room) {
            (Family::Four, Room::Options) => vec![IPV4_NOTHING; IPV4_OPTIONS_MAX_BYTES],
            (Family::Six, Room::Options) => vec![protocol, 0, 1, 4, 0, 0, 0, 0],
            _ => Vec::new(),
        };
        let protocol = match (self.family, self.room) {
            (Family::Six, Room::Options) => 0,
            _ => protocol,
        };
        self.packet(protocol, &before, &body)
    }

    /// The sender asks for the link-layer address of a neighbour (RFC 4861, 4.3).
    fn solicitation(self) -> Vec<u8> {
        let (IpAddr::V6(from), IpAddr::V6(to)) =
            (self.from.address(Family::Six), self.to.address(Family::Six))
        else {
            unreachable!("both are of that family")
        };
        let [.., high, low] = to.octets();
        let mut frame = vec![0x33, 0x33, 0xff, 0, high, low];
        frame.extend(self.from.link_address());
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, SOLICITATION_BYTES, ICMPV6, 255]);
        frame.extend(from.octets());
        // All nodes with the same end of their addresses.
        frame.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, high, low]);
        frame.extend([SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend(to.octets());
        frame
    }

    /// The frame with `before` between the fixed header and the body: options, or another header.
    #[must_use]
    pub fn packet(self, protocol: u8, before: &[u8], body: &[u8]) -> Vec<u8> {
        let mut frame = Vec::with_capacity(ETHERNET_BYTES + IPV6_BYTES + before.len() + body.len());
        frame.extend(self.to.link_address());
        frame.extend(self.from.link_address());
        let rest = u16::try_from(before.len() + body.len()).expect("packets are short");
        match (self.from.address(self.family), self.to.address(self.family)) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let header = IPV4_BYTES + before.len();
                frame.extend([8, 0, 0x40 | u8::try_from(header / 4).expect("at most 60"), 0]);
                frame.extend((rest + IPV4_BYTES as u16).to_be_bytes());
                frame.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
                frame.extend(from.octets());
                frame.extend(to.octets());
                frame.extend(before);
                let check = (!sum(&frame[ETHERNET_BYTES..])).to_be_bytes();
                frame[ETHERNET_BYTES + 10..ETHERNET_BYTES + 12].copy_from_slice(&check);
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend(rest.to_be_bytes());
                frame.extend([protocol, 64]);
                frame.extend(from.octets());
                frame.extend(to.octets());
                frame.extend(before);
            }
            _ => unreachable!("both are of one family"),
        }
        frame.extend(body);
        frame
    }

    /// The transport header and what it carries.
    #[must_use]
    pub fn body(self) -> (u8, Vec<u8>) {
        let segment = |port: u64, flags, payload: &[u8]| {
            let [.., port] = port.to_be_bytes();
            let mut tcp =
                vec![0x20, port, 0x20, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, flags, 1, 0, 0, 0, 0, 0];
            tcp.extend(payload);
            (TCP, tcp)
        };
        let payload = self.number.to_be_bytes();
        match self.kind {
            Kind::PureAck { flow } => segment(flow.0, TCP_ACK, &[]),
            Kind::Data { flow: Some(flow) } => segment(flow.0, TCP_PUSH_ACK, &payload),
            Kind::Data { flow: None } | Kind::NeverHeld => {
                let len = (UDP_BYTES + payload.len()) as u16;
                let mut udp = vec![0x20, 0, 0x20, 1];
                udp.extend(len.to_be_bytes());
                udp.extend([0, 0]);
                udp.extend(payload);
                (UDP, udp)
            }
        }
    }
}

fn sum(words: &[u8]) -> u16 {
    let (words, _) = words.as_chunks::<2>();
    let sum = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
