//! The daemon's side of the control API.

use super::{
    Answer, BookmarkWish, CONNECTIONS_MAX, ControlError, ControlErrorKind, ControlTarget, IDLE_MAX,
    REQUEST_MAX_BYTES, Request, SwitchWish, VerifyWish,
};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Binds the socket and serves until the returned task is aborted or the runtime ends.
///
/// # Errors
/// If the socket cannot be made, or another daemon answers on it.
pub fn serve(
    path: &Path,
    target: Arc<dyn ControlTarget>,
) -> io::Result<tokio::task::JoinHandle<()>> {
    let server = Server::bind(path)?;
    Ok(tokio::spawn(server.run(target)))
}

/// A bound control socket. It is removed when this is dropped.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Server {
    /// Makes the socket. Needs a tokio runtime.
    ///
    /// There is no moment in which another user could open it, and one left behind by a crash is replaced.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let text = format!("another daemon answers on {}: stop it first", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let listener = crate::private_socket::bind(path, None)?;
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Serves until it is dropped.
    pub async fn run(self, target: Arc<dyn ControlTarget>) {
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely: others may give some back.
                    tracing::warn!(%error, "control socket: accept failed");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                }
            };
            let target = Arc::clone(&target);
            let permit = Arc::clone(&room).try_acquire_owned();
            tokio::spawn(async move {
                let ended = match permit {
                    Ok(_held) => converse(stream, target.as_ref()).await,
                    Err(_) => turn_away(stream).await,
                };
                if let Err(error) = ended {
                    tracing::debug!(%error, "control connection ended");
                }
            });
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A path that is gone already is as good.
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn converse(stream: UnixStream, target: &dyn ControlTarget) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut bounded = (&mut read).take(REQUEST_MAX_BYTES as u64 + 1);
        let reading = bounded.read_until(b'\n', &mut line);
        let Ok(len) = tokio::time::timeout(IDLE_MAX, reading).await else { return Ok(()) };
        if len? == 0 {
            return Ok(());
        }
        if line.len() > REQUEST_MAX_BYTES {
            let message = format!("a request has at most {REQUEST_MAX_BYTES} bytes");
            let error = ControlError::new(ControlErrorKind::Malformed, message);
            return send(&mut write, &Answer::Error(error)).await;
        }
        let answer = match serde_json::from_slice::<Request>(&line) {
            Ok(request) => perform(request, target),
            Err(error) => Answer::Error(ControlError::new(
                ControlErrorKind::Malformed,
                format!("not a request: {error}"),
            )),
        };
        send(&mut write, &answer).await?;
    }
}

fn perform(request: Request, target: &dyn ControlTarget) -> Answer {
    match request {
        Request::Status => Answer::Status(Box::new(target.status())),
        Request::Stores => Answer::Stores(target.stores()),
        Request::Mode { group, mode } => match target.set_mode(&group, mode) {
            Ok(change) => {
                tracing::info!(
                    group, before = %change.before, after = %change.after, "mode switched"
                );
                Answer::Mode(change)
            }
            Err(error) => Answer::Error(error),
        },
        Request::Verify { group, member, repair, stop } => {
            match target.verify(&group, &VerifyWish { member, repair, stop }) {
                Ok(begun) => Answer::Verify(begun),
                Err(error) => Answer::Error(error),
            }
        }
        Request::Bookmark { group, name, expires_in_ms, moves } => {
            match target.bookmark(&group, BookmarkWish { name, expires_in_ms, moves }) {
                Ok(begun) => Answer::Bookmarking(begun),
                Err(error) => Answer::Error(error),
            }
        }
        Request::Bookmarked { group, id } => match target.bookmarked(&group, id) {
            Ok(state) => Answer::Bookmark(state),
            Err(error) => Answer::Error(error),
        },
        Request::Switchover { group, guest_is_stopped, check_only, timeout_ms, others_ms } => {
            let wish = SwitchWish { guest_is_stopped, check_only, timeout_ms, others_ms };
            match target.switchover(&group, wish) {
                Ok(begun) => Answer::Switching(begun),
                Err(error) => Answer::Error(error),
            }
        }
        Request::Switched { group } => match target.switched(&group) {
            Ok(state) => Answer::Switchover(state),
            Err(error) => Answer::Error(error),
        },
        Request::Adopt { group } => match target.adopt(&group) {
            Ok(disks) => Answer::Adopting(disks),
            Err(error) => Answer::Error(error),
        },
        Request::Adopted { group } => match target.adopted(&group) {
            Ok(()) => Answer::Adopted {},
            Err(error) => Answer::Error(error),
        },
        Request::LeaveOpen { group } => match target.leave_open(&group) {
            Ok(told) => Answer::LeavesOpen { told },
            Err(error) => Answer::Error(error),
        },
        Request::Stop => match target.stop() {
            Ok(()) => Answer::Stopping {},
            Err(error) => Answer::Error(error),
        },
    }
}

async fn turn_away(stream: UnixStream) -> io::Result<()> {
    let message = format!("there are {CONNECTIONS_MAX} control connections already; try again");
    let error = ControlError::new(ControlErrorKind::Busy, message);
    let (_read, mut write) = stream.into_split();
    send(&mut write, &Answer::Error(error)).await
}

async fn send(write: &mut tokio::net::unix::OwnedWriteHalf, answer: &Answer) -> io::Result<()> {
    let mut line = serde_json::to_vec(answer).map_err(io::Error::other)?;
    line.push(b'\n');
    // A client that does not read must not hold a connection for ever.
    tokio::time::timeout(IDLE_MAX, write.write_all(&line))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}
