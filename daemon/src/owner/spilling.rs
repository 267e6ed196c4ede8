//! Where a record waits for the backup: in memory, or on disk only ([`crate::backlog`]).
//!
//! Every record is on disk before its local write is begun. Memory keeps it as long as there is room, and nothing before
//! it is on disk only. If the disk fails, records stay in memory, whose limit is the sequencer's then; when the
//! backup has all that was before, the disk is tried again.

use super::{Clocks, Owner};
use crate::backlog::{BacklogError, Journal, Meter, Position, Waiting, cost_bytes};
use crate::link::port::ToLink;
use crate::link::queue::Spilled;
use crate::sequencer::Sequencer;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, MonoNanos, Seq};
use tidelock_protocol::record::{Effect, Record};

/// A disk that has failed is tried again after so long, and with nothing left on it.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// What of the limit the comparison after an overflow may have while guests wait for room: an eighth.
const COMPARISON_SHARE: u64 = 8;

/// A writer's backlog on disk.
#[derive(Debug)]
pub struct DiskBacklog {
    journal: Journal,
    meter: Arc<Meter>,
    /// The most that the writer may be ahead of the backup, with the disk and without.
    limit_bytes: u64,
    memory_limit_bytes: u64,
    /// At the limit guests go on ([`crate::overflow`]).
    stands_at_limit: bool,
    failed_at: Option<MonoNanos>,
}

impl DiskBacklog {
    /// With nothing on it yet.
    #[must_use]
    pub fn new(
        journal: Journal,
        meter: Arc<Meter>,
        limit_bytes: u64,
        memory_limit_bytes: u64,
        stands_at_limit: bool,
    ) -> Self {
        Self { journal, meter, limit_bytes, memory_limit_bytes, stands_at_limit, failed_at: None }
    }

    pub(super) fn stands_at_limit(&self) -> bool {
        self.stands_at_limit
    }

    pub(super) fn journal_mut(&mut self) -> &mut Journal {
        &mut self.journal
    }

    /// Whether there is room to be given back, which waits for the backup, or a disk to be tried again.
    pub(super) fn wants_acks(&self) -> bool {
        self.failed_at.is_some() || self.meter.spilled() > 0 || self.journal.segments() > 1
    }

    /// Keeps a record. Returns where it is if it is to leave memory.
    fn keep(
        &mut self,
        record: &Record,
        sequencer: &Sequencer,
    ) -> Result<Option<Position>, BacklogError> {
        let cost_bytes = cost_bytes(record);
        let redo_from = || sequencer.oldest_local().map_or(record.seq, |seq| seq.min(record.seq));
        let at = match self.failed_at {
            None => Some(self.journal.append(record, redo_from)?),
            Some(_) => None,
        };
        if self.meter.may_hold(cost_bytes) || at.is_none() {
            self.meter.hold(cost_bytes);
            return Ok(None);
        }
        self.meter.spill(1);
        Ok(at)
    }
}

/// What an earlier process of the run has left.
#[derive(Debug)]
pub struct GoesOn {
    /// The granted epoch.
    pub epoch: Epoch,
    /// The records, at least one, which are done locally.
    pub waiting: Vec<Waiting>,
    /// The time of the last of them.
    pub last_hlc: Hlc,
}

impl GoesOn {
    pub(super) fn start(&self, sequencer: &mut Sequencer, now: MonoNanos, wall_ms: u64) {
        sequencer.go_on(self.epoch, &self.waiting, self.last_hlc, now, wall_ms);
    }
}

/// What was admitted in a turn and is on disk only.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnSpilled {
    spilled: Spilled,
    last_of_guest: Option<Seq>,
}

impl TurnSpilled {
    fn add(this: &mut Option<Self>, record: &Record, at: Position) {
        let is_of_guest = !record.copy && record.effect != Effect::Idle;
        let Self { spilled, last_of_guest } = this.get_or_insert(Self {
            spilled: Spilled { at, first: record.seq, last: record.seq, payload_bytes: 0 },
            last_of_guest: None,
        });
        spilled.last = record.seq;
        spilled.payload_bytes += record.payload().map_or(0, |p| p.data().len() as u64);
        *last_of_guest = Some(record.seq).filter(|_| is_of_guest).or(*last_of_guest);
    }
}

impl Owner {
    /// A record was admitted. Its local write is begun after this.
    pub(super) fn keep_record(&mut self, record: Record) {
        let Some(backlog) = &mut self.backlog else { return self.admitted.push(record) };
        match backlog.keep(&record, &self.sequencer) {
            Ok(Some(at)) => TurnSpilled::add(&mut self.spilled, &record, at),
            Ok(None) => self.keep_in_memory(record),
            Err(error) => {
                self.backlog_failed(&error);
                if let Some(backlog) = &self.backlog {
                    backlog.meter.hold(cost_bytes(&record));
                }
                self.keep_in_memory(record);
            }
        }
    }

    fn keep_in_memory(&mut self, record: Record) {
        if self.spilled.is_some() {
            self.hand_over();
        }
        self.admitted.push(record);
    }

    /// What was admitted in this turn and is on disk only.
    pub(super) fn hand_over_spilled(&mut self) {
        if let Some(TurnSpilled { spilled, last_of_guest }) = self.spilled.take() {
            let admitted_at = self.now;
            self.to_link(ToLink::Spilled { spilled, last_of_guest, admitted_at });
        }
    }

    /// Says on disk whether the next start may go on with the backlog there: while the sites differ by nothing else.
    pub(super) fn mark_backlog(&mut self) {
        let is_sound = self.sequencer.is_started()
            && self.overflow.records()
            && (self.copying.is_whole() || self.sound_before)
            && self.copying.suspect_bytes() == 0
            && self.disks.iter().all(|disk| disk.poisoned().is_none());
        let Some(backlog) = &mut self.backlog else { return };
        let is_sound = is_sound && backlog.failed_at.is_none();
        if let Err(error) = backlog.journal.set_sound(is_sound) {
            self.backlog_failed(&error);
        }
    }

    fn backlog_failed(&mut self, error: &BacklogError) {
        let Some(backlog) = &mut self.backlog else { return };
        backlog.failed_at = Some(self.now);
        if let Err(error) = backlog.journal.set_sound(false) {
            let directory = backlog.journal.directory().display();
            tracing::error!(%directory, %error, "remove the segments by hand before the next start");
        }
        tracing::error!(
            member = self.member,
            %error,
            "from now on the backlog is in memory only, and full sooner"
        );
        self.follow_backlog_limit();
        self.stats.backlog_disk_failed.store(true, Ordering::Relaxed);
    }

    /// Where the limit is that of memory what waits goes on waiting.
    pub(super) fn follow_backlog_limit(&mut self) {
        let Some(backlog) = &self.backlog else { return };
        let is_apart = self.overflow.is_apart();
        let limit_bytes = match backlog.failed_at.is_some() || is_apart {
            true => backlog.memory_limit_bytes,
            false => backlog.limit_bytes,
        };
        // Or a piece of the comparison would have its turn once in as long as all that takes.
        self.copying.set_share(if is_apart { limit_bytes / COMPARISON_SHARE } else { 0 });
        if limit_bytes != self.sequencer.backlog_limit_bytes() {
            let Clocks { now, wall_ms } = self.clocks();
            self.sequencer.set_backlog_limit(limit_bytes, now, wall_ms);
        }
    }

    /// The backup has all that was appended: the next record begins a new segment.
    pub(super) fn begin_backlog_anew(&mut self) {
        debug_assert_eq!(self.sequencer.durable(), self.sequencer.last_seq());
        let Some(backlog) = self.backlog.as_mut().filter(|b| b.failed_at.is_none()) else { return };
        if let Err(error) = backlog.journal.restart() {
            self.backlog_failed(&error);
        }
    }

    /// Gives back what the backup has, and tries a disk again that has failed.
    pub(super) fn drive_backlog(&mut self) {
        let now = self.now;
        let durable = self.sequencer.durable();
        let is_empty = durable == self.sequencer.last_seq();
        let Some(backlog) = &mut self.backlog else { return };
        let done = match backlog.failed_at {
            None => backlog.journal.release(durable),
            Some(at) => {
                let is_time = now.since_ns(at) >= RETRY_AFTER.as_nanos() as u64;
                if !is_time || !is_empty || backlog.meter.spilled() > 0 {
                    return;
                }
                backlog.journal.restart().map(|()| {
                    backlog.failed_at = None;
                    self.stats.backlog_disk_failed.store(false, Ordering::Relaxed);
                    tracing::info!(member = self.member, "the backlog is kept on disk again");
                })
            }
        };
        match done {
            Ok(()) => self.mark_backlog(),
            Err(error) => return self.backlog_failed(&error),
        }
        self.follow_backlog_limit();
    }

    pub(super) fn publish_backlog_stats(&self) {
        let Some(backlog) = &self.backlog else { return };
        let stats = &self.stats;
        let limit_bytes = self.sequencer.backlog_limit_bytes();
        stats.backlog_limit_bytes.store(limit_bytes, Ordering::Relaxed);
        stats.backlog_disk_bytes.store(backlog.journal.used_bytes(), Ordering::Relaxed);
        stats.backlog_spilled.store(backlog.meter.spilled(), Ordering::Relaxed);
        stats.backlog_memory_bytes.store(backlog.meter.held_bytes(), Ordering::Relaxed);
    }
}
