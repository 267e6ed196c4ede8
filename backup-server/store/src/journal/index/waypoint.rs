//! Places within a segment at which a replay may begin, so that a point in time is found without reading what the
//! segment has before it.

use crate::journal::State;
use serde::{Deserialize, Serialize};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::vector::CountVector;

/// How many a segment gets, about.
pub(in crate::journal) const WAYPOINTS_PER_SEGMENT: u64 = 16;

/// Between two batches: what a replay would know there, and for which points it may begin there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waypoint {
    /// Where the next batch begins, in bytes from the beginning of the segment.
    pub offset: u64,
    /// The state before it.
    pub state: State,
    /// States of the group at this time and later have everything before it.
    pub at: Hlc,
    /// And so have states that have this cut.
    pub cut: CountVector,
    /// And states as of this arrival and later, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
}
