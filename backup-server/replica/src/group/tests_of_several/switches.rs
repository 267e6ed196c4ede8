//! Hosts that hand their group over together.

use super::*;
use crate::group::RecoverError;

fn two_drained(disk: &Memory) -> Group<Memory> {
    let mut group = two(disk, Form::Vector);
    group.take_outputs();
    group
}

/// What both are told of each other.
fn awaited(group: &mut Group<Memory>) -> [Vec<Vec<String>>; 2] {
    let outputs = group.take_outputs();
    [0, 1].map(|writer| {
        let of = |message| match message {
            Message::SwitchAwaits { members } => Some(members),
            _ => None,
        };
        told(&outputs, link(writer)).into_iter().filter_map(of).collect()
    })
}

fn ready(group: &mut Group<Memory>, writer: u16, ready: bool) -> [Vec<Vec<String>>; 2] {
    say(group, writer, Message::ReadyToSwitch { ready });
    awaited(group)
}

fn comes_back(group: &mut Group<Memory>, writer: u16) {
    let shape = Shape { writers: 2, form: Form::Vector };
    group.connection_lost(link(writer).connection);
    let seq = group.committed().get(WriterId(writer));
    let last_run = LastRun::Clean { seq, served: false };
    group.attach(at_ms(0), link(writer), &host(writer), &shape.writer(writer, 2, last_run));
}

fn names(names: &[&str]) -> Vec<Vec<String>> {
    vec![names.iter().map(|name| (*name).to_owned()).collect()]
}

const GO: [&str; 0] = [];
const NOTHING: Vec<Vec<String>> = Vec::new();

fn kept_by(group: &mut Group<Memory>) -> Option<Vec<String>> {
    match group.recover(at_ms(1), false) {
        Ok(_) => None,
        Err(RecoverError::Grace { kept_by, .. }) => Some(kept_by),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn all_are_told_to_go_when_all_are_ready_and_not_before() {
    let disk = Memory::new();
    let mut group = two_drained(&disk);
    assert_eq!(ready(&mut group, 0, true), [names(&["b"]), NOTHING]);
    assert_eq!(ready(&mut group, 1, true), [names(&GO), names(&GO)]);
    assert_eq!(kept_by(&mut group), Some(vec![]), "nobody has shut its gate yet");
    say(&mut group, 0, Message::GiveUpLease);
    assert_eq!(awaited(&mut group), [NOTHING, names(&GO)]);
    assert_eq!(kept_by(&mut group), Some(vec!["b on host-1".to_owned()]));
    assert_eq!(group.status(at_ms(1)).lease_kept_by, ["b on host-1"]);
    say(&mut group, 1, Message::GiveUpLease);
    assert_eq!(group.status(at_ms(1)).lease_kept_by, [""; 0]);
    assert_eq!(kept_by(&mut group), None);
}

#[test]
fn one_that_waits_may_go_on_as_long_as_it_was_not_told_to_go() {
    let disk = Memory::new();
    let mut group = two_drained(&disk);
    ready(&mut group, 0, true);
    assert_eq!(ready(&mut group, 0, false), [names(&["a", "b"]), NOTHING]);
    assert_eq!(
        ready(&mut group, 1, true),
        [NOTHING, names(&["a"])],
        "nobody counts on it any more"
    );
    assert_eq!(ready(&mut group, 0, true), [names(&GO), names(&GO)]);
    // It was told while its wish was on its way.
    assert_eq!(ready(&mut group, 1, false), [names(&GO), names(&GO)]);
    // The other one could not go either: then it begins anew.
    assert_eq!(ready(&mut group, 0, false), [names(&GO), NOTHING]);
    assert_eq!(ready(&mut group, 0, true), [names(&["b"]), NOTHING]);
}

#[test]
fn the_word_of_a_host_ends_with_its_connection() {
    let disk = Memory::new();
    let mut group = two_drained(&disk);
    ready(&mut group, 0, true);
    group.connection_lost(link(0).connection);
    assert_eq!(ready(&mut group, 1, true), [NOTHING, names(&["a"])]);
    comes_back(&mut group, 0);
    assert_eq!(awaited(&mut group), [NOTHING, names(&["a"])], "it has to say it again");
    assert_eq!(ready(&mut group, 0, true), [names(&GO), names(&GO)]);
}

#[test]
fn a_host_that_dies_before_it_has_shut_its_gate_is_waited_for_and_can_follow() {
    let disk = Memory::new();
    let mut group = two_drained(&disk);
    ready(&mut group, 0, true);
    ready(&mut group, 1, true);
    say(&mut group, 0, Message::GiveUpLease);
    group.take_outputs();
    // b has not heard it, or has died over it: its next run serves as before.
    comes_back(&mut group, 1);
    assert_eq!(awaited(&mut group), [NOTHING, NOTHING]);
    assert_eq!(kept_by(&mut group), Some(vec!["b on host-1".to_owned()]));
    assert_eq!(ready(&mut group, 1, true), [NOTHING, names(&GO)], "the other one has gone already");
    say(&mut group, 1, Message::GiveUpLease);
    assert_eq!(kept_by(&mut group), None);
}

#[test]
fn a_member_without_disks_has_a_lease_too() {
    let disk = Memory::new();
    let mut group = two_drained(&disk);
    let web = Link { connection: link(1).connection, channel: Channel(2) };
    let shape = Shape { writers: 2, form: Form::Vector };
    group.attach(at_ms(0), web, &host(1), &shape.follower());
    group.take_outputs();
    ready(&mut group, 0, true);
    assert_eq!(ready(&mut group, 1, true), [names(&["web"]), names(&["web"])]);
    let of_web = |message| Frame::Control(web.channel, message);
    let frame = of_web(Message::ReadyToSwitch { ready: true });
    assert!(group.receive(at_ms(0), web, frame).is_none());
    assert_eq!(awaited(&mut group), [names(&GO), names(&GO)]);
    say(&mut group, 0, Message::GiveUpLease);
    say(&mut group, 1, Message::GiveUpLease);
    assert_eq!(kept_by(&mut group), Some(vec!["web on host-1".to_owned()]));
    assert!(group.receive(at_ms(0), web, of_web(Message::GiveUpLease)).is_none());
    assert_eq!(kept_by(&mut group), None);
}

#[test]
fn a_restart_of_the_server_forgets_who_was_ready() {
    let disk = Memory::new();
    let mut group = two_drained(&disk);
    ready(&mut group, 0, true);
    ready(&mut group, 1, true);
    say(&mut group, 0, Message::GiveUpLease);
    let mut group = reopen(&disk.killed());
    comes_back(&mut group, 0);
    comes_back(&mut group, 1);
    group.take_outputs();
    assert_eq!(ready(&mut group, 1, true), [NOTHING, names(&["a"])]);
    say(&mut group, 0, Message::GiveUpLease);
    assert_eq!(awaited(&mut group), [NOTHING, names(&GO)]);
}
