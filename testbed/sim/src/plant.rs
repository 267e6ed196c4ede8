//! Bugs that are planted on purpose, to show that the checkers bite.

use tidelock_native::Planted;
use tidelock_planted::Bug;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// A bug in production's code.
    Production(Bug),
    /// A bug in a copy of the kernel programs' text.
    Programs(Planted),
    /// A bug in the simulator's own code between production's parts.
    OnTheWay(OnTheWay),
}

/// Bugs of the glue between production's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTheWay {
    /// A write is begun on the local disk before the backlog on disk has its record.
    WrittenBeforeKept,
}

/// All of them, by name.
pub const PLANTS: [(&str, Plant); 78] = [
    ("ack-before-durable", Plant::Production(Bug::AckBeforeDurable)),
    ("ack-over-gap", Plant::Production(Bug::AckOverGap)),
    ("old-epoch-accepted", Plant::Production(Bug::OldEpochAccepted)),
    ("publish-after-completion", Plant::Production(Bug::PublishAfterCompletion)),
    ("overlap-not-ordered", Plant::Production(Bug::OverlapNotOrdered)),
    ("unbounded-backlog", Plant::Production(Bug::UnboundedBacklog)),
    ("ceiling-passed", Plant::Production(Bug::CeilingPassed)),
    ("replied-before-written", Plant::Production(Bug::RepliedBeforeWritten)),
    ("fua-forgotten", Plant::Production(Bug::FuaForgotten)),
    ("room-forgotten", Plant::Production(Bug::RoomForgotten)),
    ("activity-forgotten", Plant::Production(Bug::ActivityForgotten)),
    ("activity-late", Plant::Production(Bug::ActivityLate)),
    ("activity-unflushed", Plant::Production(Bug::ActivityUnflushed)),
    ("any-entry-covers", Plant::Production(Bug::AnyEntryCovers)),
    ("first-entry-only", Plant::Production(Bug::FirstEntryOnly)),
    ("one-too-early", Plant::Production(Bug::OneTooEarly)),
    ("sum-covers", Plant::Production(Bug::SumCovers)),
    ("lease-ignored", Plant::Production(Bug::LeaseIgnored)),
    ("fence-ignored-in-async", Plant::Production(Bug::FenceIgnoredInAsync)),
    ("cut-of-each-maximum", Plant::Production(Bug::CutOfEachMaximum)),
    ("watermark-ignores-idle", Plant::Production(Bug::WatermarkIgnoresIdle)),
    ("removed-holds-watermark", Plant::Production(Bug::RemovedHoldsWatermark)),
    ("newcomer-not-waited-for", Plant::Production(Bug::NewcomerNotWaitedFor)),
    ("seeded-is-whole", Plant::Production(Bug::SeededIsWhole)),
    ("grown-is-whole", Plant::Production(Bug::GrownIsWhole)),
    ("view-after-its-time", Plant::Production(Bug::ViewAfterItsTime)),
    ("times-alone", Plant::Production(Bug::TimesAlone)),
    ("waypoint-too-early", Plant::Production(Bug::WaypointTooEarly)),
    ("fold-passes-the-window", Plant::Production(Bug::FoldPassesTheWindow)),
    ("oldest-forgotten", Plant::Production(Bug::OldestForgotten)),
    ("pins-not-held", Plant::Production(Bug::PinsNotHeld)),
    ("map-older-wins", Plant::Production(Bug::MapOlderWins)),
    ("map-keeps-void", Plant::Production(Bug::MapKeepsVoid)),
    ("image-not-verified", Plant::Production(Bug::ImageNotVerified)),
    ("damage-folded-as-good", Plant::Production(Bug::DamageFoldedAsGood)),
    ("damage-not-listed", Plant::Production(Bug::DamageNotListed)),
    ("ordered-by-time", Plant::Production(Bug::OrderedByTime)),
    ("last-extent-forgotten", Plant::Production(Bug::LastExtentForgotten)),
    ("cold-not-synced", Plant::Production(Bug::ColdNotSynced)),
    ("grace-cut-short", Plant::Production(Bug::GraceCutShort)),
    ("deadline-forgotten", Plant::Production(Bug::DeadlineForgotten)),
    ("recovered-for-nobody", Plant::Production(Bug::RecoveredForNobody)),
    ("certificate-ignored", Plant::Production(Bug::CertificateIgnored)),
    ("unattached-is-heard", Plant::Production(Bug::UnattachedIsHeard)),
    ("full-group-is-read", Plant::Production(Bug::FullGroupIsRead)),
    ("end-not-told", Plant::Production(Bug::EndNotTold)),
    ("older-connection-wins", Plant::Production(Bug::OlderConnectionWins)),
    ("policy-forgotten", Plant::Production(Bug::PolicyForgotten)),
    ("newcomer-not-told", Plant::Production(Bug::NewcomerNotTold)),
    ("over-before-covered", Plant::Production(Bug::OverBeforeCovered)),
    ("no-calm", Plant::Production(Bug::NoCalm)),
    ("only-when-idle", Plant::Production(Bug::OnlyWhenIdle)),
    ("difference-ignored", Plant::Production(Bug::DifferenceIgnored)),
    ("epoch-not-durable", Plant::Production(Bug::EpochNotDurable)),
    ("difference-forgotten", Plant::Production(Bug::DifferenceForgotten)),
    ("digest-of-image", Plant::Production(Bug::DigestOfImage)),
    ("copies-starve", Plant::Production(Bug::CopiesStarve)),
    ("admitted-is-back", Plant::Production(Bug::AdmittedIsBack)),
    ("queue-is-silence", Plant::Production(Bug::QueueIsSilence)),
    ("unrecorded-unmapped", Plant::Production(Bug::UnrecordedUnmapped)),
    ("redone-backwards", Plant::Production(Bug::RedoneBackwards)),
    ("torn-tail-kept", Plant::Production(Bug::TornTailKept)),
    ("written-before-kept", Plant::OnTheWay(OnTheWay::WrittenBeforeKept)),
    ("boot-ignored", Plant::Production(Bug::BootIgnored)),
    ("unrecorded-unnamed", Plant::Production(Bug::UnrecordedUnnamed)),
    ("merge-forgotten", Plant::Programs(Planted::MergeForgotten)),
    ("last-entry-forgotten", Plant::Programs(Planted::LastEntryForgotten)),
    ("handing-over-forgotten", Plant::Programs(Planted::HandingOverForgotten)),
    ("strip-before-merge", Plant::Programs(Planted::StripBeforeMerge)),
    ("outsider-merged", Plant::Programs(Planted::OutsiderMerged)),
    ("hlc-goes-back", Plant::Production(Bug::HlcGoesBack)),
    ("rebuilt-next-to-pending", Plant::Programs(Planted::RebuiltNextToPending)),
    ("wrap-forgotten", Plant::Programs(Planted::WrapForgotten)),
    ("floor-not-awaited", Plant::Production(Bug::FloorNotAwaited)),
    ("given-up-before-shut", Plant::Production(Bug::GivenUpBeforeShut)),
    ("switch-forgotten", Plant::Production(Bug::SwitchForgotten)),
    ("async-before-contact", Plant::Production(Bug::AsyncBeforeContact)),
    ("others-not-awaited", Plant::Production(Bug::OthersNotAwaited)),
];

impl Plant {
    /// The bug of this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        PLANTS.iter().find(|(n, _)| *n == name).map(|(_, plant)| *plant)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        PLANTS.iter().find(|(_, plant)| *plant == self).expect("all are listed").0
    }
}

/// Plants a bug of production's code for what this thread runs; anything else takes it out.
pub fn in_this_thread(plant: Option<Plant>) {
    tidelock_planted::plant(match plant {
        Some(Plant::Production(bug)) => Some(bug),
        Some(Plant::Programs(_) | Plant::OnTheWay(_)) | None => None,
    });
}
