//! Making and moving snapshots: those that are made together, disk by disk in one pass, until all images are durable and
//! that is on record.
//!
//! The caller of the steps decides how fast that goes, in which thread, and when it ends. Work that has ended early is begun
//! again from the records, and keeps what the digests of an image say.

use super::copy::{Copier, Copy, Done, Image, Plan, Raw};
use super::digest::{self, Table};
use super::snapshot::{DiskRecord, Record};
use crate::history::{History, PastView};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use thiserror::Error;
use tidelock_storage::{Storage, StorageFile};

/// Bytes written between two syncs.
const SYNC_BYTES: u64 = 256 << 20;

/// Place where snapshots are kept.
pub trait Images {
    /// An image.
    type Image: Image;
    /// A file of digests.
    type File: StorageFile;

    /// Opens an image of a disk and its digests. Both are made if they are not there.
    fn open(
        &mut self,
        snapshot: &str,
        record: &Record,
        disk: &DiskRecord,
    ) -> io::Result<Opened<Self::Image, Self::File>>;

    /// Closes an image that is whole, durably.
    fn close(
        &mut self,
        snapshot: &str,
        record: &Record,
        disk: &DiskRecord,
        image: Self::Image,
    ) -> io::Result<()>;

    /// Puts a snapshot on record as whole, durably.
    fn keep(&mut self, snapshot: &str, record: &Record) -> io::Result<()>;
}

/// An image that is open.
#[derive(Debug)]
pub struct Opened<I, F> {
    /// The image.
    pub image: I,
    /// Digests of what is in it, as far as is known.
    pub digests: Table<F>,
    /// True if it was made just now: it reads as zeroes.
    pub is_new: bool,
}

/// Opens a raw image of a disk in a directory. Image and digests are made if they are not there.
pub fn open_raw<S: Storage>(
    storage: &S,
    dir: &str,
    disk: &DiskRecord,
) -> io::Result<Opened<Raw<S::File>, S::File>> {
    let open = |file: &str| {
        let path = tidelock_storage::join(dir, file);
        match storage.open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                storage.create(&path).map(|file| (file, true))
            }
            file => file.map(|file| (file, false)),
        }
    };
    let (image, is_new) = open(&disk.file)?;
    if image.size_bytes()? != disk.size_bytes {
        image.set_size(disk.size_bytes)?;
    }
    let digests = Table::open(open(&disk.digests())?.0, disk.size_bytes)?;
    storage.sync_dir(dir)?;
    Ok(Opened { image: Raw(image), digests, is_new })
}

/// A snapshot's point cannot be shown any more.
#[derive(Debug, Error)]
#[error(
    "the point of snapshot {snapshot} is lost: {why}. Remove the snapshot, or move one that was whole with --roll-to"
)]
pub struct Lost {
    /// The snapshot.
    pub snapshot: String,
    /// Why.
    pub why: String,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// So many bytes of a disk were looked at.
    Looked(u64),
    /// Snapshots are all whole and on record.
    Whole,
}

/// Snapshots that are made or moved together.
#[derive(Debug)]
pub struct Making<F: StorageFile + Send + Sync, I: Images> {
    /// In order of time: each is derived from the one before.
    records: Vec<(String, Record)>,
    /// For each of them, by the disk's name.
    plans: Vec<BTreeMap<String, (PastView<F>, Plan)>>,
    /// Disks that are not begun.
    left: VecDeque<String>,
    copying: Option<Copying<F, I>>,
    /// In disks that are whole.
    done: Done,
}

#[derive(Debug)]
struct Copying<F: StorageFile + Send + Sync, I: Images> {
    disk: String,
    copier: Copier<PastView<F>, I::Image, I::File>,
    views: Vec<PastView<F>>,
    synced_bytes: u64,
}

impl<F: StorageFile + Send + Sync, I: Images> Making<F, I> {
    /// Finds the points, and what is to be done for each disk. Afterwards the views hold what is read.
    pub fn begin(history: &History<F>, mut records: Vec<(String, Record)>) -> Result<Self, Lost> {
        records.sort_by_key(|(_, record)| record.aim().hlc);
        let mut plans: Vec<BTreeMap<String, (PastView<F>, Plan)>> = Vec::new();
        let mut previous = None;
        let alike = |record: &Record| -> Vec<(String, u64)> {
            record.disks.iter().map(|disk| (disk.name.clone(), disk.size_bytes)).collect()
        };
        for (snapshot, record) in &records {
            let lost = |why: String| Lost { snapshot: snapshot.clone(), why };
            let (first, of) = &records[0];
            if alike(of) != alike(record) {
                return Err(lost(format!(
                    "it is made together with {first}, which has other disks"
                )));
            }
            let aim = history.locate(record.aim()).map_err(|e| lost(e.to_string()))?;
            let views = history.open(&aim).map_err(|e| lost(e.to_string()))?;
            let mut of_disks = BTreeMap::new();
            for disk in &record.disks {
                let plan = record.plan(history, &aim, disk.key(), previous.as_ref());
                let is_same = |view: &&PastView<F>| view.size_bytes() == disk.size_bytes;
                let view = views.get(&disk.key()).filter(is_same).cloned();
                let view = view.ok_or_else(|| lost("it has other disks there".to_owned()))?;
                of_disks.insert(disk.name.clone(), (view, plan));
            }
            previous = Some(aim);
            plans.push(of_disks);
        }
        let left = plans.first().into_iter().flat_map(BTreeMap::keys).cloned().collect();
        Ok(Self { records, plans, left, copying: None, done: Done::default() })
    }

    /// Sum of what was done so far.
    #[must_use]
    pub fn done(&self) -> Done {
        let now = self.copying.as_ref().map_or(Done::default(), |copying| copying.copier.done());
        self.done + now
    }

    /// True if what is read was taken away: it may be found elsewhere when the group is asked again.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        let mut views = self.copying.iter().flat_map(|copying| &copying.views);
        views.any(PastView::is_revoked)
    }

    /// Makes the next block, or begins or ends a disk.
    pub fn step(&mut self, images: &mut I) -> io::Result<Step> {
        let Some(copying) = &mut self.copying else {
            let Some(disk) = self.left.pop_front() else { return self.keep(images) };
            self.copying = Some(self.open(disk, images)?);
            return Ok(Step::Looked(0));
        };
        let Some(bytes) = copying.copier.step()? else {
            self.close(images)?;
            return Ok(Step::Looked(0));
        };
        let written_bytes = copying.copier.done().written_bytes;
        if written_bytes > copying.synced_bytes + SYNC_BYTES {
            copying.copier.sync()?;
            copying.synced_bytes = written_bytes;
        }
        Ok(Step::Looked(bytes))
    }

    fn open(&mut self, name: String, images: &mut I) -> io::Result<Copying<F, I>> {
        let mut copies = Vec::new();
        for ((snapshot, record), of_disks) in self.records.iter().zip(&mut self.plans) {
            let (disk, plan) = of_disks.remove(&name).expect("those made together have the same");
            let of = record.disks.iter().find(|of| of.name == name).expect("it was planned");
            let Opened { image, digests, is_new } = images.open(snapshot, record, of)?;
            let plan = match plan {
                Plan::Fill { unlike_previous, .. } => Plan::Fill { is_new, unlike_previous },
                plan => plan,
            };
            copies.push(Copy { disk, image, digests, plan });
        }
        let views = copies.iter().map(|copy| copy.disk.clone()).collect();
        Ok(Copying { disk: name, copier: Copier::new(copies), views, synced_bytes: 0 })
    }

    /// Ends a disk, of which all images are there.
    fn close(&mut self, images: &mut I) -> io::Result<()> {
        let Some(Copying { disk: name, mut copier, .. }) = self.copying.take() else {
            return Ok(());
        };
        copier.sync()?;
        self.done = self.done + copier.done();
        for (copy, (snapshot, record)) in copier.end().into_iter().zip(&mut self.records) {
            let nth = record.disks.iter().position(|of| of.name == name).expect("it was planned");
            images.close(snapshot, record, &record.disks[nth], copy.image)?;
            record.disks[nth].digest = Some(digest::hex(&copy.digests.whole()?));
        }
        Ok(())
    }

    fn keep(&mut self, images: &mut I) -> io::Result<Step> {
        for (snapshot, record) in &mut self.records {
            record.is_made();
            images.keep(snapshot, record)?;
        }
        Ok(Step::Whole)
    }
}
