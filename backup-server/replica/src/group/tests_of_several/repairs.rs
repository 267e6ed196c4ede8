//! Journals that cannot be opened, and are cut on command.

use super::damage::{DAY_MS, check_newest, path_of};
use super::indexes::index_all;
use super::past::{busy, windowed};
use super::*;
use crate::group::JOURNAL_DIR;
use tidelock_store::journal::{Repair, RepairError, plan_repair, repair};

fn plan_of(disk: &Memory) -> Result<Option<Repair>, RepairError> {
    let folded = fold::read_position(disk).unwrap();
    plan_repair(disk, JOURNAL_DIR, &folded.in_images(), options().journal)
}

fn is_open(disk: &Memory) -> bool {
    Group::open(disk.clone(), at_ms(0), windowed(DAY_MS)).is_ok()
}

#[test]
fn a_journal_that_cannot_be_opened_is_cut_before_the_damage_whatever_interrupts_it() {
    let [disk, unindexed] = [Memory::new(), Memory::new()];
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    index_all(&mut group);
    let last = group.journal.segments().len() - 1;
    let (path, len_bytes) = path_of(&group, last);
    let (before, before_bytes) = path_of(&group, last - 1);
    let journaled = group.journal.state().journaled();
    drop(group);
    let mut places: Vec<_> = (0..len_bytes).map(|at| (&disk, path.clone(), at)).collect();
    places.push((&disk, before, before_bytes - 80));
    // Without an index an opening reads every segment: several files go.
    let group = busy(&unindexed, Form::Vector, DAY_MS, 60);
    let (early, early_bytes) = path_of(&group, last - 3);
    drop(group);
    places.push((&unindexed, early, early_bytes - 80));
    let mut repaired = 0;
    for (disk, path, at) in places {
        let damaged = disk.crash(&mut || false);
        let path = &path;
        damaged.flip(path, at);
        let found = plan_of(&damaged).unwrap();
        assert_eq!(found.is_none(), is_open(&damaged), "{path} at {at}");
        let Some(plan) = found else { continue };
        repaired += 1;
        let quarantined = |of: &Memory| of.list("quarantine").unwrap().len();
        for (nth, (kept, lost)) in plan.writers.iter().enumerate() {
            let newest = journaled.get(WriterId(nth as u16));
            assert!(*kept <= newest && lost.is_none_or(|lost| lost <= newest), "{plan:?}");
        }
        let broken = damaged.killed();
        repair(&damaged, JOURNAL_DIR, "quarantine", &plan).unwrap();
        let ops = damaged.ops();
        assert_eq!(quarantined(&damaged), plan.files.len());
        let (ends, _) = Group::open(damaged.clone(), at_ms(0), windowed(DAY_MS)).unwrap().unwrap();
        let kept: Vec<Seq> = ends.journal.state().writers.iter().map(|of| of.seq).collect();
        assert_eq!(kept, plan.writers.iter().map(|of| of.0).collect::<Vec<_>>());
        drop(ends);
        check_newest(&mut reopen(&damaged));
        if repaired % 16 != 1 && plan.files.len() == 1 {
            continue;
        }
        for op in broken.ops()..ops {
            let dying = broken.killed();
            dying.set_faults(Faults { power_off_at: Some(op), ..Faults::default() });
            let _ = repair(&dying, JOURNAL_DIR, "quarantine", &plan);
            for survives in [0, !0, 0x5555_5555, 0xaaaa_aaaa, 0x3333_3333, 0xcccc_cccc_u32] {
                let mut survivors = survives;
                let after = dying.crash(&mut || {
                    survivors = survivors.rotate_left(1);
                    survivors & 1 == 1
                });
                if let Some(plan) = plan_of(&after).unwrap() {
                    repair(&after, JOURNAL_DIR, "quarantine", &plan).unwrap();
                }
                check_newest(&mut reopen(&after));
            }
        }
    }
    assert!(repaired > 100, "{repaired}");
}

#[test]
fn neither_what_the_images_have_nor_a_recovery_is_cut() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    index_all(&mut group);
    let (first, _) = path_of(&group, 0);
    let (path, _) = path_of(&group, group.journal.segments().len() - 1);
    group.recover(at_ms(1_000_000), true).unwrap();
    drop(group);
    let damaged = disk.crash(&mut || false);
    damaged.flip(&first, 20);
    assert!(matches!(plan_of(&damaged), Err(RepairError::Folded { .. })));
    let damaged = disk.crash(&mut || false);
    damaged.flip(&path, 64 + 48 + 3);
    assert!(matches!(plan_of(&damaged), Err(RepairError::Recovered { epoch: 2, .. })));
}

/// A fold that was begun may have brought any record up to its end into the images.
#[test]
fn what_a_fold_under_way_may_have_brought_into_the_images_is_not_cut() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, 20, 60);
    group.fold_job(at_ms(1000)).unwrap().run().unwrap();
    let places: Vec<_> =
        (0..group.journal.segments().len()).map(|nth| path_of(&group, nth)).collect();
    drop(group);
    let folded = fold::read_position(&disk).unwrap();
    let begun = folded.in_images().begun;
    assert!(begun > folded.position);
    let (mut kept, mut refused) = (0, 0);
    for (path, at) in
        places.iter().flat_map(|(path, len)| (0..*len).step_by(37).map(move |at| (path, at)))
    {
        let damaged = disk.crash(&mut || false);
        damaged.flip(path, at);
        match plan_of(&damaged) {
            Ok(None) => {}
            Ok(Some(plan)) => {
                assert!(plan.end >= begun, "{path} at {at}: {plan:?}");
                repair(&damaged, JOURNAL_DIR, "quarantine", &plan).unwrap();
                check_newest(&mut reopen(&damaged));
                kept += 1;
            }
            Err(RepairError::Folded { .. }) => refused += 1,
            Err(error) => panic!("{path} at {at}: {error}"),
        }
    }
    assert!(kept > 5 && refused > 5, "{kept} {refused}");
}

/// Later batches may be all that says that an earlier one was durable.
#[test]
fn of_a_journal_that_is_damaged_twice_as_much_is_kept_as_was_planned() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Vector, DAY_MS, 60);
    index_all(&mut group);
    let last = group.journal.segments().len() - 1;
    let ((path, _), (before, before_bytes)) = (path_of(&group, last), path_of(&group, last - 1));
    drop(group);
    let mut shorter = 0;
    for at in 0..before_bytes {
        let damaged = disk.crash(&mut || false);
        damaged.flip(&path, 20);
        damaged.flip(&before, at);
        let plan = plan_of(&damaged).unwrap().expect("it cannot be opened");
        repair(&damaged, JOURNAL_DIR, "quarantine", &plan).unwrap();
        let (kept, _) = Group::open(damaged.clone(), at_ms(0), windowed(DAY_MS)).unwrap().unwrap();
        let kept: Vec<Seq> = kept.journal.state().writers.iter().map(|of| of.seq).collect();
        assert_eq!(kept, plan.writers.iter().map(|of| of.0).collect::<Vec<_>>(), "{at}: {plan:?}");
        shorter += u64::from(plan.files.len() > 1);
    }
    assert!(shorter > 100, "{shorter}");
}

/// The header of a batch that is cut may be all that says so, too.
#[test]
fn of_a_segment_that_is_damaged_three_times_as_much_is_kept_as_was_planned() {
    let disk = Memory::new();
    let group = busy(&disk, Form::Vector, DAY_MS, 60);
    let (path, len_bytes) = path_of(&group, group.journal.segments().len() - 1);
    drop(group);
    let (mut planned, mut number) = (0, 1_u64);
    for _ in 0..2000 {
        let damaged = disk.crash(&mut || false);
        for _ in 0..3 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            damaged.flip(&path, (number >> 33) % len_bytes);
        }
        let Ok(Some(plan)) = plan_of(&damaged) else { continue };
        repair(&damaged, JOURNAL_DIR, "quarantine", &plan).unwrap();
        let (kept, _) = Group::open(damaged.clone(), at_ms(0), windowed(DAY_MS)).unwrap().unwrap();
        let kept: Vec<Seq> = kept.journal.state().writers.iter().map(|of| of.seq).collect();
        assert_eq!(kept, plan.writers.iter().map(|of| of.0).collect::<Vec<_>>(), "{plan:?}");
        planned += 1;
    }
    assert!(planned > 500, "{planned}");
}
