//! Requests on their way through the log: which may go at once, which wait for slots, and which for the log to have
//! theirs.
//!
//! Slots are given out in the order of arrival; a request goes when a transaction on stable storage has all of its slots.

use super::geometry::Entry;
use super::{Action, ActivityLog, State};
use crate::sequencer::Extent;
use smallvec::SmallVec;
use tidelock_planted::Bug;
use tidelock_protocol::ids::Seq;

/// A request that was admitted.
#[derive(Debug, Default)]
pub(super) struct Hold {
    pub(super) slots: SmallVec<[u32; 2]>,
    /// It was admitted while everything may differ.
    pub(super) untracked: bool,
}

/// A request that does not have all its slots.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) request: u64,
    pub(super) entries: SmallVec<[Entry; 2]>,
    pub(super) slots: SmallVec<[u32; 2]>,
}

/// A request that has them, and waits until the log has them, too.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) request: u64,
    pub(super) slots: SmallVec<[u32; 2]>,
    /// So many of them the log does not have.
    pub(super) missing: usize,
}

/// Why no slot can be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocked {
    /// A disk must be flushed with this number or a later one.
    Flush(usize, u64),
    /// The backup must catch up.
    Backup,
    /// Requests must end.
    Busy,
}

impl ActivityLog {
    /// A guest wants to write or zero an extent. Returns whether it may be admitted now; if not,
    /// [`Action::Go`] says when. Its end must be told: [`finished`](Self::finished).
    pub fn admit(&mut self, request: u64, extent: Extent) -> bool {
        if self.admits_untracked() {
            self.hold(request, Hold { slots: SmallVec::new(), untracked: true });
            self.try_extent(request, extent);
            return true;
        }
        let mut entries = self.geometry.entries_of(extent);
        if matches!(self.state, State::Mapped | State::Sealing(_)) && self.waiting.is_empty() {
            let found = |entry: &Entry| {
                self.table.find(*entry).filter(|slot| self.table.slot(*slot).logged)
            };
            let slots: Option<SmallVec<[u32; 2]>> = entries.iter().map(found).collect();
            if let Some(slots) = slots {
                slots.iter().for_each(|slot| self.table.pin(*slot));
                self.counts.hits += 1;
                self.hold(request, Hold { slots, untracked: false });
                return true;
            }
        }
        self.counts.misses += 1;
        // Slots are given out in order, so that of two large requests one gets all that it needs.
        entries.reverse();
        self.waiting.push_back(Waiting { request, entries, slots: SmallVec::new() });
        self.pump();
        false
    }

    pub(super) fn hold(&mut self, request: u64, hold: Hold) {
        if self.unrecorded {
            hold.slots.iter().for_each(|slot| self.must_be_compared(*slot));
        }
        self.untracked += u64::from(hold.untracked);
        self.with_slots += u64::from(!hold.slots.is_empty());
        let other = self.held.insert(request, hold);
        assert!(other.is_none(), "request {request} is under way twice");
    }

    /// Whether requests need not be in the map, because what is on disk says that everything may
    /// differ and goes on to say so.
    pub(super) fn admits_untracked(&self) -> bool {
        match self.state {
            State::Off => true,
            State::Everything(_) => {
                self.everything_durable && self.writing.as_ref().is_none_or(|w| w.everything)
            }
            _ => false,
        }
    }

    /// A request that was admitted is over: its record was given out, and so was what repairs it
    /// if it failed. `last_seq`: the last seq that was given out.
    pub fn finished(&mut self, request: u64, last_seq: Seq) {
        self.last_seq = self.last_seq.max(last_seq);
        let Some(hold) = self.held.remove(&request) else { return };
        self.untracked -= u64::from(hold.untracked);
        self.with_slots -= u64::from(!hold.slots.is_empty());
        if let Some(trial) = &mut self.trial {
            trial.finished(request, self.last_seq);
        }
        for slot in hold.slots {
            self.release(slot);
        }
        self.pump();
    }

    fn release(&mut self, slot: u32) {
        let disk = self.table.slot(slot).entry.map_or(0, |entry| usize::from(entry.disk.0));
        self.table.unpin(slot, self.last_seq, self.disks[disk].begun + 1);
    }

    /// Gives slots to what waits, in order, and lets go what the log has.
    pub(super) fn pump(&mut self) {
        if self.admits_untracked() {
            return self.let_all_go();
        }
        if !matches!(self.state, State::Mapped | State::Sealing(_)) {
            return;
        }
        while let Some(mut first) = self.waiting.pop_front() {
            let Err(blocked) = self.place(&mut first) else {
                self.is_placed(first);
                continue;
            };
            self.waiting.push_front(first);
            match blocked {
                Blocked::Busy => {}
                Blocked::Flush(disk, number) if self.disks[disk].begun < number => self.flush(disk),
                Blocked::Flush(..) => {}
                Blocked::Backup => self.overflow(),
            }
            return;
        }
    }

    fn place(&mut self, waiting: &mut Waiting) -> Result<(), Blocked> {
        while let Some(entry) = waiting.entries.last().copied() {
            let slot = match self.table.find(entry) {
                Some(slot) => {
                    self.table.pin(slot);
                    slot
                }
                None => {
                    let slot = self.empty_slot()?;
                    self.table.assign(slot, entry);
                    self.enqueue(slot);
                    slot
                }
            };
            waiting.entries.pop();
            waiting.slots.push(slot);
        }
        Ok(())
    }

    /// A request has all its slots: it goes on when the log has them.
    fn is_placed(&mut self, waiting: Waiting) {
        let Waiting { request, slots, .. } = waiting;
        let is_missing = |slot: &&u32| !self.table.slot(**slot).logged;
        let missing: SmallVec<[u32; 2]> = slots.iter().filter(is_missing).copied().collect();
        let missing =
            if tidelock_planted::is(Bug::ActivityLate) { SmallVec::new() } else { missing };
        let placed = Placed { request, slots, missing: missing.len() };
        if missing.is_empty() {
            return self.let_go(placed);
        }
        self.next_placed += 1;
        for slot in missing {
            self.awaited.entry(slot).or_default().push(self.next_placed);
        }
        self.placed.insert(self.next_placed, placed);
    }

    pub(super) fn let_go(&mut self, placed: Placed) {
        let Placed { request, slots, .. } = placed;
        self.hold(request, Hold { slots, untracked: false });
        self.actions.push_back(Action::Go(request));
    }

    pub(super) fn enqueue(&mut self, slot: u32) {
        if !std::mem::replace(&mut self.table.slot_mut(slot).queued, true) {
            self.queue.push_back(slot);
        }
    }

    /// A slot that stands for nothing, or for an extent in which both sites hold the same, for good.
    fn empty_slot(&mut self) -> Result<u32, Blocked> {
        if let Some(slot) = self.table.take_free() {
            return Ok(slot);
        }
        let Some(slot) = self.table.coldest() else {
            // Requests end by themselves, a comparison needs the backup.
            let busy = !self.placed.is_empty() || self.with_slots > 0;
            return Err(if busy { Blocked::Busy } else { Blocked::Backup });
        };
        let of = *self.table.slot(slot);
        let disk = of.entry.map_or(0, |entry| usize::from(entry.disk.0));
        let has_backup = of.needs <= self.durable || tidelock_planted::is(Bug::ActivityForgotten);
        let is_flushed = self.disks[disk].done >= of.stable_after
            || tidelock_planted::is(Bug::ActivityUnflushed);
        if !has_backup {
            return Err(Blocked::Backup);
        }
        if !is_flushed {
            return Err(Blocked::Flush(disk, of.stable_after));
        }
        self.taken += 1;
        if self.taken >= (self.geometry.slots / 4).max(1) {
            // Ahead of the need: what waits here is a guest.
            self.taken = 0;
            (0..self.disks.len()).for_each(|disk| self.flush(disk));
        }
        Ok(slot)
    }

    pub(super) fn let_all_go(&mut self) {
        self.awaited.clear();
        let placed = std::mem::take(&mut self.placed).into_values();
        let placed = placed.map(|Placed { request, slots, .. }| (request, slots));
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let waiting = waiting.map(|Waiting { request, slots, .. }| (request, slots));
        for (request, slots) in placed.chain(waiting) {
            self.hold(request, Hold { slots, untracked: true });
            self.actions.push_back(Action::Go(request));
        }
    }

    /// A request that is not noted: would it have fitted?
    fn try_extent(&mut self, request: u64, extent: Extent) {
        let Some(trial) = &mut self.trial else { return };
        let entries = self.geometry.entries_of(extent);
        if !trial.admit(request, entries, self.durable) {
            self.trial = None;
            self.retry_from = self.last_seq;
        }
    }
}
