//! The only source of chance: one seed, one sequence (SplitMix64, Steele et al. 2014).

use std::ops::Range;

/// A sequence of random numbers.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // Neighbouring seeds must not give sequences that are shifted copies of each other.
        let mut rng = Self(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5851_f42d_4c95_7f2d);
        rng.number();
        rng
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(n)) >> 64) as u64
    }

    /// A number of the range.
    pub fn range(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// An index below `n`.
    pub fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// True in `n` of `of` cases.
    pub fn chance(&mut self, n: u64, of: u64) -> bool {
        self.below(of) < n
    }

    /// One of several.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }

    /// A span around `mean`, now and then much longer: a heavy tail finds what a uniform spread
    /// does not.
    pub fn span(&mut self, mean: u64) -> u64 {
        let base = self.below(2 * mean.max(1)) + 1;
        if self.chance(1, 32) { base * 16 } else { base }
    }

    /// An index, weighted.
    pub fn weighted(&mut self, weights: &[u32]) -> usize {
        let total: u64 = weights.iter().map(|w| u64::from(*w)).sum();
        let mut at = self.below(total.max(1));
        for (i, weight) in weights.iter().enumerate() {
            if at < u64::from(*weight) {
                return i;
            }
            at -= u64::from(*weight);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_sequence_and_ranges_hold() {
        let (mut a, mut b, mut c) = (Rng::new(7), Rng::new(7), Rng::new(8));
        let numbers: Vec<_> = (0..100).map(|_| a.number()).collect();
        assert!(numbers.iter().all(|n| *n == b.number()));
        assert!(numbers.iter().any(|n| *n != c.number()));
        let mut seen = [false; 5];
        for _ in 0..1000 {
            seen[a.index(5)] = true;
            assert!((3..9).contains(&a.range(3..9)));
            assert_ne!(a.weighted(&[1, 0, 2]), 1, "no weight");
        }
        assert_eq!(seen, [true; 5]);
    }
}
