//! Heartbeats: a record every interval that goes the whole way of a write, and a watch that misses it.
//!
//! A stop of replication that nothing reports (a loop that hangs, a backup that is there and does not
//! answer, a link that swallows packets) shows in nothing but the acknowledgement that does not come. So each
//! writer's owner loop is asked to admit a record without an effect: inbox, sequencer, sender, link, the
//! backup's journal, and back as C. A group that writes needs none: any record that was admitted since the last
//! look is as good, and none is sent while one is under way, so heartbeats cost at most one small record an
//! interval.
//!
//! [`Watch`] is sans-I/O; it runs on a thread of its own that takes no lock, so that no loop that it watches
//! can keep it from its word. [`Pulse`] is what it shares with the loop.
//!
//! ```text
//!            a record was admitted                acknowledged
//!          ┌───────────────────────────┐       ┌──────────────► none under way
//! none ────┤                           ▼       │
//!          └─ interval over ─► Asked ─► Admitted ─┐ no acknowledgement rose for `alarm_after`
//!                                │                ▼
//!                                └────────────► lost ── acknowledged ─► back
//!                     not taken up for `alarm_after`
//! ```
//!
//! Not missed: what a state of its own explains (no link, a stall, a refusal). The clock stands meanwhile, and goes on
//! afterwards: a link that breaks and comes back again and again, and never brings an acknowledgement, is missed.
//! Nor a record that queues behind others while acknowledgements go on rising, or parts of it arrive: that is lag.

use crate::link::port::OwnerPort;
use crate::owner::{OwnerView, Phase, ToOwner};
use crate::stats::LinkStats;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use tidelock_planted::Bug;
use tidelock_protocol::ids::{MonoNanos, Seq};

use Ordering::{Acquire, Relaxed, Release};

/// How often a watch looks. An age is told too great by this at most.
pub const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A record every interval that goes the whole way, and is missed when it does not come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatSettings {
    /// Time from one to the next, if nothing else was sent.
    pub interval: Duration,
    /// After how long one that has not come back is missed; several intervals.
    pub alarm_after: Duration,
}

impl HeartbeatSettings {
    /// Settings of a group whose configuration has none.
    pub const DEFAULT: Self =
        Self { interval: Duration::from_secs(1), alarm_after: Duration::from_secs(5) };
}

/// Which part of the way a heartbeat was last seen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The owner loop has not admitted it.
    Owner,
    /// It was admitted, and the backup has not acknowledged anything since.
    Backup,
}

/// One writer's heartbeats, as its owner loop and its watch see them. Each value is written by one of them.
#[derive(Debug, Default)]
pub struct Pulse {
    last_seq: AtomicU64,
    taken: AtomicU64,
    taken_seq: AtomicU64,
    asked: AtomicU64,
    returned: AtomicU64,
    /// 0: none has come back.
    newest_ns: AtomicU64,
    lost: AtomicU8,
}

impl Pulse {
    /// The owner loop: the last seq that was given out.
    pub fn set_last_seq(&self, seq: Seq) {
        self.last_seq.store(seq.0, Relaxed);
    }

    /// The owner loop: heartbeat `number` is back when `seq` is.
    pub fn take(&self, number: u64, seq: Seq) {
        self.taken_seq.store(seq.0, Relaxed);
        self.taken.store(number, Release);
    }

    /// The watch: the last seq that was given out.
    #[must_use]
    pub fn last_seq(&self) -> Seq {
        Seq(self.last_seq.load(Relaxed))
    }

    /// The watch: the last heartbeat that was admitted, and its seq.
    #[must_use]
    pub fn taken(&self) -> (u64, Seq) {
        let number = self.taken.load(Acquire);
        (number, Seq(self.taken_seq.load(Relaxed)))
    }

    /// The watch: what it knows now.
    pub fn tell(&self, watch: &Watch) {
        self.asked.store(watch.asked, Relaxed);
        self.returned.store(watch.returned, Relaxed);
        self.newest_ns.store(watch.newest.map_or(0, |at| at.0.max(1)), Relaxed);
        let lost = match watch.lost {
            None => 0,
            Some(Missing::Owner) => 1,
            Some(Missing::Backup) => 2,
        };
        self.lost.store(lost, Relaxed);
    }

    /// Heartbeats that were asked of the owner loop.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.load(Relaxed)
    }

    /// Heartbeats, and records that were as good, that have come back.
    #[must_use]
    pub fn returned(&self) -> u64 {
        self.returned.load(Relaxed)
    }

    /// When the newest that has come back had been sent: all that was admitted before is at the backup.
    #[must_use]
    pub fn newest(&self) -> Option<MonoNanos> {
        Some(self.newest_ns.load(Relaxed)).filter(|ns| *ns > 0).map(MonoNanos)
    }

    /// Where one is missing, if one is.
    #[must_use]
    pub fn lost(&self) -> Option<Missing> {
        match self.lost.load(Relaxed) {
            0 => None,
            1 => Some(Missing::Owner),
            _ => Some(Missing::Backup),
        }
    }
}

/// What a look at a writer shows.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    /// When.
    pub now: MonoNanos,
    /// A state of the group says already why nothing would come back, or the daemon ends.
    pub is_explained: bool,
    /// The last seq that the owner loop has given out.
    pub last_seq: Seq,
    /// The last heartbeat that it has admitted, and its seq.
    pub taken: (u64, Seq),
    /// Up to where the backup has acknowledged.
    pub acknowledged: Seq,
    /// How often the backup has said that bytes of a large record arrive.
    pub arrivals: u64,
}

/// What is said of a writer while it is watched.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// The daemon ends.
    pub is_ending: bool,
    /// The group's only member: its C goes on by itself but in a resync.
    pub is_alone: bool,
    /// As its owner loop has said last.
    pub phase: Phase,
}

impl Standing {
    /// Whether a state says why nothing comes back.
    #[must_use]
    pub fn explains(&self, link: &LinkStats) -> bool {
        self.is_ending
            || !link.is_attached()
            || link.is_stalled()
            || matches!(self.phase, Phase::WaitingForBackup | Phase::Refused | Phase::Fenced)
    }

    /// What answers a heartbeat: C, by which replies leave. In a resync C stands still, and in a group of several it
    /// may wait for another writer; then that the backup has it on stable storage.
    #[must_use]
    pub fn acknowledged(&self, (durable, committed): (Seq, Seq)) -> Seq {
        let c_follows =
            self.is_alone && !matches!(self.phase, Phase::Resyncing | Phase::DiskFailing);
        if c_follows { committed } else { durable }
    }
}

/// A writer under watch, with what its loops publish.
pub struct Watched {
    watch: Watch,
    /// The group's only member.
    is_alone: bool,
    port: Arc<OwnerPort<ToOwner>>,
    link: Arc<LinkStats>,
    view: Arc<OwnerView>,
    pulse: Arc<Pulse>,
}

impl Watched {
    /// A writer whose loops have just begun. `is_alone`: it is the group's only member.
    #[must_use]
    pub fn new(
        settings: HeartbeatSettings,
        is_alone: bool,
        port: Arc<OwnerPort<ToOwner>>,
        link: Arc<LinkStats>,
        view: Arc<OwnerView>,
        pulse: Arc<Pulse>,
    ) -> Self {
        Self { watch: Watch::new(settings), is_alone, port, link, view, pulse }
    }

    /// The member as the watch sees it.
    #[must_use]
    pub fn sight(&self, now: MonoNanos, is_ending: bool) -> Sight {
        let stands = Standing { is_ending, is_alone: self.is_alone, phase: self.view.phase() };
        Sight {
            now,
            is_explained: stands.explains(&self.link),
            last_seq: self.pulse.last_seq(),
            taken: self.pulse.taken(),
            acknowledged: stands.acknowledged(self.port.acked()),
            arrivals: self.link.arrivals(),
        }
    }

    /// A look. Its outcome is told to those who ask before anything else is done with it.
    pub fn look(&mut self, sight: &Sight) -> Option<Step> {
        let step = self.watch.look(sight);
        self.pulse.tell(&self.watch);
        if let Some(Step::Ask(number)) = step {
            self.port.send(ToOwner::Heartbeat(number));
        }
        step
    }

    /// Time since the heartbeat that is missing was begun.
    #[must_use]
    pub fn waited_ms(&self, now: MonoNanos) -> u64 {
        self.watch.waited_ms(now)
    }

    /// The owner loop's word on its heartbeats.
    #[must_use]
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }
}

/// What a look leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask the owner loop for heartbeat number so.
    Ask(u64),
    /// One is missing.
    Lost(Missing),
    /// It has come back.
    Back,
}

/// One that is under way.
#[derive(Clone, Copy, Debug)]
struct Beat {
    /// It was asked for, or admitted, not before.
    at: MonoNanos,
    /// The watch's clock then.
    clock_ns: u64,
    /// `None`: the owner loop has not admitted it.
    seq: Option<Seq>,
}

/// The watch over one writer.
#[derive(Debug)]
pub struct Watch {
    settings: HeartbeatSettings,
    under_way: Option<Beat>,
    /// When the last one was begun.
    begun: Option<MonoNanos>,
    asked: u64,
    returned: u64,
    newest: Option<MonoNanos>,
    lost: Option<Missing>,
    /// The last seq given out and the time, as of the look before.
    before: Option<(MonoNanos, Seq)>,
    /// The time in which nothing explained that nothing comes back.
    clock_ns: u64,
    acknowledged: Seq,
    arrivals: u64,
    /// The clock when an acknowledgement rose, or parts of a record arrived.
    progress_ns: u64,
    /// The clock when the watch itself was stopped last.
    woke_ns: u64,
}

impl Watch {
    /// One that has seen nothing.
    #[must_use]
    pub fn new(settings: HeartbeatSettings) -> Self {
        Self {
            settings,
            under_way: None,
            begun: None,
            asked: 0,
            returned: 0,
            newest: None,
            lost: None,
            before: None,
            clock_ns: 0,
            acknowledged: Seq::ZERO,
            arrivals: 0,
            progress_ns: 0,
            woke_ns: 0,
        }
    }

    /// For how long the one that is under way has been so, in milliseconds.
    #[must_use]
    pub fn waited_ms(&self, now: MonoNanos) -> u64 {
        self.under_way.map_or(0, |beat| now.since_ns(beat.at) / 1_000_000)
    }

    /// Looks.
    pub fn look(&mut self, sight: &Sight) -> Option<Step> {
        let before = self.before.replace((sight.now, sight.last_seq));
        let clock_ns = self.clock_ns;
        self.follow(sight, before.map(|(at, _)| at));
        if let Some((at, seq)) = before
            && self.under_way.is_none()
            && sight.last_seq > seq
        {
            self.begin(at, clock_ns, Some(sight.last_seq));
        }
        if self.has_returned(sight) && self.lost.take().is_some() {
            return Some(Step::Back);
        }
        if sight.is_explained {
            return None;
        }
        if self.under_way.is_none() && self.is_due(sight.now) {
            self.begin(sight.now, self.clock_ns, None);
            self.asked += 1;
            return Some(Step::Ask(self.asked));
        }
        let missing = self.missing().filter(|_| self.lost.is_none())?;
        self.lost = Some(missing);
        Some(Step::Lost(missing))
    }

    /// Takes in how far things are.
    fn follow(&mut self, sight: &Sight, looked_at: Option<MonoNanos>) {
        // Who was stopped itself cannot tell what was late meanwhile.
        let gap_ns = looked_at.map_or(0, |at| sight.now.since_ns(at));
        let has_slept = u128::from(gap_ns) > self.settings.alarm_after.as_nanos() / 2;
        if has_slept {
            self.woke_ns = self.clock_ns;
        } else if !sight.is_explained {
            self.clock_ns += gap_ns;
        }
        if sight.acknowledged > self.acknowledged || sight.arrivals != self.arrivals {
            (self.acknowledged, self.arrivals) = (sight.acknowledged, sight.arrivals);
            self.progress_ns = self.clock_ns;
        }
        if let Some(beat) = self.under_way.as_mut().filter(|beat| beat.seq.is_none())
            && sight.taken.0 == self.asked
        {
            beat.seq = Some(sight.taken.1);
        }
    }

    fn begin(&mut self, at: MonoNanos, clock_ns: u64, seq: Option<Seq>) {
        self.begun = Some(at);
        self.under_way = Some(Beat { at, clock_ns, seq });
    }

    fn has_returned(&mut self, sight: &Sight) -> bool {
        let Some(Beat { at, seq: Some(seq), .. }) = self.under_way else { return false };
        let has_returned = seq <= sight.acknowledged;
        let has_returned = has_returned || tidelock_planted::is(Bug::AdmittedIsBack);
        if has_returned {
            self.under_way = None;
            self.returned += 1;
            self.newest = Some(at);
        }
        has_returned
    }

    fn is_due(&self, now: MonoNanos) -> bool {
        let interval_ns = self.settings.interval.as_nanos();
        self.begun.is_none_or(|at| u128::from(now.since_ns(at)) >= interval_ns)
    }

    fn missing(&self) -> Option<Missing> {
        let beat = self.under_way?;
        let (since, missing) = match beat.seq {
            None => (beat.clock_ns, Missing::Owner),
            Some(_) if tidelock_planted::is(Bug::QueueIsSilence) => {
                (beat.clock_ns, Missing::Backup)
            }
            Some(_) => (beat.clock_ns.max(self.progress_ns), Missing::Backup),
        };
        let waited_ns = u128::from(self.clock_ns - since.max(self.woke_ns));
        (waited_ns >= self.settings.alarm_after.as_nanos()).then_some(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: HeartbeatSettings =
        HeartbeatSettings { interval: Duration::from_secs(1), alarm_after: Duration::from_secs(5) };
    const LOOK_MS: u64 = LOOK_EVERY.as_millis() as u64;

    /// A writer, its link and its backup, of which each can stop without a word.
    struct World {
        watch: Watch,
        now_ms: u64,
        owner_hangs: bool,
        backup_hangs: bool,
        is_explained: bool,
        last_seq: Seq,
        asked: Option<u64>,
        taken: (u64, Seq),
        acknowledged: Seq,
        arrivals: u64,
    }

    impl World {
        fn new() -> Self {
            Self {
                watch: Watch::new(SETTINGS),
                now_ms: 10_000,
                owner_hangs: false,
                backup_hangs: false,
                is_explained: false,
                last_seq: Seq(40),
                asked: None,
                taken: (0, Seq(0)),
                acknowledged: Seq(40),
                arrivals: 0,
            }
        }

        /// Each part does what it does until the next look, and the watch looks.
        fn look(&mut self) -> Option<Step> {
            self.now_ms += LOOK_MS;
            if !self.backup_hangs && !self.is_explained {
                self.acknowledged = self.last_seq;
            }
            if let Some(number) = self.asked.take_if(|_| !self.owner_hangs) {
                self.last_seq = self.last_seq.next();
                self.taken = (number, self.last_seq);
            }
            let step = self.watch.look(&Sight {
                now: MonoNanos(self.now_ms * 1_000_000),
                is_explained: self.is_explained,
                last_seq: self.last_seq,
                taken: self.taken,
                acknowledged: self.acknowledged,
                arrivals: self.arrivals,
            });
            if let Some(Step::Ask(number)) = step {
                assert_eq!(self.asked.replace(number), None, "one at a time");
            }
            step
        }

        /// The steps of so many seconds, but for what was asked.
        fn run(&mut self, seconds: u64) -> Vec<Step> {
            let looks = (0..seconds * 1000 / LOOK_MS).filter_map(|_| self.look());
            looks.filter(|step| !matches!(step, Step::Ask(_))).collect()
        }
    }

    #[test]
    fn an_idle_writer_sends_one_each_interval() {
        let mut world = World::new();
        assert_eq!(world.run(60), []);
        let sent = world.last_seq.0 - 40;
        assert!((55..=60).contains(&sent), "{sent} in a minute");
        assert_eq!(
            world.watch.returned,
            world.watch.asked - u64::from(world.watch.under_way.is_some())
        );
    }

    #[test]
    fn a_writer_that_writes_needs_none() {
        let mut world = World::new();
        world.run(3);
        let asked = world.watch.asked;
        for _ in 0..200 {
            world.last_seq = world.last_seq.next();
            assert_eq!(world.look(), None);
        }
        assert_eq!(world.watch.asked, asked);
        let age_ms = world.now_ms - world.watch.newest.unwrap().0 / 1_000_000;
        assert!(age_ms <= 4 * LOOK_MS, "{age_ms} ms");
        // Twice in an interval is enough.
        for _ in 0..20 {
            world.last_seq = world.last_seq.next();
            (0..5).for_each(|_| assert_eq!(world.look(), None));
        }
        assert_eq!(world.watch.asked, asked);
    }

    #[test]
    fn a_loop_that_hangs_is_missed() {
        let mut world = World::new();
        world.run(3);
        world.owner_hangs = true;
        assert_eq!(world.run(5), [], "an interval and `alarm_after`, not less");
        assert_eq!(world.run(3), [Step::Lost(Missing::Owner)]);
        assert_eq!(world.run(60), [], "said once");
        world.owner_hangs = false;
        assert_eq!(world.run(1), [Step::Back]);
    }

    /// Acknowledgements of what the link still had do not stand for a loop that admits nothing.
    #[test]
    fn a_loop_that_hangs_is_missed_although_its_backlog_is_sent() {
        let mut world = World::new();
        world.run(3);
        world.backup_hangs = true;
        world.last_seq = Seq(100_000);
        world.look();
        world.acknowledged = Seq(100_000);
        world.owner_hangs = true;
        for _ in 0..80 {
            world.acknowledged = world.acknowledged.next();
            if world.look() == Some(Step::Lost(Missing::Owner)) {
                return;
            }
        }
        panic!("not missed");
    }

    #[test]
    fn a_backup_that_falls_silent_is_missed_idle_or_not() {
        for writes in [false, true] {
            let mut world = World::new();
            world.run(3);
            world.backup_hangs = true;
            let mut steps = Vec::new();
            for _ in 0..70 {
                world.last_seq = Seq(world.last_seq.0 + u64::from(writes));
                steps.extend(world.look().filter(|step| !matches!(step, Step::Ask(_))));
            }
            assert_eq!(steps, [Step::Lost(Missing::Backup)], "writes: {writes}");
            let sent = world.last_seq.0 - world.acknowledged.0;
            assert!(writes || sent <= 1, "{sent} heartbeats into a link that takes none");
            world.backup_hangs = false;
            assert_eq!(world.run(1), [Step::Back]);
        }
    }

    /// A link that is slower than the guest writes has lag, and has not stopped.
    #[test]
    fn a_queue_that_moves_is_not_missed() {
        let mut world = World::new();
        world.run(3);
        world.backup_hangs = true;
        world.last_seq = Seq(world.last_seq.0 + 1_000);
        for _ in 0..20 {
            assert_eq!(world.run(4), []);
            world.acknowledged = world.acknowledged.next();
        }
        assert_eq!(world.run(6), [Step::Lost(Missing::Backup)], "now it has");
    }

    #[test]
    fn what_a_state_explains_is_not_missed_and_what_was_missed_stays_so_until_it_is_back() {
        let mut world = World::new();
        world.run(3);
        (world.is_explained, world.backup_hangs) = (true, true);
        assert_eq!(world.run(60), []);
        let asked = world.watch.asked;
        world.is_explained = false;
        assert_eq!(world.run(3), [], "not counted while it was explained");
        assert_eq!(world.run(4), [Step::Lost(Missing::Backup)]);
        assert!(world.watch.asked <= asked + 1);
        world.is_explained = true;
        assert_eq!(world.run(60), []);
        assert_eq!(world.watch.lost, Some(Missing::Backup));
        (world.is_explained, world.backup_hangs) = (false, false);
        assert_eq!(world.run(1), [Step::Back]);
    }

    /// A link that swallows what is larger than a handshake: each connection ends when its lease does, which is before
    /// the alarm, and the next one is attached.
    #[test]
    fn a_link_that_comes_back_and_never_brings_anything_is_missed() {
        let mut world = World::new();
        world.run(3);
        world.backup_hangs = true;
        let mut steps = Vec::new();
        for _ in 0..4 {
            steps.extend(world.run(2));
            world.is_explained = true;
            steps.extend(world.run(1));
            world.is_explained = false;
        }
        assert_eq!(steps, [Step::Lost(Missing::Backup)]);
    }

    /// One write that takes the link longer than `alarm_after` is on its way.
    #[test]
    fn a_large_record_whose_parts_arrive_is_not_missed() {
        let mut world = World::new();
        world.run(3);
        world.backup_hangs = true;
        for _ in 0..20 {
            world.arrivals += 1;
            assert_eq!(world.run(1), []);
        }
        assert_eq!(world.run(7), [Step::Lost(Missing::Backup)]);
    }

    /// A daemon that was stopped as a whole finds old heartbeats when it goes on, and has missed nothing.
    #[test]
    fn who_did_not_look_says_nothing() {
        let mut world = World::new();
        world.run(3);
        world.backup_hangs = true;
        world.run(2);
        world.now_ms += 600_000;
        assert_eq!(world.run(4), []);
        assert_eq!(world.run(3), [Step::Lost(Missing::Backup)]);
    }

    #[test]
    fn what_is_told_is_what_the_watch_knows() {
        let (pulse, mut watch) = (Pulse::default(), Watch::new(SETTINGS));
        pulse.tell(&watch);
        assert_eq!((pulse.lost(), pulse.newest(), pulse.returned()), (None, None, 0));
        for lost in [Missing::Owner, Missing::Backup] {
            (watch.lost, watch.newest, watch.returned) = (Some(lost), Some(MonoNanos(7)), 3);
            pulse.tell(&watch);
            assert_eq!((pulse.lost(), pulse.newest()), (Some(lost), Some(MonoNanos(7))));
            assert_eq!(pulse.returned(), 3);
        }
        pulse.take(4, Seq(9));
        pulse.set_last_seq(Seq(11));
        assert_eq!((pulse.taken(), pulse.last_seq()), ((4, Seq(9)), Seq(11)));
    }
}
