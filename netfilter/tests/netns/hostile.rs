//! Packets that nobody should send: tags that are wrong, in the wrong place, in a member's name, of a stranger, of a guest
//! itself; whole and in fragments, of both families.
#![allow(unsafe_code)]

use crate::can_run;
use crate::gates::Gates;
use crate::lab::{in_namespace, next, nothing_came, until};
use crate::tagging::{PORT, at, socket, until_stat};
use crate::town::{Plan, Town};
use crate::wire::raw_socket;
use std::collections::HashMap;
use std::io::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, IPV6_OPTION, Stamp};

const UDP: u8 = 17;
const HOP_BY_HOP: u8 = 0;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;
/// What all of these packets say.
const TEXT: &[u8] = b"made up, and long enough for two fragments";
/// Where the second fragment begins, in bytes of what is fragmented.
const SECOND_AT: usize = 24;

/// Sends a packet of which every byte is made up, from its network header on: the route alone is the namespace's. Of IPv4 the
/// kernel fills in the length and the header's checksum.
pub fn send_raw(namespace: &str, to: IpAddr, packet: &[u8]) {
    in_namespace(namespace, || {
        // SAFETY: all zeros is a valid address of either kind.
        let mut at: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
        let (family, bytes) = match to {
            IpAddr::V4(to) => {
                let at = (&raw mut at).cast::<libc::sockaddr_in>();
                // SAFETY: an IPv4 address is shorter and needs no stricter alignment.
                let at = unsafe { &mut *at };
                at.sin_family = libc::AF_INET as u16;
                at.sin_addr.s_addr = u32::from_ne_bytes(to.octets());
                (libc::AF_INET, size_of::<libc::sockaddr_in>())
            }
            IpAddr::V6(to) => {
                at.sin6_family = libc::AF_INET6 as u16;
                at.sin6_addr.s6_addr = to.octets();
                (libc::AF_INET6, size_of::<libc::sockaddr_in6>())
            }
        };
        let socket = raw_socket(family, libc::SOCK_RAW, libc::IPPROTO_RAW).expect("a raw socket");
        // SAFETY: packet and address are valid for reading, and as long as is said.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                packet.as_ptr().cast(),
                packet.len(),
                0,
                (&raw const at).cast(),
                bytes as libc::socklen_t,
            )
        };
        assert_eq!(usize::try_from(sent), Ok(packet.len()), "{}", Error::last_os_error());
    });
}

/// As good as the members of a town with three writers make it: the context is that of a group without named ones.
fn codec() -> Codec {
    Codec::new(Form::Vector { writers: 3 }, "drive", [])
}

fn stamp() -> Stamp {
    Stamp::Vector((0..3).map(|writer| (WriterId(writer), Seq(9))).collect())
}

fn tag4() -> Vec<u8> {
    let mut option = vec![];
    codec().encode_ipv4(IPV4_OPTION, &stamp(), &mut option);
    option
}

/// The header that a tag is in, in front of another one.
fn tag6(next: u8) -> Vec<u8> {
    let mut header = vec![];
    codec().encode_ipv6(next, &stamp(), &mut header);
    header
}

pub fn sum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | w.get(1).map_or(0, |b| u32::from(*b)));
    let sum = words.sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// A datagram to the port that all listen at.
fn datagram(from: IpAddr, to: IpAddr) -> Vec<u8> {
    let (port, len) = (PORT.to_be_bytes(), (8 + TEXT.len() as u16).to_be_bytes());
    let mut udp = [&port[..], &port, &len, &[0, 0], TEXT].concat();
    let pseudo = [&octets(from)[..], &octets(to), &[0, UDP], &len].concat();
    let check = !sum(&[&pseudo[..], &udp].concat());
    udp[6..8].copy_from_slice(&check.to_be_bytes());
    udp
}

pub fn ipv4(from: Ipv4Addr, to: Ipv4Addr, options: &[u8], fragment: u16, body: &[u8]) -> Vec<u8> {
    let words = 5 + options.len() / 4;
    // The kernel writes the length and the checksum.
    let mut packet = vec![0x40 | words as u8, 0, 0, 0, 0, 7];
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, UDP, 0, 0]);
    [&packet[..], &from.octets(), &to.octets(), options, body].concat()
}

pub fn ipv6(from: Ipv6Addr, to: Ipv6Addr, next: u8, body: &[u8]) -> Vec<u8> {
    let len = (body.len() as u16).to_be_bytes();
    [&[0x60, 0, 0, 0][..], &len, &[next, 64], &from.octets(), &to.octets(), body].concat()
}

/// An extension header with these options.
fn options6(next: u8, options: &[u8]) -> Vec<u8> {
    let mut header = [&[next, 0], options].concat();
    header.resize(header.len().next_multiple_of(8), 0);
    header[1] = (header.len() / 8 - 1) as u8;
    header
}

fn fragment6(next: u8, at: usize, more: bool) -> Vec<u8> {
    vec![next, 0, (at >> 8) as u8, at as u8 | u8::from(more), 0, 0, 0, 9]
}

/// Both halves of a datagram, with these options in each.
fn fragments4(from: Ipv4Addr, to: Ipv4Addr, options: &[u8]) -> [Vec<u8>; 2] {
    let udp = datagram(from.into(), to.into());
    let (first, second) = udp.split_at(SECOND_AT);
    let second_at = SECOND_AT as u16 / 8;
    [ipv4(from, to, options, 0x2000, first), ipv4(from, to, options, second_at, second)]
}

/// The same behind a header, of which `header` is told what is next.
fn fragments6(from: Ipv6Addr, to: Ipv6Addr, header: impl Fn(u8) -> Vec<u8>) -> [Vec<u8>; 2] {
    let udp = datagram(from.into(), to.into());
    let (first, second) = udp.split_at(SECOND_AT);
    [(0, true, first), (SECOND_AT, false, second)].map(|(at, more, part)| {
        let body = [&header(FRAGMENT)[..], &fragment6(UDP, at, more), part].concat();
        ipv6(from, to, DESTINATION, &body)
    })
}

pub struct Pair {
    from: (Ipv4Addr, Ipv6Addr),
    to: (Ipv4Addr, Ipv6Addr),
}

impl Pair {
    pub fn of(town: &Town, from: &str, to: &str) -> Pair {
        let both = |who: &str| match (town.ip(who), town.ip6(who)) {
            (IpAddr::V4(four), IpAddr::V6(six)) => (four, six),
            other => panic!("{other:?}"),
        };
        Pair { from: both(from), to: both(to) }
    }

    pub fn whole4(&self, options: &[u8]) -> Vec<u8> {
        let (from, to) = (self.from.0, self.to.0);
        ipv4(from, to, options, 0, &datagram(from.into(), to.into()))
    }

    /// Behind these headers, the first of this kind.
    pub fn whole6(&self, next: u8, headers: &[&[u8]]) -> Vec<u8> {
        let (from, to) = (self.from.1, self.to.1);
        ipv6(from, to, next, &[&headers.concat()[..], &datagram(from.into(), to.into())].concat())
    }
}

/// IPv4 options with a tag that is none of a member's.
fn wrong4() -> Vec<(&'static str, Vec<u8>)> {
    let good = tag4();
    let mut hlc = vec![];
    let times = Codec::new(Form::Hlc, "drive", []);
    times.encode_ipv4(IPV4_OPTION, &Stamp::Hlc(tidelock_protocol::hlc::Hlc(9)), &mut hlc);
    let mut damaged = good.clone();
    damaged[9] ^= 1;
    vec![
        ("short", vec![IPV4_OPTION, 4, 0x11, 0]),
        ("empty", vec![IPV4_OPTION, 2, 1, 1]),
        ("without the key", good.clone()),
        ("damaged", damaged),
        ("another form", hlc),
        ("twice", [&good[..], &[IPV4_OPTION, 4, 0, 0]].concat()),
        ("not the first", [&[148, 4, 0, 0][..], &good].concat()),
        ("not where it should be", [&[1, 1, 1, 1][..], &good].concat()),
    ]
}

/// The same for the headers of an IPv6 packet, of which the last one is told what is next.
type Headers6 = (&'static str, u8, Box<dyn Fn(u8) -> Vec<u8>>);

fn wrong6() -> Vec<Headers6> {
    let damaged = |next| {
        let mut header = tag6(next);
        header[9] ^= 1;
        header
    };
    let body = tag6(UDP)[4..26].to_vec();
    let option = [&[IPV6_OPTION, 22][..], &body].concat();
    let twice = [&option[..], &option].concat();
    let behind = [&[1, 0][..], &option].concat();
    let filling = |next| options6(next, &[1, 4, 0, 0, 0, 0]);
    vec![
        ("short", DESTINATION, Box::new(|next| options6(next, &[IPV6_OPTION, 2, 0x11, 0]))),
        ("without the key", DESTINATION, Box::new(tag6)),
        ("damaged", DESTINATION, Box::new(damaged)),
        ("twice", DESTINATION, Box::new(move |next| options6(next, &twice))),
        ("not the first option", DESTINATION, Box::new(move |next| options6(next, &behind))),
        ("two headers", DESTINATION, Box::new(|next| [tag6(DESTINATION), tag6(next)].concat())),
        (
            "behind another header",
            DESTINATION,
            Box::new(move |next| [filling(DESTINATION), tag6(next)].concat()),
        ),
        (
            "hop by hop",
            HOP_BY_HOP,
            Box::new(|next| [options6(DESTINATION, &[1, 4, 0, 0, 0, 0]), tag6(next)].concat()),
        ),
    ]
}

fn grows(gates: &mut Gates, member: &str, name: &str, what: &str, act: impl FnOnce()) {
    let before = gates.tags(member)[name];
    act();
    until(&format!("{what}: {name} of {member}"), || gates.tags(member)[name] > before);
}

#[track_caller]
fn knows_nothing(tags: &HashMap<String, u64>) {
    assert_eq!((tags["p0"], tags["p1"], tags["p2"]), (0, 0, 0), "{tags:?}");
    assert_eq!(tags["merged"], 0, "{tags:?}");
}

/// The client pretends to be a member.
#[test]
fn in_a_members_name_what_is_not_as_members_write_it_is_dropped() {
    if !can_run("in_a_members_name") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("3");
        // Between members of one host no tag comes from anywhere else.
        let wrong = if plan == Plan::TwoHosts { "dropped_malformed" } else { "dropped_wrong_way" };
        let (db, pair) = (socket(&town, "db"), Pair::of(&town, "web", "db"));
        let send = |packet: &[u8]| {
            let to = if packet[0] >> 4 == 6 { town.ip6("db") } else { town.ip("db") };
            send_raw(&town.ns("client"), to, packet);
        };
        for (what, options) in wrong4() {
            let [first, second] = fragments4(pair.from.0, pair.to.0, &options);
            for packet in [pair.whole4(&options), first, second] {
                grows(&mut gates, "db", wrong, what, || send(&packet));
            }
        }
        for (what, next, headers) in wrong6() {
            let whole = pair.whole6(next, &[&headers(UDP)]);
            grows(&mut gates, "db", wrong, what, || send(&whole));
            if next == DESTINATION {
                for packet in fragments6(pair.from.1, pair.to.1, &headers) {
                    grows(&mut gates, "db", wrong, what, || send(&packet));
                }
            }
        }
        // In what is fragmented, where a member never writes it.
        let inside = [&fragment6(DESTINATION, 0, false)[..], &tag6(UDP)].concat();
        grows(&mut gates, "db", wrong, "inside a fragment", || {
            send(&pair.whole6(FRAGMENT, &[&inside]));
        });
        for headers in [
            &[UDP, 0, IPV6_OPTION, 9, 0, 0, 0, 0][..],
            &[UDP, 99, IPV6_OPTION, 4, 0, 0, 0, 0],
            &[UDP, 0, 1, 3, 0, 0, 0, IPV6_OPTION],
        ] {
            grows(&mut gates, "db", "dropped_unreadable", "without an end", || {
                send(&pair.whole6(DESTINATION, &[headers]));
            });
        }
        // A router's own kernel does not let these come that far.
        if plan == Plan::OneBridge {
            for options in
                [&[IPV4_OPTION, 0, 0, 0], &[IPV4_OPTION, 9, 0, 0], &[1, 1, 1, IPV4_OPTION]]
            {
                for packet in fragments4(pair.from.0, pair.to.0, options) {
                    grows(&mut gates, "db", "dropped_unreadable", "without an end", || {
                        send(&packet)
                    });
                }
                grows(&mut gates, "db", "dropped_unreadable", "without an end", || {
                    send(&pair.whole4(options));
                });
            }
        }
        nothing_came(&db);
        knows_nothing(&gates.tags("db"));
    }
}

/// As good as a member's, and as bad: nobody believes the client, and the guest gets its datagrams without.
#[test]
fn what_a_stranger_writes_is_taken_out_and_believed_by_nobody() {
    if !can_run("of_a_stranger") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("3");
        let (db, pair) = (socket(&town, "db"), Pair::of(&town, "client", "db"));
        let mut packets = 0;
        let mut arrives = |what: &str, sent: &[Vec<u8>]| {
            for packet in sent {
                let to = if packet[0] >> 4 == 6 { town.ip6("db") } else { town.ip("db") };
                send_raw(&town.ns("client"), to, packet);
                packets += 1;
            }
            assert_eq!(next(&db), TEXT, "{plan:?} {what} {sent:?}");
        };
        for (what, options) in [vec![("good", tag4())], wrong4()].concat() {
            arrives(what, &[pair.whole4(&options)]);
            arrives(what, &fragments4(pair.from.0, pair.to.0, &options));
        }
        let good: Headers6 = ("good", DESTINATION, Box::new(tag6));
        for (what, next, headers) in std::iter::once(good).chain(wrong6()) {
            arrives(what, &[pair.whole6(next, &[&headers(UDP)])]);
            if next == DESTINATION {
                arrives(what, &fragments6(pair.from.1, pair.to.1, &headers));
            }
        }
        let inside = [&fragment6(DESTINATION, 0, false)[..], &tag6(UDP)].concat();
        arrives("inside a fragment", &[pair.whole6(FRAGMENT, &[&inside])]);
        let tags = gates.tags("db");
        assert_eq!(tags["stripped_foreign"], packets, "{plan:?} {tags:?}");
        knows_nothing(&tags);
    }
}

#[test]
fn a_guest_that_writes_tags_itself_is_not_heard_by_anybody() {
    if !can_run("guests_own") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("3");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        let mut sent = 0;
        for to in ["db", "client"] {
            let pair = Pair::of(&town, "web", to);
            let mut packets = Vec::new();
            for (_, options) in [vec![("good", tag4())], wrong4()].concat() {
                packets.push(pair.whole4(&options));
                packets.extend(fragments4(pair.from.0, pair.to.0, &options));
            }
            let good: Headers6 = ("good", DESTINATION, Box::new(tag6));
            for (_, next, headers) in std::iter::once(good).chain(wrong6()) {
                packets.push(pair.whole6(next, &[&headers(UDP)]));
                if next == DESTINATION {
                    packets.extend(fragments6(pair.from.1, pair.to.1, &headers));
                }
            }
            let inside = [&fragment6(DESTINATION, 0, false)[..], &tag6(UDP)].concat();
            packets.push(pair.whole6(FRAGMENT, &[&inside]));
            for packet in &packets {
                let to = if packet[0] >> 4 == 6 { town.ip6(to) } else { town.ip(to) };
                send_raw(&town.ns("web"), to, packet);
            }
            sent += packets.len() as u64;
        }
        let until_dropped = |gates: &mut Gates| {
            until("they are dropped", || gates.tags("web")["dropped_guests_own"] == sent);
        };
        until_dropped(&mut gates);
        // What is in order leaves after them and comes first.
        for (socket, to) in [(&db, "db"), (&client, "client")] {
            for ip in [town.ip(to), town.ip6(to)] {
                web.send_to(b"in order", at(ip)).unwrap();
                assert_eq!(next(socket), b"in order", "{plan:?}");
            }
        }
        let tags = gates.tags("db");
        assert_eq!((tags["p0"], tags["p1"], tags["p2"]), (0, 0, 0), "{tags:?}");
        until_dropped(&mut gates);
    }
}

/// A guest that pretends to be somebody else gets no tag that a receiver would believe, and so waits.
#[test]
fn from_an_address_that_is_not_its_own_a_guest_says_nothing_before_it_is_covered() {
    if !can_run("pretended") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("3");
        let db = socket(&town, "db");
        gates.tell("web", "pending 0 5");
        let pair = Pair::of(&town, "client", "db");
        let (ours, held) = (town.ns("web"), gates.stats("web")["held_packets"]);
        send_raw(&ours, town.ip("db"), &pair.whole4(&[]));
        send_raw(&ours, town.ip6("db"), &pair.whole6(UDP, &[]));
        until_stat(&mut gates, "web", "held_packets", |n| n >= held + 2);
        nothing_came(&db);
        knows_nothing(&gates.tags("db"));
        let tags = gates.tags("web");
        assert_eq!(tags["tagged"] + tags["merged_here"], 0, "{plan:?} {tags:?}");
        gates.tell_all("commit 0 5");
        for _ in 0..2 {
            assert_eq!(next(&db), TEXT, "{plan:?}");
        }
    }
}
