//! Durability as an event: what was appended has a [`Ticket`], and whoever made it durable gives a [`Durable`] for it.
//!
//! ```text
//!  stage, write ──▶ Ticket ──▶ Behind<T> ──────────────────────┐
//!  sync_job ──▶ SyncJob ──run, anywhere──▶ Durable ──synced──▶ open ──▶ T
//! ```
//!
//! Invariant (rules 3 and 9): a [`Durable`] comes only from a sync that has succeeded, so nothing that stands
//! [`Behind`] a ticket can be sent, acknowledged or answered before.

use super::{Journal, JournalError, Position, SegmentFile};
use tidelock_planted::Bug;
use tidelock_storage::{Storage, StorageFile};

/// A place in the order of everything that is appended to a journal, by the number of its batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Proof that everything up to a place of one run's journal is on stable storage.
#[derive(Clone, Copy, Debug)]
pub struct Durable {
    number: u64,
    end: Position,
}

impl Durable {
    /// Proof of nothing: the journal is being made or opened.
    pub(super) const NOTHING: Self = Self { number: 0, end: Position { segment: 0, offset: 0 } };

    /// True if what has this ticket is on stable storage.
    #[must_use]
    pub fn covers(&self, ticket: Ticket) -> bool {
        ticket.0 <= self.number
    }

    /// The ticket of exactly this.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        Ticket(self.number)
    }

    /// The end of what is on stable storage.
    #[must_use]
    pub fn end(&self) -> Position {
        self.end
    }
}

/// Something that nobody gets before what was appended up to its ticket is durable.
#[derive(Debug)]
pub struct Behind<T> {
    ticket: Ticket,
    what: T,
}

impl<T> Behind<T> {
    /// Puts it behind a ticket.
    pub fn new(ticket: Ticket, what: T) -> Self {
        Self { ticket, what }
    }

    /// The ticket.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Puts something else that is made of it behind the same ticket.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Behind<U> {
        Behind { ticket: self.ticket, what: f(self.what) }
    }

    /// Gives it out, if its ticket is covered.
    pub fn open(self, durable: &Durable) -> Result<T, Self> {
        match durable.covers(self.ticket) || tidelock_planted::is(Bug::AckBeforeDurable) {
            true => Ok(self.what),
            false => Err(self),
        }
    }
}

/// Work that makes everything durable that was written when it was taken. It may be done by any thread; there is one at
/// a time. Its outcome goes to [`Journal::synced`].
#[derive(Debug)]
pub struct SyncJob<F> {
    file: SegmentFile<F>,
    done: Durable,
}

impl<F: StorageFile> SyncJob<F> {
    /// Does it.
    pub fn run(self) -> Result<Durable, JournalError> {
        if !tidelock_planted::is(Bug::AckBeforeDurable) {
            self.file.sync().map_err(JournalError::io("make the journal durable"))?;
        }
        Ok(self.done)
    }
}

impl<S: Storage> Journal<S> {
    /// The ticket of everything that was appended so far, staged or written.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        match self.batch.is_empty() {
            true => Ticket(self.number),
            // The checkpoint of a segment that is due is a batch of its own.
            false => Ticket(self.number + 1 + u64::from(self.next_segment.is_some())),
        }
    }

    /// The last report of what is durable, by opening the journal at first.
    #[must_use]
    pub fn durable(&self) -> Durable {
        self.reported
    }

    /// True while a sync runs.
    #[must_use]
    pub fn is_syncing(&self) -> bool {
        self.syncing
    }

    /// Work that makes everything written durable. `None`: nothing is, or a sync runs.
    pub fn sync_job(&mut self) -> Option<SyncJob<S::File>> {
        if self.poisoned || self.syncing || !self.is_unreported() {
            return None;
        }
        self.syncing = true;
        let file = self.segments.last()?.file.clone();
        Some(SyncJob { file, done: Durable { number: self.number, end: self.end() } })
    }

    /// A sync has ended. After one that has failed nothing is written or called durable any more.
    pub fn synced(&mut self, end: Result<Durable, JournalError>) -> Result<Durable, JournalError> {
        self.syncing = false;
        if self.poisoned {
            return Err(JournalError::Poisoned);
        }
        match end {
            Ok(durable) => {
                if durable.number > self.durable_number {
                    (self.durable_number, self.durable_end) = (durable.number, durable.end);
                }
                self.reported = durable;
                Ok(durable)
            }
            Err(error) => {
                self.poisoned = true;
                Err(error)
            }
        }
    }

    /// True if something is written that was not reported as durable. It may be durable, if a segment was begun since.
    #[must_use]
    pub fn is_unreported(&self) -> bool {
        self.reported.number < self.number
    }

    /// Everything that is written is durable, and reported so: the journal was just made or opened.
    pub(super) fn report_all(&mut self) {
        self.reported = Durable { number: self.durable_number, end: self.durable_end };
    }
}
