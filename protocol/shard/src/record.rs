//! An entry of a shard's log as the body of a record, on the link and in the backup's journal.
//!
//! | field of the header | meaning |
//! |---|---|
//! | flags | 1: a NOP |
//! | object | the shard |
//! | HLC | the effective stamp |
//! | offset | p-log-idx: the end of the entry, as the store counts |
//! | length | from the end of the entry before to that, as the store counts; 0 without a payload |
//!
//! An entry without a payload moves the end, however far it is: nothing before it is in the log that is not in a copy
//! of the shard. So a log begins anywhere.

use crate::log::{Entry, LogIndex, LogPoint};
use tidelock_protocol::limits;
use tidelock_protocol::record::{Body, BodyFields, Misplaced, Payload, Record, Role};

/// An entry of a shard's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardEntry {
    /// The shard.
    pub shard: u16,
    /// The end of the entry.
    pub end: LogIndex,
    /// Units of the log that the entry takes; 0 without data.
    pub span: u32,
    /// The content, if any.
    pub data: Option<Payload>,
    /// A NOP.
    pub nop: bool,
}

const FLAG_NOP: u8 = 1;

impl ShardEntry {
    /// The body of an entry that stands after another one. `None`: it does not end after it, or spans more than 2^32 units.
    #[must_use]
    pub fn after(shard: u16, before: LogIndex, entry: &Entry) -> Option<Self> {
        let span = entry.end.0.checked_sub(before.0).filter(|span| *span > 0)?;
        let span = match entry.data {
            Some(_) => u32::try_from(span).ok()?,
            None => 0,
        };
        Some(Self { shard, end: entry.end, span, data: entry.data.clone(), nop: entry.nop })
    }

    /// The end of the entry before, if there is data between.
    #[must_use]
    pub fn begin(&self) -> Option<LogIndex> {
        self.data.as_ref().map(|_| LogIndex(self.end.0 - u64::from(self.span)))
    }

    /// The entry of a record.
    #[must_use]
    pub fn entry(record: Record<Self>) -> Entry {
        let ShardEntry { end, data, nop, .. } = record.body;
        Entry { end, stamp: record.hlc, data, nop }
    }
}

/// True if a record of a shard's log, given by its header, follows on the entry that ends at `last`.
#[must_use]
pub fn follows(last: LogPoint, fields: &BodyFields, next: LogPoint) -> bool {
    let after = match fields.len_bytes {
        0 => next.index > last.index,
        span => next.index.0.checked_sub(span.into()) == Some(last.index.0),
    };
    after && next.stamp >= last.stamp
}

impl Body for ShardEntry {
    /// The number of shards.
    type Objects = u16;

    const OBJECTS_MAX: u16 = limits::SHARDS_MAX;

    fn fits(&self, shards: &u16) -> Result<(), Misplaced> {
        if self.shard < *shards { Ok(()) } else { Err(Misplaced::Object(self.shard)) }
    }

    fn role(&self) -> Role {
        Role::Change
    }

    fn fields(&self) -> BodyFields {
        let flags = if self.nop { FLAG_NOP } else { 0 };
        BodyFields { flags, object: self.shard, offset: self.end.0, len_bytes: self.span }
    }

    fn payload(&self) -> Option<&Payload> {
        self.data.as_ref()
    }

    fn from_parts(
        role: Role,
        fields: &BodyFields,
        payload: Option<(u32, Payload)>,
    ) -> Result<Self, &'static str> {
        let BodyFields { flags, object, offset, len_bytes: span } = *fields;
        if role != Role::Change || flags > FLAG_NOP {
            return Err("not an entry of a shard's log");
        }
        if offset < u64::from(span).max(1) || (span > 0) != payload.is_some() {
            return Err("entry that does not span its data");
        }
        let data = payload.map(|(_, payload)| payload);
        Ok(Self { shard: object, end: LogIndex(offset), span, data, nop: flags == FLAG_NOP })
    }

    fn payload_mut(&mut self) -> Option<&mut Payload> {
        self.data.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::BytesMut;
    use proptest::prelude::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{Epoch, Seq, WriterId};
    use tidelock_protocol::vector::CountVector;

    fn record(body: ShardEntry) -> Record<ShardEntry> {
        let (writer, seq, epoch) = (WriterId(0), Seq(1), Epoch(1));
        Record { writer, seq, epoch, hlc: Hlc(7), deps: CountVector::new(), body }
    }

    proptest! {
        #[test]
        fn a_record_brings_its_entry_whatever_the_store_counts(
            shard in 0..limits::SHARDS_MAX, before in 0u64..1 << 60, span in 1u32.., len in 0usize..100, nop: bool,
        ) {
            let data = (len > 0).then(|| Payload::new(vec![3; len].into()));
            let end = LogIndex(before + u64::from(span));
            let entry = Entry { end, stamp: Hlc(7), data, nop };
            let body = ShardEntry::after(shard, LogIndex(before), &entry).unwrap();
            prop_assert_eq!(body.begin().is_none_or(|begin| begin == LogIndex(before)), true);
            let mut bytes = BytesMut::new();
            record(body).encode(&mut bytes);
            let decoded = Record::<ShardEntry>::decode(&mut bytes.freeze()).unwrap().unwrap();
            prop_assert_eq!(decoded.body.shard, shard);
            prop_assert_eq!(ShardEntry::entry(decoded), entry);
        }
    }

    #[test]
    fn only_what_ends_after_the_entry_before_is_one() {
        let data = Some(Payload::new(vec![1].into()));
        let entry = |end, data: &Option<Payload>| Entry {
            end: LogIndex(end),
            stamp: Hlc(1),
            data: data.clone(),
            nop: false,
        };
        let before = LogIndex(5);
        assert_eq!(ShardEntry::after(0, before, &entry(5, &data)), None);
        assert_eq!(ShardEntry::after(0, before, &entry(4, &None)), None);
        assert_eq!(ShardEntry::after(0, before, &entry(6 + (1 << 32), &data)), None, "too long");
        let jump = ShardEntry::after(0, before, &entry(6 + (1 << 32), &None)).unwrap();
        assert_eq!((jump.span, jump.begin()), (0, None));
        // A header may say anything.
        for (offset, len_bytes, payload) in
            [(0, 0, &None), (4, 5, &data), (9, 0, &data), (9, 1, &None)]
        {
            let fields = BodyFields { flags: 0, object: 0, offset, len_bytes };
            let payload = payload.clone().map(|payload| (1, payload));
            assert!(ShardEntry::from_parts(Role::Change, &fields, payload).is_err(), "{fields:?}");
        }
    }

    #[test]
    fn an_entry_follows_where_the_one_before_ends_and_with_no_smaller_stamp() {
        let point = |index, stamp| LogPoint { index: LogIndex(index), stamp: Hlc(stamp) };
        let spans = |len_bytes| BodyFields { len_bytes, ..BodyFields::default() };
        let last = point(10, 5);
        assert!(follows(last, &spans(2), point(12, 5)));
        assert!(follows(last, &spans(0), point(99, 5)));
        for (span, next) in [
            (1, point(12, 5)),
            (3, point(12, 5)),
            (2, point(12, 4)),
            (0, point(10, 5)),
            (13, point(12, 5)),
        ] {
            assert!(!follows(last, &spans(span), next), "{span} {next:?}");
        }
    }
}
