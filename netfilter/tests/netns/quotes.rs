//! What routers and receivers quote in ICMP errors comes back to the guest as it has sent it.

use crate::can_run;
use crate::gates::Gates;
use crate::hostile::{Pair, send_raw, sum};
use crate::lab::{PATIENCE, in_namespace, next, run};
use crate::town::{Plan, Town};
use crate::wire::raw_socket;
use std::net::UdpSocket;

const UDP: u8 = 17;
const DESTINATION: u8 = 60;
/// A recorded route that is full: routers leave it as it is, and repeat it in their errors' own headers.
const RECORD_ROUTE: [u8; 8] = [7, 7, 8, 10, 0, 0, 1, 0];
const UNREACHABLE: [u8; 2] = [3, 1];
const TIME_EXCEEDED: [u8; 2] = [11, 3];
const REDIRECT: [u8; 2] = [5, 137];

/// Gets all ICMP messages of a namespace.
pub fn icmp_socket(namespace: &str, six: bool) -> UdpSocket {
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

/// The next error of this kind, behind its first 8 bytes, and its own header's options. Of IPv6 the kernel has looked at the
/// checksum.
fn next_error(socket: &UdpSocket, six: bool, kind: u8) -> (Vec<u8>, Vec<u8>) {
    loop {
        let packet = next(socket);
        let (options, icmp) = if six {
            (&[][..], &packet[..])
        } else {
            let header = usize::from(packet[0] & 15) * 4;
            assert_eq!(sum(&packet[header..]), 0xffff, "ICMP checksum");
            (&packet[20..header], &packet[header..])
        };
        // Kernels speak by themselves, too.
        if icmp[0] == kind {
            return (icmp[8..].to_vec(), options.to_vec());
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

/// In each form, with members on two hosts whose packets carry tags.
fn with_tags(what: &str, test: impl Fn(&str, &Town, &mut Gates)) {
    if !can_run(what) {
        return;
    }
    for form in ["3", "hlc"] {
        let town = Town::new(Plan::TwoHosts);
        let mut gates = town.gates(form);
        gates.let_writes_be_under_way();
        test(form, &town, &mut gates);
    }
}

#[test]
fn an_icmp_error_quotes_what_the_guest_has_sent() {
    with_tags("quotes", |form, town, gates| {
        for host in ["host", "other"] {
            town.on(host, "sysctl -qw net.ipv4.icmp_ratelimit=0 net.ipv6.icmp.ratelimit=0");
        }
        let (web, pair) = (town.ns("web"), Pair::of(town, "web", "db"));
        // The guest's own options are behind the tag.
        let packets = [
            pair.whole4(&[]),
            pair.whole4(&[148, 4, 0, 0]),
            pair.whole4(&RECORD_ROUTE),
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
                let (quote, options) = next_error(&socket, six, kinds[usize::from(six)]);
                assert_eq!(quote, at_its_last_hop(packet.clone()), "{form} {hops}");
                let repeated = if packet[20..28] == RECORD_ROUTE { &RECORD_ROUTE[..] } else { &[] };
                assert_eq!(options, repeated);
                assert!(gates.tags("web")["tagged"] > before);
            }
        }
        let tags = gates.tags("web");
        assert_eq!((tags["stripped_foreign"], tags["p0"]), (0, 5), "{tags:?}");
    });
}

/// A router that would send the packet back to where it came from. In IPv6 the quote is an option of the redirect, which
/// stays as long as it was (RFC 4861 4.5).
#[test]
fn a_redirect_quotes_what_the_guest_has_sent() {
    with_tags("redirects", |form, town, gates| {
        let (web, host, pair) = (town.ns("web"), town.ns("host"), Pair::of(town, "web", "db"));
        // It speaks by an address that nobody has to try out first.
        run(&format!("ip -n {host} addr add fe80::1/64 dev w0 nodad"));
        for packet in [pair.whole4(&[]), pair.whole6(UDP, &[])] {
            let six = packet[0] >> 4 == 6;
            let (to, hops_at) = if six { (town.ip6("db"), 7) } else { (town.ip("db"), 8) };
            run(&format!(
                "ip -n {host} route replace {to} dev w0
                 ip -n {host} neigh replace {to} lladdr 02:00:00:00:00:99 dev w0 nud permanent"
            ));
            let socket = icmp_socket(&web, six);
            let mut sent = packet.clone();
            sent[hops_at] = 2;
            let before = gates.tags("web")["tagged"];
            send_raw(&web, to, &sent);
            let (message, _) = next_error(&socket, six, REDIRECT[usize::from(six)]);
            if six {
                let quote = redirected(&message);
                // It is found before its last hop is counted, and is quoted in units of 8 bytes.
                let whole = sent.len() & !7;
                assert_eq!(quote[..whole], sent[..whole], "{form}");
                assert!(quote[whole..].iter().all(|byte| *byte == 0), "{form} {quote:?}");
            } else {
                assert_eq!(message, at_its_last_hop(packet), "{form}");
            }
            assert!(gates.tags("web")["tagged"] > before);
        }
    });
}

/// What an IPv6 redirect quotes: behind two addresses, in the option of that name.
fn redirected(message: &[u8]) -> &[u8] {
    let mut options = &message[32..];
    loop {
        let (option, more) = options.split_at(usize::from(options[1]) * 8);
        if option[0] == 4 {
            return &option[8..];
        }
        options = more;
    }
}
