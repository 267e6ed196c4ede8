//! One host's connection: hello first, then channels, each for one attached member.
//!
//! Frames are decoded here and given to the owners of their groups, a whole read at a time;
//! payloads are slices of the buffer that they were read into. A peer that breaks the protocol is
//! told so and cut off: nothing of the damaged frame is used, everything before it counts.

use super::bookmarks;
use super::budget::Slot;
use super::inbox::{BeaconRoom, Event, FramesRoom, Inbox, WorkRoom};
use super::outbox::Outbox;
use super::owner::OwnerHandle;
use super::peer_log::peer_log;
use super::registry::{Registry, SpawnError};
use bytes::BytesMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;
use tidelock_protocol::frame::{self, Frame, FrameError};
use tidelock_protocol::ids::Channel;
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, Bookmark, Message, RefusalKind};
use tidelock_replica::group::{ConnectionId, Link};
use tidelock_replica::group_loop::work_bytes;
use tidelock_replica::hearing::{Channels, Greeting, Heard, Refusal};
use tidelock_tls::PeerIdentity;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// How much one read asks for at least.
const READ_BYTES: usize = 256 << 10;
/// A host that has attached nothing for so long has nothing to say.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// Why a connection ends whose place another one takes.
pub(super) const NO_PLACE: &str =
    "too many connections at once: this one was the oldest of the peer that has most of them";
/// A host that says nothing for so long is gone; attached ones send beacons.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// The hello must come within this.
const HELLO_MAX: Duration = Duration::from_secs(10);
/// A host that takes nothing for so long is gone.
const WRITE_MAX: Duration = Duration::from_secs(60);
/// How often a host hears that bytes of a frame arrive that is not whole yet.
const ARRIVING_EVERY: Duration = Duration::from_secs(1);
/// Bookmarks of one connection that may wait for the cut.
const BOOKMARKS_MAX: usize = 64;
const SOFTWARE: &str = concat!("tidelock-backup ", env!("CARGO_PKG_VERSION"));

static NEXT_CONNECTION: AtomicU64 = AtomicU64::new(1);

/// Why a connection ended.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The network.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Not frames.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// The peer breaks the protocol, or may not do what it asks for.
    #[error("{1}")]
    Refused(RefusalKind, String),
    /// Nothing was heard.
    #[error("nothing was heard for {} s", .0.as_secs())]
    Silent(Duration),
}

impl From<Refusal> for ConnectionError {
    fn from((kind, reason): Refusal) -> Self {
        Self::Refused(kind, reason)
    }
}

fn refuse<T>(kind: RefusalKind, reason: impl Into<String>) -> Result<T, ConnectionError> {
    Err(ConnectionError::Refused(kind, reason.into()))
}

/// Serves one connection to its end. `peer` is whom the certificate names; `None` on a plaintext
/// link. An error comes with whether the peer had said who it is.
pub async fn serve<T>(
    stream: T,
    peer: Option<PeerIdentity>,
    slot: Slot,
    registry: Arc<Registry>,
    mut stopping: watch::Receiver<bool>,
) -> Result<(), (ConnectionError, bool)>
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let id = ConnectionId(NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed));
    let outbox = Arc::new(Outbox::default());
    let (reader, writer) = tokio::io::split(stream);
    let sender = tokio::spawn(send(writer, Arc::clone(&outbox)));
    let mut connection = Connection {
        id,
        reader,
        peer,
        registry,
        outbox,
        host: String::new(),
        slot,
        has_parts: false,
        beacons: BeaconRoom::default(),
        work: WorkRoom::default(),
        channels: Channels::default(),
        bookmarks: JoinSet::new(),
    };
    let ended = tokio::select! {
        ended = connection.receive() => ended,
        _ = stopping.wait_for(|stop| *stop) => {
            // The owners have told each attached member, or will before they end.
            refuse(RefusalKind::Stopping, "the backup server is stopping")
        }
    };
    for owner in connection.channels.groups() {
        owner.inbox.push(Event::ConnectionLost(id));
    }
    if let Err(error) = &ended {
        let (kind, reason) = match error {
            ConnectionError::Refused(kind, reason) => (*kind, reason.clone()),
            ConnectionError::Frame(FrameError::Version(_)) => {
                (RefusalKind::Version, error.to_string())
            }
            _ => (RefusalKind::Invalid, error.to_string()),
        };
        connection.outbox.send(Channel(0), Message::Refused { kind, reason });
    }
    connection.outbox.close();
    // The refusal gets its chance to be read.
    let _ = timeout(Duration::from_secs(2), sender).await;
    let was_greeted = !connection.host.is_empty();
    ended.map_err(|error| (error, was_greeted))
}

struct Connection<R> {
    id: ConnectionId,
    reader: R,
    peer: Option<PeerIdentity>,
    registry: Arc<Registry>,
    outbox: Arc<Outbox>,
    host: String,
    /// As long as the host is not known: a stranger's.
    slot: Slot,
    /// Parts of a record have arrived that may not be whole.
    has_parts: bool,
    beacons: BeaconRoom,
    work: WorkRoom,
    channels: Channels<OwnerHandle>,
    /// Those that wait for the cut; given up with the connection.
    bookmarks: JoinSet<()>,
}

/// Frames of one channel that follow each other.
struct Run {
    link: Link,
    inbox: Arc<Inbox>,
    frames: Vec<Frame>,
    bytes: u64,
}

impl<R: AsyncRead + Unpin> Connection<R> {
    async fn receive(&mut self) -> Result<(), ConnectionError> {
        let mut input = BytesMut::new();
        match timeout(HELLO_MAX, self.hello(&mut input)).await {
            Ok(greeted) => greeted?,
            Err(_) => return Err(ConnectionError::Silent(HELLO_MAX)),
        }
        let greeted_at = Instant::now();
        let mut said_at = greeted_at;
        loop {
            self.take_frames(&mut input).await?;
            // What is whole is answered by itself.
            let are_parts = std::mem::take(&mut self.has_parts);
            if (are_parts || !input.is_empty()) && said_at.elapsed() >= ARRIVING_EVERY {
                self.outbox.send(Channel(0), Message::Arriving);
                said_at = Instant::now();
            }
            let patience = match self.channels.is_empty() {
                true => IDLE_MAX.saturating_sub(greeted_at.elapsed()),
                false => SILENCE_MAX,
            };
            match timeout(patience, self.read(&mut input)).await {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => return Ok(()),
                Ok(Err(error)) => return Err(error.into()),
                Err(_) if self.channels.is_empty() => {
                    return refuse(RefusalKind::Invalid, "no member was attached");
                }
                Err(_) => return Err(ConnectionError::Silent(SILENCE_MAX)),
            }
        }
    }

    /// `false`: the peer has closed.
    async fn read(&mut self, input: &mut BytesMut) -> std::io::Result<bool> {
        // Room for the rest of a large frame at once: growing step by step would copy it.
        let missing = frame::bytes_missing(input);
        if input.capacity() - input.len() < missing.max(1) {
            input.reserve(missing.max(READ_BYTES));
        }
        tokio::select! {
            read = self.reader.read_buf(input) => Ok(read? > 0),
            () = self.slot.evicted() => Err(std::io::Error::other(NO_PLACE)),
        }
    }

    async fn hello(&mut self, input: &mut BytesMut) -> Result<(), ConnectionError> {
        let first = loop {
            if let Some(first) = frame::decode(input)? {
                break first;
            }
            if frame::bytes_missing(input) > limits::HELLO_MAX_BYTES {
                return refuse(RefusalKind::Invalid, "the first message is larger than a hello");
            }
            if !self.read(input).await? {
                return refuse(RefusalKind::Invalid, "the connection ended before the hello");
            }
        };
        let Greeting { host, software, protocol } = Greeting::of(first)?;
        if let Some(peer) = &self.peer
            && !peer.speaks_for(&host)
        {
            return refuse(
                RefusalKind::Forbidden,
                format!("the certificate is for {}, not for {host}", peer.names().join(", ")),
            );
        }
        let is_listed = self.registry.config().is_listed_host(&host);
        // A certificate that speaks for several hosts has one share.
        let known_as = self.peer.as_ref().map_or(&*host, PeerIdentity::name);
        let Some(slot) = self.registry.connections().host(known_as, is_listed) else {
            return refuse(RefusalKind::Quota, "there are connections of too many hosts already");
        };
        self.slot = slot;
        peer_log!(HOSTS, info, host, software, "host connected");
        self.host = host;
        let welcome = Message::Welcome {
            protocol,
            server: self.registry.config().name.clone(),
            software: SOFTWARE.to_owned(),
        };
        self.outbox.send(Channel(0), welcome);
        Ok(())
    }

    /// Gives every whole frame in the buffer to its group.
    async fn take_frames(&mut self, input: &mut BytesMut) -> Result<(), ConnectionError> {
        let mut run: Option<Run> = None;
        loop {
            let before = input.len();
            let frame = match frame::decode(input) {
                Ok(Some(frame)) => frame,
                Ok(None) => return self.deliver(run).await,
                Err(error) => {
                    self.deliver(run).await?;
                    return Err(error.into());
                }
            };
            let bytes = (before - input.len()) as u64;
            self.has_parts |= matches!(frame, Frame::Part(..));
            let channel = frame.channel();
            let heard = match self.channels.hear(frame) {
                Ok(heard) => heard,
                Err(refusal) => {
                    self.deliver(run).await?;
                    return Err(refusal.into());
                }
            };
            match heard {
                Heard::Attach(channel, attach) => {
                    self.deliver(run.take()).await?;
                    self.attach(channel, attach, bytes).await?;
                }
                Heard::Beacon(owner, sent_at) => {
                    if let Some(permit) = self.beacons.take() {
                        let link = self.link(channel);
                        owner.inbox.push(Event::Beacon { link, sent_at, permit });
                    }
                }
                Heard::Bookmark(owner, wanted) => {
                    let group = Arc::clone(&owner.group);
                    self.bookmark(channel, group, *wanted);
                }
                Heard::Frame(owner, frame) => match &mut run {
                    Some(run) if run.link.channel == channel => {
                        run.frames.push(frame);
                        run.bytes += bytes;
                    }
                    _ => {
                        let (link, inbox) = (self.link(channel), Arc::clone(&owner.inbox));
                        let frames = vec![frame];
                        let begun = Run { link, inbox, frames, bytes };
                        self.deliver(run.replace(begun)).await?;
                    }
                },
            }
        }
    }

    async fn deliver(&self, run: Option<Run>) -> Result<(), ConnectionError> {
        let Some(Run { link, inbox, frames, bytes }) = run else { return Ok(()) };
        let stopping = || ConnectionError::Refused(RefusalKind::Stopping, "the group stops".into());
        // The connection's own room first: what is shared is not held while that is waited for.
        let work = self.work.take(frames.iter().map(work_bytes).sum()).await;
        let bytes = inbox.room_for(bytes).await.ok_or_else(stopping)?;
        inbox.push(Event::Frames { link, frames, room: FramesRoom { bytes, work } });
        Ok(())
    }

    fn link(&self, channel: Channel) -> Link {
        Link { connection: self.id, channel }
    }

    /// Answers when the cut has what is to be in it.
    fn bookmark(&mut self, channel: Channel, group: Arc<str>, wanted: Bookmark) {
        while self.bookmarks.try_join_next().is_some() {}
        let (id, outbox) = (wanted.id, Arc::clone(&self.outbox));
        if self.bookmarks.len() >= BOOKMARKS_MAX {
            let reason = format!("{BOOKMARKS_MAX} bookmarks of this host wait already");
            outbox.send(channel, Message::Bookmarked { id, outcome: Err(reason) });
            return;
        }
        let (registry, link) = (Arc::clone(&self.registry), self.link(channel));
        let host = self.host.clone();
        self.bookmarks.spawn(async move {
            let outcome = bookmarks::set(&registry, &group, link, host, wanted).await;
            outbox.send(channel, Message::Bookmarked { id, outcome: outcome.map(Box::new) });
        });
    }

    async fn attach(
        &mut self,
        channel: Channel,
        attach: Box<Attach>,
        bytes: u64,
    ) -> Result<(), ConnectionError> {
        let owner = match self.registry.get_or_spawn(&attach.group, Some(&self.host)) {
            Ok(owner) => owner,
            Err(error) => {
                let kind = match &error {
                    SpawnError::Name => RefusalKind::Invalid,
                    SpawnError::Quota(_) => RefusalKind::Quota,
                    SpawnError::Stopping(_) | SpawnError::Io(_) => RefusalKind::Stopping,
                };
                let refused = Message::Refused { kind, reason: error.to_string() };
                self.outbox.send(channel, refused);
                return Ok(());
            }
        };
        if let Some(other) = self.channels.get(channel)
            && !Arc::ptr_eq(&other.inbox, &owner.inbox)
            && !other.inbox.is_closed()
        {
            return refuse(RefusalKind::Invalid, "the channel is another group's");
        }
        let event = owner.inbox.room_for(bytes).await.map(|permit| Event::Attach {
            link: self.link(channel),
            host: self.host.clone(),
            attach,
            outbox: Arc::clone(&self.outbox),
            permit,
        });
        if event.is_some_and(|event| owner.inbox.push(event)) {
            self.channels.give(channel, owner);
        } else {
            // It ended this very moment: the host asks again.
            let reason = "the group is being closed, ask again".to_owned();
            let refused = Message::Refused { kind: RefusalKind::Stopping, reason };
            self.outbox.send(channel, refused);
        }
        Ok(())
    }
}

async fn send<W: AsyncWrite + Unpin>(mut writer: W, outbox: Arc<Outbox>) {
    let mut bytes = BytesMut::new();
    while let Some(messages) = outbox.take().await {
        for (channel, message) in messages {
            frame::encode_control(channel, &message, &mut bytes);
        }
        let written = async {
            writer.write_all(&bytes).await?;
            writer.flush().await
        };
        if !matches!(timeout(WRITE_MAX, written).await, Ok(Ok(()))) {
            return;
        }
        bytes.clear();
    }
    let _ = timeout(Duration::from_secs(2), writer.shutdown()).await;
}
