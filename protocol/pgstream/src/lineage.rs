//! The timelines of a log that is served, and how far it may be seen.

use bytes::Bytes;
use std::collections::BTreeMap;
use tidelock_wal::{HistoryError, Lsn, TimelineHistory, TimelineId};

/// The timelines of a log, with their history files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lineage {
    history: TimelineHistory,
    files: BTreeMap<TimelineId, Bytes>,
}

/// A lineage that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineageError {
    /// The history file of the last timeline is missing. Only timeline 1 has none.
    #[error("timeline {timeline} has no history file")]
    Missing {
        /// The last timeline.
        timeline: TimelineId,
    },
    /// The history file of the last timeline is none.
    #[error("{0}")]
    History(#[from] HistoryError),
}

impl Lineage {
    /// The lineage of the log whose last timeline this is. `files` are history files, by their timelines.
    ///
    /// # Errors
    /// The last timeline has no history file, or one that is none.
    pub fn new(
        last: TimelineId,
        files: BTreeMap<TimelineId, Bytes>,
    ) -> Result<Lineage, LineageError> {
        let history = match files.get(&last) {
            Some(file) => TimelineHistory::parse(last, file)?,
            None if last == TimelineId(1) => TimelineHistory::only(last),
            None => return Err(LineageError::Missing { timeline: last }),
        };
        Ok(Lineage { history, files })
    }

    /// The history of the last timeline.
    #[must_use]
    pub fn history(&self) -> &TimelineHistory {
        &self.history
    }

    /// The timeline that a reader sees as the last one while nothing from the bound on may be seen: the one on which
    /// the bound lies. Later ones are not spoken of, because a standby that knew of them would follow them.
    #[must_use]
    pub fn timeline_at(&self, bound: Lsn) -> TimelineId {
        self.history.timeline_at(bound)
    }

    pub(crate) fn file(&self, id: TimelineId) -> Option<&Bytes> {
        self.files.get(&id)
    }

    /// The timeline that follows one of this lineage.
    pub(crate) fn after(&self, id: TimelineId) -> Option<(TimelineId, Lsn)> {
        let end = self.history.left_at(id)?;
        Some((self.history.timeline_at(end), end))
    }

    /// True if the timeline is the last one, or one that it came from.
    pub(crate) fn contains(&self, id: TimelineId) -> bool {
        id == self.history.current() || self.history.left_at(id).is_some()
    }
}
