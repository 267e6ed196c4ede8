//! A window-log for another store: its changes of the recent past by the hybrid logical clock, durable, from which its
//! state at any time of the window is had (Retroscope, table I).
//!
//! A store that is not a disk of a protected VM keeps its own past here: a key-value store its items, a shard its
//! rows. The journal beneath is the one that groups have, with all that it promises of crashes and damage.
//!
//! | Retroscope | here |
//! |---|---|
//! | `timeTick()` | [`Clock::tick`] |
//! | `timeTick(HLCTime)` | [`Clock::tick_on_receive`] |
//! | `wrapHLC(message)` | [`Clock::wrap`] |
//! | `unwrapHLC(message)` | [`Clock::unwrap`] |
//! | `appendToLog(logName, K, oldV, newV)` | [`WindowLog::append`], of the log that was opened by its name |
//! | `computeDiff(logName, timeInPast)` | [`WindowLog::diff_from_now`] |
//! | `computeDiff(logName, startTime, endTime)` | [`WindowLog::diff`] |
//!
//! The state at a time has every change up to and with it. A diff is what leads from one state to another one,
//! forwards or backwards in time alike, with one value for each key: what is overwritten within the span is
//! *shadowed* and not in it (Retroscope IV, figure 6). Applied to a copy of the state it makes a snapshot of
//! another time: a full one from the state of now, an incremental one as the diff by itself, a rolling one in place.
//!
//! ```
//! use std::collections::BTreeMap;
//! use tidelock_storage::files::Files;
//! use tidelock_store::window_log::{Clock, Options, WindowLog};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let mut log = WindowLog::open(Files::new(directory.path().into()), "orders", Options::default())?;
//! let mut clock = Clock::after(log.newest());
//! let wall_ms = 1_795_352_700_000; // what the wall clock says
//!
//! // Another node has sent a message; what is done for it is later than what it knew.
//! let message = Clock::default().wrap(wall_ms + 5, b"put apple 3");
//! let (at, body) = clock.unwrap(wall_ms, &message)?;
//! assert_eq!(body, b"put apple 3");
//! log.append(at, b"apple", None, Some(b"3"))?;
//! let later = clock.tick(wall_ms);
//! log.append(later, b"apple", Some(b"3"), None)?;
//! log.sync()?;
//!
//! // The store has nothing now. Back to where it had three apples:
//! let mut state = BTreeMap::new();
//! log.diff_from_now(at)?.apply(&mut state);
//! assert_eq!(state[b"apple".as_slice()], b"3");
//! # Ok(())
//! # }
//! ```
//!
//! Invariants: what [`WindowLog::sync`] has covered is found again after any crash, and nothing that does not
//! continue it; times of a log never go back; a time within the window has an answer, one before it an error that names the
//! oldest that has.

mod clock;
mod diff;
mod entry;
#[cfg(test)]
mod tests;

pub use clock::{Clock, MESSAGE_OVERHEAD_BYTES, UnwrapError};
pub use diff::{Diff, Value};
use entry::Item;

pub use entry::{ITEM_MAX_BYTES, KEY_MAX_BYTES};

use crate::journal::{
    self, BATCH_TARGET_BYTES, Entry, Journal, JournalError, Position, SegmentHeader, State,
    StateError,
};
use std::io;
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::record::{Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;

/// The file that says that a log was made, beside its journal.
const MARK: &str = "window-log.json";
const MARK_TEXT: &[u8] = b"{\"format\": 1}\n";
const WRITER: WriterId = WriterId(0);

/// How a log is kept.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// So much of the past stays, by the log's own newest time, in milliseconds.
    pub window_ms: u64,
    /// Bytes of all segments. Beyond it the window becomes shorter.
    pub size_max_bytes: u64,
    /// A segment that has reached this is followed by the next one. What leaves the window leaves it by segments.
    pub segment_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { window_ms: 3_600_000, size_max_bytes: 1 << 30, segment_bytes: 16 << 20 }
    }
}

/// What can go wrong.
#[derive(Debug, Error)]
pub enum WindowLogError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The file that says what this is.
    #[error("cannot {what} {MARK}: {source}")]
    Mark {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A newer program made it, or it is something else.
    #[error("{MARK} is not of this program's format 1: use a newer program, or another directory")]
    Format,
    /// Not a name.
    #[error("{0:?} cannot be a log's name: letters, digits, `.`, `_` and `-`")]
    Name(String),
    /// Its time is before one that is in the log.
    #[error(
        "a change at {at} cannot follow one at {newest}: take times of one clock, in their order"
    )]
    WentBack {
        /// Of the change.
        at: Hlc,
        /// Of the newest one in the log.
        newest: Hlc,
    },
    /// It is too large.
    #[error(
        "a key has {KEY_MAX_BYTES} bytes at most, and key, old and new value {ITEM_MAX_BYTES}; this has {key} \
         and {all}"
    )]
    TooLarge {
        /// Bytes of the key.
        key: usize,
        /// Bytes of all.
        all: usize,
    },
    /// The window has left it behind.
    #[error("{at} is before the window: the oldest time that can be asked for is {oldest}")]
    BeforeWindow {
        /// What was asked for.
        at: Hlc,
        /// The oldest.
        oldest: Hlc,
    },
    /// The journal has what no log writes.
    #[error("entry {0} of the log is not a change: another program has written here")]
    Strange(u64),
}

/// The log of one store.
#[derive(Debug)]
pub struct WindowLog<S: Storage> {
    journal: Journal<S>,
    options: Options,
}

impl<S: Storage> WindowLog<S> {
    /// Opens the log of this name, a directory of the storage, or makes it.
    pub fn open(storage: S, name: &str, options: Options) -> Result<Self, WindowLogError> {
        if !tidelock_protocol::bounds::is_name(name) {
            return Err(WindowLogError::Name(name.to_owned()));
        }
        let mark = |what| move |source| WindowLogError::Mark { what, source };
        let kept = journal::Options { segment_bytes: options.segment_bytes };
        storage.create_dir(name).map_err(mark("make the directory of"))?;
        let made = tidelock_storage::read_all(&storage, &tidelock_storage::join(name, MARK))
            .map_err(mark("read"))?;
        let journal = match made {
            Some(text) if text == MARK_TEXT => {
                Journal::open(storage, name, Position::default(), kept)?.journal
            }
            Some(_) => return Err(WindowLogError::Format),
            None => {
                // What a crash has left of making it: nothing in it was ever there.
                for left in storage.list(name).map_err(mark("list the directory of"))? {
                    storage
                        .remove(&tidelock_storage::join(name, &left))
                        .map_err(mark("clear the way for"))?;
                }
                let journal = Journal::create(storage.clone(), name, State::new(1), kept)?;
                tidelock_storage::replace(&storage, name, MARK, MARK_TEXT)
                    .map_err(mark("write"))?;
                storage.sync_dir("").map_err(mark("make durable"))?;
                journal
            }
        };
        Ok(Self { journal, options })
    }

    /// The time of the newest change; 0: there was none. A clock begins after it.
    #[must_use]
    pub fn newest(&self) -> Hlc {
        self.journal.state().last_hlc
    }

    /// The oldest time that can be asked for.
    #[must_use]
    pub fn oldest(&self) -> Hlc {
        self.journal.starts().next().map_or(Hlc(0), |(_, start)| start.last_hlc)
    }

    /// Bytes of it on disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.journal.bytes()
    }

    /// A change of an item from one value to another; `None`: it is not there. Changes of the same time are one
    /// step. It is durable after the next [`sync`](Self::sync).
    ///
    /// # Errors
    /// After one of [`WindowLogError::Journal`] other than that there is no room, open the log again.
    pub fn append(
        &mut self,
        at: Hlc,
        key: &[u8],
        old: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<(), WindowLogError> {
        let newest = self.newest();
        if at < newest {
            return Err(WindowLogError::WentBack { at, newest });
        }
        let payload = entry::encode(key, old, new)
            .map_err(|(key, all)| WindowLogError::TooLarge { key, all })?;
        if self.journal.staged_bytes() >= BATCH_TARGET_BYTES {
            self.journal.write(|_| {})?;
        }
        let state = self.journal.state();
        let record = Record {
            writer: WRITER,
            seq: state.writers[WRITER.index()].seq.next(),
            epoch: state.epoch,
            hlc: at,
            deps: CountVector::new(),
            body: Item(Payload::new(payload)),
        };
        self.journal.stage_record(record).map_err(|error: StateError| {
            unreachable!("it continues the state that it was made from: {error}")
        })
    }

    /// Makes everything appended durable, and lets go what has left the window.
    pub fn sync(&mut self) -> Result<(), WindowLogError> {
        self.journal.write(|_| {})?;
        self.journal.sync()?;
        self.trim()
    }

    /// What leads from the state of now, with all that was appended, to that at `to`.
    pub fn diff_from_now(&mut self, to: Hlc) -> Result<Diff, WindowLogError> {
        self.diff(self.newest(), to)
    }

    /// What leads from the state at `from` to that at `to`, which may be before or after. Takes time for the changes
    /// between the two and for one segment more, and memory for the keys that changed.
    pub fn diff(&mut self, from: Hlc, to: Hlc) -> Result<Diff, WindowLogError> {
        let (low, high, oldest) = (from.min(to), from.max(to), self.oldest());
        if low < oldest {
            return Err(WindowLogError::BeforeWindow { at: low, oldest });
        }
        self.journal.write(|_| {})?;
        let mut span = diff::Span::default();
        for batch in self.journal.reader::<Item>(self.first_after(low), self.journal.end()) {
            let batch = batch?;
            for found in batch.entries {
                let found = found.map_err(|damage| {
                    let file = SegmentHeader::file_name(batch.segment.index, batch.segment.id);
                    JournalError::Corrupt { file, offset: batch.start.offset, damage }
                })?;
                let Entry::Record { head, payload, .. } = found else { continue };
                let (at, seq) = (head.peek().hlc, head.peek().seq.0);
                if at > high {
                    return Ok(span.into_diff(from, to));
                }
                if at > low {
                    span.push(entry::decode(payload).ok_or(WindowLogError::Strange(seq))?);
                }
            }
        }
        Ok(span.into_diff(from, to))
    }

    /// The beginning of the last segment before which everything is up to `at`.
    fn first_after(&self, at: Hlc) -> Position {
        let starts = self.journal.starts().take_while(|(_, start)| start.last_hlc <= at);
        let segment = starts.last().map_or(0, |(segment, _)| segment);
        Position { segment, offset: 0 }
    }

    fn trim(&mut self) -> Result<(), WindowLogError> {
        let floor_ms = self.newest().physical_ms().saturating_sub(self.options.window_ms);
        let mut bytes = self.journal.bytes();
        let sizes: Vec<u64> = self.journal.segments().iter().map(|s| s.len_bytes).collect();
        let mut keep = 0;
        // The beginning of each next segment: whether nothing before it is needed.
        for ((segment, start), size) in self.journal.starts().skip(1).zip(sizes) {
            if start.last_hlc.physical_ms() >= floor_ms && bytes <= self.options.size_max_bytes {
                break;
            }
            (keep, bytes) = (segment, bytes - size);
        }
        if keep > 0 {
            self.journal.remove_before(Position { segment: keep, offset: 0 })?;
        }
        // Facts of sealed segments go to the files of the journal and out of memory.
        while let Some(job) = self.journal.index_job(keep, |_| None) {
            let made = job.run()?;
            self.journal.made(made);
        }
        Ok(())
    }
}
