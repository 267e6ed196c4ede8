//! From a time or a vector to a cut, and to its places in the journal.
//!
//! The journal is replayed into a fresh [`crate::cut::CutTracker`] up to the limit: what a recovery would have taken,
//! had nothing else arrived. The replay begins at the last segment before which everything is known to be in the
//! answer ([`super::Closed`]), and ends as soon as nothing up to the limit can follow.
//!
//! Of several writers the answers are beginnings of the journal, and nothing that arrived later is ever in them, however
//! old it says that it is. That is what makes them closed: see [`super::effective`].

use super::walk::{Place, Step};
use super::{History, PastError, Point};
use crate::cut::CutTracker;
use crate::journal::{Note, Position, Standing, State};
use crate::planted::{self, Bug};
use crate::storage::StorageFile;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::CopyState;
use tidelock_protocol::record::{Effect, Record};
use tidelock_protocol::vector::CountVector;

/// What must not be passed.
pub(super) enum Limit<'a> {
    /// An effective time that is complete.
    Time(Hlc),
    /// Seqs.
    Vector(&'a CountVector),
    /// A cut of this group, and what its time was; `None`: it is the newest.
    Exact(&'a CountVector, Option<Hlc>),
}

/// A record of the replayed part.
struct Seen {
    writer: WriterId,
    seq: Seq,
    at: Hlc,
    start: Position,
    end: Position,
    /// It comes after the end of what can be in the answer.
    is_over: bool,
}

impl Seen {
    fn new(place: &Place<'_>, record: &Record, at: Hlc, is_over: bool) -> Self {
        let (start, end) = (place.start, place.end);
        Self { writer: record.writer, seq: record.seq, at, start, end, is_over }
    }
}

/// What of a vector is not void.
pub(crate) fn trimmed(vector: &CountVector, before: &State, last: &State) -> CountVector {
    let later: Vec<_> = last.recoveries.iter().filter(|r| r.epoch > before.epoch).collect();
    let trim = |(writer, seq): (WriterId, Seq)| {
        (writer, later.iter().map(|r| r.cut.get(writer)).fold(seq, Ord::min))
    };
    vector.entries().map(trim).collect()
}

/// The segment where the replay begins.
fn anchor<F: StorageFile>(of: &History<F>, limit: &Limit<'_>) -> Result<u64, PastError> {
    let before_window = || PastError::BeforeWindow { oldest: of.oldest.at };
    let starts = of.starts.iter().rev().filter(|start| start.index > of.base.segment);
    let mut closed = starts.filter_map(|start| Some((start.index, start.closed.as_ref()?)));
    let found = closed.find(|(_, closed)| match limit {
        Limit::Time(time) => closed.at <= *time,
        Limit::Vector(vector) | Limit::Exact(vector, _) => vector.covers(&closed.cut),
    });
    if let Some((index, _)) = found {
        return Ok(index);
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
    Ok(base.index)
}

pub(super) fn settle<F: StorageFile>(
    of: &History<F>,
    limit: &Limit<'_>,
) -> Result<Point, PastError> {
    let from = anchor(of, limit)?;
    let (mut tracker, mut seen_state) = of.begin(from);
    let mut newest = seen_state.last_hlc.max(since(&seen_state));
    let mut replayed_to = newest;
    let mut seen: Vec<Seen> = Vec::new();
    // A record was beyond the exact cut that is looked for.
    let mut passed: BTreeSet<WriterId> = BTreeSet::new();
    let mut whole_at: BTreeMap<WriterId, Seq> = BTreeMap::new();
    let mut joined: BTreeSet<WriterId> = BTreeSet::new();
    // Where it is certain that nothing more can be in it.
    let mut over = None::<Position>;
    of.walk(from, |place, step| {
        if over.is_none() {
            let is_over = match &step {
                Step::Record { record, at, .. } => {
                    is_past(limit, place.before, !passed.is_empty())
                        || is_beyond(limit, of, &tracker, &seen_state, record, *at)?
                }
                Step::Note(note) => {
                    is_past(limit, place.before, !passed.is_empty())
                        || !follows(limit, place.before, note)
                }
            };
            over = is_over.then_some(place.start);
        }
        if over.is_some() {
            // What is in the images must be in it, too: nothing more of that can be.
            if let Step::Record { record, at, is_void: false, .. } = step {
                seen.push(Seen::new(place, record, at, true));
            }
            let ends = place.start >= of.base;
            return Ok(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
        }
        match step {
            Step::Record { is_void: true, .. } if matches!(limit, Limit::Exact(..)) => {}
            Step::Record { record, at, is_void, .. } => {
                let writer = record.writer;
                replayed_to = replayed_to.max(at);
                if !is_void {
                    seen.push(Seen::new(place, record, at, false));
                }
                if passed.contains(&writer) || is_outside(limit, record) {
                    passed.insert(writer);
                    return Ok(ControlFlow::Continue(()));
                }
                if let (Effect::CopyDone, Some(before)) =
                    (&record.effect, seen_state.writer(writer))
                {
                    if matches!(before.copy, CopyState::Empty | CopyState::Partial) {
                        whole_at.insert(writer, record.seq);
                    }
                    if before.standing == Standing::Joining {
                        joined.insert(writer);
                    }
                }
                tracker.record(&seen_state, record);
                seen_state.apply_record(record).map_err(unexpected)?;
            }
            Step::Note(note @ Note::Shape(_)) => {
                // What was told by then stays in the cut, however far behind a new writer is.
                tracker.settle(&seen_state.committed());
                seen_state.apply_note(note).map_err(unexpected)?;
                tracker.reshape(&seen_state);
                newest = newest.max(since(&seen_state));
            }
            Step::Note(note @ Note::EpochStart(_)) => {
                seen_state.apply_note(note).map_err(unexpected)?;
                tracker = CutTracker::new(&seen_state);
                newest = newest.max(since(&seen_state));
                passed.clear();
            }
            Step::Note(note @ Note::Copy { writer, .. }) => {
                // Of a writer whose later records are beyond the limit it says nothing here.
                if !passed.contains(writer) {
                    seen_state.apply_note(note).map_err(unexpected)?;
                }
            }
            Step::Note(Note::Checkpoint(_) | Note::CleanEnd) => {}
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let cut = match limit {
        Limit::Exact(cut, _) => (*cut).clone(),
        Limit::Time(_) | Limit::Vector(_) => {
            trimmed(tracker.settle(&seen_state.committed()), &seen_state, &of.state)
        }
    };
    let writers = writers(&seen_state, &cut, &whole_at, &joined)?;
    let is_in = |record: &&Seen| !record.is_over && record.seq <= cut.get(record.writer);
    if seen.iter().any(|record| record.start < of.base && !is_in(&record)) {
        // It is in the images already.
        return Err(PastError::BeforeWindow { oldest: of.oldest.at });
    }
    // By its name the same point is found again: of several writers that takes all that was replayed.
    let newest = match (limit, seen_state.writers.len()) {
        (Limit::Exact(..), _) | (_, 0 | 1) => {
            seen.iter().filter(is_in).map(|r| r.at).fold(newest, Ord::max)
        }
        _ => newest.max(replayed_to),
    };
    let start = Position { segment: from, offset: 0 };
    let last = seen.iter().filter(is_in).map(|r| r.end).fold(start.max(of.base), Ord::max);
    let first = seen.iter().find(|record| !is_in(record)).map(|record| record.start);
    Ok(Point {
        // What is between is nothing, so it is the same state.
        hlc: newest.max(of.oldest.at),
        epoch: seen_state.epoch,
        writers,
        end: last,
        beyond: first.or(over).unwrap_or(of.end).max(of.base),
        cut,
    })
}

/// Since when the group has been what it is.
fn since(state: &State) -> Hlc {
    if state.barrier == Hlc(0) { Hlc(0) } else { Hlc(state.barrier.0.saturating_add(1)) }
}

fn unexpected(error: crate::journal::StateError) -> PastError {
    PastError::Unavailable(format!("the journal does not replay: {error}"))
}

/// The last time that a record of the state at this time may have.
fn last_taken(time: Hlc) -> Hlc {
    let late = if planted::is(Bug::ViewAfterItsTime) { 1 << 16 } else { 0 };
    Hlc(time.0 + late)
}

/// Whether nothing up to the limit can follow a state, also if what came in between is void.
fn is_past(limit: &Limit<'_>, before: &State, has_passed: bool) -> bool {
    match limit {
        Limit::Time(_) if planted::is(Bug::TimesAlone) => false,
        Limit::Time(time) => before.newest_effective() > last_taken(*time),
        Limit::Vector(_) => false,
        Limit::Exact(cut, time) => {
            let after = time.is_some_and(|time| time <= before.newest_effective());
            after && before.journaled().covers(cut) && has_passed
        }
    }
}

/// Whether the answer is reached before this record.
fn is_beyond<F: StorageFile>(
    limit: &Limit<'_>,
    of: &History<F>,
    tracker: &CutTracker,
    before: &State,
    record: &Record,
    at: Hlc,
) -> Result<bool, PastError> {
    match limit {
        Limit::Time(_) if planted::is(Bug::TimesAlone) => Ok(false),
        Limit::Time(time) => Ok(at > last_taken(*time)),
        Limit::Vector(vector) => {
            let (mut tracker, mut state) = (tracker.clone(), before.clone());
            tracker.record(&state, record);
            state.apply_record(record).map_err(unexpected)?;
            let cut = tracker.settle(&state.committed());
            Ok(!vector.covers(&trimmed(cut, &state, &of.state)))
        }
        Limit::Exact(..) => Ok(false),
    }
}

/// Whether the answer has neither this record nor what follows it of its writer, but may have what others do.
fn is_outside(limit: &Limit<'_>, record: &Record) -> bool {
    match limit {
        Limit::Exact(cut, _) => record.seq > cut.get(record.writer),
        Limit::Time(time) => planted::is(Bug::TimesAlone) && record.hlc > *time,
        Limit::Vector(_) => false,
    }
}

/// Whether the answer may have what comes after this note.
fn follows(limit: &Limit<'_>, before: &State, note: &Note) -> bool {
    match (note, limit) {
        (Note::Shape(_) | Note::EpochStart(_), Limit::Time(time)) => {
            *time > before.newest_effective()
        }
        (Note::Shape(_), Limit::Exact(_, Some(time))) => *time > before.newest_effective(),
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
        let is_whole = matches!(of.copy, CopyState::Whole | CopyState::Resyncing)
            && whole_at.get(&writer).is_none_or(|at| *at <= cut.get(writer));
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
