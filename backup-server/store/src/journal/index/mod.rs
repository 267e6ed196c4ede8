//! The index of a sealed segment: what each of its records changes, in the order of the disks.
//!
//! What it is for: opening a journal, and showing a point of the past, without reading the data
//! (Retroscope 3.2: a look-up in the window-log must not be a walk through it). It lies in a file
//! of its own beside the segment, because it can be made again from the segment: a journal without
//! indexes is whole, so writing one is never waited for, and a damaged one costs time and no data.
//!
//! Invariants:
//! - An index is believed only if its checksums are right and it names the segment's index, id and
//!   length and the end of its chain of batches, as the next segment's header does. Else it is
//!   made again from the segment.
//! - It has every record of the segment that changes a disk, all versions of an extent and void
//!   ones: what of them counts depends on what comes later.
//! - It is written aside, made durable and then renamed, after the segment itself was durable.
//!
//! Source: the sorted run of a log-structured merge tree, with a fence in place of a search tree.

mod build;
mod file;
mod format;
#[cfg(test)]
mod tests;
mod waypoint;

pub(super) use build::Builder;
pub use build::Sealed;
pub use file::{IndexError, SegmentIndex};
pub use format::{
    BLOCK_BYTES, ENTRIES_PER_BLOCK, Footer, INDEX_VERSION, IndexEntry, SegmentFacts, WriterRun,
    index_file_name, parse_index_file_name,
};
pub(super) use waypoint::WAYPOINTS_PER_SEGMENT;
pub use waypoint::Waypoint;

/// Reads a whole index with this content, which is hostile: for fuzzing. Returns its entries.
#[cfg(any(test, feature = "memory-storage"))]
pub fn index_from_bytes(content: &[u8]) -> Result<Vec<IndexEntry>, IndexError> {
    use tidelock_storage::{Storage, StorageFile, memory::Memory};
    let file = Memory::new().create("index")?;
    file.write_at(&[std::io::IoSlice::new(content)], 0)?;
    let index = SegmentIndex::open(file)?;
    index.waypoints()?;
    index.entries(..).collect()
}
