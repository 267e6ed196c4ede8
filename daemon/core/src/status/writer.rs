//! Status of a writer: its disks and their way to the backup.

use super::disks::DiskHangStatus;
use super::{
    ActivityStatus, BacklogOnDiskStatus, BacklogStatus, CopyStatus, DiskStatus, GroupTerms,
    GuestIo, HeartbeatStatus, LagStatus, VerifyStatus, ms,
};
use crate::group::Writer;
use crate::heartbeat::Pulse;
use crate::owner::{Clocks, OwnerView, Phase};
use crate::stats::{LatencySnapshot, LinkStats, OwnerStats};
use crate::verifications::Verifications;
use crate::verified::Verified;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tidelock_protocol::ids::{MonoNanos, Seq};

/// A writer's disks and their way to the backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WriterStatus {
    /// The member's protected disks.
    pub disks: Vec<DiskStatus>,
    /// P: the last guest write admitted.
    pub pending: Seq,
    /// C: the last write that is durable at the backup, contiguously.
    pub committed: Seq,
    /// Writes that the backup does not have yet.
    pub lag: LagStatus,
    /// The backup has every write of the guest now. Not while the first copy or a comparison runs, and not before it was
    /// reached.
    #[serde(default)]
    pub backup_has_all: bool,
    /// Room between the sequencer and the sender.
    pub backlog: BacklogStatus,
    /// The copy that is under way, if one is.
    pub copy: Option<CopyStatus>,
    /// From a write's admission to the backup's acknowledgement.
    pub commit_latency: LatencySnapshot,
    /// Requests of guests.
    pub guest_io: GuestIo,
    /// Amount by which the host's wall clock is off what is believed, if it is not believed.
    #[serde(default)]
    pub clock_refused_ms: Option<i64>,
    /// How far others' clocks have brought this member's ahead.
    #[serde(default)]
    pub clock_lead_ms: u64,
    /// Place where the sites may differ.
    #[serde(default)]
    pub activity: ActivityStatus,
    /// True if the sites were seen to be equal.
    #[serde(default)]
    pub verify: VerifyStatus,
    /// True if what is admitted comes back acknowledged.
    #[serde(default)]
    pub heartbeat: HeartbeatStatus,
    /// A local disk has not answered a request for as long as heartbeats are waited for, so guests wait.
    #[serde(default)]
    pub disk_hang: Option<DiskHangStatus>,
}

/// A writer at one moment, beyond what the loop of its group sees of it.
#[derive(Clone, Debug)]
pub struct WriterSeen {
    /// Disks.
    pub disks: Vec<DiskStatus>,
    /// The owner loop's numbers.
    pub stats: Arc<OwnerStats>,
    /// The owner loop's own account.
    pub view: Arc<OwnerView>,
    /// Heartbeats.
    pub pulse: Arc<Pulse>,
    /// Entry of C, as the link has heard.
    pub committed: Seq,
    /// The last verification on record.
    pub verified: Option<Verified>,
    /// The verifications of this run.
    pub verifications: Verifications,
}

fn get(value: &AtomicU64) -> u64 {
    value.load(Ordering::Relaxed)
}

impl WriterSeen {
    pub(super) fn is_in_use(&self) -> bool {
        self.stats.is_in_use()
    }

    /// A local disk that hangs.
    pub(super) fn disk_hang(&self, terms: &GroupTerms, now: MonoNanos) -> Option<DiskHangStatus> {
        let name_of = |nth: usize| Some(self.disks.get(nth)?.name.clone());
        DiskHangStatus::of(&self.stats.disk_wait, terms.heartbeat, name_of, now)
    }

    pub(super) fn status(
        &self,
        writer: &Writer,
        link: &LinkStats,
        terms: &GroupTerms,
        clocks: Clocks,
    ) -> WriterStatus {
        let (stats, now) = (&*self.stats, clocks.now);
        let lag_writes = writer.lag_writes(link);
        WriterStatus {
            disks: self.disks.clone(),
            pending: writer.published,
            committed: self.committed,
            backup_has_all: writer.has_all(link),
            lag: LagStatus {
                writes: lag_writes,
                bytes: link.lag_bytes(),
                ms: ms(link.lag_ns(now)),
            },
            backlog: BacklogStatus {
                // An idle loop has not looked at the last acknowledgements.
                used_bytes: match lag_writes {
                    0 => 0,
                    _ => get(&stats.backlog_bytes),
                },
                limit_bytes: match get(&stats.backlog_limit_bytes) {
                    0 => terms.backlog_limit_bytes,
                    limit_bytes => limit_bytes,
                },
                writes_wait: stats.backlog_full.load(Ordering::Relaxed),
                waiting_requests: get(&stats.waiting),
                full_count: get(&stats.backlog_full_count),
                on_disk: terms.backlog_memory_bytes.map(|bytes| self.on_disk(writer, bytes)),
            },
            copy: (self.view.copy())
                .map(|copy| CopyStatus::of(&copy, self.view.compares_all_because())),
            commit_latency: link.commit_latencies(),
            guest_io: GuestIo {
                reads: get(&stats.reads),
                read_bytes: get(&stats.read_bytes),
                writes: get(&stats.writes),
                written_bytes: get(&stats.written_bytes),
                flushes: get(&stats.flushes),
                disk_errors: get(&stats.disk_errors),
                connections: get(&stats.connections),
            },
            clock_refused_ms: Some(stats.clock_refused_ms.load(Ordering::Relaxed))
                .filter(|off| *off != 0),
            clock_lead_ms: get(&stats.clock_lead_ms),
            activity: ActivityStatus::of(
                &stats.activity,
                self.disks.iter().map(|disk| disk.size_bytes).sum(),
            ),
            verify: self.verify(terms, clocks.wall_ms),
            heartbeat: HeartbeatStatus::of(&self.pulse, terms.heartbeat, now),
            disk_hang: self.disk_hang(terms, now),
        }
    }

    fn on_disk(&self, writer: &Writer, memory_limit_bytes: u64) -> BacklogOnDiskStatus {
        BacklogOnDiskStatus {
            file_bytes: get(&self.stats.backlog_disk_bytes),
            records: get(&self.stats.backlog_spilled),
            memory_bytes: get(&self.stats.backlog_memory_bytes),
            memory_limit_bytes,
            failed: self.stats.backlog_disk_failed.load(Ordering::Relaxed),
            overflowed: writer.phase == Phase::Overflowed,
            overflows: get(&self.stats.overflows),
        }
    }

    fn verify(&self, terms: &GroupTerms, wall_ms: u64) -> VerifyStatus {
        let age = self.verified.as_ref().map(|last| last.age(wall_ms));
        VerifyStatus {
            running: self.view.verify().map(|progress| CopyStatus::of(&progress, None)),
            last: self.verified.clone(),
            age_ms: age.map(|age| age.as_millis() as u64),
            ended: self.verifications.ended,
            given_up: self.verifications.given_up.clone(),
            every_ms: terms.verify_every.map(|every| every.as_millis() as u64),
        }
    }
}
