//! Sockets, events, timeouts and cancelling.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use crate::common::{LOST_AFTER, Random, complete_one, in_every_mode, socket_pair};
use bytes::Bytes;
use tidelock_uring::{
    BufPool, Buffer, EventFd, PollFor, Ring, SEND_BUFS_MAX, SendBufs, SharedFd, skip_sent,
};

const NEVER: Duration = Duration::from_secs(1 << 30);

#[test]
fn receives_append() {
    in_every_mode(8, |ring| {
        let (fd, mut peer) = socket_pair();
        let pool = BufPool::new(0);
        peer.write_all(b"one,").unwrap();
        let buf = pool.get(1);
        let whole = buf.capacity();
        ring.recv(1, &fd, buf, 0..whole);
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap(), 4);
        let buf = completion.buffer.into_aligned();

        // Started before there is anything to receive.
        let free = buf.len()..buf.capacity();
        ring.recv(2, &fd, buf, free);
        ring.submit_and_wait(0).unwrap();
        assert!(ring.next_completion().is_none());
        peer.write_all(b"two").unwrap();
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap(), 3);
        let buf = completion.buffer.into_aligned();
        assert_eq!(&*buf, b"one,two");

        drop(peer);
        let free = buf.len()..buf.capacity();
        ring.recv(3, &fd, buf, free);
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap(), 0, "the end of the stream");
        assert_eq!(&*completion.buffer.into_aligned(), b"one,two");
    });
}

/// Receives the whole range, and asks again where the kernel gave less (before Linux 5.19).
fn recv_all(ring: &mut Ring, fd: &SharedFd, pool: &BufPool, len: usize) -> Vec<u8> {
    let mut buf = pool.get(len);
    while buf.len() < len {
        let rest = buf.len()..len;
        ring.recv_full(9, fd, buf, rest);
        let completion = complete_one(ring);
        assert!(completion.result.unwrap() > 0, "the peer is there");
        buf = completion.buffer.into_aligned();
    }
    buf.to_vec()
}

#[test]
fn a_large_payload_arrives_whole() {
    const LEN: usize = 8 << 20;
    let mut sent = vec![0; LEN];
    Random(1).fill(&mut sent);
    in_every_mode(8, |ring| {
        let (fd, mut peer) = socket_pair();
        let pool = BufPool::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| peer.write_all(&sent).unwrap());
            assert!(recv_all(ring, &fd, &pool, LEN) == sent);
        });
    });
}

#[test]
fn sends_of_one_and_of_many_parts() {
    in_every_mode(8, |ring| {
        let (fd, mut peer) = socket_pair();
        for parts in [1, 2, 3, 100] {
            let bufs: SendBufs = (0..parts).map(|i| Bytes::from(vec![i as u8; 50])).collect();
            let expected: Vec<u8> = bufs.iter().flatten().copied().collect();
            ring.send(parts, &fd, bufs.clone());
            let completion = complete_one(ring);
            assert_eq!(completion.token, parts);
            assert_eq!(completion.result.unwrap() as usize, expected.len());
            assert_eq!(completion.buffer.into_many(), bufs);
            let mut got = vec![0; expected.len()];
            peer.read_exact(&mut got).unwrap();
            assert_eq!(got, expected);
        }
        ring.send(0, &fd, SendBufs::new());
        assert_eq!(complete_one(ring).result.unwrap(), 0, "nothing to send is not an error");
    });
}

#[test]
fn parts_beyond_the_limit_are_left_for_the_next_send() {
    let mut ring = Ring::new(8).unwrap();
    let (fd, mut peer) = socket_pair();
    let mut bufs: SendBufs = (0..SEND_BUFS_MAX + 3).map(|_| Bytes::from_static(b"ab")).collect();
    ring.send(1, &fd, bufs.clone());
    let sent = complete_one(&mut ring).result.unwrap() as usize;
    assert_eq!(sent, 2 * SEND_BUFS_MAX);
    skip_sent(&mut bufs, sent);
    assert_eq!(bufs.len(), 3);
    ring.send(2, &fd, bufs);
    assert_eq!(complete_one(&mut ring).result.unwrap(), 6);
    let mut got = vec![0; 2 * (SEND_BUFS_MAX + 3)];
    peer.read_exact(&mut got).unwrap();
    assert!(got.chunks(2).all(|pair| pair == b"ab"));
}

#[test]
fn skipping_what_was_sent() {
    let full = || SendBufs::from_iter([&b"abc"[..], b"", b"de", b"f"].map(Bytes::from_static));
    let text = "abcdef";
    for sent in 0..=text.len() {
        let mut bufs = full();
        skip_sent(&mut bufs, sent);
        let rest: Vec<u8> = bufs.iter().flatten().copied().collect();
        assert_eq!(rest, &text.as_bytes()[sent..]);
    }
    let mut bufs = full();
    skip_sent(&mut bufs, text.len());
    assert!(bufs.is_empty());
    assert!(std::panic::catch_unwind(|| skip_sent(&mut full(), text.len() + 1)).is_err());
}

#[test]
fn a_full_socket_takes_a_part_and_the_rest_goes_later() {
    const PART: usize = 1 << 20;
    let mut data = vec![0; 8 * PART];
    Random(2).fill(&mut data);
    let data = Bytes::from(data);
    in_every_mode(8, |ring| {
        let (fd, mut peer) = socket_pair();
        let mut bufs: SendBufs = (0..8).map(|i| data.slice(i * PART..(i + 1) * PART)).collect();
        ring.send(1, &fd, bufs.clone());
        ring.submit_and_wait(0).unwrap();
        // Nobody reads, so it cannot end by itself; kernels before 5.19 report the part at once.
        ring.cancel(1);
        let completion = complete_one(ring);
        let sent = completion.result.unwrap() as usize;
        assert!(sent > 0 && sent < data.len(), "{sent} bytes were sent");
        assert_eq!(completion.buffer.into_many(), bufs);

        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            peer.read_to_end(&mut got).unwrap();
            got
        });
        skip_sent(&mut bufs, sent);
        while !bufs.is_empty() {
            ring.send(2, &fd, bufs);
            let completion = complete_one(ring);
            let sent = completion.result.unwrap() as usize;
            bufs = completion.buffer.into_many();
            skip_sent(&mut bufs, sent);
        }
        drop(fd);
        assert!(reader.join().unwrap() == data);
    });
}

#[test]
fn a_peer_that_is_gone_is_an_error_and_not_a_signal() {
    in_every_mode(8, |ring| {
        for parts in [1, 2] {
            let (fd, peer) = socket_pair();
            drop(peer);
            let bufs: SendBufs = (0..parts).map(|_| Bytes::from_static(b"x")).collect();
            ring.send(1, &fd, bufs);
            assert_eq!(complete_one(ring).result.unwrap_err().kind(), ErrorKind::BrokenPipe);
        }
    });
}

#[test]
fn accepts_connections() {
    let dir = tempfile::tempdir().unwrap();
    in_every_mode(8, |ring| {
        let path = dir.path().join("socket");
        let listener: SharedFd = Arc::new(OwnedFd::from(UnixListener::bind(&path).unwrap()));
        ring.accept(1, &listener);
        ring.submit_and_wait(0).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        let completion = complete_one(ring);
        assert_eq!(completion.result.unwrap(), 0);
        let connection = completion.buffer.into_fd().expect("a connection");
        ring.send(2, &connection, SendBufs::from_iter([Bytes::from_static(b"hello")]));
        assert_eq!(complete_one(ring).result.unwrap(), 5);
        drop(connection);
        let mut greeting = String::new();
        client.read_to_string(&mut greeting).unwrap();
        assert_eq!(greeting, "hello");

        ring.accept(3, &listener);
        ring.submit_and_wait(0).unwrap();
        assert_eq!(ring.cancel(3), 1);
        let completion = complete_one(ring);
        assert!(completion.result.is_err());
        assert!(matches!(completion.buffer, Buffer::None));
        std::fs::remove_file(&path).unwrap();
    });
}

#[test]
fn polls_until_ready() {
    in_every_mode(8, |ring| {
        let (fd, mut peer) = socket_pair();
        ring.poll(1, &fd, PollFor::Readable);
        ring.submit_and_wait(0).unwrap();
        assert!(ring.next_completion().is_none());
        peer.write_all(b"x").unwrap();
        let completion = complete_one(ring);
        assert_eq!((completion.token, completion.result.unwrap() & 1), (1, 1)); // POLLIN
        ring.poll(2, &fd, PollFor::Writable);
        let completion = complete_one(ring);
        assert_eq!((completion.token, completion.result.unwrap() & 4), (2, 4)); // POLLOUT
    });
}

#[test]
fn timeouts_expire_and_can_be_cancelled() {
    in_every_mode(8, |ring| {
        ring.timeout(1, NEVER);
        ring.timeout(2, Duration::from_millis(1));
        ring.timeout(3, Duration::ZERO);
        let mut expired = [complete_one(ring), complete_one(ring)].map(|completion| {
            assert_eq!(completion.result.unwrap(), 0);
            completion.token
        });
        expired.sort_unstable();
        assert_eq!(expired, [2, 3]);
        ring.cancel(1);
        let completion = complete_one(ring);
        assert_eq!(completion.token, 1);
        assert_eq!(completion.result.unwrap_err().raw_os_error(), Some(125)); // ECANCELED
    });
}

#[test]
fn a_limited_wait_ends_without_an_error() {
    in_every_mode(8, |ring| {
        ring.timeout(1, NEVER);
        ring.submit_and_wait_for(1, Duration::from_millis(5)).unwrap();
        assert!(ring.next_completion().is_none());
        assert_eq!(ring.in_flight(), 1);
    });
}

#[test]
fn cancel_ends_all_operations_with_the_token_and_no_other() {
    in_every_mode(8, |ring| {
        let (fd, mut peer) = socket_pair();
        let pool = BufPool::new(0);
        ring.recv(5, &fd, pool.get(1), 0..1);
        ring.timeout(5, NEVER);
        ring.timeout(6, NEVER);
        assert_eq!(ring.cancel(7), 0);
        assert_eq!(ring.cancel(5), 2);
        for _ in 0..2 {
            let completion = complete_one(ring);
            assert_eq!(completion.token, 5);
            assert!(completion.result.is_err());
        }
        assert_eq!(ring.in_flight(), 1);
        assert_eq!(pool.usage().in_use_bytes, 0);
        // The cancelled receive took nothing from the stream.
        peer.write_all(b"z").unwrap();
        ring.recv(8, &fd, pool.get(1), 0..1);
        assert_eq!(&*complete_one(ring).buffer.into_aligned(), b"z");
    });
}

#[test]
fn no_wake_up_from_other_threads_is_lost() {
    const THREADS: u64 = 4;
    const MESSAGES: u64 = 5000;
    in_every_mode(8, |ring| {
        let event = EventFd::new().unwrap();
        let (sender, receiver) = mpsc::channel::<u64>();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                let (event, sender) = (event.clone(), sender.clone());
                scope.spawn(move || {
                    for message in 0..MESSAGES {
                        sender.send(message).unwrap();
                        event.signal().unwrap();
                    }
                });
            }
            let (mut count, mut sum) = (0, 0);
            ring.wait_event(1, &event);
            while count < THREADS * MESSAGES {
                ring.submit_and_wait_for(1, LOST_AFTER).unwrap();
                let completion = ring.next_completion().expect("a wake-up came");
                assert_eq!((completion.token, completion.result.unwrap()), (1, 0));
                while let Ok(message) = receiver.try_recv() {
                    count += 1;
                    sum += message;
                }
                ring.wait_event(1, &event);
            }
            assert_eq!(sum, THREADS * MESSAGES * (MESSAGES - 1) / 2);
        });
    });
}

#[test]
fn a_signal_before_the_wait_counts() {
    in_every_mode(8, |ring| {
        let event = EventFd::new().unwrap();
        event.signal().unwrap();
        event.signal().unwrap();
        ring.wait_event(1, &event);
        assert_eq!(complete_one(ring).result.unwrap(), 0);
        // Both were merged into one.
        ring.wait_event(2, &event);
        ring.submit_and_wait(0).unwrap();
        assert!(ring.next_completion().is_none());
        event.signal().unwrap();
        assert_eq!(complete_one(ring).token, 2);
    });
}
