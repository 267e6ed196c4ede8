//! Crash tests: the power goes off before every operation, and of what was not synced every part
//! survives by itself. What was acknowledged must be found, and nothing that does not continue it.

use super::state::tests::record;
use super::*;
use bytes::Bytes;
use proptest::prelude::*;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::message::CopyState;
use tidelock_protocol::record::{DiskChange, Effect, Payload};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::memory::{Faults, Memory};

pub(super) const OPTIONS: Options = Options { segment_bytes: 800 };
/// Up to this many independent choices every subset is tried.
const EXHAUSTIVE_CHOICES: usize = 9;
const SAMPLES: u32 = 60;

pub(super) fn write_record(seq: u64, len: usize) -> Record {
    let data: Bytes = (0..len).map(|i| (seq as usize * 31 + i) as u8).collect::<Vec<_>>().into();
    record(seq, 1, Effect::Write(Payload::new(data)))
}

fn create(disk: &Memory) -> Result<Journal<Memory>, JournalError> {
    Journal::create(disk.clone(), "journal", State::new(1), OPTIONS)
}

fn open(disk: &Memory) -> Result<Opened<Memory>, JournalError> {
    open_at(disk, Position::default())
}

pub(super) fn open_at(disk: &Memory, floor: Position) -> Result<Opened<Memory>, JournalError> {
    Journal::open(disk.clone(), "journal", floor, OPTIONS)
}

/// Everything in the journal, in order.
fn contents(journal: &Journal<Memory>) -> Vec<Record> {
    let mut records = Vec::new();
    for batch in journal.reader::<DiskChange>(journal.start(), journal.end()) {
        for entry in batch.unwrap().entries {
            if let Entry::Record { head, payload, .. } = entry.unwrap() {
                records.push(head.finish(payload).unwrap());
            }
        }
    }
    records
}

/// One step of a run.
#[derive(Clone, Debug)]
enum Step {
    Stage(usize),
    Write,
    Sync,
}

/// Runs the steps until something fails. Returns the last seq acknowledged.
fn run(disk: &Memory, steps: &[Step], first: u64) -> u64 {
    let journal = if first == 1 { create(disk) } else { open(disk).map(|o| o.journal) };
    let Ok(mut journal) = journal else { return first - 1 };
    let (mut next, mut written, mut acked) = (first, first - 1, first - 1);
    for step in steps {
        let result = match step {
            Step::Stage(len) => {
                journal.stage_record(write_record(next, *len)).unwrap();
                next += 1;
                Ok(())
            }
            Step::Write => journal.write(|_| {}).map(|()| written = next - 1),
            Step::Sync => journal.sync().map(|()| acked = written),
        };
        if result.is_err() {
            break;
        }
    }
    acked
}

/// Opens what a crash left, and checks it against what was acknowledged.
fn check(disk: &Memory, acked: u64) -> u64 {
    let opened = match open(disk) {
        Ok(opened) => opened,
        // The group was never there: it exists from when its manifest is durable.
        Err(JournalError::Missing { .. } | JournalError::Corrupt { offset: 0 | 64, .. })
            if acked == 0 =>
        {
            return 0;
        }
        Err(e) => panic!("acknowledged {acked}: {e}"),
    };
    let found = contents(&opened.journal);
    assert!(found.len() as u64 >= acked, "{} of {acked} acknowledged", found.len());
    for (n, record) in found.iter().enumerate() {
        let len = record.payload().unwrap().data().len();
        assert_eq!(*record, write_record(n as u64 + 1, len));
    }
    assert_eq!(opened.journal.state().writers[0].seq, Seq(found.len() as u64));
    // What was found is durable now: it is there after any other crash.
    let again = open(&disk.crash(&mut || false)).expect("settled");
    assert_eq!(contents(&again.journal), found);
    found.len() as u64
}

/// Tries what can survive of a crash: everything if it is little, else a sample.
pub(super) fn for_each_crash(disk: &Memory, seed: u64, mut f: impl FnMut(Memory)) {
    let choices = disk.crash_choices();
    if choices <= EXHAUSTIVE_CHOICES {
        for subset in 0u32..1 << choices {
            let mut bits = subset;
            f(disk.crash(&mut || {
                bits = bits.rotate_right(1);
                bits >> 31 == 1
            }));
        }
        return;
    }
    let mut state = seed | 1;
    for sample in 0..SAMPLES {
        // Mostly all, mostly nothing, and half.
        let threshold = [u64::MAX / 8, u64::MAX / 2, u64::MAX / 8 * 7][sample as usize % 3];
        f(disk.crash(&mut || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state < threshold
        }));
    }
}

fn script() -> Vec<Step> {
    use Step::{Stage, Sync, Write};
    vec![
        Stage(300),
        Write,
        Sync,
        Stage(10),
        Stage(700),
        Write,
        Stage(40),
        Write,
        Sync,
        Stage(600),
        Write,
        Sync,
        // Several batches that no sync has covered.
        Stage(200),
        Write,
        Stage(20),
        Write,
        Stage(5),
        Write,
        Sync,
        Stage(900),
        Write,
        Sync,
    ]
}

#[test]
fn power_loss_at_every_operation_loses_nothing_acknowledged() {
    let dry = Memory::new();
    let all = run(&dry, &script(), 1);
    assert_eq!(all, 9);
    assert!(open(&dry).unwrap().journal.segments().len() > 1, "the script must roll");
    for at in 0..=dry.ops() {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let acked = run(&disk, &script(), 1);
        for_each_crash(&disk, at, |after| {
            check(&after, acked);
        });
    }
}

#[test]
fn power_loss_while_opening_and_going_on_after_a_power_loss() {
    let dry = Memory::new();
    run(&dry, &script(), 1);
    for at in (8..=dry.ops()).step_by(3) {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let acked = run(&disk, &script(), 1);
        let mut bits = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = disk.crash(&mut || {
            bits = bits.rotate_left(7).wrapping_mul(0x2545_f491_4f6c_dd1d);
            bits >> 63 == 1
        });
        let found = match open(&first.killed()) {
            Ok(opened) => opened.journal.state().writers[0].seq.0,
            Err(_) => continue,
        };
        assert!(found >= acked);
        for second_at in first.ops()..first.ops() + 16 {
            let again = first.killed();
            again.set_faults(Faults { power_off_at: Some(second_at), ..Faults::default() });
            let acked = run(&again, &script(), found + 1).max(acked);
            for_each_crash(&again, second_at, |after| {
                check(&after, acked);
            });
        }
    }
}

fn filled() -> (Memory, u64) {
    let disk = Memory::new();
    let acked = run(&disk, &script(), 1);
    (disk, acked)
}

#[test]
fn any_damage_but_to_the_very_last_batch_is_known_and_of_data_all_else_is_there() {
    let (disk, _) = filled();
    let journal = open(&disk.killed()).unwrap().journal;
    let (mut of_data, mut of_headers) = (0, 0);
    let last_batch = journal
        .reader::<DiskChange>(journal.start(), journal.end())
        .map(|b| b.unwrap().start)
        .last()
        .unwrap();
    for segment in journal.segments() {
        let name = SegmentHeader::file_name(segment.index, segment.id);
        for at in (0..segment.len_bytes).step_by(7) {
            let damaged = disk.killed();
            damaged.flip(&format!("journal/{name}"), at);
            let here = Position { segment: segment.index, offset: at };
            match open(&damaged) {
                Err(JournalError::Corrupt { file, offset, .. }) => {
                    assert_eq!(file, name);
                    assert!(offset <= at, "the damage at {at} was noticed at {offset}");
                    assert!(here < last_batch, "{here:?}");
                    of_headers += 1;
                }
                Ok(opened) if here < last_batch => {
                    assert_eq!(opened.damaged.into_iter().collect::<Vec<_>>(), [segment.index]);
                    assert_eq!(opened.journal.state(), journal.state());
                    let job = opened.journal.scrub_job_of(segment.index).unwrap();
                    let damage = job.run().damage.unwrap();
                    let [of] = damage.extents[..] else { panic!("{damage:?}") };
                    assert!((of.at..of.at + u64::from(of.len_bytes)).contains(&at), "{at}: {of:?}");
                    of_data += 1;
                }
                // No batch knows the last one as durable: it may have been torn.
                Ok(opened) => {
                    assert!(here >= last_batch, "{here:?} passed");
                    assert_eq!(opened.torn.map(|t| t.offset), Some(last_batch.offset));
                }
                Err(e) => panic!("{e}"),
            }
        }
    }
    assert!(of_data > 20 && of_headers > 20, "{of_data} of data, {of_headers} of headers");
    let floor = journal.end();
    let damaged = disk.killed();
    let last = journal.segments().last().unwrap();
    let name = format!("journal/{}", SegmentHeader::file_name(last.index, last.id));
    damaged.flip(&name, last.len_bytes - 1);
    let opened = Journal::open(damaged, "journal", floor, OPTIONS).unwrap();
    let known: Vec<u64> = opened.damaged.into_iter().collect();
    assert_eq!((known, opened.torn), (vec![last.index], None), "what was folded was durable");
}

#[test]
fn a_torn_tail_that_alone_shows_what_was_durable_is_kept_until_something_else_does() {
    let (disk, acked) = filled();
    let journal = open(&disk.killed()).unwrap().journal;
    let last = journal.segments().last().unwrap();
    let name = format!("journal/{}", SegmentHeader::file_name(last.index, last.id));
    let batches = journal.reader::<DiskChange>(journal.start(), journal.end());
    let starts: Vec<_> = batches.map(|batch| batch.unwrap().start).collect();
    let [.., durable, torn] = starts[..] else { panic!("{starts:?}") };
    assert_eq!(durable.segment, torn.segment, "the damaged one is in the segment that may be torn");
    // The ends of their payloads.
    disk.flip(&name, torn.offset - 1);
    disk.flip(&name, last.len_bytes - 1);

    let first = open(&disk).unwrap();
    let state = first.journal.state().clone();
    assert!(state.writers[0].seq >= Seq(acked - 1));
    let tail = first.torn.expect("the last batch");
    assert_eq!(tail.offset, torn.offset);
    drop(first.journal);

    let disk = disk.killed();
    let again = open(&disk).unwrap();
    assert_eq!((again.journal.state(), again.torn.as_ref()), (&state, Some(&tail)));
    assert_eq!(again.damaged, first.damaged);
    let mut journal = again.journal;
    journal.stage_record(write_record(state.writers[0].seq.0 + 1, 100)).unwrap();
    journal.write(|_| {}).unwrap();
    journal.sync().unwrap();
    drop(journal);

    let gone_on = open(&disk.killed()).unwrap();
    assert_eq!((gone_on.torn, gone_on.damaged), (None, first.damaged));
    assert_eq!(gone_on.journal.state().writers[0].seq, state.writers[0].seq.next());
}

#[test]
fn a_missing_segment_is_named() {
    let (disk, _) = filled();
    let segments = open(&disk.killed()).unwrap().journal.segments().to_vec();
    assert!(segments.len() >= 3);
    for (nth, segment) in segments.iter().enumerate() {
        let damaged = disk.killed();
        let name = SegmentHeader::file_name(segment.index, segment.id);
        damaged.remove(&format!("journal/{name}")).unwrap();
        let floor = Position { segment: 1, offset: 64 };
        let result = Journal::open(damaged, "journal", floor, OPTIONS);
        if nth + 1 == segments.len() {
            // That a last segment ever was is known to the host and to the fold's floor only.
            assert!(result.is_ok());
        } else {
            let Err(JournalError::Missing { index }) = result else { panic!("{result:?}") };
            assert_eq!(index, segment.index);
        }
    }
}

#[test]
fn a_failed_sync_poisons_and_is_never_believed() {
    let disk = Memory::new();
    let mut journal = create(&disk).unwrap();
    journal.stage_record(write_record(1, 100)).unwrap();
    journal.write(|_| {}).unwrap();
    disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    assert!(matches!(journal.sync(), Err(JournalError::Io { .. })));
    disk.set_faults(Faults::default());
    assert!(matches!(journal.sync(), Err(JournalError::Poisoned)), "the disk works again");
    assert!(matches!(journal.write(|_| {}), Err(JournalError::Poisoned)));
    assert!(journal.durable_end() < journal.end());
    // The page cache shows the record. Opening must make it durable before it counts.
    let killed = disk.killed();
    let opened = open(&killed).unwrap();
    assert_eq!(contents(&opened.journal).len(), 1);
    let after = open(&killed.crash(&mut || false)).unwrap();
    assert_eq!(contents(&after.journal).len(), 1, "found, so durable");
}

#[test]
fn a_full_disk_keeps_what_is_staged_until_there_is_room() {
    for room in (0..1200).step_by(17) {
        let disk = Memory::new();
        let mut journal = create(&disk).unwrap();
        let used = journal.bytes();
        for (seq, len) in [(1, 300), (2, 800), (3, 500), (4, 900)] {
            journal.stage_record(write_record(seq, len)).unwrap();
            disk.set_faults(Faults {
                capacity_bytes: Some(used + room * seq),
                ..Faults::default()
            });
            match journal.write(|_| {}).and_then(|()| journal.sync()) {
                Ok(()) => {}
                Err(JournalError::Full(_)) => {
                    // A crash now finds what was acknowledged.
                    check(&disk.crash(&mut || true), seq - 1);
                    disk.set_faults(Faults::default());
                    journal.write(|_| {}).unwrap();
                    journal.sync().unwrap();
                }
                Err(e) => panic!("{e}"),
            }
        }
        assert_eq!(check(&disk, 4), 4);
    }
}

#[test]
fn old_segments_go_and_the_rest_opens_without_them() {
    let (disk, acked) = filled();
    let mut journal = open(&disk).unwrap().journal;
    let floor = journal.end();
    journal.remove_before(floor).unwrap();
    assert_eq!(journal.segments().len(), 1);
    let opened = Journal::open(disk.clone(), "journal", floor, OPTIONS).unwrap();
    assert_eq!(opened.journal.state().writers[0].seq, Seq(acked));
    let mut journal = opened.journal;
    journal.stage_record(write_record(acked + 1, 10)).unwrap();
    journal.write(|_| {}).unwrap();
    journal.sync().unwrap();
    let read: Vec<_> =
        journal.reader::<DiskChange>(floor, journal.end()).map(|b| b.unwrap().start).collect();
    assert_eq!(read.len(), 2, "a checkpoint and a record");
    // Removal is not ordered: whichever of the names survive, the floor says what is needed.
    let whole = filled().0;
    let mut journal = open(&whole).unwrap().journal;
    let floor = journal.end();
    whole.set_faults(Faults { power_off_at: Some(whole.ops() + 2), ..Faults::default() });
    assert!(journal.remove_before(floor).is_err());
    for_each_crash(&whole, 5, |after| {
        let opened = Journal::open(after, "journal", floor, OPTIONS).unwrap();
        assert_eq!(opened.journal.state().writers[0].seq, Seq(acked));
    });
}

#[test]
fn notes_are_replayed_and_a_clean_end_is_known() {
    let disk = Memory::new();
    let mut journal = create(&disk).unwrap();
    journal.stage_record(record(1, 1, Effect::CopyDone)).unwrap();
    journal.stage_note(&Note::Copy { writer: WriterId(0), copy: CopyState::Resyncing }).unwrap();
    journal.stage_record(write_record(2, 9)).unwrap();
    journal
        .stage_note(&Note::EpochStart(EpochStart {
            epoch: Epoch(2),
            cut: CountVector::of(WriterId(0), Seq(1)),
            journaled: CountVector::new(),
            resyncing: Vec::new(),
            at_unix_ms: 7,
            primary_declared_dead: false,
            exposed: Vec::new(),
        }))
        .unwrap();
    journal.write(|_| {}).unwrap();
    journal.sync().unwrap();
    let state = journal.state().clone();
    let opened = open(&disk).unwrap();
    assert_eq!(*opened.journal.state(), state);
    assert!(!opened.clean && opened.torn.is_none());
    let mut journal = opened.journal;
    journal.stage_note(&Note::CleanEnd).unwrap();
    journal.write(|_| {}).unwrap();
    journal.sync().unwrap();
    assert!(open(&disk).unwrap().clean);
}

#[test]
fn files_behave_like_the_memory() {
    let dir = tempfile::tempdir().unwrap();
    let files = tidelock_storage::files::Files::new(dir.path().to_owned());
    let mut journal = Journal::create(files.clone(), "journal", State::new(1), OPTIONS).unwrap();
    for seq in 1..=20 {
        journal.stage_record(write_record(seq, 400)).unwrap();
        journal.write(|_| {}).unwrap();
    }
    journal.sync().unwrap();
    drop(journal);
    let opened = Journal::open(files, "journal", Position::default(), OPTIONS).unwrap();
    assert_eq!(opened.journal.state().writers[0].seq, Seq(20));
    let batches = opened.journal.reader::<DiskChange>(opened.journal.start(), opened.journal.end());
    assert!(batches.map(|b| b.unwrap().start).max() > Some(opened.journal.start()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any steps, any power loss, any survivors: a prefix is found that holds what was
    /// acknowledged.
    #[test]
    fn any_crash_leaves_a_prefix_with_everything_acknowledged(
        steps in prop::collection::vec(
            prop_oneof![
                3 => (1usize..900).prop_map(Step::Stage),
                2 => Just(Step::Write),
                1 => Just(Step::Sync),
            ],
            1..40,
        ),
        at in 0u64..60,
        seed: u64,
    ) {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let acked = run(&disk, &steps, 1);
        for_each_crash(&disk, seed, |after| { check(&after, acked); });
    }

    #[test]
    fn hostile_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..600),
                                 keep in 0usize..400) {
        let (disk, _) = filled();
        let journal = open(&disk).unwrap().journal;
        let mut valid = vec![0; journal.segments()[0].len_bytes as usize];
        journal.segments()[0].file.read_at(&mut valid, 0).unwrap();
        valid.truncate(keep);
        valid.append(&mut bytes);
        let _ = open(&disk_of_bytes(&valid).unwrap());
    }
}
