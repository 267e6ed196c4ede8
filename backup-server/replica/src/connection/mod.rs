//! One host's connection at the backup, sans-I/O: the hello first, then frames for the groups of its channels.
//!
//! ```text
//!  Greeting ──hello──▶ Serving ──▶ end: its groups hear of it, and the host hears why
//! ```
//!
//! Bytes come in ([`Connection::input`], [`Connection::take`]), and bytes go out ([`Connection::output`]). Frames of
//! one channel that follow each other go to their group together, once the group has room. Until then nothing more is
//! taken off the input, so that a full group turns into backpressure on the socket.
//!
//! Invariant: a frame is given to the group that its channel was attached to last, in the order of the frames. A peer that
//! breaks the protocol is told so and cut off: nothing of the damaged frame is used, and everything before it counts.
//!
//! | module | what it is for |
//! |---|---|
//! | this | states, order, deadlines, the end |
//! | [`channels`] | the hello, and the group of each channel |
//! | [`room`] | the bounds of what waits for a group |
//! | [`outbox`] | messages that wait to be sent |

pub mod channels;
pub mod outbox;
pub mod room;
mod taking;
#[cfg(test)]
mod tests;

use crate::group::ConnectionId;
use crate::group_loop::HostEvent;
use bytes::BytesMut;
use channels::{Channels, Refusal};
use outbox::Outbox;
use room::{Asked, InputRoom, OwnRoom};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use taking::{Run, Step};
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::frame::{self, FrameError};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Bookmark, BookmarkPoint, Message, RefusalKind};

/// The least that one read asks for.
const READ_BYTES: usize = 256 << 10;
/// The hello must come within this.
const HELLO_MAX: Duration = Duration::from_secs(10);
/// A host that has attached nothing for so long has nothing to say.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// A host that says nothing for so long is gone. Attached ones send beacons.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// A host that does not take what is sent to it for so long is gone.
const WRITE_MAX: Duration = Duration::from_secs(60);
/// Bookmarks of one connection that may wait for the cut.
const BOOKMARKS_MAX: usize = 64;

/// The server around a connection.
pub trait Server {
    /// A group that runs.
    type Group: Clone;

    /// Refuses a peer that may not speak for this host. An error has the names that it may speak for.
    fn speaks_for(&self, host: &str) -> Result<(), String>;
    /// The peer is this host: it takes a place among the hosts' connections.
    fn enter(&mut self, host: &str, software: &str) -> Result<(), Refusal>;
    /// The group of this name, which an attachment by this host may create.
    fn group(&mut self, name: &str, host: &str) -> Result<Self::Group, Refusal>;
    /// True if both are the same run of the same group.
    fn is_same(one: &Self::Group, other: &Self::Group) -> bool;
    /// True if the run of the group has ended.
    fn is_closed(group: &Self::Group) -> bool;
    /// The room of the group for frames.
    fn room(group: &Self::Group) -> InputRoom;
    /// Gives the group an event. `false`: its run has ended.
    fn give(&mut self, group: &Self::Group, event: HostEvent) -> bool;
    /// A bookmark is to be set when the cut has everything that it is to have. [`Connection::bookmarked`] is told the end.
    fn bookmark(&mut self, channel: Channel, group: &Self::Group, host: &str, wanted: Bookmark);
}

/// Cause of a connection's end.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The network.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Not frames.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The peer breaks the protocol, or may not do what it asks for.
    #[error("{1}")]
    Refused(RefusalKind, String),
    /// Nothing was heard.
    #[error("nothing was heard for {} s", .0.as_secs())]
    Silent(Duration),
    /// Nothing is read at the other end.
    #[error("the host does not read what is sent to it")]
    Unread,
    /// Another connection takes its place.
    #[error(
        "too many connections at once: this one was the oldest of the peer that has most of them"
    )]
    NoPlace,
}

impl From<Refusal> for ConnectionError {
    fn from((kind, reason): Refusal) -> Self {
        Self::Refused(kind, reason)
    }
}

impl ConnectionError {
    /// The end of every connection when the server stops.
    #[must_use]
    pub fn stopping() -> Self {
        Self::Refused(RefusalKind::Stopping, "the backup server is stopping".to_owned())
    }

    fn refusal(&self) -> Refusal {
        let kind = match self {
            Self::Refused(kind, _) => *kind,
            Self::Frame(FrameError::Version(_)) => RefusalKind::Version,
            _ => RefusalKind::Invalid,
        };
        (kind, self.to_string())
    }
}

enum Phase {
    /// The hello has not come, since this time.
    Greeting { since: MonoNanos },
    /// The host has said who it is.
    Serving {
        host: String,
        greeted_at: MonoNanos,
        heard_at: MonoNanos,
        /// The last time at which the host was told that bytes arrive.
        said_at: MonoNanos,
    },
}

/// One connection, from its first byte on.
pub struct Connection<S: Server> {
    id: ConnectionId,
    /// The server's name, and name and version of its software.
    greeting: (String, String),
    phase: Phase,
    input: BytesMut,
    /// Frames of one channel that follow each other, as far as they were decoded.
    run: Option<Run<S::Group>>,
    /// Taken off the input, in order, and not given to a group.
    steps: VecDeque<Step<S::Group>>,
    /// Room for the first of them.
    asked: Option<Asked>,
    /// The input ends the connection behind them.
    ends: Option<ConnectionError>,
    /// Parts of a record have arrived that may not be whole.
    has_parts: bool,
    own_room: OwnRoom,
    channels: Channels<S::Group>,
    bookmarks: usize,
    outbox: Arc<Outbox>,
    /// The network has had bytes to take since then.
    out_since: Option<MonoNanos>,
}

impl<S: Server> Connection<S> {
    /// A connection that has just been accepted.
    #[must_use]
    pub fn new(id: ConnectionId, name: &str, software: &str, now: MonoNanos) -> Self {
        Self {
            id,
            greeting: (name.to_owned(), software.to_owned()),
            phase: Phase::Greeting { since: now },
            input: BytesMut::new(),
            run: None,
            steps: VecDeque::new(),
            asked: None,
            ends: None,
            has_parts: false,
            own_room: OwnRoom::default(),
            channels: Channels::default(),
            bookmarks: 0,
            outbox: Arc::default(),
            out_since: None,
        }
    }

    /// True once the peer has said who it is.
    #[must_use]
    pub fn is_greeted(&self) -> bool {
        matches!(self.phase, Phase::Serving { .. })
    }

    /// True while frames wait for room in their group: nothing more is read.
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.steps.is_empty()
    }

    /// The buffer that bytes are read into, with room for them.
    pub fn input(&mut self) -> &mut BytesMut {
        // Room for the rest of a large frame at once: growing step by step would copy it.
        let missing = frame::bytes_missing(&self.input);
        if self.input.capacity() - self.input.len() < missing.max(1) {
            self.input.reserve(missing.max(READ_BYTES));
        }
        &mut self.input
    }

    /// Messages that wait to be sent to the host.
    #[must_use]
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Puts bytes for the network into `out` once it is empty: until then messages wait, and newer ones replace them.
    pub fn output(&mut self, out: &mut BytesMut, now: MonoNanos) -> Result<(), ConnectionError> {
        if self.outbox.has_overflowed() {
            return Err(ConnectionError::Unread);
        }
        if out.is_empty() {
            for (channel, message) in self.outbox.take() {
                frame::encode_control(channel, &message, out);
            }
            self.out_since = (!out.is_empty()).then_some(now);
        }
        Ok(())
    }

    /// The network has taken all bytes of the output.
    pub fn wrote_all(&mut self) {
        self.out_since = None;
    }

    /// A bookmark is set, or not.
    pub fn bookmarked(
        &mut self,
        channel: Channel,
        id: u64,
        outcome: Result<BookmarkPoint, String>,
    ) {
        self.bookmarks -= 1;
        self.outbox.send(channel, Message::Bookmarked { id, outcome: outcome.map(Box::new) });
    }

    /// The time at which [`tick`](Self::tick) is due.
    #[must_use]
    pub fn deadline(&self) -> MonoNanos {
        let after = |from: MonoNanos, span: Duration| from.plus_ms(span.as_millis() as u64);
        let reading = match &self.phase {
            Phase::Greeting { since } => after(*since, HELLO_MAX),
            // Bytes that nobody reads cannot be missed.
            Phase::Serving { .. } if self.is_full() => MonoNanos(u64::MAX),
            Phase::Serving { greeted_at, .. } if self.channels.is_empty() => {
                after(*greeted_at, IDLE_MAX)
            }
            Phase::Serving { heard_at, .. } => after(*heard_at, SILENCE_MAX),
        };
        let written = self.out_since.map(|since| after(since, WRITE_MAX));
        written.map_or(reading, |written| written.min(reading))
    }

    /// Ends the connection if a deadline has passed.
    pub fn tick(&self, now: MonoNanos) -> Result<(), ConnectionError> {
        let is_over =
            |since: MonoNanos, max: Duration| u128::from(now.since_ns(since)) >= max.as_nanos();
        if self.out_since.is_some_and(|since| is_over(since, WRITE_MAX)) {
            return Err(ConnectionError::Unread);
        }
        match &self.phase {
            Phase::Greeting { since } if is_over(*since, HELLO_MAX) => {
                Err(ConnectionError::Silent(HELLO_MAX))
            }
            Phase::Serving { .. } if self.is_full() => Ok(()),
            Phase::Serving { greeted_at, .. } if self.channels.is_empty() => {
                let reason = "no member was attached".to_owned();
                let error = ConnectionError::Refused(RefusalKind::Invalid, reason);
                if is_over(*greeted_at, IDLE_MAX) { Err(error) } else { Ok(()) }
            }
            Phase::Serving { heard_at, .. } if is_over(*heard_at, SILENCE_MAX) => {
                Err(ConnectionError::Silent(SILENCE_MAX))
            }
            _ => Ok(()),
        }
    }

    /// The peer has closed its end.
    pub fn closed(&self) -> Result<(), ConnectionError> {
        match self.phase {
            Phase::Serving { .. } => Ok(()),
            Phase::Greeting { .. } => Err(ConnectionError::Refused(
                RefusalKind::Invalid,
                "the connection ended before the hello".to_owned(),
            )),
        }
    }

    /// The connection ends: its groups are told, and the host is told why, if it was not the one to end it.
    pub fn end(&mut self, why: Option<&ConnectionError>, server: &mut S) {
        let told = self.channels.groups().filter(|_| !tidelock_planted::is(Bug::EndNotTold));
        for group in told {
            server.give(group, HostEvent::Lost(self.id));
        }
        if let Some(why) = why {
            let (kind, reason) = why.refusal();
            self.outbox.send(Channel(0), Message::Refused { kind, reason });
        }
        self.outbox.close();
    }
}
