//! A disk's file without content, for tests of loops and taps.

use super::driver::DiskFile;
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tidelock_buffers::Extent;

const ALIGN_BYTES: u64 = 512;

/// A file without content.
#[derive(Debug, Default)]
pub struct NoFile {
    pub(super) cannot_sync: AtomicBool,
    pub(super) has_no_mark: AtomicBool,
    pub(super) cannot_punch_hole: AtomicBool,
    pub(super) cannot_zero_range: AtomicBool,
    /// Pieces of its storage that a look finds, from its first byte on.
    pub(super) pieces: Mutex<Vec<Extent>>,
}

pub(super) fn failing(is_so: &AtomicBool) -> io::Result<()> {
    match is_so.load(Relaxed) {
        true => Err(io::ErrorKind::Other.into()),
        false => Ok(()),
    }
}

impl DiskFile for NoFile {
    fn align_bytes(&self) -> u64 {
        ALIGN_BYTES
    }

    fn allows(&self, data: &[u8], at: u64) -> bool {
        at.is_multiple_of(ALIGN_BYTES) && data.len().is_multiple_of(ALIGN_BYTES as usize)
    }

    fn can_punch_hole(&self) -> bool {
        !self.cannot_punch_hole.load(Relaxed)
    }

    fn can_zero_range(&self) -> bool {
        !self.cannot_zero_range.load(Relaxed)
    }

    /// Two pieces at a time.
    fn extents(&self, range: Range<u64>, _: usize) -> io::Result<Vec<Extent>> {
        let pieces = self.pieces.lock().unwrap();
        let from = pieces.iter().filter(|piece| range.contains(&piece.offset));
        Ok(from.take(2).copied().collect())
    }

    fn mark(&self) -> io::Result<String> {
        failing(&self.has_no_mark).map(|()| "no file".to_owned())
    }

    fn sync(&self) -> io::Result<()> {
        failing(&self.cannot_sync)
    }
}
