//! A shard as it was at an earlier cut: a copy of a kept copy, to which the journal gives the log up to the cut and no further.

use super::keeper::Fault;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tidelock_standbys::{Listening, Standbys, socket_in};
use tidelock_storage::files::{Files, OpenFile};
use tidelock_storage::{json, replace};
use tidelock_targets::postgres::{Role, Server, State};
use tidelock_wal::Lsn;
use tokio::sync::OwnedRwLockReadGuard;
use tokio::time::sleep;

const SUFFIX: &str = ".server.json";
const FORMAT: u32 = 1;
/// Time between two looks at a server that replays.
const LOOKS_EACH: Duration = Duration::from_millis(100);

/// A kept copy from which a cut can be reached. While it is held, it is not removed, nor is the log that it needs.
pub(in crate::server::stores) struct Base {
    pub(super) kept: Server,
    /// Directory of everything of the shard.
    pub(super) dir: PathBuf,
    pub(super) shard: u16,
    pub(super) hub: Standbys<OpenFile>,
    pub(super) _hold: OwnedRwLockReadGuard<()>,
}

/// A server at a cut. Its record goes before its files do.
pub(in crate::server::stores) struct Past {
    pub(in crate::server::stores) server: Server,
    /// The socket at which it gets its log.
    _listening: Listening,
    dir: PathBuf,
    name: String,
}

#[derive(Serialize, Deserialize)]
struct Record {
    format: u32,
    server: Server,
}

impl Base {
    /// Makes a server of this name and has it replay the log up to the cut. Nothing is left of one that cannot.
    pub(in crate::server::stores) async fn at(self, name: &str, cut: Lsn) -> Result<Past, Fault> {
        let feed = self.dir.join(format!("{name}.log"));
        let mut server = self.kept.beside(self.dir.join(name));
        server.settings.name = format!("{}-{name}", server.settings.name);
        server.settings.cut = Some(cut);
        server.settings.upstream = Some(feed.clone());
        server.settings.listen_addresses.clear();
        let listening = self.hub.listen(self.shard, Some(cut), &feed, server.user())?;
        let (dir, name) = (self.dir.clone(), name.to_owned());
        let mut past = Past { server, _listening: listening, dir, name };
        match past.replay(&self.kept, cut).await {
            Ok(()) => Ok(past),
            Err(fault) => {
                past.remove().await?;
                Err(fault)
            }
        }
    }
}

impl Past {
    async fn replay(&mut self, kept: &Server, cut: Lsn) -> Result<(), Fault> {
        let record = Record { format: FORMAT, server: self.server.clone() };
        let text = serde_json::to_vec_pretty(&record).expect("plain data");
        replace(&Files::new(self.dir.clone()), "", &format!("{}{SUFFIX}", self.name), &text)?;
        self.server.copy_of(kept).await?;
        self.server.start(Role::Standby).await?;
        loop {
            match self.server.status().await? {
                State::Standby { replayed: Some(at), .. } if at >= cut => return Ok(()),
                State::Stopped => {
                    let text = format!(
                        "the server ended before it had the log: {}",
                        self.server.log().display()
                    );
                    return Err(Fault::Other(text));
                }
                _ => sleep(LOOKS_EACH).await,
            }
        }
    }

    /// The server is one of its own from here on, and on record elsewhere.
    pub(super) fn keep(self) -> Result<(), Fault> {
        Ok(fs::remove_file(self.dir.join(format!("{}{SUFFIX}", self.name)))?)
    }

    /// Stops the server, and removes all of it.
    pub(in crate::server::stores) async fn remove(&mut self) -> Result<(), Fault> {
        remove(&mut self.server, &self.dir, &self.name).await
    }
}

async fn remove(server: &mut Server, dir: &Path, name: &str) -> Result<(), Fault> {
    server.stop().await?;
    server.remove().await?;
    // The socket of a backup server that was killed.
    let feed = dir.join(format!("{name}.log"));
    let _ = fs::remove_file(socket_in(&feed));
    let _ = fs::remove_dir(&feed);
    match fs::remove_file(dir.join(format!("{name}{SUFFIX}"))) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Removes what a backup server that was killed has left.
pub(super) async fn remove_left_over(dir: &Path) -> Result<(), Fault> {
    for entry in fs::read_dir(dir)? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        let Some(name) = file.strip_suffix(SUFFIX) else { continue };
        let record = json::read::<_, Record>(&Files::new(dir.to_owned()), &file, FORMAT);
        if let Some(Record { mut server, .. }) =
            record.map_err(|error| Fault::Other(error.to_string()))?
        {
            remove(&mut server, dir, name).await?;
        }
    }
    Ok(())
}
