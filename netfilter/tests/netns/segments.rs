//! Tags take room: what is as large as the path takes, whole, in fragments and in segments of GSO packets, measured on the LAN.

use crate::can_run;
use crate::gates::Gates;
use crate::lab::{PATIENCE, in_namespace, next, run};
use crate::tagging::{any, at, merges, socket};
use crate::town::{Plan, Town};
use crate::wire::{Packet, Wire, cut_into_datagrams};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};

/// Of the guests, and of the path between the hosts unless it is made wider.
const MTU: usize = 1500;
const WIDE_MTU: usize = 1600;
const BOTH_WAYS: [(&str, &str); 2] = [("web", "db"), ("db", "web")];

/// A LAN whose cards have no offloads: what crosses it, both ways.
fn wires(town: &Town) -> [Wire; 2] {
    ["host", "other"].map(|host| Wire::of_plain_card(&town.ns(host), "lan"))
}

fn sent(wires: &[Wire; 2]) -> Vec<Packet> {
    wires.iter().flat_map(Wire::sent).collect()
}

fn longest(packets: &[Packet]) -> usize {
    packets.iter().map(|packet| packet.0.len()).max().unwrap_or(0)
}

/// The bytes that a tag takes in an IPv4 and in an IPv6 packet.
fn room(form: &str, six: bool) -> usize {
    match (form, six) {
        ("7", false) => 40,
        ("7", true) => 48,
        ("hlc", false) => 20,
        ("hlc", true) => 24,
        _ => panic!("{form}"),
    }
}

#[test]
fn full_size_packets_cross_both_ways() {
    if !can_run("full_size") {
        return;
    }
    for plan in Plan::ALL {
        for (headroom, form) in [(false, "7"), (true, "7"), (false, "hlc")] {
            let town = Town::new(plan);
            if headroom {
                town.widen(WIDE_MTU as u32);
            }
            let mut gates = town.gates(form);
            gates.let_writes_be_under_way();
            let wires = (plan == Plan::TwoHosts).then(|| wires(&town));
            let sockets = ["web", "db"].map(|who| socket(&town, who));
            for (from, to) in [(0, 1), (1, 0)] {
                let name = ["web", "db"][to];
                for (ip, headers) in [(town.ip(name), 28), (town.ip6(name), 48)] {
                    // Exactly the guests' MTU; then in fragments of it.
                    for bytes in [MTU - headers, 5000] {
                        let datagram: Vec<u8> = (0..bytes).map(|n| n as u8).collect();
                        sockets[from].send_to(&datagram, at(ip)).unwrap();
                        let came = next(&sockets[to]);
                        assert!(came == datagram, "{plan:?} {headroom} {ip} {bytes}");
                    }
                }
            }
            if let Some(wires) = wires {
                datagrams_are_tagged_where_there_is_room(&sent(&wires), headroom, form);
            }
            for (from, to) in BOTH_WAYS {
                for ip in [town.ip(to), town.ip6(to)] {
                    Stream::open(&town, from, to, ip).carry(24 << 20);
                }
            }
            let tags = gates.tags("web");
            // On one host nothing needs room.
            let is_tight = !headroom && plan == Plan::TwoHosts;
            for gated in ["gated_mtu", "gated_fragment"] {
                assert_eq!(tags[gated] > 0, is_tight, "{tags:?}");
            }
            let lowered = tags["mss_lowered"];
            assert_eq!(lowered > 0, is_tight, "{tags:?}");
            for (member, other) in BOTH_WAYS {
                assert!(merges(&town, &mut gates, other, member) > 100);
                let tags = gates.tags(member);
                assert!(tags["untagged_acks"] > 0, "{tags:?}");
                nothing_was_lost(&tags);
            }
        }
    }
}

fn nothing_was_lost(tags: &HashMap<String, u64>) {
    let lost = tags.iter().filter(|(name, n)| name.starts_with("dropped") && **n > 0);
    assert_eq!(lost.count(), 0, "{tags:?}");
    assert_eq!(tags["gated_refused"] + tags["gated_unreadable"], 0, "{tags:?}");
}

/// Of each family both ways: one whole datagram of the guests' MTU, and fragments of which all but the last are as long.
fn datagrams_are_tagged_where_there_is_room(packets: &[Packet], headroom: bool, form: &str) {
    for six in [false, true] {
        let of_family = |fragment: bool| {
            let large = packets.iter().filter(move |packet| {
                packet.is_ipv6() == six && packet.is_fragment() == fragment && packet.0.len() > 1400
            });
            large.collect::<Vec<_>>()
        };
        let (whole, fragments) = (of_family(false), of_family(true));
        assert_eq!((whole.len(), fragments.len()), (2, 6), "{packets:?}");
        let room = if headroom { room(form, six) } else { 0 };
        assert!(whole.iter().all(|packet| packet.0.len() == MTU + room));
        assert!(fragments.iter().all(|packet| packet.0.len() > MTU - 8 + room));
        let (tags, short) = (
            whole.iter().chain(&fragments),
            packets.iter().filter(|packet| {
                packet.is_ipv6() == six && packet.is_fragment() && packet.0.len() <= 1400
            }),
        );
        assert!(tags.clone().all(|packet| packet.has_tag() == headroom));
        // The last fragment of each datagram has room in any case.
        assert_eq!(short.clone().filter(|packet| packet.has_tag()).count(), 2);
    }
}

/// A TCP connection between two guests.
struct Stream {
    sender: TcpStream,
    receiver: TcpStream,
}

impl Stream {
    fn open(town: &Town, from: &str, to: &str, ip: IpAddr) -> Stream {
        let listener = in_namespace(&town.ns(to), || TcpListener::bind(any(0))).unwrap();
        let to = SocketAddr::new(ip, listener.local_addr().unwrap().port());
        let sender = in_namespace(&town.ns(from), || TcpStream::connect(to)).unwrap();
        let (receiver, _) = listener.accept().unwrap();
        receiver.set_read_timeout(Some(PATIENCE)).unwrap();
        sender.set_write_timeout(Some(PATIENCE)).unwrap();
        Stream { sender, receiver }
    }

    /// All that is sent arrives, as it was.
    fn carry(&mut self, bytes: u32) {
        let sent: Vec<u8> = (0..bytes / 4).flat_map(u32::to_le_bytes).collect();
        let Stream { sender, receiver } = self;
        std::thread::scope(|scope| {
            scope.spawn(|| sender.write_all(&sent).unwrap());
            let mut received = vec![0; sent.len()];
            receiver.read_exact(&mut received).unwrap();
            assert!(received == sent);
        });
    }
}

/// How often the hosts have told a guest that what it sent is longer than the path takes.
fn told_too_long(town: &Town) -> u64 {
    let on = |host: &str| {
        let counts = in_namespace(&town.ns(host), || {
            run("cat /proc/thread-self/net/snmp6 | grep Icmp6OutPktTooBigs
                 awk '/^Icmp:/ && !names {names = $0; next} /^Icmp:/ {n = split(names, name); \
                     for (i = 1; i <= n; i++) if (name[i] == \"OutDestUnreachs\") print name[i], $i}' \
                     /proc/thread-self/net/snmp")
        });
        let numbers: Vec<u64> =
            counts.lines().map(|l| l.split_whitespace().nth(1).unwrap().parse().unwrap()).collect();
        assert_eq!(numbers.len(), 2, "{counts}");
        numbers.iter().sum::<u64>()
    };
    on("host") + on("other")
}

/// Connections of which the SYN was seen have segments that leave room. Those that are older have not: what the guests' kernels
/// send as one GSO packet is cut into smaller ones, so that each fits with its tag. The path is as wide as the LAN, or
/// (`group.tag.mtu`) narrower than that: then the LAN itself would carry what is too long, and it is seen here.
#[test]
fn no_segment_of_a_gso_packet_outgrows_the_path() {
    if !can_run("segments") {
        return;
    }
    for (wide, form) in [(true, "7"), (true, "hlc"), (false, "7")] {
        let town = Town::new(Plan::TwoHosts);
        if wide {
            town.widen(WIDE_MTU as u32);
        }
        let wires = wires(&town);
        let open = |from: &str, to: &str, six: bool| {
            Stream::open(&town, from, to, if six { town.ip6(to) } else { town.ip(to) })
        };
        let mut older = Vec::new();
        for (from, to) in BOTH_WAYS {
            older.extend([false, true].map(|six| (from, six, open(from, to, six))));
        }
        let mut gates = town.gates(&format!("{form} mtu={MTU}"));
        gates.let_writes_be_under_way();
        sent(&wires);
        for (from, six, stream) in &mut older {
            let before = gates.tags(from);
            stream.carry(4 << 20);
            let what = format!("{wide} {form} {from} {six}");
            let counted = since(&mut gates, from, &before);
            assert!(counted["tagged_gso_lowered"] > 0, "{what} {counted:?}");
            assert_eq!(counted["mss_lowered"], 0, "{what}");
            let packets = sent(&wires);
            let data = packets.iter().filter(|packet| packet.has_tcp_data());
            let (tagged, untagged): (Vec<_>, Vec<_>) = data.cloned().partition(Packet::has_tag);
            assert_eq!(longest(&tagged), MTU, "{what}: with its tag a segment fills the path");
            // One that the guest's kernel sent by itself cannot be cut.
            assert!(untagged.len() as u64 <= counted["gated_mtu"], "{what} {counted:?}");
            assert_eq!(longest(&packets), MTU, "{what}");
        }
        for (from, to) in BOTH_WAYS {
            for six in [false, true] {
                let (before, answering) = (gates.tags(from), gates.tags(to));
                open(from, to, six).carry(4 << 20);
                let what = format!("{wide} {form} {from} {six}");
                let counted = since(&mut gates, from, &before);
                assert_eq!(counted["tagged_gso_lowered"] + counted["gated_mtu"], 0, "{counted:?}");
                let answered = since(&mut gates, to, &answering)["mss_lowered"];
                assert_eq!((counted["mss_lowered"], answered), (1, 1), "{what}");
                let packets = sent(&wires);
                let mut data = packets.iter().filter(|packet| packet.has_tcp_data());
                assert!(data.all(Packet::has_tag), "{what}");
                assert_eq!(longest(&packets), MTU, "{what}");
            }
        }
        assert_eq!(told_too_long(&town), 0);
        for (member, _) in BOTH_WAYS {
            nothing_was_lost(&gates.tags(member));
        }
    }
}

/// As QUIC sends. Each datagram is what its sender made it: where it has room it gets a tag, and else it waits. The LAN's cards
/// cut the GSO packet, or hand it over whole.
#[test]
fn datagrams_of_a_gso_packet_arrive_one_by_one_as_they_were() {
    if !can_run("gso_datagrams") {
        return;
    }
    for (plain, form) in [(true, "7"), (false, "7"), (false, "hlc")] {
        let town = Town::new(Plan::TwoHosts);
        let mut gates = town.gates(form);
        gates.let_writes_be_under_way();
        let wires = if plain {
            wires(&town)
        } else {
            ["host", "other"].map(|host| Wire::of(&town.ns(host), "lan"))
        };
        let sockets = ["web", "db"].map(|who| socket(&town, who));
        for (nth, (from, to)) in BOTH_WAYS.into_iter().enumerate() {
            for (ip, headers, six) in [(town.ip(to), 28, false), (town.ip6(to), 48, true)] {
                let room = room(form, six);
                for (bytes, fits) in [(MTU - headers - room, true), (MTU - headers, false)] {
                    let what = format!("{plain} {form} {from} {six} {bytes}");
                    let (before, there) = (gates.tags(from), gates.tags(to));
                    let sent: Vec<u8> = (0..bytes * 20).map(|n| (n % 251) as u8).collect();
                    cut_into_datagrams(&sockets[nth], bytes);
                    sockets[nth].send_to(&sent, at(ip)).unwrap();
                    for datagram in sent.chunks(bytes) {
                        assert!(next(&sockets[1 - nth]) == datagram, "{what}");
                    }
                    let packets = sent_datagrams(&wires);
                    assert!(packets.iter().all(|packet| packet.has_tag() == fits), "{what}");
                    if plain {
                        assert_eq!((packets.len(), longest(&packets)), (20, MTU), "{what}");
                    }
                    let counted = since(&mut gates, from, &before);
                    assert_eq!(counted["tagged"] > 0, fits, "{what} {counted:?}");
                    assert_eq!(counted["gated_mtu"] > 0, !fits, "{what} {counted:?}");
                    assert_eq!(since(&mut gates, to, &there)["merged"] > 0, fits, "{what}");
                }
            }
        }
        for (member, _) in BOTH_WAYS {
            nothing_was_lost(&gates.tags(member));
        }
        assert_eq!(told_too_long(&town), 0);
    }
}

/// Those of this test: kernels speak by themselves, too.
fn sent_datagrams(wires: &[Wire; 2]) -> Vec<Packet> {
    sent(wires).into_iter().filter(|packet| packet.0.len() > 1000).collect()
}

/// What a member's programs have counted since then.
fn since(gates: &mut Gates, member: &str, before: &HashMap<String, u64>) -> HashMap<String, u64> {
    let now = gates.tags(member);
    now.into_iter().map(|(name, n)| (name.clone(), n - before[&name])).collect()
}
