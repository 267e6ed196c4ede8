//! The activity log of a member: production's, with its file on a disk that loses what was not
//! synced, and tears what was under way.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check};
use crate::world::World;
use std::io::IoSlice;
use tidelock_daemon_core::activity::place::LogPlace;
use tidelock_daemon_core::activity::{BLOCK_BYTES, Found, Identity, format};
use tidelock_daemon_core::sequencer::Extent;
use tidelock_protocol::ids::DiskId;
use tidelock_storage::memory::Memory;
use tidelock_storage::{Storage, StorageFile};

pub(crate) fn is_mapped(found: &Found, disk: DiskId, offset: u64) -> bool {
    let at = Extent { disk, offset, len_bytes: 1 };
    let mut entries = found.slots.iter().flatten();
    entries.any(|entry| found.geometry.extent_of(*entry, u64::MAX >> 1).overlaps(&at))
}

impl World {
    /// The place of a member's log on its host's disk.
    pub(crate) fn log_place(&self, vm: usize) -> LogPlace<Memory> {
        let plan = &self.plan.vms[vm];
        let state_dir = self.hosts[plan.host].state_dir.clone();
        LogPlace::new(state_dir, &self.plan.groups[plan.group].name, &plan.name)
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
        let state_dir = &self.hosts[self.plan.vms[vm].host].state_dir;
        let file = state_dir.durable(&self.log_place(vm).file()).filter(|_| !is_off)?;
        let found = format::read(&file, &self.log_identity(vm)).ok()?;
        (!found.head.everything).then_some(found)
    }

    /// A block of the log is written durably. Returns whether it was: if not, any part of it may be there.
    pub(crate) fn write_log(&mut self, vm: usize, at: u64, block: &[u8], fails: bool) -> bool {
        if fails {
            self.tear_log(vm, at, block);
            return false;
        }
        let state_dir = &self.hosts[self.plan.vms[vm].host].state_dir;
        let written = state_dir.open(&self.log_place(vm).file()).and_then(|file| {
            file.write_at(&[IoSlice::new(block)], at)?;
            file.sync()
        });
        written.is_ok()
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
        let keep = self.rng.number();
        let state_dir = &self.hosts[self.plan.vms[vm].host].state_dir;
        let Ok(file) = state_dir.open(&self.log_place(vm).file()) else { return };
        for (nth, sector) in block.chunks_exact(SECTOR_BYTES as usize).enumerate() {
            if keep >> nth & 1 == 1 {
                // A disk without power takes no sector.
                let _ = file.write_at(&[IoSlice::new(sector)], at + nth as u64 * SECTOR_BYTES);
            }
        }
        debug_assert_eq!(block.len(), BLOCK_BYTES);
    }
}
