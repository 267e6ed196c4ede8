//! PostgreSQL's log: whatever a server or a file says, reading it never panics, items follow each other and end where
//! bytes have been, pieces make no difference, and an error is final.
//!
//! Input: mode (even: a program, odd: the stream itself), two bytes for the pieces, the rest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidelock_fuzz::wal::{Log, log};
use tidelock_wal::{Lsn, WalError, WalItem};

fuzz_target!(|data: &[u8]| {
    let [mode, first, second, rest @ ..] = data else { return };
    let log = match mode % 2 {
        0 => log(rest),
        _ => Log { start: Lsn(u64::from(mode / 2) << 16), bytes: rest.to_vec() },
    };
    let whole = read(&log, &[usize::MAX]);
    // Long logs in pieces of a byte or so would take all the time.
    let [short, long, longest] = tidelock_fuzz::pieces(*first, *second);
    let pieces =
        if log.bytes.len() > 100_000 { [long, longest, 65_536] } else { [short, long, longest] };
    assert_eq!(whole, read(&log, &pieces));
});

/// Returns the items that are found, and the error at the end.
fn read(log: &Log, pieces: &[usize]) -> (Vec<WalItem>, Option<WalError>) {
    let Some(mut reader) = log.reader() else { return (vec![], None) };
    let mut items: Vec<WalItem> = vec![];
    let mut pieces = pieces.iter().cycle();
    let mut rest = &log.bytes[..];
    while !rest.is_empty() {
        let len = pieces.next().map_or(1, |&len| len.clamp(1, rest.len()));
        let (piece, later) = rest.split_at(len);
        rest = later;
        reader.push(piece);
        while let Some(item) = reader.next() {
            match item {
                Ok(item) => {
                    let last_end = items.last().map_or(log.start, |last| last.end);
                    assert!(
                        last_end <= item.begin && item.begin.0 <= last_end.0 + 40,
                        "{items:?} {item:?}"
                    );
                    assert!(item.begin < item.end && item.end <= reader.position());
                    assert!(item.end.0.is_multiple_of(8));
                    items.push(item);
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty() && !error.fault.kind().is_empty());
                    reader.push(&log.bytes);
                    assert_eq!((reader.next(), reader.next()), (Some(Err(error)), None));
                    return (items, Some(error));
                }
            }
        }
    }
    (items, None)
}
