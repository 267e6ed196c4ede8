//! Logs that PostgreSQL does not write: each fault has its name, its place, and nothing behind it is handed out.

use super::*;
use tidelock_wal::{Fault, Kind, RECORD_BYTES_MAX, Xid};
use writer::{LOG, PAGE, SEGMENT, SYSTEM, TRANSACTIONS, part, sealed};

/// A record on the first page, one that reaches onto the second, one that reaches into the next segment.
fn log() -> Writer {
    let mut writer = Writer::new(START + PAGE);
    writer.other(100);
    writer.other(10_000);
    writer.other(15_000);
    writer.other(100);
    writer
}

/// The offset of the page with this number, counted from the first.
fn page(number: usize) -> usize {
    number * PAGE as usize
}

/// The fault that is found in a log at a position, counted from its start.
fn found(writer: &Writer, bytes: &[u8]) -> (usize, Fault, usize) {
    let ends = [usize::MAX, 1, 1000].map(|piece| {
        let (items, end) = read(reader(writer, writer.start), bytes, &[piece]);
        assert_eq!(items, writer.items[..items.len()]);
        let error = end.expect("the log has a fault");
        ((error.lsn.0 - writer.start.0) as usize, error.fault, items.len())
    });
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    let text = WalError { lsn: Lsn(0x16_b374_d848), fault: ends[0].1 }.to_string();
    assert!(text.starts_with("log at 16/B374D848: "), "{text}");
    ends[0]
}

/// The fault of a log in which some bytes were replaced.
fn with(at: usize, new: &[u8]) -> (usize, Fault, usize) {
    let writer = log();
    let mut bytes = writer.bytes.clone();
    bytes[at..at + new.len()].copy_from_slice(new);
    found(&writer, &bytes)
}

#[test]
fn pages_are_verified() {
    let second = page(1);
    let magic = |magic: u16| with(second, &magic.to_le_bytes());
    assert_eq!(magic(0xd10d), (second, Fault::Magic { magic: 0xd10d }, 1));
    assert_eq!(magic(0), (second, Fault::Magic { magic: 0 }, 1));
    let changed = Fault::VersionChanged { magic: 0xd116, before: 0xd110 };
    assert_eq!(magic(0xd116), (second, changed, 1));

    // Unknown; a long head elsewhere; both a rest and something in its place; a rest of which nothing is said.
    for flags in [0x11_u16, 3, 9, 0, 8] {
        let fault = Fault::PageFlags { flags };
        assert_eq!(with(second + 2, &flags.to_le_bytes()), (second, fault, 1));
    }
    // A rest of no bytes.
    let fault = Fault::PageFlags { flags: 1 };
    assert_eq!(with(2, &[1, 0]), (0, fault, 0));
    // A short head where a segment begins, which is the fourth page.
    let fourth = page(3);
    assert_eq!(with(fourth + 2, &[1, 0]), (fourth, Fault::PageFlags { flags: 1 }, 2));

    let address = Lsn(START);
    assert_eq!(with(second + 8, &START.to_le_bytes()), (second, Fault::PageAddress { address }, 1));
    let timeline = Fault::PageTimeline { found: TimelineId(2), expected: TimelineId(1) };
    assert_eq!(with(second + 4, &[2, 0, 0, 0]), (second, timeline, 1));
}

#[test]
fn segments_are_verified() {
    let head = page(3);
    let system = Fault::System { found: 7, expected: SYSTEM };
    assert_eq!(with(head + 24, &7_u64.to_le_bytes()), (head, system, 2));
    let sizes =
        |segment_bytes, page_bytes| Fault::Sizes { segment_bytes, page_bytes, expected: SEGMENT };
    assert_eq!(with(head + 32, &(16_u32 << 20).to_le_bytes()), (head, sizes(16 << 20, 8192), 2));
    assert_eq!(with(head + 36, &16384_u32.to_le_bytes()), (head, sizes(SEGMENT, 16384), 2));
}

#[test]
fn all_segments_are_of_one_system() {
    let mut writer = Writer::new(2 * u64::from(SEGMENT));
    writer.other(SEGMENT as usize);
    let second = writer.bytes.len() - (writer.at() % u64::from(SEGMENT)) as usize;
    writer.bytes[second + 24] ^= 1;
    let reader = WalReader::new(writer.start, SEGMENT, first()).unwrap();
    let (_, end) = read(reader, &writer.bytes, &[5000]);
    assert_eq!(end.unwrap().fault, Fault::System { found: SYSTEM ^ 1, expected: SYSTEM });
}

#[test]
fn a_page_goes_on_with_exactly_the_rest_of_the_record_before() {
    let second = page(1);
    let writer = log();
    let left = u32::from_le_bytes(writer.bytes[second + 16..second + 20].try_into().unwrap());
    for wrong in [left - 1, left + 1, u32::MAX] {
        let fault = Fault::Continuation { found: wrong, expected: left };
        assert_eq!(with(second + 16, &wrong.to_le_bytes()), (second, fault, 1));
    }
    // A new record where the rest of one is to be.
    let mut bytes = writer.bytes.clone();
    bytes[second + 2] = 0;
    bytes[second + 16..second + 20].fill(0);
    let fault = Fault::Continuation { found: 0, expected: left };
    assert_eq!(found(&writer, &bytes), (second, fault, 1));

    // A rest where no record is unfinished.
    let mut writer = Writer::new(START);
    writer.other(PAGE as usize - 48);
    writer.other(100);
    let mut bytes = writer.bytes.clone();
    bytes[second + 2] = 1;
    bytes[second + 16] = 9;
    let fault = Fault::Continuation { found: 9, expected: 0 };
    assert_eq!(found(&writer, &bytes), (second, fault, 1));
    // The same at the start, if the caller knows of a record that ended there.
    let from = |reader: WalReader| read(reader, &bytes[second..], &[100]).1;
    let start = Lsn(START + PAGE);
    let error = WalError { lsn: start, fault };
    assert_eq!(from(reader(&writer, start).after(writer.items[0].begin)), Some(error));
    // A rest that is longer than a record can be.
    bytes[second + 16..second + 20].copy_from_slice(&(RECORD_BYTES_MAX + 1).to_le_bytes());
    let fault = Fault::Continuation { found: RECORD_BYTES_MAX + 1, expected: 0 };
    let end = read(reader(&writer, start), &bytes[second..], &[100]).1;
    assert_eq!(end, Some(WalError { lsn: start, fault }));
}

#[test]
fn a_stream_begins_within_one_record_at_most() {
    let mut writer = Writer::new(START);
    writer.other(2 * (PAGE as usize - 24) - 24);
    assert_eq!(writer.at(), START + 2 * PAGE);
    writer.other(100);
    let mut bytes = writer.bytes[page(1)..].to_vec();
    bytes[page(1) + 2] = 1;
    bytes[page(1) + 16] = 9;
    let (items, end) = read(reader(&writer, Lsn(START + PAGE)), &bytes, &[100]);
    assert_eq!((items.len(), &items[0].kind), (1, &Kind::Rest));
    let fault = Fault::Continuation { found: 9, expected: 0 };
    assert_eq!(end, Some(WalError { lsn: Lsn(START + 2 * PAGE), fault }));
}

#[test]
fn records_are_verified() {
    let writer = log();
    let begin = (writer.items[1].begin.0 - writer.start.0) as usize;
    for bytes in [0, 23, RECORD_BYTES_MAX + 1, u32::MAX] {
        let fault = Fault::RecordLength { bytes };
        assert_eq!(with(begin, &bytes.to_le_bytes()), (begin, fault, 1));
    }
    let (first, expected) = (Lsn(8), writer.items[0].begin);
    assert_eq!(
        with(begin + 8, &8_u64.to_le_bytes()),
        (begin, Fault::Link { found: first, expected }, 1)
    );
    // The record's own place, before which there is nothing to compare with.
    let begin_of_first = writer.items[0].begin;
    let fault = Fault::LinkForwards { found: begin_of_first };
    let at = (begin_of_first.0 - writer.start.0) as usize;
    assert_eq!(with(at + 8, &begin_of_first.0.to_le_bytes()), (at, fault, 0));
    let from = |last| {
        let start = writer.items[0].end;
        let rest = &writer.bytes[(start.0 - writer.start.0) as usize..];
        read(reader(&writer, start).after(last), rest, &[100]).1
    };
    assert_eq!(from(expected), None);
    let fault = Fault::Link { found: expected, expected: Lsn(8) };
    assert_eq!(from(Lsn(8)), Some(WalError { lsn: writer.items[1].begin, fault }));

    // Transaction, info, manager, unused, checksum, data on the first and the last page.
    for at in [4, 16, 17, 18, 19, 20, 24, 9000] {
        let (place, fault, items) = with(begin + at, &[0xa5]);
        assert!(matches!(fault, Fault::Checksum { .. }), "{at}: {fault}");
        assert_eq!((place, items), (begin, 1));
    }
}

/// The checksum comes first: what a damaged record says is not looked at.
#[test]
fn damage_is_called_damage() {
    let mut writer = Writer::new(START);
    writer.record(TRANSACTIONS, 0, 800, &part(&[1; 8]), Kind::Other);
    // The number that says that content follows.
    let data = writer.bytes.len() - 16;
    assert_eq!(writer.bytes[data], 255);
    writer.bytes[data] = 17;
    writer.items.clear();
    let (_, fault, _) = found(&writer, &writer.bytes);
    assert!(matches!(fault, Fault::Checksum { .. }), "{fault}");
}

#[test]
fn a_record_of_the_greatest_length_is_read_and_not_kept() {
    let mut writer = Writer::new(START);
    let mut head = sealed(10, 0, 700, writer.before, &[]);
    head[..4].copy_from_slice(&RECORD_BYTES_MAX.to_le_bytes());
    writer.other(0);
    let begin = (writer.items[0].begin.0 - START) as usize;
    writer.bytes[begin..begin + 24].copy_from_slice(&head);
    let mut reader = reader(&writer, writer.start);
    reader.push(&writer.bytes);
    reader.push(&[0; 1000]);
    assert_eq!((reader.failed(), reader.next()), (None, None));
    // PostgreSQL's `MaxAllocSize`.
    assert_eq!(RECORD_BYTES_MAX, 0x3fff_ffff);
}

#[test]
fn a_segment_has_nothing_behind_a_switch() {
    let mut writer = Writer::new(START);
    writer.other(10);
    writer.switch();
    let switch = (writer.items[1].begin.0 - START) as usize;
    for at in [switch + 24, writer.bytes.len() - 1] {
        let mut bytes = writer.bytes.clone();
        bytes[at] = 1;
        assert_eq!(found(&writer, &bytes), (switch, Fault::BehindSwitch, 1));
    }
}

#[test]
fn what_stands_in_the_place_of_a_record_names_it() {
    let given_up = |change: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new(START);
        writer.other(10);
        writer.given_up(2);
        writer.bytes.truncate((writer.items[2].begin.0 - START) as usize);
        writer.items.truncate(2);
        writer.before = writer.items[0].begin;
        change(&mut writer);
        let (_, fault, items) = found(&writer, &writer.bytes);
        assert_eq!(items, 2);
        (fault, writer.items[1].begin)
    };
    let overwrites = |writer: &mut Writer, lsn: Lsn| {
        let content = [&lsn.0.to_le_bytes()[..], &[0; 8]].concat();
        writer.content(LOG, 0xd0, 0, &content, Kind::Overwrites { given_up: lsn });
    };
    let (fault, expected) = given_up(&|writer| overwrites(writer, Lsn(8)));
    assert_eq!(fault, Fault::Overwrites { found: Lsn(8), expected });
    assert_eq!(given_up(&|writer| writer.other(10)).0, Fault::NotOverwritten);

    // A record in the place of one, where none was given up.
    let mut writer = Writer::new(START);
    writer.other(10);
    overwrites(&mut writer, Lsn(START));
    assert_eq!(found(&writer, &writer.bytes).1, Fault::NotOverwritten);
    let mut writer = Writer::new(START);
    writer.other(PAGE as usize - 48);
    writer.other(10);
    writer.bytes[page(1) + 2] = 8;
    assert_eq!(found(&writer, &writer.bytes), (page(1), Fault::NotOverwritten, 1));
}

#[test]
fn a_server_with_another_history_is_noticed() {
    // The page says so first, if there is one.
    let mut writer = Writer::new(START + 64);
    writer.other(10);
    let begin = writer.bytes.len();
    writer.branch(2);
    let fault = Fault::RecordTimeline { found: TimelineId(2), expected: TimelineId(1) };
    assert_eq!(found(&writer, &writer.bytes), (begin, fault, 1));
}

#[test]
fn starts_and_sizes_that_cannot_be_are_refused() {
    let new = |start, segment| {
        WalReader::new(Lsn(start), segment, first()).err().map(|error| error.fault)
    };
    for bytes in [0, 1, 8192, 1 << 19, (1 << 20) + 1, 3 << 20, 1 << 31, u32::MAX] {
        assert_eq!(new(START, bytes), Some(Fault::SegmentSize { bytes }));
    }
    for start in [1, 8, 16, 32, 8188, 8192 + 16, 8192 + 28, u64::MAX, u64::MAX - 7, 1 << 63] {
        assert_eq!(new(start, SEGMENT), Some(Fault::Start), "{start}");
    }
    for start in [0, 40, 8184, 8192, 8192 + 24, 1 << 62] {
        assert_eq!(new(start, SEGMENT), None, "{start}");
    }
    assert_eq!((new(START, 1 << 20), new(START, 1 << 30)), (None, None));
}

#[test]
fn a_reader_that_failed_stays_failed() {
    let writer = log();
    let mut bytes = writer.bytes.clone();
    let begin = (writer.items[1].begin.0 - writer.start.0) as usize;
    bytes[begin + 5] ^= 1;
    let mut reader = reader(&writer, writer.start);
    reader.push(&bytes);
    let error = reader.failed();
    assert!(error.is_some());
    assert_eq!(reader.next(), Some(Ok(writer.items[0].clone())));
    assert_eq!(reader.next(), error.map(Err));
    assert_eq!(reader.next(), None);
    reader.push(&writer.bytes);
    assert_eq!((reader.next(), reader.next()), (error.map(Err), None));
}

#[test]
fn faults_have_names() {
    let xid = Xid(1);
    assert_eq!(Fault::Content { xid }.kind(), "content");
    assert_eq!(Fault::BehindSwitch.kind(), "behind-switch");
    assert_eq!(Fault::Checksum { found: 1, computed: 2 }.kind(), "checksum");
}
