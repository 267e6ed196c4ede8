//! Parts of a writer's status: its disks, its lag and backlog, a copy under way, and what its guest has done.

use crate::copy_job::{Progress, Purpose};
use crate::heartbeat::HeartbeatSettings;
use crate::stats::DiskWait;
use crate::words;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use tidelock_protocol::ids::MonoNanos;

/// A request that a local disk has not answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHangStatus {
    /// Disk; `None`: the file of the activity log, or not known any more.
    pub disk: Option<String>,
    /// Time since it was asked.
    pub ms: u64,
}

/// Distance of the backup behind the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LagStatus {
    /// Records.
    pub writes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The age of the oldest guest write among them.
    pub ms: u64,
}

/// Room between the sequencer and the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BacklogStatus {
    /// Bytes in it.
    pub used_bytes: u64,
    /// Limit.
    pub limit_bytes: u64,
    /// True if guests' writes wait for room now.
    pub writes_wait: bool,
    /// Requests that wait, for room or for anything else.
    pub waiting_requests: u64,
    /// Number of times that it has become full.
    pub full_count: u64,
    /// Part on disk, if it has one.
    #[serde(default)]
    pub on_disk: Option<BacklogOnDiskStatus>,
}

/// The part of a backlog that is on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BacklogOnDiskStatus {
    /// Bytes of its files. What the backup has leaves them segment by segment.
    pub file_bytes: u64,
    /// Records that are there and not in memory.
    pub records: u64,
    /// Bytes of the backlog in memory.
    pub memory_bytes: u64,
    /// The most of them.
    pub memory_limit_bytes: u64,
    /// The disk has failed: the backlog is in memory only, and that is its limit.
    pub failed: bool,
    /// True if nothing is recorded, because the backlog was full.
    #[serde(default)]
    pub overflowed: bool,
    /// Number of times that this came to pass.
    #[serde(default)]
    pub overflows: u64,
}

/// Requests of guests since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestIo {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes and zeroings.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Requests that failed on the local disk.
    pub disk_errors: u64,
    /// Open connections.
    pub connections: u64,
}

/// Status of a protected disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Name.
    pub name: String,
    /// The image or block device.
    pub path: PathBuf,
    /// Size.
    pub size_bytes: u64,
    /// Socket of its NBD server.
    pub socket: PathBuf,
}

/// A copy of disks under way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CopyStatus {
    /// The first copy, or the comparison after an unclean stop.
    pub kind: CopyKindStatus,
    /// Bytes that are done, of all disks.
    pub done_bytes: u64,
    /// Bytes of all disks.
    pub total_bytes: u64,
    /// Speed at this moment.
    pub rate_bytes_per_s: u64,
    /// Time left at this rate; `None` if it stands still.
    pub left_ms: Option<u64>,
    /// Why whole disks are compared, if they are.
    pub because: Option<String>,
}

impl CopyStatus {
    /// The share that is done, 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        match self.total_bytes {
            0 => 1.0,
            total => (self.done_bytes as f64 / total as f64).clamp(0.0, 1.0),
        }
    }
}

/// Kind of copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyKindStatus {
    /// The first: the backup has nothing.
    Initial,
    /// The comparison by digests after an unclean stop.
    Resync,
    /// The comparison by digests while all is well.
    Verify,
}

impl fmt::Display for CopyKindStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CopyKindStatus::Initial => "initial copy",
            CopyKindStatus::Resync => "resync",
            CopyKindStatus::Verify => "verify",
        })
    }
}

impl CopyStatus {
    /// A copy at one moment. `because`: the reason why whole disks are compared, if they are.
    pub(super) fn of(copy: &Progress, because: Option<String>) -> Self {
        Self {
            kind: match copy.purpose {
                Purpose::Initial => CopyKindStatus::Initial,
                Purpose::Compare => CopyKindStatus::Resync,
                Purpose::Verify { .. } => CopyKindStatus::Verify,
            },
            done_bytes: copy.done_bytes,
            total_bytes: copy.total_bytes,
            rate_bytes_per_s: copy.rate_bytes_per_s,
            left_ms: copy.seconds_left().map(|s| s * 1000),
            because,
        }
    }
}

impl DiskHangStatus {
    /// The disk of a member that has not answered for as long as heartbeats are waited for, if there is one.
    #[must_use]
    pub fn of(
        wait: &DiskWait,
        heartbeat: Option<HeartbeatSettings>,
        name_of: impl Fn(usize) -> Option<String>,
        now: MonoNanos,
    ) -> Option<Self> {
        let alarm_after = heartbeat.unwrap_or(HeartbeatSettings::DEFAULT).alarm_after;
        let (waited, nth) = wait.longer_than(alarm_after, now)?;
        Some(Self { disk: nth.and_then(name_of), ms: waited.as_millis() as u64 })
    }
}

/// A sentence for people.
impl fmt::Display for DiskHangStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.disk {
            Some(name) => write!(f, "disk {name}")?,
            None => f.write_str("the local disk")?,
        }
        write!(f, " has not answered a request for {}, so guests wait", words::ms(self.ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_hangs_by_name_once_heartbeats_would_be_missed() {
        let wait = DiskWait::default();
        let at = |s: u64| MonoNanos(s * 1_000_000_000);
        let alarm_after_s = HeartbeatSettings::DEFAULT.alarm_after.as_secs();
        let of = |now| DiskHangStatus::of(&wait, None, |nth| Some(format!("d{nth}")), now);
        assert_eq!(of(at(100)), None);
        wait.set(Some((at(100), Some(1))));
        assert_eq!(of(at(100 + alarm_after_s)), None);
        let hang = of(at(101 + alarm_after_s)).expect("it hangs");
        assert_eq!(hang.ms, 1000 * (alarm_after_s + 1));
        assert!(hang.to_string().starts_with("disk d1 has not answered"));
        wait.set(Some((at(100), None)));
        let hang = of(at(101 + alarm_after_s)).expect("it hangs");
        assert!(hang.to_string().starts_with("the local disk has"));
    }
}
