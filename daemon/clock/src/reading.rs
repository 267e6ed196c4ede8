//! Readings of two clocks at once: the wall clock, and one that nobody steers.
//!
//! `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` follow the frequency corrections that a time daemon gives to the wall clock,
//! so a drift of the wall clock does not show against them. `CLOCK_MONOTONIC_RAW` is the bare oscillator. Neither a
//! step, nor a slew, nor a wrong frequency of the wall clock moves it. A suspension of the host stops it, and then the
//! wall clock appears to have stepped: the guard does not believe it until the source has explained the step.
//!
//! A pause of a *virtual machine* stops both clocks. No clock inside shows it; only the next sample does.

use serde::Serialize;

/// The wall clock and the raw clock, read together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// `CLOCK_REALTIME`, nanoseconds since the Unix epoch.
    pub wall_ns: i64,
    /// `CLOCK_MONOTONIC_RAW`, nanoseconds. Never compared across machines.
    pub raw_ns: u64,
    /// Time between the two, at most: a clock can be read only after another.
    pub slop_ns: u64,
}

impl Reading {
    /// Nanoseconds of the raw clock since an earlier reading. 0 if that clock went back.
    #[must_use]
    pub fn since(&self, earlier: &Reading) -> u64 {
        self.raw_ns.saturating_sub(earlier.raw_ns)
    }

    /// Nanoseconds by which the wall clock went further than the raw clock since an earlier reading.
    #[must_use]
    pub fn moved_since(&self, earlier: &Reading) -> i64 {
        let wall = i128::from(self.wall_ns) - i128::from(earlier.wall_ns);
        let raw = i128::from(self.raw_ns) - i128::from(earlier.raw_ns);
        (wall - raw).clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }

    /// Uncertainty of [`Self::moved_since`].
    #[must_use]
    pub fn slop_with(&self, earlier: &Reading) -> u64 {
        self.slop_ns.saturating_add(earlier.slop_ns)
    }
}
