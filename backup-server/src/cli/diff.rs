//! `tidelock-backup diff` and `apply`: what is different between two points, told or as a file, and such a file onto
//! an image.

use super::args::{Apply, Diff};
use super::client::Client;
use super::export::{Unfinished, refuse_existing};
use crate::server::config::Config;
use crate::server::control::{Reply, Request};
use crate::server::travel::DiskDiff;
use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::json;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::Path;
use tidelock_replica::text;
use tidelock_replica::travel::increment::{self, Piece};
use tokio::io::AsyncWriteExt;

pub(super) async fn run(config: Config, args: Diff) -> Result<()> {
    let client = Client::connect(config).await?;
    let outcome = match &args.output {
        Some(out) => write(&client, &args, out).await,
        None => tell(&client, &args).await,
    };
    client.end().await;
    outcome
}

async fn tell(client: &Client, args: &Diff) -> Result<()> {
    let request = Request::Diff {
        group: args.group.clone(),
        from: args.from.clone(),
        to: args.to.clone(),
        disk: args.disk.clone(),
        ranges: args.extents,
    };
    let Reply::Diff { from, to, disks } = client.ask(&request).await? else {
        bail!("the server answered something else");
    };
    if args.json {
        let all = json!({ "group": args.group, "from": from, "to": to, "disks": disks });
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(());
    }
    println!("from  {from}\nto    {to}");
    tell_disks(&disks);
    Ok(())
}

/// What is different, for people.
pub(super) fn tell_disks(disks: &[DiskDiff]) {
    for disk in disks {
        let (bytes, size) = (text::bytes(disk.bytes), text::bytes(disk.size_bytes));
        println!("  {:<20} {bytes} of {size} were written, in {} extents", disk.name, disk.extents);
        for (offset, len) in disk.ranges.iter().flatten() {
            println!("    {offset:>16} {len:>12}");
        }
    }
}

async fn write(client: &Client, args: &Diff, out: &Path) -> Result<()> {
    refuse_existing(out)?;
    let disk = args
        .disk
        .clone()
        .context("--output is for one disk: say which, with --disk MEMBER.DISK")?;
    let (group, from, to) = (args.group.clone(), args.from.clone(), args.to.clone());
    let mut call = client.call(&Request::Increment { group, from, to, disk }).await?;
    let Reply::Increment { description } = call.next().await? else {
        bail!("the server answered something else");
    };
    let unfinished = Unfinished::beside(out);
    let path = unfinished.path().to_owned();
    let mut file = tokio::fs::File::create_new(&path).await?;
    let mut bytes = call.rest();
    tokio::select! {
        copied = tokio::io::copy(&mut bytes, &mut file) => {
            copied.with_context(|| format!("cannot write {}", path.display()))?;
        }
        signal = super::asked_to_end() => bail!("{}: {} is not made", signal?, out.display()),
    }
    file.flush().await?;
    file.sync_all().await?;
    // Whole, with all its checksums, or it is none.
    let made = tokio::task::spawn_blocking(move || increment::read(open(&path)?, |_, _| Ok(())));
    let (_, total) =
        made.await?.context("the server could not send all of it; its log says why")?;
    renameat_with(CWD, unfinished.path(), CWD, out, RenameFlags::NOREPLACE)
        .with_context(|| format!("cannot make {}", out.display()))?;
    if args.json {
        let made = json!({ "file": out, "extents": total.offset, "bytes": total.len_bytes,
                           "description": description });
        println!("{}", serde_json::to_string(&made)?);
    } else {
        println!("{}: {} in {} extents", out.display(), text::bytes(total.len_bytes), total.offset);
    }
    Ok(())
}

fn open(path: &Path) -> std::io::Result<BufReader<File>> {
    Ok(BufReader::with_capacity(1 << 20, File::open(path)?))
}

/// Changes an image in place, after the file was read and found good as a whole.
pub(super) fn apply(args: &Apply) -> Result<()> {
    let name = args.increment.display();
    let cannot = || format!("cannot apply {name}");
    let (description, total) =
        increment::read(open(&args.increment).with_context(cannot)?, |_, _| Ok(()))
            .with_context(cannot)?;
    let image = File::options()
        .write(true)
        .open(&args.image)
        .with_context(|| format!("cannot open {}", args.image.display()))?;
    let size = image.metadata()?.len();
    ensure!(
        size == description.size_bytes,
        "{} has {size} bytes and {} has {}: it is not a raw image of that disk. Nothing was changed",
        args.image.display(),
        description.disk,
        description.size_bytes
    );
    let zeroes = vec![0; 1 << 20];
    increment::read(open(&args.increment)?, |_, piece| match piece {
        Piece::Data(at, data) => image.write_all_at(data, at.offset),
        Piece::Zero(at) => {
            let mut done = 0;
            while done < at.len_bytes {
                let len = (at.len_bytes - done).min(zeroes.len() as u64);
                image.write_all_at(&zeroes[..len as usize], at.offset + done)?;
                done += len;
            }
            Ok(())
        }
    })
    .with_context(|| format!("{} is changed in part: apply it again", args.image.display()))?;
    image.sync_all()?;
    if args.json {
        let done = json!({ "image": args.image, "extents": total.offset, "bytes": total.len_bytes,
                           "at": description.to });
        println!("{}", serde_json::to_string(&done)?);
    } else {
        println!(
            "{} is {} of group {} at",
            args.image.display(),
            description.disk,
            description.group
        );
        println!("  {}", description.to);
        println!("if it was the same at\n  {}", description.from);
    }
    Ok(())
}
