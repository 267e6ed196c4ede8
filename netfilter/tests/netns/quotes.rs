//! What routers and receivers quote in ICMP errors comes back to the guest as it has sent it.

use crate::can_run;
use crate::hostile::{Pair, send_raw, sum};
use crate::lab::{PATIENCE, in_namespace, next};
use crate::town::{Plan, Town};
use crate::wire::raw_socket;
use std::net::UdpSocket;

const UDP: u8 = 17;
const DESTINATION: u8 = 60;
const UNREACHABLE: [u8; 2] = [3, 1];
const TIME_EXCEEDED: [u8; 2] = [11, 3];

/// Gets all ICMP messages of a namespace.
fn icmp_socket(namespace: &str, six: bool) -> UdpSocket {
    let (family, protocol) = if six {
        (libc::AF_INET6, libc::IPPROTO_ICMPV6)
    } else {
        (libc::AF_INET, libc::IPPROTO_ICMP)
    };
    let socket = in_namespace(namespace, || raw_socket(family, libc::SOCK_RAW, protocol));
    let socket = UdpSocket::from(socket.expect("a raw socket"));
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    socket
}

/// The next error of this kind, and what it quotes. Of IPv6 the kernel has looked at the checksum.
fn quoted(socket: &UdpSocket, six: bool, kind: u8) -> Vec<u8> {
    loop {
        let packet = next(socket);
        let icmp = if six {
            &packet[..]
        } else {
            assert_eq!(packet[0], 0x45, "a header without options");
            assert_eq!(sum(&packet[20..]), 0xffff, "ICMP checksum");
            &packet[20..]
        };
        // Kernels speak by themselves, too.
        if icmp[0] == kind {
            return icmp[8..].to_vec();
        }
    }
}

/// How a packet looks to who finds it with its last hop: of IPv4 the kernel has filled in what was left out.
fn at_its_last_hop(mut packet: Vec<u8>) -> Vec<u8> {
    if packet[0] >> 4 == 6 {
        packet[7] = 1;
        return packet;
    }
    let (len, header) = (packet.len() as u16, usize::from(packet[0] & 15) * 4);
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    packet[8] = 1;
    let check = !sum(&packet[..header]);
    packet[10..12].copy_from_slice(&check.to_be_bytes());
    packet
}

#[test]
fn an_icmp_error_quotes_what_the_guest_has_sent() {
    if !can_run("quotes") {
        return;
    }
    for form in ["3", "hlc"] {
        let town = Town::new(Plan::TwoHosts);
        for host in ["host", "other"] {
            town.on(host, "sysctl -qw net.ipv4.icmp_ratelimit=0 net.ipv6.icmp.ratelimit=0");
        }
        let mut gates = town.gates(form);
        gates.let_writes_be_under_way();
        let (web, pair) = (town.ns("web"), Pair::of(&town, "web", "db"));
        // The guest's own options are behind the tag.
        let packets = [
            pair.whole4(&[]),
            pair.whole4(&[148, 4, 0, 0]),
            pair.whole6(UDP, &[]),
            pair.whole6(DESTINATION, &[&[UDP, 0, 1, 4, 0, 0, 0, 0]]),
        ];
        for packet in packets {
            let six = packet[0] >> 4 == 6;
            let (to, hops_at) = if six { (town.ip6("db"), 7) } else { (town.ip("db"), 8) };
            let socket = icmp_socket(&web, six);
            // To the own host, to the other one, and to the receiver, where nobody listens.
            for (hops, kinds) in [(1, TIME_EXCEEDED), (2, TIME_EXCEEDED), (3, UNREACHABLE)] {
                let mut sent = packet.clone();
                sent[hops_at] = hops;
                let before = gates.tags("web")["tagged"];
                send_raw(&web, to, &sent);
                let quote = quoted(&socket, six, kinds[usize::from(six)]);
                assert_eq!(quote, at_its_last_hop(packet.clone()), "{form} {hops}");
                assert!(gates.tags("web")["tagged"] > before);
            }
        }
        let tags = gates.tags("web");
        assert_eq!((tags["stripped_foreign"], tags["p0"]), (0, 5), "{tags:?}");
    }
}
