//! The sender: a walsender for stock standbys.
//!
//! ```text
//!  Gate (start-up, proof) ──► Ready ── START_REPLICATION ──► Streaming ── end of the timeline ──► Ending
//!                               ▲                                │ CopyDone of the standby            │ its CopyDone
//!                               └────────────────────────────────┴────────────────────────────────────┘
//!
//!  any state ── Terminate, lie, silence, end of the connection ──► Ended
//! ```
//!
//! Invariant: no byte at or behind the bound leaves, and nothing is said that lies behind it: the end of the log that
//! is told is the bound, and a timeline that begins behind it does not exist.

use crate::access::{Access, Client, Gate};
use crate::command::{self, Command, Refused};
use crate::encode::{self, Severity, Type};
use crate::frame::{Fields, Frame, FrameError, Frames, shown};
use crate::limits::{CLIENT_MESSAGE_BYTES_MAX, OUTPUT_BYTES_HIGH, WAL_MESSAGE_BYTES_MAX};
use crate::lineage::Lineage;
use crate::terms::{Now, Position, SlotName, Timing};
use bytes::{BufMut, BytesMut};
use std::time::Duration;
use tidelock_wal::{Lsn, PAGE_BYTES, PgTimestamp, TimelineId};

/// The log that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// System identifier of the cluster, as it stands in its log.
    pub system: u64,
    /// Version that is told, as `server_version_num`: that of the server which wrote the log.
    pub version: u32,
    /// Size of a segment file.
    pub segment_bytes: u32,
    /// Timelines of the log.
    pub lineage: Lineage,
    /// Position of the first byte that must not be sent (Slogger 5.4: apply-to).
    pub bound: Lsn,
}

/// Positions that a standby reports. They are its claims: at its start they name what it has from elsewhere, and that
/// may be more than was ever sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StandbyStatus {
    /// End of what it has written.
    pub written: Lsn,
    /// End of what is durable there.
    pub flushed: Lsn,
    /// End of what it has replayed.
    pub applied: Lsn,
    /// Wall clock of the standby.
    pub sent: PgTimestamp,
}

/// Log that may be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Position of the next byte, and the timeline as which it is read. Up to where timelines branched, their bytes are
    /// the same.
    pub from: Position,
    /// Most bytes that may be given.
    pub bytes_max: usize,
}

/// News for the owner of a sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEvent {
    /// The standby has been let in.
    LoggedIn(Client),
    /// The standby was told whose log this is. If it leaves now, it has another one.
    Identified,
    /// The standby wants the log from here on: see [`Sender::wanted`].
    Started {
        /// Slot that it named.
        slot: Option<SlotName>,
        /// Position of the first byte.
        from: Position,
    },
    /// The standby reports its positions.
    Status(StandbyStatus),
    /// A timeline has been sent to its end, and the standby has been told of the next one.
    TimelineEnded {
        /// Timeline that ended.
        timeline: TimelineId,
        /// Begin of the next one.
        next: Position,
    },
    /// The standby has ended the stream, and may start another one.
    Stopped,
    /// A command was refused. The connection goes on.
    Refused {
        /// The command, cut off.
        command: String,
        /// Reason that the client was told.
        reason: String,
        /// Position from which the log was asked for, if this was the start of a stream.
        start: Option<Position>,
    },
    /// The connection is of no use any more: output is to be sent, and it is to be closed. Last event.
    Ended(SenderEnd),
}

/// Reasons for which a connection of a standby ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SenderEnd {
    /// The standby said goodbye.
    #[error("the standby has ended the connection in order")]
    Goodbye,
    /// The connection has ended.
    #[error("the connection to the standby ended")]
    Closed,
    /// The standby was silent for too long.
    #[error("nothing was heard of the standby for {seconds} s")]
    Silent {
        /// Time without a sign.
        seconds: u64,
    },
    /// The client wants another connection's command to be cancelled. There are none that could be.
    #[error("a request to cancel a command: nothing can be cancelled here")]
    Cancel,
    /// The stream is no sequence of messages.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// A message has no meaning at this point.
    #[error(
        "message {tag:?} means nothing at this point: only physical replication is spoken here"
    )]
    Unexpected {
        /// Tag of the message, or kind of it within the stream.
        tag: char,
    },
    /// A message does not have the form of its kind.
    #[error("message {tag:?} does not have the form of its kind")]
    Malformed {
        /// Tag of the message. Those before the login have none: a space.
        tag: char,
    },
    /// The client speaks another version of the protocol.
    #[error("protocol {major}.{minor} is not spoken here, 3.0 is")]
    Version {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// The client is not a standby.
    #[error(
        "only physical replication is served here: a client must ask for it with replication=true"
    )]
    NotReplication,
    /// The user is another one than the standby's.
    #[error("user \"{user}\" may not replicate from here")]
    WrongUser {
        /// The user.
        user: String,
    },
    /// Wrong password, or another user.
    #[error("password authentication failed for user \"{user}\"")]
    PasswordWrong {
        /// The user.
        user: String,
    },
    /// The log that is served has got another history than what was sent.
    #[error(
        "timeline {timeline} was sent up to {sent}, and the log that is served now leaves it before"
    )]
    HistoryChanged {
        /// Timeline that streams.
        timeline: TimelineId,
        /// End of what was sent.
        sent: Lsn,
    },
    /// The owner does not have the log that the standby wants ([`Sender::give_up`]).
    #[error("the log from {at} on is not kept any more: the standby must be made anew from a copy")]
    LogRemoved {
        /// Position of the first byte that is missing.
        at: Lsn,
    },
    /// The owner cannot go on ([`Sender::give_up`]).
    #[error("{reason}")]
    Owner {
        /// Reason, in words for the standby's log.
        reason: String,
    },
}

impl SenderEnd {
    /// A stable name for logs and metrics.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Goodbye => "goodbye",
            Self::Closed => "closed",
            Self::Silent { .. } => "silent",
            Self::Cancel => "cancel",
            Self::Frame(_) => "frame",
            Self::Unexpected { .. } => "unexpected-message",
            Self::Malformed { .. } => "malformed-message",
            Self::Version { .. } => "version",
            Self::NotReplication => "not-replication",
            Self::WrongUser { .. } => "wrong-user",
            Self::PasswordWrong { .. } => "password-wrong",
            Self::HistoryChanged { .. } => "history-changed",
            Self::LogRemoved { .. } => "log-removed",
            Self::Owner { .. } => "owner",
        }
    }

    /// SQLSTATE that the client is told. `None`: it is told nothing.
    const fn sqlstate(&self) -> Option<&'static str> {
        match self {
            Self::Goodbye | Self::Closed | Self::Cancel => None,
            Self::Silent { .. } => Some("57P05"),
            Self::Frame(_) | Self::Unexpected { .. } | Self::Malformed { .. } => Some("08P01"),
            Self::Version { .. } | Self::NotReplication => Some("0A000"),
            Self::WrongUser { .. } => Some("28000"),
            Self::PasswordWrong { .. } => Some("28P01"),
            Self::HistoryChanged { .. } => Some("55000"),
            Self::LogRemoved { .. } => Some("58P01"),
            Self::Owner { .. } => Some("58000"),
        }
    }
}

/// Bytes of the log that the owner gave although they are not wanted. Nothing of them was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of log from {at} on are not what is wanted: {wanted:?}")]
pub struct NotWanted {
    /// Position of the first byte.
    pub at: Lsn,
    /// Number of bytes.
    pub bytes: usize,
    /// Log that may be sent now.
    pub wanted: Option<Wanted>,
}

#[derive(Debug)]
enum State {
    Gate(Box<Gate>),
    Ready,
    Streaming(Position),
    /// `CopyDone` is sent; the standby's is awaited.
    Ending {
        timeline: TimelineId,
        next: Position,
    },
    Ended,
}

/// The server's side of one replication connection.
#[derive(Debug)]
pub struct Sender {
    served: Served,
    access: Access,
    timing: Timing,
    nonce: [u8; 18],
    state: State,
    frames: Frames,
    output: BytesMut,
    /// Slot that this connection made or used.
    slot: Option<SlotName>,
    flushed: Lsn,
    owes_keepalive: bool,
    has_asked: bool,
    now: Now,
    heard: Duration,
    end: Option<SenderEnd>,
    is_closed: bool,
}

impl Sender {
    /// A connection that has just been accepted. `nonce` must be such that nobody can foretell it, and another one for
    /// each connection: SCRAM rests on it.
    #[must_use]
    pub fn new(
        served: Served,
        access: Access,
        timing: Timing,
        nonce: [u8; 18],
        now: Now,
    ) -> Sender {
        Sender {
            served,
            access,
            timing,
            nonce,
            state: State::Gate(Box::new(Gate::Startup { refused: 0 })),
            frames: Frames::new(CLIENT_MESSAGE_BYTES_MAX),
            output: BytesMut::new(),
            slot: None,
            flushed: Lsn(0),
            owes_keepalive: false,
            has_asked: false,
            now,
            heard: now.mono,
            end: None,
            is_closed: false,
        }
    }

    /// Bytes to be sent to the standby. The caller takes them off the front as they leave. Ask again after each call of
    /// another method.
    pub fn output(&mut self) -> &mut BytesMut {
        if self.owes_keepalive && self.output.len() < OUTPUT_BYTES_HIGH {
            self.write_keepalive();
        }
        &mut self.output
    }

    /// Takes bytes from the standby. What they mean comes out of [`poll`](Sender::poll).
    pub fn received(&mut self, bytes: &[u8]) {
        if !matches!(self.state, State::Ended) {
            self.heard = self.now.mono;
            self.has_asked = false;
            self.frames.push(bytes);
        }
    }

    /// False while the standby asks without reading the answers, or has sent more than was polled: no further bytes are
    /// to be read from its socket.
    #[must_use]
    pub fn takes_input(&self) -> bool {
        self.output.len() < OUTPUT_BYTES_HIGH && self.frames.len() < 2 * CLIENT_MESSAGE_BYTES_MAX
    }

    /// Tells that the standby has ended the connection. Events of what it sent before are still handed out.
    pub fn closed(&mut self) {
        self.is_closed = true;
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Now) {
        self.now = now;
        let silence = now.mono.saturating_sub(self.heard);
        if matches!(self.state, State::Ended | State::Ready) {
            return;
        }
        if silence >= self.timing.silence_max {
            self.end.get_or_insert(SenderEnd::Silent { seconds: silence.as_secs() });
        } else if matches!(self.state, State::Streaming(_))
            && silence >= self.timing.silence_max / 2
            && !self.has_asked
        {
            self.owes_keepalive = true;
            self.has_asked = true;
        }
    }

    /// Time (of [`Now::mono`]) at which [`tick`](Sender::tick) has something to do, if nothing happens before. A
    /// standby that has not started a stream may be silent as long as it likes.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Ended | State::Ready => None,
            State::Streaming(_) if !self.has_asked => {
                Some(self.heard + self.timing.silence_max / 2)
            }
            _ => Some(self.heard + self.timing.silence_max),
        }
    }

    /// Gives the connection up: the standby is told the reason, and [`poll`](Sender::poll) hands it out.
    pub fn give_up(&mut self, end: SenderEnd) {
        if !matches!(self.state, State::Ended) {
            self.end.get_or_insert(end);
        }
    }

    /// Moves the bound forward. A bound that lies before the present one changes nothing: what was sent cannot be taken
    /// back.
    pub fn advance(&mut self, bound: Lsn) {
        self.served.bound = self.served.bound.max(bound);
        self.end_timeline();
    }

    /// Tells of timelines that have come to the log. The standby learns of each when the bound has reached its begin.
    pub fn extend(&mut self, lineage: Lineage) {
        self.served.lineage = lineage;
        if let State::Streaming(Position { timeline, at: sent }) = self.state {
            let lineage = &self.served.lineage;
            let is_left = lineage.after(timeline).is_some_and(|(_, end)| end < sent);
            if is_left || !lineage.contains(timeline) {
                self.end.get_or_insert(SenderEnd::HistoryChanged { timeline, sent });
            }
        }
        self.end_timeline();
    }

    /// The log that the standby is to be given next. `None`: it does not stream, it has everything up to the bound, or
    /// the output has to leave first.
    #[must_use]
    pub fn wanted(&self) -> Option<Wanted> {
        let State::Streaming(from) = self.state else { return None };
        if self.end.is_some() || self.output.len() >= OUTPUT_BYTES_HIGH {
            return None;
        }
        let limit = self.limit(from.timeline).0;
        let left = usize::try_from(limit.saturating_sub(from.at.0)).unwrap_or(usize::MAX);
        let mut bytes_max = left.min(WAL_MESSAGE_BYTES_MAX);
        if bytes_max < left {
            // Whole pages, as PostgreSQL does, but for the last one.
            bytes_max -= (from.at.0 % PAGE_BYTES as u64) as usize;
        }
        (bytes_max > 0).then_some(Wanted { from, bytes_max })
    }

    /// Sends log.
    ///
    /// # Errors
    /// The bytes are not those that are wanted, or more.
    pub fn wal(&mut self, at: Lsn, bytes: &[u8]) -> Result<(), NotWanted> {
        let wanted = self.wanted();
        let is_wanted = |wanted: &Wanted| wanted.from.at == at && bytes.len() <= wanted.bytes_max;
        let Some(Wanted { from, .. }) = wanted.filter(is_wanted) else {
            return Err(NotWanted { at, bytes: bytes.len(), wanted });
        };
        if bytes.is_empty() {
            return Ok(());
        }
        let (end, wall) = (self.limit(from.timeline), self.now.wall);
        encode::message(&mut self.output, b'd', |output| {
            output.reserve(25 + bytes.len());
            output.put_u8(b'w');
            output.put_u64(at.0);
            output.put_u64(end.0);
            output.put_i64(wall.0);
            output.put_slice(bytes);
        });
        let at = Lsn(at.0 + bytes.len() as u64);
        self.state = State::Streaming(Position { at, ..from });
        self.end_timeline();
        Ok(())
    }

    /// The next event. `None`: more bytes are needed, or the output has to leave first.
    pub fn poll(&mut self) -> Option<SenderEvent> {
        loop {
            if matches!(self.state, State::Ended) {
                return None;
            }
            if let Some(end) = self.end.take() {
                return Some(self.ended(end));
            }
            if self.output.len() >= OUTPUT_BYTES_HIGH && !self.is_closed {
                return None;
            }
            match self.step() {
                Ok(None) if self.is_closed => return Some(self.ended(SenderEnd::Closed)),
                Ok(None) => return None,
                Ok(Some(None)) => {}
                Ok(Some(Some(event))) => return Some(event),
                Err(end) => return Some(self.ended(end)),
            }
        }
    }

    fn ended(&mut self, end: SenderEnd) -> SenderEvent {
        if let Some(sqlstate) = end.sqlstate() {
            encode::error(&mut self.output, Severity::Fatal, sqlstate, &end.to_string());
        }
        self.state = State::Ended;
        self.frames.clear();
        SenderEvent::Ended(end)
    }

    /// Acts on a message. `None`: no whole one is there.
    fn step(&mut self) -> Result<Option<Option<SenderEvent>>, SenderEnd> {
        if let State::Gate(gate) = &self.state
            && let Gate::Startup { refused } = **gate
        {
            let Some(body) = self.frames.next_without_tag()? else { return Ok(None) };
            let gate = Gate::startup(refused, &self.access, &body, &mut self.output)?;
            return Ok(Some(self.passed(gate)));
        }
        let Some(frame) = self.frames.next()? else { return Ok(None) };
        self.take(frame).map(Some)
    }

    fn passed(&mut self, gate: Gate) -> Option<SenderEvent> {
        let Gate::Open(client) = gate else {
            self.state = State::Gate(Box::new(gate));
            return None;
        };
        let version = self.served.version;
        let version = format!("{}.{}", version / 10_000, version % 10_000);
        let output = &mut self.output;
        encode::authentication(output, 0, &[]);
        for (name, value) in [
            ("server_version", version.as_str()),
            ("server_encoding", "UTF8"),
            ("client_encoding", "UTF8"),
            ("integer_datetimes", "on"),
            ("standard_conforming_strings", "on"),
        ] {
            encode::parameter(output, name, value);
        }
        encode::ready(output);
        self.state = State::Ready;
        Some(SenderEvent::LoggedIn(client))
    }

    fn take(&mut self, frame: Frame) -> Result<Option<SenderEvent>, SenderEnd> {
        let tag = char::from(frame.tag);
        let malformed = SenderEnd::Malformed { tag };
        if frame.tag == b'X' {
            return Err(SenderEnd::Goodbye);
        }
        match (frame.tag, std::mem::replace(&mut self.state, State::Ready)) {
            (b'p', State::Gate(gate)) => {
                let body = frame.body();
                let gate = gate.password(&self.access, &self.nonce, &body, &mut self.output)?;
                Ok(self.passed(gate))
            }
            (b'Q', State::Ready) => {
                let body = frame.body();
                let mut fields = Fields(&body);
                let text = fields.text().filter(|_| fields.is_empty()).ok_or(malformed)?;
                Ok(self.command(text))
            }
            (b'd', state @ (State::Streaming(_) | State::Ending { .. })) => {
                self.state = state;
                self.report(&frame.body())
            }
            (b'c', State::Streaming(_)) => {
                encode::copy_done(&mut self.output);
                self.stream_ended(None);
                Ok(Some(SenderEvent::Stopped))
            }
            (b'c', State::Ending { timeline, next }) => {
                self.stream_ended(Some(next));
                Ok(Some(SenderEvent::TimelineEnded { timeline, next }))
            }
            _ => Err(SenderEnd::Unexpected { tag }),
        }
    }

    /// Reads a message of the standby within the stream.
    fn report(&mut self, body: &[u8]) -> Result<Option<SenderEvent>, SenderEnd> {
        let malformed = SenderEnd::Malformed { tag: 'd' };
        let mut fields = Fields(body);
        let kind = fields.u8().ok_or(malformed.clone())?;
        let mut number = || fields.u64().ok_or(malformed.clone());
        match kind {
            b'r' => {
                let (written, flushed, applied) = (Lsn(number()?), Lsn(number()?), Lsn(number()?));
                let sent = PgTimestamp(number()?.cast_signed());
                self.owes_keepalive |= fields.u8().ok_or(malformed.clone())? != 0;
                if !fields.is_empty() {
                    return Err(malformed);
                }
                self.flushed = flushed;
                Ok(Some(SenderEvent::Status(StandbyStatus { written, flushed, applied, sent })))
            }
            // Feedback about rows that queries of the standby still see: nothing is vacuumed here.
            b'h' => Ok(None),
            kind => Err(SenderEnd::Unexpected { tag: char::from(kind) }),
        }
    }

    /// Carries a command out.
    fn command(&mut self, text: &str) -> Option<SenderEvent> {
        let mut start = None;
        let refusal = match command::parse(text) {
            Ok(command) => {
                if let Command::Start { at, timeline, .. } = &command {
                    let timeline = timeline.unwrap_or_else(|| self.visible());
                    start = Some(Position { timeline, at: *at });
                }
                match self.carry_out(command) {
                    Ok(event) => return event,
                    Err(refusal) => refusal,
                }
            }
            Err(Refused::NotOffered(name)) => ("0A000", format!("{name} is not offered here")),
            Err(Refused::Syntax) => ("42601", "this is no command of physical replication".into()),
        };
        let (sqlstate, reason) = refusal;
        encode::error(&mut self.output, Severity::Error, sqlstate, &reason);
        encode::ready(&mut self.output);
        Some(SenderEvent::Refused { command: shown(text.as_bytes()), reason, start })
    }

    /// The last timeline that the standby may know of.
    fn visible(&self) -> TimelineId {
        self.served.lineage.timeline_at(self.served.bound)
    }

    fn carry_out(&mut self, command: Command) -> Result<Option<SenderEvent>, Refusal> {
        let visible = self.visible();
        let bound = self.served.bound.to_string();
        let timeline = visible.to_string();
        let output = &mut self.output;
        let mut event = None;
        let tag = match command {
            Command::Start { slot, at, timeline } => {
                return self.start(slot, at, timeline.unwrap_or(visible));
            }
            Command::IdentifySystem => {
                let system = self.served.system.to_string();
                let columns = [
                    ("systemid", Type::Text, Some(system.as_bytes())),
                    ("timeline", Type::Int8, Some(timeline.as_bytes())),
                    ("xlogpos", Type::Text, Some(bound.as_bytes())),
                    ("dbname", Type::Text, None),
                ];
                encode::row(output, &columns);
                event = Some(SenderEvent::Identified);
                "IDENTIFY_SYSTEM"
            }
            Command::Show(name) => {
                let version = self.served.version;
                let value = match name.as_str() {
                    "wal_segment_size" => format!("{}MB", self.served.segment_bytes >> 20),
                    "server_version_num" => version.to_string(),
                    "server_version" => format!("{}.{}", version / 10_000, version % 10_000),
                    "data_directory_mode" => "0700".into(),
                    _ => {
                        let name = shown(name.as_bytes());
                        let words = format!("unrecognized configuration parameter \"{name}\"");
                        return Err(("42704", words));
                    }
                };
                encode::row(output, &[(name.as_str(), Type::Text, Some(value.as_bytes()))]);
                "SHOW"
            }
            Command::TimelineHistory(id) => {
                let file = self.served.lineage.file(id).filter(|_| id <= visible);
                let Some(file) = file else {
                    return Err(("58P01", format!("no history file of timeline {id} is here")));
                };
                let name = format!("{:08X}.history", id.0);
                let columns = [
                    ("filename", Type::Text, Some(name.as_bytes())),
                    ("content", Type::Bytea, Some(&file[..])),
                ];
                encode::row(output, &columns);
                "TIMELINE_HISTORY"
            }
            Command::ReadSlot(slot) => {
                let is_known = self.slot.as_ref() == Some(&slot);
                let flushed = self.flushed.to_string();
                let has_place = is_known && self.flushed > Lsn(0);
                let columns = [
                    ("slot_type", Type::Text, is_known.then_some(&b"physical"[..])),
                    ("restart_lsn", Type::Text, has_place.then_some(flushed.as_bytes())),
                    ("restart_tli", Type::Int8, has_place.then_some(timeline.as_bytes())),
                ];
                encode::row(output, &columns);
                "READ_REPLICATION_SLOT"
            }
            Command::CreateSlot(slot) => {
                let columns = [
                    ("slot_name", Type::Text, Some(slot.as_str().as_bytes())),
                    ("consistent_point", Type::Text, Some(&b"0/0"[..])),
                    ("snapshot_name", Type::Text, None),
                    ("output_plugin", Type::Text, None),
                ];
                encode::row(output, &columns);
                self.slot = Some(slot);
                "CREATE_REPLICATION_SLOT"
            }
        };
        encode::complete(output, tag);
        encode::ready(output);
        Ok(event)
    }

    /// Starts a stream, or tells the next timeline if nothing of this one is left.
    fn start(
        &mut self,
        slot: Option<SlotName>,
        at: Lsn,
        timeline: TimelineId,
    ) -> Result<Option<SenderEvent>, Refusal> {
        let Served { bound, lineage, .. } = &self.served;
        let after = self.visible_end(timeline);
        let begins = lineage.timeline_at(*bound) >= timeline && lineage.contains(timeline);
        if !begins || after.is_some_and(|next| at > next.at) {
            let words = format!(
                "requested starting point {at} on timeline {timeline} is not in this server's history"
            );
            return Err(("55000", words));
        }
        if at > *bound {
            let words = format!(
                "requested starting point {at} is ahead of the log that may be sent, which ends at {bound}"
            );
            return Err(("55000", words));
        }
        if let Some(next) = after.filter(|next| next.at == at) {
            self.stream_ended(Some(next));
            return Ok(Some(SenderEvent::TimelineEnded { timeline, next }));
        }
        encode::copy_both(&mut self.output);
        let from = Position { timeline, at };
        self.state = State::Streaming(from);
        // A walreceiver has reported nothing yet; it knows that the stream lives by the first message.
        self.owes_keepalive = true;
        self.slot = slot.clone();
        Ok(Some(SenderEvent::Started { slot, from }))
    }

    /// The next timeline, and where it begins, if the bound has come so far.
    fn visible_end(&self, timeline: TimelineId) -> Option<Position> {
        let (timeline, at) = self.served.lineage.after(timeline)?;
        (at <= self.served.bound).then_some(Position { timeline, at })
    }

    /// Position up to which a timeline may be sent.
    fn limit(&self, timeline: TimelineId) -> Lsn {
        self.visible_end(timeline).map_or(self.served.bound, |next| next.at)
    }

    /// Ends the timeline that streams, if all of it has been sent.
    fn end_timeline(&mut self) {
        let State::Streaming(Position { timeline, at }) = self.state else { return };
        if let Some(next) = self.visible_end(timeline).filter(|next| next.at == at) {
            encode::copy_done(&mut self.output);
            self.state = State::Ending { timeline, next };
        }
    }

    /// Ends the command that started a stream.
    fn stream_ended(&mut self, next: Option<Position>) {
        if let Some(next) = next {
            let (timeline, at) = (next.timeline.to_string(), next.at.to_string());
            let columns = [
                ("next_tli", Type::Int8, Some(timeline.as_bytes())),
                ("next_tli_startpos", Type::Text, Some(at.as_bytes())),
            ];
            encode::row(&mut self.output, &columns);
        }
        // Twice: a walreceiver expects it so, behind a row as without one.
        encode::complete(&mut self.output, "START_STREAMING");
        encode::complete(&mut self.output, "START_REPLICATION");
        encode::ready(&mut self.output);
        self.owes_keepalive = false;
        self.state = State::Ready;
    }

    fn write_keepalive(&mut self) {
        self.owes_keepalive = false;
        if let State::Streaming(Position { at, .. }) = self.state {
            let (wall, asks) = (self.now.wall, self.has_asked);
            encode::message(&mut self.output, b'd', |output| {
                output.put_u8(b'k');
                output.put_u64(at.0);
                output.put_i64(wall.0);
                output.put_u8(u8::from(asks));
            });
        }
    }
}

/// SQLSTATE and words.
type Refusal = (&'static str, String);
