//! Record of a shard's standby that lasts across restarts of the backup server: `standby.json`.

use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;
use tidelock_shard_logs::{KeptStatus, Promoted};
use tidelock_storage::files::Files;
use tidelock_storage::{json, replace};
use tidelock_targets::postgres::Server;

const FILE: &str = "standby.json";
const FORMAT: u32 = 1;

/// A standby on record. What runs is on record before it is started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    /// The standby, or the server that it has become.
    pub server: Server,
    /// End of an earlier cut, of a server that has taken the standby's place to be promoted there.
    pub past: Option<u64>,
    /// Its promotion.
    pub promoted: Option<Promoted>,
    /// Copies of it that nobody starts, the oldest first.
    pub kept: Vec<Kept>,
    /// Number of the next one.
    pub next_kept: u64,
}

/// A kept copy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pub server: Server,
    #[serde(flatten)]
    pub status: KeptStatus,
    /// Begin of the log that it needs.
    pub needs_from: u64,
}

impl Record {
    pub(super) fn new(server: Server) -> Self {
        Self { format: FORMAT, server, past: None, promoted: None, kept: Vec::new(), next_kept: 1 }
    }

    /// Reads the record. `None`: there is none.
    pub(super) fn read(dir: &Path) -> io::Result<Option<Self>> {
        if !dir.join(FILE).exists() {
            return Ok(None);
        }
        json::read(&Files::new(dir.to_owned()), FILE, FORMAT).map_err(io::Error::other)
    }

    /// Writes the record; it is durable then.
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).expect("plain data");
        replace(&Files::new(dir.to_owned()), "", FILE, &text)
    }
}
