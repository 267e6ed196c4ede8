//! A process that is found again, also by a later run of the server, and never taken for a later process of the same
//! number.
//!
//! A process is held by a file descriptor of it (pidfd), which stays with the process. The descriptor is opened by the
//! number on record, and then the process proves that it is the one on record: it started at the time on record, or it
//! is the one that listens on its socket (QEMU's monitor, PostgreSQL's clients' socket). The second proof is for servers that do not see the process in
//! `/proc`: systemd's `ProtectProc=invisible` with `PrivateUsers=yes` hides processes that an earlier run has started.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::sleep;

/// Pause between looks at a process that the kernel does not report.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// A process on record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    start: Option<Start>,
}

/// Start of a process, which no later process of the same number has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Start {
    boot: String,
    ticks: u64,
}

/// A process that is held.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) pid: u32,
    fd: OwnedFd,
}

impl Process {
    /// A child of this process that was not waited for.
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, start: Start::of(pid).ok() }
    }

    /// True while the process has a number: also after its end, until its parent has taken note.
    pub(crate) fn has_number(&self) -> bool {
        self.start.is_some() && Start::of(self.pid).ok() == self.start
    }

    /// Holds the process, unless it has ended. An error: it cannot be told.
    pub(crate) async fn hold(&self, socket: &Path) -> io::Result<Option<Held>> {
        let Some(held) = Held::open(self.pid)? else { return Ok(None) };
        if self.start.is_some() && Start::of(self.pid).ok() == self.start {
            return Ok(Some(held));
        }
        Ok(listener(socket).await?.filter(|other| other.pid == self.pid))
    }
}

impl Start {
    /// Reads the start of a running process from `/proc`.
    fn of(pid: u32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let mut fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
        let ticks = fields.nth(19).and_then(|ticks| ticks.parse().ok());
        let ticks = ticks.ok_or(io::ErrorKind::InvalidData)?;
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
        Ok(Self { boot, ticks })
    }
}

/// Holds the process that listens on a socket. `None`: nobody does.
pub(crate) async fn listener(socket: &Path) -> io::Result<Option<Held>> {
    let stream = match UnixStream::connect(socket).await {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let pid = stream.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok());
    let Some(pid) = pid else { return Ok(None) };
    let held = Held::open(pid)?;
    // The kernel ends the connection with the listener: while it stands, the number is still the listener's.
    let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default()))?;
    let is_gone = fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR);
    Ok(held.filter(|_| !is_gone))
}

impl Held {
    fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        match pidfd_open(number, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Self { pid, fd })),
            Err(Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// True if the process has ended, waited for or not.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Waits for the end of the process, and reaps it if it is a child of this one. Returns how it ended, if it is.
    pub(crate) async fn ended(&self) -> Option<String> {
        let (tell, told) = oneshot::channel();
        if let Ok(fd) = self.fd.try_clone() {
            // Not a thread of the runtime, which would wait for it when the server stops.
            let waits = move || {
                let _ = poll(&mut [PollFd::new(&fd, PollFlags::IN)], None);
                let _ = tell.send(());
            };
            let _ = std::thread::Builder::new().name(format!("pid-{}", self.pid)).spawn(waits);
        }
        let _ = told.await;
        // There may be no room for another thread, or its wait was interrupted.
        while !self.has_ended() {
            sleep(LOOKS_EACH).await;
        }
        let waited =
            waitid(WaitId::PidFd(self.fd.as_fd()), WaitIdOptions::EXITED).ok().flatten()?;
        match (waited.exit_status(), waited.terminating_signal()) {
            (Some(status), _) => Some(format!("exit status {status}")),
            (None, Some(signal)) => Some(format!("signal {signal}")),
            (None, None) => None,
        }
    }

    /// Ends the process at once.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Sends a signal, unless the process has ended.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, signal) {
            Err(Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }
}
