//! A store at the backup: its logs, its shape on record, and the connections of its primary hosts ([`tidelock_shard::link`]).
//!
//! ```text
//!  frames of a host ─▶ shape, origin, plausible stamps ─▶ StoreLog ─ durable ─▶ Reply, Progress
//!                            │ breaks a rule                  └─▶ Advanced, Final: standbys
//!                            └─▶ Refused, and the connection ends
//! ```
//!
//! An agent's entries are taken only once it has said which log they are of, and only as long as that is the one on record: a
//! server that was replaced may go on writing, and its log is another one from there on.

use crate::log::{Agent, Event, Limits, Recovery, StoreError, StoreLog};
use crate::manifest::Manifest;
use crate::status::{ShardStatus, StoreStatus};
use std::collections::BTreeMap;
use tidelock_protocol::bounds::Plausible;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Channel;
use tidelock_protocol::message::RefusalKind;
use tidelock_shard::link::{Origin, StoreFrame, StoreMessage, Undecoded, decode};
use tidelock_shard::{Backup, Tunnel};
use tidelock_storage::Storage;
use tidelock_store::journal::{Durable, JournalError, Options, Position, SyncJob, TornTail};

/// The journal's directory in that of the store.
const JOURNAL: &str = "journal";
/// Tunnels of a connection at once.
const TUNNELS_MAX: usize = 16;

/// A connection of a primary host, as the caller numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link(pub u64);

/// A tunnel to a shard's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TunnelId {
    link: Link,
    number: u32,
}

/// Why a connection ends: for programs, and for people.
pub type Refusal = (RefusalKind, String);

/// Something that the caller has to carry out.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A message for a host.
    Send {
        /// Its connection.
        link: Link,
        /// The shard; 0 if the message is about none.
        channel: Channel,
        /// The message.
        message: StoreMessage,
    },
    /// The host is to be told why its connection ends. It is forgotten here already.
    End {
        /// Its connection.
        link: Link,
        /// The cause.
        why: Refusal,
    },
    /// Standbys may be given more.
    Advanced(Hlc),
    /// All logs are closed: this is the final watermark.
    Final(Hlc),
    /// Something has happened in a tunnel.
    Tunnel(TunnelId, TunnelEvent),
}

/// An event of a tunnel, for whoever has opened it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TunnelEvent {
    /// Bytes of the shard's server.
    Data(bytes::Bytes),
    /// More may be sent.
    Room,
    /// End of the tunnel; the reason, if it is not the end of the bytes.
    Closed(Option<String>),
}

/// A host that is connected.
#[derive(Debug)]
struct Host {
    name: String,
    shards: BTreeMap<u16, Led>,
    tunnels: BTreeMap<u32, (u16, Tunnel)>,
    next_tunnel: u32,
}

/// A shard that a host ships.
#[derive(Debug, Default)]
struct Led {
    /// The log that it has stated.
    origin: Option<Origin>,
    stands: Option<String>,
}

/// A store.
#[derive(Debug)]
pub struct Store<S: Storage> {
    storage: S,
    manifest: Manifest,
    log: StoreLog<S>,
    hosts: BTreeMap<Link, Host>,
    plausible: Plausible,
    outputs: Vec<Output>,
    /// Watermark and updates that hosts were told.
    told: (Hlc, Hlc),
    /// When a host was heard last.
    heard_ms: Option<u64>,
}

fn invalid(reason: impl ToString) -> Refusal {
    (RefusalKind::Invalid, reason.to_string())
}

impl<S: Storage> Store<S> {
    /// Makes a new store. `clock_bound_ms`: stamps may be ahead of the backup's clock by so much.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn create(
        storage: S,
        name: &str,
        shards: &[String],
        options: Options,
        limits: Limits,
        clock_bound_ms: u64,
    ) -> Result<Self, StoreError> {
        let manifest = Manifest::new(name, shards);
        let log = StoreLog::create(storage.clone(), JOURNAL, shards.len() as u16, options, limits)?;
        // Last: without it there is no store, and another host may name its shards.
        manifest.write(&storage)?;
        Ok(Self::of(storage, manifest, log, clock_bound_ms))
    }

    /// Opens a store. `None`: there is none in that directory.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub fn open(
        storage: S,
        options: Options,
        limits: Limits,
        clock_bound_ms: u64,
    ) -> Result<Option<(Self, Option<TornTail>)>, StoreError> {
        let Some(manifest) = Manifest::read(&storage)? else { return Ok(None) };
        let (floor, doubts) = (Position::default(), manifest.doubts.clone());
        let opened = StoreLog::open(storage.clone(), JOURNAL, floor, options, limits, doubts);
        let (mut log, torn) = opened?;
        let (named, known) = (manifest.shards.len(), usize::from(log.shards()));
        if named < known {
            return Err(StoreError::Shards { named, known });
        }
        // The server has stopped between the two.
        if named > known {
            log.set_shards(named as u16)?;
        }
        Ok(Some((Self::of(storage, manifest, log, clock_bound_ms), torn)))
    }

    fn of(storage: S, manifest: Manifest, log: StoreLog<S>, clock_bound_ms: u64) -> Self {
        let plausible = Plausible::of_hosts(clock_bound_ms, log.updated());
        let told = (log.watermark().unwrap_or_default(), log.updated());
        let hosts = BTreeMap::new();
        let outputs = Vec::new();
        Self { storage, manifest, log, hosts, plausible, outputs, told, heard_ms: None }
    }

    /// A host has said hello, and may speak for the store. It names all shards.
    ///
    /// # Errors
    /// Its shards are others, or cannot be kept; the connection must end.
    pub fn connected(&mut self, link: Link, host: &str, shards: &[String]) -> Result<(), Refusal> {
        let mut names: Vec<_> = shards.iter().collect();
        names.sort_unstable();
        if names.windows(2).any(|two| two[0] == two[1]) {
            return Err(invalid("two shards have the same name"));
        }
        let known = &self.manifest.shards;
        let both = known.len().min(shards.len());
        if known[..both] != shards[..both] || shards.len() < known.len() {
            let store = &self.manifest.store;
            let reason = format!(
                "store {store} has the shards {}, and {host} has {}: give every host the same list. Shards are added at its end",
                known.join(", "),
                shards.join(", ")
            );
            return Err((RefusalKind::Mismatch, reason));
        }
        if shards.len() > known.len() {
            let mut more = self.manifest.clone();
            more.shards = shards.to_vec();
            self.keep(more)?;
            self.log.set_shards(shards.len() as u16).map_err(invalid)?;
        }
        let name = host.to_owned();
        let (shards, tunnels) = (BTreeMap::new(), BTreeMap::new());
        self.hosts.insert(link, Host { name, shards, tunnels, next_tunnel: 0 });
        self.tell_progress(Some(link));
        Ok(())
    }

    /// Puts the store's shape on record.
    fn keep(&mut self, manifest: Manifest) -> Result<(), Refusal> {
        manifest.write(&self.storage).map_err(|error| {
            let kind = if error.is_full() { RefusalKind::Quota } else { RefusalKind::Damaged };
            (kind, format!("store {} cannot be put on record: {error}", manifest.store))
        })?;
        self.manifest = manifest;
        Ok(())
    }

    /// A connection has ended.
    pub fn lost(&mut self, link: Link) {
        let Some(host) = self.hosts.remove(&link) else { return };
        let reason = format!("the connection of {} has ended", host.name);
        for number in host.tunnels.into_keys() {
            let closed = TunnelEvent::Closed(Some(reason.clone()));
            self.outputs.push(Output::Tunnel(TunnelId { link, number }, closed));
        }
    }

    /// A frame of a host has arrived. `now_ms`: the backup's clock, in milliseconds since the Unix epoch.
    pub fn received(&mut self, link: Link, frame: StoreFrame, now_ms: u64) {
        self.log.set_now(now_ms);
        self.heard_ms = Some(now_ms);
        if let Err(why) = self.take(link, frame, now_ms) {
            self.lost(link);
            self.outputs.push(Output::End { link, why });
        }
    }

    fn take(&mut self, link: Link, frame: StoreFrame, now_ms: u64) -> Result<(), Refusal> {
        if !self.hosts.contains_key(&link) {
            return Ok(());
        }
        match decode(frame) {
            Ok((shard, backup)) => self.backup(link, shard, backup, now_ms),
            Err(Undecoded::Other(channel, message)) => self.message(link, channel, message, now_ms),
            Err(Undecoded::Malformed) => {
                Err(invalid("a record is no entry of the shard that its channel names"))
            }
        }
    }

    fn backup(
        &mut self,
        link: Link,
        shard: u16,
        message: Backup,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let led = self.hosts[&link].shards.get(&shard);
        let Some(Led { origin: Some(origin), .. }) = led else {
            return Err(invalid(format!("shard {shard} has not said which log it ships")));
        };
        if self.manifest.origins.get(&shard) != Some(origin) {
            let name = self.name_of(shard);
            let reason =
                format!("another server was promoted to lead shard {name}: its log is shipped now");
            return Err((RefusalKind::Superseded, reason));
        }
        for entry in &message.entries {
            let judged = self.plausible.hlc("the stamp of an entry", entry.stamp, now_ms);
            judged.map_err(|error| (RefusalKind::Implausible, error.to_string()))?;
        }
        let reply = self.log.received(Agent(link.0), shard, message).map_err(invalid)?;
        if let Some(reply) = reply {
            self.send(link, Channel(shard), StoreMessage::Reply(reply));
        }
        Ok(())
    }

    fn message(
        &mut self,
        link: Link,
        channel: Channel,
        message: StoreMessage,
        now_ms: u64,
    ) -> Result<(), Refusal> {
        match message {
            StoreMessage::AskOrigin => {
                if channel.0 >= self.log.shards() {
                    return Err(invalid(format!("the store has no shard {channel}")));
                }
                if let Some(host) = self.hosts.get_mut(&link) {
                    host.shards.entry(channel.0).or_default();
                }
                let origin = self.manifest.origins.get(&channel.0).cloned();
                self.send(link, channel, StoreMessage::OnRecord { origin });
                Ok(())
            }
            StoreMessage::Origin(origin) => self.origin(link, channel.0, origin),
            StoreMessage::Stands { reason } => {
                let host = self.hosts.get_mut(&link);
                if let Some(led) = host.and_then(|host| host.shards.get_mut(&channel.0)) {
                    led.stands = reason;
                }
                Ok(())
            }
            StoreMessage::Doubt { after, through } => {
                self.doubt(link, channel.0, (after, through), now_ms)
            }
            StoreMessage::Beat { sent_at } => {
                self.send(link, Channel(0), StoreMessage::Beaten { sent_at });
                Ok(())
            }
            StoreMessage::Data { tunnel, .. }
            | StoreMessage::Taken { tunnel, .. }
            | StoreMessage::Close { tunnel, .. } => self.tunnel_says(link, tunnel, message),
            StoreMessage::Hello { .. }
            | StoreMessage::Welcome { .. }
            | StoreMessage::Refused { .. }
            | StoreMessage::OnRecord { .. }
            | StoreMessage::Ask { .. }
            | StoreMessage::Jump { .. }
            | StoreMessage::Reply(_)
            | StoreMessage::Progress { .. }
            | StoreMessage::Beaten { .. }
            | StoreMessage::Open { .. } => Err(invalid("a message that no host sends here")),
        }
    }

    fn origin(&mut self, link: Link, shard: u16, origin: Origin) -> Result<(), Refusal> {
        let standing = self.log.standing(shard);
        let Some(standing) = standing.filter(|_| shard < self.log.shards()) else {
            return Err(invalid(format!("the store has no shard {shard}")));
        };
        let is_new =
            self.manifest.judge(shard, &origin, standing.append.index).map_err(|error| {
                let name = self.name_of(shard);
                (RefusalKind::Mismatch, format!("shard {name}: {error}"))
            })?;
        if is_new {
            let mut manifest = self.manifest.clone();
            manifest.origins.insert(shard, origin.clone());
            self.keep(manifest)?;
        }
        if let Some(host) = self.hosts.get_mut(&link) {
            host.shards.entry(shard).or_default().origin = Some(origin);
        }
        Ok(())
    }

    /// No cut is between these stamps: on record before entries that have them are taken.
    fn doubt(
        &mut self,
        link: Link,
        shard: u16,
        (after, through): (Hlc, Hlc),
        now_ms: u64,
    ) -> Result<(), Refusal> {
        let led = self.hosts[&link].shards.get(&shard);
        if led.is_none_or(|led| led.origin.is_none()) {
            return Err(invalid(format!("shard {shard} has not said which log it ships")));
        }
        let judged = self.plausible.hlc("the end of a time of doubt", through, now_ms);
        judged.map_err(|error| (RefusalKind::Implausible, error.to_string()))?;
        self.log.doubt(after, through);
        if *self.log.doubts() == self.manifest.doubts {
            return Ok(());
        }
        let mut manifest = self.manifest.clone();
        manifest.doubts = self.log.doubts().clone();
        self.keep(manifest)
    }

    /// The name of a shard.
    #[must_use]
    pub fn name_of(&self, shard: u16) -> &str {
        self.manifest.shards.get(usize::from(shard)).map_or("?", String::as_str)
    }

    fn send(&mut self, link: Link, channel: Channel, message: StoreMessage) {
        self.outputs.push(Output::Send { link, channel, message });
    }

    /// The connection over which a shard's server of the log on record is reached.
    fn leader(&self, shard: u16) -> Option<Link> {
        let origin = self.manifest.origins.get(&shard)?;
        let leads = |host: &Host| {
            host.shards.get(&shard).is_some_and(|led| led.origin.as_ref() == Some(origin))
        };
        self.hosts.iter().rev().find(|(_, host)| leads(host)).map(|(link, _)| *link)
    }

    /// True if a host is connected over which a shard's server of the log on record is reached.
    #[must_use]
    pub fn is_led(&self, shard: u16) -> bool {
        self.leader(shard).is_some()
    }

    /// Every shard may be applied as far as its own log is durable ([`StoreLog::ignore_watermark`]).
    pub fn ignore_watermark(&mut self) {
        self.log.ignore_watermark();
    }

    /// Opens a tunnel to a shard's server at the primary site. `None`: no host that leads it is connected, or there are too
    /// many tunnels.
    pub fn open_tunnel(&mut self, shard: u16) -> Option<TunnelId> {
        let link = self.leader(shard)?;
        let host = self.hosts.get_mut(&link).filter(|host| host.tunnels.len() < TUNNELS_MAX)?;
        let number = host.next_tunnel;
        host.next_tunnel = number.checked_add(1)?;
        host.tunnels.insert(number, (shard, Tunnel::default()));
        self.send(link, Channel(shard), StoreMessage::Open { tunnel: number });
        Some(TunnelId { link, number })
    }

    fn tunnel(&mut self, id: TunnelId) -> Option<&mut (u16, Tunnel)> {
        self.hosts.get_mut(&id.link)?.tunnels.get_mut(&id.number)
    }

    /// The most bytes that a tunnel takes now; 0 also of one that is closed.
    #[must_use]
    pub fn tunnel_room(&mut self, id: TunnelId) -> usize {
        self.tunnel(id).map_or(0, |(_, tunnel)| tunnel.may_send())
    }

    /// Sends bytes through a tunnel, no more than it takes.
    pub fn tunnel_send(&mut self, id: TunnelId, data: bytes::Bytes) {
        let Some((shard, tunnel)) = self.tunnel(id) else { return };
        tunnel.sent(data.len());
        let channel = Channel(*shard);
        let message = StoreMessage::Data { tunnel: id.number, data };
        self.send(id.link, channel, message);
    }

    /// Bytes of a tunnel were taken by whoever has opened it.
    pub fn tunnel_taken(&mut self, id: TunnelId, bytes: usize) {
        let Some((shard, tunnel)) = self.tunnel(id) else { return };
        let channel = Channel(*shard);
        if let Some(bytes) = tunnel.take(bytes) {
            let message = StoreMessage::Taken { tunnel: id.number, bytes };
            self.send(id.link, channel, message);
        }
    }

    /// Closes a tunnel.
    pub fn close_tunnel(&mut self, id: TunnelId) {
        let host = self.hosts.get_mut(&id.link);
        let Some((shard, _)) = host.and_then(|host| host.tunnels.remove(&id.number)) else {
            return;
        };
        let message = StoreMessage::Close { tunnel: id.number, reason: None };
        self.send(id.link, Channel(shard), message);
    }

    fn tunnel_says(
        &mut self,
        link: Link,
        number: u32,
        message: StoreMessage,
    ) -> Result<(), Refusal> {
        let id = TunnelId { link, number };
        // A tunnel that was closed here, and the host has not heard.
        let Some((_, tunnel)) = self.tunnel(id) else { return Ok(()) };
        let event = match message {
            StoreMessage::Data { data, .. } => {
                tunnel.received(data.len()).map_err(invalid)?;
                TunnelEvent::Data(data)
            }
            StoreMessage::Taken { bytes, .. } => {
                tunnel.taken(bytes).map_err(invalid)?;
                TunnelEvent::Room
            }
            StoreMessage::Close { reason, .. } => {
                if let Some(host) = self.hosts.get_mut(&link) {
                    host.tunnels.remove(&number);
                }
                TunnelEvent::Closed(reason)
            }
            _ => return Ok(()),
        };
        self.outputs.push(Output::Tunnel(id, event));
        Ok(())
    }

    /// Writes what was taken ([`StoreLog::write`]).
    ///
    /// # Errors
    /// On [`JournalError::Full`] nothing is lost, and the next call tries again.
    pub fn write(&mut self) -> Result<(), StoreError> {
        self.log.write()
    }

    /// Work that makes everything written durable. `None`: there is nothing, or a sync runs.
    pub fn sync_job(&mut self) -> Option<SyncJob<S::File>> {
        self.log.sync_job()
    }

    /// A sync has ended.
    ///
    /// # Errors
    /// The sync has failed: the store must be opened again.
    pub fn synced(&mut self, end: Result<Durable, JournalError>) -> Result<(), StoreError> {
        for event in self.log.synced(end)? {
            match event {
                Event::Reply { agent: Agent(link), shard, reply } => {
                    let link = Link(link);
                    if self.hosts.contains_key(&link) {
                        self.send(link, Channel(shard), StoreMessage::Reply(reply));
                    }
                }
                Event::Advanced(watermark) => self.outputs.push(Output::Advanced(watermark)),
                Event::Final(watermark) => self.outputs.push(Output::Final(watermark)),
            }
        }
        Ok(())
    }

    /// A disaster was declared ([`StoreLog::recover`]).
    pub fn recover(&mut self, recovery: Recovery) {
        self.log.recover(recovery);
    }

    /// A shard has applied everything up to the final watermark, and serves. True: it was the last one.
    pub fn ready(&mut self, shard: u16) -> bool {
        self.log.ready(shard)
    }

    fn tell_progress(&mut self, only: Option<Link>) {
        let (watermark, updated) = self.told;
        let links: Vec<_> = match only {
            Some(link) => vec![link],
            None => self.hosts.keys().copied().collect(),
        };
        for link in links {
            self.send(link, Channel(0), StoreMessage::Progress { watermark, updated });
        }
    }

    /// Everything that is to be carried out, at the end of a turn.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        let now = (self.log.watermark().unwrap_or(self.told.0), self.log.updated());
        if now != self.told {
            self.told = now;
            self.tell_progress(None);
        }
        std::mem::take(&mut self.outputs)
    }

    /// The logs, to look at.
    #[must_use]
    pub fn log(&self) -> &StoreLog<S> {
        &self.log
    }

    /// Forgets entries that nobody asks for again ([`StoreLog::forget`]).
    ///
    /// # Errors
    /// Files cannot be removed.
    pub fn forget(&mut self, unneeded: &[tidelock_shard::LogIndex]) -> Result<(), StoreError> {
        self.log.forget(unneeded)
    }

    /// The log that a shard's positions are of.
    #[must_use]
    pub fn origin_of(&self, shard: u16) -> Option<&Origin> {
        self.manifest.origins.get(&shard)
    }

    /// The store's status.
    #[must_use]
    pub fn status(&self) -> StoreStatus {
        let shards = (0..).zip(&self.manifest.shards).map(|(shard, name)| {
            let standing = self.log.standing(shard).unwrap_or_default();
            let any = || self.hosts.values().rfind(|host| host.shards.contains_key(&shard));
            let host = self.leader(shard).and_then(|link| self.hosts.get(&link)).or_else(any);
            ShardStatus {
                name: name.clone(),
                host: host.map(|host| host.name.clone()),
                stands: host.and_then(|host| host.shards.get(&shard)?.stands.clone()),
                timeline: self.manifest.origins.get(&shard).map(|origin| origin.timeline),
                received: standing.append.index,
                durable: standing.commit.index,
                stamp: standing.commit.stamp,
                apply_to: self.log.apply_to(shard).unwrap_or_default(),
                left_out: Vec::new(),
                standby: None,
            }
        });
        StoreStatus {
            store: self.manifest.store.clone(),
            shards: shards.collect(),
            watermark: self.log.watermark(),
            updated: self.log.updated(),
            held_back_by: self.log.held_back_by().map(|shard| self.name_of(shard).to_owned()),
            recovered: self.log.final_watermark(),
            heard_unix_ms: self.heard_ms,
            journal_bytes: self.log.journal().bytes(),
        }
    }
}
