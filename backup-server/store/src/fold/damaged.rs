//! What a fold does with a segment that cannot be read batch by batch.
//!
//! Its index says what each of its records changes and where the payload is, so it is folded by
//! that: as a whole, and only if all of it is in the cut. Of a writer the order is that of the
//! journal; different writers' disks do not meet. Without an index nothing of the segment is known,
//! so nothing that stands in the images is either.

use super::{FoldError, Run};
use crate::extents::DiskKey;
use crate::journal::{IndexEntry, Position, SEGMENT_HEADER_BYTES, payload_of};
use tidelock_storage::StorageFile;

impl<F: StorageFile> Run<F> {
    /// The segment is on record as damaged when this job is done.
    pub(super) fn note(&mut self, segment: u64) {
        if self.folded.found.iter().all(|found| found.segment != segment) {
            self.folded.found.extend(self.job.tail.examine(segment));
        }
    }

    /// Folds the segment as far as it is known what it had. Returns where the next one begins;
    /// `None`: it must wait.
    pub(super) fn unreadable(&mut self, segment: u64) -> Result<Option<Position>, FoldError> {
        self.note(segment);
        // Of the last one it is not known yet what it will have.
        if segment >= self.job.to.segment {
            return Ok(None);
        }
        if !self.is_in_the_cut(segment) {
            return Ok(None);
        }
        match self.job.tail.listed_entries(segment) {
            Some(entries) => self.by_entries(segment, &entries),
            None => {
                self.apply()?;
                self.folded.damaged.mark_unknown(self.job.images.keys().copied(), segment);
            }
        }
        Ok(Some(Position { segment: segment + 1, offset: SEGMENT_HEADER_BYTES as u64 }))
    }

    fn by_entries(&mut self, segment: u64, entries: &[IndexEntry]) {
        let Some(of) = self.job.tail.segment(segment).cloned() else { return };
        for entry in entries {
            if entry.seq > self.job.state.last_that_counts(entry.writer, entry.epoch) {
                continue;
            }
            let key = DiskKey { writer: entry.writer, disk: entry.disk };
            let range = entry.range();
            self.folded.bytes += range.end - range.start;
            self.note_parts(key, &range);
            match (entry.at, payload_of(&of, entry)) {
                (0, _) => self.gathered.zero(key, range, false),
                (_, Some(payload)) => self.gathered.write(key, entry.offset, payload.into()),
                (_, None) => self.lost(segment, key, range),
            }
        }
    }

    /// Whether all records of a segment are, also those that change nothing.
    fn is_in_the_cut(&self, segment: u64) -> bool {
        let Some(after) = self.job.starts.get(&(segment + 1)) else { return false };
        self.job.state.is_all_in(&self.job.cut, &after.journaled(), after.epoch)
    }
}
