//! Groups whose journals have indexes: opened by them they are the same groups, and what opening
//! does not read is verified beside.

use super::past::{busy, check_all, fold, windowed};
use super::*;

const DAY_MS: u64 = 24 * 3600 * 1000;

pub(super) fn index_all(group: &mut Group<Memory>) -> usize {
    let jobs = std::iter::from_fn(|| {
        let job = group.index_job()?;
        let segment = job.segment();
        assert!(group.fold_job(at_ms(0)).is_none(), "one at a time");
        group.index_done(segment, job.run());
        Some(segment)
    });
    jobs.count()
}

/// The next segment is verified; images are, if none is due.
pub(super) fn scrub(group: &mut Group<Memory>, now: Now) -> Option<u64> {
    loop {
        let done = group.scrub_job(now)?.run();
        let segment = match &done {
            ScrubDone::Segment(segment, _) => Some(*segment),
            ScrubDone::Image { .. } => None,
        };
        group.scrub_done(now, done);
        if segment.is_some() {
            return segment;
        }
    }
}

/// How many segments opening has to read.
fn read_by_opening(disk: &Memory) -> usize {
    let mut segments = std::collections::BTreeSet::new();
    let position = fold::read_position(disk).unwrap().position;
    let options = options().journal;
    let show = |at: Position, _: &journal::State, _: journal::Shown<'_>| {
        segments.insert(at.segment);
    };
    Journal::open_with(disk.clone(), "journal", position, options, show).unwrap();
    segments.len()
}

fn indexes(disk: &Memory) -> Vec<String> {
    let mut names = disk.list("journal").unwrap();
    names.retain(|name| name.ends_with(".idx"));
    names
}

#[test]
fn a_group_opened_by_its_indexes_is_the_same_group() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, DAY_MS, 100);
    let segments = group.journal.segments().len();
    let made = index_all(&mut group);
    assert_eq!(indexes(&disk).len(), segments - 1);
    assert_eq!(made, 2 * (segments - 1) + (segments - 1) / 8, "and maps of all, and of each eight");
    let (state, cut) = (group.state().clone(), group.cut().clone());
    let closed: Vec<u64> = group.fold.closed.keys().copied().collect();
    let expected = check_all(&mut group, 100);
    assert_eq!(expected, (96, 0));
    drop(group);
    let without = disk.crash(&mut || false);
    for name in indexes(&without) {
        without.remove(&format!("journal/{name}")).unwrap();
    }
    assert!(segments > 5 && read_by_opening(&disk.killed()) == 2);
    assert_eq!(read_by_opening(&without.killed()), segments);
    for disk in [disk.crash(&mut || false), without] {
        let mut group = reopen(&disk);
        group.options = windowed(DAY_MS);
        assert_eq!((group.state(), group.cut()), (&state, &cut));
        let found: Vec<u64> = group.fold.closed.keys().copied().collect();
        assert!(closed.ends_with(&found) && closed.len() <= found.len() + 1, "{found:?}");
        assert_eq!(check_all(&mut group, 100), expected);
        // Records leave the window by the same places.
        group.options = windowed(30);
        while fold(&mut group, at_ms(1000)) {}
        let (shown, before) = check_all(&mut group, 100);
        assert!(shown >= 29 && before > 10, "{shown} shown, {before} before the window");
        assert!(indexes(&disk).len() < group.journal.segments().len(), "indexes go as well");
    }
}

#[test]
fn a_resync_keeps_what_is_not_closed_in_what_opening_reads() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 20);
    index_all(&mut group);
    let before = read_by_opening(&disk.killed());
    let shape = Shape { writers: 2, form: Form::Vector };
    let said = attach(&mut group, at_ms(0), &shape.writer(0, 2, LastRun::Unknown));
    assert_eq!(copy_of(&said), CopyState::Resyncing);
    for n in 0..60 {
        send(&mut group, record(0, 12 + n, 2_000_000_000_000 + n, &[]));
        group.flush();
    }
    index_all(&mut group);
    let cut = group.cut().clone();
    assert_eq!(cut.get(WriterId(0)), Seq(11), "all or nothing of it");
    drop(group);
    assert!(read_by_opening(&disk.killed()) > before + 3);
    let group = reopen(&disk.crash(&mut || false));
    assert_eq!(group.cut(), &cut);
}

#[test]
fn what_a_fold_takes_away_gets_no_index() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, 0, 60);
    assert!(group.journal.segments().len() > 3);
    assert_eq!(index_all(&mut group), 0);
    while fold(&mut group, at_ms(0)) {}
    assert!(indexes(&disk).is_empty());
}

#[test]
fn verification_goes_once_through_all_and_again_the_next_day() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, DAY_MS, 60);
    index_all(&mut group);
    let sealed = group.journal.segments().len() as u64 - 1;
    let mut now = at_ms(0);
    assert_eq!(scrub(&mut group, now), None, "not all at once");
    for nth in 1..=sealed {
        assert_eq!(group.status(now).scrub.segments_left, sealed - nth + 1);
        now.mono.0 += 1_000_000_000;
        assert_eq!(scrub(&mut group, now), Some(nth));
    }
    now.mono.0 += 1_000_000_000;
    assert_eq!(scrub(&mut group, now), None);
    assert!(!group.is_scrubbing() && group.broken().is_none());
    now.mono.0 += DAY_MS * 1_000_000;
    assert_eq!(scrub(&mut group, now), Some(1), "again the next day");
}
