//! The risk of a group, on two axes: what a disaster now would undo, and who may have been told of it. And why: a
//! kind out of seven, and a sentence. Facts of the loops in, a [`Risk`] out.
//!
//! | a disaster would undo | while |
//! |---|---|
//! | nothing | every writer is attached, without a gap, and has all acknowledged |
//! | the lag | the stream is whole, and so much of it is not acknowledged |
//! | everything since T | there is a [`Gap`](crate::owner::Gap): the backup stands at its last whole state |
//! | everything | the backup has no whole state yet |
//!
//! | kind | meaning |
//! |---|---|
//! | following | the backup follows |
//! | copying | a first copy or a comparison is to close a gap |
//! | unrecorded | a gap is open, and guests widen it: they are served without records |
//! | differs | a verification has found the sites to differ |
//! | disconnected | the backup is not reached |
//! | stalled | the backup is reached and does not acknowledge |
//! | fenced | this host's epoch is over |
//!
//! A group is *protected* if the backup follows and no client may have been told what a disaster would undo. Nothing is
//! remembered as "in sync" (DESIGN rule 6): all facts are of this moment but the time since when clients may have been told.

use super::LagStatus;
use crate::owner::{Gap, GapWhy, Phase};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;

/// The part of a group's past that a disaster now would undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Undoes {
    /// Nothing: the backup has everything.
    Nothing,
    /// The lag: writes on their way.
    Lag(LagStatus),
    /// Everything since a time.
    Since {
        /// The time in milliseconds since 1970; `None`: a time before this run, not known here.
        since_unix_ms: Option<u64>,
    },
    /// Everything: nothing can be recovered.
    Everything,
}

impl Undoes {
    /// The words for the four cases, from best to worst.
    pub const ALL: [&'static str; 4] = ["nothing", "lag", "since", "everything"];

    /// The word for it, as in the JSON form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Lag(_) => "lag",
            Self::Since { .. } => "since",
            Self::Everything => "everything",
        }
    }

    /// The sum for two writers together.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Everything, _) | (_, Self::Everything) => Self::Everything,
            (Self::Since { since_unix_ms: a }, Self::Since { since_unix_ms: b }) => {
                // Not to be known is to be earlier.
                Self::Since { since_unix_ms: a.min(b) }
            }
            (since @ Self::Since { .. }, _) | (_, since @ Self::Since { .. }) => since,
            (Self::Lag(a), Self::Lag(b)) => Self::Lag(LagStatus {
                writes: a.writes + b.writes,
                bytes: a.bytes + b.bytes,
                ms: a.ms.max(b.ms),
            }),
            (lag @ Self::Lag(_), Self::Nothing) | (Self::Nothing, lag @ Self::Lag(_)) => lag,
            (Self::Nothing, Self::Nothing) => Self::Nothing,
        }
    }
}

/// Clients may have been told what a disaster would undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// The time by the wall clock, in milliseconds since 1970.
    pub since_unix_ms: u64,
    /// Replies leave without being held. If not, replies are held again, and the backup does not have all that has left.
    pub leaves: bool,
}

/// The kind of reason for a group's risk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The backup follows.
    Following,
    /// A first copy or a comparison is under way.
    Copying,
    /// Guests are served without records.
    Unrecorded,
    /// A verification has found the sites to differ.
    Differs,
    /// The backup is not reached.
    Disconnected,
    /// The backup does not acknowledge.
    Stalled,
    /// The epoch of this host is over.
    Fenced,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 7] = [
        Kind::Following,
        Kind::Copying,
        Kind::Unrecorded,
        Kind::Differs,
        Kind::Disconnected,
        Kind::Stalled,
        Kind::Fenced,
    ];

    /// The word for it, as in the JSON form.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Following => "following",
            Kind::Copying => "copying",
            Kind::Unrecorded => "unrecorded",
            Kind::Differs => "differs",
            Kind::Disconnected => "disconnected",
            Kind::Stalled => "stalled",
            Kind::Fenced => "fenced",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The reason for a group's risk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// The kind of the reason.
    pub kind: Kind,
    /// In a sentence.
    pub text: Cow<'static, str>,
}

/// The risk of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Risk {
    /// The part of its past that a disaster now would undo.
    pub undoes: Undoes,
    /// Clients that may have been told of what a disaster would undo; `None`: no client was.
    pub told: Option<Told>,
    /// The reason.
    pub why: Why,
}

impl Risk {
    /// True if the backup follows, and a disaster now would undo nothing that a client was told.
    #[must_use]
    pub fn is_protected(&self) -> bool {
        self.why.kind == Kind::Following && self.told.is_none()
    }
}

/// A writer, as far as its group's risk goes by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterFacts {
    /// The owner loop's phase.
    pub phase: Phase,
    /// The gap between the sites.
    pub gap: Option<Gap>,
    /// A newer run of this host's daemon has the member.
    pub is_superseded: bool,
    /// A heartbeat has not come back.
    pub heartbeat_lost: bool,
    /// The last verification found differences that were not repaired.
    pub differs: bool,
    /// The backup has acknowledged everything.
    pub has_all: bool,
    /// Writes that the backup has not acknowledged.
    pub lag: LagStatus,
}

/// Facts of a group at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The group was handed to the backup site, at this time of the wall clock.
    pub switched_at_unix_ms: Option<u64>,
    /// Each member is attached.
    pub attached: bool,
    /// The backup has said that it does not acknowledge, or refuses a member for now.
    pub stalled: bool,
    /// True if clients may have been told what a disaster would undo.
    pub told: Option<Told>,
    /// The writers on this host.
    pub writers: Vec<WriterFacts>,
}

/// The risk of a group of which these are the facts.
#[must_use]
pub fn assess(facts: &Facts) -> Risk {
    let (kind, text) = why(facts);
    let nothing = if facts.attached { Undoes::Nothing } else { Undoes::Lag(LagStatus::default()) };
    let undoes = match kind {
        Kind::Fenced => Undoes::Since { since_unix_ms: facts.switched_at_unix_ms },
        // The backup's disks are not those of any time.
        Kind::Differs => Undoes::Since { since_unix_ms: None },
        _ => facts.writers.iter().map(undone_of).fold(nothing, Undoes::and),
    };
    Risk { undoes, told: facts.told, why: Why { kind, text: text.into() } }
}

fn undone_of(writer: &WriterFacts) -> Undoes {
    match writer.gap {
        Some(Gap { why: GapWhy::FirstCopy, .. }) => Undoes::Everything,
        Some(Gap { since_unix_ms, .. }) => Undoes::Since { since_unix_ms },
        None if writer.has_all => Undoes::Nothing,
        None => Undoes::Lag(writer.lag),
    }
}

/// The first kind that applies, worst first.
fn why(facts: &Facts) -> (Kind, &'static str) {
    let is_in = |phase| facts.writers.iter().any(|writer| writer.phase == phase);
    if facts.switched_at_unix_ms.is_some() {
        return (
            Kind::Fenced,
            "the group was switched over to the backup site; this host answers no clients",
        );
    }
    if facts.writers.iter().any(|w| w.phase == Phase::Fenced && !w.is_superseded) {
        let text = "the group was recovered at the backup; this host answers no clients, also after a restart";
        return (Kind::Fenced, text);
    }
    if is_in(Phase::Fenced) {
        let text = "another run of this host's daemon has taken a member over; this one protects nothing and answers no \
                    clients";
        return (Kind::Fenced, text);
    }
    if is_in(Phase::Overflowed) {
        let text = "the backlog was full; guests go on, what they write is compared later, and replies are held";
        return (Kind::Unrecorded, text);
    }
    if is_in(Phase::Unrecorded) {
        let text = "the backup was not reached since the start; guests are served, and what they write is compared later";
        return (Kind::Unrecorded, text);
    }
    if facts.stalled || is_in(Phase::Refused) {
        return (Kind::Stalled, "the backup does not acknowledge; replies are held");
    }
    if is_in(Phase::WaitingForBackup) {
        let text = "the backup was not reached since the start; the guests' disks wait for it";
        return (Kind::Disconnected, text);
    }
    if !facts.attached || is_in(Phase::Disconnected) {
        return (
            Kind::Disconnected,
            "the link is down; writes fill the backlog and replies are held",
        );
    }
    if facts.writers.iter().any(|writer| writer.heartbeat_lost) {
        let text = "writes that should have been acknowledged were not, and nothing says why; replies are held";
        return (Kind::Stalled, text);
    }
    if is_in(Phase::Initialising) {
        return (Kind::Copying, "the first copy is under way; nothing can be recovered yet");
    }
    // A loop publishes the two one after the other.
    if is_in(Phase::Resyncing) || facts.writers.iter().any(|writer| writer.gap.is_some()) {
        return (
            Kind::Copying,
            "the sites are being compared; the backup stands at its last whole state",
        );
    }
    if is_in(Phase::DiskFailing) {
        return (
            Kind::Copying,
            "the local disk failed writes; what it holds there is still to be copied",
        );
    }
    if facts.writers.iter().any(|writer| writer.differs) {
        let text = "the backup's disks were found to differ from the local ones; a recovery would bring back theirs";
        return (Kind::Differs, text);
    }
    (Kind::Following, "the backup has every write but those on their way")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAG: LagStatus = LagStatus { writes: 3, bytes: 4096, ms: 7 };
    const TOLD: Told = Told { since_unix_ms: 5, leaves: true };
    const WELL: WriterFacts = WriterFacts {
        phase: Phase::Replicating,
        gap: None,
        is_superseded: false,
        heartbeat_lost: false,
        differs: false,
        has_all: true,
        lag: LagStatus { writes: 0, bytes: 0, ms: 0 },
    };
    const BEHIND: WriterFacts = WriterFacts { has_all: false, lag: LAG, ..WELL };
    const FULL: Gap = Gap { since_unix_ms: Some(70), why: GapWhy::BacklogFull };
    const UNCLEAN: Gap = Gap { since_unix_ms: Some(60), why: GapWhy::UncleanStop };
    const FIRST: Gap = Gap { since_unix_ms: None, why: GapWhy::FirstCopy };

    fn with(phase: Phase, gap: Option<Gap>) -> WriterFacts {
        WriterFacts { phase, gap, ..BEHIND }
    }

    fn group(writers: &[WriterFacts]) -> Facts {
        let writers = writers.to_vec();
        Facts { switched_at_unix_ms: None, attached: true, stalled: false, told: None, writers }
    }

    fn since(since_unix_ms: Option<u64>) -> Undoes {
        Undoes::Since { since_unix_ms }
    }

    #[test]
    fn each_fact_has_its_kind_and_its_price() {
        let lag = Undoes::Lag(LAG);
        let cut = |writers: &[WriterFacts]| Facts { attached: false, ..group(writers) };
        let refused = |writers: &[WriterFacts]| Facts { stalled: true, ..group(writers) };
        let overflowed = with(Phase::Overflowed, Some(FULL));
        let superseded = WriterFacts { is_superseded: true, ..with(Phase::Fenced, None) };
        let switched = Facts { switched_at_unix_ms: Some(9), ..group(&[WELL]) };
        let silent = WriterFacts { heartbeat_lost: true, ..BEHIND };
        let unreached = Gap { why: GapWhy::Unreached, ..Gap::STARTED };
        let cases = [
            (group(&[WELL]), Kind::Following, Undoes::Nothing),
            (group(&[]), Kind::Following, Undoes::Nothing),
            (cut(&[]), Kind::Disconnected, Undoes::Lag(LagStatus::default())),
            (group(&[WELL, BEHIND]), Kind::Following, lag),
            (cut(&[BEHIND]), Kind::Disconnected, lag),
            (group(&[with(Phase::Disconnected, None)]), Kind::Disconnected, lag),
            (
                group(&[with(Phase::WaitingForBackup, Some(Gap::STARTED))]),
                Kind::Disconnected,
                since(None),
            ),
            (
                refused(&[with(Phase::WaitingForBackup, Some(Gap::STARTED))]),
                Kind::Stalled,
                since(None),
            ),
            (group(&[with(Phase::Unrecorded, Some(unreached))]), Kind::Unrecorded, since(None)),
            (group(&[with(Phase::Resyncing, Some(unreached))]), Kind::Copying, since(None)),
            (group(&[overflowed, WELL]), Kind::Unrecorded, since(Some(70))),
            (cut(&[overflowed]), Kind::Unrecorded, since(Some(70))),
            (refused(&[overflowed]), Kind::Unrecorded, since(Some(70))),
            (group(&[with(Phase::Resyncing, Some(FULL))]), Kind::Copying, since(Some(70))),
            (cut(&[with(Phase::Resyncing, Some(FULL))]), Kind::Disconnected, since(Some(70))),
            (
                group(&[overflowed, with(Phase::Resyncing, Some(UNCLEAN))]),
                Kind::Unrecorded,
                since(Some(60)),
            ),
            (
                group(&[overflowed, with(Phase::Initialising, Some(FIRST))]),
                Kind::Unrecorded,
                Undoes::Everything,
            ),
            (group(&[with(Phase::Initialising, Some(FIRST))]), Kind::Copying, Undoes::Everything),
            (group(&[with(Phase::DiskFailing, None)]), Kind::Copying, lag),
            (group(&[with(Phase::Refused, None)]), Kind::Stalled, lag),
            (refused(&[BEHIND]), Kind::Stalled, lag),
            (group(&[silent]), Kind::Stalled, lag),
            (cut(&[silent]), Kind::Disconnected, lag),
            (group(&[WriterFacts { differs: true, ..WELL }]), Kind::Differs, since(None)),
            (
                group(&[WriterFacts { differs: true, ..with(Phase::Resyncing, Some(UNCLEAN)) }]),
                Kind::Copying,
                since(Some(60)),
            ),
            (group(&[with(Phase::Fenced, None)]), Kind::Fenced, since(None)),
            (group(&[superseded, overflowed]), Kind::Fenced, since(None)),
            (switched, Kind::Fenced, since(Some(9))),
        ];
        for (facts, kind, undoes) in cases {
            let risk = assess(&facts);
            assert_eq!((risk.why.kind, risk.undoes), (kind, undoes), "{facts:?}");
            let told = assess(&Facts { told: Some(TOLD), ..facts.clone() });
            assert!(!told.is_protected() && told.told == Some(TOLD));
            assert_eq!(
                (told.why, told.undoes),
                (risk.why, risk.undoes),
                "one axis says nothing of the other"
            );
        }
    }

    /// Rule 6: of all combinations, a group is called protected, and the backup said to have everything, only if all holds.
    #[test]
    fn nothing_else_is_called_protected() {
        let gaps = [None, Some(FULL), Some(FIRST), Some(Gap::STARTED)];
        for bits in 0..256u32 {
            let bit = |n: u32| bits & (1 << n) != 0;
            for (phase, gap) in
                Phase::ALL.into_iter().flat_map(|phase| gaps.map(|gap| (phase, gap)))
            {
                let writer = WriterFacts {
                    phase,
                    gap,
                    is_superseded: bit(0),
                    heartbeat_lost: bit(1),
                    differs: bit(2),
                    has_all: bit(3),
                    lag: LAG,
                };
                let facts = Facts {
                    switched_at_unix_ms: bit(4).then_some(3),
                    attached: !bit(5),
                    stalled: bit(6),
                    told: bit(7).then_some(TOLD),
                    writers: vec![WELL, writer],
                };
                let risk = assess(&facts);
                let is_well =
                    phase == Phase::Replicating && gap.is_none() && bits & 0b0111_0110 == 0;
                assert_eq!(risk.is_protected(), is_well && !bit(7), "{facts:?}");
                let has_all = gap.is_none() && bit(3) && !bit(5);
                assert!(risk.undoes != Undoes::Nothing || has_all, "{facts:?}");
            }
        }
    }

    #[test]
    fn the_words_are_the_json_form() {
        for kind in Kind::ALL {
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        }
        let all = [Undoes::Nothing, Undoes::Lag(LAG), since(None), Undoes::Everything];
        for (undoes, name) in all.into_iter().zip(Undoes::ALL) {
            assert_eq!(serde_json::to_value(undoes).unwrap()["what"], name);
            assert_eq!(undoes.name(), name);
        }
    }
}
