//! The owner loop: one thread per member that holds all its state, without locks.
//!
//! NBD sockets, local disks and wake-ups from other threads are operations of one io_uring; a turn
//! of the loop is one system call. Completions and messages go into the connections and the
//! sequencer, the sequencer's actions come out and are carried out in their order, and what was
//! admitted in the turn goes to the link as one batch.
//!
//! ```text
//!  sockets ─► connection ─► sequencer ─► actions ─┬─► local disk ─► completion ─► sequencer
//!                 ▲                               ├─► link (records)
//!                 └── replies ◄── Complete ◄──────┴─► gate (P)
//! ```
//!
//! Reads and flushes do not pass through the sequencer: they never wait behind replication.
//! Invariant: every request taken from a connection is answered once, or given up by name when
//! its connection has gone.

mod connection;
pub mod copying;
mod disk;
pub mod idling;
mod local_op;
pub mod replication;
mod requests;
mod status;

pub use disk::DiskSetup;
pub use status::{OwnerView, Phase, Trouble};

use crate::clock;
use crate::copy_job::{Bounds, Purpose};
use crate::link::port::{FromLink, OwnerPort, ToLink};
use crate::link::{GateControl, Refusal};
use crate::sequencer::{Action, DiskError, Extent, OpId, Sequencer, Settings};
use crate::stats::OwnerStats;
use connection::{Connection, ConnectionId, Input};
use copying::Copying;
use disk::Disk;
use idling::Idling;
use local_op::{LocalOp, Progress};
use replication::Clocks;
use requests::{Requests, Slot};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use tidelock_nbd::{Command, Errno, Request};
use tidelock_protocol::hlc::{Hlc, WallClock};
use tidelock_protocol::ids::{Channel, Epoch, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form, Mode};
use tidelock_protocol::record::{Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_uring::{BufPool, Buffer, Completion, EventFd, Ring, SyncKind};
use tokio::sync::{mpsc, oneshot};

/// Operations that fit into one submission.
const RING_ENTRIES: u32 = 512;
/// Unused memory that is kept for the next requests.
const POOL_RETAIN_BYTES: usize = 64 << 20;
/// How often what cannot go on by itself is tried again (throttled copies, unreadable extents).
const TICK: std::time::Duration = std::time::Duration::from_millis(100);
/// Where the link is the limit the backlog fills again many times a second: said once in so long,
/// and counted each time.
const FULL_SAID_EVERY: std::time::Duration = std::time::Duration::from_secs(10);

/// What the owner loop is asked.
#[derive(Debug)]
pub enum ToOwner {
    /// From the link.
    Link(FromLink),
    /// Change the mode.
    SetMode(Mode),
    /// Take no more requests; answer when everything is done locally and at the backup. The loop
    /// ends then.
    Drain(oneshot::Sender<Drained>),
    /// End now.
    Stop,
}

/// A clean end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// The writer's last seq, which the backup has.
    pub seq: Seq,
    /// Its time.
    pub hlc: Hlc,
    /// Whether the backup's disks equal the local ones. If not, the next run has to compare them.
    pub whole: bool,
}

/// Where P\[self\] is stored for the gate.
pub trait PublishPending: Send + Sync {
    /// From now on every packet may depend on writes up to `seq`, the last of them of time `hlc`.
    fn publish(&self, seq: Seq, hlc: Hlc);
    /// Raises `p` to P of the member, with what tags of others have brought, and returns the
    /// greatest time of it.
    fn read(&self, _p: &mut CountVector) -> Hlc {
        Hlc(0)
    }
    /// From now on every packet may depend on this, too.
    fn raise(&self, _p: &CountVector, _hlc: Hlc) {}
}

/// What a writer among several members needs besides.
#[derive(Clone, Copy, Debug)]
pub struct Several {
    /// How records say what they depend on.
    pub form: Form,
    /// How often it says that it has nothing to write, in the HLC form.
    pub idle_interval: Duration,
}

/// Where the stream goes on after a clean stop.
#[derive(Clone, Copy, Debug)]
pub struct Resume {
    /// The granted epoch.
    pub epoch: Epoch,
    /// The last seq.
    pub seq: Seq,
    /// Its time.
    pub hlc: Hlc,
}

/// What an owner loop is made of.
pub struct OwnerParts {
    /// The member's name, for logs.
    pub member: String,
    /// For the sequencer.
    pub settings: Settings,
    /// The disks, by id.
    pub disks: Vec<DiskSetup>,
    /// What others reach the loop by.
    pub port: Arc<OwnerPort<ToOwner>>,
    /// Its receiving end.
    pub messages: Receiver<ToOwner>,
    /// Its wake-up.
    pub wake: EventFd,
    /// To the link.
    pub link: mpsc::UnboundedSender<(Channel, ToLink)>,
    /// The member's number there.
    pub channel: Channel,
    /// Where P goes.
    pub pending: Arc<dyn PublishPending>,
    /// The member's gate.
    pub gate: Arc<dyn GateControl>,
    /// Numbers for status and metrics.
    pub stats: Arc<OwnerStats>,
    /// State for status.
    pub view: Arc<OwnerView>,
    /// Bounds of copies.
    pub copy_bounds: Bounds,
    /// Where to go on without asking the backup.
    pub resume: Option<Resume>,
    /// If the group has other members.
    pub several: Option<Several>,
    /// No time that this run gives out is below.
    pub hlc_floor: Hlc,
    /// By how much the wall clock may jump.
    pub max_clock_lead: Duration,
}

/// The operations of the ring, as tokens: kind in the upper byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Wake,
    Tick,
    Accept(usize),
    Receive(ConnectionId),
    Send(ConnectionId),
    Read(Slot),
    Flush(Slot),
    Local(OpId),
    Idle,
}

impl Token {
    const KIND_SHIFT: u32 = 56;

    fn to_u64(self) -> u64 {
        let (kind, id) = match self {
            Token::Wake => (0, 0),
            Token::Tick => (1, 0),
            Token::Accept(disk) => (2, disk as u64),
            Token::Receive(id) => (3, id.0),
            Token::Send(id) => (4, id.0),
            Token::Read(slot) => (5, u64::from(slot.0)),
            Token::Flush(slot) => (6, u64::from(slot.0)),
            Token::Local(op) => (7, op.0),
            Token::Idle => (8, 0),
        };
        debug_assert!(id < 1 << Self::KIND_SHIFT);
        kind << Self::KIND_SHIFT | id
    }

    fn from_u64(token: u64) -> Token {
        let id = token & ((1 << Self::KIND_SHIFT) - 1);
        match token >> Self::KIND_SHIFT {
            0 => Token::Wake,
            1 => Token::Tick,
            2 => Token::Accept(id as usize),
            3 => Token::Receive(ConnectionId(id)),
            4 => Token::Send(ConnectionId(id)),
            5 => Token::Read(Slot(id as u32)),
            6 => Token::Flush(Slot(id as u32)),
            7 => Token::Local(OpId(id)),
            8 => Token::Idle,
            kind => unreachable!("token of kind {kind}"),
        }
    }
}

/// The state of one member.
pub struct Owner {
    member: String,
    ring: Ring,
    pool: BufPool,
    writer: WriterId,
    sequencer: Sequencer,
    disks: Vec<Disk>,
    connections: HashMap<ConnectionId, Connection>,
    next_connection: u64,
    /// Connections with something to send, so that a turn looks at no others.
    touched: Vec<ConnectionId>,
    requests: Requests,
    local_ops: HashMap<OpId, LocalOp>,
    copying: Copying,
    admitted: Vec<Record>,
    port: Arc<OwnerPort<ToOwner>>,
    messages: Receiver<ToOwner>,
    wake: EventFd,
    link: mpsc::UnboundedSender<(Channel, ToLink)>,
    channel: Channel,
    pending: Arc<dyn PublishPending>,
    gate: Arc<dyn GateControl>,
    stats: Arc<OwnerStats>,
    view: Arc<OwnerView>,
    has_copy: bool,
    attached: bool,
    refusal: Option<Refusal>,
    draining: Option<oneshot::Sender<Drained>>,
    stopped: bool,
    tick_armed: bool,
    full_said_at: Option<MonoNanos>,
    several: Option<Several>,
    idling: Idling,
    /// P with what tags have brought, as last looked at.
    observed: CountVector,
    observed_hlc: Hlc,
    /// Guests are served. In a group of several, after an unclean stop: from the attachment on,
    /// because until then no tag says what the disk may hold.
    serving: bool,
    wall: WallClock,
    now: MonoNanos,
    wall_ms: u64,
}

impl Owner {
    /// Sets up the loop on the thread that will run it.
    pub fn new(parts: OwnerParts) -> Result<Self, tidelock_uring::RingError> {
        let ring = Ring::new(RING_ENTRIES)?;
        tracing::debug!(member = parts.member, ring = ?ring.mode(), "owner loop");
        let mut sequencer = Sequencer::new(parts.settings);
        let mut wall = WallClock::new(parts.max_clock_lead.as_millis() as u64);
        let now = clock::mono_now();
        let wall_ms = wall.read(clock::wall_ms(), now);
        sequencer.observe(parts.hlc_floor);
        if let Some(Resume { epoch, seq, hlc }) = parts.resume {
            sequencer.start(epoch, seq, hlc, now, wall_ms);
        }
        Ok(Self {
            member: parts.member,
            ring,
            pool: BufPool::new(POOL_RETAIN_BYTES),
            writer: parts.settings.writer,
            sequencer,
            disks: parts.disks.into_iter().map(Disk::new).collect(),
            connections: HashMap::new(),
            next_connection: 0,
            touched: Vec::new(),
            requests: Requests::default(),
            local_ops: HashMap::new(),
            copying: Copying::new(parts.copy_bounds),
            admitted: Vec::new(),
            port: parts.port,
            messages: parts.messages,
            wake: parts.wake,
            link: parts.link,
            channel: parts.channel,
            pending: parts.pending,
            gate: parts.gate,
            stats: parts.stats,
            view: parts.view,
            has_copy: false,
            attached: false,
            refusal: None,
            draining: None,
            stopped: false,
            tick_armed: false,
            full_said_at: None,
            serving: parts.several.is_none() || parts.resume.is_some(),
            several: parts.several,
            idling: Idling::default(),
            observed: CountVector::new(),
            observed_hlc: Hlc(0),
            wall,
            now,
            wall_ms,
        })
    }

    /// Runs until it is drained or stopped.
    pub fn run(mut self) -> std::io::Result<()> {
        self.ring.wait_event(Token::Wake.to_u64(), &self.wake);
        if self.serving {
            self.accept_all();
        }
        while !self.stopped {
            self.ring.submit_and_wait(1)?;
            self.now = clock::mono_now();
            self.read_clock();
            while let Some(completion) = self.ring.next_completion() {
                self.complete(completion);
            }
            self.take_acks();
            self.drive_copies();
            self.drive_idle();
            self.act();
            self.send_replies();
            if !self.admitted.is_empty() {
                // Waking the link can cost more than a local write: disk and guest go first.
                self.ring.submit_and_wait(0)?;
                self.hand_over();
            }
            self.finish_drain();
            self.publish_stats();
        }
        for (_, connection) in self.connections.drain() {
            connection.hang_up();
        }
        self.requests.give_up_all();
        Ok(())
    }

    fn complete(&mut self, completion: Completion) {
        let Completion { token, result, buffer } = completion;
        match Token::from_u64(token) {
            Token::Wake => {
                self.ring.wait_event(token, &self.wake);
                while let Ok(message) = self.messages.try_recv() {
                    self.handle(message);
                }
            }
            Token::Tick => {
                self.tick_armed = false;
                self.copying.tick();
            }
            Token::Idle => self.idle_due(),
            Token::Accept(disk) => self.accepted(disk, result, buffer),
            Token::Receive(id) => self.received(id, result, buffer),
            Token::Send(id) => self.sent(id, result, buffer),
            Token::Read(slot) => self.read(slot, result, buffer),
            Token::Flush(slot) => self.flushed(slot, result),
            Token::Local(op) => self.local(op, result, buffer),
        }
    }

    // ---- messages

    fn handle(&mut self, message: ToOwner) {
        match message {
            ToOwner::Link(message) => self.hear_link(message),
            ToOwner::SetMode(mode) => {
                self.sequencer.set_mode(mode);
                self.to_link(ToLink::Mode(mode));
            }
            ToOwner::Drain(reply) => self.begin_drain(reply),
            ToOwner::Stop => self.stopped = true,
        }
    }

    fn hear_link(&mut self, message: FromLink) {
        match message {
            FromLink::Attached { attached, first } => {
                self.attached = true;
                self.set_refusal(None);
                if first {
                    self.sequencer.start(
                        attached.epoch,
                        attached.durable,
                        attached.last_hlc,
                        self.now,
                        self.wall_ms,
                    );
                }
                let must_compare =
                    matches!(attached.copy, CopyState::Partial | CopyState::Resyncing);
                if self.several.is_some() && must_compare {
                    // Whatever leaves before the copy has ended may tell what this run cannot
                    // name. C stands still below this until then.
                    let next = CountVector::of(self.writer, attached.durable.next());
                    self.pending.raise(&next, Hlc(attached.last_hlc.0 + 1));
                }
                let Self { member, copying, disks, .. } = self;
                let ranges = |purpose| copied_ranges(member, disks, purpose);
                copying.attached(member, attached.copy, ranges, self.now);
                if self.several.is_some() && must_compare {
                    self.copying.await_floor();
                }
                if !self.serving {
                    self.serving = true;
                    self.accept_all();
                }
            }
            FromLink::Floor { pending, hlc } => {
                let pad_to = pending.get(self.writer);
                self.pending.raise(&pending, hlc);
                self.observe_tags();
                self.copying.floor_heard(pad_to);
            }
            FromLink::Detached => self.attached = false,
            FromLink::Digest { disk, offset, equal } => {
                self.copying.digest_result(disk, offset, equal);
            }
            FromLink::Refused(refusal) => {
                self.attached = false;
                self.set_refusal(Some(refusal));
            }
        }
    }

    fn set_refusal(&mut self, refusal: Option<Refusal>) {
        if self.refusal != refusal {
            self.refusal.clone_from(&refusal);
            self.view.change_trouble(|trouble| trouble.refusal = refusal);
        }
    }

    fn to_link(&self, message: ToLink) {
        // The link ends after the owner loops, or with the daemon.
        let _ = self.link.send((self.channel, message));
    }

    fn take_acks(&mut self) {
        let clocks = self.clocks();
        let Self { member, sequencer, copying, port, gate, .. } = self;
        replication::take_acks(member, sequencer, copying, port, gate.as_ref(), clocks);
    }

    fn clocks(&self) -> Clocks {
        Clocks { now: self.now, wall_ms: self.wall_ms }
    }

    // ---- copies

    fn drive_copies(&mut self) {
        let clocks = self.clocks();
        let Self { sequencer, copying, port, .. } = self;
        replication::drive_copies(sequencer, copying, port, clocks);
        if self.copying.needs_tick() && !self.tick_armed {
            self.tick_armed = true;
            self.ring.timeout(Token::Tick.to_u64(), TICK);
        }
    }

    // ---- the sequencer's actions

    fn act(&mut self) {
        while let Some(action) = self.sequencer.poll_action() {
            match action {
                Action::Publish(seq, hlc) => self.pending.publish(seq, hlc),
                Action::Send(record) => self.admitted.push(record),
                Action::SendInOrder(message) => {
                    self.hand_over();
                    self.to_link(ToLink::InOrder(message));
                }
                Action::Write { op, extent, effect, fua } => {
                    let disk = &self.disks[extent.disk.0 as usize];
                    self.start_local(op, LocalOp::write(disk, extent, effect, fua));
                }
                Action::Read { op, extent } => {
                    let disk = &self.disks[extent.disk.0 as usize];
                    self.start_local(op, LocalOp::read(disk, extent));
                }
                Action::Complete(request, result) => {
                    if result.is_err() {
                        self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
                    }
                    self.reply(requests::slot_of(request), result.map_err(errno));
                }
                Action::Copied { extent, outcome } => self.copying.copied(extent, outcome),
                Action::Suspect(extent) => {
                    tracing::error!(
                        member = self.member,
                        disk = self.disks[extent.disk.0 as usize].name(),
                        offset = extent.offset,
                        len_bytes = extent.len_bytes,
                        "the local disk failed a write and cannot be read back there: the sites \
                         may differ until it can be copied"
                    );
                    self.copying.suspect(extent);
                }
            }
        }
    }

    fn start_local(&mut self, op: OpId, local: LocalOp) {
        let progress = local.start(op, &mut self.ring, &self.pool);
        self.advance(op, progress);
    }

    fn local(&mut self, op: OpId, result: std::io::Result<u32>, buffer: Buffer) {
        let local = self.local_ops.remove(&op).expect("a local operation in flight");
        let disk = &mut self.disks[local.disk().0 as usize];
        let progress = local.advance(op, result, buffer, disk, &mut self.ring, &self.pool);
        self.advance(op, progress);
        // What it set free may start in this turn.
        self.act();
    }

    fn advance(&mut self, op: OpId, progress: Progress) {
        match progress {
            Progress::InFlight(local) => {
                self.local_ops.insert(op, local);
            }
            Progress::Written(result) => {
                self.sequencer.written(op, result, self.now, self.wall_ms);
            }
            Progress::Read(result) => {
                self.sequencer.read_done(op, result, self.now, self.wall_ms);
            }
        }
    }

    /// Gives what was admitted in this turn to the link.
    fn hand_over(&mut self) {
        if !self.admitted.is_empty() {
            let records = std::mem::take(&mut self.admitted);
            self.to_link(ToLink::Records { records, admitted_at: self.now });
        }
    }

    // ---- connections

    fn accepted(&mut self, disk: usize, result: std::io::Result<u32>, buffer: Buffer) {
        if self.draining.is_some() {
            return;
        }
        self.ring.accept(Token::Accept(disk).to_u64(), self.disks[disk].listener());
        match (result, buffer.into_fd()) {
            (Ok(_), Some(fd)) => {
                let id = ConnectionId(self.next_connection);
                self.next_connection += 1;
                let connection = Connection::new(id, disk, fd, &self.disks[disk], &self.pool);
                self.connections.insert(id, connection);
                self.stats.connections.fetch_add(1, Ordering::Relaxed);
                self.touched.push(id);
                self.want_input(id);
            }
            (Err(error), _) => {
                let disk = self.disks[disk].name();
                tracing::warn!(member = self.member, disk, %error, "cannot accept a connection");
            }
            (Ok(_), None) => {}
        }
    }

    fn received(&mut self, id: ConnectionId, result: std::io::Result<u32>, buffer: Buffer) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.received(result, buffer.into_aligned());
        self.take_input(id);
    }

    /// Acts on everything that has arrived, then asks for more.
    fn take_input(&mut self, id: ConnectionId) {
        self.touched.push(id);
        loop {
            let connection = self.connections.get_mut(&id).expect("looked up by the caller");
            match connection.next_input(&self.pool) {
                Input::Request(request) => self.submit(id, request, None),
                Input::Write(request, data) => {
                    self.submit(id, request, Some(Payload::new(data)));
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

    fn submit(&mut self, id: ConnectionId, request: Request, data: Option<Payload>) {
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
                        let token = Token::Flush(slot).to_u64();
                        self.ring.fsync(token, disk.fd(), SyncKind::Data);
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

    fn accept_all(&mut self) {
        for (index, disk) in self.disks.iter().enumerate() {
            self.ring.accept(Token::Accept(index).to_u64(), disk.listener());
        }
    }

    // ---- other members

    /// What the member has heard of others before it sent the request at hand: its record depends
    /// on it.
    fn observe_tags(&mut self) {
        let Some(several) = self.several else { return };
        self.observed_hlc = self.pending.read(&mut self.observed);
        match several.form {
            Form::Vector => self.sequencer.depends_on(&self.observed),
            Form::Hlc => self.sequencer.observe(self.observed_hlc),
        }
    }

    fn read_clock(&mut self) {
        self.wall_ms = self.wall.read(clock::wall_ms(), self.now);
        let refused_ms = self.wall.refused_ms().unwrap_or(0);
        let before = self.stats.clock_refused_ms.swap(refused_ms, Ordering::Relaxed);
        if refused_ms != 0 && before == 0 {
            tracing::error!(
                member = self.member,
                jump_ms = refused_ms,
                "the wall clock has jumped and is not believed until it comes back; after a \
                 correction that is meant, start the daemon again"
            );
        }
        let ceiling_ms = self.view.hlc_ceiling_ms();
        if ceiling_ms > 0 {
            self.sequencer.set_ceiling(ceiling_ms);
        }
    }

    /// In the HLC form a writer that has nothing to write says so, while others write.
    fn drive_idle(&mut self) {
        let Some(Several { form: Form::Hlc, idle_interval }) = self.several else { return };
        if !self.attached || !self.sequencer.is_started() || self.draining.is_some() {
            return;
        }
        let frontier = self.port.frontier().max(self.observed_hlc);
        self.idling.heard(frontier, self.now);
        if self.idling.armed {
            return;
        }
        if !self.idling.wants(self.sequencer.record_hlc(), self.now) {
            self.port.wake_at_frontier();
            // It may have risen between the look and the wish.
            if self.port.frontier() <= frontier {
                return;
            }
        }
        self.idling.armed = true;
        self.ring.timeout(Token::Idle.to_u64(), idle_interval);
    }

    fn idle_due(&mut self) {
        self.idling.armed = false;
        let Some(Several { form: Form::Hlc, idle_interval }) = self.several else { return };
        self.idling.heard(self.port.frontier(), self.now);
        let last = self.sequencer.record_hlc();
        let quiet_since = last.physical_ms() + idle_interval.as_millis() as u64;
        let is_due = self.idling.frontier > last || quiet_since <= self.wall_ms;
        if self.attached && self.draining.is_none() && is_due && self.idling.wants(last, self.now) {
            self.sequencer.observe(self.idling.frontier);
            self.sequencer.idle(self.now, self.wall_ms);
        }
    }

    fn sequence(&mut self, slot: Slot, disk: usize, request: &Request, effect: Effect) {
        self.observe_tags();
        self.sequencer.submit(
            requests::request_of(slot),
            self.disks[disk].extent(request),
            effect,
            request.flags.fua(),
            self.now,
            self.wall_ms,
        );
    }

    fn block_status(&mut self, slot: Slot, disk: usize, request: &Request) {
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

    fn read(&mut self, slot: Slot, result: std::io::Result<u32>, buffer: Buffer) {
        let request = *self.requests.get(slot);
        let disk = self.connections.get(&self.requests.connection(slot)).map(Connection::disk);
        let Some(disk) = disk else {
            self.requests.end(slot);
            return;
        };
        let token = Token::Read(slot).to_u64();
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
                tracing::error!(member = self.member, disk = disk.name(), %error,
                    offset = request.offset, len = request.len, "the local disk failed a read");
                self.reply(slot, Err(Errno::from(&error)));
            }
        }
    }

    fn flushed(&mut self, slot: Slot, result: std::io::Result<u32>) {
        let id = self.requests.connection(slot);
        let disk = self.connections.get(&id).map(Connection::disk);
        if let (Err(error), Some(disk)) = (&result, disk) {
            self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
            if self.disks[disk].poison(&self.member, error) {
                let entry = (self.disks[disk].name().to_owned(), error.to_string());
                self.view.change_trouble(|trouble| trouble.failed_disks.push(entry));
            }
        }
        self.reply(slot, result.map(drop).map_err(|e| Errno::from(&e)));
    }

    fn reply(&mut self, slot: Slot, result: Result<(), Errno>) {
        let (id, request) = self.requests.end(slot);
        // A client that went away gets no answer; what it asked for was done all the same.
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.reply(&request, result);
        self.touched.push(id);
    }

    /// Sends what the turn has produced, and closes what is over.
    fn send_replies(&mut self) {
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

    fn sent(&mut self, id: ConnectionId, result: std::io::Result<u32>, buffer: Buffer) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.sent(result, buffer.into_many());
            self.touched.push(id);
        }
    }

    // ---- the end

    fn begin_drain(&mut self, reply: oneshot::Sender<Drained>) {
        tracing::info!(member = self.member, "draining: no new requests");
        self.draining = Some(reply);
        for (id, connection) in &mut self.connections {
            connection.begin_shutdown();
            self.touched.push(*id);
        }
        self.copying.stop();
    }

    /// Whether everything that this member may depend on is in C, also of other writers: the next
    /// run begins with a P that does not name it.
    fn is_covered(&mut self) -> bool {
        self.observe_tags();
        let (committed, watermark) = self.port.told();
        match self.several {
            None => true,
            Some(Several { form: Form::Vector, .. }) => committed.covers(&self.observed),
            Some(Several { form: Form::Hlc, .. }) => watermark >= self.observed_hlc,
        }
    }

    fn finish_drain(&mut self) {
        if self.draining.is_none() {
            return;
        }
        let done = self.requests.is_empty()
            && self.connections.values().all(Connection::is_flushed)
            && replication::is_settled(&self.sequencer)
            && self.is_covered();
        if !done {
            return;
        }
        let reply = self.draining.take().expect("just seen");
        self.to_link(ToLink::Detach);
        let _ = reply.send(Drained {
            seq: self.sequencer.last_seq(),
            hlc: self.sequencer.last_hlc(),
            whole: self.sequencer.is_started() && self.copying.is_whole() && self.sync_disks(),
        });
        self.stopped = true;
    }

    /// Makes durable what the backup has. A clean end says that the sites are equal, and must
    /// stay true if the host loses power right after it.
    fn sync_disks(&self) -> bool {
        self.disks.iter().all(|disk| {
            let synced = rustix::fs::fdatasync(disk.fd());
            if let Err(error) = &synced {
                tracing::error!(
                    member = self.member,
                    disk = disk.name(),
                    %error,
                    "the local disk failed its last flush: the next start compares the sites"
                );
            }
            synced.is_ok() && disk.poisoned().is_none()
        })
    }

    fn publish_stats(&mut self) {
        let full = self.sequencer.is_backlog_full();
        let was_full = self.stats.backlog_full.swap(full, Ordering::Relaxed);
        if full && !was_full {
            self.stats.backlog_full_count.fetch_add(1, Ordering::Relaxed);
            let is_news =
                |said: MonoNanos| self.now.since_ns(said) >= FULL_SAID_EVERY.as_nanos() as u64;
            if self.full_said_at.is_none_or(is_news) {
                self.full_said_at = Some(self.now);
                tracing::warn!(member = self.member, "the backlog is full: guests' writes wait");
            }
        }
        self.stats.last_hlc.store(self.sequencer.last_hlc().0, Ordering::Relaxed);
        let lead_ms = self.sequencer.clock_lead_ms(self.wall_ms);
        self.stats.clock_lead_ms.store(lead_ms, Ordering::Relaxed);
        self.stats.backlog_bytes.store(self.sequencer.backlog_bytes(), Ordering::Relaxed);
        self.stats.waiting.store(self.sequencer.waiting() as u64, Ordering::Relaxed);
        self.view.set(self.phase(), self.sequencer.published(), self.copying.suspect_bytes());
        let copy = self.copying.progress(self.now);
        if copy.is_some() || self.has_copy {
            self.has_copy = copy.is_some();
            self.view.set_copy(copy);
        }
        let draining = self.draining.is_some();
        replication::ask_for_acks(&self.sequencer, &self.copying, &self.port, draining);
    }

    fn phase(&self) -> Phase {
        match &self.refusal {
            Some(refusal) if refusal.is_final() => Phase::Fenced,
            Some(_) => Phase::Refused,
            None if !self.sequencer.is_started() => Phase::WaitingForBackup,
            None => self.copying.phase(self.attached),
        }
    }
}

/// What a copy has to look at: for an initial copy what may hold anything but zeroes, else all.
fn copied_ranges(member: &str, disks: &[Disk], purpose: Purpose) -> Vec<Extent> {
    let allocated = |disk: &Disk| {
        disk.allocated().unwrap_or_else(|error| {
            tracing::warn!(
                member,
                disk = disk.name(),
                %error,
                "cannot list holes: copying all of it"
            );
            vec![disk.whole()]
        })
    };
    match purpose {
        Purpose::Initial => disks.iter().flat_map(allocated).collect(),
        Purpose::Compare => disks.iter().map(Disk::whole).collect(),
    }
}

fn errno(error: DiskError) -> Errno {
    Errno::from_os(error.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive() {
        let id = (1 << 40) + 7;
        for token in [
            Token::Wake,
            Token::Tick,
            Token::Accept(3),
            Token::Receive(ConnectionId(id)),
            Token::Send(ConnectionId(id)),
            Token::Read(Slot(u32::MAX)),
            Token::Flush(Slot(0)),
            Token::Local(OpId(id)),
            Token::Idle,
        ] {
            assert_eq!(Token::from_u64(token.to_u64()), token);
        }
    }
}
