//! What waits for a group's owner.
//!
//! Everything that arrived while the owner made a batch durable is taken at once and forms the
//! next batch. Frames are bounded in bytes by permits that the connection acquires before it puts
//! them in, so that a full inbox turns into backpressure on the socket. Beacons have a little room
//! of their own, so that a stall does not end the lease. Everything else is bounded by who sends
//! it (one answer at a time).

use crate::fold::{FoldError, Folded};
use crate::group::{
    ConnectionId, DamagedDisk, DamagedSegment, GroupStatus, GuestEffect, Link, MoveError, Moved,
    NamedView, RecoverError, Recovery, RemoveError,
};
use crate::history::{History, Point};
use crate::journal::{Compressed, JournalError, Made, Scrubbed};
use crate::server::outbox::Outbox;
use crate::server::past::NamedMark;
use crate::storage::files::OpenFile;
use crate::travel::marks::{Kind, Mark};
use crate::view::DiskKey;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{Attach, Follow, Join, Machine};
use tidelock_protocol::vector::CountVector;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Permits are counted in these.
const PERMIT_BYTES: u64 = 1024;
/// Beacons that may wait. One that finds no room is dropped: another follows soon.
const BEACONS_MAX: usize = 1024;

/// How a member attaches.
#[derive(Debug)]
pub enum AttachRequest {
    /// A writer, with version 1 of the protocol.
    Attach(Box<Attach>),
    /// A writer.
    Join(Box<Join>),
    /// A member without disks.
    Follow(Box<Follow>),
}

impl AttachRequest {
    /// The group.
    #[must_use]
    pub fn group(&self) -> &str {
        match self {
            Self::Attach(attach) => &attach.group,
            Self::Join(join) => &join.attach.group,
            Self::Follow(follow) => &follow.group,
        }
    }
}

/// An event for a group's owner.
#[derive(Debug)]
pub enum Event {
    /// A member attaches.
    Attach {
        /// On this link.
        link: Link,
        /// Its host, authenticated.
        host: String,
        /// What it says.
        request: AttachRequest,
        /// Where answers go.
        outbox: Arc<Outbox>,
        /// Its bytes.
        permit: OwnedSemaphorePermit,
    },
    /// Frames of one attached member, in order.
    Frames {
        /// The link.
        link: Link,
        /// The frames.
        frames: Vec<Frame>,
        /// Their bytes, given back when they are in the journal.
        permit: OwnedSemaphorePermit,
    },
    /// A beacon. It does not wait behind frames that the group cannot take.
    Beacon {
        /// The link.
        link: Link,
        /// The host's clock.
        sent_at: MonoNanos,
        /// One of the few that may wait.
        permit: OwnedSemaphorePermit,
    },
    /// A connection is gone.
    ConnectionLost(ConnectionId),
    /// A write to a disk of a recovered group.
    GuestWrite {
        /// The disk.
        key: DiskKey,
        /// Where.
        offset: u64,
        /// What.
        effect: GuestEffect,
        /// Answer when it is durable, not only when it is readable.
        durable: bool,
        /// The answer.
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Makes all writes that were answered durable.
    GuestFlush {
        /// Whose guest.
        writer: WriterId,
        /// The answer.
        done: oneshot::Sender<io::Result<()>>,
    },
    /// Recovers the group.
    Recover {
        /// The operator states that the primary is dead.
        primary_declared_dead: bool,
        /// To a point of the past; `None`: with everything that can be.
        point: Option<Point>,
        /// Also if some of it cannot be read.
        accepts_damage: bool,
        /// The answer.
        done: oneshot::Sender<Result<Recovery, RecoverError>>,
    },
    /// The disks of a recovered group; `None` if it is not recovered.
    Disks {
        /// The answer.
        done: oneshot::Sender<Option<LiveDisks>>,
    },
    /// Gives a member to a host.
    MoveMember {
        /// Which.
        member: String,
        /// The host.
        to: String,
        /// The answer.
        done: oneshot::Sender<Result<Moved, MoveError>>,
    },
    /// Removes a member.
    Remove {
        /// Which.
        member: String,
        /// The answer.
        done: oneshot::Sender<Result<(), RemoveError>>,
    },
    /// The past as it is now.
    History {
        /// The answer.
        done: oneshot::Sender<Result<History<OpenFile>, String>>,
    },
    /// Nothing of the journal is needed any more for a snapshot that was on record when the group was opened.
    SnapshotOver {
        /// Which.
        name: String,
    },
    /// The bookmarks and pins.
    Marks {
        /// The answer.
        done: oneshot::Sender<Result<Vec<NamedMark>, String>>,
    },
    /// Sets a bookmark or pin.
    SetMark {
        /// Its name.
        name: String,
        /// What it is.
        mark: Mark,
        /// Whether one of this name is moved.
        moves: bool,
        /// The answer: what is on record.
        done: oneshot::Sender<Result<Mark, String>>,
    },
    /// Waits until the cut has what every writer has written, on behalf of an attached member.
    Cover {
        /// Its link.
        link: Link,
        /// The answer: writers whose hosts are not connected.
        done: oneshot::Sender<Result<Vec<String>, String>>,
    },
    /// Takes one out.
    RemoveMark {
        /// Its name.
        name: String,
        /// What it must be.
        kind: Kind,
        /// The answer.
        done: oneshot::Sender<Result<(), String>>,
    },
    /// What to boot.
    Machine {
        /// Of which member.
        member: String,
        /// The answer.
        done: oneshot::Sender<Result<Option<Machine>, String>>,
    },
    /// The status; `None`: there is no group.
    Status {
        /// The answer.
        done: oneshot::Sender<Option<GroupStatus>>,
    },
    /// A fold has ended.
    FoldDone {
        /// Of which opening of the group.
        generation: u64,
        /// Under which cut.
        cut: CountVector,
        /// How.
        result: Result<Folded, FoldError>,
    },
    /// The index of a segment was written, or not.
    IndexDone {
        /// Of which opening of the group.
        generation: u64,
        /// Of which segment.
        segment: u64,
        /// How.
        result: Result<Made<OpenFile>, JournalError>,
    },
    /// Damaged segments.
    Damaged {
        /// What is to be done with them.
        ask: DamagedAsk,
        /// What there are then; `None`: not now, a fold runs.
        done: oneshot::Sender<Result<Option<Damage>, String>>,
    },
    /// Cut the journal before what keeps it from being opened.
    Repair {
        /// Not only find out where.
        apply: bool,
        /// Where, and what it costs; or why not.
        done: oneshot::Sender<Result<RepairStatus, String>>,
    },
    /// A segment was verified.
    ScrubDone {
        /// Of which opening of the group.
        generation: u64,
        /// Which segment.
        segment: u64,
        /// How.
        result: Scrubbed,
    },
    /// A segment was compressed, or not.
    CompressDone {
        /// Of which opening of the group.
        generation: u64,
        /// Which segment.
        segment: u64,
        /// Its bytes.
        len_bytes: u64,
        /// How it ended.
        result: Result<Compressed<OpenFile>, JournalError>,
    },
    /// The server stops.
    Stop,
}

/// What is to be done with damaged segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamagedAsk {
    /// Only tell them.
    Tell,
    /// Look at them again.
    Check,
    /// Give this one up.
    Forget(u64),
}

/// A journal that cannot be opened, and what a cut before the damage keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairStatus {
    /// Why it cannot be opened.
    pub reason: String,
    /// Files, in the group's directory, that are kept in the quarantine and are cut here, or go.
    pub files: Vec<String>,
    /// The segment in which the journal ends then, and its bytes.
    pub end: (u64, u64),
    /// What it costs.
    pub writers: Vec<RepairedWriter>,
    /// It is done.
    pub is_done: bool,
}

/// What of a writer is kept, and what is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepairedWriter {
    /// The member.
    pub member: String,
    /// Its last write that is kept.
    pub kept: Seq,
    /// The last one that was found behind the cut; `None`: none was found.
    pub lost: Option<Seq>,
}

/// Damaged segments, and what of the latest state cannot be read.
pub type Damage = (Vec<DamagedSegment>, Vec<DamagedDisk>);

/// The disks of a recovered group.
#[derive(Debug)]
pub struct LiveDisks {
    /// By name.
    pub disks: Vec<NamedView<OpenFile>>,
    /// Whether the views are still true: no longer when the group had to be opened again.
    pub alive: Arc<AtomicBool>,
}

/// The inbox.
#[derive(Debug)]
pub struct Inbox {
    state: Mutex<State>,
    ready: Condvar,
    budget: Arc<Semaphore>,
    budget_permits: u32,
    beacons: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    closed: bool,
}

impl Inbox {
    /// An inbox that holds frames of so many bytes.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        let budget_permits = u32::try_from(max_bytes / PERMIT_BYTES).unwrap_or(u32::MAX / 2);
        let budget = Arc::new(Semaphore::new(budget_permits as usize));
        let beacons = Arc::new(Semaphore::new(BEACONS_MAX));
        Self { state: Mutex::default(), ready: Condvar::new(), budget, budget_permits, beacons }
    }

    /// Waits for room for frames of so many bytes. `None`: the owner has ended.
    pub async fn room_for(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let permits = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        let permits = permits.clamp(1, self.budget_permits);
        Arc::clone(&self.budget).acquire_many_owned(permits).await.ok()
    }

    /// Room for a beacon, if there is.
    #[must_use]
    pub fn room_for_beacon(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.beacons).try_acquire_owned().ok()
    }

    /// Puts an event in. `false`: the owner has ended, and the event is dropped.
    pub fn push(&self, event: Event) -> bool {
        let mut state = self.lock();
        if state.closed {
            return false;
        }
        state.events.push_back(event);
        if state.events.len() == 1 {
            self.ready.notify_one();
        }
        true
    }

    /// Takes everything, waiting for at least one event or for the time to pass.
    #[must_use]
    pub fn take(&self, timeout: Option<Duration>) -> VecDeque<Event> {
        let empty = |state: &mut State| state.events.is_empty();
        let state = self.lock();
        let mut state = match timeout {
            None => self.ready.wait_while(state, empty).unwrap_or_else(PoisonError::into_inner),
            Some(timeout) => {
                let waited = self.ready.wait_timeout_while(state, timeout, empty);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        std::mem::take(&mut state.events)
    }

    /// The owner ends: what is in it and what comes is dropped.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.events.clear();
        self.budget.close();
    }

    /// Whether the owner has ended.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
