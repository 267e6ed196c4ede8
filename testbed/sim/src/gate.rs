//! The gate of one member: production's release queue and its decision whether to open, with a
//! kernel queue in front and the checkers of rules 1 and 4 behind.

use crate::failure::{Checked, Checker, check};
use crate::guest::{Known, Packet, learn};
use crate::host::CLOCK_LEAD_MS;
use crate::world::{Run, World, note};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tidelock_daemon::link::GateControl;
use tidelock_daemon::owner::Clocks;
use tidelock_netfilter::gate::{Briefing, GroupState, Pending};
use tidelock_netfilter::release_queue::{
    Arrival, GateState, Kind, Packet as Queued, PacketId, ShutWhy,
};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{Form, Mode};
use tidelock_protocol::tag::TagTerms;
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::CommittedCells;

/// What the link tells the gate of a group on one host. Production's handle keeps the same state
/// behind the same kind of lock.
#[derive(Debug)]
pub struct SimGate {
    state: Mutex<GroupState>,
    now: AtomicU64,
    wall_ms: AtomicU64,
    /// C as the kernel programs see it, which outlive the daemon, and production's way to tell them.
    cells: CommittedCells,
    briefing: Briefing,
    /// Number of the daemon's run, as the programs know it: the time at which it began.
    run: OnceLock<u64>,
    /// Members whose gate's thread must look, by bit.
    dirty: AtomicU64,
    members: u64,
    /// Members whose gate's thread has not looked since the last change, by bit.
    unseen: AtomicU64,
    /// Keys and limits for tags, as the backup told them last: for a member that lies.
    tag_terms: Mutex<Option<TagTerms>>,
    /// For the checker: when the last beacon that was answered had been sent.
    answered: AtomicU64,
    /// P of the members here that have others to hear of.
    dependent: Mutex<Vec<Arc<Pending>>>,
    /// Planted: after mode async, or a start, nobody waits until it is known what guests have heard.
    never_awaits: bool,
}

impl SimGate {
    /// A shut gate for these VMs.
    #[must_use]
    pub fn new(mode: Mode, lease_ms: u64, vms: &[usize]) -> Self {
        Self {
            state: Mutex::new(GroupState::new(mode, lease_ms)),
            now: AtomicU64::new(0),
            wall_ms: AtomicU64::new(0),
            cells: CommittedCells::new(),
            // A seed is over long before the form makes a difference.
            briefing: Briefing::new(CLOCK_LEAD_MS, true),
            run: OnceLock::new(),
            dirty: AtomicU64::new(0),
            unseen: AtomicU64::new(0),
            members: vms.iter().map(|vm| 1 << vm).sum(),
            tag_terms: Mutex::default(),
            answered: AtomicU64::new(0),
            dependent: Mutex::default(),
            never_awaits: false,
        }
    }

    /// Plants that nobody waits until it is known what guests have heard.
    pub fn plant_never_awaits(&mut self) {
        self.never_awaits = true;
    }

    /// A member that has others to hear of. `is_known`: its P outlived the last daemon.
    pub fn depends_on_others(&self, pending: &Arc<Pending>, is_known: bool) {
        let mode = self.lock().mode;
        if !is_known || mode == Mode::Async || pending.incomplete().is_some() {
            pending.mark_incomplete(self.now());
        }
        pending.cells().run.store(self.run(), SeqCst);
        self.dependent.lock().expect("one thread").push(pending.clone());
        self.set_mode(mode);
    }

    fn now(&self) -> MonoNanos {
        // A mark of 0 is none.
        MonoNanos(self.now.load(Relaxed).max(1))
    }

    /// The host's clocks, for what the link tells next.
    pub fn set_clocks(&self, Clocks { now, wall_ms }: Clocks) {
        self.run.get_or_init(|| now.0);
        self.now.store(now.0, Relaxed);
        self.wall_ms.store(wall_ms, Relaxed);
        self.tell_programs(&self.lock());
    }

    /// Number of the daemon's run: members whose programs have the same one raise each other's P without a tag.
    #[must_use]
    pub fn run(&self) -> u64 {
        *self.run.get().expect("clocks were set before members came")
    }

    /// C as the kernel programs see it.
    #[must_use]
    pub fn cells(&self) -> &CommittedCells {
        &self.cells
    }

    fn tell_programs(&self, state: &GroupState) {
        let clocks = (self.now(), self.wall_ms.load(Relaxed));
        self.briefing.tell(&self.cells, state, false, clocks);
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().expect("one thread")
    }

    fn change(&self, change: impl FnOnce(&mut GroupState)) {
        let mut state = self.lock();
        change(&mut state);
        self.tell_programs(&state);
        drop(state);
        self.dirty.fetch_or(self.members, Relaxed);
        self.unseen.fetch_or(self.members, Relaxed);
    }

    /// Whether something has changed since the last time.
    pub fn take_dirty(&self, vm: usize) -> bool {
        self.dirty.fetch_and(!(1 << vm), Relaxed) & 1 << vm != 0
    }

    /// Whether something has changed that its thread has not seen.
    #[must_use]
    pub fn is_dirty(&self, vm: usize) -> bool {
        self.dirty.load(Relaxed) & 1 << vm != 0
    }

    /// The operator changes the mode.
    pub fn set_mode(&self, mode: Mode) {
        for pending in self.dependent.lock().expect("one thread").iter() {
            if mode == Mode::Async {
                pending.mark_incomplete(self.now());
            } else if let Some(mark) = pending.incomplete().filter(|_| self.never_awaits) {
                pending.complete(mark);
            }
        }
        self.change(|state| state.mode = mode);
    }

    /// Whether the gate's threads of all members have seen the last change.
    #[must_use]
    pub fn is_applied(&self) -> bool {
        self.unseen.load(Relaxed) == 0
    }

    /// The lease is given up: shut for good.
    pub fn shut(&self) {
        self.change(GroupState::fence);
    }

    /// Whether nothing is held.
    #[must_use]
    pub fn is_async(&self) -> bool {
        self.lock().mode == Mode::Async
    }

    /// When the last beacon that was answered had been sent, if there was one.
    #[must_use]
    pub fn answered_at(&self) -> Option<MonoNanos> {
        Some(MonoNanos(self.answered.load(Relaxed))).filter(|at| at.0 > 0)
    }

    /// A copy of the state.
    #[must_use]
    pub fn state(&self) -> GroupState {
        self.lock().clone()
    }

    /// Keys and limits for tags, as the backup told them last.
    #[must_use]
    pub fn tag_terms(&self) -> Option<TagTerms> {
        self.tag_terms.lock().expect("no panic while held").clone()
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self, now: MonoNanos) -> bool {
        self.lock().gate_state(now) == GateState::Open
    }

    /// For the checker: the end of the lease by its definition.
    #[must_use]
    pub fn lease_end(&self, lease_ms: u64) -> Option<MonoNanos> {
        self.answered_at().map(|sent_at| sent_at.plus_ms(lease_ms))
    }
}

/// The gate as one member's half of the link tells it.
#[derive(Clone, Debug)]
pub struct MemberGate {
    /// The gate.
    pub gate: Arc<SimGate>,
    /// The member, if it is a writer.
    pub writer: Option<WriterId>,
    /// Its P.
    pub pending: Arc<Pending>,
}

impl GateControl for MemberGate {
    fn committed(&self, committed: &CountVector) {
        let now = self.gate.now();
        self.gate.change(|state| {
            state.heard_at = Some(now);
            state.committed.merge(committed);
        });
    }

    fn tag_terms(&self, terms: &TagTerms) {
        self.gate.cells.set_tag_terms(terms);
        *self.gate.tag_terms.lock().expect("no panic while held") = Some(terms.clone());
    }

    fn lease_renewed(&self, sent_at: MonoNanos) {
        self.gate.answered.fetch_max(sent_at.0, Relaxed);
        let now = self.gate.now();
        self.gate.change(|state| {
            state.heard_at = state.heard_at.map(|at| at.max(now));
            state.lease.renewed(now, sent_at);
        });
    }

    fn fence(&self) {
        self.gate.change(GroupState::fence);
    }

    fn is_applied(&self) -> bool {
        self.gate.is_applied()
    }

    fn hold_for_resync(&self, hold: bool) {
        if let Some(writer) = self.writer {
            self.gate.change(|state| state.hold_for_resync(writer, hold));
        }
    }

    fn hold_unrecorded(&self, hold: bool) {
        if let Some(writer) = self.writer {
            self.gate.change(|state| state.hold_unrecorded(writer, hold));
        }
    }

    fn watermark(&self, watermark: Hlc) {
        let now = self.gate.now();
        self.gate.change(|state| {
            state.heard_at = Some(now);
            state.watermark = state.watermark.max(watermark);
        });
    }

    fn awaits_floor(&self) -> Option<u64> {
        self.pending.incomplete().filter(|_| !self.gate.is_async())
    }

    fn mark_incomplete(&self) {
        if !self.gate.never_awaits {
            self.pending.mark_incomplete(self.gate.now());
        }
        self.gate.change(|_| {});
    }

    fn floor(&self, mark: u64, pending: &CountVector, hlc: Hlc) {
        self.pending.merge(pending);
        self.pending.publish_at(WriterId(0), Seq::ZERO, hlc);
        self.gate.change(|state| {
            if state.mode != Mode::Async {
                self.pending.complete(mark);
            }
        });
    }

    fn pending(&self) -> (CountVector, Hlc) {
        (self.pending.read(), self.pending.read_hlc())
    }
}

impl World {
    /// The gate's thread was woken.
    pub fn gate_event(&mut self, vm: usize, run: Run) -> Checked {
        match &mut self.vms[vm].run {
            Some(member) if member.run == run => member.gate_due = false,
            _ => return Ok(()),
        }
        self.gate_turn(vm)
    }

    /// One turn of the gate's thread: follow what has changed, take packets up, and only then read
    /// P for them.
    pub fn gate_turn(&mut self, vm: usize) -> Checked {
        let now = self.host_now(self.plan.vms[vm].host);
        let group = &self.plan.groups[self.plan.vms[vm].group];
        let by_time = group.has_several() && group.form == Form::Hlc;
        self.notice_question(vm);
        self.notice_lease(vm);
        let Some(run) = &mut self.vms[vm].run else { return Ok(()) };
        let state = run.gate.state();
        run.gate.unseen.fetch_and(!(1 << vm), Relaxed);
        let was = std::mem::replace(&mut run.is_incomplete, run.pending.incomplete().is_some());
        if was && !run.is_incomplete {
            self.counts.floors += 1;
            self.is_answered(vm);
        }
        let run = self.vms[vm].run.as_mut().expect("just seen");
        match (was, run.is_incomplete) {
            (true, false) if by_time => run.queue.restamp_at(run.pending.read_hlc()),
            (true, false) => run.queue.restamp(&run.pending.read()),
            _ => {}
        }
        run.queue.set_committed(&state.committed);
        run.queue.set_watermark(state.watermark);
        run.queue.set_mode(state.mode);
        run.queue.set_gate(match state.gate_state(now) {
            GateState::Open if run.is_incomplete => GateState::Shut(ShutWhy::FloorUnknown),
            state => state,
        });
        let mut left = Vec::new();
        let mut ids = Vec::new();
        let up_to = run.queue.release(now, |packet| ids.push(packet.id));
        debug_assert_eq!(up_to, ids.last().copied());
        for id in ids {
            left.push(run.held.remove(&id.0).expect("a packet that was held"));
        }
        let taken: Vec<_> = run.kernel_queue.drain(..).collect();
        run.stamp.merge(&run.pending.read());
        let time = run.pending.read_hlc();
        for packet in taken {
            run.next_packet = run.next_packet.wrapping_add(1);
            let id = PacketId(run.next_packet);
            let queued = Queued { id, kind: packet.kind, len_bytes: 100 };
            let arrival = if by_time {
                run.queue.arrive_at(queued, time, now)
            } else {
                run.queue.arrive(queued, &run.stamp, now)
            };
            match arrival {
                Arrival::Pass(_) => left.push(packet),
                Arrival::Held => {
                    run.held.insert(id.0, packet);
                }
                Arrival::Refused => {}
            }
        }
        let capacity = self.plan.vms[vm].gate_capacity;
        check(run.held.len() <= capacity, Checker::Bounded, || {
            format!("{} packets wait in a queue for {capacity}", run.held.len())
        })?;
        let (waits, mode) = (!run.queue.is_empty(), run.queue.mode());
        self.tell_of_queue(vm, waits);
        for packet in left {
            self.leave(vm, &packet, mode, now)?;
        }
        Ok(())
    }

    /// A packet leaves for its client, or untagged for another member: released by the gate's thread, or past its
    /// queue.
    pub(crate) fn leave(
        &mut self,
        vm: usize,
        packet: &Packet,
        mode: Mode,
        now: MonoNanos,
    ) -> Checked {
        self.counts.packets += 1;
        let group = self.plan.vms[vm].group;
        let run = self.vms[vm].run.as_ref().expect("its gate has just let it go");
        let gate = run.gate.state();
        check(!gate.fenced, Checker::Fence, || format!("vm {vm}: a packet left a fenced gate"))?;
        check(!self.vms[vm].standing.gave_up, Checker::Fence, || {
            format!("vm {vm}: a packet left a host that had given up its lease")
        })?;
        if packet.kind == Kind::NeverHeld {
            return Ok(());
        }
        if mode == Mode::Async {
            note!(self, "packet of vm {vm} leaves (async)");
            self.leaves_unpromised(vm, packet)?;
            self.check_not_gone(vm, &packet.everything())?;
            self.leaks(vm, &packet.everything());
            // Nothing is promised to its receiver. But a member may have heard it then.
            return self.rumour(vm, packet);
        }
        note!(self, "packet of vm {vm} leaves: knows {:?} row {:?}", packet.known, packet.row);
        check(self.backup.groups[group].recovered.is_none(), Checker::Fence, || {
            format!("vm {vm}: a packet left although the group was recovered")
        })?;
        let end = run.gate.lease_end(self.plan.groups[group].lease_ms);
        check(end.is_some_and(|end| now < end), Checker::Lease, || {
            format!("vm {vm}: a packet left at {now}, the lease ended at {end:?}")
        })?;
        if matches!(packet.kind, Kind::PureAck { .. }) {
            return Ok(());
        }
        self.check_committed(vm, &packet.known)?;
        if let Some(to) = packet.to {
            self.send_untagged(vm, to, packet);
            return Ok(());
        }
        let client = &mut self.vms[vm].client;
        learn(&mut client.known, &packet.known);
        if let Some(row) = packet.row {
            let newest = client.rows.entry(row.slot).or_insert(0);
            *newest = (*newest).max(row.version);
        }
        Ok(())
    }

    /// Whoever hears this without a tag, or outside, comes to depend on nothing that is not committed.
    pub fn check_committed(&self, vm: usize, known: &Known) -> Checked {
        let group = self.plan.vms[vm].group;
        if !self.is_recoverable(group) {
            return Ok(());
        }
        let told = &self.backup.groups[group].told;
        let missing = self.missing(group, told, known);
        check(missing.is_none(), Checker::OutputCommit, || {
            let (peer, point) = missing.expect("just seen");
            format!("vm {vm}: a packet left that depends on {point:?} of vm {peer}, C is {told}")
        })
    }

    /// Whether the backup has told of a whole copy of every member that was there from the beginning, and
    /// of any at all: of a group those may have been taken out.
    #[must_use]
    pub fn is_recoverable(&self, group: usize) -> bool {
        let told = &self.backup.groups[group].told;
        let writers = || self.plan.groups[group].writers();
        writers().all(|vm| self.plan.vms[vm].joins || self.is_whole(vm, told))
            && writers().any(|vm| self.is_whole(vm, told))
    }

    /// Whether a writer's disks are whole at this cut.
    #[must_use]
    pub fn is_whole(&self, vm: usize, cut: &CountVector) -> bool {
        self.vms[vm].oracle.is_whole_at(cut.get(WriterId(self.plan.vms[vm].writer)))
    }

    /// Whether a recovery at this cut may be without this writer: it was taken out, or it has come
    /// later and is not whole yet.
    #[must_use]
    pub fn is_left_out(&self, vm: usize, cut: &CountVector) -> bool {
        let plan = &self.plan.vms[vm];
        let group = &self.plan.groups[plan.group];
        let removed = group.removed.contains(&vm) || group.leaving.contains(&vm);
        removed || plan.joins && !self.is_whole(vm, cut)
    }
}
