//! What a journal amounts to: the state that its entries lead to, one after the other.
//!
//! Invariant: [`State::apply_record`] and [`State::apply_note`] accept exactly what the rules
//! allow: seqs without a gap (rule 3), the epoch in force only (rule 4), a copy state that follows
//! from the one before it. The same functions run when entries are written and when a journal is
//! opened, so a journal that was written can be opened.

use super::format::COUNT_MAX;
use super::marks::{MARKS_MAX_BYTES, Mark, Marks};
use super::members::{self, KeptMachine, MemberFacts, MemberPolicy};
use super::note::{EpochStart, NOTE_BODY_MAX_BYTES, Note, Shape};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use thiserror::Error;
use tidelock_planted::Bug;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::limits::{SHARDS_MAX, WRITERS_MAX};
use tidelock_protocol::message::{CopyState, Form, LogAge};
use tidelock_protocol::record::{Body, Record, Role};
use tidelock_protocol::vector::CountVector;
use tidelock_shard::{LogIndex, LogPoint};

/// Most epoch starts that are kept: one for each recovery of the group.
const EPOCHS_MAX: usize = 256;

/// Most bytes of a writer in an epoch start: two entries of count vectors and an index.
const WRITER_OF_EPOCH_MAX_BYTES: usize = 2 * (1 + 9) + 1;
/// Most bytes of a writer's own state, and of its host's activity log.
const WRITER_MAX_BYTES: usize = 64;

/// Most bytes of a shard: the end of its log, and the stamp there.
const SHARD_MAX_BYTES: usize = 2 * 10;

const _: () = assert!(
    EPOCHS_MAX * (WRITERS_MAX as usize * WRITER_OF_EPOCH_MAX_BYTES + 32)
        + WRITERS_MAX as usize * WRITER_MAX_BYTES
        + SHARDS_MAX as usize * SHARD_MAX_BYTES
        + members::MEMBERS_MAX_BYTES
        + MARKS_MAX_BYTES
        + 64
        <= NOTE_BODY_MAX_BYTES,
    "every state fits into a checkpoint"
);

/// What a writer is to its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// The group cannot be recovered without it.
    #[default]
    Member,
    /// It was added to a group that could be recovered; until its disks are whole the group still
    /// can be, without it.
    Joining,
    /// It was removed: nothing waits for it, and it is not recovered. What it wrote stays.
    Removed,
}

/// One writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterState {
    /// The last seq in the journal.
    pub seq: Seq,
    /// Up to where its disks are a state that the primary had: `seq`, except during a resync.
    pub committed: Seq,
    /// How much of its disks is here.
    pub copy: CopyState,
    /// The HLC of its last record.
    pub hlc: Hlc,
    /// The HLC of the record at `committed`.
    pub committed_hlc: Hlc,
    /// What it is to its group.
    pub standing: Standing,
}

impl WriterState {
    const NEW: Self = Self {
        seq: Seq::ZERO,
        committed: Seq::ZERO,
        copy: CopyState::Empty,
        hlc: Hlc(0),
        committed_hlc: Hlc(0),
        standing: Standing::Member,
    };

    /// It was removed in the middle of a resync, which has no end then: what is after `committed` is
    /// in no cut, and never will be.
    #[must_use]
    pub fn is_removed_in_resync(&self) -> bool {
        self.standing == Standing::Removed && self.copy == CopyState::Resyncing
    }
}

/// The state after some entry of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The epoch in force; 0 before the group's first host was granted one.
    pub epoch: Epoch,
    /// By writer index.
    pub writers: Vec<WriterState>,
    /// The greatest HLC of any record.
    pub last_hlc: Hlc,
    /// The recoveries so far, oldest first. Not empty: this site is the primary now.
    pub recoveries: Vec<EpochStart>,
    /// How records say what they depend on.
    pub form: Form,
    /// Every record from here on counts as later than this: since the group's shape or its epoch
    /// changed.
    pub barrier: Hlc,
    /// When the last batch so far arrived here, in milliseconds since the Unix epoch.
    pub arrived_ms: u64,
    /// How far the activity log of each writer's host is, by index; none for those after the last.
    pub logs: Vec<LogAge>,
    /// Facts on members by name. Shared by the states between which none of it has changed.
    pub members: Arc<MemberFacts>,
    /// Bookmarks and pins. Shared in the same way.
    pub marks: Arc<Marks>,
    /// The end of each shard's log, with the effective stamp there. Empty: these are disks, and no store.
    pub shards: Vec<LogPoint>,
}

/// Why an entry cannot follow.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StateError {
    /// Rule 3.
    #[error("record {found} of writer {writer} stands where {expected} must")]
    Gap {
        /// The host.
        writer: WriterId,
        /// The next one.
        expected: Seq,
        /// What stands there.
        found: Seq,
    },
    /// Rule 4.
    #[error("a record of epoch {found} stands in epoch {epoch}")]
    Epoch {
        /// In force.
        epoch: Epoch,
        /// Of the record.
        found: Epoch,
    },
    /// A writer that the group does not have.
    #[error("writer {0} is not in this group")]
    Writer(WriterId),
    /// A checkpoint that is not the state that the entries before it lead to.
    #[error("the checkpoint is not what the entries before it lead to")]
    Checkpoint,
    /// A copy state that cannot follow.
    #[error("copy state {to:?} of writer {writer} cannot follow {from:?}")]
    Copy {
        /// The host.
        writer: WriterId,
        /// Before.
        from: CopyState,
        /// After.
        to: CopyState,
    },
    /// An epoch start that does not raise the epoch, or whose cut is beyond what is committed.
    #[error("epoch {to} with its cut cannot follow epoch {from}")]
    EpochStart {
        /// Before.
        from: Epoch,
        /// After.
        to: Epoch,
    },
    /// Rule 13: the record of a shard's log does not go on where that ends, or its stamp falls.
    #[error("entry {found:?} of shard {shard} cannot follow {last:?}")]
    Shard {
        /// The shard.
        shard: u16,
        /// The end of its log.
        last: LogPoint,
        /// The end of the entry.
        found: LogPoint,
    },
    /// A shard that the store does not have, or a store where there must be none.
    #[error("there is no shard {0}")]
    NoShard(u16),
    /// A number of shards that cannot follow.
    #[error("a store has at least as many shards as before, and at most {SHARDS_MAX}")]
    Shards,
    /// A change of the group's members that cannot follow.
    #[error("the group's members cannot change like this: {0}")]
    Shape(&'static str),
    /// A fact on a member by name has no room in a checkpoint, or its name is none.
    #[error("what is known of member {member:?} is out of bounds: {reason}")]
    Member {
        /// The member, as it is called.
        member: String,
        /// The bound.
        reason: &'static str,
    },
    /// A mark has no room in a checkpoint, or its name is none.
    #[error("bookmarks and pins would be larger than {} KiB together, or one has no proper name", MARKS_MAX_BYTES >> 10)]
    Marks,
}

impl State {
    /// A group with this many writers and nothing of their disks.
    #[must_use]
    pub fn new(writers: usize) -> Self {
        Self { epoch: Epoch(1), writers: vec![WriterState::NEW; writers], ..Self::default() }
    }

    /// A store with this many shards and nothing of their logs. All entries are of one writer: this site counts them as
    /// they come.
    #[must_use]
    pub fn of_store(shards: u16) -> Self {
        Self { shards: vec![LogPoint::default(); shards.into()], ..Self::new(1) }
    }

    /// The watermark of a store: the least stamp that every shard's log has reached.
    #[must_use]
    pub fn watermark(&self) -> Hlc {
        self.shards.iter().map(|shard| shard.stamp).min().unwrap_or_default()
    }

    /// Whether counting on from here cannot overflow. A checkpoint beyond is not believed.
    pub(super) fn is_in_bounds(&self) -> bool {
        self.epoch.0 <= COUNT_MAX
            && self.writers.len() <= WRITERS_MAX.into()
            && self.writers.iter().all(|writer| writer.seq.0 <= COUNT_MAX)
            && self.recoveries.len() <= EPOCHS_MAX
            && self.recoveries.iter().all(|of| members::are_exposures_in_bounds(&of.exposed))
            && self.recoveries.iter().rev().skip(1).all(|of| of.exposed.is_empty())
            && self.logs.len() <= self.writers.len()
            && self.members.is_in_bounds()
            && self.shards.len() <= SHARDS_MAX.into()
    }

    /// This state without its facts on members and its marks: as it is in waypoints, from which points in time are told.
    #[must_use]
    pub fn without_names(self) -> Self {
        Self { members: Arc::default(), marks: Arc::default(), ..self }
    }

    /// A walk that has begun at a waypoint comes to a checkpoint.
    pub fn take_names(&mut self, checkpoint: &State) {
        self.members = Arc::clone(&checkpoint.members);
        self.marks = Arc::clone(&checkpoint.marks);
    }

    /// Keeps what is known of members, and marks, once, if another state has the same.
    pub(super) fn share(&mut self, other: &State) {
        if self.members == other.members {
            self.members = Arc::clone(&other.members);
        }
        if self.marks == other.marks {
            self.marks = Arc::clone(&other.marks);
        }
    }

    /// Age of the activity log of a writer's host.
    #[must_use]
    pub fn log_of(&self, writer: WriterId) -> LogAge {
        self.logs.get(writer.index()).copied().unwrap_or_default()
    }

    /// A writer of the group.
    #[must_use]
    pub fn writer(&self, writer: WriterId) -> Option<&WriterState> {
        self.writers.get(writer.index())
    }

    /// C.
    #[must_use]
    pub fn committed(&self) -> CountVector {
        self.vector(|w| w.committed)
    }

    /// What is in the journal.
    #[must_use]
    pub fn journaled(&self) -> CountVector {
        self.vector(|w| w.seq)
    }

    fn vector(&self, entry: impl Fn(&WriterState) -> Seq) -> CountVector {
        let entries = self.writers.iter().enumerate();
        entries.map(|(i, w)| (WriterId(i as u16), entry(w))).collect()
    }

    /// The recovery that made this site the primary, if it is.
    #[must_use]
    pub fn recovered(&self) -> Option<&EpochStart> {
        self.recoveries.last()
    }

    /// Whether a recovery after an epoch has left out some of a cut of that epoch.
    #[must_use]
    pub fn leaves_out(&self, epoch: Epoch, cut: &CountVector) -> bool {
        let mut later = self.recoveries.iter().rev().take_while(|start| start.epoch > epoch);
        later.any(|start| !start.cut.covers(cut))
    }

    /// Whether a record was cut off by a later recovery, or is of a resync that its writer's removal
    /// has ended. It stays in the journal and counts for nothing.
    #[must_use]
    pub fn is_void(&self, record: &Record<impl Body>) -> bool {
        record.seq > self.last_that_counts(record.writer, record.epoch)
    }

    /// Of a writer's records of an epoch those after this seq are void.
    #[must_use]
    pub fn last_that_counts(&self, writer: WriterId, epoch: Epoch) -> Seq {
        let later = self.recoveries.iter().rev().take_while(|r| r.epoch > epoch);
        let last = later.map(|r| r.cut.get(writer)).min().unwrap_or(Seq(u64::MAX));
        let ended = self.writer(writer).filter(|of| of.is_removed_in_resync());
        ended.map_or(last, |of| last.min(of.committed))
    }

    /// Whether a cut has all that counts of what was in the journal in some epoch.
    #[must_use]
    pub fn is_all_in(&self, cut: &CountVector, journaled: &CountVector, epoch: Epoch) -> bool {
        let is_in = |(writer, seq): (WriterId, Seq)| {
            seq.min(self.last_that_counts(writer, epoch)) <= cut.get(writer)
        };
        journaled.entries().all(is_in)
    }

    /// The next entry is this record.
    pub fn apply_record(&mut self, record: &Record<impl Body>) -> Result<(), StateError> {
        if record.epoch != self.epoch && !tidelock_planted::is(Bug::OldEpochAccepted) {
            return Err(StateError::Epoch { epoch: self.epoch, found: record.epoch });
        }
        let writer = record.writer;
        let Some(state) = self.writers.get_mut(writer.index()) else {
            return Err(StateError::Writer(writer));
        };
        let expected = state.seq.next();
        if record.seq != expected && !tidelock_planted::is(Bug::AckOverGap) {
            return Err(StateError::Gap { writer, expected, found: record.seq });
        }
        if !self.shards.is_empty() {
            advance(&mut self.shards, record)?;
        }
        state.seq = record.seq;
        state.hlc = record.hlc;
        if record.role() == Role::CopyDone {
            state.copy = CopyState::Whole;
            if state.standing == Standing::Joining {
                state.standing = Standing::Member;
            }
        } else if state.copy == CopyState::Empty {
            state.copy = CopyState::Partial;
        }
        if state.copy != CopyState::Resyncing {
            state.committed = state.seq;
            state.committed_hlc = state.hlc;
        }
        self.last_hlc = self.last_hlc.max(record.hlc);
        Ok(())
    }

    /// The next entry is this note.
    pub fn apply_note(&mut self, note: &Note) -> Result<(), StateError> {
        match note {
            Note::Checkpoint(state) if !self.equals(state) => Err(StateError::Checkpoint),
            Note::Checkpoint(state) => {
                // The same, wherever the journal begins.
                self.barrier = state.barrier;
                self.arrived_ms = state.arrived_ms;
                Ok(())
            }
            Note::CleanEnd => Ok(()),
            Note::Copy { writer, copy } => self.apply_copy(*writer, *copy),
            Note::EpochStart(start) => self.apply_epoch_start(start),
            Note::Shape(shape) => self.apply_shape(shape),
            Note::Log { writer, age } => {
                let at = writer.index();
                if at >= self.writers.len() {
                    return Err(StateError::Writer(*writer));
                }
                self.logs.resize(self.logs.len().max(at + 1), LogAge::default());
                self.logs[at] = *age;
                Ok(())
            }
            Note::Policy { member, policy } => self.apply_policy(member, policy.as_ref()),
            Note::Machine { member, machine } => self.apply_machine(member, machine.as_ref()),
            Note::Mark { name, mark } => self.apply_mark(name, mark.as_ref()),
            Note::Shards(shards) => self.apply_shards(*shards),
        }
    }

    /// Entries that a new shard has so far are in no cut, so its log is as far as the others': else it would take the
    /// watermark back.
    fn apply_shards(&mut self, shards: u16) -> Result<(), StateError> {
        let is_store = !self.shards.is_empty();
        if !is_store || usize::from(shards) < self.shards.len() || shards > SHARDS_MAX {
            return Err(StateError::Shards);
        }
        let new = LogPoint { index: LogIndex(0), stamp: self.watermark() };
        self.shards.resize(shards.into(), new);
        Ok(())
    }

    fn apply_policy(
        &mut self,
        member: &str,
        policy: Option<&MemberPolicy>,
    ) -> Result<(), StateError> {
        if policy.is_some() && !members::fits(&self.members.policies, member) {
            let (member, reason) = (member.to_owned(), "it is no name, or there are too many");
            return Err(StateError::Member { member, reason });
        }
        let policies = &mut Arc::make_mut(&mut self.members).policies;
        match policy {
            Some(policy) => drop(policies.insert(member.to_owned(), policy.clone())),
            None => drop(policies.remove(member)),
        }
        Ok(())
    }

    fn apply_machine(
        &mut self,
        member: &str,
        machine: Option<&KeptMachine>,
    ) -> Result<(), StateError> {
        let mut machines = self.members.machines.clone();
        let is_named = machine.is_none() || members::fits(&machines, member);
        match machine {
            Some(machine) => drop(machines.insert(member.to_owned(), machine.clone())),
            None => drop(machines.remove(member)),
        }
        if !is_named || !members::are_machines_in_bounds(&machines) {
            let reason = "machine descriptions are too many, or too large together";
            return Err(StateError::Member { member: member.to_owned(), reason });
        }
        Arc::make_mut(&mut self.members).machines = machines;
        Ok(())
    }

    fn apply_mark(&mut self, name: &str, mark: Option<&Mark>) -> Result<(), StateError> {
        let marks = Arc::make_mut(&mut self.marks);
        match mark {
            Some(mark) => marks.set(name, mark)?,
            None => marks.remove(name),
        }
        Ok(())
    }

    fn apply_copy(&mut self, writer: WriterId, to: CopyState) -> Result<(), StateError> {
        let Some(state) = self.writers.get_mut(writer.index()) else {
            return Err(StateError::Writer(writer));
        };
        let from = state.copy;
        // Everything else follows from records. The first: by a run of which nothing has arrived, or by `seed`.
        match (from, to) {
            (CopyState::Empty, CopyState::Partial | CopyState::Seeded)
            | (CopyState::Whole, CopyState::Resyncing) => {}
            _ => return Err(StateError::Copy { writer, from, to }),
        }
        state.copy = to;
        Ok(())
    }

    fn apply_epoch_start(&mut self, start: &EpochStart) -> Result<(), StateError> {
        let refused = StateError::EpochStart { from: self.epoch, to: start.epoch };
        if start.epoch <= self.epoch
            || !self.committed().covers(&start.cut)
            || self.recoveries.len() >= EPOCHS_MAX
            || !members::are_exposures_in_bounds(&start.exposed)
        {
            return Err(refused);
        }
        self.epoch = start.epoch;
        for (i, state) in self.writers.iter_mut().enumerate() {
            let cut = start.cut.get(WriterId(i as u16));
            // What is cut off never was: the next record takes its seq.
            (state.seq, state.committed, state.hlc) = (cut, cut, state.committed_hlc);
            let is_as_seeded = state.copy == CopyState::Seeded && cut == Seq::ZERO;
            if state.copy == CopyState::Resyncing || is_as_seeded {
                state.copy = CopyState::Whole;
            }
        }
        // Nobody asks what earlier recoveries have said.
        self.recoveries.iter_mut().for_each(|of| of.exposed.clear());
        self.recoveries.push(start.clone());
        self.barrier = self.newest_effective();
        Ok(())
    }
}

/// The next entry of a shard's log.
fn advance(shards: &mut [LogPoint], record: &Record<impl Body>) -> Result<(), StateError> {
    let fields = record.body.fields();
    let shard = fields.object;
    let last = shards.get_mut(usize::from(shard)).ok_or(StateError::NoShard(shard))?;
    let found = LogPoint { index: LogIndex(fields.offset), stamp: record.hlc };
    if record.role() != Role::Change || !tidelock_shard::follows(*last, &fields, found) {
        return Err(StateError::Shard { shard, last: *last, found });
    }
    *last = found;
    Ok(())
}

impl State {
    /// No record so far counts as later than this.
    #[must_use]
    pub fn newest_effective(&self) -> Hlc {
        self.last_hlc.max(Hlc(self.barrier.0.saturating_add(1)))
    }

    /// True if a checkpoint stands for this state.
    fn equals(&self, checkpoint: &State) -> bool {
        // When it arrived is not what entries lead to.
        State { arrived_ms: checkpoint.arrived_ms, ..self.clone() } == *checkpoint
    }

    fn apply_shape(&mut self, shape: &Shape) -> Result<(), StateError> {
        let writers = usize::from(shape.writers);
        if writers < self.writers.len() || shape.writers > WRITERS_MAX {
            return Err(StateError::Shape("writers are added at the end, and at most 64"));
        }
        let is_removed = |i: usize| shape.removed.contains(&WriterId(i as u16));
        let old = self.writers.iter().enumerate();
        if old.into_iter().any(|(i, w)| w.standing == Standing::Removed && !is_removed(i)) {
            return Err(StateError::Shape("who was removed stays removed"));
        }
        let standing = if shape.joining { Standing::Joining } else { Standing::Member };
        self.writers.resize(writers, WriterState { standing, ..WriterState::NEW });
        for (i, writer) in self.writers.iter_mut().enumerate() {
            if is_removed(i) {
                writer.standing = Standing::Removed;
            }
        }
        self.form = shape.form;
        self.barrier = self.newest_effective();
        Ok(())
    }
}

/// As the cut of a journal is made from it.
impl tidelock_cut::Writers for State {
    fn form(&self) -> Form {
        // What the guests of a recovered group write depends on nothing that is not there.
        if self.recovered().is_some() { Form::Vector } else { self.form }
    }

    fn count(&self) -> usize {
        self.writers.len()
    }

    fn get(&self, writer: WriterId) -> Option<tidelock_cut::Writer> {
        let WriterState { committed, hlc, copy, standing, .. } = *self.writer(writer)?;
        Some(tidelock_cut::Writer {
            committed,
            hlc,
            copy,
            is_joining: standing == Standing::Joining,
            is_removed: standing == Standing::Removed,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use tidelock_protocol::ids::DiskId;
    use tidelock_protocol::record::{DiskChange, Effect, Payload};
    use tidelock_shard::ShardEntry;

    pub(crate) fn record(seq: u64, epoch: u64, effect: Effect) -> Record {
        Record {
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(epoch),
            hlc: Hlc(seq),
            deps: CountVector::new(),
            body: DiskChange {
                disk: DiskId(0),
                offset: 0,
                copy: effect == Effect::CopyDone,
                flushed: false,
                effect,
            },
        }
    }

    const ZERO: Effect = Effect::Zero { len_bytes: 1, no_hole: false };

    #[test]
    fn copy_states_follow_from_records_and_a_resync_holds_the_committed_seq() {
        let mut s = State::new(1);
        let writer = |s: &State| s.writers[0];
        assert_eq!(writer(&s).copy, CopyState::Empty);
        s.apply_record(&record(1, 1, ZERO)).unwrap();
        assert_eq!(writer(&s).copy, CopyState::Partial);
        s.apply_record(&record(2, 1, Effect::CopyDone)).unwrap();
        assert_eq!(writer(&s).copy, CopyState::Whole);
        s.apply_note(&Note::Copy { writer: WriterId(0), copy: CopyState::Resyncing }).unwrap();
        s.apply_record(&record(3, 1, ZERO)).unwrap();
        assert_eq!((writer(&s).seq, writer(&s).committed), (Seq(3), Seq(2)));
        s.apply_record(&record(4, 1, Effect::CopyDone)).unwrap();
        assert_eq!((writer(&s).copy, writer(&s).committed), (CopyState::Whole, Seq(4)));
    }

    #[test]
    fn gaps_old_epochs_and_false_steps_are_refused() {
        let mut s = State::new(1);
        assert!(matches!(s.apply_record(&record(2, 1, ZERO)), Err(StateError::Gap { .. })));
        assert!(matches!(s.apply_record(&record(1, 2, ZERO)), Err(StateError::Epoch { .. })));
        let resync = Note::Copy { writer: WriterId(0), copy: CopyState::Resyncing };
        assert!(matches!(s.apply_note(&resync), Err(StateError::Copy { .. })));
        let other = Record { writer: WriterId(1), ..record(1, 1, ZERO) };
        assert_eq!(s.apply_record(&other), Err(StateError::Writer(WriterId(1))));
        assert_eq!(s, State::new(1), "what is refused changes nothing");
    }

    #[test]
    fn writers_are_added_at_the_end_and_who_was_removed_stays_removed() {
        let mut s = State::new(1);
        let shape = |writers, removed: &[u16], form| {
            let removed = removed.iter().map(|w| WriterId(*w)).collect();
            Note::Shape(Shape { writers, removed, joining: true, form })
        };
        s.apply_note(&shape(3, &[0], Form::Hlc)).unwrap();
        assert_eq!(s.form, Form::Hlc);
        let standings: Vec<_> = s.writers.iter().map(|w| w.standing).collect();
        assert_eq!(standings, [Standing::Removed, Standing::Joining, Standing::Joining]);
        let done = Record { writer: WriterId(1), ..record(1, 1, Effect::CopyDone) };
        s.apply_record(&done).unwrap();
        assert_eq!(s.writers[1].standing, Standing::Member, "whole");
        for wrong in
            [shape(2, &[0], Form::Hlc), shape(3, &[], Form::Hlc), shape(65, &[0], Form::Hlc)]
        {
            let before = s.clone();
            assert!(s.apply_note(&wrong).is_err());
            assert_eq!(s, before);
        }
    }

    #[test]
    fn the_log_of_a_shard_has_no_gap_and_its_stamps_do_not_fall() {
        let entry = |seq, shard, end, span, stamp| Record {
            hlc: Hlc(stamp),
            body: ShardEntry {
                shard,
                end: LogIndex(end),
                span,
                data: (span > 0).then(|| Payload::new(vec![1].into())),
                nop: false,
            },
            writer: WriterId(0),
            seq: Seq(seq),
            epoch: Epoch(1),
            deps: CountVector::new(),
        };
        let mut s = State::of_store(2);
        s.apply_record(&entry(1, 0, 100, 0, 0)).unwrap();
        s.apply_record(&entry(2, 0, 110, 10, 7)).unwrap();
        s.apply_record(&entry(3, 1, 5, 5, 3)).unwrap();
        let before = s.clone();
        for wrong in [
            entry(4, 0, 121, 10, 7),
            entry(4, 0, 119, 10, 7),
            entry(4, 0, 120, 10, 6),
            entry(4, 0, 110, 0, 7),
        ] {
            assert!(matches!(s.apply_record(&wrong), Err(StateError::Shard { .. })), "{wrong:?}");
        }
        assert_eq!(s.apply_record(&entry(4, 2, 5, 5, 9)), Err(StateError::NoShard(2)));
        assert_eq!(s.apply_note(&Note::Shards(1)), Err(StateError::Shards));
        assert_eq!((&s, s.watermark()), (&before, Hlc(3)));
        s.apply_note(&Note::Shards(3)).unwrap();
        assert_eq!(
            (s.shards[2], s.watermark()),
            (LogPoint { index: LogIndex(0), stamp: Hlc(3) }, Hlc(3))
        );
        assert_eq!(State::new(1).apply_note(&Note::Shards(1)), Err(StateError::Shards), "disks");
    }

    #[test]
    fn a_recovery_voids_what_is_beyond_its_cut() {
        let mut s = State::new(1);
        s.apply_record(&record(1, 1, Effect::CopyDone)).unwrap();
        s.apply_note(&Note::Copy { writer: WriterId(0), copy: CopyState::Resyncing }).unwrap();
        s.apply_record(&record(2, 1, ZERO)).unwrap();
        let start = |epoch, cut| {
            Note::EpochStart(EpochStart {
                epoch: Epoch(epoch),
                cut: CountVector::of(WriterId(0), Seq(cut)),
                journaled: CountVector::new(),
                resyncing: Vec::new(),
                at_unix_ms: 0,
                primary_declared_dead: false,
                exposed: Vec::new(),
            })
        };
        assert!(s.apply_note(&start(1, 1)).is_err(), "the same epoch");
        assert!(s.apply_note(&start(2, 2)).is_err(), "beyond what is committed");
        s.apply_note(&start(2, 1)).unwrap();
        assert!(s.is_void(&record(2, 1, ZERO)) && !s.is_void(&record(1, 1, ZERO)));
        s.apply_record(&record(2, 2, ZERO)).unwrap();
        assert!(!s.is_void(&record(2, 2, ZERO)));
        assert_eq!(s.committed().get(WriterId(0)), Seq(2));
    }
}
