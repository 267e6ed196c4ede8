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
    let mut seen: Vec<Seen> = Vec::new();
    // By writer: the time of its first record beyond the limit.
    let mut passed: BTreeMap<WriterId, Hlc> = BTreeMap::new();
    // Writers that began a resync right after the limit.
    let mut resyncs_next: BTreeSet<WriterId> = BTreeSet::new();
    let mut whole_at: BTreeMap<WriterId, Seq> = BTreeMap::new();
    let mut joined: BTreeSet<WriterId> = BTreeSet::new();
    // Where it is certain that nothing more can be in it.
    let mut over = None::<Position>;
    of.walk(from, |place, step| {
        if over.is_none() && is_past(limit, place.before, &passed) {
            over = Some(place.start);
        }
        if over.is_some() {
            // What is in the images must be in it, too: nothing more of that can be.
            if let Step::Record { record, at, .. } = step {
                let (writer, seq, start, end) = (record.writer, record.seq, place.start, place.end);
                seen.push(Seen { writer, seq, at, start, end, is_over: true });
            }
            let ends = place.start >= of.base;
            return Ok(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
        }
        match step {
            Step::Record { record, at, .. } => {
                let (writer, seq) = (record.writer, record.seq);
                let is_beyond = passed.contains_key(&writer)
                    || match limit {
                        Limit::Time(time) => at > last_taken(*time),
                        Limit::Vector(cut) | Limit::Exact(cut, _) => seq > cut.get(writer),
                    };
                let (start, end) = (place.start, place.end);
                seen.push(Seen { writer, seq, at, start, end, is_over: false });
                if is_beyond {
                    let next = place.before.writer(writer).map(|of| of.copy);
                    if !passed.contains_key(&writer) && next == Some(CopyState::Resyncing) {
                        resyncs_next.insert(writer);
                    }
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
                if let Limit::Time(time) | Limit::Exact(_, Some(time)) = limit
                    && *time <= place.before.newest_effective()
                {
                    over = Some(place.start);
                    return Ok(ControlFlow::Continue(()));
                }
                tracker.settle(&seen_state.committed());
                let Step::Note(note) = step else { unreachable!("a shape") };
                seen_state.apply_note(note).map_err(unexpected)?;
                tracker.reshape(&seen_state);
                newest = newest.max(since(&seen_state));
            }
            Step::Note(note @ Note::EpochStart(start)) => {
                let is_in = match limit {
                    Limit::Time(time) => *time > place.before.newest_effective(),
                    Limit::Vector(cut) | Limit::Exact(cut, _) => {
                        cut.covers(&start.cut) && **cut != start.cut
                    }
                };
                if !is_in {
                    over = Some(place.start);
                    return Ok(ControlFlow::Continue(()));
                }
                seen_state.apply_note(note).map_err(unexpected)?;
                tracker = crate::cut::CutTracker::new(&seen_state);
                newest = newest.max(since(&seen_state));
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
        Limit::Exact(cut, _) => (*cut).clone(),
        Limit::Time(_) | Limit::Vector(_) => {
            let reached = seen_state.writers.iter().enumerate().map(|(i, writer)| {
                let passed = passed.get(&WriterId(i as u16));
                let in_resync = resyncs_next.contains(&WriterId(i as u16));
                match limit {
                    // As long as it compares, the watermark stands where it was before: what a
                    // recovery left out then must not be shown either.
                    _ if in_resync || writer.committed != writer.seq => Hlc(0),
                    Limit::Time(time) => *time,
                    _ => passed.map_or(Hlc(0), |hlc| Hlc(hlc.0.saturating_sub(1))),
                }
            });
            tracker.nothing_before(reached.collect());
            tracker.settle(&seen_state.committed()).clone()
        }
    };
    let writers = writers(&seen_state, &cut, &whole_at, &joined)?;
    let is_in = |record: &&Seen| !record.is_over && record.seq <= cut.get(record.writer);
    if seen.iter().any(|record| record.start < of.base && !is_in(&record)) {
        // It is in the images already.
        return Err(PastError::BeforeWindow { oldest: of.oldest.at });
    }
    let newest = seen.iter().filter(is_in).map(|r| r.at).fold(newest, Ord::max);
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
        Limit::Exact(cut, time) => {
            let newest = before.newest_effective();
            let after = time.is_some_and(|time| time <= newest);
            after && before.journaled().covers(cut) && !passed.is_empty()
        }
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
