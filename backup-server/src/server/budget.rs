//! Room for connections. Nobody takes it from another: a peer that wants more than its share loses its own oldest
//! connection.
//!
//! | who | share |
//! |---|---|
//! | strangers: until TLS and the hello have said who they are | [`STRANGERS_MAX`] at once; beyond, the oldest ends of those whose address has most of them. A network of 64 bits counts as one address of IPv6 |
//! | one host | [`PER_HOST_MAX`]; beyond, its oldest ends |
//! | all hosts | [`HOSTS_MAX`]; beyond, the host that has most loses its oldest; hosts that are listed in the configuration come before all others |

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Connections of peers that have not said who they are.
pub const STRANGERS_MAX: usize = 64;
/// Connections of one host: a daemon has one, and some that were cut off may not have ended yet.
pub const PER_HOST_MAX: usize = 8;
/// Connections of all hosts.
pub const HOSTS_MAX: usize = 1024;

/// All connections.
#[derive(Debug, Default)]
pub struct Connections {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last_id: u64,
    strangers: BTreeMap<u64, (IpAddr, Arc<Notify>)>,
    hosts: BTreeMap<String, OfHost>,
    in_use: usize,
}

#[derive(Debug, Default)]
struct OfHost {
    is_listed: bool,
    /// Oldest first.
    connections: BTreeMap<u64, Arc<Notify>>,
}

/// The place of one connection. Free again when it is dropped.
#[derive(Debug)]
pub struct Slot {
    connections: Arc<Connections>,
    id: u64,
    /// `None`: a stranger's.
    host: Option<String>,
    evicted: Arc<Notify>,
}

impl Slot {
    /// Waits until another connection needs the place: this one must end.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        match &self.host {
            None => drop(state.strangers.remove(&self.id)),
            Some(host) => state.leave(host, self.id),
        }
    }
}

impl State {
    fn leave(&mut self, host: &str, id: u64) {
        let Some(of) = self.hosts.get_mut(host) else { return };
        if of.connections.remove(&id).is_some() {
            self.in_use -= 1;
        }
        if of.connections.is_empty() {
            self.hosts.remove(host);
        }
    }

    fn evict_oldest_of(&mut self, host: &str) {
        let Some(of) = self.hosts.get_mut(host) else { return };
        if let Some((_, evicted)) = of.connections.pop_first() {
            evicted.notify_one();
            self.in_use -= 1;
        }
        if of.connections.is_empty() {
            self.hosts.remove(host);
        }
    }

    /// The host that loses a connection to one that has `own`. `None`: nobody has more than its share.
    fn victim(&self, own: usize, is_listed: bool) -> Option<String> {
        let of = |only: bool| {
            let hosts = self.hosts.iter().filter(move |(_, of)| only != of.is_listed);
            hosts.max_by_key(|(_, of)| of.connections.len())
        };
        let (unlisted, listed) = (of(true), of(false));
        let has_more = |(_, of): &(&String, &OfHost)| of.connections.len() > own + 1;
        let victim = match is_listed {
            true => unlisted.or(listed.filter(has_more)),
            false => unlisted.filter(has_more),
        };
        victim.map(|(host, _)| host.clone())
    }
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer has connected from this address.
    #[must_use]
    pub fn stranger(self: &Arc<Self>, address: IpAddr) -> Slot {
        let mut state = self.lock();
        if state.strangers.len() >= STRANGERS_MAX {
            let mut counts = BTreeMap::<IpAddr, usize>::new();
            state.strangers.values().for_each(|(of, _)| *counts.entry(*of).or_default() += 1);
            let most = counts.values().max().copied();
            let oldest =
                state.strangers.iter().find(|(_, (of, _))| counts.get(of).copied() == most);
            if let Some(id) = oldest.map(|(id, _)| *id)
                && let Some((_, evicted)) = state.strangers.remove(&id)
            {
                evicted.notify_one();
            }
        }
        let (id, evicted) = (state.next_id(), Arc::new(Notify::new()));
        state.strangers.insert(id, (share_of(address), Arc::clone(&evicted)));
        Slot { connections: Arc::clone(self), id, host: None, evicted }
    }

    /// A peer has said that it is this host. `None`: there is no room for it.
    #[must_use]
    pub fn host(self: &Arc<Self>, host: &str, is_listed: bool) -> Option<Slot> {
        let mut state = self.lock();
        let own = state.hosts.get(host).map_or(0, |of| of.connections.len());
        if own >= PER_HOST_MAX {
            state.evict_oldest_of(host);
        } else if state.in_use >= HOSTS_MAX {
            let victim = state.victim(own, is_listed)?;
            state.evict_oldest_of(&victim);
        }
        let (id, evicted) = (state.next_id(), Arc::new(Notify::new()));
        let of = state.hosts.entry(host.to_owned()).or_default();
        of.is_listed = is_listed;
        of.connections.insert(id, Arc::clone(&evicted));
        state.in_use += 1;
        Some(Slot { connections: Arc::clone(self), id, host: Some(host.to_owned()), evicted })
    }
}

/// The address that a peer is counted under: who has one of IPv6 has all of its network.
fn share_of(address: IpAddr) -> IpAddr {
    const NETWORK: u128 = !0 << 64;
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() & NETWORK).into()),
        address => address,
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    async fn is_evicted(slot: &Slot) -> bool {
        tokio::time::timeout(Duration::ZERO, slot.evicted()).await.is_ok()
    }

    async fn evicted(slots: &[Slot]) -> Vec<usize> {
        let mut evicted = Vec::new();
        for (i, slot) in slots.iter().enumerate() {
            if is_evicted(slot).await {
                evicted.push(i);
            }
        }
        evicted
    }

    #[tokio::test]
    async fn strangers_of_one_address_push_out_each_other() {
        let all = Arc::new(Connections::default());
        let address = |n: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 0, n));
        let quiet = all.stranger(address(1));
        let loud: Vec<_> = (0..STRANGERS_MAX + 10).map(|_| all.stranger(address(2))).collect();
        assert_eq!(evicted(&loud).await, (0..11).collect::<Vec<_>>());
        assert!(!is_evicted(&quiet).await);
        drop(loud);
        assert_eq!(all.lock().strangers.len(), 1);
    }

    #[tokio::test]
    async fn strangers_with_many_addresses_push_out_the_oldest() {
        let all = Arc::new(Connections::default());
        let first = all.stranger("ffff::1".parse().unwrap());
        let loud: Vec<_> = (0..STRANGERS_MAX as u16)
            .map(|n| all.stranger(format!("2001:db8:0:1::{n:x}").parse().unwrap()))
            .collect();
        assert_eq!(evicted(&loud).await, [0], "they have one network");
        let loud: Vec<_> = (0..STRANGERS_MAX as u16)
            .map(|n| all.stranger(format!("2001:db8:0:{n:x}::1").parse().unwrap()))
            .collect();
        let last = all.stranger("ffff:1::1".parse().unwrap());
        assert_eq!(evicted(&loud).await, [0]);
        assert!(!is_evicted(&last).await);
        drop(first);
    }

    #[tokio::test]
    async fn one_host_pushes_out_only_itself() {
        let all = Arc::new(Connections::default());
        let quiet = all.host("quiet", false).unwrap();
        let loud: Vec<_> = (0..2000).map(|_| all.host("loud", false).unwrap()).collect();
        assert_eq!(evicted(&loud).await, (0..2000 - PER_HOST_MAX).collect::<Vec<_>>());
        assert!(!is_evicted(&quiet).await);
        assert_eq!(all.lock().in_use, 1 + PER_HOST_MAX);
        drop(loud);
        assert_eq!(all.lock().in_use, 1);
    }

    #[tokio::test]
    async fn listed_hosts_get_in_when_all_is_full() {
        let all = Arc::new(Connections::default());
        let others: Vec<_> =
            (0..HOSTS_MAX).map(|n| all.host(&format!("h{n}"), false).unwrap()).collect();
        assert!(all.host("one-more", false).is_none(), "each has one");
        let _listed = all.host("listed", true).unwrap();
        assert_eq!(evicted(&others).await.len(), 1);
        assert!(all.host("one-more", false).is_none());
    }
}
