//! The gate of a group on a host: production's, with queues of packets whose verdicts are carried out here, and the
//! checkers of rules 1 and 4 behind.

use crate::failure::{Checked, Checker, check};
use crate::frames::ETHERNET_BYTES;
use crate::guest::{Known, Packet, learn};
use crate::host::CLOCK_LEAD_MS;
use crate::schedule::{MS, US};
use crate::world::{Event, Run, World, note};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use tidelock_daemon::held_gate::HeldGate;
use tidelock_daemon_core::link::GateControl;
use tidelock_daemon_core::owner::Clocks;
use tidelock_netfilter::gate::{
    GateHandle, GateSnapshot, GateStats, GroupGate, Pending, PortParts, Surroundings, ToldPrograms,
};
use tidelock_netfilter::nfqueue::{PacketQueue, QueueError, QueuedPacket, Received};
use tidelock_netfilter::release_queue::{GateState, HoldReason, Kind, PacketId, ShutWhy};
use tidelock_netfilter::verdicts::{Verdict, Verdicts};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, WriterId};
use tidelock_protocol::message::{Form, Mode};
use tidelock_protocol::tag::TagTerms;
use tidelock_protocol::vector::CountVector;
use tidelock_tagging::{CommittedCells, CrossingCells, Mapped};

/// A member's packets in the kernel.
#[derive(Debug)]
pub struct SimQueue {
    /// Nobody has taken them up.
    waiting: VecDeque<Packet>,
    /// Taken up, and without a verdict.
    undecided: VecDeque<(PacketId, Packet)>,
    /// The number of the last ones of them that were taken up just now.
    fresh: usize,
    /// Packets that leave.
    left: Vec<Packet>,
    next_id: u32,
}

impl SimQueue {
    fn decide(&mut self, last: PacketId, up_to: bool) -> impl Iterator<Item = Packet> {
        let at = self.undecided.iter().position(|(id, _)| *id == last);
        let at = at.expect("a verdict is about a packet that waits");
        let first = if up_to { 0 } else { at };
        self.undecided.drain(first..=at).map(|(_, packet)| packet)
    }
}

impl PacketQueue for SimQueue {
    fn receive(&mut self) -> Result<Received, QueueError> {
        self.fresh = self.waiting.len();
        for packet in self.waiting.drain(..) {
            self.next_id = self.next_id.wrapping_add(1);
            self.undecided.push_back((PacketId(self.next_id), packet));
        }
        Ok(if self.fresh == 0 { Received::Nothing } else { Received::Some })
    }

    fn packets(&mut self, mut each: impl FnMut(QueuedPacket<'_>)) {
        let fresh = std::mem::take(&mut self.fresh);
        for (id, packet) in self.undecided.range(self.undecided.len() - fresh..) {
            let (link, head) = packet.frame.split_at(ETHERNET_BYTES);
            let ethertype = u16::from_be_bytes([link[12], link[13]]);
            let len_bytes = u32::try_from(head.len()).expect("packets are short");
            each(QueuedPacket { id: *id, ethertype, head, len_bytes });
        }
    }

    fn send(&mut self, verdicts: &Verdicts) -> Result<(), QueueError> {
        for verdict in verdicts.as_slice() {
            let (id, up_to, leaves) = match *verdict {
                Verdict::Accept(id) => (id, false, true),
                Verdict::AcceptUpTo(id) => (id, true, true),
                Verdict::Drop(id) => (id, false, false),
            };
            let decided: Vec<_> = self.decide(id, up_to).collect();
            self.left.extend(decided.into_iter().filter(|_| leaves));
        }
        Ok(())
    }

    fn refused_verdicts(&self) -> u64 {
        0
    }

    fn unread(&self) -> u64 {
        0
    }
}

/// The host's clocks, and whether the gate was woken.
#[derive(Debug, Default)]
struct Around {
    now: AtomicU64,
    wall_ms: AtomicU64,
    is_woken: AtomicBool,
}

impl Surroundings for Around {
    fn now(&self) -> MonoNanos {
        MonoNanos(self.now.load(Relaxed))
    }

    fn wall_ms(&self) -> u64 {
        self.wall_ms.load(Relaxed)
    }

    fn wake(&self) {
        self.is_woken.store(true, Relaxed);
    }
}

/// The gate of a group on one host.
pub struct SimGate {
    around: Arc<Around>,
    handle: GateHandle,
    gate: Mutex<GroupGate<SimQueue>>,
    /// Members in the order of their ports, with what their kernel programs share with the gate.
    ports: Vec<(usize, Arc<Mapped<CrossingCells>>)>,
    /// Counters of the members, in the same order.
    stats: Vec<Arc<GateStats>>,
    /// C as the kernel programs see it, which outlive the daemon.
    cells: Arc<Mapped<CommittedCells>>,
    /// Number of the daemon's run, as the programs know it: the time at which it began.
    run: u64,
    /// Keys and limits for tags, as the backup told them last: for a member that lies.
    tag_terms: Mutex<Option<TagTerms>>,
    /// For the checker: when the last beacon that was answered had been sent.
    answered: AtomicU64,
}

impl fmt::Debug for SimGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SimGate").field(&self.handle).finish()
    }
}

impl SimGate {
    /// A shut gate without ports, in a daemon that starts now.
    #[must_use]
    pub fn new(mode: Mode, lease_ms: u64, clocks: Clocks) -> Self {
        let around = Arc::new(Around::default());
        let cells = Arc::new(Mapped::anonymous().expect("memory"));
        let now = clocks.now.0;
        around.now.store(now, Relaxed);
        around.wall_ms.store(clocks.wall_ms, Relaxed);
        // A seed is over long before the form makes a difference.
        let programs = ToldPrograms::new(Arc::clone(&cells), CLOCK_LEAD_MS, true);
        let gate = GroupGate::new("g".to_owned(), mode, lease_ms, Some(programs), around.clone());
        Self {
            around,
            handle: gate.handle(),
            gate: Mutex::new(gate),
            ports: Vec::new(),
            stats: Vec::new(),
            cells,
            run: now,
            tag_terms: Mutex::default(),
            answered: AtomicU64::new(0),
        }
    }

    /// Adds a member. `knows_others`: there are others to hear of, and its P outlived the last daemon or not.
    pub fn add(
        &mut self,
        vm: usize,
        pending: &Arc<Pending>,
        (queue_len_max, next_id): (usize, u32),
        is_hlc: bool,
        knows_others: Option<bool>,
    ) {
        if let Some(is_known) = knows_others {
            self.lock().depends_on_others(pending, is_known);
            pending.cells().run.store(self.run, Relaxed);
        }
        let crossing = Arc::new(Mapped::anonymous().expect("memory"));
        let stats = Arc::new(GateStats::default());
        let queue = SimQueue {
            waiting: VecDeque::new(),
            undecided: VecDeque::new(),
            fresh: 0,
            left: Vec::new(),
            next_id,
        };
        self.lock().add_port(PortParts {
            member: format!("vm{vm}"),
            interface: format!("tap{vm}"),
            queue,
            queue_len_max,
            pending: Arc::clone(pending),
            stats: Arc::clone(&stats),
            is_hlc,
            crossing: knows_others.map(|_| Arc::clone(&crossing)),
        });
        self.ports.push((vm, crossing));
        self.stats.push(stats);
    }

    /// The host's clocks, for what is told next.
    pub fn set_clocks(&self, Clocks { now, wall_ms }: Clocks) {
        self.around.now.store(now.0, Relaxed);
        self.around.wall_ms.store(wall_ms, Relaxed);
    }

    /// Number of the daemon's run: members whose programs have the same one raise each other's P without a tag.
    #[must_use]
    pub fn run(&self) -> u64 {
        self.run
    }

    /// C as the kernel programs see it.
    #[must_use]
    pub fn cells(&self) -> &CommittedCells {
        &self.cells
    }

    /// The count of packets that the kernel programs of a member share with the gate.
    #[must_use]
    pub fn crossing(&self, vm: usize) -> &CrossingCells {
        &self.ports[self.port(vm)].1
    }

    /// The handle that production's loops have.
    #[must_use]
    pub fn handle(&self) -> &GateHandle {
        &self.handle
    }

    fn port(&self, vm: usize) -> usize {
        let port = self.ports.iter().position(|(other, _)| *other == vm);
        port.expect("each member has one")
    }

    fn lock(&self) -> MutexGuard<'_, GroupGate<SimQueue>> {
        self.gate.lock().expect("one thread")
    }

    /// A packet comes to the kernel's queue. False: it is full.
    #[must_use]
    pub fn queue(&self, vm: usize, packet: Packet, capacity: usize) -> bool {
        let mut gate = self.lock();
        let queue = gate.queue_mut(self.port(vm));
        let has_room = queue.waiting.len() < capacity;
        if has_room {
            queue.waiting.push_back(packet);
        }
        has_room
    }

    /// Packets of a member that wait, taken up or not.
    #[must_use]
    pub fn waiting(&self, vm: usize) -> usize {
        let gate = self.lock();
        let queue = gate.queue(self.port(vm));
        queue.waiting.len() + queue.undecided.len()
    }

    /// Counters of a member's gate.
    #[must_use]
    pub fn counters(&self, vm: usize) -> GateSnapshot {
        self.stats[self.port(vm)].snapshot()
    }

    /// Packets of a member that wait for C.
    #[must_use]
    pub fn held(&self, vm: usize) -> usize {
        self.lock().held_packets(self.port(vm))
    }

    /// Changes packets of a member that wait.
    pub fn for_each_waiting(&self, vm: usize, change: impl FnMut(&mut Packet)) {
        let mut gate = self.lock();
        let SimQueue { waiting, undecided, .. } = gate.queue_mut(self.port(vm));
        undecided.iter_mut().map(|(_, packet)| packet).chain(waiting).for_each(change);
    }

    /// True if the gate was woken since the last call.
    pub fn take_woken(&self) -> bool {
        self.around.is_woken.swap(false, Relaxed)
    }

    /// True if something has changed that its thread has not seen.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.around.is_woken.load(Relaxed)
    }

    /// Its thread has ended with its process, in order.
    pub fn end(&self) {
        self.lock().end();
    }

    /// When the last beacon that was answered had been sent, if there was one.
    #[must_use]
    pub fn answered_at(&self) -> Option<MonoNanos> {
        Some(MonoNanos(self.answered.load(Relaxed))).filter(|at| at.0 > 0)
    }

    /// Keys and limits for tags, as the backup told them last.
    #[must_use]
    pub fn tag_terms(&self) -> Option<TagTerms> {
        self.tag_terms.lock().expect("no panic while held").clone()
    }

    /// Whether it is open.
    #[must_use]
    pub fn is_open(&self, now: MonoNanos) -> bool {
        self.handle.state(now) == GateState::Open
    }

    /// True if the gate is shut for good.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.handle.state(MonoNanos(0)) == GateState::Shut(ShutWhy::Fenced)
    }

    /// For the checker: the end of the lease by its definition.
    #[must_use]
    pub fn lease_end(&self, lease_ms: u64) -> Option<MonoNanos> {
        self.answered_at().map(|sent_at| sent_at.plus_ms(lease_ms))
    }
}

/// The gate as a member's loops see it; their calls are noted for the checkers.
#[derive(Debug)]
pub struct NotedGate {
    gate: Arc<SimGate>,
    held: HeldGate,
}

impl NotedGate {
    /// The gate of a member.
    #[must_use]
    pub fn new(
        gate: Arc<SimGate>,
        writer: Option<WriterId>,
        pending: Arc<Pending>,
        form: Form,
    ) -> Self {
        let handle = Some(gate.handle.clone());
        Self { gate, held: HeldGate { handle, writer, pending, form, floor: Mutex::default() } }
    }
}

impl GateControl for NotedGate {
    fn committed(&self, committed: &CountVector) {
        self.held.committed(committed);
    }

    fn tag_terms(&self, terms: &TagTerms) {
        *self.gate.tag_terms.lock().expect("no panic while held") = Some(terms.clone());
        self.held.tag_terms(terms);
    }

    fn lease_renewed(&self, sent_at: MonoNanos) {
        self.gate.answered.fetch_max(sent_at.0, Relaxed);
        self.held.lease_renewed(sent_at);
    }

    fn fence(&self) {
        self.held.fence();
    }

    fn is_applied(&self) -> bool {
        self.held.is_applied()
    }

    fn hold(&self, reason: HoldReason, hold: bool) {
        self.held.hold(reason, hold);
    }

    fn watermark(&self, watermark: Hlc) {
        self.held.watermark(watermark);
    }

    fn awaits_floor(&self) -> Option<u64> {
        self.held.awaits_floor()
    }

    fn is_catching_up(&self) -> bool {
        self.held.is_catching_up()
    }

    fn mark_incomplete(&self) {
        self.held.mark_incomplete();
    }

    fn floor(&self, mark: u64, pending: &CountVector, hlc: Hlc) {
        self.held.floor(mark, pending, hlc);
    }

    fn pending(&self) -> (CountVector, Hlc) {
        self.held.pending()
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

    /// The gate's thread looks at the queue of this member soon.
    pub(crate) fn gate_looks(&mut self, vm: usize, within_ns: u64) {
        let Some(run) = self.vms[vm].run.as_mut().filter(|run| !run.gate_due) else { return };
        run.gate_due = true;
        let event = Event::Gate { vm, run: run.run };
        let after = self.rng.range(1..within_ns);
        self.schedule.after(after, event);
    }

    /// A turn of the gate's thread, in which the queue of this member has something.
    pub fn gate_turn(&mut self, vm: usize) -> Checked {
        let Some(run) = &self.vms[vm].run else { return Ok(()) };
        let gate = run.gate.clone();
        let clocks = self.clocks(self.plan.vms[vm].host);
        gate.set_clocks(clocks);
        for (member, _) in &gate.ports {
            self.notice_question(*member);
            self.notice_lease(*member);
            self.notice_floor(*member);
        }
        let mut turn = gate.lock();
        turn.follow(clocks.now).expect("these queues do not fail");
        let mut ports: Vec<_> = turn.unsettled().collect();
        ports.push(gate.port(vm));
        for port in ports {
            turn.take_up(port).expect("these queues do not fail");
        }
        let (may_sleep, is_settled) = (turn.may_sleep(), turn.unsettled().next().is_none());
        let left: Vec<_> = (0..gate.ports.len())
            .map(|port| (gate.ports[port].0, std::mem::take(&mut turn.queue_mut(port).left)))
            .collect();
        drop(turn);
        let capacity = self.plan.vms[vm].gate_capacity;
        let held = gate.held(vm);
        check(held <= capacity, Checker::Bounded, || {
            format!("{held} packets wait in a queue for {capacity}")
        })?;
        if !may_sleep || !is_settled {
            self.gate_looks(vm, if may_sleep { 2 * MS } else { 10 * US });
        }
        let mode = gate.handle.mode();
        for (vm, packets) in left {
            for packet in packets {
                self.leave(vm, &packet, mode, clocks.now)?;
            }
        }
        Ok(())
    }

    /// Notices that all that the guest may know is known, as the gate's thread is about to see.
    fn notice_floor(&mut self, vm: usize) {
        let Some(run) = &mut self.vms[vm].run else { return };
        let is_incomplete = run.pending.incomplete().is_some();
        if std::mem::replace(&mut run.is_incomplete, is_incomplete) && !is_incomplete {
            self.counts.floors += 1;
            self.is_answered(vm);
        }
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
        check(!run.gate.is_fenced(), Checker::Fence, || {
            format!("vm {vm}: a packet left a fenced gate")
        })?;
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

    /// No gate that keeps a promise may let anything go once its group is recovered, whatever it hears or not.
    pub(crate) fn check_no_lease_holds(&self, group: usize) -> Checked {
        for vm in self.plan.groups[group].members() {
            let Some(run) = &self.vms[vm].run else { continue };
            let gate = &run.gate;
            let gave_up = self.vms[vm].standing.gave_up;
            let has_ended = gave_up || gate.is_fenced() || gate.handle().mode() == Mode::Async;
            let now = self.host_now(self.plan.vms[vm].host);
            let end = gate.lease_end(self.plan.groups[group].lease_ms);
            check(has_ended || end.is_none_or(|end| end <= now), Checker::Lease, || {
                format!(
                    "group {group} is recovered at {now}, the lease of vm {vm} holds until {end:?}"
                )
            })?;
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
