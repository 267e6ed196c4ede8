//! A backlog on disk of a member: production's, with its files on a disk that is never synced ([`crate::files`]). A daemon is
//! killed between its operations, and within an append. The next one goes on with what is there, or not, as production
//! decides; and must, if nothing but the stream was missing at the backup and the host has kept its power.

use crate::disk::LocalDisk;
use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::files::SimFiles;
use crate::gate::MemberGate;
use crate::local::LocalOp;
use crate::owner::MemberRun;
use crate::plant::{OnTheWay, Plant};
use crate::rng::Rng;
use crate::scenario::{FAULTS, Fault, Scenario};
use crate::schedule::MS;
use crate::world::{Vm, World, note};
use std::sync::Arc;
use tidelock_daemon::backlog::{self, BacklogError, Expected, Files, Left};
use tidelock_daemon::link::port::{AttachedStream, ToLink};
use tidelock_daemon::overflow::Step;
use tidelock_daemon::owner::admitted::Admitted;
use tidelock_daemon::owner::replication::Clocks;
use tidelock_daemon::owner::spilling::{Ends, Opening, Seen, Spilling, Turn};
use tidelock_daemon::sequencer::{Action, RECORD_OVERHEAD_BYTES};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Incarnation, Seq};
use tidelock_protocol::limits::COPY_MAX_BYTES;
use tidelock_protocol::record::{Effect, Record};

/// The largest record, with what it costs besides.
const RECORD_MAX_BYTES: u64 = COPY_MAX_BYTES as u64 + RECORD_OVERHEAD_BYTES;
/// Within this a daemon that is to die within an append has made one, or it lives.
const TEARS_WITHIN_NS: u64 = 1_000 * MS;

/// A backlog on disk. How far the writer may be ahead with it is its limit.
#[derive(Clone, Copy, Debug)]
pub struct BacklogPlan {
    /// Of that, so much in memory.
    pub memory_bytes: u64,
    /// At this size segments are closed.
    pub segment_bytes: u64,
    /// At the limit guests go on.
    pub stands: bool,
    /// For what its disk does.
    seed: u64,
}

/// How a daemon is to die.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tear {
    /// Within the append of a record.
    Within,
    /// Right behind it, before its local write.
    Behind,
}

/// Draws who has one. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    if !rng.chance(1, 3) {
        return;
    }
    // What is in memory is what may be under way: on a narrow link less than that would be the bottleneck.
    let parts: &[u64] = if plan.narrow.is_some() { &[2] } else { &[2, 4, 16] };
    for group in 0..plan.groups.len() {
        let several = plan.groups[group].may_have_several();
        if several && rng.chance(1, 2) {
            continue;
        }
        let stands = rng.chance(1, 2);
        for vm in plan.vms.iter_mut().filter(|vm| vm.group == group && vm.is_writer()) {
            let limit_bytes = vm.backlog_limit_bytes;
            vm.backlog = Some(BacklogPlan {
                memory_bytes: (limit_bytes / *rng.pick(parts)).max(1 << 10),
                segment_bytes: limit_bytes / *rng.pick(&[1, 4, 16]),
                stands,
                seed: rng.number(),
            });
        }
    }
    for (weight, fault) in plan.fault_weights.iter_mut().zip(FAULTS) {
        *weight = match fault {
            Fault::KillDaemon => 16,
            Fault::Partition | Fault::KillBackup => (*weight).max(6),
            _ => *weight,
        };
    }
}

impl BacklogPlan {
    /// Its directory.
    #[must_use]
    pub fn files(&self, name: &str) -> Arc<SimFiles> {
        Arc::new(SimFiles::new(name, Rng::new(self.seed)))
    }
}

impl MemberRun {
    /// By the simulator's own reckoning: whether the next process of the run must be able to go on.
    fn must_be_gone_on_with(&self) -> bool {
        let Some(backlog) = self.spilling.backlog() else { return false };
        let (segments, on_disk_bytes) = backlog.on_disk();
        let has_records = on_disk_bytes > (segments * backlog::HEADER_BYTES) as u64;
        has_records
            && (self.copying.is_whole() || self.goes_on)
            && self.copying.suspect_bytes() == 0
            && self.poisoned.is_empty()
            && !backlog.has_failed()
            && !backlog.lacks_some()
            && self.spilling.records()
            && !self.ended
    }
}

impl World {
    fn boot_of(&self, host: usize) -> [u8; 16] {
        let is_ignored = self.plant == Some(Plant::OnTheWay(OnTheWay::BootIgnored));
        let boots = if is_ignored { 0 } else { self.hosts[host].boots };
        u128::from(boots).to_be_bytes()
    }

    fn backlog_identity(&self, vm: usize) -> [u8; 32] {
        let mut identity = [0; 32];
        identity[0] = vm as u8;
        for (disk, at) in self.plan.vms[vm].disks.iter().zip(identity[1..].chunks_mut(4)) {
            at.copy_from_slice(&(disk.content.len() as u32).to_le_bytes());
        }
        identity
    }

    fn backlog_bug(&self) -> Option<backlog::PlantedBug> {
        match self.plant {
            Some(Plant::Backlog(bug)) => Some(bug),
            _ => None,
        }
    }

    /// What the run before has left, if this process can go on with it: then what may be missing on the local disks is
    /// done again.
    pub(crate) fn find_left(&mut self, vm: usize) -> Checked<Option<Left>> {
        let must = std::mem::take(&mut self.vms[vm].must_go_on);
        let Some(files) = self.vms[vm].backlog_files.clone() else { return Ok(None) };
        let (incarnation, epoch, is_clean, fenced) = {
            let state = self.vms[vm].state.lock().expect("one thread");
            let stream = state.stream.map_or(Incarnation(0), |stream| stream.number);
            (stream, state.epoch, state.clean.is_some(), state.fenced)
        };
        if self.vms[vm].switched || is_clean || fenced || !self.knows_what_it_heard(vm) {
            return Ok(None);
        }
        let boot = self.boot_of(self.plan.vms[vm].host);
        let identity = self.backlog_identity(vm);
        let expected = Expected { incarnation, epoch, boot, identity };
        let files: Arc<dyn Files> = files;
        let mut left = match backlog::find(&files, &expected) {
            Ok(left) => left,
            Err(why) => {
                note!(self, "vm {vm}: its backlog on disk is not gone on with: {why}");
                return check(!must, Checker::NothingCompared, || {
                    format!("vm {vm}: the stream was whole, and is not gone on with: {why}")
                })
                .map(|()| None);
            }
        };
        if let Some(bug) = self.backlog_bug() {
            left.plant(bug);
        }
        if self.local_fails(vm) {
            note!(self, "vm {vm}: what was under way cannot be done again");
            return Ok(None);
        }
        let Vm { disks, oracle, .. } = &mut self.vms[vm];
        let redone = left.redo(|record| {
            do_again(record, disks);
            oracle.done_again(record);
            Ok::<(), BacklogError>(())
        });
        disks.iter_mut().for_each(LocalDisk::sync);
        let redone = redone.expect("it was verified");
        let (first, last) = (left.first(), left.last());
        note!(self, "vm {vm} goes on with {first} to {last} on disk, {redone} done again");
        self.counts.gone_on += 1;
        let state = &mut self.vms[vm];
        let disks: Vec<_> = state.disks.iter().map(LocalDisk::live).collect();
        state.oracle.goes_on(&disks)?;
        Ok(Some(left))
    }

    /// Whether P, which outlives a daemon, names all that the guest has heard of others.
    fn knows_what_it_heard(&self, vm: usize) -> bool {
        let state = &self.vms[vm];
        let several = self.plan.groups[self.plan.vms[vm].group].has_several();
        !several || (state.kernel.is_some() && state.pending.incomplete().is_none())
    }

    /// Both ends of a member's backlog on disk, if it has one.
    pub(crate) fn open_backlog(
        &mut self,
        vm: usize,
        epoch: Epoch,
        incarnation: Incarnation,
        left: Option<Left>,
    ) -> Option<Ends> {
        let plan = &self.plan.vms[vm];
        let backlog = plan.backlog?;
        let opening = Opening {
            files: self.vms[vm].backlog_files.clone()?,
            segment_bytes: backlog.segment_bytes,
            limit_bytes: plan.backlog_limit_bytes,
            memory_limit_bytes: backlog.memory_bytes,
            stands_at_limit: backlog.stands,
            epoch,
            incarnation,
            boot: self.boot_of(plan.host),
            identity: self.backlog_identity(vm),
        };
        Some(opening.open(left).expect("nothing but appends fails"))
    }

    /// The parts of a member's loop that a turn of its backlog needs.
    pub(crate) fn with_spilling<R>(
        &mut self,
        vm: usize,
        clocks: Clocks,
        what: impl FnOnce(&mut Spilling, &mut Admitted, &mut Turn<'_>) -> R,
    ) -> R {
        let writer = self.plan.vms[vm].writer_id();
        let run = self.vms[vm].run.as_mut().expect("runs");
        let (gate, pending) = (run.gate.clone(), run.pending.clone());
        let gate = MemberGate { gate, writer, pending };
        let mut turn = Turn {
            member: "",
            sequencer: &mut run.sequencer,
            copying: &mut run.copying,
            activity: &mut run.activity,
            gate: &gate,
            is_poisoned: !run.poisoned.is_empty(),
            clocks,
        };
        what(&mut run.spilling, &mut run.admitted, &mut turn)
    }

    /// The part of a loop's turn that is about the backlog.
    pub(crate) fn drive_spilling(&mut self, vm: usize, clocks: Clocks) {
        let run = self.vms[vm].run.as_ref().expect("runs");
        if run.spilling.backlog().is_none() {
            return;
        }
        let seen = Seen {
            is_attached: run.attached,
            is_draining: run.draining || run.holds,
            is_left: self.vms[vm].switched || run.refusal.as_ref().is_some_and(|r| r.is_final()),
        };
        let step = self.with_spilling(vm, clocks, |spilling, _, turn| {
            spilling.drive(turn);
            spilling.drive_overflow(seen, turn)
        });
        match step {
            Some(Step::Stand) => {
                self.tell_link(vm, ToLink::Stands);
                self.counts.stood += 1;
                let state = &mut self.vms[vm];
                let run = state.run.as_mut().expect("runs");
                // What has no record from here on is what the next life begins with.
                (run.life, run.goes_on) = (state.oracle.lives(), false);
                let (last, hlc) = (run.sequencer.last_seq(), run.sequencer.unrecorded_hlc());
                if self.plant != Some(Plant::OnTheWay(OnTheWay::UnrecordedUnnamed)) {
                    self.depend_on_comparison(vm, last, hlc);
                }
                note!(self, "vm {vm}: its stream stands");
            }
            Some(Step::Ask) => {
                note!(self, "vm {vm}: the backup has its stream, and is asked to compare");
                self.tell_link(vm, ToLink::AskToCompare);
            }
            Some(Step::Over(_)) => note!(self, "vm {vm}: its backlog had been full"),
            Some(Step::Shut) | None => {}
        }
    }

    /// The backup has attached a member whose stream stands.
    pub(crate) fn attached_while_standing(
        &mut self,
        vm: usize,
        attached: &AttachedStream,
        compares: bool,
        clocks: Clocks,
    ) {
        let run = self.vms[vm].run.as_mut().expect("runs");
        run.attached = true;
        run.refusal = None;
        if !compares {
            return self.with_spilling(vm, clocks, |spilling, _, turn| {
                spilling.attached_while_standing(attached, turn);
            });
        }
        self.begin_compared_life(vm, attached);
        let (plans, disks) = (self.plan.vms[vm].disks.clone(), self.vms[vm].disks.clone());
        let mut said = None;
        self.with_spilling(vm, clocks, |spilling, _, turn| {
            let ranges = |purpose, compare, unrecorded| {
                said = Some(format!("{compare:?}"));
                crate::owner::ranges_of(&plans, &disks, purpose, compare, unrecorded)
            };
            spilling.record_again(attached, ranges, turn);
        });
        if self.depend_on_comparison(vm, attached.durable, Hlc(attached.stream.last_hlc.0 + 1)) {
            self.vms[vm].run.as_mut().expect("runs").copying.await_floor();
        }
        self.counts.returned += 1;
        note!(self, "vm {vm} is recorded again, and compares {said:?}");
    }

    /// A record was admitted: it is kept before its local write is begun.
    pub(crate) fn keep_record(&mut self, vm: usize, record: Record) {
        let clocks = self.member_clocks(vm);
        self.with_spilling(vm, clocks, |spilling, admitted, turn| {
            spilling.keep(record, admitted, turn);
        });
        let backlog = self.vms[vm].run.as_ref().and_then(|run| run.spilling.backlog());
        self.counts.spilled += u64::from(backlog.is_some_and(|b| b.meter().spilled() > 0));
    }

    // ---- a daemon that dies

    /// A daemon is to be killed: within an append or right behind it, if it has a backlog on disk, now and then.
    pub(crate) fn tears(&mut self, host: usize) -> bool {
        let vms = self.vms_of(host);
        let has_one = |vm: &usize| {
            let run = self.vms[*vm].run.as_ref();
            run.is_some_and(|run| run.spilling.backlog().is_some_and(|b| !b.has_failed()))
        };
        let vms: Vec<_> = vms.into_iter().filter(has_one).collect();
        if vms.is_empty() || !self.rng.chance(1, 2) {
            return false;
        }
        let vm = *self.rng.pick(&vms);
        let tear = *self.rng.pick(&[Tear::Within, Tear::Within, Tear::Behind]);
        let until_ns = self.schedule.now_ns() + TEARS_WITHIN_NS;
        self.vms[vm].run.as_mut().expect("just seen").tear = Some((tear, until_ns));
        true
    }

    /// A record is to be kept. Returns whether the daemon dies of it: then nothing of what comes after it happens.
    pub(crate) fn dies_of(&mut self, vm: usize, record: &Record) -> Checked<bool> {
        let now_ns = self.schedule.now_ns();
        let run = self.vms[vm].run.as_mut().expect("runs");
        let Some((tear, until_ns)) = run.tear.take() else { return Ok(false) };
        if now_ns > until_ns || !self.faulty {
            return Ok(false);
        }
        let mut must = run.must_be_gone_on_with();
        note!(self, "vm {vm}: its daemon dies: {tear:?} the append of {}", record.seq);
        match tear {
            Tear::Within => {
                let files = self.vms[vm].backlog_files.as_ref().expect("it has one");
                files.dies_within_next();
                let clocks = self.member_clocks(vm);
                self.with_spilling(vm, clocks, |spilling, _, turn| {
                    spilling.keep(record.clone(), &mut Admitted::default(), turn);
                });
            }
            Tear::Behind => {
                self.admit(vm, record.clone())?;
                must = self.vms[vm].run.as_ref().expect("runs").must_be_gone_on_with();
            }
        }
        self.counts.torn += 1;
        let run = self.vms[vm].run.as_mut().expect("runs");
        run.has_died = Some(must);
        let is_begun = self.plant == Some(Plant::OnTheWay(OnTheWay::WrittenBeforeKept));
        while let Some(action) = run.sequencer.poll_action() {
            if let Action::Write { op, extent, effect: Effect::Write(payload), fua } = action
                && is_begun
            {
                let data = payload.data().to_vec();
                run.local_ops.insert(op, LocalOp::Write { extent, data, fua });
            }
        }
        Ok(true)
    }

    /// Daemons that have died of it are gone.
    pub(crate) fn bury(&mut self) {
        for host in 0..self.hosts.len() {
            let vms = self.vms_of(host);
            let has_died =
                |vm: &usize| self.vms[*vm].run.as_ref().is_some_and(|run| run.has_died.is_some());
            if vms.iter().any(has_died) {
                self.end_daemon(host);
                let after = self.rng.span(600 * MS);
                self.later(Later::DaemonStarts { host }, after);
            }
        }
    }

    /// A process is gone: what it leaves is what the next one finds.
    pub(crate) fn leaves_backlog(&mut self, vm: usize, run: &MemberRun) {
        if let Some(files) = &self.vms[vm].backlog_files {
            files.process_ends();
            self.vms[vm].must_go_on = run.has_died.unwrap_or_else(|| run.must_be_gone_on_with());
        }
    }

    /// A host loses power, with what was never synced.
    pub(crate) fn backlog_loses_power(&mut self, vm: usize) {
        self.vms[vm].must_go_on = false;
        if let Some(files) = &self.vms[vm].backlog_files {
            files.power_loss(&mut self.rng);
        }
    }

    // ---- checkers

    /// What was whole stays so as long as the stream does: nothing is compared.
    pub(crate) fn check_nothing_compared(&self, vm: usize, attached: &AttachedStream) -> Checked {
        use tidelock_protocol::message::CopyState;
        let run = self.vms[vm].run.as_ref().expect("runs");
        let was_whole = run.spilling.backlog().is_some() && (run.copying.is_whole() || run.goes_on);
        let holds = !was_whole || attached.stream.copy == CopyState::Whole;
        check(holds, Checker::NothingCompared, || {
            format!("vm {vm}: the stream is whole, and the backup says {:?}", attached.stream.copy)
        })
    }

    /// Rule 10: what it takes of memory and disk.
    pub(crate) fn check_spilling(&self, vm: usize) -> Checked {
        let plan = &self.plan.vms[vm];
        let run = self.vms[vm].run.as_ref().expect("runs");
        let (Some(backlog), Some(of)) = (run.spilling.backlog(), plan.backlog) else {
            return Ok(());
        };
        if backlog.has_failed() {
            return Ok(());
        }
        let held_bytes = backlog.meter().held_bytes();
        check(held_bytes <= of.memory_bytes.max(RECORD_MAX_BYTES), Checker::Bounded, || {
            format!("vm {vm}: {held_bytes} bytes in memory, of {}", of.memory_bytes)
        })?;
        let (segments, on_disk_bytes) = backlog.on_disk();
        let headers = (segments * backlog::HEADER_BYTES) as u64;
        // One that is not full, and two that local writes may keep which hang.
        let segments_bytes = 3 * of.segment_bytes;
        let most = plan.backlog_limit_bytes + segments_bytes + 2 * RECORD_MAX_BYTES + headers;
        check(on_disk_bytes <= most, Checker::Bounded, || {
            format!("vm {vm}: {on_disk_bytes} bytes on disk, of {most}")
        })
    }
}

fn do_again(record: &Record, disks: &mut [LocalDisk]) {
    let disk = &mut disks[usize::from(record.disk.0)];
    match &record.effect {
        Effect::Write(payload) => disk.write(record.offset, payload.data(), false),
        Effect::Zero { len_bytes, .. } => {
            disk.write(record.offset, &vec![0; *len_bytes as usize], false);
        }
        Effect::CopyDone | Effect::Idle => {}
    }
}

/// Guests' records that an earlier process has left, with what they cost.
pub(crate) fn left_unacked(waiting: &[backlog::Waiting]) -> impl Iterator<Item = (Seq, u64)> + '_ {
    waiting.iter().map(|record| (record.seq, record.payload_bytes + RECORD_OVERHEAD_BYTES))
}
