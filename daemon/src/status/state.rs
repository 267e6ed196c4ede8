//! How protected a group is: facts in, one word out.

use serde::{Deserialize, Serialize};
use std::fmt;
use tidelock_protocol::message::Mode;

/// How protected a group is, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupState {
    /// The backup has not been reached since the daemon started: guests' requests wait.
    WaitingForBackup,
    /// The first copy of the disks is under way: nothing could be recovered.
    Initialising,
    /// The backup is whole and what clients are told is covered.
    Protected,
    /// `async` by configuration: the backup is whole and follows, nothing is held.
    Replicating,
    /// A weaker mode than the configured one is in force: clients may know too much.
    Degraded,
    /// Guests were served before the backup was reached in this run, and it does not have all of that.
    Unprotected,
    /// Packets of a guest leave unheld, or have left so, and the backup does not have all that they told.
    Unheld,
    /// The backlog on disk was full: guests go on, and what they write is not recorded.
    Overflowed,
    /// After an unclean stop the sites are being compared: the backup is whole but stands still.
    Resyncing,
    /// A verification has found the backup's disks different from the local ones.
    Differs,
    /// The link is down: writes fill the backlog, packets are held.
    Disconnected,
    /// The link is up but the backup has stopped acknowledging, or refuses the group.
    Stalled,
    /// A heartbeat has not come back, and nothing says why.
    NoHeartbeat,
    /// The group was recovered at the backup, or switched over to it: this host's gate stays shut.
    Fenced,
    /// Another run of this host's daemon has a member: this one's gate stays shut.
    Superseded,
    /// The daemon is ending.
    Stopping,
}

impl GroupState {
    /// All states, from best to worst as far as an operator is concerned.
    pub const ALL: [GroupState; 16] = [
        GroupState::Protected,
        GroupState::Replicating,
        GroupState::Resyncing,
        GroupState::Initialising,
        GroupState::Degraded,
        GroupState::Unprotected,
        GroupState::Unheld,
        GroupState::Overflowed,
        GroupState::Differs,
        GroupState::WaitingForBackup,
        GroupState::Disconnected,
        GroupState::Stalled,
        GroupState::NoHeartbeat,
        GroupState::Fenced,
        GroupState::Superseded,
        GroupState::Stopping,
    ];

    /// The word for it, as in the JSON form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GroupState::WaitingForBackup => "waiting-for-backup",
            GroupState::Initialising => "initialising",
            GroupState::Protected => "protected",
            GroupState::Replicating => "replicating",
            GroupState::Degraded => "degraded",
            GroupState::Unprotected => "unprotected",
            GroupState::Unheld => "unheld",
            GroupState::Overflowed => "overflowed",
            GroupState::Resyncing => "resyncing",
            GroupState::Differs => "differs",
            GroupState::Disconnected => "disconnected",
            GroupState::Stalled => "stalled",
            GroupState::NoHeartbeat => "no-heartbeat",
            GroupState::Fenced => "fenced",
            GroupState::Superseded => "superseded",
            GroupState::Stopping => "stopping",
        }
    }

    /// What it means, in one sentence.
    #[must_use]
    pub fn meaning(self) -> &'static str {
        match self {
            GroupState::WaitingForBackup => {
                "the backup was not reached since the start; the guest's disk waits for it"
            }
            GroupState::Initialising => {
                "the first copy is under way; nothing could be recovered yet"
            }
            GroupState::Protected => "a disaster now would undo nothing that a client was told",
            GroupState::Replicating => {
                "async: a disaster now would undo the lag, and clients may know of it"
            }
            GroupState::Degraded => {
                "a weaker mode than configured is in force; clients may know what a disaster would undo"
            }
            GroupState::Unprotected => {
                "guests are served although the backup was not reached since the start, or does not have all of that \
                 yet; a disaster would undo it"
            }
            GroupState::Unheld => {
                "packets of a guest leave, or have left, without being held; clients may know what a disaster would undo"
            }
            GroupState::Overflowed => {
                "the backlog was full; guests go on, what they write is compared later, replies are held; a disaster goes \
                 back to before that"
            }
            GroupState::Resyncing => {
                "the sites are being compared after an unclean stop or a full backlog; the backup stands at its last whole state"
            }
            GroupState::Differs => {
                "the backup's disks were found to differ from the local ones; a recovery would bring back theirs"
            }
            GroupState::Disconnected => {
                "the link is down; writes fill the backlog and replies are held"
            }
            GroupState::Stalled => "the backup does not acknowledge; replies are held",
            GroupState::NoHeartbeat => {
                "writes that should have been acknowledged were not, though nothing says why; replies are held"
            }
            GroupState::Fenced => {
                "the group was recovered at the backup, or switched over to it; this host answers no clients, also after a restart"
            }
            GroupState::Superseded => {
                "another run of this host's daemon has taken a member over; this one protects nothing and answers no clients"
            }
            GroupState::Stopping => "the daemon is ending",
        }
    }

    /// Whether an operator can sleep.
    #[must_use]
    pub fn is_fine(self) -> bool {
        matches!(self, GroupState::Protected | GroupState::Replicating)
    }
}

impl fmt::Display for GroupState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is known of a group when its state is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The daemon is ending.
    pub stopping: bool,
    /// The backup has ended this primary's epoch, or this host has given up its lease.
    pub fenced: bool,
    /// The backup has a newer run of this host's daemon for some member.
    pub superseded: bool,
    /// The gate was opened by the group's policy, and the backup does not have all that has left.
    pub degraded: bool,
    /// Guests were served before the backup was reached in this run, and it does not have all of that.
    pub unprotected: bool,
    /// The rules of a gate are gone, or its interface is while the guest's disk is in use; or they were, and the backup
    /// does not have all that may have left.
    pub unheld: bool,
    /// The backlog of some writer was full, and nothing of what it writes is recorded.
    pub overflowed: bool,
    /// Each writer has been attached at least once in this run.
    pub ever_attached: bool,
    /// Each writer is attached now.
    pub attached: bool,
    /// The backup has said that it does not acknowledge, or refuses for now.
    pub stalled: bool,
    /// Some writer's heartbeat has not come back.
    pub heartbeat_lost: bool,
    /// Some disk's first copy is not complete.
    pub initial_copy: bool,
    /// Some writer is being compared after an unclean stop.
    pub resync: bool,
    /// The last verification of some writer found differences that were not repaired.
    pub differs: bool,
    /// The mode in force.
    pub mode: Mode,
    /// The mode of the configuration.
    pub configured_mode: Mode,
}

impl Facts {
    /// Of a group of which all is well.
    pub const GOOD: Facts = Facts {
        stopping: false,
        fenced: false,
        superseded: false,
        degraded: false,
        unprotected: false,
        unheld: false,
        overflowed: false,
        ever_attached: true,
        attached: true,
        stalled: false,
        heartbeat_lost: false,
        initial_copy: false,
        resync: false,
        differs: false,
        mode: Mode::Pipelined,
        configured_mode: Mode::Pipelined,
    };
}

/// The one word for these facts: the first that applies, worst first.
#[must_use]
pub fn judge(facts: Facts) -> GroupState {
    if facts.fenced {
        GroupState::Fenced
    } else if facts.superseded {
        GroupState::Superseded
    } else if facts.stopping {
        GroupState::Stopping
    } else if facts.unprotected {
        GroupState::Unprotected
    } else if facts.degraded {
        GroupState::Degraded
    } else if facts.unheld {
        GroupState::Unheld
    } else if facts.overflowed {
        GroupState::Overflowed
    } else if !facts.ever_attached {
        if facts.stalled { GroupState::Stalled } else { GroupState::WaitingForBackup }
    } else if facts.stalled {
        GroupState::Stalled
    } else if !facts.attached {
        GroupState::Disconnected
    } else if facts.heartbeat_lost {
        GroupState::NoHeartbeat
    } else if facts.initial_copy {
        GroupState::Initialising
    } else if facts.resync {
        GroupState::Resyncing
    } else if facts.mode == Mode::Async && facts.configured_mode != Mode::Async {
        GroupState::Degraded
    } else if facts.differs {
        GroupState::Differs
    } else if facts.mode == Mode::Async {
        GroupState::Replicating
    } else {
        GroupState::Protected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fact_has_its_word() {
        let cases = [
            (Facts::GOOD, GroupState::Protected),
            (Facts { mode: Mode::Sync, ..Facts::GOOD }, GroupState::Protected),
            (Facts { mode: Mode::Async, ..Facts::GOOD }, GroupState::Degraded),
            (
                Facts { mode: Mode::Async, configured_mode: Mode::Async, ..Facts::GOOD },
                GroupState::Replicating,
            ),
            (Facts { resync: true, ..Facts::GOOD }, GroupState::Resyncing),
            (Facts { initial_copy: true, ..Facts::GOOD }, GroupState::Initialising),
            (Facts { differs: true, ..Facts::GOOD }, GroupState::Differs),
            (Facts { differs: true, resync: true, ..Facts::GOOD }, GroupState::Resyncing),
            (Facts { differs: true, mode: Mode::Async, ..Facts::GOOD }, GroupState::Degraded),
            (Facts { attached: false, ..Facts::GOOD }, GroupState::Disconnected),
            (
                Facts { attached: false, initial_copy: true, ..Facts::GOOD },
                GroupState::Disconnected,
            ),
            (Facts { stalled: true, ..Facts::GOOD }, GroupState::Stalled),
            (Facts { stalled: true, attached: false, ..Facts::GOOD }, GroupState::Stalled),
            (Facts { heartbeat_lost: true, ..Facts::GOOD }, GroupState::NoHeartbeat),
            // Copies do not delay it, so it is missed during one, too.
            (
                Facts { heartbeat_lost: true, initial_copy: true, ..Facts::GOOD },
                GroupState::NoHeartbeat,
            ),
            (Facts { heartbeat_lost: true, resync: true, ..Facts::GOOD }, GroupState::NoHeartbeat),
            (
                Facts { heartbeat_lost: true, mode: Mode::Async, ..Facts::GOOD },
                GroupState::NoHeartbeat,
            ),
            (Facts { heartbeat_lost: true, stalled: true, ..Facts::GOOD }, GroupState::Stalled),
            (
                Facts { heartbeat_lost: true, attached: false, ..Facts::GOOD },
                GroupState::Disconnected,
            ),
            (Facts { heartbeat_lost: true, degraded: true, ..Facts::GOOD }, GroupState::Degraded),
            (Facts { superseded: true, ..Facts::GOOD }, GroupState::Superseded),
            (Facts { superseded: true, stopping: true, ..Facts::GOOD }, GroupState::Superseded),
            (Facts { superseded: true, fenced: true, ..Facts::GOOD }, GroupState::Fenced),
            (Facts { heartbeat_lost: true, fenced: true, ..Facts::GOOD }, GroupState::Fenced),
            (Facts { heartbeat_lost: true, stopping: true, ..Facts::GOOD }, GroupState::Stopping),
            (
                Facts { ever_attached: false, attached: false, ..Facts::GOOD },
                GroupState::WaitingForBackup,
            ),
            (
                Facts { degraded: true, attached: false, stalled: true, ..Facts::GOOD },
                GroupState::Degraded,
            ),
            (Facts { degraded: true, resync: true, ..Facts::GOOD }, GroupState::Degraded),
            (
                Facts { unprotected: true, ever_attached: false, attached: false, ..Facts::GOOD },
                GroupState::Unprotected,
            ),
            (
                Facts { unprotected: true, degraded: true, resync: true, ..Facts::GOOD },
                GroupState::Unprotected,
            ),
            (Facts { unprotected: true, fenced: true, ..Facts::GOOD }, GroupState::Fenced),
            (Facts { unheld: true, ..Facts::GOOD }, GroupState::Unheld),
            (
                Facts { unheld: true, overflowed: true, attached: false, ..Facts::GOOD },
                GroupState::Unheld,
            ),
            (Facts { unheld: true, degraded: true, ..Facts::GOOD }, GroupState::Degraded),
            (Facts { overflowed: true, ..Facts::GOOD }, GroupState::Overflowed),
            (Facts { overflowed: true, mode: Mode::Async, ..Facts::GOOD }, GroupState::Overflowed),
            (
                Facts { overflowed: true, attached: false, ever_attached: false, ..Facts::GOOD },
                GroupState::Overflowed,
            ),
            (Facts { overflowed: true, stalled: true, ..Facts::GOOD }, GroupState::Overflowed),
            (Facts { overflowed: true, degraded: true, ..Facts::GOOD }, GroupState::Degraded),
            (Facts { overflowed: true, fenced: true, ..Facts::GOOD }, GroupState::Fenced),
            (Facts { degraded: true, fenced: true, ..Facts::GOOD }, GroupState::Fenced),
            (Facts { stopping: true, ..Facts::GOOD }, GroupState::Stopping),
            (Facts { stopping: true, fenced: true, ..Facts::GOOD }, GroupState::Fenced),
        ];
        for (facts, state) in cases {
            assert_eq!(judge(facts), state, "{facts:?}");
        }
    }

    /// Rule 6: of all combinations, `protected` is said only if everything holds.
    #[test]
    fn nothing_else_is_called_protected() {
        for bits in 0..8192u32 {
            let bit = |n: u32| bits & (1 << n) != 0;
            for mode in [Mode::Sync, Mode::Pipelined, Mode::Async] {
                let facts = Facts {
                    stopping: bit(0),
                    fenced: bit(1),
                    superseded: false,
                    degraded: bit(7),
                    ever_attached: bit(2),
                    attached: bit(3),
                    stalled: bit(4),
                    initial_copy: bit(5),
                    resync: bit(6),
                    differs: bit(8),
                    unprotected: bit(9),
                    heartbeat_lost: bit(10),
                    overflowed: bit(11),
                    unheld: bit(12),
                    mode,
                    configured_mode: Mode::Pipelined,
                };
                let whole = bits == 0b000_1100 && mode != Mode::Async;
                assert_eq!(judge(facts) == GroupState::Protected, whole, "{facts:?}");
            }
        }
    }

    #[test]
    fn the_words_are_the_json_form() {
        for state in GroupState::ALL {
            let json = serde_json::to_string(&state).unwrap();
            assert_eq!(json, format!("\"{}\"", state.name()));
        }
    }
}
