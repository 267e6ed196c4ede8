//! Tags on real packets: two members of a group and a client outside.

use crate::can_run;
use crate::gates::Gates;
use crate::lab::{MARKER, in_namespace, next, nothing_came, udp, until};
use crate::town::{Plan, Town};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub const PORT: u16 = 7000;

pub fn any(port: u16) -> String {
    format!("[::]:{port}")
}

/// A socket for both families at a fixed port.
pub fn socket(town: &Town, who: &str) -> UdpSocket {
    udp(&town.ns(who), &any(PORT))
}

pub fn at(ip: IpAddr) -> SocketAddr {
    // The sockets speak IPv6; an IPv4 address is one of theirs, too.
    let ip = match ip {
        IpAddr::V4(v4) => IpAddr::V6(v4.to_ipv6_mapped()),
        v6 => v6,
    };
    SocketAddr::new(ip, PORT)
}

/// What the programs count for each packet whose sender's P was merged: with a tag by the receiver's, and where both
/// are on one host by the sender's, without one.
pub fn merges(town: &Town, gates: &mut Gates, from: &str, to: &str) -> u64 {
    match town.plan {
        Plan::TwoHosts => gates.tags(to)["merged"],
        Plan::OneBridge | Plan::OneRouter => gates.tags(from)["merged_here"],
    }
}

/// At least: the guests' kernels send by themselves, too (multicast listener reports).
pub fn until_stat(gates: &mut Gates, member: &str, name: &str, wanted: impl Fn(u64) -> bool) {
    until(&format!("{name} of {member}"), || wanted(gates.stats(member)[name]));
}

/// From `web`, which is covered. The gate's thread says that the queue is empty; until then packets go through it.
pub fn until_packets_pass_by_themselves(
    gates: &mut Gates,
    web: &UdpSocket,
    client: &UdpSocket,
    to: SocketAddr,
) {
    until("a packet passes by itself", || {
        web.send_to(b"covered", to).unwrap();
        assert_eq!(next(client), b"covered");
        gates.tags("web")["covered"] > 0
    });
}

#[test]
fn what_a_member_depends_on_goes_with_its_packets() {
    if !can_run("tag_carries") {
        return;
    }
    for plan in Plan::ALL {
        for (form, own, commit) in
            [("2", "pending 0 5", "commit 0 5"), ("hlc", "pending 0 5 700", "watermark 700")]
        {
            for six in [false, true] {
                let town = Town::new(plan);
                let ip = |who: &str| at(if six { town.ip6(who) } else { town.ip(who) });
                let mut gates = town.gates(form);
                let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
                // Nothing has been written: there is nothing to tell.
                web.send_to(b"before", ip("db")).unwrap();
                assert_eq!(next(&db), b"before");
                let tags = gates.tags("web");
                assert_eq!(tags["tagged"], 0);
                assert_eq!(tags["untagged_covered"] >= 1, plan == Plan::TwoHosts, "{tags:?}");
                gates.tell("web", own);
                web.send_to(b"hello", ip("db")).unwrap();
                assert_eq!(next(&db), b"hello", "{plan:?} {form}");
                let tags = gates.tags("db");
                let learnt = if form == "hlc" { tags["hlc"] } else { tags["p0"] };
                assert_eq!(learnt, if form == "hlc" { 700 } else { 5 });
                assert!(merges(&town, &mut gates, "web", "db") >= 1);
                let tagged = gates.tags("web")["tagged"];
                assert_eq!(tagged >= 1, plan == Plan::TwoHosts, "{tagged}");

                // What db tells outsiders now may depend on web's write.
                db.send_to(b"answer", ip("client")).unwrap();
                until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
                nothing_came(&client);
                gates.of("db").tell(commit);
                assert_eq!(next(&client), b"answer", "{plan:?} {form}");
            }
        }
    }
}

#[test]
fn a_capture_inside_the_guest_shows_no_option() {
    if !can_run("capture") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("3");
        gates.tell("web", "pending 0 5");
        let mut tcpdump = in_namespace(&town.ns("db"), || {
            Command::new("tcpdump")
                .args(["-l", "-nn", "-v", "--immediate-mode", "-i", "e0"])
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("tcpdump")
        });
        let mut errors = BufReader::new(tcpdump.stderr.take().unwrap()).lines();
        assert!(errors.any(|line| line.unwrap().contains("listening")));
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        let before = gates.tags("web")["tagged"];
        for ip in [town.ip("db"), town.ip6("db")] {
            web.send_to(b"udp", at(ip)).unwrap();
            assert_eq!(next(&db), b"udp");
            let listener = in_namespace(&town.ns("db"), || TcpListener::bind(any(0))).unwrap();
            let port = listener.local_addr().unwrap().port();
            let mut from =
                in_namespace(&town.ns("web"), || TcpStream::connect((ip, port))).unwrap();
            from.write_all(b"tcp").unwrap();
            let mut got = [0; 3];
            listener.accept().unwrap().0.read_exact(&mut got).unwrap();
        }
        let tagged = gates.tags("web")["tagged"] - before;
        assert_eq!(tagged >= 6, plan == Plan::TwoHosts, "{tagged}");
        spoof(&town, "client", "db", &[158, 12, 0x11, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
        assert_eq!(next(&db), b"spoofed");
        client.send_to(b"the end", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"the end");
        let mut seen = String::new();
        let mut output = BufReader::new(tcpdump.stdout.take().unwrap());
        let last = format!("{}.{PORT} > {}.{PORT}:", town.ip("client"), town.ip("db"));
        while !seen.contains(&last) {
            assert_ne!(output.read_line(&mut seen).unwrap(), 0, "tcpdump ended");
        }
        tcpdump.kill().unwrap();
        tcpdump.wait().unwrap();
        for ip in ["web", "db"].map(|who| (town.ip(who), town.ip6(who))) {
            assert!(seen.contains(&format!("{}.", ip.0)) && seen.contains(&format!("{}.", ip.1)));
        }
        assert!(seen.contains("Flags [P.]"), "{seen}");
        // Kernels have options of their own in their multicast reports.
        let lines = seen.lines().filter(|line| !line.contains("options (RA)"));
        for line in lines {
            for option in ["options (", "DSTOPT", "unknown 158"] {
                assert!(!line.contains(option), "{line}");
            }
        }
        assert!(merges(&town, &mut gates, "web", "db") > 0);
        let tags = gates.tags("db");
        assert_eq!((tags["stripped_foreign"], tags["p0"]), (1, 5), "{tags:?}");
    }
}

/// A datagram with options of the sender's choice, from its own address and port.
fn spoof(town: &Town, from: &str, to: &str, options: &[u8]) {
    let to = town.ip(to);
    let hex: String = options.iter().map(|b| format!("{b:02x}")).collect();
    town.on(
        from,
        &format!(
            "python3 -c 'import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
             s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
             s.setsockopt(0, socket.IP_OPTIONS, bytes.fromhex(\"{hex}\"))\n\
             s.setsockopt(socket.SOL_SOCKET, 15, 1)\n\
             s.bind((\"{}\", {}))\ns.sendto(b\"spoofed\", (\"{to}\", {PORT}))'",
            town.ip(from),
            PORT + 1,
        ),
    );
}

/// A datagram whose whole IPv4 packet the client makes up: here with a member's address.
fn forge(town: &Town, pretended: &str, to: &str, options: &[u8]) {
    let hex: String = options.iter().map(|b| format!("{b:02x}")).collect();
    let (source, to) = (town.ip(pretended), town.ip(to));
    town.on(
        "client",
        &format!(
            "python3 -c 'import socket, struct\n\
             s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)\n\
             o = bytes.fromhex(\"{hex}\")\n\
             b = struct.pack(\">HHHH\", {PORT}, {PORT}, 14, 0) + b\"forged\"\n\
             h = struct.pack(\">BBHHHBBH4s4s\", 0x45 + len(o) // 4, 0, 20 + len(o) + len(b), 7, 0, 64, 17, 0, \
             socket.inet_aton(\"{source}\"), socket.inet_aton(\"{to}\"))\n\
             s.sendto(h + o + b, (\"{to}\", 0))'"
        ),
    );
}

#[test]
fn tags_from_outside_are_not_merged_and_wrong_ones_in_a_members_name_are_dropped() {
    if !can_run("spoofed") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("3");
        let [web, db] = ["web", "db"].map(|who| socket(&town, who));
        // As good as a member would make it: the context is that of a group without named writers.
        web.send_to(b"real", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"real");
        for options in [
            &[158u8, 16, 0x11, 0, 0, 0, 0, 9, 0, 0, 0, 9, 0, 0, 0, 9][..],
            &[1, 158, 3, 0],
            &[158, 4, 0, 0, 158, 4, 0, 0],
        ] {
            spoof(&town, "client", "db", options);
            assert_eq!(next(&db), b"spoofed");
        }
        let tags = gates.tags("db");
        assert_eq!(tags["stripped_foreign"], 3, "{tags:?}");
        assert_eq!((tags["p0"], tags["p1"], tags["p2"]), (0, 0, 0));

        for options in
            [&[158u8, 4, 0, 0][..], &[158, 16, 0x11, 0, 0, 0, 0, 9, 0, 0, 0, 9, 0, 0, 0, 8]]
        {
            let wrong =
                if plan == Plan::TwoHosts { "dropped_malformed" } else { "dropped_wrong_way" };
            let before = gates.tags("db")[wrong];
            forge(&town, "web", "db", options);
            until("it is dropped", || gates.tags("db")[wrong] > before);
        }
        nothing_came(&db);
        let tags = gates.tags("db");
        assert_eq!((tags["p0"], tags["p1"], tags["p2"]), (0, 0, 0));
    }
}

#[test]
fn covered_packets_leave_by_themselves_until_the_gate_is_killed() {
    if !can_run("covered_by_itself") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        let to = at(town.ip("client"));
        gates.tell("web", "pending 0 3");
        web.send_to(b"uncovered", to).unwrap();
        until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
        gates.tell_all("commit 0 3");
        assert_eq!(next(&client), b"uncovered");
        until_packets_pass_by_themselves(&mut gates, &web, &client, to);
        gates.tell("web", "pending 0 4");
        web.send_to(b"known to db", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"known to db");

        // Its lease would last for minutes, and everything is covered.
        gates.tell_all("commit 0 4");
        assert_eq!(gates.tags("db")["p0"], 4);
        drop(gates);
        let host = udp(&town.ns("host"), &any(PORT));
        let silent = |socket: &UdpSocket, text: &[u8]| {
            // The kernel empties the map of the judge shortly after the process is gone.
            until("the gate is shut", || {
                socket.send_to(text, to).unwrap();
                // What the host sends passes, and after what the guest has sent before.
                host.send_to(MARKER, to).unwrap();
                let first = next(&client);
                first == MARKER || next(&client) != MARKER
            });
        };
        silent(&web, b"nobody is there");
        silent(&db, b"nobody is there");
        for _ in 0..100 {
            web.send_to(b"nobody is there", to).unwrap();
            db.send_to(b"nobody is there", to).unwrap();
        }
        // Members still hear each other, and of what each depends on.
        web.send_to(b"still here", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"still here");
        nothing_came(&client);

        let mut gates = town.gates("2");
        assert!(gates.said.contains("tagging=found"), "{}", gates.said);
        for member in ["web", "db"] {
            assert_eq!(gates.tags(member)["p0"], 4, "P of {member} has outlived the gate");
        }
        nothing_came(&client);
        db.send_to(b"after the crash", to).unwrap();
        until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
        gates.tell_all("commit 0 4");
        assert_eq!(next(&client), b"after the crash");
    }
}

/// The programs of the run that was killed talk with those of the next one.
#[test]
fn members_of_a_host_hear_what_the_other_depends_on_while_another_gate_takes_over() {
    if !can_run("takes_over") {
        return;
    }
    for plan in [Plan::OneBridge, Plan::OneRouter] {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let [web, db] = ["web", "db"].map(|who| socket(&town, who));
        for round in 1..=5u64 {
            gates.tell("web", &format!("pending 0 {round}"));
            drop(gates);
            web.send_to(&round.to_be_bytes(), at(town.ip("db"))).unwrap();
            assert_eq!(next(&db), round.to_be_bytes());
            let done = AtomicBool::new(false);
            gates = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        web.send_to(&round.to_be_bytes(), at(town.ip("db"))).unwrap();
                        std::thread::sleep(Duration::from_micros(100));
                    }
                });
                let gates = town.gates("2");
                done.store(true, Ordering::Relaxed);
                gates
            });
            assert_eq!(gates.tags("db")["p0"], round, "{plan:?}");
            db.set_nonblocking(true).unwrap();
            while db.recv(&mut [0; 64]).is_ok() {}
            db.set_nonblocking(false).unwrap();
            let tags = gates.tags("db");
            assert_eq!(tags["dropped_malformed"] + tags["dropped_failed"], 0, "{tags:?}");
        }
    }
}

#[test]
fn nothing_overtakes_at_the_change_from_held_to_covered() {
    if !can_run("no_overtaking") {
        return;
    }
    let town = Town::new(Plan::OneRouter);
    let mut gates = town.gates("1");
    let [web, client] = ["web", "client"].map(|who| socket(&town, who));
    let to = at(town.ip("client"));
    let mut sent = 0u32;
    for round in 1..=300u32 {
        gates.tell("web", &format!("pending 0 {round}"));
        for _ in 0..3 {
            web.send_to(&sent.to_be_bytes(), to).unwrap();
            sent += 1;
        }
        gates.tell_all(&format!("commit 0 {round}"));
        for _ in 0..3 {
            web.send_to(&sent.to_be_bytes(), to).unwrap();
            sent += 1;
        }
        for wanted in sent - 6..sent {
            assert_eq!(next(&client), wanted.to_be_bytes());
        }
    }
    let tags = gates.tags("web");
    assert!(tags["left_to_queue"] >= 900, "{tags:?}");
    // On a busy machine each of those may have come too soon after the one before.
    until("what is covered passes by itself", || {
        web.send_to(b"at rest", to).unwrap();
        assert_eq!(next(&client), b"at rest");
        gates.tags("web")["covered"] > 0
    });
}

#[test]
fn a_fenced_gate_and_one_without_lease_let_nothing_pass_by_itself() {
    if !can_run("shut_for_programs") {
        return;
    }
    let town = Town::new(Plan::OneBridge);
    let mut gates = town.gates("1");
    let [web, client] = ["web", "client"].map(|who| socket(&town, who));
    let to = at(town.ip("client"));
    gates.tell_all("mode async");
    gates.tell("web", "pending 0 3");
    until("async lets it pass by itself", || {
        web.send_to(b"async", to).unwrap();
        assert_eq!(next(&client), b"async");
        gates.tags("web")["covered"] > 0
    });
    gates.tell_all("mode pipelined");
    web.send_to(b"held", to).unwrap();
    until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
    gates.tell_all("fence");
    gates.tell_all("commit 0 9");
    web.send_to(b"held", to).unwrap();
    until_stat(&mut gates, "web", "held_packets", |n| n >= 2);
    nothing_came(&client);
}

#[test]
fn what_a_stop_leaves_is_taken_away_by_order_only() {
    if !can_run("left_by_a_stop") {
        return;
    }
    for hooks in ["", " clsact=yes"] {
        let town = Town::new(Plan::OneBridge);
        let mut gates = town.gates(&format!("2{hooks}"));
        let filters = "tc filter show dev w0 ingress; tc filter show dev w0 egress";
        let links = links(&town);
        assert_eq!(links.len(), if hooks.is_empty() { 4 } else { 0 });
        assert_eq!(town.on("host", filters).contains("bpf"), links.is_empty());
        assert_eq!(gates.host.tell("stop"), "dropped=0, dropped=0");
        assert_eq!(self::links(&town), links);
        for (member, interface, queue) in [("web", "w0", 11), ("db", "d0", 12)] {
            let pin = town.pin().display();
            gates.host.tell(&format!(
                "remove member={member} interface={interface} queue={queue} pin={pin}"
            ));
        }
        assert_eq!(town.on("host", filters), "");
        let left = std::fs::read_dir(town.pin()).unwrap().map(|entry| entry.unwrap().path());
        // The kernel's own.
        let ours = left.filter(|pin| !pin.to_string_lossy().ends_with(".debug"));
        assert_eq!(ours.collect::<Vec<_>>(), Vec::<std::path::PathBuf>::new());
        assert!(libbpf_rs::query::LinkInfoIter::default().all(|left| !links.contains(&left.id)));
        let again = town.gates("2");
        assert!(again.said.contains("tagging=new,new"), "P was left: {}", again.said);
    }
}

/// The numbers that the kernel has given the links of programs.
fn links(town: &Town) -> Vec<u32> {
    let pins = std::fs::read_dir(town.pin()).unwrap().map(|entry| entry.unwrap().path());
    let of_programs = pins.filter(|pin| pin.to_string_lossy().contains("_guest-"));
    of_programs.map(|pin| libbpf_rs::Link::open(pin).unwrap().info().unwrap().id).collect()
}

/// Where the kernel has no tcx: what it was before it had.
#[test]
fn from_clsact_to_tcx_and_back_nothing_is_lost_or_let_out() {
    if !can_run("clsact") {
        return;
    }
    let town = Town::new(Plan::TwoHosts);
    let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    let filters = "tc filter show dev w0 ingress; tc filter show dev w0 egress";
    for (round, hooks) in ["", " clsact=yes", "", " clsact=yes"].into_iter().enumerate() {
        if hooks.is_empty() && round > 0 {
            assert!(town.on("host", filters).contains("from_guest"));
        }
        let mut gates = town.gates(&format!("2{hooks}"));
        let said = if round == 0 { "tagging=new" } else { "tagging=found" };
        assert!(gates.said.contains(said), "{}", gates.said);
        let n = round + 1;
        gates.tell_all(&format!("commit 0 {round}"));
        gates.tell("web", &format!("pending 0 {n}"));
        web.send_to(b"hello", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"hello", "{round}");
        assert_eq!(gates.tags("db")["p0"], n as u64);
        db.send_to(b"answer", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
        nothing_came(&client);
        gates.tell_all(&format!("commit 0 {n}"));
        assert_eq!(next(&client), b"answer");
        if hooks.is_empty() {
            assert_eq!(town.on("host", filters), "");
        }
    }
}

/// Tags of one form have raised what the other form does not look at: such a P counts as unknown.
#[test]
fn what_a_run_of_the_other_form_has_left_is_not_taken_for_complete() {
    if !can_run("other_form") {
        return;
    }
    let town = Town::new(Plan::TwoHosts);
    let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    for (form, other, covers) in [("2", "hlc", "watermark 9000000"), ("hlc", "2", "commit 0 9")] {
        let mut gates = town.gates(form);
        assert!(gates.said.contains("tagging=new"), "{}", gates.said);
        gates.tell("web", &format!("pending 0 7 {}", 7u64 << 16));
        web.send_to(b"hello", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"hello");
        drop(gates);

        let mut gates = town.gates(&format!("{other} floor=yes"));
        assert!(gates.said.contains("tagging=new"), "{}", gates.said);
        gates.tell_all(covers);
        db.send_to(b"told nobody knows what", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
        nothing_came(&client);
        drop(gates);
        // And also if the first form comes back.
        assert!(town.gates(form).said.contains("tagging=new"));
    }
}

#[test]
fn a_path_that_strips_options_gates_members_from_each_other() {
    if !can_run("stripping_path") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2 strips=yes");
        let [web, db] = ["web", "db"].map(|who| socket(&town, who));
        gates.tell("web", "pending 0 1");
        web.send_to(b"waits", at(town.ip("db"))).unwrap();
        if plan == Plan::TwoHosts {
            until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
            nothing_came(&db);
            gates.tell_all("commit 0 1");
        }
        assert_eq!(next(&db), b"waits", "{plan:?}");
        let gated = gates.tags("web")["gated_path"];
        assert_eq!(gated, u64::from(plan == Plan::TwoHosts), "{plan:?}: one host needs no option");
        if plan != Plan::TwoHosts {
            assert_eq!(gates.tags("db")["p0"], 1);
        }
    }
}

#[test]
fn with_tagging_off_a_client_learns_what_is_not_committed() {
    if !can_run("off") {
        return;
    }
    for off in [false, true] {
        let town = Town::new(Plan::OneRouter);
        let mut gates = town.gates(if off { "2 off=yes" } else { "2" });
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        gates.tell("web", "pending 0 1");
        web.send_to(b"written", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"written");
        db.send_to(b"it is written", at(town.ip("client"))).unwrap();
        if off {
            assert_eq!(next(&client), b"it is written", "the promise is broken");
        } else {
            until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
            nothing_came(&client);
        }
    }
}
