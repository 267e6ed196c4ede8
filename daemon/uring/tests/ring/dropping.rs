//! Dropping a ring with operations in flight is safe, prompt, and loses nothing that matters.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{complete_one, socket_pair};
use bytes::Bytes;
use tidelock_uring::{
    BufPool, Durability, EventFd, PollFor, Ring, RingMode, SendBufs, SharedFd, SyncKind,
};

const NEVER: Duration = Duration::from_secs(1 << 30);

fn rings() -> impl Iterator<Item = Ring> {
    [RingMode::Deferred, RingMode::Cooperative, RingMode::Interrupting]
        .into_iter()
        .map(|best| Ring::with_mode(8, best).expect("io_uring is available"))
}

#[test]
fn a_receive_that_never_completes_gives_its_buffer_and_socket_back() {
    for submitted in [true, false] {
        for mut ring in rings() {
            let (fd, mut peer) = socket_pair();
            let pool = BufPool::new(1 << 20);
            for token in 0..3 {
                ring.recv(token, &fd, pool.get(4096), 0..4096);
            }
            if submitted {
                ring.submit_and_wait(0).unwrap();
            }
            drop(fd);
            assert_eq!(pool.usage().in_use_bytes, 3 * 4096);
            drop(ring);
            assert_eq!(pool.usage().in_use_bytes, 0);
            // Nobody holds the other end any more.
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
            assert_eq!(peer.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
        }
    }
}

#[test]
fn every_kind_of_operation_can_be_in_flight() {
    let dir = tempfile::tempdir().unwrap();
    for (index, mut ring) in rings().enumerate() {
        let (fd, mut peer) = socket_pair();
        let pool = BufPool::new(0);
        let path = dir.path().join(format!("socket{index}"));
        let listener: SharedFd = Arc::new(OwnedFd::from(UnixListener::bind(&path).unwrap()));
        let file = Arc::new(OwnedFd::from(
            File::create_new(dir.path().join(format!("file{index}"))).unwrap(),
        ));
        let event = EventFd::new().unwrap();
        let large = pool.copy_of(&vec![1; 8 << 20]).freeze_all();

        ring.recv(1, &fd, pool.get(1), 0..1);
        ring.recv_full(2, &fd, pool.get(1), 0..1);
        ring.send(3, &fd, SendBufs::from_iter([large.clone(), large.clone()]));
        ring.accept(4, &listener);
        ring.poll(5, &fd, PollFor::Readable);
        ring.timeout(6, NEVER);
        ring.wait_event(7, &event);
        for token in 8..40 {
            ring.write(token, &file, large.slice(..65536), token * 65536, Durability::Cached);
        }
        ring.fsync(40, &file, SyncKind::Data);
        drop(large);
        ring.submit_and_wait(0).unwrap();
        assert!(pool.usage().in_use_bytes > 0);
        drop(ring);
        assert_eq!(pool.usage().in_use_bytes, 0);
        // Part of the send may have gone out; then the stream goes on with what we say.
        drop(fd);
        let mut got = Vec::new();
        peer.read_to_end(&mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == 1));
    }
}

#[test]
fn a_connection_that_nobody_took_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    for (index, mut ring) in rings().enumerate() {
        let path = dir.path().join(format!("socket{index}"));
        let listener: SharedFd = Arc::new(OwnedFd::from(UnixListener::bind(&path).unwrap()));
        ring.accept(1, &listener);
        let mut client = UnixStream::connect(&path).unwrap();
        ring.submit_and_wait(1).unwrap();
        drop(ring);
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "the listener lives, the connection not");
        drop(listener);
    }
}

#[test]
fn a_wake_up_that_nobody_took_reaches_the_next_ring() {
    for mut ring in rings() {
        let event = EventFd::new().unwrap();
        ring.wait_event(1, &event);
        event.signal().unwrap();
        ring.submit_and_wait(1).unwrap();
        drop(ring);
        let mut next = Ring::new(8).unwrap();
        next.wait_event(2, &event);
        assert_eq!(complete_one(&mut next).token, 2);
    }
}

#[test]
fn completions_that_nobody_took_give_their_buffers_back() {
    let dir = tempfile::tempdir().unwrap();
    let file = Arc::new(OwnedFd::from(File::create_new(dir.path().join("f")).unwrap()));
    for mut ring in rings() {
        let pool = BufPool::new(0);
        // More than the completion queue holds.
        for token in 0..100 {
            let data = pool.copy_of(b"data").freeze_all();
            ring.write(token, &file, data, 0, Durability::Cached);
        }
        ring.submit_and_wait(100).unwrap();
        let one = ring.completions().next().expect("a completion is there");
        drop((ring, one));
        assert_eq!(pool.usage().in_use_bytes, 0);
    }
}

#[test]
fn a_ring_dropped_by_a_panic_is_dropped_like_any_other() {
    let pool = BufPool::new(0);
    let (fd, _peer) = socket_pair();
    let in_thread = pool.clone();
    let result = std::thread::spawn(move || {
        let mut ring = Ring::new(8).unwrap();
        ring.recv(1, &fd, in_thread.get(1), 0..1);
        ring.send(2, &fd, SendBufs::from_iter([Bytes::from_static(b"x")]));
        ring.submit_and_wait(0).unwrap();
        panic!("a mistake in the owner loop");
    })
    .join();
    assert!(result.is_err());
    assert_eq!(pool.usage().in_use_bytes, 0);
}
