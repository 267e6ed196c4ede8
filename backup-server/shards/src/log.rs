//! The logs of a store's shards in one journal.

use crate::cut::{Cut, CutSearch};
use crate::manifest::MANIFEST;
use crate::read::{EntryReader, ReadError};
use std::collections::{BTreeSet, VecDeque};
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::record::{HEADER_BYTES, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_shard::{
    ApplyTo, Backup, Bsa, BsaError, Closing, Doubts, LogIndex, LogPoint, NoShard, Order, Reply,
    ShardEntry, Standing, Todo, Verdict, WatermarkService,
};
use tidelock_storage::Storage;
use tidelock_storage::json::FileError;
use tidelock_store::journal::{
    BATCH_TARGET_BYTES, Behind, Durable, EpochStart, Journal, JournalError, Note, Options,
    Position, State, StateError, SyncJob, TornTail,
};

/// An agent of a shard at the primary site, as the caller numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Agent(pub u64);

/// Bounds of what is in memory.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes that were taken and are not written: beyond it nothing is taken.
    pub taken_max_bytes: usize,
    /// Stamps of one shard that wait for the watermark: beyond it nothing of this shard is taken.
    pub waiting_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { taken_max_bytes: 64 << 20, waiting_max: 1 << 20 }
    }
}

/// A message of an agent that breaks the rules: the connection must end, and nothing was taken.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refused {
    /// The store has no such shard.
    #[error(transparent)]
    NoShard(#[from] NoShard),
    /// The entries are in a wrong order, or their stamps fall.
    #[error(transparent)]
    Rules(#[from] BsaError),
    /// An entry is too far from the one before.
    #[error("entry that ends at {end} takes more than 2^32 units of the log")]
    Span {
        /// The entry.
        end: LogIndex,
    },
}

/// A journal that cannot be written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Writing failed.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An entry does not follow on what is there: a fault of this program.
    #[error("the store's journal refuses an entry: {0}")]
    State(#[from] StateError),
    /// The journal cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The journal is of disks.
    #[error("this is the journal of disks, and not of a store")]
    NoStore,
    /// The store's shape cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The journal has shards without a name.
    #[error(
        "the journal has {known} shards, and {MANIFEST} names {named}: one of them was restored"
    )]
    Shards {
        /// In the file.
        named: usize,
        /// In the journal.
        known: usize,
    },
}

/// The consequence of something that has become durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An agent is to be told this.
    Reply {
        /// The agent.
        agent: Agent,
        /// The shard.
        shard: u16,
        /// The reply.
        reply: Reply,
    },
    /// The watermark has moved, and apply-to of shards with it.
    Advanced(Hlc),
    /// Every log is closed: this is the final watermark, and apply-to of every shard is final.
    Final(Hlc),
}

/// The circumstances of a recovery.
#[derive(Clone, Copy, Debug)]
pub struct Recovery {
    /// Time in milliseconds since the Unix epoch, for people.
    pub at_unix_ms: u64,
    /// The operator stated that the primary is dead.
    pub primary_declared_dead: bool,
}

/// Something that was taken and is not in the journal.
#[derive(Debug)]
enum Item {
    Entry {
        body: ShardEntry,
        stamp: Hlc,
    },
    /// The end of a message.
    Answer {
        agent: Agent,
        shard: u16,
        attempt: u64,
    },
    /// The mark of a recovery.
    Close(Recovery),
    /// Number of shards.
    Shards(u16),
}

impl Item {
    fn bytes(&self) -> usize {
        match self {
            Self::Entry { body, .. } => {
                HEADER_BYTES + body.data.as_ref().map_or(0, |data| data.data().len())
            }
            Self::Answer { .. } | Self::Close(_) | Self::Shards(_) => 0,
        }
    }
}

/// Something that is in the journal, and not durable.
#[derive(Debug)]
enum Pending {
    Entry(u16, LogPoint),
    Answer { agent: Agent, shard: u16, attempt: u64 },
    Closed,
    Shards(u16),
}

#[derive(Debug)]
struct Shard {
    bsa: Bsa,
    apply: ApplyTo,
}

/// The logs of a store's shards.
#[derive(Debug)]
pub struct StoreLog<S: Storage> {
    journal: Journal<S>,
    limits: Limits,
    shards: Vec<Shard>,
    service: WatermarkService,
    /// The greatest effective stamp of an update, or the end of the last doubt; when the journal is opened that of any entry.
    updated: Hlc,
    /// Taken, in order, and not in the journal yet.
    queue: VecDeque<Item>,
    queued_bytes: usize,
    /// In the journal, in order, and not durable yet.
    behind: VecDeque<Behind<Pending>>,
    /// The order of a recovery.
    recovery: Option<Recovery>,
    /// The final watermark.
    last: Option<Hlc>,
    ignores_watermark: bool,
}

impl<S: Storage> StoreLog<S> {
    /// Makes the journal of a new store.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn create(
        storage: S,
        dir: &str,
        shards: u16,
        options: Options,
        limits: Limits,
    ) -> Result<Self, StoreError> {
        let journal = Journal::create(storage, dir, State::of_store(shards), options)?;
        Self::of(journal, limits, Doubts::default())
    }

    /// Opens the journal of a store whose clocks were in doubt at these times. Of an order to recover only its mark in the journal is known again.
    ///
    /// # Errors
    /// The journal is damaged, cannot be read, or is of something else.
    pub fn open(
        storage: S,
        dir: &str,
        floor: Position,
        options: Options,
        limits: Limits,
        doubts: Doubts,
    ) -> Result<(Self, Option<TornTail>), StoreError> {
        let opened = Journal::open(storage, dir, floor, options)?;
        Ok((Self::of(opened.journal, limits, doubts)?, opened.torn))
    }

    /// A store whose journal is durable as a whole.
    fn of(journal: Journal<S>, limits: Limits, doubts: Doubts) -> Result<Self, StoreError> {
        let state = journal.state();
        if state.shards.is_empty() {
            return Err(StoreError::NoStore);
        }
        let closing = if state.recovered().is_some() { Closing::Closed } else { Closing::Open };
        let applies = CutSearch::new(&journal, doubts.before(state.watermark()))?.all()?;
        let shard = |(apply, end): (ApplyTo, &LogPoint)| {
            let log = Standing { append: *end, commit: *end };
            Shard { bsa: Bsa::leading(log, closing), apply }
        };
        let shards: Vec<_> = applies.into_iter().zip(&state.shards).map(shard).collect();
        let mut log = Self {
            updated: state.shards.iter().map(|end| end.stamp).fold(doubts.end(), Hlc::max),
            service: WatermarkService::with_doubts(shards.len() as u16, doubts),
            journal,
            limits,
            shards,
            queue: VecDeque::new(),
            queued_bytes: 0,
            behind: VecDeque::new(),
            recovery: None,
            last: None,
            ignores_watermark: false,
        };
        log.report(log.numbers());
        log.obey(&mut Vec::new());
        Ok(log)
    }

    fn numbers(&self) -> BTreeSet<u16> {
        (0..self.shards.len() as u16).collect()
    }

    /// An agent of a shard has sent this. The reply, unless it comes with an [`Event`] once all is durable.
    ///
    /// # Errors
    /// The message breaks the rules, and nothing of it was taken.
    pub fn received(
        &mut self,
        agent: Agent,
        shard: u16,
        message: Backup,
    ) -> Result<Option<Reply>, Refused> {
        let shards = self.shards.len();
        let has_room = self.queued_bytes <= self.limits.taken_max_bytes;
        let of = self.shards.get_mut(usize::from(shard)).ok_or(NoShard { shard, shards })?;
        let attempt = message.attempt;
        let standing = of.bsa.standing().unwrap_or_default();
        // The shard that holds the watermark back has nothing that waits.
        if self.last.is_none() && !(has_room && of.apply.waiting() <= self.limits.waiting_max) {
            return Ok(Some(Reply { attempt, verdict: Verdict::Full(standing) }));
        }
        let mut after = message.after;
        for entry in &message.entries {
            let end = std::mem::replace(&mut after, entry.end);
            // An entry that goes back is refused by the agent.
            if end < entry.end && ShardEntry::after(shard, end, entry).is_none() {
                return Err(Refused::Span { end: entry.end });
            }
        }
        let mut before = standing.append.index;
        let received = of.bsa.received(message)?;
        if received.append.is_empty() {
            return Ok(Some(received.reply));
        }
        for entry in received.append {
            let Some(body) = ShardEntry::after(shard, before, &entry) else {
                return Err(Refused::Span { end: entry.end });
            };
            before = entry.end;
            if !entry.nop {
                self.updated = self.updated.max(entry.stamp);
            }
            self.push(Item::Entry { body, stamp: entry.stamp });
        }
        self.push(Item::Answer { agent, shard, attempt });
        Ok(None)
    }

    fn push(&mut self, item: Item) {
        self.queued_bytes += item.bytes();
        self.queue.push_back(item);
    }

    /// A clock of the primary site is in doubt: no cut is between these stamps from here on. The caller keeps that, with
    /// what [`StoreLog::doubts`] says then, before anything with these stamps is written.
    pub fn doubt(&mut self, after: Hlc, through: Hlc) {
        self.service.doubt(after, through);
        // The watermark leaves the doubt only when every shard has passed it, also those that write nothing.
        self.updated = self.updated.max(self.service.doubts().end());
    }

    /// Times at which a clock was in doubt.
    #[must_use]
    pub fn doubts(&self) -> &Doubts {
        self.service.doubts()
    }

    /// Tells the time by the backup's clock, in milliseconds since the Unix epoch.
    pub fn set_now(&mut self, now_ms: u64) {
        self.journal.set_now(now_ms);
    }

    /// Writes what was taken. It is not durable yet. While a sync runs some of it may have to wait.
    ///
    /// # Errors
    /// On [`JournalError::Full`] nothing is lost, and the next call tries again.
    pub fn write(&mut self) -> Result<(), StoreError> {
        loop {
            self.stage()?;
            if self.journal.staged_bytes() == 0 {
                return Ok(());
            }
            self.journal.write(|_| {})?;
            if self.journal.staged_bytes() > 0 {
                return Ok(());
            }
        }
    }

    fn stage(&mut self) -> Result<(), StoreError> {
        while self.journal.staged_bytes() < BATCH_TARGET_BYTES
            && let Some(item) = self.queue.pop_front()
        {
            self.queued_bytes -= item.bytes();
            let pending = match item {
                Item::Entry { body, stamp } => {
                    let point = LogPoint { index: body.end, stamp };
                    let shard = body.shard;
                    self.journal.stage_record(next_record(self.journal.state(), body, stamp))?;
                    Pending::Entry(shard, point)
                }
                Item::Answer { agent, shard, attempt } => Pending::Answer { agent, shard, attempt },
                Item::Close(recovery) => {
                    self.journal.stage_note(&mark_of(self.journal.state(), recovery))?;
                    Pending::Closed
                }
                Item::Shards(shards) => {
                    self.journal.stage_note(&Note::Shards(shards))?;
                    Pending::Shards(shards)
                }
            };
            self.behind.push_back(Behind::new(self.journal.ticket(), pending));
        }
        Ok(())
    }

    /// Work that makes everything written durable. `None`: there is nothing, or a sync runs.
    pub fn sync_job(&mut self) -> Option<SyncJob<S::File>> {
        self.journal.sync_job()
    }

    /// A sync has ended.
    ///
    /// # Errors
    /// The sync has failed: the store must be opened again.
    pub fn synced(&mut self, end: Result<Durable, JournalError>) -> Result<Vec<Event>, StoreError> {
        let durable = self.journal.synced(end)?;
        let mut events = Vec::new();
        let mut touched = BTreeSet::new();
        while let Some(front) = self.behind.pop_front() {
            match front.open(&durable) {
                Ok(pending) => self.settle(pending, &mut touched, &mut events),
                Err(front) => {
                    self.behind.push_front(front);
                    break;
                }
            }
        }
        if self.report(touched) {
            self.obey(&mut events);
        }
        Ok(events)
    }

    fn settle(&mut self, pending: Pending, touched: &mut BTreeSet<u16>, events: &mut Vec<Event>) {
        match pending {
            Pending::Entry(shard, point) => {
                let of = &mut self.shards[usize::from(shard)];
                of.bsa.committed(point);
                of.apply.committed(point);
                touched.insert(shard);
            }
            Pending::Answer { agent, shard, attempt } => {
                let standing = self.shards[usize::from(shard)].bsa.standing().unwrap_or_default();
                let reply = Reply { attempt, verdict: Verdict::Taken(standing) };
                events.push(Event::Reply { agent, shard, reply });
            }
            Pending::Closed => {
                self.shards.iter_mut().for_each(|shard| shard.bsa.closed());
                touched.extend(self.numbers());
            }
            Pending::Shards(shards) => {
                // No entry was taken of the new ones so far.
                for end in &self.journal.state().shards[self.shards.len()..usize::from(shards)] {
                    let log = Standing { append: *end, commit: *end };
                    let bsa = Bsa::leading(log, Closing::Open);
                    self.shards.push(Shard { bsa, apply: ApplyTo::default() });
                }
                let doubts = self.service.doubts().clone();
                self.service = WatermarkService::with_doubts(shards, doubts);
                touched.extend(self.numbers());
            }
        }
    }

    /// Shards report to the watermark service. True: its order has changed.
    fn report(&mut self, shards: BTreeSet<u16>) -> bool {
        let mut changed = false;
        for shard in shards {
            if let Some(report) = self.shards[usize::from(shard)].bsa.report() {
                changed |= self.service.reported(shard, report).unwrap_or_default();
            }
        }
        changed
    }

    /// Shards carry out the order of the watermark service.
    fn obey(&mut self, events: &mut Vec<Event>) {
        let Some(order) = self.service.order() else { return };
        let mut closes = false;
        for shard in &mut self.shards {
            match shard.bsa.ordered(order) {
                Some(Todo::Advance(watermark) | Todo::Recover(watermark)) => {
                    shard.apply.advance(watermark);
                }
                Some(Todo::Close) => closes = true,
                None => {}
            }
        }
        match order {
            Order::Advance(watermark) => events.push(Event::Advanced(watermark)),
            Order::Recover(watermark) if self.last.is_none() => {
                self.last = Some(watermark);
                events.push(Event::Final(watermark));
            }
            Order::Close | Order::Recover(_) => {}
        }
        if let Some(recovery) = self.recovery.filter(|_| closes) {
            self.push(Item::Close(recovery));
        }
    }

    /// A disaster was declared: from here on nothing of the primary is taken. [`Event::Final`] comes when that is durable.
    /// A store that is recovered, or being recovered, stays as it is.
    pub fn recover(&mut self, recovery: Recovery) {
        if self.recovery.is_none() && self.last.is_none() {
            self.recovery = Some(recovery);
            self.service.recover();
            self.obey(&mut Vec::new());
        }
    }

    /// A shard has applied everything up to the final watermark, and serves. True: it was the last one.
    pub fn ready(&mut self, shard: u16) -> bool {
        let before = self.service.is_recovered();
        if let Some(of) = self.shards.get_mut(usize::from(shard)).filter(|_| self.last.is_some()) {
            of.bsa.recovered();
            self.report(BTreeSet::from([shard]));
        }
        !before && self.service.is_recovered()
    }

    /// The store has this many shards from here on, once it is durable. Fewer than now, or more than there may be, are
    /// refused.
    ///
    /// # Errors
    /// The store cannot have so many.
    pub fn set_shards(&mut self, shards: u16) -> Result<(), StateError> {
        self.journal.state().clone().apply_note(&Note::Shards(shards))?;
        self.push(Item::Shards(shards));
        Ok(())
    }

    /// The watermark; after a recovery the final one. `None`: not known yet.
    #[must_use]
    pub fn watermark(&self) -> Option<Hlc> {
        self.last.or_else(|| self.service.watermark())
    }

    /// The greatest effective stamp of an update of any shard that was received, or the end of a doubt.
    #[must_use]
    pub fn updated(&self) -> Hlc {
        self.updated
    }

    /// The final watermark, once all logs are closed.
    #[must_use]
    pub fn final_watermark(&self) -> Option<Hlc> {
        self.last
    }

    /// The shard that holds the watermark back.
    #[must_use]
    pub fn held_back_by(&self) -> Option<u16> {
        self.service.held_back_by()
    }

    /// Number of shards.
    #[must_use]
    pub fn shards(&self) -> u16 {
        self.shards.len() as u16
    }

    /// Progress of a shard's log: received, and durable.
    #[must_use]
    pub fn standing(&self, shard: u16) -> Option<Standing> {
        self.shards.get(usize::from(shard))?.bsa.standing()
    }

    /// Every shard may be applied as far as its own log is durable: asynchronous replication of each shard by itself. For
    /// comparison only, because no cut is consistent then.
    pub fn ignore_watermark(&mut self) {
        self.ignores_watermark = true;
    }

    /// The end of what a shard may apply.
    #[must_use]
    pub fn apply_to(&self, shard: u16) -> Option<LogIndex> {
        let of = self.shards.get(usize::from(shard))?;
        let is_early = self.ignores_watermark || tidelock_planted::is(Bug::AppliedBeforeWatermark);
        Some(if is_early { of.bsa.standing()?.commit.index } else { of.apply.apply_to() })
    }

    /// The cut at a stamp that the watermark has reached; at the last one before it, if a clock was in doubt then.
    ///
    /// # Errors
    /// The watermark has not reached it, or the journal does not reach back so far.
    pub fn cut_at(&self, stamp: Hlc) -> Result<Cut, ReadError> {
        self.search(stamp)?.find()
    }

    /// The search for that cut, which reads the journal.
    ///
    /// # Errors
    /// The watermark has not reached it, or the journal does not reach back so far.
    pub fn search(&self, stamp: Hlc) -> Result<CutSearch<S::File>, ReadError> {
        let watermark = self.watermark().unwrap_or_default();
        if stamp > watermark {
            return Err(ReadError::Ahead { stamp, watermark });
        }
        CutSearch::new(&self.journal, self.service.doubts().before(stamp))
    }

    /// Durable entries of a shard that end after `after` and not after `up_to`.
    ///
    /// # Errors
    /// The store has no such shard, or the journal does not reach back so far.
    pub fn entries(
        &self,
        shard: u16,
        after: LogIndex,
        up_to: LogIndex,
    ) -> Result<EntryReader<S::File>, ReadError> {
        EntryReader::new(&self.journal, shard, after, up_to)
    }

    /// Forgets entries that nobody asks for again: of each shard those up to its index in `unneeded` may go. What waits for
    /// the watermark stays.
    ///
    /// # Errors
    /// Files cannot be removed.
    pub fn forget(&mut self, unneeded: &[LogIndex]) -> Result<(), StoreError> {
        let ends = self.shards.iter().zip(unneeded).map(|(of, end)| of.apply.apply_to().min(*end));
        let ends: Vec<_> = ends.collect();
        let is_unneeded = |state: &State| {
            ends.len() >= state.shards.len()
                && state.shards.iter().zip(&ends).all(|(shard, end)| shard.index <= *end)
        };
        let starts = self.journal.starts().take_while(|(_, state)| is_unneeded(state));
        if let Some((segment, _)) = starts.last() {
            self.journal.remove_before(Position { segment, offset: 0 })?;
        }
        Ok(())
    }

    /// The journal, to look at.
    #[must_use]
    pub fn journal(&self) -> &Journal<S> {
        &self.journal
    }
}

/// The next record of the store.
fn next_record(state: &State, body: ShardEntry, stamp: Hlc) -> Record<ShardEntry> {
    let writer = WriterId(0);
    let seq = state.journaled().get(writer).next();
    Record { writer, seq, epoch: state.epoch, hlc: stamp, deps: CountVector::new(), body }
}

/// The mark of a recovery.
fn mark_of(state: &State, recovery: Recovery) -> Note {
    Note::EpochStart(EpochStart {
        epoch: state.epoch.next(),
        cut: state.committed(),
        journaled: state.journaled(),
        resyncing: Vec::new(),
        at_unix_ms: recovery.at_unix_ms,
        primary_declared_dead: recovery.primary_declared_dead,
        exposed: Vec::new(),
    })
}
