//! Reading a cold segment. Nothing of its table is kept in memory: an entry is read with its block.

use super::cache::BlockCache;
use super::format::{
    DESCRIPTION_BYTES, Description, ENTRY_BYTES, Entry, SKIPPABLE_BYTES, frame_crc,
};
use crate::damage::DamagedData;
use crate::journal::SegmentFacts;
use std::io;
use std::sync::Arc;
use thiserror::Error;
use tidelock_storage::StorageFile;

/// Why a cold segment cannot be read.
#[derive(Debug, Error)]
pub enum ColdError {
    /// Something in it is not what was written.
    #[error("the compressed segment is damaged: {0}")]
    Damaged(&'static str),
    /// It was written by another version.
    #[error(
        "the compressed segment has version {0}, which this program does not know: use a newer one"
    )]
    Version(u32),
    /// A block is not what was written.
    #[error("block {block} of the compressed segment is damaged: bytes {from} to {to}")]
    Block {
        /// Which.
        block: u32,
        /// The first byte of the segment that it has.
        from: u64,
        /// The byte behind the last.
        to: u64,
    },
    /// It cannot be read.
    #[error("the compressed segment cannot be read: {0}")]
    Io(#[from] io::Error),
}

impl From<ColdError> for io::Error {
    fn from(error: ColdError) -> Self {
        match error {
            ColdError::Io(source) => source,
            error => io::Error::new(io::ErrorKind::InvalidData, DamagedData(error.to_string())),
        }
    }
}

/// A cold segment that was opened.
#[derive(Clone, Debug)]
pub struct ColdFile<F> {
    file: F,
    is: Description,
    cache: Arc<BlockCache>,
}

impl<F: StorageFile> ColdFile<F> {
    /// Reads its description, from the front or, if that is damaged, from the back.
    pub(in crate::journal) fn open(file: F, cache: Arc<BlockCache>) -> Result<Self, ColdError> {
        let size = file.size_bytes()?;
        let Some(at_back) = size.checked_sub(DESCRIPTION_BYTES as u64) else {
            return Err(ColdError::Damaged("its length"));
        };
        let read = |at: u64| {
            let mut bytes = [0; DESCRIPTION_BYTES];
            file.read_at(&mut bytes, at)?;
            Description::decode(&bytes, size)
        };
        let front = read(SKIPPABLE_BYTES as u64);
        let is = front.or_else(|error| read(at_back).map_err(|_| error))?;
        Ok(Self { file, is, cache })
    }

    /// Which segment it is, and how that ends.
    #[must_use]
    pub fn facts(&self) -> &SegmentFacts {
        &self.is.of
    }

    /// Bytes that it takes on disk.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.is.file_bytes
    }

    /// Its blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.is.blocks()
    }

    /// Whatever of it was kept in memory is read again.
    pub(super) fn forget_cached(&self) {
        self.cache.forget(self.is.of.id);
    }

    /// A block of the segment.
    pub(super) fn block(&self, block: u32) -> Result<Arc<[u8]>, ColdError> {
        let key = (self.is.of.id, block);
        if let Some(cached) = self.cache.get(key) {
            return Ok(cached);
        }
        let read: Arc<[u8]> = self.read_block(block)?.into();
        self.cache.put(key, &read);
        Ok(read)
    }

    fn read_block(&self, block: u32) -> Result<Vec<u8>, ColdError> {
        let [front, back] = self.is.entries_at(block);
        let found = self.frame(block, front).or_else(|| self.frame(block, back));
        found.ok_or_else(|| {
            let from = u64::from(block) * u64::from(self.is.block_bytes);
            ColdError::Block { block, from, to: from + self.is.block_len(block) as u64 }
        })
    }

    /// A block by the entry that is there. `None`: entry or frame is not what was written, or cannot be
    /// read.
    fn frame(&self, block: u32, entry_at: u64) -> Option<Vec<u8>> {
        let mut bytes = [0; ENTRY_BYTES];
        self.file.read_at(&mut bytes, entry_at).ok()?;
        let entry = Entry::decode(bytes);
        let (frames, len) = (self.is.frames(), self.is.block_len(block));
        let end = entry.at.checked_add(u64::from(entry.len_bytes))?;
        let fits = entry.at >= frames.start
            && end <= frames.end
            && entry.len_bytes as usize <= zstd::zstd_safe::compress_bound(len);
        if !fits {
            return None;
        }
        let mut frame = vec![0; entry.len_bytes as usize];
        self.file.read_at(&mut frame, entry.at).ok()?;
        if frame_crc(self.is.of.id, block, &frame) != entry.crc {
            return None;
        }
        let content = self.cache.decompress(&frame, len).ok()?;
        (content.len() == len).then_some(content)
    }

    /// Fills the buffer with bytes of the segment.
    pub(super) fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > self.is.of.len_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let block_bytes = u64::from(self.is.block_bytes);
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            let block = self.block((at / block_bytes) as u32)?;
            let from = (at % block_bytes) as usize;
            let len = rest.len().min(block.len() - from);
            let (part, behind) = rest.split_at_mut(len);
            part.copy_from_slice(&block[from..from + len]);
            at += len as u64;
            rest = behind;
        }
        Ok(())
    }
}
