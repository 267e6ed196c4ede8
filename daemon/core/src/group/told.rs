//! Clients that may have been told what a disaster would undo.
//!
//! ```text
//!             replies leave unheld                  they are held again, and C covers what P was then
//!  nobody ─────────────────────────► may be told ─────────────────────────────────────────────────────► nobody
//! ```
//!
//! Replies leave unheld in mode async, whoever wanted it; while the gate's rules or its interface are gone; and while the
//! gate is open although nothing can be recovered yet. What left while the backup's disks were not whole is covered by no
//! C before they are.

use super::policy::is_unrecoverable;
use super::{GroupLoop, Surroundings};
use crate::degrade::{Sight, Stamps};
use crate::owner::Phase;
use crate::status::Told;
use tidelock_protocol::message::Mode;

/// Stamps that clients may have been told of and that C does not cover.
#[derive(Debug, Default)]
pub(super) struct Telling {
    /// The time by the wall clock since when something was; `None`: nothing.
    since_unix_ms: Option<u64>,
    leaves: bool,
    /// P when replies were held again, once it is complete.
    left: Option<Stamps>,
    needs_whole: bool,
}

impl Telling {
    /// Looks once. `leaves`: replies leave unheld, or may have since the last look.
    fn look(&mut self, sight: &Sight, leaves: bool) {
        self.leaves = leaves;
        if leaves {
            self.since_unix_ms.get_or_insert(sight.unix_ms);
            self.left = None;
            self.needs_whole |= !sight.is_whole;
        } else if self.since_unix_ms.is_some() {
            if self.left.is_none() && sight.is_complete && sight.is_applied {
                self.left = Some(sight.pending.clone());
            }
            let is_covered = self.left.as_ref().is_some_and(|left| sight.covers(left));
            if is_covered && sight.is_open && (sight.is_whole || !self.needs_whole) {
                *self = Self::default();
            }
        }
    }
}

impl GroupLoop {
    /// Sees to it that [`told`](Self::told) is of this moment.
    pub(super) fn look_at_told(&mut self, around: &mut dyn Surroundings) {
        let members = around.members();
        let mut phases = members.iter().filter_map(|member| Some(member.writer.as_ref()?.phase));
        let is_over = self.is_shut() || phases.clone().any(|phase| phase == Phase::Fenced);
        let is_early =
            phases.any(is_unrecoverable) && around.gate().is_some_and(|gate| gate.is_open);
        let leaves = (self.mode() == Mode::Async && !is_over) || around.left_unheld() || is_early;
        if leaves || self.telling.since_unix_ms.is_some() {
            let sight = self.sight(&members, around);
            self.telling.look(&sight, leaves);
        }
    }

    /// True if clients may have been told what a disaster would undo. A run before may have put it on record.
    pub(super) fn told(&self) -> Option<Told> {
        let since = [self.telling.since_unix_ms, self.degrade.since_unix_ms()];
        let since_unix_ms = since.into_iter().flatten().min()?;
        Some(Told { since_unix_ms, leaves: self.telling.leaves })
    }
}
