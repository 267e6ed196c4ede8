//! The outcome of a verification: whether the backup's disks equal the local ones, and of which state that was
//! seen. It is kept in the member's state file, so that status says what is known and not what is hoped (rule 6).

use serde::{Deserialize, Serialize};
use std::time::Duration;
use tidelock_protocol::ids::{Epoch, Seq};

/// A verification that has looked at everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// When it began, in milliseconds since the Unix epoch.
    pub begun_unix_ms: u64,
    /// When it had looked at everything, and what it copied was durable at the backup.
    pub ended_unix_ms: u64,
    /// The epoch in which it ended.
    pub epoch: Epoch,
    /// The member's last write when it began.
    pub from_seq: Seq,
    /// The member's last write when it ended. It holds for the state with all up to this one: each extent was
    /// compared at a state between the two, and what was written there later went to both sites.
    pub to_seq: Seq,
    /// Bytes that were compared.
    pub compared_bytes: u64,
    /// Where the sites differed, the first of them.
    pub differing: Vec<DifferingExtent>,
    /// How many bytes that is, of those that are not listed, too.
    pub differing_bytes: u64,
    /// Bytes of them that were copied to the backup.
    pub repaired_bytes: u64,
    /// Bytes that the local disk did not let us read: of these nothing is known.
    pub unreadable_bytes: u64,
}

/// A place in which the sites differed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DifferingExtent {
    /// The disk's name.
    pub disk: String,
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub len_bytes: u64,
}

impl Verified {
    /// Time since its end, by the wall clock.
    #[must_use]
    pub fn age(&self, wall_ms: u64) -> Duration {
        Duration::from_millis(wall_ms.saturating_sub(self.ended_unix_ms))
    }

    /// Whether the sites still differ by what is known.
    #[must_use]
    pub fn differs(&self) -> bool {
        self.differing_bytes > self.repaired_bytes
    }

    /// The first place in which they differed, in words.
    #[must_use]
    pub fn first(&self) -> String {
        let words = |e: &DifferingExtent| format!("{} offset {}", e.disk, e.offset);
        self.differing.first().map_or_else(|| "no place".to_owned(), words)
    }

    /// Whether they were equal, or were made so.
    #[must_use]
    pub fn is_good(&self) -> bool {
        !self.differs() && self.unreadable_bytes == 0
    }
}
