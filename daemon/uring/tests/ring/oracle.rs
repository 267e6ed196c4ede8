//! Random operations at random depth against a plain array.
//!
//! Operations in flight at the same time never overlap, as in the daemon, where the sequencer sees
//! to that: their order would not be defined.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;

use crate::common::{Random, complete_one, directories};
use tidelock_uring::{
    BufPool, Buffer, Completion, Durability, FallocateMode, LocalFile, OpenRequest, Ring, RingMode,
    SyncKind,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 512;
const DEPTH_MAX: u64 = 48;
const STEPS: u64 = 6000;

/// What an operation in flight will have done.
enum Expect {
    Read(Range<usize>),
    Write(Range<usize>, Vec<u8>),
    Zero(Range<usize>),
    Sync,
}

impl Expect {
    fn range(&self) -> Option<&Range<usize>> {
        match self {
            Expect::Read(range) | Expect::Write(range, _) | Expect::Zero(range) => Some(range),
            Expect::Sync => None,
        }
    }
}

struct Model {
    random: Random,
    oracle: Vec<u8>,
    in_flight: HashMap<u64, Expect>,
    next_token: u64,
}

impl Model {
    /// A range that nothing in flight touches.
    fn free_range(&mut self) -> Option<Range<usize>> {
        let len = 1 + self.random.below(16);
        let first = self.random.below(BLOCKS - len);
        let range = (first * BLOCK) as usize..((first + len) * BLOCK) as usize;
        let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
        let free = !self.in_flight.values().filter_map(Expect::range).any(overlaps);
        free.then_some(range)
    }

    fn start_one(&mut self, ring: &mut Ring, disk: &LocalFile, pool: &BufPool) {
        let token = self.next_token;
        let kind = self.random.below(100);
        let expect = if kind < 3 {
            ring.fsync(token, disk.fd(), SyncKind::Data);
            Expect::Sync
        } else {
            let Some(range) = self.free_range() else { return };
            let offset = range.start as u64;
            let len = range.len();
            match kind {
                3..50 => {
                    ring.read(token, disk.fd(), pool.get(len), 0..len, offset);
                    Expect::Read(range)
                }
                50..90 => {
                    let mut buf = pool.get(len);
                    buf.set_len(len);
                    self.random.fill(&mut buf);
                    let copy = buf.to_vec();
                    let durability =
                        if kind < 55 { Durability::Durable } else { Durability::Cached };
                    ring.write(token, disk.fd(), buf.freeze_all(), offset, durability);
                    Expect::Write(range, copy)
                }
                _ => {
                    let mode = if kind < 95 && disk.can_punch_hole() {
                        FallocateMode::PunchHole
                    } else if disk.can_zero_range() {
                        FallocateMode::ZeroRange
                    } else {
                        return;
                    };
                    ring.fallocate(token, disk.fd(), mode, offset, len as u64);
                    Expect::Zero(range)
                }
            }
        };
        self.in_flight.insert(token, expect);
        self.next_token += 1;
    }

    fn check(&mut self, completion: Completion) {
        let expect = self.in_flight.remove(&completion.token).expect("each token comes once");
        let count = completion.result.expect("no operation fails") as usize;
        match (expect, completion.buffer) {
            (Expect::Read(range), Buffer::Aligned(buf)) => {
                assert_eq!(count, range.len());
                assert!(buf[..] == self.oracle[range], "a read shows something else");
            }
            (Expect::Write(range, data), Buffer::Bytes(bytes)) => {
                assert_eq!(count, range.len());
                assert!(bytes == data, "the data changed on its way");
                self.oracle[range].copy_from_slice(&data);
            }
            (Expect::Zero(range), Buffer::None) => self.oracle[range].fill(0),
            (Expect::Sync, Buffer::None) => {}
            (_, buffer) => panic!("a completion with the wrong buffer: {buffer:?}"),
        }
    }
}

#[test]
fn random_operations_match_the_oracle() {
    let modes = [RingMode::Deferred, RingMode::Cooperative, RingMode::Interrupting];
    for (index, dir) in directories().into_iter().enumerate() {
        for (seed, mode) in (100 * index as u64..).zip(modes) {
            println!("seed {seed}, {mode}, {}", dir.path().display());
            let path = dir.path().join(format!("disk{seed}"));
            File::create_new(&path).unwrap().set_len(BLOCKS * BLOCK).unwrap();
            run(seed, Ring::with_mode(16, mode).unwrap(), &path);
        }
    }
}

fn run(seed: u64, mut ring: Ring, path: &std::path::Path) {
    let disk = LocalFile::open(path, &OpenRequest::default()).unwrap();
    let pool = BufPool::new(1 << 20);
    let mut model = Model {
        random: Random(seed),
        oracle: vec![0; (BLOCKS * BLOCK) as usize],
        in_flight: HashMap::new(),
        next_token: 0,
    };
    while model.next_token < STEPS {
        let depth = model.random.below(DEPTH_MAX);
        for _ in 0..depth {
            model.start_one(&mut ring, &disk, &pool);
        }
        let take = model.random.below(model.in_flight.len() as u64 + 1);
        for _ in 0..take {
            let completion = complete_one(&mut ring);
            model.check(completion);
        }
    }
    while !model.in_flight.is_empty() {
        let completion = complete_one(&mut ring);
        model.check(completion);
    }
    assert_eq!(ring.in_flight(), 0);
    assert_eq!(pool.usage().in_use_bytes, 0);
    drop(disk);
    assert!(std::fs::read(path).unwrap() == model.oracle, "the file shows something else");
}
