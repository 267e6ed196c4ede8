//! Shard logs: the logs of a sharded store, shipped to the backup shard by shard and applied there up to one watermark
//! (Slogger 5, rule 13 in `docs/rules.md`).
//!
//! ```text
//!   primary site                          backup site
//!   shard's log ─▶ Psa ══ Backup ═══════▶ Bsa ─▶ log of the backup shard ─▶ ApplyTo ─▶ state machine
//!                   ▲                      │ ▲                                 ▲
//!                   └═════ Reply ══════════┘ │ Order (watermark) ──────────────┘
//!                                     Report ▼
//!                                     WatermarkService: the least stamp that every shard has committed
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | `log` | what a shard's log is made of: positions, stamps, entries |
//! | `record` | an entry as the body of a record |
//! | [`link`] | messages between a primary host and the backup |
//! | [`host`] | the host's end of such a connection |
//! | `tunnel` | flow of bytes from the backup to a shard's server |
//! | `psa` | primary Slogger agent: sends what is committed at home, resends, knows what may be trimmed (5.2) |
//! | `bsa` | backup Slogger agent: takes entries in order, says what is there, is closed by a recovery (5.3, 5.6) |
//! | `watermark` | watermark service: shard timestamp vector, watermark, final round (5.4, 5.6) |
//! | `doubt` | stamps at which no cut is, because a clock was not believed |
//! | `apply` | which committed entries may be applied (apply-to) |
//! | `idle` | when a shard that has nothing to write appends a NOP (5.5.3) |
//!
//! Every state here can be lost and is rebuilt: that of a PSA by asking the BSA, that of a BSA from its shard's log, that of
//! the watermark service from all BSAs. What must survive is in the logs: entries, and the mark of a recovery ([`Closing`]).
//!
//! `docs/shard-logs.md` has the contract of a store, and the proof that cuts by effective stamps are prefixes.
#![forbid(unsafe_code)]

mod apply;
mod bsa;
mod doubt;
pub mod host;
mod idle;
pub mod link;
mod log;
mod psa;
mod record;
mod tunnel;
mod watermark;

pub use apply::ApplyTo;
pub use bsa::{Bsa, BsaError, Closing, Received, Todo};
pub use doubt::Doubts;
pub use idle::IdleShard;
pub use log::{Entry, LogIndex, LogPoint, stamp_at, unix_ns_of};
pub use psa::{Psa, PsaError, Step, Terms};
pub use record::{ShardEntry, follows};
pub use tunnel::{Tunnel, TunnelError};
pub use watermark::{NoShard, Order, Report, WatermarkService};

use serde::{Deserialize, Serialize};

/// PSA to BSA: entries of the shard's log, in its order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Backup {
    /// Comes back with the reply. Grows whenever the PSA starts again from another place.
    pub attempt: u64,
    /// The end of the entry before the first.
    pub after: LogIndex,
    /// Entries with effective stamps. Empty: a question for where the backup stands.
    pub entries: Vec<Entry>,
}

/// BSA to PSA.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reply {
    /// The message's that is answered.
    pub attempt: u64,
    /// The answer.
    pub verdict: Verdict,
}

/// Outcome of a [`Backup`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// Ack: the entries will be appended to the backup shard's log, or are there already.
    Taken(Standing),
    /// Nack: entries before them are missing. Sending goes on after [`Standing::append`].
    OutOfOrder(Standing),
    /// The answer to a question. Sending goes on after [`Standing::append`].
    Asked(Standing),
    /// Refusal: there is no room now, and nothing was taken. The agent asks again later, and sends nothing until then.
    Full(Standing),
    /// Refusal: the replica does not lead the backup shard, and another one is to be asked.
    NotLeader,
    /// A recovery has begun: the backup shard takes no entries of this primary any more.
    Fenced,
}

/// Progress of the backup shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Standing {
    /// append-idx: the end of the last entry that was received in order. Not yet safe.
    pub append: LogPoint,
    /// commit-idx: the end of the last entry that the backup shard has committed.
    pub commit: LogPoint,
}
