//! The bytes of segments, batches and notes (`docs/journal-format.md`).
//!
//! A segment file is a header and batches. A batch is a header and entries. An entry is a record
//! in its wire encoding or a note, told apart by the first byte.
//!
//! Segment header, [`SEGMENT_HEADER_BYTES`] = 64 (little-endian, as everything):
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `TLKJRNL` and a zero byte |
//! | 8 | 4 | version of the format: 4 |
//! | 12 | 4 | 0 |
//! | 16 | 8 | index of the segment: 1, 2, ... |
//! | 24 | 8 | id of the segment, random |
//! | 32 | 8 | id of the segment before it; 0 in the first |
//! | 40 | 8 | valid bytes of the segment before it |
//! | 48 | 8 | number of its first batch |
//! | 56 | 4 | header checksum of the last batch before it |
//! | 60 | 4 | CRC-32C of bytes 0 to 59 |
//!
//! Batch header, [`BATCH_HEADER_BYTES`] = 56:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `TLB1` |
//! | 4 | 4 | bytes of the body |
//! | 8 | 8 | id of the segment |
//! | 16 | 8 | number of the batch: 1, 2, ... through all segments |
//! | 24 | 8 | the last batch that was durable when this one was written |
//! | 32 | 8 | time of arrival by the backup's clock, in milliseconds since the Unix epoch: never before an earlier batch's |
//! | 40 | 4 | number of entries |
//! | 44 | 4 | header checksum of the batch before it |
//! | 48 | 4 | CRC-32C of the body |
//! | 52 | 4 | CRC-32C of bytes 0 to 51 |

use super::note::{NOTE_BODY_MAX_BYTES, NOTE_HEADER_BYTES, Note, NoteError};
use bytes::Bytes;
use std::marker::PhantomData;
use thiserror::Error;
use tidelock_protocol::limits;
use tidelock_protocol::record::{self, Body, DiskChange, Head, RecordError, crc32c};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a segment's header.
pub const SEGMENT_HEADER_BYTES: usize = 64;
/// Bytes of a batch's header.
pub const BATCH_HEADER_BYTES: usize = 56;
/// The version of the journal's format.
pub const VERSION: u32 = 1;
/// A batch takes no more records when its body has reached this.
pub const BATCH_TARGET_BYTES: usize = 8 << 20;
/// The largest body of a batch: the target, one largest record, and notes.
pub const BATCH_BODY_MAX_BYTES: usize = 48 << 20;
/// A batch takes no more notes when its body has reached this: one largest note still fits.
pub const BATCH_NOTES_MAX_BYTES: usize =
    BATCH_BODY_MAX_BYTES - NOTE_HEADER_BYTES - NOTE_BODY_MAX_BYTES;

/// The largest segment index and batch number: far beyond what can be written, and counting on
/// from it does not overflow.
pub const COUNT_MAX: u64 = 1 << 62;

const _: () = assert!(
    BATCH_TARGET_BYTES + limits::RECORD_MAX_BYTES as usize + 4 * NOTE_BODY_MAX_BYTES
        <= BATCH_NOTES_MAX_BYTES
);

const SEGMENT_MAGIC: [u8; 8] = *b"TLKJRNL\0";
const BATCH_MAGIC: [u8; 4] = *b"TLB1";

/// What is wrong with a piece of the journal.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Damage {
    /// The file ends inside a header or body.
    #[error("the file ends inside the {0}")]
    Short(&'static str),
    /// It does not begin as it must.
    #[error("this is not a {0}")]
    Magic(&'static str),
    /// A compressed segment, as a whole.
    #[error("{0}")]
    Cold(String),
    /// Of a compressed segment.
    #[error("its compressed file cannot be read there")]
    Compressed,
    /// A checksum does not fit.
    #[error("the checksum of the {what} is {found:08x}, computed {computed:08x}")]
    Checksum {
        /// Of what.
        what: &'static str,
        /// As stored.
        found: u32,
        /// As computed.
        computed: u32,
    },
    /// A format that this version does not know.
    #[error("journal format {0} is not supported, only {VERSION}")]
    Version(u32),
    /// Checksums are right, but it does not continue what is before it.
    #[error("it does not continue what is before it: {0}")]
    Chain(&'static str),
    /// A record.
    #[error("record: {0}")]
    Record(#[from] RecordError),
    /// A note.
    #[error("note: {0}")]
    Note(#[from] NoteError),
    /// An entry that is whole, but cannot follow what is before it.
    #[error("{0}")]
    State(#[from] super::state::StateError),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawSegment {
    magic: [u8; 8],
    version: U32,
    zero: U32,
    index: U64,
    id: U64,
    prev_id: U64,
    prev_len: U64,
    first_batch: U64,
    chain: U32,
    crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawBatch {
    magic: [u8; 4],
    body_len: U32,
    segment: U64,
    number: U64,
    durable: U64,
    arrived_ms: U64,
    entries: U32,
    chain: U32,
    body_crc: U32,
    crc: U32,
}

const _: () = assert!(size_of::<RawSegment>() == SEGMENT_HEADER_BYTES);
const _: () = assert!(size_of::<RawBatch>() == BATCH_HEADER_BYTES);

/// A segment's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Its place among the segments.
    pub index: u64,
    /// Its random id.
    pub id: u64,
    /// The id of the one before it; 0 in the first.
    pub prev_id: u64,
    /// Valid bytes of the one before it.
    pub prev_len: u64,
    /// Number of its first batch.
    pub first_batch: u64,
    /// Header checksum of the last batch before it.
    pub chain: u32,
}

impl SegmentHeader {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; SEGMENT_HEADER_BYTES] {
        let mut raw = RawSegment {
            magic: SEGMENT_MAGIC,
            version: VERSION.into(),
            zero: 0.into(),
            index: self.index.into(),
            id: self.id.into(),
            prev_id: self.prev_id.into(),
            prev_len: self.prev_len.into(),
            first_batch: self.first_batch.into(),
            chain: self.chain.into(),
            crc: 0.into(),
        };
        raw.crc = crc32c(&raw.as_bytes()[..SEGMENT_HEADER_BYTES - 4]).into();
        zerocopy::transmute!(raw)
    }

    /// Reads and verifies it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        let Ok((raw, _)) = RawSegment::read_from_prefix(bytes) else {
            return Err(Damage::Short("segment header"));
        };
        if raw.magic != SEGMENT_MAGIC {
            return Err(Damage::Magic("journal segment"));
        }
        check("segment header", raw.crc, &raw.as_bytes()[..SEGMENT_HEADER_BYTES - 4])?;
        if raw.version.get() != VERSION {
            return Err(Damage::Version(raw.version.get()));
        }
        let counts = [raw.index.get(), raw.first_batch.get()];
        if counts.iter().any(|count| !(1..=COUNT_MAX).contains(count)) {
            return Err(Damage::Chain("a segment header is out of bounds"));
        }
        Ok(Self {
            index: raw.index.get(),
            id: raw.id.get(),
            prev_id: raw.prev_id.get(),
            prev_len: raw.prev_len.get(),
            first_batch: raw.first_batch.get(),
            chain: raw.chain.get(),
        })
    }

    /// The name of the file: the id is in it, too, so that a damaged header does not make it
    /// impossible to tell whose batches follow.
    #[must_use]
    pub fn file_name(index: u64, id: u64) -> String {
        format!("{index:016x}-{id:016x}.seg")
    }

    /// Index and id from a file's name. `None`: not a segment.
    #[must_use]
    pub fn parse_file_name(name: &str) -> Option<(u64, u64)> {
        let (index, id) = name.strip_suffix(".seg")?.split_once('-')?;
        let number = |hex: &str| {
            let plain = hex.len() == 16 && hex.bytes().all(|b| b.is_ascii_hexdigit());
            plain.then(|| u64::from_str_radix(hex, 16).ok()).flatten()
        };
        let (index, id) = (number(index)?, number(id)?);
        (Self::file_name(index, id) == name && index > 0).then_some((index, id))
    }
}

/// A batch's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// Bytes of the body.
    pub body_len: u32,
    /// The segment.
    pub segment: u64,
    /// The number of the batch.
    pub number: u64,
    /// The last batch that was durable when this one was written. It tells a torn tail from a
    /// damaged middle.
    pub durable: u64,
    /// When it arrived, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
    /// How many entries the body has.
    pub entries: u32,
    /// Header checksum of the batch before it.
    pub chain: u32,
    /// Checksum of the body.
    pub body_crc: u32,
}

impl BatchHeader {
    /// Its bytes, and its own checksum: the link of the chain.
    #[must_use]
    pub fn encode(&self) -> ([u8; BATCH_HEADER_BYTES], u32) {
        let mut raw = RawBatch {
            magic: BATCH_MAGIC,
            body_len: self.body_len.into(),
            segment: self.segment.into(),
            number: self.number.into(),
            durable: self.durable.into(),
            arrived_ms: self.arrived_ms.into(),
            entries: self.entries.into(),
            chain: self.chain.into(),
            body_crc: self.body_crc.into(),
            crc: 0.into(),
        };
        let crc = crc32c(&raw.as_bytes()[..BATCH_HEADER_BYTES - 4]);
        raw.crc = crc.into();
        (zerocopy::transmute!(raw), crc)
    }

    /// Reads and verifies it; with it comes its own checksum.
    pub fn decode(bytes: &[u8]) -> Result<(Self, u32), Damage> {
        let Ok((raw, _)) = RawBatch::read_from_prefix(bytes) else {
            return Err(Damage::Short("batch header"));
        };
        if raw.magic != BATCH_MAGIC {
            return Err(Damage::Magic("batch"));
        }
        check("batch header", raw.crc, &raw.as_bytes()[..BATCH_HEADER_BYTES - 4])?;
        let header = Self {
            body_len: raw.body_len.get(),
            segment: raw.segment.get(),
            number: raw.number.get(),
            durable: raw.durable.get(),
            arrived_ms: raw.arrived_ms.get(),
            entries: raw.entries.get(),
            chain: raw.chain.get(),
            body_crc: raw.body_crc.get(),
        };
        if header.body_len as usize > BATCH_BODY_MAX_BYTES
            || header.durable >= header.number
            || header.number > COUNT_MAX
            || header.arrived_ms > COUNT_MAX
        {
            return Err(Damage::Chain("a batch header is out of bounds"));
        }
        Ok((header, raw.crc.get()))
    }

    /// Verifies the body.
    pub fn check_body(&self, body: &[u8]) -> Result<(), Damage> {
        check("batch", self.body_crc.into(), body)
    }
}

fn check(what: &'static str, found: U32, bytes: &[u8]) -> Result<(), Damage> {
    let (found, computed) = (found.get(), crc32c(bytes));
    if found == computed { Ok(()) } else { Err(Damage::Checksum { what, found, computed }) }
}

/// One entry of a batch.
#[derive(Clone, Debug)]
pub enum Entry<B = DiskChange> {
    /// A record: its header, and its payload unverified (the batch's checksum covers it).
    Record {
        /// The header.
        head: Head<B>,
        /// The payload.
        payload: Bytes,
        /// Where the payload begins in the body of the batch.
        payload_at: usize,
    },
    /// A note.
    Note(Note),
}

/// The entries of a batch's body, which was verified.
#[derive(Clone, Debug)]
pub struct Entries<B = DiskChange> {
    body: Bytes,
    at: usize,
    left: u32,
    of: PhantomData<B>,
}

impl<B: Body> Entries<B> {
    /// All entries of the body.
    #[must_use]
    pub fn new(header: &BatchHeader, body: Bytes) -> Self {
        assert_eq!(body.len(), header.body_len as usize);
        Self { body, at: 0, left: header.entries, of: PhantomData }
    }

    fn take(&mut self) -> Result<Option<Entry<B>>, Damage> {
        let rest = &self.body[self.at..];
        if self.left == 0 {
            return if rest.is_empty() { Ok(None) } else { Err(Damage::Chain("bytes left over")) };
        }
        self.left -= 1;
        let short = || Damage::Short("entry");
        if *rest.first().ok_or_else(short)? >= Note::KIND_MIN {
            let (note, len) = Note::decode(rest)?;
            self.at += len;
            return Ok(Some(Entry::Note(note)));
        }
        let head = Head::parse(rest)?.ok_or_else(short)?;
        if rest.len() < head.encoded_len() {
            return Err(short());
        }
        let payload_at = self.at + head.head_len();
        self.at += head.encoded_len();
        let payload = self.body.slice(payload_at..self.at);
        Ok(Some(Entry::Record { head, payload, payload_at }))
    }
}

impl<B: Body> Iterator for Entries<B> {
    type Item = Result<Entry<B>, Damage>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.take().transpose();
        if matches!(entry, Some(Err(_))) {
            (self.at, self.left) = (self.body.len(), 0);
        }
        entry
    }
}

const _: () = assert!(record::HEADER_BYTES < BATCH_TARGET_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_documented_and_any_flip_is_noticed() {
        let segment =
            SegmentHeader { index: 2, id: 3, prev_id: 4, prev_len: 5, first_batch: 6, chain: 7 };
        let bytes = segment.encode();
        assert_eq!(&bytes[..16], b"TLKJRNL\0\x01\0\0\0\0\0\0\0");
        assert_eq!(bytes[16..24], 2u64.to_le_bytes());
        assert_eq!(bytes[40..48], 5u64.to_le_bytes());
        assert_eq!(SegmentHeader::decode(&bytes), Ok(segment));
        let batch = BatchHeader {
            body_len: 0,
            segment: 3,
            number: 9,
            durable: 8,
            arrived_ms: 7,
            entries: 0,
            chain: 7,
            body_crc: crc32c(b""),
        };
        let (batch_bytes, link) = batch.encode();
        assert_eq!(&batch_bytes[..4], b"TLB1");
        assert_eq!(batch_bytes[16..24], 9u64.to_le_bytes());
        assert_eq!(BatchHeader::decode(&batch_bytes), Ok((batch, link)));
        assert!(batch.check_body(b"").is_ok() && batch.check_body(b"x").is_err());
        for bit in 0..BATCH_HEADER_BYTES * 8 {
            let mut bad = batch_bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(BatchHeader::decode(&bad).is_err());
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHeader::decode(&bad).is_err());
        }
    }

    #[test]
    fn counts_from_which_counting_on_would_overflow_are_refused() {
        let decode = |index, first_batch| {
            let (id, prev_id, prev_len, chain) = (3, 0, 0, 0);
            let header = SegmentHeader { index, id, prev_id, prev_len, first_batch, chain };
            SegmentHeader::decode(&header.encode())
        };
        assert!(decode(COUNT_MAX, COUNT_MAX).is_ok());
        for (index, first_batch) in [(0, 1), (1, 0), (COUNT_MAX + 1, 1), (1, u64::MAX)] {
            assert!(matches!(decode(index, first_batch), Err(Damage::Chain(_))));
        }
        let (segment, durable, arrived_ms, entries, chain, body_crc) = (3, 0, 0, 0, 0, 0);
        let decode = |number| {
            let body_len = 0;
            let header = BatchHeader {
                body_len,
                segment,
                number,
                durable,
                arrived_ms,
                entries,
                chain,
                body_crc,
            };
            BatchHeader::decode(&header.encode().0)
        };
        assert!(decode(COUNT_MAX).is_ok() && decode(COUNT_MAX + 1).is_err() && decode(0).is_err());
    }

    #[test]
    fn file_names_are_exact() {
        let name = SegmentHeader::file_name(1, 0xab);
        assert_eq!(name, "0000000000000001-00000000000000ab.seg");
        assert_eq!(SegmentHeader::parse_file_name(&name), Some((1, 0xab)));
        for other in ["x.seg", "1-ab.seg", "0000000000000001-00000000000000AB.seg", "a.seg.new"] {
            assert_eq!(SegmentHeader::parse_file_name(other), None, "{other}");
        }
    }
}
