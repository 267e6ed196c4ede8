//! The steps of a recovered machine's life. The server takes them, keeps the machine on record and watches it; a target
//! carries them out and keeps nothing in memory that a restart of the server would lose.
//!
//! ```text
//!            prepare         start          resume
//!  (nothing) ──────► Prepared ─────► Halted ──────► Running ──► Ended
//!                       └──────────────┴── stop ───────┴──────────▲
//! ```
//!
//! The server puts a machine on record after `prepare`, and again after `start`: a server that is killed at any instruction
//! finds everything that it has started.

use crate::ExportedDisk;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::path::PathBuf;
use std::pin::Pin;
use tidelock_protocol::machine::Machine;

/// An answer that takes its time.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A place where recovered machines run. Errors are for the operator.
pub trait Target: Debug + Send + Sync {
    /// Name of the target in records of machines.
    fn name(&self) -> &'static str;

    /// Finds out whether these machines could run here. Nothing is left of it, and no machine's disk is touched.
    fn check<'a>(&'a self, plan: &'a Plan) -> Later<'a, Checked>;

    /// Makes what one machine of the plan needs besides its disks. Nothing of the guest exists yet.
    fn prepare<'a>(
        &'a self,
        plan: &'a Plan,
        guest: &'a Guest,
    ) -> Later<'a, Result<Prepared, String>>;

    /// Starts a prepared machine with its processors halted. The machine is changed as the target finds it again.
    fn start<'a>(&'a self, machine: &'a mut Prepared) -> Later<'a, Result<(), String>>;

    /// Lets the processors run.
    fn resume<'a>(&'a self, machine: &'a Prepared) -> Later<'a, Result<(), String>>;

    /// State of a machine that this run of the server, or an earlier one, has prepared.
    fn status<'a>(&'a self, machine: &'a Prepared) -> Later<'a, Status>;

    /// Asks the guest to shut down, or ends the machine at once.
    fn stop<'a>(&'a self, machine: &'a Prepared, how: Stop) -> Later<'a, Result<(), String>>;

    /// Waits for the end of the machine, then removes what `prepare` made. Returns how it ended, if that is known.
    fn ended<'a>(&'a self, machine: &'a Prepared) -> Later<'a, Option<String>>;
}

/// The user that opens the sockets of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUser {
    /// Number of the user.
    pub uid: u32,
    /// Number of the user's group.
    pub gid: u32,
}

/// Machines of one group that are to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Name of the group.
    pub group: String,
    /// Names of all members that a recovery brings back; some may have no machine.
    pub members: Vec<String>,
    /// The machines.
    pub guests: Vec<Guest>,
    /// The operator's settings.
    pub settings: Settings,
    /// Directory of the sockets of disks, consoles and monitors.
    pub dir: PathBuf,
}

/// A machine that is to run.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Name of the member.
    pub member: String,
    /// Description of the machine.
    pub machine: Machine,
    /// The protected disks, each with its name without the member's.
    pub disks: Vec<(String, ExportedDisk)>,
}

/// An operator's settings for the machines of one recovery. A target names those that it cannot follow in its check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Connections of networks, as `[MEMBER.]NAME=HOW`.
    pub networks: Vec<String>,
    /// Accelerator of the emulator.
    pub accelerator: Option<String>,
    /// Memory size in place of the described one.
    pub memory_mib: Option<u64>,
    /// Program of the emulator.
    pub qemu: Option<PathBuf>,
    /// More arguments for the emulator.
    pub arguments: Vec<String>,
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Every reason why a machine cannot run here; none, if all can.
    pub problems: Vec<String>,
    /// Remarks for the operator.
    pub notes: Vec<String>,
    /// Commands by which the machines would be started.
    pub commands: Vec<String>,
}

/// A machine as its target finds it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepared {
    /// Name of the target.
    pub target: String,
    /// The place where the machine runs, for the operator: "QEMU's process 4711".
    pub place: String,
    /// The command by which it is started, for the operator.
    pub command: String,
    /// Socket of its serial console.
    pub console: Option<PathBuf>,
    /// The user that opens the sockets of its disks, unless that is the server's own.
    pub disk_user: Option<DiskUser>,
    /// Remarks of the last step, for the operator.
    #[serde(skip)]
    pub notes: Vec<String>,
    /// Read by the target alone.
    pub handle: serde_json::Value,
}

/// State of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Never started.
    Prepared,
    /// Its processors have not run yet.
    Halted,
    /// Running, or paused by an operator.
    Running,
    /// Ended.
    Ended,
}

/// Ways to stop a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The guest is asked to shut down, and may take its time. Returns when it was asked.
    Shutdown,
    /// The machine ends at once, like a power failure. Returns when the machine has ended.
    Now,
}
