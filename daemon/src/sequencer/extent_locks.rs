//! Which extents have an operation in flight: the overlap rule of the sequencer.
//!
//! Held extents of one disk never overlap each other, so they sort by offset and a conflict is
//! found by looking at two neighbours.

use std::collections::BTreeMap;
use tidelock_protocol::ids::DiskId;

/// Bytes of one disk, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The disk.
    pub disk: DiskId,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub len_bytes: u64,
}

impl Extent {
    /// The byte after the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.len_bytes
    }

    /// Whether the two share a byte.
    #[must_use]
    pub fn overlaps(&self, other: &Extent) -> bool {
        self.disk == other.disk && self.offset < other.end() && other.offset < self.end()
    }

    /// The smallest extent around this one that begins and ends at multiples of `align`.
    #[must_use]
    pub fn aligned_to(&self, align: u64) -> Extent {
        let offset = self.offset / align * align;
        let end = self.end().div_ceil(align) * align;
        Extent { disk: self.disk, offset, len_bytes: end - offset }
    }
}

/// The extents that are held.
#[derive(Debug, Default)]
pub struct ExtentLocks {
    /// Start of each held extent to its end.
    held: BTreeMap<(DiskId, u64), u64>,
}

impl ExtentLocks {
    /// Takes an extent, unless it overlaps one that is held.
    pub fn try_hold(&mut self, extent: Extent) -> bool {
        assert!(extent.len_bytes > 0);
        let before = self.held.range(..(extent.disk, extent.end())).next_back();
        if let Some(((disk, _), end)) = before
            && *disk == extent.disk
            && *end > extent.offset
        {
            return false;
        }
        self.held.insert((extent.disk, extent.offset), extent.end());
        true
    }

    /// Gives an extent back.
    pub fn release(&mut self, extent: Extent) {
        let end = self.held.remove(&(extent.disk, extent.offset));
        assert_eq!(end, Some(extent.end()), "released what was not held");
    }

    /// How many extents are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(disk: u16, offset: u64, len_bytes: u64) -> Extent {
        Extent { disk: DiskId(disk), offset, len_bytes }
    }

    #[test]
    fn neighbours_do_not_conflict_and_one_shared_byte_does() {
        let mut locks = ExtentLocks::default();
        assert!(locks.try_hold(extent(0, 10, 10)));
        assert!(locks.try_hold(extent(0, 20, 5)));
        assert!(locks.try_hold(extent(0, 5, 5)));
        assert!(locks.try_hold(extent(1, 12, 1)), "another disk");
        assert!(!locks.try_hold(extent(0, 19, 1)));
        assert!(!locks.try_hold(extent(0, 0, 6)));
        assert!(!locks.try_hold(extent(0, 0, 100)));
        locks.release(extent(0, 10, 10));
        assert!(locks.try_hold(extent(0, 19, 1)));
    }

    #[test]
    fn alignment_grows_outwards() {
        assert_eq!(extent(0, 5, 1).aligned_to(4), extent(0, 4, 4));
        assert_eq!(extent(0, 4, 4).aligned_to(4), extent(0, 4, 4));
        assert_eq!(extent(0, 3, 2).aligned_to(4), extent(0, 0, 8));
    }

    proptest! {
        #[test]
        fn as_a_list_of_extents_would(ops in prop::collection::vec(
            (0u16..2, 0u64..40, 1u64..12, any::<prop::sample::Index>(), any::<bool>()), 1..200)
        ) {
            let mut locks = ExtentLocks::default();
            let mut oracle: Vec<Extent> = Vec::new();
            for (disk, offset, len, pick, release) in ops {
                if release && !oracle.is_empty() {
                    let e = oracle.swap_remove(pick.index(oracle.len()));
                    locks.release(e);
                    continue;
                }
                let e = extent(disk, offset, len);
                let free = !oracle.iter().any(|held| held.overlaps(&e));
                prop_assert_eq!(locks.try_hold(e), free);
                if free {
                    oracle.push(e);
                }
                prop_assert_eq!(locks.len(), oracle.len());
            }
        }
    }
}
