//! The daemon of a host: how it starts, what it keeps between runs, and how it ends.

use crate::around::HostGroup;
use crate::beating::Beating;
use crate::disk::SECTOR_BYTES;
use crate::driver::{Published, Shape, SimDriver, SimFile};
use crate::failure::Checked;
use crate::gate::{NotedGate, SimGate};
use crate::link::{LinkDriver, NewMembers, attach_of, disks_of};
use crate::owner::MemberRun;
use crate::plant::{OnTheWay, Plant};
use crate::schedule::MS;
use crate::spilling::left_unacked;
use crate::world::{Event, Kernel, Run, World, note};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tidelock_daemon::activity::LastEnd;
use tidelock_daemon::backlog::Left;
use tidelock_daemon::ceiling;
use tidelock_daemon::copy_job::Bounds;
use tidelock_daemon::degrade::mode_at_start;
use tidelock_daemon::held_gate::PendingEntry;
use tidelock_daemon::link::GateControl;
use tidelock_daemon::link::member::MemberParts;
use tidelock_daemon::link::port::{EpochKeeper, OwnerPort};
use tidelock_daemon::owner::PATIENCE;
use tidelock_daemon::owner::driver::Taking;
use tidelock_daemon::owner::spilling::Ends;
use tidelock_daemon::owner::{Clocks, LeftOnDisk, Owner, OwnerParts, OwnerView, Several, ToOwner};
use tidelock_daemon::sequencer::Settings;
use tidelock_daemon::verified::Verified;
use tidelock_netfilter::gate::Pending;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, GroupId, Incarnation, Nonce, RunId, Seq};
use tidelock_protocol::message::{Basis, DiskSpec, Form, LastRun, Policy, Role, Writing};
use tidelock_uring::{BufPool, EventFd};

/// The interval at which a writer says that it has nothing to write.
const IDLE: Duration = Duration::from_millis(20);

/// What the daemon keeps on its own disk between runs (production: `state.rs`, on files).
#[derive(Debug, Default)]
pub struct StateFile {
    /// The granted epoch.
    pub epoch: Epoch,
    /// The group's identity, as the backup has told it.
    pub group_id: Option<GroupId>,
    /// The number of the last start.
    pub incarnation: Incarnation,
    /// The run in force.
    pub run: Option<RunId>,
    /// The run that began the stream.
    pub stream: Option<RunId>,
    /// The run that the activity log is of, if it is that of an earlier one.
    pub log_run: Option<Incarnation>,
    /// The run that it was found to be of.
    pub found_log: Option<Incarnation>,
    /// The epoch has ended.
    pub fenced: bool,
    /// The backup knows that a start which does not reach it serves guests.
    pub serves_unreached_kept: bool,
    /// Where a run ended cleanly.
    pub clean: Option<(Seq, Hlc)>,
    /// Guests were served since.
    pub served: bool,
    /// No time that was given out follows the clock beyond this.
    pub hlc_ceiling_ms: u64,
    /// What the last verification has found.
    pub verified: Option<Verified>,
}

const LOOK_EVERY_NS: u64 = ceiling::LOOK_EVERY_MS * MS;
/// By how much a wall clock may jump, and by how much a packet's time may be ahead (production: `max_clock_lead`).
pub(crate) const CLOCK_LEAD_MS: u64 = 500;

/// Drawn at random in production.
pub fn nonce_of(run: Incarnation) -> Nonce {
    Nonce(run.0, 0)
}

struct Keeper(Arc<Mutex<StateFile>>);

impl EpochKeeper for Keeper {
    fn keep(&mut self, epoch: Epoch, group_id: GroupId) -> std::io::Result<()> {
        let mut state = self.0.lock().expect("one thread");
        if state.fenced && epoch <= state.epoch {
            return Err(std::io::Error::other("an epoch that was over"));
        }
        state.serves_unreached_kept &= state.epoch == epoch;
        (state.epoch, state.fenced, state.group_id) = (epoch, false, Some(group_id));
        Ok(())
    }

    fn begin(
        &mut self,
        run: RunId,
        epoch: Epoch,
        group_id: GroupId,
        basis: &Basis,
    ) -> std::io::Result<()> {
        self.keep(epoch, group_id)?;
        let mut state = self.0.lock().expect("one thread");
        if state.run != Some(run) {
            let everything = matches!(basis, Basis::Everything { .. });
            state.log_run = state.found_log.filter(|_| !everything);
            if *basis != Basis::Continues {
                state.stream = Some(run);
            }
            (state.run, state.clean, state.served) = (Some(run), None, false);
        }
        Ok(())
    }

    fn keep_served(&mut self) -> std::io::Result<()> {
        self.0.lock().expect("one thread").served = true;
        Ok(())
    }

    fn keep_fenced(&mut self, _: &str) -> std::io::Result<()> {
        self.0.lock().expect("one thread").fenced = true;
        Ok(())
    }

    fn keep_serves_unreached(&mut self, kept: bool) -> std::io::Result<()> {
        self.0.lock().expect("one thread").serves_unreached_kept = kept;
        Ok(())
    }
}
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
            self.start_member(vm, run, channel, gate, policy, &mut new)?;
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
        let mut state = self.vms[vm].state.lock().expect("one thread");
        state.hlc_ceiling_ms = ceiling::raised(state.hlc_ceiling_ms, greatest, wall_ms);
        drop(state);
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
        new: &mut NewMembers,
    ) -> Checked {
        self.reads_record(vm);
        self.reads_verified(vm);
        let left = self.find_left(vm)?;
        let plan = &self.plan.vms[vm];
        let clocks = self.clocks(plan.host);
        let mode = self.plan.groups[plan.group].mode;
        let several = self.plan.groups[plan.group].has_several();
        let goes_back = self.plant == Some(Plant::OnTheWay(OnTheWay::HlcGoesBack));
        let group = &self.plan.groups[plan.group];
        let is_alone = group.serves_unreached && !group.may_have_several();
        // What one member on a host was told holds for all of the group there.
        let here = self.vms_of(plan.host);
        let fenced = here
            .iter()
            .filter(|other| self.plan.vms[**other].group == plan.group)
            .any(|other| self.vms[*other].state.lock().expect("one thread").fenced);
        let (says_unreached, serves, group_id) = {
            let state = self.vms[vm].state.lock().expect("one thread");
            let says_unreached = (is_alone || state.serves_unreached_kept).then_some(is_alone);
            // Several are served so while they are adopted: before a backup has granted them anything.
            let is_adopted = group.may_have_several()
                && group.serves_unreached
                && plan.writer_id().is_some()
                && state.epoch == Epoch(0);
            (says_unreached, is_alone || is_adopted, state.group_id)
        };
        let (incarnation, before, runs, epoch, clean, hlc_floor, hlc_ceiling_ms) = {
            let mut state = self.vms[vm].state.lock().expect("one thread");
            let next = (clocks.wall_ms * 1000).max(state.incarnation.0 + 1);
            state.incarnation = Incarnation(next);
            let before_ms = state.hlc_ceiling_ms;
            state.hlc_ceiling_ms = ceiling::first(before_ms, clocks.wall_ms);
            let clean = state.clean.map(|(seq, hlc)| (seq, hlc, state.served));
            let floor = match clean {
                _ if goes_back => Hlc(0),
                Some((_, hlc, false)) => hlc,
                _ => ceiling::floor_above(before_ms),
            };
            let run = state.run.map_or(Incarnation(0), |run| run.number);
            let runs = [run, state.log_run.unwrap_or_default()];
            (state.incarnation, state.run, runs, state.epoch, clean, floor, state.hlc_ceiling_ms)
        };
        self.vms[vm].kernel = several.then(|| Kernel {
            gate: gate.clone(),
            codec: self.plan.codec(plan.group),
            peers: self.plan.groups[plan.group].members().collect(),
        });
        let last_end = match clean {
            Some((seq, _, false)) => LastEnd::Clean { incarnation: runs[0], epoch, seq },
            _ => LastEnd::Unclean { runs },
        };
        let activity = self.open_log(vm, incarnation, last_end);
        self.vms[vm].state.lock().expect("one thread").found_log = activity.confirmed();
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
            Some((seq, _, served)) => LastRun::Clean { seq, served },
            None if activity.is_believed() => LastRun::Unclean { log: activity.age() },
            None => LastRun::Unknown,
        };
        let age = activity.age();
        let heartbeat = self.plan.groups[plan.group].heartbeat.filter(|_| plan.is_writer());
        let beating = heartbeat.map(Beating::new);
        let wake = EventFd::new().expect("an eventfd");
        let (port, messages) = OwnerPort::new(wake.clone());
        let port = Arc::new(port);
        if self.vms[vm].switched {
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
                nonce: nonce_of(incarnation),
                before,
                marks,
                last_run,
                mode,
            }),
            None => Role::Follower,
        };
        new.add(MemberParts {
            attach: attach_of(&self.plan, vm, group_id, epoch, role),
            log: age,
            policy,
            says_unreached,
            channel,
            port: port.clone(),
            to_owner: ToOwner::Link,
            gate: control.clone(),
            gives_up: self.vms[vm].switched,
            fenced: fenced.then(|| "it was said before this start".to_owned()),
            keeper: Box::new(Keeper(self.vms[vm].state.clone())),
            stats: Arc::default(),
            on_disk,
            left,
        });
        let view = Arc::<OwnerView>::default();
        view.set_hlc_ceiling_ms(hlc_ceiling_ms);
        let may_serve = !self.vms[vm].switched && !fenced;
        let serves_unreached_after = (serves && may_serve).then_some(PATIENCE);
        let mut member = MemberRun::new(
            run,
            channel,
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
                switched_over: self.vms[vm].switched,
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
        } else if !self.vms[vm].switched {
            member.taking = Taking::All;
        }
        self.vms[vm].run = Some(member);
        Ok(())
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
