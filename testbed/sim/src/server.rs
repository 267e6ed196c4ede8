//! The driver of the backup's connections: production's [`Connection`] on simulated ones, with places and groups as the
//! server keeps them.

use crate::backup::Incoming;
use crate::failure::{Checked, Checker, check};
use crate::net::{ConnId, Way};
use crate::schedule::{MS, US};
use crate::world::{Event, World, note};
use bytes::BytesMut;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::task::{Context, Poll, Waker};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Bookmark, RefusalKind};
use tidelock_replica::connection::channels::Refusal;
use tidelock_replica::connection::room::InputRoom;
use tidelock_replica::connection::{Connection, ConnectionError, Server};
use tidelock_replica::group::{ConnectionId, Output};
use tidelock_replica::group_loop::HostEvent;
use tidelock_replica::groups::{Groups, NoGroup, Quota};
use tidelock_replica::places::{Place, Places};

/// Frames of one group that wait for its thread: beyond it connections are not read.
pub(crate) const INBOX_MAX_BYTES: u64 = 64 << 10;

/// A connection at the server.
pub(crate) struct ServerConn {
    connection: Connection<SimServer>,
    out: BytesMut,
    timer_at: Option<MonoNanos>,
    /// Bytes before something in between has damaged them, and a record that it keeps back.
    raw: BytesMut,
    swapped: Option<Frame>,
}

impl std::fmt::Debug for ServerConn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "greeted {}", self.connection.is_greeted())
    }
}

impl ServerConn {
    /// True while frames wait for room in their group.
    pub(crate) fn is_full(&self) -> bool {
        self.connection.is_full()
    }
}

/// A run of a group.
#[derive(Clone, Debug)]
pub(crate) struct SimGroup {
    pub(crate) number: usize,
    pub(crate) room: InputRoom,
}

/// The server, as its connections see it.
#[derive(Debug, Default)]
pub(crate) struct SimServer {
    pub(crate) groups: Groups<SimGroup>,
    places: Places<ConnId>,
    of_conns: BTreeMap<ConnId, (String, Place)>,
    /// The connection that speaks.
    speaks: ConnId,
    given: Vec<(usize, HostEvent)>,
    evicted: Vec<ConnId>,
}

impl Server for SimServer {
    type Group = SimGroup;

    fn speaks_for(&self, host: &str) -> Result<(), String> {
        let (name, _) = &self.of_conns[&self.speaks];
        if name == host { Ok(()) } else { Err(name.clone()) }
    }

    fn enter(&mut self, host: &str, _: &str) -> Result<(), Refusal> {
        let given = self.places.host(host, true, self.speaks);
        let given = given.ok_or_else(|| (RefusalKind::Quota, "no place".to_owned()))?;
        let (place, evicted) = given;
        self.evicted.extend(evicted);
        if let Some((_, stranger)) = self.of_conns.insert(self.speaks, (host.to_owned(), place)) {
            self.places.leave(&stranger);
        }
        Ok(())
    }

    fn group(&mut self, name: &str, host: &str) -> Result<SimGroup, Refusal> {
        let found = self.groups.find(name, |_| false).map(|group| group.cloned());
        let refused = |none: NoGroup| (none.kind(), none.to_string());
        if let Some(group) = found.map_err(refused)? {
            return Ok(group);
        }
        let quota = Quota { is_listed: &|_| false, listed: 0, per_host: 0 };
        self.groups.check_quota(name, host, &quota).map_err(refused)?;
        unreachable!("no host may create a group beside those that there are")
    }

    fn is_same(one: &SimGroup, other: &SimGroup) -> bool {
        one.number == other.number
    }

    fn is_closed(_: &SimGroup) -> bool {
        false
    }

    fn room(group: &SimGroup) -> InputRoom {
        group.room.clone()
    }

    fn give(&mut self, group: &SimGroup, event: HostEvent) -> bool {
        self.given.push((group.number, event));
        true
    }

    fn bookmark(&mut self, _: Channel, _: &SimGroup, _: &str, _: Bookmark) {}
}

impl SimServer {
    fn leave(&mut self, conn: ConnId) {
        if let Some((_, place)) = self.of_conns.remove(&conn) {
            self.places.leave(&place);
        }
    }
}

impl World {
    /// A peer has connected from this address, with a certificate for this host.
    pub(crate) fn backup_accepts(&mut self, id: ConnId, host: &str, address: IpAddr) -> Checked {
        let now = self.backup_now().mono;
        let connection = Connection::new(ConnectionId(id), "b", "sim", now);
        let (out, raw) = (BytesMut::new(), BytesMut::new());
        let conn = ServerConn { connection, out, timer_at: None, raw, swapped: None };
        self.backup.conns.insert(id, conn);
        let server = &mut self.backup.server;
        let (place, evicted) = server.places.stranger(address, id);
        server.evicted.extend(evicted);
        server.of_conns.insert(id, (host.to_owned(), place));
        self.set_backup_timer(id);
        self.hand_out()
    }

    /// A connection has bytes for the server.
    pub fn backup_reads(&mut self, id: ConnId) -> Checked {
        let Some(server) = self.backup.conns.get_mut(&id) else { return Ok(()) };
        let Some(conn) = self.net.conns.get_mut(&id) else { return Ok(()) };
        if server.connection.is_full() {
            // The network is not read: it fills up, and the host waits.
            return Ok(());
        }
        let arrived = std::mem::take(&mut conn.up.arrived);
        if conn.mangled {
            server.raw.extend_from_slice(&arrived);
            self.mangle(id);
        } else {
            server.connection.input().extend_from_slice(&arrived);
        }
        self.backup_takes(id)
    }

    /// Bytes of a peer without a network arrive.
    pub(crate) fn backup_hears(&mut self, id: ConnId, bytes: &[u8]) -> Checked {
        let Some(server) = self.backup.conns.get_mut(&id) else { return Ok(()) };
        server.connection.input().extend_from_slice(bytes);
        self.backup_takes(id)
    }

    /// The server gives groups what they have room for, and reads on if that is all.
    pub(crate) fn backup_takes(&mut self, id: ConnId) -> Checked {
        let now = self.backup_now().mono;
        let Some(conn) = self.backup.conns.get_mut(&id) else { return Ok(()) };
        self.backup.server.speaks = id;
        let mut context = Context::from_waker(Waker::noop());
        let taken = conn.connection.take(&mut self.backup.server, now, &mut context);
        self.hand_out()?;
        match taken {
            Poll::Ready(Err(error)) => self.backup_refuses(id, &error),
            Poll::Ready(Ok(()))
                if self.net.conns.get(&id).is_some_and(|c| !c.up.arrived.is_empty()) =>
            {
                self.backup_reads(id)
            }
            Poll::Ready(Ok(())) | Poll::Pending => self.backup_writes(id),
        }
    }

    /// The server writes what the network has room for.
    pub(crate) fn backup_writes(&mut self, id: ConnId) -> Checked {
        let now = self.backup_now().mono;
        loop {
            let Some(conn) = self.backup.conns.get_mut(&id) else { return Ok(()) };
            if let Err(error) = conn.connection.output(&mut conn.out, now) {
                return self.backup_ends(id, &error);
            }
            let held = self.net.conns.get(&id).map_or(0, |conn| conn.down.held_bytes());
            let count = self.plan.window_bytes.saturating_sub(held).min(conn.out.len());
            if count == 0 {
                break;
            }
            let data = conn.out.split_to(count);
            if conn.out.is_empty() {
                conn.connection.wrote_all();
            }
            self.send(id, Way::Down, &data);
        }
        self.set_backup_timer(id);
        Ok(())
    }

    /// A deadline of a connection may have passed.
    pub(crate) fn backup_timer(&mut self, id: ConnId, deadline: MonoNanos) -> Checked {
        let now = self.backup_now().mono;
        let Some(conn) = self.backup.conns.get_mut(&id) else { return Ok(()) };
        if conn.timer_at != Some(deadline) {
            return Ok(());
        }
        conn.timer_at = None;
        match conn.connection.tick(now) {
            Ok(()) => self.set_backup_timer(id),
            Err(error) => return self.backup_ends(id, &error),
        }
        Ok(())
    }

    fn set_backup_timer(&mut self, id: ConnId) {
        let now = self.backup_now().mono;
        let Some(conn) = self.backup.conns.get_mut(&id) else { return };
        let deadline = conn.connection.deadline();
        // A deadline that has moved away is looked at when the timer fires.
        if deadline.0 < u64::MAX && conn.timer_at.is_none_or(|at| deadline < at) {
            conn.timer_at = Some(deadline);
            let after = deadline.since_ns(now).max(US);
            self.schedule.after(after, Event::BackupTimer { conn: id, deadline });
        }
    }

    /// The server does not take what a host says.
    fn backup_refuses(&mut self, id: ConnId, why: &ConnectionError) -> Checked {
        let mangled = self.net.conns.get(&id).is_none_or(|conn| conn.mangled);
        let is_stopping = matches!(why, ConnectionError::Refused(RefusalKind::Stopping, _));
        check(mangled || is_stopping, Checker::Stream, || format!("a host is refused: {why}"))?;
        self.backup_ends(id, why)
    }

    /// The server ends a connection, with a word to the host.
    pub(crate) fn backup_ends(&mut self, id: ConnId, why: &ConnectionError) -> Checked {
        note!(self, "the backup ends {id}: {why}");
        self.ends(id, Some(why))?;
        self.backup_closes(id);
        Ok(())
    }

    /// The server has learnt that a connection is gone.
    pub fn backup_loses(&mut self, id: ConnId) -> Checked {
        self.ends(id, None)
    }

    fn ends(&mut self, id: ConnId, why: Option<&ConnectionError>) -> Checked {
        let Some(mut conn) = self.backup.conns.remove(&id) else { return Ok(()) };
        conn.connection.end(why, &mut self.backup.server);
        self.backup.server.leave(id);
        let now = self.backup_now().mono;
        let mut last_words = conn.out;
        if conn.connection.output(&mut last_words, now).is_ok() && !last_words.is_empty() {
            self.send(id, Way::Down, &last_words);
        }
        self.hand_out()
    }

    /// Groups are given what connections have brought, and connections end that have lost their place.
    fn hand_out(&mut self) -> Checked {
        for (group, event) in std::mem::take(&mut self.backup.server.given) {
            let Some(boot) = self.backup.boot else { continue };
            self.backup.groups[group].inbox.push_back(Incoming::Host(event));
            let after = self.rng.range(1..MS / 10);
            self.wake_group(group, boot, after);
        }
        for id in std::mem::take(&mut self.backup.server.evicted) {
            self.backup_ends(id, &ConnectionError::NoPlace)?;
        }
        Ok(())
    }

    /// A group says something to a host. Returns the connection, which has something to write.
    pub(crate) fn say(&mut self, output: Output) -> ConnId {
        let id = output.link().connection.0;
        if let Some(conn) = self.backup.conns.get(&id) {
            output.send(conn.connection.outbox());
        }
        id
    }

    /// Something in between loses, doubles and swaps records of a connection.
    fn mangle(&mut self, id: ConnId) {
        let conn = self.backup.conns.get_mut(&id).expect("looked up by the caller");
        loop {
            let frame = match frame::decode(&mut conn.raw) {
                Ok(Some(frame)) => frame,
                Ok(None) => return,
                Err(_) => {
                    conn.connection.input().extend_from_slice(&conn.raw.split());
                    return;
                }
            };
            let is_record = matches!(frame, Frame::Record(..) | Frame::Part(..));
            let frames = match conn.swapped.take_if(|_| is_record) {
                Some(first) => vec![frame, first],
                None if !is_record => vec![frame],
                None => match self.rng.below(12) {
                    0 => Vec::new(),
                    1 => vec![frame.clone(), frame],
                    2 => {
                        conn.swapped = Some(frame);
                        Vec::new()
                    }
                    _ => vec![frame],
                },
            };
            for frame in frames {
                encode(&frame, conn.connection.input());
            }
        }
    }
}

pub(crate) fn encode(frame: &Frame, out: &mut BytesMut) {
    match frame {
        Frame::Control(channel, message) => frame::encode_control(*channel, message, out),
        Frame::Part(channel, part) => frame::encode_part(*channel, part, out),
        Frame::Record(channel, record) => {
            frame::encode_record_head(*channel, record, out);
            out.extend_from_slice(record.payload().map_or(&[], |payload| payload.data()));
        }
    }
}

/// Bytes of a frame that waits.
pub(crate) fn bytes_of(frame: &Frame) -> usize {
    match frame {
        Frame::Record(_, record) => record.encoded_len(),
        Frame::Part(_, part) => part.data.len(),
        Frame::Control(..) => 64,
    }
}
