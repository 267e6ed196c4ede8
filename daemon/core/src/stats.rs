//! Numbers that other threads read while the loops run: status, metrics, the live view.
//!
//! Each value is written by one loop and read by anyone; no reader ever makes a loop wait.

use crate::activity::{Standing, Why};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;

use Ordering::Relaxed;

/// Upper bounds of the histogram's buckets, in microseconds; the last bucket has none.
pub const LATENCY_BOUNDS_US: [u64; 15] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 75_000, 100_000, 250_000, 500_000,
    1_000_000, 5_000_000,
];

/// A histogram of times.
#[derive(Debug, Default)]
pub struct LatencyHistogram {
    buckets: [AtomicU64; LATENCY_BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// A histogram as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct LatencySnapshot {
    /// Counts by bucket (not cumulative); one more than there are bounds.
    pub buckets: Vec<u64>,
    /// Sum of all times.
    pub sum_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl LatencyHistogram {
    /// Counts one time.
    pub fn record(&self, ns: u64) {
        let bucket = LATENCY_BOUNDS_US.partition_point(|bound_us| bound_us * 1000 < ns);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// The counts so far.
    #[must_use]
    pub fn snapshot(&self) -> LatencySnapshot {
        LatencySnapshot {
            buckets: self.buckets.iter().map(|b| b.load(Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Relaxed),
            max_ns: self.max_ns.load(Relaxed),
        }
    }
}

impl LatencySnapshot {
    /// An upper bound of the time that a share of all took (0.5: the median); `None` if there are
    /// none.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().sum();
        if total == 0 {
            return None;
        }
        let rank = ((total as f64 * share).ceil() as u64).clamp(1, total);
        let mut seen = 0;
        for (i, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let bound_ns = LATENCY_BOUNDS_US.get(i).map(|us| us * 1000);
                return Some(bound_ns.map_or(self.max_ns, |b| b.min(self.max_ns)));
            }
        }
        None
    }
}

/// A member's link, as the link sees it.
#[derive(Debug, Default)]
pub struct LinkStats {
    attached: AtomicBool,
    is_stalled: AtomicBool,
    arrivals: AtomicU64,
    lag_writes: AtomicU64,
    lag_bytes: AtomicU64,
    /// When the oldest record that is not durable was admitted; 0: none.
    oldest_ns: AtomicU64,
    lease_sent_ns: AtomicU64,
    round_trip_ns: AtomicU64,
    policy_kept: AtomicBool,
    watermark: AtomicU64,
    frontier: AtomicU64,
    commit_latency: LatencyHistogram,
    stalled: Mutex<Option<String>>,
    refusal: Mutex<Option<String>>,
}

impl LinkStats {
    pub(crate) fn set_attached(&self, attached: bool) {
        self.attached.store(attached, Relaxed);
        if attached {
            self.set_refusal(None);
        }
    }

    pub(crate) fn bytes_arrive(&self) {
        self.arrivals.fetch_add(1, Relaxed);
    }

    /// How often the backup has said that bytes of a large record arrive.
    #[must_use]
    pub fn arrivals(&self) -> u64 {
        self.arrivals.load(Relaxed)
    }

    pub(crate) fn set_lag(&self, writes: u64, bytes: u64, oldest: Option<MonoNanos>) {
        self.lag_writes.store(writes, Relaxed);
        self.lag_bytes.store(bytes, Relaxed);
        self.oldest_ns.store(oldest.map_or(0, |at| at.0.max(1)), Relaxed);
    }

    pub(crate) fn lease_renewed(&self, sent_at: MonoNanos, now: MonoNanos) {
        self.lease_sent_ns.fetch_max(sent_at.0, Relaxed);
        self.round_trip_ns.store(now.since_ns(sent_at), Relaxed);
    }

    /// What the last answered beacon took, behind all that was under way, in nanoseconds; 0: none was answered.
    #[must_use]
    pub fn round_trip_ns(&self) -> u64 {
        self.round_trip_ns.load(Relaxed)
    }

    pub(crate) fn set_policy_kept(&self, is_kept: bool) {
        self.policy_kept.store(is_kept, Relaxed);
    }

    /// Whether the backup has on stable storage, as far as this run has heard, what this member's group
    /// does without it.
    #[must_use]
    pub fn is_policy_kept(&self) -> bool {
        self.policy_kept.load(Relaxed)
    }

    pub(crate) fn set_watermark(&self, watermark: Hlc, frontier: Hlc) {
        self.watermark.fetch_max(watermark.0, Relaxed);
        self.frontier.fetch_max(frontier.0, Relaxed);
    }

    /// The group's watermark and its newest record's time, as the backup said last.
    #[must_use]
    pub fn watermark(&self) -> (Hlc, Hlc) {
        (Hlc(self.watermark.load(Relaxed)), Hlc(self.frontier.load(Relaxed)))
    }

    pub(crate) fn commit_latency(&self, ns: u64) {
        self.commit_latency.record(ns);
    }

    pub(crate) fn set_stalled(&self, reason: Option<String>) {
        self.is_stalled.store(reason.is_some(), Relaxed);
        *self.stalled.lock().expect("no panic while held") = reason;
    }

    pub(crate) fn set_refusal(&self, reason: Option<String>) {
        *self.refusal.lock().expect("no panic while held") = reason;
    }

    /// Whether the backup has attached the member.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.attached.load(Relaxed)
    }

    /// Records that the backup has not made durable.
    #[must_use]
    pub fn lag_writes(&self) -> u64 {
        self.lag_writes.load(Relaxed)
    }

    /// Their payload bytes.
    #[must_use]
    pub fn lag_bytes(&self) -> u64 {
        self.lag_bytes.load(Relaxed)
    }

    /// Age of the oldest guest's write among them.
    #[must_use]
    pub fn lag_ns(&self, now: MonoNanos) -> u64 {
        match self.oldest_ns.load(Relaxed) {
            0 => 0,
            at => now.since_ns(MonoNanos(at)),
        }
    }

    /// When the last beacon that was answered had been sent.
    #[must_use]
    pub fn lease_sent_at(&self) -> Option<MonoNanos> {
        Some(self.lease_sent_ns.load(Relaxed)).filter(|ns| *ns > 0).map(MonoNanos)
    }

    /// From admission to the backup's acknowledgement.
    #[must_use]
    pub fn commit_latencies(&self) -> LatencySnapshot {
        self.commit_latency.snapshot()
    }

    /// Whether the backup has said that it has stopped acknowledging; takes no lock.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.is_stalled.load(Relaxed)
    }

    /// Why the backup has stopped acknowledging, if it has.
    #[must_use]
    pub fn stalled(&self) -> Option<String> {
        self.stalled.lock().expect("no panic while held").clone()
    }

    /// Why the backup refuses, if it does.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        self.refusal.lock().expect("no panic while held").clone()
    }
}

/// A member's owner loop.
#[derive(Debug, Default)]
pub struct OwnerStats {
    /// Guests' reads.
    pub reads: AtomicU64,
    /// Bytes read.
    pub read_bytes: AtomicU64,
    /// Guests' writes and zeroings.
    pub writes: AtomicU64,
    /// Bytes written.
    pub written_bytes: AtomicU64,
    /// Guests' flushes.
    pub flushes: AtomicU64,
    /// Requests that failed on the local disk.
    pub disk_errors: AtomicU64,
    /// Bytes that count against the backlog limit.
    pub backlog_bytes: AtomicU64,
    /// Requests that wait for an overlap, for room or for the start.
    pub waiting: AtomicU64,
    /// Whether they wait because the backlog is full.
    pub backlog_full: AtomicBool,
    /// How often it became full.
    pub backlog_full_count: AtomicU64,
    /// That limit, if a part of the backlog is on disk: then it changes.
    pub backlog_limit_bytes: AtomicU64,
    /// Bytes of the backlog on disk, whether or not they are in memory, too.
    pub backlog_disk_bytes: AtomicU64,
    /// Records that are there only.
    pub backlog_spilled: AtomicU64,
    /// What the backlog has in memory, if it has a part on disk.
    pub backlog_memory_bytes: AtomicU64,
    /// The part on disk has failed, and is not used.
    pub backlog_disk_failed: AtomicBool,
    /// How often that came to pass.
    pub overflows: AtomicU64,
    /// Open NBD connections.
    pub connections: AtomicU64,
    /// The greatest time that was given out or heard of others, as an HLC.
    pub greatest_hlc: AtomicU64,
    /// Writes wait until the ceiling of these times has been raised on record.
    pub waits_for_ceiling: AtomicBool,
    /// The wall clock as far as it is believed, in milliseconds since the Unix epoch.
    pub wall_ms: AtomicU64,
    /// By how much the wall clock is off what is believed, in milliseconds; 0: it is believed.
    pub clock_refused_ms: AtomicI64,
    /// How far this member's clock was brought ahead by others', in milliseconds.
    pub clock_lead_ms: AtomicU64,
    /// The oldest request that its local disks have not answered.
    pub disk_wait: DiskWait,
    /// Its activity log.
    pub activity: ActivityStats,
}

impl OwnerStats {
    /// A guest has a disk of the member open.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.connections.load(Relaxed) > 0
    }
}

/// The oldest request that a member's local disks have not answered, if one is in flight.
#[derive(Debug, Default)]
pub struct DiskWait {
    /// 0: none is.
    since_ns: AtomicU64,
    /// Which of its disks, from 1; 0: it is not one of them, or not known.
    disk: AtomicU64,
}

impl DiskWait {
    /// The owner loop: it has been in flight since then, on this one of the member's disks.
    pub fn set(&self, wait: Option<(MonoNanos, Option<usize>)>) {
        let (since, disk) = wait.map_or((0, None), |(since, disk)| (since.0.max(1), disk));
        self.disk.store(disk.map_or(0, |nth| nth as u64 + 1), Relaxed);
        self.since_ns.store(since, Relaxed);
    }

    /// For how long, and which of the member's disks, if it is longer than `after`: then something hangs.
    #[must_use]
    pub fn longer_than(
        &self,
        after: Duration,
        now: MonoNanos,
    ) -> Option<(Duration, Option<usize>)> {
        let since = Some(self.since_ns.load(Relaxed)).filter(|since| *since > 0)?;
        let waited = Duration::from_nanos(now.since_ns(MonoNanos(since)));
        let disk = self.disk.load(Relaxed).checked_sub(1).map(|nth| nth as usize);
        (waited > after).then_some((waited, disk))
    }
}

/// A member's activity log.
#[derive(Debug, Default)]
pub struct ActivityStats {
    standing: AtomicU8,
    /// Slots of the map in use.
    pub entries: AtomicU64,
    /// Bytes that a resync would compare after a crash now.
    pub exposed_bytes: AtomicU64,
    /// Requests whose extents were in the map.
    pub hits: AtomicU64,
    /// Requests that waited for a write of the log.
    pub misses: AtomicU64,
    /// Transactions written.
    pub transactions: AtomicU64,
    /// How often the map was given up because it was full of what the backup did not have.
    pub overflows: AtomicU64,
}

impl ActivityStats {
    const STANDINGS: [Standing; 7] = [
        Standing::Off,
        Standing::Failing,
        Standing::Everything(Why::Copy),
        Standing::Everything(Why::Overflow),
        Standing::Everything(Why::DiskFailed),
        Standing::Everything(Why::FlushFailed),
        Standing::Mapped,
    ];

    pub(crate) fn set_standing(&self, standing: Standing) {
        let nth = Self::STANDINGS.iter().position(|s| *s == standing).expect("all are listed");
        self.standing.store(nth as u8, Relaxed);
    }

    /// How it stands.
    #[must_use]
    pub fn standing(&self) -> Standing {
        Self::STANDINGS[usize::from(self.standing.load(Relaxed))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_come_from_the_buckets() {
        let h = LatencyHistogram::default();
        assert_eq!(h.snapshot().quantile_ns(0.5), None);
        for _ in 0..9 {
            h.record(90_000); // 90 us
        }
        h.record(60_000_000);
        let s = h.snapshot();
        assert_eq!(s.quantile_ns(0.5), Some(100_000));
        assert_eq!(s.quantile_ns(1.0), Some(60_000_000));
        assert_eq!(s.buckets.iter().sum::<u64>(), 10);
        h.record(100_000);
        assert_eq!(h.snapshot().buckets[0], 10, "a bound belongs to its bucket");
    }
}
