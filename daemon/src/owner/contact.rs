//! Serving guests before the backup was reached in this run, if the group is configured so.
//!
//! ```text
//!                 attached: the stream begins, or goes on after a clean stop
//!  waiting ─────────────────────────────────────────────────────────────────────► recording
//!     │ the backup was not reached for so long,                                       ▲
//!     │ and the link will not say that the last run ended cleanly                     │ attached: what the
//!     └───────────────────────────────► serving, not recorded ────────────────────────┘ map has is compared
//! ```
//!
//! Invariant: what is written while nothing is recorded is in the activity log before it is written, and stays there
//! until it was compared. So every write is either in the stream or in the map: the sequencer begins to record in the
//! turn in which the map ceases to keep what comes, and what was begun before it holds its extent until it ends.

use super::{Owner, Resume};
use crate::sequencer::{Extent, Sequencer};
use std::time::Duration;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Attached;

use crate::link::port::ToLink;

/// For so long a start waits for the backup all the same: where it is there, nothing has to be compared.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How a run stands before the stream goes on.
#[derive(Debug)]
pub(super) struct Contact {
    /// Where it would go on after a clean stop.
    resume: Option<Resume>,
    /// From then on guests are served without it; `None`: they wait.
    serve_from: Option<MonoNanos>,
}

impl Contact {
    /// `serve_after`: guests do not wait for the backup longer than this.
    pub(super) fn new(
        sequencer: &mut Sequencer,
        resume: Option<Resume>,
        serve_after: Option<Duration>,
        now: MonoNanos,
        wall_ms: u64,
    ) -> Self {
        if let Some(after) = serve_after {
            let serve_from = Some(now.plus_ms(after.as_millis() as u64));
            return Self { resume, serve_from };
        }
        if let Some(Resume { epoch, seq, hlc }) = resume {
            sequencer.start(epoch, seq, hlc, now, wall_ms);
        }
        Self { resume: None, serve_from: None }
    }
}

impl Owner {
    /// Asks for what guests are served by without the backup, when it is time.
    pub(super) fn drive_contact(&mut self) {
        let Some(serve_from) = self.contact.serve_from else { return };
        if self.now < serve_from {
            return self.arm_tick();
        }
        self.contact.serve_from = None;
        if self.draining.is_none() {
            self.to_link(ToLink::ServeUnrecorded);
        }
    }

    /// The link will say first of all that the disks may differ.
    pub(super) fn may_serve_unrecorded(&mut self) {
        if self.sequencer.is_started() {
            return;
        }
        if let Some(Resume { hlc, .. }) = self.contact.resume.take() {
            self.sequencer.observe(hlc);
        }
        tracing::warn!(
            member = self.member,
            "the backup was not reached since the start: guests are served, and nothing of what they write is \
             recorded; it is compared when the backup is there"
        );
        self.sequencer.serve_unrecorded(self.now, self.wall_ms);
    }

    /// The backup has attached the member. `first`: this run did not know where to go on. Returns where writes are in
    /// flight that are not recorded.
    pub(super) fn begin_recording(&mut self, attached: &Attached, first: bool) -> Vec<Extent> {
        self.contact.serve_from = None;
        let (now, wall_ms) = (self.now, self.wall_ms);
        let unrecorded = self.sequencer.unrecorded();
        if first {
            self.contact.resume = None;
            let Attached { epoch, durable, last_hlc, .. } = *attached;
            self.sequencer.start(epoch, durable, last_hlc, now, wall_ms);
        } else if let Some(Resume { epoch, seq, hlc }) = self.contact.resume.take() {
            self.sequencer.start(epoch, seq, hlc, now, wall_ms);
        }
        unrecorded
    }
}
