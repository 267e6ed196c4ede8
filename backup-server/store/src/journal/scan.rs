//! Reads the batches of one segment one after the other and verifies each.

use super::format::{BATCH_HEADER_BYTES, BatchHeader, Damage, Entries, Entry};
use bytes::{Bytes, BytesMut};
use std::io;
use tidelock_protocol::record::{Body, Head, RawBody, crc32c};
use tidelock_storage::StorageFile;

/// One verified batch.
#[derive(Debug)]
pub(super) struct Scanned {
    pub(super) offset: u64,
    pub(super) header: BatchHeader,
    pub(super) link: u32,
    pub(super) body: Bytes,
    /// Everything but the payloads of some of its records is what was written.
    pub(super) is_damaged: bool,
}

#[derive(Debug)]
pub(super) enum ScanError {
    /// At the scan's offset.
    Damage(Damage),
    Io(io::Error),
}

impl From<io::Error> for ScanError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // The file is shorter than it was or must be.
            io::ErrorKind::UnexpectedEof => ScanError::Damage(Damage::Short("batch")),
            io::ErrorKind::InvalidData => ScanError::Damage(Damage::Compressed),
            _ => ScanError::Io(error),
        }
    }
}

/// A scan over one segment.
#[derive(Debug)]
pub(super) struct Scan<F> {
    file: F,
    id: u64,
    /// Where the next batch begins.
    pub(super) at: u64,
    end: u64,
}

impl<F: StorageFile> Scan<F> {
    pub(super) fn new(file: F, id: u64, at: u64, end: u64) -> Self {
        Self { file, id, at, end }
    }

    /// The next batch; `None` at the end. After an error the scan stands before what is wrong.
    pub(super) fn next(&mut self) -> Result<Option<Scanned>, ScanError> {
        self.step(|header, body| header.check_body(body).map(|()| false))
    }

    /// The same of what is known to have been durable: a batch of which only payloads are damaged
    /// still says what its records were.
    pub(super) fn next_durable(&mut self) -> Result<Option<Scanned>, ScanError> {
        self.step(|header, body| match header.check_body(body) {
            Err(_) if only_payloads_differ(header, body) => Ok(true),
            checked => checked.map(|()| false),
        })
    }

    fn step(
        &mut self,
        check: impl FnOnce(&BatchHeader, &Bytes) -> Result<bool, Damage>,
    ) -> Result<Option<Scanned>, ScanError> {
        let left = self.end.saturating_sub(self.at);
        if left == 0 {
            return Ok(None);
        }
        let mut front = [0; BATCH_HEADER_BYTES];
        if left < front.len() as u64 {
            return Err(ScanError::Damage(Damage::Short("batch header")));
        }
        self.file.read_at(&mut front, self.at)?;
        let (header, link) = BatchHeader::decode(&front).map_err(ScanError::Damage)?;
        if header.segment != self.id {
            return Err(ScanError::Damage(Damage::Chain("a batch of another segment")));
        }
        let len = (front.len() + header.body_len as usize) as u64;
        if left < len {
            return Err(ScanError::Damage(Damage::Short("batch")));
        }
        let mut body = BytesMut::zeroed(header.body_len as usize);
        self.file.read_at(&mut body, self.at + front.len() as u64)?;
        let body = body.freeze();
        let is_damaged = check(&header, &body).map_err(ScanError::Damage)?;
        let offset = self.at;
        self.at += len;
        Ok(Some(Scanned { offset, header, link, body, is_damaged }))
    }
}

/// Whether payloads are all that is wrong with a body: each entry's header has a checksum of its
/// own, and so has each payload.
fn only_payloads_differ(header: &BatchHeader, body: &Bytes) -> bool {
    let mut differ = false;
    for entry in Entries::new(header, body.clone()) {
        match entry {
            Ok(Entry::<RawBody>::Record { head, payload, .. }) => {
                differ |= !is_whole(&head, &payload)
            }
            Ok(Entry::Note(_)) => {}
            Err(_) => return false,
        }
    }
    differ
}

/// Whether a payload is what its record's header says.
pub(crate) fn is_whole(head: &Head<impl Body>, payload: &[u8]) -> bool {
    head.peek().payload().is_none_or(|of| of.crc() == crc32c(payload))
}

/// Looks in `from..to` for the header of a batch of this segment that `wanted` accepts.
pub(super) fn find_header<F: StorageFile>(
    file: &F,
    id: u64,
    from: u64,
    to: u64,
    wanted: impl Fn(u64, &BatchHeader) -> bool,
) -> io::Result<Option<u64>> {
    const WINDOW_BYTES: usize = 1 << 20;
    let mut buf = vec![0; WINDOW_BYTES + BATCH_HEADER_BYTES];
    let mut at = from;
    while at < to {
        let len = (to - at).min(buf.len() as u64) as usize;
        file.read_at(&mut buf[..len], at)?;
        // The random id stands at byte 8 of the header: search for it, then judge the header.
        for start in 0..len.saturating_sub(BATCH_HEADER_BYTES - 1).min(WINDOW_BYTES) {
            if buf[start + 8..start + 16] != id.to_le_bytes() {
                continue;
            }
            let offset = at + start as u64;
            if let Ok((header, _)) = BatchHeader::decode(&buf[start..len])
                && header.segment == id
                && wanted(offset, &header)
            {
                return Ok(Some(offset));
            }
        }
        at += WINDOW_BYTES as u64;
    }
    Ok(None)
}
