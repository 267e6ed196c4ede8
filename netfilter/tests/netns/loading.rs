//! Loading the programs: where it is not allowed, and with another number of the option.

use crate::can_run;
use crate::drive::Drive;
use crate::lab::{next, nothing_came};
use crate::tagging::{at, socket, until_stat};
use crate::town::{Plan, Town};
use crate::wire::{Packet, Wire};

/// Root without the right to load kernel programs, and with all else that a gate needs.
const WITHOUT_BPF: [&str; 2] = ["setpriv", "--bounding-set=-bpf,-sys_admin,-perfmon"];

#[test]
fn where_kernel_programs_may_not_be_loaded_several_members_are_refused_and_one_does_without() {
    if !can_run("without_bpf") {
        return;
    }
    let town = Town::new(Plan::OneRouter);
    let pin = town.pin().display();
    let start = |member: &str, interface: &str, queue: &str, members: &str| {
        format!(
            "start member={member} interface={interface} topology=routed queue={queue} len=64 mode=pipelined \
             lease_ms=600000 backend=any members={members} pin={pin} tagging=2"
        )
    };
    let [web, client] = ["web", "client"].map(|who| socket(&town, who));
    for form in ["tagging=2", "tagging=hlc"] {
        let mut drive = Drive::spawn_under(&town.ns("host"), &WITHOUT_BPF);
        let several = start("web,db", "w0,d0", "11,12", "web@10.71.1.2/db@10.71.2.2");
        let said = drive.tell_refused(&several.replace("tagging=2", form));
        assert!(said.contains("group \"drive\""), "{said}");
        let allowed = "not allowed to load kernel programs: run tidelockd as root or with CAP_BPF, \
                       CAP_NET_ADMIN and CAP_PERFMON";
        assert!(said.contains(allowed), "{said}");
    }
    // It has not begun to protect anybody in part.
    let rules = "iptables-nft-save; nft list ruleset; tc filter show dev w0 ingress; \
                 tc filter show dev w0 egress";
    let left = town.on("host", rules);
    assert!(!left.contains("TL-") && !left.contains("tidelock") && !left.contains("bpf"), "{left}");

    // A member alone has nobody to tell: all of its packets go through the queue.
    let mut drive = Drive::spawn_under(&town.ns("host"), &WITHOUT_BPF);
    let said = drive.tell(&start("web", "w0", "11", "web@10.71.1.2"));
    assert!(said.contains("tagging=unavailable"), "{said}");
    drive.tell("pending 0 1");
    drive.tell("commit 0 0");
    drive.tell("lease");
    web.send_to(b"uncovered", at(town.ip("client"))).unwrap();
    drive.until_stat("held_packets", |n| n >= 1);
    nothing_came(&client);
    drive.tell("commit 0 1");
    assert_eq!(next(&client), b"uncovered");
}

#[test]
fn members_talk_by_another_number_of_the_option() {
    if !can_run("another_number") {
        return;
    }
    for number in [222, 128, 255] {
        let town = Town::new(Plan::TwoHosts);
        let mut gates = town.gates(&format!("2 option={number}"));
        let wire = Wire::of(&town.ns("host"), "lan");
        let [web, db, client] = ["web", "db", "client"].map(|who| socket(&town, who));
        gates.tell("web", "pending 0 5");
        web.send_to(b"hello", at(town.ip("db"))).unwrap();
        assert_eq!(next(&db), b"hello");
        let of_web = |packet: &&Packet| packet.0.ends_with(b"hello");
        let sent = wire.sent();
        assert_eq!(sent.iter().find(of_web).expect("it crossed the LAN").0[20], number);
        assert_eq!(gates.tags("db")["p0"], 5);
        db.send_to(b"answer", at(town.ip("client"))).unwrap();
        until_stat(&mut gates, "db", "held_packets", |n| n >= 1);
        nothing_came(&client);
        gates.of("db").tell("commit 0 5");
        assert_eq!(next(&client), b"answer");
    }
}
