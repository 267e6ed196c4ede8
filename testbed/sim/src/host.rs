//! The daemon of a host: how it starts, what it keeps between runs, and how it ends.

use crate::around::HostGroup;
use crate::beating::Beating;
use crate::disk::{LocalDisk, SECTOR_BYTES};
use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::gate::{NotedGate, SimGate};
use crate::link::{LinkDriver, NewMembers};
use crate::owner::MemberRun;
use crate::plant::{OnTheWay, Plant};
use crate::ring::{Asks, Ends, Published, Shape, SimAround, SimFd, SimFile, SimRing};
use crate::scenario::DiskPlan;
use crate::schedule::{MS, S};
use crate::spilling::left_unacked;
use crate::tap::LIMITS;
use crate::world::{Event, Host, Kernel, Run, World, note};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidelock_daemon::driver::RingDriver;
use tidelock_daemon::held_gate::PendingEntry;
use tidelock_daemon::nbd_tap::{NbdTap, TapDisk};
use tidelock_daemon_core::ceiling;
use tidelock_daemon_core::copy_job::Bounds;
use tidelock_daemon_core::degrade::mode_at_start;
use tidelock_daemon_core::group::GroupLoop;
use tidelock_daemon_core::heartbeat::Watched;
use tidelock_daemon_core::link::port::OwnerPort;
use tidelock_daemon_core::owner::driver::DiskFile;
use tidelock_daemon_core::owner::{Clocks, LeftOnDisk, Owner};
use tidelock_daemon_core::records::Records;
use tidelock_daemon_core::start::{
    self, BacklogStart, GroupStart, LogStart, MemberStart, StartError, StartedFollower,
    StartedWriter, WriterStart, Written,
};
use tidelock_daemon_core::state::StateFile;
use tidelock_netfilter::gate::Pending;
use tidelock_protocol::ids::{Channel, DiskId, Seq, WriterId};
use tidelock_protocol::message::{DiskSpec, Form};
use tidelock_protocol::record::Record;
use tidelock_storage::memory::{Faults, Memory};
use tidelock_uring::{BufPool, EventFd};

/// The interval at which a writer says that it has nothing to write.
const IDLE: Duration = Duration::from_millis(20);

/// The power fails within one start of so many, or right after it.
const POWER_FAILS_ONE_IN: u64 = 24;

const LOOK_EVERY_NS: u64 = ceiling::LOOK_EVERY_MS * MS;
/// By how much a wall clock may jump, and by how much a packet's time may be ahead (production: `max_clock_lead`).
pub(crate) const CLOCK_LEAD_MS: u64 = 500;

/// The daemon of a host.
pub struct Daemon {
    /// Its run.
    pub run: Run,
    /// Its link.
    pub link: LinkDriver,
    /// Its groups.
    pub groups: BTreeMap<usize, HostGroup>,
    /// Last status that it has told, in the JSON form.
    pub(crate) told: Option<serde_json::Value>,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "daemon run {}", self.run)
    }
}

impl World {
    /// The members on a host.
    #[must_use]
    pub fn vms_of(&self, host: usize) -> Vec<usize> {
        let here = |vm: &usize| self.plan.vms[*vm].host == host && self.plan.is_member(*vm);
        (0..self.vms.len()).filter(here).collect()
    }

    /// The state of a member on its host's disk.
    pub(crate) fn state_file(&self, vm: usize) -> StateFile<Memory> {
        let plan = &self.plan.vms[vm];
        let state_dir = self.hosts[plan.host].state_dir.clone();
        StateFile::new(state_dir, &self.plan.groups[plan.group].name, &plan.name)
    }

    /// The records of a group on a host's disk.
    pub(crate) fn records(&self, host: usize, group: usize) -> Records<Memory> {
        Records::new(self.hosts[host].state_dir.clone(), &self.plan.groups[group].name)
    }

    /// The power of a host fails at one of its next operations on its state, or a moment later. Returns that moment.
    pub(crate) fn power_fails_soon(&mut self, host: usize) -> u64 {
        let state_dir = &self.hosts[host].state_dir;
        let at = state_dir.ops() + self.rng.below(12);
        state_dir.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let (after, boots) = (self.rng.range(0..40 * MS), self.hosts[host].boots);
        self.later(Later::PowerFails { host, boots }, after);
        after
    }

    /// True if the power of a host has failed at an operation on its state.
    pub(crate) fn power_has_failed(&self, host: usize) -> bool {
        let Host { power, state_dir, .. } = &self.hosts[host];
        let off_at = state_dir.faults().power_off_at;
        *power && off_at.is_some_and(|at| state_dir.ops() >= at)
    }

    /// Hosts whose power has failed in the middle of something.
    pub(crate) fn notice_power(&mut self) {
        for host in 0..self.hosts.len() {
            if self.power_has_failed(host) {
                self.power_off(host);
            }
        }
    }

    /// A daemon starts. Guests that live ask again what was not answered.
    pub fn start_daemon(&mut self, host: usize) -> Checked {
        let of = &self.hosts[host];
        if !of.power || of.lost || of.changes || of.daemon.is_some() {
            return Ok(());
        }
        if self.faulty && self.rng.chance(1, POWER_FAILS_ONE_IN) {
            let after = self.power_fails_soon(host) + self.rng.range(MS..S);
            self.later(Later::PowerOn { host }, after);
        }
        let run = self.new_run();
        self.counts.daemon_runs += 1;
        let (vms, clocks) = (self.vms_of(host), self.clocks(host));
        let groups = self.groups_of(host, &vms);
        let (mut new, mut starts) = (NewMembers::default(), BTreeMap::new());
        for (group, of) in &groups {
            let start = self.group_start(host, *group, &of.group);
            self.reads_record(host, *group, start.switched_over)?;
            starts.insert(*group, start);
        }
        let gates = self.start_gates(&vms, clocks);
        for (nth, vm) in vms.iter().copied().enumerate() {
            let group = self.plan.vms[vm].group;
            let gate = gates[&group].clone();
            let channel = Channel(nth as u16 + 1);
            if !self.start_member(vm, run, channel, gate, &starts[&group], &mut new)? {
                note!(self, "the power of host {host} fails while its daemon starts");
                vms.iter().for_each(|vm| self.vms[*vm].run = None);
                self.counts.cut_starts += 1;
                self.power_off(host);
                return Ok(());
            }
        }
        note!(self, "daemon of host {host} starts, run {run}");
        let link = LinkDriver::new(host, vms.clone(), new, self.rng.number(), clocks.now);
        self.hosts[host].daemon = Some(Daemon { run, link, groups, told: None });
        let after = self.rng.range(0..20 * MS);
        self.schedule.after(after, Event::Link { host, run });
        self.schedule.after(LOOK_EVERY_NS, Event::Ceilings { host, run });
        self.begin_looks(host, run)?;
        self.begin_watch(host, run);
        self.begin_verifications(host, run);
        self.cut_off_start(host);
        self.begin_to_adopt(host, run);
        for vm in vms {
            self.owner_begins(vm)?;
        }
        Ok(())
    }

    /// Shut gates for the members on a host, by group.
    fn start_gates(&mut self, vms: &[usize], clocks: Clocks) -> BTreeMap<usize, Arc<SimGate>> {
        let mut gates: BTreeMap<usize, SimGate> = BTreeMap::new();
        for vm in vms.iter().copied() {
            let next_id = self.rng.number() as u32;
            let plan = &self.plan.vms[vm];
            let group = &self.plan.groups[plan.group];
            let several = group.has_several();
            // Pins and programs go with the host's power.
            let is_known = self.vms[vm].kernel.is_some();
            // The kernel's maps outlive the daemon, its own memory does not.
            if !several {
                self.vms[vm].pending = Arc::new(Pending::new());
            }
            // The configured mode, whatever the operator wanted from the daemons that ran.
            let gate = gates
                .entry(plan.group)
                .or_insert_with(|| SimGate::new(mode_at_start(group.mode), group.lease_ms, clocks));
            let is_hlc = several && group.form == Form::Hlc;
            let pending = &self.vms[vm].pending;
            let queue = (plan.gate_capacity, next_id);
            gate.add(vm, pending, queue, is_hlc, several.then_some(is_known));
        }
        gates.into_iter().map(|(group, gate)| (group, Arc::new(gate))).collect()
    }

    /// What is on record of each writer's times is kept ahead of those that it gives out.
    pub fn keep_ceilings(&mut self, host: usize, run: Run) -> Checked {
        if self.hosts[host].daemon.as_ref().is_none_or(|daemon| daemon.run != run) {
            return Ok(());
        }
        for vm in self.vms_of(host) {
            self.raise_ceiling(vm, run)?;
        }
        self.schedule.after(LOOK_EVERY_NS, Event::Ceilings { host, run });
        Ok(())
    }

    /// The same for one of them, which may wait for it.
    pub fn raise_ceiling(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let member = self.vms[vm].run.as_ref().expect("runs");
        let is_waited_for = member.state.keep_ceiling(&member.owner_stats, &member.view);
        if member.owner.is_none() || !is_waited_for.is_ok_and(|waits| waits) {
            return Ok(());
        }
        self.counts.ceilings += 1;
        self.owner_turn(vm)
    }

    /// A group by its plan and its records.
    fn group_start(&self, host: usize, group: usize, state: &GroupLoop) -> GroupStart {
        let of = &self.plan.groups[group];
        let name = |vm: &usize| self.plan.vms[*vm].name.clone();
        let peers = || of.members().map(|vm| format!("{}=10.0.0.{vm}", name(&vm))).collect();
        let here = self.members_on(host, group).into_iter().map(|vm| self.state_file(vm));
        GroupStart {
            name: of.name.clone(),
            writers: of.vms.iter().map(name).collect(),
            mode: of.mode,
            lease_ms: of.lease_ms,
            grace_ms: of.grace_ms,
            form: of.form,
            peers: of.has_several().then(peers),
            idle_interval: IDLE,
            max_clock_lead: Duration::from_millis(CLOCK_LEAD_MS),
            serves_unreached: of.serves_unreached && !of.may_have_several(),
            awaits_adoption: self.records(host, group).is_adopting(),
            switched_over: state.view().switched_at_unix_ms.is_some(),
            fenced: start::fence_of(&of.name, here).expect("readable"),
            policy: state.policy(),
        }
    }

    /// Returns whether it has started.
    fn start_member(
        &mut self,
        vm: usize,
        run: Run,
        channel: Channel,
        gate: Arc<SimGate>,
        group: &GroupStart,
        new: &mut NewMembers,
    ) -> Checked<bool> {
        let of = self.plan.vms[vm].group;
        self.vms[vm].kernel = group.peers.is_some().then(|| Kernel {
            gate: gate.clone(),
            codec: self.plan.codec(of),
            peers: self.plan.groups[of].members().collect(),
        });
        let plan = &self.plan.vms[vm];
        let (clocks, writer) = (self.clocks(plan.host), plan.writer_id());
        let pending = self.vms[vm].pending.clone();
        let form = if group.peers.is_some() { group.form } else { Form::Vector };
        let control = Arc::new(NotedGate::new(gate.clone(), writer, pending.clone(), form));
        let wake = EventFd::new().expect("an eventfd");
        let (port, messages) = OwnerPort::new(wake.clone().into());
        let port = Arc::new(port);
        let member = MemberStart {
            name: plan.name.clone(),
            channel,
            machine: None,
            state: self.state_file(vm),
            gate: control.clone(),
            port: port.clone(),
            wall_ms: clocks.wall_ms,
        };
        let Some(writer) = writer else {
            let Ok(started) = start::follower(group, member) else { return Ok(false) };
            let StartedFollower { link, state, link_stats } = started;
            new.add(link, link_stats);
            let loops = (Arc::default(), Arc::default(), Arc::default());
            let ends = (port, messages, wake);
            let gated = (gate, control, pending);
            let mut member = MemberRun::new(run, channel, state, ends, gated, loops);
            member.life = self.vms[vm].oracle.lives();
            self.vms[vm].run = Some(member);
            return Ok(true);
        };
        let must_go_on = std::mem::take(&mut self.vms[vm].must_go_on);
        let (ends, redone) = (Rc::<Ends>::default(), Arc::default());
        let disks = self.files_of(vm, &ends);
        let shapes = disks.iter().map(|(_, file)| file.shape.clone()).collect();
        let listeners = (0..disks.len()).map(SimFd::Listener).collect();
        let tapped = disks.iter().cloned().map(|(spec, file)| TapDisk::new(spec, file, 1, 1));
        let tapped = tapped.collect::<Result<_, _>>().expect("exports as production makes them");
        let with = self.writer_start(vm, writer, group, disks, &redone);
        let started = match start::writer(group, member, with) {
            Ok(started) => started,
            Err(StartError::Backlog(error)) => unreachable!("nothing but appends fails: {error}"),
            Err(_) => return Ok(false),
        };
        let StartedWriter { owner, link, state, link_stats, opened, not_gone_on, .. } = started;
        new.add(link, link_stats.clone());
        self.vms[vm].incarnation = opened.run.number;
        if let Some(why) = not_gone_on {
            note!(self, "vm {vm}: its backlog on disk is not gone on with: {why}");
            check(!must_go_on, Checker::NothingCompared, || {
                format!("vm {vm}: the stream was whole, and is not gone on with: {why}")
            })?;
        }
        if owner.left.is_none() {
            self.disks_hold(vm);
        }
        let heartbeat = self.plan.groups[of].heartbeat.map(|settings| {
            let (port, link, view) = (port.clone(), link_stats, owner.view.clone());
            let is_alone = group.peers.is_none();
            let pulse = owner.pulse.clone();
            Beating::new(settings, Watched::new(settings, is_alone, port, link, view, pulse))
        });
        let loops = (owner.view.clone(), owner.stats.clone(), owner.pulse.clone());
        let (ports, gated) = ((port, messages, wake), (gate, control, pending.clone()));
        let mut member = MemberRun::new(run, channel, state, ports, gated, loops);
        member.beating = heartbeat;
        member.life = self.vms[vm].oracle.lives();
        if let Some(LeftOnDisk { goes_on, .. }) = &owner.left {
            member.goes_on = true;
            member.unacked = left_unacked(&goes_on.waiting).collect();
            member.left_bytes = member.unacked.iter().map(|(_, cost)| cost).sum();
        }
        (member.ends, member.shapes, member.redone) = (ends.clone(), shapes, redone);
        let files = self.vms[vm].backlog_files.clone();
        let entry = PendingEntry { pending, writer };
        let published = Published { entry, files: files.clone() };
        let plant = Plant::OnTheWay(OnTheWay::WrittenBeforeKept);
        let asks = Asks::new(files, self.plant == Some(plant));
        let (pool, stats) = (owner.pool.clone(), owner.stats.clone());
        let name = owner.member.clone();
        let tap = NbdTap::new(name, tapped, pool.clone(), LIMITS, stats, clocks.now);
        let around = SimAround { asks: asks.clone(), published, ends };
        let log_file = owner.has_log_file.then_some(SimFd::Log);
        let ring = SimRing(asks.clone());
        let driver = RingDriver::new(ring, around, pool, listeners, tap, log_file);
        member.queue = asks;
        let owner = Owner::new(owner, driver, clocks);
        (member.mode, member.owner) = (owner.sequencer().mode(), Some(owner));
        self.vms[vm].run = Some(member);
        Ok(true)
    }

    fn writer_start(
        &mut self,
        vm: usize,
        writer: WriterId,
        group: &GroupStart,
        disks: Vec<(DiskSpec, SimFile)>,
        redone: &Arc<Mutex<Vec<Record>>>,
    ) -> WriterStart<Memory, SimFile> {
        let (fails_to_redo, redone) = (self.local_fails(vm), redone.clone());
        let (plan, of) = (&self.plan.vms[vm], &self.vms[vm]);
        let place = self.log_place(vm);
        let identity = start::identity(group, &plan.name, &disks, &[]);
        let backlog = plan.backlog.zip(of.backlog_files.clone());
        let backlog = backlog.map(|(backlog, files)| BacklogStart {
            files,
            segment_bytes: backlog.segment_bytes,
            memory_limit_bytes: backlog.memory_bytes,
            stands_at_limit: backlog.stands,
            boot: u128::from(self.hosts[plan.host].boots).to_be_bytes(),
            redo: Box::new(move |again| match fails_to_redo {
                true => Err("the disk fails".to_owned()),
                false => crate::local::redone(again, &redone),
            }),
        });
        let (pending, files) = (of.pending.clone(), of.backlog_files.clone());
        WriterStart {
            writer,
            removed_disks: Vec::new(),
            marks: disks
                .iter()
                .map(|(spec, file)| format!("{} {}", spec.name, file.mark().expect("it is known")))
                .collect(),
            disks,
            written: Written::default(),
            log: LogStart { geometry: plan.log, found: place.read(&identity), place },
            backlog,
            backlog_limit_bytes: plan.backlog_limit_bytes,
            lock_align_bytes: SECTOR_BYTES,
            copy_bounds: Bounds {
                window_bytes: plan.copy_window_bytes,
                rate_bytes_per_s: plan.copy_rate_bytes_per_s,
            },
            pool: BufPool::new(0),
            pending: Arc::new(Published { entry: PendingEntry { pending, writer }, files }),
        }
    }

    /// The disks as their loop is given them.
    fn files_of(&self, vm: usize, ends: &Rc<Ends>) -> Vec<(DiskSpec, SimFile)> {
        let disks = self.vms[vm].disks.iter().zip(&self.plan.vms[vm].disks);
        let file = |(id, (disk, plan)): (DiskId, (&LocalDisk, &DiskPlan))| {
            let size_bytes = disk.size_bytes();
            // Written since: a file system would have allocated it.
            let allocated = match disk.live() == plan.content {
                true => plan.allocated.clone(),
                false => std::iter::once(0..size_bytes).collect(),
            };
            let shape = Rc::new(RefCell::new(Shape { size_bytes, allocated }));
            let spec = DiskSpec { id, name: format!("d{}", id.0), size_bytes };
            (spec, SimFile { disk: id, fd: SimFd::Disk(id), shape, ends: ends.clone() })
        };
        (0..).map(DiskId).zip(disks).map(file).collect()
    }

    /// A run of a member admits writes after `base_seq`; of those before, states have what is up to `cut`.
    pub(crate) fn begin_life(&mut self, vm: usize, base_seq: Seq, cut: Seq) {
        let state = &mut self.vms[vm];
        let base = state.disks.iter().map(|d| d.live().to_vec()).collect();
        state.oracle.begin_life(base, base_seq, cut);
        // What is in flight without a record ends before it is copied.
        for run in state.run.iter().filter(|run| !run.unrecorded.is_empty()) {
            for (op, (_, extent, effect)) in &run.unrecorded {
                if run.local_ops.contains_key(op) {
                    state.oracle.wrote_unrecorded(*extent, effect, run.life);
                }
            }
        }
        note!(self, "vm {vm} admits writes from {} on", base_seq.next());
    }

    /// The daemon of a host is gone. Local operations that were under way may be done, in part.
    pub fn end_daemon(&mut self, host: usize) {
        let Some(daemon) = self.hosts[host].daemon.take() else { return };
        note!(self, "daemon of host {host} ends, run {}", daemon.run);
        self.asks_nothing(host);
        self.switches_end(host);
        if let Some(conn) = daemon.link.conn() {
            self.host_closes(conn);
        }
        for vm in self.vms_of(host) {
            let Some(mut run) = self.vms[vm].run.take() else { continue };
            self.leaves_backlog(vm, &run);
            self.all_closed(vm);
            self.disks_go_on(vm, std::mem::take(&mut run.in_flight).into_values().collect());
        }
    }
}
