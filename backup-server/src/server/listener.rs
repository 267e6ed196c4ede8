//! Accepting hosts.

use super::config::Security;
use super::connection::{self, ConnectionError};
use super::registry::Registry;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tidelock_tls::PeerIdentity;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Connections at once. Strangers are cut off within seconds.
const CONNECTIONS_MAX: usize = 1024;
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Accepts until the server stops, then waits for the connections to end.
pub async fn run(listener: TcpListener, registry: Arc<Registry>, stopping: watch::Receiver<bool>) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
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
                // Out of descriptors, say: a pause lets some go.
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            tracing::warn!(%address, "too many connections");
            continue;
        };
        let (registry, stopping) = (Arc::clone(&registry), stopping.clone());
        connections.spawn(async move {
            let _permit = permit;
            match serve(stream, registry, stopping).await {
                Ok(()) => tracing::info!(%address, "the host has closed the connection"),
                Err(reason) => tracing::warn!(%address, reason, "the connection has ended"),
            }
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn serve(
    stream: TcpStream,
    registry: Arc<Registry>,
    stopping: watch::Receiver<bool>,
) -> Result<(), String> {
    let address = stream.peer_addr().map_err(|e| e.to_string())?;
    stream.set_nodelay(true).map_err(|e| e.to_string())?;
    let ended = match &registry.config().security {
        Security::Plaintext => connection::serve(stream, None, registry, stopping).await,
        Security::Tls(files) => {
            // Loaded for each connection: renewed certificates need no restart.
            let config = files
                .load()
                .and_then(|credentials| credentials.backup_config(SystemTime::now()))
                .map_err(|e| e.to_string())?;
            let accept = TlsAcceptor::from(config).accept(stream);
            let stream = match timeout(HANDSHAKE_MAX, accept).await {
                Ok(Ok(stream)) => stream,
                Ok(Err(error)) => return Err(handshake(&error, address)),
                Err(_) => return Err("the TLS handshake took too long".to_owned()),
            };
            let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let peer = PeerIdentity::of(chain).map_err(|e| e.to_string())?;
            connection::serve(stream, Some(peer), registry, stopping).await
        }
    };
    ended.map_err(|error: ConnectionError| error.to_string())
}

fn handshake(error: &std::io::Error, address: SocketAddr) -> String {
    tidelock_tls::explain(error, &address.to_string()).unwrap_or_else(|| error.to_string())
}
