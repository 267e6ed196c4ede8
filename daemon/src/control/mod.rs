//! The control API: how `tidelock` and scripts talk to a running daemon.
//!
//! A Unix socket that only the daemon's user may open (mode 0600). One JSON object a line, each
//! answered by one line, in order, as often as the client likes:
//!
//! ```text
//! → {"command":"status"}
//! ← {"status":{"schema":1,"host":"host-a",...}}
//! → {"command":"mode","group":"shop","mode":"async"}
//! ← {"mode":{"group":"shop","before":"pipelined","after":"async"}}
//! → {"command":"verify","group":"shop","member":null,"repair":false,"stop":false}
//! ← {"verify":{"members":["db"]}}
//! → {"command":"bookmark","group":"shop","name":"before-deploy"}
//! ← {"bookmarking":{"id":1795348800000000}}
//! → {"command":"bookmarked","group":"shop","id":1795348800000000}
//! ← {"bookmark":{"state":"waiting","why":"..."}}          (or "set", with its point)
//! → {"command":"switchover","group":"shop","guest_is_stopped":false,"timeout_ms":30000}
//! ← {"switching":{"connections":0}}
//! → {"command":"switched","group":"shop"}
//! ← {"switchover":{"state":"draining"}}                  (or "giving-up", "over" with what it took, "before")
//! → {"command":"adopt","group":"shop"}
//! ← {"adopting":{"disks":[{"member":"db","disk":"root","size_bytes":...,"socket":"..."}]}}
//! → {"command":"adopted","group":"shop"}
//! ← {"adopted":{}}
//! → {"command":"leave-open","group":"shop"}
//! ← {"leaves_open":{"told":false}}
//! → {"command":"stop"}
//! ← {"stopping":{}}
//! ← {"error":{"kind":"unknown-group","message":"..."}}      (to anything that fails)
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | [`server`] | the daemon's side, on tokio |
//! | [`client`] | the other side, blocking |
//!
//! Bounded: [`REQUEST_MAX_BYTES`] a request, [`CONNECTIONS_MAX`] connections, [`IDLE_MAX`] between
//! requests; beyond these the client gets an error and the connection ends.

pub mod client;
pub mod server;
#[cfg(test)]
mod tests;

use crate::stores::StoreReport;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use tidelock_daemon_core::status::Status;
use tidelock_protocol::message::Mode;

pub use client::{Client, ClientError};
pub use server::Server;
pub use tidelock_daemon_core::group::SwitchState;

/// The longest request.
pub const REQUEST_MAX_BYTES: usize = 64 << 10;
/// The longest answer: a status of many groups.
pub const ANSWER_MAX_BYTES: usize = 16 << 20;
/// The most connections at once.
pub const CONNECTIONS_MAX: usize = 32;
/// How long a connection may be silent.
pub const IDLE_MAX: Duration = Duration::from_secs(60);

/// What the daemon does when it is told to. Called on the server's thread: nothing here may wait.
pub trait ControlTarget: Send + Sync + 'static {
    /// A snapshot of now.
    fn status(&self) -> Status;
    /// The state of each store.
    fn stores(&self) -> Vec<StoreReport>;
    /// Switches a group's mode until the next start.
    fn set_mode(&self, group: &str, mode: Mode) -> Result<ModeChange, ControlError>;
    /// Begins to compare the sites, or ends that. How it goes is in the status.
    fn verify(&self, group: &str, wish: &VerifyWish) -> Result<VerifyBegun, ControlError>;
    /// Begins to set a bookmark at the backup.
    fn bookmark(&self, group: &str, wish: BookmarkWish) -> Result<Bookmarking, ControlError>;
    /// How far one is.
    fn bookmarked(&self, group: &str, id: u64) -> Result<BookmarkState, ControlError>;
    /// Begins to hand a group to the backup site, or only says whether that could be.
    fn switchover(&self, group: &str, wish: SwitchWish) -> Result<Switching, ControlError>;
    /// How far that is.
    fn switched(&self, group: &str) -> Result<SwitchState, ControlError>;
    /// The disks that a group waits for, which are elsewhere still.
    fn adopt(&self, group: &str) -> Result<Adopting, ControlError>;
    /// They are here: the group begins.
    fn adopted(&self, group: &str) -> Result<(), ControlError>;
    /// The backup is told that this host's guests will answer clients without it once the gate's rules are removed.
    /// Returns whether it has that on record for all members here; ask again until it has.
    fn leave_open(&self, group: &str) -> Result<bool, ControlError>;
    /// Begins a clean stop, as SIGTERM does.
    fn stop(&self) -> Result<(), ControlError>;
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The status of everything.
    Status,
    /// The state of each store.
    Stores,
    /// Switch a group's mode until the next start.
    Mode {
        /// The group.
        group: String,
        /// The mode.
        mode: Mode,
    },
    /// Compare the sites, or end that.
    Verify {
        /// The group.
        group: String,
        /// Of this member; absent: of all with disks on this host.
        #[serde(default)]
        member: Option<String>,
        /// Copy what differs to the backup.
        #[serde(default)]
        repair: bool,
        /// End what runs instead.
        #[serde(default)]
        stop: bool,
    },
    /// Name the point in time that has all that was written so far.
    Bookmark {
        /// The group.
        group: String,
        /// The name.
        name: String,
        /// It goes after this time.
        #[serde(default)]
        expires_in_ms: Option<u64>,
        /// A bookmark of this name is moved.
        #[serde(default)]
        moves: bool,
    },
    /// How far that is. Who does not ask for half a minute does not wait for it any more.
    Bookmarked {
        /// The group.
        group: String,
        /// What the answer to [`Request::Bookmark`] said.
        id: u64,
    },
    /// Hand the group to the backup site: take no more requests, send everything, shut the gate, give up the lease.
    Switchover {
        /// The group.
        group: String,
        /// Also while guests have their disks open.
        #[serde(default)]
        guest_is_stopped: bool,
        /// Change nothing, only say whether it could be.
        #[serde(default)]
        check_only: bool,
        /// How long the backup may take to get everything.
        #[serde(default = "switch_timeout_ms")]
        timeout_ms: u64,
        /// How long the other hosts of the group may take after that.
        #[serde(default = "switch_others_ms")]
        others_ms: u64,
    },
    /// How far that is. If nobody asks for five seconds, it is given up, as long as it can be.
    Switched {
        /// The group.
        group: String,
    },
    /// Which disks the group waits for, that are elsewhere still.
    Adopt {
        /// The group.
        group: String,
    },
    /// They are here, all of them: the group begins.
    Adopted {
        /// The group.
        group: String,
    },
    /// The gate's rules of a group are to be removed when the daemon has stopped: tell the backup.
    LeaveOpen {
        /// The group.
        group: String,
    },
    /// Stop cleanly.
    Stop,
}

fn switch_timeout_ms() -> u64 {
    30_000
}

fn switch_others_ms() -> u64 {
    300_000
}

/// Which switch is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchWish {
    /// Also while guests have their disks open.
    pub guest_is_stopped: bool,
    /// Change nothing, only say whether it could be.
    pub check_only: bool,
    /// How long the backup may take to get everything.
    pub timeout_ms: u64,
    /// How long the other hosts of the group may take after that.
    pub others_ms: u64,
}

/// A switch that was begun, or could be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switching {
    /// Connections of guests to the group's disks.
    pub connections: u64,
}

/// What a group waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adopting {
    /// Its disks, in the order of the configuration.
    pub disks: Vec<AdoptedDisk>,
}

/// A disk that is to be brought here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedDisk {
    /// Whose.
    pub member: String,
    /// Its name, also of the export.
    pub disk: String,
    /// Its size here.
    pub size_bytes: u64,
    /// Where it is served.
    pub socket: PathBuf,
}

/// Which verification is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyWish {
    /// Of this member; `None`: of all with disks on this host.
    pub member: Option<String>,
    /// Copy what differs to the backup.
    pub repair: bool,
    /// End what runs instead.
    pub stop: bool,
}

/// Which bookmark is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BookmarkWish {
    /// The name.
    pub name: String,
    /// It goes after this time.
    pub expires_in_ms: Option<u64>,
    /// A bookmark of this name is moved.
    pub moves: bool,
}

/// A bookmark that is being set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bookmarking {
    /// To ask for it.
    pub id: u64,
}

/// How far a bookmark is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum BookmarkState {
    /// The backup does not have everything yet.
    Waiting {
        /// For people.
        why: String,
    },
    /// It is on stable storage at the backup.
    Set {
        /// The time of its point, in milliseconds since the Unix epoch.
        unix_ms: u64,
        /// The same by the hybrid logical clock, as the backup's commands take it.
        hlc: String,
        /// The last seq of each writer.
        seqs: BTreeMap<String, u64>,
        /// Writers whose hosts were not connected to the backup: what they may have written meanwhile is not in it.
        without: Vec<String>,
    },
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Stores`].
    Stores(Vec<StoreReport>),
    /// To [`Request::Mode`].
    Mode(ModeChange),
    /// To [`Request::Verify`].
    Verify(VerifyBegun),
    /// To [`Request::Bookmark`].
    Bookmarking(Bookmarking),
    /// To [`Request::Bookmarked`].
    Bookmark(BookmarkState),
    /// To [`Request::Switchover`].
    Switching(Switching),
    /// To [`Request::Switched`].
    Switchover(SwitchState),
    /// To [`Request::Adopt`].
    Adopting(Adopting),
    /// To [`Request::Adopted`].
    Adopted {},
    /// To [`Request::LeaveOpen`].
    LeavesOpen {
        /// The backup has it on record.
        told: bool,
    },
    /// To [`Request::Stop`]: the stop has begun.
    Stopping {},
    /// To anything that could not be done.
    Error(ControlError),
}

/// A mode that was switched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModeChange {
    /// The group.
    pub group: String,
    /// The mode that was wanted before.
    pub before: Mode,
    /// The mode that is wanted now. When it is in force is in the status.
    pub after: Mode,
}

/// Verifications that were begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyBegun {
    /// Of these members.
    pub members: Vec<String>,
}

/// Why a request was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ControlError {
    /// For programs.
    pub kind: ControlErrorKind,
    /// For people: what is wrong and what to do.
    pub message: String,
}

impl ControlError {
    /// An error.
    pub fn new(kind: ControlErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// There is no such group.
    #[must_use]
    pub fn unknown_group(group: &str, known: &[&str]) -> Self {
        let message = format!("there is no group \"{group}\" here; there is {}", known.join(", "));
        Self::new(ControlErrorKind::UnknownGroup, message)
    }
}

/// Why a request was not done. Stable: tools may match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ControlErrorKind {
    /// No such group.
    UnknownGroup,
    /// Not in the state that the daemon or the group is in.
    Refused,
    /// The request is not one.
    Malformed,
    /// Too many connections.
    Busy,
}
