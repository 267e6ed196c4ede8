//! The driver of a store: sockets and time for a [`StoreHost`], on one thread. Each socket has a task that reads when it is
//! permitted to, and writes what it is given.

use super::clock::Clock;
use crate::driver::link::{self, Endpoint, Stream};
use bytes::{Bytes, BytesMut};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tidelock_pgstream::Now;
use tidelock_shard::host::HostEnd;
use tidelock_shard_agent::{Conn, StoreAction, StoreHost, StoreHostStatus};
use tidelock_wal::PgTimestamp;
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The most that one read brings.
const READ_BYTES: usize = 64 << 10;
/// The clock is looked at so often, if nothing else happens.
const VERDICT_EVERY: Duration = Duration::from_millis(100);
/// The status is kept so often.
const STATUS_EVERY: Duration = Duration::from_millis(100);
/// The time to reach a server.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Time since the store began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Time(Instant);

impl Time {
    pub(super) fn begin() -> Self {
        Self(Instant::now())
    }

    pub(super) fn now(self) -> Now {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let wall = PgTimestamp::from_unix_ns(i64::try_from(wall.as_nanos()).unwrap_or(i64::MAX));
        Now { mono: self.0.elapsed(), wall }
    }
}

/// Purpose of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Link,
    Server(u16, Conn),
    Tunnel(u32),
}

/// News of a socket, by its number: of one that was given up there may be late ones.
enum Input {
    Connected(u64),
    Read(u64, Bytes),
    Wrote(u64, usize),
    Closed(u64, String),
}

struct Socket {
    place: Place,
    permits: mpsc::UnboundedSender<usize>,
    writes: mpsc::UnboundedSender<Bytes>,
    task: JoinHandle<()>,
    is_connected: bool,
    is_reading: bool,
    is_writing: bool,
}

pub(super) struct Driver {
    store: StoreHost,
    /// Addresses of each shard's servers.
    servers: BTreeMap<u16, Vec<String>>,
    endpoint: Endpoint,
    clock: Clock,
    time: Time,
    status: Arc<Mutex<StoreHostStatus>>,
    sockets: BTreeMap<u64, Socket>,
    places: BTreeMap<Place, u64>,
    next: u64,
    input: mpsc::UnboundedSender<Input>,
    inputs: mpsc::UnboundedReceiver<Input>,
}

type Opened = Box<dyn Stream>;

async fn open_server(address: String) -> io::Result<Opened> {
    let open = async {
        if address.starts_with('/') {
            return Ok(Box::new(UnixStream::connect(&address).await?) as Opened);
        }
        let tcp = TcpStream::connect(&address).await?;
        tcp.set_nodelay(true)?;
        Ok(Box::new(tcp) as Opened)
    };
    let opened = tokio::time::timeout(CONNECT_MAX, open).await;
    opened.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer")))
}

/// Reads and writes until the socket ends, or its driver gives it up.
async fn serve(
    number: u64,
    stream: Opened,
    mut permits: mpsc::UnboundedReceiver<usize>,
    mut writes: mpsc::UnboundedReceiver<Bytes>,
    input: mpsc::UnboundedSender<Input>,
) {
    let (mut reader, mut writer) = split(stream);
    let reading = async {
        while let Some(most) = permits.recv().await {
            let mut bytes = BytesMut::with_capacity(most.min(READ_BYTES));
            match (&mut reader).take(most as u64).read_buf(&mut bytes).await {
                Ok(0) => return "the peer has closed the connection".to_owned(),
                Ok(_) => drop(input.send(Input::Read(number, bytes.freeze()))),
                Err(error) => return error.to_string(),
            }
        }
        std::future::pending().await
    };
    let writing = async {
        while let Some(bytes) = writes.recv().await {
            let wrote = async {
                writer.write_all(&bytes).await?;
                writer.flush().await
            };
            if let Err(error) = wrote.await {
                return error.to_string();
            }
            let _ = input.send(Input::Wrote(number, bytes.len()));
        }
        // Given up: what was to be written is.
        let _ = writer.shutdown().await;
        String::new()
    };
    let why = tokio::select! {
        why = reading => why,
        why = writing => why,
    };
    let _ = input.send(Input::Closed(number, why));
}

impl Driver {
    pub(super) fn new(
        store: StoreHost,
        servers: BTreeMap<u16, Vec<String>>,
        endpoint: Endpoint,
        clock: Clock,
        time: Time,
        status: Arc<Mutex<StoreHostStatus>>,
    ) -> Self {
        let (input, inputs) = mpsc::unbounded_channel();
        let (sockets, places) = (BTreeMap::new(), BTreeMap::new());
        Self {
            store,
            servers,
            endpoint,
            clock,
            time,
            status,
            sockets,
            places,
            next: 0,
            input,
            inputs,
        }
    }

    pub(super) async fn run(mut self) {
        let mut kept = Instant::now();
        loop {
            self.act();
            if kept.elapsed() >= STATUS_EVERY {
                kept = Instant::now();
                *self.status.lock().unwrap_or_else(PoisonError::into_inner) = self.store.status();
            }
            let now = self.time.now().mono;
            let wait = self.store.deadline().map_or(VERDICT_EVERY, |at| at.saturating_sub(now));
            let first = tokio::time::timeout(wait.min(VERDICT_EVERY), self.inputs.recv()).await;
            // No log is taken under an old verdict.
            self.store.tick(self.clock.verdict(), self.time.now());
            if let Ok(Some(input)) = first {
                self.take(input);
            }
            while let Ok(input) = self.inputs.try_recv() {
                self.take(input);
            }
        }
    }

    /// Carries out what the store wants, writes what there is, and permits reads.
    fn act(&mut self) {
        while let Some(action) = self.store.poll() {
            self.carry_out(action);
        }
        for (place, number) in &self.places {
            let Some(socket) = self.sockets.get_mut(number).filter(|of| of.is_connected) else {
                continue;
            };
            let output = match *place {
                // Bytes that wait stay with the link, which bounds them.
                Place::Link if socket.is_writing => None,
                Place::Link => self.store.link().map(HostEnd::output),
                Place::Server(shard, conn) => {
                    self.store.agent(shard).and_then(|agent| agent.output(conn))
                }
                // Written when it comes.
                Place::Tunnel(_) => None,
            };
            if let Some(output) = output.filter(|output| !output.is_empty()) {
                socket.is_writing = socket.writes.send(output.split().freeze()).is_ok();
            }
            let most = match *place {
                Place::Link => READ_BYTES,
                Place::Server(shard, conn) => {
                    let wants = self.store.agent(shard).is_some_and(|agent| agent.wants(conn));
                    if wants { READ_BYTES } else { 0 }
                }
                Place::Tunnel(tunnel) => self.store.tunnel_room(tunnel),
            };
            if most > 0 && !socket.is_reading {
                socket.is_reading = socket.permits.send(most).is_ok();
            }
        }
    }

    fn carry_out(&mut self, action: StoreAction) {
        match action {
            StoreAction::Link => {
                let endpoint = self.endpoint.clone();
                let open = async move { link::connect(&endpoint).await };
                self.open(Place::Link, open);
            }
            StoreAction::Unlink => self.give_up(Place::Link),
            StoreAction::Connect { shard, conn, host } => match self.address(shard, host) {
                Some(address) => self.open(Place::Server(shard, conn), open_server(address)),
                None => tracing::error!(shard, host, "a shard has no such server"),
            },
            StoreAction::Disconnect { shard, conn } => {
                let place = Place::Server(shard, conn);
                self.give_up(place);
            }
            StoreAction::Failed { shard, host, failure, advice } => {
                let server = self.address(shard, host).unwrap_or_default();
                tracing::warn!(shard, server, %failure, advice, "a server of a shard has failed");
            }
            StoreAction::OpenTunnel { shard, host, tunnel } => match self.address(shard, host) {
                Some(address) => self.open(Place::Tunnel(tunnel), open_server(address)),
                None => {
                    self.store.tunnel_closed(tunnel, Some("there is no such server".to_owned()))
                }
            },
            StoreAction::TunnelData { tunnel, data } => {
                let socket =
                    self.places.get(&Place::Tunnel(tunnel)).and_then(|at| self.sockets.get(at));
                if let Some(socket) = socket {
                    let _ = socket.writes.send(data);
                }
            }
            StoreAction::CloseTunnel { tunnel } => self.give_up(Place::Tunnel(tunnel)),
        }
    }

    fn address(&self, shard: u16, host: usize) -> Option<String> {
        self.servers.get(&shard)?.get(host).cloned()
    }

    fn open(
        &mut self,
        place: Place,
        open: impl Future<Output = io::Result<Opened>> + Send + 'static,
    ) {
        self.give_up(place);
        self.next += 1;
        let number = self.next;
        let (permits, permitted) = mpsc::unbounded_channel();
        let (writes, written) = mpsc::unbounded_channel();
        let input = self.input.clone();
        let task = tokio::spawn(async move {
            match open.await {
                Ok(stream) => {
                    let _ = input.send(Input::Connected(number));
                    serve(number, stream, permitted, written, input).await;
                }
                Err(error) => drop(input.send(Input::Closed(number, error.to_string()))),
            }
        });
        let socket = Socket {
            place,
            permits,
            writes,
            task,
            is_connected: false,
            is_reading: false,
            is_writing: false,
        };
        self.sockets.insert(number, socket);
        self.places.insert(place, number);
    }

    /// Gives a socket up. Bytes that it was given are still written, if it is connected.
    fn give_up(&mut self, place: Place) {
        let Some(number) = self.places.remove(&place) else { return };
        let Some(mut socket) = self.sockets.remove(&number) else { return };
        if let Place::Server(shard, conn) = place
            && let Some(agent) = self.store.agent(shard)
            && let Some(output) = agent.output(conn)
        {
            let _ = socket.writes.send(output.split().freeze());
        }
        if !std::mem::take(&mut socket.is_connected) {
            socket.task.abort();
        }
    }

    fn take(&mut self, input: Input) {
        let now = self.time.now();
        match input {
            Input::Connected(number) => {
                let Some(socket) = self.sockets.get_mut(&number) else { return };
                socket.is_connected = true;
                match socket.place {
                    Place::Link => self.store.linked(now),
                    Place::Server(shard, conn) => self.store.connected(shard, conn, now),
                    Place::Tunnel(_) => {}
                }
            }
            Input::Read(number, bytes) => {
                let Some(socket) = self.sockets.get_mut(&number) else { return };
                socket.is_reading = false;
                match socket.place {
                    Place::Link => {
                        if let Some(link) = self.store.link() {
                            link.input().extend_from_slice(&bytes);
                            self.store.link_received(now);
                        }
                    }
                    Place::Server(shard, conn) => self.store.received(shard, conn, &bytes, now),
                    Place::Tunnel(tunnel) => self.store.tunnel_read(tunnel, bytes),
                }
            }
            Input::Wrote(number, bytes) => {
                let Some(socket) = self.sockets.get_mut(&number) else { return };
                socket.is_writing = false;
                if let Place::Tunnel(tunnel) = socket.place {
                    self.store.tunnel_wrote(tunnel, bytes);
                }
            }
            Input::Closed(number, why) => {
                let Some(socket) = self.sockets.remove(&number) else { return };
                self.places.remove(&socket.place);
                match socket.place {
                    Place::Link => self.store.link_lost(why, now),
                    Place::Server(shard, conn) if socket.is_connected => {
                        self.store.closed(shard, conn, now);
                    }
                    Place::Server(shard, conn) => self.store.unreachable(shard, conn, &why, now),
                    Place::Tunnel(tunnel) => {
                        let reason = (!socket.is_connected).then_some(why);
                        self.store.tunnel_closed(tunnel, reason);
                    }
                }
            }
        }
    }
}
