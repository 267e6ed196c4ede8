//! Times of doubt: a clock of the primary site was not believed, and entries that were placed meanwhile have a stamp that is later
//! than whatever it may have said. A cut between is no prefix: it may have an entry of another shard without what that
//! depends on. So no watermark, and no cut of the past, is ever inside one.

use serde::{Deserialize, Serialize};
use tidelock_protocol::hlc::Hlc;

/// The most times of doubt that are told apart. Two that are next to each other count as one beyond that, with what is between.
const DOUBTS_MAX: usize = 256;

/// Times of doubt, in order, apart from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Doubts(Vec<(Hlc, Hlc)>);

impl Doubts {
    /// No cut is at a stamp later than `after` and earlier than `through` from here on. True: that is news.
    pub fn add(&mut self, after: Hlc, through: Hlc) -> bool {
        let covers = |(from, to): &(Hlc, Hlc)| *from <= after && through <= *to;
        if through <= after || self.0.iter().any(covers) {
            return false;
        }
        let (mut after, mut through) = (after, through);
        self.0.retain(|(from, to)| {
            let is_apart = *to <= after || through <= *from;
            if !is_apart {
                (after, through) = (after.min(*from), through.max(*to));
            }
            is_apart
        });
        let at = self.0.partition_point(|(from, _)| *from < after);
        self.0.insert(at, (after, through));
        if self.0.len() > DOUBTS_MAX {
            let gap = |nth: &usize| self.0[nth + 1].0.0 - self.0[*nth].1.0;
            let nth = (0..self.0.len() - 1).min_by_key(gap).unwrap_or_default();
            let (_, to) = self.0.remove(nth + 1);
            self.0[nth].1 = to;
        }
        true
    }

    /// The end of the last one: the first stamp after it that a cut may be at.
    #[must_use]
    pub fn end(&self) -> Hlc {
        self.0.last().map_or(Hlc(0), |(_, through)| *through)
    }

    /// The last stamp up to this one that a cut may be at.
    #[must_use]
    pub fn before(&self, stamp: Hlc) -> Hlc {
        let at = self.0.partition_point(|(from, _)| *from < stamp);
        match at.checked_sub(1).map(|nth| self.0[nth]) {
            Some((from, to)) if stamp < to => from,
            _ => stamp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_cut_is_inside_and_cuts_never_go_back(
            spans in prop::collection::vec((0u64..2000, 1u64..40), 0..400),
        ) {
            let mut doubts = Doubts::default();
            for (after, len) in &spans {
                doubts.add(Hlc(*after), Hlc(after + len));
                prop_assert!(doubts.0.len() <= DOUBTS_MAX);
            }
            let mut last = Hlc(0);
            for stamp in (0..2100).map(Hlc) {
                let cut = doubts.before(stamp);
                prop_assert!(cut <= stamp && cut >= last);
                prop_assert_eq!(doubts.before(cut), cut);
                let inside = |(after, len): &(u64, u64)| *after < cut.0 && cut.0 < after + len;
                prop_assert!(!spans.iter().any(inside), "{cut} of {doubts:?}");
                last = cut;
            }
        }
    }

    #[test]
    fn both_ends_are_outside_and_what_is_known_is_no_news() {
        let mut doubts = Doubts::default();
        assert!(doubts.add(Hlc(5), Hlc(9)));
        let cuts: Vec<_> = (4..=10).map(|stamp| doubts.before(Hlc(stamp)).0).collect();
        assert_eq!(cuts, [4, 5, 5, 5, 5, 9, 10]);
        assert!(!doubts.add(Hlc(5), Hlc(8)) && !doubts.add(Hlc(7), Hlc(7)));
        assert!(doubts.add(Hlc(9), Hlc(12)), "9 is a cut");
        assert_eq!(doubts.before(Hlc(9)), Hlc(9));
    }
}
