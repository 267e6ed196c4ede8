//! Shard logs for stores with a write-ahead log of their own (Slogger 5): the library that such a store is linked with, so
//! that its shards are shipped to the backup, and the backup is a prefix of what clients have seen.
//!
//! ```text
//!  request ─▶ StampClock::begin ─▶ append, commit ─▶ StampClock::wait ─▶ reply
//!              (refuses without         │ ShardHandle::committed
//!               a believed clock)       ▼
//!                 ShardLog ◀── read ── Shipper ══ HostEnd, Psa ══▶ backup server
//!                          ◀── trim, nop ──┘
//! ```
//!
//! Change that a store needs, and where:
//!
//! | place in the store | call |
//! |---|---|
//! | before an update is appended | [`StampClock::begin`]: the entry's stamp, or a refusal of the update |
//! | an entry has its place in the log | effective stamp: the greatest stamp of the log up to it |
//! | an entry is committed | [`ShardHandle::committed`] |
//! | before a reply leaves, and before a read returns an entry | [`StampClock::wait`] for the effective stamp |
//! | the log is trimmed | no further than [`ShardLog::trim`] has said |
//! | a shard's log, at its leader | [`ShardLog`]: read what is committed, append a NOP |
//!
//! `examples/kv` is a store with that change. `docs/shard-logs.md` has the contract, and the proof.
//!
//! | module | what it is for |
//! |---|---|
//! | `clock` | stamps, and the time that a reply waits |
//! | `shipper` | all shards of a store that are led at this host, and their link; sans-I/O |
//! | `driver` | a thread with the link's socket for a shipper |
#![forbid(unsafe_code)]

mod clock;
mod driver;
mod shipper;

pub use clock::{Judgement, NotBelieved, StampClock};
pub use driver::{Backup, ShardHandle, Shipping};
pub use shipper::{Names, Pace, ReadError, ShardLog, ShardState, Shipper, ShipperStatus, Stand};
pub use tidelock_dial::Security;
pub use tidelock_protocol::hlc::Hlc;
pub use tidelock_protocol::record::Payload;
pub use tidelock_shard::link::Origin;
pub use tidelock_shard::{Entry, LogIndex, LogPoint, stamp_at, unix_ns_of};
