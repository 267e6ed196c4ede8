//! The driver of one host's connection ([`Connection`]): its socket and its timer.

use super::budget::Slot;
use super::clock;
use super::peer::{Bookmarked, ServerOfPeer};
use super::registry::Registry;
use super::stores;
use bytes::{Buf, BytesMut};
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidelock_protocol::frame;
use tidelock_replica::connection::{Connection, ConnectionError};
use tidelock_replica::group::ConnectionId;
use tidelock_tls::PeerIdentity;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, sink, split};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// The first bytes must come within this.
const HELLO_MAX: Duration = Duration::from_secs(10);
/// The time for the last words of a connection.
const FAREWELL: Duration = Duration::from_secs(2);
const SOFTWARE: &str = concat!("tidelock-backup ", env!("CARGO_PKG_VERSION"));

static NEXT_CONNECTION: AtomicU64 = AtomicU64::new(1);

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
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let id = ConnectionId(NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed));
    let name = registry.config().name.clone();
    let mut stream = stream;
    let mut first = BytesMut::new();
    let kind = tokio::select! {
        kind = timeout(HELLO_MAX, first_kind(&mut stream, &mut first)) => kind,
        _ = stopping.wait_for(|stop| *stop) => return Err((ConnectionError::stopping(), false)),
    };
    match kind {
        Ok(Ok(Some(frame::KIND_STORE_CONTROL))) => {
            let serve = stores::connection::serve;
            return serve(stream, first, peer, slot, registry, stopping, id.0).await;
        }
        Ok(Ok(_)) => {}
        Ok(Err(error)) => return Err((error.into(), false)),
        Err(_) => return Err((ConnectionError::Silent(HELLO_MAX), false)),
    }
    let mut connection = Connection::new(id, &name, SOFTWARE, clock::now().mono);
    *connection.input() = first;
    let (set, marks) = mpsc::unbounded_channel();
    let bookmarks = JoinSet::new();
    let mut server = ServerOfPeer { id, peer, slot, registry, bookmarks, set };
    let (mut reader, mut writer) = split(stream);
    let mut out = BytesMut::new();
    let wire = (&mut reader, &mut writer, &mut out);
    let ended = tokio::select! {
        ended = run(wire, &mut connection, &mut server, marks) => ended,
        // The owners have told each attached member, or will before they end.
        _ = stopping.wait_for(|stop| *stop) => Err(ConnectionError::stopping()),
    };
    connection.end(ended.as_ref().err(), &mut server);
    // The refusal gets its chance to be read.
    let farewell = async {
        writer.write_all(&out).await?;
        out.clear();
        if connection.output(&mut out, clock::now().mono).is_ok() {
            writer.write_all(&out).await?;
        }
        writer.flush().await?;
        writer.shutdown().await?;
        if matches!(ended, Err(ConnectionError::NoPlace)) {
            return Ok(0);
        }
        // Bytes that nobody reads would reset the connection, and the peer would lose the last words.
        copy(&mut reader, &mut sink()).await
    };
    let evicted = server.slot.evicted();
    tokio::select! {
        _ = timeout(FAREWELL, farewell) => {}
        () = evicted => {}
    }
    ended.map_err(|error| (error, connection.is_greeted()))
}

/// Reads until the first frame says which link this is. `None`: it ended before, or does not speak Tidelock.
async fn first_kind<T: AsyncRead + Unpin>(
    stream: &mut T,
    input: &mut BytesMut,
) -> io::Result<Option<u8>> {
    while frame::kind(input).is_none() && frame::MAGIC.starts_with(&input[..input.len().min(4)]) {
        if stream.read_buf(input).await? == 0 {
            return Ok(None);
        }
    }
    Ok(frame::kind(input))
}

/// Moves bytes until the connection ends.
async fn run<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    (reader, writer, out): (&mut R, &mut W, &mut BytesMut),
    connection: &mut Connection<ServerOfPeer>,
    server: &mut ServerOfPeer,
    mut marks: mpsc::UnboundedReceiver<Bookmarked>,
) -> Result<(), ConnectionError> {
    let mut must_flush = false;
    let mut timer = pin!(sleep_until(Instant::now()));
    let mut fires_at = clock::now().mono;
    // Frames that came with the first bytes are taken before more is read.
    let mut has_input = true;
    loop {
        let now = clock::now().mono;
        connection.output(out, now)?;
        // A deadline that has moved away is looked at when the timer fires.
        if connection.deadline() < fires_at || timer.is_elapsed() {
            fires_at = connection.deadline();
            let after = Duration::from_nanos(fires_at.since_ns(now)).min(Duration::from_secs(3600));
            timer.as_mut().reset(Instant::now() + after);
        }
        let (evicted, outbox) = (server.slot.evicted(), Arc::clone(connection.outbox()));
        tokio::select! {
            is_open = receive(reader, connection, server, &mut has_input) => {
                if !is_open? {
                    return connection.closed();
                }
            }
            pushed = push(writer, out, &mut must_flush), if must_flush || !out.is_empty() => {
                pushed?;
                if out.is_empty() {
                    connection.wrote_all();
                }
            }
            () = outbox.changed() => {}
            Some((channel, id, outcome)) = marks.recv() => connection.bookmarked(channel, id, outcome),
            () = evicted => return Err(ConnectionError::NoPlace),
            () = timer.as_mut() => connection.tick(clock::now().mono)?,
        }
    }
}

/// Reads, and gives groups what they have room for. False: the peer has closed. Loses nothing when it is cancelled.
async fn receive<R: AsyncRead + Unpin>(
    reader: &mut R,
    connection: &mut Connection<ServerOfPeer>,
    server: &mut ServerOfPeer,
    has_input: &mut bool,
) -> Result<bool, ConnectionError> {
    if !connection.is_full() && !*has_input && reader.read_buf(connection.input()).await? == 0 {
        return Ok(false);
    }
    poll_fn(|context| connection.take(server, clock::now().mono, context)).await?;
    *has_input = false;
    Ok(true)
}

/// Writes some of `out`, or flushes what was written. Loses nothing when it is cancelled.
pub(super) async fn push<W: AsyncWrite + Unpin>(
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
