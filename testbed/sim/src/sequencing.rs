//! The sequencer's actions as the checkers see them, before the loop carries them out: what is admitted, what begins on
//! the local disks, what it suspects.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check, fail};
use crate::oracle::Point;
use crate::owner::Submitted;
use crate::world::{World, note};
use tidelock_daemon_core::ceiling;
use tidelock_daemon_core::link::port::EpochKeeper;
use tidelock_daemon_core::sequencer::{Action, Extent, OpId, RECORD_OVERHEAD_BYTES};
use tidelock_protocol::record::{Effect, Record, Role};

impl World {
    /// The loop is about to do this.
    pub(crate) fn sees(&mut self, vm: usize, action: Action) -> Checked {
        match action {
            Action::Send(record) => {
                let is_recorded = record.role() == Role::Change;
                self.vms[vm].run.as_mut().expect("runs").is_recorded = is_recorded;
                self.admit(vm, record)
            }
            Action::Write { op, extent, effect, .. } => {
                let run = self.vms[vm].run.as_mut().expect("runs");
                if !std::mem::take(&mut run.is_recorded) {
                    self.is_unrecorded(vm, op, extent, &effect);
                }
                self.check_overlap(vm, op, extent)?;
                let run = self.vms[vm].run.as_mut().expect("runs");
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
                run.local_ops.insert(op, extent);
                self.check_in_map(vm, extent)
            }
            Action::Read { op, extent } => {
                self.check_overlap(vm, op, extent)?;
                self.vms[vm].run.as_mut().expect("runs").local_ops.insert(op, extent);
                Ok(())
            }
            Action::Suspect(extent) => {
                note!(self, "vm {vm}: {extent:?} may differ");
                Ok(())
            }
            Action::Publish(..)
            | Action::SendInOrder(_)
            | Action::FindHole { .. }
            | Action::Complete(..)
            | Action::Copied { .. } => Ok(()),
        }
    }

    /// Rule 2: the overlap rule, looked at the slow way.
    fn check_overlap(&self, vm: usize, op: OpId, extent: Extent) -> Checked {
        let run = self.vms[vm].run.as_ref().expect("runs");
        let block = extent.aligned_to(SECTOR_BYTES);
        let mut others = run.local_ops.iter().filter(|(other, _)| **other != op);
        let other = others.find(|(_, other)| other.aligned_to(SECTOR_BYTES).overlaps(&block));
        check(other.is_none(), Checker::Overlap, || {
            format!("{extent:?} starts while {other:?} is in flight")
        })
    }

    /// A record is admitted: the oracle writes it down.
    fn admit(&mut self, vm: usize, record: Record) -> Checked {
        let state = &mut self.vms[vm];
        let extent = Extent {
            disk: record.body.disk,
            offset: record.body.offset,
            len_bytes: record.body.len_bytes().into(),
        };
        let run = state.run.as_mut().expect("runs");
        state.oracle.admitted(&record)?;
        let ceiling_ms = run.state.greatest().physical_ms();
        let next_run = ceiling::floor_above(ceiling_ms);
        check(record.hlc < next_run, Checker::HlcGrows, || {
            format!(
                "record {} has time {}, the next run may begin at {next_run}",
                record.seq, record.hlc
            )
        })?;
        let payload = record.payload().map(|p| (p.data().as_ptr(), p.data().len() as u64));
        if record.role() == Role::Idle {
            self.counts.idles += 1;
        } else if record.role().is_of_copy() {
            let disk = state.disks[usize::from(record.body.disk.0)].live();
            let live = &disk[extent.offset as usize..extent.end() as usize];
            state.oracle.copied(&record, live)?;
            for submitted in run.submitted.values_mut() {
                if submitted.failed && submitted.extent == extent {
                    submitted.repair = Some(record.seq);
                }
            }
        } else {
            let data = payload.map(|(data, _)| data);
            let open = run.submitted.values_mut().filter(|s| s.seq.is_none());
            let is_it = |s: &&mut Submitted| s.extent == extent && s.data == data;
            // A client that has connected anew may ask for the same zeroes while the first request is under way.
            let Some(submitted) = open.filter(is_it).min_by_key(|s| s.nth) else {
                return fail(Checker::Prefix, format!("record {} of no request", record.seq));
            };
            submitted.seq = Some(record.seq);
            state.oracle.wrote(&record, submitted.known.clone());
            let point = Point { life: state.oracle.life(), seq: record.seq };
            state.guest.stores(self.plan.vms[vm].writer, point, &submitted.known);
        }
        let payload_bytes = payload.map_or(0, |(_, len_bytes)| len_bytes);
        let cost = (record.seq, payload_bytes + RECORD_OVERHEAD_BYTES);
        self.vms[vm].run.as_mut().expect("runs").unacked.push_back(cost);
        let what = match record.body.effect {
            Effect::Idle => "idles",
            _ if record.role().is_of_copy() => "copies",
            _ => "writes",
        };
        let Record { seq, hlc, deps, .. } = record;
        note!(self, "vm {vm} {what} seq {seq} {extent:?} deps {deps} at {hlc}");
        Ok(())
    }

    /// Rule 10, by the checker's own count.
    pub(crate) fn check_backlog(&mut self, vm: usize) -> Checked {
        let limit = self.plan.vms[vm].backlog_limit_bytes;
        let run = self.vms[vm].run.as_mut().expect("runs");
        let Some(owner) = &run.owner else { return Ok(()) };
        let durable = owner.sequencer().durable();
        while run.unacked.front().is_some_and(|(seq, _)| *seq <= durable) {
            run.unacked.pop_front();
        }
        let cost: u64 = run.unacked.iter().map(|(_, cost)| cost).sum();
        // What an earlier process has left counts until the backup says how much of it it has.
        let limit = limit.max(run.left_bytes);
        check(cost <= limit || run.unacked.len() == 1, Checker::Bounded, || {
            let count = run.unacked.len();
            format!("vm {vm}: {count} records of {cost} bytes in a backlog of {limit}")
        })?;
        let backlog = owner.spilling().backlog();
        self.counts.spilled += u64::from(backlog.is_some_and(|b| b.meter().spilled() > 0));
        self.check_spilling(vm)
    }
}
