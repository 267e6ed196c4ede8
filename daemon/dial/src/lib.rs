//! Connections of a primary host to its backup server: TCP, and TLS over it. Shared by the daemon and by stores that ship their
//! logs themselves.
#![forbid(unsafe_code)]

use bytes::{Buf, BytesMut};
use rustls_pki_types::ServerName;
use std::io;
use std::time::SystemTime;
use tidelock_tls::Files;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The security of a connection.
#[derive(Clone, Debug)]
pub enum Security {
    /// TLS 1.3 with certificates on both sides.
    Tls {
        /// This host's authority, certificate and key; read anew for each connection, so renewed
        /// certificates need no restart.
        files: Files,
        /// The name in the backup's certificate.
        server_name: ServerName<'static>,
    },
    /// For a test link.
    Plaintext,
}

/// A connection, with or without TLS.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Connects to the backup at `address` (`host:port`). The kernel takes `notsent_lowat_bytes` ahead of the network.
///
/// # Errors
/// The backup is not reached, the files of the certificates cannot be used, or the handshake fails: in words that say
/// what to do.
pub async fn connect(
    address: &str,
    security: &Security,
    notsent_lowat_bytes: u32,
) -> io::Result<Box<dyn Stream>> {
    let tcp = TcpStream::connect(address).await?;
    tcp.set_nodelay(true)?;
    socket2::SockRef::from(&tcp).set_tcp_notsent_lowat(notsent_lowat_bytes)?;
    let (files, server_name) = match security {
        Security::Plaintext => return Ok(Box::new(tcp)),
        Security::Tls { files, server_name } => (files, server_name),
    };
    let config = files
        .load()
        .and_then(|credentials| credentials.host_config(SystemTime::now()))
        .map_err(io::Error::other)?;
    let connector = TlsConnector::from(config);
    let tls = connector.connect(server_name.clone(), tcp).await;
    Ok(Box::new(tls.map_err(|error| explained(error, address))?))
}

/// A failed handshake, or a connection that the peer has ended after it, in words that say what to do.
#[must_use]
pub fn explained(error: io::Error, address: &str) -> io::Error {
    match tidelock_tls::explain(&error, address) {
        Some(text) => io::Error::new(error.kind(), text),
        None => error,
    }
}

/// Writes some of `out`, or flushes what was written. Loses nothing when it is cancelled.
///
/// # Errors
/// The connection is gone.
pub async fn push<W: AsyncWrite + Unpin>(
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
