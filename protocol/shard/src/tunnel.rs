//! Flow of bytes through a tunnel: at either end the same.

use crate::link::{TUNNEL_DATA_MAX_BYTES, TUNNEL_WINDOW_BYTES};
use thiserror::Error;

/// A peer that breaks the rules of a tunnel: the connection must end.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TunnelError {
    /// More was sent than was taken.
    #[error("more than {TUNNEL_WINDOW_BYTES} bytes of a tunnel were sent before they were taken")]
    Overrun,
    /// More was taken than was sent.
    #[error("more bytes of a tunnel were taken than were sent")]
    Untrue,
}

/// One end of a tunnel.
#[derive(Clone, Debug)]
pub struct Tunnel {
    /// Bytes that may be sent.
    room: usize,
    /// Bytes that have arrived and were not taken.
    waiting: usize,
    /// Bytes that were taken, and the other end was not told.
    untold: usize,
}

impl Default for Tunnel {
    fn default() -> Self {
        Self { room: TUNNEL_WINDOW_BYTES, waiting: 0, untold: 0 }
    }
}

impl Tunnel {
    /// The most bytes that the next message may carry. 0: the other end has to take some first.
    #[must_use]
    pub fn may_send(&self) -> usize {
        self.room.min(TUNNEL_DATA_MAX_BYTES)
    }

    /// So many bytes are sent, no more than may be.
    pub fn sent(&mut self, bytes: usize) {
        self.room = self.room.saturating_sub(bytes);
    }

    /// The other end has taken bytes.
    ///
    /// # Errors
    /// So many were not sent.
    pub fn taken(&mut self, bytes: u32) -> Result<(), TunnelError> {
        let room = self.room.saturating_add(bytes as usize);
        self.room = if room > TUNNEL_WINDOW_BYTES { return Err(TunnelError::Untrue) } else { room };
        Ok(())
    }

    /// Bytes have arrived.
    ///
    /// # Errors
    /// So many were not to be sent.
    pub fn received(&mut self, bytes: usize) -> Result<(), TunnelError> {
        let waiting = self.waiting.saturating_add(bytes);
        if waiting + self.untold > TUNNEL_WINDOW_BYTES {
            return Err(TunnelError::Overrun);
        }
        self.waiting = waiting;
        Ok(())
    }

    /// Bytes that had arrived are taken. What the other end is to be told, once it is worth a message.
    pub fn take(&mut self, bytes: usize) -> Option<u32> {
        let bytes = bytes.min(self.waiting);
        self.waiting -= bytes;
        self.untold += bytes;
        let is_worth = self.untold >= TUNNEL_WINDOW_BYTES / 4 || self.waiting == 0;
        (is_worth && self.untold > 0).then(|| std::mem::take(&mut self.untold) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Bytes go through, never more than the window are under way, and no end waits for ever.
        #[test]
        fn an_end_never_overruns_the_other_and_everything_arrives(
            total in 0usize..4 << 20, turns in prop::collection::vec(1usize..200_000, 1..50),
        ) {
            let (mut near, mut far) = (Tunnel::default(), Tunnel::default());
            let (mut sent, mut taken) = (0, 0);
            let mut turns = turns.into_iter().cycle();
            while taken < total {
                while sent < total && near.may_send() > 0 {
                    let bytes = near.may_send().min(total - sent);
                    near.sent(bytes);
                    sent += bytes;
                    far.received(bytes).unwrap();
                }
                let bytes = turns.next().unwrap().min(sent - taken);
                taken += bytes;
                if let Some(told) = far.take(bytes) {
                    near.taken(told).unwrap();
                }
            }
        }
    }

    #[test]
    fn a_peer_that_counts_wrongly_is_found_out() {
        let mut tunnel = Tunnel::default();
        assert_eq!(tunnel.taken(1), Err(TunnelError::Untrue));
        tunnel.received(TUNNEL_WINDOW_BYTES).unwrap();
        assert_eq!(tunnel.received(1), Err(TunnelError::Overrun));
        assert_eq!(tunnel.take(10), None);
        assert_eq!(tunnel.received(1), Err(TunnelError::Overrun), "the other end was not told");
        assert_eq!(tunnel.take(usize::MAX), Some(TUNNEL_WINDOW_BYTES as u32));
        assert_eq!(tunnel.received(1), Ok(()));
    }
}
