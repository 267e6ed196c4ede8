//! NOPs of a shard that has nothing to write (Slogger 5.5.3), so that the watermark can pass it.
//!
//! Only while others write: a NOP is never a reason for another shard's NOP, so a store without writes is silent.

use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;

/// The need of one shard for NOPs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct IdleShard {
    /// The least time between two NOPs.
    every_ns: u64,
    /// The last effective stamp of its log.
    own: Hlc,
    /// The last effective stamp of any shard's updates.
    frontier: Hlc,
    /// Time at which the last NOP was asked for.
    last: Option<MonoNanos>,
}

impl IdleShard {
    /// A leader of the shard of which nothing is known yet: the next one begins anew, because what this one has appended may
    /// be lost with it. `every_ns`: the least time between two NOPs.
    #[must_use]
    pub fn new(every_ns: u64) -> Self {
        Self { every_ns, own: Hlc::default(), frontier: Hlc::default(), last: None }
    }

    /// The leader's log has an entry with this effective stamp, an update or a NOP.
    pub fn appended(&mut self, stamp: Hlc) {
        self.own = self.own.max(stamp);
    }

    /// Some shard of the store has an update with this effective stamp.
    pub fn heard(&mut self, update: Hlc) {
        self.frontier = self.frontier.max(update);
    }

    /// True if the store is to append a NOP to this shard's log now.
    pub fn poll(&mut self, now: MonoNanos) -> bool {
        let due = self.deadline().is_some_and(|deadline| deadline <= now)
            && !tidelock_planted::is(Bug::NoNops);
        if due {
            self.last = Some(now);
        }
        due
    }

    /// The time of the next NOP, unless something is written before it.
    #[must_use]
    pub fn deadline(&self) -> Option<MonoNanos> {
        let after = self.last.map_or(0, |last| last.0.saturating_add(self.every_ns));
        (self.own < self.frontier).then_some(MonoNanos(after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY_NS: u64 = 1000;

    #[test]
    fn a_store_without_writes_is_silent() {
        let mut shard = IdleShard::new(EVERY_NS);
        assert!(!shard.poll(MonoNanos(0)));
        shard.appended(Hlc(5));
        shard.heard(Hlc(5));
        assert!(!shard.poll(MonoNanos(u64::MAX)), "its log is as far as any update");
    }

    #[test]
    fn an_idle_shard_follows_the_others_at_its_pace() {
        let mut shard = IdleShard::new(EVERY_NS);
        shard.heard(Hlc(5));
        assert!(shard.poll(MonoNanos(10)), "at once");
        shard.appended(Hlc(6));
        shard.heard(Hlc(7));
        assert!(!shard.poll(MonoNanos(500)));
        assert_eq!(shard.deadline(), Some(MonoNanos(10 + EVERY_NS)));
        assert!(shard.poll(MonoNanos(10 + EVERY_NS)));
        assert!(
            !shard.poll(MonoNanos(11 + EVERY_NS)),
            "the NOP may be lost, and is asked for again later"
        );
        assert!(shard.poll(MonoNanos(10 + 2 * EVERY_NS)));
    }
}
