//! What the sequencer asks for, done: records are admitted, past the oracle, local operations
//! started, guests' requests completed.

use crate::disk::SECTOR_BYTES;
use crate::failure::{Checked, Checker, check, fail};
use crate::local::LocalOp;
use crate::oracle::Point;
use crate::world::{World, note};
use tidelock_daemon::ceiling;
use tidelock_daemon::link::port::ToLink;
use tidelock_daemon::sequencer::{
    Action, DiskError, Extent, Look, RECORD_OVERHEAD_BYTES, RequestId,
};
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::Mode;
use tidelock_protocol::record::{Effect, Record};

impl World {
    pub(crate) fn act(&mut self, vm: usize) -> Checked {
        // A write that follows its record is that record's.
        let mut is_recorded = false;
        loop {
            let run = self.vms[vm].run.as_mut().expect("runs");
            let Some(action) = run.sequencer.poll_action() else { return Ok(()) };
            if run.has_died.is_some() {
                continue;
            }
            match action {
                Action::Publish(seq, hlc) => {
                    run.pending.publish_at(WriterId(self.plan.vms[vm].writer), seq, hlc);
                }
                Action::Send(record) => {
                    is_recorded = !record.copy && record.effect != Effect::Idle;
                    if self.dies_of(vm, &record)? {
                        return Ok(());
                    }
                    self.admit(vm, record)?;
                }
                Action::SendInOrder(message) => {
                    self.hand_over(vm);
                    self.tell_link(vm, ToLink::InOrder(message));
                }
                Action::Write { op, extent, effect, fua } => {
                    if !std::mem::take(&mut is_recorded) {
                        self.is_unrecorded(vm, op, extent, &effect);
                    }
                    let data = match effect {
                        Effect::Write(payload) => payload.data().to_vec(),
                        _ => vec![0; extent.len_bytes as usize],
                    };
                    let aligned = extent.offset.is_multiple_of(SECTOR_BYTES)
                        && extent.len_bytes.is_multiple_of(SECTOR_BYTES);
                    let local = if aligned {
                        LocalOp::Write { extent, data, fua }
                    } else {
                        LocalOp::Patch { extent, data, fua }
                    };
                    self.start_write(vm, op, extent, local)?;
                }
                Action::Read { op, extent } => self.start_read(vm, op, extent)?,
                Action::FindHole { op, extent } => {
                    // Disks here are smaller than any hole that is asked about.
                    let clocks = self.member_clocks(vm);
                    let run = self.vms[vm].run.as_mut().expect("runs");
                    let look = Ok(Look::Data(extent.len_bytes));
                    run.sequencer.looked(op, look, clocks.now, clocks.wall_ms);
                }
                Action::Complete(request, result) => self.complete(vm, request, result)?,
                Action::Copied { extent, outcome } => {
                    run.copying.copied(extent, outcome);
                    let clocks = self.member_clocks(vm);
                    self.with_spilling(vm, clocks, |spilling, _, turn| spilling.mark(turn));
                }
                Action::Suspect(extent) => {
                    run.copying.suspect(extent);
                    run.activity.suspect();
                    let clocks = self.member_clocks(vm);
                    self.with_spilling(vm, clocks, |spilling, _, turn| spilling.mark(turn));
                    note!(self, "vm {vm}: {extent:?} may differ");
                }
            }
        }
    }

    /// A record is admitted: the oracle writes it down.
    pub(crate) fn admit(&mut self, vm: usize, record: Record) -> Checked {
        let state = &mut self.vms[vm];
        let extent = Extent {
            disk: record.disk,
            offset: record.offset,
            len_bytes: record.len_bytes().into(),
        };
        let run = state.run.as_mut().expect("runs");
        state.oracle.admitted(&record)?;
        let ceiling_ms = state.state.lock().expect("one thread").hlc_ceiling_ms;
        let next_run = ceiling::floor_above(ceiling_ms);
        check(record.hlc < next_run, Checker::HlcGrows, || {
            format!(
                "record {} has time {}, the next run may begin at {next_run}",
                record.seq, record.hlc
            )
        })?;
        if record.effect == Effect::Idle {
            self.counts.idles += 1;
        } else if record.copy {
            let disk = state.disks[usize::from(record.disk.0)].live();
            let live = &disk[extent.offset as usize..extent.end() as usize];
            state.oracle.copied(&record, live)?;
            for submitted in run.submitted.values_mut() {
                if submitted.failed && submitted.extent == extent {
                    submitted.repair = Some(record.seq);
                }
            }
        } else {
            let data = record.payload().map(|p| p.data().as_ptr());
            let mut open = run.submitted.values_mut().filter(|s| s.seq.is_none());
            let Some(submitted) = open.find(|s| s.extent == extent && s.data == data) else {
                return fail(Checker::Prefix, format!("record {} of no request", record.seq));
            };
            submitted.seq = Some(record.seq);
            state.oracle.wrote(&record, submitted.known.clone());
            let point = Point { life: state.oracle.life(), seq: record.seq };
            state.guest.stores(self.plan.vms[vm].writer, point, &submitted.known);
        }
        let payload_bytes = record.payload().map_or(0, |p| p.data().len() as u64);
        run.unacked.push_back((record.seq, payload_bytes + RECORD_OVERHEAD_BYTES));
        let what = match record.effect {
            Effect::Idle => "idles",
            _ if record.copy => "copies",
            _ => "writes",
        };
        let (seq, hlc, deps) = (record.seq, record.hlc, record.deps.clone());
        self.keep_record(vm, record);
        note!(self, "vm {vm} {what} seq {seq} {extent:?} deps {deps} at {hlc}");
        Ok(())
    }

    /// The sequencer completes a guest's request.
    fn complete(&mut self, vm: usize, id: RequestId, result: Result<(), DiskError>) -> Checked {
        let group = self.plan.vms[vm].group;
        let writer = WriterId(self.plan.vms[vm].writer);
        let run = self.vms[vm].run.as_mut().expect("runs");
        run.activity.finished(id.0, run.sequencer.last_seq());
        let Some(submitted) = run.submitted.remove(&id) else {
            return fail(Checker::Stream, format!("vm {vm}: {id:?} is completed twice"));
        };
        let seq = submitted.repair.max(submitted.seq).unwrap_or_default();
        // Rule 1: before, not after.
        let published = run.pending.read().get(writer);
        check(published >= seq, Checker::PublishBeforeComplete, || {
            format!("vm {vm}: write {seq} is completed, P says {published}")
        })?;
        if run.sequencer.mode() == Mode::Sync && result.is_ok() {
            let durable = self.backup.groups[group].told_durable.get(writer);
            check(seq <= durable, Checker::SyncWaits, || {
                format!("vm {vm}: write {seq} is completed, the backup has {durable}")
            })?;
        }
        let point = match seq {
            Seq::ZERO => Point { life: self.vms[vm].run.as_ref().expect("runs").life, seq },
            seq => Point { life: self.vms[vm].oracle.life(), seq },
        };
        self.guest_write_done(vm, id.0, result.is_ok(), point)
    }

    pub(crate) fn hand_over(&mut self, vm: usize) {
        let now = self.host_now(self.plan.vms[vm].host);
        let run = self.vms[vm].run.as_mut().expect("runs");
        let (age, messages) = (run.activity.age(), run.admitted.take(now));
        if std::mem::replace(&mut run.told_age, age) != age {
            self.tell_link(vm, ToLink::Logged(age));
        }
        for message in messages {
            self.tell_link(vm, message);
        }
    }

    /// Rule 10, by the checker's own count.
    pub(crate) fn check_backlog(&mut self, vm: usize) -> Checked {
        let limit = self.plan.vms[vm].backlog_limit_bytes;
        let run = self.vms[vm].run.as_mut().expect("runs");
        let durable = run.sequencer.durable();
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
        self.check_spilling(vm)
    }
}
