//! What the checkers find. Each has a name that reports and tests use, and the rule of DESIGN 3
//! that it watches over.

use std::cell::Cell;
use std::fmt;

/// A checker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Checker {
    /// Rule 1: P names a write before it is completed.
    PublishBeforeComplete,
    /// Rule 1: what a released packet depends on is committed.
    OutputCommit,
    /// Rule 1: rows that a client was told of are in the recovered disks, byte by byte.
    ToldRows,
    /// Rule 2: recovered disks equal the initial state and a prefix of the writes, byte by byte.
    Prefix,
    /// Rule 2: what a record of one writer depends on of another is recovered with it.
    Closed,
    /// Rule 2: overlapping operations are not in flight together.
    Overlap,
    /// Rule 2: a copy is what the disk holds, never older.
    CopyIsCurrent,
    /// Rule 3: an acknowledgement never goes beyond what arrived without a gap.
    AckContiguous,
    /// Rules 3 and 9: what was acknowledged is there after the worst crash.
    AckDurable,
    /// Rule 4: after a recovery the backup takes nothing of the old primary.
    OneEpoch,
    /// Rule 4: a group is recovered only while the operator who has ordered it waits for that.
    Ordered,
    /// Rules 5 and 6: bookmarks and pins on record are there until they are taken out, and show what they showed.
    Marks,
    /// Rule 4: no packet leaves without a lease.
    Lease,
    /// Rule 4: no packet leaves after a recovery, or once the lease is given up.
    Fence,
    /// Rules 1 and 4: the hosts of a group go over when all are drained, and nothing is lost by it.
    Switch,
    /// Mode sync: a write is complete only when the backup has it.
    SyncWaits,
    /// A tag says what its sender depends on, whoever reads it.
    Tag,
    /// P names nothing but what writers of the group have written.
    Outsider,
    /// Every record up to the watermark is in the cut.
    Watermark,
    /// A writer's times grow, across restarts.
    HlcGrows,
    /// The guest reads what it wrote.
    ReadOwnWrites,
    /// A guest's request is taken as it was sent, and replied to once and when it is done.
    Tap,
    /// A group that degrades says so until C covers what has left, and a recovery knows of it.
    Degraded,
    /// Rule 8: a group degrades no oftener than is stated.
    Steady,
    /// Rule 8: after the faults, lag returns to zero and everything is protected again.
    ComesBack,
    /// Rule 8: what is under way goes on beside whatever guests write.
    GoesOn,
    /// Rule 6: replication that has stopped without a word is missed in time, and only then.
    Silence,
    /// Rule 6: a member is not called replicating before the backup has a whole copy.
    NoFalseSync,
    /// Rules 6 and 8: when nothing is under way, both sites hold the same.
    SitesEqual,
    /// Rule 9: a group can be opened after any crash, and a recovered one keeps what its guest
    /// made durable.
    OpensAgain,
    /// Rule 8: what a stream that is whole still has, also on disk after a kill, is never compared.
    NothingCompared,
    /// Rules 6 and 9: where the sites may come to differ, the activity log on stable storage says so.
    InMap,
    /// Rule 6: a verification tells of all that differs, and of nothing else.
    VerifyTruthful,
    /// A group is made of disks that are there.
    Seed,
    /// Rule 10: every queue keeps within its limit.
    Bounded,
    /// Rule 5: the state at a time equals a replay of its own up to there, whenever it is asked for.
    Past,
    /// Both ends of the link understand each other.
    Stream,
    /// Production code has panicked.
    Panic,
}

impl Checker {
    /// All of them.
    pub const ALL: [Checker; 38] = [
        Checker::PublishBeforeComplete,
        Checker::OutputCommit,
        Checker::ToldRows,
        Checker::Prefix,
        Checker::Closed,
        Checker::Overlap,
        Checker::CopyIsCurrent,
        Checker::AckContiguous,
        Checker::AckDurable,
        Checker::OneEpoch,
        Checker::Ordered,
        Checker::Marks,
        Checker::Lease,
        Checker::Fence,
        Checker::Switch,
        Checker::SyncWaits,
        Checker::Tag,
        Checker::Outsider,
        Checker::Watermark,
        Checker::HlcGrows,
        Checker::ReadOwnWrites,
        Checker::Tap,
        Checker::Degraded,
        Checker::Steady,
        Checker::ComesBack,
        Checker::GoesOn,
        Checker::Silence,
        Checker::NoFalseSync,
        Checker::SitesEqual,
        Checker::OpensAgain,
        Checker::NothingCompared,
        Checker::InMap,
        Checker::VerifyTruthful,
        Checker::Seed,
        Checker::Bounded,
        Checker::Past,
        Checker::Stream,
        Checker::Panic,
    ];

    /// The one of this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|checker| checker.name() == name)
    }

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Checker::PublishBeforeComplete => "publish-before-complete",
            Checker::OutputCommit => "output-commit",
            Checker::ToldRows => "told-rows",
            Checker::Prefix => "prefix",
            Checker::Closed => "closed",
            Checker::Overlap => "overlap",
            Checker::CopyIsCurrent => "copy-is-current",
            Checker::AckContiguous => "ack-contiguous",
            Checker::AckDurable => "ack-durable",
            Checker::OneEpoch => "one-epoch",
            Checker::Ordered => "ordered",
            Checker::Marks => "marks",
            Checker::Lease => "lease",
            Checker::Fence => "fence",
            Checker::Switch => "switch",
            Checker::SyncWaits => "sync-waits",
            Checker::Tag => "tag",
            Checker::Outsider => "outsider",
            Checker::Watermark => "watermark",
            Checker::HlcGrows => "hlc-grows",
            Checker::ReadOwnWrites => "read-own-writes",
            Checker::Tap => "tap",
            Checker::Degraded => "degraded",
            Checker::Steady => "steady",
            Checker::ComesBack => "comes-back",
            Checker::GoesOn => "goes-on",
            Checker::Silence => "silence",
            Checker::NoFalseSync => "no-false-sync",
            Checker::SitesEqual => "sites-equal",
            Checker::OpensAgain => "opens-again",
            Checker::NothingCompared => "nothing-compared",
            Checker::InMap => "in-map",
            Checker::VerifyTruthful => "verify-truthful",
            Checker::Seed => "seed",
            Checker::Bounded => "bounded",
            Checker::Past => "past",
            Checker::Stream => "stream",
            Checker::Panic => "panic",
        }
    }
}

impl fmt::Display for Checker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A rule was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Who noticed.
    pub checker: Checker,
    /// What.
    pub what: String,
}

/// What every step returns.
pub type Checked<T = ()> = Result<T, Failure>;

/// Fails.
pub fn fail<T>(checker: Checker, what: impl Into<String>) -> Checked<T> {
    Err(Failure { checker, what: what.into() })
}

thread_local! {
    static BLIND: Cell<Option<Checker>> = const { Cell::new(None) };
}

/// Lets one checker look away in this thread.
pub fn look_away(checker: Option<Checker>) {
    BLIND.set(checker);
}

/// Fails unless it holds.
pub fn check(holds: bool, checker: Checker, what: impl FnOnce() -> String) -> Checked {
    if holds || BLIND.get() == Some(checker) { Ok(()) } else { fail(checker, what()) }
}
