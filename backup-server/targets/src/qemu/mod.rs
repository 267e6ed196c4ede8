//! QEMU on this host. A machine is a process of its own session, its console and its monitors are sockets: it outlives the
//! server, and the next server finds it again.
//!
//! | module | what it is for |
//! |---|---|
//! | `command` | the command line |
//! | `monitor` | QEMU's monitor |

mod command;
mod monitor;
#[cfg(test)]
mod tests;

use crate::jail::Jail;
use crate::network::{self, remove_taps};
use crate::process::{self, Held, Process};
use crate::site::Site;
use crate::target::{Checked, DiskUser, Guest, Later, Plan, Prepared, Status, Stop, Target};
use crate::{Places, Settings};
use command::{Overrides, Sockets, command_line, shell};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, chown};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

const NAME: &str = "qemu";
const PROGRAM: &str = "qemu-system-x86_64";
const KVM: &str = "kvm";
/// QEMU's own translation, which works everywhere.
const TCG: &str = "tcg";
const KVM_DEVICE: &str = "/dev/kvm";
/// QEMU answers on its monitor by then, or hangs.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// Pause between attempts to reach the monitor of a QEMU that starts.
const LOOKS_EACH: Duration = Duration::from_millis(20);
/// QEMU that was told to end has done so by then, or is killed.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// Pause between attempts to find out whether a process is the one on record.
const TELLS_EACH: Duration = Duration::from_secs(1);

/// QEMU on this host.
#[derive(Debug)]
pub struct Qemu {
    places: Places,
    /// A machine has started here only without KVM.
    without_kvm: AtomicBool,
}

/// A machine as QEMU runs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Machine {
    member: String,
    jail: Jail,
    program: PathBuf,
    arguments: Vec<String>,
    /// Tried if QEMU does not start with the arguments above.
    without_kvm: Option<Vec<String>>,
    sockets: Sockets,
    /// Interfaces that were made for it.
    taps: Vec<String>,
    process: Option<Process>,
}

/// This site's settings for all machines of a plan.
struct Ready {
    site: Site,
    jail: Jail,
    program: PathBuf,
    accelerator: Option<String>,
}

impl Qemu {
    /// QEMU with the settings of these files, which are read at each use.
    #[must_use]
    pub fn new(places: Places) -> Self {
        Self { places, without_kvm: AtomicBool::new(false) }
    }

    async fn ready(&self, settings: &Settings) -> Result<Ready, String> {
        let site = Site::read(&self.places.boot_file).map_err(|error| error.to_string())?;
        let jail = Jail::new(site.user()).await.map_err(|error| error.to_string())?;
        let program = settings.qemu.clone().or_else(|| site.qemu.clone());
        let accelerator = settings.accelerator.clone().or_else(|| site.accelerator.clone());
        Ok(Ready { site, jail, program: program.unwrap_or_else(|| PROGRAM.into()), accelerator })
    }

    /// Everything that can be known about a machine without a process. Makes its taps.
    async fn make(
        &self,
        ready: &Ready,
        plan: &Plan,
        guest: &Guest,
        dir: &Path,
        rehearses: bool,
    ) -> Result<Machine, Vec<String>> {
        let sockets = Sockets::of(dir, &guest.member);
        let of_site = ready.site.of(&plan.group, &guest.member);
        let mut overrides = Overrides {
            accelerator: String::new(),
            memory_mib: plan.settings.memory_mib,
            boot_dir: self.places.boot_dir.clone(),
            networks: Vec::new(),
            arguments: plan.settings.arguments.clone(),
            rehearses,
        };
        let line = |overrides: &Overrides| {
            command_line(guest, &of_site, &ready.site, &sockets, overrides)
                .map_err(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        // Problems are told before an interface is made.
        line(&overrides)?;
        let mut taps = Vec::new();
        match network::connect(plan, guest, &ready.jail, &mut taps).await {
            Ok(networks) => overrides.networks = networks,
            Err(reason) => {
                remove_taps(&taps).await;
                return Err(vec![reason]);
            }
        }
        let with = |accelerator: &str| {
            line(&Overrides { accelerator: accelerator.to_owned(), ..overrides.clone() })
        };
        let tries_kvm = Path::new(KVM_DEVICE).exists() && !self.without_kvm.load(Ordering::Relaxed);
        let (arguments, without_kvm) = match &ready.accelerator {
            Some(accelerator) => (with(accelerator)?, None),
            None if tries_kvm => (with(KVM)?, Some(with(TCG)?)),
            None => (with(TCG)?, None),
        };
        let (jail, program) = (ready.jail.clone(), ready.program.clone());
        let member = guest.member.clone();
        let process = None;
        Ok(Machine { member, jail, program, arguments, without_kvm, sockets, taps, process })
    }

    /// Starts QEMU. Where nobody has chosen an accelerator it is KVM if this host has it and QEMU starts with it, and
    /// else none. A guest that then does not run under KVM is not noticed: its processors are halted.
    async fn launch(&self, machine: &mut Machine) -> Result<Option<String>, String> {
        let Some(without_kvm) = machine.without_kvm.take() else {
            machine.launch().await?;
            return Ok(None);
        };
        let Err(reason) = machine.launch().await else { return Ok(None) };
        machine.arguments = without_kvm;
        // An error that KVM has no part in comes again.
        machine.launch().await?;
        self.without_kvm.store(true, Ordering::Relaxed);
        Ok(Some(format!(
            "QEMU does not start with KVM, so machines run without it, slowly, until the server starts again ({reason})"
        )))
    }

    /// Starts a machine as it will be, but with empty disks of the same sizes, and ends it.
    async fn rehearse(
        &self,
        ready: &Ready,
        plan: &Plan,
        guest: &Guest,
        checked: &mut Checked,
    ) -> Result<(), Vec<String>> {
        let wrong = |e: io::Error| vec![format!("{}: cannot be rehearsed: {e}", guest.member)];
        let dir = tempfile::Builder::new().prefix("tidelock-").tempdir().map_err(wrong)?;
        if let Some(user) = ready.jail.user() {
            chown(dir.path(), Some(user.uid), Some(user.gid)).map_err(wrong)?;
        }
        let mut machine = self.make(ready, plan, guest, dir.path(), true).await?;
        let launched = self.launch(&mut machine).await;
        let ended = machine.end().await;
        machine.clean().await;
        checked.notes.extend(launched.map_err(|reason| vec![reason])?);
        ended.map_err(wrong)?;
        // The command that is told is the one that will start the machine.
        let real = self.make(ready, plan, guest, &plan.dir, false).await?;
        real.clean().await;
        checked.commands.push(real.command());
        Ok(())
    }

    async fn check(&self, plan: &Plan) -> Checked {
        let mut checked = Checked::default();
        let ready = match self.ready(&plan.settings).await {
            Ok(ready) => ready,
            Err(reason) => {
                checked.problems.push(reason);
                return checked;
            }
        };
        let names: Vec<_> = plan.members.iter().map(String::as_str).collect();
        if let Some(unknown) = ready.site.unknown_member(&plan.group, &names) {
            checked.problems.push(format!(
                "{}: group {} has no {unknown} to boot, but {}",
                self.places.boot_file.display(),
                plan.group,
                names.join(", ")
            ));
        }
        checked.problems.extend(network::check(plan));
        check_memory(plan, &mut checked);
        if !is_there(&ready.program) {
            let program = ready.program.display();
            checked.problems.push(format!(
                "cannot run {program}: it is not there (is qemu-system-x86 installed?)"
            ));
        }
        if ready.accelerator.as_deref() == Some(KVM) && !Path::new(KVM_DEVICE).exists() {
            checked.problems.push(format!("accelerator {KVM}: there is no {KVM_DEVICE} here"));
        }
        // A machine cannot be started in spite of these; what else is wrong with it is told along with them.
        let starts = checked.problems.is_empty();
        for guest in &plan.guests {
            let wrong = match starts {
                true => self.rehearse(&ready, plan, guest, &mut checked).await.err(),
                false => self.wrong_with(&ready, plan, guest),
            };
            checked.problems.extend(wrong.into_iter().flatten());
        }
        checked
    }

    /// Problems of a machine, as far as they are known without an attempt.
    fn wrong_with(&self, ready: &Ready, plan: &Plan, guest: &Guest) -> Option<Vec<String>> {
        let overrides =
            Overrides { boot_dir: self.places.boot_dir.clone(), ..Overrides::default() };
        let of_site = ready.site.of(&plan.group, &guest.member);
        let sockets = Sockets::of(&plan.dir, &guest.member);
        let wrong = command_line(guest, &of_site, &ready.site, &sockets, &overrides).err()?;
        Some(wrong.iter().map(ToString::to_string).collect())
    }
}

impl Target for Qemu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check<'a>(&'a self, plan: &'a Plan) -> Later<'a, Checked> {
        Box::pin(self.check(plan))
    }

    fn prepare<'a>(
        &'a self,
        plan: &'a Plan,
        guest: &'a Guest,
    ) -> Later<'a, Result<Prepared, String>> {
        Box::pin(async {
            let ready = self.ready(&plan.settings).await?;
            let made = self.make(&ready, plan, guest, &plan.dir, false).await;
            made.map_err(|wrong| wrong.join("\n")).map(|machine| machine.told(Vec::new()))
        })
    }

    fn start<'a>(&'a self, machine: &'a mut Prepared) -> Later<'a, Result<(), String>> {
        Box::pin(async {
            let mut qemu = Machine::of(machine)?;
            let note = self.launch(&mut qemu).await?;
            *machine = qemu.told(note.into_iter().collect());
            Ok(())
        })
    }

    fn resume<'a>(&'a self, machine: &'a Prepared) -> Later<'a, Result<(), String>> {
        Box::pin(async {
            let qemu = Machine::of(machine)?;
            let resumed = monitor::ask(&qemu.sockets.monitor, "cont").await;
            resumed.map(drop).map_err(|e| format!("{} cannot go on: {e}", qemu.member))
        })
    }

    fn status<'a>(&'a self, machine: &'a Prepared) -> Later<'a, Status> {
        Box::pin(async {
            let Ok(qemu) = Machine::of(machine) else { return Status::Ended };
            if qemu.process.is_none() {
                return Status::Prepared;
            }
            match qemu.hold().await {
                Ok(Some(held)) if !held.has_ended() => {}
                Ok(_) => return Status::Ended,
                Err(_) => return Status::Running,
            }
            match monitor::ask(&qemu.sockets.monitor, "query-status").await {
                Ok(status) if status["status"] == "prelaunch" => Status::Halted,
                _ => Status::Running,
            }
        })
    }

    fn stop<'a>(&'a self, machine: &'a Prepared, how: Stop) -> Later<'a, Result<(), String>> {
        Box::pin(async move {
            let qemu = Machine::of(machine)?;
            let member = &qemu.member;
            match how {
                Stop::Shutdown => {
                    let asked = monitor::ask(&qemu.sockets.monitor, "system_powerdown").await;
                    asked.map(drop).map_err(|e| format!("{member} cannot be asked: {e}"))
                }
                Stop::Now => qemu.end().await.map_err(|e| format!("{member} cannot be ended: {e}")),
            }
        })
    }

    fn ended<'a>(&'a self, machine: &'a Prepared) -> Later<'a, Option<String>> {
        Box::pin(async {
            let qemu = Machine::of(machine).ok()?;
            let how = loop {
                match qemu.hold().await {
                    Ok(Some(held)) => break held.ended().await,
                    Ok(None) => break None,
                    Err(error) => {
                        tracing::warn!(member = qemu.member, "cannot watch QEMU: {error}");
                        sleep(TELLS_EACH).await;
                    }
                }
            };
            qemu.clean().await;
            how
        })
    }
}

impl Machine {
    fn of(machine: &Prepared) -> Result<Self, String> {
        let read = serde_json::from_value(machine.handle.clone());
        read.map_err(|error| format!("the record of a machine of QEMU is damaged: {error}"))
    }

    fn told(&self, notes: Vec<String>) -> Prepared {
        let user = self.jail.user().map_or("the server's user", |user| &user.name);
        let monitor = self.sockets.qmp.display();
        let place = match &self.process {
            Some(process) => {
                format!("QEMU's process {}, as {user}, with the monitor {monitor}", process.pid)
            }
            None => format!("QEMU, as {user}"),
        };
        Prepared {
            target: NAME.to_owned(),
            place,
            command: self.command(),
            console: Some(self.sockets.console.clone()),
            disk_user: self.jail.user().map(|user| DiskUser { uid: user.uid, gid: user.gid }),
            notes,
            handle: serde_json::to_value(self).expect("plain data"),
        }
    }

    /// The command line, for the operator.
    fn command(&self) -> String {
        shell(&[&[self.program.display().to_string()], &self.arguments[..]].concat())
    }

    /// Holds the process of the machine, unless it has ended or was never started. A process that was started without
    /// being on record listens on the monitor.
    async fn hold(&self) -> io::Result<Option<Held>> {
        match &self.process {
            Some(process) => process.hold(&self.sockets.monitor).await,
            None => process::listener(&self.sockets.monitor).await,
        }
    }

    /// Starts QEMU and waits until it answers.
    async fn launch(&mut self) -> Result<(), String> {
        let Self { member, program, sockets, .. } = &*self;
        let wrong = |e: io::Error| format!("{member}: cannot run {}: {e}", program.display());
        let log = tempfile::tempfile().map_err(wrong)?;
        let said = || {
            let mut text = vec![0; 4096];
            let len = log.read_at(&mut text, 0).unwrap_or(0);
            String::from_utf8_lossy(&text[..len]).trim().to_owned()
        };
        let _ = fs::remove_file(&sockets.monitor);
        let mut command = self.jail.command(program);
        command.args(&self.arguments).stdout(Stdio::null());
        // The process is waited for by its descriptor, and must not end with this value.
        let child = command.stderr(log.try_clone().map_err(wrong)?).spawn().map_err(wrong)?;
        let process = Process::of(child.id());
        let Some(held) = process.hold(&sockets.monitor).await.map_err(wrong)? else {
            return Err(format!("{member}: QEMU has ended"));
        };
        let until = Instant::now() + STARTS_WITHIN;
        let mut ended = std::pin::pin!(held.ended());
        loop {
            tokio::select! {
                how = &mut ended => {
                    let how = how.unwrap_or_default();
                    return Err(format!("{member}: QEMU does not start: {} ({how})", said()));
                }
                answer = monitor::ask(&sockets.monitor, "query-status") => {
                    if answer.is_ok() {
                        self.process = Some(process);
                        return Ok(());
                    }
                }
            }
            if Instant::now() > until {
                if held.kill().is_ok() {
                    let _ = ended.await;
                }
                let seconds = STARTS_WITHIN.as_secs();
                return Err(format!(
                    "{member}: QEMU does not answer within {seconds} s: {}",
                    said()
                ));
            }
            sleep(LOOKS_EACH).await;
        }
    }

    /// Ends QEMU, if it runs.
    async fn end(&self) -> io::Result<()> {
        let Some(held) = self.hold().await? else { return Ok(()) };
        let quits = async {
            let _ = monitor::ask(&self.sockets.monitor, "quit").await;
            held.ended().await
        };
        if timeout(ENDS_WITHIN, quits).await.is_err() {
            held.kill()?;
            held.ended().await;
        }
        Ok(())
    }

    /// Removes what was made for the machine.
    async fn clean(&self) {
        remove_taps(&self.taps).await;
        for socket in [&self.sockets.console, &self.sockets.qmp, &self.sockets.monitor] {
            let _ = fs::remove_file(socket);
        }
    }
}

/// Tells whether this host has the memory that all machines together want.
fn check_memory(plan: &Plan, checked: &mut Checked) {
    let wanted = |guest: &Guest| plan.settings.memory_mib.unwrap_or(guest.machine.memory_mib);
    let wanted_mib = plan.guests.iter().map(wanted).fold(0, u64::saturating_add);
    let Ok(text) = fs::read_to_string("/proc/meminfo") else { return };
    let mib = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? >> 10)
    };
    let (Some(total), Some(free)) = (mib("MemTotal:"), mib("MemAvailable:")) else { return };
    let total = total + mib("SwapTotal:").unwrap_or(0);
    if wanted_mib > total {
        checked.problems.push(format!(
            "the machines want {wanted_mib} MiB of memory, and this host has {total} MiB: give less with --memory-mib"
        ));
    } else if wanted_mib > free {
        checked.notes.push(format!(
            "the machines want {wanted_mib} MiB of memory, of which {free} MiB are free on this host: the kernel may \
             end one of them"
        ));
    }
}

/// True if a program can be found.
fn is_there(program: &Path) -> bool {
    if program.components().count() > 1 {
        return program.exists();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).exists())
}
