//! The logs of a sharded store at the backup (rule 13, `docs/shard-logs.md`): all shards in one journal, one watermark, and
//! one cut after a disaster.
//!
//! ```text
//!  Backup of a shard ─▶ Bsa ─▶ queue ─▶ Journal ─ durable ─▶ Reply to the agent
//!                                                    └─▶ WatermarkService ─▶ ApplyTo of every shard ─▶ standbys
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | `log` | [`StoreLog`]: takes entries, makes them durable, moves the watermark, ends the epoch of the primary |
//! | `cut` | the end of each shard's log up to a stamp, found in the journal: the cut of any past instant |
//! | `manifest` | what a store is: shards by name, the log that each one's positions are of |
//! | `store` | [`Store`]: connections of primary hosts, from frames to replies |
//! | `read` | entries of one shard, for whoever applies them |
//!
//! The state machines are those of [`tidelock_shard`]. Nothing here waits or does I/O but through [`tidelock_storage`]; a
//! sync is a job that any thread may do.
//!
//! Invariants:
//! - An agent hears that an entry is committed, and the watermark passes it, only after it is durable (rules 3 and 9).
//! - The journal has each shard's log without a gap, with stamps that do not fall: [`tidelock_store::journal::State`] refuses
//!   all else, also when it is opened.
//! - Once the mark of a recovery is in the journal, no entry of the primary is taken (rule 4), and the final watermark is a
//!   function of what is before the mark.
#![forbid(unsafe_code)]

mod cut;
mod log;
mod manifest;
mod read;
mod status;
mod store;
#[cfg(test)]
mod tests;

pub use cut::{Cut, CutSearch};
pub use log::{Agent, Event, Limits, Recovery, Refused, StoreError, StoreLog};
pub use manifest::{MANIFEST, OtherLog};
pub use read::{EntryReader, ReadError};
pub use status::{
    KeptStatus, LeftOut, Promoted, ShardStatus, StandbyState, StandbyStatus, StoreStatus,
};
pub use store::{Link, Output, Refusal, Store, TunnelEvent, TunnelId};
