//! Making an index: collected while a segment is written or read, written when it is sealed.

use super::format::{ENTRIES_PER_BLOCK, Footer, IndexEntry, SegmentFacts, WriterRun, encode};
use super::index_file_name;
use crate::journal::{JournalError, PlacedEffect, Segment};
use crate::storage::{self, Storage};
use std::collections::BTreeMap;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, WriterId};
use tidelock_protocol::record::Record;
use tidelock_protocol::vector::CountVector;

/// What is known of a segment's records so far: 40 bytes for each.
#[derive(Clone, Debug, Default)]
pub(in crate::journal) struct Builder {
    entries: Vec<IndexEntry>,
    runs: BTreeMap<(WriterId, Epoch), WriterRun>,
}

impl Builder {
    /// The segment's next record.
    pub(in crate::journal) fn record(&mut self, record: &Record, len_bytes: u32, to: PlacedEffect) {
        let new = WriterRun {
            writer: record.writer,
            epoch: record.epoch,
            first: record.seq,
            last: record.seq,
            first_hlc: record.hlc,
            last_hlc: record.hlc,
        };
        let run = self.runs.entry((record.writer, record.epoch)).or_insert(new);
        (run.last, run.last_hlc) = (record.seq, record.hlc);
        let at = match to {
            PlacedEffect::None => return,
            PlacedEffect::Zero => 0,
            PlacedEffect::Write { at } => at,
        };
        if len_bytes > 0 {
            self.entries.push(IndexEntry {
                writer: record.writer,
                disk: record.disk,
                offset: record.offset,
                epoch: record.epoch,
                seq: record.seq,
                len_bytes,
                at,
            });
        }
    }

    /// The index's bytes.
    fn finish(mut self, of: SegmentFacts, closed: Option<(Hlc, CountVector)>) -> Vec<u8> {
        self.entries.sort_unstable();
        let footer = Footer {
            of,
            entries: self.entries.len() as u64,
            blocks: self.entries.len().div_ceil(ENTRIES_PER_BLOCK) as u32,
            runs: self.runs.into_values().collect(),
            closed,
        };
        encode(&self.entries, &footer)
    }
}

/// A segment that is durable, followed by another one, and has no index yet.
#[derive(Clone, Debug)]
pub struct Sealed {
    pub(in crate::journal) of: SegmentFacts,
    pub(in crate::journal) builder: Builder,
}

impl Sealed {
    pub(in crate::journal) fn new<F>(
        segment: &Segment<F>,
        last_batch: u64,
        chain: u32,
        builder: Builder,
    ) -> Self {
        let Segment { index, id, len_bytes, .. } = *segment;
        Self { of: SegmentFacts { index, id, len_bytes, last_batch, chain }, builder }
    }

    /// Which segment.
    #[must_use]
    pub fn index(&self) -> u64 {
        self.of.index
    }

    /// The content of its index.
    #[must_use]
    pub(super) fn encode(self, closed: Option<(Hlc, CountVector)>) -> Vec<u8> {
        self.builder.finish(self.of, closed)
    }
}

/// Writes one index, away from what acknowledges.
#[derive(Debug)]
pub struct IndexJob<S> {
    pub(in crate::journal) storage: S,
    pub(in crate::journal) dir: String,
    pub(in crate::journal) sealed: Sealed,
    pub(in crate::journal) closed: Option<(Hlc, CountVector)>,
}

impl<S: Storage> IndexJob<S> {
    /// Which segment.
    #[must_use]
    pub fn segment(&self) -> u64 {
        self.sealed.index()
    }

    /// What it would write.
    #[must_use]
    pub fn content(self) -> Vec<u8> {
        self.sealed.encode(self.closed)
    }

    /// Does it. The segment was synced before; its index is written to a file aside, which is
    /// synced, and gets its name; then the directory is synced.
    pub fn run(self) -> Result<(), JournalError> {
        let name = index_file_name(self.sealed.of.index, self.sealed.of.id);
        let (storage, dir) = (self.storage.clone(), self.dir.clone());
        storage::replace(&storage, &dir, &name, &self.content())
            .map_err(JournalError::io("write the index of a journal segment"))
    }
}
