//! The shards of a store that are led at this host, and their link to the backup: events and time in, bytes and calls of the store's
//! logs out.
//!
//! Invariants:
//! - Nothing is read from a log but what its store has called committed.
//! - Nothing is kept of the logs: after a loss of the link it is read again, from where the backup stands.
//! - What waits for the network is bounded by the link ([`HostEnd::has_room`]).

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use thiserror::Error;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_shard::host::{Heard, HostEnd};
use tidelock_shard::link::{ENTRY_MAX_BYTES, Origin};
use tidelock_shard::{Entry, IdleShard, LogIndex, LogPoint, Psa, Step, Terms, stamp_at};

/// Content of one message to the backup, about.
const MESSAGE_MAX_BYTES: usize = 1 << 20;
/// Time before the first attempt to reach the backup again: a server that was started anew is there soon. It doubles with each failure.
const LINK_RETRY_FIRST_MS: u64 = 50;
/// Agents that wait for an answer are looked at so often: each turn of the driver would look at all shards.
const LOOK_EVERY_MS: u64 = 100;
/// The longest time between two attempts.
const LINK_RETRY_MAX_MS: u64 = 800;
const NO_TUNNELS: &str = "the link carries no tunnels of this store";

/// The store, as this host knows it.
#[derive(Clone, Debug)]
pub struct Names {
    /// This host, as in its certificate.
    pub host: String,
    /// Software and version, for the backup's log.
    pub software: String,
    /// The store.
    pub store: String,
    /// All its shards by number, also those that other hosts lead.
    pub shards: Vec<String>,
}

/// A log that cannot be read where the backup goes on.
#[derive(Debug, Error)]
pub enum ReadError {
    /// It was trimmed further than it may be, or the backup was restored from an older state: the shard must be copied anew.
    #[error(
        "the log does not reach back to {0}, where the backup goes on: the shard must be copied anew"
    )]
    Trimmed(LogIndex),
    /// Reading failed; tried again with the next entry that is committed.
    #[error("the log cannot be read: {0}")]
    Failed(String),
}

/// The log of one shard, at its leader: what the store lets the library do. Called on the library's thread, which must not wait long.
pub trait ShardLog: Send {
    /// Identity of the log: a number that is made with the shard's log, is kept with it on every replica, and changes only when the
    /// shard begins a new log that does not go on from the old one. A new leader has the same log, so it has the same number.
    fn id(&self) -> u64;

    /// Committed entries in order, from the first that ends after `after`, none that ends after `up_to`, about `max_bytes` of
    /// content, and at least one if there is any. Stamps are as they were taken, or effective.
    ///
    /// # Errors
    /// The entries are gone, or cannot be read.
    fn read(
        &mut self,
        after: LogIndex,
        up_to: LogIndex,
        max_bytes: usize,
    ) -> Result<Vec<Entry>, ReadError>;

    /// b-commit: the log may be trimmed up to here, and no further.
    fn trim(&mut self, b_commit: LogIndex);

    /// Begins to append a NOP, with a stamp as an update's. A store whose clock is not believed appends none.
    fn nop(&mut self);

    /// The store was recovered at the backup: what is written from now on is lost to it. The store stops serving, unless it is known that
    /// nobody is served there.
    fn fenced(&mut self) {}
}

/// Reason for which a shard's log is not shipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stand {
    /// No connection to the backup.
    NoBackup,
    /// The backup has another log of this shard.
    OtherLog,
    /// The log was trimmed too far.
    Trimmed,
    /// The log cannot be read.
    Unreadable,
    /// An entry is larger than the link carries.
    TooLarge,
    /// The backup has no room.
    BackupFull,
    /// The backup has more than is committed here.
    BackupAhead,
    /// The store was recovered at the backup.
    Fenced,
}

/// State of a store at this host, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ShipperStatus {
    /// The backup server, while it is connected.
    pub backup: Option<String>,
    /// Why it is not, or why the last connection ended.
    pub link_error: Option<String>,
    /// Watermark of the store, as far as it was heard: entries of all shards up to it are at the backup.
    pub watermark: Hlc,
    /// Shards that are led here, by name.
    pub shards: BTreeMap<String, ShardState>,
}

/// State of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShardState {
    /// End of what is committed at home.
    pub committed: LogIndex,
    /// b-commit.
    pub b_commit: LogIndex,
    /// Why nothing is shipped.
    pub stands: Option<Stand>,
}

struct Shard {
    log: Box<dyn ShardLog>,
    id: u64,
    psa: Psa,
    idle: IdleShard,
    committed: LogPoint,
    /// b-commit that the log was told.
    trimmed: LogIndex,
    /// True once the backup has said which log it has, and it is this one.
    is_known: bool,
    fault: Option<Stand>,
    is_fence_told: bool,
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard")
            .field("id", &self.id)
            .field("psa", &self.psa)
            .finish_non_exhaustive()
    }
}

impl Shard {
    fn origin(&self) -> Origin {
        Origin { system_id: self.id, timeline: 1, ..Origin::default() }
    }

    fn stand(&self, is_linked: bool) -> Option<Stand> {
        let of_backup = || {
            let full = self.psa.is_backup_full().then_some(Stand::BackupFull);
            full.or_else(|| self.psa.ahead().map(|_| Stand::BackupAhead))
        };
        match self.fault {
            _ if self.psa.is_fenced() => Some(Stand::Fenced),
            Some(fault) => Some(fault),
            None if !is_linked => Some(Stand::NoBackup),
            None => of_backup(),
        }
    }

    /// Sends what can be sent.
    fn pump(&mut self, number: u16, link: &mut HostEnd, updated: &mut Hlc, now: MonoNanos) {
        while self.is_known && link.has_room() {
            let (after, up_to) = match self.psa.poll(now) {
                None => return,
                Some(Step::Ask { .. }) => {
                    let _ = link.send(number, &self.psa.question());
                    continue;
                }
                Some(Step::Read { after, up_to }) => (after, up_to),
            };
            let entries = match self.log.read(after, up_to, MESSAGE_MAX_BYTES) {
                Ok(entries) if entries.is_empty() => return,
                Ok(entries) => entries,
                Err(ReadError::Trimmed(_)) => return self.fails(Stand::Trimmed),
                Err(ReadError::Failed(_)) => {
                    self.fault = Some(Stand::Unreadable);
                    return;
                }
            };
            let is_large = |entry: &Entry| {
                entry.data.as_ref().is_some_and(|data| data.data().len() > ENTRY_MAX_BYTES)
            };
            if entries.iter().any(is_large) {
                return self.fails(Stand::TooLarge);
            }
            if self.fault == Some(Stand::Unreadable) {
                self.fault = None;
            }
            let update = entries.iter().filter(|entry| !entry.nop).map(|entry| entry.stamp).max();
            match self.psa.send(entries) {
                Ok(Some(message)) if link.send(number, &message).is_ok() => {
                    *updated = (*updated).max(update.unwrap_or_default());
                }
                // The log gave what was not asked for, or spans more than the link carries.
                Ok(Some(_)) | Err(_) => return self.fails(Stand::Unreadable),
                Ok(None) => return,
            }
        }
    }

    /// Nothing is sent until the shard is led anew.
    fn fails(&mut self, fault: Stand) {
        (self.fault, self.is_known) = (Some(fault), false);
    }

    fn replied(&mut self) {
        let b_commit = self.psa.b_commit();
        if b_commit > self.trimmed {
            self.trimmed = b_commit;
            self.log.trim(b_commit);
        }
        if self.psa.is_fenced() && !std::mem::replace(&mut self.is_fence_told, true) {
            self.log.fenced();
        }
    }
}

/// Times of a shipper.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// A shard that has appended nothing for so long while others write appends a NOP.
    pub nop_after_ns: u64,
    /// The least time between two NOPs of a shard.
    pub nop_every_ns: u64,
    /// Limit of what is sent and not acknowledged, counted as the logs count.
    pub unacked_max: u64,
    /// After so long without an answer the backup is asked where it stands.
    pub patience_ns: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            nop_after_ns: 1_000_000,
            nop_every_ns: 5_000_000,
            unacked_max: 16 << 20,
            patience_ns: 2_000_000_000,
        }
    }
}

/// The shards of a store that are led at this host.
#[derive(Debug)]
pub struct Shipper {
    names: Names,
    pace: Pace,
    shards: BTreeMap<u16, Shard>,
    link: Option<HostEnd>,
    link_at: Option<MonoNanos>,
    /// Time before the attempt that follows the next failure.
    link_retry_ms: u64,
    server: Option<String>,
    link_error: Option<String>,
    watermark: Hlc,
    /// The greatest stamp of an update that the backup has told of.
    told: Hlc,
    /// The greatest stamp of an update that was sent from here.
    updated: Hlc,
    /// Stamp of an update of this host that all shards have to pass, and when idle ones do so by a NOP.
    behind: Option<(Hlc, MonoNanos)>,
    /// The last such stamp.
    passed: Hlc,
    /// The next look at agents that wait for an answer.
    look_at: MonoNanos,
    /// The next look at idle shards.
    idle_at: Option<MonoNanos>,
}

impl Shipper {
    /// A store none of whose shards is led here yet.
    #[must_use]
    pub fn new(names: Names, pace: Pace, now: MonoNanos) -> Self {
        Self {
            names,
            pace,
            shards: BTreeMap::new(),
            link: None,
            link_at: Some(now),
            link_retry_ms: LINK_RETRY_FIRST_MS,
            server: None,
            link_error: None,
            watermark: Hlc::default(),
            told: Hlc::default(),
            updated: Hlc::default(),
            behind: None,
            passed: Hlc::default(),
            look_at: now,
            idle_at: None,
        }
    }

    /// This host leads a shard from now on. `committed`: the end of what is committed, and the effective stamp there.
    pub fn lead(
        &mut self,
        shard: u16,
        log: Box<dyn ShardLog>,
        committed: LogPoint,
        now: MonoNanos,
    ) {
        let Pace { nop_every_ns, unacked_max, patience_ns, .. } = self.pace;
        let mut psa = Psa::new(Terms { replicas: 1, unacked_max, patience_ns });
        psa.committed(committed.index, now);
        let mut idle = IdleShard::new(nop_every_ns);
        idle.appended(committed.stamp);
        let (id, trimmed) = (log.id(), LogIndex(0));
        let (is_known, fault, is_fence_told) = (false, None, false);
        let led = Shard { log, id, psa, idle, committed, trimmed, is_known, fault, is_fence_told };
        self.shards.insert(shard, led);
        if self.server.is_some()
            && let Some(link) = &mut self.link
        {
            link.ask_origin(shard);
        }
    }

    /// This host leads a shard no more.
    pub fn resign(&mut self, shard: u16) {
        self.shards.remove(&shard);
    }

    /// A shard has committed entries up to there, with that effective stamp.
    pub fn committed(&mut self, shard: u16, at: LogPoint, now: MonoNanos) {
        let Some(of) = self.shards.get_mut(&shard) else { return };
        if at.index > of.committed.index {
            of.committed = at;
        }
        of.psa.committed(at.index, now);
        of.idle.appended(at.stamp);
        if let Some(link) = &mut self.link {
            of.pump(shard, link, &mut self.updated, now);
        }
    }

    /// Time: after all events of a turn.
    pub fn tick(&mut self, now: MonoNanos) {
        if let Some(link) = &mut self.link
            && let Err(error) = link.tick(now)
        {
            self.link_lost(error.to_string(), now);
        }
        if let Some(link) = self.link.as_mut().filter(|_| self.look_at <= now) {
            self.look_at = now.plus_ms(LOOK_EVERY_MS);
            for (number, shard) in &mut self.shards {
                if shard.psa.deadline().is_some_and(|at| at <= now) {
                    shard.pump(*number, link, &mut self.updated, now);
                }
            }
        }
        self.nops(now);
    }

    /// Idle shards append NOPs while others write. An update of this host is known here at once; shards that write at the same time
    /// get the time to do so.
    fn nops(&mut self, now: MonoNanos) {
        if self.link.is_none() {
            return;
        }
        match self.behind {
            None if self.updated > self.passed => {
                let due = MonoNanos(now.0.saturating_add(self.pace.nop_after_ns));
                self.behind = Some((self.updated, due));
            }
            Some((stamp, due)) if due <= now => {
                (self.passed, self.behind) = (stamp, None);
                self.shards.values_mut().for_each(|shard| shard.idle.heard(stamp));
                self.idle_at = Some(now);
            }
            None | Some(_) => {}
        }
        if self.idle_at.is_none_or(|at| at > now) {
            return;
        }
        let shards = self.shards.values_mut();
        let ready = |shard: &&mut Shard| shard.is_known && shard.fault.is_none();
        let mut next = None;
        for shard in shards.filter(ready) {
            if shard.idle.poll(now) {
                shard.log.nop();
            }
            next = [next, shard.idle.deadline()].into_iter().flatten().min();
        }
        self.idle_at = next;
    }

    /// The backup tells of an update of another host, half a round trip after it was there. Then others write now, most likely, and
    /// a NOP of now lets later updates pass, too.
    fn told(&mut self, updated: Hlc, wall_ns: u64) {
        let is_elsewhere = updated > self.told && updated > self.updated;
        self.told = self.told.max(updated);
        let recent = stamp_at(wall_ns.saturating_sub(self.pace.nop_after_ns));
        let passed = if is_elsewhere { updated.max(recent) } else { updated };
        self.shards.values_mut().for_each(|shard| shard.idle.heard(passed));
        self.idle_at = Some(MonoNanos(0));
    }

    /// The time of the next [`Shipper::tick`] if nothing else happens.
    #[must_use]
    pub fn deadline(&self) -> Option<MonoNanos> {
        let Some(link) = &self.link else { return self.link_at };
        let behind = self.behind.map(|(_, due)| due);
        let look_at = (!self.shards.is_empty()).then_some(self.look_at);
        [behind, look_at, self.idle_at, Some(link.deadline())].into_iter().flatten().min()
    }

    /// True if a connection to the backup is to be made: then [`Shipper::linked`] or [`Shipper::link_lost`].
    #[must_use]
    pub fn wants_link(&self, now: MonoNanos) -> bool {
        self.link.is_none() && self.link_at.is_some_and(|at| at <= now)
    }

    /// The backup is connected: TLS is done.
    pub fn linked(&mut self, now: MonoNanos) {
        let Names { host, software, store, shards } = &self.names;
        self.link = Some(HostEnd::new(host, software, store, shards, now));
    }

    /// The backup was not reached, or the connection to it has ended.
    pub fn link_lost(&mut self, why: String, now: MonoNanos) {
        (self.link, self.server, self.link_error) = (None, None, Some(why));
        self.link_at = Some(now.plus_ms(self.link_retry_ms));
        self.link_retry_ms = (self.link_retry_ms * 2).min(LINK_RETRY_MAX_MS);
        for shard in self.shards.values_mut() {
            shard.psa.reconnected();
            shard.is_known = false;
        }
    }

    /// The link, for its bytes: [`HostEnd::input`] and [`HostEnd::output`].
    pub fn link(&mut self) -> Option<&mut HostEnd> {
        self.link.as_mut()
    }

    /// The network has taken bytes: there may be room for more.
    pub fn link_wrote(&mut self, now: MonoNanos) {
        let Some(link) = &mut self.link else { return };
        for (number, shard) in &mut self.shards {
            if !link.has_room() {
                return;
            }
            shard.pump(*number, link, &mut self.updated, now);
        }
    }

    /// Bytes have come into the link's input. `wall_ns`: the wall clock in nanoseconds since the Unix epoch.
    pub fn link_received(&mut self, wall_ns: u64, now: MonoNanos) {
        let Some(link) = &mut self.link else { return };
        let mut heard = Vec::new();
        let end = link.received(now, &mut heard);
        for heard in heard {
            if let Err(why) = self.hear(heard, wall_ns, now) {
                return self.link_lost(why, now);
            }
        }
        if let Err(error) = end {
            self.link_lost(error.to_string(), now);
        }
    }

    fn hear(&mut self, heard: Heard, wall_ns: u64, now: MonoNanos) -> Result<(), String> {
        let Some(link) = &mut self.link else { return Ok(()) };
        match heard {
            Heard::Welcome { server } => {
                (self.server, self.link_error) = (Some(server), None);
                self.link_retry_ms = LINK_RETRY_FIRST_MS;
                self.shards.keys().for_each(|shard| link.ask_origin(*shard));
            }
            Heard::OnRecord { shard: number, origin } => {
                let Some(shard) = self.shards.get_mut(&number) else { return Ok(()) };
                let own = shard.origin();
                if origin.is_some_and(|of| of != own) {
                    shard.fails(Stand::OtherLog);
                    let reason = "the backup has another log of this shard".to_owned();
                    link.stands(number, Some(reason));
                    return Ok(());
                }
                link.origin(number, own);
                (shard.is_known, self.idle_at) = (true, Some(now));
                shard.pump(number, link, &mut self.updated, now);
            }
            Heard::Reply { shard: number, reply } => {
                let Some(shard) = self.shards.get_mut(&number) else { return Ok(()) };
                shard.psa.received(0, &reply, now).map_err(|error| error.to_string())?;
                if let Some(standing) = reply.verdict.standing() {
                    shard.idle.appended(standing.append.stamp);
                }
                shard.replied();
                shard.pump(number, link, &mut self.updated, now);
            }
            Heard::Progress { watermark, updated } => {
                self.watermark = self.watermark.max(watermark);
                self.told(updated, wall_ns);
            }
            Heard::Open { tunnel, .. } => link.close_tunnel(tunnel, Some(NO_TUNNELS.to_owned())),
            Heard::Data { .. } | Heard::Room { .. } | Heard::Close { .. } => {}
        }
        Ok(())
    }

    /// State for operators.
    #[must_use]
    pub fn status(&self) -> ShipperStatus {
        let is_linked = self.server.is_some();
        let name = |number: u16| self.names.shards.get(usize::from(number)).cloned();
        let shards = self.shards.iter().map(|(number, shard)| {
            let state = ShardState {
                committed: shard.committed.index,
                b_commit: shard.psa.b_commit(),
                stands: shard.stand(is_linked),
            };
            (name(*number).unwrap_or_default(), state)
        });
        ShipperStatus {
            backup: self.server.clone(),
            link_error: self.link_error.clone(),
            watermark: self.watermark,
            shards: shards.collect(),
        }
    }
}
