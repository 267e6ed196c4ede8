//! Work beside the journal, for a thread that nobody waits for: the indexes of sealed segments, and
//! maps of them.

use super::index::{Builder, Sealed, SegmentIndex, WAYPOINTS_PER_SEGMENT, index_file_name};
use super::map::{Due, MapError, MapFile, flatten, write_flat, write_merged};
use super::{
    Compress, CompressJob, IndexError, Journal, JournalError, Position, ScrubJob, SegmentFacts,
    SegmentFile, State, Tail, UNINDEXED_MAX, Waypoint,
};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;

/// Writes one index or one map, away from what acknowledges.
#[derive(Debug)]
pub struct IndexJob<S: Storage> {
    pub(super) storage: S,
    pub(super) dir: String,
    pub(super) work: Work<S::File>,
}

#[derive(Debug)]
pub(super) enum Work<F> {
    /// The index of a segment.
    Index { sealed: Sealed, closed: Option<(Hlc, CountVector)> },
    /// The map of a segment, from its index.
    Flat { of: SegmentFacts, index: F, state: Box<State> },
    /// The map of several.
    Merged(Vec<Arc<MapFile<F>>>),
}

/// What such a job has made: its content is durable.
#[derive(Debug)]
pub struct Made<F>(pub(super) MadeFile<F>);

#[derive(Debug)]
pub(super) enum MadeFile<F> {
    /// The index of this segment.
    Index(u64, F),
    /// A map.
    Map(MapFile<F>),
}

impl<S: Storage> IndexJob<S> {
    /// Which segment, or the last one of several.
    #[must_use]
    pub fn segment(&self) -> u64 {
        match &self.work {
            Work::Index { sealed, .. } => sealed.index(),
            Work::Flat { of, .. } => of.index,
            Work::Merged(maps) => maps.last().map_or(0, |map| map.facts().last.index),
        }
    }

    /// Does it. What it reads was synced before; what it makes is written to a file aside, which
    /// is synced, and gets its name; then, for an index, the directory is synced.
    pub fn run(self) -> Result<Made<S::File>, JournalError> {
        let Self { storage, dir, work } = self;
        let made = match work {
            Work::Index { sealed, closed } => {
                let name = index_file_name(sealed.of.index, sealed.of.id);
                let write = || {
                    tidelock_storage::replace(&storage, &dir, &name, &sealed.encode(closed))?;
                    storage.open(&tidelock_storage::join(&dir, &name))
                };
                let file =
                    write().map_err(JournalError::io("write the index of a journal segment"))?;
                MadeFile::Index(sealed.of.index, file)
            }
            Work::Flat { of, index, state } => {
                let index = SegmentIndex::open_of(index, &of).map_err(unreadable)?;
                let entries: Result<Vec<_>, _> = index.entries(..).collect();
                let entries = entries.map_err(unreadable)?;
                let (facts, flat) = flatten(&of, entries, &index.footer().runs, &state);
                MadeFile::Map(write_flat(&storage, &dir, facts, flat).map_err(unwritten)?)
            }
            Work::Merged(maps) => {
                MadeFile::Map(write_merged(&storage, &dir, &maps).map_err(unwritten)?)
            }
        };
        Ok(Made(made))
    }

    /// The content of the index that it would write; `None`: it makes a map.
    #[must_use]
    pub fn content(self) -> Option<Vec<u8>> {
        match self.work {
            Work::Index { sealed, closed } => Some(sealed.encode(closed)),
            Work::Flat { .. } | Work::Merged(_) => None,
        }
    }
}

fn unreadable(error: IndexError) -> JournalError {
    let source = match error {
        IndexError::Io(source) => source,
        error => io::Error::other(error),
    };
    JournalError::io("read the index of a journal segment")(source)
}

fn unwritten(error: MapError) -> JournalError {
    let source = match error {
        MapError::Io(source) => source,
        error => io::Error::other(error),
    };
    JournalError::io("write a map of the journal")(source)
}

impl<S: Storage> Journal<S> {
    /// Takes a segment whose index is to be written. Returns one for which there is no room.
    pub(super) fn push_unindexed(&mut self, sealed: Sealed) -> Option<Sealed> {
        let is_full = self.unindexed.len() == UNINDEXED_MAX;
        let over = is_full.then(|| self.unindexed.pop_front()).flatten();
        self.unindexed.push_back(sealed);
        over
    }

    /// The end of what is written, with the state there, if the newest segment has had no waypoint for so long that it
    /// is time for one. To be marked when it is durable.
    #[must_use]
    pub fn waypoint_due(&self) -> Option<(Position, State)> {
        let end = self.end();
        let last = self.builder.waypoints().last().map_or(0, |of| of.offset);
        let is_due = end.offset - last >= self.options.segment_bytes / WAYPOINTS_PER_SEGMENT;
        (is_due && self.batch.is_empty()).then(|| (end, self.state.clone()))
    }

    /// A replay may begin at this place of a segment, if that is still the newest one.
    pub fn mark(&mut self, segment: u64, waypoint: Waypoint) {
        if self.segments.last().is_some_and(|last| last.index == segment) {
            self.builder.waypoint(waypoint);
        }
    }

    /// Work that writes the index of a sealed segment, if one has none; not of segments before
    /// this one, which are about to go. `closed` is asked what is known of the segment's beginning.
    pub fn index_job(
        &mut self,
        from: u64,
        closed: impl FnOnce(u64) -> Option<(Hlc, CountVector)>,
    ) -> Option<IndexJob<S>> {
        let from = from.max(self.segments[0].index);
        while self.unindexed.front().is_some_and(|sealed| sealed.index() < from) {
            self.unindexed.pop_front();
        }
        let sealed = self.unindexed.pop_front()?;
        let closed = closed(sealed.index());
        // Until it is written it is read from here.
        self.being_indexed = Some(sealed.clone());
        Some(self.job(Work::Index { sealed, closed }))
    }

    /// Work that writes a map, if one is due; not of segments before this one.
    pub fn map_job(&mut self, from: u64) -> Option<IndexJob<S>> {
        if !self.maps_due {
            return None;
        }
        let first = from.max(self.segments[0].index);
        let sealed = first..self.segments.last().map_or(first, |last| last.index.max(first));
        let has_index = |segment| self.indexes.contains_key(&segment);
        let work = match self.maps.due(sealed, &self.state, has_index) {
            Some(Due::Flat(segment)) => {
                let index = self.indexes.get(&segment)?.clone();
                let of = self.facts(segment)?;
                Work::Flat { of, index, state: Box::new(self.state.clone()) }
            }
            Some(Due::Merged(maps)) => Work::Merged(maps),
            None => {
                self.maps_due = false;
                return None;
            }
        };
        Some(self.job(work))
    }

    pub(super) fn job(&self, work: Work<S::File>) -> IndexJob<S> {
        IndexJob { storage: self.storage.clone(), dir: self.dir.clone(), work }
    }

    /// Such a job has made something.
    pub fn made(&mut self, made: Made<S::File>) {
        match made.0 {
            MadeFile::Index(segment, file) => {
                self.indexes.insert(segment, file);
                self.maps_due = true;
            }
            MadeFile::Map(map) => Arc::make_mut(&mut self.maps).insert(map),
        }
    }

    /// Such a job has failed: nothing is tried again before the next segment is sealed.
    pub fn not_made(&mut self, segment: u64) {
        self.maps_due = false;
        let is_good = |file: &S::File, of: &SegmentFacts| {
            SegmentIndex::open_of(file.clone(), of)
                .is_ok_and(|index| index.entries(..).all(|entry| entry.is_ok()))
        };
        if let (Some(file), Some(of)) = (self.indexes.get(&segment), self.facts(segment))
            && !is_good(file, &of)
        {
            self.indexes.remove(&segment);
        }
    }

    /// A recovery or a removal has made records void: maps that have them are made again.
    pub fn note_void(&mut self) {
        self.maps_due = true;
    }

    /// How a sealed segment ends.
    fn facts(&self, segment: u64) -> Option<SegmentFacts> {
        self.sealed.get(&segment).copied()
    }

    /// As if its index could not have been written.
    #[cfg(any(test, feature = "memory-storage"))]
    pub fn forget_entries_of(&mut self, segment: u64) {
        self.unindexed.retain(|sealed| sealed.index() != segment);
        self.indexes.remove(&segment);
    }

    /// What a reader through maps needs, as it is now.
    #[must_use]
    pub fn tail(&self) -> Tail<S::File> {
        let waiting = self.unindexed.iter().chain(&self.being_indexed);
        let mut waiting: BTreeMap<u64, Arc<Builder>> =
            waiting.map(|sealed| (sealed.index(), Arc::clone(&sealed.builder))).collect();
        if let Some(last) = self.segments.last() {
            waiting.insert(last.index, Arc::new(self.builder.clone()));
        }
        Tail {
            segments: self.segments.clone(),
            indexes: self.indexes.clone(),
            maps: Arc::clone(&self.maps),
            waiting,
        }
    }

    /// Work that verifies the first sealed segment after this one, if there is one.
    #[must_use]
    pub fn scrub_job(&self, after: u64) -> Option<ScrubJob<S::File>> {
        let sealed = self.segments.split_last().map_or(&[][..], |(_, sealed)| sealed);
        let segment = sealed.iter().find(|segment| segment.index > after)?.index;
        self.scrub_job_of(segment)
    }

    /// Work that verifies this segment; of the last one what is durable.
    #[must_use]
    pub fn scrub_job_of(&self, segment: u64) -> Option<ScrubJob<S::File>> {
        let mut segment = self.segments.iter().find(|of| of.index == segment)?.clone();
        if segment.index == self.durable_end.segment {
            segment.len_bytes = self.durable_end.offset;
        }
        let listed = self.tail().listed(segment.index);
        Some(ScrubJob { segment, listed })
    }

    /// The first sealed segment after this one that is not compressed and has an index, with the time
    /// at which its last record had arrived, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn next_plain(&self, after: u64) -> Option<(u64, u64)> {
        let from = self.segments.partition_point(|of| of.index <= after);
        let sealed = self.segments.len().saturating_sub(1);
        let is_plain = |at: &usize| {
            let of = &self.segments[*at];
            of.file.cold().is_none() && self.indexes.contains_key(&of.index)
        };
        let at = (from..sealed).find(is_plain)?;
        Some((self.segments[at].index, self.starts[at + 1].arrived_ms))
    }

    /// Work that compresses this segment, if it is sealed.
    #[must_use]
    pub fn compress_job(&self, segment: u64, how: Compress) -> Option<CompressJob<S>> {
        let of = self.facts(segment)?;
        let segment = self.segments.iter().find(|of| of.index == segment)?.clone();
        Some(CompressJob {
            storage: self.storage.clone(),
            dir: self.dir.clone(),
            listed: self.tail().listed(segment.index),
            segment,
            of,
            how,
            cache: Arc::clone(&self.blocks),
        })
    }

    /// A segment was compressed: its own file goes. If a crash brings it back, opening removes it, or
    /// the other one.
    pub fn compressed(&mut self, segment: u64, file: SegmentFile<S::File>) -> io::Result<()> {
        let Some(of) = self.segments.iter_mut().find(|of| of.index == segment) else {
            return Ok(());
        };
        let name = of.file_name();
        if of.file.cold().is_some() || file.cold().is_none_or(|cold| cold.facts().id != of.id) {
            return Ok(());
        }
        of.file = file;
        self.storage.remove(&tidelock_storage::join(&self.dir, &name))
    }

    /// How many sealed segments come after this one.
    #[must_use]
    pub fn sealed_after(&self, segment: u64) -> u64 {
        let after = self.segments.iter().filter(|of| of.index > segment).count();
        after.saturating_sub(1) as u64
    }

    /// Whether there may be work for [`Journal::index_job`] or [`Journal::map_job`].
    #[must_use]
    pub fn has_unindexed(&self) -> bool {
        !self.unindexed.is_empty() || self.maps_due
    }
}
