//! The host's end of the link of a store ([`crate::link`]), sans-I/O: hello, welcome, then agents' messages, and signs of life.
//!
//! Bytes come in ([`HostEnd::input`], [`HostEnd::received`]) and go out ([`HostEnd::output`]). What waits to go out is bounded by
//! whoever sends: an agent is asked for more only while [`HostEnd::has_room`].

use crate::link::{self, Origin, StoreFrame, StoreMessage, TooLarge, VERSION};
use crate::tunnel::{Tunnel, TunnelError};
use crate::{Backup, Reply};
use bytes::{Bytes, BytesMut};
use std::collections::BTreeMap;
use thiserror::Error;
use tidelock_protocol::frame::{self, Frame, FrameError};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::RefusalKind;

/// A beat is sent after so long without one.
const BEAT_EVERY_MS: u64 = 2_000;
/// A backup of which nothing is heard for so long is gone.
const SILENCE_MAX_MS: u64 = 10_000;
/// Agents send nothing more while so many bytes wait for the network.
const OUT_MAX_BYTES: usize = 1 << 20;
/// The most tunnels of a connection. The backup opens fewer.
const TUNNELS_MAX: usize = 64;

/// The end of a connection.
#[derive(Debug, Error, PartialEq)]
pub enum LinkError {
    /// Bytes that are no frames.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The backup refuses this host, or what it ships.
    #[error("the backup refuses this host: {reason} ({kind:?})")]
    Refused {
        /// For programs.
        kind: RefusalKind,
        /// For people.
        reason: String,
    },
    /// The backup breaks the protocol.
    #[error("the backup breaks the protocol: {0}")]
    Protocol(&'static str),
    /// The backup counts bytes of a tunnel wrongly.
    #[error("the backup breaks the protocol: {0}")]
    Tunnel(#[from] TunnelError),
    /// Silence of the backup.
    #[error("no answer from the backup for {0} ms")]
    Silent(u64),
}

/// News from the backup.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// The backup has taken the hello: agents begin.
    Welcome {
        /// Its name.
        server: String,
    },
    /// The log of a shard that is on record at the backup.
    OnRecord {
        /// The shard.
        shard: u16,
        /// The log; none, if nothing of the shard was ever shipped.
        origin: Option<Origin>,
    },
    /// An answer for a shard's agent.
    Reply {
        /// The shard.
        shard: u16,
        /// The answer.
        reply: Reply,
    },
    /// Progress of the store.
    Progress {
        /// Entries of all shards up to this effective stamp are at the backup.
        watermark: Hlc,
        /// The greatest effective stamp of an update that has arrived there.
        updated: Hlc,
    },
    /// A tunnel to a shard's server is to be opened.
    Open {
        /// The shard.
        shard: u16,
        /// The tunnel.
        tunnel: u32,
    },
    /// Bytes for a shard's server.
    Data {
        /// The tunnel.
        tunnel: u32,
        /// The bytes.
        data: Bytes,
    },
    /// More bytes may be sent through a tunnel.
    Room {
        /// The tunnel.
        tunnel: u32,
    },
    /// A tunnel is closed.
    Close {
        /// The tunnel.
        tunnel: u32,
    },
}

/// One connection, from its beginning on.
#[derive(Debug)]
pub struct HostEnd {
    shards: u16,
    is_welcome: bool,
    input: BytesMut,
    out: BytesMut,
    tunnels: BTreeMap<u32, (u16, Tunnel)>,
    heard_at: MonoNanos,
    beat_at: MonoNanos,
}

impl HostEnd {
    /// A connection that has just been made. `shards`: all of the store, by number.
    #[must_use]
    pub fn new(host: &str, software: &str, store: &str, shards: &[String], now: MonoNanos) -> Self {
        let mut out = BytesMut::new();
        let hello = StoreMessage::Hello {
            oldest: VERSION,
            newest: VERSION,
            host: host.to_owned(),
            software: software.to_owned(),
            store: store.to_owned(),
            shards: shards.to_vec(),
        };
        frame::encode_control(Channel(0), &hello, &mut out);
        Self {
            shards: shards.len() as u16,
            is_welcome: false,
            input: BytesMut::new(),
            out,
            tunnels: BTreeMap::new(),
            heard_at: now,
            beat_at: now,
        }
    }

    /// The buffer that bytes are read into.
    pub fn input(&mut self) -> &mut BytesMut {
        self.input.reserve(frame::bytes_missing(&self.input).max(16 << 10));
        &mut self.input
    }

    /// Bytes for the network; what was written is taken off the front.
    pub fn output(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// Both at once: the buffer that bytes are read into, and bytes for the network.
    pub fn buffers(&mut self) -> (&mut BytesMut, &mut BytesMut) {
        self.input();
        (&mut self.input, &mut self.out)
    }

    /// True once the backup has taken the hello.
    #[must_use]
    pub fn is_welcome(&self) -> bool {
        self.is_welcome
    }

    /// True if agents may send: the backup has taken the hello, and the network takes bytes.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.is_welcome && self.out.len() < OUT_MAX_BYTES
    }

    /// Takes what has arrived.
    ///
    /// # Errors
    /// The connection must end. What was heard before counts.
    pub fn received(&mut self, now: MonoNanos, heard: &mut Vec<Heard>) -> Result<(), LinkError> {
        self.heard_at = now;
        while let Some(frame) = frame::decode_of(&mut self.input)? {
            heard.extend(self.take(frame)?);
        }
        Ok(())
    }

    fn take(&mut self, frame: StoreFrame) -> Result<Option<Heard>, LinkError> {
        let Frame::Control(Channel(shard), message) = frame else {
            return Err(LinkError::Protocol("a record came from the backup"));
        };
        if let StoreMessage::Refused { kind, reason } = message {
            return Err(LinkError::Refused { kind, reason });
        }
        if let StoreMessage::Welcome { protocol, server, .. } = message {
            if std::mem::replace(&mut self.is_welcome, true) || protocol != VERSION {
                return Err(LinkError::Protocol("a welcome that was not asked for"));
            }
            return Ok(Some(Heard::Welcome { server }));
        }
        if !self.is_welcome {
            return Err(LinkError::Protocol("a message came before the welcome"));
        }
        Ok(match message {
            StoreMessage::Reply(reply) if shard < self.shards => {
                Some(Heard::Reply { shard, reply })
            }
            StoreMessage::OnRecord { origin } if shard < self.shards => {
                Some(Heard::OnRecord { shard, origin })
            }
            StoreMessage::Progress { watermark, updated } => {
                Some(Heard::Progress { watermark, updated })
            }
            StoreMessage::Beaten { .. } => None,
            StoreMessage::Open { tunnel } => {
                let is_new = !self.tunnels.contains_key(&tunnel);
                if shard >= self.shards || !is_new || self.tunnels.len() >= TUNNELS_MAX {
                    return Err(LinkError::Protocol("a tunnel that cannot be opened"));
                }
                self.tunnels.insert(tunnel, (shard, Tunnel::default()));
                Some(Heard::Open { shard, tunnel })
            }
            // Bytes of a tunnel that was closed here, and the backup has not heard, are dropped.
            StoreMessage::Data { tunnel, data } => match self.tunnels.get_mut(&tunnel) {
                Some((_, of)) => {
                    of.received(data.len())?;
                    Some(Heard::Data { tunnel, data })
                }
                None => None,
            },
            StoreMessage::Taken { tunnel, bytes } => match self.tunnels.get_mut(&tunnel) {
                Some((_, of)) => {
                    of.taken(bytes)?;
                    Some(Heard::Room { tunnel })
                }
                None => None,
            },
            StoreMessage::Close { tunnel, .. } => {
                self.tunnels.remove(&tunnel).map(|_| Heard::Close { tunnel })
            }
            StoreMessage::Reply(_) | StoreMessage::OnRecord { .. } => {
                return Err(LinkError::Protocol("a reply for no shard"));
            }
            StoreMessage::Hello { .. }
            | StoreMessage::Welcome { .. }
            | StoreMessage::Refused { .. }
            | StoreMessage::AskOrigin
            | StoreMessage::Origin(_)
            | StoreMessage::Ask { .. }
            | StoreMessage::Jump { .. }
            | StoreMessage::Stands { .. }
            | StoreMessage::Doubt { .. }
            | StoreMessage::Beat { .. } => {
                return Err(LinkError::Protocol("a message that no backup sends"));
            }
        })
    }

    /// Asks which log of a shard is on record.
    pub fn ask_origin(&mut self, shard: u16) {
        frame::encode_control(Channel(shard), &StoreMessage::AskOrigin, &mut self.out);
    }

    /// Says which log a shard's positions are of: before the agent's first message, and when it changes.
    pub fn origin(&mut self, shard: u16, origin: Origin) {
        frame::encode_control(Channel(shard), &StoreMessage::Origin(origin), &mut self.out);
    }

    /// Says why a shard's stamps stand still, or that they go on.
    pub fn stands(&mut self, shard: u16, reason: Option<String>) {
        frame::encode_control(Channel(shard), &StoreMessage::Stands { reason }, &mut self.out);
    }

    /// Says that no cut is between these stamps, before entries that have them.
    pub fn doubt(&mut self, shard: u16, after: Hlc, through: Hlc) {
        let doubt = StoreMessage::Doubt { after, through };
        frame::encode_control(Channel(shard), &doubt, &mut self.out);
    }

    /// Sends a message of a shard's agent.
    ///
    /// # Errors
    /// An entry is too large for the link.
    pub fn send(&mut self, shard: u16, message: &Backup) -> Result<(), TooLarge> {
        link::encode(shard, message, &mut self.out)
    }

    /// The most bytes that a tunnel takes now; 0 also of one that is closed.
    #[must_use]
    pub fn tunnel_room(&self, tunnel: u32) -> usize {
        self.tunnels.get(&tunnel).map_or(0, |(_, of)| of.may_send())
    }

    /// Sends bytes of a shard's server, no more than the tunnel takes.
    pub fn tunnel_send(&mut self, tunnel: u32, data: Bytes) {
        let Some((shard, of)) = self.tunnels.get_mut(&tunnel) else { return };
        of.sent(data.len());
        let channel = Channel(*shard);
        frame::encode_control(channel, &StoreMessage::Data { tunnel, data }, &mut self.out);
    }

    /// A shard's server has taken bytes.
    pub fn tunnel_taken(&mut self, tunnel: u32, bytes: usize) {
        let Some((shard, of)) = self.tunnels.get_mut(&tunnel) else { return };
        let channel = Channel(*shard);
        if let Some(bytes) = of.take(bytes) {
            let taken = StoreMessage::Taken { tunnel, bytes };
            frame::encode_control(channel, &taken, &mut self.out);
        }
    }

    /// Closes a tunnel; a reason, if its bytes have not come to their end.
    pub fn close_tunnel(&mut self, tunnel: u32, reason: Option<String>) {
        let Some((shard, _)) = self.tunnels.remove(&tunnel) else { return };
        let close = StoreMessage::Close { tunnel, reason };
        frame::encode_control(Channel(shard), &close, &mut self.out);
    }

    /// The time at which [`HostEnd::tick`] is due.
    #[must_use]
    pub fn deadline(&self) -> MonoNanos {
        let silent = self.heard_at.plus_ms(SILENCE_MAX_MS);
        silent.min(self.beat_at.plus_ms(BEAT_EVERY_MS))
    }

    /// Sends a beat if one is due.
    ///
    /// # Errors
    /// Nothing was heard for too long: the connection must end.
    pub fn tick(&mut self, now: MonoNanos) -> Result<(), LinkError> {
        if now >= self.heard_at.plus_ms(SILENCE_MAX_MS) {
            return Err(LinkError::Silent(SILENCE_MAX_MS));
        }
        if now >= self.beat_at.plus_ms(BEAT_EVERY_MS) {
            self.beat_at = now;
            if self.is_welcome {
                let beat = StoreMessage::Beat { sent_at: now };
                frame::encode_control(Channel(0), &beat, &mut self.out);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::TUNNEL_WINDOW_BYTES;
    use crate::{Entry, LogIndex, Standing, Verdict};
    use tidelock_protocol::record::Payload;

    const START: MonoNanos = MonoNanos(1_000_000_000);

    fn new() -> HostEnd {
        let shards = ["s0".to_owned(), "s1".to_owned()];
        HostEnd::new("h0", "test", "orders", &shards, START)
    }

    fn say(end: &mut HostEnd, shard: u16, message: &StoreMessage) -> Result<Vec<Heard>, LinkError> {
        let mut bytes = BytesMut::new();
        frame::encode_control(Channel(shard), message, &mut bytes);
        end.input().extend_from_slice(&bytes);
        let mut heard = Vec::new();
        end.received(START, &mut heard).map(|()| heard)
    }

    fn welcome(end: &mut HostEnd) {
        let (server, software) = ("b".to_owned(), "test".to_owned());
        say(end, 0, &StoreMessage::Welcome { protocol: VERSION, server, software }).unwrap();
        end.output().clear();
    }

    fn said(end: &mut HostEnd) -> Vec<StoreFrame> {
        std::iter::from_fn(|| frame::decode_of(end.output()).unwrap()).collect()
    }

    #[test]
    fn agents_begin_when_the_backup_has_taken_the_hello() {
        let mut end = new();
        assert!(!end.has_room());
        let hello = said(&mut end);
        assert!(matches!(&hello[..], [Frame::Control(Channel(0), StoreMessage::Hello { .. })]));
        let early = say(&mut end, 0, &StoreMessage::Beaten { sent_at: START });
        assert!(matches!(early, Err(LinkError::Protocol(_))));
        let mut end = new();
        welcome(&mut end);
        assert!(end.has_room());
        let payload = Payload::new(vec![0; 200_000].into());
        for nth in 0..6 {
            let entries = vec![Entry::update(LogIndex(nth + 1), Hlc(1), payload.clone())];
            end.send(0, &Backup { attempt: 1, after: LogIndex(nth), entries }).unwrap();
        }
        assert!(!end.has_room(), "the network is slow");
        end.output().clear();
        assert!(end.has_room());
    }

    #[test]
    fn a_backup_that_lies_ends_the_connection() {
        let verdict = Verdict::Asked(Standing::default());
        let (watermark, updated) = (Hlc(1), Hlc(2));
        for (shard, message) in [
            (2, StoreMessage::Reply(Reply { attempt: 1, verdict })),
            (0, StoreMessage::Ask { attempt: 1 }),
            (2, StoreMessage::Open { tunnel: 0 }),
            (0, StoreMessage::Welcome { protocol: 1, server: "b".into(), software: "t".into() }),
        ] {
            let mut end = new();
            welcome(&mut end);
            assert!(say(&mut end, 0, &StoreMessage::Progress { watermark, updated }).is_ok());
            assert!(say(&mut end, shard, &message).is_err(), "{message:?}");
        }
        let mut end = new();
        let refused =
            StoreMessage::Refused { kind: RefusalKind::Forbidden, reason: "not listed".into() };
        let error = say(&mut end, 0, &refused).unwrap_err();
        assert!(error.to_string().contains("not listed"), "{error}");
    }

    #[test]
    fn a_tunnel_carries_bytes_both_ways_within_its_window() {
        let mut end = new();
        welcome(&mut end);
        let opened = say(&mut end, 1, &StoreMessage::Open { tunnel: 7 });
        assert_eq!(opened, Ok(vec![Heard::Open { shard: 1, tunnel: 7 }]));
        let data = Bytes::from(vec![1; 1000]);
        let heard = say(&mut end, 1, &StoreMessage::Data { tunnel: 7, data: data.clone() });
        assert_eq!(heard, Ok(vec![Heard::Data { tunnel: 7, data }]));
        end.tunnel_taken(7, 1000);
        let taken = StoreMessage::Taken { tunnel: 7, bytes: 1000 };
        assert_eq!(said(&mut end), [Frame::Control(Channel(1), taken)]);
        let mut sent = 0;
        while end.tunnel_room(7) > 0 {
            sent += end.tunnel_room(7);
            end.tunnel_send(7, vec![2; end.tunnel_room(7)].into());
        }
        assert_eq!(sent, TUNNEL_WINDOW_BYTES);
        let heard = say(&mut end, 1, &StoreMessage::Taken { tunnel: 7, bytes: 10 });
        assert_eq!((heard, end.tunnel_room(7)), (Ok(vec![Heard::Room { tunnel: 7 }]), 10));
        let heard = say(&mut end, 1, &StoreMessage::Taken { tunnel: 7, bytes: u32::MAX });
        assert_eq!(heard, Err(LinkError::Tunnel(TunnelError::Untrue)));
        end.close_tunnel(7, None);
        assert_eq!(say(&mut end, 1, &StoreMessage::Close { tunnel: 7, reason: None }), Ok(vec![]));
    }

    #[test]
    fn a_backup_that_says_nothing_is_given_up() {
        let mut end = new();
        welcome(&mut end);
        let first = end.deadline();
        end.tick(first).unwrap();
        let beats = said(&mut end);
        assert_eq!(beats, [Frame::Control(Channel(0), StoreMessage::Beat { sent_at: first })]);
        let (now, error) = loop {
            let now = end.deadline();
            if let Err(error) = end.tick(now) {
                break (now, error);
            }
        };
        assert_eq!(error, LinkError::Silent(SILENCE_MAX_MS));
        assert_eq!(now, START.plus_ms(SILENCE_MAX_MS));
    }
}
