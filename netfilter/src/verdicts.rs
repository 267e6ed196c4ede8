//! Decisions in the form in which the kernel takes them.
//!
//! The kernel keeps queued packets in the order of their ids. It accepts one by its id, drops one
//! by its id, or accepts every packet from the front up to an id. While nothing of a queue is
//! held, everything up to the last passed packet may leave, so a whole run costs one message.
//! While something is held, a packet that passes beside it needs its own verdict.

use crate::release_queue::PacketId;

/// One verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This packet leaves.
    Accept(PacketId),
    /// This packet and all that were queued before it leave.
    AcceptUpTo(PacketId),
    /// This packet is dropped.
    Drop(PacketId),
}

/// Verdicts in the order in which they must reach the kernel.
#[derive(Debug, Default)]
pub struct Verdicts(Vec<Verdict>);

impl Verdicts {
    /// No verdicts yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A packet passes on arrival. `nothing_held`: its queue holds no packet.
    pub fn pass(&mut self, id: PacketId, nothing_held: bool) {
        match (nothing_held, self.0.last_mut()) {
            (true, Some(Verdict::AcceptUpTo(up_to))) => *up_to = id,
            (true, _) => self.0.push(Verdict::AcceptUpTo(id)),
            (false, _) => self.0.push(Verdict::Accept(id)),
        }
    }

    /// A run from the front of the queue is released.
    pub fn release(&mut self, up_to: PacketId) {
        self.0.push(Verdict::AcceptUpTo(up_to));
    }

    /// A packet is dropped.
    pub fn drop_packet(&mut self, id: PacketId) {
        self.0.push(Verdict::Drop(id));
    }

    /// The verdicts so far.
    #[must_use]
    pub fn as_slice(&self) -> &[Verdict] {
        &self.0
    }

    /// Begins anew, with the memory kept.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
