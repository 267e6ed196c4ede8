//! The verdict on this host's clock, by the source of the configuration.

use crate::config::ClockSource;
use std::io;
use std::path::Path;
use std::thread::JoinHandle;
use tidelock_clock::driver::{Chronyd, FollowedClock, Ptp4l, Source, SourceError};
use tidelock_clock::{Verdict, Why};
use tokio::sync::watch;

/// The verdict on this host's clock.
#[derive(Clone, Debug)]
pub(super) enum Clock {
    /// Judged by a guard. Each store has its own bound for ε.
    Guarded(FollowedClock),
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
            Self::Guarded(clock) => clock.verdict(),
            Self::Assumed { epsilon_ns } => Verdict::Believed { epsilon_ns: *epsilon_ns },
            Self::Unknown => Verdict::NotBelieved { why: Why::NoMaster },
        }
    }
}

fn follow<S: Source + Send + 'static>(
    source: S,
    error_max_ns: u64,
    stopping: watch::Receiver<bool>,
) -> io::Result<(Clock, Option<JoinHandle<()>>)> {
    let told = |error: Option<&SourceError>| match error {
        Some(error) => tracing::error!(%error, "the clock is not followed"),
        None => tracing::info!("the clock is followed"),
    };
    let (clock, thread) =
        FollowedClock::start(source, error_max_ns, move || *stopping.borrow(), told)?;
    Ok((Clock::Guarded(clock), Some(thread)))
}
