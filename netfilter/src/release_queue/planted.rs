//! Bugs to plant on purpose: whoever checks the gate must catch each of them.

use super::{GateState, Policy, ShutWhy};
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::Mode;
use tidelock_protocol::vector::CountVector;

/// A way in which a release queue can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlantedBug {
    /// Releases when any one entry of the stamp is covered.
    AnyEntryCovers,
    /// Looks at the stamp's first entry only.
    FirstEntryOnly,
    /// Releases one write too early.
    OneTooEarly,
    /// Compares the sums of the entries.
    SumCovers,
    /// Never looks at the lease.
    LeaseIgnored,
    /// Lets a fenced gate open in mode async.
    FenceIgnoredInAsync,
}

impl PlantedBug {
    /// Every bug, to go through them all.
    pub const ALL: [PlantedBug; 6] = [
        PlantedBug::AnyEntryCovers,
        PlantedBug::FirstEntryOnly,
        PlantedBug::OneTooEarly,
        PlantedBug::SumCovers,
        PlantedBug::LeaseIgnored,
        PlantedBug::FenceIgnoredInAsync,
    ];

    pub(super) fn covered(self, committed: &CountVector, stamp: &CountVector) -> Option<bool> {
        // A writer that was taken out counts as 2^64 - 1.
        let sum = |v: &CountVector| v.entries().map(|(_, seq)| u128::from(seq.0)).sum::<u128>();
        match self {
            PlantedBug::AnyEntryCovers => Some(
                stamp.entries().next().is_none()
                    || stamp.entries().any(|(writer, seq)| committed.get(writer) >= seq),
            ),
            PlantedBug::FirstEntryOnly => {
                Some(stamp.entries().take(1).all(|(writer, seq)| committed.get(writer) >= seq))
            }
            PlantedBug::OneTooEarly => {
                Some(stamp.entries().all(|(writer, seq)| committed.get(writer) >= Seq(seq.0 - 1)))
            }
            PlantedBug::SumCovers => Some(sum(committed) >= sum(stamp)),
            PlantedBug::LeaseIgnored | PlantedBug::FenceIgnoredInAsync => None,
        }
    }

    pub(super) fn policy(self, gate: GateState, mode: Mode) -> Option<Policy> {
        match (self, gate, mode) {
            (PlantedBug::LeaseIgnored, GateState::Shut(ShutWhy::NoLease), Mode::Sync)
            | (PlantedBug::LeaseIgnored, GateState::Shut(ShutWhy::NoLease), Mode::Pipelined) => {
                Some(Policy::ByStamp)
            }
            (PlantedBug::FenceIgnoredInAsync, _, Mode::Async) => Some(Policy::HoldNone),
            _ => None,
        }
    }
}
