//! The gate on real packets: guest, host and client in network namespaces.
//!
//! "Held" is shown by the gate's own count and by an empty socket at the client; "nothing got out"
//! by a marker that the host sends afterwards and that must be the first to arrive. So no test
//! waits for something not to happen.

mod drive;
mod first;
mod gates;
mod hostile;
mod interfaces;
mod lab;
mod loading;
mod quotes;
mod rules_kept;
mod segments;
mod tagging;
mod town;
mod ways;
mod wire;

use drive::Drive;
use lab::{
    INTERFACE, Lab, MARKER, PATIENCE, in_namespace, next, nothing_came, obstacle, udp, until,
};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{Firewall, Installed, Marks, MemberRules, RulesError, Topology};

const PORT: u16 = 7000;
const TOPOLOGIES: [Topology; 2] = [Topology::Routed, Topology::Bridged];
const BACKENDS: [&str; 2] = ["nft", "iptables-nft"];

/// Says by name what is not run, and why.
fn can_run(test: &str) -> bool {
    match obstacle() {
        None => true,
        Some(why) => {
            skipped(test, why);
            false
        }
    }
}

fn skipped(test: &str, why: &str) {
    // Not by eprintln: the test harness swallows that of a test that passes.
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {why}");
}

/// The backends that can queue here; the others are named as skipped.
fn backends(test: &str, lab: &Lab) -> Vec<&'static str> {
    let host = lab.host();
    let able = |backend: &&&str| {
        let found = in_namespace(&host, || {
            let firewall = Firewall::detect_only("test", |name| name == **backend)?;
            firewall.name_for(lab.topology()).map(drop)
        });
        if let Err(e) = &found {
            let on = format!("{:?}", lab.topology()).to_lowercase();
            skipped(&format!("{test} with {backend}, {on}"), &e.to_string());
        }
        found.is_ok()
    };
    BACKENDS.iter().filter(able).copied().collect()
}

fn to_client(lab: &Lab) -> SocketAddr {
    SocketAddr::new(lab.client_ip().parse().expect("an address"), PORT)
}

#[test]
fn a_packet_is_held_until_its_writes_are_committed_and_order_is_kept() {
    if !can_run("held_until_committed") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("held_until_committed", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
            let (guest, client) =
                (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
            let to = to_client(&lab);

            guest.send_to(b"shut", to).unwrap();
            gate.until_stat("held_packets", |n| n == 1);
            nothing_came(&client);
            gate.tell("lease");
            assert_eq!(next(&client), b"shut", "nothing was written yet, so the lease is enough");

            gate.tell("pending 0 1");
            guest.send_to(b"after 1", to).unwrap();
            gate.until_stat("held_packets", |n| n == 1);
            gate.tell("pending 0 3");
            guest.send_to(b"after 3", to).unwrap();
            gate.until_stat("held_packets", |n| n == 2);
            gate.tell("pending 1 1");
            guest.send_to(b"after 3 and 1", to).unwrap();
            gate.until_stat("held_packets", |n| n == 3);
            nothing_came(&client);
            gate.tell("commit 0 2");
            assert_eq!(next(&client), b"after 1");
            assert_eq!(gate.stat("held_packets"), 2);
            nothing_came(&client);
            gate.tell("commit 0 9");
            assert_eq!(next(&client), b"after 3");
            nothing_came(&client);
            gate.tell("commit 1 1");
            assert_eq!(next(&client), b"after 3 and 1");

            guest.send_to(b"covered", to).unwrap();
            assert_eq!(next(&client), b"covered");
            assert_eq!(gate.stat("passed_covered"), 1);
            gate.tell("verify");
            // All of it is committed, and the rules stay all the same: another site may be recovered.
            assert_eq!(gate.tell("stop"), "dropped=0");
            guest.send_to(b"silent", to).unwrap();
            lab.send_marker(PORT);
            assert_eq!(next(&client), MARKER);
            gate.tell(&format!(
                "remove member=web interface={INTERFACE} queue=11 pin=/sys/fs/bpf/tidelock"
            ));
            assert!(!lab.on_host("iptables-nft-save").contains("TL-"));
            assert!(!lab.on_host("nft list ruleset").contains("tidelock"));
            guest.send_to(b"free", to).unwrap();
            assert_eq!(next(&client), b"free");
        }
    }
}

#[test]
fn packets_to_the_host_itself_are_held_too() {
    if !can_run("to_the_host") {
        return;
    }
    for topology in TOPOLOGIES {
        let lab = Lab::new(topology);
        let mut gate = Drive::start(&lab, "any", 11, 1024, 600_000);
        let (guest, host) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.host(), "0.0.0.0:7000"));
        guest.send_to(b"to the host", "10.71.0.1:7000").unwrap();
        gate.until_stat("held_packets", |n| n == 1);
        nothing_came(&host);
        gate.tell("lease");
        assert_eq!(next(&host), b"to the host");
    }
}

#[test]
fn pure_acks_pass_beside_held_packets_but_not_in_their_own_flow() {
    if !can_run("pure_acks") {
        return;
    }
    for topology in TOPOLOGIES {
        let lab = Lab::new(topology);
        let mut gate = Drive::start(&lab, "any", 11, 4096, 600_000);
        gate.tell("lease");
        let listener = in_namespace(&lab.guest(), || TcpListener::bind("0.0.0.0:7000")).unwrap();
        let mut client =
            in_namespace(&lab.client(), || TcpStream::connect("10.71.0.2:7000")).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.set_write_timeout(Some(PATIENCE)).unwrap();

        gate.tell("pending 0 1");
        let other = udp(&lab.guest(), "0.0.0.0:0");
        other.send_to(b"held", to_client(&lab)).unwrap();
        gate.until_stat("held_packets", |n| n == 1);
        // Many windows full: without the guest's acknowledgements this would stand still.
        let upload = vec![0x5a; 8 << 20];
        std::thread::scope(|scope| {
            scope.spawn(|| client.write_all(&upload).unwrap());
            let mut received = vec![0; upload.len()];
            guest.read_exact(&mut received).unwrap();
            assert_eq!(received, upload);
        });
        assert!(gate.stat("passed_pure_acks") > 0);
        assert_eq!(gate.stat("held_packets"), 1, "only the datagram waits");

        guest.write_all(b"reply").unwrap();
        gate.until_stat("held_packets", |n| n >= 2);
        client.write_all(b"more").unwrap();
        let before = gate.stat("held_packets");
        let mut more = [0; 4];
        guest.read_exact(&mut more).unwrap();
        gate.until_stat("held_packets", |n| n > before);
        client.set_nonblocking(true).unwrap();
        let nothing = client.read(&mut [0; 8]).unwrap_err();
        assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
        client.set_nonblocking(false).unwrap();
        gate.tell("commit 0 1");
        let mut reply = [0; 5];
        client.read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"reply");
    }
}

/// MPTCP ends a connection by an option of a segment that has neither payload nor FIN.
#[test]
fn the_end_of_an_mptcp_connection_is_held() {
    if !can_run("mptcp") {
        return;
    }
    for topology in TOPOLOGIES {
        let lab = Lab::new(topology);
        let Some(listener) = lab::mptcp(&lab.guest()) else {
            return skipped("mptcp", "the kernel has no MPTCP");
        };
        let mut gate = Drive::start(&lab, "any", 11, 4096, 600_000);
        gate.tell("lease");
        lab::bind(&listener, [10, 71, 0, 2], PORT);
        let listener = TcpListener::from(listener);
        let client = lab::mptcp(&lab.client()).expect("it is the same kernel");
        lab::connect(&client, [10, 71, 0, 2], PORT);
        let mut client = TcpStream::from(client);
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(b"do it").unwrap();
        guest.read_exact(&mut [0; 5]).unwrap();

        // The end is the answer.
        gate.tell("pending 0 1");
        drop(guest);
        gate.until_stat("held_packets", |n| n >= 1);
        client.set_nonblocking(true).unwrap();
        let nothing = client.read(&mut [0; 8]).unwrap_err();
        assert_eq!(nothing.kind(), ErrorKind::WouldBlock, "{topology:?}");
        client.set_nonblocking(false).unwrap();
        gate.tell("commit 0 1");
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn the_gate_shuts_when_the_lease_ends_and_for_good_when_fenced() {
    if !can_run("lease") {
        return;
    }
    let lab = Lab::new(Topology::Routed);
    let mut gate = Drive::start(&lab, "any", 11, 1024, 300);
    let (guest, client) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
    let to = to_client(&lab);
    gate.tell("lease");
    // Nothing happens but time: the timer alone must shut the gate.
    gate.until_stat("shut", |shut| shut == 1);
    guest.send_to(b"covered but late", to).unwrap();
    gate.until_stat("held_packets", |n| n == 1);
    nothing_came(&client);
    gate.tell("mode async");
    assert_eq!(next(&client), b"covered but late", "async needs no lease");
    gate.tell("pending 0 1");
    guest.send_to(b"uncovered", to).unwrap();
    assert_eq!(next(&client), b"uncovered");
    assert_eq!(gate.stat("async"), 1);
    gate.tell("fence");
    gate.tell("lease");
    gate.tell("commit 0 1");
    guest.send_to(b"fenced", to).unwrap();
    gate.until_stat("held_packets", |n| n == 1);
    for mode in ["pipelined", "sync", "async"] {
        gate.tell(&format!("mode {mode}"));
        assert_eq!(gate.stat("held_packets"), 1);
    }
    assert!(gate.tell("stop").starts_with("dropped=1"));
    lab.send_marker(PORT);
    assert_eq!(next(&client), MARKER, "what was held is dropped, and the rules stay");
}

#[test]
fn a_stop_with_uncommitted_writes_leaves_the_member_silent() {
    if !can_run("stop_unsettled") {
        return;
    }
    let lab = Lab::new(Topology::Routed);
    let mut gate = Drive::start(&lab, "any", 11, 1024, 600_000);
    let (guest, client) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
    gate.tell("lease");
    gate.tell("pending 0 7");
    assert_eq!(gate.tell("stop"), "dropped=0");
    let before = lab.came_to_queue_rules();
    guest.send_to(b"silent", to_client(&lab)).unwrap();
    until("the packet met the rules", || lab.came_to_queue_rules() > before);
    lab.send_marker(PORT);
    assert_eq!(next(&client), MARKER);
}

#[test]
fn killed_at_any_time_nothing_leaks_not_even_while_a_new_gate_takes_over() {
    if !can_run("killed") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("killed", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let mut gate = Drive::start(&lab, backend, 11, 1 << 16, 600_000);
            let (guest, client) =
                (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
            let to = to_client(&lab);
            gate.tell("lease");
            gate.tell("pending 0 1");
            guest.send_to(b"held when it died", to).unwrap();
            gate.until_stat("held_packets", |n| n == 1);
            gate.kill();

            let enough = AtomicBool::new(false);
            let mut gate = std::thread::scope(|scope| {
                let flood = scope.spawn(|| {
                    while !enough.load(Ordering::SeqCst) {
                        guest.send_to(b"flood", to).unwrap();
                        std::thread::yield_now();
                    }
                });
                let mut last = None;
                for queue in 12..17 {
                    // Another queue each time, so the rules differ, and a kill in between.
                    drop(last.take());
                    let mut gate = Drive::start(&lab, backend, queue, 1 << 16, 600_000);
                    gate.until_stat("held_packets", |n| n > 0);
                    last = Some(gate);
                }
                enough.store(true, Ordering::SeqCst);
                flood.join().unwrap();
                last.unwrap()
            });
            lab.send_marker(PORT);
            assert_eq!(next(&client), MARKER, "{topology:?} {backend}");
            gate.tell("lease");
            assert_eq!(next(&client), b"flood", "the new gate works");
        }
    }
}

#[test]
fn a_full_queue_drops_at_its_tail_and_counts() {
    if !can_run("overflow") {
        return;
    }
    let lab = Lab::new(Topology::Routed);
    let mut gate = Drive::start(&lab, "any", 11, 32, 600_000);
    let (guest, client) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
    gate.tell("lease");
    gate.tell("pending 0 1");
    for nth in 0u8..100 {
        guest.send_to(&[nth], to_client(&lab)).unwrap();
    }
    gate.until_stat("kernel_dropped_full", |n| n == 68);
    gate.until_stat("held_packets", |n| n == 32);
    assert_eq!(gate.stat("refused"), 0);
    gate.tell("commit 0 1");
    for nth in 0..32 {
        assert_eq!(next(&client), [nth]);
    }
    guest.send_to(b"room again", to_client(&lab)).unwrap();
    assert_eq!(next(&client), b"room again");
}

#[test]
fn an_interface_that_goes_down_takes_its_packets_along_and_no_others() {
    if !can_run("interface_down") {
        return;
    }
    let lab = Lab::new(Topology::Routed);
    let mut gate = Drive::start(&lab, "any", 11, 1024, 600_000);
    let (guest, client) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
    gate.tell("lease");
    gate.tell("pending 0 1");
    guest.send_to(b"lost with the link", to_client(&lab)).unwrap();
    gate.until_stat("held_packets", |n| n == 1);
    lab.on_host(&format!("ip link set {INTERFACE} down; ip link set {INTERFACE} up"));
    gate.until_stat("kernel_queued", |n| n == 0);
    gate.tell("commit 0 1");
    // The kernel's refusal of the verdict is read with the next packet at the latest. The link
    // itself may take a moment to come up.
    client.set_nonblocking(true).unwrap();
    until("a packet arrives", || {
        guest.send_to(b"next", to_client(&lab)).unwrap();
        client.recv(&mut [0; 16]).is_ok_and(|len| len == 4)
    });
    gate.until_stat("late_verdicts", |n| n == 1);
    assert_eq!(gate.stat("held_packets"), 0);
}

#[test]
fn a_stream_of_large_segments_passes_whole() {
    if !can_run("gso_stream") {
        return;
    }
    for topology in TOPOLOGIES {
        let lab = Lab::new(topology);
        let mut gate = Drive::start(&lab, "any", 11, 1 << 16, 600_000);
        gate.tell("lease");
        let listener = in_namespace(&lab.client(), || TcpListener::bind("0.0.0.0:7000")).unwrap();
        let to = to_client(&lab);
        let mut guest = in_namespace(&lab.guest(), || TcpStream::connect(to)).unwrap();
        let (mut client, _) = listener.accept().unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        guest.set_write_timeout(Some(PATIENCE)).unwrap();
        gate.tell("tide 10");
        let sent: Vec<u8> = (0u32..8 << 20).flat_map(u32::to_le_bytes).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| guest.write_all(&sent).unwrap());
            let mut received = vec![0; sent.len()];
            client.read_exact(&mut received).unwrap();
            assert!(received == sent);
        });
        let stats = gate.stats();
        assert!(stats["released_packets"] > 0);
        let mean = stats["released_bytes"] / stats["released_packets"];
        assert!(mean > 1500, "segments of {mean} bytes: the kernel has cut them: {stats:?}");
        assert_eq!(stats["unread"] + stats["late_verdicts"], 0);
    }
}

#[test]
fn ipv6_is_held_and_neighbour_discovery_is_not() {
    if !can_run("ipv6") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("ipv6", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
            lab.guest_speaks_ipv6();
            let (guest, client) = (udp(&lab.guest(), "[::]:7000"), udp(&lab.client(), "[::]:7000"));
            let to: SocketAddr = format!("[{}]:{PORT}", lab.client_ip6()).parse().unwrap();

            // While the gate is shut nobody is told that the guest is there.
            client.send_to(b"to the guest", ("fd71::2", PORT)).unwrap();
            until("it has answered", || gate.stat("refused") + gate.stat("held_packets") > 0);
            nothing_came(&guest);
            // Then it must answer a solicitation, and be answered.
            gate.tell("lease");
            until("the guest is found", || {
                client.send_to(b"to the guest", ("fd71::2", PORT)).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(50));
                guest.set_nonblocking(true).unwrap();
                let heard = guest.recv(&mut [0; 64]).is_ok();
                guest.set_nonblocking(false).unwrap();
                heard
            });
            guest.send_to(&[7; 1000], to).unwrap();
            assert_eq!(next(&client), [7; 1000]);
            gate.tell("pending 0 1");
            guest.send_to(b"uncovered", to).unwrap();
            gate.until_stat("held_packets", |n| n >= 1);
            nothing_came(&client);
            gate.tell("commit 0 1");
            assert_eq!(next(&client), b"uncovered");
        }
    }
}

#[test]
fn frames_that_the_queue_cannot_judge_do_not_cross_the_bridge() {
    if !can_run("other_frames") {
        return;
    }
    let lab = Lab::new(Topology::Bridged);
    let _gate = Drive::start(&lab, "any", 11, 1024, 600_000);
    // EtherType 0x88b5 is for local experiments. The host's own frame is the marker.
    let python = |what: &str| {
        format!(
            "python3 -c 'import socket\ns = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, \
             socket.htons(0x88b5))\n{what}'"
        )
    };
    let send = |interface: &str, text: &str| {
        python(&format!(
            "s.bind((\"{interface}\", 0))\ns.send(b\"\\xff\" * 6 + b\"\\x02\" + b\"\\0\" * 5 + \
             b\"\\x88\\xb5{text}\".ljust(60))"
        ))
    };
    let receive = python(
        "s.bind((\"c0\", 0x88b5))\nprint(\"ready\", flush=True)\nprint(s.recv(99)[14:20].decode())",
    );
    let mut receiver = in_namespace(&lab.client(), || {
        std::process::Command::new("sh")
            .args(["-c", &receive])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    });
    let mut output = std::io::BufReader::new(receiver.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    let guest_frame = send("g0", "escape");
    in_namespace(&lab.guest(), || {
        assert!(
            std::process::Command::new("sh").args(["-c", &guest_frame]).status().unwrap().success()
        );
    });
    lab.on_host(&send("br0", "marker"));
    let mut first = String::new();
    std::io::BufRead::read_line(&mut output, &mut first).unwrap();
    receiver.wait().unwrap();
    assert_eq!(first, "marker\n");
}

fn verify(firewall: &Firewall, installed: &Installed) -> Result<(), RulesError> {
    firewall.verify([installed]).pop().expect("one answer")
}

#[test]
fn rules_are_idempotent_replace_stale_ones_and_leave_the_users_own_alone() {
    if !can_run("rules") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("rules", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            lab.on_host("iptables -A FORWARD -p udp --dport 9 -j DROP; iptables -t raw -A PREROUTING -p udp --dport 9 -j DROP");
            let list = "iptables-nft-save -t raw; ip6tables-nft-save -t raw; \
                        nft list ruleset";
            let before = lab.on_host("iptables-save | grep -v '^[#:]'");
            in_namespace(&lab.host(), || {
                let mut firewall = Firewall::detect_only("test", |name| name == backend).unwrap();
                assert_eq!(firewall.name(), backend);
                let rules = |interface: &str, queue| MemberRules {
                    member: "web".into(),
                    interface: interface.into(),
                    topology,
                    queue: QueueNumber(queue),
                    marks: None,
                    index: None,
                    only_that_index: false,
                };
                firewall.install(&rules("stale0", 3)).unwrap();
                let first = firewall.install(&rules(INTERFACE, 4)).unwrap();
                let again = firewall.install(&rules(INTERFACE, 4)).unwrap();
                assert_eq!(first, again);
                assert_eq!(first.notes, Vec::<String>::new());
                verify(&firewall, &first).unwrap();
                let listed = lab.on_host(list);
                assert!(!listed.contains("stale0"), "{listed}");

                let neighbour = MemberRules { member: "db".into(), ..rules("other0", 5) };
                let second = firewall.install(&neighbour).unwrap();
                verify(&firewall, &first).expect("another member's rules may come first");
                firewall.remove("db").unwrap();
                verify(&firewall, &first).expect("and go again");
                let changed = verify(&firewall, &second).unwrap_err();
                assert!(!matches!(changed, RulesError::NotAllowed { .. }), "{changed}");

                // Another process leaves alone what it has not made, and takes over what is its own.
                let mut other = Firewall::detect_only("another host", |n| n == backend).unwrap();
                other.install(&neighbour).unwrap();
                verify(&firewall, &first).expect("it has another host's name");
                let mut other = Firewall::detect_only("test", |n| n == backend).unwrap();
                other.install(&neighbour).unwrap();
                let listed = lab.on_host(list);
                assert!(listed.contains(INTERFACE) && listed.contains("other0"), "{listed}");
                other.remove("db").unwrap();
                let listed = lab.on_host(list);
                assert!(listed.contains(INTERFACE) && !listed.contains("other0"), "{listed}");
                assert!(!listed.contains("another"), "{listed}");
                verify(&firewall, &first).expect("it is as it was");

                if backend.starts_with("iptables") {
                    let iptables = backend;
                    lab.on_host(&format!("{iptables} -t raw -I PREROUTING -j ACCEPT"));
                    let ahead = verify(&firewall, &first).unwrap_err().to_string();
                    assert!(ahead.contains("-A PREROUTING -j ACCEPT"), "{ahead}");
                    lab.on_host(&format!("{iptables} -t raw -D PREROUTING -j ACCEPT"));
                }
                firewall.remove("web").unwrap();
                firewall.remove("web").expect("removing twice is removing once");
            });
            assert_eq!(lab.on_host("iptables-save | grep -v '^[#:]'"), before);
            let left = lab.on_host(list);
            assert!(!left.contains("TL-") && !left.contains("tidelock"), "{left}");
        }
    }
}

/// Whoever takes the rule away by which nftables queues opens nothing, and it is noticed.
#[test]
fn without_the_rule_that_queues_nftables_drops() {
    if !can_run("deleted") {
        return;
    }
    let able = backends("deleted", &Lab::new(Topology::Routed));
    for backend in able.into_iter().filter(|backend| backend.starts_with("nft")) {
        let lab = Lab::new(Topology::Routed);
        let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
        let (guest, client) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
        gate.tell("lease");
        gate.tell("verify");
        lab.on_host(
            "t=$(nft list tables | sed -n 's/table inet //p')
             c=$(nft list table inet $t | sed -n 's/.*chain \\(held_[^ ]*\\) .*/\\1/p')
             h=$(nft -a list chain inet $t $c | sed -n '/counter/s/.*handle //p')
             nft delete rule inet $t $c handle $h",
        );
        let said = gate.tell_refused("verify");
        assert!(said.contains(backend) && said.contains("missing: counter"), "{said}");
        guest.send_to(b"deleted", to_client(&lab)).unwrap();
        lab.on_host(&format!("ping -q -c 1 {}", lab.client_ip()));
        lab.send_marker(PORT);
        assert_eq!(next(&client), MARKER);
    }
}

/// One packet filter takes over from another, as after an update of the kernel or of this program.
#[test]
fn what_another_packet_filter_holds_is_taken_over_without_a_gap() {
    if !can_run("taken_over") {
        return;
    }
    for topology in TOPOLOGIES {
        let able = backends("taken_over", &Lab::new(topology));
        let lab = Lab::new(topology);
        let (guest, client) = (udp(&lab.guest(), "0.0.0.0:0"), udp(&lab.client(), "0.0.0.0:7000"));
        let index = lab.on_host(&format!("ip -o link show {INTERFACE} | cut -d: -f1"));
        let rules = MemberRules {
            member: "web".into(),
            interface: INTERFACE.into(),
            topology,
            queue: QueueNumber(11),
            marks: Some(Marks { mask: 0xf0, pass: 0x10 }),
            index: index.trim().parse().ok(),
            only_that_index: true,
        };
        let install = |backend: &str| {
            let mut firewall = Firewall::detect_only("test", |name| name == backend).unwrap();
            let installed = firewall.install(&rules).unwrap();
            assert_eq!((installed.backend.as_str(), &installed.notes), (backend, &Vec::new()));
            verify(&firewall, &installed).unwrap();
        };
        in_namespace(&lab.host(), || install(able[0]));
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !enough.load(Ordering::SeqCst) {
                    guest.send_to(b"flood", to_client(&lab)).unwrap();
                    std::thread::yield_now();
                }
            });
            for backend in able.iter().cycle().take(3 * able.len()) {
                in_namespace(&lab.host(), || install(backend));
                let stale = lab.on_host("iptables-nft-save").contains("TL-");
                assert_eq!(stale, backend.starts_with("iptables"), "after {backend}");
            }
            enough.store(true, Ordering::SeqCst);
        });
        lab.send_marker(PORT);
        assert_eq!(next(&client), MARKER, "{topology:?}");
    }
}

#[test]
fn a_packet_that_is_let_through_still_meets_the_users_own_rules() {
    if !can_run("users_rules") {
        return;
    }
    let lab = Lab::new(Topology::Routed);
    lab.on_host("iptables -A FORWARD -p udp --dport 7001 -j DROP");
    let mut gate = Drive::start(&lab, "any", 11, 1024, 600_000);
    let guest = udp(&lab.guest(), "0.0.0.0:0");
    let (open, barred) = (udp(&lab.client(), "0.0.0.0:7000"), udp(&lab.client(), "0.0.0.0:7001"));
    guest.send_to(b"barred", (lab.client_ip(), 7001)).unwrap();
    guest.send_to(b"open", (lab.client_ip(), 7000)).unwrap();
    gate.until_stat("held_packets", |n| n == 2);
    gate.tell("lease");
    assert_eq!(next(&open), b"open");
    nothing_came(&barred);
}

/// Rules queue by name. Linux 6.2 and later rename an interface while it is up.
#[test]
fn a_renamed_interface_is_cut_off() {
    if !can_run("renamed") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("renamed", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
            let guest = udp(&lab.guest(), "0.0.0.0:0");
            let client = udp(&lab.client(), "0.0.0.0:7000");
            let send = |text| guest.send_to(text, (lab.client_ip(), 7000)).unwrap();
            send(b"first");
            gate.until_stat("held_packets", |n| n == 1);
            gate.tell("lease");
            assert_eq!(next(&client), b"first");
            let rename = |from, to| lab.on_host(&format!("ip link set {from} name {to}"));
            for n in 1..=2 {
                gate.tell(&format!("pending 0 {n}"));
                rename(INTERFACE, "other0");
                send(b"not covered");
                // Whatever becomes of it is done when that has come back.
                lab.on_host(&format!("ping -q -c 1 {}", lab.client_ip()));
                nothing_came(&client);
                assert_eq!(gate.tell("look"), "");
                rename("other0", INTERFACE);
                assert_eq!(gate.tell("look"), "");
                send(b"held");
                gate.until_stat("held_packets", |n| n == 1);
                gate.tell(&format!("commit 0 {n}"));
                assert_eq!(next(&client), b"held");
            }
        }
    }
}

#[test]
fn what_is_missing_is_said() {
    if !can_run("errors") {
        return;
    }
    let lab = Lab::new(Topology::Bridged);
    let _first = Drive::start(&lab, "any", 11, 64, 1_000);
    let second = Lab::new(Topology::Bridged);
    let start = |queue| {
        format!(
            "start member=web interface={INTERFACE} topology=bridged queue={queue} len=64 \
             mode=pipelined lease_ms=1000 backend=any"
        )
    };
    let mut same = Drive::spawn(&lab.host());
    let said = same.tell_refused(&start(11));
    assert!(said.contains("queue 11 is in use by another process"), "{said}");
    second.on_host("sysctl -qw net.bridge.bridge-nf-call-ip6tables=0");
    if !in_namespace(&second.host(), || {
        Firewall::detect("test").unwrap().name_for(Topology::Bridged).unwrap() == "nft"
    }) {
        let mut unseen = Drive::spawn(&second.host());
        let said = unseen.tell_refused(&start(12));
        assert!(said.contains("sysctl -w net.bridge.bridge-nf-call-ip6tables=1"), "{said}");
    }
}
