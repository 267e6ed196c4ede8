//! The files: what is written comes back in order, room is given back, and nothing that is damaged, torn or somebody
//! else's is taken for a record.

use super::format::{HEADER_BYTES, path_of};
use super::journal::segments_in;
use super::*;
use std::fs;
use std::path::Path;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, Seq, WriterId};
use tidelock_protocol::record::{Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;

const RUN: Incarnation = Incarnation(7);
const BOOT: [u8; 16] = [3; 16];
const IDENTITY: [u8; 32] = [9; 32];
/// Small, so that a test has many of them.
const SEGMENT_BYTES: u64 = 20_000;
const FIRST: Position = Position { segment: 1, offset: HEADER_BYTES as u64 };

/// Writes of many sizes, zeroings and idle records, some of which depend on others.
fn record(seq: u64) -> Record {
    let effect = match seq % 5 {
        0 => Effect::Zero { len_bytes: 4096 * seq as u32, no_hole: seq.is_multiple_of(2) },
        1 => Effect::Idle,
        _ => Effect::Write(Payload::new(vec![seq as u8; (seq as usize * 977) % 9000 + 1].into())),
    };
    let idle = effect == Effect::Idle;
    Record {
        writer: WriterId(1),
        seq: Seq(seq),
        epoch: Epoch(2),
        hlc: Hlc(1000 + seq),
        deps: if seq.is_multiple_of(3) {
            CountVector::of(WriterId(0), Seq(seq))
        } else {
            CountVector::new()
        },
        disk: DiskId(0),
        offset: if idle { 0 } else { 4096 * seq },
        copy: false,
        flushed: seq.is_multiple_of(7),
        effect,
    }
}

fn begin(directory: &Path) -> Journal {
    Journal::begin(directory.to_owned(), SEGMENT_BYTES, RUN, BOOT, IDENTITY).unwrap()
}

fn append(journal: &mut Journal, seqs: std::ops::RangeInclusive<u64>) -> Vec<Position> {
    seqs.map(|seq| journal.append(&record(seq), || Seq(seq)).unwrap()).collect()
}

fn reader(directory: &Path, at: Position, next: u64) -> Reader {
    Reader::new(directory.to_owned(), at, Seq(next))
}

fn numbers(directory: &Path) -> Vec<u64> {
    segments_in(directory).unwrap().into_iter().map(|(number, _)| number).collect()
}

#[test]
fn what_was_written_is_read_back_in_order_over_many_segments() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = begin(dir.path());
    let positions = append(&mut journal, 1..=60);
    assert!(numbers(dir.path()).len() > 5);
    let mut from_first = reader(dir.path(), FIRST, 1);
    for seq in 1..=60 {
        let cost = cost_bytes(&record(seq));
        assert_eq!(from_first.next_cost_bytes().unwrap(), cost);
        assert_eq!(from_first.read().unwrap(), record(seq));
    }
    assert_eq!(from_first.read_if_whole().unwrap(), None);
    assert!(from_first.read().is_err(), "it was promised, and is not there");
    // A reader that has come to the end goes on when there is more.
    append(&mut journal, 61..=61);
    assert_eq!(from_first.read().unwrap(), record(61));
    // And it may begin anywhere.
    for (at, seq) in positions.into_iter().zip(1..) {
        assert_eq!(reader(dir.path(), at, seq).read().unwrap(), record(seq));
    }
}

#[test]
fn records_of_all_sizes_are_read_back_across_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::begin(dir.path().to_owned(), 64 << 20, RUN, BOOT, IDENTITY).unwrap();
    let large = |seq: u64, len: usize| Record {
        effect: Effect::Write(Payload::new(vec![seq as u8; len].into())),
        ..record(seq)
    };
    let records: Vec<_> = [1, 64 << 10, (64 << 10) + 1, (1 << 20) - 56, 1 << 20, 32 << 20, 4096]
        .into_iter()
        .zip(1..)
        .map(|(len, seq)| large(seq, len))
        .collect();
    for record in &records {
        journal.append(record, || record.seq).unwrap();
    }
    let mut reader = reader(dir.path(), FIRST, 1);
    for record in &records {
        assert_eq!(reader.read().unwrap(), *record);
    }
}

#[test]
fn room_is_given_back_with_the_last_record_of_a_segment_and_not_before() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = begin(dir.path());
    let positions = append(&mut journal, 1..=60);
    let segment_of = |seq: usize| positions[seq - 1].segment;
    let last = segment_of(60);
    for durable in 1..=60usize {
        journal.release(Seq(durable as u64)).unwrap();
        let first_kept = if durable == 60 { last } else { segment_of(durable + 1) };
        assert_eq!(numbers(dir.path()), (first_kept..=last).collect::<Vec<_>>(), "{durable}");
        let on_disk: u64 = numbers(dir.path())
            .iter()
            .map(|n| fs::metadata(path_of(dir.path(), *n)).unwrap().len())
            .sum();
        assert_eq!(journal.used_bytes(), on_disk);
    }
    // Numbers are not used twice, so a reader never takes a new segment for an old one.
    append(&mut journal, 61..=100);
    journal.release(Seq(100)).unwrap();
    assert!(numbers(dir.path()).len() <= 1);
    let at = append(&mut journal, 101..=101)[0];
    assert!(at.segment >= last);
    assert_eq!(reader(dir.path(), at, 101).read().unwrap(), record(101));
}

#[test]
fn a_steady_stream_takes_no_more_than_two_segments() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = begin(dir.path());
    for seq in 1..=2000 {
        append(&mut journal, seq..=seq);
        journal.release(Seq(seq)).unwrap();
        assert!(journal.used_bytes() < 2 * (SEGMENT_BYTES + 10_000), "{seq}");
    }
}

/// The end of the last segment at any byte: whole records come, and then nothing.
#[test]
fn a_torn_tail_is_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::begin(dir.path().to_owned(), 1 << 20, RUN, BOOT, IDENTITY).unwrap();
    let positions = append(&mut journal, 1..=12);
    let path = path_of(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    for len in HEADER_BYTES..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        let mut reader = reader(dir.path(), FIRST, 1);
        let mut last = 0;
        while let Some(read) = reader.read_if_whole().unwrap() {
            last += 1;
            assert_eq!(read, record(last));
        }
        let ends = |seq: usize| positions.get(seq).map_or(whole.len(), |at| at.offset as usize);
        let expected = (0..12).take_while(|nth| ends(nth + 1) <= len).count();
        assert_eq!(last as usize, expected, "{len} bytes");
    }
}

/// Each byte, flipped: what comes before it is read, and nothing that was not written is.
#[test]
fn a_damaged_byte_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::begin(dir.path().to_owned(), 1 << 20, RUN, BOOT, IDENTITY).unwrap();
    append(&mut journal, 1..=6);
    let path = path_of(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        fs::write(&path, &bytes).unwrap();
        let mut reader = reader(dir.path(), FIRST, 1);
        let mut last = 0;
        let failed = loop {
            match reader.read() {
                Ok(read) => {
                    last += 1;
                    assert_eq!(read, record(last), "byte {at}");
                }
                Err(error) => break error,
            }
        };
        assert!(last < 6, "byte {at} is covered by no checksum");
        assert!(failed.to_string().contains("000000000001.segment"), "{failed}");
    }
}

#[test]
fn records_that_are_missing_or_of_another_place_are_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = begin(dir.path());
    let positions = append(&mut journal, 1..=60);
    let wrong = reader(dir.path(), positions[10], 10).read().unwrap_err();
    assert!(wrong.to_string().contains("seq 11 in the place of 10"), "{wrong}");
    // A segment in the middle is gone: the one before it seems to be the last.
    let second = positions.iter().position(|at| at.segment == 2).unwrap() as u64;
    fs::remove_file(path_of(dir.path(), 2)).unwrap();
    let mut reader_ = reader(dir.path(), FIRST, 1);
    (1..=second).for_each(|seq| assert_eq!(reader_.read().unwrap(), record(seq)));
    assert!(reader_.read().is_err());
    // The third in its place says that it is the third.
    fs::rename(path_of(dir.path(), 3), path_of(dir.path(), 2)).unwrap();
    let error = reader_.read().unwrap_err();
    assert!(error.to_string().contains("another segment"), "{error}");
}

#[test]
fn garbage_and_other_versions_are_no_segments() {
    let header = Header {
        incarnation: RUN,
        number: 1,
        first: Seq(1),
        redo_from: Seq(1),
        boot: BOOT,
        identity: IDENTITY,
    };
    let bytes = header.encode();
    assert_eq!(Header::decode(&bytes), Ok(header));
    assert_eq!(Header::decode(&bytes[..HEADER_BYTES - 1]), Err(Unusable::Short));
    assert_eq!(Header::decode(&[0; HEADER_BYTES]), Err(Unusable::Magic));
    let mut newer = bytes;
    newer[8] = 2;
    assert_eq!(Header::decode(&newer), Err(Unusable::Version(2)));
    for at in 12..HEADER_BYTES {
        let mut damaged = bytes;
        damaged[at] ^= 1;
        assert_eq!(Header::decode(&damaged), Err(Unusable::Damaged), "byte {at}");
    }
}

#[test]
fn a_start_removes_what_was_there_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    append(&mut begin(dir.path()), 1..=60);
    let other = dir.path().join("notes.txt");
    fs::write(&other, "somebody's").unwrap();
    let journal = begin(dir.path());
    assert_eq!(numbers(dir.path()), [0u64; 0]);
    assert_eq!(journal.used_bytes(), 0);
    assert!(other.exists());
}

/// The disk is full: the record is not taken, what was before is read, and after a restart all is as new.
#[test]
fn what_cannot_be_written_is_said_and_what_was_before_stays() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = begin(dir.path());
    append(&mut journal, 1..=60);
    let last = *numbers(dir.path()).last().unwrap();
    // The next segment cannot be begun.
    fs::create_dir(path_of(dir.path(), last + 1)).unwrap();
    let mut written = 60;
    let error = loop {
        match journal.append(&record(written + 1), || Seq(written + 1)) {
            Ok(_) => written += 1,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains(&format!("{:012}.segment", last + 1)), "{error}");
    let mut reader = reader(dir.path(), FIRST, 1);
    (1..=written).for_each(|seq| assert_eq!(reader.read().unwrap(), record(seq)));
    fs::remove_dir(path_of(dir.path(), last + 1)).unwrap();
    journal.restart().unwrap();
    assert_eq!((journal.used_bytes(), numbers(dir.path()).len()), (0, 0));
    let at = append(&mut journal, 500..=500)[0];
    assert_eq!(
        super::Reader::new(dir.path().to_owned(), at, Seq(500)).read().unwrap(),
        record(500)
    );
}

#[test]
fn the_sizes_of_segments_keep_the_bound() {
    const MIB: u64 = 1 << 20;
    assert_eq!(segment_bytes(64 * MIB), 16 * MIB);
    assert_eq!(segment_bytes(1024 * MIB), 16 * MIB);
    assert_eq!(segment_bytes(64 * 1024 * MIB), 1024 * MIB);
}
