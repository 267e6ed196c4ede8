//! A node's hybrid logical clock, with the messages that carry its times.

use thiserror::Error;
use tidelock_protocol::hlc::{Hlc, HlcClock};

/// What a time adds to a message: its 8 bytes, little-endian, in front.
pub const MESSAGE_OVERHEAD_BYTES: usize = 8;

/// Why a message is not taken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum UnwrapError {
    /// It has no time.
    #[error("the message has {0} bytes, and a time has {MESSAGE_OVERHEAD_BYTES}")]
    Short(usize),
    /// Taken over, it would throw this clock far ahead, for good.
    #[error(
        "the sender's clock is {ahead_ms} ms ahead of this one, and {max_ms} ms are allowed: set it right"
    )]
    Ahead {
        /// By how much.
        ahead_ms: u64,
        /// The bound.
        max_ms: u64,
    },
}

/// The clock of one node (Retroscope 2). Wall clocks are read by the caller: milliseconds since the Unix epoch, which may
/// stand still or go back.
///
/// After a restart it must begin after every time that it gave out before: those in a log are in
/// [`newest`](super::WindowLog::newest); a node that also sends messages keeps a ceiling on record, or
/// waits until the wall clock has passed what it can have given out.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    hlc: HlcClock,
    max_lead_ms: Option<u64>,
}

impl Clock {
    /// A clock that goes on after a time.
    #[must_use]
    pub fn after(last: Hlc) -> Self {
        Self { hlc: HlcClock::after(last), max_lead_ms: None }
    }

    /// Refuses messages from clocks that are further ahead of this node's wall clock.
    #[must_use]
    pub fn with_max_lead_ms(self, max_lead_ms: u64) -> Self {
        Self { max_lead_ms: Some(max_lead_ms), ..self }
    }

    /// The time of a local event.
    pub fn tick(&mut self, wall_ms: u64) -> Hlc {
        self.hlc.tick(wall_ms)
    }

    /// The time of the receipt of what was sent at `remote`: after both.
    pub fn tick_on_receive(&mut self, wall_ms: u64, remote: Hlc) -> Hlc {
        self.hlc.tick_on_receive(wall_ms, remote)
    }

    /// A message with the time of its sending in front.
    pub fn wrap(&mut self, wall_ms: u64, message: &[u8]) -> Vec<u8> {
        let at = self.tick(wall_ms);
        [&at.0.to_le_bytes(), message].concat()
    }

    /// The time of the receipt of a message, and the message.
    pub fn unwrap<'a>(
        &mut self,
        wall_ms: u64,
        wrapped: &'a [u8],
    ) -> Result<(Hlc, &'a [u8]), UnwrapError> {
        let (time, message) =
            wrapped.split_first_chunk().ok_or(UnwrapError::Short(wrapped.len()))?;
        let remote = Hlc(u64::from_le_bytes(*time));
        let ahead_ms = remote.physical_ms().saturating_sub(wall_ms);
        match self.max_lead_ms {
            Some(max_ms) if ahead_ms > max_ms => Err(UnwrapError::Ahead { ahead_ms, max_ms }),
            _ => Ok((self.tick_on_receive(wall_ms, remote), message)),
        }
    }

    /// The last time given out or heard.
    #[must_use]
    pub fn last(&self) -> Hlc {
        self.hlc.last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_received_is_later_than_what_was_sent() {
        let (mut a, mut b) = (Clock::default(), Clock::after(Hlc::new(3, 0)));
        let message = a.wrap(100, b"hello");
        let (at, body) = b.unwrap(40, &message).unwrap();
        assert_eq!((at, body), (Hlc::new(100, 1), b"hello".as_slice()));
        assert!(b.tick(41) > at, "b's own clock is behind");
        assert_eq!(a.unwrap(100, &message[..7]), Err(UnwrapError::Short(7)));
    }

    #[test]
    fn a_clock_that_is_far_ahead_is_not_followed() {
        let mut clock = Clock::default().with_max_lead_ms(500);
        let message = Clock::default().wrap(10_000, b"");
        let ahead = UnwrapError::Ahead { ahead_ms: 9_000, max_ms: 500 };
        assert_eq!(clock.unwrap(1_000, &message), Err(ahead));
        assert_eq!(clock.last(), Hlc(0));
        assert!(clock.unwrap(9_500, &message).is_ok());
    }
}
