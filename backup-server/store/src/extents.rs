//! Parts of disks: a map from byte ranges to values in which a later range replaces what it overlaps.

use std::collections::BTreeMap;
use std::ops::Range;
use tidelock_protocol::ids::{DiskId, WriterId};
use tidelock_protocol::record::{Body, Record};

/// One disk of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskKey {
    /// The host.
    pub writer: WriterId,
    /// Its number there.
    pub disk: DiskId,
}

impl DiskKey {
    /// Before all others.
    pub const FIRST: Self = Self { writer: WriterId(0), disk: DiskId(0) };

    /// The disk that a record changes.
    #[must_use]
    pub fn of(record: &Record<impl Body>) -> Self {
        Self { writer: record.writer, disk: DiskId(record.body.fields().object) }
    }
}

/// A value that stands for a range and can be cut at its front.
pub trait Slice: Copy {
    /// What stands for the range without its first bytes.
    #[must_use]
    fn without_front(self, bytes: u64) -> Self;
}

#[derive(Clone, Copy, Debug)]
struct Extent<V> {
    end: u64,
    value: V,
}

/// The map. Ranges do not overlap and are not empty.
#[derive(Clone, Debug)]
pub struct Extents<V> {
    by_start: BTreeMap<u64, Extent<V>>,
}

impl<V> Default for Extents<V> {
    fn default() -> Self {
        Self { by_start: BTreeMap::new() }
    }
}

impl<V: Slice> Extents<V> {
    /// The range now has this value, whatever was there.
    pub fn insert(&mut self, range: Range<u64>, value: V) {
        if range.is_empty() {
            return;
        }
        self.remove(range.clone());
        self.by_start.insert(range.start, Extent { end: range.end, value });
    }

    /// The range has no value any more.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        // Mostly nothing is there.
        let before = self.by_start.range(..range.end).next_back();
        if before.is_none_or(|(_, extent)| extent.end <= range.start) {
            return;
        }
        // The one that reaches into the range from before it.
        if let Some((&start, extent)) = self.by_start.range_mut(..range.start).next_back()
            && extent.end > range.start
        {
            let (end, value) = (extent.end, extent.value);
            extent.end = range.start;
            if end > range.end {
                let rest = Extent { end, value: value.without_front(range.end - start) };
                self.by_start.insert(range.end, rest);
                return;
            }
        }
        while let Some((&start, &extent)) = self.by_start.range(range.clone()).next() {
            self.by_start.remove(&start);
            if extent.end > range.end {
                let value = extent.value.without_front(range.end - start);
                self.by_start.insert(range.end, Extent { end: extent.end, value });
            }
        }
    }

    /// The range in pieces, in order, without a hole: what has a value, and what has none.
    pub fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, Option<V>)> + '_ {
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let start = at;
            if let Some((&from, extent)) = self.by_start.range(..=at).next_back()
                && extent.end > at
            {
                at = extent.end.min(range.end);
                return Some((start..at, Some(extent.value.without_front(start - from))));
            }
            let next = self.by_start.range(at..range.end).next();
            at = next.map_or(range.end, |(&next, _)| next);
            Some((start..at, None))
        })
    }

    /// The ranges that have a value, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range<u64>, &V)> + '_ {
        self.by_start.iter().map(|(start, extent)| (*start..extent.end, &extent.value))
    }

    /// Drops the ranges whose value does not satisfy the condition.
    pub fn retain(&mut self, mut keep: impl FnMut(&V) -> bool) {
        self.by_start.retain(|_, extent| keep(&extent.value));
    }

    /// How many ranges there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_start.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A value that counts on, so that a wrong cut shows.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Counted(u64);

    impl Slice for Counted {
        fn without_front(self, bytes: u64) -> Self {
            Self(self.0 + bytes)
        }
    }

    proptest! {
        #[test]
        fn equals_an_array_of_bytes(
            ops in prop::collection::vec((0u64..60, 0u64..30, any::<bool>()), 0..40),
            ask in (0u64..60, 0u64..60),
        ) {
            let mut map = Extents::default();
            let mut oracle = [None; 100];
            for (n, (start, len, drop_odd)) in ops.into_iter().enumerate() {
                let value = Counted(1000 * n as u64);
                map.insert(start..start + len, value);
                for i in start..start + len {
                    oracle[i as usize] = Some(Counted(value.0 + i - start));
                }
                if drop_odd {
                    map.retain(|v| v.0 / 1000 % 2 == 0);
                    oracle.iter_mut().for_each(|v| *v = v.filter(|v| v.0 / 1000 % 2 == 0));
                }
            }
            let range = ask.0..(ask.0 + ask.1).min(100);
            let mut at = range.start;
            for (piece, value) in map.pieces(range.clone()) {
                prop_assert_eq!(piece.start, at);
                prop_assert!(piece.end > piece.start && piece.end <= range.end);
                for i in piece.clone() {
                    let expected = value.map(|v| v.without_front(i - piece.start));
                    prop_assert_eq!(oracle[i as usize], expected);
                }
                at = piece.end;
            }
            prop_assert_eq!(at, range.end.max(range.start));
        }
    }
}
