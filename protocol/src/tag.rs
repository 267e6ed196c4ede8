//! Tags: what a packet between two members of a group carries (PipeCloud 4.2), byte by byte.
//!
//! The kernel programs under `netfilter/bpf/` write and read the same bytes; this is what they are
//! tested against.
//!
//! # The bytes
//! IPv4: one option, the first of the header, a multiple of four bytes long.
//! ```text
//! 0        type      158 by default (RFC 4727, experimental; its first bit has it copied into fragments)
//! 1        length    of the whole option
//! 2        form      0x11: version 1, vector; 0x12: version 1, HLC
//! 3        context   a digest of the group and the order of its writers
//! 4 ..     entries   vector: the low 32 bits of each writer's entry, big endian, in the order of the
//!                    group's writers; HLC: 64 bits, big endian
//! .. end   seal      64 bits, big endian
//! ```
//! IPv6: a destination options header right behind the fixed header, of this one option and filling.
//! ```text
//! 0        next header            1        length of this header / 8 - 1
//! 2        type 0x1e              3        length of bytes 4 to the end of the seal
//! 4        form                   5        context                  6 ..  entries, seal
//! then PadN up to a multiple of 8
//! ```
//!
//! # Why 32 bits are enough
//! A sender writes max(P, C), not P: what C covers is nobody's worry any more, and an entry of a
//! writer that it has not heard of for long is then not a number from long ago. So each entry e of
//! writer w lies between the sender's C and w's newest seq. The receiver's base b = max(P, C) does
//! too, with its own C. The two differ by less than what w has in its backlog, plus what it writes
//! while C travels. Both are bounded far below 2^31, and [`rebuild`] is right as long as |e - b| < 2^31.
//! A host that has never heard C, or whose daemon has been away or cut off from the backup for so
//! long that 2^31 writes might have gone by, neither tags nor believes tags. Of a writer that was removed C has the greatest
//! number there is, and whatever a tag says of it says nothing new.
//!
//! # The seal
//! SipHash-2-4 with the group's key ([`TagKey`]) of: form, context, and length of the entries (one byte each, then zeros up to
//! 8 bytes); the packet's source and destination, 16 bytes each (of IPv4 as ::ffff:a.b.c.d); the entries. So nobody can make a
//! tag who has not the key, nor use one for another packet's addresses. Whoever sends one again says what was true. The
//! identification of an IPv4 packet is not in it: the segments of one large packet differ in that.
//!
//! The key changes with each period of the backup's clock and with each epoch. The backup tells three keys at a time
//! ([`TagKeys`]): a host seals with the key of the current period, and believes the seals of the period before and of the
//! one after it as well. So two hosts understand each other while one of them has heard of a new period and the other one
//! has not, and no packet that is under way then is lost.
//!
//! # What is believed of an entry
//! The backup tells with the keys how far each writer can be ([`TagTerms::reachable`]). A vector with an entry beyond that,
//! and beyond what the receiver knows already, is refused, whoever has sealed it.
//!
//! # What the context is for
//! Two hosts whose configurations name the group's writers in different orders must not merge each other's entries.

use crate::bounds::SEQ_OF_REMOVED;
use crate::hlc::Hlc;
use crate::ids::{Epoch, Seq, WriterId};
use crate::limits::WRITERS_MAX;
use crate::record::crc32c;
use crate::vector::CountVector;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// RFC 4727's experimental IPv4 option, copied into fragments.
pub const IPV4_OPTION: u8 = 158;
/// RFC 4727's experimental IPv6 option that is skipped by whoever does not know it.
pub const IPV6_OPTION: u8 = 0x1e;
/// An IPv4 header holds this many bytes of options.
pub const IPV4_OPTIONS_MAX_BYTES: usize = 40;
/// The most writers of a vector in an IPv4 option.
pub const IPV4_WRITERS_MAX: u16 = 7;
/// The most writers of a vector in an IPv6 option, whose length is one byte.
pub const IPV6_WRITERS_MAX: u16 = 61;

const FORM_VECTOR: u8 = 0x11;
const FORM_HLC: u8 = 0x12;
const ENTRY_BYTES: usize = 4;
const HLC_BYTES: usize = 8;
/// Form and context.
const BODY_HEAD_BYTES: usize = 2;
const SEAL_BYTES: usize = 8;
/// Type and length.
const OPTION_HEAD_BYTES: usize = 2;
/// Next header and length.
const IPV6_HEAD_BYTES: usize = 2;

const IPV4_END: u8 = 0;
const IPV4_NOTHING: u8 = 1;
const IPV6_PAD_1: u8 = 0;
const IPV6_PAD_N: u8 = 1;

const _: () = assert!(
    OPTION_HEAD_BYTES + BODY_HEAD_BYTES + IPV4_WRITERS_MAX as usize * ENTRY_BYTES + SEAL_BYTES
        == IPV4_OPTIONS_MAX_BYTES
);
const _: () =
    assert!(BODY_HEAD_BYTES + IPV6_WRITERS_MAX as usize * ENTRY_BYTES + SEAL_BYTES <= 255);
const _: () = assert!(IPV6_WRITERS_MAX < WRITERS_MAX);

/// What a group's tags say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One entry for each of the group's writers.
    Vector {
        /// How many writers the group has.
        writers: u16,
    },
    /// One time of the hybrid logical clock, for any number of writers.
    Hlc,
}

impl Form {
    fn code(self) -> u8 {
        match self {
            Form::Vector { .. } => FORM_VECTOR,
            Form::Hlc => FORM_HLC,
        }
    }

    fn entries_bytes(self) -> usize {
        match self {
            Form::Vector { writers } => usize::from(writers) * ENTRY_BYTES,
            Form::Hlc => HLC_BYTES,
        }
    }
}

/// What a tag said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stamp {
    /// What the sender depended on, or less than what is committed.
    Vector(CountVector),
    /// The sender's time.
    Hlc(Hlc),
}

/// Why a tag is not believed: what its packet depends on is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TagError {
    /// An option's length is 0, or reaches beyond the header.
    #[error("an option does not end within its header")]
    BadOptions,
    /// More than one tag.
    #[error("more than one tag")]
    Twice,
    /// Not as long as the group's tags are.
    #[error("a tag of {found} bytes where the group's have {wanted}")]
    WrongLength {
        /// Its length.
        found: usize,
        /// What it should have been.
        wanted: usize,
    },
    /// Another version, or another form than the group's.
    #[error("a tag of form {0:#04x} is not the group's")]
    WrongForm(u8),
    /// Made with other writers in mind.
    #[error("a tag of another group, or of one whose writers are in another order")]
    WrongContext,
    /// Damaged, or made by somebody who has not the group's key.
    #[error("a tag whose seal is wrong")]
    WrongSeal,
    /// An entry that no writer can have.
    #[error("a tag with an entry below 0")]
    BelowZero,
    /// An entry beyond what the backup says that its writer can have.
    #[error("a tag with an entry beyond what the backup says can exist")]
    OutOfReach,
}

/// How long a key is in use, by the backup's clock.
pub const KEY_PERIOD_MS: u64 = 24 * 60 * 60 * 1000;

/// A key of SipHash: the key that seals a group's tags during one period, or the group's secret, from which the periods'
/// keys are derived. Only the backup has the secret. It sends the periods' keys to the group's hosts and to nobody else.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagKey(pub [u64; 2]);

impl TagKey {
    /// The key of a period in an epoch, from the group's secret.
    #[must_use]
    pub fn of(secret: TagKey, epoch: Epoch, period: u64) -> TagKey {
        let (epoch, period) = (epoch.0.to_le_bytes(), period.to_le_bytes());
        TagKey([0u8, 1].map(|nth| sip(secret, &[b"tidelock tag", &[nth][..], &epoch, &period])))
    }
}

/// The keys that are believed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagKeys {
    /// Number of the current period.
    pub period: u64,
    /// The key of the period before.
    pub previous: TagKey,
    /// The key that tags are sealed with.
    pub current: TagKey,
    /// The key of the period to come, which another host may have heard of.
    pub next: TagKey,
}

impl TagKeys {
    /// The keys at a time of the backup's clock, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn at(secret: TagKey, epoch: Epoch, unix_ms: u64) -> TagKeys {
        let period = unix_ms / KEY_PERIOD_MS;
        let of = |period| TagKey::of(secret, epoch, period);
        TagKeys {
            period,
            previous: of(period.wrapping_sub(1)),
            current: of(period),
            next: of(period + 1),
        }
    }

    /// One key for all periods.
    #[must_use]
    pub fn only(key: TagKey) -> TagKeys {
        TagKeys { period: 0, previous: key, current: key, next: key }
    }
}

/// Keys and bounds of a group's tags. The backup sends them to each host of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagTerms {
    /// Keys of the tags' seals.
    pub keys: TagKeys,
    /// The greatest seq of each writer that can exist. A writer that was removed has the greatest seq there is.
    pub reachable: CountVector,
}

/// Whether each entry of P is in C, or is one that can exist. A member with another P sends no tags: they would be refused.
#[must_use]
pub fn is_within_reach(
    pending: &CountVector,
    committed: &CountVector,
    reachable: &CountVector,
) -> bool {
    pending
        .entries()
        .all(|(writer, seq)| seq <= committed.get(writer) || seq <= reachable.get(writer))
}

impl std::fmt::Debug for TagKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TagKey(..)")
    }
}

/// SipHash-2-4.
fn sip(key: TagKey, parts: &[&[u8]]) -> u64 {
    use std::hash::Hasher;
    #[expect(
        deprecated,
        reason = "it is SipHash-2-4 with a key, which its successor does not promise"
    )]
    let mut hasher = std::hash::SipHasher::new_with_keys(key.0[0], key.0[1]);
    parts.iter().for_each(|part| hasher.write(part));
    hasher.finish()
}

/// How a group writes its tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codec {
    form: Form,
    context: u8,
    keys: TagKeys,
    source: [u8; 16],
    destination: [u8; 16],
}

impl Codec {
    /// For a group with these writers, in the order of their ids.
    #[must_use]
    pub fn new<'a>(form: Form, group: &str, writers: impl IntoIterator<Item = &'a str>) -> Codec {
        let mut text = group.to_owned();
        for writer in writers {
            text.push('\n');
            text.push_str(writer);
        }
        let crc = crc32c(text.as_bytes());
        let context = crc.to_le_bytes().iter().fold(0, |x, b| x ^ b);
        let keys = TagKeys::only(TagKey([0; 2]));
        Codec { form, context, keys, source: [0; 16], destination: [0; 16] }
    }

    /// For packets from one address to another, with the group's keys.
    #[must_use]
    pub fn sealing(self, keys: TagKeys, source: IpAddr, destination: IpAddr) -> Codec {
        let of = |address| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        Codec { keys, source: of(source), destination: of(destination), ..self }
    }

    /// Whether the other one is of a group with the same writers in the same order, whatever their keys are.
    #[must_use]
    pub fn is_of_same_group(&self, other: &Codec) -> bool {
        (self.form, self.context) == (other.form, other.context)
    }

    /// What its tags say.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// The digest of the group and its writers.
    #[must_use]
    pub fn context(&self) -> u8 {
        self.context
    }

    /// The length of the IPv4 option.
    #[must_use]
    pub fn ipv4_bytes(&self) -> usize {
        OPTION_HEAD_BYTES + self.body_bytes()
    }

    fn body_bytes(&self) -> usize {
        BODY_HEAD_BYTES + self.form.entries_bytes() + SEAL_BYTES
    }

    /// The length of the IPv6 destination options header.
    #[must_use]
    pub fn ipv6_bytes(&self) -> usize {
        (IPV6_HEAD_BYTES + self.ipv4_bytes()).next_multiple_of(8)
    }

    /// Whether an IPv4 header can hold it.
    #[must_use]
    pub fn fits_ipv4(&self) -> bool {
        self.ipv4_bytes() <= IPV4_OPTIONS_MAX_BYTES
    }

    /// The IPv4 option.
    pub fn encode_ipv4(&self, option: u8, stamp: &Stamp, out: &mut Vec<u8>) {
        out.push(option);
        out.push(u8::try_from(self.ipv4_bytes()).expect("it fits IPv4"));
        self.encode_body(stamp, out);
    }

    /// The IPv6 destination options header.
    pub fn encode_ipv6(&self, next_header: u8, stamp: &Stamp, out: &mut Vec<u8>) {
        let start = out.len();
        out.push(next_header);
        out.push(u8::try_from(self.ipv6_bytes() / 8 - 1).expect("at most 61 writers"));
        out.push(IPV6_OPTION);
        out.push(u8::try_from(self.body_bytes()).expect("at most 61 writers"));
        self.encode_body(stamp, out);
        let filling = start + self.ipv6_bytes() - out.len();
        if filling > 0 {
            // Entries and seal leave room for 2 or 6 bytes, never for one alone.
            out.push(IPV6_PAD_N);
            out.push(u8::try_from(filling - 2).expect("less than 8"));
            out.resize(start + self.ipv6_bytes(), 0);
        }
    }

    fn encode_body(&self, stamp: &Stamp, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([self.form.code(), self.context]);
        match (self.form, stamp) {
            (Form::Vector { writers }, Stamp::Vector(vector)) => {
                for writer in 0..writers {
                    out.extend((vector.get(WriterId(writer)).0 as u32).to_be_bytes());
                }
            }
            (Form::Hlc, Stamp::Hlc(hlc)) => out.extend(hlc.0.to_be_bytes()),
            _ => panic!("a stamp of another form than the group's"),
        }
        out.extend(self.seal(self.keys.current, &out[start..]));
    }

    /// Of form, context and entries.
    fn seal(&self, key: TagKey, body: &[u8]) -> [u8; SEAL_BYTES] {
        let entries = &body[BODY_HEAD_BYTES..];
        let mut head = [0; 8];
        head[..BODY_HEAD_BYTES].copy_from_slice(&body[..BODY_HEAD_BYTES]);
        head[BODY_HEAD_BYTES] = u8::try_from(entries.len()).expect("at most 61 writers");
        sip(key, &[&head, &self.source, &self.destination, entries]).to_be_bytes()
    }

    /// Checks and decodes a tag. `body`: the tag from its form byte on. `base`: the receiving member's max(P, C).
    /// `reachable`: [`TagTerms::reachable`].
    pub fn decode(
        &self,
        body: &[u8],
        base: &CountVector,
        reachable: &CountVector,
    ) -> Result<Stamp, TagError> {
        let wanted = self.body_bytes();
        if body.len() != wanted {
            return Err(TagError::WrongLength { found: body.len(), wanted });
        }
        if body[0] != self.form.code() {
            return Err(TagError::WrongForm(body[0]));
        }
        if body[1] != self.context {
            return Err(TagError::WrongContext);
        }
        let (body, seal) = body.split_at(wanted - SEAL_BYTES);
        let TagKeys { previous, current, next, .. } = self.keys;
        if ![current, previous, next].iter().any(|key| self.seal(*key, body) == seal) {
            return Err(TagError::WrongSeal);
        }
        let entries = &body[BODY_HEAD_BYTES..];
        match self.form {
            Form::Vector { writers } => {
                let mut vector = CountVector::new();
                for (writer, low) in (0..writers).zip(entries.chunks_exact(ENTRY_BYTES)) {
                    let low = u32::from_be_bytes(low.try_into().expect("four bytes"));
                    let base = base.get(WriterId(writer)).0;
                    let seq = rebuild(low, base).ok_or(TagError::BelowZero)?;
                    if seq > base && seq > reachable.get(WriterId(writer)).0 {
                        return Err(TagError::OutOfReach);
                    }
                    vector.raise(WriterId(writer), Seq(seq));
                }
                Ok(Stamp::Vector(vector))
            }
            Form::Hlc => {
                let hlc = u64::from_be_bytes(entries.try_into().expect("eight bytes"));
                Ok(Stamp::Hlc(Hlc(hlc)))
            }
        }
    }
}

/// The number with these low bits that lies next to `base`; `None` if there is none. Nothing is to be learnt of a writer
/// that was removed ([`SEQ_OF_REMOVED`]): a sender that has not heard of that yet writes an entry of before.
#[must_use]
pub fn rebuild(low: u32, base: u64) -> Option<u64> {
    if base == SEQ_OF_REMOVED.0 {
        return Some(base);
    }
    let ahead = low.wrapping_sub(base as u32).cast_signed();
    base.checked_add_signed(ahead.into())
}

/// The one tag among the options of an IPv4 header, from its form byte on.
pub fn find_ipv4(options: &[u8], option: u8) -> Result<Option<&[u8]>, TagError> {
    let (mut rest, mut tag) = (options, None);
    loop {
        let size = match rest {
            [] | [IPV4_END, ..] => return Ok(tag),
            [IPV4_NOTHING, ..] => 1,
            [_, len, ..] if *len >= 2 => usize::from(*len),
            _ => return Err(TagError::BadOptions),
        };
        let this = rest.get(..size).ok_or(TagError::BadOptions)?;
        if this[0] == option && tag.replace(&this[OPTION_HEAD_BYTES..]).is_some() {
            return Err(TagError::Twice);
        }
        rest = &rest[size..];
    }
}

/// The one tag among the options of an IPv6 destination options header (from its first option
/// on), from its form byte on.
pub fn find_ipv6(options: &[u8]) -> Result<Option<&[u8]>, TagError> {
    let (mut rest, mut tag) = (options, None);
    loop {
        let size = match rest {
            [] => return Ok(tag),
            [IPV6_PAD_1, ..] => 1,
            [_, len, ..] => OPTION_HEAD_BYTES + usize::from(*len),
            _ => return Err(TagError::BadOptions),
        };
        let this = rest.get(..size).ok_or(TagError::BadOptions)?;
        if this[0] == IPV6_OPTION && tag.replace(&this[OPTION_HEAD_BYTES..]).is_some() {
            return Err(TagError::Twice);
        }
        rest = &rest[size..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv4Addr;

    const KEY: TagKey = TagKey([1, 2]);
    const SOURCE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const DESTINATION: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

    fn vector(seqs: &[u64]) -> CountVector {
        (0..).map(WriterId).zip(seqs.iter().map(|s| Seq(*s))).collect()
    }

    fn everything() -> CountVector {
        (0..WRITERS_MAX).map(|writer| (WriterId(writer), Seq(u64::MAX))).collect()
    }

    fn codec(form: Form) -> Codec {
        Codec::new(form, "shop", ["db", "web"]).sealing(
            TagKeys::only(KEY),
            SOURCE.into(),
            DESTINATION.into(),
        )
    }

    #[test]
    fn the_bytes_are_as_documented() {
        let codec = codec(Form::Vector { writers: 2 });
        let mut v4 = vec![];
        codec.encode_ipv4(IPV4_OPTION, &Stamp::Vector(vector(&[0x1_0203_0405, 7])), &mut v4);
        let context = codec.context();
        let with_seal = |bytes: &[u8], body: usize, end: &[u8]| {
            let mut message = [&bytes[body..body + 2], &[8, 0, 0, 0, 0, 0]].concat();
            message.extend(SOURCE.to_ipv6_mapped().octets());
            message.extend(DESTINATION.to_ipv6_mapped().octets());
            message.extend(&bytes[body + 2..]);
            [bytes, &sip(KEY, &[&message]).to_be_bytes(), end].concat()
        };
        assert_eq!(v4, with_seal(&[158, 20, 0x11, context, 2, 3, 4, 5, 0, 0, 0, 7], 2, &[]));
        let mut v6 = vec![];
        codec.encode_ipv6(6, &Stamp::Vector(vector(&[0x1_0203_0405, 7])), &mut v6);
        let bytes = [6, 2, 0x1e, 18, 0x11, context, 2, 3, 4, 5, 0, 0, 0, 7];
        assert_eq!(v6, with_seal(&bytes, 4, &[1, 0]));
        let hlc = Codec { form: Form::Hlc, ..codec };
        let mut v4 = vec![];
        hlc.encode_ipv4(94, &Stamp::Hlc(Hlc(0x0102_0304_0506_0708)), &mut v4);
        assert_eq!(v4, with_seal(&[94, 20, 0x12, context, 1, 2, 3, 4, 5, 6, 7, 8], 2, &[]));
    }

    /// The first and the last but one of the vectors of its authors: key 00 to 0f, the bytes 00, 01 and so on.
    #[test]
    fn the_seal_is_siphash_2_4() {
        let key = TagKey([0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908]);
        assert_eq!(sip(key, &[]), 0x726f_db47_dd0e_0e31);
        let bytes: Vec<u8> = (0..15).collect();
        assert_eq!(sip(key, &[&bytes[..4], &bytes[4..]]), 0xa129_ca61_49be_45e5);
    }

    #[test]
    fn a_tag_holds_for_one_key_and_one_way_only() {
        let (codec, stamp) = (codec(Form::Hlc), Stamp::Hlc(Hlc(7)));
        let mut option = vec![];
        codec.encode_ipv4(IPV4_OPTION, &stamp, &mut option);
        let by = |key, source: Ipv4Addr, destination: Ipv4Addr| {
            let codec = codec.sealing(TagKeys::only(key), source.into(), destination.into());
            codec.decode(&option[2..], &vector(&[]), &everything())
        };
        assert_eq!(by(KEY, SOURCE, DESTINATION), Ok(stamp));
        let (secret, epoch) = (TagKey([7, 8]), Epoch(1));
        let other = TagKey::of(secret, epoch, 5);
        for wrong in
            [by(other, SOURCE, DESTINATION), by(KEY, DESTINATION, SOURCE), by(KEY, SOURCE, SOURCE)]
        {
            assert_eq!(wrong, Err(TagError::WrongSeal));
        }
        assert_ne!(other, TagKey::of(secret, Epoch(2), 5));
        assert_ne!(other, TagKey::of(secret, epoch, 6));
        assert_ne!(other, TagKey::of(TagKey([7, 9]), epoch, 5));
        assert_ne!(other.0[0], other.0[1]);
        assert!(!format!("{other:?}").contains(&other.0[0].to_string()));
    }

    /// Whichever of two hosts hears of a new period first.
    #[test]
    fn hosts_understand_each_other_while_one_has_not_heard_of_the_new_key() {
        let form = Form::Vector { writers: 2 };
        let at = |unix_ms| {
            let keys = TagKeys::at(TagKey([7, 8]), Epoch(1), unix_ms);
            codec(form).sealing(keys, SOURCE.into(), DESTINATION.into())
        };
        let noon = KEY_PERIOD_MS * 20_000;
        let (before, after, later) = (at(noon - 1), at(noon), at(noon + KEY_PERIOD_MS));
        let stamp = Stamp::Vector(vector(&[1, 2]));
        let heard = |sender: Codec, receiver: Codec| {
            let mut option = vec![];
            sender.encode_ipv4(IPV4_OPTION, &stamp, &mut option);
            receiver.decode(&option[2..], &vector(&[]), &everything())
        };
        assert_ne!(before.keys.current, after.keys.current);
        for (sender, receiver) in [(before, after), (after, before), (after, later)] {
            assert_eq!(heard(sender, receiver), Ok(stamp.clone()));
        }
        assert_eq!(heard(before, later), Err(TagError::WrongSeal), "its time is over");
        assert_eq!(heard(later, before), Err(TagError::WrongSeal));
        assert_eq!(at(0).keys.current, TagKey::of(TagKey([7, 8]), Epoch(1), 0));
    }

    #[test]
    fn an_entry_beyond_what_can_exist_is_refused() {
        let codec = codec(Form::Vector { writers: 2 });
        let heard = |seqs: &[u64], base: &[u64]| {
            let mut option = vec![];
            codec.encode_ipv4(IPV4_OPTION, &Stamp::Vector(vector(seqs)), &mut option);
            let known = codec.decode(&option[2..], &vector(base), &vector(&[100, u64::MAX]));
            known.map(|_| ())
        };
        assert_eq!(heard(&[100, 1 << 20], &[9, 9]), Ok(()));
        assert_eq!(heard(&[101, 9], &[9, 9]), Err(TagError::OutOfReach));
        assert_eq!(heard(&[101, 9], &[101, 9]), Ok(()), "it is known already");
        let within = |pending: &[u64], committed: &[u64]| {
            is_within_reach(&vector(pending), &vector(committed), &vector(&[100, u64::MAX]))
        };
        assert!(within(&[100, 1 << 60], &[9, 9]) && within(&[101, 9], &[101, 9]));
        assert!(!within(&[101, 9], &[100, 9]));
    }

    #[test]
    fn seven_writers_fill_an_ipv4_header_and_an_eighth_does_not_fit() {
        assert_eq!(codec(Form::Vector { writers: 7 }).ipv4_bytes(), IPV4_OPTIONS_MAX_BYTES);
        assert!(!codec(Form::Vector { writers: 8 }).fits_ipv4());
    }

    #[test]
    fn another_order_of_writers_is_another_context() {
        let form = Form::Vector { writers: 2 };
        let (ours, theirs) = (codec(form), Codec::new(form, "shop", ["web", "db"]));
        let mut option = vec![];
        theirs.encode_ipv4(IPV4_OPTION, &Stamp::Vector(vector(&[1, 2])), &mut option);
        assert_eq!(
            ours.decode(&option[2..], &vector(&[]), &everything()),
            Err(TagError::WrongContext)
        );
    }

    #[test]
    fn entries_wrap_and_none_is_below_zero() {
        assert_eq!(rebuild(5, u64::from(u32::MAX)), Some((1 << 32) + 5));
        assert_eq!(rebuild(u32::MAX, 1 << 32), Some((1 << 32) - 1));
        assert_eq!(rebuild(0, 0), Some(0));
        assert_eq!(rebuild(u32::MAX, 3), None);
        assert_eq!(rebuild(3, u64::MAX - 1), None, "nor beyond 64 bits");
        for low in [0, 3, 1 << 31, u32::MAX] {
            assert_eq!(rebuild(low, u64::MAX), Some(u64::MAX), "of a removed writer");
        }
    }

    #[test]
    fn options_that_do_not_end_are_refused() {
        fn find(options: &[u8]) -> Result<Option<&[u8]>, TagError> {
            find_ipv4(options, IPV4_OPTION)
        }
        assert_eq!(find(&[]), Ok(None));
        assert_eq!(find(&[1, 1, 158, 4, 9, 9, 0, 0]), Ok(Some([9u8, 9].as_slice())));
        assert_eq!(find(&[0, 158, 4, 9]), Ok(None), "what follows the end is filling");
        for bad in [&[158u8, 0, 0, 0][..], &[158, 1], &[158], &[1, 1, 1, 158], &[7, 5, 0, 0]] {
            assert_eq!(find(bad), Err(TagError::BadOptions), "{bad:?}");
        }
        assert_eq!(find(&[158, 2, 158, 2]), Err(TagError::Twice));
        assert_eq!(find_ipv6(&[0, 1, 0, 0x1e, 1, 9]), Ok(Some([9u8].as_slice())));
        for bad in [&[0x1eu8][..], &[0x1e, 1], &[1, 9, 0]] {
            assert_eq!(find_ipv6(bad), Err(TagError::BadOptions), "{bad:?}");
        }
        assert_eq!(find_ipv6(&[0x1e, 0, 0x1e, 0]), Err(TagError::Twice));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            six in any::<bool>(),
            entries in prop::collection::vec((0u64..1 << 40, -(1i64 << 31) + 1..1 << 31), 0..=7),
            next_header in any::<u8>(),
        ) {
            let codec = codec(Form::Vector { writers: entries.len() as u16 });
            let seqs: Vec<u64> = entries.iter().map(|(seq, _)| *seq).collect();
            // The receiver's base is near the truth, on either side.
            let base: Vec<u64> =
                entries.iter().map(|(seq, off)| seq.saturating_add_signed(*off)).collect();
            let stamp = Stamp::Vector(vector(&seqs));
            let mut bytes = vec![];
            let body = if six {
                codec.encode_ipv6(next_header, &stamp, &mut bytes);
                prop_assert_eq!(bytes.len(), codec.ipv6_bytes());
                prop_assert_eq!(bytes.len(), (usize::from(bytes[1]) + 1) * 8);
                find_ipv6(&bytes[2..])
            } else {
                codec.encode_ipv4(IPV4_OPTION, &stamp, &mut bytes);
                prop_assert_eq!(bytes.len(), codec.ipv4_bytes());
                find_ipv4(&bytes, IPV4_OPTION)
            };
            prop_assert_eq!(codec.decode(body?.expect("one tag"), &vector(&base), &everything()), Ok(stamp));
        }

        #[test]
        fn damage_of_one_byte_is_seen(
            at in 2usize..20, change in 1u8..=255, hlc in any::<u64>(),
        ) {
            let codec = codec(Form::Hlc);
            let mut bytes = vec![];
            codec.encode_ipv4(IPV4_OPTION, &Stamp::Hlc(Hlc(hlc)), &mut bytes);
            bytes[at] ^= change;
            prop_assert!(codec.decode(&bytes[2..], &vector(&[]), &everything()).is_err());
        }

        #[test]
        fn any_bytes_are_survived(
            options in prop::collection::vec(any::<u8>(), 0..80),
            writers in 0u16..=7,
            base in any::<u64>(),
        ) {
            for form in [Form::Vector { writers }, Form::Hlc] {
                for found in [find_ipv4(&options, IPV4_OPTION), find_ipv6(&options)] {
                    if let Ok(Some(body)) = found {
                        let _ = codec(form).decode(body, &vector(&[base]), &everything());
                    }
                }
                let _ = codec(form).decode(&options, &vector(&[base]), &everything());
            }
        }
    }
}
