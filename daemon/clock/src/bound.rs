//! ε, the bound on the error of the wall clock.
//!
//! ```text
//! ε = offset + delay + variation + wander + dispersion + moved + drift + grandmaster + hop + reading
//! ```
//!
//! - **offset**: the greatest |offset| of the window. How far the clock was off, as measured, and how far a servo that
//!   follows a wrong measurement may take it.
//! - **delay**: the greatest half round trip of the window. Covers asymmetry of the path: with delays d₁ there and d₂
//!   back the measured offset is wrong by (d₁ - d₂)/2, and neither is negative, so by (d₁ + d₂)/2 at most. Late software
//!   timestamps are part of the delays.
//! - **variation**: the greatest change of the offset, and of the delay, from a sample to the next. Covers a sample that
//!   was not seen, and delays that the median of `ptp4l` hides.
//! - **wander**: the distance by which the wall clock strayed from a straight line against the raw clock, within the
//!   window, from end to end. Covers a servo that follows syncs which queue in one direction: it moves the clock by the
//!   queue's delay, and does so within a few syncs, between two looks; the measured delay shows it ten measurements later.
//! - **dispersion**: the error that the source itself admits (chrony), of the last sample.
//! - **moved**: |wall clock - raw clock| since the last sample. Covers any step, and any slew, of the wall clock after
//!   the sample: known, not assumed.
//! - **drift**: age of the last sample · `drift_ppm`. Covers the raw clock's own frequency error.
//! - **grandmaster**: the grandmaster's error as it says; nothing if it does not know.
//! - **hop**: configured. Where the source measures another clock than the wall clock: how far the two are apart.
//! - **reading**: the time between reading one clock and the other, at both ends of the age.
//!
//! The true error at a sample is covered by offset, delay, variation, wander and dispersion. From there on the wall clock goes
//! with the raw clock, whose frequency is wrong by `drift_ppm` at most, but for what is seen as moved. Age and movement
//! count from the last look that still had the sample before: the sample is younger. The wall clock's own reading at the
//! sample would tell its age better, but not how far the raw clock was then: a steady correction of the frequency, from
//! that look to the sample, would hide a part of a step after it.
//!
//! The maximum of offsets and delays is over a window of time (30 s), because a servo reacts to what it measured, not
//! to what is true: a burst of delayed syncs moves the clock while later offsets look fine, and `ptp4l` takes about
//! ten delay measurements to know better.
//!
//! **Not covered:**
//! - a grandmaster that lies, or two hosts that follow different ones: compare [`MasterId`](crate::MasterId);
//! - asymmetry that does not show in the measured delay: `ptp4l` subtracts what transparent clocks correct, and peer to
//!   peer only the last link is measured; `delayAsymmetry` and the latencies of timestamps are the operator's word;
//! - a raw clock that is wrong by more than `drift_ppm`;
//! - a paused virtual machine, whose clocks all stop, until the next sample;
//! - two opposite steps between two looks, with the only sample between them.

use serde::Serialize;

/// ε by its terms, each in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ErrorBound {
    /// Greatest |offset| of the window.
    pub offset_ns: u64,
    /// Greatest half round trip of the window.
    pub delay_ns: u64,
    /// Greatest changes from a sample to the next.
    pub variation_ns: u64,
    /// Greatest distance of the wall clock from a straight line against the raw clock, in the window.
    pub wander_ns: u64,
    /// Error that the source admits.
    pub dispersion_ns: u64,
    /// Distance that the wall clock has moved against the raw clock since the last sample.
    pub moved_ns: u64,
    /// Age of the last sample, times the drift.
    pub drift_ns: u64,
    /// Error of the grandmaster.
    pub grandmaster_ns: u64,
    /// Distance between the measured clock and the wall clock.
    pub hop_ns: u64,
    /// Time between the readings of two clocks.
    pub reading_ns: u64,
}

impl ErrorBound {
    /// ε. Numbers that are too large stay at the largest one.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        let Self {
            offset_ns,
            delay_ns,
            variation_ns,
            wander_ns,
            dispersion_ns,
            moved_ns,
            drift_ns,
            grandmaster_ns,
            hop_ns,
            reading_ns,
        } = *self;
        let measured = [offset_ns, delay_ns, variation_ns, wander_ns, dispersion_ns];
        let since = [moved_ns, drift_ns, grandmaster_ns, hop_ns, reading_ns];
        measured.into_iter().chain(since).fold(0, u64::saturating_add)
    }
}

/// Nanoseconds by which a clock that is wrong by `ppm` goes wrong in a time; rounded up.
#[must_use]
pub fn drift_ns(age_ns: u64, ppm: u32) -> u64 {
    let product = u128::from(age_ns) * u128::from(ppm);
    u64::try_from(product.div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
