//! A point of the group's past.

use super::Position;
use serde::{Deserialize, Serialize};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, WriterId};
use tidelock_protocol::vector::CountVector;

/// A state of the whole group, settled to a cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// The records that are in it.
    pub cut: CountVector,
    /// The effective time of the last of them: asked for again, it gives this point.
    pub hlc: Hlc,
    /// Arrival of the last of them, in milliseconds since the Unix epoch by the backup's clock.
    pub arrived_ms: u64,
    /// The epoch that it belongs to.
    pub epoch: Epoch,
    /// Writers that have whole disks there, which are shown; others were being added.
    pub writers: Vec<WriterId>,
    /// End of the batch that holds the last of its records.
    pub end: Position,
    /// Beginning of the batch that holds the first record that is not in it: the images may be
    /// folded up to here.
    pub beyond: Position,
}

impl Point {
    /// Time for people: arrival here, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn wall_ms(&self) -> u64 {
        self.arrived_ms
    }
}
