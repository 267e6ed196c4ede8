//! What waits, and when it is let in: for others on its extent, for room in the backlog, for the start, for a ceiling.

use super::extent_order::Ticket;
use super::{
    Action, CopyKind, CopyOutcome, Extent, InFlight, OpId, RECORD_OVERHEAD_BYTES, RequestId,
    Sequencer, Stage,
};
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Mode;
use tidelock_protocol::record::Effect;

#[derive(Debug)]
pub(super) enum Work {
    Guest { request: RequestId, effect: Effect, fua: bool },
    Copy(CopyKind),
}

impl Work {
    /// What it costs the backlog, at the most.
    pub(super) fn cost_bytes(&self, extent: Extent) -> u64 {
        let payload_bytes = match self {
            Self::Guest { effect: Effect::Write(payload), .. } => payload.data().len() as u64,
            // What is read is known when it has been read.
            Self::Copy(CopyKind::Copy | CopyKind::CopyUnlessZero) => extent.len_bytes,
            Self::Copy(CopyKind::Digest | CopyKind::Hole) | Self::Guest { .. } => 0,
        };
        payload_bytes + RECORD_OVERHEAD_BYTES
    }
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) extent: Extent,
    pub(super) work: Work,
}

impl Sequencer {
    /// Changes the bound of admitted bytes that are not durable. What is above a lower one stays.
    pub fn set_backlog_limit(&mut self, limit_bytes: u64, now: MonoNanos, wall_ms: u64) {
        self.settings.backlog_limit_bytes = limit_bytes;
        self.admit_free(now, wall_ms);
    }

    /// That bound.
    #[must_use]
    pub fn backlog_limit_bytes(&self) -> u64 {
        self.settings.backlog_limit_bytes
    }

    /// Whether writes wait because the backlog is full.
    #[must_use]
    pub fn is_backlog_full(&self) -> bool {
        self.free.first().is_some_and(|ticket| !self.has_room(&self.waiting[ticket]))
    }

    /// Whether a guest's write waits because the backlog is full.
    #[must_use]
    pub fn guests_wait_for_room(&self) -> bool {
        let is_guests = |waiting: &Waiting| matches!(waiting.work, Work::Guest { .. });
        self.is_backlog_full() && self.waiting.values().any(is_guests)
    }

    pub(super) fn enqueue(&mut self, extent: Extent, work: Work, now: MonoNanos, wall_ms: u64) {
        assert!(extent.len_bytes > 0, "empty requests are completed by the tap");
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let is_free = self.enter(ticket, extent);
        let waiting = Waiting { extent, work };
        let is_next = is_free && self.free.is_empty();
        if is_next && self.may_admit() && self.has_room(&waiting) {
            return self.admit(ticket, waiting, now, wall_ms);
        }
        self.waiting.insert(ticket, waiting);
        if is_free {
            self.free.insert(ticket);
        }
    }

    /// Whether an operation waits for no other one.
    fn enter(&mut self, ticket: Ticket, extent: Extent) -> bool {
        if tidelock_planted::is(Bug::OverlapNotOrdered) {
            return true;
        }
        self.order.enter(ticket, extent.aligned_to(self.settings.lock_align_bytes))
    }

    pub(super) fn leave(&mut self, ticket: Ticket) {
        if tidelock_planted::is(Bug::OverlapNotOrdered) {
            return;
        }
        let Self { order, free, .. } = self;
        order.leave(ticket, |ticket| {
            free.insert(ticket);
        });
    }

    /// Admits everything that need not wait any more, in order. When the backlog is full nothing
    /// overtakes, so that a large write is not starved.
    pub(super) fn admit_free(&mut self, now: MonoNanos, wall_ms: u64) {
        while self.may_admit() && !self.is_backlog_full() {
            let Some(ticket) = self.free.pop_first() else { return };
            let is_copy = matches!(self.waiting[&ticket].work, Work::Copy(_));
            if is_copy && self.serves_unrecorded {
                self.withdraw(ticket);
                continue;
            }
            let waiting = self.waiting.remove(&ticket).expect("free ones wait");
            self.admit(ticket, waiting, now, wall_ms);
        }
    }

    /// Whether anything may be admitted.
    fn may_admit(&self) -> bool {
        // What is not recorded needs no time.
        self.serves_unrecorded || (self.started.is_some() && !self.waits_for_ceiling())
    }

    /// Whether the backlog has room. One operation is always let in, however large.
    fn has_room(&self, waiting: &Waiting) -> bool {
        if tidelock_planted::is(Bug::UnboundedBacklog) {
            return true;
        }
        self.serves_unrecorded || self.has_room_for(waiting.work.cost_bytes(waiting.extent))
    }

    /// Whether so much more may be recorded, or set aside for it.
    pub(super) fn has_room_for(&self, cost_bytes: u64) -> bool {
        let taken_bytes = self.unacked_cost_bytes + self.reserved_bytes;
        taken_bytes == 0 || taken_bytes + cost_bytes <= self.settings.backlog_limit_bytes
    }

    fn admit(&mut self, ticket: Ticket, waiting: Waiting, now: MonoNanos, wall_ms: u64) {
        let Waiting { extent, work } = waiting;
        let op = OpId(self.next_op);
        self.next_op += 1;
        let stage = match work {
            Work::Guest { request, effect, fua } if self.serves_unrecorded => {
                self.actions.push_back(Action::Write { op, extent, effect, fua });
                Stage::Unrecorded { request }
            }
            Work::Guest { request, effect, fua } => {
                let seq = self.send_record(
                    extent.disk,
                    extent.offset,
                    effect.clone(),
                    false,
                    now,
                    wall_ms,
                );
                self.flushed |= fua;
                let hlc = self.record_hlc;
                (self.guest_seq, self.guest_hlc) = (seq, hlc);
                if self.mode == Mode::Sync {
                    self.unnamed.push_back((seq, hlc, extent));
                } else {
                    self.publish_all();
                }
                self.actions.push_back(Action::Write { op, extent, effect, fua });
                Stage::Writing { request, seq, hlc }
            }
            Work::Copy(kind) => {
                debug_assert!(!self.serves_unrecorded, "copies are recorded");
                self.reserved_bytes += Work::Copy(kind).cost_bytes(extent);
                self.actions.push_back(match kind {
                    CopyKind::Hole => Action::FindHole { op, extent },
                    _ => Action::Read { op, extent },
                });
                Stage::Copying(kind)
            }
        };
        self.in_flight.insert(op, InFlight { extent, ticket, stage });
    }

    fn withdraw(&mut self, ticket: Ticket) {
        let waiting = self.waiting.remove(&ticket).expect("free ones wait");
        let outcome = CopyOutcome::Withdrawn;
        self.actions.push_back(Action::Copied { extent: waiting.extent, outcome });
        self.leave(ticket);
    }
}
