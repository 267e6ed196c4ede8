//! What the run before has left in the map, and what was admitted without a record: it stays until it was compared.

use super::{ActivityLog, State, Why};
use crate::sequencer::Extent;
use tidelock_protocol::ids::{Epoch, Seq};
use tidelock_protocol::message::{Basis, CopyState};

/// What a resync has to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compare {
    /// No copy is begun.
    Nothing,
    /// These ranges.
    Mapped(Vec<Extent>),
    /// Whole disks, and why not less.
    All(String),
}

/// What an attachment says that the log goes by.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// How much the backup has.
    pub copy: CopyState,
    /// The granted epoch.
    pub epoch: Epoch,
    /// The last record that the backup has.
    pub durable: Seq,
    /// Evidence that the backup accepts for the end of the host's last run. It decides how much is compared.
    pub basis: Basis,
    /// A copy is under way already.
    pub copying: bool,
}

/// What the log of a run before left.
#[derive(Clone, Copy, Debug)]
pub(super) struct Before {
    pub(super) epoch: Epoch,
    pub(super) covered: Seq,
    pub(super) everything: bool,
}

impl ActivityLog {
    /// Until the backup has attached the member, requests may be admitted of which it hears nothing: their extents
    /// stay in the map until they have been compared.
    pub fn begin_unrecorded(&mut self) {
        self.unrecorded = true;
        if self.before.is_none() && self.unusable.is_none() {
            self.before = Some(Before::of(&self.head));
        }
    }

    /// From now on, until [`attached`](Self::attached) has told what to compare, requests are done of which the backup
    /// hears nothing, also such as were admitted before and wait behind the log: their extents stay in the map until they
    /// have been compared.
    pub fn stop_recording(&mut self) {
        if matches!(self.state, State::Sealing(_)) {
            // What it waits for would cover what has no record.
            self.give_up_map(Why::Copy);
        }
        self.begin_unrecorded();
        let slots: Vec<u32> =
            self.held.values().flat_map(|hold| hold.slots.iter().copied()).collect();
        slots.into_iter().for_each(|slot| self.must_be_compared(slot));
    }

    /// The backup has attached the member meanwhile. What is not recorded goes on to be noted.
    pub fn attached_unrecorded(&mut self, epoch: Epoch, durable: Seq) {
        debug_assert!(self.unrecorded);
        self.committed(durable);
        self.confirm(epoch);
    }

    fn confirm(&mut self, epoch: Epoch) {
        let own = self.head.incarnation;
        if (self.head.confirmed, self.head.epoch) != (own, epoch) {
            (self.head.confirmed, self.head.epoch) = (own, epoch);
            self.head_changed = true;
        }
    }

    /// The stream of the run before goes on after this seq, with all that it had not sent: what the map has of it need not be
    /// compared, unless the backup wants it.
    pub fn goes_on_after(&mut self, last_seq: Seq) {
        self.goes_on_after = Some(last_seq);
    }

    pub(super) fn must_be_compared(&mut self, slot: u32) {
        let Some(entry) = self.table.slot(slot).entry else { return };
        let disk_bytes = self.disk_bytes[usize::from(entry.disk.0)];
        let len_bytes = self.geometry.extent_of(entry, disk_bytes).len_bytes;
        let of = self.table.slot_mut(slot);
        let is_news = of.uncompared_bytes == 0 && len_bytes > 0;
        of.uncompared_bytes = len_bytes;
        if is_news {
            self.uncompared += 1;
            self.uncompared_wide.extend((!entry.is_narrow()).then_some(slot));
        }
    }

    /// The backup has attached the member. Returns what a copy has to look at.
    pub fn attached(&mut self, attachment: &Attachment) -> Compare {
        let Attachment { copy, epoch, durable, ref basis, copying } = *attachment;
        let before = self.before.take();
        let unusable = self.unusable.take();
        self.unrecorded = false;
        if copy != CopyState::Whole {
            self.goes_on_after = None;
        }
        self.committed(durable);
        self.confirm(epoch);
        if copying || copy == CopyState::Whole {
            // What the map has of the time before is in the stream, up to here.
            if let Some(last_seq) = self.goes_on_after.take() {
                self.last_seq = self.last_seq.max(last_seq);
                self.settle_all();
            }
            return Compare::Nothing;
        }
        let why = match (before, copy) {
            _ if matches!(self.state, State::Off | State::Discarding) => {
                unusable.unwrap_or_else(|| "no activity log is kept".to_owned())
            }
            (_, CopyState::Empty | CopyState::Partial | CopyState::Seeded) => {
                "the backup has no whole copy".to_owned()
            }
            (before, _) => {
                let refusal = match (unusable, basis, before) {
                    (Some(why), ..) => Some(why),
                    (None, Basis::Everything { why }, _) => Some(why.clone()),
                    (None, _, None) => {
                        Some("the backup does not have what it acknowledged".to_owned())
                    }
                    (None, _, Some(before)) => before.refusal(epoch, durable).map(str::to_owned),
                };
                match (refusal, &self.state) {
                    (Some(why), _) => why,
                    // What was admitted meanwhile is in no map.
                    (None, State::Everything(why)) => why.to_string(),
                    (None, _) => return Compare::Mapped(self.table.ranges()),
                }
            }
        };
        self.give_up_map(Why::Copy);
        Compare::All(why)
    }

    /// Part of a disk was compared or copied: both sites hold the same there once everything up to
    /// `last_seq` has arrived.
    pub fn compared(&mut self, extent: Extent, last_seq: Seq) {
        self.last_seq = self.last_seq.max(last_seq);
        let Some(of) = self.disks.get(usize::from(extent.disk.0)) else { return };
        if self.uncompared == 0 {
            return;
        }
        let after = of.begun + 1;
        let done = self.table.compared(extent, self.last_seq, after, &self.uncompared_wide);
        self.uncompared -= done;
        if done > 0 {
            let Self { table, uncompared_wide, .. } = self;
            uncompared_wide.retain(|slot| table.slot(*slot).uncompared_bytes > 0);
            self.pump();
        }
    }

    pub(super) fn settle_all(&mut self) {
        let Self { table, disks, last_seq, .. } = self;
        table.settle_all(*last_seq, |disk| disks[disk].begun + 1);
        self.uncompared = 0;
        self.uncompared_wide.clear();
    }
}

impl Before {
    /// Why the map cannot be believed, if it cannot.
    fn refusal(&self, epoch: Epoch, durable: Seq) -> Option<&'static str> {
        if self.everything {
            return Some("the activity log said that everything may differ");
        }
        if self.epoch != epoch {
            return Some("the activity log is of another epoch");
        }
        if durable < self.covered {
            return Some("the backup has lost what it acknowledged");
        }
        None
    }
}
