//! `tidelock-backup view`: the disks of a group as they were, as NBD exports.

use super::args::View;
use super::client::Client;
use super::{damaged, store};
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::stores::views::StoreViewStatus;
use crate::server::views::{ViewStatus, Wanted};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tidelock_replica::text;
use tidelock_replica::travel::when::When;
use tidelock_targets::ExportedDisk;

pub(super) async fn run(config: Config, args: View) -> Result<()> {
    let client = Client::connect(config).await?;
    let outcome = view(&client, &args).await;
    client.end().await;
    outcome
}

async fn view(client: &Client, args: &View) -> Result<()> {
    if args.list {
        let Reply::Views { views, of_stores } = client.ask(&Request::Views).await? else {
            bail!("the server answered something else");
        };
        return list(&views, &of_stores, args.json);
    }
    if let Some(name) = &args.close {
        let Reply::Closed = client.ask(&Request::CloseView { name: name.clone() }).await? else {
            bail!("the server answered something else");
        };
        if args.json {
            println!("{}", json!({ "closed": name }));
        } else {
            println!("view {name} is closed; what was written to it is gone");
        }
        return Ok(());
    }
    if let Some(name) = &args.roll {
        return roll(client, name, args).await;
    }
    let group = args.group.clone().context("say of which group")?;
    ensure!(
        !(args.detach && client.is_alone()),
        "no server runs that could keep the view: leave --detach out, and this process serves it until Ctrl-C"
    );
    let request = Request::View {
        group,
        at: args.at.clone().unwrap_or(When::Latest),
        wanted: Wanted {
            name: args.name.clone(),
            write: args.write,
            quota_bytes: args.quota.map(|quota| quota.bytes),
        },
        detach: args.detach,
    };
    let mut call = client.call(&request).await?;
    let (name, as_json, as_text) = match call.next().await? {
        Reply::View { view } => (view.name.clone(), to_json(&view), told(&view)),
        Reply::StoreView { view } => (view.name.clone(), json!(view), store::view(&view)),
        _ => bail!("the server answered something else"),
    };
    if args.json {
        println!("{as_json}");
    } else {
        print!("{as_text}");
        match args.detach {
            true => println!("it stays open until `tidelock-backup view --close {name}`"),
            false => eprintln!("it is open until Ctrl-C"),
        }
    }
    if args.detach {
        return Ok(());
    }
    tokio::select! {
        signal = super::asked_to_end() => {
            signal?;
            Ok(())
        }
        // Nothing more is said: only the end comes.
        ended = call.next() => {
            ended?;
            bail!("the server answered something else")
        }
    }
}

async fn roll(client: &Client, name: &str, args: &View) -> Result<()> {
    let request = Request::RollView {
        name: name.to_owned(),
        to: args.to.clone().unwrap_or(When::Latest),
        discard_writes: args.discard_writes,
    };
    let Reply::Rolled { view, from, changed, discarded_bytes } = client.ask(&request).await? else {
        bail!("the server answered something else");
    };
    if args.json {
        let mut told = to_json(&view);
        told["from"] = json!(from);
        told["changed"] = json!(changed);
        told["discarded_bytes"] = json!(discarded_bytes);
        println!("{told}");
        return Ok(());
    }
    tell(&view);
    println!("  it was at  {from}");
    if discarded_bytes > 0 {
        println!("  {} that were written to it are gone", text::bytes(discarded_bytes));
    }
    match changed {
        Some(disks) => super::diff::tell_disks(&disks),
        None => println!("  it had lost its point, so what is different is not known"),
    }
    Ok(())
}

fn list(views: &[ViewStatus], of_stores: &[StoreViewStatus], json: bool) -> Result<()> {
    if json {
        let views: Vec<_> = views.iter().map(to_json).collect();
        let all = json!({ "views": views, "of_stores": of_stores });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    if views.is_empty() && of_stores.is_empty() {
        println!("no views are open");
    }
    views.iter().for_each(tell);
    of_stores.iter().for_each(|view| print!("{}", store::view(view)));
    Ok(())
}

/// For people.
pub(super) fn tell(view: &ViewStatus) {
    print!("{}", told(view));
}

fn told(view: &ViewStatus) -> String {
    let mut out = format!("view {} of group {}\n  at         {}\n", view.name, view.group, view.at);
    if view.lost {
        out += "  LOST       the journal reached its size and gave this point up: reading fails\n";
    }
    out += &match view.quota_bytes {
        Some(quota) => {
            let (used, quota) = (text::bytes(view.used_bytes), text::bytes(quota));
            format!("  writable   {used} written, {quota} at most; the replica does not change\n")
        }
        None => "  read-only\n".to_owned(),
    };
    for of in &view.damaged {
        out += &format!("  DAMAGED    {}\n", damaged::part(of));
    }
    for disk in &view.disks {
        out +=
            &format!("  {:<20} {:>10}  {}\n", disk.name, text::bytes(disk.size_bytes), disk.uri());
    }
    out
}

/// For programs.
pub(super) fn to_json(view: &ViewStatus) -> Value {
    let disks: Vec<_> = view.disks.iter().map(disk_json).collect();
    json!({
        "name": view.name, "group": view.group, "at": view.at, "disks": disks, "detached": view.detached,
        "writable": view.quota_bytes.is_some(), "quota_bytes": view.quota_bytes, "used_bytes": view.used_bytes,
        "lost": view.lost, "damaged": view.damaged,
    })
}

fn disk_json(disk: &ExportedDisk) -> Value {
    json!({ "name": disk.name, "size_bytes": disk.size_bytes, "socket": disk.socket, "uri": disk.uri() })
}
