//! The activity log: a small durable map of the extents in which the two sites may differ, so that
//! after a crash of daemon or host only those are compared.
//!
//! Sans-I/O: requests, acknowledgements and ends of I/O go in, [`Action`]s come out.
//!
//! Invariant: where the local disk and the backup differ, now or after a crash at any moment, the
//! map on stable storage has the extent, or says that everything may differ. So
//! - a request is admitted (its record sent, its local write started) only when the log has its
//!   extents: **both** could be the one that survives;
//! - an extent leaves the map only when no request is under way in it, the backup has every record
//!   that was given out until then, **and** the local disk was flushed since: a power loss
//!   takes back what was not, and the backup has it;
//! - what the run before left in the map stays until it has been compared, and so does what is written before the
//!   stream begins ([`ActivityLog::begin_unrecorded`]).
//!
//! ```text
//!                      copy complete, backup has caught up
//!   Everything ───────────────────────────────────────────► Sealing ──► Mapped
//!     ▲   ▲                                                    │          │
//!     │   └──── no slot without waiting for the backup ────────┴──────────┤
//!     │         a failed local write or flush, a full copy                │
//!     └───────────────────────────────────────────────────────────────────┘
//!   any ── the log's own file fails ──► Discarding ──► Off (nothing is on disk: all is compared)
//! ```
//!
//! In `Everything` nothing waits and nothing is written. It is entered, by one transaction, instead
//! of letting guests wait for the backup (rule 10: a loud degrade). In `Sealing` requests are
//! admitted as in `Mapped` while what was admitted before is waited for; then one transaction
//! says that the map is all there is. A map that was too small is tried again with hysteresis
//! ([`trial`]).
//!
//! Nothing waits for a timer: what asks for a slot while a transaction is being written is in the
//! next one. Hot extents stay in the map, the coldest is given up for a new one.
//!
//! Source: DRBD's activity log (DRBD user guide, "The activity log"; Reisner and Ellenberg 2005),
//! with the local flush and the state `Everything` added; PacificA 3.3 for what a replica
//! has to reconcile.

mod admission;
mod comparing;
pub mod format;
pub mod geometry;
mod opening;
pub mod place;
mod sealing;
pub mod table;
#[cfg(test)]
mod tests;
pub mod trial;

pub use comparing::{Attachment, Compare};
pub use format::{Found, Identity, Unusable};
pub use geometry::{BLOCK_BYTES, Geometry};
pub use opening::{FileChange, LastEnd, Opening, open};

use crate::sequencer::Extent;
use admission::{Hold, Placed, Waiting};
use comparing::Before;
use format::Head;
use geometry::{Entry, UPDATES_MAX};
use sealing::Sealing;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use table::Table;
use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, MonoNanos, Seq};
use tidelock_protocol::message::LogAge;
use trial::{Calm, Trial};

/// What is to be done, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// The request may be admitted.
    Go(u64),
    /// Write this block, durably; then call [`ActivityLog::written`].
    Write {
        /// Where, in bytes from the beginning of the file.
        offset: u64,
        /// [`BLOCK_BYTES`] bytes.
        block: Vec<u8>,
    },
    /// Flush a local disk; then call [`ActivityLog::flush_ended`] with this number.
    Flush {
        /// The disk.
        disk: DiskId,
        /// The number.
        number: u64,
    },
    /// Remove the file, durably; then call [`ActivityLog::discarded`].
    Discard,
}

/// Why everything may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The whole disks are being copied or compared.
    Copy,
    /// The map was full of what the backup does not have yet.
    Overflow,
    /// The local disk failed a write and could not be read back.
    DiskFailed,
    /// The local disk failed a flush: what it says about durability is not believed in this run.
    FlushFailed,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Why::Copy => "the whole disks are being compared or copied",
            Why::Overflow => "more extents than the map has slots wait for the backup",
            Why::DiskFailed => "the local disk failed a write",
            Why::FlushFailed => "the local disk failed a flush",
        })
    }
}

/// How the log stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No log is kept: not configured, or its file failed.
    Off,
    /// Its file failed, and is not removed yet: writes wait.
    Failing,
    /// After a crash everything would be compared.
    Everything(Why),
    /// After a crash the map would be compared.
    Mapped,
}

#[derive(Debug)]
enum State {
    Off,
    Discarding,
    Everything(Why),
    Sealing(Sealing),
    Mapped,
}

/// Numbers for status and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests whose extents were in the map.
    pub hits: u64,
    /// Requests that waited for the log's write.
    pub misses: u64,
    /// Transactions written.
    pub transactions: u64,
    /// How often the map was given up for "everything".
    pub overflows: u64,
}

#[derive(Debug)]
struct Writing {
    everything: bool,
    slots: Vec<(u32, Option<Entry>)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct DiskFlushes {
    begun: u64,
    done: u64,
}

/// The activity log of one member.
#[derive(Debug)]
pub struct ActivityLog {
    geometry: Geometry,
    id: u64,
    state: State,
    table: Table,
    held: HashMap<u64, Hold>,
    /// Of those, how many use no slot that they have, and how many have slots.
    untracked: u64,
    with_slots: u64,
    /// In order of arrival. All that came before those that are here has its slots.
    waiting: VecDeque<Waiting>,
    /// By the order in which they got their slots.
    placed: BTreeMap<u64, Placed>,
    next_placed: u64,
    /// Who waits for the log to have a slot.
    awaited: HashMap<u32, SmallVec<[u64; 2]>>,
    /// Slots that the log on disk does not have as they are.
    queue: VecDeque<u32>,
    head: Head,
    head_changed: bool,
    writing: Option<Writing>,
    /// True if the last transaction on stable storage says that everything may differ.
    everything_durable: bool,
    /// [`Head::age`] of the last transaction on stable storage.
    age_durable: u64,
    disks: Vec<DiskFlushes>,
    disk_bytes: Vec<u64>,
    last_seq: Seq,
    durable: Seq,
    /// No map before the backup has this.
    retry_from: Seq,
    /// As of the last step.
    now: MonoNanos,
    calm: Calm,
    /// While everything may differ because the map was too small.
    trial: Option<Trial>,
    /// Slots given to something else since the last flush of its own.
    taken: u32,
    uncompared: u32,
    uncompared_wide: Vec<u32>,
    before: Option<Before>,
    /// Why there is nothing to go by, for the resync that follows.
    unusable: Option<String>,
    /// What is admitted may have no record.
    unrecorded: bool,
    /// The stream goes on, and the backup has not been asked yet whether it takes that.
    goes_on_after: Option<Seq>,
    actions: VecDeque<Action>,
    counts: Counts,
}

impl ActivityLog {
    /// No log: everything is admitted at once, and everything is compared after a crash.
    #[must_use]
    pub fn off() -> Self {
        let geometry = Geometry { extent_bytes: 512, slots: 1, context: 1 };
        let head = Head {
            number: 0,
            incarnation: Incarnation(0),
            confirmed: Incarnation(0),
            epoch: Epoch(0),
            covered: Seq::ZERO,
            everything: true,
            age: 0,
        };
        Self { state: State::Off, ..Self::on(geometry, 0, head, Vec::new()) }
    }

    fn on(geometry: Geometry, id: u64, head: Head, disk_bytes: Vec<u64>) -> Self {
        Self {
            geometry,
            id,
            state: if head.everything { State::Everything(Why::Copy) } else { State::Mapped },
            table: Table::new(geometry, disk_bytes.clone()),
            held: HashMap::new(),
            untracked: 0,
            with_slots: 0,
            waiting: VecDeque::new(),
            placed: BTreeMap::new(),
            next_placed: 0,
            awaited: HashMap::new(),
            queue: VecDeque::new(),
            head,
            head_changed: false,
            writing: None,
            everything_durable: head.everything,
            age_durable: head.age,
            disks: vec![DiskFlushes::default(); disk_bytes.len()],
            disk_bytes,
            last_seq: Seq::ZERO,
            durable: head.covered,
            retry_from: Seq::ZERO,
            now: MonoNanos(0),
            calm: Calm::default(),
            trial: None,
            taken: 0,
            uncompared: 0,
            uncompared_wide: Vec::new(),
            before: None,
            unusable: None,
            unrecorded: false,
            goes_on_after: None,
            actions: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    // ---- what others say

    /// The backup has everything up to here.
    pub fn committed(&mut self, durable: Seq) {
        if durable > self.durable {
            self.durable = durable;
        }
    }

    /// A flush of a local disk begins now. What the guest asks for counts, too.
    pub fn flush_begins(&mut self, disk: DiskId) -> u64 {
        let Some(of) = self.disks.get_mut(usize::from(disk.0)) else { return 0 };
        of.begun += 1;
        of.begun
    }

    /// It has ended.
    pub fn flush_ended(&mut self, disk: DiskId, number: u64, ok: bool) {
        let Some(of) = self.disks.get_mut(usize::from(disk.0)) else { return };
        if ok {
            of.done = of.done.max(number);
            return self.pump();
        }
        self.give_up_map(Why::FlushFailed);
    }

    fn flush(&mut self, nth: usize) {
        let disk = DiskId(nth as u16);
        let number = self.flush_begins(disk);
        if self.disk_bytes[nth] == 0 {
            // It was removed: nothing is written to it.
            self.disks[nth].done = number;
            return;
        }
        self.actions.push_back(Action::Flush { disk, number });
    }

    /// The local disk failed a write, and what it holds there is not known: until it has been
    /// copied the sites may differ, whatever the map says.
    pub fn suspect(&mut self) {
        self.give_up_map(Why::DiskFailed);
    }

    // ---- everything may differ

    fn overflow(&mut self) {
        self.counts.overflows += 1;
        self.calm.overflows(self.now);
        self.give_up_map(Why::Overflow);
    }

    fn give_up_map(&mut self, why: Why) {
        if matches!(self.state, State::Off | State::Discarding) {
            return;
        }
        let for_good = matches!(self.state, State::Everything(Why::FlushFailed));
        if !for_good {
            self.state = State::Everything(why);
        }
        if why == Why::Copy {
            self.settle_all();
        }
        self.retry_from = self.last_seq;
        self.trial = None;
        self.pump();
    }

    // ---- the file

    fn says_everything(&self) -> bool {
        match &self.state {
            State::Off | State::Discarding | State::Everything(_) => true,
            State::Sealing(sealing) => !sealing.is_ready(),
            State::Mapped => false,
        }
    }

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        if let Some(action) = self.actions.pop_front() {
            return Some(action);
        }
        if self.writing.is_some() || matches!(self.state, State::Off | State::Discarding) {
            return None;
        }
        let everything = self.says_everything();
        if self.queue.is_empty() && !self.head_changed && everything == self.head.everything {
            return None;
        }
        Some(self.begin_transaction(everything))
    }

    fn begin_transaction(&mut self, everything: bool) -> Action {
        let count = self.queue.len().min(UPDATES_MAX);
        // What is not in this transaction must not be missing in a map that is all there is.
        let everything = everything || (self.head.everything && count < self.queue.len());
        let slots: Vec<_> = self
            .queue
            .drain(..count)
            .map(|slot| {
                let of = self.table.slot_mut(slot);
                of.queued = false;
                (slot, of.entry)
            })
            .collect();
        self.head.number += 1;
        self.head.everything = everything;
        if self.head.confirmed == self.head.incarnation {
            self.head.age = self.head.number;
        }
        self.head.covered = self.durable;
        self.head_changed = false;
        let table = &self.table;
        let block = format::transaction(self.id, &self.geometry, &self.head, &slots, |slot| {
            table.slot(slot).entry
        });
        self.writing = Some(Writing { everything, slots });
        Action::Write { offset: self.geometry.place_of(self.head.number), block }
    }

    /// The write of a block has ended.
    pub fn written(&mut self, ok: bool) {
        let writing = self.writing.take().expect("a transaction under way");
        if !ok {
            // It may be there or not, and so may what it has overwritten.
            self.state = State::Discarding;
            self.trial = None;
            self.actions.push_back(Action::Discard);
            return;
        }
        self.counts.transactions += 1;
        self.age_durable = self.head.age;
        self.everything_durable = writing.everything;
        // In the order in which they came.
        let mut whole = BTreeSet::new();
        for (slot, entry) in writing.slots {
            let of = self.table.slot_mut(slot);
            if of.entry != entry || of.queued {
                continue;
            }
            of.logged = true;
            for number in self.awaited.remove(&slot).unwrap_or_default() {
                let placed = self.placed.get_mut(&number).expect("it waits for the slot");
                placed.missing -= 1;
                if placed.missing == 0 {
                    whole.insert(number);
                }
            }
        }
        for number in whole {
            let placed = self.placed.remove(&number).expect("just seen");
            self.let_go(placed);
        }
        let is_sealed = matches!(&self.state, State::Sealing(sealing) if sealing.is_ready());
        if !writing.everything && is_sealed {
            self.state = State::Mapped;
        }
        self.pump();
    }

    /// The file was removed, or could not be: then it is to be tried again.
    pub fn discarded(&mut self, ok: bool) {
        if ok {
            self.state = State::Off;
            self.let_all_go();
        }
    }

    /// Time has passed: what failed is tried again.
    pub fn retry(&mut self) {
        if matches!(self.state, State::Discarding) {
            self.actions.push_back(Action::Discard);
        }
    }

    /// The age of the log on stable storage, by what runs wrote that had attached. The backup is told before it gets a record
    /// that was admitted under it: a log that is older was restored.
    #[must_use]
    pub fn age(&self) -> LogAge {
        LogAge { file: self.id, number: self.age_durable }
    }

    /// Whether what was found is gone by.
    #[must_use]
    pub fn is_believed(&self) -> bool {
        self.unusable.is_none()
    }

    /// The run that it is of.
    #[must_use]
    pub fn confirmed(&self) -> Option<Incarnation> {
        Some(self.head.confirmed).filter(|confirmed| *confirmed != Incarnation(0))
    }

    /// Rejects the log that was found on disk, for a reason from outside the log: the next comparison reads whole disks
    /// and names the reason.
    pub fn must_not_be_believed(&mut self, why: String) {
        self.unusable = Some(why);
    }

    // ---- for status

    /// How it stands.
    #[must_use]
    pub fn standing(&self) -> Standing {
        match &self.state {
            State::Off => Standing::Off,
            State::Discarding => Standing::Failing,
            State::Everything(why) => Standing::Everything(*why),
            State::Sealing(sealing) => Standing::Everything(sealing.why()),
            State::Mapped => Standing::Mapped,
        }
    }

    /// Extents' entries in the map, and the bytes that a resync would compare after a crash now.
    #[must_use]
    pub fn exposure(&self) -> (u32, u64) {
        match self.standing() {
            Standing::Mapped => (self.table.used(), self.table.bytes()),
            _ => (self.table.used(), self.disk_bytes.iter().sum()),
        }
    }

    /// Numbers so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Requests that wait for it.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.placed.len() + self.waiting.len()
    }

    /// The sizes in force.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether something only goes on when time passes.
    #[must_use]
    pub fn needs_tick(&self) -> bool {
        matches!(self.state, State::Discarding) || self.trial.is_some()
    }

    /// What the map stands for, as ranges.
    #[must_use]
    pub fn ranges(&self) -> Vec<Extent> {
        self.table.ranges()
    }
}
