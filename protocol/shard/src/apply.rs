//! Entries of a backup shard that may be applied (Slogger 5.3, apply-to).

use crate::log::{LogIndex, LogPoint};
use std::collections::VecDeque;
use tidelock_protocol::hlc::Hlc;

/// The entries that are committed at the backup and may not be applied yet, and up to where others may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ApplyTo {
    /// Ascending in both; of entries with one stamp the last stands for all.
    waiting: VecDeque<LogPoint>,
    watermark: Hlc,
    apply_to: LogIndex,
}

impl ApplyTo {
    /// A shard whose entries up to `applied` are applied.
    #[must_use]
    pub fn after(applied: LogIndex) -> Self {
        Self { apply_to: applied, ..Self::default() }
    }

    /// The next entry that is committed. It may be applied at once if its stamp is that of an entry before it.
    pub fn committed(&mut self, point: LogPoint) {
        if point.stamp <= self.watermark {
            self.apply_to = self.apply_to.max(point.index);
            return;
        }
        match self.waiting.back_mut() {
            Some(last) if last.stamp == point.stamp => last.index = last.index.max(point.index),
            _ => self.waiting.push_back(point),
        }
    }

    /// Every shard has committed all that it has up to `watermark`.
    pub fn advance(&mut self, watermark: Hlc) {
        self.watermark = self.watermark.max(watermark);
        while let Some(point) = self.waiting.front().filter(|point| point.stamp <= self.watermark) {
            self.apply_to = self.apply_to.max(point.index);
            self.waiting.pop_front();
        }
    }

    /// The end of the last entry that may be applied.
    #[must_use]
    pub fn apply_to(&self) -> LogIndex {
        self.apply_to
    }

    /// Stamps that wait. Grows while one shard holds all others back.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(index: u64, stamp: u64) -> LogPoint {
        LogPoint { index: LogIndex(index), stamp: Hlc(stamp) }
    }

    #[test]
    fn entries_wait_for_the_watermark_and_those_of_one_stamp_go_together() {
        let mut apply = ApplyTo::after(LogIndex(3));
        for (index, stamp) in [(4, 10), (5, 20), (6, 20), (7, 30)] {
            apply.committed(point(index, stamp));
        }
        assert_eq!((apply.apply_to(), apply.waiting()), (LogIndex(3), 3));
        apply.advance(Hlc(20));
        assert_eq!((apply.apply_to(), apply.waiting()), (LogIndex(6), 1));
        apply.advance(Hlc(10));
        assert_eq!(apply.apply_to(), LogIndex(6), "the watermark never goes back");
    }

    #[test]
    fn an_entry_with_the_stamp_of_the_watermark_may_come_after_it() {
        let mut apply = ApplyTo::default();
        apply.committed(point(1, 10));
        apply.advance(Hlc(10));
        apply.committed(point(2, 10));
        assert_eq!((apply.apply_to(), apply.waiting()), (LogIndex(2), 0));
    }
}
