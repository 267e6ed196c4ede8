//! A backlog on disk at its limit: guests go on, and what they write is compared when the backup has the stream
//! ([`crate::overflow`]). What is on disk is driven from here, too: the decisions are [`Spilling`]'s.
//!
//! Invariant: as in [`super::contact`] every write is either in the stream or in the map. The stream stands from the turn in
//! which the map keeps whatever comes, and goes on in the turn in which it ceases to. Before the first write without a
//! record is admitted the gate is shut, P names what the comparison will bring, for other members, and the mark is gone
//! that lets a later process go on with the stream: from then on what is on disk is not all that the sites differ by.

use super::admitted::Admitted;
use super::driver::Driver;
use super::gap::GapWhy;
use super::spilling::{GoesOn, Seen, Spilling, Turn};
use super::{LeftOnDisk, Owner, copied_ranges};
use crate::link::port::{AttachedStream, ToLink};
use crate::overflow::Step;
use std::sync::atomic::Ordering::Relaxed;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::record::Record;

impl<D: Driver> Owner<D> {
    fn spilling_turn(&mut self) -> (&mut Spilling, &mut Admitted, Turn<'_>) {
        let clocks = self.clocks();
        let Self { member, sequencer, copying, logging, gate, disks, .. } = self;
        let turn = Turn {
            member,
            sequencer,
            copying,
            activity: &mut logging.activity,
            gate: &**gate,
            is_poisoned: disks.iter().any(|disk| disk.poisoned().is_some()),
            clocks,
        };
        (&mut self.spilling, &mut self.admitted, turn)
    }

    /// The backup has confirmed that the stream goes on with what an earlier process has left on disk: what may not have
    /// ended there is done again first.
    pub(super) fn go_on_with_left(&mut self) {
        let Some(LeftOnDisk { goes_on, redo }) = self.left.take() else { return };
        self.touch_log();
        match redo() {
            Ok(redone) => tracing::warn!(
                member = self.member,
                last = %goes_on.last(),
                redone,
                "the daemon had not stopped cleanly: going on with the backlog on disk, nothing is compared"
            ),
            Err(error) => {
                // The backup must not get records that the local disk lacks.
                self.give_up_left_for_good(&goes_on);
                self.failed = Some(format!(
                    "what was under way when the daemon was killed cannot be done again on the local disk ({error}): start \
                     again, the sites are compared then"
                ));
                return;
            }
        }
        self.pending.publish(goes_on.last(), goes_on.last_hlc);
        let (spilling, _, mut turn) = self.spilling_turn();
        spilling.go_on(&goes_on, &mut turn);
    }

    fn give_up_left_for_good(&mut self, goes_on: &GoesOn) {
        let (spilling, _, mut turn) = self.spilling_turn();
        spilling.give_up_left(goes_on, &mut turn);
    }

    /// Drops the backlog on disk of an earlier process: its records are neither sent nor written to the local disks.
    pub(super) fn give_up_left(&mut self, why: &str) {
        let Some(LeftOnDisk { goes_on, .. }) = self.left.take() else { return };
        tracing::warn!(
            member = self.member,
            last = %goes_on.last(),
            why,
            "the backlog on disk is not gone on with, and nothing of it is written to the local disks: the sites are compared"
        );
        self.give_up_left_for_good(&goes_on);
    }

    /// A record was admitted. Its local write is begun after this.
    pub(super) fn keep_record(&mut self, record: Record) {
        let (spilling, admitted, mut turn) = self.spilling_turn();
        spilling.keep(record, admitted, &mut turn);
    }

    /// Says on disk whether the next start may go on with the backlog there.
    pub(super) fn mark_backlog(&mut self) {
        let (spilling, _, mut turn) = self.spilling_turn();
        spilling.mark(&mut turn);
    }

    /// Gives back what the backup has, and tries a disk again that has failed.
    pub(super) fn drive_backlog(&mut self) {
        let (spilling, _, mut turn) = self.spilling_turn();
        spilling.drive(&mut turn);
    }

    /// Looks whether the stream is to stand, or can go on.
    pub(super) fn drive_overflow(&mut self) {
        let seen = Seen {
            is_attached: self.attached,
            is_draining: self.draining.is_some(),
            is_left: self.switched_over || self.is_fenced(),
        };
        let (spilling, _, mut turn) = self.spilling_turn();
        match spilling.drive_overflow(seen, &mut turn) {
            Some(Step::Stand) => {
                // Before anything is completed that has no record.
                let (last, hlc) = (self.sequencer.last_seq(), self.sequencer.unrecorded_hlc());
                if !tidelock_planted::is(Bug::UnrecordedUnnamed) {
                    self.depend_on_comparison(last, hlc);
                }
                self.driver.to_link(ToLink::Stands);
                self.stats.overflows.fetch_add(1, Relaxed);
            }
            Some(Step::Ask) => self.driver.to_link(ToLink::AskToCompare),
            Some(Step::Shut | Step::Over(_)) | None => {}
        }
        if self.spilling.needs_tick() {
            self.arm_tick();
        }
    }

    /// The backup has attached the member while its stream stands.
    pub(super) fn attached_while_standing(&mut self, attached: &AttachedStream) {
        let (spilling, _, mut turn) = self.spilling_turn();
        spilling.attached_while_standing(attached, &mut turn);
    }

    /// It has done so to compare: the stream goes on, with the comparison.
    pub(super) fn record_again(&mut self, attached: &AttachedStream) {
        let clocks = self.clocks();
        let Self { member, view, sequencer, copying, logging, gate, disks, spilling, .. } = self;
        let mut turn = Turn {
            member,
            sequencer,
            copying,
            activity: &mut logging.activity,
            gate: &**gate,
            is_poisoned: disks.iter().any(|disk| disk.poisoned().is_some()),
            clocks,
        };
        let ranges = |purpose, compare, unrecorded| {
            copied_ranges(member, view, disks, purpose, compare, unrecorded)
        };
        spilling.record_again(attached, ranges, &mut turn);
        self.depend_on_comparison(attached.durable, Hlc(attached.stream.last_hlc.0 + 1));
        if self.several.is_some() {
            self.copying.await_floor();
        } else if self.copying.gap().is_some_and(|gap| gap.why == GapWhy::FirstCopy) {
            // Stamps say enough again, and nothing can be recovered before the copy has ended.
            self.gate.hold(HoldReason::Gap, false);
        }
    }

    pub(super) fn publish_backlog_stats(&self) {
        let Some(backlog) = self.spilling.backlog() else { return };
        let stats = &self.stats;
        let (_, on_disk_bytes) = backlog.on_disk();
        stats.backlog_limit_bytes.store(self.sequencer.backlog_limit_bytes(), Relaxed);
        stats.backlog_disk_bytes.store(on_disk_bytes, Relaxed);
        stats.backlog_spilled.store(backlog.meter().spilled(), Relaxed);
        stats.backlog_memory_bytes.store(backlog.meter().held_bytes(), Relaxed);
        stats.backlog_disk_failed.store(backlog.has_failed(), Relaxed);
    }
}
