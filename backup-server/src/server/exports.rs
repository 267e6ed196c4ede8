//! Where disks are offered: one Unix socket for each, and all of them on a loopback port if so
//! configured. Whoever may open the socket may use the disk, so the directory is the owner's only.

use super::inbox::Event;
use super::nbd::{self, ServedDisk};
use super::registry::Registry;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown, lchown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tidelock_nbd::Users;
use tidelock_targets::ExportedDisk;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};

/// Connections to one export at once. What each holds in memory is bounded.
const CLIENTS_MAX: usize = 16;
/// What a peer can cause at will is logged once in so long.
const SAID_EVERY: Duration = Duration::from_secs(1);

/// All that is offered.
#[derive(Debug)]
pub struct Exports {
    registry: Arc<Registry>,
    groups: Mutex<BTreeMap<String, Offer>>,
    /// Users that recovered machines run as, by group: they may use the group's disks.
    allowed: Mutex<BTreeMap<String, (u32, u32)>>,
}

/// Some disks on sockets; they go with it.
#[derive(Debug)]
pub struct Offer {
    /// The disks.
    pub disks: Vec<ExportedDisk>,
    dir: PathBuf,
    tasks: Vec<AbortHandle>,
}

impl Drop for Offer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        for disk in &self.disks {
            let _ = fs::remove_file(&disk.socket);
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

impl Exports {
    /// Nothing yet.
    #[must_use]
    pub fn new(registry: Arc<Registry>) -> Self {
        Self { registry, groups: Mutex::default(), allowed: Mutex::default() }
    }

    /// Offers the disks of a recovered group; once. `None`: it is not recovered.
    pub async fn offer(&self, group: &str) -> io::Result<Option<Vec<ExportedDisk>>> {
        let Some(disks) = live_disks(&self.registry, group).await else { return Ok(None) };
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(offer) = groups.get(group) {
            return Ok(Some(offer.disks.clone()));
        }
        let dir = self.registry.config().exports_dir.join(group);
        let registry = Arc::clone(&self.registry);
        let name = group.to_owned();
        let offer = offer(&dir, &disks, move |disk| {
            let (registry, name, disk) = (Arc::clone(&registry), name.clone(), disk.to_owned());
            // Looked up for each client: the group may have been opened again since.
            async move {
                let disks = live_disks(&registry, &name).await?;
                disks.into_iter().find(|d| d.name() == disk)
            }
        })?;
        let disks = offer.disks.clone();
        groups.insert(group.to_owned(), offer);
        drop(groups);
        let allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        let user = allowed.get(group).copied();
        drop(allowed);
        if let Some((uid, gid)) = user {
            self.allow(group, uid, gid)?;
        }
        Ok(Some(disks))
    }

    /// Lets a user, and no other, use the disks of a recovered group, also when they are offered again.
    pub fn allow(&self, group: &str, uid: u32, gid: u32) -> io::Result<()> {
        let mut allowed = self.allowed.lock().unwrap_or_else(PoisonError::into_inner);
        allowed.insert(group.to_owned(), (uid, gid));
        drop(allowed);
        let dir = self.registry.config().exports_dir.join(group);
        fs::create_dir_all(&dir)?;
        self.give_dir(&dir, uid, gid)?;
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        for disk in groups.get(group).into_iter().flat_map(|offer| &offer.disks) {
            // The user owns the directory, and may have put a link there.
            lchown(&disk.socket, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    /// Gives a directory below `exports_dir` to a user, and lets everybody pass, and no more, through those above it.
    fn give_dir(&self, dir: &Path, uid: u32, gid: u32) -> io::Result<()> {
        let config = self.registry.config();
        for above in [&config.data_dir, &config.exports_dir] {
            let mode = fs::metadata(above)?.permissions().mode();
            if config.exports_dir.starts_with(above) && mode & 0o001 == 0 {
                fs::set_permissions(above, fs::Permissions::from_mode(mode & 0o7777 | 0o001))?;
            }
        }
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
        chown(dir, Some(uid), Some(gid))
    }

    /// The recovered disks of a group that a client has open.
    #[must_use]
    pub fn in_use(&self, group: &str) -> Vec<String> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let disks = groups.get(group).into_iter().flat_map(|offer| &offer.disks);
        let used = disks.filter(|disk| self.registry.users(group, &disk.name).count() > 0);
        used.map(|disk| disk.name.clone()).collect()
    }

    /// Offers a view's disks until the offer is dropped, in a directory that no group can have.
    pub fn offer_view(&self, name: &str, disks: Vec<ServedDisk>) -> io::Result<Offer> {
        let dir = self.registry.config().exports_dir.join(format!("@{name}"));
        let max = self.registry.config().export_connections;
        let counted = |disk: ServedDisk| {
            let users = Users::new(max, in_use(disk.name(), max));
            if disk.is_writable() { disk.counted(users) } else { disk }
        };
        let disks: Vec<_> = disks.into_iter().map(counted).collect();
        let all = disks.clone();
        offer(&dir, &disks, move |disk| {
            let found = all.iter().find(|d| d.name() == disk).cloned();
            async move { found }
        })
    }

    /// Ends all offers.
    pub fn close(&self) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Sockets of an earlier run are in the way and serve nobody.
pub fn remove_stale(exports_dir: &Path) -> io::Result<()> {
    fs::create_dir_all(exports_dir)?;
    fs::set_permissions(exports_dir, fs::Permissions::from_mode(0o700))?;
    for dir in fs::read_dir(exports_dir)? {
        let dir = dir?.path();
        let Ok(entries) = fs::read_dir(&dir) else { continue };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "sock") {
                fs::remove_file(path)?;
            }
        }
        // Other people's files stay.
        let _ = fs::remove_dir(&dir);
    }
    Ok(())
}

/// Whether something that clients can cause at will is logged: not more often than they matter.
pub(super) fn may_say() -> bool {
    static SAID_AT: Mutex<Option<Instant>> = Mutex::new(None);
    let mut said_at = SAID_AT.lock().unwrap_or_else(PoisonError::into_inner);
    let may = said_at.is_none_or(|at| at.elapsed() >= SAID_EVERY);
    if may {
        *said_at = Some(Instant::now());
    }
    may
}

async fn live_disks(registry: &Registry, group: &str) -> Option<Vec<ServedDisk>> {
    let owner = registry.get(group)?;
    let (done, answer) = oneshot::channel();
    owner.inbox.push(Event::Disks { done });
    let live = answer.await.ok()??;
    let counted = |disk: ServedDisk| {
        let users = registry.users(group, disk.name());
        disk.counted(users)
    };
    Some(ServedDisk::live(live, &owner.inbox).into_iter().map(counted).collect())
}

/// What a client hears that finds no place at an export that is written to.
pub(super) fn in_use(disk: &str, max: usize) -> String {
    format!(
        "{disk} is in use: {max} client{} at once may use it, as two guests on one disk destroy it; end the other \
         one, or set `export_connections` in [server] of the backup server's configuration",
        if max == 1 { "" } else { "s" }
    )
}

fn offer<F, Fut>(dir: &Path, disks: &[ServedDisk], find: F) -> io::Result<Offer>
where
    F: Fn(&str) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Option<ServedDisk>> + Send + 'static,
{
    fs::create_dir_all(dir)?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    let mut offer = Offer { disks: Vec::new(), dir: dir.to_owned(), tasks: Vec::new() };
    for disk in disks {
        let socket = dir.join(format!("{}.sock", disk.name()));
        match fs::remove_file(&socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = UnixListener::bind(&socket)
            .map_err(|e| io::Error::other(format!("cannot listen on {}: {e}", socket.display())))?;
        let (name, size_bytes) = (disk.name().to_owned(), disk.size_bytes());
        let (find, wanted) = (find.clone(), name.clone());
        let task = tokio::spawn(async move {
            let mut clients = JoinSet::new();
            loop {
                let accepted = tokio::select! {
                    accepted = listener.accept(), if clients.len() < CLIENTS_MAX => accepted,
                    Some(_) = clients.join_next() => continue,
                };
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                };
                let (find, wanted) = (find.clone(), wanted.clone());
                clients.spawn(async move {
                    if let Some(disk) = find(&wanted).await {
                        serve(stream, vec![disk]).await;
                    }
                });
            }
        });
        offer.tasks.push(task.abort_handle());
        offer.disks.push(ExportedDisk { name, size_bytes, socket });
    }
    Ok(offer)
}

async fn serve<T>(stream: T, disks: Vec<ServedDisk>)
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + 'static,
{
    let result = match nbd::exports(&disks) {
        Ok(exports) => nbd::serve(stream, exports, Arc::new(disks)).await,
        Err(error) => Err(io::Error::other(error)),
    };
    if let Err(error) = result
        && may_say()
    {
        tracing::warn!("NBD client: {error}");
    }
}

/// Offers the disks of all recovered groups to each client of a loopback port, as
/// `group/member.disk`.
pub async fn run_tcp(listener: TcpListener, registry: Arc<Registry>) {
    let mut clients = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept(), if clients.len() < CLIENTS_MAX => accepted,
            Some(_) = clients.join_next() => continue,
        };
        let Ok((stream, _)) = accepted else {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            continue;
        };
        let registry = Arc::clone(&registry);
        clients.spawn(async move {
            let mut all = Vec::new();
            for owner in registry.all() {
                let disks = live_disks(&registry, &owner.group).await.unwrap_or_default();
                all.extend(disks.into_iter().map(|d| d.named_in(&owner.group)));
            }
            let _ = stream.set_nodelay(true);
            serve(stream, all).await;
        });
    }
}
