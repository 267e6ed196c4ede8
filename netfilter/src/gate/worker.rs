//! The gate's thread: takes packets up, stamps them, and releases them.
//!
//! Each turn first acts on what has changed (C, lease, mode), so that a packet whose stamp is
//! covered passes at once; then takes packets up, and only after that reads P for them. It sleeps
//! in epoll, and the only timer is the lease's end.

use super::GateError;
use super::shared::{Group, GroupState, Pending};
use super::stats::GateStats;
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

const TOKEN_WAKE: u64 = 0;
const TOKEN_LEASE: u64 = 1;
const TOKEN_FIRST_MEMBER: u64 = 2;
/// So many receives of one member before the others get their turn.
const ROUNDS_MAX: usize = 16;

/// How a member's gate stood when the thread ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) member: String,
    /// Packets that still waited: the kernel drops them with the queue.
    pub(super) dropped: usize,
    /// Why the member must not send without the gate, if so.
    pub(super) unsettled: Option<&'static str>,
}

/// One member as the thread sees it.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) nfqueue: Nfqueue,
    pub(super) queue: ReleaseQueue,
    pub(super) pending: Arc<Pending>,
    pub(super) stats: Arc<GateStats>,
    pub(super) stamp: CountVector,
    pub(super) verdicts: Verdicts,
}

impl Member {
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
        let Self { nfqueue, queue, stamp, stats, verdicts, .. } = self;
        nfqueue.packets(|queued| {
            let kind = classify(queued.ethertype, queued.head, queued.len_bytes);
            let packet = Packet { id: queued.id, kind, len_bytes: queued.len_bytes };
            match queue.arrive(packet, stamp, now) {
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
}

impl GroupWorker {
    /// Acts on what has changed since the last time, and on the lease's end.
    fn follow(&mut self, now: MonoNanos) -> Result<(), GateError> {
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
            let why = match gate {
                GateState::Open => None,
                GateState::Shut(ShutWhy::Fenced) => Some(ShutWhy::Fenced),
                // Async goes on without a lease and during a resync.
                GateState::Shut(_) if self.state.mode == Mode::Async => None,
                GateState::Shut(why) => Some(why),
            };
            for member in &mut self.members {
                member.queue.set_committed(&self.state.committed);
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

    fn unsettled(&self, member: &Member, now: MonoNanos) -> Option<&'static str> {
        match (self.state.gate_state(now), self.state.mode) {
            (GateState::Shut(ShutWhy::Fenced), _) => {
                Some("the backup has ended this primary's epoch")
            }
            (_, Mode::Async) => None,
            (GateState::Shut(ShutWhy::NoLease), _) => Some("the host holds no lease"),
            (GateState::Shut(ShutWhy::Resyncing), _) => Some("a resync has not ended"),
            (GateState::Open, _) if !self.state.committed.covers(&member.pending.read()) => {
                Some("the backup does not have every write yet")
            }
            (GateState::Open, _) => None,
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
    pub(super) fn run(mut self) -> Result<Vec<End>, GateError> {
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
            let timeout_ms = if self.may_sleep() { -1 } else { 0 };
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

    fn take_up(&mut self, nth: u64) -> Result<(), GateError> {
        let mut at = usize::try_from(nth).expect("tokens count members");
        for group in &mut self.groups {
            if at >= group.members.len() {
                at -= group.members.len();
                continue;
            }
            for _ in 0..ROUNDS_MAX {
                match group.members[at].nfqueue.receive()? {
                    Received::Nothing => break,
                    Received::Overrun => group.members[at].stats.socket_overrun(),
                    Received::Some => {
                        let now = now();
                        group.follow(now)?;
                        group.members[at].arrivals(now)?;
                    }
                }
            }
            return Ok(());
        }
        Ok(())
    }

    fn end(self) -> Vec<End> {
        let now = now();
        let mut ends = Vec::new();
        for group in &self.groups {
            for member in &group.members {
                ends.push(End {
                    member: member.name.clone(),
                    dropped: member.queue.len(),
                    unsettled: group.unsettled(member, now),
                });
            }
        }
        ends
    }
}
