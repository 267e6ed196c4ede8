//! Status of hosts (rule 6): production's, asked for at random moments, against the oracle and what the simulator knows
//! of the host's gates, its link and what it has heard of the backup.

use crate::failure::{Checked, Checker, check};
use crate::owner::MemberRun;
use crate::world::World;
use serde_json::Value;
use tidelock_daemon_core::owner::Phase;
use tidelock_daemon_core::status::{
    GateStatus, GroupStatus, Kind, LinkState, LinkTerms, SCHEMA, Status, Undoes, WriterStatus,
};
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::Mode;

/// Somebody asks after one event of so many.
const ONE_IN: u64 = 800;
/// Names of what only grows while a daemon runs, in the JSON form.
const COUNTERS: [&str; 13] = [
    "connects",
    "pending",
    "committed",
    "returned",
    "released_packets",
    "passed_packets",
    "dropped_packets",
    "sum_ns",
    "reads",
    "written_bytes",
    "flushes",
    "disk_errors",
    "transactions",
];

impl World {
    /// Somebody asks a daemon for its status now and then.
    pub(crate) fn asks_status(&mut self) -> Checked {
        if !self.status_rng.chance(1, ONE_IN) {
            return Ok(());
        }
        let host = self.status_rng.index(self.hosts.len());
        let Some(status) = self.host_status(host)? else { return Ok(()) };
        self.counts.statuses += 1;
        let daemon = self.hosts[host].daemon.as_mut().expect("it has just told its status");
        let json = serde_json::to_value(&status).expect("plain data");
        let has_grown =
            daemon.told.replace(json.clone()).is_none_or(|told| has_grown(&told, &json));
        let is_of =
            |what: &str, holds| truthful(holds, || format!("host {host}: {what}: {status:?}"));
        let again = serde_json::from_value::<Status>(json).ok();
        is_of("it is told as something else", again.as_ref() == Some(&status))?;
        let is_up = status.link.state == LinkState::Connected;
        is_of("a link is up without a connection", !is_up || daemon.link.conn().is_some())?;
        is_of("a counter has fallen", has_grown)
    }

    /// The status of the daemon on a host, past the checkers. `None`: nobody would answer.
    fn host_status(&mut self, host: usize) -> Checked<Option<Status>> {
        let Some(daemon) = &self.hosts[host].daemon else { return Ok(None) };
        let groups: Vec<_> = daemon.groups.keys().copied().collect();
        let mut told = Vec::new();
        for group in groups {
            let Some(status) = self.group_status(host, group)? else { return Ok(None) };
            self.check_group_status(host, group, &status)?;
            told.push(status);
        }
        let now = self.host_now(host);
        let daemon = self.hosts[host].daemon.as_ref().expect("no loop ends its daemon");
        let terms =
            LinkTerms { backup: "the backup".into(), tls: false, certificate_valid_s: None };
        Ok(Some(Status {
            schema: SCHEMA,
            host: format!("h{host}"),
            software: "sim".to_owned(),
            uptime_ms: 0,
            virtual_machine: None,
            link: daemon.link.history().status(terms, now),
            groups: told,
        }))
    }

    /// Rule 6: what a disaster now would undo, who may have been told of it, and what the gate and the link do.
    pub(crate) fn check_group_status(
        &mut self,
        host: usize,
        group: usize,
        status: &GroupStatus,
    ) -> Checked {
        let vms = self.members_on(host, group);
        let is_of = |what: &str, holds| {
            truthful(holds, || format!("host {host} group {group}: {what}: {status:?}"))
        };
        if status.protected {
            self.check_covered(group, &vms)?;
        }
        is_of("all members", status.members.len() == vms.len())?;
        // The thread of the gate, which all of them share, is about to look.
        let mut runs = vms.iter().filter_map(|vm| self.vms[*vm].run.as_ref());
        let is_due = runs.any(|run| run.gate_due || run.gate.is_woken());
        for (vm, member) in vms.into_iter().zip(&status.members) {
            let run = self.vms[vm].run.as_ref().expect("its loops run");
            self.check_gate_status(vm, run, status, &member.gates[0], is_due)?;
            let Some(writer) = &member.writer else { continue };
            self.check_writer_status(vm, run, status, writer)?;
        }
        Ok(())
    }

    fn check_gate_status(
        &self,
        vm: usize,
        run: &MemberRun,
        group: &GroupStatus,
        gate: &GateStatus,
        is_due: bool,
    ) -> Checked {
        let is_of = |what: &str, holds| truthful(holds, || format!("vm {vm}: {what}: {group:?}"));
        let now = self.host_now(self.plan.vms[vm].host);
        let end = run.gate.lease_end(group.lease.period_ms).filter(|_| !run.gate.is_fenced());
        let left_ms = end.map_or(0, |end| end.since_ns(now) / 1_000_000);
        let is_fenced = group.risk.why.kind == Kind::Fenced;
        is_of("the lease", group.lease.left_ms == if is_fenced { 0 } else { left_ms })?;
        is_of(
            "a lease is held while there is time left",
            group.lease.held == (group.lease.left_ms > 0),
        )?;
        is_of("the mode is the gate's", group.mode == run.gate.handle().mode())?;
        is_of("a shut gate has a reason", gate.open != gate.shut_because.is_some())?;
        let held = run.gate.held(vm) as u64;
        is_of("held packets", gate.held_packets == held && (gate.held_bytes > 0) == (held > 0))?;
        if is_due {
            return Ok(());
        }
        let is_let = run.gate.is_open(now) && run.pending.incomplete().is_none();
        let is_async = group.mode == Mode::Async && !run.gate.is_fenced();
        // A lease may have ended since the thread has looked.
        let may_be_open = is_async || is_let || left_ms == 0 && !run.gate.is_fenced();
        is_of("an open gate is open", !gate.open || may_be_open)?;
        is_of("a shut gate is shut", gate.open || !is_async && !is_let)
    }

    fn check_writer_status(
        &self,
        vm: usize,
        run: &MemberRun,
        group: &GroupStatus,
        status: &WriterStatus,
    ) -> Checked {
        let is_of = |what: &str, holds| truthful(holds, || format!("vm {vm}: {what}: {group:?}"));
        let Some(owner) = &run.owner else { return Ok(()) };
        let (oracle, writer) = (&self.vms[vm].oracle, WriterId(self.plan.vms[vm].writer));
        let slot = &self.backup.groups[self.plan.vms[vm].group];
        let (durable, told) = (slot.told_durable.get(writer), slot.told.get(writer));
        is_of("C is as the backup has told it", status.committed <= told)?;
        is_of("P is the loop's", status.pending == owner.sequencer().published())?;
        let has_all = status.pending <= durable
            && owner.copying().is_whole()
            && oracle.is_in_sync_at(durable, told);
        is_of("the backup has all of the writer", has_all || !status.backup_has_all)?;
        // A daemon that ends says so first, and no copy is begun any more.
        let is_whole = run.draining || oracle.is_in_sync_at(durable, told);
        is_of("the backup follows", is_whole || group.risk.why.kind != Kind::Following)?;
        let lag = &status.lag;
        match group.risk.undoes {
            Undoes::Nothing => is_of("a disaster undoes nothing", has_all)?,
            Undoes::Lag(of) => {
                is_of("a disaster undoes no more than the lag", is_whole)?;
                let is_part = of.writes >= lag.writes && of.bytes >= lag.bytes && of.ms >= lag.ms;
                is_of("the lag of a group is that of all its writers", is_part)?;
            }
            Undoes::Since { .. } | Undoes::Everything => {}
        }
        // In mode sync P does not name a write before the backup has it, and nobody has been told of it.
        let (heard, named) = (run.port.acked().0, status.pending);
        let unacked = run.unacked.iter().filter(|(seq, _)| *seq > heard && *seq <= named);
        let unacked = unacked.count() as u64;
        let has_records = matches!(run.phase(), Phase::Replicating | Phase::Disconnected);
        is_of("the lag has all that was not acknowledged", !has_records || lag.writes >= unacked)?;
        if let Some(refusal) = &run.refusal {
            let said = group.detail.as_ref().is_some_and(|said| said.contains(&refusal.reason));
            is_of("a refusal is told", said && !group.protected)?;
            let is_over = group.risk.why.kind == Kind::Fenced;
            is_of("the end of the epoch is told", is_over || !refusal.is_final())?;
        }
        let copy = status.copy.as_ref();
        is_of("a copy", copy.is_none_or(|copy| copy.done_bytes <= copy.total_bytes))
    }
}

fn truthful(holds: bool, what: impl FnOnce() -> String) -> Checked {
    check(holds, Checker::NoFalseSync, what)
}

/// No counter of a daemon's run falls.
fn has_grown(before: &Value, now: &Value) -> bool {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => before.iter().all(|(name, before)| {
            // Fields of the risk differ from case to case.
            let Some(now) = now.get(name) else { return true };
            let counts = COUNTERS.contains(&name.as_str());
            has_grown(before, now) && (!counts || before.as_u64() <= now.as_u64())
        }),
        (Value::Array(before), Value::Array(now)) => {
            before.iter().zip(now).all(|(before, now)| has_grown(before, now))
        }
        _ => true,
    }
}
