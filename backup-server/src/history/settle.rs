//! From a time or a vector to a cut, and to its places in the journal.
//!
//! The journal is replayed into a fresh [`crate::cut::CutTracker`], but only with what is up to the
//! limit: what a recovery would have taken, had nothing else arrived. The replay begins at the last
//! segment before which everything is known to be in the answer ([`super::Closed`]), and ends
//! as soon as nothing up to the limit can follow.

use super::walk::{self, Step};
use super::{History, PastError, Point};
use crate::journal::{Note, Position, Standing, State};
use crate::planted::{self, Bug};
use crate::storage::StorageFile;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form};
use tidelock_protocol::record::Effect;
use tidelock_protocol::vector::CountVector;

/// What must not be passed.
pub(super) enum Limit<'a> {
    /// An effective time that is complete.
    Time(Hlc),
    /// Seqs.
    Vector(&'a CountVector),
    /// A cut of this group.
    Exact(&'a CountVector),
}

/// A record of the replayed part.
struct Seen {
    writer: WriterId,
    seq: Seq,
    at: Hlc,
    start: Position,
    end: Position,
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
        Limit::Vector(vector) | Limit::Exact(vector) => vector.covers(&closed.cut),
    });
    if let Some((index, _)) = found {
        return Ok(index);
    }
    let first = of.starts.first().filter(|_| of.base.segment <= of.starts[0].index);
    let base = of.starts.iter().find(|start| start.index == of.base.segment).or(first);
    let base = base.ok_or_else(|| PastError::Unavailable("the journal is empty".to_owned()))?;
    // What is in the images must be in the answer.
    if let Limit::Vector(vector) | Limit::Exact(vector) = limit
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
    let mut newest = seen_state.last_hlc.max(seen_state.barrier);
    let mut seen: Vec<Seen> = Vec::new();
    // By writer: the time of its first record beyond the limit.
    let mut passed: BTreeMap<WriterId, Hlc> = BTreeMap::new();
    let mut whole_at: BTreeMap<WriterId, Seq> = BTreeMap::new();
    let mut joined: BTreeSet<WriterId> = BTreeSet::new();
    let mut end = Position { segment: from, offset: 0 };
    of.walk(from, |place, step| {
        if is_past(limit, place.before, &passed) {
            return Ok(ControlFlow::Break(()));
        }
        end = place.end;
        match step {
            Step::Record { record, at, .. } => {
                let (writer, seq) = (record.writer, record.seq);
                let is_beyond = passed.contains_key(&writer)
                    || match limit {
                        Limit::Time(time) => at > last_taken(*time),
                        Limit::Vector(cut) | Limit::Exact(cut) => seq > cut.get(writer),
                    };
                let (start, end) = (place.start, place.end);
                seen.push(Seen { writer, seq, at, start, end });
                if is_beyond {
                    passed.entry(writer).or_insert(record.hlc);
                    return Ok(ControlFlow::Continue(()));
                }
                let before = seen_state.writer(writer).copied();
                if let (Effect::CopyDone, Some(before)) = (&record.effect, before) {
                    if matches!(before.copy, CopyState::Empty | CopyState::Partial) {
                        whole_at.insert(writer, seq);
                    }
                    if before.standing == Standing::Joining {
                        joined.insert(writer);
                    }
                }
                tracker.record(&seen_state, record);
                seen_state.apply_record(record).map_err(unexpected)?;
            }
            Step::Note(Note::Shape(_)) => {
                if let Limit::Time(time) = limit
                    && *time <= place.before.newest_effective()
                {
                    return Ok(ControlFlow::Break(()));
                }
                tracker.settle(&seen_state.committed());
                let Step::Note(note) = step else { unreachable!("a shape") };
                seen_state.apply_note(note).map_err(unexpected)?;
                tracker.reshape(&seen_state);
            }
            Step::Note(note @ Note::EpochStart(start)) => {
                let is_in = match limit {
                    Limit::Time(time) => *time > place.before.newest_effective(),
                    Limit::Vector(cut) | Limit::Exact(cut) => {
                        cut.covers(&start.cut) && **cut != start.cut
                    }
                };
                if !is_in {
                    return Ok(ControlFlow::Break(()));
                }
                seen_state.apply_note(note).map_err(unexpected)?;
                tracker = crate::cut::CutTracker::new(&seen_state);
                newest = newest.max(seen_state.barrier);
                passed.clear();
            }
            Step::Note(note @ Note::Copy { writer, .. }) => {
                // Of a writer whose later records are beyond the limit it says nothing here.
                if !passed.contains_key(writer) {
                    seen_state.apply_note(note).map_err(unexpected)?;
                }
            }
            Step::Note(Note::Checkpoint(_) | Note::CleanEnd) => {}
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let cut = match limit {
        Limit::Exact(cut) => (*cut).clone(),
        Limit::Time(_) | Limit::Vector(_) => {
            let reached = seen_state.writers.iter().enumerate().map(|(i, writer)| {
                let passed = passed.get(&WriterId(i as u16));
                match limit {
                    _ if writer.committed != writer.seq => Hlc(0),
                    Limit::Time(time) => *time,
                    _ => passed.map_or(Hlc(0), |hlc| Hlc(hlc.0.saturating_sub(1))),
                }
            });
            tracker.nothing_before(reached.collect());
            tracker.settle(&seen_state.committed()).clone()
        }
    };
    let writers = writers(&seen_state, &cut, &whole_at, &joined)?;
    let is_in = |record: &&Seen| record.seq <= cut.get(record.writer);
    if seen.iter().any(|record| record.start < of.base && !is_in(&record)) {
        // It is in the images already.
        return Err(PastError::BeforeWindow { oldest: of.oldest.at });
    }
    let newest = seen.iter().filter(is_in).map(|r| r.at).fold(newest, Ord::max);
    let start = Position { segment: from, offset: 0 };
    let last = seen.iter().filter(is_in).map(|r| r.end).fold(start.max(of.base), Ord::max);
    let first = seen.iter().find(|record| !is_in(record)).map(|record| record.start);
    Ok(Point {
        hlc: newest,
        epoch: seen_state.epoch,
        writers,
        end: last,
        beyond: first.unwrap_or(end).max(of.base),
        cut,
    })
}

fn unexpected(error: crate::journal::StateError) -> PastError {
    PastError::Unavailable(format!("the journal does not replay: {error}"))
}

/// The last time that a record of the state at this time may have.
fn last_taken(time: Hlc) -> Hlc {
    let late = if planted::is(Bug::ViewAfterItsTime) { 1 << 16 } else { 0 };
    Hlc(time.0 + late)
}

/// Whether nothing up to the limit can follow.
fn is_past(limit: &Limit<'_>, before: &State, passed: &BTreeMap<WriterId, Hlc>) -> bool {
    let writers = (0..).map(WriterId).zip(&before.writers);
    let mut counted = writers.filter(|(_, writer)| writer.standing != Standing::Removed);
    match limit {
        Limit::Time(time) if before.recovered().is_some() => {
            !passed.is_empty() && before.last_hlc > *time
        }
        Limit::Time(time) => {
            let settled = before.form == Form::Vector
                && before.writers.len() > 1
                && walk::settled(before) >= *time;
            settled
                || before.barrier >= *time
                || counted.all(|(writer, _)| passed.contains_key(&writer))
        }
        // Until it is known of every writer when its next record is.
        Limit::Vector(_) => counted.all(|(writer, _)| passed.contains_key(&writer)),
        Limit::Exact(cut) => before.journaled().covers(cut) && !passed.is_empty(),
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
