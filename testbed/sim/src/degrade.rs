//! Groups that go on without the backup, and the checkers of what is said about it.

use crate::around::HostGroup;
use crate::failure::{Checked, Checker, check};
use crate::guest::{Packet, Unpromised, learn};
use crate::oracle::Point;
use crate::schedule::MS;
use crate::world::{Event, Run, World, note};
use std::collections::BTreeMap;
use tidelock_daemon_core::degrade::{self, Standing, Step};
use tidelock_daemon_core::group::GroupView;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::Recovery;
use tidelock_store::journal::MemberPolicy;

/// Between two looks.
const LOOK_NS: u64 = 50 * MS;

impl World {
    /// A daemon begins to look at its groups.
    pub fn begin_looks(&mut self, host: usize, run: Run) -> Checked {
        let groups: Vec<_> = self.groups_on(host).into_keys().collect();
        for group in groups {
            self.with_group(host, group, |of, here| of.begin(here))?;
            if self.plan.groups[group].has_several() {
                let mut here = self.members_on(host, group).into_iter();
                let asks = here.any(|vm| self.vms[vm].pending.incomplete().is_some());
                let in_force = self.view(host, group).expect("it was listed").mode;
                self.asks_at_start(host, group, in_force, asks);
            }
        }
        self.schedule.after(LOOK_NS, Event::Look { host, run });
        Ok(())
    }

    /// The groups of the daemon on a host, as they stand.
    fn groups_on(&self, host: usize) -> BTreeMap<usize, GroupView> {
        let groups = self.hosts[host].daemon.iter().flat_map(|daemon| &daemon.groups);
        groups.map(|(group, of)| (*group, of.group.view())).collect()
    }

    fn host_group(&self, host: usize, group: usize) -> Option<&HostGroup> {
        self.hosts[host].daemon.as_ref()?.groups.get(&group)
    }

    fn view(&self, host: usize, group: usize) -> Option<GroupView> {
        Some(self.host_group(host, group)?.group.view())
    }

    /// Whether an operator has let everything out of a group of one.
    #[must_use]
    pub fn is_ordered_async(&self, host: usize, group: usize) -> bool {
        self.host_group(host, group).is_some_and(|of| of.is_ordered)
    }

    /// A daemon looks at its groups.
    pub fn look(&mut self, host: usize, run: Run) -> Checked {
        if self.hosts[host].daemon.as_ref().is_none_or(|daemon| daemon.run != run) {
            return Ok(());
        }
        for (group, before) in self.groups_on(host) {
            // One whose loops have all ended has nothing to say.
            let mut here = self.members_on(host, group).into_iter();
            if !here.any(|vm| self.vms[vm].run.as_ref().is_some_and(|run| !run.ended)) {
                continue;
            }
            let step = self.with_group(host, group, |of, here| of.look(here))?.flatten();
            if let Some(status) = self.group_status(host, group)? {
                self.check_group_status(host, group, &status)?;
            }
            let Some(step) = step else { continue };
            note!(self, "host {host}: group {group}: {step:?}");
            let after = self.view(host, group).expect("it was listed");
            match step {
                Step::Open { .. } if after.is_unreached && !before.is_unreached => {
                    self.counts.answered += 1;
                }
                Step::Open { .. } => {
                    self.counts.degrades += 1;
                    let daemon = self.hosts[host].daemon.as_mut().expect("it runs");
                    daemon.groups.get_mut(&group).expect("it was listed").opened += 1;
                    self.check_steady(host, group)?;
                }
                Step::Hold => {}
                Step::Covered => {
                    self.counts.returns += 1;
                    self.check_covered(group, &self.members_on(host, group))?;
                }
            }
        }
        self.schedule.after(LOOK_NS, Event::Look { host, run });
        Ok(())
    }

    /// The operator wants another mode of the daemon on a host, if one runs.
    pub fn want_mode(&mut self, host: usize, group: usize, mode: Mode) -> Checked {
        self.with_group(host, group, |of, here| of.want_mode(mode, here))?;
        let is_alone = !self.plan.groups[group].has_several();
        if let Some(daemon) = &mut self.hosts[host].daemon
            && let Some(of) = daemon.groups.get_mut(&group)
        {
            of.is_ordered |= is_alone && mode == Mode::Async;
        }
        Ok(())
    }

    /// How often the daemon of a host has let each group go on without the backup. `only_now`: of those that do.
    pub(crate) fn degraded_on(&self, host: usize, only_now: bool) -> BTreeMap<usize, u64> {
        let groups = self.hosts[host].daemon.iter().flat_map(|daemon| &daemon.groups);
        // Where a group has no writer it has no lag: it tries again, after longer and longer calms.
        let writes = |group: usize| {
            let mut here = self.vms_of(host).into_iter().map(|vm| &self.plan.vms[vm]);
            here.any(|vm| vm.group == group && vm.is_writer())
        };
        let is_asked = |group: usize, of: &HostGroup| {
            let is_degraded = matches!(of.group.view().standing, Standing::Degraded { .. });
            !only_now || (is_degraded && writes(group))
        };
        groups
            .filter(|(group, of)| is_asked(**group, of))
            .map(|(group, of)| (*group, of.opened))
            .collect()
    }

    /// Why a group is not as its operator wants it, if so.
    #[must_use]
    pub fn stands_otherwise(&self, host: usize, group: usize, mode: Mode) -> Option<String> {
        let of = self.view(host, group)?;
        if of.standing != Standing::Holding && of.wanted != Mode::Async {
            return Some(format!("{:?}", of.standing));
        }
        (mode != of.wanted).then(|| format!("the gate is in mode {mode}"))
    }

    /// A packet leaves that nobody has waited for. If the operator did not want that, it is said, and a
    /// run that is killed now leaves it on record.
    pub fn leaves_unpromised(&mut self, vm: usize, packet: &Packet) -> Checked {
        let (host, group) = (self.plan.vms[vm].host, self.plan.vms[vm].group);
        let Some(of) = self.view(host, group) else { return Ok(()) };
        if of.wanted == Mode::Async {
            return Ok(());
        }
        let on_record = self.records(host, group).degraded_since_unix_ms();
        let said = of.degraded_since_unix_ms();
        check(said.is_some() && said == on_record, Checker::Degraded, || {
            format!("vm {vm}: a packet leaves unheld, said is {said:?}, on record {on_record:?}")
        })?;
        let first_unix_ms = self.backup_now().unix_ms;
        let last_record_ms = self.vms[vm].oracle.newest_hlc().physical_ms();
        let since_unix_ms = said.expect("just seen");
        let client = &mut self.vms[vm].client;
        client.said_unix_ms = client.said_unix_ms.max(since_unix_ms);
        let said_unix_ms = client.said_unix_ms;
        let times = &mut client.unpromised;
        if times.last().is_none_or(|last| last.since_unix_ms != since_unix_ms) {
            let known = vec![Point::default(); packet.known.len()];
            times.push(Unpromised {
                known,
                since_unix_ms,
                said_unix_ms,
                first_unix_ms,
                last_record_ms,
            });
        }
        learn(&mut times.last_mut().expect("just seen").known, &packet.everything());
        Ok(())
    }

    /// The host calls the group protected again: C covers what had left.
    pub(crate) fn check_covered(&mut self, group: usize, vms: &[usize]) -> Checked {
        // Of disks that are not whole there nothing can be recovered: the group is initialising, and what a
        // recovery has is looked at when there is one.
        if !self.is_recoverable(group) {
            return Ok(());
        }
        let told = self.backup.groups[group].told.clone();
        for vm in vms {
            for unpromised in std::mem::take(&mut self.vms[*vm].client.unpromised) {
                let missing = self.missing(group, &told, &unpromised.known);
                check(missing.is_none(), Checker::Degraded, || {
                    let (peer, point) = missing.expect("just seen");
                    format!(
                        "vm {vm} is called protected; a client knows {point:?} of vm {peer}, C is {told}"
                    )
                })?;
            }
        }
        Ok(())
    }

    /// A recovery says whose clients may know more than it has, and since when.
    pub fn check_exposed(
        &self,
        group: usize,
        recovery: &Recovery,
        policies: &BTreeMap<String, MemberPolicy>,
    ) -> Checked {
        let entries = recovery.writers.iter().enumerate();
        let cut: CountVector = entries.map(|(i, w)| (WriterId(i as u16), w.recovered)).collect();
        let members = self.plan.groups[group].members();
        let times = members.flat_map(|vm| {
            self.vms[vm].client.unpromised.iter().map(move |unpromised| (vm, unpromised))
        });
        for (vm, unpromised) in times {
            if self.missing(group, &cut, &unpromised.known).is_none() {
                continue;
            }
            let name = &self.plan.vms[vm].name;
            let exposure = recovery.exposed.iter().find(|of| of.member == *name);
            let slot = &self.backup.groups[group];
            let kept = policies.get(name);
            // Of a host that was in mode async, and has not degraded, the time is not by its own clock.
            let was_async = kept.is_some_and(|kept| {
                kept.mode == Mode::Async && kept.degraded_since_unix_ms.is_none()
            });
            let is_said = exposure.is_some_and(|of| {
                let by = match slot.said.has_heard(vm) {
                    _ if was_async => unpromised.first_unix_ms,
                    _ if of.is_known => unpromised.said_unix_ms,
                    true => unpromised.first_unix_ms,
                    // The recovery may have been on its way to the record before the group was opened.
                    false if slot.said.was_heard(vm) => {
                        unpromised.first_unix_ms.max(unpromised.last_record_ms)
                    }
                    false => unpromised.last_record_ms,
                };
                of.since_unix_ms.is_none_or(|since| since <= by)
            });
            check(is_said, Checker::Degraded, || {
                format!("clients of vm {vm} know more: {unpromised:?}, recover says {exposure:?}")
            })?;
        }
        Ok(())
    }

    /// No oscillation: see [`tidelock_daemon_core::degrade`].
    fn check_steady(&self, host: usize, group: usize) -> Checked {
        let of = self.host_group(host, group).expect("it has just degraded");
        let after_ms = self.plan.groups[group].degrade_after_ms.expect("it degrades");
        let span_ms = self.host_now(host).since_ns(of.began_at) / MS;
        let most = u64::from(degrade::STRIKES_MAX)
            + 1
            + span_ms / (degrade::STEADY * degrade::CALM * after_ms);
        check(of.opened <= most, Checker::Steady, || {
            format!("host {host}: group {group} has degraded {} times in {span_ms} ms", of.opened)
        })
    }
}
