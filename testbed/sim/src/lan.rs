//! The network between members: packets are lost, doubled and overtake each other. What the kernel
//! programs of both hosts do to them is done here in the same order, with protocol's codec
//! (production: `netfilter/bpf/`, tested against the same codec). Between members of one host they carry no tag.

use crate::failure::{Checked, Checker, check};
use crate::gate::SimGate;
use crate::guest::{Known, Packet, learn};
use crate::plant::{OnTheWay, Plant};
use crate::world::{Event, Kernel, World, note};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use tidelock_netfilter::release_queue::Kind;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::Form;
use tidelock_protocol::tag::{self, Codec, IPV4_OPTION, Stamp, TagError, TagTerms};
use tidelock_protocol::vector::CountVector;

/// Who sent a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Member(usize),
    /// A client, who was told by a member in mode async.
    Client,
    /// Nobody of the group, with a tag all the same.
    Stranger,
}

/// A packet under way.
#[derive(Clone, Debug)]
struct Flying {
    from: Source,
    to: usize,
    /// The options of its header.
    options: Vec<u8>,
    /// For the checker: what its tag says, and in which code.
    said: Option<(Stamp, Codec)>,
    /// What its sender knew, outside the product, and its tag vouches for or C covers.
    known: Known,
    /// What it knew besides, in mode async.
    rumours: Known,
    /// It goes from one guest of this host to another one, and ends with it.
    within: Option<usize>,
}

/// The network.
#[derive(Debug, Default)]
pub struct Lan {
    flying: BTreeMap<u64, Flying>,
    next: u64,
}

impl Lan {
    /// A host has no power: what was on its way inside it is gone.
    pub fn lose(&mut self, host: usize) {
        self.flying.retain(|_, packet| packet.within != Some(host));
    }
}

/// As both ends of the network know addresses.
fn sealing(kernel: &Kernel, terms: &TagTerms) -> Codec {
    let nowhere = Ipv4Addr::UNSPECIFIED.into();
    kernel.codec.sealing(terms.keys, nowhere, nowhere)
}

impl World {
    /// A guest tells another member of its group what it knows.
    pub fn send_to_peer(&mut self, vm: usize) -> Checked {
        let group = self.plan.vms[vm].group;
        let peers: Vec<_> = self.plan.groups[group].members().filter(|to| *to != vm).collect();
        if peers.is_empty() {
            return Ok(());
        }
        let to = *self.rng.pick(&peers);
        let has_room = !self.rng.chance(self.plan.lan.untaggable, 1000);
        let (known, rumours) = self.known_and_rumours(vm);
        let kernel = self.vms[vm].kernel.as_ref().filter(|kernel| kernel.peers.contains(&to));
        let is_incomplete = self.vms[vm].pending.is_kept_from_others();
        // In mode async nothing waits for that: a tag that says less than it should still says something.
        let kernel = kernel.filter(|kernel| !is_incomplete || kernel.gate.is_async());
        if kernel.is_some_and(|kernel| self.is_beside(kernel, vm, to)) {
            self.check_hands_over(vm, &known)?;
            self.raise_beside(vm, to);
            self.check_pending(to)?;
            let (from, within) = (Source::Member(vm), Some(self.plan.vms[vm].host));
            self.fly(Flying { from, to, options: Vec::new(), said: None, known, rumours, within });
            return Ok(());
        }
        // P is read after the guest has sent the packet.
        if kernel.is_some_and(|kernel| self.needs_no_tag(kernel, vm)) {
            self.check_hands_over(vm, &known)?;
            self.check_committed(vm, &known)?;
            self.counts.covered += 1;
            let (from, options, within) = (Source::Member(vm), Vec::new(), None);
            self.fly(Flying { from, to, options, said: None, known, rumours, within });
            return Ok(());
        }
        let stamp = self.stamp_of(vm);
        let terms = kernel.filter(|_| has_room).and_then(|kernel| kernel.gate.tag_terms());
        let terms = terms.filter(|terms| self.is_believable(vm, &stamp, terms));
        let Some(codec) = kernel.zip(terms).map(|(kernel, terms)| sealing(kernel, &terms)) else {
            // Its receiver must depend on nothing uncommitted: it waits like one to the outside.
            self.counts.untagged += 1;
            return self.send_unnamed(vm, None, DATA, Some(to));
        };
        self.check_hands_over(vm, &known)?;
        let mut options = Vec::new();
        codec.encode_ipv4(IPV4_OPTION, &stamp, &mut options);
        let (from, said) = (Source::Member(vm), Some((stamp, codec)));
        let packet = Flying { from, to, options, said, known, rumours, within: None };
        self.fly(packet);
        Ok(())
    }

    /// Whether others will believe this of the sender.
    fn is_believable(&self, vm: usize, stamp: &Stamp, terms: &TagTerms) -> bool {
        let committed = |kernel: &Kernel| kernel.gate.state().committed;
        match stamp {
            Stamp::Hlc(_) => true,
            Stamp::Vector(pending) => {
                let committed = self.vms[vm].kernel.as_ref().map(committed).unwrap_or_default();
                tag::is_within_reach(pending, &committed, &terms.reachable)
            }
        }
    }

    /// Whether the kernel programs see that C reaches P.
    fn needs_no_tag(&self, kernel: &Kernel, vm: usize) -> bool {
        let (pending, state) = (&self.vms[vm].pending, kernel.gate.state());
        match self.plan.groups[self.plan.vms[vm].group].form {
            Form::Hlc => pending.read_hlc() <= state.watermark,
            Form::Vector if self.has_bug(OnTheWay::OwnEntryCovers) => {
                let own = WriterId(self.plan.vms[vm].writer);
                pending.read().get(own) <= state.committed.get(own)
            }
            Form::Vector => state.committed.covers(&pending.read()),
        }
    }

    /// Whether the programs of both are those of one daemon.
    fn is_beside(&self, kernel: &Kernel, vm: usize, to: usize) -> bool {
        let theirs = self.vms[to].kernel.as_ref();
        self.plan.vms[vm].host == self.plan.vms[to].host
            && theirs.is_some_and(|theirs| Arc::ptr_eq(&kernel.gate, &theirs.gate))
    }

    /// P of a member on the same host rises when something is sent to it.
    fn raise_beside(&mut self, vm: usize, to: usize) {
        let (from, to) = (&self.vms[vm].pending, &self.vms[to].pending);
        if self.has_bug(OnTheWay::HandingOverForgotten) {
            return;
        }
        match self.plan.groups[self.plan.vms[vm].group].form {
            Form::Vector => to.merge(&from.read()),
            Form::Hlc => to.publish_at(WriterId(0), Seq::ZERO, from.read_hlc()),
        }
        self.counts.handed_over += 1;
    }

    /// A packet without a tag has waited for what it depends on, as far as its sender answers for it.
    pub fn send_untagged(&mut self, vm: usize, to: usize, packet: &Packet) {
        let from = Source::Member(vm);
        let (known, rumours) = (packet.known.clone(), packet.hearsay.clone());
        let (options, said, within) = (Vec::new(), None, None);
        self.fly(Flying { from, to, options, said, known, rumours, within });
    }

    /// A packet has left in mode async: its receiver hears what nobody has waited for. A client may
    /// tell another member.
    pub fn rumour(&mut self, vm: usize, packet: &Packet) -> Checked {
        let group = self.plan.vms[vm].group;
        let (from, to) = match packet.to {
            Some(to) => (Source::Member(vm), to),
            None => {
                let members: Vec<_> = self.plan.groups[group].members().collect();
                if !self.rng.chance(1, 4) {
                    return Ok(());
                }
                (Source::Client, *self.rng.pick(&members))
            }
        };
        let (known, rumours) = (self.nothing(to), packet.everything());
        let (options, said, within) = (Vec::new(), None, None);
        self.fly(Flying { from, to, options, said, known, rumours, within });
        Ok(())
    }

    fn nothing(&self, vm: usize) -> Known {
        vec![Default::default(); self.plan.writers_max(self.plan.vms[vm].group)]
    }

    fn everything(&self, vm: usize) -> CountVector {
        let writers = self.plan.writers_max(self.plan.vms[vm].group) as u16;
        (0..writers).map(|writer| (WriterId(writer), Seq(u64::MAX))).collect()
    }

    /// Somebody who is not of the group sends a tag that looks like the group's.
    pub fn forge(&mut self, to: usize) {
        let group = self.plan.vms[to].group;
        let ahead = self.rng.range(1..1 << 20);
        // A seq that no run can have lost: for any other the writer would give out so many records.
        let beyond = (1 << 24) + (ahead << 8);
        let stamp = match self.stamp_of(to) {
            Stamp::Vector(vector) => Stamp::Vector(
                (0..self.plan.groups[group].vms.len() as u16)
                    .map(|w| (WriterId(w), Seq(vector.get(WriterId(w)).0.saturating_add(beyond))))
                    .collect(),
            ),
            Stamp::Hlc(hlc) => Stamp::Hlc(Hlc(hlc.0 + (ahead << 8))),
        };
        self.lie(to);
        let mut options = Vec::new();
        self.plan.codec(group).encode_ipv4(IPV4_OPTION, &stamp, &mut options);
        let (from, known, rumours) = (Source::Stranger, self.nothing(to), self.nothing(to));
        self.fly(Flying { from, to, options, said: None, known, rumours, within: None });
    }

    /// A member that lies says so with the right seal: nothing of it may be believed.
    fn lie(&self, to: usize) {
        let Some(kernel) = &self.vms[to].kernel else { return };
        let Some(terms) = kernel.gate.tag_terms() else { return };
        let base = self.base_of(to);
        let tag::Form::Vector { writers } = kernel.codec.form() else { return };
        // Above all that there is, and less than half of what 32 bits hold.
        let beyond = |writer| (writer, Seq(base.get(writer).0.saturating_add(1 << 30)));
        let stamp = Stamp::Vector((0..writers).map(WriterId).map(beyond).collect());
        let mut options = Vec::new();
        let codec = sealing(kernel, &terms);
        codec.encode_ipv4(IPV4_OPTION, &stamp, &mut options);
        let body = tag::find_ipv4(&options, IPV4_OPTION).expect("whole").expect("a tag");
        let believed = codec.decode(body, &base, &terms.reachable);
        assert!(believed.is_err(), "vm {to} believes {stamp:?}");
    }

    /// max(P, C), as the kernel programs see them.
    fn stamp_of(&self, vm: usize) -> Stamp {
        match self.plan.groups[self.plan.vms[vm].group].form {
            Form::Vector => Stamp::Vector(self.base_of(vm)),
            Form::Hlc => Stamp::Hlc(self.vms[vm].pending.read_hlc()),
        }
    }

    fn base_of(&self, vm: usize) -> CountVector {
        let mut base = self.vms[vm].pending.read();
        if let Some(kernel) = &self.vms[vm].kernel {
            base.merge(&kernel.gate.state().committed);
        }
        base
    }

    fn fly(&mut self, packet: Flying) {
        let lan = self.plan.lan;
        if self.rng.chance(lan.lost, 1000) {
            return;
        }
        let copies = if self.rng.chance(lan.doubled, 1000) { 2 } else { 1 };
        for _ in 0..copies {
            self.lan.next += 1;
            let number = self.lan.next;
            self.lan.flying.insert(number, packet.clone());
            let after = lan.delay_ns + self.rng.span(lan.jitter_ns);
            self.schedule.after(after, Event::Packet { number });
        }
    }

    /// A packet comes to the host of its receiver: merge, strip, and only then the guest.
    pub fn arrives(&mut self, number: u64) -> Checked {
        let Some(packet) = self.lan.flying.remove(&number) else { return Ok(()) };
        let vm = packet.to;
        // No host, no network.
        let Some(kernel) = self.vms[vm].kernel.clone() else { return Ok(()) };
        let mut options = packet.options;
        if self.has_bug(OnTheWay::StripBeforeMerge) {
            options.clear();
        }
        let Ok(tag) = tag::find_ipv4(&options, IPV4_OPTION) else { return Ok(()) };
        let is_peer = match packet.from {
            Source::Member(from) => kernel.peers.contains(&from),
            Source::Client => false,
            Source::Stranger => self.has_bug(OnTheWay::OutsiderMerged),
        };
        if let Some(body) = tag.filter(|_| is_peer) {
            let Some(terms) = kernel.gate.tag_terms() else { return Ok(()) };
            let (codec, reachable) = match packet.from {
                // Planted: nobody has asked who it is.
                Source::Stranger => (kernel.codec, self.everything(vm)),
                Source::Member(_) | Source::Client => (sealing(&kernel, &terms), terms.reachable),
            };
            let base = match self.plant {
                Some(Plant::OnTheWay(OnTheWay::RebuiltNextToPending)) => {
                    self.vms[vm].pending.read()
                }
                Some(Plant::OnTheWay(OnTheWay::WrapForgotten)) => CountVector::new(),
                _ => self.base_of(vm),
            };
            match codec.decode(body, &base, &reachable) {
                Ok(stamp) => {
                    self.check_rebuilt(vm, &stamp, packet.said.as_ref().map(|(said, _)| said))?;
                    if !self.merge(vm, &kernel.gate, &stamp) {
                        return Ok(());
                    }
                }
                // Before the group was changed.
                Err(_) if packet.said.is_some_and(|(_, said)| !said.is_of_same_group(&codec)) => {
                    return Ok(());
                }
                Err(error) => return self.refused_tag(vm, error),
            }
        }
        self.check_pending(vm)?;
        match packet.from {
            Source::Member(_) | Source::Client => {
                note!(self, "guest {vm} hears from {:?}: {:?}", packet.from, packet.known);
                self.hears(vm, &packet.known, &packet.rumours)
            }
            Source::Stranger => Ok(()),
        }
    }

    fn has_bug(&self, bug: OnTheWay) -> bool {
        self.plant == Some(Plant::OnTheWay(bug))
    }

    /// Whether the packet may go on to the guest.
    fn merge(&mut self, vm: usize, gate: &SimGate, stamp: &Stamp) -> bool {
        let now = self.host_now(self.plan.vms[vm].host);
        let pending = &self.vms[vm].pending;
        match stamp {
            _ if self.has_bug(OnTheWay::MergeForgotten) => {}
            Stamp::Vector(vector) => pending.merge(vector),
            Stamp::Hlc(hlc) if gate.is_ahead(*hlc, now) => {
                self.counts.ahead += 1;
                return false;
            }
            Stamp::Hlc(hlc) => pending.publish_at(WriterId(0), Seq::ZERO, *hlc),
        }
        self.counts.merged += 1;
        true
    }

    /// Nothing on this network damages a tag. But who has not heard that a writer was taken out
    /// cannot read what stands for it.
    fn refused_tag(&self, vm: usize, error: TagError) -> Checked {
        if !self.plan.groups[self.plan.vms[vm].group].removed.is_empty() {
            return Ok(());
        }
        check(false, Checker::Tag, || format!("vm {vm} refuses a tag: {error}"))
    }

    /// 32 bits of each entry were enough.
    fn check_rebuilt(&self, vm: usize, found: &Stamp, said: Option<&Stamp>) -> Checked {
        let has_removed = !self.plan.groups[self.plan.vms[vm].group].removed.is_empty();
        let as_said = said.is_none_or(|said| said == found || has_removed);
        check(as_said, Checker::Tag, || format!("vm {vm} reads the tag {found:?}, it was {said:?}"))
    }

    /// P names nothing that no writer of the group has ever admitted, or is about to.
    fn check_pending(&self, vm: usize) -> Checked {
        let group = &self.plan.groups[self.plan.vms[vm].group];
        let (p, hlc) = (self.vms[vm].pending.read(), self.vms[vm].pending.read_hlc());
        let mut newest = Hlc(1);
        for peer in &group.vms {
            let (id, of) = (WriterId(self.plan.vms[*peer].writer), &self.vms[*peer].oracle);
            let named = self.vms[*peer].named;
            // A resync's packets have the next time after those that the backup knows.
            newest = newest.max(Hlc(of.newest_hlc().0 + 1)).max(named.1);
            if group.removed.contains(peer) {
                continue;
            }
            // Who has come before the group was there has a past all the same.
            let admitted = of.newest_seq().max(group.past);
            check(p.get(id) <= admitted.next().max(named.0), Checker::Outsider, || {
                format!("P of vm {vm} says {p}, writer {id} has admitted {admitted}")
            })?;
        }
        check(hlc <= newest, Checker::Outsider, || {
            format!("P of vm {vm} is at {hlc}, none can be later than {newest}")
        })
    }

    /// A guest has heard what another one knows, and does something about it.
    fn hears(&mut self, vm: usize, known: &Known, rumours: &Known) -> Checked {
        if !self.vms[vm].guest.alive {
            return Ok(());
        }
        self.hears_unsaid(vm, rumours);
        learn(&mut self.vms[vm].guest.known, known);
        if !self.busy || !self.is_awake(vm) {
            return Ok(());
        }
        match self.rng.below(6) {
            0 | 1 if self.plan.vms[vm].is_writer() => self.begin_row_or_write(vm),
            2 | 3 => {
                self.send_packet(vm, None, DATA)?;
                self.gate_turn(vm)
            }
            4 => self.send_to_peer(vm),
            _ => Ok(()),
        }
    }
}

/// Neither a pure acknowledgement nor neighbour discovery.
const DATA: Kind = Kind::Data { flow: None };
