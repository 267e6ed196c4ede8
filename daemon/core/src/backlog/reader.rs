//! Reading records back, one after the other.

use super::Position;
use super::format::{HEADER_BYTES, Header, TAG_BYTES, name_of, path_of, record_tag};
use super::journal::BacklogError;
use crate::sequencer::RECORD_OVERHEAD_BYTES;
use bytes::{Bytes, BytesMut};
use std::io;
use std::sync::Arc;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::limits::RECORD_MAX_BYTES;
use tidelock_protocol::record::{Head, Record};
use tidelock_storage::unsynced::{UnsyncedDir, UnsyncedFile};

/// What is read at once, unless a record is larger.
const CHUNK_BYTES: usize = 1 << 20;
/// More than any head of a record.
const HEAD_MAX_BYTES: usize = 4096;

/// Reads the records of a run of segments in order. It knows the next one by its seq, so what is damaged,
/// missing or of another run is never taken for it.
#[derive(Debug)]
pub struct Reader {
    files: Arc<dyn UnsyncedDir>,
    at: Position,
    file: Option<Box<dyn UnsyncedFile>>,
    /// What was read from `at` on.
    ahead: Bytes,
    next: Seq,
    /// The key of the checks. `None`: this process has written or verified the segments.
    identity: Option<[u8; 32]>,
}

impl Reader {
    /// From the record of this seq on, which begins there. For segments that this process has written or verified.
    #[must_use]
    pub fn new(files: Arc<dyn UnsyncedDir>, at: Position, next: Seq) -> Self {
        Self { files, at, file: None, ahead: Bytes::new(), next, identity: None }
    }

    /// As [`new`](Self::new), for segments of an earlier process: the keyed checks must be right.
    #[must_use]
    pub fn keyed(files: Arc<dyn UnsyncedDir>, at: Position, next: Seq, identity: [u8; 32]) -> Self {
        Self { identity: Some(identity), ..Self::new(files, at, next) }
    }

    /// The seq of the record that comes next.
    #[must_use]
    pub fn next_seq(&self) -> Seq {
        self.next
    }

    /// Where it begins, if it is not the first of a segment.
    #[must_use]
    pub fn position(&self) -> Position {
        self.at
    }

    /// What the next record costs memory. It must be there.
    pub fn next_cost_bytes(&mut self) -> Result<u64, BacklogError> {
        match self.head()? {
            Some(head) => Ok(head.payload_len() as u64 + RECORD_OVERHEAD_BYTES),
            None => Err(self.ends()),
        }
    }

    /// The next record, which must be there.
    pub fn read(&mut self) -> Result<Record, BacklogError> {
        self.read_if_whole()?.ok_or_else(|| self.ends())
    }

    /// The next record. `None`: the segments end here, maybe within a record.
    pub fn read_if_whole(&mut self) -> Result<Option<Record>, BacklogError> {
        let Some(head) = self.head()? else { return Ok(None) };
        let len = head.encoded_len();
        if self.ahead.len() < len + TAG_BYTES && !self.fill(len + TAG_BYTES)? {
            return Ok(None);
        }
        let mut bytes = self.ahead.split_to(len);
        let tag = self.ahead.split_to(TAG_BYTES);
        let right = self.identity.map(|identity| record_tag(&identity, self.at, &[&bytes]));
        let record = Record::decode(&mut bytes).map_err(|source| self.damaged(&source))?;
        let record = record.expect("all of it is here");
        if record.seq != self.next {
            return Err(self.damaged(&format!("seq {} in the place of {}", record.seq, self.next)));
        }
        if right.is_some_and(|right| tag != right[..]) {
            return Err(self.damaged(&"a record that this run of the daemon has not written"));
        }
        self.at.offset += (len + TAG_BYTES) as u64;
        self.next = self.next.next();
        Ok(Some(record))
    }

    /// The head of the next record, in the next segment if this one has ended.
    fn head(&mut self) -> Result<Option<Head>, BacklogError> {
        loop {
            let head = Head::parse(&self.ahead).map_err(|source| self.damaged(&source))?;
            if let Some(head) = head {
                if head.encoded_len() > RECORD_MAX_BYTES as usize {
                    return Err(self.damaged(&"a record that is too large"));
                }
                return Ok(Some(head));
            }
            let had = self.ahead.len();
            self.fill(HEAD_MAX_BYTES)?;
            if self.ahead.len() > had {
                continue;
            }
            // The segment ends here: between two records if there is another one.
            if had > 0 || !self.next_segment()? {
                return Ok(None);
            }
        }
    }

    /// Reads from the present place on. Returns whether `wanted` bytes are there.
    fn fill(&mut self, wanted: usize) -> Result<bool, BacklogError> {
        let path = path_of(self.files.path(), self.at.segment);
        let failed = |source| BacklogError::Io { path: path.clone(), source };
        if self.file.is_none() {
            let file = self.files.open(&name_of(self.at.segment)).map_err(failed)?;
            let mut header = [0; HEADER_BYTES];
            if read_at(&*file, &mut header, 0).map_err(failed)? < HEADER_BYTES {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
            let header = match &self.identity {
                Some(identity) => Header::decode(&header, identity),
                None => Header::decode_unkeyed(&header),
            };
            let header =
                header.map_err(|why| BacklogError::Unusable { path: path.clone(), why })?;
            if header.number != self.at.segment {
                return Err(self.damaged(&"the header of another segment"));
            }
            self.file = Some(file);
        }
        let file = self.file.as_ref().expect("just opened");
        let left = file.len_bytes().map_err(failed)?.saturating_sub(self.at.offset);
        let mut bytes = BytesMut::zeroed(wanted.max(CHUNK_BYTES).min(left as usize));
        let len = read_at(&**file, &mut bytes, self.at.offset).map_err(failed)?;
        bytes.truncate(len);
        self.ahead = bytes.freeze();
        Ok(len >= wanted)
    }

    fn next_segment(&mut self) -> Result<bool, BacklogError> {
        let number = self.at.segment + 1;
        if !self.files.has(&name_of(number)) {
            return Ok(false);
        }
        self.at = Position { segment: number, offset: HEADER_BYTES as u64 };
        self.file = None;
        self.ahead = Bytes::new();
        Ok(true)
    }

    fn ends(&self) -> BacklogError {
        self.damaged(&format!("it ends before seq {}", self.next))
    }

    fn damaged(&self, what: &dyn std::fmt::Display) -> BacklogError {
        BacklogError::Damaged {
            path: path_of(self.files.path(), self.at.segment),
            offset: self.at.offset,
            what: what.to_string(),
        }
    }
}

/// Reads as much as there is. Returns how much that is.
pub(super) fn read_at(file: &dyn UnsyncedFile, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut len = 0;
    while len < into.len() {
        match file.read_at(&mut into[len..], offset + len as u64)? {
            0 => break,
            read => len += read,
        }
    }
    Ok(len)
}
