//! Operations of the sequencer on the local disks: they end when the schedule says so, in any
//! order, and some fail.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check};
use crate::owner::MemberRun;
use crate::world::{Event, Run, World, note};
use bytes::Bytes;
use tidelock_daemon::owner::replication::Clocks;
use tidelock_daemon::sequencer::{DiskError, Extent, OpId};

const EIO: i32 = 5;
/// One step of an operation on the local disk.
#[derive(Debug)]
pub(crate) enum LocalOp {
    Write {
        extent: Extent,
        data: Vec<u8>,
        fua: bool,
    },
    /// An unaligned write reads its blocks, changes and writes them.
    Patch {
        extent: Extent,
        data: Vec<u8>,
        fua: bool,
    },
    Read {
        extent: Extent,
    },
}

impl LocalOp {
    pub(crate) fn extent(&self) -> Extent {
        match self {
            LocalOp::Write { extent, .. }
            | LocalOp::Patch { extent, .. }
            | LocalOp::Read { extent } => *extent,
        }
    }
}
impl World {
    pub(crate) fn start_write(
        &mut self,
        vm: usize,
        op: OpId,
        extent: Extent,
        local: LocalOp,
    ) -> Checked {
        let latency = self.local_latency(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        check_overlap(run, extent)?;
        // The one whose record was sent last among those of this extent.
        let request = run
            .submitted
            .iter()
            .filter(|(_, s)| s.extent == extent && s.seq.is_some())
            .max_by_key(|(_, s)| s.seq)
            .map(|(request, _)| *request);
        if let Some(request) = request {
            run.op_requests.insert(op, request);
        }
        run.local_ops.insert(op, local);
        let id = run.run;
        self.schedule.after(latency, Event::LocalDone { vm, run: id, op });
        Ok(())
    }

    pub(crate) fn start_read(&mut self, vm: usize, op: OpId, extent: Extent) -> Checked {
        let latency = self.local_latency(vm);
        let run = self.vms[vm].run.as_mut().expect("runs");
        if run.op_requests.contains_key(&op) {
            // Reading back after an error: the extent is still this operation's.
        } else {
            check_overlap(run, extent)?;
        }
        run.local_ops.insert(op, LocalOp::Read { extent });
        let id = run.run;
        self.schedule.after(latency, Event::LocalDone { vm, run: id, op });
        Ok(())
    }

    /// A step of a local operation has ended.
    pub fn local_done(&mut self, vm: usize, run: Run, op: OpId) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let clocks = self.member_clocks(vm);
        let fails = self.local_fails(vm);
        let (latency, part) = (self.local_latency(vm), self.rng.number());
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        let local = member.local_ops.remove(&op).expect("an operation in flight");
        let disk = &mut state.disks[usize::from(local.extent().disk.0)];
        match local {
            LocalOp::Patch { extent, data, fua } if !fails => {
                // The blocks are read now and written as a whole later.
                let blocks = extent.aligned_to(SECTOR_BYTES);
                let end = blocks.end().min(disk.size_bytes());
                let mut patched = disk.live()[blocks.offset as usize..end as usize].to_vec();
                let at = (extent.offset - blocks.offset) as usize;
                patched[at..at + data.len()].copy_from_slice(&data);
                let extent = Extent { len_bytes: patched.len() as u64, ..blocks };
                member.local_ops.insert(op, LocalOp::Write { extent, data: patched, fua });
                self.schedule.after(latency, Event::LocalDone { vm, run, op });
                return Ok(());
            }
            LocalOp::Write { data, extent, .. } if fails => {
                let done = (part % (data.len() as u64 + 1)) as usize / 512 * 512;
                disk.write(extent.offset, &data[..done], false);
                self.local_write_failed(vm, op, extent, clocks);
            }
            LocalOp::Patch { extent, .. } => self.local_write_failed(vm, op, extent, clocks),
            LocalOp::Write { extent, data, fua } => {
                disk.write(extent.offset, &data, fua);
                member.op_requests.remove(&op);
                member.unrecorded.remove(&op);
                member.sequencer.written(op, Ok(()), clocks.now, clocks.wall_ms);
            }
            LocalOp::Read { extent } => {
                let live = &disk.live()[extent.offset as usize..extent.end() as usize];
                let result =
                    if fails { Err(DiskError(EIO)) } else { Ok(Bytes::copy_from_slice(live)) };
                member.op_requests.remove(&op);
                member.sequencer.read_done(op, result, clocks.now, clocks.wall_ms);
            }
        }
        self.owner_turn(vm)
    }

    fn local_write_failed(&mut self, vm: usize, op: OpId, extent: Extent, clocks: Clocks) {
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        if let Some((_, extent, _)) = member.unrecorded.remove(&op) {
            let disk = state.disks[usize::from(extent.disk.0)].live();
            let live = &disk[extent.offset as usize..extent.end() as usize];
            state.oracle.failed_unrecorded(extent, live, member.life);
            member.sequencer.written(op, Err(DiskError(EIO)), clocks.now, clocks.wall_ms);
            return;
        }
        let request = member.op_requests.get(&op).and_then(|r| member.submitted.get_mut(r));
        let mut damaged = extent;
        if let Some(submitted) = request {
            submitted.failed = true;
            damaged = submitted.extent;
        }
        state.oracle.damage(damaged);
        member.sequencer.written(op, Err(DiskError(EIO)), clocks.now, clocks.wall_ms);
        note!(self, "vm {vm}: the local disk fails a write of {damaged:?}");
    }
}

/// Rule 2: the overlap rule, looked at the slow way.
fn check_overlap(run: &MemberRun, extent: Extent) -> Checked {
    let block = extent.aligned_to(SECTOR_BYTES);
    let other =
        run.local_ops.values().find(|op| op.extent().aligned_to(SECTOR_BYTES).overlaps(&block));
    check(other.is_none(), Checker::Overlap, || {
        format!("{extent:?} starts while {:?} is in flight", other.map(LocalOp::extent))
    })
}
