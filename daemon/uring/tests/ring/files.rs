//! Operations on files: round trips, errors, short transfers, full queues.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{complete_one, directories, in_every_mode};
use bytes::Bytes;
use tidelock_uring::{
    BufPool, Buffer, Durability, EventFd, FallocateMode, LocalFile, OpenRequest, Ring, SharedFd,
    SyncKind,
};

const BLOCK: usize = 4096;

fn shared(file: File) -> SharedFd {
    Arc::new(OwnedFd::from(file))
}

#[test]
fn what_is_written_is_read_back() {
    for dir in directories() {
        let path = dir.path().join("disk");
        File::create_new(&path).unwrap().set_len(1 << 20).unwrap();
        in_every_mode(8, |ring| {
            let disk = LocalFile::open(&path, &OpenRequest::default()).unwrap();
            let pool = BufPool::new(1 << 20);
            let mut buf = pool.get(2 * BLOCK);
            buf.extend_zeroed(2 * BLOCK);
            buf.fill(0x5a);
            let data = buf.freeze_all();

            ring.write(1, disk.fd(), data.clone(), 8192, Durability::Cached);
            let completion = complete_one(ring);
            assert_eq!((completion.token, completion.result.unwrap()), (1, 2 * BLOCK as u32));
            assert_eq!(completion.buffer.into_bytes().as_ptr(), data.as_ptr());

            ring.write(2, disk.fd(), data.slice(..BLOCK), 65536, Durability::Durable);
            assert_eq!(complete_one(ring).result.unwrap(), BLOCK as u32);
            for kind in [SyncKind::Data, SyncKind::All] {
                ring.fsync(3, disk.fd(), kind);
                assert_eq!(complete_one(ring).result.unwrap(), 0);
            }

            // The middle of the range, into the middle of a buffer.
            ring.read(4, disk.fd(), pool.get(3 * BLOCK), BLOCK..2 * BLOCK, 12288);
            let completion = complete_one(ring);
            assert_eq!(completion.result.unwrap(), BLOCK as u32);
            let buf = completion.buffer.into_aligned();
            assert_eq!(buf.len(), 2 * BLOCK);
            assert_eq!(buf[BLOCK..], data[..BLOCK]);

            drop((buf, data));
            assert_eq!(pool.usage().in_use_bytes, 0, "every buffer came back");
        });
    }
}

#[test]
fn punched_and_zeroed_ranges_read_as_zeroes() {
    for dir in directories() {
        let path = dir.path().join("disk");
        std::fs::write(&path, vec![0xff; 16 * BLOCK]).unwrap();
        let disk = LocalFile::open(&path, &OpenRequest::default()).unwrap();
        let mut ring = Ring::new(8).unwrap();
        let modes = [
            (FallocateMode::PunchHole, disk.can_punch_hole()),
            (FallocateMode::ZeroRange, disk.can_zero_range()),
        ];
        for (index, (mode, able)) in modes.into_iter().enumerate() {
            let offset = ((1 + 4 * index) * BLOCK) as u64;
            ring.fallocate(7, disk.fd(), mode, offset, 2 * BLOCK as u64);
            let completion = complete_one(&mut ring);
            // The probe is right, in both directions.
            match completion.result {
                Ok(count) => assert!(able && count == 0, "{mode:?} works"),
                Err(error) => {
                    assert!(!able, "{mode:?}: {error}");
                    println!("skipped: {mode:?}, not on this file system");
                    continue;
                }
            }
            let content = std::fs::read(&path).unwrap();
            let (start, end) = (offset as usize, offset as usize + 2 * BLOCK);
            assert!(content[start..end].iter().all(|byte| *byte == 0), "{mode:?}");
            assert_eq!((content[start - 1], content[end]), (0xff, 0xff), "{mode:?}");
            assert_eq!(content.len(), 16 * BLOCK);
        }
        ring.fallocate(8, disk.fd(), FallocateMode::Allocate, 0, 16 * BLOCK as u64);
        complete_one(&mut ring).result.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 16 * BLOCK as u64);
    }
}

#[test]
fn a_full_disk_is_an_error_and_the_data_comes_back() {
    in_every_mode(8, |ring| {
        let full = shared(File::options().write(true).open("/dev/full").unwrap());
        let pool = BufPool::new(0);
        let data = pool.copy_of(b"does not fit").freeze_all();
        ring.write(1, &full, data, 0, Durability::Cached);
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(28)); // ENOSPC
        assert_eq!(completion.buffer.into_bytes(), Bytes::from_static(b"does not fit"));
        assert_eq!(pool.usage().in_use_bytes, 0);
    });
}

#[test]
fn a_read_error_leaves_the_buffer_as_it_was() {
    in_every_mode(8, |ring| {
        // Nothing is mapped at address 0.
        let bad = shared(File::open("/proc/self/mem").unwrap());
        let pool = BufPool::new(0);
        ring.read(1, &bad, pool.copy_of(b"kept"), 4..8, 0);
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(5)); // EIO
        assert_eq!(&*completion.buffer.into_aligned(), b"kept");
        assert_eq!(pool.usage().in_use_bytes, 0);
    });
}

#[test]
fn short_reads_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("short");
    std::fs::write(&path, vec![7; 6000]).unwrap();
    let file = shared(File::open(&path).unwrap());
    in_every_mode(8, |ring| {
        let pool = BufPool::new(0);
        ring.read(1, &file, pool.get(8192), 0..8192, 0);
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap(), 6000);
        assert_eq!(completion.buffer.into_aligned().len(), 6000);
        ring.read(2, &file, pool.get(8192), 0..8192, 6000);
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap(), 0);
        assert!(completion.buffer.into_aligned().is_empty());
    });
}

#[test]
fn more_operations_than_the_queues_hold() {
    const OPERATIONS: u64 = 1000;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("many");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let file = shared(file);
    // The completion queue holds 8: nearly all completions must wait in the kernel.
    in_every_mode(2, |ring| {
        for token in 0..OPERATIONS {
            let data = Bytes::copy_from_slice(&token.to_le_bytes());
            ring.write(token, &file, data, token * 8, Durability::Cached);
        }
        assert_eq!(ring.in_flight(), OPERATIONS as usize);
        let mut seen = vec![false; OPERATIONS as usize];
        for _ in 0..OPERATIONS {
            let completion = complete_one(ring);
            assert_eq!(completion.result.unwrap(), 8);
            assert!(!std::mem::replace(&mut seen[completion.token as usize], true));
        }
        assert_eq!(ring.in_flight(), 0);
        assert!(ring.next_completion().is_none());
        let content = std::fs::read(&path).unwrap();
        let expected: Vec<u8> = (0..OPERATIONS).flat_map(u64::to_le_bytes).collect();
        assert!(content == expected);
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    });
}

#[test]
fn all_that_is_asked_for_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create_new(dir.path().join("f")).unwrap();
    let file = shared(file);
    in_every_mode(8, |ring| {
        for token in 0..5 {
            ring.write(token, &file, Bytes::from_static(b"x"), token, Durability::Cached);
        }
        // More than there are: all of them, not for ever.
        while ring.in_flight() > 0 {
            ring.submit_and_wait(100).unwrap();
            assert!(ring.completions().count() > 0);
        }
        ring.submit_and_wait(1).unwrap();
        assert_eq!(ring.completions().count(), 0);
    });
}

#[test]
fn a_descriptor_stays_open_under_an_operation() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let file = shared(File::create_new(&path).unwrap());
    let mut ring = Ring::new(8).unwrap();
    ring.write(1, &file, Bytes::from_static(b"late"), 0, Durability::Cached);
    drop(file); // not submitted yet
    let completion = complete_one(&mut ring);
    assert_eq!(completion.result.unwrap(), 4);
    assert!(matches!(completion.buffer, Buffer::Bytes(_)));
    let mut content = [0; 4];
    File::open(&path).unwrap().read_exact_at(&mut content, 0).unwrap();
    assert_eq!(&content, b"late");
}

#[test]
#[should_panic(expected = "out of range")]
fn the_file_position_cannot_be_meant_by_mistake() {
    let file = shared(File::open("/dev/null").unwrap());
    let mut ring = Ring::new(8).unwrap();
    ring.read(1, &file, BufPool::new(0).get(1), 0..1, u64::MAX);
}

#[test]
#[should_panic(expected = "out of range")]
fn the_kernel_is_never_given_more_than_the_buffer() {
    let file = shared(File::open("/dev/zero").unwrap());
    let mut ring = Ring::new(8).unwrap();
    ring.read(1, &file, BufPool::new(0).get(1), 0..BLOCK + 1, 0);
}

/// A pipe that nobody writes to is a disk that hangs.
#[test]
fn the_operation_on_a_file_that_waits_longest_is_named() {
    let zeroes = shared(File::open("/dev/zero").unwrap());
    in_every_mode(8, |ring| {
        let pool = BufPool::new(1 << 20);
        let (reader, mut writer) = std::io::pipe().unwrap();
        let (hangs, event) = (Arc::new(OwnedFd::from(reader)), EventFd::new().unwrap());
        ring.wait_event(1, &event);
        assert_eq!(ring.oldest_file_op(), None, "an event is no file");
        ring.submit_and_wait(0).unwrap();
        ring.read(2, &hangs, pool.get(BLOCK), 0..1, 0);
        let mut waited = Duration::ZERO;
        assert_eq!(ring.oldest_file_op(), Some((2, waited)), "it was started just now");
        for nth in 0..1_000 {
            ring.read(3, &zeroes, pool.get(BLOCK), 0..BLOCK, 0);
            assert_eq!(complete_one(ring).token, 3);
            let (token, longer) = ring.oldest_file_op().unwrap();
            assert!(token == 2 && longer > waited, "after {nth} others");
            waited = longer;
        }
        ring.read(4, &hangs, pool.get(BLOCK), 0..1, 0);
        writer.write_all(b"x").unwrap();
        let (ended, left) = (complete_one(ring).token, ring.oldest_file_op().unwrap());
        assert_eq!(left.0, if ended == 2 { 4 } else { 2 });
        writer.write_all(b"x").unwrap();
        complete_one(ring);
        assert_eq!(ring.oldest_file_op(), None);
        event.signal().unwrap();
        complete_one(ring);
    });
}
