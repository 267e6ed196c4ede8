//! Making an index: collected while a segment is written or read, written when it is sealed.

use super::Waypoint;
use super::format::{ENTRIES_PER_BLOCK, Footer, IndexEntry, SegmentFacts, WriterRun, encode};
use crate::journal::{PlacedEffect, Segment};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, WriterId};
use tidelock_protocol::record::{Body, Payload, RawBody, Record};
use tidelock_protocol::vector::CountVector;

/// What is known of a segment's records so far: 48 bytes for each.
#[derive(Clone, Debug, Default)]
pub(in crate::journal) struct Builder {
    entries: Vec<IndexEntry>,
    runs: BTreeMap<(WriterId, Epoch), WriterRun>,
    waypoints: Vec<Arc<Waypoint>>,
}

impl Builder {
    /// The segment's next record.
    pub(in crate::journal) fn record(
        &mut self,
        record: &Record<RawBody>,
        len_bytes: u32,
        to: PlacedEffect,
    ) {
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
        let fields = record.body.fields();
        if len_bytes > 0 {
            self.entries.push(IndexEntry {
                writer: record.writer,
                disk: DiskId(fields.object),
                offset: fields.offset,
                epoch: record.epoch,
                seq: record.seq,
                len_bytes,
                at,
                crc: record.payload().map_or(0, Payload::crc),
            });
        }
    }

    /// The next place at which a replay may begin.
    pub(in crate::journal) fn waypoint(&mut self, waypoint: Waypoint) {
        self.waypoints.push(Arc::new(waypoint));
    }

    /// Those so far.
    pub(in crate::journal) fn waypoints(&self) -> &[Arc<Waypoint>] {
        &self.waypoints
    }

    #[cfg(any(test, feature = "memory-storage"))]
    pub(in crate::journal) fn forget_waypoints(&mut self) {
        self.waypoints.clear();
    }

    /// The entries so far, in the order of the journal.
    pub(in crate::journal) fn entries(&self) -> &[IndexEntry] {
        &self.entries
    }

    /// The index's bytes.
    fn finish(&self, of: SegmentFacts, closed: Option<(Hlc, CountVector)>) -> Vec<u8> {
        let mut entries = self.entries.clone();
        entries.sort_unstable();
        let footer = Footer {
            of,
            entries: entries.len() as u64,
            blocks: entries.len().div_ceil(ENTRIES_PER_BLOCK) as u32,
            runs: self.runs.values().copied().collect(),
            closed,
        };
        encode(&entries, &footer, &self.waypoints)
    }
}

/// A segment that is durable, followed by another one, and has no index yet.
#[derive(Clone, Debug)]
pub struct Sealed {
    pub(in crate::journal) of: SegmentFacts,
    pub(in crate::journal) builder: Arc<Builder>,
}

impl Sealed {
    pub(in crate::journal) fn new<F>(
        segment: &Segment<F>,
        last_batch: u64,
        chain: u32,
        builder: Builder,
    ) -> Self {
        let Segment { index, id, len_bytes, .. } = *segment;
        Self {
            of: SegmentFacts { index, id, len_bytes, last_batch, chain },
            builder: Arc::new(builder),
        }
    }

    /// Which segment.
    #[must_use]
    pub fn index(&self) -> u64 {
        self.of.index
    }

    /// The content of its index.
    #[must_use]
    pub(in crate::journal) fn encode(&self, closed: Option<(Hlc, CountVector)>) -> Vec<u8> {
        self.builder.finish(self.of, closed)
    }
}
