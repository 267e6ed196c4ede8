//! Maps: of one segment, or of a run of segments, for each disk the newest extents, without
//! overlaps and in order.
//!
//! What they are for: a view finds where a block is by looking at a few files, however long the
//! journal is (Retroscope 3.2: a look-up in the window-log must not be a walk through it). The maps of
//! [`FANOUT`] neighbours are merged into one of the next level, so that a look-up looks at no more than
//! [`FANOUT`] - 1 maps of each level.
//!
//! ```text
//!  segments   1 2 3 4 5 6 7 8 9 ...
//!  level 0    ─ ─ ─ ─ ─ ─ ─ ─ ─
//!  level 1    ─────────────── ─────...
//! ```
//!
//! Invariants:
//! - A map has exactly the effect of those records of its segments that counted when it was made;
//!   its runs say which. Records can stop counting, by a recovery to an earlier point: then the map
//!   is made again. They never begin to count.
//! - It is used for a writer only if all of that writer's runs in it are within what is asked for;
//!   else those of the level below are, or the index of the segment.
//! - It is written aside, made durable and then renamed. Its name may be lost with the power; all of it
//!   can be made again: a journal without maps is whole.
//!
//! Source: levels of sorted runs, as in a log-structured merge tree.

mod build;
mod file;
mod format;
mod set;
#[cfg(test)]
mod tests;

pub(super) use build::{flatten, write_flat, write_merged};
pub use file::MapFile;
pub use format::{
    MAP_VERSION, MapEntry, MapError, MapFacts, MapRun, map_file_name, parse_map_file_name,
};
pub(super) use set::Due;
pub use set::Maps;

/// Maps that are merged into one.
pub const FANOUT: u64 = 8;

/// Reads a whole map with this content, which is hostile: for fuzzing. Returns its entries.
#[cfg(any(test, feature = "memory-storage"))]
pub fn map_from_bytes(content: &[u8]) -> Result<Vec<MapEntry>, MapError> {
    use tidelock_storage::{Storage, StorageFile, memory::Memory};
    let file = Memory::new().create("map")?;
    file.write_at(&[std::io::IoSlice::new(content)], 0)?;
    let map = MapFile::open(file)?;
    if let Some(first) = map.entries().next().transpose()? {
        map.overlapping(first.key, 0..u64::MAX, |_| {})?;
    }
    map.entries().collect()
}
