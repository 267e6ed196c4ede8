//! Logs of PostgreSQL, put together from a short program: pages of 8 KiB and checksums are out of a fuzzer's reach.

#[path = "../../protocol/wal/tests/log/writer.rs"]
mod writer;

use tidelock_wal::{Ending, Kind, Lsn, TimelineHistory, TimelineId, WalReader};
use writer::{PAGE, Parts, SEGMENT, TRANSACTIONS, Writer, end, part, prepare};

/// A program ends when its log has become so long.
const LOG_BYTES_MAX: usize = 256 << 10;

/// A log from some position on.
#[derive(Clone, Debug)]
pub struct Log {
    /// The position of the first byte.
    pub start: Lsn,
    /// The stream.
    pub bytes: Vec<u8>,
}

impl Log {
    /// A reader of the log from its start on.
    #[must_use]
    pub fn reader(&self) -> Option<WalReader> {
        WalReader::new(self.start, SEGMENT, TimelineHistory::only(TimelineId(1))).ok()
    }
}

/// Runs a program: where the log begins, in 2 bytes, and steps. A step is a byte, and the numbers that it needs; the
/// steps that change bytes are carried out at last.
#[must_use]
pub fn log(program: &[u8]) -> Log {
    let mut rest = Program(program);
    let start = 3 * u64::from(SEGMENT) - 4 * PAGE + u64::from(rest.u16() % 8192) * 8;
    let in_page = start % PAGE;
    // Records begin behind the head of a page, pages at its begin.
    let mut writer = Writer::new(if in_page < 40 { start - in_page } else { start });
    let mut changes = vec![];
    while writer.bytes.len() < LOG_BYTES_MAX
        && let Some(step) = rest.next()
    {
        let stamp = |rest: &mut Program| i64::from(rest.u16()) << (rest.u16() % 48);
        match step % 10 {
            0 => writer.other(usize::from(rest.u16() % 20_000)),
            1 => {
                let ending =
                    [Ending::Commit, Ending::Abort, Ending::CommitPrepared, Ending::AbortPrepared]
                        [usize::from(rest.u8() % 4)];
                let flags = rest.u8();
                let mut count =
                    |flag: u8| (flags & flag != 0).then(|| u32::from(rest.u16() % 3000));
                let parts = Parts {
                    place: flags & 1 != 0,
                    subtransactions: count(2),
                    files: count(4),
                    statistics: count(8),
                    messages: count(16),
                    prepared: (flags & 32 != 0).then_some(7),
                    gid: (flags & 64 != 0).then(|| vec![b'g'; 3]),
                    origin: flags & 128 != 0,
                };
                let (info, content) = end(ending, stamp(&mut rest), &parts);
                writer.content(TRANSACTIONS, info, 1, &content, Kind::Other);
            }
            2 => {
                let gid = vec![b'g'; usize::from(rest.u8())];
                let content = prepare(stamp(&mut rest), 2, &gid, usize::from(rest.u8()));
                writer.content(TRANSACTIONS, 0x10, 2, &content, Kind::Other);
            }
            3 => {
                let (manager, info) = (rest.u8() % 3, rest.u8());
                let data = rest.bytes();
                writer.record(manager, info, 3, data, Kind::Other);
            }
            4 => {
                let (manager, info) = (rest.u8() % 2, rest.u8());
                let data = part(rest.bytes());
                writer.record(manager, info, 4, &data, Kind::Other);
            }
            5 => writer.switch(),
            6 => writer.given_up(u64::from(rest.u8() % 4) + 1),
            7 => {
                let left = u64::from(rest.u8() % 8) * 8;
                let at = (writer.at() % PAGE).max(24);
                writer.other((PAGE - at).saturating_sub(24 + left) as usize);
            }
            8 => writer.branch(u32::from(rest.u8() % 3)),
            _ => changes.push((rest.u16(), rest.u16(), rest.u8())),
        }
    }
    for (upper, lower, change) in changes {
        // Bytes anywhere, or near the begin of a page.
        let at = match upper % 2 {
            0 => usize::from(upper) * 32 + usize::from(lower),
            _ => usize::from(upper / 2) * PAGE as usize + usize::from(lower % 64),
        };
        if let Some(byte) = writer.bytes.get_mut(at) {
            *byte ^= change;
        }
    }
    Log { start: writer.start, bytes: writer.bytes }
}

/// The rest of a program. At its end everything is 0.
struct Program<'a>(&'a [u8]);

impl<'a> Program<'a> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> u8 {
        self.next().unwrap_or(0)
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    /// A length in one byte, and so many bytes.
    fn bytes(&mut self) -> &'a [u8] {
        let len = usize::from(self.u8()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes
    }
}
