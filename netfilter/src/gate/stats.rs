//! What the gate did and does, readable at any time without a lock.
//!
//! Each has one writer (the gate's thread; for restored rules whoever follows the rules), so relaxed
//! atomics are exact; a snapshot may mix two moments, which is fine for metrics and status.

use crate::release_queue::{HoldReason, PassWhy, Released, ShutWhy};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tidelock_protocol::ids::MonoNanos;

/// Upper bounds of the hold-time histogram; one more bucket takes what is longer.
pub const HOLD_BUCKETS_MS: [u64; 14] =
    [1, 2, 5, 10, 20, 50, 75, 100, 150, 200, 500, 1_000, 5_000, 15_000];
/// How many buckets there are.
pub const HOLD_BUCKETS: usize = HOLD_BUCKETS_MS.len() + 1;

const SHUT_NO_LEASE: u64 = 1;
const SHUT_FENCED: u64 = 2;
const SHUT_GAP: u64 = 3;
const SHUT_LEFT_BACKLOG: u64 = 5;
const SHUT_FLOOR_UNKNOWN: u64 = 4;

/// One member's counters.
#[derive(Debug, Default)]
pub struct GateStats {
    held_packets: AtomicU64,
    held_bytes: AtomicU64,
    oldest_arrival: AtomicU64,
    hold_buckets: [AtomicU64; HOLD_BUCKETS],
    hold_ns_sum: AtomicU64,
    hold_ns_longest: AtomicU64,
    released_packets: AtomicU64,
    released_bytes: AtomicU64,
    passed_covered: AtomicU64,
    passed_pure_acks: AtomicU64,
    passed_never_held: AtomicU64,
    passed_async: AtomicU64,
    refused: AtomicU64,
    socket_overruns: AtomicU64,
    late_verdicts: AtomicU64,
    unread: AtomicU64,
    shut_why: AtomicU64,
    shut_since: AtomicU64,
    async_since: AtomicU64,
    rules_restored: AtomicU64,
    may_have_left: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateSnapshot {
    /// Packets that wait now.
    pub held_packets: u64,
    /// Bytes that wait now.
    pub held_bytes: u64,
    /// When the packet that waits longest arrived.
    pub oldest_arrival: Option<MonoNanos>,
    /// Packets by hold time, see [`HOLD_BUCKETS_MS`]; not cumulative.
    pub hold_buckets: [u64; HOLD_BUCKETS],
    /// All hold times together.
    pub hold_ns_sum: u64,
    /// The longest hold of a packet that has left.
    pub hold_ns_longest: u64,
    /// Packets that left after a hold.
    pub released_packets: u64,
    /// Bytes that left after a hold.
    pub released_bytes: u64,
    /// Packets that were covered on arrival.
    pub passed_covered: u64,
    /// Pure acknowledgements that passed beside held packets or uncovered.
    pub passed_pure_acks: u64,
    /// Neighbour discovery.
    pub passed_never_held: u64,
    /// Packets that passed because the mode is async: a disaster may undo what they told.
    pub passed_async: u64,
    /// Packets that were dropped because too many waited.
    pub refused: u64,
    /// How often the netlink socket overran; the kernel counts the packets.
    pub socket_overruns: u64,
    /// Verdicts about packets that were gone: their interface went down.
    pub late_verdicts: u64,
    /// Messages from the kernel that were not understood.
    pub unread: u64,
    /// Why and since when the gate is shut, if it is.
    pub shut: Option<(ShutWhy, MonoNanos)>,
    /// Since when the mode is async: what clients have seen since may be undone.
    pub async_since: Option<MonoNanos>,
    /// How often its packet-filter rules were not as they were installed, and were put back.
    pub rules_restored: u64,
    /// How often its rules were found changed, so that packets may have left unheld.
    pub may_have_left: u64,
}

impl GateStats {
    /// The counters now.
    #[must_use]
    pub fn snapshot(&self) -> GateSnapshot {
        let get = |value: &AtomicU64| value.load(Relaxed);
        let since = |value: &AtomicU64| Some(MonoNanos(get(value))).filter(|at| at.0 != 0);
        let why = match get(&self.shut_why) {
            SHUT_NO_LEASE => Some(ShutWhy::NoLease),
            SHUT_FENCED => Some(ShutWhy::Fenced),
            SHUT_GAP => Some(ShutWhy::Held(HoldReason::Gap)),
            SHUT_LEFT_BACKLOG => Some(ShutWhy::Held(HoldReason::LeftBacklog)),
            SHUT_FLOOR_UNKNOWN => Some(ShutWhy::FloorUnknown),
            _ => None,
        };
        GateSnapshot {
            held_packets: get(&self.held_packets),
            held_bytes: get(&self.held_bytes),
            oldest_arrival: since(&self.oldest_arrival),
            hold_buckets: std::array::from_fn(|i| get(&self.hold_buckets[i])),
            hold_ns_sum: get(&self.hold_ns_sum),
            hold_ns_longest: get(&self.hold_ns_longest),
            released_packets: get(&self.released_packets),
            released_bytes: get(&self.released_bytes),
            passed_covered: get(&self.passed_covered),
            passed_pure_acks: get(&self.passed_pure_acks),
            passed_never_held: get(&self.passed_never_held),
            passed_async: get(&self.passed_async),
            refused: get(&self.refused),
            socket_overruns: get(&self.socket_overruns),
            late_verdicts: get(&self.late_verdicts),
            unread: get(&self.unread),
            shut: why.map(|why| (why, MonoNanos(get(&self.shut_since)))),
            async_since: since(&self.async_since),
            rules_restored: get(&self.rules_restored),
            may_have_left: get(&self.may_have_left),
        }
    }

    pub(super) fn passed(&self, why: PassWhy) {
        add(
            match why {
                PassWhy::Covered => &self.passed_covered,
                PassWhy::PureAck => &self.passed_pure_acks,
                PassWhy::NeverHeld => &self.passed_never_held,
                PassWhy::Async => &self.passed_async,
            },
            1,
        );
    }

    pub(super) fn left(&self, left: Released) {
        let bucket = HOLD_BUCKETS_MS.partition_point(|ms| ms * 1_000_000 < left.held_ns);
        add(&self.hold_buckets[bucket], 1);
        add(&self.hold_ns_sum, left.held_ns);
        add(&self.released_packets, 1);
        add(&self.released_bytes, u64::from(left.len_bytes));
        if left.held_ns > self.hold_ns_longest.load(Relaxed) {
            self.hold_ns_longest.store(left.held_ns, Relaxed);
        }
    }

    pub(super) fn refused(&self) {
        add(&self.refused, 1);
    }

    pub(super) fn socket_overrun(&self) {
        add(&self.socket_overruns, 1);
    }

    pub(super) fn rules_restored(&self) {
        add(&self.rules_restored, 1);
    }

    pub(super) fn may_have_left(&self) {
        add(&self.may_have_left, 1);
    }

    pub(super) fn waiting(&self, packets: u64, bytes: u64, oldest: Option<MonoNanos>) {
        self.held_packets.store(packets, Relaxed);
        self.held_bytes.store(bytes, Relaxed);
        self.oldest_arrival.store(oldest.map_or(0, |at| at.0), Relaxed);
    }

    pub(super) fn netlink(&self, late_verdicts: u64, unread: u64) {
        self.late_verdicts.store(late_verdicts, Relaxed);
        self.unread.store(unread, Relaxed);
    }

    /// The gate has shut, or opened. A lease that ends because of a fence keeps its time.
    pub(super) fn shut(&self, why: Option<ShutWhy>, now: MonoNanos) {
        let code = match why {
            None => 0,
            Some(ShutWhy::NoLease) => SHUT_NO_LEASE,
            Some(ShutWhy::Fenced) => SHUT_FENCED,
            Some(ShutWhy::Held(HoldReason::Gap)) => SHUT_GAP,
            Some(ShutWhy::Held(HoldReason::LeftBacklog)) => SHUT_LEFT_BACKLOG,
            Some(ShutWhy::FloorUnknown) => SHUT_FLOOR_UNKNOWN,
        };
        if self.shut_why.load(Relaxed) == 0 {
            self.shut_since.store(now.0, Relaxed);
        }
        self.shut_why.store(code, Relaxed);
    }

    pub(super) fn set_async(&self, is_async: bool, now: MonoNanos) {
        match (is_async, self.async_since.load(Relaxed)) {
            (false, _) => self.async_since.store(0, Relaxed),
            (true, 0) => self.async_since.store(now.0, Relaxed),
            (true, _) => {}
        }
    }
}

/// One thread writes, so this needs no locked instruction.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release_queue::PacketId;

    #[test]
    fn hold_times_fall_into_their_buckets() {
        let stats = GateStats::default();
        for held_ns in [0, 1_000_000, 1_000_001, 60_000_000, 16_000_000_000] {
            stats.left(Released { id: PacketId(1), len_bytes: 10, held_ns });
        }
        let s = stats.snapshot();
        assert_eq!((s.hold_buckets[0], s.hold_buckets[1], s.hold_buckets[6]), (2, 1, 1));
        assert_eq!(s.hold_buckets[HOLD_BUCKETS - 1], 1);
        assert_eq!((s.released_packets, s.released_bytes), (5, 50));
        assert_eq!(s.hold_ns_longest, 16_000_000_000);
    }

    #[test]
    fn times_since_when_begin_once() {
        let stats = GateStats::default();
        stats.shut(Some(ShutWhy::NoLease), MonoNanos(5));
        stats.shut(Some(ShutWhy::Fenced), MonoNanos(9));
        assert_eq!(stats.snapshot().shut, Some((ShutWhy::Fenced, MonoNanos(5))));
        stats.shut(None, MonoNanos(10));
        assert_eq!(stats.snapshot().shut, None);
        stats.set_async(true, MonoNanos(3));
        stats.set_async(true, MonoNanos(4));
        assert_eq!(stats.snapshot().async_since, Some(MonoNanos(3)));
        stats.set_async(false, MonoNanos(6));
        assert_eq!(stats.snapshot().async_since, None);
    }
}
