//! Disks that are added to a running group, and removed from it.

use super::*;
use crate::history::{At, Point};
use std::collections::BTreeMap;

const DATA: DiskId = DiskId(1);

/// A run whose host has the disks `root`, `data` of this size (0: removed), and `more`.
fn with_data(incarnation: u64, epoch: u64, last_run: LastRun, data: u64, more: &[u16]) -> Attach {
    but(attach_message(incarnation, epoch, last_run), |of| {
        of.disks.push(DiskSpec { id: DATA, name: "data".into(), size_bytes: data });
        of.disks.extend(more.iter().map(|id| DiskSpec {
            id: DiskId(*id),
            name: format!("more{id}"),
            size_bytes: SIZE,
        }));
    })
}

fn on_data(seq: u64, byte: u8) -> Record {
    Record {
        body: DiskChange { disk: DATA, ..write(seq, 0, byte, 100).body },
        ..write(seq, 0, byte, 100)
    }
}

/// Two disks, of which both are whole with seq 4: 3 in `root` and 4 in `data`.
fn two_disks(disk: &Memory) -> Group<Memory> {
    let attach = with_data(1, 0, LastRun::Unknown, SIZE, &[]);
    let mut group = Group::create(disk.clone(), "host-a", &attach, at_ms(0), options()).unwrap();
    group.attach(at_ms(0), LINK, "host-a", &attach);
    group.take_outputs();
    for record in [copy_done(1), write(2, 0, 2, 100), write(3, 0, 3, 100), on_data(4, 4)] {
        assert!(send(&mut group, LINK, record));
    }
    group.flush();
    group
}

/// `data` is removed between two runs; the new one has written seq 5 to `root`.
fn one_is_removed(group: &mut Group<Memory>) {
    let clean = LastRun::Clean { seq: Seq(4), served: false };
    let attach = with_data(2, 1, clean, 0, &[]);
    group.as_if_ended(&attach);
    group.attach(at_ms(0), OTHER, "host-a", &attach);
    let answer = attached(&group.take_outputs()).expect("disks may be removed");
    assert_eq!(copy_of(&answer), CopyState::Whole, "the others are what they were");
    assert!(send(group, OTHER, write(5, 0, 5, 100)));
    group.flush();
}

fn refused(group: &mut Group<Memory>, attach: &Attach) -> String {
    group.attach(at_ms(0), LINK, "host-a", attach);
    let said = group.take_outputs().into_iter().find_map(|output| match output {
        Output::Refuse(_, RefusalKind::Mismatch, reason) => Some(reason),
        _ => None,
    });
    said.expect("refused")
}

/// The first byte of each disk that a point has.
fn shown(group: &mut Group<Memory>, seq: u64) -> (Point, BTreeMap<u16, u8>) {
    let history = group.history().unwrap();
    let point = history.resolve(&At::Hlc(Hlc(seq))).unwrap();
    let views = history.open(&point).unwrap();
    let first = |view: &crate::history::PastView<_>| {
        let mut byte = [0xff];
        view.read(0, &mut byte).unwrap();
        byte[0]
    };
    let bytes = views.iter().map(|(key, view)| (key.disk.0, first(view))).collect();
    (point, bytes)
}

fn names_of(group: &mut Group<Memory>) -> Vec<String> {
    group.recovered_disks().unwrap().into_iter().map(|(name, ..)| name).collect()
}

#[test]
fn a_removed_disk_is_in_all_states_up_to_the_next_record_and_in_none_after_it() {
    let disk = Memory::new();
    let mut group = two_disks(&disk);
    one_is_removed(&mut group);
    let before = BTreeMap::from([(0, 3), (1, 4)]);
    let after = BTreeMap::from([(0, 5)]);
    for mut group in [reopen(&disk.crash(&mut || false)), group] {
        assert_eq!(shown(&mut group, 4).1, before);
        assert_eq!(shown(&mut group, 5).1, after);
        let status = group.status(at_ms(0));
        assert_eq!(status.writers[0].disks.len(), 1);
        let names: Vec<_> = group.pin().unwrap().disks.into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["vm.root"]);
        group.recover(at_ms(100_000), false).unwrap();
        assert_eq!(names_of(&mut group), ["vm.root"]);
        // The guest at this site does not bring it back.
        let key = KEY;
        assert!(group.guest_write(at_ms(1), key, 0, GuestEffect::Write(Bytes::from_static(b"x"))));
        group.flush();
        assert_eq!(names_of(&mut group), ["vm.root"]);
    }
}

#[test]
fn a_recovery_to_a_state_that_has_the_disk_has_it_for_good() {
    let disk = Memory::new();
    let mut group = two_disks(&disk);
    one_is_removed(&mut group);
    let (chosen, _) = shown(&mut group, 4);
    group.recover_at(at_ms(0), true, &chosen).unwrap();
    for nth in 0..4 {
        assert!(group.guest_write(
            at_ms(1),
            KEY,
            nth,
            GuestEffect::Write(Bytes::from_static(b"x"))
        ));
    }
    group.flush();
    for mut group in [reopen(&disk.crash(&mut || false)), group] {
        group.recover_at(at_ms(0), true, &chosen).unwrap();
        assert_eq!(names_of(&mut group), ["vm.root", "vm.data"]);
    }
}

#[test]
fn nothing_of_a_removed_disk_is_taken_and_neither_its_number_nor_its_name_comes_back() {
    let disk = Memory::new();
    let mut group = two_disks(&disk);
    one_is_removed(&mut group);
    let clean = LastRun::Clean { seq: Seq(5), served: false };
    let again = refused(&mut group, &with_data(3, 1, clean, SIZE, &[]));
    assert!(again.contains("data") && again.contains("another name"), "{again}");
    let left_out = refused(&mut group, &attach_message(3, 1, clean));
    assert!(left_out.contains("removed = true"), "{left_out}");
    send(&mut group, OTHER, on_data(6, 6));
    assert!(matches!(refusal(&group.take_outputs()), Some((OTHER, RefusalKind::Invalid))));

    // Another one, behind its place, is brought across like any that is added.
    group.attach(at_ms(0), LINK, "host-a", &with_data(4, 1, clean, 0, &[2]));
    let answer = attached(&group.take_outputs()).expect("a disk is added");
    assert_eq!(copy_of(&answer), CopyState::Resyncing);
    let named =
        group.status(at_ms(0)).writers[0].disks.iter().map(|d| d.name.clone()).collect::<Vec<_>>();
    assert_eq!(named, ["root", "more2"]);
}

#[test]
fn a_group_that_is_begun_anew_never_had_the_disk_and_one_disk_stays() {
    let disk = Memory::new();
    let attach = with_data(1, 0, LastRun::Unknown, 0, &[2]);
    let mut group = Group::create(disk.clone(), "host-a", &attach, at_ms(0), options()).unwrap();
    group.attach(at_ms(0), LINK, "host-a", &attach);
    assert!(attached(&group.take_outputs()).is_some());
    assert!(send(&mut group, LINK, copy_done(1)));
    group.flush();
    let mut group = reopen(&disk);
    assert_eq!(shown(&mut group, 1).1, BTreeMap::from([(0, 0), (2, 0)]));

    let none = with_data(2, 1, LastRun::Unknown, 0, &[]);
    let none = but(none, |of| of.disks[0].size_bytes = 0);
    group.attach(at_ms(0), OTHER, "host-a", &none);
    assert_eq!(refusal(&group.take_outputs()), Some((OTHER, RefusalKind::Invalid)));
}

/// What is beyond the old end is zeroes until it has come, at earlier points, too; and the size is on record before.
#[test]
fn a_disk_that_has_grown_is_brought_across_and_never_shrinks() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let before = read_disk(&mut group);
    let grown = |incarnation, epoch, size_bytes| {
        let clean = LastRun::Clean { seq: Seq(3), served: false };
        but(attach_message(incarnation, epoch, clean), |of| of.disks[0].size_bytes = size_bytes)
    };
    group.attach(at_ms(0), OTHER, "host-a", &grown(2, 1, SIZE * 2));
    let answer = attached(&group.take_outputs()).expect("disks may grow");
    let committed = answer.progress.committed.get(WRITER);
    assert_eq!((copy_of(&answer), committed), (CopyState::Resyncing, Seq(3)));
    let all = |group: &mut Group<Memory>| {
        let view = group.view(KEY).unwrap();
        let mut content = vec![0xff; view.size_bytes() as usize];
        view.read(0, &mut content).unwrap();
        content
    };
    let mut after_crash = reopen(&disk.crash(&mut || false));
    for group in [&mut group, &mut after_crash] {
        let content = all(group);
        assert_eq!(content.len() as u64, SIZE * 2);
        assert!(
            content[..SIZE as usize] == before && content[SIZE as usize..].iter().all(|b| *b == 0)
        );
    }
    send(
        &mut group,
        OTHER,
        Record {
            body: DiskChange { copy: true, ..write(4, SIZE + 100, 9, 500).body },
            ..write(4, SIZE + 100, 9, 500)
        },
    );
    send(&mut group, OTHER, copy_done(5));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((5, 5)));
    while fold(&mut group) {}
    let content = all(&mut reopen(&disk));
    assert!(
        content[SIZE as usize + 100..][..500] == [9; 500] && content[..SIZE as usize] == before
    );

    group.attach(at_ms(0), LINK, "host-a", &grown(3, 1, SIZE));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Mismatch)));
    // Made larger for an attachment that was not put on record.
    disk.open("images/vm.root.img").unwrap().set_size(SIZE * 3).unwrap();
    assert_eq!(all(&mut reopen(&disk)).len() as u64, SIZE * 2);
}
