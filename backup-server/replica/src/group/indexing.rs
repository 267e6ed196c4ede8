//! Which sealed segments get an index and maps, and when.
//!
//! Work for the fold's thread, when it has nothing to fold: neither is ever waited for. Not for
//! segments that the next fold takes away, so with `retention.window = "0s"` hardly ever.

use super::Group;
use tidelock_storage::Storage;
use tidelock_store::journal::{IndexJob, JournalError, Made, MadeAgain, Position};

impl<S: Storage> Group<S> {
    /// Work that writes the index of a sealed segment or a map, if there is any. Its outcome goes to
    /// [`Group::index_done`]; while it runs there is no [`Group::fold_job`], and the other way
    /// round: a fold removes segments with their indexes and maps.
    pub fn index_job(&mut self) -> Option<IndexJob<S>> {
        if !self.journal.has_unindexed()
            || self.fold.aside
            || self.fold.is_running
            || self.broken.is_some()
        {
            return None;
        }
        let stays = self.stays();
        let is_on_record = self.is_on_record();
        let Self { journal, fold, .. } = self;
        let job = journal.index_job(stays.segment, |index| {
            fold.closed.get(&index).map(|closed| (closed.at, closed.cut.clone()))
        });
        // A map has nothing of what is void, and a recovery or a removal that is not on record may be lost.
        let map = || is_on_record.then(|| journal.map_job(stays.segment)).flatten();
        let job = job.or_else(map);
        self.fold.aside = job.is_some();
        job
    }

    /// What is before the next fold takes away.
    pub(super) fn stays(&self) -> Position {
        match self.fold_is_blocked() {
            true => self.fold.position,
            false => self.target_not_held().to.max(self.fold.position),
        }
    }

    /// Such a job has ended, for this segment. Without what it was to make the journal is whole: the
    /// next opening reads the segment and tries again, and views read what has no map by its index.
    pub fn index_done(&mut self, segment: u64, result: Result<Made<S::File>, JournalError>) {
        self.fold.aside = false;
        match result {
            Ok(made) => {
                self.journal.made(made);
                if let Err(error) = self.refresh_overlay() {
                    self.break_down(&error.into());
                }
            }
            Err(error) => {
                self.journal.not_made(segment);
                self.notices.push(format!(
                    "journal segment {segment} has no index or map: {error}. The server goes on; \
                     its next start and views take longer"
                ));
            }
        }
    }

    /// Says that opening had to read segments whose indexes should have been there.
    pub(super) fn note_made_again(&mut self, made_again: &[MadeAgain]) {
        let Some(first) = made_again.first() else { return };
        self.notices.push(format!(
            "{} of the journal's indexes could not be used, the first is {} ({}): the segments \
             were read and the indexes are made again",
            made_again.len(),
            first.file,
            first.reason
        ));
    }
}
