//! Which copies the member needs: the job of an initial copy or resync, and extents that the
//! local disk failed. And verification, which waits for both.

use super::gap::{Gap, GapWhy};
use super::status::Phase;
use crate::copy_job::{Bounds, CopyJob, Findings, PIECE_BYTES, Progress, Purpose};
use crate::sequencer::{CopyKind, CopyOutcome, Extent};
use std::collections::{BTreeMap, HashMap};
use tidelock_planted::Bug;
use tidelock_protocol::ids::{DiskId, MonoNanos, Seq};
use tidelock_protocol::message::CopyState;

/// Ticks between two attempts at what could not be read.
const RETRY_TICKS: u32 = 50;

/// The copies of a member.
#[derive(Debug)]
pub struct Copying {
    bounds: Bounds,
    /// So many pieces are under way whatever guests write.
    share: usize,
    job: Option<CopyJob>,
    /// `None`: the backup's disks are known to equal these, but for what is on its way.
    gap: Option<Gap>,
    /// Pieces in which the sites may differ, and those of them that are being read.
    suspects: Vec<Extent>,
    reading_suspects: HashMap<(DiskId, u64), Extent>,
    suspects_due: bool,
    ticks: u32,
    stopped: bool,
    /// What the copy's end must depend on is not known yet.
    awaits_floor: bool,
    /// Up to where seqs must go.
    pad_to: Seq,
    verify: Option<CopyJob>,
    /// What a job that was given up had at the sequencer. Extents that overlap come back in the order
    /// in which they were submitted, so the next outcome is its own.
    orphans: Awaited,
    /// What it had asked the backup: an answer to that is none to a question of the next job.
    unanswered: Awaited,
    /// Since the last look: why the verification has ended before its end.
    given_up: Option<&'static str>,
}

/// Outcomes that jobs which were given up are still owed: several of them may have asked about the same extent.
#[derive(Debug, Default)]
struct Awaited(BTreeMap<(DiskId, u64), u32>);

impl Awaited {
    fn add(&mut self, key: (DiskId, u64)) {
        *self.0.entry(key).or_default() += 1;
    }

    /// One of them has come, if any is awaited.
    fn take(&mut self, key: (DiskId, u64)) -> bool {
        let Some(count) = self.0.get_mut(&key) else { return false };
        *count -= 1;
        if *count == 0 {
            self.0.remove(&key);
        }
        true
    }
}

impl Copying {
    /// Nothing to copy yet.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            share: 1,
            job: None,
            gap: Some(Gap::STARTED),
            suspects: Vec::new(),
            reading_suspects: HashMap::new(),
            suspects_due: false,
            ticks: 0,
            stopped: false,
            awaits_floor: false,
            pad_to: Seq::ZERO,
            verify: None,
            orphans: Awaited::default(),
            unanswered: Awaited::default(),
            given_up: None,
        }
    }

    /// The backup has said how much of the disks it has. `whole_at_unix_ms`: the time of its whole state, if it is known.
    /// `ranges`: what a copy for this purpose has to look at.
    pub fn attached(
        &mut self,
        member: &str,
        copy: CopyState,
        whole_at_unix_ms: Option<u64>,
        ranges: impl FnOnce(Purpose) -> Vec<Extent>,
        now: MonoNanos,
    ) {
        self.reconnected();
        let purpose = match copy {
            CopyState::Whole => {
                if self.job.is_none() {
                    self.gap = None;
                }
                if let Some(verify) = &mut self.verify {
                    verify.reattached();
                }
                return;
            }
            CopyState::Empty => Purpose::Initial,
            CopyState::Partial | CopyState::Resyncing | CopyState::Seeded => Purpose::Compare,
        };
        self.give_up_verify("the sites are being compared anyway, or a first copy runs");
        if let Some(job) = &mut self.job {
            return job.reattached();
        }
        let is_first = copy != CopyState::Resyncing;
        self.gap = Some(Gap::compared(self.gap, is_first, whole_at_unix_ms));
        if self.stopped {
            return;
        }
        let job = CopyJob::new(purpose, ranges(purpose), self.bounds, now);
        tracing::info!(
            member,
            ?purpose,
            bytes = job.progress(now).total_bytes,
            "bringing the disks across; not protected until this is done"
        );
        self.job = Some(job);
    }

    /// The copy, if there is one, must not end before the other writers have said what this one
    /// may have known ([`floor_heard`](Self::floor_heard)).
    pub fn await_floor(&mut self) {
        self.awaits_floor = self.job.as_ref().is_some_and(|job| job.marker().is_none());
    }

    /// They have, and it has been taken over. Its end comes after the seq `pad_to`. Also while no
    /// copy waits for it: then somebody waits for that seq.
    pub fn floor_heard(&mut self, pad_to: Seq) {
        self.awaits_floor = false;
        self.pad_to = self.pad_to.max(pad_to);
    }

    /// A seq of an earlier run, lost with it, that somebody waits for: it is to be given out again,
    /// before a copy ends.
    pub fn pad_to(&self) -> Seq {
        self.pad_to
    }

    /// C has reached this seq of the member's. Returns whether the job ended by it.
    pub fn committed(&mut self, member: &str, committed: Seq, now: MonoNanos) -> bool {
        let marker = self.job.as_ref().and_then(CopyJob::marker);
        if marker.is_none_or(|marker| committed < marker) {
            return false;
        }
        let progress = self.job.take().expect("has a marker").progress(now);
        tracing::info!(
            member,
            compared_bytes = progress.total_bytes,
            sent_bytes = progress.sent_bytes,
            "the backup's disks equal the local ones: protected from here on"
        );
        self.gap = None;
        true
    }

    /// Whether there is something to read now.
    pub fn wants_more(&self, now: MonoNanos) -> bool {
        if self.stopped {
            return false;
        }
        match &self.job {
            Some(job) => job.marker().is_none() && !job.is_throttled(now),
            None if self.wants_suspects() => true,
            None => self.can_verify() && self.verify.as_ref().is_some_and(|v| v.has_next(now)),
        }
    }

    /// Outcomes are told by extents, so what suspects and a verification read must not be the same.
    fn wants_suspects(&self) -> bool {
        let is_verify_reading = self.verify.as_ref().is_some_and(|v| v.reading().next().is_some());
        self.suspects_due && !self.suspects.is_empty() && !is_verify_reading
    }

    fn can_verify(&self) -> bool {
        self.suspects.is_empty() && self.reading_suspects.is_empty()
    }

    /// Bytes that are being read to be sent.
    pub fn reading_bytes(&self) -> u64 {
        let jobs = self.job.iter().chain(&self.verify);
        let suspects = self.reading_suspects.values().map(|extent| extent.len_bytes).sum::<u64>();
        suspects + jobs.map(CopyJob::reading_copies_bytes).sum::<u64>()
    }

    /// Whether so much is admitted and not durable, with what is being read to be sent, that no copy is begun.
    pub fn is_window_full(&self, lag_bytes: u64) -> bool {
        lag_bytes + self.reading_bytes() >= self.bounds.window_bytes
    }

    /// Whether nothing of a copy is being read or asked.
    pub fn is_idle(&self) -> bool {
        if tidelock_planted::is(Bug::CopiesStarve) {
            return false;
        }
        self.reading_suspects.is_empty()
            && self.job.iter().chain(&self.verify).all(CopyJob::is_idle)
    }

    /// Of the bytes that guests may be ahead of the backup copies may have so many, also while guests wait for room;
    /// one piece at least, as ever.
    pub fn set_share(&mut self, share_bytes: u64) {
        self.share = (share_bytes / PIECE_BYTES).max(1) as usize;
    }

    /// Whether less than that is under way, with `on_the_way` records of copies.
    pub fn is_below_share(&self, on_the_way: usize) -> bool {
        if self.share == 1 {
            return self.is_idle() && on_the_way == 0;
        }
        let jobs = self.job.iter().chain(&self.verify);
        let of_jobs = jobs.map(|job| job.reading().count() + job.asked().count()).sum::<usize>();
        of_jobs + self.reading_suspects.len() + on_the_way < self.share
    }

    /// What to read next.
    pub fn next(&mut self, now: MonoNanos) -> Option<(Extent, CopyKind)> {
        if let Some(job) = &mut self.job {
            return job.next(now);
        }
        if !self.wants_suspects() {
            self.suspects_due &= !self.suspects.is_empty();
            return match self.can_verify() {
                true => self.verify.as_mut()?.next(now),
                false => None,
            };
        }
        let extent = self.suspects.pop()?;
        self.reading_suspects.insert((extent.disk, extent.offset), extent);
        Some((extent, CopyKind::Copy))
    }

    /// The sequencer is done with an extent that [`next`](Self::next) gave out.
    pub fn copied(&mut self, extent: Extent, outcome: CopyOutcome) {
        let key = (extent.disk, extent.offset);
        if self.orphans.take(key) {
            if matches!(outcome, CopyOutcome::Asked | CopyOutcome::AskedForZeroes(_)) {
                self.unanswered.add(key);
            }
            return;
        }
        if self.reading_suspects.remove(&key).is_some() {
            if matches!(outcome, CopyOutcome::Unreadable | CopyOutcome::Withdrawn) {
                self.suspects.push(extent);
                // Not again in this round.
                self.suspects_due = false;
            }
        } else if let Some(job) = self.job.as_mut().or(self.verify.as_mut()) {
            job.copied(extent, outcome);
        }
    }

    /// The backup's answer to a digest check.
    pub fn digest_result(&mut self, disk: DiskId, offset: u64, equal: bool) {
        if self.unanswered.take((disk, offset)) {
            return;
        }
        let is_ignored = tidelock_planted::is(Bug::DifferenceIgnored) && self.job.is_none();
        let equal = equal || is_ignored;
        if let Some(job) = self.job.as_mut().or(self.verify.as_mut()) {
            job.digest_result(disk, offset, equal);
        }
    }

    /// Begins to look whether the backup's disks equal these, at `rate_bytes_per_s` at most (0: no limit).
    ///
    /// # Errors
    /// Why not now.
    pub fn begin_verify(
        &mut self,
        repair: bool,
        disks: Vec<Extent>,
        rate_bytes_per_s: u64,
        now: MonoNanos,
    ) -> Result<(), &'static str> {
        if self.verify.is_some() {
            return Err("a verification runs already");
        }
        if self.stopped {
            return Err("the daemon is ending");
        }
        if self.gap.is_some() {
            return Err("the backup does not have all of the disks yet");
        }
        let bounds = Bounds { rate_bytes_per_s, ..self.bounds };
        self.verify = Some(CopyJob::new(Purpose::Verify { repair }, disks, bounds, now));
        Ok(())
    }

    /// Ends a verification that runs before its end.
    pub fn give_up_verify(&mut self, why: &'static str) {
        if let Some(verify) = self.verify.take() {
            self.await_outcomes_of(&verify);
            self.given_up = Some(why);
        }
    }

    /// Nothing is recorded from now on, so the sites will differ by more than what is on its way. What is under way is
    /// given up: the comparison that follows looks at it again.
    pub fn stop_recording(&mut self, why: GapWhy, unix_ms: u64) {
        self.give_up_verify("guests' writes are not recorded for now");
        if let Some(job) = self.job.take() {
            self.await_outcomes_of(&job);
        }
        self.gap = Some(Gap::opened(self.gap, unix_ms, why));
    }

    /// What a job that is given up has asked for will come, and is not the next one's.
    fn await_outcomes_of(&mut self, job: &CopyJob) {
        job.reading().for_each(|key| self.orphans.add(key));
        job.asked().for_each(|key| self.unanswered.add(key));
    }

    /// Whether nothing of a job that was given up may still be answered.
    pub fn is_answered(&self) -> bool {
        self.orphans.0.is_empty() && self.unanswered.0.is_empty()
    }

    /// The connection was made anew: what was asked before is not answered any more.
    pub fn reconnected(&mut self) {
        self.unanswered.0.clear();
    }

    /// Why a verification was given up since the last look.
    pub fn take_given_up(&mut self) -> Option<&'static str> {
        self.given_up.take()
    }

    /// How far the verification is, if one runs.
    pub fn verify_progress(&self, now: MonoNanos) -> Option<Progress> {
        self.verify.as_ref().map(|job| job.progress(now))
    }

    /// What a verification has found that has looked at everything.
    pub fn verified(&self) -> Option<&Findings> {
        self.verify.as_ref().filter(|job| job.is_complete()).map(CopyJob::findings)
    }

    /// It was taken note of.
    pub fn end_verify(&mut self) {
        self.verify = None;
    }

    /// The sites may differ here.
    pub fn suspect(&mut self, extent: Extent) {
        let mut at = extent.offset;
        while at < extent.end() {
            let len_bytes = PIECE_BYTES.min(extent.end() - at);
            self.suspects.push(Extent { offset: at, len_bytes, ..extent });
            at += len_bytes;
        }
    }

    /// Whether a copy is complete but for the record that says so.
    pub fn wants_marker(&self) -> bool {
        !self.stopped && !self.awaits_floor && self.job.as_ref().is_some_and(CopyJob::is_complete)
    }

    /// That record was admitted as `marker`.
    pub fn set_marker(&mut self, marker: Seq) {
        self.job.as_mut().expect("wants a marker").set_marker(marker);
    }

    /// Whether something only goes on when time passes.
    pub fn needs_tick(&self) -> bool {
        !self.stopped
            && (!self.suspects.is_empty()
                || self.job.iter().chain(&self.verify).any(CopyJob::needs_time))
    }

    /// A tick has passed.
    pub fn tick(&mut self) {
        self.ticks += 1;
        if self.ticks.is_multiple_of(RETRY_TICKS) {
            self.suspects_due = true;
            if let Some(job) = &mut self.job {
                job.retry_unreadable();
            }
        }
    }

    /// What was compared or sent since the last look, and needs no more of this copy.
    pub fn take_finished(&mut self) -> Vec<Extent> {
        self.job.as_mut().map(CopyJob::take_finished).unwrap_or_default()
    }

    /// Whether an initial copy or a resync is under way.
    pub fn is_copying(&self) -> bool {
        self.job.is_some()
    }

    /// The daemon ends: no new copies.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.give_up_verify("the daemon takes no more requests");
    }

    /// It does not end: copies that are needed are begun again.
    pub fn go_on(&mut self) {
        self.stopped = false;
    }

    /// Whether acknowledgements matter to a copy.
    pub fn is_active(&self) -> bool {
        self.job.is_some() || self.verify.is_some() || !self.reading_suspects.is_empty()
    }

    /// Whether the backup's disks equal the local ones once everything sent is there.
    pub fn is_whole(&self) -> bool {
        self.gap.is_none() && self.suspects.is_empty() && self.reading_suspects.is_empty()
    }

    /// Bytes in which the sites may differ after errors of the local disk.
    pub fn suspect_bytes(&self) -> u64 {
        self.suspects.iter().chain(self.reading_suspects.values()).map(|e| e.len_bytes).sum()
    }

    /// How far the copy is, if one runs.
    pub fn progress(&self, now: MonoNanos) -> Option<Progress> {
        self.job.as_ref().map(|job| job.progress(now))
    }

    /// The gap between the sites, if there is one.
    pub fn gap(&self) -> Option<Gap> {
        self.gap
    }

    /// The member's phase, if nothing keeps its records from the backup but the connection. `records`: guests' writes have
    /// records.
    pub fn phase(&self, records: bool, attached: bool) -> Phase {
        match self.gap.map(|gap| gap.why) {
            Some(GapWhy::Started) => Phase::WaitingForBackup,
            Some(GapWhy::Unreached) if !records => Phase::Unrecorded,
            Some(_) if !records => Phase::Overflowed,
            Some(GapWhy::FirstCopy) => Phase::Initialising,
            Some(_) => Phase::Resyncing,
            None if self.suspect_bytes() > 0 => Phase::DiskFailing,
            None if !attached => Phase::Disconnected,
            None => Phase::Replicating,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::port::OwnerPort;
    use crate::owner::replication::{AHEAD_MAX_BYTES, Clocks, drive_copies};
    use crate::sequencer::{Action, RequestId, Sequencer, Settings};
    use std::task::Waker;
    use tidelock_protocol::hlc::Hlc;
    use tidelock_protocol::ids::{Epoch, WriterId};
    use tidelock_protocol::message::Mode;
    use tidelock_protocol::record::{Effect, Payload};

    const CLOCKS: Clocks = Clocks { now: MonoNanos(1), wall_ms: 1 };
    fn submit(sequencer: &mut Sequencer, nth: u64) {
        let extent = Extent { disk: DiskId(0), offset: nth % 256 * 4096, len_bytes: 4096 };
        let effect = Effect::Write(Payload::new(vec![1; 4096].into()));
        sequencer.submit(RequestId(nth), extent, effect, false, CLOCKS.now, CLOCKS.wall_ms);
    }

    /// A first copy of a disk that has begun.
    fn first_copy(
        backlog_limit_bytes: u64,
        window_bytes: u64,
        disk_bytes: u64,
    ) -> (Sequencer, Copying) {
        let mut sequencer = Sequencer::new(Settings {
            writer: WriterId(0),
            mode: Mode::Pipelined,
            backlog_limit_bytes,
            lock_align_bytes: 512,
        });
        sequencer.start(Epoch(1), Seq::ZERO, Hlc(0), CLOCKS.now, CLOCKS.wall_ms);
        let mut copying = Copying::new(Bounds { window_bytes, rate_bytes_per_s: 0 });
        let whole = Extent { disk: DiskId(0), offset: 0, len_bytes: disk_bytes };
        copying.attached("db", CopyState::Empty, None, |_| vec![whole], CLOCKS.now);
        (sequencer, copying)
    }

    /// A turn of the owner loop, whose disk does everything at once.
    fn turn(sequencer: &mut Sequencer, copying: &mut Copying, port: &OwnerPort<()>) {
        drive_copies(sequencer, copying, port, CLOCKS);
        while let Some(action) = sequencer.poll_action() {
            match action {
                Action::Write { op, .. } => {
                    sequencer.written(op, Ok(()), CLOCKS.now, CLOCKS.wall_ms);
                }
                Action::Read { op, extent } => {
                    let data = vec![7; extent.len_bytes as usize].into();
                    sequencer.read_done(op, Ok(data), CLOCKS.now, CLOCKS.wall_ms);
                }
                Action::Copied { extent, outcome } => copying.copied(extent, outcome),
                _ => {}
            }
        }
    }

    /// The link carries one record in a turn; in its place 32 writes of a guest always wait.
    #[test]
    fn a_copy_ends_also_beside_a_guest_that_writes_more_than_the_link_carries() {
        let (mut sequencer, mut copying) = first_copy(64 << 10, 4 << 20, 1 << 20);
        let (port, _messages) = OwnerPort::<()>::new(Waker::noop().clone());
        let (mut requests, mut durable, mut turns) = (0, Seq::ZERO, 0);
        while !copying.wants_marker() {
            turns += 1;
            assert!(turns < 10_000, "it stands at {:?}", copying.progress(CLOCKS.now));
            while sequencer.waiting() < 32 {
                submit(&mut sequencer, requests);
                requests += 1;
            }
            turn(&mut sequencer, &mut copying, &port);
            durable = durable.next().min(sequencer.last_seq());
            sequencer.committed(durable, CLOCKS.now, CLOCKS.wall_ms);
            port.set_taken(durable);
        }
        assert!(requests > 32, "the guest's writes go on, too");
    }

    /// A guest's write finds no more than this before it in the queue, and memory holds no more than the window.
    #[test]
    fn copies_wait_for_the_connection_and_then_for_the_backup() {
        const WINDOW_BYTES: u64 = 4 << 20;
        let (mut sequencer, mut copying) = first_copy(1 << 30, WINDOW_BYTES, 64 << 20);
        let (port, _messages) = OwnerPort::<()>::new(Waker::noop().clone());
        for _ in 0..3 {
            turn(&mut sequencer, &mut copying, &port);
            assert_eq!(sequencer.lag().bytes, AHEAD_MAX_BYTES, "the connection takes nothing");
        }
        for _ in 0..100 {
            port.set_taken(sequencer.last_seq());
            turn(&mut sequencer, &mut copying, &port);
        }
        assert_eq!(sequencer.lag().bytes, WINDOW_BYTES, "the backup acknowledges nothing");
        sequencer.committed(Seq(1), CLOCKS.now, CLOCKS.wall_ms);
        turn(&mut sequencer, &mut copying, &port);
        assert_eq!(sequencer.lag().bytes, WINDOW_BYTES, "what was acknowledged makes room");
        assert_eq!(sequencer.last_seq(), Seq(WINDOW_BYTES / PIECE_BYTES + 1));
    }

    /// Two verifications are given up, and a third one is begun, before anything is answered.
    #[test]
    fn late_answers_are_none_to_the_question_of_a_later_verification() {
        let mut copying = Copying::new(Bounds { window_bytes: 4 << 20, rate_bytes_per_s: 0 });
        copying.attached("db", CopyState::Whole, None, |_| Vec::new(), CLOCKS.now);
        let disk = Extent { disk: DiskId(0), offset: 0, len_bytes: 4096 };
        let begin = |copying: &mut Copying| {
            copying.begin_verify(false, vec![disk], 0, CLOCKS.now).unwrap();
            copying.next(CLOCKS.now).expect("it is looked at").0
        };
        for _ in 0..2 {
            let asked = begin(&mut copying);
            copying.copied(asked, CopyOutcome::Asked);
            copying.give_up_verify("a test");
        }
        let asked = begin(&mut copying);
        copying.copied(asked, CopyOutcome::Asked);
        for _ in 0..2 {
            copying.digest_result(asked.disk, asked.offset, true);
            assert!(copying.verified().is_none(), "that was asked before");
        }
        copying.digest_result(asked.disk, asked.offset, true);
        assert!(copying.verified().is_some());
        copying.end_verify();
        assert!(copying.verified().is_none(), "what was found is told once");
    }

    #[test]
    fn nothing_can_be_recovered_before_a_first_copy_has_ended() {
        let phase = |copy, before: Option<CopyState>| {
            let mut copying = Copying::new(Bounds { window_bytes: 4 << 20, rate_bytes_per_s: 0 });
            for copy in before.into_iter().chain([copy]) {
                copying.attached("db", copy, None, |_| Vec::new(), CLOCKS.now);
            }
            copying.phase(true, true)
        };
        for copy in [CopyState::Empty, CopyState::Partial, CopyState::Seeded] {
            assert_eq!(phase(copy, None), Phase::Initialising, "{copy:?}");
        }
        assert_eq!(phase(CopyState::Resyncing, None), Phase::Resyncing);
        assert_eq!(phase(CopyState::Whole, None), Phase::Replicating);
        assert_eq!(phase(CopyState::Resyncing, Some(CopyState::Whole)), Phase::Resyncing);
        // Guests that have no records come before, and only as long as they have none.
        for (why, phase) in
            [(GapWhy::Unreached, Phase::Unrecorded), (GapWhy::BacklogFull, Phase::Overflowed)]
        {
            let mut copying = whole();
            copying.stop_recording(why, 7);
            assert_eq!(copying.phase(false, true), phase);
            assert_eq!(copying.phase(true, true), Phase::Resyncing, "it is compared");
        }
    }

    fn whole() -> Copying {
        let mut copying = Copying::new(Bounds { window_bytes: 4 << 20, rate_bytes_per_s: 0 });
        copying.attached("db", CopyState::Whole, None, |_| Vec::new(), CLOCKS.now);
        assert!(copying.is_whole() && !copying.is_active() && !copying.is_copying());
        copying
    }

    fn extent(offset: u64, len_bytes: u64) -> Extent {
        Extent { disk: DiskId(0), offset, len_bytes }
    }

    #[test]
    fn what_a_disk_has_failed_to_write_is_copied_in_pieces_and_tried_again_after_a_while() {
        let mut copying = whole();
        let len_bytes = 2 * PIECE_BYTES + 512;
        copying.suspect(extent(4096, len_bytes));
        assert_eq!((copying.suspect_bytes(), copying.is_whole()), (len_bytes, false));
        assert_eq!(copying.phase(true, true), Phase::DiskFailing);
        assert!(copying.needs_tick() && !copying.wants_more(CLOCKS.now), "not at once");
        let due = |copying: &mut Copying| {
            (0..RETRY_TICKS).for_each(|_| copying.tick());
            copying.wants_more(CLOCKS.now)
        };
        assert!(due(&mut copying));
        let mut pieces = Vec::new();
        while copying.wants_more(CLOCKS.now) {
            let (piece, kind) = copying.next(CLOCKS.now).unwrap();
            assert_eq!(kind, CopyKind::Copy);
            pieces.push(piece);
        }
        pieces.sort_by_key(|piece| piece.offset);
        let expected = [(4096, PIECE_BYTES), (4096 + PIECE_BYTES, PIECE_BYTES)];
        let found = pieces.iter().map(|piece| (piece.offset, piece.len_bytes));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [&expected[..], &[(4096 + 2 * PIECE_BYTES, 512)]].concat()
        );
        assert_eq!(copying.reading_bytes(), len_bytes);
        assert!(copying.is_active() && !copying.is_idle() && !copying.needs_tick());
        // The disk does not read one of them either.
        copying.copied(pieces[0], CopyOutcome::Sent);
        copying.copied(pieces[1], CopyOutcome::Unreadable);
        copying.copied(pieces[2], CopyOutcome::Sent);
        assert_eq!(copying.suspect_bytes(), PIECE_BYTES);
        assert!(!copying.wants_more(CLOCKS.now) && due(&mut copying));
        let (piece, _) = copying.next(CLOCKS.now).unwrap();
        copying.copied(piece, CopyOutcome::Sent);
        assert!(copying.is_whole() && copying.is_idle() && !copying.needs_tick());
        assert_eq!(copying.phase(true, true), Phase::Replicating);
        assert_eq!(copying.phase(true, false), Phase::Disconnected);
    }

    /// The comparison after an overflow must not take a late answer for one of its own.
    #[test]
    fn a_job_that_is_given_up_is_answered_when_nothing_of_it_is_read_or_asked() {
        for is_asked in [false, true] {
            let mut copying = whole();
            copying.begin_verify(false, vec![extent(0, 4096)], 0, CLOCKS.now).unwrap();
            assert!(copying.is_active() && copying.is_answered());
            let (piece, _) = copying.next(CLOCKS.now).unwrap();
            if is_asked {
                copying.copied(piece, CopyOutcome::Asked);
            }
            copying.stop_recording(GapWhy::BacklogFull, 7);
            assert_eq!(copying.take_given_up(), Some("guests' writes are not recorded for now"));
            assert!(!copying.is_answered());
            assert_eq!(copying.phase(false, true), Phase::Overflowed);
            match is_asked {
                true => copying.digest_result(piece.disk, piece.offset, true),
                false => copying.copied(piece, CopyOutcome::Withdrawn),
            }
            assert!(copying.is_answered());
        }
        let mut copying = whole();
        copying.begin_verify(false, vec![extent(0, 4096)], 0, CLOCKS.now).unwrap();
        let (piece, _) = copying.next(CLOCKS.now).unwrap();
        copying.give_up_verify("a test");
        copying.copied(piece, CopyOutcome::Asked);
        assert!(!copying.is_answered(), "it was asked although nobody wants it any more");
        copying.reconnected();
        assert!(copying.is_answered(), "a new connection answers no old question");
    }

    #[test]
    fn the_end_of_a_copy_waits_for_the_floor_and_for_all_of_its_pieces() {
        let (_, mut copying) = first_copy(1 << 30, 4 << 20, PIECE_BYTES);
        assert!(copying.is_copying() && copying.is_active() && !copying.wants_marker());
        let (piece, _) = copying.next(CLOCKS.now).unwrap();
        assert!(!copying.wants_marker());
        copying.await_floor();
        copying.copied(piece, CopyOutcome::Sent);
        assert!(!copying.wants_marker(), "the others have not said how far they are");
        copying.floor_heard(Seq(9));
        assert_eq!((copying.wants_marker(), copying.pad_to()), (true, Seq(9)));
        copying.floor_heard(Seq(4));
        assert_eq!(copying.pad_to(), Seq(9));
        copying.stop();
        assert!(!copying.wants_marker() && !copying.wants_more(CLOCKS.now));
        copying.go_on();
        copying.set_marker(Seq(10));
        assert!(!copying.wants_more(CLOCKS.now));
        assert!(!copying.committed("db", Seq(9), CLOCKS.now) && copying.is_copying());
        assert!(copying.committed("db", Seq(10), CLOCKS.now));
        assert!(!copying.is_copying() && copying.is_whole());
    }

    #[test]
    fn copies_have_a_share_of_what_is_under_way_and_a_window() {
        let (_, mut copying) = first_copy(1 << 30, 2 * PIECE_BYTES, 8 * PIECE_BYTES);
        copying.set_share(0);
        assert!(copying.is_below_share(0) && !copying.is_below_share(1), "one piece at least");
        copying.set_share(3 * PIECE_BYTES);
        assert!(copying.is_below_share(2) && !copying.is_below_share(3));
        let (piece, _) = copying.next(CLOCKS.now).unwrap();
        assert!(copying.is_below_share(1) && !copying.is_below_share(2), "one is being read");
        copying.copied(piece, CopyOutcome::Asked);
        assert!(copying.is_below_share(1) && !copying.is_below_share(2), "or asked");
        copying.set_share(0);
        assert!(!copying.is_below_share(0));
        let (_, mut copying) = first_copy(1 << 30, 2 * PIECE_BYTES, 8 * PIECE_BYTES);
        copying.next(CLOCKS.now).unwrap();
        assert!(!copying.is_window_full(PIECE_BYTES - 1) && copying.is_window_full(PIECE_BYTES));
    }

    #[test]
    fn a_copy_reads_no_more_than_its_rate() {
        let second = MonoNanos(CLOCKS.now.0 + 1_000_000_000);
        let bounds = Bounds { window_bytes: 4 << 20, rate_bytes_per_s: PIECE_BYTES };
        let mut copying = Copying::new(bounds);
        let whole = |_| vec![extent(0, 64 * PIECE_BYTES)];
        copying.attached("db", CopyState::Empty, None, whole, CLOCKS.now);
        while copying.wants_more(CLOCKS.now) {
            let (piece, _) = copying.next(CLOCKS.now).unwrap();
            copying.copied(piece, CopyOutcome::Sent);
        }
        assert!(copying.is_active() && copying.wants_more(second), "in a while it goes on");
    }
}
