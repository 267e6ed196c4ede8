//! `tidelock-backup snapshot`: copies of a group's disks that outlive the window.

use super::args::Snapshot;
use super::client::{Call, Client};
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::snapshots::{Ask, Phase, SnapshotStatus, Wanted};
use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tidelock_replica::text;
use tidelock_replica::travel::snapshot::Pace;
use tidelock_replica::travel::when::When;

pub(super) async fn run(config: Config, args: Snapshot) -> Result<()> {
    let wanted = wanted(&args)?;
    let client = Client::connect(config).await?;
    let outcome = snapshot(&client, &args, wanted).await;
    client.end().await;
    outcome
}

/// What is to be made, checked before anybody is asked.
fn wanted(args: &Snapshot) -> Result<Wanted> {
    let mut names = Vec::new();
    for name in &args.names {
        names.push(match name.split_once('=') {
            None => (name.clone(), args.at.clone()),
            Some((name, at)) => {
                ensure!(args.at.is_none(), "{name} has a point of its own: leave --at out");
                let at: When = at.parse().map_err(|e| anyhow::anyhow!("{name}={at}: {e}"))?;
                (name.to_owned(), Some(at))
            }
        });
    }
    let not_before_unix_ms = match args.not_before {
        None => None,
        Some(When::WallMs(ms)) => Some(ms),
        Some(_) => bail!("--not-before is a time, such as 2026-11-22T23:30:00Z"),
    };
    let rate_bytes_s = args.rate.map(|rate| rate.bytes);
    let pace = Pace { rate_bytes_s, not_before_unix_ms, over_ms: args.over };
    let (base, roll_to) = (args.base.clone(), args.roll_to.clone());
    Ok(Wanted { names, base, roll_to, pace, expires_in_ms: args.expires })
}

async fn snapshot(client: &Client, args: &Snapshot, wanted: Wanted) -> Result<()> {
    if args.list {
        let ask = Ask::List { group: args.group.clone() };
        let Reply::Snapshots { snapshots, .. } = client.ask(&Request::Snapshot { ask }).await?
        else {
            bail!("the server answered something else");
        };
        return tell(&snapshots, &[], args.json);
    }
    let group = args.group.clone().context("say of which group")?;
    if let Some(name) = args.remove.clone() {
        let ask = Ask::Remove { group, name: name.clone() };
        let Reply::SnapshotRemoved = client.ask(&Request::Snapshot { ask }).await? else {
            bail!("the server answered something else");
        };
        match args.json {
            true => println!("{}", json!({ "removed": name })),
            false => println!("snapshot {name} is removed"),
        }
        return Ok(());
    }
    if let Some(name) = args.verify.clone() {
        return verify(client, group, name, args.json).await;
    }
    ensure!(
        !(args.detach && client.is_alone()),
        "no server runs that could make it: leave --detach out, and this process makes it"
    );
    let ask = Ask::Make { group, wanted, detach: args.detach };
    let mut call = client.call(&Request::Snapshot { ask }).await?;
    tokio::select! {
        made = follow(&mut call) => {
            let (snapshots, notes) = made?;
            tell(&snapshots, &notes, args.json)
        }
        signal = super::asked_to_end() => {
            bail!("{}: it is not whole; the same command goes on with it, and what is there is kept", signal?)
        }
    }
}

async fn follow(call: &mut Call) -> Result<(Vec<SnapshotStatus>, Vec<String>)> {
    let style = ProgressStyle::with_template("  [{bar:40}] {percent}% {msg} {eta} left")
        .expect("a constant template");
    let bar = ProgressBar::new(0).with_style(style);
    loop {
        match call.next().await? {
            Reply::Snapping { snapshots } => {
                let sum = |of: fn(&SnapshotStatus) -> u64| snapshots.iter().map(of).sum();
                bar.set_length(sum(|one| one.all_bytes));
                bar.set_position(sum(|one| one.done_bytes));
                let waiting = snapshots.iter().any(|one| one.phase == Phase::Waiting);
                let written = text::bytes(sum(|one| one.written_bytes));
                bar.set_message(if waiting {
                    "waiting".into()
                } else {
                    format!("{written} written")
                });
            }
            Reply::Snapshots { snapshots, notes } => {
                bar.finish_and_clear();
                return Ok((snapshots, notes));
            }
            _ => bail!("the server answered something else"),
        }
    }
}

async fn verify(client: &Client, group: String, name: String, as_json: bool) -> Result<()> {
    let ask = Ask::Verify { group, name: name.clone() };
    let Reply::SnapshotVerified { disks } = client.ask(&Request::Snapshot { ask }).await? else {
        bail!("the server answered something else");
    };
    let good = disks.iter().all(|disk| disk.good);
    if as_json {
        println!("{}", json!({ "name": name, "good": good, "disks": disks }));
    } else {
        for disk in &disks {
            let what = if disk.good { "as it was" } else { "DAMAGED" };
            println!("  {:<20} {what}  blake3-1MiB:{}", disk.name, disk.digest);
            for offset in disk.damaged.iter().take(10) {
                println!("    the MiB at byte {offset} is not what it was");
            }
        }
    }
    ensure!(
        good,
        "snapshot {name} is damaged: remove it, or move it with --roll-to, which makes anew what is wrong where \
                   it writes"
    );
    Ok(())
}

fn tell(snapshots: &[SnapshotStatus], notes: &[String], as_json: bool) -> Result<()> {
    if as_json {
        let all = json!({ "snapshots": snapshots, "notes": notes });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    notes.iter().for_each(|note| println!("{note}"));
    if snapshots.is_empty() {
        println!("there are no snapshots");
    }
    for one in snapshots {
        println!("snapshot {} of group {}: {}", one.name, one.group, one.phase.word());
        println!("  at         {}", one.at);
        if let Some(from) = &one.from {
            println!("  from       {from}");
        }
        if let Some(base) = &one.base {
            println!("  base       {base}, without which it cannot be read");
        }
        if let Some(at) = one.expires_at_unix_ms {
            println!("  until      {}", text::utc(at));
        }
        if let Some(reason) = &one.failed {
            println!("  FAILED     {reason}");
        }
        if one.phase != Phase::Whole {
            println!(
                "  done       {} of {}",
                text::bytes(one.done_bytes),
                text::bytes(one.all_bytes)
            );
        }
        for disk in &one.disks {
            let (stored, size) = (text::bytes(disk.stored_bytes), text::bytes(disk.size_bytes));
            println!("  {:<20} {stored} for {size}  {}", disk.name, disk.path.display());
            if let Some(digest) = &disk.digest {
                println!("  {:<20} blake3-1MiB:{digest}", "");
            }
        }
    }
    Ok(())
}
