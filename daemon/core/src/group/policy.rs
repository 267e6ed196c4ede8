//! The mode of a group: what the operator wants, what the policy makes of it, and who has to hear of it in which order.

use super::{GroupLoop, Member, Surroundings};
use crate::degrade::{Sight, Standing, Step, mode_at_start};
use crate::link::port::ToLink;
use crate::owner::{Phase, ToOwner};
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Mode;

impl GroupLoop {
    /// Before the link runs: the mode of the configuration comes into force, if it may.
    pub fn begin(&mut self, around: &mut dyn Surroundings) {
        let members = around.members();
        if members.iter().any(|member| member.writer.is_some())
            && !tidelock_planted::is(Bug::AsyncBeforeContact)
        {
            self.degrade.await_contact();
        }
        self.gate_and_writers(mode_at_start(self.settings.mode), self.mode(), around);
        self.look_at_told(around);
        // Packets that a killed run had let out are asked for, also on behalf of others.
        if self.degrade.since_unix_ms().is_some() && self.settings.is_of_several {
            ask_floor(around);
        }
    }

    /// Follows the policy. To be called several times in the shortest time that can be configured. Returns what has
    /// happened, if anything has.
    pub fn look(&mut self, around: &mut dyn Surroundings) -> Option<Step> {
        let step = self.follow_policy(around);
        self.look_at_told(around);
        step
    }

    fn follow_policy(&mut self, around: &mut dyn Surroundings) -> Option<Step> {
        let members = around.members();
        let opens_unreached = opens_unreached(&members, around);
        let is_in_contact = || members.iter().all(|member| member.link.is_policy_kept());
        if self.degrade.awaits_contact() && (opens_unreached || is_in_contact()) {
            let before = self.mode();
            self.degrade.has_contact();
            self.change_mode(before, around);
            if self.mode() != before {
                let (group, mode) = (&self.settings.name, self.mode());
                tracing::info!(group, %mode, "in force from now on");
            }
        }
        if opens_unreached && self.mode() != Mode::Async {
            return self.open_unreached(around);
        }
        if self.settings.after_ms.is_none() && self.degrade.standing() == Standing::Holding {
            return None;
        }
        let (sight, before) = (self.sight(&members, around), self.mode());
        let since_unix_ms = self.degrade.since_unix_ms().unwrap_or(sight.unix_ms);
        // On record first: nothing leaves that a run after this one does not know of.
        if self.degrade.is_about_to_open(&sight) && !self.is_on_record(since_unix_ms, around) {
            return None;
        }
        let step = self.degrade.look(&sight)?;
        self.tell_policy(around);
        self.change_mode(before, around);
        let group = &self.settings.name;
        match step {
            Step::Open { .. } => tracing::error!(
                group,
                after_ms = self.settings.after_ms,
                "DEGRADED: replies have waited for the backup for too long and leave now; from here on clients \
                 may see what a disaster undoes"
            ),
            Step::Hold => tracing::warn!(
                group,
                "the backup has caught up: replies are held again; degraded until it has all that has left"
            ),
            Step::Covered => {
                if let Err(error) = around.forget_degraded() {
                    tracing::warn!(group, %error, "the next start takes it to be degraded");
                }
                tracing::info!(group, "no longer degraded: the backup has all that has left");
            }
        }
        Some(step)
    }

    fn is_on_record(&mut self, since_unix_ms: u64, around: &mut dyn Surroundings) -> bool {
        let Err(error) = around.keep_degraded(since_unix_ms) else { return true };
        if !std::mem::replace(&mut self.error_said, true) {
            let group = &self.settings.name;
            tracing::error!(group, %error, "replies are held: it cannot be put on record that they would not be");
        }
        false
    }

    fn open_unreached(&mut self, around: &mut dyn Surroundings) -> Option<Step> {
        let unix_ms = around.clocks().wall_ms;
        if !self.is_on_record(self.degrade.since_unix_ms().unwrap_or(unix_ms), around) {
            return None;
        }
        let before = self.mode();
        let step = self.degrade.open_unreached(unix_ms);
        self.tell_policy(around);
        self.change_mode(before, around);
        tracing::error!(
            group = self.settings.name,
            "UNPROTECTED: the backup was not reached since the start, and clients are answered all the same; from \
             here on they may see what a disaster undoes. If the group was recovered at the backup meanwhile, both \
             sites answer"
        );
        Some(step)
    }

    /// The operator wants this mode.
    pub fn want_mode(&mut self, mode: Mode, around: &mut dyn Surroundings) {
        let before = self.mode();
        self.wanted = mode;
        // An operator who gives this order knows what is given up, but not for other members.
        if mode == Mode::Async && !self.settings.is_of_several {
            self.degrade.has_contact();
        }
        self.change_mode(before, around);
        self.tell_policy(around);
        self.look_at_told(around);
    }

    fn tell_policy(&self, around: &mut dyn Surroundings) {
        let policy = self.policy();
        for member in 0..around.members().len() {
            around.tell_link(member, ToLink::Policy(policy));
        }
    }

    /// The mode in force may be another one than before.
    fn change_mode(&self, before: Mode, around: &mut dyn Surroundings) {
        let mode = self.mode();
        self.gate_and_writers(before, mode, around);
        // Tags that members have heard in mode async may say nothing of what it depends on, here
        // and on other hosts: they are held until every writer has said how far it is.
        if before == Mode::Async && mode != before && self.settings.is_of_several {
            ask_floor(around);
        }
    }

    fn gate_and_writers(&self, before: Mode, mode: Mode, around: &mut dyn Surroundings) {
        if before == mode {
            return;
        }
        // The gate first: towards async nothing is lost by it; away from async nothing that
        // depends on later writes can leave any more.
        around.set_gate_mode(mode);
        for (nth, member) in around.members().iter().enumerate() {
            if member.writer.is_some() {
                around.tell_owner(nth, ToOwner::SetMode(mode));
            }
        }
    }

    pub(super) fn sight(&self, members: &[Member], around: &dyn Surroundings) -> Sight {
        let clocks = around.clocks();
        let writers = || members.iter().filter_map(|member| member.writer.as_ref());
        let links = || members.iter().map(|member| &member.link);
        let is_in = |phase| writers().any(|writer| writer.phase == phase);
        let gate = around.gate();
        let (committed, watermark) = match &gate {
            Some(gate) => (gate.committed.clone(), gate.watermark),
            None => writers()
                .map(|writer| writer.told.clone())
                .reduce(|(mut committed, watermark), told| {
                    committed.merge(&told.0);
                    (committed, watermark.max(told.1))
                })
                .unwrap_or_default(),
        };
        Sight {
            now: clocks.now,
            unix_ms: clocks.wall_ms,
            may_open: self.wanted != Mode::Async
                && links().all(|link| link.is_policy_kept())
                && !is_in(Phase::Fenced)
                && !self.is_shut()
                && !around.is_stopping(),
            is_open: match &gate {
                Some(gate) => gate.is_open,
                None => {
                    self.has_lease(members, clocks.now)
                        && !is_in(Phase::Resyncing)
                        && !is_in(Phase::Overflowed)
                }
            },
            is_whole: !writers().any(|writer| writer.gap.is_some()),
            is_complete: self.mode() != Mode::Async
                && members.iter().all(|member| member.control.awaits_floor().is_none()),
            is_applied: gate.as_ref().is_none_or(|gate| gate.is_applied),
            form: self.settings.form,
            write_age_ns: links().map(|link| link.lag_ns(clocks.now)).max().unwrap_or(0),
            round_trip_ns: links().map(|link| link.round_trip_ns()).max().unwrap_or(0),
            pending: members.iter().map(|member| member.control.pending()).collect(),
            committed,
            watermark,
        }
    }

    /// A group that nobody outside hears of has a lease all the same.
    fn has_lease(&self, members: &[Member], now: MonoNanos) -> bool {
        let until = |at: MonoNanos| at.plus_ms(self.settings.lease_ms);
        let mut links = members.iter().map(|member| &member.link);
        links.all(|link| link.lease_sent_at().is_some_and(|at| now < until(at)))
    }
}

/// True if the backup has nothing of a writer in this phase that could be recovered, or is not known to.
pub(super) fn is_unrecoverable(phase: Phase) -> bool {
    matches!(phase, Phase::Initialising | Phase::WaitingForBackup)
}

fn ask_floor(around: &mut dyn Surroundings) {
    for member in 0..around.members().len() {
        around.tell_link(member, ToLink::AskFloor { everyone: true });
    }
}

/// True if clients are to be answered although the backup was not reached since the start.
fn opens_unreached(members: &[Member], around: &dyn Surroundings) -> bool {
    let writers = || members.iter().filter_map(|member| member.writer.as_ref());
    writers().any(|writer| writer.phase == Phase::Unrecorded)
        && writers().all(|writer| writer.may_answer_unreached)
        && !around.is_stopping()
}
