//! The framing of the link.
//!
//! Every frame begins with 16 bytes (little-endian):
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `TLK1` |
//! | 4 | 1 | version of the frame format: 1 |
//! | 5 | 1 | kind: 1 control, 2 record, 3 part of a record, 4 control on the link of a store |
//! | 6 | 2 | channel: the attached member that it is about; 0 for the connection itself |
//! | 8 | 4 | length of the body |
//! | 12 | 4 | CRC-32C of bytes 0 to 11, and of the body unless it is a record |
//!
//! A control body is a message in postcard's encoding: a [`Message`] on the link of groups, another [`Control`] on that of
//! stores. A record body is a [`Record`], which
//! has checksums of its own that travel with it into the journal. A part's body begins with the
//! record's seq (8 bytes), the length of the record's encoding (4) and where in it the part begins
//! (4); the rest are bytes of the encoding ([`crate::part`]).

use crate::bounds;
use crate::ids::{Channel, Seq};
use crate::limits;
use crate::message::{Message, RefusalKind};
use crate::part::Part;
use crate::record::{self, Body, DiskChange, Record, RecordError};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use thiserror::Error;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"TLK1";
/// The version of the frame format.
pub const VERSION: u8 = 1;
/// Bytes of the frame header.
pub const HEADER_BYTES: usize = 16;

const KIND_CONTROL: u8 = 1;
const KIND_RECORD: u8 = 2;
const KIND_PART: u8 = 3;
/// The kind of control frames on the link of a store.
pub const KIND_STORE_CONTROL: u8 = 4;

/// Bytes of a part's body before the data.
pub const PART_HEAD_BYTES: usize = 16;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    channel: U16,
    body_len: U32,
    crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawPart {
    seq: U64,
    total_bytes: U32,
    at: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);
const _: () = assert!(size_of::<RawPart>() == PART_HEAD_BYTES);

/// The control messages of a link.
pub trait Control: Clone + Serialize + DeserializeOwned {
    /// The kind of their frames, by which the first frame of a connection says which link it is.
    const KIND: u8;

    /// The bounds of names, texts and lists. The error names the bound.
    fn check(&self) -> Result<(), &'static str>;
    /// The message with every text cut to its bound.
    fn capped(&self) -> Cow<'_, Self>;
    /// The message that ends what it is about, in the place of one that cannot be sent.
    fn invalid(reason: String) -> Self;
}

impl Control for Message {
    const KIND: u8 = KIND_CONTROL;

    fn check(&self) -> Result<(), &'static str> {
        bounds::check(self)
    }

    fn capped(&self) -> Cow<'_, Self> {
        bounds::capped(self)
    }

    fn invalid(reason: String) -> Self {
        Self::Refused { kind: RefusalKind::Invalid, reason }
    }
}

/// One frame.
#[derive(Clone, Debug, PartialEq)]
pub enum Frame<M = Message, B = DiskChange> {
    /// A control message.
    Control(Channel, M),
    /// A record of an attached member.
    Record(Channel, Record<B>),
    /// A part of a record of an attached member.
    Part(Channel, Part),
}

impl<M, B> Frame<M, B> {
    /// The attached member that it is about.
    #[must_use]
    pub fn channel(&self) -> Channel {
        match self {
            Self::Control(channel, _) | Self::Record(channel, _) | Self::Part(channel, _) => {
                *channel
            }
        }
    }
}

/// Why the link must be closed. Nothing of the damaged frame is used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    /// The peer speaks something else.
    #[error("the peer does not speak Tidelock (first bytes {0:02x?})")]
    Magic([u8; 4]),
    /// The peer's frame format is not ours.
    #[error("frame format {0} is not supported, only {VERSION}: upgrade the older side")]
    Version(u8),
    /// A kind that this version does not know.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// A body beyond its bound.
    #[error("frame body of {len_bytes} bytes is above the limit of {limit_bytes}")]
    TooLarge {
        /// As announced.
        len_bytes: u32,
        /// The bound.
        limit_bytes: u32,
    },
    /// Damaged on the way.
    #[error("frame checksum mismatch")]
    Checksum,
    /// A record frame whose body is not exactly one record.
    #[error("record frame: {0}")]
    Record(#[from] RecordError),
    /// A record frame whose length is not its record's.
    #[error("record frame of {body} bytes holds a record of {record}")]
    RecordLength {
        /// The frame's body.
        body: usize,
        /// The record.
        record: usize,
    },
    /// A part that is empty, or not inside a record that travels in parts.
    #[error("malformed part of a record")]
    Part,
    /// A control body that is not a message.
    #[error("malformed control message")]
    Message,
    /// A message with a name, text or list out of bounds.
    #[error("control message out of bounds: {0}")]
    Bounds(&'static str),
}

/// Appends a control frame. Texts are cut to their bound. A message that is larger than
/// [`limits::CONTROL_MAX_BYTES`] all the same becomes a refusal that says so: no message ends a process.
pub fn encode_control<M: Control>(channel: Channel, message: &M, out: &mut BytesMut) {
    let message = message.capped();
    let mut body = postcard::to_stdvec(&*message).unwrap_or_default();
    if body.is_empty() || body.len() > limits::CONTROL_MAX_BYTES as usize {
        let reason = format!("a control message of {} bytes cannot be sent", body.len());
        body = postcard::to_stdvec(&M::invalid(reason)).unwrap_or_default();
    }
    let header = header(M::KIND, channel, body.len(), &body);
    out.reserve(HEADER_BYTES + body.len());
    out.put_slice(header.as_bytes());
    out.put_slice(&body);
}

/// Appends the frame header, the record header and its dependency entries. The payload must
/// follow on the link, uncopied.
pub fn encode_record_head(channel: Channel, record: &Record<impl Body>, out: &mut BytesMut) {
    out.put_slice(header(KIND_RECORD, channel, record.encoded_len(), &[]).as_bytes());
    record.encode_head(out);
}

/// Appends the frame of a part.
pub fn encode_part(channel: Channel, part: &Part, out: &mut BytesMut) {
    let head = RawPart {
        seq: part.seq.0.into(),
        total_bytes: part.total_bytes.into(),
        at: part.at.into(),
    };
    let body_len = PART_HEAD_BYTES + part.data.len();
    out.reserve(HEADER_BYTES + body_len);
    let start = out.len();
    let mut header = header(KIND_PART, channel, body_len, &[]);
    out.put_slice(header.as_bytes());
    out.put_slice(head.as_bytes());
    out.put_slice(&part.data);
    header.crc = frame_crc(&header, &out[start + HEADER_BYTES..]).into();
    out[start..start + HEADER_BYTES].copy_from_slice(header.as_bytes());
}

fn header(kind: u8, channel: Channel, body_len: usize, body: &[u8]) -> RawHeader {
    let mut header = RawHeader {
        magic: MAGIC,
        version: VERSION,
        kind,
        channel: channel.0.into(),
        body_len: (body_len as u32).into(),
        crc: 0.into(),
    };
    header.crc = frame_crc(&header, body).into();
    header
}

fn frame_crc(header: &RawHeader, body: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&header.as_bytes()[..HEADER_BYTES - 4]);
    digest.update(body);
    digest.finalize() as u32
}

/// Takes the next frame of the link of groups off the front of `input`. `None`: read at least [`bytes_missing`] more.
/// Payloads share the buffer.
pub fn decode(input: &mut BytesMut) -> Result<Option<Frame>, FrameError> {
    decode_of(input)
}

/// The same of any link.
pub fn decode_of<M: Control, B: Body>(
    input: &mut BytesMut,
) -> Result<Option<Frame<M, B>>, FrameError> {
    let Some(raw) = checked_header(input, M::KIND)? else { return Ok(None) };
    let body_len = raw.body_len.get() as usize;
    if input.len() < HEADER_BYTES + body_len {
        return Ok(None);
    }
    let channel = Channel(raw.channel.get());
    if raw.kind == M::KIND {
        if frame_crc(&raw, &input[HEADER_BYTES..HEADER_BYTES + body_len]) != raw.crc.get() {
            return Err(FrameError::Checksum);
        }
        input.advance(HEADER_BYTES);
        let body = input.split_to(body_len);
        let message = match postcard::take_from_bytes::<M>(&body) {
            Ok((message, [])) => message,
            _ => return Err(FrameError::Message),
        };
        message.check().map_err(FrameError::Bounds)?;
        return Ok(Some(Frame::Control(channel, message)));
    }
    if raw.kind == KIND_PART {
        if frame_crc(&raw, &input[HEADER_BYTES..HEADER_BYTES + body_len]) != raw.crc.get() {
            return Err(FrameError::Checksum);
        }
        input.advance(HEADER_BYTES);
        let part = decode_part(input.split_to(body_len).freeze()).ok_or(FrameError::Part)?;
        return Ok(Some(Frame::Part(channel, part)));
    }
    input.advance(HEADER_BYTES);
    let mut body = input.split_to(body_len).freeze();
    let record = Record::decode(&mut body)?;
    match record {
        Some(record) if body.is_empty() => Ok(Some(Frame::Record(channel, record))),
        Some(record) => {
            Err(FrameError::RecordLength { body: body_len, record: record.encoded_len() })
        }
        None => Err(FrameError::RecordLength { body: body_len, record: record::HEADER_BYTES }),
    }
}

fn decode_part(mut body: Bytes) -> Option<Part> {
    let (raw, _) = RawPart::read_from_prefix(&body).ok()?;
    body.advance(PART_HEAD_BYTES);
    let (seq, total_bytes, at) = (Seq(raw.seq.get()), raw.total_bytes.get(), raw.at.get());
    let end = u64::from(at) + body.len() as u64;
    let is_of_parts =
        (limits::WHOLE_RECORD_MAX_BYTES + 1..=limits::RECORD_MAX_BYTES).contains(&total_bytes);
    let is_part = seq != Seq::ZERO && !body.is_empty() && end <= u64::from(total_bytes);
    (is_of_parts && is_part).then_some(Part { seq, total_bytes, at, data: body })
}

/// The kind of the frame at the front of `input`. `None`: too little of it has arrived.
#[must_use]
pub fn kind(input: &[u8]) -> Option<u8> {
    input.get(MAGIC.len() + 1).copied()
}

/// How many bytes are missing until the frame at the front of `input` is whole.
#[must_use]
pub fn bytes_missing(input: &[u8]) -> usize {
    let need = match RawHeader::read_from_prefix(input) {
        Ok((raw, _)) => {
            HEADER_BYTES + (raw.body_len.get().min(limits::FRAME_BODY_MAX_BYTES)) as usize
        }
        Err(_) => HEADER_BYTES,
    };
    need.saturating_sub(input.len())
}

/// The header, with every field that can be judged without the body judged.
fn checked_header(input: &[u8], control: u8) -> Result<Option<RawHeader>, FrameError> {
    // A wrong magic is told from its first bytes: a peer that speaks something else may never
    // send sixteen.
    let seen = input.len().min(MAGIC.len());
    if input[..seen] != MAGIC[..seen] {
        let mut magic = [0; 4];
        magic[..seen].copy_from_slice(&input[..seen]);
        return Err(FrameError::Magic(magic));
    }
    let Ok((raw, _)) = RawHeader::read_from_prefix(input) else { return Ok(None) };
    if raw.version != VERSION {
        return Err(FrameError::Version(raw.version));
    }
    let limit_bytes = match raw.kind {
        kind if kind == control => limits::CONTROL_MAX_BYTES,
        KIND_RECORD => limits::WHOLE_RECORD_MAX_BYTES,
        KIND_PART => PART_HEAD_BYTES as u32 + limits::PART_MAX_BYTES,
        kind => return Err(FrameError::Kind(kind)),
    };
    if raw.body_len.get() > limit_bytes {
        return Err(FrameError::TooLarge { len_bytes: raw.body_len.get(), limit_bytes });
    }
    if raw.kind == KIND_RECORD && frame_crc(&raw, &[]) != raw.crc.get() {
        return Err(FrameError::Checksum);
    }
    Ok(Some(raw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::RefusalKind;
    use crate::record::tests::any_record;
    use proptest::prelude::*;

    fn encoded(channel: Channel, record: &Record) -> BytesMut {
        let mut out = BytesMut::new();
        encode_record_head(channel, record, &mut out);
        out.put_slice(record.payload().map_or(&[][..], |p| p.data()));
        out
    }

    #[test]
    fn control_survives_in_any_pieces_and_damage_is_noticed() {
        let message = Message::Refused { kind: RefusalKind::Fenced, reason: "epoch 2".into() };
        let mut bytes = BytesMut::new();
        encode_control(Channel(7), &message, &mut bytes);
        for cut in 0..bytes.len() {
            let mut part = BytesMut::from(&bytes[..cut]);
            assert_eq!(decode(&mut part), Ok(None));
            assert!(bytes_missing(&part) > 0 && bytes_missing(&part) <= bytes.len() - cut);
        }
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert!(!matches!(decode(&mut bad), Ok(Some(_))), "flip at {at}.{bit}");
            }
        }
        assert_eq!(decode(&mut bytes), Ok(Some(Frame::Control(Channel(7), message))));
        assert!(bytes.is_empty());
    }

    #[test]
    fn bounds_hold_at_the_limit_and_not_one_past_it() {
        for (kind, limit_bytes) in [
            (KIND_CONTROL, limits::CONTROL_MAX_BYTES),
            (KIND_RECORD, limits::WHOLE_RECORD_MAX_BYTES),
            (KIND_PART, PART_HEAD_BYTES as u32 + limits::PART_MAX_BYTES),
        ] {
            let mut raw = header(kind, Channel(1), limit_bytes as usize, &[]);
            assert_eq!(decode(&mut BytesMut::from(raw.as_bytes())), Ok(None));
            raw.body_len = (limit_bytes + 1).into();
            assert!(matches!(
                decode(&mut BytesMut::from(raw.as_bytes())),
                Err(FrameError::TooLarge { .. })
            ));
        }
    }

    #[test]
    fn parts_survive_damage_is_noticed_and_bounds_hold() {
        let least = limits::WHOLE_RECORD_MAX_BYTES + 1;
        let decoded = |part: &Part| {
            let mut bytes = BytesMut::new();
            encode_part(Channel(3), part, &mut bytes);
            decode(&mut bytes)
        };
        let good = Part { seq: Seq(7), total_bytes: least, at: 65, data: vec![5; 999].into() };
        assert_eq!(decoded(&good), Ok(Some(Frame::Part(Channel(3), good.clone()))));
        let last = Part {
            at: limits::RECORD_MAX_BYTES - 999,
            total_bytes: limits::RECORD_MAX_BYTES,
            ..good.clone()
        };
        assert_eq!(decoded(&last), Ok(Some(Frame::Part(Channel(3), last.clone()))));
        for bad in [
            Part { seq: Seq(0), ..good.clone() },
            Part { data: Bytes::new(), ..good.clone() },
            Part { total_bytes: least - 1, ..good.clone() },
            Part { total_bytes: limits::RECORD_MAX_BYTES + 1, ..good.clone() },
            Part { at: least - 998, ..good.clone() },
            Part { at: u32::MAX, ..good.clone() },
        ] {
            assert_eq!(decoded(&bad), Err(FrameError::Part), "{bad:?}");
        }
        let mut bytes = BytesMut::new();
        encode_part(Channel(3), &good, &mut bytes);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 4;
            assert!(!matches!(decode(&mut bad), Ok(Some(_))), "flip at {at}");
        }
    }

    #[test]
    fn another_protocol_is_told_from_its_first_byte() {
        assert!(matches!(decode(&mut BytesMut::from(&b"G"[..])), Err(FrameError::Magic(_))));
    }

    proptest! {
        #[test]
        fn records_survive(records in prop::collection::vec(any_record(), 1..8)) {
            let mut bytes = BytesMut::new();
            for r in &records {
                bytes.extend_from_slice(&encoded(Channel(3), r));
            }
            for r in records {
                prop_assert_eq!(decode(&mut bytes), Ok(Some(Frame::Record(Channel(3), r))));
            }
            prop_assert_eq!(decode(&mut bytes), Ok(None));
        }

        #[test]
        fn garbage_never_panics(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for (at, m) in MAGIC.iter().enumerate() {
                if let Some(b) = bytes.get_mut(at) { *b = *m; }
            }
            let _ = decode(&mut BytesMut::from(&bytes[..]));
        }
    }
}
