//! The committed vector C: at the backup, where it is made, and at a host, where the gate reads it.

use crate::ids::{Seq, WriterId};
use crate::receiver::Ack;
use crate::vector::CountVector;

/// C as the backup makes it: for each writer what is durable, contiguously.
///
/// While a writer is resyncing, its entry stands still: what is durable after it does not make a
/// consistent state yet, so no packet may depend on it (rules 1 and 2). When the resync has ended,
/// the entry jumps to what is durable.
#[derive(Clone, Debug, Default)]
pub struct GroupCommit {
    durable: CountVector,
    committed: CountVector,
    held: Vec<WriterId>,
}

impl GroupCommit {
    /// C as found in a journal.
    #[must_use]
    pub fn new(committed: CountVector) -> Self {
        Self { durable: committed.clone(), committed, held: Vec::new() }
    }

    /// Records are durable. Cumulative.
    pub fn durable(&mut self, writer: WriterId, ack: Ack) {
        self.durable.raise(writer, ack.durable());
        if !self.held.contains(&writer) {
            self.committed.raise(writer, ack.durable());
        }
    }

    /// A resync of this writer begins: its entry stands still.
    pub fn hold(&mut self, writer: WriterId) {
        if !self.held.contains(&writer) {
            self.held.push(writer);
        }
    }

    /// The resync has ended with a record that is durable by now: the entry goes on.
    pub fn resume(&mut self, writer: WriterId) {
        self.held.retain(|w| *w != writer);
        self.committed.raise(writer, self.durable.get(writer));
    }

    /// Whether this writer's entry stands still.
    #[must_use]
    pub fn is_held(&self, writer: WriterId) -> bool {
        self.held.contains(&writer)
    }

    /// C.
    #[must_use]
    pub fn committed(&self) -> &CountVector {
        &self.committed
    }

    /// The writer's durable seq, which C may lag behind during a resync.
    #[must_use]
    pub fn durable_of(&self, writer: WriterId) -> Seq {
        self.durable.get(writer)
    }
}

/// C as a host has heard of it. Only grows: messages may be old.
#[derive(Clone, Debug, Default)]
pub struct CommitTracker {
    committed: CountVector,
}

impl CommitTracker {
    /// Merges what a message says. Returns whether C rose.
    pub fn merge(&mut self, committed: &CountVector) -> bool {
        self.committed.merge(committed)
    }

    /// C.
    #[must_use]
    pub fn committed(&self) -> &CountVector {
        &self.committed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{DiskId, Epoch};
    use crate::message::DiskSpec;
    use crate::receiver::Receiver;
    use crate::record::DiskChange;

    fn ack(seq: u64) -> Ack {
        let disk = DiskSpec { id: DiskId(0), name: "d".into(), size_bytes: 1 };
        Receiver::<DiskChange>::new(WriterId(1), Epoch(1), vec![disk], Seq(seq)).unsynced().synced()
    }

    #[test]
    fn a_resyncing_writer_stands_still_and_then_jumps() {
        let mut c = GroupCommit::new(CountVector::of(WriterId(1), Seq(5)));
        c.hold(WriterId(1));
        c.durable(WriterId(1), ack(9));
        c.durable(WriterId(0), ack(3));
        assert_eq!(c.committed().get(WriterId(1)), Seq(5));
        assert_eq!(c.committed().get(WriterId(0)), Seq(3), "the others go on");
        assert_eq!(c.durable_of(WriterId(1)), Seq(9));
        c.resume(WriterId(1));
        assert_eq!(c.committed().get(WriterId(1)), Seq(9));
    }

    #[test]
    fn a_host_never_forgets_what_was_committed() {
        let mut t = CommitTracker::default();
        assert!(t.merge(&CountVector::of(WriterId(0), Seq(5))));
        assert!(!t.merge(&CountVector::of(WriterId(0), Seq(4))));
        assert_eq!(t.committed().get(WriterId(0)), Seq(5));
    }
}
