//! `tidelock-backup damaged`: damaged segments, what they affect, and what to do.

use super::args::Damaged;
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use anyhow::{Result, bail};
use serde_json::json;
use std::fmt::Write;
use tidelock_protocol::hlc::Hlc;
use tidelock_replica::group::{DamagedDisk, DamagedSegment};
use tidelock_replica::text;
use tidelock_store::damage::Known;

pub(super) async fn run(config: Config, args: Damaged) -> Result<()> {
    let client = Client::connect(config).await?;
    let Damaged { group, check, forget, json } = args;
    let reply = client.ask(&Request::Damaged { group: group.clone(), check, forget }).await;
    client.end().await;
    let Reply::Damaged { segments, latest } = reply? else {
        bail!("the server answered something else");
    };
    if json {
        let all = json!({ "group": group, "segments": segments, "latest": latest });
        println!("{}", serde_json::to_string_pretty(&all)?);
    } else {
        print!("{}", render(&group, &segments, &latest));
    }
    Ok(())
}

fn at(hlc: Hlc) -> String {
    format!("{} (hlc:{hlc})", text::utc_ms(hlc.physical_ms()))
}

/// The points in time that are affected.
pub(super) fn span(from: Option<Hlc>, until: Option<Hlc>, is_untold: bool) -> String {
    let Some(from) = from else { return "affects no point in the window".to_owned() };
    let until = until.map_or("now".to_owned(), |until| format!("before {}", at(until)));
    let how = if is_untold { "; of those in its time none can be shown" } else { "" };
    format!("affects points from {} to {until}{how}", at(from))
}

/// A segment, for `status`.
pub(super) fn one_line(of: &DamagedSegment) -> String {
    format!("{}; {}", of.reason, span(of.from, of.until, of.is_untold))
}

/// A part of a disk.
pub(super) fn part(of: &DamagedDisk) -> String {
    let len = text::bytes(of.len_bytes);
    let had = of.segment.map_or("disk image".to_owned(), |segment| format!("segment {segment}"));
    format!("{}: {len} at byte {} ({had})", of.name, of.offset)
}

fn known(of: &DamagedSegment) -> String {
    let (n, bytes) = (of.records, text::bytes(of.bytes));
    match of.known {
        Known::Records => {
            format!("the data of {n} records is damaged ({bytes}); all else is whole")
        }
        Known::Extents => format!(
            "headers are damaged; by its index the data of {n} records is ({bytes}), and all else is whole"
        ),
        Known::Nothing if of.file.is_none() => "what it had is marked in the images".to_owned(),
        Known::Nothing => {
            "headers are damaged and there is no index: what it had is not known".to_owned()
        }
    }
}

fn render(group: &str, segments: &[DamagedSegment], latest: &[DamagedDisk]) -> String {
    if segments.is_empty() && latest.is_empty() {
        return format!("group {group}: nothing is known to be damaged\n");
    }
    let mut out = format!("group {group}\n");
    // A string takes everything.
    for of in segments {
        let _ = writeln!(out, "segment {}: {}", of.segment, of.reason);
        if let Some(file) = &of.file {
            let _ = writeln!(out, "  file     {file}");
            let _ = writeln!(out, "  found    {}", text::utc(of.found_unix_ms));
        }
        let _ = writeln!(out, "  what     {}", known(of));
        let _ = writeln!(out, "  when     {}", span(of.from, of.until, of.is_untold));
        if of.given_up {
            let _ = writeln!(out, "  given up");
        }
    }
    if latest.is_empty() {
        let _ = writeln!(out, "the latest state is not affected");
    } else {
        let _ = writeln!(out, "of the latest state cannot be read:");
        for of in latest {
            let _ = writeln!(out, "  {}", part(of));
        }
        let _ = writeln!(
            out,
            "to mend it from the primary: `tidelock verify --repair` on its host. `recover` refuses until then, \
             unless --accept-damage"
        );
    }
    if segments.is_empty() {
        return out;
    }
    let _ = writeln!(
        out,
        "if there is a copy of a segment's file, put it in its place and run `tidelock-backup damaged {group} \
         --check`; else give it up with --forget SEGMENT"
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_affected_and_what_to_do_is_said() {
        assert!(render("shop", &[], &[]).contains("nothing is known to be damaged"));
        let mut of = DamagedSegment {
            segment: 7,
            file: Some("journal/0007.seg".into()),
            found_unix_ms: 1_700_000_000_000,
            reason: "journal segment 0007.seg is damaged at byte 99".into(),
            known: Known::Records,
            records: 2,
            bytes: 8192,
            given_up: false,
            from: Some(Hlc::new(1_700_000_000_000, 0)),
            until: None,
            is_untold: false,
        };
        let latest = [DamagedDisk {
            name: "db.root".into(),
            segment: Some(7),
            offset: 4096,
            len_bytes: 512,
        }];
        let text = render("shop", std::slice::from_ref(&of), &latest);
        for part in [
            "damaged at byte 99",
            "the data of 2 records is damaged (8.0 KiB)",
            "from 2023-11-14T22:13:20",
            "to now",
            "db.root: 512 B at byte 4096 (segment 7)",
            "tidelock verify --repair",
            "damaged shop --check",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let rotten =
            [DamagedDisk { name: "db.root".into(), segment: None, offset: 512, len_bytes: 512 }];
        let text = render("shop", &[], &rotten);
        assert!(text.contains("db.root: 512 B at byte 512 (disk image)"), "{text}");
        assert!(!text.contains("--forget"), "{text}");
        of.until = Some(Hlc::new(1_700_000_001_000, 0));
        let text = render("shop", &[of], &[]);
        assert!(text.contains("to before 2023-11-14T22:13:21"), "{text}");
        assert!(text.contains("the latest state is not affected"), "{text}");
    }
}
