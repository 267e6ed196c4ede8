//! What a group says of itself: from what is durable, never from a flag (rule 6).

use super::{CompressedStatus, DamagedDisk, DamagedSegment, Group, Now, PastStatus, ScrubStatus};
use crate::manifest::Member;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, GroupId, Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form, Mode};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::journal::{MemberPolicy, Position, Standing};

use super::recovery::Recovery;

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
}

/// One writer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterStatus {
    /// Its name.
    pub member: String,
    /// The host that it belongs to.
    pub host: Option<String>,
    /// Its mode.
    pub mode: Option<Mode>,
    /// Its last durable seq.
    pub durable: Seq,
    /// Its entry of C.
    pub committed: Seq,
    /// How much of its disks is here.
    pub copy: CopyState,
    /// Since when it is connected, in milliseconds since the Unix epoch.
    pub connected_since_unix_ms: Option<u64>,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
    /// Whether the group waits for it, is recoverable without it yet, or has done with it.
    pub standing: Standing,
    /// Its last durable record's time, as the milliseconds of an HLC.
    pub hlc_ms: u64,
}

/// A member without disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowerStatus {
    /// Its name.
    pub member: String,
    /// The host that it belongs to.
    pub host: String,
    /// Since when it is connected, in milliseconds since the Unix epoch.
    pub connected_since_unix_ms: Option<u64>,
}

/// A clock that is off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockStatus {
    /// The member on whose host it is; `None`: this server's own was set while it ran.
    pub member: Option<String>,
    /// How far it is ahead of this server's, in milliseconds; negative: behind. This server's own: how far it is ahead
    /// of the time by which points are named.
    pub ahead_ms: i64,
}

/// A clock that differs by less is not told, in milliseconds.
const CLOCK_OFF_MS: i64 = 2000;
/// Nor a host that is behind by less: its records may have waited.
const CLOCK_BEHIND_MS: i64 = 600_000;

/// A host of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Its name.
    pub host: String,
    /// A member of the group is attached by it.
    pub is_connected: bool,
    /// Time since it was heard; `None`: not since the group was opened.
    pub heard_ago_ms: Option<u64>,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// Its name.
    pub group: String,
    /// Its identity; `None`: the group cannot be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<GroupId>,
    /// The epoch in force.
    pub epoch: Epoch,
    /// Whether it can be recovered now, and by `recover` alone.
    pub recoverable: bool,
    /// Its writers.
    pub writers: Vec<WriterStatus>,
    /// Its members without disks.
    pub followers: Vec<FollowerStatus>,
    /// The hosts of its members.
    #[serde(default)]
    pub hosts: Vec<HostStatus>,
    /// By member: what its host does when this server cannot be reached, as it has said.
    #[serde(default)]
    pub policies: BTreeMap<String, MemberPolicy>,
    /// How records say what they depend on.
    pub form: Form,
    /// What a recovery would take now.
    pub cut: CountVector,
    /// In the HLC form every record up to this time is in the cut; 0 else.
    pub watermark: Hlc,
    /// By how much the watermark is behind the newest record; none as long as there is no watermark.
    pub watermark_lag_ms: Option<u64>,
    /// Records that are durable and not in the cut yet.
    pub beyond_the_cut: u64,
    /// The recovery that made this site the primary.
    pub recovered: Option<Recovery>,
    /// Every member has given up its lease: the group was switched over to this site.
    #[serde(default)]
    pub lease_given_up: bool,
    /// Some have: those that have not, with their hosts.
    #[serde(default)]
    pub lease_kept_by: Vec<String>,
    /// Until a recovery need not wait any more.
    pub grace_remaining_ms: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Those that are not in the images.
    pub unfolded_bytes: u64,
    /// Segments of the journal.
    pub journal_segments: u64,
    /// Bytes that it takes on disk.
    #[serde(default)]
    pub journal_stored_bytes: u64,
    /// What of it is compressed.
    #[serde(default)]
    pub compressed: CompressedStatus,
    /// How much of the past there is.
    #[serde(default)]
    pub past: PastStatus,
    /// What of the journal was verified since the group was opened.
    #[serde(default)]
    pub scrub: ScrubStatus,
    /// Damaged segments of the journal, oldest first.
    #[serde(default)]
    pub damaged: Vec<DamagedSegment>,
    /// What cannot be read of the state that a recovery would take.
    #[serde(default)]
    pub latest_damaged: Vec<DamagedDisk>,
    /// Clocks that are off.
    #[serde(default)]
    pub clocks: Vec<ClockStatus>,
    /// Messages and records of hosts that were refused because a number in them cannot be true.
    #[serde(default)]
    pub implausible: u64,
    /// Why folding does not work.
    pub fold_error: Option<String>,
    /// Why it does not acknowledge for now.
    pub stalled: Option<String>,
    /// Why it does not work at all.
    pub broken: Option<String>,
}

impl GroupStatus {
    /// Of a group that cannot be opened.
    #[must_use]
    pub fn of_broken(group: &str, reason: &str) -> Self {
        Self {
            group: group.to_owned(),
            id: None,
            epoch: Epoch(0),
            recoverable: false,
            writers: Vec::new(),
            followers: Vec::new(),
            hosts: Vec::new(),
            policies: BTreeMap::new(),
            form: Form::Vector,
            cut: CountVector::new(),
            watermark: Hlc(0),
            watermark_lag_ms: None,
            beyond_the_cut: 0,
            recovered: None,
            lease_given_up: false,
            lease_kept_by: Vec::new(),
            grace_remaining_ms: 0,
            journal_bytes: 0,
            unfolded_bytes: 0,
            journal_segments: 0,
            journal_stored_bytes: 0,
            compressed: CompressedStatus::default(),
            past: PastStatus::default(),
            scrub: ScrubStatus::default(),
            damaged: Vec::new(),
            latest_damaged: Vec::new(),
            clocks: Vec::new(),
            implausible: 0,
            fold_error: None,
            stalled: None,
            broken: Some(reason.to_owned()),
        }
    }
}

impl<S: Storage> Group<S> {
    /// Clocks that are off, as far as records tell.
    fn clocks(&self) -> Vec<ClockStatus> {
        let attached = self.slots.iter().enumerate().filter(|(_, slot)| slot.link.is_some());
        let of_hosts = attached.map(|(i, slot)| ClockStatus {
            member: Some(self.manifest.writers[i].clone()),
            ahead_ms: slot.clock_ahead_ms,
        });
        let of_hosts =
            of_hosts.filter(|of| of.ahead_ms > CLOCK_OFF_MS || of.ahead_ms < -CLOCK_BEHIND_MS);
        let own = ClockStatus { member: None, ahead_ms: self.arrival.wall_ahead_ms() };
        of_hosts.chain(Some(own).filter(|of| of.ahead_ms.abs() > CLOCK_OFF_MS)).collect()
    }

    /// Its status now.
    #[must_use]
    pub fn status(&self, now: Now) -> GroupStatus {
        let state = self.journal.state();
        let writers = self.manifest.writers.iter().enumerate().map(|(i, name)| {
            let writer = WriterId(i as u16);
            let member = self.manifest.member(writer);
            let attached = member.filter(|m| !m.is_seeded());
            let disks = member.map_or(Vec::new(), Member::present_disks).into_iter();
            let slot = &self.slots[i];
            WriterStatus {
                member: name.clone(),
                host: attached.map(|m| m.host.clone()),
                mode: attached.map(|m| m.mode),
                durable: self.commit.durable_of(writer),
                committed: self.commit.committed().get(writer),
                copy: self.durable_state.writers.get(i).map_or(CopyState::Empty, |of| of.copy),
                connected_since_unix_ms: slot
                    .link
                    .and(slot.attached_at)
                    .map(|attached| attached.unix_ms),
                standing: self.standing(writer),
                hlc_ms: state.writers[i].hlc.physical_ms(),
                disks: disks
                    .map(|d| DiskStatus { name: d.name, size_bytes: d.size_bytes })
                    .collect(),
            }
        });
        let followers = self.manifest.followers.iter().map(|(member, host)| {
            let connected = self.followers.iter().find(|f| f.member == *member);
            FollowerStatus {
                member: member.clone(),
                host: host.clone(),
                connected_since_unix_ms: connected.map(|f| f.attached_at.unix_ms),
            }
        });
        let durable = |writer: WriterId| {
            let counts = state.last_that_counts(writer, state.epoch);
            self.commit.durable_of(writer).min(counts).0
        };
        let beyond_the_cut = (0..state.writers.len() as u16)
            .map(WriterId)
            .map(|writer| durable(writer).saturating_sub(self.cut.cut().get(writer).0))
            .sum();
        GroupStatus {
            group: self.manifest.group.clone(),
            id: Some(self.manifest.id),
            epoch: state.epoch,
            recoverable: self.is_recoverable() && self.latest_damaged().is_empty(),
            writers: writers.collect(),
            followers: followers.collect(),
            hosts: self.hosts(now),
            policies: self.policies().clone(),
            form: state.form,
            cut: self.cut.cut().clone(),
            watermark: self.cut.watermark(),
            watermark_lag_ms: Some(self.cut.watermark())
                .filter(|watermark| *watermark > Hlc(0))
                .map(|at| self.frontier.physical_ms().saturating_sub(at.physical_ms())),
            beyond_the_cut,
            recovered: self.recovery(),
            lease_given_up: state.recovered().is_none() && self.has_no_lease(),
            lease_kept_by: match state.recovered() {
                Some(_) => Vec::new(),
                None => self.lease_kept_by(),
            },
            grace_remaining_ms: self.grace.remaining_ms(now.mono),
            journal_bytes: self.journal.bytes(),
            unfolded_bytes: self.unfolded_bytes(),
            journal_segments: self.journal.segments().len() as u64,
            journal_stored_bytes: self.journal.stored_after(Position::default()),
            compressed: self.compressed_status(),
            past: self.past_status(),
            scrub: self.scrub_status(),
            damaged: self.damaged(),
            latest_damaged: self.latest_damaged(),
            clocks: self.clocks(),
            implausible: self.implausible,
            fold_error: self.fold.last_error.clone(),
            stalled: self.stall_reason(),
            broken: self.broken.clone(),
        }
    }
}
