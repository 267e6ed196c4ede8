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

/// In an image: the oldest segment that had what should be here; `None`: the image itself had it, and has something else now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostWith(pub Option<u64>);

impl Slice for LostWith {
    fn without_front(self, _: u64) -> Self {
        self
    }
}

/// What of the images is not what was written.
///
/// A range may wait for several segments: for the one that is known to have changed it last, and for later ones of which
/// nothing is known. So a mark has the oldest, and the unknown ones are listed beside the marks: when one segment is
/// restored, the range waits for the next unknown one after it.
#[derive(Clone, Debug, Default)]
pub struct ImageDamage {
    lost: BTreeMap<DiskKey, Extents<LostWith>>,
    /// Segments that a fold has passed without knowing what they changed. Kept while anything is lost.
    unknown: BTreeSet<u64>,
}

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
        self.lost.is_empty()
    }

    /// Marks a range whose content is lost, whatever was lost there before.
    pub fn mark(&mut self, key: DiskKey, range: Range<u64>, with: LostWith) {
        if !range.is_empty() {
            self.lost.entry(key).or_default().insert(range, with);
        }
    }

    /// A segment may have changed anything, and what it had is lost.
    pub fn mark_unknown(&mut self, keys: impl Iterator<Item = DiskKey>, segment: u64) {
        self.unknown.insert(segment);
        for key in keys {
            for (range, lost) in self.pieces(key, 0..u64::MAX) {
                if lost.is_none() {
                    self.mark(key, range, LostWith(Some(segment)));
                }
            }
        }
    }

    /// True if a fold has passed this segment without knowing what it changed.
    #[must_use]
    pub fn is_unknown(&self, segment: u64) -> bool {
        self.unknown.contains(&segment)
    }

    /// True if something waits for this segment.
    #[must_use]
    pub fn waits_for(&self, segment: u64) -> bool {
        self.is_unknown(segment) || self.iter().any(|(_, _, with)| with == LostWith(Some(segment)))
    }

    /// The range was written.
    pub fn heal(&mut self, key: DiskKey, range: Range<u64>) {
        let Some(extents) = self.lost.get_mut(&key) else { return };
        extents.remove(range);
        if extents.is_empty() {
            self.lost.remove(&key);
        }
        if self.lost.is_empty() {
            self.unknown.clear();
        }
    }

    /// The image has again what it had in this range. A segment of which nothing is known may have come later.
    pub fn image_is_whole(&mut self, key: DiskKey, range: Range<u64>) {
        self.settle(key, range, self.unknown.first().copied());
    }

    /// The parts of a range that take what a segment had: nothing newer stands there.
    #[must_use]
    pub fn parts_for(&self, segment: u64, key: DiskKey, range: Range<u64>) -> Vec<Range<u64>> {
        let takes = |lost: Option<LostWith>| {
            lost.is_some_and(|with| with.0.is_some_and(|with| with <= segment))
        };
        self.pieces(key, range)
            .into_iter()
            .filter(|(_, lost)| takes(*lost))
            .map(|(part, _)| part)
            .collect()
    }

    /// A segment was restored, and the images have what it had in these parts ([`ImageDamage::parts_for`]).
    pub fn restored(&mut self, segment: u64, written: Vec<(DiskKey, Range<u64>)>) {
        let next = self.unknown.range(segment + 1..).next().copied();
        let own = self.iter().filter(|(_, _, with)| *with == LostWith(Some(segment)));
        let own: Vec<_> = own.map(|(key, range, _)| (key, range)).collect();
        for (key, range) in own.into_iter().chain(written) {
            self.settle(key, range, next);
        }
        self.unknown.remove(&segment);
    }

    fn settle(&mut self, key: DiskKey, range: Range<u64>, next: Option<u64>) {
        match next {
            Some(segment) => self.mark(key, range, LostWith(Some(segment))),
            None => self.heal(key, range),
        }
    }

    /// A range of a disk in pieces, in order: those that are damaged, and those that are not.
    pub fn pieces(&self, key: DiskKey, range: Range<u64>) -> Vec<(Range<u64>, Option<LostWith>)> {
        match self.lost.get(&key) {
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
        self.lost.iter().flat_map(of)
    }

    /// Ranges and unknown segments, as they are put on record.
    #[must_use]
    pub fn to_record(&self) -> (Vec<DamagedRange>, Vec<u64>) {
        let range = |(key, range, with): (DiskKey, Range<u64>, LostWith)| DamagedRange {
            writer: key.writer,
            disk: key.disk,
            from: range.start,
            to: range.end,
            segment: with.0,
        };
        (self.iter().map(range).collect(), self.unknown.iter().copied().collect())
    }

    /// The damage that is on record.
    #[must_use]
    pub fn from_record(ranges: Vec<DamagedRange>, unknown: Vec<u64>) -> Self {
        let mut damage = Self { lost: BTreeMap::new(), unknown: unknown.into_iter().collect() };
        for DamagedRange { writer, disk, from, to, segment } in ranges {
            damage.mark(DiskKey { writer, disk }, from..to.max(from), LostWith(segment));
        }
        damage
    }
}

impl PartialEq for ImageDamage {
    fn eq(&self, other: &Self) -> bool {
        self.to_record() == other.to_record()
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: DiskKey = DiskKey::FIRST;
    const BYTES: u64 = 8;

    /// A byte of an image: its content, and the segments that may have had what should be there.
    #[derive(Clone, Debug, Default, PartialEq)]
    struct Byte {
        has: u64,
        waits_for: BTreeSet<u64>,
    }

    /// Fate of a segment in a fold.
    #[derive(Clone, Debug)]
    enum Fate {
        Written,
        Lost,
        Unknown,
    }

    prop_compose! {
        fn any_segment()(
            from in 0..BYTES, len in 1..=BYTES,
            fate in prop_oneof![Just(Fate::Written), Just(Fate::Lost), Just(Fate::Unknown)],
        ) -> (Range<u64>, Fate) {
            (from..BYTES.min(from + len), fate)
        }
    }

    proptest! {
        /// Segments are restored in any order: a byte is shown if and only if nothing that it may wait for is missing, and
        /// then it is what the last segment had.
        #[test]
        fn what_is_shown_is_what_was_written_last(
            segments in prop::collection::vec(any_segment(), 1..6),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let mut damage = ImageDamage::default();
            let mut image = vec![Byte::default(); BYTES as usize];
            for ((range, fate), segment) in segments.iter().zip(1..) {
                for (at, byte) in (0..).zip(&mut image) {
                    match fate {
                        Fate::Unknown => _ = byte.waits_for.insert(segment),
                        Fate::Lost if range.contains(&at) => byte.waits_for = [segment].into(),
                        Fate::Written if range.contains(&at) => {
                            *byte = Byte { has: segment, waits_for: BTreeSet::new() };
                        }
                        Fate::Lost | Fate::Written => {}
                    }
                }
                match fate {
                    Fate::Written => damage.heal(KEY, range.clone()),
                    Fate::Lost => damage.mark(KEY, range.clone(), LostWith(Some(segment))),
                    Fate::Unknown => damage.mark_unknown([KEY].into_iter(), segment),
                }
            }
            for index in order {
                let segment = index.index(segments.len()) as u64 + 1;
                let (range, fate) = &segments[segment as usize - 1];
                if matches!(fate, Fate::Written) {
                    continue;
                }
                let parts = damage.parts_for(segment, KEY, range.clone());
                for (at, byte) in (0..).zip(&mut image) {
                    let takes = range.contains(&at) && byte.waits_for.first().is_some_and(|first| *first <= segment);
                    prop_assert_eq!(parts.iter().any(|part| part.contains(&at)), takes, "byte {} of {}", at, segment);
                    if takes {
                        byte.has = segment;
                        byte.waits_for.retain(|other| *other > segment);
                    }
                    byte.waits_for.remove(&segment);
                }
                damage.restored(segment, parts.into_iter().map(|part| (KEY, part)).collect());
                let (ranges, unknown) = damage.to_record();
                damage = ImageDamage::from_record(ranges, unknown);
                for (range, lost) in damage.pieces(KEY, 0..BYTES) {
                    for at in range {
                        let first = image[at as usize].waits_for.first().copied();
                        prop_assert_eq!(lost.map(|with| with.0), first.map(Some), "byte {}", at);
                    }
                }
            }
            // A byte that is shown is the one that was written last.
            for (at, byte) in (0..).zip(&image).filter(|(_, byte)| byte.waits_for.is_empty()) {
                let last = segments.iter().zip(1..).filter(|((range, _), _)| range.contains(&at)).map(|(_, segment)| segment);
                prop_assert_eq!(byte.has, last.last().unwrap_or(0));
            }
        }
    }
}
