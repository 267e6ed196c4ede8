//! One record of a writer's stream, as it travels on the link and as it stands in the journal.
//!
//! [`Record`] has what every stream has: writer, seq, epoch, time and dependencies. What is recorded is its [`Body`]: the
//! change of a disk is one ([`DiskChange`], in [`disk`]). Receiver, cut and journal do not look inside: they go by the
//! [`Role`], and the journal keeps any body as it came ([`RawBody`]).
//!
//! Link and journal carry the same bytes, so the backup appends what it received without encoding it again,
//! and the checksum that the tap took right after its one copy of the data is the one that is
//! verified when the journal is read, years later.
//!
//! Layout (little-endian), `HEADER_BYTES` = 56:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 1 | role: 1 change, 2 copy, 3 copy-done, 4 idle; 128 and above: notes of the journal, never on a link |
//! | 1 | 1 | the body's flags |
//! | 2 | 2 | writer |
//! | 4 | 2 | the body's object: a disk, or a shard |
//! | 6 | 2 | number of dependency entries that follow the header |
//! | 8 | 8 | epoch |
//! | 16 | 8 | seq |
//! | 24 | 8 | HLC |
//! | 32 | 8 | where in the object, in bytes |
//! | 40 | 4 | length there, in bytes (of a shard: as its store counts) |
//! | 44 | 4 | length of the payload, in bytes |
//! | 48 | 4 | CRC-32C of the payload |
//! | 52 | 4 | CRC-32C of bytes 0 to 51 and of the dependency entries |
//!
//! Then the dependency entries, 16 bytes each (writer u16, six bytes 0, seq u64), then the payload.

pub mod disk;

pub use disk::{DiskChange, Effect};

use crate::hlc::Hlc;
use crate::ids::{DiskId, Epoch, Seq, WriterId};
use crate::limits;
use crate::vector::CountVector;
use bytes::{BufMut, Bytes, BytesMut};
use std::fmt;
use thiserror::Error;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 56;
/// Bytes of one dependency entry.
pub const DEP_BYTES: usize = 16;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    role: u8,
    flags: u8,
    writer: U16,
    object: U16,
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

/// Data with the checksum that was taken when it was copied.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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
pub struct Record<B = DiskChange> {
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
    /// The content.
    pub body: B,
}

/// The meaning of a record for its stream, whatever its body is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Role {
    /// A change that a client may hear of.
    Change = 1,
    /// Tidelock's own copy of what was there: never in P.
    Copy = 2,
    /// The end of an initial copy or a resync: from here on the writer's data at the backup equals that at the primary.
    CopyDone = 3,
    /// Nothing: a seq and a time alone. The writer has no record with a smaller HLC any more, so the watermark can pass
    /// a writer that has nothing to write. Never in P.
    Idle = 4,
}

impl Role {
    fn of(byte: u8) -> Option<Self> {
        let all = [Self::Change, Self::Copy, Self::CopyDone, Self::Idle];
        all.into_iter().find(|role| *role as u8 == byte)
    }

    /// True of what a copy sends, its end with it.
    #[must_use]
    pub fn is_of_copy(self) -> bool {
        matches!(self, Self::Copy | Self::CopyDone)
    }
}

/// The fields of a header that belong to the body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BodyFields {
    /// Bits.
    pub flags: u8,
    /// The thing that is changed.
    pub object: u16,
    /// The place in it, in bytes.
    pub offset: u64,
    /// The length there, in bytes.
    pub len_bytes: u32,
}

/// The reason why a body cannot be of what its writer has attached.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Misplaced {
    /// No such object is there.
    #[error("is for disk or shard {0}, which was not attached")]
    Object(u16),
    /// The extent is not inside its disk.
    #[error("reaches to byte {end} of disk {disk}, which has {size_bytes}")]
    Extent {
        /// The disk.
        disk: DiskId,
        /// The end of the extent.
        end: u64,
        /// The disk's size.
        size_bytes: u64,
    },
}

/// The content of a record.
pub trait Body: Clone + fmt::Debug + PartialEq + Sized {
    /// The most things that a writer attaches: a header that names one beyond is refused.
    const OBJECTS_MAX: u16;
    /// The things that a writer attaches, in which its changes are.
    type Objects: fmt::Debug;

    /// Checks that the change is inside what its writer has attached.
    fn fits(&self, objects: &Self::Objects) -> Result<(), Misplaced>;
    /// The meaning for the stream.
    fn role(&self) -> Role;
    /// The body's part of the header.
    fn fields(&self) -> BodyFields;
    /// The data, if the body has any.
    fn payload(&self) -> Option<&Payload>;
    /// Reads its part of a header. `payload`: the announced data, empty still, with its checksum; [`None`]: no data follows.
    ///
    /// # Errors
    /// A sentence that says what breaks the format.
    fn from_parts(
        role: Role,
        fields: &BodyFields,
        payload: Option<(u32, Payload)>,
    ) -> Result<Self, &'static str>;
    /// The place of the data that has arrived.
    fn payload_mut(&mut self) -> Option<&mut Payload>;
}

/// Any body, as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawBody {
    role: Role,
    fields: BodyFields,
    payload: Option<Payload>,
}

impl Body for RawBody {
    type Objects = ();

    const OBJECTS_MAX: u16 = limits::SHARDS_MAX;

    fn fits(&self, (): &()) -> Result<(), Misplaced> {
        Ok(())
    }

    fn role(&self) -> Role {
        self.role
    }

    fn fields(&self) -> BodyFields {
        self.fields
    }

    fn payload(&self) -> Option<&Payload> {
        self.payload.as_ref()
    }

    fn from_parts(
        role: Role,
        fields: &BodyFields,
        payload: Option<(u32, Payload)>,
    ) -> Result<Self, &'static str> {
        Ok(Self { role, fields: *fields, payload: payload.map(|(_, payload)| payload) })
    }

    fn payload_mut(&mut self) -> Option<&mut Payload> {
        self.payload.as_mut()
    }
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
pub struct Head<B = DiskChange> {
    record: Record<B>,
    len_bytes: u32,
    payload_len: u32,
    payload_crc: u32,
    deps_len: usize,
}

impl<B: Body> Record<B> {
    /// The meaning for the stream.
    #[must_use]
    pub fn role(&self) -> Role {
        self.body.role()
    }

    /// The payload, if it has one.
    #[must_use]
    pub fn payload(&self) -> Option<&Payload> {
        self.body.payload()
    }

    /// The record as a layer keeps it that does not look inside. The data is shared.
    #[must_use]
    pub fn into_raw(self) -> Record<RawBody> {
        let Self { writer, seq, epoch, hlc, deps, body } = self;
        let (role, fields, payload) = (body.role(), body.fields(), body.payload().cloned());
        Record { writer, seq, epoch, hlc, deps, body: RawBody { role, fields, payload } }
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
        let (fields, payload) = (self.body.fields(), self.payload());
        let start = out.len();
        let mut header = RawHeader {
            role: self.role() as u8,
            flags: fields.flags,
            writer: self.writer.0.into(),
            object: fields.object.into(),
            deps: (self.deps.entries().count() as u16).into(),
            epoch: self.epoch.0.into(),
            seq: self.seq.0.into(),
            hlc: self.hlc.0.into(),
            offset: fields.offset.into(),
            len: fields.len_bytes.into(),
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
    pub fn decode(bytes: &mut Bytes) -> Result<Option<Self>, RecordError> {
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

impl<B: Body> Head<B> {
    /// Reads and verifies header and dependency entries from the front of `bytes`.
    /// `None`: more bytes are needed.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, RecordError> {
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

    fn from_raw(raw: &RawHeader, deps: CountVector, deps_len: usize) -> Result<Self, RecordError> {
        let malformed = |what| Err(RecordError::Malformed(what));
        let (payload_len, payload_crc) = (raw.payload_len.get(), raw.payload_crc.get());
        if raw.writer.get() >= limits::WRITERS_MAX || raw.object.get() >= B::OBJECTS_MAX {
            return malformed("writer or object out of range");
        }
        if raw.offset.get().checked_add(u64::from(raw.len.get())).is_none() {
            return malformed("extent beyond 2^64");
        }
        if raw.seq.get() == 0 || raw.epoch.get() == 0 {
            return malformed("seq or epoch 0");
        }
        if payload_len > limits::RECORD_PAYLOAD_MAX_BYTES {
            return malformed("payload too large");
        }
        if payload_len == 0 && payload_crc != 0 {
            return malformed("checksum without a payload");
        }
        let Some(role) = Role::of(raw.role) else { return malformed("unknown role") };
        let fields = BodyFields {
            flags: raw.flags,
            object: raw.object.get(),
            offset: raw.offset.get(),
            len_bytes: raw.len.get(),
        };
        // The data is attached by `finish`.
        let announced = Payload { data: Bytes::new(), crc: payload_crc };
        let payload = (payload_len > 0).then_some((payload_len, announced));
        let record = Record {
            writer: WriterId(raw.writer.get()),
            seq: Seq(raw.seq.get()),
            epoch: Epoch(raw.epoch.get()),
            hlc: Hlc(raw.hlc.get()),
            deps,
            body: B::from_parts(role, &fields, payload).map_err(RecordError::Malformed)?,
        };
        Ok(Self { record, len_bytes: fields.len_bytes, payload_len, payload_crc, deps_len })
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

    /// Bytes of what is changed.
    #[must_use]
    pub fn changed_bytes(&self) -> u32 {
        self.len_bytes
    }

    /// Bytes of the whole record.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        self.head_len() + self.payload_len as usize
    }

    /// The record without its data: what an index or a scan needs. A write's payload is empty.
    #[must_use]
    pub fn peek(&self) -> &Record<B> {
        &self.record
    }

    /// Attaches the payload after verifying it.
    pub fn finish(self, data: Bytes) -> Result<Record<B>, RecordError> {
        assert_eq!(data.len(), self.payload_len as usize);
        let mut record = self.record;
        if let Some(payload) = record.body.payload_mut() {
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
                body: DiskChange {
                    disk: DiskId(disk), offset: if done || idle { 0 } else { offset },
                    copy: done || copy && !idle, flushed: flushed && !done && (idle || !copy), effect,
                },
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
                prop_assert_eq!(Record::<DiskChange>::decode(&mut part), Ok(None));
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
            let decoded = Record::<DiskChange>::decode(&mut out.freeze());
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
            body: DiskChange {
                disk: DiskId(0),
                offset: 0,
                copy: true,
                flushed: false,
                effect: Effect::CopyDone,
            },
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
            body: DiskChange {
                disk: DiskId(4),
                offset: 0x1000,
                copy: true,
                flushed: false,
                effect: Effect::Write(Payload::new(Bytes::from_static(b"abc"))),
            },
        };
        let mut out = BytesMut::new();
        record.encode(&mut out);
        assert_eq!(out.len(), 56 + 16 + 3);
        assert_eq!(out[..8], [2, 0, 2, 0, 4, 0, 1, 0]);
        assert_eq!(out[8..16], 3u64.to_le_bytes());
        assert_eq!(out[16..24], 0x1122u64.to_le_bytes());
        assert_eq!(out[24..32], 0x55u64.to_le_bytes());
        assert_eq!(out[32..40], 0x1000u64.to_le_bytes());
        assert_eq!(out[40..48], [3, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!(out[48..52], crc32c(b"abc").to_le_bytes());
        assert_eq!(out[56..72], [1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(out[72..], *b"abc");
        let mut out = BytesMut::new();
        let after_flush = DiskChange { copy: false, flushed: true, ..record.body.clone() };
        Record { body: after_flush, ..record.clone() }.encode(&mut out);
        assert_eq!(out[..2], [1, 4]);
        let mut out = BytesMut::new();
        let of_both = DiskChange { flushed: true, ..record.body.clone() };
        Record { body: of_both, ..record }.encode(&mut out);
        let of_both = Record::<DiskChange>::decode(&mut out.freeze());
        assert!(matches!(of_both, Err(RecordError::Malformed(_))), "{of_both:?}");
    }
}
