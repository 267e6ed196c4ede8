//! Connecting to the backup again and again, with growing pauses, over TLS or (by name) plaintext.

use super::connection::{self, ConnectionError, Hello, Inbox};
use super::member::Member;
use super::{LinkState, NOTSENT_LOWAT_BYTES};
use crate::clock::mono_now;
use bytes::BytesMut;
use rustls_pki_types::ServerName;
use std::io;
use std::time::{Duration, SystemTime};
use tidelock_protocol::message::RefusalKind;
use tidelock_tls::Files;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Of a host that is refused, or that hears what it cannot believe: somebody has to act first.
const PAUSE_REFUSED_MAX: Duration = Duration::from_secs(30);
/// The end of a connection that stood for this long is said in any case.
const LASTING: Duration = Duration::from_secs(60);
/// A reason that repeats is said again after so long.
const SAID_EVERY: Duration = Duration::from_secs(600);
/// A connection that stood for this long ends a row of failures.
const STEADY: Duration = Duration::from_secs(10);

/// How the link is secured.
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

/// Where and how to connect.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// `host:port` of the backup.
    pub address: String,
    /// How.
    pub security: Security,
    /// Who we are.
    pub hello: Hello,
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

/// Keeps the members connected until every owner loop has gone. An error means that the daemon has
/// to start anew.
pub async fn run<T>(
    endpoint: Endpoint,
    mut members: Vec<Member<T>>,
    mut inbox: Inbox,
    state: watch::Sender<LinkState>,
) -> Result<(), super::member::MemberError> {
    let mut pause = PAUSE_FIRST;
    let mut last = None;
    let mut said: Option<(String, std::time::Instant)> = None;
    loop {
        if !members.is_empty() && members.iter().all(Member::awaits_adoption) {
            let reason = "no group begins before `tidelock adopt`".to_owned();
            state.send_replace(LinkState::Down { reason, retry_at: None });
            if !wait(PAUSE_FIRST, &mut members, &mut inbox).await {
                return Ok(());
            }
            continue;
        }
        let began = std::time::Instant::now();
        state.send_replace(LinkState::Connecting { after: last.clone() });
        let error = match once(&endpoint, &mut members, &mut inbox, &state).await {
            Ok(()) => return Ok(()),
            Err(ConnectionError::Member(error)) if error.ends_run() => {
                let reason = error.to_string();
                state.send_replace(LinkState::Down { reason, retry_at: None });
                return Err(error);
            }
            Err(error) => error,
        };
        for member in &mut members {
            member.disconnected();
            if let ConnectionError::Refused { kind, reason } = &error {
                member.connection_refused(*kind, reason);
            }
        }
        let reason = error.to_string();
        let repeats = error.what_repeats();
        let is_known =
            said.as_ref().is_some_and(|(what, at)| *what == repeats && at.elapsed() <= SAID_EVERY);
        if !is_known || began.elapsed() > LASTING {
            tracing::warn!(
                address = endpoint.address,
                reason,
                "the link to the backup is down; a reason that repeats is said every 10 minutes"
            );
            said = Some((repeats, std::time::Instant::now()));
        }
        last = Some(reason.clone());
        let is_refused = error.is_of_words()
            || matches!(
                error,
                ConnectionError::Refused { kind, .. } if kind != RefusalKind::Stopping
            );
        let pause_max = if is_refused { PAUSE_REFUSED_MAX } else { PAUSE_MAX };
        let was_steady = began.elapsed() > STEADY && !is_refused;
        pause = if was_steady { PAUSE_FIRST } else { (pause * 2).min(pause_max) };
        let pause = jittered(pause);
        let retry_at = Some(mono_now().plus_ms(pause.as_millis() as u64));
        state.send_replace(LinkState::Down { reason, retry_at });
        if !wait(pause, &mut members, &mut inbox).await {
            return Ok(());
        }
    }
}

/// Waits, taking in what the owner loops admit meanwhile. Returns whether any of them is left.
async fn wait<T>(pause: Duration, members: &mut [Member<T>], inbox: &mut Inbox) -> bool {
    let until = tokio::time::Instant::now() + pause;
    // Nothing can be said without a connection.
    let mut nowhere = BytesMut::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(until) => return true,
            message = inbox.recv() => match message {
                None => return false,
                Some((channel, message)) => {
                    let member = members.iter_mut().find(|m| m.channel() == channel);
                    member.expect("channels are given at start").hear_owner(message, &mut nowhere);
                }
            },
        }
    }
}

/// Between half of the pause and all of it, so that hosts do not come back in step.
fn jittered(pause: Duration) -> Duration {
    let noise = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let noise = noise.map_or(0, |d| d.subsec_nanos()) % 1000;
    pause / 2 + pause / 2 * noise / 1000
}

async fn once<T>(
    endpoint: &Endpoint,
    members: &mut [Member<T>],
    inbox: &mut Inbox,
    state: &watch::Sender<LinkState>,
) -> Result<(), ConnectionError> {
    let mut stream = tokio::time::timeout(CONNECT_TIMEOUT, connect(endpoint))
        .await
        .map_err(|_| ConnectionError::Silent(CONNECT_TIMEOUT))??;
    let greeting = connection::greet(&mut stream, &endpoint.hello)
        .await
        .map_err(|error| explained(error, &endpoint.address))?;
    tracing::info!(
        address = endpoint.address,
        server = greeting.server,
        software = greeting.software,
        "connected to the backup"
    );
    state.send_replace(LinkState::Up { server: greeting.server, software: greeting.software });
    connection::serve(stream, members, inbox).await
}

async fn connect(endpoint: &Endpoint) -> Result<Box<dyn Stream>, ConnectionError> {
    let tcp = TcpStream::connect(&endpoint.address).await?;
    tcp.set_nodelay(true)?;
    socket2::SockRef::from(&tcp).set_tcp_notsent_lowat(NOTSENT_LOWAT_BYTES)?;
    let (files, server_name) = match &endpoint.security {
        Security::Plaintext => return Ok(Box::new(tcp)),
        Security::Tls { files, server_name } => (files, server_name),
    };
    let config = files
        .load()
        .and_then(|credentials| credentials.host_config(SystemTime::now()))
        .map_err(io::Error::other)?;
    let tls = TlsConnector::from(config)
        .connect(server_name.clone(), tcp)
        .await
        .map_err(|error| explained(error.into(), &endpoint.address))?;
    Ok(Box::new(tls))
}

/// A failed handshake in words that say what to do.
fn explained(error: ConnectionError, address: &str) -> ConnectionError {
    match &error {
        ConnectionError::Io(io) => match tidelock_tls::explain(io, address) {
            Some(text) => io::Error::new(io.kind(), text).into(),
            None => error,
        },
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    /// A backup that accepts and says nothing, and then goes away.
    #[tokio::test]
    async fn says_what_it_tries_why_it_failed_and_when_it_tries_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint {
            address: listener.local_addr().unwrap().to_string(),
            security: Security::Plaintext,
            hello: Hello { host: "h".to_owned(), software: "s".to_owned() },
        };
        let (owners, inbox) = mpsc::unbounded_channel();
        let (state, mut seen) = watch::channel(LinkState::Connecting { after: None });
        let members: Vec<Member<super::super::port::FromLink>> = Vec::new();
        let link = run(endpoint, members, inbox, state);
        let backup = async {
            let (first, _) = listener.accept().await.unwrap();
            assert_eq!(*seen.borrow_and_update(), LinkState::Connecting { after: None });
            drop(first);
            let down =
                seen.wait_for(|s| matches!(s, LinkState::Down { .. })).await.unwrap().clone();
            let LinkState::Down { reason, retry_at: Some(_) } = down else { panic!("{down:?}") };
            let (second, _) = listener.accept().await.unwrap();
            assert_eq!(*seen.borrow(), LinkState::Connecting { after: Some(reason) });
            drop((owners, second));
        };
        let (ended, ()) = tokio::join!(link, backup);
        ended.unwrap();
    }
}
