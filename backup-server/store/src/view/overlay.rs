//! What of a group's disks is in the journal and not in the images.
//!
//! A past one is a stack of maps for each writer and does not change. A live one has what is newest in
//! memory besides: the segments that have no map yet; as they get one they go to the stacks.

use super::source::{Piece, Source};
use super::stack::{Limit, Loaded, Stack, insert};
use crate::damage::{ImageDamage, Noticed};
use crate::extents::DiskKey;
use crate::extents::Extents;
use crate::journal::{JournalError, Placed, PlacedEffect, Segment, State, Tail};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::record::{Body, Payload};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;

pub(super) type Stacks<F> = Arc<BTreeMap<WriterId, Stack<F>>>;

/// The extents of a journal's tail, for all disks of the group.
#[derive(Clone, Debug)]
pub struct Overlay<F> {
    recent: Loaded,
    /// Those that `recent` is about.
    segments: BTreeMap<u64, Segment<F>>,
    /// The first of them: what is before is in the stacks.
    recent_from: u64,
    stacks: Stacks<F>,
    /// What of the images is damaged where nothing of this is over them.
    damaged: Arc<ImageDamage>,
    /// Segments that readers have found to be damaged.
    noticed: Noticed,
}

impl<F: StorageFile> Overlay<F> {
    /// An overlay of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            recent: Loaded::default(),
            segments: BTreeMap::new(),
            recent_from: 0,
            stacks: Arc::default(),
            damaged: Arc::default(),
            noticed: Noticed::default(),
        }
    }

    /// What of the images below it is damaged, and who hears of what else is.
    #[must_use]
    pub fn over(mut self, damaged: Arc<ImageDamage>, noticed: Noticed) -> Self {
        (self.damaged, self.noticed) = (damaged, noticed);
        self
    }

    pub(super) fn noticed(&self) -> Noticed {
        self.noticed.clone()
    }

    /// The images have moved.
    pub fn set_damaged(&mut self, damaged: Arc<ImageDamage>) {
        self.damaged = damaged;
    }

    pub(super) fn damaged(&self) -> Arc<ImageDamage> {
        Arc::clone(&self.damaged)
    }

    /// What is in a cut, in a range of segments: what is before is in the images.
    pub fn past(
        tail: &Tail<F>,
        state: &State,
        range: Range<u64>,
        cut: &CountVector,
    ) -> Result<Self, JournalError> {
        Ok(Self { stacks: stacks(tail, state, range, Some(cut))?, ..Self::new() })
    }

    /// Everything from a segment on.
    pub fn live(tail: &Tail<F>, state: &State, base: u64) -> Result<Self, JournalError> {
        let mut overlay = Self::new();
        overlay.recent_from = first_without_map(tail, state, base);
        overlay.stacks = stacks(tail, state, base..overlay.recent_from, None)?;
        for segment in tail.segments().iter().filter(|s| s.index >= overlay.recent_from) {
            for writer in writers(state) {
                let limit = Limit { writer, state, cut: None };
                insert(tail, segment.index, &limit, &mut overlay.recent)?;
            }
            overlay.segments.insert(segment.index, segment.clone());
        }
        Ok(overlay)
    }

    /// Segments have got maps, or are in the images.
    pub fn refresh(
        &mut self,
        tail: &Tail<F>,
        state: &State,
        base: u64,
    ) -> Result<(), JournalError> {
        let from = first_without_map(tail, state, base).max(self.recent_from);
        self.stacks = stacks(tail, state, base..from, None)?;
        self.recent_from = from;
        if self.segments.keys().next().is_some_and(|first| *first < from) {
            for extents in self.recent.disks.values_mut() {
                extents.retain(|source| source.segment() >= from);
            }
            self.recent.lost.retain(|_, segment| *segment >= from);
            self.segments.retain(|segment, _| *segment >= from);
        }
        Ok(())
    }

    /// A record was written to the journal.
    pub fn placed(&mut self, placed: &Placed<'_, F>) {
        let record = placed.record;
        let segment = placed.segment.index;
        let fields = record.body.fields();
        let len_bytes = fields.len_bytes;
        let source = match placed.effect {
            PlacedEffect::Write { at } => {
                let crc = record.payload().map_or(0, Payload::crc);
                Source::Payload { segment, at, skip: 0, len_bytes, crc }
            }
            PlacedEffect::Zero => Source::Zero { segment },
            PlacedEffect::None => return,
        };
        let range = fields.offset..fields.offset + u64::from(len_bytes);
        self.segments.entry(segment).or_insert_with(|| placed.segment.clone());
        let extents = self.recent.disks.entry(DiskKey::of(record)).or_default();
        extents.insert(range, source);
    }

    /// Extents that are kept in memory.
    #[must_use]
    pub fn extents(&self) -> usize {
        self.recent.disks.values().map(Extents::len).sum()
    }

    /// How many layers there are below what is in memory, of the writer that has most.
    #[cfg(test)]
    pub(super) fn layers(&self) -> usize {
        self.stacks.values().map(Stack::layers).max().unwrap_or(0)
    }

    /// What a range of a disk is in memory, and where what is not there is looked up.
    pub(super) fn recent(&self, key: DiskKey, range: Range<u64>) -> (Recent<F>, Stacks<F>) {
        let stacks = Arc::clone(&self.stacks);
        let piece = |source| Piece::of(source, |segment| self.segments.get(&segment));
        let pieces = self.recent.pieces(key, range).into_iter();
        (pieces.map(|(range, source)| (range, source.and_then(piece))).collect(), stacks)
    }
}

/// Pieces in order; `None`: not in memory.
type Recent<F> = Vec<(Range<u64>, Option<Piece<F>>)>;

impl<F: StorageFile> Default for Overlay<F> {
    fn default() -> Self {
        Self::new()
    }
}

fn writers(state: &State) -> impl Iterator<Item = WriterId> + use<> {
    (0..state.writers.len() as u16).map(WriterId)
}

fn stacks<F: StorageFile>(
    tail: &Tail<F>,
    state: &State,
    range: Range<u64>,
    cut: Option<&CountVector>,
) -> Result<Stacks<F>, JournalError> {
    let inside = tail.segments().iter().filter(|segment| range.contains(&segment.index));
    let segments = Arc::new(inside.map(|of| (of.index, of.clone())).collect());
    let mut stacks = BTreeMap::new();
    for writer in writers(state) {
        let stack = Stack::build(tail, &segments, &Limit { writer, state, cut })?;
        if !stack.is_empty() {
            stacks.insert(writer, stack);
        }
    }
    Ok(Arc::new(stacks))
}

/// From here on segments are in memory: it is the last one at the latest.
fn first_without_map<F: StorageFile>(tail: &Tail<F>, state: &State, base: u64) -> u64 {
    let of = tail.segments().iter().map(|segment| segment.index).filter(|index| *index >= base);
    let mut without = of.filter(|index| !tail.maps().has_segment(*index, state));
    without.next().unwrap_or(base)
}
