//! A guard that a thread keeps up to date: its source may take its time to answer, and a verdict is there at once.

use super::{Source, SourceError, look, read_clocks};
use crate::guard::{ClockGuard, Limits, Verdict};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two questions to the source.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Time for an answer.
const ANSWER_MAX: Duration = Duration::from_millis(200);

/// The guard of this host's clock. Each user may have a bound for ε of its own.
#[derive(Clone, Debug)]
pub struct FollowedClock(Arc<Mutex<ClockGuard>>);

impl FollowedClock {
    /// Follows a source whose clock may be off by `error_max_ns`, which is also the step of a master that the guard may
    /// overlook. Until `stops` says so, which is asked some times a second. `told`: what fails from now on, and
    /// [`None`] when it works again.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start<S: Source + Send + 'static>(
        mut source: S,
        error_max_ns: u64,
        stops: impl Fn() -> bool + Send + 'static,
        told: impl Fn(Option<&SourceError>) + Send + 'static,
    ) -> io::Result<(Self, JoinHandle<()>)> {
        let clock = Self(Arc::new(Mutex::new(ClockGuard::new(Limits::new(error_max_ns)))));
        let followed = clock.clone();
        let run = move || {
            let mut last = None;
            while !stops() {
                // The answer takes its time: nobody waits for the guard meanwhile.
                let mut copy = followed.guard().clone();
                let asked = look(&mut copy, &mut source, ANSWER_MAX);
                *followed.guard() = copy;
                let error = asked.err();
                let text = error.as_ref().map(ToString::to_string);
                if text != last {
                    told(error.as_ref());
                    last = text;
                }
                std::thread::sleep(LOOK_EVERY);
            }
        };
        let thread = std::thread::Builder::new().name("clock".to_owned()).spawn(run)?;
        Ok((clock, thread))
    }

    fn guard(&self) -> MutexGuard<'_, ClockGuard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The verdict on the clock as it is now.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.judged().1
    }

    /// The wall clock in nanoseconds since the Unix epoch, and the verdict on just that reading.
    #[must_use]
    pub fn judged(&self) -> (i64, Verdict) {
        let reading = read_clocks();
        (reading.wall_ns, self.guard().verdict(reading))
    }
}
