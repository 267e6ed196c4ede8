//! Bounds of everything that a peer says. A certificate says who speaks, not that it is true.
//!
//! | rule | where it is applied |
//! |---|---|
//! | [`check`]: every name is a name, every text and list is bounded | [`frame::decode`](crate::frame::decode), so no decoded message has others |
//! | [`capped`]: every text that goes out is bounded | [`frame::encode_control`](crate::frame::encode_control) |
//! | [`Plausible`]: times, seqs, epochs and runs that can exist | the backup's group for a host, the daemon's link for a backup |
//!
//! An implausible number is refused to its sender and is never stored.

use crate::hlc::Hlc;
use crate::ids::{Epoch, Incarnation, Seq};
use crate::limits;
use crate::machine::Machine;
use crate::message::{
    Attach, Attached, Basis, CleanEnd, LastRun, LogAge, Message, Progress, StreamState,
};
use crate::record::{Body, Record};
use crate::vector::CountVector;
use std::borrow::Cow;
use thiserror::Error;

/// How far a peer's times may be ahead of the clock of the machine that judges them, unless configured.
pub const CLOCK_BOUND_MS: u64 = 60_000;
/// The same at a host for what a backup tells: it may have taken a time from another host whose clock is ahead of the
/// backup's by [`CLOCK_BOUND_MS`], while the backup's clock is ahead by as much of this host's.
pub const CLOCK_BOUND_OF_BACKUPS_MS: u64 = 2 * CLOCK_BOUND_MS;
/// No writer reaches this seq: 2^56 writes are 2,000 years at a million a second.
pub const SEQ_MAX: Seq = Seq(1 << 56);
/// In C, the entry of a writer that was removed: nothing waits for it.
pub const SEQ_OF_REMOVED: Seq = Seq(u64::MAX);
/// Records of another writer that a member can have heard of and the backup cannot have: 12 days at a million a
/// second.
pub const SEQ_REACH: u64 = 1 << 40;
/// No group is recovered so often.
pub const EPOCH_MAX: Epoch = Epoch(1 << 32);

/// Whether a group, member, disk, host or bookmark may be called so: letters, digits, `.`, `_`, `-`, not beginning with
/// a dot or a hyphen, at most [`limits::NAME_MAX_BYTES`].
#[must_use]
pub fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    !name.is_empty()
        && name.len() <= limits::NAME_MAX_BYTES
        && !name.starts_with(['.', '-'])
        && name.bytes().all(plain)
}

/// Whether a text for people is bounded, and has no control characters for a terminal or a log.
#[must_use]
pub fn is_text(text: &str) -> bool {
    text.len() <= limits::TEXT_MAX_BYTES && !text.contains(|c: char| c.is_control() && c != '\n')
}

const NAME: &str = "a name is not 1 to 64 letters, digits, '.', '_', '-'";
const TEXT: &str = "a text is longer than 4 KiB or has control characters";
const MEMBERS: &str = "more than 256 members";
const WRITERS: &str = "more than 64 writers";

/// The form of a message: names, texts and lists. Of numbers only those that nothing can be true of.
pub fn check(message: &Message) -> Result<(), &'static str> {
    let all = |names: &[String], most: usize, what| {
        ensure(names.len() <= most, what)?;
        ensure(names.iter().all(|name| is_name(name)), NAME)
    };
    match message {
        Message::Hello { host, software, .. } => {
            ensure(is_name(host), NAME)?;
            ensure(is_text(software), TEXT)
        }
        Message::Welcome { server, software, .. } => {
            ensure(is_name(server), NAME)?;
            ensure(is_text(software), TEXT)
        }
        Message::Attach(attach) => check_attach(attach),
        Message::Refused { reason, .. } => ensure(is_text(reason), TEXT),
        Message::Stalled { reason } => ensure(reason.as_deref().is_none_or(is_text), TEXT),
        Message::Bookmark(bookmark) => ensure(is_name(&bookmark.name), NAME),
        Message::Bookmarked { outcome: Ok(point), .. } => {
            ensure(point.seqs.len() <= limits::WRITERS_MAX.into(), WRITERS)?;
            ensure(point.seqs.iter().all(|(name, _)| is_name(name)), NAME)?;
            all(&point.without, limits::MEMBERS_MAX, MEMBERS)
        }
        Message::Bookmarked { outcome: Err(reason), .. } => ensure(is_text(reason), TEXT),
        Message::SwitchAwaits { members } => all(members, limits::MEMBERS_MAX, MEMBERS),
        Message::AskFloor { mark, .. } => ensure(*mark != 0, "a question without a number"),
        Message::Attached(Attached {
            stream: Some(StreamState { basis: Basis::Everything { why }, .. }),
            ..
        }) => ensure(is_text(why), TEXT),
        Message::Detach { end: Some(end) } => check_marks(&end.marks),
        Message::Attached(_)
        | Message::Begun
        | Message::Logged(_)
        | Message::Beacon { .. }
        | Message::Lease { .. }
        | Message::DigestCheck { .. }
        | Message::DigestResult { .. }
        | Message::ModeChanged { .. }
        | Message::Detach { end: None }
        | Message::Progress(_)
        | Message::Sound { .. }
        | Message::Sounded { .. }
        | Message::Floor { .. }
        | Message::FloorIs { .. }
        | Message::Policy(_)
        | Message::PolicyKept(_)
        | Message::Unheard
        | Message::Arriving
        | Message::ZeroCheck { .. }
        | Message::ServesUnreached { .. }
        | Message::ServesUnreachedKept { .. }
        | Message::GiveUpLease
        | Message::LeaseGivenUp { .. }
        | Message::ReadyToSwitch { .. }
        | Message::TagTerms(_) => Ok(()),
    }
}

fn ensure(holds: bool, what: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(what) }
}

fn check_attach(attach: &Attach) -> Result<(), &'static str> {
    ensure(is_name(&attach.group) && is_name(&attach.member), NAME)?;
    ensure(attach.writers.len() <= limits::WRITERS_MAX.into(), WRITERS)?;
    ensure(attach.writers.iter().all(|name| is_name(name)), NAME)?;
    if let Some(writing) = attach.writing() {
        ensure(writing.disks.len() <= limits::DISKS_MAX.into(), "more than 64 disks")?;
        ensure(writing.disks.iter().all(|disk| is_name(&disk.name)), NAME)?;
        check_marks(&writing.marks)?;
    }
    attach.machine.as_ref().map_or(Ok(()), Machine::check)?;
    attach.tagging.as_ref().map_or(Ok(()), |tagging| check_peers(&tagging.peers))
}

/// The identities of a member's disks.
fn check_marks(marks: &[String]) -> Result<(), &'static str> {
    let fits = |mark: &String| mark.len() <= limits::MARK_MAX_BYTES && is_text(mark);
    ensure(
        marks.len() <= limits::DISKS_MAX.into() && marks.iter().all(fits),
        "the identities of the disks are more than 64, longer than 256 bytes or not plain text",
    )
}

/// The lines that the hosts of a group must have the same.
pub fn check_peers(peers: &[String]) -> Result<(), &'static str> {
    let fits = |peer: &String| peer.len() <= limits::PEER_MAX_BYTES && is_text(peer);
    ensure(
        peers.len() <= limits::PEERS_MAX && peers.iter().all(fits),
        "a group has at most 256 members, of 512 bytes each",
    )
}

/// The message with its texts for people cut to [`limits::TEXT_MAX_BYTES`]. Whatever a reason quotes, it fits a frame.
#[must_use]
pub fn capped(message: &Message) -> Cow<'_, Message> {
    let text = match message {
        Message::Hello { software, .. } | Message::Welcome { software, .. } => software,
        Message::Refused { reason, .. }
        | Message::Stalled { reason: Some(reason) }
        | Message::Bookmarked { outcome: Err(reason), .. }
        | Message::Attached(Attached {
            stream: Some(StreamState { basis: Basis::Everything { why: reason }, .. }),
            ..
        }) => reason,
        _ => return Cow::Borrowed(message),
    };
    if is_text(text) {
        return Cow::Borrowed(message);
    }
    let mut capped = message.clone();
    if let Message::Hello { software: text, .. }
    | Message::Welcome { software: text, .. }
    | Message::Refused { reason: text, .. }
    | Message::Stalled { reason: Some(text) }
    | Message::Bookmarked { outcome: Err(text), .. }
    | Message::Attached(Attached {
        stream: Some(StreamState { basis: Basis::Everything { why: text }, .. }),
        ..
    }) = &mut capped
    {
        *text = cap(text);
    }
    Cow::Owned(capped)
}

/// A text for people, cut to [`limits::TEXT_MAX_BYTES`], without control characters.
#[must_use]
pub fn cap(text: &str) -> String {
    const CUT: &str = "...";
    let plain = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    if text.len() <= limits::TEXT_MAX_BYTES {
        return text.chars().map(plain).collect();
    }
    let mut end = limits::TEXT_MAX_BYTES - CUT.len();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].chars().map(plain).chain(CUT.chars()).collect()
}

/// A number that cannot be true.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Implausible {
    /// A time ahead of the clock here.
    #[error(
        "{what} is {} ahead of the clock of {judge}, and {} is allowed: the clock of {sender} is ahead, or the clock of \
         {judge} is behind. Set both clocks right",
        span(*ahead_ms), span(*bound_ms)
    )]
    Time {
        /// Which time.
        what: &'static str,
        /// Whose clock was compared with.
        judge: &'static str,
        /// Who said it.
        sender: &'static str,
        /// By how much.
        ahead_ms: u64,
        /// The bound.
        bound_ms: u64,
    },
    /// A count beyond everything that can exist.
    #[error("{what} is {found}, and {limit} is the most that there can be")]
    Count {
        /// Which count.
        what: &'static str,
        /// As received.
        found: u64,
        /// The bound.
        limit: u64,
    },
}

/// For people: a span of time.
fn span(ms: u64) -> String {
    match ms / 1000 {
        0 => format!("{ms} ms"),
        s @ 1..=599 => format!("{s} s"),
        s @ 600..=35_999 => format!("{} min", s / 60),
        s @ 36_000..=863_999 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}

/// The judge of a peer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct Plausible {
    judge: &'static str,
    sender: &'static str,
    bound_ms: u64,
    /// The greatest time on record here when this run began. What was accepted once cannot be refused.
    known_ms: u64,
}

impl Plausible {
    /// Judges hosts, at a backup whose records reach to `known`.
    #[must_use]
    pub fn of_hosts(bound_ms: u64, known: Hlc) -> Self {
        let (judge, sender) = ("the backup server", "the host");
        Self { judge, sender, bound_ms, known_ms: known.physical_ms() }
    }

    /// Judges a backup, at a host that has given out or heard times up to `known`.
    #[must_use]
    pub fn of_backup(bound_ms: u64, known: Hlc) -> Self {
        let (judge, sender) = ("this host", "the backup server or of another host of the group");
        Self { judge, sender, bound_ms, known_ms: known.physical_ms() }
    }

    fn time_ms(&self, what: &'static str, at_ms: u64, wall_ms: u64) -> Result<(), Implausible> {
        if at_ms <= wall_ms.max(self.known_ms).saturating_add(self.bound_ms) {
            return Ok(());
        }
        let (judge, sender, bound_ms) = (self.judge, self.sender, self.bound_ms);
        let ahead_ms = at_ms.saturating_sub(wall_ms);
        Err(Implausible::Time { what, judge, sender, ahead_ms, bound_ms })
    }

    /// A time of a wall clock, in milliseconds since the Unix epoch.
    pub fn wall(&self, what: &'static str, at_ms: u64, wall_ms: u64) -> Result<(), Implausible> {
        self.time_ms(what, at_ms, wall_ms)
    }

    /// A time of the hybrid logical clock.
    pub fn hlc(&self, what: &'static str, hlc: Hlc, wall_ms: u64) -> Result<(), Implausible> {
        self.time_ms(what, hlc.physical_ms(), wall_ms)
    }

    /// The number of a run, which is the time of its beginning in microseconds, or one more than that of the run before.
    pub fn run(
        &self,
        run: Incarnation,
        known: Incarnation,
        wall_ms: u64,
    ) -> Result<(), Implausible> {
        if run <= known {
            return Ok(());
        }
        self.time_ms("the number of the daemon's run, a time,", run.0 / 1000, wall_ms)
    }

    /// An attachment that a host asks for; `known` is the writer's run on record.
    pub fn attach(
        &self,
        attach: &Attach,
        known: Incarnation,
        wall_ms: u64,
    ) -> Result<(), Implausible> {
        epoch(attach.epoch)?;
        let Some(writing) = attach.writing() else { return Ok(()) };
        self.run(writing.incarnation, known, wall_ms)?;
        match writing.last_run {
            LastRun::Continues { from: at } | LastRun::Clean { seq: at, .. } => {
                seq("the seq of the last run", at)
            }
            // Only compared with what is on record, and not stored.
            LastRun::Unknown | LastRun::Unclean { .. } => Ok(()),
        }
    }

    /// How far a host's activity log is; `known` is the run on record. The log's file has the number of a run.
    pub fn log(&self, log: LogAge, known: Incarnation, wall_ms: u64) -> Result<(), Implausible> {
        self.run(Incarnation(log.file), known, wall_ms)?;
        at_most("the number of a transaction of the activity log", log.number, SEQ_MAX.0)
    }

    /// How a host's run ended.
    pub fn end(&self, end: &CleanEnd) -> Result<(), Implausible> {
        seq("the seq at which the run ended", end.seq)
    }

    /// A record's time and what it depends on; `have` is what is on record of each writer.
    pub fn record(
        &self,
        record: &Record<impl Body>,
        have: &CountVector,
        wall_ms: u64,
    ) -> Result<(), Implausible> {
        self.hlc("the time of a record", record.hlc, wall_ms)?;
        seq("the seq of a record", record.seq)?;
        reach("what a record depends on", &record.deps, have)
    }

    /// P as a host tells it; `have` is what is on record of each writer.
    pub fn sounded(
        &self,
        pending: &CountVector,
        hlc: Hlc,
        have: &CountVector,
        wall_ms: u64,
    ) -> Result<(), Implausible> {
        self.hlc("the time that a member waits for", hlc, wall_ms)?;
        reach("the seq that a member waits for", pending, have)
    }

    /// Every number of a backup's message.
    pub fn message_of_backup(&self, message: &Message, wall_ms: u64) -> Result<(), Implausible> {
        let time = |hlc| self.hlc(TOLD, hlc, wall_ms);
        match message {
            Message::Attached(attached) => {
                epoch(attached.epoch)?;
                attached.stream.as_ref().map_or(Ok(()), |stream| time(stream.last_hlc))?;
                self.progress(&attached.progress, wall_ms)
            }
            Message::Progress(progress) => self.progress(progress, wall_ms),
            Message::Floor { pending, hlc } | Message::FloorIs { pending, hlc, .. } => {
                vector(pending)?;
                time(*hlc)
            }
            Message::LeaseGivenUp { committed } => vector(committed),
            Message::TagTerms(terms) => vector(&terms.reachable),
            Message::Bookmarked { outcome: Ok(point), .. } => time(point.hlc),
            _ => Ok(()),
        }
    }

    fn progress(&self, progress: &Progress, wall_ms: u64) -> Result<(), Implausible> {
        seq("the seq that the backup server calls durable", progress.durable)?;
        vector(&progress.committed)?;
        self.hlc(TOLD, progress.watermark, wall_ms)?;
        self.hlc(TOLD, progress.frontier, wall_ms)
    }
}

const TOLD: &str = "a time that the backup server tells";

fn seq(what: &'static str, found: Seq) -> Result<(), Implausible> {
    at_most(what, found.0, SEQ_MAX.0)
}

fn epoch(found: Epoch) -> Result<(), Implausible> {
    at_most("the epoch", found.0, EPOCH_MAX.0)
}

fn vector(found: &CountVector) -> Result<(), Implausible> {
    let mut live = found.entries().filter(|(_, seq)| *seq != SEQ_OF_REMOVED);
    live.try_for_each(|(_, of)| seq("an entry of a count vector", of))
}

/// Whether no entry is further than [`SEQ_REACH`] above what is known of its writer.
pub fn within_reach(
    what: &'static str,
    found: &CountVector,
    known: &CountVector,
) -> Result<(), Implausible> {
    reach(what, found, known)
}

fn reach(what: &'static str, found: &CountVector, have: &CountVector) -> Result<(), Implausible> {
    let within = |(writer, seq): (_, Seq)| match have.get(writer) {
        SEQ_OF_REMOVED => Ok(()),
        have => at_most(what, seq.0, have.0.saturating_add(SEQ_REACH).min(SEQ_MAX.0)),
    };
    found.entries().try_for_each(within)
}

fn at_most(what: &'static str, found: u64, limit: u64) -> Result<(), Implausible> {
    if found <= limit { Ok(()) } else { Err(Implausible::Count { what, found, limit }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::WriterId;
    use crate::message::RefusalKind;
    use proptest::prelude::*;

    const WALL_MS: u64 = 1_800_000_000_000;

    fn judge() -> Plausible {
        Plausible::of_backup(CLOCK_BOUND_MS, Hlc(0))
    }

    #[test]
    fn nothing_that_leads_elsewhere_is_a_name() {
        for good in ["a", "db-1", "vm_2.data", &"x".repeat(64)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", ".x", "-x", "a/b", "a b", "a\0", "ü", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_clock_that_is_ahead_is_named() {
        let at = |ms: u64| judge().hlc("a time", Hlc::new(WALL_MS + ms, 0), WALL_MS);
        assert_eq!(at(CLOCK_BOUND_MS), Ok(()));
        let refused = at(8 * 3_600_000).unwrap_err().to_string();
        assert!(refused.contains("480 min ahead of the clock of this host"), "{refused}");
        assert!(judge().hlc("a time", Hlc(u64::MAX), WALL_MS).is_err());
        let known = Plausible::of_hosts(CLOCK_BOUND_MS, Hlc::new(WALL_MS + 8 * 3_600_000, 0));
        let later = Hlc::new(WALL_MS + 8 * 3_600_000 + 1, 0);
        assert_eq!(known.hlc("a time", later, WALL_MS), Ok(()), "such times are on record");
    }

    #[test]
    fn a_removed_writer_is_no_lie_and_all_else_beyond_reach_is() {
        let tell = |seq: u64| {
            let committed = CountVector::of(WriterId(3), Seq(seq));
            let progress = Progress { committed, ..Progress::default() };
            judge().message_of_backup(&Message::Progress(progress), WALL_MS)
        };
        assert_eq!(tell(u64::MAX), Ok(()));
        assert_eq!(tell(7), Ok(()));
        assert!(tell(u64::MAX - 1).is_err());
        let have = CountVector::of(WriterId(0), Seq(9));
        let waits = |seq: u64| {
            let pending = CountVector::of(WriterId(0), Seq(seq));
            judge().sounded(&pending, Hlc(0), &have, WALL_MS)
        };
        assert_eq!(waits(9 + SEQ_REACH), Ok(()));
        assert!(waits(10 + SEQ_REACH).is_err());
        assert!(waits(u64::MAX).is_err());
        let removed = CountVector::of(WriterId(0), SEQ_OF_REMOVED);
        assert_eq!(judge().sounded(&removed, Hlc(0), &removed, WALL_MS), Ok(()), "as it was told");
    }

    proptest! {
        #[test]
        fn every_text_that_goes_out_fits(reason in "(ü|[\\PC]|\u{1b}|\n){0,3000}", times in 1usize..4) {
            let reason = reason.repeat(times);
            let message = Message::Refused { kind: RefusalKind::Invalid, reason: reason.clone() };
            let capped = capped(&message);
            prop_assert_eq!(check(&capped), Ok(()));
            if is_text(&reason) {
                prop_assert_eq!(&*capped, &message);
            }
        }
    }
}
