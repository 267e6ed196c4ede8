//! PostgreSQL's write-ahead log, read from a stream of bytes: where records end, and which of them end a transaction.
//!
//! The agent of a shard log at the primary reads the shard's log and sends it in order, with stamps (Slogger 5.2); here
//! it is the log of an unmodified PostgreSQL. Nothing of a record needs to be understood for that but its boundary and,
//! of a transaction's end, the time that PostgreSQL wrote into it. The stream is what a walsender sends, or the content
//! of segment files, in pieces of any length.
//!
//! Invariant: an item is handed out only if everything up to its end has been verified: addresses and timelines of
//! pages, links and checksums of records. The rest of a record within which the stream began has no checksum that
//! could be verified, and is marked ([`Kind::Rest`]). After the first fault the reader stays failed.
//!
//! ```
//! use tidelock_wal::{Lsn, TimelineHistory, TimelineId, WalReader};
//!
//! let history = TimelineHistory::only(TimelineId(1));
//! let mut reader = WalReader::new(Lsn(0x100_0000), 16 << 20, history)?;
//! reader.push(&[]);
//! for item in &mut reader {
//!     let item = item?;
//!     println!("up to {}: {:?}", item.end, item.stamp());
//! }
//! # Ok::<(), tidelock_wal::WalError>(())
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | `lsn` | positions in the log |
//! | `timeline` | timelines, and the file that says where they branched |
//! | `stamp` | PostgreSQL's time, and the Unix epoch's |
//! | `page` | heads of pages |
//! | `record` | heads of records |
//! | `content` | the data of the records that are understood |
//! | `item` | records, as the reader hands them out |
//! | `reader` | the reader |
//! | `error` | faults of a log |
//!
//! # Layout
//!
//! Facts of PostgreSQL 15, 16 and 17, from its headers `access/xlog_internal.h`, `access/xlogrecord.h`,
//! `access/xact.h` and `catalog/pg_control.h`. Integers are in the byte order of the server; a big-endian server is
//! not supported. The three versions differ, in what is described here, in the magic of their pages alone.
//!
//! The log is one sequence of bytes; an LSN is a position in it. Segment files hold it in parts of a size that is a
//! power of two from 1 MiB to 1 GiB. Each page of 8192 bytes begins with a head, and the head of a segment's first page
//! is longer:
//!
//! | at | bytes | head of a page |
//! |---|---|---|
//! | 0 | 2 | magic: D110 of 15, D113 of 16, D116 of 17 |
//! | 2 | 2 | flags |
//! | 4 | 4 | timeline |
//! | 8 | 8 | address of the page |
//! | 16 | 4 | bytes that are left of the record that began earlier, on this page and further ones |
//! | 20 | 4 | zeroes |
//! | 24 | 8 | long head: system identifier |
//! | 32 | 4 | long head: bytes of a segment |
//! | 36 | 4 | long head: bytes of a page |
//!
//! Flags: 1, the page begins with the rest of a record; 2, the head is a long one; 4, which does not matter here; 8,
//! the rest of a record was given up, and another record stands in its place.
//!
//! A record begins at a multiple of 8. It goes on behind the heads of the pages that it reaches into:
//!
//! | at | bytes | record |
//! |---|---|---|
//! | 0 | 4 | length, with this head |
//! | 4 | 4 | transaction |
//! | 8 | 8 | where the record before begins |
//! | 16 | 1 | info: the upper four bits belong to the resource manager |
//! | 17 | 1 | resource manager: 0 the log itself, 1 transactions, 21 messages |
//! | 18 | 2 | zeroes |
//! | 20 | 4 | CRC-32C of the data and then of the first 20 bytes of this head |
//! | 24 | | data |
//!
//! The data of the records that are understood here is a few short parts, each of which begins with a number: 253 an
//! origin (2 bytes), 252 a top-level transaction (4 bytes), and at last 255 (length in 1 byte) or 254 (length in 4
//! bytes) the content, which reaches to the record's end.
//!
//! The rest of the segment behind a switch (manager 0, info 40) is zeroes, without heads of pages.
//!
//! If a crash leaves a record without its end, later log begins on the first page that is missing. That page has
//! flag 8, and its first record (manager 0, info D0) begins with the position of the record that was given up. The
//! record before that one is whom it is linked to.
//!
//! | info & 70 | content of a record of manager 1 |
//! |---|---|
//! | 00, 30 | commit, commit of a prepared transaction |
//! | 20, 40 | abort, abort of a prepared transaction: the same, without messages |
//! | 10 | prepare |
//!
//! A commit or an abort: stamp (8 bytes); if info has bit 80, flags (4 bytes). Then, each if its flag is there:
//!
//! | flag | part |
//! |---|---|
//! | 1 | database and table space, 8 bytes |
//! | 2 | count (4 bytes), subtransactions of 4 bytes |
//! | 4 | count, files of 12 bytes |
//! | 100 | count, dropped statistics of 12 bytes |
//! | 8 | count, cache invalidation messages of 16 bytes |
//! | 10 | prepared transaction, 4 bytes |
//! | 80 | its global identifier, and a zero byte |
//! | 20 | position and stamp at the origin, 16 bytes |
//!
//! A prepare: magic 57F94534 (4 bytes), length (4), transaction (4), database (4), stamp (8), owner (4), six counts
//! (24), a flag (1), unused (1), length of the global identifier with its zero byte (2), position and stamp at the
//! origin (16), the identifier with its zero byte.
//!
//! The end of a recovery (manager 0, info 90): stamp (8), timeline (4), timeline before (4). A checkpoint at a shutdown
//! (manager 0, info 00): position (8), timeline (4), timeline before (4), and more.
//!
//! A message (manager 21, info 00): database (4 bytes), 1 if it belongs to its transaction (1), unused (3), length of the
//! prefix with its zero byte (8), length of the message (8), both.
//!
//! Stamps count microseconds since 2000-01-01 00:00 UTC.

#![forbid(unsafe_code)]

mod content;
mod error;
mod item;
mod lsn;
mod page;
mod reader;
mod record;
mod stamp;
mod timeline;

pub use error::{Fault, WalError};
pub use item::{Ending, Gid, Kind, TimelineChange, Transaction, TwoPhase, WalItem, Xid};
pub use lsn::{Lsn, LsnError};
pub use page::{PAGE_BYTES, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Version};
pub use reader::WalReader;
pub use record::RECORD_BYTES_MAX;
pub use stamp::PgTimestamp;
pub use timeline::{HistoryError, TimelineHistory, TimelineId};
