//! Records that are understood, and their contents.

use super::random::ended;
use super::*;
use tidelock_wal::{Ending, Fault, Kind, PgTimestamp, Xid};
use writer::{LOG, Parts, TRANSACTIONS, end, part, prepare};

/// Manager of messages that clients put into the log.
const MESSAGES: u8 = 21;
const STAMP: i64 = 849_361_606_123_456;
const ENDINGS: [Ending; 4] =
    [Ending::Commit, Ending::Abort, Ending::CommitPrepared, Ending::AbortPrepared];

fn was_prepared(ending: Ending) -> bool {
    matches!(ending, Ending::CommitPrepared | Ending::AbortPrepared)
}

#[test]
fn ends_of_transactions_have_their_stamps() {
    let mut writer = Writer::new(START);
    for ending in ENDINGS {
        let prepared = was_prepared(ending).then_some(4711);
        let (info, content) = end(ending, STAMP, &Parts { prepared, ..Parts::default() });
        let kind = ended(ending, STAMP, prepared.map(|xid| (xid, None)));
        writer.content(TRANSACTIONS, info, 800, &content, kind);
    }
    let kind = ended(Ending::Prepare, STAMP, Some((801, Some(b"order-1".to_vec()))));
    writer.content(TRANSACTIONS, 0x10, 801, &prepare(STAMP, 801, b"order-1", 100), kind);
    writer.other(10);
    check(&writer);
    let stamps: Vec<_> = writer.items.iter().map(WalItem::stamp).collect();
    assert_eq!(stamps[..5], [Some(PgTimestamp(STAMP)); 5]);
    assert_eq!((stamps[5], writer.items[0].xid), (None, Xid(800)));
}

#[test]
fn commits_are_what_clients_may_see() {
    let commits = [Ending::Commit, Ending::CommitPrepared];
    for ending in [&ENDINGS[..], &[Ending::Prepare]].concat() {
        assert_eq!(ending.is_commit(), commits.contains(&ending));
    }
}

/// Lists of tens of thousands stand between the stamp and the global identifier.
#[test]
fn what_stands_behind_long_lists_is_found() {
    for ending in [Ending::CommitPrepared, Ending::AbortPrepared] {
        let parts = Parts {
            place: true,
            subtransactions: Some(40_000),
            files: Some(0),
            statistics: Some(700),
            messages: (ending == Ending::CommitPrepared).then_some(3000),
            prepared: Some(4711),
            gid: Some(vec![b'g'; 199]),
            origin: true,
        };
        let (info, content) = end(ending, STAMP, &parts);
        let mut writer = Writer::new(START);
        let kind = ended(ending, STAMP, Some((4711, parts.gid)));
        writer.content(TRANSACTIONS, info, 0, &content, kind);
        writer.other(10);
        check(&writer);
    }
}

/// Content of a message, with lengths that may be wrong.
fn message(transactional: u8, prefix: &[u8], lengths: [u64; 2], text: &[u8]) -> Vec<u8> {
    let [prefix_len, text_len] = lengths.map(u64::to_le_bytes);
    [&[9, 9, 0, 0, transactional, 1, 2, 3], &prefix_len[..], &text_len, prefix, text].concat()
}

#[test]
fn messages_of_clients_have_their_prefix() {
    let mut writer = Writer::new(START);
    for (transactional, prefix, text) in [
        (1, &b"tidelock\0"[..], vec![]),
        (0, b"\0", vec![7; 300]),
        (1, &[&[b'p'; 500][..], b"\0"].concat(), vec![7; 20_000]),
    ] {
        let lengths = [prefix.len() as u64, text.len() as u64];
        let content = message(transactional, prefix, lengths, &text);
        let prefix = prefix[..(prefix.len() - 1).min(200)].into();
        let kind = Kind::Message { is_transactional: transactional == 1, prefix };
        writer.content(MESSAGES, 0, 800, &content, kind);
    }
    writer.record(MESSAGES, 0x10, 800, &[1, 2, 3], Kind::Other);
    check(&writer);
    for lengths in [[0, 12], [9, 4], [u64::MAX, 4], [13, 0]] {
        refused(MESSAGES, 0, &part(&message(1, b"tidelock\0", lengths, b"abc")));
    }
}

#[test]
fn parts_before_the_content_are_passed_over() {
    let mut writer = Writer::new(START);
    let (info, content) = end(Ending::Commit, STAMP, &Parts::default());
    let data = [&[253, 1, 0, 252, 9, 9, 9, 9][..], &part(&content)].concat();
    writer.record(TRANSACTIONS, info, 800, &data, ended(Ending::Commit, STAMP, None));
    check(&writer);
}

#[test]
fn other_records_of_both_managers_are_not_understood() {
    let mut writer = Writer::new(START);
    for info in [0x50, 0x60, 0x70, 0xd0] {
        writer.record(TRANSACTIONS, info, 800, &[1, 2, 3], Kind::Other);
    }
    for info in [0x10, 0x20, 0x30, 0x50, 0x60, 0x70, 0x80, 0xa0, 0xb0, 0xe0] {
        writer.record(LOG, info, 0, &[1, 2, 3], Kind::Other);
    }
    writer.record(LOG, 0x2f, 0, &[], Kind::Other);
    check(&writer);
}

/// The checksum is right, so that somebody meant it.
fn refused(manager: u8, info: u8, data: &[u8]) {
    let mut writer = Writer::new(START);
    writer.other(5);
    writer.record(manager, info, 800, data, Kind::Other);
    let begin = writer.items[1].begin;
    let error = WalError { lsn: begin, fault: Fault::Content { xid: Xid(800) } };
    for pieces in [usize::MAX, 1] {
        let (items, end) = read(reader(&writer, writer.start), &writer.bytes, &[pieces]);
        assert_eq!((items.len(), end), (1, Some(error)), "{manager} {info:x} {data:?}");
    }
}

#[test]
fn contents_that_are_not_what_the_head_says_are_refused() {
    let whole = |ending, parts: &Parts| end(ending, STAMP, parts);
    let prepared = Parts { prepared: Some(1), gid: Some(b"g".to_vec()), ..Parts::default() };
    // Contents that are cut off anywhere.
    for (ending, parts) in [
        (Ending::Commit, Parts { place: true, messages: Some(1), ..Parts::default() }),
        (Ending::Abort, Parts { subtransactions: Some(2), origin: true, ..Parts::default() }),
        (Ending::Abort, Parts::default()),
        (Ending::CommitPrepared, prepared.clone()),
    ] {
        let (info, content) = whole(ending, &parts);
        (0..content.len()).for_each(|len| refused(TRANSACTIONS, info, &part(&content[..len])));
        // Something that no flag announces.
        refused(TRANSACTIONS, info, &part(&[&content[..], &[0]].concat()));
    }
    let content = prepare(STAMP, 801, b"gid", 0);
    (0..content.len()).for_each(|len| refused(TRANSACTIONS, 0x10, &part(&content[..len])));
    for info in [0x00, 0x90] {
        (0..16).for_each(|len| refused(LOG, info, &part(&vec![0; len])));
    }
    // No content, a block, and a length that is not the content's.
    let (info, content) = whole(Ending::Commit, &Parts::default());
    refused(TRANSACTIONS, info, &[]);
    refused(TRANSACTIONS, info, &[&[0][..], &content].concat());
    refused(TRANSACTIONS, info, &[&[255, 9][..], &content].concat());
    refused(TRANSACTIONS, info, &[&[255, 7][..], &content].concat());
    // Prepared or not, against what the head says.
    refused(TRANSACTIONS, 0x80, &part(&whole(Ending::CommitPrepared, &prepared).1));
    refused(TRANSACTIONS, 0x30, &part(&content));
    // A list with a negative count.
    let flags = [&STAMP.to_le_bytes()[..], &2_u32.to_le_bytes(), &[0xff; 4], &[0; 100]].concat();
    refused(TRANSACTIONS, 0x80, &part(&flags));
    // Identifiers: too long, none at all, without an end, with two.
    let long = Parts { gid: Some(vec![b'g'; 200]), ..prepared };
    refused(TRANSACTIONS, 0xb0, &part(&whole(Ending::CommitPrepared, &long).1));
    let with_gid_bytes = |bytes: u16, behind: &[u8]| {
        let mut content = prepare(STAMP, 801, b"", 0);
        content.truncate(72);
        content[54..56].copy_from_slice(&bytes.to_le_bytes());
        part(&[&content, behind].concat())
    };
    refused(TRANSACTIONS, 0x10, &with_gid_bytes(0, &[0; 300]));
    refused(TRANSACTIONS, 0x10, &with_gid_bytes(201, &[&[1; 200][..], &[0; 100]].concat()));
    refused(TRANSACTIONS, 0x10, &with_gid_bytes(3, b"abcd"));
    refused(TRANSACTIONS, 0x10, &with_gid_bytes(3, b"a\0\0"));
    // Another magic.
    let mut content = prepare(STAMP, 801, b"gid", 0);
    content[0] += 1;
    refused(TRANSACTIONS, 0x10, &part(&content));
}
