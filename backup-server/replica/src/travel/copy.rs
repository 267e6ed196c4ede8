//! Copies of disks as they are at points: made, moved to another point, and made of several points in one pass.
//!
//! A copy goes block by block (1 MiB), and the digest of each goes to a table beside it. It may be ended at any time, by
//! a power loss too, and is done again: a block whose content has the digest that the table says is kept, and
//! what is not is made anew from the disk. So neither image nor table need be durable in any order, and a
//! difference that is applied twice is as good as once. Only [`Copier::sync`] after the last step makes it whole.
//!
//! Source: Retroscope 3 (full, incremental and rolling snapshots; several at once are derived from each other).

use super::digest::{self, BLOCK_BYTES, Table, UNKNOWN};
use super::disk::Disk;
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::ops::{Add, Range};
use tidelock_storage::StorageFile;

/// What a copy is written to.
pub trait Image: Debug {
    /// Fills the buffer from this offset on.
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes the data there.
    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()>;
    /// The range reads as zeroes, and takes no room if that can be.
    fn zero(&mut self, offset: u64, len_bytes: u64) -> io::Result<()>;
    /// Makes everything written durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl<I: Image + ?Sized> Image for Box<I> {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        (**self).read(offset, buf)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        (**self).write(offset, data)
    }

    fn zero(&mut self, offset: u64, len_bytes: u64) -> io::Result<()> {
        (**self).zero(offset, len_bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        (**self).sync()
    }
}

/// A raw image of the disk's size.
#[derive(Debug)]
pub struct Raw<F>(pub F);

impl<F: StorageFile> Image for Raw<F> {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(buf, offset)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(&[IoSlice::new(data)], offset)
    }

    fn zero(&mut self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.0.zero_at(offset, len_bytes, false)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync()
    }
}

/// What is to be done with an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// All of it is made. What is there already is kept if its digest is right.
    Fill {
        /// Nothing is there: what is zeroes need not be written.
        is_new: bool,
        /// Where it differs from the disk of the copy before it, in order; `None`: that is not known.
        unlike_previous: Option<Vec<Range<u64>>>,
    },
    /// It was whole, and these ranges, in order, are different now. What is not as the table says is made anew.
    Change(Vec<Range<u64>>),
    /// It was whole, and anything may be different now: all is compared.
    Compare,
}

/// A disk, and the image that is made of it.
#[derive(Debug)]
pub struct Copy<D, I, F> {
    /// As it is to be.
    pub disk: D,
    /// Where it goes.
    pub image: I,
    /// What is there.
    pub digests: Table<F>,
    /// Work that is to be done on it.
    pub plan: Plan,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Blocks that were kept or not touched.
    pub kept_blocks: u64,
    /// Bytes read from disks.
    pub read_bytes: u64,
    /// Bytes written to images, zeroes too.
    pub written_bytes: u64,
}

impl Add for Done {
    type Output = Done;

    fn add(self, other: Done) -> Done {
        Done {
            kept_blocks: self.kept_blocks + other.kept_blocks,
            read_bytes: self.read_bytes + other.read_bytes,
            written_bytes: self.written_bytes + other.written_bytes,
        }
    }
}

/// Makes copies of one disk at some points, all in one pass.
#[derive(Debug)]
pub struct Copier<D, I, F> {
    copies: Vec<Copy<D, I, F>>,
    size_bytes: u64,
    next: u64,
    done: Done,
}

impl<D: Disk, I: Image, F: StorageFile> Copier<D, I, F> {
    /// Of disks of one size. What a plan says of the one before it is of the one before it here.
    #[must_use]
    pub fn new(copies: Vec<Copy<D, I, F>>) -> Self {
        let size_bytes = copies.first().map_or(0, |copy| copy.disk.size_bytes());
        assert!(copies.iter().all(|copy| copy.disk.size_bytes() == size_bytes), "of one disk");
        Self { copies, size_bytes, next: 0, done: Done::default() }
    }

    /// What was done so far.
    #[must_use]
    pub fn done(&self) -> Done {
        self.done
    }

    /// The next block of all copies. Returns its bytes; `None`: there is none left.
    pub fn step(&mut self) -> io::Result<Option<u64>> {
        let zeroes = self.zero_blocks()?;
        if zeroes > 0 {
            for copy in &mut self.copies {
                copy.digests.fill(self.next, zeroes, &digest::of_zeroes())?;
            }
            self.next += zeroes;
            return Ok(Some(zeroes * BLOCK_BYTES));
        }
        let range = digest::range(self.next, self.size_bytes);
        if range.is_empty() {
            return Ok(None);
        }
        let mut previous = None;
        for copy in &mut self.copies {
            previous = copy.block(self.next, &range, previous, &mut self.done)?;
        }
        self.next += 1;
        Ok(Some(range.end - range.start))
    }

    /// How many of the next blocks are zeroes in all copies and need no write.
    fn zero_blocks(&self) -> io::Result<u64> {
        let is_new = |copy: &Copy<D, I, F>| matches!(copy.plan, Plan::Fill { is_new: true, .. });
        if self.copies.is_empty() || !self.copies.iter().all(is_new) {
            return Ok(0);
        }
        let mut least = u64::MAX;
        for copy in &self.copies {
            least = least.min(digest::zero_blocks(&copy.disk, self.next)?);
        }
        Ok(least)
    }

    /// Makes what was written durable.
    pub fn sync(&mut self) -> io::Result<()> {
        for copy in &mut self.copies {
            copy.image.sync()?;
            copy.digests.sync()?;
        }
        Ok(())
    }

    /// The images with their tables.
    #[must_use]
    pub fn end(self) -> Vec<Copy<D, I, F>> {
        self.copies
    }
}

impl<D: Disk, I: Image, F: StorageFile> Copy<D, I, F> {
    /// Makes one block. Returns its content, if that is known.
    fn block(
        &mut self,
        block: u64,
        range: &Range<u64>,
        previous: Option<Vec<u8>>,
        done: &mut Done,
    ) -> io::Result<Option<Vec<u8>>> {
        let Self { disk, image, digests, plan } = self;
        let known = digests.get(block)?;
        match plan {
            Plan::Fill { is_new, unlike_previous } => {
                let is_new = *is_new;
                if known != UNKNOWN && !is_new {
                    let there = there(image, range)?;
                    if digest::of_block(&there) == known {
                        done.kept_blocks += 1;
                        return Ok(Some(there));
                    }
                }
                let content = match (previous, unlike_previous) {
                    (Some(mut content), Some(changed)) => {
                        for part in within(changed, range) {
                            let at = (part.start - range.start) as usize
                                ..(part.end - range.start) as usize;
                            done.read_bytes += digest::read_block(&*disk, part, &mut content[at])?;
                        }
                        content
                    }
                    _ => wanted(disk, range, done)?,
                };
                put(image, range.start, &content, is_new, done)?;
                digests.set(block, &digest::of_block(&content))?;
                Ok(Some(content))
            }
            Plan::Change(changed) => {
                let parts = within(changed, range);
                if parts.is_empty() {
                    done.kept_blocks += 1;
                    return Ok(None);
                }
                let mut content = there(image, range)?;
                if digest::of_block(&content) == known {
                    for part in parts {
                        let at =
                            (part.start - range.start) as usize..(part.end - range.start) as usize;
                        let data = &mut content[at.clone()];
                        done.read_bytes += digest::read_block(&*disk, part.clone(), data)?;
                        put(image, part.start, &content[at], false, done)?;
                    }
                } else {
                    // Begun before and not ended, or damaged.
                    content = wanted(disk, range, done)?;
                    put(image, range.start, &content, false, done)?;
                }
                digests.set(block, &digest::of_block(&content))?;
                Ok(Some(content))
            }
            Plan::Compare => {
                let content = wanted(disk, range, done)?;
                if there(image, range)? == content {
                    done.kept_blocks += 1;
                } else {
                    put(image, range.start, &content, false, done)?;
                }
                digests.set(block, &digest::of_block(&content))?;
                Ok(Some(content))
            }
        }
    }
}

fn there(image: &mut impl Image, range: &Range<u64>) -> io::Result<Vec<u8>> {
    let mut content = vec![0; (range.end - range.start) as usize];
    image.read(range.start, &mut content)?;
    Ok(content)
}

fn wanted(disk: &impl Disk, range: &Range<u64>, done: &mut Done) -> io::Result<Vec<u8>> {
    let mut content = vec![0; (range.end - range.start) as usize];
    done.read_bytes += digest::read_block(disk, range.clone(), &mut content)?;
    Ok(content)
}

/// Writes what is not zeroes, and makes holes of the rest.
fn put(
    image: &mut impl Image,
    offset: u64,
    data: &[u8],
    is_new: bool,
    done: &mut Done,
) -> io::Result<()> {
    let mut at = offset;
    let pages: Vec<&[u8]> = data.chunks(PAGE_BYTES).collect();
    for run in pages.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let len = run.iter().map(|page| page.len() as u64).sum();
        let from = (at - offset) as usize;
        match is_zero(run[0]) {
            true if is_new => {}
            true => image.zero(at, len)?,
            false => image.write(at, &data[from..from + len as usize])?,
        }
        if !(is_new && is_zero(run[0])) {
            done.written_bytes += len;
        }
        at += len;
    }
    Ok(())
}

const PAGE_BYTES: usize = 4096;

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

/// The parts of some ranges, which are in order, that are within another.
fn within(ranges: &[Range<u64>], range: &Range<u64>) -> Vec<Range<u64>> {
    let first = ranges.partition_point(|part| part.end <= range.start);
    let parts = ranges[first..].iter().take_while(|part| part.start < range.end);
    parts.map(|part| part.start.max(range.start)..part.end.min(range.end)).collect()
}

/// Reads an image, and says which blocks are not what the table says. `go_on` is told each block's digest and bytes, and
/// ends it with an error.
pub fn verify<F: StorageFile>(
    image: &mut dyn Image,
    digests: &Table<F>,
    size_bytes: u64,
    mut go_on: impl FnMut(&digest::Digest, u64) -> io::Result<()>,
) -> io::Result<Vec<u64>> {
    let (mut wrong, mut buf) = (Vec::new(), vec![0; BLOCK_BYTES as usize]);
    for block in 0..digest::blocks(size_bytes) {
        let range = digest::range(block, size_bytes);
        let buf = &mut buf[..(range.end - range.start) as usize];
        image.read(range.start, buf)?;
        let found = digest::of_block(buf);
        if found != digests.get(block)? {
            wrong.push(block);
        }
        go_on(&found, range.end - range.start)?;
    }
    Ok(wrong)
}

#[cfg(test)]
mod tests;
