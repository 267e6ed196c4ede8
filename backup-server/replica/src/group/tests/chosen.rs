//! Recovery to a point of the past that somebody has chosen.

use super::*;
use crate::history::{At, PastError, Point};

/// The initial copy ended with seq 3; then seqs to this one, each a byte of its own number in front.
fn written(disk: &Memory, to: u64) -> Group<Memory> {
    let mut group = whole(disk);
    for seq in 4..=to {
        send(&mut group, LINK, write(seq, 0, seq as u8, 100));
        group.flush();
    }
    group
}

fn point(group: &mut Group<Memory>, seq: u64) -> Point {
    let point = group.history().unwrap().resolve(&At::Hlc(Hlc(seq))).unwrap();
    assert_eq!(point.cut.get(WRITER), Seq(seq));
    point
}

#[test]
fn what_came_after_the_chosen_point_is_left_out_for_good() {
    let disk = Memory::new();
    let mut group = written(&disk, 9);
    let chosen = point(&mut group, 6);
    let recovery = group.recover_at(at_ms(0), true, &chosen).unwrap();
    let of = &recovery.writers[0];
    assert_eq!((of.recovered, of.left_out, of.is_recovered), (Seq(6), 3, true));
    assert!(of.why.as_ref().unwrap().contains("later than what was asked for"), "{of:?}");
    assert!(of.held_back_by.is_none() && recovery.is_of_the_past);
    assert_eq!(read_disk(&mut group)[0], 6);
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Fenced)));

    // The guest goes on from there, also after a crash, and folds bring nothing back.
    let data = GuestEffect::Write(Bytes::from(vec![77; 10]));
    assert!(group.guest_write(at_ms(1), KEY, 200, data));
    group.flush();
    for mut group in [reopen(&disk.crash(&mut || false)), group] {
        assert_eq!(group.recover(at_ms(0), true).unwrap(), recovery);
        assert_eq!(group.recover_at(at_ms(0), true, &chosen).unwrap(), recovery);
        while fold(&mut group) {}
        let content = read_disk(&mut group);
        assert_eq!((content[0], content[200]), (6, 77));
    }
}

#[test]
fn one_recovery_is_for_good_whatever_is_asked_for_next() {
    let disk = Memory::new();
    let mut group = written(&disk, 9);
    let (chosen, other) = (point(&mut group, 6), point(&mut group, 8));
    group.recover_at(at_ms(0), true, &chosen).unwrap();
    let refused = group.recover_at(at_ms(0), true, &other).unwrap_err();
    assert!(matches!(refused, RecoverError::Elsewhere { .. } | RecoverError::Past(_)), "{refused}");
    // Times in between have no state any more; what was before has.
    let left_out = group.history().unwrap().resolve(&At::Hlc(Hlc(8))).unwrap_err();
    assert!(matches!(left_out, PastError::LeftOut { chosen: Hlc(6), .. }), "{left_out}");
    assert_eq!(point(&mut group, 5).cut.get(WRITER), Seq(5));
    assert_eq!(point(&mut group, 6).cut, chosen.cut);
}

#[test]
fn the_grace_is_waited_for_and_what_is_folded_is_refused() {
    let disk = Memory::new();
    let mut group = written(&disk, 9);
    let (old, chosen) = (point(&mut group, 4), point(&mut group, 6));
    group.beacon(at_ms(50_000), LINK, MonoNanos(1));
    let early = group.recover_at(at_ms(50_001), false, &chosen).unwrap_err();
    assert!(matches!(early, RecoverError::Grace { .. }), "{early}");
    assert_eq!(group.state().epoch, Epoch(1), "nothing is on record");

    // Without a window everything is folded at once.
    let mut options = options();
    options.retention.window_ms = 0;
    let mut group = Group::open(disk.killed(), at_ms(0), options).unwrap().unwrap().0;
    while fold(&mut group) {}
    let refused = group.recover_at(at_ms(0), true, &old).unwrap_err();
    assert!(matches!(refused, RecoverError::Past(_)), "{refused}");
    assert_eq!(group.recover(at_ms(0), true).unwrap().writers[0].recovered, Seq(9));
}

#[test]
fn a_point_that_a_recovery_took_exactly_is_found_again_when_the_group_goes_on() {
    // Somewhere among these the recovery is the last thing in its segment.
    for last in 9..40 {
        let mut group = written(&Memory::new(), last);
        let kept = point(&mut group, last);
        let hold = group.history().unwrap().hold(&kept, "a bookmark").unwrap();
        group.recover(at_ms(0), true).unwrap();
        for turn in 100..103 {
            let data = GuestEffect::Write(Bytes::from(vec![turn; 512]));
            assert!(group.guest_write(at_ms(1), KEY, 0, data));
            group.flush();
        }
        let history = group.history().unwrap();
        let located = history.locate(&kept).unwrap();
        assert_eq!((&located.cut, located.epoch), (&kept.cut, kept.epoch));
        let mut first = [0];
        history.open(&located).unwrap()[&KEY].read(0, &mut first).unwrap();
        assert_eq!(first, [last as u8], "what was written since is not in it");
        drop(hold);
    }
}

#[test]
fn a_point_that_a_fold_may_have_passed_before_the_server_died_is_gone() {
    let disk = Memory::new();
    let mut group = written(&disk, 9);
    let (old, newest) = (point(&mut group, 4), point(&mut group, 9));
    let mut options = options();
    options.retention.window_ms = 0;
    let mut group = Group::open(disk.killed(), at_ms(0), options).unwrap().unwrap().0;
    // The images have what it wrote, and nobody has heard of its end.
    drop(group.fold_job(at_ms(0)).unwrap().run().unwrap());
    let mut group = reopen(&group.storage().crash(&mut || true));
    let gone = group.hold(&old, "a test").unwrap_err();
    assert!(matches!(gone, PastError::BeforeWindow { .. }), "{gone}");
    drop(group.hold(&newest, "a test").unwrap());
    while fold(&mut group) {}
    drop(group.hold(&newest, "a test").unwrap());
}
