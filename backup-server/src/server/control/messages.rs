//! Requests and replies on the socket of the command line: one JSON object a line, one request for each connection.
//!
//! | request | replies |
//! |---|---|
//! | `{"do": "status"}` | `{"is": "status", "server": ..., "groups": [...]}` |
//! | `{"do": "recover", "group": G, "primary_is_dead": false, "at": AT, "accept_damage": false, "drop_later_pins": false}` (the last three may be left out) | `{"is": "waiting", "remaining_ms": n}`, again when the deadline moves, or `{"is": "noroom", "reason": "..."}` ..., then `{"is": "recovered", ...}`; an order whose connection is closed is forgotten |
//! | `{"do": "damaged", "group": G}`, with `"check": true` or `"forget": SEGMENT` | `{"is": "damaged", "segments": [...], "latest": [...]}` |
//! | `{"do": "repair", "group": G, "apply": false}` | `{"is": "repaired", "repair": {...}}` |
//! | `{"do": "describe", "group": G}` | `{"is": "described", "machines": [...]}` |
//! | `{"do": "approve", "group": G, "member": M, "machine": ...}` | `{"is": "approved"}` |
//! | `{"do": "boot", "group": G, "ask": {...}, "rehearse": true}` | `{"is": "booted", ...}`; a machine that is no rehearsal runs when the next line is sent or the connection is closed, and then `{"is": "resumed"}` |
//! | `{"do": "machines"}` | `{"is": "machines", "machines": [...]}` |
//! | `{"do": "stopmachines", "group": G, "member": M, "now": false, "within_ms": n}` | `{"is": "machines", "machines": [...]}`: those that still run |
//! | `{"do": "adopt", "group": G}` | `{"is": "adopted"}`: a group that was made beside the server is opened |
//! | `{"do": "movemember", "group": G, "member": M, "to": HOST}` | `{"is": "waiting", ...}` ..., then `{"is": "moved", "moved": {...}}` |
//! | `{"do": "remove", "group": G, "member": M}` | `{"is": "removed"}` |
//! | `{"do": "view", "group": G, "at": "latest", "wanted": {...}, "detach": false}` | `{"is": "view", "view": {...}}`; the view goes when the connection is closed, unless detached |
//! | `recover` of a store | `{"is": "promoting", "store": {...}}` ..., then `{"is": "recoveredstore", "store": {...}}` |
//! | `view` of a store | `{"is": "storeview", "view": {...}}` |
//! | `{"do": "views"}`, `{"do": "closeview", "name": N}` | `{"is": "views", "views": [...], "of_stores": [...]}`, `{"is": "closed"}` |
//! | `{"do": "rollview", "name": N, "to": AT, "discard_writes": false}` | `{"is": "rolled", "view": {...}, ...}` |
//! | `{"do": "resolve", "group": G, "at": AT}` | `{"is": "point", "at": {...}}` |
//! | `{"do": "timeline", ...}`, `{"do": "diff", ...}`, `{"do": "records", ...}` | `{"is": "timeline", ...}`, `{"is": "diff", ...}`, `{"is": "records", ...}` |
//! | `{"do": "increment", ...}`, `{"do": "content", ...}` | `{"is": "increment", "description": {...}}`, then the file's bytes |
//! | `{"do": "digest", ...}` | `{"is": "digest", "digest": ...}` |
//! | `{"do": "snapshot", "ask": {"what": "make", ...}}`, also `list`, `remove`, `verify` | `{"is": "snapping", "snapshots": [...]}` ..., `{"is": "snapshots", ...}`; `{"is": "snapshotremoved"}`, `{"is": "snapshotverified", "disks": [...]}` |
//! | `{"do": "marks", "group": G}`, `{"do": "mark", ...}`, `{"do": "unmark", ...}` | `{"is": "marks", ...}`, `{"is": "marked", ...}`, `{"is": "unmarked"}` |
//!
//! Any of them may be answered by `{"is": "error", "reason": ...}`.

use crate::server::inbox::RepairStatus;
use crate::server::machines::{BootAsk, Booted, DescribedMachine, MachineStatus};
use crate::server::snapshots::{self, SnapshotStatus, VerifiedDisk};
use crate::server::stores::views::StoreViewStatus;
use crate::server::travel::{DamagedSpan, DiskDiff, MarkStatus, RecordStatus, Span};
use crate::server::views::{ViewStatus, Wanted};
use serde::{Deserialize, Serialize};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::machine::Machine;
use tidelock_replica::group::{
    CompressedStatus, DamagedDisk, DamagedSegment, GroupStatus, HostStatus, Moved, Recovery,
};
use tidelock_replica::travel::increment::Description;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;
use tidelock_shard_logs::StoreStatus;
use tidelock_store::journal::MarkKind;
use tidelock_targets::ExportedDisk;

/// What is asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// All groups and stores.
    Status,
    /// Recover a group.
    Recover {
        /// Which.
        group: String,
        /// Do not wait for the grace.
        primary_is_dead: bool,
        /// The operator has been told that a host is connected.
        #[serde(default)]
        although_connected: bool,
        /// Only say what would be recovered.
        #[serde(default)]
        dry_run: bool,
        /// To this point; everything that can be, if it is not there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at: Option<When>,
        /// Also if some of it cannot be read.
        #[serde(default)]
        accept_damage: bool,
        /// Also if pins are of later points.
        #[serde(default)]
        drop_later_pins: bool,
    },
    /// The damaged segments of the journal.
    Damaged {
        /// The group's name.
        group: String,
        /// Look at them again.
        #[serde(default)]
        check: bool,
        /// Give this one up.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        forget: Option<u64>,
    },
    /// Cut a journal that cannot be opened.
    Repair {
        /// The group's name.
        group: String,
        /// Not only find out where, and what it costs.
        #[serde(default)]
        apply: bool,
    },
    /// Machine descriptions of a group's members, and which of them an operator has approved.
    Describe {
        /// In which group.
        group: String,
    },
    /// An operator approves a description.
    Approve {
        /// In which group.
        group: String,
        /// The member's name.
        member: String,
        /// The description that the operator has seen.
        machine: Machine,
    },
    /// Start a group's machines.
    Boot {
        /// The group's name.
        group: String,
        /// The security of the link.
        ask: BootAsk,
        /// Only find out whether it would work; nothing changes.
        rehearse: bool,
    },
    /// The machines that run.
    Machines,
    /// Stop a group's machines.
    StopMachines {
        /// The group's name.
        group: String,
        /// Which member's; all, if `None`.
        member: Option<String>,
        /// As if the power failed.
        now: bool,
        /// How long guests have to shut down.
        within_ms: u64,
    },
    /// Open a group that was made in the data directory (`tidelock-backup seed`).
    Adopt {
        /// Which.
        group: String,
    },
    /// Give a member to a host.
    MoveMember {
        /// In which group.
        group: String,
        /// Which.
        member: String,
        /// The host.
        to: String,
    },
    /// Remove a member from a group.
    Remove {
        /// From which.
        group: String,
        /// Which.
        member: String,
    },
    /// Remove a whole group.
    RemoveGroup {
        /// Which.
        group: String,
        /// Not only tell what would go.
        apply: bool,
    },
    /// Opens a view.
    View {
        /// The group's name.
        group: String,
        /// At which point.
        #[serde(default = "latest")]
        at: When,
        /// The security of the link.
        #[serde(default)]
        wanted: Wanted,
        /// It stays when the connection is closed.
        #[serde(default)]
        detach: bool,
    },
    /// The views that are open.
    Views,
    /// Closes a view.
    CloseView {
        /// Which.
        name: String,
    },
    /// Moves a view to another point.
    RollView {
        /// Which.
        name: String,
        /// To here.
        to: When,
        /// What was written to it goes.
        #[serde(default)]
        discard_writes: bool,
    },
    /// Snapshots.
    Snapshot {
        /// What of them.
        ask: snapshots::Ask,
    },
    /// Which point is meant.
    Resolve {
        /// The group's name.
        group: String,
        /// By what.
        at: When,
    },
    /// What was written when.
    Timeline {
        /// In which group.
        group: String,
        /// From here.
        from: When,
        /// To here.
        to: When,
        /// In so many spans.
        buckets: usize,
    },
    /// The records that one point has and an earlier one has not.
    Records {
        /// The group's name.
        group: String,
        /// The earlier.
        from: When,
        /// The later.
        to: When,
        /// So many at most.
        max: usize,
    },
    /// What is different between two points.
    Diff {
        /// In which group.
        group: String,
        /// The first.
        from: When,
        /// The second.
        to: When,
        /// Of this disk only.
        disk: Option<String>,
        /// Each extent.
        ranges: bool,
    },
    /// The same with its content.
    Increment {
        /// In which group.
        group: String,
        /// The first.
        from: When,
        /// The second.
        to: When,
        /// The disk, as `MEMBER.DISK`.
        disk: String,
    },
    /// All of a disk, as an increment.
    Content {
        /// The group's name.
        group: String,
        /// At which point.
        at: When,
        /// Which.
        disk: String,
        /// From here on.
        offset: u64,
    },
    /// The digest of a disk.
    Digest {
        /// The group's name.
        group: String,
        /// At which point.
        at: When,
        /// Which.
        disk: String,
    },
    /// The bookmarks and pins.
    Marks {
        /// The group's name.
        group: String,
    },
    /// Sets a bookmark or pin.
    Mark {
        /// In which group.
        group: String,
        /// Its name.
        name: String,
        /// What it is.
        kind: MarkKind,
        /// What it names.
        at: When,
        /// When it goes by itself.
        expires_in_ms: Option<u64>,
        /// One of this name may be there, and is moved.
        moves: bool,
    },
    /// Takes a bookmark or pin out.
    Unmark {
        /// In which group.
        group: String,
        /// Its name.
        name: String,
        /// What it is.
        kind: MarkKind,
    },
}

fn latest() -> When {
    When::Latest
}

/// An answer.
#[allow(clippy::large_enum_variant)] // One at a time, and not for long.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
pub enum Reply {
    /// All groups.
    Status {
        /// The server's name.
        server: String,
        /// The groups.
        groups: Vec<GroupStatus>,
        /// The stores.
        stores: Vec<StoreStatus>,
        /// Reasons why stores do not work.
        broken_stores: Vec<String>,
    },
    /// All logs of a store are closed: nothing of the primary is taken any more.
    RecoveredStore {
        /// The store at its final cut.
        store: StoreStatus,
    },
    /// A store's standbys come to the final cut, and are promoted.
    Promoting {
        /// The store now.
        store: StoreStatus,
    },
    /// The recovery waits for the grace.
    Waiting {
        /// For so long.
        remaining_ms: u64,
        /// Members that have not given up their leases, with their hosts, if others have.
        #[serde(default)]
        kept_by: Vec<String>,
    },
    /// The primary is said to be dead, and is connected.
    Connected {
        /// Hosts that are connected and were heard within the grace.
        hosts: Vec<HostStatus>,
    },
    /// The outcome of a recovery that was not made. Nothing was changed.
    WouldRecover {
        /// The group as it is.
        group: GroupStatus,
        /// When the newest record that would be taken was written, by the primary's clock.
        last_write_unix_ms: Option<u64>,
    },
    /// A recovery waits for room at the backup.
    NoRoom {
        /// For people.
        reason: String,
    },
    /// The group is recovered.
    Recovered {
        /// What was recovered.
        recovery: Recovery,
        /// Its disks.
        disks: Vec<ExportedDisk>,
    },
    /// The damaged segments.
    Damaged {
        /// Oldest first.
        segments: Vec<DamagedSegment>,
        /// What cannot be read of the latest state.
        latest: Vec<DamagedDisk>,
    },
    /// Where the journal is cut.
    Repaired {
        /// And what it costs.
        repair: RepairStatus,
    },
    /// The group is open.
    Adopted,
    /// The member belongs to the host.
    Moved {
        /// What has changed.
        moved: Moved,
    },
    /// The member is removed.
    Removed,
    /// The group is removed, or would be.
    GroupRemoved {
        /// What it was.
        status: Box<GroupStatus>,
        /// It is gone.
        is_done: bool,
    },
    /// Machine descriptions of a group's members.
    Described {
        /// Those that a recovery brings back.
        machines: Vec<DescribedMachine>,
    },
    /// The description is approved.
    Approved,
    /// The machines are started, or would be.
    Booted {
        /// The security of the link.
        booted: Booted,
    },
    /// The machines run.
    Resumed,
    /// Machines that run.
    Machines {
        /// By group and member.
        machines: Vec<MachineStatus>,
    },
    /// A view.
    View {
        /// What it is.
        view: ViewStatus,
    },
    /// The views that are open.
    Views {
        /// By name.
        views: Vec<ViewStatus>,
        /// Those of stores.
        of_stores: Vec<StoreViewStatus>,
    },
    /// A view of a store.
    StoreView {
        /// Its servers.
        view: StoreViewStatus,
    },
    /// The view is closed.
    Closed,
    /// The view is at another point.
    Rolled {
        /// As it is now.
        view: ViewStatus,
        /// Where it was.
        from: Moment,
        /// What is different, by disk; `None`: that cannot be told.
        changed: Option<Vec<DiskDiff>>,
        /// What was written to it and is gone.
        discarded_bytes: u64,
    },
    /// Snapshots that are being made or moved.
    Snapping {
        /// As they are now.
        snapshots: Vec<SnapshotStatus>,
    },
    /// Snapshots.
    Snapshots {
        /// By name.
        snapshots: Vec<SnapshotStatus>,
        /// For people.
        notes: Vec<String>,
    },
    /// The snapshot is removed.
    SnapshotRemoved,
    /// The snapshot was read.
    SnapshotVerified {
        /// Its disks.
        disks: Vec<VerifiedDisk>,
    },
    /// A point.
    Point {
        /// Which.
        at: Moment,
    },
    /// The point may still change: later ones than this can not be asked for yet.
    Incomplete {
        /// Up to here.
        complete: Hlc,
        /// For people.
        reason: String,
    },
    /// Records, in the journal's order.
    Records {
        /// So many as were asked for at most.
        records: Vec<RecordStatus>,
    },
    /// What was written when.
    Timeline {
        /// The oldest point that can be seen.
        oldest: Moment,
        /// The newest.
        newest: Moment,
        /// What is told begins here.
        from: Moment,
        /// And ends here.
        to: Moment,
        /// In order.
        spans: Vec<Span>,
        /// What of the journal is compressed.
        #[serde(default)]
        compressed: CompressedStatus,
        /// Points that damage affects.
        #[serde(default)]
        damaged: Vec<DamagedSpan>,
        /// Bookmarks and pins, by name.
        marks: Vec<MarkStatus>,
    },
    /// What is different.
    Diff {
        /// The first point.
        from: Moment,
        /// The second.
        to: Moment,
        /// By disk.
        disks: Vec<DiskDiff>,
    },
    /// The file follows.
    Increment {
        /// What it is of.
        description: Description,
    },
    /// A disk's digest.
    Digest {
        /// As [`tidelock_replica::travel::digest`] has it.
        digest: String,
    },
    /// Bookmarks and pins.
    Marks {
        /// By name.
        marks: Vec<MarkStatus>,
    },
    /// A bookmark or pin is set.
    Marked {
        /// As it is now.
        mark: MarkStatus,
    },
    /// A bookmark or pin is taken out.
    Unmarked,
    /// It cannot be done.
    Error {
        /// Why, and what to do.
        reason: String,
    },
}
