//! The stores of the configuration, each with a thread of its own ([`owner`]), the connections of their hosts
//! ([`connection`]), and standbys of their shards ([`standbys`]).

pub(super) mod config;
pub(super) mod connection;
mod left_out;
mod outbox;
mod owner;
mod standbys;
mod tunnels;

use super::config::Config;
use standbys::{StandbysHandle, StoreStandbys};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tidelock_shard::LogIndex;
use tidelock_shard::link::StoreFrame;
use tidelock_shard_logs::{Link, Recovery, Refusal, StoreStatus};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// Events that wait for a store's thread at most. The largest carry what one read brought.
const EVENTS_MAX: usize = 64;

/// Commits of a shard that a recovery lists at most.
const LEFT_OUT_MAX: usize = 10_000;

/// An event for a store's thread.
enum Event {
    /// A host has said hello.
    Connected {
        link: Link,
        host: String,
        shards: Vec<String>,
        outbox: Arc<outbox::Outbox>,
        done: oneshot::Sender<Result<(), Refusal>>,
    },
    /// Frames of a host, in order.
    Frames { link: Link, frames: Vec<StoreFrame> },
    /// A connection has ended.
    Lost(Link),
    /// Asks for the status.
    Status { done: oneshot::Sender<Result<Option<StoreStatus>, String>> },
    /// A disaster was declared. Answered when the final watermark is known.
    Recover { recovery: Recovery, done: oneshot::Sender<Result<StoreStatus, String>> },
    /// Asks for what is beyond the final cut.
    Beyond { done: oneshot::Sender<Vec<left_out::Beyond>> },
    /// Something is asked for a tunnel to a shard's server.
    Tunnel(tunnels::Ask),
    /// Standbys and copies at this site do not need a shard's log up to there any more.
    Unneeded { shard: u16, up_to: LogIndex },
    /// The server stops.
    Stop,
}

/// A store that runs, from outside.
#[derive(Clone)]
pub(super) struct StoreHandle {
    /// Hosts that may ship its shards.
    hosts: Arc<[String]>,
    events: mpsc::Sender<Event>,
    standbys: StandbysHandle,
}

/// The stores.
pub struct Stores {
    running: BTreeMap<String, StoreHandle>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Stores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.running.keys()).finish()
    }
}

impl Stores {
    /// Starts the thread of each store of the configuration.
    pub(super) fn open(config: &Config) -> io::Result<Self> {
        let mut running = BTreeMap::new();
        let mut threads = Vec::new();
        for (name, section) in config.stores() {
            let (events, inbox) = mpsc::channel(EVENTS_MAX);
            let handle = StandbysHandle::default();
            let standbys = section.standbys.clone().map(|settings| {
                StoreStandbys::new(name, settings, &handle, Handle::current(), events.clone())
            });
            let of = owner::Of {
                name: name.to_owned(),
                dir: config.data_dir.join("stores").join(name),
                options: config.options(name),
                has_watermark: section.has_watermark,
                standbys,
            };
            threads.push(owner::spawn(of, inbox)?);
            let hosts = section.hosts.as_slice().into();
            running.insert(name.to_owned(), StoreHandle { hosts, events, standbys: handle });
        }
        Ok(Self { running, threads: Mutex::new(threads) })
    }

    fn get(&self, name: &str) -> Option<&StoreHandle> {
        self.running.get(name)
    }

    async fn ask<T>(
        &self,
        name: &str,
        event: impl FnOnce(oneshot::Sender<T>) -> Event,
    ) -> Result<T, String> {
        let store = self.get(name).ok_or_else(|| format!("there is no store {name}"))?;
        let (done, answer) = oneshot::channel();
        let ended = |_| format!("store {name}: the server is stopping");
        store.events.send(event(done)).await.map_err(|_| ended(()))?;
        answer.await.map_err(|_| ended(()))
    }

    /// The status of a store; `None`: no host has shipped anything.
    pub(super) async fn status(&self, name: &str) -> Result<Option<StoreStatus>, String> {
        let mut status = self.ask(name, |done| Event::Status { done }).await??;
        if let (Some(status), Some(store)) = (&mut status, self.get(name)) {
            store.standbys.describe(status);
        }
        Ok(status)
    }

    /// The status of every store that a host has shipped something to, and of those that do not work why.
    pub(super) async fn statuses(&self) -> Vec<Result<StoreStatus, String>> {
        let mut statuses = Vec::new();
        for name in self.running.keys() {
            match self.status(name).await {
                Ok(status) => statuses.extend(status.map(Ok)),
                Err(reason) => statuses.push(Err(format!("store {name}: {reason}"))),
            }
        }
        statuses
    }

    /// True if the configuration has this store.
    pub(super) fn has(&self, name: &str) -> bool {
        self.running.contains_key(name)
    }

    /// Closes all logs of a store, and answers with its status once the final watermark is known. Standbys are promoted
    /// then.
    pub(super) async fn recover(
        &self,
        name: &str,
        recovery: Recovery,
    ) -> Result<StoreStatus, String> {
        let status = self.ask(name, |done| Event::Recover { recovery, done }).await??;
        let Some(store) = self.get(name) else { return Ok(status) };
        let (standbys, of) = (store.standbys.clone(), status.clone());
        // Whatever becomes of the command line: it was ordered.
        let promoted = tokio::spawn(async move { standbys.promote(&of).await });
        let _ = promoted.await;
        let mut status = self.status(name).await?.unwrap_or(status);
        let beyond = self.ask(name, |done| Event::Beyond { done }).await?;
        for beyond in beyond {
            let shard = usize::from(beyond.shard);
            let read = move || beyond.read(LEFT_OUT_MAX);
            let left_out = tokio::task::spawn_blocking(read).await.map_err(|e| e.to_string())?;
            status.shards[shard].left_out = left_out?;
        }
        Ok(status)
    }

    /// Ends all threads. What was taken is durable then.
    pub(super) fn stop(&self) {
        for store in self.running.values() {
            let _ = store.events.blocking_send(Event::Stop);
        }
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("the thread of a store ended by a fault");
            }
        }
    }
}
