//! A store at one primary host: the agents of the shards that are led here, and their link to the backup. Bytes, events and time
//! in, actions out.

use crate::agent::{Action, Conn, ShardAgent};
use crate::failure::HostFailure;
use crate::status::Status;
use bytes::Bytes;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tidelock_clock::Verdict;
use tidelock_pgstream::Now;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_shard::host::{Heard, HostEnd};

/// The store, as this host knows it.
#[derive(Clone, Debug)]
pub struct StoreNames {
    /// This host.
    pub host: String,
    /// Software and version, for the backup's log.
    pub software: String,
    /// The store.
    pub store: String,
    /// All its shards by number.
    pub shards: Vec<String>,
}

/// Work for the caller.
#[derive(Debug)]
pub enum StoreAction {
    /// Connect to the backup; then [`StoreHost::linked`] or [`StoreHost::link_lost`].
    Link,
    /// Close the connection to the backup.
    Unlink,
    /// Connect to a host of a shard's list ([`Action::Connect`]).
    Connect {
        /// The shard.
        shard: u16,
        /// The connection that is wanted.
        conn: Conn,
        /// The host, from 0.
        host: usize,
    },
    /// Close a connection to a shard's server ([`Action::Disconnect`]).
    Disconnect {
        /// The shard.
        shard: u16,
        /// The connection.
        conn: Conn,
    },
    /// A server has failed. For the log.
    Failed {
        /// The shard.
        shard: u16,
        /// The host, from 0.
        host: usize,
        /// The failure.
        failure: HostFailure,
        /// Advice to the operator.
        advice: String,
    },
    /// Connect to the host that leads the shard now, for a tunnel.
    OpenTunnel {
        /// The shard.
        shard: u16,
        /// The host, from 0.
        host: usize,
        /// The tunnel.
        tunnel: u32,
    },
    /// Bytes for the server at the end of a tunnel; then [`StoreHost::tunnel_wrote`].
    TunnelData {
        /// The tunnel.
        tunnel: u32,
        /// The bytes.
        data: Bytes,
    },
    /// Close the connection at the end of a tunnel.
    CloseTunnel {
        /// The tunnel.
        tunnel: u32,
    },
}

/// State of a store at this host, for operators.
#[derive(Clone, Debug, Serialize)]
pub struct StoreHostStatus {
    /// The store.
    pub store: String,
    /// The backup server, while it is connected.
    pub backup: Option<String>,
    /// Why it is not, or why the last connection ended.
    pub link_error: Option<String>,
    /// Shards that are led here, by name.
    pub shards: BTreeMap<String, Status>,
}

/// Time before the first attempt to reach the backup again: a server that was started anew is there soon. It doubles with each failure.
const LINK_RETRY_FIRST: Duration = Duration::from_millis(50);
/// The longest time between two attempts.
const LINK_RETRY_MAX: Duration = Duration::from_millis(800);

/// A store at this host.
#[derive(Debug)]
pub struct StoreHost {
    names: StoreNames,
    agents: BTreeMap<u16, ShardAgent>,
    link: Option<HostEnd>,
    /// While there is no link: the next attempt.
    link_at: Option<Duration>,
    /// Time before the attempt that follows the next failure.
    link_retry: Duration,
    server: Option<String>,
    link_error: Option<String>,
    actions: VecDeque<StoreAction>,
    progress: (Hlc, Hlc),
    /// Why stamps stand still, by shard: the backup is told again on each connection.
    stands: BTreeMap<u16, Option<String>>,
}

fn mono(now: Now) -> MonoNanos {
    MonoNanos(u64::try_from(now.mono.as_nanos()).unwrap_or(u64::MAX))
}

impl StoreHost {
    /// A store whose shards of these numbers are led here.
    #[must_use]
    pub fn new(names: StoreNames, agents: BTreeMap<u16, ShardAgent>, now: Now) -> Self {
        Self {
            names,
            agents,
            link: None,
            link_at: Some(now.mono),
            link_retry: LINK_RETRY_FIRST,
            server: None,
            link_error: None,
            actions: VecDeque::new(),
            progress: (Hlc(0), Hlc(0)),
            stands: BTreeMap::new(),
        }
    }

    /// Next action.
    pub fn poll(&mut self) -> Option<StoreAction> {
        self.actions.pop_front()
    }

    /// Time, and the clock guard's verdict: before every other input, so that no log is taken under an old one.
    pub fn tick(&mut self, verdict: Verdict, now: Now) {
        for agent in self.agents.values_mut() {
            agent.clock(verdict, now);
            agent.tick(now);
        }
        if self.link_at.is_some_and(|at| at <= now.mono) {
            self.link_at = None;
            self.actions.push_back(StoreAction::Link);
        }
        if let Some(link) = &mut self.link
            && let Err(error) = link.tick(mono(now))
        {
            self.unlink(error.to_string(), now);
        }
        self.work(now);
    }

    /// Time of the next [`StoreHost::tick`] if nothing else happens, as [`Now::mono`].
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let link = self.link.as_ref().map(|link| Duration::from_nanos(link.deadline().0));
        let agents = self.agents.values().filter_map(ShardAgent::deadline);
        agents.chain(link).chain(self.link_at).min()
    }

    /// The backup is connected: TLS is done.
    pub fn linked(&mut self, now: Now) {
        let StoreNames { host, software, store, shards } = &self.names;
        self.link = Some(HostEnd::new(host, software, store, shards, mono(now)));
    }

    /// The backup was not reached, or the connection to it has ended.
    pub fn link_lost(&mut self, why: String, now: Now) {
        // A refusal of the backup says more than the end of the socket.
        if self.link_at.is_none() {
            self.unlinked(why, now);
        }
        self.work(now);
    }

    fn unlink(&mut self, why: String, now: Now) {
        self.actions.push_back(StoreAction::Unlink);
        self.unlinked(why, now);
    }

    fn unlinked(&mut self, why: String, now: Now) {
        (self.link, self.server, self.link_error) = (None, None, Some(why));
        self.link_at = Some(now.mono + self.link_retry);
        self.link_retry = (self.link_retry * 2).min(LINK_RETRY_MAX);
        self.agents.values_mut().for_each(|agent| agent.backup_lost(now));
    }

    /// The link, for its bytes: [`HostEnd::input`] and [`HostEnd::output`].
    pub fn link(&mut self) -> Option<&mut HostEnd> {
        self.link.as_mut()
    }

    /// Bytes have come into the link's input.
    pub fn link_received(&mut self, now: Now) {
        let Some(link) = &mut self.link else { return };
        let mut heard = Vec::new();
        let end = link.received(mono(now), &mut heard);
        for heard in heard {
            self.hear(heard, now);
        }
        if let Err(error) = end {
            self.unlink(error.to_string(), now);
        }
        self.work(now);
    }

    fn hear(&mut self, heard: Heard, now: Now) {
        match heard {
            Heard::Welcome { server } => {
                (self.server, self.link_error) = (Some(server), None);
                self.link_retry = LINK_RETRY_FIRST;
                let Some(link) = &mut self.link else { return };
                for shard in self.agents.keys() {
                    link.ask_origin(*shard);
                    if let Some(Some(reason)) = self.stands.get(shard) {
                        link.stands(*shard, Some(reason.clone()));
                    }
                }
            }
            Heard::OnRecord { shard, origin } => {
                if let Some(agent) = self.agents.get_mut(&shard) {
                    agent.backup_connected(origin, now);
                    let (watermark, updated) = self.progress;
                    agent.progress(watermark, updated, now);
                }
            }
            Heard::Reply { shard, reply } => {
                let Some(agent) = self.agents.get_mut(&shard) else { return };
                if let Err(error) = agent.reply(&reply, now) {
                    self.unlink(error.to_string(), now);
                }
            }
            Heard::Progress { watermark, updated } => {
                self.progress = (watermark, updated);
                for agent in self.agents.values_mut() {
                    agent.progress(watermark, updated, now);
                }
            }
            Heard::Open { shard, tunnel } => match self.agents.get(&shard) {
                Some(agent) => {
                    let host = agent.host();
                    self.actions.push_back(StoreAction::OpenTunnel { shard, host, tunnel });
                }
                None => self.tunnel_closed(tunnel, Some("the shard is not led here".to_owned())),
            },
            Heard::Data { tunnel, data } => {
                self.actions.push_back(StoreAction::TunnelData { tunnel, data });
            }
            // The caller looks at the room before it reads for the tunnel.
            Heard::Room { .. } => {}
            Heard::Close { tunnel } => {
                self.actions.push_back(StoreAction::CloseTunnel { tunnel });
            }
        }
    }

    /// The agent of a shard, for the bytes of its connections: [`ShardAgent::output`] and [`ShardAgent::wants`].
    pub fn agent(&mut self, shard: u16) -> Option<&mut ShardAgent> {
        self.agents.get_mut(&shard)
    }

    /// A connection to a shard's server is there.
    pub fn connected(&mut self, shard: u16, conn: Conn, now: Now) {
        self.with(shard, now, |agent| agent.connected(conn, now));
    }

    /// A shard's server cannot be reached.
    pub fn unreachable(&mut self, shard: u16, conn: Conn, reason: &str, now: Now) {
        self.with(shard, now, |agent| agent.unreachable(conn, reason, now));
    }

    /// Bytes of a shard's server.
    pub fn received(&mut self, shard: u16, conn: Conn, bytes: &[u8], now: Now) {
        self.with(shard, now, |agent| agent.received(conn, bytes, now));
    }

    /// A shard's server has closed a connection, or it broke.
    pub fn closed(&mut self, shard: u16, conn: Conn, now: Now) {
        self.with(shard, now, |agent| agent.closed(conn, now));
    }

    /// Gives an order of the operator to a shard's agent.
    pub fn with(&mut self, shard: u16, now: Now, then: impl FnOnce(&mut ShardAgent)) {
        if let Some(agent) = self.agents.get_mut(&shard) {
            then(agent);
        }
        self.work(now);
    }

    /// The most bytes that may be read for a tunnel now.
    #[must_use]
    pub fn tunnel_room(&self, tunnel: u32) -> usize {
        self.link.as_ref().map_or(0, |link| link.tunnel_room(tunnel))
    }

    /// The server at the end of a tunnel has sent bytes, no more than may be.
    pub fn tunnel_read(&mut self, tunnel: u32, data: Bytes) {
        if let Some(link) = &mut self.link {
            link.tunnel_send(tunnel, data);
        }
    }

    /// The server at the end of a tunnel has taken bytes.
    pub fn tunnel_wrote(&mut self, tunnel: u32, bytes: usize) {
        if let Some(link) = &mut self.link {
            link.tunnel_taken(tunnel, bytes);
        }
    }

    /// The server at the end of a tunnel has closed the connection, or was not reached.
    pub fn tunnel_closed(&mut self, tunnel: u32, reason: Option<String>) {
        if let Some(link) = &mut self.link {
            link.close_tunnel(tunnel, reason);
        }
    }

    /// Gives the agents' actions to the link, or to the caller.
    fn work(&mut self, now: Now) {
        let mut broken = None;
        for (shard, agent) in &mut self.agents {
            let shard = *shard;
            while let Some(action) = agent.poll() {
                let link = self.link.as_mut();
                match (action, link) {
                    (Action::Connect { conn, host }, _) => {
                        self.actions.push_back(StoreAction::Connect { shard, conn, host });
                    }
                    (Action::Disconnect(conn), _) => {
                        self.actions.push_back(StoreAction::Disconnect { shard, conn });
                    }
                    (Action::Failed { host, failure, advice }, _) => {
                        let failed = StoreAction::Failed { shard, host, failure, advice };
                        self.actions.push_back(failed);
                    }
                    (Action::Origin(origin), Some(link)) => link.origin(shard, origin),
                    (Action::Doubt { after, through }, Some(link)) => {
                        link.doubt(shard, after, through);
                    }
                    (Action::Backup(message), Some(link)) => {
                        broken = link.send(shard, &message).err().or(broken);
                    }
                    (Action::Stands(reason), link) => {
                        // Also while the network is slow: it is said once. Before the welcome it is kept.
                        if let Some(link) = link.filter(|link| link.is_welcome()) {
                            link.stands(shard, reason.clone());
                        }
                        self.stands.insert(shard, reason);
                    }
                    // Without a link they are dropped: the agent says them again when the backup is there.
                    (Action::Origin(_) | Action::Doubt { .. } | Action::Backup(_), None) => {}
                }
            }
        }
        if let Some(error) = broken {
            self.unlink(error.to_string(), now);
        }
    }

    /// The state of the store at this host.
    #[must_use]
    pub fn status(&self) -> StoreHostStatus {
        let name = |shard: u16| self.names.shards.get(usize::from(shard)).cloned();
        let shards = self.agents.iter();
        StoreHostStatus {
            store: self.names.store.clone(),
            backup: self.server.clone(),
            link_error: self.link_error.clone(),
            shards: shards
                .filter_map(|(shard, agent)| Some((name(*shard)?, agent.status())))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use bytes::{Buf, BytesMut};
    use tidelock_pgstream::{Login, PasswordMethod};
    use tidelock_protocol::frame::{self, Frame};
    use tidelock_protocol::ids::Channel;
    use tidelock_shard::link::{StoreFrame, StoreMessage, VERSION};
    use tidelock_wal::PgTimestamp;

    const CLOCK: Verdict = Verdict::Believed { epsilon_ns: 1000 };

    fn now(ms: u64) -> Now {
        Now { mono: Duration::from_millis(ms), wall: PgTimestamp(0) }
    }

    /// A host that leads the second of two shards.
    fn host() -> StoreHost {
        let login = Login {
            user: "tidelock".into(),
            password: None,
            application_name: "tidelock".into(),
            weakest: PasswordMethod::Scram,
        };
        let config = Config::new(1, login, "tidelock".parse().unwrap(), 1_000_000);
        let agents = BTreeMap::from([(1, ShardAgent::new(config, now(0)))]);
        let names = StoreNames {
            host: "h0".into(),
            software: "test".into(),
            store: "orders".into(),
            shards: vec!["s0".into(), "s1".into()],
        };
        StoreHost::new(names, agents, now(0))
    }

    fn hear(host: &mut StoreHost, shard: u16, message: &StoreMessage, at: u64) {
        let mut bytes = BytesMut::new();
        frame::encode_control(Channel(shard), message, &mut bytes);
        host.link().unwrap().input().extend_from_slice(&bytes);
        host.link_received(now(at));
    }

    fn welcome(host: &mut StoreHost, at: u64) {
        host.linked(now(at));
        let (server, software) = ("b".into(), "test".into());
        hear(host, 0, &StoreMessage::Welcome { protocol: VERSION, server, software }, at);
    }

    fn said(host: &mut StoreHost) -> Vec<(u16, StoreMessage)> {
        let out = host.link().unwrap().output();
        let frames = std::iter::from_fn(|| frame::decode_of(out).unwrap());
        let said = frames.filter_map(|frame: StoreFrame| match frame {
            Frame::Control(Channel(shard), message) => Some((shard, message)),
            _ => None,
        });
        said.collect()
    }

    fn wanted(host: &mut StoreHost) -> Vec<StoreAction> {
        std::iter::from_fn(|| host.poll()).collect()
    }

    #[test]
    fn the_backup_hears_on_each_connection_why_a_shard_stands() {
        let mut host = host();
        host.tick(CLOCK, now(0));
        let actions = wanted(&mut host);
        assert!(actions.iter().any(|action| matches!(action, StoreAction::Link)));
        let look = |action: &StoreAction| {
            matches!(action, StoreAction::Connect { shard: 1, conn: Conn::Look, .. })
        };
        assert!(actions.iter().any(look), "{actions:?}");
        host.unreachable(1, Conn::Look, "connection refused", now(1));
        let stands = |said: Vec<(u16, StoreMessage)>| {
            let is_asked = said.contains(&(1, StoreMessage::AskOrigin));
            let stands = |of: &(u16, StoreMessage)| {
                matches!(of, (1, StoreMessage::Stands { reason: Some(_) }))
            };
            is_asked && said.iter().any(stands)
        };
        welcome(&mut host, 2);
        assert!(stands(said(&mut host)));
        assert_eq!(host.status().backup.as_deref(), Some("b"));
        host.link_lost("reset".into(), now(3));
        assert_eq!(host.status().link_error.as_deref(), Some("reset"));
        let retry = host.deadline().unwrap().max(now(3).mono + LINK_RETRY_FIRST);
        host.tick(CLOCK, Now { mono: retry, ..now(0) });
        assert!(wanted(&mut host).iter().any(|action| matches!(action, StoreAction::Link)));
        welcome(&mut host, 2000);
        assert!(stands(said(&mut host)));
    }

    #[test]
    fn the_backup_hears_why_a_shard_stands_also_behind_much_that_waits() {
        let mut host = host();
        host.tick(CLOCK, now(0));
        welcome(&mut host, 1);
        said(&mut host);
        let waits = vec![0; 4 << 20];
        host.link().unwrap().output().extend_from_slice(&waits);
        host.unreachable(1, Conn::Look, "connection refused", now(2));
        host.link().unwrap().output().advance(waits.len());
        let stands =
            |of: &(u16, StoreMessage)| matches!(of, (1, StoreMessage::Stands { reason: Some(_) }));
        assert!(said(&mut host).iter().any(stands));
    }

    #[test]
    fn a_backup_that_lies_is_left_and_tried_again() {
        let mut host = host();
        host.tick(CLOCK, now(0));
        wanted(&mut host);
        welcome(&mut host, 1);
        hear(&mut host, 9, &StoreMessage::Open { tunnel: 1 }, 2);
        assert!(wanted(&mut host).iter().any(|action| matches!(action, StoreAction::Unlink)));
        assert!(host.link().is_none());
        let why = host.status().link_error.unwrap();
        assert!(why.contains("protocol"), "{why}");
        // The end of the socket says no more.
        host.link_lost("closed".into(), now(3));
        assert_eq!(host.status().link_error, Some(why));
    }

    #[test]
    fn a_tunnel_to_a_shard_that_is_led_elsewhere_is_closed() {
        let mut host = host();
        host.tick(CLOCK, now(0));
        wanted(&mut host);
        welcome(&mut host, 1);
        said(&mut host);
        hear(&mut host, 0, &StoreMessage::Open { tunnel: 7 }, 2);
        hear(&mut host, 1, &StoreMessage::Open { tunnel: 8 }, 2);
        let closed = |of: &(u16, StoreMessage)| {
            matches!(of, (0, StoreMessage::Close { tunnel: 7, reason: Some(_) }))
        };
        assert!(said(&mut host).iter().any(closed));
        let opened = |action: &StoreAction| {
            matches!(action, StoreAction::OpenTunnel { shard: 1, host: 0, tunnel: 8 })
        };
        assert!(wanted(&mut host).iter().any(opened));
    }
}
