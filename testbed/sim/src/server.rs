//! The server's connections: production's frames decoded, and handed to the groups.

use crate::backup::GroupSlot;
use crate::failure::{Checked, Checker, check, fail};
use crate::net::{ConnId, Way};
use crate::schedule::MS;
use crate::world::{World, note};
use bytes::BytesMut;
use std::collections::BTreeMap;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::Channel;
use tidelock_protocol::message::{Attach, Message, PROTOCOL};
use tidelock_replica::group::{ConnectionId, Link};

/// Frames of one group that wait for its thread: beyond it connections are not read.
const INBOX_MAX_BYTES: usize = 512 << 10;

/// One connection.
#[derive(Debug, Default)]
pub(crate) struct ServerConn {
    input: BytesMut,
    host: Option<String>,
    /// The group of each attached channel.
    channels: BTreeMap<Channel, usize>,
    /// A record that is kept back to be swapped with the next one.
    swapped: Option<Frame>,
}

/// What its thread is given.
#[derive(Debug)]
pub(crate) enum Input {
    Attach(Link, String, Box<Attach>),
    Frame(Link, Frame),
    Lost(ConnectionId),
}

impl Input {
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Input::Frame(_, frame) => bytes_of(frame),
            _ => 64,
        }
    }
}

/// The bytes of a frame that waits, or as many for each small one.
pub(crate) fn bytes_of(frame: &Frame) -> usize {
    match frame {
        Frame::Record(_, record) => record.encoded_len(),
        Frame::Part(_, part) => part.data.len(),
        Frame::Control(..) => 64,
    }
}

impl World {
    /// A connection has bytes for the server.
    pub fn backup_reads(&mut self, id: ConnId) -> Checked {
        if !self.backup.is_up() {
            return Ok(());
        }
        let Some(server) = self.backup.conns.get_mut(&id) else { return Ok(()) };
        let Some(conn) = self.net.conns.get_mut(&id) else { return Ok(()) };
        let mangled = conn.mangled;
        let full = |groups: &[GroupSlot], server: &ServerConn| {
            server.channels.values().any(|g| groups[*g].waiting_bytes() >= INBOX_MAX_BYTES)
        };
        if full(&self.backup.groups, server) {
            // The network is not read: it fills up, and the host waits.
            return Ok(());
        }
        server.input.extend_from_slice(&std::mem::take(&mut conn.up.arrived));
        let mut frames = Vec::new();
        let mut broken = None;
        loop {
            match frame::decode(&mut server.input) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => {
                    broken = Some(error.to_string());
                    break;
                }
            }
        }
        if let Some(error) = &broken {
            check(mangled, Checker::Stream, || format!("a host sends garbage: {error}"))?;
        }
        for frame in frames {
            if !self.backup.conns.contains_key(&id) {
                return Ok(());
            }
            for frame in self.mangle(id, mangled, frame) {
                self.server_frame(id, frame)?;
            }
        }
        if let Some(error) = broken {
            note!(self, "the backup closes {id}: {error}");
            self.backup_loses(id);
            self.backup_closes(id);
        }
        Ok(())
    }

    /// What becomes of a frame on a connection that something in between damages.
    fn mangle(&mut self, id: ConnId, mangled: bool, frame: Frame) -> Vec<Frame> {
        if !mangled || !matches!(frame, Frame::Record(..) | Frame::Part(..)) {
            return vec![frame];
        }
        let server = self.backup.conns.get_mut(&id).expect("looked up by the caller");
        if let Some(first) = server.swapped.take() {
            return vec![frame, first];
        }
        match self.rng.below(12) {
            0 => Vec::new(),
            1 => vec![frame.clone(), frame],
            2 => {
                server.swapped = Some(frame);
                Vec::new()
            }
            _ => vec![frame],
        }
    }

    fn server_frame(&mut self, id: ConnId, frame: Frame) -> Checked {
        let server = self.backup.conns.get_mut(&id).expect("looked up by the caller");
        let Some(host) = server.host.clone() else {
            if let Frame::Control(Channel(0), Message::Hello { host, .. }) = frame {
                server.host = Some(host);
                let (_, protocol) = PROTOCOL;
                let welcome =
                    Message::Welcome { protocol, server: "b".into(), software: "sim".into() };
                self.tell(id, Channel(0), &welcome);
                return Ok(());
            }
            return fail(Checker::Stream, format!("{frame:?} before a hello"));
        };
        let channel = frame.channel();
        let link = Link { connection: ConnectionId(id), channel };
        match frame {
            Frame::Control(_, Message::Attach(attach)) => {
                let group = self.channel_of(id, channel, &attach.group)?;
                self.give(group, Input::Attach(link, host, attach));
            }
            frame => {
                let Some(group) = server.channels.get(&channel) else {
                    return fail(Checker::Stream, format!("{frame:?} on a channel of nobody"));
                };
                let group = *group;
                self.give(group, Input::Frame(link, frame));
            }
        }
        Ok(())
    }

    /// The channel is a member's of this group from now on.
    fn channel_of(&mut self, id: ConnId, channel: Channel, name: &str) -> Checked<usize> {
        let Some(group) = self.plan.groups.iter().position(|g| g.name == name) else {
            return fail(Checker::Stream, format!("no group {name}"));
        };
        let server = self.backup.conns.get_mut(&id).expect("looked up by the caller");
        server.channels.insert(channel, group);
        Ok(group)
    }

    pub(crate) fn tell(&mut self, conn: ConnId, channel: Channel, message: &Message) {
        let mut out = BytesMut::new();
        frame::encode_control(channel, message, &mut out);
        self.send(conn, Way::Down, &out);
    }

    /// The server has learnt that a connection is gone.
    pub fn backup_loses(&mut self, id: ConnId) {
        let Some(server) = self.backup.conns.remove(&id) else { return };
        let mut groups: Vec<_> = server.channels.into_values().collect();
        groups.sort_unstable();
        groups.dedup();
        for group in groups {
            self.give(group, Input::Lost(ConnectionId(id)));
        }
    }

    fn give(&mut self, group: usize, input: Input) {
        let Some(boot) = self.backup.boot else { return };
        let slot = &mut self.backup.groups[group];
        slot.inbox_bytes += input.bytes();
        slot.inbox.push_back(input);
        let after = self.rng.range(1..MS / 10);
        self.wake_group(group, boot, after);
    }
}
