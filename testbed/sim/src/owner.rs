//! The owner loop of one member: production's, with the world as its driver. A guest's requests, ends of disk operations,
//! messages, timers and the time go in; what the loop asks for is carried out here, in its order, past the checkers.

use crate::beating::Beating;
use crate::failure::{Checked, Checker, check, fail};
use crate::faults::Later;
use crate::gate::{NotedGate, SimGate};
use crate::guest::{Ask, Known};
use crate::oracle::Point;
use crate::ring::{Asked, Asks, Death, Ends, Io, Shape, SimDriver, Tear};
use crate::schedule::{MS, US};
use crate::verifying::Looked;
use crate::world::{Event, Run, World, note};
use futures_channel::oneshot;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use tidelock_daemon::driver;
use tidelock_daemon::nbd_tap::ConnectionId;
use tidelock_daemon_core::activity::Standing;
use tidelock_daemon_core::copy_job;
use tidelock_daemon_core::heartbeat::Pulse;
use tidelock_daemon_core::link::Refusal;
use tidelock_daemon_core::link::port::{FromLink, OwnerPort, ToLink};
use tidelock_daemon_core::owner::Clocks;
use tidelock_daemon_core::owner::driver::DiskOp;
use tidelock_daemon_core::owner::spilling::Spilling;
use tidelock_daemon_core::owner::{Drained, Owner, OwnerView, Phase, ToOwner, ending};
use tidelock_daemon_core::sequencer::{Extent, OpId, RequestId};
use tidelock_daemon_core::state::MemberState;
use tidelock_daemon_core::stats::OwnerStats;
use tidelock_daemon_core::verifications::Verifications;
use tidelock_netfilter::gate::Pending;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{Basis, CopyState, Mode};
use tidelock_protocol::record::{Effect, Record};
use tidelock_storage::memory::Memory;
use tidelock_uring::{Buffer, EventFd};

/// What it takes to put a ceiling on record.
const CEILING_NS: u64 = 3 * MS;
/// So often it is looked whether a loop that hangs goes on.
const AGAIN_NS: u64 = 20 * MS;
/// The fate of a guest's write.
#[derive(Debug)]
pub(crate) struct Submitted {
    /// The number of requests that the tap had taken before.
    pub(crate) nth: u64,
    pub(crate) extent: Extent,
    /// Of the payload, to know it again; `None` for zeroes.
    pub(crate) data: Option<*const u8>,
    pub(crate) seq: Option<Seq>,
    /// The copy that repairs a failed write.
    pub(crate) repair: Option<Seq>,
    pub(crate) failed: bool,
    /// What the guest knew when it asked.
    pub(crate) known: Known,
    /// The connection that it has come on, and the client's name for it.
    pub(crate) from: (u64, u64),
    /// True if it is to be on stable storage when it is answered.
    pub(crate) fua: bool,
    /// The number of the local disk's write that has it.
    pub(crate) written: Option<u64>,
}

/// A guest's read or flush.
#[derive(Debug)]
pub(crate) struct OtherRequest {
    /// The connection that it has come on, and the client's name for it.
    pub(crate) from: (u64, u64),
    pub(crate) extent: Extent,
    /// A flush: sectors that were written before and are not on stable storage, and the last write to each.
    pub(crate) unsynced: Vec<(u64, u64)>,
}

/// One member while the daemon runs.
pub struct MemberRun {
    /// The daemon's run.
    pub run: Run,
    /// Its number on the link.
    pub channel: Channel,
    /// Production's, on its host's disk.
    pub(crate) state: MemberState<Memory>,
    /// Production's loop; a member without disks has none.
    pub(crate) owner: Option<Owner<SimDriver>>,
    /// The loop's own account.
    pub(crate) view: Arc<OwnerView>,
    pub(crate) owner_stats: Arc<OwnerStats>,
    /// Its disks, as far as the loop can see them.
    pub(crate) shapes: Vec<Rc<RefCell<Shape>>>,
    pub(crate) ends: Rc<Ends>,
    /// The world is carrying out what it has asked for.
    is_carried_out: bool,
    /// Operations that it has asked for and that are not carried out.
    pub(crate) queue: Rc<Asks>,
    /// Accepts of its tap that are under way, by disk.
    pub(crate) accepting: BTreeMap<usize, u64>,
    /// Requests that its tap has taken.
    pub(crate) taken: u64,
    /// Connections of its clients, as the tap names them.
    pub(crate) connections: BTreeMap<ConnectionId, u64>,
    /// The number of the life that it begins.
    pub(crate) life: usize,
    /// Writes without a record that were begun: of which request, where, and what.
    pub(crate) unrecorded: BTreeMap<OpId, (Option<RequestId>, Extent, Effect)>,
    /// A write that follows its record is that record's.
    pub(crate) is_recorded: bool,
    /// Times that its activity log was full, and requests that waited for it, as counted by now.
    pub(crate) log_counts: (u64, u64),
    /// The process may go on with what another process has left, and the backup has not attached it yet.
    pub(crate) goes_on: bool,
    /// Records that it has done again on the local disks.
    pub(crate) redone: Arc<Mutex<Vec<Record>>>,
    /// Until then its daemon is to die within an append.
    pub(crate) tears_until_ns: u64,
    /// By the simulator's reckoning, before the loop was told of anything: whether its stream could be gone on with.
    pub(crate) was_sound: bool,
    /// Its daemon has died, and is about to be gone. Whether the next one must be able to go on.
    pub(crate) has_died: Option<bool>,
    /// Production's.
    pub port: Arc<OwnerPort<ToOwner>>,
    /// Its receiving end.
    pub(crate) messages: Receiver<ToOwner>,
    /// Its wake-up.
    pub wake: EventFd,
    /// The group's gate on this host.
    pub gate: Arc<SimGate>,
    /// The gate as the member's loops see it.
    pub(crate) control: Arc<NotedGate>,
    /// P.
    pub pending: Arc<Pending>,
    /// P was not complete when the gate's thread looked last.
    pub(crate) is_incomplete: bool,
    /// The gate's thread is going to look.
    pub gate_due: bool,
    pub(crate) submitted: BTreeMap<RequestId, Submitted>,
    /// In force for the answers that are carried out now. The loop may have gone on to another one.
    pub(crate) mode: Mode,
    /// Operations on disks that the loop has asked for.
    pub(crate) in_flight: BTreeMap<DiskOp, Io>,
    /// The extents of the sequencer's operations that have not ended, and the requests of its writes.
    pub(crate) local_ops: BTreeMap<OpId, Extent>,
    pub(crate) op_requests: BTreeMap<OpId, RequestId>,
    /// A step of this one has just ended.
    pub(crate) step_of: Option<OpId>,
    /// Guests' reads and flushes that are not answered.
    pub(crate) others: BTreeMap<RequestId, OtherRequest>,
    pub(crate) poisoned: BTreeSet<DiskId>,
    pub(crate) attached: bool,
    /// Why the backup refuses.
    pub refusal: Option<Refusal>,
    pub(crate) draining: bool,
    /// No request is taken, for a planned switch.
    pub(crate) holds: bool,
    /// The answer to a drain.
    pub(crate) drained: Option<oneshot::Receiver<Drained>>,
    /// The loop has ended cleanly.
    pub ended: bool,
    /// It has had a lease.
    pub(crate) was_leased: bool,
    /// What its guest had heard when the backup had to tell it that others may be in mode async.
    pub(crate) heard_before: Option<Known>,
    /// The mark of the question that it has for the backup.
    pub(crate) asks: Option<u64>,
    /// Guests' records that are not durable, and what they cost the backlog.
    pub(crate) unacked: VecDeque<(Seq, u64)>,
    /// What that cost at the start.
    pub(crate) left_bytes: u64,
    /// Heartbeats, as its loop tells of them.
    pub(crate) pulse: Arc<Pulse>,
    /// Its heartbeats, if it has any.
    pub(crate) beating: Option<Beating>,
    /// Production's.
    pub(crate) verifications: Verifications,
    /// For the checker: what there was when it began.
    pub(crate) looked: Option<Looked>,
}

impl std::fmt::Debug for MemberRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "run {}", self.run)
    }
}

impl World {
    /// The clocks of a host as its daemon reads them.
    pub(crate) fn member_clocks(&self, vm: usize) -> Clocks {
        self.clocks(self.plan.vms[vm].host)
    }

    pub(crate) fn local_latency(&mut self, vm: usize) -> u64 {
        self.rng.span(self.plan.local_ns) * self.vms[vm].slow_factor
    }

    pub(crate) fn local_fails(&mut self, vm: usize) -> bool {
        let one_in = self.vms[vm].errors_one_in;
        one_in > 0 && self.rng.chance(1, one_in)
    }

    pub(crate) fn runs_as(&self, vm: usize, run: Run) -> bool {
        self.vms[vm].run.as_ref().is_some_and(|member| member.run == run && !member.ended)
    }

    /// Makes an event wait while the loop hangs.
    pub(crate) fn waits_for_loop(&mut self, vm: usize, event: Event) -> bool {
        let hangs = self.vms[vm].run.as_ref().is_some_and(MemberRun::hangs);
        if hangs {
            self.schedule.after(AGAIN_NS, event);
        }
        hangs
    }

    // ---- turns of the owner loop

    /// Tells the loop something, at the time that it is. What it asks for is carried out by [`World::owner_turn`].
    pub(crate) fn with_owner<R>(
        &mut self,
        vm: usize,
        what: impl FnOnce(&mut Owner<SimDriver>) -> R,
    ) -> Option<R> {
        let clocks = self.member_clocks(vm);
        let fails = self.local_fails(vm);
        let now_ns = self.schedule.now_ns();
        let is_faulty = self.faulty;
        let of = &mut self.vms[vm];
        // An append that had no room before this turn counts in the backlog's own state.
        let _ = of.backlog_files.as_ref().map(|files| files.take_ran_full());
        let run = of.run.as_mut()?;
        run.was_sound = run.is_sound();
        run.ends.fails.set(fails);
        let owner = run.owner.as_mut()?;
        if now_ns > run.tears_until_ns || !is_faulty {
            run.queue.tears(None);
        }
        driver::set_time(owner, clocks);
        Some(what(owner))
    }

    /// The loop was woken: by the link, or by the operator.
    pub fn owner_woken(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        loop {
            let member = self.vms[vm].run.as_mut().expect("runs");
            if member.hangs() || member.has_died.is_some() {
                return Ok(());
            }
            let Ok(message) = member.messages.try_recv() else { break };
            match &message {
                ToOwner::Link(message) => self.hears_link(vm, message)?,
                ToOwner::Verify { repair, .. } => self.verification_begins(vm, *repair),
                _ => {}
            }
            if self.vms[vm].run.as_ref().is_some_and(|run| run.owner.is_none()) {
                continue;
            }
            let is_unrecorded = matches!(message, ToOwner::Link(FromLink::MayServeUnrecorded));
            let is_attached = matches!(&message, ToOwner::Link(FromLink::Attached { attached, .. })
                if matches!(attached.stream.copy.told(), CopyState::Partial | CopyState::Resyncing));
            self.with_owner(vm, |owner| owner.hear(message));
            // An earlier process's writes are done again before more is heard.
            self.carry_out(vm)?;
            let run = self.vms[vm].run.as_ref().expect("runs");
            let is_comparing = run.owner.as_ref().is_some_and(|owner| owner.copying().is_copying());
            let serves = run.owner.as_ref().is_some_and(|o| o.sequencer().serves_unrecorded());
            if is_unrecorded && serves {
                self.counts.unreached += 1;
                note!(self, "vm {vm} is served without the backup");
            }
            let is_mapped = run.view.compares_all_because().is_none() && run.is_logged();
            self.counts.mapped_resyncs += u64::from(is_attached && is_comparing && is_mapped);
        }
        self.owner_turn(vm)
    }

    /// The link's message, as the checkers understand it, before the loop hears it.
    fn hears_link(&mut self, vm: usize, message: &FromLink) -> Checked {
        match message {
            FromLink::Attached { attached, compares, .. } => {
                let (copy, durable) = (attached.stream.copy, attached.durable);
                let epoch = attached.epoch;
                let basis = &attached.stream.basis;
                note!(
                    self,
                    "vm {vm} attached: durable {durable} copy {copy:?} epoch {epoch} {basis:?}"
                );
                let run = self.vms[vm].run.as_mut().expect("runs");
                (run.attached, run.refusal) = (true, None);
                let Some(owner) = &run.owner else { return Ok(()) };
                if owner.spilling().stands() {
                    if *compares {
                        self.begin_compared_life(vm, attached);
                        self.counts.returned += 1;
                    }
                    return Ok(());
                }
                let is_started = owner.sequencer().is_started();
                self.check_nothing_compared(vm, attached)?;
                self.check_has_grown(vm)?;
                let run = self.vms[vm].run.as_mut().expect("runs");
                let goes_on = std::mem::take(&mut run.goes_on);
                if goes_on && attached.stream.basis == Basis::Continues {
                    let lives = self.vms[vm].oracle.lives();
                    self.vms[vm].run.as_mut().expect("runs").life = lives - 1;
                } else {
                    if goes_on {
                        self.left_is_given_up(vm);
                    }
                    if !is_started {
                        self.begin_compared_life(vm, attached);
                    }
                }
                let state = &mut self.vms[vm];
                state.unrecorded.clear();
                if !goes_on && copy == CopyState::Whole && state.oracle.continues_whole()? {
                    self.counts.clean_starts += 1;
                }
                if matches!(copy.told(), CopyState::Partial | CopyState::Resyncing) {
                    self.is_named(vm, durable, Hlc(attached.stream.last_hlc.0 + 1));
                }
            }
            FromLink::Floor { pending, hlc } => {
                note!(self, "vm {vm} may have known {pending}, {hlc}")
            }
            FromLink::Detached => self.vms[vm].run.as_mut().expect("runs").attached = false,
            FromLink::Refused(refusal) => {
                note!(self, "vm {vm} is refused: {:?} {}", refusal.kind, refusal.reason);
                let run = self.vms[vm].run.as_mut().expect("runs");
                run.attached = false;
                run.refusal = Some(refusal.clone());
            }
            FromLink::MayServeUnrecorded => {
                let run = self.vms[vm].run.as_mut().expect("runs");
                if std::mem::take(&mut run.goes_on) {
                    self.left_is_given_up(vm);
                }
            }
            FromLink::Digest { .. } => {}
        }
        Ok(())
    }

    /// P of a member of several names what a comparison will bring: the first record after `last`, and that time.
    pub(crate) fn is_named(&mut self, vm: usize, last: Seq, hlc: Hlc) {
        if self.plan.groups[self.plan.vms[vm].group].has_several() {
            let state = &mut self.vms[vm];
            state.named = (state.named.0.max(last.next()), state.named.1.max(hlc));
        }
    }

    /// The loop does not go on with what another process has left.
    fn left_is_given_up(&mut self, vm: usize) {
        self.disks_hold(vm);
        self.vms[vm].run.as_mut().expect("runs").unacked.clear();
        // Reads that wait find the disks without it.
        for ask in self.vms[vm].guest.asked.values_mut() {
            if let Ask::Read { expected, .. } = ask {
                *expected = None;
            }
        }
    }

    /// The guest reads whatever the disks hold now.
    pub(crate) fn disks_hold(&mut self, vm: usize) {
        let disks = self.vms[vm].disks.iter().map(|d| d.live().to_vec()).collect();
        self.vms[vm].oracle.disks_hold(disks);
    }

    pub(crate) fn tell_link(&mut self, vm: usize, message: ToLink) {
        let host = self.plan.vms[vm].host;
        let channel = self.vms[vm].run.as_ref().expect("runs").channel;
        let Some(daemon) = self.hosts[host].daemon.as_mut() else { return };
        daemon.link.inbox.push_back((channel, message));
        let run = daemon.run;
        if daemon.link.wants_turn() {
            let after = self.rng.range(1..40 * US);
            self.schedule.after(after, Event::Link { host, run });
        }
    }

    /// A timer of the loop has run out.
    pub fn timer_due(&mut self, vm: usize, run: Run, token: u64) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        if self.waits_for_loop(vm, Event::Timer { vm, run, token }) {
            return Ok(());
        }
        self.ring_ends(vm, token, Ok(0), Buffer::None)
    }

    /// The first turn of a loop.
    pub(crate) fn owner_begins(&mut self, vm: usize) -> Checked {
        self.with_owner(vm, Owner::begin);
        self.carry_out(vm)
    }

    /// One turn, and what the loop has asked for in it and before.
    pub fn owner_turn(&mut self, vm: usize) -> Checked {
        // While a daemon is being put together its members have no link yet.
        let stopped = |run: &MemberRun| run.ended || run.has_died.is_some() || run.hangs();
        let ended = self.vms[vm].run.as_ref().is_none_or(stopped);
        if ended || self.hosts[self.plan.vms[vm].host].daemon.is_none() {
            return Ok(());
        }
        let is_active = |world: &Self| {
            let owner = world.vms[vm].run.as_ref().and_then(|run| run.owner.as_ref());
            owner.map_or((false, false), |o| (o.copying().is_active(), o.copying().is_whole()))
        };
        let (was_active, _) = is_active(self);
        if let Some(Err(why)) = self.with_owner(vm, driver::turn) {
            note!(self, "vm {vm}: its loop ends: {why}");
            // The loop has given up its stream.
            self.vms[vm].run.as_mut().expect("runs").has_died.get_or_insert(false);
        }
        self.counts.copies += u64::from(was_active && is_active(self) == (false, true));
        self.carry_out(vm)?;
        self.look_at_log(vm);
        self.look_whether_drained(vm)?;
        if self.vms[vm].run.as_ref().is_none_or(|run| run.has_died.is_some()) {
            return Ok(());
        }
        self.check_phase(vm)?;
        self.check_backlog(vm)
    }

    /// Carries out what the loop has asked for. What comes of it while this goes on is carried out by it, too.
    pub(crate) fn carry_out(&mut self, vm: usize) -> Checked {
        self.redo(vm)?;
        self.sync_at_the_end(vm);
        let Some(run) = self.vms[vm].run.as_mut() else { return Ok(()) };
        if std::mem::replace(&mut run.is_carried_out, true) {
            return Ok(());
        }
        let done = self.carry_out_all(vm);
        if let Some(run) = self.vms[vm].run.as_mut() {
            run.is_carried_out = false;
        }
        done
    }

    fn carry_out_all(&mut self, vm: usize) -> Checked {
        loop {
            let Some(run) = &self.vms[vm].run else { return Ok(()) };
            let Some(asked) = run.queue.next() else { break };
            let is_next_step = matches!(asked, Asked::Disk(DiskOp::Local(_), _));
            if !is_next_step {
                self.step_has_ended(vm);
            }
            match asked {
                Asked::Saw(action) => self.sees(vm, action)?,
                Asked::Disk(op, io) => self.begin_io(vm, op, io),
                Asked::Request(request, connection, cookie) => {
                    self.taken(vm, request, connection, cookie)?;
                }
                Asked::Answer { request, ok, published } => {
                    self.answered(vm, request, ok, published)?;
                }
                Asked::Accept(token, disk) => self.accepts(vm, token, disk)?,
                Asked::Receive(number, receiving) => self.receives(vm, number, receiving)?,
                Asked::Send(number, token, bufs) => self.sends(vm, number, token, bufs)?,
                Asked::Timer(token, after) => {
                    let run = self.vms[vm].run.as_ref().expect("runs").run;
                    let event = Event::Timer { vm, run, token };
                    self.schedule.after(after.as_nanos() as u64, event);
                }
                Asked::Ceiling => {
                    let run = self.vms[vm].run.as_ref().expect("runs").run;
                    self.schedule.after(CEILING_NS, Event::CeilingWanted { vm, run });
                }
                Asked::Link(message) => self.says_to_link(vm, message),
                Asked::LogRemoved(done) => {
                    if done {
                        // A host that loses its power here compares the sites.
                        let _ = self.log_place(vm).remove();
                    }
                    note!(self, "vm {vm}: its activity log is given up: {done}");
                }
            }
        }
        self.step_has_ended(vm);
        if let Some(death) = self.vms[vm].run.as_ref().and_then(|run| run.queue.died()) {
            self.is_killed(vm, death);
        }
        self.notice_closed(vm);
        Ok(())
    }

    /// No other step has followed: the sequencer's operation has ended.
    fn step_has_ended(&mut self, vm: usize) {
        let Some(run) = self.vms[vm].run.as_mut() else { return };
        if let Some(op) = run.step_of.take() {
            run.local_ops.remove(&op);
            run.op_requests.remove(&op);
            run.unrecorded.remove(&op);
        }
    }

    /// A process is killed within the append of a record, or right behind it.
    fn is_killed(&mut self, vm: usize, death: Death) {
        let run = self.vms[vm].run.as_mut().expect("runs");
        if run.has_died.is_some() {
            return;
        }
        // In the turn in which it dies the loop may have said before that nobody is to go on with the stream.
        let spilling = run.owner.as_ref().map(Owner::spilling);
        let lacks_some = |spilling: &Spilling| spilling.backlog().is_some_and(|b| b.lacks_some());
        let is_given_up = spilling.is_some_and(|of| lacks_some(of) || !of.records());
        run.has_died = Some(death.has_records && run.was_sound && !is_given_up);
        self.counts.torn += 1;
        let Death { tear, seq, .. } = death;
        note!(self, "vm {vm}: its daemon dies: {tear:?} the append of {seq}");
    }

    fn says_to_link(&mut self, vm: usize, message: ToLink) {
        match &message {
            ToLink::Mode(mode) => self.vms[vm].run.as_mut().expect("runs").mode = *mode,
            ToLink::Detach(end) => note!(self, "vm {vm} leaves: {end:?}"),
            ToLink::Stands => {
                self.counts.stood += 1;
                let state = &mut self.vms[vm];
                let run = state.run.as_mut().expect("runs");
                // The next life begins with the writes that have no record from here on.
                (run.life, run.goes_on) = (state.oracle.lives(), false);
                let sequencer = run.owner.as_ref().expect("it says so").sequencer();
                let (last, hlc) = (sequencer.last_seq(), sequencer.unrecorded_hlc());
                self.is_named(vm, last, hlc);
                note!(self, "vm {vm}: its stream stands");
            }
            ToLink::AskToCompare => {
                note!(self, "vm {vm}: the backup has its stream, and is asked to compare");
            }
            _ => {}
        }
        self.tell_link(vm, message);
    }

    /// The loop answers a guest. The reply leaves later.
    fn answered(&mut self, vm: usize, id: RequestId, ok: bool, published: Seq) -> Checked {
        let run = self.vms[vm].run.as_mut().expect("runs");
        if let Some(of) = run.others.remove(&id) {
            return self.other_answered(vm, of, ok);
        }
        let Some(submitted) = run.submitted.remove(&id) else {
            return fail(Checker::Stream, format!("vm {vm}: {id:?} is answered twice"));
        };
        let mode = run.mode;
        let (group, writer) = (self.plan.vms[vm].group, WriterId(self.plan.vms[vm].writer));
        let seq = submitted.repair.max(submitted.seq).unwrap_or_default();
        // Rule 1: before, not after.
        check(published >= seq, Checker::PublishBeforeComplete, || {
            format!("vm {vm}: write {seq} is completed, P says {published}")
        })?;
        if mode == Mode::Sync && ok {
            let durable = self.backup.groups[group].told_durable.get(writer);
            check(seq <= durable, Checker::SyncWaits, || {
                format!("vm {vm}: write {seq} is completed, the backup has {durable}")
            })?;
        }
        let point = match seq {
            // Refused by the loop itself: nothing was written.
            Seq::ZERO if !ok => Point::default(),
            Seq::ZERO => Point { life: self.vms[vm].run.as_ref().expect("runs").life, seq },
            _ => Point { life: self.vms[vm].oracle.life(), seq },
        };
        if ok {
            self.check_fua(vm, &submitted)?;
        }
        self.vms[vm].guest.holds(writer.0, point);
        self.reply_is_due(vm, submitted.from, ok, point);
        Ok(())
    }

    // ---- the end

    /// A daemon is to end cleanly.
    pub(crate) fn drain(&mut self, host: usize) {
        for group in 0..self.plan.groups.len() {
            let mut here = self.members_on(host, group);
            here.retain(|vm| self.vms[*vm].run.as_ref().is_some_and(|run| !run.draining));
            here.iter().for_each(|vm| self.vms[*vm].run.as_mut().expect("runs").draining = true);
            here.retain(|vm| self.plan.vms[*vm].is_writer());
            let port = |vm: &usize| self.vms[*vm].run.as_ref().expect("runs").port.clone();
            let ports: Vec<_> = here.iter().map(port).collect();
            let ports: Vec<_> = ports.iter().map(|port| &**port).collect();
            let answers = ending::drain(self.plan.groups[group].form, &ports);
            for (vm, drained) in here.into_iter().zip(answers) {
                self.vms[vm].run.as_mut().expect("runs").drained = Some(drained);
            }
        }
    }

    /// The answer to a drain, if it has come.
    fn look_whether_drained(&mut self, vm: usize) -> Checked {
        let Some(run) = self.vms[vm].run.as_mut().filter(|run| run.draining && !run.ended) else {
            return Ok(());
        };
        let drained = match (&run.owner, &mut run.drained) {
            (None, _) => Drained { seq: Seq::ZERO, hlc: Hlc(0), marks: None },
            (Some(_), Some(answer)) => match answer.try_recv() {
                Ok(Some(drained)) => drained,
                _ => return Ok(()),
            },
            (Some(_), None) => return Ok(()),
        };
        run.ended = true;
        let (is_alone, seq) = (run.owner.is_none(), drained.seq);
        if !is_alone {
            self.check_drained(vm, &drained)?;
        }
        let run = self.vms[vm].run.as_ref().expect("just seen");
        let is_clean = drained.keep(&run.state);
        note!(self, "vm {vm} drained at {seq}, whole {is_clean:?}");
        if is_alone {
            self.tell_link(vm, ToLink::Detach(None));
        }
        let host = self.plan.vms[vm].host;
        let vms = self.vms_of(host);
        if vms.iter().all(|vm| self.vms[*vm].run.as_ref().is_some_and(|run| run.ended)) {
            let run = self.hosts[host].daemon.as_ref().expect("its members run").run;
            // The link has the last word, which mostly arrives, and does where nothing fails.
            let goodbye = if self.ends_whole.is_some() { 500 * MS..800 * MS } else { MS..300 * MS };
            let after = self.rng.range(goodbye);
            self.schedule.after(after, Event::After(Later::DaemonEnds { host, run }));
        }
        Ok(())
    }

    // ---- checkers

    /// Rule 6: what status would say.
    fn check_phase(&self, vm: usize) -> Checked {
        let state = &self.vms[vm];
        let run = state.run.as_ref().expect("runs");
        if run.owner.is_none() {
            return Ok(());
        }
        let writer = WriterId(self.plan.vms[vm].writer);
        let slot = &self.backup.groups[self.plan.vms[vm].group];
        let (durable, told) = (slot.told_durable.get(writer), slot.told.get(writer));
        // A daemon that ends says so first, and no copy is begun any more.
        let false_sync = run.refusal.is_none()
            && !run.draining
            && run.phase() == Phase::Replicating
            && !state.oracle.is_in_sync_at(durable, told);
        check(!false_sync, Checker::NoFalseSync, || {
            format!("vm {vm} says that it replicates, committed is only {told}")
        })
    }
}

impl Drop for MemberRun {
    fn drop(&mut self) {
        if let Some(owner) = &mut self.owner {
            driver::end(owner);
        }
    }
}

impl MemberRun {
    /// Before its loop has begun.
    #[allow(clippy::too_many_arguments)] // The parts of the one thing that it makes.
    pub(crate) fn new(
        run: Run,
        channel: Channel,
        state: MemberState<Memory>,
        (port, messages, wake): (Arc<OwnerPort<ToOwner>>, Receiver<ToOwner>, EventFd),
        (gate, control, pending): (Arc<SimGate>, Arc<NotedGate>, Arc<Pending>),
        (view, owner_stats, pulse): (Arc<OwnerView>, Arc<OwnerStats>, Arc<Pulse>),
    ) -> Self {
        Self {
            run,
            channel,
            state,
            owner: None,
            view,
            owner_stats,
            shapes: Vec::new(),
            ends: Rc::default(),
            is_carried_out: false,
            queue: Rc::default(),
            accepting: BTreeMap::new(),
            taken: 0,
            connections: BTreeMap::new(),
            life: 0,
            unrecorded: BTreeMap::new(),
            is_recorded: false,
            log_counts: (0, 0),
            goes_on: false,
            redone: Arc::default(),
            tears_until_ns: 0,
            was_sound: false,
            has_died: None,
            port,
            messages,
            wake,
            gate,
            control,
            pending,
            is_incomplete: false,
            gate_due: false,
            submitted: BTreeMap::new(),
            mode: Mode::Async,
            in_flight: BTreeMap::new(),
            local_ops: BTreeMap::new(),
            op_requests: BTreeMap::new(),
            step_of: None,
            others: BTreeMap::new(),
            poisoned: BTreeSet::new(),
            attached: false,
            refusal: None,
            draining: false,
            holds: false,
            drained: None,
            ended: false,
            was_leased: false,
            heard_before: None,
            asks: None,
            unacked: VecDeque::new(),
            left_bytes: 0,
            pulse,
            beating: None,
            verifications: Verifications::default(),
            looked: None,
        }
    }

    /// Whether nothing is under way locally, nor on the way to the backup.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let Some(owner) = &self.owner else { return true };
        self.submitted.is_empty()
            && self.local_ops.is_empty()
            && self.others.is_empty()
            && owner.sequencer().is_started()
            && tidelock_daemon_core::owner::is_settled(owner.sequencer())
    }

    /// Where the member stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.owner.as_ref().map_or(Phase::WaitingForBackup, Owner::phase)
    }

    /// The progress of a copy of its disks, if one is under way.
    #[must_use]
    pub fn copied(&self, now: MonoNanos) -> Option<copy_job::Progress> {
        self.owner.as_ref()?.copying().progress(now)
    }

    /// True if its activity log says anything.
    #[must_use]
    pub fn is_logged(&self) -> bool {
        let owner = self.owner.as_ref();
        owner.is_some_and(|owner| !matches!(owner.activity().standing(), Standing::Off))
    }

    /// Guests' writes that are not completed, also those of a guest that has died since.
    #[must_use]
    pub fn open_writes(&self) -> usize {
        self.submitted.len()
    }

    /// Whether one of them overlaps this.
    #[must_use]
    pub fn is_writing(&self, extent: Extent) -> bool {
        self.submitted.values().any(|submitted| submitted.extent.overlaps(&extent))
    }

    /// Operations in flight and waiting, for the bound.
    #[must_use]
    pub fn queued(&self) -> usize {
        let waiting = self.owner.as_ref().map_or(0, |owner| owner.sequencer().waiting());
        waiting + self.local_ops.len()
    }

    /// Makes the process die at one of the next records.
    pub(crate) fn is_to_die(&mut self, tear: Tear, until_ns: u64) {
        self.tears_until_ns = until_ns;
        self.queue.tears(Some(tear));
    }

    /// True if its loop turns.
    pub(crate) fn serves(&self) -> bool {
        self.owner.is_some() && !self.ended && self.has_died.is_none() && !self.hangs()
    }
}
