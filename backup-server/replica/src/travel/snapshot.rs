//! Snapshots: copies of all disks of a group at a point, outside of its journal, which the window does not take away.
//!
//! Each is a directory: an image for each disk, a table of digests for each image ([`super::digest`]), and what this
//! module writes, `snapshot.json`, which is replaced as a whole.
//!
//! ```text
//!  ──make──▶ Making ──▶ Whole ──roll──▶ Rolling ──▶ Whole        (Making, Rolling: held in the journal)
//! ```
//!
//! Invariant: a snapshot on record as whole has durable images with the digests that are on record. While it
//! is made or moved that is on record first, with every point that is needed to go on, and those are held from
//! before the first fold on (rule 5). A directory without `snapshot.json` is no snapshot.

use super::copy::Plan;
use crate::history::{History, Point};
use serde::{Deserialize, Serialize};
use std::io;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::extents::DiskKey;

/// The record, in the snapshot's directory.
pub const FILE: &str = "snapshot.json";
/// Its version.
pub const FORMAT: u32 = 1;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Its images are being made.
    Making,
    /// It is what it says.
    Whole,
    /// Its images are on the way from `point` to `target`.
    Rolling,
}

/// An image's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The disk as it is.
    Raw,
    /// QEMU's, over the image of another snapshot.
    Qcow2,
}

impl Format {
    /// As QEMU calls it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

/// One disk of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskRecord {
    /// `member.disk`.
    pub name: String,
    /// The host.
    pub writer: WriterId,
    /// Its number there.
    pub disk: DiskId,
    /// Its size.
    pub size_bytes: u64,
    /// The image.
    pub file: String,
    /// Its format.
    pub format: Format,
    /// Of its content, as [`super::digest`] has it; `None`: it is not whole.
    pub digest: Option<String>,
}

impl DiskRecord {
    /// Which it is.
    #[must_use]
    pub fn key(&self) -> DiskKey {
        DiskKey { writer: self.writer, disk: self.disk }
    }

    /// The file of its digests.
    #[must_use]
    pub fn digests(&self) -> String {
        format!("{}.digests", self.name)
    }
}

/// How fast it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pace {
    /// Bytes each second at most.
    pub rate_bytes_s: Option<u64>,
    /// Not before this time, in milliseconds since the Unix epoch.
    pub not_before_unix_ms: Option<u64>,
    /// Spread over so many milliseconds.
    pub over_ms: Option<u64>,
}

/// A snapshot on record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`FORMAT`].
    pub format: u32,
    /// The group.
    pub group: String,
    /// How far it is.
    pub stage: Stage,
    /// What it has, or will have when it is made; while it is moved, where it was.
    pub point: Point,
    /// Where it is moved to.
    pub target: Option<Point>,
    /// The snapshot that its images are over.
    pub base: Option<String>,
    /// What that one has.
    pub base_point: Option<Point>,
    /// It is not gone on with until somebody asks for it.
    pub paused: bool,
    /// Those with the same number are made in one pass.
    pub together: Option<u64>,
    /// How fast it is made.
    pub pace: Pace,
    /// When it goes by itself, in milliseconds since the Unix epoch.
    pub expires_at_unix_ms: Option<u64>,
    /// It was moved elsewhere before it had come to where it was to go: its images are of no one point, and all of
    /// them is compared.
    pub mixed: bool,
    /// The names of the group's writers, by their numbers.
    pub members: Vec<String>,
    /// Its disks.
    pub disks: Vec<DiskRecord>,
}

impl Record {
    /// A snapshot that is to be made of all disks at a point, in raw images, or over the images of a base.
    #[must_use]
    pub fn of<F: StorageFile>(
        history: &History<F>,
        point: Point,
        base: Option<(&str, &Record)>,
    ) -> Self {
        let manifest = history.manifest();
        let (format, suffix) = match base {
            None => (Format::Raw, "img"),
            Some(_) => (Format::Qcow2, "qcow2"),
        };
        let disks = history.disks_at(&point).map(|(writer, disk)| {
            let name = manifest.disk_name(DiskKey { writer, disk: disk.id });
            let file = format!("{name}.{suffix}");
            let size_bytes = disk.size_bytes;
            DiskRecord { name, writer, disk: disk.id, size_bytes, file, format, digest: None }
        });
        Self {
            format: FORMAT,
            group: manifest.group.clone(),
            stage: Stage::Making,
            disks: disks.collect(),
            point,
            target: None,
            base: base.map(|(name, _)| name.to_owned()),
            base_point: base.map(|(_, of)| of.point.clone()),
            paused: false,
            together: None,
            pace: Pace::default(),
            expires_at_unix_ms: None,
            mixed: false,
            members: manifest.writers.clone(),
        }
    }

    /// The point that its images have when it is whole.
    #[must_use]
    pub fn aim(&self) -> &Point {
        self.target.as_ref().unwrap_or(&self.point)
    }

    /// Plan for the image of a disk. `aim`: the point that the snapshot aims at, as it was located now. `previous`: the
    /// point of the copy that is made before it in the same pass.
    pub fn plan<F: StorageFile>(
        &self,
        history: &History<F>,
        aim: &Point,
        disk: DiskKey,
        previous: Option<&Point>,
    ) -> Plan {
        let changed = |from: &Point| {
            let from = history.locate(from).ok()?;
            Some(history.changed(&from, aim, disk).ok()?.collect())
        };
        let from = match self.stage {
            Stage::Making if self.base.is_none() => {
                return Plan::Fill { is_new: false, unlike_previous: previous.and_then(changed) };
            }
            Stage::Rolling if self.mixed => None,
            Stage::Rolling => Some(&self.point),
            Stage::Making | Stage::Whole => self.base_point.as_ref(),
        };
        from.and_then(changed).map_or(Plan::Compare, Plan::Change)
    }

    /// Begins a move to another point. A snapshot that is not made yet cannot be moved.
    pub fn roll_to(&mut self, to: Point) {
        assert!(self.stage != Stage::Making, "its images are of no point yet");
        self.mixed |= self.stage == Stage::Rolling && self.aim().cut != to.cut;
        self.stage = Stage::Rolling;
        self.target = Some(to);
        self.paused = false;
        self.disks.iter_mut().for_each(|disk| disk.digest = None);
    }

    /// Records that all images are durable, at the point that the snapshot aimed at.
    pub fn is_made(&mut self) {
        if let Some(target) = self.target.take() {
            self.point = target;
        }
        self.stage = Stage::Whole;
        (self.mixed, self.paused, self.together) = (false, false, None);
    }

    /// The points that are needed to go on.
    #[must_use]
    pub fn needs(&self) -> Vec<&Point> {
        match self.stage {
            Stage::Whole => Vec::new(),
            Stage::Making => {
                [Some(&self.point), self.base_point.as_ref()].into_iter().flatten().collect()
            }
            Stage::Rolling => {
                [Some(&self.point), self.target.as_ref()].into_iter().flatten().collect()
            }
        }
    }
}

/// Puts a record into a snapshot's directory.
pub fn write<S: Storage>(storage: &S, dir: &str, record: &Record) -> io::Result<()> {
    tidelock_storage::replace(storage, dir, FILE, &serde_json::to_vec_pretty(record)?)
}

/// Reads one; `None`: there is none.
pub fn read<S: Storage>(storage: &S, dir: &str) -> io::Result<Option<Record>> {
    let path = tidelock_storage::join(dir, FILE);
    let Some(bytes) = tidelock_storage::read_all(storage, &path)? else { return Ok(None) };
    let damaged =
        |what: String| io::Error::new(io::ErrorKind::InvalidData, format!("{path}: {what}"));
    let value: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| damaged(format!("it is damaged: {e}")))?;
    match value.get("format").and_then(serde_json::Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => {}
        Some(format) => {
            return Err(damaged(format!(
                "it has format {format}, this program knows {FORMAT}: use a newer one"
            )));
        }
        None => return Err(damaged("it is damaged: no format".into())),
    }
    let record =
        serde_json::from_value(value).map_err(|e| damaged(format!("it is damaged: {e}")))?;
    Ok(Some(record))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidelock_storage::memory::Memory;

    /// Of version 1: what it wrote is read for ever.
    const EXAMPLE: &str = r#"{
      "format": 1, "group": "shop", "stage": "rolling",
      "point": {"cut": [120, 7], "hlc": 117660748, "arrived_ms": 1795, "epoch": 1, "writers": [0, 1],
                "end": {"segment": 1, "offset": 900}, "beyond": {"segment": 1, "offset": 900}},
      "target": {"cut": [130, 7], "hlc": 117660948, "arrived_ms": 1798, "epoch": 1, "writers": [0, 1],
                 "end": {"segment": 2, "offset": 96}, "beyond": {"segment": 2, "offset": 96}},
      "base": null, "base_point": null, "paused": false, "together": 7,
      "pace": {"rate_bytes_s": 1048576, "not_before_unix_ms": null, "over_ms": null},
      "expires_at_unix_ms": null,
      "mixed": false, "members": ["db", "web"],
      "disks": [{"name": "db.root", "writer": 0, "disk": 0, "size_bytes": 4194304, "file": "db.root.img",
                 "format": "raw", "digest": "ab"}]
    }"#;

    #[test]
    fn what_was_written_is_read_and_what_is_not_ours_is_told() {
        let disk = Memory::new();
        let put =
            |text: &str| tidelock_storage::replace(&disk, "d", FILE, text.as_bytes()).unwrap();
        assert_eq!(read(&disk, "d").unwrap(), None);
        put(EXAMPLE);
        let record = read(&disk, "d").unwrap().unwrap();
        assert_eq!((record.needs().len(), record.aim().hlc.0), (2, 117_660_948));
        write(&disk, "e", &record).unwrap();
        assert_eq!(read(&disk, "e").unwrap().unwrap(), record);
        put(&EXAMPLE.replace("\"format\": 1,", "\"format\": 2,"));
        assert!(read(&disk, "d").unwrap_err().to_string().contains("use a newer one"));
        put(&EXAMPLE[..200]);
        assert!(read(&disk, "d").unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn one_that_is_moved_elsewhere_on_its_way_is_of_no_one_point_until_it_is_whole() {
        let mut record: Record = serde_json::from_str(EXAMPLE).unwrap();
        let (from, on_the_way) = (record.point.clone(), record.aim().clone());
        record.paused = true;
        record.roll_to(on_the_way.clone());
        assert!(!record.mixed && !record.paused && record.disks[0].digest.is_none());
        record.roll_to(from.clone());
        assert!(record.mixed && *record.aim() == from);
        record.is_made();
        assert_eq!((record.stage, &record.point, record.mixed), (Stage::Whole, &from, false));
        record.roll_to(on_the_way.clone());
        record.is_made();
        assert!(record.point == on_the_way && record.target.is_none() && !record.mixed);
    }
}
