//! What is told of snapshots, and finding out whether their images are what they were.

use super::{Entry, Key, Snapshots, unknown};
use crate::server::qemu::QemuImage;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use tidelock_replica::travel::copy::{self, Image, Raw};
use tidelock_replica::travel::digest::{self, Table};
use tidelock_replica::travel::moment::Moment;
use tidelock_replica::travel::snapshot::{DiskRecord, Format, Stage};
use tidelock_storage::Storage;

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It waits for its time, or for others.
    Waiting,
    /// It is being made.
    Making,
    /// It is being moved.
    Rolling,
    /// It is there.
    Whole,
    /// It was begun, and waits to be asked for again.
    Paused,
    /// It could not be made or moved.
    Failed,
}

impl Phase {
    /// In sentences.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Phase::Waiting => "waiting",
            Phase::Making => "being made",
            Phase::Rolling => "rolling",
            Phase::Whole => "whole",
            Phase::Paused => "paused",
            Phase::Failed => "FAILED",
        }
    }
}

/// An image as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDisk {
    /// `member.disk`.
    pub name: String,
    /// The disk's size.
    pub size_bytes: u64,
    /// The image.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// What it takes of the file system.
    pub stored_bytes: u64,
    /// Of its content; `None`: it is not whole.
    pub digest: Option<String>,
}

/// A snapshot as it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotStatus {
    /// The group.
    pub group: String,
    /// Its name.
    pub name: String,
    /// How far it is.
    pub phase: Phase,
    /// What it has or will have.
    pub at: Moment,
    /// Where it was before it was moved, until it is there.
    pub from: Option<Moment>,
    /// The snapshot that its images are over.
    pub base: Option<String>,
    /// Bytes of its disks that were looked at.
    pub done_bytes: u64,
    /// All of them.
    pub all_bytes: u64,
    /// Bytes that its last job wrote.
    pub written_bytes: u64,
    /// When it goes by itself.
    pub expires_at_unix_ms: Option<u64>,
    /// Why it could not be made or moved.
    pub failed: Option<String>,
    /// Its disks.
    pub disks: Vec<SnapshotDisk>,
}

/// An image that was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifiedDisk {
    /// `member.disk`.
    pub name: String,
    /// Of its content as it is.
    pub digest: String,
    /// It is what it was.
    pub good: bool,
    /// Offsets of blocks of 1 MiB that are not; 1000 at most.
    pub damaged: Vec<u64>,
}

impl Snapshots {
    /// Those of one group or of all.
    #[must_use]
    pub fn told(&self, group: Option<&str>) -> Vec<SnapshotStatus> {
        let all = self.lock();
        let of_group = all.iter().filter(|((of, _), _)| group.is_none_or(|group| of == group));
        of_group.map(|(key, entry)| self.status(key, entry)).collect()
    }

    /// These of a group, as far as they are there.
    #[must_use]
    pub fn these(&self, group: &str, names: &[String]) -> Vec<SnapshotStatus> {
        let all = self.told(Some(group));
        all.into_iter().filter(|one| names.contains(&one.name)).collect()
    }

    fn status(&self, (group, name): &Key, entry: &Entry) -> SnapshotStatus {
        let record = &entry.record;
        let all_bytes: u64 = record.disks.iter().map(|disk| disk.size_bytes).sum();
        let job = entry.job.as_ref();
        let count = |f: fn(&super::Job) -> u64| job.map_or(0, |job| f(job));
        let phase = match (record.stage, job) {
            (Stage::Whole, None) => Phase::Whole,
            (_, Some(job)) if job.is_waiting.load(Ordering::Relaxed) => Phase::Waiting,
            (Stage::Making, Some(_)) => Phase::Making,
            (Stage::Rolling, Some(_)) => Phase::Rolling,
            (Stage::Whole, Some(_)) => Phase::Whole,
            (_, None) if entry.failed.is_some() => Phase::Failed,
            (_, None) => Phase::Paused,
        };
        let moment = |point| Moment::of_members(point, &record.members);
        let path = self.path(group, name);
        let disk = |disk: &DiskRecord| {
            let path = path.join(&disk.file);
            SnapshotDisk {
                name: disk.name.clone(),
                size_bytes: disk.size_bytes,
                stored_bytes: std::fs::metadata(&path).map_or(0, |of| of.blocks() * 512),
                path,
                format: disk.format,
                digest: disk.digest.clone(),
            }
        };
        SnapshotStatus {
            group: group.clone(),
            name: name.clone(),
            phase,
            at: moment(record.aim()),
            from: (record.stage == Stage::Rolling).then(|| moment(&record.point)),
            base: record.base.clone(),
            done_bytes: match phase {
                Phase::Whole => all_bytes,
                _ => count(|job| job.done_bytes.load(Ordering::Relaxed)),
            },
            all_bytes,
            written_bytes: job
                .map_or(entry.written_bytes, |job| job.written_bytes.load(Ordering::Relaxed)),
            expires_at_unix_ms: record.expires_at_unix_ms,
            failed: entry.failed.clone(),
            disks: record.disks.iter().map(disk).collect(),
        }
    }

    /// Reads the images of one that is whole. To be called where waiting is allowed.
    pub fn verify(&self, group: &str, name: &str) -> Result<Vec<VerifiedDisk>, String> {
        let key = (group.to_owned(), name.to_owned());
        let job = std::sync::Arc::new(super::Job::default());
        let record = {
            let mut all = self.lock();
            let Some(entry) = all.get_mut(&key) else { return Err(unknown(&all, group, name)) };
            if entry.job.is_some() || entry.record.stage != Stage::Whole {
                return Err(format!(
                    "snapshot {name} is not whole, or is being read: see `snapshot --list`"
                ));
            }
            entry.job = Some(std::sync::Arc::clone(&job));
            entry.record.clone()
        };
        let verified = record.disks.iter().map(|disk| self.verify_disk(group, name, disk, &job));
        let verified = verified.collect::<io::Result<Vec<_>>>();
        if let Some(entry) = self.lock().get_mut(&key) {
            entry.job = None;
        }
        verified.map_err(|e| format!("snapshot {name} cannot be read: {e}"))
    }

    fn verify_disk(
        &self,
        group: &str,
        name: &str,
        disk: &DiskRecord,
        job: &super::Job,
    ) -> io::Result<VerifiedDisk> {
        let place = Self::place(group, name);
        let table = self.files.open(&format!("{place}/{}", disk.digests()))?;
        let table = Table::open(table, disk.size_bytes)?;
        let mut image: Box<dyn Image> = match disk.format {
            Format::Raw => Box::new(Raw(self.files.open(&format!("{place}/{}", disk.file))?)),
            Format::Qcow2 => {
                let path = self.path(group, name).join(&disk.file);
                Box::new(QemuImage::open(&path, "qcow2", true, &self.sockets()?)?)
            }
        };
        let mut whole = digest::Whole::default();
        let damaged = copy::verify(&mut *image, &table, disk.size_bytes, |found, len| {
            whole.add(found);
            job.done_bytes.fetch_add(len, Ordering::Relaxed);
            if job.is_cancelled() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        })?;
        let digest = digest::hex(&whole.end());
        let good = damaged.is_empty() && disk.digest.as_ref() == Some(&digest);
        let offsets = damaged.into_iter().take(1000).map(|block| block * digest::BLOCK_BYTES);
        Ok(VerifiedDisk { name: disk.name.clone(), digest, good, damaged: offsets.collect() })
    }
}
