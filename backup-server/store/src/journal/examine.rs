//! What of a segment is still what was written.
//!
//! Two things stand for a segment's records: the headers in its batches and its index, each with
//! checksums of its own. If only payloads are damaged the headers say everything. If a header is
//! damaged what comes after it in its batch cannot be found by reading; the index still says of each
//! record what it changes and where its payload stands.

use super::index::{Builder, SegmentIndex};
use super::open::found_of;
use super::scan::is_whole;
use super::{Entry, IndexEntry, JournalError, Position, Reader, Segment};
use crate::damage::{DamagedExtent, Known, SegmentDamage};
use std::sync::Arc;
use tidelock_protocol::record::{Body, RawBody, crc32c};
use tidelock_storage::StorageFile;

/// What is known of a segment's records without its headers.
#[derive(Clone, Debug)]
pub(super) enum Listed<F> {
    /// From when it was written or read.
    Memory(Arc<Builder>),
    /// Its index.
    Index(F),
    /// Nothing.
    None,
}

impl<F: StorageFile> Listed<F> {
    /// Each of the segment's records that changes a disk, of each writer in the order of the
    /// journal. `None`: it is not known.
    pub(super) fn entries(&self, of: &Segment<F>) -> Option<Vec<IndexEntry>> {
        let mut entries = match self {
            Listed::Memory(builder) => builder.entries().to_vec(),
            Listed::Index(file) => {
                let index = SegmentIndex::open(file.clone()).ok()?;
                let facts = index.footer().of;
                if (facts.id, facts.len_bytes) != (of.id, of.len_bytes) {
                    return None;
                }
                index.entries(..).collect::<Result<Vec<_>, _>>().ok()?
            }
            Listed::None => return None,
        };
        entries.sort_unstable_by_key(|entry| (entry.writer, entry.epoch, entry.seq));
        Some(entries)
    }
}

/// Reads a payload and verifies it. `None`: it is not what was written, or cannot be read.
pub fn payload_of<F: StorageFile>(of: &Segment<F>, entry: &IndexEntry) -> Option<Vec<u8>> {
    read_payload(of, entry.at, entry.len_bytes, entry.crc)
}

/// The same by its place in the segment's file, its bytes and its checksum.
pub fn read_payload<F: StorageFile>(
    of: &Segment<F>,
    at: u64,
    len_bytes: u32,
    crc: u32,
) -> Option<Vec<u8>> {
    let mut payload = vec![0; len_bytes as usize];
    of.file.read_at(&mut payload, at).ok()?;
    (crc32c(&payload) == crc).then_some(payload)
}

/// Reads all of a segment. `None`: it is what was written.
pub(super) fn examine<F: StorageFile>(
    segment: &Segment<F>,
    listed: &Listed<F>,
) -> Option<SegmentDamage> {
    let from = Position { segment: segment.index, offset: 0 };
    let to = Position { segment: segment.index, offset: segment.len_bytes };
    let mut first: Option<(u64, String)> = None;
    let mut extents = Vec::new();
    let mut in_order = true;
    // What the disk has is what is asked.
    segment.file.forget_cached();
    if let Err(error) = found_of(segment.clone()) {
        // Damage of the header alone costs nothing: opening knows it from the segment before it.
        first = Some(match error {
            JournalError::Corrupt { offset, damage, .. } => (offset, damage.to_string()),
            error => (0, error.to_string()),
        });
    }
    let mut reader = Reader::<_, RawBody>::new(vec![segment.clone()], from, to);
    while let Some(batch) = reader.next() {
        let batch = match batch {
            Ok(batch) => batch,
            Err(error) => {
                let (at, reason) = match error {
                    JournalError::Corrupt { offset, damage, .. } => (offset, damage.to_string()),
                    error => (reader.position().offset, error.to_string()),
                };
                first.get_or_insert((at, reason));
                in_order = false;
                break;
            }
        };
        for entry in batch.entries {
            match entry {
                Ok(Entry::Record { head, payload, payload_at }) if !is_whole(&head, &payload) => {
                    let at = batch.body_at + payload_at as u64;
                    let record = head.peek();
                    let fields = record.body.fields();
                    first.get_or_insert_with(|| (at, format!("the data of record {}", record.seq)));
                    extents.push(DamagedExtent {
                        writer: record.writer,
                        disk: tidelock_protocol::ids::DiskId(fields.object),
                        offset: fields.offset,
                        len_bytes: fields.len_bytes,
                        epoch: record.epoch,
                        seq: record.seq,
                        at,
                        crc: record.payload().map_or(0, |payload| payload.crc()),
                    });
                }
                Ok(_) => {}
                Err(damage) => {
                    first.get_or_insert((batch.start.offset, damage.to_string()));
                    in_order = false;
                }
            }
        }
    }
    let (at, reason) = first?;
    let known = match (in_order, listed.entries(segment)) {
        (true, _) => Known::Records,
        (false, Some(entries)) => {
            extents = damaged(segment, &entries);
            Known::Extents
        }
        (false, None) => Known::Nothing,
    };
    let Segment { index, id, len_bytes, .. } = *segment;
    Some(SegmentDamage { segment: index, id, len_bytes, at, reason, known, extents })
}

fn damaged<F: StorageFile>(segment: &Segment<F>, entries: &[IndexEntry]) -> Vec<DamagedExtent> {
    let written = entries.iter().filter(|entry| entry.at != 0);
    let damaged = written.filter(|entry| payload_of(segment, entry).is_none());
    let extent = |entry: &IndexEntry| {
        let IndexEntry { writer, disk, offset, epoch, seq, len_bytes, at, crc } = *entry;
        DamagedExtent { writer, disk, offset, len_bytes, epoch, seq, at, crc }
    };
    damaged.map(extent).collect()
}
