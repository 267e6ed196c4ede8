//! The socket by which a copy is taken from a shard's primary: each connection is a tunnel.

use super::super::Event;
use super::super::tunnels;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tidelock_standbys::bind_for;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The socket. It goes with this value, and so do its connections' beginnings.
pub(super) struct SourceSocket {
    dir: PathBuf,
    task: JoinHandle<()>,
}

impl SourceSocket {
    /// Makes the socket, open to one user.
    pub(super) fn listen(
        dir: &Path,
        user: Option<(u32, u32)>,
        shard: u16,
        events: mpsc::Sender<Event>,
    ) -> io::Result<Self> {
        let listener = UnixListener::from_std(bind_for(dir, user)?)?;
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let events = events.clone();
                tokio::spawn(async move {
                    if let Err(error) = tunnels::serve(stream, shard, events).await {
                        tracing::warn!(shard, "a copy of the primary has lost its tunnel: {error}");
                    }
                });
            }
        });
        Ok(Self { dir: dir.to_owned(), task })
    }
}

impl Drop for SourceSocket {
    fn drop(&mut self) {
        self.task.abort();
        let _ = fs::remove_file(tidelock_standbys::socket_in(&self.dir));
        let _ = fs::remove_dir(&self.dir);
    }
}
