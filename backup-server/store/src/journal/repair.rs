//! A journal that cannot be opened is cut before what is damaged, on command.
//!
//! What it is for: when no copy of the damaged file can be had, everything before the damage is still one state of the
//! group, and everything behind it is kept for whoever wants to search it. What was acknowledged behind the cut is lost here:
//! only an operator can decide that.
//!
//! Invariants:
//! - What is in the images is never cut: they cannot go back.
//! - A recovery is never taken back.
//! - Every file that is cut is in the quarantine first, durably. Interrupted, it is done again and leads to the same.

use super::format::{Entry, SEGMENT_HEADER_BYTES, SegmentHeader};
use super::index::parse_index_file_name;
use super::map::parse_map_file_name;
use super::open::{EndWithin, end_within, found_of, open_segment, remove_name};
use super::scan::{Scan, find_header};
use super::{
    Closed, Journal, JournalError, Note, Options, Position, Segment, State, parse_cold_file_name,
};
use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::sync::Arc;
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::record::RawBody;
use tidelock_storage::{Storage, StorageFile};

/// What is copied at once.
const COPY_BYTES: usize = 1 << 20;

/// Where a journal is cut, and what that costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Why it cannot be opened.
    pub reason: String,
    /// What is kept ends here.
    pub end: Position,
    /// Files that go to the quarantine, as a whole or what is behind the cut of them.
    pub files: Vec<String>,
    /// Of each writer the last record that is kept, and the last one behind the cut, if one was found there.
    pub writers: Vec<(Seq, Option<Seq>)>,
}

/// Why a journal cannot be cut.
#[derive(Debug, Error)]
pub enum RepairError {
    /// Something is wrong that is not damage, or cannot be read at all.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Nothing would be left, or less than the images have.
    #[error(
        "{reason}. What is before it is needed by the images: nothing can be kept. Restore the file from a copy, or remove \
         the group's directory and let the host copy its disks again"
    )]
    Folded {
        /// What is damaged.
        reason: String,
    },
    /// The group was recovered after the damage.
    #[error(
        "{reason}. The group was recovered behind it, to epoch {epoch}: a cut would take that back. Restore the file from \
         a copy"
    )]
    Recovered {
        /// What is damaged.
        reason: String,
        /// The newest epoch that was found.
        epoch: u64,
    },
    /// A file cannot be kept.
    #[error("cannot {what} {file}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        file: String,
        /// Why it failed.
        source: io::Error,
    },
}

fn failed(what: &'static str, file: &str) -> impl FnOnce(io::Error) -> RepairError {
    move |source| RepairError::Io { what, file: file.to_owned(), source }
}

/// Part of a journal that is in the images, or may be.
#[derive(Clone, Debug)]
pub struct InImages<'a> {
    /// Everything before this place is in them, durably.
    pub floor: Position,
    /// Records before this place may be, because a fold up to there was begun.
    pub begun: Position,
    /// States with all that is in them.
    pub oldest: &'a Closed,
}

impl InImages<'_> {
    /// True if a journal that ends here in this state has all records that the images have, all of them in its cut.
    fn is_within(&self, end: Position, state: &State) -> bool {
        let (newest, at) = (state.newest_effective(), self.oldest.at);
        // Records of several writers may have one time, on both sides of the end.
        let is_as_late = match state.writers.len() {
            0 | 1 => newest >= at,
            _ => newest > at || at == Hlc(0),
        };
        end >= self.begun && is_as_late && state.journaled().covers(&self.oldest.cut)
    }
}

/// Finds out where to cut; nothing is changed. `Ok(None)`: it can be opened, up to here as far as is known.
pub fn plan<S: Storage>(
    storage: &S,
    dir: &str,
    in_images: &InImages<'_>,
    options: Options,
) -> Result<Option<Repair>, RepairError> {
    let floor = in_images.floor;
    let error = match Journal::open(storage.clone(), dir, floor, options) {
        Ok(_) => return Ok(None),
        Err(error @ (JournalError::Corrupt { .. } | JournalError::Missing { .. })) => error,
        Err(error) => return Err(error.into()),
    };
    let reason = what_of(&error);
    let (mut index, mut offset) = match &error {
        JournalError::Corrupt { file, offset, .. } => match parse(file) {
            Some((index, _)) => (index, *offset),
            None => return Err(error.into()),
        },
        JournalError::Missing { index } => (*index, 0),
        _ => unreachable!("matched above"),
    };
    let names = storage.list(dir).map_err(failed("list", dir))?;
    let ids: BTreeMap<u64, u64> = names.iter().filter_map(|name| parse(name)).collect();
    let blocks = Arc::default();
    let open = |index: u64| match ids.get(&index) {
        Some(id) => open_segment(storage, dir, (index, *id), &blocks),
        None => Err(JournalError::Missing { index }),
    };
    let begins = SEGMENT_HEADER_BYTES as u64;
    let (last, EndWithin { end, len_bytes, state }) = loop {
        let at = Position { segment: index, offset };
        let (kept, up_to) = if offset > begins && at > floor {
            (index, offset)
        } else if index > floor.segment.max(1) && ids.contains_key(&(index - 1)) {
            (index - 1, u64::MAX)
        } else {
            return Err(RepairError::Folded { reason });
        };
        let found = open(kept).and_then(found_of).and_then(|last| {
            let within = end_within(&last, up_to.min(last.segment.len_bytes), floor)?;
            Ok((last, within))
        });
        match found {
            Ok(found) => break found,
            // Damaged as well: later batches had said that it was durable.
            Err(JournalError::Corrupt { offset: earlier, .. })
                if (kept, earlier) < (index, offset) =>
            {
                (index, offset) = (kept, earlier);
            }
            Err(error) => return Err(error.into()),
        }
    };
    if !in_images.is_within(end, &state) {
        return Err(RepairError::Folded { reason });
    }
    let behind: Vec<Segment<S::File>> =
        ids.range(end.segment..).filter_map(|(index, _)| open(*index).ok()).collect();
    let mut seen = ReadableTail::default();
    for segment in &behind {
        let from = if segment.index == end.segment { end.offset } else { begins };
        seen.all_of(segment, from);
    }
    let newest = seen.epoch.max(state.epoch.0);
    if newest > state.epoch.0 {
        return Err(RepairError::Recovered { reason, epoch: newest });
    }
    let writers = (0..).zip(&state.writers).map(|(nth, writer)| {
        let last = seen.last.get(&WriterId(nth)).copied();
        (writer.seq, last.filter(|last| *last > writer.seq))
    });
    let writers = writers.collect();
    // A compressed segment cannot be the last one.
    let is_shorter = len_bytes < last.segment.len_bytes;
    let is_cut = |name: &str| is_shorter || parse_cold_file_name(name).is_some();
    let files = names.into_iter().filter(|name| {
        let of = parse(name).map(|(index, _)| index);
        of.is_some_and(|index| index > end.segment || index == end.segment && is_cut(name))
    });
    let mut files: Vec<String> = files.collect();
    files.sort();
    let end = Position { offset: len_bytes, ..end };
    Ok(Some(Repair { reason, end, files, writers }))
}

/// Without what the operator is told to do when there is no repair.
fn what_of(error: &JournalError) -> String {
    match error {
        JournalError::Corrupt { file, offset, damage } => {
            format!("journal segment {file} is damaged at byte {offset}: {damage}")
        }
        JournalError::Missing { index } => format!("journal segment {index} is missing"),
        error => error.to_string(),
    }
}

fn parse(name: &str) -> Option<(u64, u64)> {
    SegmentHeader::parse_file_name(name)
        .or_else(|| parse_cold_file_name(name).filter(|_| !name.ends_with(".new")))
}

/// What can still be read behind the cut.
#[derive(Default)]
struct ReadableTail {
    last: BTreeMap<WriterId, Seq>,
    epoch: u64,
}

impl ReadableTail {
    fn all_of<F: StorageFile>(&mut self, segment: &Segment<F>, from: u64) {
        let mut scan = Scan::new(segment.file.clone(), segment.id, from, segment.len_bytes);
        loop {
            match scan.next_durable() {
                Ok(Some(batch)) => {
                    for entry in super::Entries::new(&batch.header, batch.body).flatten() {
                        self.entry(&entry);
                    }
                }
                Ok(None) => return,
                Err(_) => {
                    // To the next batch of the segment, if there is one.
                    let after = scan.at + 1;
                    let (file, end) = (&segment.file, segment.len_bytes);
                    let Ok(Some(next)) = find_header(file, segment.id, after, end, |_, _| true)
                    else {
                        return;
                    };
                    scan.at = next;
                }
            }
        }
    }

    fn entry(&mut self, entry: &Entry<RawBody>) {
        match entry {
            Entry::Record { head, .. } => {
                let record = head.peek();
                let last = self.last.entry(record.writer).or_default();
                *last = (*last).max(record.seq);
                self.epoch = self.epoch.max(record.epoch.0);
            }
            Entry::Note(Note::EpochStart(start)) => self.epoch = self.epoch.max(start.epoch.0),
            Entry::Note(Note::Checkpoint(state)) => self.epoch = self.epoch.max(state.epoch.0),
            Entry::Note(_) => {}
        }
    }
}

/// Does what was planned.
pub fn repair<S: Storage>(
    storage: &S,
    dir: &str,
    quarantine: &str,
    repair: &Repair,
) -> Result<(), RepairError> {
    let made = storage.create_dir(quarantine).and_then(|()| storage.sync_dir(""));
    made.map_err(failed("make", quarantine))?;
    // What stands on segments that go, goes: it can be made again of what stays.
    for name in storage.list(dir).map_err(failed("list", dir))? {
        let last = parse_index_file_name(&name)
            .or_else(|| parse_map_file_name(&name).map(|(_, index, id)| (index, id)));
        if last.is_some_and(|(index, _)| index >= repair.end.segment) {
            remove_name(storage, dir, &name)?;
        }
    }
    // The newest first, each durably before the next one goes: a crash leaves no hole.
    for name in repair.files.iter().rev() {
        let (from, to) =
            (tidelock_storage::join(dir, name), tidelock_storage::join(quarantine, name));
        let Some((index, id)) = parse(name) else { continue };
        if index > repair.end.segment {
            let kept = storage.rename(&from, &to).and_then(|()| {
                storage.sync_dir(quarantine)?;
                storage.sync_dir(dir)
            });
            kept.map_err(failed("keep", name))?;
            continue;
        }
        copy(storage, &from, &to).map_err(failed("keep a copy of", name))?;
        storage.sync_dir(quarantine).map_err(failed("keep a copy of", name))?;
        if parse_cold_file_name(name).is_none() {
            let cut = storage.open(&from).and_then(|file| {
                file.set_size(repair.end.offset)?;
                file.sync()
            });
            cut.map_err(failed("cut", name))?;
            continue;
        }
        let segment = open_segment(storage, dir, (index, id), &Arc::default())?;
        let plain = tidelock_storage::join(dir, &SegmentHeader::file_name(index, id));
        let shorter = storage.create(&plain).and_then(|file| {
            copy_bytes(|buf, at| segment.file.read_at(buf, at), &file, repair.end.offset)?;
            file.sync()
        });
        shorter.map_err(failed("cut", name))?;
        storage.sync_dir(dir).map_err(failed("cut", name))?;
        remove_name(storage, dir, name)?;
    }
    for dir in ["", quarantine, dir] {
        storage.sync_dir(dir).map_err(failed("make durable", dir))?;
    }
    Ok(())
}

/// As much of it as can be read: what cannot be is zeroes in the copy.
fn copy<S: Storage>(storage: &S, from: &str, to: &str) -> io::Result<()> {
    match storage.remove(to) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let (source, copy) = (storage.open(from)?, storage.create(to)?);
    let len_bytes = source.size_bytes()?;
    copy_bytes(
        |buf, at| source.read_at(buf, at).or_else(|_| by_sectors(&source, buf, at)),
        &copy,
        len_bytes,
    )?;
    copy.sync()
}

fn by_sectors<F: StorageFile>(file: &F, buf: &mut [u8], at: u64) -> io::Result<()> {
    for (part, at) in buf.chunks_mut(512).zip((at..).step_by(512)) {
        if file.read_at(part, at).is_err() {
            part.fill(0);
        }
    }
    Ok(())
}

fn copy_bytes<F: StorageFile>(
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
    to: &F,
    len_bytes: u64,
) -> io::Result<()> {
    let mut buf = vec![0; COPY_BYTES];
    for at in (0..len_bytes).step_by(COPY_BYTES) {
        let part = &mut buf[..(len_bytes - at).min(COPY_BYTES as u64) as usize];
        read(part, at)?;
        to.write_at(&[IoSlice::new(part)], at)?;
    }
    Ok(())
}
