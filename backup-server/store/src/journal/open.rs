//! Opening a journal: a torn tail is found and cut, and what the journal leads to is known.
//!
//! Of every segment header and checkpoint are read and verified; damaged ones follow from the segment before it. Sealed
//! segments that have an index are not read further ([`super::indexed`]); the others and the last one are, as a whole.
//!
//! ```text
//!  names ──▶ torn beginnings removed ──▶ segments in order ──▶ batches in order ──▶ damage?
//!                                                                                    │
//!   a later batch knows it as durable, or it is before the floor, or not in the last │ segment
//!   ├── yes ──▶ JournalError::Corrupt (segment, offset)                              │
//!   └── no ───▶ torn tail: cut here ◀────────────────────────────────────────────────┘
//!  what no batch knows as durable is written again and synced ──▶ durable
//! ```
//!
//! A torn tail stays in its file as long as only its headers show that a damaged batch before it was durable: without
//! them the next opening would take that batch for torn. The next segment says where this one ends.

use super::cold::{
    BlockCache, ColdError, SegmentFile, cold_file_name, find_segment_file, parse_cold_file_name,
};
use super::format::{
    BATCH_HEADER_BYTES, Damage, Entries, Entry, SEGMENT_HEADER_BYTES, SegmentHeader,
};
use super::index::{Builder, Sealed, index_file_name};
use super::indexed::{ClosedSegments, Indexed, MadeAgain, facts_of};
use super::jobs::Work;
use super::map::Maps;
use super::reader::corrupt;
use super::scan::{Scan, ScanError, Scanned, find_header};
use super::{
    Batch, Durable, Journal, JournalError, Note, Options, PlacedEffect, Position, Segment, State,
    write_back,
};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use tidelock_protocol::record::{RawBody, Record};
use tidelock_storage::{Storage, StorageFile};

/// An entry that opening a journal shows.
#[derive(Clone, Copy, Debug)]
pub enum Shown<'a> {
    /// A record.
    Record(&'a Record<RawBody>),
    /// A note.
    Note(&'a Note),
}

/// What was cut off the end. None of it was ever acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TornTail {
    /// The segment's file.
    pub file: String,
    /// Where the torn batch began.
    pub offset: u64,
    /// Bytes that were cut.
    pub len_bytes: u64,
    /// How it was noticed.
    pub damage: Damage,
}

/// An opened journal.
#[derive(Debug)]
pub struct Opened<S: Storage> {
    /// The journal. All that it holds is durable.
    pub journal: Journal<S>,
    /// What was cut, if the last run ended in the middle of a write.
    pub torn: Option<TornTail>,
    /// Whether the last run ended cleanly.
    pub clean: bool,
    /// Of segments that were not read, and of the first one that was shown: since when everything
    /// before them is in every state.
    pub closed: ClosedSegments,
    /// Indexes of sealed segments that were missing or damaged.
    pub made_again: Vec<MadeAgain>,
    /// Segments in which payloads are damaged, if they were read; of others the header or checkpoint. All else of them
    /// that was read is what was written.
    pub damaged: BTreeSet<u64>,
}

/// The batches of the last segment, and what they lead to.
#[derive(Default)]
struct Replay {
    state: Option<State>,
    number: u64,
    chain: u32,
    /// When the last batch arrived.
    arrived_ms: u64,
    /// The last batch that a later one knows as durable.
    durable: u64,
    /// The last batch that is damaged, and known as durable by a header behind it.
    last_damaged: u64,
    /// Number and offset of each batch of the segment at hand.
    batches: Vec<(u64, u64)>,
    /// The state at the beginning of each segment so far.
    starts: Vec<Arc<State>>,
    /// The entries of the segment at hand.
    builder: Builder,
    clean: bool,
    /// Segments that have damaged payloads, or a damaged beginning.
    damaged: BTreeSet<u64>,
}

impl<S: Storage> Journal<S> {
    /// Opens the journal of a group. Segments before the floor are not needed any more and are
    /// removed; up to the floor everything is known to have been durable.
    pub fn open(
        storage: S,
        dir: &str,
        floor: Position,
        options: Options,
    ) -> Result<Opened<S>, JournalError> {
        Self::open_with(storage, dir, floor, options, |_, _, _| {})
    }

    /// Opens it and shows each entry from some segment on, before which everything is in every cut
    /// ([`Opened::closed`] has it), with the beginning of its batch and the state before it.
    pub fn open_with(
        storage: S,
        dir: &str,
        floor: Position,
        options: Options,
        mut visit: impl FnMut(Position, &State, Shown<'_>),
    ) -> Result<Opened<S>, JournalError> {
        let blocks = Arc::default();
        let (segments, tail_removed) = find_segments(&storage, dir, floor, &blocks)?;
        check_cold(&segments)?;
        let indexed = Indexed::read(&storage, dir, &segments)?;
        let sealed = segments.windows(2).map(|pair| facts_of(&pair[0], &pair[1].header));
        let sealed = sealed.map(|of| (of.index, of)).collect();
        let maps = Maps::open(&storage, dir, &sealed)?;
        let mut journal = Self {
            storage,
            dir: dir.to_owned(),
            options,
            segments: Vec::with_capacity(segments.len()),
            starts: Vec::new(),
            appendable: false,
            number: 0,
            chain: 0,
            durable_number: 0,
            durable_end: Position::default(),
            reported: Durable::NOTHING,
            syncing: false,
            state: State::default(),
            now_ms: 0,
            batch: Batch::default(),
            next_segment: None,
            builder: Builder::default(),
            unindexed: VecDeque::new(),
            sealed,
            being_indexed: None,
            indexes: indexed.files.clone(),
            maps: Arc::new(maps),
            blocks,
            maps_due: true,
            poisoned: false,
        };
        let mut replay = Replay::default();
        let mut torn = None;
        for (at, found) in segments.iter().enumerate() {
            let is_last = at + 1 == segments.len();
            // A segment that was followed by another one was durable first.
            let may_be_torn = is_last && !tail_removed;
            let next = segments.get(at + 1).map(|next| &next.header);
            let segment = replay.begin(found, journal.segments.last(), next)?;
            if let Some(next) = next.filter(|_| indexed.whole[at]) {
                replay.skip(&found.checkpoint, next);
                // Its index says how it ends; what was in it is to be looked at.
                replay.damaged.extend(found.lost.is_some().then_some(segment.index));
                journal.segments.push(segment);
                continue;
            }
            if let Some((offset, damage)) = &found.lost {
                return Err(corrupt(&segment, *offset, damage.clone()));
            }
            let mut show = |position: Position, before: &State, shown: Shown<'_>| {
                if at >= indexed.from {
                    visit(position, before, shown);
                }
            };
            let (segment, cut) = replay.segment(segment, may_be_torn, floor, &mut show)?;
            torn = cut;
            let builder = std::mem::take(&mut replay.builder);
            match is_last {
                true => journal.builder = builder,
                false if indexed.is_missing(&index_file_name(segment.index, segment.id)) => {
                    journal.make_again(Sealed::new(&segment, replay.number, replay.chain, builder));
                }
                false => {}
            }
            journal.segments.push(segment);
        }
        let Some(state) = replay.state.take() else {
            return Err(JournalError::Missing { index: floor.segment.max(1) });
        };
        (journal.state, journal.number, journal.chain) = (state, replay.number, replay.chain);
        journal.now_ms = journal.state.arrived_ms.max(replay.arrived_ms);
        journal.starts = std::mem::take(&mut replay.starts);
        if journal.end() < floor {
            let last = journal.segments.last().expect("there is a state");
            let damage = Damage::Short("part that was folded into the images");
            return Err(corrupt(last, last.len_bytes, damage));
        }
        journal.settle(&replay, torn.is_some())?;
        let Indexed { closed, made_again, .. } = indexed;
        let Replay { clean, damaged, .. } = replay;
        Ok(Opened { journal, torn, clean, closed, made_again, damaged })
    }

    /// The newest of those that have no index wait for it as after sealing; the others must not
    /// wait in memory.
    fn make_again(&mut self, sealed: Sealed) {
        let Some(sealed) = self.push_unindexed(sealed) else { return };
        // Without room the journal is whole without it, and the next opening tries again.
        if let Ok(made) = self.job(Work::Index { sealed, closed: None }).run() {
            self.made(made);
        }
    }

    /// Makes what was found durable, and what was cut gone.
    fn settle(&mut self, replay: &Replay, torn: bool) -> Result<(), JournalError> {
        let last = self.segments.last().expect("not empty");
        let settle = || {
            if torn && replay.last_damaged <= replay.durable {
                last.file.set_size(last.len_bytes)?;
            }
            // The page cache may show what the disk never got (a failed fsync leaves pages clean):
            // only writing again makes a sync mean something.
            let unsure = replay.batches.iter().find(|(number, _)| *number > replay.durable);
            if let Some((_, offset)) = unsure {
                let first = *offset == SEGMENT_HEADER_BYTES as u64;
                write_back(&last.file, if first { 0 } else { *offset }, last.len_bytes)?;
            }
            last.file.sync()?;
            self.storage.sync_dir(&self.dir)
        };
        settle().map_err(JournalError::io("make the journal's tail durable"))?;
        self.durable_number = self.number;
        self.durable_end = self.end();
        self.report_all();
        Ok(())
    }
}

/// A segment, and what its header and checkpoint say.
pub(super) struct FoundSegment<F> {
    pub(super) segment: Segment<F>,
    pub(super) header: SegmentHeader,
    pub(super) checkpoint: State,
    /// They are damaged, and follow from the segment before it: where, and how that was noticed.
    lost: Option<(u64, Damage)>,
}

type FoundSegments<F> = (Vec<FoundSegment<F>>, bool);

/// The segments from the floor on, in order and without a hole; beginnings that were torn are
/// removed. Also tells whether one of those was the last.
fn find_segments<S: Storage>(
    storage: &S,
    dir: &str,
    floor: Position,
    blocks: &Arc<BlockCache>,
) -> Result<FoundSegments<S::File>, JournalError> {
    let names = storage.list(dir).map_err(JournalError::io("list the journal"))?;
    let mut ids = BTreeSet::new();
    for name in &names {
        match parse_cold_file_name(name) {
            Some(_) if name.ends_with(".new") => remove_name(storage, dir, name)?,
            Some(id) => ids.extend([id]),
            None => ids.extend(SegmentHeader::parse_file_name(name)),
        }
    }
    let remove = |index, id| {
        remove_name(storage, dir, &SegmentHeader::file_name(index, id))?;
        remove_name(storage, dir, &cold_file_name(index, id))
    };
    let mut whole: Vec<FoundSegment<S::File>> = Vec::new();
    let mut torn = Vec::new();
    for (index, id) in ids {
        if index < floor.segment {
            remove(index, id)?;
            continue;
        }
        let segment = open_segment(storage, dir, (index, id), blocks)?;
        let (header, mut checkpoint, lost) = match read_header(&segment)? {
            Ok((header, checkpoint)) => (header, checkpoint, None),
            Err((offset, damage)) if !has_more(&segment)? => {
                torn.push((segment, offset, damage));
                continue;
            }
            Err((offset, damage)) => {
                match whole.last().filter(|of| of.segment.index + 1 == index) {
                    Some(before) => {
                        let (header, checkpoint) = beginning_after(before, &segment)
                            .map_err(|_| corrupt(&segment, offset, damage.clone()))?;
                        (header, checkpoint, Some((offset, damage)))
                    }
                    None => return Err(corrupt(&segment, offset, damage)),
                }
            }
        };
        if let Some(before) = whole.last() {
            checkpoint.share(&before.checkpoint);
        }
        let expected = whole.last().map_or(index, |of| of.segment.index + 1);
        if index < expected {
            let damage = Damage::Chain("there is another segment of this index");
            return Err(corrupt(&segment, 0, damage));
        }
        if index > expected {
            return Err(JournalError::Missing { index: expected });
        }
        whole.push(FoundSegment { segment, header, checkpoint, lost });
    }
    let first = whole.first().map_or(0, |of| of.segment.index);
    if floor.segment > 0 && first != floor.segment {
        return Err(JournalError::Missing { index: floor.segment });
    }
    let last = whole.last().map_or(0, |of| of.segment.index);
    let is_cold = whole.last().is_some_and(|of| of.segment.file.cold().is_some());
    let mut tail_removed = false;
    for (segment, offset, damage) in torn {
        // A beginning that was torn is the last one, or the next attempt's stands beside it.
        // What follows a compressed segment was durable before that was compressed.
        if whole.is_empty() || segment.index < first || (segment.index > last && is_cold) {
            return Err(corrupt(&segment, offset, damage));
        }
        if segment.index > last + 1 {
            return Err(JournalError::Missing { index: last + 1 });
        }
        tail_removed |= segment.index > last;
        remove(segment.index, segment.id)?;
    }
    Ok((whole, tail_removed))
}

pub(super) fn remove_name<S: Storage>(
    storage: &S,
    dir: &str,
    name: &str,
) -> Result<(), JournalError> {
    match storage.remove(&tidelock_storage::join(dir, name)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(JournalError::io("remove a journal segment")(e))
        }
        _ => Ok(()),
    }
}

/// Opens a segment's file, as it was written or compressed, and removes the other if both are there.
pub(super) fn open_segment<S: Storage>(
    storage: &S,
    dir: &str,
    (index, id): (u64, u64),
    blocks: &Arc<BlockCache>,
) -> Result<Segment<S::File>, JournalError> {
    let io = JournalError::io("open a journal segment");
    let found = match find_segment_file(storage, dir, index, id, blocks) {
        Ok(found) => found,
        Err(ColdError::Io(source)) => return Err(io(source)),
        // It is the only one there.
        Err(error) => {
            let damage = Damage::Cold(error.to_string());
            return Err(JournalError::Corrupt {
                file: cold_file_name(index, id),
                offset: 0,
                damage,
            });
        }
    };
    let Some(found) = found else { return Err(JournalError::Missing { index }) };
    if let Some(name) = &found.left_over {
        remove_name(storage, dir, name)?;
    }
    let len_bytes = found.file.size_bytes().map_err(io)?;
    Ok(Segment { index, id, file: found.file, len_bytes })
}

/// Compressed segments are sealed, and each is the one that the next segment continues.
fn check_cold<F: StorageFile>(segments: &[FoundSegment<F>]) -> Result<(), JournalError> {
    for (at, of) in segments.iter().enumerate() {
        let Some(cold) = of.segment.file.cold() else { continue };
        let Some(next) = segments.get(at + 1) else {
            return Err(JournalError::Missing { index: of.segment.index + 1 });
        };
        if *cold.facts() != facts_of(of, &next.header) {
            let damage = Damage::Chain("it was compressed with another end");
            return Err(corrupt(&of.segment, 0, damage));
        }
    }
    Ok(())
}

/// Whether a segment holds more than its beginning, which is written and made durable as one.
fn has_more<F: StorageFile>(segment: &Segment<F>) -> Result<bool, JournalError> {
    if matches!(segment.file, SegmentFile::Cold(_)) {
        return Ok(true);
    }
    let beginning = SEGMENT_HEADER_BYTES as u64;
    find_header(&segment.file, segment.id, 0, segment.len_bytes, |at, _| at != beginning)
        .map(|found| found.is_some())
        .map_err(JournalError::io("read the journal"))
}

/// A segment's header and checkpoint, or where its beginning is damaged.
type HeaderOrDamage = Result<(SegmentHeader, State), (u64, Damage)>;

/// The header of a segment, if header and checkpoint are whole; else where the damage is.
fn read_header<F: StorageFile>(segment: &Segment<F>) -> Result<HeaderOrDamage, JournalError> {
    let io = JournalError::io("read the journal");
    let mut bytes = [0; SEGMENT_HEADER_BYTES];
    match segment.file.read_at(&mut bytes, 0) {
        Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
            return Ok(Err((0, Damage::Short("segment header"))));
        }
        Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
            return Ok(Err((0, Damage::Compressed)));
        }
        read => read.map_err(io)?,
    }
    let header = match SegmentHeader::decode(&bytes) {
        Ok(header) if (header.index, header.id) == (segment.index, segment.id) => header,
        Ok(_) => return Ok(Err((0, Damage::Chain("the header is not this file's")))),
        // Whatever a newer version means, it is no torn beginning.
        Err(damage @ Damage::Version(_)) => return Err(corrupt(segment, 0, damage)),
        Err(damage) => return Ok(Err((0, damage))),
    };
    let at = SEGMENT_HEADER_BYTES as u64;
    match Scan::new(segment.file.clone(), segment.id, at, segment.len_bytes).next() {
        Ok(Some(first)) => match Entries::<RawBody>::new(&first.header, first.body).next() {
            Some(Ok(Entry::Note(Note::Checkpoint(state)))) => Ok(Ok((header, *state))),
            // It is durable, so no crash has made it.
            Some(Err(damage)) => Err(corrupt(segment, at, damage)),
            _ => Err(corrupt(segment, at, Damage::Chain("no checkpoint"))),
        },
        Ok(None) => Ok(Err((at, Damage::Short("checkpoint")))),
        Err(ScanError::Damage(damage)) => Ok(Err((at, damage))),
        Err(ScanError::Io(source)) => Err(JournalError::Io { what: "read the journal", source }),
    }
}

/// A segment by itself.
pub(super) fn found_of<F: StorageFile>(
    segment: Segment<F>,
) -> Result<FoundSegment<F>, JournalError> {
    match read_header(&segment)? {
        Ok((header, checkpoint)) => Ok(FoundSegment { segment, header, checkpoint, lost: None }),
        Err((offset, damage)) => Err(corrupt(&segment, offset, damage)),
    }
}

/// What the beginning of a segment must say, by the one before it.
pub(super) fn beginning_after<F: StorageFile>(
    before: &FoundSegment<F>,
    segment: &Segment<F>,
) -> Result<(SegmentHeader, State), JournalError> {
    let mut replay = Replay::default();
    let before = replay.alone(before, before.segment.len_bytes)?;
    let header = SegmentHeader {
        index: segment.index,
        id: segment.id,
        prev_id: before.id,
        prev_len: before.len_bytes,
        first_batch: replay.number + 1,
        chain: replay.chain,
    };
    Ok((header, replay.state.expect("it was replayed")))
}

/// The end of a journal whose last segment is cut.
pub(super) struct EndWithin {
    /// The end of its last batch.
    pub(super) end: Position,
    /// Bytes that the segment keeps: up to there, or with a torn tail that alone shows that a damaged batch was durable.
    pub(super) len_bytes: u64,
    /// The state there.
    pub(super) state: State,
}

/// The end and the state of a journal of which the last segment has at most so many bytes. A damaged batch that nothing
/// behind it knows as durable is not part of it: opening would take that for torn.
pub(super) fn end_within<F: StorageFile>(
    of: &FoundSegment<F>,
    len_bytes: u64,
    floor: Position,
) -> Result<EndWithin, JournalError> {
    let mut replay = Replay::default();
    let segment = replay.alone_or_torn(of, len_bytes, true, floor)?;
    let end = Position { segment: segment.index, offset: segment.len_bytes };
    let len_bytes = if replay.last_damaged > replay.durable { len_bytes } else { end.offset };
    Ok(EndWithin { end, len_bytes, state: replay.state.expect("it was replayed") })
}

impl Replay {
    /// Whether a segment continues what is before it. Returns it with the length that the next
    /// one says it has.
    fn begin<F: StorageFile>(
        &mut self,
        found: &FoundSegment<F>,
        before: Option<&Segment<F>>,
        next: Option<&SegmentHeader>,
    ) -> Result<Segment<F>, JournalError> {
        let (mut segment, header) = (found.segment.clone(), &found.header);
        if let Some(before) = before {
            let continues = (header.prev_id, header.prev_len, header.first_batch, header.chain)
                == (before.id, before.len_bytes, self.number + 1, self.chain);
            if !continues {
                return Err(corrupt(&segment, 0, Damage::Chain("the segment before it differs")));
            }
        } else {
            (self.number, self.chain) = (header.first_batch.wrapping_sub(1), header.chain);
        }
        if let Some(next) = next {
            if next.prev_len > segment.len_bytes {
                return Err(corrupt(&segment, segment.len_bytes, Damage::Short("segment")));
            }
            // What is beyond was cut by the run that began the next segment.
            segment.len_bytes = next.prev_len;
        }
        Ok(segment)
    }

    /// Replays so many bytes of one segment, all of which were durable.
    fn alone<F: StorageFile>(
        &mut self,
        of: &FoundSegment<F>,
        len_bytes: u64,
    ) -> Result<Segment<F>, JournalError> {
        self.alone_or_torn(of, len_bytes, false, Position::default())
    }

    fn alone_or_torn<F: StorageFile>(
        &mut self,
        of: &FoundSegment<F>,
        len_bytes: u64,
        may_be_torn: bool,
        floor: Position,
    ) -> Result<Segment<F>, JournalError> {
        if let Some((offset, damage)) = &of.lost {
            return Err(corrupt(&of.segment, *offset, damage.clone()));
        }
        let segment = Segment { len_bytes, ..self.begin(of, None, None)? };
        let nothing = &mut |_: Position, _: &State, _: Shown<'_>| {};
        Ok(self.segment(segment, may_be_torn, floor, nothing)?.0)
    }

    /// The segment at hand is not read: its index says how it ends, as the next one does.
    fn skip(&mut self, checkpoint: &State, next: &SegmentHeader) {
        self.starts.push(Arc::new(checkpoint.clone()));
        (self.number, self.chain) = (next.first_batch - 1, next.chain);
        self.state = None;
    }

    /// Replays one segment. Returns it with its valid length, and what was cut.
    fn segment<F: StorageFile>(
        &mut self,
        mut segment: Segment<F>,
        may_be_torn: bool,
        floor: Position,
        visit: &mut impl FnMut(Position, &State, Shown<'_>),
    ) -> Result<(Segment<F>, Option<TornTail>), JournalError> {
        self.batches.clear();
        let start = SEGMENT_HEADER_BYTES as u64;
        let mut scan = Scan::new(segment.file.clone(), segment.id, start, segment.len_bytes);
        loop {
            match scan.next() {
                Ok(Some(batch)) => {
                    let at = Position { segment: segment.index, offset: batch.offset };
                    self.batch(&batch, |state, entry| visit(at, state, entry))
                        .map_err(|damage| corrupt(&segment, batch.offset, damage))?;
                }
                Ok(None) => return Ok((segment, None)),
                Err(ScanError::Io(source)) => {
                    return Err(JournalError::Io { what: "read the journal", source });
                }
                Err(ScanError::Damage(damage)) => {
                    let at = Position { segment: segment.index, offset: scan.at };
                    if !may_be_torn || at < floor || !self.is_torn(&segment, scan.at, &damage)? {
                        // It was acknowledged. If only payloads are damaged, all else goes on.
                        let Ok(Some(batch)) = scan.next_durable() else {
                            return Err(corrupt(&segment, scan.at, damage));
                        };
                        self.damaged.insert(segment.index);
                        self.last_damaged = batch.header.number;
                        self.batch(&batch, |state, entry| visit(at, state, entry))
                            .map_err(|damage| corrupt(&segment, batch.offset, damage))?;
                        continue;
                    }
                    let torn = TornTail {
                        file: SegmentHeader::file_name(segment.index, segment.id),
                        offset: scan.at,
                        len_bytes: segment.len_bytes - scan.at,
                        damage,
                    };
                    segment.len_bytes = scan.at;
                    self.clean = false;
                    return Ok((segment, Some(torn)));
                }
            }
        }
    }

    /// Whether the damage where batch `self.number + 1` must begin can come from a crash.
    fn is_torn<F: StorageFile>(
        &self,
        segment: &Segment<F>,
        at: u64,
        damage: &Damage,
    ) -> Result<bool, JournalError> {
        if matches!(damage, Damage::Chain(_)) {
            return Ok(false);
        }
        let damaged = self.number + 1;
        let knows = |_, header: &super::BatchHeader| header.durable >= damaged;
        find_header(&segment.file, segment.id, at, segment.len_bytes, knows)
            .map(|later| later.is_none())
            .map_err(JournalError::io("read the journal"))
    }

    fn batch(
        &mut self,
        batch: &Scanned,
        mut visit: impl FnMut(&State, Shown<'_>),
    ) -> Result<(), Damage> {
        if batch.header.number != self.number + 1 || batch.header.chain != self.chain {
            return Err(Damage::Chain("the batch before it differs"));
        }
        let first = batch.offset == SEGMENT_HEADER_BYTES as u64;
        let body_at = batch.offset + BATCH_HEADER_BYTES as u64;
        for (nth, entry) in Entries::new(&batch.header, batch.body.clone()).enumerate() {
            let entry = entry?;
            self.clean = matches!(entry, Entry::Note(Note::CleanEnd | Note::Checkpoint(_)));
            let checkpoint = matches!(entry, Entry::Note(Note::Checkpoint(_)));
            if checkpoint != (first && nth == 0) {
                return Err(Damage::Chain("a checkpoint stands where none must, or is missing"));
            }
            match (entry, &mut self.state) {
                (Entry::Note(Note::Checkpoint(state)), slot @ None) => {
                    self.starts.push(Arc::new((*state).clone()));
                    *slot = Some(*state);
                }
                (Entry::Note(note), Some(state)) => {
                    visit(state, Shown::Note(&note));
                    state.apply_note(&note)?;
                    if checkpoint {
                        self.starts.push(Arc::new(state.clone()));
                    }
                }
                (Entry::Record { head, payload, payload_at }, Some(state)) => {
                    let len_bytes = head.changed_bytes();
                    let record = match batch.is_damaged {
                        true => head.peek().clone(),
                        false => head.finish(payload)?,
                    };
                    visit(state, Shown::Record(&record));
                    state.apply_record(&record)?;
                    let at = body_at + payload_at as u64;
                    let effect = PlacedEffect::of(&record, len_bytes, at);
                    self.builder.record(&record, len_bytes, effect);
                }
                (_, None) => return Err(Damage::Chain("no checkpoint")),
            }
        }
        self.arrived_ms = batch.header.arrived_ms;
        if let Some(state) = self.state.as_mut().filter(|_| !first) {
            state.arrived_ms = self.arrived_ms;
        }
        self.batches.push((batch.header.number, batch.offset));
        (self.number, self.chain) = (batch.header.number, batch.link);
        self.durable = self.durable.max(batch.header.durable);
        Ok(())
    }
}

/// A disk with a journal whose only segment has this content: for fuzzing. The content is hostile; the file's name is
/// made to fit its header, as an attacker would.
#[cfg(any(test, feature = "memory-storage"))]
pub fn disk_of_bytes(content: &[u8]) -> std::io::Result<tidelock_storage::memory::Memory> {
    use std::io::IoSlice;
    let number = |at: usize| {
        let bytes = content.get(at..at + 8).and_then(|b| b.try_into().ok());
        u64::from_le_bytes(bytes.unwrap_or_default())
    };
    let disk = tidelock_storage::memory::Memory::new();
    let name = SegmentHeader::file_name(number(16).max(1), number(24));
    let file = disk.create(&tidelock_storage::join("journal", &name))?;
    file.write_at(&[IoSlice::new(content)], 0)?;
    file.sync()?;
    disk.sync_dir("journal")?;
    Ok(disk)
}
