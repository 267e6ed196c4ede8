//! Unix sockets that one user may open, and nobody may put another one in their place.

use rustix::fs::{AtFlags, CWD, Mode, Uid, chownat, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The bytes that a socket's path has more while the socket is made: they count for the kernel's limit.
pub const SUFFIX: &str = ".new";
/// Others may pass through to a socket of theirs, and neither list, add, rename nor remove any.
const DIRECTORY_MODE: u32 = 0o711;
/// Connections that may wait to be accepted; the kernel takes its own limit (`somaxconn`) if that is less. Beyond, a client
/// that does not wait is refused.
const BACKLOG: i32 = 4096;

/// Listens at `path`, which only `owner` may open (by default this process's user). A socket that is there is replaced.
///
/// The socket has its mode from the moment it exists, and its owner before it gets its name.
pub fn bind(path: &Path, owner: Option<u32>) -> io::Result<UnixListener> {
    if let Some(directory) = path.parent() {
        create_directories(directory)?;
    }
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(SUFFIX);
    let fresh = PathBuf::from(fresh);
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives a socket's file the mode of the descriptor, without the umask's bits.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(&fresh)?)?;
    if let Some(owner) = owner {
        chownat(CWD, &fresh, Some(Uid::from_raw(owner)), None, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    rustix::net::listen(&socket, BACKLOG)?;
    std::fs::rename(&fresh, path)?;
    Ok(socket.into())
}

/// Makes what is missing of a directory. The mode does not depend on the umask; directories that exist keep theirs.
fn create_directories(directory: &Path) -> io::Result<()> {
    if directory.as_os_str().is_empty() || directory.is_dir() {
        return Ok(());
    }
    if let Some(parent) = directory.parent() {
        create_directories(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => std::fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE)),
        Err(_) if directory.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixStream;

    fn mode(path: &Path) -> u32 {
        path.symlink_metadata().unwrap().mode() & 0o7777
    }

    #[test]
    fn a_socket_and_its_directories_are_one_users_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let (group, member) = (dir.path().join("shop"), dir.path().join("shop/db"));
        let path = member.join("root.sock");
        let own = dir.path().metadata().unwrap().uid();
        // Only root can give it away.
        let other = if own == 0 { 65534 } else { own };
        for owner in [None, Some(other)] {
            let before = rustix::process::umask(Mode::from_raw_mode(0o007));
            let bound = bind(&path, owner);
            rustix::process::umask(before);
            let listener = bound.unwrap();
            for directory in [&group, &member] {
                assert_eq!(mode(directory), DIRECTORY_MODE, "{}", directory.display());
                assert_eq!(directory.metadata().unwrap().uid(), own);
            }
            assert_eq!(mode(&path), 0o600);
            assert_eq!(path.metadata().unwrap().uid(), owner.unwrap_or(own));
            UnixStream::connect(&path).unwrap();
            listener.accept().unwrap();
            assert_eq!(std::fs::read_dir(&member).unwrap().count(), 1, "only the socket is left");
        }
    }

    #[test]
    fn a_link_in_the_way_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "kept").unwrap();
        std::fs::set_permissions(&victim, Permissions::from_mode(0o644)).unwrap();
        let own = victim.metadata().unwrap().uid();
        let path = dir.path().join("root.sock");
        for link in [path.clone(), dir.path().join("root.sock.new")] {
            std::os::unix::fs::symlink(&victim, link).unwrap();
        }
        let _listener = bind(&path, (own == 0).then_some(65534)).unwrap();
        assert_eq!((mode(&victim), victim.metadata().unwrap().uid()), (0o644, own));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
        UnixStream::connect(&path).unwrap();
    }
}
