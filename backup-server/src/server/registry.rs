//! The groups by name, and the lock that keeps a second server off the data directory.

use super::config::Config;
use super::inbox::Event;
use super::owner::{self, OwnerHandle};
use crate::names;
use crate::storage::reserve::Reserve;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use thiserror::Error;

/// The most groups of one server: each has a thread.
const GROUPS_MAX: usize = 1024;

/// The groups.
#[derive(Debug)]
pub struct Registry {
    config: Config,
    state: Mutex<State>,
    reserve: Arc<Reserve>,
    /// Held while this is there.
    _lock: File,
}

#[derive(Debug, Default)]
struct State {
    groups: BTreeMap<String, (OwnerHandle, JoinHandle<()>)>,
    stopped: bool,
}

/// Why the data directory cannot be used.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// It cannot be opened.
    #[error("cannot use the data directory {path}")]
    DataDir {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody else uses it.
    #[error("another tidelock-backup uses the data directory {path}")]
    InUse {
        /// Where.
        path: PathBuf,
    },
}

impl Registry {
    /// Locks the data directory and starts the owner of each group in it.
    pub fn open(config: Config) -> Result<Self, RegistryError> {
        let path = config.data_dir.clone();
        let wrong = |source| RegistryError::DataDir { path: path.clone(), source };
        let groups_dir = path.join("groups");
        fs::create_dir_all(&groups_dir).map_err(wrong)?;
        File::open(&path).and_then(|dir| dir.sync_all()).map_err(wrong)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join("lock"))
            .map_err(wrong)?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(RegistryError::InUse { path }),
            locked => locked.map_err(|e| wrong(e.into()))?,
        }
        let reserve = Reserve::open(&path, config.reserve_bytes()).map_err(wrong)?;
        let reserve = Arc::new(reserve);
        let registry = Self { config, state: Mutex::default(), reserve, _lock: lock };
        for entry in fs::read_dir(&groups_dir).map_err(wrong)? {
            let Ok(name) = entry.map_err(wrong)?.file_name().into_string() else { continue };
            if groups_dir.join(&name).join("group.json").exists() {
                registry.get_or_spawn(&name).map_err(wrong)?;
            }
        }
        Ok(registry)
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The owner of a group, if it runs.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<OwnerHandle> {
        let state = self.lock();
        state.groups.get(name).map(|(h, _)| h.clone()).filter(|h| !h.inbox.is_closed())
    }

    /// All owners.
    #[must_use]
    pub fn all(&self) -> Vec<OwnerHandle> {
        let state = self.lock();
        let handles = state.groups.values().map(|(handle, _)| handle.clone());
        handles.filter(|h| !h.inbox.is_closed()).collect()
    }

    /// The owner of a group, which an attachment may create.
    pub fn get_or_spawn(&self, name: &str) -> io::Result<OwnerHandle> {
        if !names::is_valid(name) {
            return Err(io::Error::other("not a group's name"));
        }
        let mut state = self.lock();
        if state.stopped {
            return Err(io::Error::other("the backup server is stopping"));
        }
        state.groups.retain(|_, (handle, _)| !handle.inbox.is_closed());
        if let Some((handle, _)) = state.groups.get(name) {
            return Ok(handle.clone());
        }
        if state.groups.len() >= GROUPS_MAX {
            return Err(io::Error::other(format!("there are {GROUPS_MAX} groups already")));
        }
        let dir = self.config.data_dir.join("groups").join(name);
        let options = self.config.options(name);
        let (snapshots, input) = (&self.config.snapshots_dir, self.config.input_max_bytes);
        let reserve = Arc::clone(&self.reserve);
        let (handle, thread) = owner::spawn(name, &dir, snapshots, options, input, reserve)?;
        state.groups.insert(name.to_owned(), (handle.clone(), thread));
        Ok(handle)
    }

    /// The owner of a group that is in the data directory, also if it was put there just now.
    pub fn adopt(&self, name: &str) -> io::Result<OwnerHandle> {
        let is_there =
            || self.config.data_dir.join("groups").join(name).join("group.json").exists();
        if !names::is_valid(name) || !is_there() {
            return Err(io::Error::other(format!("there is no group {name}")));
        }
        self.get_or_spawn(name)
    }

    /// Stops all owners and waits until what they have is durable.
    pub fn stop(&self) {
        let groups = {
            let mut state = self.lock();
            state.stopped = true;
            std::mem::take(&mut state.groups)
        };
        for (handle, _) in groups.values() {
            handle.inbox.push(Event::Stop);
        }
        for (name, (_, thread)) in groups {
            if thread.join().is_err() {
                tracing::error!(group = name, "its owner ended by a fault");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
