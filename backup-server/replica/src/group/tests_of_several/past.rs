//! Points in time of a group of several: against a replay of what was sent, in both forms.

use super::*;
use crate::history::{At, PastError, Point};

pub(super) const T0: u64 = 1_700_000_000_000;

pub(super) fn windowed(window_ms: u64) -> GroupOptions {
    let retention = Retention { window_ms, ..Retention::default() };
    GroupOptions { retention, ..options() }
}

/// The end of this millisecond by the group's own clock.
pub(super) fn up_to(ms: u64) -> At {
    At::Hlc(Hlc::new(T0 + ms, u16::MAX))
}

pub(super) fn hlc(ms: u64) -> u64 {
    Hlc::new(T0 + ms, 0).0
}

pub(super) fn fold(group: &mut Group<Memory>, now: Now) -> bool {
    let Some(job) = group.fold_job(now) else { return false };
    let cut = job.cut.clone();
    let result = job.run();
    group.fold_done(cut, result);
    true
}

/// Two writers, whole at seq 1, then records a millisecond apart, in turns.
pub(super) fn busy(disk: &Memory, form: Form, window_ms: u64, records: u64) -> Group<Memory> {
    busy_with(disk, form, windowed(window_ms), records)
}

fn busy_with(disk: &Memory, form: Form, options: GroupOptions, records: u64) -> Group<Memory> {
    let mut group = two_with(disk, form, options);
    for n in 0..records {
        let (writer, seq) = ((n % 2) as u16, n / 2 + 2);
        send(
            &mut group,
            Record {
                body: DiskChange { offset: n % 8 * 64, ..record(writer, seq, hlc(n), &[]).body },
                ..record(writer, seq, hlc(n), &[])
            },
        );
        group.flush();
    }
    group
}

/// Every state is the records up to its time, in the HLC form up to the watermark of then, whatever was folded.
pub(super) fn check_all(group: &mut Group<Memory>, records: u64) -> (u64, u64) {
    let (mut shown, mut before) = (0, 0);
    let behind = u64::from(group.state().form == Form::Hlc);
    for n in 2..records - 2 {
        let upto = n - behind;
        let past = group.history().unwrap();
        match past.resolve(&up_to(n)) {
            Ok(point) => {
                assert_eq!(point.cut, vector(&[upto / 2 + 2, upto.div_ceil(2) + 1]), "at {n} ms");
                assert_eq!(point.hlc, Hlc(hlc(n)).max(past.oldest_time()));
                // Its own name; places may be told as an end or as the beginning that follows.
                let same = |other: Point| {
                    assert_eq!((other.cut, other.hlc), (point.cut.clone(), point.hlc))
                };
                same(past.resolve(&At::Hlc(point.hlc)).unwrap());
                same(past.locate(&point).unwrap());
                let views = past.open(&point).unwrap();
                for writer in 0..2u64 {
                    let key = DiskKey { writer: WriterId(writer as u16), disk: DiskId(0) };
                    let mut expected = vec![0; SIZE as usize];
                    for m in (0..=upto).filter(|m| m % 2 == writer) {
                        let at = (m % 8 * 64) as usize;
                        expected[at..at + 64].fill((m / 2 + 2) as u8);
                    }
                    let mut found = vec![0; SIZE as usize];
                    views[&key].read(0, &mut found).unwrap();
                    assert_eq!(found, expected, "disk of {writer} at {n} ms");
                }
                shown += 1;
            }
            Err(PastError::BeforeWindow { oldest }) => {
                assert!(oldest > Hlc(hlc(n)));
                before += 1;
            }
            Err(error) => panic!("{n}: {error}"),
        }
    }
    (shown, before)
}

#[test]
fn any_time_of_the_window_is_shown_as_it_was_whatever_was_folded() {
    for form in [Form::Vector, Form::Hlc] {
        any_time_is_shown_as_it_was(form);
    }
}

fn any_time_is_shown_as_it_was(form: Form) {
    let disk = Memory::new();
    let mut group = busy(&disk, form, 30, 100);
    assert_eq!(check_all(&mut group, 100), (96, 0));
    let now = at_ms(1000);
    while fold(&mut group, now) {}
    let (shown, before) = check_all(&mut group, 100);
    assert!(shown >= 30 && before > 10, "{shown} shown, {before} before the window");
    // Also by another run, after a power loss.
    let mut group = reopen(&disk.crash(&mut || false));
    group.options = windowed(30);
    assert_eq!(check_all(&mut group, 100), (shown, before));
    let past = group.history().unwrap();
    let future = past.resolve(&up_to(1000)).unwrap_err();
    assert!(matches!(future, PastError::Future { .. }), "{future}");
    assert!(past.oldest().unwrap().hlc < past.newest().unwrap().hlc);
}

/// Wherever the replay begins, the point is the same.
#[test]
fn a_point_is_found_from_waypoints_as_from_the_beginning_of_its_segment() {
    for form in [Form::Vector, Form::Hlc] {
        for segment_bytes in [1500, 6000, 40_000] {
            let disk = Memory::new();
            let journal = journal::Options { segment_bytes };
            let options = GroupOptions { journal, ..windowed(1_000_000) };
            let mut group = busy_with(&disk, form, options, 100);
            let few = points_of_both_ways(&mut group);
            while super::indexes::index_all(&mut group) > 0 {}
            let indexed = points_of_both_ways(&mut group);
            let mut group = reopen(&disk.crash(&mut || false));
            group.options = windowed(1_000_000);
            let reopened = points_of_both_ways(&mut group);
            assert_eq!(few, indexed);
            assert!(few > 4 && (reopened > 4 || segment_bytes > 1500), "{few}, {reopened}");
        }
    }
}

/// How many waypoints are known.
fn points_of_both_ways(group: &mut Group<Memory>) -> usize {
    let (with, mut without) = (group.history().unwrap(), group.history().unwrap());
    without.tail.forget_waypoints();
    let committed = with.newest().unwrap().cut;
    let times = (0..100).map(up_to);
    let seqs =
        (1..51).map(|seq| At::Vector(vector(&[seq, committed.get(WriterId(1)).0.min(seq + 3)])));
    for at in times.chain(seqs).chain([At::Latest]) {
        match (with.resolve(&at), without.resolve(&at)) {
            (Ok(point), Ok(same)) => {
                assert_eq!(point, same, "{at:?}");
                assert_eq!(with.locate(&point).unwrap(), without.locate(&point).unwrap());
            }
            (Err(error), Err(same)) => assert_eq!(error.to_string(), same.to_string(), "{at:?}"),
            (one, other) => panic!("{at:?}: {one:?}, {other:?}"),
        }
    }
    let segments = with.tail.segments().iter().map(|segment| segment.index);
    segments.map(|segment| with.tail.waypoints(segment).len()).sum()
}

#[test]
fn a_hold_keeps_its_point_beyond_the_window_and_lets_go_when_dropped() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, 1_000_000, 100);
    let past = group.history().unwrap();
    let point = past.resolve(&up_to(20)).unwrap();
    let hold = past.hold(&point, "a pin").unwrap();
    drop(past);
    group.options = windowed(10);
    while fold(&mut group, at_ms(1000)) {}
    let past = group.history().unwrap();
    let located = past.locate(&point).unwrap();
    assert_eq!((&located.cut, &located.writers), (&point.cut, &point.writers));
    assert!(past.open(&located).is_ok());
    drop((past, hold));
    while fold(&mut group, at_ms(1000)) {}
    let gone = group.history().unwrap().locate(&point).unwrap_err();
    assert!(matches!(gone, PastError::BeforeWindow { .. }), "{gone}");
}

#[test]
fn at_its_size_the_window_is_shortened_and_said_so_or_the_group_stops() {
    let mut group = busy(&Memory::new(), Form::Hlc, 1_000_000, 20);
    group.take_outputs();
    let of = |at_size_max| Retention { window_ms: 1_000_000, size_max_bytes: 8000, at_size_max };
    let size = |group: &Group<Memory>| group.unfolded_bytes();
    group.options.retention = of(AtSizeMax::Shorten);
    let past = group.history().unwrap();
    let point = past.resolve(&up_to(5)).unwrap();
    let views = past.open(&point).unwrap();
    drop(past);
    for n in 20..120 {
        send(&mut group, record((n % 2) as u16, n / 2 + 2, hlc(n), &[]));
        group.flush();
        while fold(&mut group, at_ms(1000)) {}
        assert!(group.accepts());
    }
    assert!(size(&group) < 8000 + 3000, "{}", size(&group));
    assert!(group.past_status().shortened);
    let told = group.take_notices();
    assert!(told.iter().any(|t| t.contains("a view has lost its point")), "{told:?}");
    assert!(told.iter().any(|t| t.contains("the window is shortened")), "{told:?}");
    let view = views.values().next().unwrap();
    assert!(view.is_revoked() && view.read(0, &mut [0]).is_err());
    group.options.retention = of(AtSizeMax::Stop);
    let mut n = 120;
    while group.accepts() {
        send(&mut group, record((n % 2) as u16, n / 2 + 2, hlc(n), &[]));
        group.flush();
        n += 1;
        assert!(n < 200, "it must stop");
    }
    assert!(!fold(&mut group, at_ms(1000)), "nothing has left the window");
    // By the wall clock the window passes.
    while fold(&mut group, at_ms(2_000_000)) {}
    assert!(group.accepts());
}

#[test]
fn a_group_does_not_stop_at_its_size_for_records_that_it_does_not_take() {
    for form in [Form::Vector, Form::Hlc] {
        let mut group = two(&Memory::new(), form);
        let at_size_max = AtSizeMax::Stop;
        let retention = Retention { window_ms: 10, size_max_bytes: 8000, at_size_max };
        group.options = GroupOptions { retention, ..options() };
        // All depend on one of b that does not come.
        let deps: &[(u16, u64)] = if form == Form::Vector { &[(1, 2)] } else { &[] };
        for n in 2..60 {
            send(&mut group, record(0, n, hlc(n), deps));
            group.flush();
            while fold(&mut group, at_ms(n)) {}
            assert!(group.accepts(), "{form:?}: at {n}");
        }
        assert!(group.unfolded_bytes() > 8000);
        send(&mut group, record(1, 2, hlc(100), &[]));
        group.flush();
        while fold(&mut group, at_ms(1000)) {}
        assert!(group.accepts() && group.unfolded_bytes() < 8000, "{form:?}");
    }
}

#[test]
fn what_was_told_before_a_record_came_is_in_each_state_that_has_the_record() {
    let mut group = two(&Memory::new(), Form::Vector);
    group.options = windowed(1_000_000);
    // b's clock is far ahead, and a has heard of its write when that was in C: nothing names it.
    send(&mut group, record(1, 2, hlc(9_000), &[]));
    group.flush();
    send(&mut group, record(0, 2, hlc(50), &[]));
    group.flush();
    send(&mut group, record(1, 3, hlc(9_001), &[]));
    group.flush();
    let past = group.history().unwrap();
    let cut_at = |ms: u64| past.resolve(&up_to(ms)).unwrap().cut;
    assert_eq!(cut_at(100), vector(&[1, 1]), "a's record came later");
    assert_eq!(cut_at(8_999), vector(&[1, 1]));
    assert_eq!(cut_at(9_000), vector(&[2, 2]));
    // By seqs, too: not one without the other.
    let by_seqs = |seqs: &[u64]| past.resolve(&At::Vector(vector(seqs))).unwrap().cut;
    assert_eq!(by_seqs(&[2, 1]), vector(&[1, 1]));
    assert_eq!(by_seqs(&[1, 3]), vector(&[1, 2]));
    assert_eq!(by_seqs(&[2, 2]), vector(&[2, 2]));
    assert_eq!(by_seqs(&[2, 3]), vector(&[2, 3]));
    // The newest time may still get more; the latest state is what is kept of it.
    let open = past.resolve(&up_to(9_001)).unwrap_err();
    assert!(matches!(open, PastError::Future { .. } | PastError::NotComplete { .. }), "{open}");
    let kept = past.newest().unwrap();
    assert_eq!(kept.cut, vector(&[2, 3]));
    drop(past);
    send(&mut group, record(0, 3, hlc(60), &[]));
    group.flush();
    let past = group.history().unwrap();
    assert_eq!(past.locate(&kept).unwrap().cut, kept.cut);
    assert!(past.open(&kept).is_ok());
}

#[test]
fn a_record_that_waits_for_another_writers_is_in_no_state_before_that() {
    for form in [Form::Vector, Form::Hlc] {
        let mut group = two(&Memory::new(), form);
        group.options = windowed(1_000_000);
        let deps: &[(u16, u64)] = if form == Form::Vector { &[(1, 2)] } else { &[] };
        send(&mut group, record(0, 2, hlc(20), deps));
        group.flush();
        send(&mut group, record(0, 3, hlc(30), &[]));
        group.flush();
        send(&mut group, record(1, 2, hlc(10), &[]));
        group.flush();
        send(&mut group, record(1, 3, hlc(40), &[]));
        group.flush();
        let past = group.history().unwrap();
        let cut_at = |ms: u64| past.resolve(&up_to(ms)).unwrap().cut;
        assert_eq!(cut_at(29), vector(&[1, 1]), "{form:?}");
        // When the last record was of 30 ms, b's first had come.
        let at_30 = if form == Form::Vector { [3, 2] } else { [1, 2] };
        assert_eq!(cut_at(30), vector(&at_30), "{form:?}");
        assert_eq!(
            past.newest().unwrap().cut,
            vector(if form == Form::Vector { &[3, 3] } else { &[3, 2] })
        );
    }
}

#[test]
fn what_changed_between_two_points_is_what_the_records_between_them_wrote() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let group = busy(&disk, form, 1_000_000, 60);
        let past = group.history().unwrap();
        let points = [3, 4, 17, 18, 40, 55].map(|ms| past.resolve(&up_to(ms)).unwrap());
        for (from, to) in points.iter().flat_map(|from| points.iter().map(move |to| (from, to))) {
            let (earlier, later) = if from.hlc <= to.hlc { (from, to) } else { (to, from) };
            let records = past.records(earlier, later, usize::MAX).unwrap();
            for writer in 0..2 {
                let key = DiskKey { writer: WriterId(writer), disk: DiskId(0) };
                let mut expected = vec![false; SIZE as usize];
                for (_, offset, len) in
                    records.iter().filter_map(|record| record.extent).filter(|e| e.0 == key)
                {
                    expected[offset as usize..(offset + len) as usize].fill(true);
                }
                let mut found = vec![false; SIZE as usize];
                let mut last_end = None;
                for range in past.changed(from, to, key).unwrap() {
                    assert!(last_end.is_none_or(|end| range.start > end), "in order and merged");
                    last_end = Some(range.end);
                    found[range.start as usize..range.end as usize].fill(true);
                }
                assert_eq!(found, expected, "{form:?}: from {from:?} to {to:?}");
            }
        }
    }
}

/// What stands before the change of the group and beyond the cut has a part in the time from which on the group is
/// another one.
#[test]
fn the_newest_point_is_found_again_after_a_member_was_removed_beside_records_that_wait() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let shape = Shape { writers: 3, form };
        let mut group = shape.create_with(&disk, windowed(1_000_000)).unwrap();
        for writer in 0..3 {
            attach(&mut group, at_ms(0), &shape.writer(writer, 1, LastRun::Unknown));
            send(&mut group, done(writer, 1, hlc(u64::from(writer)), &[]));
        }
        // It waits for a record of c's that does not come.
        send(&mut group, record(0, 2, hlc(500), &[(2, 9)]));
        group.flush();
        group.connection_lost(link(1).connection);
        group.remove("b").unwrap();
        let past = group.history().unwrap();
        let point = past.newest().unwrap();
        assert_eq!(point.cut.get(WriterId(0)), Seq(1));
        assert_eq!(point.writers, [WriterId(0), WriterId(2)]);
        assert!(point.hlc > Hlc(hlc(500)), "{point:?}");
        let found = past.locate(&point).unwrap();
        assert_eq!((found.writers, found.cut, found.hlc), (point.writers, point.cut, point.hlc));
    }
}

/// A comparison ended and the next one began, and neither was in the cut when the group was recovered.
#[test]
fn a_point_of_a_recovered_group_is_found_behind_comparisons_that_it_has_not() {
    let disk = Memory::new();
    let mut group = two_with(&disk, Form::Vector, windowed(3_600_000));
    let shape = Shape { writers: 2, form: Form::Vector };
    attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    // It depends on what never comes.
    send(&mut group, done(0, 2, hlc(1), &[(1, 9)]));
    group.flush();
    let said = attach(&mut group, at_ms(0), &shape.writer(0, 3, LastRun::Unknown));
    assert_eq!(copy_of(&said), CopyState::Resyncing);
    assert_eq!(group.cut(), &vector(&[1, 1]));
    group.recover(at_ms(0), true).unwrap();
    let past = group.history().unwrap();
    let point = past.resolve(&At::Hlc(past.newest_time())).unwrap();
    assert_eq!(point.cut, vector(&[1, 1]));
    assert_eq!(past.locate(&point).unwrap().cut, point.cut);
}

/// The first state of an epoch has the cut that its recovery has chosen.
#[test]
fn the_first_point_after_a_recovery_is_found_again() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    group.recover(at_ms(1000), true).unwrap();
    let chosen = group.state().barrier;
    let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
    assert!(group.guest_write(at_ms(2000), key, 0, GuestEffect::Write(vec![7; 64].into())));
    assert!(group.guest_written());
    group.flush();
    let past = group.history().unwrap();
    for (time, epoch) in [(chosen, 1), (Hlc(chosen.0 + 1), 2)] {
        let point = past.resolve(&At::Hlc(time)).unwrap();
        assert_eq!((point.epoch, &point.cut), (Epoch(epoch), &vector(&[1, 1])));
        assert_eq!(past.locate(&point).unwrap().epoch, point.epoch);
    }
}

/// A host's clock is 8 h ahead; then both sites' clocks are set. Points are by arrival, and nothing leaves the window.
#[test]
fn a_wrong_clock_moves_no_point_in_time_and_costs_no_part_of_the_window() {
    const HOURS: u64 = 8 * 3_600_000;
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        // An operator allows that host clocks are so far ahead.
        let options = GroupOptions { clock_bound_ms: 2 * HOURS, ..windowed(60_000) };
        let mut group = two_with(&disk, form, options);
        // a's clock is ahead. In the vector form b's is right, in the HLC form it follows a's: each writes each second.
        let of_b = if form == Form::Hlc { HOURS + 1 } else { 1 };
        for n in 1..50 {
            send_at(&mut group, at_ms(n * 1000), record(0, n + 1, hlc(HOURS + n * 1000), &[]));
            send_at(&mut group, at_ms(n * 1000), record(1, n + 1, hlc(of_b + n * 1000), &[]));
            group.flush();
        }
        group.tick(at_ms(50_000));
        let past = group.history().unwrap();
        let point = past.resolve(&At::WallMs(past.now_ms() - 3000)).unwrap();
        let behind = if form == Form::Hlc { 2 } else { 0 };
        assert!(point.cut.get(WriterId(1)).0 + behind >= 48, "{form:?}: {point:?}");
        assert_eq!(point.arrived_ms, T0 + 47_000);
        let early = past.resolve(&At::WallMs(T0 + 10_500)).unwrap();
        assert!(early.cut.get(WriterId(0)) <= Seq(11), "nothing that arrived later: {early:?}");
        let future = past.resolve(&At::WallMs(T0 + HOURS)).unwrap_err();
        assert!(matches!(future, PastError::Future { .. }), "{future}");
        drop(past);
        // The wall clock here is set ahead while the server runs: time goes on as it passes.
        let ahead = |ms: u64| Now { unix_ms: T0 + ms + HOURS, ..at_ms(ms) };
        for n in 50..55 {
            send_at(&mut group, ahead(n * 1000), record(0, n + 1, hlc(HOURS + n * 1000), &[]));
            send_at(&mut group, ahead(n * 1000), record(1, n + 1, hlc(of_b + n * 1000), &[]));
            group.flush();
        }
        while fold(&mut group, ahead(55_000)) {}
        assert_eq!(
            group.history().unwrap().resolve(&At::WallMs(T0 + 10_500)).unwrap().cut,
            early.cut
        );
        // Two minutes later the first minute has left the window, whatever a's clock says.
        for n in [170, 171] {
            send_at(&mut group, ahead(n * 1000), record(0, n - 114, hlc(HOURS + n * 1000), &[]));
            send_at(&mut group, ahead(n * 1000), record(1, n - 114, hlc(of_b + n * 1000), &[]));
            group.flush();
        }
        while fold(&mut group, ahead(172_000)) {}
        let gone = group.history().unwrap().resolve(&At::WallMs(T0 + 10_500)).unwrap_err();
        assert!(matches!(gone, PastError::BeforeWindow { .. }), "{gone}");
    }
}

/// Seqs tell states of one time apart, in any order of the two.
#[test]
fn what_changed_between_two_points_of_one_time_is_told_both_ways() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    send(&mut group, record(0, 2, hlc(20), &[]));
    // A clock that is behind.
    send(&mut group, record(1, 2, hlc(15), &[]));
    group.flush();
    let past = group.history().unwrap();
    let before = past.resolve(&At::Vector(vector(&[2, 1]))).unwrap();
    let after = past.newest().unwrap();
    assert_eq!((before.hlc, &after.cut), (after.hlc, &vector(&[2, 2])));
    let key = DiskKey { writer: WriterId(1), disk: DiskId(0) };
    for (from, to) in [(&before, &after), (&after, &before)] {
        let changed: Vec<_> = past.changed(from, to, key).unwrap().collect();
        assert_eq!((changed.len(), &changed[0]), (1, &(0..64)));
    }
}

#[test]
fn the_oldest_point_is_found_though_one_copy_had_ended_before_the_window() {
    let disk = Memory::new();
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = shape.create_with(&disk, windowed(0)).unwrap();
    for writer in 0..2 {
        attach(&mut group, at_ms(0), &shape.writer(writer, 1, LastRun::Unknown));
    }
    send(&mut group, done(0, 1, hlc(0), &[]));
    for n in 1..5 {
        send(&mut group, record(0, n + 1, hlc(n), &[]));
        group.flush();
    }
    while fold(&mut group, at_ms(1000)) {}
    send(&mut group, done(1, 1, hlc(5), &[]));
    group.flush();
    let past = group.history().unwrap();
    assert!(past.oldest_time() > Hlc(hlc(0)), "{}", past.oldest_time());
    assert_eq!(past.oldest().unwrap().cut, vector(&[5, 1]));
}

/// Folded records cannot be shown, also if a later fold would leave more: with a longer window, or after a fold that was
/// begun under less room. A fold that was begun may have brought everything up to its end into the images.
#[test]
fn the_oldest_point_never_falls_and_no_fold_that_was_begun_is_forgotten() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, 30, 100);
    while fold(&mut group, at_ms(1000)) {}
    let (oldest, position) = (group.oldest().clone(), group.fold_position());
    let at = |time: u64| Closed { at: Hlc(time), ..oldest.clone() };
    let to = |more: u64| Position { offset: position.offset + more, ..position };
    let cases = [
        (oldest.at.0 - 1, to(64), &[5, 1][..], oldest.at.0, to(64), &[5, 1][..]),
        (oldest.at.0, to(32), &[2, 7], oldest.at.0, to(64), &[5, 7]),
        (oldest.at.0 + 9, to(96), &[1, 1], oldest.at.0 + 9, to(96), &[5, 7]),
        (oldest.at.0 + 8, to(96), &[1, 1], oldest.at.0 + 9, to(96), &[5, 7]),
    ];
    for (asked, end, cut, oldest, ahead, merged) in cases {
        group.record_beginning(at(asked), (end, vector(cut))).unwrap();
        let kept = tidelock_store::fold::read_position(&disk.crash(&mut || false)).unwrap();
        assert_eq!((group.oldest().at, kept.oldest.at), (Hlc(oldest), Hlc(oldest)));
        assert_eq!(kept.folding, Some((ahead, vector(merged))));
        assert_eq!(group.fold.ahead, kept.folding);
        assert_eq!(kept.position, position);
    }
}
