//! The journal once more, with each record's effective time.

use super::PastError;
use std::ops::ControlFlow;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Record;
use tidelock_storage::StorageFile;
use tidelock_store::journal::{
    Damage, Entry, JournalError, Note, Position, Reader, SegmentHeader, State,
};

/// The effective time of a record that follows a state: its HLC, but after what was closed by then, and of several
/// writers not before any record that had arrived.
///
/// Of one writer HLCs only grow. Of several they do not, and no rule about their own times alone gives closed states:
/// a record names what its writer has heard by tags, but not what was told to clients as C before a client asked that
/// writer for it, and clocks differ. What was in C by then has arrived before it, though, so whatever takes a record
/// only with all that had arrived before it is closed.
#[must_use]
pub fn effective(before: &State, record: &Record) -> Hlc {
    match (before.writers.len(), before.barrier) {
        (0 | 1, Hlc(0)) => record.hlc,
        (0 | 1, barrier) => record.hlc.max(Hlc(barrier.0.saturating_add(1))),
        _ => record.hlc.max(before.newest_effective()),
    }
}

/// Where an entry is.
pub(super) struct Place<'a> {
    /// The beginning of its batch.
    pub(super) start: Position,
    /// The end of its batch.
    pub(super) end: Position,
    /// When its batch arrived, in milliseconds since the Unix epoch.
    pub(super) arrived_ms: u64,
    /// The state before it, as the journal has it: with what is void.
    pub(super) before: &'a State,
}

/// An entry.
pub(super) enum Step<'a> {
    /// A record.
    Record {
        /// Its header.
        record: &'a Record,
        /// What of its disk it changes.
        len_bytes: u64,
        /// Its effective time.
        at: Hlc,
        /// A later recovery has cut it off, or its writer's removal. That it had arrived was true all the same: in the
        /// HLC form it may be what others waited for.
        is_void: bool,
    },
    /// A note.
    Note(&'a Note),
}

/// Shows what a reader gives, which begins at a segment or at a place where this is the state, to `f`, until that
/// breaks. `last` is the state at the journal's end.
pub(super) fn walk<F: StorageFile>(
    reader: Reader<F>,
    mut state: Option<State>,
    last: &State,
    mut f: impl FnMut(&Place<'_>, Step<'_>) -> Result<ControlFlow<()>, PastError>,
) -> Result<(), PastError> {
    let from_waypoint = state.is_some();
    for batch in reader {
        let batch = batch?;
        let (start, end, arrived_ms) = (batch.start, batch.end, batch.arrived_ms);
        let damaged = |damage| {
            let file = SegmentHeader::file_name(batch.segment.index, batch.segment.id);
            PastError::Journal(JournalError::Corrupt { file, offset: start.offset, damage })
        };
        for entry in batch.entries {
            let entry = entry.map_err(damaged)?;
            let Some(before) = &mut state else {
                let Entry::Note(Note::Checkpoint(checkpoint)) = entry else {
                    return Err(damaged(Damage::Chain("no checkpoint")));
                };
                state = Some(*checkpoint);
                continue;
            };
            let place = Place { start, end, arrived_ms, before };
            match entry {
                Entry::Note(note) => {
                    if f(&place, Step::Note(&note))?.is_break() {
                        return Ok(());
                    }
                    if let (Note::Checkpoint(checkpoint), true) = (&note, from_waypoint) {
                        before.take_names(checkpoint);
                    }
                    before.apply_note(&note).map_err(|e| damaged(e.into()))?;
                }
                Entry::Record { head, .. } => {
                    let record = head.peek();
                    let (at, is_void) = (effective(before, record), last.is_void(record));
                    let len_bytes = u64::from(head.changed_bytes());
                    if f(&place, Step::Record { record, len_bytes, at, is_void })?.is_break() {
                        return Ok(());
                    }
                    before.apply_record(record).map_err(|e| damaged(e.into()))?;
                }
            }
        }
        if let Some(state) = &mut state {
            state.arrived_ms = arrived_ms;
        }
    }
    Ok(())
}
