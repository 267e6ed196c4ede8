//! `tidelock-backup recover`.

use super::args::Recover;
use super::boot::Boot;
use super::client::{Call, Client};
use super::{machine, store};
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::io::{self, IsTerminal};
use std::pin::pin;
use std::time::Duration;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_replica::group::{GroupStatus, HostStatus, Recovery, WriterStatus};
use tidelock_replica::text;
use tidelock_targets::ExportedDisk;
use tokio::time::{Instant, sleep};

/// Time between two drawings of the countdown of a recovery that waits.
const COUNTDOWN: Duration = Duration::from_millis(200);

pub(super) async fn run(config: Config, args: Recover) -> Result<()> {
    let boot = Boot::new(&args)?;
    let client = Client::connect(config).await?;
    let outcome = recover(&client, &args, boot).await;
    client.end().await;
    outcome
}

async fn recover(client: &Client, args: &Recover, boot: Boot) -> Result<()> {
    if args.boot {
        boot.check(client, args).await?;
    }
    let recovered = tokio::select! {
        recovered = wait(client, args) => recovered?,
        signal = super::asked_to_end() => bail!("{}: the group is not recovered", signal?),
    };
    let Some((recovery, disks)) = recovered else { return Ok(()) };
    // A mistake in the description must not hide that the group is recovered.
    tell(client, args, &recovery, &disks)?;
    if !args.boot {
        if client.is_alone() {
            eprintln!("no server runs, so this process serves the disks: end it with Ctrl-C");
            super::asked_to_end().await?;
        }
        return Ok(());
    }
    boot.run(client, args).await
}

/// Asks for the recovery, and counts down while the old primary's lease may hold. `None`: it was only to be rehearsed.
async fn wait(client: &Client, args: &Recover) -> Result<Option<(Recovery, Vec<ExportedDisk>)>> {
    let mut although_connected = args.although_connected;
    loop {
        match ask(client, args, although_connected).await? {
            Answer::Recovered(recovery, disks) => return Ok(Some((recovery, disks))),
            Answer::Told => return Ok(None),
            Answer::Connected(hosts) => {
                let text = connected(&hosts);
                ensure!(
                    io::stdin().is_terminal(),
                    "{text}. Nothing was changed. If it is dead all the same, give --although-connected as well"
                );
                eprintln!("{text}");
                ensure!(
                    machine::confirm("Is it certain that it no longer runs?")?,
                    "the group is not recovered: nothing was changed"
                );
                although_connected = true;
            }
        }
    }
}

/// The server's final answer to a recovery request.
enum Answer {
    Recovered(Recovery, Vec<ExportedDisk>),
    Connected(Vec<HostStatus>),
    /// Everything is said: it was to be rehearsed, or a store is recovered.
    Told,
}

async fn ask(client: &Client, args: &Recover, although_connected: bool) -> Result<Answer> {
    let request = Request::Recover {
        group: args.group.clone(),
        primary_is_dead: args.primary_is_dead,
        although_connected,
        dry_run: args.dry_run,
        at: args.at.clone(),
        accept_damage: args.accept_damage,
        drop_later_pins: args.drop_later_pins,
    };
    let mut call = client.call(&request).await?;
    let mut countdown: Option<Countdown> = None;
    let mut said_room = false;
    loop {
        match next(&mut call, countdown.as_ref()).await? {
            Reply::Waiting { remaining_ms, kept_by } => {
                let countdown = countdown.get_or_insert_with(|| {
                    if let Some(text) = half_switched(&kept_by) {
                        eprintln!("{text}");
                    }
                    eprintln!(
                        "waiting until the old primary's lease is certain to have ended \
                         ({:.1} s; --primary-is-dead skips this)",
                        remaining_ms as f64 / 1e3
                    );
                    Countdown::new(remaining_ms)
                });
                // The deadline moves when the old primary is heard.
                countdown.ends_in(remaining_ms);
            }
            Reply::NoRoom { reason } => {
                if !std::mem::replace(&mut said_room, true) {
                    eprintln!("{reason}. It goes on as soon as there is room");
                }
            }
            Reply::Recovered { recovery, disks } => {
                if let Some(countdown) = countdown {
                    countdown.bar.finish_and_clear();
                }
                return Ok(Answer::Recovered(recovery, disks));
            }
            Reply::Promoting { store } => eprintln!("{}", store::promoting(&store)),
            Reply::RecoveredStore { store } => {
                match args.json {
                    true => println!("{}", json!({ "store": store })),
                    false => print!("{}", store::recovered(&store)),
                }
                let missing = store::not_promoted(&store);
                ensure!(
                    missing.is_empty(),
                    "{} not promoted: mend what is said of each, and give the same command again",
                    missing.join(", ")
                );
                return Ok(Answer::Told);
            }
            Reply::Connected { hosts } => return Ok(Answer::Connected(hosts)),
            Reply::WouldRecover { group, last_write_unix_ms } => {
                match args.json {
                    true => println!(
                        "{}",
                        json!({ "would_recover": group, "last_write_unix_ms": last_write_unix_ms })
                    ),
                    false => print!("{}", rehearsal(&group, last_write_unix_ms)),
                }
                return Ok(Answer::Told);
            }
            _ => bail!("the server answered something else"),
        }
    }
}

/// That the primary seems to live, where the operator has said that it is dead.
fn connected(hosts: &[HostStatus]) -> String {
    let hosts =
        hosts.iter().map(|of| format!("{} is connected and was heard {}", of.host, heard(of)));
    format!(
        "--primary-is-dead: {}. If it runs, it answers clients until its lease ends, and this site would, too",
        hosts.collect::<Vec<_>>().join("; ")
    )
}

fn heard(host: &HostStatus) -> String {
    match host.heard_ago_ms {
        Some(ms) => format!("{:.1} s ago", ms as f64 / 1e3),
        None => "not since this server was started".to_owned(),
    }
}

/// Report of a dry run: the cut that a recovery would take, and the state of the hosts.
fn rehearsal(group: &GroupStatus, last_write_unix_ms: Option<u64>) -> String {
    let mut text = format!("rehearsal, nothing was changed: group {}\n", group.group);
    if let Some(recovery) = &group.recovered {
        let at = text::utc(recovery.at_unix_ms);
        return text + &format!("  it was recovered at {at}: this site is the primary already\n");
    }
    for writer in &group.writers {
        text +=
            &format!("  {}: everything up to seq {}\n", writer.member, group_cut(group, writer));
    }
    text += &moment(last_write_unix_ms, None, false);
    for host in &group.hosts {
        let state = if host.is_connected { "connected" } else { "not connected" };
        text += &format!("  {}: {state}, heard {}\n", host.host, heard(host));
    }
    if group.hosts.iter().any(|host| host.is_connected) && !group.lease_given_up {
        let name = &group.group;
        text += &format!(
            "  while it lives, `tidelock switchover {name}` on it moves the group with nothing lost\n"
        );
    }
    text + &format!(
        "  without --primary-is-dead it would wait {:.1} s for the primary's lease to end\n",
        group.grace_remaining_ms as f64 / 1e3
    )
}

fn group_cut(group: &GroupStatus, writer: &WriterStatus) -> Seq {
    let nth = group.writers.iter().position(|other| other.member == writer.member).unwrap_or(0);
    group.cut.get(WriterId(nth as u16))
}

/// The recovered moment, and the last sign of the primary: what lies between them may be lost. Both are by this site's
/// clock: hosts' clocks may be off by hours.
fn moment(
    last_write_unix_ms: Option<u64>,
    last_heard_unix_ms: Option<u64>,
    is_of_the_past: bool,
) -> String {
    let mut text = match last_write_unix_ms {
        Some(write) => {
            format!(
                "  the newest write in it arrived at {}, by this site's clock\n",
                text::utc_ms(write)
            )
        }
        None => "  when the newest write in it arrived is not known\n".to_owned(),
    };
    if let Some(heard) = last_heard_unix_ms {
        text += &format!(
            "  the primary was heard last at {}, by this site's clock",
            text::utc_ms(heard)
        );
        text += &match last_write_unix_ms {
            Some(write) if heard >= write && !is_of_the_past => format!(
                ", {:.1} s later: a write of these seconds that did not arrive is not here\n",
                (heard - write) as f64 / 1e3
            ),
            _ => "\n".to_owned(),
        };
    }
    text
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
        return match recovery.primary_declared_dead {
            false => "the old primary is fenced: this site takes nothing of it any more, and the lease without which its \
                      gate does not open has ended\n",
            true => "the old primary is fenced: this site takes nothing of it any more. Its lease was not waited for: \
                     if it runs all the same, it may answer clients until that ends\n",
        }
        .to_owned();
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
            true => {
                " (it serves also if it has not reached this site: \"serve-unprotected\", or its gate was removed)"
            }
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
    let Recovery { last_write_unix_ms, last_heard_unix_ms, is_of_the_past, .. } = *recovery;
    text += &moment(last_write_unix_ms, last_heard_unix_ms, is_of_the_past);
    if recovery.last_heard_unix_ms.is_none() {
        text +=
            "  when the primary was heard last is not known: not since this server was started\n";
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

/// The bar of a recovery that waits.
struct Countdown {
    bar: ProgressBar,
    deadline: Instant,
}

impl Countdown {
    fn new(length_ms: u64) -> Self {
        let style =
            ProgressStyle::with_template("  [{bar:40}] {msg}").expect("a constant template");
        let bar = ProgressBar::new(length_ms).with_style(style);
        Self { bar, deadline: Instant::now() }
    }

    fn ends_in(&mut self, remaining_ms: u64) {
        self.deadline = Instant::now() + Duration::from_millis(remaining_ms);
        self.show();
    }

    fn show(&self) {
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        let remaining_ms = remaining.as_millis() as u64;
        let length_ms = self.bar.length().unwrap_or(0).max(remaining_ms);
        self.bar.set_length(length_ms);
        self.bar.set_position(length_ms - remaining_ms);
        self.bar.set_message(format!("{:.1} s", remaining.as_secs_f64()));
    }
}

/// The next reply. Meanwhile the countdown goes on by itself.
async fn next(call: &mut Call, countdown: Option<&Countdown>) -> Result<Reply> {
    let mut reply = pin!(call.next());
    loop {
        tokio::select! {
            reply = &mut reply => return reply,
            () = sleep(COUNTDOWN), if countdown.is_some() => {
                countdown.into_iter().for_each(Countdown::show);
            }
        }
    }
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
    use tidelock_protocol::ids::Epoch;
    use tidelock_protocol::message::Form;
    use tidelock_replica::group::RecoveryWriter;
    use tidelock_store::journal::Exposure;

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
            last_write_unix_ms: Some(1_700_000_000_000),
            last_heard_unix_ms: Some(1_700_000_002_500),
            is_of_the_past: false,
            form: Form::Vector,
            followers: vec!["web".into()],
            exposed: vec![],
        };
        let told = "\
group shop is recovered: epoch 2, at 2023-11-14T22:13:20Z
  on the statement that the old primary is dead
  the newest write in it arrived at 2023-11-14T22:13:20.000Z, by this site's clock
  the primary was heard last at 2023-11-14T22:13:22.500Z, by this site's clock, 2.5 s later: a write of these seconds that did not arrive is not here
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
        // Records after a point that was asked for have arrived, and are left out on purpose.
        recovery.is_of_the_past = true;
        let text = outcome(&recovery);
        assert!(
            text.contains("heard last at 2023-11-14T22:13:22.500Z, by this site's clock\n"),
            "{text}"
        );
        assert!(!text.contains("that did not arrive"), "{text}");
        recovery.last_heard_unix_ms = None;
        assert!(outcome(&recovery).contains("not since this server was started"));
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
            last_write_unix_ms: None,
            last_heard_unix_ms: None,
            is_of_the_past: false,
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
             reached this site: \"serve-unprotected\", or its gate was removed)",
            "since 2023-11-14T22:13:20Z at the earliest it has served without this site",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        recovery.exposed.clear();
        assert!(
            fencing(&recovery).contains("the lease without which its gate does not open has ended")
        );
        recovery.primary_declared_dead = true;
        assert!(fencing(&recovery).contains("Its lease was not waited for"));
    }
}
