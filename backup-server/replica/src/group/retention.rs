//! How long the past is kept, and what happens when the journal has reached its size.
//!
//! ```text
//!  in the images │ late │        window         │
//!  ──────────────┼──────┼───────────────────────┼─▶ journal
//!             position  target                 end
//! ```
//!
//! Records leave the window by time, measured back from the arrival of the newest record, so a group that is quiet
//! keeps its past. Arrivals are this server's, whatever clocks hosts have, and a step of its clock while it runs does
//! not move them (`arrival.rs`). They leave it by size, if the policy is to shorten it. Either way they leave it
//! segment by segment, only when the cut has them, and not while somebody holds them.
//!
//! Retroscope 3.2: the window-log is bounded, and what leaves it is compacted into the base.

use super::{Group, Stall};
use tidelock_planted::Bug;
use tidelock_protocol::message::CopyState;
use tidelock_storage::Storage;
use tidelock_store::journal::Closed;
use tidelock_store::journal::{Position, SEGMENT_HEADER_BYTES, Standing, WriterState};

/// What to do when the journal has reached its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtSizeMax {
    /// The window becomes shorter, and who holds what must go loses it, pins too. It is told.
    Shorten,
    /// Nothing is acknowledged until records have left the window: who writes much cannot erase the past.
    #[default]
    Stop,
}

/// How long the past is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The window, in milliseconds; 0: everything is folded as soon as it can be.
    pub window_ms: u64,
    /// Most bytes of the journal that are not in the images, as they are on disk.
    pub size_max_bytes: u64,
    /// What to do then.
    pub at_size_max: AtSizeMax,
}

impl Default for Retention {
    fn default() -> Self {
        Self { window_ms: 0, size_max_bytes: u64::MAX, at_size_max: AtSizeMax::Stop }
    }
}

/// Up to where to fold.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) to: Position,
    /// What can be seen from then on.
    pub(super) oldest: Closed,
    /// Less is seen than the window wants, because of the journal's size.
    pub(super) shortens: bool,
}

impl<S: Storage> Group<S> {
    /// Up to where records have left the window.
    pub(super) fn target(&self) -> Target {
        let retention = &self.options.retention;
        if tidelock_planted::is(Bug::FoldPassesTheWindow) {
            let (to, oldest) = (self.journal.durable().end(), self.fold.oldest.clone());
            return Target { to, oldest, shortens: false };
        }
        if retention.window_ms == 0 {
            let oldest = self.closed_now();
            return Target { to: self.journal.durable().end(), oldest, shortens: false };
        }
        let place = |segment: u64| Position { segment, offset: SEGMENT_HEADER_BYTES as u64 };
        let closed = self.fold.closed.range(self.after_fold()..);
        let (to, oldest) = (self.fold.position, self.fold.oldest.clone());
        let mut target = Target { to, oldest, shortens: false };
        let size_max = match retention.at_size_max {
            // The disk is full: better a shorter past than none that goes on. A part of it makes room for a while.
            _ if matches!(self.stall, Some(Stall::NoRoom(_))) => {
                let stored = self.stored_bytes();
                stored.saturating_sub((stored / 8).max(1))
            }
            AtSizeMax::Shorten => retention.size_max_bytes,
            AtSizeMax::Stop => u64::MAX,
        };
        let edge = self.edge();
        // Nothing that is behind the target is missed by either measure.
        for (segment, closed) in closed {
            let left = closed.arrived_ms <= edge;
            if !left && self.journal.stored_after(target.to) <= size_max {
                break;
            }
            let (to, oldest) = (place(*segment), closed.clone());
            target = Target { to, oldest, shortens: !left };
        }
        target
    }

    /// What arrived before has left the window by time.
    fn edge(&self) -> u64 {
        let now = match self.stall {
            // Nothing is taken, so nothing is newer: it goes on by the clock.
            Some(Stall::SizeMax) => self.journal.now_ms(),
            _ => self.durable_state.arrived_ms,
        };
        now.saturating_sub(self.options.retention.window_ms)
    }

    /// The target, as far as it is not held.
    pub(super) fn target_not_held(&self) -> Target {
        let mut target = self.target();
        if tidelock_planted::is(Bug::FoldPassesTheWindow) {
            return target;
        }
        if let Some((position, _)) = self.fold.holds.least() {
            // A held point is found by its cut, whatever times can be asked for.
            target.to = target.to.min(position);
        }
        target
    }

    /// At a limit nothing more is taken until the fold has caught up. Two kinds of records are let
    /// through, because stopping them would be for ever: those of a resync, which cannot be folded
    /// before its end, and those that come while what is next depends on another writer's records
    /// that have not arrived. Their bound is the disk's room.
    pub(super) fn check_unfolded(&mut self) {
        let retention = self.options.retention;
        let (unfolded, max) = (self.unfolded_bytes(), self.options.unfolded_max_bytes);
        let resyncing =
            |of: &WriterState| of.copy == CopyState::Resyncing && of.standing != Standing::Removed;
        let resyncing = self.journal.state().writers.iter().any(resyncing);
        let exempt = resyncing || self.needs_records_to_fold();
        let (size_max, stored) = (retention.size_max_bytes, self.stored_bytes());
        if stored >= size_max && retention.at_size_max == AtSizeMax::Shorten && !resyncing {
            self.give_up_holds();
        }
        let late = |group: &Self| match retention.window_ms {
            0 => unfolded,
            _ => {
                let to = group.target_not_held().to;
                group.journal.bytes_between(group.fold.position, to)
            }
        };
        // To find out what is late takes a walk over the segments: only when it can matter.
        let late = if unfolded < max - max / 8 { 0 } else { late(self) };
        let stops = retention.at_size_max == AtSizeMax::Stop;
        match self.stall {
            None if stops && stored >= size_max && !exempt => self.stall(Stall::SizeMax),
            None if late >= max && !exempt => {
                // An export must not stop replication: it ends with an error instead.
                // A pin does, unless the operator prefers to lose it.
                let revoked = retention.window_ms == 0 && self.revoke_for_room();
                if !revoked {
                    self.stall(Stall::FoldBehind);
                }
            }
            Some(Stall::FoldBehind) if late < max - max / 8 || self.fold_is_blocked() => {
                self.stall = None;
                self.tell_stall();
            }
            // One that came while nothing was taken must not keep it so.
            Some(Stall::FoldBehind) if retention.window_ms == 0 => {
                self.revoke_for_room();
            }
            Some(Stall::SizeMax) if stored < size_max - size_max / 8 || exempt => {
                self.stall = None;
                self.tell_stall();
            }
            _ => {}
        }
        self.note_window();
    }

    /// Whether only more records can bring about that there is something to fold, and no time that passes.
    fn needs_records_to_fold(&self) -> bool {
        let windowed = self.options.retention.window_ms > 0;
        let is_none = || self.fold.closed.range(self.after_fold()..).next().is_none();
        self.fold_is_blocked() || windowed && is_none()
    }

    /// The first segment of which the beginning is ahead of the fold.
    fn after_fold(&self) -> u64 {
        self.fold.position.max(self.journal.start()).segment + 1
    }

    /// Takes away what may be lost for replication to go on. Whether there was any.
    fn revoke_for_room(&mut self) -> bool {
        match self.options.retention.at_size_max {
            AtSizeMax::Shorten => self.fold.holds.revoke_all(),
            AtSizeMax::Stop => self.fold.holds.revoke_all_but_pins(),
        }
    }

    /// Whoever holds what must leave the journal loses it.
    fn give_up_holds(&mut self) {
        let to = self.target().to;
        while self.fold.holds.least().is_some_and(|(position, _)| position < to) {
            for why in self.fold.holds.revoke_least() {
                self.notices.push(format!(
                    "the journal has reached retention.size_max: {why} has lost its point in time"
                ));
            }
        }
    }

    /// A fold begins that makes the window shorter than wanted.
    pub(super) fn note_shortened(&mut self) {
        if self.fold.shortened {
            return;
        }
        self.fold.shortened = true;
        let newest = self.durable_state.arrived_ms;
        let seconds = newest.saturating_sub(self.fold.oldest.arrived_ms) / 1000;
        let why = match self.stall {
            Some(Stall::NoRoom(_)) => "the disk is full",
            _ => "the journal has reached retention.size_max",
        };
        self.notices.push(format!(
            "{why}: the window is shortened to {seconds} s (wanted: {} s)",
            self.options.retention.window_ms / 1000
        ));
    }

    /// Whether less can be seen than the window wants.
    pub(super) fn is_shortened(&self) -> bool {
        self.options.retention.window_ms > 0 && self.fold.oldest.arrived_ms > self.edge()
    }

    /// Says so when the window is whole again.
    fn note_window(&mut self) {
        if self.fold.shortened && !self.is_shortened() {
            self.fold.shortened = false;
            self.notices.push("the window is whole again".to_owned());
        }
    }
}
