//! The driver of one connection of a store's host ([`tidelock_shard::link`]): its hello, then frames to the store's thread and
//! messages from it.

use super::outbox::Outbox;
use super::{Event, StoreHandle};
use crate::server::budget::Slot;
use crate::server::connection::push;
use crate::server::peer_log::peer_log;
use crate::server::registry::Registry;
use bytes::BytesMut;
use std::sync::Arc;
use std::time::Duration;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::Channel;
use tidelock_protocol::limits::HELLO_MAX_BYTES;
use tidelock_protocol::message::RefusalKind;
use tidelock_replica::connection::ConnectionError;
use tidelock_shard::link::{StoreFrame, StoreMessage, VERSION};
use tidelock_shard_logs::Link;
use tidelock_tls::PeerIdentity;
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, copy, sink, split,
};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};

const SOFTWARE: &str = concat!("tidelock-backup ", env!("CARGO_PKG_VERSION"));
const HELLO_MAX: Duration = Duration::from_secs(10);
/// A host that says nothing for so long is gone: it sends beats.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// The time for the last words.
const FAREWELL: Duration = Duration::from_secs(2);
/// The most that one read brings.
const READ_BYTES: usize = 256 << 10;
/// A hello names up to 1,024 shards.
const STORE_HELLO_MAX_BYTES: usize = HELLO_MAX_BYTES + 1024 * 66;

/// Serves a connection whose first bytes are in `input` to its end. An error comes with whether the peer had said who it is.
pub(in crate::server) async fn serve<T: AsyncRead + AsyncWrite + Send + 'static>(
    stream: T,
    input: BytesMut,
    peer: Option<PeerIdentity>,
    slot: Slot,
    registry: Arc<Registry>,
    mut stopping: watch::Receiver<bool>,
    number: u64,
) -> Result<(), (ConnectionError, bool)> {
    let (reader, writer) = split(stream);
    let mut connection = Connection {
        link: Link(number),
        reader,
        writer,
        input,
        out: BytesMut::new(),
        slot,
        store: None,
        outbox: Arc::default(),
    };
    let ended = tokio::select! {
        ended = connection.run(peer.as_ref(), &registry) => ended,
        _ = stopping.wait_for(|stop| *stop) => Err(ConnectionError::stopping()),
    };
    let was_greeted = connection.store.is_some();
    if let Some(store) = &connection.store {
        let _ = store.events.send(Event::Lost(connection.link)).await;
    }
    if let Err(error) = &ended {
        let kind = match error {
            ConnectionError::Refused(kind, _) => *kind,
            _ => RefusalKind::Invalid,
        };
        let refused = StoreMessage::Refused { kind, reason: error.to_string() };
        frame::encode_control(Channel(0), &refused, &mut connection.out);
    }
    let Connection { mut reader, mut writer, out, .. } = connection;
    let farewell = async {
        writer.write_all(&out).await?;
        writer.flush().await?;
        writer.shutdown().await?;
        // Bytes that nobody reads would reset the connection, and the peer would lose the last words.
        copy(&mut reader, &mut sink()).await
    };
    let _ = timeout(FAREWELL, farewell).await;
    ended.map_err(|error| (error, was_greeted))
}

struct Connection<T> {
    link: Link,
    reader: ReadHalf<T>,
    writer: WriteHalf<T>,
    input: BytesMut,
    out: BytesMut,
    slot: Slot,
    /// Once the host has said hello.
    store: Option<StoreHandle>,
    outbox: Arc<Outbox>,
}

fn refused<T>(kind: RefusalKind, reason: String) -> Result<T, ConnectionError> {
    Err(ConnectionError::Refused(kind, reason))
}

impl<T: AsyncRead + AsyncWrite> Connection<T> {
    async fn run(
        &mut self,
        peer: Option<&PeerIdentity>,
        registry: &Registry,
    ) -> Result<(), ConnectionError> {
        let hello = timeout(HELLO_MAX, self.hello()).await;
        let hello = hello.unwrap_or(Err(ConnectionError::Silent(HELLO_MAX)))?;
        self.greet(hello, peer, registry).await?;
        self.pump().await
    }

    async fn hello(&mut self) -> Result<StoreMessage, ConnectionError> {
        loop {
            if let Some(frame) = frame::decode_of(&mut self.input)? {
                let frame: StoreFrame = frame;
                return match frame {
                    Frame::Control(Channel(0), hello @ StoreMessage::Hello { .. }) => Ok(hello),
                    _ => refused(RefusalKind::Invalid, "the first message is no hello".to_owned()),
                };
            }
            if frame::bytes_missing(&self.input) + self.input.len() > STORE_HELLO_MAX_BYTES {
                return refused(RefusalKind::Invalid, "the hello is too long".to_owned());
            }
            if self.reader.read_buf(&mut self.input).await? == 0 {
                return refused(
                    RefusalKind::Invalid,
                    "the connection ended before the hello".to_owned(),
                );
            }
        }
    }

    async fn greet(
        &mut self,
        hello: StoreMessage,
        peer: Option<&PeerIdentity>,
        registry: &Registry,
    ) -> Result<(), ConnectionError> {
        let StoreMessage::Hello { oldest, newest, host, software, store, shards } = hello else {
            return Ok(());
        };
        if !(oldest..=newest).contains(&VERSION) {
            let reason = format!(
                "this server speaks version {VERSION} of the link of stores, and the host {oldest} to {newest}: upgrade the older \
                 one"
            );
            return refused(RefusalKind::Version, reason);
        }
        if let Some(peer) = peer.filter(|peer| !peer.speaks_for(&host)) {
            let names = peer.names().join(", ");
            return refused(
                RefusalKind::Forbidden,
                format!("the certificate is for {names}, not for {host}"),
            );
        }
        let Some(of) = registry.stores().get(&store) else {
            let reason = format!(
                "this server has no store {store}: add it to its configuration, as [[store]] with name = \"{store}\" and hosts"
            );
            return refused(RefusalKind::Forbidden, reason);
        };
        if !of.hosts.contains(&host) {
            let reason = format!(
                "{host} is not one of the hosts of store {store}: add it to `hosts` of its [[store]]"
            );
            return refused(RefusalKind::Forbidden, reason);
        }
        let known_as = peer.map_or(host.as_str(), PeerIdentity::name);
        let Some(slot) = registry.connections().host(known_as, true) else {
            let reason = "there are connections of too many hosts already".to_owned();
            return refused(RefusalKind::Quota, reason);
        };
        self.slot = slot;
        let (done, answer) = oneshot::channel();
        let (link, outbox) = (self.link, Arc::clone(&self.outbox));
        let connected = Event::Connected { link, host: host.clone(), shards, outbox, done };
        let is_taken = of.events.send(connected).await.is_ok();
        let Ok(answer) = answer.await else { return Err(ConnectionError::stopping()) };
        if !is_taken {
            return Err(ConnectionError::stopping());
        }
        answer.map_err(|(kind, reason)| ConnectionError::Refused(kind, reason))?;
        self.store = Some(of.clone());
        peer_log!(HOSTS, info, host, store, software, "host connected to its store");
        let server = registry.config().name.clone();
        let welcome =
            StoreMessage::Welcome { protocol: VERSION, server, software: SOFTWARE.to_owned() };
        frame::encode_control(Channel(0), &welcome, &mut self.out);
        Ok(())
    }

    async fn pump(&mut self) -> Result<(), ConnectionError> {
        let Some(StoreHandle { events, .. }) = self.store.clone() else { return Ok(()) };
        let mut heard_at = Instant::now();
        let mut must_flush = false;
        loop {
            let mut frames = Vec::new();
            while let Some(frame) = frame::decode_of(&mut self.input)? {
                frames.push(frame);
            }
            if !frames.is_empty() {
                // Waits while the store has no room: nothing is read meanwhile.
                let frames = Event::Frames { link: self.link, frames };
                let Ok(()) = events.send(frames).await else {
                    return Err(ConnectionError::stopping());
                };
            }
            if self.out.is_empty() {
                let taken = self.outbox.take(&mut self.out);
                taken.map_err(|(kind, reason)| ConnectionError::Refused(kind, reason))?;
            }
            let missing = frame::bytes_missing(&self.input).max(READ_BYTES);
            self.input.reserve(missing);
            let (evicted, is_empty) = (self.slot.evicted(), self.out.is_empty());
            tokio::select! {
                read = self.reader.read_buf(&mut self.input) => {
                    if read? == 0 {
                        return Ok(());
                    }
                    heard_at = Instant::now();
                }
                pushed = push(&mut self.writer, &mut self.out, &mut must_flush), if must_flush || !is_empty => pushed?,
                () = self.outbox.changed(), if is_empty => {}
                () = evicted => return Err(ConnectionError::NoPlace),
                () = sleep_until(heard_at + SILENCE_MAX) => return Err(ConnectionError::Silent(SILENCE_MAX)),
            }
        }
    }
}
