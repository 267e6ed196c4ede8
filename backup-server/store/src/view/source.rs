//! Where the data of an extent is, and reading it.
//!
//! Invariant: nothing of a payload is handed out before the whole of it was verified against the
//! checksum that was taken when the guest wrote it.

use crate::damage::LostWith;
use crate::extents::Slice;
use crate::journal::{IndexEntry, MapEntry, Segment};
use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, PoisonError};
use tidelock_protocol::record::crc32c;
use tidelock_storage::StorageFile;

/// Where the newest data of an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A part of a record's payload.
    Payload {
        /// The segment's index.
        segment: u64,
        /// Where the payload begins, in bytes from the beginning of the segment's file.
        at: u64,
        /// Bytes of the payload before this part.
        skip: u32,
        /// Bytes of the payload.
        len_bytes: u32,
        /// Its checksum.
        crc: u32,
    },
    /// Zeroes, by a record in this segment.
    Zero {
        /// The segment's index.
        segment: u64,
    },
    /// Not known: headers and index of this segment are damaged.
    Lost {
        /// The segment's index.
        segment: u64,
    },
}

impl Source {
    pub(super) fn segment(self) -> u64 {
        match self {
            Source::Payload { segment, .. }
            | Source::Zero { segment }
            | Source::Lost { segment } => segment,
        }
    }

    /// What a record does.
    pub(super) fn of_entry(segment: u64, entry: &IndexEntry) -> Self {
        let IndexEntry { at, len_bytes, crc, .. } = *entry;
        match at {
            0 => Source::Zero { segment },
            _ => Source::Payload { segment, at, skip: 0, len_bytes, crc },
        }
    }

    /// What a map says.
    pub(super) fn of_map(entry: &MapEntry) -> Self {
        let MapEntry { segment, at, skip, payload_len, crc, .. } = *entry;
        match at {
            0 => Source::Zero { segment },
            _ => Source::Payload { segment, at, skip, len_bytes: payload_len, crc },
        }
    }
}

impl Slice for Source {
    fn without_front(self, bytes: u64) -> Self {
        match self {
            Source::Payload { segment, at, skip, len_bytes, crc } => {
                Source::Payload { segment, at, skip: skip + bytes as u32, len_bytes, crc }
            }
            Source::Zero { .. } | Source::Lost { .. } => self,
        }
    }
}

/// A piece of a disk, and the file that has it.
#[derive(Clone, Debug)]
pub(super) enum Piece<F> {
    /// The image.
    Image,
    /// Zeroes.
    Zero,
    /// The content is lost.
    Lost { with: LostWith },
    /// A part of a payload, from its `skip`th byte on.
    Payload { segment: Segment<F>, at: u64, skip: u32, len_bytes: u32, crc: u32 },
}

impl<F: Clone> Piece<F> {
    /// `None`: the segment is in the images.
    pub(super) fn of<'a>(
        source: Source,
        segment: impl FnOnce(u64) -> Option<&'a Segment<F>>,
    ) -> Option<Self>
    where
        F: 'a,
    {
        let found = segment(source.segment())?;
        Some(match source {
            Source::Zero { .. } => Piece::Zero,
            Source::Lost { segment } => Piece::Lost { with: LostWith(Some(segment)) },
            Source::Payload { at, skip, len_bytes, crc, .. } => {
                Piece::Payload { segment: found.clone(), at, skip, len_bytes, crc }
            }
        })
    }
}

/// Payloads of less are verified each time that a part of them is read.
const LARGE_BYTES: u32 = 16 << 10;
/// Large payloads that are remembered as verified; at it they are forgotten, and verified again.
const VERIFIED_MAX: usize = 16 << 10;

/// Large payloads that were verified: a part of one must not cost the whole each time.
#[derive(Debug, Default)]
pub(super) struct Verified(Mutex<HashSet<(u64, u64)>>);

impl Verified {
    /// Fills the buffer with a part of a payload.
    pub(super) fn read<F: StorageFile>(
        &self,
        segment: &Segment<F>,
        (at, skip): (u64, u32),
        (len_bytes, crc): (u32, u32),
        buf: &mut [u8],
    ) -> io::Result<()> {
        let check = |payload: &[u8]| {
            if crc32c(payload) == crc {
                return Ok(());
            }
            let file = segment.file_name();
            Err(io::Error::other(format!(
                "journal segment {file} is damaged at byte {at}: the data is not what was written. Restore the file \
                 from a copy"
            )))
        };
        if skip == 0 && buf.len() as u64 == u64::from(len_bytes) {
            segment.file.read_at(buf, at)?;
            return check(buf);
        }
        let place = (segment.index, at);
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let from = at + u64::from(skip);
        if len_bytes >= LARGE_BYTES && known().contains(&place) {
            return segment.file.read_at(buf, from);
        }
        let mut payload = vec![0; len_bytes as usize];
        segment.file.read_at(&mut payload, at)?;
        check(&payload)?;
        let skip = skip as usize;
        let Some(part) = payload.get(skip..skip + buf.len()) else {
            return Err(io::Error::other("an index of the journal does not fit its segment"));
        };
        buf.copy_from_slice(part);
        if len_bytes >= LARGE_BYTES {
            let mut known = known();
            if known.len() == VERIFIED_MAX {
                known.clear();
            }
            known.insert(place);
        }
        Ok(())
    }
}
