//! Accepting hosts.

use super::budget::Slot;
use super::config::Security;
use super::connection;
use super::peer_log::peer_log;
use super::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tidelock_protocol::bounds;
use tidelock_replica::connection::ConnectionError;
use tidelock_tls::PeerIdentity;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// After an error of `accept`: a pause lets some descriptors go.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// Accepts until the server stops, then waits for the connections to end.
pub async fn run(listener: TcpListener, registry: Arc<Registry>, stopping: watch::Receiver<bool>) {
    let mut pause = PAUSES[0];
    let mut connections = JoinSet::new();
    let mut stop = stopping.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                peer_log!(STRANGERS, warn, "cannot accept a connection: {error}");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSES[1]);
                continue;
            }
        };
        pause = PAUSES[0];
        let slot = registry.connections().stranger(address.ip());
        let (registry, stopping) = (Arc::clone(&registry), stopping.clone());
        connections.spawn(async move {
            match serve(stream, slot, registry, stopping).await {
                Ok(()) => peer_log!(HOSTS, info, %address, "the host has closed the connection"),
                Err(Ended::Stranger(reason)) => {
                    peer_log!(STRANGERS, warn, %address, reason, "the connection has ended");
                }
                Err(Ended::Host(reason)) => {
                    peer_log!(HOSTS, warn, %address, reason, "the connection has ended");
                }
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Why a connection has ended, before or after the peer has said who it is.
enum Ended {
    Stranger(String),
    Host(String),
}

impl Ended {
    fn stranger(error: impl ToString) -> Self {
        Self::Stranger(bounds::cap(&error.to_string()))
    }
}

async fn serve(
    stream: TcpStream,
    slot: Slot,
    registry: Arc<Registry>,
    stopping: watch::Receiver<bool>,
) -> Result<(), Ended> {
    let address = stream.peer_addr().map_err(Ended::stranger)?;
    stream.set_nodelay(true).map_err(Ended::stranger)?;
    let ended = match &registry.config().security {
        Security::Plaintext => connection::serve(stream, None, slot, registry, stopping).await,
        Security::Tls(files) => {
            // Loaded for each connection: renewed certificates need no restart.
            let config = files
                .load()
                .and_then(|credentials| credentials.backup_config(SystemTime::now()))
                .map_err(Ended::stranger)?;
            let accept = timeout(HANDSHAKE_MAX, TlsAcceptor::from(config).accept(stream));
            let accepted = tokio::select! {
                accepted = accept => accepted,
                () = slot.evicted() => return Err(Ended::stranger(ConnectionError::NoPlace)),
            };
            let stream = match accepted {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return Err(Ended::stranger(handshake(&error, address))),
                Err(_) => return Err(Ended::stranger("the TLS handshake took too long")),
            };
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let peer = PeerIdentity::of(chain).map_err(Ended::stranger)?;
            connection::serve(stream, Some(peer), slot, registry, stopping).await
        }
    };
    ended.map_err(|(error, greeted)| {
        let reason = match &error {
            ConnectionError::Io(io) => handshake(io, address),
            other => other.to_string(),
        };
        let reason = bounds::cap(&reason);
        if greeted { Ended::Host(reason) } else { Ended::Stranger(reason) }
    })
}

fn handshake(error: &std::io::Error, address: SocketAddr) -> String {
    tidelock_tls::explain(error, &address.to_string()).unwrap_or_else(|| error.to_string())
}
