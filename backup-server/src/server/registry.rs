//! The groups by name, and the lock that keeps a second server off the data directory.

use super::Role;
use super::budget::Connections;
use super::config::Config;
use super::exports::in_use;
use super::inbox::Event;
use super::owner::{self, Owner, OwnerHandle};
use super::stores::Stores;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use thiserror::Error;
use tidelock_nbd::Users;
use tidelock_protocol::bounds;
use tidelock_replica::groups::{Groups, NoGroup, Quota};
use tidelock_replica::manifest::Member;
use tidelock_storage::reserve::Reserve;

/// Before the name of a directory whose group is being removed.
const REMOVED: &str = ".removed-";

/// Why a group's owner does not run.
#[derive(Debug, Error)]
pub enum SpawnError {
    /// No such group is here, and none begins.
    #[error(transparent)]
    None(#[from] NoGroup),
    /// There is no thread for it.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The groups.
#[derive(Debug)]
pub struct Registry {
    config: Config,
    connections: Arc<Connections>,
    stores: Stores,
    state: Mutex<Groups<Running>>,
    reserve: Arc<Reserve>,
    /// Who has disks of recovered groups open, by group and disk, on whatever socket.
    users: Mutex<BTreeMap<(String, String), Arc<Users>>>,
    /// Held while this is there.
    _lock: File,
}

#[derive(Debug)]
struct Running {
    handle: OwnerHandle,
    thread: JoinHandle<()>,
}

impl Running {
    fn is_closed(&self) -> bool {
        self.handle.inbox.is_closed()
    }
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
    /// Who has this disk of a recovered group open.
    pub fn users(&self, group: &str, disk: &str) -> Arc<Users> {
        let max = self.config.export_connections;
        let new = || Users::new(max, in_use(&format!("disk {disk} of group {group}"), max));
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let of = users.entry((group.to_owned(), disk.to_owned())).or_insert_with(new);
        Arc::clone(of)
    }

    /// Locks the data directory and starts the owner of each group in it.
    pub fn open(config: Config, role: Role) -> Result<Self, RegistryError> {
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
        let stores = Stores::open(&config, role).map_err(wrong)?;
        let (reserve, connections) = (Arc::new(reserve), Arc::default());
        let (state, users) = (Mutex::default(), Mutex::default());
        let registry = Self { config, connections, stores, state, reserve, users, _lock: lock };
        for entry in fs::read_dir(&groups_dir).map_err(wrong)? {
            let Ok(name) = entry.map_err(wrong)?.file_name().into_string() else { continue };
            if name.starts_with(REMOVED) {
                // The server ended while it removed the group.
                fs::remove_dir_all(groups_dir.join(&name)).map_err(wrong)?;
            }
            if !bounds::is_name(&name) {
                continue;
            }
            if groups_dir.join(&name).join("group.json").exists() {
                let spawned = registry.get_or_spawn(&name, None);
                spawned.map_err(|error| wrong(io::Error::other(error)))?;
            }
        }
        Ok(registry)
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The room on the data directory's disk that is reserved for recoveries.
    #[must_use]
    pub fn reserve(&self) -> &Reserve {
        &self.reserve
    }

    /// Room for connections.
    #[must_use]
    pub fn connections(&self) -> &Arc<Connections> {
        &self.connections
    }

    /// The stores.
    #[must_use]
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// The owner of a group, if it runs.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<OwnerHandle> {
        let state = self.lock();
        state.get(name).filter(|of| !of.is_closed()).map(|of| of.handle.clone())
    }

    /// All owners.
    #[must_use]
    pub fn all(&self) -> Vec<OwnerHandle> {
        let state = self.lock();
        state.all().filter(|of| !of.is_closed()).map(|of| of.handle.clone()).collect()
    }

    /// The owner of a group, which an attachment by this host may create; `None`: it is there, or an operator makes it.
    pub fn get_or_spawn(&self, name: &str, host: Option<&str>) -> Result<OwnerHandle, SpawnError> {
        if self.stores.has(name) {
            return Err(NoGroup::Quota(format!("{name} is a store at this server")).into());
        }
        let mut state = self.lock();
        if let Some(of) = state.find(name, Running::is_closed)? {
            return Ok(of.handle.clone());
        }
        let dir = self.config.data_dir.join("groups").join(name);
        let manifest = dir.join("group.json");
        let made_by = match manifest.exists() {
            true => made_by(&manifest),
            false => host.map(str::to_owned),
        };
        if let Some(host) = host.filter(|_| !manifest.exists()) {
            let quota = Quota {
                is_listed: &|name| self.config.is_listed(name),
                listed: self.config.listed().count(),
                per_host: self.config.groups_per_host,
            };
            state.check_quota(name, host, &quota)?;
        }
        let options = self.config.options(name);
        let (snapshots, input) = (&self.config.snapshots_dir, self.config.input_max_bytes);
        let reserve = Arc::clone(&self.reserve);
        let owner = Owner::new(name, &dir, snapshots, options, input, reserve);
        let (handle, thread) = owner::spawn(owner)?;
        state.begun(name, Running { handle: handle.clone(), thread }, made_by);
        Ok(handle)
    }

    /// Removes a group and all that it has. To be called when nothing uses it: its owner ends first.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let running = self.lock().begin_removal(name).map_err(io::Error::other)?;
        let removed = self.remove_files(name, running);
        self.lock().removed(name);
        removed
    }

    fn remove_files(&self, name: &str, running: Option<Running>) -> io::Result<()> {
        if let Some(Running { handle, thread }) = running {
            handle.inbox.push(Event::Stop);
            if thread.join().is_err() {
                tracing::error!(group = name, "its owner ended by a fault");
            }
        }
        let groups = self.config.data_dir.join("groups");
        // Under no group's name: what is left after a crash is no half group.
        let gone = groups.join(format!("{REMOVED}{name}"));
        match fs::remove_dir_all(&gone) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::rename(groups.join(name), &gone)?;
        File::open(&groups)?.sync_all()?;
        fs::remove_dir_all(&gone)
    }

    /// The owner of a group that is in the data directory, also if it was put there just now.
    pub fn adopt(&self, name: &str) -> io::Result<OwnerHandle> {
        let is_there =
            || self.config.data_dir.join("groups").join(name).join("group.json").exists();
        if !bounds::is_name(name) || !is_there() {
            return Err(io::Error::other(format!("there is no group {name}")));
        }
        self.get_or_spawn(name, None).map_err(io::Error::other)
    }

    /// Stops all owners and waits until what they have is durable.
    pub fn stop(&self) {
        self.stores.stop();
        let groups = self.lock().stop();
        for (_, of) in &groups {
            of.handle.inbox.push(Event::Stop);
        }
        for (name, Running { thread, .. }) in groups {
            if thread.join().is_err() {
                tracing::error!(group = name, "its owner ended by a fault");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Groups<Running>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host that created a group. Its owner tells what is wrong with the file, if anything is.
fn made_by(manifest: &Path) -> Option<String> {
    let manifest = serde_json::from_slice::<serde_json::Value>(&fs::read(manifest).ok()?).ok()?;
    let host = manifest.get("created_by")?.as_str()?;
    (host != Member::NOBODY).then(|| host.to_owned())
}
