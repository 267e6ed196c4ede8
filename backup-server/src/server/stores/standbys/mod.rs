//! The standbys of a store at this site: each shard's follows its log up to apply-to, and is promoted there in a recovery.
//!
//! ```text
//!  store's thread ─ Known ─▶ Keeper of a shard ─ copies, starts, promotes ─▶ PostgreSQL
//!        ▲                      │                                              │
//!        └── Unneeded, tunnels ─┘        Standbys (the hub) ◀── log, by socket ┘
//! ```

mod keeper;
mod past;
mod record;
mod source;

use super::Event;
use super::config::StandbysSection;
use crate::server::peer_log::peer_log;
use keeper::Keeper;
pub(super) use past::{Base, Past};
use record::Kept;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidelock_shard::LogIndex;
use tidelock_shard::link::Origin;
use tidelock_shard_logs::{Cut, Promoted, StandbyStatus, Store, StoreStatus};
use tidelock_standbys::{ConnectionId, Event as StandbyEvent, ShardWal, Standbys};
use tidelock_storage::files::{Files, OpenFile};
use tidelock_wal::Lsn;
use tokio::runtime::Handle;
use tokio::sync::{Notify, RwLock, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

/// Connections of standbys and views of one store at once.
const CONNECTIONS_MAX: usize = 8192;
/// A keeper has looked at its standby by then, unless that hangs.
const LOOKS_WITHIN: Duration = Duration::from_secs(5);
/// Orders that wait for a keeper.
const ORDERS_MAX: usize = 16;

/// News of a shard from the store's thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Known {
    /// The log that it has.
    origin: Option<Origin>,
    /// A host is connected over which the primary can be copied.
    is_led: bool,
    /// All logs are closed.
    is_recovered: bool,
}

/// The end of a shard's log in a recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// In the final cut, to which the standby has come, or will come soon.
    Final(Lsn),
    /// In an earlier one, which is reached from a kept copy.
    Past(Lsn),
}

/// An order to a keeper: promote the standby.
struct Promote {
    at: At,
    done: oneshot::Sender<Result<Promoted, String>>,
}

/// State that a keeper shares with the server.
struct Shared {
    shard: u16,
    /// Directory of everything of the shard.
    dir: PathBuf,
    hub: Standbys<OpenFile>,
    status: Mutex<StandbyStatus>,
    /// Kept copies, the oldest first.
    kept: Mutex<Vec<Kept>>,
    /// Held by whoever needs a kept copy.
    holds: Arc<RwLock<()>>,
    /// The keeper has looked at the standby once.
    has_looked: watch::Sender<bool>,
}

impl Shared {
    /// Holds the newest kept copy from which a cut can be reached.
    fn base(&self, cut: Lsn) -> Result<Base, String> {
        let hold = Arc::clone(&self.holds).try_read_owned();
        let _hold = hold.map_err(|_| "a kept copy is being removed: try again")?;
        let kept = lock(&self.kept);
        let usable = kept.iter().rev().find(|kept| kept.status.usable_from.0 <= cut.0);
        let base = usable.ok_or_else(|| match kept.first() {
            Some(oldest) => format!(
                "the oldest kept copy can be used from {} on, and the cut is at {cut}: see `keep_copies`",
                Lsn(oldest.status.usable_from.0)
            ),
            None => "no copy of it is kept: see `keep_copies`".to_owned(),
        })?;
        let (kept, dir, hub) = (base.server.clone(), self.dir.clone(), self.hub.clone());
        Ok(Base { kept, dir, shard: self.shard, hub, _hold })
    }
}

/// A keeper, from outside.
struct KeeperHandle {
    known: watch::Sender<Known>,
    orders: mpsc::Sender<Promote>,
    shared: Arc<Shared>,
    task: AbortHandle,
}

/// Keepers by number of their shard.
type Keepers = Arc<Mutex<BTreeMap<u16, KeeperHandle>>>;

/// The standbys of a store, from outside.
#[derive(Clone, Default)]
pub(super) struct StandbysHandle(Keepers);

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StandbysHandle {
    /// Adds what standbys do to a store's status.
    pub(super) async fn describe(&self, status: &mut StoreStatus) {
        for (shard, of) in (0..).zip(&mut status.shards) {
            let Some(shared) = self.shared(shard).await else { continue };
            of.standby = Some(lock(&shared.status).clone());
        }
    }

    /// Knowledge of a keeper, once it has looked.
    async fn shared(&self, shard: u16) -> Option<Arc<Shared>> {
        let shared = lock(&self.0).get(&shard).map(|keeper| Arc::clone(&keeper.shared))?;
        let mut looked = shared.has_looked.subscribe();
        let _ = timeout(LOOKS_WITHIN, looked.wait_for(|looked| *looked)).await;
        Some(shared)
    }

    /// Promotes all standbys: at the end of what their shards may apply, or at the ends of an earlier cut.
    pub(super) async fn promote(&self, status: &StoreStatus, past: Option<&Cut>) {
        let mut promotions = JoinSet::new();
        for (nth, of) in status.shards.iter().enumerate() {
            let past = past.and_then(|cut| cut.ends.get(nth)).map(|end| At::Past(Lsn(end.0)));
            let at = past.unwrap_or(At::Final(Lsn(of.apply_to.0)));
            let orders = lock(&self.0).get(&(nth as u16)).map(|keeper| keeper.orders.clone());
            let Some(orders) = orders else { continue };
            promotions.spawn(async move {
                let (done, promoted) = oneshot::channel();
                if orders.send(Promote { at, done }).await.is_ok() {
                    // Its status says how it ended.
                    let _ = promoted.await;
                }
            });
        }
        promotions.join_all().await;
    }

    /// Holds a kept copy of a shard from which a cut can be reached.
    pub(super) async fn base(&self, shard: u16, cut: LogIndex) -> Result<Base, String> {
        let missing = "there are no standbys of it here: `[store.standbys]` runs them";
        self.shared(shard).await.ok_or(missing)?.base(Lsn(cut.0))
    }
}

/// The standbys of a store, on its thread.
pub(super) struct StoreStandbys {
    store: String,
    settings: Arc<StandbysSection>,
    serves: bool,
    hub: Standbys<OpenFile>,
    asked: Arc<Notify>,
    /// Names of standbys that are connected, and why copies must be made anew, by name.
    connected: Arc<Connected>,
    keepers: Keepers,
    runtime: Handle,
    events: mpsc::Sender<Event>,
}

/// Words of the hub about connections, by the name that each gave.
#[derive(Default)]
struct Connected {
    names: Mutex<BTreeMap<ConnectionId, String>>,
    unusable: Mutex<BTreeMap<String, String>>,
}

impl Connected {
    fn hears(&self, store: &str, id: ConnectionId, shard: u16, event: &StandbyEvent) {
        let mut names = lock(&self.names);
        match event {
            StandbyEvent::LoggedIn { name } => {
                tracing::debug!(store, shard, connection = id.0, name, "a standby has connected");
                names.insert(id, name.clone());
            }
            StandbyEvent::Ended(failure) => {
                let name = names.remove(&id).unwrap_or_default();
                if failure.needs_copy() {
                    peer_log!(STANDBYS, warn, store, shard, name, %failure, "a standby gets nothing more");
                    let mut unusable = lock(&self.unusable);
                    if unusable.len() < CONNECTIONS_MAX {
                        unusable.insert(name, failure.to_string());
                    }
                } else {
                    tracing::debug!(store, shard, name, %failure, "a standby has gone");
                }
            }
            _ => {}
        }
    }

    /// Takes the reason why a standby's copy must be made anew.
    fn take_unusable(&self, name: &str) -> Option<String> {
        lock(&self.unusable).remove(name)
    }
}

impl StoreStandbys {
    pub(super) fn new(
        store: &str,
        settings: StandbysSection,
        serves: bool,
        handle: &StandbysHandle,
        runtime: Handle,
        events: mpsc::Sender<Event>,
    ) -> Self {
        let (asked, connected) = (Arc::new(Notify::new()), Arc::new(Connected::default()));
        let (wake, hears, name) = (Arc::clone(&asked), Arc::clone(&connected), store.to_owned());
        let hub = Standbys::new(
            CONNECTIONS_MAX,
            move || wake.notify_one(),
            move |id, shard, event| hears.hears(&name, id, shard, event),
        );
        Self {
            store: store.to_owned(),
            settings: Arc::new(settings),
            serves,
            hub,
            asked,
            connected,
            keepers: Arc::clone(&handle.0),
            runtime,
            events,
        }
    }

    /// Waits until a standby needs a reader of the journal.
    pub(super) fn asked(&self) -> Arc<Notify> {
        Arc::clone(&self.asked)
    }

    /// Standbys and their keepers are told how the store stands.
    pub(super) fn tend(&self, store: &Store<Files>) {
        let mut keepers = lock(&self.keepers);
        let is_recovered = store.log().final_watermark().is_some();
        for shard in 0..store.log().shards() {
            // A log that PostgreSQL has not written has no standbys.
            let Some(origin) = store.origin_of(shard).filter(|of| of.version > 0) else { continue };
            let keeper = keepers.entry(shard).or_insert_with(|| self.keeper(shard, store));
            let is_led = store.is_led(shard);
            keeper.known.send_if_modified(|known| {
                let is_new = known.origin.as_ref() != Some(origin);
                if is_new && let Ok(wal) = ShardWal::of(origin) {
                    self.hub.set_wal(shard, wal);
                }
                if !is_new && (known.is_led, known.is_recovered) == (is_led, is_recovered) {
                    return false;
                }
                *known = Known { origin: Some(origin.clone()), is_led, is_recovered };
                true
            });
        }
        drop(keepers);
        self.hub.tend(store.log());
    }

    fn keeper(&self, shard: u16, store: &Store<Files>) -> KeeperHandle {
        let (known, knows) = watch::channel(Known::default());
        let (orders, ordered) = mpsc::channel(ORDERS_MAX);
        let name = store.name_of(shard).to_owned();
        let shared = Arc::new(Shared {
            shard,
            dir: self.settings.dir.join(&name),
            hub: self.hub.clone(),
            status: Mutex::default(),
            kept: Mutex::default(),
            holds: Arc::default(),
            has_looked: watch::Sender::default(),
        });
        let (store, settings) = (self.store.clone(), Arc::clone(&self.settings));
        let keeper = Keeper::new(
            keeper::Of { store, name, settings, serves: self.serves },
            Arc::clone(&shared),
            Arc::clone(&self.connected),
            self.events.clone(),
            knows,
        );
        let task = self.runtime.spawn(keeper.run(ordered)).abort_handle();
        KeeperHandle { known, orders, shared, task }
    }

    /// Ends the keepers. PostgreSQL runs on.
    pub(super) fn stop(&self) {
        let keepers = std::mem::take(&mut *lock(&self.keepers));
        keepers.into_values().for_each(|keeper| keeper.task.abort());
    }
}
