//! The gate of one group on a host: stamps packets when they are taken up, and releases them.
//!
//! [`GroupGate::follow`] acts on what has changed (C, lease, mode), so that a packet whose stamp is covered passes at once.
//! [`GroupGate::take_up`] takes packets up, and only after that reads P for them. Neither waits: [`super::worker`] is the
//! thread that calls them, and the simulator calls them with queues of its own.
//!
//! Where kernel programs let covered packets pass by themselves, they do so only while nothing waits here, so that nothing
//! overtakes. They count what they leave to the queue; once as many have come and gone, the gate says so: see [`Crossing`].

use super::shared::{Group, GroupState, Pending, ToldPrograms};
use super::stats::GateStats;
use super::{GateError, GateHandle, Stopped, Surroundings};
use crate::nfqueue::{PacketQueue, Received};
use crate::packet::classify;
use crate::release_queue::{Arrival, GateState, HoldReason, Packet, ReleaseQueue, ShutWhy};
use crate::verdicts::Verdicts;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::{CrossingCells, Mapped};

/// The interval at which the kernel programs hear that this process lives, and how its clocks stand.
const REFRESH_MS: u64 = 60_000;
/// The time that a packet may take from the programs to the queue: both run in one turn of the kernel.
const MISSING_MS: u64 = 1;
/// So many receives of one member before the others get their turn.
const ROUNDS_MAX: usize = 16;

/// An interface of a member, to be guarded.
#[derive(Debug)]
pub struct PortParts<Q> {
    /// The member.
    pub member: String,
    /// The interface.
    pub interface: String,
    /// Its packets, as the kernel queues them.
    pub queue: Q,
    /// The number of packets that may wait.
    pub queue_len_max: usize,
    /// The member's P.
    pub pending: Arc<Pending>,
    /// Its counters.
    pub stats: Arc<GateStats>,
    /// Stamps are times.
    pub is_hlc: bool,
    /// The way past the queue, where there are kernel programs.
    pub crossing: Option<Arc<Mapped<CrossingCells>>>,
}

/// A guarded interface of a member.
#[derive(Debug)]
struct Port<Q> {
    parts: PortParts<Q>,
    release: ReleaseQueue,
    stamp: CountVector,
    verdicts: Verdicts,
    crossing: Option<Crossing>,
    /// True if the guest might know what P does not name, at the last look.
    is_incomplete: bool,
}

/// Counters that a member's gate shares with its kernel programs, so that nothing overtakes.
///
/// A packet is counted before it comes to the queue, and may be lost in between (no route, another
/// rule) or be doubled (a bridge that floods). So if the numbers differ while nothing comes, they
/// are made equal after a moment; until then packets go through the queue.
#[derive(Debug)]
struct Crossing {
    cells: Arc<Mapped<CrossingCells>>,
    /// Packets that have come, as the programs count.
    arrived: u64,
    /// A count that was not reached, and since when.
    missing: (u64, MonoNanos),
}

impl Crossing {
    fn new(cells: Arc<Mapped<CrossingCells>>) -> Self {
        Self { cells, arrived: 0, missing: (0, MonoNanos(0)) }
    }

    /// Packets that the programs have left to the queue so far.
    fn queued(&self) -> u64 {
        self.cells.queued.load(Ordering::SeqCst)
    }

    /// The queue was found empty after the programs had counted up to `queued`.
    fn found_empty(&mut self, queued: u64, now: MonoNanos) {
        if self.arrived != queued {
            if self.missing.0 != queued {
                self.missing = (queued, now);
            }
            if now.since_ns(self.missing.1) < MISSING_MS * 1_000_000 {
                return;
            }
            self.arrived = queued;
        }
        self.decided(queued);
    }

    fn decided(&self, queued: u64) {
        self.cells.decided.store(queued, Ordering::SeqCst);
    }

    fn waiting(&self, waits: bool) {
        self.cells.waiting.store(u64::from(waits), Ordering::SeqCst);
    }
}

impl<Q: PacketQueue> Port<Q> {
    /// The state of this port where the group's gate is in this one.
    fn gate(&self, group: GateState) -> GateState {
        match group {
            GateState::Open if self.is_incomplete => GateState::Shut(ShutWhy::FloorUnknown),
            group => group,
        }
    }

    /// Notices that P has become complete, or has ceased to be.
    fn follow_completeness(&mut self, group: &str, mode: Mode) {
        let PortParts { member, pending, is_hlc, .. } = &self.parts;
        let was = std::mem::replace(&mut self.is_incomplete, pending.incomplete().is_some());
        match (was, self.is_incomplete) {
            (false, true) if mode != Mode::Async => tracing::warn!(
                group,
                member,
                "gate: its packets are held until every writer of the group has said how far it is: what \
                 the guest may have heard was not seen"
            ),
            (true, false) => {
                tracing::info!(group, member, "gate: all that the guest may know is known");
                // The stamps of what waits were taken from a P that did not name it.
                match is_hlc {
                    false => self.release.restamp(&pending.read()),
                    true => self.release.restamp_at(pending.read_hlc()),
                }
            }
            _ => {}
        }
    }

    /// True if packets wait here, or the kernel programs know that none does.
    fn is_settled(&self) -> bool {
        self.crossing.as_ref().is_none_or(|crossing| {
            !self.release.is_empty()
                || crossing.queued() == crossing.cells.decided.load(Ordering::SeqCst)
        })
    }

    fn follow(
        &mut self,
        state: &GroupState,
        gate: GateState,
        now: MonoNanos,
    ) -> Result<(), GateError> {
        let gate = self.gate(gate);
        let is_async = state.mode == Mode::Async;
        let why = match gate {
            GateState::Open => None,
            GateState::Shut(ShutWhy::Fenced) => Some(ShutWhy::Fenced),
            // Async goes on without a lease, during a resync and without knowing.
            GateState::Shut(_) if is_async => None,
            GateState::Shut(why) => Some(why),
        };
        self.release.set_committed(&state.committed);
        self.release.set_watermark(state.watermark);
        self.release.set_mode(state.mode);
        self.release.set_gate(gate);
        let stats = &self.parts.stats;
        stats.shut(why, now);
        stats.set_async(is_async, now);
        if let Some(up_to) = self.release.release(now, |left| stats.left(left)) {
            self.verdicts.release(up_to);
            self.tell_kernel()?;
        }
        self.publish_waiting();
        Ok(())
    }

    /// Decides about what [`PacketQueue::receive`] has just taken up.
    fn arrivals(&mut self, now: MonoNanos) -> Result<(), GateError> {
        let Self { parts, release, stamp, verdicts, .. } = self;
        let PortParts { queue, pending, stats, is_hlc, .. } = parts;
        // After the packets were taken up: a late stamp is safe, an early one is not.
        pending.read_into(stamp);
        let time = is_hlc.then(|| pending.read_hlc());
        let mut arrived = 0;
        queue.packets(|queued| {
            arrived += 1;
            let kind = classify(queued.ethertype, queued.head, queued.len_bytes);
            let packet = Packet { id: queued.id, kind, len_bytes: queued.len_bytes };
            let arrival = match time {
                None => release.arrive(packet, stamp, now),
                Some(time) => release.arrive_at(packet, time, now),
            };
            match arrival {
                Arrival::Pass(why) => {
                    stats.passed(why);
                    verdicts.pass(queued.id, release.is_empty());
                }
                Arrival::Held => {}
                Arrival::Refused => {
                    stats.refused();
                    verdicts.drop_packet(queued.id);
                }
            }
        });
        stats.netlink(queue.refused_verdicts(), queue.unread());
        if let Some(crossing) = &mut self.crossing {
            crossing.arrived = crossing.arrived.wrapping_add(arrived);
        }
        self.tell_kernel()?;
        self.publish_waiting();
        Ok(())
    }

    fn tell_kernel(&mut self) -> Result<(), GateError> {
        let sent = self.parts.queue.send(&self.verdicts);
        self.verdicts.clear();
        Ok(sent?)
    }

    fn publish_waiting(&self) {
        let Self { release, parts, .. } = self;
        if let Some(crossing) = &self.crossing {
            crossing.waiting(!release.is_empty());
        }
        parts.stats.waiting(release.len() as u64, release.held_bytes(), release.oldest_arrival());
    }
}

/// The gate of a group on a host.
#[derive(Debug)]
pub struct GroupGate<Q> {
    shared: Arc<Group>,
    seen: u64,
    state: GroupState,
    gate: Option<GateState>,
    ports: Vec<Port<Q>>,
    /// The time at which the kernel programs are told again that this process lives.
    refresh_at: MonoNanos,
}

impl<Q: PacketQueue> GroupGate<Q> {
    /// A shut gate without ports. `programs`: how the group's kernel programs are told of its state, where there are any.
    #[must_use]
    pub fn new(
        name: String,
        mode: Mode,
        lease_period_ms: u64,
        programs: Option<ToldPrograms>,
        around: Arc<dyn Surroundings>,
    ) -> Self {
        let shared = Arc::new(Group::new(name, mode, lease_period_ms, programs, around));
        let state = GroupState::new(mode, lease_period_ms);
        Self { shared, seen: 0, state, gate: None, ports: Vec::new(), refresh_at: MonoNanos(0) }
    }

    /// A handle that drives this gate.
    #[must_use]
    pub fn handle(&self) -> GateHandle {
        GateHandle::new(Arc::clone(&self.shared))
    }

    /// The member whose P this is has others to hear of. `is_known`: it was seen what its guest has heard since the
    /// beginning, and this P names it. To be called before the first lease.
    pub fn depends_on_others(&self, pending: &Arc<Pending>, is_known: bool) {
        self.shared.depends_on_others(pending, is_known);
    }

    /// Guards one more interface.
    pub fn add_port(&mut self, mut parts: PortParts<Q>) {
        self.ports.push(Port {
            release: ReleaseQueue::new(parts.queue_len_max, self.shared.mode()),
            crossing: parts.crossing.take().map(Crossing::new),
            parts,
            stamp: CountVector::new(),
            verdicts: Verdicts::new(),
            is_incomplete: false,
        });
    }

    /// The number of ports. They are counted from 0.
    #[must_use]
    pub fn port_count(&self) -> usize {
        self.ports.len()
    }

    /// The kernel's queue of a port.
    pub fn queue(&self, port: usize) -> &Q {
        &self.ports[port].parts.queue
    }

    /// The kernel's queue of a port, for its driver.
    pub fn queue_mut(&mut self, port: usize) -> &mut Q {
        &mut self.ports[port].parts.queue
    }

    /// The number of packets of a port that wait for C.
    #[must_use]
    pub fn held_packets(&self, port: usize) -> usize {
        self.ports[port].release.len()
    }

    /// Acts on what has changed since the last time, and on the lease's end.
    pub fn follow(&mut self, now: MonoNanos) -> Result<(), GateError> {
        if self.shared.has_programs() && now >= self.refresh_at {
            self.shared.refresh_programs();
            self.refresh_at = now.plus_ms(REFRESH_MS);
        }
        let mut changed = false;
        if let Some((version, state)) = self.shared.newer_than(self.seen) {
            self.seen = version;
            self.state = state;
            changed = true;
        }
        let gate = self.state.gate_state(now);
        if self.gate != Some(gate) {
            self.gate = Some(gate);
            self.log_gate(gate);
            changed = true;
        }
        if changed {
            for port in &mut self.ports {
                port.follow_completeness(&self.shared.name, self.state.mode);
                port.follow(&self.state, gate, now)?;
            }
            self.shared.applied(self.seen);
        }
        Ok(())
    }

    /// Takes up what a port's queue has, and decides about it.
    pub fn take_up(&mut self, port: usize) -> Result<(), GateError> {
        for _ in 0..ROUNDS_MAX {
            let queued = self.ports[port].crossing.as_ref().map(Crossing::queued);
            match self.ports[port].parts.queue.receive()? {
                Received::Nothing => {
                    let port = &mut self.ports[port];
                    if let (Some(crossing), true) = (&mut port.crossing, port.release.is_empty()) {
                        crossing.found_empty(queued.expect("it is there"), self.shared.now());
                    }
                    return Ok(());
                }
                Received::Overrun => self.ports[port].parts.stats.socket_overrun(),
                Received::Some => {
                    let now = self.shared.now();
                    self.follow(now)?;
                    self.ports[port].arrivals(now)?;
                }
            }
        }
        // Packets come as fast as they are passed: without this, they would for ever. A run of them is overtaken once.
        let port = &self.ports[port];
        if let (Some(crossing), true) = (&port.crossing, port.release.is_empty()) {
            crossing.decided(crossing.queued());
        }
        Ok(())
    }

    /// The end of the lease, at which [`follow`](Self::follow) must be called.
    #[must_use]
    pub fn lease_end(&self) -> Option<MonoNanos> {
        self.state.lease.until()
    }

    /// Says what it wants to be woken for, then looks once more: see [`Group::set_wants_committed`].
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        self.shared.set_wants_committed(self.ports.iter().any(|port| !port.release.is_empty()));
        self.shared.version() == self.seen
    }

    /// The longest time until [`follow`](Self::follow) must be called and the [`unsettled`](Self::unsettled) ports must be
    /// taken up again, whatever happens.
    #[must_use]
    pub fn sleep_max_ms(&self) -> Option<u64> {
        match self.unsettled().next() {
            Some(_) => Some(MISSING_MS),
            None => self.shared.has_programs().then_some(REFRESH_MS),
        }
    }

    /// Ports whose programs have counted packets that have not come.
    pub fn unsettled(&self) -> impl Iterator<Item = usize> {
        let ports = self.ports.iter().enumerate();
        ports.filter(|(_, port)| !port.is_settled()).map(|(nth, _)| nth)
    }

    /// Shuts the way past the queue for good.
    pub fn end(&self) {
        self.shared.end();
    }

    /// The ports as they are left.
    pub fn stopped(&self) -> impl Iterator<Item = Stopped> {
        self.ports.iter().map(|port| Stopped {
            member: port.parts.member.clone(),
            interface: port.parts.interface.clone(),
            // The kernel drops them with the queue.
            dropped_packets: port.release.len(),
        })
    }

    fn log_gate(&self, gate: GateState) {
        let group = &self.shared.name;
        match gate {
            GateState::Open => tracing::info!(group, "gate: lease held, covered packets leave"),
            // A member's own.
            GateState::Shut(ShutWhy::FloorUnknown) => {}
            GateState::Shut(ShutWhy::NoLease | ShutWhy::Held(_))
                if self.state.mode == Mode::Async => {}
            GateState::Shut(ShutWhy::NoLease) => {
                tracing::warn!(group, "gate: no lease from the backup, packets are held");
            }
            GateState::Shut(ShutWhy::Held(HoldReason::Gap)) => {
                tracing::warn!(group, "gate: packets are held until the sites have been compared");
            }
            GateState::Shut(ShutWhy::Held(HoldReason::LeftBacklog)) => tracing::warn!(
                group,
                "gate: packets are held until the backup has what a daemon that was killed had left in its backlog on disk"
            ),
            GateState::Shut(ShutWhy::Fenced) => tracing::error!(
                group,
                "gate: the backup has ended this primary's epoch, it stays shut for good"
            ),
        }
    }
}
