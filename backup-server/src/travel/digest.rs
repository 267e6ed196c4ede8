//! Digests of disks: of each block of 1 MiB, and of the whole disk by those.
//!
//! The digest of a disk is the BLAKE3 of the BLAKE3s of its blocks, one after the other; the last block may be
//! shorter. So what was written is checked and told block by block, a change costs the blocks that it touches, and what
//! is zeroes need not be read. An empty place in a table stands for a block that is not known.

use crate::storage::StorageFile;
use crate::travel::disk::Disk;
use crate::view::Content;
use std::io::{self, IoSlice};
use std::ops::Range;

/// What one digest is of.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Of a block.
pub type Digest = [u8; 32];
/// Of a block that is not known.
pub const UNKNOWN: Digest = [0; 32];
const DIGEST_BYTES: u64 = 32;

/// Of a block's content.
#[must_use]
pub fn of_block(content: &[u8]) -> Digest {
    *blake3::hash(content).as_bytes()
}

/// How many blocks a disk has.
#[must_use]
pub fn blocks(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES)
}

/// Where a block is.
#[must_use]
pub fn range(block: u64, size_bytes: u64) -> Range<u64> {
    block * BLOCK_BYTES..((block + 1) * BLOCK_BYTES).min(size_bytes)
}

/// As it is told.
#[must_use]
pub fn hex(digest: &Digest) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

/// Of a whole disk, from those of its blocks in order.
#[derive(Debug, Default)]
pub struct Whole(blake3::Hasher);

impl Whole {
    /// The next block's.
    pub fn add(&mut self, block: &Digest) {
        self.0.update(block);
    }

    /// The disk's.
    #[must_use]
    pub fn end(&self) -> Digest {
        *self.0.finalize().as_bytes()
    }
}

/// Fills the buffer with a block of a disk. What is zeroes there is not read. Returns how much was.
pub fn read_block(disk: &dyn Disk, range: Range<u64>, buf: &mut [u8]) -> io::Result<u64> {
    let mut pieces = Vec::new();
    let mut at = range.start;
    disk.describe(range.clone(), &mut |len, content| {
        pieces.push((at..at + len, content));
        at += len;
        true
    })?;
    let mut read = 0;
    for (piece, content) in pieces {
        let part = (piece.start - range.start) as usize..(piece.end - range.start) as usize;
        match content {
            Content::Zero => buf[part].fill(0),
            Content::Data => {
                disk.read(piece.start, &mut buf[part])?;
                read += piece.end - piece.start;
            }
        }
    }
    Ok(read)
}

/// Of a disk, which is read. `go_on` is told what was done, and ends it with an error.
pub fn of_disk(
    disk: &dyn Disk,
    mut go_on: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Digest> {
    let size_bytes = disk.size_bytes();
    let zeroes = of_block(&vec![0; BLOCK_BYTES as usize]);
    let (mut whole, mut buf) = (Whole::default(), vec![0; BLOCK_BYTES as usize]);
    for block in 0..blocks(size_bytes) {
        let range = range(block, size_bytes);
        let len = range.end - range.start;
        let buf = &mut buf[..len as usize];
        match read_block(disk, range, buf)? {
            0 if len == BLOCK_BYTES => whole.add(&zeroes),
            _ => whole.add(&of_block(buf)),
        }
        go_on(len)?;
    }
    Ok(whole.end())
}

/// The digests of a disk's blocks, in a file: 32 bytes each.
#[derive(Clone, Debug)]
pub struct Table<F> {
    file: F,
    blocks: u64,
}

impl<F: StorageFile> Table<F> {
    /// Of a disk of this size, in a file that may be new.
    pub fn open(file: F, size_bytes: u64) -> io::Result<Self> {
        let blocks = blocks(size_bytes);
        if file.size_bytes()? != blocks * DIGEST_BYTES {
            file.set_size(blocks * DIGEST_BYTES)?;
        }
        Ok(Self { file, blocks })
    }

    /// Of a block; [`UNKNOWN`].
    pub fn get(&self, block: u64) -> io::Result<Digest> {
        let mut digest = UNKNOWN;
        self.file.read_at(&mut digest, block * DIGEST_BYTES)?;
        Ok(digest)
    }

    /// Sets that of a block.
    pub fn set(&self, block: u64, digest: &Digest) -> io::Result<()> {
        self.file.write_at(&[IoSlice::new(digest)], block * DIGEST_BYTES)
    }

    /// Takes all from another table of a disk of this size.
    pub fn copy(&self, from: &Self) -> io::Result<()> {
        for block in 0..self.blocks {
            self.set(block, &from.get(block)?)?;
        }
        Ok(())
    }

    /// Of the disk.
    pub fn whole(&self) -> io::Result<Digest> {
        let mut whole = Whole::default();
        for block in 0..self.blocks {
            whole.add(&self.get(block)?);
        }
        Ok(whole.end())
    }

    /// Makes it durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}
