//! What the rest of the daemon shares with the gate's thread.
//!
//! [`Pending`] is written by sequencers for every write, so it is plain atomics. The group's state
//! ([`GateHandle`]) changes with acks, beacons and operators, and is read by the gate's thread only
//! after a change, so it sits behind a mutex and a version.

use crate::release_queue::{GateState, HoldReason, ShutWhy};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tidelock_planted::Bug;
use tidelock_protocol::hlc::{Hlc, WallClock};
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::lease::Lease;
use tidelock_protocol::limits::WRITERS_MAX;
use tidelock_protocol::message::Mode;
use tidelock_protocol::tag::TagTerms;
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::{CommittedCells, Mapped, PendingCells};

/// For so long the programs write and believe tags after they last heard of this process: see
/// `tidelock_protocol::tag`, "Why 32 bits are enough". A writer would need a million writes a
/// second to get 2^31 ahead in it.
const TRUST_MS: u64 = 30 * 60 * 1000;
/// For so long vectors are written and believed after this process last heard of the backup, and so of C: for the same
/// reason. A writer would need 198,000 writes a second. It is longer than the other because members of two hosts, one of
/// which is cut off from the backup, are to go on with each other.
const DEAF_MS: u64 = 3 * 60 * 60 * 1000;

/// In the place of a mark: the backup may count the member as gone. Every other mark is later.
const AWAITS_CONTACT: u64 = 1;

/// P of one member: what anything it sends may depend on (PipeCloud 3.2.2).
///
/// A sequencer publishes a write here **before** the write can be completed to the guest. The gate
/// reads P **after** it took a packet up. So the stamp of a packet that the guest sent because of
/// a completion names that write.
///
/// Where packets are tagged, the kernel programs read the same memory, and raise it by what the
/// tags of other members say.
#[derive(Debug)]
pub struct Pending {
    own: PendingCells,
    /// The kernel's map, from the gate's start on.
    mapped: OnceLock<Arc<Mapped<PendingCells>>>,
}

impl Default for Pending {
    fn default() -> Self {
        Self::new()
    }
}

impl Pending {
    /// P before any write.
    #[must_use]
    pub fn new() -> Self {
        Self { own: PendingCells::new(), mapped: OnceLock::new() }
    }

    /// Raises a writer's entry. Entries never fall.
    pub fn publish(&self, writer: WriterId, seq: Seq) {
        self.raise(|cells| &cells.entries[writer.index()], seq.0);
    }

    /// Raises a writer's entry, and the member's time to that of the write.
    pub fn publish_at(&self, writer: WriterId, seq: Seq, hlc: Hlc) {
        self.publish(writer, seq);
        self.raise(|cells| &cells.hlc, hlc.0);
    }

    /// Raises every entry to that of `other`: what another member told this one.
    pub fn merge(&self, other: &CountVector) {
        for (writer, seq) in other.entries() {
            self.publish(writer, seq);
        }
    }

    /// From now on the guest may know what this P does not name: nothing of the member leaves, and
    /// nothing goes to another member, before it is complete again.
    /// [`GateHandle::mark_incomplete`] also tells the gate's thread.
    pub fn mark_incomplete(&self, now: MonoNanos) {
        if tidelock_planted::is(Bug::FloorNotAwaited) {
            return;
        }
        // The clock never steps: a later mark is another one.
        self.raise(|cells| &cells.incomplete, now.0.max(AWAITS_CONTACT + 1));
    }

    /// Whether, and since what mark, the guest may know what this P does not name.
    #[must_use]
    pub fn incomplete(&self) -> Option<u64> {
        Some(self.cells().incomplete.load(Ordering::SeqCst)).filter(|mark| *mark > AWAITS_CONTACT)
    }

    /// The member's run before may have left with everything at the backup, which asks it for nothing then. Nothing goes to
    /// another member before it knows that the member is here again ([`has_contact`](Self::has_contact)): what it tells
    /// would be missed. To clients nothing leaves without a lease.
    pub fn await_contact(&self) {
        self.raise(|cells| &cells.incomplete, AWAITS_CONTACT);
    }

    /// The backup knows.
    pub fn has_contact(&self) {
        self.complete(AWAITS_CONTACT);
    }

    /// Whether the programs hand nothing of the member to others.
    #[must_use]
    pub fn is_kept_from_others(&self) -> bool {
        self.cells().incomplete.load(Ordering::SeqCst) != 0
    }

    /// P names all that the guest knew at the moment of this mark, and there was no later one.
    pub fn complete(&self, mark: u64) -> bool {
        let cell = &self.cells().incomplete;
        cell.compare_exchange(mark, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// P now. One reader sees every entry only ever grow.
    #[must_use]
    pub fn read(&self) -> CountVector {
        let mut p = CountVector::new();
        self.read_into(&mut p);
        p
    }

    /// The greatest time of anything that this member may depend on.
    #[must_use]
    pub fn read_hlc(&self) -> Hlc {
        Hlc(self.cells().hlc.load(Ordering::SeqCst))
    }

    /// Raises `p` to P.
    pub(super) fn read_into(&self, p: &mut CountVector) {
        for (writer, entry) in (0..WRITERS_MAX).zip(&self.cells().entries) {
            p.raise(WriterId(writer), Seq(entry.load(Ordering::SeqCst)));
        }
    }

    /// From now on P is in the kernel's map, raised by what it was here. Nothing is lost that is
    /// published meanwhile: whoever writes to the old place looks afterwards whether it still is
    /// the place, and this looks at the old place after it has said that it is not.
    pub(super) fn move_to(&self, mapped: Arc<Mapped<PendingCells>>) {
        let mapped = self.mapped.get_or_init(|| mapped);
        fence(Ordering::SeqCst);
        for (to, from) in mapped.entries.iter().zip(&self.own.entries) {
            to.fetch_max(from.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        mapped.hlc.fetch_max(self.own.hlc.load(Ordering::SeqCst), Ordering::SeqCst);
        mapped.incomplete.fetch_max(self.own.incomplete.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// The memory. Kernel programs are given the same.
    #[must_use]
    pub fn cells(&self) -> &PendingCells {
        self.mapped.get().map_or(&self.own, |mapped| mapped)
    }

    fn raise(&self, cell: impl Fn(&PendingCells) -> &AtomicU64, to: u64) {
        if let Some(mapped) = self.mapped.get() {
            cell(mapped).fetch_max(to, Ordering::SeqCst);
            return;
        }
        cell(&self.own).fetch_max(to, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if let Some(mapped) = self.mapped.get() {
            cell(mapped).fetch_max(to, Ordering::SeqCst);
        }
    }
}

/// What decides about a group's packets.
#[derive(Clone, Debug)]
pub struct GroupState {
    /// C.
    pub committed: CountVector,
    /// What every writer has committed, by time.
    pub watermark: Hlc,
    /// When the backup was last heard of, once it has told C.
    pub heard_at: Option<MonoNanos>,
    /// The lease.
    pub lease: Lease,
    /// The mode.
    pub mode: Mode,
    /// The backup has ended this primary's epoch.
    pub fenced: bool,
    /// Writers for whose sake nothing leaves, a bit each; indexed by [`HoldReason`].
    pub holds: [u64; HoldReason::ALL.len()],
}

impl GroupState {
    /// Before anything is known.
    #[must_use]
    pub fn new(mode: Mode, lease_period_ms: u64) -> Self {
        Self {
            committed: CountVector::new(),
            watermark: Hlc::default(),
            heard_at: None,
            lease: Lease::new(lease_period_ms),
            mode,
            fenced: false,
            holds: [0; HoldReason::ALL.len()],
        }
    }

    /// Whether the gate may open now.
    #[must_use]
    pub fn gate_state(&self, now: MonoNanos) -> GateState {
        if self.fenced {
            GateState::Shut(ShutWhy::Fenced)
        } else if let Some(reason) = self.held() {
            GateState::Shut(ShutWhy::Held(reason))
        } else if self.lease.holds(now) {
            GateState::Open
        } else {
            GateState::Shut(ShutWhy::NoLease)
        }
    }

    /// Until when, on the clock of [`crate::now`], a covered packet may leave; 0: the gate is shut.
    fn open_until(&self) -> u64 {
        match (self.fenced, self.mode, self.held().is_some(), self.lease.until()) {
            (true, ..) => 0,
            (false, Mode::Async, ..) => u64::MAX,
            (false, _, false, Some(until)) => until.0,
            _ => 0,
        }
    }

    /// The reason for which nothing leaves, if there is one.
    fn held(&self) -> Option<HoldReason> {
        HoldReason::ALL.into_iter().find(|reason| self.holds[*reason as usize] != 0)
    }

    /// The reason begins, or ends, to hold for a writer. One that goes on keeps the gate shut for all.
    pub fn hold(&mut self, writer: WriterId, reason: HoldReason, hold: bool) {
        let (bit, writers) = (1 << writer.index(), &mut self.holds[reason as usize]);
        *writers = if hold { *writers | bit } else { *writers & !bit };
    }

    /// The backup has ended this primary's epoch: shut for good, in every mode.
    pub fn fence(&mut self) {
        self.fenced = true;
        self.lease.fence();
    }
}

/// The clocks of the host, and the way to wake whoever calls [`GroupGate::follow`](super::GroupGate::follow).
pub trait Surroundings: fmt::Debug + Send + Sync {
    /// The clock that never steps, as [`crate::now`].
    fn now(&self) -> MonoNanos;
    /// The wall clock, in milliseconds since the Unix epoch; it may step.
    fn wall_ms(&self) -> u64;
    /// Something has changed.
    fn wake(&self);
}

/// The kernel programs of a group, and what they are told of its state.
#[derive(Debug)]
pub struct ToldPrograms {
    cells: Arc<Mapped<CommittedCells>>,
    /// Theirs is the clock that records' times come from: one that jumps is not believed.
    wall: Mutex<WallClock>,
    /// Tags have the low bits of counts: they mean nothing to who has not heard C for too long.
    is_vector: bool,
}

impl ToldPrograms {
    /// `jump_max_ms`: by so much the wall clock may jump and be believed. `is_vector`: the form of the tags.
    #[must_use]
    pub fn new(cells: Arc<Mapped<CommittedCells>>, jump_max_ms: u64, is_vector: bool) -> Self {
        Self { cells, wall: Mutex::new(WallClock::new(jump_max_ms)), is_vector }
    }

    /// Tells the programs of the state. The caller holds its lock, after every change. `has_ended`: nobody calls the
    /// gate any more.
    fn tell(&self, state: &GroupState, has_ended: bool, (now, wall_ms): (MonoNanos, u64)) {
        let cells = &self.cells;
        for (writer, seq) in state.committed.entries() {
            cells.entries[writer.index()].fetch_max(seq.0, Ordering::SeqCst);
        }
        cells.watermark.fetch_max(state.watermark.0, Ordering::SeqCst);
        let open_until = if has_ended { 0 } else { state.open_until() };
        let is_async = u64::from(state.mode == Mode::Async);
        // No moment of this order lets out more than the old state or the new one.
        if is_async == 0 {
            cells.open_until.store(open_until, Ordering::SeqCst);
            cells.is_async.store(is_async, Ordering::SeqCst);
        } else {
            cells.is_async.store(is_async, Ordering::SeqCst);
            cells.open_until.store(open_until, Ordering::SeqCst);
        }
        let mut wall = self.wall.lock().unwrap_or_else(PoisonError::into_inner);
        cells.wall_minus_boot.store(wall_minus_boot(&mut wall, wall_ms, now), Ordering::SeqCst);
        if let Some(heard_at) = state.heard_at.filter(|_| !has_ended) {
            let until = trusted_until(self.is_vector, heard_at, now);
            cells.trusted_until.store(until, Ordering::SeqCst);
        }
    }
}

/// Until when tags are written and believed.
fn trusted_until(is_vector: bool, heard_at: MonoNanos, now: MonoNanos) -> u64 {
    let until = now.plus_ms(TRUST_MS).0;
    if is_vector { until.min(heard_at.plus_ms(DEAF_MS).0) } else { until }
}

/// What turns the clock that never steps into the wall clock that is believed, in nanoseconds.
fn wall_minus_boot(wall: &mut WallClock, wall_ms: u64, now: MonoNanos) -> u64 {
    (wall.read(wall_ms, now) * 1_000_000).wrapping_sub(now.0)
}

/// A group's state, and how far the gate's thread has followed it.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    state: Mutex<GroupState>,
    version: AtomicU64,
    /// The version of the last change that the thread was woken for. Of a higher C alone it may not hear for long.
    due: AtomicU64,
    applied: AtomicU64,
    /// The gate's thread holds packets of this group: it wants to hear of a higher C.
    wants_committed: AtomicBool,
    /// The kernel programs, where there are any.
    programs: Option<ToldPrograms>,
    /// P of the members here that depend on other members of the group, on whatever host.
    dependent: Mutex<Vec<Arc<Pending>>>,
    /// The gate's thread has ended: the programs let nothing out any more.
    ended: AtomicBool,
    around: Arc<dyn Surroundings>,
}

impl Group {
    pub(super) fn new(
        name: String,
        mode: Mode,
        lease_period_ms: u64,
        programs: Option<ToldPrograms>,
        around: Arc<dyn Surroundings>,
    ) -> Self {
        let group = Self {
            name,
            state: Mutex::new(GroupState::new(mode, lease_period_ms)),
            version: AtomicU64::new(1),
            due: AtomicU64::new(1),
            applied: AtomicU64::new(0),
            wants_committed: AtomicBool::new(false),
            programs,
            dependent: Mutex::default(),
            ended: AtomicBool::new(false),
            around,
        };
        group.tell_programs(&group.lock());
        group
    }

    /// Called with the state's lock held, after every change: what the programs know is then as
    /// new as what the gate's thread will read.
    fn tell_programs(&self, state: &GroupState) {
        let Some(programs) = &self.programs else { return };
        let ended = self.ended.load(Ordering::SeqCst);
        programs.tell(state, ended, (self.now(), self.around.wall_ms()));
    }

    /// The member whose P this is has others to hear of. `is_known`: it was seen what its guest has
    /// heard since the beginning, and this P names it.
    pub(super) fn depends_on_others(&self, pending: &Arc<Pending>, is_known: bool) {
        let state = self.lock();
        if !is_known || state.mode == Mode::Async || pending.incomplete().is_some() {
            pending.mark_incomplete(self.now());
        }
        self.dependent.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(pending));
    }

    /// Gives the programs the keys that seal tags, and the greatest entry that they believe of each writer.
    fn set_tag_terms(&self, terms: &TagTerms) {
        if let Some(programs) = &self.programs {
            // One after the other, if several members are told at once.
            let _state = self.lock();
            programs.cells.set_tag_terms(terms);
        }
    }

    /// Whether the kernel programs drop what they would leave to the packet filter's rules.
    pub(super) fn rules_are_gone(&self, gone: bool) {
        if let Some(programs) = &self.programs {
            programs.cells.rules_gone.store(gone.into(), Ordering::SeqCst);
        }
    }

    /// Whether kernel programs want to hear from this process from time to time.
    pub(super) fn has_programs(&self) -> bool {
        self.programs.is_some()
    }

    /// Lets the programs know that this process lives, and how its clocks stand.
    pub(super) fn refresh_programs(&self) {
        self.tell_programs(&self.lock());
    }

    /// Shuts the way past the queue for good.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.tell_programs(&self.lock());
    }

    /// The mode that was asked for last.
    pub(super) fn mode(&self) -> Mode {
        self.lock().mode
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

    pub(super) fn now(&self) -> MonoNanos {
        self.around.now()
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
}

impl GateHandle {
    pub(super) fn new(group: Arc<Group>) -> Self {
        Self { group }
    }

    pub(super) fn rules_are_gone(&self, gone: bool) {
        self.group.rules_are_gone(gone);
    }

    /// Takes the keys that seal the group's tags and the greatest seq that each writer can have, both as the backup told
    /// them. Until the first call the programs write no tags and believe none.
    pub fn set_tag_terms(&self, terms: &TagTerms) {
        self.group.set_tag_terms(terms);
    }

    /// C has risen, or an old message repeats it.
    pub fn set_committed(&self, committed: &CountVector) {
        self.more_is_committed(|state| state.committed.merge(committed));
    }

    /// Every writer of the group has committed everything up to this time. It has risen, or an old
    /// message repeats it.
    pub fn set_watermark(&self, watermark: Hlc) {
        self.more_is_committed(|state| {
            let rose = state.watermark < watermark;
            state.watermark = state.watermark.max(watermark);
            rose
        });
    }

    /// `raise` says whether anything rose.
    fn more_is_committed(&self, raise: impl FnOnce(&mut GroupState) -> bool) {
        let mut state = self.group.lock();
        let first = state.heard_at.replace(self.group.now()).is_none();
        if raise(&mut state) || first {
            self.group.version.fetch_add(1, Ordering::SeqCst);
            self.group.tell_programs(&state);
            drop(state);
            if self.group.wants_committed.load(Ordering::SeqCst) {
                self.group.around.wake();
            }
        }
    }

    /// The backup has answered the beacon that was sent at `sent_at`, by the clock of [`Surroundings::now`].
    pub fn lease_renewed(&self, sent_at: MonoNanos) {
        let now = self.group.now();
        self.change(|state| {
            // Before C was told nothing is known of it.
            state.heard_at = state.heard_at.map(|at| at.max(now));
            state.lease.renewed(now, sent_at);
        });
    }

    /// This host was paused, and its clock stood still: the lease is over until a beacon that is sent from now on is
    /// answered. Both times are those of [`crate::now`].
    pub fn drop_lease(&self, now: MonoNanos) {
        self.change(|state| state.lease.drop_at(now));
    }

    /// The mode has changed. It is in force once [`is_applied`](Self::is_applied).
    ///
    /// In mode async a packet may reach another member without a tag, or by way of a client. So from its
    /// beginning on no P of a member that hears others is complete, and after its end such a member
    /// is held until it is ([`complete`](Self::complete)).
    pub fn set_mode(&self, mode: Mode) {
        self.change(|state| {
            if mode == Mode::Async {
                let dependent = self.group.dependent.lock();
                for pending in dependent.unwrap_or_else(PoisonError::into_inner).iter() {
                    pending.mark_incomplete(self.group.now());
                }
            }
            state.mode = mode;
        });
    }

    /// A member without kernel programs that has others to hear of: nothing of it leaves before its
    /// P is complete. To be called before the first lease.
    pub fn depends_on_others(&self, pending: &Arc<Pending>) {
        self.group.depends_on_others(pending, false);
        self.look_again();
    }

    /// The guest may know what P does not name: it was not seen what it has heard.
    pub fn mark_incomplete(&self, pending: &Pending) {
        pending.mark_incomplete(self.group.now());
        self.look_again();
    }

    /// The gate's thread looks at everything anew.
    pub fn look_again(&self) {
        self.change(|_| {});
    }

    /// What the member needs to hear of the others' writes before anything of it may leave, by the
    /// mark of that. In mode async nothing waits for it, and it would be old when the mode ends.
    #[must_use]
    pub fn awaits_floor(&self, pending: &Pending) -> Option<u64> {
        let state = self.group.lock();
        pending.incomplete().filter(|_| state.mode != Mode::Async)
    }

    /// P was raised to all that any writer had admitted at a moment after the mark.
    pub fn complete(&self, pending: &Pending, mark: u64) {
        self.change(|state| {
            if state.mode != Mode::Async {
                pending.complete(mark);
            }
        });
    }

    /// The backup has ended this primary's epoch: the gate shuts for good, in every mode.
    pub fn fence(&self) {
        self.change(GroupState::fence);
    }

    /// Nothing leaves, whatever C covers, while a reason holds for any writer.
    pub fn hold(&self, writer: WriterId, reason: HoldReason, hold: bool) {
        self.change(|state| state.hold(writer, reason, hold));
    }

    /// Whether the gate's thread acts on everything that was told so far, but for a higher C: of that it hears at once only
    /// while it holds packets.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        self.group.applied.load(Ordering::SeqCst) >= self.group.due.load(Ordering::SeqCst)
    }

    /// Whether a covered packet may leave at this time, whatever the mode is and what single members wait for.
    #[must_use]
    pub fn state(&self, now: MonoNanos) -> GateState {
        self.group.lock().gate_state(now)
    }

    /// Until when the lease holds, if it ever did.
    #[must_use]
    pub fn lease_until(&self) -> Option<MonoNanos> {
        self.group.lock().lease.until()
    }

    /// C and the watermark as they were told.
    #[must_use]
    pub fn committed(&self) -> (CountVector, Hlc) {
        let state = self.group.lock();
        (state.committed.clone(), state.watermark)
    }

    /// The mode that was asked for last.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.group.lock().mode
    }

    fn change(&self, change: impl FnOnce(&mut GroupState)) {
        let mut state = self.group.lock();
        change(&mut state);
        let version = self.group.version.fetch_add(1, Ordering::SeqCst) + 1;
        self.group.due.store(version, Ordering::SeqCst);
        self.group.tell_programs(&state);
        drop(state);
        self.group.around.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that shows another time whenever it is looked at.
    #[derive(Debug)]
    struct Ticking(AtomicU64);

    impl Surroundings for Ticking {
        fn now(&self) -> MonoNanos {
            MonoNanos(self.0.fetch_add(1, Ordering::SeqCst))
        }

        fn wall_ms(&self) -> u64 {
            0
        }

        fn wake(&self) {}
    }

    fn handle() -> GateHandle {
        let around = Arc::new(Ticking(AtomicU64::new(30)));
        GateHandle::new(Arc::new(Group::new("g".into(), Mode::Pipelined, 10_000, None, around)))
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

    /// The process lives and says so, but whoever writes most could be 2^31 writes ahead of the C that is known here.
    #[test]
    fn vectors_are_believed_for_a_time_without_word_of_the_backup() {
        let heard_at = MonoNanos(5);
        for (is_vector, after_ms, more_ms) in [
            (true, 0, TRUST_MS),
            (true, DEAF_MS - 1000, 1000),
            (false, DEAF_MS - 1000, TRUST_MS),
            (false, 10 * DEAF_MS, TRUST_MS),
        ] {
            let now = heard_at.plus_ms(after_ms);
            assert_eq!(trusted_until(is_vector, heard_at, now), now.plus_ms(more_ms).0);
        }
        let late = heard_at.plus_ms(DEAF_MS + 1);
        assert!(trusted_until(true, heard_at, late) < late.0);
    }

    #[test]
    fn who_is_kept_from_others_until_contact_may_know_more_all_the_same() {
        let pending = Pending::new();
        pending.await_contact();
        assert!(pending.is_kept_from_others() && pending.incomplete().is_none());
        pending.has_contact();
        assert!(!pending.is_kept_from_others());
        // The later mark is another matter, and so is one that was there before.
        for marks in [[true, false], [false, true]] {
            let pending = Pending::new();
            for is_mark in marks {
                match is_mark {
                    true => pending.mark_incomplete(MonoNanos(0)),
                    false => pending.await_contact(),
                }
            }
            pending.has_contact();
            let mark = pending.incomplete().expect("still");
            assert!(pending.is_kept_from_others() && pending.complete(mark));
        }
    }

    #[test]
    fn programs_are_told_a_wall_clock_that_follows_no_jump() {
        let mut wall = WallClock::new(1000);
        let mut told = |wall_ms: u64, boot_ms: u64| {
            let now = MonoNanos(boot_ms * 1_000_000);
            wall_minus_boot(&mut wall, wall_ms, now).wrapping_add(now.0) / 1_000_000
        };
        assert_eq!(told(1_000_000, 5), 1_000_000);
        assert_eq!(told(1_000_110, 105), 1_000_110, "a correction");
        assert_eq!(told(400_000, 205), 1_000_210, "a step back");
        assert_eq!(told(9_000_000, 305), 1_000_310, "a step ahead");
        assert_eq!(told(1_000_400, 405), 1_000_400);
    }

    #[test]
    fn a_p_is_complete_once_it_was_raised_after_its_last_mark_and_outside_of_async() {
        let (handle, pending) = (handle(), Arc::new(Pending::new()));
        assert_eq!(handle.awaits_floor(&pending), None, "alone");
        handle.depends_on_others(&pending);
        let first = handle.awaits_floor(&pending).expect("new");
        handle.set_mode(Mode::Async);
        assert_eq!(handle.awaits_floor(&pending), None);
        handle.complete(&pending, pending.incomplete().unwrap());
        assert!(pending.incomplete().is_some(), "in async it is old when it comes");
        handle.set_mode(Mode::Pipelined);
        handle.complete(&pending, first);
        let second = handle.awaits_floor(&pending).expect("the answer to an older question");
        assert!(second > first);
        handle.complete(&pending, second);
        assert_eq!(pending.incomplete(), None);
    }

    #[test]
    fn the_watermark_and_the_time_of_p_only_grow() {
        let (handle, pending) = (handle(), Pending::new());
        for hlc in [7, 5] {
            handle.set_watermark(Hlc(hlc));
            pending.publish_at(WriterId(1), Seq(hlc), Hlc(hlc));
        }
        assert_eq!(handle.group.newer_than(0).unwrap().1.watermark, Hlc(7));
        assert_eq!((pending.read_hlc(), pending.read().get(WriterId(1))), (Hlc(7), Seq(7)));
    }

    #[test]
    fn covered_packets_leave_while_the_lease_holds_and_in_async_always() {
        let mut state = GroupState::new(Mode::Pipelined, 10_000);
        assert_eq!(state.open_until(), 0);
        state.lease.renewed(MonoNanos(10), MonoNanos(10));
        assert_eq!(state.open_until(), MonoNanos(10).plus_ms(10_000).0);
        state.hold(WriterId(0), HoldReason::Gap, true);
        assert_eq!(state.open_until(), 0);
        state.mode = Mode::Async;
        assert_eq!(state.open_until(), u64::MAX);
        state.fence();
        assert_eq!(state.open_until(), 0);
    }

    #[test]
    fn a_change_is_seen_once_and_an_old_c_is_none() {
        let handle = handle();
        let (seen, _) = handle.group.newer_than(0).unwrap();
        handle.group.applied(seen);
        assert!(handle.is_applied() && handle.group.newer_than(seen).is_none());
        handle.set_committed(&CountVector::of(WriterId(0), Seq(4)));
        let (seen, state) = handle.group.newer_than(seen).unwrap();
        assert_eq!(state.committed.get(WriterId(0)), Seq(4));
        handle.set_committed(&CountVector::of(WriterId(0), Seq(2)));
        assert!(handle.group.newer_than(seen).is_none());
    }

    #[test]
    fn a_higher_c_that_nobody_is_woken_for_keeps_no_change_from_being_applied() {
        let handle = handle();
        handle.fence();
        assert!(!handle.is_applied());
        let (seen, state) = handle.group.newer_than(0).unwrap();
        assert!(state.fenced);
        // Between what the thread has read and what it says of it, and after that.
        handle.set_committed(&CountVector::of(WriterId(0), Seq(4)));
        assert!(!handle.is_applied());
        handle.group.applied(seen);
        assert!(handle.is_applied());
        handle.set_committed(&CountVector::of(WriterId(0), Seq(5)));
        assert!(handle.is_applied());
        handle.hold(WriterId(0), HoldReason::Gap, true);
        assert!(!handle.is_applied());
    }

    #[test]
    fn the_last_hold_that_ends_opens_the_gate() {
        let mut state = GroupState::new(Mode::Pipelined, 10_000);
        state.lease.renewed(MonoNanos(10), MonoNanos(10));
        let shut = |reason| GateState::Shut(ShutWhy::Held(reason));
        for writer in [WriterId(0), WriterId(63), WriterId(63)] {
            state.hold(writer, HoldReason::Gap, true);
        }
        state.hold(WriterId(0), HoldReason::LeftBacklog, true);
        state.hold(WriterId(63), HoldReason::Gap, false);
        assert_eq!(state.gate_state(MonoNanos(11)), shut(HoldReason::Gap));
        state.hold(WriterId(0), HoldReason::Gap, false);
        assert_eq!(state.gate_state(MonoNanos(11)), shut(HoldReason::LeftBacklog));
        assert_eq!(state.open_until(), 0);
        state.hold(WriterId(0), HoldReason::LeftBacklog, false);
        assert_eq!(state.gate_state(MonoNanos(11)), GateState::Open);
    }

    #[test]
    fn a_host_that_was_paused_has_no_lease_until_a_new_beacon_is_answered() {
        let handle = handle();
        handle.lease_renewed(MonoNanos(5));
        handle.drop_lease(MonoNanos(20));
        assert_eq!(handle.lease_until(), None);
        handle.lease_renewed(MonoNanos(19));
        assert_eq!(handle.lease_until(), None, "it was sent before the pause");
        handle.lease_renewed(MonoNanos(20));
        assert_eq!(handle.lease_until(), Some(MonoNanos(20).plus_ms(10_000)));
    }

    #[test]
    fn a_fence_ends_the_lease_for_good() {
        let handle = handle();
        handle.lease_renewed(MonoNanos(5));
        assert_eq!(handle.lease_until(), Some(MonoNanos(5).plus_ms(10_000)));
        handle.fence();
        handle.lease_renewed(MonoNanos(20));
        assert_eq!(handle.lease_until(), None);
    }
}
