//! Snapshots that an operator keeps on a separate disk: made, moved to other points, interrupted by power losses, and
//! gone on with. A snapshot that is whole on record has the oracle's bytes.
//!
//! No hold keeps their points, because a hold would change when a group folds: a snapshot whose point has gone in the
//! meantime is given up.

use crate::failure::{Checked, Checker, check, fail};
use crate::rng::Rng;
use crate::travelling::{Place, Views, digest_of, must};
use crate::world::World;
use std::collections::BTreeMap;
use std::io;
use tidelock_replica::history::{History, PastView, Point};
use tidelock_replica::travel::copy::{self, Copier, Copy, Image, Plan, Raw};
use tidelock_replica::travel::digest::{self, Table};
use tidelock_replica::travel::snapshot::{self, DiskRecord, FORMAT, Format, Pace, Record, Stage};
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::extents::DiskKey;

/// A disk with one snapshot in its root.
#[derive(Debug)]
pub struct Kept {
    disk: Memory,
    /// Content of the images, if the snapshot is whole.
    content: BTreeMap<DiskKey, Vec<u8>>,
}

type Target = Copy<PastView<MemoryFile>, Raw<MemoryFile>, MemoryFile>;

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
        let disks = disks_of(past, &to.point);
        let Some(mut kept) = self.backup.groups[group].snapshot.take() else {
            let disk = Memory::new();
            let kept = Kept { disk, content: BTreeMap::new() };
            must(snapshot::write(&kept.disk, "", &begun(past, to.point, disks)), what)?;
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
        let are_alike =
            record.disks.len() == disks.len() && record.disks.iter().zip(&disks).all(is_alike);
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
            let mut record = must(snapshot::read(&kept.disk, ""), what)?.expect("written durably");
            if record.stage == Stage::Whole {
                break;
            }
            let aim = past.locate(record.aim()).and_then(|aim| Ok((past.open(&aim)?, aim)));
            let Ok((views, aim)) = aim else { return Ok(()) };
            // A disk that came, went or grew after it was begun.
            let is_there = |disk: &DiskRecord| {
                views.get(&disk.key()).is_some_and(|view| view.size_bytes() == disk.size_bytes)
            };
            if !record.disks.iter().all(is_there) {
                return Ok(());
            }
            let power_off_at = rng.chance(1, 2).then(|| kept.disk.ops() + rng.below(16));
            kept.disk.set_faults(Faults { power_off_at, ..Faults::default() });
            match make(&kept.disk, past, &mut record, &aim, &views) {
                Ok(()) => {
                    kept.disk.set_faults(Faults::default());
                    kept.content = self.content_at(group, &aim, &views)?;
                    check_images(&kept, &record)?;
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

fn disks_of(past: &History<MemoryFile>, point: &Point) -> Vec<DiskRecord> {
    let record = |(writer, disk): (
        tidelock_protocol::ids::WriterId,
        &tidelock_protocol::message::DiskSpec,
    )| {
        let name = format!("{}.{}", past.manifest().name_of(writer), disk.name);
        DiskRecord {
            file: format!("{name}.img"),
            name,
            writer,
            disk: disk.id,
            size_bytes: disk.size_bytes,
            format: Format::Raw,
            digest: None,
        }
    };
    past.disks_at(point).map(record).collect()
}

fn begun(past: &History<MemoryFile>, point: Point, disks: Vec<DiskRecord>) -> Record {
    Record {
        format: FORMAT,
        group: past.manifest().group.clone(),
        stage: Stage::Making,
        point,
        target: None,
        base: None,
        base_point: None,
        paused: false,
        together: None,
        pace: Pace::default(),
        expires_at_unix_ms: None,
        mixed: false,
        members: past.manifest().writers.clone(),
        disks,
    }
}

/// Makes or moves the images of a snapshot, and puts it on record as whole.
fn make(
    disk: &Memory,
    past: &History<MemoryFile>,
    record: &mut Record,
    aim: &Point,
    views: &Views,
) -> io::Result<()> {
    for nth in 0..record.disks.len() {
        let of = &record.disks[nth];
        let plan = record.plan(past, aim, of.key(), None);
        let target = target(disk, of, views[&of.key()].clone(), plan)?;
        let digest = copied(vec![target])?.remove(0).digests.whole()?;
        record.disks[nth].digest = Some(digest::hex(&digest));
    }
    record.is_made();
    snapshot::write(disk, "", record)
}

/// The images and tables, whole and durable.
fn copied(targets: Vec<Target>) -> io::Result<Vec<Target>> {
    let mut copier = Copier::new(targets);
    while copier.step()?.is_some() {}
    copier.sync()?;
    Ok(copier.end())
}

fn target(
    disk: &Memory,
    of: &DiskRecord,
    view: PastView<MemoryFile>,
    plan: Plan,
) -> io::Result<Target> {
    let open = |name: &str| disk.open(name).map(|file| (file, false));
    let or_made = |name: &str| open(name).or_else(|_| disk.create(name).map(|file| (file, true)));
    let ((image, is_made), (digests, _)) = (or_made(&of.file)?, or_made(&of.digests())?);
    image.set_size(of.size_bytes)?;
    let digests = Table::open(digests, of.size_bytes)?;
    disk.sync_dir("")?;
    let plan = match plan {
        Plan::Fill { unlike_previous, .. } => Plan::Fill { is_new: is_made, unlike_previous },
        plan => plan,
    };
    Ok(Copy { disk: view, image: Raw(image), digests, plan })
}

/// A snapshot that is whole on record has what it is of, also after a power loss.
fn check_images(kept: &Kept, record: &Record) -> Checked {
    let what = |of: &DiskRecord| format!("{} in a snapshot at {:?}", of.name, record.point);
    let disk = kept.disk.crash(&mut || false);
    let on_record = must(snapshot::read(&disk, ""), || "a snapshot's record".to_owned())?;
    check(on_record.as_ref() == Some(record), Checker::Past, || {
        format!("on record is {on_record:?}, made was {record:?}")
    })?;
    for of in &record.disks {
        // A writer that a recovery was without.
        let Some(want) = kept.content.get(&of.key()) else { continue };
        let mut image = Raw(must(disk.open(&of.file), || what(of))?);
        let mut have = vec![0; want.len()];
        must(image.read(0, &mut have), || what(of))?;
        let digests = must(disk.open(&of.digests()), || what(of))?;
        let digests = must(Table::open(digests, of.size_bytes), || what(of))?;
        let wrong = copy::verify(&mut image, &digests, of.size_bytes, |_, _| Ok(()));
        let is_right = have == *want
            && must(wrong, || what(of))?.is_empty()
            && of.digest == Some(digest::hex(&digest_of(want)));
        check(is_right, Checker::Past, || format!("{}: other content", what(of)))?;
    }
    Ok(())
}

/// Copies of one disk at two points, made in one pass: the second one of the first.
pub(crate) fn together(
    past: &History<MemoryFile>,
    from: &Place,
    to: &Place,
    key: DiskKey,
) -> Checked {
    let (Some(first), Some(second)) = (from.content.get(&key), to.content.get(&key)) else {
        return Ok(());
    };
    if first.len() != second.len() {
        return Ok(());
    }
    let what = || format!("copies of {key:?} at {:?} and {:?}", from.point, to.point);
    let (disk, record) = (Memory::new(), begun(past, to.point.clone(), disks_of(past, &to.point)));
    let of = record.disks.iter().find(|of| of.key() == key).expect("it has content there");
    let earlier =
        DiskRecord { name: "before".to_owned(), file: "before.img".to_owned(), ..of.clone() };
    let targets =
        [(&earlier, from, None), (of, to, Some(&from.point))].map(|(of, place, previous)| {
            let plan = record.plan(past, &place.point, key, previous);
            target(&disk, of, place.views[&key].clone(), plan)
        });
    let targets = must(targets.into_iter().collect::<io::Result<Vec<_>>>(), what)?;
    for (mut made, want) in must(copied(targets), what)?.into_iter().zip([first, second]) {
        let mut have = vec![0; want.len()];
        must(made.image.read(0, &mut have), what)?;
        let whole = must(made.digests.whole(), what)?;
        check(have == *want && whole == digest_of(want), Checker::Past, what)?;
    }
    Ok(())
}
