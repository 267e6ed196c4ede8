//! From a time or a vector to a cut, and to its places in the journal.
//!
//! The journal is replayed into a fresh [`tidelock_cut::CutTracker`] up to the limit: what a recovery would have taken,
//! had nothing else arrived. The replay begins at the last place before which everything is known to be in the
//! answer: the beginning of a segment ([`tidelock_store::journal::Closed`]) or a [`Waypoint`] in it. It ends as soon as nothing up to the limit can follow.
//!
//! Of several writers the answers are beginnings of the journal, and nothing that arrived later is ever in them, however
//! old it says that it is. That is what makes them closed: see [`super::effective`].

use super::walk::{Place, Step};
use super::{History, PastError, Point};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use tidelock_cut::CutTracker;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::CopyState;
use tidelock_protocol::record::{Record, Role};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;
use tidelock_store::journal::{Note, Position, Standing, State, Waypoint};

/// What must not be passed.
pub(super) enum Limit<'a> {
    /// An effective time that is complete.
    Time(Hlc),
    /// An arrival that is over, in milliseconds since the Unix epoch.
    Arrived(u64),
    /// Seqs.
    Vector(&'a CountVector),
    /// A cut of this group, and what its time was; `None`: it is the newest.
    Exact(&'a CountVector, Option<Hlc>),
}

/// A record of the replayed part.
struct ReplayedRecord {
    writer: WriterId,
    seq: Seq,
    at: Hlc,
    arrived_ms: u64,
    start: Position,
    end: Position,
    /// It comes after the end of what can be in the answer.
    is_over: bool,
}

impl ReplayedRecord {
    fn new(place: &Place<'_>, record: &Record, at: Hlc, is_over: bool) -> Self {
        let Place { start, end, arrived_ms, .. } = *place;
        Self { writer: record.writer, seq: record.seq, at, arrived_ms, start, end, is_over }
    }
}

/// What of a vector is not void.
pub(crate) fn trimmed(vector: &CountVector, before: &State, last: &State) -> CountVector {
    let trim = |(writer, seq): (WriterId, Seq)| {
        (writer, seq.min(last.last_that_counts(writer, before.epoch)))
    };
    vector.entries().map(trim).collect()
}

impl Limit<'_> {
    /// Whether everything is in the answer that states at this time have, those with this cut, and those as of this
    /// arrival.
    fn is_beyond(&self, at: Hlc, cut: &CountVector, arrived_ms: u64) -> bool {
        match self {
            Limit::Time(time) => at <= *time,
            Limit::Arrived(ms) => arrived_ms <= *ms,
            // A recovery at this very cut has the same cut, and is later.
            Limit::Exact(vector, Some(time)) => vector.covers(cut) && at <= *time,
            Limit::Vector(vector) | Limit::Exact(vector, None) => vector.covers(cut),
        }
    }
}

/// Where the replay begins: at a segment, or at this place in it.
fn anchor<F: StorageFile>(
    of: &History<F>,
    limit: &Limit<'_>,
) -> Result<(u64, Option<Arc<Waypoint>>), PastError> {
    let before_window = || PastError::BeforeWindow { oldest: of.oldest.at };
    let starts = of.starts.iter().rev().filter(|start| start.index > of.base.segment);
    let mut closed = starts.filter_map(|start| Some((start.index, start.closed.as_ref()?)));
    let found =
        closed.find(|(_, closed)| limit.is_beyond(closed.at, &closed.cut, closed.arrived_ms));
    if let Some((index, _)) = found {
        let waypoints = of.tail.waypoints(index);
        let last = waypoints.into_iter().rfind(|of| limit.is_beyond(of.at, &of.cut, of.arrived_ms));
        return Ok((index, last));
    }
    let first = of.starts.first().filter(|_| of.base.segment <= of.starts[0].index);
    let base = of.starts.iter().find(|start| start.index == of.base.segment).or(first);
    let base = base.ok_or_else(|| PastError::Unavailable("the journal is empty".to_owned()))?;
    // What is in the images must be in the answer.
    if let Limit::Vector(vector) | Limit::Exact(vector, _) = limit
        && of.base.segment > 0
        && !vector.covers(&trimmed(&base.state.journaled(), &base.state, &of.state))
    {
        return Err(before_window());
    }
    Ok((base.index, None))
}

/// The replay from some place on, and what it has come to.
struct Replay<'a, F> {
    of: &'a History<F>,
    limit: &'a Limit<'a>,
    tracker: CutTracker,
    state: State,
    /// The last change of the group's shape or epoch, or what was replayed before.
    since: Hlc,
    /// The effective time of the newest record that was replayed.
    newest: Hlc,
    seen: Vec<ReplayedRecord>,
    /// Of an exact cut: writers of which a record was beyond it.
    passed: BTreeSet<WriterId>,
    whole_at: BTreeMap<WriterId, Seq>,
    joined: BTreeSet<WriterId>,
    /// When the last batch before the replay arrived.
    before_ms: u64,
    /// Something that a recovery cut off later was replayed.
    has_void: bool,
    /// Where it is certain that nothing more can be in it.
    over: Option<Position>,
    /// The oldest state that can be seen has a change of the group's shape or epoch that the answer does not have.
    is_before_change: bool,
}

pub(super) fn settle<F: StorageFile>(
    of: &History<F>,
    limit: &Limit<'_>,
) -> Result<Point, PastError> {
    let (segment, waypoint) = anchor(of, limit)?;
    let from = Position { segment, offset: waypoint.as_ref().map_or(0, |of| of.offset) };
    let before = waypoint.map(|of| of.state.clone());
    let state = before.clone().unwrap_or_else(|| of.state_before(segment));
    let tracker = CutTracker::new(&state);
    let newest = state.last_hlc.max(since(&state));
    let before_ms = state.arrived_ms;
    let mut replay = Replay {
        of,
        limit,
        tracker,
        state,
        since: newest,
        newest,
        seen: Vec::new(),
        passed: BTreeSet::new(),
        whole_at: BTreeMap::new(),
        joined: BTreeSet::new(),
        before_ms,
        has_void: false,
        over: None,
        is_before_change: false,
    };
    of.walk_from(from, before, |place, step| replay.step(place, &step))?;
    replay.point(from)
}

impl<F: StorageFile> Replay<'_, F> {
    fn step(&mut self, place: &Place<'_>, step: &Step<'_>) -> Result<ControlFlow<()>, PastError> {
        if self.over.is_none() && self.is_over(place, step)? {
            self.over = Some(place.start);
        }
        if self.over.is_none() {
            match step {
                Step::Record { record, at, is_void, .. } => {
                    self.record(place, record, *at, *is_void)?;
                }
                Step::Note(note) => self.note(place, note)?,
            }
            return Ok(ControlFlow::Continue(()));
        }
        // What is in the images must be in it, too: nothing more of that can be.
        if let Step::Record { record, at, is_void: false, .. } = step {
            self.seen.push(ReplayedRecord::new(place, record, *at, true));
        }
        let is_in_oldest = place.before.newest_effective() < self.of.oldest.at;
        self.is_before_change |=
            is_in_oldest && matches!(step, Step::Note(Note::Shape(_) | Note::EpochStart(_)));
        let ends = place.start >= self.of.base && !is_in_oldest;
        Ok(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }

    /// Whether neither this nor anything after it can be in the answer.
    fn is_over(&self, place: &Place<'_>, step: &Step<'_>) -> Result<bool, PastError> {
        if let Limit::Arrived(ms) = self.limit {
            return Ok(place.arrived_ms > *ms);
        }
        if is_past(self.limit, place.before, !self.passed.is_empty()) {
            return Ok(true);
        }
        match step {
            Step::Record { record, at, .. } => self.is_beyond(record, *at),
            Step::Note(note) => {
                Ok(!follows(self.limit, place.before, note) || self.grows_beyond(note)?)
            }
        }
    }

    /// True if this change of the group's shape takes more into the cut than a vector names: in the HLC form, what has
    /// waited for a writer that is removed.
    fn grows_beyond(&self, note: &Note) -> Result<bool, PastError> {
        let (Limit::Vector(vector), Note::Shape(_)) = (self.limit, note) else { return Ok(false) };
        let (mut tracker, mut state) = (self.tracker.clone(), self.state.clone());
        tracker.settle(&state.committed());
        state.apply_note(note).map_err(unexpected)?;
        tracker.reshape(&state);
        let cut = tracker.settle(&state.committed());
        Ok(!vector.covers(&trimmed(cut, &state, &self.of.state)))
    }

    /// Whether the answer is reached before this record.
    fn is_beyond(&self, record: &Record, at: Hlc) -> Result<bool, PastError> {
        match self.limit {
            Limit::Time(_) if tidelock_planted::is(Bug::TimesAlone) => Ok(false),
            Limit::Time(time) => Ok(at > last_taken(*time)),
            Limit::Vector(vector) => {
                let (mut tracker, mut state) = (self.tracker.clone(), self.state.clone());
                tracker.record(&state, record);
                state.apply_record(record).map_err(unexpected)?;
                let cut = tracker.settle(&state.committed());
                Ok(!vector.covers(&trimmed(cut, &state, &self.of.state)))
            }
            Limit::Exact(..) | Limit::Arrived(_) => Ok(false),
        }
    }

    fn record(
        &mut self,
        place: &Place<'_>,
        record: &Record,
        at: Hlc,
        is_void: bool,
    ) -> Result<(), PastError> {
        let writer = record.writer;
        if is_void && matches!(self.limit, Limit::Exact(..)) {
            // Notes about it are void with it, up to the recovery.
            self.passed.insert(writer);
            return Ok(());
        }
        self.newest = self.newest.max(at);
        self.has_void |= is_void;
        if !is_void {
            self.seen.push(ReplayedRecord::new(place, record, at, false));
        }
        if self.passed.contains(&writer) || is_outside(self.limit, record) {
            self.passed.insert(writer);
            return Ok(());
        }
        if let (Role::CopyDone, Some(before)) = (record.role(), self.state.writer(writer)) {
            if matches!(before.copy, CopyState::Empty | CopyState::Partial | CopyState::Seeded) {
                self.whole_at.insert(writer, record.seq);
            }
            if before.standing == Standing::Joining {
                self.joined.insert(writer);
            }
        }
        self.tracker.record(&self.state, record);
        self.state.apply_record(record).map_err(unexpected)
    }

    fn note(&mut self, place: &Place<'_>, note: &Note) -> Result<(), PastError> {
        match note {
            Note::Checkpoint(_)
            | Note::CleanEnd
            | Note::Log { .. }
            | Note::Policy { .. }
            | Note::Machine { .. }
            | Note::Mark { .. }
            | Note::Shards(_) => return Ok(()),
            // Of a writer whose later records are beyond the limit it says nothing here.
            Note::Copy { writer, .. } if self.passed.contains(writer) => return Ok(()),
            // What was told by then stays in the cut, however far behind a new writer is.
            Note::Shape(_) => {
                self.tracker.settle(&self.state.committed());
            }
            Note::Copy { .. } | Note::EpochStart(_) => {}
        }
        self.state.apply_note(note).map_err(unexpected)?;
        match note {
            Note::Shape(_) => self.tracker.reshape(&self.state),
            Note::EpochStart(_) => {
                self.tracker = CutTracker::new(&self.state);
                self.passed.clear();
                self.has_void = false;
            }
            _ => return Ok(()),
        }
        // By the journal's own state: this one has not what is beyond the limit.
        let mut after = place.before.clone();
        after.apply_note(note).map_err(unexpected)?;
        self.since = self.since.max(since(&after));
        Ok(())
    }

    /// The answer, after a replay that began here.
    fn point(mut self, from: Position) -> Result<Point, PastError> {
        let (of, state) = (self.of, &self.state);
        let cut = match self.limit {
            Limit::Exact(cut, _) => (*cut).clone(),
            Limit::Arrived(_) if self.has_void && self.left_out().is_some() => {
                let (chosen, until) = self.left_out().expect("some");
                return Err(PastError::LeftOut { chosen, until });
            }
            Limit::Time(_) | Limit::Arrived(_) | Limit::Vector(_) => {
                trimmed(self.tracker.settle(&state.committed()), state, &of.state)
            }
        };
        let writers = writers(state, &cut, &self.whole_at, &self.joined)?;
        let is_in =
            |record: &&ReplayedRecord| !record.is_over && record.seq <= cut.get(record.writer);
        if self.seen.iter().any(|record| record.start < of.base && !is_in(&record)) {
            // It is in the images already.
            return Err(PastError::BeforeWindow { oldest: of.oldest.at });
        }
        let within = || self.seen.iter().filter(is_in);
        // By its name the same point is found again: of several writers that takes all that was replayed.
        let newest = match (self.limit, state.writers.len()) {
            (Limit::Exact(..), _) | (_, 0 | 1) => {
                within().map(|record| record.at).fold(self.since, Ord::max)
            }
            _ => self.newest.max(self.since),
        };
        let arrived_ms = within().map(|record| record.arrived_ms).fold(self.before_ms, Ord::max);
        let start = from.max(of.base);
        let first = self.seen.iter().find(|record| !is_in(record)).map(|record| record.start);
        Ok(Point {
            // If nothing is between, it is the same state. A pinned one may be older.
            hlc: if self.is_before_change { newest } else { newest.max(of.oldest.at) },
            arrived_ms,
            epoch: state.epoch,
            writers,
            end: within().map(|record| record.end).fold(start, Ord::max),
            beyond: first.or(self.over).unwrap_or(of.end).max(of.base),
            cut,
        })
    }
}

impl<F> Replay<'_, F> {
    /// The point that a recovery chose in the past, and since when there are states again.
    fn left_out(&self) -> Option<(Hlc, Hlc)> {
        let of = self.of;
        let start = of.state.recovered()?;
        Some((of.manifest.chosen(start.epoch)?, of.state.barrier))
    }
}

/// Since when the group has been what it is.
fn since(state: &State) -> Hlc {
    if state.barrier == Hlc(0) { Hlc(0) } else { Hlc(state.barrier.0.saturating_add(1)) }
}

fn unexpected(error: tidelock_store::journal::StateError) -> PastError {
    PastError::Unavailable(format!("the journal does not replay: {error}"))
}

/// The last time that a record of the state at this time may have.
fn last_taken(time: Hlc) -> Hlc {
    let late = if tidelock_planted::is(Bug::ViewAfterItsTime) { 1 << 16 } else { 0 };
    Hlc(time.0 + late)
}

/// Whether nothing up to the limit can follow a state, also if what came in between is void.
fn is_past(limit: &Limit<'_>, before: &State, has_passed: bool) -> bool {
    match limit {
        Limit::Time(_) if tidelock_planted::is(Bug::TimesAlone) => false,
        Limit::Time(time) => before.newest_effective() > last_taken(*time),
        Limit::Vector(_) | Limit::Arrived(_) => false,
        Limit::Exact(cut, time) => {
            let after = time.is_some_and(|time| time <= before.newest_effective());
            after && before.journaled().covers(cut) && has_passed
        }
    }
}

/// Whether the answer has neither this record nor what follows it of its writer, but may have what others do.
fn is_outside(limit: &Limit<'_>, record: &Record) -> bool {
    match limit {
        Limit::Exact(cut, _) => record.seq > cut.get(record.writer),
        Limit::Time(time) => tidelock_planted::is(Bug::TimesAlone) && record.hlc > *time,
        Limit::Vector(_) | Limit::Arrived(_) => false,
    }
}

/// Whether the answer may have what comes after this note.
fn follows(limit: &Limit<'_>, before: &State, note: &Note) -> bool {
    match (note, limit) {
        (Note::Shape(_) | Note::EpochStart(_), Limit::Time(time)) => {
            *time > before.newest_effective()
        }
        (Note::Shape(_), Limit::Exact(_, Some(time))) => *time > before.newest_effective(),
        (Note::EpochStart(start), Limit::Exact(cut, Some(time))) if **cut == start.cut => {
            *time > before.newest_effective()
        }
        (Note::EpochStart(start), Limit::Vector(cut) | Limit::Exact(cut, _)) => {
            cut.covers(&start.cut) && **cut != start.cut
        }
        _ => true,
    }
}

/// The writers whose disks have a state in this cut.
fn writers(
    state: &State,
    cut: &CountVector,
    whole_at: &BTreeMap<WriterId, Seq>,
    joined: &BTreeSet<WriterId>,
) -> Result<Vec<WriterId>, PastError> {
    let mut shown = Vec::new();
    for (writer, of) in (0..).map(WriterId).zip(&state.writers) {
        let is_whole = match of.copy {
            CopyState::Whole | CopyState::Resyncing => {
                whole_at.get(&writer).is_none_or(|at| *at <= cut.get(writer))
            }
            // As they were found, before anything has come.
            CopyState::Seeded => cut.get(writer) == Seq::ZERO,
            CopyState::Empty | CopyState::Partial => false,
        };
        match of.standing {
            Standing::Removed => {}
            Standing::Joining => {}
            Standing::Member if is_whole => shown.push(writer),
            Standing::Member if joined.contains(&writer) => {}
            Standing::Member => return Err(PastError::Initialising { writer }),
        }
    }
    Ok(shown)
}
