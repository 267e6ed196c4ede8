//! Which packets wait, and which may leave: PipeCloud 4.3 without any I/O.
//!
//! One queue per member. The caller stamps each packet with P **after** it took the packet up: a
//! late stamp only names more writes than the packet depends on. The stamps of one member only
//! grow, so the queue is a FIFO and whatever may leave is at its front: "accept all ids up to n"
//! releases it.
//!
//! A stamp is a count vector, or, for a group whose tags are in HLC form, a time: covered when the
//! watermark has reached it. A member's time only grows too, so all of this holds for both.
//!
//! Invariants:
//! - A packet that was passed or released had a stamp that is covered (in every entry), or was a pure
//!   TCP acknowledgement, or the mode is async, or it is never held at all (rule 1).
//! - While the gate is shut, nothing passes, and what is never held is dropped (rule 4).
//! - Within one TCP flow nothing overtakes.
//! - No more than `capacity` packets and [`HELD_BYTES_MAX`] bytes wait (rule 10).
//!
//! | gate | mode | what passes on arrival |
//! |---|---|---|
//! | fenced | any | nothing |
//! | no lease, held, floor unknown | sync, pipelined | nothing |
//! | open | sync, pipelined | what is covered, if nothing waits; pure ACKs, if their flow has nothing waiting |
//! | open, no lease, held, floor unknown | async | everything |

pub use tidelock_protocol::lease::{HoldReason, ShutWhy};

use std::collections::{HashMap, VecDeque};
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq};
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;

/// The most bytes of one member that wait. The kernel counts its queue in packets only, and a GSO
/// packet has up to 64 KiB: a long queue of those would take the host's memory. At 10 Gb/s this
/// is 0.8 s of traffic.
pub const HELD_BYTES_MAX: u64 = 1 << 30;

/// The kernel's number of a queued packet: counts up and wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PacketId(pub u32);

impl PacketId {
    /// Whether this packet was queued after `other`, the way the kernel compares: right as long as
    /// fewer than 2^31 packets lie between the two.
    #[must_use]
    pub fn is_after(self, other: PacketId) -> bool {
        self.0.wrapping_sub(other.0).cast_signed() > 0
    }
}

/// A hash of a TCP connection's addresses and ports, in one direction. Two connections with one
/// hash make an acknowledgement wait that need not: a cost, never a danger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow(pub u64);

/// What the gate needs to know of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Waits until its stamp is covered. A TCP packet names its flow.
    Data {
        /// The flow that it belongs to, if it is TCP.
        flow: Option<Flow>,
    },
    /// TCP without payload, SYN, FIN or RST: tells the peer nothing but that bytes arrived.
    PureAck {
        /// The flow that it belongs to.
        flow: Flow,
    },
    /// Neighbour discovery: the link does not work without it, and it carries no data.
    NeverHeld,
}

impl Kind {
    fn flow(self) -> Option<Flow> {
        match self {
            Kind::Data { flow } => flow,
            Kind::PureAck { flow } => Some(flow),
            Kind::NeverHeld => None,
        }
    }
}

/// A packet as it was taken up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The kernel's number.
    pub id: PacketId,
    /// What it is.
    pub kind: Kind,
    /// How long it is.
    pub len_bytes: u32,
}

/// What happens to a packet on arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It leaves now.
    Pass(PassWhy),
    /// It waits.
    Held,
    /// The queue is full: it must be dropped.
    Refused,
}

/// Why a packet left without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassWhy {
    /// Its stamp was covered already and nothing waited.
    Covered,
    /// It is a pure acknowledgement.
    PureAck,
    /// It is never held.
    NeverHeld,
    /// The mode is async.
    Async,
}

/// Whether the gate may open at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateState {
    /// The host holds a lease.
    Open,
    /// It does not.
    Shut(ShutWhy),
}

/// A packet that leaves after it has waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released {
    /// The kernel's number.
    pub id: PacketId,
    /// How long it is.
    pub len_bytes: u32,
    /// How long it has waited.
    pub held_ns: u64,
}

/// The rule that the gate's state and the mode make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    HoldAll,
    HoldNone,
    ByStamp,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    id: PacketId,
    len_bytes: u32,
    arrived: MonoNanos,
    flow: Option<Flow>,
}

/// A vector and a time; the one that the group does not use stays at its beginning.
#[derive(Clone, Debug, Default)]
struct Stamp {
    vector: CountVector,
    hlc: Hlc,
}

impl Stamp {
    fn covers(&self, other: &Stamp) -> bool {
        self.hlc >= other.hlc && self.vector.covers(&other.vector)
    }
}

/// Packets in a row that carry one stamp.
#[derive(Debug)]
struct Run {
    stamp: Stamp,
    packets: usize,
}

/// The packets of one member that wait.
#[derive(Debug)]
pub struct ReleaseQueue {
    capacity: usize,
    bytes_max: u64,
    gate: GateState,
    mode: Mode,
    committed: Stamp,
    newest_stamp: Stamp,
    held: VecDeque<Held>,
    runs: VecDeque<Run>,
    held_bytes: u64,
    held_in_flow: HashMap<Flow, u32>,
}

impl ReleaseQueue {
    /// An empty queue behind a shut gate. `capacity` is the kernel queue's length in packets.
    #[must_use]
    pub fn new(capacity: usize, mode: Mode) -> Self {
        Self {
            capacity,
            bytes_max: HELD_BYTES_MAX,
            gate: GateState::Shut(ShutWhy::NoLease),
            mode,
            committed: Stamp::default(),
            newest_stamp: Stamp::default(),
            held: VecDeque::new(),
            runs: VecDeque::new(),
            held_bytes: 0,
            held_in_flow: HashMap::new(),
        }
    }

    /// The same with another limit in bytes.
    #[must_use]
    pub fn with_bytes_max(mut self, bytes_max: u64) -> Self {
        self.bytes_max = bytes_max;
        self
    }

    /// C has risen. [`release`](Self::release) afterwards.
    pub fn set_committed(&mut self, committed: &CountVector) {
        self.committed.vector.merge(committed);
    }

    /// The watermark has risen. [`release`](Self::release) afterwards.
    pub fn set_watermark(&mut self, watermark: Hlc) {
        self.committed.hlc = self.committed.hlc.max(watermark);
    }

    /// The lease was got, has ended, or will never come again. [`release`](Self::release)
    /// afterwards. A fenced gate stays fenced.
    pub fn set_gate(&mut self, gate: GateState) {
        if self.gate != GateState::Shut(ShutWhy::Fenced) {
            self.gate = gate;
        }
    }

    /// The mode has changed. [`release`](Self::release) afterwards.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    /// P is known to name more than it did when the packets that wait were taken up: they may depend
    /// on all of it. Not for a P that has only grown since, which says nothing of them.
    pub fn restamp(&mut self, stamp: &CountVector) {
        self.newest_stamp.vector.merge(stamp);
        self.restamp_all();
    }

    /// As [`restamp`](Self::restamp), in a group whose stamps are times.
    pub fn restamp_at(&mut self, stamp: Hlc) {
        self.newest_stamp.hlc = self.newest_stamp.hlc.max(stamp);
        self.restamp_all();
    }

    fn restamp_all(&mut self) {
        let packets = self.held.len();
        self.runs.clear();
        if packets > 0 {
            self.runs.push_back(Run { stamp: self.newest_stamp.clone(), packets });
        }
    }

    /// Decides about a packet that was taken up before `stamp` was read from P.
    pub fn arrive(&mut self, packet: Packet, stamp: &CountVector, now: MonoNanos) -> Arrival {
        debug_assert!(stamp.covers(&self.newest_stamp.vector), "P of one member only grows");
        // Behind the assertion, the later of the two stamps is the safe one.
        self.newest_stamp.vector.merge(stamp);
        self.decide(packet, now)
    }

    /// As [`arrive`](Self::arrive), in a group whose stamps are times.
    pub fn arrive_at(&mut self, packet: Packet, stamp: Hlc, now: MonoNanos) -> Arrival {
        debug_assert!(stamp >= self.newest_stamp.hlc, "P of one member only grows");
        self.newest_stamp.hlc = self.newest_stamp.hlc.max(stamp);
        self.decide(packet, now)
    }

    fn decide(&mut self, packet: Packet, now: MonoNanos) -> Arrival {
        if packet.kind == Kind::NeverHeld {
            // It says that the guest is there: later it would be a lie, and while the gate is shut somebody else may be.
            return match self.policy() {
                Policy::HoldAll => Arrival::Refused,
                Policy::HoldNone | Policy::ByStamp => Arrival::Pass(PassWhy::NeverHeld),
            };
        }
        match self.policy() {
            Policy::HoldAll => {}
            Policy::HoldNone if self.held.is_empty() => return Arrival::Pass(PassWhy::Async),
            Policy::HoldNone => {}
            Policy::ByStamp => match packet.kind {
                Kind::PureAck { flow } if !self.held_in_flow.contains_key(&flow) => {
                    return Arrival::Pass(PassWhy::PureAck);
                }
                _ if self.held.is_empty() && self.covered(&self.newest_stamp) => {
                    return Arrival::Pass(PassWhy::Covered);
                }
                _ => {}
            },
        }
        let bytes = self.held_bytes + u64::from(packet.len_bytes);
        if self.held.len() >= self.capacity || bytes > self.bytes_max {
            return Arrival::Refused;
        }
        self.hold(packet, now);
        Arrival::Held
    }

    /// Releases what may leave: returns n for "accept all ids up to n", and tells `left` of each.
    pub fn release(&mut self, now: MonoNanos, mut left: impl FnMut(Released)) -> Option<PacketId> {
        let mut up_to = None;
        while let Some(run) = self.runs.front() {
            let may_leave = match self.policy() {
                Policy::HoldAll => false,
                Policy::HoldNone => true,
                Policy::ByStamp => self.covered(&run.stamp),
            };
            if !may_leave {
                break;
            }
            let packets = run.packets;
            self.runs.pop_front();
            for held in self.held.drain(..packets) {
                self.held_bytes -= u64::from(held.len_bytes);
                if let Some(flow) = held.flow {
                    forget(&mut self.held_in_flow, flow);
                }
                up_to = Some(held.id);
                left(Released {
                    id: held.id,
                    len_bytes: held.len_bytes,
                    held_ns: now.since_ns(held.arrived),
                });
            }
        }
        up_to
    }

    /// How many packets wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many bytes wait.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// When the packet at the front arrived.
    #[must_use]
    pub fn oldest_arrival(&self) -> Option<MonoNanos> {
        self.held.front().map(|held| held.arrived)
    }

    /// Whether the gate may open.
    #[must_use]
    pub fn gate(&self) -> GateState {
        self.gate
    }

    /// The mode that is in force.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    fn policy(&self) -> Policy {
        match (self.gate, self.mode) {
            (_, Mode::Async) if tidelock_planted::is(Bug::FenceIgnoredInAsync) => Policy::HoldNone,
            (GateState::Shut(ShutWhy::NoLease), Mode::Sync | Mode::Pipelined)
                if tidelock_planted::is(Bug::LeaseIgnored) =>
            {
                Policy::ByStamp
            }
            (GateState::Shut(ShutWhy::Fenced), _) => Policy::HoldAll,
            (_, Mode::Async) => Policy::HoldNone,
            (GateState::Shut(_), _) => Policy::HoldAll,
            (GateState::Open, Mode::Sync | Mode::Pipelined) => Policy::ByStamp,
        }
    }

    fn covered(&self, stamp: &Stamp) -> bool {
        match covered_by_fault(&self.committed.vector, &stamp.vector) {
            Some(covered) => covered && self.committed.hlc >= stamp.hlc,
            None => self.committed.covers(stamp),
        }
    }

    fn hold(&mut self, packet: Packet, now: MonoNanos) {
        let flow = packet.kind.flow();
        if let Some(flow) = flow {
            *self.held_in_flow.entry(flow).or_default() += 1;
        }
        self.held_bytes += u64::from(packet.len_bytes);
        self.held.push_back(Held {
            id: packet.id,
            len_bytes: packet.len_bytes,
            arrived: now,
            flow,
        });
        match self.runs.back_mut() {
            Some(run) if run.stamp.covers(&self.newest_stamp) => run.packets += 1,
            _ => self.runs.push_back(Run { stamp: self.newest_stamp.clone(), packets: 1 }),
        }
    }
}

/// The answer of a fault that is planted, if one is.
fn covered_by_fault(committed: &CountVector, stamp: &CountVector) -> Option<bool> {
    let has = |(writer, seq)| committed.get(writer) >= seq;
    // A writer that was taken out counts as 2^64 - 1.
    let sum = |v: &CountVector| v.entries().map(|(_, seq)| u128::from(seq.0)).sum::<u128>();
    if tidelock_planted::is(Bug::AnyEntryCovers) {
        return Some(stamp.entries().next().is_none() || stamp.entries().any(has));
    }
    if tidelock_planted::is(Bug::FirstEntryOnly) {
        return Some(stamp.entries().take(1).all(has));
    }
    if tidelock_planted::is(Bug::OneTooEarly) {
        return Some(stamp.entries().all(|(writer, seq)| has((writer, Seq(seq.0 - 1)))));
    }
    tidelock_planted::is(Bug::SumCovers).then(|| sum(committed) >= sum(stamp))
}

fn forget(held_in_flow: &mut HashMap<Flow, u32>, flow: Flow) {
    if let std::collections::hash_map::Entry::Occupied(mut count) = held_in_flow.entry(flow) {
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::{Seq, WriterId};

    const DATA: Kind = Kind::Data { flow: Some(Flow(1)) };
    const ACK: Kind = Kind::PureAck { flow: Flow(1) };
    const OTHER_ACK: Kind = Kind::PureAck { flow: Flow(2) };

    fn at_ms(ms: u64) -> MonoNanos {
        MonoNanos(ms * 1_000_000)
    }

    fn stamp(seq: u64) -> CountVector {
        CountVector::of(WriterId(0), Seq(seq))
    }

    fn open(capacity: usize) -> ReleaseQueue {
        let mut queue = ReleaseQueue::new(capacity, Mode::Pipelined);
        queue.set_gate(GateState::Open);
        queue
    }

    fn arrive(queue: &mut ReleaseQueue, id: u32, kind: Kind, seq: u64) -> Arrival {
        let packet = Packet { id: PacketId(id), kind, len_bytes: 10 };
        queue.arrive(packet, &stamp(seq), at_ms(u64::from(id)))
    }

    fn release(queue: &mut ReleaseQueue, ms: u64) -> Vec<u32> {
        let mut left = Vec::new();
        queue.release(at_ms(ms), |packet| left.push(packet.id.0));
        left
    }

    #[test]
    fn a_packet_waits_for_what_it_was_stamped_with() {
        let mut queue = open(8);
        assert_eq!(arrive(&mut queue, 1, DATA, 0), Arrival::Pass(PassWhy::Covered));
        assert_eq!(arrive(&mut queue, 2, DATA, 3), Arrival::Held);
        queue.set_committed(&stamp(2));
        assert_eq!(release(&mut queue, 5), []);
        queue.set_committed(&stamp(3));
        let mut left = Vec::new();
        assert_eq!(queue.release(at_ms(52), |p| left.push(p)), Some(PacketId(2)));
        assert_eq!(left, [Released { id: PacketId(2), len_bytes: 10, held_ns: 50_000_000 }]);
        assert_eq!(queue.held_bytes(), 0);
    }

    #[test]
    fn every_entry_of_a_stamp_counts() {
        let mut queue = open(8);
        let both: CountVector =
            [(WriterId(0), Seq(3)), (WriterId(1), Seq(2))].into_iter().collect();
        let packet = Packet { id: PacketId(1), kind: DATA, len_bytes: 10 };
        assert_eq!(queue.arrive(packet, &both, at_ms(0)), Arrival::Held);
        queue.set_committed(&stamp(1_000));
        assert_eq!(release(&mut queue, 1), []);
        queue.set_committed(&CountVector::of(WriterId(1), Seq(2)));
        assert_eq!(release(&mut queue, 1), [1]);
    }

    #[test]
    fn a_time_is_covered_when_the_watermark_has_reached_it() {
        let mut queue = open(8);
        let arrive = |queue: &mut ReleaseQueue, id, hlc| {
            let packet = Packet { id: PacketId(id), kind: DATA, len_bytes: 10 };
            queue.arrive_at(packet, Hlc(hlc), at_ms(0))
        };
        assert_eq!(arrive(&mut queue, 1, 0), Arrival::Pass(PassWhy::Covered));
        assert_eq!(arrive(&mut queue, 2, 5), Arrival::Held);
        assert_eq!(arrive(&mut queue, 3, 6), Arrival::Held);
        queue.set_committed(&stamp(1_000));
        queue.set_watermark(Hlc(5));
        assert_eq!(release(&mut queue, 1), [2]);
        queue.set_watermark(Hlc(4));
        assert_eq!(release(&mut queue, 1), []);
        queue.set_watermark(Hlc(6));
        assert_eq!(release(&mut queue, 1), [3]);
        assert_eq!(arrive(&mut queue, 4, 6), Arrival::Pass(PassWhy::Covered));
    }

    #[test]
    fn a_pure_ack_passes_beside_other_flows_but_never_overtakes_its_own() {
        let mut queue = open(8);
        assert_eq!(arrive(&mut queue, 1, DATA, 5), Arrival::Held);
        assert_eq!(arrive(&mut queue, 2, OTHER_ACK, 5), Arrival::Pass(PassWhy::PureAck));
        assert_eq!(arrive(&mut queue, 3, ACK, 5), Arrival::Held);
        queue.set_committed(&stamp(5));
        assert_eq!(release(&mut queue, 9), [1, 3]);
        assert_eq!(arrive(&mut queue, 4, ACK, 9), Arrival::Pass(PassWhy::PureAck));
    }

    #[test]
    fn a_shut_gate_holds_everything_and_drops_neighbour_discovery() {
        let mut queue = ReleaseQueue::new(8, Mode::Pipelined);
        assert_eq!(queue.gate(), GateState::Shut(ShutWhy::NoLease));
        assert_eq!(arrive(&mut queue, 1, DATA, 0), Arrival::Held);
        assert_eq!(arrive(&mut queue, 2, OTHER_ACK, 0), Arrival::Held);
        assert_eq!(arrive(&mut queue, 3, Kind::NeverHeld, 0), Arrival::Refused);
        assert_eq!(release(&mut queue, 9), []);
        queue.set_gate(GateState::Open);
        assert_eq!(release(&mut queue, 9), [1, 2]);
        assert_eq!(arrive(&mut queue, 4, Kind::NeverHeld, 0), Arrival::Pass(PassWhy::NeverHeld));
    }

    #[test]
    fn async_holds_nothing_and_needs_no_lease() {
        let mut queue = ReleaseQueue::new(8, Mode::Async);
        assert_eq!(arrive(&mut queue, 1, DATA, 7), Arrival::Pass(PassWhy::Async));
        queue.set_gate(GateState::Open);
        queue.set_mode(Mode::Pipelined);
        assert_eq!(arrive(&mut queue, 2, DATA, 7), Arrival::Held, "what async let out counts");
        queue.set_mode(Mode::Async);
        assert_eq!(arrive(&mut queue, 3, DATA, 8), Arrival::Held, "not past one that waits");
        assert_eq!(release(&mut queue, 9), [2, 3]);
    }

    #[test]
    fn a_fenced_gate_stays_shut_in_every_mode() {
        let mut queue = open(8);
        queue.set_gate(GateState::Shut(ShutWhy::Fenced));
        queue.set_gate(GateState::Open);
        for (id, mode) in [(1, Mode::Sync), (2, Mode::Pipelined), (3, Mode::Async)] {
            queue.set_mode(mode);
            assert_eq!(arrive(&mut queue, id, DATA, 0), Arrival::Held);
            assert_eq!(release(&mut queue, 9), []);
        }
    }

    #[test]
    fn what_waited_while_p_was_not_complete_waits_for_all_of_it() {
        let mut queue = open(8);
        queue.restamp(&stamp(1));
        assert_eq!(arrive(&mut queue, 1, DATA, 2), Arrival::Held);
        queue.set_gate(GateState::Shut(ShutWhy::FloorUnknown));
        queue.set_committed(&stamp(2));
        assert_eq!(arrive(&mut queue, 2, DATA, 2), Arrival::Held);
        queue.restamp(&stamp(9));
        queue.set_gate(GateState::Open);
        queue.set_committed(&stamp(8));
        assert_eq!(release(&mut queue, 5), []);
        queue.set_committed(&stamp(9));
        assert_eq!(release(&mut queue, 6), [1, 2]);
    }

    #[test]
    fn at_the_limit_a_packet_is_refused_and_one_less_is_not() {
        let mut queue = open(2);
        assert_eq!(arrive(&mut queue, 1, DATA, 1), Arrival::Held);
        assert_eq!(arrive(&mut queue, 2, DATA, 1), Arrival::Held);
        assert_eq!(arrive(&mut queue, 3, DATA, 1), Arrival::Refused);
        assert_eq!(arrive(&mut queue, 4, OTHER_ACK, 1), Arrival::Pass(PassWhy::PureAck));
        queue.set_committed(&stamp(1));
        assert_eq!(release(&mut queue, 9), [1, 2]);
        assert_eq!(arrive(&mut queue, 5, DATA, 2), Arrival::Held);
    }

    #[test]
    fn bytes_are_limited_too() {
        let mut queue = open(8).with_bytes_max(20);
        assert_eq!(arrive(&mut queue, 1, DATA, 1), Arrival::Held);
        assert_eq!(arrive(&mut queue, 2, DATA, 1), Arrival::Held);
        assert_eq!(arrive(&mut queue, 3, DATA, 1), Arrival::Refused);
        queue.set_committed(&stamp(1));
        assert_eq!(release(&mut queue, 9), [1, 2]);
        assert_eq!(arrive(&mut queue, 4, DATA, 2), Arrival::Held);
    }

    #[test]
    fn ids_compare_across_the_wrap() {
        assert!(PacketId(3).is_after(PacketId(u32::MAX - 3)));
        assert!(!PacketId(u32::MAX).is_after(PacketId(0)));
        assert!(!PacketId(7).is_after(PacketId(7)));
    }
}
