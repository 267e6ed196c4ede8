//! Reads the journal again, batch by batch: for the fold, for views, for replay.

use super::format::{Damage, Entries, SEGMENT_HEADER_BYTES};
use super::scan::{Scan, ScanError};
use super::{JournalError, Position, Segment};
use std::marker::PhantomData;
use tidelock_protocol::record::{Body, DiskChange};
use tidelock_storage::StorageFile;

/// One batch as it is read.
#[derive(Debug)]
pub struct JournalBatch<F, B = DiskChange> {
    /// Where it begins.
    pub start: Position,
    /// Where the next one begins.
    pub end: Position,
    /// Where its body begins, in bytes from the beginning of the segment.
    pub body_at: u64,
    /// When it arrived, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
    /// Its segment.
    pub segment: Segment<F>,
    /// Its entries.
    pub entries: Entries<B>,
    /// Payloads of some of its records are not what was written; all else is.
    pub is_damaged: bool,
}

/// Reads from one position to another what was durable. It keeps the files open, so segments may be
/// removed meanwhile.
#[derive(Debug)]
pub struct Reader<F, B = DiskChange> {
    segments: Vec<Segment<F>>,
    at: Position,
    to: Position,
    failed: bool,
    of: PhantomData<B>,
}

impl<F: StorageFile, B: Body> Reader<F, B> {
    pub(crate) fn new(mut segments: Vec<Segment<F>>, from: Position, to: Position) -> Self {
        segments.retain(|s| s.index >= from.segment && s.index <= to.segment);
        // Only one is needed at a time, the next one on top.
        segments.reverse();
        let mut reader = Self { segments, at: from, to, failed: false, of: PhantomData };
        reader.step_over_ends();
        reader
    }

    /// How far it has read.
    #[must_use]
    pub fn position(&self) -> Position {
        self.at
    }

    fn step_over_ends(&mut self) {
        self.at.offset = self.at.offset.max(SEGMENT_HEADER_BYTES as u64);
        while let Some(segment) = self.segments.last() {
            if segment.index > self.at.segment {
                // From the beginning of the journal, or from the end of a segment.
                self.at = Position { segment: segment.index, offset: SEGMENT_HEADER_BYTES as u64 };
            }
            let inside = segment.index == self.at.segment && self.at.offset < segment.len_bytes;
            if inside || self.at >= self.to {
                return;
            }
            if self.segments.len() == 1 {
                return;
            }
            self.segments.pop();
        }
    }

    fn read(&mut self) -> Result<Option<JournalBatch<F, B>>, JournalError> {
        if self.at >= self.to {
            return Ok(None);
        }
        let Some(segment) = self.segments.last().filter(|s| s.index == self.at.segment) else {
            return Err(JournalError::Missing { index: self.at.segment });
        };
        let segment = segment.clone();
        let end = if segment.index == self.to.segment { self.to.offset } else { segment.len_bytes };
        let mut scan = Scan::new(segment.file.clone(), segment.id, self.at.offset, end);
        let scanned = match scan.next_durable() {
            Ok(Some(scanned)) => scanned,
            Ok(None) => return Err(corrupt(&segment, scan.at, Damage::Short("segment"))),
            Err(ScanError::Damage(damage)) => return Err(corrupt(&segment, scan.at, damage)),
            Err(ScanError::Io(source)) => {
                return Err(JournalError::Io { what: "read the journal", source });
            }
        };
        let start = self.at;
        self.at.offset = scan.at;
        let end = self.at;
        self.step_over_ends();
        Ok(Some(JournalBatch {
            start,
            end,
            body_at: scan.at - scanned.body.len() as u64,
            arrived_ms: scanned.header.arrived_ms,
            segment,
            is_damaged: scanned.is_damaged,
            entries: Entries::new(&scanned.header, scanned.body),
        }))
    }
}

pub(super) fn corrupt<F: StorageFile>(
    segment: &Segment<F>,
    offset: u64,
    damage: Damage,
) -> JournalError {
    JournalError::Corrupt { file: segment.file_name(), offset, damage }
}

impl<F: StorageFile, B: Body> Iterator for Reader<F, B> {
    type Item = Result<JournalBatch<F, B>, JournalError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let item = self.read().transpose();
        self.failed = matches!(item, Some(Err(_)));
        item
    }
}
