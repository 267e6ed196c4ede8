//! `tidelock-backup repair`: what can be kept of a journal that cannot be opened.

use super::args::Repair;
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::inbox::RepairStatus;
use anyhow::{Result, bail};
use std::fmt::Write;
use tidelock_replica::quarantine::QUARANTINE_DIR;

pub(super) async fn run(config: Config, args: Repair) -> Result<()> {
    let client = Client::connect(config).await?;
    let Repair { group, yes, json } = args;
    let reply = client.ask(&Request::Repair { group: group.clone(), apply: yes }).await;
    client.end().await;
    let Reply::Repaired { repair } = reply? else { bail!("the server answered something else") };
    match json {
        true => println!("{}", serde_json::to_string_pretty(&repair)?),
        false => print!("{}", render(&group, &repair)),
    }
    Ok(())
}

fn render(group: &str, of: &RepairStatus) -> String {
    let (segment, bytes) = of.end;
    let mut out = format!("group {group}: {}\n", of.reason);
    // A string takes everything.
    let cut = if of.is_done { "was cut" } else { "can be cut" };
    let _ =
        writeln!(out, "The journal {cut} before it: it ends in segment {segment} at byte {bytes}.");
    for writer in &of.writers {
        let lost = match writer.lost {
            Some(lost) => {
                format!("{} writes behind it are lost, to {lost}", lost.0 - writer.kept.0)
            }
            None => "no write was found behind it".to_owned(),
        };
        let _ = writeln!(out, "  {:<12} kept to write {}; {lost}", writer.member, writer.kept);
    }
    for file in &of.files {
        let _ = writeln!(out, "  {file} {}", if of.is_done { "is kept" } else { "is kept before" });
    }
    let lost = if of.is_done { "are lost" } else { "would be lost" };
    let _ = writeln!(
        out,
        "Bookmarks, pins, approvals of machines and policies that were noted behind it {lost}. Hosts say their policies again \
         when they attach; if the primary is dead, a recovery cannot tell that one has degraded since."
    );
    let _ = match of.is_done {
        true => writeln!(
            out,
            "What was cut is in {QUARANTINE_DIR}/ of the group's directory. If the primary is alive, its daemon ends, and when it \
             was started again it brings all of it. If it is not, clients were told of what is lost."
        ),
        false => writeln!(
            out,
            "Clients were told of what is behind it: while the primary is alive its host brings all of it again (a resync); \
             if it is not, it is lost. Look for a copy of the file first. Then: tidelock-backup repair {group} --yes"
        ),
    };
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::inbox::RepairedWriter;
    use tidelock_protocol::ids::Seq;

    #[test]
    fn what_it_costs_is_said_before_it_is_done() {
        let member = |name: &str, lost| RepairedWriter { member: name.into(), kept: Seq(7), lost };
        let mut of = RepairStatus {
            reason: "journal segment 3.seg is damaged at byte 99: x".into(),
            files: vec!["journal/3.seg".into()],
            end: (3, 99),
            writers: vec![member("db", Some(Seq(12))), member("web", None)],
            is_done: false,
        };
        let text = render("shop", &of);
        let parts = [
            "damaged at byte 99",
            "5 writes behind it are lost, to 12",
            "no write was found",
            "policies that were noted behind it would be lost",
            "shop --yes",
        ];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        of.is_done = true;
        let text = render("shop", &of);
        assert!(text.contains("was cut before it") && text.contains("quarantine/"), "{text}");
    }
}
