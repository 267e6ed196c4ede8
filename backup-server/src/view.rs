//! A disk as it is with everything in the journal that is not folded into its image yet.
//!
//! Invariant: where the overlay has an extent, it is the newest; where it has none, the image is
//! up to date. The fold may write to the image at any time: it writes only what the overlay has
//! as well, or had until the image had it.
//!
//! Source: an extent map over the tail of a log, as in PipeCloud 4.4 ("a separate consumer process
//! transfers the writes to the actual VM disk volumes"), read before they are transferred.

use crate::extents::{Extents, Slice};
use crate::journal::{Entry, JournalError, Placed, PlacedEffect, Reader, State};
use crate::storage::StorageFile;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::record::{Effect, Record};
use tidelock_protocol::vector::CountVector;

/// One disk of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskKey {
    /// Whose.
    pub writer: WriterId,
    /// Its number there.
    pub disk: DiskId,
}

impl DiskKey {
    /// The disk that a record changes.
    #[must_use]
    pub fn of(record: &Record) -> Self {
        Self { writer: record.writer, disk: record.disk }
    }
}

/// Where the newest data of an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In a segment of the journal, from this byte of the file on.
    Journal {
        /// The segment's index.
        segment: u64,
        /// From the beginning of the file.
        at: u64,
    },
    /// Zeroes, by a record in this segment.
    Zero {
        /// The segment's index.
        segment: u64,
    },
}

impl Source {
    fn segment(self) -> u64 {
        match self {
            Source::Journal { segment, .. } | Source::Zero { segment } => segment,
        }
    }
}

impl Slice for Source {
    fn without_front(self, bytes: u64) -> Self {
        match self {
            Source::Journal { segment, at } => Source::Journal { segment, at: at + bytes },
            zero @ Source::Zero { .. } => zero,
        }
    }
}

/// The extents of a journal's tail, for all disks of the group.
#[derive(Clone, Debug)]
pub struct Overlay<F> {
    disks: BTreeMap<DiskKey, Extents<Source>>,
    segments: BTreeMap<u64, F>,
}

impl<F: StorageFile> Overlay<F> {
    /// An overlay of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self { disks: BTreeMap::new(), segments: BTreeMap::new() }
    }

    /// The overlay of what a reader gives, without void records and, if a limit is given, without
    /// what is beyond it.
    pub fn build(
        reader: Reader<F>,
        state: &State,
        limit: Option<&CountVector>,
    ) -> Result<Self, JournalError> {
        let mut overlay = Self::new();
        for batch in reader {
            let batch = batch?;
            for entry in batch.entries {
                let entry = entry.map_err(|damage| JournalError::Corrupt {
                    file: format!("{:016x}", batch.segment.index),
                    offset: batch.body_at,
                    damage,
                })?;
                let Entry::Record { head, payload_at, .. } = entry else { continue };
                let record = head.peek();
                let beyond = |limit: &CountVector| record.seq > limit.get(record.writer);
                if state.is_void(record) || limit.is_some_and(beyond) {
                    continue;
                }
                let effect = match record.effect {
                    Effect::Write(_) => {
                        PlacedEffect::Write { at: batch.body_at + payload_at as u64 }
                    }
                    Effect::Zero { .. } => PlacedEffect::Zero,
                    Effect::CopyDone | Effect::Idle => PlacedEffect::None,
                };
                let range = record.offset..record.offset + u64::from(head.extent_len_bytes());
                let segment = (batch.segment.index, &batch.segment.file);
                overlay.insert(DiskKey::of(record), range, effect, segment);
            }
        }
        Ok(overlay)
    }

    /// A record was written to the journal.
    pub fn placed(&mut self, placed: &Placed<'_, F>) {
        let record = placed.record;
        let range = record.offset..record.offset + u64::from(record.len_bytes());
        let segment = (placed.segment.index, &placed.segment.file);
        self.insert(DiskKey::of(record), range, placed.effect, segment);
    }

    fn insert(
        &mut self,
        key: DiskKey,
        range: Range<u64>,
        effect: PlacedEffect,
        (segment, file): (u64, &F),
    ) {
        let source = match effect {
            PlacedEffect::Write { at } => Source::Journal { segment, at },
            PlacedEffect::Zero => Source::Zero { segment },
            PlacedEffect::None => return,
        };
        self.segments.entry(segment).or_insert_with(|| file.clone());
        self.disks.entry(key).or_default().insert(range, source);
    }

    /// Segments below this one are folded into the images.
    pub fn prune(&mut self, first_segment: u64) {
        if self.segments.keys().next().is_none_or(|first| *first >= first_segment) {
            return;
        }
        for extents in self.disks.values_mut() {
            extents.retain(|source| source.segment() >= first_segment);
        }
        self.segments.retain(|segment, _| *segment >= first_segment);
    }

    /// Extents that are kept: a measure of memory.
    #[must_use]
    pub fn extents(&self) -> usize {
        self.disks.values().map(Extents::len).sum()
    }
}

impl<F: StorageFile> Default for Overlay<F> {
    fn default() -> Self {
        Self::new()
    }
}

/// An overlay that is written by the group's owner and read by whoever serves its disks.
pub type SharedOverlay<F> = Arc<RwLock<Overlay<F>>>;

/// What a part of a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Anything.
    Data,
    /// Zeroes.
    Zero,
}

/// One disk, readable.
#[derive(Clone, Debug)]
pub struct View<F> {
    key: DiskKey,
    size_bytes: u64,
    image: F,
    overlay: SharedOverlay<F>,
}

impl<F: StorageFile> View<F> {
    /// The disk as image and overlay have it.
    #[must_use]
    pub fn new(key: DiskKey, size_bytes: u64, image: F, overlay: SharedOverlay<F>) -> Self {
        Self { key, size_bytes, image, overlay }
    }

    /// Its size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Fills the buffer from this offset on.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + buf.len() as u64;
        // Files stay readable when their names are gone, so the lock is for looking up only.
        let pieces: Vec<_> = {
            let overlay = self.overlay.read().unwrap_or_else(PoisonError::into_inner);
            let file = |source| match source {
                Source::Journal { segment, at } => Some((overlay.segments[&segment].clone(), at)),
                Source::Zero { .. } => None,
            };
            match overlay.disks.get(&self.key) {
                None => vec![(range, None)],
                Some(extents) => {
                    extents.pieces(range).map(|(r, source)| (r, source.map(file))).collect()
                }
            }
        };
        for (piece, source) in pieces {
            let part = &mut buf[(piece.start - offset) as usize..(piece.end - offset) as usize];
            match source {
                None => self.image.read_at(part, piece.start)?,
                Some(None) => part.fill(0),
                Some(Some((file, at))) => file.read_at(part, at)?,
            }
        }
        Ok(())
    }

    /// What the range is made of, in order and without a hole; `false` from `f` ends it.
    pub fn describe(
        &self,
        range: Range<u64>,
        mut f: impl FnMut(u64, Content) -> bool,
    ) -> io::Result<()> {
        let pieces: Vec<_> = {
            let overlay = self.overlay.read().unwrap_or_else(PoisonError::into_inner);
            match overlay.disks.get(&self.key) {
                None => vec![(range, None)],
                Some(extents) => extents.pieces(range).collect(),
            }
        };
        for (piece, source) in pieces {
            let content = match source {
                Some(Source::Journal { .. }) => Content::Data,
                Some(Source::Zero { .. }) => Content::Zero,
                None => {
                    if !self.describe_image(piece, &mut f)? {
                        return Ok(());
                    }
                    continue;
                }
            };
            if !f(piece.end - piece.start, content) {
                return Ok(());
            }
        }
        Ok(())
    }

    fn describe_image(
        &self,
        range: Range<u64>,
        f: &mut impl FnMut(u64, Content) -> bool,
    ) -> io::Result<bool> {
        let mut at = range.start;
        while at < range.end {
            let data = self.image.next_data(at)?;
            let data_start = data.as_ref().map_or(range.end, |d| d.start.clamp(at, range.end));
            if data_start > at && !f(data_start - at, Content::Zero) {
                return Ok(false);
            }
            let Some(data) = data.filter(|d| d.start < range.end) else { break };
            let data_end = data.end.min(range.end);
            if !f(data_end - data_start, Content::Data) {
                return Ok(false);
            }
            at = data_end;
        }
        Ok(true)
    }
}
