//! The bytes of a map (`docs/journal-format.md`, section 10).
//!
//! ```text
//!  leaf 0 │ leaf 1 │ ... │ fence 0 │ ... │ top  │ runs │ trailer
//!  4096 B   4096 B         4096 B          16 B   32 B   88 B
//!                                          each   each
//! ```
//!
//! Leaf and fence: checksum of the rest (4), number of entries (4), id of the last segment (8), number of the block in
//! the file (8), entries, zeroes.
//!
//! Entry of a leaf: a [`Packed`] in postcard's encoding, relative to the entry before it in the leaf; the first is
//! relative to one that has no disk, and ends at 0. Of writes of 4 KiB at random places it takes 17 bytes.
//!
//! Entry of a fence and of the top, 16 bytes: writer, disk, 4 zero bytes, offset of the first entry of a leaf; of the
//! top: of a fence.

use crate::extents::DiskKey;
use crate::journal::SegmentFacts;
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::record::crc32c;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the map's format. One of another version is made again.
pub const MAP_VERSION: u32 = 1;

pub(super) const BLOCK_BYTES: usize = crate::journal::BLOCK_BYTES;
const HEAD_BYTES: usize = 24;
/// Bytes of the least entry.
const ENTRY_MIN_BYTES: usize = 11;
const KEY_BYTES: usize = 16;
const RUN_BYTES: usize = 32;
pub(super) const TRAILER_BYTES: usize = 88;
/// More entries than a leaf can have.
const ENTRIES_PER_LEAF_MAX: usize = (BLOCK_BYTES - HEAD_BYTES) / ENTRY_MIN_BYTES;
/// Entries of a full fence.
pub(super) const KEYS_PER_FENCE: usize = (BLOCK_BYTES - HEAD_BYTES) / KEY_BYTES;
const MAGIC: [u8; 8] = *b"TLKMAP\0\0";
const RUNS_MAX: u32 = 64 * 1024;
/// A map of this level is of more segments than there can be.
pub(super) const LEVEL_MAX: u32 = 16;

/// Why a map cannot be used, for the same reasons as an index. What it was made from can.
pub use crate::journal::index::IndexError as MapError;

/// Where a piece of a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// Which disk.
    pub key: DiskKey,
    /// Where the extent begins, in bytes.
    pub offset: u64,
    /// Bytes of the extent.
    pub len_bytes: u32,
    /// Its segment's index.
    pub segment: u64,
    /// Where the payload begins in the segment's file; 0: zeroes.
    pub at: u64,
    /// Bytes of the payload before what is at `offset`.
    pub skip: u32,
    /// Bytes of the payload.
    pub payload_len: u32,
    /// The payload's checksum.
    pub crc: u32,
}

/// The records of one writer and epoch that are in a map: their seqs have no gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRun {
    /// The host.
    pub writer: WriterId,
    /// Their epoch.
    pub epoch: Epoch,
    /// The first seq.
    pub first: Seq,
    /// The last seq.
    pub last: Seq,
}

/// What a map is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapFacts {
    /// 0: of one segment; each level is of [`super::FANOUT`] times as many.
    pub level: u32,
    /// The index of the first segment.
    pub first: u64,
    /// The last segment, whose chain has all before it.
    pub last: SegmentFacts,
    /// By writer and epoch.
    pub runs: Vec<MapRun>,
}

/// The place of a disk's extent: what maps are sorted by.
pub(super) type Place = (DiskKey, u64);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHead {
    crc: U32,
    count: U32,
    id: U64,
    number: U64,
}

/// An entry as it stands in a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Packed {
    /// Writer and disk, if they are others than those of the entry before.
    other_disk: Option<(u16, u16)>,
    /// From where the entry before ends on this disk, or from 0, to where this one begins.
    gap: u64,
    /// Bytes of the extent, less those of the entry before.
    longer: i64,
    /// Counted from the map's first.
    segment: u32,
    at: u64,
    skip: u32,
    /// Bytes of the payload behind the extent's.
    behind: u32,
    crc: [u8; 4],
}

/// What the next entry of a leaf is relative to.
#[derive(Clone, Copy, Debug, Default)]
struct Before {
    key: Option<DiskKey>,
    end: u64,
    len_bytes: u32,
}

impl Before {
    fn of(entry: &MapEntry) -> Self {
        Self { key: Some(entry.key), end: entry.end(), len_bytes: entry.len_bytes }
    }

    fn pack(&self, entry: &MapEntry, first_segment: u64) -> Packed {
        let is_same = self.key == Some(entry.key);
        let extent_end =
            if entry.at == 0 { entry.payload_len } else { entry.skip + entry.len_bytes };
        Packed {
            other_disk: (!is_same).then_some((entry.key.writer.0, entry.key.disk.0)),
            gap: entry.offset - if is_same { self.end } else { 0 },
            longer: i64::from(entry.len_bytes) - i64::from(self.len_bytes),
            segment: (entry.segment - first_segment) as u32,
            at: entry.at,
            skip: entry.skip,
            behind: entry.payload_len - extent_end,
            crc: entry.crc.to_le_bytes(),
        }
    }

    /// `None`: it is out of bounds or of order.
    fn unpack(&self, packed: &Packed, facts: &MapFacts) -> Option<MapEntry> {
        let key = match packed.other_disk {
            Some((writer, disk)) => DiskKey { writer: WriterId(writer), disk: DiskId(disk) },
            None => self.key?,
        };
        let is_same = packed.other_disk.is_none();
        let follows = is_same || self.key.is_none_or(|before| before < key);
        let offset = packed.gap.checked_add(if is_same { self.end } else { 0 })?;
        let len_bytes = i64::from(self.len_bytes).checked_add(packed.longer)?;
        let len_bytes = u32::try_from(len_bytes).ok().filter(|len| *len > 0)?;
        offset.checked_add(len_bytes.into())?;
        let payload_len = match packed.at {
            0 => packed.behind,
            _ => packed.skip.checked_add(len_bytes)?.checked_add(packed.behind)?,
        };
        packed.at.checked_add(payload_len.into())?;
        let segment = facts.first.checked_add(packed.segment.into())?;
        (follows && segment <= facts.last.index).then_some(MapEntry {
            key,
            offset,
            len_bytes,
            segment,
            at: packed.at,
            skip: packed.skip,
            payload_len,
            crc: u32::from_le_bytes(packed.crc),
        })
    }
}

/// A leaf that is filled.
#[derive(Debug, Default)]
pub(super) struct Leaf {
    first: Option<Place>,
    before: Before,
    count: usize,
    content: Vec<u8>,
}

impl Leaf {
    /// The next entry, if there is room for it.
    pub(super) fn push(&mut self, facts: &MapFacts, entry: &MapEntry) -> bool {
        let packed = self.before.pack(entry, facts.first);
        let full = self.content.len();
        let content = std::mem::take(&mut self.content);
        self.content = postcard::to_extend(&packed, content).expect("an entry is plain data");
        if self.content.len() > BLOCK_BYTES - HEAD_BYTES {
            self.content.truncate(full);
            return false;
        }
        self.first.get_or_insert(entry.place());
        self.before = Before::of(entry);
        self.count += 1;
        true
    }

    /// The place of its first entry.
    pub(super) fn first(&self) -> Option<Place> {
        self.first
    }

    pub(super) fn entries(&self) -> u64 {
        self.count as u64
    }

    /// Its bytes.
    pub(super) fn encode(&self, facts: &MapFacts, number: u64) -> Vec<u8> {
        block(facts.last.id, number, self.count, &self.content)
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawKey {
    writer: U16,
    disk: U16,
    zero: U32,
    offset: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawRun {
    writer: U16,
    zero: [u8; 6],
    epoch: U64,
    first: U64,
    last: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawTrailer {
    magic: [u8; 8],
    version: U32,
    level: U32,
    leaves: U32,
    fences: U32,
    entries: U64,
    first: U64,
    index: U64,
    id: U64,
    len: U64,
    last_batch: U64,
    chain: U32,
    runs: U32,
    middle_crc: U32,
    crc: U32,
}

const _: () = assert!(size_of::<RawHead>() == HEAD_BYTES);
const _: () = assert!(size_of::<RawKey>() == KEY_BYTES);
const _: () = assert!(size_of::<RawRun>() == RUN_BYTES);
const _: () = assert!(size_of::<RawTrailer>() == TRAILER_BYTES);

impl RawKey {
    fn new((key, offset): Place) -> Self {
        let (writer, disk) = (key.writer.0.into(), key.disk.0.into());
        Self { writer, disk, zero: 0.into(), offset: offset.into() }
    }

    fn place(&self) -> Place {
        let (writer, disk) = (WriterId(self.writer.get()), DiskId(self.disk.get()));
        (DiskKey { writer, disk }, self.offset.get())
    }
}

impl MapEntry {
    pub(super) fn place(&self) -> Place {
        (self.key, self.offset)
    }

    /// Where the extent ends.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.len_bytes)
    }
}

fn block(id: u64, number: u64, count: usize, content: &[u8]) -> Vec<u8> {
    let head = RawHead {
        crc: 0.into(),
        count: (count as u32).into(),
        id: id.into(),
        number: number.into(),
    };
    let mut out = Vec::with_capacity(BLOCK_BYTES);
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(content);
    out.resize(BLOCK_BYTES, 0);
    let crc = crc32c(&out[4..]);
    out[..4].copy_from_slice(&crc.to_le_bytes());
    out
}

/// A fence's bytes.
pub(super) fn encode_fence(facts: &MapFacts, number: u64, places: &[Place]) -> Vec<u8> {
    let raw: Vec<RawKey> = places.iter().map(|place| RawKey::new(*place)).collect();
    block(facts.last.id, number, places.len(), raw.as_bytes())
}

/// What stands behind leaves and fences.
pub(super) fn encode_end(facts: &MapFacts, leaves: u64, entries: u64, top: &[Place]) -> Vec<u8> {
    let mut out = Vec::new();
    for place in top {
        out.extend_from_slice(RawKey::new(*place).as_bytes());
    }
    for run in &facts.runs {
        let raw = RawRun {
            writer: run.writer.0.into(),
            zero: [0; 6],
            epoch: run.epoch.0.into(),
            first: run.first.0.into(),
            last: run.last.0.into(),
        };
        out.extend_from_slice(raw.as_bytes());
    }
    let of = &facts.last;
    let mut trailer = RawTrailer {
        magic: MAGIC,
        version: MAP_VERSION.into(),
        level: facts.level.into(),
        leaves: (leaves as u32).into(),
        fences: (top.len() as u32).into(),
        entries: entries.into(),
        first: facts.first.into(),
        index: of.index.into(),
        id: of.id.into(),
        len: of.len_bytes.into(),
        last_batch: of.last_batch.into(),
        chain: of.chain.into(),
        runs: (facts.runs.len() as u32).into(),
        middle_crc: crc32c(&out).into(),
        crc: 0.into(),
    };
    trailer.crc = crc32c(&trailer.as_bytes()[..TRAILER_BYTES - 4]).into();
    out.extend_from_slice(trailer.as_bytes());
    out
}

fn content(
    bytes: &[u8; BLOCK_BYTES],
    id: u64,
    number: u64,
    max: usize,
) -> Result<(usize, &[u8]), MapError> {
    let (head, rest) = bytes.split_at(HEAD_BYTES);
    let head = RawHead::ref_from_bytes(head).expect("HEAD_BYTES, unaligned");
    if head.crc.get() != crc32c(&bytes[4..]) {
        return Err(MapError::Damaged("the checksum of a block is wrong"));
    }
    let count = head.count.get() as usize;
    if head.id.get() != id || head.number.get() != number || count == 0 || count > max {
        return Err(MapError::Damaged("a block is not where it belongs"));
    }
    Ok((count, rest))
}

/// Verifies a leaf, and shows its entries in order until one is enough.
pub(super) fn read_leaf(
    bytes: &[u8; BLOCK_BYTES],
    facts: &MapFacts,
    number: u64,
    mut go_on: impl FnMut(&MapEntry) -> bool,
) -> Result<(), MapError> {
    let (count, mut rest) = content(bytes, facts.last.id, number, ENTRIES_PER_LEAF_MAX)?;
    let mut before = Before::default();
    for _ in 0..count {
        let packed;
        (packed, rest) = postcard::take_from_bytes::<Packed>(rest)
            .map_err(|_| MapError::Damaged("an entry is cut short"))?;
        let entry = before.unpack(&packed, facts);
        let entry = entry.ok_or(MapError::Damaged("an entry is out of bounds or of order"))?;
        if !go_on(&entry) {
            return Ok(());
        }
        before = Before::of(&entry);
    }
    Ok(())
}

/// Reads and verifies a fence.
pub(super) fn decode_fence(
    bytes: &[u8; BLOCK_BYTES],
    facts: &MapFacts,
    number: u64,
) -> Result<Vec<Place>, MapError> {
    let (count, rest) = content(bytes, facts.last.id, number, KEYS_PER_FENCE)?;
    decode_keys(&rest[..count * KEY_BYTES])
}

fn decode_keys(bytes: &[u8]) -> Result<Vec<Place>, MapError> {
    let raw = <[RawKey]>::ref_from_bytes(bytes).expect("a whole number of keys, unaligned");
    let places: Vec<Place> = raw.iter().map(RawKey::place).collect();
    if !places.is_sorted() {
        return Err(MapError::Damaged("a fence is not in order"));
    }
    Ok(places)
}

/// A trailer that checks out: how long what is before it must be.
pub(super) struct Trailer(RawTrailer);

impl Trailer {
    pub(super) fn decode(bytes: &[u8; TRAILER_BYTES]) -> Result<Self, MapError> {
        let raw: RawTrailer = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err(MapError::Damaged("this is not a map"));
        }
        if raw.crc.get() != crc32c(&bytes[..TRAILER_BYTES - 4]) {
            return Err(MapError::Damaged("the checksum of the trailer is wrong"));
        }
        if raw.version.get() != MAP_VERSION {
            return Err(MapError::Version(raw.version.get()));
        }
        let (leaves, fences) = (u64::from(raw.leaves.get()), u64::from(raw.fences.get()));
        let last = raw.index.get();
        if raw.runs.get() > RUNS_MAX
            || raw.level.get() > LEVEL_MAX
            || raw.first.get() > last
            || last == u64::MAX
            || leaves > raw.entries.get()
            || leaves < raw.entries.get().div_ceil(ENTRIES_PER_LEAF_MAX as u64)
            || fences != leaves.div_ceil(KEYS_PER_FENCE as u64)
        {
            return Err(MapError::Damaged("the trailer is out of bounds"));
        }
        Ok(Self(raw))
    }

    /// Leaves, fences, where the top begins, and the bytes from there to the trailer.
    pub(super) fn layout(&self) -> (u64, u64, u64, u64) {
        let (leaves, fences) = (u64::from(self.0.leaves.get()), u64::from(self.0.fences.get()));
        let runs = u64::from(self.0.runs.get());
        let len = fences * KEY_BYTES as u64 + runs * RUN_BYTES as u64;
        (leaves, fences, (leaves + fences) * BLOCK_BYTES as u64, len)
    }

    /// Reads and verifies what is between the blocks and the trailer.
    pub(super) fn decode_middle(&self, bytes: &[u8]) -> Result<(MapFacts, Vec<Place>), MapError> {
        let raw = &self.0;
        if crc32c(bytes) != raw.middle_crc.get() {
            return Err(MapError::Damaged("the checksum of the top is wrong"));
        }
        let (top, runs) = bytes.split_at(raw.fences.get() as usize * KEY_BYTES);
        let top = decode_keys(top)?;
        let runs = <[RawRun]>::ref_from_bytes(runs).expect("whole, unaligned");
        let run = |run: &RawRun| MapRun {
            writer: WriterId(run.writer.get()),
            epoch: Epoch(run.epoch.get()),
            first: Seq(run.first.get()),
            last: Seq(run.last.get()),
        };
        let last = SegmentFacts {
            index: raw.index.get(),
            id: raw.id.get(),
            len_bytes: raw.len.get(),
            last_batch: raw.last_batch.get(),
            chain: raw.chain.get(),
        };
        let runs: Vec<MapRun> = runs.iter().map(run).collect();
        if runs.iter().any(|run| run.first > run.last) {
            return Err(MapError::Damaged("a run ends before it begins"));
        }
        Ok((MapFacts { level: raw.level.get(), first: raw.first.get(), last, runs }, top))
    }
}

/// The name of the map of this level whose last segment is this one.
#[must_use]
pub fn map_file_name(level: u32, index: u64, id: u64) -> String {
    format!("{index:016x}-{id:016x}.{level:02}.map")
}

/// Level, index and id of the last segment, from the name of a map, also of one that was not
/// finished.
#[must_use]
pub fn parse_map_file_name(name: &str) -> Option<(u32, u64, u64)> {
    let stem = name.strip_suffix(".new").unwrap_or(name).strip_suffix(".map")?;
    let (stem, level) = stem.rsplit_once('.')?;
    let level = level.parse().ok().filter(|n| *n <= LEVEL_MAX && level == format!("{n:02}"))?;
    let (index, id) = crate::journal::SegmentHeader::parse_file_name(&format!("{stem}.seg"))?;
    Some((level, index, id))
}
