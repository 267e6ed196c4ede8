//! Segments on record as damaged: `damaged.json`, replaced as a whole.
//!
//! A scrub finds again that a segment of the journal is damaged. Nothing finds again that an operator has given one up, or
//! that one has left the journal for the quarantine. The record is beside the journal because it tells of a journal that
//! cannot be read.
//!
//! Invariant: a segment on record is not deleted before an operator gives it up: when a fold has passed it, its file
//! goes to [`QUARANTINE_DIR`].

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidelock_protocol::hlc::Hlc;
use tidelock_storage::Storage;
use tidelock_storage::json::{self, FileError};
use tidelock_store::FORMAT;
use tidelock_store::damage::SegmentDamage;

/// Directory of damaged segments that a fold has passed.
pub const QUARANTINE_DIR: &str = "quarantine";
const FILE: &str = "damaged.json";

/// A segment on record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quarantined {
    /// The damage.
    pub damage: SegmentDamage,
    /// Time when the damage was found, in milliseconds since the Unix epoch.
    pub found_unix_ms: u64,
    /// The newest effective time before the segment.
    pub after: Hlc,
    /// An operator has given it up: its file goes when a fold has passed it.
    pub given_up: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    segments: Vec<Quarantined>,
}

/// The segments on record, by index.
pub type Quarantine = BTreeMap<u64, Quarantined>;

/// Reads the record.
pub fn read<S: Storage>(storage: &S) -> Result<Quarantine, FileError> {
    let Some(file) = json::read::<S, File>(storage, FILE, FORMAT)? else {
        return Ok(Quarantine::new());
    };
    Ok(file.segments.into_iter().map(|of| (of.damage.segment, of)).collect())
}

/// Replaces it, durably.
pub fn write<S: Storage>(storage: &S, quarantine: &Quarantine) -> Result<(), FileError> {
    let segments = quarantine.values().cloned().collect();
    json::write(storage, "", FILE, &File { format: FORMAT, segments })
}
