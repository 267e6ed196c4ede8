//! Known faults in production's code, to show that the simulator's checkers find them.
//!
//! Production asks [`is`] at the place where a fault would be. Without the feature `planted-bugs`, which only the simulator
//! switches on, the answer is the constant `false`, and the compiler removes the fault. With it the answer is the one fault
//! that was planted in the calling thread, so runs in several threads can have different faults.
#![forbid(unsafe_code)]

/// Defines the faults.
macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident,)*) => {
        /// A fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Bug {
            $($(#[$doc])* $bug,)*
        }

        impl Bug {
            /// All of them.
            pub const ALL: &[Bug] = &[$(Bug::$bug),*];
        }
    };
}

bugs! {
    // Sequencer.
    /// Breaks rule 1: P is published after the completion instead of before it.
    PublishAfterCompletion,
    /// Breaks rule 2: overlapping writes are in flight together.
    OverlapNotOrdered,
    /// Breaks rule 10: the backlog limit is ignored.
    UnboundedBacklog,
    /// A time from another host's clock is adopted even above the ceiling on record, so times may fall after a restart.
    CeilingPassed,

    // NBD tap and its driver.
    /// Breaks the promise of a completion: a write is replied to when it is taken.
    RepliedBeforeWritten,
    /// Breaks the promise of FUA: a local write is not durable when it ends.
    FuaForgotten,
    /// Breaks rule 8: a connection that was full is not read again.
    RoomForgotten,

    // Activity log.
    /// Breaks rule 6: an extent leaves the map before the backup has what was written in it.
    ActivityForgotten,
    /// Breaks rules 6 and 9: a request is admitted before the log has its extents.
    ActivityLate,
    /// Breaks rules 6 and 9: an extent leaves the map although the local disk was not flushed.
    ActivityUnflushed,

    // Backlog on disk.
    /// Breaks rule 9: a start does not look which boot of the host a backlog is of.
    BootIgnored,
    /// Breaks rule 9: the writes that may not have ended are done again from the last record to the first.
    RedoneBackwards,
    /// Breaks rule 8: the torn end of the backlog that a killed daemon has left is not cut off.
    TornTailKept,

    // State on the host's disk.
    /// Breaks rules 8 and 9: a granted epoch, and the run in force, are acted on before they are durable.
    EpochNotDurable,
    /// Breaks rule 9: a start begins its times anew.
    HlcGoesBack,
    /// Breaks rule 4: a start does not look whether its group was switched over.
    SwitchForgotten,
    /// Breaks rule 6: a start does not look what the last verification has found.
    DifferenceForgotten,

    // End.
    /// Breaks rule 6: a daemon that is asked to end does so although the backup does not have everything.
    EndsUnsettled,

    // Copies and verification.
    /// Breaks rule 8: copies wait as long as guests' writes do, also the only one.
    CopiesStarve,
    /// Breaks rule 6: a verification takes what differs for equal.
    DifferenceIgnored,

    // Starts without the backup.
    /// Breaks rule 1: members are told of writes without a record, and P does not say so.
    UnrecordedUnnamed,
    /// Breaks rules 6 and 9: an extent that was written without a record may leave the map before it was compared.
    UnrecordedUnmapped,

    // Heartbeats.
    /// Breaks rule 6: a heartbeat counts as back when the owner loop has admitted it.
    AdmittedIsBack,
    /// Breaks rule 6: a heartbeat is missed by its own age, also while acknowledgements go on rising.
    QueueIsSilence,

    // Groups that go on without the backup.
    /// Breaks rule 1: mode async is in force although the backup counts the writer as gone.
    AsyncBeforeContact,
    /// Breaks rule 6: a group is no longer degraded as soon as the gate holds again.
    OverBeforeCovered,
    /// Breaks rule 8: no calm is needed for a return, whatever the lag is.
    NoCalm,
    /// Breaks rule 8: the lag is small only when nothing is under way.
    OnlyWhenIdle,

    // Status.
    /// Breaks rule 6: the gap of a writer is not in its group's risk.
    StatusForgetsGap,

    // Planned switch.
    /// Breaks rules 1 and 4: a host that is drained does not wait for the others.
    OthersNotAwaited,
    /// Breaks rule 4: a lease is given up, and the gate stays open until it ends.
    GivenUpBeforeShut,

    // Gate.
    /// Breaks rule 1: releases when any one entry of the stamp is covered.
    AnyEntryCovers,
    /// Breaks rule 1: looks at the stamp's first entry only.
    FirstEntryOnly,
    /// Breaks rule 1: releases one write too early.
    OneTooEarly,
    /// Breaks rule 1: compares the sums of the entries.
    SumCovers,
    /// Breaks rule 4: never looks at the lease.
    LeaseIgnored,
    /// Breaks rule 4: lets a fenced gate open in mode async.
    FenceIgnoredInAsync,
    /// Breaks rule 1: nobody waits until it is known what a guest has heard.
    FloorNotAwaited,

    // Backup.
    /// Breaks rule 9: takes for durable what was written and not synced, and waits for nothing.
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
    /// Breaks rule 4: a recovery does not wait for the end of the old primary's lease.
    GraceCutShort,
    /// Breaks rule 8: a recovery that waits is not looked at when its deadline has come.
    DeadlineForgotten,
    /// Breaks rule 4: a recovery that waits goes ahead although whoever has asked for it is gone.
    RecoveredForNobody,
    /// Breaks rules 4 and 11: a peer speaks for any host, whatever its certificate says.
    CertificateIgnored,
    /// Breaks rules 3 and 11: records are taken from connections that have no member attached, or not any more.
    UnattachedIsHeard,
    /// Breaks rule 10: a connection is read although its group has no room.
    FullGroupIsRead,
    /// Breaks rule 8: a group does not hear that a connection has ended.
    EndNotTold,
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
    /// Breaks rule 5: pins on record do not hold their points when a group was opened again.
    PinsNotHeld,
    /// Breaks rule 5: of what overlaps, a merged map has the oldest.
    MapOlderWins,
    /// Breaks rule 2: a map has records that a recovery has left out.
    MapKeepsVoid,
    /// Breaks rule 5: a fold forgets that what it could not write is damaged.
    DamageFoldedAsGood,
    /// Breaks rule 5: an image is shown as the disk reads it.
    ImageNotVerified,
    /// Breaks rule 5: a point is not told to be affected by damage that was folded.
    DamageNotListed,
    /// Breaks rule 5: two points of several writers are put in the order of their times.
    OrderedByTime,
    /// Breaks rule 5: an increment is without its last extent.
    LastExtentForgotten,
    /// Breaks rules 3 and 9: a segment's own file goes before the compressed one is durable.
    ColdNotSynced,

    // Shard logs.
    /// Breaks rule 13: entries are sent before the primary shard has committed them.
    SentBeforeCommitted,
    /// Breaks rule 13: the stamps that the store has given are sent as they are.
    StampsNotMonotone,
    /// Breaks rules 3 and 13: entries are taken although some before them are missing.
    ShardLogWithGap,
    /// Breaks rule 13: a shard applies what is durable, and does not wait for the watermark.
    AppliedBeforeWatermark,
    /// Breaks rule 13: what the backup has received, and not committed, counts for the watermark.
    AppliedBeforeCommitted,
    /// Breaks rule 13: a shard that has not reported does not hold the watermark back.
    SilentShardIgnored,
    /// Breaks rule 13: a watermark that is behind the last one is obeyed.
    WatermarkFalls,
    /// Breaks rules 4 and 13: the final round ends when one shard has not taken part.
    FinalRoundForgetsShard,
    /// Breaks rule 4: entries of the old primary are taken after a recovery has begun.
    ShardNotFenced,
    /// Breaks rule 8: idle shards append nothing.
    NoNops,
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

    /// True while this fault is planted in this thread.
    #[must_use]
    pub fn is(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }
}

#[cfg(not(feature = "planted-bugs"))]
mod switch {
    /// Always false: no fault can be planted in this build.
    #[inline(always)]
    #[must_use]
    pub fn is(_bug: super::Bug) -> bool {
        false
    }
}

pub use switch::is;
#[cfg(feature = "planted-bugs")]
pub use switch::plant;

#[cfg(all(test, feature = "planted-bugs"))]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_planted_in_one_thread() {
        plant(Some(Bug::NoCalm));
        assert!(is(Bug::NoCalm) && !is(Bug::OnlyWhenIdle));
        std::thread::scope(|scope| scope.spawn(|| assert!(!is(Bug::NoCalm))).join()).unwrap();
        plant(None);
        assert!(!is(Bug::NoCalm));
    }
}
