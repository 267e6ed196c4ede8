//! Folding: the journal's records go into the disk images, in journal order, outside the
//! acknowledgement path (PipeCloud 4.4).
//!
//! Invariants:
//! - Only durable records that are inside the group's downward-closed cut and not void are folded,
//!   so an image never holds what a recovery would leave out (rule 2).
//! - A fold that is interrupted is done again from the position that is on record. Doing it twice
//!   is harmless: records say what an extent holds, not how it changes.
//! - The position is recorded after the images are durable, and segments go after that.

use crate::journal::{Entry, JournalError, Position, Reader, SegmentHeader, State};
use crate::storage::{self, StorageFile};
use crate::view::DiskKey;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use thiserror::Error;
use tidelock_protocol::record::Effect;
use tidelock_protocol::vector::CountVector;

/// One piece of work.
#[derive(Debug)]
pub struct FoldJob<F> {
    /// What to fold: from the recorded position to the durable end.
    pub reader: Reader<F>,
    /// For telling void records.
    pub state: State,
    /// The cut.
    pub cut: CountVector,
    /// The images.
    pub images: BTreeMap<DiskKey, F>,
    /// About how much to do at once.
    pub budget_bytes: u64,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Folded {
    /// Everything before it is in the images, durably.
    pub position: Position,
    /// Records that were written to images.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Why it stopped. Nothing is recorded of what was done.
#[derive(Debug, Error)]
pub enum FoldError {
    /// The journal cannot be read or is damaged.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An image has no room: this gets better.
    #[error("no room for the disk images: {0}")]
    Full(#[source] io::Error),
    /// An image cannot be written.
    #[error("cannot write to the image of disk {disk}: {source}")]
    Image {
        /// Which.
        disk: String,
        /// Why.
        source: io::Error,
    },
}

impl<F: StorageFile> FoldJob<F> {
    /// Does it.
    pub fn run(mut self) -> Result<Folded, FoldError> {
        let mut folded = Folded { position: self.reader.position(), ..Folded::default() };
        let mut touched = BTreeSet::new();
        'batches: while let Some(batch) = self.reader.next() {
            let batch = batch?;
            for entry in batch.entries {
                let entry = entry.map_err(|damage| {
                    let file = SegmentHeader::file_name(batch.segment.index, batch.segment.id);
                    JournalError::Corrupt { file, offset: batch.start.offset, damage }
                })?;
                let Entry::Record { head, payload, .. } = entry else { continue };
                let record = head.peek();
                if self.state.is_void(record) {
                    continue;
                }
                if record.seq > self.cut.get(record.writer) {
                    // The rest of this batch waits; what was done of it will be done again.
                    break 'batches;
                }
                let key = DiskKey::of(record);
                let len_bytes = u64::from(head.extent_len_bytes());
                if matches!(record.effect, Effect::CopyDone | Effect::Idle) {
                    continue;
                }
                let image = self.images.get(&key).ok_or_else(|| FoldError::Image {
                    disk: format!("{}.{}", key.writer, key.disk),
                    source: io::ErrorKind::NotFound.into(),
                })?;
                let written = match record.effect {
                    Effect::Write(_) => image.write_at(&[IoSlice::new(&payload)], record.offset),
                    Effect::Zero { no_hole, .. } => {
                        image.zero_at(record.offset, len_bytes, no_hole)
                    }
                    Effect::CopyDone | Effect::Idle => Ok(()),
                };
                written.map_err(|e| image_error(key, e))?;
                touched.insert(key);
                folded.records += 1;
                folded.bytes += len_bytes;
            }
            folded.position = self.reader.position();
            if folded.bytes >= self.budget_bytes {
                break;
            }
        }
        for key in touched {
            self.images[&key].sync().map_err(|e| image_error(key, e))?;
        }
        Ok(folded)
    }
}

fn image_error(key: DiskKey, source: io::Error) -> FoldError {
    if storage::is_full(&source) {
        return FoldError::Full(source);
    }
    FoldError::Image { disk: format!("{}.{}", key.writer, key.disk), source }
}
