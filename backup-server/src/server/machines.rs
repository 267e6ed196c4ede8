//! Recovered machines that run here. They are the server's, not the terminal's that asked for them: QEMU is a process of
//! its own session, its console and its monitor are sockets, and a server that starts again finds it.
//!
//! Invariants: a machine is on record before its processors run. A group's machines are not started while one of them runs,
//! or while anybody is connected to one of its disks: two guests on one disk destroy its file system.

use super::control;
use super::exports::Exports;
use super::inbox::Event;
use super::registry::Registry;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::CopyState;
use tidelock_replica::group::GroupStatus;
use tidelock_replica::manifest::KeptMachine;
use tidelock_store::journal::Standing;
use tidelock_targets::ExportedDisk;
use tidelock_targets::jail::{self, Jail};
use tidelock_targets::qemu::{is_connection, shell};
use tidelock_targets::site::Site;
use tidelock_targets::{BootError, Guest, Overrides, Sockets, command_line};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout};

/// QEMU answers on its monitor by then, or hangs.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// QEMU answers one command by then, or hangs.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// QEMU that was told to end has done so by then, or is killed.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// A guest may have QEMU in its hands, and so what QEMU answers.
const ANSWERS_MAX_BYTES: u64 = 1 << 20;
const LOOKS_EACH: Duration = Duration::from_millis(20);
const KVM: &str = "kvm";
/// QEMU's own translation, which works everywhere.
const TCG: &str = "tcg";
const KVM_DEVICE: &str = "/dev/kvm";

/// Settings by which machines are started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BootAsk {
    /// `[MEMBER.]NAME=HOW`.
    pub networks: Vec<String>,
    /// Descriptions in place of those that hosts sent, with their members; nobody's by name, if there is one machine.
    pub machines: Vec<(Option<String>, Machine)>,
    /// QEMU's accelerator.
    pub accelerator: Option<String>,
    /// Another memory size.
    pub memory_mib: Option<u64>,
    /// Another QEMU.
    pub qemu: Option<PathBuf>,
    /// More arguments for QEMU.
    pub arguments: Vec<String>,
}

/// A machine that runs here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineStatus {
    /// The group.
    pub group: String,
    /// The member.
    pub member: String,
    /// QEMU's process.
    pub pid: u32,
    /// When it was started, in milliseconds since the Unix epoch.
    pub since_unix_ms: u64,
    /// The user that QEMU runs as; the server's own, if `None`.
    pub user: Option<String>,
    /// Console and monitors.
    pub sockets: Sockets,
    /// QEMU's command line.
    pub command: String,
    start: ProcessStart,
    /// Interfaces that were made for it.
    taps: Vec<String>,
    uid: Option<(u32, u32)>,
}

/// With its number, what identifies a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct ProcessStart {
    boot: String,
    ticks: u64,
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
    /// The command lines.
    pub commands: Vec<String>,
    /// For the operator.
    pub notes: Vec<String>,
}

/// The machines of all groups.
#[derive(Debug)]
pub struct Machines {
    registry: Arc<Registry>,
    exports: Arc<Exports>,
    dir: PathBuf,
    /// One start or stop at a time.
    turn: tokio::sync::Mutex<()>,
    /// A machine has started here only without KVM.
    without_kvm: AtomicBool,
}

/// A machine about to be started.
struct Planned {
    guest: Guest,
    overrides: Overrides,
    /// Nobody has chosen its accelerator.
    tries_kvm: bool,
    sockets: Sockets,
    taps: Vec<String>,
}

impl Machines {
    /// Finds the machines that an earlier run of the server has started.
    pub fn open(registry: Arc<Registry>, exports: Arc<Exports>) -> io::Result<Self> {
        let dir = registry.config().data_dir.join("guests");
        fs::create_dir_all(&dir)?;
        let machines = Self {
            registry,
            exports,
            dir,
            turn: tokio::sync::Mutex::default(),
            without_kvm: AtomicBool::new(false),
        };
        for machine in machines.running(None) {
            tracing::info!(
                group = machine.group,
                member = machine.member,
                pid = machine.pid,
                "a recovered machine runs"
            );
            if let Some((uid, gid)) = machine.uid {
                machines.exports.allow(&machine.group, uid, gid)?;
            }
            // The server may have ended between the record and this.
            tokio::spawn(async move {
                if qmp(&machine.sockets.monitor, "query-status")
                    .await
                    .is_ok_and(|s| s["status"] == "prelaunch")
                {
                    let _ = qmp(&machine.sockets.monitor, "cont").await;
                }
            });
        }
        Ok(machines)
    }

    /// The machines that run, of one group or of all.
    #[must_use]
    pub fn running(&self, group: Option<&str>) -> Vec<MachineStatus> {
        let files = |dir: &Path| {
            let entries = fs::read_dir(dir).into_iter().flatten().flatten();
            let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
            paths.sort_unstable();
            paths
        };
        let mut running = Vec::new();
        let groups = files(&self.dir).into_iter();
        for dir in groups.filter(|dir| group.is_none_or(|group| dir.ends_with(group))) {
            for path in files(&dir) {
                let read = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
                let machine: Option<MachineStatus> = read;
                if let Some(machine) = machine.filter(MachineStatus::is_running) {
                    running.push(machine);
                }
            }
        }
        running
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

    /// Starts QEMU as `boot` will, without the group's disks, and ends it again. Nothing of the group changes.
    pub async fn rehearse(&self, group: &str, ask: &BootAsk) -> Result<Booted, String> {
        let _turn = self.turn.lock().await;
        self.check_unused(group)?;
        let (site, jail, mut planned, notes) = self.plan(group, ask, true).await?;
        let qemu = qemu(ask, &site);
        let mut booted = Booted { notes, ..Booted::default() };
        for machine in &mut planned {
            let started = self.start(machine, &site, &jail, &qemu, &mut booted.notes).await;
            if let Ok(mut child) = started {
                let _ = qmp(&machine.sockets.monitor, "quit").await;
                if timeout(ENDS_WITHIN, child.wait()).await.is_err() {
                    let _ = child.kill().await;
                }
                remove_taps(&machine.taps).await;
            } else {
                remove_taps(&machine.taps).await;
                started?;
            }
            // The printed command line is the one that `boot` will run, not the one that the rehearsal ran.
            let overrides = Overrides { rehearses: false, ..machine.overrides.clone() };
            let sockets = Sockets::of(&self.sockets_dir(group), &machine.guest.member);
            let line = command_line(&machine.guest, &site, &sockets, &overrides);
            booted.commands.push(told(&qemu, &line.map_err(|e| e.to_string())?));
        }
        let _ = fs::remove_dir_all(self.rehearsal_dir(group));
        Ok(booted)
    }

    /// Starts the machines of a recovered group. They stand still until [`Machines::resume`].
    pub async fn boot(&self, group: &str, ask: &BootAsk) -> Result<Booted, String> {
        let _turn = self.turn.lock().await;
        self.check_unused(group)?;
        if control::group_status(&self.registry, group).await?.recovered.is_none() {
            return Err(format!("group {group} is not recovered"));
        }
        let (site, jail, planned, notes) = self.plan(group, ask, false).await?;
        let qemu = qemu(ask, &site);
        let mut booted = Booted { notes, ..Booted::default() };
        for mut machine in planned {
            let started = self.start(&mut machine, &site, &jail, &qemu, &mut booted.notes).await;
            let started = match started {
                Ok(child) => self.keep(group, child, &machine, &site, &jail, &qemu).await,
                Err(reason) => Err(reason),
            };
            match started {
                Ok(status) => {
                    booted.commands.push(status.command.clone());
                    booted.machines.push(status);
                }
                Err(reason) => {
                    remove_taps(&machine.taps).await;
                    for machine in &booted.machines {
                        let _ = self.end(machine).await;
                    }
                    return Err(format!(
                        "{reason}. The group is recovered; none of its machines runs"
                    ));
                }
            }
        }
        Ok(booted)
    }

    /// Puts a machine that has started on record.
    async fn keep(
        &self,
        group: &str,
        mut child: Child,
        machine: &Planned,
        site: &Site,
        jail: &Jail,
        qemu: &Path,
    ) -> Result<MachineStatus, String> {
        let member = &machine.guest.member;
        let wrong = |e: io::Error| format!("{member} cannot be started: {e}");
        let pid = child.id().ok_or_else(|| format!("{member}: QEMU has ended"))?;
        let line = command_line(&machine.guest, site, &machine.sockets, &machine.overrides);
        let status = MachineStatus {
            group: group.to_owned(),
            member: member.clone(),
            pid,
            since_unix_ms: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_millis() as u64),
            user: jail.user().map(|user| user.name.clone()),
            sockets: machine.sockets.clone(),
            command: told(qemu, &line.map_err(|e| e.to_string())?),
            start: ProcessStart::of(pid).map_err(wrong)?,
            taps: machine.taps.clone(),
            uid: jail.user().map(|user| (user.uid, user.gid)),
        };
        if let Err(error) = self.record(&status) {
            let _ = child.kill().await;
            return Err(wrong(error));
        }
        let (group, member) = (status.group.clone(), status.member.clone());
        let taps = status.taps.clone();
        tokio::spawn(async move {
            if let Ok(ended) = child.wait().await {
                tracing::info!(group, member, "QEMU has ended: {ended}");
                remove_taps(&taps).await;
            }
        });
        Ok(status)
    }

    /// Lets machines run that were just started.
    pub async fn resume(&self, machines: &[MachineStatus]) -> Result<(), String> {
        for machine in machines {
            let resumed = qmp(&machine.sockets.monitor, "cont").await;
            resumed.map_err(|e| format!("{} cannot go on: {e}", machine.member))?;
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
        let _turn = self.turn.lock().await;
        let mut machines = self.running(Some(group));
        machines.retain(|machine| member.is_none_or(|member| machine.member == member));
        if machines.is_empty() {
            let of = member.map_or_else(String::new, |member| format!(" as {member}"));
            return Err(format!("no machine of group {group} runs here{of}"));
        }
        if now {
            for machine in &machines {
                self.end(machine).await.map_err(|e| e.to_string())?;
            }
        } else {
            for machine in &machines {
                let asked = qmp(&machine.sockets.monitor, "system_powerdown").await;
                asked.map_err(|e| format!("{} cannot be asked: {e}", machine.member))?;
            }
            let until = Instant::now() + within;
            while machines.iter().any(MachineStatus::is_running) && Instant::now() < until {
                sleep(LOOKS_EACH).await;
            }
        }
        machines.retain(MachineStatus::is_running);
        Ok(machines)
    }

    async fn end(&self, machine: &MachineStatus) -> io::Result<()> {
        let _ = qmp(&machine.sockets.monitor, "quit").await;
        let until = Instant::now() + ENDS_WITHIN;
        while machine.is_running() && Instant::now() < until {
            sleep(LOOKS_EACH).await;
        }
        if machine.is_running()
            && let Some(pid) = rustix::process::Pid::from_raw(machine.pid as i32)
        {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
            while machine.is_running() {
                sleep(LOOKS_EACH).await;
            }
        }
        remove_taps(&machine.taps).await;
        fs::remove_file(self.record_path(&machine.group, &machine.member))
    }

    fn check_unused(&self, group: &str) -> Result<(), String> {
        if let Some(machine) = self.running(Some(group)).first() {
            let member = &machine.member;
            return Err(format!(
                "{member} runs here already (QEMU's process {}). `tidelock-backup machine attach {group} {member}` \
                 shows its console, `tidelock-backup machine stop {group}` ends it",
                machine.pid
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

    fn sockets_dir(&self, group: &str) -> PathBuf {
        self.registry.config().exports_dir.join(group)
    }

    fn rehearsal_dir(&self, group: &str) -> PathBuf {
        self.registry.config().exports_dir.join(format!(".boot-{group}"))
    }

    fn record_path(&self, group: &str, member: &str) -> PathBuf {
        self.dir.join(group).join(format!("{member}.json"))
    }

    /// A full disk does not keep a machine from being on record: the group is recovered already.
    fn record(&self, machine: &MachineStatus) -> io::Result<()> {
        self.registry.reserve().write_anyway(&self.dir, || self.write_record(machine))
    }

    fn write_record(&self, machine: &MachineStatus) -> io::Result<()> {
        let path = self.record_path(&machine.group, &machine.member);
        let dir = path.parent().expect("below a directory");
        fs::create_dir_all(dir)?;
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        io::Write::write_all(&mut file, &serde_json::to_vec_pretty(machine)?)?;
        file.as_file().sync_all()?;
        file.persist(&path).map_err(|error| error.error)?;
        fs::File::open(dir)?.sync_all()
    }

    /// Everything that can be known before anything is started.
    async fn plan(
        &self,
        group: &str,
        ask: &BootAsk,
        rehearses: bool,
    ) -> Result<(Site, Jail, Vec<Planned>, Vec<String>), String> {
        let text = |error: io::Error| error.to_string();
        let config = self.registry.config();
        let site = Site::read(&config.boot_file).map_err(text)?;
        let jail = Jail::new(site.user()).await.map_err(text)?;
        let status = control::group_status(&self.registry, group).await?;
        let members = bootable(&status);
        let names: Vec<_> = members.iter().map(|(member, _)| member.as_str()).collect();
        check_members(ask, &names)?;
        if let Some(unknown) = site.unknown_member(group, &names) {
            let (file, names) = (config.boot_file.display(), names.join(", "));
            return Err(format!("{file}: group {group} has no {unknown} to boot, but {names}"));
        }
        let mut notes = Vec::new();
        let mut guests = Vec::new();
        for described in self.described(group).await? {
            let DescribedMachine { member, has_disks, kept } = described;
            let given =
                ask.machines.iter().find(|(of, _)| of.as_ref().is_none_or(|m| *m == member));
            let approved = given.is_some() || rehearses || kept.is_approved();
            let Some(machine) = given.map(|(_, machine)| machine.clone()).or(kept.described) else {
                if has_disks {
                    return Err(format!(
                        "the host sent no machine description for {member}: set group.member.machine in its \
                         configuration next time, and now give one with --machine {member}=FILE"
                    ));
                }
                notes.push(format!(
                    "{member} is not booted: its host sent no machine description. It has no disks here: start it \
                     from an image of your own, with the address that it had, or give its description with \
                     --machine {member}=FILE"
                ));
                continue;
            };
            if !approved {
                return Err(format!(
                    "nobody has approved how the host describes {member} now: run `tidelock-backup machine approve \
                     {group}`, and ask again"
                ));
            }
            machine.check().map_err(|reason| format!("{member} cannot be booted: {reason}"))?;
            let of_site = site.of(group, &member);
            let disks = self.disks_of(&status, &member);
            guests.push(Guest { member, machine, of_site, disks });
        }
        check_networks(ask, &guests)?;
        let accelerator = ask.accelerator.clone().or_else(|| site.accelerator.clone());
        let dir = match rehearses {
            true => self.rehearsal_dir(group),
            false => self.sockets_dir(group),
        };
        fs::create_dir_all(&dir).map_err(text)?;
        match jail.user() {
            Some(user) if rehearses => {
                self.exports.give_dir(&dir, user.uid, user.gid).map_err(text)?
            }
            Some(user) => self.exports.allow(group, user.uid, user.gid).map_err(text)?,
            None => {}
        }
        let mut planned: Vec<Planned> = Vec::new();
        for guest in guests {
            let mut taps = Vec::new();
            let networks = self.networks_of(ask, group, &guest, &jail, &mut taps).await;
            let networks = match networks {
                Ok(networks) => networks,
                Err(reason) => {
                    let made = planned.iter().flat_map(|machine| &machine.taps).chain(&taps);
                    remove_taps(&made.cloned().collect::<Vec<_>>()).await;
                    return Err(reason);
                }
            };
            let overrides = Overrides {
                accelerator: accelerator.clone().unwrap_or_else(|| TCG.to_owned()),
                memory_mib: ask.memory_mib,
                boot_dir: config.data_dir.join("boot"),
                networks,
                arguments: ask.arguments.clone(),
                rehearses,
            };
            let sockets = Sockets::of(&dir, &guest.member);
            let tries_kvm = accelerator.is_none();
            planned.push(Planned { guest, overrides, tries_kvm, sockets, taps });
        }
        Ok((site, jail, planned, notes))
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

    /// Connections of this machine's networks. A connection for `MEMBER.NAME` takes precedence over one for `NAME`.
    /// For a bridge, the server makes a tap in the bridge: QEMU itself may not make one.
    async fn networks_of(
        &self,
        ask: &BootAsk,
        group: &str,
        guest: &Guest,
        jail: &Jail,
        taps: &mut Vec<String>,
    ) -> Result<Vec<(String, String)>, String> {
        let mut own: Vec<_> = connections(ask)
            .filter_map(|(network, how)| Some((network_of(network, guest)?, network, how)))
            .collect();
        own.sort_by_key(|(name, network, _)| name == network);
        let mut seen: Vec<(String, String)> = Vec::new();
        for (name, _, how) in own {
            if seen.iter().any(|(other, _)| *other == name) {
                continue;
            }
            let how = match how.strip_prefix("bridge:") {
                None => how.to_owned(),
                Some(bridge) => {
                    let nth = seen.len();
                    let tap = tap_name(group, &guest.member, nth);
                    make_tap(&tap, bridge, jail)
                        .await
                        .map_err(|reason| format!("--network {name}=bridge:{bridge}: {reason}"))?;
                    taps.push(tap.clone());
                    format!("tap:{tap}")
                }
            };
            seen.push((name, how));
        }
        Ok(seen)
    }

    /// Starts QEMU. Where nobody has chosen an accelerator it is KVM if this host has it and QEMU starts with it, and
    /// else none. A guest that then does not run under KVM is not noticed: its processors stand still until it is on record.
    async fn start(
        &self,
        machine: &mut Planned,
        site: &Site,
        jail: &Jail,
        qemu: &Path,
        notes: &mut Vec<String>,
    ) -> Result<Child, String> {
        let tries_kvm = machine.tries_kvm
            && Path::new(KVM_DEVICE).exists()
            && !self.without_kvm.load(Ordering::Relaxed);
        if !tries_kvm {
            return self.start_once(machine, site, jail, qemu).await;
        }
        machine.overrides.accelerator = KVM.to_owned();
        let with_kvm = self.start_once(machine, site, jail, qemu).await;
        let Err(reason) = with_kvm else { return with_kvm };
        machine.overrides.accelerator = TCG.to_owned();
        // An error that KVM has no part in comes again.
        let child = self.start_once(machine, site, jail, qemu).await?;
        self.without_kvm.store(true, Ordering::Relaxed);
        notes.push(format!(
            "QEMU does not start with KVM, so machines run without it, slowly, until the server starts again ({reason})"
        ));
        Ok(child)
    }

    /// Starts QEMU and waits until it answers.
    async fn start_once(
        &self,
        machine: &Planned,
        site: &Site,
        jail: &Jail,
        qemu: &Path,
    ) -> Result<Child, String> {
        let Planned { guest, overrides, sockets, .. } = machine;
        let member = &guest.member;
        let line = command_line(guest, site, sockets, overrides).map_err(|e| e.to_string())?;
        let wrong = |e: io::Error| format!("{member}: cannot run {}: {e}", qemu.display());
        let log = tempfile::tempfile().map_err(wrong)?;
        let said = |log: &fs::File| {
            use std::os::unix::fs::FileExt;
            let mut text = vec![0; 4096];
            let len = log.read_at(&mut text, 0).unwrap_or(0);
            String::from_utf8_lossy(&text[..len]).trim().to_owned()
        };
        let _ = fs::remove_file(&sockets.monitor);
        let mut child = jail
            .command(qemu)
            .args(&line)
            .stdout(Stdio::null())
            .stderr(log.try_clone().map_err(wrong)?)
            .spawn()
            .map_err(wrong)?;
        let until = Instant::now() + STARTS_WITHIN;
        loop {
            if let Some(status) = child.try_wait().map_err(wrong)? {
                let hint = match status.code() {
                    Some(127) => " (is qemu-system-x86 installed?)",
                    _ => "",
                };
                return Err(format!(
                    "{member}: QEMU does not start{hint}: {} ({status})",
                    said(&log)
                ));
            }
            if qmp(&sockets.monitor, "query-status").await.is_ok() {
                return Ok(child);
            }
            if Instant::now() > until {
                let _ = child.kill().await;
                let seconds = STARTS_WITHIN.as_secs();
                return Err(format!(
                    "{member}: QEMU does not answer within {seconds} s: {}",
                    said(&log)
                ));
            }
            sleep(LOOKS_EACH).await;
        }
    }
}

impl MachineStatus {
    /// True if the process of the machine is there.
    #[must_use]
    pub fn is_running(&self) -> bool {
        ProcessStart::of(self.pid).is_ok_and(|start| start == self.start)
    }
}

impl ProcessStart {
    /// Reads the start of a running process. A process that has ended, reaped or not, is an error.
    fn of(pid: u32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<_> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        if fields.first().is_none_or(|state| ["Z", "X"].contains(state)) {
            return Err(io::ErrorKind::NotFound.into());
        }
        let ticks = fields.get(19).and_then(|ticks| ticks.parse().ok());
        let ticks = ticks.ok_or(io::ErrorKind::InvalidData)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { boot, ticks })
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

fn qemu(ask: &BootAsk, site: &Site) -> PathBuf {
    let named = ask.qemu.clone().or_else(|| site.qemu.clone());
    named.unwrap_or_else(|| "qemu-system-x86_64".into())
}

/// A command line for people.
fn told(qemu: &Path, line: &[String]) -> String {
    shell(&[&[qemu.display().to_string()], line].concat())
}

/// A name that is nobody's is a slip of the pen, and the right machine would go without.
fn check_members(ask: &BootAsk, members: &[&str]) -> Result<(), String> {
    for (of, _) in &ask.machines {
        match of {
            Some(member) if !members.contains(&member.as_str()) => {
                let members = members.join(", ");
                return Err(format!(
                    "--machine {member}=FILE: there is no {member} to boot, but {members}"
                ));
            }
            None if members.len() != 1 => {
                let first = members.first().copied().unwrap_or("MEMBER");
                let members = members.join(", ");
                return Err(format!(
                    "--machine FILE: say whose it is, as --machine {first}=FILE: there are {members}"
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The network's name, with or without its member's in front of it (either may have dots), and how it is connected.
fn connections(ask: &BootAsk) -> impl Iterator<Item = (&str, &str)> {
    ask.networks.iter().map(|text| text.split_once('=').unwrap_or((text, "")))
}

/// The network of this machine that is meant, if any.
fn network_of(network: &str, guest: &Guest) -> Option<String> {
    let with_member = network.strip_prefix(&guest.member).and_then(|n| n.strip_prefix('.'));
    let mut names = guest.machine.network_names().into_iter();
    names.find(|name| network == *name || with_member == Some(name))
}

/// Each connection is for a network that is there, and a tap for one machine only.
fn check_networks(ask: &BootAsk, guests: &[Guest]) -> Result<(), String> {
    for (network, how) in connections(ask) {
        let wanted: Vec<_> = guests.iter().filter(|g| network_of(network, g).is_some()).collect();
        if wanted.is_empty() || !is_connection(how) {
            let known = guests.iter().flat_map(|guest| {
                let names = guest.machine.network_names();
                names.into_iter().map(|name| format!("{}.{name}", guest.member))
            });
            let known = known.collect::<Vec<_>>().join(", ");
            let known = if known.is_empty() { "none".into() } else { known };
            return Err(BootError::Network(format!("{network}={how}"), known).to_string());
        }
        if wanted.len() > 1 && how.starts_with("tap:") {
            return Err(format!(
                "--network {network}={how}: a tap is for one machine, and {} have a network {network}: write \
                 --network {}.{network}={how}, or connect all of them with --network {network}=bridge:BRIDGE",
                wanted.iter().map(|g| g.member.as_str()).collect::<Vec<_>>().join(", "),
                wanted[0].member,
            ));
        }
    }
    Ok(())
}

/// An interface's name has 15 bytes.
fn tap_name(group: &str, member: &str, nth: usize) -> String {
    let digest = blake3::hash(format!("{group}/{member}/{nth}").as_bytes());
    format!("tl{}", &digest.to_hex()[..12])
}

/// Makes a tap that QEMU's user may open, in a bridge.
async fn make_tap(tap: &str, bridge: &str, jail: &Jail) -> Result<(), String> {
    let shown = jail::output(&["ip", "-d", "link", "show", "dev", bridge]).await;
    if !shown.is_ok_and(|text| text.contains("bridge forward_delay") || text.contains(" bridge ")) {
        return Err(format!(
            "there is no bridge {bridge} here. Make one: `ip link add {bridge} type bridge && ip link set {bridge} up`"
        ));
    }
    let user = jail.user().map_or_else(|| rustix::process::geteuid().as_raw(), |user| user.uid);
    if !jail::may_make_interfaces().map_err(|error| error.to_string())? {
        return Err(format!(
            "this server has no CAP_NET_ADMIN, so it cannot put a machine into a bridge. Make a tap for the machine \
             as root, `ip tuntap add dev {tap} mode tap user {user} && ip link set {tap} master {bridge} up`, and \
             write tap:{tap} in place of bridge:{bridge}; or give the server that capability (docs/manual/recovery.md)"
        ));
    }
    let uid = user.to_string();
    remove_taps(&[tap.to_owned()]).await;
    let add = ["ip", "tuntap", "add", "dev", tap, "mode", "tap", "user", &uid];
    let set = ["ip", "link", "set", tap, "master", bridge, "up"];
    for words in [&add[..], &set[..]] {
        if let Err(error) = jail::output(words).await {
            remove_taps(&[tap.to_owned()]).await;
            return Err(error.to_string());
        }
    }
    Ok(())
}

async fn remove_taps(taps: &[String]) {
    for tap in taps {
        let _ = jail::output(&["ip", "link", "delete", "dev", tap]).await;
    }
}

/// Asks QEMU for one thing on its monitor.
async fn qmp(socket: &Path, command: &str) -> io::Result<serde_json::Value> {
    let asked = async {
        let (reader, mut writer) = UnixStream::connect(socket).await?.into_split();
        let mut lines = BufReader::new(reader.take(ANSWERS_MAX_BYTES)).lines();
        for command in ["qmp_capabilities", command] {
            let line = serde_json::json!({ "execute": command }).to_string() + "\n";
            writer.write_all(line.as_bytes()).await?;
        }
        let mut answers = 0;
        while let Some(line) = lines.next_line().await? {
            let answer: serde_json::Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                return Err(io::Error::other(error["desc"].to_string()));
            }
            if let Some(value) = answer.get("return") {
                answers += 1;
                if answers == 2 {
                    return Ok(value.clone());
                }
            }
        }
        // One that ends may end before it has answered.
        if command == "quit" {
            return Ok(serde_json::Value::Null);
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    };
    match timeout(ANSWERS_WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_) => Err(io::Error::other("QEMU does not answer on its monitor")),
    }
}
