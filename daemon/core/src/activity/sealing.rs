//! The way from "everything may differ" back to a map: what was admitted without being noted must
//! be at the backup and on the local disks before the map is all there is.
//!
//! ```text
//! Draining ── nothing unnoted is under way ──► Covering ── backup and disks have it ──► Ready
//! ```

use super::trial::Trial;
use super::{ActivityLog, State, Why};
use tidelock_protocol::ids::{MonoNanos, Seq};

#[derive(Debug)]
enum Stage {
    Draining,
    Covering { barrier: Seq, flushes: Vec<u64> },
    Ready,
}

/// How far it is.
#[derive(Debug)]
pub(super) struct Sealing {
    why: Why,
    stage: Stage,
}

impl Sealing {
    /// Whether the next transaction may say that the map is all there is.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready)
    }

    pub(super) fn why(&self) -> Why {
        self.why
    }
}

impl ActivityLog {
    /// To be called in each turn. `whole`: what the backup has equals the local disks once
    /// everything has arrived that was given out up to `last_seq`.
    pub fn step(&mut self, whole: bool, last_seq: Seq, now: MonoNanos) {
        self.last_seq = self.last_seq.max(last_seq);
        self.now = now;
        if whole && self.uncompared > 0 {
            self.settle_all();
        }
        match &self.state {
            State::Everything(Why::FlushFailed) => {}
            State::Everything(why) => {
                // Each attempt costs the writes that fill the map: not before the backup has all
                // that was too much for it, and what came since was less.
                let why = *why;
                if whole && self.durable >= self.retry_from && self.would_fit(why) {
                    self.trial = None;
                    self.calm.returns(now);
                    self.state = State::Sealing(Sealing { why, stage: Stage::Draining });
                    self.free_resting();
                    self.drain_unnoted();
                }
            }
            State::Sealing(_) if !whole => self.give_up_map(Why::Copy),
            State::Sealing(Sealing { stage: Stage::Draining, .. }) => self.drain_unnoted(),
            State::Sealing(Sealing { stage: Stage::Covering { barrier, flushes }, why }) => {
                let flushed = self.disks.iter().zip(flushes).all(|(disk, n)| disk.done >= *n);
                if flushed && self.durable >= *barrier {
                    self.state = State::Sealing(Sealing { why: *why, stage: Stage::Ready });
                }
            }
            State::Sealing(_) | State::Mapped | State::Off | State::Discarding => {}
        }
        if !self.waiting.is_empty() {
            self.pump();
        }
    }

    /// Whether a map would do, if it was given up because it was too small.
    fn would_fit(&mut self, why: Why) -> bool {
        if why != Why::Overflow {
            return true;
        }
        // Until the log says that everything may differ, requests wait, and nothing is counted.
        if !self.admits_untracked() {
            return false;
        }
        let (now, durable, last_seq) = (self.now, self.durable, self.last_seq);
        let ends_at = now.plus_ms(self.calm.ms());
        let trial =
            self.trial.get_or_insert_with(|| Trial::new(self.geometry.slots, ends_at, last_seq));
        trial.is_passed(now, durable, last_seq)
    }

    /// Until the map is all there is the log says that everything may differ, and then the backup and the
    /// disks have what was given out before: nothing that rests has to be in it.
    fn free_resting(&mut self) {
        debug_assert!(self.uncompared == 0, "the disks are whole");
        self.table.free_resting();
    }

    fn drain_unnoted(&mut self) {
        let State::Sealing(sealing) = &self.state else { return };
        if self.untracked > 0 {
            return;
        }
        let why = sealing.why;
        self.free_resting();
        let flushes = self.disks.iter().map(|disk| disk.begun + 1).collect();
        (0..self.disks.len()).for_each(|disk| self.flush(disk));
        let stage = Stage::Covering { barrier: self.last_seq, flushes };
        self.state = State::Sealing(Sealing { why, stage });
    }

    /// Whether it waits for the backup to catch up.
    #[must_use]
    pub fn wants_acks(&self) -> bool {
        !matches!(self.state, State::Mapped | State::Off | State::Discarding)
    }
}
