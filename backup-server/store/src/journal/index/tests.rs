//! An index against what the journal holds, whatever happens to its file.

use super::build::Builder;
use super::*;
use crate::journal::tests::{OPTIONS, open_at, write_record};
use crate::journal::{
    Entry, Journal, JournalError, PlacedEffect, Position, Segment, SegmentFile, State,
};
use proptest::prelude::*;
use std::io::IoSlice;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::record::{DiskChange, Effect, Record, crc32c};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::memory::{Faults, Memory};
use tidelock_storage::{Storage, StorageFile};

fn facts() -> SegmentFacts {
    SegmentFacts { index: 3, id: 0xab, len_bytes: 1 << 30, last_batch: 9, chain: 7 }
}

fn file_of(content: &[u8]) -> tidelock_storage::memory::MemoryFile {
    let file = Memory::new().create("index").unwrap();
    file.write_at(&[IoSlice::new(content)], 0).unwrap();
    file
}

fn sealed(builder: Builder) -> Sealed {
    let of = facts();
    let file = SegmentFile::Plain(file_of(&[]));
    let segment = Segment { index: of.index, id: of.id, file, len_bytes: of.len_bytes };
    Sealed::new(&segment, of.last_batch, of.chain, builder)
}

/// Records of two writers with two disks each, one after the other.
fn records(of: &[(u16, u16, u8, u8, bool)]) -> Vec<(Record, u32, PlacedEffect)> {
    let mut seqs = [0, 0];
    let records = of.iter().enumerate().map(|(nth, (writer, disk, offset, len, zero))| {
        let (writer, disk) = (writer % 2, disk % 2);
        seqs[usize::from(writer)] += 1;
        let len_bytes = 512 * (1 + u32::from(*len));
        let at = 112 + nth as u64 * (1 << 18);
        let record = Record {
            writer: WriterId(writer),
            seq: Seq(seqs[usize::from(writer)]),
            epoch: Epoch(1),
            hlc: Hlc(nth as u64 + 1),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(disk),
                offset: 512 * u64::from(*offset),
                copy: false,
                flushed: false,
                effect: Effect::Zero { len_bytes, no_hole: false },
            },
        };
        let effect = if *zero { PlacedEffect::Zero } else { PlacedEffect::Write { at } };
        (record, len_bytes, effect)
    });
    records.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every version of every extent comes back, in order; a range is what lies in it; and the
    /// newest version up to any cut is the one that a walk over all records finds.
    #[test]
    fn an_index_has_every_version_of_every_extent(
        of in prop::collection::vec(any::<(u16, u16, u8, u8, bool)>(), 0..700),
        ask in any::<(u16, u16, u8, u8)>(),
        cut in 0u64..400,
    ) {
        let records = records(&of);
        let mut builder = Builder::default();
        for (record, len_bytes, effect) in &records {
            builder.record(&record.clone().into_raw(), *len_bytes, *effect);
        }
        let waypoint = waypoint(cut);
        builder.waypoint(waypoint.clone());
        let closed = Some((Hlc(5), CountVector::of(WriterId(1), Seq(cut))));
        let content = sealed(builder).encode(closed.clone());
        let index = SegmentIndex::open_of(file_of(&content), &facts()).unwrap();
        prop_assert_eq!(&index.footer().closed, &closed);
        prop_assert_eq!(index.waypoints().unwrap(), [waypoint]);
        prop_assert_eq!(index.footer().entries, records.len() as u64);
        for run in &index.footer().runs {
            let of_run = || records.iter().filter(|(r, ..)| r.writer == run.writer);
            let (first, last) = (&of_run().next().unwrap().0, &of_run().last().unwrap().0);
            prop_assert_eq!((run.first, run.last), (first.seq, last.seq));
            prop_assert_eq!((run.first_hlc, run.last_hlc), (first.hlc, last.hlc));
        }
        let mut expected: Vec<IndexEntry> = records.iter().map(|(record, len_bytes, effect)| {
            let at = if let PlacedEffect::Write { at } = effect { *at } else { 0 };
            let (epoch, seq, len_bytes) = (record.epoch, record.seq, *len_bytes);
            let (writer, disk, offset) = (record.writer, record.body.disk, record.body.offset);
            IndexEntry { writer, disk, offset, epoch, seq, len_bytes, at, crc: 0 }
        }).collect();
        expected.sort_by_key(|e| (e.writer, e.disk, e.offset, e.seq));
        let all: Vec<IndexEntry> = index.entries(..).map(Result::unwrap).collect();
        prop_assert_eq!(&all, &expected);
        let key = |offset: u8| {
            (WriterId(ask.0 % 2), DiskId(ask.1 % 2), 512 * u64::from(offset))
        };
        let (from, to) = (key(ask.2.min(ask.3)), key(ask.2.max(ask.3)));
        let inside = |e: &&IndexEntry| {
            let place = (e.writer, e.disk, e.offset);
            place >= from && place < to
        };
        let some: Vec<IndexEntry> = index.entries(from..to).map(Result::unwrap).collect();
        let naive: Vec<IndexEntry> = expected.iter().filter(inside).copied().collect();
        prop_assert_eq!(&some, &naive);
        let newest = some.iter().filter(|e| e.seq.0 <= cut).max_by_key(|e| e.seq);
        let in_order = records.iter().rev().find(|(r, ..)| {
            let place = (r.writer, r.body.disk, r.body.offset);
            place >= from && place < to && r.seq.0 <= cut
        });
        prop_assert_eq!(newest.map(|e| e.seq), in_order.map(|(r, ..)| r.seq));
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..9000),
                                 keep in 0usize..9000) {
        let (_, mut valid) = example();
        valid.truncate(keep);
        valid.extend(bytes);
        let _ = index_from_bytes(&valid);
    }
}

fn waypoint(cut: u64) -> Waypoint {
    let cut = CountVector::of(WriterId(0), Seq(cut));
    Waypoint { offset: 4711, state: State::new(2), at: Hlc(3), cut, arrived_ms: 5 }
}

fn example() -> (Vec<IndexEntry>, Vec<u8>) {
    let of: Vec<_> = (0..150u16).map(|n| (n, n / 2, n as u8, 3, n % 5 == 0)).collect();
    let mut builder = Builder::default();
    for (record, len_bytes, effect) in records(&of) {
        builder.record(&record.into_raw(), len_bytes, effect);
    }
    builder.waypoint(waypoint(7));
    let content = sealed(builder).encode(None);
    let entries = index_from_bytes(&content).unwrap();
    (entries, content)
}

#[test]
fn the_bytes_are_as_documented() {
    let mut builder = Builder::default();
    let [(record, len_bytes, _), ..] = &records(&[(1, 1, 8, 7, false)])[..] else { panic!() };
    builder.record(&record.clone().into_raw(), *len_bytes, PlacedEffect::Write { at: 0x170 });
    let cut = CountVector::of(WriterId(1), Seq(6));
    let content = sealed(builder).encode(Some((Hlc(0x77), cut)));
    assert_eq!(content.len(), BLOCK_BYTES + 16 + 48 + 16 + 1 + 96);
    let block = &content[..BLOCK_BYTES];
    assert_eq!(block[4..8], 1u32.to_le_bytes());
    assert_eq!(block[8..16], 0xabu64.to_le_bytes());
    assert_eq!(block[16..24], [1, 0, 1, 0, 0, 16, 0, 0], "writer, disk, length");
    assert_eq!(block[24..32], 4096u64.to_le_bytes(), "offset");
    assert_eq!(block[32..40], 1u64.to_le_bytes(), "seq");
    assert_eq!(block[40..48], 1u64.to_le_bytes(), "epoch");
    assert_eq!(block[48..56], 0x170u64.to_le_bytes(), "place of the payload");
    let fence = &content[BLOCK_BYTES..BLOCK_BYTES + 16];
    assert_eq!(fence[..8], [1, 0, 1, 0, 0, 0, 0, 0]);
    assert_eq!(fence[8..], 4096u64.to_le_bytes());
    let cut = &content[BLOCK_BYTES + 64..BLOCK_BYTES + 80];
    assert_eq!((cut[0], cut[8]), (0, 6), "the cut, by writer");
    let trailer = &content[content.len() - 96..];
    assert_eq!(&trailer[..16], b"TLKINDX\0\x01\0\0\0\x01\0\0\0");
    assert_eq!(trailer[16..24], 1u64.to_le_bytes(), "entries");
    assert_eq!(trailer[24..32], 3u64.to_le_bytes(), "segment");
    assert_eq!(trailer[32..40], 0xabu64.to_le_bytes(), "its id");
    assert_eq!(trailer[40..48], (1u64 << 30).to_le_bytes(), "its length");
    assert_eq!(trailer[48..56], 9u64.to_le_bytes(), "its last batch");
    assert_eq!(trailer[56..64], [7, 0, 0, 0, 1, 0, 0, 0], "chain, runs");
    assert_eq!(trailer[64..72], 0x77u64.to_le_bytes());
    assert_eq!(trailer[72..76], 2u32.to_le_bytes());
    assert_eq!(content[content.len() - 97], 0, "no waypoints");
    assert_eq!(trailer[80..84], 1u32.to_le_bytes(), "their bytes");
    assert_eq!(trailer[84..88], crc32c(&[0]).to_le_bytes(), "their checksum");
}

#[test]
fn any_flip_is_noticed_by_whoever_reads_it() {
    let (entries, content) = example();
    assert!(content.len() > 2 * BLOCK_BYTES, "more than one block");
    for at in (0..content.len()).step_by(3) {
        let mut bad = content.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(index_from_bytes(&bad).is_err(), "byte {at}");
    }
    assert_eq!(index_from_bytes(&content).unwrap(), entries);
    for len in (0..content.len()).step_by(11) {
        assert!(index_from_bytes(&content[..len]).is_err(), "cut at {len}");
    }
}

#[test]
fn an_index_of_another_segment_or_version_is_not_believed() {
    let (_, content) = example();
    let is = facts();
    for other in [
        SegmentFacts { index: 4, ..is },
        SegmentFacts { id: 1, ..is },
        SegmentFacts { len_bytes: 5, ..is },
        SegmentFacts { last_batch: 8, ..is },
        SegmentFacts { chain: 8, ..is },
    ] {
        assert!(SegmentIndex::open_of(file_of(&content), &other).is_err(), "{other:?}");
    }
    let newer = with_trailer(content, |trailer| trailer[8] = 2);
    assert!(matches!(index_from_bytes(&newer), Err(IndexError::Version(2))));
}

fn with_trailer(mut content: Vec<u8>, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let at = content.len() - 96;
    change(&mut content[at..]);
    let crc = crc32c(&content[at..at + 92]);
    content[at + 92..].copy_from_slice(&crc.to_le_bytes());
    content
}

#[test]
fn names_are_exact() {
    assert_eq!(index_file_name(1, 0xab), "0000000000000001-00000000000000ab.idx");
    for name in
        ["0000000000000001-00000000000000ab.idx", "0000000000000001-00000000000000ab.idx.new"]
    {
        assert_eq!(parse_index_file_name(name), Some((1, 0xab)), "{name}");
    }
    for other in ["x.idx", "0000000000000001-00000000000000ab.seg", "1-ab.idx"] {
        assert_eq!(parse_index_file_name(other), None, "{other}");
    }
}

// ---- beside its segment

/// Writes records until some segments are sealed, and the indexes of those that are.
fn run(disk: &Memory, first: u64, records: u64) -> Result<u64, JournalError> {
    let mut acked = first - 1;
    let mut journal = match first {
        1 => Journal::create(disk.clone(), "journal", State::new(1), OPTIONS)?,
        _ => open_at(disk, Position::default())?.journal,
    };
    for seq in first..first + records {
        journal.stage_record(write_record(seq, 250)).unwrap();
        if journal.write(|_| {}).and_then(|()| journal.sync()).is_err() {
            return Ok(acked);
        }
        acked = seq;
        // As if the cut had everything at once.
        let closed = |_| Some((Hlc(seq), CountVector::of(WriterId(0), Seq(seq))));
        let job = journal.index_job(0, closed);
        if job.is_some_and(|job| job.run().is_err()) {
            return Ok(acked);
        }
    }
    Ok(acked)
}

/// Each index that is there has exactly the records of its segment. How many there are.
fn check_indexes(journal: &Journal<Memory>, disk: &Memory) -> usize {
    let mut checked = 0;
    for segment in journal.segments() {
        let path = format!("journal/{}", index_file_name(segment.index, segment.id));
        let Ok(file) = disk.open(&path) else { continue };
        let from = Position { segment: segment.index, offset: 0 };
        let to = Position { segment: segment.index, offset: segment.len_bytes };
        let mut seqs = Vec::new();
        for batch in journal.reader::<DiskChange>(from, to) {
            for entry in batch.unwrap().entries {
                if let Entry::Record { head, .. } = entry.unwrap() {
                    seqs.push(head.peek().seq);
                }
            }
        }
        let index = SegmentIndex::open(file).unwrap();
        assert_eq!(index.footer().of.len_bytes, segment.len_bytes);
        for entry in index.entries(..).map(Result::unwrap) {
            let mut payload = vec![0; entry.len_bytes as usize];
            segment.file.read_at(&mut payload, entry.at).unwrap();
            let record = write_record(entry.seq.0, payload.len());
            assert_eq!(payload, record.payload().unwrap().data()[..]);
            seqs.retain(|seq| *seq != entry.seq);
        }
        assert_eq!(seqs, [], "of segment {}", segment.index);
        checked += 1;
    }
    checked
}

fn index_names(disk: &Memory) -> Vec<String> {
    let mut names = disk.list("journal").unwrap();
    names.retain(|name| name.contains(".idx"));
    names.sort();
    names
}

/// How much of the journal opening reads.
fn shown(disk: &Memory) -> (Vec<u64>, usize) {
    let mut segments = Vec::new();
    let floor = Position::default();
    let opened = Journal::open_with(disk.clone(), "journal", floor, OPTIONS, |at, _, _| {
        segments.push(at.segment);
    });
    segments.dedup();
    (segments, opened.unwrap().made_again.len())
}

#[test]
fn opening_reads_no_sealed_segment_that_has_an_index_and_is_closed() {
    let disk = Memory::new();
    assert_eq!(run(&disk, 1, 24).unwrap(), 24);
    let journal = open_at(&disk, Position::default()).unwrap().journal;
    let count = journal.segments().len() as u64;
    assert!(count >= 6 && check_indexes(&journal, &disk) as u64 == count - 1);
    // The last one, and the one whose beginning the cut is known to have reached.
    assert_eq!(shown(&disk), (vec![count - 1, count], 0));
    // Damage of what is not read is not noticed by opening, and by whoever reads it.
    let segment = &journal.segments()[1];
    let name = crate::journal::SegmentHeader::file_name(segment.index, segment.id);
    disk.flip(&format!("journal/{name}"), segment.len_bytes - 1);
    let opened = open_at(&disk, Position::default()).unwrap().journal;
    assert_eq!(opened.state().writers[0].seq, Seq(24));
    let mut read = opened.reader::<DiskChange>(opened.start(), opened.end());
    assert!(read.any(|batch| batch.unwrap().is_damaged), "the last byte is data");
    // Its header and its checkpoint are read, and follow from the segment before it.
    disk.flip(&format!("journal/{name}"), 70);
    let damaged = open_at(&disk, Position::default()).unwrap();
    assert!(damaged.damaged.contains(&segment.index), "{:?}", damaged.damaged);
    let starts = |of: &Journal<Memory>| of.starts().map(|(_, s)| s.clone()).collect::<Vec<_>>();
    assert_eq!(starts(&damaged.journal), starts(&opened));
    // What was in it only its index tells then.
    disk.remove(&format!("journal/{}", index_file_name(segment.index, segment.id))).unwrap();
    assert!(matches!(open_at(&disk, Position::default()), Err(JournalError::Corrupt { .. })));
}

#[test]
fn whatever_is_missing_or_damaged_is_made_again_and_leads_to_the_same() {
    let disk = Memory::new();
    run(&disk, 1, 24).unwrap();
    let whole = open_at(&disk.killed(), Position::default()).unwrap();
    let states: Vec<_> = whole.journal.starts().map(|(i, s)| (i, (**s).clone())).collect();
    let names = index_names(&disk);
    for subset in 0u32..1 << names.len() {
        let damaged = disk.killed();
        for (nth, name) in names.iter().enumerate().filter(|(nth, _)| subset >> nth & 1 == 1) {
            let path = format!("journal/{name}");
            match nth % 2 {
                0 => damaged.remove(&path).unwrap(),
                _ => {
                    let end = damaged.open(&path).unwrap().size_bytes().unwrap();
                    damaged.flip(&path, end - 40);
                }
            }
        }
        let mut opened = open_at(&damaged, Position::default()).unwrap();
        assert_eq!(opened.made_again.len() as u32, subset.count_ones());
        assert_eq!(opened.journal.state(), whole.journal.state());
        let found: Vec<_> = opened.journal.starts().map(|(i, s)| (i, (**s).clone())).collect();
        assert_eq!(found, states);
        while let Some(job) = opened.journal.index_job(0, |_| None) {
            job.run().unwrap();
        }
        assert_eq!(check_indexes(&opened.journal, &damaged), names.len());
        assert_eq!(shown(&damaged).1, 0, "all are there again");
    }
}

#[test]
fn what_is_left_over_of_indexes_goes() {
    let disk = Memory::new();
    run(&disk, 1, 12).unwrap();
    let before = index_names(&disk);
    for name in ["0000000000000001-0000000000000bad.idx", &format!("{}.new", before[0])] {
        disk.create(&format!("journal/{name}")).unwrap();
    }
    let mut journal = open_at(&disk, Position::default()).unwrap().journal;
    assert_eq!(index_names(&disk), before);
    journal.remove_before(journal.end()).unwrap();
    assert_eq!(index_names(&disk), [""; 0], "they go with their segments");
}

#[test]
fn power_loss_at_every_operation_of_sealing_and_indexing() {
    let dry = Memory::new();
    assert_eq!(run(&dry, 1, 9).unwrap(), 9);
    assert!(index_names(&dry).len() >= 2);
    for at in 0..=dry.ops() {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let Ok(acked) = run(&disk, 1, 9) else { continue };
        crate::journal::tests::for_each_crash(&disk, at, |after| {
            let mut opened = open_at(&after, Position::default()).unwrap();
            let seq = opened.journal.state().writers[0].seq.0;
            assert!(seq >= acked, "{seq} of {acked}");
            check_indexes(&opened.journal, &after);
            while let Some(job) = opened.journal.index_job(0, |_| None) {
                job.run().unwrap();
            }
            let indexed = check_indexes(&opened.journal, &after);
            assert_eq!(indexed, opened.journal.segments().len() - 1);
            // And it goes on.
            drop(opened);
            assert_eq!(run(&after, seq + 1, 4).unwrap(), seq + 4);
        });
    }
}

#[test]
fn without_room_for_it_a_segment_has_no_index_and_the_journal_is_whole() {
    let disk = Memory::new();
    let mut journal = Journal::create(disk.clone(), "journal", State::new(1), OPTIONS).unwrap();
    for seq in 1..=12 {
        journal.stage_record(write_record(seq, 250)).unwrap();
        journal.write(|_| {}).unwrap();
    }
    journal.sync().unwrap();
    let full = Faults { capacity_bytes: Some(journal.bytes() + 100), ..Faults::default() };
    disk.set_faults(full);
    let job = journal.index_job(0, |_| None).unwrap();
    assert!(job.run().is_err());
    disk.set_faults(Faults::default());
    drop(journal);
    let opened = open_at(&disk, Position::default()).unwrap();
    assert_eq!(opened.journal.state().writers[0].seq, Seq(12));
    assert!(index_names(&disk).is_empty(), "what was not finished is gone");
}
