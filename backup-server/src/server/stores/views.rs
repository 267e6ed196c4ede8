//! Views of stores: of each shard a throw-away read-only server, all at one cut.

use super::standbys::{Base, Past};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_protocol::bounds;
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::LogIndex;
use tidelock_shard_logs::Cut;
use tidelock_wal::Lsn;
use tokio::task::JoinSet;

/// Views of stores at once.
const VIEWS_MAX: usize = 16;

/// A view of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreViewStatus {
    /// Its name.
    pub name: String,
    /// The store.
    pub store: String,
    /// The cut: everything up to this effective stamp, and nothing else.
    pub stamp: Hlc,
    /// Its servers.
    pub shards: Vec<ViewedShard>,
}

/// A shard of a view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewedShard {
    /// The shard's name.
    pub name: String,
    /// The end of its log in the cut.
    pub at: LogIndex,
    /// The directory of its server's socket.
    pub socket_dir: PathBuf,
    /// Its port.
    pub port: u16,
}

/// A shard to be viewed.
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) base: Base,
    pub(super) at: LogIndex,
}

enum View {
    /// Its servers are being made.
    Opening,
    Open {
        status: StoreViewStatus,
        servers: Vec<Past>,
    },
}

/// The views of all stores.
#[derive(Default)]
pub(in crate::server) struct StoreViews(Arc<Mutex<BTreeMap<String, View>>>);

impl StoreViews {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, View>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a name for a view that is to be opened.
    pub(super) fn reserve(&self, store: &str, wanted: Option<&str>) -> Result<String, String> {
        let mut views = self.lock();
        if views.len() >= VIEWS_MAX {
            return Err(format!("{VIEWS_MAX} views are open already: close some"));
        }
        let name = match wanted {
            Some(name) if !bounds::is_name(name) => {
                return Err(format!("{name:?} cannot be a view's name"));
            }
            Some(name) => name.to_owned(),
            None => {
                let names = (1..).map(|nth| format!("{store}-{nth}"));
                names.into_iter().find(|name| !views.contains_key(name)).unwrap_or_default()
            }
        };
        if views.contains_key(&name) {
            return Err(format!("there is a view {name} already: choose another name"));
        }
        views.insert(name.clone(), View::Opening);
        Ok(name)
    }

    /// Makes the servers of a view whose name is taken.
    pub(super) async fn open(
        &self,
        name: &str,
        store: &str,
        cut: &Cut,
        wanted: Vec<Wanted>,
    ) -> Result<StoreViewStatus, String> {
        let mut made = JoinSet::new();
        for (nth, Wanted { name: shard, base, at }) in wanted.into_iter().enumerate() {
            let view = format!("view-{name}");
            made.spawn(async move {
                let past = base.at(&view, Lsn(at.0)).await;
                (nth, shard.clone(), at, past.map_err(|fault| format!("shard {shard}: {fault}")))
            });
        }
        let mut made = made.join_all().await;
        made.sort_by_key(|(nth, ..)| *nth);
        let (mut shards, mut servers, mut failed) = (Vec::new(), Vec::new(), None);
        for (_, shard, at, past) in made {
            match past {
                Ok(past) => {
                    let (socket_dir, port) = (past.server.socket_dir(), past.server.settings.port);
                    shards.push(ViewedShard { name: shard, at, socket_dir, port });
                    servers.push(past);
                }
                Err(reason) => failed = Some(reason),
            }
        }
        if let Some(reason) = failed {
            self.lock().remove(name);
            remove(servers).await;
            return Err(reason);
        }
        let (name, store) = (name.to_owned(), store.to_owned());
        let status = StoreViewStatus { name: name.clone(), store, stamp: cut.stamp, shards };
        self.lock().insert(name, View::Open { status: status.clone(), servers });
        Ok(status)
    }

    /// Closes a view. False: there is none of this name.
    pub(in crate::server) async fn close(&self, name: &str) -> bool {
        let view = {
            let mut views = self.lock();
            if !matches!(views.get(name), Some(View::Open { .. })) {
                return false;
            }
            views.remove(name)
        };
        if let Some(View::Open { servers, .. }) = view {
            remove(servers).await;
        }
        true
    }

    /// The views that are open.
    pub(in crate::server) fn all(&self) -> Vec<StoreViewStatus> {
        let of = |view: &View| match view {
            View::Opening => None,
            View::Open { status, .. } => Some(status.clone()),
        };
        self.lock().values().filter_map(of).collect()
    }

    /// Closes all of them.
    pub(in crate::server) async fn close_all(&self) {
        let names: Vec<_> = self.all().into_iter().map(|view| view.name).collect();
        for name in names {
            self.close(&name).await;
        }
    }
}

async fn remove(servers: Vec<Past>) {
    for mut past in servers {
        if let Err(fault) = past.remove().await {
            tracing::error!("a server of a view cannot be removed: {fault}");
        }
    }
}
