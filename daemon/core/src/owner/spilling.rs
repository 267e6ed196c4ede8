//! Where a record waits for the backup: in memory, or on disk only ([`crate::backlog`]); and what becomes of the stream when
//! there is no room ([`crate::overflow`]).
//!
//! Every record is on disk before its local write is begun. Memory keeps it as long as there is room, and nothing before
//! it is on disk only. If the disk fails, records stay in memory, whose limit is the sequencer's then; when the
//! backup has all that was before, the disk is tried again.
//!
//! Sans-I/O but for the files: the simulator drives it, too.

use super::admitted::Admitted;
use super::copying::Copying;
use super::gap::GapWhy;
use super::replication::Clocks;
use crate::activity::{ActivityLog, Attachment, Compare};
use crate::backlog::{BacklogError, Journal, Left, Meter, Position, Waiting, cost_bytes};
use crate::copy_job::Purpose;
use crate::link::GateControl;
use crate::link::port::AttachedStream;
use crate::link::queue::{OnDisk, Spilled};
use crate::overflow::{Overflow, Sight, Step};
use crate::sequencer::{Extent, Sequencer};
use std::sync::Arc;
use std::time::Duration;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Incarnation, MonoNanos, Seq};
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::message::Mode;
use tidelock_protocol::record::Record;
use tidelock_storage::unsynced::UnsyncedDir;

/// A disk that has failed is tried again after so long, and with nothing left on it.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// What of the limit the comparison after an overflow may have while guests wait for room: an eighth.
const COMPARISON_SHARE: u64 = 8;

/// Local writes that hang may keep so many segments more than what waits for the backup.
const HANGING_SEGMENTS: u64 = 2;

/// What a backlog on disk is opened with.
#[derive(Debug)]
pub struct Opening {
    /// Where it is.
    pub files: Arc<dyn UnsyncedDir>,
    /// At what size segments are closed.
    pub segment_bytes: u64,
    /// The most that the writer may be ahead of the backup, with the disk.
    pub limit_bytes: u64,
    /// And without.
    pub memory_limit_bytes: u64,
    /// At the limit guests go on.
    pub stands_at_limit: bool,
    /// The granted epoch.
    pub epoch: Epoch,
    /// This run.
    pub incarnation: Incarnation,
    /// This boot of the host.
    pub boot: [u8; 16],
    /// Group, member and disks.
    pub identity: [u8; 32],
}

/// Both of its ends.
#[derive(Debug)]
pub struct Ends {
    /// The owner loop's.
    pub owners: DiskBacklog,
    /// The link's.
    pub links: OnDisk,
    /// What an earlier process of the run has left, for each of them.
    pub goes_on: Option<GoesOn>,
    /// See there.
    pub left: Option<Spilled>,
}

impl Opening {
    /// Goes on with what is left, or begins anew.
    pub fn open(self, left: Option<Left>) -> Result<Ends, BacklogError> {
        let Self { files, segment_bytes, limit_bytes, memory_limit_bytes, .. } = self;
        let meter = Arc::new(Meter::new(memory_limit_bytes));
        let (mut goes_on, mut spilled) = (None, None);
        let journal = match left {
            Some(left) => {
                meter.spill(left.waiting.len() as u64);
                spilled = Some(Spilled {
                    at: left.at,
                    first: left.first(),
                    last: left.last(),
                    payload_bytes: left.waiting.iter().map(|record| record.payload_bytes).sum(),
                });
                let journal = left.go_on(segment_bytes)?;
                let Left { waiting, last_hlc, .. } = left;
                goes_on = Some(GoesOn { epoch: self.epoch, waiting, last_hlc });
                journal
            }
            None => {
                let Self { incarnation, boot, identity, .. } = self;
                Journal::begin(files.clone(), segment_bytes, incarnation, boot, identity)?
            }
        };
        let owners = DiskBacklog {
            journal,
            meter: meter.clone(),
            limit_bytes,
            memory_limit_bytes,
            stands_at_limit: self.stands_at_limit,
            failed_at: None,
            lacks: false,
            run: (self.incarnation, self.identity),
        };
        Ok(Ends { owners, links: OnDisk { files, meter }, goes_on, left: spilled })
    }
}

/// A writer's backlog on disk.
#[derive(Debug)]
pub struct DiskBacklog {
    journal: Journal,
    meter: Arc<Meter>,
    /// The most that the writer may be ahead of the backup, with the disk and without.
    limit_bytes: u64,
    memory_limit_bytes: u64,
    /// At the limit guests go on ([`crate::overflow`]).
    stands_at_limit: bool,
    failed_at: Option<MonoNanos>,
    /// A record whose local write had not ended may be gone.
    lacks: bool,
    /// This run, and the digest that is in the segments that it begins.
    run: (Incarnation, [u8; 32]),
}

impl DiskBacklog {
    /// Whether its disk has failed, and was not tried again since.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed_at.is_some()
    }

    /// Whether what is there is not enough to go on with, because local writes hang.
    #[must_use]
    pub fn lacks_some(&self) -> bool {
        self.lacks
    }

    /// Segments and bytes on disk.
    #[must_use]
    pub fn on_disk(&self) -> (usize, u64) {
        (self.journal.segments(), self.journal.used_bytes())
    }

    /// What is in memory, and what is on disk only.
    #[must_use]
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Whether there is room to be given back, which waits for the backup, or a disk to be tried again.
    fn wants_acks(&self) -> bool {
        self.failed_at.is_some() || self.meter.spilled() > 0 || self.journal.segments() > 1
    }

    /// Keeps a record. Returns where it is if it is to leave memory.
    fn keep(
        &mut self,
        record: &Record,
        sequencer: &Sequencer,
    ) -> Result<Option<Position>, BacklogError> {
        let cost_bytes = cost_bytes(record);
        let redo_from = || sequencer.oldest_local().map_or(record.seq, |seq| seq.min(record.seq));
        let at = match self.failed_at {
            None => Some(self.journal.append(record, redo_from)?),
            Some(_) => None,
        };
        if self.meter.may_hold(cost_bytes) || at.is_none() {
            self.meter.hold(cost_bytes);
            return Ok(None);
        }
        self.meter.spill(1);
        Ok(at)
    }

    /// Gives back what the backup has. A record whose local write has not ended is kept: a process that goes on does it
    /// again. If such writes hang until the files are larger than what waits for the backup explains, they are not waited
    /// for, and until they have ended nobody goes on with what is left.
    fn give_back(&mut self, sequencer: &Sequencer) -> Result<(), BacklogError> {
        let durable = sequencer.durable();
        if !self.journal.has_to_give_back(durable) {
            return Ok(());
        }
        let oldest = sequencer.oldest_local();
        let ended = oldest.map_or(durable, |seq| durable.min(Seq(seq.0 - 1)));
        self.journal.release(ended)?;
        let most_bytes = self.limit_bytes + HANGING_SEGMENTS * self.journal.segment_bytes();
        if self.journal.used_bytes() <= most_bytes || !self.journal.has_to_give_back(durable) {
            return Ok(());
        }
        self.lacks = true;
        self.journal.set_sound(false)?;
        self.journal.release(durable)
    }

    /// Begins anew: the backup has all that was appended.
    fn begin_anew(&mut self) -> Result<(), BacklogError> {
        self.lacks = true;
        self.journal.restart()
    }

    /// Whether every record is there whose local write has not ended.
    fn has_all_to_redo(&mut self, sequencer: &Sequencer) -> bool {
        let gone = self.journal.gone();
        self.lacks = self.lacks && sequencer.oldest_local().is_some_and(|seq| seq <= gone);
        !self.lacks
    }
}

/// What an earlier process of the run has left.
#[derive(Debug)]
pub struct GoesOn {
    /// The granted epoch.
    pub epoch: Epoch,
    /// The records, at least one, which are done locally.
    pub waiting: Vec<Waiting>,
    /// The time of the last of them.
    pub last_hlc: Hlc,
}

impl GoesOn {
    /// The last of them.
    #[must_use]
    pub fn last(&self) -> Seq {
        self.waiting.last().expect("at least one").seq
    }

    fn start(&self, sequencer: &mut Sequencer, clocks: Clocks) {
        let Clocks { now, wall_ms } = clocks;
        sequencer.go_on(self.epoch, &self.waiting, self.last_hlc, now, wall_ms);
    }
}

/// The other parts of an owner loop, for a turn.
pub struct Turn<'a> {
    /// The member's name, for logs.
    pub member: &'a str,
    /// Its sequencer.
    pub sequencer: &'a mut Sequencer,
    /// Its copies.
    pub copying: &'a mut Copying,
    /// Its activity log.
    pub activity: &'a mut ActivityLog,
    /// Its gate.
    pub gate: &'a dyn GateControl,
    /// A local disk has failed a flush: what it says of durability is not believed in this run.
    pub is_poisoned: bool,
    /// The time.
    pub clocks: Clocks,
}

/// What a turn sees besides, to know whether the stream may stand and go on.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The backup has the member.
    pub is_attached: bool,
    /// No more requests are taken.
    pub is_draining: bool,
    /// The group was switched over, or its epoch has ended.
    pub is_left: bool,
}

/// A writer's backlog on disk as its owner loop drives it, if it has one. Without one every record is in memory.
#[derive(Debug)]
pub struct Spilling {
    backlog: Option<DiskBacklog>,
    overflow: Overflow,
    /// The disks are equal but for what is in the stream, as an earlier process of the run has seen; the backup has not
    /// attached this one.
    sound_before: bool,
    /// Whether the stream goes on with what is on disk is not known: nothing there is changed.
    awaits: bool,
}

impl Spilling {
    /// Backlog of a run that may go on with the records on disk. [`go_on`](Self::go_on) follows if the backup confirms the
    /// stream, else [`give_up_left`](Self::give_up_left).
    pub fn awaiting(backlog: Option<DiskBacklog>, clocks: Clocks) -> Self {
        let overflow = Overflow::new(clocks.now);
        Self { backlog, overflow, sound_before: false, awaits: true }
    }

    /// The stream goes on with what is on disk.
    pub fn go_on(&mut self, goes_on: &GoesOn, turn: &mut Turn<'_>) {
        goes_on.start(turn.sequencer, turn.clocks);
        turn.activity.goes_on_after(goes_on.last());
        (self.sound_before, self.awaits) = (true, false);
    }

    /// Drops the records on disk: the stream does not go on with them, and none is written to the local disks again.
    pub fn give_up_left(&mut self, goes_on: &GoesOn, turn: &mut Turn<'_>) {
        self.awaits = false;
        let Some(backlog) = &mut self.backlog else { return };
        backlog.meter.unspill(goes_on.waiting.len() as u64);
        let (run, identity) = backlog.run;
        if let Err(error) = backlog.journal.begin_for(run, identity) {
            self.failed(&error, turn);
        }
    }

    /// Backlog of a run that begins anew.
    pub fn new(backlog: Option<DiskBacklog>, clocks: Clocks) -> Self {
        let overflow = Overflow::new(clocks.now);
        Self { backlog, overflow, sound_before: false, awaits: false }
    }

    /// It, if there is one.
    #[must_use]
    pub fn backlog(&self) -> Option<&DiskBacklog> {
        self.backlog.as_ref()
    }

    /// Whether nothing is recorded because there is no room.
    #[must_use]
    pub fn stands(&self) -> bool {
        self.overflow.stands()
    }

    /// Whether everything is recorded, and nothing else is in sight.
    #[must_use]
    pub fn records(&self) -> bool {
        self.overflow.records()
    }

    /// Whether something only goes on when time passes.
    #[must_use]
    pub fn needs_tick(&self) -> bool {
        self.overflow.needs_tick()
    }

    /// Whether something waits for the backup.
    #[must_use]
    pub fn wants_acks(&self) -> bool {
        self.stands()
            || self.needs_tick()
            || self.backlog.as_ref().is_some_and(DiskBacklog::wants_acks)
    }

    /// A record was admitted. Its local write is begun after this.
    pub fn keep(&mut self, record: Record, admitted: &mut Admitted, turn: &mut Turn<'_>) {
        let Some(backlog) = &mut self.backlog else { return admitted.hold(record) };
        match backlog.keep(&record, turn.sequencer) {
            Ok(Some(at)) => admitted.spill(&record, at),
            Ok(None) => admitted.hold(record),
            Err(error) => {
                backlog.meter.hold(cost_bytes(&record));
                admitted.hold(record);
                self.failed(&error, turn);
            }
        }
    }

    /// Says on disk whether the next start may go on with the backlog there: while the sites differ by nothing else.
    pub fn mark(&mut self, turn: &mut Turn<'_>) {
        if self.awaits {
            return;
        }
        let is_sound = turn.sequencer.is_started()
            && self.overflow.records()
            && (turn.copying.is_whole() || self.sound_before)
            && turn.copying.suspect_bytes() == 0
            && !turn.is_poisoned;
        let Some(backlog) = &mut self.backlog else { return };
        let is_sound =
            is_sound && backlog.failed_at.is_none() && backlog.has_all_to_redo(turn.sequencer);
        if let Err(error) = backlog.journal.set_sound(is_sound) {
            self.failed(&error, turn);
        }
    }

    fn failed(&mut self, error: &BacklogError, turn: &mut Turn<'_>) {
        let Some(backlog) = &mut self.backlog else { return };
        backlog.failed_at = Some(turn.clocks.now);
        if let Err(error) = backlog.journal.set_sound(false) {
            let directory = backlog.journal.directory().display();
            tracing::error!(%directory, %error, "remove the segments by hand before the next start");
        }
        tracing::error!(
            member = turn.member,
            %error,
            "from now on the backlog is in memory only, and full sooner"
        );
        self.follow_limit(turn);
    }

    /// Where the limit is that of memory what waits goes on waiting.
    fn follow_limit(&mut self, turn: &mut Turn<'_>) {
        let Some(backlog) = &self.backlog else { return };
        let is_apart = self.overflow.is_apart();
        let limit_bytes = match backlog.failed_at.is_some() || is_apart {
            true => backlog.memory_limit_bytes,
            false => backlog.limit_bytes,
        };
        // Or a piece of the comparison would have its turn once in as long as all that takes.
        turn.copying.set_share(if is_apart { limit_bytes / COMPARISON_SHARE } else { 0 });
        if limit_bytes != turn.sequencer.backlog_limit_bytes() {
            let Clocks { now, wall_ms } = turn.clocks;
            turn.sequencer.set_backlog_limit(limit_bytes, now, wall_ms);
        }
    }

    /// The backup has all that was appended: the next record begins a new segment.
    fn begin_anew(&mut self, turn: &mut Turn<'_>) {
        debug_assert_eq!(turn.sequencer.durable(), turn.sequencer.last_seq());
        let Some(backlog) = self.backlog.as_mut().filter(|b| b.failed_at.is_none()) else { return };
        if let Err(error) = backlog.begin_anew() {
            self.failed(&error, turn);
        }
    }

    /// Gives back what the backup has, and tries a disk again that has failed.
    pub fn drive(&mut self, turn: &mut Turn<'_>) {
        let durable = turn.sequencer.durable();
        let is_empty = durable == turn.sequencer.last_seq();
        let Some(backlog) = &mut self.backlog else { return };
        let done = match backlog.failed_at {
            None => backlog.give_back(turn.sequencer),
            Some(at) => {
                let is_time = turn.clocks.now.since_ns(at) >= RETRY_AFTER.as_nanos() as u64;
                if !is_time || !is_empty || backlog.meter.spilled() > 0 {
                    return;
                }
                backlog.begin_anew().map(|()| {
                    backlog.failed_at = None;
                    tracing::info!(member = turn.member, "the backlog is kept on disk again");
                })
            }
        };
        match done {
            Ok(()) => self.mark(turn),
            Err(error) => return self.failed(&error, turn),
        }
        self.follow_limit(turn);
    }

    /// Looks whether the stream is to stand, or can go on. Returns what was done, or is to be said.
    pub fn drive_overflow(&mut self, seen: Seen, turn: &mut Turn<'_>) -> Option<Step> {
        self.backlog.as_ref()?;
        let mut step = self.overflow.look(&self.sight(seen, turn));
        if step == Some(Step::Shut) {
            self.shut(turn);
            // Mostly it is shut already.
            step = self.overflow.look(&self.sight(seen, turn));
        }
        match step {
            None | Some(Step::Shut) => {}
            Some(Step::Stand) => self.stand(turn),
            Some(Step::Ask) => tracing::warn!(
                member = turn.member,
                last = %turn.sequencer.last_seq(),
                "the backup has all that was recorded: it is asked to compare where guests have written since"
            ),
            Some(Step::Over(took)) => {
                self.follow_limit(turn);
                tracing::info!(
                    member = turn.member,
                    took_ms = took.as_millis() as u64,
                    "the sites are equal again: the backlog had been full"
                );
            }
        }
        step
    }

    fn sight(&self, seen: Seen, turn: &Turn<'_>) -> Sight {
        let sequencer = &*turn.sequencer;
        let stands_at_limit = self.backlog.as_ref().is_some_and(|b| b.stands_at_limit);
        // In mode sync guests wait for the backup with each write.
        let may_stand = sequencer.is_started()
            && sequencer.mode() != Mode::Sync
            && !seen.is_draining
            && !seen.is_left;
        Sight {
            now: turn.clocks.now,
            is_full: sequencer.guests_wait_for_room(),
            may_stand: stands_at_limit && may_stand,
            durable: sequencer.durable(),
            is_drained: seen.is_attached
                && !seen.is_draining
                && sequencer.durable() == sequencer.last_seq()
                && sequencer.is_recorded_idle()
                && turn.copying.is_answered(),
            is_whole: turn.copying.is_whole(),
            is_applied: turn.gate.is_applied(),
        }
    }

    fn shut(&mut self, turn: &Turn<'_>) {
        if let Err(error) = self.forget() {
            self.overflow.put_off(turn.clocks.now);
            return tracing::error!(
                member = turn.member,
                %error,
                "the backlog is full, and guests' writes wait: a later start might go on with what is on disk there"
            );
        }
        turn.gate.hold(HoldReason::Gap, true);
    }

    /// No later process of the run goes on with what is on disk.
    fn forget(&mut self) -> Result<(), BacklogError> {
        let Some(backlog) = &mut self.backlog else { return Ok(()) };
        backlog.journal.set_sound(false)
    }

    fn stand(&mut self, turn: &mut Turn<'_>) {
        let Clocks { now, wall_ms } = turn.clocks;
        self.sound_before = false;
        turn.copying.stop_recording(GapWhy::BacklogFull, wall_ms);
        turn.activity.stop_recording();
        turn.sequencer.stop_recording(now, wall_ms);
        tracing::error!(
            member = turn.member,
            last = %turn.sequencer.last_seq(),
            durable = %turn.sequencer.durable(),
            "OVERFLOWED: the backlog is full. Guests go on, and nothing of what they write from here on is recorded: it is \
             compared when the backup has what was recorded before. Until then replies are held, and a disaster goes back \
             to before this"
        );
    }

    /// The backup has attached the member, and the stream goes on.
    pub fn attached(&mut self) {
        self.sound_before = false;
    }

    /// It has attached the member while its stream stands.
    pub fn attached_while_standing(&mut self, attached: &AttachedStream, turn: &mut Turn<'_>) {
        turn.copying.reconnected();
        turn.activity.attached_unrecorded(attached.epoch, attached.durable);
    }

    /// It has done so to compare: the stream goes on, with the comparison. `ranges`: what a copy has to look at, by what the
    /// activity log says, and where writes are in flight that have no record.
    pub fn record_again(
        &mut self,
        attached: &AttachedStream,
        ranges: impl FnOnce(Purpose, Compare, Vec<Extent>) -> Vec<Extent>,
        turn: &mut Turn<'_>,
    ) {
        let Clocks { now, wall_ms } = turn.clocks;
        let unrecorded = turn.sequencer.unrecorded();
        // What is done again after a kill must not be older than what has no record.
        self.begin_anew(turn);
        let compare = turn.activity.attached(&Attachment {
            copy: attached.stream.copy,
            epoch: attached.epoch,
            durable: attached.durable,
            basis: attached.stream.basis.clone(),
            copying: false,
        });
        let ranges = |purpose| ranges(purpose, compare, unrecorded);
        turn.copying.attached(turn.member, attached.stream.copy, None, ranges, now);
        self.overflow.returns();
        self.mark(turn);
        self.follow_limit(turn);
        turn.sequencer.record_again(now, wall_ms);
        tracing::warn!(
            member = turn.member,
            "guests' writes are recorded again; replies are held until the comparison has ended"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backlog::{Expected, find};
    use crate::copy_job::Bounds;
    use crate::sequencer::{Action, OpId, RequestId, Settings};
    use bytes::Bytes;
    use std::path::Path;
    use tidelock_protocol::ids::{DiskId, WriterId};
    use tidelock_protocol::record::{Effect, Payload};
    use tidelock_storage::unsynced::Directory;

    const NOW: MonoNanos = MonoNanos(1_000_000);
    const EXPECTED: Expected =
        Expected { incarnation: Incarnation(7), epoch: Epoch(1), boot: [1; 16], identity: [2; 32] };
    const SEGMENT_BYTES: u64 = 8 << 10;
    const LIMIT_BYTES: u64 = 64 << 10;
    const MEMORY_LIMIT_BYTES: u64 = 32 << 10;

    struct Rig {
        backlog: DiskBacklog,
        sequencer: Sequencer,
        files: Arc<dyn UnsyncedDir>,
        last_op: OpId,
    }

    fn rig(dir: &Path) -> Rig {
        let files: Arc<dyn UnsyncedDir> = Directory::at(dir);
        let opening = Opening {
            files: files.clone(),
            segment_bytes: SEGMENT_BYTES,
            limit_bytes: LIMIT_BYTES,
            memory_limit_bytes: MEMORY_LIMIT_BYTES,
            stands_at_limit: true,
            epoch: EXPECTED.epoch,
            incarnation: EXPECTED.incarnation,
            boot: EXPECTED.boot,
            identity: EXPECTED.identity,
        };
        let mut sequencer = Sequencer::new(Settings {
            writer: WriterId(0),
            mode: Mode::Pipelined,
            backlog_limit_bytes: LIMIT_BYTES,
            lock_align_bytes: 512,
        });
        sequencer.set_ceiling(u64::MAX >> 16, NOW, 1);
        sequencer.start(EXPECTED.epoch, Seq::ZERO, Hlc(0), NOW, 1);
        let backlog = opening.open(None).unwrap().owners;
        Rig { backlog, sequencer, files, last_op: OpId(0) }
    }

    impl Rig {
        /// A guest's write, which is kept. It ends, or its local write hangs.
        fn write(&mut self, nth: u64, ends: bool) {
            let effect = Effect::Write(Payload::new(Bytes::from(vec![nth as u8; 1024])));
            let extent = Extent { disk: DiskId(0), offset: nth * 1024, len_bytes: 1024 };
            self.sequencer.submit(RequestId(nth), extent, effect, false, NOW, 1);
            while let Some(action) = self.sequencer.poll_action() {
                match action {
                    Action::Send(record) => {
                        self.backlog.keep(&record, &self.sequencer).unwrap();
                    }
                    Action::Write { op, .. } => {
                        self.last_op = op;
                        if ends {
                            self.sequencer.written(op, Ok(()), NOW, 1);
                        }
                    }
                    _ => {}
                }
            }
            self.committed(nth);
            let is_sound = self.backlog.has_all_to_redo(&self.sequencer);
            self.backlog.journal.set_sound(is_sound).unwrap();
        }

        fn committed(&mut self, seq: u64) {
            self.sequencer.committed(Seq(seq), NOW, 1);
            self.backlog.give_back(&self.sequencer).unwrap();
        }
    }

    /// The backup is quicker than the local disk.
    #[test]
    fn what_is_at_the_backup_is_kept_until_its_local_write_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = rig(dir.path());
        rig.write(1, false);
        let hangs = rig.last_op;
        (2..=40).for_each(|nth| rig.write(nth, true));
        let left = find(&rig.files, &EXPECTED).unwrap();
        assert_eq!((left.first(), left.redo_from), (Seq(1), Seq(1)), "it is done again");
        rig.sequencer.written(hangs, Ok(()), NOW, 1);
        rig.write(41, true);
        assert!(find(&rig.files, &EXPECTED).unwrap().first() > Seq(30), "and given back");
    }

    #[test]
    fn a_local_write_that_hangs_fills_no_disk() {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = rig(dir.path());
        rig.write(1, false);
        let hangs = rig.last_op;
        for nth in 2..=300 {
            rig.write(nth, true);
            let (_, on_disk_bytes) = rig.backlog.on_disk();
            let most_bytes = LIMIT_BYTES + (HANGING_SEGMENTS + 1) * (SEGMENT_BYTES + 2048);
            assert!(on_disk_bytes <= most_bytes, "{on_disk_bytes} after {nth}");
        }
        assert!(find(&rig.files, &EXPECTED).is_err(), "the record that hangs is gone");
        assert!(rig.backlog.lacks_some());
        rig.sequencer.written(hangs, Ok(()), NOW, 1);
        rig.write(301, true);
        assert!(find(&rig.files, &EXPECTED).is_ok(), "nothing hangs any more");
        assert!(!rig.backlog.lacks_some());
    }

    /// Room is given back when the backup has what is there, so its word is asked for.
    #[test]
    fn a_backlog_waits_for_the_backup_while_it_has_more_than_one_segment_or_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = rig(dir.path());
        assert!(
            !rig.backlog.wants_acks() && !rig.backlog.has_failed() && !rig.backlog.lacks_some()
        );
        let clocks = Clocks { now: NOW, wall_ms: 1 };
        let spilling = |backlog| Spilling::new(Some(backlog), clocks);
        let mut admitted = Admitted::default();
        for nth in 1..=10 {
            let effect = Effect::Write(Payload::new(Bytes::from(vec![nth as u8; 1024])));
            let extent = Extent { disk: DiskId(0), offset: nth * 1024, len_bytes: 1024 };
            rig.sequencer.submit(RequestId(nth), extent, effect, false, NOW, 1);
        }
        let mut of = spilling(rig.backlog);
        let mut copying = Copying::new(Bounds { window_bytes: 1 << 20, rate_bytes_per_s: 0 });
        let mut activity = ActivityLog::off();
        let records = records_of(&mut rig.sequencer);
        let mut turn = Turn {
            member: "db",
            sequencer: &mut rig.sequencer,
            copying: &mut copying,
            activity: &mut activity,
            gate: &crate::link::NoGate,
            is_poisoned: false,
            clocks,
        };
        for record in records {
            of.keep(record, &mut admitted, &mut turn);
        }
        assert!(of.backlog().unwrap().on_disk().0 > 1 && of.wants_acks());
        turn.sequencer.committed(Seq(10), NOW, 1);
        of.drive(&mut turn);
        assert!(!of.wants_acks() && !of.needs_tick() && of.records() && !of.stands());

        // Memory alone is the limit after a failure, until the disk was tried again.
        let (path, source) = (dir.path().to_owned(), std::io::ErrorKind::Other.into());
        of.failed(&BacklogError::Io { path, source }, &mut turn);
        assert!(of.backlog().unwrap().has_failed() && of.wants_acks());
        assert_eq!(turn.sequencer.backlog_limit_bytes(), MEMORY_LIMIT_BYTES);
        let begin = NOW.plus_ms(RETRY_AFTER.as_millis() as u64).0;
        for (now, has_failed) in [(begin - 1, true), (begin, false)] {
            turn.clocks.now = MonoNanos(now);
            of.drive(&mut turn);
            assert_eq!(of.backlog().unwrap().has_failed(), has_failed);
        }
        assert_eq!(turn.sequencer.backlog_limit_bytes(), LIMIT_BYTES);
        assert!(!of.wants_acks());
    }

    fn records_of(sequencer: &mut Sequencer) -> Vec<Record> {
        let mut records = Vec::new();
        while let Some(action) = sequencer.poll_action() {
            match action {
                Action::Send(record) => records.push(record),
                Action::Write { op, .. } => sequencer.written(op, Ok(()), NOW, 1),
                _ => {}
            }
        }
        records
    }
}
