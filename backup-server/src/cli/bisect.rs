//! `tidelock-backup bisect`: the user's check on writable views, by halving, until the first bad instant is found.
//! The search itself is [`tidelock_replica::travel::bisect`]; here are the views and the command.

use super::args;
use super::client::{Call, Client};
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::travel::RecordStatus;
use crate::server::views::{ViewStatus, Wanted};
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_replica::text;
use tidelock_replica::travel::bisect::{Bisect, Verdict};
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;
use tidelock_store::journal::MarkKind;
use tokio::process::Command;

/// Records of the change that are shown.
const RECORDS_MAX: usize = 16;

/// The search has ended, but not with one record: the exit code says so.
#[derive(Debug, Error)]
#[error("the first bad instant is not exact")]
pub struct Inexact;

pub(super) async fn run(config: Config, args: args::Bisect) -> Result<()> {
    let client = Client::connect(config).await?;
    let search = Search { client: &client, args: &args, steps: Vec::new() };
    let outcome = search.run().await;
    client.end().await;
    outcome
}

/// One run of the command.
#[derive(Clone, Debug)]
struct Step {
    at: Moment,
    verdict: Verdict,
    code: i32,
}

struct Search<'a> {
    client: &'a Client,
    args: &'a args::Bisect,
    steps: Vec<Step>,
}

impl Search<'_> {
    async fn run(mut self) -> Result<()> {
        // Open to the end: it holds everything that is later.
        let from = self.view(self.args.from.clone(), Wanted::default()).await?;
        let good = self.test(When::Hlc(from.1.at.hlc_raw)).await?;
        let at = &good.at;
        match good.verdict {
            Verdict::Good => {}
            Verdict::Bad if good.code >= 126 => {
                bail!(
                    "the command ended with {} at --from {at}: was it found, and can it be run?",
                    good.code
                )
            }
            Verdict::Bad => {
                bail!("--from {at} is bad already (exit code {}): begin earlier", good.code)
            }
            Verdict::Skip => bail!("the command cannot say what --from {at} is: take another one"),
        }
        let bad = self.test(self.args.to.clone()).await?;
        let at = &bad.at;
        match bad.verdict {
            Verdict::Bad => {}
            Verdict::Good => bail!("--to {at} is still good: there is nothing to be found"),
            Verdict::Skip => bail!("the command cannot say what --to {at} is: take another one"),
        }
        let (low, high) = (good.at.hlc_raw, bad.at.hlc_raw);
        ensure!(low < high, "--from must be before --to: they are at {} and {}", good.at, bad.at);
        let (mut good, mut bad) = (good.at, bad.at);
        let mut bisect = Bisect::new(low.0, high.0, self.args.skips);
        while let Some(time) = bisect.next() {
            let at = match self.resolve(Hlc(time)).await? {
                Ok(at) => at,
                Err(complete) => {
                    bisect.unknown_from(complete.0.saturating_add(1));
                    continue;
                }
            };
            let beginning = at.hlc_raw.0.min(time);
            if !bisect.resolved(time, beginning) {
                continue;
            }
            let records = records_between(&good, &bad);
            eprintln!("{records} records between: about {} more steps", records.max(1).ilog2() + 1);
            let step = self.test(When::Hlc(Hlc(time))).await?;
            bisect.tested(time, beginning, step.verdict);
            match step.verdict {
                Verdict::Good => good = step.at,
                Verdict::Bad => bad = step.at,
                Verdict::Skip => {}
            }
        }
        let outcome = bisect.outcome();
        let is_exact = !outcome.is_given_up && outcome.skipped.is_empty();
        let skipped = outcome.skipped.iter().filter_map(|hlc| {
            self.steps.iter().map(|step| &step.at).find(|at| at.hlc_raw.0 == *hlc)
        });
        let skipped: Vec<_> = skipped.cloned().collect();
        self.tell(&good, &bad, &skipped, is_exact).await?;
        drop(from);
        if is_exact { Ok(()) } else { Err(Inexact.into()) }
    }

    async fn view(&self, at: When, wanted: Wanted) -> Result<(Call, ViewStatus)> {
        let request = Request::View { group: self.args.group.clone(), at, wanted, detach: false };
        let mut call = self.client.call(&request).await?;
        match call.next().await? {
            Reply::View { view } => Ok((call, view)),
            _ => bail!("the server answered something else"),
        }
    }

    /// The point of a time; or up to when points are complete, if it is later.
    async fn resolve(&self, time: Hlc) -> Result<Result<Moment, Hlc>> {
        let request = Request::Resolve { group: self.args.group.clone(), at: When::Hlc(time) };
        match self.client.ask(&request).await? {
            Reply::Point { at } => Ok(Ok(at)),
            Reply::Incomplete { complete, .. } => Ok(Err(complete)),
            _ => bail!("the server answered something else"),
        }
    }

    /// Runs the command on a writable view.
    async fn test(&mut self, at: When) -> Result<Step> {
        let wanted = Wanted { name: None, write: true, quota_bytes: Some(self.args.quota.bytes) };
        let (call, view) = self.view(at, wanted).await?;
        let nth = self.steps.len() + 1;
        let mut child = Command::new(&self.args.command[0]);
        child
            .args(&self.args.command[1..])
            .envs(environment(&view, nth))
            .stdin(Stdio::null())
            .stdout(Stdio::from(std::io::stderr()))
            .kill_on_drop(true);
        let code = match child.spawn() {
            Ok(mut child) => tokio::select! {
                ended = child.wait() => ended?,
                signal = super::asked_to_end() => bail!("{}: the search was ended", signal?),
            },
            Err(error) => bail!("cannot run {}: {error}", self.args.command[0]),
        };
        let verdict = Verdict::of_exit_code(code.code()).with_context(|| {
            format!("the command ended with {code} at {}, so the search ends", view.at)
        })?;
        let word = match verdict {
            Verdict::Good => "good",
            Verdict::Bad => "bad",
            Verdict::Skip => "cannot say",
        };
        let code = code.code().unwrap_or(-1);
        eprintln!("step {nth}: {}  {word} ({code})", view.at);
        // Written or not, it is gone now.
        drop(call);
        let step = Step { at: view.at, verdict, code };
        self.steps.push(step.clone());
        Ok(step)
    }

    async fn tell(
        &self,
        good: &Moment,
        bad: &Moment,
        skipped: &[Moment],
        is_exact: bool,
    ) -> Result<()> {
        let records = self.records(good, bad).await?;
        if let Some(name) = &self.args.pin {
            self.pin(name, good).await?;
        }
        if self.args.json {
            let steps = self.steps.iter().map(|step| {
                let verdict = format!("{:?}", step.verdict).to_lowercase();
                json!({ "at": step.at, "verdict": verdict, "code": step.code })
            });
            let all = json!({
                "group": self.args.group, "exact": is_exact, "last_good": good, "first_bad": bad,
                "skipped": skipped, "records": records, "pin": self.args.pin,
                "steps": steps.collect::<Vec<_>>(),
            });
            println!("{}", serde_json::to_string(&all)?);
            return Ok(());
        }
        println!("last good   {good}");
        for at in skipped {
            println!("skipped     {at}");
        }
        println!("first bad   {bad}");
        if !is_exact {
            println!("not exact: the first bad instant is one of those after the last good one");
        }
        println!("what was written from the one to the other:");
        for record in &records {
            println!("  {record}");
        }
        if records.len() == RECORDS_MAX {
            println!("  ... and maybe more");
        }
        match &self.args.pin {
            Some(name) => println!("the last good point is pinned as {name}"),
            None => println!(
                "look at it: tidelock-backup view {} --at hlc:{}",
                self.args.group, good.hlc
            ),
        }
        Ok(())
    }

    async fn records(&self, good: &Moment, bad: &Moment) -> Result<Vec<RecordStatus>> {
        let request = Request::Records {
            group: self.args.group.clone(),
            from: When::Hlc(good.hlc_raw),
            to: When::Hlc(bad.hlc_raw),
            max: RECORDS_MAX,
        };
        match self.client.ask(&request).await {
            Ok(Reply::Records { records }) => Ok(records),
            Ok(_) => bail!("the server answered something else"),
            // The latest point of all may not be asked for by its time yet.
            Err(error) => {
                eprintln!("what was written in between cannot be shown: {error:#}");
                Ok(Vec::new())
            }
        }
    }

    async fn pin(&self, name: &str, good: &Moment) -> Result<()> {
        let request = Request::Mark {
            group: self.args.group.clone(),
            name: name.to_owned(),
            kind: MarkKind::Pin,
            at: When::Hlc(good.hlc_raw),
            expires_in_ms: None,
            moves: false,
        };
        self.client
            .ask(&request)
            .await
            .map(drop)
            .context("the last good point was found, but not pinned")
    }
}

impl std::fmt::Display for RecordStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}  {} seq {}", text::utc_ms(self.unix_ms), self.member, self.seq)?;
        match &self.disk {
            Some(disk) => write!(f, "  {disk}: {} bytes at {}", self.len_bytes, self.offset),
            None => Ok(()),
        }
    }
}

fn records_between(good: &Moment, bad: &Moment) -> u64 {
    let before = |member: &String| good.seqs.get(member).copied().unwrap_or(0);
    bad.seqs.iter().map(|(member, seq)| seq.saturating_sub(before(member))).sum()
}

/// What the command is told. Names that become the same are told by the directory alone.
fn environment(view: &ViewStatus, nth: usize) -> BTreeMap<String, std::ffi::OsString> {
    let mut told: BTreeMap<String, Vec<&PathBuf>> = BTreeMap::new();
    for disk in &view.disks {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
        let name = format!("TIDELOCK_VIEW_{}", disk.name.chars().map(plain).collect::<String>());
        told.entry(name).or_default().push(&disk.socket);
    }
    let mut all: BTreeMap<String, std::ffi::OsString> = told
        .into_iter()
        .filter(|(_, sockets)| sockets.len() == 1)
        .map(|(name, sockets)| (name, sockets[0].into()))
        .collect();
    if let Some(dir) = view.disks.first().and_then(|disk| disk.socket.parent()) {
        all.insert("TIDELOCK_VIEW_DIR".into(), dir.into());
    }
    let at = &view.at;
    for (name, value) in [
        ("TIDELOCK_GROUP", view.group.clone()),
        ("TIDELOCK_STEP", nth.to_string()),
        ("TIDELOCK_AT", at.time.clone()),
        ("TIDELOCK_AT_HLC", format!("hlc:{}", at.hlc)),
        ("TIDELOCK_AT_SEQS", at.seqs_text()),
    ] {
        all.insert(name.into(), value.into());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_protocol::ids::Epoch;
    use tidelock_targets::ExportedDisk;

    #[test]
    fn the_command_is_told_each_disk_unless_two_would_be_called_the_same() {
        let disk = |name: &str| ExportedDisk {
            name: name.into(),
            size_bytes: 1,
            socket: format!("/x/@view-1/{name}.sock").into(),
        };
        let seqs = BTreeMap::from([("db-1".to_owned(), 7), ("web".to_owned(), 9)]);
        let hlc_raw = Hlc::new(5, 2);
        let at = Moment {
            time: "t".into(),
            unix_ms: 5,
            hlc: hlc_raw.to_string(),
            hlc_raw,
            epoch: Epoch(1),
            seqs,
        };
        let view = ViewStatus {
            name: "view-1".into(),
            group: "shop".into(),
            at,
            disks: vec![disk("db-1.root"), disk("web.a-b"), disk("web.a_b")],
            detached: false,
            quota_bytes: None,
            used_bytes: 0,
            lost: false,
            damaged: Vec::new(),
        };
        let told = environment(&view, 3);
        assert_eq!(told["TIDELOCK_VIEW_DB_1_ROOT"], "/x/@view-1/db-1.root.sock");
        assert!(!told.contains_key("TIDELOCK_VIEW_WEB_A_B"), "which one would it be?");
        assert_eq!(told["TIDELOCK_VIEW_DIR"], "/x/@view-1");
        assert_eq!(told["TIDELOCK_AT_SEQS"], "db-1=7,web=9");
        assert_eq!(told["TIDELOCK_AT_HLC"], "hlc:5.2");
        assert_eq!(told["TIDELOCK_STEP"], "3");
    }
}
