//! The activity log of a member: production's, with its file on a disk that loses what was not
//! synced, and tears what was under way.

use crate::disk::{LocalDisk, SECTOR_BYTES};
use crate::failure::{Checked, Checker, check};
use crate::world::{World, note};
use tidelock_daemon::activity::{
    self, ActivityLog, BLOCK_BYTES, FileChange, Found, Identity, LastEnd, Opening, Unusable, format,
};
use tidelock_daemon::sequencer::Extent;
use tidelock_protocol::ids::{DiskId, Incarnation};

pub(crate) fn is_mapped(found: &Found, disk: DiskId, offset: u64) -> bool {
    let at = Extent { disk, offset, len_bytes: 1 };
    let mut entries = found.slots.iter().flatten();
    entries.any(|entry| found.geometry.extent_of(*entry, u64::MAX >> 1).overlaps(&at))
}

impl World {
    /// Opens a member's activity log as a daemon does before it serves the member.
    pub(crate) fn open_log(
        &mut self,
        vm: usize,
        incarnation: Incarnation,
        last_end: LastEnd,
    ) -> ActivityLog {
        let plan = &self.plan.vms[vm];
        let Some(geometry) = plan.log.filter(|_| plan.is_writer()) else {
            return ActivityLog::off();
        };
        let identity = self.log_identity(vm);
        let file = self.vms[vm].log_file.as_ref();
        let found =
            file.map_or(Err(Unusable::Missing), |file| format::read(file.live(), &identity));
        let what = match &found {
            Ok(found) => format!("transaction {}", found.head.number),
            Err(why) => why.to_string(),
        };
        note!(self, "vm {vm}: its activity log: {what}");
        let Opening { log, change, .. } =
            activity::open(found, geometry, &identity, incarnation, last_end);
        match (change, &mut self.vms[vm].log_file) {
            (FileChange::Append { offset, block }, Some(file)) => file.write(offset, &block, true),
            (FileChange::Append { .. }, None) => unreachable!("it was read"),
            (FileChange::Replace(bytes), file) => *file = Some(LocalDisk::new(bytes)),
        }
        log
    }

    fn log_identity(&self, vm: usize) -> Identity {
        let plan = &self.plan.vms[vm];
        let disk = |(nth, disk): (usize, &crate::scenario::DiskPlan)| {
            (DiskId(nth as u16), format!("d{nth}"), disk.content.len() as u64)
        };
        Identity {
            group: self.plan.groups[plan.group].name.clone(),
            member: plan.name.clone(),
            disks: plan.disks.iter().enumerate().map(disk).collect(),
        }
    }

    /// What is admitted may be at one site and not at the other from here on: what a power loss now
    /// would leave of the log has it, or says that everything may differ.
    pub(crate) fn check_in_map(&self, vm: usize, extent: Extent) -> Checked {
        let Some(found) = self.durable_log(vm) else { return Ok(()) };
        let unit = u64::from(found.geometry.extent_bytes);
        let mut offsets = (extent.offset / unit..extent.end().div_ceil(unit)).map(|nth| nth * unit);
        let holds = offsets.all(|offset| is_mapped(&found, extent.disk, offset));
        check(holds, Checker::InMap, || {
            format!("vm {vm}: {extent:?} is admitted and not in the map")
        })
    }

    /// What a power loss would take back locally, and the backup may have.
    pub(crate) fn check_unsynced(&self, vm: usize) -> Checked {
        let Some(found) = self.durable_log(vm) else { return Ok(()) };
        for (nth, disk) in self.vms[vm].disks.iter().enumerate() {
            let disk_id = DiskId(nth as u16);
            let outside = disk.unsynced().find(|offset| !is_mapped(&found, disk_id, *offset));
            check(outside.is_none(), Checker::InMap, || {
                format!("vm {vm}: disk {nth} is not flushed at {outside:?}, which left the map")
            })?;
        }
        Ok(())
    }

    /// What a power loss now would leave of a log, if one is kept that says where the sites differ.
    pub(crate) fn durable_log(&self, vm: usize) -> Option<Found> {
        let is_off = self.vms[vm].run.as_ref().is_none_or(|run| !run.is_logged());
        let file = self.vms[vm].log_file.as_ref().filter(|_| !is_off)?;
        let found = format::read(file.durable(), &self.log_identity(vm)).ok()?;
        (!found.head.everything).then_some(found)
    }

    /// A block of the log was written, or not: then any part of it may be there.
    pub(crate) fn log_written(&mut self, vm: usize, at: u64, block: &[u8], fails: bool) {
        if fails {
            self.tear_log(vm, at, block);
        } else if let Some(file) = &mut self.vms[vm].log_file {
            file.write(at, block, true);
        }
    }

    /// Counts what the log has made wait.
    pub(crate) fn look_at_log(&mut self, vm: usize) {
        let Some(run) = &mut self.vms[vm].run else { return };
        let Some(owner) = &run.owner else { return };
        let counts = owner.activity().counts();
        let now = (counts.overflows, counts.misses);
        let before = std::mem::replace(&mut run.log_counts, now);
        self.counts.overflows += now.0 - before.0;
        self.counts.logged += now.1 - before.1;
    }

    /// A block was under way: any part of it may be there.
    pub(crate) fn tear_log(&mut self, vm: usize, at: u64, block: &[u8]) {
        let Some(file) = &mut self.vms[vm].log_file else { return };
        let keep = self.rng.number();
        for (nth, sector) in block.chunks_exact(SECTOR_BYTES as usize).enumerate() {
            if keep >> nth & 1 == 1 {
                file.write(at + nth as u64 * SECTOR_BYTES, sector, false);
            }
        }
        debug_assert_eq!(block.len(), BLOCK_BYTES);
    }
}
