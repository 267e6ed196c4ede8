//! Operations on the local disks and on the activity log's file: they end when the schedule says so, in any order, some
//! fail, and some are done in part.

use crate::disk::{LocalDisk, SECTOR_BYTES};
use crate::failure::Checked;
use crate::ring::Io;
use crate::world::{Event, Run, World, note};
use std::io;
use tidelock_daemon::driver::token::Token;
use tidelock_daemon_core::backlog::BacklogError;
use tidelock_daemon_core::owner::driver::DiskOp;
use tidelock_daemon_core::sequencer::{EIO, OpId};
use tidelock_protocol::record::{Effect, Record};
use tidelock_uring::{AlignedBuf, Buffer};

/// So many operations that move more than a sector are done in part.
const SHORT_ONE_IN: u64 = 200;

impl World {
    /// The loop asks for an operation.
    pub(crate) fn begin_io(&mut self, vm: usize, op: DiskOp, io: Io) {
        let latency = self.local_latency(vm);
        let after = if matches!(io, Io::Sync { .. }) { latency * 2 } else { latency };
        let member = self.vms[vm].run.as_mut().expect("runs");
        if DiskOp::Local(member.step_of.unwrap_or(OpId(u64::MAX))) == op {
            member.step_of = None;
        }
        member.in_flight.insert(op, io);
        let run = member.run;
        self.schedule.after(after, Event::DiskDone { vm, run, op });
    }

    /// An operation has ended.
    pub fn disk_done(&mut self, vm: usize, run: Run, op: DiskOp) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let member = self.vms[vm].run.as_mut().expect("runs");
        if member.has_died.is_some() {
            return Ok(());
        }
        if self.waits_for_loop(vm, Event::DiskDone { vm, run, op }) {
            return Ok(());
        }
        let member = self.vms[vm].run.as_mut().expect("runs");
        let Some(io) = member.in_flight.remove(&op) else { panic!("{op:?} is not in flight") };
        let fails = self.local_fails(vm);
        let (result, buffer) = match io {
            Io::Read { disk, buf, len, at } => {
                let disk = usize::from(disk.0);
                self.read_done(vm, disk, buf, len, at, fails)
            }
            Io::Write { disk, data, at, durable } => {
                let done = self.part_of(data.len(), fails);
                let state = &mut self.vms[vm];
                state.disks[usize::from(disk.0)].write(at, &data[..done], durable && !fails);
                self.is_written(vm, op, usize::from(disk.0));
                (Ok(done as u32), None)
            }
            Io::Zero { disk, range } if !fails => {
                let zeroes = vec![0; (range.end - range.start) as usize];
                self.vms[vm].disks[usize::from(disk.0)].write(range.start, &zeroes, false);
                self.is_written(vm, op, usize::from(disk.0));
                (Ok(0), None)
            }
            Io::Zero { .. } => (Ok(0), None),
            Io::Sync { disk } => {
                if fails {
                    self.vms[vm].run.as_mut().expect("runs").poisoned.insert(disk);
                } else {
                    self.vms[vm].disks[usize::from(disk.0)].sync();
                }
                (Ok(0), None)
            }
            Io::Log { block, at } => {
                // Rarely: after it there is no log until the next start.
                let fails = fails && self.rng.chance(1, 8);
                let is_written = self.write_log(vm, at, &block, fails);
                let result = if is_written { Ok(block.len() as u32) } else { Err(eio()) };
                return self.ended(vm, op, result, None);
            }
        };
        self.ended(vm, op, if fails { Err(eio()) } else { result }, buffer)
    }

    fn ended(
        &mut self,
        vm: usize,
        op: DiskOp,
        result: io::Result<u32>,
        buffer: Option<AlignedBuf>,
    ) -> Checked {
        let failed = result.is_err();
        if let DiskOp::Local(id) = op {
            if failed {
                self.local_op_failed(vm, id);
            }
            // If another step of it follows, that is the first thing that the loop asks for.
            self.vms[vm].run.as_mut().expect("runs").step_of = Some(id);
        }
        if op == DiskOp::LogWrite {
            self.check_unsynced(vm)?;
            self.check_unrecorded(vm)?;
        }
        let buffer = buffer.map_or(Buffer::None, Buffer::Aligned);
        self.ring_ends(vm, Token::Disk(op).to_u64(), result, buffer)
    }

    /// The part of a transfer that is done.
    fn part_of(&mut self, len: usize, fails: bool) -> usize {
        let sectors = len / SECTOR_BYTES as usize;
        match fails {
            true => self.rng.index(sectors + 1) * SECTOR_BYTES as usize,
            false if sectors > 1 && self.rng.chance(1, SHORT_ONE_IN) => {
                (1 + self.rng.index(sectors - 1)) * SECTOR_BYTES as usize
            }
            false => len,
        }
    }

    fn read_done(
        &mut self,
        vm: usize,
        disk: usize,
        mut buf: AlignedBuf,
        len: usize,
        at: u64,
        fails: bool,
    ) -> (io::Result<u32>, Option<AlignedBuf>) {
        let done = if fails { 0 } else { self.part_of(len, false) };
        let live = self.vms[vm].disks[disk].live();
        let end = live.len().min(at as usize + done);
        buf.extend_from_slice(&live[at as usize..end]);
        // A disk may end within a sector.
        buf.extend_zeroed(done - (end - at as usize));
        (Ok(done as u32), Some(buf))
    }

    /// All of a disk that has been written to may have storage.
    fn is_written(&mut self, vm: usize, op: DiskOp, disk: usize) {
        let of = &self.vms[vm].disks[disk];
        let (size_bytes, write) = (of.size_bytes(), of.last_write());
        let run = self.vms[vm].run.as_mut().expect("runs");
        if let DiskOp::Local(id) = op {
            let unrecorded = || run.unrecorded.get(&id).and_then(|(request, ..)| *request);
            let request = run.op_requests.get(&id).copied().or_else(unrecorded);
            if let Some(of) = request.and_then(|request| run.submitted.get_mut(&request)) {
                of.written = Some(write);
            }
        }
        run.shapes[disk].borrow_mut().allocated = std::iter::once(0..size_bytes).collect();
    }

    /// The sequencer's operation has failed: its extent may hold anything.
    fn local_op_failed(&mut self, vm: usize, op: OpId) {
        let state = &mut self.vms[vm];
        let member = state.run.as_mut().expect("runs");
        if let Some((_, extent, _)) = member.unrecorded.get(&op) {
            let disk = state.disks[usize::from(extent.disk.0)].live();
            let live = &disk[extent.offset as usize..extent.end() as usize];
            state.oracle.failed_unrecorded(*extent, live, member.life);
            return;
        }
        let request = member.op_requests.get(&op).and_then(|r| member.submitted.get_mut(r));
        let Some(submitted) = request.filter(|submitted| !submitted.failed) else { return };
        submitted.failed = true;
        let damaged = submitted.extent;
        state.oracle.damage(damaged);
        note!(self, "vm {vm}: the local disk fails a write of {damaged:?}");
    }

    /// Does again on the local disks the writes that an earlier process was killed in.
    pub(crate) fn redo(&mut self, vm: usize) -> Checked {
        let Some(run) = &self.vms[vm].run else { return Ok(()) };
        let redone = std::mem::take(&mut *run.redone.lock().expect("one thread"));
        let Some((records, last)) = redone.split_last().map(|(last, _)| (&redone, last)) else {
            return Ok(());
        };
        note!(self, "vm {vm} goes on with what is on disk up to {}, done again", last.seq);
        let state = &mut self.vms[vm];
        for record in records {
            do_again(record, &mut state.disks);
            state.oracle.done_again(record);
        }
        state.disks.iter_mut().for_each(LocalDisk::sync);
        self.counts.gone_on += 1;
        let disks: Vec<_> = state.disks.iter().map(LocalDisk::live).collect();
        state.oracle.goes_on(&disks)
    }

    /// Disks that the loop has synced by itself, at its clean end.
    pub(crate) fn sync_at_the_end(&mut self, vm: usize) {
        let Some(run) = &self.vms[vm].run else { return };
        let synced = run.ends.synced.take();
        for disk in synced {
            self.vms[vm].disks[usize::from(disk.0)].sync();
        }
    }

    /// A daemon is gone: what was under way on the local disks may be done, in part.
    pub(crate) fn disks_go_on(&mut self, vm: usize, in_flight: Vec<Io>) {
        for io in in_flight {
            match io {
                Io::Write { disk, data, at, .. } => {
                    let done = match self.rng.below(3) {
                        0 => 0,
                        1 => data.len(),
                        _ => self.rng.index(data.len() + 1) / 512 * 512,
                    };
                    self.vms[vm].disks[usize::from(disk.0)].write(at, &data[..done], false);
                }
                Io::Zero { disk, range } if self.rng.chance(1, 2) => {
                    let zeroes = vec![0; (range.end - range.start) as usize];
                    self.vms[vm].disks[usize::from(disk.0)].write(range.start, &zeroes, false);
                }
                Io::Log { block, at } => self.tear_log(vm, at, &block),
                _ => {}
            }
        }
    }
}

fn eio() -> io::Error {
    io::Error::from_raw_os_error(EIO)
}

fn do_again(record: &Record, disks: &mut [LocalDisk]) {
    let disk = &mut disks[usize::from(record.body.disk.0)];
    match &record.body.effect {
        Effect::Write(payload) => disk.write(record.body.offset, payload.data(), false),
        Effect::Zero { len_bytes, .. } => {
            disk.write(record.body.offset, &vec![0; *len_bytes as usize], false);
        }
        Effect::CopyDone | Effect::Idle => {}
    }
}

/// Production's redo, with the world's disks: see [`World::redo`].
pub(crate) fn redone(
    again: tidelock_daemon_core::backlog::Redo,
    into: &std::sync::Mutex<Vec<Record>>,
) -> Result<u64, String> {
    let mut records = into.lock().expect("one thread");
    let done = again.run(|record| {
        records.push(record.clone());
        Ok::<(), BacklogError>(())
    });
    done.map_err(|error| error.to_string())
}
