//! The maps that a journal has, and which one is to be made next.

use super::format::LEVEL_MAX;
use super::{FANOUT, MapError, MapFacts, MapFile, map_file_name, parse_map_file_name};
use crate::journal::{JournalError, SegmentFacts, State};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tidelock_planted::Bug;
use tidelock_storage::{Storage, StorageFile};

/// All maps of a journal. A map of level n is of the segments of one aligned run of
/// [`FANOUT`]^n, so maps do not overlap but contain each other.
#[derive(Clone, Debug)]
pub struct Maps<F> {
    /// By last segment and level.
    by_end: BTreeMap<(u64, u32), Arc<MapFile<F>>>,
}

/// A map that is to be made.
#[derive(Debug)]
pub(in crate::journal) enum Due<F> {
    /// Of this segment, from its index.
    Flat(u64),
    /// Of these maps, which follow each other.
    Merged(Vec<Arc<MapFile<F>>>),
}

/// Segments of a map of this level.
fn span(level: u32) -> u64 {
    FANOUT.pow(level)
}

impl<F> Default for Maps<F> {
    fn default() -> Self {
        Self { by_end: BTreeMap::new() }
    }
}

impl<F: StorageFile> Maps<F> {
    /// The maps whose last segment is this one, those of most segments first.
    pub fn ending_at(&self, segment: u64) -> impl Iterator<Item = &Arc<MapFile<F>>> {
        self.by_end.range((segment, 0)..=(segment, u32::MAX)).rev().map(|(_, map)| map)
    }

    /// Whether there is a map of just this segment that can be used whatever the cut is.
    #[must_use]
    pub fn has_segment(&self, segment: u64, state: &State) -> bool {
        self.by_end.get(&(segment, 0)).is_some_and(|map| is_good(map, state))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_end.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_end.is_empty()
    }

    pub(in crate::journal) fn insert(&mut self, map: MapFile<F>) {
        let MapFacts { level, last, .. } = map.facts();
        self.by_end.insert((last.index, *level), Arc::new(map));
    }

    /// Takes out those that end before a segment. Returns their files.
    pub(in crate::journal) fn remove_before(&mut self, segment: u64) -> Vec<String> {
        let kept = self.by_end.split_off(&(segment, 0));
        let gone = std::mem::replace(&mut self.by_end, kept);
        gone.values().map(|map| crate::journal::map_name(map.facts())).collect()
    }

    /// The next one to make of sealed segments, if one is missing or cannot be used any more.
    pub(in crate::journal) fn due(
        &self,
        sealed: Range<u64>,
        state: &State,
        has_index: impl Fn(u64) -> bool,
    ) -> Option<Due<F>> {
        let good = |level, last| self.by_end.get(&(last, level)).filter(|map| is_good(map, state));
        let missing = sealed.clone().find(|at| good(0, *at).is_none() && has_index(*at));
        if let Some(segment) = missing {
            return Some(Due::Flat(segment));
        }
        for level in 1..=LEVEL_MAX {
            let (span, part) = (span(level), span(level - 1));
            // Segments count from 1.
            let first = (sealed.start - 1).next_multiple_of(span) + 1;
            if first + span > sealed.end {
                return None;
            }
            let mut lasts = (first..).step_by(span as usize).map(|first| first + span - 1);
            let due = lasts.by_ref().take_while(|last| *last < sealed.end).find_map(|last| {
                if good(level, last).is_some() {
                    return None;
                }
                let ends = (0..FANOUT).rev().map(|nth| last - nth * part);
                ends.map(|end| good(level - 1, end).cloned()).collect::<Option<Vec<_>>>()
            });
            if let Some(parts) = due {
                return Some(Due::Merged(parts));
            }
        }
        None
    }

    /// Reads the maps of a journal with these sealed segments, and removes those that are not
    /// theirs, that are damaged, and that were not finished. They are made again.
    pub(in crate::journal) fn open<S: Storage<File = F>>(
        storage: &S,
        dir: &str,
        sealed: &BTreeMap<u64, SegmentFacts>,
    ) -> Result<Self, JournalError> {
        let mut maps = Self::default();
        let names = storage.list(dir).map_err(JournalError::io("list the journal"))?;
        for name in names {
            let Some((level, index, id)) = parse_map_file_name(&name) else { continue };
            let path = tidelock_storage::join(dir, &name);
            let is_named = |facts: &MapFacts| {
                let is_run = level <= LEVEL_MAX
                    && facts.last.index - facts.first + 1 == span(level)
                    && (facts.first - 1).is_multiple_of(span(level));
                (facts.level, facts.last.index, facts.last.id) == (level, index, id) && is_run
            };
            let is_of = |map: &MapFile<F>| {
                let facts = map.facts();
                facts.first > 0 && is_named(facts) && sealed.get(&index) == Some(&facts.last)
            };
            let opened = match name == map_file_name(level, index, id) {
                true => storage.open(&path).map_err(MapError::from).and_then(MapFile::open).ok(),
                false => None,
            };
            match opened.filter(is_of) {
                Some(map) => maps.insert(map),
                None => storage
                    .remove(&path)
                    .map_err(JournalError::io("remove a map that is not needed"))?,
            }
        }
        Ok(maps)
    }
}

/// Whether everything in it counts and can be read.
fn is_good<F: StorageFile>(map: &MapFile<F>, state: &State) -> bool {
    let counts = |run: &super::MapRun| run.last <= state.last_that_counts(run.writer, run.epoch);
    let counts = |run: &super::MapRun| tidelock_planted::is(Bug::MapKeepsVoid) || counts(run);
    !map.is_damaged() && map.facts().runs.iter().all(counts)
}
