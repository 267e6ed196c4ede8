//! `tidelock-backup export`: a disk as it was at a point in time as an image file, made by qemu-img from a
//! read-only view. Replication goes on; the images just do not move until it is done.

use super::args::{Export, Format};
use super::client::Client;
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::exports::ExportedDisk;
use crate::server::views::{ViewStatus, Wanted};
use crate::travel::when::When;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

pub(super) async fn run(config: Config, args: Export) -> Result<()> {
    refuse_existing(&args.out)?;
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
    let request = Request::View {
        group: args.group.clone(),
        at: args.at.clone().unwrap_or(When::Latest),
        wanted: Wanted::default(),
        detach: false,
    };
    let mut view = client.call(&request).await?;
    let Reply::View { view: ViewStatus { at, disks, .. } } = view.next().await? else {
        bail!("the server answered something else");
    };
    let Some(disk) = disks.iter().find(|d| d.name == args.disk) else {
        let names: Vec<_> = disks.iter().map(|d| d.name.as_str()).collect();
        bail!("group {} has no disk {}; it has {}", args.group, args.disk, names.join(", "));
    };
    eprintln!("exporting {} at {at}", disk.name);
    let unfinished = Unfinished::beside(&args.out);
    tokio::select! {
        converted = convert(disk, args.format, unfinished.path()) => converted?,
        signal = super::asked_to_end() => bail!("{}: {} is not made", signal?, args.out.display()),
    }
    // Not over a file that was made meanwhile.
    renameat_with(CWD, unfinished.path(), CWD, &args.out, RenameFlags::NOREPLACE)
        .with_context(|| format!("cannot make {}", args.out.display()))?;
    println!("{}", args.out.display());
    Ok(())
}

/// The image while it is being made: removed unless it was given its name.
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

async fn convert(disk: &ExportedDisk, format: Format, out: &Path) -> Result<()> {
    let format = match format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    };
    let mut child = Command::new("qemu-img")
        .args(["convert", "-p", "-f", "raw", "-O", format, &disk.uri()])
        .arg(out)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("cannot run qemu-img (is qemu-utils installed?)")?;
    let style = ProgressStyle::with_template("  [{bar:40}] {percent}% {eta} left")
        .expect("a constant template");
    let bar = ProgressBar::new(10_000).with_style(style);
    let (stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let errors = async {
        let mut text = String::new();
        if let Some(stderr) = &mut stderr {
            stderr.read_to_string(&mut text).await?;
        }
        std::io::Result::Ok(text)
    };
    let (_, errors) = tokio::join!(follow(stdout, &bar), errors);
    let status = child.wait().await?;
    bar.finish_and_clear();
    if !status.success() {
        bail!("qemu-img ended with {status}: {}", errors?.trim());
    }
    Ok(())
}

/// qemu-img writes `(12.34/100%)` and a carriage return, again and again.
async fn follow(output: Option<impl AsyncRead + Unpin>, bar: &ProgressBar) {
    let Some(mut output) = output else { return };
    let mut buf = [0; 256];
    while let Ok(read @ 1..) = output.read(&mut buf).await {
        let text = String::from_utf8_lossy(&buf[..read]);
        let percent = text.rsplit('(').find_map(|part| part.split('/').next()?.parse::<f64>().ok());
        if let Some(percent) = percent {
            bar.set_position((percent * 100.0) as u64);
        }
    }
}
