//! Reading a sealed segment only to see that it is what was written.
//!
//! Opening does not read sealed segments that have an index, so what a disk does to them is found
//! here, or by whoever reads them first. A segment that is damaged or cannot be read loses its
//! index: then the next opening reads it, and says what is wrong with it, until its file has been
//! restored.

use super::index::index_file_name;
use super::{JournalError, Position, Reader, Segment};
use crate::storage::{self, Storage};
use std::io;

/// Verifies one sealed segment.
#[derive(Debug)]
pub struct ScrubJob<S: Storage> {
    pub(super) storage: S,
    pub(super) dir: String,
    pub(super) segment: Segment<S::File>,
}

impl<S: Storage> ScrubJob<S> {
    /// Which segment.
    #[must_use]
    pub fn segment(&self) -> u64 {
        self.segment.index
    }

    /// Does it: every batch and every entry is read. Returns the bytes that it had.
    pub fn run(self) -> Result<u64, JournalError> {
        let Self { storage, dir, segment } = self;
        let (index, id, len_bytes) = (segment.index, segment.id, segment.len_bytes);
        let verified = verify(segment);
        if verified.is_err() {
            match storage.remove(&storage::join(&dir, &index_file_name(index, id))) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(JournalError::io("remove the index of a damaged segment")(e));
                }
                _ => {}
            }
            let synced = storage.sync_dir(&dir);
            synced.map_err(JournalError::io("remove the index of a damaged segment"))?;
        }
        verified.map(|()| len_bytes)
    }
}

fn verify<F: crate::storage::StorageFile>(segment: Segment<F>) -> Result<(), JournalError> {
    let from = Position { segment: segment.index, offset: 0 };
    let to = Position { segment: segment.index, offset: segment.len_bytes };
    for batch in Reader::new(vec![segment], from, to) {
        let batch = batch?;
        for entry in batch.entries {
            entry.map_err(|damage| {
                super::reader::corrupt(&batch.segment, batch.start.offset, damage)
            })?;
        }
    }
    Ok(())
}
