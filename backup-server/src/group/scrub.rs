//! When sealed segments are read only to verify them.
//!
//! One segment at a time on the fold's thread, when it has nothing else to do, and at most every
//! [`PAUSE_MS`]: all that is kept once after the group was opened, and once a day from then on.
//! Damage stops the group as it does when opening finds it, because what it would recover to is
//! not what was acknowledged; but not the disks of a group that was recovered, which guests run on:
//! there it is told, and said in the status.

use super::{Group, Now};
use crate::journal::{JournalError, ScrubJob};
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
    /// The last damage that was found.
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
    damaged: Option<String>,
}

impl Scrub {
    pub(super) fn new(now: MonoNanos) -> Self {
        Self {
            done: 0,
            running: true,
            next_at: after_ms(now, PAUSE_MS),
            round_began: now,
            verified_bytes: 0,
            damaged: None,
        }
    }
}

fn after_ms(now: MonoNanos, ms: u64) -> MonoNanos {
    MonoNanos(now.0.saturating_add(ms * 1_000_000))
}

impl<S: Storage> Group<S> {
    /// A segment to verify, if one is due. Its outcome goes to [`Group::scrub_done`]; until then
    /// there is no [`Group::fold_job`] and no [`Group::index_job`].
    pub fn scrub_job(&mut self, now: Now) -> Option<ScrubJob<S>> {
        let busy = self.fold.running.is_some() || self.fold.aside;
        if busy || self.broken.is_some() || now.mono < self.scrub.next_at {
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
    pub fn scrub_done(&mut self, now: Now, segment: u64, result: Result<u64, JournalError>) {
        self.fold.aside = false;
        self.scrub.done = segment;
        self.scrub.next_at = after_ms(now.mono, PAUSE_MS);
        let error = match result {
            Ok(bytes) => {
                self.scrub.verified_bytes += bytes;
                return;
            }
            Err(error) => error,
        };
        self.scrub.damaged = Some(error.to_string());
        if self.journal.state().recovered().is_some() {
            self.notices.push(format!(
                "{error}. Guests run on this group's disks, so they are served as they are: what \
                 the damaged part holds may be wrong"
            ));
            return;
        }
        self.break_down(&error.into());
    }

    /// Whether a round of verification runs, which goes on by the clock.
    #[must_use]
    pub fn is_scrubbing(&self) -> bool {
        self.scrub.running && self.broken.is_none()
    }

    pub(super) fn scrub_status(&self) -> ScrubStatus {
        let running = self.scrub.running;
        ScrubStatus {
            running,
            segments_left: if running { self.journal.sealed_after(self.scrub.done) } else { 0 },
            verified_bytes: self.scrub.verified_bytes,
            damaged: self.scrub.damaged.clone(),
        }
    }
}
