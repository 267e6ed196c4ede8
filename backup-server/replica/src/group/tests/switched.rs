//! A primary that gives up its lease.

use super::*;
use crate::group::RecoverError;

fn give_up(group: &mut Group<Memory>, link: Link) -> bool {
    let frame = Frame::Control(link.channel, Message::GiveUpLease);
    assert!(group.receive(at_ms(20), link, frame).is_none());
    let given_up = |output: &Output| matches!(output, Output::Send(to, Message::LeaseGivenUp { committed }) if *to == link && committed.get(WRITER) == Seq(3));
    group.take_outputs().iter().any(given_up)
}

fn is_answered(group: &mut Group<Memory>, ms: u64, link: Link) -> bool {
    group.beacon(at_ms(ms), link, MonoNanos(0));
    let lease = |output: &Output| matches!(output, Output::Send(_, Message::Lease { .. }));
    group.take_outputs().iter().any(lease)
}

fn must_wait(group: &mut Group<Memory>, ms: u64) -> bool {
    matches!(group.recover(at_ms(ms), false), Err(RecoverError::Grace { .. }))
}

#[test]
fn nothing_is_waited_for_and_no_lease_is_given_any_more() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    assert!(is_answered(&mut group, 10, LINK));
    assert!(must_wait(&mut group, 11));
    assert!(give_up(&mut group, LINK));
    assert!(!is_answered(&mut group, 21, LINK), "a beacon that was sent before");
    let status = group.status(at_ms(22));
    assert_eq!((status.grace_remaining_ms, status.lease_given_up), (0, true));
    let recovery = group.recover(at_ms(22), false).unwrap();
    assert_eq!((recovery.writers[0].recovered, recovery.primary_declared_dead), (Seq(3), false));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Fenced)));
}

#[test]
fn who_attaches_again_may_have_a_lease_again() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    assert!(is_answered(&mut group, 10, LINK));
    assert!(give_up(&mut group, LINK));
    join(&mut group, OTHER, 2, LastRun::Clean { seq: Seq(3), served: false });
    assert!(must_wait(&mut group, 23), "it has not said it again");
    assert!(!give_up(&mut group, LINK), "words of the run before come too late");
    assert!(must_wait(&mut group, 24));
    assert!(is_answered(&mut group, 25, OTHER));
    assert!(give_up(&mut group, OTHER));
    group.recover(at_ms(26), false).unwrap();
}

#[test]
fn a_restart_of_the_server_forgets_it() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    assert!(give_up(&mut group, LINK));
    let mut group = reopen(&disk.killed());
    assert!(must_wait(&mut group, 1));
    join(&mut group, OTHER, 1, LastRun::Continues { from: Seq(4) });
    assert!(give_up(&mut group, OTHER));
    group.recover(at_ms(30), false).unwrap();
}
