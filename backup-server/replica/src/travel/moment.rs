//! A point as it is told to people and programs: on the control socket, in `--json` and in increments.

use crate::history::Point;
use crate::manifest::Manifest;
use crate::text;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, WriterId};

/// A point with names in place of numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The wall clock's time, RFC 3339 in UTC, to the millisecond.
    pub time: String,
    /// The same in milliseconds since the Unix epoch.
    pub unix_ms: u64,
    /// The time of the hybrid logical clock, as `L.C`. A point that was asked for by time is this one again as `hlc:L.C`. Of
    /// several writers others may have the same time: the seqs tell them apart.
    pub hlc: String,
    /// The same as one number.
    pub hlc_raw: Hlc,
    /// The epoch.
    pub epoch: Epoch,
    /// The last seq of each writer, by its name.
    pub seqs: BTreeMap<String, u64>,
}

impl Moment {
    /// Of a group's point.
    #[must_use]
    pub fn new(point: &Point, manifest: &Manifest) -> Self {
        Self::of_members(point, &manifest.writers)
    }

    /// The same with the names of the writers by their numbers.
    #[must_use]
    pub fn of_members(point: &Point, writers: &[String]) -> Self {
        let name = |writer: WriterId| writers.get(writer.index()).map_or("?", String::as_str);
        let seqs = point.cut.entries().map(|(writer, seq)| (name(writer).to_owned(), seq.0));
        Self {
            time: text::utc_ms(point.wall_ms()),
            unix_ms: point.wall_ms(),
            hlc: point.hlc.to_string(),
            hlc_raw: point.hlc,
            epoch: point.epoch,
            seqs: seqs.collect(),
        }
    }

    /// Its seqs as they are asked for: `db=120,web=7`.
    #[must_use]
    pub fn seqs_text(&self) -> String {
        let seqs: Vec<_> =
            self.seqs.iter().map(|(member, seq)| format!("{member}={seq}")).collect();
        seqs.join(",")
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}  hlc:{}  {}", self.time, self.hlc, self.seqs_text())
    }
}
