//! Messages of the group, and their times: at once, or once what it tells of is on stable storage.
//!
//! ```text
//!  receive, attach, order ──▶ staged ──write──▶ begin_sync ──▶ SyncJob ──▶ synced ──▶ Progress, Ack, C
//!                               └──▶ Behind<Output> ─────────────────────────┴──▶ take_outputs
//! ```
//!
//! Invariants (rules 3, 4 and 9):
//! - An [`Ack`](tidelock_protocol::receiver::Ack), C, the state of copies, a recovery and a removal follow from a
//!   [`Durable`] alone: [`Group::synced`] takes one, and only a sync that has succeeded makes one.
//! - [`Immediate`] messages promise nothing that a crash of this server could undo, and [`OfDurable`] ones are made of
//!   durable state alone. All others are [`Output`]s that stand behind the ticket of everything that was appended
//!   before them.
//! - While a sync runs everything else goes on: what is appended meanwhile is of the next one.

use super::{ConnectionId, Group, Link, Output};
use std::collections::VecDeque;
use tidelock_protocol::ids::{MonoNanos, WriterId};
use tidelock_protocol::message::{
    Attached, CleanEnd, CopyState, Message, Policy, Progress, RefusalKind,
};
use tidelock_protocol::receiver::{Receiver, Unsynced};
use tidelock_protocol::tag::TagTerms;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::journal::{
    Behind, Durable, JournalError, Position, Standing, State, SyncJob, Ticket,
};

/// Not on stable storage yet: to be asked again when it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotYet(pub Ticket);

/// A message that may go out before anything else is on stable storage.
#[derive(Debug)]
pub(super) enum Immediate {
    /// A beacon is answered: who is primary does not depend on what was received.
    Lease(MonoNanos),
    Stalled(Option<String>),
    /// A question.
    Sound(u64),
    TagTerms(TagTerms),
    /// Other members' word, which they give again after a restart of this server.
    SwitchAwaits(Vec<String>),
    Unheard,
}

impl From<Immediate> for Message {
    fn from(of: Immediate) -> Self {
        match of {
            Immediate::Lease(sent_at) => Message::Lease { sent_at },
            Immediate::Stalled(reason) => Message::Stalled { reason },
            Immediate::Sound(id) => Message::Sound { id },
            Immediate::TagTerms(terms) => Message::TagTerms(terms),
            Immediate::SwitchAwaits(members) => Message::SwitchAwaits { members },
            Immediate::Unheard => Message::Unheard,
        }
    }
}

/// A message that promises only what is on stable storage when it is made.
#[derive(Debug)]
pub(super) enum OfDurable {
    Progress(Progress),
    /// Everything that was to be put on record for it is.
    Attached(Attached),
    LeaseGivenUp(CountVector),
    PolicyKept(Policy),
    ServesUnreachedKept(bool),
}

impl From<OfDurable> for Message {
    fn from(of: OfDurable) -> Self {
        match of {
            OfDurable::Progress(progress) => Message::Progress(progress),
            OfDurable::Attached(attached) => Message::Attached(attached),
            OfDurable::LeaseGivenUp(committed) => Message::LeaseGivenUp { committed },
            OfDurable::PolicyKept(policy) => Message::PolicyKept(policy),
            OfDurable::ServesUnreachedKept(serves) => Message::ServesUnreachedKept { serves },
        }
    }
}

/// Outputs that were not taken yet, in order.
#[derive(Debug, Default)]
pub(super) struct Outputs(VecDeque<(Link, Behind<Output>)>);

impl Outputs {
    fn take(&mut self, durable: &Durable) -> Vec<Output> {
        let mut taken = Vec::new();
        for (link, behind) in std::mem::take(&mut self.0) {
            match behind.open(durable) {
                Ok(output) => taken.push(output),
                Err(behind) => self.0.push_back((link, behind)),
            }
        }
        taken
    }

    /// The attachment on this link is over: nothing that waits is for the next one.
    pub(super) fn forget(&mut self, link: Link, durable: &Durable) {
        self.0.retain(|(of, behind)| *of != link || durable.covers(behind.ticket()));
    }

    /// The connection is gone.
    pub(super) fn forget_connection(&mut self, connection: ConnectionId, durable: &Durable) {
        let is_of = |link: &Link| link.connection == connection;
        self.0.retain(|(link, behind)| !is_of(link) || durable.covers(behind.ticket()));
    }

    /// Number of a link's answers that are not durable.
    pub(super) fn waiting_of(&self, link: Link, durable: &Durable) -> usize {
        let waits = |behind: &Behind<_>| !durable.covers(behind.ticket());
        self.0.iter().filter(|(of, behind)| *of == link && waits(behind)).count()
    }

    fn forget_all(&mut self, durable: &Durable) {
        self.0.retain(|(_, behind)| durable.covers(behind.ticket()));
    }
}

/// Consequences once something is durable.
#[derive(Debug)]
pub(super) enum Later {
    /// A run has ended, cleanly or not.
    Ended(WriterId, Link, Option<CleanEnd>),
    /// A member has given up its lease.
    GaveUp(Link),
}

/// A sync that runs.
#[derive(Debug)]
pub(super) struct InFlight {
    /// The journal's state when all of it is durable.
    state: State,
    /// Records of each writer that were admitted.
    unsynced: Vec<Option<Unsynced>>,
    waypoint: Option<(Position, State)>,
}

impl InFlight {
    /// The receivers are of an epoch that has ended.
    pub(super) fn forget_receivers(&mut self) {
        self.unsynced.clear();
    }
}

impl<S: Storage> Group<S> {
    /// Says it once everything that was appended so far is durable.
    pub(super) fn say(&mut self, output: Output) {
        let link = output.link();
        self.outputs.0.push_back((link, Behind::new(self.journal.ticket(), output)));
    }

    /// Says what is made of durable state alone.
    pub(super) fn say_of_durable(&mut self, link: Link, message: OfDurable) {
        self.push_now(Output::Send(link, message.into()));
    }

    /// Says what promises nothing.
    pub(super) fn say_now(&mut self, link: Link, message: Immediate) {
        self.push_now(Output::Send(link, message.into()));
    }

    /// A member is not attached, or no longer.
    pub(super) fn refuse_now(&mut self, link: Link, kind: RefusalKind, reason: String) {
        self.outputs.forget(link, &self.journal.durable());
        self.push_now(Output::Refuse(link, kind, reason));
    }

    fn push_now(&mut self, output: Output) {
        let link = output.link();
        self.outputs.0.push_back((link, Behind::new(self.journal.durable().ticket(), output)));
    }

    /// Messages that must go out now, in order.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        self.outputs.take(&self.journal.durable())
    }

    /// The group is broken: what waits never becomes durable.
    pub(super) fn forget_what_waits(&mut self) {
        self.outputs.forget_all(&self.journal.durable());
        self.later.clear();
        self.in_flight = None;
    }

    /// The ticket of everything that was appended so far.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.journal.ticket()
    }

    /// True if this is on stable storage.
    #[must_use]
    pub fn is_durable(&self, ticket: Ticket) -> bool {
        self.journal.durable().covers(ticket)
    }

    /// True if what waits for this is to be tried again: it is on stable storage, or there is no room for it.
    #[must_use]
    pub fn must_try_again(&self, ticket: Ticket) -> bool {
        self.is_durable(ticket) || self.is_stuck() || self.broken.is_some()
    }

    /// True if there is no room for what was appended: it never becomes durable if nothing changes.
    pub(super) fn is_stuck(&self) -> bool {
        self.waits_for_room() && self.journal.staged_bytes() > 0
    }

    /// Everything up to it is on stable storage.
    #[must_use]
    pub fn durable(&self) -> Durable {
        self.journal.durable()
    }

    /// True if a sync runs.
    #[must_use]
    pub fn is_syncing(&self) -> bool {
        self.journal.is_syncing()
    }

    /// Checks what a host or an operator acts on: a server that dies must not forget it. Says why it cannot be put
    /// on record, or that it is not yet.
    pub(crate) fn check_on_record(&self, ticket: Ticket) -> Result<(), NotOnRecord> {
        if let Some(reason) = self.broken.clone() {
            return Err(NotOnRecord::Cannot(reason));
        }
        if self.is_durable(ticket) {
            return Ok(());
        }
        match self.stall_reason().filter(|_| self.is_stuck()) {
            Some(reason) => Err(NotOnRecord::Cannot(reason)),
            None => Err(NotOnRecord::NotYet(NotYet(ticket))),
        }
    }

    /// Does this for a member once everything that was appended so far is durable: at once, if it is.
    pub(super) fn later(&mut self, name: String, later: Later) {
        self.later.push_back((name, Behind::new(self.journal.ticket(), later)));
        self.do_what_follows();
    }

    /// The ticket of what a member's last run has left to do.
    pub(super) fn ends_behind(&self, name: &str) -> Option<Ticket> {
        let mut waits = self.later.iter().filter(|(of, _)| of == name);
        waits.next_back().map(|(_, behind)| behind.ticket())
    }

    fn do_what_follows(&mut self) {
        let durable = self.journal.durable();
        for (name, behind) in std::mem::take(&mut self.later) {
            match behind.open(&durable) {
                Ok(Later::Ended(writer, link, end)) => self.has_ended(&name, writer, link, end),
                Ok(Later::GaveUp(link)) => self.has_given_up(&name, link),
                Err(behind) => self.later.push_back((name, behind)),
            }
        }
    }

    /// Writes what was received. It is durable after the next sync.
    pub fn write(&mut self) {
        if self.broken.is_some() || self.journal.staged_bytes() == 0 {
            return;
        }
        match self.write_staged() {
            Ok(()) => self.has_room(),
            Err(error) => self.journal_failed(error),
        }
    }

    fn has_room(&mut self) {
        if self.waits_for_room() && self.journal.staged_bytes() == 0 {
            self.stall = None;
            self.tell_stall();
        }
    }

    /// Work that makes everything received durable; it may be done by any thread. Its outcome goes to
    /// [`Group::synced`]. There is one at a time.
    pub fn begin_sync(&mut self) -> Option<SyncJob<S::File>> {
        if self.broken.is_some() || self.journal.is_syncing() {
            return None;
        }
        if self.journal.staged_bytes() == 0 && !self.journal.is_unreported() {
            return None;
        }
        self.write();
        if self.broken.is_some() || self.journal.staged_bytes() > 0 {
            return None;
        }
        let waypoint = self.journal.waypoint_due();
        let job = self.journal.sync_job()?;
        // Records that these stand for are written: the job covers them.
        let unsynced = self.slots.iter().map(|slot| slot.receiver.as_ref().map(Receiver::unsynced));
        let unsynced = unsynced.collect();
        self.in_flight = Some(InFlight { state: self.journal.state().clone(), unsynced, waypoint });
        Some(job)
    }

    /// A sync has ended: what it made durable is acknowledged, and only that.
    pub fn synced(&mut self, end: Result<Durable, JournalError>) {
        let in_flight = self.in_flight.take();
        if self.broken.is_some() {
            return;
        }
        let durable = match self.journal.synced(end) {
            Ok(durable) => durable,
            Err(error) => return self.break_down(&error.into()),
        };
        let InFlight { state, unsynced, waypoint } = in_flight.expect("one at a time");
        for (i, token) in unsynced.into_iter().enumerate() {
            let writer = WriterId(i as u16);
            if let Some(token) = token {
                self.commit.durable(writer, token.synced());
            }
        }
        for (i, of) in state.writers.iter().enumerate() {
            let writer = WriterId(i as u16);
            // The end of its copy is durable by now, and nothing that was appended since takes it back.
            let is_whole = of.copy == CopyState::Whole
                && self.journal.state().writers[i].copy == CopyState::Whole;
            if self.commit.is_held(writer) && is_whole {
                self.commit.resume(writer);
            }
        }
        self.has_room();
        self.note_durable(state, &durable, waypoint);
        self.tell_policies_on_record();
        if let Err(error) = self.finish_recovery() {
            return self.break_down(&error);
        }
        self.release_overlay();
        self.tell_committed();
        self.do_what_follows();
        self.check_unfolded();
    }

    /// So much of the journal is durable now: what follows from it.
    pub(super) fn note_durable(
        &mut self,
        state: State,
        durable: &Durable,
        waypoint: Option<(Position, State)>,
    ) {
        let standings =
            |state: &State| state.writers.iter().map(|w| w.standing).collect::<Vec<_>>();
        let before = std::mem::replace(&mut self.durable_state, state);
        let has_changed = standings(&before) != standings(&self.durable_state);
        // A writer that is being removed is waited for until its removal cannot be lost.
        if durable.covers(self.shaped_at) {
            self.cut.settle(self.commit.committed());
            self.close_segments();
            self.mark_waypoint(durable.end(), waypoint);
        }
        if has_changed {
            self.has_become_void();
        }
        self.release_pins();
    }

    /// Makes everything received durable, on a disk whose syncs are waited for, and acknowledges it. Not while a sync
    /// runs.
    pub fn flush(&mut self) {
        while let Some(job) = self.begin_sync() {
            self.synced(job.run());
        }
    }

    pub(super) fn durable_standing(&self, writer: usize) -> Option<Standing> {
        self.durable_state.writers.get(writer).map(|of| of.standing)
    }
}

/// The reason why something is not on record.
#[derive(Debug)]
pub(crate) enum NotOnRecord {
    NotYet(NotYet),
    Cannot(String),
}

impl From<NotYet> for NotOnRecord {
    fn from(not_yet: NotYet) -> Self {
        Self::NotYet(not_yet)
    }
}
