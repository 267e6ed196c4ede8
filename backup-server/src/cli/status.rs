//! `tidelock-backup status`.

use super::client::Client;
use super::{damaged, machine, store, view};
use crate::server::config::{CERTIFICATE_WARN, Config};
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail};
use serde_json::json;
use std::fmt::Write;
use std::time::Duration;
use tidelock_protocol::message::{CopyState, Form};
use tidelock_replica::group::{GroupStatus, WriterStatus};
use tidelock_replica::text;
use tidelock_store::journal::Standing;

pub(super) async fn run(config: Config, json: bool) -> Result<()> {
    let certificate = config.certificate_valid_for();
    let client = Client::connect(config).await?;
    let Reply::Status { server, groups, stores, broken_stores } =
        client.ask_soon(&Request::Status).await?
    else {
        bail!("the server answered something else");
    };
    let Reply::Views { views, of_stores } = client.ask_soon(&Request::Views).await? else {
        bail!("the server answered something else");
    };
    let Reply::Machines { machines } = client.ask_soon(&Request::Machines).await? else {
        bail!("the server answered something else");
    };
    if json {
        let running = !client.is_alone();
        let views: Vec<_> = views.iter().map(view::to_json).collect();
        let status = json!({ "server": server, "running": running, "groups": groups, "views": views,
                    "stores": stores, "views_of_stores": of_stores, "broken_stores": broken_stores,
                    "machines": machines, "certificate_valid_s": certificate.map(|valid| valid.as_secs()) });
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        if client.is_alone() {
            println!("no server runs; this is what the data directory says");
        }
        if groups.is_empty() && stores.is_empty() {
            println!("no groups yet: hosts create them when they attach");
        }
        if let Some(line) = certificate.and_then(certificate_line) {
            println!("{line}");
        }
        groups.iter().for_each(|group| print!("{}", render(group)));
        stores.iter().for_each(|of| print!("{}", store::render(of)));
        broken_stores.iter().for_each(|reason| println!("BROKEN {reason}"));
        views.iter().for_each(view::tell);
        of_stores.iter().for_each(|view| print!("{}", store::view(view)));
        machines.iter().for_each(|of| print!("{}", machine::line(of)));
    }
    client.end().await;
    Ok(())
}

/// What is said of a certificate that ends soon.
fn certificate_line(valid: Duration) -> Option<String> {
    let days = valid.as_secs() / 86_400;
    if valid.is_zero() {
        let what = "CERTIFICATE is not valid any more: no host can connect. Issue another one; no restart is needed";
        return Some(what.to_owned());
    }
    (valid < CERTIFICATE_WARN).then(|| {
        format!("CERTIFICATE ends in {days} days: no host can connect then. Issue another one")
    })
}

fn copy(writer: &WriterStatus) -> &'static str {
    match writer.copy {
        CopyState::Seeded if writer.host.is_none() => {
            "seeded, no host has compared it: only what was seeded can be recovered"
        }
        CopyState::Seeded => "copying: only what was seeded can be recovered yet",
        CopyState::Empty => "nothing has arrived yet: nothing can be recovered",
        CopyState::Partial => "copying: nothing can be recovered yet",
        CopyState::Whole => "whole",
        CopyState::Resyncing => {
            "copying: the sites are compared; recoverable as it was before that"
        }
    }
}

/// What the member's host does without this server, if it does not hold.
fn policy(group: &GroupStatus, member: &str, line: &mut impl FnMut(&str, String)) {
    let Some(known) = group.policies.get(member) else { return };
    if let Some(after_ms) = known.after_ms {
        let after = after_ms as f64 / 1e3;
        line(
            "  policy",
            format!("async after {after} s: then it answers clients without this site"),
        );
    }
    if known.serves_unreached {
        let text = "serve-unprotected: after a start it answers clients also if it has not reached this site";
        line("  contact", text.to_owned());
    }
    if let Some(since) = known.degraded_since_unix_ms {
        let since = text::utc(since);
        line("  DEGRADED", format!("since {since} clients may have seen what is not here"));
    }
}

fn render(group: &GroupStatus) -> String {
    let mut out = format!("group {}\n", group.group);
    let mut line = |name: &str, value: String| {
        // A string takes everything.
        let _ = writeln!(out, "  {name:<12} {value}");
    };
    if let Some(broken) = &group.broken {
        line("BROKEN", broken.clone());
        return out;
    }
    line("epoch", group.epoch.to_string());
    match &group.recovered {
        Some(recovery) => {
            let at = text::utc(recovery.at_unix_ms);
            line("recovered", format!("{at}: this site is the primary, the old one is fenced"));
        }
        None if group.recoverable && group.grace_remaining_ms > 0 => line(
            "recoverable",
            format!("yes; `recover` would wait {:.1} s", group.grace_remaining_ms as f64 / 1e3),
        ),
        None if group.recoverable && group.lease_given_up => line(
            "recoverable",
            "yes, at once: the primary has switched over, and has given up its lease".to_owned(),
        ),
        None => line("recoverable", if group.recoverable { "yes" } else { "no" }.to_owned()),
    }
    if !group.lease_kept_by.is_empty() {
        let left = group.lease_kept_by.join(", ");
        line("SWITCHING", format!("a part of the group is switched over, but not {left}"));
    }
    if let Some(reason) = &group.stalled {
        line("STALLED", reason.clone());
    }
    // A connection may outlive its host by minutes.
    let is_silent =
        group.grace_remaining_ms == 0 && !group.lease_given_up && group.recovered.is_none();
    let silent = if is_silent { ", SILENT: not heard for the grace" } else { "" };
    let (journal, unfolded) = (text::bytes(group.journal_bytes), text::bytes(group.unfolded_bytes));
    line("journal", format!("{journal}, of which {unfolded} are not in the images yet"));
    let compressed = group.compressed;
    if compressed.segments > 0 {
        let (bytes, stored) = (text::bytes(compressed.bytes), text::bytes(compressed.stored_bytes));
        let segments = compressed.segments;
        line("  on disk", text::bytes(group.journal_stored_bytes));
        line("  compressed", format!("{segments} segments: {bytes} take {stored}"));
    }
    for of in &group.damaged {
        line("DAMAGED", damaged::one_line(of));
    }
    let has_damaged_images = group.latest_damaged.iter().any(|of| of.segment.is_none());
    if has_damaged_images {
        line("DAMAGED", "a disk image: parts of it are not what was written".to_owned());
    }
    if !group.damaged.is_empty() || has_damaged_images {
        let bytes: u64 = group.latest_damaged.iter().map(|disk| disk.len_bytes).sum();
        let latest = match bytes {
            0 => "the latest state is not affected".to_owned(),
            bytes => format!("{} of the latest state cannot be read", text::bytes(bytes)),
        };
        line("  latest", latest);
        line("  do", format!("see `tidelock-backup damaged {}`", group.group));
    }
    for clock in &group.clocks {
        let by = format!("{:.1} s", clock.ahead_ms.unsigned_abs() as f64 / 1e3);
        let where_to = if clock.ahead_ms > 0 { "ahead of" } else { "behind" };
        line(
            "CLOCK",
            match &clock.member {
                Some(member) => format!(
                    "{member}: the clock of its host is {by} {where_to} this server's. Points in time are this server's \
                     time of arrival and stay right; set the host's clock"
                ),
                None => format!(
                    "this server's clock was set while it ran: it is {by} {where_to} the clock by which points in \
                     time are named, which goes on as before"
                ),
            },
        );
    }
    if let Some(error) = &group.fold_error {
        line("FOLD", error.clone());
    }
    if group.writers.len() > 1 || group.form == Form::Hlc {
        let beyond = match group.beyond_the_cut {
            0 => "everything durable is in the cut".to_owned(),
            n => format!("{n} durable records are not in the cut: they wait for others"),
        };
        line("cut", format!("{} ({} form); {beyond}", group.cut, group.form));
    }
    if let Some(lag_ms) = group.watermark_lag_ms {
        let at = text::utc(group.watermark.physical_ms());
        line("watermark", format!("{at}, {lag_ms} ms behind the newest record"));
    }
    for writer in &group.writers {
        let mode = writer.mode.map_or_else(String::new, |m| format!(", {m}"));
        line("member", format!("{}{mode}", writer.member));
        match writer.standing {
            Standing::Member => line("  copy", copy(writer).to_owned()),
            Standing::Joining => {
                line("  copy", format!("{}; recovery goes without it so far", copy(writer)));
            }
            Standing::Removed => line("  REMOVED", "nothing waits for it".to_owned()),
        }
        let durable = match writer.durable == writer.committed {
            true => format!("seq {}", writer.durable),
            false => format!("seq {}, committed {}", writer.durable, writer.committed),
        };
        line("  durable", durable);
        let host = writer.host.as_deref().unwrap_or("none yet");
        match writer.connected_since_unix_ms {
            Some(since) => line("  host", format!("{host}, since {}{silent}", text::utc(since))),
            None => line("  host", format!("{host}, not connected")),
        }
        policy(group, &writer.member, &mut line);
        for disk in &writer.disks {
            line("  disk", format!("{} ({})", disk.name, text::bytes(disk.size_bytes)));
        }
    }
    for follower in &group.followers {
        let since = follower.connected_since_unix_ms;
        let how = since
            .map_or("not connected".to_owned(), |at| format!("since {}{silent}", text::utc(at)));
        line("member", format!("{} (no disks)", follower.member));
        line("  host", format!("{}, {how}", follower.host));
        policy(group, &follower.member, &mut line);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::{Epoch, Seq};
    use tidelock_protocol::message::Mode;
    use tidelock_store::journal::MemberPolicy;

    #[test]
    fn a_certificate_that_ends_within_a_month_is_told() {
        let days = |days: u64| certificate_line(Duration::from_secs(days * 86_400));
        assert_eq!(days(30), None);
        assert!(days(29).unwrap().contains("29 days"));
        assert!(days(0).unwrap().contains("not valid any more"));
    }

    #[test]
    fn a_connection_whose_host_is_silent_is_not_called_good() {
        let writer = WriterStatus {
            member: "db".into(),
            host: Some("host-a".into()),
            mode: None,
            durable: Seq(9),
            committed: Seq(9),
            copy: CopyState::Whole,
            connected_since_unix_ms: Some(1_700_000_000_123),
            disks: vec![],
            standing: Standing::Member,
            hlc_ms: 0,
        };
        let broken = GroupStatus::of_broken("shop", "");
        let mut group = GroupStatus {
            broken: None,
            epoch: Epoch(1),
            recoverable: true,
            grace_remaining_ms: 900,
            writers: vec![writer],
            ..broken
        };
        let host = |group: &GroupStatus| {
            let text = render(group);
            text.lines().find(|line| line.contains("host-a")).unwrap().trim().to_owned()
        };
        let heard = "host       host-a, since 2023-11-14T22:13:20Z";
        assert_eq!(host(&group), heard);
        group.grace_remaining_ms = 0;
        assert_eq!(host(&group), format!("{heard}, SILENT: not heard for the grace"));
        group.lease_given_up = true;
        assert_eq!(host(&group), heard, "switched over: it has nothing to renew");
        group.lease_given_up = false;
        group.writers[0].connected_since_unix_ms = None;
        assert_eq!(host(&group), "host       host-a, not connected");
    }

    #[test]
    fn what_is_wrong_stands_out() {
        let broken = GroupStatus::of_broken("shop", "segment 1 is damaged");
        assert!(render(&broken).contains("BROKEN"));
        let writer = WriterStatus {
            member: "db".into(),
            host: Some("host-a".into()),
            mode: None,
            durable: Seq(9),
            committed: Seq(5),
            copy: CopyState::Resyncing,
            connected_since_unix_ms: None,
            disks: vec![],
            standing: Standing::Member,
            hlc_ms: 0,
        };
        let stalled = GroupStatus {
            broken: None,
            stalled: Some("no room".into()),
            epoch: Epoch(1),
            writers: vec![writer],
            ..broken
        };
        let mut degraded = stalled;
        let known = MemberPolicy {
            mode: Mode::Async,
            mode_since_unix_ms: 0,
            after_ms: Some(30_000),
            degraded_since_unix_ms: Some(1_700_000_000_123),
            has_left: false,
            serves_unreached: true,
        };
        degraded.policies.insert("db".into(), known);
        let text = render(&degraded);
        for part in ["after 30 s", "serve-unprotected", "DEGRADED   since 2023-11-14T22:13:20Z"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        for part in
            ["STALLED", "no room", "seq 9, committed 5", "not connected", "the sites are compared"]
        {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
