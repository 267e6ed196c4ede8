//! When and what to fold, and what follows from a fold that is done.

use super::retention::Target;
use super::{Group, GroupError, Now, Stall};
use std::sync::Arc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_storage::Storage;
use tidelock_store::fold::FoldPosition;
use tidelock_store::fold::{self, FoldError, FoldJob, Folded};
use tidelock_store::journal::{JournalError, Position, State};

/// About how much one job folds: its images are synced once for all of it.
const JOB_BYTES: u64 = 256 << 20;
/// Where the rate is bounded, a job folds what may be folded in this time.
const PACED_JOB_S: u64 = 2;
const NANOS: u64 = 1_000_000_000;
/// So often what the disk does not read is tried again before it is taken for damaged, and how long after each other at
/// least, in nanoseconds: a disk that is away for some seconds costs nothing.
const READS_MAX: u32 = 20;
const READ_AGAIN_NANOS: u64 = NANOS;

/// What the disk did not read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unread {
    /// How often, one after the other.
    times: u32,
    /// It is tried again at this time.
    not_before: MonoNanos,
}

impl<S: Storage> Group<S> {
    /// Work for the fold, if there is any. Its outcome goes to [`Group::fold_done`]; there is one
    /// job at a time.
    pub fn fold_job(&mut self, now: Now) -> Option<FoldJob<S::File>> {
        self.tick(now);
        if self.stall == Some(Stall::FoldBehind) {
            self.check_unfolded();
        }
        let busy = self.fold.is_running
            || self.fold.aside
            || now.mono < self.fold.unread.not_before
            // It may be lost still, and what it leaves out must not be passed before.
            || self.is_being_recovered();
        if busy || self.broken.is_some() || self.fold_is_blocked() {
            return None;
        }
        // At a limit everything that can go must go.
        let retention = &self.options.retention;
        let is_full = matches!(self.stall, Some(Stall::NoRoom(_)));
        let waits_for_fold = self.stall.as_ref().is_some_and(|stall| *stall != Stall::Reserve);
        let pressed = waits_for_fold || self.stored_bytes() >= retention.size_max_bytes;
        let least = if pressed { 1 } else { self.options.fold_min_bytes.max(1) };
        if self.unfolded_bytes() < least {
            return None;
        }
        let Target { to, oldest, shortens } = self.target_not_held();
        let from = self.fold.position;
        let waits = self.journal.bytes_between(from, to);
        if from >= to || waits < least {
            return None;
        }
        let calm = !pressed && waits < self.options.unfolded_max_bytes / 2;
        let rate = self.options.fold_rate_bytes_s.filter(|_| calm);
        if rate.is_some() && now.mono < self.fold.pace.1 {
            return None;
        }
        self.fold.pace = (now.mono, now.mono);
        if is_full {
            self.storage.use_reserve();
        }
        let cut = self.cut.cut().clone();
        // First it is on record that less can be seen: a fold may be interrupted anywhere.
        if let Err(error) = self.record_beginning(oldest, (to, cut.clone())) {
            self.storage.end_use_of_reserve();
            self.fold_failed(error);
            return None;
        }
        if shortens {
            self.note_shortened();
        }
        self.fold.is_running = true;
        let budget_bytes = match rate {
            // The images may grow by all that is folded before its segment goes: the reserve has room for that.
            _ if is_full => self.options.journal.segment_bytes,
            Some(rate) => JOB_BYTES.min(rate * PACED_JOB_S),
            None => JOB_BYTES,
        };
        Some(FoldJob {
            tail: self.journal.tail(),
            from,
            to,
            // A removal that may be lost still is not in it: the images would lack what may end well then.
            state: self.durable_state.clone(),
            starts: self.journal.starts_after(from.segment).map(|(n, s)| (n, s.clone())).collect(),
            cut,
            images: self.images.clone(),
            damaged: (*self.fold.damaged).clone(),
            budget_bytes,
            gives_up: self.fold.unread.times >= READS_MAX,
        })
    }

    /// Whether what makes records void cannot be lost any more.
    pub(super) fn is_on_record(&self) -> bool {
        let standings =
            |state: &State| state.writers.iter().map(|w| w.standing).collect::<Vec<_>>();
        let is_same = standings(self.journal.state()) == standings(&self.durable_state);
        !self.is_being_recovered() && is_same
    }

    /// A job has ended, for a group with the cut that it was given.
    pub fn fold_done(
        &mut self,
        cut: tidelock_protocol::vector::CountVector,
        result: Result<Folded, FoldError>,
    ) {
        self.fold.is_running = false;
        let is_outdated = std::mem::take(&mut self.fold.is_outdated);
        match result.map_err(GroupError::from).and_then(|folded| self.record_fold(cut, folded)) {
            Ok(()) => {
                if is_outdated {
                    self.fold.blocked = None;
                }
                self.fold.last_error = None;
                self.fold.unread = Unread::default();
            }
            Err(error) => self.fold_failed(error),
        }
        self.storage.end_use_of_reserve();
        self.check_unfolded();
    }

    fn fold_failed(&mut self, error: GroupError) {
        self.fold.last_error = Some(error.to_string());
        match error {
            // Gets better; at the limit of unfolded bytes the group stalls and says so.
            GroupError::Fold(FoldError::Full(_)) | GroupError::Journal(JournalError::Full(_)) => {}
            GroupError::File(error) if error.is_full() => {}
            GroupError::Fold(FoldError::Unreadable(_)) => {
                let began = self.fold.pace.0;
                let Unread { times, not_before } = &mut self.fold.unread;
                *times += 1;
                *not_before = MonoNanos(began.0.saturating_add(READ_AGAIN_NANOS));
            }
            GroupError::Fold(FoldError::Journal(error)) => self.break_down(&error.into()),
            error => self.break_down(&error),
        }
    }

    fn record_fold(
        &mut self,
        cut: tidelock_protocol::vector::CountVector,
        folded: Folded,
    ) -> Result<(), GroupError> {
        if let Some(rate) = self.options.fold_rate_bytes_s {
            let took = u128::from(folded.bytes) * u128::from(NANOS) / u128::from(rate.max(1));
            let (began, _) = self.fold.pace;
            self.fold.pace.1 = MonoNanos(began.0.saturating_add(took as u64));
        }
        for found in folded.found {
            self.quarantine(found)?;
        }
        let is_blocked = folded.position == self.fold.position;
        if is_blocked {
            self.fold.blocked = Some((folded.position, cut));
        }
        let folding = self.fold.was_ahead.clone().filter(|(to, _)| *to > folded.position);
        let fold = FoldPosition {
            position: folded.position,
            oldest: self.fold.oldest.clone(),
            folding,
            damaged: folded.damaged,
        };
        fold::write_position(&self.storage, &fold)?;
        self.fold.position = fold.position;
        self.fold.ahead = fold.folding;
        self.fold.damaged = Arc::new(fold.damaged);
        if is_blocked {
            return Ok(());
        }
        self.fold.closed = self.fold.closed.split_off(&folded.position.segment);
        self.refresh_overlay()?;
        self.set_aside()?;
        self.journal.remove_before(folded.position)?;
        self.damage.is_due = true;
        Ok(())
    }

    /// Whether folding waits for its rate, or for a disk that did not read: [`Group::fold_job`] is to be asked again in a while.
    #[must_use]
    pub fn fold_is_paced(&self, now: Now) -> bool {
        let paced = self.options.fold_rate_bytes_s.is_some() && now.mono < self.fold.pace.1;
        paced || now.mono < self.fold.unread.not_before
    }

    /// Bytes of the journal that are not in the images.
    #[must_use]
    pub fn unfolded_bytes(&self) -> u64 {
        self.journal.bytes_after(self.fold.position)
    }

    /// What they take on disk.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.journal.stored_after(self.fold.position)
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
