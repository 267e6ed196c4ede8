//! Status of a store.

use serde::{Deserialize, Serialize};
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
}
