//! What the tests share.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tidelock_uring::{Completion, Ring, RingMode, SharedFd};

/// Far longer than anything here takes: only a lost completion or wake-up waits this long.
pub const LOST_AFTER: Duration = Duration::from_secs(60);

/// Runs a test in every mode that this kernel has.
pub fn in_every_mode(entries: u32, test: impl Fn(&mut Ring)) {
    for best in [RingMode::Deferred, RingMode::Cooperative, RingMode::Interrupting] {
        let mut ring = Ring::with_mode(entries, best).expect("io_uring is available");
        test(&mut ring);
    }
}

/// Submits, and returns the next completion.
pub fn complete_one(ring: &mut Ring) -> Completion {
    loop {
        if let Some(completion) = ring.next_completion() {
            return completion;
        }
        assert!(ring.in_flight() > 0, "nothing is in flight");
        ring.submit_and_wait_for(1, LOST_AFTER).expect("the kernel accepts the operations");
    }
}

/// A connected pair of stream sockets: one for the ring, one for the test.
pub fn socket_pair() -> (SharedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_read_timeout(Some(LOST_AFTER)).expect("a read timeout");
    (Arc::new(OwnedFd::from(ours)), theirs)
}

/// Directories on the file systems to test: the usual temporary one, and tmpfs.
pub fn directories() -> Vec<TempDir> {
    let mut dirs = vec![TempDir::new().expect("a temporary directory")];
    if Path::new("/dev/shm").is_dir() {
        dirs.push(TempDir::new_in("/dev/shm").expect("a directory on tmpfs"));
    } else {
        println!("skipped: tmpfs, because there is no /dev/shm");
    }
    dirs
}

/// A small random generator (splitmix64): the seed that a test prints repeats its run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = self.next().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }
}
