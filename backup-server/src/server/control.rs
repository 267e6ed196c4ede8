//! The socket of the command line: one JSON object a line, one request for each connection.
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

use super::content;
use super::exports::Exports;
use super::inbox::{DamagedAsk, Event, Inbox, RepairStatus};
use super::machines::{BootAsk, Booted, DescribedMachine, MachineStatus, Machines};
use super::orders::order;
use super::owner::OwnerHandle;
use super::recovering::{RecoverHow, recover, recover_store};
use super::registry::Registry;
use super::snapshots::{self, SnapshotStatus, Snapshots, VerifiedDisk};
use super::stores::views::StoreViewStatus;
use super::travel::{self, DamagedSpan, DiskDiff, MarkStatus, RecordStatus, Span, WantedMark};
use super::views::{ViewStatus, Views, Wanted};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::machine::Machine;
use tidelock_replica::group::{
    CompressedStatus, DamagedDisk, DamagedSegment, GroupStatus, HostStatus, Moved, Recovery,
};
use tidelock_replica::group_loop::{Answer, Order};
use tidelock_replica::travel::increment::Description;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::when::When;
use tidelock_shard_logs::StoreStatus;
use tidelock_store::journal::MarkKind;
use tidelock_targets::ExportedDisk;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The longest request.
const REQUEST_MAX_BYTES: u64 = 1 << 20;
/// The pause before a fold that runs is looked at again.
const FOLD_WAIT: Duration = Duration::from_millis(200);
/// Whoever wants the console of a machine from its first line on is connected to it by then.
const CONSOLES_WITHIN: Duration = Duration::from_secs(10);
/// Time between two words on a recovery that goes on.
const PROGRESS_EACH: Duration = Duration::from_secs(1);
/// So often a fold is waited for.
const FOLD_WAITS: usize = 300;
/// A group's owner that does not answer for so long is stuck in its disk.
const ANSWER_MAX: Duration = Duration::from_secs(10);

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

/// Serves the socket.
pub async fn run(
    listener: UnixListener,
    registry: Arc<Registry>,
    exports: Arc<Exports>,
    views: Arc<Views>,
    snapshots: Arc<Snapshots>,
    machines: Arc<Machines>,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (registry, exports) = (Arc::clone(&registry), Arc::clone(&exports));
        let (views, snapshots) = (Arc::clone(&views), Arc::clone(&snapshots));
        let machines = Arc::clone(&machines);
        tokio::spawn(async move {
            // The command line is gone: nobody to tell.
            let _ = serve(stream, &registry, &exports, &views, &snapshots, &machines).await;
        });
    }
}

async fn serve(
    stream: UnixStream,
    registry: &Arc<Registry>,
    exports: &Exports,
    views: &Arc<Views>,
    snapshots: &Arc<Snapshots>,
    machines: &Arc<Machines>,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    let mut reader = BufReader::new(reader.take(REQUEST_MAX_BYTES));
    reader.read_line(&mut line).await?;
    let request = match serde_json::from_str(&line) {
        Ok(request) => request,
        Err(error) => {
            return reply(&mut writer, &Reply::Error { reason: error.to_string() }).await;
        }
    };
    let answer = match request {
        Request::Status => status(registry).await,
        Request::Recover {
            group,
            primary_is_dead,
            although_connected,
            dry_run,
            at,
            accept_damage,
            drop_later_pins,
        } => {
            let how = RecoverHow {
                primary_is_dead,
                although_connected,
                dry_run,
                accept_damage,
                drop_later_pins,
            };
            if registry.stores().has(&group) {
                let mut recovered = std::pin::pin!(recover_store(registry, &group, &how, at));
                loop {
                    let told = tokio::select! {
                        told = &mut recovered => return reply(&mut writer, &told).await,
                        () = sleep(PROGRESS_EACH) => registry.stores().status(&group).await,
                    };
                    if let Ok(Some(store)) = told {
                        // The recovery goes on if nobody listens any more.
                        let _ = reply(&mut writer, &Reply::Promoting { store }).await;
                    }
                }
            }
            recover(registry, exports, &group, how, at, &mut reader, &mut writer).await?
        }
        Request::Damaged { group, check, forget } => {
            let ask = match (forget, check) {
                (Some(segment), _) => DamagedAsk::Forget(segment),
                (None, true) => DamagedAsk::Check,
                (None, false) => DamagedAsk::Tell,
            };
            damaged(registry, &group, ask).await
        }
        Request::Repair { group, apply } => {
            match ask(registry, &group, |done| Event::Repair { apply, done }).await {
                Ok(Ok(repair)) => Reply::Repaired { repair },
                Ok(Err(reason)) | Err(reason) => Reply::Error { reason },
            }
        }
        Request::Adopt { group } => adopt(registry, &group).await,
        Request::MoveMember { group, member, to } => {
            let moved = Order::Move { member, to };
            match order(registry, &group, moved, &mut reader, &mut writer).await? {
                Ok(Answer::Moved(Ok(moved))) => Reply::Moved { moved },
                Ok(Answer::Moved(Err(error))) => Reply::Error { reason: error.to_string() },
                Ok(_) => unreachable!("a move was ordered"),
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::Remove { group, member } => {
            let removal = Order::Remove { member };
            match order(registry, &group, removal, &mut reader, &mut writer).await? {
                Ok(Answer::Removed(Ok(()))) => Reply::Removed,
                Ok(Answer::Removed(Err(error))) => Reply::Error { reason: error.to_string() },
                Ok(_) => unreachable!("a removal was ordered"),
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::RemoveGroup { group, apply } => {
            let removed = remove_group(registry, views, snapshots, &group, apply).await;
            removed.unwrap_or_else(|reason| Reply::Error { reason })
        }
        Request::Describe { group } => match machines.described(&group).await {
            Ok(machines) => Reply::Described { machines },
            Err(reason) => Reply::Error { reason },
        },
        Request::Approve { group, member, machine } => {
            let approval = Order::Approve { member, machine };
            match order(registry, &group, approval, &mut reader, &mut writer).await? {
                Ok(Answer::Approved(Ok(()))) => Reply::Approved,
                Ok(Answer::Approved(Err(error))) => Reply::Error { reason: error.to_string() },
                Ok(_) => unreachable!("an approval was ordered"),
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::Boot { group, ask, rehearse: true } => match machines.rehearse(&group, &ask).await
        {
            Ok(booted) => Reply::Booted { booted },
            Err(reason) => Reply::Error { reason },
        },
        Request::Boot { group, ask, rehearse: false } => match machines.boot(&group, &ask).await {
            Ok(booted) => {
                let started = booted.machines.clone();
                // Whatever becomes of the command line: machines that were started are to run.
                if reply(&mut writer, &Reply::Booted { booted }).await.is_ok() {
                    let _ = timeout(CONSOLES_WITHIN, reader.read_line(&mut line)).await;
                }
                match machines.resume(&started).await {
                    Ok(()) => Reply::Resumed,
                    Err(reason) => Reply::Error { reason },
                }
            }
            Err(reason) => Reply::Error { reason },
        },
        Request::Machines => Reply::Machines { machines: machines.running(None) },
        Request::StopMachines { group, member, now, within_ms } => {
            let within = Duration::from_millis(within_ms);
            match machines.stop(&group, member.as_deref(), now, within).await {
                Ok(machines) => Reply::Machines { machines },
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::View { group, at, wanted, detach } if registry.stores().has(&group) => {
            let opened = match wanted {
                Wanted { write: true, .. } => Err("a view of a store is read-only".to_owned()),
                Wanted { name, .. } => {
                    registry.stores().open_view(&group, &at, name.as_deref()).await
                }
            };
            match opened {
                Ok(view) if detach => Reply::StoreView { view },
                Ok(view) => {
                    let name = view.name.clone();
                    let told = reply(&mut writer, &Reply::StoreView { view }).await;
                    // Until the other side closes.
                    let _ = reader.read_line(&mut line).await;
                    registry.stores().views().close(&name).await;
                    return told;
                }
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::View { group, at, wanted, detach } => {
            match travel::open_view(registry, views, &group, at, wanted).await {
                Ok((view, attended)) if detach => match views.detach(attended) {
                    Some(view) => Reply::View { view },
                    None => Reply::Error { reason: format!("view {} was closed", view.name) },
                },
                Ok((view, _attended)) => {
                    reply(&mut writer, &Reply::View { view }).await?;
                    // Until the other side closes.
                    let _ = reader.read_line(&mut line).await;
                    return Ok(());
                }
                Err(reason) => Reply::Error { reason },
            }
        }
        Request::Views => {
            Reply::Views { views: views.all(), of_stores: registry.stores().views().all() }
        }
        Request::CloseView { name } if registry.stores().views().close(&name).await => {
            Reply::Closed
        }
        Request::CloseView { name } => match views.close(&name) {
            Ok(()) => Reply::Closed,
            Err(reason) => Reply::Error { reason },
        },
        Request::RollView { name, to, discard_writes } => {
            travel::roll_view(registry, views, name, to, discard_writes).await
        }
        Request::Snapshot { ask } => {
            snapshots::serve(snapshots, ask, &mut reader, &mut writer).await?
        }
        Request::Resolve { group, at } => travel::resolve(registry, &group, at).await,
        Request::Timeline { group, from, to, buckets } => {
            travel::timeline(registry, &group, from, to, buckets).await
        }
        Request::Records { group, from, to, max } => {
            travel::records(registry, &group, (from, to), max).await
        }
        Request::Diff { group, from, to, disk, ranges } => {
            travel::diff(registry, &group, (from, to), disk, ranges).await
        }
        Request::Increment { group, from, to, disk } => {
            let wanted = content::Wanted { disk, at: to, from: Some(from), offset: 0 };
            match content::send(registry, group, wanted, &mut writer).await? {
                Some(answer) => answer,
                None => return Ok(()),
            }
        }
        Request::Content { group, at, disk, offset } => {
            let wanted = content::Wanted { disk, at, from: None, offset };
            match content::send(registry, group, wanted, &mut writer).await? {
                Some(answer) => answer,
                None => return Ok(()),
            }
        }
        Request::Digest { group, at, disk } => content::digest(registry, &group, disk, at).await,
        Request::Marks { group } => travel::marks(registry, &group).await,
        Request::Mark { group, name, kind, at, expires_in_ms, moves } => {
            let mark = WantedMark { name, kind, at, expires_in_ms, moves, asked_by: None };
            let set = travel::mark(registry, &group, mark).await;
            set.map_or_else(|reason| Reply::Error { reason }, |mark| Reply::Marked { mark })
        }
        Request::Unmark { group, name, kind } => travel::unmark(registry, &group, name, kind).await,
    };
    reply(&mut writer, &answer).await
}

pub(super) async fn reply(writer: &mut OwnedWriteHalf, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

pub(super) async fn ask<T>(
    registry: &Registry,
    group: &str,
    event: impl FnOnce(oneshot::Sender<T>) -> Event,
) -> Result<T, String> {
    let owner = find(registry, group)?;
    ask_owner(&owner.inbox, event).await.ok_or_else(|| format!("group {group} is being closed"))
}

pub(super) fn find(registry: &Registry, group: &str) -> Result<OwnerHandle, String> {
    registry.get(group).ok_or_else(|| {
        let known: Vec<_> = registry.all().iter().map(|o| o.group.to_string()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        format!("there is no group {group} here; the groups are: {known}")
    })
}

async fn ask_owner<T>(inbox: &Inbox, event: impl FnOnce(oneshot::Sender<T>) -> Event) -> Option<T> {
    let (done, answer) = oneshot::channel();
    inbox.push(event(done)).then_some(())?;
    answer.await.ok()
}

/// The status of all groups: those that do not answer in time are told as broken.
pub async fn statuses(registry: &Registry) -> Vec<GroupStatus> {
    let mut asked = JoinSet::new();
    for (nth, owner) in registry.all().into_iter().enumerate() {
        asked.spawn(async move {
            let asked = ask_owner(&owner.inbox, |done| Event::Status { done });
            let status = match timeout(ANSWER_MAX, asked).await {
                Ok(answer) => answer.flatten(),
                Err(_) => {
                    let reason =
                        "no answer: its disk does not respond, or the journal is being read";
                    Some(GroupStatus::of_broken(&owner.group, reason))
                }
            };
            (nth, status)
        });
    }
    let mut groups = asked.join_all().await;
    groups.sort_by_key(|(nth, _)| *nth);
    groups.into_iter().filter_map(|(_, status)| status).collect()
}

async fn status(registry: &Registry) -> Reply {
    let (mut stores, mut broken_stores) = (Vec::new(), Vec::new());
    for status in registry.stores().statuses().await {
        match status {
            Ok(status) => stores.push(status),
            Err(reason) => broken_stores.push(reason),
        }
    }
    let (server, groups) = (registry.config().name.clone(), statuses(registry).await);
    Reply::Status { server, groups, stores, broken_stores }
}

/// A fold that runs is waited for.
pub(super) async fn damaged(registry: &Registry, group: &str, how: DamagedAsk) -> Reply {
    for _ in 0..FOLD_WAITS {
        let asked = ask(registry, group, |done| Event::Damaged { ask: how, done }).await;
        match asked.and_then(|answer| answer) {
            Ok(Some((segments, latest))) => return Reply::Damaged { segments, latest },
            Ok(None) => sleep(FOLD_WAIT).await,
            Err(reason) => return Reply::Error { reason },
        }
    }
    Reply::Error { reason: "a fold has been running all the time: ask again later".into() }
}

async fn adopt(registry: &Registry, group: &str) -> Reply {
    let error = |reason| Reply::Error { reason };
    if let Err(reason) = registry.adopt(group) {
        return error(reason.to_string());
    }
    match ask(registry, group, |done| Event::Status { done }).await {
        Ok(Some(status)) => status.broken.map_or(Reply::Adopted, error),
        Ok(None) => error(format!("there is no group {group}")),
        Err(reason) => error(reason),
    }
}

/// Removes a group that nothing uses, with all that is here of it.
async fn remove_group(
    registry: &Arc<Registry>,
    views: &Views,
    snapshots: &Snapshots,
    group: &str,
    apply: bool,
) -> Result<Reply, String> {
    let status = ask(registry, group, |done| Event::Status { done }).await?;
    let status = status.ok_or_else(|| format!("there is no group {group}"))?;
    if let Some(reason) = used_by(&status) {
        return Err(format!("group {group} is in use: {reason}"));
    }
    if let Some(view) = views.all().iter().find(|view| view.group == group) {
        let name = &view.name;
        return Err(format!("group {group} is in use: view {name} is open, close it first"));
    }
    if let Some(kept) = snapshots.told(Some(group)).first() {
        let name = &kept.name;
        return Err(format!("group {group} has snapshot {name}: remove its snapshots first"));
    }
    if apply {
        let (registry, name) = (Arc::clone(registry), group.to_owned());
        let removed = tokio::task::spawn_blocking(move || registry.remove(&name)).await;
        removed.map_err(|e| e.to_string())?.map_err(|e| format!("group {group}: {e}"))?;
        tracing::warn!(group, "removed by the operator, with its journal and images");
    }
    Ok(Reply::GroupRemoved { status: Box::new(status), is_done: apply })
}

/// Why a group cannot be removed.
fn used_by(status: &GroupStatus) -> Option<String> {
    let writers = status.writers.iter().filter(|w| w.connected_since_unix_ms.is_some());
    let followers = status.followers.iter().filter(|f| f.connected_since_unix_ms.is_some());
    let writers = writers.map(|w| (&w.member, w.host.as_deref().unwrap_or("a host")));
    let mut connected = writers.chain(followers.map(|f| (&f.member, &*f.host)));
    if let Some((member, host)) = connected.next() {
        return Some(format!("member {member} is attached by {host}, stop the daemon there first"));
    }
    if status.recovered.is_some() {
        let reason = "it was recovered here and its disks are served. Stop the VMs and the backup server, and \
                      remove its directory";
        return Some(reason.to_owned());
    }
    let remaining_ms = status.grace_remaining_ms;
    (remaining_ms > 0).then(|| {
        format!("the lease of a host may hold for another {remaining_ms} ms, ask again after that")
    })
}

/// The status of a group that works.
pub(super) async fn group_status(registry: &Registry, group: &str) -> Result<GroupStatus, String> {
    let status = ask(registry, group, |done| Event::Status { done }).await?;
    let status = status.ok_or_else(|| format!("there is no group {group}"))?;
    match status.broken.clone() {
        Some(reason) => Err(format!("group {group} cannot be opened: {reason}")),
        None => Ok(status),
    }
}
