//! The owner loop of a member: it holds all the member's state, without locks.
//!
//! Sans-I/O: guests' requests, ends of disk operations, messages, timers and the time go in by its methods; what it wants
//! done goes out through [`Driver`]. After what has come in, [`Owner::turn`] does what follows from it.
//!
//! ```text
//!  tap ─► GuestIo ─► activity log ─► sequencer ─► actions ─┬─► local disk ─► completed ─► sequencer
//!   ▲                                                      ├─► link (records)
//!   └── answers ◄────────────────── Complete ◄─────────────┴─► gate (P)
//! ```
//!
//! Reads and flushes do not pass through the sequencer: they never wait behind replication.
//! Invariant: every request that is taken is answered once, unless the loop ends before.

mod admitted;
mod beating;
mod contact;
mod copying;
mod disk;
pub mod driver;
pub mod ending;
mod gap;
mod idling;
mod local_op;
mod logging;
#[cfg(any(test, feature = "no-file"))]
pub mod no_file;
mod others;
mod overflowing;
mod replication;
mod serving;
pub mod spilling;
mod status;
#[cfg(test)]
mod tests;
mod verifying;

pub use contact::PATIENCE;
pub use copying::Copying;
pub use gap::{Gap, GapWhy};
pub use replication::{Clocks, is_settled};
pub use status::{OwnerView, Phase, Trouble, VerifyEnded};

use crate::activity::geometry::merged;
use crate::activity::{ActivityLog, Attachment, Compare};
use crate::copy_job::{Bounds, Purpose};
use crate::heartbeat::Pulse;
use crate::link::port::{AttachedStream, FromLink, OwnerPort, ToLink};
use crate::link::{GateControl, Refusal};
use crate::sequencer::{Action, DiskError, Extent, OpId, RequestId, Sequencer, Settings};
use crate::stats::OwnerStats;
use admitted::Admitted;
use bytes::Bytes;
use contact::Contact;
use disk::Disk;
use driver::{DiskFile, DiskOp, Driver, GuestIo, Taking, Timer};
use futures_channel::oneshot;
use idling::Idling;
use local_op::{LocalOp, On, Progress};
use logging::Logging;
use spilling::{DiskBacklog, GoesOn, Spilling};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tidelock_buffers::{AlignedBuf, BufPool};
use tidelock_protocol::hlc::{Hlc, WallClock};
use tidelock_protocol::ids::{DiskId, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{Basis, CopyState, DiskSpec, Form, LogAge, Mode};
use tidelock_protocol::vector::CountVector;

/// How often what cannot go on by itself is tried again (throttled copies, unreadable extents).
const TICK: std::time::Duration = std::time::Duration::from_millis(100);
/// Where the link is the limit the backlog fills again many times a second: said once in so long,
/// and counted each time.
const FULL_SAID_EVERY: std::time::Duration = std::time::Duration::from_secs(10);

/// What the owner loop is asked.
#[derive(Debug)]
pub enum ToOwner {
    /// From the link.
    Link(FromLink),
    /// Change the mode.
    SetMode(Mode),
    /// Look whether the backup's disks equal the local ones.
    Verify {
        /// Copy what differs.
        repair: bool,
        /// At this rate at most; 0: no limit.
        rate_bytes_per_s: u64,
    },
    /// End that before its end.
    StopVerify,
    /// Admit heartbeat number so.
    Heartbeat(u64),
    /// Take no more requests; answer when everything is done locally and at the backup. The loop
    /// ends then, together with the other writers of the group: as many as are counted here.
    Drain(oneshot::Sender<Drained>, Arc<AtomicUsize>),
    /// Take no more requests; answer when everything is done locally and at the backup. The loop goes on, and takes
    /// none until [`ToOwner::LetGo`].
    Hold(oneshot::Sender<Drained>, Arc<AtomicUsize>),
    /// Take requests again.
    LetGo,
    /// The group was switched over: whoever connects is turned away.
    SwitchedOver,
    /// End now.
    Stop,
}

/// A clean end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drained {
    /// The writer's last seq, which the backup has.
    pub seq: Seq,
    /// Its time.
    pub hlc: Hlc,
    /// The identity of each disk, if the backup's disks equal the local ones and it was told so. If not, the next run has to
    /// compare them.
    pub marks: Option<Vec<String>>,
}

/// Where P\[self\] is stored for the gate.
pub trait PublishPending: Send + Sync {
    /// From now on every packet may depend on writes up to `seq`, the last of them of time `hlc`.
    fn publish(&self, seq: Seq, hlc: Hlc);
    /// Raises `p` to P of the member, with what tags of others have brought, and returns the
    /// greatest time of it.
    fn read(&self, _p: &mut CountVector) -> Hlc {
        Hlc(0)
    }
    /// From now on every packet may depend on this, too.
    fn raise(&self, _p: &CountVector, _hlc: Hlc) {}
}

/// What a writer among several members needs besides.
#[derive(Clone, Copy, Debug)]
pub struct Several {
    /// How records say what they depend on.
    pub form: Form,
    /// How often it says that it has nothing to write, in the HLC form.
    pub idle_interval: Duration,
}

/// Backlog on disk of an earlier process. This process goes on with it if the backup confirms that no other run has had
/// the disks since.
pub struct LeftOnDisk {
    /// The stream.
    pub goes_on: GoesOn,
    /// Does again on the local disks what may not have ended. Returns how many writes these were.
    pub redo: Box<dyn FnOnce() -> Result<u64, String> + Send>,
}

/// What an owner loop is made of.
pub struct OwnerParts<F> {
    /// The member's name, for logs.
    pub member: String,
    /// For the sequencer.
    pub settings: Settings,
    /// The disks, by id.
    pub disks: Vec<(DiskSpec, F)>,
    /// The link's end of the loop.
    pub port: Arc<OwnerPort<ToOwner>>,
    /// Where P goes.
    pub pending: Arc<dyn PublishPending>,
    /// The member's gate.
    pub gate: Arc<dyn GateControl>,
    /// Numbers for status and metrics.
    pub stats: Arc<OwnerStats>,
    /// State for status.
    pub view: Arc<OwnerView>,
    /// What the watch over its heartbeats reads.
    pub pulse: Arc<Pulse>,
    /// Memory for data of disks.
    pub pool: BufPool,
    /// Bounds of copies.
    pub copy_bounds: Bounds,
    /// The group was switched over to the backup site: no guest is served.
    pub switched_over: bool,
    /// Guests are served also if the backup is not reached for so long ([`contact`]).
    pub serves_unreached_after: Option<Duration>,
    /// If the group has other members.
    pub several: Option<Several>,
    /// No time that this run gives out is below.
    pub hlc_floor: Hlc,
    /// By how much the wall clock may jump.
    pub max_clock_lead: Duration,
    /// Where the sites may differ.
    pub activity: ActivityLog,
    /// The driver has its file.
    pub has_log_file: bool,
    /// Where records wait that memory has no room for.
    pub backlog: Option<DiskBacklog>,
    /// Records of an earlier process in the backlog on disk.
    pub left: Option<LeftOnDisk>,
}

/// The state of one member.
pub struct Owner<D: Driver> {
    member: String,
    driver: D,
    pool: BufPool,
    writer: WriterId,
    sequencer: Sequencer,
    disks: Vec<Disk<D::File>>,
    /// Guests' requests that were taken and not answered.
    open_requests: usize,
    /// Requests that are not begun: an earlier process's writes come first.
    early: Vec<GuestIo>,
    /// Guests' reads under way.
    reads: HashMap<RequestId, Extent>,
    local_ops: HashMap<OpId, LocalOp>,
    copying: Copying,
    verifying: verifying::Verifying,
    contact: Contact,
    logging: Logging,
    admitted: Admitted,
    spilling: Spilling,
    left: Option<LeftOnDisk>,
    /// How far the activity log is, as the link was told.
    told_age: LogAge,
    /// Why the loop cannot go on.
    failed: Option<String>,
    port: Arc<OwnerPort<ToOwner>>,
    pending: Arc<dyn PublishPending>,
    gate: Arc<dyn GateControl>,
    stats: Arc<OwnerStats>,
    view: Arc<OwnerView>,
    pulse: Arc<Pulse>,
    /// The heartbeat that was asked for.
    heartbeat: Option<u64>,
    has_copy: bool,
    attached: bool,
    refusal: Option<Refusal>,
    draining: Option<ending::Draining>,
    /// The last time that a failed read of each disk was logged.
    said_at: HashMap<DiskId, MonoNanos>,
    stopped: bool,
    tick_armed: bool,
    full_said_at: Option<MonoNanos>,
    several: Option<Several>,
    idling: Idling,
    /// P with what tags have brought, as last looked at.
    observed: CountVector,
    observed_hlc: Hlc,
    /// Guests are served. In a group of several, after an unclean stop: from the attachment on, because until then no tag
    /// says what the disk may hold; or, while the group is adopted, without tags that say anything (`docs/causality.md`,
    /// section 5).
    serving: bool,
    /// Whoever connects is turned away.
    switched_over: bool,
    wall: WallClock,
    now: MonoNanos,
    wall_ms: u64,
}

impl<D: Driver> Owner<D> {
    /// Sets up the loop. Nothing happens before [`Owner::begin`].
    pub fn new(parts: OwnerParts<D::File>, driver: D, clocks: Clocks) -> Self {
        let mut sequencer = Sequencer::new(parts.settings);
        let mut wall = WallClock::new(parts.max_clock_lead.as_millis() as u64);
        let now = clocks.now;
        let wall_ms = wall.read(clocks.wall_ms, now);
        if let Some(ceiling_ms) = parts.view.hlc_ceiling_ms() {
            sequencer.set_ceiling(ceiling_ms, now, wall_ms);
        }
        sequencer.observe(parts.hlc_floor);
        // Requests are taken, and wait for the backup.
        let serving = !parts.switched_over && parts.several.is_none();
        let serves_unreached_after = parts.serves_unreached_after.filter(|_| !parts.switched_over);
        let clocks = Clocks { now, wall_ms };
        let spilling = match &parts.left {
            Some(_) => Spilling::awaiting(parts.backlog, clocks),
            None => Spilling::new(parts.backlog, clocks),
        };
        let mut logging = Logging::new(parts.activity, parts.has_log_file);
        let contact = Contact::new(&mut logging.activity, serves_unreached_after, clocks);
        let told_age = logging.activity.age();
        Self {
            member: parts.member,
            driver,
            pool: parts.pool,
            writer: parts.settings.writer,
            sequencer,
            disks: parts.disks.into_iter().map(Disk::new).collect(),
            open_requests: 0,
            early: Vec::new(),
            reads: HashMap::new(),
            local_ops: HashMap::new(),
            copying: Copying::new(parts.copy_bounds),
            verifying: verifying::Verifying::default(),
            contact,
            logging,
            admitted: Admitted::default(),
            spilling,
            left: parts.left,
            told_age,
            failed: None,
            port: parts.port,
            pending: parts.pending,
            gate: parts.gate,
            stats: parts.stats,
            view: parts.view,
            pulse: parts.pulse,
            heartbeat: None,
            has_copy: false,
            attached: false,
            refusal: None,
            draining: None,
            said_at: HashMap::new(),
            stopped: false,
            tick_armed: false,
            full_said_at: None,
            serving,
            switched_over: parts.switched_over,
            several: parts.several,
            idling: Idling::default(),
            observed: CountVector::new(),
            observed_hlc: Hlc(0),
            wall,
            now,
            wall_ms,
        }
    }

    /// The first turn, before anything has come.
    pub fn begin(&mut self) {
        if self.serving {
            self.driver.take(Taking::All);
        } else if self.switched_over {
            self.driver.take(Taking::TurnAway);
        }
        // Its time passes also if nobody asks for anything.
        self.drive_contact();
        // A stream that goes on is seen before anything happens.
        self.act();
        self.publish_stats();
    }

    /// What follows from all that has happened since the last one.
    pub fn turn(&mut self) -> std::io::Result<()> {
        self.take_acks();
        self.drive_backlog();
        self.drive_overflow();
        self.drive_contact();
        self.drive_copies();
        self.drive_idle();
        self.drive_heartbeat();
        self.drive_log();
        self.act();
        // What was asked for and freed since.
        self.drive_log();
        self.act();
        if !self.admitted.is_empty() {
            // Waking the link can cost more than a local write: disk and guest go first.
            self.driver.submit()?;
            self.hand_over();
        }
        self.finish_drain();
        self.publish_stats();
        match self.failed.take() {
            Some(why) => Err(std::io::Error::other(why)),
            None => Ok(()),
        }
    }

    /// A timer has run out.
    pub fn due(&mut self, timer: Timer) {
        match timer {
            Timer::Tick => {
                self.tick_armed = false;
                self.copying.tick();
                self.logging.activity.retry();
            }
            Timer::Idle => self.idle_due(),
        }
    }

    /// An operation of the driver has ended. `buffer`: of a read, with what it has brought.
    pub fn completed(
        &mut self,
        op: DiskOp,
        result: std::io::Result<u32>,
        buffer: Option<AlignedBuf>,
    ) {
        match op {
            DiskOp::Local(op) => self.local(op, result, buffer),
            DiskOp::Read(request) => self.has_read(request, result, buffer),
            DiskOp::Flush(request) => self.flushed(request, result),
            DiskOp::LogWrite => self.log_written(&result),
            DiskOp::LogFlush(disk, number) => self.log_flushed(disk, number, &result),
        }
    }

    /// True if the loop was drained or stopped: nothing comes of it any more.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.stopped
    }

    /// Its driver.
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// The sequencer: the records that were admitted, and those that the backup has.
    pub fn sequencer(&self) -> &Sequencer {
        &self.sequencer
    }

    /// The copies: they say if the disks are equal.
    pub fn copying(&self) -> &Copying {
        &self.copying
    }

    /// The activity log: it says where the sites may differ.
    pub fn activity(&self) -> &ActivityLog {
        &self.logging.activity
    }

    /// The backlog, in memory and on disk.
    pub fn spilling(&self) -> &Spilling {
        &self.spilling
    }

    // ---- messages

    /// A message has come.
    pub fn hear(&mut self, message: ToOwner) {
        match message {
            ToOwner::Link(message) => self.hear_link(message),
            ToOwner::SetMode(mode) => {
                // What one mode completes is completed before the next is in force.
                self.act();
                self.sequencer.set_mode(mode);
                self.driver.to_link(ToLink::Mode(mode));
            }
            ToOwner::Verify { repair, rate_bytes_per_s } => {
                self.begin_verify(repair, rate_bytes_per_s);
            }
            ToOwner::StopVerify => self.copying.give_up_verify("it was stopped on command"),
            ToOwner::Heartbeat(number) => self.heartbeat = Some(number),
            ToOwner::Drain(reply, not_ready) => self.begin_drain(reply, not_ready, true),
            ToOwner::Hold(reply, not_ready) => self.begin_drain(reply, not_ready, false),
            ToOwner::LetGo => self.end_hold(),
            ToOwner::SwitchedOver => self.turn_away(),
            ToOwner::Stop => self.stopped = true,
        }
    }

    fn hear_link(&mut self, message: FromLink) {
        match message {
            FromLink::Attached { attached, compares, .. } if self.spilling.stands() => {
                self.attached = true;
                self.set_refusal(None);
                match compares {
                    true => self.record_again(&attached),
                    false => self.attached_while_standing(&attached),
                }
            }
            FromLink::Attached { attached, first, .. } => {
                self.attached = true;
                self.set_refusal(None);
                match &attached.stream.basis {
                    Basis::Continues => self.go_on_with_left(),
                    basis => self.give_up_left(&why_not(basis)),
                }
                let unrecorded = self.begin_recording(&attached, first);
                let AttachedStream { epoch, durable, stream } = attached;
                // A comparison that an earlier run has begun leaves records that C does not have.
                let is_whole_there = self.port.acked().1 >= durable && self.several.is_none();
                let whole_at_unix_ms = is_whole_there.then(|| stream.last_hlc.physical_ms());
                let must_compare =
                    matches!(stream.copy.told(), CopyState::Partial | CopyState::Resyncing);
                self.spilling.attached();
                if must_compare {
                    // Whatever leaves before the copy has ended may tell what this run cannot name.
                    self.depend_on_comparison(durable, stream.last_hlc.next());
                }
                let compare = self.logging.activity.attached(&Attachment {
                    copy: stream.copy,
                    epoch,
                    durable,
                    basis: stream.basis,
                    copying: self.copying.is_copying(),
                });
                let Self { member, view, copying, disks, .. } = self;
                let ranges =
                    |purpose| copied_ranges(member, view, disks, purpose, compare, unrecorded);
                copying.attached(member, stream.copy, whole_at_unix_ms, ranges, self.now);
                self.mark_backlog();
                if self.several.is_some() && must_compare {
                    self.copying.await_floor();
                }
                self.begin_serving();
            }
            FromLink::Floor { pending, hlc } => {
                let pad_to = pending.get(self.writer);
                self.pending.raise(&pending, hlc);
                self.observe_tags();
                self.copying.floor_heard(pad_to);
            }
            FromLink::Detached => self.attached = false,
            FromLink::MayServeUnrecorded => self.may_serve_unrecorded(),
            FromLink::Digest { disk, offset, equal } => {
                self.copying.digest_result(disk, offset, equal);
            }
            FromLink::Refused(refusal) => {
                self.attached = false;
                self.set_refusal(Some(refusal));
            }
        }
    }

    /// Guests are served from now on, if they were not.
    fn begin_serving(&mut self) {
        for request in std::mem::take(&mut self.early) {
            self.begin_request(request);
        }
        if !self.serving && !self.switched_over {
            self.serving = true;
            self.driver.take(Taking::All);
        }
    }

    fn set_refusal(&mut self, refusal: Option<Refusal>) {
        if self.refusal != refusal {
            self.refusal.clone_from(&refusal);
            self.view.change_trouble(|trouble| trouble.refusal = refusal);
        }
    }

    fn take_acks(&mut self) {
        let clocks = self.clocks();
        let records = self.spilling.records();
        let Self { member, sequencer, copying, port, gate, .. } = self;
        replication::take_acks(member, sequencer, copying, port, gate.as_ref(), records, clocks);
    }

    fn clocks(&self) -> Clocks {
        Clocks { now: self.now, wall_ms: self.wall_ms }
    }

    // ---- copies

    fn drive_copies(&mut self) {
        if self.spilling.stands() {
            return;
        }
        let clocks = self.clocks();
        if self.copying.wants_marker() {
            // The record that ends a copy depends on all that the guest may have heard before.
            if self.gate.awaits_floor().is_some() {
                return self.arm_tick();
            }
            self.observe_tags();
        }
        let Self { sequencer, copying, port, .. } = self;
        replication::drive_copies(sequencer, copying, port, clocks);
        if self.copying.needs_tick() {
            self.arm_tick();
        }
    }

    pub(super) fn arm_tick(&mut self) {
        if !self.tick_armed {
            self.tick_armed = true;
            self.driver.set_timer(Timer::Tick, TICK);
        }
    }

    // ---- the sequencer's actions

    fn act(&mut self) {
        while let Some(action) = self.sequencer.poll_action() {
            self.driver.observe(&action);
            match action {
                Action::Publish(seq, hlc) => self.pending.publish(seq, hlc),
                Action::Send(record) => self.keep_record(record),
                Action::SendInOrder(message) => {
                    self.hand_over();
                    self.driver.to_link(ToLink::InOrder(message));
                }
                Action::Write { op, extent, effect, fua } => {
                    let disk = &self.disks[self.nth(extent.disk)];
                    self.start_local(op, LocalOp::write(disk, extent, effect, fua));
                }
                Action::Read { op, extent } => {
                    let disk = &self.disks[self.nth(extent.disk)];
                    self.start_local(op, LocalOp::read(disk, extent));
                }
                Action::FindHole { op, extent } => {
                    let look = self.disks[self.nth(extent.disk)].look(extent);
                    let look = look.map_err(|error| DiskError::of(&error));
                    self.sequencer.looked(op, look, self.now, self.wall_ms);
                }
                Action::Complete(request, result) => {
                    if result.is_err() {
                        self.stats.disk_errors.fetch_add(1, Ordering::Relaxed);
                    }
                    self.logging.activity.finished(request.0, self.sequencer.last_seq());
                    self.answer(request, result.map(|()| Bytes::new()));
                }
                Action::Copied { extent, outcome } => {
                    self.copying.copied(extent, outcome);
                    // The next turn may be the next process's.
                    self.mark_backlog();
                }
                Action::Suspect(extent) => {
                    tracing::error!(
                        member = self.member,
                        disk = self.disks[self.nth(extent.disk)].name(),
                        offset = extent.offset,
                        len_bytes = extent.len_bytes,
                        "the local disk failed a write, and what it holds there now is not sent yet: the sites may \
                         differ until it can be copied"
                    );
                    self.copying.suspect(extent);
                    self.mark_backlog();
                    self.logging.activity.suspect();
                }
            }
        }
    }

    fn nth(&self, disk: DiskId) -> usize {
        disk::nth(&self.disks, disk)
    }

    fn start_local(&mut self, op: OpId, local: LocalOp) {
        let nth = self.nth(local.disk());
        let Self { disks, driver, pool, .. } = self;
        let progress = local.start(op, &mut On { disk: &disks[nth], driver, pool });
        self.advance(op, progress);
    }

    fn local(&mut self, op: OpId, result: std::io::Result<u32>, buffer: Option<AlignedBuf>) {
        let local = self.local_ops.remove(&op).expect("a local operation in flight");
        let nth = self.nth(local.disk());
        let Self { disks, driver, pool, .. } = self;
        let on = &mut On { disk: &disks[nth], driver, pool };
        let progress = local.advance(op, result, buffer, on);
        self.advance(op, progress);
        // What it set free may start in this turn.
        self.act();
    }

    fn advance(&mut self, op: OpId, progress: Progress) {
        match progress {
            Progress::InFlight(local) => {
                self.local_ops.insert(op, local);
            }
            Progress::Written(result) => {
                self.sequencer.written(op, result, self.now, self.wall_ms);
            }
            Progress::Read(result) => {
                self.sequencer.read_done(op, result, self.now, self.wall_ms);
            }
        }
    }

    /// Gives what was admitted in this turn to the link.
    fn hand_over(&mut self) {
        let age = self.logging.activity.age();
        if age != self.told_age {
            self.told_age = age;
            self.driver.to_link(ToLink::Logged(age));
        }
        for message in self.admitted.take(self.now) {
            self.driver.to_link(message);
        }
    }

    fn publish_stats(&mut self) {
        let full = self.sequencer.is_backlog_full();
        let was_full = self.stats.backlog_full.swap(full, Ordering::Relaxed);
        if full && !was_full {
            self.stats.backlog_full_count.fetch_add(1, Ordering::Relaxed);
            let is_news =
                |said: MonoNanos| self.now.since_ns(said) >= FULL_SAID_EVERY.as_nanos() as u64;
            if self.full_said_at.is_none_or(is_news) {
                self.full_said_at = Some(self.now);
                tracing::warn!(member = self.member, "the backlog is full: guests' writes wait");
            }
        }
        self.pulse.set_last_seq(self.sequencer.last_seq());
        self.stats.greatest_hlc.store(self.sequencer.greatest_hlc().0, Ordering::Relaxed);
        let waits_for_ceiling = self.sequencer.waits_for_ceiling();
        self.stats.waits_for_ceiling.store(waits_for_ceiling, Ordering::Relaxed);
        if waits_for_ceiling {
            self.driver.want_ceiling();
        }
        self.stats.wall_ms.store(self.wall_ms, Ordering::Relaxed);
        let lead_ms = self.sequencer.clock_lead_ms(self.wall_ms);
        self.stats.clock_lead_ms.store(lead_ms, Ordering::Relaxed);
        self.stats.backlog_bytes.store(self.sequencer.backlog_bytes(), Ordering::Relaxed);
        self.stats.waiting.store(self.sequencer.waiting() as u64, Ordering::Relaxed);
        self.view.set(self.phase(), self.sequencer.published(), self.copying.suspect_bytes());
        self.view.set_gap(self.copying.gap());
        let copy = self.copying.progress(self.now);
        if copy.is_some() || self.has_copy {
            self.has_copy = copy.is_some();
            self.view.set_copy(copy);
        }
        self.publish_disk_wait();
        self.follow_verify();
        self.publish_backlog_stats();
        self.publish_log_stats();
        let others = self.draining.is_some()
            || self.logging.activity.wants_acks()
            || self.spilling.wants_acks();
        replication::ask_for_acks(&self.sequencer, &self.copying, &self.port, others);
    }

    /// Whether the backup has ended the epoch for good.
    fn is_fenced(&self) -> bool {
        self.refusal.as_ref().is_some_and(Refusal::is_final)
    }

    /// The member's phase.
    pub fn phase(&self) -> Phase {
        match &self.refusal {
            Some(refusal) if refusal.is_final() => Phase::Fenced,
            Some(_) => Phase::Refused,
            None => {
                let records = self.sequencer.is_started() && !self.spilling.stands();
                self.copying.phase(records, self.attached)
            }
        }
    }
}

/// What a copy has to look at: for an initial copy what may hold anything but zeroes, else what the
/// activity log says, or all. `unrecorded`: what is being written there may be allocated only later.
fn copied_ranges<F: DiskFile>(
    member: &str,
    view: &OwnerView,
    disks: &[Disk<F>],
    purpose: Purpose,
    compare: Compare,
    unrecorded: Vec<Extent>,
) -> Vec<Extent> {
    view.set_compares_all_because(None);
    let allocated = |disk: &Disk<F>| {
        disk.allocated().unwrap_or_else(|error| {
            tracing::warn!(
                member,
                disk = disk.name(),
                %error,
                "cannot list holes: copying all of it"
            );
            vec![disk.whole()]
        })
    };
    match purpose {
        Purpose::Initial => merged(disks.iter().flat_map(allocated).chain(unrecorded).collect()),
        Purpose::Compare => match compare {
            Compare::Mapped(ranges) => {
                tracing::info!(
                    member,
                    bytes = ranges.iter().map(|range| range.len_bytes).sum::<u64>(),
                    "the sites may differ only where the activity log says: comparing that"
                );
                ranges
            }
            Compare::All(why) => {
                tracing::warn!(member, why, "comparing all of the disks");
                view.set_compares_all_because(Some(why));
                disks.iter().map(Disk::whole).collect()
            }
            Compare::Nothing => disks.iter().map(Disk::whole).collect(),
        },
        Purpose::Verify { .. } => unreachable!("nothing is copied for it at an attachment"),
    }
}

fn why_not(basis: &Basis) -> String {
    match basis {
        Basis::Everything { why } => why.clone(),
        _ => "the backup does not take it".to_owned(),
    }
}
