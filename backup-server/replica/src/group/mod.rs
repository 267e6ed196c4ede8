//! One group at the backup: its whole state, with one owner and no I/O but the storage's.
//!
//! Events are method calls; what must go out on links is collected and taken with
//! [`Group::take_outputs`]. The server runs it in a thread of its own for each group; the
//! simulator runs the same code on a disk in memory and simulated time.
//!
//! ```text
//!  attach ─▶ receive* ─▶ begin_sync ─▶ (sync) ─▶ synced ─▶ Progress ─▶ ...
//!                                                             (attach.rs, shape.rs, follow.rs, ingest.rs, durable.rs)
//!  resync ─▶ Sound, Sounded* ─▶ Floor                        (floor.rs)
//!  AskFloor ─▶ Sound, Sounded* ─▶ FloorIs                    (asked.rs)
//!                          │
//!                          ├─▶ fold_job ─▶ (fold) ─▶ fold_done (folding.rs)
//!                          ├─▶ index_job ─▶ (index) ─▶ index_done (indexing.rs)
//!                          ├─▶ compress_job ─▶ (compress) ─▶ compress_done (compressing.rs)
//!                          └─▶ scrub_job ─▶ (scrub) ─▶ scrub_done (scrub.rs)
//!  recover ─▶ guest_write* ─▶ guest_flush                     (recovery.rs)
//! ```
//!
//! Invariant: a durable seq in a `Progress` message comes only from a [`tidelock_protocol::receiver::Ack`], and
//! only [`Group::synced`] makes one, of the proof that the journal's sync has ended well. When the journal fails, the
//! group is broken for good: it must be dropped and opened again, which finds out what is durable.

mod arrival;
mod asked;
mod attach;
mod compressing;
mod covering;
mod damage;
mod disks;
mod durable;
mod floor;
mod folding;
mod follow;
mod held;
mod indexing;
mod ingest;
mod judging;
mod left_out;
mod machines;
mod marks;
mod ownership;
mod parts;
mod past;
mod policies;
mod recovery;
mod retention;
mod scrub;
mod seed;
mod shape;
mod status;
mod switching;
mod tags;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_of_several;

pub use attach::GroupCreateError;
pub use compressing::CompressedStatus;
pub use covering::Covered;
pub use damage::{DamagedDisk, DamagedSegment, ForgetError};
pub(crate) use durable::NotOnRecord;
pub use durable::NotYet;
pub use left_out::{HeldBackBy, RecoveryWriter};
pub use machines::ApproveError;
pub use marks::{MarkError, NamedMark};
pub use ownership::{MoveError, Moved};
pub use parts::PartsMemory;
pub use past::PastStatus;
pub use recovery::{GuestEffect, NamedView, Pin, RecoverError, RecoverHow, Recovery};
pub use retention::{AtSizeMax, Retention};
pub use scrub::{ScrubDone, ScrubJob, ScrubStatus};
pub use seed::{SEEDED, SeedError, SeededMember, manifest as seeded_manifest, seed};
pub use shape::RemoveError;
pub use status::{ClockStatus, DiskStatus, FollowerStatus, GroupStatus, HostStatus, WriterStatus};

use self::durable::Immediate;
use self::parts::Gathered;
use crate::connection::outbox::Outbox;
use crate::history::Holds;
use crate::manifest::Manifest;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use thiserror::Error;
use tidelock_cut::CutTracker;
use tidelock_protocol::bounds::{self, Plausible};
use tidelock_protocol::commit::GroupCommit;
use tidelock_protocol::hlc::{Hlc, HlcClock};
use tidelock_protocol::ids::{Channel, Epoch, GroupId, MonoNanos, Seq, WriterId};
use tidelock_protocol::lease::Grace;
use tidelock_protocol::message::{CopyState, Message, RefusalKind};
use tidelock_protocol::receiver::Receiver;
use tidelock_protocol::tag::TagKey;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_storage::json::FileError;
use tidelock_store::damage::ImageDamage;
use tidelock_store::extents::DiskKey;
use tidelock_store::fold::FoldPosition;
use tidelock_store::fold::{self, FoldError};
use tidelock_store::image::Image;
use tidelock_store::journal::Closed;
use tidelock_store::journal::{
    self, BATCH_TARGET_BYTES, Behind, Compress, Journal, JournalError, Position, Standing, State,
    Ticket, TornTail, WriterState,
};
use tidelock_store::view::{Overlay, SharedOverlay, View};

/// One connection of a host. Of two of one host the later has the greater number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// An attached member on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// The connection.
    pub connection: ConnectionId,
    /// The channel there.
    pub channel: Channel,
}

/// What must go out.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A message to an attached member.
    Send(Link, Message),
    /// The member is not attached, or no longer: tell it why.
    Refuse(Link, RefusalKind, String),
}

impl Output {
    /// The link that it goes to.
    #[must_use]
    pub fn link(&self) -> Link {
        match self {
            Self::Send(link, _) | Self::Refuse(link, ..) => *link,
        }
    }

    /// Puts it among the messages that wait to be sent.
    pub fn send(self, outbox: &Outbox) {
        match self {
            Self::Send(link, message) => outbox.send(link.channel, message),
            Self::Refuse(link, kind, reason) => {
                outbox.send(link.channel, Message::Refused { kind, reason });
            }
        }
    }
}

/// Both clocks, as arguments.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// For spans.
    pub mono: MonoNanos,
    /// For people, and for the HLC: milliseconds since the Unix epoch.
    pub unix_ms: u64,
}

/// The identity of a new group.
fn fresh_id<S: Storage>(storage: &S) -> GroupId {
    let random = u128::from(storage.fresh_id()) << 64 | u128::from(storage.fresh_id());
    GroupId(random.to_be_bytes())
}

/// A random secret, from which the keys of a new group's tags are derived.
fn fresh_secret<S: Storage>(storage: &S) -> TagKey {
    TagKey([storage.fresh_id(), storage.fresh_id()])
}

/// Where the journal is in a group's directory.
pub const JOURNAL_DIR: &str = "journal";

/// How a group is kept.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// The journal.
    pub journal: journal::Options,
    /// Unfolded bytes of the journal at which the group stops acknowledging.
    pub unfolded_max_bytes: u64,
    /// Unfolded bytes from which folding is worth while.
    pub fold_min_bytes: u64,
    /// Folds no more than this each second, as long as nothing presses; `None`: as fast as it can.
    pub fold_rate_bytes_s: Option<u64>,
    /// How long the past is kept.
    pub retention: Retention,
    /// What of the journal is compressed; `None`: nothing is.
    pub compress: Option<Compress>,
    /// The hosts that may attach members; `None`: the one that created the group.
    pub hosts: Option<Vec<String>>,
    /// The host that may attach each member; empty: any member may be claimed by any of the hosts.
    pub members: BTreeMap<String, String>,
    /// How far a host's times may be ahead of the clock here.
    pub clock_bound_ms: u64,
    /// Memory for records that arrive in parts, of all groups of the server.
    pub parts: Arc<PartsMemory>,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self {
            journal: journal::Options::default(),
            unfolded_max_bytes: 8 << 30,
            fold_min_bytes: 16 << 20,
            fold_rate_bytes_s: None,
            retention: Retention::default(),
            compress: None,
            hosts: None,
            members: BTreeMap::new(),
            clock_bound_ms: bounds::CLOCK_BOUND_MS,
            parts: Arc::default(),
        }
    }
}

/// Why a group does not work.
#[derive(Debug, Error)]
pub enum GroupError {
    /// Its journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// One of its small files.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its images.
    #[error(transparent)]
    Fold(#[from] FoldError),
    /// A disk image.
    #[error("disk image {path}: {source}")]
    Image {
        /// Where.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// There is no such group.
    #[error("there is no such group")]
    Unknown,
}

impl GroupError {
    /// What hosts are told.
    #[must_use]
    pub fn refusal_kind(&self) -> RefusalKind {
        match self {
            Self::Journal(JournalError::Corrupt { .. } | JournalError::Missing { .. }) => {
                RefusalKind::Damaged
            }
            _ => RefusalKind::Stopping,
        }
    }
}

/// One writer's stream.
#[derive(Debug)]
struct WriterSlot {
    /// From the first attachment on.
    receiver: Option<Receiver>,
    /// What has arrived of its next record.
    gathered: Gathered,
    link: Option<Link>,
    attached_at: Option<Now>,
    /// Its group may have several members: it was attached with [`Tagging`](tidelock_protocol::message::Tagging).
    is_of_several: bool,
    /// Its last run has ended with everything durable.
    has_left: bool,
    /// Its recovered guest has flushed since its last record.
    flushed: bool,
    /// How far its clock was ahead of this server's when its last guest write came, in milliseconds.
    clock_ahead_ms: i64,
    /// How far its host says that it has admitted records in an epoch, whether they have come or not.
    admitted: (Epoch, Seq),
    /// The ticket of the last note on the state of its copy.
    noted: Ticket,
}

/// A member without disks that is connected.
#[derive(Clone, Debug)]
struct Follower {
    member: String,
    link: Link,
    attached_at: Now,
}

impl WriterSlot {
    fn empty() -> Self {
        Self {
            receiver: None,
            gathered: Gathered::default(),
            link: None,
            attached_at: None,
            is_of_several: false,
            has_left: false,
            flushed: false,
            clock_ahead_ms: 0,
            admitted: (Epoch(0), Seq::ZERO),
            noted: Ticket::default(),
        }
    }
}

/// Why the group does not acknowledge for now.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stall {
    /// The journal has no room.
    NoRoom(String),
    /// The disk is full, and another group uses the reserve to make room.
    Reserve,
    /// The fold is too far behind.
    FoldBehind,
    /// The journal has its size, and the window is not to be shortened.
    SizeMax,
}

#[derive(Debug, Default)]
struct FoldState {
    position: Position,
    /// What can be seen of the past: never less than is on record.
    oldest: Closed,
    /// A job runs.
    is_running: bool,
    /// End and cut of a job that has begun, now or in an earlier run that did not end it: the images may have any of
    /// the records before that place that are in that cut. On record before the images move.
    ahead: Option<(Position, CountVector)>,
    /// The same before the job that runs.
    was_ahead: Option<(Position, CountVector)>,
    /// The job that runs does not know of all that is void by now.
    is_outdated: bool,
    /// Folding from here under this cut leads nowhere.
    blocked: Option<(Position, CountVector)>,
    /// The last job began at this time, and the rate lets the next one begin at that.
    pace: (MonoNanos, MonoNanos),
    last_error: Option<String>,
    unread: folding::Unread,
    /// Who needs the images to stay where they are.
    holds: Holds,
    /// By segment: since when all before it is in every state.
    closed: BTreeMap<u64, Closed>,
    /// A place, with the state there, of which not all that is before it is in the cut yet.
    waypoint: Option<(Position, State)>,
    /// The wall clock as it was looked at last, in milliseconds since the Unix epoch.
    wall_ms: u64,
    /// The window was shortened.
    shortened: bool,
    /// An index is being written, or a segment verified or compressed.
    aside: bool,
    /// What of the images is damaged.
    damaged: Arc<ImageDamage>,
}

/// A group.
#[derive(Debug)]
pub struct Group<S: Storage> {
    storage: S,
    options: GroupOptions,
    manifest: Manifest,
    journal: Journal<S>,
    commit: GroupCommit,
    cut: CutTracker,
    slots: Vec<WriterSlot>,
    followers: Vec<Follower>,
    /// What resyncing writers may have known before their stops, as far as the others have said.
    floors: Vec<floor::Floor>,
    /// The same for members that have asked.
    asked: Vec<asked::Asked>,
    covering: Vec<covering::Covering>,
    /// The greatest of the answers that all members are to hear, also those that come later.
    for_everyone: Option<(CountVector, Hlc)>,
    last_sound: u64,
    /// The greatest time of any record that is not idle, or that a member waits for.
    frontier: Hlc,
    images: BTreeMap<DiskKey, Image<S::File>>,
    /// Kept while something reads disks as of now: digest checks, a recovered group's exports.
    overlay: Option<SharedOverlay<S::File>>,
    fold: FoldState,
    scrub: scrub::Scrub,
    compressing: compressing::Compressing,
    damage: damage::DamageState,
    grace: Grace,
    /// By which connection each member was attached last.
    attached_by: BTreeMap<String, ConnectionId>,
    /// Members that have given up their leases.
    given_up: BTreeSet<String>,
    /// Those that are about to, when all are.
    joint: switching::Joint,
    opened_at: MonoNanos,
    /// Judges what hosts say.
    plausible: Plausible,
    /// Both clocks when the group was opened: a step back of the wall clock since makes no time implausible.
    opened: Now,
    /// Messages and records that were refused because a number in them cannot be true.
    implausible: u64,
    /// When each host was heard last, since then.
    heard: BTreeMap<String, MonoNanos>,
    /// Until when each member held.
    held: held::HeldUntil,
    clock: HlcClock,
    arrival: arrival::ArrivalClock,
    stall: Option<Stall>,
    broken: Option<String>,
    /// The journal's state as far as it is durable.
    durable_state: State,
    /// The ticket of the last change of the group's shape.
    shaped_at: Ticket,
    /// The ticket of the last note on each member's policy, if it may not be durable.
    policies_noted: BTreeMap<String, Ticket>,
    /// The same of each member's machine.
    machines_noted: BTreeMap<String, Ticket>,
    pins: marks::Pins,
    /// A sync that runs.
    in_flight: Option<durable::InFlight>,
    /// Consequences once something is durable, by member.
    later: VecDeque<(String, Behind<durable::Later>)>,
    /// The recovery is durable, and receivers are its epoch's.
    promoted: bool,
    /// Members of the old primary that are told of it once it is.
    fenced: Vec<Link>,
    outputs: durable::Outputs,
    /// What the log must say.
    notices: Vec<String>,
}

/// An arrival as of which states certainly have everything before this time and in this cut.
fn arrived<S: Storage>(journal: &Journal<S>, at: Hlc, cut: &CountVector) -> u64 {
    let has_all = |(_, state): &(u64, &Arc<State>)| {
        state.newest_effective() > at && state.committed().covers(cut)
    };
    let later = journal.starts().find(has_all);
    later.map_or(journal.state().arrived_ms, |(_, state)| state.arrived_ms)
}

impl<S: Storage> Drop for Group<S> {
    fn drop(&mut self) {
        // Who opens it next folds as it likes.
        self.fold.holds.revoke_all();
        self.storage.end_use_of_reserve();
    }
}

impl<S: Storage> Group<S> {
    /// Opens a group that exists. `Ok(None)`: there is none.
    pub fn open(
        storage: S,
        now: Now,
        options: GroupOptions,
    ) -> Result<Option<(Self, Option<TornTail>)>, GroupError> {
        let Some(mut manifest) = Manifest::read(&storage)? else { return Ok(None) };
        let FoldPosition { position, oldest, folding: ahead, damaged } =
            fold::read_position(&storage)?;
        let quarantine = damage::DamageState::read(&storage)?.quarantine;
        damage::set_aside(&storage, &quarantine, position.segment)?;
        let mut found = past::Found::new(position);
        let opened = Journal::open_with(
            storage.clone(),
            JOURNAL_DIR,
            position,
            options.journal,
            |start, before, shown| found.shown(start, before, shown),
        )?;
        let past::Found { beyond, mut closed, .. } = found;
        // What was read was taken to follow what is in every cut. It is since then, not before.
        if let Some((at, cut)) = opened.closed.last_key_value().map(|(_, closed)| closed) {
            for of in closed.values_mut() {
                of.at = of.at.max(*at);
                of.cut.merge(cut);
                of.arrived_ms = of.arrived_ms.max(arrived(&opened.journal, *at, cut));
            }
        }
        let indexed = opened.closed.into_iter();
        closed.extend(indexed.map(|(index, (at, cut))| {
            let arrived_ms = arrived(&opened.journal, at, &cut);
            (index, Closed { at, cut, arrived_ms })
        }));
        let state = opened.journal.state();
        // A recovery's cut was closed, and what came after it depends on nothing else.
        let beyond = beyond.filter(|_| state.recovered().is_none());
        let cut = beyond.unwrap_or_else(|| CutTracker::new(state));
        if manifest.writers.len() < state.writers.len() {
            let reason = "the journal has more writers than it lists".to_owned();
            let file = "group.json".to_owned();
            return Err(FileError::Content { file, reason }.into());
        }
        // Writers that were being added when the server stopped: their hosts ask again.
        manifest.writers.truncate(state.writers.len());
        manifest.members.truncate(state.writers.len());
        let mut images = BTreeMap::new();
        for (writer, disk) in manifest.disks() {
            let path = manifest.image_path(writer, disk);
            // Larger: it was grown for an attachment that was not put on record.
            let image = Image::open(&storage, &path, disk.size_bytes)
                .map_err(|source| GroupError::Image { path: path.clone(), source })?;
            images.insert(DiskKey { writer, disk: disk.id }, image);
        }
        let damaged = Arc::new(damaged);
        let fold = FoldState { position, oldest, ahead, closed, damaged, ..FoldState::default() };
        let mut group =
            Self::assemble(storage, options, manifest, opened.journal, cut, images, fold, now)?;
        group.note_made_again(&opened.made_again);
        group.damage.wanted.extend(opened.damaged);
        Ok(Some((group, opened.torn)))
    }

    #[allow(clippy::too_many_arguments)] // The parts of the one thing that it makes.
    fn assemble(
        storage: S,
        options: GroupOptions,
        manifest: Manifest,
        journal: Journal<S>,
        cut: CutTracker,
        images: BTreeMap<DiskKey, Image<S::File>>,
        fold: FoldState,
        now: Now,
    ) -> Result<Self, GroupError> {
        let slots = manifest.writers.iter().map(|_| WriterSlot::empty()).collect();
        let damage = damage::DamageState::read(&storage)?;
        let (state, shaped_at) = (journal.state(), journal.durable());
        let mut group = Self {
            commit: GroupCommit::new(state.committed()),
            clock: HlcClock::after(state.last_hlc),
            arrival: arrival::ArrivalClock::new(now, journal.now_ms()),
            frontier: state.last_hlc,
            followers: Vec::new(),
            floors: Vec::new(),
            asked: Vec::new(),
            covering: Vec::new(),
            for_everyone: None,
            last_sound: 0,
            // A beacon may have been answered right before the server stopped.
            grace: Grace::new(now.mono, manifest.grace_ms),
            attached_by: BTreeMap::new(),
            given_up: BTreeSet::new(),
            joint: switching::Joint::default(),
            opened_at: now.mono,
            plausible: Plausible::of_hosts(options.clock_bound_ms, journal.state().last_hlc),
            opened: now,
            implausible: 0,
            heard: BTreeMap::new(),
            held: held::HeldUntil::default(),
            storage,
            options,
            manifest,
            journal,
            cut,
            slots,
            images,
            overlay: None,
            fold,
            scrub: scrub::Scrub::new(now.mono),
            compressing: compressing::Compressing::default(),
            damage,
            stall: None,
            broken: None,
            durable_state: State::default(),
            shaped_at: shaped_at.ticket(),
            policies_noted: BTreeMap::new(),
            machines_noted: BTreeMap::new(),
            pins: marks::Pins::default(),
            in_flight: None,
            later: VecDeque::new(),
            promoted: false,
            fenced: Vec::new(),
            outputs: durable::Outputs::default(),
            notices: Vec::new(),
        };
        group.tick(now);
        group.fold.shortened = group.is_shortened();
        group.restart_receivers();
        if group.journal.state().recovered().is_some() {
            group.promoted = true;
            group.overlay()?;
        }
        group.hold_pins();
        Ok(group)
    }

    /// It is this time. What is written next arrives now.
    pub fn tick(&mut self, now: Now) {
        self.fold.wall_ms = now.unix_ms;
        let now_ms = self.arrival.tick(now);
        self.journal.set_now(now_ms);
    }

    /// The clock by which people name points in time, in milliseconds since the Unix epoch.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        self.journal.now_ms()
    }

    /// The wall clock for judging times.
    fn judging_ms(&self, now: Now) -> u64 {
        let since_ms = now.mono.since_ns(self.opened.mono) / 1_000_000;
        now.unix_ms.max(self.opened.unix_ms.saturating_add(since_ms))
    }

    /// Receivers and C as the journal has them; all of it is durable.
    fn restart_receivers(&mut self) {
        let state = self.journal.state();
        self.commit = GroupCommit::new(state.committed());
        for (i, slot) in self.slots.iter_mut().enumerate() {
            let writer = WriterId(i as u16);
            let Some(member) = self.manifest.member(writer) else { continue };
            let of = &state.writers[i];
            let receiver = Receiver::new(writer, state.epoch, member.present_disks(), of.seq);
            if of.copy == CopyState::Resyncing {
                self.commit.hold(writer);
                self.commit.durable(writer, receiver.unsynced().synced());
            }
            slot.receiver = Some(receiver);
        }
        let (state, durable) = (self.journal.state().clone(), self.journal.durable());
        self.note_durable(state, &durable, None);
    }

    /// A recovery or a removal is durable: records may be void that stood in the fold's way, and that
    /// maps have.
    fn has_become_void(&mut self) {
        self.fold.blocked = None;
        self.fold.is_outdated = self.fold.is_running;
        self.journal.note_void();
    }

    /// What the log must say, in order.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Why the group must be dropped and opened again, if it must.
    #[must_use]
    pub fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// Whether records are taken now: neither stalled nor broken.
    #[must_use]
    pub fn accepts(&self) -> bool {
        self.stall.is_none() && self.takes_notes()
    }

    /// Whether a host's note can be staged, in a stall, too.
    fn takes_notes(&self) -> bool {
        self.broken.is_none() && self.journal.staged_bytes() < BATCH_TARGET_BYTES
    }

    /// By which connection each member was attached last.
    #[must_use]
    pub fn attached_by(&self) -> &BTreeMap<String, ConnectionId> {
        &self.attached_by
    }

    /// This server had the group open before, and it broke: connections that were older then have no say in this one either.
    pub fn was_attached_by(&mut self, attached_by: BTreeMap<String, ConnectionId>) {
        self.attached_by = attached_by;
    }

    /// The epoch in force.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.journal.state().epoch
    }

    /// What the group is.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What its journal leads to, with what is staged.
    #[must_use]
    pub fn state(&self) -> &journal::State {
        self.journal.state()
    }

    /// What is durable and whole for each writer by itself.
    #[must_use]
    pub fn committed(&self) -> &CountVector {
        self.commit.committed()
    }

    /// What a recovery would take now.
    #[must_use]
    pub fn cut(&self) -> &CountVector {
        self.cut.cut()
    }

    /// C as hosts are told it: the cut. Nothing waits for a writer that was removed.
    fn told(&self) -> CountVector {
        self.with_removed(self.cut.cut().clone())
    }

    /// The seqs that a host can have heard of by this record, and [`bounds::SEQ_OF_REMOVED`] as it was told it.
    fn heard_at_most(&self) -> CountVector {
        self.with_removed(self.journal.state().journaled())
    }

    fn with_removed(&self, mut vector: CountVector) -> CountVector {
        for (i, writer) in self.durable_state.writers.iter().enumerate() {
            if writer.standing == Standing::Removed {
                vector.raise(WriterId(i as u16), bounds::SEQ_OF_REMOVED);
            }
        }
        vector
    }

    /// The journal, for checkers.
    #[must_use]
    pub fn journal(&self) -> &Journal<S> {
        &self.journal
    }

    /// The storage.
    #[must_use]
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// One of its disks as of now, for reading.
    pub fn view(&mut self, key: DiskKey) -> Result<View<S::File>, GroupError> {
        let overlay = self.overlay()?;
        let image = self.images.get(&key).cloned().ok_or(GroupError::Unknown)?;
        let disk = self.manifest.disk(key.writer, key.disk).ok_or(GroupError::Unknown)?;
        Ok(View::new(key, disk.size_bytes, image, overlay))
    }

    /// The overlay of everything written to the journal and not folded, made if there is none.
    fn overlay(&mut self) -> Result<SharedOverlay<S::File>, GroupError> {
        let overlay = self.overlay_of_now()?;
        self.overlay = Some(Arc::clone(&overlay));
        Ok(overlay)
    }

    /// The same; one that is made is not kept, and hears of no record that comes later.
    fn overlay_of_now(&self) -> Result<SharedOverlay<S::File>, GroupError> {
        if let Some(overlay) = &self.overlay {
            return Ok(Arc::clone(overlay));
        }
        let (tail, base) = (self.journal.tail(), self.fold.position.segment);
        let overlay = Overlay::live(&tail, self.journal.state(), base)?
            .over(Arc::clone(&self.fold.damaged), self.damage.noticed.clone());
        Ok(Arc::new(RwLock::new(overlay)))
    }

    /// Segments have got maps or have gone to the images: the overlay need not keep them.
    fn refresh_overlay(&mut self) -> Result<(), JournalError> {
        let Some(overlay) = &self.overlay else { return Ok(()) };
        let (tail, base) = (self.journal.tail(), self.fold.position.segment);
        let mut overlay = overlay.write().unwrap_or_else(PoisonError::into_inner);
        overlay.set_damaged(Arc::clone(&self.fold.damaged));
        overlay.refresh(&tail, self.journal.state(), base)
    }

    /// Drops the overlay when nothing needs it any more.
    fn release_overlay(&mut self) {
        let is_whole =
            |of: &WriterState| of.copy == CopyState::Whole || of.standing == Standing::Removed;
        let is_recovered = self.journal.state().recovered().is_some();
        if self.durable_state.writers.iter().all(is_whole) && !is_recovered {
            self.overlay = None;
        }
    }

    /// Writes what is staged, as long as the reserve is there.
    fn write_staged(&mut self) -> Result<(), JournalError> {
        if self.journal.staged_bytes() > 0 {
            self.storage.keep_reserve().map_err(JournalError::Full)?;
        }
        self.write_staged_anyway()
    }

    /// The same, if need be in the reserve's room; the overlay learns where the records are.
    fn write_staged_anyway(&mut self) -> Result<(), JournalError> {
        let Self { journal, overlay, damage, .. } = self;
        let Some(overlay) = overlay else { return journal.write(|placed| damage.placed(&placed)) };
        let mut overlay = overlay.write().unwrap_or_else(PoisonError::into_inner);
        journal.write(|placed| {
            damage.placed(&placed);
            overlay.placed(&placed);
        })
    }

    /// The journal or an image failed: nothing is acknowledged any more.
    fn break_down(&mut self, error: &GroupError) {
        if self.broken.is_some() {
            return;
        }
        let reason = error.to_string();
        let kind = error.refusal_kind();
        let attached = self.slots.iter_mut().filter_map(|slot| slot.link.take());
        let followers = self.followers.drain(..).map(|follower| follower.link);
        let links: Vec<_> = attached.chain(followers).chain(self.fenced.drain(..)).collect();
        self.forget_what_waits();
        for link in links {
            self.refuse_now(link, kind, reason.clone());
        }
        self.fold.holds.revoke_all();
        self.broken = Some(reason);
    }

    /// Every link, of writers and of followers.
    fn all_links(&self) -> Vec<Link> {
        let writers = self.slots.iter().filter_map(|slot| slot.link);
        writers.chain(self.followers.iter().map(|follower| follower.link)).collect()
    }

    fn links(&self) -> impl Iterator<Item = (usize, Link)> + '_ {
        self.slots.iter().enumerate().filter_map(|(i, slot)| Some((i, slot.link?)))
    }

    fn stall(&mut self, stall: Stall) {
        if self.stall.as_ref() == Some(&stall) {
            return;
        }
        self.stall = Some(stall);
        self.tell_stall();
        self.tell_policies_on_record();
    }

    fn stall_reason(&self) -> Option<String> {
        self.stall.as_ref().map(|stall| match stall {
            Stall::NoRoom(error) => {
                let held = self.fold.holds.count();
                let held = match self.options.retention.window_ms > 0 && held > 0 {
                    true => format!(" ({held} views, pins or exports hold points in time)"),
                    false => String::new(),
                };
                format!("{error}: make room at the backup{held}")
            }
            Stall::Reserve => {
                let what = "the backup's disk is full, and another group is folded to make room";
                what.to_owned()
            }
            Stall::FoldBehind => {
                let error = self.fold.last_error.as_ref();
                let why = error.map(|e| format!(" ({e})")).unwrap_or_default();
                let max = self.options.unfolded_max_bytes >> 20;
                format!("{max} MiB of the journal wait to be folded into the disk images{why}")
            }
            Stall::SizeMax => {
                let max = self.options.retention.size_max_bytes >> 20;
                format!(
                    "the journal has reached retention.size_max ({max} MiB) and the window is not \
                     to be shortened ({} views, pins or exports hold points): make it larger, or \
                     the window smaller",
                    self.fold.holds.count()
                )
            }
        })
    }

    fn tell_stall(&mut self) {
        let reason = self.stall_reason();
        for link in self.all_links() {
            self.say_now(link, Immediate::Stalled(reason.clone()));
        }
    }
}
