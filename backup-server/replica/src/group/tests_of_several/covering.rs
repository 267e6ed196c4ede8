//! Waiting until the cut has what all had written.

use super::*;

fn sounded(group: &mut Group<Memory>, writer: u16, id: u64, pending: &[u64]) {
    say(group, writer, Message::Sounded { id, pending: vector(pending), hlc: Hlc(0) });
}

fn asked(group: &mut Group<Memory>, writer: u16) -> Vec<Message> {
    told(&group.take_outputs(), link(writer))
}

#[test]
fn all_are_asked_and_it_waits_until_the_cut_has_what_they_say() {
    let mut group = two(&Memory::new(), Form::Vector);
    group.take_outputs();
    let id = group.cover(link(0)).unwrap();
    let outputs = group.take_outputs();
    for writer in 0..2 {
        assert_eq!(told(&outputs, link(writer)), [Message::Sound { id }]);
    }
    sounded(&mut group, 0, id, &[1, 0]);
    assert_eq!(group.take_covered(), [], "b has not answered");
    // b has admitted one that has not come, and that depends on one of a that has not come either.
    sounded(&mut group, 1, id, &[2, 2]);
    assert_eq!(group.take_covered(), []);
    send(&mut group, record(1, 2, 21, &[(0, 2)]));
    group.flush();
    assert_eq!(group.take_covered(), [], "it is not in the cut");
    send(&mut group, record(0, 2, 20, &[]));
    group.flush();
    assert_eq!(group.take_covered(), [Covered { id, without: vec![] }]);
    assert_eq!(group.take_covered(), [], "told once");
}

#[test]
fn an_answer_to_an_older_question_does_not_count() {
    let mut group = two(&Memory::new(), Form::Vector);
    let older = group.cover(link(0)).unwrap();
    let newer = group.cover(link(1)).unwrap();
    for writer in 0..2 {
        sounded(&mut group, writer, older, &[1, 1]);
    }
    assert_eq!(group.take_covered(), [Covered { id: older, without: vec![] }]);
    for writer in 0..2 {
        sounded(&mut group, writer, newer, &[1, 1]);
    }
    assert_eq!(group.take_covered(), [Covered { id: newer, without: vec![] }]);
}

#[test]
fn who_is_not_connected_is_named_and_asked_when_it_is_back() {
    let disk = Memory::new();
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = two(&disk, Form::Vector);
    group.connection_lost(link(1).connection);
    let id = group.cover(link(0)).unwrap();
    sounded(&mut group, 0, id, &[2, 1]);
    assert_eq!(group.take_covered(), []);
    asked(&mut group, 0);
    let said =
        attach(&mut group, at_ms(0), &shape.writer(1, 1, LastRun::Continues { from: Seq(2) }));
    assert!(
        said.iter().any(|m| matches!(m, Message::Sound { id: asked } if *asked >= id)),
        "{said:?}"
    );
    send(&mut group, record(0, 2, 20, &[]));
    group.flush();
    assert_eq!(group.take_covered(), [], "it is there and has not answered");
    sounded(&mut group, 1, id, &[0, 1]);
    assert_eq!(group.take_covered(), [Covered { id, without: vec![] }]);

    group.connection_lost(link(1).connection);
    let id = group.cover(link(0)).unwrap();
    sounded(&mut group, 0, id, &[2, 1]);
    assert_eq!(group.take_covered(), [Covered { id, without: vec!["b".into()] }]);
}

#[test]
fn who_has_gone_does_not_wait_and_who_never_came_may_not_ask() {
    let mut group = two(&Memory::new(), Form::Vector);
    assert_eq!(group.cover(link(2)), None);
    let id = group.cover(link(0)).unwrap();
    group.connection_lost(link(0).connection);
    sounded(&mut group, 1, id, &[1, 1]);
    assert_eq!(group.take_covered(), []);
    assert!(group.covering.is_empty());
}

#[test]
fn what_waits_for_another_writer_is_not_covered_though_it_is_durable() {
    let mut group = two(&Memory::new(), Form::Vector);
    // What a had written has come. It depends on one of b that has not come, and b's answer does not name that.
    send(&mut group, record(0, 2, 20, &[(1, 2)]));
    group.flush();
    let id = group.cover(link(0)).unwrap();
    sounded(&mut group, 0, id, &[2, 0]);
    sounded(&mut group, 1, id, &[0, 1]);
    assert_eq!(group.take_covered(), []);
    // What comes after the question may wait, and the bookmark does not.
    send(&mut group, record(1, 2, 21, &[]));
    send(&mut group, record(1, 3, 22, &[(0, 9)]));
    group.flush();
    assert_eq!(group.take_covered(), [Covered { id, without: vec![] }]);
}

fn sounded_at(group: &mut Group<Memory>, writer: u16, id: u64, hlc: u64) {
    let pending = CountVector::new();
    say(group, writer, Message::Sounded { id, pending, hlc: Hlc(hlc) });
}

fn idle(writer: u16, seq: u64, hlc: u64) -> Record {
    Record {
        body: DiskChange { effect: Effect::Idle, ..record(writer, seq, hlc, &[]).body },
        ..record(writer, seq, hlc, &[])
    }
}

#[test]
fn with_times_it_waits_for_the_watermark_and_idle_writers_are_made_to_pass_it() {
    let mut group = two(&Memory::new(), Form::Hlc);
    send(&mut group, record(1, 2, 50, &[]));
    send(&mut group, record(0, 2, 100, &[]));
    group.flush();
    let id = group.cover(link(0)).unwrap();
    group.take_outputs();
    sounded_at(&mut group, 0, id, 100);
    // Later than any record: b has heard of one that has not come.
    sounded_at(&mut group, 1, id, 120);
    assert_eq!(group.take_covered(), [], "a's record is durable and not in the cut");
    let said = progress(&asked(&mut group, 0)).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(50), Hlc(120)));
    send(&mut group, idle(1, 3, 110));
    send(&mut group, idle(0, 3, 130));
    group.flush();
    assert_eq!(group.take_covered(), [], "b may have something older still");
    send(&mut group, idle(1, 4, 121));
    group.flush();
    assert_eq!(group.take_covered(), [Covered { id, without: vec![] }]);
}

#[test]
fn with_times_who_is_not_connected_keeps_what_was_written_since_from_being_covered() {
    let mut group = two(&Memory::new(), Form::Hlc);
    group.connection_lost(link(1).connection);
    let id = group.cover(link(0)).unwrap();
    sounded_at(&mut group, 0, id, 10);
    let without = vec!["b".to_owned()];
    assert_eq!(group.take_covered(), [Covered { id, without: without.clone() }], "nothing since");
    send(&mut group, record(0, 2, 100, &[]));
    group.flush();
    let id = group.cover(link(0)).unwrap();
    sounded_at(&mut group, 0, id, 100);
    assert_eq!(group.take_covered(), []);
    group.remove("b").unwrap();
    assert_eq!(group.take_covered(), [Covered { id, without: vec![] }]);
}

#[test]
fn with_times_who_is_alone_has_none_and_is_covered_by_its_seqs() {
    let shape = Shape { writers: 1, form: Form::Hlc };
    let mut group = shape.create(&Memory::new()).unwrap();
    attach(&mut group, at_ms(0), &shape.writer(0, 1, LastRun::Unknown));
    send(&mut group, done(0, 1, 10, &[]));
    group.flush();
    // It is left alone: its host speaks of no group.
    group.connection_lost(link(0).connection);
    let alone = shape.writer(0, 2, LastRun::Clean { seq: Seq(1), served: false });
    let alone = Attach { tagging: None, ..alone };
    group.as_if_ended(&alone);
    group.attach(at_ms(0), link(0), &host(0), &alone);
    let id = group.cover(link(0)).unwrap();
    sounded(&mut group, 0, id, &[2]);
    assert_eq!(group.take_covered(), []);
    send(&mut group, record(0, 2, 20, &[]));
    group.flush();
    assert_eq!(group.take_covered(), [Covered { id, without: vec![] }]);
}

#[test]
fn a_resync_is_covered_with_its_end() {
    for form in [Form::Vector, Form::Hlc] {
        let mut group = two(&Memory::new(), form);
        let shape = Shape { writers: 2, form };
        attach(&mut group, at_ms(0), &shape.writer(1, 2, LastRun::Unknown));
        let id = group.cover(link(0)).unwrap();
        // b answers before its P has risen.
        for writer in 0..2 {
            sounded_at(&mut group, writer, id, 11);
        }
        send(&mut group, record(1, 2, 30, &[]));
        group.flush();
        assert_eq!(group.take_covered(), [], "{form}");
        send(&mut group, done(1, 3, 40, &[]));
        send(&mut group, record(0, 2, 41, &[]));
        group.flush();
        assert_eq!(group.take_covered(), [Covered { id, without: vec![] }], "{form}");
    }
}
