//! Readings of this host's clocks.

use crate::reading::Reading;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::time::{SystemTime, UNIX_EPOCH};

/// Attempts at a reading that no interruption has torn apart.
const ATTEMPTS: u32 = 3;
/// Time between two clocks that is good enough.
const SLOP_GOOD_NS: u64 = 1_000;

fn ns(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

/// The wall clock, by the same way as everybody who takes stamps: a library that puts it wrong for a test is seen, too.
fn wall_ns() -> i64 {
    let ns = |time: std::time::Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(since) => ns(since),
        Err(before) => -ns(before.duration()),
    }
}

fn read_once() -> Reading {
    let raw = || u64::try_from(ns(clock_gettime(ClockId::MonotonicRaw))).unwrap_or(0);
    let raw_ns = raw();
    let wall_ns = wall_ns();
    Reading { wall_ns, raw_ns, slop_ns: raw().saturating_sub(raw_ns) }
}

/// Reads both clocks, as close together as a few attempts allow.
#[must_use]
pub fn read_clocks() -> Reading {
    let mut best = read_once();
    for _ in 1..ATTEMPTS {
        if best.slop_ns <= SLOP_GOOD_NS {
            break;
        }
        let next = read_once();
        if next.slop_ns < best.slop_ns {
            best = next;
        }
    }
    best
}
