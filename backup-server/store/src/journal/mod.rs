//! The journal of one group: an append-only sequence of records and notes in segment files.
//!
//! What it is for: a record is durable here before it is acknowledged, and that is all that stands
//! between the host's write and the acknowledgement (PipeCloud 4.4: "a dedicated log to initially
//! record the writes"; the transfer to disk images is a consumer's work, see [`crate::fold`]).
//!
//! Invariants:
//! - What [`Journal::sync`] covered is found again by [`Journal::open`], whatever happened since,
//!   and nothing is found that does not continue it (rules 3 and 9).
//! - Only the end of the last segment can be torn: the next segment is begun after a sync. Each
//!   batch says which batch was durable when it was written. So a damaged batch that a later one
//!   knows as durable is a *corrupt middle*, an error that names segment and offset; a damaged
//!   batch that none knows so is a *torn tail*, which is cut.
//! - A segment is written by one run only, under a random id that is in each of its batches: bytes
//!   of an earlier life of the same disk space are never taken for a batch.
//! - After a sync has failed nothing is written or called durable any more ([`JournalError::Poisoned`]):
//!   the kernel may have dropped what it could not write. Opening again writes the tail that is
//!   not known as durable once more before it believes in it.

mod batch;
mod cold;
mod durable;
mod examine;
mod format;
mod index;
mod indexed;
mod jobs;
mod map;
mod marks;
mod members;
mod note;
mod open;
mod point;
mod reader;
mod repair;
mod scan;
mod scrub;
mod state;
mod tail;
#[cfg(test)]
mod tests;

pub use batch::{Placed, PlacedEffect};
#[cfg(any(test, feature = "memory-storage"))]
pub use cold::cold_from_bytes;
use cold::find_segment_file;
pub use cold::{
    COLD_VERSION, ColdError, ColdFile, Compress, CompressJob, Compressed, SegmentFile,
    cold_file_name, parse_cold_file_name,
};
pub use durable::{Behind, Durable, SyncJob, Ticket};
pub use examine::{payload_of, read_payload};
pub use format::{
    BATCH_BODY_MAX_BYTES, BATCH_HEADER_BYTES, BATCH_NOTES_MAX_BYTES, BATCH_TARGET_BYTES,
    BatchHeader, Damage, Entries, Entry, SEGMENT_HEADER_BYTES, SegmentHeader, VERSION,
};
#[cfg(any(test, feature = "memory-storage"))]
pub use index::index_from_bytes;
pub use index::{
    BLOCK_BYTES, ENTRIES_PER_BLOCK, Footer, INDEX_VERSION, IndexEntry, IndexError, Sealed,
    SegmentFacts, SegmentIndex, Waypoint, WriterRun, index_file_name, parse_index_file_name,
};
pub use indexed::{ClosedSegments, MadeAgain};
pub use jobs::{IndexJob, Made};
#[cfg(any(test, feature = "memory-storage"))]
pub use map::map_from_bytes;
pub use map::{
    FANOUT, MAP_VERSION, MapEntry, MapError, MapFacts, MapFile, MapRun, Maps, map_file_name,
    parse_map_file_name,
};
pub use marks::{HostRequest, MARKS_MAX_BYTES, Mark, MarkKind, Marks};
pub use members::{Exposure, KeptMachine, MemberFacts, MemberPolicy, NAMES_MAX, machine_bytes};
pub use note::{EpochStart, NOTE_BODY_MAX_BYTES, NOTE_HEADER_BYTES, Note, NoteError, Shape};
#[cfg(any(test, feature = "memory-storage"))]
pub use open::disk_of_bytes;
pub use open::{Opened, Shown, TornTail};
pub use point::Point;
pub use reader::{JournalBatch, Reader};
pub use repair::{InImages, Repair, RepairError, plan as plan_repair, repair};
pub(crate) use scan::is_whole;
pub use scrub::{ScrubJob, Scrubbed};
pub use state::{Standing, State, StateError, WriterState};
pub use tail::Tail;

/// The name of a map's file.
#[must_use]
pub fn map_name(facts: &MapFacts) -> String {
    map_file_name(facts.level, facts.last.index, facts.last.id)
}

use batch::Batch;
use cold::BlockCache;
use index::Builder;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::sync::Arc;
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::{Body, DiskChange, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::{Storage, StorageFile};

/// Opens the file of a segment that is not part of a journal any more, plain or cold. `None`: there is none.
pub fn open_segment_file<S: Storage>(
    storage: &S,
    dir: &str,
    index: u64,
    id: u64,
) -> Result<Option<SegmentFile<S::File>>, ColdError> {
    let found = find_segment_file(storage, dir, index, id, &Arc::default())?;
    Ok(found.map(|found| found.file))
}

/// Reads the batches of a segment that is not part of a journal any more.
pub fn reader_of<F: StorageFile>(
    segment: Segment<F>,
    from: Position,
    to: Position,
) -> Reader<F, DiskChange> {
    Reader::new(vec![segment], from, to)
}

/// A place between two batches.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Position {
    /// The segment's index.
    pub segment: u64,
    /// Bytes from its beginning.
    pub offset: u64,
}

/// Since when everything before some place of the journal is in every state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// States at this time and later have all of it.
    pub at: Hlc,
    /// And so have states that have this cut.
    pub cut: CountVector,
    /// And states as of this arrival and later, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
}

/// How a journal is kept.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// A segment that has reached this is followed by the next one.
    pub segment_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { segment_bytes: 64 << 20 }
    }
}

/// What can go wrong.
#[derive(Debug, Error)]
pub enum JournalError {
    /// Data that was acknowledged is damaged.
    #[error(
        "journal segment {file} is damaged at byte {offset}: {damage}. Restore the file from a copy, \
         or see what `tidelock-backup repair` can keep"
    )]
    Corrupt {
        /// The segment's file.
        file: String,
        /// Where.
        offset: u64,
        /// What.
        damage: Damage,
    },
    /// A segment is not there.
    #[error(
        "journal segment {index} is missing. Restore the file from a copy, or see what \
         `tidelock-backup repair` can keep"
    )]
    Missing {
        /// Its index.
        index: u64,
    },
    /// No room. Nothing was lost: what is staged is written by the next attempt.
    #[error("no room for the journal: {0}")]
    Full(#[source] io::Error),
    /// Reading or writing failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// An earlier write or sync failed.
    #[error("an earlier write to the journal failed: it must be opened again")]
    Poisoned,
}

impl JournalError {
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// Sealed segments whose entries are kept until their indexes are written. Of more than that the
/// oldest are forgotten: opening makes their indexes from the segments.
const UNINDEXED_MAX: usize = 16;

/// One segment file.
#[derive(Clone, Debug)]
pub struct Segment<F> {
    /// Its index.
    pub index: u64,
    /// Its id.
    pub id: u64,
    /// The file, which stays readable when its name is removed.
    pub file: SegmentFile<F>,
    /// Valid bytes.
    pub len_bytes: u64,
}

impl<F: StorageFile> Segment<F> {
    /// The name of its file.
    #[must_use]
    pub fn file_name(&self) -> String {
        self.file.name(self.index, self.id)
    }

    /// Bytes that it takes on disk.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.file.cold().map_or(self.len_bytes, ColdFile::stored_bytes)
    }
}

/// The journal of one group.
#[derive(Debug)]
pub struct Journal<S: Storage> {
    storage: S,
    dir: String,
    options: Options,
    segments: Vec<Segment<S::File>>,
    /// The state at the beginning of each of them.
    starts: Vec<Arc<State>>,
    /// Whether the last segment was begun by this run and may be appended to.
    appendable: bool,
    /// Number and link of the last batch written.
    number: u64,
    chain: u32,
    /// Number and end of the last batch that is durable.
    durable_number: u64,
    durable_end: Position,
    /// The last report of it to the keeper of the journal.
    reported: Durable,
    /// A sync runs beside it.
    syncing: bool,
    /// After everything staged.
    state: State,
    /// What is written now arrives at this time, in milliseconds since the Unix epoch.
    now_ms: u64,
    batch: Batch,
    /// The checkpoint of the segment that must be begun before the staged batch is written.
    next_segment: Option<Note>,
    /// The entries of the last segment, which is not sealed.
    builder: Builder,
    /// Sealed segments without an index, oldest first.
    unindexed: VecDeque<Sealed>,
    /// How sealed segments end.
    sealed: BTreeMap<u64, SegmentFacts>,
    /// The one whose index is being written.
    being_indexed: Option<Sealed>,
    /// The indexes that there are.
    indexes: BTreeMap<u64, S::File>,
    maps: Arc<Maps<S::File>>,
    /// Of compressed segments.
    blocks: Arc<BlockCache>,
    /// There may be maps to make.
    maps_due: bool,
    poisoned: bool,
}

impl<S: Storage> Journal<S> {
    /// Makes the journal of a new group and makes it durable.
    pub fn create(
        storage: S,
        dir: &str,
        state: State,
        options: Options,
    ) -> Result<Self, JournalError> {
        tidelock_storage::create_dirs(&storage, dir)
            .map_err(JournalError::io("make the journal's directory"))?;
        let mut journal = Self {
            storage,
            dir: dir.to_owned(),
            options,
            segments: Vec::new(),
            starts: Vec::new(),
            appendable: false,
            number: 0,
            chain: 0,
            durable_number: 0,
            durable_end: Position::default(),
            reported: Durable::NOTHING,
            syncing: false,
            next_segment: Some(Note::Checkpoint(Box::new(state.clone()))),
            now_ms: state.arrived_ms,
            state,
            batch: Batch::default(),
            builder: Builder::default(),
            unindexed: VecDeque::new(),
            sealed: BTreeMap::new(),
            being_indexed: None,
            indexes: BTreeMap::new(),
            maps: Arc::default(),
            blocks: Arc::default(),
            maps_due: false,
            poisoned: false,
        };
        journal.begin_segment()?;
        journal.report_all();
        Ok(journal)
    }

    /// The state after everything staged, durable or not.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// It is this time by the backup's clock, in milliseconds since the Unix epoch. Time does not go back.
    pub fn set_now(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// The latest time that it was told.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Stages a record. After an error nothing was staged.
    pub fn stage_record(&mut self, record: Record<impl Body>) -> Result<(), StateError> {
        assert!(self.batch.body_len() < BATCH_TARGET_BYTES, "write what is staged first");
        self.prepare();
        self.state.apply_record(&record)?;
        self.batch.push_record(record.into_raw());
        Ok(())
    }

    /// Stages a note. After an error nothing was staged. A full batch that the disk has no room for takes a few notes more.
    pub fn stage_note(&mut self, note: &Note) -> Result<(), StateError> {
        assert!(self.batch.body_len() < BATCH_NOTES_MAX_BYTES, "write what is staged first");
        self.prepare();
        self.state.apply_note(note)?;
        self.batch.push_note(note);
        Ok(())
    }

    /// Bytes staged and not written. At [`BATCH_TARGET_BYTES`] they must be written before more records
    /// are staged.
    #[must_use]
    pub fn staged_bytes(&self) -> usize {
        self.batch.body_len()
    }

    /// Whether something is written that no sync has covered.
    #[must_use]
    pub fn is_unsynced(&self) -> bool {
        self.durable_number < self.number
    }

    /// Whether only opening the journal again can help.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    fn prepare(&mut self) {
        let full = |s: &Segment<_>| s.len_bytes >= self.options.segment_bytes;
        if self.batch.is_empty() && (!self.appendable || self.segments.last().is_none_or(full)) {
            // The state now is the state after the last batch written.
            self.next_segment = Some(Note::Checkpoint(Box::new(self.state.clone())));
        }
    }

    /// Writes what is staged as one batch. It is not durable yet. On [`JournalError::Full`] it
    /// stays staged, and so it does while a sync runs that the next segment must wait for. Calls `placed` for each
    /// record with where it is.
    pub fn write(
        &mut self,
        mut placed: impl FnMut(Placed<'_, S::File>),
    ) -> Result<(), JournalError> {
        if self.poisoned {
            return Err(JournalError::Poisoned);
        }
        if self.batch.is_empty() || self.next_segment.is_some() && self.syncing {
            return Ok(());
        }
        self.begin_segment()?;
        let segment = self.segments.last().expect("begun");
        let header = BatchHeader {
            body_len: self.batch.body_len() as u32,
            segment: segment.id,
            number: self.number + 1,
            durable: self.durable_number,
            arrived_ms: self.now_ms,
            entries: self.batch.entries(),
            chain: self.chain,
            body_crc: self.batch.body_crc(),
        };
        let (header_bytes, link) = header.encode();
        let at = segment.len_bytes;
        let written = self.batch.with_parts(&header_bytes, |p| segment.file.write_at(p, at));
        self.fail_write("write to the journal", written)?;
        let segment = self.segments.last_mut().expect("begun");
        segment.len_bytes += (BATCH_HEADER_BYTES + self.batch.body_len()) as u64;
        let builder = &mut self.builder;
        self.batch.place(segment, at + BATCH_HEADER_BYTES as u64, |of| {
            builder.record(of.record, of.record.body.fields().len_bytes, of.effect);
            placed(of);
        });
        (self.number, self.chain) = (header.number, link);
        self.state.arrived_ms = header.arrived_ms;
        self.batch.clear();
        Ok(())
    }

    /// Makes everything written durable, and waits for it. Not while a [`SyncJob`] runs: of two syncs that run at once
    /// only one hears of an error.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        if self.poisoned {
            return Err(JournalError::Poisoned);
        }
        if !self.is_unsynced() {
            return Ok(());
        }
        debug_assert!(!self.syncing, "one sync at a time");
        let segment = self.segments.last().expect("something was written");
        if let Err(source) = segment.file.sync() {
            self.poisoned = true;
            return Err(JournalError::Io { what: "make the journal durable", source });
        }
        self.durable_number = self.number;
        self.durable_end = self.end();
        Ok(())
    }

    /// Begins the next segment if one is due: everything before it is durable first, and it is
    /// durable itself before a batch is written to it.
    fn begin_segment(&mut self) -> Result<(), JournalError> {
        let Some(checkpoint) = self.next_segment.take() else { return Ok(()) };
        let begun = self.sync().and_then(|()| self.try_begin_segment(&checkpoint));
        if begun.is_err() {
            self.next_segment = Some(checkpoint);
        }
        begun
    }

    fn try_begin_segment(&mut self, checkpoint: &Note) -> Result<(), JournalError> {
        let prev = self.segments.last();
        let header = SegmentHeader {
            index: prev.map_or(1, |p| p.index + 1),
            id: self.storage.fresh_id(),
            prev_id: prev.map_or(0, |p| p.id),
            prev_len: prev.map_or(0, |p| p.len_bytes),
            first_batch: self.number + 1,
            chain: self.chain,
        };
        let mut batch = Batch::default();
        batch.push_note(checkpoint);
        let batch_header = BatchHeader {
            body_len: batch.body_len() as u32,
            segment: header.id,
            number: header.first_batch,
            durable: self.durable_number,
            arrived_ms: self.now_ms,
            entries: 1,
            chain: self.chain,
            body_crc: batch.body_crc(),
        };
        let (batch_bytes, link) = batch_header.encode();
        let front = [&header.encode()[..], &batch_bytes[..]].concat();
        let path =
            tidelock_storage::join(&self.dir, &SegmentHeader::file_name(header.index, header.id));
        let file = self.storage.create(&path).and_then(|file| {
            batch.with_parts(&front, |parts| file.write_at(parts, 0))?;
            Ok(file)
        });
        if file.is_err() {
            // A torn beginning is recognised, but the next attempt has another id and is meant
            // to be the only one.
            match self.storage.remove(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    self.fail_write("remove an unfinished journal segment", Err(e))?;
                }
                _ => {}
            }
        }
        let file = self.fail_write("begin a journal segment", file)?;
        if let Err(source) = file.sync().and_then(|()| self.storage.sync_dir(&self.dir)) {
            self.poisoned = true;
            return Err(JournalError::Io { what: "make a journal segment durable", source });
        }
        let len_bytes = (front.len() + batch.body_len()) as u64;
        let builder = std::mem::take(&mut self.builder);
        if let Some(before) = self.segments.last() {
            let sealed = Sealed::new(before, self.number, self.chain, builder);
            self.sealed.insert(sealed.of.index, sealed.of);
            self.maps_due = true;
            drop(self.push_unindexed(sealed));
        }
        let file = SegmentFile::Plain(file);
        self.segments.push(Segment { index: header.index, id: header.id, file, len_bytes });
        let Note::Checkpoint(start) = checkpoint else { unreachable!("begins with a checkpoint") };
        self.starts.push(Arc::new((**start).clone()));
        self.appendable = true;
        (self.number, self.chain) = (batch_header.number, link);
        self.durable_number = self.number;
        self.durable_end = self.end();
        Ok(())
    }

    /// No room can get better; any other failed write leaves the file in an unknown state.
    fn fail_write<T>(
        &mut self,
        what: &'static str,
        result: io::Result<T>,
    ) -> Result<T, JournalError> {
        result.map_err(|source| {
            if tidelock_storage::is_full(&source) {
                return JournalError::Full(source);
            }
            self.poisoned = true;
            JournalError::Io { what, source }
        })
    }

    /// The end of what is written.
    #[must_use]
    pub fn end(&self) -> Position {
        let last = self.segments.last();
        last.map_or(Position::default(), |s| Position { segment: s.index, offset: s.len_bytes })
    }

    /// The end of what is durable.
    #[must_use]
    pub fn durable_end(&self) -> Position {
        self.durable_end
    }

    /// The beginning of the oldest segment kept.
    #[must_use]
    pub fn start(&self) -> Position {
        Position { segment: self.segments[0].index, offset: SEGMENT_HEADER_BYTES as u64 }
    }

    /// The segments, oldest first.
    #[must_use]
    pub fn segments(&self) -> &[Segment<S::File>] {
        &self.segments
    }

    /// The same of the segments after this one.
    pub fn starts_after(&self, segment: u64) -> impl Iterator<Item = (u64, &Arc<State>)> {
        let from = self.segments.partition_point(|s| s.index <= segment);
        self.segments[from..].iter().map(|segment| segment.index).zip(&self.starts[from..])
    }

    /// The segments' indexes, with the state at the beginning of each, oldest first.
    pub fn starts(&self) -> impl Iterator<Item = (u64, &Arc<State>)> {
        self.segments.iter().map(|segment| segment.index).zip(&self.starts)
    }

    /// Bytes of the segments from a position to the end.
    #[must_use]
    pub fn bytes_after(&self, position: Position) -> u64 {
        let after = self.segments.iter().filter(|s| s.index >= position.segment);
        let bytes: u64 = after.map(|s| s.len_bytes).sum();
        bytes.saturating_sub(position.offset)
    }

    /// Bytes of the segments between two positions.
    #[must_use]
    pub fn bytes_between(&self, from: Position, to: Position) -> u64 {
        self.bytes_after(from).saturating_sub(self.bytes_after(to))
    }

    /// Bytes that the segments from a position to the end take on disk; of a compressed one all.
    #[must_use]
    pub fn stored_after(&self, position: Position) -> u64 {
        let after = self.segments.iter().filter(|s| s.index >= position.segment);
        let of = |segment: &Segment<S::File>| match segment.file {
            SegmentFile::Plain(_) if segment.index == position.segment => {
                segment.len_bytes.saturating_sub(position.offset)
            }
            _ => segment.stored_bytes(),
        };
        after.map(of).sum()
    }

    /// Bytes of all segments.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.len_bytes).sum()
    }

    /// Opens a segment's file again: another one may have been put in its place.
    pub fn reopen_segment(&mut self, index: u64) -> Result<(), JournalError> {
        let last = self.segments.len() - 1;
        let Some(at) = self.segments.iter().position(|of| of.index == index) else { return Ok(()) };
        if at == last {
            // It is being written.
            return Ok(());
        }
        let id = self.segments[at].id;
        let found = match find_segment_file(&self.storage, &self.dir, index, id, &self.blocks) {
            Ok(found) => found.ok_or_else(|| io::ErrorKind::NotFound.into()),
            Err(ColdError::Io(source)) => Err(source),
            // As damaged as what is open.
            Err(_) => return Ok(()),
        };
        // What is left over goes when the journal is opened, or with the segment.
        self.segments[at].file = found.map_err(JournalError::io("open a journal segment"))?.file;
        Ok(())
    }

    /// Reads the batches between two positions.
    #[must_use]
    pub fn reader<B: Body>(&self, from: Position, to: Position) -> Reader<S::File, B> {
        let first = self.segments.partition_point(|segment| segment.index < from.segment);
        Reader::new(self.segments[first..].to_vec(), from, to)
    }

    /// Removes the segments that end before a position: nothing there is needed any more.
    pub fn remove_before(&mut self, position: Position) -> Result<(), JournalError> {
        let old = self.segments.iter().take_while(|s| s.index < position.segment).count();
        // The last one holds what the next one continues.
        let old = old.min(self.segments.len() - 1);
        if old == 0 {
            return Ok(());
        }
        for segment in &self.segments[..old] {
            let names = [
                SegmentHeader::file_name(segment.index, segment.id),
                cold_file_name(segment.index, segment.id),
                index_file_name(segment.index, segment.id),
            ];
            for name in names {
                match self.storage.remove(&tidelock_storage::join(&self.dir, &name)) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => {
                        return Err(JournalError::io("remove a journal segment")(e));
                    }
                    _ => {}
                }
            }
        }
        // Maps go by what is in memory, so that what a crash leaves of them opening removes.
        let first = self.segments[old].index;
        for name in Arc::make_mut(&mut self.maps).remove_before(first) {
            match self.storage.remove(&tidelock_storage::join(&self.dir, &name)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    return Err(JournalError::io("remove a map of the journal")(e));
                }
                _ => {}
            }
        }
        self.indexes = self.indexes.split_off(&first);
        self.sealed = self.sealed.split_off(&first);
        self.segments.drain(..old);
        self.starts.drain(..old);
        self.storage.sync_dir(&self.dir).map_err(JournalError::io("remove a journal segment"))
    }
}

fn write_back<F: StorageFile>(file: &SegmentFile<F>, from: u64, to: u64) -> io::Result<()> {
    let mut at = from;
    let mut buf = vec![0; 1 << 20];
    while at < to {
        let len = (to - at).min(buf.len() as u64) as usize;
        file.read_at(&mut buf[..len], at)?;
        file.write_at(&[IoSlice::new(&buf[..len])], at)?;
        at += len as u64;
    }
    Ok(())
}
