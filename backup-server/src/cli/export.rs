//! `tidelock-backup export`: a disk as it was at a point in time as an image file, whole or over an earlier one.
//! Replication goes on; the images just do not move until it is done.
//!
//! ```text
//!  OUT.unfinished (.json, .digests) ──read back, digest right──▶ OUT + OUT.tidelock.json
//! ```
//!
//! Invariant: what has the name that was asked for was read back and has the digest of the disk at the point that is
//! beside it. What is unfinished stays, and the same command goes on with it.

mod hold;
mod image;
mod record;

use super::args::{Export, Format};
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::views::{ViewStatus, Wanted};
use anyhow::{Context, Result, bail, ensure};
use hold::Hold;
use image::Unmade;
use record::{Base, ExportRequest, Record};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidelock_replica::text;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;

pub(super) async fn run(config: Config, args: Export) -> Result<()> {
    ensure!(
        matches!(args.format, Format::Qcow2) || (args.base.is_none() && args.chain.is_empty()),
        "an image over another one is qcow2: give --format qcow2"
    );
    if args.chain.is_empty() {
        refuse_existing(&args.out)?;
    }
    let client = Client::connect(config).await?;
    let outcome = export(&client, &args).await;
    client.end().await;
    outcome
}

pub(super) fn refuse_existing(out: &Path) -> Result<()> {
    if out.symlink_metadata().is_ok() {
        bail!("{} exists: remove it, or give another name", out.display());
    }
    Ok(())
}

async fn export(client: &Client, args: &Export) -> Result<()> {
    let mut base = args.base.as_deref().map(|base| find_base(args, base)).transpose()?;
    let images: Vec<(PathBuf, When)> = match &args.chain[..] {
        [] => vec![(args.out.clone(), args.at.clone().unwrap_or(When::Latest))],
        chain => chain.iter().enumerate().map(|(n, at)| (nth(&args.out, n), at.clone())).collect(),
    };
    let mut made = Vec::new();
    for (out, at) in images {
        let there = match args.chain.is_empty() {
            true => None,
            // Of a chain that was begun.
            false => there(args, &out, base.as_ref())?,
        };
        let (record, kept) = match there {
            Some(record) => (record, true),
            None => (one(client, args, &out, &at, base.take()).await?, false),
        };
        if !args.json {
            println!("{}", out.display());
            eprintln!("  {} at {}", record.disk, record.at);
            eprintln!("  blake3-1MiB:{}{}", record.digest, if kept { ", was there" } else { "" });
        }
        base = Some(Base::of(&out, &record));
        made.push(json!({
            "file": out, "format": record.format, "at": record.at, "size_bytes": record.size_bytes,
            "digest": record.digest, "base": record.base, "kept": kept,
        }));
    }
    if args.json {
        println!("{}", json!({ "group": args.group, "disk": args.disk, "images": made }));
    }
    Ok(())
}

/// The names of a chain's images: `NAME.0.qcow2`, `NAME.1.qcow2`, ...
fn nth(out: &Path, n: usize) -> PathBuf {
    let stem = out.file_stem().unwrap_or_default().to_string_lossy();
    let suffix = out.extension().map_or_else(|| "qcow2".into(), |of| of.to_string_lossy());
    out.with_file_name(format!("{stem}.{n}.{suffix}"))
}

/// The earlier image, and what it is of.
fn find_base(args: &Export, path: &Path) -> Result<Base> {
    ensure!(path.is_file(), "there is no base {}", path.display());
    let record = Record::beside(path)?;
    let Some(record) = record else {
        let at = args.base_at.clone().with_context(|| {
            format!(
                "{} is not there, so it is not known of which point {} is: say it with --base-at",
                record::beside(path).display(),
                path.display()
            )
        })?;
        return Ok(Base { file: path.to_owned(), at, known: None });
    };
    ensure!(
        record.group == args.group && record.disk == args.disk,
        "{} is of {} of group {}: it cannot be the base of another disk",
        path.display(),
        record.disk,
        record.group
    );
    Ok(Base {
        at: args.base_at.clone().unwrap_or(When::Hlc(record.at.hlc_raw)),
        ..Base::of(path, &record)
    })
}

/// An image of a chain that was made before: its digest is checked.
fn there(args: &Export, out: &Path, base: Option<&Base>) -> Result<Option<Record>> {
    if out.symlink_metadata().is_err() {
        return Ok(None);
    }
    let record = Record::beside(out)?.filter(|record| {
        record.group == args.group
            && record.disk == args.disk
            && record.base.as_ref().map(|of| of.digest.clone())
                == base.map(|base| base.known.as_ref().map(|of| of.digest.clone()))
    });
    let record = record.with_context(|| {
        format!(
            "{} exists, and is not of this chain: remove it, or give another name",
            out.display()
        )
    })?;
    let digest = image::digest(out, &record.format, record.size_bytes, &AtomicBool::new(false))?;
    ensure!(
        digest == record.digest,
        "{} is not what it was: remove it, and it is made again",
        out.display()
    );
    Ok(Some(record))
}

async fn one(
    client: &Client,
    args: &Export,
    out: &Path,
    at: &When,
    base: Option<Base>,
) -> Result<Record> {
    refuse_existing(out)?;
    let begun = ExportRequest::find(out)?;
    let asked = at.to_string();
    let base_file = base.as_ref().map(|base| base.file.clone());
    if let Some(begun) = &begun {
        let is_the_same = begun.group == args.group
            && begun.disk == args.disk
            && begun.format == args.format.word()
            && begun.asked == asked
            && begun.base == base_file;
        ensure!(
            is_the_same,
            "{0} was begun as {1} of group {2} at {3}: give the same arguments to go on, or remove {0}*",
            record::unfinished(out).display(),
            begun.disk,
            begun.group,
            begun.asked
        );
    }
    let begun_at = begun.as_ref().map(|begun| &begun.at);
    let hold = Hold::take(client, &args.group, out, at, begun_at).await?;
    let record = make(client, args, out, at, (base, begun), &hold).await;
    // Only what can be gone on with needs its point.
    if record.is_ok() || ExportRequest::find(out)?.is_none() {
        hold.give_up().await;
    }
    record
}

async fn make(
    client: &Client,
    args: &Export,
    out: &Path,
    at: &When,
    (base, begun): (Option<Base>, Option<ExportRequest>),
    hold: &Hold<'_>,
) -> Result<Record> {
    let (asked, base_file) = (at.to_string(), base.as_ref().map(|base| base.file.clone()));
    let (group, wanted) = (args.group.clone(), Wanted::default());
    let request = Request::View { group, at: hold.point(), wanted, detach: false };
    let mut view = client.call(&request).await?;
    let opened = match (&begun, view.next().await) {
        (Some(_), Err(error)) => bail!(
            "{0} was begun of a point that is not there any more ({error}): remove {0}* to begin again",
            record::unfinished(out).display()
        ),
        (_, opened) => opened?,
    };
    let Reply::View { view: ViewStatus { at, disks, .. } } = opened else {
        bail!("the server answered something else");
    };
    let Some(disk) = disks.iter().find(|d| d.name == args.disk) else {
        let names: Vec<_> = disks.iter().map(|d| d.name.as_str()).collect();
        bail!("group {} has no disk {}; it has {}", args.group, args.disk, names.join(", "));
    };
    if let Some(begun) = &begun {
        ensure!(
            begun.at.seqs == at.seqs,
            "the point of {} is another one now",
            record::unfinished(out).display()
        );
        eprintln!(
            "going on with {}: what is there is kept after its digest is checked",
            out.display()
        );
    }
    hold.warn();
    eprintln!("exporting {} at {at}", disk.name);
    let size_bytes = disk.size_bytes;
    if begun.is_none() {
        let begun = ExportRequest {
            format_version: record::FORMAT,
            group: args.group.clone(),
            disk: args.disk.clone(),
            format: args.format.word().to_owned(),
            asked,
            at: at.clone(),
            base: base_file,
        };
        begun.write(out)?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let unmade = Unmade {
        control: client.config().control.clone(),
        group: args.group.clone(),
        disk: args.disk.clone(),
        at: hold.point(),
        out: out.to_owned(),
        format: args.format.word(),
        size_bytes,
        base,
        stop: Arc::clone(&stop),
    };
    let mut making = tokio::task::spawn_blocking(move || unmade.make());
    let made = tokio::select! {
        made = &mut making => made?,
        signal = super::asked_to_end() => {
            stop.store(true, Ordering::Release);
            let _ = making.await;
            bail!(
                "{}: {} is not made; the same command goes on with it (its point is held for a day)",
                signal?,
                out.display()
            )
        }
    };
    let (digest, base) = made?;
    finish(args, out, at, size_bytes, digest, base)
}

/// It is what it should be: it gets its name, and beside it what it is.
fn finish(
    args: &Export,
    out: &Path,
    at: Moment,
    size_bytes: u64,
    digest: String,
    base: Option<record::BaseRecord>,
) -> Result<Record> {
    let record = Record {
        format_version: record::FORMAT,
        group: args.group.clone(),
        disk: args.disk.clone(),
        size_bytes,
        format: args.format.word().to_owned(),
        at,
        digest,
        base,
    };
    record.write(out)?;
    // Not over a file that was made meanwhile.
    renameat_with(CWD, record::unfinished(out), CWD, out, RenameFlags::NOREPLACE)
        .with_context(|| format!("cannot make {}", out.display()))?;
    record::sync_dir(out)?;
    ExportRequest::remove(out)?;
    Ok(record)
}

/// What is said of an error that is no fault of anybody here.
pub(super) fn explain(error: std::io::Error, out: &Path) -> anyhow::Error {
    if tidelock_storage::is_full(&error) {
        return anyhow::anyhow!(
            "the file system of {} is full: make room and give the same command again, what is there is kept",
            out.display()
        );
    }
    anyhow::Error::from(error).context(format!("cannot make {}", out.display()))
}

/// Something while it is being made: removed unless it was given its name.
pub(super) struct Unfinished(PathBuf);

impl Unfinished {
    pub(super) fn beside(out: &Path) -> Self {
        let mut name = out.as_os_str().to_owned();
        name.push(format!(".{}.unfinished", std::process::id()));
        Self(name.into())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Gone if it was renamed.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// For people.
pub(super) fn progress(what: &str, bytes: u64) -> indicatif::ProgressBar {
    let style =
        format!("  {what} [{{bar:40}}] {{percent}}% of {} {{eta}} left", text::bytes(bytes));
    let style = indicatif::ProgressStyle::with_template(&style).expect("a constant template");
    indicatif::ProgressBar::new(bytes).with_style(style)
}
