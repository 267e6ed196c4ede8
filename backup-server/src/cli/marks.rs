//! `tidelock-backup bookmark` and `tidelock-backup pin`.

use super::args::Mark;
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::travel::MarkStatus;
use anyhow::{Context, Result, bail};
use serde_json::json;
use tidelock_replica::text;
use tidelock_replica::travel::when::When;
use tidelock_store::journal::MarkKind;

pub(super) async fn run(config: Config, kind: MarkKind, args: Mark) -> Result<()> {
    let client = Client::connect(config).await?;
    let outcome = mark(&client, kind, &args).await;
    client.end().await;
    outcome
}

async fn mark(client: &Client, kind: MarkKind, args: &Mark) -> Result<()> {
    let group = args.group.clone();
    if args.list {
        let Reply::Marks { mut marks } = client.ask(&Request::Marks { group }).await? else {
            bail!("the server answered something else");
        };
        marks.retain(|mark| mark.kind == kind);
        marks.sort_by_key(|mark| mark.at.hlc_raw);
        if args.json {
            println!("{}", serde_json::to_string_pretty(&json!({ "marks": marks }))?);
        } else if marks.is_empty() {
            println!("group {} has no {}s", args.group, kind.word());
        }
        if !args.json {
            marks.iter().for_each(|mark| println!("{}", line(mark)));
        }
        return Ok(());
    }
    let name = args.name.clone().context("say its name, or --list")?;
    if args.remove {
        let request = Request::Unmark { group, name: name.clone(), kind };
        let Reply::Unmarked = client.ask(&request).await? else {
            bail!("the server answered something else");
        };
        match args.json {
            true => println!("{}", json!({ "removed": name })),
            false => println!("{} {name} is removed", kind.word()),
        }
        return Ok(());
    }
    let request = Request::Mark {
        group,
        name,
        kind,
        at: args.at.clone().unwrap_or(When::Latest),
        expires_in_ms: args.expires,
        moves: args.moves,
    };
    let Reply::Marked { mark } = client.ask(&request).await? else {
        bail!("the server answered something else");
    };
    match args.json {
        true => println!("{}", serde_json::to_string(&json!({ "mark": mark }))?),
        false => println!("{}", line(&mark)),
    }
    Ok(())
}

/// A mark in a line.
pub(super) fn line(mark: &MarkStatus) -> String {
    let expires =
        mark.expires_at_unix_ms.map_or_else(String::new, |at| format!("  until {}", text::utc(at)));
    let host = mark.host.as_ref().map_or_else(String::new, |host| format!("  by {host}"));
    let lost = if mark.lost { "  LOST: its point is gone" } else { "" };
    format!("{:<8}  {:<20}  {}{expires}{host}{lost}", mark.kind.word(), mark.name, mark.at)
}
