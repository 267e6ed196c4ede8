//! Timelines: after a promotion a server writes a new one, which shares the log of the one before up to where it
//! branched.
//!
//! The history file of a timeline (`00000003.history`; a walsender sends it for `TIMELINE_HISTORY 3`) has a line for
//! each timeline before it: its number, the position at which it was left, and a reason. Lines that begin with `#` are
//! comments.

use crate::lsn::Lsn;
use std::fmt;

/// The number of a timeline. The first one of a system is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimelineId(pub u32);

impl fmt::Display for TimelineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A timeline that was left for a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ancestor {
    id: TimelineId,
    /// The first position that belongs to the next timeline.
    end: Lsn,
}

/// A timeline and those that it branched from, with the part of the log that each has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineHistory {
    /// Numbers rise; ends do not fall.
    ancestors: Vec<Ancestor>,
    current: TimelineId,
}

/// Faults of the history file of a timeline.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HistoryError {
    /// The line has no number of a timeline, or no position behind it.
    #[error(
        "line {line} of timeline {of}'s history is not a timeline and the position at which it was left"
    )]
    Line {
        /// The file's timeline.
        of: TimelineId,
        /// Counted from 1.
        line: usize,
    },
    /// The number of a timeline is not greater than the one before it.
    #[error(
        "timeline {of} has a history in which {next} follows {before}: numbers of timelines only grow"
    )]
    Order {
        /// The file's timeline.
        of: TimelineId,
        /// The earlier one.
        before: TimelineId,
        /// The later one.
        next: TimelineId,
    },
    /// A timeline was left before it began.
    #[error(
        "timeline {of} has a history in which {id} was left at {end}, before it began at {begin}"
    )]
    Backwards {
        /// The file's timeline.
        of: TimelineId,
        /// The timeline that was left.
        id: TimelineId,
        /// Position at which it began.
        begin: Lsn,
        /// Position at which it was left.
        end: Lsn,
    },
}

impl TimelineHistory {
    /// A timeline that has branched from none.
    #[must_use]
    pub fn only(id: TimelineId) -> TimelineHistory {
        TimelineHistory { ancestors: vec![], current: id }
    }

    /// Reads the history file of a timeline.
    ///
    /// # Errors
    /// The file is not in PostgreSQL's format, or says what cannot be.
    pub fn parse(id: TimelineId, file: &[u8]) -> Result<TimelineHistory, HistoryError> {
        let mut history = TimelineHistory { ancestors: vec![], current: id };
        for (at, line) in file.split(|&byte| byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() || line[0] == b'#' {
                continue;
            }
            let ancestor = ancestor(line).ok_or(HistoryError::Line { of: id, line: at + 1 })?;
            history.add(ancestor)?;
        }
        if let Some(last) = history.ancestors.last().filter(|last| last.id >= id) {
            return Err(HistoryError::Order { of: id, before: last.id, next: id });
        }
        Ok(history)
    }

    fn add(&mut self, next: Ancestor) -> Result<(), HistoryError> {
        if let Some(last) = self.ancestors.last() {
            if next.id <= last.id {
                return Err(HistoryError::Order {
                    of: self.current,
                    before: last.id,
                    next: next.id,
                });
            }
            if next.end < last.end {
                let (begin, end) = (last.end, next.end);
                return Err(HistoryError::Backwards { of: self.current, id: next.id, begin, end });
            }
        }
        self.ancestors.push(next);
        Ok(())
    }

    /// The timeline whose history this is.
    #[must_use]
    pub fn current(&self) -> TimelineId {
        self.current
    }

    /// The timeline that has written what is at a position.
    #[must_use]
    pub fn timeline_at(&self, lsn: Lsn) -> TimelineId {
        let left_before = self.ancestors.partition_point(|ancestor| ancestor.end <= lsn);
        self.ancestors.get(left_before).map_or(self.current, |ancestor| ancestor.id)
    }

    /// Position at which a timeline was left for the next one: its first position that is not in this history.
    /// `None` of the current timeline, and of those that are not in the history.
    #[must_use]
    pub fn left_at(&self, id: TimelineId) -> Option<Lsn> {
        self.ancestors.iter().find(|ancestor| ancestor.id == id).map(|ancestor| ancestor.end)
    }
}

/// Reads a line: number, white space, position, and whatever the reason is.
fn ancestor(line: &[u8]) -> Option<Ancestor> {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let mut word = || str::from_utf8(words.next()?).ok();
    let number = word()?;
    let is_number = number.bytes().all(|digit| digit.is_ascii_digit());
    let id = TimelineId(number.parse().ok().filter(|&id| is_number && id > 0)?);
    Some(Ancestor { id, end: word()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: TimelineId = TimelineId(4);
    const FILE: &[u8] = b"1\t0/3000148\tno recovery target specified\n\n# by hand\n2\t0/5000000\t\
        before 2000-01-01 01:00:00+01\n3\t0/5000000\tat restore point \"\xff\"\n";

    fn parse(file: &[u8]) -> Result<TimelineHistory, HistoryError> {
        TimelineHistory::parse(FOUR, file)
    }

    #[test]
    fn each_position_belongs_to_the_timeline_that_wrote_it() {
        let history = parse(FILE).unwrap();
        let written = [
            (0, 1),
            (0x300_0147, 1),
            (0x300_0148, 2),
            (0x4ff_ffff, 2),
            // The third one was left where it began.
            (0x500_0000, 4),
            (u64::MAX, 4),
        ];
        for (lsn, id) in written {
            assert_eq!(history.timeline_at(Lsn(lsn)), TimelineId(id), "{lsn:x}");
        }
        assert_eq!(history.left_at(TimelineId(1)), Some(Lsn(0x300_0148)));
        assert_eq!(history.left_at(TimelineId(3)), Some(Lsn(0x500_0000)));
        assert_eq!((history.left_at(FOUR), history.left_at(TimelineId(9))), (None, None));
        assert_eq!(history.current(), FOUR);
    }

    #[test]
    fn a_first_timeline_has_written_everything() {
        assert_eq!(parse(b"").unwrap(), TimelineHistory::only(FOUR));
        assert_eq!(TimelineHistory::only(FOUR).timeline_at(Lsn(0)), FOUR);
    }

    #[test]
    fn files_that_are_no_history_are_refused_by_line() {
        for garbage in [
            "x",
            "1",
            "1 0",
            "-1\t0/1",
            "+1\t0/1",
            "0\t0/1",
            "4294967296\t0/1",
            "1\t0/g",
            "\0",
            "0/1\t1",
        ] {
            let file = format!("1\t0/1\tfine\n\n{garbage}\n");
            assert_eq!(
                parse(file.as_bytes()),
                Err(HistoryError::Line { of: FOUR, line: 3 }),
                "{garbage}"
            );
        }
    }

    #[test]
    fn histories_that_cannot_be_are_refused() {
        let order = |before, next| {
            Err(HistoryError::Order {
                of: FOUR,
                before: TimelineId(before),
                next: TimelineId(next),
            })
        };
        assert_eq!(parse(b"1\t0/1\n1\t0/2\n"), order(1, 1));
        assert_eq!(parse(b"3\t0/1\n2\t0/2\n"), order(3, 2));
        assert_eq!(parse(b"4\t0/1\n"), order(4, 4));
        assert_eq!(parse(b"5\t0/1\n"), order(5, 4));
        let (id, begin, end) = (TimelineId(2), Lsn(2), Lsn(1));
        assert_eq!(
            parse(b"1\t0/2\n2\t0/1\n"),
            Err(HistoryError::Backwards { of: FOUR, id, begin, end })
        );
    }
}
