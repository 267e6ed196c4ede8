//! What status says of a writer's activity log.

use crate::activity::Standing;
use crate::stats::ActivityStats;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// Place where the sites may differ, and what a crash now would cost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivityStatus {
    /// What a resync would look at after a crash now.
    pub compares: ActivityCompares,
    /// Why all of the disks, if so.
    pub because: Option<String>,
    /// Bytes that would be compared.
    pub exposed_bytes: u64,
    /// Slots of the map in use.
    pub entries: u64,
    /// Requests whose extents were in the map.
    pub hits: u64,
    /// Requests that waited for a write of the log.
    pub misses: u64,
    /// Transactions written.
    pub transactions: u64,
    /// Number of times that the map was full of what the backup did not have, and was given up.
    pub overflows: u64,
}

/// What a resync would look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ActivityCompares {
    /// All of the disks: no log is kept.
    #[default]
    Unlogged,
    /// All of the disks, for now.
    Everything,
    /// The extents of the map.
    Map,
}

impl ActivityStatus {
    /// From the owner loop's numbers and the size of all disks.
    #[must_use]
    pub fn of(stats: &ActivityStats, all_bytes: u64) -> Self {
        let get = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let (compares, because) = match stats.standing() {
            Standing::Off => (ActivityCompares::Unlogged, None),
            Standing::Failing => {
                let why = "the log's file can be neither written nor removed: writes wait";
                (ActivityCompares::Everything, Some(why.to_owned()))
            }
            Standing::Everything(why) => (ActivityCompares::Everything, Some(why.to_string())),
            Standing::Mapped => (ActivityCompares::Map, None),
        };
        Self {
            compares,
            because,
            exposed_bytes: match compares {
                ActivityCompares::Map => get(&stats.exposed_bytes),
                _ => all_bytes,
            },
            entries: get(&stats.entries),
            hits: get(&stats.hits),
            misses: get(&stats.misses),
            transactions: get(&stats.transactions),
            overflows: get(&stats.overflows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activity::Why;

    #[test]
    fn what_a_crash_would_compare_is_the_map_or_everything() {
        let stats = ActivityStats::default();
        stats.exposed_bytes.store(7, Ordering::Relaxed);
        assert_eq!(ActivityStatus::of(&stats, 100).compares, ActivityCompares::Unlogged);
        stats.set_standing(Standing::Mapped);
        let status = ActivityStatus::of(&stats, 100);
        assert_eq!((status.compares, status.exposed_bytes), (ActivityCompares::Map, 7));
        stats.set_standing(Standing::Everything(Why::Overflow));
        let status = ActivityStatus::of(&stats, 100);
        assert_eq!((status.compares, status.exposed_bytes), (ActivityCompares::Everything, 100));
        assert!(status.because.unwrap().contains("slots"));
    }
}
