//! The activity log of a member: production's, with its file on a disk that loses what was not
//! synced, and tears what was under way.

use crate::disk::{LocalDisk, SECTOR_BYTES};
use crate::failure::{Checked, Checker, check};
use crate::guest::Known;
use crate::owner::Submitted;
use crate::plant::Plant;
use crate::world::{Event, Run, World, note};
use tidelock_daemon::activity::{
    self, Action, ActivityLog, BLOCK_BYTES, FileChange, Found, Identity, LastEnd, Opening,
    Standing, Unusable, format,
};
use tidelock_daemon::owner::replication;
use tidelock_daemon::sequencer::{Extent, RequestId};
use tidelock_protocol::ids::{DiskId, Incarnation};
use tidelock_protocol::record::Effect;

/// A guest's request that the log has to know of first.
#[derive(Debug)]
pub(crate) struct Logged {
    pub(crate) extent: Extent,
    pub(crate) effect: Effect,
    pub(crate) fua: bool,
    pub(crate) known: Known,
}

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
        let Opening { mut log, change, .. } =
            activity::open(found, geometry, &identity, incarnation, last_end);
        match (change, &mut self.vms[vm].log_file) {
            (FileChange::Append { offset, block }, Some(file)) => file.write(offset, &block, true),
            (FileChange::Append { .. }, None) => unreachable!("it was read"),
            (FileChange::Replace(bytes), file) => *file = Some(LocalDisk::new(bytes)),
        }
        if let Some(Plant::Activity(bug)) = self.plant {
            log.plant(bug);
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
    fn check_in_map(&self, vm: usize, extent: Extent) -> Checked {
        let Some(found) = self.durable_log(vm) else { return Ok(()) };
        let unit = u64::from(found.geometry.extent_bytes);
        let mut offsets = (extent.offset / unit..extent.end().div_ceil(unit)).map(|nth| nth * unit);
        let holds = offsets.all(|offset| is_mapped(&found, extent.disk, offset));
        check(holds, Checker::InMap, || {
            format!("vm {vm}: {extent:?} is admitted and not in the map")
        })
    }

    /// What a power loss would take back locally, and the backup may have.
    fn check_unsynced(&self, vm: usize) -> Checked {
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
        let is_off = self.vms[vm]
            .run
            .as_ref()
            .is_none_or(|run| matches!(run.activity.standing(), Standing::Off));
        let file = self.vms[vm].log_file.as_ref().filter(|_| !is_off)?;
        let found = format::read(file.durable(), &self.log_identity(vm)).ok()?;
        (!found.head.everything).then_some(found)
    }

    /// The log has what a request may change: the sequencer is next.
    pub(crate) fn sequence(&mut self, vm: usize, request: u64, logged: Logged) -> Checked {
        self.check_in_map(vm, logged.extent)?;
        let clocks = self.member_clocks(vm);
        self.observe_tags(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        let Logged { extent, effect, fua, known } = logged;
        let data = match &effect {
            Effect::Write(payload) => Some(payload.data().as_ptr()),
            _ => None,
        };
        let (seq, repair) = (None, None);
        let submitted = Submitted { extent, data, seq, repair, failed: false, known };
        let request = RequestId(request);
        run.submitted.insert(request, submitted);
        run.sequencer.submit(request, extent, effect, fua, clocks.now, clocks.wall_ms);
        Ok(())
    }

    /// What production's loop does for the log in each turn.
    pub(crate) fn drive_log(&mut self, vm: usize) -> Checked {
        let now = self.host_now(self.plan.vms[vm].host);
        let run = self.vms[vm].run.as_mut().expect("runs");
        let id = run.run;
        replication::drive_activity(&mut run.activity, &run.sequencer, &mut run.copying, now);
        let overflows = run.activity.counts().overflows;
        self.counts.overflows += overflows - std::mem::replace(&mut run.overflows, overflows);
        loop {
            let run = self.vms[vm].run.as_mut().expect("runs");
            let Some(action) = run.activity.poll_action() else { return Ok(()) };
            match action {
                Action::Go(request) => {
                    let logged = run.held_back.remove(&request).expect("held back");
                    self.sequence(vm, request, logged)?;
                }
                Action::Write { offset, block } => {
                    run.log_write = Some((offset, block));
                    let latency = self.local_latency(vm);
                    self.schedule.after(latency, Event::LogWritten { vm, run: id });
                }
                Action::Flush { disk, number } => {
                    let latency = self.local_latency(vm) * 2;
                    let event = Event::LogFlushed { vm, run: id, disk, number };
                    self.schedule.after(latency, event);
                }
                Action::Discard => {
                    let fails = self.local_fails(vm);
                    if !fails {
                        self.vms[vm].log_file = None;
                    }
                    let run = self.vms[vm].run.as_mut().expect("runs");
                    run.activity.discarded(!fails);
                    note!(self, "vm {vm}: its activity log is given up: {}", !fails);
                }
            }
        }
    }

    /// A block of the log was written, or not.
    pub fn log_written(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        // Rarely: after it there is no log until the next start.
        let fails = self.local_fails(vm) && self.rng.chance(1, 8);
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        let (offset, block) = member.log_write.take().expect("under way");
        if fails {
            self.tear_log(vm, Some((offset, block)));
        } else if let Some(file) = &mut state.log_file {
            file.write(offset, &block, true);
        }
        self.vms[vm].run.as_mut().expect("runs").activity.written(!fails);
        self.check_unsynced(vm)?;
        self.check_unrecorded(vm)?;
        self.owner_turn(vm)
    }

    /// A flush that the log has asked for has ended.
    pub fn log_flushed(&mut self, vm: usize, run: Run, disk: DiskId, number: u64) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let fails = self.local_fails(vm);
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        if fails {
            member.poisoned.insert(disk);
        } else {
            state.disks[usize::from(disk.0)].sync();
        }
        member.activity.flush_ended(disk, number, !fails);
        self.owner_turn(vm)
    }

    /// A block was under way: any part of it may be there.
    pub(crate) fn tear_log(&mut self, vm: usize, under_way: Option<(u64, Vec<u8>)>) {
        let (Some((offset, block)), Some(file)) = (under_way, &mut self.vms[vm].log_file) else {
            return;
        };
        let keep = self.rng.number();
        for (nth, sector) in block.chunks_exact(SECTOR_BYTES as usize).enumerate() {
            if keep >> nth & 1 == 1 {
                file.write(offset + nth as u64 * SECTOR_BYTES, sector, false);
            }
        }
        debug_assert_eq!(block.len(), BLOCK_BYTES);
    }
}
