//! The gate as the other loops see it.

use super::HostError;
use super::launch::{is_one_of_several, state_path};
use crate::clock;
use crate::config::{Config, Group, Member, Topology};
use crate::degrade;
use crate::link::GateControl;
use crate::owner::PublishPending;
use std::sync::{Arc, Mutex};
use tidelock_netfilter::gate::{
    Gate, GateHandle, GroupConfig, InterfaceConfig, MemberConfig, Pending, TaggedMember,
    TaggingConfig, TaggingSwitch,
};
use tidelock_netfilter::nfqueue::QueueNumber;
use tidelock_netfilter::rules::{self, Firewall};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::Form;
use tidelock_protocol::tag;
use tidelock_protocol::vector::CountVector;

/// A group's gate, told by the link of one of its members on this host.
pub struct HeldGate {
    /// The gate; `None`: no member of the group here has a network.
    pub handle: Option<GateHandle>,
    /// The member, if it is a writer.
    pub writer: Option<WriterId>,
    /// Its P.
    pub pending: Arc<Pending>,
    /// What a packet waits for.
    pub form: Form,
    /// The last floor.
    pub floor: Mutex<(CountVector, Hlc)>,
}

impl GateControl for HeldGate {
    fn committed(&self, committed: &CountVector) {
        if let Some(handle) = &self.handle {
            handle.set_committed(committed);
        }
    }

    fn tag_terms(&self, terms: &tag::TagTerms) {
        if let Some(handle) = &self.handle {
            handle.set_tag_terms(terms);
        }
    }

    fn lease_renewed(&self, sent_at: MonoNanos) {
        if let Some(handle) = &self.handle {
            handle.lease_renewed(clock::mono_now(), sent_at);
        }
    }

    fn fence(&self) {
        if let Some(handle) = &self.handle {
            handle.fence();
        }
    }

    fn is_applied(&self) -> bool {
        self.handle.as_ref().is_none_or(GateHandle::is_applied)
    }

    fn hold_for_resync(&self, hold: bool) {
        if let (Some(handle), Some(writer)) = (&self.handle, self.writer) {
            handle.hold_for_resync(writer, hold);
        }
    }

    fn hold_unrecorded(&self, hold: bool) {
        if let (Some(handle), Some(writer)) = (&self.handle, self.writer) {
            handle.hold_unrecorded(writer, hold);
        }
    }

    fn watermark(&self, watermark: Hlc) {
        if let Some(handle) = &self.handle {
            handle.set_watermark(watermark);
        }
    }

    fn awaits_floor(&self) -> Option<u64> {
        self.handle.as_ref()?.awaits_floor(&self.pending)
    }

    fn mark_incomplete(&self) {
        if let Some(handle) = &self.handle {
            handle.mark_incomplete(&self.pending);
        }
    }

    fn floor(&self, mark: u64, pending: &CountVector, hlc: Hlc) {
        self.pending.merge(pending);
        self.pending.publish_at(WriterId(0), Seq::ZERO, hlc);
        *self.floor.lock().expect("no panic while held") = (pending.clone(), hlc);
        if let Some(handle) = &self.handle {
            handle.complete(&self.pending, mark);
        }
    }

    fn is_catching_up(&self) -> bool {
        let Some(handle) = &self.handle else { return false };
        let floor = self.floor.lock().expect("no panic while held");
        let (committed, watermark) = handle.committed();
        let is_covered = match self.form {
            Form::Vector => committed.covers(&floor.0),
            Form::Hlc => watermark >= floor.1,
        };
        self.pending.incomplete().is_some() || !is_covered
    }

    fn pending(&self) -> (CountVector, Hlc) {
        (self.pending.read(), self.pending.read_hlc())
    }
}

/// A writer's entry in the P of a member.
pub struct PendingEntry {
    pending: Arc<Pending>,
    writer: WriterId,
}

impl PublishPending for PendingEntry {
    fn publish(&self, seq: Seq, hlc: Hlc) {
        self.pending.publish_at(self.writer, seq, hlc);
    }

    fn read(&self, p: &mut CountVector) -> Hlc {
        p.merge(&self.pending.read());
        self.pending.read_hlc()
    }

    fn raise(&self, p: &CountVector, hlc: Hlc) {
        self.pending.merge(p);
        self.pending.publish_at(self.writer, Seq::ZERO, hlc);
    }
}

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
            .filter(|member| !state_path(config, group, member).exists())
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
