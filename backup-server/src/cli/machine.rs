//! `tidelock-backup machine`: recovered machines that run here, and what hosts say about theirs.

use super::args::{Machine as Args, MachineCommand};
use super::client::Client;
use super::console;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::machines::{DescribedMachine, MachineStatus};
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::io::{self, BufRead, IsTerminal, Write};
use tidelock_replica::text;

/// Handling of a description that differs from the approved one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Approval {
    /// It is shown.
    Show,
    /// The operator is asked; without a terminal it is refused.
    Ask,
    /// It is approved.
    Accept,
}

pub(super) async fn run(config: Config, args: Args) -> Result<()> {
    let client = Client::connect(config).await?;
    let outcome = machine(&client, args).await;
    client.end().await;
    outcome
}

async fn machine(client: &Client, args: Args) -> Result<()> {
    match args.command {
        MachineCommand::List { json } => {
            let machines = running(client).await?;
            if json {
                println!("{}", serde_json::to_string_pretty(&json!({ "machines": machines }))?);
            } else if machines.is_empty() {
                println!("no recovered machine runs here");
            }
            machines.iter().filter(|_| !json).for_each(|machine| print!("{}", line(machine)));
            Ok(())
        }
        MachineCommand::Attach { group, member } => {
            let mut machines = running(client).await?;
            machines.retain(|of| of.group == group && of.member == member);
            ensure!(
                !machines.is_empty(),
                "{member} of group {group} does not run here: `tidelock-backup machine list` shows what does"
            );
            console::follow(console::connect(&machines).await?).await
        }
        MachineCommand::Stop { group, member, now, within } => {
            let request = Request::StopMachines { group, member, now, within_ms: within };
            let Reply::Machines { machines } = client.ask(&request).await? else {
                bail!("the server answered something else");
            };
            let still: Vec<_> = machines.iter().map(|machine| machine.member.as_str()).collect();
            ensure!(
                still.is_empty(),
                "{} did not shut down: look at the console (`machine attach`), or end it with --now",
                still.join(", ")
            );
            println!("stopped");
            Ok(())
        }
        MachineCommand::Approve { group, member, yes } => {
            let how = if yes { Approval::Accept } else { Approval::Ask };
            approve_all(client, &group, member.as_deref(), how, |_| false).await
        }
    }
}

async fn running(client: &Client) -> Result<Vec<MachineStatus>> {
    match client.ask(&Request::Machines).await? {
        Reply::Machines { machines } => Ok(machines),
        _ => bail!("the server answered something else"),
    }
}

/// One line of a list.
pub(super) fn line(status: &MachineStatus) -> String {
    let since = text::utc(status.since_unix_ms);
    let MachineStatus { group, member, machine, .. } = status;
    format!("machine {member} of group {group} runs here since {since} ({})\n", machine.place)
}

/// Goes through the descriptions that hosts have sent. `given`: the operator has given another one for this member.
pub(super) async fn approve_all(
    client: &Client,
    group: &str,
    member: Option<&str>,
    how: Approval,
    given: impl Fn(&str) -> bool,
) -> Result<()> {
    let request = Request::Describe { group: group.to_owned() };
    let Reply::Described { mut machines } = client.ask(&request).await? else {
        bail!("the server answered something else");
    };
    machines.retain(|machine| member.is_none_or(|member| machine.member == member));
    for machine in machines.iter().filter(|machine| !given(&machine.member)) {
        let Some(described) = &machine.kept.described else { continue };
        let Some(changes) = changes(machine) else { continue };
        eprint!("{changes}");
        let member = &machine.member;
        match how {
            Approval::Show => continue,
            Approval::Accept => {}
            Approval::Ask => {
                ensure!(
                    io::stdin().is_terminal(),
                    "nobody has approved this description of {member}: look at it, and run `tidelock-backup machine \
                     approve {group}`, or give --accept-machine"
                );
                ensure!(confirm(&format!("Boot {member} as this?"))?, "{member} is not approved");
            }
        }
        let (group, member) = (group.to_owned(), member.clone());
        let request = Request::Approve { group, member, machine: described.clone() };
        let Reply::Approved = client.ask(&request).await? else {
            bail!("the server answered something else");
        };
    }
    Ok(())
}

/// Differences between the host's description and the approved one, as text. `None`: there is no difference, or the
/// host has sent no description.
fn changes(machine: &DescribedMachine) -> Option<String> {
    let described = machine.kept.described.as_ref().filter(|_| !machine.kept.is_approved())?;
    let member = &machine.member;
    let lines = described.lines();
    let Some(approved) = &machine.kept.approved else {
        let mut text =
            format!("the host of {member} describes it so, and nobody has approved that yet:\n");
        lines.iter().for_each(|line| text += &format!("    {line}\n"));
        return Some(text);
    };
    let before = approved.lines();
    let mut text =
        format!("the host of {member} has changed its description since it was approved:\n");
    for line in before.iter().filter(|line| !lines.contains(line)) {
        text += &format!("  - {line}\n");
    }
    for line in lines.iter().filter(|line| !before.contains(line)) {
        text += &format!("  + {line}\n");
    }
    Some(text)
}

/// Asks the operator at the terminal; only `yes` is yes.
pub(super) fn confirm(question: &str) -> Result<bool> {
    let mut stderr = io::stderr();
    write!(stderr, "{question} Type yes: ").and_then(|()| stderr.flush()).context("cannot ask")?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer).context("cannot read the answer")?;
    Ok(answer.trim() == "yes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::machine::Machine;
    use tidelock_store::journal::KeptMachine;

    #[test]
    fn what_has_changed_since_the_approval_is_shown() {
        let of = |json: &str| -> Machine { serde_json::from_str(json).unwrap() };
        let now = of(r#"{"memory_mib": 64, "cpus": 2}"#);
        let machine = |approved: Option<Machine>| DescribedMachine {
            member: "db".into(),
            has_disks: true,
            kept: KeptMachine { described: Some(now.clone()), approved },
        };
        assert_eq!(changes(&machine(Some(now.clone()))), None);
        let first = changes(&machine(None)).unwrap();
        assert!(
            first.contains("nobody has approved") && first.contains("memory 64 MiB"),
            "{first}"
        );
        let before = of(r#"{"memory_mib": 64, "networks": [{"name": "lan"}]}"#);
        let changed = changes(&machine(Some(before))).unwrap();
        for line in ["- cpus 1", "+ cpus 2", "- network 0: lan, virtio, mac none given"] {
            assert!(changed.contains(line), "{line} in {changed}");
        }
        assert!(!changed.contains("memory"), "{changed}");
    }
}
