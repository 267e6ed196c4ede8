//! The driver of a [`Shipper`]: a thread with the link's socket.

use crate::clock::wall_ns;
use crate::shipper::{Names, Pace, ShardLog, Shipper, ShipperStatus};
use std::collections::BTreeMap;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tidelock_dial::{Security, Stream};
use tidelock_protocol::ids::MonoNanos;
use tidelock_shard::LogPoint;
use tokio::io::{AsyncReadExt, split};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// The kernel takes no more ahead of the network.
const NOTSENT_LOWAT_BYTES: u32 = 256 << 10;
/// The time to reach the backup.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The longest sleep.
const REST_MAX: Duration = Duration::from_secs(10);

/// The backup server of the store.
#[derive(Clone, Debug)]
pub struct Backup {
    /// `host:port`.
    pub address: String,
    /// The security of the link.
    pub security: Security,
}

/// A shard's log, and the end of what is committed in it.
type Led = (Box<dyn ShardLog>, LogPoint);

/// News for the thread.
#[derive(Default)]
struct News {
    /// By shard the end of what is committed: the newest counts.
    committed: BTreeMap<u16, LogPoint>,
    /// Shards that this host leads from now on, or no more.
    led: Vec<(u16, Option<Led>)>,
    /// Callers that wait for the status.
    asked: Vec<mpsc::Sender<ShipperStatus>>,
    stops: bool,
}

#[derive(Default)]
struct Shared {
    news: Mutex<News>,
    there_is_news: Notify,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A store's shipping to its backup: a thread, until this is dropped.
#[derive(Debug)]
pub struct Shipping {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A shard that this host leads.
#[derive(Clone, Debug)]
pub struct ShardHandle {
    shared: Arc<Shared>,
    number: u16,
}

impl Shipping {
    /// Starts the thread. No shard is led here yet.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(names: Names, backup: Backup, pace: Pace) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let name = format!("ship-{}", names.store);
        let of = Arc::clone(&shared);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let run = move || {
            let begun = Instant::now();
            let shipper = Shipper::new(names, pace, mono(begun));
            runtime.block_on(Driver { shipper, backup, shared: of, begun }.run());
        };
        let thread = Some(std::thread::Builder::new().name(name).spawn(run)?);
        Ok(Self { shared, thread })
    }

    /// This host leads a shard from now on. `committed`: the end of what is committed, and the effective stamp there.
    #[must_use]
    pub fn lead(&self, shard: u16, log: Box<dyn ShardLog>, committed: LogPoint) -> ShardHandle {
        lock(&self.shared.news).led.push((shard, Some((log, committed))));
        self.shared.there_is_news.notify_one();
        ShardHandle { shared: Arc::clone(&self.shared), number: shard }
    }

    /// State for operators.
    #[must_use]
    pub fn status(&self) -> ShipperStatus {
        let (asked, answer) = mpsc::channel();
        lock(&self.shared.news).asked.push(asked);
        self.shared.there_is_news.notify_one();
        // Only a thread that has ended by a fault does not answer.
        answer.recv().unwrap_or_default()
    }
}

impl Drop for Shipping {
    fn drop(&mut self) {
        lock(&self.shared.news).stops = true;
        self.shared.there_is_news.notify_one();
        if let Some(thread) = self.thread.take() {
            // A fault of the thread was told by its own panic.
            let _ = thread.join();
        }
    }
}

impl ShardHandle {
    /// Entries up to there are committed, and that is the effective stamp there. What is committed is on as many replicas as it takes to
    /// keep it, whoever leads next.
    pub fn committed(&self, at: LogPoint) {
        let is_first = {
            let mut news = lock(&self.shared.news);
            let is_first = news.committed.is_empty();
            let point = news.committed.entry(self.number).or_insert(at);
            *point = if at.index > point.index { at } else { *point };
            is_first
        };
        if is_first {
            self.shared.there_is_news.notify_one();
        }
    }

    /// This host leads the shard no more.
    pub fn resign(self) {
        lock(&self.shared.news).led.push((self.number, None));
        self.shared.there_is_news.notify_one();
    }
}

fn mono(begun: Instant) -> MonoNanos {
    MonoNanos(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

struct Driver {
    shipper: Shipper,
    backup: Backup,
    shared: Arc<Shared>,
    begun: Instant,
}

/// End of an attempt, or of a connection.
enum End {
    /// It is time to stop.
    Stop,
    /// The network, or the backup.
    Lost(io::Error),
    /// The shipper has given the link up, and knows why.
    GivenUp,
}

/// Event of a connection.
enum Event {
    Read(usize),
    Wrote,
    Other,
}

async fn dial(backup: Backup) -> io::Result<Box<dyn Stream>> {
    let open = tidelock_dial::connect(&backup.address, &backup.security, NOTSENT_LOWAT_BYTES);
    let opened = timeout(CONNECT_MAX, open).await;
    opened.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer")))
}

impl Driver {
    async fn run(mut self) {
        loop {
            match self.session().await {
                End::Stop => return,
                End::GivenUp => {}
                End::Lost(error) => {
                    let error = tidelock_dial::explained(error, &self.backup.address);
                    self.shipper.link_lost(error.to_string(), mono(self.begun));
                }
            }
        }
    }

    /// False: it is time to stop.
    fn take_news(&mut self) -> bool {
        let News { committed, led, asked, stops } = std::mem::take(&mut *lock(&self.shared.news));
        let now = mono(self.begun);
        for (shard, log) in led {
            match log {
                Some((log, at)) => self.shipper.lead(shard, log, at, now),
                None => self.shipper.resign(shard),
            }
        }
        for (shard, at) in committed {
            self.shipper.committed(shard, at, now);
        }
        self.shipper.tick(now);
        for asked in asked {
            let _ = asked.send(self.shipper.status());
        }
        !stops
    }

    fn rest(&self) -> Duration {
        let now = mono(self.begun);
        let rest = self.shipper.deadline().map(|at| Duration::from_nanos(at.since_ns(now)));
        rest.unwrap_or(REST_MAX).min(REST_MAX)
    }

    /// One connection, from the wait for an attempt to its end.
    async fn session(&mut self) -> End {
        let shared = Arc::clone(&self.shared);
        let news = || shared.there_is_news.notified();
        while !self.shipper.wants_link(mono(self.begun)) {
            if !self.take_news() {
                return End::Stop;
            }
            // Nobody waits for the result: there is news, or it is time.
            let _ = timeout(self.rest(), news()).await;
        }
        let mut dial = pin!(dial(self.backup.clone()));
        let stream = loop {
            if !self.take_news() {
                return End::Stop;
            }
            tokio::select! {
                made = &mut dial => match made {
                    Ok(stream) => break stream,
                    Err(error) => return End::Lost(error),
                },
                () = news() => {}
            }
        };
        self.shipper.linked(mono(self.begun));
        let (mut reader, mut writer) = split(stream);
        let mut must_flush = false;
        loop {
            if !self.take_news() {
                return End::Stop;
            }
            let rest = self.rest();
            let Some(link) = self.shipper.link() else { return End::GivenUp };
            let (input, output) = link.buffers();
            let is_writing = must_flush || !output.is_empty();
            let event = tokio::select! {
                read = reader.read_buf(input) => read.map(Event::Read),
                wrote = tidelock_dial::push(&mut writer, output, &mut must_flush), if is_writing => wrote.map(|()| Event::Wrote),
                () = news() => Ok(Event::Other),
                () = sleep(rest) => Ok(Event::Other),
            };
            let now = mono(self.begun);
            match event {
                Ok(Event::Read(0)) => {
                    let closed = "the backup has closed the connection";
                    return End::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, closed));
                }
                Ok(Event::Read(_)) => self.shipper.link_received(wall_ns(), now),
                Ok(Event::Wrote) => self.shipper.link_wrote(now),
                Ok(Event::Other) => {}
                Err(error) => return End::Lost(error),
            }
        }
    }
}
