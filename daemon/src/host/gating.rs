//! The gate of this host: its start by the configuration.

use super::HostError;
use super::launch::{is_one_of_several, state_file};
use crate::config::{Config, Group, Member, Topology};
use crate::held_gate::PendingEntry;
use std::sync::Arc;
use tidelock_daemon_core::degrade;
use tidelock_netfilter::gate::{
    Gate, GroupConfig, InterfaceConfig, MemberConfig, Pending, TaggedMember, TaggingConfig,
    TaggingSwitch,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{self, Firewall};
use tidelock_protocol::message::Form;
use tidelock_protocol::tag;

/// P of each member, before the gate and the owner loops take their ends of it.
pub struct Unread(Vec<(String, String, Arc<Pending>)>);

impl Unread {
    /// A P for each member.
    pub fn of(config: &Config) -> Self {
        let members = config.groups.iter().flat_map(|g| g.members.iter().map(move |m| (g, m)));
        Self(
            members
                .map(|(g, m)| (g.name.to_string(), m.name.to_string(), Arc::new(Pending::new())))
                .collect(),
        )
    }

    /// P of a member.
    pub fn get(&self, group: &Group, member: &Member) -> Arc<Pending> {
        let found =
            self.0.iter().find(|(g, m, _)| *g == group.name.as_str() && *m == member.name.as_str());
        found.expect("made from the same configuration").2.clone()
    }

    /// A writer's own entry.
    pub fn entry(&self, group: &Group, member: &Member) -> PendingEntry {
        let writer = group.writer_id(&member.name.value).expect("a writer");
        PendingEntry { pending: self.get(group, member), writer }
    }
}

/// Starts the gate, if any member talks to clients.
pub fn start(config: &Config, unread: &Unread) -> Result<Option<Gate>, HostError> {
    let groups: Vec<GroupConfig> = config
        .groups
        .iter()
        .map(|group| GroupConfig {
            name: group.name.to_string(),
            mode: degrade::mode_at_start(group.mode),
            lease_period_ms: group.lease.as_millis() as u64,
            members: group.members.iter().filter_map(|m| member(group, m, unread)).collect(),
            tagging: Some(tagging(config, group)),
        })
        .filter(|group| !group.members.is_empty())
        .collect();
    if groups.is_empty() {
        tracing::warn!("no member talks to clients: no packet is held");
        return Ok(None);
    }
    let firewall = Firewall::detect(config.host.name.as_str())?;
    tracing::info!(packet_filter = %firewall, "gate");
    let gate = Gate::start(firewall, groups)?;
    // Without tags P outlives no daemon, and nobody sees what the guest hears of the others. Before the first lease
    // nothing leaves.
    let untagged = config.groups.iter().filter(|g| is_one_of_several(g) && !g.is_tagged());
    for (group, member) in untagged.flat_map(|g| g.members.iter().map(move |m| (g, m))) {
        if let Some(handle) = gate.handle(group.name.as_str()) {
            handle.depends_on_others(&unread.get(group, member));
        }
    }
    Ok(Some(gate))
}

/// The kernel programs of a group: on every interface, also where nobody's packets are tagged.
fn tagging(config: &Config, group: &Group) -> TaggingConfig {
    let writers = group.writers();
    let form = match group.form {
        Form::Hlc if group.is_tagged() => tag::Form::Hlc,
        Form::Vector | Form::Hlc => tag::Form::Vector { writers: writers.len() as u16 },
    };
    let tagged = group.present().filter(|_| group.is_tagged());
    let members = tagged.map(|peer| TaggedMember {
        name: peer.name.to_string(),
        addresses: peer.addresses.clone(),
    });
    TaggingConfig {
        ipv4_option: group.tag.option,
        path_mtu: group.tag.mtu,
        path_strips_options: group.tag.strip_path,
        mark_mask: group.tag.mark_mask,
        hlc_ahead_max_ms: group.max_clock_lead.as_millis() as u64,
        switch: match group.tag.off_for_a_demonstration {
            false => TaggingSwitch::On,
            true => TaggingSwitch::OffForADemonstration,
        },
        // Where the promise is broken on purpose, nobody waits.
        await_floor: group.is_tagged() && !group.tag.off_for_a_demonstration,
        begun_anew: (group.members.iter())
            .filter(|member| !state_file(config, group, member).exists())
            .map(|member| member.name.to_string())
            .collect(),
        ..TaggingConfig::new(form, writers, members.collect())
    }
}

fn member(group: &Group, member: &Member, unread: &Unread) -> Option<MemberConfig> {
    let interfaces = member.networks.iter().map(|network| InterfaceConfig {
        interface: network.interface.value.clone(),
        topology: match network.topology {
            Topology::Routed => rules::Topology::Routed,
            Topology::Bridged => rules::Topology::Bridged,
        },
        queue: QueueNumber(network.queue.value),
        queue_len_max: network.held_packets_max,
    });
    let interfaces: Vec<_> = interfaces.collect();
    let pending = unread.get(group, member);
    let name = member.name.to_string();
    (!interfaces.is_empty()).then_some(MemberConfig { name, interfaces, pending })
}
