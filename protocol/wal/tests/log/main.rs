//! Logs that PostgreSQL could have written, and logs that it could not.

mod contents;
mod faults;
mod random;
mod structure;
mod writer;

use tidelock_wal::{Lsn, TimelineHistory, TimelineId, WalError, WalItem, WalReader};
use writer::Writer;

/// A page near the end of a segment.
const START: u64 = 3 * writer::SEGMENT as u64 - 4 * writer::PAGE;

fn first() -> TimelineHistory {
    TimelineHistory::only(TimelineId(1))
}

fn reader(writer: &Writer, start: Lsn) -> WalReader {
    WalReader::new(start, writer.segment, first()).unwrap().of_system(writer::SYSTEM)
}

/// Returns the items of bytes that arrive in pieces of these lengths, over and over, and the error at the end.
fn read(mut reader: WalReader, bytes: &[u8], pieces: &[usize]) -> (Vec<WalItem>, Option<WalError>) {
    let mut items = vec![];
    let mut pieces = pieces.iter().cycle();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, later) = rest.split_at((*pieces.next().unwrap()).clamp(1, rest.len()));
        rest = later;
        reader.push(piece);
        for item in &mut reader {
            match item {
                Ok(item) => items.push(item),
                Err(error) => {
                    assert_eq!(reader.failed(), Some(error));
                    return (items, Some(error));
                }
            }
        }
        assert!(items.last().is_none_or(|last| last.end <= reader.position()));
    }
    (items, None)
}

/// Checks that every item of a log is found, whatever the pieces.
fn check(writer: &Writer) {
    for pieces in [&[usize::MAX][..], &[1], &[8192], &[7, 4093, 16]] {
        let (items, end) = read(reader(writer, writer.start), &writer.bytes, pieces);
        assert_eq!(end, None);
        assert_eq!(items, writer.items);
    }
}
