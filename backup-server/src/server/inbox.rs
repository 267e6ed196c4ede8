//! What waits for a group's owner.
//!
//! Everything that arrived while the owner made a batch durable is taken at once and forms the
//! next batch. What hosts send is bounded ([`tidelock_replica::connection::room`]); everything else
//! is bounded by who sends it (one answer at a time).

use crate::server::orders::Asker;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_replica::connection::room::InputRoom;
use tidelock_replica::group::{
    DamagedDisk, DamagedSegment, GroupStatus, GuestEffect, Link, NamedMark, NamedView,
};
use tidelock_replica::group_loop::{HostEvent, JobEnd, Order};
use tidelock_replica::history::History;
use tidelock_storage::files::OpenFile;
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::KeptMachine;
use tokio::sync::oneshot;

/// An event for a group's owner.
#[derive(Debug)]
pub enum Event {
    /// An event of a host's connection.
    Host(HostEvent),
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
    /// An order that may have to wait.
    Order {
        /// The order.
        order: Order,
        /// The way back of its answer.
        asker: Asker,
    },
    /// The disks of a recovered group; `None` if it is not recovered.
    Disks {
        /// The answer.
        done: oneshot::Sender<Option<LiveDisks>>,
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
    /// Waits until the cut has what every writer has written, on behalf of an attached member.
    Cover {
        /// Its link.
        link: Link,
        /// The answer: writers whose hosts are not connected.
        done: oneshot::Sender<Result<Vec<String>, String>>,
    },
    /// What to boot.
    Machine {
        /// Member's name.
        member: String,
        /// The answer.
        done: oneshot::Sender<Result<KeptMachine, String>>,
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
    room: InputRoom,
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
        let room = InputRoom::new(max_bytes);
        Self { state: Mutex::default(), ready: Condvar::new(), room }
    }

    /// Room for frames.
    #[must_use]
    pub fn room(&self) -> &InputRoom {
        &self.room
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
        self.room.close();
    }

    /// The owner ends unless something has come meanwhile: who has asked gets an answer.
    #[must_use]
    pub fn close_if_empty(&self) -> bool {
        let mut state = self.lock();
        if !state.events.is_empty() {
            return false;
        }
        state.closed = true;
        self.room.close();
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
