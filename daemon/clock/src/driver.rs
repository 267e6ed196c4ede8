//! Drivers: sockets to the sources, and the clocks of this host. Small, blocking, and without a decision.
//!
//! | module | what it is for |
//! |---|---|
//! | [`clocks`] | readings of this host's clocks |
//! | [`ptp4l`] | linuxptp, over its Unix datagram socket |
//! | [`chronyd`] | chrony, over UDP on this host |
//! | [`follow`] | a thread that asks one of them, and a verdict at any time |

pub mod chronyd;
pub mod clocks;
pub mod follow;
pub mod ptp4l;

use crate::chrony::ChronyError;
use crate::guard::ClockGuard;
use crate::ptp::look::LookError;
use crate::sample::Answer;
use std::io;
use std::time::{Duration, Instant};

pub use chronyd::Chronyd;
pub use clocks::read_clocks;
pub use follow::FollowedClock;
pub use ptp4l::Ptp4l;

/// Someone who measures the clock.
pub trait Source {
    /// Asks once. Blocks for the timeout at most, and for what one system call takes.
    ///
    /// # Errors
    /// No answer in time, or none that is understood. The next question begins anew: a source that was restarted is
    /// found again.
    fn ask(&mut self, timeout: Duration) -> Result<Answer, SourceError>;
}

/// Reason why a source gives no answer.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The socket fails: the source does not run, or is elsewhere.
    #[error("cannot {what} {whom}: {error}")]
    Io {
        /// The attempt.
        what: &'static str,
        /// Path or address.
        whom: String,
        /// The system's reason.
        error: io::Error,
    },
    /// No answer in time.
    #[error("no answer from {whom} within {after_ms} ms")]
    Timeout {
        /// Path or address.
        whom: String,
        /// The time that was given.
        after_ms: u128,
    },
    /// An answer of `ptp4l` that is none.
    #[error(transparent)]
    Ptp(#[from] LookError),
    /// An answer of `chronyd` that is none.
    #[error(transparent)]
    Chrony(#[from] ChronyError),
}

/// Asks the source once, and tells the guard.
///
/// # Errors
/// The errors of [`Source::ask`]; the guard knows of them.
pub fn look(
    guard: &mut ClockGuard,
    source: &mut impl Source,
    timeout: Duration,
) -> Result<(), SourceError> {
    let asked = read_clocks();
    let answer = source.ask(timeout);
    let answered = read_clocks();
    match answer {
        Ok(answer) => {
            guard.on_answer(asked, answered, &answer);
            Ok(())
        }
        Err(error) => {
            guard.on_no_answer(answered);
            Err(error)
        }
    }
}

/// The end of the time that one question may take.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    begun: Instant,
    timeout: Duration,
}

impl Deadline {
    fn new(timeout: Duration) -> Self {
        Self { begun: Instant::now(), timeout }
    }

    /// The time that is left, never zero.
    fn left(&self, whom: &str) -> Result<Duration, SourceError> {
        let left = self.timeout.checked_sub(self.begun.elapsed()).filter(|left| !left.is_zero());
        left.ok_or_else(|| self.passed(whom))
    }

    fn passed(&self, whom: &str) -> SourceError {
        SourceError::Timeout { whom: whom.to_owned(), after_ms: self.timeout.as_millis() }
    }

    /// The error of an operation that had this deadline as its timeout.
    fn error(&self, what: &'static str, whom: &str, error: io::Error) -> SourceError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.passed(whom),
            _ => SourceError::Io { what, whom: whom.to_owned(), error },
        }
    }
}
