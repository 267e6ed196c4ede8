//! Makes the checksums of frames, records and journals right, wherever the bytes allow it.
//!
//! Written from the documented layouts (`docs/protocol.md`, `docs/journal-format.md`), not with
//! the product's own structures, so that it seals contents which those would never produce.

use tidelock_protocol::record::crc32c;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn put(bytes: &mut [u8], at: usize, number: u32) {
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
}

const FRAME_MAGIC: &[u8] = b"TLK1";
const FRAME_HEADER: usize = 16;
const FRAME_RECORD: u8 = 2;

/// Seals a stream of frames: checksums, and with `lengths` also the length of each frame, so that
/// it reaches to the next one's magic. Returns how many it found.
pub fn frames(bytes: &mut [u8], lengths: bool) -> usize {
    let mut rest = bytes;
    let mut found = 0;
    while rest.len() >= FRAME_HEADER {
        if lengths {
            let body = &rest[FRAME_HEADER..];
            let next = body.windows(FRAME_MAGIC.len()).position(|window| window == FRAME_MAGIC);
            let len = next.unwrap_or(body.len()) as u32;
            put(rest, 8, len);
        }
        let Some(len) = u32_at(rest, 8) else { break };
        let end = FRAME_HEADER.saturating_add(len as usize).min(rest.len());
        let (frame, later) = rest.split_at_mut(end);
        if frame[5] == FRAME_RECORD {
            record(&mut frame[FRAME_HEADER..]);
            let crc = crc32c(&frame[..12]);
            put(frame, 12, crc);
        } else {
            let covered = [&frame[..12], &frame[FRAME_HEADER..]].concat();
            put(frame, 12, crc32c(&covered));
        }
        found += 1;
        rest = later;
    }
    found
}

const RECORD_HEADER: usize = 56;
const DEPENDENCY: usize = 16;

/// Seals the record at the front. Returns its length, if it is whole.
pub fn record(bytes: &mut [u8]) -> Option<usize> {
    let head = RECORD_HEADER + usize::from(u16_at(bytes, 6)?) * DEPENDENCY;
    let end = head + u32_at(bytes, 44)? as usize;
    if bytes.len() < head {
        return None;
    }
    if let Some(payload) = bytes.get(head..end) {
        let crc = if payload.is_empty() { 0 } else { crc32c(payload) };
        put(bytes, 48, crc);
    }
    let covered = [&bytes[..52], &bytes[RECORD_HEADER..head]].concat();
    put(bytes, 52, crc32c(&covered));
    (end <= bytes.len()).then_some(end)
}

const SEGMENT_HEADER: usize = 64;
const BATCH_HEADER: usize = 48;
const NOTE_HEADER: usize = 16;
const NOTE_KIND_MIN: u8 = 128;

/// Seals a segment of the journal: checksums, and with `chain` also the ids, numbers and links
/// that tie batches together. Returns how many batches it found.
pub fn segment(bytes: &mut [u8], chain: bool) -> usize {
    if bytes.len() < SEGMENT_HEADER {
        return 0;
    }
    let (header, mut rest) = bytes.split_at_mut(SEGMENT_HEADER);
    let crc = crc32c(&header[..60]);
    put(header, 60, crc);
    let mut link = u32_at(header, 56).unwrap_or(0);
    let mut number = u64::from_le_bytes(header[48..56].try_into().expect("8 bytes"));
    let mut found = 0;
    while let Some(len) = u32_at(rest, 4).filter(|_| rest.len() >= BATCH_HEADER) {
        let end = BATCH_HEADER.saturating_add(len as usize).min(rest.len());
        let (batch, later) = rest.split_at_mut(end);
        let (head, body) = batch.split_at_mut(BATCH_HEADER);
        entries(body);
        put(head, 40, crc32c(body));
        if chain {
            head[8..16].copy_from_slice(&header[24..32]);
            head[16..24].copy_from_slice(&number.to_le_bytes());
            put(head, 36, link);
        }
        let crc = crc32c(&head[..44]);
        put(head, 44, crc);
        link = crc;
        number = number.wrapping_add(1);
        found += 1;
        rest = later;
    }
    found
}

const INDEX_BLOCK: usize = 4096;
const INDEX_TRAILER: usize = 96;

/// Seals the index of a segment: the blocks that its trailer counts, what stands between them and
/// the trailer, and the trailer. Returns whether there was room for all of it.
pub fn index(bytes: &mut [u8]) -> bool {
    blocks_and_trailer(
        bytes,
        INDEX_TRAILER,
        |trailer| u32_at(trailer, 12).unwrap_or(0) as usize,
        76,
    )
}

const MAP_TRAILER: usize = 88;

/// Seals a map: the leaves and fences that its trailer counts, what stands between them and the
/// trailer, and the trailer. Returns whether there was room for all of it.
pub fn map(bytes: &mut [u8]) -> bool {
    let count = |trailer: &[u8], at| u32_at(trailer, at).unwrap_or(0) as usize;
    let blocks = |trailer: &[u8]| count(trailer, 16).saturating_add(count(trailer, 20));
    blocks_and_trailer(bytes, MAP_TRAILER, blocks, 80)
}

const COLD_DESCRIPTION: usize = 72;
const COLD_ENTRY: usize = 16;

/// Seals a compressed segment: its length, both descriptions, and of both tables each entry that has a
/// frame inside the file. Returns how many those are.
pub fn cold(bytes: &mut [u8]) -> usize {
    let size = bytes.len();
    let front = 8..8 + COLD_DESCRIPTION;
    if size < 2 * front.end {
        return 0;
    }
    let blocks = (u32_at(bytes, 60).unwrap_or(0) as usize).min(size / COLD_ENTRY);
    let back = size - COLD_DESCRIPTION..size;
    bytes[64..72].copy_from_slice(&(size as u64).to_le_bytes());
    let crc = crc32c(&bytes[front.start..front.end - 4]);
    put(bytes, front.end - 4, crc);
    bytes.copy_within(front.clone(), back.start);
    let id: [u8; 8] = bytes[32..40].try_into().expect("8 bytes");
    let tables = [Some(front.end), back.start.checked_sub(blocks * COLD_ENTRY)];
    let mut sealed = 0;
    for table in tables.into_iter().flatten() {
        for block in 0..blocks {
            let entry = table + block * COLD_ENTRY;
            let Some(len) = u32_at(bytes, entry + 8) else { break };
            let at: [u8; 8] = bytes[entry..entry + 8].try_into().expect("8 bytes");
            let at = usize::try_from(u64::from_le_bytes(at)).unwrap_or(usize::MAX);
            let Some(frame) = bytes.get(at..at.saturating_add(len as usize)) else { continue };
            let bound = [&id[..], &(block as u32).to_le_bytes(), frame].concat();
            let crc = crc32c(&bound);
            if entry + COLD_ENTRY <= size {
                put(bytes, entry + 12, crc);
                sealed += 1;
            }
        }
    }
    sealed
}

/// `middle_crc_at`: where the trailer has the checksum of what stands between; its own is at its end.
fn blocks_and_trailer(
    bytes: &mut [u8],
    trailer_len: usize,
    blocks: impl Fn(&[u8]) -> usize,
    middle_crc_at: usize,
) -> bool {
    let Some(trailer_at) = bytes.len().checked_sub(trailer_len) else { return false };
    let (front, trailer) = bytes.split_at_mut(trailer_at);
    let blocks_len = blocks(trailer).checked_mul(INDEX_BLOCK).filter(|len| *len <= front.len());
    if let Some(blocks_len) = blocks_len {
        let (blocks, middle) = front.split_at_mut(blocks_len);
        for block in blocks.chunks_mut(INDEX_BLOCK) {
            let crc = crc32c(&block[4..]);
            put(block, 0, crc);
        }
        put(trailer, middle_crc_at, crc32c(middle));
    }
    let own_at = trailer_len - 4;
    let crc = crc32c(&trailer[..own_at]);
    put(trailer, own_at, crc);
    blocks_len.is_some()
}

fn entries(mut body: &mut [u8]) {
    while let Some(&kind) = body.first() {
        let len = if kind >= NOTE_KIND_MIN { note(body) } else { record(body) };
        let Some(len) = len else { return };
        body = &mut body[len..];
    }
}

fn note(bytes: &mut [u8]) -> Option<usize> {
    let end = NOTE_HEADER.checked_add(u32_at(bytes, 4)? as usize)?;
    let crc = crc32c(bytes.get(NOTE_HEADER..end)?);
    put(bytes, 8, crc);
    let crc = crc32c(&bytes[..12]);
    put(bytes, 12, crc);
    Some(end)
}
