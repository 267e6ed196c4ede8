//! Reading a segment only to see that it is what was written.
//!
//! Opening does not read sealed segments that have an index, so what a disk does to them is found
//! here, or by whoever reads them first. Nothing is changed by it: what is found goes on record
//! ([`crate::damage`]), and the index of a damaged segment is worth more than before.

use super::Segment;
use super::examine::{Listed, examine};
use crate::damage::SegmentDamage;
use tidelock_storage::StorageFile;

/// Verifies one segment.
#[derive(Debug)]
pub struct ScrubJob<F> {
    pub(super) segment: Segment<F>,
    pub(super) listed: Listed<F>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrubbed {
    /// Bytes that were read.
    pub bytes: u64,
    /// What is wrong.
    pub damage: Option<SegmentDamage>,
}

impl<F: StorageFile> ScrubJob<F> {
    /// Which segment.
    #[must_use]
    pub fn segment(&self) -> u64 {
        self.segment.index
    }

    /// Does it: every batch and every entry is read.
    #[must_use]
    pub fn run(self) -> Scrubbed {
        let damage = examine(&self.segment, &self.listed);
        Scrubbed { bytes: self.segment.len_bytes, damage }
    }
}
