//! What the daemon says of itself: one snapshot for `tidelock status`, the live view, the control
//! API and the metrics.
//!
//! Invariant (DESIGN rule 6): nothing here is remembered as "in sync". Each snapshot is made from
//! what is durable at the backup, what the link and the gate do now, and [`assess`] turns these
//! facts into a [`Risk`]. Ages are in milliseconds before the snapshot, so that no clock of another
//! machine is needed to read them.
//!
//! The JSON form is stable: fields are added, never changed or removed, while [`SCHEMA`] stays.
//!
//! | module | whose status |
//! |---|---|
//! | this | the daemon's |
//! | `link` | the connection's to the backup |
//! | `group`, [`risk`](assess) | a group's, and what a disaster now would undo |
//! | `detail` | the same in sentences |
//! | `member`, `gate` | a member's, and its network cards' |
//! | `writer`, `disks`, `activity`, `verify`, `heartbeat` | its disks' |
//!
//! Plain data say what a group, a member, a writer and a gate are at an instant (`GroupSeen` and so on), beside what the
//! group's loop sees by itself ([`Surroundings`](crate::group::Surroundings)).
//! [`GroupLoop::status`](crate::group::GroupLoop::status) makes the status of both.

mod activity;
mod detail;
mod disks;
mod gate;
pub(crate) mod group;
mod heartbeat;
mod link;
mod member;
mod risk;
mod verify;
mod writer;

pub use activity::{ActivityCompares, ActivityStatus};
pub use disks::{
    BacklogOnDiskStatus, BacklogStatus, CopyKindStatus, CopyStatus, DiskHangStatus, DiskStatus,
    GuestIo, LagStatus,
};
pub use gate::{GateSeen, GateStatus, UnheldHistory};
pub use group::{ElsewhereStatus, GroupSeen, GroupStatus, GroupTerms, LeaseStatus};
pub use heartbeat::{HeartbeatStatus, MissingStatus};
pub use link::{LinkHistory, LinkState, LinkStatus, LinkTerms};
pub use member::{MemberSeen, MemberStatus, Role, TaggingStatus};
pub use risk::{Facts, Kind, Risk, Told, Undoes, Why, WriterFacts, assess};
pub use verify::VerifyStatus;
pub use writer::{WriterSeen, WriterStatus};

use serde::{Deserialize, Serialize};

/// The version of the JSON form.
pub const SCHEMA: u16 = 1;

/// The whole daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`SCHEMA`].
    pub schema: u16,
    /// The host's name.
    pub host: String,
    /// Software and version.
    pub software: String,
    /// How long the daemon has been running.
    pub uptime_ms: u64,
    /// This host is itself a virtual machine: what a pause of it is noticed by, and what cannot be excluded.
    #[serde(default)]
    pub virtual_machine: Option<String>,
    /// The connection to the backup.
    pub link: LinkStatus,
    /// All groups, in the order of the configuration.
    pub groups: Vec<GroupStatus>,
}

impl Status {
    /// Whether an operator can sleep.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        self.groups.iter().all(GroupStatus::is_fine)
    }
}

fn ms(ns: u64) -> u64 {
    ns / 1_000_000
}
