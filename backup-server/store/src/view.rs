//! A disk as it is with everything in the journal that is not folded into its image yet.
//!
//! ```text
//!  recent, in memory (live views)     segments without a map
//!  stack, for each writer             maps of the others, newest first; the segment in which the cut falls
//!  image                              what was folded
//! ```
//!
//! A range is looked up from top to bottom: what one layer has not is looked for in the next one.
//!
//! Invariant: where the overlay has an extent, it is the newest; where it has none, the image is
//! up to date. The fold may write to the image at any time: it writes only what the overlay has
//! as well, or had until the image had it.
//!
//! Source: an extent map over the tail of a log, as in PipeCloud 4.4 ("a separate consumer process
//! transfers the writes to the actual VM disk volumes"), read before they are transferred; as sorted
//! runs on disk, so that its memory does not grow with the log.

mod overlay;
mod source;
mod stack;
#[cfg(test)]
mod tests;

pub use overlay::Overlay;

use crate::damage::{DamagedData, LostWith, Noticed, is_damage};
use crate::extents::DiskKey;
use crate::image::Image;
use crate::journal::Segment;
use source::{Piece, Verified};
use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use tidelock_storage::StorageFile;

/// An overlay that is written by the group's owner and read by whoever serves its disks.
pub type SharedOverlay<F> = Arc<RwLock<Overlay<F>>>;

/// What a part of a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Anything.
    Data,
    /// Zeroes.
    Zero,
}

/// One disk, readable.
#[derive(Clone, Debug)]
pub struct View<F> {
    key: DiskKey,
    size_bytes: u64,
    image: Image<F>,
    overlay: SharedOverlay<F>,
    verified: Arc<Verified>,
    noticed: Noticed,
}

impl<F: StorageFile> View<F> {
    /// The disk as image and overlay have it.
    #[must_use]
    pub fn new(key: DiskKey, size_bytes: u64, image: Image<F>, overlay: SharedOverlay<F>) -> Self {
        let noticed = overlay.read().unwrap_or_else(PoisonError::into_inner).noticed();
        Self { key, size_bytes, image, overlay, verified: Arc::default(), noticed }
    }

    /// Its size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The image below.
    pub fn image(&self) -> &Image<F> {
        &self.image
    }

    /// What a range is made of, in order and without a hole.
    fn pieces(&self, range: Range<u64>) -> io::Result<Vec<(Range<u64>, Piece<F>)>> {
        // Files stay readable when their names are gone, so the lock is for looking up only.
        let (recent, stacks, damaged) = {
            let overlay = self.overlay.read().unwrap_or_else(PoisonError::into_inner);
            let (recent, stacks) = overlay.recent(self.key, range);
            (recent, stacks, overlay.damaged())
        };
        let stack = stacks.get(&self.key.writer);
        let mut pieces = Vec::with_capacity(recent.len());
        for (range, piece) in recent {
            match (piece, stack) {
                (Some(piece), _) => pieces.push((range, piece)),
                (None, Some(stack)) => stack.pieces(self.key, range, &mut pieces)?,
                (None, None) => pieces.push((range, Piece::Image)),
            }
        }
        pieces.sort_unstable_by_key(|(range, _)| range.start);
        if damaged.is_empty() {
            return Ok(pieces);
        }
        let mut split = Vec::with_capacity(pieces.len());
        for (range, piece) in pieces {
            if !matches!(piece, Piece::Image) {
                split.push((range, piece));
                continue;
            }
            for (part, lost) in damaged.pieces(self.key, range) {
                let lost = lost.map(|with| Piece::Lost { with });
                split.push((part, lost.unwrap_or(Piece::Image)));
            }
        }
        Ok(split)
    }

    /// The parts of a range that cannot be read: what is lost with a segment, and payloads of which
    /// `is_damaged` says so, by segment, place in its file, length and checksum.
    pub fn damaged_in(
        &self,
        range: Range<u64>,
        mut is_damaged: impl FnMut(&Segment<F>, u64, u32, u32) -> bool,
    ) -> io::Result<Vec<(Range<u64>, LostWith)>> {
        let of = |(range, piece): (Range<u64>, Piece<F>)| match piece {
            Piece::Lost { with } => Some((range, with)),
            Piece::Payload { segment, at, len_bytes, crc, .. } => {
                let with = LostWith(Some(segment.index));
                is_damaged(&segment, at, len_bytes, crc).then_some((range, with))
            }
            Piece::Image | Piece::Zero => None,
        };
        Ok(self.pieces(range)?.into_iter().filter_map(of).collect())
    }

    /// The parts of a range that stand in the image and are not what was written, with the bytes that were read for that.
    pub fn damaged_in_image(&self, range: Range<u64>) -> io::Result<(Vec<Range<u64>>, u64)> {
        let (mut damaged, mut read_bytes) = (Vec::new(), 0);
        for (range, piece) in self.pieces(range)? {
            if matches!(piece, Piece::Image) {
                let (more, read) = self.image.damaged_in(range)?;
                damaged.extend(more);
                read_bytes += read;
            }
        }
        Ok((damaged, read_bytes))
    }

    /// Fills the buffer from this offset on. All data is verified.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match self.read_once(offset, buf) {
            // Since the look-up, a record over this place may have come, and a fold may write it to the image.
            Err(error) if is_damage(&error) => self.read_once(offset, buf),
            read => read,
        }
    }

    fn read_once(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        for (range, piece) in self.pieces(offset..offset + buf.len() as u64)? {
            let part = &mut buf[(range.start - offset) as usize..(range.end - offset) as usize];
            match piece {
                Piece::Image => {
                    let read = self.image.read_at(part, range.start);
                    read.inspect_err(|error| {
                        if is_damage(error) {
                            self.noticed.note_image(self.key, range.start);
                        }
                    })?;
                }
                Piece::Zero => part.fill(0),
                Piece::Lost { with } => return Err(lost(with)),
                Piece::Payload { segment, at, skip, len_bytes, crc } => {
                    let read = self.verified.read(&segment, (at, skip), (len_bytes, crc), part);
                    read.map_err(|error| {
                        self.noticed.note(segment.index);
                        io::Error::other(DamagedData(error.to_string()))
                    })?;
                }
            }
        }
        Ok(())
    }

    /// What the range is made of, in order and without a hole; `false` from `f` ends it.
    pub fn describe(
        &self,
        range: Range<u64>,
        mut f: impl FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        for (range, piece) in self.pieces(range)? {
            let content = match piece {
                Piece::Payload { .. } | Piece::Lost { .. } => Content::Data,
                Piece::Zero => Content::Zero,
                Piece::Image => {
                    if !self.describe_image(range, &mut f)? {
                        return Ok(());
                    }
                    continue;
                }
            };
            if !f(range.end - range.start, content) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn describe_image(
        &self,
        range: Range<u64>,
        f: &mut impl FnMut(u64, Content) -> bool,
    ) -> io::Result<bool> {
        let mut at = range.start;
        while at < range.end {
            let data = self.image.next_data(at)?;
            let data_start = data.as_ref().map_or(range.end, |d| d.start.clamp(at, range.end));
            if data_start > at && !f(data_start - at, Content::Zero) {
                return Ok(false);
            }
            let Some(data) = data.filter(|d| d.start < range.end) else { break };
            let data_end = data.end.min(range.end);
            if !f(data_end - data_start, Content::Data) {
                return Ok(false);
            }
            at = data_end;
        }
        Ok(true)
    }
}

fn lost(with: LostWith) -> io::Error {
    let of = match with.0 {
        Some(segment) => {
            format!("journal segment {segment} was damaged, and what it had here is lost")
        }
        None => "the disk image was damaged here, and what it had is lost".to_owned(),
    };
    io::Error::other(DamagedData(format!(
        "{of}. It stands until newer data is written there; `tidelock-backup damaged` says more"
    )))
}
