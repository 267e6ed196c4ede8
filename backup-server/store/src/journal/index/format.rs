//! The bytes of an index (`docs/journal-format.md`, section 9).
//!
//! ```text
//!  block 0 │ block 1 │ ... │ fence │ runs │ cut │ waypoints │ trailer
//!  4096 B    4096 B          16 B    48 B   8 B   postcard    96 B
//!                            each    each   each
//! ```
//!
//! Block, [`BLOCK_BYTES`]: checksum of the rest (4), number of entries (4), id of the segment (8),
//! entries of 44 bytes, zeroes.
//!
//! Entry: writer (2), disk (2), bytes of the extent (4), offset (8), seq (8), epoch (8), where the
//! payload begins in the segment's file, 0: zeroes (8), checksum of the payload (4). Sorted by
//! writer, disk, offset, epoch, seq.
//!
//! Fence: writer, disk, 4 zero bytes, offset of the first entry of each block.
//!
//! Waypoints: their fields in postcard's encoding, in order.

use super::{IndexError, Waypoint};
use std::ops::Range;
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};
use tidelock_protocol::record::crc32c;
use tidelock_protocol::vector::CountVector;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 4096;
/// Entries of a full block.
pub const ENTRIES_PER_BLOCK: usize = (BLOCK_BYTES - BLOCK_HEAD_BYTES) / ENTRY_BYTES;
/// The version of the index's format. One of another version is made again.
pub const INDEX_VERSION: u32 = 1;

const BLOCK_HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 44;
pub(super) const FENCE_BYTES: usize = 16;
const RUN_BYTES: usize = 48;
pub(super) const TRAILER_BYTES: usize = 96;
const MAGIC: [u8; 8] = *b"TLKINDX\0";
/// In place of the number of entries of a cut that is not known.
const NOT_CLOSED: u32 = u32::MAX;
/// More than any segment needs: two for each writer and recovery.
const RUNS_MAX: u32 = 64 * 1024;
/// More than all waypoints of a segment take.
const WAYPOINTS_MAX_BYTES: u32 = 16 << 20;
const CUT_MAX: u32 = tidelock_protocol::limits::WRITERS_MAX as u32;

/// What a record does to its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IndexEntry {
    /// The host.
    pub writer: WriterId,
    /// Its disk.
    pub disk: DiskId,
    /// Where the extent begins, in bytes.
    pub offset: u64,
    /// The record's epoch.
    pub epoch: Epoch,
    /// Its seq.
    pub seq: Seq,
    /// Bytes of the extent.
    pub len_bytes: u32,
    /// Where the payload begins in the segment's file; 0: zeroes.
    pub at: u64,
    /// The payload's checksum; 0 of zeroes.
    pub crc: u32,
}

impl IndexEntry {
    /// The extent, in bytes of the disk.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len_bytes)
    }
}

/// The records of one writer and epoch: their seqs have no gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterRun {
    /// The host.
    pub writer: WriterId,
    /// Their epoch.
    pub epoch: Epoch,
    /// The first seq.
    pub first: Seq,
    /// The last seq.
    pub last: Seq,
    /// The HLC of the first.
    pub first_hlc: Hlc,
    /// The HLC of the last.
    pub last_hlc: Hlc,
}

/// Which segment it is about, and how that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentFacts {
    /// The segment's index.
    pub index: u64,
    /// Its id.
    pub id: u64,
    /// Its valid bytes.
    pub len_bytes: u64,
    /// The number of its last batch.
    pub last_batch: u64,
    /// The header checksum of its last batch.
    pub chain: u32,
}

/// What is behind the blocks and the fence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The segment.
    pub of: SegmentFacts,
    /// How many entries there are.
    pub entries: u64,
    /// In how many blocks.
    pub blocks: u32,
    /// By writer and epoch.
    pub runs: Vec<WriterRun>,
    /// Since when everything before the segment is in every state, if that was known by then:
    /// states at this time and later have it, and so have those that have this cut.
    pub closed: Option<(Hlc, CountVector)>,
}

/// The place of a disk's extent: what the fence and the blocks are sorted by.
pub(super) type Key = (WriterId, DiskId, u64);

impl IndexEntry {
    pub(super) fn key(&self) -> Key {
        (self.writer, self.disk, self.offset)
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawEntry {
    writer: U16,
    disk: U16,
    len: U32,
    offset: U64,
    seq: U64,
    epoch: U64,
    at: U64,
    crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawFence {
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
    first_hlc: U64,
    last_hlc: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
#[derive(Debug)]
struct RawTrailer {
    magic: [u8; 8],
    version: U32,
    blocks: U32,
    entries: U64,
    index: U64,
    id: U64,
    len: U64,
    last_batch: U64,
    chain: U32,
    runs: U32,
    closed_at: U64,
    closed_cut: U32,
    middle_crc: U32,
    waypoints_len: U32,
    waypoints_crc: U32,
    zero: [u8; 4],
    crc: U32,
}

const _: () = assert!(size_of::<RawEntry>() == ENTRY_BYTES);
const _: () = assert!(size_of::<RawFence>() == FENCE_BYTES);
const _: () = assert!(size_of::<RawRun>() == RUN_BYTES);
const _: () = assert!(size_of::<RawTrailer>() == TRAILER_BYTES);

/// The index's bytes. The entries are sorted.
pub(super) fn encode(
    entries: &[IndexEntry],
    footer: &Footer,
    waypoints: &[Arc<Waypoint>],
) -> Vec<u8> {
    let chunks = entries.chunks(ENTRIES_PER_BLOCK);
    let mut out = Vec::with_capacity((chunks.len() + 1) * (BLOCK_BYTES + FENCE_BYTES));
    let mut middle = Vec::new();
    for chunk in chunks {
        encode_block(&mut out, chunk, footer.of.id);
        let (writer, disk, offset) = chunk[0].key();
        let fence = RawFence {
            writer: writer.0.into(),
            disk: disk.0.into(),
            zero: 0.into(),
            offset: offset.into(),
        };
        middle.extend_from_slice(fence.as_bytes());
    }
    for run in &footer.runs {
        let raw = RawRun {
            writer: run.writer.0.into(),
            zero: [0; 6],
            epoch: run.epoch.0.into(),
            first: run.first.0.into(),
            last: run.last.0.into(),
            first_hlc: run.first_hlc.0.into(),
            last_hlc: run.last_hlc.0.into(),
        };
        middle.extend_from_slice(raw.as_bytes());
    }
    let mut closed_cut = NOT_CLOSED;
    if let Some((_, cut)) = &footer.closed {
        closed_cut = cut.entries().map(|(writer, _)| u32::from(writer.0) + 1).max().unwrap_or(0);
        for writer in 0..closed_cut {
            middle.extend_from_slice(&cut.get(WriterId(writer as u16)).0.to_le_bytes());
        }
    }
    let waypoints = encode_waypoints(waypoints);
    let mut trailer = RawTrailer {
        magic: MAGIC,
        version: INDEX_VERSION.into(),
        blocks: footer.blocks.into(),
        entries: footer.entries.into(),
        index: footer.of.index.into(),
        id: footer.of.id.into(),
        len: footer.of.len_bytes.into(),
        last_batch: footer.of.last_batch.into(),
        chain: footer.of.chain.into(),
        runs: (footer.runs.len() as u32).into(),
        closed_at: footer.closed.as_ref().map_or(0, |(at, _)| at.0).into(),
        closed_cut: closed_cut.into(),
        middle_crc: crc32c(&middle).into(),
        waypoints_len: (waypoints.len() as u32).into(),
        waypoints_crc: crc32c(&waypoints).into(),
        zero: [0; 4],
        crc: 0.into(),
    };
    trailer.crc = crc32c(&trailer.as_bytes()[..TRAILER_BYTES - 4]).into();
    out.extend_from_slice(&middle);
    out.extend_from_slice(&waypoints);
    out.extend_from_slice(trailer.as_bytes());
    out
}

fn encode_waypoints(waypoints: &[Arc<Waypoint>]) -> Vec<u8> {
    let waypoints: Vec<&Waypoint> = waypoints.iter().map(|of| &**of).collect();
    postcard::to_stdvec(&waypoints).expect("waypoints are plain data")
}

fn encode_block(out: &mut Vec<u8>, entries: &[IndexEntry], id: u64) {
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&(entries.len() as u32).to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
    for entry in entries {
        let raw = RawEntry {
            writer: entry.writer.0.into(),
            disk: entry.disk.0.into(),
            len: entry.len_bytes.into(),
            offset: entry.offset.into(),
            seq: entry.seq.0.into(),
            epoch: entry.epoch.0.into(),
            at: entry.at.into(),
            crc: entry.crc.into(),
        };
        out.extend_from_slice(raw.as_bytes());
    }
    out.resize(start + BLOCK_BYTES, 0);
    let crc = crc32c(&out[start + 4..]);
    out[start..start + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Reads and verifies a block of this segment's index.
pub(super) fn decode_block(
    bytes: &[u8; BLOCK_BYTES],
    id: u64,
    segment_bytes: u64,
) -> Result<Vec<IndexEntry>, IndexError> {
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let of = u64::from_le_bytes(bytes[8..16].try_into().expect("8 bytes"));
    let count = number(4) as usize;
    if number(0) != crc32c(&bytes[4..]) {
        return Err(IndexError::Damaged("the checksum of a block is wrong"));
    }
    if of != id || count > ENTRIES_PER_BLOCK {
        return Err(IndexError::Damaged("a block is not this segment's"));
    }
    let raw = &bytes[BLOCK_HEAD_BYTES..BLOCK_HEAD_BYTES + count * ENTRY_BYTES];
    let raw = <[RawEntry]>::ref_from_bytes(raw).expect("a whole number of entries, unaligned");
    let entries = raw.iter().map(|raw| {
        let (at, len) = (raw.at.get(), u64::from(raw.len.get()));
        let inside = at == 0 || at.checked_add(len).is_some_and(|end| end <= segment_bytes);
        if !inside || len == 0 || raw.offset.get().checked_add(len).is_none() {
            return Err(IndexError::Damaged("an entry is out of bounds"));
        }
        Ok(IndexEntry {
            writer: WriterId(raw.writer.get()),
            disk: DiskId(raw.disk.get()),
            offset: raw.offset.get(),
            epoch: Epoch(raw.epoch.get()),
            seq: Seq(raw.seq.get()),
            len_bytes: raw.len.get(),
            at,
            crc: raw.crc.get(),
        })
    });
    entries.collect()
}

/// A trailer that checks out: how long what is before it must be.
#[derive(Clone, Debug)]
pub(super) struct Trailer(RawTrailer);

impl Trailer {
    pub(super) fn decode(bytes: &[u8; TRAILER_BYTES]) -> Result<Self, IndexError> {
        let raw: RawTrailer = zerocopy::transmute!(*bytes);
        if raw.magic != MAGIC {
            return Err(IndexError::Damaged("this is not an index"));
        }
        if raw.crc.get() != crc32c(&bytes[..TRAILER_BYTES - 4]) {
            return Err(IndexError::Damaged("the checksum of the trailer is wrong"));
        }
        if raw.version.get() != INDEX_VERSION {
            return Err(IndexError::Version(raw.version.get()));
        }
        let cut = raw.closed_cut.get();
        let blocks = raw.entries.get().div_ceil(ENTRIES_PER_BLOCK as u64);
        if raw.runs.get() > RUNS_MAX
            || cut != NOT_CLOSED && cut > CUT_MAX
            || blocks != u64::from(raw.blocks.get())
            || raw.waypoints_len.get() > WAYPOINTS_MAX_BYTES
        {
            return Err(IndexError::Damaged("the trailer is out of bounds"));
        }
        Ok(Self(raw))
    }

    fn cut_len(&self) -> usize {
        Some(self.0.closed_cut.get()).filter(|cut| *cut != NOT_CLOSED).unwrap_or(0) as usize
    }

    /// Where the fence begins, and the bytes from there to the waypoints.
    pub(super) fn middle(&self) -> (u64, u64) {
        let blocks = u64::from(self.0.blocks.get());
        let runs = u64::from(self.0.runs.get());
        let len = blocks * FENCE_BYTES as u64 + runs * RUN_BYTES as u64 + 8 * self.cut_len() as u64;
        (blocks * BLOCK_BYTES as u64, len)
    }

    /// The bytes between that and the trailer.
    pub(super) fn waypoints_len(&self) -> u64 {
        self.0.waypoints_len.get().into()
    }

    /// Reads and verifies these.
    pub(super) fn decode_waypoints(&self, bytes: &[u8]) -> Result<Vec<Waypoint>, IndexError> {
        let raw = &self.0;
        if crc32c(bytes) != raw.waypoints_crc.get() {
            return Err(IndexError::Damaged("the checksum of the waypoints is wrong"));
        }
        let waypoints: Result<Vec<Waypoint>, _> = postcard::from_bytes(bytes);
        let Ok(waypoints) = waypoints else {
            return Err(IndexError::Damaged("the waypoints cannot be read"));
        };
        let is_inside = |of: &Waypoint| of.offset <= raw.len.get() && of.state.is_in_bounds();
        if !waypoints.iter().all(is_inside) || !waypoints.is_sorted_by_key(|of| of.offset) {
            return Err(IndexError::Damaged("a waypoint is out of bounds"));
        }
        Ok(waypoints)
    }

    /// Reads and verifies what is between the blocks and the waypoints.
    pub(super) fn decode_middle(&self, bytes: &[u8]) -> Result<(Footer, Vec<Key>), IndexError> {
        let raw = &self.0;
        if crc32c(bytes) != raw.middle_crc.get() {
            return Err(IndexError::Damaged("the checksum of the fence is wrong"));
        }
        let (fence, rest) = bytes.split_at(raw.blocks.get() as usize * FENCE_BYTES);
        let (runs, cut) = rest.split_at(raw.runs.get() as usize * RUN_BYTES);
        let fence = <[RawFence]>::ref_from_bytes(fence).expect("whole, unaligned");
        let key = |f: &RawFence| (WriterId(f.writer.get()), DiskId(f.disk.get()), f.offset.get());
        let fence: Vec<Key> = fence.iter().map(key).collect();
        let runs = <[RawRun]>::ref_from_bytes(runs).expect("whole, unaligned");
        let run = |run: &RawRun| WriterRun {
            writer: WriterId(run.writer.get()),
            epoch: Epoch(run.epoch.get()),
            first: Seq(run.first.get()),
            last: Seq(run.last.get()),
            first_hlc: Hlc(run.first_hlc.get()),
            last_hlc: Hlc(run.last_hlc.get()),
        };
        let runs: Vec<WriterRun> = runs.iter().map(run).collect();
        if !fence.is_sorted() || runs.iter().any(|run| run.first > run.last) {
            return Err(IndexError::Damaged("the fence is not in order"));
        }
        let closed = (raw.closed_cut.get() != NOT_CLOSED).then(|| {
            let seqs = <[U64]>::ref_from_bytes(cut).expect("whole, unaligned");
            let entries = (0..).map(WriterId).zip(seqs.iter().map(|seq| Seq(seq.get())));
            (Hlc(raw.closed_at.get()), entries.collect())
        });
        let of = SegmentFacts {
            index: raw.index.get(),
            id: raw.id.get(),
            len_bytes: raw.len.get(),
            last_batch: raw.last_batch.get(),
            chain: raw.chain.get(),
        };
        let (entries, blocks) = (raw.entries.get(), raw.blocks.get());
        Ok((Footer { of, entries, blocks, runs, closed }, fence))
    }
}

/// The name of a segment's index.
#[must_use]
pub fn index_file_name(index: u64, id: u64) -> String {
    format!("{index:016x}-{id:016x}.idx")
}

/// The segment's index and id from the name of its index, also of one that was not finished.
#[must_use]
pub fn parse_index_file_name(name: &str) -> Option<(u64, u64)> {
    let stem = name.strip_suffix(".new").unwrap_or(name).strip_suffix(".idx")?;
    crate::journal::SegmentHeader::parse_file_name(&format!("{stem}.seg"))
}
