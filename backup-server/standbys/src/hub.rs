//! News between the store's thread and the standbys' threads. Nobody waits here: a lock is held for a look, never over
//! a read or a write.

use crate::failure::Failure;
use crate::source::{Ask, Supply};
use crate::standby::{Event, Need};
use bytes::Bytes;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_pgstream::{Lineage, LineageError, StandbyStatus};
use tidelock_shard::link::Origin;
use tidelock_shard_logs::StoreLog;
use tidelock_storage::{Storage, StorageFile};
use tidelock_wal::{Lsn, TimelineId};

/// The cluster that writes a shard's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardWal {
    /// System identifier.
    pub system: u64,
    /// Version of the server, as `server_version_num`.
    pub version: u32,
    /// Size of a segment file.
    pub segment_bytes: u32,
    /// Timelines.
    pub lineage: Lineage,
}

impl ShardWal {
    /// The cluster that a primary host has stated.
    ///
    /// # Errors
    /// The history of its timeline is none.
    pub fn of(origin: &Origin) -> Result<Self, LineageError> {
        let last = TimelineId(origin.timeline);
        let file = Bytes::from(origin.history.clone());
        let files = (last > TimelineId(1)).then_some((last, file)).into_iter().collect();
        Ok(Self {
            system: origin.system_id,
            version: origin.version.saturating_mul(10_000),
            segment_bytes: origin.segment_bytes,
            lineage: Lineage::new(last, files)?,
        })
    }
}

/// A connection of a standby, as it is numbered here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A standby that is connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Number of the connection.
    pub id: ConnectionId,
    /// The shard whose log it is given.
    pub shard: u16,
    /// Name that it gave.
    pub name: String,
    /// Positions that it reported last.
    pub status: Option<StandbyStatus>,
}

/// Wakes a thread that polls.
#[derive(Debug)]
pub(crate) struct Waker(pub OwnedFd);

impl Waker {
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub fn wake(&self) {
        // Fails only if it was woken 2^64 times.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes back what has woken it.
    pub fn rest(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

#[derive(Debug, Default)]
struct Shard {
    wal: Option<Arc<ShardWal>>,
    apply_to: Option<Lsn>,
}

#[derive(Debug)]
struct Slot<F> {
    connection: Connection,
    /// End of what this standby may have, wherever apply-to is: the cut of a view.
    cut: Option<Lsn>,
    waker: Arc<Waker>,
    /// The socket by which it came.
    socket: u64,
    ask: Option<(Ask, Need)>,
    supply: Option<(Ask, Supply<F>)>,
    is_withdrawn: bool,
}

#[derive(Debug)]
struct Shared<F> {
    shards: BTreeMap<u16, Shard>,
    slots: BTreeMap<ConnectionId, Slot<F>>,
    next: u64,
}

type Report = Box<dyn Fn(ConnectionId, u16, &Event) + Send + Sync>;

struct Inner<F> {
    shared: Mutex<Shared<F>>,
    connections_max: usize,
    wake_store: Box<dyn Fn() + Send + Sync>,
    report: Report,
}

/// The standbys of a store.
pub struct Standbys<F>(Arc<Inner<F>>);

impl<F> Clone for Standbys<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F> fmt::Debug for Standbys<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Standbys").finish_non_exhaustive()
    }
}

/// News for the thread of a connection.
#[derive(Debug)]
pub(crate) struct News<F> {
    pub wal: Arc<ShardWal>,
    /// End of what may be sent.
    pub bound: Lsn,
    pub supply: Option<(Ask, Supply<F>)>,
}

impl<F: StorageFile> Standbys<F> {
    /// No standby yet. `wake_store` has the store's thread call [`tend`](Self::tend) soon; `report` is told what
    /// happens to standbys. Both are called on the standbys' threads and must not wait.
    #[must_use]
    pub fn new(
        connections_max: usize,
        wake_store: impl Fn() + Send + Sync + 'static,
        report: impl Fn(ConnectionId, u16, &Event) + Send + Sync + 'static,
    ) -> Self {
        let shared = Shared { shards: BTreeMap::new(), slots: BTreeMap::new(), next: 0 };
        Self(Arc::new(Inner {
            shared: Mutex::new(shared),
            connections_max,
            wake_store: Box::new(wake_store),
            report: Box::new(report),
        }))
    }

    fn shared(&self) -> MutexGuard<'_, Shared<F>> {
        self.0.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The primary tells whose log a shard has, and its timelines. A timeline must be told before its entries are
    /// taken.
    pub fn set_wal(&self, shard: u16, wal: ShardWal) {
        let mut shared = self.shared();
        shared.shards.entry(shard).or_default().wal = Some(Arc::new(wal));
        for slot in shared.slots.values().filter(|slot| slot.connection.shard == shard) {
            slot.waker.wake();
        }
    }

    /// On the store's thread, after each sync and whenever a standby has asked for it: standbys learn how far
    /// they may go, and get readers of the journal. Does no I/O.
    pub fn tend<S: Storage<File = F>>(&self, log: &StoreLog<S>) {
        let mut shared = self.shared();
        let Shared { shards, slots, .. } = &mut *shared;
        let mut moved = Vec::new();
        for shard in 0..log.shards() {
            let of = shards.entry(shard).or_default();
            let apply_to = log.apply_to(shard).map(|index| Lsn(index.0));
            if apply_to > of.apply_to {
                of.apply_to = apply_to;
                moved.push(shard);
            }
        }
        for slot in slots.values_mut() {
            let shard = slot.connection.shard;
            let has_moved = moved.binary_search(&shard).is_ok();
            let mut is_news = has_moved;
            if let Some((ask, need)) = slot.ask
                && (has_moved || need == Need::Now)
                && let Some(supply) = ask.answer(log, shard)
            {
                slot.ask = None;
                slot.supply = Some((ask, supply));
                is_news = true;
            }
            if is_news {
                slot.waker.wake();
            }
        }
    }

    /// The standbys that are connected.
    #[must_use]
    pub fn connections(&self) -> Vec<Connection> {
        self.shared().slots.values().map(|slot| slot.connection.clone()).collect()
    }

    /// Numbers a socket.
    pub(crate) fn number(&self) -> u64 {
        let mut shared = self.shared();
        shared.next += 1;
        shared.next
    }

    /// A standby has connected.
    pub(crate) fn enter(
        &self,
        shard: u16,
        cut: Option<Lsn>,
        socket: u64,
        waker: Arc<Waker>,
    ) -> Result<ConnectionId, Failure> {
        let id = ConnectionId(self.number());
        let mut shared = self.shared();
        let connections = shared.slots.len();
        if connections >= self.0.connections_max {
            return Err(Failure::Crowded { connections });
        }
        let connection = Connection { id, shard, name: String::new(), status: None };
        let slot =
            Slot { connection, cut, waker, socket, ask: None, supply: None, is_withdrawn: false };
        shared.slots.insert(id, slot);
        Ok(id)
    }

    /// The connection is over.
    pub(crate) fn leave(&self, id: ConnectionId) {
        self.shared().slots.remove(&id);
    }

    /// Ends the connections that came by a socket.
    pub(crate) fn withdraw(&self, socket: u64) {
        for slot in self.shared().slots.values_mut().filter(|slot| slot.socket == socket) {
            slot.is_withdrawn = true;
            slot.waker.wake();
        }
    }

    /// News for a connection.
    pub(crate) fn news(&self, id: ConnectionId) -> Result<News<F>, Failure> {
        let mut shared = self.shared();
        let Shared { shards, slots, .. } = &mut *shared;
        let slot = slots.get_mut(&id).filter(|slot| !slot.is_withdrawn);
        let slot = slot.ok_or(Failure::Withdrawn)?;
        let shard = slot.connection.shard;
        let not_yet = Failure::NotYet { shard };
        let Some(Shard { wal: Some(wal), apply_to: Some(apply_to) }) = shards.get(&shard) else {
            return Err(not_yet);
        };
        let bound = slot.cut.map_or(*apply_to, |cut| cut.min(*apply_to));
        Ok(News { wal: Arc::clone(wal), bound, supply: slot.supply.take() })
    }

    /// A connection needs a reader of the journal.
    pub(crate) fn ask(&self, id: ConnectionId, ask: Ask, need: Need) {
        let mut shared = self.shared();
        let Some(slot) = shared.slots.get_mut(&id) else { return };
        let is_answered = slot.supply.as_ref().is_some_and(|(answered, _)| *answered == ask);
        if is_answered || slot.ask == Some((ask, need)) {
            return;
        }
        slot.ask = Some((ask, need));
        drop(shared);
        if need == Need::Now {
            (self.0.wake_store)();
        }
    }

    /// Something has happened to a connection.
    pub(crate) fn report(&self, id: ConnectionId, shard: u16, event: &Event) {
        match event {
            Event::LoggedIn { name } => {
                if let Some(slot) = self.shared().slots.get_mut(&id) {
                    slot.connection.name.clone_from(name);
                }
            }
            Event::Status(status) => {
                if let Some(slot) = self.shared().slots.get_mut(&id) {
                    slot.connection.status = Some(*status);
                }
            }
            _ => {}
        }
        (self.0.report)(id, shard, event);
    }
}
