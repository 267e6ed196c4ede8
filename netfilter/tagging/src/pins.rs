//! Where a member's P and the links of its programs outlive the daemon.

use crate::mapped::{is_bpffs, mount_bpffs};
use crate::{Pinned, TaggingError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use tidelock_protocol::record::crc32c;

/// Where Linux keeps pinned objects.
const USUAL_MOUNT: &str = "/sys/fs/bpf";
/// A member's file of this kind. Names on this file system are plain.
pub(crate) fn path_of(kind: &str, Pinned { directory, group, member, .. }: Pinned<'_>) -> PathBuf {
    let plain = |name: &str| -> String {
        name.chars().filter(char::is_ascii_alphanumeric).take(20).collect()
    };
    let crc = crc32c(format!("{group}\n{member}").as_bytes());
    directory.join(format!("{kind}-{}-{}-{crc:08x}", plain(group), plain(member)))
}

/// Makes the directory, and mounts the file system for pinned objects if it is not there.
pub(crate) fn prepare(directory: &Path) -> Result<(), TaggingError> {
    let cannot = |source| TaggingError::Pin { path: directory.to_owned(), source };
    let usual = Path::new(USUAL_MOUNT);
    if directory.starts_with(usual) && !is_bpffs(usual).map_err(cannot)? {
        mount_bpffs(usual).map_err(cannot)?;
    }
    std::fs::create_dir_all(directory).map_err(cannot)?;
    if !is_bpffs(directory).map_err(cannot)? {
        mount_bpffs(directory).map_err(cannot)?;
    }
    Ok(())
}

/// Removes a pin, and the directory if it was the last one.
pub(crate) fn remove(path: &Path) -> Result<(), TaggingError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            return Err(TaggingError::Pin { path: path.to_owned(), source });
        }
        _ => {}
    }
    if let Some(directory) = path.parent() {
        // Not empty, or a mount point: then it stays.
        let _ = std::fs::remove_dir(directory);
    }
    Ok(())
}
