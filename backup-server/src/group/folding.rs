//! When and what to fold, and what follows from a fold that is done.

use super::retention::Target;
use super::{Group, GroupError, Now, Stall};
use crate::fold::{FoldError, FoldJob, Folded};
use crate::journal::{JournalError, Position};
use crate::manifest::{self, FoldPosition};
use crate::storage::Storage;
use std::sync::Arc;

/// About how much one job folds: its images are synced once for all of it.
const JOB_BYTES: u64 = 256 << 20;

impl<S: Storage> Group<S> {
    /// Work for the fold, if there is any. Its outcome goes to [`Group::fold_done`]; there is one
    /// job at a time.
    pub fn fold_job(&mut self, now: Now) -> Option<FoldJob<S::File>> {
        self.fold.wall_ms = now.unix_ms;
        if self.stall == Some(Stall::FoldBehind) {
            self.check_unfolded();
        }
        let busy = self.fold.running.is_some() || self.fold.aside;
        if busy || self.broken.is_some() || self.fold_is_blocked() {
            return None;
        }
        // At a limit everything that can go must go.
        let retention = &self.options.retention;
        let pressed = self.stall.is_some() || self.unfolded_bytes() >= retention.size_max_bytes;
        let least = if pressed { 1 } else { self.options.fold_min_bytes.max(1) };
        if self.unfolded_bytes() < least {
            return None;
        }
        let Target { to, oldest, shortens } = self.target_not_held();
        let from = self.fold.position;
        if from >= to || self.journal.bytes_between(from, to) < least {
            return None;
        }
        // First it is on record that less can be seen: a fold may be interrupted anywhere.
        if let Err(error) = self.advance_oldest(oldest) {
            self.fold_failed(error);
            return None;
        }
        if shortens {
            self.note_shortened();
        }
        let cut = self.cut.cut().clone();
        self.fold.running = Some((to, cut.clone()));
        Some(FoldJob {
            tail: self.journal.tail(),
            from,
            to,
            state: self.journal.state().clone(),
            starts: self.journal.starts_after(from.segment).map(|(n, s)| (n, s.clone())).collect(),
            cut,
            images: self.images.clone(),
            damaged: (*self.fold.damaged).clone(),
            budget_bytes: JOB_BYTES,
        })
    }

    /// A job has ended, for a group with the cut that it was given.
    pub fn fold_done(
        &mut self,
        cut: tidelock_protocol::vector::CountVector,
        result: Result<Folded, FoldError>,
    ) {
        self.fold.running = None;
        match result.map_err(GroupError::from).and_then(|folded| self.record_fold(cut, folded)) {
            Ok(()) => self.fold.last_error = None,
            Err(error) => self.fold_failed(error),
        }
        self.check_unfolded();
    }

    fn fold_failed(&mut self, error: GroupError) {
        self.fold.last_error = Some(error.to_string());
        match error {
            // Gets better; at the limit of unfolded bytes the group stalls and says so.
            GroupError::Fold(FoldError::Full(_)) | GroupError::Journal(JournalError::Full(_)) => {}
            GroupError::Manifest(error) if error.is_full() => {}
            GroupError::Fold(FoldError::Journal(error)) => self.break_down(&error.into()),
            error => self.break_down(&error),
        }
    }

    fn record_fold(
        &mut self,
        cut: tidelock_protocol::vector::CountVector,
        folded: Folded,
    ) -> Result<(), GroupError> {
        for found in folded.found {
            self.quarantine(found)?;
        }
        if folded.position == self.fold.position {
            self.fold.blocked = Some((folded.position, cut));
            return Ok(());
        }
        let oldest = Some(self.fold.oldest.clone());
        let fold = FoldPosition { position: folded.position, oldest, damaged: folded.damaged };
        manifest::write_fold_position(&self.storage, &fold)?;
        self.fold.position = fold.position;
        self.fold.damaged = Arc::new(fold.damaged);
        self.fold.closed = self.fold.closed.split_off(&folded.position.segment);
        self.refresh_overlay()?;
        self.set_aside()?;
        self.journal.remove_before(folded.position)?;
        self.damage.is_due = true;
        Ok(())
    }

    /// Bytes of the journal that are not in the images.
    #[must_use]
    pub fn unfolded_bytes(&self) -> u64 {
        self.journal.bytes_after(self.fold.position)
    }

    /// Up to where the journal is in the images.
    #[must_use]
    pub fn fold_position(&self) -> Position {
        self.fold.position
    }

    /// Whether what comes next for the fold is beyond the cut, which only more records can raise.
    pub(super) fn fold_is_blocked(&self) -> bool {
        let blocked = self.fold.blocked.as_ref();
        blocked.is_some_and(|(at, under)| *at == self.fold.position && under == self.cut.cut())
    }
}
