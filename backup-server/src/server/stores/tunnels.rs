//! Tunnels to shards' servers at the primary site ([`tidelock_shard::tunnel`]): bytes of a socket here through the link, and
//! back. [`Tunnels`] is the part on the store's thread; [`serve`] moves the bytes of one socket.

use super::Event;
use bytes::{Bytes, BytesMut};
use std::collections::BTreeMap;
use std::io;
use tidelock_shard::link::TUNNEL_DATA_MAX_BYTES;
use tidelock_shard_logs::{Store, TunnelEvent, TunnelId};
use tidelock_storage::files::Files;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

/// A request about a tunnel.
pub(super) enum Ask {
    /// Open one to a shard's server. `None`: no host that leads the shard is connected, or there are too many.
    Open { shard: u16, done: oneshot::Sender<Option<(TunnelId, mpsc::UnboundedReceiver<Bytes>)>> },
    /// Send bytes; answered when they have left.
    Send { id: TunnelId, data: Bytes, done: oneshot::Sender<()> },
    /// Bytes were taken.
    Taken { id: TunnelId, bytes: usize },
    /// Close it.
    Close(TunnelId),
}

struct Open {
    /// Bounded by the tunnel's window: more is not sent before these bytes are taken.
    to: mpsc::UnboundedSender<Bytes>,
    /// Bytes for which the tunnel had no room.
    waiting: Option<(Bytes, oneshot::Sender<()>)>,
}

/// Open tunnels.
#[derive(Default)]
pub(super) struct Tunnels(BTreeMap<TunnelId, Open>);

impl Tunnels {
    pub(super) fn ask(&mut self, store: &mut Store<Files>, ask: Ask) {
        match ask {
            Ask::Open { shard, done } => {
                let Some(id) = store.open_tunnel(shard) else { return drop(done.send(None)) };
                let (to, from) = mpsc::unbounded_channel();
                self.0.insert(id, Open { to, waiting: None });
                if done.send(Some((id, from))).is_err() {
                    self.close(store, id);
                }
            }
            Ask::Send { id, data, done } => {
                if let Some(open) = self.0.get_mut(&id) {
                    open.waiting = Some((data, done));
                    self.push(store, id);
                }
            }
            Ask::Taken { id, bytes } => store.tunnel_taken(id, bytes),
            Ask::Close(id) => self.close(store, id),
        }
    }

    /// A tunnel has said something.
    pub(super) fn heard(&mut self, store: &mut Store<Files>, id: TunnelId, event: TunnelEvent) {
        match event {
            TunnelEvent::Data(data) => {
                if self.0.get(&id).is_some_and(|open| open.to.send(data).is_err()) {
                    self.close(store, id);
                }
            }
            TunnelEvent::Room => self.push(store, id),
            TunnelEvent::Closed(reason) => {
                self.0.remove(&id);
                if let Some(reason) = reason {
                    tracing::warn!(reason, "a tunnel to a shard's server was closed");
                }
            }
        }
    }

    /// Sends what there is room for.
    fn push(&mut self, store: &mut Store<Files>, id: TunnelId) {
        let Some(open) = self.0.get_mut(&id) else { return };
        let Some((mut data, done)) = open.waiting.take() else { return };
        while !data.is_empty() {
            let room = store.tunnel_room(id);
            if room == 0 {
                open.waiting = Some((data, done));
                return;
            }
            store.tunnel_send(id, data.split_to(room.min(data.len())));
        }
        let _ = done.send(());
    }

    fn close(&mut self, store: &mut Store<Files>, id: TunnelId) {
        self.0.remove(&id);
        store.close_tunnel(id);
    }
}

/// Moves the bytes of a socket to a shard's server, and back, until either end closes.
pub(super) async fn serve(
    stream: UnixStream,
    shard: u16,
    events: mpsc::Sender<Event>,
) -> io::Result<()> {
    let ask = async |ask| events.send(Event::Tunnel(ask)).await.map_err(io::Error::other);
    let (done, opened) = oneshot::channel();
    ask(Ask::Open { shard, done }).await?;
    let Ok(Some((id, mut from))) = opened.await else {
        return Err(io::Error::other("no host that leads the shard is connected"));
    };
    let (mut reader, mut writer) = stream.into_split();
    let up = async {
        loop {
            let mut data = BytesMut::with_capacity(TUNNEL_DATA_MAX_BYTES);
            if reader.read_buf(&mut data).await? == 0 {
                return Ok(());
            }
            let (done, sent) = oneshot::channel();
            ask(Ask::Send { id, data: data.freeze(), done }).await?;
            // The tunnel is gone otherwise, and the other half ends with what has come.
            if sent.await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let down = async {
        while let Some(data) = from.recv().await {
            writer.write_all(&data).await?;
            ask(Ask::Taken { id, bytes: data.len() }).await?;
        }
        writer.shutdown().await
    };
    let ended = tokio::select! {
        ended = up => ended,
        ended = down => ended,
    };
    ask(Ask::Close(id)).await?;
    ended
}
