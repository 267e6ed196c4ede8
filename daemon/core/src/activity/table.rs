//! The map in memory: slots, where to find an extent, and which slot was used longest ago.
//!
//! Invariant: the list of resting slots is ordered by what each waits for before it may be given
//! to another extent, so the coldest one answers for all.

use super::geometry::{Entry, Geometry};
use crate::sequencer::Extent;
use std::collections::HashMap;
use tidelock_protocol::ids::Seq;

const NONE: u32 = u32::MAX;

/// A slot.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// What it stands for.
    pub entry: Option<Entry>,
    /// Requests that are under way in it, or wait for it.
    pub users: u32,
    /// The log on disk has it.
    pub logged: bool,
    /// It is among those that the next transactions change.
    pub queued: bool,
    /// The backup needs this much before the extent may be forgotten.
    pub needs: Seq,
    /// The disk needs a flush of this number, or a later one.
    pub stable_after: u64,
    /// From the run before, or written before the stream began, and not compared yet.
    pub uncompared_bytes: u64,
    before: u32,
    after: u32,
    rests: bool,
}

impl Slot {
    const EMPTY: Slot = Slot {
        entry: None,
        users: 0,
        logged: false,
        queued: false,
        needs: Seq::ZERO,
        stable_after: 0,
        uncompared_bytes: 0,
        before: NONE,
        after: NONE,
        rests: false,
    };
}

/// The map.
#[derive(Debug)]
pub struct Table {
    geometry: Geometry,
    disk_bytes: Vec<u64>,
    slots: Vec<Slot>,
    index: HashMap<Entry, u32>,
    free: Vec<u32>,
    /// The ends of the list of resting slots.
    coldest: u32,
    hottest: u32,
    bytes: u64,
}

impl Table {
    /// An empty map.
    #[must_use]
    pub fn new(geometry: Geometry, disk_bytes: Vec<u64>) -> Self {
        Self {
            geometry,
            disk_bytes,
            slots: vec![Slot::EMPTY; geometry.slots as usize],
            index: HashMap::new(),
            free: (0..geometry.slots).rev().collect(),
            coldest: NONE,
            hottest: NONE,
            bytes: 0,
        }
    }

    /// A map as a log has it. Nothing of it rests until it has been compared.
    #[must_use]
    pub fn inherited(geometry: Geometry, disk_bytes: Vec<u64>, entries: &[Option<Entry>]) -> Self {
        let mut table = Self::new(geometry, disk_bytes);
        table.free.clear();
        for (nth, entry) in entries.iter().enumerate().rev() {
            let slot = nth as u32;
            let Some(entry) = *entry else {
                table.free.push(slot);
                continue;
            };
            table.bytes += table.extent_of(entry).len_bytes;
            let of = &mut table.slots[nth];
            (of.entry, of.logged) = (Some(entry), true);
            of.uncompared_bytes =
                geometry.extent_of(entry, table.disk_bytes[usize::from(entry.disk.0)]).len_bytes;
            if entry.is_narrow() {
                table.index.insert(entry, slot);
            }
            // Nothing of it is on this disk.
            if of.uncompared_bytes == 0 {
                table.rest(slot);
            }
        }
        table
    }

    /// A slot.
    #[must_use]
    pub fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// A slot, to change what does not decide where it stands.
    pub fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.slots[slot as usize]
    }

    /// The slot of one extent, if it has one.
    #[must_use]
    pub fn find(&self, entry: Entry) -> Option<u32> {
        if entry.is_narrow() { self.index.get(&entry).copied() } else { None }
    }

    /// A request begins in a slot.
    pub fn pin(&mut self, slot: u32) {
        self.wake(slot);
        self.slots[slot as usize].users += 1;
    }

    /// A request has ended in a slot. Returns whether it was the last one.
    pub fn unpin(&mut self, slot: u32, needs: Seq, stable_after: u64) -> bool {
        let of = &mut self.slots[slot as usize];
        of.users -= 1;
        of.needs = of.needs.max(needs);
        of.stable_after = of.stable_after.max(stable_after);
        if of.users == 0 && of.uncompared_bytes == 0 {
            self.rest(slot);
        }
        self.slots[slot as usize].users == 0
    }

    /// An empty slot, if there is one.
    pub fn take_free(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// The resting slot that was used longest ago.
    #[must_use]
    pub fn coldest(&self) -> Option<u32> {
        (self.coldest != NONE).then_some(self.coldest)
    }

    /// Lets a slot stand for something else, in use by one request.
    pub fn assign(&mut self, slot: u32, entry: Entry) {
        self.wake(slot);
        if let Some(old) = self.slots[slot as usize].entry.take() {
            self.bytes -= self.extent_of(old).len_bytes;
            if old.is_narrow() {
                self.index.remove(&old);
            }
        }
        let queued = self.slots[slot as usize].queued;
        self.slots[slot as usize] = Slot { entry: Some(entry), users: 1, queued, ..Slot::EMPTY };
        self.bytes += self.extent_of(entry).len_bytes;
        if entry.is_narrow() {
            self.index.insert(entry, slot);
        }
    }

    /// Part of a disk has been compared, and is the same at both sites. Returns how many slots are
    /// done by it.
    pub fn compared(&mut self, extent: Extent, needs: Seq, stable_after: u64, wide: &[u32]) -> u32 {
        let unit = u64::from(self.geometry.extent_bytes);
        let mut done = 0;
        for at in extent.offset / unit..extent.end().div_ceil(unit) {
            let Ok(first) = u32::try_from(at) else { break };
            if let Some(slot) = self.find(Entry { disk: extent.disk, first, more: 0 }) {
                done += u32::from(self.compared_in(slot, extent, needs, stable_after));
            }
        }
        for slot in wide {
            done += u32::from(self.compared_in(*slot, extent, needs, stable_after));
        }
        done
    }

    fn compared_in(&mut self, slot: u32, extent: Extent, needs: Seq, stable_after: u64) -> bool {
        let Some(entry) = self.slots[slot as usize].entry else { return false };
        let own = self.extent_of(entry);
        if !own.overlaps(&extent) {
            return false;
        }
        let shared = own.end().min(extent.end()) - own.offset.max(extent.offset);
        let of = &mut self.slots[slot as usize];
        if of.uncompared_bytes == 0 {
            return false;
        }
        of.uncompared_bytes = of.uncompared_bytes.saturating_sub(shared);
        if of.uncompared_bytes > 0 {
            return false;
        }
        self.settle(slot, needs, stable_after);
        true
    }

    /// Nothing of a slot has to be compared any more.
    fn settle(&mut self, slot: u32, needs: Seq, stable_after: u64) {
        let of = &mut self.slots[slot as usize];
        of.uncompared_bytes = 0;
        of.needs = of.needs.max(needs);
        of.stable_after = of.stable_after.max(stable_after);
        if of.users == 0 && !of.rests {
            self.rest(slot);
        }
    }

    /// Nothing of any slot has to be compared any more, and each waits for the same at least.
    pub fn settle_all(&mut self, needs: Seq, stable_after: impl Fn(usize) -> u64) {
        for slot in 0..self.slots.len() as u32 {
            if let Some(entry) = self.slots[slot as usize].entry {
                self.settle(slot, needs, stable_after(usize::from(entry.disk.0)));
            }
        }
    }

    /// Whatever rests may be given to another extent at once.
    pub fn free_resting(&mut self) {
        let mut slot = self.coldest;
        while slot != NONE {
            let of = &mut self.slots[slot as usize];
            (of.needs, of.stable_after) = (Seq::ZERO, 0);
            slot = of.after;
        }
    }

    /// What the map stands for, as the fewest ranges.
    #[must_use]
    pub fn ranges(&self) -> Vec<Extent> {
        let entries = self.slots.iter().filter_map(|slot| slot.entry);
        super::geometry::merged(entries.map(|entry| self.extent_of(entry)).collect())
    }

    /// Slots in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.geometry.slots - self.free.len() as u32
    }

    /// The bytes that its slots stand for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn extent_of(&self, entry: Entry) -> Extent {
        self.geometry.extent_of(entry, self.disk_bytes[usize::from(entry.disk.0)])
    }

    fn rest(&mut self, slot: u32) {
        let of = &mut self.slots[slot as usize];
        debug_assert!(!of.rests);
        (of.rests, of.before, of.after) = (true, self.hottest, NONE);
        match self.hottest {
            NONE => self.coldest = slot,
            last => self.slots[last as usize].after = slot,
        }
        self.hottest = slot;
    }

    fn wake(&mut self, slot: u32) {
        let Slot { before, after, rests, .. } = self.slots[slot as usize];
        if !rests {
            return;
        }
        match before {
            NONE => self.coldest = after,
            before => self.slots[before as usize].after = after,
        }
        match after {
            NONE => self.hottest = before,
            after => self.slots[after as usize].before = before,
        }
        self.slots[slot as usize].rests = false;
    }
}
