//! A client of the simple query protocol: one query at a time, and its rows as texts.
//!
//! ```text
//!  Login ──► Idle ── query() ──► Busy ──► Rows or Refused ──► Idle
//!  any state ── error of the connection, lie, silence while Busy ──► Failed
//! ```

use crate::failure::{Failure, Phase, ServerError};
use crate::frame::{Frame, Frames, shown};
use crate::limits::{ANSWER_ROWS_MAX, SERVER_MESSAGE_BYTES_MAX};
use crate::login::{self, Authentication, Login, LoginError, Wrong};
use crate::receiver::{NotIdle, columns, decoded};
use crate::server_error::{Context, classify, read};
use crate::terms::{Now, Timing};
use bytes::BytesMut;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use std::time::Duration;

/// Row of an answer; NULL is `None`. Texts are cut off after 400 bytes.
pub type Row = Vec<Option<String>>;

/// News for the owner of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SqlEvent {
    /// The server waits for the first query.
    Ready,
    /// The answer to the query, which has succeeded.
    Rows(Vec<Row>),
    /// The server has refused the query, and waits for another one.
    Refused(ServerError),
    /// The connection is of no use any more: to be closed. Last event.
    Failed(Failure),
}

#[derive(Debug)]
enum State {
    Login(Authentication),
    Idle,
    Busy { rows: Vec<Row>, refused: Option<ServerError> },
    Failed,
}

/// The client's side of one connection.
#[derive(Debug)]
pub struct SqlClient {
    login: Login,
    timing: Timing,
    state: State,
    frames: Frames,
    output: BytesMut,
    now: Now,
    heard: Duration,
    failure: Option<Failure>,
    is_closed: bool,
}

impl SqlClient {
    /// A connection that has just been made, to a database and with these settings of the session. Its start-up message
    /// is in [`output`](SqlClient::output).
    ///
    /// # Errors
    /// The login, the database or a setting cannot be written into a message.
    pub fn new(
        login: Login,
        database: &str,
        settings: &[(&str, &str)],
        timing: Timing,
        now: Now,
    ) -> Result<SqlClient, LoginError> {
        let mut output = BytesMut::new();
        login.write_startup_of(database, settings, &mut output)?;
        Ok(SqlClient {
            login,
            timing,
            state: State::Login(Authentication::First),
            frames: Frames::new(SERVER_MESSAGE_BYTES_MAX),
            output,
            now,
            heard: now.mono,
            failure: None,
            is_closed: false,
        })
    }

    /// Bytes to be sent to the server. The caller takes them off the front as they leave.
    pub fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// Takes bytes from the server. Events come out of [`poll`](SqlClient::poll).
    pub fn received(&mut self, bytes: &[u8]) {
        if !matches!(self.state, State::Failed) {
            self.heard = self.now.mono;
            self.frames.push(bytes);
        }
    }

    /// Tells that the server has ended the connection.
    pub fn closed(&mut self) {
        self.is_closed = true;
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Now) {
        self.now = now;
        let silence = now.mono.saturating_sub(self.heard);
        if self.deadline().is_some_and(|deadline| deadline <= now.mono) {
            self.failure.get_or_insert(Failure::Silent { seconds: silence.as_secs() });
        }
    }

    /// Time (of [`Now::mono`]) at which [`tick`](SqlClient::tick) has something to do, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Login(_) | State::Busy { .. } => Some(self.heard + self.timing.silence_max),
            State::Idle | State::Failed => None,
        }
    }

    /// True if a query can be sent.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle) && self.failure.is_none()
    }

    /// Sends a query.
    ///
    /// # Errors
    /// The server does not wait for one, or the text has a zero byte.
    pub fn query(&mut self, text: &str) -> Result<(), NotIdle> {
        if !self.is_idle() {
            return Err(NotIdle);
        }
        frontend::query(text, &mut self.output).map_err(|_| NotIdle)?;
        self.heard = self.now.mono;
        self.state = State::Busy { rows: vec![], refused: None };
        Ok(())
    }

    /// The next event. `None`: more bytes are needed.
    pub fn poll(&mut self) -> Option<SqlEvent> {
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

    fn fail(&mut self, failure: Failure) -> SqlEvent {
        if !matches!(failure, Failure::Closed { .. }) {
            frontend::terminate(&mut self.output);
        }
        self.state = State::Failed;
        self.frames.clear();
        SqlEvent::Failed(failure)
    }

    fn phase(&self) -> Phase {
        match self.state {
            State::Login(_) => Phase::Login,
            State::Idle | State::Failed => Phase::Idle,
            State::Busy { .. } => Phase::Query,
        }
    }

    fn take(&mut self, frame: Frame) -> Result<Option<SqlEvent>, Failure> {
        let (tag, phase) = (char::from(frame.tag), self.phase());
        let malformed = Failure::Malformed { tag, phase };
        let unexpected = Failure::Unexpected { tag, phase };
        let mut whole = frame.whole();
        if tag == 'R' && login::is_unknown_method(&whole[5.min(whole.len())..]) {
            let method = "a method of a later version";
            return Err(Failure::Authentication { method, reason: "is not known here" });
        }
        let message = decoded(&mut whole).ok_or(malformed.clone())?;
        match (message, &mut self.state) {
            (
                Message::ParameterStatus(_)
                | Message::NoticeResponse(_)
                | Message::NotificationResponse(_),
                _,
            )
            | (Message::BackendKeyData(_), State::Login(_))
            | (
                Message::RowDescription(_)
                | Message::CommandComplete(_)
                | Message::EmptyQueryResponse,
                State::Busy { .. },
            ) => Ok(None),
            (Message::ErrorResponse(body), state) => {
                let error = read(&body).ok_or(malformed)?;
                match state {
                    // An error that ends the session is followed by the end of the connection.
                    State::Busy { refused, .. } if !error.ends_session() => {
                        *refused = Some(error);
                        Ok(None)
                    }
                    // The words for a login of this kind are the server's own.
                    State::Login(_) if matches!(&*error.sqlstate, "28000" | "42501" | "3D000") => {
                        Err(Failure::Server { phase, error })
                    }
                    _ => {
                        let context =
                            Context { phase, slot: None, from: None, slot_keeps_nothing: false };
                        Err(classify(&context, error))
                    }
                }
            }
            (Message::ReadyForQuery(_), State::Login(Authentication::Done)) => {
                self.state = State::Idle;
                Ok(Some(SqlEvent::Ready))
            }
            (Message::DataRow(row), State::Busy { rows, .. }) => {
                if rows.len() == ANSWER_ROWS_MAX {
                    return Err(malformed);
                }
                let columns = columns(&row).ok_or(malformed)?;
                let text = |column: Option<bytes::Bytes>| column.map(|bytes| shown(&bytes));
                rows.push(columns.into_iter().map(text).collect());
                Ok(None)
            }
            (Message::ReadyForQuery(_), State::Busy { rows, refused }) => {
                let (rows, refused) = (std::mem::take(rows), refused.take());
                self.state = State::Idle;
                Ok(Some(refused.map_or(SqlEvent::Rows(rows), SqlEvent::Refused)))
            }
            (message, State::Login(authentication)) => {
                authentication.answer(&self.login, &message, &mut self.output).map_err(
                    |wrong| match wrong {
                        Wrong::Unexpected => unexpected,
                        Wrong::Malformed => malformed,
                        Wrong::Failed(failure) => failure,
                    },
                )?;
                Ok(None)
            }
            _ => Err(unexpected),
        }
    }
}
