//! Known faults, to show that the simulator's checkers find them. Without the feature
//! `planted-bugs` nothing here can be switched on, and the compiler removes it.

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Breaks rule 9: acknowledges what was written and not synced.
    AckBeforeDurable,
    /// Breaks rule 3: takes a record that is not the next one.
    AckOverGap,
    /// Breaks rule 2: the cut is what is durable for each writer by itself.
    CutOfEachMaximum,
    /// Breaks rule 1: the watermark does not wait for a writer that has nothing beyond the cut.
    WatermarkIgnoresIdle,
    /// Breaks rule 8: a writer that was taken out holds the watermark back.
    RemovedHoldsWatermark,
    /// Breaks rule 2: a writer that was added is recovered before its disks are whole.
    NewcomerNotWaitedFor,
    /// Breaks rule 4: goes on taking records of an epoch that has ended.
    OldEpochAccepted,
    /// Breaks rule 8: what an older connection has left takes a member from the newer one of the same run.
    OlderConnectionWins,
    /// Breaks rule 1: a host believes that its policy is kept, and it is not.
    PolicyForgotten,
    /// Breaks rule 1: who attaches while others are in mode async is not told.
    NewcomerNotTold,
    /// Breaks rule 6: a host is told that what was seeded is its disks.
    SeededIsWhole,
    /// Breaks rule 6: what is compared by digests is what was folded.
    DigestOfImage,
    /// Breaks rule 6: a copy counts as whole although a disk has grown.
    GrownIsWhole,
    /// Breaks rule 5: a view of the past takes a record after its time.
    ViewAfterItsTime,
    /// Breaks rule 2: of each writer a view of the past has what that wrote up to then by its own clock.
    TimesAlone,
    /// Breaks rule 5: a replay begins at a place before which not everything is in the answer.
    WaypointTooEarly,
    /// Breaks rule 5: a fold goes on beyond the window and what is held.
    FoldPassesTheWindow,
    /// Breaks rule 5: the time before which nothing can be asked for is forgotten in a fold.
    OldestForgotten,
    /// Breaks rule 5: of what overlaps, a merged map has the oldest.
    MapOlderWins,
    /// Breaks rule 2: a map has records that a recovery has left out.
    MapKeepsVoid,
    /// Breaks rule 5: a fold forgets that what it could not write is damaged.
    DamageFoldedAsGood,
    /// Breaks rule 5: an image is shown as the disk reads it.
    ImageNotVerified,
    /// Breaks rule 5: the sum of a sector that a fold changes in part is not taken back before.
    SumKeptInPart,
    /// Breaks rule 5: a point is not told to be affected by damage that was folded.
    DamageNotListed,
    /// Breaks rules 3 and 9: a segment's own file goes before the compressed one is durable.
    ColdNotSynced,
}

#[cfg(feature = "planted-bugs")]
mod switch {
    use super::Bug;
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Plants a fault for what this thread runs; `None` takes it out.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
    }

    pub(crate) fn is(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }
}

#[cfg(not(feature = "planted-bugs"))]
mod switch {
    pub(crate) fn is(_bug: super::Bug) -> bool {
        false
    }
}

pub(crate) use switch::is;
#[cfg(feature = "planted-bugs")]
pub use switch::plant;
