mod crashes;
mod model;

use super::format::{self, Found, Head, Unusable};
use super::geometry::{BLOCK_BYTES, Entry, Geometry};
use super::*;
use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, MonoNanos, Seq};
use tidelock_protocol::message::{Basis, CopyState, LogAge};
use trial::{CALM_MS, STEADY, STRIKES_MAX};

const EXTENT: u64 = 1024;
const START: MonoNanos = MonoNanos(1_000);
const GEOMETRY: Geometry = Geometry { extent_bytes: EXTENT as u32, slots: 8, context: 3 };

fn identity() -> Identity {
    let disk = |nth, name: &str| (DiskId(nth), name.to_owned(), 64 * EXTENT);
    Identity { group: "g".into(), member: "m".into(), disks: vec![disk(0, "a"), disk(1, "b")] }
}

fn extent(disk: u16, nth: u64) -> Extent {
    Extent { disk: DiskId(disk), offset: nth * EXTENT, len_bytes: EXTENT }
}

const CLEAN: LastEnd =
    LastEnd::Clean { incarnation: Incarnation(7), epoch: Epoch(2), seq: Seq(100) };

fn open_clean() -> (ActivityLog, Vec<u8>) {
    open_new(format::read(&of_the_last_run(), &identity()), CLEAN)
}

/// The log of the run that [`CLEAN`] is about.
fn of_the_last_run() -> Vec<u8> {
    open_as(Incarnation(7), Err(Unusable::Missing), LastEnd::UNKNOWN).1
}

/// The host's record is of the run that the log is of.
fn unclean(found: &Result<Found, Unusable>) -> LastEnd {
    let of = found.as_ref().map_or(Incarnation(0), |found| found.head.confirmed);
    LastEnd::Unclean { runs: [of, Incarnation(0)] }
}

fn open_new(found: Result<Found, Unusable>, last_end: LastEnd) -> (ActivityLog, Vec<u8>) {
    open_as(Incarnation(9), found, last_end)
}

fn open_as(
    run: Incarnation,
    found: Result<Found, Unusable>,
    last_end: LastEnd,
) -> (ActivityLog, Vec<u8>) {
    let Opening { log, change, .. } = open(found, GEOMETRY, &identity(), run, last_end);
    let FileChange::Replace(file) = change else { panic!("a new file") };
    (log, file)
}

/// Does what the log asks for at once; returns what may go.
fn run(log: &mut ActivityLog, file: &mut [u8]) -> Vec<u64> {
    let mut go = Vec::new();
    while let Some(action) = log.poll_action() {
        match action {
            Action::Go(request) => go.push(request),
            Action::Write { offset, block } => {
                file[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
                log.written(true);
            }
            Action::Flush { disk, number } => log.flush_ended(disk, number, true),
            Action::Discard => panic!("nothing failed"),
        }
    }
    go
}

#[test]
fn a_hit_costs_nothing_and_a_miss_waits_for_the_log() {
    let (mut log, mut file) = open_clean();
    assert_eq!(log.standing(), Standing::Mapped);
    assert!(!log.admit(1, extent(0, 5)));
    assert_eq!(log.waiting(), 1);
    let Some(Action::Write { offset, block }) = log.poll_action() else { panic!("a write") };
    assert!(!log.admit(2, extent(0, 5)), "the log does not have it yet");
    assert!(!log.admit(3, extent(1, 5)), "the next transaction");
    assert_eq!(log.poll_action(), None, "one write at a time");
    file[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
    log.written(true);
    assert_eq!(run(&mut log, &mut file), [1, 2, 3]);
    assert_eq!(log.counts().transactions, 2);
    for request in 1..=3 {
        log.finished(request, Seq(100 + request));
    }
    assert!(log.admit(4, extent(0, 5)) && log.admit(5, extent(1, 5)));
    assert_eq!(log.poll_action(), None);
    assert_eq!((log.counts().hits, log.counts().misses), (2, 3));
    assert_eq!(log.exposure(), (2, 2 * EXTENT));
    assert_eq!(format::read(&file, &identity()).unwrap().slots.iter().flatten().count(), 2);
}

#[test]
fn the_coldest_extent_leaves_once_both_sites_have_it_for_good() {
    let (mut log, mut file) = open_clean();
    log.step(true, Seq(100), START);
    for nth in 0..8 {
        assert!(!log.admit(nth, extent(0, nth)));
        assert_eq!(run(&mut log, &mut file), [nth]);
        log.finished(nth, Seq(101 + nth));
    }
    assert!(log.admit(50, extent(0, 0)), "0 is not the coldest any more");
    log.finished(50, Seq(109));
    log.committed(Seq(102));
    // 1 is: the backup has it, the local disk was not flushed since.
    assert!(!log.admit(60, extent(1, 0)));
    let flush = log.poll_action();
    let Some(Action::Flush { disk: DiskId(0), number }) = flush else { panic!("{flush:?}") };
    assert_eq!(log.poll_action(), None, "nothing leaves before");
    log.flush_ended(DiskId(0), number, true);
    assert_eq!(run(&mut log, &mut file), [60]);
    let found = format::read(&file, &identity()).unwrap();
    let has =
        |disk, first| found.slots.contains(&Some(Entry { disk: DiskId(disk), first, more: 0 }));
    assert!(has(1, 0) && has(0, 0) && !has(0, 1) && has(0, 2));
    assert_eq!(found.head.covered, Seq(102));
}

#[test]
fn a_map_full_of_what_the_backup_lacks_is_given_up_and_comes_back() {
    let (mut log, mut file) = open_clean();
    for nth in 0..8 {
        assert!(!log.admit(nth, extent(0, nth)));
        run(&mut log, &mut file);
        log.finished(nth, Seq(101 + nth));
    }
    assert!(!log.admit(8, extent(0, 8)), "not before the log says so");
    assert_eq!(log.standing(), Standing::Everything(Why::Overflow));
    assert_eq!(run(&mut log, &mut file), [8]);
    assert!(format::read(&file, &identity()).unwrap().head.everything);
    assert!(log.admit(9, extent(0, 9)), "nothing waits from here on");
    assert_eq!(log.exposure().1, 2 * 64 * EXTENT);
    log.finished(8, Seq(109));
    log.step(true, Seq(109), START);
    assert!(log.poll_action().is_none() && !log.needs_tick(), "the backup has not caught up");
    log.finished(9, Seq(110));
    log.committed(Seq(109));
    assert!(log.admit(10, extent(0, 10)));
    log.step(true, Seq(110), START);
    assert!(log.poll_action().is_none() && log.needs_tick(), "nor has it been calm");
    log.committed(Seq(110));
    let later = START.plus_ms(CALM_MS);
    log.step(true, Seq(110), later);
    log.step(true, Seq(110), later);
    assert_eq!(log.poll_action(), None, "10 is under way, and not noted");
    assert!(!log.admit(11, extent(0, 11)), "from here on all is noted");
    log.finished(10, Seq(111));
    log.step(true, Seq(111), later);
    assert_eq!(run(&mut log, &mut file), [11]);
    log.step(true, Seq(112), later);
    assert!(run(&mut log, &mut file).is_empty());
    assert_ne!(log.standing(), Standing::Mapped, "111 is on its way");
    log.committed(Seq(111));
    log.step(true, Seq(112), later);
    run(&mut log, &mut file);
    assert_eq!(log.standing(), Standing::Mapped);
    assert!(!format::read(&file, &identity()).unwrap().head.everything);
    assert_eq!(log.counts().overflows, 1);
}

/// A guest that keeps so many extents on their way to the backup, each written once, for these steps of
/// 10 ms. Returns how often the map was given up.
fn steady_load(
    log: &mut ActivityLog,
    file: &mut [u8],
    in_flight: u64,
    steps: std::ops::Range<u64>,
) -> u64 {
    let before = log.counts().overflows;
    for nth in steps {
        let (request, seq) = (nth, Seq(101 + nth));
        if !log.admit(request, extent((nth / 64 % 2) as u16, nth % 64)) {
            assert_eq!(run(log, file), [request], "nothing waits for the backup");
        }
        log.finished(request, seq);
        log.committed(Seq(seq.0 - in_flight));
        log.step(true, seq, START.plus_ms(10 * nth));
        run(log, file);
    }
    log.counts().overflows - before
}

#[test]
fn a_map_that_is_too_small_is_not_tried_again_and_again() {
    let (mut log, mut file) = open_clean();
    log.step(true, Seq(100), START);
    // Half an hour.
    assert_eq!(steady_load(&mut log, &mut file, 20, 0..180_000), 1);
    assert_eq!(log.standing(), Standing::Everything(Why::Overflow));
    assert_eq!(steady_load(&mut log, &mut file, 3, 180_000..181_000), 0);
    assert_eq!(log.standing(), Standing::Mapped, "what fits is noted again while the guest writes");
}

#[test]
fn bursts_overflow_a_map_no_oftener_than_is_stated() {
    for (burst, pause_ms) in [(30, 1_100), (12, 2_500), (9, 17_000), (30, 40_000)] {
        let (mut log, mut file) = open_clean();
        let (mut seq, mut now, mut request) = (100, START, 0);
        for _ in 0..500 {
            for nth in 0..burst {
                request += 1;
                if !log.admit(request, extent(1, nth)) {
                    assert_eq!(run(&mut log, &mut file), [request]);
                }
                seq += 1;
                log.finished(request, Seq(seq));
            }
            log.step(true, Seq(seq), now);
            log.committed(Seq(seq));
            for _ in 0..pause_ms / 100 {
                now = now.plus_ms(100);
                log.step(true, Seq(seq), now);
                run(&mut log, &mut file);
            }
        }
        let span_ms = now.since_ns(START) / 1_000_000;
        let most = u64::from(STRIKES_MAX) + 1 + span_ms / (STEADY * CALM_MS);
        let overflows = log.counts().overflows;
        assert!((2..=most).contains(&overflows), "{overflows} of {most} in {span_ms} ms");
    }
}

fn everything(why: &str) -> Basis {
    Basis::Everything { why: why.to_owned() }
}

fn attachment(durable: u64) -> Attachment {
    Attachment {
        copy: CopyState::Resyncing,
        epoch: Epoch(2),
        durable: Seq(durable),
        basis: Basis::Log,
        copying: false,
    }
}

/// A run that has written extents 3 and 4, and what it leaves.
fn left_by_a_crash() -> Vec<u8> {
    let (mut log, mut file) = open_clean();
    let whole = Attachment { copy: CopyState::Whole, ..attachment(100) };
    assert_eq!(log.attached(&whole), Compare::Nothing);
    run(&mut log, &mut file);
    log.admit(1, Extent { len_bytes: 2 * EXTENT - 100, ..extent(1, 3) });
    run(&mut log, &mut file);
    file
}

fn reopen(file: &mut [u8], incarnation: u64) -> ActivityLog {
    let found = format::read(file, &identity());
    let run = Incarnation(incarnation);
    let last_end = unclean(&found);
    let Opening { log, change, .. } = open(found, GEOMETRY, &identity(), run, last_end);
    match change {
        FileChange::Append { offset, block } => {
            file[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
        }
        FileChange::Replace(new) => file.copy_from_slice(&new),
    }
    log
}

#[test]
fn after_a_crash_exactly_the_map_is_compared() {
    let mut file = left_by_a_crash();
    let mut log = reopen(&mut file, 20);
    let both = Extent { len_bytes: 2 * EXTENT, ..extent(1, 3) };
    assert_eq!(log.attached(&attachment(100)), Compare::Mapped(vec![both]));
    run(&mut log, &mut file);
    // Killed again before anything was compared, and once more without having attached.
    let mut log = reopen(&mut file, 30);
    run(&mut log, &mut file);
    let mut log = reopen(&mut file, 40);
    assert_eq!(log.attached(&attachment(100)), Compare::Mapped(vec![both]));
}

#[test]
fn a_map_that_cannot_be_believed_is_not() {
    let all = |attachment: Attachment| {
        let mut file = left_by_a_crash();
        let mut log = reopen(&mut file, 20);
        let Compare::All(why) = log.attached(&attachment) else { panic!("{attachment:?}") };
        run(&mut log, &mut file);
        assert!(format::read(&file, &identity()).unwrap().head.everything);
        why
    };
    let by = |basis| Attachment { basis, ..attachment(100) };
    assert!(all(by(everything("another run has attached"))).contains("another run"));
    assert!(all(attachment(99)).contains("lost"));
    assert!(all(Attachment { epoch: Epoch(3), ..attachment(100) }).contains("epoch"));
    let partial = Attachment { copy: CopyState::Partial, ..attachment(100) };
    assert!(all(partial).contains("no whole copy"));
    // A clean start that the backup does not agree with.
    let (mut log, _) = open_clean();
    assert!(matches!(log.attached(&by(everything("a disk was restored"))), Compare::All(_)));
    let mut off = ActivityLog::off();
    assert!(matches!(off.attached(&attachment(90)), Compare::All(_)));
    assert!(off.admit(1, extent(0, 0)) && off.poll_action().is_none());
}

/// State directory and log can be restored each by itself: the log of another run than the one on record says nothing.
#[test]
fn a_log_that_is_not_of_the_run_on_record_says_nothing() {
    let mut file = left_by_a_crash();
    for runs in [[8, 0], [0, 0], [9, 3], [3, 9]] {
        let found = format::read(&file, &identity());
        let last_end = LastEnd::Unclean { runs: runs.map(Incarnation) };
        let Opening { mut log, .. } = open(found, GEOMETRY, &identity(), Incarnation(20), last_end);
        let is_of_it = runs.contains(&9);
        assert_eq!(log.is_believed(), is_of_it, "{runs:?}");
        assert_eq!(matches!(log.attached(&attachment(100)), Compare::All(_)), !is_of_it);
    }
    // A start that the backup does not confirm leaves the log as that of the run before.
    reopen(&mut file, 20);
    assert_eq!(format::read(&file, &identity()).unwrap().head.confirmed, Incarnation(9));
}

/// The backup is told of it before it gets a record that was admitted under it.
#[test]
fn its_age_is_that_of_what_is_on_stable_storage() {
    let (mut log, mut file) = open_clean();
    assert_eq!(log.age(), LogAge { file: 9, number: 0 }, "the run has not attached");
    let whole = Attachment { copy: CopyState::Whole, ..attachment(100) };
    assert_eq!(log.attached(&whole), Compare::Nothing);
    assert!(!log.admit(1, extent(0, 1)));
    let Some(Action::Write { offset, block }) = log.poll_action() else { panic!("a write") };
    assert_eq!(log.age().number, 0, "not yet");
    file[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
    log.written(true);
    assert_eq!(log.age().number, 2);
    let (older, newer) = (LogAge { file: 9, number: 7 }, LogAge { file: 10, number: 1 });
    assert!(older < newer, "a file that was made later");
}

/// A log that was restored is as old as it was then, however often a daemon is started on it that the backup does not
/// attach, and whatever guests write meanwhile.
#[test]
fn a_start_makes_a_log_no_newer() {
    let restored = left_by_a_crash();
    let age = format::read(&restored, &identity()).unwrap().head.age;
    let mut file = restored.clone();
    for incarnation in [20, 21] {
        let mut log = reopen(&mut file, incarnation);
        assert_eq!(log.age().number, age);
        log.begin_unrecorded();
        log.admit(1, extent(0, incarnation));
        run(&mut log, &mut file);
        assert_eq!(log.age().number, age);
    }
    // The run that it is compared with has written one more extent.
    let (mut log, mut file) = (reopen(&mut restored.clone(), 20), restored);
    assert!(matches!(log.attached(&attachment(100)), Compare::Mapped(_)));
    run(&mut log, &mut file);
    assert!(log.age().number > age);
}

/// A clean end speaks of the disks that there were then.
#[test]
fn a_clean_start_with_other_disks_has_no_map() {
    for why in [Unusable::Missing, Unusable::Foreign("set of disks")] {
        let (mut log, mut file) = open_new(Err(why), CLEAN);
        assert_eq!(log.standing(), Standing::Everything(Why::Copy));
        assert!(log.admit(1, extent(0, 0)), "nothing waits");
        log.finished(1, Seq(101));
        // Killed before it has attached.
        let mut next = reopen(&mut file, 20);
        assert!(matches!(next.attached(&attachment(100)), Compare::All(_)));
        // Or the backup says that it has all of these.
        let whole = Attachment { copy: CopyState::Whole, ..attachment(101) };
        assert_eq!(log.attached(&whole), Compare::Nothing);
        for _ in 0..3 {
            log.step(true, Seq(101), START);
            run(&mut log, &mut file);
        }
        assert_eq!(log.standing(), Standing::Mapped);
    }
}

/// Twice killed before it was attached: what the first run had to compare is not forgotten by the second.
#[test]
fn a_log_that_began_after_a_clean_end_is_no_log_of_that_end() {
    let (_, of_other_disks) = open_new(Err(Unusable::Foreign("set of disks")), CLEAN);
    let (mut log, _) = open_as(Incarnation(10), format::read(&of_other_disks, &identity()), CLEAN);
    assert_eq!(log.standing(), Standing::Everything(Why::Copy));
    assert!(matches!(log.attached(&attachment(100)), Compare::All(_)));
    // A log that the first one has taken over goes on to be one of that end.
    let (_, taken_over) = open_clean();
    let (log, _) = open_as(Incarnation(10), format::read(&taken_over, &identity()), CLEAN);
    assert_eq!(log.standing(), Standing::Mapped);
}

#[test]
fn what_is_missing_damaged_or_foreign_says_nothing() {
    let file = left_by_a_crash();
    assert!(format::read(&file, &identity()).is_ok());
    let read = |file: &[u8], change: &dyn Fn(&mut Identity)| {
        let mut identity = identity();
        change(&mut identity);
        format::read(file, &identity)
    };
    let foreign = |change: &dyn Fn(&mut Identity)| {
        assert!(matches!(read(&file, change), Err(Unusable::Foreign(_))));
    };
    foreign(&|identity| identity.group = "h".into());
    foreign(&|identity| identity.member = "mm".into());
    foreign(&|identity| identity.disks[1].2 -= 512);
    foreign(&|identity| identity.disks[0].1 = "c".into());
    foreign(&|identity| drop(identity.disks.pop()));
    let one_superblock: Vec<u8> = [vec![0; BLOCK_BYTES], file[BLOCK_BYTES..].to_vec()].concat();
    assert!(format::read(&one_superblock, &identity()).is_ok(), "the other one is whole");
    let none = [vec![0; 2 * BLOCK_BYTES], file[2 * BLOCK_BYTES..].to_vec()].concat();
    assert!(matches!(format::read(&none, &identity()), Err(Unusable::Damaged(_))));
    assert!(matches!(format::read(&file[..100], &identity()), Err(Unusable::Damaged(_))));
    let short = &file[..file.len() - BLOCK_BYTES];
    assert!(matches!(format::read(short, &identity()), Err(Unusable::Damaged(_))));
    // A transaction in the middle: what it repeats may be nowhere else.
    let first = GEOMETRY.place_of(1) as usize;
    let mut damaged = file.clone();
    damaged[first + 100] ^= 1;
    assert!(matches!(format::read(&damaged, &identity()), Err(Unusable::Damaged(_))));
    // Another version.
    let mut newer = file.clone();
    for copy in newer.chunks_exact_mut(BLOCK_BYTES).take(2) {
        copy[8] = 2;
        let crc = tidelock_protocol::record::crc32c(&copy[..BLOCK_BYTES - 4]);
        copy[BLOCK_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    }
    assert_eq!(format::read(&newer, &identity()), Err(Unusable::Version(2)));
}

/// With right checksums, too: what somebody else has made is refused, or is a map of these disks.
#[test]
fn no_content_makes_the_reader_panic() {
    let file = left_by_a_crash();
    let mut random = 1u64;
    let mut next = move || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) as usize
    };
    let mut read = 0;
    for _ in 0..5_000 {
        let mut damaged = file.clone();
        let block = next() % (damaged.len() / BLOCK_BYTES) * BLOCK_BYTES;
        for _ in 0..1 + next() % 3 {
            // Mostly where something stands.
            let at = if next() % 2 == 0 { next() % 128 } else { next() % (BLOCK_BYTES - 4) };
            damaged[block + at] ^= 1 << (next() % 8);
        }
        let crc = tidelock_protocol::record::crc32c(&damaged[block..block + BLOCK_BYTES - 4]);
        damaged[block + BLOCK_BYTES - 4..block + BLOCK_BYTES].copy_from_slice(&crc.to_le_bytes());
        if let Ok(found) = format::read(&damaged, &identity()) {
            read += 1;
            let run = Incarnation(50);
            let found = Ok(found);
            let last_end = unclean(&found);
            let log = open(found, GEOMETRY, &identity(), run, last_end).log;
            assert!(log.ranges().iter().all(|range| range.end() <= 64 * EXTENT));
        }
    }
    assert!(read > 100, "{read}");
}

/// What version 1 has written is read for good: the digest of a file, and what it says.
#[test]
fn the_format_is_the_documented_one() {
    let file = left_by_a_crash();
    let found = format::read(&file, &identity()).unwrap();
    let head = Head {
        number: 3,
        incarnation: Incarnation(9),
        confirmed: Incarnation(9),
        epoch: Epoch(2),
        covered: Seq(100),
        everything: false,
        age: 3,
    };
    let mut slots = vec![None; 8];
    slots[0] = Some(Entry { disk: DiskId(1), first: 3, more: 1 });
    let disk_bytes = vec![64 * EXTENT; 2];
    assert_eq!(found, Found { id: 9, geometry: GEOMETRY, head, slots, disk_bytes });
    let digest = blake3::hash(&file).to_hex();
    assert_eq!(&digest[..16], "3d4c226534c3bd6d", "if the bytes changed, so must the version");
    assert_eq!(&file[..8], b"TLKACTS1");
    let block = &file[GEOMETRY.place_of(3) as usize..][..BLOCK_BYTES];
    assert_eq!((&block[..8], block[16], block[60]), (&b"TLKACTT1"[..], 3, 1));
    assert_eq!(block[80..92], [0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 1, 0]);
}

#[test]
fn a_failed_write_gives_the_log_up_and_a_failed_flush_its_map() {
    let (mut log, mut file) = open_clean();
    assert!(!log.admit(1, extent(0, 0)));
    assert!(matches!(log.poll_action(), Some(Action::Write { .. })));
    log.written(false);
    assert_eq!((log.poll_action(), log.poll_action()), (Some(Action::Discard), None));
    log.discarded(false);
    assert_eq!((log.standing(), log.poll_action()), (Standing::Failing, None));
    assert!(!log.admit(2, extent(0, 1)), "what is on disk may say too little");
    log.retry();
    assert_eq!(log.poll_action(), Some(Action::Discard));
    log.discarded(true);
    assert_eq!(run(&mut log, &mut file), [1, 2]);
    assert_eq!(log.standing(), Standing::Off);
    assert!(log.admit(3, extent(0, 9)));

    let (mut log, mut file) = open_clean();
    let number = log.flush_begins(DiskId(1));
    log.flush_ended(DiskId(1), number, false);
    run(&mut log, &mut file);
    log.step(true, Seq(100), START);
    assert!(run(&mut log, &mut file).is_empty());
    assert_eq!(log.standing(), Standing::Everything(Why::FlushFailed), "until the next start");
}

#[test]
fn a_request_over_many_extents_takes_one_slot_and_huge_ones_do_not_block_each_other() {
    let (mut log, mut file) = open_clean();
    let huge = |disk| Extent { len_bytes: 60 * EXTENT, ..extent(disk, 0) };
    for request in 0..8 {
        assert!(!log.admit(request, huge((request % 2) as u16)));
    }
    assert_eq!(run(&mut log, &mut file), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(log.exposure().0, 8);
    assert!(!log.admit(8, huge(0)), "all slots are in use");
    assert!(run(&mut log, &mut file).is_empty());
    log.finished(3, Seq(100));
    assert_eq!(run(&mut log, &mut file), [8]);
    assert_eq!(log.ranges(), [huge(0), huge(1)]);
}

const ATTACHED: Attachment = Attachment {
    copy: CopyState::Resyncing,
    epoch: Epoch(2),
    durable: Seq(100),
    basis: Basis::Log,
    copying: false,
};

/// Nothing of it leaves the map before it was compared, however many extents come after it.
#[test]
fn what_is_not_recorded_stays_in_the_map_until_it_was_compared() {
    let (mut log, mut file) = open_clean();
    log.begin_unrecorded();
    let wide = Extent { len_bytes: 60 * EXTENT, ..extent(1, 0) };
    assert!(!log.admit(0, wide));
    assert_eq!(run(&mut log, &mut file), [0]);
    log.finished(0, Seq(0));
    for nth in 1..8 {
        assert!(!log.admit(nth, extent(0, nth)));
        assert_eq!(run(&mut log, &mut file), [nth]);
        log.finished(nth, Seq(0));
        assert!(log.admit(10 + nth, extent(0, nth)), "hot");
        log.finished(10 + nth, Seq(0));
    }
    log.step(false, Seq(0), START);
    let all = [Extent { len_bytes: 7 * EXTENT, ..extent(0, 1) }, wide];
    assert_eq!(log.ranges(), all);

    // A run after this one was killed knows them, and which run the backup knew.
    let found = format::read(&file, &identity());
    let last_end = unclean(&found);
    let Opening { log: mut next, .. } =
        open(found, GEOMETRY, &identity(), Incarnation(12), last_end);
    next.begin_unrecorded();
    assert_eq!(next.attached(&ATTACHED), Compare::Mapped(all.to_vec()));

    // And so does this one.
    assert_eq!(log.attached(&ATTACHED), Compare::Mapped(all.to_vec()));
    log.compared(extent(0, 1), Seq(101));
    log.compared(wide, Seq(102));
    log.committed(Seq(102));
    assert!(!log.admit(30, extent(0, 30)), "two have been compared");
    assert_eq!(run(&mut log, &mut file), [30]);
    assert!(!log.admit(31, extent(0, 31)));
    assert_eq!(run(&mut log, &mut file), [31]);
    assert!(!log.ranges().iter().any(|range| range.overlaps(&wide)));
    assert!(log.ranges().iter().any(|range| range.overlaps(&extent(0, 2))));
}

#[test]
fn more_than_the_map_has_slots_for_before_the_first_contact_costs_a_whole_comparison() {
    let (mut log, mut file) = open_clean();
    log.begin_unrecorded();
    for nth in 0..9 {
        assert!(!log.admit(nth, extent(0, nth)));
        assert_eq!(run(&mut log, &mut file), [nth]);
        log.finished(nth, Seq(0));
    }
    assert!(log.admit(9, extent(0, 9)));
    assert!(format::read(&file, &identity()).unwrap().head.everything);
    let Compare::All(why) = log.attached(&ATTACHED) else { panic!("it is in no map") };
    assert_eq!(why, Why::Overflow.to_string());
    assert_eq!(log.standing(), Standing::Everything(Why::Copy));
}

/// Another run has attached, or the backup has lost something: what the map has is not all.
#[test]
fn a_map_of_what_is_not_recorded_is_believed_like_any_other() {
    for (attachment, said) in [
        (Attachment { basis: everything("another run"), ..ATTACHED }, "another run"),
        (Attachment { durable: Seq(99), ..ATTACHED }, "has lost what it acknowledged"),
        (Attachment { epoch: Epoch(3), ..ATTACHED }, "another epoch"),
        (Attachment { copy: CopyState::Empty, ..ATTACHED }, "no whole copy"),
    ] {
        let (mut log, mut file) = open_clean();
        log.begin_unrecorded();
        assert!(!log.admit(1, extent(0, 1)));
        run(&mut log, &mut file);
        let Compare::All(why) = log.attached(&attachment) else { panic!("{attachment:?}") };
        assert!(why.contains(said), "{why}");
    }
}

/// A full backlog: what waits behind the log has no record either, and what was recorded before may leave as ever.
#[test]
fn while_the_stream_stands_the_map_keeps_whatever_comes() {
    let (mut log, mut file) = open_clean();
    log.attached(&Attachment { copy: CopyState::Whole, ..ATTACHED });
    log.step(true, Seq(100), START);
    for nth in 0..2 {
        assert!(!log.admit(nth, extent(0, nth)));
        assert_eq!(run(&mut log, &mut file), [nth]);
    }
    log.finished(0, Seq(101));
    // 1 was admitted, and waits for room in the backlog.
    log.stop_recording();
    log.finished(1, Seq(101));
    for nth in 2..8 {
        assert!(!log.admit(nth, extent(0, nth)));
        assert_eq!(run(&mut log, &mut file), [nth]);
        log.finished(nth, Seq(101));
    }
    // The link comes and goes.
    log.attached_unrecorded(Epoch(2), Seq(101));
    log.step(false, Seq(101), START);
    assert!(!log.admit(8, extent(0, 8)));
    assert_eq!(run(&mut log, &mut file), [8], "in the place of 0, which has arrived");
    log.finished(8, Seq(101));
    assert_eq!(log.ranges(), [Extent { len_bytes: 8 * EXTENT, ..extent(0, 1) }]);
    assert!(!log.admit(9, extent(0, 9)));
    assert_eq!(run(&mut log, &mut file), [9], "more than it has slots for");
    assert!(format::read(&file, &identity()).unwrap().head.everything);
    log.finished(9, Seq(101));
    let own = Attachment { durable: Seq(101), ..ATTACHED };
    let Compare::All(why) = log.attached(&own) else { panic!("it is in no map") };
    assert_eq!(why, Why::Overflow.to_string());
}

#[test]
fn after_the_stream_stood_only_the_map_is_compared() {
    let (mut log, mut file) = open_clean();
    log.attached(&Attachment { copy: CopyState::Whole, ..ATTACHED });
    let own = Attachment { durable: Seq(101), ..ATTACHED };
    for lap in 0..2 {
        log.stop_recording();
        assert!(!log.admit(lap, extent(0, lap)));
        assert_eq!(run(&mut log, &mut file), [lap]);
        log.finished(lap, Seq(101));
        log.attached_unrecorded(Epoch(2), Seq(101));
        // A run after this one was killed knows it.
        let found = format::read(&file, &identity());
        let last_end = unclean(&found);
        let mut next = open(found, GEOMETRY, &identity(), Incarnation(12), last_end).log;
        let all = vec![Extent { len_bytes: (lap + 1) * EXTENT, ..extent(0, 0) }];
        assert_eq!(next.attached(&own), Compare::Mapped(all.clone()));
        assert_eq!(log.attached(&own), Compare::Mapped(all), "also what was not compared in lap 0");
    }
    // On the way to a map of its own nothing that has no record may count as settled.
    let (mut log, mut file) = open_new(Err(Unusable::Missing), LastEnd::UNKNOWN);
    log.attached(&Attachment { copy: CopyState::Whole, ..ATTACHED });
    log.step(true, Seq(100), START);
    log.stop_recording();
    run(&mut log, &mut file);
    assert_eq!(log.standing(), Standing::Everything(Why::Copy));
    assert!(matches!(log.attached(&own), Compare::All(_)));
}

/// A clean mark has the size of each disk, too, so there is no clean end either.
#[test]
fn the_log_of_a_disk_that_has_another_size_is_not_believed() {
    let (_, old) = open_clean();
    for bytes in [64 * EXTENT - 1, 94 * EXTENT] {
        let mut identity = identity();
        identity.disks[1].2 = bytes;
        assert_eq!(format::read(&old, &identity), Err(Unusable::Foreign(format::OTHER_DISKS)));
    }
}

/// Its place stays, so that the others keep their numbers: nothing waits for a flush of it.
#[test]
fn of_a_disk_that_was_removed_nothing_is_compared_and_none_is_flushed() {
    let mut identity = identity();
    identity.disks[0].2 = 0;
    let (_, old) = open_clean();
    let found = || format::read(&old, &identity);
    let Opening { mut log, change } = open(found(), GEOMETRY, &identity, Incarnation(12), CLEAN);
    let FileChange::Replace(mut file) = change else { panic!("a new file") };
    assert!(log.unusable.is_none());
    assert_eq!(log.ranges(), []);
    // Many more than there are slots: each is flushed before its slot is used again.
    for nth in 0..60 {
        log.admit(nth, extent(1, nth));
        while let Some(action) = log.poll_action() {
            match action {
                Action::Flush { disk, number } => {
                    assert_eq!(disk, DiskId(1));
                    log.flush_ended(disk, number, true);
                }
                Action::Write { offset, block } => {
                    file[offset as usize..][..BLOCK_BYTES].copy_from_slice(&block);
                    log.written(true);
                }
                Action::Go(request) => {
                    log.finished(request, Seq(101 + request));
                    log.committed(Seq(101 + request));
                }
                Action::Discard => panic!("nothing failed"),
            }
        }
    }
    assert_eq!((log.counts().misses, log.counts().overflows), (60, 0));

    // After an unclean end the map speaks of a disk that is not there.
    let mut log = open(found(), GEOMETRY, &identity, Incarnation(12), unclean(&found())).log;
    assert!(matches!(log.attached(&ATTACHED), Compare::All(_)));
}

/// The stream of a killed process goes on with all that it had not sent: nothing is compared, and what the map has leaves
/// it when the backup has the last record of that time, and not before.
#[test]
fn a_stream_that_goes_on_keeps_the_map_until_it_is_covered() {
    for (durable, is_covered) in [(149, false), (150, true)] {
        let mut file = left_by_a_crash();
        let mut log = reopen(&mut file, 9);
        log.goes_on_after(Seq(150));
        run(&mut log, &mut file);
        let whole = Attachment { copy: CopyState::Whole, ..attachment(120) };
        assert_eq!(log.attached(&whole), Compare::Nothing);
        for nth in 0..7 {
            log.admit(nth, extent(0, 10 + nth));
            run(&mut log, &mut file);
            log.finished(nth, Seq(151 + nth));
        }
        log.committed(Seq(durable));
        let found = format::read(&file, &identity()).unwrap();
        assert!(found.slots.contains(&Some(Entry { disk: DiskId(1), first: 3, more: 1 })));
        // There is no other slot left.
        log.admit(50, extent(0, 50));
        assert_eq!(run(&mut log, &mut file), [50]);
        assert_eq!(log.counts().overflows, u64::from(!is_covered), "{durable}");
    }
    // The backup wants it compared all the same.
    let mut file = left_by_a_crash();
    let mut log = reopen(&mut file, 9);
    log.goes_on_after(Seq(150));
    let both = Extent { len_bytes: 2 * EXTENT, ..extent(1, 3) };
    assert_eq!(log.attached(&attachment(120)), Compare::Mapped(vec![both]));
}
