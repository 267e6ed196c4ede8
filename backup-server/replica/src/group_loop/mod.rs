//! The loop of one group at the backup, sans-I/O: its state is touched here alone.
//!
//! ```text
//!  Absent ──attach──▶ Live ◀──opened── Broken
//!                      └──journal failed──▶
//! ```
//!
//! The driver tells what has arrived, in order, and then lets the loop take its [`turn`](GroupLoop::turn): the group
//! writes all of it as one batch, gives the driver a sync to do unless one is under way, and sends what waits for none.
//! What a sync has made durable follows from its end ([`synced`](GroupLoop::synced)). The next batch forms meanwhile:
//! group commit without a timer. Only what has to be tried again (no room, a failed disk) is tried once a second.
//!
//! | module | what it is for |
//! |---|---|
//! | this | opening, breaking down, turns |
//! | `orders` | operators' orders, which may have to wait for the end of a lease or for room |
//! | `waiting` | frames, attachments and guests' writes that the group has not taken yet |
//! | `jobs` | work that is done beside the loop: folds, indexes, verification, compression |

mod jobs;
mod orders;
#[cfg(test)]
mod tests;
mod waiting;

pub use jobs::{Job, JobEnd};
pub use orders::{Answer, Order, Wait};
pub use waiting::{GuestRequest, work_bytes};

use crate::connection::outbox::Outbox;
use crate::connection::room::Taken;
use crate::group::{
    ConnectionId, Group, GroupCreateError, GroupError, GroupOptions, Link, NotYet, Now, Output,
    RecoverError,
};
use orders::Ordered;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::{Attach, RefusalKind};
use tidelock_storage::Storage;
use tidelock_store::journal::{Durable, JournalError, SyncJob, TornTail};
use waiting::{Guests, Waiting};

const RETRY_MS: u64 = 1000;

/// The surroundings of a group's loop.
pub trait Driver {
    /// The directory that the group is kept in.
    type Storage: Storage;
    /// The way back of a guest's write.
    type Done;
    /// The way back of an operator's order.
    type Asker;

    /// The group's directory; it need not exist yet.
    fn storage(&self) -> Self::Storage;
    /// True if a group is kept there.
    fn exists(&self) -> bool;
    /// Makes the directory, durably.
    fn make_directory(&mut self) -> io::Result<()>;
    /// No group came of it: removes the directory if it is empty.
    fn remove_directory(&mut self);
    /// The group was opened, or created. `torn`: the end of the journal that was cut off.
    fn opened(&mut self, group: &mut Group<Self::Storage>, torn: Option<TornTail>);
    /// The group does not work for this reason, which may have been told before.
    fn broke(&mut self, reason: &str);
    /// A turn's end: work that concerns no host.
    fn tend(&mut self, group: &mut Group<Self::Storage>, now: Now);
    /// The group says something to a host: [`Output::send`] puts it in the outbox, at once or when the sync has ended.
    fn send(&mut self, outbox: &Arc<Outbox>, output: Output);
    /// Everything that the group has written is to be made durable, and the end told by [`GroupLoop::synced`]. There is
    /// one at a time.
    fn sync(&mut self, generation: u64, job: SyncJob<<Self::Storage as Storage>::File>);
    /// A guest of a recovered group has its answer.
    fn answer(&mut self, done: Self::Done, result: io::Result<()>);
    /// True if nobody waits for the answer to an order any more.
    fn is_gone(&self, asker: &Self::Asker) -> bool;
    /// An order waits. Told again when the reason or the deadline changes.
    fn waits(&mut self, asker: &Self::Asker, wait: Wait);
    /// An operator has the answer to an order.
    fn answer_order(&mut self, asker: Self::Asker, answer: Answer);
    /// A job is to be done beside the loop, and its end told by [`GroupLoop::job_done`].
    fn begin(&mut self, generation: u64, job: Job<Self::Storage>);
    /// The group is about to be given this frame (for checkers).
    fn observe_frame(&mut self, _: Link, _: &Frame, _: &Group<Self::Storage>) {}
    /// The group has taken it, or not.
    fn observe_taken(&mut self, _is_taken: bool) {}
    /// A connection is gone (for checkers).
    fn observe_lost(&mut self, _: ConnectionId) {}
}

/// An event of a host's connection.
#[derive(Debug)]
pub enum HostEvent {
    /// A member attaches.
    Attach {
        /// Connection and channel.
        link: Link,
        /// The host of the member, authenticated.
        host: String,
        /// The message.
        attach: Box<Attach>,
        /// Messages to the host.
        outbox: Arc<Outbox>,
        /// Room for its bytes.
        room: Taken,
    },
    /// Frames of one attached member, in order.
    Frames {
        /// Connection and channel.
        link: Link,
        /// The frames.
        frames: VecDeque<Frame>,
        /// Given back when the group has taken all of them.
        room: Taken,
    },
    /// A beacon. It does not wait behind frames that the group cannot take.
    Beacon {
        /// Connection and channel.
        link: Link,
        /// The host's clock.
        sent_at: MonoNanos,
        /// Room among the few beacons that may wait.
        room: Taken,
    },
    /// A connection is gone.
    Lost(ConnectionId),
}

enum Phase<S: Storage> {
    /// There is no group yet.
    Absent,
    Live(Box<Group<S>>),
    Broken {
        kind: RefusalKind,
        reason: String,
        retry_at: MonoNanos,
    },
}

/// The loop of one group.
pub struct GroupLoop<D: Driver> {
    /// For the log.
    name: String,
    options: GroupOptions,
    phase: Phase<D::Storage>,
    /// The number of openings so far. A job belongs to one of them.
    generation: u64,
    /// Connections with members here.
    outboxes: BTreeMap<ConnectionId, Arc<Outbox>>,
    /// By connection, in order. None of them is empty.
    waiting: BTreeMap<ConnectionId, VecDeque<Waiting>>,
    /// Work of this turn, by the connection that has caused it.
    worked: BTreeMap<ConnectionId, u64>,
    guests: Guests<D::Done>,
    /// In the order in which they came.
    orders: Vec<Ordered<D::Asker>>,
    job_not_before: Option<MonoNanos>,
    /// Something is durable that attachments, orders or frames may wait for.
    must_turn: bool,
    /// Syncs are waited for.
    is_stopping: bool,
    /// The connection by which each member was attached last, before the group broke.
    attached_by: BTreeMap<String, ConnectionId>,
}

impl<D: Driver> GroupLoop<D> {
    /// A loop that has not looked yet whether its group exists.
    #[must_use]
    pub fn new(name: &str, options: GroupOptions) -> Self {
        Self {
            name: name.to_owned(),
            options,
            phase: Phase::Absent,
            generation: 0,
            outboxes: BTreeMap::new(),
            waiting: BTreeMap::new(),
            worked: BTreeMap::new(),
            guests: Guests::default(),
            orders: Vec::new(),
            job_not_before: None,
            must_turn: false,
            is_stopping: false,
            attached_by: BTreeMap::new(),
        }
    }

    /// The group, while it works.
    #[must_use]
    pub fn group(&self) -> Option<&Group<D::Storage>> {
        match &self.phase {
            Phase::Live(group) => Some(group),
            Phase::Absent | Phase::Broken { .. } => None,
        }
    }

    /// The group, while it works, for whatever an operator asks of it.
    pub fn group_mut(&mut self) -> Option<&mut Group<D::Storage>> {
        match &mut self.phase {
            Phase::Live(group) => Some(group),
            Phase::Absent | Phase::Broken { .. } => None,
        }
    }

    /// Why the group does not work, if it does not.
    #[must_use]
    pub fn broken_because(&self) -> Option<&str> {
        match &self.phase {
            Phase::Broken { reason, .. } => Some(reason),
            Phase::Absent | Phase::Live(_) => None,
        }
    }

    /// Why there is no group to ask.
    #[must_use]
    pub fn unavailable(&self) -> RecoverError {
        match &self.phase {
            Phase::Broken { reason, .. } => RecoverError::Journal(reason.clone()),
            Phase::Absent | Phase::Live(_) => RecoverError::Group(GroupError::Unknown),
        }
    }

    /// True if the group has not taken all that has arrived.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.guests.wait()
    }

    /// The number of openings so far.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// True if no group came of it, and nobody is connected.
    #[must_use]
    pub fn came_to_nothing(&self) -> bool {
        matches!(self.phase, Phase::Absent) && self.outboxes.is_empty()
    }

    /// Opens the group if it exists.
    pub fn open(&mut self, now: Now, driver: &mut D) {
        self.generation += 1;
        if !driver.exists() {
            self.phase = Phase::Absent;
            return;
        }
        match Group::open(driver.storage(), now, self.options.clone()) {
            Ok(None) => self.phase = Phase::Absent,
            Ok(Some((mut group, torn))) => {
                group.was_attached_by(std::mem::take(&mut self.attached_by));
                driver.opened(&mut group, torn);
                self.phase = Phase::Live(Box::new(group));
            }
            Err(error) => {
                self.break_down(error.refusal_kind(), error.to_string(), now, driver);
            }
        }
    }

    /// Whatever it has failed by may be over, and a disaster does not wait for the next attempt.
    pub fn open_if_broken(&mut self, now: Now, driver: &mut D) {
        if matches!(self.phase, Phase::Broken { .. }) {
            self.open(now, driver);
        }
    }

    fn break_down(&mut self, kind: RefusalKind, reason: String, now: Now, driver: &mut D) {
        driver.broke(&reason);
        // Members that were attached hear of it.
        self.send_outputs(driver);
        self.drop_waiting(&reason, driver);
        self.forget_tickets();
        if let Phase::Live(group) = &self.phase {
            self.attached_by.clone_from(group.attached_by());
        }
        let retry_at = now.mono.plus_ms(RETRY_MS);
        self.phase = Phase::Broken { kind, reason, retry_at };
    }

    fn tick(&mut self, now: Now) {
        if let Phase::Live(group) = &mut self.phase {
            group.tick(now);
        }
    }

    /// An event of a host's connection.
    pub fn host(&mut self, event: HostEvent, now: Now, driver: &mut D) {
        match event {
            HostEvent::Attach { link, host, attach, outbox, room } => {
                let attach =
                    Waiting::Attach { link, host, attach, outbox, until: None, _room: room };
                self.in_order(link.connection, attach, now, driver);
            }
            HostEvent::Frames { link, frames, room } => {
                self.frames(link, frames, room, now, driver);
            }
            HostEvent::Beacon { link, sent_at, .. } => self.beacon(link, sent_at, now),
            HostEvent::Lost(connection) => {
                self.in_order(connection, Waiting::Lost, now, driver);
            }
        }
    }

    fn beacon(&mut self, link: Link, sent_at: MonoNanos, now: Now) {
        self.tick(now);
        let is_ahead = self.has_frames_waiting(link);
        if let Phase::Live(group) = &mut self.phase {
            match is_ahead {
                false => group.beacon(now, link, sent_at),
                true => group.beacon_ahead(now, link, sent_at),
            }
        }
    }

    fn attach(
        &mut self,
        link: Link,
        host: &str,
        attach: &Attach,
        outbox: &Arc<Outbox>,
        now: Now,
        driver: &mut D,
    ) -> Result<(), NotYet> {
        if matches!(self.phase, Phase::Absent) {
            // A seed may have been put there since.
            self.open(now, driver);
        }
        if matches!(self.phase, Phase::Absent)
            && let Err((kind, reason)) = self.create(host, attach, now, driver)
        {
            driver.send(outbox, Output::Refuse(link, kind, reason));
            return Ok(());
        }
        match &mut self.phase {
            Phase::Live(group) => {
                self.outboxes.insert(link.connection, Arc::clone(outbox));
                return group.try_attach(now, link, host, attach);
            }
            Phase::Broken { kind, reason, .. } => {
                driver.send(outbox, Output::Refuse(link, *kind, reason.clone()));
            }
            Phase::Absent => {
                let reason = "the group was not created".into();
                driver.send(outbox, Output::Refuse(link, RefusalKind::Stopping, reason));
            }
        }
        Ok(())
    }

    fn create(
        &mut self,
        host: &str,
        attach: &Attach,
        now: Now,
        driver: &mut D,
    ) -> Result<(), (RefusalKind, String)> {
        let made = driver.make_directory();
        made.map_err(|e| (RefusalKind::Stopping, format!("the group's directory: {e}")))?;
        match Group::create(driver.storage(), host, attach, now, self.options.clone()) {
            Ok(mut group) => {
                tracing::info!(group = self.name, host, "created");
                driver.opened(&mut group, None);
                self.phase = Phase::Live(Box::new(group));
                Ok(())
            }
            Err(error) => {
                if let GroupCreateError::Group(error) = &error {
                    tracing::error!(group = self.name, "not created: {error}");
                }
                // Empty unless something went wrong half-way, and then it is cleared next time.
                driver.remove_directory();
                Err(error.refusal())
            }
        }
    }

    fn lose(&mut self, connection: ConnectionId, driver: &mut D) {
        if let Phase::Live(group) = &mut self.phase {
            group.connection_lost(connection);
        }
        self.outboxes.remove(&connection);
        driver.observe_lost(connection);
    }

    /// A new batch begins: each connection may cause work again.
    pub fn begin_turn(&mut self) {
        self.worked.clear();
    }

    /// The consequences of a batch of events.
    pub fn turn(&mut self, now: Now, driver: &mut D) {
        if let Phase::Broken { retry_at, .. } = &self.phase
            && now.mono >= *retry_at
        {
            self.open(now, driver);
        }
        if let Phase::Live(group) = &mut self.phase {
            group.retry();
        }
        self.must_turn = false;
        self.take_waiting(now, driver);
        self.carry_out_orders(now, driver);
        if let Phase::Live(group) = &mut self.phase {
            for mark in group.tend_marks(now) {
                tracing::info!(group = self.name, mark, "a bookmark or pin is over");
            }
        }
        self.commit(driver);
        self.send_outputs(driver);
        if let Phase::Live(group) = &mut self.phase {
            driver.tend(group, now);
            group.tend_damage(now);
        }
        self.begin_job(now, driver);
        let broken = self.group().and_then(|group| group.broken().map(str::to_owned));
        if let Some(reason) = broken {
            self.break_down(RefusalKind::Stopping, reason, now, driver);
        }
    }

    /// The time after which a turn is due although nothing arrives.
    #[must_use]
    pub fn timeout(&self, now: Now) -> Option<Duration> {
        let deadline = self.deadline().map(|at| Duration::from_nanos(at.since_ns(now.mono)));
        [deadline, self.retry_timeout(now)].into_iter().flatten().min()
    }

    fn retry_timeout(&self, now: Now) -> Option<Duration> {
        if self.must_turn || self.waiting.keys().any(|connection| self.has_worked(*connection)) {
            return Some(Duration::ZERO);
        }
        let pause = self.group().and_then(|group| group.is_compressing(now));
        let must_retry = match &self.phase {
            Phase::Broken { .. } => true,
            Phase::Live(group) => {
                let waits = group.is_scrubbing() || group.fold_is_paced(now);
                !group.accepts() || waits || pause.is_some()
            }
            Phase::Absent => false,
        };
        let must_retry = must_retry || self.job_not_before.is_some() || self.has_waiting();
        let must_retry = must_retry || self.waits_for_room();
        // The pause after a small segment is short; when it is over, all else is waited for.
        let pause = pause.filter(|pause| *pause > 0).map(Duration::from_nanos);
        let retry = Duration::from_millis(RETRY_MS);
        must_retry.then(|| pause.map_or(retry, |pause| pause.min(retry)))
    }

    /// A sync has ended that was begun in this opening of the group, or in one before: what follows from it goes out.
    pub fn synced(
        &mut self,
        generation: u64,
        end: Result<Durable, JournalError>,
        now: Now,
        driver: &mut D,
    ) {
        self.tick(now);
        let Phase::Live(group) = &mut self.phase else { return };
        if generation != self.generation {
            return;
        }
        group.synced(end);
        self.must_turn = true;
        self.answer_guests(driver);
        self.send_outputs(driver);
    }

    fn send_outputs(&mut self, driver: &mut D) {
        let Phase::Live(group) = &mut self.phase else { return };
        for notice in group.take_notices() {
            tracing::warn!(group = self.name, "{notice}");
        }
        for output in group.take_outputs() {
            if let Some(outbox) = self.outboxes.get(&output.link().connection) {
                driver.send(outbox, output);
            }
        }
    }

    /// The server stops, and waits for the disk: the group has all that has arrived, and is closed. The end of every
    /// sync was told.
    pub fn stop(&mut self, now: Now, driver: &mut D) {
        self.is_stopping = true;
        self.take_all_waiting(now, driver);
        if let Phase::Live(group) = &mut self.phase {
            group.flush();
        }
        // Attachments and orders that have waited for that.
        self.turn(now, driver);
        if let Phase::Live(group) = &mut self.phase {
            group.close();
        }
        self.answer_guests(driver);
        self.send_outputs(driver);
    }
}
