//! Words of hosts on themselves and on members without disks, and the group's answers.

use super::past::{T0, windowed};
use super::*;

fn two() -> (Memory, Group<Memory>) {
    let disk = Memory::new();
    let mut group = super::two(&disk, Form::Vector);
    group.take_outputs();
    (disk, group)
}

#[test]
fn a_clock_is_told_that_is_ahead_or_far_behind_while_its_host_is_attached() {
    let (_, mut group) = two();
    let mut seq = 1;
    let mut ahead_ms = |group: &mut Group<Memory>, ms: i64| {
        seq += 1;
        let time = Hlc::new(T0.checked_add_signed(ms).unwrap(), 0).0;
        send_at(group, at_ms(0), record(0, seq, time, &[]));
        let clocks = group.status(at_ms(0)).clocks;
        clocks.iter().find(|of| of.member.as_deref() == Some("a")).map(|of| of.ahead_ms)
    };
    for (ms, told) in [
        (-600_000, None),
        (-600_001, Some(-600_001)),
        (0, None),
        (2_000, None),
        (2_001, Some(2_001)),
    ] {
        assert_eq!(ahead_ms(&mut group, ms), told, "{ms}");
    }
    group.connection_lost(link(0).connection);
    assert!(group.status(at_ms(0)).clocks.iter().all(|of| of.member.is_none()));
}

#[test]
fn what_cannot_be_true_is_counted_and_ends_the_link() {
    let (_, mut group) = two();
    for (nth, writer) in (1..).zip([0, 1]) {
        let years = Hlc::new(T0 + 100_000_000_000, 0).0;
        send_at(&mut group, at_ms(0), record(writer, 2, years, &[]));
        let said = told(&group.take_outputs(), link(writer));
        assert_eq!(refused(&said).unwrap().0, RefusalKind::Implausible);
        assert_eq!(group.status(at_ms(0)).implausible, nth);
    }
}

#[test]
fn the_mode_of_a_member_is_what_its_host_has_said_last_also_after_a_restart() {
    let (disk, mut group) = two();
    let modes = |group: &Group<Memory>| {
        group.status(at_ms(0)).writers.iter().map(|of| of.mode).collect::<Vec<_>>()
    };
    assert_eq!(modes(&group), [Some(Mode::Pipelined); 2]);
    say(&mut group, 1, Message::ModeChanged { mode: Mode::Async });
    let expected = [Some(Mode::Pipelined), Some(Mode::Async)];
    assert_eq!(modes(&group), expected);
    assert_eq!(modes(&reopen(&disk.crash(&mut || false))), expected);
    // The mode is for people only: a full disk does no harm.
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    say(&mut group, 1, Message::ModeChanged { mode: Mode::Sync });
    assert!(group.broken().is_none() && modes(&group)[1] == Some(Mode::Sync));
}

/// "web" has no disks. Its packets wait for C all the same.
#[test]
fn a_member_without_disks_has_a_lease_on_its_newest_link_and_says_nothing_of_disks() {
    let (_, mut group) = two();
    let shape = Shape { writers: 2, form: Form::Vector };
    let (old, new) = (link(5), link(6));
    let attach = |group: &mut Group<Memory>, link| {
        group.attach(at_ms(0), link, &host(2), &shape.follower());
    };
    let beacon = |group: &mut Group<Memory>, link: Link, at| {
        let message = Message::Beacon { sent_at: MonoNanos(at) };
        assert!(group.receive(at_ms(0), link, Frame::Control(link.channel, message)).is_none());
        let said = told(&group.take_outputs(), link);
        said.contains(&Message::Lease { sent_at: MonoNanos(at) })
    };
    attach(&mut group, old);
    group.take_outputs();
    assert!(beacon(&mut group, old, 3));
    attach(&mut group, old);
    assert!(refused(&told(&group.take_outputs(), old)).is_none(), "the same link, once more");
    attach(&mut group, new);
    let said = told(&group.take_outputs(), old);
    assert_eq!(refused(&said).unwrap().0, RefusalKind::Superseded);
    assert!(!beacon(&mut group, old, 4) && beacon(&mut group, new, 5));
    let attached = group.move_member(at_ms(0), "web", &host(3)).unwrap_err();
    assert!(matches!(attached, MoveError::Attached { .. }), "{attached}");
    // The member's mode is its host's affair; a writer's messages are not its own.
    for (message, ends) in [
        (Message::ModeChanged { mode: Mode::Async }, false),
        (Message::ZeroCheck { disk: DiskId(0), offset: 0, len_bytes: 512 }, true),
    ] {
        let frame = Frame::Control(new.channel, message);
        assert!(group.receive(at_ms(0), new, frame).is_none());
        let refused = refused(&told(&group.take_outputs(), new));
        assert_eq!(refused.map(|(kind, _)| kind), ends.then_some(RefusalKind::Invalid));
    }
    assert!(!beacon(&mut group, new, 6));
    // A goodbye ends the link; the member may go elsewhere when its lease has ended.
    attach(&mut group, new);
    let goodbye = Frame::Control(new.channel, Message::Detach { end: None });
    assert!(group.receive(at_ms(0), new, goodbye).is_none());
    assert!(refused(&told(&group.take_outputs(), new)).is_none());
    assert!(!beacon(&mut group, new, 7));
    let waits = group.move_member(at_ms(1), "web", &host(3)).unwrap_err();
    assert!(matches!(waits, MoveError::Lease { .. }), "{waits}");
    let moved = group.move_member(at_ms(2 * GRACE_MS), "web", &host(3)).unwrap();
    assert_eq!((moved.from, moved.to), (Some(host(2)), host(3)));
}

#[test]
fn a_window_that_is_whole_again_is_told_once() {
    let (_, mut group) = two();
    group.options = windowed(30);
    group.take_notices();
    group.check_unfolded();
    assert!(group.take_notices().is_empty());
    group.fold.shortened = true;
    group.fold.oldest.arrived_ms = u64::MAX;
    group.check_unfolded();
    assert!(group.take_notices().is_empty() && group.fold.shortened);
    group.fold.oldest.arrived_ms = 0;
    for told in [1, 0] {
        group.check_unfolded();
        let notices = group.take_notices();
        assert_eq!(notices.len(), told, "{notices:?}");
    }
}
