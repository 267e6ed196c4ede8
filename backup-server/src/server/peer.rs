//! The server as the connection of one peer sees it: the peer's certificate, its place, the groups, bookmarks.

use super::bookmarks;
use super::budget::Slot;
use super::inbox::Event;
use super::owner::OwnerHandle;
use super::peer_log::peer_log;
use super::registry::{Registry, SpawnError};
use std::sync::Arc;
use tidelock_protocol::ids::Channel;
use tidelock_protocol::message::{Bookmark, BookmarkPoint, RefusalKind};
use tidelock_replica::connection::Server;
use tidelock_replica::connection::channels::Refusal;
use tidelock_replica::connection::room::InputRoom;
use tidelock_replica::group::{ConnectionId, Link};
use tidelock_replica::group_loop::HostEvent;
use tidelock_tls::PeerIdentity;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// The channel and the number of a bookmark, and its end.
pub(super) type Bookmarked = (Channel, u64, Result<BookmarkPoint, String>);

/// The server, as one connection sees it.
pub(super) struct ServerOfPeer {
    pub(super) id: ConnectionId,
    /// `None` on a plaintext link.
    pub(super) peer: Option<PeerIdentity>,
    pub(super) slot: Slot,
    pub(super) registry: Arc<Registry>,
    /// Given up with the connection.
    pub(super) bookmarks: JoinSet<()>,
    pub(super) set: mpsc::UnboundedSender<Bookmarked>,
}

impl Server for ServerOfPeer {
    type Group = OwnerHandle;

    fn speaks_for(&self, host: &str) -> Result<(), String> {
        match &self.peer {
            Some(peer) if !peer.speaks_for(host) => Err(peer.names().join(", ")),
            _ => Ok(()),
        }
    }

    fn enter(&mut self, host: &str, software: &str) -> Result<(), Refusal> {
        let is_listed = self.registry.config().is_listed_host(host);
        // A certificate that speaks for several hosts has one share.
        let known_as = self.peer.as_ref().map_or(host, PeerIdentity::name);
        let slot = self.registry.connections().host(known_as, is_listed);
        let reason = "there are connections of too many hosts already";
        self.slot = slot.ok_or_else(|| (RefusalKind::Quota, reason.to_owned()))?;
        peer_log!(HOSTS, info, host, software, "host connected");
        Ok(())
    }

    fn group(&mut self, name: &str, host: &str) -> Result<OwnerHandle, Refusal> {
        self.registry.get_or_spawn(name, Some(host)).map_err(|error| match &error {
            SpawnError::None(none) => (none.kind(), error.to_string()),
            SpawnError::Io(_) => (RefusalKind::Stopping, error.to_string()),
        })
    }

    fn is_same(one: &OwnerHandle, other: &OwnerHandle) -> bool {
        Arc::ptr_eq(&one.inbox, &other.inbox)
    }

    fn is_closed(group: &OwnerHandle) -> bool {
        group.inbox.is_closed()
    }

    fn room(group: &OwnerHandle) -> InputRoom {
        group.inbox.room().clone()
    }

    fn give(&mut self, group: &OwnerHandle, event: HostEvent) -> bool {
        group.inbox.push(Event::Host(event))
    }

    fn bookmark(&mut self, channel: Channel, group: &OwnerHandle, host: &str, wanted: Bookmark) {
        let link = Link { connection: self.id, channel };
        let (registry, group) = (Arc::clone(&self.registry), Arc::clone(&group.group));
        let (host, id, set) = (host.to_owned(), wanted.id, self.set.clone());
        while self.bookmarks.try_join_next().is_some() {}
        self.bookmarks.spawn(async move {
            let outcome = bookmarks::set(&registry, &group, link, host, wanted).await;
            let _ = set.send((channel, id, outcome));
        });
    }
}
