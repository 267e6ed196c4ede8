//! Rule 5 on a disk that forgets: bytes of a copy of the backup's disk are flipped where they rest, and then each view
//! either equals the oracle's replay or fails to be read in exactly the parts that are told, before and after folds
//! and another start.
//!
//! It draws its own numbers, so that what else happens in a run does not depend on it.

use crate::backup::options;
use crate::failure::{Checked, Checker, check, fail};
use crate::rng::Rng;
use crate::travelling::must;
use crate::world::World;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::message::RefusalKind;
use tidelock_replica::group::{DamagedDisk, ForgetError, Group, JOURNAL_DIR, Now, RecoverError};
use tidelock_replica::history::{At, History, PastError, Point};
use tidelock_replica::quarantine::QUARANTINE_DIR;
use tidelock_storage::memory::{Memory, MemoryFile};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{Compress, index_file_name};

/// Most jobs of a kind: none of them goes on for ever.
const JOBS_MAX: usize = 64;

/// The next round through the images is due.
const WEEK_NANOS: u64 = 7 * 24 * 3600 * 1_000_000_000;
/// Most images that a group has.
const IMAGES_MAX: usize = 32;

/// A group whose disk has lost something.
pub(crate) struct Rotten {
    pub(crate) group: usize,
    pub(crate) of: Group<Memory>,
    pub(crate) now: Now,
    pub(crate) rng: Rng,
    /// Bytes of segments that were flipped.
    pub(crate) flips: Vec<(String, u64)>,
}

impl Rotten {
    fn index(&mut self) {
        for _ in 0..JOBS_MAX {
            let Some(job) = self.of.index_job() else { return };
            let segment = job.segment();
            self.of.index_done(segment, job.run());
        }
    }

    /// Some of the oldest segments.
    fn compress(&mut self) {
        for _ in 0..self.rng.below(8) {
            self.now.mono.0 += 1_000_000_000;
            let Some(job) = self.of.compress_job(self.now) else { return };
            let (segment, len_bytes) = (job.segment(), job.len_bytes());
            self.of.compress_done(self.now, segment, len_bytes, job.run());
        }
    }

    /// Some bytes of sealed segments and their indexes, and of images and their sums.
    fn flip(&mut self, disk: &Memory) -> bool {
        let segments = self.of.journal().segments();
        let Some((_, sealed)) = segments.split_last().filter(|(_, sealed)| !sealed.is_empty())
        else {
            return false;
        };
        for _ in 0..self.rng.range(1..7) {
            let segment = &sealed[self.rng.index(sealed.len())];
            let images = disk.list("images").unwrap_or_default();
            let path = match self.rng.below(8) {
                0 => format!("journal/{}", index_file_name(segment.index, segment.id)),
                1 | 2 if !images.is_empty() => {
                    format!("images/{}", images[self.rng.index(images.len())])
                }
                _ => format!("journal/{}", segment.file_name()),
            };
            // A file that was just made may be empty.
            let size_bytes = disk.open(&path).and_then(|file| file.size_bytes()).unwrap_or(0);
            if size_bytes == 0 {
                continue;
            }
            let at = self.rng.below(size_bytes);
            disk.flip(&path, at);
            if path.ends_with(&segment.file_name()) {
                self.flips.push((segment.file_name(), at));
            }
        }
        true
    }

    /// Verifies all of the journal and of the images.
    pub(crate) fn scrub(&mut self) {
        self.now.mono.0 += WEEK_NANOS;
        for _ in 0..2 * self.of.journal().segments().len() + 4 + IMAGES_MAX {
            self.now.mono.0 += 1_000_000_000;
            if let Some(job) = self.of.scrub_job(self.now) {
                self.of.scrub_done(self.now, job.run());
            }
        }
    }

    fn fold(&mut self) {
        for _ in 0..JOBS_MAX {
            let Some(job) = self.of.fold_job(self.now) else { return };
            let cut = job.cut.clone();
            self.of.fold_done(cut, job.run());
        }
    }
}

impl World {
    /// What would be if the backup's disk had lost some of what it has?
    pub(crate) fn rot(&mut self, group: usize) -> Checked {
        let mut rng = Rng::new(self.rng.clone().number());
        // It costs more than all other checks together.
        if !rng.chance(1, 8) {
            return Ok(());
        }
        let disk = self.backup.groups[group].storage.crash(&mut || false);
        let (now, mut options) = (self.backup_now(), options(&self.plan, group));
        if rng.chance(1, 2) {
            let block_bytes = *rng.pick(&[512, 4 << 10]);
            options.compress = Some(Compress { after_ms: 0, block_bytes, percent_max: 1_000 });
        }
        // What must open is probed elsewhere.
        let Ok(Some((of, _))) = Group::open(disk.clone(), now, options.clone()) else {
            return Ok(());
        };
        let mut rotten = Rotten { group, of, now, rng, flips: Vec::new() };
        if rotten.rng.chance(3, 4) {
            rotten.index();
        }
        rotten.compress();
        if !rotten.flip(&disk) {
            return Ok(());
        }
        rotten.scrub();
        self.check_rotten(&mut rotten)?;
        rotten.fold();
        rotten.scrub();
        self.check_rotten(&mut rotten)?;
        self.counts.rots += 1;
        let Rotten { of, now, rng, flips, .. } = rotten;
        drop(of);
        let disk = disk.crash(&mut || false);
        let of = match Group::open(disk.clone(), now, options) {
            Ok(Some((of, _))) => of,
            Ok(None) => return fail(Checker::Past, format!("group {group} has vanished")),
            // What says what the group is was hit.
            Err(error) if error.refusal_kind() == RefusalKind::Damaged => return Ok(()),
            Err(error) => return fail(Checker::Past, format!("damaged group {group}: {error}")),
        };
        let mut rotten = Rotten { group, of, now, rng, flips };
        rotten.scrub();
        self.check_rotten(&mut rotten)?;
        rotten.fold();
        rotten.scrub();
        self.check_rotten(&mut rotten)?;
        match rotten.rng.chance(1, 2) {
            true => self.check_restored(&mut rotten, &disk),
            false => Ok(()),
        }
    }

    /// Segments' files are restored from a copy, but for some that an operator has given up: what can be had back is had
    /// back, and what a recovery would lack is what is told.
    fn check_restored(&mut self, rotten: &mut Rotten, disk: &Memory) -> Checked {
        let group = rotten.group;
        let what = || format!("damaged group {group}, of which files were restored");
        self.check_damage_told(rotten)?;
        let known: Vec<u64> = rotten.of.damaged().iter().map(|of| of.segment).collect();
        let unknown = known.last().map_or(0, |last| last + 1);
        let refused = rotten.of.forget_damaged(unknown);
        check(matches!(refused, Err(ForgetError::Unknown { .. })), Checker::Past, || {
            format!("{}: segment {unknown} is forgotten: {refused:?}", what())
        })?;
        let mut forgotten = Vec::new();
        for of in rotten.of.damaged().iter().filter(|of| !of.given_up) {
            if rotten.rng.chance(1, 4) {
                must(rotten.of.forget_damaged(of.segment), what)?;
                forgotten.push(of.segment);
            }
        }
        for (name, at) in std::mem::take(&mut rotten.flips) {
            for dir in [JOURNAL_DIR, QUARANTINE_DIR] {
                let path = tidelock_storage::join(dir, &name);
                if disk.open(&path).is_ok() {
                    disk.flip(&path, at);
                }
            }
        }
        rotten.now.mono.0 += 2_000_000_000;
        check(must(rotten.of.check_damaged(rotten.now), what)?, Checker::Past, || {
            format!("{}: they are not looked at", what())
        })?;
        self.check_damage_told(rotten)?;
        let left = rotten.of.damaged();
        let left: Vec<_> = left.iter().filter(|of| !forgotten.contains(&of.segment)).collect();
        check(left.is_empty(), Checker::Past, || format!("{}: {left:?} is left", what()))?;
        self.check_rotten(rotten)?;
        if rotten.of.recovery().is_some() {
            return Ok(());
        }
        let lacking = !rotten.of.latest_damaged().is_empty();
        match rotten.of.recover(rotten.now, true) {
            Err(RecoverError::Damaged(_)) if lacking => Ok(()),
            Ok(_) if lacking => fail(Checker::Past, format!("{}: it is recovered", what())),
            Err(error @ RecoverError::Damaged(_)) => {
                fail(Checker::Past, format!("{}: {error}", what()))
            }
            _ => Ok(()),
        }
    }

    /// Compares the told damage of the latest state with what the history says.
    fn check_damage_told(&self, rotten: &mut Rotten) -> Checked {
        let Rotten { group, of, now, .. } = rotten;
        now.mono.0 += 2_000_000_000;
        of.tend_damage(*now);
        let Ok(past) = of.history() else { return Ok(()) };
        let Ok(latest) = past.newest().and_then(|newest| past.affected(&newest)) else {
            return Ok(());
        };
        let latest: Vec<_> =
            latest.iter().map(|of| DamagedDisk::new(past.manifest(), of)).collect();
        let status = of.status(*now);
        let is_told = latest == of.latest_damaged() && status.latest_damaged == latest;
        let is_held_back = latest.is_empty() || !status.recoverable;
        check(is_told && is_held_back, Checker::Past, || {
            format!("damaged group {group} lacks {latest:?}, and tells {status:?}")
        })
    }

    pub(crate) fn check_rotten(&mut self, rotten: &mut Rotten) -> Checked {
        let group = rotten.group;
        check(rotten.of.broken().is_none(), Checker::Past, || {
            format!("damage at rest has stopped group {group}: {:?}", rotten.of.broken())
        })?;
        let Ok(past) = rotten.of.history() else { return Ok(()) };
        let spans = match past.spans() {
            Ok(spans) => spans,
            Err(error) => return fail(Checker::Past, format!("damaged group {group}: {error}")),
        };
        let (oldest, newest) = (past.oldest_time(), past.newest_time());
        let mut asked = vec![At::Latest];
        // Before the first record there is no time to ask for.
        if oldest <= newest && newest.physical_ms() > 0 {
            let times =
                [0, 1, 2].map(|_| Hlc(oldest.0 + rotten.rng.below(newest.0 - oldest.0 + 1)));
            asked.extend(times.into_iter().chain([newest]).map(At::Hlc));
        }
        for at in asked {
            let point = match past.resolve(&at) {
                Ok(point) => point,
                Err(PastError::Initialising { .. }) => continue,
                Err(PastError::Journal(error)) => {
                    let untold = spans.iter().filter(|span| span.is_untold).any(|span| match at {
                        At::Hlc(time) => {
                            span.from <= time && span.until.is_none_or(|until| time < until)
                        }
                        _ => true,
                    });
                    check(untold, Checker::Past, || {
                        format!("damaged group {group} at {at:?}: {error}, and told are {spans:?}")
                    })?;
                    continue;
                }
                Err(error) => {
                    let what = format!("damaged group {group} at {at:?}: {error}");
                    return fail(Checker::Past, what);
                }
            };
            self.check_rotten_point(group, &past, &point)?;
        }
        Ok(())
    }

    fn check_rotten_point(
        &mut self,
        group: usize,
        past: &History<MemoryFile>,
        point: &Point,
    ) -> Checked {
        let opened = past.affected(point).and_then(|affected| Ok((affected, past.open(point)?)));
        let (affected, views) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                return fail(Checker::Past, format!("damaged group {group}, {point:?}: {error}"));
            }
        };
        for vm in self.plan.groups[group].vms.clone() {
            let writer = WriterId(self.plan.vms[vm].writer);
            let Some(expected) = self.disks_at(vm, point)? else { continue };
            for (nth, want) in expected.iter().enumerate() {
                let key = DiskKey { writer, disk: DiskId(nth as u16) };
                let (mut at, size) = (0, want.len().min(views[&key].size_bytes() as usize) as u64);
                let told = affected.iter().filter(|of| of.key == key).map(|of| of.range.clone());
                for damaged in told.chain(std::iter::once(size..size)) {
                    let mut have = vec![0; (damaged.start - at) as usize];
                    let read = match have.is_empty() {
                        true => Ok(()),
                        false => views[&key].read(at, &mut have),
                    };
                    // Damage of an image is told once the image is verified. It is never shown.
                    let of_image =
                        |error: &std::io::Error| error.to_string().starts_with("the disk image");
                    let may_be_untold = read.as_ref().is_err_and(of_image);
                    let right = may_be_untold
                        || read.is_ok() && have == want[at as usize..damaged.start as usize];
                    check(right, Checker::Past, || {
                        format!(
                            "damaged group {group} at {}: disk {nth} of vm {vm} from byte {at} to {} is not told to be \
                             damaged, and is not right: {read:?}",
                            point.hlc, damaged.start
                        )
                    })?;
                    if !damaged.is_empty() {
                        let mut one = [0];
                        let refused = views[&key].read(damaged.start, &mut one).is_err()
                            && views[&key].read(damaged.end - 1, &mut one).is_err();
                        check(refused, Checker::Past, || {
                            format!(
                                "damaged group {group}: {damaged:?} is told to be damaged, and is read"
                            )
                        })?;
                    }
                    at = damaged.end;
                }
            }
        }
        Ok(())
    }
}
