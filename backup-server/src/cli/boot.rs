//! `tidelock-backup recover --boot`: the machines of a recovered group, all at once.

use super::args::Recover;
use super::client::Client;
use crate::boot::{self, BootError, Description, Overrides};
use crate::group::Recovery;
use crate::server::control::{Reply, Request};
use crate::server::exports::ExportedDisk;
use anyhow::{Context, Result, bail, ensure};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use tidelock_protocol::message::Machine;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

/// What the command line says of machines, checked before anything is recovered.
pub(super) struct Boot {
    networks: Vec<Connection>,
    machines: Vec<DescriptionFile>,
}

/// `--network [MEMBER.]NAME=HOW`.
struct Connection {
    /// The network's name, with or without its member's in front of it: either may have dots.
    network: String,
    how: String,
}

/// `--machine [MEMBER=]FILE`.
struct DescriptionFile {
    /// Whose it is; nobody's by name, if there is only one machine.
    member: Option<String>,
    path: PathBuf,
}

/// A member and what is to run for it.
struct Guest {
    member: String,
    description: Description,
}

impl Boot {
    pub(super) fn new(args: &Recover) -> Result<Self> {
        let networks = args.networks.iter().map(|arg| {
            let (network, how) = arg
                .split_once('=')
                .with_context(|| format!("--network {arg}: write NAME=tap:INTERFACE"))?;
            Ok(Connection { network: network.to_owned(), how: how.to_owned() })
        });
        let machines = args.machines.iter().map(|arg| match arg.split_once('=') {
            // A path may have the sign in it, too.
            Some((member, path)) if !member.contains('/') => {
                DescriptionFile { member: Some(member.to_owned()), path: path.into() }
            }
            _ => DescriptionFile { member: None, path: arg.into() },
        });
        Ok(Self { networks: networks.collect::<Result<_>>()?, machines: machines.collect() })
    }

    /// Boots every member that was recovered, and those that have no disks here.
    pub(super) async fn run(
        &self,
        client: &Client,
        args: &Recover,
        recovery: &Recovery,
        disks: &[ExportedDisk],
    ) -> Result<()> {
        self.check_members(recovery)?;
        let guests = self.guests(client, recovery).await?;
        self.check_networks(&guests)?;
        let overrides = Overrides {
            qemu: args.qemu.clone(),
            accelerator: args.accelerator.clone(),
            memory_mib: args.memory_mib,
            boot_dir: args
                .boot_dir
                .clone()
                .unwrap_or_else(|| client.config().data_dir.join("boot")),
            networks: Vec::new(),
            arguments: args.qemu_arguments.clone(),
        };
        let overrides = with_accelerator(overrides).await;
        let lines = guests
            .iter()
            .map(|guest| {
                let own = own_disks(&guest.member, disks);
                let overrides =
                    Overrides { networks: self.networks_of(guest), ..overrides.clone() };
                let line = boot::command_line(&guest.member, &guest.description, &own, &overrides)?;
                Ok((guest.member.clone(), line))
            })
            .collect::<Result<Vec<_>>>()?;
        if args.dry_run {
            lines.iter().for_each(|(_, line)| println!("{}", shell(line)));
            return Ok(());
        }
        run_all(lines).await
    }

    /// A name that is nobody's is a slip of the pen, and the right machine would go without.
    fn check_members(&self, recovery: &Recovery) -> Result<()> {
        let members: Vec<_> = bootable(recovery).collect();
        for file in &self.machines {
            match &file.member {
                Some(member) => ensure!(
                    members.contains(&member.as_str()),
                    "--machine {member}={}: there is no {member} to boot, but {}",
                    file.path.display(),
                    members.join(", ")
                ),
                None => ensure!(
                    members.len() == 1,
                    "--machine {}: say whose it is, as --machine {}={0}: there are {}",
                    file.path.display(),
                    members.first().copied().unwrap_or("MEMBER"),
                    members.join(", ")
                ),
            }
        }
        Ok(())
    }

    /// The members with their descriptions. One without disks may have none: then the others are booted without it.
    async fn guests(&self, client: &Client, recovery: &Recovery) -> Result<Vec<Guest>> {
        let mut guests = Vec::new();
        for member in bootable(recovery) {
            let Some(machine) = self.machine(client, &recovery.group, member).await? else {
                ensure!(
                    recovery.followers.iter().any(|follower| follower == member),
                    BootError::NoDescription { member: member.to_owned() }
                );
                eprintln!(
                    "{member} is not booted: its host sent no machine description. It has no disks here: start it \
                     from an image of your own, with the address that it had, or give its description with \
                     --machine {member}=FILE"
                );
                continue;
            };
            let description = boot::read(&machine)
                .with_context(|| format!("{member} cannot be booted, so nothing was booted"))?;
            guests.push(Guest { member: member.to_owned(), description });
        }
        Ok(guests)
    }

    /// What was given for a member, or else what its host sent.
    async fn machine(&self, client: &Client, group: &str, member: &str) -> Result<Option<Machine>> {
        let file = self.machines.iter().find(|f| f.member.as_deref().is_none_or(|m| m == member));
        if let Some(file) = file {
            let text = std::fs::read_to_string(&file.path)
                .with_context(|| format!("cannot read {}", file.path.display()))?;
            return Ok(Some(if text.trim_start().starts_with('<') {
                Machine::Libvirt(text)
            } else {
                Machine::Json(text)
            }));
        }
        let request = Request::Machine { group: group.to_owned(), member: member.to_owned() };
        match client.ask(&request).await? {
            Reply::Machine { machine } => Ok(machine),
            _ => bail!("the server answered something else"),
        }
    }

    /// Each connection is for a network that is there, and a tap for one machine only.
    fn check_networks(&self, guests: &[Guest]) -> Result<()> {
        for connection in &self.networks {
            let wanted: Vec<_> =
                guests.iter().filter(|g| connection.network_of(g).is_some()).collect();
            if wanted.is_empty() {
                let known = guests.iter().flat_map(|guest| {
                    let names = guest.description.network_names();
                    names.into_iter().map(|name| format!("{}.{name}", guest.member))
                });
                let known = known.collect::<Vec<_>>().join(", ");
                let text = format!("{}={}", connection.network, connection.how);
                bail!(BootError::Network(
                    text,
                    if known.is_empty() { "none".into() } else { known }
                ));
            }
            ensure!(
                wanted.len() == 1 || !connection.how.starts_with("tap:"),
                "--network {0}={1}: a tap is for one machine, and {2} have a network {0}: write \
                 --network {3}.{0}={1}, or connect all of them with --network {0}=bridge:BRIDGE",
                connection.network,
                connection.how,
                wanted.iter().map(|g| g.member.as_str()).collect::<Vec<_>>().join(", "),
                wanted[0].member,
            );
        }
        Ok(())
    }

    /// What is for this machine. What is said of a member by name comes before what is said of all.
    fn networks_of(&self, guest: &Guest) -> Vec<(String, String)> {
        let mut own: Vec<_> =
            self.networks.iter().filter_map(|c| Some((c.network_of(guest)?, c))).collect();
        own.sort_by_key(|(name, connection)| *name == connection.network);
        own.into_iter().map(|(name, c)| (name, c.how.clone())).collect()
    }
}

impl Connection {
    /// The network of this machine that is meant, if any.
    fn network_of(&self, guest: &Guest) -> Option<String> {
        let names = guest.description.network_names();
        names.into_iter().find(|name| {
            let with_member =
                self.network.strip_prefix(&guest.member).and_then(|n| n.strip_prefix('.'));
            self.network == *name || with_member == Some(name)
        })
    }
}

/// Writers first: the others ask them.
fn bootable(recovery: &Recovery) -> impl Iterator<Item = &str> {
    let writers = recovery.writers.iter().filter(|writer| writer.is_recovered);
    writers.map(|writer| &writer.member).chain(&recovery.followers).map(String::as_str)
}

/// A member's disks, by their names within it.
fn own_disks(member: &str, disks: &[ExportedDisk]) -> Vec<(String, ExportedDisk)> {
    let prefix = format!("{member}.");
    let own = |d: &ExportedDisk| Some((d.name.strip_prefix(&prefix)?.to_owned(), d.clone()));
    disks.iter().filter_map(own).collect()
}

async fn with_accelerator(mut overrides: Overrides) -> Overrides {
    if overrides.accelerator.is_none() {
        let chosen = boot::accelerator::choose(&overrides.qemu()).await;
        if let Some(why) = chosen.why {
            eprintln!("KVM does not work here, so machines run without it, slowly: {why}");
        }
        overrides.accelerator = Some(chosen.name.to_owned());
    }
    overrides
}

/// Runs the machines until all have ended, or until this process is asked to end.
async fn run_all(lines: Vec<(String, Vec<String>)>) -> Result<()> {
    let several = lines.len() > 1;
    let mut running = JoinSet::new();
    for (member, line) in lines {
        eprintln!("booting {member}: {}", shell(&line));
        let machine = start(&line, several)?;
        running.spawn(async move {
            let ended = attend(&member, machine).await;
            (member, ended)
        });
    }
    let all = async {
        let mut failed = Vec::new();
        while let Some(ended) = running.join_next().await {
            let (member, status) = ended?;
            let status = status?;
            eprintln!("{member}: QEMU ended with {status}");
            if !status.success() {
                failed.push(member);
            }
        }
        ensure!(failed.is_empty(), "QEMU failed for {}", failed.join(", "));
        Ok(())
    };
    tokio::select! {
        ended = all => ended,
        // Dropping the tasks drops the machines, and that ends them.
        signal = super::asked_to_end() => {
            eprintln!("{}: ending the machines; the group stays recovered", signal?);
            Ok(())
        }
    }
}

/// One machine alone has the terminal. Of several, each line is told with the member's name in front.
fn start(line: &[String], several: bool) -> Result<Child> {
    let mut command = Command::new(&line[0]);
    command.args(&line[1..]).kill_on_drop(true);
    if several {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    command
        .spawn()
        .with_context(|| format!("cannot run {} (is qemu-system-x86 installed?)", line[0]))
}

/// Passes on what a machine says until it ends.
async fn attend(member: &str, mut machine: Child) -> Result<ExitStatus> {
    let (output, errors) = (machine.stdout.take(), machine.stderr.take());
    let (_, _, status) =
        tokio::join!(pass_on(member, output), pass_on(member, errors), machine.wait());
    Ok(status?)
}

async fn pass_on(member: &str, from: Option<impl AsyncRead + Unpin>) {
    let Some(from) = from else { return };
    let mut lines = BufReader::new(from).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        // Standard output is for the recovery. A terminal that was closed is no reason to end a machine.
        let _ = writeln!(io::stderr(), "{member}: {}", String::from_utf8_lossy(&line).trim_end());
    }
}

/// A command line as a shell would take it.
fn shell(line: &[String]) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_./=,:+@%".contains(&b);
    let quote = |arg: &String| {
        if !arg.is_empty() && arg.bytes().all(plain) {
            arg.clone()
        } else {
            format!("'{}'", arg.replace('\'', r"'\''"))
        }
    };
    line.iter().map(quote).collect::<Vec<_>>().join(" ")
}
