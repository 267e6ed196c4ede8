//! Cold segments against the segments that they were made of, whatever happens to their files.

use super::format::{DESCRIPTION_BYTES, Description, ENTRY_BYTES, SKIPPABLE_BYTES};
use super::*;
use crate::journal::tests::{OPTIONS, open_at, write_record};
use crate::journal::{
    Entry, Journal, JournalError, Position, Segment, SegmentFacts, SegmentHeader, State,
};
use proptest::prelude::*;
use std::io::{self, IoSlice};
use std::sync::Arc;
use tidelock_protocol::record::{DiskChange, crc32c};
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_storage::{Storage, StorageFile};

const HOW: Compress = Compress { after_ms: 0, block_bytes: 512, percent_max: u64::MAX };

/// A journal of some segments with indexes.
fn journal(disk: &Memory, records: u64, len: usize) -> Result<Journal<Memory>, JournalError> {
    let mut journal = Journal::create(disk.clone(), "journal", State::new(1), OPTIONS)?;
    for seq in 1..=records {
        journal.stage_record(write_record(seq, len)).unwrap();
        journal.write(|_| {})?;
        journal.sync()?;
        while let Some(job) = journal.index_job(0, |_| None) {
            let made = job.run()?;
            journal.made(made);
        }
    }
    Ok(journal)
}

/// Compresses a segment.
fn compress(journal: &mut Journal<Memory>, segment: u64, how: Compress) -> io::Result<bool> {
    let job = journal.compress_job(segment, how).expect("it is sealed");
    match job.run() {
        Ok(Compressed::Cold(file)) => journal.compressed(segment, file).map(|()| true),
        Ok(Compressed::NotSmaller) => Ok(false),
        Ok(Compressed::Damaged(damage)) => panic!("{damage:?}"),
        Err(JournalError::Io { source, .. } | JournalError::Full(source)) => Err(source),
        Err(error) => panic!("{error}"),
    }
}

fn content(segment: &Segment<MemoryFile>) -> Vec<u8> {
    let mut content = vec![0; segment.len_bytes as usize];
    segment.file.read_at(&mut content, 0).unwrap();
    content
}

fn seqs(journal: &Journal<Memory>) -> Vec<u64> {
    let mut seqs = Vec::new();
    for batch in journal.reader::<DiskChange>(journal.start(), journal.end()) {
        for entry in batch.unwrap().entries {
            if let Entry::Record { head, payload, .. } = entry.unwrap() {
                let record = head.finish(payload).unwrap();
                assert_eq!(record, write_record(record.seq.0, record.body.len_bytes() as usize));
                seqs.push(record.seq.0);
            }
        }
    }
    seqs
}

fn names(disk: &Memory, ending: &str) -> Vec<String> {
    let mut names = disk.list("journal").unwrap();
    names.retain(|name| name.ends_with(ending));
    names.sort();
    names
}

/// The file of some content, compressed, and that content.
fn example(content: &[u8], block_bytes: u32) -> (Vec<u8>, SegmentFacts) {
    let disk = Memory::new();
    let file = disk.create("plain").unwrap();
    file.write_at(&[IoSlice::new(content)], 0).unwrap();
    let of = SegmentFacts {
        index: 3,
        id: 0xab,
        len_bytes: content.len() as u64,
        last_batch: 9,
        chain: 7,
    };
    let segment =
        Segment { index: 3, id: 0xab, file: SegmentFile::Plain(file), len_bytes: of.len_bytes };
    let how = Compress { block_bytes, ..HOW };
    let cold = job::frames_of(&disk, &segment, of, how).unwrap().expect("not too large");
    let mut bytes = vec![0; cold.size_bytes().unwrap() as usize];
    cold.read_at(&mut bytes, 0).unwrap();
    (bytes, of)
}

fn file_of(bytes: &[u8]) -> MemoryFile {
    let file = Memory::new().create("cold").unwrap();
    file.write_at(&[IoSlice::new(bytes)], 0).unwrap();
    file
}

fn opened(bytes: &[u8]) -> Result<ColdFile<MemoryFile>, ColdError> {
    ColdFile::open(file_of(bytes), Arc::default())
}

/// Content of which some compresses and some does not.
fn mixed(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|i| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if i / 700 % 2 == 0 { state as u8 } else { (i / 256) as u8 }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every range reads as that of the segment; what is beyond it is refused; and zstd alone gives
    /// all of the segment back.
    #[test]
    fn every_range_is_that_of_the_segment(
        len in 1usize..9000,
        seed: u64,
        block in 9u32..13,
        ranges in prop::collection::vec((0u64..9000, 0usize..3000), 1..30),
    ) {
        let content = mixed(len, seed);
        let (bytes, of) = example(&content, 1 << block);
        let cold = opened(&bytes).unwrap();
        prop_assert_eq!(cold.facts(), &of);
        prop_assert_eq!(cold.stored_bytes(), bytes.len() as u64);
        let file = SegmentFile::Cold(Arc::new(cold));
        prop_assert_eq!(file.size_bytes().unwrap(), len as u64);
        for (from, count) in ranges {
            let mut buf = vec![0; count];
            let read = file.read_at(&mut buf, from);
            match content.get(from as usize..from as usize + count) {
                Some(want) => {
                    read.unwrap();
                    prop_assert_eq!(buf, want);
                }
                None => prop_assert_eq!(read.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
            }
        }
        prop_assert_eq!(zstd::stream::decode_all(&bytes[..]).unwrap(), content);
    }

    /// Whatever is flipped, in one place or in several: what is read is right or refused, and one
    /// damaged place costs one block at most.
    #[test]
    fn damage_never_gives_wrong_bytes(
        len in 1usize..6000,
        seed: u64,
        flips in prop::collection::vec(any::<(prop::sample::Index, u8)>(), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let content = mixed(len, seed);
        let (mut bytes, _) = example(&content, 512);
        for (at, bit) in &flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << (bit % 8);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let Ok(cold) = opened(&bytes) else {
            prop_assert!(flips.len() > 1 || cut.is_some(), "one place must not cost all");
            return Ok(());
        };
        let mut refused = 0;
        for (nth, want) in content.chunks(512).enumerate() {
            let mut buf = vec![0; want.len()];
            match cold.read_at(&mut buf, nth as u64 * 512) {
                Ok(()) => prop_assert_eq!(buf, want),
                Err(error) => {
                    prop_assert!(crate::damage::is_damage(&error), "{}", error);
                    refused += 1;
                }
            }
        }
        prop_assert!(refused <= flips.len());
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000), keep in 0usize..3000) {
        let (mut valid, _) = example(&mixed(4000, 5), 512);
        valid.truncate(keep);
        valid.extend(bytes);
        let _ = cold_from_bytes(&valid);
    }
}

#[test]
fn the_bytes_are_as_documented() {
    let content = [7; 1000];
    let (bytes, _) = example(&content, 512);
    let part = SKIPPABLE_BYTES + DESCRIPTION_BYTES + 2 * ENTRY_BYTES;
    assert_eq!(part, 112);
    assert_eq!(bytes[..8], [0x5d, 0x2a, 0x4d, 0x18, 104, 0, 0, 0], "skippable, its length");
    let is = &bytes[8..80];
    assert_eq!(is[..16], *b"TLKCOLD\0\x01\0\0\0\0\x02\0\0", "magic, version, bytes of a block");
    assert_eq!(is[16..24], 3u64.to_le_bytes(), "segment");
    assert_eq!(is[24..32], 0xabu64.to_le_bytes(), "its id");
    assert_eq!(is[32..40], 1000u64.to_le_bytes(), "its bytes");
    assert_eq!(is[40..48], 9u64.to_le_bytes(), "its last batch");
    assert_eq!(is[48..56], [7, 0, 0, 0, 2, 0, 0, 0], "chain, blocks");
    assert_eq!(is[56..64], (bytes.len() as u64).to_le_bytes(), "bytes of the file");
    assert_eq!(is[64..68], [0; 4]);
    assert_eq!(is[68..], crc32c(&is[..68]).to_le_bytes());
    let first = &bytes[80..96];
    assert_eq!(first[..8], 112u64.to_le_bytes(), "the first frame");
    let len = u32::from_le_bytes(first[8..12].try_into().unwrap());
    let frame = &bytes[112..112 + len as usize];
    assert_eq!(frame[..4], 0xfd2f_b528_u32.to_le_bytes(), "is one of zstd");
    let bound = [&0xabu64.to_le_bytes()[..], &[0; 4], frame].concat();
    assert_eq!(first[12..], crc32c(&bound).to_le_bytes());
    let back = &bytes[bytes.len() - part..];
    assert_eq!(back[..8], bytes[..8]);
    assert_eq!((&back[8..40], &back[40..]), (&bytes[80..112], is), "table, description");
}

#[test]
fn either_copy_of_description_and_table_does() {
    let content = mixed(5000, 3);
    let (bytes, _) = example(&content, 512);
    let part = Description::part_bytes(10) as usize;
    for lost in [0..part, bytes.len() - part..bytes.len()] {
        let mut bytes = bytes.clone();
        bytes[lost].fill(0);
        let mut read = vec![0; content.len()];
        opened(&bytes).unwrap().read_at(&mut read, 0).unwrap();
        assert_eq!(read, content);
    }
}

#[test]
fn another_version_or_segment_is_not_believed() {
    let (bytes, _) = example(&mixed(3000, 9), 512);
    let mut newer = bytes.clone();
    for at in [8, bytes.len() - 72] {
        newer[at + 8] = 2;
        let crc = crc32c(&newer[at..at + 68]);
        newer[at + 68..at + 72].copy_from_slice(&crc.to_le_bytes());
    }
    let error = opened(&newer).unwrap_err();
    assert!(matches!(error, ColdError::Version(2)), "{error}");
    let disk = Memory::new();
    let file = disk.create(&format!("journal/{}", cold_file_name(4, 0xab))).unwrap();
    file.write_at(&[IoSlice::new(&bytes)], 0).unwrap();
    assert!(find_segment_file(&disk, "journal", 4, 0xab, &Arc::default()).is_err());
    assert!(find_segment_file(&disk, "journal", 3, 0xab, &Arc::default()).unwrap().is_none());
}

#[test]
fn names_are_exact() {
    let name = cold_file_name(1, 0xab);
    assert_eq!(name, "0000000000000001-00000000000000ab.seg.zst");
    assert_eq!(parse_cold_file_name(&name), Some((1, 0xab)));
    assert_eq!(parse_cold_file_name(&format!("{name}.new")), Some((1, 0xab)));
    assert_eq!(SegmentHeader::parse_file_name(&name), None);
    for other in ["x.seg.zst", "0000000000000001-00000000000000ab.seg", "a.zst"] {
        assert_eq!(parse_cold_file_name(other), None, "{other}");
    }
}

#[test]
fn a_journal_with_cold_segments_is_the_same_journal() {
    let disk = Memory::new();
    let mut journal = journal(&disk, 40, 250).unwrap();
    let all: Vec<u64> = (1..=40).collect();
    let plain: Vec<Vec<u8>> = journal.segments().iter().map(content).collect();
    let sealed: Vec<u64> = journal.segments().iter().map(|of| of.index).collect();
    let (last, sealed) = sealed.split_last().unwrap();
    assert!(sealed.len() > 5);
    assert_eq!(journal.next_plain(0).map(|(segment, _)| segment), Some(1));
    for segment in sealed.iter().step_by(2) {
        assert!(compress(&mut journal, *segment, HOW).unwrap());
    }
    assert_eq!(journal.next_plain(0).map(|(segment, _)| segment), Some(2));
    assert!(journal.compress_job(*last, HOW).is_none(), "not sealed");
    let check = |journal: &Journal<Memory>| {
        assert_eq!(seqs(journal), all);
        assert_eq!(journal.segments().iter().map(content).collect::<Vec<_>>(), plain);
        let cold = journal.segments().iter().filter(|of| of.file.cold().is_some());
        assert_eq!(cold.count(), sealed.len().div_ceil(2));
    };
    check(&journal);
    assert_eq!(names(&disk, ".zst").len() + names(&disk, ".seg").len(), plain.len());
    drop(journal);
    // Who has lost the last removal begins with that segment again.
    disk.sync_dir("journal").unwrap();
    let disk = disk.crash(&mut || false);
    check(&open_at(&disk, Position::default()).unwrap().journal);
    // Without indexes all of them are read, and lead to the same.
    for name in names(&disk, ".idx") {
        disk.remove(&format!("journal/{name}")).unwrap();
    }
    let mut journal = open_at(&disk, Position::default()).unwrap().journal;
    check(&journal);
    journal.remove_before(Position { segment: 4, offset: 64 }).unwrap();
    assert_eq!(journal.segments()[0].index, 4);
    assert!(names(&disk, ".zst").iter().all(|name| parse_cold_file_name(name).unwrap().0 >= 4));
    assert_eq!(
        seqs(&open_at(&disk, Position { segment: 4, offset: 64 }).unwrap().journal),
        seqs(&journal)
    );
}

#[test]
fn what_does_not_get_smaller_and_what_is_damaged_stays_as_it_is() {
    let disk = Memory::new();
    let mut journal = journal(&disk, 20, 250).unwrap();
    let strict = Compress { percent_max: 10, ..HOW };
    assert!(!compress(&mut journal, 1, strict).unwrap());
    assert_eq!(names(&disk, ".zst").len() + names(&disk, ".new").len(), 0);
    let name = names(&disk, ".seg")[1].clone();
    let last = journal.segments()[1].len_bytes - 1;
    disk.flip(&format!("journal/{name}"), last);
    let job = journal.compress_job(2, HOW).unwrap();
    match job.run().unwrap() {
        Compressed::Damaged(damage) => assert_eq!((damage.segment, damage.extents.len()), (2, 1)),
        other => panic!("{other:?}"),
    }
    // Without room nothing is left of the attempt.
    let used = names(&disk, "").len();
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let failed = compress(&mut journal, 3, HOW).unwrap_err();
    assert!(tidelock_storage::is_full(&failed), "{failed}");
    disk.set_faults(Faults::default());
    assert_eq!(names(&disk, "").len(), used);
    assert!(compress(&mut journal, 3, HOW).unwrap());
}

/// Some blocks tell that the rest is not worth it: nothing is written.
#[test]
fn what_was_compressed_before_is_found_out_by_some_blocks() {
    let disk = Memory::new();
    let plain = disk.create("plain").unwrap();
    let noise: Vec<u8> =
        mixed(1 << 20, 11).chunks(1400).flat_map(|c| c[..c.len().min(700)].to_vec()).collect();
    plain.write_at(&[IoSlice::new(&noise)], 0).unwrap();
    let of =
        SegmentFacts { index: 1, id: 5, len_bytes: noise.len() as u64, last_batch: 1, chain: 1 };
    let segment =
        Segment { index: 1, id: 5, file: SegmentFile::Plain(plain), len_bytes: of.len_bytes };
    let before = disk.ops();
    let how = Compress { percent_max: 90, block_bytes: 4096, ..HOW };
    let job = job::job_of(&disk, &segment, of, how);
    assert!(matches!(job.run().unwrap(), Compressed::NotSmaller));
    assert_eq!(disk.ops(), before);
}

#[test]
fn of_both_files_the_segments_own_counts_unless_it_is_cut() {
    let disk = Memory::new();
    let mut journal = journal(&disk, 20, 250).unwrap();
    let before = disk.killed();
    assert!(compress(&mut journal, 2, HOW).unwrap());
    let cold = format!("journal/{}", names(&disk, ".zst")[0]);
    let mut bytes = vec![0; disk.open(&cold).unwrap().size_bytes().unwrap() as usize];
    disk.open(&cold).unwrap().read_at(&mut bytes, 0).unwrap();
    for cut in [false, true] {
        let both = before.killed();
        both.create(&cold).unwrap().write_at(&[IoSlice::new(&bytes)], 0).unwrap();
        both.create(&format!("{cold}.new")).unwrap();
        let plain = both.open(cold.trim_end_matches(".zst")).unwrap();
        if cut {
            plain.set_size(100).unwrap();
        }
        let journal = open_at(&both, Position::default()).unwrap().journal;
        assert_eq!(seqs(&journal), (1..=20).collect::<Vec<_>>());
        assert_eq!(journal.segments()[1].file.cold().is_some(), cut);
        assert_eq!((names(&both, ".zst").len(), names(&both, ".new").len()), (usize::from(cut), 0));
        assert_eq!(names(&both, ".seg").len() + usize::from(cut), journal.segments().len());
    }
}

#[test]
fn a_cold_segment_that_is_the_last_or_another_one_is_refused() {
    let disk = Memory::new();
    let mut journal = journal(&disk, 20, 250).unwrap();
    let count = journal.segments().len();
    assert!(compress(&mut journal, count as u64 - 1, HOW).unwrap());
    let last = names(&disk, ".seg").pop().unwrap();
    let lost = disk.killed();
    lost.remove(&format!("journal/{last}")).unwrap();
    let error = open_at(&lost, Position::default()).unwrap_err();
    assert!(matches!(error, JournalError::Missing { .. }), "{error}");
    // As if it were torn, which it cannot be: it is not removed.
    let lost = disk.killed();
    lost.open(&format!("journal/{last}")).unwrap().set_size(40).unwrap();
    let error = open_at(&lost, Position::default()).unwrap_err();
    assert!(matches!(error, JournalError::Corrupt { .. }), "{error}");
    assert!(names(&lost, ".seg").contains(&last));
    // Its first block is needed: it says what the group is.
    let cold = format!("journal/{}", names(&disk, ".zst")[0]);
    let first = {
        let bytes = tidelock_storage::read_all(&disk, &cold).unwrap().unwrap();
        u64::from_le_bytes(bytes[80..88].try_into().unwrap())
    };
    disk.flip(&cold, first + 6);
    let error = open_at(&disk, Position::default()).unwrap_err();
    assert!(matches!(error, JournalError::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains(".seg.zst"), "{error}");
}

/// The power goes off before every operation of compressing, and every part of what was not synced
/// survives or not: all of the journal is found again, and again after that.
#[test]
fn a_crash_at_any_operation_loses_nothing() {
    let all: Vec<u64> = (1..=12).collect();
    let (begins, ends) = {
        let disk = Memory::new();
        let mut journal = journal(&disk, 12, 250).unwrap();
        let begins = disk.ops();
        for segment in 1..=2 {
            assert!(compress(&mut journal, segment, HOW).unwrap());
        }
        (begins, disk.ops())
    };
    assert!(ends - begins >= 2 * 6, "{}", ends - begins);
    let mut state = 0x1234_5678_9abc_def1_u64;
    for at in begins..=ends {
        let disk = Memory::new();
        let mut journal = journal(&disk, 12, 250).unwrap();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        for segment in 1..=2 {
            if compress(&mut journal, segment, HOW).is_err() {
                break;
            }
        }
        drop(journal);
        for sample in 0..24 {
            let crashed = disk.crash(&mut || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                match sample {
                    0 => false,
                    1 => true,
                    _ => state.is_multiple_of(2),
                }
            });
            let mut journal = open_at(&crashed, Position::default()).unwrap().journal;
            assert_eq!(seqs(&journal), all, "at operation {at}");
            assert!(names(&crashed, ".zst.new").is_empty());
            let files = names(&crashed, ".zst").len() + names(&crashed, ".seg").len();
            assert_eq!(files, journal.segments().len(), "at operation {at}");
            while let Some(job) = journal.index_job(0, |_| None) {
                let made = job.run().unwrap();
                journal.made(made);
            }
            while let Some((segment, _)) = journal.next_plain(0) {
                assert!(compress(&mut journal, segment, HOW).unwrap());
            }
            drop(journal);
            let again = crashed.crash(&mut || false);
            assert_eq!(seqs(&open_at(&again, Position::default()).unwrap().journal), all);
        }
    }
}
