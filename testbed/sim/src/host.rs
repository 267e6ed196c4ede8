//! The daemon of a host: how it starts, what it keeps between runs, and how it ends.

use crate::beating::Beating;
use crate::degrade::HostGroup;
use crate::disk::SECTOR_BYTES;
use crate::failure::Checked;
use crate::faults::Later;
use crate::gate::{MemberGate, SimGate};
use crate::link::{LinkLoop, attach_of, disks_of};
use crate::local::LocalOp;
use crate::owner::MemberRun;
use crate::plant::{OnTheWay, Plant};
use crate::schedule::MS;
use crate::spilling::left_unacked;
use crate::switching::HostSwitch;
use crate::world::{Event, Kernel, Run, World, note};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use tidelock_daemon::activity::LastEnd;
use tidelock_daemon::ceiling;
use tidelock_daemon::copy_job::Bounds;
use tidelock_daemon::degrade::mode_at_start;
use tidelock_daemon::link::GateControl;
use tidelock_daemon::link::port::{EpochKeeper, FromLink, OwnerPort, ToLink};
use tidelock_daemon::owner::admitted::Admitted;
use tidelock_daemon::owner::contact::{Contact, PATIENCE};
use tidelock_daemon::owner::copying::Copying;
use tidelock_daemon::owner::idling::{Idling, LastWord};
use tidelock_daemon::owner::spilling::{Ends, Spilling};
use tidelock_daemon::owner::verifying::Verifying;
use tidelock_daemon::sequencer::{Sequencer, Settings};
use tidelock_daemon::verified::Verified;
use tidelock_netfilter::gate::Pending;
use tidelock_netfilter::release_queue::ReleaseQueue;
use tidelock_protocol::hlc::{Hlc, WallClock};
use tidelock_protocol::ids::{Channel, Epoch, GroupId, Incarnation, Nonce, RunId, Seq, WriterId};
use tidelock_protocol::message::{Basis, CleanEnd, LastRun, Mode, Role, Writing};
use tidelock_protocol::vector::CountVector;
use tidelock_uring::EventFd;
/// What an owner loop is told.
#[derive(Debug)]
pub enum ToOwner {
    /// By the link.
    Link(FromLink),
    /// By the operator.
    SetMode(Mode),
    /// By the watch: to admit this heartbeat.
    Heartbeat(u64),
    /// By the operator or the schedule: to verify.
    Verify {
        /// What differs is copied.
        repair: bool,
        /// At most.
        rate_bytes_per_s: u64,
    },
    /// By the operator: to end that.
    StopVerify,
    /// To end cleanly.
    Drain,
}

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
    pub link: LinkLoop,
    /// How its groups stand.
    pub standings: BTreeMap<usize, HostGroup>,
    /// Planned switches that are under way.
    pub(crate) switches: BTreeMap<usize, HostSwitch>,
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
        let never_awaits = self.plant == Some(Plant::OnTheWay(OnTheWay::FloorNotAwaited));
        let mut link = LinkLoop::new(vms.clone());
        let mut gates: BTreeMap<usize, Arc<SimGate>> = BTreeMap::new();
        for (nth, vm) in vms.iter().copied().enumerate() {
            let group = self.plan.vms[vm].group;
            // As configured, whatever the operator wanted from the daemons that ran.
            let (mode, lease_ms) = (self.plan.groups[group].mode, self.plan.groups[group].lease_ms);
            let here: Vec<_> =
                vms.iter().copied().filter(|v| self.plan.vms[*v].group == group).collect();
            let gate = gates
                .entry(group)
                .or_insert_with(|| {
                    let mut gate = SimGate::new(mode_at_start(mode), lease_ms, &here);
                    if never_awaits {
                        gate.plant_never_awaits();
                    }
                    Arc::new(gate)
                })
                .clone();
            gate.set_clocks(clocks);
            let channel = Channel(nth as u16 + 1);
            self.start_member(vm, run, channel, gate, &mut link)?;
        }
        note!(self, "daemon of host {host} starts, run {run}");
        let standings = self.standings_of(host, &vms);
        self.hosts[host].daemon = Some(Daemon { run, link, standings, switches: BTreeMap::new() });
        let after = self.rng.range(0..20 * MS);
        self.schedule.after(after, Event::Connect { host, run });
        self.schedule.after(LOOK_EVERY_NS, Event::Ceilings { host, run });
        self.begin_looks(host, run);
        self.begin_watch(host, run);
        self.begin_verifications(host, run);
        self.cut_off_start(host);
        for vm in vms {
            self.ask_again(vm)?;
            if self.plan.groups[self.plan.vms[vm].group].serves_unreached {
                // Its time passes also if nobody asks for anything.
                self.owner_turn(vm)?;
            }
        }
        Ok(())
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
        let (greatest, waited) =
            (member.sequencer.greatest_hlc(), member.sequencer.waits_for_ceiling());
        let mut state = self.vms[vm].state.lock().expect("one thread");
        state.hlc_ceiling_ms = ceiling::raised(state.hlc_ceiling_ms, greatest, wall_ms);
        drop(state);
        if !waited {
            return Ok(());
        }
        self.counts.ceilings += 1;
        self.owner_turn(vm)
    }

    /// The guest is served from now on, if it was not.
    pub(crate) fn begin_serving(&mut self, vm: usize) -> Checked {
        let state = &mut self.vms[vm];
        let run = state.run.as_mut().expect("runs");
        match !state.switched && !std::mem::replace(&mut run.serving, true) {
            true => self.ask_again(vm),
            false => Ok(()),
        }
    }

    /// A guest asks again what was not answered.
    pub(crate) fn ask_again(&mut self, vm: usize) -> Checked {
        let again: Vec<_> = self.vms[vm].guest.asked.keys().copied().collect();
        for request in again {
            self.submit(vm, request)?;
        }
        Ok(())
    }

    fn start_member(
        &mut self,
        vm: usize,
        run: Run,
        channel: Channel,
        gate: Arc<SimGate>,
        link: &mut LinkLoop,
    ) -> Checked {
        self.reads_record(vm);
        self.reads_verified(vm);
        let left = self.find_left(vm)?;
        let plan = &self.plan.vms[vm];
        let mut clocks = self.clocks(plan.host);
        let mut wall = WallClock::new(CLOCK_LEAD_MS);
        clocks.wall_ms = wall.read(clocks.wall_ms, clocks.now);
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
        // The kernel's maps outlive the daemon, its own memory does not.
        if !several {
            self.vms[vm].pending = Arc::new(Pending::new());
        }
        if several {
            // Pins and programs go with the host's power.
            let is_known = self.vms[vm].kernel.is_some();
            gate.depends_on_others(&self.vms[vm].pending, is_known);
        }
        self.vms[vm].kernel = several.then(|| Kernel {
            gate: gate.clone(),
            codec: self.plan.codec(plan.group),
            peers: self.plan.groups[plan.group].members().collect(),
        });
        let last_end = match clean {
            Some((seq, _, false)) => LastEnd::Clean { incarnation: runs[0], epoch, seq },
            _ => LastEnd::Unclean { runs },
        };
        let mut activity = self.open_log(vm, incarnation, last_end);
        self.vms[vm].state.lock().expect("one thread").found_log = activity.confirmed();
        let marks = self.marks(vm);
        let disks = self.vms[vm].disks.iter().map(|d| d.live().to_vec()).collect();
        self.vms[vm].oracle.disks_hold(disks);
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
        let mut sequencer = Sequencer::new(Settings {
            writer: WriterId(plan.writer),
            mode,
            backlog_limit_bytes: plan.backlog_limit_bytes,
            lock_align_bytes: SECTOR_BYTES,
        });
        if let Some(Plant::Sequencer(bug)) = self.plant {
            sequencer.plant(bug);
        }
        sequencer.set_ceiling(hlc_ceiling_ms, clocks.now, clocks.wall_ms);
        sequencer.observe(hlc_floor);
        let mut queue = ReleaseQueue::new(plan.gate_capacity, mode_at_start(mode));
        if let Some(Plant::Gate(bug)) = self.plant {
            queue.plant(bug);
        }
        let mut copying = Copying::new(Bounds {
            window_bytes: plan.copy_window_bytes,
            rate_bytes_per_s: plan.copy_rate_bytes_per_s,
        });
        if let Some(Plant::Copying(bug)) = self.plant {
            copying.plant(bug);
        }
        let heartbeat = self.plan.groups[plan.group].heartbeat.filter(|_| plan.is_writer());
        let beating = heartbeat.map(|settings| Beating::new(settings, self.plant));
        let wake = EventFd::new().expect("an eventfd");
        let (port, messages) = OwnerPort::new(wake.clone());
        let port = Arc::new(port);
        if self.vms[vm].switched {
            gate.shut();
        }
        let pending = self.vms[vm].pending.clone();
        let (writer, held) = (plan.writer_id(), pending.clone());
        let held = MemberGate { gate: gate.clone(), writer, pending: held };
        if let Some(goes_on) = &goes_on {
            goes_on.begin(&mut activity, &held);
            let id = writer.expect("it has a stream");
            pending.publish_at(id, goes_on.last(), goes_on.last_hlc);
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
        link.add_member(
            attach_of(&self.plan, vm, group_id, epoch, role),
            age,
            self.first_policy(vm, mode),
            says_unreached,
            channel,
            port.clone(),
            Arc::new(held) as Arc<dyn GateControl>,
            self.vms[vm].switched,
            fenced.then(|| "it was said before this start".to_owned()),
            Box::new(Keeper(self.vms[vm].state.clone())),
            on_disk,
            left,
        );
        let bug = match self.plant {
            Some(Plant::Contact(bug)) => Some(bug),
            _ => None,
        };
        let may_serve = !self.vms[vm].switched && !fenced && goes_on.is_none();
        let serve_after = (serves && may_serve).then_some(PATIENCE);
        let lives = self.vms[vm].oracle.lives();
        let life = if goes_on.is_some() { lives - 1 } else { lives };
        let spilling = Spilling::new(backlog, goes_on.as_ref(), &mut sequencer, clocks);
        let unacked: VecDeque<_> =
            goes_on.iter().flat_map(|goes_on| left_unacked(&goes_on.waiting)).collect();
        let left_bytes = unacked.iter().map(|(_, cost)| cost).sum();
        let contact = Contact::with_bug(bug, &mut activity, serve_after, clocks);
        self.vms[vm].run = Some(MemberRun {
            run,
            channel,
            sequencer,
            copying,
            activity,
            told_age: age,
            contact,
            awaits_contact: false,
            life,
            unrecorded: BTreeMap::new(),
            held_back: BTreeMap::new(),
            overflows: 0,
            log_write: None,
            spilling,
            goes_on: goes_on.is_some(),
            tear: None,
            has_died: None,
            port,
            messages,
            wake,
            gate,
            queue,
            pending,
            wall,
            serving: !self.vms[vm].switched
                && (!several || goes_on.is_some() || self.plan.vms[vm].disks.is_empty()),
            observed: CountVector::new(),
            idling: Idling::default(),
            stamp: CountVector::new(),
            held: BTreeMap::new(),
            kernel_queue: VecDeque::new(),
            next_packet: self.rng.number() as u32,
            is_incomplete: false,
            gate_due: false,
            admitted: Admitted::default(),
            submitted: BTreeMap::new(),
            local_ops: BTreeMap::new(),
            op_requests: BTreeMap::new(),
            reads: BTreeSet::new(),
            flushes: BTreeMap::new(),
            poisoned: BTreeSet::new(),
            attached: false,
            refusal: None,
            draining: false,
            last_word: LastWord::default(),
            holds: false,
            ended: false,
            tick_armed: false,
            was_leased: false,
            heard_before: None,
            asks: None,
            unacked,
            left_bytes,
            beating,
            verifying: Verifying::default(),
            wants_verify: false,
            verify_rests_until_ns: 0,
            looked: None,
        });
        Ok(())
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
            self.leaves_backlog(vm, &run);
            self.tear_log(vm, run.log_write);
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
    pub(crate) fn drained(&mut self, vm: usize) {
        let fails = self.local_fails(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        run.ended = true;
        let (seq, hlc) = (run.sequencer.last_seq(), run.sequencer.last_hlc());
        let poisoned = !run.poisoned.is_empty();
        let whole =
            run.sequencer.is_started() && run.copying.is_whole() && run.attached && !poisoned;
        // The mark must not outlive what it speaks of: a power loss may follow.
        let synced = whole && !fails;
        if synced {
            self.vms[vm].disks.iter_mut().for_each(crate::disk::LocalDisk::sync);
        }
        let whole = synced;
        if whole {
            let mut state = self.vms[vm].state.lock().expect("one thread");
            (state.clean, state.served) = (Some((seq, hlc)), false);
        }
        let end = whole.then(|| CleanEnd { seq, marks: self.marks(vm) });
        note!(self, "vm {vm} drained at {seq}, whole {whole}");
        let run = self.vms[vm].run.as_ref().expect("runs");
        if !run.spilling.stands() && !run.sequencer.serves_unrecorded() {
            self.tell_link(vm, ToLink::Detach(end));
        }
        let host = self.plan.vms[vm].host;
        let vms = self.vms_of(host);
        if vms.iter().all(|vm| self.vms[*vm].run.as_ref().is_some_and(|run| run.ended)) {
            let run = self.hosts[host].daemon.as_ref().expect("its members run").run;
            self.schedule.after(MS, Event::After(Later::DaemonEnds { host, run }));
        }
    }
}
