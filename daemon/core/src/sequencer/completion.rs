//! What follows when an operation has ended here, or at the backup: P is published, the guest is told, a failed write is
//! made good.

use super::admission::Work;
use super::{
    Action, CopyKind, CopyOutcome, DiskError, Extent, InFlight, Look, OpId, RequestId, Sequencer,
    Stage,
};
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{MonoNanos, Seq};
use tidelock_protocol::limits::RECORD_PAYLOAD_MAX_BYTES;
use tidelock_protocol::message::{Message, Mode};
use tidelock_protocol::record::{Effect, Payload};

impl Sequencer {
    /// A guest's read of `extent` has ended and is about to be answered.
    ///
    /// In mode sync P does not name a write before the backup has it, since its guest is not told
    /// of it before. But who reads it meanwhile knows it: a guest that was started again, or
    /// another connection.
    pub fn is_read(&mut self, extent: Extent) {
        let seen = self.unnamed.iter().rev().find(|(.., written)| written.overlaps(&extent));
        if let Some((seq, hlc, _)) = seen.copied() {
            self.publish(seq, hlc);
        }
    }

    /// A local write has ended.
    pub fn written(
        &mut self,
        op: OpId,
        result: Result<(), DiskError>,
        now: MonoNanos,
        wall_ms: u64,
    ) {
        let InFlight { extent, ref stage, .. } = self.in_flight[&op];
        let (request, seq, hlc) = match *stage {
            Stage::Writing { request, seq, hlc } => (request, seq, hlc),
            // If it failed, the disk may hold anything there: the comparison reads what it does.
            Stage::Unrecorded { request } => {
                self.actions.push_back(Action::Complete(request, result));
                return self.end(op, now, wall_ms);
            }
            Stage::Repairing { .. } | Stage::Copying(_) => panic!("{op:?} is not a write"),
        };
        match result {
            Ok(()) => {
                self.complete_write(request, seq, hlc);
                self.end(op, now, wall_ms);
            }
            // Too much to read back under one hold, or for the backlog: it is copied in pieces, as there is room.
            Err(error) if !self.reserve_for_repair(extent) => {
                self.actions.push_back(Action::Suspect(extent));
                self.publish_all();
                self.actions.push_back(Action::Complete(request, Err(error)));
                self.end(op, now, wall_ms);
            }
            // The backup gets what the guest wanted, this disk may hold anything: bring the backup
            // to what this disk holds. The extent stays held meanwhile.
            Err(error) => {
                let op_state = self.in_flight.get_mut(&op).expect("it is in flight");
                op_state.stage = Stage::Repairing { request, seq, error };
                self.actions.push_back(Action::Read { op, extent });
            }
        }
    }

    /// A local read for Tidelock itself has ended.
    pub fn read_done(
        &mut self,
        op: OpId,
        result: Result<bytes::Bytes, DiskError>,
        now: MonoNanos,
        wall_ms: u64,
    ) {
        let op_state = &self.in_flight[&op];
        let extent = op_state.extent;
        let kind = match op_state.stage {
            Stage::Copying(kind) => kind,
            Stage::Repairing { .. } => CopyKind::Copy,
            Stage::Writing { .. } | Stage::Unrecorded { .. } => panic!("{op:?} is not a read"),
        };
        self.reserved_bytes -= Work::Copy(kind).cost_bytes(extent);
        match (&op_state.stage, result) {
            (Stage::Repairing { request, error, .. }, result) => {
                let (request, error) = (*request, *error);
                match result {
                    Ok(data) => {
                        self.send_copy(extent, data, now, wall_ms);
                        // The guest may read what its failed write has left, and tell it: this
                        // copy is part of the guest's write, unlike those of a copy job.
                        self.guest_seq = self.last_seq();
                        self.guest_hlc = self.record_hlc;
                    }
                    Err(_) => self.actions.push_back(Action::Suspect(extent)),
                }
                self.publish_all();
                self.actions.push_back(Action::Complete(request, Err(error)));
            }
            (Stage::Copying(kind), Ok(data)) => {
                let outcome = self.copy_read(extent, *kind, data, now, wall_ms);
                self.actions.push_back(Action::Copied { extent, outcome });
            }
            (Stage::Copying(_), Err(_)) => {
                let outcome = CopyOutcome::Unreadable;
                self.actions.push_back(Action::Copied { extent, outcome });
            }
            (Stage::Writing { .. } | Stage::Unrecorded { .. }, _) => {
                unreachable!("looked at above")
            }
        }
        self.end(op, now, wall_ms);
    }

    /// The disk begins like this in an extent that is held for the question. A hole is asked about at this point of the
    /// stream, before anything else can be written to it.
    pub fn looked(
        &mut self,
        op: OpId,
        look: Result<Look, DiskError>,
        now: MonoNanos,
        wall_ms: u64,
    ) {
        let extent = self.in_flight[&op].extent;
        self.reserved_bytes -= Work::Copy(CopyKind::Hole).cost_bytes(extent);
        let outcome = match look {
            Ok(Look::Hole(len_bytes)) => {
                let Extent { disk, offset, .. } = extent;
                let message = Message::ZeroCheck { disk, offset, len_bytes };
                self.actions.push_back(Action::SendInOrder(message));
                CopyOutcome::AskedForZeroes(len_bytes)
            }
            Ok(Look::Data(len_bytes)) => CopyOutcome::HasData(len_bytes),
            // Reading it will tell.
            Err(_) => CopyOutcome::HasData(extent.len_bytes),
        };
        self.actions.push_back(Action::Copied { extent, outcome });
        self.end(op, now, wall_ms);
    }

    /// Sets room aside for a copy of what a failed write has left, if it may be one record and there is room.
    fn reserve_for_repair(&mut self, extent: Extent) -> bool {
        let cost_bytes = Work::Copy(CopyKind::Copy).cost_bytes(extent);
        let is_one = extent.len_bytes <= u64::from(RECORD_PAYLOAD_MAX_BYTES);
        let fits = is_one && self.has_room_for(cost_bytes);
        self.reserved_bytes += if fits { cost_bytes } else { 0 };
        fits
    }

    fn copy_read(
        &mut self,
        extent: Extent,
        kind: CopyKind,
        data: bytes::Bytes,
        now: MonoNanos,
        wall_ms: u64,
    ) -> CopyOutcome {
        match kind {
            CopyKind::CopyUnlessZero if is_zero(&data) => CopyOutcome::Zero,
            CopyKind::Copy | CopyKind::CopyUnlessZero => {
                self.send_copy(extent, data, now, wall_ms);
                CopyOutcome::Sent
            }
            CopyKind::Hole => unreachable!("it is looked at, not read"),
            CopyKind::Digest => {
                self.actions.push_back(Action::SendInOrder(Message::DigestCheck {
                    disk: extent.disk,
                    offset: extent.offset,
                    len_bytes: extent.len_bytes as u32,
                    digest: *blake3::hash(&data).as_bytes(),
                }));
                CopyOutcome::Asked
            }
        }
    }

    fn send_copy(&mut self, extent: Extent, data: bytes::Bytes, now: MonoNanos, wall_ms: u64) {
        let effect = if is_zero(&data) {
            // Holes stay holes at the backup.
            Effect::Zero { len_bytes: data.len() as u32, no_hole: false }
        } else {
            Effect::Write(Payload::new(data))
        };
        self.send_record(extent.disk, extent.offset, effect, true, now, wall_ms);
    }

    /// The backup has everything up to `durable`.
    pub fn committed(&mut self, durable: Seq, now: MonoNanos, wall_ms: u64) {
        while let Some(first) = self.unacked.front().filter(|u| u.seq <= durable) {
            self.unacked_cost_bytes -= first.cost_bytes;
            self.unacked_payload_bytes -= first.payload_bytes;
            self.unacked_copies -= usize::from(first.is_of_copy);
            self.unacked.pop_front();
        }
        self.durable = self.durable.max(durable);
        self.complete_synced();
        self.admit_free(now, wall_ms);
    }

    /// Changes the mode.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
        if mode != Mode::Sync {
            self.publish_all();
        }
        self.complete_synced();
    }

    /// Publishes P up to the last guest's write admitted.
    pub(super) fn publish_all(&mut self) {
        if tidelock_planted::is(Bug::PublishAfterCompletion) {
            return;
        }
        self.publish(self.guest_seq, self.guest_hlc);
    }

    pub(super) fn publish(&mut self, seq: Seq, hlc: Hlc) {
        if seq > self.published {
            self.published = seq;
            while self.unnamed.front().is_some_and(|(unnamed, ..)| *unnamed <= seq) {
                self.unnamed.pop_front();
            }
            self.actions.push_back(Action::Publish(seq, hlc));
        }
    }

    fn complete_write(&mut self, request: RequestId, seq: Seq, hlc: Hlc) {
        if self.mode == Mode::Sync && seq > self.durable {
            let at = self.sync_waiting.partition_point(|(s, ..)| *s < seq);
            self.sync_waiting.insert(at, (seq, hlc, request));
            return;
        }
        self.complete(request, seq, hlc);
    }

    fn complete(&mut self, request: RequestId, seq: Seq, hlc: Hlc) {
        if tidelock_planted::is(Bug::PublishAfterCompletion) {
            self.actions.push_back(Action::Complete(request, Ok(())));
            return self.publish(seq, hlc);
        }
        self.publish(seq, hlc);
        self.actions.push_back(Action::Complete(request, Ok(())));
    }

    /// Completes what only waited for the backup, or no longer has to.
    pub(super) fn complete_synced(&mut self) {
        while let Some((seq, hlc, request)) = self.sync_waiting.front().copied() {
            if self.mode == Mode::Sync && seq > self.durable {
                break;
            }
            self.sync_waiting.pop_front();
            self.complete(request, seq, hlc);
        }
    }

    pub(super) fn end(&mut self, op: OpId, now: MonoNanos, wall_ms: u64) {
        let ended = self.in_flight.remove(&op).expect("in flight");
        self.leave(ended.ticket);
        self.admit_free(now, wall_ms);
    }
}

/// Whether all bytes are 0. This reads whole disks, so it goes by 64 bytes at a time.
pub(super) fn is_zero(data: &[u8]) -> bool {
    let (chunks, tail) = data.as_chunks::<64>();
    chunks.iter().all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
        && tail.iter().all(|byte| *byte == 0)
}
