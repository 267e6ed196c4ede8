//! Writing the segments, and giving them back.

use super::Position;
use super::format::{
    HEADER_BYTES, Header, TAG_BYTES, Unusable, name_of, number_of, path_of, record_tag,
};
use bytes::BytesMut;
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tidelock_protocol::ids::{Incarnation, Seq};
use tidelock_protocol::record::Record;
use tidelock_storage::unsynced::{UnsyncedDir, UnsyncedFile};

/// A segment is closed at this size or later: the greatest record comes on top.
const SEGMENT_MIN_BYTES: u64 = 16 << 20;
/// Of so many segments the whole consists, if they are not smaller than that.
const SEGMENTS: u64 = 64;
/// Up to here a record is written by one call.
const GATHER_MAX_BYTES: usize = 64 << 10;

/// Why the backlog on disk cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum BacklogError {
    /// The file system.
    #[error("the backlog on disk failed at {path}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A segment is not what it should be.
    #[error("the backlog on disk cannot be used, {path}: {why}")]
    Unusable {
        /// Which.
        path: PathBuf,
        /// Why.
        why: Unusable,
    },
    /// What was written is not what is read.
    #[error("the backlog on disk is damaged, {path} at byte {offset}: {what}")]
    Damaged {
        /// The segment.
        path: PathBuf,
        /// The record's beginning.
        offset: u64,
        /// What was found.
        what: String,
    },
}

/// At what size segments of a backlog of `size_bytes` are closed. On disk there may be as much more than that as one of
/// them has, and a record.
#[must_use]
pub fn segment_bytes(size_bytes: u64) -> u64 {
    (size_bytes / SEGMENTS).max(SEGMENT_MIN_BYTES)
}

#[derive(Debug)]
struct Segment {
    number: u64,
    last: Seq,
    len_bytes: u64,
}

/// The writing end.
#[derive(Debug)]
pub struct Journal {
    files: Arc<dyn UnsyncedDir>,
    segment_bytes: u64,
    /// Of the segments to come; number, first seq and where to redo from are filled in.
    header: Header,
    segments: VecDeque<Segment>,
    /// The last of them, if it may grow.
    file: Option<Box<dyn UnsyncedFile>>,
    next_number: u64,
    /// Segments that end up to here are given back.
    released: Seq,
    /// The end of the last one that was.
    gone: Seq,
    is_sound: bool,
}

impl Journal {
    /// Begins anew in a directory, which is made if it is missing. What an earlier run left there is removed.
    pub fn begin(
        files: Arc<dyn UnsyncedDir>,
        segment_bytes: u64,
        incarnation: Incarnation,
        boot: [u8; 16],
        identity: [u8; 32],
    ) -> Result<Self, BacklogError> {
        files
            .make()
            .map_err(|source| BacklogError::Io { path: files.path().to_owned(), source })?;
        clear(&*files)?;
        let header = Header {
            incarnation,
            number: 0,
            first: Seq::ZERO,
            redo_from: Seq::ZERO,
            boot,
            identity,
        };
        Ok(Self {
            files,
            segment_bytes,
            header,
            segments: VecDeque::new(),
            file: None,
            next_number: 1,
            released: Seq::ZERO,
            gone: Seq::ZERO,
            is_sound: false,
        })
    }

    /// Goes on with what the run before left, as the same run. What it had not written to the end is cut off.
    pub(super) fn go_on(
        files: Arc<dyn UnsyncedDir>,
        segment_bytes: u64,
        header: Header,
        segments: Vec<(u64, Seq, u64)>,
    ) -> Result<Self, BacklogError> {
        let (number, _, len_bytes) = *segments.last().expect("there is something to go on with");
        for other in segments_in(&*files)?.into_iter().filter(|other| *other > number) {
            remove(&*files, other)?;
        }
        let opened = files.open(&name_of(number));
        opened
            .and_then(|mut file| file.truncate(len_bytes))
            .map_err(|source| BacklogError::Io { path: path_of(files.path(), number), source })?;
        let segment = |(number, last, len_bytes)| Segment { number, last, len_bytes };
        Ok(Self {
            files,
            segment_bytes,
            header,
            segments: segments.into_iter().map(segment).collect(),
            file: None,
            next_number: number + 1,
            released: Seq::ZERO,
            gone: Seq::ZERO,
            is_sound: true,
        })
    }

    /// Where the segments are.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.files.path()
    }

    /// Appends a record, and says where it begins. `redo_from`: of all records before that one the local write has
    /// ended. When it has failed, nothing may be appended before [`restart`](Self::restart): there may be a part of
    /// the record.
    pub fn append(
        &mut self,
        record: &Record,
        redo_from: impl FnOnce() -> Seq,
    ) -> Result<Position, BacklogError> {
        let is_full = |segment: &Segment| segment.len_bytes >= self.segment_bytes;
        if self.file.is_none() || self.segments.back().is_some_and(is_full) {
            self.begin_segment(record.seq, redo_from())?;
        }
        let segment = self.segments.back_mut().expect("just begun");
        let at = Position { segment: segment.number, offset: segment.len_bytes };
        let file = self.file.as_mut().expect("just begun");
        let written = write_record(&mut **file, record, &self.header.identity, at);
        written.map_err(|source| BacklogError::Io {
            path: path_of(self.files.path(), at.segment),
            source,
        })?;
        segment.len_bytes += (record.encoded_len() + TAG_BYTES) as u64;
        segment.last = record.seq;
        Ok(at)
    }

    fn begin_segment(&mut self, first: Seq, redo_from: Seq) -> Result<(), BacklogError> {
        let number = self.next_number;
        let path = path_of(self.files.path(), number);
        let failed = |source| BacklogError::Io { path: path.clone(), source };
        let mut file = self.files.create(&name_of(number)).map_err(failed)?;
        self.next_number += 1;
        // From here on it is to be removed with the others, whatever becomes of it.
        let len_bytes = HEADER_BYTES as u64;
        self.segments.push_back(Segment { number, last: Seq(first.0 - 1), len_bytes });
        let header = Header { number, first, redo_from, ..self.header };
        file.append(&header.encode()).map_err(failed)?;
        self.file = Some(file);
        Ok(())
    }

    /// Nothing up to `released` is wanted any more: segments that hold nothing else go.
    pub fn release(&mut self, released: Seq) -> Result<(), BacklogError> {
        self.released = self.released.max(released);
        while self.has_to_give_back(self.released) {
            if self.segments.len() == 1 {
                self.file = None;
            }
            self.remove_first()?;
        }
        Ok(())
    }

    /// Whether a segment goes when nothing up to `released` is wanted any more. The last one stays while it grows.
    #[must_use]
    pub fn has_to_give_back(&self, released: Seq) -> bool {
        self.segments.front().is_some_and(|first| {
            let grows = self.segments.len() == 1
                && self.file.is_some()
                && first.len_bytes < self.segment_bytes;
            first.last <= released && !grows
        })
    }

    /// The last record of the segments that were given back.
    #[must_use]
    pub fn gone(&self) -> Seq {
        self.gone
    }

    /// At what size segments are closed.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    fn remove_first(&mut self) -> Result<(), BacklogError> {
        let Some(first) = self.segments.pop_front() else { return Ok(()) };
        self.gone = self.gone.max(first.last);
        remove(&*self.files, first.number)
    }

    /// Whether the next start may go on with this: the sites are equal but for what is in it. It must not be true any more
    /// before that is not.
    pub fn set_sound(&mut self, sound: bool) -> Result<(), BacklogError> {
        if self.is_sound == sound {
            return Ok(());
        }
        mark(&*self.files, sound)?;
        self.is_sound = sound;
        Ok(())
    }

    /// After a failure, once the backup has all that was appended: begins anew.
    pub fn restart(&mut self) -> Result<(), BacklogError> {
        self.file = None;
        self.gone = self.segments.back().map_or(self.gone, |last| last.last);
        self.segments.clear();
        clear(&*self.files)
    }

    /// Removes all segments of an earlier run, and begins anew for this run.
    pub fn begin_for(
        &mut self,
        incarnation: Incarnation,
        identity: [u8; 32],
    ) -> Result<(), BacklogError> {
        self.restart()?;
        self.is_sound = false;
        (self.header.incarnation, self.header.identity) = (incarnation, identity);
        Ok(())
    }

    /// Segments that there are.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Bytes on disk.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len_bytes).sum()
    }
}

fn write_record(
    file: &mut dyn UnsyncedFile,
    record: &Record,
    identity: &[u8; 32],
    at: Position,
) -> io::Result<()> {
    let payload: &[u8] = record.payload().map_or(&[], |payload| payload.data());
    let mut bytes = BytesMut::with_capacity(record.encoded_len().min(GATHER_MAX_BYTES + 4096));
    record.encode_head(&mut bytes);
    let tag = record_tag(identity, at, &[&bytes, payload]);
    if payload.len() <= GATHER_MAX_BYTES {
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(&tag);
        return file.append(&bytes);
    }
    file.append(&bytes)?;
    file.append(payload)?;
    file.append(&tag)
}

/// The mark that is there while the next start may go on with the segments.
const MARK: &str = "sound";

/// Whether it is there.
pub(super) fn is_marked(files: &dyn UnsyncedDir) -> bool {
    files.has(MARK)
}

/// Puts it there, or takes it away.
pub fn mark(files: &dyn UnsyncedDir, sound: bool) -> Result<(), BacklogError> {
    let done = match sound {
        true if files.has(MARK) => Ok(()),
        true => files.create(MARK).map(drop),
        false => match files.remove(MARK) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        },
    };
    done.map_err(|source| BacklogError::Io { path: files.path().join(MARK), source })
}

/// Removes all segments, the mark first.
pub(super) fn clear(files: &dyn UnsyncedDir) -> Result<(), BacklogError> {
    mark(files, false)?;
    segments_in(files)?.into_iter().try_for_each(|number| remove(files, number))
}

/// Removes a segment.
pub(super) fn remove(files: &dyn UnsyncedDir, number: u64) -> Result<(), BacklogError> {
    let done = files.remove(&name_of(number));
    done.map_err(|source| BacklogError::Io { path: path_of(files.path(), number), source })
}

/// The numbers of the segments that are there, in order.
pub(super) fn segments_in(files: &dyn UnsyncedDir) -> Result<Vec<u64>, BacklogError> {
    let failed = |source| BacklogError::Io { path: files.path().to_owned(), source };
    let names = files.names().map_err(failed)?.unwrap_or_default();
    let mut found: Vec<_> = names.iter().filter_map(|name| number_of(name)).collect();
    found.sort_unstable();
    Ok(found)
}
