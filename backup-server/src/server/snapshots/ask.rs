//! What is asked for: checked, put on record, and begun.
//!
//! Order: the points are held, then the record is durable, then the first byte is written.

use super::{Entry, Key, SNAPSHOTS_MAX, Snapshots, unknown};
use crate::server::clock;
use crate::server::travel::{self, Look};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use tidelock_protocol::bounds;
use tidelock_replica::history::{History, Point};
use tidelock_replica::text;
use tidelock_replica::travel::digest;
use tidelock_replica::travel::snapshot::{DiskRecord, Pace, Record, Stage};
use tidelock_replica::travel::when::When;
use tidelock_storage::Storage;
use tidelock_storage::files::OpenFile;
use tidelock_store::view::Content;

/// What is left free on the file system: a full one stops replication.
const SPARE_BYTES: u64 = 64 << 20;

/// What is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Their names and points; no point: `latest`, or what a begun one has.
    pub names: Vec<(String, Option<When>)>,
    /// Only what is different from this snapshot is stored.
    pub base: Option<String>,
    /// The one that is named is moved here.
    pub roll_to: Option<When>,
    /// How fast.
    pub pace: Pace,
    /// When it goes by itself.
    pub expires_in_ms: Option<u64>,
}

/// What was begun.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotsStarted {
    /// These are made or moved.
    pub names: Vec<String>,
    /// Those of them whose job began with this; others had one.
    pub started: Vec<String>,
    /// For people: what was found and used.
    pub notes: Vec<String>,
}

impl Snapshots {
    /// Makes, moves or goes on with snapshots of a group.
    pub async fn begin(
        self: &Arc<Self>,
        group: &str,
        wanted: Wanted,
    ) -> Result<SnapshotsStarted, String> {
        let snapshots = Arc::clone(self);
        let of = group.to_owned();
        travel::looking(&self.registry, group, move |look| {
            let _one = snapshots.asking.lock().unwrap_or_else(PoisonError::into_inner);
            snapshots.begin_one_by_one(look, &of, &wanted)
        })
        .await
    }

    fn begin_one_by_one(
        self: &Arc<Self>,
        look: &Look,
        group: &str,
        wanted: &Wanted,
    ) -> Result<SnapshotsStarted, String> {
        let names: Vec<String> = wanted.names.iter().map(|(name, _)| name.clone()).collect();
        if let Some(bad) = names.iter().find(|name| !bounds::is_name(name)) {
            return Err(format!(
                "{bad:?} cannot be a snapshot's name: letters, digits, `.`, `_` and `-`, not beginning with `.` or `-`"
            ));
        }
        if names.iter().collect::<BTreeSet<_>>().len() < names.len() {
            return Err("one name is there twice".into());
        }
        if let Some(to) = &wanted.roll_to {
            let [name] = &names[..] else {
                return Err("one snapshot can be moved at a time: name it".into());
            };
            let to = look.resolve(to)?;
            return self.roll(look, group, name, to, wanted);
        }
        let mut fresh = Vec::new();
        let mut begun = SnapshotsStarted::default();
        for (name, when) in &wanted.names {
            match self.go_on_with(look, group, name, when.as_ref())? {
                Some(started) => {
                    begun.notes.push(format!(
                        "{name} was begun before: what is there is kept after its digest is checked"
                    ));
                    begun.names.push(name.clone());
                    begun.started.extend(started);
                }
                None => {
                    let point = look.resolve(when.as_ref().unwrap_or(&When::Latest))?;
                    fresh.push((name.clone(), point));
                }
            }
        }
        if !fresh.is_empty() {
            self.make(look, group, &fresh, wanted, &mut begun)?;
        }
        Ok(begun)
    }

    /// A snapshot that was begun goes on. `None`: there is none.
    fn go_on_with(
        self: &Arc<Self>,
        look: &Look,
        group: &str,
        name: &str,
        when: Option<&When>,
    ) -> Result<Option<Vec<String>>, String> {
        let record = match self.lock().get(&key(group, name)) {
            None => return Ok(None),
            Some(entry) => entry.record.clone(),
        };
        if record.stage == Stage::Whole {
            return Err(format!(
                "there is a snapshot {name} already: move it with --roll-to, take it out with --remove, or choose \
                 another name"
            ));
        }
        if let Some(when) = when
            && look.resolve(when)?.cut != record.aim().cut
        {
            return Err(format!(
                "snapshot {name} was begun for another point, {}: leave --at out to go on with it, or remove it first",
                look.moment(record.aim())
            ));
        }
        let started = self.start(group, vec![name.to_owned()]);
        if !started.is_empty() {
            // Also after a kill.
            let record = Record { paused: false, ..record };
            self.save(name, &record).map_err(|e| format!("cannot write {name}'s record: {e}"))?;
        }
        Ok(Some(started))
    }

    fn make(
        self: &Arc<Self>,
        look: &Look,
        group: &str,
        fresh: &[(String, Point)],
        wanted: &Wanted,
        begun: &mut SnapshotsStarted,
    ) -> Result<(), String> {
        let history = &look.history;
        let base = wanted.base.as_ref().map(|base| self.base(group, base)).transpose()?;
        let count = self.lock().keys().filter(|(of, _)| of == group).count();
        if count + fresh.len() > SNAPSHOTS_MAX {
            return Err(format!(
                "there are {SNAPSHOTS_MAX} snapshots of this group already: remove some"
            ));
        }
        let now = clock::now().unix_ms;
        // One may have disks that another has not: then each is made by itself.
        let base_of = wanted.base.as_deref().zip(base.as_ref());
        let record = |(name, point): &(String, Point)| {
            (name.clone(), Record::of(history, point.clone(), base_of))
        };
        let mut records: Vec<_> = fresh.iter().map(record).collect();
        let are_alike = records.windows(2).all(|two| two[0].1.disks == two[1].1.disks);
        let can_share = fresh.len() > 1 && base.is_none() && are_alike;
        let together = can_share.then(|| self.files.fresh_id());
        let mut needed_bytes = 0;
        for (_, record) in &mut records {
            if let Some((base, of)) = base_of {
                same_disks(&format!("snapshot {base}"), &of.disks, &record.disks)?;
            }
            needed_bytes += match &base {
                Some(of) => self
                    .difference_bytes(history, &of.point, &record.point, &record.disks)
                    .unwrap_or(0),
                None => content_bytes(history, &record.point)?,
            };
            record.together = together;
            record.pace = wanted.pace;
            record.expires_at_unix_ms = wanted.expires_in_ms.map(|ms| now.saturating_add(ms));
        }
        self.check_room(needed_bytes)?;
        for (name, record) in records {
            self.put_on_record(history, &name, record)?;
            begun.names.push(name);
        }
        let names = fresh.iter().map(|(name, _)| name.clone());
        if together.is_some() {
            begun.notes.push("what they have in common is read once".into());
            begun.started.extend(self.start(group, names.collect()));
        } else {
            names.for_each(|name| begun.started.extend(self.start(group, vec![name])));
        }
        Ok(())
    }

    /// Holds, then the record.
    fn put_on_record(
        &self,
        history: &History<OpenFile>,
        name: &str,
        record: Record,
    ) -> Result<(), String> {
        let group = record.group.clone();
        let mut entry = Entry::new(record);
        hold(history, name, &mut entry)?;
        let cannot = |e| format!("cannot make {}: {e}", self.path(&group, name).display());
        self.files.create_dir(&Self::place(&group, name)).map_err(cannot)?;
        let dirs = self.files.sync_dir(&group).and_then(|()| self.files.sync_dir(""));
        dirs.and_then(|()| self.save(name, &entry.record)).map_err(cannot)?;
        self.lock().insert(key(&group, name), entry);
        Ok(())
    }

    fn roll(
        self: &Arc<Self>,
        look: &Look,
        group: &str,
        name: &str,
        to: Point,
        wanted: &Wanted,
    ) -> Result<SnapshotsStarted, String> {
        let mut record = {
            let all = self.lock();
            let Some(entry) = all.get(&key(group, name)) else {
                return Err(unknown(&all, group, name));
            };
            let over = Self::over(&all, group, name);
            if !over.is_empty() {
                return Err(format!(
                    "snapshot {name} is the base of {}, which would change with it: remove what is over it, or make \
                     another snapshot",
                    over.join(", ")
                ));
            }
            if entry.job.is_some() {
                return Err(format!(
                    "snapshot {name} is being made, moved or read: wait, or see `snapshot --list`"
                ));
            }
            entry.record.clone()
        };
        let there = Record::of(&look.history, to.clone(), None).disks;
        same_disks(&format!("snapshot {name}"), &record.disks, &there)?;
        if record.stage == Stage::Making {
            return Err(format!("snapshot {name} is not made yet: go on with it, or remove it"));
        }
        let needed = self.difference_bytes(&look.history, &record.point, &to, &record.disks);
        self.check_room(needed.unwrap_or(0))?;
        record.roll_to(to);
        record.pace = wanted.pace;
        self.put_rolling(look, name, record)?;
        let started = self.start(group, vec![name.to_owned()]);
        Ok(SnapshotsStarted { names: vec![name.to_owned()], started, notes: Vec::new() })
    }

    fn put_rolling(&self, look: &Look, name: &str, record: Record) -> Result<(), String> {
        let group = record.group.clone();
        let mut entry = Entry::new(record);
        hold(&look.history, name, &mut entry)?;
        self.save(name, &entry.record).map_err(|e| format!("cannot write {name}'s record: {e}"))?;
        self.lock().insert(key(&group, name), entry);
        Ok(())
    }

    fn base(&self, group: &str, base: &str) -> Result<Record, String> {
        let all = self.lock();
        match all.get(&key(group, base)) {
            None => Err(unknown(&all, group, base)),
            Some(entry) if entry.record.stage != Stage::Whole => {
                Err(format!("snapshot {base} is not whole, so nothing can be based on it yet"))
            }
            Some(entry) => Ok(entry.record.clone()),
        }
    }

    /// What records between two points have written at most; `None`: the journal does not have both.
    fn difference_bytes(
        &self,
        history: &History<OpenFile>,
        from: &Point,
        to: &Point,
        disks: &[DiskRecord],
    ) -> Option<u64> {
        let from = history.locate(from).ok()?;
        let mut bytes = 0;
        for disk in disks {
            let changed = history.changed(&from, to, disk.key()).ok()?;
            bytes += changed.map(|range| range.end - range.start).sum::<u64>();
        }
        Some(bytes)
    }

    /// A full disk stops replication, and a snapshot must not.
    pub(super) fn check_room(&self, needed_bytes: u64) -> Result<(), String> {
        let free = free_bytes(&self.dir)?;
        if free < needed_bytes.saturating_add(SPARE_BYTES) {
            return Err(format!(
                "{} must be written, and {} has {} free, of which {} are left alone: make room, or set \
                 server.snapshots_dir to another file system",
                text::bytes(needed_bytes),
                self.dir.display(),
                text::bytes(free),
                text::bytes(SPARE_BYTES)
            ));
        }
        Ok(())
    }
}

fn free_bytes(dir: &Path) -> Result<u64, String> {
    let room = rustix::fs::statvfs(dir)
        .map_err(|e| format!("cannot see how much room {} has: {e}", dir.display()))?;
    Ok(room.f_bavail.saturating_mul(room.f_frsize))
}

pub(super) fn key(group: &str, name: &str) -> Key {
    (group.to_owned(), name.to_owned())
}

/// Holds the points that a snapshot needs. It cannot be without the one that it is to have; from the others only the
/// difference is told.
pub(super) fn hold(
    history: &History<OpenFile>,
    name: &str,
    entry: &mut Entry,
) -> Result<(), String> {
    let why = format!("snapshot {name}");
    let held = history.hold(entry.record.aim(), &why).map_err(|e| e.to_string())?;
    entry.holds.push(held);
    for point in entry.record.needs() {
        let held = history.locate(point).and_then(|point| history.hold(&point, &why));
        entry.holds.extend(held);
    }
    Ok(())
}

fn same_disks(what: &str, ours: &[DiskRecord], theirs: &[DiskRecord]) -> Result<(), String> {
    let told = |disks: &[DiskRecord]| -> Vec<String> {
        disks.iter().map(|disk| format!("{} ({} bytes)", disk.name, disk.size_bytes)).collect()
    };
    let (ours, theirs) = (told(ours), told(theirs));
    if ours == theirs {
        return Ok(());
    }
    Err(format!(
        "{what} has the disks {}, and at that point there are {}: make a snapshot of its own there",
        ours.join(", "),
        theirs.join(", ")
    ))
}

/// What a full copy of all disks takes.
fn content_bytes(history: &History<OpenFile>, point: &Point) -> Result<u64, String> {
    let mut bytes = 0;
    for view in history.open(point).map_err(|e| e.to_string())?.values() {
        for block in 0..digest::blocks(view.size_bytes()) {
            let described =
                view.describe(digest::range(block, view.size_bytes()), |len, content| {
                    bytes += if content == Content::Data { len } else { 0 };
                    true
                });
            described.map_err(|e| e.to_string())?;
        }
    }
    Ok(bytes)
}
