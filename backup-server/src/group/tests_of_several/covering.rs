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
    let said = join(&mut group, at_ms(0), &shape.join(1, 1, LastRun::Continues { from: Seq(2) }));
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
