//! Compressing a segment, for a thread that nobody waits for.
//!
//! The segment is verified; then its blocks are written to a file aside, which is synced, read back,
//! compared and gets its name; then the directory is synced. The segment's own file goes after that,
//! by the journal's owner: so whoever opens the journal meanwhile finds a whole segment.

use super::cache::BlockCache;
use super::file::ColdFile;
use super::format::{Description, Entry, cold_file_name, frame_crc};
use super::segment_file::SegmentFile;
use crate::damage::SegmentDamage;
use crate::journal::examine::{Listed, examine};
use crate::journal::{JournalError, Segment, SegmentFacts};
use std::io::{self, IoSlice};
use std::sync::Arc;
use tidelock_planted::Bug;
use tidelock_storage::{Storage, StorageFile};
use zstd::bulk::Compressor;
use zstd::zstd_safe::CParameter;

/// zstd's own default: less costs little less here, more costs much more.
const LEVEL: i32 = 3;
/// One block of so many is tried before all are written.
const SAMPLE_OF: u32 = 16;
/// Frames are written so many bytes at once.
const WRITE_BYTES: usize = 1 << 20;

/// What becomes cold, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// A segment whose newest record is older than this, in milliseconds.
    pub after_ms: u64,
    /// Bytes of a block: a power of two, 512 to 1 MiB.
    pub block_bytes: u32,
    /// If it is larger than so many percent of the segment it is not worth it.
    pub percent_max: u64,
}

impl Default for Compress {
    fn default() -> Self {
        Self { after_ms: 3_600_000, block_bytes: 64 << 10, percent_max: 90 }
    }
}

/// Compresses one sealed segment.
#[derive(Debug)]
pub struct CompressJob<S: Storage> {
    pub(in crate::journal) storage: S,
    pub(in crate::journal) dir: String,
    pub(in crate::journal) segment: Segment<S::File>,
    pub(in crate::journal) of: SegmentFacts,
    pub(in crate::journal) listed: Listed<S::File>,
    pub(in crate::journal) how: Compress,
    pub(in crate::journal) cache: Arc<BlockCache>,
}

/// What came of it.
#[derive(Debug)]
pub enum Compressed<F> {
    /// It is durable under its name, beside the segment's own file.
    Cold(SegmentFile<F>),
    /// It would not be smaller by enough.
    NotSmaller,
    /// The segment is not what was written.
    Damaged(SegmentDamage),
}

impl<S: Storage> CompressJob<S> {
    /// Which segment.
    #[must_use]
    pub fn segment(&self) -> u64 {
        self.of.index
    }

    /// Bytes of the segment.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.of.len_bytes
    }

    /// Does it.
    pub fn run(self) -> Result<Compressed<S::File>, JournalError> {
        let failed = |source: io::Error| match tidelock_storage::is_full(&source) {
            true => JournalError::Full(source),
            false => JournalError::Io { what: "compress a journal segment", source },
        };
        if !self.is_promising().map_err(failed)? {
            return Ok(Compressed::NotSmaller);
        }
        if let Some(damage) = examine(&self.segment, &self.listed) {
            return Ok(Compressed::Damaged(damage));
        }
        let name = cold_file_name(self.of.index, self.of.id);
        let path = tidelock_storage::join(&self.dir, &name);
        let aside = format!("{path}.new");
        let written = self.write(&aside).and_then(|written| {
            if let Some(file) = &written {
                self.compare(file.clone())?;
                self.storage.rename(&aside, &path)?;
                self.storage.sync_dir(&self.dir)?;
            }
            Ok(written)
        });
        if !matches!(written, Ok(Some(_))) {
            // It takes room that others may need. If it cannot be removed now, opening does.
            let _ = self.storage.remove(&aside);
        }
        let Some(file) = written.map_err(failed)? else { return Ok(Compressed::NotSmaller) };
        let opened = ColdFile::open(file, Arc::clone(&self.cache));
        let cold = opened.map_err(|error| failed(error.into()))?;
        Ok(Compressed::Cold(SegmentFile::Cold(Arc::new(cold))))
    }

    fn is(&self, file_bytes: u64) -> Description {
        Description { of: self.of, block_bytes: self.how.block_bytes, file_bytes }
    }

    fn plain(&self, block: u32) -> io::Result<Vec<u8>> {
        let is = self.is(0);
        let mut content = vec![0; is.block_len(block)];
        self.segment.file.read_at(&mut content, u64::from(block) * u64::from(is.block_bytes))?;
        Ok(content)
    }

    fn is_small(&self, bytes: u64, of_bytes: u64) -> bool {
        u128::from(bytes) * 100 <= u128::from(of_bytes) * u128::from(self.how.percent_max)
    }

    /// Tries some blocks, because data that was compressed or encrypted before is not worth more.
    fn is_promising(&self) -> io::Result<bool> {
        let blocks = self.is(0).blocks();
        if blocks < 2 * SAMPLE_OF {
            return Ok(true);
        }
        let mut compressor = compressor()?;
        let (mut before, mut after) = (0, 0);
        for block in (0..blocks).step_by(SAMPLE_OF as usize) {
            let plain = self.plain(block)?;
            before += plain.len() as u64;
            after += compressor.compress(&plain)?.len() as u64;
        }
        Ok(self.is_small(after, before))
    }

    /// Writes the file aside. `None`: it would be too large.
    fn write(&self, path: &str) -> io::Result<Option<S::File>> {
        match self.storage.remove(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let file = self.storage.create(path)?;
        let blocks = self.is(0).blocks();
        let part = Description::part_bytes(blocks);
        let (mut at, mut table) = (part, Vec::with_capacity(blocks as usize));
        let mut compressor = compressor()?;
        let mut waiting = Vec::with_capacity(WRITE_BYTES);
        for block in 0..blocks {
            let frame = compressor.compress(&self.plain(block)?)?;
            let (crc, len_bytes) = (frame_crc(self.of.id, block, &frame), frame.len() as u32);
            table.push(Entry { at: at + waiting.len() as u64, len_bytes, crc });
            waiting.extend_from_slice(&frame);
            if waiting.len() >= WRITE_BYTES || block + 1 == blocks {
                if !self.is_small(at + waiting.len() as u64 + part, self.of.len_bytes) {
                    return Ok(None);
                }
                file.write_at(&[IoSlice::new(&waiting)], at)?;
                at += waiting.len() as u64;
                waiting.clear();
            }
        }
        let (front, back) = self.is(at + part).front_and_back(&table);
        file.write_at(&[IoSlice::new(&back)], at)?;
        file.write_at(&[IoSlice::new(&front)], 0)?;
        if !tidelock_planted::is(Bug::ColdNotSynced) {
            file.sync()?;
        }
        Ok(Some(file))
    }

    /// Reads all of it back.
    fn compare(&self, file: S::File) -> io::Result<()> {
        let cold = ColdFile::open(file, Arc::default())?;
        for block in 0..cold.blocks() {
            if cold.block(block)?[..] != self.plain(block)?[..] {
                return Err(io::Error::other("what was compressed reads as something else"));
            }
        }
        Ok(())
    }
}

fn compressor() -> io::Result<Compressor<'static>> {
    let mut compressor = Compressor::new(LEVEL)?;
    // So that `zstd -t` can tell, too.
    compressor.set_parameter(CParameter::ChecksumFlag(true))?;
    Ok(compressor)
}

/// Work on a segment that is not part of a journal.
#[cfg(test)]
pub(super) fn job_of<S: Storage>(
    storage: &S,
    segment: &Segment<S::File>,
    of: SegmentFacts,
    how: Compress,
) -> CompressJob<S> {
    CompressJob {
        storage: storage.clone(),
        dir: String::new(),
        segment: segment.clone(),
        of,
        listed: Listed::None,
        how,
        cache: Arc::default(),
    }
}

/// What it writes, whatever the segment has.
#[cfg(test)]
pub(super) fn frames_of<S: Storage>(
    storage: &S,
    segment: &Segment<S::File>,
    of: SegmentFacts,
    how: Compress,
) -> io::Result<Option<S::File>> {
    job_of(storage, segment, of, how).write("aside")
}
