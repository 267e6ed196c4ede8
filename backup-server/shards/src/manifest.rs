//! Shape of a store, beside its journal: its shards by name, and the log that each shard's positions are of. A file of JSON,
//! replaced as a whole.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use thiserror::Error;
use tidelock_shard::link::Origin;
use tidelock_shard::{Doubts, LogIndex};
use tidelock_storage::Storage;
use tidelock_storage::json::{self, FileError};
use tidelock_wal::{Lsn, TimelineHistory, TimelineId};

/// The file's name, in the store's directory.
pub const MANIFEST: &str = "store.json";
const FORMAT: u32 = 1;

/// A store's shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: u32,
    /// The store's name.
    pub(crate) store: String,
    /// Names of the shards by number.
    pub(crate) shards: Vec<String>,
    /// Logs, by number of the shard.
    pub(crate) origins: BTreeMap<u16, Origin>,
    /// Stamps at which no cut is.
    pub(crate) doubts: Doubts,
}

/// A log that is not the one that the backup has of a shard, or cannot go on from it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum OtherLog {
    /// Another database.
    #[error(
        "this is another database (system identifier {found}) than the one that the backup has the log of ({known}): if the \
         shard was made anew, forget it at the backup first"
    )]
    System {
        /// The host's.
        found: u64,
        /// On record.
        known: u64,
    },
    /// An earlier timeline, of a server that was replaced.
    #[error(
        "this server is on timeline {found}, and the shard went on to timeline {known}: another server was promoted in its \
         place"
    )]
    Earlier {
        /// The host's.
        found: u32,
        /// On record.
        known: u32,
    },
    /// The history does not lead to the timeline.
    #[error(
        "timeline {found} does not come from timeline {known}, which the backup has the log of: the logs are different"
    )]
    Unrelated {
        /// The host's.
        found: u32,
        /// On record.
        known: u32,
    },
    /// The timeline begins before the end of what the backup has.
    #[error(
        "timeline {found} left timeline {known} at {left_at}, and the backup has the log up to {have}: what was shipped from \
         there on is not in the promoted server. Only what a synchronous standby has may be shipped"
    )]
    Diverged {
        /// The host's.
        found: u32,
        /// On record.
        known: u32,
        /// The end of the old timeline.
        left_at: LogIndex,
        /// The end of what the backup has.
        have: LogIndex,
    },
    /// The history cannot be read.
    #[error("the history of timeline {found} cannot be read: {why}")]
    History {
        /// The host's.
        found: u32,
        /// The cause.
        why: String,
    },
    /// The same timeline, with other content.
    #[error("timeline {found} has another history or other segments than the backup has on record")]
    Changed {
        /// The host's.
        found: u32,
    },
}

impl Manifest {
    pub(crate) fn new(store: &str, shards: &[String]) -> Self {
        let (store, shards) = (store.to_owned(), shards.to_vec());
        let (origins, doubts) = (BTreeMap::new(), Doubts::default());
        Self { format: FORMAT, store, shards, origins, doubts }
    }

    pub(crate) fn read(storage: &impl Storage) -> Result<Option<Self>, FileError> {
        json::read(storage, MANIFEST, FORMAT)
    }

    pub(crate) fn write(&self, storage: &impl Storage) -> Result<(), FileError> {
        json::write(storage, "", MANIFEST, self)
    }

    /// Judges the origin that a host states for a shard, of which the backup has the log up to `have`. True: it is new,
    /// and takes the place of the one on record.
    pub(crate) fn judge(
        &self,
        shard: u16,
        origin: &Origin,
        have: LogIndex,
    ) -> Result<bool, OtherLog> {
        let Some(known) = self.origins.get(&shard) else { return Ok(true) };
        if origin == known {
            return Ok(false);
        }
        if origin.system_id != known.system_id {
            return Err(OtherLog::System { found: origin.system_id, known: known.system_id });
        }
        let (found, known) = (origin.timeline, known.timeline);
        if found < known {
            return Err(OtherLog::Earlier { found, known });
        }
        if found == known {
            return Err(OtherLog::Changed { found });
        }
        let history = TimelineHistory::parse(TimelineId(found), origin.history.as_bytes())
            .map_err(|error| OtherLog::History { found, why: error.to_string() })?;
        let left_at = history.left_at(TimelineId(known));
        let Some(Lsn(left_at)) = left_at else { return Err(OtherLog::Unrelated { found, known }) };
        let left_at = LogIndex(left_at);
        if left_at < have {
            return Err(OtherLog::Diverged { found, known, left_at, have });
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_goes_on_only_with_what_the_backup_has_of_it() {
        let origin = |system_id, timeline, history: &str| Origin {
            system_id,
            timeline,
            history: history.to_owned(),
            segment_bytes: 16 << 20,
            version: 15,
        };
        let mut manifest = Manifest::new("orders", &["s0".into()]);
        let second = "1\t0/5000\tno recovery target specified\n";
        assert_eq!(
            manifest.judge(0, &origin(1, 2, second), LogIndex(0)),
            Ok(true),
            "the first one"
        );
        manifest.origins.insert(0, origin(1, 2, second));
        let judge = |of, have| manifest.judge(0, &of, LogIndex(have));
        assert_eq!(judge(origin(1, 2, second), 9), Ok(false));
        let third = "1\t0/5000\twhy\n2\t0/8000\twhy\n";
        assert_eq!(judge(origin(1, 3, third), 0x8000), Ok(true));
        let diverged = judge(origin(1, 3, third), 0x8001).unwrap_err();
        assert!(matches!(diverged, OtherLog::Diverged { .. }), "{diverged}");
        for (of, why) in [
            (origin(2, 2, second), OtherLog::System { found: 2, known: 1 }),
            (origin(1, 1, ""), OtherLog::Earlier { found: 1, known: 2 }),
            (origin(1, 2, ""), OtherLog::Changed { found: 2 }),
            (
                origin(1, 4, "1\t0/5000\twhy\n3\t0/8000\twhy\n"),
                OtherLog::Unrelated { found: 4, known: 2 },
            ),
        ] {
            assert_eq!(judge(of, 0), Err(why));
        }
        assert!(matches!(judge(origin(1, 3, "no\thistory"), 0), Err(OtherLog::History { .. })));
    }
}
