//! Recovered machines that run here. They are the server's, not the terminal's that asked for them: a target starts them, and
//! a server that starts again finds them.
//!
//! Invariants: a machine is on record before it is started. A group's machines are not started while one of them runs,
//! or while anybody is connected to one of its disks: two guests on one disk destroy its file system.

use super::control;
use super::exports::Exports;
use super::inbox::Event;
use super::registry::Registry;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::CopyState;
use tidelock_replica::group::GroupStatus;
use tidelock_storage::files::Files;
use tidelock_storage::{Storage, json, replace};
use tidelock_store::journal::{KeptMachine, Standing};
use tidelock_targets::{
    ExportedDisk, Guest, Places, Plan, Prepared, Settings, Status, Stop, Target, targets,
};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The format of a machine's record.
const FORMAT: u32 = 1;
/// A machine that has ended is on record no longer than this.
const FORGETS_WITHIN: Duration = Duration::from_secs(10);

/// Settings by which machines are started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BootAsk {
    /// Descriptions in place of those that hosts sent, with their members; nobody's by name, if there is one machine.
    pub machines: Vec<(Option<String>, Machine)>,
    /// Settings for the target.
    pub settings: Settings,
}

/// A machine that runs here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineStatus {
    /// The group.
    pub group: String,
    /// The member.
    pub member: String,
    /// When it was started, in milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// The machine as its target finds it.
    #[serde(flatten)]
    pub machine: Prepared,
}

#[derive(Serialize, Deserialize)]
struct Record {
    format: u32,
    #[serde(flatten)]
    status: MachineStatus,
}

/// A member's machine: the host's description and the approved one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescribedMachine {
    /// The member.
    pub member: String,
    /// True if the member has disks here.
    pub has_disks: bool,
    /// The descriptions.
    pub kept: KeptMachine,
}

/// Result of a boot or of its rehearsal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Booted {
    /// The machines; none of a rehearsal.
    pub machines: Vec<MachineStatus>,
    /// The commands that start them.
    pub commands: Vec<String>,
    /// For the operator.
    pub notes: Vec<String>,
}

/// Machines by group and member.
type Running = BTreeMap<(String, String), MachineStatus>;

/// The machines of all groups.
#[derive(Debug)]
pub struct Machines {
    registry: Arc<Registry>,
    exports: Arc<Exports>,
    /// Records of machines, one file for each, in a directory for each group.
    records: Files,
    targets: Vec<Arc<dyn Target>>,
    /// Held during a start, so that there is one at a time.
    turn: tokio::sync::Mutex<()>,
    running: watch::Sender<Running>,
}

impl Machines {
    /// Finds the machines that an earlier run of the server has started.
    pub async fn open(registry: Arc<Registry>, exports: Arc<Exports>) -> io::Result<Arc<Self>> {
        let config = registry.config();
        let records = Files::new(config.data_dir.join("guests"));
        records.create_dir("")?;
        let places =
            Places { boot_file: config.boot_file.clone(), boot_dir: config.data_dir.join("boot") };
        let machines = Arc::new(Self {
            targets: targets(&places),
            registry,
            exports,
            records,
            turn: tokio::sync::Mutex::default(),
            running: watch::Sender::default(),
        });
        let mut groups = JoinSet::new();
        for group in machines.records.list("")? {
            let machines = Arc::clone(&machines);
            groups.spawn(async move { machines.find(&group).await });
        }
        groups.join_all().await.into_iter().collect::<io::Result<()>>()?;
        Ok(machines)
    }

    /// Takes over what an earlier run has started of a group. A start of its machines that did not come to its end is undone.
    async fn find(self: &Arc<Self>, group: &str) -> io::Result<()> {
        let mut found = Vec::new();
        for status in self.on_record(group)? {
            let Some(target) = self.target(&status.machine) else { continue };
            // First of all: a machine whose disks are away may not answer.
            self.allow_disks(&status).map_err(io::Error::other)?;
            let state = target.status(&status.machine).await;
            found.push((status, target, state));
        }
        let is_interrupted = found.iter().any(|(_, _, state)| *state == Status::Prepared);
        for (status, target, state) in found {
            let MachineStatus { group, member, machine, .. } = &status;
            let is_undone = state == Status::Prepared || is_interrupted && state == Status::Halted;
            if is_undone && let Err(error) = target.stop(machine, Stop::Now).await {
                tracing::error!(group, member, "a start that was interrupted: {error}");
            }
            if is_undone || state == Status::Ended {
                tracing::info!(group, member, "the recovered machine has ended");
                target.ended(machine).await;
                self.forget(&status);
                continue;
            }
            tracing::info!(group, member, place = machine.place, "a recovered machine runs");
            self.own(status.clone(), Arc::clone(&target));
            if state == Status::Halted
                && let Err(error) = target.resume(machine).await
            {
                tracing::error!(group, member, "{error}");
            }
        }
        Ok(())
    }

    fn on_record(&self, group: &str) -> io::Result<Vec<MachineStatus>> {
        let mut found = Vec::new();
        let files = self.records.list(group)?;
        for file in files.iter().filter(|file| file.ends_with(".json")) {
            match json::read::<_, Record>(&self.records, &format!("{group}/{file}"), FORMAT) {
                Ok(record) => found.extend(record.map(|record| record.status)),
                // Its disks are in use while it runs, so no second machine starts on them.
                Err(error) => tracing::error!("a machine that may run here is not known: {error}"),
            }
        }
        Ok(found)
    }

    fn target(&self, machine: &Prepared) -> Option<Arc<dyn Target>> {
        let found = self.targets.iter().find(|target| target.name() == machine.target).cloned();
        if found.is_none() {
            tracing::error!("there is no target {} here: {}", machine.target, machine.place);
        }
        found
    }

    /// Watches a machine that runs.
    fn own(self: &Arc<Self>, status: MachineStatus, target: Arc<dyn Target>) {
        let key = (status.group.clone(), status.member.clone());
        self.running.send_modify(|running| drop(running.insert(key, status.clone())));
        // The data directory is somebody else's when the server has stopped.
        let server = Arc::downgrade(self);
        tokio::spawn(async move {
            let how = target.ended(&status.machine).await.unwrap_or_default();
            let MachineStatus { group, member, .. } = &status;
            tracing::info!(group, member, how, "the recovered machine has ended");
            if let Some(server) = server.upgrade() {
                server.forget(&status);
            }
        });
    }

    fn forget(&self, status: &MachineStatus) {
        let MachineStatus { group, member, .. } = status;
        let removed = self.records.remove(&record_path(group, member));
        if let Err(error) = removed.and_then(|()| self.records.sync_dir(group)) {
            tracing::warn!(group, member, "the record of a machine that has ended stays: {error}");
        }
        let key = (group.clone(), member.clone());
        self.running.send_modify(|running| drop(running.remove(&key)));
    }

    /// Puts a machine on record, durably. A full disk does not keep it from that: the group is recovered already.
    fn record(&self, status: &MachineStatus) -> Result<(), String> {
        let MachineStatus { group, member, .. } = status;
        let record = Record { format: FORMAT, status: status.clone() };
        let text = serde_json::to_vec_pretty(&record).expect("plain data");
        let write = || {
            self.records.create_dir(group)?;
            self.records.sync_dir("")?;
            replace(&self.records, group, &format!("{member}.json"), &text)
        };
        let written = self.registry.reserve().write_anyway(self.records.root(), write);
        written.map_err(|error| format!("{member} cannot be put on record: {error}"))
    }

    /// The machines that run, of one group or of all.
    #[must_use]
    pub fn running(&self, group: Option<&str>) -> Vec<MachineStatus> {
        let running = self.running.borrow();
        running.values().filter(|of| group.is_none_or(|group| of.group == group)).cloned().collect()
    }

    /// The descriptions of a group's members.
    pub async fn described(&self, group: &str) -> Result<Vec<DescribedMachine>, String> {
        let mut described = Vec::new();
        for (member, has_disks) in bootable(&control::group_status(&self.registry, group).await?) {
            let name = member.clone();
            let asked = |done| Event::Machine { member: name, done };
            let kept = control::ask(&self.registry, group, asked).await??;
            described.push(DescribedMachine { member, has_disks, kept });
        }
        Ok(described)
    }

    /// Finds everything that would keep the group's machines from running here. Nothing of the group changes.
    pub async fn rehearse(&self, group: &str, ask: &BootAsk) -> Result<Booted, String> {
        let _turn = self.turn.lock().await;
        self.check_unused(group)?;
        let (plan, mut problems, mut notes) = self.plan(group, ask, true).await?;
        let checked = self.targets[0].check(&plan).await;
        problems.extend(checked.problems);
        notes.extend(checked.notes);
        all_well(problems)?;
        Ok(Booted { machines: Vec::new(), commands: checked.commands, notes })
    }

    /// Starts the machines of a recovered group. They stand still until [`Machines::resume`].
    pub async fn boot(self: &Arc<Self>, group: &str, ask: &BootAsk) -> Result<Booted, String> {
        let _turn = self.turn.lock().await;
        self.check_unused(group)?;
        if control::group_status(&self.registry, group).await?.recovered.is_none() {
            return Err(format!("group {group} is not recovered"));
        }
        let (plan, problems, notes) = self.plan(group, ask, false).await?;
        all_well(problems)?;
        let target = &self.targets[0];
        let mut booted = Booted { notes, ..Booted::default() };
        for guest in &plan.guests {
            match self.start(target, &plan, guest).await {
                Ok((status, notes)) => {
                    booted.notes.extend(notes);
                    booted.commands.push(status.machine.command.clone());
                    booted.machines.push(status);
                }
                Err(reason) => {
                    for status in &booted.machines {
                        let _ = target.stop(&status.machine, Stop::Now).await;
                    }
                    self.gone(&booted.machines, FORGETS_WITHIN).await;
                    return Err(format!(
                        "{reason}. The group is recovered; none of its machines runs"
                    ));
                }
            }
        }
        Ok(booted)
    }

    /// Starts one machine. It is on record before anything runs, and again as it can be found. Returns notes for the
    /// operator, too.
    async fn start(
        self: &Arc<Self>,
        target: &Arc<dyn Target>,
        plan: &Plan,
        guest: &Guest,
    ) -> Result<(MachineStatus, Vec<String>), String> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let mut status = MachineStatus {
            group: plan.group.clone(),
            member: guest.member.clone(),
            since_unix_ms: since.map_or(0, |since| since.as_millis() as u64),
            machine: target.prepare(plan, guest).await?,
        };
        let mut started = self.record(&status).and_then(|()| self.allow_disks(&status));
        if started.is_ok() {
            started = target.start(&mut status.machine).await;
        }
        if started.is_ok() {
            started = self.record(&status);
        }
        match started {
            Ok(()) => {
                let notes = std::mem::take(&mut status.machine.notes);
                self.own(status.clone(), Arc::clone(target));
                Ok((status, notes))
            }
            Err(reason) => {
                let _ = target.stop(&status.machine, Stop::Now).await;
                target.ended(&status.machine).await;
                self.forget(&status);
                Err(reason)
            }
        }
    }

    /// Lets machines run that were just started.
    pub async fn resume(&self, machines: &[MachineStatus]) -> Result<(), String> {
        for MachineStatus { machine, .. } in machines {
            if let Some(target) = self.target(machine) {
                target.resume(machine).await?;
            }
        }
        Ok(())
    }

    /// Asks the guest to shut down, or ends it at once. Returns those that still run.
    pub async fn stop(
        &self,
        group: &str,
        member: Option<&str>,
        now: bool,
        within: Duration,
    ) -> Result<Vec<MachineStatus>, String> {
        let mut machines = self.running(Some(group));
        machines.retain(|machine| member.is_none_or(|member| machine.member == member));
        if machines.is_empty() {
            let of = member.map_or_else(String::new, |member| format!(" as {member}"));
            return Err(format!("no machine of group {group} runs here{of}"));
        }
        let (how, within) =
            if now { (Stop::Now, FORGETS_WITHIN) } else { (Stop::Shutdown, within) };
        let mut problems = Vec::new();
        for MachineStatus { machine, .. } in &machines {
            if let Some(target) = self.target(machine) {
                problems.extend(target.stop(machine, how).await.err());
            }
        }
        all_well(problems)?;
        self.gone(&machines, within).await;
        let running = self.running(Some(group));
        machines.retain(|machine| running.contains(machine));
        Ok(machines)
    }

    /// Waits until these machines have ended, or for so long.
    async fn gone(&self, machines: &[MachineStatus], within: Duration) {
        let mut running = self.running.subscribe();
        let are_gone = |running: &Running| !machines.iter().any(|of| is_in(of, running));
        let _ = timeout(within, running.wait_for(are_gone)).await;
    }

    fn check_unused(&self, group: &str) -> Result<(), String> {
        if let Some(status) = self.running(Some(group)).first() {
            let MachineStatus { member, machine, .. } = status;
            return Err(format!(
                "{member} runs here already ({}). `tidelock-backup machine attach {group} {member}` shows its console, \
                 `tidelock-backup machine stop {group}` ends it",
                machine.place
            ));
        }
        match self.exports.in_use(group).first() {
            Some(disk) => Err(format!(
                "somebody is connected to the recovered disk {disk}: a second guest on it would destroy its file \
                 system. End that client, then ask again"
            )),
            None => Ok(()),
        }
    }

    /// Lets the user that a machine runs as, and no other, use the disks of its group.
    fn allow_disks(&self, status: &MachineStatus) -> Result<(), String> {
        let MachineStatus { group, machine, .. } = status;
        let Some(user) = machine.disk_user else { return Ok(()) };
        let allowed = self.exports.allow(group, user.uid, user.gid);
        allowed.map_err(|error| format!("the disks of group {group}: {error}"))
    }

    fn sockets_dir(&self, group: &str) -> PathBuf {
        self.registry.config().exports_dir.join(group)
    }

    /// The machines that a recovery brings back; reasons why one of them cannot be started; notes for the operator.
    async fn plan(
        &self,
        group: &str,
        ask: &BootAsk,
        rehearses: bool,
    ) -> Result<(Plan, Vec<String>, Vec<String>), String> {
        let status = control::group_status(&self.registry, group).await?;
        let members: Vec<_> = bootable(&status).into_iter().map(|(member, _)| member).collect();
        let mut problems = check_members(ask, &members);
        let (mut notes, mut guests) = (Vec::new(), Vec::new());
        for DescribedMachine { member, has_disks, kept } in self.described(group).await? {
            let given =
                ask.machines.iter().find(|(of, _)| of.as_ref().is_none_or(|m| *m == member));
            let approved = given.is_some() || rehearses || kept.is_approved();
            let machine = given.map(|(_, machine)| machine.clone()).or(kept.described);
            let Some(machine) = machine else {
                match has_disks {
                    true => problems.push(format!(
                        "the host sent no machine description for {member}: set group.member.machine in its \
                         configuration next time, and now give one with --machine {member}=FILE"
                    )),
                    false => notes.push(format!(
                        "{member} is not booted: its host sent no machine description. It has no disks here: start it \
                         from an image of your own, with the address that it had, or give its description with \
                         --machine {member}=FILE"
                    )),
                }
                continue;
            };
            if !approved {
                problems.push(format!(
                    "nobody has approved how the host describes {member} now: run `tidelock-backup machine approve \
                     {group}`, and ask again"
                ));
            }
            if let Err(reason) = machine.check() {
                problems.push(format!("{member} cannot be booted: {reason}"));
                continue;
            }
            let disks = self.disks_of(&status, &member);
            guests.push(Guest { member, machine, disks });
        }
        let plan = Plan {
            group: group.to_owned(),
            members,
            guests,
            settings: ask.settings.clone(),
            dir: self.sockets_dir(group),
        };
        Ok((plan, problems, notes))
    }

    /// A member's disks, where they are offered once the group is recovered.
    fn disks_of(&self, status: &GroupStatus, member: &str) -> Vec<(String, ExportedDisk)> {
        let writer = status.writers.iter().find(|writer| writer.member == member);
        let disks = writer.into_iter().flat_map(|writer| &writer.disks);
        let disks = disks.map(|disk| {
            let name = format!("{member}.{}", disk.name);
            let socket = self.sockets_dir(&status.group).join(format!("{name}.sock"));
            (disk.name.clone(), ExportedDisk { name, size_bytes: disk.size_bytes, socket })
        });
        disks.collect()
    }
}

fn record_path(group: &str, member: &str) -> String {
    format!("{group}/{member}.json")
}

fn is_in(status: &MachineStatus, running: &Running) -> bool {
    running.values().any(|of| of == status)
}

/// All that is wrong in one answer.
fn all_well(problems: Vec<String>) -> Result<(), String> {
    match &problems[..] {
        [] => Ok(()),
        [problem] => Err(problem.clone()),
        _ => Err(problems.iter().map(|problem| format!("\n  - {problem}")).collect()),
    }
}

/// Members that a recovery would bring back, or has, and whether they have disks.
fn bootable(status: &GroupStatus) -> Vec<(String, bool)> {
    let writers: Vec<String> = match &status.recovered {
        Some(recovery) => {
            let recovered = recovery.writers.iter().filter(|writer| writer.is_recovered);
            recovered.map(|writer| writer.member.clone()).collect()
        }
        None => {
            let is_whole = |copy| matches!(copy, CopyState::Whole | CopyState::Resyncing);
            let members = status
                .writers
                .iter()
                .filter(|writer| writer.standing == Standing::Member && is_whole(writer.copy));
            members.map(|writer| writer.member.clone()).collect()
        }
    };
    let followers = status.followers.iter().map(|follower| (follower.member.clone(), false));
    writers.into_iter().map(|member| (member, true)).chain(followers).collect()
}

/// A name that is nobody's is a slip of the pen, and the right machine would go without.
fn check_members(ask: &BootAsk, members: &[String]) -> Vec<String> {
    let wrong = ask.machines.iter().filter_map(|(of, _)| {
        let all = members.join(", ");
        match of {
            Some(member) if !members.contains(member) => {
                Some(format!("--machine {member}=FILE: there is no {member} to boot, but {all}"))
            }
            None if members.len() != 1 => {
                let first = members.first().map_or("MEMBER", String::as_str);
                Some(format!(
                    "--machine FILE: say whose it is, as --machine {first}=FILE: there are {all}"
                ))
            }
            _ => None,
        }
    });
    wrong.collect()
}
