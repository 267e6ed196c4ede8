//! Snapshots that an operator keeps on a separate disk: made, moved to other points, interrupted by power losses, and
//! gone on with. A snapshot that is whole on record has the oracle's bytes.
//!
//! No hold keeps their points, because a hold would change when a group folds: a snapshot whose point has gone in the
//! meantime is given up.

use crate::failure::{Checked, Checker, check, fail};
use crate::rng::Rng;
use crate::travelling::{Place, digest_of, must};
use crate::world::World;
use std::collections::BTreeMap;
use std::io;
use tidelock_replica::history::History;
use tidelock_replica::travel::copy::{self, Image, Raw};
use tidelock_replica::travel::digest::{self, Table};
use tidelock_replica::travel::making::{Images, Making, Opened, Step, open_raw};
use tidelock_replica::travel::snapshot::{self, DiskRecord, Record, Stage};
use tidelock_storage::Storage;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_store::extents::DiskKey;

/// A disk with one snapshot in its root.
#[derive(Debug)]
pub struct Kept {
    disk: Memory,
    /// Content of the images, if the snapshot is whole.
    content: BTreeMap<DiskKey, Vec<u8>>,
}

impl World {
    /// The operator of a group's snapshot makes it, moves it to a point, or goes on with what was interrupted.
    pub(crate) fn keep_snapshot(
        &mut self,
        group: usize,
        past: &History<MemoryFile>,
        to: Place,
        rng: &mut Rng,
    ) -> Checked {
        let what = || format!("the snapshot of group {group}");
        let fresh = Record::of(past, to.point.clone(), None);
        let Some(mut kept) = self.backup.groups[group].snapshot.take() else {
            let disk = Memory::new();
            let kept = Kept { disk, content: BTreeMap::new() };
            must(snapshot::write(&kept.disk, "", &fresh), what)?;
            return self.go_on_with(group, past, kept, rng);
        };
        let record = must(snapshot::read(&kept.disk, ""), what)?;
        let Some(mut record) = record else {
            return fail(Checker::Past, format!("{} has no record", what()));
        };
        if record.stage == Stage::Whole {
            check_images(&kept, &record)?;
        }
        let is_alike =
            |(a, b): (&DiskRecord, &DiskRecord)| (&a.name, a.size_bytes) == (&b.name, b.size_bytes);
        let are_alike = record.disks.len() == fresh.disks.len()
            && record.disks.iter().zip(&fresh.disks).all(is_alike);
        if record.stage != Stage::Making && are_alike && rng.chance(3, 4) {
            record.roll_to(to.point);
            must(snapshot::write(&kept.disk, "", &record), what)?;
            kept.content.clear();
        }
        self.go_on_with(group, past, kept, rng)
    }

    fn go_on_with(
        &mut self,
        group: usize,
        past: &History<MemoryFile>,
        mut kept: Kept,
        rng: &mut Rng,
    ) -> Checked {
        let what = || format!("the snapshot of group {group}");
        for _ in 0..rng.range(1..4) {
            let record = must(snapshot::read(&kept.disk, ""), what)?.expect("written durably");
            if record.stage == Stage::Whole {
                break;
            }
            let aim = past.locate(record.aim()).and_then(|aim| Ok((past.open(&aim)?, aim)));
            let Ok((views, aim)) = aim else { return Ok(()) };
            // A disk that came, went or grew after it was begun.
            let is_there = |disk: &DiskRecord| {
                views.get(&disk.key()).is_some_and(|view| view.size_bytes() == disk.size_bytes)
            };
            let are_there = record.disks.iter().all(is_there);
            let making = Making::begin(past, vec![(String::new(), record)]);
            check(making.is_ok() == are_there, Checker::Past, || {
                format!("{} at {aim:?} is begun: {making:?}", what())
            })?;
            let Ok(making) = making else { return Ok(()) };
            let power_off_at = rng.chance(1, 2).then(|| kept.disk.ops() + rng.below(16));
            kept.disk.set_faults(Faults { power_off_at, ..Faults::default() });
            match made(making, &kept.disk) {
                Ok(()) => {
                    kept.disk.set_faults(Faults::default());
                    kept.content = self.content_at(group, &aim, &views)?;
                    let record = must(snapshot::read(&kept.disk, ""), what)?;
                    check_images(&kept, &record.expect("it was put on record"))?;
                    self.counts.snapshots += 1;
                }
                Err(error) => {
                    check(power_off_at.is_some(), Checker::Past, || {
                        format!("{} at {aim:?}: {error}", what())
                    })?;
                    let keep_percent = *rng.pick(&[0, 50, 100]);
                    kept.disk = kept.disk.crash(&mut || rng.chance(keep_percent, 100));
                }
            }
        }
        self.backup.groups[group].snapshot = Some(kept);
        Ok(())
    }
}

/// A disk with snapshots in directories.
#[derive(Debug)]
struct InMemory(Memory);

impl Images for InMemory {
    type Image = Raw<MemoryFile>;
    type File = MemoryFile;

    fn open(
        &mut self,
        dir: &str,
        _: &Record,
        disk: &DiskRecord,
    ) -> io::Result<Opened<Self::Image, MemoryFile>> {
        open_raw(&self.0, dir, disk)
    }

    fn close(&mut self, _: &str, _: &Record, _: &DiskRecord, _: Self::Image) -> io::Result<()> {
        Ok(())
    }

    fn keep(&mut self, dir: &str, record: &Record) -> io::Result<()> {
        snapshot::write(&self.0, dir, record)
    }
}

/// Makes or moves snapshots, and puts them on record as whole.
fn made(mut making: Making<MemoryFile, InMemory>, disk: &Memory) -> io::Result<()> {
    let mut images = InMemory(disk.clone());
    while making.step(&mut images)? != Step::Whole {}
    Ok(())
}

/// A snapshot that is whole on record has what it is of, also after a power loss.
fn check_images(kept: &Kept, record: &Record) -> Checked {
    let disk = kept.disk.crash(&mut || false);
    let on_record = must(snapshot::read(&disk, ""), || "a snapshot's record".to_owned())?;
    check(on_record.as_ref() == Some(record), Checker::Past, || {
        format!("on record is {on_record:?}, made was {record:?}")
    })?;
    check_disks(&disk, "", record, &kept.content)
}

fn check_disks(
    disk: &Memory,
    dir: &str,
    record: &Record,
    content: &BTreeMap<DiskKey, Vec<u8>>,
) -> Checked {
    let what = |of: &DiskRecord| format!("{} in a snapshot at {:?}", of.name, record.point);
    let open = |file: &str| disk.open(&tidelock_storage::join(dir, file));
    for of in &record.disks {
        // A writer that a recovery was without.
        let Some(want) = content.get(&of.key()) else { continue };
        let mut image = Raw(must(open(&of.file), || what(of))?);
        let mut have = vec![0; want.len()];
        must(image.read(0, &mut have), || what(of))?;
        let digests = must(open(&of.digests()), || what(of))?;
        let digests = must(Table::open(digests, of.size_bytes), || what(of))?;
        let wrong = copy::verify(&mut image, &digests, of.size_bytes, |_, _| Ok(()));
        let is_right = have == *want
            && must(wrong, || what(of))?.is_empty()
            && of.digest == Some(digest::hex(&digest_of(want)));
        check(is_right, Checker::Past, || format!("{}: other content", what(of)))?;
    }
    Ok(())
}

/// Snapshots of two points, made in one pass: the second one of the first.
pub(crate) fn together(past: &History<MemoryFile>, from: &Place, to: &Place) -> Checked {
    let what = || format!("snapshots of {:?} and {:?}", from.point, to.point);
    let of =
        |dir: &str, place: &Place| (dir.to_owned(), Record::of(past, place.point.clone(), None));
    let records = vec![of("from", from), of("to", to)];
    if records[0].1.disks != records[1].1.disks {
        let making = Making::<_, InMemory>::begin(past, records);
        return check(making.is_err(), Checker::Past, || format!("{}: of other disks", what()));
    }
    let disk = Memory::new();
    let making = must(Making::begin(past, records), what)?;
    must(made(making, &disk), what)?;
    for (dir, place) in [("from", from), ("to", to)] {
        let record = must(snapshot::read(&disk, dir), what)?.expect("it was put on record");
        check_disks(&disk, dir, &record, &place.content)?;
    }
    Ok(())
}
