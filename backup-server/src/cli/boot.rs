//! `tidelock-backup recover --boot`: the machines of a recovered group, all at once. The server starts and owns them.

use super::args::Recover;
use super::client::{Call, Client};
use super::console;
use super::machine::{self, Approval};
use crate::server::control::{Reply, Request};
use crate::server::machines::{BootAsk, Booted, MachineStatus};
use anyhow::{Context, Result, bail, ensure};
use std::io::{self, IsTerminal};
use tidelock_targets::Settings;

/// Machine options of the command line. They are checked before the recovery starts, so that a mistake stops it.
pub(super) struct Boot {
    ask: BootAsk,
}

impl Boot {
    pub(super) fn new(args: &Recover) -> Result<Self> {
        for network in &args.networks {
            ensure!(network.contains('='), "--network {network}: write NAME=tap:INTERFACE");
        }
        let machines = args.machines.iter().map(|arg| {
            let (member, path) = match arg.split_once('=') {
                // A path may have the sign in it, too.
                Some((member, path)) if !member.contains('/') => (Some(member.to_owned()), path),
                _ => (None, arg.as_str()),
            };
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
            let machine = tidelock_machine::read(&text)
                .map_err(|error| anyhow::anyhow!("{path}: {error}; write {}", error.instead))?;
            Ok((member, machine))
        });
        let ask = BootAsk {
            machines: machines.collect::<Result<_>>()?,
            settings: Settings {
                networks: args.networks.clone(),
                accelerator: args.accelerator.clone(),
                memory_mib: args.memory_mib,
                qemu: args.qemu.clone(),
                arguments: args.qemu_arguments.clone(),
            },
        };
        Ok(Self { ask })
    }

    /// Everything that may be wrong with the machines is found here, before the primary is fenced: descriptions that
    /// nobody has approved, and QEMU that does not start with them.
    pub(super) async fn check(&self, client: &Client, args: &Recover) -> Result<()> {
        ensure!(
            !client.is_alone(),
            "no server runs, and the disks and consoles of machines are the server's: start it \
             (`systemctl start tidelock-backup`), or leave --boot out"
        );
        let given = |member: &str| {
            self.ask.machines.iter().any(|(of, _)| of.as_deref().is_none_or(|of| of == member))
        };
        let how = match (args.dry_run, args.accept_machine) {
            (true, _) => Approval::Show,
            (false, true) => Approval::Accept,
            (false, false) => Approval::Ask,
        };
        machine::approve_all(client, &args.group, None, how, given).await?;
        let booted = self.boot(client, args, true).await?.0;
        for note in &booted.notes {
            eprintln!("{note}");
        }
        if args.dry_run {
            booted.commands.iter().for_each(|command| println!("{command}"));
        }
        Ok(())
    }

    async fn boot(
        &self,
        client: &Client,
        args: &Recover,
        rehearse: bool,
    ) -> Result<(Booted, Call)> {
        let (group, ask) = (args.group.clone(), self.ask.clone());
        let mut call = client.call(&Request::Boot { group, ask, rehearse }).await?;
        match call.next().await? {
            Reply::Booted { booted } => Ok((booted, call)),
            _ => bail!("the server answered something else"),
        }
    }

    /// Boots every member that was recovered, and those that have no disks here.
    pub(super) async fn run(&self, client: &Client, args: &Recover) -> Result<()> {
        let (booted, mut call) = self.boot(client, args, false).await?;
        for note in &booted.notes {
            eprintln!("{note}");
        }
        for command in &booted.commands {
            eprintln!("booting: {command}");
        }
        for machine in &booted.machines {
            tell(machine);
        }
        let wants_console = args.console || (io::stdin().is_terminal() && !args.detach);
        let consoles = match wants_console {
            true => console::connect(&booted.machines).await?,
            false => Vec::new(),
        };
        call.go_on().await?;
        let Reply::Resumed = call.next().await? else {
            bail!("the server answered something else");
        };
        console::follow(consoles).await
    }
}

/// Says where a machine runs, and how it is seen and stopped from elsewhere.
pub(super) fn tell(status: &MachineStatus) {
    let MachineStatus { group, member, machine, .. } = status;
    eprintln!(
        "{member} runs as {}. It goes on without this terminal: `tidelock-backup machine list` shows it, \
         `tidelock-backup machine attach {group} {member}` its console, `tidelock-backup machine stop {group} {member}` \
         shuts it down",
        machine.place
    );
}
