//! Bugs that are planted on purpose, to show that the checkers bite.

use tidelock_backup_server::planted::Bug;
use tidelock_daemon::owner::{contact, copying};
use tidelock_daemon::{activity, backlog, degrade, handover, heartbeat, sequencer};
use tidelock_netfilter::release_queue;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// In the sequencer.
    Sequencer(sequencer::PlantedBug),
    /// In the activity log.
    Activity(activity::PlantedBug),
    /// In the backlog on disk.
    Backlog(backlog::PlantedBug),
    /// In what decides which copies go on.
    Copying(copying::PlantedBug),
    /// In what serves guests before the backup was reached.
    Contact(contact::PlantedBug),
    /// In the watch over heartbeats.
    Heartbeat(heartbeat::PlantedBug),
    /// In what decides when a group goes on without the backup.
    Degrade(degrade::PlantedBug),
    /// In what a host does in a planned switch.
    Handover(handover::PlantedBug),
    /// In the gate's release queue.
    Gate(release_queue::PlantedBug),
    /// In the backup.
    Backup(Bug),
    /// In what the simulator does in the place of kernel programs and of the daemon's start.
    OnTheWay(OnTheWay),
}

/// Bugs of the glue between production's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTheWay {
    /// A tag is read and not merged.
    MergeForgotten,
    /// A packet goes to a member on the same host, whose P stays as it was.
    HandingOverForgotten,
    /// A tag is taken away before anybody has read it.
    StripBeforeMerge,
    /// A packet gets no tag as soon as C has its sender's own writes.
    OwnEntryCovers,
    /// A stranger's tag is merged.
    OutsiderMerged,
    /// A daemon starts its clock anew.
    HlcGoesBack,
    /// The upper half of a tag's entries is rebuilt next to P, which may know nothing of a writer.
    RebuiltNextToPending,
    /// There is no upper half.
    WrapForgotten,
    /// Nobody waits until it is known what a guest has heard.
    FloorNotAwaited,
    /// A lease is given up, and the gate stays open until it ends.
    GivenUpBeforeShut,
    /// A write is begun on the local disk before the backlog on disk has its record.
    WrittenBeforeKept,
    /// Nobody looks which boot of the host a backlog on disk is of.
    BootIgnored,
    /// Members are told of writes without a record, and P does not say so.
    UnrecordedUnnamed,
    /// A daemon that starts does not look whether its group was switched over.
    SwitchForgotten,
    /// A daemon that starts does not look what the last verification has found.
    DifferenceForgotten,
    /// Mode async is in force although the backup counts the writer as gone.
    AsyncBeforeContact,
}

/// All of them, by name.
pub const PLANTS: [(&str, Plant); 65] = [
    ("ack-before-durable", Plant::Backup(Bug::AckBeforeDurable)),
    ("ack-over-gap", Plant::Backup(Bug::AckOverGap)),
    ("old-epoch-accepted", Plant::Backup(Bug::OldEpochAccepted)),
    ("publish-after-completion", Plant::Sequencer(sequencer::PlantedBug::PublishAfterCompletion)),
    ("overlap-not-ordered", Plant::Sequencer(sequencer::PlantedBug::OverlapNotOrdered)),
    ("unbounded-backlog", Plant::Sequencer(sequencer::PlantedBug::UnboundedBacklog)),
    ("ceiling-passed", Plant::Sequencer(sequencer::PlantedBug::CeilingPassed)),
    ("activity-forgotten", Plant::Activity(activity::PlantedBug::Forgotten)),
    ("activity-late", Plant::Activity(activity::PlantedBug::Late)),
    ("activity-unflushed", Plant::Activity(activity::PlantedBug::Unflushed)),
    ("any-entry-covers", Plant::Gate(release_queue::PlantedBug::AnyEntryCovers)),
    ("first-entry-only", Plant::Gate(release_queue::PlantedBug::FirstEntryOnly)),
    ("one-too-early", Plant::Gate(release_queue::PlantedBug::OneTooEarly)),
    ("sum-covers", Plant::Gate(release_queue::PlantedBug::SumCovers)),
    ("lease-ignored", Plant::Gate(release_queue::PlantedBug::LeaseIgnored)),
    ("fence-ignored-in-async", Plant::Gate(release_queue::PlantedBug::FenceIgnoredInAsync)),
    ("cut-of-each-maximum", Plant::Backup(Bug::CutOfEachMaximum)),
    ("watermark-ignores-idle", Plant::Backup(Bug::WatermarkIgnoresIdle)),
    ("removed-holds-watermark", Plant::Backup(Bug::RemovedHoldsWatermark)),
    ("newcomer-not-waited-for", Plant::Backup(Bug::NewcomerNotWaitedFor)),
    ("seeded-is-whole", Plant::Backup(Bug::SeededIsWhole)),
    ("grown-is-whole", Plant::Backup(Bug::GrownIsWhole)),
    ("view-after-its-time", Plant::Backup(Bug::ViewAfterItsTime)),
    ("times-alone", Plant::Backup(Bug::TimesAlone)),
    ("waypoint-too-early", Plant::Backup(Bug::WaypointTooEarly)),
    ("fold-passes-the-window", Plant::Backup(Bug::FoldPassesTheWindow)),
    ("oldest-forgotten", Plant::Backup(Bug::OldestForgotten)),
    ("map-older-wins", Plant::Backup(Bug::MapOlderWins)),
    ("map-keeps-void", Plant::Backup(Bug::MapKeepsVoid)),
    ("image-not-verified", Plant::Backup(Bug::ImageNotVerified)),
    ("sum-kept-in-part", Plant::Backup(Bug::SumKeptInPart)),
    ("damage-folded-as-good", Plant::Backup(Bug::DamageFoldedAsGood)),
    ("damage-not-listed", Plant::Backup(Bug::DamageNotListed)),
    ("cold-not-synced", Plant::Backup(Bug::ColdNotSynced)),
    ("older-connection-wins", Plant::Backup(Bug::OlderConnectionWins)),
    ("policy-forgotten", Plant::Backup(Bug::PolicyForgotten)),
    ("newcomer-not-told", Plant::Backup(Bug::NewcomerNotTold)),
    ("over-before-covered", Plant::Degrade(degrade::PlantedBug::OverBeforeCovered)),
    ("no-calm", Plant::Degrade(degrade::PlantedBug::NoCalm)),
    ("only-when-idle", Plant::Degrade(degrade::PlantedBug::OnlyWhenIdle)),
    ("difference-ignored", Plant::Copying(copying::PlantedBug::DifferenceIgnored)),
    ("difference-forgotten", Plant::OnTheWay(OnTheWay::DifferenceForgotten)),
    ("digest-of-image", Plant::Backup(Bug::DigestOfImage)),
    ("copies-starve", Plant::Copying(copying::PlantedBug::Starved)),
    ("admitted-is-back", Plant::Heartbeat(heartbeat::PlantedBug::AdmittedIsBack)),
    ("queue-is-silence", Plant::Heartbeat(heartbeat::PlantedBug::QueueIsSilence)),
    ("unrecorded-unmapped", Plant::Contact(contact::PlantedBug::Unmapped)),
    ("redone-backwards", Plant::Backlog(backlog::PlantedBug::RedoneBackwards)),
    ("torn-tail-kept", Plant::Backlog(backlog::PlantedBug::TailKept)),
    ("written-before-kept", Plant::OnTheWay(OnTheWay::WrittenBeforeKept)),
    ("boot-ignored", Plant::OnTheWay(OnTheWay::BootIgnored)),
    ("unrecorded-unnamed", Plant::OnTheWay(OnTheWay::UnrecordedUnnamed)),
    ("merge-forgotten", Plant::OnTheWay(OnTheWay::MergeForgotten)),
    ("own-entry-covers", Plant::OnTheWay(OnTheWay::OwnEntryCovers)),
    ("handing-over-forgotten", Plant::OnTheWay(OnTheWay::HandingOverForgotten)),
    ("strip-before-merge", Plant::OnTheWay(OnTheWay::StripBeforeMerge)),
    ("outsider-merged", Plant::OnTheWay(OnTheWay::OutsiderMerged)),
    ("hlc-goes-back", Plant::OnTheWay(OnTheWay::HlcGoesBack)),
    ("rebuilt-next-to-pending", Plant::OnTheWay(OnTheWay::RebuiltNextToPending)),
    ("wrap-forgotten", Plant::OnTheWay(OnTheWay::WrapForgotten)),
    ("floor-not-awaited", Plant::OnTheWay(OnTheWay::FloorNotAwaited)),
    ("given-up-before-shut", Plant::OnTheWay(OnTheWay::GivenUpBeforeShut)),
    ("switch-forgotten", Plant::OnTheWay(OnTheWay::SwitchForgotten)),
    ("async-before-contact", Plant::OnTheWay(OnTheWay::AsyncBeforeContact)),
    ("others-not-awaited", Plant::Handover(handover::PlantedBug::OthersNotAwaited)),
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

/// Plants what is not planted in an object but in a thread.
pub fn in_this_thread(plant: Option<Plant>) {
    tidelock_backup_server::planted::plant(match plant {
        Some(Plant::Backup(bug)) => Some(bug),
        _ => None,
    });
}
