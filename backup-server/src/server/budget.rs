//! Room for connections ([`Places`]), shared by their tasks.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_replica::places::{Given, Place, Places};
use tokio::sync::Notify;

/// All connections.
#[derive(Debug, Default)]
pub struct Connections(Mutex<Places<Arc<Notify>>>);

/// The place of one connection. Free again when it is dropped.
#[derive(Debug)]
pub struct Slot {
    connections: Arc<Connections>,
    place: Place,
    evicted: Arc<Notify>,
}

impl Slot {
    /// Waits until another connection needs the place: this one must end.
    pub fn evicted(&self) -> impl Future<Output = ()> + Send + use<> {
        let evicted = Arc::clone(&self.evicted);
        async move { evicted.notified().await }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.lock().leave(&self.place);
    }
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Places<Arc<Notify>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slot(self: &Arc<Self>, (place, old): Given<Arc<Notify>>, evicted: Arc<Notify>) -> Slot {
        if let Some(old) = old {
            old.notify_one();
        }
        Slot { connections: Arc::clone(self), place, evicted }
    }

    /// A peer has connected from this address.
    #[must_use]
    pub fn stranger(self: &Arc<Self>, address: IpAddr) -> Slot {
        let evicted = Arc::new(Notify::new());
        let given = self.lock().stranger(address, Arc::clone(&evicted));
        self.slot(given, evicted)
    }

    /// A peer has said that it is this host. `None`: there is no room for it.
    #[must_use]
    pub fn host(self: &Arc<Self>, host: &str, is_listed: bool) -> Option<Slot> {
        let evicted = Arc::new(Notify::new());
        let given = self.lock().host(host, is_listed, Arc::clone(&evicted))?;
        Some(self.slot(given, evicted))
    }
}
