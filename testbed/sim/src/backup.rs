//! The backup server: production's groups on a disk in memory, with simulated connections, a
//! thread for each group that is busy while it syncs, and the fold beside it.

use crate::failure::{Checked, Checker, check, fail};
use crate::hearsay::Said;
use crate::net::ConnId;
use crate::probe::Recovered;
use crate::scenario::Scenario;
use crate::schedule::MS;
use crate::server::{Input, ServerConn};
use crate::world::{Event, Run, World, note};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Incarnation, Seq, WriterId};
use tidelock_protocol::message::{Attach, Message, RefusalKind};
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::{
    ConnectionId, Group, GroupCreateError, GroupOptions, Link, Now, Output,
};
use tidelock_replica::history::Point;
use tidelock_storage::Storage;
use tidelock_storage::memory::{Faults, Memory};
use tidelock_store::fold::{FoldError, Folded};
use tidelock_store::journal;

/// The outcome of a fold.
#[derive(Debug)]
pub struct FoldEnd {
    opening: u64,
    cut: CountVector,
    result: Result<Folded, FoldError>,
}

/// One group at the backup.
#[derive(Debug)]
pub struct GroupSlot {
    /// Its disk.
    pub storage: Memory,
    /// Its state, while the server runs and it is open.
    pub group: Option<Group<Memory>>,
    /// By which connection each member was attached last, before it broke.
    attached_by: BTreeMap<String, ConnectionId>,
    pub(crate) inbox: VecDeque<Input>,
    pub(crate) inbox_bytes: usize,
    /// Until then no sync of its disk ends.
    pub(crate) hangs_until_ns: u64,
    /// Frames that came while it did not accept, by link.
    kept: BTreeMap<Link, VecDeque<Frame>>,
    /// Its thread waits for the disk.
    busy: bool,
    due: bool,
    /// Something came while it was busy.
    again: bool,
    folding: bool,
    /// How often it was opened: a fold belongs to one opening.
    opening: u64,
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
    /// What has arrived without a gap.
    pub(crate) contiguous: CountVector,
    /// Since when and how it is recovered.
    pub recovered: Option<Recovered>,
    /// It was seeded, and what was is pinned here.
    pub(crate) seeded: Option<Point>,
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
    /// Points that are held.
    pub held: Vec<crate::past::Held>,
    /// Links of this boot, to know whose they are, and of which run; `None`: a follower's.
    pub writers: BTreeMap<Link, Option<(WriterId, Incarnation)>>,
    /// The same, as VMs.
    pub(crate) vms: BTreeMap<Link, usize>,
    /// For the checkers: what members have said that they do without the backup.
    pub(crate) said: Said,
}

/// The server.
#[derive(Debug)]
pub struct Backup {
    /// This run; `None` while it is down.
    pub(crate) boot: Option<Run>,
    pub(crate) conns: BTreeMap<ConnId, ServerConn>,
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

    /// A host connects.
    pub fn accept(&mut self, conn: ConnId) {
        self.conns.insert(conn, ServerConn::default());
    }

    /// Its end of a connection is closed.
    pub fn forget(&mut self, conn: ConnId) {
        self.conns.remove(&conn);
    }
}

impl GroupSlot {
    fn new(storage: Memory, opening: u64) -> Self {
        Self {
            storage,
            group: None,
            inbox: VecDeque::new(),
            inbox_bytes: 0,
            hangs_until_ns: 0,
            kept: BTreeMap::new(),
            busy: false,
            due: false,
            again: false,
            folding: false,
            opening,
            outputs: Vec::new(),
            full: false,
            dying: false,
            told: CountVector::new(),
            told_at: Vec::new(),
            told_watermark: Hlc(0),
            attached_by: BTreeMap::new(),
            told_durable: CountVector::new(),
            contiguous: CountVector::new(),
            recovered: None,
            seeded: None,
            is_on_its_way: false,
            shown: false,
            initialising: false,
            asked: Vec::new(),
            views: Vec::new(),
            held: Vec::new(),
            writers: BTreeMap::new(),
            vms: BTreeMap::new(),
            said: Said::default(),
        }
    }

    /// It is another one, at another site, and begins with what was seeded.
    pub(crate) fn seeded(storage: Memory, point: Point, before: &GroupSlot) -> Self {
        Self {
            hangs_until_ns: before.hangs_until_ns,
            seeded: Some(point),
            ..Self::new(storage, before.opening + 1)
        }
    }

    /// What waits, for the bound.
    #[must_use]
    pub fn waiting_bytes(&self) -> usize {
        let kept = self.kept.values().flatten();
        let record = |frame: &Frame| match frame {
            Frame::Record(_, record) => record.encoded_len(),
            Frame::Part(_, part) => part.data.len(),
            Frame::Control(..) => 64,
        };
        self.inbox_bytes + kept.map(record).sum::<usize>()
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
        for group in 0..self.backup.groups.len() {
            self.open_group(group)?;
        }
        Ok(())
    }

    fn open_group(&mut self, group: usize) -> Checked {
        let (now, options) = (self.backup_now(), options(&self.plan, group));
        let slot = &mut self.backup.groups[group];
        slot.opening += 1;
        slot.storage.set_faults(slot.faults());
        match Group::open(slot.storage.clone(), now, options) {
            Ok(None) => {
                let was_there =
                    slot.told_durable.entries().next().is_some() || slot.seeded.is_some();
                check(!was_there, Checker::OpensAgain, || format!("group {group} has vanished"))
            }
            Ok(Some((mut opened, torn))) => {
                opened.was_attached_by(std::mem::take(&mut slot.attached_by));
                let journaled = opened.state().journaled();
                note!(
                    self,
                    "group {group} opens: {journaled} epoch {} torn {}",
                    opened.epoch(),
                    torn.is_some()
                );
                let slot = &mut self.backup.groups[group];
                slot.contiguous.clone_from(&journaled);
                slot.group = Some(opened);
                self.notice_recovery(group)?;
                self.check_reopened(group, &journaled)?;
                self.hold_seeded(group)?;
                self.probe(group)
            }
            Err(error) if slot.full => {
                // It is tried again.
                note!(self, "group {group} does not open: {error}");
                Ok(())
            }
            Err(error) => fail(Checker::OpensAgain, format!("group {group}: {error}")),
        }
    }

    /// A recovery that the operator was told had failed may be put on record later: when there is
    /// room again, or when the journal is opened again.
    fn notice_recovery(&mut self, group: usize) -> Checked {
        let slot = &self.backup.groups[group];
        let durable = slot.group.as_ref().filter(|g| g.recovery().is_some());
        let start = durable.and_then(|g| g.state().recovered().cloned());
        match (start, &slot.recovered) {
            (Some(start), None) => self.is_recovered(group, start.cut, start.epoch),
            _ => Ok(()),
        }
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
        for slot in &mut self.backup.groups {
            slot.reset();
            // Another process knows nothing of it, and has none of its connections.
            slot.attached_by.clear();
            slot.inbox.clear();
            slot.inbox_bytes = 0;
            slot.dying = false;
            slot.storage = if power {
                slot.storage.crash(&mut || rng.chance(keep_percent, 100))
            } else {
                slot.storage.killed()
            };
        }
    }

    /// The thread of a group looks soon.
    pub fn wake_group_now(&mut self, group: usize) {
        if let Some(boot) = self.backup.boot {
            self.wake_group(group, boot, 1000);
        }
    }

    pub(crate) fn wake_group(&mut self, group: usize, boot: Run, after_ns: u64) {
        let slot = &mut self.backup.groups[group];
        if slot.busy {
            slot.again = true;
        } else if !slot.due {
            slot.due = true;
            self.schedule.after(after_ns, Event::Group { group, boot });
        }
    }

    // ---- a group's thread

    /// The thread of a group takes a turn.
    pub fn group_event(&mut self, group: usize, boot: Run) -> Checked {
        if self.backup.boot != Some(boot) {
            return Ok(());
        }
        self.backup.groups[group].due = false;
        if self.backup.groups[group].busy {
            return Ok(());
        }
        let slot = &self.backup.groups[group];
        if slot.group.is_none() && !slot.dying && self.exists(group) {
            self.open_group(group)?;
        }
        self.take_kept(group)?;
        let now = self.backup_now();
        while let Some(input) = self.backup.groups[group].inbox.pop_front() {
            self.backup.groups[group].inbox_bytes -= input.bytes();
            match input {
                Input::Attach(link, host, attach) => {
                    if let Some(of) = self.attached_group(group, link, &host, &attach)? {
                        of.attach(now, link, &host, &attach);
                    }
                }
                Input::Frame(link, frame) => self.take_frame(group, link, frame),
                Input::Lost(connection) => {
                    let slot = &mut self.backup.groups[group];
                    slot.kept.retain(|link, _| link.connection != connection);
                    slot.said.lost(connection);
                    if let Some(of) = &mut slot.group {
                        of.connection_lost(connection);
                    }
                }
            }
        }
        let slot = &mut self.backup.groups[group];
        if let Some(of) = &mut slot.group {
            if !of.accepts() {
                of.retry();
            }
            of.flush();
            slot.outputs.extend(of.take_outputs());
        }
        self.notice_recovery(group)?;
        let slot = &mut self.backup.groups[group];
        slot.busy = true;
        let mean = self.plan.sync_ns * self.backup.slow_factor;
        let hangs_ns = slot.hangs_until_ns.saturating_sub(self.schedule.now_ns());
        let after = self.rng.span(mean).max(hangs_ns);
        self.schedule.after(after, Event::Synced { group, boot });
        Ok(())
    }

    pub(crate) fn exists(&self, group: usize) -> bool {
        use tidelock_replica::manifest::Manifest;
        matches!(Manifest::read(&self.backup.groups[group].storage), Ok(Some(_)))
    }

    /// The group that a member is attached to: the first writer makes it.
    fn attached_group(
        &mut self,
        group: usize,
        link: Link,
        host: &str,
        attach: &Attach,
    ) -> Checked<Option<&mut Group<Memory>>> {
        let now = self.backup_now();
        let options = options(&self.plan, group);
        let exists = self.exists(group);
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
        slot.kept.remove(&link);
        let refusal = match &slot.group {
            Some(_) => None,
            None if !exists => {
                let past = self.plan.groups[group].past;
                let created = create(&slot.storage, host, attach, now, options, past);
                slot.storage.set_faults(slot.faults());
                match created {
                    Ok(created) => {
                        slot.contiguous = created.state().journaled();
                        slot.group = Some(created);
                        None
                    }
                    Err(error) => Some(error.refusal()),
                }
            }
            None => Some((RefusalKind::Stopping, "the group is not open".to_owned())),
        };
        if let Some((kind, reason)) = refusal {
            slot.outputs.push(Output::Refuse(link, kind, reason));
            return Ok(None);
        }
        slot.writers.insert(link, writing.map(|writing| (writing.writer, writing.incarnation)));
        if let Some(vm) = self.plan.vms.iter().position(|vm| vm.name == attach.member) {
            slot.vms.insert(link, vm);
        }
        Ok(slot.group.as_mut())
    }

    fn take_frame(&mut self, group: usize, link: Link, frame: Frame) {
        let now = self.backup_now();
        let slot = &mut self.backup.groups[group];
        let Some(of) = &mut slot.group else { return };
        if let Frame::Control(_, Message::Beacon { sent_at }) = frame {
            // Answered also while the group is stalled.
            return match slot.kept.contains_key(&link) {
                false => of.beacon(now, link, sent_at),
                true => of.beacon_ahead(now, link, sent_at),
            };
        }
        if let Some(kept) = slot.kept.get_mut(&link) {
            return kept.push_back(frame);
        }
        self.receive(group, now, link, frame);
    }

    fn receive(&mut self, group: usize, now: Now, link: Link, frame: Frame) {
        let told = |message: &Message| {
            matches!(message, Message::Policy(_) | Message::Detach { .. } | Message::GiveUpLease)
        };
        if let Frame::Control(_, message) = &frame
            && told(message)
        {
            self.is_told_policy(group, link, message);
        }
        self.backup.groups[group].receive(now, link, frame);
    }

    /// What waited while the group did not accept, in order.
    fn take_kept(&mut self, group: usize) -> Checked {
        let now = self.backup_now();
        for (link, frames) in std::mem::take(&mut self.backup.groups[group].kept) {
            for frame in frames {
                match self.backup.groups[group].kept.get_mut(&link) {
                    Some(kept) => kept.push_back(frame),
                    None => self.receive(group, now, link, frame),
                }
            }
        }
        Ok(())
    }

    /// The sync has ended: what it made certain is told.
    pub fn synced(&mut self, group: usize, boot: Run) -> Checked {
        if self.backup.boot != Some(boot) {
            return Ok(());
        }
        self.backup.groups[group].busy = false;
        self.send_outputs(group)?;
        let slot = &mut self.backup.groups[group];
        let broken = slot.group.as_ref().and_then(|g| g.broken().map(str::to_owned));
        if let Some(reason) = broken {
            // The fold may have broken it meanwhile: its members are told.
            let outputs = slot.group.as_mut().map(Group::take_outputs).unwrap_or_default();
            slot.outputs_now(outputs);
            self.send_outputs(group)?;
            note!(self, "group {group} is broken: {reason}");
            self.backup.groups[group].reset();
        }
        let slot = &mut self.backup.groups[group];
        let stalled = slot.group.as_ref().is_some_and(|g| !g.accepts());
        let waits = stalled || slot.group.is_none();
        if std::mem::take(&mut slot.again)
            || !slot.inbox.is_empty()
            || !slot.kept.is_empty()
            || waits
        {
            let after = if waits { self.rng.range(5 * MS..50 * MS) } else { 1000 };
            self.wake_group(group, boot, after);
        }
        // Connections that were not read because too much waited.
        let conns: Vec<_> = self.backup.conns.keys().copied().collect();
        for conn in conns {
            if self.net.conns.get(&conn).is_some_and(|c| !c.up.arrived.is_empty()) {
                self.backup_reads(conn)?;
                let host = self.net.conns.get(&conn).map(|c| c.host);
                if let Some(host) = host {
                    self.link_turn(host)?;
                }
            }
        }
        Ok(())
    }

    // ---- the fold

    /// Looks for work of the fold now and then.
    pub fn schedule_fold(&mut self, group: usize) {
        let boot = self.backup.boot.unwrap_or(0);
        let after = self.rng.range(MS..150 * MS);
        self.schedule.after(after, Event::Fold { group, boot });
    }

    /// The fold looks.
    pub fn fold(&mut self, group: usize, boot: Run) -> Checked {
        if self.backup.boot != Some(boot) {
            self.schedule_fold(group);
            return Ok(());
        }
        let after = self.rng.range(MS..30 * MS) * self.backup.slow_factor;
        let now = self.backup_now();
        let slot = &mut self.backup.groups[group];
        let mut of = slot.group.as_mut().filter(|_| !slot.folding);
        let Some(job) = of.as_mut().and_then(|of| of.fold_job(now)) else {
            if let Some(of) = of {
                aside(of, now);
            }
            self.schedule_fold(group);
            return Ok(());
        };
        slot.folding = true;
        let cut = job.cut.clone();
        let end = Box::new(FoldEnd { opening: slot.opening, cut, result: job.run() });
        self.schedule.after(after, Event::FoldDone { group, boot, end });
        Ok(())
    }

    /// The fold has ended.
    pub fn fold_done(&mut self, group: usize, boot: Run, end: FoldEnd) -> Checked {
        self.schedule_fold(group);
        if self.backup.boot != Some(boot) {
            return Ok(());
        }
        let slot = &mut self.backup.groups[group];
        if slot.opening != end.opening {
            return Ok(());
        }
        slot.folding = false;
        let Some(of) = &mut slot.group else { return Ok(()) };
        of.fold_done(end.cut, end.result);
        self.wake_group(group, boot, 1000);
        Ok(())
    }
}

impl GroupSlot {
    /// Whether its thread waits for the disk: it does nothing else meanwhile.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.busy
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

    fn receive(&mut self, now: Now, link: Link, frame: Frame) {
        let Some(of) = &mut self.group else { return };
        let arrived = match &frame {
            Frame::Record(_, record) => Some((record.writer, record.seq, record.epoch)),
            // What arrives is the whole.
            Frame::Part(..) | Frame::Control(..) => None,
        };
        let before = of.epoch();
        match of.receive(now, link, frame) {
            None => {
                if let Some((writer, seq, epoch)) = arrived {
                    self.note_arrival(writer, seq, epoch, before);
                }
            }
            Some(frame) => self.kept.entry(link).or_default().push_back(frame),
        }
    }

    /// The checker's own count of what came without a gap.
    fn note_arrival(&mut self, writer: WriterId, seq: Seq, epoch: Epoch, granted: Epoch) {
        if epoch == granted && seq == self.contiguous.get(writer).next() {
            self.contiguous.raise(writer, seq);
        }
    }

    /// The group is shut: everything in memory is gone.
    fn reset(&mut self) {
        if let Some(group) = self.group.take() {
            self.attached_by.clone_from(group.attached_by());
            self.notice_lost_pin();
        }
        self.forget_views();
        self.kept.clear();
        self.busy = false;
        self.due = false;
        self.again = false;
        self.folding = false;
        self.outputs.clear();
        self.writers.clear();
        self.vms.clear();
        self.said.reset();
    }
}

/// What else the fold's thread does.
fn aside(of: &mut Group<Memory>, now: Now) {
    if let Some(job) = of.index_job() {
        let segment = job.segment();
        of.index_done(segment, job.run());
    }
    if let Some(job) = of.scrub_job(now) {
        of.scrub_done(now, job.run());
    }
    if let Some(job) = of.compress_job(now) {
        let (segment, len_bytes) = (job.segment(), job.len_bytes());
        of.compress_done(now, segment, len_bytes, job.run());
    }
}

/// A new group, whose writers have written up to `past` before it began.
fn create(
    storage: &Memory,
    host: &str,
    attach: &Attach,
    now: Now,
    options: GroupOptions,
    past: Seq,
) -> Result<Group<Memory>, GroupCreateError> {
    let created = Group::create(storage.clone(), host, attach, now, options.clone())?;
    if past == Seq::ZERO {
        return Ok(created);
    }
    let mut state = created.state().clone();
    drop(created);
    for writer in &mut state.writers {
        (writer.seq, writer.committed) = (past, past);
    }
    // Nothing of this happens in the field, so nothing goes wrong with it.
    storage.set_faults(Faults::default());
    for segment in storage.list("journal").expect("in memory") {
        storage.remove(&format!("journal/{segment}")).expect("in memory");
    }
    let journal = journal::Journal::create(storage.clone(), "journal", state, options.journal);
    drop(journal.expect("in memory"));
    let opened = Group::open(storage.clone(), now, options).expect("in memory");
    Ok(opened.expect("just made").0)
}
