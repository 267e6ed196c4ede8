//! The gate judges a packet before anybody else on the host does: rules that write marks, and the host's own ICMP errors.
#![allow(unsafe_code)]

use crate::can_run;
use crate::hostile::{ipv4, ipv6, send_raw};
use crate::lab::{MARKER, next, nothing_came, udp};
use crate::quotes::icmp_socket;
use crate::tagging::{PORT, any, at, socket, until_packets_pass_by_themselves, until_stat};
use crate::town::{Plan, Town};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;

/// What others do with marks, each of which would have carried a bit of a covered packet over to one that is not covered.
const OTHERS: [&str; 5] = [
    "iptables -t mangle -A PREROUTING -m conntrack --ctstate ESTABLISHED,RELATED -j CONNMARK --restore-mark
     iptables -t mangle -A POSTROUTING -j CONNMARK --save-mark",
    "nft 'table inet others {
       chain before { type filter hook prerouting priority -199; ct mark != 0 meta mark set ct mark
       }
       chain seen { type filter hook forward priority -300; meta mark != 0 ct mark set meta mark
       }
     }'",
    "nft 'table inet others {
       chain before { type filter hook prerouting priority -310; meta mark set 0xffffffff
       }
     }'",
    "nft 'table inet others {
       chain before { type filter hook prerouting priority -310; meta mark set 0x08000000
       }
     }'",
    "iptables -t mangle -A PREROUTING -p udp --dport 7000 -j TPROXY --on-port 7000 --tproxy-mark 0x8000000/0x8000000
     ip rule add fwmark 0x8000000/0x8000000 table 100; ip route add local default dev lo table 100",
];

/// A socket that packets to anybody can be led to.
fn transparent(town: &Town) -> UdpSocket {
    let socket = udp(&town.ns("host"), "0.0.0.0:7000");
    let on: libc::c_int = 1;
    // SAFETY: the descriptor is open, and the value is as long as is said.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_IP,
            libc::IP_TRANSPARENT,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    socket
}

#[test]
fn rules_that_write_marks_let_nothing_out_that_is_not_covered() {
    if !can_run("marks") {
        return;
    }
    for plan in [Plan::OneBridge, Plan::OneRouter] {
        for others in OTHERS {
            let town = Town::new(plan);
            let mut gates = town.gates("2");
            let [web, client] = ["web", "client"].map(|who| socket(&town, who));
            let to = at(town.ip("client"));
            let is_proxy = others.contains("TPROXY");
            if is_proxy && plan == Plan::OneBridge {
                continue;
            }
            let proxy = is_proxy.then(|| transparent(&town));
            if !is_proxy {
                town.on("host", others);
                // Its connection is known from then on, with whatever mark a covered packet has.
                gates.tell("web", "pending 0 3");
                gates.tell_all("commit 0 3");
                until_packets_pass_by_themselves(&mut gates, &web, &client, to);
                until_packets_pass_by_themselves(&mut gates, &web, &client, to);
                client.send_to(b"answer", at(town.ip("web"))).unwrap();
                assert_eq!(next(&web), b"answer");
            } else {
                town.on("host", others);
            }
            let on = format!("{plan:?}: {others}");
            gates.tell("web", "pending 0 4");
            web.send_to(b"uncovered", to).unwrap();
            until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
            udp(&town.ns("host"), &any(PORT + 1)).send_to(MARKER, to).unwrap();
            assert_eq!(next(&client), MARKER, "{on}");
            proxy.iter().for_each(nothing_came);
            assert_eq!(gates.host.tell("rules"), "in_place", "{on}");
            gates.tell_all("commit 0 4");
            assert_eq!(next(proxy.as_ref().unwrap_or(&client)), b"uncovered", "{on}");
        }
    }
}

/// The host would send an ICMP error to whomever a packet names as its sender.
#[test]
fn the_host_quotes_nothing_that_is_held() {
    if !can_run("host_quotes") {
        return;
    }
    for is_fenced in [false, true] {
        let town = Town::new(Plan::OneRouter);
        town.on("host", "ip link set c0 mtu 1280; ip route add unreachable 192.0.2.0/24");
        let mut gates = town.gates("2");
        let client = socket(&town, "client");
        let errors = [false, true].map(|six| icmp_socket(&town.ns("client"), six));
        gates.tell("web", "pending 0 9");
        if is_fenced {
            gates.tell_all("fence");
        }
        let (IpAddr::V4(from), IpAddr::V6(from6)) = (town.ip("client"), town.ip6("client")) else {
            panic!("an address of each family");
        };
        let secret = [0x5e; 1300];
        let mut packets: Vec<(IpAddr, Vec<u8>)> = Vec::new();
        for to in ["10.71.2.9", "192.0.2.1", "203.0.113.1", "10.71.3.9"] {
            let IpAddr::V4(to) = to.parse().unwrap() else { panic!("IPv4") };
            let mut packet = ipv4(from, to, &[], 0x4000, &secret);
            if to.octets()[..3] == [10, 71, 2] {
                packet[8] = 1;
            }
            packets.push((to.into(), packet));
        }
        for to in ["fd71:0:0:2::9", "fd71:0:0:7::9", "fd71:0:0:3::9"] {
            let IpAddr::V6(to) = to.parse().unwrap() else { panic!("IPv6") };
            let mut packet = ipv6(from6, to, 17, &secret);
            if to.segments()[3] == 2 {
                packet[7] = 1;
            }
            packets.push((to.into(), packet));
        }
        let sent = packets.len() as u64;
        for (to, packet) in packets {
            send_raw(&town.ns("web"), to, &packet);
        }
        until_stat(&mut gates, "web", "held_packets", |n| n >= sent);
        let host = udp(&town.ns("host"), &any(PORT + 1));
        host.send_to(MARKER, at(town.ip("client"))).unwrap();
        assert_eq!(next(&client), MARKER);
        for errors in &errors {
            errors.set_nonblocking(true).unwrap();
            let mut buffer = [0; 2048];
            while let Ok(len) = errors.recv(&mut buffer) {
                assert!(!buffer[..len].windows(8).any(|w| w == [0x5e; 8]), "fenced: {is_fenced}");
            }
            errors.set_nonblocking(false).unwrap();
        }
        if !is_fenced {
            // What is covered is the host's to answer, as ever.
            gates.tell_all("commit 0 9");
            for errors in &errors {
                while !next(errors).windows(8).any(|w| w == [0x5e; 8]) {}
            }
        }
    }
}
