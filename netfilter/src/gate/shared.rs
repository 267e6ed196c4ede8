//! What the rest of the daemon shares with the gate's thread.
//!
//! [`Pending`] is written by sequencers for every write, so it is plain atomics. The group's state
//! ([`GateHandle`]) changes with acks, beacons and operators, and is read by the gate's thread only
//! after a change, so it sits behind a mutex and a version.

use crate::release_queue::{GateState, ShutWhy};
use crate::sys::EventFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::lease::Lease;
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;

/// P of one member: what anything it sends may depend on (PipeCloud 3.2.2).
///
/// A sequencer publishes a write here **before** the write can be completed to the guest. The gate
/// reads P **after** it took a packet up. So the stamp of a packet that the guest sent because of
/// a completion names that write.
#[derive(Debug)]
pub struct Pending([AtomicU64; WRITERS_MAX as usize]);

impl Default for Pending {
    fn default() -> Self {
        Self::new()
    }
}

impl Pending {
    /// P before any write.
    #[must_use]
    pub fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Raises a writer's entry. Entries never fall.
    pub fn publish(&self, writer: WriterId, seq: Seq) {
        self.0[writer.index()].fetch_max(seq.0, Ordering::SeqCst);
    }

    /// Raises every entry to that of `other`: what another member told this one.
    pub fn merge(&self, other: &CountVector) {
        for (writer, seq) in other.entries() {
            self.publish(writer, seq);
        }
    }

    /// P now. One reader sees every entry only ever grow.
    #[must_use]
    pub fn read(&self) -> CountVector {
        let mut p = CountVector::new();
        self.read_into(&mut p);
        p
    }

    /// Raises `p` to P.
    pub(super) fn read_into(&self, p: &mut CountVector) {
        for (writer, entry) in (0..WRITERS_MAX).zip(&self.0) {
            p.raise(WriterId(writer), Seq(entry.load(Ordering::SeqCst)));
        }
    }
}

/// What decides about a group's packets.
#[derive(Clone, Debug)]
pub struct GroupState {
    /// C.
    pub committed: CountVector,
    /// The lease.
    pub lease: Lease,
    /// The mode.
    pub mode: Mode,
    /// The backup has ended this primary's epoch.
    pub fenced: bool,
    /// Writers for whom a resync after an unclean stop runs, by bit.
    pub resyncing: u64,
}

impl GroupState {
    /// Before anything is known.
    #[must_use]
    pub fn new(mode: Mode, lease_period_ms: u64) -> Self {
        Self {
            committed: CountVector::new(),
            lease: Lease::new(lease_period_ms),
            mode,
            fenced: false,
            resyncing: 0,
        }
    }

    /// Whether the gate may open now.
    #[must_use]
    pub fn gate_state(&self, now: MonoNanos) -> GateState {
        if self.fenced {
            GateState::Shut(ShutWhy::Fenced)
        } else if self.resyncing != 0 {
            GateState::Shut(ShutWhy::Resyncing)
        } else if self.lease.holds(now) {
            GateState::Open
        } else {
            GateState::Shut(ShutWhy::NoLease)
        }
    }

    /// A resync of a writer has begun or ended. One that goes on keeps the gate shut for all.
    pub fn hold_for_resync(&mut self, writer: WriterId, hold: bool) {
        let bit = 1 << writer.index();
        self.resyncing = if hold { self.resyncing | bit } else { self.resyncing & !bit };
    }

    /// The backup has ended this primary's epoch: shut for good, in every mode.
    pub fn fence(&mut self) {
        self.fenced = true;
        self.lease.fence();
    }
}

/// A group's state, and how far the gate's thread has followed it.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    state: Mutex<GroupState>,
    version: AtomicU64,
    applied: AtomicU64,
    /// The gate's thread holds packets of this group: it wants to hear of a higher C.
    wants_committed: AtomicBool,
}

impl Group {
    pub(super) fn new(name: String, mode: Mode, lease_period_ms: u64) -> Self {
        Self {
            name,
            state: Mutex::new(GroupState::new(mode, lease_period_ms)),
            version: AtomicU64::new(1),
            applied: AtomicU64::new(0),
            wants_committed: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        // Nothing panics while it holds the lock, and each change is whole by itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, if it is not the one that was `seen`.
    pub(super) fn newer_than(&self, seen: u64) -> Option<(u64, GroupState)> {
        (self.version() != seen).then(|| {
            let state = self.lock();
            (self.version(), state.clone())
        })
    }

    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    pub(super) fn applied(&self, version: u64) {
        self.applied.store(version, Ordering::SeqCst);
    }

    /// Set before the thread looks at the version for the last time and sleeps; whoever raises C
    /// raises the version first and looks here next. So one of the two sees the other.
    pub(super) fn set_wants_committed(&self, wants: bool) {
        self.wants_committed.store(wants, Ordering::SeqCst);
    }
}

/// Drives the gate for one group. Cheap to clone; every call returns at once.
#[derive(Clone, Debug)]
pub struct GateHandle {
    group: Arc<Group>,
    wake: Arc<EventFd>,
}

impl GateHandle {
    pub(super) fn new(group: Arc<Group>, wake: Arc<EventFd>) -> Self {
        Self { group, wake }
    }

    /// C has risen, or an old message repeats it.
    pub fn set_committed(&self, committed: &CountVector) {
        let mut state = self.group.lock();
        if state.committed.merge(committed) {
            self.group.version.fetch_add(1, Ordering::SeqCst);
            drop(state);
            if self.group.wants_committed.load(Ordering::SeqCst) {
                self.wake();
            }
        }
    }

    /// The backup has answered the beacon that was sent at `sent_at`. Both times are those of
    /// [`crate::now`].
    pub fn lease_renewed(&self, now: MonoNanos, sent_at: MonoNanos) {
        self.change(|state| state.lease.renewed(now, sent_at));
    }

    /// The mode has changed. It is in force once [`is_applied`](Self::is_applied).
    pub fn set_mode(&self, mode: Mode) {
        self.change(|state| state.mode = mode);
    }

    /// The backup has ended this primary's epoch: the gate shuts for good, in every mode.
    pub fn fence(&self) {
        self.change(GroupState::fence);
    }

    /// A resync of a writer after an unclean stop has begun or ended: nothing leaves during it, because what
    /// clients may have been shown before the stop has no stamp.
    pub fn hold_for_resync(&self, writer: WriterId, hold: bool) {
        self.change(|state| state.hold_for_resync(writer, hold));
    }

    /// Whether the gate's thread acts on everything that was told so far.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        self.group.applied.load(Ordering::SeqCst) == self.group.version()
    }

    /// Until when the lease holds, if it ever did.
    #[must_use]
    pub fn lease_until(&self) -> Option<MonoNanos> {
        self.group.lock().lease.until()
    }

    /// The mode that was asked for last.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.group.lock().mode
    }

    /// Makes the gate's thread look at everything once.
    pub fn wake(&self) {
        self.wake.wake();
    }

    fn change(&self, change: impl FnOnce(&mut GroupState)) {
        let mut state = self.group.lock();
        change(&mut state);
        self.group.version.fetch_add(1, Ordering::SeqCst);
        drop(state);
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle() -> GateHandle {
        let group = Arc::new(Group::new("g".into(), Mode::Pipelined, 10_000));
        GateHandle::new(group, Arc::new(EventFd::new().unwrap()))
    }

    #[test]
    fn pending_only_grows() {
        let pending = Pending::new();
        pending.publish(WriterId(0), Seq(5));
        pending.publish(WriterId(0), Seq(3));
        pending.merge(&CountVector::of(WriterId(63), Seq(2)));
        let p = pending.read();
        assert_eq!((p.get(WriterId(0)), p.get(WriterId(63))), (Seq(5), Seq(2)));
    }

    #[test]
    fn a_change_is_seen_once_and_an_old_c_is_none() {
        let handle = handle();
        let (seen, _) = handle.group.newer_than(0).unwrap();
        handle.group.applied(seen);
        assert!(handle.is_applied() && handle.group.newer_than(seen).is_none());
        handle.set_committed(&CountVector::of(WriterId(0), Seq(4)));
        assert!(!handle.is_applied());
        let (seen, state) = handle.group.newer_than(seen).unwrap();
        assert_eq!(state.committed.get(WriterId(0)), Seq(4));
        handle.set_committed(&CountVector::of(WriterId(0), Seq(2)));
        assert!(handle.group.newer_than(seen).is_none());
    }

    #[test]
    fn the_last_resync_that_ends_opens_the_gate() {
        let mut state = GroupState::new(Mode::Pipelined, 10_000);
        state.lease.renewed(MonoNanos(10), MonoNanos(10));
        for writer in [WriterId(0), WriterId(63), WriterId(63)] {
            state.hold_for_resync(writer, true);
        }
        state.hold_for_resync(WriterId(63), false);
        assert_eq!(state.gate_state(MonoNanos(11)), GateState::Shut(ShutWhy::Resyncing));
        state.hold_for_resync(WriterId(0), false);
        assert_eq!(state.gate_state(MonoNanos(11)), GateState::Open);
    }

    #[test]
    fn a_fence_ends_the_lease_for_good() {
        let handle = handle();
        handle.lease_renewed(MonoNanos(10), MonoNanos(5));
        assert_eq!(handle.lease_until(), Some(MonoNanos(5).plus_ms(10_000)));
        handle.fence();
        handle.lease_renewed(MonoNanos(20), MonoNanos(20));
        assert_eq!(handle.lease_until(), None);
    }
}
