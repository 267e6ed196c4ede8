//! What of a writer's disks is in a range of segments: a stack of maps, the newest on top.
//!
//! Invariant: a map is in the stack only if all that it has of the writer is within what is asked for.
//! Segments of which only a part is (the one in which the cut falls, those around a recovery) and those that have no
//! map yet are read by their indexes, into memory: of one point in time that is one segment for each
//! epoch, and a few of the newest.

use super::source::{Piece, Source};
use crate::extents::DiskKey;
use crate::extents::Extents;
use crate::journal::{JournalError, MapFile, MapRun, Segment, State, Tail};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use tidelock_planted::Bug;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;

#[derive(Clone, Debug)]
enum Layer<F> {
    Map(Arc<MapFile<F>>),
    Memory(Loaded),
}

/// What segments have, in memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Loaded {
    pub(super) disks: BTreeMap<DiskKey, Extents<Source>>,
    /// By writer: of this segment nothing is known, so what is not in `disks` is not known either.
    pub(super) lost: BTreeMap<WriterId, u64>,
}

impl Loaded {
    fn is_empty(&self) -> bool {
        self.disks.is_empty() && self.lost.is_empty()
    }

    /// A range of a disk in pieces; `None`: it has nothing there.
    pub(super) fn pieces(
        &self,
        key: DiskKey,
        range: Range<u64>,
    ) -> Vec<(Range<u64>, Option<Source>)> {
        let lost = self.lost.get(&key.writer).map(|segment| Source::Lost { segment: *segment });
        match self.disks.get(&key) {
            None => vec![(range, lost)],
            Some(extents) => {
                extents.pieces(range).map(|(range, source)| (range, source.or(lost))).collect()
            }
        }
    }

    fn lose(&mut self, writer: WriterId, segment: u64) {
        self.disks.retain(|key, _| key.writer != writer);
        self.lost.insert(writer, segment);
    }
}

/// Those that a view is made of, by index; all its stacks have the same.
pub(super) type Segments<F> = Arc<BTreeMap<u64, Segment<F>>>;

/// The stack.
#[derive(Clone, Debug)]
pub(super) struct Stack<F> {
    /// Newest first.
    layers: Vec<Layer<F>>,
    segments: Segments<F>,
}

/// What is asked for of a writer.
pub(super) struct Limit<'a> {
    pub(super) writer: WriterId,
    pub(super) state: &'a State,
    /// `None`: everything.
    pub(super) cut: Option<&'a CountVector>,
}

/// What of a map is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    All,
    None,
    Some,
}

impl Limit<'_> {
    /// Of the records of an epoch those up to this one.
    pub(super) fn last(&self, epoch: Epoch) -> Seq {
        let counts = self.state.last_that_counts(self.writer, epoch);
        self.cut.map_or(counts, |cut| counts.min(cut.get(self.writer)))
    }

    fn share(&self, runs: &[MapRun]) -> Share {
        let of_writer = || runs.iter().filter(|run| run.writer == self.writer);
        if of_writer().all(|run| run.first > self.last(run.epoch)) {
            return Share::None;
        }
        let cut = self.cut.map_or(Seq(u64::MAX), |cut| cut.get(self.writer));
        let within = |run: &MapRun| match tidelock_planted::is(Bug::MapKeepsVoid) {
            true => run.last <= cut,
            false => run.last <= self.last(run.epoch),
        };
        let all = of_writer().all(within);
        if all { Share::All } else { Share::Some }
    }
}

impl<F: StorageFile> Stack<F> {
    /// What the journal has of a writer in some segments that follow each other.
    pub(super) fn build(
        tail: &Tail<F>,
        segments: &Segments<F>,
        limit: &Limit<'_>,
    ) -> Result<Self, JournalError> {
        let bounds = segments.first_key_value().zip(segments.last_key_value());
        let (first, mut end) = bounds.map_or((0, 0), |((first, _), (last, _))| (*first, *last + 1));
        let mut layers = Vec::new();
        // Neighbours that have to be read, newest first.
        let mut loose = Vec::new();
        while end > first {
            let last = end - 1;
            let usable = tail.maps().ending_at(last).filter(|map| !map.is_damaged());
            let found = usable
                .map(|map| (map, limit.share(&map.facts().runs)))
                .find(|(_, share)| *share != Share::Some);
            let Some((map, share)) = found else {
                loose.push(last);
                end = last;
                continue;
            };
            if share == Share::All {
                layers.extend(memory(tail, &mut loose, limit)?);
                layers.push(Layer::Map(Arc::clone(map)));
            }
            end = map.facts().first;
        }
        layers.extend(memory(tail, &mut loose, limit)?);
        Ok(Self { layers, segments: Arc::clone(segments) })
    }

    /// Whether there is nothing in it.
    pub(super) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    #[cfg(test)]
    pub(super) fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Adds what a range of a disk is made of, in any order, without a hole.
    pub(super) fn pieces(
        &self,
        key: DiskKey,
        range: Range<u64>,
        out: &mut Vec<(Range<u64>, Piece<F>)>,
    ) -> io::Result<()> {
        let (mut open, mut rest) = (vec![range], Vec::new());
        for layer in &self.layers {
            if open.is_empty() {
                return Ok(());
            }
            for range in open.drain(..) {
                let mut at = range.start;
                let mut found = |part: Range<u64>, source: Source| {
                    if part.start > at {
                        rest.push(at..part.start);
                    }
                    at = part.end;
                    // What is in no segment is in the image, and nothing older is newer than that.
                    let piece = Piece::of(source, |segment| self.segments.get(&segment));
                    out.push((part, piece.unwrap_or(Piece::Image)));
                };
                layer.overlapping(key, &range, &mut found)?;
                if at < range.end {
                    rest.push(at..range.end);
                }
            }
            std::mem::swap(&mut open, &mut rest);
        }
        out.extend(open.into_iter().map(|range| (range, Piece::Image)));
        Ok(())
    }
}

impl<F: StorageFile> Layer<F> {
    /// Shows what the layer has of a range, in order, cut to the range.
    fn overlapping(
        &self,
        key: DiskKey,
        range: &Range<u64>,
        f: &mut impl FnMut(Range<u64>, Source),
    ) -> io::Result<()> {
        use crate::extents::Slice;
        match self {
            Layer::Memory(loaded) => {
                for (part, source) in loaded.pieces(key, range.clone()) {
                    if let Some(source) = source {
                        f(part, source);
                    }
                }
                Ok(())
            }
            Layer::Map(map) => map
                .overlapping(key, range.clone(), |entry| {
                    let start = entry.offset.max(range.start);
                    let source = Source::of_map(entry).without_front(start - entry.offset);
                    f(start..entry.end().min(range.end), source);
                })
                .map_err(|error| {
                    let name = crate::journal::map_name(map.facts());
                    io::Error::other(format!(
                        "map {name} of the journal cannot be used: {error}. It is made again; open the view again then"
                    ))
                }),
        }
    }
}

/// Segments, newest first, as one layer in memory.
fn memory<F: StorageFile>(
    tail: &Tail<F>,
    loose: &mut Vec<u64>,
    limit: &Limit<'_>,
) -> Result<Option<Layer<F>>, JournalError> {
    let mut loaded = Loaded::default();
    while let Some(segment) = loose.pop() {
        insert(tail, segment, limit, &mut loaded)?;
    }
    Ok((!loaded.is_empty()).then_some(Layer::Memory(loaded)))
}

/// Puts what a segment has of a writer over what is there. If it is not known what it has, nothing
/// that is there counts.
pub(super) fn insert<F: StorageFile>(
    tail: &Tail<F>,
    segment: u64,
    limit: &Limit<'_>,
    loaded: &mut Loaded,
) -> Result<(), JournalError> {
    let entries = match tail.entries_of(segment, limit.writer) {
        Err(JournalError::Corrupt { .. } | JournalError::Io { .. }) => {
            loaded.lose(limit.writer, segment);
            return Ok(());
        }
        entries => entries?,
    };
    for entry in entries {
        if entry.seq > limit.last(entry.epoch) {
            continue;
        }
        let key = DiskKey { writer: entry.writer, disk: entry.disk };
        let extents = loaded.disks.entry(key).or_default();
        extents.insert(entry.range(), Source::of_entry(segment, &entry));
    }
    Ok(())
}
