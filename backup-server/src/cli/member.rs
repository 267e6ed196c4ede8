//! `tidelock-backup member`.

use super::args::{Member, MoveMember};
use super::client::Client;
use super::confirm::confirm;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail};
use tidelock_replica::group::Moved;

pub(super) async fn run(config: Config, command: Member) -> Result<()> {
    let Member::Move(args) = command;
    if !args.yes {
        confirm(&consequence(&args), "Move it?", "nothing was moved")?;
    }
    let client = Client::connect(config).await?;
    let moved = move_member(&client, &args).await;
    client.end().await;
    let moved = moved?;
    if args.json {
        println!("{}", serde_json::to_string(&moved)?);
    } else {
        println!("{}", words(&moved));
    }
    Ok(())
}

async fn move_member(client: &Client, args: &MoveMember) -> Result<Moved> {
    let MoveMember { group, member, to, .. } = args.clone();
    let mut call = client.call(&Request::MoveMember { group, member, to }).await?;
    let mut has_said = false;
    loop {
        match call.next().await? {
            Reply::Waiting { remaining_ms, .. } => {
                if !std::mem::replace(&mut has_said, true) {
                    eprintln!(
                        "The lease of the host that has {} may hold for another {:.1} s: waiting for its end.",
                        args.member,
                        remaining_ms as f64 / 1e3
                    );
                }
            }
            Reply::Moved { moved } => return Ok(moved),
            _ => bail!("the server answered something else"),
        }
    }
}

fn consequence(args: &MoveMember) -> String {
    let MoveMember { group, member, to, .. } = args;
    format!(
        "From then on {to} alone may write the disks of {member} of group {group} here. Its disks are compared as a whole, and \
         what differs is overwritten with what {to} has. A host that had {member} before is refused."
    )
}

fn words(moved: &Moved) -> String {
    let Moved { group, member, from, to } = moved;
    let what = match from {
        Some(from) if from == to => format!("{member} of group {group} is given to {to} again"),
        Some(from) => {
            format!("{member} of group {group} belongs to {to} now, and no longer to {from}")
        }
        None => format!("{member} of group {group} has had no host yet, and is free for {to}"),
    };
    format!(
        "{what}. When tidelockd attaches it there, all its disks are compared; `tidelock-backup status` shows it."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_before_and_after_are_named() {
        let moved = |from: Option<&str>| Moved {
            group: "shop".into(),
            member: "db".into(),
            from: from.map(str::to_owned),
            to: "host-b".into(),
        };
        assert!(
            words(&moved(Some("host-a")))
                .contains("belongs to host-b now, and no longer to host-a")
        );
        assert!(words(&moved(Some("host-b"))).contains("given to host-b again"));
        assert!(words(&moved(None)).contains("has had no host yet"));
    }
}
