//! Stores of this host: for each a thread that ships the logs of the shards that are led here ([`driver`]), and one thread that
//! follows the clock ([`clock`]).

mod clock;
mod driver;

use crate::config::{ClockSource, Config};
use crate::driver::link::Endpoint;
use crate::host::SOFTWARE;
use clock::Clock;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tidelock_shard_agent::{ShardAgent, Status, StoreHost, StoreHostStatus, StoreNames};
use tokio::sync::watch;

/// A clock for which the operator vouches was right before the daemon was there, too. What is left to wait for are commits that
/// were stamped, and not placed, when an agent began.
const ASSUMED_SETTLE: Duration = Duration::from_millis(100);

/// The state of a store at this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoreReport {
    /// The store.
    pub(crate) store: String,
    /// True while the backup is connected.
    pub(crate) is_linked: bool,
    /// Figures of the shards that are led here, by name.
    pub(crate) shards: BTreeMap<String, ShardFigures>,
    /// For programs ([`StoreHostStatus`]).
    pub status: serde_json::Value,
    /// For people.
    pub text: String,
}

/// Figures of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShardFigures {
    /// Its stamps stand still.
    pub stands: bool,
    /// Log that the backup does not have.
    pub lag_bytes: u64,
    /// Age of the oldest commit in it, in microseconds.
    pub lag_us: u64,
    /// The clock may be off by so much; `None`: it is not believed.
    pub epsilon_ns: Option<u64>,
}

impl StoreReport {
    /// True if all shards that are led here are shipped.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        self.is_linked && self.shards.values().all(|of| !of.stands)
    }

    #[cfg(test)]
    pub(crate) fn example() -> Self {
        let figures =
            ShardFigures { stands: false, lag_bytes: 300, lag_us: 2500, epsilon_ns: Some(40_000) };
        Self {
            store: "orders".to_owned(),
            is_linked: true,
            shards: BTreeMap::from([("s0".to_owned(), figures)]),
            status: serde_json::Value::Null,
            text: String::new(),
        }
    }
}

/// The stores of this host, while they run.
#[derive(Debug)]
pub(crate) struct Stores {
    stop: watch::Sender<bool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    statuses: Vec<Arc<Mutex<StoreHostStatus>>>,
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stores {
    /// Starts them.
    ///
    /// # Errors
    /// A password cannot be read, the clock's socket cannot be made, or there is no thread.
    pub(crate) fn start(config: &Config, endpoint: &Endpoint) -> io::Result<Self> {
        let (stop, stopping) = watch::channel(false);
        let mut stores = Self { stop, threads: Mutex::default(), statuses: Vec::new() };
        if config.stores.is_empty() {
            return Ok(stores);
        }
        let bounds = config.stores.iter().map(|store| store.max_clock_error_ns);
        let error_max_ns = bounds.max().unwrap_or(0);
        let (clock, thread) =
            Clock::start(&config.clock, error_max_ns, &config.host.runtime_dir, stopping.clone())?;
        let mut threads = Vec::from_iter(thread);
        for store in &config.stores {
            let begun = driver::Time::begin();
            let mut agents = BTreeMap::new();
            let mut hosts = BTreeMap::new();
            for shard in &store.shards_here {
                let mut agent = shard.agent(store.max_clock_error_ns)?;
                if let ClockSource::Assumed { .. } = config.clock {
                    agent.settle = ASSUMED_SETTLE;
                }
                agents.insert(shard.number, ShardAgent::new(agent, begun.now()));
                hosts.insert(shard.number, shard.servers.clone());
            }
            let names = StoreNames {
                host: config.host.name.to_string(),
                software: SOFTWARE.to_owned(),
                store: store.name.to_string(),
                shards: store.shards.iter().map(ToString::to_string).collect(),
            };
            let host = StoreHost::new(names, agents, begun.now());
            let status = Arc::new(Mutex::new(host.status()));
            stores.statuses.push(Arc::clone(&status));
            let (endpoint, clock) = (endpoint.clone(), clock.clone());
            let mut stopping = stopping.clone();
            let run = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                match runtime {
                    Ok(runtime) => runtime.block_on(async {
                        let driver =
                            driver::Driver::new(host, hosts, endpoint, clock, begun, status);
                        tokio::select! {
                            () = driver.run() => {}
                            _ = stopping.wait_for(|stop| *stop) => {}
                        }
                    }),
                    Err(error) => tracing::error!(%error, "a store has no runtime"),
                }
            };
            let name = format!("store-{}", store.name.as_str());
            threads.push(std::thread::Builder::new().name(name).spawn(run)?);
        }
        *lock(&stores.threads) = threads;
        Ok(stores)
    }

    /// The state of each.
    pub(crate) fn reports(&self) -> Vec<StoreReport> {
        self.statuses.iter().map(|status| report(&lock(status))).collect()
    }

    /// Ends them. What is not at the backup is in the servers' logs, which their slots keep.
    pub(crate) fn stop(&self) {
        self.stop.send_replace(true);
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            if thread.join().is_err() {
                tracing::error!("the thread of a store ended by a fault");
            }
        }
    }
}

impl Drop for Stores {
    fn drop(&mut self) {
        self.stop();
    }
}

fn report(status: &StoreHostStatus) -> StoreReport {
    use std::fmt::Write;
    let mut text = format!("store {}\n", status.store);
    // A string takes everything.
    let _ = match (&status.backup, &status.link_error) {
        (Some(server), _) => writeln!(text, "  backup       {server}"),
        (None, Some(why)) => writeln!(text, "  BACKUP       not connected: {why}"),
        (None, None) => writeln!(text, "  backup       connecting"),
    };
    for (name, shard) in &status.shards {
        let _ = writeln!(text, "  shard        {name}");
        let _ = match &shard.stands {
            Some(stand) => writeln!(text, "    STANDS     {}", stand.text),
            None => writeln!(
                text,
                "    lag        {} bytes, {:.1} ms",
                shard.lag_bytes,
                shard.lag_us as f64 / 1e3
            ),
        };
        let epsilon =
            shard.epsilon_ns.map(|ns| format!("believed, off by {} us at most", ns.div_ceil(1000)));
        let _ = writeln!(text, "    clock      {}", epsilon.as_deref().unwrap_or("not believed"));
        for failure in shard.failures.iter().flatten() {
            let _ = writeln!(text, "    SERVER     {}. {}", failure.text, failure.advice);
        }
    }
    let figures = |of: &Status| ShardFigures {
        stands: of.stands.is_some(),
        lag_bytes: of.lag_bytes,
        lag_us: of.lag_us,
        epsilon_ns: of.epsilon_ns,
    };
    StoreReport {
        store: status.store.clone(),
        is_linked: status.backup.is_some(),
        shards: status.shards.iter().map(|(name, of)| (name.clone(), figures(of))).collect(),
        status: serde_json::to_value(status).unwrap_or_default(),
        text,
    }
}
