//! Serving guests before the backup was reached in this run, if the group is configured so.
//!
//! ```text
//!                 attached: the stream begins
//!  waiting ─────────────────────────────────────────────────────────────────────► recording
//!     │ the backup was not reached for so long,                                       ▲
//!     │ and the link will not say that the last run ended cleanly                     │ attached: what the
//!     └───────────────────────────────► serving, not recorded ────────────────────────┘ map has is compared
//! ```
//!
//! Invariant: what is written while nothing is recorded is in the activity log before it is written, and stays there
//! until it was compared. So every write is either in the stream or in the map: the sequencer begins to record in the
//! turn in which the map ceases to keep what comes, and what was begun before it holds its extent until it ends.

use super::Owner;
use super::driver::Driver;
use super::gap::GapWhy;
use super::replication::Clocks;
use crate::activity::ActivityLog;
use crate::link::port::{AttachedStream, ToLink};
use crate::sequencer::{Extent, Sequencer};
use std::time::Duration;
use tidelock_planted::{Bug, is};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;

/// For so long a start waits for the backup all the same: where it is there, nothing has to be compared.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How a run stands before the stream goes on. Sans-I/O: the simulator drives it, too.
#[derive(Debug)]
pub struct Contact {
    /// From then on guests are served without it; `None`: they wait.
    serve_from: Option<MonoNanos>,
}

/// What is to be done about guests that wait for the backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing.
    Nothing,
    /// To look again soon.
    Later,
    /// To ask the link whether they may be served ([`ToLink::ServeUnrecorded`]). It is said once.
    Ask,
}

impl Contact {
    /// `serve_after`: guests do not wait for the backup longer than this; `None`: they wait until it has attached the member.
    pub fn new(activity: &mut ActivityLog, serve_after: Option<Duration>, clocks: Clocks) -> Self {
        if serve_after.is_some() && !is(Bug::UnrecordedUnmapped) {
            activity.begin_unrecorded();
        }
        let serve_from = serve_after.map(|after| clocks.now.plus_ms(after.as_millis() as u64));
        Self { serve_from }
    }

    /// Time has passed.
    pub fn look(&mut self, now: MonoNanos) -> Look {
        match self.serve_from {
            None => Look::Nothing,
            Some(serve_from) if now < serve_from => Look::Later,
            Some(_) => {
                self.serve_from = None;
                Look::Ask
            }
        }
    }

    /// The link will say first of all that the disks may differ: guests are served. Returns whether that is news.
    pub fn serve(&mut self, sequencer: &mut Sequencer, clocks: Clocks) -> bool {
        if sequencer.is_started() {
            return false;
        }
        sequencer.serve_unrecorded(clocks.now, clocks.wall_ms);
        true
    }

    /// The backup has attached the member, in this turn: writes are recorded from here on. `first`: the stream begins, or
    /// goes on after a clean stop, where the backup says. Returns where writes are in flight that are not recorded.
    pub fn record(
        &mut self,
        sequencer: &mut Sequencer,
        attached: &AttachedStream,
        first: bool,
        clocks: Clocks,
    ) -> Vec<Extent> {
        self.serve_from = None;
        let Clocks { now, wall_ms } = clocks;
        let unrecorded = sequencer.unrecorded();
        if first {
            let AttachedStream { epoch, durable, stream } = attached;
            let last_hlc = if is(Bug::HlcGoesBack) { Hlc(0) } else { stream.last_hlc };
            sequencer.start(*epoch, *durable, last_hlc, now, wall_ms);
        }
        unrecorded
    }
}

impl<D: Driver> Owner<D> {
    /// Asks for what guests are served by without the backup, when it is time.
    pub(super) fn drive_contact(&mut self) {
        match self.contact.look(self.now) {
            Look::Nothing => {}
            Look::Later => self.arm_tick(),
            Look::Ask if self.draining.is_some() => {}
            Look::Ask => self.driver.to_link(ToLink::ServeUnrecorded),
        }
    }

    /// The link will say first of all that the disks may differ.
    pub(super) fn may_serve_unrecorded(&mut self) {
        let clocks = self.clocks();
        if self.contact.serve(&mut self.sequencer, clocks) {
            self.give_up_left("the backup was not reached, and guests are served without it");
            self.copying.stop_recording(GapWhy::Unreached, self.wall_ms);
            tracing::warn!(
                member = self.member,
                "the backup was not reached since the start: guests are served, and nothing of what they write is \
                 recorded; it is compared when the backup is there"
            );
            self.begin_serving();
        }
    }

    /// The backup has attached the member. `first`: this run did not know where to go on. Returns where writes are in
    /// flight that are not recorded.
    pub(super) fn begin_recording(
        &mut self,
        attached: &AttachedStream,
        first: bool,
    ) -> Vec<Extent> {
        let clocks = self.clocks();
        self.contact.record(&mut self.sequencer, attached, first, clocks)
    }
}
