//! Simulated time: events in the order of their time, and of their making where times are equal.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tidelock_protocol::ids::MonoNanos;

/// Nanoseconds of a microsecond.
pub const US: u64 = 1_000;
/// Nanoseconds of a millisecond.
pub const MS: u64 = 1_000_000;
/// Nanoseconds of a second.
pub const S: u64 = 1_000_000_000;

/// What is to come.
#[derive(Debug)]
pub struct Schedule<E> {
    now_ns: u64,
    made: u64,
    heap: BinaryHeap<Reverse<(u64, u64, Slot<E>)>>,
}

/// An event takes no part in the order.
#[derive(Debug)]
struct Slot<E>(E);

impl<E> PartialEq for Slot<E> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}
impl<E> Eq for Slot<E> {}
impl<E> PartialOrd for Slot<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for Slot<E> {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl<E> Default for Schedule<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> Schedule<E> {
    /// Nothing is to come.
    #[must_use]
    pub fn new() -> Self {
        // Not zero: "never" and "at the beginning" must differ in whoever takes zero for never.
        Self { now_ns: S, made: 0, heap: BinaryHeap::new() }
    }

    /// The time.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Puts an event `after_ns` from now.
    pub fn after(&mut self, after_ns: u64, event: E) {
        self.made += 1;
        self.heap.push(Reverse((self.now_ns + after_ns, self.made, Slot(event))));
    }

    /// Time moves on without an event.
    pub fn pass(&mut self, span_ns: u64) {
        self.now_ns += span_ns;
    }

    /// The next event; time moves on to it.
    pub fn advance(&mut self) -> Option<E> {
        let Reverse((at, _, Slot(event))) = self.heap.pop()?;
        self.now_ns = at;
        Some(event)
    }
}

/// The clocks of one machine: they begin anywhere and run a little fast or slow, and the wall
/// clock may step.
#[derive(Clone, Copy, Debug)]
pub struct MachineClock {
    /// What the monotonic clock showed at the beginning.
    pub offset_ns: u64,
    /// Parts per million that it runs fast.
    pub fast_ppm: i64,
    /// How far the wall clock is off.
    pub wall_offset_ms: i64,
}

impl MachineClock {
    /// The clock that never steps.
    #[must_use]
    pub fn mono(&self, now_ns: u64) -> MonoNanos {
        let drift = i128::from(now_ns) * i128::from(self.fast_ppm) / 1_000_000;
        let drifted = (i128::from(now_ns) + drift).max(0) as u64;
        MonoNanos(self.offset_ns + drifted)
    }

    /// The wall clock.
    #[must_use]
    pub fn wall_ms(&self, now_ns: u64) -> u64 {
        const EPOCH_MS: i64 = 1_800_000_000_000;
        (EPOCH_MS + (now_ns / MS) as i64 + self.wall_offset_ms) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_by_making() {
        let mut schedule = Schedule::new();
        schedule.after(5, 'c');
        schedule.after(1, 'a');
        schedule.after(5, 'd');
        schedule.after(3, 'b');
        let order: String = std::iter::from_fn(|| schedule.advance()).collect();
        assert_eq!(order, "abcd");
        assert_eq!(schedule.now_ns(), S + 5);
    }
}
