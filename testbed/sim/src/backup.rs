//! The backup server: production's loop of each group on a disk in memory, with simulated connections, syncs that end
//! late while everything else goes on, and jobs that end later.

use crate::failure::{Checked, Checker, check};
use crate::group_driver::{Asker, GroupRun, Seen};
use crate::hearsay::Said;
use crate::lying::is_of_liar;
use crate::marks::Marks;
use crate::net::ConnId;
use crate::operators::Operators;
use crate::probe::Recovered;
use crate::scenario::Scenario;
use crate::schedule::MS;
use crate::server::{INBOX_MAX_BYTES, ServerConn, SimGroup, SimServer, bytes_of};
use crate::world::{Event, Run, World, note};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Incarnation, WriterId};
use tidelock_protocol::message::Attach;
use tidelock_protocol::vector::CountVector;
use tidelock_replica::connection::ConnectionError;
use tidelock_replica::connection::room::InputRoom;
use tidelock_replica::group::{Group, GroupOptions, Link, Output};
use tidelock_replica::group_loop::{Answer, HostEvent, JobEnd, Order};
use tidelock_replica::history::Point;
use tidelock_storage::Storage;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_store::journal::{self, Durable, JournalError, SyncJob};

/// The end of a job beside a group's loop.
#[derive(Debug)]
pub struct JobDone {
    /// A group at another site begins to count its generations anew.
    home: u64,
    generation: u64,
    end: JobEnd<<Memory as Storage>::File>,
}

/// A sync that runs.
#[derive(Debug)]
enum Syncing {
    /// Running: what it covers is durable when it ends.
    Runs(SyncJob<MemoryFile>),
    /// Ended, and nobody has heard of it.
    Ended(Result<Durable, JournalError>),
}

/// An event that waits for a group's thread.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// Event of a host's connection.
    Host(HostEvent),
    /// An operator's order.
    Order(Order, Asker),
}

/// One group at the backup.
#[derive(Debug)]
pub struct GroupSlot {
    /// Its disk.
    pub storage: Memory,
    /// Its loop, while the server runs.
    pub(crate) run: Option<GroupRun>,
    pub(crate) inbox: VecDeque<Incoming>,
    /// Room for frames that wait.
    room: InputRoom,
    /// Until then no sync of its disk ends.
    pub(crate) hangs_until_ns: u64,
    /// A sync that runs: the how manieth, and the opening of the group that has begun it.
    syncing: Option<(u64, u64, Syncing)>,
    syncs: u64,
    /// When its thread looks, if that is planned.
    due_at_ns: Option<u64>,
    /// It is open, as far as the checkers have heard.
    is_open: bool,
    /// How often the group has come to another site.
    home: u64,
    /// How often it was opened.
    opening: u64,
    /// What goes out next.
    pub(crate) outputs: Vec<Output>,
    /// Its disk is full.
    pub full: bool,
    /// The power is about to fail: from some operation on everything does.
    pub dying: bool,
    /// For the checkers: C as it was told to any host.
    pub told: CountVector,
    /// What C was told as, when the newest record that had arrived counted as of this time.
    pub(crate) told_at: Vec<(Hlc, CountVector)>,
    /// The watermark as it was told to any host.
    pub told_watermark: Hlc,
    /// What was acknowledged.
    pub told_durable: CountVector,
    /// The checker's own count of what has arrived without a gap.
    pub(crate) contiguous: CountVector,
    /// Since when and how it is recovered.
    pub recovered: Option<Recovered>,
    /// True for a group that was seeded.
    is_seeded: bool,
    /// Knowledge of operators on its bookmarks and pins.
    pub(crate) marks: Marks,
    /// It was recovered, and will be protected again.
    pub(crate) is_on_its_way: bool,
    /// It was shown at its cut: it can be recovered from then on, whoever comes.
    pub(crate) shown: bool,
    /// The last attempt found that some member was never whole.
    pub initialising: bool,
    /// Times that were asked for, and the answers.
    pub asked: Vec<crate::past::Asked>,
    /// Views of the past that stay open.
    pub views: Vec<crate::past::Kept>,
    /// The snapshot that an operator keeps of it.
    pub(crate) snapshot: Option<crate::snapshots::Kept>,
    /// Points that are held.
    pub held: Vec<crate::past::Held>,
    /// Links of this boot, to know whose they are, and of which run; `None`: a follower's.
    pub writers: BTreeMap<Link, Option<(WriterId, Incarnation)>>,
    /// The last attachment of each VM.
    pub(crate) attaches: BTreeMap<usize, Attach>,
    /// The same, as VMs.
    pub(crate) vms: BTreeMap<Link, usize>,
    /// For the checkers: what members have said that they do without the backup.
    pub(crate) said: Said,
    /// People who order recoveries of it.
    pub(crate) operators: Operators,
}

/// The server.
#[derive(Debug)]
pub struct Backup {
    /// This run; `None` while it is down.
    pub(crate) boot: Option<Run>,
    pub(crate) conns: BTreeMap<ConnId, ServerConn>,
    pub(crate) server: SimServer,
    /// Its groups, by number.
    pub groups: Vec<GroupSlot>,
    /// The disk is so much slower.
    pub slow_factor: u64,
}

impl Backup {
    /// A server with an empty disk.
    #[must_use]
    pub fn new(plan: &Scenario) -> Self {
        let slot = |_| GroupSlot::new(Memory::new(), 0);
        Self {
            boot: None,
            conns: BTreeMap::new(),
            server: SimServer::default(),
            groups: plan.groups.iter().map(slot).collect(),
            slow_factor: 1,
        }
    }

    /// Whether it runs.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.boot.is_some()
    }

    /// Its run, while it runs.
    #[must_use]
    pub fn run(&self) -> Option<Run> {
        self.boot
    }
}

impl GroupSlot {
    fn new(storage: Memory, opening: u64) -> Self {
        Self {
            storage,
            run: None,
            inbox: VecDeque::new(),
            room: InputRoom::new(INBOX_MAX_BYTES),
            hangs_until_ns: 0,
            syncing: None,
            syncs: 0,
            due_at_ns: None,
            is_open: false,
            home: 0,
            opening,
            outputs: Vec::new(),
            full: false,
            dying: false,
            told: CountVector::new(),
            told_at: Vec::new(),
            told_watermark: Hlc(0),
            told_durable: CountVector::new(),
            contiguous: CountVector::new(),
            recovered: None,
            is_seeded: false,
            marks: Marks::default(),
            is_on_its_way: false,
            shown: false,
            initialising: false,
            asked: Vec::new(),
            views: Vec::new(),
            snapshot: None,
            held: Vec::new(),
            writers: BTreeMap::new(),
            attaches: BTreeMap::new(),
            vms: BTreeMap::new(),
            said: Said::default(),
            operators: Operators::default(),
        }
    }

    /// It is another one, at another site, and begins with what was seeded.
    pub(crate) fn seeded(storage: Memory, point: Point, before: &GroupSlot) -> Self {
        Self {
            hangs_until_ns: before.hangs_until_ns,
            is_seeded: true,
            marks: Marks::seeded(point),
            home: before.home + 1,
            syncs: before.syncs,
            ..Self::new(storage, before.opening + 1)
        }
    }

    /// True if it is there by itself, without a host that has created it.
    pub(crate) fn is_seeded(&self) -> bool {
        self.is_seeded
    }

    /// The group, while it works.
    #[must_use]
    pub fn group(&self) -> Option<&Group<Memory>> {
        self.run.as_ref()?.state.group()
    }

    /// The group, for an operator.
    pub fn group_mut(&mut self) -> Option<&mut Group<Memory>> {
        self.run.as_mut()?.state.group_mut()
    }

    /// Bytes of frames that wait, for the bound.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        let in_inbox = self.inbox.iter().flat_map(|event| match event {
            Incoming::Host(HostEvent::Frames { frames, .. }) => frames.iter(),
            _ => Default::default(),
        });
        let in_loop = self.run.iter().flat_map(|run| run.state.frames_waiting());
        in_inbox.chain(in_loop).map(bytes_of).sum()
    }
}

/// How a group is kept.
#[must_use]
pub fn options(plan: &Scenario, group: usize) -> GroupOptions {
    let of = &plan.groups[group];
    GroupOptions {
        journal: journal::Options { segment_bytes: of.segment_bytes },
        unfolded_max_bytes: of.unfolded_max_bytes,
        fold_min_bytes: of.fold_min_bytes,
        fold_rate_bytes_s: of.fold_rate_bytes_s,
        retention: of.retention,
        compress: of.compress,
        hosts: Some((0..plan.hosts.len()).map(|h| format!("h{h}")).collect()),
        members: BTreeMap::new(),
        clock_bound_ms: tidelock_protocol::bounds::CLOCK_BOUND_MS,
        parts: Arc::default(),
    }
}

impl World {
    /// The server starts, and opens its groups.
    pub fn start_backup(&mut self) -> Checked {
        if self.backup.is_up() {
            return Ok(());
        }
        let boot = self.new_run();
        self.backup.boot = Some(boot);
        note!(self, "backup starts");
        self.backup.server = SimServer::default();
        for group in 0..self.backup.groups.len() {
            self.is_served(group);
            self.begin_group(group)?;
        }
        Ok(())
    }

    /// Connections find the group from now on.
    pub(crate) fn is_served(&mut self, group: usize) {
        let room = InputRoom::new(INBOX_MAX_BYTES);
        self.backup.groups[group].room = room.clone();
        let served = SimGroup { number: group, room };
        self.backup.server.groups.begun(&self.plan.groups[group].name, served, None);
    }

    /// The loop of a group begins.
    fn begin_group(&mut self, group: usize) -> Checked {
        let (now, options) = (self.backup_now(), options(&self.plan, group));
        let plan = &self.plan.groups[group];
        let slot = &mut self.backup.groups[group];
        slot.storage.set_faults(slot.faults());
        let mut run = GroupRun::new(&plan.name, slot.storage.clone(), options, plan.past);
        run.at(now, |state, driver| state.open(now, driver));
        let is_absent = run.state.group().is_none() && run.state.broken_because().is_none();
        let was_there = slot.told_durable.entries().next().is_some() || slot.is_seeded;
        slot.run = Some(run);
        check(!(is_absent && was_there), Checker::OpensAgain, || {
            format!("group {group} has vanished")
        })?;
        self.group_has_run(group)
    }

    /// What a group's loop has done is looked at.
    pub(crate) fn group_has_run(&mut self, group: usize) -> Checked {
        let slow_factor = self.backup.slow_factor;
        let slot = &mut self.backup.groups[group];
        // A disk that is replaced, or not full any more; a power cut goes on. It may break twice in one turn.
        let may_break = slot.full || slot.dying || slot.storage.faults().sync_fails;
        let Some(run) = &mut slot.run else { return Ok(()) };
        slot.outputs.append(&mut run.driver.outputs);
        slot.contiguous.clone_from(&run.driver.contiguous);
        let (seen, jobs) =
            (std::mem::take(&mut run.driver.seen), std::mem::take(&mut run.driver.jobs));
        let (boot, home) = (self.backup.boot.expect("its loop runs"), slot.home);
        for (generation, job) in jobs {
            let after = self.rng.range(MS..30 * MS) * slow_factor;
            let end = Box::new(JobDone { home, generation, end: job.run() });
            self.schedule.after(after, Event::JobDone { group, boot, end });
        }
        for seen in seen {
            match seen {
                Seen::Told(link, message) => self.is_told_policy(group, link, &message),
                Seen::Waits(asker, wait) => self.order_waits(group, asker, &wait),
                Seen::Answered(asker, answer @ Answer::Recovered(_)) => {
                    self.order_answered(group, asker, answer)?;
                }
                Seen::Answered(asker, answer) => self.mark_answered(group, asker, answer),
                Seen::Left(connection) => self.backup.groups[group].said.lost(connection),
                Seen::Opened { journaled, is_torn } => {
                    note!(self, "group {group} opens: {journaled} torn {is_torn}");
                    let slot = &mut self.backup.groups[group];
                    (slot.is_open, slot.opening) = (true, slot.opening + 1);
                    self.notice_recovery(group)?;
                    self.check_reopened(group, &journaled)?;
                    self.probe(group)?;
                }
                Seen::Broke(reason) => {
                    note!(self, "group {group} is broken: {reason}");
                    self.send_outputs(group)?;
                    let slot = &mut self.backup.groups[group];
                    if !slot.dying {
                        slot.storage.set_faults(slot.faults());
                    }
                    let was_open = slot.is_open;
                    slot.reset();
                    check(may_break || was_open, Checker::OpensAgain, || {
                        format!("group {group}: {reason}")
                    })?;
                }
            }
        }
        Ok(())
    }

    /// A recovery that the operator was told had failed may be put on record later: when there is
    /// room again, or when the journal is opened again.
    fn notice_recovery(&mut self, group: usize) -> Checked {
        let slot = &self.backup.groups[group];
        let durable = slot.group().filter(|g| g.recovery().is_some());
        let start = durable.and_then(|g| g.state().recovered().cloned());
        let (Some(start), None) = (start, &slot.recovered) else { return Ok(()) };
        check(slot.operators.want_it(), Checker::Ordered, || {
            format!("group {group} is recovered, and whoever has ordered it has gone away")
        })?;
        self.is_recovered(group, start.cut, start.epoch)
    }

    /// An operator stops the server: hosts hear of it, and groups are closed.
    pub fn stop_backup(&mut self) -> Checked {
        if !self.backup.is_up() {
            return Ok(());
        }
        note!(self, "backup stops");
        self.backup.server.groups.stop();
        let now = self.backup_now();
        for group in 0..self.backup.groups.len() {
            self.end_sync(group)?;
            if let Some(run) = &mut self.backup.groups[group].run {
                run.at(now, |state, driver| state.stop(now, driver));
            }
            self.group_has_run(group)?;
            self.send_outputs(group)?;
        }
        for conn in self.backup.conns.keys().copied().collect::<Vec<_>>() {
            self.backup_ends(conn, &ConnectionError::stopping())?;
        }
        self.end_backup(false);
        Ok(())
    }

    /// The server is gone. `power`: with what its disk had not made durable.
    pub fn end_backup(&mut self, power: bool) {
        if self.backup.boot.take().is_none() {
            return;
        }
        note!(self, "backup ends, power loss {power}");
        let conns: Vec<_> = self.backup.conns.keys().copied().collect();
        for conn in conns {
            // A machine without power says nothing.
            if power && let Some(conn) = self.net.conns.get_mut(&conn) {
                conn.down.clear();
            }
            self.backup_closes(conn);
        }
        self.backup.conns.clear();
        let keep_percent = *self.rng.pick(&[0, 30, 50, 90, 100]);
        let rng = &mut self.rng;
        let mut has_hung_up = Vec::new();
        for slot in &mut self.backup.groups {
            slot.reset();
            slot.run = None;
            (slot.syncing, slot.due_at_ns) = (None, None);
            slot.inbox.clear();
            has_hung_up.push(slot.operators.hang_up());
            slot.marks.hang_up();
            slot.dying = false;
            slot.storage = if power {
                slot.storage.crash(&mut || rng.chance(keep_percent, 100))
            } else {
                slot.storage.killed()
            };
        }
        for (group, _) in has_hung_up.into_iter().enumerate().filter(|(_, has)| *has) {
            self.schedule.after(200 * MS, Event::Recover { group });
        }
    }

    /// The thread of a group looks soon.
    pub fn wake_group_now(&mut self, group: usize) {
        if let Some(boot) = self.backup.boot {
            self.wake_group(group, boot, 1000);
        }
    }

    pub(crate) fn wake_group(&mut self, group: usize, boot: Run, after_ns: u64) {
        let at_ns = self.schedule.now_ns() + after_ns;
        let slot = &mut self.backup.groups[group];
        if slot.due_at_ns.is_none_or(|due_at_ns| at_ns < due_at_ns) {
            slot.due_at_ns = Some(at_ns);
            self.schedule.after(after_ns, Event::Group { group, boot });
        }
    }

    // ---- a group's thread

    /// The thread of a group takes a turn.
    pub fn group_event(&mut self, group: usize, boot: Run) -> Checked {
        if self.backup.boot != Some(boot) {
            return Ok(());
        }
        let now_ns = self.schedule.now_ns();
        let slot = &mut self.backup.groups[group];
        // Planned, and then planned earlier.
        if slot.due_at_ns.is_none_or(|due_at_ns| due_at_ns > now_ns) {
            return Ok(());
        }
        slot.due_at_ns = None;
        if slot.run.is_none() {
            self.begin_group(group)?;
        }
        let now = self.backup_now();
        let slot = &mut self.backup.groups[group];
        let run = slot.run.as_mut().expect("just begun");
        run.driver.gone.clone_from(slot.operators.gone());
        run.state.begin_turn();
        while let Some(event) = self.backup.groups[group].inbox.pop_front() {
            let event = match event {
                Incoming::Host(event) => event,
                Incoming::Order(order, asker) => {
                    let run = self.backup.groups[group].run.as_mut().expect("just begun");
                    run.at(now, |state, _| state.order(order, asker, now));
                    continue;
                }
            };
            if let HostEvent::Attach { link, host, attach, .. } = &event
                && !is_of_liar(*link)
            {
                self.is_asked_to_attach(group, *link, host, attach);
            }
            let slot = &mut self.backup.groups[group];
            let run = slot.run.as_mut().expect("just begun");
            run.at(now, |state, driver| state.host(event, now, driver));
            self.group_has_run(group)?;
        }
        let slot = &mut self.backup.groups[group];
        let run = slot.run.as_mut().expect("just begun");
        run.at(now, |state, driver| state.turn(now, driver));
        self.group_has_run(group)?;
        self.notice_recovery(group)?;
        self.send_outputs(group)?;
        self.begin_sync(group, boot);
        self.go_on(group, boot)
    }

    /// A sync that the group's loop has begun ends later. Until then everything else goes on.
    fn begin_sync(&mut self, group: usize, boot: Run) {
        let slot = &mut self.backup.groups[group];
        let Some(run) = &mut slot.run else { return };
        let Some((generation, job)) = run.driver.sync.take() else { return };
        // The disk may be done long before that is heard of.
        let sync = match self.rng.chance(1, 4) {
            true => Syncing::Ended(job.run()),
            false => Syncing::Runs(job),
        };
        slot.syncs += 1;
        let nth = slot.syncs;
        slot.syncing = Some((nth, generation, sync));
        let mean = self.plan.sync_ns * self.backup.slow_factor;
        let hangs_ns = slot.hangs_until_ns.saturating_sub(self.schedule.now_ns());
        let after = self.rng.span(mean).max(hangs_ns);
        self.schedule.after(after, Event::Synced { group, boot, nth });
    }

    /// The end of a sync is told to the group's loop.
    fn end_sync(&mut self, group: usize) -> Checked {
        let now = self.backup_now();
        let slot = &mut self.backup.groups[group];
        let Some((_, generation, sync)) = slot.syncing.take() else { return Ok(()) };
        let Some(run) = &mut slot.run else { return Ok(()) };
        let end = match sync {
            Syncing::Ended(end) => end,
            Syncing::Runs(job) => job.run(),
        };
        run.at(now, |state, driver| state.synced(generation, end, now, driver));
        self.group_has_run(group)?;
        self.notice_recovery(group)?;
        self.send_outputs(group)
    }

    fn is_asked_to_attach(&mut self, group: usize, link: Link, host: &str, attach: &Attach) {
        let writing = attach.writing();
        match writing {
            Some(writing) => note!(
                self,
                "group {group} is asked to attach writer {} ({:?}, run {})",
                writing.writer,
                writing.last_run,
                writing.incarnation
            ),
            None => note!(self, "group {group} is asked to attach a follower on {host}"),
        }
        let slot = &mut self.backup.groups[group];
        slot.writers.insert(link, writing.map(|writing| (writing.writer, writing.incarnation)));
        if let Some(vm) = self.plan.vms.iter().position(|vm| vm.name == attach.member) {
            slot.vms.insert(link, vm);
            slot.attaches.insert(vm, attach.clone());
        }
    }

    pub(crate) fn exists(&self, group: usize) -> bool {
        use tidelock_replica::manifest::Manifest;
        matches!(Manifest::read(&self.backup.groups[group].storage), Ok(Some(_)))
    }

    /// A sync has ended: what it made certain is told.
    pub fn synced(&mut self, group: usize, boot: Run, nth: u64) -> Checked {
        let of = self.backup.groups[group].syncing.as_ref().map(|(nth, ..)| *nth);
        if self.backup.boot != Some(boot) || of != Some(nth) {
            return Ok(());
        }
        self.end_sync(group)?;
        self.go_on(group, boot)
    }

    /// The next turn of a group's loop is planned, and connections are read for which there is room again.
    fn go_on(&mut self, group: usize, boot: Run) -> Checked {
        let now = self.backup_now();
        let slot = &mut self.backup.groups[group];
        let timeout = slot.run.as_ref().and_then(|run| run.state.timeout(now));
        if !slot.inbox.is_empty() {
            self.wake_group(group, boot, 1000);
        } else if let Some(after) = timeout {
            self.wake_group(group, boot, (after.as_nanos() as u64).max(1000));
        }
        // Connections that were not read because too much waited.
        let conns: Vec<_> = self.backup.conns.keys().copied().collect();
        for conn in conns {
            if self.backup.conns.get(&conn).is_some_and(ServerConn::is_full) {
                self.backup_takes(conn)?;
                let host = self.net.conns.get(&conn).map(|c| c.host);
                if let Some(host) = host {
                    self.link_turn(host)?;
                }
            }
        }
        Ok(())
    }

    /// An operator, or a checker, looks at a group beside what its loop does. `None`: it is not open.
    pub(crate) fn with_open<R>(
        &mut self,
        group: usize,
        what: impl FnOnce(&mut World, &mut Group<Memory>) -> R,
    ) -> Option<R> {
        let mut run = self.backup.groups[group].run.take()?;
        let result = run.state.group_mut().map(|of| what(self, of));
        if let Some(of) = run.state.group_mut() {
            self.backup.groups[group].outputs.extend(of.take_outputs());
        }
        self.backup.groups[group].run = Some(run);
        result
    }

    /// A job beside a group's loop has ended.
    pub fn job_done(&mut self, group: usize, boot: Run, done: JobDone) -> Checked {
        if self.backup.boot != Some(boot) {
            return Ok(());
        }
        let now = self.backup_now();
        let slot = &mut self.backup.groups[group];
        let Some(run) = slot.run.as_mut().filter(|_| slot.home == done.home) else {
            return Ok(());
        };
        run.at(now, |state, _| state.job_done(done.generation, done.end, now));
        self.wake_group(group, boot, 1000);
        Ok(())
    }
}

impl GroupSlot {
    /// True if a sync runs.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.syncing.is_some()
    }

    /// What goes out next.
    pub fn outputs_now(&mut self, outputs: Vec<Output>) {
        self.outputs.extend(outputs);
    }

    /// How often it was opened.
    #[must_use]
    pub fn opening(&self) -> u64 {
        self.opening
    }

    /// What its disk does to it now.
    #[must_use]
    pub fn faults(&self) -> Faults {
        Faults { capacity_bytes: self.full.then_some(0), ..Faults::default() }
    }

    /// The group is shut: everything in memory is gone.
    fn reset(&mut self) {
        self.is_open = false;
        self.forget_views();
        self.outputs.clear();
        self.writers.clear();
        self.vms.clear();
        self.said.reset();
    }
}
