//! Making maps: of one segment from its index, of several segments from the maps of the level
//! below.

use super::format::{
    BLOCK_BYTES, KEYS_PER_FENCE, Leaf, MapEntry, MapError, MapFacts, MapRun, Place, encode_end,
    encode_fence,
};
use super::{MapFile, map_file_name};
use crate::extents::DiskKey;
use crate::extents::{Extents, Slice};
use crate::journal::{IndexEntry, SegmentFacts, State, WriterRun};
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use tidelock_planted::Bug;
use tidelock_protocol::ids::{Epoch, WriterId};
use tidelock_storage::{Storage, StorageFile};

/// Bytes that are written at once.
const WRITE_BYTES: usize = 1 << 20;

/// An entry of an index as a value of an extent.
#[derive(Clone, Copy, Debug)]
struct Part {
    of: IndexEntry,
    skip: u32,
}

impl Slice for Part {
    fn without_front(self, bytes: u64) -> Self {
        Self { skip: self.skip + bytes as u32, ..self }
    }
}

/// The newest of a segment's entries that are not void, without overlaps, and the runs of them.
pub(in crate::journal) fn flatten(
    segment: &SegmentFacts,
    mut entries: Vec<IndexEntry>,
    runs: &[WriterRun],
    state: &State,
) -> (MapFacts, Vec<MapEntry>) {
    let counts = |writer, epoch| state.last_that_counts(writer, epoch);
    entries.retain(|entry| entry.seq <= counts(entry.writer, entry.epoch));
    entries.sort_unstable_by_key(|of| (DiskKey { writer: of.writer, disk: of.disk }, of.offset));
    let mut flat = Vec::with_capacity(entries.len());
    let mut rest = &mut entries[..];
    while !rest.is_empty() {
        let (together, after) = rest.split_at_mut(overlapping(rest));
        newest(together, |of, range, skip| flat.push(entry(segment.index, of, range, skip)));
        rest = after;
    }
    let runs = runs.iter().filter_map(|run| {
        let last = run.last.min(counts(run.writer, run.epoch));
        let WriterRun { writer, epoch, first, .. } = *run;
        (first <= last).then_some(MapRun { writer, epoch, first, last })
    });
    let facts = MapFacts { level: 0, first: segment.index, last: *segment, runs: runs.collect() };
    (facts, flat)
}

/// How many of the first, which are in the order of their places, overlap each other, or are the only one.
fn overlapping(entries: &[IndexEntry]) -> usize {
    let first = &entries[0];
    let mut end = first.range().end;
    let others = entries[1..].iter().take_while(|next| {
        let does = (next.writer, next.disk) == (first.writer, first.disk) && next.offset < end;
        end = end.max(next.range().end);
        does
    });
    1 + others.count()
}

/// What is the newest, where, and how many bytes of it are before that.
fn newest(entries: &mut [IndexEntry], mut f: impl FnMut(&IndexEntry, Range<u64>, u32)) {
    if let [one] = entries {
        return f(one, one.range(), 0);
    }
    // Of one writer the order of the journal; no disk has two.
    entries.sort_unstable_by_key(|entry| (entry.epoch, entry.seq));
    let mut extents = Extents::default();
    for of in entries {
        extents.insert(of.range(), Part { of: *of, skip: 0 });
    }
    extents.iter().for_each(|(range, part)| f(&part.of, range, part.skip));
}

fn entry(segment: u64, of: &IndexEntry, range: Range<u64>, skip: u32) -> MapEntry {
    MapEntry {
        key: DiskKey { writer: of.writer, disk: of.disk },
        offset: range.start,
        len_bytes: (range.end - range.start) as u32,
        segment,
        at: of.at,
        skip: if of.at == 0 { 0 } else { skip },
        payload_len: if of.at == 0 { 0 } else { of.len_bytes },
        crc: of.crc,
    }
}

/// The runs of several maps that follow each other.
fn merge_runs<'a>(of: impl Iterator<Item = &'a MapRun>) -> Vec<MapRun> {
    let mut runs: BTreeMap<(WriterId, Epoch), MapRun> = BTreeMap::new();
    for run in of {
        let merged = runs.entry((run.writer, run.epoch)).or_insert(*run);
        merged.first = merged.first.min(run.first);
        merged.last = merged.last.max(run.last);
    }
    runs.into_values().collect()
}

/// Several maps in order as one: of what overlaps the newest.
struct Merge<I> {
    /// Newest first, each with its next entry.
    sources: Vec<(Option<MapEntry>, I)>,
}

impl<I: Iterator<Item = Result<MapEntry, MapError>>> Merge<I> {
    fn new(newest_first: Vec<I>) -> Result<Self, MapError> {
        let sources = newest_first.into_iter().map(|mut source| {
            let next = source.next().transpose()?;
            Ok((next, source))
        });
        Ok(Self { sources: sources.collect::<Result<_, MapError>>()? })
    }

    fn next(&mut self) -> Result<Option<MapEntry>, MapError> {
        let heads = || self.sources.iter().filter_map(|(head, _)| head.as_ref());
        let Some((key, start)) = heads().map(MapEntry::place).min() else { return Ok(None) };
        // Sources are newest first, so the first that begins here wins, up to where a newer one begins.
        let begins = |head: &Option<MapEntry>| head.is_some_and(|e| e.place() == (key, start));
        let winner = match tidelock_planted::is(Bug::MapOlderWins) {
            true => self.sources.iter().rposition(|(head, _)| begins(head)),
            false => self.sources.iter().position(|(head, _)| begins(head)),
        };
        let winner = winner.expect("the least");
        let mut taken = self.sources[winner].0.expect("begins here");
        let newer = self.sources[..winner].iter().filter_map(|(head, _)| head.as_ref());
        let stop =
            newer.filter(|head| head.key == key && head.offset > start).map(|head| head.offset);
        let end = stop.fold(taken.end(), u64::min);
        taken.len_bytes = (end - start) as u32;
        for (head, source) in &mut self.sources {
            while let Some(entry) = head.filter(|entry| entry.key == key && entry.offset < end) {
                *head = match entry.end() > end {
                    true => Some(without_front(entry, end - entry.offset)),
                    false => source.next().transpose()?,
                };
            }
        }
        Ok(Some(taken))
    }
}

fn without_front(entry: MapEntry, bytes: u64) -> MapEntry {
    let skip = if entry.at == 0 { 0 } else { entry.skip + bytes as u32 };
    let (offset, len_bytes) = (entry.offset + bytes, entry.len_bytes - bytes as u32);
    MapEntry { offset, len_bytes, skip, ..entry }
}

/// Writes a map's file from front to back.
struct Writer<F> {
    file: F,
    facts: MapFacts,
    at: u64,
    out: Vec<u8>,
    leaf: Leaf,
    /// The newest entry, which the next one may go on with.
    last: Option<MapEntry>,
    firsts: Vec<Place>,
    entries: u64,
}

impl<F: StorageFile> Writer<F> {
    fn new(file: F, facts: MapFacts) -> Self {
        let (out, leaf, firsts) = (Vec::new(), Leaf::default(), Vec::new());
        Self { file, facts, at: 0, out, leaf, last: None, firsts, entries: 0 }
    }

    fn push(&mut self, entry: MapEntry) -> io::Result<()> {
        // What a later record has cut and a still later one has gone from is one again.
        if let Some(last) = &mut self.last
            && continues(last, &entry)
        {
            last.len_bytes += entry.len_bytes;
            return Ok(());
        }
        match self.last.replace(entry) {
            Some(last) => self.put(&last),
            None => Ok(()),
        }
    }

    fn put(&mut self, entry: &MapEntry) -> io::Result<()> {
        if !self.leaf.push(&self.facts, entry) {
            self.end_leaf()?;
            let is_in = self.leaf.push(&self.facts, entry);
            assert!(is_in, "an empty leaf has room for any entry");
        }
        Ok(())
    }

    fn end_leaf(&mut self) -> io::Result<()> {
        let leaf = std::mem::take(&mut self.leaf);
        let Some(first) = leaf.first() else { return Ok(()) };
        let number = self.firsts.len() as u64;
        self.firsts.push(first);
        self.entries += leaf.entries();
        self.write(&leaf.encode(&self.facts, number))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.extend_from_slice(bytes);
        if self.out.len() < WRITE_BYTES { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_at(&[IoSlice::new(&self.out)], self.at)?;
        self.at += self.out.len() as u64;
        self.out.clear();
        Ok(())
    }

    fn end(mut self) -> io::Result<()> {
        if let Some(last) = self.last.take() {
            self.put(&last)?;
        }
        self.end_leaf()?;
        let firsts = std::mem::take(&mut self.firsts);
        let leaves = firsts.len() as u64;
        let mut top = Vec::new();
        for fence in firsts.chunks(KEYS_PER_FENCE) {
            let bytes = encode_fence(&self.facts, leaves + top.len() as u64, fence);
            debug_assert_eq!(bytes.len(), BLOCK_BYTES);
            top.push(fence[0]);
            self.write(&bytes)?;
        }
        let end = encode_end(&self.facts, leaves, self.entries, &top);
        self.write(&end)?;
        self.flush()?;
        self.file.sync()
    }
}

/// Whether the one is the rest of the record that the other is the front of.
fn continues(last: &MapEntry, next: &MapEntry) -> bool {
    let is_next = last.key == next.key
        && last.end() == next.offset
        && (last.segment, last.at) == (next.segment, next.at)
        && last.len_bytes.checked_add(next.len_bytes).is_some();
    is_next && (last.at == 0 || last.skip + last.len_bytes == next.skip)
}

/// Writes the map of a segment.
pub(in crate::journal) fn write_flat<S: Storage>(
    storage: &S,
    dir: &str,
    facts: MapFacts,
    entries: Vec<MapEntry>,
) -> Result<MapFile<S::File>, MapError> {
    write(storage, dir, facts, |writer| {
        entries.into_iter().try_for_each(|entry| writer.push(entry)).map_err(MapError::from)
    })
}

/// Writes the map of several maps that follow each other.
pub(in crate::journal) fn write_merged<S: Storage>(
    storage: &S,
    dir: &str,
    maps: &[Arc<MapFile<S::File>>],
) -> Result<MapFile<S::File>, MapError> {
    let (first, last) = (maps[0].facts(), maps[maps.len() - 1].facts());
    let facts = MapFacts {
        level: first.level + 1,
        first: first.first,
        last: last.last,
        runs: merge_runs(maps.iter().flat_map(|map| &map.facts().runs)),
    };
    write(storage, dir, facts, |writer| {
        let mut merge = Merge::new(maps.iter().rev().map(|map| map.entries()).collect())?;
        while let Some(entry) = merge.next()? {
            writer.push(entry)?;
        }
        Ok(())
    })
}

/// To a file aside, which is synced and gets its name. A power loss may take that name, and then it is made again: the
/// journal's own syncs need not wait for one more.
fn write<S: Storage>(
    storage: &S,
    dir: &str,
    facts: MapFacts,
    fill: impl FnOnce(&mut Writer<S::File>) -> Result<(), MapError>,
) -> Result<MapFile<S::File>, MapError> {
    let name = map_file_name(facts.level, facts.last.index, facts.last.id);
    let (aside, path) =
        (tidelock_storage::join(dir, &format!("{name}.new")), tidelock_storage::join(dir, &name));
    match storage.remove(&aside) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
        _ => {}
    }
    let file = storage.create(&aside)?;
    let mut writer = Writer::new(file.clone(), facts);
    fill(&mut writer)?;
    writer.end()?;
    storage.rename(&aside, &path)?;
    MapFile::open(file)
}
