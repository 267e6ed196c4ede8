//! The sequencer: the one place that admits a write, for all disks of a VM (DESIGN 2.2).
//!
//! It gives each write its place in the writer's order (seq, HLC, dependencies), publishes
//! P\[self\] to the gate before anything is completed to the guest, starts the local write and the
//! replication of the same buffer together, and completes what the guest asked for as the mode
//! says. It is sans-I/O: operations go in, [`Action`]s come out **in the order in which they must be
//! carried out**.
//!
//! Invariants:
//! - Two operations on overlapping extents are never in flight together: the second waits, so the
//!   local disk and the backup apply them in one order. Those that wait keep their order.
//! - `Publish(seq)` comes before `Complete` of any write up to `seq`, and before a read that may
//!   return what it wrote is answered (output commit, rule 1).
//! - Old data never overwrites new: Tidelock's own copies read an extent while they hold it, and
//!   are sent as records with a seq like any other.
//! - Admitted bytes that the backup has not made durable are bounded by the backlog limit. At the
//!   limit writes wait (backpressure); reads never wait here. A write that the local disk has failed is recorded once
//!   more as it was read back if there is room for that at once; else the extent is suspect, and copied as room comes.
//! - No time is given out that the next run could give out again: where one must come after a time that is
//!   beyond the ceiling on record, it waits until the ceiling has been raised.
//! - A write that was admitted before the stream began ([`Sequencer::serve_unrecorded`]), or while it stands
//!   ([`Sequencer::stop_recording`]), has no seq, and no record ever has it: its extent is to be compared. It holds its
//!   extent like any other, so no copy reads what it has half written.
//! - While the stream stands no copy is read, so no record holds anything of what is not recorded.
//!
//! The life of an operation:
//!
//! ```text
//!             no room, overlap,                    ┌── ok ─────────────► Complete(Ok) *
//!             not started          ┌── write ── Local ── error ─► Repair ─► Complete(Err)
//! submit ──► Waiting ──► Admitted ─┤                              (read back, send as a copy; no room: suspect)
//!                                  └── copy, digest ── Read ─► Send / SendInOrder
//! * in mode sync, if it is recorded: when the backup has it, too
//! ```
//!
//! Source: PipeCloud 4.1 (DR Blocktap), with the publication moved before the completion.

mod action;
mod admission;
mod completion;
mod extent_order;
#[cfg(test)]
mod tests;
mod unrecorded;

pub use action::{
    Action, CopyKind, CopyOutcome, DiskError, EIO, EOPNOTSUPP, Lag, Look, OpId, RequestId, Settings,
};
use admission::{Waiting, Work};
use extent_order::Ticket;
pub use extent_order::{Extent, ExtentOrder};

use crate::backlog::Waiting as Left;
use crate::ceiling::BoundedClock;
use std::collections::{BTreeSet, HashMap, VecDeque};
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Epoch, MonoNanos, Seq};
use tidelock_protocol::message::Mode;
use tidelock_protocol::record::{DiskChange, Effect, Record, Role};
use tidelock_protocol::vector::CountVector;

/// What each record costs the backlog besides its payload, so that a flood of tiny or empty
/// records is bounded, too.
pub const RECORD_OVERHEAD_BYTES: u64 = 256;

#[derive(Debug)]
enum Stage {
    /// The local write of a guest's request is in flight.
    Writing { request: RequestId, seq: Seq, hlc: Hlc },
    /// The same, of a request that has no record.
    Unrecorded { request: RequestId },
    /// It failed; the extent is being read back to be sent as it is now.
    Repairing { request: RequestId, seq: Seq, error: DiskError },
    /// Tidelock's own read.
    Copying(CopyKind),
}

#[derive(Debug)]
struct InFlight {
    extent: Extent,
    ticket: Ticket,
    stage: Stage,
}

/// A record that the backup has not made durable.
#[derive(Clone, Copy, Debug)]
struct Unacked {
    seq: Seq,
    cost_bytes: u64,
    payload_bytes: u64,
    admitted_at: MonoNanos,
    copy: bool,
    /// Not an idle one.
    is_of_copy: bool,
}

/// The sequencer of one member.
#[derive(Debug)]
pub struct Sequencer {
    settings: Settings,
    mode: Mode,
    /// Granted epoch and last seq given out; `None` until both are known.
    started: Option<(Epoch, Seq)>,
    /// Guests' writes are done here, and nothing of them is recorded.
    serves_unrecorded: bool,
    clock: BoundedClock,
    /// Entries of other writers that changed since the last record.
    new_deps: CountVector,
    observed: CountVector,
    order: ExtentOrder,
    next_ticket: Ticket,
    waiting: HashMap<Ticket, Waiting>,
    /// Those that wait for no other operation any more.
    free: BTreeSet<Ticket>,
    in_flight: HashMap<OpId, InFlight>,
    next_op: u64,
    unacked: VecDeque<Unacked>,
    unacked_cost_bytes: u64,
    /// What copies and failed writes that are being read may need of the backlog.
    reserved_bytes: u64,
    unacked_payload_bytes: u64,
    /// Records of copies among them.
    unacked_copies: usize,
    durable: Seq,
    /// The last seq that a guest may know the effect of, and the last one published.
    guest_seq: Seq,
    guest_hlc: Hlc,
    /// The time of the last record.
    record_hlc: Hlc,
    /// No record of an earlier run is later.
    before_hlc: Hlc,
    /// The guest has flushed since then.
    flushed: bool,
    published: Seq,
    /// Guest's writes beyond `published` (mode sync), in seq order.
    unnamed: VecDeque<(Seq, Hlc, Extent)>,
    /// Locally done, waiting for the backup (mode sync).
    sync_waiting: VecDeque<(Seq, Hlc, RequestId)>,
    actions: VecDeque<Action>,
}

impl Sequencer {
    /// A sequencer that lets everything wait until [`start`](Self::start).
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        assert!(settings.lock_align_bytes > 0);
        Self {
            settings,
            mode: settings.mode,
            started: None,
            serves_unrecorded: false,
            clock: BoundedClock::default(),
            new_deps: CountVector::new(),
            observed: CountVector::new(),
            order: ExtentOrder::default(),
            next_ticket: 0,
            waiting: HashMap::new(),
            free: BTreeSet::new(),
            in_flight: HashMap::new(),
            next_op: 0,
            unacked: VecDeque::new(),
            unacked_cost_bytes: 0,
            reserved_bytes: 0,
            unacked_payload_bytes: 0,
            unacked_copies: 0,
            durable: Seq::ZERO,
            guest_seq: Seq::ZERO,
            guest_hlc: Hlc(0),
            record_hlc: Hlc(0),
            before_hlc: Hlc(0),
            flushed: false,
            published: Seq::ZERO,
            unnamed: VecDeque::new(),
            sync_waiting: VecDeque::new(),
            actions: VecDeque::new(),
        }
    }

    /// The epoch is granted and the stream goes on after `durable`: writes may be admitted.
    pub fn start(
        &mut self,
        epoch: Epoch,
        durable: Seq,
        last_hlc: Hlc,
        now: MonoNanos,
        wall_ms: u64,
    ) {
        assert!(self.started.is_none(), "started twice");
        self.started = Some((epoch, durable));
        self.serves_unrecorded = false;
        self.durable = durable;
        // What was observed or bounded before stays.
        self.clock.observe(last_hlc);
        self.before_hlc = last_hlc;
        self.admit_free(now, wall_ms);
    }

    /// The stream goes on with what an earlier process had admitted and the backup may not have, which is done locally:
    /// `waiting`, in seq order, at least one. Guests may know of all of it.
    pub fn go_on(
        &mut self,
        epoch: Epoch,
        waiting: &[Left],
        last_hlc: Hlc,
        now: MonoNanos,
        wall_ms: u64,
    ) {
        assert!(self.started.is_none(), "started twice");
        let (first, last) = (waiting[0].seq, waiting[waiting.len() - 1].seq);
        self.started = Some((epoch, last));
        self.durable = Seq(first.0 - 1);
        self.clock.observe(last_hlc);
        (self.guest_seq, self.guest_hlc) = (last, last_hlc);
        self.record_hlc = last_hlc;
        for record in waiting {
            self.count(Unacked {
                seq: record.seq,
                cost_bytes: record.payload_bytes + RECORD_OVERHEAD_BYTES,
                payload_bytes: record.payload_bytes,
                admitted_at: now,
                copy: record.is_of_us,
                is_of_copy: record.is_of_copy,
            });
        }
        self.publish_all();
        self.admit_free(now, wall_ms);
    }

    fn count(&mut self, unacked: Unacked) {
        self.unacked_copies += usize::from(unacked.is_of_copy);
        self.unacked_cost_bytes += unacked.cost_bytes;
        self.unacked_payload_bytes += unacked.payload_bytes;
        self.unacked.push_back(unacked);
    }

    /// Whether [`start`](Self::start) was called.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.started.is_some()
    }

    /// A guest's write or zeroing of `extent`.
    pub fn submit(
        &mut self,
        request: RequestId,
        extent: Extent,
        effect: Effect,
        fua: bool,
        now: MonoNanos,
        wall_ms: u64,
    ) {
        assert!(matches!(effect, Effect::Write(_) | Effect::Zero { .. }));
        self.enqueue(extent, Work::Guest { request, effect, fua }, now, wall_ms);
    }

    /// The guest asks for a flush: all writes that it was told of have been given out. The next record says so, for
    /// those who look for such points in the past.
    pub fn flush_asked(&mut self) {
        self.flushed = true;
    }

    /// Tidelock's own reading of `extent`, to copy or to compare it.
    pub fn submit_copy(&mut self, extent: Extent, kind: CopyKind, now: MonoNanos, wall_ms: u64) {
        self.enqueue(extent, Work::Copy(kind), now, wall_ms);
    }

    /// Marks the end of an initial copy or a resync; to be called when one [`may_speak`](Self::may_speak). Returns the
    /// marker's seq: when the backup has it, its disks equal these.
    pub fn copy_done(&mut self, now: MonoNanos, wall_ms: u64) -> Seq {
        let disk = DiskId(0);
        self.send_record(disk, 0, Effect::CopyDone, true, now, wall_ms)
    }

    /// A ceiling of this member's times is on record (see [`crate::ceiling`]).
    pub fn set_ceiling(&mut self, physical_ms: u64, now: MonoNanos, wall_ms: u64) {
        self.clock.set_ceiling(physical_ms);
        self.admit_free(now, wall_ms);
    }

    /// Whether what comes next waits for a higher ceiling: above [`greatest_hlc`](Self::greatest_hlc).
    #[must_use]
    pub fn waits_for_ceiling(&self) -> bool {
        self.clock.waits()
    }

    /// The member has merged a tag of this time: what follows is later.
    pub fn observe(&mut self, hlc: Hlc) {
        if tidelock_planted::is(Bug::CeilingPassed) {
            self.clock.set_ceiling(hlc.physical_ms());
        }
        self.clock.observe(hlc);
    }

    /// Whether a record without payload may be given out now: while recording, below the ceiling, with room for it.
    #[must_use]
    pub fn may_speak(&self) -> bool {
        let records = self.started.is_some() && !self.serves_unrecorded;
        records && !self.waits_for_ceiling() && self.has_room_for(RECORD_OVERHEAD_BYTES)
    }

    /// A record that says only that there is nothing older to come. Not while others wait for room or for a
    /// ceiling: they will say the same.
    pub fn idle(&mut self, now: MonoNanos, wall_ms: u64) {
        if self.may_speak() && !self.is_backlog_full() {
            self.send_record(DiskId(0), 0, Effect::Idle, false, now, wall_ms);
        }
    }

    /// Idle records until `seq` is given out, as far as backlog and ceiling let it now. Returns whether
    /// it is. Somebody waits for a seq of an earlier run that was lost with it.
    pub fn pad_to(&mut self, seq: Seq, now: MonoNanos, wall_ms: u64) -> bool {
        while self.last_seq() < seq {
            if !self.may_speak() {
                return false;
            }
            self.send_record(DiskId(0), 0, Effect::Idle, false, now, wall_ms);
        }
        true
    }

    /// How far the member's clock is ahead of the wall clock, because others' are.
    #[must_use]
    pub fn clock_lead_ms(&self, wall_ms: u64) -> u64 {
        self.greatest_hlc().physical_ms().saturating_sub(wall_ms)
    }

    /// The time of the last record.
    #[must_use]
    pub fn record_hlc(&self) -> Hlc {
        self.record_hlc
    }

    /// The member has merged a tag: its next record depends on these writes of others.
    pub fn depends_on(&mut self, tag: &CountVector) {
        for (writer, seq) in tag.entries() {
            if writer != self.settings.writer && self.observed.raise(writer, seq) {
                self.new_deps.raise(writer, seq);
            }
        }
    }

    /// The first record of a guest's write that is not done locally yet.
    #[must_use]
    pub fn oldest_local(&self) -> Option<Seq> {
        let of = |op: &InFlight| match op.stage {
            Stage::Writing { seq, .. } | Stage::Repairing { seq, .. } => Some(seq),
            Stage::Unrecorded { .. } | Stage::Copying(_) => None,
        };
        self.in_flight.values().filter_map(of).min()
    }

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The mode in force.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// How far the backup is behind.
    #[must_use]
    pub fn lag(&self) -> Lag {
        Lag {
            writes: self.unacked.len() as u64,
            bytes: self.unacked_payload_bytes,
            oldest: self.unacked.iter().find(|u| !u.copy).map(|u| u.admitted_at),
        }
    }

    /// Whether the records after `seq` have so many bytes or more.
    #[must_use]
    pub fn has_after(&self, seq: Seq, bytes: u64) -> bool {
        let mut sum_bytes = 0;
        self.unacked.iter().rev().take_while(|unacked| unacked.seq > seq).any(|unacked| {
            sum_bytes += unacked.cost_bytes;
            sum_bytes >= bytes
        })
    }

    /// How many records of copies are on their way.
    #[must_use]
    pub fn copies_on_the_way(&self) -> usize {
        self.unacked_copies
    }

    /// Bytes that count against the backlog limit.
    #[must_use]
    pub fn backlog_bytes(&self) -> u64 {
        self.unacked_cost_bytes
    }

    /// Requests and copies that wait for an overlap, for room in the backlog, for the start or for a ceiling.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that are complete but for the backup's word (mode sync).
    #[must_use]
    pub fn waiting_for_backup(&self) -> usize {
        self.sync_waiting.len()
    }

    /// Whether nothing is in flight or waiting locally.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.waiting.is_empty() && self.sync_waiting.is_empty()
    }

    /// The epoch of what is given out; 0 before the start.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.started.map_or(Epoch(0), |(epoch, _)| epoch)
    }

    /// The last seq given out.
    #[must_use]
    pub fn last_seq(&self) -> Seq {
        self.started.map_or(Seq::ZERO, |(_, seq)| seq)
    }

    /// The last seq that the backup has.
    #[must_use]
    pub fn durable(&self) -> Seq {
        self.durable
    }

    /// P\[self\] as published.
    #[must_use]
    pub fn published(&self) -> Seq {
        self.published
    }

    /// The last time given out.
    #[must_use]
    pub fn last_hlc(&self) -> Hlc {
        self.clock.last()
    }

    /// The greatest time that was given out or heard.
    #[must_use]
    pub fn greatest_hlc(&self) -> Hlc {
        self.clock.greatest()
    }

    fn send_record(
        &mut self,
        disk: DiskId,
        offset: u64,
        effect: Effect,
        copy: bool,
        now: MonoNanos,
        wall_ms: u64,
    ) -> Seq {
        let (epoch, last) = self.started.as_mut().expect("admitted after the start");
        *last = last.next();
        let record = Record {
            writer: self.settings.writer,
            seq: *last,
            epoch: *epoch,
            hlc: self.clock.tick(wall_ms),
            deps: std::mem::take(&mut self.new_deps),
            body: DiskChange {
                disk,
                offset,
                copy,
                flushed: !copy && std::mem::take(&mut self.flushed),
                effect,
            },
        };
        self.record_hlc = record.hlc;
        let payload_bytes = record.payload().map_or(0, |p| p.data().len() as u64);
        let unacked = Unacked {
            seq: record.seq,
            cost_bytes: payload_bytes + RECORD_OVERHEAD_BYTES,
            payload_bytes,
            admitted_at: now,
            copy: record.role() != Role::Change,
            is_of_copy: copy,
        };
        self.count(unacked);
        self.actions.push_back(Action::Send(record));
        unacked.seq
    }
}
