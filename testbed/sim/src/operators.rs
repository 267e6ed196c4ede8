//! Operators at the backup: they order recoveries, wait for the answers of production's loop, and go away now and then.

use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::group_driver::Asker;
use crate::schedule::{MS, S};
use crate::world::{Event, World, note};
use std::collections::BTreeSet;
use tidelock_protocol::ids::MonoNanos;
use tidelock_replica::group::RecoverError;
use tidelock_replica::group_loop::{Answer, Order, Wait};

/// So much later than it says a wait is over, on a slow disk.
const LATE_NS: u64 = 10 * S;

/// A group's operators.
#[derive(Debug, Default)]
pub(crate) struct Operators {
    last: Asker,
    /// The one who waits for an answer, and has stated that the primary is dead, or not.
    waits: Option<(Asker, bool)>,
    /// The end of the wait that was told last.
    due: Option<MonoNanos>,
    /// Operators who have gone away.
    gone: BTreeSet<Asker>,
    /// A recovery may have begun before whoever waited for it went away.
    may_have_begun: bool,
}

impl Operators {
    /// An operator who orders something.
    pub(crate) fn newcomer(&mut self) -> Asker {
        self.last += 1;
        self.last
    }

    /// Operators who have gone away.
    pub(crate) fn gone(&self) -> &BTreeSet<Asker> {
        &self.gone
    }

    /// True if somebody has asked for a recovery and not taken that back.
    pub(crate) fn want_it(&self) -> bool {
        self.waits.is_some() || self.may_have_begun
    }

    /// Ends all waits, because the server is gone. True if somebody waited.
    pub(crate) fn hang_up(&mut self) -> bool {
        let waited = self.waits.take().is_some();
        self.may_have_begun |= waited;
        waited
    }
}

impl World {
    /// An operator orders the recovery of a group.
    pub fn recover(&mut self, group: usize) -> Checked {
        let goes_on = !self.faulty && !self.is_lost(group) && !self.is_switched(group);
        let slot = &self.backup.groups[group];
        if slot.recovered.is_some() || goes_on || slot.operators.waits.is_some() {
            return Ok(());
        }
        let Some(boot) = self.backup.run() else {
            self.schedule.after(200 * MS, Event::Recover { group });
            return Ok(());
        };
        let primary_declared_dead = self.is_dead(group) && self.switch_rng.chance(1, 2);
        let slot = &mut self.backup.groups[group];
        let asker = slot.operators.newcomer();
        slot.operators.waits = Some((asker, primary_declared_dead));
        slot.operators.due = None;
        let order = Order::Recover { primary_declared_dead, point: None, accepts_damage: false };
        slot.inbox.push_back(crate::backup::Incoming::Order(order, asker));
        self.wake_group(group, boot, 1000);
        Ok(())
    }

    /// An operator has had enough. Another one, or the same, may order it again.
    pub(crate) fn operator_leaves(&mut self, group: usize, asker: Asker) {
        let slot = &mut self.backup.groups[group];
        if slot.operators.waits.take_if(|(of, _)| *of == asker).is_none() {
            return;
        }
        note!(self, "operator {asker} of group {group} goes away");
        let slot = &mut self.backup.groups[group];
        let has_begun = slot.group().is_some_and(|of| of.state().recovered().is_some());
        slot.operators.gone.insert(asker);
        slot.operators.may_have_begun |= has_begun;
        let after = self.switch_rng.range(100 * MS..3 * S);
        self.schedule.after(after, Event::Recover { group });
    }

    /// The host has power: whoever has stated that the group's primary is dead takes that back.
    pub(crate) fn is_not_dead(&mut self, host: usize) {
        for group in 0..self.plan.groups.len() {
            let is_here =
                self.plan.groups[group].members().any(|vm| self.plan.vms[vm].host == host);
            if let Some((asker, true)) = self.backup.groups[group].operators.waits
                && is_here
            {
                self.operator_leaves(group, asker);
            }
        }
    }

    /// No more faults: nobody recovers a group that goes on.
    pub(crate) fn operators_go(&mut self) {
        for group in 0..self.plan.groups.len() {
            if let Some((asker, _)) = self.backup.groups[group].operators.waits
                && !self.is_lost(group)
                && !self.is_switched(group)
            {
                self.operator_leaves(group, asker);
            }
        }
    }

    /// An operator is told that the order waits, and may go away for it.
    pub(crate) fn order_waits(&mut self, group: usize, asker: Asker, wait: &Wait) {
        note!(self, "group {group}: the order of operator {asker} waits: {wait:?}");
        let now = self.backup_now().mono;
        let due = match wait {
            Wait::Lease { remaining_ms, .. } => Some(now.plus_ms(*remaining_ms)),
            Wait::Room(_) => None,
        };
        self.backup.groups[group].operators.due = due;
        if let (Some(at), Wait::Lease { remaining_ms, .. }) = (due, wait) {
            self.later(Later::OrderIsDue { group, asker, at }, remaining_ms * MS + LATE_NS);
        }
        if self.switch_rng.chance(1, 2) {
            let after = self.switch_rng.range(MS..S);
            self.later(Later::OperatorLeaves { group, asker }, after);
        }
    }

    /// A wait is over when its end has come, unless another one was told since.
    pub(crate) fn order_is_due(&mut self, group: usize, asker: Asker, at: MonoNanos) -> Checked {
        let slot = &self.backup.groups[group];
        let late_ns = slot.hangs_until_ns + LATE_NS;
        let now_ns = self.schedule.now_ns();
        if late_ns > now_ns {
            self.later(Later::OrderIsDue { group, asker, at }, late_ns - now_ns);
            return Ok(());
        }
        let waits = slot.operators.waits.is_some_and(|(of, _)| of == asker);
        let is_late = waits && slot.operators.due == Some(at) && slot.group().is_some();
        check(!is_late, Checker::ComesBack, || {
            format!("group {group}: the order of operator {asker} was to be tried again at {at}")
        })
    }

    /// An operator has an answer.
    pub(crate) fn order_answered(&mut self, group: usize, asker: Asker, answer: Answer) -> Checked {
        let slot = &mut self.backup.groups[group];
        slot.operators.waits.take_if(|(of, _)| *of == asker);
        let Answer::Recovered(recovered) = answer else { return Ok(()) };
        match recovered {
            Ok(_) => {
                self.counts.recoveries += 1;
                // A server that stops right after it has answered is looked at when it is back.
                self.backup.groups[group].operators.may_have_begun = true;
                Ok(())
            }
            Err(error @ (RecoverError::Initialising { .. } | RecoverError::Seeded { .. })) => {
                note!(self, "group {group} cannot be recovered: {error}");
                self.backup.groups[group].initialising = true;
                check(!self.is_whole_group(group), Checker::Prefix, || {
                    format!("group {group} was whole, and cannot be recovered")
                })
            }
            Err(error) => {
                note!(self, "group {group} cannot be recovered now: {error}");
                // A disk that has failed may have it all the same.
                let failed = matches!(error, RecoverError::Journal(_));
                self.backup.groups[group].operators.may_have_begun |= failed;
                self.schedule.after(S, Event::Recover { group });
                Ok(())
            }
        }
    }
}
