//! Which committed entries of a backup shard may be applied (Slogger 5.3, apply-to).

use crate::log::{LogIndex, LogPoint};
use std::collections::VecDeque;
use tidelock_protocol::hlc::Hlc;

/// The entries that are committed at the backup and may not be applied yet, and up to where others may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ApplyTo {
    /// Ascending in both; of entries with one stamp the last stands for all.
    waiting: VecDeque<LogPoint>,
    apply_to: LogIndex,
}

impl ApplyTo {
    /// Of a shard whose entries up to `applied` are applied.
    #[must_use]
    pub fn after(applied: LogIndex) -> Self {
        Self { waiting: VecDeque::new(), apply_to: applied }
    }

    /// The next entry that is committed.
    pub fn committed(&mut self, point: LogPoint) {
        match self.waiting.back_mut() {
            Some(last) if last.stamp == point.stamp => last.index = last.index.max(point.index),
            _ => self.waiting.push_back(point),
        }
    }

    /// Every shard has committed all that it has up to `watermark`. The entries up to the result may be applied.
    pub fn advance(&mut self, watermark: Hlc) -> LogIndex {
        while let Some(point) = self.waiting.front().filter(|point| point.stamp <= watermark) {
            self.apply_to = self.apply_to.max(point.index);
            self.waiting.pop_front();
        }
        self.apply_to
    }

    /// As [`ApplyTo::advance`] said last.
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
