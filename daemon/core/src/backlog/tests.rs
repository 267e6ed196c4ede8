//! The files: what is written comes back in order, room is given back, and nothing that is damaged, torn or somebody
//! else's is taken for a record.

use super::format::{HEADER_BYTES, path_of};
use super::*;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, Seq, WriterId};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::unsynced::Directory;

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
        body: DiskChange {
            disk: DiskId(0),
            offset: if idle { 0 } else { 4096 * seq },
            copy: false,
            flushed: seq.is_multiple_of(7),
            effect,
        },
    }
}

fn begin(directory: &Path) -> Journal {
    Journal::begin(Directory::at(directory), SEGMENT_BYTES, RUN, BOOT, IDENTITY).unwrap()
}

fn append(journal: &mut Journal, seqs: std::ops::RangeInclusive<u64>) -> Vec<Position> {
    seqs.map(|seq| journal.append(&record(seq), || Seq(seq)).unwrap()).collect()
}

fn reader(directory: &Path, at: Position, next: u64) -> Reader {
    Reader::keyed(Directory::at(directory), at, Seq(next), IDENTITY)
}

/// Segments by number, with their paths.
fn segments_in(directory: &Path) -> Vec<(u64, PathBuf)> {
    let numbers = journal::segments_in(&*Directory::at(directory)).unwrap();
    numbers.into_iter().map(|number| (number, path_of(directory, number))).collect()
}

fn numbers(directory: &Path) -> Vec<u64> {
    segments_in(directory).into_iter().map(|(number, _)| number).collect()
}

fn find(directory: &Path, expected: &Expected) -> Result<Left, WhyNot> {
    super::find(&Directory::at(directory), expected)
}

fn mark(directory: &Path, sound: bool) -> Result<(), BacklogError> {
    super::mark(&*Directory::at(directory), sound)
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
    let mut journal =
        Journal::begin(Directory::at(dir.path()), 64 << 20, RUN, BOOT, IDENTITY).unwrap();
    let large = |seq: u64, len: usize| Record {
        body: DiskChange {
            effect: Effect::Write(Payload::new(vec![seq as u8; len].into())),
            ..record(seq).body
        },
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

/// The end of the last segment at every third byte: whole records come, and then nothing.
#[test]
fn a_torn_tail_is_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal =
        Journal::begin(Directory::at(dir.path()), 1 << 20, RUN, BOOT, IDENTITY).unwrap();
    let positions = append(&mut journal, 1..=12);
    let path = path_of(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    for len in (HEADER_BYTES..whole.len()).step_by(3).rev() {
        file.set_len(len as u64).unwrap();
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
    let mut journal =
        Journal::begin(Directory::at(dir.path()), 1 << 20, RUN, BOOT, IDENTITY).unwrap();
    append(&mut journal, 1..=6);
    let path = path_of(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    for at in 0..whole.len() {
        file.write_all_at(&[whole[at] ^ 0x10], at as u64).unwrap();
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
        file.write_all_at(&whole[at..=at], at as u64).unwrap();
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
    assert_eq!(Header::decode(&bytes, &IDENTITY), Ok(header));
    assert_eq!(Header::decode(&bytes[..HEADER_BYTES - 1], &IDENTITY), Err(Unusable::Short));
    assert_eq!(Header::decode(&[0; HEADER_BYTES], &IDENTITY), Err(Unusable::Magic));
    let mut newer = bytes;
    newer[8] = 3;
    assert_eq!(Header::decode(&newer, &IDENTITY), Err(Unusable::Version(3)));
    assert_eq!(Header::decode(&bytes, &[8; 32]), Err(Unusable::Foreign));
    for at in 12..HEADER_BYTES {
        let mut damaged = bytes;
        damaged[at] ^= 1;
        assert_eq!(Header::decode(&damaged, &IDENTITY), Err(Unusable::Damaged), "byte {at}");
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
        super::Reader::new(Directory::at(dir.path()), at, Seq(500)).read().unwrap(),
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

// ---- what a killed daemon leaves

const EXPECTED: Expected =
    Expected { incarnation: RUN, epoch: Epoch(2), boot: BOOT, identity: IDENTITY };

/// Segments as a killed daemon leaves them that had appended so many records, and that may be gone on with.
fn left_by(directory: &Path, records: u64) -> Vec<Position> {
    let mut journal = begin(directory);
    let positions = append(&mut journal, 1..=records);
    journal.set_sound(true).unwrap();
    positions
}

fn why_not(directory: &Path, expected: &Expected) -> String {
    find(directory, expected).unwrap_err().to_string()
}

fn check_whole(left: &Left, first: u64, last: u64) {
    assert_eq!((left.first(), left.last()), (Seq(first), Seq(last)));
    assert_eq!((left.incarnation(), left.last_hlc), (RUN, record(last).hlc));
    let mut reader = left.reader();
    for (waiting, seq) in left.waiting.iter().zip(first..) {
        let written = record(seq);
        let payload_bytes = written.payload().map_or(0, |p| p.data().len() as u64);
        assert_eq!((waiting.seq, waiting.payload_bytes), (Seq(seq), payload_bytes));
        assert_eq!(waiting.is_of_us, written.body.effect == Effect::Idle);
        assert_eq!(reader.read().unwrap(), written);
    }
}

#[test]
fn the_next_process_goes_on_where_a_killed_one_was() {
    let dir = tempfile::tempdir().unwrap();
    left_by(dir.path(), 30);
    for next in 1..=4 {
        let left = find(dir.path(), &EXPECTED).unwrap();
        check_whole(&left, 1, 30 * next);
        let mut journal = left.go_on(SEGMENT_BYTES).unwrap();
        append(&mut journal, 30 * next + 1..=30 * (next + 1));
    }
    let left = find(dir.path(), &EXPECTED).unwrap();
    let mut journal = left.go_on(SEGMENT_BYTES).unwrap();
    journal.release(Seq(100)).unwrap();
    let left = find(dir.path(), &EXPECTED).unwrap();
    assert!(left.first() > Seq(80) && left.first() <= Seq(101), "{}", left.first());
    check_whole(&left, left.first().0, 150);
}

/// The daemon is killed within an append, at many bytes of the last two segments: what was whole is gone on with.
#[test]
fn a_torn_tail_is_cut_off_and_gone_on_behind() {
    let dir = tempfile::tempdir().unwrap();
    let positions = left_by(dir.path(), 24);
    let last = positions[23].segment;
    assert!(last >= 3);
    for segment in [last, last - 1] {
        let path = path_of(dir.path(), segment);
        let whole = fs::read(&path).unwrap();
        for len in (0..whole.len()).step_by(131) {
            let copy = tempfile::tempdir().unwrap();
            for (number, path) in segments_in(dir.path()) {
                if number <= segment {
                    fs::copy(&path, path_of(copy.path(), number)).unwrap();
                }
            }
            fs::write(path_of(copy.path(), segment), &whole[..len]).unwrap();
            mark(copy.path(), true).unwrap();
            let is_whole = |at: &Position, next: Option<&Position>| {
                let ends = next.filter(|next| next.segment == at.segment);
                let ends = ends.map_or(whole.len(), |next| next.offset as usize);
                at.segment < segment || (at.segment == segment && ends <= len)
            };
            let expected =
                (0..24).take_while(|n| is_whole(&positions[*n], positions.get(n + 1))).count();
            let left = find(copy.path(), &EXPECTED).unwrap();
            check_whole(&left, 1, expected as u64);
            let mut journal = left.go_on(SEGMENT_BYTES).unwrap();
            let next = expected as u64 + 1;
            append(&mut journal, next..=next + 3);
            check_whole(&find(copy.path(), &EXPECTED).unwrap(), 1, next + 3);
        }
    }
}

#[test]
fn what_cannot_be_believed_is_not_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(why_not(&dir.path().join("missing"), &EXPECTED), WhyNot::Nothing.to_string());
    assert_eq!(why_not(dir.path(), &EXPECTED), WhyNot::Nothing.to_string());
    left_by(dir.path(), 40);
    assert!(find(dir.path(), &EXPECTED).is_ok());
    let boot = Expected { boot: [4; 16], ..EXPECTED };
    assert_eq!(why_not(dir.path(), &boot), WhyNot::Boot.to_string());
    for foreign in [
        Expected { incarnation: Incarnation(8), ..EXPECTED },
        Expected { identity: [8; 32], ..EXPECTED },
        Expected { epoch: Epoch(3), ..EXPECTED },
    ] {
        assert_eq!(why_not(dir.path(), &foreign), WhyNot::Foreign.to_string());
    }
    mark(dir.path(), false).unwrap();
    assert_eq!(why_not(dir.path(), &EXPECTED), WhyNot::Unsound.to_string());
    mark(dir.path(), true).unwrap();
    let second = path_of(dir.path(), 2);
    let bytes = fs::read(&second).unwrap();
    fs::remove_file(&second).unwrap();
    assert_eq!(why_not(dir.path(), &EXPECTED), WhyNot::Gap.to_string());
    // In the middle nothing is torn by a kill.
    fs::write(&second, &bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(why_not(dir.path(), &EXPECTED), WhyNot::Gap.to_string());
    fs::write(&second, &bytes[..HEADER_BYTES]).unwrap();
    assert!(find(dir.path(), &EXPECTED).is_err());
    let mut newer = bytes.clone();
    newer[8] = 3;
    fs::write(&second, &newer).unwrap();
    assert!(why_not(dir.path(), &EXPECTED).contains("version 3"));
    fs::write(&second, &bytes).unwrap();
    assert!(find(dir.path(), &EXPECTED).is_ok(), "all of it is there again");
}

/// Many bytes of all segments, flipped one at a time.
#[test]
fn damage_is_never_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    left_by(dir.path(), 24);
    for (number, path) in segments_in(dir.path()) {
        let bytes = fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(if number == 1 { 29 } else { 301 }) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            fs::write(&path, &damaged).unwrap();
            assert!(find(dir.path(), &EXPECTED).is_err(), "byte {at} of {number}");
        }
        fs::write(&path, &bytes).unwrap();
    }
}

/// Somebody who can write to the directory and has not the key changes records and headers, with right checksums.
#[test]
fn what_another_has_written_is_not_gone_on_with() {
    use tidelock_protocol::record::crc32c;
    let dir = tempfile::tempdir().unwrap();
    let positions = left_by(dir.path(), 24);
    let path = path_of(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    let is_refused = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).unwrap();
        let error = find(dir.path(), &EXPECTED).unwrap_err().to_string();
        assert!(error.contains("run of the daemon"), "{what}: {error}");
    };
    // The first record's write, with other data.
    let (at, end) = (positions[1].offset as usize, positions[2].offset as usize);
    let Effect::Write(payload) = record(2).body.effect else { panic!("a write") };
    let other = Payload::new(vec![0xee; payload.data().len()].into());
    let mut encoded = bytes::BytesMut::new();
    let forged = Record {
        body: DiskChange { effect: Effect::Write(other.clone()), ..record(2).body },
        ..record(2)
    };
    forged.encode_head(&mut encoded);
    encoded.extend_from_slice(other.data());
    let mut bytes = whole.clone();
    bytes[at..end - format::TAG_BYTES].copy_from_slice(&encoded);
    is_refused(&bytes, "another payload");
    // From where records are done again.
    let mut bytes = whole.clone();
    bytes[40] ^= 1;
    let crc = crc32c(&bytes[..HEADER_BYTES - 4]);
    bytes[HEADER_BYTES - 4..HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    is_refused(&bytes, "another header");
    fs::write(&path, &whole).unwrap();
    find(dir.path(), &EXPECTED).unwrap();
}

/// A power loss: the durable image has any part of each file, in any mixture. The boot is another one, so none of it is
/// believed, and a start clears it away.
#[test]
fn nothing_of_before_a_power_loss_is_believed() {
    let dir = tempfile::tempdir().unwrap();
    left_by(dir.path(), 24);
    let live: Vec<_> = segments_in(dir.path());
    let after = Expected { boot: [4; 16], ..EXPECTED };
    for part in 0..200usize {
        let durable = tempfile::tempdir().unwrap();
        for (nth, (number, path)) in live.iter().enumerate() {
            let mut bytes = fs::read(path).unwrap();
            // Sectors that were not written back are old bytes.
            for (sector, data) in bytes.chunks_mut(512).enumerate() {
                if (part * 31 + sector * 7 + nth * 3) % 5 < part % 5 {
                    data.fill(0);
                }
            }
            bytes.truncate(bytes.len() * (part % 8 + nth) / 8);
            if part >> nth & 1 == 0 {
                fs::write(path_of(durable.path(), *number), bytes).unwrap();
            }
        }
        if part % 3 > 0 {
            mark(durable.path(), true).unwrap();
        }
        assert!(find(durable.path(), &after).is_err(), "part {part}");
        Journal::begin(
            Directory::at(durable.path()),
            SEGMENT_BYTES,
            Incarnation(8),
            [4; 16],
            IDENTITY,
        )
        .unwrap();
        assert_eq!(why_not(durable.path(), &after), WhyNot::Nothing.to_string());
        assert!(!durable.path().join("sound").exists());
    }
}
