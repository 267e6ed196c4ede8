//! Against a plain array of bytes, on a disk in memory.

use super::*;
use proptest::prelude::*;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_storage::Storage;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_store::extents::DiskKey;
use tidelock_store::image::Image;
use tidelock_store::view::{Overlay, View};

/// Not a multiple of a block.
const SIZE: u64 = 12 * BLOCK_BYTES + 512;

/// A replica's disk whose image has data and holes, and a scratch over it.
fn over_a_view(disk: &Memory, quota: u64) -> (Scratch<View<MemoryFile>, MemoryFile>, Vec<u8>) {
    let mut content = vec![0; SIZE as usize];
    for (i, byte) in content.iter_mut().enumerate().skip(5000).take(20_000) {
        *byte = (i % 251) as u8;
    }
    let file = disk.create("image").unwrap();
    file.set_size(SIZE).unwrap();
    file.write_at(&[IoSlice::new(&content[5000..25_000])], 5000).unwrap();
    let image = Image::adopt(disk, "image", SIZE).unwrap();
    let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
    let view = View::new(key, SIZE, image, Arc::new(RwLock::new(Overlay::new())));
    let file = disk.create("scratch").unwrap();
    (Scratch::new(view, file, Arc::new(Quota::new(quota))).unwrap(), content)
}

#[derive(Clone, Debug)]
enum Op {
    Write(u64, Vec<u8>),
    Zero(u64, u64, bool),
    Flush,
}

fn any_op() -> impl Strategy<Value = Op> {
    let place = prop_oneof![
        (0u64..SIZE, 0u64..3 * BLOCK_BYTES),
        (0u64..=12, 0u64..=5).prop_map(|(a, b)| (a * BLOCK_BYTES, b * BLOCK_BYTES)),
    ]
    .prop_map(|(at, len)| (at, len.min(SIZE - at)));
    prop_oneof![
        5 => (place.clone(), 1u8..255).prop_map(|((at, len), b)| Op::Write(at, vec![b; len as usize])),
        3 => (place, any::<bool>()).prop_map(|((at, len), no_hole)| Op::Zero(at, len, no_hole)),
        1 => Just(Op::Flush),
    ]
}

fn content(disk: &impl Disk) -> Vec<u8> {
    let mut all = vec![0xee; disk.size_bytes() as usize];
    disk.read(0, &mut all).unwrap();
    all
}

/// The description covers the disk, and calls nothing zero that is not.
fn check_description(disk: &impl Disk, range: Range<u64>, oracle: &[u8]) {
    let mut at = range.start;
    disk.describe(range.clone(), &mut |len, content| {
        assert!(len > 0 && at + len <= range.end);
        let part = &oracle[at as usize..(at + len) as usize];
        assert!(content == Content::Data || part.iter().all(|b| *b == 0));
        at += len;
        true
    })
    .unwrap();
    assert_eq!(at, range.end);
}

proptest! {
    #[test]
    fn equals_an_array_of_bytes_and_leaves_the_replica_alone(
        ops in prop::collection::vec(any_op(), 0..40), quota_blocks in 0u64..16,
        ask in (0u64..SIZE, 0u64..SIZE),
    ) {
        let disk = Memory::new();
        let quota = quota_blocks * BLOCK_BYTES;
        let (scratch, before) = over_a_view(&disk, quota);
        let mut oracle = before.clone();
        for op in ops {
            match op {
                Op::Write(at, data) => {
                    let room = scratch.quota().used_bytes();
                    match scratch.write(at, &data) {
                        Ok(()) => oracle[at as usize..at as usize + data.len()].copy_from_slice(&data),
                        Err(e) => {
                            prop_assert_eq!(e.kind(), io::ErrorKind::StorageFull);
                            prop_assert!(room + data.len() as u64 + 2 * BLOCK_BYTES > quota);
                            prop_assert_eq!(scratch.quota().used_bytes(), room);
                        }
                    }
                }
                Op::Zero(at, len, no_hole) => match scratch.zero(at, len, no_hole) {
                    Ok(()) => oracle[at as usize..(at + len) as usize].fill(0),
                    // What of it was done before the quota was met is done: take what is there, which must
                    // be either.
                    Err(_) => {
                        let now = content(&scratch);
                        for i in at as usize..(at + len) as usize {
                            prop_assert!(now[i] == oracle[i] || now[i] == 0);
                            oracle[i] = now[i];
                        }
                    }
                },
                Op::Flush => scratch.flush().unwrap(),
            }
            prop_assert!(scratch.quota().used_bytes() <= quota);
            prop_assert!(content(&scratch) == oracle);
        }
        let (start, len) = (ask.0, ask.1.min(SIZE - ask.0));
        check_description(&scratch, start..start + len, &oracle);
        check_description(&scratch, 0..SIZE, &oracle);
        let mut part = vec![0; len as usize];
        scratch.read(start, &mut part).unwrap();
        prop_assert!(part == oracle[start as usize..(start + len) as usize]);
        // Rule 7.
        prop_assert!(content(&scratch.lower) == before, "the replica changed");
    }
}

#[test]
fn at_the_quota_and_one_block_past_it() {
    let disk = Memory::new();
    let (scratch, before) = over_a_view(&disk, 2 * BLOCK_BYTES);
    scratch.write(0, &[1; 2 * BLOCK_BYTES as usize]).unwrap();
    let error = scratch.write(5 * BLOCK_BYTES, &[2]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(28), "the guest hears ENOSPC");
    let straddling = scratch.write(BLOCK_BYTES, &[3; BLOCK_BYTES as usize + 1]).unwrap_err();
    assert_eq!(straddling.kind(), io::ErrorKind::StorageFull);
    scratch.write(BLOCK_BYTES, &[3]).unwrap();
    // What is dropped makes room.
    scratch.zero(0, BLOCK_BYTES, false).unwrap();
    assert_eq!(scratch.quota().used_bytes(), BLOCK_BYTES);
    scratch.write(5 * BLOCK_BYTES + 7, &[2]).unwrap();
    let now = content(&scratch);
    assert_eq!(now[5 * BLOCK_BYTES as usize + 7], 2);
    let rest = 5 * BLOCK_BYTES as usize + 8..;
    assert!(now[rest.clone()] == before[rest], "the rest of its block is the replica's");
    let beyond = scratch.write(SIZE - 1, &[0; 2]).unwrap_err();
    assert_eq!(beyond.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn what_was_flushed_is_durable_and_a_failed_flush_is_not_forgotten() {
    let disk = Memory::new();
    let (scratch, _) = over_a_view(&disk, 1 << 20);
    disk.sync_dir("").unwrap();
    scratch.write(100, &[7; 9000]).unwrap();
    scratch.flush().unwrap();
    let after = disk.crash(&mut || false);
    let mut durable = vec![0; 9000];
    after.open("scratch").unwrap().read_at(&mut durable, 100).unwrap();
    assert_eq!(durable, [7; 9000]);
    scratch.write(100, &[8; 10]).unwrap();
    disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    assert!(scratch.flush().is_err());
    disk.set_faults(Faults::default());
    assert!(
        scratch.flush().is_err(),
        "pages that could not be written are lost, and nobody knows which"
    );
}

#[test]
fn a_write_that_failed_half_way_shows_nothing_of_itself_outside_its_blocks() {
    let disk = Memory::new();
    let (scratch, before) = over_a_view(&disk, 1 << 20);
    let off = disk.ops();
    disk.set_faults(Faults { power_off_at: Some(off), ..Faults::default() });
    assert!(scratch.write(BLOCK_BYTES, &[9; 8192]).is_err());
    disk.set_faults(Faults::default());
    assert!(content(&scratch) == before);
    assert_eq!(scratch.quota().used_bytes(), 0);
    scratch.write(BLOCK_BYTES + 1, &[1]).unwrap();
    let mut expected = before;
    expected[BLOCK_BYTES as usize + 1] = 1;
    assert!(content(&scratch) == expected, "and nothing of it comes back");
}

#[test]
fn small_writes_to_one_block_at_the_same_time_are_all_kept() {
    let disk = Memory::new();
    let (scratch, mut expected) = over_a_view(&disk, 1 << 20);
    std::thread::scope(|scope| {
        for n in 0..8u64 {
            let scratch = &scratch;
            scope.spawn(move || {
                (0..64).for_each(|i| scratch.write(i * 64 + n * 8, &[n as u8 + 1; 8]).unwrap())
            });
        }
    });
    for (at, byte) in expected.iter_mut().enumerate().take(4096) {
        *byte = (at / 8 % 8) as u8 + 1;
    }
    assert!(content(&scratch) == expected);
}
