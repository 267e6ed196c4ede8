//! The planned switch of a group to the backup site: operators who tell the hosts one after the other, and the checkers.
//!
//! At every step of it a host may die, lose its connection or its power, or be told to take it back. The checkers:
//! - whoever is told to go over is told so when every writer of the group is drained, or has gone back without being
//!   asked, which the backup has not heard of; and nobody goes over who was not told ([`Checker::Switch`]);
//! - nothing leaves a host that has given up its lease ([`Checker::Fence`]);
//! - a group that all its hosts have handed over is recovered with all that was ever admitted;
//! - what is not over in the end goes on serving, and nothing is under way ([`Checker::ComesBack`]).

use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::schedule::{MS, S};
use crate::world::{Event, Run, World, note};
use std::collections::BTreeSet;
use std::time::Duration;
use tidelock_daemon_core::handover::Step;
use tidelock_protocol::ids::{Epoch, WriterId};
use tidelock_protocol::message::Message;
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::Link;

/// How often a host looks.
const LOOK_NS: u64 = 8 * MS;
/// Operators look again after so long whether all hosts have gone over, and so many times.
const AGAIN_NS: u64 = 3 * S;
const TRIES_MAX: u32 = 6;
/// So long after a host has gone over the operators look in any case.
const FOLLOWED_NS: u64 = 30 * S;

/// Draws when the first group is switched over, if several hosts have to agree on it. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    let hosts: BTreeSet<_> = plan.groups[0].members().map(|vm| plan.vms[vm].host).collect();
    if hosts.len() > 1 && rng.chance(1, 3) {
        plan.switch_after_ns = Some(rng.range(300 * MS..3 * S));
        // Hosts come to agree only if not everything is broken all the time: what breaks is in the middle of the switch.
        plan.fault_ns *= 6;
    }
    plan.switch_seed = rng.number();
}

/// What goes wrong in the middle of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// The daemon is killed.
    Kill,
    /// The host loses power.
    Power,
    /// Its connection breaks.
    Break,
    /// Its network stops, in one direction or both.
    Partition,
    /// The backup is killed.
    Backup,
    /// The operator takes it back.
    TakeBack,
    /// The daemon is stopped.
    Stop,
}

const STRIKES: [Strike; 7] = [
    Strike::Kill,
    Strike::Power,
    Strike::Break,
    Strike::Partition,
    Strike::Backup,
    Strike::TakeBack,
    Strike::Stop,
];

/// What the checkers know of a member.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing {
    /// It has said that it is ready, and was not told since that nobody counts on it.
    said: bool,
    /// It goes on all the same: its host has died, or could not ask.
    went_back: bool,
    /// It was told to go over.
    told_to_go: bool,
    /// It is on record at its host, also if that forgets it.
    pub(crate) over: bool,
    /// Its lease is given up.
    pub(crate) gave_up: bool,
}

// ---- operators

impl World {
    /// Whether a host has switched the group over.
    #[must_use]
    pub fn is_switched(&self, group: usize) -> bool {
        self.plan.groups[group].members().any(|vm| self.vms[vm].standing.over)
    }

    fn is_switched_by_all(&self, group: usize) -> bool {
        self.plan.groups[group].members().all(|vm| self.vms[vm].standing.over)
    }

    /// Whether its primary site will not go on with it.
    #[must_use]
    pub fn is_leaving(&self, group: usize) -> bool {
        self.is_lost(group) || self.is_switched(group)
    }

    pub(crate) fn members_on(&self, host: usize, group: usize) -> Vec<usize> {
        let members = self.plan.groups[group].members();
        members.filter(|vm| self.plan.vms[*vm].host == host).collect()
    }

    fn hosts_with(&self, group: usize) -> BTreeSet<usize> {
        self.plan.groups[group].members().map(|vm| self.plan.vms[vm].host).collect()
    }

    /// The operators of all hosts are told, each at its own time; now and then one is forgotten. `recovers`: the group
    /// is recovered in any case.
    pub(crate) fn switch_over(&mut self, group: usize, tries: u32, recovers: bool) {
        let gone = self.backup.groups[group].recovered.is_some() || self.is_lost(group);
        // Who has switched over together with others is followed, also when nothing goes wrong any more.
        if gone || !self.faulty && !self.is_switched(group) {
            return;
        }
        for host in self.hosts_with(group) {
            if tries == 0 && self.switch_rng.chance(1, 12) {
                continue;
            }
            let after = self.switch_rng.range(MS..1_500 * MS);
            self.later(Later::SwitchHost { host, group }, after);
        }
        let tries = tries + 1;
        self.later(Later::SwitchEnds { group, tries, recovers }, AGAIN_NS);
    }

    /// The operators look whether all hosts have gone over. If only some have, the others are told again, or the
    /// leases of those are waited out.
    pub(crate) fn switch_ends(&mut self, group: usize, tries: u32, recovers: bool) {
        if self.backup.groups[group].recovered.is_some() {
            return;
        }
        let (all, some) = (self.is_switched_by_all(group), self.is_switched(group));
        let must = some && !self.faulty;
        let may = tries < TRIES_MAX && self.switch_rng.chance(if some { 3 } else { 2 }, 4);
        let again = !all && (must || may);
        note!(self, "group {group} is switched over by all: {all}, by some: {some}");
        if again {
            return self.switch_over(group, tries, recovers);
        }
        if some || recovers && self.faulty {
            self.schedule.after(MS, Event::Recover { group });
        }
    }

    /// A host's operator begins.
    pub(crate) fn switch_host(&mut self, host: usize, group: usize) -> Checked {
        let here = self.members_on(host, group);
        let is_over = here.iter().any(|vm| self.vms[*vm].standing.over);
        // While links are narrow and nothing else goes wrong nobody begins, except to follow another host.
        let is_followed = self.is_switched(group);
        let is_late = !self.faulty && self.squeeze.is_some() && !is_followed;
        let is_gone = self.backup.groups[group].recovered.is_some() || here.is_empty();
        let Some(daemon) = &self.hosts[host].daemon else { return Ok(()) };
        let run = daemon.run;
        let is_under_way = daemon.groups.get(&group).is_none_or(|of| of.group.is_switching());
        if is_over || is_late || is_gone || is_under_way {
            return Ok(());
        }
        let may = self.with_group(host, group, |of, here| of.check_switch(here))?;
        if let Some(Err(why)) = may {
            note!(self, "host {host} cannot switch group {group} over: {why}");
            // No waiting mends a disk that has failed a flush: the operator does as the daemon says.
            let is_poisoned = |vm: &usize| {
                let run = self.vms[*vm].run.as_ref();
                run.is_some_and(|run| !run.poisoned.is_empty() && !run.draining)
            };
            if !self.faulty && here.iter().any(is_poisoned) {
                self.stop_daemon(host);
            }
            if self.faulty || is_followed {
                let after = self.switch_rng.range(100 * MS..400 * MS);
                self.later(Later::SwitchHost { host, group }, after);
            }
            return Ok(());
        }
        note!(self, "host {host} switches group {group} over");
        let rng = &mut self.switch_rng;
        let drain_max = Duration::from_millis(rng.range(500..3_000));
        let others_max = Duration::from_millis(rng.range(300..4_000));
        let patience = if rng.chance(1, 6) { rng.range(MS..2 * S) } else { 60 * S };
        self.with_group(host, group, |of, here| of.begin_switch(drain_max, others_max, here))?;
        let wanted_until_ns = self.schedule.now_ns() + patience;
        let daemon = self.hosts[host].daemon.as_mut().expect("just seen");
        daemon.groups.get_mut(&group).expect("just seen").wanted_until_ns = wanted_until_ns;
        self.schedule.after(LOOK_NS, Event::Switch { host, group, run });
        Ok(())
    }

    // ---- a host

    /// The group's loop looks at its switch.
    pub fn switch_event(&mut self, host: usize, group: usize, run: Run) -> Checked {
        let (now, now_ns) = (self.host_now(host), self.schedule.now_ns());
        let Some(daemon) = self.hosts[host].daemon.as_mut().filter(|daemon| daemon.run == run)
        else {
            return Ok(());
        };
        let of = daemon.groups.get_mut(&group).expect("it has a switch under way");
        if now_ns < of.wanted_until_ns {
            // The operator waits.
            let _ = of.group.switch_state(now);
        }
        let step = self.with_group(host, group, |of, here| of.look_at_switch(here))?.flatten();
        let Some(step) = step else { return Ok(()) };
        match &step {
            Step::Over => note!(self, "host {host} has switched group {group} over"),
            Step::GoOn(why) => {
                note!(self, "host {host} goes on with group {group}: {why}");
                self.goes_on(host, group);
                return Ok(());
            }
            _ => {}
        }
        if step != Step::Wait {
            self.strike_now_and_then(host, group, if step == Step::Over { 3 } else { 8 });
        }
        if step != Step::Over {
            let after = if step == Step::Wait { LOOK_NS } else { 1 };
            self.schedule.after(after, Event::Switch { host, group, run });
        }
        Ok(())
    }

    /// A host says of a member that it is ready.
    pub(crate) fn says_ready(&mut self, vm: usize) {
        let Standing { over, gave_up, .. } = self.vms[vm].standing;
        let before = Standing { over, gave_up, ..Standing::default() };
        self.vms[vm].standing = Standing { said: true, ..before };
    }

    /// No run after this one serves the group. `false`: it cannot be put on record.
    pub(crate) fn put_on_record(
        &mut self,
        host: usize,
        group: usize,
        at_unix_ms: u64,
    ) -> Checked<bool> {
        let here = self.members_on(host, group);
        let fails = here.iter().any(|vm| self.vms[*vm].errors_one_in > 0);
        if fails && self.switch_rng.chance(1, 3) {
            return Ok(false);
        }
        if self.records(host, group).keep_switched(Epoch(0), at_unix_ms).is_err() {
            return Ok(false);
        }
        self.is_on_record(host, group)?;
        Ok(true)
    }

    /// A host has it on record that the group is switched over.
    fn is_on_record(&mut self, host: usize, group: usize) -> Checked {
        note!(self, "host {host} has it on record that group {group} is switched over");
        self.check_goes_over(host, group)?;
        for vm in self.members_on(host, group) {
            self.vms[vm].standing.over = true;
        }
        self.counts.handovers += u64::from(self.hosts_with(group).len() > 1);
        // A host that lives keeps its lease: in the end it is told until it follows.
        let later = Later::SwitchEnds { group, tries: 0, recovers: true };
        self.later(later, FOLLOWED_NS);
        if self.is_switched_by_all(group) {
            note!(self, "group {group} is switched over");
            self.counts.switches += 1;
            let after = self.switch_rng.range(MS..S);
            self.schedule.after(after, Event::Recover { group });
        }
        Ok(())
    }

    /// What a daemon finds on record when it starts.
    pub(crate) fn reads_record(&mut self, host: usize, group: usize, is_over: bool) -> Checked {
        let here = self.members_on(host, group);
        if is_over && here.iter().any(|vm| !self.vms[*vm].standing.over) {
            // The power failed before the daemon knew that the record was durable.
            self.is_on_record(host, group)?;
        }
        for vm in here {
            self.vms[vm].standing.gave_up |= self.vms[vm].standing.over;
        }
        Ok(())
    }

    // ---- what goes wrong meanwhile

    fn strike_now_and_then(&mut self, host: usize, group: usize, one_in: u64) {
        if self.faulty && self.switch_rng.chance(1, one_in) {
            let strike = *self.switch_rng.pick(&STRIKES);
            let after =
                if self.switch_rng.chance(1, 2) { 1 } else { self.switch_rng.range(1..60 * MS) };
            self.later(Later::Strike { host, group, strike }, after);
        }
    }

    /// Something goes wrong with a host in the middle of a switch.
    pub(crate) fn strike(&mut self, host: usize, group: usize, strike: Strike) -> Checked {
        if !self.faulty || !self.hosts[host].power {
            return Ok(());
        }
        self.counts.faults += 1;
        let span = self.switch_rng.span(600 * MS);
        match strike {
            Strike::Kill => {
                self.end_daemon(host);
                self.later(Later::DaemonStarts { host }, span);
            }
            Strike::Power => {
                self.power_off(host);
                self.later(Later::PowerOn { host }, span * 2);
            }
            Strike::Break => return self.break_link(host),
            Strike::Partition => self.partition(host, span * 3),
            Strike::Backup => {
                self.end_backup(false);
                self.later(Later::BackupStarts, span);
            }
            Strike::TakeBack => {
                let now_ns = self.schedule.now_ns();
                if let Some(daemon) = &mut self.hosts[host].daemon
                    && let Some(of) = daemon.groups.get_mut(&group)
                {
                    of.wanted_until_ns = now_ns;
                }
            }
            Strike::Stop => self.stop_daemon(host),
        }
        Ok(())
    }

    // ---- the checkers

    /// A daemon is gone. What its members have said may be believed for a while.
    pub(crate) fn switches_end(&mut self, host: usize) {
        for vm in self.vms_of(host) {
            let standing = &mut self.vms[vm].standing;
            standing.went_back |= std::mem::take(&mut standing.said);
        }
    }

    /// A host goes on. If the backup has not told it that nobody counts on it, it may be believed for a while.
    fn goes_on(&mut self, host: usize, group: usize) {
        let here = self.members_on(host, group);
        let daemon = self.hosts[host].daemon.as_ref().expect("it goes on");
        let agreement = daemon.groups.get(&group).and_then(|of| of.agreement.as_ref());
        let released = agreement.map_or(0, |agreement| agreement.released());
        for vm in &here {
            let standing = &mut self.vms[*vm].standing;
            standing.went_back |= std::mem::take(&mut standing.said) && released < here.len();
        }
    }

    /// What the backup says of a switch, in the order in which it has decided it.
    pub(crate) fn check_agreement(
        &mut self,
        group: usize,
        link: Link,
        message: &Message,
    ) -> Checked {
        let Some(vm) = self.backup.groups[group].vms.get(&link).copied() else { return Ok(()) };
        match message {
            Message::Attached(_) => {
                // Nothing that was said before counts any more.
                let standing = &mut self.vms[vm].standing;
                standing.went_back = false;
                Ok(())
            }
            Message::SwitchAwaits { members } if members.is_empty() => {
                self.vms[vm].standing.told_to_go = true;
                for other in self.plan.groups[group].writers().collect::<Vec<_>>() {
                    let is_drained = self.is_drained(group, other);
                    check(is_drained, Checker::Switch, || {
                        format!("vm {vm} is told to go over, vm {other} is not drained")
                    })?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether nothing of a writer is missing at the backup, and nothing can come: or it has gone back behind its back.
    fn is_drained(&self, group: usize, vm: usize) -> bool {
        let state = &self.vms[vm];
        if state.standing.over || state.standing.went_back || !state.oracle.has_begun() {
            return true;
        }
        let writer = WriterId(self.plan.vms[vm].writer);
        let durable = self.backup.groups[group].told_durable.get(writer);
        state.run.as_ref().is_some_and(|run| run.holds) && durable >= state.oracle.last_effect()
    }

    fn check_goes_over(&self, host: usize, group: usize) -> Checked {
        let here = self.members_on(host, group);
        let is_told = here.iter().any(|vm| self.vms[*vm].standing.told_to_go);
        let is_spread = self.hosts_with(group).len() > 1;
        check(is_told || !is_spread, Checker::Switch, || {
            format!("host {host} goes over with group {group}, and was not told to")
        })?;
        for vm in here.iter().filter(|vm| self.plan.vms[**vm].is_writer()) {
            let is_drained = self.is_drained(group, *vm);
            check(is_drained, Checker::Switch, || format!("vm {vm} goes over and is not drained"))?;
        }
        Ok(())
    }

    /// A group that all its hosts have handed over has all that was ever admitted.
    pub(crate) fn check_nothing_lost(&self, group: usize, cut: &CountVector) -> Checked {
        if !self.plan.groups[group].members().all(|vm| self.vms[vm].standing.over) {
            return Ok(());
        }
        for vm in self.plan.groups[group].writers() {
            let (have, last) =
                (cut.get(WriterId(self.plan.vms[vm].writer)), self.vms[vm].oracle.last_change());
            check(have >= last || self.is_left_out(vm, cut), Checker::Switch, || {
                format!("vm {vm} was switched over at {last}, recovered is {have}")
            })?;
        }
        Ok(())
    }

    /// Whether a switch of the group is under way.
    #[must_use]
    pub fn is_switching(&self, group: usize) -> bool {
        let mut daemons = self.hosts.iter().filter_map(|host| host.daemon.as_ref());
        daemons.any(|daemon| daemon.groups.get(&group).is_some_and(|of| of.group.is_switching()))
    }
}
