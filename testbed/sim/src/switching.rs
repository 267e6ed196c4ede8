//! The planned switch of a group to the backup site, as `daemon/src/host/switching.rs` does it: everything at the
//! backup, on record, the gates shut, and only then the leases given up.

use crate::failure::Checked;
use crate::faults::Later;
use crate::plant::{OnTheWay, Plant};
use crate::schedule::{MS, S};
use crate::world::{Event, World, note};
use tidelock_daemon::link::port::ToLink;
use tidelock_daemon::sequencer::RequestId;

/// How often the operator looks, and how many times.
const LOOK_NS: u64 = 3 * MS;
const LOOKS_MAX: u32 = 2_000;

impl World {
    /// Whether the group was switched over.
    #[must_use]
    pub fn is_switched(&self, group: usize) -> bool {
        self.plan.groups[group].members().any(|vm| self.vms[vm].switched)
    }

    /// Whether its primary site will not go on with it.
    #[must_use]
    pub fn is_leaving(&self, group: usize) -> bool {
        self.is_lost(group) || self.is_switched(group)
    }

    /// Lets no request in, and switches the group over as soon as it is quiet. If it never is, requests are taken
    /// again. It is recovered in any case: where it was not switched the grace is waited out.
    pub(crate) fn try_switch_over(&mut self, group: usize, tries: u32) -> Checked {
        let gone = self.backup.groups[group].recovered.is_some() || self.is_leaving(group);
        if gone || !self.faulty {
            return self.let_go(group);
        }
        if tries == 0 {
            self.hold(group);
        }
        let is_quiet = self.is_quiet(group);
        if !is_quiet && tries < LOOKS_MAX {
            let tries = tries + 1;
            self.later(Later::SwitchOver { group, tries }, LOOK_NS);
            return Ok(());
        }
        let after = self.rng.range(MS..S);
        self.schedule.after(after, Event::Recover { group });
        if is_quiet {
            self.switch_over(group);
            return Ok(());
        }
        self.let_go(group)
    }

    fn hold(&mut self, group: usize) {
        for vm in self.plan.groups[group].writers().collect::<Vec<_>>() {
            if let Some(run) = &mut self.vms[vm].run {
                run.holds = true;
            }
        }
    }

    fn let_go(&mut self, group: usize) -> Checked {
        for vm in self.plan.groups[group].writers().collect::<Vec<_>>() {
            let state = &mut self.vms[vm];
            let Some(run) = state.run.as_mut().filter(|run| run.holds && !state.switched) else {
                continue;
            };
            run.holds = false;
            let is_taken = |request: &u64| {
                run.submitted.contains_key(&RequestId(*request))
                    || run.held_back.contains_key(request)
                    || run.reads.contains(request)
                    || run.flushes.contains_key(request)
            };
            let waiting: Vec<_> =
                state.guest.asked.keys().copied().filter(|request| !is_taken(request)).collect();
            for request in waiting {
                self.submit(vm, request)?;
            }
        }
        Ok(())
    }

    /// Whether everything of the group is at the backup, and nothing is held.
    fn is_quiet(&mut self, group: usize) -> bool {
        let members: Vec<_> = self.plan.groups[group].members().collect();
        let quiet = |vm: &usize| {
            self.vms[*vm].run.as_ref().is_some_and(|run| {
                let is_writer = self.plan.vms[*vm].is_writer();
                let is_whole = run.attached && run.copying.is_whole() && run.is_settled();
                let gate = run.gate.state();
                let is_held = !run.held.is_empty() || !run.kernel_queue.is_empty();
                (is_whole || !is_writer) && !is_held && !run.draining && !gate.fenced
            })
        };
        members.iter().all(quiet) && members.iter().all(|vm| self.is_covered(*vm))
    }

    fn switch_over(&mut self, group: usize) {
        note!(self, "group {group} is switched over");
        self.counts.switches += 1;
        let members: Vec<_> = self.plan.groups[group].members().collect();
        for vm in &members {
            self.vms[*vm].switched = true;
        }
        for vm in members {
            if self.plant != Some(Plant::OnTheWay(OnTheWay::GivenUpBeforeShut)) {
                self.vms[vm].run.as_ref().expect("quiet").gate.shut();
            }
            self.tell_link(vm, ToLink::GiveUpLease(None));
        }
    }
}
