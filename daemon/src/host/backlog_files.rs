//! A member's backlog on disk: where it is, and what a start is given of it.

use super::HostError;
use super::launch::state_file;
use super::redo::redo;
use crate::config::{AtLimit, Config, Group, Member};
use std::path::{Path, PathBuf};
use tidelock_daemon_core::backlog::segment_bytes;
use tidelock_daemon_core::start::BacklogStart;
use tidelock_storage::unsynced::Directory;

/// How far each writer of a group may be ahead of the backup.
pub(super) fn backlog_limit_bytes(group: &Group) -> u64 {
    group.backlog_on_disk.as_ref().map_or(group.backlog, |on_disk| on_disk.size).bytes
}

/// The backlog of a member, if it has one.
pub(super) fn backlog_of(
    config: &Config,
    group: &Group,
    member: &Member,
) -> Result<Option<BacklogStart>, HostError> {
    let Some(on_disk) = group.backlog_on_disk.as_ref() else { return Ok(None) };
    let directory = match &on_disk.directory {
        None => state_file(config, group, member).path().with_extension("backlog"),
        Some(directory) => {
            directory.join(group.name.as_str()).join(format!("{}.backlog", member.name.as_str()))
        }
    };
    let disks = member.disks.iter().map(|disk| (disk.id, disk.path.value.clone())).collect();
    Ok(Some(BacklogStart {
        files: Directory::at(directory),
        segment_bytes: segment_bytes(on_disk.size.bytes),
        memory_limit_bytes: group.backlog.bytes,
        stands_at_limit: on_disk.at_limit == AtLimit::Map,
        boot: boot_id().map_err(HostError::Boot)?,
        redo: Box::new(move |again| redo(again, &disks).map_err(|error| error.to_string())),
    }))
}

/// Each write is appended to one of these files before it is begun on the local disk.
pub(super) fn segments(backlog: &BacklogStart) -> Vec<PathBuf> {
    let names = backlog.files.names().ok().flatten().unwrap_or_default();
    names.iter().map(|name| backlog.files.path().join(name)).collect()
}

/// Room is taken when it is needed: it may be there then.
pub(super) fn warn_of_little_room(directory: &Path, size_bytes: u64) {
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

/// Which boot of the host this is.
fn boot_id() -> std::io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(std::io::Error::other)?;
    Ok(id.to_be_bytes())
}
