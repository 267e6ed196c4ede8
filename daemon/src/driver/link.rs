//! The driver of the link: sockets, TLS and timers for a [`HostLink`], on one thread.

use crate::clock;
use bytes::BytesMut;
use std::io;
use std::pin::Pin;
use std::time::{Duration, SystemTime};
use tidelock_daemon_core::link::connection::{ConnectionError, Hello};
use tidelock_daemon_core::link::host_link::HostLink;
use tidelock_daemon_core::link::member::{Member, MemberError};
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::link::{LinkState, NOTSENT_LOWAT_BYTES};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};

pub use tidelock_dial::Security;
pub(crate) use tidelock_dial::Stream;

/// Bytes that are read at a time.
const READ_BYTES: usize = 64 << 10;
/// Messages of owner loops that are taken at a time.
const BATCH: usize = 256;

/// Messages of the owner loops, with the member's channel.
pub type Inbox = UnboundedReceiver<(Channel, ToLink)>;

/// The backup's address, and the security of the link to it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// `host:port` of the backup.
    pub address: String,
    /// The security of the link.
    pub security: Security,
    /// The names that this host gives.
    pub hello: Hello,
}

/// An attempt to connect.
type Attempt<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + 'a>>;

/// The connection as far as the operating system has it.
#[derive(Default)]
struct Wire<'a> {
    attempt: Option<Attempt<'a>>,
    reader: Option<ReadHalf<Box<dyn Stream>>>,
    writer: Option<WriteHalf<Box<dyn Stream>>>,
    input: BytesMut,
    /// TLS has bytes that the socket has not.
    must_flush: bool,
}

/// Keeps the members connected until every owner loop has gone. An error means that the daemon has
/// to start anew.
pub async fn run<T>(
    endpoint: Endpoint,
    members: Vec<Member<T>>,
    mut inbox: Inbox,
    state: watch::Sender<LinkState>,
) -> Result<(), MemberError> {
    let (address, hello) = (endpoint.address.clone(), endpoint.hello.clone());
    let noise = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let noise = noise.map_or(0, |d| u64::from(d.subsec_nanos()));
    let mut link = HostLink::new(address, hello, members, noise, clock::mono_now());
    let mut wire = Wire::default();
    let mut timer = Timer::new();
    loop {
        if let Some(news) = link.news() {
            state.send_replace(news);
        }
        if link.is_finished() && !wire.must_flush {
            if let Some(writer) = &mut wire.writer {
                // Everything is said: how the connection ends changes nothing.
                let _ = writer.shutdown().await;
            }
            return Ok(());
        }
        if let Err(error) = turn(&endpoint, &mut link, &mut wire, &mut inbox, &mut timer).await {
            wire = Wire::default();
            let ended = link.lost(explained(error, &endpoint.address), clock::mono_now());
            if ended.is_err()
                && let Some(news) = link.news()
            {
                state.send_replace(news);
            }
            ended?;
        }
    }
}

/// Waits for whatever comes next, and tells the link.
async fn turn<'a, T>(
    endpoint: &'a Endpoint,
    link: &mut HostLink<T>,
    wire: &mut Wire<'a>,
    inbox: &mut Inbox,
    timer: &mut Timer,
) -> Result<(), ConnectionError> {
    if link.wants_connection() && wire.attempt.is_none() {
        wire.attempt = Some(Box::pin(connect(endpoint)));
    }
    let Wire { attempt, reader, writer, input, must_flush } = wire;
    let (is_ending, deadline) = (link.is_ending(), link.deadline());
    let out = link.output()?;
    let mut batch = Vec::new();
    tokio::select! {
        made = async { attempt.as_mut().expect("there is one").await }, if attempt.is_some() => {
            *attempt = None;
            let (from_backup, to_backup) = split(made?);
            (*reader, *writer) = (Some(from_backup), Some(to_backup));
            link.connected(clock::mono_now());
        }
        read = read(reader, input), if reader.is_some() => {
            if read? == 0 {
                return Err(ConnectionError::Closed);
            }
            link.received(input, clock::mono_now(), clock::wall_ms())?;
        }
        pushed = push(writer, out, must_flush), if *must_flush || !out.is_empty() => pushed?,
        count = inbox.recv_many(&mut batch, BATCH), if !is_ending => {
            if count == 0 {
                link.owners_gone();
            }
            for (channel, message) in batch {
                link.owner_says(channel, message)?;
            }
        }
        () = timer.until(deadline) => link.tick(clock::mono_now())?,
    }
    Ok(())
}

/// A connection of which the operating system has the other end.
const OPEN: &str = "its half is there as long as the connection";

async fn read(
    reader: &mut Option<ReadHalf<Box<dyn Stream>>>,
    input: &mut BytesMut,
) -> io::Result<usize> {
    input.reserve(READ_BYTES);
    reader.as_mut().expect(OPEN).read_buf(input).await
}

/// Writes some of `out`, or flushes what was written. Loses nothing when it is cancelled.
async fn push(
    writer: &mut Option<WriteHalf<Box<dyn Stream>>>,
    out: &mut BytesMut,
    must_flush: &mut bool,
) -> io::Result<()> {
    tidelock_dial::push(writer.as_mut().expect(OPEN), out, must_flush).await
}

/// A sleep that is set only when the deadline has moved.
struct Timer {
    sleep: Pin<Box<Sleep>>,
    set_for: Option<MonoNanos>,
}

impl Timer {
    fn new() -> Self {
        Self { sleep: Box::pin(sleep(Duration::ZERO)), set_for: None }
    }

    async fn until(&mut self, deadline: MonoNanos) {
        if self.set_for != Some(deadline) {
            let after = Duration::from_nanos(deadline.since_ns(clock::mono_now()));
            self.sleep.as_mut().reset(Instant::now() + after);
            self.set_for = Some(deadline);
        }
        self.sleep.as_mut().await;
        self.set_for = None;
    }
}

/// Connects to the backup.
pub(crate) async fn connect(endpoint: &Endpoint) -> io::Result<Box<dyn Stream>> {
    tidelock_dial::connect(&endpoint.address, &endpoint.security, NOTSENT_LOWAT_BYTES).await
}

/// A failed handshake in words that say what to do.
fn explained(error: ConnectionError, address: &str) -> ConnectionError {
    match error {
        ConnectionError::Io(io) => tidelock_dial::explained(io, address).into(),
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
        let members: Vec<Member<tidelock_daemon_core::link::port::FromLink>> = Vec::new();
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
