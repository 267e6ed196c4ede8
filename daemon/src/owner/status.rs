//! What an owner loop tells of itself.

use crate::copy_job;
use crate::link::Refusal;
use crate::sequencer::Lag;
use std::path::PathBuf;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::Mode;

/// Where a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not attached since the daemon started, and nothing is known to go on from: writes wait.
    WaitingForBackup,
    /// The initial copy runs: nothing could be recovered.
    Initialising,
    /// The sites are being compared after an unclean stop: recovery would go back to before it,
    /// and no packet leaves.
    Resyncing,
    /// The local disk failed writes: the sites may differ there.
    DiskFailing,
    /// Everything is in order but the link is down: writes gather in the backlog.
    Disconnected,
    /// Every write reaches the backup.
    Replicating,
    /// The backup refuses the member.
    Refused,
    /// The group was recovered, or a newer run has taken over: for good.
    Fenced,
}

/// A disk.
#[derive(Clone, Debug)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// The local file.
    pub path: PathBuf,
    /// Its size.
    pub size_bytes: u64,
    /// Whether I/O is direct.
    pub direct: bool,
    /// The same in words, with the reason if not.
    pub io_mode: String,
    /// Why its flushes fail, if they do.
    pub failure: Option<String>,
}

/// An owner loop, at one moment.
#[derive(Clone, Debug)]
pub struct OwnerStatus {
    /// Where the member stands.
    pub phase: Phase,
    /// The mode in force.
    pub mode: Mode,
    /// P\[self\].
    pub published: Seq,
    /// The last seq given out.
    pub last_seq: Seq,
    /// The last seq that the backup has.
    pub durable: Seq,
    /// How far the backup is behind.
    pub lag: Lag,
    /// Requests that wait for an overlap, for room or for the start.
    pub waiting: usize,
    /// Whether they wait because the backlog is full.
    pub backlog_full: bool,
    /// The initial copy or resync that runs.
    pub copy: Option<copy_job::Progress>,
    /// Bytes in which the sites may differ after errors of the local disk.
    pub suspect_bytes: u64,
    /// Open NBD connections.
    pub connections: usize,
    /// The disks.
    pub disks: Vec<DiskStatus>,
    /// Why the backup refuses, if it does.
    pub refusal: Option<Refusal>,
}
