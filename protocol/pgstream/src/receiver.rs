//! The receiver: a physical replication client.
//!
//! ```text
//!  Login ──► Identify ──► Idle ── start() ──► History ──► Slot ──► Start ──► Stream
//!               ▲        (Identified)         (timeline > 1)  (if one is wanted)      │ CopyDone, both ways
//!               └───────────────────────────────── End (TimelineEnds) ◄───────────────┘
//!
//!  any state ── error, lie, silence, end of the connection ──► Failed
//! ```

use crate::failure::{Failure, Phase, SERVER_VERSION_MIN};
use crate::frame::{Fields, Frame, Frames, shown};
use crate::limits::{COLUMNS_MAX, SERVER_MESSAGE_BYTES_MAX, STATUS_BACKLOG_BYTES};
use crate::login::{self, Authentication, Login, LoginError, Wrong};
use crate::server_error::{Context, classify, read};
use crate::terms::{Now, Position, SlotName, Timing};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::{DataRowBody, Message};
use postgres_protocol::message::frontend;
use std::time::Duration;
use tidelock_wal::{Lsn, PgTimestamp, TimelineHistory, TimelineId};

/// Facts about the server, as it tells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// System identifier of the cluster.
    pub system: u64,
    /// Timeline that the server writes (or, of a standby, follows), and end of its log.
    pub end: Position,
    /// `server_version_num`, for example 150013.
    pub version: u32,
    /// Size of a segment file.
    pub segment_bytes: u32,
}

/// The slot that a stream uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotUse {
    /// Name of the slot.
    pub name: SlotName,
    /// True: a slot that is not there is made. Right at the first start, and at a server that was promoted; elsewhere
    /// the absence of a slot means that log may have been lost, and is a failure.
    pub create: bool,
}

/// Order to stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// Slot that keeps what is not reported as flushed. Without one the server may remove log at any time.
    pub slot: Option<SlotUse>,
    /// Position of the first byte. `None`: the oldest log that the slot keeps, or without a slot the end of the
    /// server's log, rounded down to the begin of a segment.
    pub from: Option<Position>,
}

/// News for the owner of a receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The server has said who it is, and waits for [`Receiver::start`].
    Identified(Identity),
    /// The history of the server's timeline has arrived. To be kept: it says where timelines branched.
    History {
        /// The server's timeline.
        timeline: TimelineId,
        /// Content of the file `TIMELINE.history`.
        file: Bytes,
        /// The file, read.
        history: TimelineHistory,
    },
    /// The slot was made.
    SlotCreated(SlotName),
    /// The log streams from here on.
    Started(Position),
    /// The next bytes of the log.
    Wal {
        /// Position of the first byte, always where the last part ended.
        start: Lsn,
        /// The bytes. They share memory with what was received after them.
        bytes: Bytes,
        /// End of the server's log when it sent them.
        server_end: Lsn,
        /// Wall clock of the server when it sent them.
        sent: PgTimestamp,
    },
    /// The server has nothing to send.
    Keepalive {
        /// End of the log that the server has sent, or may send.
        server_end: Lsn,
        /// Wall clock of the server when it sent this.
        sent: PgTimestamp,
    },
    /// The timeline ends, and all of it has been handed out. [`Event::Identified`] comes next; the stream goes on with
    /// a start at `next`.
    TimelineEnds {
        /// Timeline that ended.
        timeline: TimelineId,
        /// Begin of the next one, which is the end of this one.
        next: Position,
    },
    /// The connection is of no use any more: to be closed. Last event.
    Failed(Failure),
}

/// A start that was ordered while the server does not wait for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stream can only be started after the server has been identified")]
pub struct NotIdle;

#[derive(Debug)]
enum State {
    Login(Authentication),
    /// The server has been asked, and its answer is being collected.
    Asked(Question, Answer),
    Idle,
    /// `START_REPLICATION` is sent.
    Starting,
    Streaming,
    /// `CopyDone` is sent, or the stream had nothing to send; the next timeline is expected.
    Ending(Answer),
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    System,
    SegmentSize,
    Version,
    History,
    Slot,
    CreateSlot,
}

/// Parts of an answer. A second row is refused, so nothing grows.
#[derive(Debug, Default)]
struct Answer {
    row: Option<DataRowBody>,
    is_complete: bool,
}

/// The client's side of one replication connection.
#[derive(Debug)]
pub struct Receiver {
    login: Login,
    timing: Timing,
    expected_system: Option<u64>,
    state: State,
    frames: Frames,
    output: BytesMut,
    system: u64,
    end: Position,
    segment_bytes: u32,
    identity: Option<Identity>,
    order: Start,
    /// History of the server's timeline, if it has been asked for.
    history: Option<TimelineHistory>,
    /// True while the history is asked for by itself.
    wants_history_only: bool,
    slot_was_created: bool,
    slot_keeps_nothing: bool,
    /// Timeline that streams, and position of the next byte.
    next: Position,
    flushed: Lsn,
    applied: Lsn,
    status: Status,
    now: Now,
    heard: Duration,
    failure: Option<Failure>,
    is_closed: bool,
}

/// Status updates that are due.
#[derive(Clone, Copy, Debug, Default)]
struct Status {
    is_due: bool,
    asks_for_reply: bool,
    has_asked: bool,
    sent: Duration,
}

impl Receiver {
    /// A connection that has just been made. Its start-up message is in [`output`](Receiver::output). A server of
    /// another system than the expected one is given up as soon as it says so.
    ///
    /// # Errors
    /// The login cannot be written into a message.
    pub fn new(
        login: Login,
        expected_system: Option<u64>,
        timing: Timing,
        now: Now,
    ) -> Result<Receiver, LoginError> {
        let mut output = BytesMut::new();
        login.write_startup(&mut output)?;
        let nowhere = Position { timeline: TimelineId(0), at: Lsn(0) };
        Ok(Receiver {
            login,
            timing,
            expected_system,
            state: State::Login(Authentication::First),
            frames: Frames::new(SERVER_MESSAGE_BYTES_MAX),
            output,
            system: 0,
            end: nowhere,
            segment_bytes: 0,
            identity: None,
            order: Start { slot: None, from: None },
            history: None,
            wants_history_only: false,
            slot_was_created: false,
            slot_keeps_nothing: false,
            next: nowhere,
            flushed: Lsn(0),
            applied: Lsn(0),
            status: Status::default(),
            now,
            heard: now.mono,
            failure: None,
            is_closed: false,
        })
    }

    /// Bytes to be sent to the server. The caller takes them off the front as they leave. Ask again after each call of
    /// another method.
    pub fn output(&mut self) -> &mut BytesMut {
        if self.status.is_due && self.is_streaming() && self.output.len() < STATUS_BACKLOG_BYTES {
            self.write_status();
        }
        &mut self.output
    }

    /// Takes bytes from the server. What they mean comes out of [`poll`](Receiver::poll), which is to be called until
    /// it has nothing more before further bytes are read from the socket: memory stays bounded by that.
    pub fn received(&mut self, bytes: &[u8]) {
        if !matches!(self.state, State::Failed) {
            self.heard = self.now.mono;
            self.status.has_asked = false;
            self.frames.push(bytes);
        }
    }

    /// Tells that the server has ended the connection. Events of what it sent before are still handed out.
    pub fn closed(&mut self) {
        self.is_closed = true;
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Now) {
        self.now = now;
        let silence = now.mono.saturating_sub(self.heard);
        if matches!(self.state, State::Failed | State::Idle) {
            return;
        }
        if silence >= self.timing.silence_max {
            self.failure.get_or_insert(Failure::Silent { seconds: silence.as_secs() });
        } else if self.is_streaming()
            && silence >= self.timing.silence_max / 2
            && !self.status.has_asked
        {
            self.status.is_due = true;
            self.status.asks_for_reply = true;
            self.status.has_asked = true;
        }
        if self.is_streaming()
            && now.mono.saturating_sub(self.status.sent) >= self.timing.status_every
        {
            self.status.is_due = true;
        }
    }

    /// Time (of [`Now::mono`]) at which [`tick`](Receiver::tick) has something to do, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let silence = match self.state {
            State::Failed | State::Idle => return None,
            State::Streaming if !self.status.has_asked => self.timing.silence_max / 2,
            _ => self.timing.silence_max,
        };
        let silent = self.heard + silence;
        match self.state {
            State::Streaming => Some(silent.min(self.status.sent + self.timing.status_every)),
            _ => Some(silent),
        }
    }

    /// Tells how far the log is durable here (Slogger 5.1: b-commit). The server's slot keeps what is behind it, and a
    /// commit that waits for this standby is answered. Never reported past what was handed out; never goes back.
    pub fn flushed(&mut self, flushed: Lsn) {
        let flushed = flushed.min(self.next.at);
        if flushed > self.flushed {
            self.flushed = flushed;
            self.status.is_due = true;
        }
    }

    /// Tells how far the log has been applied here. Reported with the next status, at most as far as it is flushed.
    pub fn applied(&mut self, applied: Lsn) {
        self.applied = self.applied.max(applied.min(self.flushed));
    }

    /// Asks for the history of the server's timeline, after [`Event::Identified`]: [`Event::History`] comes, and the
    /// server waits for a start again. A first timeline has none, and nothing comes.
    ///
    /// # Errors
    /// The server is not idle.
    pub fn ask_history(&mut self) -> Result<(), NotIdle> {
        if !matches!(self.state, State::Idle) || self.failure.is_some() {
            return Err(NotIdle);
        }
        if self.end.timeline > TimelineId(1) {
            self.heard = self.now.mono;
            self.wants_history_only = true;
            self.ask(Question::History);
        }
        Ok(())
    }

    /// Tells that nothing is read from the server on purpose: its silence means nothing up to now.
    pub fn not_reading(&mut self, now: Now) {
        self.now = now;
        self.heard = now.mono;
        self.status.has_asked = false;
    }

    /// Orders the stream, after [`Event::Identified`].
    ///
    /// # Errors
    /// The server does not wait for a start.
    pub fn start(&mut self, order: Start) -> Result<(), NotIdle> {
        if !matches!(self.state, State::Idle) || self.failure.is_some() {
            return Err(NotIdle);
        }
        self.heard = self.now.mono;
        self.order = order;
        self.slot_was_created = false;
        self.slot_keeps_nothing = false;
        let known = self.history.take().filter(|known| known.current() == self.end.timeline);
        if let Some(history) = known {
            if let Err(failure) = self.history_known(Some(&history)) {
                self.failure = Some(failure);
            }
        } else if self.end.timeline > TimelineId(1) {
            self.ask(Question::History);
        } else if let Err(failure) = self.history_known(None) {
            self.failure = Some(failure);
        }
        Ok(())
    }

    /// The next event. `None`: more bytes are needed.
    pub fn poll(&mut self) -> Option<Event> {
        loop {
            if matches!(self.state, State::Failed) {
                return None;
            }
            if let Some(failure) = self.failure.take() {
                return Some(self.fail(failure));
            }
            let frame = match self.frames.next() {
                Ok(Some(frame)) => frame,
                Ok(None) if self.is_closed => {
                    let phase = self.phase();
                    return Some(self.fail(Failure::Closed { phase }));
                }
                Ok(None) => return None,
                Err(error) => return Some(self.fail(error.into())),
            };
            match self.take(frame) {
                Ok(None) => {}
                Ok(Some(event)) => return Some(event),
                Err(failure) => return Some(self.fail(failure)),
            }
        }
    }

    fn fail(&mut self, failure: Failure) -> Event {
        if !matches!(failure, Failure::Closed { .. }) {
            frontend::terminate(&mut self.output);
        }
        self.state = State::Failed;
        self.frames.clear();
        Event::Failed(failure)
    }

    fn is_streaming(&self) -> bool {
        matches!(self.state, State::Streaming)
    }

    fn phase(&self) -> Phase {
        match &self.state {
            State::Login(_) => Phase::Login,
            State::Asked(question, _) => match question {
                Question::System | Question::SegmentSize | Question::Version => Phase::Identify,
                Question::History => Phase::History,
                Question::Slot => Phase::ReadSlot,
                Question::CreateSlot => Phase::CreateSlot,
            },
            State::Idle | State::Failed => Phase::Idle,
            State::Starting => Phase::Start,
            State::Streaming => Phase::Stream,
            State::Ending(_) => Phase::End,
        }
    }

    /// Acts on a message.
    fn take(&mut self, frame: Frame) -> Result<Option<Event>, Failure> {
        let (tag, phase) = (char::from(frame.tag), self.phase());
        let malformed = Failure::Malformed { tag, phase };
        let unexpected = Failure::Unexpected { tag, phase };
        match (frame.tag, &self.state) {
            // `postgres-protocol` knows no CopyBothResponse, and the log is not to be looked at twice.
            (b'd', State::Streaming) => return self.copy_data(frame.body()),
            (b'W', State::Starting) => {
                self.started();
                return Ok(Some(Event::Started(self.next)));
            }
            (b'd' | b'W', _) => return Err(unexpected),
            (b'R', State::Login(_)) => {
                let mut whole = frame.whole();
                if login::is_unknown_method(&whole[5.min(whole.len())..]) {
                    let method = "a method of a later version";
                    return Err(Failure::Authentication { method, reason: "is not known here" });
                }
                let message = decoded(&mut whole).ok_or(malformed)?;
                return self.authenticate(&message).map(|()| None);
            }
            _ => {}
        }
        let message = decoded(&mut frame.whole()).ok_or(malformed.clone())?;
        match (message, &mut self.state) {
            (
                Message::ParameterStatus(_)
                | Message::NoticeResponse(_)
                | Message::NotificationResponse(_),
                _,
            )
            | (Message::BackendKeyData(_), State::Login(_)) => Ok(None),
            (Message::ErrorResponse(body), _) => {
                let error = read(&body).ok_or(malformed)?;
                let context = Context {
                    phase,
                    slot: self.order.slot.as_ref().map(|slot| &slot.name),
                    from: Some(self.next),
                    slot_keeps_nothing: self.slot_keeps_nothing,
                };
                Err(classify(&context, error))
            }
            (Message::ReadyForQuery(_), State::Login(Authentication::Done)) => {
                self.ask(Question::System);
                Ok(None)
            }
            (Message::RowDescription(_), State::Starting) => {
                self.state = State::Ending(Answer::default());
                Ok(None)
            }
            (Message::RowDescription(_), State::Asked(_, answer) | State::Ending(answer))
                if !answer.is_complete && answer.row.is_none() =>
            {
                Ok(None)
            }
            (Message::DataRow(row), State::Asked(_, answer) | State::Ending(answer))
                if !answer.is_complete && answer.row.is_none() =>
            {
                answer.row = Some(row);
                Ok(None)
            }
            // The end of a stream is announced twice.
            (Message::CommandComplete(_), State::Asked(_, answer) | State::Ending(answer)) => {
                answer.is_complete = true;
                Ok(None)
            }
            (Message::ReadyForQuery(_), State::Asked(question, answer)) if answer.is_complete => {
                let (question, answer) = (*question, std::mem::take(answer));
                self.answered(question, answer)
            }
            (Message::ReadyForQuery(_), State::Ending(answer)) if answer.is_complete => {
                let answer = std::mem::take(answer);
                self.timeline_ended(&answer).map(Some)
            }
            (Message::CopyDone, State::Streaming) => {
                self.write_status();
                frontend::copy_done(&mut self.output);
                self.state = State::Ending(Answer::default());
                Ok(None)
            }
            (Message::CommandComplete(_), State::Streaming) => Err(Failure::ServerEnded),
            _ => Err(unexpected),
        }
    }

    fn authenticate(&mut self, message: &Message) -> Result<(), Failure> {
        let (tag, phase) = ('R', Phase::Login);
        let State::Login(authentication) = &mut self.state else {
            return Err(Failure::Unexpected { tag, phase });
        };
        authentication.answer(&self.login, message, &mut self.output).map_err(|wrong| match wrong {
            Wrong::Unexpected => Failure::Unexpected { tag, phase },
            Wrong::Malformed => Failure::Malformed { tag, phase },
            Wrong::Failed(failure) => failure,
        })
    }

    fn ask(&mut self, question: Question) {
        let slot = self.order.slot.as_ref().map_or("", |slot| slot.name.as_str());
        let command = match question {
            Question::System => "IDENTIFY_SYSTEM".into(),
            Question::SegmentSize => "SHOW wal_segment_size".into(),
            Question::Version => "SHOW server_version_num".into(),
            Question::History => format!("TIMELINE_HISTORY {}", self.end.timeline),
            Question::Slot => format!("READ_REPLICATION_SLOT \"{slot}\""),
            Question::CreateSlot => {
                format!("CREATE_REPLICATION_SLOT \"{slot}\" PHYSICAL RESERVE_WAL")
            }
        };
        self.command(&command);
        self.state = State::Asked(question, Answer::default());
    }

    fn command(&mut self, text: &str) {
        // No zero byte is in any of the commands, the only thing that can be wrong with one.
        let _ = frontend::query(text, &mut self.output);
    }

    /// Acts on a whole answer.
    fn answered(&mut self, question: Question, answer: Answer) -> Result<Option<Event>, Failure> {
        let malformed = Failure::Malformed { tag: 'D', phase: self.phase() };
        let columns = answer.row.as_ref().and_then(columns).ok_or(malformed.clone())?;
        let column = |at: usize| columns.get(at).cloned().flatten();
        let text = |at: usize| {
            column(at).and_then(|bytes| String::from_utf8(bytes.to_vec()).ok()).unwrap_or_default()
        };
        match question {
            Question::System => {
                self.system = setting("system identifier", &text(0), text(0).parse().ok())?;
                let timeline = text(1).parse().ok().filter(|&id| id > 0).map(TimelineId);
                let timeline = setting("timeline", &text(1), timeline)?;
                let at = setting("position", &text(2), text(2).parse().ok())?;
                self.end = Position { timeline, at };
                if let Some(expected) = self.expected_system.filter(|&id| id != self.system) {
                    return Err(Failure::WrongSystem { found: self.system, expected });
                }
                // Answers to the other questions do not change on one connection.
                if let Some(identity) = &mut self.identity {
                    identity.end = self.end;
                    let identity = *identity;
                    self.state = State::Idle;
                    return Ok(Some(Event::Identified(identity)));
                }
                self.expected_system = Some(self.system);
                self.ask(Question::SegmentSize);
            }
            Question::SegmentSize => {
                self.segment_bytes = setting("wal_segment_size", &text(0), bytes_of(&text(0)))?;
                self.ask(Question::Version);
            }
            Question::Version => {
                let version = setting("server_version_num", &text(0), text(0).parse().ok())?;
                if version < SERVER_VERSION_MIN {
                    return Err(Failure::Version { found: version });
                }
                let (system, end, segment_bytes) = (self.system, self.end, self.segment_bytes);
                let identity = Identity { system, end, version, segment_bytes };
                self.identity = Some(identity);
                self.state = State::Idle;
                return Ok(Some(Event::Identified(identity)));
            }
            Question::History => {
                let file = column(1).ok_or(malformed)?;
                let timeline = self.end.timeline;
                let history = TimelineHistory::parse(timeline, &file)?;
                if std::mem::take(&mut self.wants_history_only) {
                    self.history = Some(history.clone());
                    self.state = State::Idle;
                } else {
                    self.history_known(Some(&history))?;
                }
                return Ok(Some(Event::History { timeline, file, history }));
            }
            Question::Slot => return self.slot_read(&column(0), &text(1), &text(2)),
            Question::CreateSlot => {
                self.slot_was_created = true;
                let name = self.order.slot.as_ref().map(|slot| slot.name.clone());
                self.ask(Question::Slot);
                return Ok(name.map(Event::SlotCreated));
            }
        }
        Ok(None)
    }

    /// Compares the start with the server's history, and goes on.
    fn history_known(&mut self, history: Option<&TimelineHistory>) -> Result<(), Failure> {
        if let Some(ours) = self.order.from {
            let server = self.end;
            if ours.timeline > server.timeline {
                return Err(Failure::OldTimeline { server, ours });
            }
            if ours.timeline < server.timeline {
                let left_at = history.and_then(|history| history.left_at(ours.timeline));
                if left_at.is_none_or(|left_at| left_at < ours.at) {
                    return Err(Failure::Diverged { server: server.timeline, ours, left_at });
                }
            } else if ours.at > server.at {
                return Err(Failure::ServerBehind { server, ours });
            }
        }
        if self.order.slot.is_some() {
            self.ask(Question::Slot);
        } else {
            let from = self.order.from.unwrap_or_else(|| self.segment_of(self.end));
            self.stream(from);
        }
        Ok(())
    }

    fn slot_read(
        &mut self,
        kind: &Option<Bytes>,
        restart_lsn: &str,
        restart_timeline: &str,
    ) -> Result<Option<Event>, Failure> {
        let Some(slot) = &self.order.slot else { return Ok(None) };
        match kind.as_deref() {
            None if slot.create && !self.slot_was_created => {
                self.ask(Question::CreateSlot);
                return Ok(None);
            }
            None => return Err(Failure::SlotMissing { slot: slot.name.clone() }),
            Some(b"physical") => {}
            Some(_) => return Err(Failure::SlotKind { slot: slot.name.clone() }),
        }
        let timeline = restart_timeline.parse().ok().filter(|&id| id > 0).map(TimelineId);
        let kept = timeline.zip(restart_lsn.parse::<Lsn>().ok());
        let kept = kept.map(|(timeline, at)| self.segment_of(Position { timeline, at }));
        // A slot that keeps nothing was lost, or is new and was made without a reserve; the start will tell.
        self.slot_keeps_nothing = kept.is_none();
        let Some(from) = self.order.from.or(kept) else {
            return Err(Failure::SlotLost { slot: slot.name.clone(), error: None });
        };
        self.stream(from);
        Ok(None)
    }

    fn segment_of(&self, position: Position) -> Position {
        let segment = u64::from(self.segment_bytes.max(1));
        Position { at: Lsn(position.at.0 - position.at.0 % segment), ..position }
    }

    fn stream(&mut self, from: Position) {
        let slot = self.order.slot.as_ref();
        let slot = slot.map_or_else(String::new, |slot| format!("SLOT \"{}\" ", slot.name));
        let (at, timeline) = (from.at, from.timeline);
        self.command(&format!("START_REPLICATION {slot}PHYSICAL {at} TIMELINE {timeline}"));
        self.next = from;
        self.state = State::Starting;
    }

    fn started(&mut self) {
        // Positions that were reported on another timeline or connection do not matter: the owner reports again.
        self.flushed = self.flushed.min(self.next.at);
        self.applied = self.applied.min(self.flushed);
        // The answer tells the owner that the server has the log: an error that it lacks it comes behind the start.
        let sent = self.now.mono;
        self.status = Status { is_due: true, asks_for_reply: true, has_asked: false, sent };
        self.state = State::Streaming;
    }

    /// Acts on a message of the stream.
    fn copy_data(&mut self, mut body: Bytes) -> Result<Option<Event>, Failure> {
        let malformed = Failure::Malformed { tag: 'd', phase: Phase::Stream };
        let before = body.len();
        let mut fields = Fields(&body);
        match fields.u8() {
            Some(b'w') => {
                let mut field = || fields.u64().ok_or(malformed.clone());
                let (start, server_end) = (Lsn(field()?), Lsn(field()?));
                let sent = PgTimestamp(field()?.cast_signed());
                let head = before - fields.0.len();
                body.advance(head);
                self.wal(start, server_end, sent, body).map(Some)
            }
            Some(b'k') => {
                let mut field = || fields.u64().ok_or(malformed.clone());
                let (server_end, sent) = (Lsn(field()?), PgTimestamp(field()?.cast_signed()));
                let wants_reply = fields.u8().ok_or(malformed.clone())? != 0;
                if !fields.is_empty() {
                    return Err(malformed);
                }
                self.status.is_due |= wants_reply;
                Ok(Some(Event::Keepalive { server_end, sent }))
            }
            Some(kind) => Err(Failure::Unexpected { tag: char::from(kind), phase: Phase::Stream }),
            None => Err(malformed),
        }
    }

    fn wal(
        &mut self,
        start: Lsn,
        server_end: Lsn,
        sent: PgTimestamp,
        bytes: Bytes,
    ) -> Result<Event, Failure> {
        let (found, expected) = (start, self.next.at);
        if found > expected {
            return Err(Failure::Gap { found, expected });
        }
        if found < expected {
            return Err(Failure::Backwards { found, expected });
        }
        let end = start.0.checked_add(bytes.len() as u64);
        let end = end.ok_or(Failure::PositionOverflow { at: start, bytes: bytes.len() })?;
        self.next.at = Lsn(end);
        Ok(Event::Wal { start, bytes, server_end, sent })
    }

    fn write_status(&mut self) {
        let mut body = [0; 34];
        let mut rest = &mut body[..];
        rest.put_u8(b'r');
        rest.put_u64(self.next.at.0);
        rest.put_u64(self.flushed.0);
        rest.put_u64(self.applied.0);
        rest.put_i64(self.now.wall.0);
        rest.put_u8(u8::from(self.status.asks_for_reply));
        if let Ok(message) = frontend::CopyData::new(&body[..]) {
            message.write(&mut self.output);
        }
        self.status.is_due = false;
        self.status.asks_for_reply = false;
        self.status.sent = self.now.mono;
    }

    fn timeline_ended(&mut self, answer: &Answer) -> Result<Event, Failure> {
        let malformed = Failure::Malformed { tag: 'D', phase: Phase::End };
        let columns = match &answer.row {
            Some(row) => columns(row).ok_or(malformed.clone())?,
            // The server ends a stream without a next timeline when it was told to end.
            None => return Err(Failure::ServerEnded),
        };
        let text = |at: usize| {
            let column = columns.get(at).cloned().flatten()?;
            String::from_utf8(column.to_vec()).ok()
        };
        let to = text(0).and_then(|text| text.parse().ok()).map(TimelineId);
        let said = text(1).and_then(|text| text.parse().ok());
        let (to, said) = to.zip(said).ok_or(malformed)?;
        let (from, at) = (self.next.timeline, self.next.at);
        if to <= from || said != at {
            return Err(Failure::WrongEnd { from, to, said, at });
        }
        self.ask(Question::System);
        Ok(Event::TimelineEnds { timeline: from, next: Position { timeline: to, at } })
    }
}

pub(crate) fn decoded(whole: &mut BytesMut) -> Option<Message> {
    Message::parse(whole).ok().flatten()
}

/// The columns of a row, as many as are looked at.
pub(crate) fn columns(row: &DataRowBody) -> Option<Vec<Option<Bytes>>> {
    let mut ranges = row.ranges();
    let mut columns = vec![];
    while let Some(range) = ranges.next().ok()? {
        if columns.len() < COLUMNS_MAX {
            columns.push(range.map(|range| row.buffer_bytes().slice(range)));
        }
    }
    Some(columns)
}

fn setting<T>(of: &'static str, text: &str, value: Option<T>) -> Result<T, Failure> {
    value.ok_or_else(|| Failure::Setting { of, text: shown(text.as_bytes()) })
}

/// Reads a size of a segment with its unit: `16MB`.
fn bytes_of(text: &str) -> Option<u32> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit {
        "" | "B" => 0,
        "kB" => 10,
        "MB" => 20,
        "GB" => 30,
        _ => return None,
    };
    let bytes = number.parse::<u32>().ok()?.checked_mul(1 << shift)?;
    let is_possible = bytes.is_power_of_two()
        && (tidelock_wal::SEGMENT_BYTES_MIN..=tidelock_wal::SEGMENT_BYTES_MAX).contains(&bytes);
    is_possible.then_some(bytes)
}
