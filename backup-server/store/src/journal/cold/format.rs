//! The bytes of a cold segment (`docs/journal-format.md`, section 12).
//!
//! ```text
//!  front: skippable frame [ description, table ]
//!  a zstd frame for each block
//!  back:  skippable frame [ table, description ]
//! ```
//!
//! Description and table are there twice, far from each other, because without them the whole segment
//! would be lost with one sector. Tools that know zstd step over both.

use super::file::ColdError;
use crate::journal::{SegmentFacts, SegmentHeader};
use tidelock_protocol::record::crc32c;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the format.
pub const COLD_VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"TLKCOLD\0";
/// RFC 8878, 3.1.2: a frame that decoders step over.
const SKIPPABLE_MAGIC: u32 = 0x184D_2A5D;
/// Its magic and its length.
pub(super) const SKIPPABLE_BYTES: usize = 8;
pub(super) const DESCRIPTION_BYTES: usize = 72;
pub(super) const ENTRY_BYTES: usize = 16;
/// Bytes of a block, by power of two, at least and at most.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 512..=1 << 20;

/// The name of a cold segment's file.
#[must_use]
pub fn cold_file_name(index: u64, id: u64) -> String {
    format!("{}.zst", SegmentHeader::file_name(index, id))
}

/// Index and id from the name of such a file, also of one that was not finished (`.new`).
#[must_use]
pub fn parse_cold_file_name(name: &str) -> Option<(u64, u64)> {
    let stem = name.strip_suffix(".new").unwrap_or(name).strip_suffix(".zst")?;
    SegmentHeader::parse_file_name(stem)
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawDescription {
    magic: [u8; 8],
    version: U32,
    block_bytes: U32,
    index: U64,
    id: U64,
    len_bytes: U64,
    last_batch: U64,
    chain: U32,
    blocks: U32,
    file_bytes: U64,
    zero: U32,
    crc: U32,
}

const _: () = assert!(size_of::<RawDescription>() == DESCRIPTION_BYTES);

/// What a cold file is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Description {
    /// The segment.
    pub(super) of: SegmentFacts,
    /// Bytes of the segment in each block but the last.
    pub(super) block_bytes: u32,
    /// Bytes of the whole file.
    pub(super) file_bytes: u64,
}

impl Description {
    pub(super) fn blocks(&self) -> u32 {
        // Checked when it is made or read.
        self.of.len_bytes.div_ceil(u64::from(self.block_bytes)) as u32
    }

    /// Bytes of the front, and of the back.
    pub(super) fn part_bytes(blocks: u32) -> u64 {
        (SKIPPABLE_BYTES + DESCRIPTION_BYTES) as u64 + ENTRY_BYTES as u64 * u64::from(blocks)
    }

    /// Where the frames are.
    pub(super) fn frames(&self) -> std::ops::Range<u64> {
        let part = Self::part_bytes(self.blocks());
        part..self.file_bytes - part
    }

    /// Where both entries of a block are.
    pub(super) fn entries_at(&self, block: u32) -> [u64; 2] {
        let skip = ENTRY_BYTES as u64 * u64::from(block);
        let front = (SKIPPABLE_BYTES + DESCRIPTION_BYTES) as u64;
        [front + skip, self.frames().end + SKIPPABLE_BYTES as u64 + skip]
    }

    /// Bytes of the segment in this block.
    pub(super) fn block_len(&self, block: u32) -> usize {
        let from = u64::from(block) * u64::from(self.block_bytes);
        (self.of.len_bytes - from).min(u64::from(self.block_bytes)) as usize
    }

    pub(super) fn encode(&self) -> [u8; DESCRIPTION_BYTES] {
        let mut raw = RawDescription {
            magic: MAGIC,
            version: COLD_VERSION.into(),
            block_bytes: self.block_bytes.into(),
            index: self.of.index.into(),
            id: self.of.id.into(),
            len_bytes: self.of.len_bytes.into(),
            last_batch: self.of.last_batch.into(),
            chain: self.of.chain.into(),
            blocks: self.blocks().into(),
            file_bytes: self.file_bytes.into(),
            zero: U32::ZERO,
            crc: U32::ZERO,
        };
        raw.crc = crc32c(&raw.as_bytes()[..DESCRIPTION_BYTES - 4]).into();
        let mut bytes = [0; DESCRIPTION_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// Verifies and decodes one, of a file of this size.
    pub(super) fn decode(
        bytes: &[u8; DESCRIPTION_BYTES],
        file_bytes: u64,
    ) -> Result<Self, ColdError> {
        let raw: RawDescription = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC || raw.crc.get() != crc32c(&bytes[..DESCRIPTION_BYTES - 4]) {
            return Err(ColdError::Damaged("its description"));
        }
        if raw.version.get() != COLD_VERSION {
            return Err(ColdError::Version(raw.version.get()));
        }
        let (block_bytes, blocks) = (raw.block_bytes.get(), raw.blocks.get());
        let len_bytes = raw.len_bytes.get();
        let fits = block_bytes.is_power_of_two()
            && BLOCK_BYTES.contains(&block_bytes)
            && len_bytes > 0
            && len_bytes.div_ceil(u64::from(block_bytes)) == u64::from(blocks);
        if !fits || raw.index.get() == 0 {
            return Err(ColdError::Damaged("its description: it says what cannot be"));
        }
        if raw.file_bytes.get() != file_bytes || file_bytes < 2 * Self::part_bytes(blocks) {
            return Err(ColdError::Damaged("its length"));
        }
        let of = SegmentFacts {
            index: raw.index.get(),
            id: raw.id.get(),
            len_bytes,
            last_batch: raw.last_batch.get(),
            chain: raw.chain.get(),
        };
        Ok(Self { of, block_bytes, file_bytes })
    }

    /// The front and the back around the frames.
    pub(super) fn front_and_back(&self, table: &[Entry]) -> (Vec<u8>, Vec<u8>) {
        let part = Self::part_bytes(self.blocks()) as usize;
        let skippable = |parts: &[&[u8]]| {
            let mut bytes = Vec::with_capacity(part);
            bytes.extend(SKIPPABLE_MAGIC.to_le_bytes());
            bytes.extend(((part - SKIPPABLE_BYTES) as u32).to_le_bytes());
            parts.iter().for_each(|part| bytes.extend_from_slice(part));
            bytes
        };
        let table: Vec<u8> = table.iter().flat_map(Entry::encode).collect();
        let description = self.encode();
        (skippable(&[&description[..], &table]), skippable(&[&table[..], &description]))
    }
}

/// Where a block's frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) at: u64,
    pub(super) len_bytes: u32,
    /// Of segment's id, block's number and frame: [`frame_crc`].
    pub(super) crc: u32,
}

impl Entry {
    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.at.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len_bytes.to_le_bytes());
        bytes[12..].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: [u8; ENTRY_BYTES]) -> Self {
        let [at @ .., l0, l1, l2, l3, c0, c1, c2, c3] = bytes;
        Self {
            at: u64::from_le_bytes(at),
            len_bytes: u32::from_le_bytes([l0, l1, l2, l3]),
            crc: u32::from_le_bytes([c0, c1, c2, c3]),
        }
    }
}

/// The checksum of a frame, which binds it to its segment and its place there.
pub(super) fn frame_crc(id: u64, block: u32, frame: &[u8]) -> u32 {
    let mut bound = Vec::with_capacity(12 + frame.len());
    bound.extend(id.to_le_bytes());
    bound.extend(block.to_le_bytes());
    bound.extend_from_slice(frame);
    crc32c(&bound)
}
