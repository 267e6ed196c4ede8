//! Views of the past that are open: the disks of a group as they were at a point, as NBD exports.
//!
//! A view lasts as long as the connection that asked for it, or, if so asked, until it is closed or the server
//! stops. It can be moved to another point while its clients stay connected (Retroscope 3: rolling snapshots, without
//! the snapshot). Invariants: a view holds its point; what is written to it goes to files that have no name any more,
//! and is gone with it; nothing of the replica changes (rule 7); a request sees one point only.

use super::exports::{Exports, Offer};
use super::nbd::{Layer, ServedDisk, Shown};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tidelock_protocol::bounds;
use tidelock_replica::group::DamagedDisk;
use tidelock_replica::history::{History, PastView, Point};
use tidelock_replica::text;
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::scratch::{Quota, Scratch};
use tidelock_storage::files::{Files, OpenFile};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::extents::DiskKey;
use tidelock_targets::ExportedDisk;

/// Views at once.
const VIEWS_MAX: usize = 256;
/// What a writable view may take, if nothing else is said.
pub const QUOTA_BYTES: u64 = 1 << 30;

/// How a view is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Its name; else it is given one.
    pub name: Option<String>,
    /// Whether it can be written to.
    pub write: bool,
    /// What its disks may take together.
    pub quota_bytes: Option<u64>,
}

/// A view as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewStatus {
    /// Its name.
    pub name: String,
    /// The group.
    pub group: String,
    /// What it shows.
    pub at: Moment,
    /// Its disks.
    pub disks: Vec<ExportedDisk>,
    /// It stays without the one who asked for it.
    pub detached: bool,
    /// What it may take of the file system; `None`: it cannot be written to.
    pub quota_bytes: Option<u64>,
    /// What it takes.
    pub used_bytes: u64,
    /// It lost its point, because the journal reached its size: reading it fails.
    pub lost: bool,
    /// What cannot be read of it, as far as was known when it was opened.
    #[serde(default)]
    pub damaged: Vec<DamagedDisk>,
}

/// A view that was moved.
#[derive(Debug)]
pub struct Rolled {
    /// As it is now.
    pub view: ViewStatus,
    /// Where it was.
    pub from: Point,
    /// What was written to it and is gone.
    pub discarded_bytes: u64,
}

#[derive(Debug)]
struct OpenView {
    id: u64,
    group: String,
    point: Point,
    at: Moment,
    quota: Option<Arc<Quota>>,
    /// Its disks, by their keys in the order of the layers.
    keys: Vec<DiskKey>,
    shown: Arc<Shown>,
    detached: bool,
    offer: Offer,
    damaged: Vec<DamagedDisk>,
}

/// All views.
#[derive(Debug)]
pub struct Views {
    exports: Arc<Exports>,
    dir: PathBuf,
    open: Mutex<BTreeMap<String, OpenView>>,
    last_id: AtomicU64,
}

/// A view that is closed when this is dropped.
#[derive(Debug)]
pub struct Attended {
    views: Arc<Views>,
    name: String,
    id: u64,
    is_detached: bool,
}

impl Drop for Attended {
    fn drop(&mut self) {
        let mut open = self.views.lock();
        // Closed by somebody else, the name may be another view's by now.
        if !self.is_detached && open.get(&self.name).is_some_and(|view| view.id == self.id) {
            open.remove(&self.name);
        }
    }
}

impl Views {
    /// None yet. Scratch files are made in this directory, and those of an earlier run removed.
    pub fn new(exports: Arc<Exports>, dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let files = Files::new(dir.to_owned());
        let left_over = files.list("")?;
        for name in left_over.iter().filter(|name| name.ends_with(SUFFIX)) {
            files.remove(name)?;
        }
        Ok(Self {
            exports,
            dir: dir.to_owned(),
            open: Mutex::default(),
            last_id: AtomicU64::new(0),
        })
    }

    /// Opens a view until what is returned is dropped. To be called where waiting for files is allowed.
    pub fn open(
        self: &Arc<Self>,
        history: &History<OpenFile>,
        point: &Point,
        wanted: &Wanted,
    ) -> Result<(ViewStatus, Attended), String> {
        let manifest = history.manifest();
        let quota = wanted.write.then(|| Quota::new(wanted.quota_bytes.unwrap_or(QUOTA_BYTES)));
        let quota = quota.map(Arc::new);
        if let Some(quota) = &quota {
            self.check_room(quota.max_bytes())?;
        }
        let disks = history.open(point).map_err(|e| e.to_string())?;
        let mut open = self.lock();
        let name = free_name(&open, wanted.name.as_deref())?;
        let keys: Vec<DiskKey> = disks.keys().copied().collect();
        let names: Vec<String> = keys.iter().map(|key| manifest.disk_name(*key)).collect();
        let layers = self.layers(&name, &names, disks.into_values(), quota.as_ref())?;
        let shown = Arc::new(Shown::new(layers));
        let served = ServedDisk::shown(names, &shown);
        let offer = self.exports.offer_view(&name, served).map_err(|e| e.to_string())?;
        let at = Moment::new(point, manifest);
        let damaged = damaged_at(history, point)?;
        let group = manifest.group.clone();
        let id = self.last_id.fetch_add(1, Ordering::Relaxed);
        let point = point.clone();
        let view =
            OpenView { id, group, point, at, quota, keys, shown, detached: false, offer, damaged };
        let status = view.status(&name);
        open.insert(name.clone(), view);
        drop(open);
        Ok((status, Attended { views: Arc::clone(self), name, id, is_detached: false }))
    }

    /// The view stays when the one who asked for it goes.
    pub fn detach(&self, mut attended: Attended) -> Option<ViewStatus> {
        let status = {
            let mut open = self.lock();
            let view = open.get_mut(&attended.name).filter(|view| view.id == attended.id)?;
            view.detached = true;
            view.status(&attended.name)
        };
        attended.is_detached = true;
        Some(status)
    }

    /// Of which group a view is.
    pub fn group_of(&self, name: &str) -> Result<String, String> {
        let open = self.lock();
        open.get(name).map(|view| view.group.clone()).ok_or_else(|| unknown(&open, name))
    }

    /// Moves a view to another point: sockets and clients stay. Returns it and the point where it was. To be called
    /// where waiting for files is allowed; `history` is of the view's group.
    pub fn roll(
        &self,
        history: &History<OpenFile>,
        name: &str,
        point: &Point,
        discards_writes: bool,
    ) -> Result<Rolled, String> {
        let manifest = history.manifest();
        let disks = history.open(point).map_err(|e| e.to_string())?;
        let damaged = damaged_at(history, point)?;
        let mut open = self.lock();
        let Some(view) = open.get_mut(name).filter(|view| view.group == manifest.group) else {
            return Err(unknown(&open, name));
        };
        let quota = view.quota.as_ref().map(|quota| Arc::new(Quota::new(quota.max_bytes())));
        if quota.is_some() && !discards_writes {
            return Err(format!(
                "view {name} is writable, and what was written to it belongs to the point where it is: give \
                 --discard-writes to throw it away, or open another view"
            ));
        }
        let sizes: Vec<u64> = view.offer.disks.iter().map(|disk| disk.size_bytes).collect();
        let new: Vec<u64> = disks.values().map(PastView::size_bytes).collect();
        if !disks.keys().eq(&view.keys) || new != sizes {
            let names = |keys: &mut dyn Iterator<Item = &DiskKey>| {
                keys.map(|key| manifest.disk_name(*key)).collect::<Vec<_>>().join(", ")
            };
            return Err(format!(
                "view {name} has the disks {}, and at that point there are {}, perhaps of other sizes: open another \
                 view there",
                names(&mut view.keys.iter()),
                names(&mut disks.keys())
            ));
        }
        let names: Vec<String> = view.offer.disks.iter().map(|disk| disk.name.clone()).collect();
        let layers = self.layers(name, &names, disks.into_values(), quota.as_ref())?;
        let discarded_bytes = view.quota.as_ref().map_or(0, |quota| quota.used_bytes());
        view.shown.replace(layers);
        let from = std::mem::replace(&mut view.point, point.clone());
        view.at = Moment::new(point, manifest);
        (view.quota, view.damaged) = (quota, damaged);
        Ok(Rolled { view: view.status(name), from, discarded_bytes })
    }

    /// Closes a view.
    pub fn close(&self, name: &str) -> Result<(), String> {
        let mut open = self.lock();
        if open.remove(name).is_some() {
            return Ok(());
        }
        Err(unknown(&open, name))
    }

    /// Those that are open.
    #[must_use]
    pub fn all(&self) -> Vec<ViewStatus> {
        self.lock().iter().map(|(name, view)| view.status(name)).collect()
    }

    /// Closes all of them.
    pub fn close_all(&self) {
        self.lock().clear();
    }

    /// A full disk stops replication, and a drill must not.
    fn check_room(&self, bytes: u64) -> Result<(), String> {
        let room = rustix::fs::statvfs(&self.dir)
            .map_err(|e| format!("cannot see how much room {} has: {e}", self.dir.display()))?;
        let free = room.f_bavail.saturating_mul(room.f_frsize);
        if free < bytes {
            return Err(format!(
                "a view that may take {} does not fit into {}, which has {}: give a smaller --quota",
                text::bytes(bytes),
                self.dir.display(),
                text::bytes(free)
            ));
        }
        Ok(())
    }

    fn layers(
        &self,
        view: &str,
        names: &[String],
        disks: impl Iterator<Item = PastView<OpenFile>>,
        quota: Option<&Arc<Quota>>,
    ) -> Result<Vec<Layer>, String> {
        let layer = |(name, past): (&String, PastView<OpenFile>)| match quota {
            None => Ok(Layer::Past(past)),
            Some(quota) => match self.scratch(view, name, past, quota) {
                Ok(scratch) => Ok(Layer::Scratch(Arc::new(scratch))),
                Err(e) => Err(format!("no scratch file in {}: {e}", self.dir.display())),
            },
        };
        names.iter().zip(disks).map(layer).collect()
    }

    fn scratch(
        &self,
        view: &str,
        disk: &str,
        lower: PastView<OpenFile>,
        quota: &Arc<Quota>,
    ) -> io::Result<Scratch<PastView<OpenFile>, OpenFile>> {
        let files = Files::new(self.dir.clone());
        let name = format!("{view}.{disk}{SUFFIX}");
        let file = files.create(&name)?;
        // Open, it lives on; killed, it is gone.
        files.remove(&name)?;
        file.set_size(0)?;
        Scratch::new(lower, file, Arc::clone(quota))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, OpenView>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const SUFFIX: &str = ".scratch";

impl OpenView {
    fn status(&self, name: &str) -> ViewStatus {
        ViewStatus {
            name: name.to_owned(),
            group: self.group.clone(),
            at: self.at.clone(),
            disks: self.offer.disks.clone(),
            detached: self.detached,
            quota_bytes: self.quota.as_ref().map(|quota| quota.max_bytes()),
            used_bytes: self.quota.as_ref().map_or(0, |quota| quota.used_bytes()),
            lost: self.shown.layers().first().is_some_and(|layer| layer.past().is_revoked()),
            damaged: self.damaged.clone(),
        }
    }
}

fn unknown(open: &BTreeMap<String, OpenView>, name: &str) -> String {
    let names: Vec<_> = open.keys().map(String::as_str).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    format!("there is no view {name}; open are: {names}")
}

/// What cannot be read at a point.
fn damaged_at(history: &History<OpenFile>, point: &Point) -> Result<Vec<DamagedDisk>, String> {
    let affected = history.affected(point).map_err(|e| e.to_string())?;
    Ok(affected.iter().map(|of| DamagedDisk::new(history.manifest(), of)).collect())
}

fn free_name(open: &BTreeMap<String, OpenView>, wanted: Option<&str>) -> Result<String, String> {
    if open.len() >= VIEWS_MAX {
        return Err(format!("{VIEWS_MAX} views are open already: close some"));
    }
    match wanted {
        Some(name) if !bounds::is_name(name) => Err(format!(
            "{name:?} cannot be a view's name: letters, digits, `.`, `_` and `-`, not beginning with `.` or `-`"
        )),
        Some(name) if open.contains_key(name) => Err(format!(
            "there is a view {name} already: close it with `tidelock-backup view --close {name}`, or choose another \
             name"
        )),
        Some(name) => Ok(name.to_owned()),
        None => {
            let free = (1..).map(|n| format!("view-{n}")).find(|name| !open.contains_key(name));
            Ok(free.expect("numbers do not end"))
        }
    }
}
