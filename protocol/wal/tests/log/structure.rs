//! Pages, segments, timelines, switches, and records that were given up.

use super::*;
use tidelock_wal::{Kind, TimelineChange, Version, Xid};
use writer::{HEAP_INSERT, LOG, PAGE, SEGMENT};

#[test]
fn records_fill_pages_and_segments_to_the_last_byte() {
    for left in [0, 8, 16, 24, 32] {
        let mut writer = Writer::new(START + 64);
        for _ in 0..6 {
            // A long head, and then a short one in most.
            let used = if writer.at().is_multiple_of(u64::from(SEGMENT)) { 40 } else { 24 };
            let used = if writer.at().is_multiple_of(PAGE) { used } else { writer.at() % PAGE };
            writer.other((PAGE - used - 24 - left) as usize);
            assert_eq!(writer.at() % PAGE, (PAGE - left) % PAGE);
            writer.other(16);
        }
        assert!(writer.at() > START + 4 * PAGE);
        check(&writer);
    }
}

#[test]
fn a_record_may_take_many_pages_and_more_than_a_segment() {
    let mut writer = Writer::new(START);
    writer.other(1);
    writer.other(SEGMENT as usize + 12_345);
    writer.other(1);
    check(&writer);
}

#[test]
fn the_rest_of_a_segment_behind_a_switch_is_zeroes() {
    // Switches anywhere on a page; split by a page, by a segment; up to the last byte of a segment.
    let last_page = START + 3 * PAGE;
    for at in [START + 40, START + PAGE - 16, START + PAGE - 24, last_page + 8168, last_page + 8176]
    {
        let mut writer = Writer::new(at);
        writer.switch();
        assert_eq!(writer.at() % u64::from(SEGMENT), 0);
        let segments = if at == last_page + 8176 { 4 } else { 3 };
        assert_eq!(writer.at(), segments * u64::from(SEGMENT));
        writer.other(100);
        check(&writer);
    }
}

#[test]
fn each_version_has_its_magic() {
    let versions = [(0xd110, Version::V15), (0xd113, Version::V16), (0xd116, Version::V17)];
    for (magic, version) in versions {
        let mut writer = Writer::new(START);
        writer.magic = magic;
        writer.other(10_000);
        check(&writer);
        let mut reader = reader(&writer, writer.start);
        assert_eq!(reader.version(), None);
        reader.push(&writer.bytes);
        assert_eq!((reader.version(), version.magic()), (Some(version), magic));
    }
}

#[test]
fn segments_name_their_system() {
    let mut writer = Writer::new(START + 3 * PAGE);
    writer.other(100);
    let before = writer.bytes.len();
    writer.other(20_000);
    let mut reader = WalReader::new(writer.start, SEGMENT, first()).unwrap();
    reader.push(&writer.bytes[..before]);
    assert_eq!(reader.system(), None);
    reader.push(&writer.bytes[before..]);
    assert_eq!((reader.failed(), reader.system()), (None, Some(writer::SYSTEM)));
}

#[test]
fn a_record_that_was_given_up_counts_for_nothing() {
    for pages in 1..6 {
        for begin in [64, PAGE - 16, PAGE - 8] {
            let mut writer = Writer::new(START + 32);
            writer.other((begin - 32 - 24) as usize);
            writer.given_up(pages);
            writer.other(100);
            check(&writer);
            let kinds: Vec<_> = writer.items.iter().map(|item| item.kind.clone()).collect();
            let given_up = writer.items[1].begin;
            assert_eq!(
                kinds,
                [Kind::Other, Kind::GivenUp, Kind::Overwrites { given_up }, Kind::Other]
            );
        }
    }
}

#[test]
fn a_stream_may_begin_with_the_page_that_gives_up_the_rest_of_a_record() {
    let mut writer = Writer::new(START);
    writer.other(10);
    writer.given_up(3);
    writer.other(10);
    for (page, rests) in [(START + PAGE, 1), (START + 2 * PAGE, 1), (START + 3 * PAGE, 0)] {
        let from = (page - START) as usize;
        let (found, end) = read(reader(&writer, Lsn(page)), &writer.bytes[from..], &[1000]);
        assert_eq!(end, None);
        let rest =
            WalItem { begin: Lsn(page), end: writer.items[1].end, xid: Xid(0), kind: Kind::Rest };
        assert_eq!(found[..rests], [rest][..rests]);
        assert_eq!(found[rests..], writer.items[2..]);
    }
    // The same behind the head of that page.
    let begin = writer.items[2].begin;
    let from = (begin.0 - START) as usize;
    let (found, end) = read(reader(&writer, begin), &writer.bytes[from..], &[1000]);
    assert_eq!((&found[..], end), (&writer.items[2..], None));
}

/// Writes timeline 1 up to some position, and timeline 2 from there on.
fn branched(at: u64) -> (Writer, TimelineHistory) {
    let mut writer = Writer::new(START);
    writer.other((at - START - 48) as usize);
    assert_eq!(writer.at(), at);
    let history = format!("1\t{}\tno reason\n", Lsn(at));
    writer.branch(2);
    writer.other(20_000);
    (writer, TimelineHistory::parse(TimelineId(2), history.as_bytes()).unwrap())
}

#[test]
fn a_log_changes_its_timeline_where_the_history_says() {
    for at in [START + 400, START + PAGE - 8, START + PAGE] {
        let (writer, history) = branched(at);
        let reader = WalReader::new(writer.start, SEGMENT, history).unwrap();
        let (items, end) = read(reader, &writer.bytes, &[100]);
        assert_eq!((&items, end), (&writer.items, None));
        let change = TimelineChange { timeline: TimelineId(2), before: TimelineId(1) };
        assert_eq!(items[1].kind, Kind::EndOfRecovery(change));
    }
}

#[test]
fn a_shutdown_names_its_timeline() {
    let mut writer = Writer::new(START);
    let change = TimelineChange { timeline: TimelineId(1), before: TimelineId(1) };
    let content = [&[3; 8][..], &[1, 0, 0, 0, 1, 0, 0, 0], &[4; 72]].concat();
    writer.content(LOG, 0, 0, &content, Kind::ShutdownCheckpoint(change));
    check(&writer);
}

/// A stream cannot be cut at an end that has not arrived.
#[test]
fn an_item_comes_when_its_padding_has_come() {
    let mut writer = Writer::new(START);
    writer.other(1);
    let bytes = &writer.bytes;
    let mut reader = reader(&writer, writer.start);
    reader.push(&bytes[..bytes.len() - 1]);
    assert!(reader.next().is_none());
    assert_eq!(reader.position(), Lsn(writer.at() - 1));
    reader.push(&bytes[bytes.len() - 1..]);
    assert_eq!(reader.next(), Some(Ok(writer.items[0].clone())));
    assert!(reader.next().is_none());
    let (manager, info) = HEAP_INSERT;
    assert_eq!((manager, info, reader.last_record()), (10, 0, Some(writer.items[0].begin)));
}
