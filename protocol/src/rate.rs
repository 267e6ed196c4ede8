//! A bound on how often something is done: a few times at once, and then so many times a second.

use crate::ids::MonoNanos;

const SECOND_NS: u64 = 1_000_000_000;

/// A token bucket over time that is an argument.
#[derive(Clone, Copy, Debug)]
pub struct RateLimit {
    /// What one costs.
    each_ns: u64,
    /// What can be saved up.
    most_ns: u64,
    saved_ns: u64,
    last: MonoNanos,
    left_out: u64,
}

impl RateLimit {
    /// `burst` at once, `per_second` in the long run. Both are at least 1.
    #[must_use]
    pub const fn new(per_second: u32, burst: u32) -> Self {
        let each_ns = SECOND_NS / if per_second == 0 { 1 } else { per_second as u64 };
        let most_ns = each_ns * if burst == 0 { 1 } else { burst as u64 };
        Self { each_ns, most_ns, saved_ns: most_ns, last: MonoNanos(0), left_out: 0 }
    }

    /// Whether it may be done now: how often it was not since it was done last. `None`: not now.
    pub fn take(&mut self, now: MonoNanos) -> Option<u64> {
        self.saved_ns = self.saved_ns.saturating_add(now.since_ns(self.last)).min(self.most_ns);
        self.last = self.last.max(now);
        if self.saved_ns < self.each_ns {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.saved_ns -= self.each_ns;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_so_many_a_second() {
        let mut limit = RateLimit::new(4, 10);
        let at = |ms: u64| MonoNanos(5 * SECOND_NS + ms * 1_000_000);
        let taken = |limit: &mut RateLimit, ms| (0..100).filter_map(|_| limit.take(at(ms))).count();
        assert_eq!(taken(&mut limit, 0), 10);
        assert_eq!(limit.take(at(250)), Some(90), "what was left out is told");
        assert_eq!(taken(&mut limit, 1_250), 4);
        assert_eq!(taken(&mut limit, 60_000), 10);
        assert_eq!(taken(&mut limit, 100), 0, "a clock that goes back saves nothing up");
    }
}
