//! Journals that cannot be opened: bytes of a copy of the backup's disk are flipped where opening reads them, and the
//! journal is cut with production's repair ([`tidelock_store::journal::repair`]), also interrupted by a power loss. The
//! group that is left opens, and what it shows is a beginning of what the oracle has.

use crate::backup::options;
use crate::failure::{Checked, Checker, check, fail};
use crate::rng::Rng;
use crate::rot::Rotten;
use crate::travelling::must;
use crate::world::World;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::RefusalKind;
use tidelock_protocol::vector::CountVector;
use tidelock_replica::group::{Group, JOURNAL_DIR};
use tidelock_replica::quarantine::QUARANTINE_DIR;
use tidelock_storage::memory::{Faults, Memory};
use tidelock_storage::{Storage, StorageFile};
use tidelock_store::fold;
use tidelock_store::journal::{self, RepairError, SEGMENT_HEADER_BYTES, SegmentHeader};

/// Keeps these numbers apart from those of others who draw from the same place.
const SALT: u64 = 0x7265_7061;
/// Most cuts of one journal.
const TRIES_MAX: usize = 16;
/// Header and checkpoint of a segment are about here.
const BEGINNING_BYTES: u64 = SEGMENT_HEADER_BYTES as u64 + 256;

impl World {
    /// Cuts the journal on a copy of the disk on which it cannot be opened.
    pub(crate) fn repair_journal(&mut self, group: usize) -> Checked {
        let mut rng = Rng::new(self.rng.clone().number() ^ SALT);
        if !rng.chance(1, 8) {
            return Ok(());
        }
        let disk = self.backup.groups[group].storage.crash(&mut || false);
        let flipped = flip(&disk, &mut rng);
        let (now, options) = (self.backup_now(), options(&self.plan, group));
        match Group::open(disk.killed(), now, options.clone()) {
            Err(error) if error.refusal_kind() == RefusalKind::Damaged => {}
            _ => return Ok(()),
        }
        let what = || format!("group {group}, of which {flipped:?} are damaged");
        let plan = |disk: &Memory| {
            let folded = fold::read_position(disk).expect("nothing of it was flipped");
            journal::plan_repair(disk, JOURNAL_DIR, &folded.in_images(), options.journal)
        };
        // If a single segment is damaged, the first plan says what will be left. If several are, a cut may uncover the next
        // one.
        let is_one = flipped.iter().all(|(path, _)| *path == flipped[0].0);
        let (mut disk, mut kept) = (disk, None);
        for _ in 0..TRIES_MAX {
            let planned = match plan(&disk) {
                Ok(Some(planned)) => planned,
                Ok(None) if kept.is_some() => break,
                // The operator must have a copy.
                Err(RepairError::Folded { .. }) if kept.is_none() || !is_one => return Ok(()),
                Err(RepairError::Recovered { .. })
                    if self.backup.groups[group].recovered.is_some() =>
                {
                    return Ok(());
                }
                other => return fail(Checker::Past, format!("{}: {other:?}", what())),
            };
            let power_off_at =
                (kept.is_none() && rng.chance(1, 2)).then(|| disk.ops() + rng.below(12));
            let left: CountVector =
                (0..).map(WriterId).zip(planned.writers.iter().map(|(kept, _)| *kept)).collect();
            let is_same = kept.replace(left.clone()).is_none_or(|before| before == left);
            check(is_same || !is_one, Checker::Past, || format!("{}: now {planned:?}", what()))?;
            disk.set_faults(Faults { power_off_at, ..Faults::default() });
            if let Err(error) = journal::repair(&disk, JOURNAL_DIR, QUARANTINE_DIR, &planned) {
                check(power_off_at.is_some(), Checker::Past, || format!("{}: {error}", what()))?;
                disk = disk.crash(&mut || rng.chance(1, 2));
            }
            disk.set_faults(Faults::default());
        }
        let Some((of, _)) = must(Group::open(disk, now, options), what)? else {
            return fail(Checker::Past, format!("{}: it has vanished", what()));
        };
        self.counts.repairs += 1;
        let left = of.state().journaled();
        check(Some(&left) == kept.as_ref(), Checker::Past, || {
            format!("{}: left is {left}, planned was {kept:?}", what())
        })?;
        // Payloads before the cut may be damaged, too: they are told.
        let mut rotten = Rotten { group, of, now, rng, flips: Vec::new() };
        rotten.scrub();
        self.check_rotten(&mut rotten)
    }
}

/// Flips some bytes of the newest segment, or of the beginning of another one.
fn flip(disk: &Memory, rng: &mut Rng) -> Vec<(String, u64)> {
    let names = disk.list(JOURNAL_DIR).unwrap_or_default();
    let index = |name: &String| Some((SegmentHeader::parse_file_name(name)?, name.clone()));
    let mut segments: Vec<_> = names.iter().filter_map(index).collect();
    segments.sort();
    let Some((_, last)) = segments.last() else { return Vec::new() };
    let mut flipped = Vec::new();
    for _ in 0..rng.range(1..4) {
        let (name, is_last) = match rng.below(3) {
            0 => (&segments[rng.index(segments.len())].1, false),
            _ => (last, true),
        };
        let path = tidelock_storage::join(JOURNAL_DIR, name);
        let size = disk.open(&path).and_then(|file| file.size_bytes()).unwrap_or_default();
        let within = if is_last { size } else { size.min(BEGINNING_BYTES) };
        if within > 0 {
            let at = rng.below(within);
            disk.flip(&path, at);
            flipped.push((path, at));
        }
    }
    flipped
}
