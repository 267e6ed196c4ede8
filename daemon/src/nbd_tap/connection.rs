//! One NBD connection of a guest: what it asks, and what is sent to it.
//!
//! Small requests arrive many at a time in the staging buffer; the payload of a large write is
//! received straight into the memory that the disk and the link will use. Bounded: beyond its [`Limits`] nothing more
//! is read from the socket until answers have left.

use super::Network;
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use tidelock_nbd::{Command, Errno, Event, ExportTable, Extent, ProtocolError, Request, Session};
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;
use tidelock_uring::{AlignedBuf, BufPool, SEND_BUFS_MAX, SendBufs, skip_sent};

/// Bounds of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that are not answered.
    pub requests_max: usize,
    /// Data of requests, and replies that are not sent; one request may come on top.
    pub bytes_max: usize,
    /// Bytes that are received at a time.
    pub staging_bytes: usize,
}

impl Limits {
    /// Bytes of all connections of a disk together.
    pub const OF_DISK: Self =
        Self { requests_max: 1024, bytes_max: 64 << 20, staging_bytes: 128 << 10 };

    /// The share of one of so many connections. Each may have as many requests as if it were alone.
    pub(super) fn shared_by(self, connections_max: usize) -> Self {
        Self { bytes_max: self.bytes_max / connections_max, ..self }
    }
}

/// A connection's number; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

/// What the next input is.
#[derive(Debug)]
pub enum Input {
    /// A request without data.
    Request(Request),
    /// A write with its data.
    Write(Request, Bytes),
    /// Nothing until more arrives.
    NeedMore,
    /// Nothing until answers have left.
    Busy,
    /// Nothing any more.
    Closed,
    /// Nothing any more: the client broke the protocol.
    Violation(ProtocolError),
    /// The client was told that the disk is in use. There may be more.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Nothing more is read; answers are still sent.
    Closing,
    /// Nothing can be sent either.
    Broken,
}

#[derive(Debug)]
struct PayloadIn {
    request: Request,
    /// `None` while the kernel receives into it.
    buf: Option<AlignedBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receiving {
    Staging,
    Payload,
}

/// One connection.
#[derive(Debug)]
pub struct Connection<S> {
    id: ConnectionId,
    disk: usize,
    socket: S,
    session: Session,
    accepted_at: MonoNanos,
    limits: Limits,
    state: State,
    staging: Option<AlignedBuf>,
    staging_at: usize,
    payload: Option<PayloadIn>,
    receiving: Option<Receiving>,
    busy: bool,
    requests: usize,
    request_bytes: usize,
    out: VecDeque<Bytes>,
    out_bytes: usize,
    /// The rest of a send that came short; goes first.
    rest: SendBufs,
    sending: bool,
}

impl<S> Connection<S> {
    /// A client has connected to a disk's socket.
    pub fn new(
        id: ConnectionId,
        disk: usize,
        socket: S,
        exports: ExportTable,
        limits: Limits,
        pool: &BufPool,
        now: MonoNanos,
    ) -> Self {
        Self {
            accepted_at: now,
            limits,
            id,
            disk,
            socket,
            session: Session::new(exports),
            state: State::Open,
            staging: Some(pool.get(limits.staging_bytes)),
            staging_at: 0,
            payload: None,
            receiving: None,
            busy: false,
            requests: 0,
            request_bytes: 0,
            out: VecDeque::new(),
            out_bytes: 0,
            rest: SendBufs::new(),
            sending: false,
        }
    }

    /// The disk that it is for.
    pub fn disk(&self) -> usize {
        self.disk
    }

    /// When it was accepted, if the client has not opened the disk since.
    pub fn handshakes_since(&self) -> Option<MonoNanos> {
        (self.session.export().is_none()).then_some(self.accepted_at)
    }

    /// A client that has hung up needs its place no more, also if nothing is read from it for
    /// now: its next process may be waiting for the place.
    pub fn leave_if_hung_up(&mut self, network: &impl Network<Socket = S>) {
        if network.has_hung_up(&self.socket) {
            self.session.leave();
        }
    }

    /// Receives more, if there is reason to.
    pub fn receive(&mut self, network: &mut impl Network<Socket = S>) {
        if self.receiving.is_some() || self.busy || self.state != State::Open {
            return;
        }
        if let Some(payload) = &mut self.payload {
            let buf = payload.buf.take().expect("not receiving");
            let range = buf.len()..payload.request.len as usize;
            self.receiving = Some(Receiving::Payload);
            network.receive(self.id, &self.socket, buf, range, true);
        } else {
            let buf = self.staging.take().expect("not receiving");
            debug_assert_eq!(self.staging_at, buf.len(), "input was left");
            let capacity = buf.capacity();
            self.receiving = Some(Receiving::Staging);
            network.receive(self.id, &self.socket, buf, 0..capacity, false);
        }
    }

    /// Something has arrived.
    pub fn received(&mut self, result: io::Result<u32>, buf: AlignedBuf) {
        let receiving = self.receiving.take().expect("a receive was in flight");
        match result {
            // The client has gone; what it asked for is still done.
            Ok(0) => self.close(),
            Ok(count) if receiving == Receiving::Payload => self.session.payload_taken(count),
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(connection = self.id.0, %error, "receive failed");
                self.break_off();
            }
        }
        match receiving {
            Receiving::Staging => {
                self.staging = Some(buf);
                self.staging_at = 0;
            }
            Receiving::Payload => {
                if let Some(payload) = &mut self.payload {
                    payload.buf = Some(buf);
                }
            }
        }
    }

    /// The next thing to act on.
    pub fn next_input(&mut self, pool: &BufPool) -> Input {
        loop {
            if self.state != State::Open {
                return Input::Closed;
            }
            if self.receiving.is_some() {
                return Input::NeedMore;
            }
            if self.is_full() {
                self.busy = true;
                return Input::Busy;
            }
            if self.payload.is_some() {
                return self.next_payload();
            }
            let staging = self.staging.as_ref().expect("not receiving");
            if self.staging_at == staging.len() {
                return Input::NeedMore;
            }
            let step = match self.session.next(&staging[self.staging_at..]) {
                Ok(step) => step,
                Err(error) => {
                    self.close();
                    return Input::Violation(error);
                }
            };
            self.staging_at += step.consumed;
            match step.event {
                Some(Event::Request(request)) if request.command == Command::Write => {
                    let buf = Some(pool.get(request.len as usize));
                    self.payload = Some(PayloadIn { request, buf });
                }
                Some(Event::Request(request)) => return Input::Request(request),
                Some(Event::Opened { .. }) => {}
                Some(Event::Refused { .. }) => return Input::Refused,
                Some(Event::OutputFull) => {
                    self.busy = true;
                    return Input::Busy;
                }
                Some(Event::Disconnected) => {
                    self.close();
                    return Input::Closed;
                }
                None => return Input::NeedMore,
            }
        }
    }

    /// Takes what the staging buffer has of a write's data.
    fn next_payload(&mut self) -> Input {
        let mut payload = self.payload.take().expect("looked at by the caller");
        let len = payload.request.len as usize;
        let buf = payload.buf.as_mut().expect("not receiving");
        let staging = self.staging.as_ref().expect("not receiving");
        let here = &staging[self.staging_at..];
        let count = here.len().min(len - buf.len());
        buf.extend_from_slice(&here[..count]);
        self.staging_at += count;
        self.session.payload_taken(count as u32);
        if buf.len() < len {
            self.payload = Some(payload);
            return Input::NeedMore;
        }
        let data = payload.buf.take().expect("just seen").freeze_all();
        Input::Write(payload.request, data)
    }

    fn is_full(&self) -> bool {
        self.requests >= self.limits.requests_max
            || self.request_bytes + self.out_bytes >= self.limits.bytes_max
    }

    /// Whether input had to wait for answers to leave, and need not any more.
    pub fn has_room_again(&mut self) -> bool {
        let again = self.busy && self.state == State::Open && !self.is_full() && self.is_flushed();
        let again = again && !tidelock_planted::is(Bug::RoomForgotten);
        if again {
            self.busy = false;
        }
        again
    }

    /// A request was taken.
    pub fn begin(&mut self, request: &Request) {
        self.requests += 1;
        self.request_bytes += data_bytes(request);
    }

    fn end(&mut self, request: &Request) {
        self.requests -= 1;
        self.request_bytes -= data_bytes(request);
    }

    fn encoder(&self) -> tidelock_nbd::ReplyEncoder {
        self.session.encoder().expect("requests come after an export was opened")
    }

    /// Answers a request that returns no data.
    pub fn reply(&mut self, request: &Request, result: Result<(), Errno>) {
        self.end(request);
        let encoder = self.encoder();
        let out = self.session.output();
        match result {
            Ok(()) => out.extend_from_slice(&encoder.done(request)),
            Err(errno) => encoder.error(request, errno, "", out),
        }
    }

    /// Answers a read.
    pub fn reply_data(&mut self, request: &Request, data: Bytes) {
        self.end(request);
        let header = self.encoder().read(request);
        self.session.output().extend_from_slice(&header);
        self.queue_output();
        self.out_bytes += data.len();
        self.out.push_back(data);
    }

    /// Answers a block status.
    pub fn reply_block_status(&mut self, request: &Request, extents: Vec<Extent>) {
        self.end(request);
        let encoder = self.encoder();
        encoder.block_status(request, extents, self.session.output());
    }

    fn queue_output(&mut self) {
        let output = self.session.output();
        if !output.is_empty() {
            self.out_bytes += output.len();
            self.out.push_back(output.split().freeze());
        }
    }

    /// Sends what there is, unless a send is in flight.
    pub fn send(&mut self, network: &mut impl Network<Socket = S>) {
        if self.state == State::Broken {
            self.session.output().clear();
            self.out.clear();
            self.rest.clear();
            self.out_bytes = 0;
        }
        if self.sending {
            return;
        }
        self.queue_output();
        let mut bufs = std::mem::take(&mut self.rest);
        let count = SEND_BUFS_MAX.saturating_sub(bufs.len()).min(self.out.len());
        bufs.extend(self.out.drain(..count));
        if !bufs.is_empty() {
            self.sending = true;
            network.send(self.id, &self.socket, bufs);
        }
    }

    /// A send has ended.
    pub fn sent(&mut self, result: io::Result<u32>, mut bufs: SendBufs) {
        self.sending = false;
        match result {
            Ok(count) if self.state != State::Broken => {
                skip_sent(&mut bufs, count as usize);
                self.out_bytes -= count as usize;
                self.rest = bufs;
            }
            Ok(_) => {}
            Err(_) => self.break_off(),
        }
    }

    fn break_off(&mut self) {
        self.session.leave();
        self.state = State::Broken;
    }

    /// Nothing more is read.
    fn close(&mut self) {
        if self.state == State::Open {
            self.session.leave();
            self.state = State::Closing;
        }
    }

    /// The daemon stops: requests that were taken are still answered, the others stay in the
    /// socket. The client finds the connection closed and asks again at the next daemon, which an
    /// error would keep it from.
    pub fn begin_shutdown(&mut self) {
        self.close();
    }

    /// Whether everything that was to be sent has been.
    pub fn is_flushed(&self) -> bool {
        !self.sending && self.out.is_empty() && self.rest.is_empty()
    }

    /// Whether nothing more will happen here.
    pub fn is_over(&self) -> bool {
        self.state != State::Open
            && self.requests == 0
            && (self.is_flushed() || self.state == State::Broken && !self.sending)
    }

    /// Ends the connection at once, also for a receive that is still in flight.
    pub fn hang_up(self, network: &mut impl Network<Socket = S>) {
        network.hang_up(self.socket);
    }
}

/// What a request holds in memory.
fn data_bytes(request: &Request) -> usize {
    match request.command {
        Command::Read | Command::Write => request.len as usize,
        _ => 0,
    }
}
