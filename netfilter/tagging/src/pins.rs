//! Where a member's P and the links of its programs outlive the daemon.

use crate::mapped::{is_bpffs, mount_bpffs};
use crate::{Pinned, TaggingError};
use libbpf_rs::MapHandle;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use tidelock_protocol::record::crc32c;

/// Where Linux keeps pinned objects.
const USUAL_MOUNT: &str = "/sys/fs/bpf";
/// How often a directory is made again that others remove meanwhile: many times more than there are daemons on a host.
const AGAIN_MAX: u32 = 1000;

/// A member's file of this kind. Names on this file system are plain.
pub(crate) fn path_of(kind: &str, Pinned { directory, group, member, .. }: Pinned<'_>) -> PathBuf {
    path(kind, directory, group, member, format!("{group}\n{member}").as_bytes())
}

/// The pin of a program's link on one of the member's interfaces. Interfaces of two network namespaces may have one
/// name and one index, and the pins one directory.
pub(crate) fn link_path_of(kind: &str, pinned: Pinned<'_>, interface: &str) -> PathBuf {
    let Pinned { directory, group, member, .. } = pinned;
    let namespace = std::fs::read_link("/proc/thread-self/ns/net").unwrap_or_default();
    let all = format!("{group}\n{member}\n{interface}\n{}", namespace.display());
    path(kind, directory, group, member, all.as_bytes())
}

fn path(kind: &str, directory: &Path, group: &str, member: &str, all: &[u8]) -> PathBuf {
    let plain = |name: &str| -> String {
        name.chars().filter(char::is_ascii_alphanumeric).take(20).collect()
    };
    let crc = crc32c(all);
    directory.join(format!("{kind}-{}-{}-{crc:08x}", plain(group), plain(member)))
}

/// Pins a map in the directory, which is made if it is not there, as is the file system for pinned objects. Until
/// something is pinned in it, any process that takes its own last pin out of it removes it: then it is made again.
pub(crate) fn pin(map: &mut MapHandle, path: &Path, directory: &Path) -> Result<(), TaggingError> {
    let mut again = 0..AGAIN_MAX;
    loop {
        let pinned =
            prepare(directory).map_err(libbpf_rs::Error::from).and_then(|()| map.pin(path));
        match pinned {
            Ok(()) => return Ok(()),
            Err(e) if is_removed(e.kind()) && again.next().is_some() => {}
            Err(e) => {
                let (path, source) = (path.to_owned(), std::io::Error::other(e));
                return Err(TaggingError::Pin { path, source });
            }
        }
    }
}

/// What a step of making a directory, or one in it, says when somebody removes it meanwhile.
fn is_removed(kind: libbpf_rs::ErrorKind) -> bool {
    matches!(kind, libbpf_rs::ErrorKind::NotFound | libbpf_rs::ErrorKind::AlreadyExists)
}

/// Makes the directory, and mounts the file system for pinned objects if it is not there.
pub(crate) fn prepare(directory: &Path) -> std::io::Result<()> {
    let usual = Path::new(USUAL_MOUNT);
    if directory.starts_with(usual) && !is_bpffs(usual)? {
        mount_bpffs(usual)?;
    }
    std::fs::create_dir_all(directory)?;
    if !is_bpffs(directory)? {
        mount_bpffs(directory)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array;

    /// Daemons that start and end beside each other, each with the only pin there is at times.
    #[test]
    fn a_directory_that_others_remove_is_made_again() {
        let root = std::env::temp_dir().join(format!("tlg{}-pins", std::process::id()));
        std::fs::create_dir(&root).expect("a directory");
        if let Err(why) = mount_bpffs(&root) {
            std::fs::remove_dir(&root).expect("it is empty");
            eprintln!("SKIP a_directory_that_others_remove_is_made_again: {why}");
            return;
        }
        let directory = root.join("tidelock");
        let pins_often = |name: &str| {
            let path = directory.join(name);
            (0..2000).try_for_each(|_| {
                pin(&mut array("tl_test", 8)?, &path, &directory)?;
                assert!(path.exists());
                remove(&path)
            })
        };
        let all = std::thread::scope(|scope| {
            let daemons =
                ["first", "second", "third"].map(|name| scope.spawn(move || pins_often(name)));
            daemons.map(|daemon| daemon.join().expect("no panic"))
        });
        let is_left = directory.exists();
        std::process::Command::new("umount").arg(&root).status().expect("umount is there");
        std::fs::remove_dir(&root).expect("nothing is mounted there any more");
        all.into_iter().collect::<Result<(), _>>().expect("each was pinned, and taken away again");
        assert!(!is_left, "the last one takes the directory away");
    }
}
