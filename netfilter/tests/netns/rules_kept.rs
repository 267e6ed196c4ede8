//! Rules that somebody takes away, and how one hears of it.

use crate::drive::Drive;
use crate::lab::{INTERFACE, Lab, in_namespace, next, nothing_came, udp};
use crate::{TOPOLOGIES, backends, can_run, skipped, to_client};
use tidelock_netfilter::rules::{RuleChanges, Topology};

/// What somebody does to the packet filter, and whether a guest's packets leave unheld from then on.
struct Change {
    command: String,
    opens: bool,
}

/// What is done to the rules of a gate that queues by this packet filter.
fn changes(backend: &str, lab: &Lab) -> Vec<Change> {
    let family = if lab.topology() == Topology::Bridged { "bridge" } else { "inet" };
    let opens = |command: String| Change { command, opens: true };
    let mut changes = Vec::new();
    if has_nftables(lab, family) {
        // Legacy iptables still queues then; what nftables has dropped beside it is gone.
        changes.push(Change {
            command: "nft flush ruleset".into(),
            opens: backend != "iptables-legacy",
        });
    }
    if backend.starts_with("iptables") {
        let six = backend.replace("ip", "ip6");
        changes.extend([
            opens(format!("{backend} -t mangle -F")),
            opens(format!("{backend} -t mangle -D FORWARD 1")),
            opens(format!("{backend} -t mangle -I FORWARD -j ACCEPT")),
            Change { command: format!("{six} -t mangle -D FORWARD 1"), opens: false },
        ]);
    } else {
        let on_table = |what: &str| {
            opens(format!("t=$(nft list tables | sed -n 's/table {family} //p'); nft {what}"))
        };
        changes.extend([
            on_table(&format!("delete table {family} $t")),
            on_table(&format!("flush chain {family} $t forward")),
            on_table(&format!("insert rule {family} $t forward accept")),
        ]);
        // Another one behind it drops.
        let command = format!(
            "t=$(nft list tables | sed -n 's/table {family} //p')
             c=$(nft list table {family} $t | sed -n 's/.*chain \\(held_[^ ]*\\) .*/\\1/p')
             h=$(nft -a list chain {family} $t $c | sed -n '/counter/s/.*handle //p')
             nft delete rule {family} $t $c handle $h"
        );
        changes.push(Change { command, opens: false });
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
        lab.on_host(&format!("{backend} -t mangle -F"));
        assert_eq!(gate.tell("rules"), "failing", "{backend}");
        assert_eq!(gate.tell("rules"), "failing", "{backend}");
        assert_eq!(gate.stat("rules_restored"), 0, "{backend}");
        sysctl(1);
        assert_eq!(gate.tell("rules"), "put_back", "{backend}");
        assert_eq!(gate.tell("rules"), "in_place", "{backend}");
        assert_eq!(gate.stat("rules_restored"), 1, "{backend}");
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
    let mut changes = in_namespace(&lab.host(), || RuleChanges::open().unwrap());
    assert!(!changes.drain(), "nothing has happened yet");
    elsewhere.on_host("nft add table inet others");
    assert!(!changes.drain(), "it happened in another namespace");
    for command in [
        "nft add table inet others",
        "nft delete table inet others",
        "iptables-nft -t mangle -A FORWARD -j ACCEPT",
        "iptables-nft -t mangle -F",
        "nft flush ruleset",
    ] {
        lab.on_host(command);
        assert!(changes.drain(), "{command}");
        assert!(!changes.drain(), "{command}: that was all");
        lab.on_host("nft list ruleset");
        assert!(!changes.drain(), "looking changes nothing");
    }
    // More than the socket's buffer takes.
    lab.on_host(
        "(echo add table inet many; for n in $(seq 4000); do echo add chain inet many c$n; done) \
         | nft -f -",
    );
    assert!(changes.drain(), "some were lost");
    assert!(!changes.drain());
    lab.on_host("nft flush ruleset");
    assert!(changes.drain(), "from then on it hears again");
}
