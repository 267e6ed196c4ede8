//! QEMU's own tools for its own formats: `qemu-img` makes and checks images, `qemu-nbd` reads and writes them.

use super::nbd_client::Client;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tidelock_replica::travel::copy::Image;

/// A `qemu-nbd` that does not listen by then hangs, or waits for a lock.
const LISTENS_WITHIN: Duration = Duration::from_secs(20);
/// And one that has not written its metadata and ended by then.
const ENDS_WITHIN: Duration = Duration::from_secs(120);
const LOOKS_EACH: Duration = Duration::from_millis(5);
/// Runs a command if the parent is the process of this number: one that ended before `setpriv` had asked for its death
/// to be told would leave the command behind, with the image's lock.
const WHILE_PARENT_LIVES: &str = r#"[ "$PPID" = "$0" ] && exec "$@""#;

/// An image that `qemu-nbd` has opened. [`QemuImage::close`] says whether all of it was written.
#[derive(Debug)]
pub struct QemuImage {
    client: Option<Client>,
    child: Child,
    socket: PathBuf,
}

impl QemuImage {
    /// Opens an image. Its socket is made in a directory that is nobody else's.
    ///
    /// The `qemu-nbd` of a process that was killed has the image's lock until it is gone, too, so a lock is waited for.
    pub fn open(image: &Path, format: &str, read_only: bool, sockets: &Path) -> io::Result<Self> {
        let since = Instant::now();
        loop {
            match Self::open_now(image, format, read_only, sockets, since) {
                Err(error)
                    if error.kind() == io::ErrorKind::ResourceBusy
                        && since.elapsed() < LISTENS_WITHIN =>
                {
                    std::thread::sleep(LOOKS_EACH);
                }
                opened => return opened,
            }
        }
    }

    fn open_now(
        image: &Path,
        format: &str,
        read_only: bool,
        sockets: &Path,
        since: Instant,
    ) -> io::Result<Self> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let nth = LAST.fetch_add(1, Ordering::Relaxed);
        let socket = sockets.join(format!("q{}-{nth}.sock", std::process::id()));
        match std::fs::remove_file(&socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // It ends with the connection, and with this process before there is one.
        let mut command = ends_with_us("qemu-nbd");
        command.args(["--cache", "writeback", "--export-name", "image"]);
        command.args(["--format", format, "--socket"]).arg(&socket);
        if read_only {
            command.arg("--read-only");
        }
        let child = command
            .arg(image)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| {
                io::Error::other(format!("cannot run qemu-nbd (is qemu-utils installed?): {e}"))
            })?;
        let mut opened = Self { client: None, child, socket };
        loop {
            match Client::connect(&opened.socket, "image") {
                Ok(client) => {
                    opened.client = Some(client);
                    return Ok(opened);
                }
                // It listens before it opens the image: if it cannot, the connection breaks as it ends.
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::NotFound
                            | io::ErrorKind::ConnectionRefused
                            | io::ErrorKind::ConnectionReset
                            | io::ErrorKind::BrokenPipe
                            | io::ErrorKind::UnexpectedEof
                    ) => {}
                Err(e) => return Err(e),
            }
            if opened.child.try_wait()?.is_some() {
                return Err(opened.failed(image));
            }
            if since.elapsed() > LISTENS_WITHIN {
                return Err(io::Error::other(format!(
                    "qemu-nbd does not open {}",
                    image.display()
                )));
            }
            std::thread::sleep(LOOKS_EACH);
        }
    }

    /// The disk's size.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.client.as_ref().map_or(0, Client::size_bytes)
    }

    /// Writes what QEMU still has, and ends it.
    pub fn close(mut self, image: &Path) -> io::Result<()> {
        self.client()?.flush()?;
        self.client = None;
        let since = Instant::now();
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return std::fs::File::open(image)?.sync_all(),
                Some(_) => return Err(self.failed(image)),
                None if since.elapsed() > ENDS_WITHIN => {
                    return Err(io::Error::other(format!(
                        "qemu-nbd does not close {}",
                        image.display()
                    )));
                }
                None => std::thread::sleep(LOOKS_EACH),
            }
        }
    }

    fn failed(&mut self, image: &Path) -> io::Error {
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut text);
        }
        let kind = match text.contains("lock") {
            true => io::ErrorKind::ResourceBusy,
            false => io::ErrorKind::Other,
        };
        let text = format!("qemu-nbd cannot serve {}: {}", image.display(), text.trim());
        io::Error::new(kind, text)
    }

    fn client(&mut self) -> io::Result<&mut Client> {
        self.client.as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for QemuImage {
    fn drop(&mut self) {
        self.client = None;
        let since = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if since.elapsed() > ENDS_WITHIN {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(LOOKS_EACH);
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Image for QemuImage {
    fn read(&mut self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.client()?.read(offset, buf)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.client()?.write(offset, data)
    }

    fn zero(&mut self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.client()?.zero(offset, len_bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.client()?.flush()
    }
}

/// A program that is killed if this process, or the thread that starts it, is gone.
fn ends_with_us(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "sh", "-c", WHILE_PARENT_LIVES]);
    command.arg(std::process::id().to_string()).arg(program);
    command
}

/// Runs `qemu-img` to its end. Returns what it printed.
pub fn img<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> io::Result<Vec<u8>> {
    let output =
        ends_with_us("qemu-img").args(args).stdin(Stdio::null()).output().map_err(|e| {
            io::Error::other(format!("cannot run qemu-img (is qemu-utils installed?): {e}"))
        })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("qemu-img ended with {}: {}", output.status, text.trim())))
}

/// Makes an empty qcow2 image, over another one if so asked: that one's name as the new one is to have it, and its
/// format. If this process is killed meanwhile the file is there and is no image.
pub fn create(image: &Path, size_bytes: u64, over: Option<(&Path, &str)>) -> io::Result<()> {
    let mut args: Vec<&OsStr> = ["create", "-q", "-f", "qcow2"].map(OsStr::new).into();
    if let Some((backing, format)) = over {
        args.extend([OsStr::new("-b"), backing.as_os_str(), OsStr::new("-F"), OsStr::new(format)]);
    }
    let size = size_bytes.to_string();
    args.extend([image.as_os_str(), OsStr::new(&size)]);
    img(args).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_tools() -> bool {
        ["qemu-img", "qemu-nbd", "setpriv"]
            .iter()
            .all(|tool| Command::new(tool).arg("--version").output().is_ok())
    }

    #[test]
    fn a_lock_that_is_given_up_is_waited_for() {
        if !has_tools() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("a.qcow2");
        create(&image, 1 << 20, None).unwrap();
        let before = QemuImage::open(&image, "qcow2", false, dir.path()).unwrap();
        let holder = std::thread::spawn({
            let image = image.clone();
            move || {
                std::thread::sleep(Duration::from_millis(300));
                before.close(&image)
            }
        });
        // By this thread: a `qemu-nbd` ends with the thread that has started it.
        let next = QemuImage::open(&image, "qcow2", false, dir.path()).unwrap();
        holder.join().unwrap().unwrap();
        next.close(&image).unwrap();
    }

    #[test]
    fn nothing_is_begun_for_a_process_that_is_gone() {
        let begun = |parent: u32| {
            let mut command = Command::new("sh");
            command.args(["-c", WHILE_PARENT_LIVES, &parent.to_string(), "echo", "begun"]);
            command.output().unwrap().stdout == b"begun\n"
        };
        assert!(begun(std::process::id()));
        assert!(!begun(std::process::id() + 1));
    }

    #[test]
    fn what_it_cannot_open_is_told_in_its_own_words() {
        if !has_tools() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("a.qcow2");
        std::fs::write(&image, [7; 65536]).unwrap();
        let told = QemuImage::open(&image, "qcow2", false, dir.path()).unwrap_err().to_string();
        assert!(told.contains("qcow2"), "{told}");
    }
}
