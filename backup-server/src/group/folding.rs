//! When and what to fold, and what follows from a fold that is done.

use super::{Group, GroupError, Stall};
use crate::fold::{FoldError, FoldJob, Folded};
use crate::journal::{JournalError, Position};
use crate::manifest;
use crate::storage::Storage;
use std::sync::PoisonError;
use tidelock_protocol::message::CopyState;

/// About how much one job folds: its images are synced once for all of it.
const JOB_BYTES: u64 = 256 << 20;

impl<S: Storage> Group<S> {
    /// Work for the fold, if there is any. Its outcome goes to [`Group::fold_done`]; there is one
    /// job at a time.
    pub fn fold_job(&mut self) -> Option<FoldJob<S::File>> {
        self.fold.pins.retain(|pin| std::sync::Arc::strong_count(pin) > 1);
        if self.fold.running || !self.fold.pins.is_empty() || self.broken.is_some() {
            return None;
        }
        let (from, to) = (self.fold.position, self.journal.durable_end());
        if self.unfolded_bytes() < self.options.fold_min_bytes.max(1) || from >= to {
            return None;
        }
        if self.fold_is_blocked() {
            return None;
        }
        let cut = self.cut.cut().clone();
        self.fold.running = true;
        Some(FoldJob {
            reader: self.journal.reader(from, to),
            state: self.journal.state().clone(),
            cut,
            images: self.images.clone(),
            budget_bytes: JOB_BYTES,
        })
    }

    /// A job has ended, for a group with the cut that it was given.
    pub fn fold_done(
        &mut self,
        cut: tidelock_protocol::vector::CountVector,
        result: Result<Folded, FoldError>,
    ) {
        self.fold.running = false;
        match result.map_err(GroupError::from).and_then(|folded| self.record_fold(cut, folded)) {
            Ok(()) => self.fold.last_error = None,
            Err(error) => {
                self.fold.last_error = Some(error.to_string());
                match error {
                    // Gets better; at the limit of unfolded bytes the group stalls and says so.
                    GroupError::Fold(FoldError::Full(_))
                    | GroupError::Journal(JournalError::Full(_)) => {}
                    GroupError::Manifest(error) if error.is_full() => {}
                    GroupError::Fold(FoldError::Journal(error)) => self.break_down(&error.into()),
                    error => self.break_down(&error),
                }
            }
        }
        self.check_unfolded();
    }

    fn record_fold(
        &mut self,
        cut: tidelock_protocol::vector::CountVector,
        folded: Folded,
    ) -> Result<(), GroupError> {
        if folded.position == self.fold.position {
            self.fold.blocked = Some((folded.position, cut));
            return Ok(());
        }
        manifest::write_fold_position(&self.storage, folded.position)?;
        self.fold.position = folded.position;
        if let Some(overlay) = &self.overlay {
            let mut overlay = overlay.write().unwrap_or_else(PoisonError::into_inner);
            overlay.prune(folded.position.segment);
        }
        // A retention window will keep more than what the images need.
        self.journal.remove_before(folded.position)?;
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
    fn fold_is_blocked(&self) -> bool {
        let blocked = self.fold.blocked.as_ref();
        blocked.is_some_and(|(at, under)| *at == self.fold.position && under == self.cut.cut())
    }

    /// At the limit of unfolded bytes nothing more is taken until the fold has caught up. Two
    /// kinds of records are let through, because stopping them would be for ever: those of a
    /// resync, which cannot be folded before its end, and those that come while what is next
    /// depends on another writer's records that have not arrived. Their bound is the disk's room.
    pub(super) fn check_unfolded(&mut self) {
        let (unfolded, max) = (self.unfolded_bytes(), self.options.unfolded_max_bytes);
        let resyncing = self.journal.state().writers.iter().any(|w| w.copy == CopyState::Resyncing);
        let blocked = self.fold_is_blocked();
        if self.stall.is_none() && unfolded >= max && !resyncing && !blocked {
            let pinned = !self.fold.pins.is_empty();
            // An export must not stop replication: it ends with an error instead.
            self.revoke_pins();
            if !pinned {
                self.stall(Stall::FoldBehind);
            }
        } else if self.stall == Some(Stall::FoldBehind) && (unfolded < max - max / 8 || blocked) {
            self.stall = None;
            self.tell_stall();
        }
    }
}
