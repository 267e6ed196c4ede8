//! Readings of this host's clocks.

use crate::reading::Reading;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Attempts at a reading that no interruption has torn apart.
const ATTEMPTS: u32 = 3;
/// Time between two clocks that is good enough.
const SLOP_GOOD_NS: u64 = 1_000;

fn ns(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec)
}

fn read_once() -> Reading {
    let raw = || u64::try_from(ns(clock_gettime(ClockId::MonotonicRaw))).unwrap_or(0);
    let raw_ns = raw();
    let wall_ns = ns(clock_gettime(ClockId::Realtime));
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
