//! A disk of a member becomes larger, as `docs/manual/changes.md` says under "What can be changed": the daemon of its host is
//! stopped, the image or device is made larger, the daemon is started. What is new reads as zeroes where somebody has made
//! a file longer, and as anything where a device was extended.
//!
//! At the backup it is zeroes at every point in time until the host has brought it across, so the oracle
//! ([`grow`](crate::oracle::WriterOracle::grow)) extends all lives before with them. As long as the backup has not heard of
//! it, its disk has its old size; when it has attached the run that brings it, it has the new one.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check};
use crate::rng::Rng;
use crate::scenario::{FAULTS, Fault, Scenario};
use crate::world::{World, note};
use tidelock_protocol::ids::WriterId;

/// A disk that is larger does not grow any more.
const SIZE_MAX_BYTES: usize = 3 << 20;

/// Draws whether disks grow. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    if !rng.chance(1, 4) {
        return;
    }
    plan.grows = true;
    let change = FAULTS.iter().position(|fault| *fault == Fault::Change).expect("is one");
    plan.fault_weights[change] = plan.fault_weights[change].max(rng.range(4..16) as u32);
}

impl World {
    /// One of a member's disks becomes larger.
    pub(crate) fn grow(&mut self, vm: usize) {
        let disk = self.rng.index(self.vms[vm].disks.len());
        let had_bytes = self.plan.vms[vm].disks[disk].content.len();
        if had_bytes > SIZE_MAX_BYTES {
            return;
        }
        // Seldom more than a log's map can hold.
        let sectors = if self.rng.chance(1, 8) { 400 } else { 48 };
        let mut new = vec![0; (self.rng.range(1..sectors) * SECTOR_BYTES) as usize];
        let is_file = self.rng.chance(1, 2);
        if !is_file {
            for chunk in new.chunks_mut(8) {
                chunk.copy_from_slice(&self.rng.number().to_le_bytes());
            }
        }
        note!(self, "vm {vm}: disk {disk} grows by {} bytes, a file {is_file}", new.len());
        let plan = &mut self.plan.vms[vm].disks[disk];
        plan.content.extend_from_slice(&new);
        if !is_file {
            plan.allocated.push(had_bytes as u64..(had_bytes + new.len()) as u64);
        }
        let state = &mut self.vms[vm];
        state.disks[disk].grow(&new);
        state.oracle.grow(disk, &new);
        // What is new is compared.
        state.must_go_on = false;
        self.counts.grown += 1;
    }

    /// The backup has attached a member: its disks there are as large as here.
    pub(crate) fn check_has_grown(&self, vm: usize) -> Checked {
        let plan = &self.plan.vms[vm];
        let Some(of) = self.backup.groups[plan.group].group() else { return Ok(()) };
        let known = of.manifest().member(WriterId(plan.writer));
        let sizes = known.map(|member| member.disks.iter().map(|disk| disk.size_bytes));
        let is_as_here = sizes.is_some_and(|sizes| {
            let here = plan.disks.iter().map(|disk| disk.content.len() as u64);
            sizes.eq(here)
        });
        check(is_as_here, Checker::SitesEqual, || {
            format!("vm {vm} is attached, and its disks have other sizes: {known:?}")
        })
    }
}
