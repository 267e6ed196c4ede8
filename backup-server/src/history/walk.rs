//! The journal once more, with each record's effective time, without void records.

use super::PastError;
use crate::journal::{Damage, Entry, JournalError, Note, Position, Reader, SegmentHeader, State};
use crate::storage::StorageFile;
use std::ops::ControlFlow;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::message::Form;
use tidelock_protocol::record::Record;

/// In the vector form a writer that has nothing to write says nothing. So that it does not keep
/// everybody from asking for a time, a record that arrives when another writer's is so many
/// milliseconds later counts as of that time. It is a part of the journal's format: the same
/// question must always have the same answer.
pub const SETTLE_MS: u64 = 10_000;

/// In the vector form: records that come after this state count as later than this.
pub(super) fn settled(state: &State) -> Hlc {
    Hlc(state.last_hlc.0.saturating_sub(SETTLE_MS << 16))
}

/// The effective time of a record that follows a state: its HLC, but after what was closed by then.
#[must_use]
pub fn effective(before: &State, record: &Record) -> Hlc {
    let mut closed = before.barrier;
    if before.form == Form::Vector && before.recovered().is_none() && before.writers.len() > 1 {
        closed = closed.max(settled(before));
    }
    match closed {
        Hlc(0) => record.hlc,
        closed => record.hlc.max(Hlc(closed.0.saturating_add(1))),
    }
}

/// Where an entry is.
pub(super) struct Place<'a> {
    /// The beginning of its batch.
    pub(super) start: Position,
    /// The end of its batch.
    pub(super) end: Position,
    /// The state before it, as the journal has it: with what is void.
    pub(super) before: &'a State,
}

/// An entry.
pub(super) enum Step<'a> {
    /// A record that is not void.
    Record {
        /// Its header.
        record: &'a Record,
        /// What of its disk it changes.
        len_bytes: u64,
        /// Its effective time.
        at: Hlc,
    },
    /// A note.
    Note(&'a Note),
}

/// Shows what a reader gives, which begins at a segment, to `f`, until that breaks. `last` is the
/// state at the journal's end.
pub(super) fn walk<F: StorageFile>(
    reader: Reader<F>,
    last: &State,
    mut f: impl FnMut(&Place<'_>, Step<'_>) -> Result<ControlFlow<()>, PastError>,
) -> Result<(), PastError> {
    let mut state = None::<State>;
    for batch in reader {
        let batch = batch?;
        let (start, end) = (batch.start, batch.end);
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
                state = Some(State::of_checkpoint(&checkpoint));
                continue;
            };
            let place = Place { start, end, before };
            match entry {
                Entry::Note(note) => {
                    if f(&place, Step::Note(&note))?.is_break() {
                        return Ok(());
                    }
                    before.apply_note(&note).map_err(|e| damaged(e.into()))?;
                }
                Entry::Record { head, .. } => {
                    let record = head.peek();
                    if !last.is_void(record) {
                        let at = effective(before, record);
                        let len_bytes = u64::from(head.extent_len_bytes());
                        if f(&place, Step::Record { record, len_bytes, at })?.is_break() {
                            return Ok(());
                        }
                    }
                    before.apply_record(record).map_err(|e| damaged(e.into()))?;
                }
            }
        }
    }
    Ok(())
}
