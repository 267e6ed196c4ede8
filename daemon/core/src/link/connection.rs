//! One connection to the backup, sans-I/O: hello, attachments, then bytes in and bytes out until it breaks.
//!
//! Invariant: nothing is said for a member before the backup has greeted this host, and its greeting is the only frame
//! before the first attachment.

use super::member::{Member, MemberError};
use super::port::ToLink;
use super::turns::{TURN_BYTES, Turns};
use bytes::BytesMut;
use std::io;
use std::time::Duration;
use tidelock_protocol::bounds::Implausible;
use tidelock_protocol::frame::{self, Frame, FrameError};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Message, PROTOCOL, RefusalKind};

/// How long the backup may take to greet.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// So many beacons fall into the shortest lease of the members.
const BEACONS_PER_LEASE: u64 = 4;

/// The two names that a connection is opened with.
#[derive(Clone, Debug)]
pub struct Hello {
    /// This host's name, as in its certificate.
    pub host: String,
    /// Name and version of this software.
    pub software: String,
}

/// The backup's greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The server's name.
    pub server: String,
    /// Name and version of its software.
    pub software: String,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// The network.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The backup closed it.
    #[error("the backup closed the connection")]
    Closed,
    /// What came is not our protocol.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// What came is our protocol, but not now.
    #[error("the backup sent an unexpected {0}")]
    Unexpected(&'static str),
    /// The backup does not want this host.
    #[error("the backup refuses this host: {reason} ({kind:?})")]
    Refused {
        /// For programs.
        kind: RefusalKind,
        /// For people.
        reason: String,
    },
    /// Nothing was heard for too long.
    #[error("no answer from the backup for {0:?}")]
    Silent(Duration),
    /// A refusal has crossed with a question, so answers could be mistaken ([`Member::must_connect_anew`]).
    #[error("the backup has refused a member that was asking for a comparison")]
    Crossed,
    /// What the backup said, or the state of a member.
    #[error(transparent)]
    Member(#[from] MemberError),
}

impl ConnectionError {
    /// True if the backup said what it cannot say: it may say the same on the next connection.
    #[must_use]
    pub fn is_of_words(&self) -> bool {
        match self {
            Self::Frame(_) | Self::Unexpected(_) => true,
            Self::Member(error) => !error.ends_run(),
            Self::Io(_) | Self::Closed | Self::Refused { .. } | Self::Silent(_) | Self::Crossed => {
                false
            }
        }
    }

    /// What makes two ends the same for the log. How far a clock is ahead differs each time.
    #[must_use]
    pub fn what_repeats(&self) -> String {
        match self {
            Self::Member(MemberError::Implausible {
                member,
                source: Implausible::Time { what, .. },
            }) => format!("{member}: {what}"),
            other => other.to_string(),
        }
    }
}

enum Phase {
    /// The hello is under way, since this time.
    Greeting { since: MonoNanos },
    /// The members are attached, or ask to be.
    Serving { last_heard: MonoNanos, next_beacon: MonoNanos },
}

/// One connection, from the hello on.
pub struct Connection {
    phase: Phase,
    /// The shortest lease of the members: a backup that says nothing for so long is not there.
    silence_max: Duration,
    /// Encoded, and not taken by the network.
    out: BytesMut,
    turns: Turns,
}

impl Connection {
    /// A connection that has just been made. The hello is the first that it has to send.
    #[must_use]
    pub fn open<T>(hello: &Hello, members: &[Member<T>], now: MonoNanos) -> Self {
        let lease_ms = members.iter().map(Member::lease_ms).min().unwrap_or(10_000);
        let mut out = BytesMut::with_capacity(TURN_BYTES * 2);
        let (oldest, newest) = PROTOCOL;
        let message = Message::Hello {
            oldest,
            newest,
            host: hello.host.clone(),
            software: hello.software.clone(),
        };
        frame::encode_control(Channel(0), &message, &mut out);
        Self {
            phase: Phase::Greeting { since: now },
            silence_max: Duration::from_millis(lease_ms),
            out,
            turns: Turns::default(),
        }
    }

    /// Bytes have arrived: takes the whole frames out of `input`. Returns the greeting if it is among them.
    pub fn received<T>(
        &mut self,
        input: &mut BytesMut,
        members: &mut [Member<T>],
        now: MonoNanos,
        wall_ms: u64,
    ) -> Result<Option<Greeting>, ConnectionError> {
        if let Phase::Greeting { .. } = self.phase {
            let Some(frame) = frame::decode(input)? else { return Ok(None) };
            let greeting = greeting(frame)?;
            // A backup that stops may have greeted this host just before.
            match frame::decode(input)? {
                Some(Frame::Control(Channel(0), Message::Refused { kind, reason })) => {
                    return Err(ConnectionError::Refused { kind, reason });
                }
                Some(_) => return Err(ConnectionError::Unexpected("frame after its greeting")),
                None => {}
            }
            self.phase = Phase::Serving { last_heard: now, next_beacon: now };
            for member in members {
                member.connected(&mut self.out);
            }
            return Ok(Some(greeting));
        }
        while let Some(frame) = frame::decode(input)? {
            hear(frame, members, now, wall_ms)?;
        }
        if members.iter().any(Member::must_connect_anew) {
            return Err(ConnectionError::Crossed);
        }
        for member in members.iter_mut().filter(|member| member.wants_lease()) {
            member.beacon(now, &mut self.out);
        }
        if let Phase::Serving { last_heard, .. } = &mut self.phase {
            *last_heard = now;
        }
        Ok(None)
    }

    /// A message of a member's owner loop.
    pub fn owner_says<T>(&mut self, member: &mut Member<T>, message: ToLink) {
        match self.phase {
            // Nothing is said before the greeting: the attachment that follows tells the backup where things stand.
            Phase::Greeting { .. } => member.hear_owner(message, &mut BytesMut::new()),
            Phase::Serving { .. } => member.hear_owner(message, &mut self.out),
        }
    }

    /// The time at which [`tick`](Self::tick) is due.
    #[must_use]
    pub fn deadline(&self) -> MonoNanos {
        match self.phase {
            Phase::Greeting { since } => since.plus_ms(HELLO_TIMEOUT.as_millis() as u64),
            Phase::Serving { next_beacon, .. } => next_beacon,
        }
    }

    /// The deadline has passed: beacons are due, or the backup has been silent for too long.
    pub fn tick<T>(
        &mut self,
        members: &mut [Member<T>],
        now: MonoNanos,
    ) -> Result<(), ConnectionError> {
        match &mut self.phase {
            Phase::Greeting { .. } => Err(ConnectionError::Silent(HELLO_TIMEOUT)),
            Phase::Serving { last_heard, next_beacon } => {
                // A backup that is asked for nothing has nothing to say.
                if !members.iter().any(Member::expects_answers) {
                    *last_heard = now;
                }
                if u128::from(now.since_ns(*last_heard)) > self.silence_max.as_nanos() {
                    return Err(ConnectionError::Silent(self.silence_max));
                }
                *next_beacon = now.plus_ms(self.silence_max.as_millis() as u64 / BEACONS_PER_LEASE);
                for member in members {
                    member.beacon(now, &mut self.out);
                }
                Ok(())
            }
        }
    }

    /// Bytes for the network, which takes them from the front. Members get their turns when it has taken all.
    pub fn output<T>(
        &mut self,
        members: &mut [Member<T>],
    ) -> Result<&mut BytesMut, ConnectionError> {
        if self.out.is_empty() && matches!(self.phase, Phase::Serving { .. }) {
            self.turns.fill(members, &mut self.out)?;
        }
        Ok(&mut self.out)
    }

    /// The bytes of that which are encoded.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.out.len()
    }
}

/// The backup's first frame.
fn greeting(frame: Frame) -> Result<Greeting, ConnectionError> {
    let (oldest, newest) = PROTOCOL;
    match frame {
        Frame::Control(Channel(0), Message::Welcome { protocol, server, software }) => {
            if (oldest..=newest).contains(&protocol) {
                Ok(Greeting { server, software })
            } else {
                Err(ConnectionError::Unexpected("protocol version"))
            }
        }
        Frame::Control(Channel(0), Message::Refused { kind, reason }) => {
            Err(ConnectionError::Refused { kind, reason })
        }
        _ => Err(ConnectionError::Unexpected("first frame")),
    }
}

/// Takes in one frame of the backup, by both clocks of this host. Nothing of a message is believed before it is judged.
pub fn hear<T>(
    frame: Frame,
    members: &mut [Member<T>],
    now: MonoNanos,
    wall_ms: u64,
) -> Result<(), ConnectionError> {
    match frame {
        Frame::Control(Channel(0), Message::Refused { kind, reason }) => {
            Err(ConnectionError::Refused { kind, reason })
        }
        Frame::Control(Channel(0), Message::Arriving) => {
            members.iter().for_each(Member::bytes_arrive);
            Ok(())
        }
        Frame::Control(channel, message) => {
            let member = member_of(members, channel)?;
            member.judge(&message, wall_ms)?;
            Ok(member.receive(message, now)?)
        }
        Frame::Record(..) | Frame::Part(..) => Err(ConnectionError::Unexpected("record")),
    }
}

/// Channels count the members from 1.
pub(super) fn member_of<T>(
    members: &mut [Member<T>],
    channel: Channel,
) -> Result<&mut Member<T>, ConnectionError> {
    usize::from(channel.0)
        .checked_sub(1)
        .and_then(|index| members.get_mut(index))
        .ok_or(ConnectionError::Unexpected("channel"))
}
