//! What the daemon says of itself: one snapshot for `tidelock status`, the live view, the control
//! API and the metrics.
//!
//! Invariant (DESIGN rule 6): nothing here is remembered as "in sync". Each snapshot is made from
//! what is durable at the backup, what the link and the gate do now, and [`assess`] turns these
//! facts into a [`Risk`]. Ages are in milliseconds before the snapshot, so that no clock of another
//! machine is needed to read them.
//!
//! The JSON form is stable: fields are added, never changed or removed, while [`SCHEMA`] stays.

mod activity;
mod heartbeat;
mod risk;
mod verify;

pub use activity::{ActivityCompares, ActivityStatus};
pub use heartbeat::{HeartbeatStatus, MissingStatus};
pub use risk::{Facts, Kind, Risk, Told, Undoes, Why, WriterFacts, assess};
pub use verify::VerifyStatus;

use crate::stats::LatencySnapshot;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use tidelock_protocol::ids::{Epoch, Seq};
use tidelock_protocol::message::{Form, Mode};

/// The version of the JSON form.
pub const SCHEMA: u16 = 1;

/// The whole daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`].
    pub schema: u16,
    /// The host's name.
    pub host: String,
    /// Software and version.
    pub software: String,
    /// How long the daemon has been running.
    pub uptime_ms: u64,
    /// This host is itself a virtual machine: what a pause of it is noticed by, and what cannot be excluded.
    #[serde(default)]
    pub virtual_machine: Option<String>,
    /// The connection to the backup.
    pub link: LinkStatus,
    /// All groups, in the order of the configuration.
    pub groups: Vec<GroupStatus>,
}

/// The connection to the backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// The backup's address as configured.
    pub backup: String,
    /// Whether it is up.
    pub state: LinkState,
    /// How long it has been up, or not been up.
    pub state_age_ms: u64,
    /// Whether the link is encrypted and both sides are authenticated.
    pub tls: bool,
    /// How long this host's certificate is still valid; 0: it is not, or cannot be read. `None`: none is used.
    pub certificate_valid_s: Option<u64>,
    /// Connections made since the start; more than one means that it was lost.
    pub connects: u64,
    /// Why it is not up, if it is not.
    pub problem: Option<String>,
    /// When the next attempt is made, if one is waiting.
    pub retry_in_ms: Option<u64>,
}

/// Whether the link is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkState {
    /// An attempt is being made.
    Connecting,
    /// The backup has answered the hello.
    Connected,
    /// No connection; the next attempt waits.
    Disconnected,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// Its name.
    pub name: String,
    /// The backup follows, and a disaster now would undo nothing that a client was told.
    pub protected: bool,
    /// The risk: what a disaster now would undo, who may have been told of it, and why.
    #[serde(flatten)]
    pub risk: Risk,
    /// The time for which the kind of reason has been the same.
    pub why_age_ms: u64,
    /// More about the reason, for people: the backup's refusal, the disk that fails, ...
    pub detail: Option<String>,
    /// The mode in force.
    pub mode: Mode,
    /// The mode that is wanted: the configuration's, or that of the last `tidelock mode` since the start. Another one is
    /// in force while the group is degraded, and `async` is not before the backup has heard of this run.
    pub wanted_mode: Mode,
    /// The mode of the configuration, which a restart brings back.
    pub configured_mode: Mode,
    /// What becomes of packets that have waited too long for the backup, as configured.
    #[serde(default = "hold")]
    pub when_unreachable: String,
    /// The group was handed to the backup site at this time of the host's wall clock, in milliseconds since the Unix
    /// epoch.
    #[serde(default)]
    pub switched_over_unix_ms: Option<u64>,
    /// The guest's disks are elsewhere still, and nothing goes to the backup before `tidelock adopt`.
    #[serde(default)]
    pub awaits_adoption: bool,
    /// The epoch granted by the backup; 0 before the first.
    pub epoch: Epoch,
    /// What lets the gate be open.
    pub lease: LeaseStatus,
    /// Its members on this host.
    pub members: Vec<MemberStatus>,
    /// Its members on other hosts.
    #[serde(default)]
    pub elsewhere: Vec<ElsewhereStatus>,
    /// How packets between members say what they depend on; `None`: there is one member.
    #[serde(default)]
    pub form: Option<Form>,
    /// Whether packets between members carry that: not if each is protected by itself.
    #[serde(default)]
    pub tagged: bool,
    /// In the HLC form: by how much the time up to which everything is at the backup is behind
    /// the group's newest record.
    #[serde(default)]
    pub watermark_lag_ms: Option<u64>,
}

fn hold() -> String {
    "hold".to_owned()
}

/// A member on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ElsewhereStatus {
    /// Its name.
    pub name: String,
    /// Its host; `None`: it was removed.
    pub host: Option<String>,
    /// What it does.
    #[serde(default)]
    pub roles: Vec<Role>,
}

/// What a member does in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// It has protected disks.
    Writer,
    /// It passes on what it hears from other members.
    Intermediate,
    /// It talks to clients.
    Outbound,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Writer => "writer",
            Role::Intermediate => "intermediate",
            Role::Outbound => "outbound",
        })
    }
}

/// The lease that the backup renews (DESIGN rule 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Whether it holds now.
    pub held: bool,
    /// For how long still.
    pub left_ms: u64,
    /// Its length.
    pub period_ms: u64,
    /// How long the backup waits.
    pub grace_ms: u64,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Its name.
    pub name: String,
    /// Its disks' side, if it is a writer.
    pub writer: Option<WriterStatus>,
    /// Its network cards that are held at a gate.
    #[serde(default)]
    pub gates: Vec<GateStatus>,
    /// What it does.
    #[serde(default)]
    pub roles: Vec<Role>,
    /// What became of its packets to and from other members, if they are tagged.
    #[serde(default)]
    pub tagging: Option<TaggingStatus>,
}

/// What the kernel programs at a member's interface have done since they were loaded. Reasons are
/// those of `TaggingStats`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaggingStatus {
    /// Packets to members that got a tag.
    pub tagged_packets: u64,
    /// Packets to members on this host, which need no tag.
    #[serde(default)]
    pub here_packets: u64,
    /// Packets to members that needed no tag, because all that they may depend on is committed.
    #[serde(default)]
    pub covered_packets: u64,
    /// Packets from members whose tag was merged and taken out.
    pub merged_packets: u64,
    /// Packets from others whose tag was taken out, and believed by nobody.
    pub foreign_packets: u64,
    /// Packets to members that could not be tagged and waited like those to clients, by reason.
    pub gated_packets: BTreeMap<String, u64>,
    /// Packets that were dropped because nobody can know what they depend on, by reason.
    pub dropped_packets: BTreeMap<String, u64>,
}

impl TaggingStatus {
    /// The counters of two interfaces of one member together.
    #[must_use]
    pub fn plus(mut self, other: TaggingStatus) -> TaggingStatus {
        self.tagged_packets += other.tagged_packets;
        self.here_packets += other.here_packets;
        self.covered_packets += other.covered_packets;
        self.merged_packets += other.merged_packets;
        self.foreign_packets += other.foreign_packets;
        for (to, from) in [
            (&mut self.gated_packets, other.gated_packets),
            (&mut self.dropped_packets, other.dropped_packets),
        ] {
            from.into_iter().for_each(|(why, count)| *to.entry(why).or_default() += count);
        }
        self
    }
}

/// A writer's disks and their way to the backup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WriterStatus {
    /// Its protected disks.
    pub disks: Vec<DiskStatus>,
    /// P: the last guest write admitted.
    pub pending: Seq,
    /// C: the last write that is durable at the backup, contiguously.
    pub committed: Seq,
    /// What the backup does not have yet.
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
    /// What guests have done.
    pub guest_io: GuestIo,
    /// By how much the host's wall clock is off what is believed, if it is not believed.
    #[serde(default)]
    pub clock_refused_ms: Option<i64>,
    /// How far others' clocks have brought this member's ahead.
    #[serde(default)]
    pub clock_lead_ms: u64,
    /// Where the sites may differ.
    #[serde(default)]
    pub activity: ActivityStatus,
    /// Whether the sites were seen to be equal.
    #[serde(default)]
    pub verify: VerifyStatus,
    /// Whether what is admitted comes back acknowledged.
    #[serde(default)]
    pub heartbeat: HeartbeatStatus,
    /// A local disk has not answered a request for as long as heartbeats are waited for, so guests wait.
    #[serde(default)]
    pub disk_hang: Option<DiskHangStatus>,
}

/// A request that a local disk has not answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHangStatus {
    /// Which disk; `None`: the file of the activity log, or not known any more.
    pub disk: Option<String>,
    /// How long ago it was asked.
    pub ms: u64,
}

/// How far the backup is behind.
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
    /// Its limit.
    pub limit_bytes: u64,
    /// Whether guests' writes wait for room now.
    pub writes_wait: bool,
    /// Requests that wait, for room or for anything else.
    pub waiting_requests: u64,
    /// How often it has become full.
    pub full_count: u64,
    /// Its part on disk, if it has one.
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
    /// Nothing is recorded, because the backlog was full.
    #[serde(default)]
    pub overflowed: bool,
    /// How often that came to pass.
    #[serde(default)]
    pub overflows: u64,
}

/// What guests have done since the daemon started.
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

/// One protected disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// The image or block device.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Where its NBD server listens.
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
    /// How quick it is now.
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

/// Which copy.
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

/// A member's gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateStatus {
    /// The interface whose outbound packets are held.
    pub interface: String,
    /// Whether covered packets leave.
    pub open: bool,
    /// Why not, if not.
    pub shut_because: Option<String>,
    /// Packets held now.
    pub held_packets: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// The longest of them has been held for this long.
    pub oldest_hold_ms: u64,
    /// Packets that have been held and released.
    pub released_packets: u64,
    /// Packets that were covered on arrival, or need no hold.
    pub passed_packets: u64,
    /// Packets dropped because the queue was full, ours or the kernel's, or because the rules that queue them were gone:
    /// TCP sends them again.
    pub dropped_packets: u64,
    /// How often somebody had changed its packet-filter rules, so that packets may have left unheld, and they were put
    /// back.
    #[serde(default)]
    pub rules_restored: u64,
    /// How often its rules were found changed: packets may have left unheld each time.
    #[serde(default)]
    pub may_have_left: u64,
    /// Why packets of the guest leave unheld now, if they may.
    #[serde(default)]
    pub unheld_because: Option<String>,
    /// Why no kernel programs watch the interface, if none do: nothing stops packets while its rules are gone.
    #[serde(default)]
    pub unwatched_because: Option<String>,
    /// How long released packets were held.
    pub hold_time: LatencySnapshot,
}

impl GroupStatus {
    /// True if an operator can sleep: the group is protected, or follows in mode async as configured.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        let is_async = self.mode == Mode::Async && self.configured_mode == Mode::Async;
        self.protected || (self.risk.why.kind == Kind::Following && is_async)
    }
}

impl Status {
    /// Whether an operator can sleep.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        self.groups.iter().all(GroupStatus::is_fine)
    }
}
