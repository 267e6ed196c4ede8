//! Which operation waits for which others: the overlap rule of the sequencer.
//!
//! Invariant: of two operations that overlap the one that came first leaves before the other one is free.
//!
//! For each piece of a disk it is known who came for it last. Who comes waits for those whose pieces it
//! takes, and they for those before them, so each operation waits for a few others, however long the
//! queue for one block is (scoreboarding: Thornton 1964, for the CDC 6600). Entering and leaving cost as much
//! as there are pieces in the extent, and each operation makes two more of them at most.

use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
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

/// The number of an operation.
pub type Ticket = u64;

#[derive(Debug)]
struct Entered {
    extent: Extent,
    /// So many before it have not left.
    waits_for: usize,
    /// Who waits for it.
    behind: SmallVec<[Ticket; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    end: u64,
    last: Ticket,
}

/// The operations that have not ended, in the order in which they came.
#[derive(Debug, Default)]
pub struct ExtentOrder {
    entered: HashMap<Ticket, Entered>,
    /// By disk and first byte; they do not overlap.
    pieces: BTreeMap<(DiskId, u64), Piece>,
}

impl ExtentOrder {
    /// An operation comes. Returns whether it has to wait for nobody.
    pub fn enter(&mut self, ticket: Ticket, extent: Extent) -> bool {
        assert!(extent.len_bytes > 0);
        let mut before: SmallVec<[Ticket; 4]> = SmallVec::new();
        for (start, piece) in self.pieces_in(extent) {
            self.pieces.remove(&(extent.disk, start));
            if start < extent.offset {
                self.pieces.insert((extent.disk, start), Piece { end: extent.offset, ..piece });
            }
            if piece.end > extent.end() {
                self.pieces.insert((extent.disk, extent.end()), piece);
            }
            before.push(piece.last);
        }
        before.sort_unstable();
        before.dedup();
        for other in &before {
            let other = self.entered.get_mut(other).expect("its pieces go when it leaves");
            other.behind.push(ticket);
        }
        let piece = Piece { end: extent.end(), last: ticket };
        self.pieces.insert((extent.disk, extent.offset), piece);
        let waits_for = before.len();
        let entered = Entered { extent, waits_for, behind: SmallVec::new() };
        let other = self.entered.insert(ticket, entered);
        assert!(other.is_none(), "operation {ticket} came twice");
        waits_for == 0
    }

    /// An operation that waits for nobody ends. Tells who waits for nobody any more.
    pub fn leave(&mut self, ticket: Ticket, mut is_free: impl FnMut(Ticket)) {
        let Entered { extent, waits_for, behind } =
            self.entered.remove(&ticket).expect("it has come");
        assert_eq!(waits_for, 0, "operation {ticket} waits for others");
        for (start, piece) in self.pieces_in(extent) {
            if piece.last == ticket {
                self.pieces.remove(&(extent.disk, start));
            }
        }
        for next in behind {
            let of = self.entered.get_mut(&next).expect("it waits");
            of.waits_for -= 1;
            if of.waits_for == 0 {
                is_free(next);
            }
        }
    }

    /// Pieces that share a byte with an extent, by their first bytes.
    fn pieces_in(&self, extent: Extent) -> SmallVec<[(u64, Piece); 4]> {
        let up_to = self.pieces.range(..(extent.disk, extent.end())).rev();
        up_to
            .take_while(|((disk, _), piece)| *disk == extent.disk && piece.end > extent.offset)
            .map(|((_, start), piece)| (*start, *piece))
            .collect()
    }

    /// How many operations have not ended.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entered.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entered.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(disk: u16, offset: u64, len_bytes: u64) -> Extent {
        Extent { disk: DiskId(disk), offset, len_bytes }
    }

    fn leave(order: &mut ExtentOrder, ticket: Ticket) -> Vec<Ticket> {
        let mut free = Vec::new();
        order.leave(ticket, |ticket| free.push(ticket));
        free
    }

    #[test]
    fn neighbours_do_not_wait_and_one_shared_byte_does() {
        let mut order = ExtentOrder::default();
        assert!(order.enter(1, extent(0, 10, 10)));
        assert!(order.enter(2, extent(0, 20, 5)));
        assert!(order.enter(3, extent(0, 5, 5)));
        assert!(order.enter(4, extent(1, 12, 1)), "another disk");
        assert!(!order.enter(5, extent(0, 19, 1)));
        assert!(!order.enter(6, extent(0, 0, 6)));
        assert!(!order.enter(7, extent(0, 0, 100)));
        assert_eq!(leave(&mut order, 1), [5]);
        assert!(leave(&mut order, 5).is_empty());
        assert_eq!(leave(&mut order, 3), [6]);
        assert!(leave(&mut order, 2).is_empty());
        assert_eq!(leave(&mut order, 6), [7]);
    }

    #[test]
    fn a_queue_for_one_block_is_a_chain() {
        let mut order = ExtentOrder::default();
        for ticket in 0..1_000 {
            assert_eq!(order.enter(ticket, extent(0, 0, 512)), ticket == 0);
        }
        assert_eq!(order.pieces.len(), 1);
        assert!(order.entered.values().all(|of| of.waits_for <= 1 && of.behind.len() <= 1));
        for ticket in 0..999 {
            assert_eq!(leave(&mut order, ticket), [ticket + 1]);
        }
        assert!(leave(&mut order, 999).is_empty());
        assert!(order.is_empty() && order.pieces.is_empty());
    }

    #[test]
    fn alignment_grows_outwards() {
        assert_eq!(extent(0, 5, 1).aligned_to(4), extent(0, 4, 4));
        assert_eq!(extent(0, 4, 4).aligned_to(4), extent(0, 4, 4));
        assert_eq!(extent(0, 3, 2).aligned_to(4), extent(0, 0, 8));
    }

    proptest! {
        #[test]
        fn as_a_list_in_order_would(ops in prop::collection::vec(
            (0u16..2, 0u64..40, 1u64..12, any::<prop::sample::Index>(), any::<bool>()), 1..200)
        ) {
            let mut order = ExtentOrder::default();
            let mut oracle: Vec<(Ticket, Extent)> = Vec::new();
            let mut free: Vec<Ticket> = Vec::new();
            let is_free = |oracle: &[(Ticket, Extent)], nth: usize| {
                !oracle[..nth].iter().any(|(_, other)| other.overlaps(&oracle[nth].1))
            };
            for (ticket, (disk, offset, len, pick, ends)) in (0..).zip(ops) {
                if ends && !free.is_empty() {
                    let ticket = free.swap_remove(pick.index(free.len()));
                    oracle.retain(|(other, _)| *other != ticket);
                    free.extend(leave(&mut order, ticket));
                } else {
                    oracle.push((ticket, extent(disk, offset, len)));
                    if order.enter(ticket, extent(disk, offset, len)) {
                        free.push(ticket);
                    }
                }
                free.sort_unstable();
                let expected = (0..oracle.len()).filter(|nth| is_free(&oracle, *nth));
                let expected: Vec<_> = expected.map(|nth| oracle[nth].0).collect();
                prop_assert_eq!(&free, &expected);
                prop_assert_eq!(order.len(), oracle.len());
            }
            while let Some(ticket) = free.pop() {
                free.extend(leave(&mut order, ticket));
            }
            prop_assert!(order.is_empty() && order.pieces.is_empty());
        }
    }
}
