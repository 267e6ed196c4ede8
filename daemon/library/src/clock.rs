//! Stamps of a clock with a known bound, for a store: the latest that the time can be when an append begins, and a reply that waits
//! until that time has passed for sure ([`tidelock_clock::wait`]).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thiserror::Error;
use tidelock_clock::driver::FollowedClock;
use tidelock_clock::wait::{CommitWait, latest};
use tidelock_clock::{Verdict, Why};
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::{stamp_at, unix_ns_of};

/// The longest sleep of a reply that waits: the clock may be set, or believed again, meanwhile.
const NAP_MAX: Duration = Duration::from_millis(5);

/// Stamps are not given out: an update with a stamp of this clock could be placed before one that was acknowledged earlier. The
/// store refuses updates until the clock is believed again.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum NotBelieved {
    /// The guard does not believe the clock.
    #[error("this host's clock is not believed: {0:?}")]
    Clock(Why),
    /// The bound is too wide.
    #[error("this host's clock may be off by {epsilon_ns} ns, and {max_ns} ns are allowed")]
    TooFarOff {
        /// ε.
        epsilon_ns: u64,
        /// `max_clock_error`.
        max_ns: u64,
    },
    /// The clock has not reached a stamp of the log: it was set back, or another host's was ahead.
    #[error("this host's clock has not reached the stamp of an entry of its log")]
    Behind,
}

/// The wall clock in nanoseconds since the Unix epoch, and the verdict on it.
pub type Judgement = (i64, Verdict);

/// The clock of this host, for stamps. Clones are the same clock.
#[derive(Clone)]
pub struct StampClock {
    judge: Arc<dyn Fn() -> Judgement + Send + Sync>,
    max_ns: u64,
}

impl fmt::Debug for StampClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StampClock").field("max_ns", &self.max_ns).finish_non_exhaustive()
    }
}

/// The wall clock in nanoseconds since the Unix epoch.
pub(crate) fn wall_ns() -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX)
}

impl StampClock {
    /// A clock that a guard follows. `max_clock_error_ns`: the same on all hosts of the store.
    #[must_use]
    pub fn followed(clock: FollowedClock, max_clock_error_ns: u64) -> Self {
        Self::judged(move || clock.judged(), max_clock_error_ns)
    }

    /// A clock that the operator vouches for: it is off by `epsilon_ns` at most.
    #[must_use]
    pub fn assumed(epsilon_ns: u64) -> Self {
        let now_ns = || i64::try_from(wall_ns()).unwrap_or(i64::MAX);
        Self::judged(move || (now_ns(), Verdict::Believed { epsilon_ns }), epsilon_ns)
    }

    /// Another source of times and verdicts.
    #[must_use]
    pub fn judged(
        judge: impl Fn() -> Judgement + Send + Sync + 'static,
        max_clock_error_ns: u64,
    ) -> Self {
        Self { judge: Arc::new(judge), max_ns: max_clock_error_ns }
    }

    fn read(&self) -> Result<(i64, u64), NotBelieved> {
        let (now_ns, verdict) = (self.judge)();
        match verdict {
            Verdict::NotBelieved { why } => Err(NotBelieved::Clock(why)),
            Verdict::Believed { epsilon_ns } if epsilon_ns > self.max_ns => {
                Err(NotBelieved::TooFarOff { epsilon_ns, max_ns: self.max_ns })
            }
            Verdict::Believed { epsilon_ns } => Ok((now_ns, epsilon_ns)),
        }
    }

    /// The stamp of appends that begin now: of one entry, or of several whose requests are all here. To be taken after the
    /// request has come, and before anything of the update can be seen.
    ///
    /// # Errors
    /// The clock is not believed: the update is to be refused.
    pub fn begin(&self) -> Result<Hlc, NotBelieved> {
        let (now_ns, epsilon_ns) = self.read()?;
        let latest_ns = u64::try_from(latest(now_ns, epsilon_ns)).unwrap_or(0);
        let stamp = stamp_at(latest_ns);
        // Stamps are coarser than nanoseconds.
        Ok(if unix_ns_of(stamp) < latest_ns { stamp.next() } else { stamp })
    }

    /// The time that a reply with this effective stamp has to wait still. `None`: it may leave.
    ///
    /// # Errors
    /// The clock is not believed: nobody knows.
    pub fn left(&self, effective: Hlc) -> Result<Option<Duration>, NotBelieved> {
        let (now_ns, epsilon_ns) = self.read()?;
        let stamp_ns = i64::try_from(unix_ns_of(effective)).unwrap_or(i64::MAX);
        let left = CommitWait { stamp_ns }.left_ns(now_ns, epsilon_ns);
        Ok(left.map(Duration::from_nanos))
    }

    /// Commit wait: returns when the time of the effective stamp has passed for sure.
    ///
    /// # Errors
    /// That was not certain within `at_most`: the clock is not believed, or was set back. The entry stays in the log, but its client
    /// must not be told that it is there.
    pub fn wait(&self, effective: Hlc, at_most: Duration) -> Result<(), NotBelieved> {
        let begun = Instant::now();
        loop {
            let left = self.left(effective);
            let nap = match left {
                Ok(None) => return Ok(()),
                Ok(Some(left)) => left.min(NAP_MAX),
                Err(_) => NAP_MAX,
            };
            if begun.elapsed() >= at_most {
                return Err(left.err().unwrap_or(NotBelieved::Behind));
            }
            std::thread::sleep(nap);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

    const EPSILON_NS: u64 = 100_000;
    const NOW_NS: i64 = 1_800_000_000_000_000_001;

    /// A clock that shows what the first cell says, with the ε of the second; [`u64::MAX`]: not believed.
    fn clock() -> (StampClock, Arc<(AtomicI64, AtomicU64)>) {
        let cells = Arc::new((AtomicI64::new(NOW_NS), AtomicU64::new(EPSILON_NS)));
        let of = Arc::clone(&cells);
        let verdict = move || match of.1.load(Ordering::SeqCst) {
            u64::MAX => (of.0.load(Ordering::SeqCst), Verdict::NotBelieved { why: Why::NotLocked }),
            epsilon_ns => (of.0.load(Ordering::SeqCst), Verdict::Believed { epsilon_ns }),
        };
        (StampClock::judged(verdict, EPSILON_NS), cells)
    }

    #[test]
    fn stamps_are_no_earlier_than_the_latest_that_the_time_can_be() {
        let (clock, cells) = clock();
        for more in 0..100 {
            cells.0.store(NOW_NS + more, Ordering::SeqCst);
            let latest_ns = (NOW_NS + more) as u64 + EPSILON_NS;
            let stamp = clock.begin().unwrap();
            // A stamp stands for the 15 ns from its time on.
            assert!(unix_ns_of(stamp) >= latest_ns && unix_ns_of(stamp) < latest_ns + 32);
        }
    }

    #[test]
    fn a_reply_leaves_when_the_stamp_has_passed_for_sure() {
        let (clock, cells) = clock();
        let stamp = clock.begin().unwrap();
        let left = clock.left(stamp).unwrap().unwrap();
        assert!(left >= Duration::from_nanos(2 * EPSILON_NS), "{left:?}");
        cells.0.fetch_add(left.as_nanos() as i64 - 1, Ordering::SeqCst);
        assert_eq!(clock.left(stamp), Ok(Some(Duration::from_nanos(1))));
        assert_eq!(clock.wait(stamp, Duration::ZERO), Err(NotBelieved::Behind), "it stands still");
        cells.0.fetch_add(1, Ordering::SeqCst);
        assert_eq!(clock.wait(stamp, Duration::ZERO), Ok(()));
    }

    #[test]
    fn without_a_believed_clock_nothing_is_stamped_and_nothing_is_answered() {
        let (clock, cells) = clock();
        let stamp = clock.begin().unwrap();
        cells.0.fetch_add(1_000_000_000, Ordering::SeqCst);
        cells.1.store(u64::MAX, Ordering::SeqCst);
        let refused = NotBelieved::Clock(Why::NotLocked);
        assert_eq!(clock.begin(), Err(refused));
        assert_eq!(clock.wait(stamp, Duration::ZERO), Err(refused));
        cells.1.store(EPSILON_NS + 1, Ordering::SeqCst);
        let far = NotBelieved::TooFarOff { epsilon_ns: EPSILON_NS + 1, max_ns: EPSILON_NS };
        assert_eq!(clock.begin(), Err(far));
        cells.1.store(EPSILON_NS, Ordering::SeqCst);
        assert_eq!(clock.wait(stamp, Duration::ZERO), Ok(()));
    }
}
