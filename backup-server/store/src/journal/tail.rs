//! The journal as somebody reads it through maps and indexes: as it was when this was taken.
//!
//! Files that it has stay readable when their names are gone, so it may be used by any thread.

use super::examine::{Listed, examine};
use super::index::{Builder, SegmentIndex};
use super::map::Maps;
use super::reader::corrupt;
use super::{Entry, IndexEntry, JournalError, PlacedEffect, Position, Reader, Segment, Waypoint};
use crate::damage::SegmentDamage;
use std::collections::BTreeMap;
use std::sync::Arc;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::record::{DiskChange, RawBody};
use tidelock_storage::StorageFile;

/// Segments with what there is to find something in them.
#[derive(Clone, Debug)]
pub struct Tail<F> {
    pub(super) segments: Vec<Segment<F>>,
    pub(super) indexes: BTreeMap<u64, F>,
    pub(super) maps: Arc<Maps<F>>,
    /// What the newest segments have, of which no index is written yet.
    pub(super) waiting: BTreeMap<u64, Arc<Builder>>,
}

impl<F: StorageFile> Tail<F> {
    /// The segments, oldest first.
    #[must_use]
    pub fn segments(&self) -> &[Segment<F>] {
        &self.segments
    }

    /// The maps.
    #[must_use]
    pub fn maps(&self) -> &Maps<F> {
        &self.maps
    }

    /// A segment.
    #[must_use]
    pub fn segment(&self, index: u64) -> Option<&Segment<F>> {
        let first = self.segments.first()?.index;
        self.segments.get(usize::try_from(index.checked_sub(first)?).ok()?)
    }

    /// What the records of a writer in a segment change, also void ones: those that change the same
    /// place in the order of the journal, others in any. From memory, from the segment's index or,
    /// if that cannot be read, from the segment.
    pub fn entries_of(
        &self,
        segment: u64,
        writer: WriterId,
    ) -> Result<Vec<IndexEntry>, JournalError> {
        if let Some(builder) = self.waiting.get(&segment) {
            let entries = builder.entries().iter().filter(|entry| entry.writer == writer);
            return Ok(entries.copied().collect());
        }
        if let Some(file) = self.indexes.get(&segment)
            && let Ok(index) = SegmentIndex::open(file.clone())
        {
            let from = (writer, DiskId(0), 0);
            let to = (writer, DiskId(u16::MAX), u64::MAX);
            let entries: Result<Vec<IndexEntry>, _> = index.entries(from..=to).collect();
            if let Ok(mut entries) = entries {
                order_where_they_meet(&mut entries);
                return Ok(entries);
            }
        }
        let Some(segment) = self.segment(segment) else {
            return Err(JournalError::Missing { index: segment });
        };
        let mut entries = read(segment)?;
        entries.retain(|entry| entry.writer == writer);
        Ok(entries)
    }

    /// Where within a segment a replay may begin, in order; none, if it is not known.
    #[must_use]
    pub fn waypoints(&self, segment: u64) -> Vec<Arc<Waypoint>> {
        if let Some(builder) = self.waiting.get(&segment) {
            return builder.waypoints().to_vec();
        }
        let index = self.indexes.get(&segment).map(|file| SegmentIndex::open(file.clone()));
        let read = index.and_then(|index| index.ok()?.waypoints().ok());
        read.unwrap_or_default().into_iter().map(Arc::new).collect()
    }

    /// As if none were known.
    #[cfg(any(test, feature = "memory-storage"))]
    pub fn forget_waypoints(&mut self) {
        self.indexes.clear();
        for builder in self.waiting.values_mut() {
            Arc::make_mut(builder).forget_waypoints();
        }
    }

    pub(super) fn listed(&self, segment: u64) -> Listed<F> {
        match (self.waiting.get(&segment), self.indexes.get(&segment)) {
            (Some(builder), _) => Listed::Memory(Arc::clone(builder)),
            (None, Some(file)) => Listed::Index(file.clone()),
            (None, None) => Listed::None,
        }
    }

    /// What each record of a segment changes, of each writer in the order of the journal, as far
    /// as that is known without reading the segment.
    #[must_use]
    pub fn listed_entries(&self, segment: u64) -> Option<Vec<IndexEntry>> {
        self.listed(segment).entries(self.segment(segment)?)
    }

    /// Reads all of a segment. `None`: it is what was written.
    #[must_use]
    pub fn examine(&self, segment: u64) -> Option<SegmentDamage> {
        examine(self.segment(segment)?, &self.listed(segment))
    }

    /// Reads the batches between two positions.
    #[must_use]
    pub fn reader(&self, from: Position, to: Position) -> Reader<F, DiskChange> {
        Reader::new(self.segments.clone(), from, to)
    }
}

/// The same from the segment itself, of all writers.
fn read<F: StorageFile>(segment: &Segment<F>) -> Result<Vec<IndexEntry>, JournalError> {
    let from = Position { segment: segment.index, offset: 0 };
    let to = Position { segment: segment.index, offset: segment.len_bytes };
    let mut builder = Builder::default();
    for batch in Reader::<_, RawBody>::new(vec![segment.clone()], from, to) {
        let batch = batch?;
        for entry in batch.entries {
            let damaged = |damage| corrupt(segment, batch.start.offset, damage);
            let Entry::Record { head, payload_at, .. } = entry.map_err(damaged)? else {
                continue;
            };
            let record = head.peek();
            let (len_bytes, at) = (head.changed_bytes(), batch.body_at + payload_at as u64);
            builder.record(record, len_bytes, PlacedEffect::of(record, len_bytes, at));
        }
    }
    Ok(builder.entries().to_vec())
}

/// Puts entries of one writer, which come in the order of its disks, in the order of the journal
/// where they overlap.
fn order_where_they_meet(entries: &mut [IndexEntry]) {
    let mut from = 0;
    while let Some(first) = entries.get(from) {
        let (disk, mut end, mut to) = (first.disk, first.range().end, from + 1);
        while let Some(next) = entries.get(to).filter(|e| e.disk == disk && e.offset < end) {
            end = end.max(next.range().end);
            to += 1;
        }
        entries[from..to].sort_unstable_by_key(|entry| (entry.epoch, entry.seq));
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidelock_protocol::ids::{Epoch, Seq};

    proptest! {
        #[test]
        fn of_two_entries_that_overlap_the_older_comes_first(
            extents in prop::collection::vec((0u16..2, 0u64..40, 1u32..8), 0..40),
        ) {
            let of = |(seq, (disk, offset, len_bytes)): (u64, (u16, u64, u32))| IndexEntry {
                writer: WriterId(0),
                disk: DiskId(disk),
                offset,
                epoch: Epoch(seq / 20),
                seq: Seq(seq),
                len_bytes,
                at: 0,
                crc: 0,
            };
            let mut entries: Vec<_> = (0..).zip(extents).map(of).collect();
            let mut expected = entries.clone();
            entries.sort_by_key(|e| (e.disk, e.offset, e.epoch, e.seq));
            order_where_they_meet(&mut entries);
            for (n, entry) in entries.iter().enumerate() {
                for later in &entries[n + 1..] {
                    let meet = entry.disk == later.disk
                        && entry.offset < later.range().end
                        && later.offset < entry.range().end;
                    prop_assert!(!meet || entry.seq < later.seq);
                }
            }
            entries.sort_by_key(|e| e.seq);
            expected.sort_by_key(|e| e.seq);
            prop_assert_eq!(entries, expected);
        }
    }
}
