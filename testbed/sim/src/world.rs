//! Everything that is simulated, and the one loop that moves it: an event, what follows from it,
//! the checkers.

use crate::backup::{Backup, JobDone};
use crate::counts::Counts;
use crate::disk::LocalDisk;
use crate::failure::Checked;
use crate::faults::Later;
use crate::files::SimFiles;
use crate::gate::SimGate;
use crate::guest::{Client, Guest};
use crate::hearsay::Leaks;
use crate::host::Daemon;
use crate::lan::Lan;
use crate::narrow::Squeeze;
use crate::net::{ConnId, Net, Way};
use crate::oracle::WriterOracle;
use crate::owner::MemberRun;
use crate::plant::Plant;
use crate::programs::Loaded;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::schedule::{S, Schedule, US};
use crate::switching::Standing;
use crate::tap::Clients;
use crate::trace::Trace;
use std::collections::BTreeSet;
use std::sync::Arc;
use tidelock_daemon_core::owner::Clocks;
use tidelock_daemon_core::owner::driver::DiskOp;
use tidelock_netfilter::gate::Pending;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Incarnation, MonoNanos, Seq};
use tidelock_protocol::tag::Codec;
use tidelock_replica::group::Now;
use tidelock_storage::memory::Memory;

/// Adds a line to the trace.
macro_rules! note {
    ($world:expr, $($arg:tt)*) => {
        $world.trace.line($world.schedule.now_ns(), format_args!($($arg)*))
    };
}
pub(crate) use note;

/// A run of a daemon or a server; never used twice.
pub type Run = u64;

/// What happens.
#[allow(missing_docs)] // The fields are what their names say.
#[derive(Debug)]
pub enum Event {
    /// A guest does the next thing.
    Think { vm: usize, boot: Run },
    /// A guest writes what it is to write while links are narrow.
    Press { vm: usize, number: Run },
    /// An operation on a local disk has ended.
    DiskDone { vm: usize, run: Run, op: DiskOp },
    /// The owner loop was woken.
    Owner { vm: usize, run: Run },
    /// A timer of it has run out.
    Timer { vm: usize, run: Run, token: u64 },
    /// Bytes on a connection to the tap, or its end, have arrived.
    Wire { vm: usize, number: u64 },
    /// A liar comes to a disk of a VM.
    ClientLies { vm: usize },
    /// A liar goes.
    ClientLeaves { vm: usize, number: u64 },
    /// A guest without a connection to a disk connects again.
    Plug { vm: usize, disk: usize },
    /// The gate's thread looks.
    Gate { vm: usize, run: Run },
    /// A packet of one member comes to another one.
    Packet { number: u64 },
    /// A daemon looks whether its groups go on without the backup.
    Look { host: usize, run: Run },
    /// A daemon looks after the ceilings of its writers' times.
    Ceilings { host: usize, run: Run },
    /// A writer waits for one.
    CeilingWanted { vm: usize, run: Run },
    /// A daemon looks whether heartbeats come back.
    Watch { host: usize, run: Run },
    /// A daemon looks after verifications.
    Verify { host: usize, run: Run },
    /// A host looks how far a planned switch is.
    Switch { host: usize, group: usize, run: Run },
    /// Something stops without a word.
    Silence,
    /// An owner loop that has hung goes on.
    LoopGoesOn { vm: usize, run: Run },
    /// The link's loop looks.
    Link { host: usize, run: Run },
    /// Its timer has run out.
    LinkTimer { host: usize, run: Run, deadline: MonoNanos },
    /// Its attempt to connect may have come through.
    Connect { host: usize, run: Run, attempt: u64 },
    /// Bytes may have arrived.
    Deliver { conn: ConnId, way: Way },
    /// One end learns that the connection is gone.
    HostHangup { conn: ConnId },
    /// The other one does.
    BackupHangup { conn: ConnId },
    /// A deadline of a connection at the backup may have passed.
    BackupTimer { conn: ConnId, deadline: MonoNanos },
    /// A group's thread at the backup looks.
    Group { group: usize, boot: Run },
    /// Its sync has ended.
    Synced { group: usize, boot: Run, nth: u64 },
    /// A job beside a group's loop has ended.
    JobDone { group: usize, boot: Run, end: Box<JobDone> },
    /// Something goes wrong.
    Fault,
    /// A peer of the backup says what other hosts say.
    Lie,
    /// A liar has nothing more to say.
    LiarLeaves { conn: ConnId },
    /// It is over, or goes on: see [`crate::faults`].
    After(crate::faults::Later),
    /// The operator recovers a group.
    Recover { group: usize },
    /// The guest of a recovered group writes.
    BackupGuest { group: usize },
}

/// What kernel programs of one member are given by a daemon. They outlive it.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The group's state.
    pub gate: Arc<SimGate>,
    /// How tags are written.
    pub codec: Codec,
    /// Who is a member.
    pub peers: Vec<usize>,
}

/// One VM with all that is its own.
#[derive(Debug)]
pub struct Vm {
    /// Its local disks, which outlive everything.
    pub disks: Vec<LocalDisk>,
    /// The directory of its backlog on disk, if it has one.
    pub backlog_files: Option<Arc<SimFiles>>,
    /// What P has named for a comparison, also if the last records before it died with their process.
    pub named: (Seq, Hlc),
    /// The next process must be able to go on with what is there.
    pub must_go_on: bool,
    /// The guest.
    pub guest: Guest,
    /// Connections of its hypervisor to the tap.
    pub(crate) clients: Clients,
    /// Who talks with it from outside.
    pub client: Client,
    /// The number of the last run that was begun.
    pub incarnation: Incarnation,
    /// What must be true of its disks.
    pub oracle: WriterOracle,
    /// While the daemon runs.
    pub run: Option<MemberRun>,
    /// P. Where packets are tagged it is in a kernel map, which outlives the daemon.
    pub pending: Arc<Pending>,
    /// What the kernel programs know of the group: from the last daemon.
    pub kernel: Option<Kernel>,
    /// The kernel programs, from the first packet on that a daemon's settings are used for.
    pub(crate) programs: Option<Loaded>,
    /// Local requests fail in one of so many cases; 0: never.
    pub errors_one_in: u64,
    /// The local disks are so much slower.
    pub slow_factor: u64,
    /// Words of this member on a switch to the backup site, for the checkers.
    pub(crate) standing: Standing,
    /// Extents of the map in which a guest has written without a record, as long as no comparison has begun.
    pub unrecorded: BTreeSet<(DiskId, u64)>,
    /// For the checkers: the last verification has told of what still differs.
    pub is_told_to_differ: bool,
    /// How many verifications have ended, and how many with a repair.
    pub repaired_or_verified: [u64; 2],
}

impl Vm {
    /// Before anything runs.
    #[must_use]
    pub fn new(plan: &Scenario, vm: usize, oracle: WriterOracle) -> Self {
        let of = &plan.vms[vm];
        let writers = plan.writers_max(of.group);
        Self {
            disks: of.disks.iter().map(|disk| LocalDisk::new(disk.content.clone())).collect(),
            backlog_files: of.backlog.map(|backlog| backlog.files(&of.name)),
            named: (Seq::ZERO, Hlc(0)),
            must_go_on: false,
            guest: Guest::new(writers),
            clients: Clients::new(Rng::new(plan.switch_seed ^ (vm as u64) << 40)),
            client: Client::new(writers),
            incarnation: Incarnation(0),
            oracle,
            run: None,
            pending: Arc::new(Pending::new()),
            kernel: None,
            programs: None,
            errors_one_in: 0,
            slow_factor: 1,
            standing: Standing::default(),
            unrecorded: BTreeSet::new(),
            is_told_to_differ: false,
            repaired_or_verified: [0; 2],
        }
    }
}

/// One host.
#[derive(Debug)]
pub struct Host {
    /// Whether it has power.
    pub power: bool,
    /// How often it has lost it.
    pub boots: u64,
    /// Its daemon.
    pub daemon: Option<Daemon>,
    /// Gone for good, or until the end of the run.
    pub lost: bool,
    /// It is being shut down cleanly.
    pub restarts: bool,
    /// Its configuration is being changed: no daemon is started.
    pub changes: bool,
    /// State that its daemons keep between runs.
    pub state_dir: Memory,
}

/// The world.
pub struct World {
    /// What the seed has drawn.
    pub plan: Scenario,
    /// Chance.
    pub rng: Rng,
    /// Chance in the middle of planned switches: other seeds do not depend on it.
    pub(crate) switch_rng: Rng,
    /// Chance by which somebody asks for a status: nothing else depends on it.
    pub(crate) status_rng: Rng,
    /// Time.
    pub schedule: Schedule<Event>,
    /// What happened.
    pub trace: Trace,
    /// The bug that is planted, if any.
    pub plant: Option<Plant>,
    /// Hosts.
    pub hosts: Vec<Host>,
    /// VMs.
    pub vms: Vec<Vm>,
    /// The network to the backup.
    pub net: Net,
    /// The network between members.
    pub lan: Lan,
    /// The backup site.
    pub backup: Backup,
    /// What hosts have let out that no tag names, by group.
    pub leaks: Vec<Leaks>,
    /// Liars so far.
    pub(crate) liars: u64,
    /// Faults come.
    pub faulty: bool,
    /// Guests begin new things.
    pub busy: bool,
    /// While daemons end after all has come back: whether the backup has everything of those that have ended.
    pub(crate) ends_whole: Option<bool>,
    /// Links are narrow, and guests write as much as was drawn.
    pub squeeze: Option<Squeeze>,
    /// Images of the backup were changed behind its back: of what they were nothing can be said.
    pub is_past_spoilt: bool,
    /// So many events more until the faults stop.
    pub more_steps: u64,
    /// Numbers of runs.
    pub runs: Run,
    /// Counts.
    pub counts: Counts,
}

impl World {
    /// The world of a seed, before anything runs.
    #[must_use]
    pub fn new(seed: u64, plant: Option<Plant>, live_trace: bool) -> Self {
        let mut rng = Rng::new(seed);
        let plan = Scenario::draw(&mut rng);
        let vms = plan
            .vms
            .iter()
            .enumerate()
            .map(|(nth, vm)| {
                let contents = vm.disks.iter().map(|d| d.content.clone()).collect();
                let past = if vm.joins { Seq::ZERO } else { plan.groups[vm.group].past };
                Vm::new(&plan, nth, WriterOracle::new(contents).after(past))
            })
            .collect();
        let hosts = plan
            .hosts
            .iter()
            .map(|_| Host {
                power: true,
                boots: 0,
                daemon: None,
                lost: false,
                restarts: false,
                changes: false,
                state_dir: Memory::new(),
            })
            .collect();
        Self {
            net: Net::new(plan.hosts.len()),
            lan: Lan::default(),
            backup: Backup::new(&plan),
            liars: 0,
            leaks: plan.groups.iter().map(|_| Leaks::default()).collect(),
            hosts,
            vms,
            rng,
            switch_rng: Rng::new(plan.switch_seed),
            status_rng: Rng::new(!plan.switch_seed),
            schedule: Schedule::new(),
            trace: Trace::new(live_trace),
            plant,
            faulty: true,
            busy: true,
            ends_whole: None,
            squeeze: None,
            is_past_spoilt: false,
            more_steps: 0,
            runs: 0,
            counts: Counts::default(),
            plan,
        }
    }

    /// Everything starts.
    pub fn boot(&mut self) -> Checked {
        self.start_backup()?;
        self.describe();
        self.begin_adoptions();
        for host in 0..self.hosts.len() {
            self.start_daemon(host)?;
        }
        for vm in (0..self.vms.len()).filter(|vm| self.plan.is_member(*vm)).collect::<Vec<_>>() {
            self.boot_guest(vm)?;
        }
        if let Some(percent) = self.plan.narrow.and_then(|narrow| narrow.from_start) {
            self.begin_squeeze(percent, false);
        }
        self.begin_silences();
        if let Some(after) = self.plan.switch_after_ns {
            let later = Later::SwitchOver { group: 0, tries: 0, recovers: false };
            self.later(later, after);
        }
        if let Some(after) = self.plan.disaster_after_ns {
            self.later(Later::FirstDisaster { group: 0 }, after);
        }
        let after = self.rng.span(self.plan.fault_ns);
        self.schedule.after(after, Event::Fault);
        self.schedule.after(after, Event::Lie);
        (0..self.vms.len()).try_for_each(|vm| self.client_lies(vm))
    }

    fn describe(&mut self) {
        let p = &self.plan;
        note!(
            self,
            "{} hosts, delay {} us + {} us, window {} bytes, {} bytes/ms, local {} us, sync {} us",
            p.hosts.len(),
            p.delay_ns / US,
            p.jitter_ns / US,
            p.window_bytes,
            p.bytes_per_ms,
            p.local_ns / US,
            p.sync_ns / US
        );
        if let Some(narrow) = &p.narrow {
            note!(self, "{narrow:?}");
        }
        for g in &p.groups {
            note!(
                self,
                "group {}: {} of {} writers and {} followers, tags {}, lease {} ms, fold from {}, at most {}, segments of {}, {:?}, {:?}",
                g.name,
                g.mode,
                g.vms.len(),
                g.followers.len(),
                g.form,
                g.lease_ms,
                g.fold_min_bytes,
                g.unfolded_max_bytes,
                g.segment_bytes,
                g.retention,
                g.compress
            );
        }
        for v in &p.vms {
            let disks: Vec<_> = v.disks.iter().map(|d| d.content.len()).collect();
            note!(
                self,
                "{} on host {}: disks {disks:?}, backlog {} {:?}, gate {}, depth {}, think {} us, does \
                 {:?}, copies {} at {}/s",
                v.name,
                v.host,
                v.backlog_limit_bytes,
                v.backlog,
                v.gate_capacity,
                v.queue_depth,
                v.think_ns / US,
                v.weights,
                v.copy_window_bytes,
                v.copy_rate_bytes_per_s
            );
        }
    }

    /// A number for a new run.
    pub fn new_run(&mut self) -> Run {
        self.runs += 1;
        self.runs
    }

    /// The next event happens. Where none is planned, time passes.
    pub fn step(&mut self) -> Checked {
        let Some(event) = self.schedule.advance() else {
            self.schedule.pass(S);
            return Ok(());
        };
        self.counts.events += 1;
        self.dispatch(event)?;
        self.notice_power();
        self.bury();
        self.notice_wakeups();
        self.asks_status()?;
        self.check_bounds()
    }

    fn dispatch(&mut self, event: Event) -> Checked {
        match event {
            Event::Think { vm, boot } => self.think(vm, boot),
            Event::Press { vm, number } => self.press(vm, number),
            Event::DiskDone { vm, run, op } => self.disk_done(vm, run, op),
            Event::Owner { vm, run } => self.owner_woken(vm, run),
            Event::Timer { vm, run, token } => self.timer_due(vm, run, token),
            Event::Wire { vm, number } => self.wire_event(vm, number),
            Event::ClientLies { vm } => self.client_lies(vm),
            Event::ClientLeaves { vm, number } => {
                self.leaves(vm, number);
                Ok(())
            }
            Event::Plug { vm, disk } => self.plugs_again(vm, disk),
            Event::Gate { vm, run } => self.gate_event(vm, run),
            Event::Packet { number } => self.arrives(number),
            Event::Link { host, run } => self.link_event(host, run),
            Event::Look { host, run } => self.look(host, run),
            Event::Watch { host, run } => self.watch(host, run),
            Event::Verify { host, run } => self.look_at_verifications(host, run),
            Event::Switch { host, group, run } => self.switch_event(host, group, run),
            Event::Silence => {
                self.silence();
                Ok(())
            }
            Event::LoopGoesOn { vm, run } => self.loop_goes_on(vm, run),
            Event::Ceilings { host, run } => self.keep_ceilings(host, run),
            Event::CeilingWanted { vm, run } => self.raise_ceiling(vm, run),
            Event::LinkTimer { host, run, deadline } => self.link_timer(host, run, deadline),
            Event::Connect { host, run, attempt } => self.connect(host, run, attempt),
            Event::Deliver { conn, way } => self.deliver(conn, way),
            Event::HostHangup { conn } => self.host_hangup(conn),
            Event::BackupHangup { conn } => self.backup_hangup(conn),
            Event::Lie => self.peer_lies(),
            Event::LiarLeaves { conn } => self.backup_loses(conn),
            Event::BackupTimer { conn, deadline } => self.backup_timer(conn, deadline),
            Event::Group { group, boot } => self.group_event(group, boot),
            Event::Synced { group, boot, nth } => self.synced(group, boot, nth),
            Event::JobDone { group, boot, end } => self.job_done(group, boot, *end),
            Event::Fault => self.fault(),
            Event::After(later) => self.later_event(later),
            Event::Recover { group } => self.recover(group),
            Event::BackupGuest { group } => self.backup_guest(group),
        }
    }

    /// Loops that were woken get a turn soon.
    fn notice_wakeups(&mut self) {
        for vm in 0..self.vms.len() {
            let Some(run) = &mut self.vms[vm].run else { continue };
            if run.wake.take() {
                let after = self.rng.range(1..60 * US);
                self.schedule.after(after, Event::Owner { vm, run: run.run });
            }
            if run.gate.take_woken() {
                self.gate_looks(vm, 200 * US);
            }
        }
    }

    /// The clocks of a host.
    #[must_use]
    pub fn clocks(&self, host: usize) -> Clocks {
        let clock = &self.plan.hosts[host];
        let now_ns = self.schedule.now_ns();
        Clocks { now: clock.mono(now_ns), wall_ms: clock.wall_ms(now_ns) }
    }

    /// A host's clock.
    #[must_use]
    pub fn host_now(&self, host: usize) -> MonoNanos {
        self.clocks(host).now
    }

    /// The backup's clocks.
    #[must_use]
    pub fn backup_now(&self) -> Now {
        let now_ns = self.schedule.now_ns();
        let clock = &self.plan.backup;
        Now { mono: clock.mono(now_ns), unix_ms: clock.wall_ms(now_ns) }
    }

    /// Seconds since the beginning.
    #[must_use]
    pub fn elapsed_s(&self) -> u64 {
        (self.schedule.now_ns() - S) / S
    }
}
