//! Places of connections. Nobody takes one from another: a peer that wants more than its share loses its own oldest
//! connection.
//!
//! | who | share |
//! |---|---|
//! | strangers: until TLS and the hello have said who they are | [`STRANGERS_MAX`] at once; beyond, the oldest ends of those whose address has most of them. A network of 64 bits counts as one address of IPv6 |
//! | one host | [`PER_HOST_MAX`]; beyond, its oldest ends |
//! | all hosts | [`HOSTS_MAX`]; beyond, the host that has most loses its oldest; hosts that are listed in the configuration come before all others |

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Connections of peers that have not said who they are.
pub const STRANGERS_MAX: usize = 64;
/// Connections of one host: a daemon has one, and some that were cut off may not have ended yet.
pub const PER_HOST_MAX: usize = 8;
/// Connections of all hosts.
pub const HOSTS_MAX: usize = 1024;

/// The places. `C` is what ends the connection in one.
#[derive(Debug)]
pub struct Places<C> {
    last_id: u64,
    strangers: BTreeMap<u64, (IpAddr, C)>,
    hosts: BTreeMap<String, OfHost<C>>,
    in_use: usize,
}

#[derive(Debug)]
struct OfHost<C> {
    is_listed: bool,
    /// Oldest first.
    connections: BTreeMap<u64, C>,
}

/// The place of one connection.
#[derive(Clone, Debug)]
pub struct Place {
    id: u64,
    /// `None`: a stranger's.
    host: Option<String>,
}

/// A place, and the connection that has to end for it.
pub type Given<C> = (Place, Option<C>);

impl<C> Default for Places<C> {
    fn default() -> Self {
        Self { last_id: 0, strangers: BTreeMap::new(), hosts: BTreeMap::new(), in_use: 0 }
    }
}

impl<C> Places<C> {
    /// A peer has connected from this address.
    pub fn stranger(&mut self, address: IpAddr, connection: C) -> Given<C> {
        let mut evicted = None;
        if self.strangers.len() >= STRANGERS_MAX {
            let mut counts = BTreeMap::<IpAddr, usize>::new();
            self.strangers.values().for_each(|(of, _)| *counts.entry(*of).or_default() += 1);
            let most = counts.values().max().copied();
            let mut all = self.strangers.iter();
            let oldest = all.find(|(_, (of, _))| counts.get(of).copied() == most);
            let id = oldest.map(|(id, _)| *id);
            evicted = id.and_then(|id| self.strangers.remove(&id)).map(|(_, of)| of);
        }
        let id = self.next_id();
        self.strangers.insert(id, (share_of(address), connection));
        (Place { id, host: None }, evicted)
    }

    /// A peer has said that it is this host. `None`: there is no room for it.
    pub fn host(&mut self, host: &str, is_listed: bool, connection: C) -> Option<Given<C>> {
        let own = self.hosts.get(host).map_or(0, |of| of.connections.len());
        let evicted = if own >= PER_HOST_MAX {
            self.evict_oldest_of(host)
        } else if self.in_use >= HOSTS_MAX {
            let victim = self.victim(own, is_listed)?;
            self.evict_oldest_of(&victim)
        } else {
            None
        };
        let id = self.next_id();
        let new = || OfHost { is_listed, connections: BTreeMap::new() };
        let of = self.hosts.entry(host.to_owned()).or_insert_with(new);
        of.is_listed = is_listed;
        of.connections.insert(id, connection);
        self.in_use += 1;
        Some((Place { id, host: Some(host.to_owned()) }, evicted))
    }

    /// A connection has ended.
    pub fn leave(&mut self, place: &Place) {
        match &place.host {
            None => drop(self.strangers.remove(&place.id)),
            Some(host) => drop(self.leave_host(host, |_| Some(place.id))),
        }
    }

    fn evict_oldest_of(&mut self, host: &str) -> Option<C> {
        self.leave_host(host, |of| of.connections.keys().next().copied())
    }

    fn leave_host(&mut self, host: &str, which: impl Fn(&OfHost<C>) -> Option<u64>) -> Option<C> {
        let of = self.hosts.get_mut(host)?;
        let left = which(of).and_then(|id| of.connections.remove(&id));
        self.in_use -= usize::from(left.is_some());
        if of.connections.is_empty() {
            self.hosts.remove(host);
        }
        left
    }

    /// The host that loses a connection to one that has `own`. `None`: nobody has more than its share.
    fn victim(&self, own: usize, is_listed: bool) -> Option<String> {
        let of = |only: bool| {
            let hosts = self.hosts.iter().filter(move |(_, of)| only != of.is_listed);
            hosts.max_by_key(|(_, of)| of.connections.len())
        };
        let (unlisted, listed) = (of(true), of(false));
        let has_more = |(_, of): &(&String, &OfHost<C>)| of.connections.len() > own + 1;
        let victim = match is_listed {
            true => unlisted.or(listed.filter(has_more)),
            false => unlisted.filter(has_more),
        };
        victim.map(|(host, _)| host.clone())
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    /// Numbers of those that had to end for so many strangers.
    fn strangers(
        places: &mut Places<u16>,
        address: impl Fn(u16) -> IpAddr,
        count: u16,
    ) -> Vec<u16> {
        (0..count).filter_map(|n| places.stranger(address(n), n).1).collect()
    }

    #[test]
    fn strangers_of_one_address_push_out_each_other() {
        let mut all = Places::default();
        let address = |n: u8| IpAddr::V4(Ipv4Addr::new(10, 0, 0, n));
        let (quiet, _) = all.stranger(address(1), 9999);
        let loud = strangers(&mut all, |_| address(2), STRANGERS_MAX as u16 + 10);
        assert_eq!(loud, (0..11).collect::<Vec<_>>());
        all.leave(&quiet);
        assert_eq!(all.strangers.len(), STRANGERS_MAX - 1);
    }

    #[test]
    fn strangers_with_many_addresses_push_out_the_oldest() {
        let mut all = Places::default();
        all.stranger("ffff::1".parse().unwrap(), 9999);
        let of_one = |n| format!("2001:db8:0:1::{n:x}").parse().unwrap();
        assert_eq!(strangers(&mut all, of_one, STRANGERS_MAX as u16), [0], "they have one network");
        let of_many = |n| format!("2001:db8:0:{n:x}::1").parse().unwrap();
        strangers(&mut all, of_many, STRANGERS_MAX as u16);
        let (_, evicted) = all.stranger("ffff:1::1".parse().unwrap(), 9998);
        assert_eq!(evicted, Some(0), "the oldest of them");
    }

    #[test]
    fn one_host_pushes_out_only_itself() {
        let mut all = Places::default();
        all.host("quiet", false, 9999).unwrap();
        let loud: Vec<_> = (0..2000).map(|n| all.host("loud", false, n).unwrap()).collect();
        let evicted: Vec<_> = loud.iter().filter_map(|(_, evicted)| *evicted).collect();
        assert_eq!(evicted, (0..2000 - PER_HOST_MAX as i32).collect::<Vec<_>>());
        assert_eq!(all.in_use, 1 + PER_HOST_MAX);
        loud.iter().for_each(|(place, _)| all.leave(place));
        assert_eq!((all.in_use, all.hosts.len()), (1, 1));
    }

    #[test]
    fn listed_hosts_get_in_when_all_is_full() {
        let mut all = Places::default();
        for n in 0..HOSTS_MAX {
            let (_, evicted) = all.host(&format!("h{n}"), false, n).unwrap();
            assert_eq!(evicted, None);
        }
        assert!(all.host("one-more", false, 9999).is_none(), "each has one");
        let (_, evicted) = all.host("listed", true, 9998).unwrap();
        assert!(evicted.is_some());
        assert!(all.host("one-more", false, 9999).is_none());
    }
}
