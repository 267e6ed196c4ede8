//! Damage at rest: what was flipped on the disk is told, never shown, and everything else is as it was.

use super::cold::compress_some;
use super::indexes::{index_all, scrub};
use super::past::{T0, busy, fold, hlc, windowed};
use super::*;
use crate::group::damage::LOOK_FIRST_MS;
use crate::history::{At, PastError};
use tidelock_store::damage::{Known, is_damage};
use tidelock_store::journal::index_file_name;

pub(super) const DAY_MS: u64 = 24 * 3600 * 1000;
const SLOT: u64 = 64;

/// What is seen of each point in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Slots of which the data is what was written.
    right: u64,
    /// Slots that cannot be read.
    refused: u64,
    /// Points that cannot be told, because of damage.
    untold: u64,
    /// Points before the window.
    before: u64,
}

/// The segment's path, and its bytes.
pub(super) fn path_of(group: &Group<Memory>, nth: usize) -> (String, u64) {
    let segment = &group.journal.segments()[nth];
    (format!("journal/{}", segment.file_name()), segment.len_bytes)
}

fn index_path_of(group: &Group<Memory>, nth: usize) -> String {
    let segment = &group.journal.segments()[nth];
    format!("journal/{}", index_file_name(segment.index, segment.id))
}

/// Verifies everything that is sealed.
fn scrub_all(group: &mut Group<Memory>, seconds: &mut u64) {
    for _ in 0..=group.journal.segments().len() * 2 + 4 {
        *seconds += 1;
        scrub(group, at_ms(*seconds * 1000));
    }
    *seconds += 1;
    group.tend_damage(at_ms(*seconds * 1000));
}

/// Every state is the records up to its time; what cannot be read is exactly what is told, and lies in a span that
/// is told.
fn check(group: &mut Group<Memory>, records: u64) -> Seen {
    let mut seen = Seen::default();
    let behind = u64::from(group.state().form == Form::Hlc);
    for n in 2..records - 2 {
        let upto = n - behind;
        let past = group.history().unwrap();
        let spans = past.spans().unwrap();
        let spanned = |time: Hlc| {
            let has = |span: &&crate::history::AffectedSpan| {
                span.from <= time && span.until.is_none_or(|until| time < until)
            };
            spans.iter().find(has).copied()
        };
        let time = Hlc::new(T0 + n, u16::MAX);
        let point = match past.resolve(&At::Hlc(time)) {
            Ok(point) => point,
            Err(PastError::BeforeWindow { .. }) => {
                seen.before += 1;
                continue;
            }
            Err(PastError::Journal(error)) => {
                let mut of_time = spans.iter().filter(|span| {
                    span.from <= time && span.until.is_none_or(|until| time < until)
                });
                assert!(of_time.any(|span| span.is_untold), "{n}: {error}; {spans:?}");
                seen.untold += 1;
                continue;
            }
            Err(error) => panic!("{n}: {error}"),
        };
        assert_eq!(point.cut, vector(&[upto / 2 + 2, upto.div_ceil(2) + 1]), "at {n} ms");
        let affected = past.affected(&point).unwrap();
        let views = past.open(&point).unwrap();
        for writer in 0..2u64 {
            let key = DiskKey { writer: WriterId(writer as u16), disk: DiskId(0) };
            let mut expected = vec![0; SIZE as usize];
            for m in (0..=upto).filter(|m| m % 2 == writer) {
                let at = (m % 8 * SLOT) as usize;
                expected[at..at + SLOT as usize].fill((m / 2 + 2) as u8);
            }
            for slot in 0..SIZE / SLOT {
                let range = slot * SLOT..(slot + 1) * SLOT;
                let told = affected.iter().any(|of| {
                    of.key == key && of.range.start < range.end && range.start < of.range.end
                });
                let mut found = vec![0; SLOT as usize];
                match views[&key].read(range.start, &mut found) {
                    Ok(()) => {
                        let want = &expected[range.start as usize..range.end as usize];
                        assert_eq!(found, want, "slot {slot} of {writer} at {n} ms");
                        assert!(!told, "slot {slot} of {writer} at {n} ms is told to be damaged");
                        seen.right += 1;
                    }
                    Err(error) => {
                        let known: Vec<_> = past.quarantine.keys().collect();
                        let at = (past.base, past.end, point.end);
                        assert!(
                            told,
                            "slot {slot} of {writer} at {n} ms: {error}; {affected:?} {known:?} {at:?}"
                        );
                        assert!(spanned(time).is_some(), "{n}: {affected:?} is not in {spans:?}");
                        seen.refused += 1;
                    }
                }
            }
        }
    }
    seen
}

fn writes_all_slots(group: &mut Group<Memory>, records: u64) {
    for writer in 0..2 {
        let run = LastRun::Continues { from: Seq(records / 2 + 2) };
        let shape = Shape { writers: 2, form: group.state().form };
        attach(group, at_ms(0), &shape.writer(writer, 1, run));
    }
    for m in records..records + 16 {
        let (writer, seq) = ((m % 2) as u16, m / 2 + 2);
        let data = Effect::Write(Payload::new(vec![1; SIZE as usize].into()));
        let whole = Record {
            body: DiskChange { effect: data, ..record(writer, seq, hlc(m), &[]).body },
            ..record(writer, seq, hlc(m), &[])
        };
        send(group, whole);
        group.flush();
    }
}

#[test]
fn damaged_data_costs_only_itself_until_something_newer_is_written() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, DAY_MS, 60);
    index_all(&mut group);
    let whole = check(&mut group, 60);
    assert_eq!((whole.refused, whole.untold), (0, 0));
    let (path, len_bytes) = path_of(&group, 2);
    disk.flip(&path, len_bytes - 3);
    let mut seconds = 0;
    scrub_all(&mut group, &mut seconds);
    assert!(group.broken().is_none() && group.accepts(), "replication goes on");
    let status = group.status(at_ms(0));
    let [damaged] = &status.damaged[..] else { panic!("{:?}", status.damaged) };
    assert_eq!((damaged.segment, damaged.known, damaged.records), (3, Known::Records, 1));
    assert_eq!(damaged.file.as_ref(), Some(&path));
    assert!(damaged.until.is_some_and(|until| damaged.from.unwrap() < until), "{damaged:?}");
    assert!(status.latest_damaged.is_empty() && status.recoverable);
    assert!(group.take_notices().iter().any(|notice| notice.contains("damaged at byte")));
    let seen = check(&mut group, 60);
    assert!(seen.refused > 0 && seen.untold == 0, "{seen:?}");
    assert_eq!(seen.right + seen.refused, whole.right);
    // It is on record.
    drop(group);
    let mut group = reopen(&disk.crash(&mut || false));
    group.options = windowed(DAY_MS);
    assert_eq!(check(&mut group, 60), seen);
    // The file is restored: that is found by itself.
    let disk = group.storage.clone();
    disk.flip(&path, len_bytes - 3);
    scrub_all(&mut group, &mut seconds);
    assert!(group.damaged().is_empty() && group.status(at_ms(0)).scrub.damaged.is_none());
    assert_eq!(check(&mut group, 60), whole);
}

#[test]
fn a_damaged_header_costs_the_times_of_its_segment_and_without_an_index_what_is_not_written_again()
{
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    index_all(&mut group);
    let (path, len_bytes) = path_of(&group, 2);
    let headers = |group: &mut Group<Memory>| {
        // The last record is 64 bytes of data behind its header.
        disk.flip(&path, len_bytes - 80);
        let mut seconds = 0;
        scrub_all(group, &mut seconds);
        group.status(at_ms(0)).damaged[0].clone()
    };
    let damaged = headers(&mut group);
    assert_eq!((damaged.known, damaged.records, damaged.is_untold), (Known::Extents, 0, true));
    let seen = check(&mut group, 60);
    // Between two waypoints: what comes behind the next one, and what was before, is told.
    assert!(seen.refused == 0 && (1..20).contains(&seen.untold), "{seen:?}");
    drop(group);
    let mut group = reopen(&disk.crash(&mut || false));
    group.options = windowed(DAY_MS);
    assert_eq!(check(&mut group, 60), seen);
    // Without its index nothing is known of it. Its map is enough for those that do not cut it.
    disk.flip(&path, len_bytes - 80);
    let mut names = disk.list("journal").unwrap();
    names.retain(|name| name.ends_with(".map") || name.ends_with(".idx"));
    names.iter().for_each(|name| disk.remove(&format!("journal/{name}")).unwrap());
    let mut group = reopen(&disk);
    group.options = windowed(DAY_MS);
    // No index of it is made any more: too many of them wait.
    group.journal.forget_entries_of(3);
    let damaged = headers(&mut group);
    assert_eq!((damaged.known, damaged.is_untold), (Known::Nothing, true));
    let seen = check(&mut group, 60);
    assert!(seen.refused > 0, "{seen:?}");
    assert!(!group.latest_damaged().is_empty() && !group.status(at_ms(0)).recoverable);
    // A fold carries it on.
    group.options = windowed(20);
    while fold(&mut group, at_ms(1000)) {}
    let folded = check(&mut group, 60);
    assert!(folded.before > seen.before && folded.refused > 0, "{folded:?}");
    group.tend_damage(at_ms(900_000));
    assert!(!group.damage.is_due && !group.latest_damaged().is_empty());
    writes_all_slots(&mut group, 60);
    group.tend_damage(at_ms(1_000_000));
    assert!(group.latest_damaged().is_empty() && group.is_recoverable());
}

#[test]
fn a_damaged_beginning_follows_from_the_segment_before_it() {
    // Of the header, and of the checkpoint.
    for at in [20, 64 + 48 + 20] {
        let disk = Memory::new();
        let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
        index_all(&mut group);
        let whole = check(&mut group, 60);
        let (path, _) = path_of(&group, 2);
        let (first, _) = path_of(&group, 0);
        drop(group);
        disk.flip(&path, at);
        let mut group = reopen(&disk.crash(&mut || false));
        group.options = windowed(DAY_MS);
        let disk = group.storage.clone();
        let mut seconds = 0;
        scrub_all(&mut group, &mut seconds);
        let damaged = group.status(at_ms(0)).damaged[0].clone();
        let seen = check(&mut group, 60);
        if at == 20 {
            assert_eq!((damaged.known, damaged.records), (Known::Records, 0));
            assert_eq!(seen, whole, "all else says the same");
        } else {
            assert_eq!((damaged.known, damaged.records), (Known::Extents, 0));
            assert!(damaged.is_untold && seen.refused == 0, "{seen:?}");
            assert!((1..20).contains(&seen.untold), "{seen:?}");
        }
        assert!(group.latest_damaged().is_empty() && group.is_recoverable());
        // It can be folded.
        group.options = windowed(20);
        while fold(&mut group, at_ms(1000)) {}
        let folded = check(&mut group, 60);
        assert!(folded.before > 2 && folded.refused == 0, "{folded:?}");
        drop(group);
        assert!(disk.open(&first).is_err(), "it was folded");
        assert!(check(&mut reopen(&disk), 60).refused == 0);
    }
    // Nothing is before the first one.
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    index_all(&mut group);
    let (path, _) = path_of(&group, 0);
    drop(group);
    disk.flip(&path, 20);
    let refused = Group::open(disk, at_ms(0), windowed(DAY_MS)).unwrap_err();
    assert!(refused.to_string().contains("is damaged at byte 0"), "{refused}");
}

/// The newest state is everything up to its cut.
pub(super) fn check_newest(group: &mut Group<Memory>) {
    let past = group.history().unwrap();
    let point = past.newest().unwrap();
    let views = past.open(&point).unwrap();
    for writer in 0..2u64 {
        let kept = point.cut.get(WriterId(writer as u16)).0;
        let mut expected = vec![0; SIZE as usize];
        for m in (writer..).step_by(2).take_while(|m| m / 2 + 2 <= kept) {
            let at = (m % 8 * SLOT) as usize;
            expected[at..at + SLOT as usize].fill((m / 2 + 2) as u8);
        }
        let mut found = vec![0; SIZE as usize];
        let key = DiskKey { writer: WriterId(writer as u16), disk: DiskId(0) };
        views[&key].read(0, &mut found).unwrap();
        assert_eq!(found, expected, "writer {writer} at {kept}");
    }
}

/// Data that a fold has left out is in the images before the record of the damage goes.
#[test]
fn a_restored_segment_of_which_a_part_is_folded_heals_the_images() {
    let disk = Memory::new();
    let mut group = two_with(&disk, Form::Vector, windowed(0));
    let write = |group: &mut Group<Memory>, seq: u64, offset: u64| {
        let body = DiskChange { offset, ..record(0, seq, hlc(seq), &[]).body };
        send(group, Record { body, ..record(0, seq, hlc(seq), &[]) });
        group.flush();
    };
    write(&mut group, 2, 0);
    let first = group.journal.segments().len() - 1;
    let (path, len_bytes) = path_of(&group, first);
    disk.flip(&path, len_bytes - 3);
    while fold(&mut group, at_ms(1000)) {}
    // The segment is sealed, and later records are not folded.
    for seq in 3..20 {
        write(&mut group, seq, seq % 2 * 64);
    }
    let sealed = group.journal.segments()[first].index;
    assert_eq!((group.fold.position.segment, group.damaged().len()), (sealed, 1));
    let older = |group: &mut Group<Memory>| {
        let past = group.history().unwrap();
        past.resolve(&At::Vector(vector(&[2, 1]))).map(|point| past.open(&point).unwrap())
    };
    let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
    let mut data = [0; 64];
    assert!(older(&mut group).unwrap()[&key].read(0, &mut data).is_err());
    disk.flip(&path, len_bytes - 3);
    assert!(group.check_damaged(at_ms(2000)).unwrap());
    group.tend_damage(at_ms(4000));
    assert!(group.damaged().is_empty(), "{:?}", group.damaged());
    older(&mut group).unwrap()[&key].read(0, &mut data).unwrap();
    assert_eq!(data, [2; 64], "and nothing that came later");
    assert!(
        group.fold.damaged.is_empty() && fold::read_position(&disk).unwrap().damaged.is_empty()
    );
}

/// Restored in either order: what an unknown segment may have changed waits for both.
#[test]
fn what_was_lost_under_a_segment_of_which_nothing_is_known_is_never_shown_too_early() {
    const SEQS: std::ops::Range<u64> = 2..40;
    for first in [0, 1] {
        let disk = Memory::new();
        let mut group = two_with(&disk, Form::Vector, windowed(DAY_MS));
        for seq in SEQS {
            let body = DiskChange { offset: seq * SLOT, ..record(0, seq, hlc(seq), &[]).body };
            send(&mut group, Record { body, ..record(0, seq, hlc(seq), &[]) });
            group.flush();
        }
        // The data of one record, and a header in the next segment, which has no index.
        let flips = [(2, 3), (3, 80)].map(|(nth, before_end)| {
            let (path, len_bytes) = path_of(&group, nth);
            disk.flip(&path, len_bytes - before_end);
            (path, len_bytes - before_end)
        });
        let unknown = group.journal.segments()[3].index;
        group.journal.forget_entries_of(unknown);
        let mut seconds = 0;
        scrub_all(&mut group, &mut seconds);
        group.options = windowed(0);
        while fold(&mut group, at_ms(DAY_MS)) {}
        assert!(group.fold.damaged.is_unknown(unknown));
        let shown = |group: &mut Group<Memory>| {
            let past = group.history().unwrap();
            let views = past.open(&past.newest().unwrap()).unwrap();
            let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
            let is_shown = |seq: &u64| {
                let mut data = [0; SLOT as usize];
                let read = views[&key].read(seq * SLOT, &mut data);
                assert!(
                    read.is_err() || data == [*seq as u8; SLOT as usize],
                    "seq {seq} has {data:?}"
                );
                read.is_ok()
            };
            SEQS.filter(is_shown).count()
        };
        let missing = shown(&mut group);
        for (left, nth) in [(1, first), (0, 1 - first)] {
            let (path, at) = &flips[nth];
            disk.flip(&path.replace("journal/", "quarantine/"), *at);
            seconds += 10;
            assert!(group.check_damaged(at_ms(seconds * 1000)).unwrap());
            group.tend_damage(at_ms((seconds + 2) * 1000));
            assert_eq!(group.damaged().len(), left);
            let is_whole = shown(&mut group) == SEQS.count();
            assert_eq!((is_whole, group.latest_damaged().is_empty()), (left == 0, left == 0));
        }
        assert!(missing < SEQS.count());
    }
}

/// A restored file may still heal what the images have of it. Segments that were whole just go.
#[test]
fn a_damaged_segment_that_was_folded_is_kept_beside_the_journal() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    let (path, len_bytes) = path_of(&group, 2);
    let whole = path_of(&group, 1).0;
    disk.flip(&path, len_bytes - 3);
    let mut seconds = 0;
    scrub_all(&mut group, &mut seconds);
    assert_eq!(group.damaged().len(), 1);
    group.options = windowed(0);
    while fold(&mut group, at_ms(DAY_MS)) {}
    let kept = path.replace("journal/", "quarantine/");
    let is_there = |disk: &Memory, path: &str| disk.open(path).is_ok();
    for disk in [&disk, &disk.crash(&mut || false)] {
        assert!(is_there(disk, &kept) && !is_there(disk, &path), "{path}");
        assert!(
            !is_there(disk, &whole) && !is_there(disk, &whole.replace("journal/", "quarantine/"))
        );
    }
}

#[test]
fn what_a_fold_cannot_write_stays_damaged_in_the_images_at_every_sync_point() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 40);
    index_all(&mut group);
    // The last write to a slot in the window that is folded.
    for nth in [1, 2] {
        let (path, len_bytes) = path_of(&group, nth);
        for back in [3, 200, 400] {
            disk.flip(&path, len_bytes - back);
        }
    }
    drop(group);
    let life = |disk: &Memory| -> Option<()> {
        let mut group = Group::open(disk.clone(), at_ms(0), windowed(5)).ok()??.0;
        while fold(&mut group, at_ms(1000)) {}
        (group.broken().is_none()).then_some(())
    };
    let whole = disk.killed();
    life(&whole).unwrap();
    let ops = whole.ops();
    let (mut refused, mut kept) = (0, 0);
    for at in disk.ops()..=ops {
        let dying = disk.killed();
        dying.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let _ = life(&dying);
        for survives in [false, true] {
            let after = dying.crash(&mut || survives);
            let mut group = reopen(&after);
            group.options = windowed(5);
            let mut seconds = 0;
            scrub_all(&mut group, &mut seconds);
            refused += check(&mut group, 40).refused;
            while fold(&mut group, at_ms(1000)) {}
            group.tend_damage(at_ms(2_000_000));
            check(&mut group, 40);
            // Nobody has given them up.
            for of in group.damaged() {
                let file = of.file.expect("kept");
                assert!(after.open(&file).is_ok(), "{file} is gone");
                kept += u64::from(file.starts_with("quarantine/"));
            }
        }
    }
    assert!(refused > 0 && kept > 0, "{refused} refused, {kept} kept");
    // Restored where it is kept, it heals the images.
    let mut group = reopen(&whole);
    group.options = windowed(5);
    group.tend_damage(at_ms(1000));
    let before = group.damaged().len();
    let aside: Vec<_> = group.damaged().into_iter().filter_map(|of| of.file).collect();
    assert!(before > 1 && aside.iter().all(|file| file.starts_with("quarantine/")), "{aside:?}");
    let restored = &aside[0];
    let len_bytes = whole.open(restored).unwrap().size_bytes().unwrap();
    for back in [3, 200, 400] {
        whole.flip(restored, len_bytes - back);
    }
    assert!(group.check_damaged(at_ms(5000)).unwrap());
    group.tend_damage(at_ms(9000));
    assert_eq!(group.damaged().len(), before - 1);
    check(&mut group, 40);
    // What an operator gives up goes, and what it had stays unreadable.
    let given_up = group.damaged()[0].clone();
    let unknown = group.forget_damaged(999).unwrap_err().to_string();
    assert!(unknown.contains(&given_up.segment.to_string()), "{unknown}");
    group.forget_damaged(given_up.segment).unwrap();
    assert!(whole.open(&given_up.file.unwrap()).is_err());
    group.tend_damage(at_ms(19_000));
    check(&mut group, 40);
    writes_all_slots(&mut group, 40);
    while fold(&mut group, at_ms(20_000)) {}
    group.options = windowed(0);
    while fold(&mut group, at_ms(20_000)) {}
    group.damage.is_due = true;
    group.tend_damage(at_ms(30_000));
    assert!(group.fold.damaged.is_empty() && group.latest_damaged().is_empty());
    assert!(
        !group.damage.quarantine.contains_key(&given_up.segment),
        "nobody looks for it any more"
    );
}

#[test]
fn a_read_that_comes_upon_damage_has_the_segment_looked_at_and_a_recovery_must_be_told_to_accept_it()
 {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    index_all(&mut group);
    let nth = group.journal.segments().len() - 2;
    let (path, len_bytes) = path_of(&group, nth);
    disk.flip(&path, len_bytes - 3);
    let key = |writer| DiskKey { writer: WriterId(writer), disk: DiskId(0) };
    let read = |group: &mut Group<Memory>| {
        let views = [0, 1].map(|writer| group.view(key(writer)).unwrap());
        let mut found = vec![0; SIZE as usize];
        views.map(|view| view.read(0, &mut found).is_err())
    };
    assert_eq!(read(&mut group).iter().filter(|failed| **failed).count(), 1);
    assert_eq!(scrub(&mut group, at_ms(0)), Some(nth as u64 + 1), "at once");
    group.tend_damage(at_ms(1000));
    let latest = group.latest_damaged();
    let [damaged] = &latest[..] else { panic!("{latest:?}") };
    assert_eq!((damaged.len_bytes, damaged.segment), (64, Some(nth as u64 + 1)));
    // The host is told that this part differs: a repair sends it.
    let writer = u16::from(damaged.name.starts_with('b'));
    let message = Message::DigestCheck {
        disk: DiskId(0),
        offset: damaged.offset,
        len_bytes: 64,
        digest: [0; 32],
    };
    group.take_outputs();
    say(&mut group, writer, message);
    let said = told(&group.take_outputs(), link(writer));
    assert!(matches!(said[..], [Message::DigestResult { equal: false, .. }]), "{said:?}");
    let refused = group.recover(at_ms(0), true).unwrap_err().to_string();
    for part in [&damaged.name, "--accept-damage", "64 bytes"] {
        assert!(refused.contains(part), "{part} in {refused}");
    }
    let past = group.history().unwrap();
    let spans = past.spans().unwrap();
    let (before, after) = past.unaffected_near(&spans, past.newest().unwrap().hlc);
    assert_eq!(after, None);
    let point = past.resolve(&At::Hlc(before.unwrap())).unwrap();
    assert!(past.affected(&point).unwrap().is_empty());
    drop(past);
    // A repair: the same range is written.
    let seq = 32;
    let offset = damaged.offset;
    let mut healed = reopen(&disk.killed());
    healed.options = windowed(DAY_MS);
    attach(
        &mut healed,
        at_ms(0),
        &Shape { writers: 2, form: Form::Vector }.writer(
            writer,
            1,
            LastRun::Continues { from: Seq(seq) },
        ),
    );
    send(
        &mut healed,
        Record {
            body: DiskChange { offset, ..record(writer, seq, hlc(90), &[]).body },
            ..record(writer, seq, hlc(90), &[])
        },
    );
    healed.flush();
    let mut seconds = 0;
    scrub_all(&mut healed, &mut seconds);
    assert!(healed.latest_damaged().is_empty() && healed.status(at_ms(0)).recoverable);
    assert!(healed.recover(at_ms(0), true).is_ok());
    assert!(group.recover_accepting(at_ms(0), true, None).is_ok());
    assert_eq!(read(&mut group).iter().filter(|failed| **failed).count(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn whatever_is_flipped_is_told_and_never_shown(
        flips in prop::collection::vec((any::<u16>(), any::<u16>(), 0u8..8), 1..6),
        hlc_form: bool,
        indexed: bool,
        compressed in 0usize..20,
        window_ms in 5u64..40,
        survives: bool,
        restored in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let disk = Memory::new();
        let form = if hlc_form { Form::Hlc } else { Form::Vector };
        let mut group = busy(&disk, form, DAY_MS, 60);
        if indexed {
            index_all(&mut group);
            compress_some(&mut group, compressed);
        }
        let sealed = group.journal.segments().len() - 1;
        let mut flipped = Vec::new();
        for (nth, at, what) in flips {
            let nth = usize::from(nth) % sealed;
            let file = match what {
                0 => index_path_of(&group, nth),
                _ => path_of(&group, nth).0,
            };
            let Ok(found) = disk.open(&file) else { continue };
            // Behind header and checkpoint, which opening reads and without which there is no group.
            let is_cold = group.journal.segments()[nth].file.cold().is_some();
            let len_bytes = found.size_bytes().unwrap();
            let from = if what == 0 || is_cold { 0 } else { 250 };
            let at = from + u64::from(at) % (len_bytes - from);
            disk.flip(&file, at);
            if what != 0 {
                flipped.push((file, at));
            }
        }
        let mut seconds = 0;
        scrub_all(&mut group, &mut seconds);
        check(&mut group, 60);
        group.options = windowed(window_ms);
        while fold(&mut group, at_ms(1000)) {}
        prop_assert!(group.broken().is_none());
        check(&mut group, 60);
        drop(group);
        let opened = Group::open(disk.crash(&mut || survives), at_ms(0), windowed(window_ms));
        match opened {
            Ok(opened) => {
                let mut group = opened.unwrap().0;
                scrub_all(&mut group, &mut seconds);
                check(&mut group, 60);
                while fold(&mut group, at_ms(1000)) {}
                check(&mut group, 60);
                // Files are restored from a copy, in any order, and not all of them.
                let disk = group.storage.clone();
                for index in restored {
                    if flipped.is_empty() {
                        break;
                    }
                    let (file, at) = flipped.swap_remove(index.index(flipped.len()));
                    for path in [&file, &file.replace("journal/", "quarantine/")] {
                        if disk.open(path).is_ok() {
                            disk.flip(path, at);
                        }
                    }
                    seconds += 10;
                    prop_assert!(group.check_damaged(at_ms(seconds * 1000)).unwrap());
                    scrub_all(&mut group, &mut seconds);
                    check(&mut group, 60);
                }
            }
            // A header in what opening has to read.
            Err(error) => prop_assert_eq!(error.refusal_kind(), RefusalKind::Damaged),
        }
    }
}

/// A disk that does not read for a while costs nothing; one that goes on so is damaged, and the group goes on.
#[test]
fn what_a_fold_cannot_read_is_tried_again_before_it_counts_as_damaged() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, DAY_MS, 60);
    index_all(&mut group);
    let whole = check(&mut group, 60);
    group.options = windowed(20);
    let unreadable = Faults { read_fails: true, ..Faults::default() };
    let before = group.fold_position();
    let mut seconds = 100;
    disk.set_faults(unreadable);
    for _ in 0..20 {
        seconds += 1;
        assert!(fold(&mut group, at_ms(seconds * 1000)));
        assert!(group.fold_job(at_ms(seconds * 1000 + 999)).is_none(), "not at once again");
        assert!(group.fold_is_paced(at_ms(seconds * 1000 + 999)), "and it is asked again");
        assert_eq!(group.fold_position(), before);
        assert!(group.broken().is_none() && group.damaged().is_empty());
    }
    // Now it would count; but it is read again.
    disk.set_faults(Faults::default());
    let job = group.fold_job(at_ms(seconds * 1000 + 1000)).unwrap();
    assert!(job.gives_up);
    let cut = job.cut.clone();
    group.fold_done(cut, job.run());
    assert!(!fold(&mut group, at_ms(seconds * 1000 + 1000)), "all of it was folded");
    assert!(group.fold_position() > before && group.damaged().is_empty());
    let seen = check(&mut group, 60);
    assert_eq!((seen.refused, seen.untold), (0, 0));
    assert!(seen.before > 0 && whole.before == 0, "it was folded");
}

/// The same of what is read only to verify it: it goes on record, and off it by itself.
#[test]
fn what_a_scrub_cannot_read_is_looked_at_again() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, DAY_MS, 60);
    index_all(&mut group);
    let whole = check(&mut group, 60);
    let unreadable = Faults { read_fails: true, ..Faults::default() };
    let mut seconds = 100;
    disk.set_faults(unreadable);
    scrub_all(&mut group, &mut seconds);
    assert!(!group.damaged().is_empty() && group.recover(at_ms(seconds * 1000), true).is_err());
    disk.set_faults(Faults::default());
    assert!(group.is_scrubbing(), "it is asked again");
    for _ in 0..2 * LOOK_FIRST_MS / 1000 {
        seconds += 1;
        scrub_all(&mut group, &mut seconds);
    }
    assert!(group.damaged().is_empty() && !group.is_scrubbing());
    let seen = check(&mut group, 60);
    assert_eq!((seen.refused, seen.untold), (whole.refused, whole.untold));
    group.recover(at_ms(seconds * 1000), true).expect("all of it can be read");
}

#[test]
fn a_rotten_image_is_found_told_and_mended() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, 0, 60);
    while fold(&mut group, at_ms(0)) {}
    let mut seconds = 0;
    scrub_all(&mut group, &mut seconds);
    let began = group.status(at_ms(0)).scrub;
    assert!(began.verified_bytes > 0 && !began.images_running && group.latest_damaged().is_empty());
    disk.flip("images/a.root.img", 70);
    // Nobody has read it: a week goes by. Then whoever reads it is not given it.
    let week = at_ms(7 * DAY_MS);
    let mut found = [0; 8];
    let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
    let error = group.view(key).unwrap().read(64, &mut found).unwrap_err();
    assert!(is_damage(&error), "{error}");
    let mut group = reopen(&disk.killed());
    seconds = 0;
    scrub_all(&mut group, &mut seconds);
    group.tend_damage(week);
    let told = group.latest_damaged();
    assert!(told.iter().all(|of| of.segment.is_none() && of.name == "a.root"), "{told:?}");
    // The journal has the rest of the sector.
    let bytes: u64 = told.iter().map(|of| of.len_bytes).sum();
    assert!((64..=512).contains(&bytes), "{told:?}");
    let notices = group.take_notices();
    assert!(notices.iter().any(|n| n.contains("image of disk a.root is damaged")), "{notices:?}");
    let refused = group.recover(at_ms(10_000_000), true).unwrap_err().to_string();
    assert!(refused.contains("(disk image)") && refused.contains("a.root: "), "{refused}");
    // As it was again, for example because the disk reads it again.
    disk.flip("images/a.root.img", 70);
    let mut group = reopen(&disk.killed());
    seconds = 0;
    scrub_all(&mut group, &mut seconds);
    group.tend_damage(week);
    assert!(group.latest_damaged().is_empty());
    assert!(group.recover(at_ms(10_000_000), true).is_ok());
}
