//! A simulated host, as production's loop of one of its groups ([`GroupLoop`]) sees it and acts on it.

use crate::failure::{Checked, Failure};
use crate::host::CLOCK_LEAD_MS;
use crate::owner::MemberRun;
use crate::scenario::{DiskPlan, Scenario, VmPlan};
use crate::world::World;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tidelock_daemon::gate_seen::gate_seen;
use tidelock_daemon_core::group::{
    GateSight, GroupLoop, GroupSettings, Member, Surroundings, Writer,
};
use tidelock_daemon_core::link::port::{Agreement, ToLink};
use tidelock_daemon_core::owner::{Clocks, ToOwner};
use tidelock_daemon_core::status::{
    DiskStatus, GroupSeen, GroupStatus, GroupTerms, MemberSeen, Role, WriterSeen,
};
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::{Form, Mode};

/// An operator who waits for a switch asks how far it is more often than that.
const ASKED_WITHIN: Duration = Duration::from_millis(50);

/// A group on one host.
#[derive(Debug)]
pub struct HostGroup {
    /// Production's.
    pub(crate) group: GroupLoop,
    pub(crate) began_at: MonoNanos,
    /// How often it has degraded.
    pub(crate) opened: u64,
    /// Its operator wanted mode async of this daemon, and no other member depends on that.
    pub(crate) is_ordered: bool,
    /// Until then somebody wants the switch that is under way.
    pub(crate) wanted_until_ns: u64,
    /// The answers to what was said of that switch.
    pub(crate) agreement: Option<Arc<Agreement>>,
}

/// What its daemon has on record of a group at its start.
fn settings(plan: &Scenario, host: usize, group: usize) -> GroupSettings {
    let of = &plan.groups[group];
    let elsewhere = of.members().map(|vm| &plan.vms[vm]).filter(|vm| vm.host != host);
    GroupSettings {
        name: of.name.clone(),
        mode: of.mode,
        form: if of.has_several() { of.form } else { Form::Vector },
        is_of_several: of.has_several(),
        elsewhere: elsewhere.map(|vm| (vm.name.clone(), format!("h{}", vm.host))).collect(),
        after_ms: of.degrade_after_ms,
        lease_ms: of.lease_ms,
        asked_within: ASKED_WITHIN,
    }
}

/// The host of a group.
pub(crate) struct Here<'a> {
    world: &'a mut World,
    host: usize,
    group: usize,
    /// Its members here.
    vms: Vec<usize>,
    agreement: &'a mut Option<Arc<Agreement>>,
    /// A checker's finding meanwhile.
    failure: Option<Failure>,
}

impl World {
    /// The groups on a host when its daemon starts.
    #[must_use]
    pub fn groups_of(&self, host: usize, vms: &[usize]) -> BTreeMap<usize, HostGroup> {
        let begun = |group: usize| {
            let records = self.records(host, group);
            let (degraded, switched) =
                (records.degraded_since_unix_ms(), records.switched_at_unix_ms());
            HostGroup {
                group: GroupLoop::new(settings(&self.plan, host, group), degraded, switched),
                began_at: self.host_now(host),
                opened: 0,
                is_ordered: false,
                wanted_until_ns: 0,
                agreement: None,
            }
        };
        let groups = vms.iter().map(|vm| self.plan.vms[*vm].group);
        groups.map(|group| (group, begun(group))).collect()
    }

    /// Lets the loop of a group on a host do something. `None`: no daemon runs there, or it has not the group.
    pub(crate) fn with_group<R>(
        &mut self,
        host: usize,
        group: usize,
        what: impl FnOnce(&mut GroupLoop, &mut Here<'_>) -> R,
    ) -> Checked<Option<R>> {
        let daemon = self.hosts[host].daemon.as_mut();
        let Some(mut of) = daemon.and_then(|daemon| daemon.groups.remove(&group)) else {
            return Ok(None);
        };
        let vms = self.members_on(host, group).into_iter();
        let vms = vms.filter(|vm| self.vms[*vm].run.is_some()).collect();
        let agreement = &mut of.agreement;
        let mut here = Here { world: self, host, group, vms, agreement, failure: None };
        let result = what(&mut of.group, &mut here);
        let failure = here.failure;
        let daemon = self.hosts[host].daemon.as_mut().expect("no loop ends its daemon");
        daemon.groups.insert(group, of);
        failure.map_or(Ok(Some(result)), Err)
    }

    /// The status of a group on a host, if its loops run.
    pub(crate) fn group_status(
        &mut self,
        host: usize,
        group: usize,
    ) -> Checked<Option<GroupStatus>> {
        let vms = self.members_on(host, group);
        let runs = |vm: &usize| self.vms[*vm].run.as_ref();
        let is_there = |run: &MemberRun| !run.ended && run.has_died.is_none();
        if !vms.iter().all(|vm| runs(vm).is_some_and(is_there)) {
            return Ok(None);
        }
        let of = &self.plan.groups[group];
        let seen = GroupSeen {
            terms: GroupTerms {
                when_unreachable: format!("{:?}", of.degrade_after_ms),
                grace_ms: of.grace_ms,
                elsewhere: Vec::new(),
                form: of.form,
                is_tagged: of.has_several(),
                heartbeat: of.heartbeat,
                verify_every: None,
                max_clock_lead_ms: CLOCK_LEAD_MS,
                backlog_limit_bytes: 0,
                backlog_memory_bytes: None,
            },
            awaits_adoption: self.records(host, group).is_adopting(),
            members: vms
                .iter()
                .map(|vm| seen(*vm, &self.plan.vms[*vm], runs(vm).expect("runs")))
                .collect(),
        };
        self.with_group(host, group, |of, here| of.status(here, seen))
    }
}

fn seen(vm: usize, plan: &VmPlan, run: &MemberRun) -> MemberSeen {
    let disk = |(nth, disk): (usize, &DiskPlan)| DiskStatus {
        name: format!("d{nth}"),
        path: "d".into(),
        size_bytes: disk.content.len() as u64,
        socket: "s".into(),
    };
    let gate = run.gate.counters(vm);
    MemberSeen {
        roles: vec![Role::Outbound],
        epoch: run.state.epoch(),
        gates: vec![gate_seen("tap", &gate, Default::default(), &Default::default())],
        tagging: None,
        writer: run.owner.as_ref().map(|_| WriterSeen {
            disks: plan.disks.iter().enumerate().map(disk).collect(),
            stats: run.owner_stats.clone(),
            view: run.view.clone(),
            pulse: run.pulse.clone(),
            committed: run.port.acked().1,
            verified: run.state.verified(),
            verifications: run.verifications.clone(),
        }),
    }
}

impl Surroundings for Here<'_> {
    fn clocks(&self) -> Clocks {
        self.world.clocks(self.host)
    }

    fn is_stopping(&self) -> bool {
        let mut runs = self.vms.iter().filter_map(|vm| self.world.vms[*vm].run.as_ref());
        runs.any(|run| run.draining)
    }

    fn members(&self) -> Vec<Member> {
        let daemon = self.world.hosts[self.host].daemon.as_ref().expect("its loop runs");
        let member = |vm: &usize| {
            let (plan, of) = (&self.world.plan.vms[*vm], &self.world.vms[*vm]);
            let run = of.run.as_ref().expect("it runs");
            let writer = plan.writer_id();
            let link = daemon.link.stats_of(*vm).expect("on this host").clone();
            let written = writer.map(|_| Writer::of(&run.view, &run.port, &run.state, &run.pulse));
            Member { name: plan.name.clone(), link, control: run.control.clone(), writer: written }
        };
        self.vms.iter().map(member).collect()
    }

    fn gate(&self) -> Option<GateSight> {
        let run = self.world.vms[*self.vms.first()?].run.as_ref()?;
        let gate = run.gate.handle();
        let (committed, watermark) = gate.committed();
        let is_open = run.gate.is_open(self.clocks().now);
        let (is_applied, lease_until) = (gate.is_applied(), gate.lease_until());
        Some(GateSight { is_open, committed, watermark, is_applied, lease_until })
    }

    fn left_unheld(&mut self) -> bool {
        false
    }

    fn held_packets(&self) -> Option<u64> {
        let runs = self.vms.iter().filter_map(|vm| Some((vm, self.world.vms[*vm].run.as_ref()?)));
        Some(runs.map(|(vm, run)| run.gate.held(*vm) as u64).sum())
    }

    fn disk_hang(&self) -> Option<String> {
        None
    }

    fn set_gate_mode(&mut self, mode: Mode) {
        let clocks = self.clocks();
        let Some(vm) = self.vms.first() else { return };
        let run = self.world.vms[*vm].run.as_ref().expect("it runs");
        run.gate.set_clocks(clocks);
        run.gate.handle().set_mode(mode);
    }

    fn tell_owner(&mut self, member: usize, message: ToOwner) {
        let run = self.world.vms[self.vms[member]].run.as_mut().expect("it runs");
        match message {
            ToOwner::Hold(..) => run.holds = true,
            ToOwner::LetGo => run.holds = false,
            _ => {}
        }
        run.port.send(message);
    }

    fn tell_link(&mut self, member: usize, message: ToLink) {
        let vm = self.vms[member];
        match &message {
            ToLink::AskFloor { everyone: true } => {
                self.world.asks_for_everyone(self.host, self.group);
            }
            ToLink::ReadyToSwitch(is_ready, agreement) => {
                *self.agreement = Some(agreement.clone());
                if *is_ready {
                    self.world.says_ready(vm);
                }
            }
            ToLink::GiveUpLease(_) => self.world.vms[vm].standing.gave_up = true,
            _ => {}
        }
        self.world.tell_link(vm, message);
    }

    fn keep_degraded(&mut self, since_unix_ms: u64) -> io::Result<()> {
        self.world.records(self.host, self.group).keep_degraded(since_unix_ms)?;
        for vm in &self.vms {
            let said = &mut self.world.vms[*vm].client.said_unix_ms;
            *said = since_unix_ms.max(*said);
        }
        Ok(())
    }

    fn forget_degraded(&mut self) -> io::Result<()> {
        self.world.records(self.host, self.group).forget_degraded()
    }

    fn keep_switched(&mut self, at_unix_ms: u64) -> io::Result<()> {
        match self.world.put_on_record(self.host, self.group, at_unix_ms) {
            Ok(true) => Ok(()),
            Ok(false) => Err(io::ErrorKind::StorageFull.into()),
            Err(failure) => {
                self.failure = Some(failure);
                Ok(())
            }
        }
    }
}
