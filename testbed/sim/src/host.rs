//! The host daemon: one owner loop for each member, put together from production's parts. What is
//! simulated is the ring: local operations end when the schedule says so.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check, fail};
use crate::faults::Later;
use crate::gate::{SimGate, WriterGate};
use crate::guest::{Ask, Packet};
use crate::link::LinkLoop;
use crate::oracle::Point;
use crate::plant::Plant;
use crate::schedule::{MS, US};
use crate::world::{Event, Run, World, note};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use tidelock_daemon::copy_job::{Bounds, Purpose};
use tidelock_daemon::link::port::{EpochKeeper, FromLink, OwnerPort, ToLink};
use tidelock_daemon::link::{GateControl, Refusal};
use tidelock_daemon::owner::copying::Copying;
use tidelock_daemon::owner::replication;
use tidelock_daemon::sequencer::{Action, DiskError, Extent, OpId, RequestId, Sequencer, Settings};
use tidelock_netfilter::gate::Pending;
use tidelock_netfilter::release_queue::ReleaseQueue;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Incarnation, Seq, WriterId};
use tidelock_protocol::message::{CopyState, LastRun, Mode};
use tidelock_protocol::record::{Effect, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_uring::EventFd;

/// How often what cannot go on by itself is tried again, as in production.
const TICK_NS: u64 = 100 * MS;
const EIO: i32 = 5;

/// What an owner loop is told.
#[derive(Debug)]
pub enum ToOwner {
    /// By the link.
    Link(FromLink),
    /// By the operator.
    SetMode(Mode),
    /// To end cleanly.
    Drain,
}

/// What the daemon keeps on its own disk between runs (production: `state.rs`, on files).
#[derive(Debug, Default)]
pub struct StateFile {
    /// The granted epoch.
    pub epoch: Epoch,
    /// The last run.
    pub incarnation: Incarnation,
    /// Where a run ended cleanly.
    pub clean: Option<(Seq, Hlc)>,
}

struct Keeper(Arc<Mutex<StateFile>>);

impl EpochKeeper for Keeper {
    fn keep(&mut self, epoch: Epoch) -> std::io::Result<()> {
        self.0.lock().expect("one thread").epoch = epoch;
        Ok(())
    }
}

/// One step of an operation on the local disk.
#[derive(Debug)]
enum LocalOp {
    Write {
        extent: Extent,
        data: Vec<u8>,
        fua: bool,
    },
    /// An unaligned write reads its blocks, changes and writes them.
    Patch {
        extent: Extent,
        data: Vec<u8>,
        fua: bool,
    },
    Read {
        extent: Extent,
    },
}

impl LocalOp {
    fn extent(&self) -> Extent {
        match self {
            LocalOp::Write { extent, .. }
            | LocalOp::Patch { extent, .. }
            | LocalOp::Read { extent } => *extent,
        }
    }
}

/// What became of a guest's request at the sequencer.
#[derive(Debug)]
struct Submitted {
    extent: Extent,
    /// Of the payload, to know it again; `None` for zeroes.
    data: Option<*const u8>,
    seq: Option<Seq>,
    /// The copy that repairs a failed write.
    repair: Option<Seq>,
    failed: bool,
}

/// One member while the daemon runs.
#[derive(Debug)]
pub struct MemberRun {
    /// The daemon's run.
    pub run: Run,
    /// Its number on the link.
    pub channel: Channel,
    /// Production's.
    pub sequencer: Sequencer,
    /// Production's.
    pub copying: Copying,
    /// Production's.
    pub port: Arc<OwnerPort<ToOwner>>,
    /// Its receiving end.
    messages: Receiver<ToOwner>,
    /// Its wake-up.
    pub wake: EventFd,
    /// The group's gate on this host.
    pub gate: Arc<SimGate>,
    /// Production's.
    pub queue: ReleaseQueue,
    /// P.
    pub pending: Arc<Pending>,
    /// What packets that are taken up now are stamped with.
    pub stamp: CountVector,
    /// Packets that wait, by id.
    pub held: BTreeMap<u32, Packet>,
    /// Packets that nobody has taken up.
    pub kernel_queue: VecDeque<Packet>,
    /// Ids.
    pub next_packet: u32,
    /// The gate's thread is going to look.
    pub gate_due: bool,
    admitted: Vec<Record>,
    submitted: BTreeMap<RequestId, Submitted>,
    local_ops: BTreeMap<OpId, LocalOp>,
    /// The request of a local write.
    op_requests: BTreeMap<OpId, RequestId>,
    reads: BTreeSet<u64>,
    flushes: BTreeSet<u64>,
    poisoned: BTreeSet<DiskId>,
    attached: bool,
    /// Why the backup refuses.
    pub refusal: Option<Refusal>,
    draining: bool,
    /// The loop has ended cleanly.
    pub ended: bool,
    tick_armed: bool,
    /// Guests' records that are not durable, and what they cost the backlog.
    unacked: VecDeque<(Seq, u64)>,
}

/// The daemon of a host.
pub struct Daemon {
    /// Its run.
    pub run: Run,
    /// Its link.
    pub link: LinkLoop,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "daemon run {}", self.run)
    }
}

impl World {
    /// The VMs of a host.
    #[must_use]
    pub fn vms_of(&self, host: usize) -> Vec<usize> {
        (0..self.vms.len()).filter(|vm| self.plan.vms[*vm].host == host).collect()
    }

    /// A daemon starts. Guests that live ask again what was not answered.
    pub fn start_daemon(&mut self, host: usize) {
        if !self.hosts[host].power || self.hosts[host].lost || self.hosts[host].daemon.is_some() {
            return;
        }
        let run = self.new_run();
        self.counts.daemon_runs += 1;
        let vms = self.vms_of(host);
        let mut link = LinkLoop::new(vms.clone());
        let mut gates: BTreeMap<usize, Arc<SimGate>> = BTreeMap::new();
        for (nth, vm) in vms.iter().copied().enumerate() {
            let group = self.plan.vms[vm].group;
            let (mode, lease_ms) = (self.modes[group], self.plan.groups[group].lease_ms);
            let here: Vec<_> =
                vms.iter().copied().filter(|v| self.plan.vms[*v].group == group).collect();
            let gate = gates
                .entry(group)
                .or_insert_with(|| Arc::new(SimGate::new(mode, lease_ms, &here)))
                .clone();
            let channel = Channel(nth as u16 + 1);
            self.start_member(vm, run, channel, gate, &mut link);
        }
        note!(self, "daemon of host {host} starts, run {run}");
        self.hosts[host].daemon = Some(Daemon { run, link });
        let after = self.rng.range(0..20 * MS);
        self.schedule.after(after, Event::Connect { host, run });
        for vm in vms {
            let again: Vec<_> = self.vms[vm].guest.asked.keys().copied().collect();
            for request in again {
                // A fresh run cannot break a rule by taking a request.
                self.submit(vm, request).expect("nothing was completed yet");
            }
        }
    }

    fn start_member(
        &mut self,
        vm: usize,
        run: Run,
        channel: Channel,
        gate: Arc<SimGate>,
        link: &mut LinkLoop,
    ) {
        let plan = &self.plan.vms[vm];
        let clocks = self.clocks(plan.host);
        let mode = self.modes[plan.group];
        let (incarnation, epoch, clean) = {
            let mut state = self.vms[vm].state.lock().expect("one thread");
            let next = (clocks.wall_ms * 1000).max(state.incarnation.0 + 1);
            state.incarnation = Incarnation(next);
            (state.incarnation, state.epoch, state.clean.take())
        };
        let disks = self.vms[vm].disks.iter().map(|d| d.live().to_vec()).collect();
        self.vms[vm].oracle.disks_hold(disks);
        let writer = WriterId(self.plan.vms[vm].writer);
        let last_run = clean.map_or(LastRun::Unknown, |(seq, _)| LastRun::Clean { seq });
        let mut sequencer = Sequencer::new(Settings {
            writer: WriterId(plan.writer),
            mode,
            backlog_limit_bytes: plan.backlog_limit_bytes,
            lock_align_bytes: SECTOR_BYTES,
        });
        if let Some(Plant::Sequencer(bug)) = self.plant {
            sequencer.plant(bug);
        }
        let mut queue = ReleaseQueue::new(plan.gate_capacity, mode);
        if let Some(Plant::Gate(bug)) = self.plant {
            queue.plant(bug);
        }
        let wake = EventFd::new().expect("an eventfd");
        let (port, messages) = OwnerPort::new(wake.clone());
        let port = Arc::new(port);
        let bounds = Bounds {
            window_bytes: plan.copy_window_bytes,
            rate_bytes_per_s: plan.copy_rate_bytes_per_s,
        };
        link.add_member(
            crate::link::attach_of(&self.plan, vm, incarnation, epoch, last_run, mode),
            channel,
            port.clone(),
            Arc::new(WriterGate { gate: gate.clone(), writer }) as Arc<dyn GateControl>,
            Box::new(Keeper(self.vms[vm].state.clone())),
        );
        if let Some((seq, hlc)) = clean {
            sequencer.start(epoch, seq, hlc, clocks.now, clocks.wall_ms);
            self.begin_life(vm, seq);
        }
        self.vms[vm].run = Some(MemberRun {
            run,
            channel,
            sequencer,
            copying: Copying::new(bounds),
            port,
            messages,
            wake,
            gate,
            queue,
            pending: Arc::new(Pending::new()),
            stamp: CountVector::new(),
            held: BTreeMap::new(),
            kernel_queue: VecDeque::new(),
            next_packet: self.rng.next() as u32,
            gate_due: false,
            admitted: Vec::new(),
            submitted: BTreeMap::new(),
            local_ops: BTreeMap::new(),
            op_requests: BTreeMap::new(),
            reads: BTreeSet::new(),
            flushes: BTreeSet::new(),
            poisoned: BTreeSet::new(),
            attached: false,
            refusal: None,
            draining: false,
            ended: false,
            tick_armed: false,
            unacked: VecDeque::new(),
        });
    }

    fn begin_life(&mut self, vm: usize, base_seq: Seq) {
        let state = &mut self.vms[vm];
        let base = state.disks.iter().map(|d| d.live().to_vec()).collect();
        state.oracle.begin_life(base, base_seq);
        note!(self, "vm {vm} admits writes from {} on", base_seq.next());
    }

    /// The daemon of a host is gone. Local operations that were under way may be done, in part.
    pub fn end_daemon(&mut self, host: usize) {
        let Some(daemon) = self.hosts[host].daemon.take() else { return };
        note!(self, "daemon of host {host} ends, run {}", daemon.run);
        if let Some(conn) = daemon.link.conn() {
            self.host_closes(conn);
        }
        for vm in self.vms_of(host) {
            let Some(run) = self.vms[vm].run.take() else { continue };
            for op in run.local_ops.into_values() {
                let (extent, data) = match op {
                    LocalOp::Write { extent, data, .. } => (extent, data),
                    _ => continue,
                };
                let done = match self.rng.below(3) {
                    0 => 0,
                    1 => data.len(),
                    _ => self.rng.index(data.len() + 1) / 512 * 512,
                };
                let disk = &mut self.vms[vm].disks[usize::from(extent.disk.0)];
                disk.write(extent.offset, &data[..done], false);
            }
        }
    }

    // ---- what guests ask

    /// A guest's request comes to the owner loop, if one runs.
    pub fn submit(&mut self, vm: usize, request: u64) -> Checked {
        let clocks = self.clocks(self.plan.vms[vm].host);
        let latency = self.local_latency(vm);
        let state = &mut self.vms[vm];
        let Some(run) = &mut state.run else { return Ok(()) };
        if run.draining {
            // It stays in the socket, and the next daemon is asked.
            return Ok(());
        }
        let id = run.run;
        match state.guest.asked[&request].clone() {
            Ask::Write { extent, effect, fua, .. } => {
                let data = match &effect {
                    Effect::Write(payload) => Some(payload.data().as_ptr()),
                    _ => None,
                };
                let submitted = Submitted { extent, data, seq: None, repair: None, failed: false };
                run.submitted.insert(RequestId(request), submitted);
                run.sequencer.submit(
                    RequestId(request),
                    extent,
                    effect,
                    fua,
                    clocks.now,
                    clocks.wall_ms,
                );
                self.owner_turn(vm)
            }
            Ask::Read { .. } => {
                run.reads.insert(request);
                self.schedule.after(latency, Event::ReadDone { vm, run: id, request });
                Ok(())
            }
            Ask::Flush { disk, .. } if run.poisoned.contains(&disk) => {
                self.guest_flush_done(vm, request, false)
            }
            Ask::Flush { .. } => {
                run.flushes.insert(request);
                self.schedule.after(latency * 2, Event::FlushDone { vm, run: id, request });
                Ok(())
            }
        }
    }

    fn local_latency(&mut self, vm: usize) -> u64 {
        self.rng.span(self.plan.local_ns) * self.vms[vm].slow_factor
    }

    fn local_fails(&mut self, vm: usize) -> bool {
        let one_in = self.vms[vm].errors_one_in;
        one_in > 0 && self.rng.chance(1, one_in)
    }

    /// A guest's read of the local disk has ended.
    pub fn read_done(&mut self, vm: usize, run: Run, request: u64) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let fails = self.local_fails(vm);
        let state = &mut self.vms[vm];
        state.run.as_mut().expect("runs").reads.remove(&request);
        let Some(Ask::Read { extent, .. }) = state.guest.asked.get(&request) else { return Ok(()) };
        let extent = *extent;
        if fails {
            return self.guest_read_done(vm, request, None);
        }
        let data = self.live(vm, extent).to_vec();
        self.guest_read_done(vm, request, Some(&data))
    }

    /// A guest's flush of the local disk has ended.
    pub fn flush_done(&mut self, vm: usize, run: Run, request: u64) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let fails = self.local_fails(vm);
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        member.flushes.remove(&request);
        let Some(Ask::Flush { disk, .. }) = state.guest.asked.get(&request) else { return Ok(()) };
        if fails {
            member.poisoned.insert(*disk);
        } else {
            state.disks[usize::from(disk.0)].sync();
        }
        self.guest_flush_done(vm, request, !fails)
    }

    fn runs_as(&self, vm: usize, run: Run) -> bool {
        self.vms[vm].run.as_ref().is_some_and(|member| member.run == run && !member.ended)
    }

    fn live(&self, vm: usize, extent: Extent) -> &[u8] {
        let live = self.vms[vm].disks[usize::from(extent.disk.0)].live();
        &live[extent.offset as usize..extent.end() as usize]
    }

    // ---- turns of the owner loop

    /// The loop was woken: by the link, or by the operator.
    pub fn owner_woken(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        loop {
            let member = self.vms[vm].run.as_mut().expect("runs");
            let Ok(message) = member.messages.try_recv() else { break };
            match message {
                ToOwner::Link(message) => self.hear_link(vm, message)?,
                ToOwner::SetMode(mode) => {
                    member.sequencer.set_mode(mode);
                    self.to_link(vm, ToLink::Mode(mode));
                }
                ToOwner::Drain => {
                    member.draining = true;
                    member.copying.stop();
                }
            }
        }
        self.owner_turn(vm)
    }

    /// What production's loop does with the same messages.
    fn hear_link(&mut self, vm: usize, message: FromLink) -> Checked {
        let clocks = self.clocks(self.plan.vms[vm].host);
        match message {
            FromLink::Attached { attached, first } => {
                note!(
                    self,
                    "vm {vm} attached: durable {} copy {:?} epoch {}",
                    attached.durable,
                    attached.copy,
                    attached.epoch
                );
                if first {
                    self.begin_life(vm, attached.durable);
                }
                let state = &mut self.vms[vm];
                if attached.copy == CopyState::Whole {
                    state.oracle.continues_whole()?;
                }
                let run = state.run.as_mut().expect("runs");
                run.attached = true;
                run.refusal = None;
                if first {
                    let (epoch, durable) = (attached.epoch, attached.durable);
                    let hlc = attached.last_hlc;
                    run.sequencer.start(epoch, durable, hlc, clocks.now, clocks.wall_ms);
                }
                let disks = &self.plan.vms[vm].disks;
                let ranges = |purpose| ranges_of(disks, &state.disks, purpose);
                run.copying.attached("", attached.copy, ranges, clocks.now);
            }
            FromLink::Detached => self.vms[vm].run.as_mut().expect("runs").attached = false,
            FromLink::Digest { disk, offset, equal } => {
                let run = self.vms[vm].run.as_mut().expect("runs");
                run.copying.digest_result(disk, offset, equal);
            }
            FromLink::Refused(refusal) => {
                note!(self, "vm {vm} is refused: {:?} {}", refusal.kind, refusal.reason);
                let run = self.vms[vm].run.as_mut().expect("runs");
                run.attached = false;
                run.refusal = Some(refusal);
            }
        }
        Ok(())
    }

    fn to_link(&mut self, vm: usize, message: ToLink) {
        let host = self.plan.vms[vm].host;
        let channel = self.vms[vm].run.as_ref().expect("runs").channel;
        let daemon = self.hosts[host].daemon.as_mut().expect("its members run");
        daemon.link.inbox.push_back((channel, message));
        let run = daemon.run;
        if daemon.link.wants_turn() {
            let after = self.rng.range(1..40 * US);
            self.schedule.after(after, Event::Link { host, run });
        }
    }

    /// The tick.
    pub fn tick(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let member = self.vms[vm].run.as_mut().expect("runs");
        member.tick_armed = false;
        member.copying.tick();
        self.owner_turn(vm)
    }

    /// One turn: what production's loop does after it has taken completions.
    pub fn owner_turn(&mut self, vm: usize) -> Checked {
        // While a daemon is being put together its members have no link yet.
        let ended = self.vms[vm].run.as_ref().is_none_or(|run| run.ended);
        if ended || self.hosts[self.plan.vms[vm].host].daemon.is_none() {
            return Ok(());
        }
        let clocks = self.clocks(self.plan.vms[vm].host);
        let writer = WriterId(self.plan.vms[vm].writer);
        let was_active = {
            let run = self.vms[vm].run.as_mut().expect("runs");
            let gate = WriterGate { gate: run.gate.clone(), writer };
            let MemberRun { sequencer, copying, port, .. } = run;
            let was_active = copying.is_active();
            replication::take_acks("", sequencer, copying, port, &gate, clocks);
            replication::drive_copies(sequencer, copying, port, clocks);
            was_active
        };
        self.act(vm)?;
        self.hand_over(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        if was_active && !run.copying.is_active() && run.copying.is_whole() {
            self.counts.copies += 1;
        }
        let done = run.draining
            && run.submitted.is_empty()
            && run.reads.is_empty()
            && run.flushes.is_empty()
            && replication::is_settled(&run.sequencer);
        if done {
            self.drained(vm);
            return Ok(());
        }
        let MemberRun { sequencer, copying, port, draining, .. } = run;
        replication::ask_for_acks(sequencer, copying, port, *draining);
        if run.copying.needs_tick() && !run.tick_armed {
            run.tick_armed = true;
            let id = run.run;
            self.schedule.after(TICK_NS, Event::Tick { vm, run: id });
        }
        self.check_backlog(vm)
    }

    fn drained(&mut self, vm: usize) {
        let fails = self.local_fails(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        run.ended = true;
        let (seq, hlc) = (run.sequencer.last_seq(), run.sequencer.last_hlc());
        let poisoned = !run.poisoned.is_empty();
        let whole = run.sequencer.is_started() && run.copying.is_whole() && !poisoned;
        // The mark must not outlive what it speaks of: a power loss may follow.
        let synced = whole && !fails;
        if synced {
            self.vms[vm].disks.iter_mut().for_each(crate::disk::LocalDisk::sync);
        }
        let whole = synced;
        if whole {
            self.vms[vm].state.lock().expect("one thread").clean = Some((seq, hlc));
        }
        note!(self, "vm {vm} drained at {seq}, whole {whole}");
        self.to_link(vm, ToLink::Detach);
        let host = self.plan.vms[vm].host;
        let vms = self.vms_of(host);
        if vms.iter().all(|vm| self.vms[*vm].run.as_ref().is_some_and(|run| run.ended)) {
            let run = self.hosts[host].daemon.as_ref().expect("its members run").run;
            self.schedule.after(MS, Event::After(Later::DaemonEnds { host, run }));
        }
    }

    fn act(&mut self, vm: usize) -> Checked {
        loop {
            let run = self.vms[vm].run.as_mut().expect("runs");
            let Some(action) = run.sequencer.poll_action() else { return Ok(()) };
            match action {
                Action::Publish(seq) => {
                    run.pending.publish(WriterId(self.plan.vms[vm].writer), seq);
                }
                Action::Send(record) => self.admit(vm, record)?,
                Action::SendInOrder(message) => {
                    self.hand_over(vm);
                    self.to_link(vm, ToLink::InOrder(message));
                }
                Action::Write { op, extent, effect, fua } => {
                    let data = match effect {
                        Effect::Write(payload) => payload.data().to_vec(),
                        _ => vec![0; extent.len_bytes as usize],
                    };
                    let aligned = extent.offset.is_multiple_of(SECTOR_BYTES)
                        && extent.len_bytes.is_multiple_of(SECTOR_BYTES);
                    let local = if aligned {
                        LocalOp::Write { extent, data, fua }
                    } else {
                        LocalOp::Patch { extent, data, fua }
                    };
                    self.start_write(vm, op, extent, local)?;
                }
                Action::Read { op, extent } => self.start_read(vm, op, extent)?,
                Action::Complete(request, result) => self.complete(vm, request, result)?,
                Action::Copied { extent, outcome } => run.copying.copied(extent, outcome),
                Action::Suspect(extent) => {
                    run.copying.suspect(extent);
                    note!(self, "vm {vm}: {extent:?} may differ");
                }
            }
        }
    }

    /// A record is admitted: the oracle writes it down.
    fn admit(&mut self, vm: usize, record: Record) -> Checked {
        let state = &mut self.vms[vm];
        let extent = Extent {
            disk: record.disk,
            offset: record.offset,
            len_bytes: record.len_bytes().into(),
        };
        let run = state.run.as_mut().expect("runs");
        if record.copy {
            let disk = state.disks[usize::from(record.disk.0)].live();
            let live = &disk[extent.offset as usize..extent.end() as usize];
            state.oracle.copied(&record, live)?;
            for submitted in run.submitted.values_mut() {
                if submitted.failed && submitted.extent == extent {
                    submitted.repair = Some(record.seq);
                }
            }
        } else {
            let data = record.payload().map(|p| p.data().as_ptr());
            let mut open = run.submitted.values_mut().filter(|s| s.seq.is_none());
            let Some(submitted) = open.find(|s| s.extent == extent && s.data == data) else {
                return fail(Checker::Prefix, format!("record {} of no request", record.seq));
            };
            submitted.seq = Some(record.seq);
            state.oracle.wrote(&record);
            let cost = record.payload().map_or(0, |p| p.data().len() as u64)
                + tidelock_daemon::sequencer::RECORD_OVERHEAD_BYTES;
            run.unacked.push_back((record.seq, cost));
        }
        let what = if record.copy { "copies" } else { "writes" };
        let (seq, deps) = (record.seq, record.deps.clone());
        run.admitted.push(record);
        if deps.entries().next().is_some() {
            state.sent_deps.push((seq, deps.clone()));
        }
        note!(self, "vm {vm} {what} seq {seq} {extent:?} deps {deps}");
        Ok(())
    }

    fn start_write(&mut self, vm: usize, op: OpId, extent: Extent, local: LocalOp) -> Checked {
        let latency = self.local_latency(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        check_overlap(run, extent)?;
        // The one whose record was sent last among those of this extent.
        let request = run
            .submitted
            .iter()
            .filter(|(_, s)| s.extent == extent && s.seq.is_some())
            .max_by_key(|(_, s)| s.seq)
            .map(|(request, _)| *request);
        if let Some(request) = request {
            run.op_requests.insert(op, request);
        }
        run.local_ops.insert(op, local);
        let id = run.run;
        self.schedule.after(latency, Event::LocalDone { vm, run: id, op });
        Ok(())
    }

    fn start_read(&mut self, vm: usize, op: OpId, extent: Extent) -> Checked {
        let latency = self.local_latency(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        if run.op_requests.contains_key(&op) {
            // Reading back after an error: the extent is still this operation's.
        } else {
            check_overlap(run, extent)?;
        }
        run.local_ops.insert(op, LocalOp::Read { extent });
        let id = run.run;
        self.schedule.after(latency, Event::LocalDone { vm, run: id, op });
        Ok(())
    }

    /// A step of a local operation has ended.
    pub fn local_done(&mut self, vm: usize, run: Run, op: OpId) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let clocks = self.clocks(self.plan.vms[vm].host);
        let fails = self.local_fails(vm);
        let (latency, part) = (self.local_latency(vm), self.rng.next());
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        let local = member.local_ops.remove(&op).expect("an operation in flight");
        let disk = &mut state.disks[usize::from(local.extent().disk.0)];
        match local {
            LocalOp::Patch { extent, data, fua } if !fails => {
                // The blocks are read now and written as a whole later.
                let blocks = extent.aligned_to(SECTOR_BYTES);
                let end = blocks.end().min(disk.size_bytes());
                let mut patched = disk.live()[blocks.offset as usize..end as usize].to_vec();
                let at = (extent.offset - blocks.offset) as usize;
                patched[at..at + data.len()].copy_from_slice(&data);
                let extent = Extent { len_bytes: patched.len() as u64, ..blocks };
                member.local_ops.insert(op, LocalOp::Write { extent, data: patched, fua });
                self.schedule.after(latency, Event::LocalDone { vm, run, op });
                return Ok(());
            }
            LocalOp::Write { data, extent, .. } if fails => {
                let done = (part % (data.len() as u64 + 1)) as usize / 512 * 512;
                disk.write(extent.offset, &data[..done], false);
                self.local_write_failed(vm, op, extent, clocks);
            }
            LocalOp::Patch { extent, .. } => self.local_write_failed(vm, op, extent, clocks),
            LocalOp::Write { extent, data, fua } => {
                disk.write(extent.offset, &data, fua);
                member.op_requests.remove(&op);
                member.sequencer.written(op, Ok(()), clocks.now, clocks.wall_ms);
            }
            LocalOp::Read { extent } => {
                let live = &disk.live()[extent.offset as usize..extent.end() as usize];
                let result =
                    if fails { Err(DiskError(EIO)) } else { Ok(Bytes::copy_from_slice(live)) };
                member.op_requests.remove(&op);
                member.sequencer.read_done(op, result, clocks.now, clocks.wall_ms);
            }
        }
        self.owner_turn(vm)
    }

    fn local_write_failed(
        &mut self,
        vm: usize,
        op: OpId,
        extent: Extent,
        clocks: replication::Clocks,
    ) {
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        let request = member.op_requests.get(&op).and_then(|r| member.submitted.get_mut(r));
        let mut damaged = extent;
        if let Some(submitted) = request {
            submitted.failed = true;
            damaged = submitted.extent;
        }
        state.oracle.damage(damaged);
        member.sequencer.written(op, Err(DiskError(EIO)), clocks.now, clocks.wall_ms);
        note!(self, "vm {vm}: the local disk fails a write of {damaged:?}");
    }

    /// The sequencer completes a guest's request.
    fn complete(&mut self, vm: usize, id: RequestId, result: Result<(), DiskError>) -> Checked {
        let group = self.plan.vms[vm].group;
        let writer = WriterId(self.plan.vms[vm].writer);
        let run = self.vms[vm].run.as_mut().expect("runs");
        let Some(submitted) = run.submitted.remove(&id) else {
            return fail(Checker::Stream, format!("vm {vm}: {id:?} is completed twice"));
        };
        let seq = submitted.repair.max(submitted.seq).unwrap_or_default();
        // Rule 1: before, not after.
        let published = run.pending.read().get(writer);
        check(published >= seq, Checker::PublishBeforeComplete, || {
            format!("vm {vm}: write {seq} is completed, P says {published}")
        })?;
        if run.sequencer.mode() == Mode::Sync && result.is_ok() {
            let durable = self.backup.groups[group].told_durable.get(writer);
            check(seq <= durable, Checker::SyncWaits, || {
                format!("vm {vm}: write {seq} is completed, the backup has {durable}")
            })?;
        }
        let point = Point { life: self.vms[vm].oracle.life(), seq };
        self.guest_write_done(vm, id.0, result.is_ok(), point)
    }

    fn hand_over(&mut self, vm: usize) {
        let now = self.host_now(self.plan.vms[vm].host);
        let run = self.vms[vm].run.as_mut().expect("runs");
        if !run.admitted.is_empty() {
            let records = std::mem::take(&mut run.admitted);
            self.to_link(vm, ToLink::Records { records, admitted_at: now });
        }
    }

    /// Rule 10, by the checker's own count.
    fn check_backlog(&mut self, vm: usize) -> Checked {
        let limit = self.plan.vms[vm].backlog_limit_bytes;
        let run = self.vms[vm].run.as_mut().expect("runs");
        let durable = run.sequencer.durable();
        while run.unacked.front().is_some_and(|(seq, _)| *seq <= durable) {
            run.unacked.pop_front();
        }
        let cost: u64 = run.unacked.iter().map(|(_, cost)| cost).sum();
        check(cost <= limit || run.unacked.len() == 1, Checker::Bounded, || {
            let count = run.unacked.len();
            format!("vm {vm}: {count} writes of {cost} bytes in a backlog of {limit}")
        })
    }
}

impl MemberRun {
    /// Whether nothing is under way locally, nor on the way to the backup.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.submitted.is_empty()
            && self.local_ops.is_empty()
            && self.reads.is_empty()
            && self.flushes.is_empty()
            && self.sequencer.is_started()
            && replication::is_settled(&self.sequencer)
    }

    /// Where the member stands.
    #[must_use]
    pub fn phase(&self) -> tidelock_daemon::owner::Phase {
        self.copying.phase(self.attached)
    }

    /// Guests' writes that are not completed, also those of a guest that has died since.
    #[must_use]
    pub fn open_writes(&self) -> usize {
        self.submitted.len()
    }

    /// Whether one of them overlaps this.
    #[must_use]
    pub fn is_writing(&self, extent: Extent) -> bool {
        self.submitted.values().any(|s| s.extent.overlaps(&extent))
    }

    /// Operations in flight and waiting, for the bound.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.sequencer.waiting() + self.local_ops.len()
    }
}

/// Rule 2: the overlap rule, looked at the slow way.
fn check_overlap(run: &MemberRun, extent: Extent) -> Checked {
    let block = extent.aligned_to(SECTOR_BYTES);
    let other =
        run.local_ops.values().find(|op| op.extent().aligned_to(SECTOR_BYTES).overlaps(&block));
    check(other.is_none(), Checker::Overlap, || {
        format!("{extent:?} starts while {:?} is in flight", other.map(LocalOp::extent))
    })
}

fn ranges_of(
    plans: &[crate::scenario::DiskPlan],
    disks: &[crate::disk::LocalDisk],
    purpose: Purpose,
) -> Vec<Extent> {
    let mut extents = Vec::new();
    for (nth, (plan, disk)) in plans.iter().zip(disks).enumerate() {
        let disk_id = DiskId(nth as u16);
        let whole = Extent { disk: disk_id, offset: 0, len_bytes: disk.size_bytes() };
        match purpose {
            Purpose::Compare => extents.push(whole),
            // Written since: a file system would have allocated it.
            Purpose::Initial if disk.live() != plan.content => extents.push(whole),
            Purpose::Initial => extents.extend(plan.allocated.iter().map(|range| Extent {
                disk: disk_id,
                offset: range.start,
                len_bytes: range.end - range.start,
            })),
        }
    }
    extents
}
