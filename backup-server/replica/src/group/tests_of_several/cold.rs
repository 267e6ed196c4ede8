//! Groups whose journals are compressed: they are the same groups, and only size and files differ.

use super::indexes::index_all;
use super::past::{busy, check_all, fold, windowed};
use super::*;
use tidelock_store::journal::{Compress, parse_cold_file_name};

const DAY_MS: u64 = 24 * 3600 * 1000;
const HOW: Compress = Compress { after_ms: 1000, block_bytes: 512, percent_max: u64::MAX };

/// Compresses so many segments, the oldest first. Returns which.
pub(super) fn compress_some(group: &mut Group<Memory>, count: usize) -> Vec<u64> {
    let before = group.options.compress.replace(HOW);
    let mut now = at_ms(3_600_000 + 60_000 * group.compressed_status().segments);
    let mut done = Vec::new();
    for _ in 0..count {
        now.mono.0 += 1_000_000_000;
        let Some(job) = group.compress_job(now) else { break };
        assert!(group.fold_job(now).is_none() && group.index_job().is_none(), "one at a time");
        let (segment, len_bytes) = (job.segment(), job.len_bytes());
        group.compress_done(now, segment, len_bytes, job.run());
        done.push(segment);
    }
    group.options.compress = before;
    done
}

fn cold_files(disk: &Memory) -> Vec<u64> {
    let names = disk.list("journal").unwrap();
    let mut cold: Vec<u64> =
        names.iter().filter_map(|name| Some(parse_cold_file_name(name)?.0)).collect();
    cold.sort_unstable();
    cold
}

#[test]
fn a_group_that_is_compressed_is_the_same_group() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = busy(&disk, form, DAY_MS, 100);
        assert_eq!(compress_some(&mut group, 100), Vec::<u64>::new(), "nothing has an index");
        index_all(&mut group);
        let sealed = group.journal.segments().len() as u64 - 1;
        let expected = check_all(&mut group, 100);
        let (bytes, unfolded) = (group.journal.bytes(), group.unfolded_bytes());
        assert_eq!(compress_some(&mut group, 3), [1, 2, 3]);
        assert_eq!(check_all(&mut group, 100), expected);
        assert_eq!(compress_some(&mut group, 100), (4..=sealed).collect::<Vec<_>>());
        assert_eq!(check_all(&mut group, 100), expected);
        let status = group.status(at_ms(0));
        assert_eq!((status.compressed.segments, status.journal_bytes), (sealed, bytes));
        assert_eq!(group.unfolded_bytes(), unfolded, "as much is to be folded as before");
        let saved = status.compressed.bytes - status.compressed.stored_bytes;
        assert_eq!(status.journal_stored_bytes, bytes - saved);
        assert!(saved > bytes / 10, "{saved} of {bytes}");
        let (state, cut) = (group.state().clone(), group.cut().clone());
        drop(group);
        let disk = disk.crash(&mut || false);
        assert_eq!(cold_files(&disk), (1..=sealed).collect::<Vec<_>>());
        let mut group = reopen(&disk);
        group.options = windowed(DAY_MS);
        assert_eq!((group.state(), group.cut()), (&state, &cut));
        assert_eq!(check_all(&mut group, 100), expected);
        // Folded, they are in the images as all else is.
        group.options = windowed(30);
        while fold(&mut group, at_ms(1000)) {}
        let (shown, before) = check_all(&mut group, 100);
        assert!(shown >= 30 && before > 10, "{shown} shown, {before} before the window");
        assert!(cold_files(&disk).len() < sealed as usize, "they go with what they have");
        group.options = windowed(0);
        while fold(&mut group, at_ms(1000)) {}
        drop(group);
        reopen(&disk);
        assert_eq!(cold_files(&disk).len(), 0);
    }
}

#[test]
fn only_what_is_old_and_stays_is_compressed_and_not_all_at_once() {
    let mut group = busy(&Memory::new(), Form::Hlc, DAY_MS, 100);
    index_all(&mut group);
    assert!(
        group.compress_job(at_ms(3_600_000)).is_none() && group.is_compressing(at_ms(0)).is_none(),
        "it is off"
    );
    group.options.compress = Some(HOW);
    assert_eq!(group.is_compressing(at_ms(0)), Some(0));
    assert!(group.compress_job(at_ms(1000)).is_none(), "the newest record has not the age");
    let now = at_ms(1090);
    let job = group.compress_job(now).unwrap();
    assert!(group.compress_job(now).is_none() && group.scrub_job(at_ms(9000)).is_none());
    let (segment, len_bytes) = (job.segment(), job.len_bytes());
    assert_eq!(segment, 1);
    group.compress_done(now, segment, len_bytes, job.run());
    assert!(group.compress_job(now).is_none(), "it has a rate");
    // What the next fold takes away is passed over.
    group.options.retention.window_ms = 40;
    let job = group.compress_job(at_ms(3_600_000)).unwrap();
    assert!(job.segment() > 3, "{}", job.segment());
    let segment = job.segment();
    group.compress_done(
        at_ms(3_600_000),
        segment,
        1,
        Err(JournalError::Full(io::ErrorKind::StorageFull.into())),
    );
    assert!(group.compress_job(at_ms(3_600_001)).is_none());
    let told = group.take_notices();
    assert!(told.iter().any(|told| told.contains("cannot be compressed")), "{told:?}");
    assert_eq!(group.compress_job(at_ms(3_700_000)).unwrap().segment(), segment, "tried again");
}

#[test]
fn the_size_that_counts_is_that_on_disk() {
    let mut group = busy(&Memory::new(), Form::Hlc, DAY_MS, 100);
    index_all(&mut group);
    compress_some(&mut group, 100);
    let (unfolded, stored) = (group.unfolded_bytes(), group.stored_bytes());
    assert!(stored < unfolded - unfolded / 10, "{stored} of {unfolded}");
    let max = (stored + unfolded) / 2;
    group.options.retention.at_size_max = AtSizeMax::Shorten;
    group.options.retention.size_max_bytes = max;
    assert!(!fold(&mut group, at_ms(1000)), "there is room");
    group.options.retention.size_max_bytes = group.stored_bytes() / 2;
    while fold(&mut group, at_ms(1000)) {}
    assert!(group.stored_bytes() <= max && group.past_status().shortened);
    assert!(group.fold_position().segment > 2);
}

#[test]
fn a_crash_at_any_step_of_compressing_leaves_the_same_group() {
    let disk = Memory::new();
    let mut group = busy(&disk, Form::Hlc, DAY_MS, 60);
    index_all(&mut group);
    drop(group);
    let life = |disk: &Memory| {
        let mut group = reopen(disk);
        group.options = windowed(DAY_MS);
        compress_some(&mut group, 3);
        check_all(&mut group, 60)
    };
    let whole = disk.killed();
    let expected = life(&whole);
    let (begin, end) = (disk.ops(), whole.ops());
    let (mut with, mut without) = (0, 0);
    for at in begin..=end {
        let dying = disk.killed();
        let opened = Group::open(dying.clone(), at_ms(0), windowed(DAY_MS)).unwrap();
        let mut group = opened.unwrap().0;
        dying.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        compress_some(&mut group, 3);
        drop(group);
        for survives in [false, true] {
            let after = dying.crash(&mut || survives);
            match cold_files(&after).is_empty() {
                true => without += 1,
                false => with += 1,
            }
            let mut group = reopen(&after);
            group.options = windowed(DAY_MS);
            assert_eq!(check_all(&mut group, 60), expected);
        }
    }
    assert!(with > 5 && without > 5, "{with} with, {without} without");
}
