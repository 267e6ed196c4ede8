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
    /// The lineage of the log whose last timeline this is. `files` are history files, by their timelines: that of the
    /// last one, and others if they are there.
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

    /// The history file of a timeline. The file of a later timeline begins with those of its ancestors, so that one
    /// that is not here is cut out of the last one. A standby asks for all numbers up to its next timeline, also for
    /// those that nobody has gone on from.
    pub(crate) fn file(&self, id: TimelineId) -> Option<Bytes> {
        let last = self.history.current();
        if let Some(file) = self.files.get(&id) {
            return Some(file.clone());
        }
        let file = self.files.get(&last).filter(|_| TimelineId(1) < id && id < last)?;
        let mut end = 0;
        for line in file.split_inclusive(|&byte| byte == b'\n') {
            let number = line.trim_ascii_start().split(u8::is_ascii_whitespace).next();
            let number = number.and_then(|digits| str::from_utf8(digits).ok()?.parse().ok());
            if number.is_some_and(|number| TimelineId(number) >= id) {
                break;
            }
            end += line.len();
        }
        Some(file.slice(..end))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_timelines_have_the_front_of_the_last_one_s_history() {
        let text = b"1\t0/1000\tpromoted\n\n# by hand\n3\t0/2000\tpromoted\n";
        let last = BTreeMap::from([(TimelineId(4), Bytes::from_static(text))]);
        let lineage = Lineage::new(TimelineId(4), last).unwrap();
        let file = |id| lineage.file(TimelineId(id));
        let front = Some(Bytes::from_static(b"1\t0/1000\tpromoted\n\n# by hand\n"));
        // Timeline 2 was left by nobody; a standby asks for it all the same.
        assert_eq!((file(2), file(3)), (front.clone(), front));
        assert_eq!(file(4).as_deref(), Some(&text[..]));
        assert_eq!((file(1), file(5), file(u32::MAX)), (None, None, None));
        let own = Bytes::from_static(b"1\t0/800\tanother\n");
        let both = [(TimelineId(2), own.clone()), (TimelineId(4), Bytes::from_static(text))];
        let lineage = Lineage::new(TimelineId(4), both.into()).unwrap();
        assert_eq!(lineage.file(TimelineId(2)), Some(own), "what is there is given");
    }
}
