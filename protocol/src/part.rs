//! Parts of a large record: how it travels, so that no control message waits behind all of it.
//!
//! A record whose encoding is longer than [`limits::WHOLE_RECORD_MAX_BYTES`] is sent as parts of at
//! most [`limits::PART_MAX_BYTES`], in order, with control frames and frames of other channels
//! between them. The backup gathers them. What it has gathered outlives the connection: it says at
//! the next attachment of the same run how much there is, and sending goes on from there.

use crate::ids::{RunId, Seq};
use crate::limits;
use crate::record::{self, Body, Record, RecordError};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A piece of a record's encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The record.
    pub seq: Seq,
    /// Length of the record's encoding.
    pub total_bytes: u32,
    /// Where in the encoding `data` begins.
    pub at: u32,
    /// The bytes.
    pub data: Bytes,
}

/// How much of a record the backup has gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialRecord {
    /// The record.
    pub seq: Seq,
    /// Bytes of its encoding, from its beginning.
    pub bytes: u32,
}

/// Why parts are not taken. What was gathered is dropped.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PartError {
    /// A record is missing.
    #[error("a part of record {found} arrived, but {expected} is next: the stream has a gap")]
    Gap {
        /// The next record.
        expected: Seq,
        /// As received.
        found: Seq,
    },
    /// Not the part that is next.
    #[error("a part of record {seq} begins at byte {found}, but {expected} is next")]
    Order {
        /// The record.
        seq: Seq,
        /// The next byte.
        expected: u32,
        /// As received.
        found: u32,
    },
    /// The whole is not a record.
    #[error("a record in parts: {0}")]
    Record(#[from] RecordError),
    /// The whole is not exactly the record that its parts announced.
    #[error("the parts of record {0} are not exactly that record")]
    Other(Seq),
}

/// What has arrived of one writer's next record. Bounded by the largest record.
#[derive(Debug, Default)]
pub struct Gathering {
    run: RunId,
    seq: Seq,
    total_bytes: u32,
    bytes: BytesMut,
}

impl Gathering {
    /// A run attaches, whose stream goes on after `received`: keeps what the same run has begun.
    pub fn attached(&mut self, run: RunId, received: Seq) {
        if self.run != run || self.seq != received.next() {
            *self = Self { run, ..Self::default() };
        }
    }

    /// Drops what there is.
    pub fn clear(&mut self) {
        *self = Self { run: self.run, ..Self::default() };
    }

    /// How much there is.
    #[must_use]
    pub fn begun(&self) -> Option<PartialRecord> {
        let bytes = self.bytes.len() as u32;
        (bytes > 0).then_some(PartialRecord { seq: self.seq, bytes })
    }

    /// Takes a part of the record after `received`. Returns the record when it is whole.
    pub fn add(&mut self, received: Seq, part: &Part) -> Result<Option<Record>, PartError> {
        if part.seq <= received {
            // A repetition after a reconnect.
            return Ok(None);
        }
        let taken = self.take(received.next(), part);
        if !matches!(taken, Ok(None)) {
            self.clear();
        }
        taken
    }

    fn take(&mut self, expected: Seq, part: &Part) -> Result<Option<Record>, PartError> {
        if part.seq != expected {
            return Err(PartError::Gap { expected, found: part.seq });
        }
        if part.at == 0 {
            self.seq = part.seq;
            self.total_bytes = part.total_bytes;
            self.bytes = BytesMut::with_capacity(part.total_bytes as usize);
        }
        let next = self.bytes.len() as u32;
        if part.seq != self.seq || part.at != next || part.total_bytes != self.total_bytes {
            let (seq, found) = (part.seq, part.at);
            return Err(PartError::Order { seq, expected: next, found });
        }
        // The decoder has seen that the part does not reach past the whole.
        self.bytes.extend_from_slice(&part.data);
        if self.bytes.len() < self.total_bytes as usize {
            return Ok(None);
        }
        let mut whole = std::mem::take(&mut self.bytes).freeze();
        match Record::decode(&mut whole)? {
            Some(record) if whole.is_empty() && record.seq == part.seq => Ok(Some(record)),
            _ => Err(PartError::Other(part.seq)),
        }
    }
}

/// Whether a record travels in parts.
#[must_use]
pub fn is_cut(record: &Record<impl Body>) -> bool {
    record.encoded_len() > limits::WHOLE_RECORD_MAX_BYTES as usize
}

/// The part of a record that begins at byte `at` of its encoding.
#[must_use]
pub fn part_of(record: &Record<impl Body>, at: u32) -> Part {
    let total = record.encoded_len();
    let (at, len) = (at as usize, limits::PART_MAX_BYTES as usize);
    let end = total.min(at + len);
    let empty = Bytes::new();
    let payload = record.payload().map_or(&empty, |payload| payload.data());
    let head_len = total - payload.len();
    let data = if at >= head_len {
        payload.slice(at - head_len..end - head_len)
    } else {
        let mut bytes = BytesMut::with_capacity(len.max(record::HEADER_BYTES));
        record.encode_head(&mut bytes);
        bytes.extend_from_slice(&payload[..end.saturating_sub(head_len)]);
        bytes.freeze().slice(at..end)
    };
    Part { seq: record.seq, total_bytes: total as u32, at: at as u32, data }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hlc::Hlc;
    use crate::ids::{DiskId, Epoch, WriterId};
    use crate::ids::{Incarnation, Nonce};
    use crate::record::DiskChange;
    use crate::record::{Effect, Payload};
    use crate::vector::CountVector;

    fn record(seq: u64, payload_bytes: usize) -> Record {
        let data: Vec<u8> = (0..payload_bytes).map(|at| (at / 7) as u8 ^ seq as u8).collect();
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(seq),
            deps: CountVector::of(WriterId(1), Seq(4)),
            body: DiskChange {
                disk: DiskId(0),
                offset: 4096,
                copy: false,
                flushed: false,
                effect: Effect::Write(Payload::new(data.into())),
            },
        }
    }

    fn parts(record: &Record, from: u32) -> Vec<Part> {
        let mut at = from;
        let next = || {
            let part = (at < record.encoded_len() as u32).then(|| part_of(record, at))?;
            at += part.data.len() as u32;
            Some(part)
        };
        std::iter::from_fn(next).collect()
    }

    const RUN: RunId = RunId { number: Incarnation(3), nonce: Nonce(1, 2) };

    fn gathering() -> Gathering {
        let mut gathering = Gathering::default();
        gathering.attached(RUN, Seq(4));
        gathering
    }

    #[test]
    fn a_record_of_any_length_is_whole_again() {
        let part = limits::PART_MAX_BYTES as usize;
        for len in [part - 73, part - 72, part - 71, part, 4 * part + 1, (32 << 20) - 1, 32 << 20] {
            let record = record(5, len);
            let mut gathering = gathering();
            let parts = parts(&record, 0);
            assert!(parts.iter().all(|p| p.data.len() <= part && !p.data.is_empty()));
            let (last, before) = parts.split_last().unwrap();
            for part in before {
                assert_eq!(gathering.add(Seq(4), part), Ok(None));
            }
            assert_eq!(gathering.add(Seq(4), last), Ok(Some(record)));
            assert_eq!(gathering.begun(), None);
        }
    }

    #[test]
    fn the_same_run_goes_on_where_it_was_and_another_begins_anew() {
        let record = record(5, 500_000);
        let parts = parts(&record, 0);
        let mut g = gathering();
        for part in &parts[..3] {
            g.add(Seq(4), part).unwrap();
        }
        g.attached(RUN, Seq(4));
        let begun = g.begun().unwrap();
        assert_eq!(begun, PartialRecord { seq: Seq(5), bytes: 3 * limits::PART_MAX_BYTES });
        let rest = self::parts(&record, begun.bytes);
        assert_eq!(rest, parts[3..]);
        let clone = RunId { nonce: Nonce(3, 4), ..RUN };
        for (run, received) in [(clone, Seq(4)), (RUN, Seq(5))] {
            let mut g = gathering();
            g.add(Seq(4), &parts[0]).unwrap();
            g.attached(run, received);
            assert_eq!(g.begun(), None);
        }
        for part in &rest[..rest.len() - 1] {
            assert_eq!(g.add(Seq(4), part), Ok(None));
        }
        assert_eq!(g.add(Seq(4), rest.last().unwrap()), Ok(Some(record)));
    }

    #[test]
    fn repetitions_are_left_out_and_anything_else_out_of_order_is_refused() {
        let parts = parts(&record(5, 500_000), 0);
        let mut g = gathering();
        assert_eq!(g.add(Seq(5), &parts[2]), Ok(None), "already received");
        assert!(matches!(g.add(Seq(3), &parts[0]), Err(PartError::Gap { .. })));
        assert!(matches!(g.add(Seq(4), &parts[1]), Err(PartError::Order { .. })));
        g.add(Seq(4), &parts[0]).unwrap();
        assert!(matches!(g.add(Seq(4), &parts[2]), Err(PartError::Order { .. })));
        assert_eq!(g.begun(), None, "nothing is kept of what does not fit");
        g.add(Seq(4), &parts[0]).unwrap();
        let longer = Part { total_bytes: parts[1].total_bytes + 1, ..parts[1].clone() };
        assert!(matches!(g.add(Seq(4), &longer), Err(PartError::Order { .. })));
        g.add(Seq(4), &parts[0]).unwrap();
        assert_eq!(g.add(Seq(4), &parts[0]), Ok(None), "begun anew");
    }

    #[test]
    fn damage_and_a_record_of_another_number_are_refused() {
        let whole = record(5, 300_000);
        for (damage, seq) in [(true, 5), (false, 6)] {
            let mut g = Gathering::default();
            g.attached(RUN, Seq(seq - 1));
            let mut parts = parts(&whole, 0);
            parts.iter_mut().for_each(|part| part.seq = Seq(seq));
            if damage {
                let mut bytes = parts[2].data.to_vec();
                bytes[9] ^= 1;
                parts[2].data = bytes.into();
            }
            let last = parts.pop().unwrap();
            parts.iter().for_each(|part| assert_eq!(g.add(Seq(seq - 1), part), Ok(None)));
            assert!(g.add(Seq(seq - 1), &last).is_err());
            assert_eq!(g.begun(), None);
        }
    }
}
