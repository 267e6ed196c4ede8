//! Guests' writes that are done without a record: before the stream begins, and while it stands.

use super::admission::{Waiting, Work};
use super::{Extent, InFlight, Sequencer, Stage};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;

impl Sequencer {
    /// Until the [`start`](Self::start) guests' writes are done on the local disk and completed, without seq and record.
    /// The caller keeps on stable storage where the sites differ by that ([`crate::activity`]), and has it compared
    /// after the start. What is in flight at the start ends as it began; what waits for it is recorded.
    pub fn serve_unrecorded(&mut self, now: MonoNanos, wall_ms: u64) {
        assert!(self.started.is_none(), "the stream has begun");
        self.serves_unrecorded = true;
        self.admit_free(now, wall_ms);
    }

    /// The stream stands: until [`record_again`](Self::record_again) guests' writes are done on the local disk and
    /// completed, without seq and record, as by [`serve_unrecorded`](Self::serve_unrecorded). What is in flight ends as
    /// it began, with its records. Copies that wait are given up: [`CopyOutcome::Withdrawn`].
    pub fn stop_recording(&mut self, now: MonoNanos, wall_ms: u64) {
        assert!(self.started.is_some(), "the stream has not begun");
        self.serves_unrecorded = true;
        self.admit_free(now, wall_ms);
    }

    /// What is admitted from now on is recorded. What is in flight ends as it began; what waits for it is recorded.
    pub fn record_again(&mut self, now: MonoNanos, wall_ms: u64) {
        assert!(self.started.is_some() && self.serves_unrecorded, "the stream does not stand");
        self.serves_unrecorded = false;
        self.admit_free(now, wall_ms);
    }

    /// Whether writes are admitted that are not recorded.
    #[must_use]
    pub fn serves_unrecorded(&self) -> bool {
        self.serves_unrecorded
    }

    /// Whether nothing is in flight that has a record, or may get one.
    #[must_use]
    pub fn is_recorded_idle(&self) -> bool {
        let is_unrecorded = |op: &InFlight| matches!(op.stage, Stage::Unrecorded { .. });
        let is_copy = |waiting: &Waiting| matches!(waiting.work, Work::Copy(_));
        self.in_flight.values().all(is_unrecorded)
            && !self.waiting.values().any(is_copy)
            && self.sync_waiting.is_empty()
    }

    /// Where writes are in flight that are not recorded.
    #[must_use]
    pub fn unrecorded(&self) -> Vec<Extent> {
        let of = |op: &InFlight| matches!(op.stage, Stage::Unrecorded { .. }).then_some(op.extent);
        self.in_flight.values().filter_map(of).collect()
    }

    /// A time that is above that of every record of this writer, of whatever run, and not above that of the next one.
    #[must_use]
    pub fn unrecorded_hlc(&self) -> Hlc {
        self.record_hlc.max(self.before_hlc).next()
    }
}
