//! The network between members: packets are lost, doubled and overtake each other. A packet is a frame: the kernel
//! programs of the sender's interface have it first, and those of the receiver's last ([`crate::programs`]). Their
//! verdicts decide here. The checkers know the knowledge of each guest, and what a tag had to say.

use crate::failure::{Checked, Checker, check};
use crate::frames::{Family, Node, Room, Sketch};
use crate::guest::{Known, Packet, learn};
use crate::programs::{Ran, interface_of};
use crate::world::{Event, World, note};
use std::collections::BTreeMap;
use tidelock_netfilter::release_queue::Kind;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::Form;
use tidelock_protocol::tag::{self, Codec, IPV4_OPTION, Stamp, TagKeys};
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::Direction;

/// The next header of destination options, which an IPv6 tag is in.
const DESTINATION_OPTIONS: u8 = 60;

/// A packet under way.
#[derive(Clone, Debug)]
struct Flying {
    from: Node,
    to: usize,
    /// Its bytes on the network.
    frame: Vec<u8>,
    /// Bytes as the guest has sent them, the stamp that the tag must have, and its code: for the checker.
    tagged: Option<(Vec<u8>, Stamp, Codec)>,
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
    /// Frames that were made.
    frames: u64,
}

impl Lan {
    /// A host has no power: what was on its way inside it is gone.
    pub fn lose(&mut self, host: usize) {
        self.flying.retain(|_, packet| packet.within != Some(host));
    }
}

impl World {
    /// A packet as its sender's network card has it.
    pub(crate) fn frame(&mut self, from: Node, to: Node, kind: Kind, room: Room) -> Vec<u8> {
        self.sketch(from, to, kind, room).frame()
    }

    fn sketch(&mut self, from: Node, to: Node, kind: Kind, room: Room) -> Sketch {
        self.lan.frames += 1;
        let number = self.lan.frames;
        let turns = if number.is_multiple_of(2) { Family::Four } else { Family::Six };
        Sketch { family: self.plan.lan.family.unwrap_or(turns), from, to, kind, room, number }
    }

    /// A guest tells another member of its group what it knows.
    pub fn send_to_peer(&mut self, vm: usize) -> Checked {
        let group = self.plan.vms[vm].group;
        let peers: Vec<_> = self.plan.groups[group].members().filter(|to| *to != vm).collect();
        if peers.is_empty() {
            return Ok(());
        }
        let to = *self.rng.pick(&peers);
        let room = match self.rng.chance(self.plan.lan.untaggable, 1000) {
            true => *self.rng.pick(&[Room::Full, Room::Options]),
            false => Room::Enough,
        };
        let (known, rumours) = self.known_and_rumours(vm);
        let frame = self.frame(Node::Vm(vm), Node::Vm(to), DATA, room);
        // P is read after the guest has sent the packet.
        let must_say = self.stamp_of(vm);
        let Some(ran) = self.judged_by_programs(vm, &frame) else {
            let packet = self.packet(vm, None, DATA, Some(to), frame);
            return self.queue_packet(vm, packet);
        };
        let from = Node::Vm(vm);
        let (tagged, within) = match ran.counted {
            Some("merged_here") => {
                self.counts.handed_over += 1;
                self.check_pending(to)?;
                (None, Some(self.plan.vms[vm].host))
            }
            Some("untagged_covered") => {
                self.counts.covered += 1;
                self.check_committed(vm, &known)?;
                (None, None)
            }
            Some("tagged") => {
                let codec = self.vms[vm].kernel.as_ref().expect("it has programs").codec;
                (Some((frame, must_say, codec)), None)
            }
            _ => {
                // Its receiver must depend on nothing uncommitted: it waits like one to the outside.
                self.counts.untagged += 1;
                let packet = self.packet(vm, None, DATA, Some(to), frame);
                return self.sends_without_tag(vm, packet, &ran);
            }
        };
        self.check_hands_over(vm, &known)?;
        let frame = ran.tried.frame;
        self.fly(Flying { from, to, frame, tagged, known, rumours, within });
        Ok(())
    }

    /// The programs of a member have a packet of its guest. `None`: there are none.
    pub(crate) fn judged_by_programs(&mut self, vm: usize, frame: &[u8]) -> Option<Ran> {
        self.run_programs(vm, Direction::FromGuest, interface_of(vm), frame)
    }

    /// The programs have judged a packet without a tag: it leaves at once, or comes to the queue.
    pub(crate) fn sends_without_tag(&mut self, vm: usize, packet: Packet, ran: &Ran) -> Checked {
        let is_as_it_was = !ran.tried.passed || ran.tried.frame == packet.frame;
        check(is_as_it_was, Checker::Tag, || format!("a packet of vm {vm} was changed: {ran:?}"))?;
        match (ran.counted, ran.tried.passed, ran.tried.mark) {
            (Some("dropped_unjudged"), false, _) => Ok(()),
            (Some(_), true, 0) => self.queue_packet(vm, packet),
            (Some("covered"), true, _) => {
                self.counts.past_queue += 1;
                let gate = &self.vms[vm].kernel.as_ref().expect("it has programs").gate;
                let mode = gate.handle().mode();
                let now = self.host_now(self.plan.vms[vm].host);
                self.leave(vm, &packet, mode, now)
            }
            _ => check(false, Checker::Tag, || format!("a packet of vm {vm} fares so: {ran:?}")),
        }
    }

    /// A packet without a tag has waited for what it depends on, as far as its sender answers for it.
    pub fn send_untagged(&mut self, vm: usize, to: usize, packet: &Packet) {
        let (known, rumours) = (packet.known.clone(), packet.hearsay.clone());
        self.fly_as(Node::Vm(vm), to, packet.frame.clone(), known, rumours);
    }

    /// Sends a packet without a tag.
    fn fly_as(&mut self, from: Node, to: usize, frame: Vec<u8>, known: Known, rumours: Known) {
        self.fly(Flying { from, to, frame, tagged: None, known, rumours, within: None });
    }

    /// A packet has left in mode async: its receiver hears what nobody has waited for. A client may
    /// tell another member.
    pub fn rumour(&mut self, vm: usize, packet: &Packet) -> Checked {
        let group = self.plan.vms[vm].group;
        let (from, to, frame) = match packet.to {
            Some(to) => (Node::Vm(vm), to, packet.frame.clone()),
            None => {
                let members: Vec<_> = self.plan.groups[group].members().collect();
                if !self.rng.chance(1, 4) {
                    return Ok(());
                }
                let to = *self.rng.pick(&members);
                let frame = self.frame(Node::Client, Node::Vm(to), DATA, Room::Enough);
                (Node::Client, to, frame)
            }
        };
        self.fly_as(from, to, frame, self.nothing(to), packet.everything());
        Ok(())
    }

    fn nothing(&self, vm: usize) -> Known {
        vec![Default::default(); self.plan.writers_max(self.plan.vms[vm].group)]
    }

    /// A packet with a tag, by whoever makes one.
    fn tagged_frame(&self, sketch: Sketch, codec: &Codec, keys: TagKeys, stamp: &Stamp) -> Vec<u8> {
        let Sketch { family, from, to, .. } = sketch;
        let codec = codec.sealing(keys, from.address(family), to.address(family));
        let (protocol, body) = sketch.body();
        let mut tag = Vec::new();
        match family {
            Family::Four => {
                codec.encode_ipv4(IPV4_OPTION, stamp, &mut tag);
                sketch.packet(protocol, &tag, &body)
            }
            Family::Six => {
                codec.encode_ipv6(protocol, stamp, &mut tag);
                sketch.packet(DESTINATION_OPTIONS, &tag, &body)
            }
        }
    }

    /// Somebody who is not of the group sends a tag that looks like the group's.
    pub fn forge(&mut self, to: usize) -> Checked {
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
        self.lie(to)?;
        let sketch = self.sketch(Node::Stranger, Node::Vm(to), DATA, Room::Enough);
        // The key is not the group's.
        let keys = TagKeys::only(tag::TagKey([ahead, 1]));
        let codec = self.plan.codec(group);
        let frame = self.tagged_frame(sketch, &codec, keys, &stamp);
        self.fly_as(Node::Stranger, to, frame, self.nothing(to), self.nothing(to));
        // And in a member's name.
        let Some(from) = self.another_member(to) else { return Ok(()) };
        let frame = self.tagged_frame(Sketch { from, ..sketch }, &codec, keys, &stamp);
        let interface = self.interface_from(Node::Stranger, to);
        self.is_refused(to, from, interface, &frame)
    }

    /// None: all others were taken out.
    fn another_member(&self, vm: usize) -> Option<Node> {
        let mut members = self.plan.groups[self.plan.vms[vm].group].members();
        members.find(|other| *other != vm).map(Node::Vm)
    }

    /// A member that lies says so with the right seal: nothing of it may be believed.
    fn lie(&mut self, to: usize) -> Checked {
        let Some(kernel) = &self.vms[to].kernel else { return Ok(()) };
        let Some(terms) = kernel.gate.tag_terms() else { return Ok(()) };
        let (codec, base) = (kernel.codec, self.base_of(to));
        let tag::Form::Vector { writers } = codec.form() else { return Ok(()) };
        // Above all that there is, and less than half of what 32 bits hold.
        let beyond = |writer| (writer, Seq(base.get(writer).0.saturating_add(1 << 30)));
        let stamp = Stamp::Vector((0..writers).map(WriterId).map(beyond).collect());
        let Some(from) = self.another_member(to) else { return Ok(()) };
        let sketch = self.sketch(from, Node::Vm(to), DATA, Room::Enough);
        let frame = self.tagged_frame(sketch, &codec, terms.keys, &stamp);
        let interface = self.interface_from(from, to);
        self.is_refused(to, from, interface, &frame)
    }

    /// A tag in the name of a member is not believed: the packet is dropped, and P is as it was.
    fn is_refused(&mut self, vm: usize, from: Node, interface: u32, frame: &[u8]) -> Checked {
        let removed = self.removed_writers(vm);
        let known = |world: &World| {
            let (p, hlc) = (world.vms[vm].pending.read(), world.vms[vm].pending.read_hlc());
            (p.entries().filter(|(w, _)| !removed.contains(w)).collect::<CountVector>(), hlc)
        };
        let before = known(self);
        let Some(ran) = self.run_programs(vm, Direction::ToGuest, interface, frame) else {
            return Ok(());
        };
        let after = known(self);
        let is_let_in = ran.tried.passed && self.knows(vm, from);
        check(before == after, Checker::Outsider, || {
            format!("vm {vm} believes a liar ({:?}): P was {before:?}, is {after:?}", ran.counted)
        })?;
        check(!is_let_in, Checker::Tag, || format!("vm {vm} lets a liar's packet in: {ran:?}"))
    }

    /// True if the programs of a member take packets from there for those of a member.
    fn knows(&self, vm: usize, from: Node) -> bool {
        let kernel = self.vms[vm].kernel.as_ref();
        matches!(from, Node::Vm(from) if kernel.is_some_and(|kernel| kernel.peers.contains(&from)))
    }

    fn removed_writers(&self, vm: usize) -> Vec<WriterId> {
        let group = &self.plan.groups[self.plan.vms[vm].group];
        group.removed.iter().map(|vm| WriterId(self.plan.vms[*vm].writer)).collect()
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
            base.merge(&kernel.gate.handle().committed().0);
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

    /// A packet comes to the host of its receiver: first the programs, and only then the guest.
    pub fn arrives(&mut self, number: u64) -> Checked {
        let Some(packet) = self.lan.flying.remove(&number) else { return Ok(()) };
        let (vm, from) = (packet.to, packet.from);
        let before = (self.vms[vm].pending.read(), self.vms[vm].pending.read_hlc());
        let interface = self.interface_from(from, vm);
        // No host, no network.
        let Some(ran) = self.run_programs(vm, Direction::ToGuest, interface, &packet.frame) else {
            return Ok(());
        };
        self.check_merged(&packet, &ran, before)?;
        match ran.counted {
            Some("merged") => self.counts.merged += 1,
            Some("dropped_ahead") => self.counts.ahead += 1,
            _ => {}
        }
        if !ran.tried.passed {
            return Ok(());
        }
        self.check_pending(vm)?;
        match from {
            Node::Vm(_) | Node::Client => {
                note!(self, "guest {vm} hears from {from:?}: {:?}", packet.known);
                self.hears(vm, &packet.known, &packet.rumours)
            }
            Node::Stranger => Ok(()),
        }
    }

    /// The guest gets the packet as it was sent, and P rises to what its tag had to say, no further and no less: 32
    /// bits of each entry were enough. Nothing on this network damages a tag.
    fn check_merged(&self, packet: &Flying, ran: &Ran, before: (CountVector, Hlc)) -> Checked {
        let vm = packet.to;
        let fares = |what: &str| format!("vm {vm}: a packet of {:?} {what}: {ran:?}", packet.from);
        let codec = self.vms[vm].kernel.as_ref().expect("it has programs").codec;
        let sent = packet.tagged.as_ref().map_or(&packet.frame, |(frame, ..)| frame);
        match ran.counted {
            Some("dropped_ahead" | "dropped_untrusted") => return Ok(()),
            Some("dropped_malformed") => {
                // The tag is of the group before a change, or its sender has not heard that a writer was taken out.
                let tagged = packet.tagged.as_ref();
                let is_old = tagged.is_some_and(|(.., said)| !said.is_of_same_group(&codec));
                let is_known =
                    is_old || !self.removed_writers(vm).is_empty() || packet.from == Node::Stranger;
                return check(is_known, Checker::Tag, || fares("is refused"));
            }
            // A stranger's: in IPv6 the place of the tag stays.
            Some("stripped_foreign") => return Ok(()),
            Some("merged") | None => {}
            Some(_) => return check(false, Checker::Tag, || fares("fares so")),
        }
        let is_as_sent = ran.tried.frame == *sent || packet.from == Node::Stranger;
        check(is_as_sent, Checker::Tag, || fares("is changed"))?;
        if !self.removed_writers(vm).is_empty() {
            return Ok(());
        }
        let (mut p, mut hlc) = before;
        match packet.tagged.as_ref().filter(|_| ran.counted.is_some()) {
            Some((_, Stamp::Vector(said), _)) => {
                p.merge(said);
            }
            Some((_, Stamp::Hlc(said), _)) => hlc = hlc.max(*said),
            None => {}
        }
        let after = (self.vms[vm].pending.read(), self.vms[vm].pending.read_hlc());
        let is_stranger = packet.from == Node::Stranger;
        check(after == (p.clone(), hlc) || is_stranger, Checker::Tag, || {
            format!("P of vm {vm} is {after:?} after a tag that makes it {:?}", (p, hlc))
        })
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
