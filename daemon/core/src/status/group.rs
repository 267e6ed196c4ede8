//! Status of a group on a host.

use super::gate::GateContext;
use super::{Kind, MemberSeen, MemberStatus, Risk, Role, detail, ms};
use crate::group::{GateSight, GroupSettings, GroupView, Member};
use crate::heartbeat::HeartbeatSettings;
use crate::owner::Clocks;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, MonoNanos};
use tidelock_protocol::message::{Form, Mode};

/// Status of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// Name.
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
    /// Fate of packets that have waited too long for the backup, as configured.
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
    /// Lease that lets the gate be open.
    pub lease: LeaseStatus,
    /// Members on this host.
    pub members: Vec<MemberStatus>,
    /// Members on other hosts.
    #[serde(default)]
    pub elsewhere: Vec<ElsewhereStatus>,
    /// Form in which packets between members say what they depend on; `None`: there is one member.
    #[serde(default)]
    pub form: Option<Form>,
    /// True if packets between members carry that: not if each is protected by itself.
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
    /// Name.
    pub name: String,
    /// Host; `None`: it was removed.
    pub host: Option<String>,
    /// Work that it does.
    #[serde(default)]
    pub roles: Vec<Role>,
}

/// The lease that the backup renews (DESIGN rule 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// True if it holds now.
    pub held: bool,
    /// For how long still.
    pub left_ms: u64,
    /// Length.
    pub period_ms: u64,
    /// Time for which the backup waits.
    pub grace_ms: u64,
}

impl GroupStatus {
    /// True if an operator can sleep: the group is protected, or follows in mode async as configured.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        let is_async = self.mode == Mode::Async && self.configured_mode == Mode::Async;
        self.protected || (self.risk.why.kind == Kind::Following && is_async)
    }
}

/// The configuration of a group, as far as its loop does not go by it and status tells of it.
#[derive(Clone, Debug)]
pub struct GroupTerms {
    /// The policy without the backup, in words.
    pub when_unreachable: String,
    /// The time that the backup waits after the last renewal, in milliseconds.
    pub grace_ms: u64,
    /// Members that were removed, or are on other hosts.
    pub elsewhere: Vec<ElsewhereStatus>,
    /// The form of its tags, where it has several members.
    pub form: Form,
    /// Packets between its members carry tags.
    pub is_tagged: bool,
    /// Settings of heartbeats, if it has any.
    pub heartbeat: Option<HeartbeatSettings>,
    /// The time from one verification to the next, in a group that verifies by itself.
    pub verify_every: Option<Duration>,
    /// The lead of other members' clocks from which on it is an error, in milliseconds.
    pub max_clock_lead_ms: u64,
    /// The limit of each writer's backlog.
    pub backlog_limit_bytes: u64,
    /// The limit of its part in memory, where it has a part on disk.
    pub backlog_memory_bytes: Option<u64>,
}

/// A group on this host at one moment, beyond what its loop sees.
#[derive(Clone, Debug)]
pub struct GroupSeen {
    /// Configuration.
    pub terms: GroupTerms,
    /// The guest's disks are elsewhere still.
    pub awaits_adoption: bool,
    /// Members here, in the order of [`Surroundings::members`](crate::group::Surroundings::members).
    pub members: Vec<MemberSeen>,
}

/// A group on this host at one moment: all that its status is made of.
pub(crate) struct Instant<'a> {
    pub(crate) settings: &'a GroupSettings,
    pub(crate) view: GroupView,
    pub(crate) risk: Risk,
    /// The time since when the risk has been of its kind.
    pub(crate) since: MonoNanos,
    pub(crate) gate: Option<GateSight>,
    pub(crate) is_stopping: bool,
    pub(crate) clocks: Clocks,
    pub(crate) members: Vec<Member>,
    pub(crate) seen: GroupSeen,
}

impl Instant<'_> {
    pub(crate) fn status(self) -> GroupStatus {
        let terms = &self.seen.terms;
        let links = || self.members.iter().map(|member| &member.link);
        let told = links().map(|link| link.watermark());
        let (watermark, frontier): (Hlc, Hlc) = told.max().unwrap_or_default();
        let is_several = self.settings.is_of_several;
        let watermark_lag = frontier.physical_ms().saturating_sub(watermark.physical_ms());
        let epochs = self.seen.members.iter().map(|member| member.epoch);
        let context = self.gate_context();
        let pairs = self.seen.members.iter().zip(&self.members);
        GroupStatus {
            name: self.settings.name.clone(),
            protected: self.risk.is_protected(),
            why_age_ms: ms(self.clocks.now.since_ns(self.since)),
            detail: detail::of_group(&self),
            mode: self.view.mode,
            wanted_mode: self.view.wanted,
            configured_mode: self.settings.mode,
            when_unreachable: terms.when_unreachable.clone(),
            switched_over_unix_ms: self.view.switched_at_unix_ms,
            awaits_adoption: self.seen.awaits_adoption,
            epoch: epochs.max().unwrap_or_default(),
            lease: self.lease(),
            members: pairs
                .map(|(seen, member)| seen.status(member, terms, context, self.clocks))
                .collect(),
            elsewhere: terms.elsewhere.clone(),
            form: is_several.then_some(terms.form),
            tagged: terms.is_tagged,
            watermark_lag_ms: (is_several && terms.form == Form::Hlc).then_some(watermark_lag),
            risk: self.risk,
        }
    }

    fn gate_context(&self) -> GateContext {
        let mut writers = self.members.iter().filter_map(|member| member.writer.as_ref());
        GateContext {
            is_switched: self.view.switched_at_unix_ms.is_some(),
            is_superseded: writers.any(|writer| writer.is_superseded),
            is_in_use: false,
            now: self.clocks.now,
        }
    }

    /// The lease as the gate has it, or as the link would have told a gate of it.
    fn lease(&self) -> LeaseStatus {
        let period_ms = self.settings.lease_ms;
        let sent_at = self.members.iter().filter_map(|member| member.link.lease_sent_at()).max();
        let until = match &self.gate {
            Some(gate) => gate.lease_until,
            None => sent_at.map(|sent_at| sent_at.plus_ms(period_ms)),
        };
        let left_ms = match self.risk.why.kind {
            // A gate that is shut for good.
            Kind::Fenced => 0,
            _ => until.map_or(0, |until| ms(until.since_ns(self.clocks.now))),
        };
        LeaseStatus { held: left_ms > 0, left_ms, period_ms, grace_ms: self.seen.terms.grace_ms }
    }
}

/// The risk of a group as status told of it last.
#[derive(Clone, Debug, Default)]
pub(crate) struct RiskHistory {
    kind: Option<Kind>,
    since: MonoNanos,
    told: bool,
}

impl RiskHistory {
    /// Logs changes of a group's risk. Returns the time since when it has been of its kind.
    pub(crate) fn note(&mut self, group: &str, risk: &Risk, now: MonoNanos) -> MonoNanos {
        let (kind, text) = (risk.why.kind, &risk.why.text);
        if self.kind != Some(kind) {
            (self.since, self.kind) = (now, Some(kind));
            match kind {
                Kind::Following => tracing::info!(group, why = %kind, "{text}"),
                _ => tracing::warn!(group, why = %kind, "{text}"),
            }
        }
        let told = risk.told.is_some();
        match (std::mem::replace(&mut self.told, told), told) {
            (false, true) => {
                tracing::warn!(group, "clients may be told what a disaster would undo");
            }
            (true, false) => {
                tracing::info!(group, "the backup has all that clients may have been told");
            }
            _ => {}
        }
        self.since
    }
}
