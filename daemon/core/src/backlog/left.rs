//! What the run before has left, and whether this one can go on with it.
//!
//! It can if the daemon was killed and the host was not: then all that was appended is here, the last record maybe in part. It
//! cannot if the sites differed by anything else (a copy was under way, a disk had failed): the mark is not there then.

use super::format::{HEADER_BYTES, Header, Unusable, name_of, path_of};
use super::journal::{BacklogError, Journal, is_marked, remove, segments_in};
use super::reader::read_at;
use super::{Position, Reader};
use std::sync::Arc;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Incarnation, Seq};
use tidelock_protocol::record::{Effect, Record, Role};
use tidelock_storage::unsynced::UnsyncedDir;

/// What the segments must be of.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The run before.
    pub incarnation: Incarnation,
    /// The epoch in force.
    pub epoch: Epoch,
    /// This boot of the host.
    pub boot: [u8; 16],
    /// Secret of the run, group, member and disks, with which all of it is checked.
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
    files: Arc<dyn UnsyncedDir>,
    header: Header,
    segments: Vec<(u64, Seq, u64)>,
}

/// Records whose local writes may not have ended before the daemon was killed.
#[derive(Debug)]
pub struct Redo {
    reader: Reader,
    redo_from: Seq,
    last: Seq,
}

impl Redo {
    /// Does it again, in its order: `apply` is given each record from the first on that may not have ended. Nobody else may
    /// write to the disks. Returns how many writes these were.
    pub fn run<E: From<BacklogError>>(
        mut self,
        mut apply: impl FnMut(&Record) -> Result<(), E>,
    ) -> Result<u64, E> {
        let mut done = 0;
        let mut backwards = Vec::new();
        while self.reader.next_seq() <= self.last {
            let record = self.reader.read()?;
            // Copies, too: one that repairs a failed write comes after it, and is what both sites have.
            if record.seq < self.redo_from {
                continue;
            }
            done += u64::from(matches!(record.body.effect, Effect::Write(_) | Effect::Zero { .. }));
            if tidelock_planted::is(Bug::RedoneBackwards) {
                backwards.push(record);
                continue;
            }
            apply(&record)?;
        }
        backwards.iter().rev().try_for_each(apply)?;
        Ok(done)
    }
}

/// Looks at what is in the directory. All of it is read and verified.
pub fn find(files: &Arc<dyn UnsyncedDir>, expected: &Expected) -> Result<Left, WhyNot> {
    let mut numbers = segments_in(&**files)?;
    // The daemon was killed when it had just begun this one.
    while let Some(number) = numbers.last().filter(|number| is_empty(&**files, **number)) {
        remove(&**files, *number)?;
        numbers.pop();
    }
    let (Some(first), Some(last)) = (numbers.first(), numbers.last()) else {
        return Err(WhyNot::Nothing);
    };
    if !is_marked(&**files) {
        return Err(WhyNot::Unsound);
    }
    let headers = headers(&**files, &numbers, expected)?;
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
        files: files.clone(),
        header: *header,
        segments: Vec::new(),
    };
    let mut reader = Reader::keyed(files.clone(), at, oldest.first, expected.identity);
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

fn is_empty(files: &dyn UnsyncedDir, number: u64) -> bool {
    let len_bytes = files.open(&name_of(number)).and_then(|file| file.len_bytes());
    len_bytes.is_ok_and(|len_bytes| len_bytes <= HEADER_BYTES as u64)
}

/// All headers, which must be what is expected.
fn headers(
    files: &dyn UnsyncedDir,
    numbers: &[u64],
    expected: &Expected,
) -> Result<Vec<Header>, WhyNot> {
    let mut headers = Vec::new();
    for number in numbers {
        let path = path_of(files.path(), *number);
        let mut bytes = [0; HEADER_BYTES];
        let opened = files.open(&name_of(*number));
        let read = opened.and_then(|file| read_at(&*file, &mut bytes, 0));
        let len = read.map_err(|source| BacklogError::Io { path: path.clone(), source })?;
        let header = match Header::decode(&bytes[..len], &expected.identity) {
            Err(Unusable::Foreign) => return Err(WhyNot::Foreign),
            header => header.map_err(|why| BacklogError::Unusable { path, why })?,
        };
        if header.boot != expected.boot && !tidelock_planted::is(Bug::BootIgnored) {
            return Err(WhyNot::Boot);
        }
        if header.incarnation != expected.incarnation || header.number != *number {
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
            is_of_copy: record.role().is_of_copy(),
            is_of_us: record.role() != Role::Change,
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

    /// The records whose local writes may not have ended, as a value that outlives `self`.
    #[must_use]
    pub fn again(&self) -> Redo {
        Redo { reader: self.reader(), redo_from: self.redo_from, last: self.last() }
    }

    /// Reads all records again.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader::keyed(self.files.clone(), self.at, self.first(), self.header.identity)
    }

    /// The writing end goes on behind the last record.
    pub fn go_on(&self, segment_bytes: u64) -> Result<Journal, BacklogError> {
        let mut segments = self.segments.clone();
        if tidelock_planted::is(Bug::TornTailKept)
            && let Some((number, _, len_bytes)) = segments.last_mut()
        {
            let opened = self.files.open(&name_of(*number)).and_then(|file| file.len_bytes());
            *len_bytes = opened.unwrap_or(*len_bytes);
        }
        Journal::go_on(self.files.clone(), segment_bytes, self.header, segments)
    }
}
