//! `tidelock-backup recover`.

use super::args::Recover;
use super::client::Client;
use crate::boot::{self, BootError, Description, Overrides};
use crate::group::Recovery;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::exports::ExportedDisk;
use crate::text;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::process::Stdio;
use tidelock_protocol::message::Machine;
use tokio::process::{Child, Command};

pub(super) async fn run(config: Config, args: Recover) -> Result<()> {
    let networks = networks(&args.networks)?;
    let client = Client::connect(config).await?;
    let outcome = recover(&client, &args, networks).await;
    client.end().await;
    outcome
}

async fn recover(client: &Client, args: &Recover, networks: Vec<(String, String)>) -> Result<()> {
    let (recovery, disks) = tokio::select! {
        recovered = wait(client, args) => recovered?,
        signal = super::asked_to_end() => bail!("{}: the group is not recovered", signal?),
    };
    // A mistake in the description must not hide that the group is recovered.
    tell(client, args, &recovery, &disks)?;
    if !args.boot {
        if client.is_alone() {
            eprintln!("no server runs, so this process serves the disks: end it with Ctrl-C");
            super::asked_to_end().await?;
        }
        return Ok(());
    }
    let mut overrides = Overrides {
        qemu: args.qemu.clone(),
        accelerator: args.accelerator.clone(),
        memory_mib: args.memory_mib,
        boot_dir: args.boot_dir.clone().unwrap_or_else(|| client.config().data_dir.join("boot")),
        networks,
        arguments: args.qemu_arguments.clone(),
    };
    if overrides.accelerator.is_none() {
        let chosen = boot::accelerator::choose(&overrides.qemu()).await;
        if let Some(why) = chosen.why {
            eprintln!("KVM does not work here, so machines run without it, slowly: {why}");
        }
        overrides.accelerator = Some(chosen.name.to_owned());
    }
    let mut lines = Vec::new();
    let writers = recovery.writers.iter().filter(|writer| writer.is_recovered);
    for member in writers.map(|writer| &writer.member).chain(&recovery.followers) {
        let description = describe(client, args, member).await?;
        let prefix = format!("{member}.");
        let own: Vec<_> = disks
            .iter()
            .filter_map(|d| Some((d.name.strip_prefix(&prefix)?.to_owned(), d.clone())))
            .collect();
        lines.push(boot::command_line(member, &description, &own, &overrides)?);
    }
    if args.dry_run {
        lines.iter().for_each(|line| println!("{}", shell(line)));
        return Ok(());
    }
    run_all(&lines).await
}

fn networks(args: &[String]) -> Result<Vec<(String, String)>> {
    args.iter()
        .map(|arg| {
            let (name, how) = arg
                .split_once('=')
                .with_context(|| format!("--network {arg}: write NAME=tap:INTERFACE"))?;
            Ok((name.to_owned(), how.to_owned()))
        })
        .collect()
}

/// Asks for the recovery, and counts down while the old primary's lease may hold.
async fn wait(client: &Client, args: &Recover) -> Result<(Recovery, Vec<ExportedDisk>)> {
    let request =
        Request::Recover { group: args.group.clone(), primary_is_dead: args.primary_is_dead };
    let mut call = client.call(&request).await?;
    let mut bar: Option<ProgressBar> = None;
    loop {
        match call.next().await? {
            Reply::Waiting { remaining_ms } => {
                let bar = bar.get_or_insert_with(|| {
                    eprintln!(
                        "waiting until the old primary's lease is certain to have ended \
                         ({:.1} s; --primary-is-dead skips this)",
                        remaining_ms as f64 / 1e3
                    );
                    countdown(remaining_ms)
                });
                // It grows when the old primary is heard.
                bar.set_length(bar.length().unwrap_or(0).max(remaining_ms));
                bar.set_position(bar.length().unwrap_or(0) - remaining_ms);
                bar.set_message(format!("{:.1} s", remaining_ms as f64 / 1e3));
            }
            Reply::Recovered { recovery, disks } => {
                if let Some(bar) = bar {
                    bar.finish_and_clear();
                }
                return Ok((recovery, disks));
            }
            _ => bail!("the server answered something else"),
        }
    }
}

fn countdown(length_ms: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("  [{bar:40}] {msg}").expect("a constant template");
    ProgressBar::new(length_ms).with_style(style)
}

fn tell(
    client: &Client,
    args: &Recover,
    recovery: &Recovery,
    disks: &[ExportedDisk],
) -> Result<()> {
    if args.json {
        let exports: Vec<_> = disks
            .iter()
            .map(|d| {
                json!({ "name": d.name, "size_bytes": d.size_bytes, "socket": d.socket,
                        "uri": d.uri() })
            })
            .collect();
        let all = json!({
            "recovery": recovery,
            "disks": exports,
            "served_by": if client.is_alone() { "this process" } else { "server" },
        });
        println!("{}", serde_json::to_string(&all)?);
        return Ok(());
    }
    println!(
        "group {} is recovered: epoch {}, at {}",
        recovery.group,
        recovery.epoch,
        text::utc(recovery.at_unix_ms)
    );
    if recovery.primary_declared_dead {
        println!("  on the statement that the old primary is dead");
    }
    for writer in &recovery.writers {
        if writer.is_recovered {
            println!("  {}: everything up to seq {}", writer.member, writer.recovered);
        } else {
            println!("  {}: not recovered", writer.member);
        }
        if let Some(why) = &writer.why {
            println!("    {} records are left out: {why}", writer.left_out);
        }
    }
    for member in &recovery.followers {
        println!("  {member}: has no disks here");
    }
    println!("the old primary is fenced: it can commit nothing and its gate stays shut");
    println!("disks, writable at once:");
    for disk in disks {
        println!("  {:<20} {:>10}  {}", disk.name, text::bytes(disk.size_bytes), disk.uri());
    }
    Ok(())
}

async fn describe(client: &Client, args: &Recover, member: &str) -> Result<Description> {
    let machine = match &args.machine {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            if text.trim_start().starts_with('<') {
                Machine::Libvirt(text)
            } else {
                Machine::Json(text)
            }
        }
        None => {
            let (group, member) = (args.group.clone(), member.to_owned());
            let request = Request::Machine { group, member: member.clone() };
            match client.ask(&request).await? {
                Reply::Machine { machine: Some(machine) } => machine,
                Reply::Machine { machine: None } => {
                    return Err(BootError::NoDescription { member }.into());
                }
                _ => bail!("the server answered something else"),
            }
        }
    };
    Ok(boot::read(&machine)?)
}

/// Runs the machines until all have ended, or until this process is asked to end.
async fn run_all(lines: &[Vec<String>]) -> Result<()> {
    let mut machines: Vec<Child> = Vec::new();
    for line in lines {
        eprintln!("booting: {}", shell(line));
        // The first machine may talk to the terminal.
        let input = if machines.is_empty() { Stdio::inherit() } else { Stdio::null() };
        let child = Command::new(&line[0])
            .args(&line[1..])
            .stdin(input)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {} (is qemu-system-x86 installed?)", line[0]))?;
        machines.push(child);
    }
    let all = async {
        let mut failed = None;
        for machine in &mut machines {
            let status = machine.wait().await?;
            if !status.success() {
                failed = Some(status);
            }
        }
        match failed {
            Some(status) => bail!("QEMU ended with {status}"),
            None => Ok(()),
        }
    };
    tokio::select! {
        ended = all => ended,
        // Dropping the children ends them.
        signal = super::asked_to_end() => {
            eprintln!("{}: ending the machines; the group stays recovered", signal?);
            Ok(())
        }
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
