//! Reading a map. What is read is verified; in memory stay 16 bytes for each fence, which is of
//! 60 000 entries.

use super::format::{
    BLOCK_BYTES, KEYS_PER_FENCE, MapEntry, MapError, MapFacts, Place, TRAILER_BYTES, Trailer,
    decode_fence, read_leaf,
};
use crate::extents::DiskKey;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_storage::StorageFile;

/// A map that was opened.
#[derive(Debug)]
pub struct MapFile<F> {
    file: F,
    facts: MapFacts,
    leaves: u64,
    top: Vec<Place>,
    /// Something in it was not what was written.
    is_damaged: AtomicBool,
}

impl<F: StorageFile> MapFile<F> {
    /// Reads what stands behind the blocks.
    pub fn open(file: F) -> Result<Self, MapError> {
        let size = file.size_bytes()?;
        let Some(trailer_at) = size.checked_sub(TRAILER_BYTES as u64) else {
            return Err(MapError::Damaged("it is too short"));
        };
        let mut trailer = [0; TRAILER_BYTES];
        file.read_at(&mut trailer, trailer_at)?;
        let trailer = Trailer::decode(&trailer)?;
        let (leaves, _, at, len) = trailer.layout();
        if at.checked_add(len) != Some(trailer_at) {
            return Err(MapError::Damaged("it has another length"));
        }
        let mut middle = vec![0; len as usize];
        file.read_at(&mut middle, at)?;
        let (facts, top) = trailer.decode_middle(&middle)?;
        Ok(Self { file, facts, leaves, top, is_damaged: AtomicBool::new(false) })
    }

    /// What it is about.
    #[must_use]
    pub fn facts(&self) -> &MapFacts {
        &self.facts
    }

    /// Whether reading it has failed: it must be made again.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.is_damaged.load(Ordering::Acquire)
    }

    /// Shows the extents that overlap a range of a disk, in order, as they are, not cut.
    pub fn overlapping(
        &self,
        key: DiskKey,
        range: Range<u64>,
        mut f: impl FnMut(&MapEntry),
    ) -> Result<(), MapError> {
        let Some(mut leaf) = self.noting(self.leaf_of((key, range.start)))? else { return Ok(()) };
        while leaf < self.leaves {
            let mut is_past = false;
            let shown = self.block(leaf).and_then(|block| {
                read_leaf(&block, &self.facts, leaf, |entry| {
                    is_past = entry.place() >= (key, range.end);
                    if !is_past && (entry.key, entry.end()) > (key, range.start) {
                        f(entry);
                    }
                    !is_past
                })
            });
            self.noting(shown)?;
            if is_past {
                return Ok(());
            }
            leaf += 1;
        }
        Ok(())
    }

    /// All of it, in order.
    pub fn entries(&self) -> impl Iterator<Item = Result<MapEntry, MapError>> + '_ {
        let leaves = (0..self.leaves).map(|leaf| self.noting(self.leaf(leaf)));
        leaves.flat_map(|leaf| match leaf {
            Ok(entries) => entries.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }

    fn noting<T>(&self, result: Result<T, MapError>) -> Result<T, MapError> {
        if result.is_err() {
            self.is_damaged.store(true, Ordering::Release);
        }
        result
    }

    /// The last leaf that does not begin behind this place, or the first.
    fn leaf_of(&self, place: Place) -> Result<Option<u64>, MapError> {
        if self.leaves == 0 {
            return Ok(None);
        }
        let nth = self.top.partition_point(|first| *first <= place).saturating_sub(1);
        let number = self.leaves + nth as u64;
        let fence = decode_fence(&self.block(number)?, &self.facts, number)?;
        let inside = fence.partition_point(|first| *first <= place).saturating_sub(1);
        Ok(Some((nth * KEYS_PER_FENCE + inside) as u64))
    }

    fn leaf(&self, number: u64) -> Result<Vec<MapEntry>, MapError> {
        let mut entries = Vec::new();
        read_leaf(&self.block(number)?, &self.facts, number, |entry| {
            entries.push(*entry);
            true
        })?;
        Ok(entries)
    }

    fn block(&self, number: u64) -> Result<[u8; BLOCK_BYTES], MapError> {
        let mut bytes = [0; BLOCK_BYTES];
        self.file.read_at(&mut bytes, number * BLOCK_BYTES as u64)?;
        Ok(bytes)
    }
}
