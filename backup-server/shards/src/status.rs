//! Status of a store.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::LogIndex;

/// The status of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStatus {
    /// Its name.
    pub store: String,
    /// Its shards by number.
    pub shards: Vec<ShardStatus>,
    /// Entries of all shards up to this effective stamp may be applied; after a recovery the final one.
    pub watermark: Option<Hlc>,
    /// The greatest effective stamp of an update of any shard that has arrived.
    pub updated: Hlc,
    /// The shard that holds the watermark back.
    pub held_back_by: Option<String>,
    /// The final watermark, once a recovery has closed all logs.
    pub recovered: Option<Hlc>,
    /// When a host was heard last, by this site's clock in milliseconds since the Unix epoch. `None`: not since the server
    /// was started.
    pub heard_unix_ms: Option<u64>,
    /// Bytes of the journal.
    pub journal_bytes: u64,
}

/// The status of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardStatus {
    /// Its name.
    pub name: String,
    /// The host that ships its log, if one is connected.
    pub host: Option<String>,
    /// Why its stamps stand still, if they do, as the host says.
    pub stands: Option<String>,
    /// The timeline of the log on record.
    pub timeline: Option<u32>,
    /// The end of what was received.
    pub received: LogIndex,
    /// The end of what is durable.
    pub durable: LogIndex,
    /// The effective stamp there.
    pub stamp: Hlc,
    /// The end of what may be applied.
    pub apply_to: LogIndex,
    /// After a recovery: what clients had committed, and is beyond the final cut.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// The shard's standby at the backup, if the server runs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyStatus>,
}

/// Something that clients had committed, and that is beyond the final cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its end in the log.
    pub at: LogIndex,
    /// Its time by the primary's clock, in nanoseconds since the Unix epoch.
    pub unix_ns: u64,
    /// The transaction's number, of a PostgreSQL shard.
    pub transaction: Option<u32>,
}

/// State of a standby.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StandbyState {
    /// Nothing: it is not known yet whose log it is, or there is no copy and nobody to take it from.
    #[default]
    Waiting,
    /// The primary is being copied.
    Copying,
    /// It runs, and the log has not come to where its copy is usable.
    Recovering,
    /// It follows, and serves readers.
    Following,
    /// It does not run.
    Stopped,
    /// It was promoted, and writes.
    Promoted,
}

/// The status of a standby.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyStatus {
    /// Its state.
    pub state: StandbyState,
    /// Why it cannot do what it should, and what to do.
    pub problem: Option<String>,
    /// The directory of its socket.
    pub socket_dir: PathBuf,
    /// Its port.
    pub port: u16,
    /// KiB of the copy that have come, and that there are.
    pub copied_kib: Option<(u64, u64)>,
    /// End of the log that it has.
    pub received: Option<LogIndex>,
    /// End of what readers see.
    pub replayed: Option<LogIndex>,
    /// Kept copies, from each of which on the past can be seen.
    pub kept: Vec<KeptStatus>,
    /// Its promotion.
    pub promoted: Option<Promoted>,
}

/// A kept copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptStatus {
    /// Position from which on it can be used.
    pub usable_from: LogIndex,
    /// When it was made, in milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
}

/// A promotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promoted {
    /// End of the old primary's log that it has.
    pub at: LogIndex,
    /// The timeline that it writes.
    pub timeline: u32,
    /// Milliseconds until the log was replayed up to there.
    pub ready_ms: u64,
    /// Milliseconds from then until it took writes.
    pub promoted_ms: u64,
}
