//! How disks are divided into extents, and how extents are named in the log.

use crate::sequencer::Extent;
use smallvec::SmallVec;
use tidelock_protocol::ids::DiskId;

/// The unit in which the log is written, and the size of its superblocks and transactions.
pub const BLOCK_BYTES: usize = 4096;
/// Blocks before the ring: two copies of the superblock.
pub const SUPERBLOCKS: u32 = 2;
/// Slots that one transaction can change.
pub const UPDATES_MAX: usize = 128;
/// Slots that one transaction can repeat.
pub const CONTEXT_MAX: u16 = 256;
/// Extents that one entry can stand for.
pub const ENTRY_EXTENTS_MAX: u64 = 1 << 16;
/// A request over more extents takes one slot for all of them, which is not kept for others.
const WIDE_FROM: u32 = 16;

/// The sizes that a log is made with. They are recorded in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of an extent, a power of two.
    pub extent_bytes: u32,
    /// Entries that the map holds.
    pub slots: u32,
    /// Slots that each transaction repeats, so that no part of the map depends on old ones.
    pub context: u16,
}

/// Neighbouring extents of one disk, as they stand in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entry {
    /// The disk.
    pub disk: DiskId,
    /// The first extent.
    pub first: u32,
    /// How many, less one.
    pub more: u16,
}

impl Entry {
    /// What stands in an empty slot.
    pub const EMPTY: u64 = u64::MAX;

    /// As it stands in a block: disk, count less one, first extent, from the top.
    #[must_use]
    pub fn to_u64(self) -> u64 {
        u64::from(self.disk.0) << 48 | u64::from(self.more) << 32 | u64::from(self.first)
    }

    /// What [`to_u64`](Self::to_u64) made; `None`: an empty slot.
    #[must_use]
    pub fn from_u64(packed: u64) -> Option<Self> {
        (packed != Self::EMPTY).then_some(Self {
            disk: DiskId((packed >> 48) as u16),
            more: (packed >> 32) as u16,
            first: packed as u32,
        })
    }

    /// Whether it stands for one extent: only such entries are found again by other requests.
    #[must_use]
    pub fn is_narrow(&self) -> bool {
        self.more == 0
    }
}

impl Geometry {
    /// Blocks of the ring. The last transaction may be torn, and lies where the oldest one was;
    /// those between must repeat the whole map.
    #[must_use]
    pub fn ring(&self) -> u32 {
        self.turns() + 2
    }

    /// Transactions that repeat the whole map.
    #[must_use]
    pub fn turns(&self) -> u32 {
        self.slots.div_ceil(self.context.into())
    }

    /// Bytes of the file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        u64::from(SUPERBLOCKS + self.ring()) * BLOCK_BYTES as u64
    }

    /// Where the transaction of this number stands, in bytes.
    #[must_use]
    pub fn place_of(&self, number: u64) -> u64 {
        (u64::from(SUPERBLOCKS) + number % u64::from(self.ring())) * BLOCK_BYTES as u64
    }

    /// The slots that the transaction of this number repeats.
    #[must_use]
    pub fn context_of(&self, number: u64) -> std::ops::Range<u32> {
        let turn = (number % u64::from(self.turns())) as u32;
        let start = turn * u32::from(self.context);
        start..(start + u32::from(self.context)).min(self.slots)
    }

    /// Whether sizes and counts are such as a log can be made with.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.extent_bytes.is_power_of_two()
            && self.extent_bytes >= 512
            && (1..=CONTEXT_MAX).contains(&self.context)
            && (4..=1 << 20).contains(&self.slots)
    }

    /// The entries that a request needs. More than a few extents take one slot together.
    #[must_use]
    pub fn entries_of(&self, extent: Extent) -> SmallVec<[Entry; 2]> {
        let unit = u64::from(self.extent_bytes);
        let (first, end) = (extent.offset / unit, extent.end().div_ceil(unit));
        let step = if end - first > u64::from(self.wide_from()) { ENTRY_EXTENTS_MAX } else { 1 };
        let mut entries = SmallVec::new();
        let mut at = first;
        while at < end {
            let count = step.min(end - at);
            let first = u32::try_from(at).expect("a disk has at most 2^32 extents");
            entries.push(Entry { disk: extent.disk, first, more: (count - 1) as u16 });
            at += count;
        }
        entries
    }

    /// From how many extents on a request takes one slot for all.
    #[must_use]
    pub fn wide_from(&self) -> u32 {
        (self.slots / 8).clamp(1, WIDE_FROM)
    }

    /// The bytes of a disk that an entry stands for; empty if it is beyond the disk's end.
    #[must_use]
    pub fn extent_of(&self, entry: Entry, disk_bytes: u64) -> Extent {
        let unit = u64::from(self.extent_bytes);
        let offset = (u64::from(entry.first) * unit).min(disk_bytes);
        let end = ((u64::from(entry.first) + u64::from(entry.more) + 1) * unit).min(disk_bytes);
        Extent { disk: entry.disk, offset, len_bytes: end - offset }
    }
}

/// The smallest list of ranges that covers these, in order, without overlaps.
#[must_use]
pub fn merged(mut extents: Vec<Extent>) -> Vec<Extent> {
    extents.retain(|extent| extent.len_bytes > 0);
    extents.sort_unstable_by_key(|extent| (extent.disk, extent.offset));
    let mut out: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match out.last_mut() {
            Some(last) if last.disk == extent.disk && extent.offset <= last.end() => {
                last.len_bytes = last.end().max(extent.end()) - last.offset;
            }
            _ => out.push(extent),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { extent_bytes: 4096, slots: 64, context: 10 };

    fn extent(offset: u64, len_bytes: u64) -> Extent {
        Extent { disk: DiskId(3), offset, len_bytes }
    }

    #[test]
    fn entries_survive_and_cover_what_they_are_for() {
        for (offset, len_bytes, count) in
            [(0, 1, 1), (4095, 2, 2), (4096, 4096, 1), (100, 8 * 4096, 1), (0, 1 << 29, 2)]
        {
            let entries = GEOMETRY.entries_of(extent(offset, len_bytes));
            assert_eq!(entries.len(), count, "{offset} {len_bytes}");
            let ranges = entries.iter().map(|e| GEOMETRY.extent_of(*e, u64::MAX)).collect();
            let all = merged(ranges);
            assert!(all.len() == 1 && all[0].offset <= offset);
            assert!(all[0].end() >= offset + len_bytes && all[0].end() < offset + len_bytes + 4096);
            for entry in entries {
                assert_eq!(Entry::from_u64(entry.to_u64()), Some(entry));
            }
        }
        assert_eq!(Entry::from_u64(Entry::EMPTY), None);
        let last = Entry { disk: DiskId(3), first: 1, more: 0 };
        assert_eq!(GEOMETRY.extent_of(last, 5000), extent(4096, 904), "cut at the disk's end");
        assert_eq!(GEOMETRY.extent_of(last, 100).len_bytes, 0);
    }

    #[test]
    fn any_transactions_of_one_turn_repeat_the_whole_map() {
        for first in 0..30 {
            let mut seen = [false; 64];
            for number in first..first + u64::from(GEOMETRY.turns()) {
                GEOMETRY.context_of(number).for_each(|slot| seen[slot as usize] = true);
            }
            assert_eq!(seen, [true; 64]);
        }
        assert!(GEOMETRY.ring() > GEOMETRY.turns() + 1);
    }

    #[test]
    fn ranges_merge() {
        let list = vec![extent(10, 5), extent(0, 4), extent(4, 2), extent(12, 1), extent(40, 0)];
        assert_eq!(merged(list), [extent(0, 6), extent(10, 5)]);
    }
}
