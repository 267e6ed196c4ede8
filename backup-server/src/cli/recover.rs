//! `tidelock-backup recover`.

use super::args::Recover;
use super::boot::Boot;
use super::client::Client;
use crate::group::Recovery;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::exports::ExportedDisk;
use crate::text;
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

pub(super) async fn run(config: Config, args: Recover) -> Result<()> {
    let boot = Boot::new(&args)?;
    let client = Client::connect(config).await?;
    let outcome = recover(&client, &args, boot).await;
    client.end().await;
    outcome
}

async fn recover(client: &Client, args: &Recover, boot: Boot) -> Result<()> {
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
    boot.run(client, args, &recovery, &disks).await
}

/// Asks for the recovery, and counts down while the old primary's lease may hold.
async fn wait(client: &Client, args: &Recover) -> Result<(Recovery, Vec<ExportedDisk>)> {
    let request = Request::Recover {
        group: args.group.clone(),
        primary_is_dead: args.primary_is_dead,
        at: args.at.clone(),
        accept_damage: args.accept_damage,
        drop_later_pins: args.drop_later_pins,
    };
    let mut call = client.call(&request).await?;
    let mut bar: Option<ProgressBar> = None;
    let mut said_room = false;
    loop {
        match call.next().await? {
            Reply::Waiting { remaining_ms, kept_by } => {
                let bar = bar.get_or_insert_with(|| {
                    if let Some(text) = half_switched(&kept_by) {
                        eprintln!("{text}");
                    }
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
            Reply::NoRoom { reason } => {
                if !std::mem::replace(&mut said_room, true) {
                    eprintln!("{reason}. It goes on as soon as there is room");
                }
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

/// Who has not handed the group over, where others have.
fn half_switched(kept_by: &[String]) -> Option<String> {
    let kept_by = (!kept_by.is_empty()).then(|| kept_by.join(", "))?;
    Some(format!(
        "only a part of the group is switched over: {kept_by} may still answer clients. Run `tidelock switchover` \
         there, and this goes on at once"
    ))
}

/// What the old primary can still do, and what it may have told.
fn fencing(recovery: &Recovery) -> String {
    if recovery.exposed.is_empty() {
        return "the old primary is fenced: it can commit nothing and its gate stays shut\n".into();
    }
    let mut text =
        "CLIENTS MAY HAVE SEEN WHAT IS NOT HERE, because replies did not wait for this site:\n"
            .to_owned();
    for of in &recovery.exposed {
        let since = match of.since_unix_ms {
            Some(since) => format!("since {}", text::utc(since)),
            None => "for an unknown time".to_owned(),
        };
        let why = match (of.after_ms, of.is_known) {
            (Some(after_ms), true) => format!(
                "{since} by that host's clock it was degraded (\"async after {} s\")",
                after_ms as f64 / 1e3
            ),
            (Some(after_ms), false) => format!(
                "{since} at the earliest, if it went on without this site (\"async after {} s\")",
                after_ms as f64 / 1e3
            ),
            (None, true) if of.serves_unreached => {
                format!("{since} at the earliest it has served without this site")
            }
            (None, false) => format!("{since} at the earliest, if it was started since"),
            (None, true) => format!("{since} at the earliest it was in mode async"),
        };
        let unreached = match of.serves_unreached {
            true => " (it serves also if it has not reached this site: \"serve-unprotected\")",
            false => "",
        };
        text += &format!("  {} on {}: {why}{unreached}\n", of.member, of.host);
    }
    text + "the old primary can commit nothing any more, but it needs no lease to answer clients: it may go \
            on\nuntil it hears of this recovery. Make sure that it is off, or that no client reaches it, \
            before clients\nare sent here\n"
}

/// What is recovered of each member, and what is left out and why.
fn outcome(recovery: &Recovery) -> String {
    let Recovery { group, epoch, .. } = recovery;
    let at = text::utc(recovery.at_unix_ms);
    let mut text = format!("group {group} is recovered: epoch {epoch}, at {at}\n");
    if recovery.primary_declared_dead {
        text += "  on the statement that the old primary is dead\n";
    }
    for writer in &recovery.writers {
        text += &match writer.is_recovered {
            true => format!("  {}: everything up to seq {}\n", writer.member, writer.recovered),
            false => format!("  {}: not recovered\n", writer.member),
        };
        if let Some(why) = &writer.why {
            text += &format!("    {} records are left out: {why}\n", writer.left_out);
        }
    }
    for member in &recovery.followers {
        text += &format!("  {member}: has no disks here\n");
    }
    text
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
    print!("{}{}", outcome(recovery), fencing(recovery));
    println!("disks, writable at once:");
    for disk in disks {
        println!("  {:<20} {:>10}  {}", disk.name, text::bytes(disk.size_bytes), disk.uri());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Exposure, RecoveryWriter};
    use tidelock_protocol::ids::{Epoch, Seq};
    use tidelock_protocol::message::Form;

    #[test]
    fn a_switch_of_a_part_of_the_hosts_is_said_with_who_is_left() {
        assert_eq!(half_switched(&[]), None);
        let text = half_switched(&["b on host-b".into(), "web on host-b".into()]).unwrap();
        assert!(text.contains("b on host-b, web on host-b may still answer clients"), "{text}");
    }

    #[test]
    fn of_each_member_it_says_what_is_recovered_and_what_is_left_out_and_why() {
        let writer =
            |member: &str, recovered, left_out, why: Option<&str>, is_recovered| RecoveryWriter {
                member: member.into(),
                recovered: Seq(recovered),
                left_out,
                why: why.map(str::to_owned),
                held_back_by: None,
                is_recovered,
            };
        let depends = "the first (seq 4071) depends on db-a's 9120, of which the backup has 9117 (host host-1)";
        let new = "its initial copy was not complete: it is not recovered";
        let mut recovery = Recovery {
            group: "shop".into(),
            epoch: Epoch(2),
            at_unix_ms: 1_700_000_000_123,
            primary_declared_dead: true,
            writers: vec![
                writer("db-a", 9117, 0, None, true),
                writer("db-b", 4070, 12, Some(depends), true),
                writer("db-c", 0, 300, Some(new), false),
            ],
            form: Form::Vector,
            followers: vec!["web".into()],
            exposed: vec![],
        };
        let told = "\
group shop is recovered: epoch 2, at 2023-11-14T22:13:20Z
  on the statement that the old primary is dead
  db-a: everything up to seq 9117
  db-b: everything up to seq 4070
    12 records are left out: the first (seq 4071) depends on db-a's 9120, of which the backup has 9117 (host host-1)
  db-c: not recovered
    300 records are left out: its initial copy was not complete: it is not recovered
  web: has no disks here
";
        assert_eq!(outcome(&recovery), told);
        recovery.primary_declared_dead = false;
        assert!(!outcome(&recovery).contains("old primary is dead"));
    }

    #[test]
    fn what_clients_may_have_seen_is_said_and_that_the_old_primary_may_answer() {
        let exposure = Exposure {
            member: "db".into(),
            host: "host-a".into(),
            after_ms: Some(30_000),
            is_known: true,
            since_unix_ms: Some(1_700_000_000_123),
            serves_unreached: false,
        };
        let unknown = Exposure { is_known: false, ..exposure.clone() };
        let by_mode = Exposure { after_ms: None, since_unix_ms: None, ..exposure.clone() };
        let mut recovery = Recovery {
            group: "shop".into(),
            epoch: Epoch(2),
            at_unix_ms: 0,
            primary_declared_dead: false,
            writers: vec![],
            form: Form::Vector,
            followers: vec![],
            exposed: vec![exposure.clone(), unknown, by_mode],
        };
        let text = fencing(&recovery);
        for part in [
            "db on host-a: since 2023-11-14T22:13:20Z by that host's clock it was degraded (\"async after 30 s\")",
            "since 2023-11-14T22:13:20Z at the earliest, if it went on without this site",
            "for an unknown time at the earliest it was in mode async",
            "Make sure that it is off",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let started = Exposure { after_ms: None, serves_unreached: true, ..exposure };
        let served = started.clone();
        recovery.exposed = vec![Exposure { is_known: false, ..started }, served];
        let text = fencing(&recovery);
        for part in [
            "since 2023-11-14T22:13:20Z at the earliest, if it was started since (it serves also if it has not \
             reached this site: \"serve-unprotected\")",
            "since 2023-11-14T22:13:20Z at the earliest it has served without this site",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        recovery.exposed.clear();
        assert!(fencing(&recovery).contains("its gate stays shut"));
    }
}
