//! Digests of disks: of each block of 1 MiB, and of the whole disk by those.
//!
//! The digest of a disk is the BLAKE3 of the BLAKE3s of its blocks, one after the other; the last block may be
//! shorter. So what was written is checked and told block by block, a change costs the blocks that it touches, and what
//! is zeroes need not be read. An empty place in a table stands for a block that is not known.

use crate::travel::disk::Disk;
use std::io::{self, IoSlice};
use std::ops::Range;
use tidelock_storage::StorageFile;
use tidelock_store::view::Content;

/// What one digest is of.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Of a block.
pub type Digest = [u8; 32];
/// Of a block that is not known.
pub const UNKNOWN: Digest = [0; 32];
const DIGEST_BYTES: u64 = 32;
/// Digests that are read or written at once.
const RUN: u64 = 1 << 15;

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

    /// So many more with the same digest.
    pub fn add_many(&mut self, block: &Digest, count: u64) {
        let run = block.repeat(RUN.min(count) as usize);
        let mut left = count;
        while left > 0 {
            let some = left.min(RUN);
            self.0.update(&run[..(some * DIGEST_BYTES) as usize]);
            left -= some;
        }
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

/// How many whole blocks from this one on are nothing but zeroes, as far as is known without reading them.
pub fn zero_blocks(disk: &(impl Disk + ?Sized), block: u64) -> io::Result<u64> {
    let size_bytes = disk.size_bytes();
    let (start, whole_end) = (block * BLOCK_BYTES, size_bytes / BLOCK_BYTES * BLOCK_BYTES);
    let mut at = start;
    // What is beyond the window is described next time: a description of all may be long.
    while at < whole_end {
        let end = whole_end.min(at + WINDOW_BYTES);
        disk.describe(at..end, &mut |len, content| {
            let is_zero = content == Content::Zero;
            at += if is_zero { len } else { 0 };
            is_zero
        })?;
        if at < end {
            break;
        }
    }
    Ok((at.max(start) - start) / BLOCK_BYTES)
}

/// So much is described at once.
const WINDOW_BYTES: u64 = 1 << 36;

/// Of a block of zeroes.
#[must_use]
pub fn of_zeroes() -> Digest {
    of_block(&vec![0; BLOCK_BYTES as usize])
}

/// Of a disk, which is read. `go_on` is told what was done, and ends it with an error.
pub fn of_disk(
    disk: &dyn Disk,
    mut go_on: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<Digest> {
    let size_bytes = disk.size_bytes();
    let zeroes = of_zeroes();
    let (mut whole, mut buf) = (Whole::default(), vec![0; BLOCK_BYTES as usize]);
    let mut block = 0;
    while block < blocks(size_bytes) {
        let skipped = zero_blocks(disk, block)?;
        if skipped > 0 {
            whole.add_many(&zeroes, skipped);
            go_on(skipped * BLOCK_BYTES)?;
            block += skipped;
            continue;
        }
        let range = range(block, size_bytes);
        let len = range.end - range.start;
        let buf = &mut buf[..len as usize];
        match read_block(disk, range, buf)? {
            0 if len == BLOCK_BYTES => whole.add(&zeroes),
            _ => whole.add(&of_block(buf)),
        }
        go_on(len)?;
        block += 1;
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

    /// Sets those of so many blocks from one on, all to the same.
    pub fn fill(&self, block: u64, count: u64, digest: &Digest) -> io::Result<()> {
        let run = digest.repeat(RUN.min(count) as usize);
        let mut done = 0;
        while done < count {
            let some = (count - done).min(RUN);
            let part = &run[..(some * DIGEST_BYTES) as usize];
            self.file.write_at(&[IoSlice::new(part)], (block + done) * DIGEST_BYTES)?;
            done += some;
        }
        Ok(())
    }

    /// Shows the digests in order, some at a time.
    fn each(&self, mut f: impl FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut buf = vec![0; (self.blocks.min(RUN) * DIGEST_BYTES) as usize];
        let mut block = 0;
        while block < self.blocks {
            let some = (self.blocks - block).min(RUN);
            let part = &mut buf[..(some * DIGEST_BYTES) as usize];
            self.file.read_at(part, block * DIGEST_BYTES)?;
            f(block, part)?;
            block += some;
        }
        Ok(())
    }

    /// Takes all from another table of a disk of this size.
    pub fn copy(&self, from: &Self) -> io::Result<()> {
        from.each(|block, digests| {
            self.file.write_at(&[IoSlice::new(digests)], block * DIGEST_BYTES)
        })
    }

    /// Of the disk.
    pub fn whole(&self) -> io::Result<Digest> {
        let mut whole = Whole::default();
        self.each(|_, digests| {
            whole.0.update(digests);
            Ok(())
        })?;
        Ok(whole.end())
    }

    /// Makes it durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
}
