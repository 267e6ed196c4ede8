//! The NBD tap: clients of a member's disks, and their requests as the owner loop takes them. Sans-I/O: the sockets are
//! a [`Network`].

mod connection;
mod requests;
#[cfg(test)]
mod tests;

pub use connection::{ConnectionId, Limits};

use bytes::Bytes;
use connection::{Connection, Input};
use requests::Requests;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidelock_daemon_core::owner::driver::{DiskFile, GuestIo, GuestOp, Taking};
use tidelock_daemon_core::sequencer::{DiskError, Extent, RequestId};
use tidelock_daemon_core::stats::OwnerStats;
use tidelock_nbd::{
    BlockSize, Command, Cookie, Errno, Export, ExportError, ExportTable, ExtentState, Features,
    ProtocolError, Request, Users,
};
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::DiskSpec;
use tidelock_protocol::record::Payload;
use tidelock_uring::{AlignedBuf, BufPool, ExtentKind, SendBufs};

/// Clients of one disk that have not opened it, at most.
pub const HANDSHAKES_MAX: usize = 8;
/// A client opens its disk within this. An attached guest may be idle for ever.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// A log line that clients of a disk can cause at will is said once in so long.
const SAID_EVERY: Duration = Duration::from_secs(10);
/// The interval at which handshakes that take too long, and sockets that could not accept, are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The longest answer to one BLOCK_STATUS.
const STATUS_EXTENTS_MAX: usize = 1024;

/// The sockets of a member's disks. An operation that ends is told to the tap.
pub trait Network {
    /// A client's.
    type Socket;

    /// The next client of the disk with this number: [`NbdTap::accepted`].
    fn accept(&mut self, disk: usize);
    /// Bytes into this range of the buffer: [`NbdTap::received`]. `all`: as many as the range has, or the client has gone.
    fn receive(
        &mut self,
        id: ConnectionId,
        socket: &Self::Socket,
        buf: AlignedBuf,
        range: Range<usize>,
        all: bool,
    );
    /// Bytes for a client: [`NbdTap::sent`].
    fn send(&mut self, id: ConnectionId, socket: &Self::Socket, bufs: SendBufs);
    /// A time after which [`NbdTap::look`] is to be called.
    fn look_after(&mut self, after: Duration);
    /// True if the client has closed its end.
    fn has_hung_up(&self, socket: &Self::Socket) -> bool;
    /// Ends a connection at once, also for a receive that is in flight.
    fn hang_up(&mut self, socket: Self::Socket);
}

/// A disk as clients see it.
#[derive(Debug)]
pub struct TapDisk<F> {
    spec: DiskSpec,
    file: F,
    exports: ExportTable,
}

impl<F: DiskFile> TapDisk<F> {
    /// Describes the disk to its clients. `block_min`: requests are multiples of this many bytes. At most `connections`
    /// clients have it open at once.
    pub fn new(
        spec: DiskSpec,
        file: F,
        block_min: u32,
        connections: usize,
    ) -> Result<Self, ExportError> {
        let export = Export {
            name: spec.name.clone(),
            description: String::new(),
            size_bytes: spec.size_bytes,
            read_only: false,
            block_size: BlockSize { min: block_min, ..BlockSize::default() },
            features: Features {
                flush: true,
                fua: true,
                trim: true,
                write_zeroes: true,
                fast_zero: true,
                cache: true,
                // A single descriptor serves all connections, so one sync covers all their writes.
                multi_conn: connections > 1,
            },
            users: Some(Users::new(connections, in_use(&spec.name, connections))),
        };
        let exports = ExportTable::new(vec![export])?;
        Ok(Self { spec, file, exports })
    }

    fn users(&self) -> Option<&Users> {
        self.exports.as_slice().first()?.users.as_deref()
    }

    /// Clients that may have the disk open at once.
    fn connections_max(&self) -> usize {
        self.users().map_or(1, |users| users.max())
    }

    /// True if another client may open the disk.
    fn has_place(&self) -> bool {
        self.users().is_none_or(|users| users.count() < users.max())
    }

    fn block_status(&self, request: &Request) -> io::Result<Vec<tidelock_nbd::Extent>> {
        let extents = self.file.extents(request.offset..request.end(), STATUS_EXTENTS_MAX)?;
        let state = |kind| match kind {
            ExtentKind::Allocated => ExtentState::DATA,
            ExtentKind::Hole => ExtentState::HOLE_ZERO,
        };
        Ok(extents
            .into_iter()
            .map(|e| tidelock_nbd::Extent { len: e.len, state: state(e.kind) })
            .collect())
    }

    fn extent_of(&self, request: &Request) -> Extent {
        Extent { disk: self.spec.id, offset: request.offset, len_bytes: request.len.into() }
    }
}

/// The refusal of a client that finds no place at a disk.
fn in_use(disk: &str, connections: usize) -> String {
    format!(
        "disk {disk} is in use: {connections} client{} at once may use it, as two guests on one disk destroy it; \
         end the other one, or set `connections` in the disk's section of the daemon's configuration",
        if connections == 1 { "" } else { "s" }
    )
}

/// The clients of a member's disks. `S`: their sockets.
#[derive(Debug)]
pub struct NbdTap<S, F> {
    /// The member's name, in the log.
    member: String,
    disks: Vec<TapDisk<F>>,
    pool: BufPool,
    limits: Limits,
    stats: Arc<OwnerStats>,
    now: MonoNanos,
    taking: Taking,
    listens: bool,
    connections: BTreeMap<ConnectionId, Connection<S>>,
    next_connection: u64,
    requests: Requests,
    /// Requests that the loop has not taken yet.
    asked: Vec<GuestIo>,
    /// Connections with something to send, so that a round looks at no others.
    touched: Vec<ConnectionId>,
    /// Disks whose sockets do not accept, because a client came while nothing was taken.
    unaccepted: Vec<usize>,
    /// Disks whose sockets accept again at the next look.
    accept_later: Vec<usize>,
    looks_later: bool,
    /// The last time that a line about a disk's clients was logged, by disk.
    said_at: HashMap<usize, MonoNanos>,
    turned_away: bool,
}

impl<S, F: DiskFile> NbdTap<S, F> {
    /// A tap that takes nothing yet.
    #[must_use]
    pub fn new(
        member: String,
        disks: Vec<TapDisk<F>>,
        pool: BufPool,
        limits: Limits,
        stats: Arc<OwnerStats>,
        now: MonoNanos,
    ) -> Self {
        Self {
            member,
            disks,
            pool,
            limits,
            stats,
            now,
            taking: Taking::Nothing,
            listens: false,
            connections: BTreeMap::new(),
            next_connection: 0,
            requests: Requests::default(),
            asked: Vec::new(),
            touched: Vec::new(),
            unaccepted: Vec::new(),
            accept_later: Vec::new(),
            looks_later: false,
            said_at: HashMap::new(),
            turned_away: false,
        }
    }

    /// The time of what is told next.
    pub fn set_now(&mut self, now: MonoNanos) {
        self.now = now;
    }

    /// Requests that the owner loop has not been told of.
    pub fn asked(&mut self) -> &mut Vec<GuestIo> {
        &mut self.asked
    }

    /// The connection that an open request has come on, and its client's name for it.
    #[must_use]
    pub fn origin(&self, request: RequestId) -> (ConnectionId, Cookie) {
        self.requests.origin(request)
    }

    /// True if every answer has been sent.
    #[must_use]
    pub fn has_sent_answers(&self) -> bool {
        self.connections.values().all(Connection::is_flushed)
    }

    /// Requests are taken from now on, or not.
    pub fn set_taking(&mut self, network: &mut impl Network<Socket = S>, what: Taking) {
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
        disks.into_iter().for_each(|disk| network.accept(disk));
    }

    /// A client has connected to a disk's socket.
    pub fn accepted(
        &mut self,
        network: &mut impl Network<Socket = S>,
        disk: usize,
        accepted: io::Result<Option<S>>,
    ) {
        if self.taking == Taking::Nothing {
            self.unaccepted.push(disk);
            return;
        }
        if let Err(error) = &accepted {
            // At a limit of descriptors the next accept fails at once, too.
            self.accept_later.push(disk);
            self.look_later(network);
            if self.may_say(disk) {
                tracing::warn!(
                    member = self.member, disk = self.disks[disk].spec.name, %error,
                    "cannot accept a client of the disk: trying again ten times a second"
                );
            }
            return;
        }
        network.accept(disk);
        if self.taking == Taking::TurnAway {
            return self.turned_away(disk);
        }
        let Some(socket) = accepted.ok().flatten() else { return };
        self.make_room_for_handshake(network, disk);
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        let of_disk = &self.disks[disk];
        let limits = self.limits.shared_by(of_disk.connections_max());
        let exports = of_disk.exports.clone();
        let connection = Connection::new(id, disk, socket, exports, limits, &self.pool, self.now);
        self.connections.insert(id, connection);
        self.stats.connections.fetch_add(1, Ordering::Relaxed);
        self.touched.push(id);
        self.want_input(network, id);
        self.look_later(network);
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
    fn make_room_for_handshake(&mut self, network: &mut impl Network<Socket = S>, disk: usize) {
        let of_disk = self.handshakes().into_iter();
        let of_disk = of_disk.filter(|(_, id)| self.connections[id].disk() == disk);
        let of_disk: Vec<_> = of_disk.map(|(_, id)| id).collect();
        if of_disk.len() >= HANDSHAKES_MAX {
            self.drop_connection(network, of_disk[0]);
        }
    }

    fn look_later(&mut self, network: &mut impl Network<Socket = S>) {
        if !std::mem::replace(&mut self.looks_later, true) {
            network.look_after(LOOK_EVERY);
        }
    }

    /// Ends handshakes that take too long, and accepts again where that failed.
    pub fn look(&mut self, network: &mut impl Network<Socket = S>) {
        self.looks_later = false;
        for disk in std::mem::take(&mut self.accept_later) {
            network.accept(disk);
        }
        let handshakes = self.handshakes();
        for (since, id) in &handshakes {
            if self.now.since_ns(*since) > HANDSHAKE_MAX.as_nanos() as u64 {
                self.drop_connection(network, *id);
            }
        }
        if !handshakes.is_empty() {
            self.look_later(network);
        }
    }

    fn drop_connection(&mut self, network: &mut impl Network<Socket = S>, id: ConnectionId) {
        if let Some(connection) = self.connections.remove(&id) {
            connection.hang_up(network);
            self.stats.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Before a client is told that the disk is in use: whoever has hung up needs its place no more.
    fn refresh_places(&mut self, network: &impl Network<Socket = S>, id: ConnectionId) {
        let connection = &self.connections[&id];
        let disk = connection.disk();
        if connection.handshakes_since().is_none() || self.disks[disk].has_place() {
            return;
        }
        for other in self.connections.values_mut().filter(|other| other.disk() == disk) {
            other.leave_if_hung_up(network);
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
    pub fn received(
        &mut self,
        network: &mut impl Network<Socket = S>,
        id: ConnectionId,
        result: io::Result<u32>,
        buf: AlignedBuf,
    ) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.received(result, buf);
        self.take_input(network, id);
    }

    /// Takes the requests that have arrived.
    fn take_input(&mut self, network: &mut impl Network<Socket = S>, id: ConnectionId) {
        self.touched.push(id);
        self.refresh_places(network, id);
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
        self.want_input(network, id);
    }

    fn want_input(&mut self, network: &mut impl Network<Socket = S>, id: ConnectionId) {
        let connection = self.connections.get_mut(&id).expect("looked up by the caller");
        connection.receive(network);
    }

    /// A request of a client: for the owner loop, or answered here.
    fn take_request(&mut self, id: ConnectionId, request: Request, data: Option<Payload>) {
        let connection = self.connections.get_mut(&id).expect("looked up by the caller");
        connection.begin(&request);
        if request.command == Command::Write && tidelock_planted::is(Bug::RepliedBeforeWritten) {
            connection.reply(&request, Ok(()));
        }
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
        let extent = disk.extent_of(&request);
        let id = self.requests.begin(id, request);
        self.asked.push(GuestIo { id, extent, op });
    }

    /// The owner loop has answered a request. A client that went away hears nothing of it.
    pub fn reply(&mut self, request: RequestId, answer: Result<Bytes, DiskError>) {
        let (id, request) = self.requests.end(request);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        match answer {
            _ if request.command == Command::Write
                && tidelock_planted::is(Bug::RepliedBeforeWritten) => {}
            Ok(data) if request.command == Command::Read => connection.reply_data(&request, data),
            Ok(_) => connection.reply(&request, Ok(())),
            Err(error) => connection.reply(&request, Err(Errno::from_os(error.0))),
        }
        self.touched.push(id);
    }

    /// Sends what there is to send, takes what a connection has room for again, and closes what is over.
    pub fn send_replies(&mut self, network: &mut impl Network<Socket = S>) {
        while let Some(id) = self.touched.pop() {
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.send(network);
            if connection.has_room_again() {
                // The connection is touched again, so the loop comes back to it.
                self.take_input(network, id);
            } else if connection.is_over() {
                self.drop_connection(network, id);
            }
        }
    }

    /// A send has ended.
    pub fn sent(&mut self, id: ConnectionId, result: io::Result<u32>, bufs: SendBufs) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.sent(result, bufs);
            self.touched.push(id);
        }
    }

    /// The loop has ended: nothing is answered any more.
    pub fn hang_up_all(&mut self, network: &mut impl Network<Socket = S>) {
        for connection in std::mem::take(&mut self.connections).into_values() {
            connection.hang_up(network);
        }
        self.requests.give_up_all();
    }
}
