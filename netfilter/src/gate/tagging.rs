//! Tags between the members of a group: what is configured, and what became of it.

use super::{GateError, Pending};
use crate::rules::Topology;
use crate::sys::now;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tidelock_protocol::tag::{Codec, Form, IPV4_OPTION, IPV4_WRITERS_MAX};
use tidelock_tagging::{
    Addresses, GroupTags, MemberTags, Peer, Pinned, Settings, TaggingError, interface_mtu,
};

pub use tidelock_tagging::{Hooks, TaggingStats};

/// Where kernel maps are pinned unless configured otherwise.
pub const PIN_DIRECTORY: &str = "/sys/fs/bpf/tidelock";
/// Bits of a packet's mark that the programs use between them and the first rules, unless configured otherwise.
pub const MARK_MASK: u32 = 0xffff_0000;
/// In bytes, from its network header on.
const LONGEST_PACKET: u32 = 65_535;
/// How far a member's time may be ahead of this host's clock.
pub const HLC_AHEAD_MAX_MS: u64 = 10_000;

/// The kernel programs on the interfaces of a group, and how they tag packets between its members.
///
/// Every interface gets the programs, also that of a member that is alone: what is not covered is dropped there while the
/// packet filter's rules behind them may be gone, and covered packets leave without a way through user space.
#[derive(Clone, Debug)]
pub struct TaggingConfig {
    /// What a tag says.
    pub form: Form,
    /// The group's writers, in the order of their ids: tags of a host that has another order are
    /// refused.
    pub writers: Vec<String>,
    /// Every member of the group, on whatever host, whose packets to others are tagged. None: nobody's are.
    pub members: Vec<TaggedMember>,
    /// The number of the IPv4 option.
    pub ipv4_option: u8,
    /// The longest packet, in bytes from its network header on, that every way between members
    /// takes. `None`: as long as the member's interface on this host.
    pub path_mtu: Option<u32>,
    /// Something between the members takes options away: packets between them wait like those to
    /// the outside.
    pub path_strips_options: bool,
    /// How far a member's time may be ahead of this host's clock and of the watermark, and by how much
    /// that clock may jump.
    pub hlc_ahead_max_ms: u64,
    /// The bits of a packet's mark that the programs use. Rules of others see them as 0: they are cleared before.
    pub mark_mask: u32,
    /// A directory on a file system for kernel maps; it is mounted if it is not there.
    pub pin_directory: PathBuf,
    /// Whether packets are tagged at all.
    pub switch: TaggingSwitch,
    /// A member whose P is new is held until the others have said how far they are: its guest may
    /// know more than nothing ([`GateHandle::complete`](super::GateHandle::complete)).
    pub await_floor: bool,
    /// Members whose P of an earlier run means nothing any more, because their group was begun anew.
    pub begun_anew: Vec<String>,
    /// What runs the programs on the members' interfaces.
    pub hooks: Hooks,
}

/// Whether packets between members are tagged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TaggingSwitch {
    /// They are.
    #[default]
    On,
    /// They pass untagged and unheld, and nothing is merged: clients learn what a disaster
    /// undoes. So that a drill can show that it would notice.
    OffForADemonstration,
}

/// A member of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaggedMember {
    /// Its name.
    pub name: String,
    /// What it sends from. Packets from other addresses of it are not tagged, but held.
    pub addresses: Vec<IpAddr>,
}

impl TaggingConfig {
    /// With what is usual.
    #[must_use]
    pub fn new(form: Form, writers: Vec<String>, members: Vec<TaggedMember>) -> Self {
        Self {
            form,
            writers,
            members,
            ipv4_option: IPV4_OPTION,
            path_mtu: None,
            path_strips_options: false,
            hlc_ahead_max_ms: HLC_AHEAD_MAX_MS,
            mark_mask: MARK_MASK,
            pin_directory: PIN_DIRECTORY.into(),
            switch: TaggingSwitch::On,
            await_floor: false,
            begun_anew: Vec::new(),
            hooks: Hooks::Best,
        }
    }

    /// Whether anybody depends on tags. A member alone has nobody to tell.
    pub(super) fn is_needed(&self) -> bool {
        self.members.len() > 1
    }

    pub(super) fn is_hlc(&self) -> bool {
        self.form == Form::Hlc
    }

    /// Its own addresses, and those of the other members.
    fn addresses_for(&self, member: &str, here: &[String]) -> Addresses {
        let (own, others): (Vec<_>, Vec<_>) = self.members.iter().partition(|m| m.name == member);
        let peers = others.iter().flat_map(|other| {
            let is_here = here.contains(&other.name);
            other.addresses.iter().map(move |address| Peer { address: *address, is_here })
        });
        let own = own.iter().flat_map(|m| m.addresses.clone()).collect();
        Addresses { own, peers: peers.collect() }
    }

    /// How the programs on one interface are set.
    fn settings(
        &self,
        group: &str,
        (interface, topology): (&str, Topology),
    ) -> Result<Settings, TaggingError> {
        let codec = Codec::new(self.form, group, self.writers.iter().map(String::as_str));
        if let Form::Vector { writers } = self.form
            && !codec.fits_ipv4()
            && self.members.iter().flat_map(|m| &m.addresses).any(IpAddr::is_ipv4)
        {
            let (most, why) = (IPV4_WRITERS_MAX, " in an IPv4 header");
            return Err(TaggingError::TooManyWriters { writers, most, why });
        }
        let path_mtu = match self.path_mtu {
            Some(mtu) => mtu,
            None if self.is_needed() => interface_mtu(interface)?,
            // Nothing is tagged, and the interface may come later.
            None => LONGEST_PACKET,
        };
        Ok(Settings {
            codec,
            ipv4_option: self.ipv4_option,
            mark_mask: self.mark_mask,
            path_mtu,
            path_strips_options: self.path_strips_options,
            hlc_ahead_max_ms: self.hlc_ahead_max_ms,
            hooks: self.hooks,
            is_bridged: topology == Topology::Bridged,
            off_for_a_demonstration: self.switch == TaggingSwitch::OffForADemonstration,
        })
    }
}

/// Whether a member's packets are tagged.
#[derive(Debug)]
pub enum MemberTagging {
    /// They are, and covered ones leave without a way through user space.
    On(Box<MemberTags>),
    /// It was not asked for.
    Off,
    /// The programs cannot be loaded, and no other member depends on them. All packets go through the queue, and nothing
    /// stops them while the rules that queue them are gone.
    Unavailable(String),
}

impl MemberTagging {
    /// What the kernel programs have done. `None` without any.
    pub fn stats(&self) -> Option<Result<TaggingStats, TaggingError>> {
        match self {
            MemberTagging::On(tags) => Some(tags.stats()),
            MemberTagging::Off | MemberTagging::Unavailable(_) => None,
        }
    }

    pub(super) fn tags(&self) -> Option<&MemberTags> {
        match self {
            MemberTagging::On(tags) => Some(tags),
            MemberTagging::Off | MemberTagging::Unavailable(_) => None,
        }
    }

    pub(super) fn tags_mut(&mut self) -> Option<&mut MemberTags> {
        match self {
            MemberTagging::On(tags) => Some(tags),
            MemberTagging::Off | MemberTagging::Unavailable(_) => None,
        }
    }
}

/// A group's C in a kernel map. `Err` if there is none, but no member depends on it.
pub(super) fn start_group(
    group: &str,
    config: Option<&TaggingConfig>,
) -> Result<Result<Option<GroupTags>, String>, GateError> {
    let Some(config) = config else { return Ok(Ok(None)) };
    if config.switch == TaggingSwitch::OffForADemonstration {
        tracing::error!(
            group,
            "TAGGING IS OFF FOR A DEMONSTRATION: clients can see what a disaster undoes"
        );
    }
    match GroupTags::new() {
        Ok(tags) => Ok(Ok(Some(tags))),
        Err(source) => refuse_or_do_without(group, "", config, source).map(Err),
    }
}

/// Loads and attaches the programs of one interface of a member, whose P is in the kernel's map from then on. `here`:
/// the group's members on this host. `beside`: the programs of another interface of this member.
pub(super) fn start_member(
    group: (&str, &GroupTags),
    config: &TaggingConfig,
    (member, here): (&str, &[String]),
    (interface, topology, beside): (&str, Topology, Option<&MemberTags>),
    pending: &Pending,
) -> Result<MemberTagging, GateError> {
    let load = || {
        let settings = config.settings(group.0, (interface, topology))?;
        let anew = config.begun_anew.iter().any(|name| name == member);
        let keeps_pending = config.is_needed();
        let directory = &config.pin_directory;
        let pinned = Pinned { keeps_pending, anew, directory, group: group.0, member };
        let addresses = config.addresses_for(member, here);
        let mut tags =
            MemberTags::load_beside(beside, &settings, group.1, &addresses, Some(pinned))?;
        pending.move_to(Arc::clone(tags.pending()));
        if config.await_floor && config.is_needed() && !tags.found_pending() {
            // Before the programs take its packets for those of a guest that has heard nothing.
            pending.mark_incomplete(now());
        }
        match tags.attach(interface) {
            // A tap that comes with its VM: the programs are attached to it then.
            Err(TaggingError::NoInterface(_)) if !config.is_needed() => {}
            attached => attached?,
        }
        tags.join(group.1)?;
        Ok(tags)
    };
    match load() {
        Ok(tags) => {
            let found_pending = tags.found_pending();
            tracing::info!(group = group.0, member, found_pending, "gate: tagging programs loaded");
            Ok(MemberTagging::On(Box::new(tags)))
        }
        Err(source) => {
            refuse_or_do_without(group.0, member, config, source).map(MemberTagging::Unavailable)
        }
    }
}

fn refuse_or_do_without(
    group: &str,
    member: &str,
    config: &TaggingConfig,
    source: TaggingError,
) -> Result<String, GateError> {
    if config.is_needed() {
        return Err(GateError::Tagging { group: group.to_owned(), source });
    }
    let why = source.to_string();
    tracing::warn!(
        group,
        member,
        why,
        "gate: the kernel programs cannot be used: while somebody has taken the rules away, this guest's packets leave \
         unheld, until that is noticed and the rules are back"
    );
    Ok(why)
}
