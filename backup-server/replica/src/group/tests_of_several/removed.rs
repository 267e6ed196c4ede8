//! A writer that is removed in the middle of a copy, which nothing ends any more.

use super::indexes::index_all;
use super::past::{fold, hlc, up_to, windowed};
use super::*;
use crate::history::{At, PastError};

const DAY_MS: u64 = 24 * 3600 * 1000;
const RECORDS: u64 = 60;
const WHOLE: LastRun = LastRun::Unknown;

fn key(writer: u16) -> DiskKey {
    DiskKey { writer: WriterId(writer), disk: DiskId(0) }
}

/// What record n of each writer does is seen in one of eight slots.
fn slot(writer: u16, seq: u64, n: u64) -> Record {
    Record {
        body: DiskChange { offset: seq % 8 * 64, ..record(writer, seq, hlc(n), &[]).body },
        ..record(writer, seq, hlc(n), &[])
    }
}

/// Both write; then b's host dies and b attaches anew, resyncs a part of its disk, and is gone for good.
/// Records are a millisecond apart, each in its own batch; of b everything from 20 ms on is of the resync.
fn dies_in_resync(disk: &Memory, form: Form, options: GroupOptions) -> Group<Memory> {
    let mut group = two_with(disk, form, options);
    let shape = Shape { writers: 2, form };
    for n in 0..RECORDS {
        if n == 20 {
            let said = attach(&mut group, at_ms(0), &shape.writer(1, 2, WHOLE));
            assert_eq!(copy_of(&said), CopyState::Resyncing);
        }
        send(&mut group, slot((n % 2) as u16, n / 2 + 2, n));
        group.flush();
    }
    group.connection_lost(link(1).connection);
    assert_eq!(group.cut().get(WriterId(1)), Seq(11));
    group
}

/// The disks at each time, as far as they are shown: by records, the last ones on top.
fn seen(group: &mut Group<Memory>) -> Vec<Option<[Vec<u8>; 2]>> {
    let read = |ms: u64| {
        let past = group.history().unwrap();
        let point = match past.resolve(&up_to(ms)) {
            Ok(point) => point,
            Err(PastError::BeforeWindow { .. }) => return None,
            Err(error) => panic!("{ms}: {error}"),
        };
        assert_eq!(past.locate(&point).unwrap().cut, point.cut);
        let views = past.open(&point).unwrap();
        let disk = |writer: u16| {
            let mut found = vec![0; 512];
            views[&key(writer)].read(0, &mut found).unwrap();
            let mut expected = vec![0; 512];
            for seq in 2..=point.cut.get(WriterId(writer)).0 {
                expected[(seq % 8 * 64) as usize..][..64].fill(seq as u8);
            }
            assert_eq!(found, expected, "disk of {writer} at {ms} ms, {}", point.cut);
            found
        };
        Some([disk(0), disk(1)])
    };
    (2..RECORDS - 2).map(read).collect()
}

fn image_of_b(group: &Group<Memory>) -> Vec<u8> {
    let mut found = vec![0; 512];
    group.images[&key(1)].read_at(&mut found, 0).unwrap();
    found
}

#[test]
fn the_fold_goes_on_behind_a_resync_that_a_removal_has_ended() {
    for (form, indexed) in
        [Form::Vector, Form::Hlc].into_iter().flat_map(|f| [(f, false), (f, true)])
    {
        let disk = Memory::new();
        let mut group = dies_in_resync(&disk, form, windowed(DAY_MS));
        if indexed {
            assert!(index_all(&mut group) > 0);
        }
        let before = seen(&mut group);
        assert!(before.iter().all(Option::is_some));
        group.remove("b").unwrap();
        assert!(group.is_all_in_the_cut() && group.status(at_ms(0)).beyond_the_cut == 0);
        let same = |now: &[Option<[Vec<u8>; 2]>]| {
            before.iter().zip(now).all(|(before, now)| now.is_none() || now == before)
        };
        assert_eq!(seen(&mut group), before, "{form}, {indexed}: b was there at that time");
        if indexed {
            index_all(&mut group);
            assert_eq!(seen(&mut group), before);
        }
        // The newest state is without b, and what a makes of it goes on.
        for n in RECORDS..RECORDS + 40 {
            send(
                &mut group,
                Record {
                    body: DiskChange { offset: 1024, ..slot(0, n - RECORDS + 32, n).body },
                    ..slot(0, n - RECORDS + 32, n)
                },
            );
            group.flush();
        }
        let newest = group.history().unwrap().newest().unwrap();
        assert_eq!((newest.cut, newest.writers), (vector(&[71, 11]), vec![WriterId(0)]));
        let reopened = |disk: &Memory, window_ms| {
            let mut group = reopen(&disk.crash(&mut || false));
            group.options = windowed(window_ms);
            group
        };
        assert_eq!(seen(&mut reopened(&disk, DAY_MS)), before);
        // A point that is held is the same behind the fold.
        let past = group.history().unwrap();
        let held = past.resolve(&up_to(40)).unwrap();
        assert_eq!(held.writers.len(), 2);
        let hold = past.hold(&held, "a pin").unwrap();
        drop(past);
        group.options = windowed(10);
        while fold(&mut group, at_ms(1000)) {}
        let past = group.history().unwrap();
        let views = past.open(&past.locate(&held).unwrap()).unwrap();
        let mut found = vec![0; 512];
        views[&key(1)].read(0, &mut found).unwrap();
        assert_eq!(found, before[38].as_ref().unwrap()[1]);
        drop((views, past, hold));
        while fold(&mut group, at_ms(1000)) {}
        let last = group.journal.segments().last().unwrap().index;
        assert!(group.fold_position().segment > last - 10, "{:?}", group.fold_position());
        let now = seen(&mut group);
        assert!(same(&now) && now[0].is_none());
        let expected = before.last().unwrap().as_ref().unwrap()[1].clone();
        assert_eq!(image_of_b(&group), expected, "as it was before the resync");
        let mut group = reopened(&disk, 10);
        assert_eq!(seen(&mut group), now);
        assert_eq!((group.cut(), group.is_all_in_the_cut()), (&vector(&[71, 11]), true));
        // Without a window nothing of it is kept.
        group.options = windowed(0);
        while fold(&mut group, at_ms(1000)) {}
        assert_eq!((group.unfolded_bytes(), image_of_b(&group)), (0, expected));
        drop(group);
        let mut group = reopened(&disk, 0);
        assert_eq!(group.cut(), &vector(&[71, 11]));
        let recovery = group.recover(at_ms(0), true).unwrap();
        assert!(recovery.writers[0].is_recovered && !recovery.writers[1].is_recovered);
    }
}

/// At its limit the group stops for a fold that is behind, and goes on when that has caught up.
#[test]
fn who_was_removed_in_a_resync_exempts_the_group_from_no_limit() {
    for form in [Form::Vector, Form::Hlc] {
        let mut group = dies_in_resync(&Memory::new(), form, windowed(0));
        while fold(&mut group, at_ms(1000)) {}
        assert!(group.fold_is_blocked() && group.unfolded_bytes() > 0, "{form}");
        group.options.unfolded_max_bytes = group.unfolded_bytes() + 1000;
        let mut seq = 32;
        let mut more = |group: &mut Group<Memory>, most: u64| {
            let from = seq;
            while group.accepts() && seq < from + most {
                send(group, slot(0, seq, seq * 10));
                group.flush();
                seq += 1;
            }
        };
        more(&mut group, 40);
        assert!(group.accepts(), "what is held back by a resync stops nothing");
        group.remove("b").unwrap();
        more(&mut group, 40);
        assert_eq!(group.stall, Some(Stall::FoldBehind), "{form}");
        while fold(&mut group, at_ms(1000)) {}
        assert!(group.accepts() && group.unfolded_bytes() == 0, "{form}");
    }
}

/// Nothing was resynced yet, or the writer was in its initial copy.
#[test]
fn who_is_removed_in_another_copy_is_in_nobodys_way() {
    for (form, begun) in [Form::Vector, Form::Hlc].into_iter().flat_map(|f| [(f, 0), (f, 5)]) {
        let disk = Memory::new();
        let three = Shape { writers: 3, form };
        let mut group = three.create_with(&disk, windowed(0)).unwrap();
        for writer in 0..2 {
            attach(&mut group, at_ms(0), &three.writer(writer, 1, WHOLE));
            send(&mut group, done(writer, 1, hlc(u64::from(writer)), &[]));
        }
        // c is in its initial copy, b resyncs.
        attach(&mut group, at_ms(0), &three.writer(2, 1, WHOLE));
        let said = attach(&mut group, at_ms(0), &three.writer(1, 2, WHOLE));
        assert_eq!(copy_of(&said), CopyState::Resyncing);
        for n in 0..begun {
            send(&mut group, slot(1, n + 2, 10 * n + 20));
            send(
                &mut group,
                Record {
                    body: DiskChange { copy: true, ..slot(2, n + 1, 10 * n + 21).body },
                    ..slot(2, n + 1, 10 * n + 21)
                },
            );
        }
        send(&mut group, slot(0, 2, 90));
        group.flush();
        for (writer, name) in [(1, "b"), (2, "c")] {
            group.connection_lost(link(writer).connection);
            group.remove(name).unwrap();
        }
        send(&mut group, slot(0, 3, 91));
        group.flush();
        for mut group in [reopen(&disk.crash(&mut || false)), group] {
            group.options = windowed(0);
            assert_eq!(group.cut(), &vector(&[3, 1, begun]), "{form}, {begun}");
            while fold(&mut group, at_ms(1000)) {}
            assert_eq!(group.unfolded_bytes(), 0, "{form}, {begun}");
            assert!(group.is_all_in_the_cut());
        }
    }
}

/// The removal has no room, and then it is lost: the resync goes on and ends.
#[test]
fn nothing_of_a_resync_is_passed_before_the_removal_is_on_record() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = dies_in_resync(&disk, form, windowed(0));
        disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
        assert!(matches!(group.remove("b"), Err(RemoveError::Journal(_))));
        disk.set_faults(Faults::default());
        while fold(&mut group, at_ms(1000)) {}
        index_all(&mut group);
        let mut lost = reopen(&disk.killed());
        lost.options = windowed(DAY_MS);
        let run = LastRun::Continues { from: Seq(32) };
        attach(&mut lost, at_ms(0), &Shape { writers: 2, form }.writer(0, 1, run));
        attach(&mut lost, at_ms(0), &Shape { writers: 2, form }.writer(1, 2, run));
        send(&mut lost, done(1, 32, hlc(100), &[]));
        send(&mut lost, slot(0, 32, 101));
        lost.flush();
        index_all(&mut lost);
        assert_eq!(lost.cut().get(WriterId(1)), Seq(32));
        let mut found = vec![0; 512];
        let past = lost.history().unwrap();
        past.open(&past.newest().unwrap()).unwrap()[&key(1)].read(0, &mut found).unwrap();
        let of = |nth: u64| (24..32).find(|seq| seq % 8 == nth).unwrap() as u8;
        assert!((0..8).all(|nth| found[(nth * 64) as usize] == of(nth)), "{form}");
        // With room it is on record, and the fold goes on.
        group.retry();
        group.flush();
        while fold(&mut group, at_ms(1000)) {}
        assert_eq!(group.unfolded_bytes(), 0, "{form}");
    }
}

/// A job that has begun before the removal comes back after it.
#[test]
fn a_fold_that_knew_nothing_of_the_removal_does_not_block_the_next() {
    let mut group = dies_in_resync(&Memory::new(), Form::Vector, windowed(0));
    while group.fold_position() == Position::default() {
        assert!(fold(&mut group, at_ms(1000)));
    }
    while fold(&mut group, at_ms(1000)) {}
    group.fold.blocked = None;
    let job = group.fold_job(at_ms(1000)).unwrap();
    group.remove("b").unwrap();
    let cut = job.cut.clone();
    group.fold_done(cut, job.run());
    while fold(&mut group, at_ms(1000)) {}
    assert_eq!(group.unfolded_bytes(), 0);
}

/// Hosts are told [`bounds::SEQ_OF_REMOVED`] of a removed writer, and may name it from then on.
#[test]
fn a_host_may_have_heard_that_a_writer_was_removed() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    group.connection_lost(link(1).connection);
    group.remove("b").unwrap();
    group.flush();
    group.take_outputs();
    let names_b = [(1, bounds::SEQ_OF_REMOVED.0)];
    let pending = vector(&[1, names_b[0].1]);
    say(&mut group, 0, Message::Sounded { id: UNASKED, pending, hlc: Hlc(0) });
    send(&mut group, record(0, 2, 20, &names_b));
    group.flush();
    let said = told(&group.take_outputs(), link(0));
    assert_eq!((refused(&said), progress(&said).unwrap().durable), (None, Seq(2)));
    assert_eq!(group.cut().get(WriterId(0)), Seq(2));
}

/// In the HLC form a silent writer holds back what others wrote, and its removal lets that into the cut.
#[test]
fn seqs_of_before_a_removal_lead_to_a_point_before_it() {
    let mut group = two_with(&Memory::new(), Form::Hlc, windowed(DAY_MS));
    send(&mut group, record(1, 2, hlc(20), &[]));
    send(&mut group, record(0, 2, hlc(15), &[]));
    send(&mut group, record(0, 3, hlc(50), &[]));
    group.flush();
    let before = group.history().unwrap().newest().unwrap();
    assert_eq!(before.cut, vector(&[2, 2]));
    group.connection_lost(link(1).connection);
    group.remove("b").unwrap();
    let past = group.history().unwrap();
    assert_eq!(past.newest().unwrap().cut, vector(&[3, 2]));
    let by_seqs = |seqs: &[u64]| past.resolve(&At::Vector(vector(seqs))).unwrap();
    let named = by_seqs(&[2, 2]);
    assert_eq!((named.cut, named.writers), (before.cut, before.writers));
    assert_eq!(by_seqs(&[3, 2]).writers, [WriterId(0)]);
}
