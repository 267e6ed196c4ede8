//! Folding: the journal's records go into the disk images, outside the acknowledgement path
//! (PipeCloud 4.4). Of what is read of the journal at once, the newest of each extent is written,
//! in the order of the disk (`gathered.rs`).
//!
//! Invariants:
//! - Only durable records that are inside the group's downward-closed cut and not void are folded,
//!   so an image never holds what a recovery would leave out (rule 2).
//! - A fold that is interrupted is done again from the position that is on record. Doing it twice
//!   is harmless: records say what an extent holds, not how it changes. Until then every view has
//!   the journal from that position over the images, so it is of no matter in which order they
//!   were written.
//! - The position is recorded after the images are durable, and segments go after that.
//! - What cannot be read now may be read later: the job ends with nothing done, until it was tried so often that it
//!   is told to take that for damaged.
//! - What is damaged is never written: the range is marked in the images' record, which has the
//!   position, too, until a later record stands there (`damaged.rs`, below).

mod damaged;
mod gathered;
mod position;

pub use position::{FoldPosition, read_position, write_position};

use crate::damage::{ImageDamage, LostWith, SegmentDamage};
use crate::extents::DiskKey;
use crate::image::{self, Image};
use crate::journal::{self, JournalBatch, JournalError, Position, State, Tail, is_whole};
use gathered::Gathered;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::record::Effect;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;

/// Payloads that are in memory at once, about.
const GATHER_BYTES: u64 = 64 << 20;

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
    pub images: BTreeMap<DiskKey, Image<F>>,
    /// What of them is damaged, up to the recorded position.
    pub damaged: ImageDamage,
    /// About how much to do at once.
    pub budget_bytes: u64,
    /// What cannot be read was tried often enough: it is damaged.
    pub gives_up: bool,
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folded {
    /// Everything before it is in the images, durably.
    pub position: Position,
    /// Bytes that the records on the way changed, each by itself.
    pub bytes: u64,
    /// Bytes of the images that were changed for that.
    pub written_bytes: u64,
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
    /// The disk did not read the journal: this may get better.
    #[error("cannot read the journal, and tries again: {0}")]
    Unreadable(#[source] io::Error),
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
    /// What has been read and is not in the images.
    gathered: Gathered,
    /// Sectors of which some record of that has only a part.
    in_part: BTreeMap<DiskKey, BTreeSet<u64>>,
    changes: BTreeMap<DiskKey, image::Change<F>>,
}

impl<F: StorageFile> FoldJob<F> {
    /// Does it.
    pub fn run(self) -> Result<Folded, FoldError> {
        let folded =
            Folded { position: self.from, damaged: self.damaged.clone(), ..Folded::default() };
        let mut run = Run {
            job: self,
            folded,
            gathered: Gathered::default(),
            in_part: BTreeMap::new(),
            changes: BTreeMap::new(),
        };
        run.all()?;
        run.apply()?;
        for (key, change) in run.changes {
            for range in change.end().map_err(|e| image_error(key, e))? {
                run.folded.damaged.mark(key, range, LostWith(None));
            }
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
                Some(Err(JournalError::Io { source, .. }))
                    if !self.job.gives_up && may_be_read_later(&source) =>
                {
                    return Err(FoldError::Unreadable(source));
                }
                Some(Err(JournalError::Corrupt { .. } | JournalError::Io { .. })) => {
                    (reader.position().segment, Went::Unreadable)
                }
                Some(Err(error)) => return Err(error.into()),
            };
            match went {
                Went::On => self.folded.position = reader.position(),
                Went::BeyondTheCut => return Ok(()),
                Went::Unreadable => {
                    let Some(next) = self.unreadable(segment)? else { return Ok(()) };
                    self.folded.position = next;
                    reader = self.job.tail.reader(next, self.job.to);
                }
            }
            if self.gathered.payload_bytes() >= GATHER_BYTES {
                self.apply()?;
            }
            if self.folded.bytes >= self.job.budget_bytes {
                return Ok(());
            }
        }
    }

    /// Gathers a batch, all of it or nothing: the fold ends before one that is not in the cut as a whole, and states that have
    /// less of it than the cut can still be seen.
    fn batch(&mut self, batch: JournalBatch<F>) -> Result<Went, FoldError> {
        for entry in batch.entries.clone() {
            let Ok(entry) = entry else { return Ok(Went::Unreadable) };
            let journal::Entry::Record { head, .. } = entry else { continue };
            let record = head.peek();
            let is_in_the_cut = record.seq <= self.job.cut.get(record.writer);
            if !is_in_the_cut && !self.job.state.is_void(record) {
                return Ok(Went::BeyondTheCut);
            }
        }
        let segment = batch.segment.index;
        for entry in batch.entries {
            let Ok(entry) = entry else { return Ok(Went::Unreadable) };
            let journal::Entry::Record { head, payload, .. } = entry else { continue };
            let record = head.peek();
            if self.job.state.is_void(record) {
                continue;
            }
            let key = DiskKey::of(record);
            let len_bytes = u64::from(head.changed_bytes());
            let range = record.body.offset..record.body.offset + len_bytes;
            self.folded.bytes += len_bytes;
            self.note_parts(key, &range);
            match record.body.effect {
                Effect::Write(_) if batch.is_damaged && !is_whole(&head, &payload) => {
                    self.lost(segment, key, range);
                }
                Effect::Write(_) => self.gathered.write(key, record.body.offset, payload),
                Effect::Zero { no_hole, .. } => self.gathered.zero(key, range, no_hole),
                Effect::CopyDone | Effect::Idle => {}
            }
        }
        Ok(Went::On)
    }

    fn lost(&mut self, segment: u64, key: DiskKey, range: Range<u64>) {
        self.note(segment);
        if !tidelock_planted::is(Bug::DamageFoldedAsGood) {
            self.gathered.lost(key, range, segment);
        }
    }

    fn note_parts(&mut self, key: DiskKey, range: &Range<u64>) {
        let mut sectors = image::sectors_in_part(range).peekable();
        if sectors.peek().is_some() {
            self.in_part.entry(key).or_default().extend(sectors);
        }
    }

    /// What was gathered goes into the images.
    fn apply(&mut self) -> Result<(), FoldError> {
        let gathered = std::mem::take(&mut self.gathered);
        for (key, sectors) in std::mem::take(&mut self.in_part) {
            let noted = self.change(key)?.in_part(sectors, |range| gathered.covers(key, range));
            noted.map_err(|e| image_error(key, e))?;
        }
        for (key, range, change) in gathered.changes() {
            let done = match &change {
                gathered::Change::Lost { segment } => {
                    self.folded.damaged.mark(key, range, LostWith(Some(*segment)));
                    continue;
                }
                gathered::Change::Write(parts) => {
                    let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
                    self.change(key)?.write_at(&parts, range.start)
                }
                gathered::Change::Zero { no_hole } => {
                    self.change(key)?.zero_at(range.start, range.end - range.start, *no_hole)
                }
            };
            done.map_err(|e| image_error(key, e))?;
            self.folded.written_bytes += range.end - range.start;
            self.folded.damaged.heal(key, range);
        }
        Ok(())
    }

    fn change(&mut self, key: DiskKey) -> Result<&mut image::Change<F>, FoldError> {
        match self.changes.entry(key) {
            Entry::Occupied(of) => Ok(of.into_mut()),
            Entry::Vacant(of) => {
                let image = self.job.images.get(&key);
                let image =
                    image.ok_or_else(|| image_error(key, io::ErrorKind::NotFound.into()))?;
                Ok(of.insert(image.change()))
            }
        }
    }
}

/// A file that is gone or too short stays so.
fn may_be_read_later(error: &io::Error) -> bool {
    !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
}

fn image_error(key: DiskKey, source: io::Error) -> FoldError {
    if tidelock_storage::is_full(&source) {
        return FoldError::Full(source);
    }
    FoldError::Image { disk: format!("{}.{}", key.writer, key.disk), source }
}
