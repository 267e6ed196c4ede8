//! Cold segments: those that have not been written for a while, compressed.
//!
//! What it is for: the past takes less room, so that the window is longer on the same disk. A cold
//! segment's file ends in `.seg.zst`; it has the segment's bytes in blocks, each of them a zstd frame
//! of its own, and where each begins. So all positions stay those of the segment: indexes, maps,
//! readers and verification do not know of it ([`SegmentFile`] is either).
//!
//! Invariants:
//! - A block that is handed out is what was compressed: its frame has a checksum that binds it to
//!   the segment and to its place. What is not so is an error of that read.
//! - The compressed file is read back, compared and durable before the segment's own file goes. While
//!   both are there the segment's own is the one that counts, unless it is too short.
//! - Only sealed segments become cold, and a segment that is found to be damaged does not.
//!
//! Source: random access in compressed logs by blocks, as in zstd's seekable format and in sorted
//! tables of log-structured merge trees; LevelDB, "table format".

mod cache;
mod file;
mod format;
mod job;
mod segment_file;
#[cfg(test)]
mod tests;

pub(crate) use cache::BlockCache;
pub use file::{ColdError, ColdFile};
pub use format::{COLD_VERSION, cold_file_name, parse_cold_file_name};
pub use job::{Compress, CompressJob, Compressed};
pub use segment_file::SegmentFile;
pub(crate) use segment_file::find_segment_file;

/// Reads all of a cold segment with this content, which is hostile: for fuzzing. Blocks that are
/// damaged are left out.
#[cfg(any(test, feature = "memory-storage"))]
pub fn cold_from_bytes(content: &[u8]) -> Result<Vec<Vec<u8>>, ColdError> {
    use tidelock_storage::{Storage, StorageFile, memory::Memory};
    let file = Memory::new().create("cold")?;
    file.write_at(&[std::io::IoSlice::new(content)], 0)?;
    let cold = ColdFile::open(file, std::sync::Arc::default())?;
    Ok((0..cold.blocks()).filter_map(|block| Some(cold.block(block).ok()?.to_vec())).collect())
}
