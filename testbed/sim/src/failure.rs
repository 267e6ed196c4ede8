//! What the checkers find. Each has a name that reports and tests use, and the rule of DESIGN 3
//! that it watches over.

use std::cell::Cell;
use std::fmt;

/// Defines the checkers, by the name that reports and tests use.
macro_rules! checkers {
    ($($(#[$doc:meta])* $checker:ident => $name:literal,)*) => {
        /// A checker.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Checker {
            $($(#[$doc])* $checker,)*
        }

        impl Checker {
            /// All of them.
            pub const ALL: &[Checker] = &[$(Checker::$checker),*];

            /// Its name in reports.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Checker::$checker => $name,)*
                }
            }
        }
    };
}

checkers! {
    /// Rule 1: P names a write before it is completed.
    PublishBeforeComplete => "publish-before-complete",
    /// Rule 1: what a released packet depends on is committed.
    OutputCommit => "output-commit",
    /// Rule 1: rows that a client was told of are in the recovered disks, byte by byte.
    ToldRows => "told-rows",
    /// Rule 2: recovered disks equal the initial state and a prefix of the writes, byte by byte.
    Prefix => "prefix",
    /// Rule 2: what a record of one writer depends on of another is recovered with it.
    Closed => "closed",
    /// Rule 2: overlapping operations are not in flight together.
    Overlap => "overlap",
    /// Rule 2: a copy is what the disk holds, never older.
    CopyIsCurrent => "copy-is-current",
    /// Rule 3: an acknowledgement never goes beyond what arrived without a gap.
    AckContiguous => "ack-contiguous",
    /// Rules 3 and 9: what was acknowledged is there after the worst crash.
    AckDurable => "ack-durable",
    /// Rule 4: after a recovery the backup takes nothing of the old primary.
    OneEpoch => "one-epoch",
    /// Rule 4: a group is recovered only while the operator who has ordered it waits for that.
    Ordered => "ordered",
    /// Rules 5 and 6: bookmarks and pins on record are there until they are taken out, and show what they showed.
    Marks => "marks",
    /// Rule 4: no packet leaves without a lease.
    Lease => "lease",
    /// Rule 4: no packet leaves after a recovery, or once the lease is given up.
    Fence => "fence",
    /// Rules 1 and 4: the hosts of a group go over when all are drained, and nothing is lost by it.
    Switch => "switch",
    /// Mode sync: a write is complete only when the backup has it.
    SyncWaits => "sync-waits",
    /// A tag says what its sender depends on, whoever reads it.
    Tag => "tag",
    /// P names nothing but what writers of the group have written.
    Outsider => "outsider",
    /// Every record up to the watermark is in the cut.
    Watermark => "watermark",
    /// A writer's times grow, across restarts.
    HlcGrows => "hlc-grows",
    /// The guest reads what it wrote.
    ReadOwnWrites => "read-own-writes",
    /// A guest's request is taken as it was sent, and replied to once and when it is done.
    Tap => "tap",
    /// A group that degrades says so until C covers what has left, and a recovery knows of it.
    Degraded => "degraded",
    /// Rule 8: a group degrades no oftener than is stated.
    Steady => "steady",
    /// Rule 8: after the faults, lag returns to zero and everything is protected again.
    ComesBack => "comes-back",
    /// Rule 8: what is under way goes on beside whatever guests write.
    GoesOn => "goes-on",
    /// Rule 6: replication that has stopped without a word is missed in time, and only then.
    Silence => "silence",
    /// Rule 6: a member is not called replicating before the backup has a whole copy.
    NoFalseSync => "no-false-sync",
    /// Rules 6 and 8: when nothing is under way, both sites hold the same.
    SitesEqual => "sites-equal",
    /// Rule 9: a group can be opened after any crash, and a recovered one keeps what its guest
    /// made durable.
    OpensAgain => "opens-again",
    /// Rules 6 and 8: a daemon that is asked to end does so with everything at the backup.
    EndsCleanly => "ends-cleanly",
    /// Rule 8: what a stream that is whole still has, also on disk after a kill, is never compared.
    NothingCompared => "nothing-compared",
    /// Rules 6 and 9: where the sites may come to differ, the activity log on stable storage says so.
    InMap => "in-map",
    /// Rule 6: a verification tells of all that differs, and of nothing else.
    VerifyTruthful => "verify-truthful",
    /// A group is made of disks that are there.
    Seed => "seed",
    /// Rule 10: every queue keeps within its limit.
    Bounded => "bounded",
    /// Rule 5: the state at a time equals a replay of its own up to there, whenever it is asked for.
    Past => "past",
    /// Both ends of the link understand each other.
    Stream => "stream",
    /// Rule 13: the log of a shard at the backup is what the primary has committed, in its order.
    ShardLog => "shard-log",
    /// Rule 13: what may be applied at the backup is a prefix of what clients know; a recovery is at one cut.
    ShardPrefix => "shard-prefix",
    /// Rule 8: the shards of a store catch up, or are all recovered.
    ShardsComeBack => "shards-come-back",
    /// Production code has panicked.
    Panic => "panic",
}

impl Checker {
    /// The one of this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|checker| checker.name() == name)
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
