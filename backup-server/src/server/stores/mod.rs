//! The stores of the configuration, each with a thread of its own ([`owner`]), the connections of their hosts
//! ([`connection`]), and standbys of their shards ([`standbys`]).

pub(super) mod config;
pub(super) mod connection;
mod left_out;
mod outbox;
mod owner;
mod standbys;
mod tunnels;
pub mod views;

use super::config::Config;
use super::{Role, clock};
use standbys::{StandbysHandle, StoreStandbys};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tidelock_protocol::hlc::Hlc;
use tidelock_replica::travel::when::When;
use tidelock_shard::link::StoreFrame;
use tidelock_shard::{LogIndex, stamp_at};
use tidelock_shard_logs::{Cut, CutSearch, Link, Recovery, Refusal, StoreStatus};
use tidelock_storage::files::OpenFile;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use views::{StoreViewStatus, StoreViews};

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
    /// Asks for the cut at a stamp.
    Search { stamp: Hlc, done: oneshot::Sender<Result<CutSearch<OpenFile>, String>> },
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
    views: StoreViews,
}

impl std::fmt::Debug for Stores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.running.keys()).finish()
    }
}

impl Stores {
    /// Starts the thread of each store of the configuration.
    pub(super) fn open(config: &Config, role: Role) -> io::Result<Self> {
        let mut running = BTreeMap::new();
        let mut threads = Vec::new();
        for (name, section) in config.stores() {
            let (events, inbox) = mpsc::channel(EVENTS_MAX);
            let handle = StandbysHandle::default();
            let standbys = section.standbys.clone().map(|settings| {
                StoreStandbys::new(
                    name,
                    settings,
                    role == Role::Serve,
                    &handle,
                    Handle::current(),
                    events.clone(),
                )
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
        Ok(Self { running, threads: Mutex::new(threads), views: StoreViews::default() })
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
            store.standbys.describe(status).await;
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
    /// then, or copies of earlier ones at an earlier cut.
    pub(super) async fn recover(
        &self,
        name: &str,
        recovery: Recovery,
        at: Option<&When>,
    ) -> Result<StoreStatus, String> {
        let past = match at {
            None | Some(When::Latest) => None,
            Some(at) => {
                let cut = self.cut(name, at).await?;
                // Nothing is changed if a shard cannot come there.
                self.bases(name, &cut).await?;
                Some(cut)
            }
        };
        let status = self.ask(name, |done| Event::Recover { recovery, done }).await??;
        let Some(store) = self.get(name) else { return Ok(status) };
        let (standbys, of) = (store.standbys.clone(), status.clone());
        // Ordered, whatever becomes of the command line.
        let promoted = tokio::spawn(async move { standbys.promote(&of, past.as_ref()).await });
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

    /// The cut at a point in time.
    async fn cut(&self, name: &str, at: &When) -> Result<Cut, String> {
        let status =
            self.status(name).await?.ok_or("no host has shipped anything of this store yet")?;
        let of_ms = |ms: u64| stamp_at(ms.saturating_mul(1_000_000));
        let stamp = match at {
            When::Latest => status.watermark.unwrap_or_default(),
            When::WallMs(ms) => of_ms(*ms),
            When::BeforeNowMs(ms) => of_ms(clock::now().unix_ms.saturating_sub(*ms)),
            When::Hlc(stamp) => *stamp,
            When::Oldest | When::Seqs(_) | When::Bookmark(_) => {
                return Err(
                    "a store is looked at by time: `latest`, a time, or so long ago (`-10m`)"
                        .to_owned(),
                );
            }
        };
        let search = self.ask(name, |done| Event::Search { stamp, done }).await??;
        let found = tokio::task::spawn_blocking(move || search.find()).await;
        found.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }

    /// Copies of all shards from which a cut can be reached.
    async fn bases(&self, name: &str, cut: &Cut) -> Result<Vec<views::Wanted>, String> {
        let status =
            self.status(name).await?.ok_or("no host has shipped anything of this store yet")?;
        let store = self.get(name).ok_or("no such store")?;
        let mut bases = Vec::new();
        for ((shard, of), at) in (0..).zip(status.shards).zip(&cut.ends) {
            let base = store.standbys.base(shard, *at).await;
            let base = base.map_err(|reason| format!("shard {}: {reason}", of.name))?;
            bases.push(views::Wanted { name: of.name, base, at: *at });
        }
        Ok(bases)
    }

    /// Opens a view of a store.
    pub(super) async fn open_view(
        &self,
        store: &str,
        at: &When,
        name: Option<&str>,
    ) -> Result<StoreViewStatus, String> {
        let cut = self.cut(store, at).await?;
        let bases = self.bases(store, &cut).await?;
        let name = self.views.reserve(store, name)?;
        self.views.open(&name, store, &cut, bases).await
    }

    /// The views of stores.
    pub(super) fn views(&self) -> &StoreViews {
        &self.views
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
