//! Serving guests: connections, what they ask, and what they are answered.

use super::connection::{Connection, ConnectionId, Input};
use super::logging::Logged;
use super::requests::{self, Slot};
use super::token::Token;
use super::{Owner, disk};
use crate::sequencer::RequestId;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidelock_nbd::{Command, Errno, ProtocolError, Request};
use tidelock_protocol::ids::{DiskId, MonoNanos};
use tidelock_protocol::record::{Effect, Payload};
use tidelock_uring::{Buffer, SyncKind};

/// Clients of one disk that have not opened it, at most.
pub const HANDSHAKES_MAX: usize = 8;
/// A client opens its disk within this. An attached guest may be idle for ever.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// What clients can cause at will is said once in so long.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// A kind of log line that clients of a disk can cause at will.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Subject {
    Clients,
    FailedReads,
}

/// The last time at which such a line was logged, for each disk.
#[derive(Debug, Default)]
pub(super) struct SaidAt(HashMap<(usize, Subject), MonoNanos>);

impl SaidAt {
    /// `true` if a line may be logged now. It counts as logged then.
    fn may_say(&mut self, disk: usize, subject: Subject, now: MonoNanos) -> bool {
        let said_at = self.0.get(&(disk, subject));
        let may = said_at.is_none_or(|at| now.since_ns(*at) > SAID_EVERY.as_nanos() as u64);
        if may {
            self.0.insert((disk, subject), now);
        }
        may
    }
}

impl Owner {
    pub(super) fn accepted(&mut self, disk: usize, result: std::io::Result<u32>, buffer: Buffer) {
        if self.draining.is_some() && !self.switched_over {
            self.unaccepted.push(disk);
            return;
        }
        if let Err(error) = &result {
            // At a limit of descriptors the next accept fails at once, too.
            self.accept_later.push(disk);
            self.arm_tick();
            if self.may_say(disk, Subject::Clients) {
                let disk = self.disks[disk].name();
                tracing::warn!(
                    member = self.member, disk, %error,
                    "cannot accept a client of the disk: trying again ten times a second"
                );
            }
            return;
        }
        self.ring.accept(Token::Accept(disk).to_u64(), self.disks[disk].listener());
        if self.switched_over {
            return self.turned_away(disk);
        }
        match (result, buffer.into_fd()) {
            (Ok(_), Some(fd)) => {
                self.make_room_for_handshake(disk);
                let id = ConnectionId(self.next_connection);
                self.next_connection += 1;
                let connection =
                    Connection::new(id, disk, fd, &self.disks[disk], &self.pool, self.now);
                self.connections.insert(id, connection);
                self.stats.connections.fetch_add(1, Ordering::Relaxed);
                self.touched.push(id);
                self.want_input(id);
                self.arm_tick();
            }
            (Ok(_), None) | (Err(_), _) => {}
        }
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

    /// A client that only connects takes no place from one that opens its disk.
    fn make_room_for_handshake(&mut self, disk: usize) {
        let of_disk = self.handshakes().into_iter();
        let of_disk = of_disk.filter(|(_, id)| self.connections[id].disk() == disk);
        let of_disk: Vec<_> = of_disk.map(|(_, id)| id).collect();
        if of_disk.len() >= HANDSHAKES_MAX {
            self.drop_connection(of_disk[0]);
        }
    }

    /// Clients that do not get on, and disks whose sockets could not accept. Each tick.
    pub(super) fn drive_clients(&mut self) {
        for disk in std::mem::take(&mut self.accept_later) {
            self.ring.accept(Token::Accept(disk).to_u64(), self.disks[disk].listener());
        }
        let handshakes = self.handshakes();
        for (since, id) in &handshakes {
            if self.now.since_ns(*since) > HANDSHAKE_MAX.as_nanos() as u64 {
                self.drop_connection(*id);
            }
        }
        if !handshakes.is_empty() {
            self.arm_tick();
        }
    }

    fn drop_connection(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.remove(&id) {
            connection.hang_up();
            self.stats.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The disk is in use: is it still? And the client that found it so is told of in the log.
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

    fn refused(&mut self, id: ConnectionId) {
        let disk = self.connections[&id].disk();
        if self.may_say(disk, Subject::Clients) {
            let connections = self.disks[disk].connections_max();
            tracing::warn!(
                member = self.member,
                disk = self.disks[disk].name(),
                connections,
                "refused a client of the disk: it is in use, and two guests on one disk destroy it; \
                 `connections` in the disk's section allows more"
            );
        }
    }

    fn broke_protocol(&mut self, id: ConnectionId, error: &ProtocolError) {
        let Some(disk) = self.connections.get(&id).map(Connection::disk) else { return };
        if self.may_say(disk, Subject::Clients) {
            let (member, disk) = (&self.member, self.disks[disk].name());
            tracing::warn!(member, disk, connection = id.0, %error, "a client broke the protocol");
        }
    }

    /// `true` if a line that clients of this disk can cause at will may be logged again.
    fn may_say(&mut self, disk: usize, subject: Subject) -> bool {
        self.said_at.may_say(disk, subject, self.now)
    }

    /// A client is, by the end of its connection. One that tries again and again is told of once.
    fn turned_away(&mut self, disk: usize) {
        if !std::mem::replace(&mut self.turned_away, true) {
            let disk = self.disks[disk].name();
            tracing::warn!(
                member = self.member,
                disk,
                "turned away who connects: the group was switched over, its disks are at the backup site"
            );
        }
    }

    pub(super) fn received(
        &mut self,
        id: ConnectionId,
        result: std::io::Result<u32>,
        buffer: Buffer,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.received(result, buffer.into_aligned());
        self.take_input(id);
    }

    /// Acts on everything that has arrived, then asks for more.
    pub(super) fn take_input(&mut self, id: ConnectionId) {
        self.touched.push(id);
        self.refresh_places(id);
        loop {
            let connection = self.connections.get_mut(&id).expect("looked up by the caller");
            match connection.next_input(&self.pool) {
                Input::Request(request) => self.submit(id, request, None),
                Input::Write(request, data) => {
                    self.submit(id, request, Some(Payload::new(data)));
                }
                Input::Refused => self.refused(id),
                Input::Violation(error) => {
                    self.broke_protocol(id, &error);
                    break;
                }
                Input::NeedMore | Input::Busy | Input::Closed => break,
            }
        }
        self.want_input(id);
    }

    pub(super) fn want_input(&mut self, id: ConnectionId) {
        let connection = self.connections.get_mut(&id).expect("looked up by the caller");
        connection.receive(&mut self.ring, Token::Receive(id).to_u64());
    }

    pub(super) fn submit(&mut self, id: ConnectionId, request: Request, data: Option<Payload>) {
        let connection = self.connections.get_mut(&id).expect("looked up by the caller");
        let disk_index = connection.disk();
        let disk = &self.disks[disk_index];
        connection.begin(&request);
        let slot = self.requests.begin(id, request);
        let count = |n: &std::sync::atomic::AtomicU64, by: u64| n.fetch_add(by, Ordering::Relaxed);
        match request.command {
            Command::Read => {
                count(&self.stats.reads, 1);
                count(&self.stats.read_bytes, request.len.into());
                disk.start_read(&request, &mut self.ring, &self.pool, Token::Read(slot).to_u64());
            }
            Command::Flush => {
                count(&self.stats.flushes, 1);
                match disk.poisoned() {
                    Some(_) => self.reply(slot, Err(Errno::Io)),
                    None => {
                        self.sequencer.flush_asked();
                        let token = Token::Flush(slot).to_u64();
                        self.ring.fsync(token, disk.fd(), SyncKind::Data);
                        self.logging.guest_flush_begins(slot, disk.id());
                    }
                }
            }
            Command::Write => {
                count(&self.stats.writes, 1);
                count(&self.stats.written_bytes, request.len.into());
                let payload = data.expect("a write comes with its data");
                self.sequence(slot, disk_index, &request, Effect::Write(payload));
            }
            Command::WriteZeroes | Command::Trim => {
                count(&self.stats.writes, 1);
                match self.disks[disk_index].zeroing(&request) {
                    Ok(Some(effect)) => self.sequence(slot, disk_index, &request, effect),
                    Ok(None) => self.reply(slot, Ok(())),
                    Err(errno) => self.reply(slot, Err(errno)),
                }
            }
            Command::Cache => self.reply(slot, Ok(())),
            Command::BlockStatus => self.block_status(slot, disk_index, &request),
        }
    }

    pub(super) fn accept_all(&mut self) {
        for (index, disk) in self.disks.iter().enumerate() {
            self.ring.accept(Token::Accept(index).to_u64(), disk.listener());
        }
    }

    pub(super) fn sequence(&mut self, slot: Slot, disk: usize, request: &Request, effect: Effect) {
        let extent = self.disks[disk].extent(request);
        let logged = Logged { extent, effect, fua: request.flags.fua() };
        if self.logging.activity.admit(requests::request_of(slot).0, extent) {
            self.sequence_logged(requests::request_of(slot), logged);
        } else {
            self.logging.hold_back(requests::request_of(slot), logged);
        }
    }

    /// The activity log has what the request may change.
    pub(super) fn sequence_logged(&mut self, request: RequestId, logged: Logged) {
        let Logged { extent, effect, fua } = logged;
        self.observe_tags();
        self.logging.touch(self.now);
        self.sequencer.submit(request, extent, effect, fua, self.now, self.wall_ms);
    }

    pub(super) fn block_status(&mut self, slot: Slot, disk: usize, request: &Request) {
        match self.disks[disk].block_status(request) {
            Ok(extents) => {
                let (id, request) = self.requests.end(slot);
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.reply_block_status(&request, extents);
                    self.touched.push(id);
                }
            }
            Err(error) => self.reply(slot, Err(Errno::from(&error))),
        }
    }

    pub(super) fn read(&mut self, slot: Slot, result: std::io::Result<u32>, buffer: Buffer) {
        let request = *self.requests.get(slot);
        let disk = self.connections.get(&self.requests.connection(slot)).map(Connection::disk);
        let Some(disk) = disk else {
            self.requests.end(slot);
            return;
        };
        let token = Token::Read(slot).to_u64();
        let index = disk;
        let disk = &self.disks[disk];
        match disk.read_done(&request, result, buffer, &mut self.ring, token) {
            disk::ReadOutcome::Continued => {}
            disk::ReadOutcome::Done(data) => {
                let (id, request) = self.requests.end(slot);
                // What it publishes is carried out before replies are sent.
                self.sequencer.is_read(disk.extent(&request));
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.reply_data(&request, data);
                    self.touched.push(id);
                }
            }
            disk::ReadOutcome::Failed(error) => {
                self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
                if self.said_at.may_say(index, Subject::FailedReads, self.now) {
                    tracing::error!(
                        member = self.member, disk = disk.name(), %error, offset = request.offset, len = request.len,
                        "the local disk failed a read; further ones are said every {} s, `tidelock_disk_errors_total` counts \
                         all of them",
                        SAID_EVERY.as_secs()
                    );
                }
                self.reply(slot, Err(Errno::from(&error)));
            }
        }
    }

    /// Since when the local disks owe an answer, and which of them does.
    pub(super) fn publish_disk_wait(&mut self) {
        let wait = self.ring.oldest_file_op().map(|(token, waited)| {
            let disk = match Token::from_u64(token) {
                Token::Local(op) => Some(self.nth(self.local_ops[&op].disk())),
                Token::LogFlush(disk, _) => Some(self.nth(DiskId(disk))),
                // Who asked may be gone.
                Token::Read(slot) | Token::Flush(slot) => {
                    self.connections.get(&self.requests.connection(slot)).map(Connection::disk)
                }
                _ => None,
            };
            (MonoNanos(self.now.0.saturating_sub(waited.as_nanos() as u64)), disk)
        });
        self.stats.disk_wait.set(wait);
    }

    pub(super) fn flushed(&mut self, slot: Slot, result: std::io::Result<u32>) {
        let disk = self.logging.guest_flush_ended(slot, result.is_ok());
        if let (Err(error), Some(disk)) = (&result, disk) {
            self.flush_failed(self.nth(disk), error);
        }
        self.reply(slot, result.map(drop).map_err(|e| Errno::from(&e)));
    }

    pub(super) fn flush_failed(&mut self, disk: usize, error: &std::io::Error) {
        self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
        if self.disks[disk].poison(&self.member, error) {
            let entry = (self.disks[disk].name().to_owned(), error.to_string());
            self.view.change_trouble(|trouble| trouble.failed_disks.push(entry));
        }
    }

    pub(super) fn reply(&mut self, slot: Slot, result: Result<(), Errno>) {
        let (id, request) = self.requests.end(slot);
        // A client that went away gets no answer; what it asked for was done all the same.
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.reply(&request, result);
        self.touched.push(id);
    }

    /// Sends what the turn has produced, and closes what is over.
    pub(super) fn send_replies(&mut self) {
        while let Some(id) = self.touched.pop() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.send(&mut self.ring, Token::Send(id).to_u64());
            if connection.has_room_again() {
                self.take_input(id);
                self.act();
                // It is touched again: the loop comes back to it.
                continue;
            }
            if connection.is_over() {
                let connection = self.connections.remove(&id).expect("just seen");
                connection.hang_up();
                self.stats.connections.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn sent(&mut self, id: ConnectionId, result: std::io::Result<u32>, buffer: Buffer) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.sent(result, buffer.into_many());
            self.touched.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_clients_cause_is_logged_once_in_ten_seconds_for_each_disk() {
        let mut said_at = SaidAt::default();
        let begin = MonoNanos(1);
        let times = (0..1000).map(|step: u64| MonoNanos(begin.0 + step * 20_000_000));
        let said = times.filter(|now| said_at.may_say(0, Subject::FailedReads, *now)).count();
        assert_eq!(said, 2, "a thousand failures in 20 s");
        assert!(said_at.may_say(0, Subject::Clients, begin), "a line about something else");
        assert!(said_at.may_say(1, Subject::FailedReads, begin), "a line about another disk");
    }
}
