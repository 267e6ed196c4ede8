//! Status of a member of a group.

use super::gate::GateContext;
use super::{GateSeen, GateStatus, GroupTerms, WriterSeen, WriterStatus};
use crate::group::Member;
use crate::owner::Clocks;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use tidelock_protocol::ids::Epoch;

/// Work of a member in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Role: it has protected disks.
    Writer,
    /// Role: it passes on what it hears from other members.
    Intermediate,
    /// Role: it talks to clients.
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

/// Status of a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberStatus {
    /// Name.
    pub name: String,
    /// The member's disks' side, if it is a writer.
    pub writer: Option<WriterStatus>,
    /// The member's network cards that are held at a gate.
    #[serde(default)]
    pub gates: Vec<GateStatus>,
    /// Work that it does.
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

/// A member on this host at one moment, beyond what the loop of its group sees of it.
#[derive(Clone, Debug)]
pub struct MemberSeen {
    /// Roles in the group.
    pub roles: Vec<Role>,
    /// The epoch that its state file has.
    pub epoch: Epoch,
    /// The gates of its network cards.
    pub gates: Vec<GateSeen>,
    /// Counters of the kernel programs at its interfaces; `None`: its packets are not tagged, or they cannot be read.
    pub tagging: Option<TaggingStatus>,
    /// Side of its disks, if it is a writer.
    pub writer: Option<WriterSeen>,
}

impl MemberSeen {
    /// A guest has a disk of it open.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.writer.as_ref().is_some_and(WriterSeen::is_in_use)
    }

    pub(super) fn status(
        &self,
        member: &Member,
        terms: &GroupTerms,
        context: GateContext,
        clocks: Clocks,
    ) -> MemberStatus {
        let context = GateContext { is_in_use: self.is_in_use(), ..context };
        let writer = self.writer.as_ref().zip(member.writer.as_ref());
        MemberStatus {
            name: member.name.clone(),
            writer: writer.map(|(seen, writer)| seen.status(writer, &member.link, terms, clocks)),
            gates: self.gates.iter().map(|gate| gate.status(context)).collect(),
            roles: self.roles.clone(),
            tagging: self.tagging.clone(),
        }
    }
}
