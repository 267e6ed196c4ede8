//! Rules that somebody takes away, and how one hears of it.

use crate::drive::Drive;
use crate::lab::{INTERFACE, Lab, MARKER, in_namespace, next, nothing_came, udp, until};
use crate::tagging::{PORT, any, at, socket, until_packets_pass_by_themselves};
use crate::town::{Plan, Town};
use crate::{TOPOLOGIES, backends, can_run, skipped, to_client};
use tidelock_netfilter::rules::{Change, RuleChanges, Topology};

/// What somebody does to the packet filter, and whether a guest's packets leave unheld from then on.
struct Deed {
    command: String,
    opens: bool,
}

/// What is done to the rules of a gate that queues by this packet filter.
fn changes(backend: &str, lab: &Lab) -> Vec<Deed> {
    let family = if lab.topology() == Topology::Bridged { "bridge" } else { "inet" };
    let opens = |command: String| Deed { command, opens: true };
    let mut changes = Vec::new();
    if has_nftables(lab, family) {
        changes.push(opens("nft flush ruleset".into()));
    }
    if backend.starts_with("iptables") {
        let six = backend.replace("ip", "ip6");
        changes.extend([
            opens(format!("{backend} -t raw -F")),
            opens(format!("{backend} -t raw -D PREROUTING 1")),
            opens(format!("{backend} -t raw -I PREROUTING -j ACCEPT")),
            Deed { command: format!("{six} -t raw -D PREROUTING 1"), opens: false },
        ]);
    } else {
        let on_table = |what: &str| {
            opens(format!("t=$(nft list tables | sed -n 's/table {family} //p'); nft {what}"))
        };
        changes.extend([
            on_table(&format!("delete table {family} $t")),
            on_table(&format!("flush chain {family} $t prerouting")),
            on_table(&format!("insert rule {family} $t prerouting accept")),
        ]);
        // Another one behind it drops.
        let command = format!(
            "t=$(nft list tables | sed -n 's/table {family} //p')
             c=$(nft list table {family} $t | sed -n 's/.*chain \\(held_[^ ]*\\) .*/\\1/p')
             h=$(nft -a list chain {family} $t $c | sed -n '/counter/s/.*handle //p')
             nft delete rule {family} $t $c handle $h"
        );
        changes.push(Deed { command, opens: false });
    }
    changes
}

fn has_nftables(lab: &Lab, family: &str) -> bool {
    let probe = format!("nft add table {family} probe && nft delete table {family} probe");
    lab.on_host(&format!("({probe}) && echo yes || true")).contains("yes")
}

#[test]
fn rules_that_somebody_takes_away_are_put_back_and_counted() {
    if !can_run("put_back") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("put_back", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
            let guest = udp(&lab.guest(), "0.0.0.0:0");
            let client = udp(&lab.client(), "0.0.0.0:7000");
            gate.tell("lease");
            assert_eq!(gate.tell("rules"), "in_place");
            for (n, change) in (1..).zip(changes(backend, &lab)) {
                let on = format!("{topology:?} {backend}: {}", change.command);
                gate.tell(&format!("pending 0 {n}"));
                lab.on_host(&change.command);
                if change.opens {
                    guest.send_to(b"unheld", to_client(&lab)).unwrap();
                    assert_eq!(next(&client), b"unheld", "{on}");
                }
                assert_eq!(gate.tell("rules"), "put_back", "{on}");
                gate.tell("verify");
                assert_eq!(gate.stat("rules_restored"), n, "{on}");
                guest.send_to(b"held", to_client(&lab)).unwrap();
                gate.until_stat("held_packets", |n| n == 1);
                nothing_came(&client);
                // Its own rules are nobody else's change.
                assert_eq!(gate.tell("rules"), "in_place", "{on}");
                assert_eq!(gate.stat("rules_restored"), n, "{on}");
                gate.tell(&format!("commit 0 {n}"));
                assert_eq!(next(&client), b"held", "{on}");
            }
        }
    }
}

/// What somebody does to a packet filter that is not ours is none of our business.
#[test]
fn what_others_do_beside_the_rules_is_no_change_of_them() {
    if !can_run("beside") {
        return;
    }
    for topology in TOPOLOGIES {
        for backend in backends("beside", &Lab::new(topology)) {
            let lab = Lab::new(topology);
            let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
            for command in [
                "nft add table inet others || true",
                "iptables -A FORWARD -j ACCEPT",
                "iptables -t mangle -A FORWARD -p udp -j MARK --set-mark 1",
            ] {
                lab.on_host(command);
                assert_eq!(gate.tell("rules"), "in_place", "{topology:?} {backend}: {command}");
            }
            // nftables shows an interface's index by its name, or as a number.
            for command in
                [format!("ip link set {INTERFACE} name other0"), "ip link del other0".to_owned()]
            {
                lab.on_host(&command);
                assert_eq!(gate.tell("rules"), "in_place", "{topology:?} {backend}: {command}");
            }
            assert_eq!(gate.stat("rules_restored"), 0, "{topology:?} {backend}");
        }
    }
}

#[test]
fn what_cannot_be_put_back_is_tried_again() {
    if !can_run("try_again") {
        return;
    }
    let lab = Lab::new(Topology::Bridged);
    let sysctl = |value: u8| {
        lab.on_host(&format!("sysctl -qw net.bridge.bridge-nf-call-ip6tables={value}"));
    };
    for backend in backends("try_again", &lab).into_iter().filter(|b| b.starts_with("iptables")) {
        let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
        sysctl(0);
        lab.on_host(&format!("{backend} -t raw -F"));
        assert_eq!(gate.tell("rules"), "failing", "{backend}");
        assert_eq!(gate.tell("rules"), "failing", "{backend}");
        assert_eq!(gate.stat("rules_restored"), 0, "{backend}");
        sysctl(1);
        assert_eq!(gate.tell("rules"), "put_back", "{backend}");
        assert_eq!(gate.tell("rules"), "in_place", "{backend}");
        assert_eq!(gate.stat("rules_restored"), 1, "{backend}");
    }
}

fn hosts(town: &Town) -> &'static [&'static str] {
    if town.plan == Plan::TwoHosts { &["host", "other"] } else { &["host"] }
}

/// Takes the rules of every host away, by whatever packet filter.
fn take_rules_away(town: &Town) {
    for host in hosts(town) {
        town.on(host, "nft flush ruleset || true");
        town.on(host, "iptables-nft -t raw -F || true");
    }
}

/// Neither between a change and the look at it, nor while nobody is there to look.
#[test]
fn where_the_programs_run_nothing_leaves_unheld_without_rules() {
    if !can_run("without_rules") {
        return;
    }
    for plan in Plan::ALL {
        let town = Town::new(plan);
        let mut gates = town.gates("2");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        let to = at(town.ip("client"));
        let hosts: Vec<_> =
            hosts(&town).iter().map(|host| udp(&town.ns(host), &any(PORT))).collect();
        // How many of two datagrams pass.
        let passed = || {
            web.send_to(b"datagram", to).unwrap();
            db.send_to(b"datagram", to).unwrap();
            // What a host sends passes, and after what the guests on it have sent before.
            hosts
                .iter()
                .for_each(|host| assert_eq!(host.send_to(MARKER, to).unwrap(), MARKER.len()));
            let (mut markers, mut datagrams) = (0, 0);
            while markers < hosts.len() {
                *(if next(&client) == MARKER { &mut markers } else { &mut datagrams }) += 1;
            }
            datagrams
        };
        gates.tell("web", "pending 0 3");
        gates.tell_all("commit 0 3");
        until_packets_pass_by_themselves(&mut gates, &web, &client, to);
        for member in ["web", "db"] {
            gates.tell(member, "pending 0 4");
        }

        take_rules_away(&town);
        web.send_to(b"unheld", to).unwrap();
        assert_eq!(next(&client), b"unheld", "{plan:?}: until somebody hears of it");
        gates.tell_all("doubt");
        assert_eq!(passed(), 0, "{plan:?}");
        for member in ["web", "db"] {
            assert!(gates.tags(member)["dropped_no_rules"] > 0, "{plan:?} {member}");
        }
        web.send_to(b"to db", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"to db", "{plan:?}: with a tag");
        gates.tell_all("commit 0 4");
        // The gate's thread waits a moment for what was left to the queue and has not come.
        until("covered ones pass", || passed() > 0);

        // They are back, and are relied on after a while in which nobody has taken them away again.
        for member in ["web", "db"] {
            gates.of(member).tell("rules");
            gates.tell(member, "pending 0 5");
            assert_eq!(gates.stats(member)["may_have_left"], 1, "{plan:?} {member}");
        }
        assert_eq!(passed(), 0, "{plan:?}");
        let mut sent = 0;
        until("rules are relied on again", || {
            for member in ["web", "db"] {
                assert_eq!(gates.of(member).tell("rules"), "in_place");
            }
            sent += 1;
            web.send_to(format!("held {sent}").as_bytes(), to).unwrap();
            gates.stats("web")["held_packets"] >= 1
        });
        nothing_came(&client);
        gates.tell_all("commit 0 5");
        // Where looking at the rules takes long, they are relied on before: then what was sent meanwhile was held, too.
        while next(&client) != format!("held {sent}").as_bytes() {}

        // Iptables cannot put them back without this, and does not get at bridged packets.
        if gates.said.contains("iptables") && plan == Plan::OneBridge {
            let sysctl = "sysctl -qw net.bridge.bridge-nf-call-ip6tables";
            town.on("host", &format!("{sysctl}=0"));
            take_rules_away(&town);
            gates.tell("web", "pending 0 6");
            for _ in 0..2 {
                assert_eq!(gates.of("web").tell("rules"), "failing");
                gates.tell("db", "pending 0 6");
                assert_eq!(passed(), 0);
            }
            town.on("host", &format!("{sysctl}=1"));
            assert_eq!(gates.of("web").tell("rules"), "put_back");
        }
        drop(gates);
        take_rules_away(&town);
        // The kernel empties the map of the judge shortly after the process is gone.
        until("the gate is shut", || passed() == 0);
        assert_eq!(passed(), 0, "{plan:?}: all of it is covered, and nobody knows for how long");
    }
}

#[test]
fn changes_of_nftables_are_heard_of_in_their_namespace() {
    if !can_run("heard_of") {
        return;
    }
    let (lab, elsewhere) = (Lab::new(Topology::Routed), Lab::new(Topology::Routed));
    if !has_nftables(&lab, "inet") {
        skipped("heard_of", "needs nftables");
        return;
    }
    let (others, ours) = (Some(Change::Others), Some(Change::Ours));
    let mut changes = in_namespace(&lab.host(), || RuleChanges::open().unwrap());
    assert_eq!(changes.drain(), None, "nothing has happened yet");
    elsewhere.on_host("nft add table inet others");
    assert_eq!(changes.drain(), None, "it happened in another namespace");
    for (command, change) in [
        ("nft add table inet others", others),
        ("nft delete table inet others", others),
        // Their transaction is the first that makes the table.
        ("iptables-nft -t raw -A PREROUTING -j ACCEPT", ours),
        ("iptables-nft -t raw -N others", others),
        ("iptables-nft -t raw -A others -j ACCEPT", others),
        ("iptables-nft -t raw -F others", others),
        ("iptables-nft -t filter -A FORWARD -j ACCEPT", others),
        ("iptables-nft -t raw -F", ours),
        ("nft flush ruleset", ours),
        ("nft add table inet tidelock_host_x", ours),
        ("nft add chain inet tidelock_host_x c", ours),
        ("nft add rule inet tidelock_host_x c accept", ours),
        ("nft flush chain inet tidelock_host_x c", ours),
        ("nft flush ruleset", ours),
    ] {
        lab.on_host(command);
        assert_eq!(changes.drain(), change, "{command}");
        assert_eq!(changes.drain(), None, "{command}: that was all");
        lab.on_host("nft list ruleset");
        assert_eq!(changes.drain(), None, "looking changes nothing");
    }
    let many = |table: &str, n: u32| {
        lab.on_host(&format!(
            "(echo add table inet {table}; for n in $(seq {n}); do echo add chain inet {table} c$n; done) | nft -f -"
        ));
    };
    // More than one datagram.
    many("others", 300);
    assert_eq!(changes.drain(), others);
    many("tidelock_host_x", 300);
    assert_eq!(changes.drain(), ours);
    // More than the socket's buffer takes.
    many("others", 4000);
    assert_eq!(changes.drain(), ours, "some were lost");
    assert_eq!(changes.drain(), None);
    lab.on_host("nft flush ruleset");
    assert_eq!(changes.drain(), ours, "from then on it hears again");
}

/// A gate with kernel programs for a member that is alone in its group, open, with a write that is not committed.
fn alone(town: &Town, options: &str) -> Drive {
    let topology = if town.plan == Plan::OneBridge { "bridged" } else { "routed" };
    let mut gate = Drive::spawn(&town.ns("host"));
    let pin = town.pin().display();
    gate.tell(&format!(
        "start member=web interface=w0 topology={topology} queue=11 len=65536 mode=pipelined lease_ms=600000 \
         backend=any tagging=1 members=web@ pin={pin} {options}"
    ));
    gate.tell("commit 0 0");
    gate.tell("lease");
    gate
}

/// What a group of one member needs of the programs: whoever takes rules away once, or again and again, lets out what
/// leaves before that is noticed for the first time, and no more.
#[test]
fn a_member_alone_sends_nothing_uncovered_while_its_rules_are_gone_again_and_again() {
    if !can_run("alone_without_rules") {
        return;
    }
    for plan in [Plan::OneBridge, Plan::OneRouter] {
        let town = Town::new(plan);
        let mut gate = alone(&town, "");
        let [web, client] = ["web", "client"].map(|who| socket(&town, who));
        let to = at(town.ip("client"));
        let host = udp(&town.ns("host"), &any(PORT));
        let passed = || {
            (0..5).for_each(|_| assert_eq!(web.send_to(b"datagram", to).unwrap(), 8));
            host.send_to(MARKER, to).unwrap();
            std::iter::from_fn(|| Some(next(&client)).filter(|heard| heard != MARKER)).count()
        };
        until("what is covered passes", || passed() == 5);
        gate.tell("pending 0 1");
        take_rules_away(&town);
        assert_eq!(gate.tell("rules"), "put_back", "{plan:?}");
        for _ in 0..3 {
            take_rules_away(&town);
            assert_eq!(passed(), 0, "{plan:?}: rules that were put back are not relied on yet");
            gate.tell("rules");
        }
        assert!(gate.stat("may_have_left") >= 1, "{plan:?}");
        assert_eq!(
            gate.stat("open_to_all"),
            0,
            "{plan:?}: the programs stop what the rules would hold"
        );
        gate.tell("commit 0 1");
        until("what is covered passes", || passed() == 5);
        // Nobody is there to hold anything, nor to put rules back.
        gate.kill();
        take_rules_away(&town);
        until("the gate is shut", || passed() == 0);
    }
}

/// Iptables does not see bridged packets then. Without programs the gate says that it is open to all.
#[test]
fn a_bridge_that_leads_past_iptables_is_said_and_lets_nothing_uncovered_out_where_programs_run() {
    if !can_run("led_past") {
        return;
    }
    let lab = Lab::new(Topology::Bridged);
    for backend in backends("led_past", &lab).into_iter().filter(|b| b.starts_with("iptables")) {
        let sysctl = |on: &dyn Fn(&str) -> String, value: u8| {
            on(&format!("sysctl -qw net.bridge.bridge-nf-call-iptables={value}"));
        };
        let on = |command: &str| lab.on_host(command);
        let mut gate = Drive::start(&lab, backend, 11, 1024, 600_000);
        sysctl(&on, 0);
        assert_eq!(gate.tell("rules"), "failing", "{backend}");
        let stats = gate.stats();
        assert_eq!((stats["open_to_all"], stats["may_have_left"]), (1, 1), "{backend}");
        sysctl(&on, 1);
        assert_eq!(gate.tell("rules"), "in_place", "{backend}");
        assert_eq!(gate.stat("open_to_all"), 0, "{backend}");
        drop(gate);

        let town = Town::new(Plan::OneBridge);
        let on = |command: &str| town.on("host", command);
        let mut gate = alone(&town, "");
        let [web, client] = ["web", "client"].map(|who| socket(&town, who));
        let to = at(town.ip("client"));
        until("what is covered passes", || {
            web.send_to(b"covered", to).unwrap();
            gate.tell("look");
            crate::gates::numbers(&gate.tell("tags"))["covered"] > 0
        });
        gate.tell("pending 0 1");
        sysctl(&on, 0);
        assert_eq!(gate.tell("rules"), "failing");
        web.send_to(b"uncovered", to).unwrap();
        udp(&town.ns("host"), &any(PORT)).send_to(MARKER, to).unwrap();
        while let Some(heard) = Some(next(&client)).filter(|heard| heard != MARKER) {
            assert_eq!(heard, b"covered");
        }
        let stats = gate.stats();
        assert_eq!((stats["open_to_all"], stats["may_have_left"]), (0, 1));
    }
}
