//! A gate as status sees it: the counters of its thread, of its kernel queue and of its kernel programs as plain data.

use tidelock_daemon_core::stats::{LATENCY_BOUNDS_US, LatencySnapshot};
use tidelock_daemon_core::status::{GateSeen, TaggingStatus};
use tidelock_netfilter::gate::{GateSnapshot, HOLD_BUCKETS_MS, TaggingStats};
use tidelock_netfilter::nfqueue::KernelCounters;

/// The gate of an interface that is there, and whose rules are in place.
#[must_use]
pub fn gate_seen(
    interface: &str,
    gate: &GateSnapshot,
    kernel: KernelCounters,
    programs: &TaggingStats,
) -> GateSeen {
    GateSeen {
        interface: interface.to_owned(),
        shut: gate.shut.map(|(why, _)| why),
        held_packets: gate.held_packets,
        held_bytes: gate.held_bytes,
        oldest_arrival: gate.oldest_arrival,
        released_packets: gate.released_packets,
        // Packets that the kernel programs let out, or drop, never come to the queue.
        passed_packets: programs.covered
            + gate.passed_covered
            + gate.passed_pure_acks
            + gate.passed_never_held
            + gate.passed_async,
        dropped_packets: gate.refused
            + kernel.dropped_full
            + kernel.dropped_socket
            + programs.dropped_no_rules,
        rules_restored: gate.rules_restored,
        may_have_left: gate.may_have_left,
        open_to_all: None,
        is_interface_there: true,
        unwatched_because: None,
        hold_time: hold_times(gate),
    }
}

/// The gate's histogram in the form that status uses for all latencies.
fn hold_times(gate: &GateSnapshot) -> LatencySnapshot {
    let mut buckets = vec![0; LATENCY_BOUNDS_US.len() + 1];
    for (i, count) in gate.hold_buckets.iter().enumerate() {
        // Each of the gate's bounds falls into one of these buckets; the last has no bound.
        let to = HOLD_BUCKETS_MS.get(i).map_or(LATENCY_BOUNDS_US.len(), |bound_ms| {
            LATENCY_BOUNDS_US.partition_point(|us| *us < bound_ms * 1000)
        });
        buckets[to] += count;
    }
    LatencySnapshot { buckets, sum_ns: gate.hold_ns_sum, max_ns: gate.hold_ns_longest }
}

/// The counters of the kernel programs at an interface.
#[must_use]
pub fn tagging_status(stats: &TaggingStats) -> TaggingStatus {
    let mut status = TaggingStatus {
        tagged_packets: stats.tagged,
        here_packets: stats.merged_here,
        covered_packets: stats.untagged_covered,
        merged_packets: stats.merged,
        foreign_packets: stats.stripped_foreign,
        ..TaggingStatus::default()
    };
    for (name, count) in stats.named() {
        if let Some(reason) = name.strip_prefix("gated_") {
            status.gated_packets.insert(reason.to_owned(), count);
        } else if let Some(reason) = name.strip_prefix("dropped_") {
            status.dropped_packets.insert(reason.to_owned(), count);
        }
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each counter of the programs that a packet's fate depends on is in the status.
    #[test]
    fn counters_come_by_reason() {
        let stats = TaggingStats {
            tagged: 1,
            merged: 2,
            stripped_foreign: 3,
            untagged_covered: 7,
            gated_mtu: 4,
            gated_path: 5,
            dropped_malformed: 6,
            ..TaggingStats::default()
        };
        let status = tagging_status(&stats);
        let few = (status.tagged_packets, status.merged_packets, status.foreign_packets);
        assert_eq!(few, (1, 2, 3));
        assert_eq!(status.covered_packets, 7);
        assert_eq!((status.gated_packets["mtu"], status.gated_packets["path"]), (4, 5));
        assert_eq!(status.gated_packets.values().sum::<u64>(), 9);
        assert_eq!(status.dropped_packets["malformed"], 6);
        assert_eq!(status.dropped_packets.values().sum::<u64>(), 6);
    }
}
