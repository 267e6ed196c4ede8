//! A map's bytes, and merging against arrays.

use super::build::{flatten, write_flat, write_merged};
use super::format::KEYS_PER_FENCE;
use super::*;
use crate::extents::DiskKey;
use crate::journal::{IndexEntry, SegmentFacts, State, WriterRun};
use proptest::prelude::*;
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_storage::Storage;
use tidelock_storage::memory::Memory;

fn segment(index: u64) -> SegmentFacts {
    SegmentFacts { index, id: 0xab00 + index, len_bytes: 1 << 30, last_batch: 9, chain: 7 }
}

fn entry(seq: u64, disk: u16, offset: u64, len_bytes: u32) -> IndexEntry {
    let at = if seq.is_multiple_of(5) { 0 } else { 0x1000 * seq };
    let (writer, disk, epoch) = (WriterId(1), DiskId(disk), Epoch(1));
    let crc = if at == 0 { 0 } else { seq as u32 };
    IndexEntry { writer, disk, offset, epoch, seq: Seq(seq), len_bytes, at, crc }
}

fn map(
    disk: &Memory,
    index: u64,
    entries: Vec<IndexEntry>,
) -> Arc<MapFile<tidelock_storage::memory::MemoryFile>> {
    let seqs = || entries.iter().map(|entry| entry.seq);
    let run = seqs().min().zip(seqs().max()).map(|(first, last)| WriterRun {
        writer: WriterId(1),
        epoch: Epoch(1),
        first,
        last,
        first_hlc: Hlc(0),
        last_hlc: Hlc(0),
    });
    let runs: Vec<WriterRun> = run.into_iter().collect();
    let (facts, flat) = flatten(&segment(index), entries, &runs, &State::new(2));
    Arc::new(write_flat(disk, "", facts, flat).unwrap())
}

fn bytes_of(disk: &Memory, name: &str) -> Vec<u8> {
    tidelock_storage::read_all(disk, name).unwrap().unwrap()
}

/// What a byte of a disk is: segment, place in its file (0: zeroes) and checksum.
type Cell = Option<(u64, u64, u32)>;

const CELLS: usize = 200;

fn show(disk: &mut [Cell], entry: &MapEntry) {
    for n in 0..u64::from(entry.len_bytes) {
        let at = if entry.at == 0 { 0 } else { entry.at + u64::from(entry.skip) + n };
        let cell = &mut disk[(entry.offset + n) as usize];
        assert_eq!(*cell, None, "no overlaps");
        *cell = Some((entry.segment, at, entry.crc));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Eight segments as one map are what the newest record of each byte says.
    #[test]
    fn a_merged_map_has_the_newest_of_every_byte(
        of in prop::collection::vec(
            prop::collection::vec((0u16..2, 0u64..150, 1u32..50), 0..20), 2..9),
        ask in (0u64..200, 0u64..200),
    ) {
        let storage = Memory::new();
        let mut expected = vec![[None; CELLS]; 2];
        let (mut seq, mut maps) = (0, Vec::new());
        for (nth, records) in of.iter().enumerate() {
            let index = nth as u64 + 1;
            let entries = records.iter().map(|(disk, offset, len)| {
                seq += 1;
                let entry = entry(seq, *disk, *offset, *len);
                for n in 0..u64::from(*len) {
                    let at = if entry.at == 0 { 0 } else { entry.at + n };
                    expected[usize::from(*disk)][(offset + n) as usize] =
                        Some((index, at, entry.crc));
                }
                entry
            });
            let entries = entries.collect();
            maps.push(map(&storage, index, entries));
        }
        let merged = write_merged(&storage, "", &maps).unwrap();
        prop_assert_eq!(merged.facts().first, 1);
        let mut found = vec![[None; CELLS]; 2];
        let all: Vec<MapEntry> = merged.entries().map(Result::unwrap).collect();
        for entry in &all {
            show(&mut found[usize::from(entry.key.disk.0)], entry);
        }
        prop_assert_eq!(&found, &expected);
        let (from, to) = (ask.0.min(ask.1), ask.0.max(ask.1));
        for disk in 0..2u16 {
            let key = DiskKey { writer: WriterId(1), disk: DiskId(disk) };
            let mut some = Vec::new();
            merged.overlapping(key, from..to, |entry| some.push(*entry)).unwrap();
            let inside = |e: &&MapEntry| e.key == key && e.offset < to && e.end() > from;
            let naive: Vec<MapEntry> = all.iter().filter(inside).copied().collect();
            prop_assert_eq!(some, naive);
        }
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..9000),
                                 keep in 0usize..9000) {
        let mut content = example().1;
        content.truncate(keep);
        content.extend(bytes);
        let _ = map_from_bytes(&content);
    }
}

/// Extents that are not neighbours, on two disks.
fn example() -> (String, Vec<u8>) {
    let storage = Memory::new();
    let entries = (1..250).map(|n| entry(n, (n / 150) as u16, n * 4096, 512)).collect();
    let map = map(&storage, 3, entries);
    let name = crate::journal::map_name(map.facts());
    let content = bytes_of(&storage, &name);
    (name, content)
}

#[test]
fn any_flip_is_noticed_by_whoever_reads_it() {
    let (_, content) = example();
    assert_eq!(map_from_bytes(&content).unwrap().len(), 249);
    for at in (0..content.len()).step_by(3) {
        let mut bad = content.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(map_from_bytes(&bad).is_err(), "byte {at}");
    }
    for len in (0..content.len()).step_by(11) {
        assert!(map_from_bytes(&content[..len]).is_err(), "cut at {len}");
    }
}

#[test]
fn maps_of_many_blocks_are_searched_by_their_fences() {
    let storage = Memory::new();
    // No entry takes less than 11 bytes.
    let count = (4096 / 11 * (KEYS_PER_FENCE + 2)) as u64;
    let entries = (0..count).map(|n| entry(5 * n + 1, 0, n * 1000, 100)).collect();
    let map = map(&storage, 1, entries);
    let key = DiskKey { writer: WriterId(1), disk: DiskId(0) };
    for n in (0..count).step_by(97).chain([count - 1]) {
        for (range, is_there) in [
            (n * 1000..n * 1000 + 1, true),
            (n * 1000 + 99..n * 1000 + 100, true),
            (n * 1000 + 100..n * 1000 + 999, false),
        ] {
            let mut found = Vec::new();
            map.overlapping(key, range, |entry| found.push(entry.offset)).unwrap();
            assert_eq!(found, if is_there { vec![n * 1000] } else { vec![] });
        }
    }
    let other = DiskKey { disk: DiskId(1), ..key };
    map.overlapping(other, 0..u64::MAX, |entry| panic!("{entry:?}")).unwrap();
}

#[test]
fn the_bytes_are_as_documented() {
    let storage = Memory::new();
    let map = map(&storage, 3, vec![entry(7, 1, 8192, 4096), entry(8, 1, 8192, 1024)]);
    let name = crate::journal::map_name(map.facts());
    assert_eq!(name, "0000000000000003-000000000000ab03.00.map");
    let content = bytes_of(&storage, &name);
    assert_eq!(content.len(), 2 * 4096 + 16 + 32 + 88);
    let leaf = &content[..4096];
    assert_eq!(leaf[4..8], 2u32.to_le_bytes(), "entries");
    assert_eq!(leaf[8..16], 0xab03u64.to_le_bytes(), "id");
    assert_eq!(leaf[16..24], [0; 8], "number of the block");
    let (first, second) = (&leaf[24..41], &leaf[41..56]);
    assert_eq!(first[..3], [1, 1, 1], "another disk: writer, disk");
    assert_eq!(first[3..5], [0x80, 0x40], "gap: 8192");
    assert_eq!(first[5..7], [0x80, 0x10], "1024 bytes, zigzag");
    assert_eq!(first[7..11], [0, 0x80, 0x80, 2], "segment, place of the payload: 0x8000");
    assert_eq!(first[11..13], [0, 0], "bytes of the payload before it and behind it");
    assert_eq!(first[13..], 8u32.to_le_bytes(), "its checksum");
    assert_eq!(second[..2], [0, 0], "the same disk, no gap");
    assert_eq!(second[2..4], [0x80, 0x20], "2048 bytes longer, zigzag");
    assert_eq!(second[4..8], [0, 0x80, 0xe0, 1], "segment, place of the payload: 0x7000");
    assert_eq!(second[8..11], [0x80, 8, 0], "1024 bytes of the payload before it, none behind it");
    assert_eq!(second[11..], 7u32.to_le_bytes(), "its checksum");
    assert_eq!(leaf[56..], [0; 4096 - 56]);
    let fence = &content[4096..8192];
    assert_eq!(fence[16..24], 1u64.to_le_bytes(), "number of the block");
    assert_eq!(fence[24..32], [1, 0, 1, 0, 0, 0, 0, 0]);
    assert_eq!(fence[32..40], 8192u64.to_le_bytes());
    assert_eq!(content[8192..8208], fence[24..40], "top");
    let run = &content[8208..8240];
    assert_eq!(run[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(run[8..16], 1u64.to_le_bytes(), "epoch");
    assert_eq!([run[16], run[24]], [7, 8], "seqs");
    let trailer = &content[8240..];
    assert_eq!(&trailer[..16], b"TLKMAP\0\0\x01\0\0\0\0\0\0\0", "magic, version, level");
    assert_eq!(trailer[16..24], [1, 0, 0, 0, 1, 0, 0, 0], "leaves, fences");
    assert_eq!(trailer[24..32], 2u64.to_le_bytes(), "entries");
    assert_eq!(trailer[32..40], 3u64.to_le_bytes(), "first segment");
    assert_eq!(trailer[40..48], 3u64.to_le_bytes(), "last segment");
    assert_eq!(trailer[48..56], 0xab03u64.to_le_bytes(), "its id");
    assert_eq!(trailer[56..64], (1u64 << 30).to_le_bytes(), "its length");
    assert_eq!(trailer[64..72], 9u64.to_le_bytes(), "its last batch");
    assert_eq!(trailer[72..80], [7, 0, 0, 0, 1, 0, 0, 0], "chain, runs");
    let mut newer = content.clone();
    newer[8248] = 3;
    let crc = tidelock_protocol::record::crc32c(&newer[8240..8324]);
    newer[8324..].copy_from_slice(&crc.to_le_bytes());
    assert!(matches!(map_from_bytes(&newer), Err(MapError::Version(3))));
}

#[test]
fn what_was_cut_apart_for_a_while_is_one_again() {
    let storage = Memory::new();
    // The middle is cut out in the same segment, and written again by the next one.
    let first = map(&storage, 1, vec![entry(1, 0, 0, 4096), entry(2, 0, 1024, 512)]);
    let second = map(&storage, 2, vec![entry(3, 0, 512, 2048), entry(4, 0, 1000, 24)]);
    let merged = write_merged(&storage, "", &[first, second]).unwrap();
    let parts: Vec<_> =
        merged.entries().map(Result::unwrap).map(|e| (e.offset, e.len_bytes, e.skip)).collect();
    let expected =
        [(0, 512, 0), (512, 488, 0), (1000, 24, 0), (1024, 1536, 512), (2560, 1536, 2560)];
    assert_eq!(parts, expected);
}

#[test]
fn names_are_exact() {
    let name = map_file_name(2, 1, 0xab);
    assert_eq!(name, "0000000000000001-00000000000000ab.02.map");
    for name in [name.clone(), format!("{name}.new")] {
        assert_eq!(parse_map_file_name(&name), Some((2, 1, 0xab)), "{name}");
    }
    for other in [
        "x.map",
        "0000000000000001-00000000000000ab.map",
        "0000000000000001-00000000000000ab.2.map",
    ] {
        assert_eq!(parse_map_file_name(other), None, "{other}");
    }
    let file = Memory::new().create("x").unwrap();
    assert!(matches!(MapFile::open(file), Err(MapError::Damaged(_))));
}
