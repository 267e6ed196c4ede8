//! A member's backlog on disk: where it is, and what a start does with it.

use super::HostError;
use super::launch::state_file;
use super::redo::redo;
use crate::activity::Identity;
use crate::backlog::{self, BacklogError, Directory, Expected, Left, WhyNot, segment_bytes};
use crate::config::{AtLimit, Config, Group, Member};
use crate::link::queue::{OnDisk, Spilled};
use crate::owner::LeftOnDisk;
use crate::owner::spilling::{DiskBacklog, Ends, Opening};
use crate::state::{Opened, StateFile};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tidelock_protocol::ids::{DiskId, RunId};
use tidelock_storage::files::Files;

/// Why a backlog on disk cannot be begun.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// Its directory or its files.
    #[error(
        "{0}; make room or mend the disk, choose another `directory` in [group.backlog_on_disk], or leave the table out \
         (then the backlog is in memory only)"
    )]
    Files(#[from] BacklogError),
    /// Which boot of the host this is.
    #[error(
        "it cannot be known which boot of the host this is: /proc/sys/kernel/random/boot_id: {0}"
    )]
    Boot(std::io::Error),
}

/// What a backlog on disk is opened with.
pub(super) struct OpenBacklog {
    files: Arc<dyn backlog::Files>,
    size_bytes: u64,
    memory_bytes: u64,
    stands_at_limit: bool,
    identity: Identity,
    disks: BTreeMap<DiskId, PathBuf>,
}

/// Both ends of a backlog on disk, and what is left there for each.
pub(super) struct OpenEnds {
    pub(super) owners: DiskBacklog,
    pub(super) links: OnDisk,
    pub(super) goes_on: Option<LeftOnDisk>,
    pub(super) left: Option<Spilled>,
}

/// How far each writer of a group may be ahead of the backup.
pub(super) fn backlog_limit_bytes(group: &Group) -> u64 {
    group.backlog_on_disk.as_ref().map_or(group.backlog, |on_disk| on_disk.size).bytes
}

impl OpenBacklog {
    pub(super) fn of(
        config: &Config,
        group: &Group,
        member: &Member,
        identity: Identity,
    ) -> Option<Self> {
        let on_disk = group.backlog_on_disk.as_ref()?;
        let directory = match &on_disk.directory {
            None => state_file(config, group, member).path().with_extension("backlog"),
            Some(directory) => directory
                .join(group.name.as_str())
                .join(format!("{}.backlog", member.name.as_str())),
        };
        Some(Self {
            files: Directory::at(directory),
            size_bytes: on_disk.size.bytes,
            memory_bytes: group.backlog.bytes,
            stands_at_limit: on_disk.at_limit == AtLimit::Map,
            identity,
            disks: member.disks.iter().map(|disk| (disk.id, disk.path.value.clone())).collect(),
        })
    }

    /// Backlog on disk of the last run, if the state and the files on this host let this process go on with it. None of its
    /// records is written to the local disks before the backup confirms that no other host has run the member since.
    pub(super) fn find_left(&self, state: &StateFile<Files>) -> Result<Option<Left>, HostError> {
        let Some((run, epoch)) = state.unclean()? else { return Ok(None) };
        let boot = boot_id().map_err(BeginError::Boot)?;
        let identity = digest(&self.identity, run);
        let expected = Expected { incarnation: run.number, epoch, boot, identity };
        let directory = self.files.path().display();
        match backlog::find(&self.files, &expected) {
            Ok(left) => {
                tracing::info!(
                    %directory,
                    first = %left.first(),
                    last = %left.last(),
                    "the daemon had not stopped cleanly: the backlog on disk is gone on with if the backup confirms it"
                );
                Ok(Some(left))
            }
            Err(WhyNot::Nothing) => Ok(None),
            Err(why) => {
                tracing::warn!(%directory, %why, "the backlog on disk is not gone on with: the sites are compared");
                Ok(None)
            }
        }
    }

    /// Each write is appended to one of them before it is begun on the local disk.
    pub(super) fn segments(&self) -> Vec<PathBuf> {
        let names = self.files.names().ok().flatten().unwrap_or_default();
        names.iter().map(|name| self.files.path().join(name)).collect()
    }

    pub(super) fn open(self, opened: &Opened, left: Option<Left>) -> Result<OpenEnds, BeginError> {
        let again = left.as_ref().map(Left::again);
        let ends = Opening {
            files: self.files.clone(),
            segment_bytes: segment_bytes(self.size_bytes),
            limit_bytes: self.size_bytes,
            memory_limit_bytes: self.memory_bytes,
            stands_at_limit: self.stands_at_limit,
            epoch: opened.epoch,
            incarnation: opened.run.number,
            boot: boot_id().map_err(BeginError::Boot)?,
            identity: digest(&self.identity, opened.run),
        }
        .open(left)?;
        warn_of_little_room(self.files.path(), self.size_bytes);
        let Ends { owners, links, goes_on, left } = ends;
        let disks = self.disks;
        let goes_on = goes_on.zip(again).map(|(goes_on, again)| LeftOnDisk {
            goes_on,
            redo: Box::new(move || redo(again, &disks).map_err(|error| error.to_string())),
        });
        Ok(OpenEnds { owners, links, goes_on, left })
    }
}

/// Room is taken when it is needed: it may be there then.
fn warn_of_little_room(directory: &Path, size_bytes: u64) {
    let Ok(found) = rustix::fs::statvfs(directory) else { return };
    let free_bytes = found.f_bavail * found.f_frsize;
    if free_bytes < size_bytes {
        tracing::warn!(
            directory = %directory.display(),
            free_bytes,
            size_bytes,
            "the file system has less room than the backlog on disk may take: when it is full, the backlog is in \
             memory only"
        );
    }
}

/// The key of the checks in the segments of a run. It is derived from the run's nonce, which only the state file holds and which
/// the backup confirms, so whatever somebody else has put into the directory is rejected.
fn digest(identity: &Identity, run: RunId) -> [u8; 32] {
    let key = blake3::derive_key("tidelock backlog on disk, key of a run", &run.nonce.to_bytes());
    let mut hasher = blake3::Hasher::new_keyed(&key);
    let mut add = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
    };
    add(identity.group.as_bytes());
    add(identity.member.as_bytes());
    for (id, name, size_bytes) in &identity.disks {
        add(&id.0.to_le_bytes());
        add(name.as_bytes());
        add(&size_bytes.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// Which boot of the host this is.
fn boot_id() -> std::io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(std::io::Error::other)?;
    Ok(id.to_be_bytes())
}
