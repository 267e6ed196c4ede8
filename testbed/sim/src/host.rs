//! The daemon of a host: how it starts, what it keeps between runs, and how it ends.

use crate::around::HostGroup;
use crate::beating::Beating;
use crate::disk::SECTOR_BYTES;
use crate::driver::{Published, Shape, SimDriver, SimFile};
use crate::failure::Checked;
use crate::faults::Later;
use crate::gate::{NotedGate, SimGate};
use crate::link::{LinkDriver, NewMembers, attach_of, disks_of};
use crate::owner::MemberRun;
use crate::plant::{OnTheWay, Plant};
use crate::schedule::MS;
use crate::spilling::left_unacked;
use crate::world::{Event, Host, Kernel, Run, World, note};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tidelock_daemon::activity::LastEnd;
use tidelock_daemon::backlog::Left;
use tidelock_daemon::ceiling;
use tidelock_daemon::copy_job::Bounds;
use tidelock_daemon::degrade::mode_at_start;
use tidelock_daemon::held_gate::PendingEntry;
use tidelock_daemon::link::GateControl;
use tidelock_daemon::link::member::MemberParts;
use tidelock_daemon::link::port::OwnerPort;
use tidelock_daemon::owner::PATIENCE;
use tidelock_daemon::owner::driver::Taking;
use tidelock_daemon::owner::spilling::Ends;
use tidelock_daemon::owner::{Clocks, LeftOnDisk, Owner, OwnerParts, OwnerView, Several, ToOwner};
use tidelock_daemon::records::Records;
use tidelock_daemon::sequencer::Settings;
use tidelock_daemon::state::{CleanMark, Opened, StateFile};
use tidelock_netfilter::gate::Pending;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Incarnation, Seq};
use tidelock_protocol::message::{DiskSpec, Form, LastRun, Policy, Role, Writing};
use tidelock_storage::memory::{Faults, Memory};
use tidelock_uring::{BufPool, EventFd};

/// The interval at which a writer says that it has nothing to write.
const IDLE: Duration = Duration::from_millis(20);

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
        let run = self.new_run();
        self.counts.daemon_runs += 1;
        let (vms, clocks) = (self.vms_of(host), self.clocks(host));
        let groups = self.groups_of(host, &vms);
        let mut new = NewMembers::default();
        let gates = self.start_gates(&vms, clocks);
        for (nth, vm) in vms.iter().copied().enumerate() {
            let group = self.plan.vms[vm].group;
            let gate = gates[&group].clone();
            let channel = Channel(nth as u16 + 1);
            let policy = groups[&group].group.policy();
            let is_over = groups[&group].group.view().switched_at_unix_ms.is_some();
            self.reads_record(host, group, is_over)?;
            if !self.start_member(vm, run, channel, gate, policy, is_over, &mut new)? {
                self.power_off(host);
                return Ok(());
            }
        }
        note!(self, "daemon of host {host} starts, run {run}");
        let link = LinkDriver::new(host, vms.clone(), new, self.rng.number(), clocks.now);
        self.hosts[host].daemon = Some(Daemon { run, link, groups });
        let after = self.rng.range(0..20 * MS);
        self.schedule.after(after, Event::Link { host, run });
        self.schedule.after(LOOK_EVERY_NS, Event::Ceilings { host, run });
        self.begin_looks(host, run)?;
        self.begin_watch(host, run);
        self.begin_verifications(host, run);
        self.cut_off_start(host);
        for vm in vms {
            self.owner_begins(vm)?;
            self.ask_again(vm)?;
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
            // As configured, whatever the operator wanted from the daemons that ran.
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
        let wall_ms = self.member_clocks(vm).wall_ms;
        let member = self.vms[vm].run.as_ref().expect("runs");
        let Some(owner) = &member.owner else { return Ok(()) };
        let (greatest, waited) =
            (owner.sequencer().greatest_hlc(), owner.sequencer().waits_for_ceiling());
        if let Ok(ceiling_ms) = member.state.keep_ahead_of(greatest, wall_ms) {
            member.view.set_hlc_ceiling_ms(ceiling_ms);
        }
        if !waited {
            return Ok(());
        }
        self.counts.ceilings += 1;
        self.owner_turn(vm)
    }

    fn start_member(
        &mut self,
        vm: usize,
        run: Run,
        channel: Channel,
        gate: Arc<SimGate>,
        policy: Policy,
        switched_over: bool,
        new: &mut NewMembers,
    ) -> Checked<bool> {
        let left = self.find_left(vm, switched_over)?;
        let plan = &self.plan.vms[vm];
        let clocks = self.clocks(plan.host);
        let Ok((state, opened)) = self.state_file(vm).open(clocks.wall_ms * 1000) else {
            return Ok(false);
        };
        let mode = self.plan.groups[plan.group].mode;
        let several = self.plan.groups[plan.group].has_several();
        let group = &self.plan.groups[plan.group];
        let is_alone = group.serves_unreached && !group.may_have_several();
        // What one member on a host was told holds for all of the group there.
        let here = self.vms_of(plan.host);
        let fenced = here
            .iter()
            .filter(|other| self.plan.vms[**other].group == plan.group)
            .any(|other| self.state_file(*other).fence().expect("readable").is_some());
        let says_unreached = (is_alone || opened.serves_unreached_kept).then_some(is_alone);
        // Several are served so while they are adopted: before a backup has granted them anything.
        let is_adopted = group.may_have_several()
            && group.serves_unreached
            && plan.writer_id().is_some()
            && opened.epoch == Epoch(0);
        let serves = is_alone || is_adopted;
        let Opened { run: this, before, epoch, clean, hlc_floor, hlc_ceiling_ms, .. } = opened;
        let mut runs = [Incarnation(0); 2];
        runs.iter_mut().zip(&opened.log_runs).for_each(|(run, of)| *run = *of);
        let incarnation = this.number;
        self.vms[vm].incarnation = incarnation;
        self.vms[vm].kernel = several.then(|| Kernel {
            gate: gate.clone(),
            codec: self.plan.codec(plan.group),
            peers: self.plan.groups[plan.group].members().collect(),
        });
        let last_end = match clean {
            Some(CleanMark { seq, served: false, .. }) => {
                LastEnd::Clean { incarnation: runs[0], epoch, seq }
            }
            _ => LastEnd::Unclean { runs },
        };
        let activity = self.open_log(vm, incarnation, last_end);
        state.found_log_of(activity.confirmed());
        let marks = self.marks(vm);
        let again = left.as_ref().map(Left::again);
        if left.is_none() {
            self.disks_hold(vm);
        }
        let (backlog, on_disk, goes_on, left) =
            match self.open_backlog(vm, epoch, incarnation, left) {
                None => (None, None, None, None),
                Some(Ends { owners, links, goes_on, left }) => {
                    (Some(owners), Some(links), goes_on, left)
                }
            };
        let plan = &self.plan.vms[vm];
        let last_run = match clean {
            Some(CleanMark { seq, served, .. }) => LastRun::Clean { seq, served },
            None if activity.is_believed() => LastRun::Unclean { log: activity.age() },
            None => LastRun::Unknown,
        };
        let age = activity.age();
        let heartbeat = self.plan.groups[plan.group].heartbeat.filter(|_| plan.is_writer());
        let beating = heartbeat.map(Beating::new);
        let wake = EventFd::new().expect("an eventfd");
        let (port, messages) = OwnerPort::new(wake.clone());
        let port = Arc::new(port);
        if switched_over {
            gate.handle().fence();
        }
        let pending = self.vms[vm].pending.clone();
        let writer = plan.writer_id();
        let form = if several { self.plan.groups[plan.group].form } else { Form::Vector };
        let control = Arc::new(NotedGate::new(gate.clone(), writer, pending.clone(), form));
        if goes_on.is_some() {
            // A packet that was taken up before this has no stamp: the gate is shut until the backup has all of it.
            control.hold_for_resync(true);
        }
        let role = match writer {
            Some(writer) => Role::Writer(Writing {
                writer,
                disks: disks_of(&self.plan, vm),
                incarnation,
                nonce: this.nonce,
                before,
                marks,
                last_run,
                mode,
            }),
            None => Role::Follower,
        };
        new.add(MemberParts {
            attach: attach_of(&self.plan, vm, opened.group_id, epoch, role),
            log: age,
            policy,
            says_unreached,
            channel,
            port: port.clone(),
            to_owner: ToOwner::Link,
            gate: control.clone(),
            gives_up: switched_over,
            fenced: fenced.then(|| "it was said before this start".to_owned()),
            keeper: Box::new(state.clone()),
            stats: Arc::default(),
            on_disk,
            left,
        });
        let view = Arc::<OwnerView>::default();
        view.set_hlc_ceiling_ms(hlc_ceiling_ms);
        let may_serve = !switched_over && !fenced;
        let serves_unreached_after = (serves && may_serve).then_some(PATIENCE);
        let mut member = MemberRun::new(
            run,
            channel,
            state,
            (port.clone(), messages, wake),
            (gate, control.clone(), pending.clone()),
            view.clone(),
        );
        member.beating = beating;
        member.life = self.vms[vm].oracle.lives();
        member.goes_on = goes_on.is_some();
        member.unacked =
            goes_on.iter().flat_map(|goes_on| left_unacked(&goes_on.waiting)).collect();
        member.left_bytes = member.unacked.iter().map(|(_, cost)| cost).sum();
        let fails_to_redo = self.local_fails(vm);
        let redone = member.redone.clone();
        let left = goes_on.zip(again).map(|(goes_on, again)| LeftOnDisk {
            goes_on,
            redo: Box::new(move || match fails_to_redo {
                true => Err("the disk fails".to_owned()),
                false => crate::local::redone(again, &redone),
            }),
        });
        if let Some(writer) = writer {
            let plan = &self.plan.vms[vm];
            let disks = self.files_of(vm, &mut member);
            let files = self.vms[vm].backlog_files.clone();
            let published = || Published {
                entry: PendingEntry { pending: pending.clone(), writer },
                files: files.clone(),
            };
            let parts = OwnerParts {
                member: plan.name.clone(),
                settings: Settings {
                    writer,
                    mode,
                    backlog_limit_bytes: plan.backlog_limit_bytes,
                    lock_align_bytes: SECTOR_BYTES,
                },
                disks,
                port,
                pool: BufPool::new(0),
                pending: Arc::new(published()),
                gate: control,
                stats: Arc::default(),
                view,
                pulse: member.beating.as_ref().map_or_else(Arc::default, |b| b.pulse.clone()),
                copy_bounds: Bounds {
                    window_bytes: plan.copy_window_bytes,
                    rate_bytes_per_s: plan.copy_rate_bytes_per_s,
                },
                switched_over: switched_over,
                serves_unreached_after,
                several: several.then_some(Several {
                    form: self.plan.groups[plan.group].form,
                    idle_interval: IDLE,
                }),
                hlc_floor,
                max_clock_lead: Duration::from_millis(CLOCK_LEAD_MS),
                has_log_file: self.vms[vm].log_file.is_some(),
                activity,
                backlog,
                left,
            };
            let mut driver = SimDriver::new(published(), member.ends.clone(), files.clone());
            driver.writes_unkept = self.plant == Some(Plant::OnTheWay(OnTheWay::WrittenBeforeKept));
            member.owner = Some(Owner::new(parts, driver, clocks));
        } else if !switched_over {
            member.taking = Taking::All;
        }
        self.vms[vm].run = Some(member);
        Ok(true)
    }

    /// The disks as their loop is given them.
    fn files_of(&self, vm: usize, member: &mut MemberRun) -> Vec<(DiskSpec, SimFile)> {
        let mut files = Vec::new();
        let disks = self.vms[vm].disks.iter().zip(&self.plan.vms[vm].disks);
        for (id, (disk, plan)) in (0..).map(DiskId).zip(disks) {
            let size_bytes = disk.size_bytes();
            // Written since: a file system would have allocated it.
            let allocated = match disk.live() == plan.content {
                true => plan.allocated.clone(),
                false => std::iter::once(0..size_bytes).collect(),
            };
            let shape = Rc::new(RefCell::new(Shape { size_bytes, allocated }));
            member.shapes.push(shape.clone());
            let spec = DiskSpec { id, name: format!("d{}", id.0), size_bytes };
            files.push((spec, SimFile { disk: id, shape, ends: member.ends.clone() }));
        }
        files
    }

    /// The identity of each disk. Nobody else writes to them here.
    fn marks(&self, vm: usize) -> Vec<String> {
        let disks = self.vms[vm].disks.iter().enumerate();
        disks.map(|(nth, disk)| format!("d{nth} bytes={}", disk.live().len())).collect()
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
            let Some(run) = self.vms[vm].run.take() else { continue };
            if run.ended {
                run.gate.end();
            }
            self.leaves_backlog(vm, &run);
            self.disks_go_on(vm, run.in_flight.into_values().collect());
        }
    }
}
