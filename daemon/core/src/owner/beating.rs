//! Heartbeats that the watch asks for (see [`crate::heartbeat`]).

use super::driver::Driver;
use super::{Owner, replication};

impl<D: Driver> Owner<D> {
    /// Gives the heartbeat that was asked for its place among the writes, as soon as one may have it.
    pub(super) fn drive_heartbeat(&mut self) {
        let Some(number) = self.heartbeat else { return };
        let (is_ending, clocks) = (self.draining.is_some(), self.clocks());
        let seq = replication::admit_heartbeat(&mut self.sequencer, is_ending, clocks);
        if let Some(seq) = seq {
            self.heartbeat = None;
            self.pulse.take(number, seq);
        }
    }
}
