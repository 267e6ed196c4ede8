//! Sockets and threads: one thread accepts, and one serves each standby.

use crate::failure::Failure;
use crate::hub::{ConnectionId, Standbys, Waker};
use crate::standby::{Event, Standby};
use bytes::Buf;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tidelock_pgstream::{Now, Timing};
use tidelock_storage::StorageFile;
use tidelock_wal::{Lsn, PgTimestamp};

/// Port in the name of the socket, as PostgreSQL's clients put it together.
pub const SOCKET_PORT: u16 = 5432;
const READ_BYTES: usize = 16 << 10;
/// Time for the last words of a connection.
const FAREWELL: Duration = Duration::from_secs(1);
/// After an error of `accept`: a pause lets some descriptors go.
const PAUSE: Duration = Duration::from_millis(100);

/// Path of the socket in a directory, where PostgreSQL's clients look for it.
#[must_use]
pub fn socket_in(dir: &Path) -> PathBuf {
    dir.join(format!(".s.PGSQL.{SOCKET_PORT}"))
}

/// Binds a socket in a directory that is for it alone. `user` (its number and its group's) and root may connect; without it,
/// the user of this process.
///
/// # Errors
/// The socket cannot be made.
pub fn bind_for(dir: &Path, user: Option<(u32, u32)>) -> io::Result<UnixListener> {
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    let path = socket_in(dir);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let wrong = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot listen on {}: {error}", path.display()))
    };
    let listener = UnixListener::bind(&path).map_err(wrong)?;
    listener.set_nonblocking(true)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    if let Some((uid, gid)) = user {
        lchown(&path, Some(uid), Some(gid))?;
        // The user must pass through the directory, and has no other right to it.
        chown(dir, None, Some(gid))?;
        fs::set_permissions(dir, fs::Permissions::from_mode(0o710))?;
    }
    Ok(listener)
}

/// A socket on which the log of a shard is served. It goes with this value, and so do its connections.
#[derive(Debug)]
pub struct Listening {
    dir: PathBuf,
    is_over: Arc<AtomicBool>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = fs::remove_file(socket_in(&self.dir));
        let _ = fs::remove_dir(&self.dir);
    }
}

impl<F: StorageFile + Send + Sync + 'static> Standbys<F> {
    /// Serves the log of a shard on a socket in this directory, which must be for it alone. A standby gets it up to
    /// apply-to, and not beyond `cut` if there is one. Whoever may connect: [`bind_for`].
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(
        &self,
        shard: u16,
        cut: Option<Lsn>,
        dir: &Path,
        user: Option<(u32, u32)>,
    ) -> io::Result<Listening> {
        let listener = bind_for(dir, user)?;
        let (waker, is_over) = (Waker::new()?, Arc::new(AtomicBool::new(false)));
        let (standbys, socket) = (self.clone(), self.number());
        let (wakes, over) = (Arc::clone(&waker), Arc::clone(&is_over));
        let thread = thread::Builder::new().name(format!("standbys-{shard}")).spawn(move || {
            standbys.accept(&listener, shard, cut, socket, &wakes, &over);
            standbys.withdraw(socket);
        })?;
        Ok(Listening { dir: dir.into(), is_over, waker, thread: Some(thread) })
    }

    fn accept(
        &self,
        listener: &UnixListener,
        shard: u16,
        cut: Option<Lsn>,
        socket: u64,
        waker: &Waker,
        is_over: &AtomicBool,
    ) {
        while !is_over.load(Ordering::Acquire) {
            let mut fds =
                [PollFd::new(listener, PollFlags::IN), PollFd::new(&waker.0, PollFlags::IN)];
            let _ = poll(&mut fds, None);
            match listener.accept() {
                Ok((stream, _)) => {
                    let standbys = self.clone();
                    let serve = move || standbys.serve(stream, shard, cut, socket);
                    let _ = thread::Builder::new().name(format!("standby-{shard}")).spawn(serve);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    /// Serves one connection to its end.
    fn serve(&self, stream: UnixStream, shard: u16, cut: Option<Lsn>, socket: u64) {
        let entered = Waker::new().map_err(Failure::Socket).and_then(|waker| {
            let id = self.enter(shard, cut, socket, Arc::clone(&waker))?;
            Ok((id, waker))
        });
        let (id, waker) = match entered {
            Ok(entered) => entered,
            Err(failure) => return self.report(ConnectionId(0), shard, &Event::Ended(failure)),
        };
        let failure = self.run(stream, id, shard, &waker);
        self.leave(id);
        self.report(id, shard, &Event::Ended(failure));
    }

    /// Moves bytes until the connection ends.
    fn run(&self, mut stream: UnixStream, id: ConnectionId, shard: u16, waker: &Waker) -> Failure {
        let begun = Instant::now();
        let served = stream.set_nonblocking(true).map_err(Failure::Socket);
        let started = served.and_then(|()| {
            let mut nonce = [0; 18];
            fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
            Ok((nonce, self.news(id)?))
        });
        let (nonce, news) = match started {
            Ok(started) => started,
            Err(failure) => return failure,
        };
        let timing = Timing::default();
        let mut standby = Standby::new(shard, &news.wal, news.bound, timing, nonce, now(begun));
        let mut input = vec![0; READ_BYTES];
        loop {
            match self.news(id) {
                Ok(news) => {
                    standby.extend(&news.wal);
                    standby.advance(news.bound);
                    if let Some((ask, supply)) = news.supply {
                        standby.supply(ask, supply);
                    }
                }
                Err(failure) => standby.give_up(failure),
            }
            while let Some(event) = standby.poll() {
                if let Event::Ended(failure) = event {
                    farewell(&mut stream, &mut standby);
                    return failure;
                }
                self.report(id, shard, &event);
            }
            if let Some((ask, need)) = standby.ask() {
                self.ask(id, ask, need);
            }
            let waited = match write(&mut stream, &mut standby) {
                // More may be sent; words of the standby are heard meanwhile all the same.
                Ok(true) => wait(&stream, waker, &mut standby, Some(Duration::ZERO)),
                Ok(false) => {
                    let left = standby.deadline().map(|at| at.saturating_sub(begun.elapsed()));
                    // Rounded up: a deadline that is not quite reached would be looked at again and again.
                    let left = left.map(|left| left + Duration::from_millis(1));
                    wait(&stream, waker, &mut standby, left)
                }
                Err(error) => Err(error),
            };
            if let Err(error) = waited {
                return Failure::Socket(error);
            }
            waker.rest();
            standby.tick(now(begun));
            if standby.takes_input() {
                match stream.read(&mut input) {
                    Ok(0) => standby.closed(),
                    Ok(count) => standby.received(&input[..count]),
                    Err(error) if is_passing(&error) => {}
                    Err(error) => return Failure::Socket(error),
                }
            }
        }
    }
}

/// Waits for the socket, for news, or so long.
fn wait<F: StorageFile>(
    stream: &UnixStream,
    waker: &Waker,
    standby: &mut Standby<F>,
    left: Option<Duration>,
) -> io::Result<()> {
    let mut wanted = PollFlags::empty();
    wanted.set(PollFlags::OUT, !standby.output().is_empty());
    wanted.set(PollFlags::IN, standby.takes_input());
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    let mut fds = [PollFd::new(stream, wanted), PollFd::new(&waker.0, PollFlags::IN)];
    match poll(&mut fds, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Writes what the socket takes. True: something has left, and all of it.
fn write<F: StorageFile>(stream: &mut UnixStream, standby: &mut Standby<F>) -> io::Result<bool> {
    let mut has_left = false;
    loop {
        let output = standby.output();
        if output.is_empty() {
            return Ok(has_left);
        }
        match stream.write(output) {
            Ok(count) => output.advance(count),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
        has_left = true;
    }
}

/// Gives the last words their chance to be read.
fn farewell<F: StorageFile>(stream: &mut UnixStream, standby: &mut Standby<F>) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_write_timeout(Some(FAREWELL));
    let _ = stream.write_all(standby.output());
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn now(begun: Instant) -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = i64::try_from(wall.as_nanos()).unwrap_or(i64::MAX);
    Now { mono: begun.elapsed(), wall: PgTimestamp::from_unix_ns(wall) }
}
