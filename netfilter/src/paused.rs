//! Notices that this host was paused, if it is a virtual machine.
//!
//! A lease runs by CLOCK_BOOTTIME, which goes on while a machine sleeps, but stands still while a hypervisor does not run
//! it. A host that was paused for longer than the backup's grace would go on with a lease that the backup has counted as
//! ended. Other clocks do go on, at most hypervisors: the processor's time stamp counter, and the real-time clock that the
//! hypervisor emulates. One that has advanced by more than CLOCK_BOOTTIME says that there was a pause.
//!
//! It is noticed with the next reading, so what is covered may leave for [`READ_EVERY`] after a pause. It is not noticed at
//! all where the hypervisor holds these clocks as well, or sets them back: a virtual machine that was saved and restored, or
//! moved to another host, may be as if no time had passed.

use crate::sys::{now, time_stamp_counter};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tidelock_protocol::ids::MonoNanos;

/// How often the clocks are read.
pub const READ_EVERY: Duration = Duration::from_millis(20);
/// Difference between two clocks that does not yet count as a pause: the clocks are not read at one instant.
const COUNTER_TOLERANCE_NS: u64 = 50_000_000;
/// The real-time clock tells whole seconds.
const RTC_TOLERANCE_NS: u64 = 2_100_000_000;
const RTC_READ_EVERY_NS: u64 = 1_000_000_000;
/// A rate is measured over no less than this.
const RATED_OVER_NS: u64 = 500_000_000;
const RTC: &str = "/sys/class/rtc/rtc0/since_epoch";

/// Compares a clock that goes on during a pause with CLOCK_BOOTTIME, by readings of both.
#[derive(Clone, Debug)]
pub struct PauseDetector {
    tolerance_ns: u64,
    /// Ticks in a nanosecond. A pause only makes it look greater, so the least that was seen is nearest to the truth.
    rate: Option<f64>,
    /// The reading at which the measurement of the rate began: CLOCK_BOOTTIME and ticks.
    rated_from: Option<(MonoNanos, u64)>,
    last: Option<(MonoNanos, u64)>,
}

impl PauseDetector {
    /// For a clock of an unknown rate.
    #[must_use]
    pub fn of_counter() -> Self {
        Self { tolerance_ns: COUNTER_TOLERANCE_NS, rate: None, rated_from: None, last: None }
    }

    /// For a clock that tells seconds, given in nanoseconds.
    #[must_use]
    pub fn of_seconds() -> Self {
        Self { tolerance_ns: RTC_TOLERANCE_NS, rate: Some(1.0), rated_from: None, last: None }
    }

    /// Takes a reading of both. Returns by how much more the clock has advanced since the last one, if that was a pause.
    pub fn read(&mut self, boot: MonoNanos, ticks: u64) -> Option<Duration> {
        let Some((last_boot, last_ticks)) = self.last.replace((boot, ticks)) else {
            self.rated_from = Some((boot, ticks));
            return None;
        };
        // Set back: it says nothing, and the rate is measured anew.
        let Some(advanced) = ticks.checked_sub(last_ticks) else {
            self.rated_from = Some((boot, ticks));
            return None;
        };
        let passed_ns = boot.since_ns(last_boot);
        let paused = self.rate.and_then(|rate| {
            let more_ns = (advanced as f64 / rate) - passed_ns as f64;
            // A thousandth: the rate was measured, and clocks are corrected.
            let allowed_ns = self.tolerance_ns as f64 + passed_ns as f64 / 1000.0;
            (more_ns > allowed_ns).then(|| Duration::from_nanos(more_ns as u64))
        });
        if paused.is_some() {
            self.rated_from = Some((boot, ticks));
        }
        self.measure(boot, ticks);
        paused
    }

    fn measure(&mut self, boot: MonoNanos, ticks: u64) {
        let Some((from_boot, from_ticks)) = self.rated_from else { return };
        let passed_ns = boot.since_ns(from_boot);
        if passed_ns < RATED_OVER_NS {
            return;
        }
        let rate = ticks.saturating_sub(from_ticks) as f64 / passed_ns as f64;
        if rate > 0.0 {
            self.rate = Some(self.rate.map_or(rate, |known| known.min(rate)));
        }
        self.rated_from = Some((boot, ticks));
    }
}

/// The clocks of this machine.
#[derive(Debug)]
pub struct PauseWatch {
    counter: Option<PauseDetector>,
    rtc: Option<(File, PauseDetector)>,
    rtc_read_at: MonoNanos,
}

impl PauseWatch {
    /// `None`: this is no virtual machine, as far as the processor says.
    #[must_use]
    pub fn open() -> Option<Self> {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let mut flags = cpu.lines().find(|line| line.starts_with("flags"))?.split_whitespace();
        let has = |name: &str| flags.clone().any(|flag| flag == name);
        // A counter that does not go at one rate is no clock.
        let counts = has("constant_tsc") && time_stamp_counter().is_some();
        flags.any(|flag| flag == "hypervisor").then(|| Self {
            counter: counts.then(PauseDetector::of_counter),
            rtc: File::open(RTC).ok().map(|file| (file, PauseDetector::of_seconds())),
            rtc_read_at: MonoNanos(0),
        })
    }

    /// Text for operators: the clocks by which pauses are noticed, and the pauses that may go unnoticed.
    #[must_use]
    pub fn meaning(&self) -> String {
        let clocks = match (&self.counter, &self.rtc) {
            (None, None) => {
                return "a virtual machine without a clock that goes on while it is paused: after a pause longer than the \
                        grace it may answer clients beside a recovered group, so never pause it"
                    .to_owned();
            }
            (Some(_), None) => "the processor's counter",
            (None, Some(_)) => "the real-time clock",
            (Some(_), Some(_)) => "the processor's counter and the real-time clock",
        };
        format!(
            "a virtual machine: a pause is noticed by {clocks} and ends the lease; one that these do not show (saved and \
             restored, moved to another host) cannot be noticed"
        )
    }

    /// Reads the clocks. Returns how long the host was paused since the last reading, if it was.
    pub fn read(&mut self) -> Option<Duration> {
        let mut paused = None;
        if let Some(detector) = &mut self.counter {
            let before = now();
            let ticks = time_stamp_counter();
            let at = now();
            // Between two readings of one clock that lie close together: else this thread has waited in between.
            if at.since_ns(before) < COUNTER_TOLERANCE_NS / 10 {
                paused = ticks.and_then(|ticks| detector.read(at, ticks));
            }
        }
        let at = now();
        if let Some((file, detector)) = &mut self.rtc
            && at.since_ns(self.rtc_read_at) >= RTC_READ_EVERY_NS
        {
            self.rtc_read_at = at;
            let mut text = [0; 24];
            let len = file.read_at(&mut text, 0).unwrap_or(0);
            let seconds =
                std::str::from_utf8(&text[..len]).ok().and_then(|s| s.trim().parse::<u64>().ok());
            let by_rtc = seconds.and_then(|s| detector.read(at, s.saturating_mul(1_000_000_000)));
            paused = paused.max(by_rtc);
        }
        paused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    /// Ticks of a counter at 2.1 GHz.
    fn ticks(ns: u64) -> u64 {
        ns * 21 / 10
    }

    /// Reads every 20 ms until this time, with a counter that is ahead by what the host was paused for.
    fn run(
        detector: &mut PauseDetector,
        boot_ms: std::ops::Range<u64>,
        paused_ms: u64,
    ) -> Vec<u64> {
        let read = |ms: u64| {
            let found = detector.read(MonoNanos(ms * MS), ticks((ms + paused_ms) * MS));
            found.map(|paused| paused.as_millis() as u64)
        };
        boot_ms.step_by(20).filter_map(read).collect()
    }

    #[test]
    fn a_pause_is_noticed_once_with_the_next_reading() {
        let mut detector = PauseDetector::of_counter();
        assert_eq!(run(&mut detector, 0..2_000, 0), [0u64; 0]);
        let found = run(&mut detector, 2_000..4_000, 12_000);
        assert!(matches!(found[..], [12_000 | 11_999]), "{found:?}");
        let found = run(&mut detector, 4_000..6_000, 12_100);
        assert!(matches!(found[..], [99 | 100]), "{found:?}");
    }

    #[test]
    fn neither_a_reading_that_comes_late_nor_a_corrected_clock_is_a_pause() {
        let mut detector = PauseDetector::of_counter();
        assert_eq!(run(&mut detector, 0..2_000, 0), [0u64; 0]);
        // The whole host sleeps: CLOCK_BOOTTIME goes on.
        assert_eq!(run(&mut detector, 3_602_000..3_602_020, 0), [0u64; 0]);
        // 500 ppm over ten minutes.
        let slewed = |ms: u64| {
            detector.read(MonoNanos(ms * MS), ticks(ms * MS + (ms - 3_602_000) * MS / 2000))
        };
        assert_eq!((3_602_020..4_202_020).step_by(20).find_map(slewed), None);
    }

    #[test]
    fn a_pause_while_the_rate_is_measured_does_not_hide_later_ones() {
        let mut detector = PauseDetector::of_counter();
        assert_eq!(run(&mut detector, 0..200, 0), [0u64; 0]);
        // Not noticed: nothing is known of the clock yet.
        assert_eq!(run(&mut detector, 200..3_000, 60_000), [0u64; 0]);
        assert_eq!(run(&mut detector, 3_000..3_020, 61_000).len(), 1);
    }

    #[test]
    fn the_real_time_clock_tells_pauses_of_seconds() {
        let mut detector = PauseDetector::of_seconds();
        let mut read = |boot_ms: u64, seconds: u64| {
            detector.read(MonoNanos(boot_ms * MS), seconds * 1000 * MS).is_some()
        };
        assert!(!read(0, 100) && !read(1_010, 102) && !read(2_010, 102) && !read(3_020, 103));
        assert!(read(4_030, 110));
        assert!(!read(5_030, 90), "set back");
        assert!(!read(6_030, 91) && read(7_030, 96));
    }
}
