//! Groups of several members on several hosts, which are played by the tests.

use super::*;
use crate::storage::memory::{Faults, Memory};
use proptest::prelude::*;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{DiskId, Incarnation};
use tidelock_protocol::message::{
    Attach, Attached, DiskSpec, Follow, Followed, Form, Join, LastRun, Machine, Mode, Progress,
    UNASKED,
};
use tidelock_protocol::record::{Effect, Payload, Record};

const SIZE: u64 = 4096;
const GRACE_MS: u64 = 15_000;
const NAMES: [&str; 3] = ["a", "b", "c"];

fn at_ms(ms: u64) -> Now {
    Now { mono: MonoNanos(ms * 1_000_000), unix_ms: 1_700_000_000_000 + ms }
}

fn link(writer: u16) -> Link {
    Link { connection: ConnectionId(u64::from(writer) + 1), channel: Channel(1) }
}

fn host(writer: u16) -> String {
    format!("host-{writer}")
}

fn options() -> GroupOptions {
    GroupOptions {
        journal: journal::Options { segment_bytes: 1500 },
        unfolded_max_bytes: 1 << 30,
        fold_min_bytes: 1,
        hosts: Some((0..4).map(host).collect()),
    }
}

/// What the hosts' configurations say.
#[derive(Clone, Copy)]
struct Shape {
    writers: usize,
    form: Form,
}

impl Shape {
    fn peers(self) -> Vec<String> {
        NAMES[..self.writers].iter().map(|name| format!("{name}=10.0.0.{}", name.len())).collect()
    }

    fn join(self, writer: u16, incarnation: u64, last_run: LastRun) -> Join {
        let disk = DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: SIZE };
        let attach = Attach {
            group: "g".into(),
            member: NAMES[usize::from(writer)].into(),
            writer: WriterId(writer),
            writers: NAMES[..self.writers].iter().map(|n| (*n).to_owned()).collect(),
            disks: vec![disk],
            incarnation: Incarnation(incarnation),
            epoch: Epoch(0),
            last_run,
            mode: Mode::Pipelined,
            lease_ms: 10_000,
            grace_ms: GRACE_MS,
            machine: None,
        };
        Join { attach, form: self.form, peers: self.peers() }
    }

    fn follow(self) -> Follow {
        let attach = self.join(0, 1, LastRun::Unknown).attach;
        Follow {
            group: attach.group,
            member: "web".into(),
            writers: attach.writers,
            form: self.form,
            peers: self.peers(),
            epoch: Epoch(0),
            lease_ms: 10_000,
            grace_ms: GRACE_MS,
            machine: Some(Machine::Json("{}".into())),
        }
    }

    fn create(self, disk: &Memory) -> Option<Group<Memory>> {
        let attach = self.join(0, 1, LastRun::Unknown).attach;
        Group::create(disk.clone(), &host(0), &attach, at_ms(0), options()).ok()
    }
}

fn reopen(disk: &Memory) -> Group<Memory> {
    Group::open(disk.clone(), at_ms(0), options()).unwrap().unwrap().0
}

fn record(writer: u16, seq: u64, hlc: u64, deps: &[(u16, u64)]) -> Record {
    Record {
        writer: WriterId(writer),
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(hlc),
        deps: deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect(),
        disk: DiskId(0),
        offset: 0,
        copy: false,
        effect: Effect::Write(Payload::new(vec![seq as u8; 64].into())),
    }
}

fn done(writer: u16, seq: u64, hlc: u64, deps: &[(u16, u64)]) -> Record {
    Record { copy: true, effect: Effect::CopyDone, ..record(writer, seq, hlc, deps) }
}

fn send(group: &mut Group<Memory>, record: Record) {
    let link = link(record.writer.0);
    assert!(group.receive(at_ms(0), link, Frame::Record(link.channel, record)).is_none());
}

fn say(group: &mut Group<Memory>, writer: u16, message: Message) {
    let link = link(writer);
    assert!(group.receive(at_ms(0), link, Frame::Control(link.channel, message)).is_none());
}

/// What one link was told.
fn told(outputs: &[Output], to: Link) -> Vec<Message> {
    let of = |output: &Output| match output {
        Output::Send(link, message) if *link == to => Some(message.clone()),
        Output::Refuse(link, kind, reason) if *link == to => {
            Some(Message::Refused { kind: *kind, reason: reason.clone() })
        }
        _ => None,
    };
    outputs.iter().filter_map(of).collect()
}

fn progress(messages: &[Message]) -> Option<Progress> {
    messages.iter().rev().find_map(|message| match message {
        Message::Progress(progress) => Some(progress.clone()),
        Message::Followed(Followed { progress, .. }) => Some(progress.clone()),
        _ => None,
    })
}

fn copy_of(messages: &[Message]) -> CopyState {
    let of = |message: &Message| match message {
        Message::Attached(Attached { copy, .. }) => Some(*copy),
        _ => None,
    };
    messages.iter().find_map(of).unwrap_or_else(|| panic!("{messages:?}"))
}

fn refused(messages: &[Message]) -> Option<(RefusalKind, String)> {
    messages.iter().find_map(|message| match message {
        Message::Refused { kind, reason } => Some((*kind, reason.clone())),
        _ => None,
    })
}

/// Joins, and gives what was said to this writer.
fn join(group: &mut Group<Memory>, now: Now, join: &Join) -> Vec<Message> {
    let writer = join.attach.writer.0;
    group.join(now, link(writer), &host(writer), join);
    let outputs = group.take_outputs();
    let mut mine = told(&outputs, link(writer));
    // Questions to the others are part of what follows.
    mine.extend(outputs.iter().filter_map(|output| match output {
        Output::Send(to, sound @ Message::Sound { .. }) if *to != link(writer) => {
            Some(sound.clone())
        }
        _ => None,
    }));
    mine
}

fn vector(seqs: &[u64]) -> CountVector {
    seqs.iter().enumerate().map(|(i, s)| (WriterId(i as u16), Seq(*s))).collect()
}

/// Two writers on two hosts, both whole: a at seq 1, b at seq 1.
fn two(disk: &Memory, form: Form) -> Group<Memory> {
    let shape = Shape { writers: 2, form };
    let mut group = shape.create(disk).unwrap();
    for writer in 0..2 {
        let said = join(&mut group, at_ms(0), &shape.join(writer, 1, LastRun::Unknown));
        assert_eq!(copy_of(&said), CopyState::Empty);
        send(&mut group, done(writer, 1, 10 + u64::from(writer), &[]));
    }
    group.flush();
    group
}

#[test]
fn every_host_hears_c_and_what_depends_on_a_silent_writer_is_not_in_it() {
    let mut group = two(&Memory::new(), Form::Vector);
    group.take_outputs();
    send(&mut group, record(0, 2, 20, &[]));
    // b has heard of a's third record, which has not come.
    send(&mut group, record(1, 2, 21, &[(0, 3)]));
    group.flush();
    let outputs = group.take_outputs();
    for writer in 0..2 {
        let progress = progress(&told(&outputs, link(writer))).unwrap();
        assert_eq!(progress.committed, vector(&[2, 1]), "b's second waits for a");
        assert_eq!(progress.durable, Seq(2), "but it need not be sent again");
    }
    // a's host dies. Recovery leaves out what depends on what it had.
    group.connection_lost(link(0).connection);
    let recovery = group.recover(at_ms(0), true).unwrap();
    let seqs: Vec<_> = recovery.writers.iter().map(|w| (w.recovered.0, w.left_out)).collect();
    assert_eq!(seqs, [(2, 0), (1, 1)]);
    assert_eq!(recovery.writers[0].why, None);
}

/// What a recovery now says of what it leaves out of a writer; the same when asked again after a
/// restart.
fn left_out(group: &mut Group<Memory>, writer: u16) -> (String, Option<HeldBackBy>) {
    let disk = group.storage().crash(&mut || true);
    let recovery = reopen(&disk).recover(at_ms(0), true).unwrap();
    assert_eq!(reopen(&disk.killed()).recovery().unwrap(), recovery);
    let of = recovery.writers[usize::from(writer)].clone();
    (of.why.unwrap_or_default(), of.held_back_by)
}

#[test]
fn a_recovery_names_who_held_back_what_it_leaves_out() {
    let mut group = two(&Memory::new(), Form::Vector);
    assert_eq!(left_out(&mut group, 1), (String::new(), None));
    send(&mut group, record(0, 2, 20, &[]));
    send(&mut group, record(1, 2, 21, &[]));
    send(&mut group, record(1, 3, 22, &[(0, 5)]));
    send(&mut group, record(1, 4, 23, &[(0, 6)]));
    send(&mut group, record(0, 3, 24, &[(1, 4)]));
    group.flush();
    let (why, by) = left_out(&mut group, 1);
    assert_eq!(why, "the first (seq 3) depends on a's 5, of which the backup has 3 (host host-0)");
    let expected = HeldBackBy {
        member: "a".into(),
        host: "host-0".into(),
        waiting_seq: Seq(3),
        needs_seq: Some(Seq(5)),
        later_by_ms: None,
        has_seq: Seq(3),
        recovered_seq: Seq(2),
    };
    assert_eq!(by, Some(expected));
    let (why, _) = left_out(&mut group, 0);
    assert_eq!(
        why,
        "the first (seq 3) depends on b's 4, which is here and left out itself: of b everything \
         up to 2 is recovered (host host-1)"
    );
    // A resync that has not ended, and one that has and waits.
    let mut group = two(&Memory::new(), Form::Vector);
    let shape = Shape { writers: 2, form: Form::Vector };
    join(&mut group, at_ms(0), &shape.join(0, 2, LastRun::Unknown));
    send(&mut group, record(0, 2, 20, &[]));
    group.flush();
    let (why, by) = left_out(&mut group, 0);
    assert!(why.contains("resync of host host-0") && why.contains("seq 2"), "{why}");
    assert_eq!(by, None);
    send(&mut group, done(0, 3, 21, &[(1, 7)]));
    group.flush();
    let (why, by) = left_out(&mut group, 0);
    assert_eq!(
        why,
        "they belong to a resync; its end (seq 3) depends on b's 7, of which the backup has 1 \
         (host host-1)"
    );
    assert_eq!(by.unwrap().waiting_seq, Seq(3));
}

#[test]
fn by_time_a_recovery_names_who_was_behind() {
    let at = |ms| Hlc::new(ms, 0).0;
    let whole = || {
        let mut group = two(&Memory::new(), Form::Hlc);
        send(&mut group, record(1, 2, at(1000), &[]));
        send(&mut group, record(0, 2, at(1001), &[]));
        group.flush();
        group
    };
    let mut group = whole();
    send(&mut group, record(0, 3, at(2500), &[]));
    group.flush();
    let (why, by) = left_out(&mut group, 0);
    assert_eq!(
        why,
        "the first (seq 2) is 1 ms later than what b had said by then, with its seq 2 (host \
         host-1): it might have come after something that is missing"
    );
    assert_eq!((by.unwrap().member, left_out(&mut group, 1).0), ("b".into(), String::new()));
    // The end of a resync is later than what b has said: a's own stand is what holds back b then.
    let shape = Shape { writers: 2, form: Form::Hlc };
    let mut group = whole();
    send(&mut group, record(1, 3, at(1002), &[]));
    group.flush();
    join(&mut group, at_ms(0), &shape.join(0, 2, LastRun::Unknown));
    send(&mut group, record(1, 4, at(1100), &[]));
    send(&mut group, record(0, 3, at(1200), &[]));
    send(&mut group, done(0, 4, at(1500), &[]));
    group.flush();
    let (why, _) = left_out(&mut group, 0);
    assert!(why.starts_with("they belong to a resync; its end (seq 4) is 400 ms later"), "{why}");
    assert_eq!(left_out(&mut group, 1).1.unwrap().member, "a");
}

#[test]
fn the_watermark_is_the_least_of_all_writers_and_survives_a_restart() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Hlc);
    group.take_outputs();
    send(&mut group, record(0, 2, 500, &[]));
    group.flush();
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(10 + 1), Hlc(500)), "b holds it back");
    assert_eq!(said.committed, vector(&[1, 1]));
    // b has nothing to write, and says so.
    send(&mut group, Record { effect: Effect::Idle, ..record(1, 2, 600, &[]) });
    group.flush();
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(500), Hlc(500)), "idle is no frontier");
    assert_eq!(said.committed, vector(&[2, 1]));
    let group = reopen(&disk.killed());
    assert_eq!((group.cut.watermark(), group.cut()), (Hlc(500), &vector(&[2, 1])));
    // A time that does not grow breaks what the watermark says.
    let mut group = two(&Memory::new(), Form::Hlc);
    group.take_outputs();
    send(&mut group, record(0, 2, 10, &[]));
    assert_eq!(refused(&told(&group.take_outputs(), link(0))).unwrap().0, RefusalKind::Invalid);
}

#[test]
fn a_resync_ends_when_everyone_has_said_how_far_they_were() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = two(&disk, form);
        let shape = Shape { writers: 2, form };
        group.take_outputs();
        let said = join(&mut group, at_ms(0), &shape.join(0, 2, LastRun::Unknown));
        assert_eq!(copy_of(&said), CopyState::Resyncing);
        let Some(Message::Sound { id }) = said.last().cloned() else { panic!("{said:?}") };
        assert!(!said.iter().any(|m| matches!(m, Message::Floor { .. })), "b has not said");
        // b has admitted up to 4 and heard of a's old 9; nothing of it has arrived.
        say(&mut group, 1, Message::Sounded { id, pending: vector(&[9, 4]), hlc: Hlc(90) });
        let said = told(&group.take_outputs(), link(0));
        assert_eq!(said, [Message::Floor { pending: vector(&[9, 4]), hlc: Hlc(90) }]);
        let deps: &[_] = if form == Form::Vector { &[(1, 4)] } else { &[] };
        send(&mut group, record(0, 2, 80, &[]));
        send(&mut group, done(0, 3, 91, deps));
        group.flush();
        assert_eq!(group.cut().get(WriterId(0)), Seq(1), "{form}: b's are missing");
        let early = reopen(&disk.killed()).recover(at_ms(0), true);
        match form {
            Form::Vector => assert_eq!(early.unwrap().writers[0].recovered, Seq(1)),
            // The end of b's own initial copy is later than the time at which a stands still.
            Form::Hlc => assert!(matches!(early, Err(RecoverError::Initialising { .. }))),
        }
        for seq in 2..=4 {
            send(&mut group, record(1, seq, 90 + seq, &[]));
        }
        group.flush();
        assert_eq!(group.cut().get(WriterId(0)), Seq(3), "{form}");
    }
}

#[test]
fn two_resyncs_at_once_and_one_that_has_left() {
    let form = Form::Vector;
    let mut group = two(&Memory::new(), form);
    let shape = Shape { writers: 2, form };
    group.take_outputs();
    join(&mut group, at_ms(0), &shape.join(0, 2, LastRun::Unknown));
    let said = join(&mut group, at_ms(0), &shape.join(1, 2, LastRun::Unknown));
    let sounds = said.iter().filter(|m| matches!(m, Message::Sound { .. })).count();
    assert_eq!(sounds, 2, "each is asked for the other: {said:?}");
    for writer in 0..2 {
        say(&mut group, writer, Message::Sounded { id: 9, pending: vector(&[1, 1]), hlc: Hlc(20) });
    }
    let outputs = group.take_outputs();
    for writer in 0..2u16 {
        let floor = told(&outputs, link(writer)).into_iter().find_map(|m| match m {
            Message::Floor { pending, .. } => Some(pending),
            _ => None,
        });
        // What the other's old run had numbered is in its resync, as a whole.
        assert_eq!(floor.unwrap().get(WriterId(1 - writer)), Seq(2));
    }
    let mut group = two(&Memory::new(), form);
    group.take_outputs();
    say(&mut group, 1, Message::Detach);
    let said = join(&mut group, at_ms(0), &shape.join(0, 2, LastRun::Unknown));
    assert!(said.iter().any(|m| matches!(m, Message::Floor { .. })), "b ended cleanly: {said:?}");
}

#[test]
fn a_member_that_does_not_know_what_it_heard_is_told_how_far_everyone_is() {
    let form = Form::Vector;
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form };
    let mut group = two(&Memory::new(), form);
    group.follow(at_ms(0), web, "host-3", &shape.follow());
    group.take_outputs();
    let ask = |group: &mut Group<Memory>, mark, everyone| {
        let frame = Frame::Control(web.channel, Message::AskFloor { mark, everyone });
        assert!(group.receive(at_ms(0), web, frame).is_none());
        let outputs = group.take_outputs();
        assert_eq!(told(&outputs, web), [], "nobody has answered");
        (0..2)
            .map(|writer| match told(&outputs, link(writer))[..] {
                [Message::Sound { id }] => id,
                ref said => panic!("{said:?}"),
            })
            .max()
            .unwrap()
    };
    let answer = |group: &mut Group<Memory>, writer, id, seqs: &[u64]| {
        say(group, writer, Message::Sounded { id, pending: vector(seqs), hlc: Hlc(70) });
        group.take_outputs()
    };
    let first = ask(&mut group, 11, false);
    assert_eq!(told(&answer(&mut group, 0, first, &[5, 1]), web), [], "b has not");
    let second = ask(&mut group, 12, false);
    assert_eq!(told(&answer(&mut group, 0, second, &[6, 1]), web), []);
    assert_eq!(told(&answer(&mut group, 1, first, &[1, 3]), web), [], "before the question");
    let outputs = answer(&mut group, 1, second, &[1, 4]);
    let pending = vector(&[6, 4]);
    let floor = |mark| Message::FloorIs { mark, pending: pending.clone(), hlc: Hlc(70) };
    assert_eq!(told(&outputs, web), [floor(12)]);
    assert_eq!(told(&outputs, link(0)), []);

    // After mode async the others do not know what they heard of it, either.
    let id = ask(&mut group, 13, true);
    answer(&mut group, 0, id, &[6, 1]);
    let outputs = answer(&mut group, 1, id, &[1, 4]);
    assert_eq!(told(&outputs, web), [floor(13)]);
    assert_eq!(
        (told(&outputs, link(0)), told(&outputs, link(1))),
        (vec![floor(0)], vec![floor(0)])
    );

    // A writer that cannot be reached cannot be asked, unless it has left.
    group.connection_lost(link(1).connection);
    let frame = Frame::Control(web.channel, Message::AskFloor { mark: 14, everyone: false });
    assert!(group.receive(at_ms(0), web, frame).is_none());
    let said = told(&group.take_outputs(), link(0));
    let Some(Message::Sound { id }) = said.last() else { panic!("{said:?}") };
    assert_eq!(told(&answer(&mut group, 0, *id, &[6, 1]), web), []);
    group.remove("b").unwrap();
    let said = told(&group.take_outputs(), web);
    assert!(said.iter().any(|m| matches!(m, Message::FloorIs { mark: 14, .. })), "{said:?}");
}

/// The floors that a writer was told.
fn floors(outputs: &[Output], writer: u16) -> Vec<CountVector> {
    let of = |message| match message {
        Message::Floor { pending, .. } => Some(pending),
        _ => None,
    };
    told(outputs, link(writer)).into_iter().filter_map(of).collect()
}

#[test]
fn a_seq_that_was_lost_is_given_out_again_for_whoever_waits_for_it() {
    let form = Form::Vector;
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form };
    let mut group = two(&Memory::new(), form);
    group.follow(at_ms(0), web, "host-3", &shape.follow());
    join(&mut group, at_ms(0), &shape.join(0, 2, LastRun::Unknown));
    // The member without disks has heard of a's old 9. While a's own floor is not known, that
    // would be taken for it.
    let waits = Message::Sounded { id: UNASKED, pending: vector(&[9, 1]), hlc: Hlc(0) };
    let say_again = |group: &mut Group<Memory>| {
        let frame = Frame::Control(web.channel, waits.clone());
        assert!(group.receive(at_ms(0), web, frame).is_none());
        floors(&group.take_outputs(), 0)
    };
    assert_eq!(say_again(&mut group), []);
    say(&mut group, 1, Message::Sounded { id: 1, pending: vector(&[0, 1]), hlc: Hlc(20) });
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[0, 1])]);
    send(&mut group, done(0, 2, 20, &[(1, 1)]));
    group.flush();
    assert_eq!(say_again(&mut group), [vector(&[9])], "with the next beacon");
    for seq in 3..=9 {
        send(&mut group, Record { effect: Effect::Idle, ..record(0, seq, 20 + seq, &[]) });
    }
    assert_eq!(say_again(&mut group), [], "it has come");
    // A record of b waits, and b has forgotten why.
    send(&mut group, record(1, 2, 40, &[(0, 12)]));
    group.flush();
    group.take_outputs();
    group.beacon(at_ms(0), link(1), MonoNanos(1));
    assert_eq!(floors(&group.take_outputs(), 0), []);
    group.beacon(at_ms(0), link(0), MonoNanos(1));
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[12])]);
}

#[test]
fn a_run_of_which_nothing_has_arrived_was_served_all_the_same() {
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = shape.create(&Memory::new()).unwrap();
    let unknown = LastRun::Unknown;
    assert_eq!(copy_of(&join(&mut group, at_ms(0), &shape.join(0, 1, unknown))), CopyState::Empty);
    // Its guest has heard of b's second write. It stops, and that is forgotten.
    join(&mut group, at_ms(0), &shape.join(1, 1, unknown));
    let said = join(&mut group, at_ms(0), &shape.join(0, 2, unknown));
    assert_eq!(copy_of(&said), CopyState::Partial);
    let Some(Message::Sound { id }) = said.last().cloned() else { panic!("{said:?}") };
    say(&mut group, 1, Message::Sounded { id, pending: vector(&[0, 2]), hlc: Hlc(20) });
    assert_eq!(floors(&group.take_outputs(), 0), [vector(&[0, 2])]);
    let again = shape.join(0, 2, LastRun::Continues { from: Seq(1) });
    assert_eq!(copy_of(&join(&mut group, at_ms(0), &again)), CopyState::Partial);
}

#[test]
fn a_time_that_was_lost_with_a_removed_writer_is_passed() {
    let form = Form::Hlc;
    let mut group = two(&Memory::new(), form);
    group.connection_lost(link(1).connection);
    group.remove("b").unwrap();
    group.take_outputs();
    say(&mut group, 0, Message::Sounded { id: UNASKED, pending: vector(&[]), hlc: Hlc(700) });
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(10), Hlc(700)), "a will speak");
}

#[test]
fn members_without_disks_hear_c_hold_the_grace_and_are_fenced() {
    let form = Form::Vector;
    let disk = Memory::new();
    let shape = Shape { writers: 2, form };
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let mut group = two(&disk, form);
    group.follow(at_ms(0), web, "host-3", &shape.follow());
    let said = told(&group.take_outputs(), web);
    assert_eq!(progress(&said).unwrap().committed, vector(&[1, 1]));
    send(&mut group, record(0, 2, 20, &[]));
    group.flush();
    let said = told(&group.take_outputs(), web);
    assert_eq!(progress(&said).unwrap().committed, vector(&[2, 1]));
    // Its beacon is what the recovery waits for.
    group.beacon(at_ms(20_000), web, MonoNanos(7));
    assert_eq!(told(&group.take_outputs(), web), [Message::Lease { sent_at: MonoNanos(7) }]);
    let early = group.recover(at_ms(20_001), false).unwrap_err();
    assert!(matches!(early, RecoverError::Grace { remaining_ms } if remaining_ms > 14_000));
    let recovery = group.recover(at_ms(35_001), false).unwrap();
    assert_eq!(recovery.followers, ["web"]);
    assert_eq!(refused(&told(&group.take_outputs(), web)).unwrap().0, RefusalKind::Fenced);
    assert!(manifest::read_machine(group.storage(), "web").unwrap().is_some());
}

#[test]
fn members_are_added_when_no_host_can_be_ignorant_of_it_and_removed_by_the_operator() {
    let form = Form::Vector;
    let disk = Memory::new();
    let mut group = two(&disk, form);
    group.take_outputs();
    let three = Shape { writers: 3, form };
    for writer in 0..2 {
        group.beacon(at_ms(1000), link(writer), MonoNanos(1));
    }
    let said = join(&mut group, at_ms(2000), &three.join(2, 1, LastRun::Unknown));
    let (kind, reason) = refused(&said).unwrap();
    assert_eq!(kind, RefusalKind::Mismatch, "{reason}");
    assert!(reason.contains("host-0"), "{reason}");
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let said = join(&mut group, at_ms(2000), &three.join(2, 1, LastRun::Unknown));
    assert_eq!(refused(&said).unwrap().0, RefusalKind::Stopping, "a lease may hold");
    let now = at_ms(16_001);
    let said = join(&mut group, now, &three.join(2, 1, LastRun::Unknown));
    assert!(refused(&said).is_none(), "{said:?}");
    assert_eq!(group.state().writers[2].standing, Standing::Joining);
    // The old shape is refused from now on, the new one is taken.
    let two_again = Shape { writers: 2, form }.join(0, 2, LastRun::Clean { seq: Seq(1) });
    let said = join(&mut group, now, &two_again);
    assert_eq!(refused(&said).unwrap().0, RefusalKind::Mismatch);
    let said = join(&mut group, now, &three.join(0, 2, LastRun::Clean { seq: Seq(1) }));
    assert!(refused(&said).is_none(), "{said:?}");
    let said = join(&mut group, now, &three.join(1, 2, LastRun::Clean { seq: Seq(1) }));
    assert!(refused(&said).is_none(), "{said:?}");
    // Still recoverable, without the new one.
    send(&mut group, record(2, 1, 30, &[]));
    group.flush();
    assert!(group.status(now).recoverable);
    let recovery = reopen(&disk.killed()).recover(at_ms(0), true).unwrap();
    assert!(recovery.writers[0].is_recovered && !recovery.writers[2].is_recovered);
    // Removed: what depended on what never came is in the cut now, and nothing waits.
    send(&mut group, record(0, 2, 40, &[(2, 7)]));
    group.flush();
    assert_eq!(group.cut().get(WriterId(0)), Seq(1));
    assert!(matches!(group.remove("c"), Err(RemoveError::Attached { .. })));
    assert!(matches!(group.remove("x"), Err(RemoveError::Unknown { .. })));
    group.connection_lost(link(2).connection);
    group.take_outputs();
    group.remove("c").unwrap();
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!(said.committed, vector(&[2, 1, u64::MAX]));
    let said = join(&mut group, now, &three.join(2, 3, LastRun::Unknown));
    assert!(refused(&said).unwrap().1.contains("removed"));
    let mut group = reopen(&disk.killed());
    assert_eq!(group.cut().get(WriterId(0)), Seq(2), "also after a restart");
    let recovery = group.recover(at_ms(0), true).unwrap();
    assert!(recovery.writers[2].why.as_ref().unwrap().contains("removed"));
    assert_eq!(group.recovered_disks().unwrap().len(), 2);
}

#[test]
fn who_is_left_alone_is_let_in_without_the_others() {
    for form in [Form::Vector, Form::Hlc] {
        let shape = Shape { writers: 1, form };
        let mut group = shape.create(&Memory::new()).unwrap();
        let mut first = shape.join(0, 1, LastRun::Unknown);
        first.peers.push("web=10.0.0.9".into());
        assert!(refused(&join(&mut group, at_ms(0), &first)).is_none());
        send(&mut group, done(0, 1, 10, &[]));
        group.flush();
        let web = Link { connection: ConnectionId(9), channel: Channel(3) };
        let follow = Follow { peers: first.peers.clone(), ..shape.follow() };
        group.follow(at_ms(0), web, "host-3", &follow);
        group.take_outputs();
        group.connection_lost(link(0).connection);
        // "web" is taken out of the configuration: what is left speaks of no group.
        let alone = shape.join(0, 2, LastRun::Clean { seq: Seq(1) }).attach;
        let attach = |group: &mut Group<Memory>, now| {
            group.attach(now, link(0), &host(0), &alone);
            told(&group.take_outputs(), link(0))
        };
        let said = attach(&mut group, at_ms(1000));
        assert_eq!(refused(&said).unwrap().0, RefusalKind::Version, "web's host is connected");
        group.connection_lost(web.connection);
        let said = attach(&mut group, at_ms(16_001));
        assert_eq!(copy_of(&said), CopyState::Whole, "{form}");
        assert_eq!(group.state().form, form);
    }
}

#[test]
fn nobody_is_made_to_give_out_more_than_a_run_can_have_lost() {
    let mut group = two(&Memory::new(), Form::Vector);
    for (seq, is_asked) in [(1 << 24, true), ((1 << 24) + 2, false), (u64::MAX, false)] {
        group.take_outputs();
        let pending = vector(&[seq]);
        say(&mut group, 1, Message::Sounded { id: UNASKED, pending, hlc: Hlc(0) });
        let said = told(&group.take_outputs(), link(0));
        let floor = |message: &Message| matches!(message, Message::Floor { .. });
        assert_eq!(said.iter().any(floor), is_asked, "{seq}: {said:?}");
    }
    // Nor by what the others answer when it resyncs.
    let said = join(
        &mut group,
        at_ms(0),
        &Shape { writers: 2, form: Form::Vector }.join(0, 2, LastRun::Unknown),
    );
    let sound = said.iter().find_map(|message| match message {
        Message::Sound { id } => Some(*id),
        _ => None,
    });
    let pending = vector(&[(1 << 24) + 2, 1]);
    say(&mut group, 1, Message::Sounded { id: sound.unwrap(), pending, hlc: Hlc(0) });
    let said = told(&group.take_outputs(), link(0));
    let floor = said.iter().find_map(|message| match message {
        Message::Floor { pending, .. } => Some(pending.clone()),
        _ => None,
    });
    assert_eq!(floor, Some(vector(&[0, 1])));
}

#[test]
fn who_is_said_to_be_removed_is_also_after_a_power_loss() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    group.connection_lost(link(1).connection);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    for _ in 0..2 {
        assert!(matches!(group.remove("b"), Err(RemoveError::Journal(_))), "there is no room");
    }
    let standing = |group: &Group<Memory>| group.state().writers[1].standing;
    assert_eq!(standing(&reopen(&disk.crash(&mut || false))), Standing::Member);
    disk.set_faults(Faults::default());
    group.remove("b").unwrap();
    assert_eq!(standing(&reopen(&disk.crash(&mut || false))), Standing::Removed);
}

#[test]
fn a_writer_that_is_added_takes_nothing_from_the_cut_that_was_told() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = two(&disk, form);
        send(&mut group, record(0, 2, 500, &[]));
        send(&mut group, record(1, 2, 501, &[]));
        group.flush();
        let told = group.told();
        (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
        let three = Shape { writers: 3, form };
        let said = join(&mut group, at_ms(16_001), &three.join(2, 1, LastRun::Unknown));
        assert!(refused(&said).is_none(), "{said:?}");
        send(&mut group, record(2, 1, 600, &[]));
        group.flush();
        assert!(told.get(WriterId(0)) >= Seq(2) && group.told().covers(&told));
        let group = reopen(&disk.killed());
        assert!(group.told().covers(&told), "{form}: {} of {told}", group.told());
    }
}

#[test]
fn a_disk_is_added_by_a_resync_and_the_form_changes_when_everything_is_in_the_cut() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    let shape = Shape { writers: 2, form: Form::Vector };
    group.take_outputs();
    let mut more = shape.join(0, 2, LastRun::Clean { seq: Seq(1) });
    let data = DiskSpec { id: DiskId(1), name: "data".into(), size_bytes: SIZE };
    more.attach.disks.push(data);
    let said = join(&mut group, at_ms(0), &more);
    assert_eq!(copy_of(&said), CopyState::Resyncing);
    let write = Record { disk: DiskId(1), ..record(0, 2, 20, &[]) };
    send(&mut group, write);
    send(&mut group, done(0, 3, 21, &[]));
    group.flush();
    assert_eq!(group.cut().get(WriterId(0)), Seq(3));
    let fewer = shape.join(0, 3, LastRun::Clean { seq: Seq(3) });
    assert_eq!(refused(&join(&mut group, at_ms(0), &fewer)).unwrap().0, RefusalKind::Mismatch);
    // The form: with a record beyond the cut it must not change.
    send(&mut group, record(1, 2, 22, &[(0, 9)]));
    group.flush();
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let mut hlc = Shape { writers: 2, form: Form::Hlc }.join(0, 4, LastRun::Clean { seq: Seq(3) });
    hlc.attach.disks.clone_from(&more.attach.disks);
    let now = at_ms(60_000);
    assert_eq!(refused(&join(&mut group, now, &hlc)).unwrap().0, RefusalKind::Mismatch);
    let mut group = two(&Memory::new(), Form::Vector);
    group.take_outputs();
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    hlc.attach.disks.truncate(1);
    hlc.attach.last_run = LastRun::Clean { seq: Seq(1) };
    let said = join(&mut group, now, &hlc);
    assert!(refused(&said).is_none(), "{said:?}");
    assert_eq!((group.state().form, group.cut()), (Form::Hlc, &vector(&[1, 1])));
}

/// A step of a group's random life.
#[derive(Clone, Debug)]
enum Step {
    /// A writer writes; `true`: after it has heard of everything that was written.
    Write(u16, bool),
    /// So many of its records arrive.
    Arrive(u16, usize),
    Idle(u16),
    Flush,
    Fold,
    /// The server is killed and started again.
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u16..3, any::<bool>()).prop_map(|(w, hears)| Step::Write(w, hears)),
        6 => (0u16..3, 1usize..4).prop_map(|(w, n)| Step::Arrive(w, n)),
        1 => (0u16..3).prop_map(Step::Idle),
        3 => Just(Step::Flush),
        2 => Just(Step::Fold),
        1 => Just(Step::Reopen),
    ]
}

/// Three writers on three hosts, and what they really know of each other.
struct Life {
    shape: Shape,
    sent: [usize; 3],
    /// By writer: its records, each with all that it depends on.
    streams: [Vec<(Record, CountVector)>; 3],
    clocks: [HlcClock; 3],
    knows: [CountVector; 3],
    latest: Hlc,
    told: CountVector,
    told_watermark: Hlc,
}

impl Life {
    fn new(form: Form) -> Self {
        let mut life = Self {
            shape: Shape { writers: 3, form },
            sent: [0; 3],
            streams: Default::default(),
            clocks: Default::default(),
            knows: Default::default(),
            latest: Hlc(0),
            told: CountVector::new(),
            told_watermark: Hlc(0),
        };
        (0..3).for_each(|writer| life.push(writer, false, Effect::CopyDone));
        life
    }

    fn push(&mut self, writer: u16, hears: bool, effect: Effect) {
        let i = usize::from(writer);
        if hears {
            let all: CountVector = (0..3u16)
                .map(|w| (WriterId(w), Seq(self.streams[usize::from(w)].len() as u64)))
                .collect();
            self.knows[i].merge(&all);
            self.clocks[i].observe(self.latest);
        }
        let hlc = self.clocks[i].tick(self.streams[i].len() as u64 + 7 * u64::from(writer));
        self.latest = self.latest.max(hlc);
        let seq = self.streams[i].len() as u64 + 1;
        let known: Vec<_> = self.knows[i]
            .entries()
            .filter(|(w, _)| w.0 != writer)
            .map(|(w, s)| (w.0, s.0))
            .collect();
        let deps = if self.shape.form == Form::Vector { &known[..] } else { &[] };
        let copy = effect == Effect::CopyDone;
        let payload = record(writer, seq, hlc.0, deps);
        let record = match effect {
            Effect::Write(_) => payload,
            effect => Record { effect, copy, ..payload },
        };
        let known = known.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect();
        self.streams[i].push((record, known));
    }

    fn attach(&mut self, group: &mut Group<Memory>) -> Option<()> {
        for writer in 0..3u16 {
            let run = LastRun::Continues { from: Seq(1) };
            group.join(at_ms(0), link(writer), &host(writer), &self.shape.join(writer, 1, run));
            let said = told(&group.take_outputs(), link(writer));
            let attached = said.iter().find_map(|m| match m {
                Message::Attached(attached) => Some(attached.durable),
                _ => None,
            });
            self.sent[usize::from(writer)] = attached?.0 as usize;
        }
        Some(())
    }

    fn listen(&mut self, group: &mut Group<Memory>) {
        let outputs = group.take_outputs();
        for writer in 0..3 {
            if let Some(progress) = progress(&told(&outputs, link(writer))) {
                self.told.merge(&progress.committed);
                self.told_watermark = self.told_watermark.max(progress.watermark);
            }
        }
    }

    fn run(&mut self, disk: &Memory, steps: &[Step]) -> Option<()> {
        let mut group = self.shape.create(disk)?;
        self.attach(&mut group)?;
        for step in steps {
            match step {
                Step::Write(writer, hears) => {
                    let effect = Effect::Write(Payload::new(vec![1].into()));
                    self.push(*writer, *hears, effect);
                }
                Step::Idle(writer) => self.push(*writer, true, Effect::Idle),
                Step::Arrive(writer, count) => {
                    let i = usize::from(*writer);
                    for _ in 0..*count {
                        let Some((record, _)) = self.streams[i].get(self.sent[i]) else { break };
                        send(&mut group, record.clone());
                        self.sent[i] += 1;
                    }
                }
                Step::Flush => {
                    group.flush();
                    self.listen(&mut group);
                }
                Step::Fold => {
                    if let Some(job) = group.fold_job() {
                        let cut = job.cut.clone();
                        self.check_closed(&cut);
                        let result = job.run();
                        group.fold_done(cut, result);
                    }
                }
                Step::Reopen => {
                    drop(group);
                    group = Group::open(disk.clone(), at_ms(0), options()).ok()??.0;
                    self.attach(&mut group)?;
                }
            }
            if group.broken().is_some() {
                return None;
            }
        }
        group.flush();
        self.listen(&mut group);
        Some(())
    }

    fn check_closed(&self, cut: &CountVector) {
        for (record, known) in self.streams.iter().flatten() {
            if record.seq <= cut.get(record.writer) {
                assert!(cut.covers(known), "{cut} has {} of {}", record.seq, record.writer);
            }
        }
    }

    /// Rules 1 and 2: what a recovery takes is closed under what really depends on what, and has
    /// all that any host was told.
    fn check(&self, disk: &Memory) {
        let Ok(Some((mut group, _))) = Group::open(disk.clone(), at_ms(0), options()) else {
            assert_eq!(self.told, CountVector::new());
            return;
        };
        if self.shape.form != group.state().form {
            assert_eq!(self.told, CountVector::new(), "before the first attachment was answered");
            return;
        }
        assert!(group.cut().covers(&self.told), "{} was told, {} is left", self.told, group.cut());
        assert!(group.cut.watermark() >= self.told_watermark);
        self.check_closed(&group.cut().clone());
        for (record, _) in self.streams.iter().flatten() {
            let is_in = record.seq <= group.cut().get(record.writer);
            assert!(is_in || record.hlc > self.told_watermark);
        }
        match group.recover(at_ms(0), true) {
            Ok(recovery) => {
                let cut = recovery.writers.iter().zip(0..).map(|(w, i)| (WriterId(i), w.recovered));
                let cut: CountVector = cut.collect();
                assert!(cut.covers(&self.told));
                self.check_closed(&cut);
            }
            Err(RecoverError::Initialising { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn whatever_happens_the_cut_is_closed_and_nothing_told_is_lost(
        steps in prop::collection::vec(step(), 1..80),
        at in 0u64..250,
        hlc: bool,
        seed: u64,
    ) {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let mut life = Life::new(if hlc { Form::Hlc } else { Form::Vector });
        life.run(&disk, &steps);
        let mut state = seed | 1;
        for threshold in [0, u64::MAX / 2, u64::MAX] {
            life.check(&disk.crash(&mut || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state < threshold
            }));
        }
    }
}
