//! What a group knows of its own past, and gives to others to look at.

use super::{Group, RecoverError};
use crate::history::{History, Hold, PastError, Point, SegmentStart};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tidelock_cut::CutTracker;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Epoch;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::fold::{self, FoldPosition};
use tidelock_store::journal::Closed;
use tidelock_store::journal::{Note, Position, Shown, State, Waypoint};

/// How much of the past there is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastStatus {
    /// What is wanted, in milliseconds.
    pub window_ms: u64,
    /// The oldest time that can be asked for.
    pub oldest: Hlc,
    /// The newest time that can be asked for.
    pub newest: Hlc,
    /// The arrival of the oldest state that can be asked for, in milliseconds since the Unix epoch.
    #[serde(default)]
    pub oldest_unix_ms: u64,
    /// The arrival of the newest record.
    #[serde(default)]
    pub newest_unix_ms: u64,
    /// From one to the other, in milliseconds.
    pub seen_ms: u64,
    /// It is less than wanted, because the journal has reached its size.
    pub shortened: bool,
    /// Views, pins and exports that hold the images.
    pub holds: u64,
    /// Most bytes of the journal.
    pub size_max_bytes: u64,
}

/// What opening a journal finds out for the cut and for the past.
pub(super) struct Found {
    position: Position,
    /// The cut, from the fold position on.
    pub(super) beyond: Option<CutTracker>,
    /// By segment: since when everything before it is in every state. An upper bound does.
    pub(super) closed: BTreeMap<u64, Closed>,
    open: VecDeque<(u64, Epoch, CountVector)>,
}

impl Found {
    pub(super) fn new(position: Position) -> Self {
        Self { position, beyond: None, closed: BTreeMap::new(), open: VecDeque::new() }
    }

    /// The next entry.
    pub(super) fn shown(&mut self, start: Position, before: &State, shown: Shown<'_>) {
        if start < self.position {
            return;
        }
        // What is before was folded, so it is in the cut.
        let tracker = self.beyond.get_or_insert_with(|| CutTracker::new(before));
        match shown {
            Shown::Record(record) => tracker.record(before, record),
            Shown::Note(note @ (Note::Shape(_) | Note::EpochStart(_))) => {
                // What was told by then stays in the cut, however far behind a new writer is.
                tracker.settle(&before.committed());
                let mut after = before.clone();
                // What cannot follow is damage, and told so next.
                if after.apply_note(note).is_err() {
                    return;
                }
                match note {
                    Note::EpochStart(_) => *tracker = CutTracker::new(&after),
                    _ => tracker.reshape(&after),
                }
                let cut = tracker.settle(&after.committed()).clone();
                self.close(&after, &cut);
            }
            Shown::Note(Note::Checkpoint(_)) => {
                let cut = tracker.settle(&before.committed()).clone();
                self.open.push_back((start.segment, before.epoch, before.journaled()));
                self.close(before, &cut);
            }
            Shown::Note(_) => {}
        }
    }

    fn close(&mut self, state: &State, cut: &CountVector) {
        while let Some((index, epoch, journaled)) = self.open.front() {
            if !state.is_all_in(cut, journaled, *epoch) {
                return;
            }
            let (at, arrived_ms) = (state.newest_effective(), state.arrived_ms);
            let closed = Closed { at, cut: cut.clone(), arrived_ms };
            self.closed.insert(*index, closed);
            self.open.pop_front();
        }
    }
}

impl<S: Storage> Group<S> {
    /// Everything that is closed by what is durable.
    pub(super) fn closed_now(&self) -> Closed {
        let state = &self.durable_state;
        let (at, arrived_ms) = (state.newest_effective(), state.arrived_ms);
        Closed { at, cut: self.cut.cut().clone(), arrived_ms }
    }

    /// Segments whose beginnings the cut has reached.
    pub(super) fn close_segments(&mut self) {
        let state = &self.durable_state;
        let last = self.fold.closed.last_key_value().map_or(0, |(index, _)| *index);
        for (index, start) in self.journal.starts_after(last) {
            if !state.is_all_in(self.cut.cut(), &start.journaled(), start.epoch) {
                return;
            }
            let (at, arrived_ms) = (state.newest_effective(), state.arrived_ms);
            let closed = Closed { at, cut: self.cut.cut().clone(), arrived_ms };
            self.fold.closed.insert(index, closed);
        }
    }

    /// A place in the newest segment at which a replay may begin, as soon as the cut has reached it: one that waits, or
    /// this one, which is durable.
    pub(super) fn mark_waypoint(&mut self, end: Position, due: Option<(Position, State)>) {
        let Self { journal, fold, cut, durable_state: state, .. } = self;
        let is_of_now = |(at, before): &(Position, State)| {
            at.segment == end.segment && before.epoch == state.epoch
        };
        let waypoint = fold.waypoint.take().filter(is_of_now).or(due);
        let Some((at, before)) = waypoint else { return };
        let is_in_the_cut = state.is_all_in(cut.cut(), &before.journaled(), before.epoch);
        if !is_in_the_cut && !tidelock_planted::is(Bug::WaypointTooEarly) {
            fold.waypoint = Some((at, before));
            return;
        }
        let waypoint = Waypoint {
            offset: at.offset,
            state: before.without_names(),
            at: state.newest_effective(),
            cut: cut.cut().clone(),
            arrived_ms: state.arrived_ms,
        };
        journal.mark(at.segment, waypoint);
    }

    /// The group's past as far as it is durable, for any thread. Until it is dropped nothing is folded: make
    /// views and holds from it, and let it go.
    pub fn history(&self) -> Result<History<S::File>, PastError> {
        if let Some(reason) = self.broken() {
            return Err(PastError::Unavailable(reason.to_owned()));
        }
        let (position, oldest) = (self.fold.position, self.fold.oldest.at);
        let hold = self.fold.holds.hold(position, oldest, "a look at the past");
        let starts = self.journal.starts().map(|(index, state)| SegmentStart {
            index,
            state: state.clone(),
            closed: self.fold.closed.get(&index).cloned(),
        });
        Ok(History {
            manifest: self.manifest.clone(),
            tail: self.journal.tail(),
            starts: starts.collect(),
            base: self.fold.position,
            ahead: self.fold.ahead.clone(),
            oldest: self.fold.oldest.clone(),
            end: self.journal.durable().end(),
            state: self.durable_state.clone(),
            now_ms: self.journal.now_ms(),
            cut: self.cut.cut().clone(),
            images: self.images.clone(),
            damaged: Arc::clone(&self.fold.damaged),
            quarantine: Arc::clone(&self.damage.quarantine),
            noticed: self.damage.noticed.clone(),
            holds: self.fold.holds.clone(),
            hold,
        })
    }

    /// Keeps a point that was found before, perhaps by an earlier run: to be called right after the group was opened,
    /// before the first [`Group::fold_job`].
    pub fn hold(&mut self, point: &Point, why: &str) -> Result<Hold, PastError> {
        let history = self.history()?;
        let located = history.locate(point)?;
        history.hold(&located, why)
    }

    /// Since when the past can be seen.
    #[must_use]
    pub fn oldest(&self) -> &Closed {
        &self.fold.oldest
    }

    /// Whether a point is none of the group's past any more, because a recovery to an earlier one has left it out.
    #[must_use]
    pub fn has_left_out(&self, point: &Point) -> bool {
        self.journal.state().leaves_out(point.epoch, &point.cut)
    }

    /// How much of the past there is.
    #[must_use]
    pub fn past_status(&self) -> PastStatus {
        let state = &self.durable_state;
        let newest = crate::history::complete(state).max(self.fold.oldest.at);
        let retention = &self.options.retention;
        PastStatus {
            window_ms: retention.window_ms,
            oldest: self.fold.oldest.at,
            newest,
            oldest_unix_ms: self.fold.oldest.arrived_ms,
            newest_unix_ms: state.arrived_ms,
            seen_ms: match self.fold.oldest.at {
                Hlc(0) => 0,
                _ => state.arrived_ms.saturating_sub(self.fold.oldest.arrived_ms),
            },
            shortened: self.fold.shortened,
            holds: self.fold.holds.count() as u64,
            size_max_bytes: retention.size_max_bytes,
        }
    }

    /// A fold to here under this cut begins, and what can be seen is less from now on.
    pub(super) fn record_beginning(
        &mut self,
        oldest: Closed,
        (to, mut cut): (Position, CountVector),
    ) -> Result<(), super::GroupError> {
        let was = self.fold.ahead.clone();
        let to = was.as_ref().map_or(to, |(before, _)| to.max(*before));
        cut.merge(&was.as_ref().map_or_else(CountVector::new, |(_, cut)| cut.clone()));
        let fold = FoldPosition {
            position: self.fold.position,
            oldest: if oldest.at < self.fold.oldest.at { self.fold.oldest.clone() } else { oldest },
            folding: Some((to, cut)),
            damaged: (*self.fold.damaged).clone(),
        };
        if !tidelock_planted::is(Bug::OldestForgotten) {
            fold::write_position(&self.storage, &fold)?;
        }
        let FoldPosition { oldest, folding, .. } = fold;
        (self.fold.oldest, self.fold.ahead, self.fold.was_ahead) = (oldest, folding, was);
        Ok(())
    }
}

impl From<PastError> for RecoverError {
    fn from(error: PastError) -> Self {
        RecoverError::Past(error)
    }
}
