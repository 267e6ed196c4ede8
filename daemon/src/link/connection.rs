//! One connection to the backup: hello, attachments, then reading and writing until it breaks.

use super::member::{Member, MemberError};
use super::port::ToLink;
use super::turns::{TURN_BYTES, Turns};
use crate::clock;
use bytes::{Buf, BytesMut};
use std::io;
use std::time::Duration;
use tidelock_protocol::bounds::Implausible;
use tidelock_protocol::frame::{self, Frame, FrameError};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Message, PROTOCOL, RefusalKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, MissedTickBehavior};

/// What is read at a time.
const READ_BYTES: usize = 64 << 10;
/// How long the backup may take to greet.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// What the owner loops send, with the member's channel.
pub type Inbox = UnboundedReceiver<(Channel, ToLink)>;

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
    /// Whether the backup said what it cannot say: it may say the same on the next connection.
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

/// Greets the backup and hears its greeting.
pub async fn greet<S>(stream: &mut S, hello: &Hello) -> Result<Greeting, ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut out = BytesMut::new();
    let (oldest, newest) = PROTOCOL;
    let message = Message::Hello {
        oldest,
        newest,
        host: hello.host.clone(),
        software: hello.software.clone(),
    };
    frame::encode_control(Channel(0), &message, &mut out);
    let answer = async {
        stream.write_all(&out).await?;
        stream.flush().await?;
        let mut input = BytesMut::new();
        loop {
            if let Some(frame) = frame::decode(&mut input)? {
                // The greeting is the only frame before the first attachment.
                return if input.is_empty() {
                    Ok(frame)
                } else {
                    Err(ConnectionError::Unexpected("frame after its greeting"))
                };
            }
            if stream.read_buf(&mut input).await? == 0 {
                return Err(ConnectionError::Closed);
            }
        }
    };
    match tokio::time::timeout(HELLO_TIMEOUT, answer).await {
        Err(_) => Err(ConnectionError::Silent(HELLO_TIMEOUT)),
        Ok(Err(error)) => Err(error),
        Ok(Ok(Frame::Control(Channel(0), Message::Welcome { protocol, server, software }))) => {
            if (oldest..=newest).contains(&protocol) {
                Ok(Greeting { server, software })
            } else {
                Err(ConnectionError::Unexpected("protocol version"))
            }
        }
        Ok(Ok(Frame::Control(Channel(0), Message::Refused { kind, reason }))) => {
            Err(ConnectionError::Refused { kind, reason })
        }
        Ok(Ok(_)) => Err(ConnectionError::Unexpected("first frame")),
    }
}

/// Serves the members on a greeted connection until it breaks, or until every owner loop has gone and everything was
/// sent (`Ok`).
pub async fn serve<S, T>(
    stream: S,
    members: &mut [Member<T>],
    inbox: &mut Inbox,
) -> Result<(), ConnectionError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    let lease_ms = members.iter().map(Member::lease_ms).min().unwrap_or(10_000);
    let silence_max = Duration::from_millis(lease_ms);
    let mut beacons = tokio::time::interval(silence_max / 4);
    beacons.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut input = BytesMut::with_capacity(READ_BYTES);
    let mut out = BytesMut::with_capacity(TURN_BYTES * 2);
    let mut batch = Vec::new();
    let mut turns = Turns::default();
    let mut must_flush = false;
    let mut inbox_open = true;
    let mut last_heard = Instant::now();

    for member in members.iter_mut() {
        member.connected(&mut out);
    }
    loop {
        if out.is_empty() {
            turns.fill(members, &mut out)?;
        }
        if !inbox_open && out.is_empty() && !must_flush {
            writer.shutdown().await?;
            return Ok(());
        }
        input.reserve(READ_BYTES);
        tokio::select! {
            read = reader.read_buf(&mut input) => {
                if read? == 0 {
                    return Err(ConnectionError::Closed);
                }
                last_heard = Instant::now();
                while let Some(frame) = frame::decode(&mut input)? {
                    hear(frame, members, clock::mono_now(), clock::wall_ms())?;
                }
                if members.iter().any(Member::must_connect_anew) {
                    return Err(ConnectionError::Crossed);
                }
                for member in members.iter_mut().filter(|member| member.wants_lease()) {
                    member.beacon(clock::mono_now(), &mut out);
                }
            }
            pushed = push(&mut writer, &mut out, &mut must_flush),
                if must_flush || !out.is_empty() => pushed?,
            count = inbox.recv_many(&mut batch, 256), if inbox_open => {
                inbox_open = count > 0;
                for (channel, message) in batch.drain(..) {
                    member_of(members, channel)?.hear_owner(message, &mut out);
                }
            }
            _ = beacons.tick() => {
                // A backup that is asked for nothing has nothing to say.
                if !members.iter().any(Member::expects_answers) {
                    last_heard = Instant::now();
                }
                if last_heard.elapsed() > silence_max {
                    return Err(ConnectionError::Silent(silence_max));
                }
                let now = clock::mono_now();
                for member in members.iter_mut() {
                    member.beacon(now, &mut out);
                }
            }
        }
    }
}

/// Writes some of `out`, or flushes what was written. Loses nothing when it is cancelled.
async fn push<W: AsyncWrite + Unpin>(
    writer: &mut W,
    out: &mut BytesMut,
    must_flush: &mut bool,
) -> io::Result<()> {
    if out.is_empty() {
        writer.flush().await?;
        *must_flush = false;
    } else {
        let count = writer.write(out).await?;
        out.advance(count);
        *must_flush = true;
    }
    Ok(())
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
fn member_of<T>(
    members: &mut [Member<T>],
    channel: Channel,
) -> Result<&mut Member<T>, ConnectionError> {
    usize::from(channel.0)
        .checked_sub(1)
        .and_then(|index| members.get_mut(index))
        .ok_or(ConnectionError::Unexpected("channel"))
}
