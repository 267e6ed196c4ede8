//! The batch that is being staged: what arrived while the one before it was made durable.
//!
//! Payloads are kept as they came from the link and written from there; only the headers, some
//! sixty bytes each, are put together here.

use super::Segment;
use super::note::Note;
use bytes::BytesMut;
use std::io::IoSlice;
use tidelock_protocol::record::{Body, RawBody, Record};

/// Where a record stands in the journal.
#[derive(Debug)]
pub struct Placed<'a, F> {
    /// The record, with its payload.
    pub record: &'a Record<RawBody>,
    /// Its effect.
    pub effect: PlacedEffect,
    /// The segment.
    pub segment: &'a Segment<F>,
}

/// What a record does to its disk, and where the data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacedEffect {
    /// The data is at this offset of the segment's file.
    Write {
        /// From its beginning.
        at: u64,
    },
    /// Zeroes.
    Zero,
    /// Nothing.
    None,
}

impl PlacedEffect {
    /// The effect of a record that changes so many bytes. `at`: the place of its data, if it has any.
    pub(super) fn of(record: &Record<RawBody>, changed_bytes: u32, at: u64) -> Self {
        match record.payload() {
            Some(_) => Self::Write { at },
            None if changed_bytes > 0 => Self::Zero,
            None => Self::None,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Batch {
    heads: BytesMut,
    items: Vec<Item>,
    body_len: usize,
}

#[derive(Debug)]
struct Item {
    /// Where its part of `heads` ends.
    heads_end: usize,
    /// `None`: a note.
    record: Option<Record<RawBody>>,
}

impl Item {
    fn payload(&self) -> &[u8] {
        let payload = self.record.as_ref().and_then(Record::payload);
        payload.map_or(&[], |p| p.data())
    }
}

impl Batch {
    pub(super) fn push_record(&mut self, record: Record<RawBody>) {
        record.encode_head(&mut self.heads);
        self.push(Some(record));
    }

    pub(super) fn push_note(&mut self, note: &Note) {
        note.encode(&mut self.heads);
        self.push(None);
    }

    fn push(&mut self, record: Option<Record<RawBody>>) {
        let before = self.items.last().map_or(0, |i| i.heads_end);
        let item = Item { heads_end: self.heads.len(), record };
        self.body_len += self.heads.len() - before + item.payload().len();
        self.items.push(item);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn body_len(&self) -> usize {
        self.body_len
    }

    pub(super) fn entries(&self) -> u32 {
        self.items.len() as u32
    }

    fn for_each_part<'a>(&'a self, mut f: impl FnMut(&'a [u8])) {
        let mut start = 0;
        for item in &self.items {
            f(&self.heads[start..item.heads_end]);
            if !item.payload().is_empty() {
                f(item.payload());
            }
            start = item.heads_end;
        }
    }

    pub(super) fn body_crc(&self) -> u32 {
        let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
        self.for_each_part(|part| digest.update(part));
        digest.finalize() as u32
    }

    /// Calls `f` with `front` and the body, in parts.
    pub(super) fn with_parts<R>(&self, front: &[u8], f: impl FnOnce(&[IoSlice<'_>]) -> R) -> R {
        let mut parts = Vec::with_capacity(1 + 2 * self.items.len());
        parts.push(IoSlice::new(front));
        self.for_each_part(|part| parts.push(IoSlice::new(part)));
        f(&parts)
    }

    /// Tells where each record is, now that the body stands at `body_at` of the segment.
    pub(super) fn place<F>(
        &self,
        segment: &Segment<F>,
        body_at: u64,
        mut f: impl FnMut(Placed<'_, F>),
    ) {
        let (mut at, mut start) = (body_at, 0);
        for item in &self.items {
            at += (item.heads_end - start) as u64;
            start = item.heads_end;
            if let Some(record) = &item.record {
                let effect = PlacedEffect::of(record, record.body.fields().len_bytes, at);
                f(Placed { record, effect, segment });
            }
            at += item.payload().len() as u64;
        }
    }

    pub(super) fn clear(&mut self) {
        // One huge batch must not keep its memory for ever.
        if self.heads.capacity() > 4 << 20 {
            self.heads = BytesMut::new();
        }
        self.heads.clear();
        self.items.clear();
        self.body_len = 0;
    }
}
