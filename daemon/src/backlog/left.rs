//! What the run before has left, and whether this one can go on with it.
//!
//! It can if the daemon was killed and the host was not: then all that was appended is here, the last record maybe in part. It
//! cannot if the sites differed by anything else (a copy was under way, a disk had failed): the mark is not there then.

use super::format::{HEADER_BYTES, Header, path_of};
use super::journal::{BacklogError, Journal, is_marked, segments_in};
use super::{Position, Reader};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Incarnation, Seq};
use tidelock_protocol::record::{Effect, Record};

/// What the segments must be of.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The run before.
    pub incarnation: Incarnation,
    /// The epoch in force.
    pub epoch: Epoch,
    /// This boot of the host.
    pub boot: [u8; 16],
    /// Group, member and disks.
    pub identity: [u8; 32],
}

/// Why a start does not go on with what is there.
#[derive(Debug, thiserror::Error)]
pub enum WhyNot {
    /// There is nothing.
    #[error("there is none")]
    Nothing,
    /// The mark is missing.
    #[error("the sites differed by more than what waited in it")]
    Unsound,
    /// The host was restarted.
    #[error("the host was restarted since, and it is never synced")]
    Boot,
    /// It was written by another run, or for other disks.
    #[error("it is of another run of the daemon, or of other disks")]
    Foreign,
    /// The segments do not follow one another.
    #[error("a part of it is missing")]
    Gap,
    /// It is damaged.
    #[error(transparent)]
    Files(#[from] BacklogError),
}

/// One record that waits, for those who count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Which.
    pub seq: Seq,
    /// Its payload.
    pub payload_bytes: u64,
    /// It is of a copy.
    pub is_of_copy: bool,
    /// Its guest did not write it.
    pub is_of_us: bool,
}

/// What there is to go on with.
#[derive(Debug)]
pub struct Left {
    /// Where the first record is.
    pub at: Position,
    /// All that may be missing at the backup, in order, without a gap; at least one.
    pub waiting: Vec<Waiting>,
    /// The time of the last one.
    pub last_hlc: Hlc,
    /// Of all records before this one the local write has ended.
    pub redo_from: Seq,
    directory: PathBuf,
    header: Header,
    segments: Vec<(u64, Seq, u64)>,
}

/// Looks at what is in the directory. All of it is read and verified.
pub fn find(directory: &Path, expected: &Expected) -> Result<Left, WhyNot> {
    if !directory.exists() {
        return Err(WhyNot::Nothing);
    }
    let mut numbers: Vec<u64> =
        segments_in(directory)?.into_iter().map(|(number, _)| number).collect();
    // The daemon was killed when it had just begun this one.
    while let Some(number) = numbers.last().filter(|number| is_empty(directory, **number)) {
        let path = path_of(directory, *number);
        std::fs::remove_file(&path).map_err(|source| BacklogError::Io { path, source })?;
        numbers.pop();
    }
    let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else {
        return Err(WhyNot::Nothing);
    };
    if !is_marked(directory) {
        return Err(WhyNot::Unsound);
    }
    let headers = headers(directory, &numbers, expected)?;
    if last - first + 1 != numbers.len() as u64 {
        return Err(WhyNot::Gap);
    }
    let (Some(header), Some(oldest)) = (headers.last(), headers.first()) else {
        return Err(WhyNot::Nothing);
    };
    let at = Position { segment: *first, offset: HEADER_BYTES as u64 };
    let mut left = Left {
        at,
        waiting: Vec::new(),
        last_hlc: Hlc(0),
        redo_from: header.redo_from,
        directory: directory.to_owned(),
        header: *header,
        segments: Vec::new(),
    };
    let mut reader = Reader::new(directory.to_owned(), at, oldest.first);
    while let Some(record) = reader.read_if_whole()? {
        if record.epoch != expected.epoch {
            return Err(WhyNot::Foreign);
        }
        left.take(&record, reader.position());
    }
    // Nothing but the end of the last segment may be torn.
    if left.waiting.is_empty() || reader.position().segment != *last {
        return Err(WhyNot::Gap);
    }
    let begins = |(header, of): (&Header, &(u64, Seq, u64))| {
        (header.number, header.first) == (of.0 + 1, of.1.next())
    };
    if !headers[1..].iter().zip(&left.segments).all(begins) {
        return Err(WhyNot::Gap);
    }
    Ok(left)
}

fn is_empty(directory: &Path, number: u64) -> bool {
    let metadata = std::fs::metadata(path_of(directory, number));
    metadata.is_ok_and(|metadata| metadata.len() <= HEADER_BYTES as u64)
}

/// All headers, which must be what is expected.
fn headers(directory: &Path, numbers: &[u64], expected: &Expected) -> Result<Vec<Header>, WhyNot> {
    let mut headers = Vec::new();
    for number in numbers {
        let path = path_of(directory, *number);
        let mut bytes = [0; HEADER_BYTES];
        let read = File::open(&path).and_then(|file| file.read_at(&mut bytes, 0));
        let len = read.map_err(|source| BacklogError::Io { path: path.clone(), source })?;
        let header = Header::decode(&bytes[..len]);
        let header = header.map_err(|why| BacklogError::Unusable { path, why })?;
        if header.boot != expected.boot {
            return Err(WhyNot::Boot);
        }
        let is_of_run = header.incarnation == expected.incarnation && header.number == *number;
        if !is_of_run || header.identity != expected.identity {
            return Err(WhyNot::Foreign);
        }
        headers.push(header);
    }
    Ok(headers)
}

impl Left {
    fn take(&mut self, record: &Record, after: Position) {
        self.waiting.push(Waiting {
            seq: record.seq,
            payload_bytes: record.payload().map_or(0, |payload| payload.data().len() as u64),
            is_of_copy: record.copy,
            is_of_us: record.copy || record.effect == Effect::Idle,
        });
        self.last_hlc = record.hlc;
        match self.segments.last_mut() {
            Some((number, last, len_bytes)) if *number == after.segment => {
                (*last, *len_bytes) = (record.seq, after.offset);
            }
            _ => self.segments.push((after.segment, record.seq, after.offset)),
        }
    }

    /// The run that wrote it.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.header.incarnation
    }

    /// The seq of the first record.
    #[must_use]
    pub fn first(&self) -> Seq {
        self.waiting[0].seq
    }

    /// The seq of the last one.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.waiting[self.waiting.len() - 1].seq
    }

    /// Reads all records again.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::new(self.directory.clone(), self.at, self.first())
    }

    /// The writing end goes on behind the last record.
    pub fn go_on(&self, segment_bytes: u64) -> Result<Journal, BacklogError> {
        Journal::go_on(self.directory.clone(), segment_bytes, self.header, self.segments.clone())
    }
}
