//! What waits for a group's owner.
//!
//! Everything that arrived while the owner made a batch durable is taken at once and forms the
//! next batch. Frames are bounded in bytes by permits that the connection acquires before it puts
//! them in, so that a full inbox turns into backpressure on the socket. Beacons have a little room
//! of their own, for each connection, so that neither a stall nor another host's flood ends the
//! lease. Everything else is bounded by who sends it (one answer at a time).

use crate::server::outbox::Outbox;
use crate::server::past::NamedMark;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{MonoNanos, Seq, WriterId};
use tidelock_protocol::machine::Machine;
use tidelock_protocol::message::Attach;
use tidelock_replica::group::{
    ConnectionId, DamagedDisk, DamagedSegment, GroupStatus, GuestEffect, Link, MoveError, Moved,
    NamedView, RecoverError, Recovery, RemoveError,
};
use tidelock_replica::group_loop::JobEnd;
use tidelock_replica::history::{History, Point};
use tidelock_replica::manifest::KeptMachine;
use tidelock_replica::travel::marks::{Kind, Mark};
use tidelock_storage::files::OpenFile;
use tidelock_store::extents::DiskKey;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Permits are counted in these.
const PERMIT_BYTES: u64 = 1024;
/// Beacons of one connection that may wait. One that finds no room is dropped: another follows soon.
const BEACONS_MAX: usize = 1024;

/// Room of one connection for beacons.
#[derive(Debug)]
pub struct BeaconRoom(Arc<Semaphore>);

impl Default for BeaconRoom {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BEACONS_MAX)))
    }
}

impl BeaconRoom {
    /// Room for a beacon, if there is.
    #[must_use]
    pub fn take(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).try_acquire_owned().ok()
    }
}

/// Work that frames of one connection which wait may cause, in bytes that are read for them. Its socket waits beyond that,
/// so that many small frames that cost much do not take the room that hosts of the group share.
const WORK_MAX_BYTES: u64 = 1 << 30;
/// Work is counted in these.
const WORK_PERMIT_BYTES: u64 = 4 << 10;

/// Room of one connection for frames that cause work.
#[derive(Debug)]
pub struct WorkRoom(Arc<Semaphore>);

impl Default for WorkRoom {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new((WORK_MAX_BYTES / WORK_PERMIT_BYTES) as usize)))
    }
}

impl WorkRoom {
    /// Waits for room for so much work. `None`: it is none. More than all of the room takes all of it.
    pub async fn take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let permits = bytes.min(WORK_MAX_BYTES).div_ceil(WORK_PERMIT_BYTES) as u32;
        if permits == 0 {
            return None;
        }
        Arc::clone(&self.0).acquire_many_owned(permits).await.ok()
    }
}

/// Room that frames have while they wait.
#[derive(Debug)]
pub struct FramesRoom {
    /// Their bytes, of what the hosts of a group share.
    pub bytes: OwnedSemaphorePermit,
    /// Their work, of what the connection has.
    pub work: Option<OwnedSemaphorePermit>,
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
        attach: Box<Attach>,
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
        /// Given back when they are in the journal.
        room: FramesRoom,
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
        /// Member's name.
        member: String,
        /// The answer.
        done: oneshot::Sender<Result<KeptMachine, String>>,
    },
    /// An operator approves what is to be booted.
    ApproveMachine {
        /// Member's name.
        member: String,
        /// The description that was looked at.
        machine: Machine,
        /// The answer.
        done: oneshot::Sender<Result<(), String>>,
    },
    /// Opens a group that does not work at once, and not at the next attempt. Answered when that is done.
    OpenAgain {
        /// The answer.
        done: oneshot::Sender<()>,
    },
    /// The status; `None`: there is no group.
    Status {
        /// The answer.
        done: oneshot::Sender<Option<GroupStatus>>,
    },
    /// A job beside the group's loop has ended.
    JobDone {
        /// The opening of the group in which it was begun.
        generation: u64,
        /// Its end.
        end: JobEnd<OpenFile>,
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
        Self { state: Mutex::default(), ready: Condvar::new(), budget, budget_permits }
    }

    /// Waits for room for frames of so many bytes. `None`: the owner has ended.
    pub async fn room_for(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let permits = u32::try_from(bytes.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        let permits = permits.clamp(1, self.budget_permits);
        Arc::clone(&self.budget).acquire_many_owned(permits).await.ok()
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

    /// The owner ends unless something has come meanwhile: who has asked gets an answer.
    #[must_use]
    pub fn close_if_empty(&self) -> bool {
        let mut state = self.lock();
        if !state.events.is_empty() {
            return false;
        }
        state.closed = true;
        self.budget.close();
        true
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beacons_of_one_connection_take_no_room_from_another() {
        let (loud, quiet) = (BeaconRoom::default(), BeaconRoom::default());
        let taken: Vec<_> = std::iter::from_fn(|| loud.take()).collect();
        assert_eq!(taken.len(), BEACONS_MAX);
        assert!(quiet.take().is_some());
    }

    #[tokio::test]
    async fn frames_that_cause_much_work_wait_for_those_before_them_on_their_connection_alone() {
        let (loud, quiet) = (WorkRoom::default(), WorkRoom::default());
        assert!(loud.take(0).await.is_none(), "records need none");
        let taken = loud.take(1 << 40).await.unwrap();
        let mut next = Box::pin(loud.take(1));
        assert!(tokio::time::timeout(Duration::ZERO, &mut next).await.is_err());
        assert!(quiet.take(1 << 40).await.is_some());
        drop(taken);
        assert!(next.await.is_some());
    }
}
