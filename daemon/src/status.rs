//! What the daemon says of itself: one snapshot for `tidelock status`, the live view, the control
//! API and the metrics.
//!
//! Invariant (DESIGN rule 6): nothing here is remembered as "in sync". Each snapshot is made from
//! what is durable at the backup, what the link and the gate do now, and [`judge`] turns these
//! facts into one word. Ages are in milliseconds before the snapshot, so that no clock of another
//! machine is needed to read them.
//!
//! The JSON form is stable: fields are added, never changed or removed, while [`SCHEMA`] stays.

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
    /// How protected it is.
    pub state: GroupState,
    /// How long it has been so.
    pub state_age_ms: u64,
    /// More about the state, for people: the backup's refusal, the disk that fails, ...
    pub detail: Option<String>,
    /// The mode in force.
    pub mode: Mode,
    /// The mode of the configuration, which a restart brings back.
    pub configured_mode: Mode,
    /// Since when clients may have seen what a disaster would undo; `None` if they have not.
    pub unprotected_for_ms: Option<u64>,
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

/// How protected a group is, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupState {
    /// The backup has not been reached since the daemon started: guests' requests wait.
    WaitingForBackup,
    /// The first copy of the disks is under way: nothing could be recovered.
    Initialising,
    /// The backup is whole and what clients are told is covered.
    Protected,
    /// `async` by configuration: the backup is whole and follows, nothing is held.
    Replicating,
    /// A weaker mode than the configured one is in force: clients may know too much.
    Degraded,
    /// After an unclean stop the sites are being compared: the backup is whole but stands still.
    Resyncing,
    /// The link is down: writes fill the backlog, packets are held.
    Disconnected,
    /// The link is up but the backup has stopped acknowledging, or refuses the group.
    Stalled,
    /// The group was recovered at the backup: this host's gate never opens again.
    Fenced,
    /// The daemon is ending.
    Stopping,
}

impl GroupState {
    /// All states, from best to worst as far as an operator is concerned.
    pub const ALL: [GroupState; 10] = [
        GroupState::Protected,
        GroupState::Replicating,
        GroupState::Resyncing,
        GroupState::Initialising,
        GroupState::Degraded,
        GroupState::WaitingForBackup,
        GroupState::Disconnected,
        GroupState::Stalled,
        GroupState::Fenced,
        GroupState::Stopping,
    ];

    /// The word for it, as in the JSON form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GroupState::WaitingForBackup => "waiting-for-backup",
            GroupState::Initialising => "initialising",
            GroupState::Protected => "protected",
            GroupState::Replicating => "replicating",
            GroupState::Degraded => "degraded",
            GroupState::Resyncing => "resyncing",
            GroupState::Disconnected => "disconnected",
            GroupState::Stalled => "stalled",
            GroupState::Fenced => "fenced",
            GroupState::Stopping => "stopping",
        }
    }

    /// What it means, in one sentence.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            GroupState::WaitingForBackup => {
                "the backup was not reached since the start; the guest's disk waits for it"
            }
            GroupState::Initialising => {
                "the first copy is under way; nothing could be recovered yet"
            }
            GroupState::Protected => "a disaster now would undo nothing that a client was told",
            GroupState::Replicating => {
                "async: a disaster now would undo the lag, and clients may know of it"
            }
            GroupState::Degraded => {
                "a weaker mode than configured is in force; clients may know what a disaster would undo"
            }
            GroupState::Resyncing => {
                "the sites are being compared after an unclean stop; the backup stands at its last whole state"
            }
            GroupState::Disconnected => {
                "the link is down; writes fill the backlog and replies are held"
            }
            GroupState::Stalled => "the backup does not acknowledge; replies are held",
            GroupState::Fenced => {
                "the group was recovered at the backup; this host will never answer clients again"
            }
            GroupState::Stopping => "the daemon is ending",
        }
    }

    /// Whether an operator can sleep.
    #[must_use]
    pub fn is_fine(self) -> bool {
        matches!(self, GroupState::Protected | GroupState::Replicating)
    }
}

impl fmt::Display for GroupState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is known of a group when its state is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The daemon is ending.
    pub stopping: bool,
    /// The backup has ended this primary's epoch.
    pub fenced: bool,
    /// Each writer has been attached at least once in this run.
    pub ever_attached: bool,
    /// Each writer is attached now.
    pub attached: bool,
    /// The backup has said that it does not acknowledge, or refuses for now.
    pub stalled: bool,
    /// Some disk's first copy is not complete.
    pub initial_copy: bool,
    /// Some writer is being compared after an unclean stop.
    pub resync: bool,
    /// The mode in force.
    pub mode: Mode,
    /// The mode of the configuration.
    pub configured_mode: Mode,
}

/// The one word for these facts: the first that applies, worst first.
#[must_use]
pub fn judge(facts: Facts) -> GroupState {
    if facts.fenced {
        GroupState::Fenced
    } else if facts.stopping {
        GroupState::Stopping
    } else if !facts.ever_attached {
        if facts.stalled { GroupState::Stalled } else { GroupState::WaitingForBackup }
    } else if facts.stalled {
        GroupState::Stalled
    } else if !facts.attached {
        GroupState::Disconnected
    } else if facts.initial_copy {
        GroupState::Initialising
    } else if facts.resync {
        GroupState::Resyncing
    } else if facts.mode != Mode::Async {
        GroupState::Protected
    } else if facts.configured_mode == Mode::Async {
        GroupState::Replicating
    } else {
        GroupState::Degraded
    }
}

/// One member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Its name.
    pub name: String,
    /// Its disks' side, if it is a writer.
    pub writer: Option<WriterStatus>,
    /// Its network's side, if it is held at a gate.
    pub gate: Option<GateStatus>,
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
    /// Packets from members whose tag was merged and taken out.
    pub merged_packets: u64,
    /// Packets from others whose tag was taken out, and believed by nobody.
    pub foreign_packets: u64,
    /// Packets to members that could not be tagged and waited like those to clients, by reason.
    pub gated_packets: BTreeMap<String, u64>,
    /// Packets that were dropped because nobody can know what they depend on, by reason.
    pub dropped_packets: BTreeMap<String, u64>,
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
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
}

impl fmt::Display for CopyKindStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CopyKindStatus::Initial => "initial copy",
            CopyKindStatus::Resync => "resync",
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
    /// Packets dropped because the queue was full, ours or the kernel's: TCP sends them again.
    pub dropped_packets: u64,
    /// How long released packets were held.
    pub hold_time: LatencySnapshot,
}

impl Status {
    /// Whether an operator can sleep.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        self.groups.iter().all(|group| group.state.is_fine())
    }
}

/// A status as a healthy daemon gives it, for tests.
#[cfg(test)]
pub(crate) mod example {
    use super::*;
    use crate::stats::LatencyHistogram;

    fn times(ms: &[u64]) -> LatencySnapshot {
        let histogram = LatencyHistogram::default();
        ms.iter().for_each(|ms| histogram.record(ms * 1_000_000));
        histogram.snapshot()
    }

    pub(crate) fn status() -> Status {
        let disk = DiskStatus {
            name: "root".into(),
            path: "/var/lib/vms/db.img".into(),
            size_bytes: 40 << 30,
            socket: "/run/tidelock/shop/db/root.sock".into(),
        };
        let writer = WriterStatus {
            disks: vec![disk],
            pending: Seq(1_012),
            committed: Seq(1_000),
            lag: LagStatus { writes: 12, bytes: 48 << 10, ms: 52 },
            backlog: BacklogStatus {
                used_bytes: 1 << 20,
                limit_bytes: 256 << 20,
                writes_wait: false,
                waiting_requests: 0,
                full_count: 0,
            },
            copy: None,
            commit_latency: times(&[52, 52, 60]),
            guest_io: GuestIo { reads: 5, writes: 1_012, connections: 1, ..GuestIo::default() },
            clock_refused_ms: None,
            clock_lead_ms: 0,
        };
        let gate = GateStatus {
            interface: "tap0".into(),
            open: true,
            shut_because: None,
            held_packets: 4,
            held_bytes: 6_000,
            oldest_hold_ms: 48,
            released_packets: 900,
            passed_packets: 5_000,
            dropped_packets: 0,
            hold_time: times(&[50, 70]),
        };
        let tagging = TaggingStatus {
            tagged_packets: 700,
            merged_packets: 650,
            foreign_packets: 0,
            gated_packets: BTreeMap::from([("no_room".into(), 0), ("mtu".into(), 3)]),
            dropped_packets: BTreeMap::from([("malformed".into(), 0)]),
        };
        let group = GroupStatus {
            name: "shop".into(),
            state: GroupState::Protected,
            state_age_ms: 11_400_000,
            detail: None,
            mode: Mode::Pipelined,
            configured_mode: Mode::Pipelined,
            unprotected_for_ms: None,
            epoch: Epoch(1),
            lease: LeaseStatus { held: true, left_ms: 8_100, period_ms: 10_000, grace_ms: 15_000 },
            members: vec![MemberStatus {
                name: "db".into(),
                writer: Some(writer),
                gate: Some(gate),
                roles: vec![Role::Writer],
                tagging: Some(tagging),
            }],
            elsewhere: vec![ElsewhereStatus {
                name: "web".into(),
                host: Some("host-b".into()),
                roles: vec![Role::Outbound],
            }],
            form: Some(Form::Hlc),
            tagged: true,
            watermark_lag_ms: Some(60),
        };
        Status {
            schema: SCHEMA,
            host: "host-a".into(),
            software: "tidelockd 0.1.0".into(),
            uptime_ms: 11_520_000,
            link: LinkStatus {
                backup: "backup.example.org:9640".into(),
                state: LinkState::Connected,
                state_age_ms: 11_520_000,
                tls: true,
                connects: 1,
                problem: None,
                retry_in_ms: None,
            },
            groups: vec![group],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Facts = Facts {
        stopping: false,
        fenced: false,
        ever_attached: true,
        attached: true,
        stalled: false,
        initial_copy: false,
        resync: false,
        mode: Mode::Pipelined,
        configured_mode: Mode::Pipelined,
    };

    #[test]
    fn each_fact_has_its_word() {
        let cases = [
            (GOOD, GroupState::Protected),
            (Facts { mode: Mode::Sync, ..GOOD }, GroupState::Protected),
            (Facts { mode: Mode::Async, ..GOOD }, GroupState::Degraded),
            (
                Facts { mode: Mode::Async, configured_mode: Mode::Async, ..GOOD },
                GroupState::Replicating,
            ),
            (Facts { resync: true, ..GOOD }, GroupState::Resyncing),
            (Facts { initial_copy: true, ..GOOD }, GroupState::Initialising),
            (Facts { attached: false, ..GOOD }, GroupState::Disconnected),
            (Facts { attached: false, initial_copy: true, ..GOOD }, GroupState::Disconnected),
            (Facts { stalled: true, ..GOOD }, GroupState::Stalled),
            (Facts { stalled: true, attached: false, ..GOOD }, GroupState::Stalled),
            (Facts { ever_attached: false, attached: false, ..GOOD }, GroupState::WaitingForBackup),
            (Facts { stopping: true, ..GOOD }, GroupState::Stopping),
            (Facts { stopping: true, fenced: true, ..GOOD }, GroupState::Fenced),
        ];
        for (facts, state) in cases {
            assert_eq!(judge(facts), state, "{facts:?}");
        }
    }

    /// Rule 6: of all combinations, `protected` is said only if everything holds.
    #[test]
    fn nothing_else_is_called_protected() {
        for bits in 0..128u32 {
            let bit = |n: u32| bits & (1 << n) != 0;
            for mode in [Mode::Sync, Mode::Pipelined, Mode::Async] {
                let facts = Facts {
                    stopping: bit(0),
                    fenced: bit(1),
                    ever_attached: bit(2),
                    attached: bit(3),
                    stalled: bit(4),
                    initial_copy: bit(5),
                    resync: bit(6),
                    mode,
                    configured_mode: Mode::Pipelined,
                };
                let whole = bits == 0b000_1100 && mode != Mode::Async;
                assert_eq!(judge(facts) == GroupState::Protected, whole, "{facts:?}");
            }
        }
    }

    #[test]
    fn the_words_are_the_json_form() {
        for state in GroupState::ALL {
            let json = serde_json::to_string(&state).unwrap();
            assert_eq!(json, format!("\"{}\"", state.name()));
        }
    }
}
