//! The standing of a member towards the backup, one type for each question. States that exclude each other cannot be
//! said together.

use crate::link::Refusal;
use crate::link::port::{Agreement, LeaseGivenUp};
use std::sync::Arc;
use tidelock_protocol::message::RefusalKind;

/// At most 15 beacons pass between two attempts of a member that is refused: with the usual lease 40 s.
const BEACONS_PASSED_LOG2_MAX: u32 = 4;

/// The conversation with the backup, on this connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversation {
    /// No connection.
    Detached,
    /// A connection, on which nothing is asked.
    Quiet,
    /// The backup is asked to attach the member.
    Attaching,
    /// The backup has attached the member.
    Attached {
        /// No beacon was sent since.
        wants_lease: bool,
        /// The backup has said that it takes no records for now. Sending on would only fill its buffers, and the beacons
        /// that keep the gate open for reads would queue behind.
        is_stalled: bool,
    },
    /// The backup has refused the member.
    Refused {
        /// The refusal has crossed with a question. What answers the question could be taken for the answer to the next
        /// one: on another connection it cannot.
        must_connect_anew: bool,
    },
}

impl Conversation {
    pub(super) const JUST_ATTACHED: Self = Self::Attached { wants_lease: true, is_stalled: false };

    pub(super) fn is_attached(self) -> bool {
        matches!(self, Self::Attached { .. })
    }

    pub(super) fn is_refused(self) -> bool {
        matches!(self, Self::Refused { .. })
    }

    pub(super) fn is_stalled(self) -> bool {
        matches!(self, Self::Attached { is_stalled: true, .. })
    }
}

/// The word of the backup on this run.
#[derive(Debug)]
pub(super) enum Refusing {
    /// No refusal since the member was attached last.
    No,
    /// For now: the member asks again and again.
    ForNow {
        last: Refusal,
        /// Refusals in a row.
        times: u32,
        /// So many beacons pass before it asks again.
        beacons_to_pass: u32,
    },
    /// For good: nothing is asked any more.
    ForGood {
        /// In the backup's words.
        reason: String,
    },
}

impl Refusing {
    /// The backup refuses. Returns whether that is news: a member that asks again and again hears the same.
    pub(super) fn refused(&mut self, refusal: &Refusal) -> bool {
        let (is_news, times) = match self {
            Self::No => (true, 1),
            Self::ForNow { last, times, .. } => (last != refusal, times.saturating_add(1)),
            Self::ForGood { .. } => return false,
        };
        // A server that stops is back soon; anything else waits for somebody who acts.
        let passes = (1 << (times - 1).min(BEACONS_PASSED_LOG2_MAX)) - 1;
        let beacons_to_pass = if refusal.kind == RefusalKind::Stopping { 0 } else { passes };
        *self = Self::ForNow { last: refusal.clone(), times, beacons_to_pass };
        is_news
    }

    /// A beacon is due. Returns whether the member asks to be attached instead.
    pub(super) fn asks_again(&mut self) -> bool {
        match self {
            Self::ForNow { beacons_to_pass, .. } if *beacons_to_pass > 0 => {
                *beacons_to_pass -= 1;
                false
            }
            Self::No | Self::ForNow { .. } => true,
            Self::ForGood { .. } => false,
        }
    }
}

/// Contact with the backup in this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contact {
    /// Not yet.
    None {
        /// The owner asks for [`FromLink::MayServeUnrecorded`](crate::link::port::FromLink::MayServeUnrecorded).
        wants_unrecorded: bool,
        /// The backup was reached, and does not want this member as it is.
        is_unwanted: bool,
    },
    /// The backup has attached the member.
    Had,
}

/// Policy and leases, as far as this run has heard of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseTalk {
    /// The backup has not told this run what it keeps of the policy: no lease is asked for.
    PolicyUnheard,
    /// The backup has told it on this connection: a lease is asked for.
    Asks,
    /// A lease was had in this run.
    Had,
}

impl LeaseTalk {
    /// A connection is made. Before its first lease a run is told who may be in mode async (`Unheard`): in answer to its
    /// policy.
    pub(super) fn connected(&mut self) {
        if *self == Self::Asks {
            *self = Self::PolicyUnheard;
        }
    }

    /// The backup has told what it keeps of the policy.
    pub(super) fn policy_heard(&mut self) {
        if *self == Self::PolicyUnheard {
            *self = Self::Asks;
        }
    }

    /// A lease was had.
    pub(super) fn leased(&mut self) {
        if *self == Self::Asks {
            *self = Self::Had;
        }
    }
}

/// A planned switch, as far as the link has a part in it.
#[derive(Debug)]
pub(super) enum Switching {
    /// None is under way.
    Not,
    /// The lease is given up when all other hosts are so far.
    Prepares {
        /// True if this host is ready.
        is_ready: bool,
        /// The asker that wants to hear of the other hosts.
        agreement: Arc<Agreement>,
    },
    /// The gate is shut for good in this epoch: no lease is asked for, it is given up.
    GivesUp {
        /// The asker that wants to hear that the lease is given up.
        answer: Option<LeaseGivenUp>,
    },
}

/// The stream, and a comparison that the owner asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recording {
    /// Guests' writes have records.
    Records,
    /// The stream stands: guests are served without records.
    Stands,
    /// The stream stands, and the owner asks for a comparison.
    WantsComparison,
    /// The attachment that is under way asks the backup for it.
    AsksToCompare,
}

impl Recording {
    /// The attachment that asked for a comparison has ended without an answer. Returns whether there was one.
    pub(super) fn unanswered(&mut self) -> bool {
        let was_asked = *self == Self::AsksToCompare;
        if was_asked {
            *self = Self::WantsComparison;
        }
        was_asked
    }
}
