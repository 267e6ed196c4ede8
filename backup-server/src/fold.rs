//! Folding: the journal's records go into the disk images, in journal order, outside the
//! acknowledgement path (PipeCloud 4.4).
//!
//! Invariants:
//! - Only durable records that are inside the group's downward-closed cut and not void are folded,
//!   so an image never holds what a recovery would leave out (rule 2).
//! - A fold that is interrupted is done again from the position that is on record. Doing it twice
//!   is harmless: records say what an extent holds, not how it changes.
//! - The position is recorded after the images are durable, and segments go after that.
//! - What is damaged is never written: the range is marked in the images' record, which has the
//!   position, too, until a later record stands there (`damaged.rs`, below).

mod damaged;

use crate::damage::{ImageDamage, SegmentDamage};
use crate::journal::{Entry, JournalBatch, JournalError, Position, State, Tail, is_whole};
use crate::planted::{self, Bug};
use crate::storage::{self, StorageFile};
use crate::view::DiskKey;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::sync::Arc;
use thiserror::Error;
use tidelock_protocol::record::Effect;
use tidelock_protocol::vector::CountVector;

/// One piece of work.
#[derive(Debug)]
pub struct FoldJob<F> {
    /// The journal.
    pub tail: Tail<F>,
    /// What to fold: from the recorded position.
    pub from: Position,
    /// To here; it is durable.
    pub to: Position,
    /// For telling void records.
    pub state: State,
    /// The state at the beginning of each segment.
    pub starts: BTreeMap<u64, Arc<State>>,
    /// The cut.
    pub cut: CountVector,
    /// The images.
    pub images: BTreeMap<DiskKey, F>,
    /// What of them is damaged, up to the recorded position.
    pub damaged: ImageDamage,
    /// About how much to do at once.
    pub budget_bytes: u64,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folded {
    /// Everything before it is in the images, durably.
    pub position: Position,
    /// Records that were written to images.
    pub records: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What of the images is damaged at this position.
    pub damaged: ImageDamage,
    /// Segments that were found to be damaged.
    pub found: Vec<SegmentDamage>,
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

/// How a batch or a segment ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Went {
    /// All of it is in the images.
    On,
    /// It has something beyond the cut.
    BeyondTheCut,
    /// A header is damaged.
    Unreadable,
}

/// What the job has come to.
struct Run<F> {
    job: FoldJob<F>,
    folded: Folded,
    touched: BTreeSet<DiskKey>,
}

impl<F: StorageFile> FoldJob<F> {
    /// Does it.
    pub fn run(self) -> Result<Folded, FoldError> {
        let folded =
            Folded { position: self.from, damaged: self.damaged.clone(), ..Folded::default() };
        let mut run = Run { job: self, folded, touched: BTreeSet::new() };
        run.all()?;
        for key in run.touched {
            run.job.images[&key].sync().map_err(|e| image_error(key, e))?;
        }
        Ok(run.folded)
    }
}

impl<F: StorageFile> Run<F> {
    fn all(&mut self) -> Result<(), FoldError> {
        let mut reader = self.job.tail.reader(self.job.from, self.job.to);
        loop {
            let (segment, went) = match reader.next() {
                None => return Ok(()),
                Some(Ok(batch)) => (batch.segment.index, self.batch(batch)?),
                Some(Err(JournalError::Corrupt { .. } | JournalError::Io { .. })) => {
                    (reader.position().segment, Went::Unreadable)
                }
                Some(Err(error)) => return Err(error.into()),
            };
            match went {
                Went::On => self.folded.position = reader.position(),
                // The rest of this batch waits; what was done of it will be done again.
                Went::BeyondTheCut => return Ok(()),
                Went::Unreadable => {
                    let Some(next) = self.unreadable(segment)? else { return Ok(()) };
                    self.folded.position = next;
                    reader = self.job.tail.reader(next, self.job.to);
                }
            }
            if self.folded.bytes >= self.job.budget_bytes {
                return Ok(());
            }
        }
    }

    fn batch(&mut self, batch: JournalBatch<F>) -> Result<Went, FoldError> {
        let segment = batch.segment.index;
        for entry in batch.entries {
            let Ok(entry) = entry else { return Ok(Went::Unreadable) };
            let Entry::Record { head, payload, .. } = entry else { continue };
            let record = head.peek();
            if self.job.state.is_void(record) {
                continue;
            }
            if record.seq > self.job.cut.get(record.writer) {
                return Ok(Went::BeyondTheCut);
            }
            let key = DiskKey::of(record);
            let len_bytes = u64::from(head.extent_len_bytes());
            let range = record.offset..record.offset + len_bytes;
            match record.effect {
                Effect::Write(_) if batch.is_damaged && !is_whole(&head, &payload) => {
                    self.damaged(segment, key, range);
                }
                Effect::Write(_) => self.write(key, record.offset, &payload)?,
                Effect::Zero { no_hole, .. } => self.zero(key, range, no_hole)?,
                Effect::CopyDone | Effect::Idle => {}
            }
        }
        Ok(Went::On)
    }

    fn image(&self, key: DiskKey) -> Result<&F, FoldError> {
        self.job.images.get(&key).ok_or_else(|| FoldError::Image {
            disk: format!("{}.{}", key.writer, key.disk),
            source: io::ErrorKind::NotFound.into(),
        })
    }

    fn write(&mut self, key: DiskKey, offset: u64, payload: &[u8]) -> Result<(), FoldError> {
        let written = self.image(key)?.write_at(&[IoSlice::new(payload)], offset);
        written.map_err(|e| image_error(key, e))?;
        self.wrote(key, offset..offset + payload.len() as u64);
        Ok(())
    }

    fn zero(
        &mut self,
        key: DiskKey,
        range: std::ops::Range<u64>,
        no_hole: bool,
    ) -> Result<(), FoldError> {
        let zeroed = self.image(key)?.zero_at(range.start, range.end - range.start, no_hole);
        zeroed.map_err(|e| image_error(key, e))?;
        self.wrote(key, range);
        Ok(())
    }

    fn wrote(&mut self, key: DiskKey, range: std::ops::Range<u64>) {
        self.touched.insert(key);
        self.folded.records += 1;
        self.folded.bytes += range.end - range.start;
        self.folded.damaged.heal(key, range);
    }

    fn damaged(&mut self, segment: u64, key: DiskKey, range: std::ops::Range<u64>) {
        self.note(segment);
        if !planted::is(Bug::DamageFoldedAsGood) {
            self.folded.damaged.mark(key, range, segment);
        }
    }
}

fn image_error(key: DiskKey, source: io::Error) -> FoldError {
    if storage::is_full(&source) {
        return FoldError::Full(source);
    }
    FoldError::Image { disk: format!("{}.{}", key.writer, key.disk), source }
}
