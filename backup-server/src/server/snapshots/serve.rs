//! Requests about snapshots, on the control socket.

use super::{Phase, SnapshotStatus, Snapshots, Wanted};
use crate::server::control::{Reply, reply};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// How often it is told how far one is.
const TELL: Duration = Duration::from_millis(200);

/// What is asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "lowercase", deny_unknown_fields)]
pub enum Ask {
    /// Makes, moves or goes on with some.
    Make {
        /// Of this group.
        group: String,
        /// Which, and how.
        wanted: Wanted,
        /// They are made when the one who asks is gone, too.
        detach: bool,
    },
    /// Those that there are.
    List {
        /// Of this group only.
        group: Option<String>,
    },
    /// Takes one out.
    Remove {
        /// Of which group.
        group: String,
        /// Which.
        name: String,
    },
    /// Reads the images, and says whether they are what they were.
    Verify {
        /// Of which group.
        group: String,
        /// Which.
        name: String,
    },
}

/// Answers. `client` ends when the command line is gone.
pub(in crate::server) async fn serve(
    snapshots: &Arc<Snapshots>,
    ask: Ask,
    client: &mut (impl AsyncRead + Unpin),
    writer: &mut OwnedWriteHalf,
) -> io::Result<Reply> {
    let error = |reason: String| Reply::Error { reason };
    let this = Arc::clone(snapshots);
    let waited = |e: tokio::task::JoinError| format!("the server failed: {e}");
    Ok(match ask {
        Ask::List { group } => {
            let list = spawn_blocking(move || this.told(group.as_deref())).await;
            match list.map_err(waited) {
                Ok(snapshots) => Reply::Snapshots { snapshots, notes: Vec::new() },
                Err(reason) => error(reason),
            }
        }
        Ask::Remove { group, name } => {
            let removed = spawn_blocking(move || this.remove(&group, &name)).await;
            match removed.map_err(waited).and_then(|removed| removed) {
                Ok(()) => Reply::SnapshotRemoved,
                Err(reason) => error(reason),
            }
        }
        Ask::Verify { group, name } => {
            let verified = spawn_blocking(move || this.verify(&group, &name)).await;
            match verified.map_err(waited).and_then(|verified| verified) {
                Ok(disks) => Reply::SnapshotVerified { disks },
                Err(reason) => error(reason),
            }
        }
        Ask::Make { group, wanted, detach } => {
            let begun = match snapshots.begin(&group, wanted).await {
                Ok(begun) => begun,
                Err(reason) => return Ok(error(reason)),
            };
            let told = || snapshots.these(&group, &begun.names);
            if detach {
                return Ok(Reply::Snapshots { snapshots: told(), notes: begun.notes });
            }
            loop {
                let (now, reasons) = (told(), failures(&told()));
                if !reasons.is_empty() {
                    return Ok(error(reasons.join("; ")));
                }
                if now.iter().all(|one| one.phase == Phase::Whole) {
                    return Ok(Reply::Snapshots { snapshots: now, notes: begun.notes });
                }
                if now.iter().any(|one| one.phase == Phase::Paused) {
                    let reason =
                        "it was stopped; asked again it goes on, and what is there is kept";
                    return Ok(error(reason.into()));
                }
                let told = reply(writer, &Reply::Snapping { snapshots: now }).await;
                let mut byte = [0];
                let gone = tokio::select! {
                    () = sleep(TELL) => false,
                    _ = client.read(&mut byte) => true,
                };
                if gone || told.is_err() {
                    // What is there is kept for the next time. What others have begun goes on.
                    let names = begun.started.clone();
                    let paused = spawn_blocking(move || {
                        names.iter().for_each(|name| this.pause(&group, name));
                    });
                    let _ = paused.await;
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
            }
        }
    })
}

fn failures(all: &[SnapshotStatus]) -> Vec<String> {
    let failed = all.iter().filter(|one| one.phase == Phase::Failed);
    failed
        .map(|one| format!("snapshot {}: {}", one.name, one.failed.clone().unwrap_or_default()))
        .collect()
}
