//! Data that was acknowledged and can no longer be read: what of it is known.
//!
//! A disk that loses a sector must not cost the group. The readable part of a damaged segment is used on, and a fold
//! carries what it cannot write into the images' own record (`fold.json`), until newer data stands there.
//!
//! Invariants:
//! - Nothing that is damaged is ever shown as data: whoever reads it gets an error (rule 5). Views
//!   do not need this record for that where a payload or a sector of an image does not fit its checksum; they do where
//!   a fold could not write.
//! - What is damaged in the images is on record in the same file, replaced as a whole, as the
//!   position up to which they are folded.
//!
//! Source: a block layer's list of bad extents (Linux `badblocks`, btrfs' scrub), by point in time.

use crate::extents::{DiskKey, Extents, Slice};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use thiserror::Error;
use tidelock_protocol::ids::{DiskId, Epoch, Seq, WriterId};

/// A record whose payload is not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DamagedExtent {
    /// The host.
    pub writer: WriterId,
    /// Its disk.
    pub disk: DiskId,
    /// Where the extent begins on the disk, in bytes.
    pub offset: u64,
    /// Its bytes.
    pub len_bytes: u32,
    /// The record's epoch.
    pub epoch: Epoch,
    /// Its seq.
    pub seq: Seq,
    /// Where the payload begins in the segment's file.
    pub at: u64,
    /// The checksum of what was written.
    pub crc: u32,
}

impl DamagedExtent {
    /// Of which disk.
    #[must_use]
    pub fn key(&self) -> DiskKey {
        DiskKey { writer: self.writer, disk: self.disk }
    }

    /// The part of the disk, in bytes.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len_bytes)
    }
}

/// What of a segment can still be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Known {
    /// Every record; some payloads are damaged.
    Records,
    /// What each record changes, by the index; not in which order with other writers' and when.
    Extents,
    /// Nothing: headers are damaged, and there is no index.
    Nothing,
}

/// What is wrong with a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentDamage {
    /// The segment's index.
    pub segment: u64,
    /// Its id.
    pub id: u64,
    /// Its valid bytes.
    pub len_bytes: u64,
    /// Where the first damage was noticed, in bytes from the beginning of the file.
    pub at: u64,
    /// What it was.
    pub reason: String,
    /// What can still be told of it.
    pub known: Known,
    /// Payloads that are damaged, as far as they are known.
    pub extents: Vec<DamagedExtent>,
}

/// In an image: the segment that had what should be here; `None`: the image itself had it, and has something else now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostWith(pub Option<u64>);

impl Slice for LostWith {
    fn without_front(self, _: u64) -> Self {
        self
    }
}

/// What of the images is not what was written.
#[derive(Clone, Debug, Default)]
pub struct ImageDamage(BTreeMap<DiskKey, Extents<LostWith>>);

/// One range of it, as it is on record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DamagedRange {
    writer: WriterId,
    disk: DiskId,
    from: u64,
    to: u64,
    segment: Option<u64>,
}

impl ImageDamage {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Marks a range whose content is lost.
    pub fn mark(&mut self, key: DiskKey, range: Range<u64>, with: LostWith) {
        if !range.is_empty() {
            self.0.entry(key).or_default().insert(range, with);
        }
    }

    /// The range was written.
    pub fn heal(&mut self, key: DiskKey, range: Range<u64>) {
        let Some(extents) = self.0.get_mut(&key) else { return };
        extents.remove(range);
        if extents.is_empty() {
            self.0.remove(&key);
        }
    }

    /// A range of a disk in pieces, in order: those that are damaged, and those that are not.
    pub fn pieces(&self, key: DiskKey, range: Range<u64>) -> Vec<(Range<u64>, Option<LostWith>)> {
        match self.0.get(&key) {
            Some(extents) => extents.pieces(range).collect(),
            None => vec![(range, None)],
        }
    }

    /// All of it, in order of the disks.
    pub fn iter(&self) -> impl Iterator<Item = (DiskKey, Range<u64>, LostWith)> + '_ {
        let of = |(key, extents): (&DiskKey, &'_ Extents<LostWith>)| {
            let key = *key;
            extents.iter().map(|(range, with)| (key, range, *with)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of)
    }

    /// As it is put on record.
    #[must_use]
    pub fn to_ranges(&self) -> Vec<DamagedRange> {
        let range = |(key, range, with): (DiskKey, Range<u64>, LostWith)| DamagedRange {
            writer: key.writer,
            disk: key.disk,
            from: range.start,
            to: range.end,
            segment: with.0,
        };
        self.iter().map(range).collect()
    }
}

impl FromIterator<DamagedRange> for ImageDamage {
    fn from_iter<T: IntoIterator<Item = DamagedRange>>(ranges: T) -> Self {
        let mut damage = Self::default();
        for DamagedRange { writer, disk, from, to, segment } in ranges {
            damage.mark(DiskKey { writer, disk }, from..to.max(from), LostWith(segment));
        }
        damage
    }
}

impl PartialEq for ImageDamage {
    fn eq(&self, other: &Self) -> bool {
        self.to_ranges() == other.to_ranges()
    }
}

impl Eq for ImageDamage {}

/// What a read has come upon: it cannot be given out. An [`io::Error`] carries it.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct DamagedData(pub String);

/// Whether a read failed because what it asked for is damaged, and not the disk below it all.
#[must_use]
pub fn is_damage(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<DamagedData>())
}

/// Places that readers have found damaged; each is verified as a whole later.
#[derive(Clone, Debug, Default)]
pub struct Noticed(Arc<Mutex<NoticedDamage>>);

/// Segments, and places of images.
#[derive(Debug, Default)]
struct NoticedDamage {
    segments: BTreeSet<u64>,
    places: BTreeSet<(DiskKey, u64)>,
}

/// Places of images that are remembered: the next round finds the others.
const PLACES_MAX: usize = 1024;

impl Noticed {
    fn found(&self) -> MutexGuard<'_, NoticedDamage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This segment was found.
    pub fn note(&self, segment: u64) {
        self.found().segments.insert(segment);
    }

    /// An image was found to be damaged somewhere from this byte on.
    pub fn note_image(&self, key: DiskKey, offset: u64) {
        let mut found = self.found();
        if found.places.len() < PLACES_MAX {
            found.places.insert((key, offset));
        }
    }

    /// The segments that were found since.
    #[must_use]
    pub fn take_segments(&self) -> BTreeSet<u64> {
        std::mem::take(&mut self.found().segments)
    }

    /// One of the places in images.
    #[must_use]
    pub fn take_place(&self) -> Option<(DiskKey, u64)> {
        self.found().places.pop_first()
    }
}
