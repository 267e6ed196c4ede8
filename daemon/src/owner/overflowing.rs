//! A backlog on disk at its limit: guests go on, and what they write is compared when the backup has the stream
//! ([`crate::overflow`]).
//!
//! Invariant: as in [`super::contact`] every write is either in the stream or in the map. The stream stands from the turn in
//! which the map keeps whatever comes, and goes on in the turn in which it ceases to. Before the first write without a
//! record is admitted the gate is shut, and the mark is gone that lets a later process go on with the stream: from then on
//! what is on disk is not all that the sites differ by.

use super::{Owner, copied_ranges};
use crate::backlog::BacklogError;
use crate::link::port::ToLink;
use crate::overflow::{Sight, Step};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tidelock_protocol::ids::{Incarnation, MonoNanos};
use tidelock_protocol::message::{Attached, Mode};

impl Owner {
    /// Looks whether the stream is to stand, or can go on.
    pub(super) fn drive_overflow(&mut self) {
        let Some(backlog) = &self.backlog else { return };
        let sight = Sight {
            now: self.now,
            is_full: self.sequencer.guests_wait_for_room(),
            may_stand: backlog.stands_at_limit() && self.may_stand(),
            durable: self.sequencer.durable(),
            is_drained: self.attached
                && self.draining.is_none()
                && self.sequencer.durable() == self.sequencer.last_seq()
                && self.sequencer.is_recorded_idle()
                && self.copying.is_answered(),
            is_whole: self.copying.is_whole(),
            is_applied: self.gate.is_applied(),
        };
        match self.overflow.look(&sight) {
            None => {}
            Some(Step::Shut) => {
                self.shut();
                // Mostly it is shut already.
                return self.drive_overflow();
            }
            Some(Step::Stand) => self.stand(),
            Some(Step::Ask) => {
                tracing::warn!(
                    member = self.member,
                    last = %self.sequencer.last_seq(),
                    "the backup has all that was recorded: it is asked to compare where guests have written since"
                );
                self.to_link(ToLink::AskToCompare);
            }
            Some(Step::Over(took)) => self.is_over(took),
        }
        if self.overflow.needs_tick() {
            self.arm_tick();
        }
    }

    fn may_stand(&self) -> bool {
        // In mode sync guests wait for the backup with each write.
        let holds_still = self.draining.is_some() || self.switched_over || self.is_fenced();
        self.sequencer.is_started() && self.sequencer.mode() != Mode::Sync && !holds_still
    }

    fn shut(&mut self) {
        if let Err(error) = self.forget_backlog() {
            self.overflow.put_off(self.now);
            return tracing::error!(
                member = self.member,
                %error,
                "the backlog is full, and guests' writes wait: a later start might go on with what is on disk there"
            );
        }
        self.gate.hold_unrecorded(true);
    }

    fn stand(&mut self) {
        self.to_link(ToLink::Stands);
        self.sound_before = false;
        self.copying.stop_recording();
        self.logging.activity.stop_recording();
        self.sequencer.stop_recording(self.now, self.wall_ms);
        self.stats.overflowed_since_unix_ms.store(self.wall_ms.max(1), Relaxed);
        self.stats.overflows.fetch_add(1, Relaxed);
        tracing::error!(
            member = self.member,
            last = %self.sequencer.last_seq(),
            durable = %self.sequencer.durable(),
            "OVERFLOWED: the backlog is full. Guests go on, and nothing of what they write from here on is recorded: it is \
             compared when the backup has what was recorded before. Until then replies are held, and a disaster goes back \
             to before this"
        );
    }

    /// No later process of the run goes on with what is on disk.
    fn forget_backlog(&mut self) -> Result<(), BacklogError> {
        self.backlog.as_mut().map_or(Ok(()), |backlog| backlog.journal_mut().set_sound(false))
    }

    fn is_over(&mut self, took: Duration) {
        self.follow_backlog_limit();
        tracing::info!(
            member = self.member,
            took_ms = took.as_millis() as u64,
            "the sites are equal again: the backlog had been full"
        );
    }

    /// The backup has attached the member while its stream stands.
    pub(super) fn attached_while_standing(&mut self, attached: &Attached) {
        self.copying.reconnected();
        self.logging.activity.attached_unrecorded(attached.epoch, attached.durable);
    }

    /// It has done so to compare: the stream goes on, with the comparison.
    pub(super) fn record_again(
        &mut self,
        attached: &Attached,
        last_attached: Option<Incarnation>,
        now: MonoNanos,
    ) {
        let unrecorded = self.sequencer.unrecorded();
        // What is done again after a kill must not be older than what has no record.
        self.begin_backlog_anew();
        let compare = self.logging.activity.attached(&crate::activity::Attachment {
            copy: attached.copy,
            epoch: attached.epoch,
            durable: attached.durable,
            last_attached,
            copying: false,
        });
        let Self { member, copying, disks, .. } = self;
        let ranges = |purpose| copied_ranges(member, disks, purpose, compare, unrecorded);
        copying.attached(member, attached.copy, ranges, now);
        self.overflow.returns();
        self.mark_backlog();
        self.follow_backlog_limit();
        self.sequencer.record_again(now, self.wall_ms);
        // The link holds it for the comparison already.
        self.gate.hold_unrecorded(false);
        self.stats.overflowed_since_unix_ms.store(0, Relaxed);
        tracing::warn!(
            member = self.member,
            "guests' writes are recorded again; replies are held until the comparison has ended"
        );
    }
}
