//! A member's backlog on disk: where it is, and what a start does with it.

use super::HostError;
use super::launch::state_path;
use super::redo::redo;
use crate::activity::Identity;
use crate::backlog::{self, BacklogError, Directory, Expected, Files, Left, WhyNot, segment_bytes};
use crate::config::{AtLimit, Config, Group, Member};
use crate::owner::spilling::{Ends, Opening};
use crate::state::{MemberState, Opened};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tidelock_protocol::ids::DiskId;

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
    files: Arc<dyn Files>,
    size_bytes: u64,
    memory_bytes: u64,
    stands_at_limit: bool,
    identity: [u8; 32],
    disks: BTreeMap<DiskId, PathBuf>,
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
        identity: &Identity,
    ) -> Option<Self> {
        let on_disk = group.backlog_on_disk.as_ref()?;
        let directory = match &on_disk.directory {
            None => state_path(config, group, member).with_extension("backlog"),
            Some(directory) => directory
                .join(group.name.as_str())
                .join(format!("{}.backlog", member.name.as_str())),
        };
        Some(Self {
            files: Directory::at(directory),
            size_bytes: on_disk.size.bytes,
            memory_bytes: group.backlog.bytes,
            stands_at_limit: on_disk.at_limit == AtLimit::Map,
            identity: digest(identity),
            disks: member.disks.iter().map(|disk| (disk.id, disk.path.value.clone())).collect(),
        })
    }

    /// What the run before has left, if this process can go on with it: then what may be missing on the local disks is
    /// done again. The disks are open here, so no other daemon has them, and nothing of a killed one is under way.
    pub(super) fn find_left(&self, state: &Path) -> Result<Option<Left>, HostError> {
        let Some((incarnation, epoch)) = MemberState::unclean(state)? else { return Ok(None) };
        let boot = boot_id().map_err(BeginError::Boot)?;
        let expected = Expected { incarnation, epoch, boot, identity: self.identity };
        let directory = self.files.path().display();
        let left = match backlog::find(&self.files, &expected) {
            Ok(left) => left,
            Err(WhyNot::Nothing) => return Ok(None),
            Err(why) => {
                tracing::warn!(%directory, %why, "the backlog on disk is not gone on with: the sites are compared");
                return Ok(None);
            }
        };
        match redo(&left, &self.disks) {
            Ok(redone) => {
                tracing::warn!(
                    %directory,
                    first = %left.first(),
                    last = %left.last(),
                    redone,
                    "the daemon had not stopped cleanly: going on with the backlog on disk, nothing is compared"
                );
                Ok(Some(left))
            }
            Err(error) => {
                tracing::error!(
                    %directory,
                    %error,
                    "what was under way cannot be done again: the sites are compared"
                );
                Ok(None)
            }
        }
    }

    pub(super) fn open(self, opened: &Opened, left: Option<Left>) -> Result<Ends, BeginError> {
        let ends = Opening {
            files: self.files.clone(),
            segment_bytes: segment_bytes(self.size_bytes),
            limit_bytes: self.size_bytes,
            memory_limit_bytes: self.memory_bytes,
            stands_at_limit: self.stands_at_limit,
            epoch: opened.epoch,
            incarnation: opened.incarnation,
            boot: boot_id().map_err(BeginError::Boot)?,
            identity: self.identity,
        }
        .open(left)?;
        warn_of_little_room(self.files.path(), self.size_bytes);
        Ok(ends)
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

fn digest(identity: &Identity) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
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
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(std::io::Error::other)?;
    Ok(id.to_be_bytes())
}
