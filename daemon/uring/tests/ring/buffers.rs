//! Buffers: alignment, recycling, limits, and freezing without a copy.

use bytes::Bytes;
use tidelock_uring::{BufPool, CAPACITY_MAX_BYTES, CAPACITY_MIN_BYTES, PoolUsage};

const MIB: usize = 1 << 20;

#[test]
fn capacities_are_powers_of_two_and_memory_is_aligned() {
    let pool = BufPool::new(0);
    for (asked, got) in [
        (0, CAPACITY_MIN_BYTES),
        (1, CAPACITY_MIN_BYTES),
        (CAPACITY_MIN_BYTES, CAPACITY_MIN_BYTES),
        (CAPACITY_MIN_BYTES + 1, 2 * CAPACITY_MIN_BYTES),
        (MIB - 1, MIB),
        (CAPACITY_MAX_BYTES - 1, CAPACITY_MAX_BYTES),
        (CAPACITY_MAX_BYTES, CAPACITY_MAX_BYTES),
    ] {
        let mut buf = pool.get(asked);
        assert_eq!((buf.capacity(), buf.len()), (got, 0), "for {asked} bytes");
        assert_eq!(buf.spare_mut().as_ptr().addr() % CAPACITY_MIN_BYTES, 0);
        assert!(buf.spare_mut().iter().all(|byte| *byte == 0), "fresh memory is zeroed");
    }
}

#[test]
#[should_panic(expected = "the limit is")]
fn one_byte_too_many_is_a_mistake_of_the_caller() {
    BufPool::new(0).get(CAPACITY_MAX_BYTES + 1);
}

#[test]
fn a_buffer_goes_back_and_is_used_again() {
    let pool = BufPool::new(MIB);
    let mut first = pool.get(5000);
    let address = first.spare_mut().as_ptr();
    assert_eq!(pool.usage(), PoolUsage { in_use_bytes: 8192, retained_bytes: 0 });
    drop(first);
    assert_eq!(pool.usage(), PoolUsage { in_use_bytes: 0, retained_bytes: 8192 });
    let mut second = pool.get(8192);
    assert_eq!(second.spare_mut().as_ptr(), address);
    assert!(second.is_empty());
    assert_eq!(pool.usage(), PoolUsage { in_use_bytes: 8192, retained_bytes: 0 });
}

#[test]
fn the_pool_keeps_no_more_than_its_limit() {
    let pool = BufPool::new(3 * CAPACITY_MIN_BYTES);
    let bufs: Vec<_> = (0..10).map(|_| pool.get(CAPACITY_MIN_BYTES)).collect();
    drop(bufs);
    let limit = PoolUsage { in_use_bytes: 0, retained_bytes: 3 * CAPACITY_MIN_BYTES };
    assert_eq!(pool.usage(), limit);
    drop(pool.get(MIB)); // does not fit
    assert_eq!(pool.usage(), limit);
}

#[test]
fn freezing_shares_the_memory_until_the_last_clone_is_gone() {
    let pool = BufPool::new(MIB);
    let mut buf = pool.copy_of(b"headerpayload");
    let address = buf.as_mut_ptr();
    let payload = buf.freeze(6..13);
    assert_eq!(payload, Bytes::from_static(b"payload"));
    assert_eq!(payload.as_ptr(), address.wrapping_add(6), "nothing was copied");
    let clone = payload.slice(3..);
    drop(payload);
    assert_eq!(pool.usage().in_use_bytes, CAPACITY_MIN_BYTES);
    std::thread::spawn(move || drop(clone)).join().unwrap();
    let back = PoolUsage { in_use_bytes: 0, retained_bytes: CAPACITY_MIN_BYTES };
    assert_eq!(pool.usage(), back, "it came back from another thread");
}

#[test]
fn freezing_nothing_gives_the_memory_back() {
    let pool = BufPool::new(MIB);
    assert!(pool.get(1).freeze_all().is_empty());
    assert!(pool.copy_of(b"abc").freeze(2..2).is_empty());
    assert_eq!(pool.usage().in_use_bytes, 0);
}

#[test]
#[should_panic(expected = "is not within 0..3")]
fn only_what_is_filled_can_be_frozen() {
    BufPool::new(0).copy_of(b"abc").freeze(0..4);
}

#[test]
fn filling_consuming_and_shortening() {
    let pool = BufPool::new(0);
    let mut buf = pool.copy_of(b"first,second,");
    buf.extend_from_slice(b"third");
    buf.consume(6);
    assert_eq!(&*buf, b"second,third");
    buf.extend_zeroed(2);
    assert_eq!(&*buf, b"second,third\0\0");
    buf.set_len(6);
    buf[0] = b'S';
    assert_eq!(buf.as_ref(), b"Second");
    buf.clear();
    assert!(buf.is_empty());
    let capacity = buf.capacity();
    buf.extend_zeroed(capacity);
    assert!(buf.spare_mut().is_empty());
}

#[test]
#[should_panic(expected = "exceeds capacity")]
fn the_length_stays_within_the_capacity() {
    let mut buf = BufPool::new(0).get(1);
    buf.set_len(buf.capacity() + 1);
}

#[test]
fn many_threads_share_a_pool() {
    let pool = BufPool::new(MIB);
    let (sender, receiver) = std::sync::mpsc::sync_channel::<Bytes>(64);
    std::thread::scope(|scope| {
        for mark in 0..4u8 {
            let (pool, sender) = (pool.clone(), sender.clone());
            scope.spawn(move || {
                for i in 0..2000 {
                    let mut buf = pool.get(CAPACITY_MIN_BYTES << (i % 3));
                    buf.set_len(buf.capacity());
                    buf.fill(mark);
                    sender.send(buf.freeze_all()).unwrap();
                }
            });
        }
        drop(sender);
        for bytes in receiver {
            // Two owners of one block would show as mixed marks.
            assert!(bytes.iter().all(|byte| *byte == bytes[0]));
        }
    });
    let usage = pool.usage();
    assert_eq!(usage.in_use_bytes, 0);
    assert!(usage.retained_bytes <= MIB);
}
