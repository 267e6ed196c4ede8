//! The client's side of the control API: blocking, for command lines.

use super::{
    ANSWER_MAX_BYTES, AdoptedDisk, Answer, BookmarkState, BookmarkWish, ControlError, ModeChange,
    Request, SwitchState, SwitchWish, VerifyBegun, VerifyWish,
};
use crate::stores::StoreReport;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tidelock_daemon_core::status::{SCHEMA, Status};
use tidelock_protocol::message::Mode;

/// How long the daemon may take: it only takes a snapshot.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error(
        "no daemon answers on {path}: {source}; is tidelockd running (systemctl status tidelockd), and is this its socket (--socket)?"
    )]
    NotRunning {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The socket belongs to another user.
    #[error("{path} may not be opened by this user; run as the daemon's user (root)")]
    NotAllowed {
        /// The socket.
        path: PathBuf,
    },
    /// The connection broke.
    #[error("the daemon did not answer: {0}")]
    Broken(#[from] io::Error),
    /// The answer is none.
    #[error(
        "the daemon's answer cannot be read ({0}): tidelock and tidelockd must be of one version"
    )]
    Strange(String),
    /// The daemon says no.
    #[error(transparent)]
    Refused(ControlError),
}

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let path = path.to_owned();
        let stream = UnixStream::connect(&path).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => ClientError::NotAllowed { path },
            _ => ClientError::NotRunning { path, source },
        })?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        stream.set_write_timeout(Some(ANSWER_WITHIN))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// The status of everything.
    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.ask(&Request::Status)? {
            Answer::Status(status) if status.schema == SCHEMA => Ok(*status),
            Answer::Status(status) => Err(ClientError::Strange(format!(
                "status schema {} instead of {SCHEMA}",
                status.schema
            ))),
            other => Err(unexpected(&other)),
        }
    }

    /// The state of each store.
    pub fn stores(&mut self) -> Result<Vec<StoreReport>, ClientError> {
        match self.ask(&Request::Stores)? {
            Answer::Stores(stores) => Ok(stores),
            other => Err(unexpected(&other)),
        }
    }

    /// Switches a group's mode.
    pub fn set_mode(&mut self, group: &str, mode: Mode) -> Result<ModeChange, ClientError> {
        match self.ask(&Request::Mode { group: group.to_owned(), mode })? {
            Answer::Mode(change) => Ok(change),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins to compare the sites, or ends that.
    pub fn verify(&mut self, group: &str, wish: VerifyWish) -> Result<VerifyBegun, ClientError> {
        let VerifyWish { member, repair, stop } = wish;
        match self.ask(&Request::Verify { group: group.to_owned(), member, repair, stop })? {
            Answer::Verify(begun) => Ok(begun),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins to set a bookmark. Returns what to ask for it by.
    pub fn bookmark(&mut self, group: &str, wish: BookmarkWish) -> Result<u64, ClientError> {
        let BookmarkWish { name, expires_in_ms, moves } = wish;
        let group = group.to_owned();
        match self.ask(&Request::Bookmark { group, name, expires_in_ms, moves })? {
            Answer::Bookmarking(begun) => Ok(begun.id),
            other => Err(unexpected(&other)),
        }
    }

    /// How far one is.
    pub fn bookmarked(&mut self, group: &str, id: u64) -> Result<BookmarkState, ClientError> {
        match self.ask(&Request::Bookmarked { group: group.to_owned(), id })? {
            Answer::Bookmark(state) => Ok(state),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins a switch, or only asks whether it could be. Returns the connections of guests to their disks.
    pub fn switchover(&mut self, group: &str, wish: SwitchWish) -> Result<u64, ClientError> {
        let SwitchWish { guest_is_stopped, check_only, timeout_ms, others_ms } = wish;
        let group = group.to_owned();
        let wish =
            Request::Switchover { group, guest_is_stopped, check_only, timeout_ms, others_ms };
        match self.ask(&wish)? {
            Answer::Switching(begun) => Ok(begun.connections),
            other => Err(unexpected(&other)),
        }
    }

    /// How far it is.
    pub fn switched(&mut self, group: &str) -> Result<SwitchState, ClientError> {
        match self.ask(&Request::Switched { group: group.to_owned() })? {
            Answer::Switchover(state) => Ok(state),
            other => Err(unexpected(&other)),
        }
    }

    /// The disks that a group waits for, which are elsewhere still.
    pub fn adopt(&mut self, group: &str) -> Result<Vec<AdoptedDisk>, ClientError> {
        match self.ask(&Request::Adopt { group: group.to_owned() })? {
            Answer::Adopting(adopting) => Ok(adopting.disks),
            other => Err(unexpected(&other)),
        }
    }

    /// They are here: the group begins.
    pub fn adopted(&mut self, group: &str) -> Result<(), ClientError> {
        match self.ask(&Request::Adopted { group: group.to_owned() })? {
            Answer::Adopted {} => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Tells the backup that the gate's rules of a group will be removed. Returns whether it has that on record.
    pub fn leave_open(&mut self, group: &str) -> Result<bool, ClientError> {
        match self.ask(&Request::LeaveOpen { group: group.to_owned() })? {
            Answer::LeavesOpen { told } => Ok(told),
            other => Err(unexpected(&other)),
        }
    }

    /// Begins a clean stop.
    pub fn stop(&mut self) -> Result<(), ClientError> {
        match self.ask(&Request::Stop)? {
            Answer::Stopping {} => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, ClientError> {
        let mut line = serde_json::to_vec(request).map_err(io::Error::other)?;
        line.push(b'\n');
        self.stream.get_mut().write_all(&line)?;
        let mut answer = Vec::new();
        let mut bounded = (&mut self.stream).take(ANSWER_MAX_BYTES as u64);
        bounded.read_until(b'\n', &mut answer)?;
        if answer.last() != Some(&b'\n') {
            return Err(ClientError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_slice(&answer) {
            Ok(Answer::Error(error)) => Err(ClientError::Refused(error)),
            Ok(answer) => Ok(answer),
            Err(error) => Err(ClientError::Strange(error.to_string())),
        }
    }
}

fn unexpected(answer: &Answer) -> ClientError {
    let kind = match answer {
        Answer::Status(_) => "status",
        Answer::Stores(_) => "stores",
        Answer::Mode(_) => "mode",
        Answer::Verify(_) => "verify",
        Answer::Bookmarking(_) => "bookmarking",
        Answer::Bookmark(_) => "bookmark",
        Answer::Stopping {} => "stopping",
        Answer::Switching(_) | Answer::Switchover(_) => "switchover",
        Answer::Adopting(_) | Answer::Adopted {} => "adoption",
        Answer::LeavesOpen { .. } => "leave-open",
        Answer::Error(_) => "error",
    };
    ClientError::Strange(format!("unexpected {kind}"))
}
