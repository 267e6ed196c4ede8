//! Reading an index. What is read is verified; nothing but the fence is kept in memory.

use super::Waypoint;
use super::format::{
    BLOCK_BYTES, Footer, IndexEntry, Key, SegmentFacts, TRAILER_BYTES, Trailer, decode_block,
};
use std::io;
use std::ops::{Bound, RangeBounds};
use thiserror::Error;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_storage::StorageFile;

/// Why an index cannot be used. Its segment can.
#[derive(Debug, Error)]
pub enum IndexError {
    /// It is not what was written.
    #[error("{0}")]
    Damaged(&'static str),
    /// It was written by another version.
    #[error("its version is {0}")]
    Version(u32),
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// An index that was opened: 16 bytes of memory for each block of it.
#[derive(Clone, Debug)]
pub struct SegmentIndex<F> {
    file: F,
    footer: Footer,
    fence: Vec<Key>,
    trailer: Trailer,
    waypoints_at: u64,
}

impl<F: StorageFile> SegmentIndex<F> {
    /// Reads what stands behind the blocks.
    pub fn open(file: F) -> Result<Self, IndexError> {
        let size = file.size_bytes()?;
        let Some(trailer_at) = size.checked_sub(TRAILER_BYTES as u64) else {
            return Err(IndexError::Damaged("it is too short"));
        };
        let mut trailer = [0; TRAILER_BYTES];
        file.read_at(&mut trailer, trailer_at)?;
        let trailer = Trailer::decode(&trailer)?;
        let (at, len) = trailer.middle();
        let waypoints_at = at.saturating_add(len);
        if waypoints_at.checked_add(trailer.waypoints_len()) != Some(trailer_at) {
            return Err(IndexError::Damaged("it has another length"));
        }
        let mut middle = vec![0; len as usize];
        file.read_at(&mut middle, at)?;
        let (footer, fence) = trailer.decode_middle(&middle)?;
        Ok(Self { file, footer, fence, trailer, waypoints_at })
    }

    /// Opens the index of exactly this segment.
    pub fn open_of(file: F, of: &SegmentFacts) -> Result<Self, IndexError> {
        let index = Self::open(file)?;
        if index.footer.of != *of {
            return Err(IndexError::Damaged(
                "it is of another segment, or of another length of it",
            ));
        }
        Ok(index)
    }

    /// What it says of the segment as a whole.
    #[must_use]
    pub fn footer(&self) -> &Footer {
        &self.footer
    }

    /// Where within the segment a replay may begin, in order.
    pub fn waypoints(&self) -> Result<Vec<Waypoint>, IndexError> {
        let mut bytes = vec![0; self.trailer.waypoints_len() as usize];
        self.file.read_at(&mut bytes, self.waypoints_at)?;
        self.trailer.decode_waypoints(&bytes)
    }

    /// The entries whose extents begin within a range of (writer, disk, offset), in order.
    pub fn entries(
        &self,
        range: impl RangeBounds<(WriterId, DiskId, u64)>,
    ) -> impl Iterator<Item = Result<IndexEntry, IndexError>> {
        let key = |bound: Bound<&Key>| match bound {
            Bound::Included(key) | Bound::Excluded(key) => Some(*key),
            Bound::Unbounded => None,
        };
        // Entries of one place may begin in the block before the first that the fence names so.
        let first = key(range.start_bound())
            .map_or(0, |key| self.fence.partition_point(|fence| *fence < key).saturating_sub(1));
        let end = key(range.end_bound())
            .map_or(self.fence.len(), |key| self.fence.partition_point(|fence| *fence <= key));
        let mut failed = false;
        let blocks = (first..end).map_while(move |block| {
            if failed {
                return None;
            }
            let read = self.block(block);
            failed = read.is_err();
            Some(read)
        });
        blocks
            .flat_map(|block| match block {
                Ok(entries) => entries.into_iter().map(Ok).collect(),
                Err(error) => vec![Err(error)],
            })
            .filter(move |entry| entry.as_ref().map_or(true, |e| range.contains(&e.key())))
    }

    fn block(&self, block: usize) -> Result<Vec<IndexEntry>, IndexError> {
        let mut bytes = [0; BLOCK_BYTES];
        self.file.read_at(&mut bytes, block as u64 * BLOCK_BYTES as u64)?;
        let entries = decode_block(&bytes, self.footer.of.id, self.footer.of.len_bytes)?;
        let first = entries.first().map(IndexEntry::key);
        if first != Some(self.fence[block]) || !entries.is_sorted() {
            return Err(IndexError::Damaged("a block is not where it belongs"));
        }
        Ok(entries)
    }
}
