//! Time, as the caller tells it, and the times that both ends keep.

use std::time::Duration;
use tidelock_wal::{Lsn, PgTimestamp, TimelineId};

/// Time, by two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Time since any fixed instant, by a clock that never goes back: what everything is measured by.
    pub mono: Duration,
    /// Wall clock, for the stamps that messages carry. Nothing is decided by it.
    pub wall: PgTimestamp,
}

/// Times that an end keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Silence of the peer after which the connection is given up. After half of it the peer is asked for a sign.
    pub silence_max: Duration,
    /// Time after which the receiver repeats its status although nothing has changed.
    pub status_every: Duration,
}

impl Default for Timing {
    /// PostgreSQL's own: `wal_sender_timeout` and `wal_receiver_timeout` of a minute, `wal_receiver_status_interval` of
    /// ten seconds.
    fn default() -> Timing {
        Timing { silence_max: Duration::from_secs(60), status_every: Duration::from_secs(10) }
    }
}

/// A position on a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Timeline that the log is read on.
    pub timeline: TimelineId,
    /// Position in the log.
    pub at: Lsn,
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of timeline {}", self.at, self.timeline)
    }
}

/// Name of a replication slot: 1 to 63 lower-case letters, digits and underscores, as PostgreSQL demands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotName(String);

/// A text that is no name of a slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no name of a slot: 1 to 63 of a-z, 0-9 and _")]
pub struct SlotNameError {
    /// The text, cut off after 80 characters.
    pub text: String,
}

impl SlotName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for SlotName {
    type Err = SlotNameError;

    fn from_str(text: &str) -> Result<SlotName, SlotNameError> {
        let is_allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        if (1..=63).contains(&text.len()) && text.bytes().all(is_allowed) {
            Ok(SlotName(text.into()))
        } else {
            Err(SlotNameError { text: text.chars().take(80).collect() })
        }
    }
}

impl std::fmt::Display for SlotName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_slots_can_be_put_into_commands() {
        for name in ["a", "tidelock_1", &"x".repeat(63)] {
            assert_eq!(name.parse::<SlotName>().unwrap().as_str(), name);
        }
        for text in ["", "A", "a b", "a\"; DROP", "ä", "a-b", &"x".repeat(64)] {
            assert!(text.parse::<SlotName>().is_err(), "{text:?}");
        }
    }
}
