//! One write (or zeroing, or marker) as it travels on the link and as it stands in the journal.
//!
//! Both carry the same bytes, so the backup appends what it received without encoding it again,
//! and the checksum that the tap took right after its one copy of the data is the one that is
//! verified when the journal is read, years later.
//!
//! Layout (little-endian), `HEADER_BYTES` = 56:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 1 | kind: 1 write, 2 zero, 3 copy-done, 4 idle; 128 and above: notes of the journal, never on a link |
//! | 1 | 1 | flags: 1 COPY, 2 NO_HOLE, 4 FLUSHED (a flush of the guest stands before it); the others must be 0 |
//! | 2 | 2 | writer |
//! | 4 | 2 | disk |
//! | 6 | 2 | number of dependency entries that follow the header |
//! | 8 | 8 | epoch |
//! | 16 | 8 | seq |
//! | 24 | 8 | HLC |
//! | 32 | 8 | offset on the disk, in bytes |
//! | 40 | 4 | length of the extent, in bytes |
//! | 44 | 4 | length of the payload, in bytes |
//! | 48 | 4 | CRC-32C of the payload |
//! | 52 | 4 | CRC-32C of bytes 0 to 51 and of the dependency entries |
//!
//! Then the dependency entries, 16 bytes each (writer u16, six bytes 0, seq u64), then the payload.

use crate::hlc::Hlc;
use crate::ids::{DiskId, Epoch, Seq, WriterId};
use crate::limits;
use crate::vector::CountVector;
use bytes::{BufMut, Bytes, BytesMut};
use thiserror::Error;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 56;
/// Bytes of one dependency entry.
pub const DEP_BYTES: usize = 16;

const FLAG_COPY: u8 = 1;
const FLAG_NO_HOLE: u8 = 2;
const FLAG_FLUSHED: u8 = 4;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    kind: u8,
    flags: u8,
    writer: U16,
    disk: U16,
    deps: U16,
    epoch: U64,
    seq: U64,
    hlc: U64,
    offset: U64,
    len: U32,
    payload_len: U32,
    payload_crc: U32,
    header_crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawDep {
    writer: U16,
    zero: [u8; 6],
    seq: U64,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);
const _: () = assert!(size_of::<RawDep>() == DEP_BYTES);

/// CRC-32C, as everywhere in Tidelock.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// What a record does to its disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The extent now holds the payload.
    Write(Payload),
    /// The extent now reads as zeroes; the disk may drop its blocks unless `no_hole`.
    Zero {
        /// Length of the extent.
        len_bytes: u32,
        /// Blocks stay allocated (NBD's NO_HOLE).
        no_hole: bool,
    },
    /// Every copy of an initial copy or a resync is before this record: from here on the
    /// writer's disks at the backup equal those at the primary.
    CopyDone,
    /// Nothing. It says that the writer has no record with a smaller HLC any more, so that the
    /// watermark can move past a writer that has nothing to write. Never in P.
    Idle,
}

/// Data with the checksum that was taken when it was copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    data: Bytes,
    crc: u32,
}

impl Payload {
    /// Takes the checksum of the data.
    #[must_use]
    pub fn new(data: Bytes) -> Self {
        assert!(data.len() <= limits::RECORD_PAYLOAD_MAX_BYTES as usize);
        let crc = crc32c(&data);
        Self { data, crc }
    }

    /// The data.
    #[must_use]
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// Its checksum (CRC-32C).
    #[must_use]
    pub fn crc(&self) -> u32 {
        self.crc
    }
}

/// One record of a writer's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Who wrote.
    pub writer: WriterId,
    /// The writer's count.
    pub seq: Seq,
    /// The epoch under which it was admitted.
    pub epoch: Epoch,
    /// When it was admitted.
    pub hlc: Hlc,
    /// What it may depend on besides the writer's own earlier records: entries of other writers
    /// that changed since the writer's previous record.
    pub deps: CountVector,
    /// The writer's disk.
    pub disk: DiskId,
    /// Where on the disk.
    pub offset: u64,
    /// Not a guest's write but Tidelock's own copy of what the disk held: never in P.
    pub copy: bool,
    /// Between the writer's record before this one and this one, its guest asked for a flush, or that one was a write with
    /// FUA: what stands just before this record is a state that the guest meant to find again. Never of a copy.
    pub flushed: bool,
    /// What it does.
    pub effect: Effect,
}

/// Why bytes are not a record.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum RecordError {
    /// The header or the dependency entries are damaged.
    #[error("record header checksum is {found:08x}, computed {computed:08x}")]
    HeaderChecksum {
        /// As stored.
        found: u32,
        /// As computed.
        computed: u32,
    },
    /// The payload is damaged.
    #[error("payload checksum of seq {seq} is {found:08x}, computed {computed:08x}")]
    PayloadChecksum {
        /// The record.
        seq: Seq,
        /// As stored.
        found: u32,
        /// As computed.
        computed: u32,
    },
    /// The checksum is right but the content breaks the format.
    #[error("malformed record: {0}")]
    Malformed(&'static str),
}

/// A verified header: how long the record is, before its payload has arrived.
#[derive(Clone, Debug)]
pub struct Head {
    record: Record,
    payload_len: u32,
    payload_crc: u32,
    deps_len: usize,
}

impl Record {
    /// Length of the extent.
    #[must_use]
    pub fn len_bytes(&self) -> u32 {
        match &self.effect {
            Effect::Write(payload) => payload.data.len() as u32,
            Effect::Zero { len_bytes, .. } => *len_bytes,
            Effect::CopyDone | Effect::Idle => 0,
        }
    }

    /// The payload, if it has one.
    #[must_use]
    pub fn payload(&self) -> Option<&Payload> {
        match &self.effect {
            Effect::Write(payload) => Some(payload),
            _ => None,
        }
    }

    /// Bytes on the link and in the journal.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        HEADER_BYTES
            + self.deps.entries().count() * DEP_BYTES
            + self.payload().map_or(0, |p| p.data.len())
    }

    /// Appends the header and the dependency entries; the payload follows them, uncopied.
    pub fn encode_head(&self, out: &mut BytesMut) {
        let (kind, flags, payload) = match &self.effect {
            Effect::Write(payload) => (1, 0, Some(payload)),
            Effect::Zero { no_hole, .. } => (2, if *no_hole { FLAG_NO_HOLE } else { 0 }, None),
            Effect::CopyDone => (3, 0, None),
            Effect::Idle => (4, 0, None),
        };
        let start = out.len();
        let mut header = RawHeader {
            kind,
            flags: flags
                | if self.copy { FLAG_COPY } else { 0 }
                | if self.flushed { FLAG_FLUSHED } else { 0 },
            writer: self.writer.0.into(),
            disk: self.disk.0.into(),
            deps: (self.deps.entries().count() as u16).into(),
            epoch: self.epoch.0.into(),
            seq: self.seq.0.into(),
            hlc: self.hlc.0.into(),
            offset: self.offset.into(),
            len: self.len_bytes().into(),
            payload_len: payload.map_or(0, |p| p.data.len() as u32).into(),
            payload_crc: payload.map_or(0, |p| p.crc).into(),
            header_crc: 0.into(),
        };
        out.put_slice(header.as_bytes());
        for (writer, seq) in self.deps.entries() {
            let dep = RawDep { writer: writer.0.into(), zero: [0; 6], seq: seq.0.into() };
            out.put_slice(dep.as_bytes());
        }
        let crc = head_crc(&out[start..]);
        header.header_crc = crc.into();
        out[start..start + HEADER_BYTES].copy_from_slice(header.as_bytes());
    }

    /// Appends the whole record.
    pub fn encode(&self, out: &mut BytesMut) {
        out.reserve(self.encoded_len());
        self.encode_head(out);
        if let Some(payload) = self.payload() {
            out.put_slice(&payload.data);
        }
    }

    /// Takes a whole record off the front of `bytes`. `None`: more bytes are needed.
    /// The payload shares the buffer and its checksum is verified.
    pub fn decode(bytes: &mut Bytes) -> Result<Option<Record>, RecordError> {
        let Some(head) = Head::parse(bytes)? else { return Ok(None) };
        if bytes.len() < head.encoded_len() {
            return Ok(None);
        }
        let payload = bytes.split_to(head.encoded_len()).slice(head.head_len()..);
        head.finish(payload).map(Some)
    }
}

/// The checksum of header (with its own field left out) and dependency entries.
fn head_crc(head: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&head[..HEADER_BYTES - 4]);
    digest.update(&head[HEADER_BYTES..]);
    digest.finalize() as u32
}

impl Head {
    /// Reads and verifies header and dependency entries from the front of `bytes`.
    /// `None`: more bytes are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<Head>, RecordError> {
        let Ok((raw, rest)) = RawHeader::read_from_prefix(bytes) else { return Ok(None) };
        if raw.deps.get() > limits::RECORD_DEPS_MAX {
            return Err(RecordError::Malformed("more dependency entries than writers"));
        }
        let deps_len = usize::from(raw.deps.get()) * DEP_BYTES;
        if rest.len() < deps_len {
            return Ok(None);
        }
        let computed = head_crc(&bytes[..HEADER_BYTES + deps_len]);
        if computed != raw.header_crc.get() {
            return Err(RecordError::HeaderChecksum { found: raw.header_crc.get(), computed });
        }
        let mut deps = CountVector::new();
        // Ascending, so that one record has one encoding: it is encoded again for the journal.
        let mut writer_min = 0;
        for entry in rest[..deps_len].chunks_exact(DEP_BYTES) {
            let dep = RawDep::read_from_bytes(entry).expect("DEP_BYTES");
            let writer = dep.writer.get();
            if !(writer_min..limits::WRITERS_MAX).contains(&writer)
                || dep.zero != [0; 6]
                || dep.seq.get() == 0
            {
                return Err(RecordError::Malformed("dependency entry"));
            }
            writer_min = writer + 1;
            deps.raise(WriterId(writer), Seq(dep.seq.get()));
        }
        Self::from_raw(&raw, deps, deps_len).map(Some)
    }

    fn from_raw(raw: &RawHeader, deps: CountVector, deps_len: usize) -> Result<Head, RecordError> {
        let malformed = |what| Err(RecordError::Malformed(what));
        let (len, payload_len) = (raw.len.get(), raw.payload_len.get());
        if raw.writer.get() >= limits::WRITERS_MAX || raw.disk.get() >= limits::DISKS_MAX {
            return malformed("writer or disk out of range");
        }
        if raw.seq.get() == 0 || raw.epoch.get() == 0 {
            return malformed("seq or epoch 0");
        }
        if raw.offset.get().checked_add(u64::from(len)).is_none() {
            return malformed("extent beyond 2^64");
        }
        let allowed = match raw.kind {
            1 => FLAG_COPY | FLAG_FLUSHED,
            2 => FLAG_COPY | FLAG_NO_HOLE | FLAG_FLUSHED,
            3 => FLAG_COPY,
            4 => FLAG_FLUSHED,
            _ => return malformed("unknown kind"),
        };
        if raw.flags & !allowed != 0 {
            return malformed("unknown flags");
        }
        if raw.flags & FLAG_COPY != 0 && raw.flags & FLAG_FLUSHED != 0 {
            return malformed("a copy after a flush");
        }
        let effect = match raw.kind {
            1 if len == 0 || len != payload_len => return malformed("write without its payload"),
            1 if payload_len > limits::RECORD_PAYLOAD_MAX_BYTES => {
                return malformed("payload too large");
            }
            // The data is attached by `finish`.
            1 => Effect::Write(Payload { data: Bytes::new(), crc: raw.payload_crc.get() }),
            _ if payload_len != 0 || raw.payload_crc.get() != 0 => {
                return malformed("unexpected payload");
            }
            2 if len == 0 => return malformed("zeroing of nothing"),
            2 => Effect::Zero { len_bytes: len, no_hole: raw.flags & FLAG_NO_HOLE != 0 },
            _ if len != 0 || raw.offset.get() != 0 => {
                return malformed("copy-done or idle with an extent");
            }
            3 if raw.flags & FLAG_COPY == 0 => return malformed("copy-done that is not a copy"),
            3 => Effect::CopyDone,
            _ => Effect::Idle,
        };
        let record = Record {
            writer: WriterId(raw.writer.get()),
            seq: Seq(raw.seq.get()),
            epoch: Epoch(raw.epoch.get()),
            hlc: Hlc(raw.hlc.get()),
            deps,
            disk: DiskId(raw.disk.get()),
            offset: raw.offset.get(),
            copy: raw.flags & FLAG_COPY != 0,
            flushed: raw.flags & FLAG_FLUSHED != 0,
            effect,
        };
        Ok(Head { record, payload_len, payload_crc: raw.payload_crc.get(), deps_len })
    }

    /// Bytes of header and dependency entries.
    #[must_use]
    pub fn head_len(&self) -> usize {
        HEADER_BYTES + self.deps_len
    }

    /// Bytes of the payload that follows.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.payload_len as usize
    }

    /// Bytes of the whole record.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        self.head_len() + self.payload_len as usize
    }

    /// Length of the extent that the record changes.
    #[must_use]
    pub fn extent_len_bytes(&self) -> u32 {
        match self.record.effect {
            Effect::Write(_) => self.payload_len,
            _ => self.record.len_bytes(),
        }
    }

    /// The record without its data: what an index or a scan needs. A write's payload is empty.
    #[must_use]
    pub fn peek(&self) -> &Record {
        &self.record
    }

    /// Attaches the payload after verifying it.
    pub fn finish(self, data: Bytes) -> Result<Record, RecordError> {
        assert_eq!(data.len(), self.payload_len as usize);
        let mut record = self.record;
        if let Effect::Write(payload) = &mut record.effect {
            let computed = crc32c(&data);
            if computed != self.payload_crc {
                return Err(RecordError::PayloadChecksum {
                    seq: record.seq,
                    found: self.payload_crc,
                    computed,
                });
            }
            payload.data = data;
        }
        Ok(record)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        pub(crate) fn any_record()(
            writer in 0..limits::WRITERS_MAX, seq in 1u64.., epoch in 1u64.., hlc: u64,
            deps in prop::collection::vec((0..limits::WRITERS_MAX, 1u64..), 0..5),
            disk in 0..limits::DISKS_MAX, offset in 0u64..1 << 40, copy: bool, no_hole: bool, flushed: bool,
            kind in 0..4, data in prop::collection::vec(any::<u8>(), 1..300), len in 1u32..,
        ) -> Record {
            let effect = match kind {
                0 => Effect::Write(Payload::new(data.into())),
                1 => Effect::Zero { len_bytes: len, no_hole },
                2 => Effect::CopyDone,
                _ => Effect::Idle,
            };
            let done = effect == Effect::CopyDone;
            let idle = effect == Effect::Idle;
            Record {
                writer: WriterId(writer), seq: Seq(seq), epoch: Epoch(epoch), hlc: Hlc(hlc),
                deps: deps.into_iter().map(|(w, s)| (WriterId(w), Seq(s))).collect(),
                disk: DiskId(disk), offset: if done || idle { 0 } else { offset },
                copy: done || copy && !idle, flushed: flushed && !done && (idle || !copy), effect,
            }
        }
    }

    proptest! {
        #[test]
        fn a_record_survives_encoding(record in any_record()) {
            let mut out = BytesMut::new();
            record.encode(&mut out);
            prop_assert_eq!(out.len(), record.encoded_len());
            for cut in 0..out.len() {
                let mut part = Bytes::copy_from_slice(&out[..cut]);
                prop_assert_eq!(Record::decode(&mut part), Ok(None));
            }
            let mut whole = out.freeze();
            prop_assert_eq!(Record::decode(&mut whole), Ok(Some(record)));
            prop_assert!(whole.is_empty());
        }

        #[test]
        fn any_flipped_bit_is_noticed(record in any_record(), at: prop::sample::Index, bit in 0u8..8) {
            let mut out = BytesMut::new();
            record.encode(&mut out);
            let at = at.index(out.len());
            out[at] ^= 1u8 << bit;
            let decoded = Record::decode(&mut out.freeze());
            prop_assert!(!matches!(decoded, Ok(Some(_))), "{:?}", decoded);
        }
    }

    #[test]
    fn dependency_entries_ascend() {
        let record = Record {
            writer: WriterId(0),
            seq: Seq(1),
            epoch: Epoch(1),
            hlc: Hlc(1),
            deps: [(WriterId(1), Seq(5)), (WriterId(2), Seq(5))].into_iter().collect(),
            disk: DiskId(0),
            offset: 0,
            copy: true,
            flushed: false,
            effect: Effect::CopyDone,
        };
        let decode = |writers: [u8; 2]| {
            let mut out = BytesMut::new();
            record.encode(&mut out);
            (out[56], out[72]) = (writers[0], writers[1]);
            let crc = head_crc(&out);
            out[52..56].copy_from_slice(&crc.to_le_bytes());
            Record::decode(&mut out.freeze())
        };
        assert_eq!(decode([1, 2]), Ok(Some(record.clone())));
        assert!(matches!(decode([1, 63]), Ok(Some(_))));
        // Another order, one twice, one too many: each would be encoded otherwise than it came.
        for writers in [[2, 1], [1, 1], [1, 64]] {
            assert_eq!(decode(writers), Err(RecordError::Malformed("dependency entry")));
        }
    }

    #[test]
    fn layout_is_as_documented() {
        let record = Record {
            writer: WriterId(2),
            seq: Seq(0x1122),
            epoch: Epoch(3),
            hlc: Hlc(0x55),
            deps: CountVector::of(WriterId(1), Seq(9)),
            disk: DiskId(4),
            offset: 0x1000,
            copy: true,
            flushed: false,
            effect: Effect::Write(Payload::new(Bytes::from_static(b"abc"))),
        };
        let mut out = BytesMut::new();
        record.encode(&mut out);
        assert_eq!(out.len(), 56 + 16 + 3);
        assert_eq!(out[..8], [1, 1, 2, 0, 4, 0, 1, 0]);
        assert_eq!(out[8..16], 3u64.to_le_bytes());
        assert_eq!(out[16..24], 0x1122u64.to_le_bytes());
        assert_eq!(out[24..32], 0x55u64.to_le_bytes());
        assert_eq!(out[32..40], 0x1000u64.to_le_bytes());
        assert_eq!(out[40..48], [3, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(out[48..52], crc32c(b"abc").to_le_bytes());
        assert_eq!(out[56..72], [1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(out[72..], *b"abc");
        let mut out = BytesMut::new();
        Record { copy: false, flushed: true, ..record.clone() }.encode(&mut out);
        assert_eq!(out[1], 4);
        let mut out = BytesMut::new();
        Record { flushed: true, ..record }.encode(&mut out);
        let of_both = Record::decode(&mut out.freeze());
        assert!(matches!(of_both, Err(RecordError::Malformed(_))), "{of_both:?}");
    }
}
