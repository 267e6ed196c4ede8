//! The log of a PostgreSQL shard, given to stock standbys at the backup site (Slogger 5.3, 5.4): from the store's
//! journal, up to apply-to, and not a byte more.
//!
//! ```text
//!  thread of the store                        one thread for each standby
//!  StoreLog ── tend ──▶ Standbys ── news ──▶ Standby { Sender, Source } ◀── Unix socket ──▶ walreceiver
//!                          ▲                         │
//!                          └───────── asks ──────────┘  (a reader of the journal from some place on)
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | `source` | bytes of a shard's log at a position, out of the journal |
//! | `standby` | [`Standby`]: one connection, without I/O but for reads of the journal's files |
//! | `hub` | [`Standbys`]: news between the store's thread and the standbys' threads |
//! | `serve` | sockets and threads |
//! | `failure` | reasons for which a standby gets nothing more, each with a name |
//!
//! The thread of the store never reads for a standby: it hands out readers, which own their files, and numbers. A
//! standby that is behind reads files on its own thread, and keeps one batch of the journal in memory, and no more.
//!
//! Invariants:
//! - No byte at or behind apply-to leaves (rule 13): [`tidelock_pgstream::Sender`] bounds what is asked for, and
//!   apply-to only moves forward.
//! - Bytes leave in order and without a gap. Where the journal has none, the connection ends with
//!   [`Failure::CopyAnew`].
//! - Nothing waits for a timer: apply-to wakes the threads that it concerns.
#![forbid(unsafe_code)]

mod failure;
mod hub;
mod serve;
mod source;
mod standby;
#[cfg(test)]
mod tests;

pub use failure::Failure;
pub use hub::{Connection, ConnectionId, ShardWal, Standbys};
pub use serve::{Listening, SOCKET_PORT, bind_for, socket_in};
pub use source::{Ask, Supply};
pub use standby::{Event, Need, Standby};
