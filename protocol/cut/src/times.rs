//! The times of one writer's records beyond the cut, in the HLC form.
//!
//! While a host is away the watermark stands still, and every record of all others waits. How far the next watermark lets
//! the cut go must be exact, so the time of each is kept: as the step from the one before, which mostly takes a byte. Seqs
//! have no gaps, so they are counted.

use std::collections::VecDeque;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Seq;

/// Records of a block: so many steps are gone at most to find one.
const BLOCK_MAX: u64 = 512;

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timed {
    pub(super) seq: Seq,
    pub(super) hlc: Hlc,
}

/// Records that follow each other.
#[derive(Clone, Debug)]
struct Block {
    first: Timed,
    last: Timed,
    /// From each to the next.
    steps: Vec<u8>,
}

impl Block {
    /// Whether there was room for it.
    fn push(&mut self, next: Timed) -> bool {
        let follows = next.seq == self.last.seq.next() && self.len() < BLOCK_MAX;
        let step = step(self.last.hlc, next.hlc).filter(|_| follows);
        let Some(step) = step else { return false };
        write(&mut self.steps, step);
        self.last = next;
        true
    }

    fn len(&self) -> u64 {
        self.last.seq.0 - self.first.seq.0 + 1
    }

    fn iter(&self) -> impl Iterator<Item = Timed> + '_ {
        let mut steps = &self.steps[..];
        std::iter::successors(Some(self.first), move |Timed { seq, hlc }| {
            Some(Timed { seq: seq.next(), hlc: after(*hlc, read(&mut steps)?) })
        })
    }
}

/// All of a writer, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    blocks: VecDeque<Block>,
    /// Records up to here wait no more, though the first block has them.
    passed: Seq,
}

impl Times {
    pub(super) fn push(&mut self, seq: Seq, hlc: Hlc) {
        let next = Timed { seq, hlc };
        if let Some(last) = self.blocks.back_mut() {
            if last.push(next) {
                return;
            }
            last.steps.shrink_to_fit();
        }
        self.blocks.push_back(Block { first: next, last: next, steps: Vec::new() });
    }

    /// The first that waits.
    pub(super) fn first(&self) -> Option<Timed> {
        self.blocks.front()?.iter().find(|of| of.seq > self.passed)
    }

    /// The last that waits up to this seq.
    pub(super) fn last_up_to(&self, seq: Seq) -> Option<Timed> {
        let begun = self.blocks.partition_point(|block| block.first.seq <= seq);
        let block = &self.blocks[begun.checked_sub(1)?];
        let last = match block.last {
            last if last.seq <= seq => last,
            _ => block.iter().take_while(|of| of.seq <= seq).last()?,
        };
        Some(last).filter(|last| last.seq > self.passed)
    }

    /// The first that waits and is later.
    pub(super) fn first_after(&self, time: Hlc) -> Option<Timed> {
        let ended = self.blocks.partition_point(|block| block.last.hlc <= time);
        self.blocks.get(ended)?.iter().find(|of| of.hlc > time && of.seq > self.passed)
    }

    /// What is up to this seq waits no more. The last of it, if there was any.
    pub(super) fn pass(&mut self, seq: Seq) -> Option<Timed> {
        let last = self.last_up_to(seq)?;
        self.passed = last.seq;
        while self.blocks.front().is_some_and(|block| block.last.seq <= seq) {
            self.blocks.pop_front();
        }
        Some(last)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// What they take.
    pub(super) fn bytes(&self) -> usize {
        let steps: usize = self.blocks.iter().map(|block| block.steps.capacity()).sum();
        steps + self.blocks.capacity() * size_of::<Block>()
    }
}

/// A step as a small number: most records are the first of a millisecond, or the next in the same. `None`: it is none.
fn step(from: Hlc, to: Hlc) -> Option<u64> {
    let ticks = to.0.checked_sub(from.0).filter(|ticks| *ticks <= u64::MAX >> 1)?;
    let ms = to.physical_ms() - from.physical_ms();
    Some(if to.logical() == 0 && ms > 0 { ms << 1 | 1 } else { ticks << 1 })
}

fn after(from: Hlc, step: u64) -> Hlc {
    let by = step >> 1;
    if step & 1 == 1 { Hlc::new(from.physical_ms() + by, 0) } else { Hlc(from.0 + by) }
}

/// Seven bits in each byte, the lowest first; the highest bit says that more follow.
fn write(out: &mut Vec<u8>, mut step: u64) {
    while step > 0x7f {
        out.push(step as u8 | 0x80);
        step >>= 7;
    }
    out.push(step as u8);
}

fn read(from: &mut &[u8]) -> Option<u64> {
    let mut step = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        step |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    Some(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn steps() -> impl Strategy<Value = Vec<(u64, u64)>> {
        let hlc = prop_oneof![Just(1), 1u64..200, (1u64..70).prop_map(|ms| ms << 16), any::<u64>()];
        let seq = prop_oneof![9 => Just(1), 1 => 2u64..5];
        prop::collection::vec((seq, hlc), 0..1500)
    }

    proptest! {
        /// Against a plain list.
        #[test]
        fn it_is_the_list_of_them(steps in steps(), asked in any::<prop::sample::Index>(), passes: bool) {
            let (mut times, mut list) = (Times::default(), Vec::new());
            let mut last = Timed { seq: Seq(0), hlc: Hlc(0) };
            for (seqs, ticks) in steps {
                // To the beginning of a later millisecond, now and then.
                let hlc = last.hlc.0.saturating_add(ticks);
                let hlc = if ticks > 200 && hlc < u64::MAX { hlc >> 16 << 16 } else { hlc };
                last = Timed { seq: Seq(last.seq.0 + seqs), hlc: Hlc(hlc.max(last.hlc.0)) };
                times.push(last.seq, last.hlc);
                list.push(last);
            }
            if passes && !list.is_empty() {
                let upto = list[asked.index(list.len())].seq;
                let passed = list.iter().rposition(|of| of.seq <= upto).unwrap();
                prop_assert_eq!(times.pass(upto), Some(list[passed]));
                prop_assert_eq!(times.pass(upto), None);
                list.drain(..=passed);
            }
            prop_assert_eq!(times.is_empty(), list.is_empty());
            prop_assert_eq!(times.first(), list.first().copied());
            let asked = asked.index(list.len() + 1);
            let near = list.get(asked).copied().unwrap_or(last);
            for by in [0, 1, 2] {
                let (seq, hlc) = (Seq((near.seq.0 + by).saturating_sub(1)), Hlc((near.hlc.0.saturating_add(by)).saturating_sub(1)));
                let up_to = list.iter().rfind(|of| of.seq <= seq).copied();
                prop_assert_eq!(times.last_up_to(seq), up_to);
                let later = list.iter().find(|of| of.hlc > hlc).copied();
                prop_assert_eq!(times.first_after(hlc), later);
            }
        }
    }
}
