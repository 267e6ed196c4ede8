//! `tidelock-backup remove`.

use super::args::Remove;
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail};
use tidelock_replica::group::GroupStatus;
use tidelock_replica::text;

pub(super) async fn run(config: Config, args: Remove) -> Result<()> {
    let client = Client::connect(config).await?;
    let Remove { group, member, everything } = args;
    let request = match &member {
        Some(member) => Request::Remove { group: group.clone(), member: member.clone() },
        None => Request::RemoveGroup { group: group.clone(), apply: everything },
    };
    let reply = client.ask(&request).await;
    client.end().await;
    match (reply?, member) {
        (Reply::Removed, Some(member)) => {
            println!(
                "{member} is no longer part of group {group}. If it was a writer, write removed = \
                 true into its [[group.member]] on every host: its place in the order stays taken"
            );
            Ok(())
        }
        (Reply::GroupRemoved { status, is_done: true }, None) => {
            println!("Removed: {}", what_goes(&status));
            Ok(())
        }
        (Reply::GroupRemoved { status, is_done: false }, None) => {
            bail!(
                "this removes {}. Nothing was removed: add --everything to remove it for good",
                what_goes(&status)
            )
        }
        _ => bail!("the server answered something else"),
    }
}

fn what_goes(status: &GroupStatus) -> String {
    let disks = status.writers.iter().flat_map(|w| {
        let name = |disk| format!("{}.{disk}", w.member);
        w.disks.iter().map(move |disk| name(&disk.name))
    });
    let disks: Vec<_> = disks.collect();
    format!(
        "group {}: the images of {} disk(s) ({}), {} of journal, and every bookmark and pin of its past",
        status.group,
        disks.len(),
        disks.join(", "),
        text::bytes(status.journal_stored_bytes)
    )
}
