//! The greatest downward-closed cut that is not beyond C (DESIGN 2.9, rule 2).
//!
//! C is durable for each writer by itself. A record may depend on records of other writers that
//! are not durable yet; it, and all of its writer after it, is left out until they are. The fold
//! goes up to this cut, and recovery takes it.

use std::collections::VecDeque;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::record::Record;
use tidelock_protocol::vector::CountVector;

/// Records beyond the cut that depend on other writers.
#[derive(Clone, Debug, Default)]
pub struct CutTracker {
    /// By writer: seq and dependencies, in seq order.
    waiting: Vec<VecDeque<(Seq, CountVector)>>,
    cut: CountVector,
}

impl CutTracker {
    /// The next record of the journal, which is not void.
    pub fn record(&mut self, record: &Record) {
        if record.deps.entries().next().is_none() {
            return;
        }
        let i = record.writer.index();
        if self.waiting.len() <= i {
            self.waiting.resize(i + 1, VecDeque::new());
        }
        self.waiting[i].push_back((record.seq, record.deps.clone()));
    }

    /// The cut under this C.
    pub fn settle(&mut self, committed: &CountVector) -> &CountVector {
        let mut cut = committed.clone();
        // From above: take away what depends on what is not there, until nothing does.
        loop {
            let mut fell = false;
            for (i, waiting) in self.waiting.iter().enumerate() {
                let writer = WriterId(i as u16);
                let have = cut.get(writer);
                let blocked = waiting.iter().find(|(seq, deps)| *seq <= have && !cut.covers(deps));
                if let Some((seq, _)) = blocked {
                    let below = Seq(seq.0 - 1);
                    cut = cut
                        .entries()
                        .map(|(w, s)| if w == writer { (w, below) } else { (w, s) })
                        .collect();
                    fell = true;
                }
            }
            if !fell {
                break;
            }
        }
        for (i, waiting) in self.waiting.iter_mut().enumerate() {
            let have = cut.get(WriterId(i as u16));
            while waiting.front().is_some_and(|(seq, _)| *seq <= have) {
                waiting.pop_front();
            }
        }
        // C only grows, and so does this.
        self.cut.merge(&cut);
        &self.cut
    }

    /// The cut as last settled.
    #[must_use]
    pub fn cut(&self) -> &CountVector {
        &self.cut
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::State;
    use proptest::prelude::*;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{DiskId, Epoch};
    use tidelock_protocol::record::Effect;

    fn record(writer: u16, seq: u64, deps: &[(u16, u64)]) -> Record {
        Record {
            writer: WriterId(writer),
            seq: Seq(seq),
            epoch: Epoch(1),
            hlc: Hlc(0),
            deps: deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect(),
            disk: DiskId(0),
            offset: 0,
            copy: false,
            effect: Effect::Zero { len_bytes: 1, no_hole: false },
        }
    }

    fn vector(seqs: &[u64]) -> CountVector {
        seqs.iter().enumerate().map(|(i, s)| (WriterId(i as u16), Seq(*s))).collect()
    }

    #[test]
    fn a_record_waits_for_what_it_depends_on_and_takes_its_successors_along() {
        let mut t = CutTracker::default();
        t.record(&record(0, 2, &[(1, 5)]));
        t.record(&record(2, 1, &[(0, 2)]));
        assert_eq!(*t.settle(&vector(&[4, 4, 3])), vector(&[1, 4, 0]));
        assert_eq!(*t.settle(&vector(&[4, 5, 3])), vector(&[4, 5, 3]));
    }

    proptest! {
        /// Against the definition, on a history in which each record depends on a vector that
        /// some moment of the past had.
        #[test]
        fn equals_the_definition(
            steps in prop::collection::vec((0u16..3, any::<bool>()), 1..40),
            durable in prop::collection::vec(0u64..15, 3),
        ) {
            let mut have = State::new(3).journaled();
            let (mut t, mut all) = (CutTracker::default(), Vec::new());
            for (writer, depends) in steps {
                let deps: Vec<_> =
                    have.entries().filter(|(w, _)| depends && w.0 != writer).map(|(w, s)| (w.0, s.0)).collect();
                let seq = have.get(WriterId(writer)).next();
                have.raise(WriterId(writer), seq);
                all.push(record(writer, seq.0, &deps));
                t.record(all.last().unwrap());
            }
            let committed: CountVector = (0..3)
                .map(|w| (WriterId(w), Seq(durable[usize::from(w)]).min(have.get(WriterId(w)))))
                .collect();
            let cut = t.settle(&committed).clone();
            prop_assert!(committed.covers(&cut));
            let closed = |cut: &CountVector| {
                all.iter().filter(|r| r.seq <= cut.get(r.writer)).all(|r| cut.covers(&r.deps))
            };
            prop_assert!(closed(&cut));
            // The greatest: the closed cuts below C have a least upper bound that is closed.
            for a in 0..=committed.get(WriterId(0)).0 {
                for b in 0..=committed.get(WriterId(1)).0 {
                    for c in 0..=committed.get(WriterId(2)).0 {
                        let other = vector(&[a, b, c]);
                        prop_assert!(!closed(&other) || cut.covers(&other), "{} and {}", cut, other);
                    }
                }
            }
        }
    }
}
