//! The NBD tap: clients of the disks' sockets, and their requests as the owner loop takes them.

use super::connection::{Connection, ConnectionId, Input};
use super::token::Token;
use super::{DiskSetup, UringDriver};
use crate::owner::driver::{GuestIo, GuestOp, Taking};
use crate::sequencer::{DiskError, Extent, RequestId};
use bytes::Bytes;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidelock_nbd::{Command, Errno, ProtocolError, Request};
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::record::Payload;
use tidelock_uring::Buffer;

/// Clients of one disk that have not opened it, at most.
pub const HANDSHAKES_MAX: usize = 8;
/// A client opens its disk within this. An attached guest may be idle for ever.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// A log line that clients of a disk can cause at will is said once in so long.
const SAID_EVERY: Duration = Duration::from_secs(10);
/// The interval at which handshakes that take too long, and sockets that could not accept, are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl UringDriver {
    /// Requests are taken from now on, or not.
    pub(super) fn set_taking(&mut self, what: Taking) {
        self.taking = what;
        if what == Taking::Nothing {
            for (id, connection) in &mut self.connections {
                connection.begin_shutdown();
                self.touched.push(*id);
            }
            return;
        }
        let disks = match std::mem::replace(&mut self.listens, true) {
            false => (0..self.disks.len()).collect(),
            true => std::mem::take(&mut self.unaccepted),
        };
        disks.into_iter().for_each(|disk| self.accept(disk));
    }

    fn accept(&mut self, disk: usize) {
        self.ring.accept(Token::Accept(disk).to_u64(), &self.disks[disk].listener);
    }

    /// A client has connected to a disk's socket.
    pub(super) fn accepted(&mut self, disk: usize, result: io::Result<u32>, buffer: Buffer) {
        if self.taking == Taking::Nothing {
            self.unaccepted.push(disk);
            return;
        }
        if let Err(error) = &result {
            // At a limit of descriptors the next accept fails at once, too.
            self.accept_later.push(disk);
            self.look_later();
            if self.may_say(disk) {
                tracing::warn!(
                    member = self.member, disk = self.disks[disk].spec.name, %error,
                    "cannot accept a client of the disk: trying again ten times a second"
                );
            }
            return;
        }
        self.accept(disk);
        if self.taking == Taking::TurnAway {
            return self.turned_away(disk);
        }
        let Some(fd) = buffer.into_fd() else { return };
        self.make_room_for_handshake(disk);
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        let connection = Connection::new(id, disk, fd, &self.disks[disk], &self.pool, self.now);
        self.connections.insert(id, connection);
        self.stats.connections.fetch_add(1, Ordering::Relaxed);
        self.touched.push(id);
        self.want_input(id);
        self.look_later();
    }

    /// Clients that have not opened their disk, the oldest first.
    fn handshakes(&self) -> Vec<(MonoNanos, ConnectionId)> {
        let connections = self.connections.iter();
        let mut found: Vec<_> = connections
            .filter_map(|(id, connection)| Some((connection.handshakes_since()?, *id)))
            .collect();
        found.sort_unstable();
        found
    }

    /// Ends the oldest handshake of a disk if there are too many.
    fn make_room_for_handshake(&mut self, disk: usize) {
        let of_disk = self.handshakes().into_iter();
        let of_disk = of_disk.filter(|(_, id)| self.connections[id].disk() == disk);
        let of_disk: Vec<_> = of_disk.map(|(_, id)| id).collect();
        if of_disk.len() >= HANDSHAKES_MAX {
            self.drop_connection(of_disk[0]);
        }
    }

    fn look_later(&mut self) {
        if !std::mem::replace(&mut self.looks_later, true) {
            self.ring.timeout(Token::Clients.to_u64(), LOOK_EVERY);
        }
    }

    /// Ends handshakes that take too long, and accepts again where that failed.
    pub(super) fn look_at_clients(&mut self) {
        self.looks_later = false;
        for disk in std::mem::take(&mut self.accept_later) {
            self.accept(disk);
        }
        let handshakes = self.handshakes();
        for (since, id) in &handshakes {
            if self.now.since_ns(*since) > HANDSHAKE_MAX.as_nanos() as u64 {
                self.drop_connection(*id);
            }
        }
        if !handshakes.is_empty() {
            self.look_later();
        }
    }

    fn drop_connection(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.remove(&id) {
            connection.hang_up();
            self.stats.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Before a client is told that the disk is in use: whoever has hung up needs its place no more.
    fn refresh_places(&mut self, id: ConnectionId) {
        let connection = &self.connections[&id];
        let disk = connection.disk();
        if connection.handshakes_since().is_none() || self.disks[disk].has_place() {
            return;
        }
        for other in self.connections.values_mut().filter(|other| other.disk() == disk) {
            other.leave_if_hung_up();
        }
    }

    fn refused(&mut self, disk: usize) {
        if self.may_say(disk) {
            let disk = &self.disks[disk];
            tracing::warn!(
                member = self.member,
                disk = disk.spec.name,
                connections = disk.connections_max(),
                "refused a client of the disk: it is in use, and two guests on one disk destroy it; \
                 `connections` in the disk's section allows more"
            );
        }
    }

    fn broke_protocol(&mut self, id: ConnectionId, disk: usize, error: &ProtocolError) {
        if self.may_say(disk) {
            let (member, disk) = (&self.member, &self.disks[disk].spec.name);
            tracing::warn!(member, disk, connection = id.0, %error, "a client broke the protocol");
        }
    }

    /// `true` if a line about a disk's clients may be logged now. It counts as logged then.
    fn may_say(&mut self, disk: usize) -> bool {
        let is_news = |at: &MonoNanos| self.now.since_ns(*at) > SAID_EVERY.as_nanos() as u64;
        let may = self.said_at.get(&disk).is_none_or(is_news);
        if may {
            self.said_at.insert(disk, self.now);
        }
        may
    }

    fn turned_away(&mut self, disk: usize) {
        if !std::mem::replace(&mut self.turned_away, true) {
            tracing::warn!(
                member = self.member,
                disk = self.disks[disk].spec.name,
                "turned away who connects: the group was switched over, its disks are at the backup site"
            );
        }
    }

    /// Something has arrived on a connection.
    pub(super) fn received(&mut self, id: ConnectionId, result: io::Result<u32>, buffer: Buffer) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.received(result, buffer.into_aligned());
        self.take_input(id);
    }

    /// Takes the requests that have arrived.
    fn take_input(&mut self, id: ConnectionId) {
        self.touched.push(id);
        self.refresh_places(id);
        loop {
            let connection = self.connections.get_mut(&id).expect("looked up by the caller");
            let disk = connection.disk();
            match connection.next_input(&self.pool) {
                Input::Request(request) => self.take_request(id, request, None),
                Input::Write(request, data) => {
                    self.take_request(id, request, Some(Payload::new(data)));
                }
                Input::Refused => self.refused(disk),
                Input::Violation(error) => {
                    self.broke_protocol(id, disk, &error);
                    break;
                }
                Input::NeedMore | Input::Busy | Input::Closed => break,
            }
        }
        self.want_input(id);
    }

    fn want_input(&mut self, id: ConnectionId) {
        let connection = self.connections.get_mut(&id).expect("looked up by the caller");
        connection.receive(&mut self.ring, Token::Receive(id).to_u64());
    }

    /// A request of a client: for the owner loop, or answered here.
    fn take_request(&mut self, id: ConnectionId, request: Request, data: Option<Payload>) {
        let connection = self.connections.get_mut(&id).expect("looked up by the caller");
        connection.begin(&request);
        let disk = &self.disks[connection.disk()];
        let fua = request.flags.fua();
        let op = match request.command {
            Command::Read => GuestOp::Read,
            Command::Flush => GuestOp::Flush,
            Command::Write => GuestOp::Write { data: data.expect("a write has data"), fua },
            Command::WriteZeroes => GuestOp::Zero {
                no_hole: request.flags.no_hole(),
                only_if_fast: request.flags.fast_zero(),
                fua,
            },
            Command::Trim => GuestOp::Discard { fua },
            Command::Cache => return connection.reply(&request, Ok(())),
            Command::BlockStatus => {
                return match disk.block_status(&request) {
                    Ok(extents) => connection.reply_block_status(&request, extents),
                    Err(error) => connection.reply(&request, Err(Errno::from(&error))),
                };
            }
        };
        let extent = extent_of(disk, &request);
        let id = self.requests.begin(id, request);
        self.asked.push(GuestIo { id, extent, op });
    }

    /// The owner loop has answered a request. A client that went away hears nothing of it.
    pub(super) fn reply(&mut self, request: RequestId, answer: Result<Bytes, DiskError>) {
        let (id, request) = self.requests.end(request);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match answer {
            Ok(data) if request.command == Command::Read => connection.reply_data(&request, data),
            Ok(_) => connection.reply(&request, Ok(())),
            Err(error) => connection.reply(&request, Err(Errno::from_os(error.0))),
        }
        self.touched.push(id);
    }

    /// Sends what there is to send, takes what a connection has room for again, and closes what is over.
    pub(super) fn send_replies(&mut self) {
        while let Some(id) = self.touched.pop() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.send(&mut self.ring, Token::Send(id).to_u64());
            if connection.has_room_again() {
                // The connection is touched again, so the loop comes back to it.
                self.take_input(id);
            } else if connection.is_over() {
                self.drop_connection(id);
            }
        }
    }

    /// A send has ended.
    pub(super) fn sent(&mut self, id: ConnectionId, result: io::Result<u32>, buffer: Buffer) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.sent(result, buffer.into_many());
            self.touched.push(id);
        }
    }

    /// The loop has ended: nothing is answered any more.
    pub(super) fn hang_up_all(&mut self) {
        for (_, connection) in self.connections.drain() {
            connection.hang_up();
        }
        self.requests.give_up_all();
    }
}

fn extent_of(disk: &DiskSetup, request: &Request) -> Extent {
    Extent { disk: disk.spec.id, offset: request.offset, len_bytes: request.len.into() }
}
