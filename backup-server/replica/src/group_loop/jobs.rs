//! Jobs that are done beside a group's loop, one after the other.

use super::{Driver, GroupLoop, Phase, RETRY_MS};
use crate::group::{Now, ScrubDone, ScrubJob};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::fold::{FoldError, FoldJob, Folded};
use tidelock_store::journal::{CompressJob, Compressed, IndexJob, JournalError, Made};

/// A job of a group.
#[derive(Debug)]
pub enum Job<S: Storage> {
    /// The oldest records go into the images.
    Fold(Box<FoldJob<S::File>>),
    /// A segment gets its index.
    Index(IndexJob<S>),
    /// A segment or a part of an image is verified.
    Scrub(ScrubJob<S::File>),
    /// A segment that has grown cold is compressed.
    Compress(CompressJob<S>),
}

/// The end of a job.
#[derive(Debug)]
pub enum JobEnd<F> {
    /// The end of a fold, under this cut.
    Fold(CountVector, Result<Folded, FoldError>),
    /// The end of the work on a segment's index.
    Index(u64, Result<Made<F>, JournalError>),
    /// The end of a verification.
    Scrub(ScrubDone),
    /// The end of a segment's compression.
    Compress {
        /// The segment.
        segment: u64,
        /// Its bytes.
        len_bytes: u64,
        /// The outcome.
        result: Result<Compressed<F>, JournalError>,
    },
}

impl<S: Storage> Job<S> {
    /// Does it.
    #[must_use]
    pub fn run(self) -> JobEnd<S::File> {
        match self {
            Self::Fold(job) => {
                let cut = job.cut.clone();
                JobEnd::Fold(cut, job.run())
            }
            Self::Index(job) => {
                let segment = job.segment();
                JobEnd::Index(segment, job.run())
            }
            Self::Scrub(job) => JobEnd::Scrub(job.run()),
            Self::Compress(job) => {
                let (segment, len_bytes) = (job.segment(), job.len_bytes());
                JobEnd::Compress { segment, len_bytes, result: job.run() }
            }
        }
    }
}

impl<D: Driver> GroupLoop<D> {
    pub(super) fn begin_job(&mut self, now: Now, driver: &mut D) {
        if self.job_not_before.is_some_and(|at| now.mono < at) {
            return;
        }
        let Phase::Live(group) = &mut self.phase else { return };
        let fold = group.fold_job(now);
        if fold.is_some() {
            self.job_not_before = None;
        }
        let job = fold
            .map(|job| Job::Fold(Box::new(job)))
            .or_else(|| group.index_job().map(Job::Index))
            .or_else(|| group.scrub_job(now).map(Job::Scrub))
            .or_else(|| group.compress_job(now).map(Job::Compress));
        if let Some(job) = job {
            driver.begin(self.generation, job);
        }
    }

    /// A job has ended that was begun in this opening of the group, or in one before.
    pub fn job_done(
        &mut self,
        generation: u64,
        end: JobEnd<<D::Storage as Storage>::File>,
        now: Now,
    ) {
        self.tick(now);
        if let JobEnd::Fold(_, result) = &end {
            self.job_not_before = result.is_err().then(|| now.mono.plus_ms(RETRY_MS));
        }
        let Phase::Live(group) = &mut self.phase else { return };
        if generation != self.generation {
            return;
        }
        match end {
            JobEnd::Fold(cut, result) => group.fold_done(cut, result),
            JobEnd::Index(segment, result) => group.index_done(segment, result),
            JobEnd::Scrub(done) => group.scrub_done(now, done),
            JobEnd::Compress { segment, len_bytes, result } => {
                group.compress_done(now, segment, len_bytes, result);
            }
        }
    }
}
