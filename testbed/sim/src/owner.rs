//! The owner loop of one member, put together from production's parts. Its turns are what
//! production's loop does with the same messages and completions; what is simulated is the ring,
//! see [`crate::local`].

use crate::beating::Beating;
use crate::failure::{Checked, Checker, check};
use crate::gate::{MemberGate, SimGate};
use crate::guest::{Ask, Known, Packet};
use crate::host::ToOwner;
use crate::local::LocalOp;
use crate::logging::Logged;
use crate::schedule::{MS, US};
use crate::spilling::Tear;
use crate::verifying::Looked;
use crate::world::{Event, Run, World, note};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use tidelock_daemon::activity::geometry::merged;
use tidelock_daemon::activity::{ActivityLog, Attachment, Compare};
use tidelock_daemon::copy_job::Purpose;
use tidelock_daemon::link::Refusal;
use tidelock_daemon::link::port::{FromLink, OwnerPort, ToLink};
use tidelock_daemon::owner::Phase;
use tidelock_daemon::owner::admitted::Admitted;
use tidelock_daemon::owner::contact::Contact;
use tidelock_daemon::owner::copying::Copying;
use tidelock_daemon::owner::idling::{Idling, LastWord};
use tidelock_daemon::owner::replication::{self, Clocks};
use tidelock_daemon::owner::spilling::Spilling;
use tidelock_daemon::owner::verifying::Verifying;
use tidelock_daemon::sequencer::{Extent, OpId, RequestId, Sequencer};
use tidelock_netfilter::gate::Pending;
use tidelock_netfilter::release_queue::ReleaseQueue;
use tidelock_protocol::hlc::{Hlc, WallClock};
use tidelock_protocol::ids::{Channel, DiskId, Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form, LogAge};
use tidelock_protocol::record::Effect;
use tidelock_protocol::vector::CountVector;
use tidelock_uring::EventFd;

/// How often what cannot go on by itself is tried again, as in production.
const TICK_NS: u64 = 100 * MS;
/// What it takes to put a ceiling on record.
const CEILING_NS: u64 = 3 * MS;
/// How often a writer says that it has nothing to write.
const IDLE_NS: u64 = 20 * MS;

/// What became of a guest's request at the sequencer.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) extent: Extent,
    /// Of the payload, to know it again; `None` for zeroes.
    pub(crate) data: Option<*const u8>,
    pub(crate) seq: Option<Seq>,
    /// The copy that repairs a failed write.
    pub(crate) repair: Option<Seq>,
    pub(crate) failed: bool,
    /// What the guest knew when it asked.
    pub(crate) known: Known,
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
    pub activity: ActivityLog,
    /// Production's.
    pub(crate) contact: Contact,
    /// It is to look again.
    pub(crate) awaits_contact: bool,
    /// The number of the life that it begins.
    pub(crate) life: usize,
    /// Writes without a record that were begun: of which request, where, and what.
    pub(crate) unrecorded: BTreeMap<OpId, (Option<RequestId>, Extent, Effect)>,
    /// Requests that wait for it.
    pub(crate) held_back: BTreeMap<u64, Logged>,
    /// How often it was full, as counted by now.
    pub(crate) overflows: u64,
    /// Its block under way.
    pub(crate) log_write: Option<(u64, Vec<u8>)>,
    /// Production's.
    pub spilling: Spilling,
    /// It goes on with what another process has left, and the backup has not attached it yet.
    pub(crate) goes_on: bool,
    /// How its daemon is to die, if it does before this time.
    pub(crate) tear: Option<(Tear, u64)>,
    /// Its daemon has died of that, and is about to be gone. Whether the next one must be able to go on.
    pub(crate) has_died: Option<bool>,
    /// Production's.
    pub port: Arc<OwnerPort<ToOwner>>,
    /// Its receiving end.
    pub(crate) messages: Receiver<ToOwner>,
    /// Its wake-up.
    pub wake: EventFd,
    /// The group's gate on this host.
    pub gate: Arc<SimGate>,
    /// Production's.
    pub queue: ReleaseQueue,
    /// P.
    pub pending: Arc<Pending>,
    /// The wall clock, as far as it is believed.
    pub wall: WallClock,
    /// Guests are served. Among several members, after an unclean stop: from the attachment on.
    pub serving: bool,
    /// P as last looked at, with what tags have brought.
    pub(crate) observed: CountVector,
    pub(crate) idling: Idling,
    /// What packets that are taken up now are stamped with.
    pub stamp: CountVector,
    /// Packets that wait, by id.
    pub held: BTreeMap<u32, Packet>,
    /// Packets that nobody has taken up.
    pub kernel_queue: VecDeque<Packet>,
    /// Ids.
    pub next_packet: u32,
    /// P was not complete when the gate's thread looked last.
    pub(crate) is_incomplete: bool,
    /// The gate's thread is going to look.
    pub gate_due: bool,
    pub(crate) admitted: Admitted,
    /// How far the activity log is, as the link was told.
    pub(crate) told_age: LogAge,
    pub(crate) submitted: BTreeMap<RequestId, Submitted>,
    pub(crate) local_ops: BTreeMap<OpId, LocalOp>,
    /// The request of a local write.
    pub(crate) op_requests: BTreeMap<OpId, RequestId>,
    pub(crate) reads: BTreeSet<u64>,
    /// With their disks and numbers.
    pub(crate) flushes: BTreeMap<u64, (DiskId, u64)>,
    pub(crate) poisoned: BTreeSet<DiskId>,
    pub(crate) attached: bool,
    /// Why the backup refuses.
    pub refusal: Option<Refusal>,
    pub(crate) draining: bool,
    pub(crate) last_word: LastWord,
    /// No request is taken, for a planned switch.
    pub(crate) holds: bool,
    /// The loop has ended cleanly.
    pub ended: bool,
    pub(crate) tick_armed: bool,
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
    /// Its heartbeats, if it has any.
    pub(crate) beating: Option<Beating>,
    /// Production's.
    pub(crate) verifying: Verifying,
    /// A verification was asked for, and has not ended.
    pub(crate) wants_verify: bool,
    /// Until then the schedule begins none.
    pub(crate) verify_rests_until_ns: u64,
    /// For the checker: what there was when it began.
    pub(crate) looked: Option<Looked>,
}
impl World {
    // ---- what guests ask

    /// A guest's request comes to the owner loop, if one runs.
    pub fn submit(&mut self, vm: usize, request: u64) -> Checked {
        let latency = self.local_latency(vm);
        if self.vms[vm].run.as_ref().is_none_or(|run| run.draining || run.holds || !run.serving) {
            // It stays in the socket, and the next daemon is asked.
            return Ok(());
        }
        let state = &mut self.vms[vm];
        let run = state.run.as_mut().expect("runs");
        let id = run.run;
        match state.guest.asked[&request].clone() {
            Ask::Write { extent, effect, fua, known, .. } => {
                let logged = Logged { extent, effect, fua, known };
                if run.activity.admit(request, extent) {
                    self.sequence(vm, request, logged)?;
                } else {
                    run.held_back.insert(request, logged);
                    self.counts.logged += 1;
                }
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
            Ask::Flush { disk, .. } => {
                run.flushes.insert(request, (disk, run.activity.flush_begins(disk)));
                self.schedule.after(latency * 2, Event::FlushDone { vm, run: id, request });
                Ok(())
            }
        }
    }

    /// The clocks of a host as its daemon believes them.
    pub(crate) fn member_clocks(&mut self, vm: usize) -> Clocks {
        let clocks = self.clocks(self.plan.vms[vm].host);
        let Some(run) = &mut self.vms[vm].run else { return clocks };
        Clocks { wall_ms: run.wall.read(clocks.wall_ms, clocks.now), ..clocks }
    }

    /// What the member has heard of others before it sent the request at hand.
    pub(crate) fn observe_tags(&mut self, vm: usize) {
        let group = &self.plan.groups[self.plan.vms[vm].group];
        let Some(run) = self.vms[vm].run.as_mut().filter(|_| group.has_several()) else { return };
        run.observed.merge(&run.pending.read());
        match group.form {
            Form::Vector => run.sequencer.depends_on(&run.observed),
            Form::Hlc => run.sequencer.observe(run.pending.read_hlc()),
        }
    }

    /// Whether everything that a member may depend on is in C: it may end cleanly.
    pub(crate) fn is_covered(&mut self, vm: usize) -> bool {
        self.observe_tags(vm);
        let group = &self.plan.groups[self.plan.vms[vm].group];
        let run = self.vms[vm].run.as_ref().expect("runs");
        let (committed, watermark) = run.port.told();
        match group.form {
            _ if !group.has_several() || !self.plan.vms[vm].is_writer() => true,
            Form::Vector => committed.covers(&run.observed),
            Form::Hlc => watermark >= run.pending.read_hlc(),
        }
    }

    pub(crate) fn local_latency(&mut self, vm: usize) -> u64 {
        self.rng.span(self.plan.local_ns) * self.vms[vm].slow_factor
    }

    pub(crate) fn local_fails(&mut self, vm: usize) -> bool {
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
        self.vms[vm].run.as_mut().expect("runs").sequencer.is_read(extent);
        self.owner_turn(vm)?;
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
        let (disk, number) = member.flushes.remove(&request).expect("it began");
        // Also if the guest has died.
        if fails {
            member.poisoned.insert(disk);
        } else {
            state.disks[usize::from(disk.0)].sync();
        }
        member.activity.flush_ended(disk, number, !fails);
        self.guest_flush_done(vm, request, !fails)
    }

    pub(crate) fn runs_as(&self, vm: usize, run: Run) -> bool {
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
            if member.hangs() {
                return Ok(());
            }
            let Ok(message) = member.messages.try_recv() else { break };
            match message {
                ToOwner::Link(message) => self.hear_link(vm, message)?,
                ToOwner::SetMode(mode) => {
                    self.act(vm)?;
                    self.vms[vm].run.as_mut().expect("runs").sequencer.set_mode(mode);
                    self.tell_link(vm, ToLink::Mode(mode));
                }
                ToOwner::Heartbeat(number) => {
                    member.beating.as_mut().expect("it is watched").want(number);
                }
                ToOwner::Verify { repair, rate_bytes_per_s } => {
                    self.begin_verify(vm, repair, rate_bytes_per_s);
                }
                ToOwner::StopVerify => member.copying.give_up_verify("it was stopped on command"),
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
        let clocks = self.member_clocks(vm);
        let several = self.plan.groups[self.plan.vms[vm].group].has_several();
        let writer = WriterId(self.plan.vms[vm].writer);
        match message {
            FromLink::Attached { attached, compares, .. }
                if self.vms[vm].run.as_ref().is_some_and(|run| run.spilling.stands()) =>
            {
                note!(self, "vm {vm} attached while its stream stands: {:?}", attached.stream.copy);
                self.attached_while_standing(vm, &attached, compares, clocks);
            }
            FromLink::Attached { attached, first, .. } => {
                note!(
                    self,
                    "vm {vm} attached: durable {} copy {:?} epoch {}",
                    attached.durable,
                    attached.stream.copy,
                    attached.epoch
                );
                self.check_nothing_compared(vm, &attached)?;
                self.check_has_grown(vm)?;
                let unrecorded = self.begin_recording(vm, &attached, first, clocks);
                let state = &mut self.vms[vm];
                if attached.stream.copy == CopyState::Whole && state.oracle.continues_whole()? {
                    self.counts.clean_starts += 1;
                }
                let run = state.run.as_mut().expect("runs");
                run.attached = true;
                run.refusal = None;
                let must_compare =
                    matches!(attached.stream.copy, CopyState::Partial | CopyState::Resyncing);
                if must_compare {
                    self.depend_on_comparison(
                        vm,
                        attached.durable,
                        Hlc(attached.stream.last_hlc.0 + 1),
                    );
                }
                let state = &mut self.vms[vm];
                let run = state.run.as_mut().expect("runs");
                let compare = run.activity.attached(&Attachment {
                    copy: attached.stream.copy,
                    epoch: attached.epoch,
                    durable: attached.durable,
                    basis: attached.stream.basis.clone(),
                    copying: run.copying.is_copying(),
                });
                self.counts.mapped_resyncs += u64::from(matches!(compare, Compare::Mapped(_)));
                let disks = &self.plan.vms[vm].disks;
                let ranges =
                    |purpose| ranges_of(disks, &state.disks, purpose, compare.clone(), unrecorded);
                note!(self, "vm {vm} is to compare {compare:?}");
                run.spilling.attached();
                run.goes_on = false;
                run.copying.attached("", attached.stream.copy, ranges, clocks.now);
                if several && must_compare {
                    run.copying.await_floor();
                }
                self.with_spilling(vm, clocks, |spilling, _, turn| spilling.mark(turn));
                self.begin_serving(vm)?;
            }
            FromLink::Floor { pending, hlc } => {
                note!(self, "vm {vm} may have known {pending}, {hlc}");
                let run = self.vms[vm].run.as_mut().expect("runs");
                run.pending.merge(&pending);
                run.pending.publish_at(writer, Seq::ZERO, hlc);
                run.copying.floor_heard(pending.get(writer));
                self.observe_tags(vm);
            }
            FromLink::MayServeUnrecorded => self.serve_unrecorded(vm, clocks)?,
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

    /// As production does it ([`tidelock_daemon::owner`], `others.rs`). Returns whether it has anybody to tell.
    pub(crate) fn depend_on_comparison(&mut self, vm: usize, last: Seq, hlc: Hlc) -> bool {
        let plan = &self.plan.vms[vm];
        let several = self.plan.groups[plan.group].has_several();
        if several {
            let writer = WriterId(plan.writer);
            let state = &mut self.vms[vm];
            state.pending.publish_at(writer, last.next(), hlc);
            state.named = (state.named.0.max(last.next()), state.named.1.max(hlc));
        }
        several
    }

    pub(crate) fn tell_link(&mut self, vm: usize, message: ToLink) {
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
        member.activity.retry();
        self.owner_turn(vm)
    }

    /// One turn: what production's loop does after it has taken completions.
    pub fn owner_turn(&mut self, vm: usize) -> Checked {
        // While a daemon is being put together its members have no link yet.
        let stopped = |run: &MemberRun| run.ended || run.has_died.is_some() || run.hangs();
        let ended = self.vms[vm].run.as_ref().is_none_or(stopped);
        if ended || self.hosts[self.plan.vms[vm].host].daemon.is_none() {
            return Ok(());
        }
        let clocks = self.member_clocks(vm);
        let writer = self.plan.vms[vm].writer_id();
        let ceiling_ms = self.vms[vm].state.lock().expect("one thread").hlc_ceiling_ms;
        let was_active = {
            let run = self.vms[vm].run.as_mut().expect("runs");
            run.sequencer.set_ceiling(ceiling_ms, clocks.now, clocks.wall_ms);
            let (gate, pending) = (run.gate.clone(), run.pending.clone());
            let gate = MemberGate { gate, writer, pending };
            let MemberRun { sequencer, copying, port, .. } = run;
            let was_active = copying.is_active();
            replication::take_acks("", sequencer, copying, port, &gate, clocks);
            was_active
        };
        self.drive_spilling(vm, clocks);
        let run = self.vms[vm].run.as_mut().expect("runs");
        if !run.spilling.stands() {
            let MemberRun { sequencer, copying, port, .. } = run;
            replication::drive_copies(sequencer, copying, port, clocks);
        }
        self.drive_contact(vm, clocks);
        self.drive_idle(vm, clocks);
        self.drive_heartbeat(vm);
        self.drive_log(vm)?;
        self.act(vm)?;
        // What was freed since.
        self.drive_log(vm)?;
        self.act(vm)?;
        self.hand_over(vm);
        self.tell_pulse(vm);
        self.follow_verify(vm)?;
        let run = self.vms[vm].run.as_mut().expect("runs");
        if was_active && !run.copying.is_active() && run.copying.is_whole() {
            self.counts.copies += 1;
        }
        let done = run.draining
            && run.submitted.is_empty()
            && run.held_back.is_empty()
            && run.reads.is_empty()
            && run.flushes.is_empty()
            && replication::is_settled(&run.sequencer)
            && self.is_covered(vm);
        let clocks = self.member_clocks(vm);
        let group = &self.plan.groups[self.plan.vms[vm].group];
        let has_peers = group.has_several() && group.form == Form::Hlc;
        let run = self.vms[vm].run.as_mut().expect("runs");
        let may_tell = has_peers && run.attached && run.sequencer.is_started();
        if done && (!may_tell || run.last_word.say(&mut run.sequencer, clocks)) {
            self.drained(vm);
            return Ok(());
        }
        if done {
            self.act(vm)?;
        }
        let run = self.vms[vm].run.as_mut().expect("runs");
        let MemberRun { sequencer, copying, activity, spilling, port, draining, .. } = run;
        if sequencer.waits_for_ceiling() {
            let id = run.run;
            self.schedule.after(CEILING_NS, Event::CeilingWanted { vm, run: id });
        }
        let others = *draining || activity.wants_acks() || spilling.wants_acks();
        replication::ask_for_acks(sequencer, copying, port, others);
        let awaits_contact = std::mem::take(&mut run.awaits_contact);
        let wants_tick = awaits_contact
            || run.copying.needs_tick()
            || run.activity.needs_tick()
            || run.spilling.needs_tick();
        if wants_tick && !run.tick_armed {
            run.tick_armed = true;
            let id = run.run;
            self.schedule.after(TICK_NS, Event::Tick { vm, run: id });
        }
        self.check_phase(vm)?;
        self.check_backlog(vm)
    }

    /// In the HLC form a writer that has nothing to write says so, while others write.
    fn drive_idle(&mut self, vm: usize, clocks: Clocks) {
        let group = &self.plan.groups[self.plan.vms[vm].group];
        let hlc_form = group.has_several() && group.form == Form::Hlc;
        let run = self.vms[vm].run.as_mut().expect("runs");
        if !hlc_form || !run.attached || !run.sequencer.is_started() || run.draining {
            return;
        }
        let frontier = run.port.frontier().max(run.pending.read_hlc());
        run.idling.heard(frontier, clocks.now);
        if run.idling.armed {
            return;
        }
        if !run.idling.wants(run.sequencer.record_hlc(), clocks.now) {
            run.port.wake_at_frontier();
            if run.port.frontier() <= frontier {
                return;
            }
        }
        run.idling.armed = true;
        let id = run.run;
        self.schedule.after(IDLE_NS, Event::Idle { vm, run: id });
    }

    /// The time for an idle record has come, if it is needed.
    pub fn idle_due(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let clocks = self.member_clocks(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        run.idling.armed = false;
        run.idling.heard(run.port.frontier(), clocks.now);
        let last = run.sequencer.record_hlc();
        let quiet_since = last.physical_ms() + IDLE_NS / MS;
        let is_due = run.idling.frontier > last || quiet_since <= clocks.wall_ms;
        if run.attached && !run.draining && is_due && run.idling.wants(last, clocks.now) {
            run.sequencer.observe(run.idling.frontier);
            run.sequencer.idle(clocks.now, clocks.wall_ms);
        }
        self.owner_turn(vm)
    }

    /// Rule 6: what status would say.
    fn check_phase(&self, vm: usize) -> Checked {
        let state = &self.vms[vm];
        if !self.plan.vms[vm].is_writer() {
            return Ok(());
        }
        let run = state.run.as_ref().expect("runs");
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

impl MemberRun {
    /// Whether nothing is under way locally, nor on the way to the backup.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.submitted.is_empty()
            && self.held_back.is_empty()
            && self.local_ops.is_empty()
            && self.reads.is_empty()
            && self.flushes.is_empty()
            && self.sequencer.is_started()
            && replication::is_settled(&self.sequencer)
    }

    /// Where the member stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.sequencer.serves_unrecorded() {
            _ if self.spilling.stands() => Phase::Overflowed,
            true => Phase::Unrecorded,
            false => self.copying.phase(self.attached),
        }
    }

    /// Guests' writes that are not completed, also those of a guest that has died since.
    #[must_use]
    pub fn open_writes(&self) -> usize {
        self.submitted.len() + self.held_back.len()
    }

    /// Whether one of them overlaps this.
    #[must_use]
    pub fn is_writing(&self, extent: Extent) -> bool {
        let mut extents = self.submitted.values().map(|s| s.extent);
        let mut held_back = self.held_back.values().map(|l| l.extent);
        extents.any(|e| e.overlaps(&extent)) || held_back.any(|e| e.overlaps(&extent))
    }

    /// Operations in flight and waiting, for the bound.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.sequencer.waiting() + self.local_ops.len() + self.held_back.len()
    }
}

pub(crate) fn ranges_of(
    plans: &[crate::scenario::DiskPlan],
    disks: &[crate::disk::LocalDisk],
    purpose: Purpose,
    compare: Compare,
    unrecorded: Vec<Extent>,
) -> Vec<Extent> {
    if let (Purpose::Compare, Compare::Mapped(ranges)) = (purpose, compare) {
        return ranges;
    }
    let mut extents = match purpose {
        Purpose::Initial => unrecorded,
        _ => Vec::new(),
    };
    for (nth, (plan, disk)) in plans.iter().zip(disks).enumerate() {
        let disk_id = DiskId(nth as u16);
        let whole = Extent { disk: disk_id, offset: 0, len_bytes: disk.size_bytes() };
        match purpose {
            Purpose::Compare | Purpose::Verify { .. } => extents.push(whole),
            // Written since: a file system would have allocated it.
            Purpose::Initial if disk.live() != plan.content => extents.push(whole),
            Purpose::Initial => extents.extend(plan.allocated.iter().map(|range| Extent {
                disk: disk_id,
                offset: range.start,
                len_bytes: range.end - range.start,
            })),
        }
    }
    merged(extents)
}
