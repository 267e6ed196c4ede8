//! Groups that go on without the backup: production's decision ([`tidelock_daemon::degrade`]) with what
//! production's `host/degrading.rs` does around it, and the checkers of what is said about it.

use crate::failure::{Checked, Checker, check};
use crate::guest::{Packet, Unpromised, learn};
use crate::oracle::Point;
use crate::plant::{OnTheWay, Plant};
use crate::schedule::MS;
use crate::world::{Event, Run, World, note};
use std::collections::BTreeMap;
use tidelock_backup_server::group::{Known, Recovery};
use tidelock_daemon::degrade::{self, Degrade, Sight, Standing, Step, mode_at_start};
use tidelock_daemon::link::port::ToLink;
use tidelock_daemon::owner::ToOwner;
use tidelock_daemon::stats::LinkStats;
use tidelock_netfilter::release_queue::GateState;
use tidelock_protocol::ids::{MonoNanos, WriterId};
use tidelock_protocol::message::{Form, Mode, Policy};
use tidelock_protocol::vector::CountVector;

/// Between two looks.
const LOOK_NS: u64 = 50 * MS;

/// How a group stands on one host.
#[derive(Debug)]
pub struct HostGroup {
    /// The mode that the operator wants.
    pub wanted: Mode,
    /// Production's.
    degrade: Degrade,
    began_at: MonoNanos,
    opened: u64,
    /// Its operator wanted mode async of this daemon, and no other member depends on that.
    is_ordered: bool,
}

impl World {
    /// How the groups on a host stand when its daemon starts.
    #[must_use]
    pub fn standings_of(&self, host: usize, vms: &[usize]) -> BTreeMap<usize, HostGroup> {
        let groups = vms.iter().map(|vm| self.plan.vms[*vm].group);
        let standing = |group: usize| {
            let plan = &self.plan.groups[group];
            let since_unix_ms = self.hosts[host].degraded.get(&group).copied();
            HostGroup {
                wanted: plan.mode,
                degrade: Degrade::new(plan.degrade_after_ms, since_unix_ms),
                began_at: self.host_now(host),
                opened: 0,
                is_ordered: false,
            }
        };
        groups.map(|group| (group, standing(group))).collect()
    }

    /// What the backup is told first of a member.
    #[must_use]
    pub fn first_policy(&self, vm: usize, mode: Mode) -> Policy {
        let VmPlace { host, group } = self.place(vm);
        let since_unix_ms = self.hosts[host].degraded.get(&group).copied();
        Degrade::new(self.plan.groups[group].degrade_after_ms, since_unix_ms).policy(mode)
    }

    fn place(&self, vm: usize) -> VmPlace {
        VmPlace { host: self.plan.vms[vm].host, group: self.plan.vms[vm].group }
    }

    /// A daemon begins to look at its groups.
    pub fn begin_looks(&mut self, host: usize, run: Run) {
        let standings = &self.hosts[host].daemon.as_ref().expect("it starts").standings;
        for group in standings.keys().copied().collect::<Vec<_>>() {
            self.begin_mode(host, group);
        }
        let standings = &self.hosts[host].daemon.as_ref().expect("it starts").standings;
        let of_several = |group: &usize| self.plan.groups[*group].has_several();
        let groups: Vec<_> = standings.keys().copied().filter(of_several).collect();
        for group in groups {
            let vms = self.here(host, group);
            if self.hosts[host].degraded.contains_key(&group) {
                for vm in &vms {
                    self.tell_link(*vm, ToLink::AskFloor { everyone: true });
                }
            }
            let asks = vms.iter().any(|vm| self.vms[*vm].pending.incomplete().is_some());
            let of = self.standing(host, group).expect("it was listed");
            let in_force = of.degrade.mode(of.wanted);
            self.asks_at_start(host, group, in_force, asks);
        }
        self.schedule.after(LOOK_NS, Event::Look { host, run });
    }

    /// As production does.
    fn begin_mode(&mut self, host: usize, group: usize) {
        let vms = self.here(host, group);
        let writes = vms.iter().any(|vm| self.plan.vms[*vm].is_writer());
        let ignored = self.plant == Some(Plant::OnTheWay(OnTheWay::AsyncBeforeContact));
        let Some(of) = self.standing_mut(host, group) else { return };
        if writes && !ignored {
            of.degrade.await_contact();
        }
        let in_force = of.degrade.mode(of.wanted);
        let before = mode_at_start(of.wanted);
        self.set_mode(group, &vms, before, in_force);
    }

    /// Whether an operator has let everything out of a group of one.
    #[must_use]
    pub fn is_ordered_async(&self, host: usize, group: usize) -> bool {
        self.standing(host, group).is_some_and(|of| of.is_ordered)
    }

    /// Whether the backup counts no writer here as gone that is not.
    fn is_in_contact(&self, host: usize, vms: &[usize]) -> bool {
        let daemon = self.hosts[host].daemon.as_ref().expect("its members run");
        vms.iter().filter_map(|vm| daemon.link.stats_of(*vm)).all(LinkStats::is_policy_kept)
    }

    /// The members of a group on a host whose loops run.
    fn here(&self, host: usize, group: usize) -> Vec<usize> {
        let here = |vm: &usize| {
            let is_here = self.plan.vms[*vm].host == host;
            is_here && self.vms[*vm].run.as_ref().is_some_and(|run| !run.ended)
        };
        self.plan.groups[group].members().filter(here).collect()
    }

    fn standing_mut(&mut self, host: usize, group: usize) -> Option<&mut HostGroup> {
        self.hosts[host].daemon.as_mut()?.standings.get_mut(&group)
    }

    /// Whether what has left keeps a group from being switched over.
    pub(crate) fn hinders_switch(&self, host: usize, group: usize) -> bool {
        self.standing(host, group).is_some_and(|of| of.degrade.hinders_switch(of.wanted))
    }

    fn standing(&self, host: usize, group: usize) -> Option<&HostGroup> {
        self.hosts[host].daemon.as_ref()?.standings.get(&group)
    }

    /// A daemon looks at its groups.
    pub fn look(&mut self, host: usize, run: Run) -> Checked {
        let Some(daemon) = self.hosts[host].daemon.as_ref().filter(|daemon| daemon.run == run)
        else {
            return Ok(());
        };
        let groups: Vec<_> = daemon.standings.keys().copied().collect();
        for group in groups {
            self.follow_policy(host, group)?;
        }
        self.schedule.after(LOOK_NS, Event::Look { host, run });
        Ok(())
    }

    fn follow_policy(&mut self, host: usize, group: usize) -> Checked {
        let vms = self.here(host, group);
        if vms.is_empty() {
            return Ok(());
        }
        let opens_unreached = self.opens_unreached(&vms);
        let is_in_contact = opens_unreached || self.is_in_contact(host, &vms);
        let of = self.standing_mut(host, group).expect("it was listed");
        if of.degrade.awaits_contact() && is_in_contact {
            let before = of.degrade.mode(of.wanted);
            of.degrade.has_contact();
            let in_force = of.degrade.mode(of.wanted);
            self.set_mode(group, &vms, before, in_force);
        }
        if opens_unreached && self.open_unreached(host, group, &vms) {
            return Ok(());
        }
        let sight = self.sight(host, group, &vms);
        let of = self.standing_mut(host, group).expect("it was listed");
        let (wanted, before) = (of.wanted, of.degrade.mode(of.wanted));
        let Some(step) = of.degrade.look(&sight) else { return Ok(()) };
        let (policy, in_force) = (of.degrade.policy(wanted), of.degrade.mode(wanted));
        note!(self, "host {host}: group {group}: {step:?}, {policy:?}");
        match step {
            Step::Open { since_unix_ms } => {
                self.hosts[host].degraded.insert(group, since_unix_ms);
                for vm in &vms {
                    let said = &mut self.vms[*vm].client.said_unix_ms;
                    *said = since_unix_ms.max(*said);
                }
                self.counts.degrades += 1;
                let of = self.standing_mut(host, group).expect("it was listed");
                of.opened += 1;
                self.check_steady(host, group)?;
            }
            Step::Hold => {}
            Step::Covered => {
                self.hosts[host].degraded.remove(&group);
                self.counts.returns += 1;
                self.check_covered(group, &vms)?;
            }
        }
        self.tell_policy(&vms, policy);
        self.set_mode(group, &vms, before, in_force);
        Ok(())
    }

    /// Clients are answered before the backup was reached. Returns whether that is news.
    fn open_unreached(&mut self, host: usize, group: usize, vms: &[usize]) -> bool {
        let unix_ms = self.clocks(host).wall_ms;
        let of = self.standing_mut(host, group).expect("it was listed");
        let (wanted, before) = (of.wanted, of.degrade.mode(of.wanted));
        if before == Mode::Async {
            return false;
        }
        of.degrade.open_unreached(unix_ms);
        let (policy, in_force) = (of.degrade.policy(wanted), of.degrade.mode(wanted));
        let since_unix_ms = of.degrade.since_unix_ms().expect("it has just degraded");
        note!(self, "host {host}: group {group} is served without the backup, {policy:?}");
        self.counts.answered += 1;
        self.hosts[host].degraded.insert(group, since_unix_ms);
        self.tell_policy(vms, policy);
        self.set_mode(group, vms, before, in_force);
        true
    }

    fn tell_policy(&mut self, vms: &[usize], policy: Policy) {
        for vm in vms {
            self.tell_link(*vm, ToLink::Policy(policy));
        }
    }

    fn sight(&self, host: usize, group: usize, vms: &[usize]) -> Sight {
        let clocks = self.clocks(host);
        let daemon = self.hosts[host].daemon.as_ref().expect("its members run");
        let of = &daemon.standings[&group];
        let runs = || vms.iter().filter_map(|vm| self.vms[*vm].run.as_ref());
        let stats = || vms.iter().filter_map(|vm| daemon.link.stats_of(*vm));
        let gate = runs().next().expect("one is here").gate.state();
        let in_force = of.degrade.mode(of.wanted);
        let plan = &self.plan.groups[group];
        Sight {
            now: clocks.now,
            unix_ms: clocks.wall_ms,
            may_open: of.wanted != Mode::Async
                && stats().all(|stats| stats.is_policy_kept())
                && !gate.fenced
                && runs().all(|run| !run.draining),
            is_open: gate.gate_state(clocks.now) == GateState::Open,
            is_whole: vms.iter().filter(|vm| self.plan.vms[**vm].is_writer()).all(|vm| {
                let run = self.vms[*vm].run.as_ref().expect("it is here");
                let Some(owner) = &run.owner else { return false };
                let stands = owner.spilling().stands();
                owner.sequencer().is_started() && !stands && !owner.copying().is_copying()
            }),
            is_complete: in_force != Mode::Async
                && runs().all(|run| run.pending.incomplete().is_none()),
            is_applied: runs().all(|run| run.queue.mode() == in_force && !run.gate_due),
            form: if plan.has_several() { plan.form } else { Form::Vector },
            write_age_ns: stats().map(|stats| stats.lag_ns(clocks.now)).max().unwrap_or(0),
            round_trip_ns: stats().map(LinkStats::round_trip_ns).max().unwrap_or(0),
            pending: runs().map(|run| (run.pending.read(), run.pending.read_hlc())).collect(),
            committed: gate.committed,
            watermark: gate.watermark,
        }
    }

    /// The mode in force has changed on a host.
    fn set_mode(&mut self, group: usize, vms: &[usize], before: Mode, mode: Mode) {
        if before == mode {
            return;
        }
        // The gate first, as production does.
        for vm in vms {
            let clocks = self.clocks(self.plan.vms[*vm].host);
            let Some(run) = &self.vms[*vm].run else { continue };
            run.gate.set_clocks(clocks);
            run.gate.set_mode(mode);
        }
        for run in vms.iter().filter_map(|vm| self.vms[*vm].run.as_ref()) {
            run.port.send(ToOwner::SetMode(mode));
        }
        if before == Mode::Async && self.plan.groups[group].has_several() {
            let host = self.plan.vms[vms[0]].host;
            self.asks_for_everyone(host, group);
            for vm in vms {
                self.tell_link(*vm, ToLink::AskFloor { everyone: true });
            }
        }
    }

    /// The operator wants another mode of the daemon on a host, if one runs.
    pub fn want_mode(&mut self, host: usize, group: usize, mode: Mode) {
        let vms = self.here(host, group);
        let is_alone = !self.plan.groups[group].may_have_several();
        let Some(of) = self.standing_mut(host, group).filter(|_| !vms.is_empty()) else { return };
        let before = of.degrade.mode(of.wanted);
        of.wanted = mode;
        if is_alone && mode == Mode::Async {
            of.degrade.has_contact();
            of.is_ordered = true;
        }
        let (policy, in_force) = (of.degrade.policy(mode), of.degrade.mode(mode));
        self.set_mode(group, &vms, before, in_force);
        self.tell_policy(&vms, policy);
    }

    /// How often the daemon of a host has let each group go on without the backup. `only_now`: of those that do.
    pub(crate) fn degraded_on(&self, host: usize, only_now: bool) -> BTreeMap<usize, u64> {
        let standings = self.hosts[host].daemon.iter().flat_map(|daemon| &daemon.standings);
        // Where a group has no writer it has no lag: it tries again, after longer and longer calms.
        let writes = |group: usize| {
            let mut here = self.vms_of(host).into_iter().map(|vm| &self.plan.vms[vm]);
            here.any(|vm| vm.group == group && vm.is_writer())
        };
        let is_asked = |group: usize, of: &HostGroup| {
            let is_degraded = matches!(of.degrade.standing(), Standing::Degraded { .. });
            !only_now || (is_degraded && writes(group))
        };
        standings
            .filter(|(group, of)| is_asked(**group, of))
            .map(|(group, of)| (*group, of.opened))
            .collect()
    }

    /// Why a group is not as its operator wants it, if so.
    #[must_use]
    pub fn stands_otherwise(&self, host: usize, group: usize, mode: Mode) -> Option<String> {
        let of = self.standing(host, group)?;
        if of.degrade.standing() != Standing::Holding && of.wanted != Mode::Async {
            return Some(format!("{:?}", of.degrade.standing()));
        }
        (mode != of.wanted).then(|| format!("the gate is in mode {mode}"))
    }

    /// A packet leaves that nobody has waited for. If the operator did not want that, it is said, and a
    /// run that is killed now leaves it on record.
    pub fn leaves_unpromised(&mut self, vm: usize, packet: &Packet) -> Checked {
        let VmPlace { host, group } = self.place(vm);
        let Some(of) = self.standing(host, group) else { return Ok(()) };
        if of.wanted == Mode::Async {
            return Ok(());
        }
        let on_record = self.hosts[host].degraded.get(&group).copied();
        let said = of.degrade.since_unix_ms();
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
    fn check_covered(&mut self, group: usize, vms: &[usize]) -> Checked {
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
        policies: &BTreeMap<String, Known>,
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

    /// No oscillation: see [`tidelock_daemon::degrade`].
    fn check_steady(&self, host: usize, group: usize) -> Checked {
        let of = self.standing(host, group).expect("it has just degraded");
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

struct VmPlace {
    host: usize,
    group: usize,
}
