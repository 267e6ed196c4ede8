//! When sealed segments are read only to verify them.
//!
//! One segment at a time on the fold's thread, when it has nothing else to do, and at most every
//! [`PAUSE_MS`]: all that is kept once after the group was opened, and once a day from then on.
//! Before all others come segments in which somebody has found damage, and now and then those that are on record as
//! damaged. What is found goes on record, and what is as it was written again goes off it (`damage.rs`); the group goes
//! on.

use super::{Group, Now};
use crate::journal::{ScrubJob, Scrubbed};
use crate::storage::Storage;
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::MonoNanos;

/// Between two segments, in milliseconds: with segments of 64 MiB at most 64 MiB/s are read.
const PAUSE_MS: u64 = 1000;
/// From the beginning of one round to that of the next one, in milliseconds.
const ROUND_MS: u64 = 24 * 3600 * 1000;

/// What was verified.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubStatus {
    /// A round runs.
    pub running: bool,
    /// Sealed segments that are not verified yet in this round.
    pub segments_left: u64,
    /// Bytes that were verified since the group was opened.
    pub verified_bytes: u64,
    /// The oldest segment on record as damaged, with what is wrong.
    pub damaged: Option<String>,
}

#[derive(Debug)]
pub(super) struct Scrub {
    /// Up to this segment all are verified.
    done: u64,
    running: bool,
    next_at: MonoNanos,
    round_began: MonoNanos,
    verified_bytes: u64,
}

impl Scrub {
    pub(super) fn new(now: MonoNanos) -> Self {
        Self {
            done: 0,
            running: true,
            next_at: after_ms(now, PAUSE_MS),
            round_began: now,
            verified_bytes: 0,
        }
    }
}

fn after_ms(now: MonoNanos, ms: u64) -> MonoNanos {
    MonoNanos(now.0.saturating_add(ms * 1_000_000))
}

impl<S: Storage> Group<S> {
    /// A segment to verify, if one is due. Its outcome goes to [`Group::scrub_done`]; until then
    /// there is no [`Group::fold_job`] and no [`Group::index_job`].
    pub fn scrub_job(&mut self, now: Now) -> Option<ScrubJob<S::File>> {
        let busy = self.fold.running.is_some() || self.fold.aside;
        if busy || self.broken.is_some() {
            return None;
        }
        if let Some(job) = self.wanted_scrub(now) {
            self.fold.aside = true;
            return Some(job);
        }
        if now.mono < self.scrub.next_at {
            return None;
        }
        if !self.scrub.running {
            self.scrub.running = true;
            self.scrub.done = 0;
            self.scrub.round_began = now.mono;
        }
        let from = self.scrub.done.max(self.fold.position.segment.saturating_sub(1));
        let job = self.journal.scrub_job(from);
        if job.is_none() {
            self.scrub.running = false;
            self.scrub.next_at = after_ms(self.scrub.round_began, ROUND_MS);
        }
        self.fold.aside = job.is_some();
        job
    }

    /// Such a job has ended, for this segment.
    pub fn scrub_done(&mut self, now: Now, segment: u64, scrubbed: Scrubbed) {
        self.fold.aside = false;
        self.tick(now);
        self.scrub.verified_bytes += scrubbed.bytes;
        if !self.damage.wanted.remove(&segment) {
            self.scrub.done = segment;
            self.scrub.next_at = after_ms(now.mono, PAUSE_MS);
        }
        let recorded = match scrubbed.damage {
            Some(damage) => self.quarantine(damage),
            None => self.take_out_of_quarantine(segment),
        };
        if let Err(error) = recorded {
            // Found again in the next round, and by whoever reads it.
            self.notices.push(format!("damage of the journal cannot be put on record: {error}"));
        }
    }

    /// Whether a round of verification runs, or something is to be looked at again: both go on by the clock.
    #[must_use]
    pub fn is_scrubbing(&self) -> bool {
        (self.scrub.running || self.damage.looks_again()) && self.broken.is_none()
    }

    pub(super) fn scrub_status(&self) -> ScrubStatus {
        let running = self.scrub.running;
        ScrubStatus {
            running,
            segments_left: if running { self.journal.sealed_after(self.scrub.done) } else { 0 },
            verified_bytes: self.scrub.verified_bytes,
            damaged: self.damage.first_of_all(),
        }
    }
}
