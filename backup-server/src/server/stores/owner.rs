//! The thread of a store: frames in, replies out, and a sync beside it. What arrives while a sync runs forms the next batch.

use super::Event;
use super::left_out::Beyond;
use super::outbox::Outbox;
use super::standbys::StoreStandbys;
use super::tunnels::Tunnels;
use crate::server::clock;
use crate::server::peer_log::peer_log;
use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tidelock_protocol::message::RefusalKind;
use tidelock_replica::group::GroupOptions;
use tidelock_shard::LogIndex;
use tidelock_shard_logs::{Limits, Link, Output, Refusal, Store, StoreError, StoreStatus};
use tidelock_storage::files::Files;
use tidelock_store::journal::{Durable, JournalError};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle as Task;
use tokio::time::sleep;

/// Time between two attempts to write to a full disk.
const FULL_RETRY: Duration = Duration::from_millis(200);
/// Time between two attempts to open a store that does not work.
const OPEN_RETRY: Duration = Duration::from_secs(5);

type Synced = Result<Durable, JournalError>;
type Recovered = oneshot::Sender<Result<StoreStatus, String>>;

/// A store to be served.
pub(super) struct Of {
    pub name: String,
    pub dir: PathBuf,
    pub options: GroupOptions,
    /// False: every shard is applied as far as its own log is durable.
    pub has_watermark: bool,
    pub standbys: Option<StoreStandbys>,
}

/// Starts the thread.
pub(super) fn spawn(of: Of, inbox: mpsc::Receiver<Event>) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let thread = std::thread::Builder::new().name(format!("store-{}", of.name));
    let owner = Owner {
        asked: of.standbys.as_ref().map(StoreStandbys::asked).unwrap_or_default(),
        of,
        state: State::None,
        outboxes: BTreeMap::new(),
        sync: None,
        is_full: false,
        recovering: Vec::new(),
        tunnels: Tunnels::default(),
        unneeded: BTreeMap::new(),
    };
    thread.spawn(move || runtime.block_on(owner.run(inbox)))
}

enum State {
    /// No host has shipped anything yet.
    None,
    Open(Box<Store<Files>>),
    /// Reason why the store cannot be opened, or could not go on.
    Broken(String),
}

struct Owner {
    of: Of,
    state: State,
    outboxes: BTreeMap<Link, Arc<Outbox>>,
    sync: Option<Task<Synced>>,
    /// The disk had no room at the last attempt.
    is_full: bool,
    recovering: Vec<Recovered>,
    /// A standby needs a reader of the journal.
    asked: Arc<Notify>,
    tunnels: Tunnels,
    /// Ends of the logs that standbys and kept copies do not need any more, by shard.
    unneeded: BTreeMap<u16, LogIndex>,
}

/// The end of a sync, once there is one.
async fn ended(sync: &mut Option<Task<Synced>>) -> Synced {
    let Some(task) = sync else { return pending().await };
    let end = task.await;
    *sync = None;
    match end {
        Ok(end) => end,
        Err(fault) => std::panic::resume_unwind(fault.into_panic()),
    }
}

impl Owner {
    async fn run(mut self, mut inbox: mpsc::Receiver<Event>) {
        self.open();
        // Standbys are known from the start on.
        self.turn();
        loop {
            let retry = match &self.state {
                State::Broken(_) => Some(OPEN_RETRY),
                State::Open(_) if self.is_full => Some(FULL_RETRY),
                _ => None,
            };
            let mut again = false;
            let mut stops = false;
            tokio::select! {
                event = inbox.recv() => match event {
                    None | Some(Event::Stop) => stops = true,
                    Some(event) => self.handle(event),
                },
                end = ended(&mut self.sync) => self.synced(end),
                () = self.asked.notified() => {}
                () = async { sleep(retry.unwrap_or_default()).await }, if retry.is_some() => again = true,
            }
            // Everything that has arrived goes into one batch.
            while let Ok(event) = inbox.try_recv() {
                match event {
                    Event::Stop => stops = true,
                    event => self.handle(event),
                }
            }
            if again && matches!(self.state, State::Broken(_)) {
                self.open();
            }
            self.turn();
            if stops {
                return self.stop().await;
            }
        }
    }

    fn files(&self) -> Files {
        Files::new(self.of.dir.clone())
    }

    fn open(&mut self) {
        let (journal, bound) = (self.of.options.journal, self.of.options.clock_bound_ms);
        self.state = match Store::open(self.files(), journal, Limits::default(), bound) {
            Ok(None) => State::None,
            Ok(Some((store, torn))) => {
                if let Some(torn) = torn {
                    tracing::warn!(
                        store = self.of.name,
                        segment = torn.file,
                        offset = torn.offset,
                        bytes = torn.len_bytes,
                        "the last write was not finished when the server stopped; nothing of it was acknowledged, and it \
                         is cut off"
                    );
                }
                tracing::info!(store = self.of.name, shards = store.log().shards(), "opened");
                self.opened(store)
            }
            Err(error) => {
                let reason = error.to_string();
                tracing::error!(store = self.of.name, reason, "the store does not work");
                State::Broken(reason)
            }
        };
    }

    fn opened(&self, mut store: Store<Files>) -> State {
        if !self.of.has_watermark {
            tracing::warn!(
                store = self.of.name,
                "`watermark = \"off\"`: no cut is consistent, and a recovery loses what clients were told in any order"
            );
            store.ignore_watermark();
        }
        State::Open(Box::new(store))
    }

    /// The store cannot go on: hosts come again, and it is opened again.
    fn breaks(&mut self, error: &StoreError) {
        let reason = error.to_string();
        tracing::error!(store = self.of.name, reason, "the store does not work");
        self.tunnels = Tunnels::default();
        for outbox in std::mem::take(&mut self.outboxes).into_values() {
            outbox.end((RefusalKind::Damaged, format!("store {}: {reason}", self.of.name)));
        }
        for done in self.recovering.drain(..) {
            let _ = done.send(Err(reason.clone()));
        }
        self.state = State::Broken(reason);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Connected { link, host, shards, outbox, done } => {
                let _ = done.send(self.connected(link, &host, &shards, outbox));
            }
            Event::Frames { link, frames } => {
                if let State::Open(store) = &mut self.state {
                    let now_ms = clock::now().unix_ms;
                    frames.into_iter().for_each(|frame| store.received(link, frame, now_ms));
                }
            }
            Event::Lost(link) => {
                self.outboxes.remove(&link);
                if let State::Open(store) = &mut self.state {
                    store.lost(link);
                }
            }
            Event::Status { done } => {
                let _ = done.send(match &self.state {
                    State::None => Ok(None),
                    State::Open(store) => Ok(Some(store.status())),
                    State::Broken(reason) => Err(reason.clone()),
                });
            }
            Event::Recover { recovery, done } => match &mut self.state {
                State::Open(store) if store.log().final_watermark().is_some() => {
                    let _ = done.send(Ok(store.status()));
                }
                State::Open(store) => {
                    tracing::warn!(store = self.of.name, "recovered by the operator");
                    store.recover(recovery);
                    self.recovering.push(done);
                }
                State::None => {
                    let _ = done.send(Err("no host has shipped anything yet".to_owned()));
                }
                State::Broken(reason) => {
                    let _ = done.send(Err(reason.clone()));
                }
            },
            Event::Search { stamp, done } => {
                let search = match &self.state {
                    State::Open(store) => store.log().search(stamp).map_err(|e| e.to_string()),
                    State::None => Err("no host has shipped anything yet".to_owned()),
                    State::Broken(reason) => Err(reason.clone()),
                };
                let _ = done.send(search);
            }
            Event::Beyond { done } => {
                let State::Open(store) = &self.state else { return drop(done.send(Vec::new())) };
                let _ = done.send(Beyond::all(store));
            }
            Event::Tunnel(ask) => {
                if let State::Open(store) = &mut self.state {
                    self.tunnels.ask(store, ask);
                }
            }
            Event::Unneeded { shard, up_to } => self.forget(shard, up_to),
            Event::Stop => {}
        }
    }

    fn connected(
        &mut self,
        link: Link,
        host: &str,
        shards: &[String],
        outbox: Arc<Outbox>,
    ) -> Result<(), Refusal> {
        if let State::None = self.state {
            let (journal, bound) = (self.of.options.journal, self.of.options.clock_bound_ms);
            let limits = Limits::default();
            let made = std::fs::create_dir_all(&self.of.dir)
                .map_err(|error| error.to_string())
                .and_then(|()| {
                    Store::create(self.files(), &self.of.name, shards, journal, limits, bound)
                        .map_err(|error| error.to_string())
                });
            let store = made.map_err(|reason| {
                (RefusalKind::Stopping, format!("store {} cannot be made: {reason}", self.of.name))
            })?;
            tracing::info!(store = self.of.name, host, shards = shards.len(), "made");
            self.state = self.opened(store);
        }
        match &mut self.state {
            State::Open(store) => {
                store.connected(link, host, shards)?;
                self.outboxes.insert(link, outbox);
                Ok(())
            }
            State::Broken(reason) => {
                Err((RefusalKind::Damaged, format!("store {}: {reason}", self.of.name)))
            }
            State::None => Err((RefusalKind::Stopping, "the store is not there".to_owned())),
        }
    }

    /// Nobody here needs a shard's log up to there any more.
    fn forget(&mut self, shard: u16, up_to: LogIndex) {
        let State::Open(store) = &mut self.state else { return };
        self.unneeded.insert(shard, up_to);
        // The log of a shard that has said nothing is needed as a whole.
        let of = |shard| self.unneeded.get(&shard).copied().unwrap_or_default();
        let unneeded: Vec<_> = (0..store.log().shards()).map(of).collect();
        if let Err(error) = store.forget(&unneeded) {
            self.breaks(&error);
        }
    }

    fn synced(&mut self, end: Synced) {
        if let State::Open(store) = &mut self.state
            && let Err(error) = store.synced(end)
        {
            self.breaks(&error);
        }
    }

    /// Writes what was taken, begins a sync, and sends what there is to say.
    fn turn(&mut self) {
        let State::Open(store) = &mut self.state else { return };
        let written = store.write();
        self.is_full = matches!(&written, Err(StoreError::Journal(JournalError::Full { .. })));
        if let Err(error) = written.as_ref()
            && !self.is_full
        {
            return self.breaks(error);
        }
        if self.sync.is_none() {
            self.sync = store.sync_job().map(|job| tokio::task::spawn_blocking(move || job.run()));
        }
        if let Some(standbys) = &self.of.standbys {
            standbys.tend(store);
        }
        for output in store.take_outputs() {
            match output {
                Output::Send { link, channel, message } => {
                    if let Some(outbox) = self.outboxes.get(&link) {
                        outbox.send(channel, message);
                    }
                }
                Output::End { link, why } => {
                    peer_log!(HOSTS, warn, store = self.of.name, kind = ?why.0, reason = why.1, "refused");
                    if let Some(outbox) = self.outboxes.remove(&link) {
                        outbox.end(why);
                    }
                }
                Output::Final(watermark) => {
                    tracing::warn!(store = self.of.name, %watermark, "recovered: all logs are closed");
                    for done in self.recovering.drain(..) {
                        let _ = done.send(Ok(store.status()));
                    }
                }
                Output::Tunnel(id, event) => self.tunnels.heard(store, id, event),
                Output::Advanced(_) => {}
            }
        }
    }

    /// Makes durable what was taken, and tells the hosts.
    async fn stop(mut self) {
        if let Some(standbys) = &self.of.standbys {
            standbys.stop();
        }
        while self.sync.is_some() {
            let end = ended(&mut self.sync).await;
            self.synced(end);
            self.turn();
        }
        for outbox in self.outboxes.into_values() {
            outbox.end((RefusalKind::Stopping, "the backup server is stopping".to_owned()));
        }
    }
}
