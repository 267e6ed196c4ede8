//! Interfaces that go away and come back, and members whose P is not complete.

use crate::can_run;
use crate::lab::{MARKER, next, nothing_came, run, udp, until};
use crate::tagging::{PORT, any, at, socket, until_stat};
use crate::town::{Plan, Town};
use std::net::UdpSocket;

/// Sends until something is heard of it: a neighbour may have to be found first.
fn reaches(from: &UdpSocket, to: std::net::SocketAddr, listener: &UdpSocket, text: &[u8]) {
    until("a packet arrives", || {
        from.send_to(text, to).unwrap();
        let mut buffer = [0; 64];
        listener.set_nonblocking(true).unwrap();
        let heard = (0..20).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(2));
            matches!(listener.recv(&mut buffer), Ok(len) if &buffer[..len] == text)
        });
        listener.set_nonblocking(false).unwrap();
        heard
    });
}

/// Whether this text is already there to be read next.
fn is_next(listener: &UdpSocket, text: &[u8]) -> bool {
    let mut buffer = [0; 64];
    listener.set_nonblocking(true).unwrap();
    let heard = matches!(listener.peek(&mut buffer), Ok(len) if &buffer[..len] == text);
    let heard = heard && listener.recv(&mut buffer).is_ok();
    listener.set_nonblocking(false).unwrap();
    heard
}

/// What is sent while a tap is cut off: a guest that finds its neighbour later sends it then, with a P
/// that is right by then.
const CUT_OFF: [&[u8]; 2] = [b"cut off, first", b"cut off, second"];

/// The next datagram that is none of those.
fn next_news(socket: &UdpSocket) -> Vec<u8> {
    loop {
        let heard = next(socket);
        if !CUT_OFF.contains(&&heard[..]) {
            return heard;
        }
    }
}

/// That what is sent now does not come: what the host sends after it does. Whatever is left of an
/// earlier time may. A member on the same host, whose programs raise P when it speaks, may be heard.
fn is_cut_off(town: &Town, [web, db, client]: [&UdpSocket; 3], text: &[u8]) {
    for _ in 0..5 {
        // Neither may find a way at all.
        let _ = db.send_to(text, at(town.ip("web")));
        let _ = web.send_to(text, at(town.ip("client")));
        let _ = web.send_to(text, at(town.ip("db")));
    }
    let host = udp(&town.ns("host"), &any(PORT + 1));
    host.send_to(MARKER, at(town.ip("client"))).unwrap();
    while let Some(heard) = Some(next(client)).filter(|heard| heard != MARKER) {
        assert_ne!(heard, text);
    }
    let speaks_by_tags = town.plan == Plan::TwoHosts;
    for guest in [db].into_iter().chain(speaks_by_tags.then_some(web)) {
        guest.set_nonblocking(true).unwrap();
        let mut buffer = [0; 64];
        while let Ok(len) = guest.recv(&mut buffer) {
            assert_ne!(&buffer[..len], text);
        }
        guest.set_nonblocking(false).unwrap();
    }
}

#[test]
fn a_tap_that_was_made_anew_hears_no_tag_and_tells_nothing_before_it_is_watched() {
    if !can_run("tap_anew") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        reaches(&db, at(town.ip("web")), &web, b"first");
        gates.tell("db", "pending 1 7");

        // While the gate runs.
        town.remake("web");
        is_cut_off(&town, [&web, &db, &client], CUT_OFF[0]);
        // nftables shows the index of the one that is gone in another way.
        assert_eq!(gates.host.tell("rules"), "in_place", "{plan:?}");
        // What it has not heard; on one host P rises when the other one speaks.
        let learnt = if plan == Plan::TwoHosts { 0 } else { 7 };
        assert_eq!(gates.tags("web")["p1"], learnt, "{plan:?}");
        assert_eq!(gates.host.tell("look"), "");
        reaches(&db, at(town.ip("web")), &web, b"second");
        assert_eq!(gates.tags("web")["p1"], 7, "{plan:?}");
        web.send_to(b"may depend on db", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
        gates.tell_all("commit 1 7");
        assert_eq!(next_news(&client), b"may depend on db");
        gates.host.tell("verify");

        // While it is away.
        drop(gates);
        town.remake("web");
        is_cut_off(&town, [&web, &db, &client], CUT_OFF[1]);
        let mut gates = town.gates("2");
        assert!(gates.said.contains("tagging=found"), "{}", gates.said);
        gates.tell_all("commit 1 7");
        gates.tell("db", "pending 1 8");
        reaches(&db, at(town.ip("web")), &web, b"third");
        assert_eq!(gates.tags("web")["p1"], 8);
    }
}

/// Rules queue by name. Linux 6.2 and later rename an interface while it is up.
#[test]
fn an_interface_that_gets_another_name_is_cut_off_until_it_has_its_own_again() {
    if !can_run("renamed") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let [web, client] = ["web", "client"].map(|who| socket(&town, who));
        // It knows its neighbour by then: what is sent below leaves the guest at once.
        reaches(&web, at(town.ip("client")), &client, b"first");
        gates.tell("web", "pending 0 9");
        let rename =
            |from: &str, to: &str| town.on("host", &format!("ip link set {from} name {to}"));
        rename("w0", "other0");
        web.send_to(b"not covered", at(town.ip("client"))).unwrap();
        town.on("host", &format!("ping -q -c 1 {}", town.ip("client")));
        nothing_came(&client);
        assert_eq!(gates.host.tell("rules"), "in_place", "{plan:?}");
        gates.host.tell("look");
        rename("other0", "w0");
        assert_eq!(gates.host.tell("look"), "");
        web.send_to(b"covered later", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
        gates.tell_all("commit 0 9");
        assert_eq!(next(&client), b"covered later", "{plan:?}");
        gates.host.tell("verify");
    }
}

/// Nobody depends on its tags, so nothing has to be cut off.
#[test]
fn a_member_that_is_alone_goes_by_the_queue_until_its_new_tap_has_the_programs() {
    if !can_run("alone_anew") {
        return;
    }
    for plan in [Plan::OneBridge, Plan::OneRouter] {
        let town = Town::new(plan);
        let topology = if plan == Plan::OneBridge { "bridged" } else { "routed" };
        let mut gate = crate::drive::Drive::spawn(&town.ns("host"));
        let (v4, v6, pin) = (town.ip("web"), town.ip6("web"), town.pin().display());
        gate.tell(&format!(
            "start member=web interface=w0 topology={topology} queue=11 len=1024 mode=pipelined lease_ms=600000 \
             backend=any members=web@{v4},{v6} pin={pin} tagging=1"
        ));
        gate.tell("lease");
        let [web, client] = ["web", "client"].map(|who| socket(&town, who));
        for n in 1..=2 {
            if n == 2 {
                town.remake("web");
            }
            gate.tell(&format!("on web pending 0 {n}"));
            web.send_to(b"held", at(town.ip("client"))).unwrap();
            gate.until_stat("held_packets", |n| n >= 1);
            gate.tell(&format!("commit 0 {n}"));
            assert_eq!(next(&client), b"held", "{plan:?}");
            assert_eq!(gate.tell("look"), "");
            let covered = |gate: &mut crate::drive::Drive| {
                crate::gates::numbers(&gate.tell("on web tags"))["covered"]
            };
            // The first ones may come by the queue: nothing overtakes what may be on its way there.
            let before = covered(&mut gate);
            until("covered packets pass by themselves", || {
                reaches(&web, at(town.ip("client")), &client, b"covered");
                covered(&mut gate) > before
            });
            while is_next(&client, b"covered") {}
        }
        gate.tell("verify");
    }
}

#[test]
fn a_narrower_tap_stays_cut_off() {
    if !can_run("narrow_tap") {
        return;
    }
    let town = Town::new(Plan::OneBridge);
    let mut gates = town.gates("2");
    let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    town.remake("web");
    town.on("host", "ip link set w0 mtu 1400");
    gates.host.tell("look");
    is_cut_off(&town, [&web, &db, &client], CUT_OFF[0]);
    town.on("host", "ip link set w0 mtu 1500");
    gates.host.tell("look");
    reaches(&db, at(town.ip("web")), &web, b"as wide as before");
}

#[test]
fn programs_that_were_taken_off_are_noticed_and_the_member_is_held() {
    if !can_run("bare_interface") {
        return;
    }
    for hooks in ["", " clsact=yes"] {
        for is_running in [true, false] {
            // clsact does not tell what was taken off from what went with an interface.
            if is_running || hooks.is_empty() {
                programs_are_taken_off(hooks, is_running);
            }
        }
    }
}

fn take_off(town: &Town, hooks: &str) {
    if hooks.is_empty() {
        let pins = std::fs::read_dir(town.pin()).unwrap().map(|entry| entry.unwrap().path());
        let mut of_web = pins.filter(|pin| pin.to_string_lossy().contains("_guest-drive-web-"));
        let (one, other) = (of_web.next().unwrap(), of_web.next().unwrap());
        std::fs::remove_file(one).unwrap();
        libbpf_rs::Link::open(&other).unwrap().detach().unwrap();
        std::fs::remove_file(other).unwrap();
    } else {
        town.on("host", "tc qdisc del dev w0 clsact");
    }
}

fn programs_are_taken_off(hooks: &str, is_running: bool) {
    let town = Town::new(Plan::OneRouter);
    let mut gates = town.gates(&format!("2 floor=yes{hooks}"));
    for member in ["web", "db"] {
        gates.tell(member, "complete");
    }
    let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    assert_eq!(gates.host.tell("look"), "");
    if is_running {
        take_off(&town, hooks);
        assert_eq!(gates.host.tell("look"), "web", "{hooks}");
        assert_eq!(gates.host.tell("look"), "", "once");
    } else {
        drop(gates);
        take_off(&town, hooks);
        gates = town.gates(&format!("2 floor=yes{hooks}"));
        assert!(gates.said.contains("tagging=new,found"), "{}", gates.said);
        gates.tell_all("commit 0 1");
    }
    web.send_to(b"who knows what it has heard", at(town.ip("client"))).unwrap();
    web.send_to(b"who knows what it has heard", at(town.ip("db"))).unwrap();
    until_stat(&mut gates, "web", "held_packets", |n| n >= 2);
    nothing_came(&client);
    // Each write raises the time of P too: where tags are vectors, nothing waits for a watermark.
    gates.tell_all("commit 0 2");
    gates.tell("web", "pending 0 2 77");
    gates.tell("web", "complete");
    assert_eq!(next(&client), b"who knows what it has heard");
    assert_eq!(next(&db), b"who knows what it has heard");
    gates.tell("web", "pending 0 3");
    reaches(&web, at(town.ip("db")), &db, b"with a tag");
    assert_eq!(gates.tags("db")["p0"], 3);
}

/// Without rules nothing cuts off a tap that was made anew.
#[test]
fn who_may_have_heard_something_while_rules_were_gone_is_held() {
    if !can_run("no_rules") {
        return;
    }
    let cases = Plan::ALL.into_iter().flat_map(|plan| [(plan, true), (plan, false)]);
    for (plan, is_running) in cases {
        let town = Town::new(plan);
        let mut gates = town.gates("2 floor=yes");
        for member in ["web", "db"] {
            gates.tell(member, "complete");
        }
        let [web, client] = ["web", "client"].map(|who| socket(&town, who));
        reaches(&web, at(town.ip("client")), &client, b"first");
        let take_away = || {
            town.on("host", "nft flush ruleset");
            town.remake("web");
        };
        if is_running {
            take_away();
            assert_eq!(gates.host.tell("look"), "web", "{plan:?}");
            assert_eq!(gates.host.tell("look"), "", "once");
            assert_eq!(gates.stats("web")["rules_restored"], 1, "{plan:?}");
            gates.host.tell("verify");
        } else {
            drop(gates);
            take_away();
            gates = town.gates("2 floor=yes");
            assert!(gates.said.contains("tagging=found"), "{}", gates.said);
        }
        until("its way to the client is found, and rules that were put back are relied on", || {
            gates.host.tell("rules");
            web.send_to(b"who knows what it has heard", at(town.ip("client"))).unwrap();
            gates.stats("web")["held_packets"] > 0
        });
        nothing_came(&client);
        gates.tell("web", "complete");
        assert_eq!(next(&client), b"who knows what it has heard");
    }
}

#[test]
fn a_member_that_the_backup_may_count_as_gone_tells_others_only_what_is_covered() {
    if !can_run("contact") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        gates.tell("web", "contact no");
        gates.tell("web", "pending 0 2");
        web.send_to(b"to db", at(town.ip("db"))).unwrap();
        web.send_to(b"to the client", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "web", "held_packets", |n| n >= 2);
        nothing_came(&db);
        nothing_came(&client);
        // It hears others meanwhile, and its P names that.
        gates.tell("db", "pending 1 4");
        reaches(&db, at(town.ip("web")), &web, b"from db");
        assert_eq!(gates.tags("web")["p1"], 4);
        gates.tell("web", "contact yes");
        reaches(&web, at(town.ip("db")), &db, b"with a tag");
        assert_eq!(gates.tags("db")["p0"], 2);
        nothing_came(&client);
        gates.tell_all("commit 0 2");
        gates.tell_all("commit 1 4");
        assert_eq!(next(&db), b"to db");
        assert_eq!(next(&client), b"to the client");
    }
}

#[test]
fn a_member_whose_p_is_not_complete_tells_nobody_anything() {
    if !can_run("incomplete") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2 floor=yes");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        // P is empty, so all of it is covered. But the guest may have run for hours.
        web.send_to(b"to db", at(town.ip("db"))).unwrap();
        web.send_to(b"to the client", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "web", "held_packets", |n| n >= 2);
        let tags = gates.tags("web");
        assert!(tags["gated_incomplete"] >= 1 && tags["tagged"] == 0, "{plan:?} {tags:?}");
        nothing_came(&db);
        nothing_came(&client);
        // Others have said how far they are.
        gates.tell("web", "pending 1 4");
        gates.tell("web", "complete");
        web.send_to(b"now with a tag", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"now with a tag");
        assert_eq!(gates.tags("db")["p1"], 4);
        nothing_came(&client);
        gates.tell_all("commit 1 4");
        assert_eq!(next(&client), b"to the client");
        assert_eq!(next(&db), b"to db");

        // The next run finds a P that was complete, and guarded since.
        drop(gates);
        let mut gates = town.gates("2 floor=yes");
        gates.tell_all("commit 1 4");
        web.send_to(b"after a crash", at(town.ip("client"))).unwrap();
        assert_eq!(next(&client), b"after a crash");
    }
}

#[test]
fn after_mode_async_nothing_leaves_before_p_is_complete_also_after_a_crash() {
    if !can_run("after_async") {
        return;
    }
    let town = Town::new(Plan::TwoHosts);
    // Packets to members cannot be tagged here: in async they leave at once, and say nothing.
    let mut gates = town.gates("2 floor=yes strips=yes");
    for member in ["web", "db"] {
        gates.tell(member, "complete");
    }
    let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    gates.tell_all("mode async");
    gates.tell("web", "pending 0 5");
    web.send_to(b"untagged", at(town.ip("db"))).unwrap();
    assert_eq!(next(&db), b"untagged");
    assert_eq!(gates.tags("db")["p0"], 0);
    gates.tell_all("mode pipelined");
    db.send_to(b"web has written", at(town.ip("client"))).unwrap();
    until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
    nothing_came(&client);

    drop(gates);
    let mut gates = town.gates("2 floor=yes strips=yes");
    assert!(gates.said.contains("tagging=found"), "{}", gates.said);
    db.send_to(b"web has written", at(town.ip("client"))).unwrap();
    until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
    gates.tell("db", "pending 0 5");
    gates.tell("db", "complete");
    nothing_came(&client);
    gates.tell_all("commit 0 5");
    assert_eq!(next(&client), b"web has written");
}

#[test]
fn a_clean_stop_leaves_a_member_guarded_that_hears_others_of_other_hosts() {
    if !can_run("spread_stop") {
        return;
    }
    let town = Town::new(Plan::TwoHosts);
    let mut gates = town.gates("2");
    let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    reaches(&db, at(town.ip("web")), &web, b"first");
    assert_eq!(gates.host.tell("stop"), "dropped=0");
    gates.tell("db", "pending 1 9");
    reaches(&db, at(town.ip("web")), &web, b"db has written");
    let _ = web.send_to(b"db has written", at(town.ip("client")));
    udp(&town.ns("host"), &any(PORT)).send_to(MARKER, at(town.ip("client"))).unwrap();
    assert_eq!(next(&client), MARKER);
    drop(gates);
    let mut gates = town.gates("2");
    assert!(gates.said.contains("tagging=found"), "{}", gates.said);
    assert_eq!(gates.tags("web")["p1"], 9);
}

#[test]
fn a_group_that_is_begun_anew_does_not_take_up_the_old_p() {
    if !can_run("begun_anew") {
        return;
    }
    let town = Town::new(Plan::OneBridge);
    let mut gates = town.gates("2 floor=yes");
    gates.tell("web", "pending 0 100000");
    drop(gates);
    let mut gates = town.gates("2 floor=yes anew=web");
    assert!(gates.said.contains("tagging=new,found"), "{}", gates.said);
    assert_eq!(gates.tags("web")["p0"], 0);
    // Its guest may have lived through it all.
    let [web, client] = ["web", "client"].map(|who| socket(&town, who));
    web.send_to(b"old news", at(town.ip("client"))).unwrap();
    until_stat(&mut gates, "web", "held_packets", |n| n >= 1);
    nothing_came(&client);
}

#[test]
fn an_interface_that_is_missing_is_named_with_what_to_do() {
    if !can_run("missing_interface") {
        return;
    }
    let town = Town::new(Plan::OneBridge);
    let mut drive = crate::drive::Drive::spawn(&town.ns("host"));
    let said = drive.tell_refused(&format!(
        "start member=web,db interface=tap-web,d0 topology=bridged queue=11,12 len=9 mode=pipelined lease_ms=9 \
         backend=any members=web@10.0.0.1/db@10.0.0.2 pin={} tagging=2",
        town.pin().display()
    ));
    assert!(said.contains("ip tuntap add dev tap-web mode tap user"), "{said}");
}

/// As the unit file has it: few capabilities, and a mount namespace for each run.
#[test]
fn p_outlives_a_run_under_the_systemd_unit() {
    if !can_run("systemd_unit") {
        return;
    }
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/systemd/tidelockd.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let allowed =
        unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let allowed: String =
        allowed.split(' ').map(|name| name.replace("CAP_", ",+").to_lowercase()).collect();
    let bounding = format!("--bounding-set=-all{allowed}");
    let sandbox =
        ["unshare", "--mount", "--propagation", "slave", "setpriv", &bounding, "--no-new-privs"];

    let town = Town::new(Plan::OneRouter);
    run(&format!("mount -t bpf bpf {}", town.pin().display()));
    let mut gates = town.gates_under(&sandbox, "2");
    assert!(gates.said.contains("tagging=new,new"), "{}", gates.said);
    gates.tell("web", "pending 0 6");
    drop(gates);
    let mut gates = town.gates_under(&sandbox, "2");
    assert!(gates.said.contains("tagging=found,found"), "{}", gates.said);
    assert_eq!(gates.tags("web")["p0"], 6);
    drop(gates);

    // Where nobody has mounted it, such a daemon does not pin into a mount of its own.
    run(&format!("umount {}", town.pin().display()));
    let mut drive = crate::drive::Drive::spawn_under(&town.ns("host"), &sandbox);
    let said = drive.tell_refused(&format!(
        "start member=web,db interface=w0,d0 topology=routed queue=11,12 len=9 mode=pipelined lease_ms=9 \
         backend=any members=web@10.0.0.1/db@10.0.0.2 pin={} tagging=2",
        town.pin().display()
    ));
    assert!(said.contains("mount -t bpf bpf"), "{said}");
}

/// A tap that comes with its VM: nothing of it leaves unheld, and the programs are put on it.
#[test]
fn an_interface_that_comes_after_the_gate_is_taken_in() {
    if !can_run("comes_later") {
        return;
    }
    for plan in [Plan::OneBridge, Plan::OneRouter] {
        let town = Town::new(plan);
        town.on("host", "ip link del w0");
        let topology = if plan == Plan::OneBridge { "bridged" } else { "routed" };
        let mut gate = crate::drive::Drive::spawn(&town.ns("host"));
        let pin = town.pin().display();
        gate.tell(&format!(
            "start member=web interface=w0 topology={topology} queue=11 len=1024 mode=pipelined lease_ms=600000 \
             backend=any tagging=1 members=web@ pin={pin}"
        ));
        gate.tell("lease");
        gate.tell("pending 0 1");
        assert_eq!(gate.tell("look"), "");
        town.on("host", &format!("ip link add w0 type veth peer name e0 netns {}", town.ns("web")));
        town.remake("web");
        assert_eq!(gate.tell("look"), "");
        let [web, client] = ["web", "client"].map(|who| socket(&town, who));
        until("it is held", || {
            web.send_to(b"held", at(town.ip("client"))).unwrap();
            gate.stat("held_packets") >= 1
        });
        nothing_came(&client);
        let left = crate::gates::numbers(&gate.tell("tags"))["left_to_queue"];
        assert!(left >= 1, "{plan:?}: the programs are there");
        gate.tell("commit 0 1");
        assert_eq!(next(&client), b"held", "{plan:?}");
    }
}

/// Each network card has rules, programs and a queue of its own, and all wait for the same writes.
#[test]
fn every_card_of_a_member_is_held() {
    if !can_run("cards") {
        return;
    }
    let town = Town::new(Plan::OneRouter);
    let mut gate = crate::drive::Drive::spawn(&town.ns("host"));
    let pin = town.pin().display();
    let start = format!(
        "start member=web interface=w0+d0 topology=routed queue=11+12 len=1024 mode=pipelined lease_ms=600000 \
         backend=any tagging=1 members=web@ pin={pin}"
    );
    assert!(gate.tell(&start).contains("tagging=new,new"));
    gate.tell("lease");
    // One guest, as far as the gate knows.
    let [first, second, client] = ["web", "db", "client"].map(|who| socket(&town, who));
    let to = at(town.ip("client"));
    gate.tell("pending 0 1");
    first.send_to(b"by one", to).unwrap();
    second.send_to(b"by the other", to).unwrap();
    for port in ["web", "web#2"] {
        until("it is held", || {
            crate::gates::numbers(&gate.tell(&format!("on {port} stats")))["held_packets"] == 1
        });
    }
    nothing_came(&client);
    gate.tell("commit 0 1");
    let mut came = [next(&client), next(&client)];
    came.sort();
    assert_eq!(came, [b"by one".to_vec(), b"by the other".to_vec()]);
    gate.tell("verify");

    // A card that is not held any more leaves no rules of its own.
    assert_eq!(gate.tell("stop"), "dropped=0, dropped=0");
    gate.tell(&start.replace("w0+d0", "w0").replace("11+12", "11"));
    let rules = town.on("host", "nft list ruleset; iptables-nft-save");
    // Marks are random and in hexadecimal: "d0" may stand in one.
    let names =
        |name: &str| rules.contains(&format!("\"{name}\"")) || rules.contains(&format!(" {name} "));
    assert!(names("w0") && !names("d0"), "{rules}");
}
