//! What a recovery says of what it leaves out.

use super::*;
use std::collections::BTreeSet;

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
    attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
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
    attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    send(&mut group, record(1, 4, at(1100), &[]));
    send(&mut group, record(0, 3, at(1200), &[]));
    send(&mut group, done(0, 4, at(1500), &[]));
    group.flush();
    let (why, _) = left_out(&mut group, 0);
    assert!(why.starts_with("they belong to a resync; its end (seq 4) is 400 ms later"), "{why}");
    assert_eq!(left_out(&mut group, 1).1.unwrap().member, "a");
}

/// There is no room for the recovery, and then it is lost.
#[test]
fn what_a_recovery_leaves_out_is_not_passed_by_the_fold_before_it_is_on_record() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    send(&mut group, record(1, 2, 20, &[(0, 2)]));
    group.flush();
    while past::fold(&mut group, at_ms(0)) {}
    let before = group.cut.cut().clone();
    assert_eq!(before, vector(&[1, 1]));
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let refused = group.recover(at_ms(0), true).unwrap_err();
    assert!(matches!(refused, RecoverError::NoRoom(_)), "{refused}");
    disk.set_faults(Faults::default());
    assert!(group.fold_job(at_ms(0)).is_none());
    assert_eq!(reopen(&disk.killed()).cut.cut(), &before);
    // With room it goes on.
    group.retry();
    group.flush();
    assert_eq!(group.recovery().unwrap().epoch, Epoch(2));
    while past::fold(&mut group, at_ms(0)) {}
    assert_eq!(group.unfolded_bytes(), 0);
}

/// A guest that runs on gives out anew the seqs of what is left out.
#[test]
fn what_a_recovery_has_left_out_is_out_also_when_the_group_is_opened_again() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    send(&mut group, record(1, 2, 20, &[(0, 2)]));
    group.flush();
    group.recover(at_ms(0), true).unwrap();
    let key = DiskKey { writer: WriterId(1), disk: DiskId(0) };
    for seq in 2..60 {
        let data = GuestEffect::Write(vec![seq; 64].into());
        assert!(group.guest_write(at_ms(1), key, 0, data));
        group.flush();
    }
    let reopened = reopen(&disk.crash(&mut || false));
    assert_eq!(group.cut.cut(), &vector(&[1, 59]));
    assert_eq!(reopened.cut.cut(), group.cut.cut());
    // Each segment leaves the window at its own time, not all of them with the newest record.
    let closed: BTreeSet<_> = reopened.fold.closed.values().map(|of| of.at).collect();
    assert!(closed.len() > 3, "{closed:?}");
}
