//! The gate's thread: takes packets up, stamps them, and releases them.
//!
//! Each turn first acts on what has changed (C, lease, mode), so that a packet whose stamp is
//! covered passes at once; then takes packets up, and only after that reads P for them. It sleeps
//! in epoll, and the only timer is the lease's end.
//!
//! Where kernel programs let covered packets pass by themselves, they do so only while nothing
//! waits here, so that nothing overtakes. They count what they leave to the queue; once as many
//! have come and gone, the thread says so: see [`Crossing`].

use super::shared::{Group, GroupState, Pending};
use super::stats::GateStats;
use super::{GateError, Stopped};
use crate::nfqueue::{Nfqueue, Received};
use crate::packet::classify;
use crate::release_queue::{Arrival, GateState, Packet, ReleaseQueue, ShutWhy};
use crate::sys::{Epoll, EventFd, TimerFd, now};
use crate::verdicts::Verdicts;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::{CrossingCells, Mapped};

const TOKEN_WAKE: u64 = 0;
const TOKEN_LEASE: u64 = 1;
const TOKEN_FIRST_MEMBER: u64 = 2;
/// How often the kernel programs hear that this process lives, and how its clocks stand.
const REFRESH_MS: u64 = 60_000;
/// How long a packet may take from the programs to the queue: both run in one turn of the kernel.
const MISSING_MS: u64 = 1;
/// So many receives of one member before the others get their turn.
const ROUNDS_MAX: usize = 16;

/// One interface of a member as the thread sees it.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) interface: String,
    pub(super) nfqueue: Nfqueue,
    pub(super) queue: ReleaseQueue,
    pub(super) pending: Arc<Pending>,
    pub(super) stats: Arc<GateStats>,
    pub(super) stamp: CountVector,
    /// Stamps are times.
    pub(super) is_hlc: bool,
    pub(super) verdicts: Verdicts,
    /// The way past the queue, where there are kernel programs.
    pub(super) crossing: Option<Crossing>,
    /// As it was found last: its guest may know what P does not name.
    pub(super) is_incomplete: bool,
}

/// What a member's gate shares with its kernel programs, so that nothing overtakes.
///
/// A packet is counted before it comes to the queue, and may be lost in between (no route, another
/// rule) or be doubled (a bridge that floods). So if the numbers differ while nothing comes, they
/// are made equal after a moment; until then packets go through the queue.
pub(super) struct Crossing {
    cells: Arc<Mapped<CrossingCells>>,
    /// How many packets have come, as the programs count.
    arrived: u64,
    /// A count that was not reached, and since when.
    missing: (u64, MonoNanos),
}

impl Crossing {
    pub(super) fn new(cells: Arc<Mapped<CrossingCells>>) -> Self {
        Self { cells, arrived: 0, missing: (0, MonoNanos(0)) }
    }

    /// How many packets the programs have left to the queue so far.
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
        self.cells.decided.store(queued, Ordering::SeqCst);
    }

    fn waiting(&self, waits: bool) {
        self.cells.waiting.store(u64::from(waits), Ordering::SeqCst);
    }
}

impl Member {
    /// How the member's own gate stands where the group's stands so.
    fn gate(&self, group: GateState) -> GateState {
        match group {
            GateState::Open if self.is_incomplete => GateState::Shut(ShutWhy::FloorUnknown),
            group => group,
        }
    }

    /// Whether P has become complete, or has ceased to be.
    fn follow_completeness(&mut self, group: &str, mode: Mode) {
        let was = std::mem::replace(&mut self.is_incomplete, self.pending.incomplete().is_some());
        let member = &self.name;
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
                match self.is_hlc {
                    false => self.queue.restamp(&self.pending.read()),
                    true => self.queue.restamp_at(self.pending.read_hlc()),
                }
            }
            _ => {}
        }
    }

    /// Whether the kernel programs know that nothing waits here, if nothing does.
    fn is_settled(&self) -> bool {
        self.crossing.as_ref().is_none_or(|crossing| {
            !self.queue.is_empty()
                || crossing.queued() == crossing.cells.decided.load(Ordering::SeqCst)
        })
    }

    fn release(&mut self, now: MonoNanos) -> Result<(), GateError> {
        let stats = &self.stats;
        if let Some(up_to) = self.queue.release(now, |left| stats.left(left)) {
            self.verdicts.release(up_to);
            self.tell_kernel()?;
        }
        self.publish_waiting();
        Ok(())
    }

    /// Decides about what [`Nfqueue::receive`] has just taken up.
    fn arrivals(&mut self, now: MonoNanos) -> Result<(), GateError> {
        // After the packets were taken up: a late stamp is safe, an early one is not.
        self.pending.read_into(&mut self.stamp);
        let time = self.is_hlc.then(|| self.pending.read_hlc());
        let Self { nfqueue, queue, stamp, stats, verdicts, .. } = self;
        let mut arrived = 0;
        nfqueue.packets(|queued| {
            arrived += 1;
            let kind = classify(queued.ethertype, queued.head, queued.len_bytes);
            let packet = Packet { id: queued.id, kind, len_bytes: queued.len_bytes };
            let arrival = match time {
                None => queue.arrive(packet, stamp, now),
                Some(time) => queue.arrive_at(packet, time, now),
            };
            match arrival {
                Arrival::Pass(why) => {
                    stats.passed(why);
                    verdicts.pass(queued.id, queue.is_empty());
                }
                Arrival::Held => {}
                Arrival::Refused => {
                    stats.refused();
                    verdicts.drop_packet(queued.id);
                }
            }
        });
        if let Some(crossing) = &mut self.crossing {
            crossing.arrived = crossing.arrived.wrapping_add(arrived);
        }
        stats.netlink(nfqueue.refused_verdicts(), nfqueue.unread());
        self.tell_kernel()?;
        self.publish_waiting();
        Ok(())
    }

    fn tell_kernel(&mut self) -> Result<(), GateError> {
        let sent = self.nfqueue.send(&self.verdicts);
        self.verdicts.clear();
        Ok(sent?)
    }

    fn publish_waiting(&self) {
        let queue = &self.queue;
        if let Some(crossing) = &self.crossing {
            crossing.waiting(!queue.is_empty());
        }
        self.stats.waiting(queue.len() as u64, queue.held_bytes(), queue.oldest_arrival());
    }
}

/// One group as the thread sees it.
pub(super) struct GroupWorker {
    pub(super) shared: Arc<Group>,
    pub(super) seen: u64,
    pub(super) state: GroupState,
    pub(super) gate: Option<GateState>,
    pub(super) lease_timer: TimerFd,
    pub(super) members: Vec<Member>,
    /// When the kernel programs hear from us next.
    pub(super) refresh_at: MonoNanos,
}

impl Drop for GroupWorker {
    /// However the thread ends, the way past the queue ends with it.
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl GroupWorker {
    /// Acts on what has changed since the last time, and on the lease's end.
    fn follow(&mut self, now: MonoNanos) -> Result<(), GateError> {
        if self.shared.has_programs() && now >= self.refresh_at {
            self.shared.refresh_programs();
            self.refresh_at = now.plus_ms(REFRESH_MS);
        }
        let mut changed = false;
        if let Some((version, state)) = self.shared.newer_than(self.seen) {
            self.seen = version;
            self.state = state;
            self.lease_timer
                .arm(self.state.lease.until().filter(|until| *until > now))
                .map_err(GateError::Wait)?;
            changed = true;
        }
        let gate = self.state.gate_state(now);
        if self.gate != Some(gate) {
            self.gate = Some(gate);
            self.tell_of_gate(gate);
            changed = true;
        }
        if changed {
            for member in &mut self.members {
                member.follow_completeness(&self.shared.name, self.state.mode);
                let gate = member.gate(gate);
                let why = match gate {
                    GateState::Open => None,
                    GateState::Shut(ShutWhy::Fenced) => Some(ShutWhy::Fenced),
                    // Async goes on without a lease, during a resync and without knowing.
                    GateState::Shut(_) if self.state.mode == Mode::Async => None,
                    GateState::Shut(why) => Some(why),
                };
                member.queue.set_committed(&self.state.committed);
                member.queue.set_watermark(self.state.watermark);
                member.queue.set_mode(self.state.mode);
                member.queue.set_gate(gate);
                member.stats.shut(why, now);
                member.stats.set_async(self.state.mode == Mode::Async, now);
                member.release(now)?;
            }
            self.shared.applied(self.seen);
        }
        Ok(())
    }

    fn tell_of_gate(&self, gate: GateState) {
        let group = &self.shared.name;
        match gate {
            GateState::Open => tracing::info!(group, "gate: lease held, covered packets leave"),
            // A member's own.
            GateState::Shut(ShutWhy::FloorUnknown) => {}
            GateState::Shut(ShutWhy::NoLease | ShutWhy::Resyncing)
                if self.state.mode == Mode::Async => {}
            GateState::Shut(ShutWhy::NoLease) => {
                tracing::warn!(group, "gate: no lease from the backup, packets are held");
            }
            GateState::Shut(ShutWhy::Resyncing) => {
                tracing::warn!(group, "gate: packets are held until the resync has ended");
            }
            GateState::Shut(ShutWhy::Fenced) => tracing::error!(
                group,
                "gate: the backup has ended this primary's epoch, it stays shut for good"
            ),
        }
    }
}

/// The thread's state.
pub(super) struct Worker {
    pub(super) epoll: Epoll,
    pub(super) wake: Arc<EventFd>,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) groups: Vec<GroupWorker>,
}

impl Worker {
    /// Waits for everything that the thread must react to. Once, before [`run`](Self::run).
    pub(super) fn register(&self) -> Result<(), GateError> {
        self.epoll.add(self.wake.fd(), TOKEN_WAKE).map_err(GateError::Wait)?;
        for group in &self.groups {
            self.epoll.add(group.lease_timer.fd(), TOKEN_LEASE).map_err(GateError::Wait)?;
        }
        let members = self.groups.iter().flat_map(|group| &group.members);
        for (token, member) in (TOKEN_FIRST_MEMBER..).zip(members) {
            self.epoll.add(member.nfqueue.fd(), token).map_err(GateError::Wait)?;
        }
        Ok(())
    }

    /// Runs until it is told to stop.
    pub(super) fn run(mut self) -> Result<Vec<Stopped>, GateError> {
        let mut ready = Vec::new();
        // What came while the queues were being bound has been read already: nothing would wake
        // us for it.
        for nth in 0..self.groups.iter().map(|group| group.members.len() as u64).sum() {
            self.take_up(nth)?;
        }
        loop {
            for group in &mut self.groups {
                group.follow(now())?;
            }
            if self.stop.load(Ordering::SeqCst) {
                return Ok(self.end());
            }
            for nth in self.unsettled_members() {
                self.take_up(nth)?;
            }
            let timeout_ms = if self.may_sleep() { self.sleep_max_ms() } else { 0 };
            self.epoll.wait(&mut ready, timeout_ms).map_err(GateError::Wait)?;
            for token in &ready {
                match *token {
                    TOKEN_WAKE => self.wake.drain(),
                    TOKEN_LEASE => self.groups.iter().for_each(|g| g.lease_timer.drain()),
                    member => self.take_up(member - TOKEN_FIRST_MEMBER)?,
                }
            }
        }
    }

    /// Says what it wants to be woken for, then looks once more: see
    /// [`Group::set_wants_committed`].
    fn may_sleep(&self) -> bool {
        for group in &self.groups {
            let holds = group.members.iter().any(|member| !member.queue.is_empty());
            group.shared.set_wants_committed(holds);
        }
        self.groups.iter().all(|group| group.shared.version() == group.seen)
    }

    fn sleep_max_ms(&self) -> i32 {
        if !self.unsettled_members().is_empty() {
            return MISSING_MS as i32;
        }
        let must_refresh = self.groups.iter().any(|group| group.shared.has_programs());
        if must_refresh { REFRESH_MS as i32 } else { -1 }
    }

    fn unsettled_members(&self) -> Vec<u64> {
        let members = (0..).zip(self.groups.iter().flat_map(|group| &group.members));
        members.filter(|(_, member)| !member.is_settled()).map(|(nth, _)| nth).collect()
    }

    fn take_up(&mut self, nth: u64) -> Result<(), GateError> {
        let mut at = usize::try_from(nth).expect("tokens count members");
        for group in &mut self.groups {
            if at >= group.members.len() {
                at -= group.members.len();
                continue;
            }
            for _ in 0..ROUNDS_MAX {
                let queued = group.members[at].crossing.as_ref().map(Crossing::queued);
                match group.members[at].nfqueue.receive()? {
                    Received::Nothing => {
                        let member = &mut group.members[at];
                        if let (Some(crossing), true) =
                            (&mut member.crossing, member.queue.is_empty())
                        {
                            crossing.found_empty(queued.expect("it is there"), now());
                        }
                        return Ok(());
                    }
                    Received::Overrun => group.members[at].stats.socket_overrun(),
                    Received::Some => {
                        let now = now();
                        group.follow(now)?;
                        group.members[at].arrivals(now)?;
                    }
                }
            }
            // Packets come as fast as they are passed: without this, they would for ever. A run of
            // them is overtaken once.
            let member = &group.members[at];
            if let (Some(crossing), true) = (&member.crossing, member.queue.is_empty()) {
                crossing.cells.decided.store(crossing.queued(), Ordering::SeqCst);
            }
            return Ok(());
        }
        Ok(())
    }

    fn end(self) -> Vec<Stopped> {
        self.groups.iter().for_each(|group| group.shared.end());
        let members = self.groups.iter().flat_map(|group| &group.members);
        let stopped = members.map(|member| Stopped {
            member: member.name.clone(),
            interface: member.interface.clone(),
            // The kernel drops them with the queue.
            dropped_packets: member.queue.len(),
        });
        stopped.collect()
    }
}
