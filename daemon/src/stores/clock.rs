//! The guard of this host's clock, followed by a thread of its own: what it is asked may block.

use crate::config::ClockSource;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tidelock_clock::driver::{Chronyd, Ptp4l, look, read_clocks};
use tidelock_clock::{ClockGuard, Limits, Verdict, Why};
use tokio::sync::watch;

/// Time between two questions to the source.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Time for an answer.
const ANSWER_MAX: Duration = Duration::from_millis(200);

/// The verdict on this host's clock.
#[derive(Clone, Debug)]
pub(super) enum Clock {
    /// Judged by a guard. Each store has its own bound for ε.
    Guarded(Arc<Mutex<ClockGuard>>),
    /// Taken from the operator's word.
    Assumed { epsilon_ns: u64 },
    /// No source is configured.
    Unknown,
}

impl Clock {
    /// Follows the clock's source. Clocks that may be off by more than `error_max_ns` are believed by no store.
    pub(super) fn start(
        source: &ClockSource,
        error_max_ns: u64,
        runtime_dir: &Path,
        stopping: watch::Receiver<bool>,
    ) -> io::Result<(Self, Option<JoinHandle<()>>)> {
        match source {
            ClockSource::None => Ok((Self::Unknown, None)),
            ClockSource::Assumed { epsilon_ns } => {
                Ok((Self::Assumed { epsilon_ns: *epsilon_ns }, None))
            }
            ClockSource::Ptp4l { socket, domain } => {
                let source = Ptp4l::new(socket, runtime_dir, *domain, 0)?;
                follow(source, error_max_ns, stopping)
            }
            ClockSource::Chrony { address } => {
                follow(Chronyd::new(*address), error_max_ns, stopping)
            }
        }
    }

    pub(super) fn verdict(&self) -> Verdict {
        match self {
            Self::Guarded(guard) => {
                guard.lock().unwrap_or_else(PoisonError::into_inner).verdict(read_clocks())
            }
            Self::Assumed { epsilon_ns } => Verdict::Believed { epsilon_ns: *epsilon_ns },
            Self::Unknown => Verdict::NotBelieved { why: Why::NoMaster },
        }
    }
}

fn follow<S: tidelock_clock::driver::Source + Send + 'static>(
    mut source: S,
    error_max_ns: u64,
    stopping: watch::Receiver<bool>,
) -> io::Result<(Clock, Option<JoinHandle<()>>)> {
    // The bound is also the step of a master that the guard may overlook.
    let guard = Arc::new(Mutex::new(ClockGuard::new(Limits::new(error_max_ns))));
    let clock = Clock::Guarded(Arc::clone(&guard));
    let run = move || {
        let mut told = None;
        while !*stopping.borrow() {
            let asked = {
                // The answer takes up to 200 ms: nobody waits for the guard meanwhile.
                let mut copy = guard.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let asked = look(&mut copy, &mut source, ANSWER_MAX);
                *guard.lock().unwrap_or_else(PoisonError::into_inner) = copy;
                asked
            };
            let error = asked.err().map(|error| error.to_string());
            if error != told {
                match &error {
                    Some(error) => tracing::error!(error, "the clock is not followed"),
                    None => tracing::info!("the clock is followed"),
                }
                told = error;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    };
    let thread = std::thread::Builder::new().name("clock".to_owned()).spawn(run)?;
    Ok((clock, Some(thread)))
}
