//! Content of disks at points, on the control socket: what a point has, or has unlike another one, as an increment; and
//! digests, so that whoever has written it somewhere can tell that it is there.

use super::control::{self, Reply};
use super::registry::Registry;
use super::travel::{chosen, looking, or_error};
use std::io;
use std::ops::Range;
use tidelock_replica::travel::digest;
use tidelock_replica::travel::disk::Disk;
use tidelock_replica::travel::increment::{self, Description};
use tidelock_replica::travel::when::When;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;

/// What is to be sent.
#[derive(Debug)]
pub(super) struct Wanted {
    /// Of this disk, `member.disk`.
    pub(super) disk: String,
    /// At this point.
    pub(super) at: When,
    /// Only what is written between the two; `None`: all of the disk.
    pub(super) from: Option<When>,
    /// From this offset on.
    pub(super) offset: u64,
}

/// Sends content as an increment: a reply with what it is of, then its bytes until the connection ends.
pub(super) async fn send(
    registry: &Registry,
    group: String,
    wanted: Wanted,
    writer: &mut OwnedWriteHalf,
) -> io::Result<Option<Reply>> {
    // A few parts ahead of the socket.
    let (parts, mut ready) = mpsc::channel::<io::Result<Vec<u8>>>(4);
    let in_group = group.clone();
    let begun = looking(registry, &group, move |look| {
        let to = look.resolve(&wanted.at)?;
        let from = wanted.from.as_ref().map(|from| look.resolve(from)).transpose()?;
        let disks = look.disks(from.as_ref().unwrap_or(&to), &to);
        let (key, name, _) = chosen(disks, Some(&wanted.disk))?.remove(0);
        let view = look.history.open(&to).map_err(|e| e.to_string())?.remove(&key);
        let view = view.ok_or("the disk has no state there")?;
        let size_bytes = Disk::size_bytes(&view);
        let extents: Vec<Range<u64>> = match &from {
            Some(from) => {
                let changed = look.history.changed(from, &to, key).map_err(|e| e.to_string())?;
                let beyond = changed.map(|range| range.start.max(wanted.offset)..range.end);
                beyond.filter(|range| !range.is_empty()).collect()
            }
            // What is zeroes is told as a whole, however long it is.
            None => {
                Some(wanted.offset..size_bytes).filter(|all| !all.is_empty()).into_iter().collect()
            }
        };
        let description = Description {
            group: in_group,
            disk: name,
            size_bytes,
            from: look.moment(from.as_ref().unwrap_or(&to)),
            to: look.moment(&to),
        };
        let made =
            increment::Writer::new(view, &description, extents).map_err(|e| e.to_string())?;
        Ok((description, made))
    });
    let (description, mut made) = match begun.await {
        Ok(begun) => begun,
        Err(reason) => return Ok(Some(Reply::Error { reason })),
    };
    control::reply(writer, &Reply::Increment { description }).await?;
    let making = spawn_blocking(move || {
        loop {
            let part = made.next_part();
            let ends = !matches!(part, Ok(Some(_)));
            // Whoever asked is gone if it cannot be sent.
            let Some(part) = part.transpose() else { return };
            if parts.blocking_send(part).is_err() || ends {
                return;
            }
        }
    });
    while let Some(part) = ready.recv().await {
        // An error ends it without its end, which the other side misses.
        writer.write_all(&part?).await?;
    }
    let _ = making.await;
    Ok(None)
}

/// The digest of a disk at a point, which is read for it.
pub(super) async fn digest(registry: &Registry, group: &str, disk: String, at: When) -> Reply {
    let opened = looking(registry, group, move |look| {
        let at = look.resolve(&at)?;
        let (key, _, _) = chosen(look.disks(&at, &at), Some(&disk))?.remove(0);
        let view = look.history.open(&at).map_err(|e| e.to_string())?.remove(&key);
        view.ok_or_else(|| "the disk has no state there".to_owned())
    });
    let read = async {
        let view = opened.await?;
        // The look is gone, so that folding goes on meanwhile.
        let read = spawn_blocking(move || digest::of_disk(&view, |_| Ok(())));
        let digest = read.await.map_err(|e| format!("the server failed: {e}"))?;
        Ok(Reply::Digest { digest: digest::hex(&digest.map_err(|e| e.to_string())?) })
    };
    or_error(read.await)
}
