//! A disk that is written to without changing what is below it: copy-on-write over a view of the past.
//!
//! Changed blocks are at their own offsets in a sparse file, and a map says of each block whether it is the
//! lower disk's, the file's, or zeroes. The file is nobody's name any more when the view is handed out, so it is
//! gone with the view, also after a kill.
//!
//! Invariants: the lower disk is only read (rule 7: a drill changes nothing on the replica). A block is the
//! file's only when its content is there. Blocks of the file, of all disks of a view together, are never more than the
//! quota: at it, a write is refused as by a full disk, and nothing of it is written. What was flushed is on
//! stable storage; after a flush that failed, none succeeds any more.
//!
//! Memory: 2 bits for each block of 4 KiB, for the parts of the disk that were written to: 64 MiB for each TiB,
//! if writes are everywhere.

use crate::travel::disk::Disk;
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use tidelock_storage::StorageFile;
use tidelock_store::view::Content;

/// What is copied up and counted.
pub const BLOCK_BYTES: u64 = 4096;
/// Blocks that one piece of the map stands for: 16 MiB of the disk.
const PIECE_BLOCKS: u64 = 4096;

/// How much of the file system the disks of a view may take together.
#[derive(Debug)]
pub struct Quota {
    max_blocks: u64,
    used_blocks: AtomicU64,
}

impl Quota {
    /// So many bytes, rounded up to whole blocks.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        Self { max_blocks: max_bytes.div_ceil(BLOCK_BYTES), used_blocks: AtomicU64::new(0) }
    }

    /// The limit.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_blocks.saturating_mul(BLOCK_BYTES)
    }

    /// What is taken.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_blocks.load(Ordering::Relaxed) * BLOCK_BYTES
    }

    fn take(&self, blocks: u64) -> io::Result<()> {
        let fits = |used: u64| used.checked_add(blocks).filter(|sum| *sum <= self.max_blocks);
        let taken = self.used_blocks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        // The number, because that is what becomes the NBD client's error.
        const ENOSPC: i32 = 28;
        taken.map(drop).map_err(|_| io::Error::from_raw_os_error(ENOSPC))
    }

    fn give_back(&self, blocks: u64) {
        self.used_blocks.fetch_sub(blocks, Ordering::Relaxed);
    }
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Lower,
    File,
    Zero,
}

/// The places of all blocks, two bits each; pieces that are all the lower disk's are not there.
#[derive(Debug, Default)]
struct Map {
    pieces: BTreeMap<u64, Box<[u64; (PIECE_BLOCKS / 32) as usize]>>,
}

impl Map {
    fn get(&self, block: u64) -> Place {
        let Some(piece) = self.pieces.get(&(block / PIECE_BLOCKS)) else { return Place::Lower };
        let at = block % PIECE_BLOCKS;
        match piece[(at / 32) as usize] >> (at % 32 * 2) & 3 {
            0 => Place::Lower,
            1 => Place::File,
            _ => Place::Zero,
        }
    }

    fn set(&mut self, blocks: Range<u64>, place: Place) {
        let bits = match place {
            Place::Lower => 0,
            Place::File => 1,
            Place::Zero => 2,
        };
        for block in blocks {
            let piece = self.pieces.entry(block / PIECE_BLOCKS);
            let piece = piece.or_insert_with(|| Box::new([0; (PIECE_BLOCKS / 32) as usize]));
            let at = block % PIECE_BLOCKS;
            let word = &mut piece[(at / 32) as usize];
            *word = *word & !(3 << (at % 32 * 2)) | bits << (at % 32 * 2);
        }
    }

    /// Blocks of the range that are at this place.
    fn count(&self, blocks: Range<u64>, place: Place) -> u64 {
        blocks.filter(|block| self.get(*block) == place).count() as u64
    }

    /// The byte range in pieces of one place each, in order and without a hole.
    fn runs(&self, range: Range<u64>) -> Vec<(Range<u64>, Place)> {
        let mut runs: Vec<(Range<u64>, Place)> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = at / BLOCK_BYTES;
            let piece = block / PIECE_BLOCKS;
            let (place, end_block) = if self.pieces.contains_key(&piece) {
                (self.get(block), block + 1)
            } else {
                (Place::Lower, (piece + 1) * PIECE_BLOCKS)
            };
            let end = (end_block * BLOCK_BYTES).min(range.end);
            match runs.last_mut() {
                Some((run, last)) if *last == place => run.end = end,
                _ => runs.push((at..end, place)),
            }
            at = end;
        }
        runs
    }
}

/// A disk over another one.
#[derive(Debug)]
pub struct Scratch<D, F> {
    lower: D,
    file: F,
    quota: Arc<Quota>,
    map: RwLock<Map>,
    /// One change at a time: two parts of one block must not be copied up at once.
    changing: Mutex<()>,
    is_poisoned: AtomicBool,
}

impl<D: Disk, F: StorageFile> Scratch<D, F> {
    /// Over this disk, with an empty file that is nobody else's.
    pub fn new(lower: D, file: F, quota: Arc<Quota>) -> io::Result<Self> {
        file.set_size(lower.size_bytes().next_multiple_of(BLOCK_BYTES))?;
        let map = RwLock::default();
        Ok(Self {
            lower,
            file,
            quota,
            map,
            changing: Mutex::default(),
            is_poisoned: AtomicBool::new(false),
        })
    }

    /// Writes the data there.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let range = offset..offset + data.len() as u64;
        self.change(range, |file| file.write_at(&[IoSlice::new(data)], offset))
    }

    /// The range reads as zeroes; its blocks stay allocated, and counted, if so asked.
    pub fn zero(&self, offset: u64, len_bytes: u64, no_hole: bool) -> io::Result<()> {
        let range = offset..offset + len_bytes;
        self.check(&range)?;
        if no_hole {
            return self.change(range, |file| file.zero_at(offset, len_bytes, true));
        }
        let whole = offset.div_ceil(BLOCK_BYTES)..self.end_of(&range) / BLOCK_BYTES;
        if whole.is_empty() {
            return self.zero_part(range);
        }
        self.zero_part(range.start..whole.start * BLOCK_BYTES)?;
        self.zero_whole(&whole)?;
        self.zero_part((whole.end * BLOCK_BYTES).min(range.end)..range.end)
    }

    /// Makes everything written durable.
    pub fn flush(&self) -> io::Result<()> {
        if self.is_poisoned.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier flush of this view failed: open it anew"));
        }
        self.file.sync().inspect_err(|_| self.is_poisoned.store(true, Ordering::Release))
    }

    /// What is below it.
    #[must_use]
    pub fn lower(&self) -> &D {
        &self.lower
    }

    /// What its disks take, and may take.
    #[must_use]
    pub fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    fn check(&self, range: &Range<u64>) -> io::Result<()> {
        if range.end <= self.lower.size_bytes() {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "beyond the end of the disk"))
    }

    /// The range's end; the end of the disk counts as one of a block.
    fn end_of(&self, range: &Range<u64>) -> u64 {
        if range.end == self.lower.size_bytes() {
            range.end.next_multiple_of(BLOCK_BYTES)
        } else {
            range.end
        }
    }

    /// Changes the file in the range, of which all blocks are the file's afterwards.
    fn change(
        &self,
        range: Range<u64>,
        change: impl FnOnce(&F) -> io::Result<()>,
    ) -> io::Result<()> {
        self.check(&range)?;
        if range.is_empty() {
            return Ok(());
        }
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
        let (first, last) = (blocks.start, blocks.end - 1);
        let new = blocks.end - blocks.start - self.map().count(blocks.clone(), Place::File);
        self.quota.take(new)?;
        let changed = (|| {
            if range.start > first * BLOCK_BYTES {
                self.copy_up(first)?;
            }
            let ends_inside = self.end_of(&range) < blocks.end * BLOCK_BYTES;
            if ends_inside && (last > first || range.start == first * BLOCK_BYTES) {
                self.copy_up(last)?;
            }
            change(&self.file)
        })();
        if changed.is_err() {
            // The map still says where these blocks are; what the file has of them is not looked at.
            self.quota.give_back(new);
            return changed;
        }
        self.map.write().unwrap_or_else(PoisonError::into_inner).set(blocks, Place::File);
        Ok(())
    }

    /// The block's content as it is goes to the file, which has it already if it is the file's.
    fn copy_up(&self, block: u64) -> io::Result<()> {
        let start = block * BLOCK_BYTES;
        let place = self.map().get(block);
        match place {
            Place::File => Ok(()),
            Place::Zero => self.file.zero_at(start, BLOCK_BYTES, true),
            Place::Lower => {
                let len = BLOCK_BYTES.min(self.lower.size_bytes() - start);
                let mut data = vec![0; len as usize];
                self.lower.read(start, &mut data)?;
                self.file.write_at(&[IoSlice::new(&data)], start)
            }
        }
    }

    /// Zeroes inside one block.
    fn zero_part(&self, range: Range<u64>) -> io::Result<()> {
        let is_zero = range.is_empty() || {
            let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
            self.map().count(blocks.clone(), Place::Zero) == blocks.end - blocks.start
        };
        if is_zero {
            return Ok(());
        }
        let len = range.end - range.start;
        self.change(range.clone(), |file| file.zero_at(range.start, len, true))
    }

    fn zero_whole(&self, blocks: &Range<u64>) -> io::Result<()> {
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let freed = self.map().count(blocks.clone(), Place::File);
        self.map.write().unwrap_or_else(PoisonError::into_inner).set(blocks.clone(), Place::Zero);
        if freed > 0 {
            let (at, len) = (blocks.start * BLOCK_BYTES, (blocks.end - blocks.start) * BLOCK_BYTES);
            self.file.zero_at(at, len, false)?;
            self.quota.give_back(freed);
        }
        Ok(())
    }

    fn map(&self) -> std::sync::RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Disk, F: StorageFile + Send + Sync> Disk for Scratch<D, F> {
    fn size_bytes(&self) -> u64 {
        self.lower.size_bytes()
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        self.check(&range)?;
        // What changes after the look is a change at the same time as this read: either content is right, and
        // the lower disk's never changes.
        let runs = self.map().runs(range);
        for (run, place) in runs {
            let part = &mut buf[(run.start - offset) as usize..(run.end - offset) as usize];
            match place {
                Place::Lower => self.lower.read(run.start, part)?,
                Place::File => self.file.read_at(part, run.start)?,
                Place::Zero => part.fill(0),
            }
        }
        Ok(())
    }

    fn describe(
        &self,
        range: Range<u64>,
        f: &mut dyn FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        let runs = self.map().runs(range);
        for (run, place) in runs {
            let mut goes_on = true;
            match place {
                Place::Lower => self.lower.describe(run, &mut |len, content| {
                    goes_on = f(len, content);
                    goes_on
                })?,
                Place::File => goes_on = f(run.end - run.start, Content::Data),
                Place::Zero => goes_on = f(run.end - run.start, Content::Zero),
            }
            if !goes_on {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
