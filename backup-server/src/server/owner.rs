//! One thread for each group, which alone touches its state: no locks.
//!
//! ```text
//!  Absent ──attach──▶ Live ◀──opened── Broken
//!                      └──journal failed──▶
//! ```
//!
//! Each turn takes everything from the inbox, lets the group write it as one batch, syncs, and
//! sends what follows from that. The next batch forms meanwhile: group commit without a timer.
//! One connection causes no more work in a turn than [`deferred::TURN_WORK_BYTES`]: the rest of its frames
//! waits, in order, so that beacons and records of other hosts are taken in between.
//! Only what has to be tried again (no room, a failed disk) is tried once a second.

use super::clock;
use super::inbox::{Damage, DamagedAsk, Event, Inbox, LiveDisks, RepairStatus};
use super::outbox::Outbox;
use super::past::Past;
use super::peer_log::peer_log;
use super::repair;
use super::snapshots;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tidelock_protocol::message::{Attach, Message, RefusalKind};
use tidelock_replica::group::{
    ConnectionId, Group, GroupCreateError, GroupError, GroupOptions, Link, MoveError, Output,
    RecoverError, RemoveError, ScrubJob,
};
use tidelock_replica::manifest;
use tidelock_storage::files::{Files, OpenFile};
use tidelock_storage::reserve::Reserve;
use tidelock_store::fold::FoldJob;
use tidelock_store::journal::{CompressJob, IndexJob};
use tokio::sync::oneshot;

mod deferred;
#[cfg(test)]
mod tests;

use deferred::Deferred;
pub(super) use deferred::work_bytes;

const RETRY: Duration = Duration::from_secs(1);
/// Guests' writes that no flush has covered are made durable at this point anyway, so that they
/// can be folded.
const UNSYNCED_MAX_BYTES: u64 = 64 << 20;

/// A group's owner, from outside.
#[derive(Clone, Debug)]
pub struct OwnerHandle {
    /// The group's name.
    pub group: Arc<str>,
    /// Its inbox.
    pub inbox: Arc<Inbox>,
}

enum Phase {
    /// There is no group yet.
    Absent,
    Live(Box<Group<Files>>),
    Broken {
        kind: RefusalKind,
        reason: String,
        retry_at: Instant,
    },
}

struct Waiting {
    done: oneshot::Sender<io::Result<()>>,
    durable: bool,
}

/// The owner of a group.
pub(super) struct Owner {
    group: Arc<str>,
    dir: PathBuf,
    snapshots_dir: PathBuf,
    options: GroupOptions,
    reserve: Arc<Reserve>,
    inbox: Arc<Inbox>,
    phase: Phase,
    /// Of the group that is live.
    past: Option<Past>,
    generation: u64,
    outboxes: BTreeMap<ConnectionId, Arc<Outbox>>,
    /// By connection, in order. None of them is empty.
    deferred: BTreeMap<ConnectionId, VecDeque<Deferred>>,
    /// Writes and flushes of recovered guests that the group has not taken yet, in order.
    guests: VecDeque<Event>,
    /// Work of this turn, by the connection that has caused it.
    worked: BTreeMap<ConnectionId, u64>,
    waiting: Vec<Waiting>,
    /// Who waits for the cut, by what the group calls it.
    covering: BTreeMap<u64, oneshot::Sender<Result<Vec<String>, String>>>,
    unsynced_bytes: u64,
    folder: Option<Folder>,
    fold_not_before: Option<Instant>,
    /// Of the views that were handed out since the group was opened.
    alive: Arc<AtomicBool>,
    /// By which connection each member was attached last, before the group broke.
    attached_by: BTreeMap<String, ConnectionId>,
    stopping: bool,
}

/// Starts the thread of an owner.
pub(super) fn spawn(mut owner: Owner) -> io::Result<(OwnerHandle, JoinHandle<()>)> {
    let group = Arc::clone(&owner.group);
    let handle = OwnerHandle { group: Arc::clone(&owner.group), inbox: Arc::clone(&owner.inbox) };
    let thread = std::thread::Builder::new().name(format!("group-{group}")).spawn(move || {
        // Whatever happens here, nobody waits for an answer that never comes.
        let _closer = Closer(Arc::clone(&owner.inbox));
        owner.open();
        owner.run();
    })?;
    Ok((handle, thread))
}

struct Closer(Arc<Inbox>);

impl Drop for Closer {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Owner {
    /// The owner of a group whose directory is `dir`; it need not exist yet.
    pub(super) fn new(
        group: &str,
        dir: &Path,
        snapshots_dir: &Path,
        options: GroupOptions,
        input_max_bytes: u64,
        reserve: Arc<Reserve>,
    ) -> Self {
        Self {
            group: group.into(),
            dir: dir.to_owned(),
            snapshots_dir: snapshots_dir.to_owned(),
            options,
            reserve,
            inbox: Arc::new(Inbox::new(input_max_bytes)),
            phase: Phase::Absent,
            past: None,
            generation: 0,
            outboxes: BTreeMap::new(),
            deferred: BTreeMap::new(),
            guests: VecDeque::new(),
            worked: BTreeMap::new(),
            waiting: Vec::new(),
            covering: BTreeMap::new(),
            unsynced_bytes: 0,
            folder: None,
            fold_not_before: None,
            alive: Arc::default(),
            attached_by: BTreeMap::new(),
            stopping: false,
        }
    }

    fn storage(&self) -> Files {
        Files::new(self.dir.clone()).with_reserve(Arc::clone(&self.reserve))
    }

    fn run(&mut self) {
        while !self.stopping {
            let events = self.inbox.take(self.timeout());
            self.worked.clear();
            for event in events {
                self.handle(event);
            }
            self.turn();
            let came_to_nothing = matches!(self.phase, Phase::Absent) && self.outboxes.is_empty();
            if came_to_nothing && self.inbox.close_if_empty() {
                // An attachment that was refused: no group came of it.
                return;
            }
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if self.deferred.keys().any(|connection| self.has_worked(*connection)) {
            return Some(Duration::ZERO);
        }
        let pause = match &self.phase {
            Phase::Live(group) => group.is_compressing(clock::now()),
            _ => None,
        };
        let retry = match &self.phase {
            Phase::Broken { .. } => true,
            Phase::Live(group) => {
                let waits = group.is_scrubbing() || group.fold_is_paced(clock::now());
                !group.accepts() || waits || pause.is_some()
            }
            Phase::Absent => false,
        };
        let waits = !self.deferred.is_empty() || !self.guests.is_empty();
        let retry = retry || self.fold_not_before.is_some() || waits;
        // The pause after a small segment is short; when it is over, all else is waited for.
        let pause = pause.filter(|pause| *pause > 0).map(Duration::from_nanos);
        retry.then(|| pause.map_or(RETRY, |pause| pause.min(RETRY)))
    }

    fn open(&mut self) {
        self.generation += 1;
        self.alive = Arc::new(AtomicBool::new(true));
        if !self.dir.join("group.json").exists() {
            self.phase = Phase::Absent;
            return;
        }
        let storage = self.storage();
        match Group::open(storage, clock::now(), self.options.clone()) {
            Ok(None) => self.phase = Phase::Absent,
            Ok(Some((mut group, torn))) => {
                if let Some(torn) = torn {
                    tracing::warn!(
                        group = &*self.group,
                        segment = torn.file,
                        offset = torn.offset,
                        bytes = torn.len_bytes,
                        "the last write was not finished when the server stopped; nothing of it \
                         was acknowledged, and it is cut off"
                    );
                }
                tracing::info!(
                    group = &*self.group,
                    epoch = %group.epoch(),
                    committed = %group.committed(),
                    recovered = group.recovery().is_some(),
                    unfolded_bytes = group.unfolded_bytes(),
                    "opened"
                );
                group.was_attached_by(std::mem::take(&mut self.attached_by));
                let snapshots = snapshots::needs(&self.snapshots_dir, &self.group);
                self.past = Some(Past::open(&mut group, snapshots));
                self.phase = Phase::Live(Box::new(group));
            }
            Err(error) => self.broken(&error),
        }
    }

    fn broken(&mut self, error: &GroupError) {
        let kind = error.refusal_kind();
        self.break_down(kind, error.to_string());
    }

    fn break_down(&mut self, kind: RefusalKind, reason: String) {
        let told = matches!(&self.phase, Phase::Broken { reason: old, .. } if *old == reason);
        if !told {
            tracing::error!(group = &*self.group, reason, "the group does not work");
        }
        for waiting in self.waiting.drain(..) {
            let _ = waiting.done.send(Err(io::Error::other(reason.clone())));
        }
        self.drop_deferred(&reason);
        self.covering.clear();
        if let Phase::Live(group) = &self.phase {
            self.attached_by.clone_from(group.attached_by());
        }
        self.alive.store(false, Ordering::Release);
        self.phase = Phase::Broken { kind, reason, retry_at: Instant::now() + RETRY };
    }

    /// Whatever it has failed by may be over, and a disaster does not wait for the next attempt.
    fn open_if_broken(&mut self) {
        if matches!(self.phase, Phase::Broken { .. }) {
            self.open();
        }
    }

    fn handle(&mut self, event: Event) {
        if let Phase::Live(group) = &mut self.phase {
            group.tick(clock::now());
        }
        match event {
            event @ Event::Attach { link: Link { connection, .. }, .. } => {
                self.in_order(connection, event);
            }
            Event::Frames { link, frames, room } => {
                let deferred = self.deferred.entry(link.connection).or_default();
                let frames = VecDeque::from(frames);
                deferred.push_back(Deferred::Frames { link, frames, _room: room });
                self.take_deferred_of(link.connection);
            }
            Event::Beacon { link, sent_at, permit: _permit } => {
                let is_ahead = self.has_deferred(link);
                if let Phase::Live(group) = &mut self.phase {
                    match is_ahead {
                        false => group.beacon(clock::now(), link, sent_at),
                        true => group.beacon_ahead(clock::now(), link, sent_at),
                    }
                }
            }
            event @ Event::ConnectionLost(connection) => self.in_order(connection, event),
            event @ (Event::GuestWrite { .. } | Event::GuestFlush { .. }) => {
                self.guests.push_back(event);
                self.take_guests();
            }
            Event::FoldDone { generation, cut, result } => {
                self.fold_not_before = result.is_err().then(|| Instant::now() + RETRY);
                if let (Phase::Live(group), true) = (&mut self.phase, generation == self.generation)
                {
                    group.fold_done(cut, result);
                }
            }
            Event::IndexDone { generation, segment, result } => {
                if let (Phase::Live(group), true) = (&mut self.phase, generation == self.generation)
                {
                    group.index_done(segment, result);
                }
            }
            Event::ScrubDone { generation, done } => {
                if let (Phase::Live(group), true) = (&mut self.phase, generation == self.generation)
                {
                    group.scrub_done(clock::now(), done);
                }
            }
            Event::CompressDone { generation, segment, len_bytes, result } => {
                if let (Phase::Live(group), true) = (&mut self.phase, generation == self.generation)
                {
                    group.compress_done(clock::now(), segment, len_bytes, result);
                }
            }
            Event::SnapshotOver { name } => {
                if let Some(past) = &mut self.past {
                    past.snapshot_over(&name);
                }
            }
            Event::Cover { link, done } => self.cover(link, done),
            Event::Repair { apply, done } => {
                let _ = done.send(self.repair(apply));
            }
            Event::Stop => self.stop(),
            Event::OpenAgain { done } => {
                self.open_if_broken();
                let _ = done.send(());
            }
            event @ Event::Recover { .. } => {
                self.open_if_broken();
                // The recovery has every record that has arrived.
                self.take_all_deferred();
                self.answer(event);
            }
            event @ (Event::Marks { .. } | Event::SetMark { .. } | Event::RemoveMark { .. }) => {
                self.marks(event);
            }
            query => self.answer(query),
        }
    }

    fn answer(&mut self, query: Event) {
        let now = clock::now();
        // An answer that nobody waits for any more is dropped.
        match (query, &mut self.phase) {
            (
                Event::Recover { primary_declared_dead: dead, point, accepts_damage, done },
                Phase::Live(group),
            ) => {
                let recovered = match (&point, accepts_damage) {
                    (point, true) => group.recover_accepting(now, dead, point.as_ref()),
                    (Some(point), false) => group.recover_at(now, dead, point),
                    (None, false) => group.recover(now, dead),
                };
                let _ = done.send(recovered);
            }
            (Event::Damaged { ask, done }, Phase::Live(group)) => {
                let _ = done.send(damaged(group, ask));
            }
            (Event::Damaged { done, .. }, phase) => {
                let _ = done.send(Err(phase.unavailable().to_string()));
            }
            (Event::Recover { done, .. }, phase) => {
                let _ = done.send(Err(phase.unavailable()));
            }
            (Event::MoveMember { member, to, done }, Phase::Live(group)) => {
                let moved = group.move_member(now, &member, &to);
                if let Ok(moved) = &moved {
                    let from = moved.from.as_deref().unwrap_or("nobody");
                    tracing::warn!(group = &*self.group, member, from, to, "moved by the operator");
                }
                let _ = done.send(moved);
            }
            (Event::MoveMember { done, .. }, phase) => {
                let _ = done.send(Err(MoveError::Unavailable(phase.unavailable().to_string())));
            }
            (Event::Remove { member, done }, Phase::Live(group)) => {
                let removed = group.remove(&member);
                if removed.is_ok() {
                    tracing::warn!(group = &*self.group, member, "removed by the operator");
                }
                let _ = done.send(removed);
            }
            (Event::Remove { done, .. }, phase) => {
                let reason = phase.unavailable().to_string();
                let _ = done.send(Err(RemoveError::Journal(reason)));
            }
            (Event::History { done }, Phase::Live(group)) => {
                let _ = done.send(group.history().map_err(|e| e.to_string()));
            }
            (Event::History { done }, phase) => {
                let _ = done.send(Err(phase.unavailable().to_string()));
            }
            (Event::Disks { done }, Phase::Live(group)) if group.recovery().is_some() => {
                let disks = group.recovered_disks();
                let failed = |e| tracing::error!(group = &*self.group, "recovered disks: {e}");
                let alive = Arc::clone(&self.alive);
                let live = disks.map_err(failed).map(|disks| LiveDisks { disks, alive });
                let _ = done.send(live.ok());
            }
            (Event::Disks { done }, _) => {
                let _ = done.send(None);
            }
            (Event::Machine { member, done }, Phase::Live(group)) => {
                let machine = manifest::read_machine(group.storage(), &member);
                let _ = done.send(machine.map_err(|e| e.to_string()));
            }
            (Event::Machine { done, .. }, phase) => {
                let _ = done.send(Err(phase.unavailable().to_string()));
            }
            (Event::ApproveMachine { member, machine, done }, Phase::Live(group)) => {
                let written = manifest::write_approved(group.storage(), &member, &machine);
                let _ = done.send(written.map_err(|e| e.to_string()));
            }
            (Event::ApproveMachine { done, .. }, phase) => {
                let _ = done.send(Err(phase.unavailable().to_string()));
            }
            (Event::Status { done }, Phase::Live(group)) => {
                let _ = done.send(Some(group.status(now)));
            }
            (Event::Status { done }, Phase::Broken { reason, .. }) => {
                let status = tidelock_replica::group::GroupStatus::of_broken(&self.group, reason);
                let _ = done.send(Some(status));
            }
            (Event::Status { done }, Phase::Absent) => {
                let _ = done.send(None);
            }
            (other, _) => unreachable!("handled before: {other:?}"),
        }
    }

    fn marks(&mut self, event: Event) {
        let unavailable = self.phase.unavailable().to_string();
        let live = match (&mut self.phase, &mut self.past) {
            (Phase::Live(group), Some(past)) => Ok((group, past)),
            _ => Err(unavailable),
        };
        match event {
            Event::Marks { done } => {
                let _ = done.send(live.and_then(|(group, past)| past.all(group, group.now_ms())));
            }
            Event::SetMark { name, mark, moves, done } => {
                let _ =
                    done.send(live.and_then(|(group, past)| past.set(group, &name, mark, moves)));
            }
            Event::RemoveMark { name, kind, done } => {
                let _ = done.send(live.and_then(|(_, past)| past.remove(&name, kind)));
            }
            other => unreachable!("not of marks: {other:?}"),
        }
    }

    fn cover(&mut self, link: Link, done: oneshot::Sender<Result<Vec<String>, String>>) {
        let id = match &mut self.phase {
            Phase::Live(group) => group.cover(link).ok_or("the member is not attached".to_owned()),
            phase => Err(phase.unavailable().to_string()),
        };
        match id {
            Ok(id) => drop(self.covering.insert(id, done)),
            // Nobody waits for it any more.
            Err(reason) => drop(done.send(Err(reason))),
        }
    }

    fn tell_covered(&mut self) {
        if self.covering.is_empty() {
            return;
        }
        let Phase::Live(group) = &mut self.phase else { return };
        for covered in group.take_covered() {
            if let Some(done) = self.covering.remove(&covered.id) {
                let _ = done.send(Ok(covered.without));
            }
        }
        self.covering.retain(|_, done| !done.is_closed());
    }

    /// Cuts the journal of a group that cannot be opened, or only finds out where.
    fn repair(&mut self, apply: bool) -> Result<RepairStatus, String> {
        if !matches!(self.phase, Phase::Broken { .. }) {
            return Err(format!("group {}: its journal is open, nothing is to be cut", self.group));
        }
        let repaired = repair::run(&self.dir, &self.options, apply)?;
        if apply {
            tracing::warn!(
                group = &*self.group,
                reason = repaired.reason,
                end = ?repaired.end,
                writers = ?repaired.writers,
                "the operator has cut the journal before the damage"
            );
            self.open();
        }
        Ok(repaired)
    }

    fn attach(&mut self, link: Link, host: &str, attach: &Attach, outbox: Arc<Outbox>) {
        let refuse = |kind, reason| {
            outbox.send(link.channel, Message::Refused { kind, reason });
        };
        if matches!(self.phase, Phase::Absent) {
            // It may have been put there since.
            self.open();
        }
        if matches!(self.phase, Phase::Absent)
            && let Err((kind, reason)) = self.create(host, attach)
        {
            return refuse(kind, reason);
        }
        match &mut self.phase {
            Phase::Live(group) => {
                self.outboxes.insert(link.connection, outbox);
                group.attach(clock::now(), link, host, attach);
            }
            Phase::Broken { kind, reason, .. } => refuse(*kind, reason.clone()),
            Phase::Absent => refuse(RefusalKind::Stopping, "the group was not created".into()),
        }
    }

    fn create(&mut self, host: &str, attach: &Attach) -> Result<(), (RefusalKind, String)> {
        let made = std::fs::create_dir_all(&self.dir).and_then(|()| {
            let parent = self.dir.parent().unwrap_or(Path::new("."));
            std::fs::File::open(parent)?.sync_all()
        });
        made.map_err(|e| (RefusalKind::Stopping, format!("the group's directory: {e}")))?;
        let storage = self.storage();
        let options = self.options.clone();
        match Group::create(storage, host, attach, clock::now(), options) {
            Ok(mut group) => {
                tracing::info!(group = &*self.group, host, "created");
                let snapshots = snapshots::needs(&self.snapshots_dir, &self.group);
                self.past = Some(Past::open(&mut group, snapshots));
                self.phase = Phase::Live(Box::new(group));
                Ok(())
            }
            Err(error) => {
                if let GroupCreateError::Group(error) = &error {
                    tracing::error!(group = &*self.group, "not created: {error}");
                }
                // Empty unless something went wrong half-way, and then it is cleared next time.
                let _ = std::fs::remove_dir(&self.dir);
                Err(error.refusal())
            }
        }
    }

    fn guest(&mut self, event: Event) {
        let Phase::Live(group) = &mut self.phase else { return };
        match event {
            Event::GuestWrite { key, offset, effect, durable, done } => {
                let bytes = match &effect {
                    tidelock_replica::group::GuestEffect::Write(data) => data.len() as u64,
                    tidelock_replica::group::GuestEffect::Zero { .. } => 0,
                };
                if group.guest_write(clock::now(), key, offset, effect) {
                    if durable {
                        group.guest_flush(key.writer);
                    }
                    self.unsynced_bytes += bytes + 64;
                    self.waiting.push(Waiting { done, durable });
                } else {
                    let refused = io::Error::from(io::ErrorKind::PermissionDenied);
                    let _ = done.send(Err(refused));
                }
            }
            Event::GuestFlush { writer, done } => {
                group.guest_flush(writer);
                self.waiting.push(Waiting { done, durable: true });
            }
            other => unreachable!("not a guest's: {other:?}"),
        }
    }

    /// What follows from a batch of events.
    fn turn(&mut self) {
        if let Phase::Broken { retry_at, .. } = &self.phase
            && Instant::now() >= *retry_at
        {
            self.open();
        }
        if let Phase::Live(group) = &mut self.phase {
            group.retry();
        }
        self.take_deferred();
        self.commit();
        self.tell_covered();
        self.send_outputs();
        if let (Phase::Live(group), Some(past)) = (&self.phase, &mut self.past) {
            past.tend(group, group.now_ms());
        }
        if let Phase::Live(group) = &mut self.phase {
            group.tend_damage(clock::now());
        }
        self.start_fold();
        let broken = match &self.phase {
            Phase::Live(group) => group.broken().map(str::to_owned),
            _ => None,
        };
        if let Some(reason) = broken {
            self.break_down(RefusalKind::Stopping, reason);
        }
    }

    fn commit(&mut self) {
        let Phase::Live(group) = &mut self.phase else { return };
        if group.recovery().is_none() {
            group.flush();
            return;
        }
        // A recovered group's guests decide when something must be durable.
        if !group.guest_written() {
            return;
        }
        let sync =
            self.waiting.iter().any(|w| w.durable) || self.unsynced_bytes >= UNSYNCED_MAX_BYTES;
        if sync {
            group.flush();
            self.unsynced_bytes = 0;
        }
        // If the flush found no room, those who wait go on waiting.
        if group.accepts() {
            for waiting in self.waiting.drain(..) {
                let _ = waiting.done.send(Ok(()));
            }
        }
    }

    fn send_outputs(&mut self) {
        let Phase::Live(group) = &mut self.phase else { return };
        for notice in group.take_notices() {
            tracing::warn!(group = &*self.group, "{notice}");
        }
        for output in group.take_outputs() {
            let (link, message) = match output {
                Output::Send(link, message) => (link, message),
                Output::Refuse(link, kind, reason) => {
                    peer_log!(HOSTS, warn, group = &*self.group, ?kind, reason, "refused");
                    (link, Message::Refused { kind, reason })
                }
            };
            if let Some(outbox) = self.outboxes.get(&link.connection) {
                outbox.send(link.channel, message);
            }
        }
    }

    fn start_fold(&mut self) {
        if self.fold_not_before.is_some_and(|at| Instant::now() < at) {
            return;
        }
        let Phase::Live(group) = &mut self.phase else { return };
        let job = match group.fold_job(clock::now()) {
            Some(job) => {
                self.fold_not_before = None;
                Work::Fold(job)
            }
            None => match group.index_job() {
                Some(job) => Work::Index(job),
                None => match group.scrub_job(clock::now()) {
                    Some(job) => Work::Scrub(job),
                    None => match group.compress_job(clock::now()) {
                        Some(job) => Work::Compress(job),
                        None => return,
                    },
                },
            },
        };
        let folder = match &self.folder {
            Some(folder) => folder,
            None => self.folder.insert(Folder::spawn(&self.group, Arc::clone(&self.inbox))),
        };
        // The thread ends only with this sender.
        let _ = folder.jobs.send((self.generation, job));
    }

    fn stop(&mut self) {
        self.take_all_deferred();
        self.turn();
        if let Phase::Live(group) = &mut self.phase {
            group.close();
        }
        self.send_outputs();
        self.stopping = true;
        if let Some(folder) = self.folder.take() {
            // Whoever opens the group next must be the only one who writes to its images. What
            // the job did is not put on record, and done again.
            folder.end();
        }
    }
}

fn damaged(group: &mut Group<Files>, ask: DamagedAsk) -> Result<Option<Damage>, String> {
    let now = clock::now();
    match ask {
        DamagedAsk::Tell => {}
        DamagedAsk::Check => {
            if !group.check_damaged(now).map_err(|e| e.to_string())? {
                return Ok(None);
            }
        }
        DamagedAsk::Forget(segment) => {
            group.forget_damaged(segment).map_err(|e| e.to_string())?;
        }
    }
    group.tend_damage(now);
    Ok(Some((group.damaged(), group.latest_damaged())))
}

impl Phase {
    fn unavailable(&self) -> RecoverError {
        match self {
            Phase::Broken { reason, .. } => RecoverError::Journal(reason.clone()),
            _ => RecoverError::Group(GroupError::Unknown),
        }
    }
}

/// A job of the fold's thread.
enum Work {
    Fold(FoldJob<OpenFile>),
    Index(IndexJob<Files>),
    Scrub(ScrubJob<OpenFile>),
    Compress(CompressJob<Files>),
}

impl Work {
    /// Does it, and says how it ended.
    fn run(self, generation: u64) -> Event {
        match self {
            Work::Fold(job) => {
                let cut = job.cut.clone();
                Event::FoldDone { generation, cut, result: job.run() }
            }
            Work::Index(job) => {
                let segment = job.segment();
                Event::IndexDone { generation, segment, result: job.run() }
            }
            Work::Scrub(job) => Event::ScrubDone { generation, done: job.run() },
            Work::Compress(job) => {
                let (segment, len_bytes) = (job.segment(), job.len_bytes());
                Event::CompressDone { generation, segment, len_bytes, result: job.run() }
            }
        }
    }
}

/// The fold's thread: jobs one after the other, with less claim on the processor than what
/// acknowledges. Not none: a fold that starves stops everything at the limit of unfolded bytes.
struct Folder {
    jobs: mpsc::Sender<(u64, Work)>,
    thread: Option<JoinHandle<()>>,
}

impl Folder {
    fn spawn(group: &str, inbox: Arc<Inbox>) -> Self {
        const NICE: i32 = 10;
        let (jobs, waiting) = mpsc::channel::<(u64, Work)>();
        let builder = std::thread::Builder::new().name(format!("fold-{group}"));
        let spawned = builder.spawn(move || {
            let tid = rustix::thread::gettid();
            if let Err(error) = rustix::process::setpriority_process(Some(tid), NICE) {
                tracing::debug!("the fold runs at normal priority: {error}");
            }
            while let Ok((generation, job)) = waiting.recv() {
                if !inbox.push(job.run(generation)) {
                    return;
                }
            }
        });
        let failed = |error| tracing::error!("no thread for the fold: {error}");
        Self { jobs, thread: spawned.map_err(failed).ok() }
    }

    fn end(self) {
        drop(self.jobs);
        if self.thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the fold ended by a fault");
        }
    }
}
