//! Why a record is not in the cut: for people, who want to know what a recovery leaves out, and whom
//! to ask.

use super::{CutTracker, HeldResync, Need};
use serde::{Deserialize, Serialize};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::Form;
use tidelock_protocol::vector::CountVector;

/// A record that waits, and what for. What follows it in its writer's order waits with it, and so
/// does the resync that it is the end of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBack {
    /// The record.
    pub seq: Seq,
    /// The writer that it waits for.
    pub by: WriterId,
    /// What of it.
    pub awaited: Awaited,
}

/// What a record waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Awaited {
    /// Another one that it depends on (vector form).
    Record(Seq),
    /// That the writer has nothing older any more (HLC form).
    Time {
        /// The record's time.
        of: Hlc,
        /// What the writer has reached.
        reached: Hlc,
    },
}

impl CutTracker {
    /// Why this writer's first record beyond the cut is not in it. `None`: there is none, or it
    /// belongs to a resync that has not ended. `committed`: as it was settled with.
    #[must_use]
    pub fn held_back(&self, writer: WriterId, committed: &CountVector) -> Option<HeldBack> {
        let track = self.tracks.get(writer.index())?;
        if self.form == Form::Vector {
            let mut needs = track.needs.iter();
            let Need { seq, of: by, needs } =
                *needs.find(|need| self.is_missing(need, |of| self.cut.get(of)))?;
            return Some(HeldBack { seq, by, awaited: Awaited::Record(needs) });
        }
        let reached = self.reached(committed);
        let (seq, of, (by, reached)) = match reached.held_back[writer.index()] {
            Some(HeldResync { done, at, by }) => (done, at, by),
            None if !track.resyncs.is_empty() => return None,
            None => {
                let first = track.times.first()?;
                (first.seq, first.hlc, reached.least)
            }
        };
        Some(HeldBack { seq, by, awaited: Awaited::Time { of, reached } })
    }
}
