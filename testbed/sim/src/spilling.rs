//! A backlog on disk of a member: production's, with its files on a disk that is never synced ([`crate::files`]). A daemon is
//! killed between its operations, and within an append. The next one goes on with what is there, or not, as production
//! decides; and must, if nothing but the stream was missing at the backup and the host has kept its power.

use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::files::SimFiles;
use crate::owner::MemberRun;
use crate::ring::Tear;
use crate::rng::Rng;
use crate::scenario::{FAULTS, Fault, Scenario};
use crate::schedule::MS;
use crate::world::World;
use std::sync::Arc;
use tidelock_daemon_core::backlog;
use tidelock_daemon_core::link::port::AttachedStream;
use tidelock_daemon_core::sequencer::RECORD_OVERHEAD_BYTES;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::limits::COPY_MAX_BYTES;
use tidelock_protocol::message::CopyState;

/// The largest record, with what it costs besides.
const RECORD_MAX_BYTES: u64 = COPY_MAX_BYTES as u64 + RECORD_OVERHEAD_BYTES;
/// Within this a daemon that is to die within an append has made one, or it lives.
const TEARS_WITHIN_NS: u64 = 1_000 * MS;

/// A backlog on disk. How far the writer may be ahead with it is its limit.
#[derive(Clone, Copy, Debug)]
pub struct BacklogPlan {
    /// Of that, so much in memory.
    pub memory_bytes: u64,
    /// At this size segments are closed.
    pub segment_bytes: u64,
    /// At the limit guests go on.
    pub stands: bool,
    /// For what its disk does.
    seed: u64,
}

/// Draws who has one. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    if !rng.chance(1, 3) {
        return;
    }
    // What is in memory is what may be under way: on a narrow link less than that would be the bottleneck.
    let parts: &[u64] = if plan.narrow.is_some() { &[2] } else { &[2, 4, 16] };
    for group in 0..plan.groups.len() {
        let several = plan.groups[group].may_have_several();
        if several && rng.chance(1, 2) {
            continue;
        }
        let stands = rng.chance(1, 2);
        for vm in plan.vms.iter_mut().filter(|vm| vm.group == group && vm.is_writer()) {
            let limit_bytes = vm.backlog_limit_bytes;
            vm.backlog = Some(BacklogPlan {
                memory_bytes: (limit_bytes / *rng.pick(parts)).max(1 << 10),
                segment_bytes: limit_bytes / *rng.pick(&[1, 4, 16]),
                stands,
                seed: rng.number(),
            });
        }
    }
    for (weight, fault) in plan.fault_weights.iter_mut().zip(FAULTS) {
        *weight = match fault {
            Fault::KillDaemon => 16,
            Fault::Partition | Fault::KillBackup => (*weight).max(6),
            _ => *weight,
        };
    }
}

impl BacklogPlan {
    /// Its directory.
    #[must_use]
    pub fn files(&self, name: &str) -> Arc<SimFiles> {
        Arc::new(SimFiles::new(name, Rng::new(self.seed)))
    }
}

impl MemberRun {
    /// By the simulator's own reckoning: whether the next process of the run must be able to go on with the stream, if
    /// anything of it is on disk.
    pub(crate) fn is_sound(&self) -> bool {
        let Some(owner) = &self.owner else { return false };
        let Some(backlog) = owner.spilling().backlog() else { return false };
        (owner.copying().is_whole() || self.goes_on)
            && owner.copying().suspect_bytes() == 0
            && self.poisoned.is_empty()
            && !backlog.has_failed()
            && !backlog.lacks_some()
            && owner.spilling().records()
            && !self.ended
    }

    fn must_be_gone_on_with(&self) -> bool {
        let backlog = self.owner.as_ref().and_then(|owner| owner.spilling().backlog());
        let has_records = backlog.is_some_and(|backlog| {
            let (segments, on_disk_bytes) = backlog.on_disk();
            on_disk_bytes > (segments * backlog::HEADER_BYTES) as u64
        });
        has_records && self.is_sound()
    }
}

impl World {
    // ---- a daemon that dies

    /// A daemon is to be killed: within an append or right behind it, if it has a backlog on disk, now and then.
    pub(crate) fn tears(&mut self, host: usize) -> bool {
        let vms = self.vms_of(host);
        let has_one = |vm: &usize| {
            let run = self.vms[*vm].run.as_ref();
            let owner = run.and_then(|run| run.owner.as_ref());
            let backlog = owner.and_then(|owner| owner.spilling().backlog());
            backlog.is_some_and(|backlog| !backlog.has_failed())
        };
        let vms: Vec<_> = vms.into_iter().filter(has_one).collect();
        if vms.is_empty() || !self.rng.chance(1, 2) {
            return false;
        }
        let vm = *self.rng.pick(&vms);
        let tear = *self.rng.pick(&[Tear::Within, Tear::Within, Tear::Behind]);
        let until_ns = self.schedule.now_ns() + TEARS_WITHIN_NS;
        self.vms[vm].run.as_mut().expect("just seen").is_to_die(tear, until_ns);
        true
    }

    /// Daemons that have died of it are gone.
    pub(crate) fn bury(&mut self) {
        for host in 0..self.hosts.len() {
            let vms = self.vms_of(host);
            let has_died =
                |vm: &usize| self.vms[*vm].run.as_ref().is_some_and(|run| run.has_died.is_some());
            if vms.iter().any(has_died) {
                self.end_daemon(host);
                let after = self.rng.span(600 * MS);
                self.later(Later::DaemonStarts { host }, after);
            }
        }
    }

    /// A process is gone: what it leaves is what the next one finds.
    pub(crate) fn leaves_backlog(&mut self, vm: usize, run: &MemberRun) {
        if let Some(files) = &self.vms[vm].backlog_files {
            files.process_ends();
            self.vms[vm].must_go_on = run.has_died.unwrap_or_else(|| run.must_be_gone_on_with());
        }
    }

    /// A host loses power, with what was never synced.
    pub(crate) fn backlog_loses_power(&mut self, vm: usize) {
        self.vms[vm].must_go_on = false;
        if let Some(files) = &self.vms[vm].backlog_files {
            files.power_loss(&mut self.rng);
        }
    }

    // ---- checkers

    /// What was whole stays so as long as the stream does: nothing is compared.
    pub(crate) fn check_nothing_compared(&self, vm: usize, attached: &AttachedStream) -> Checked {
        let run = self.vms[vm].run.as_ref().expect("runs");
        let Some(owner) = &run.owner else { return Ok(()) };
        let was_whole =
            owner.spilling().backlog().is_some() && (owner.copying().is_whole() || run.goes_on);
        let holds = !was_whole || attached.stream.copy == CopyState::Whole;
        check(holds, Checker::NothingCompared, || {
            format!("vm {vm}: the stream is whole, and the backup says {:?}", attached.stream.copy)
        })
    }

    /// Rule 10: what it takes of memory and disk.
    pub(crate) fn check_spilling(&self, vm: usize) -> Checked {
        let plan = &self.plan.vms[vm];
        let run = self.vms[vm].run.as_ref().expect("runs");
        let backlog = run.owner.as_ref().and_then(|owner| owner.spilling().backlog());
        let (Some(backlog), Some(of)) = (backlog, plan.backlog) else {
            return Ok(());
        };
        if backlog.has_failed() {
            return Ok(());
        }
        let held_bytes = backlog.meter().held_bytes();
        check(held_bytes <= of.memory_bytes.max(RECORD_MAX_BYTES), Checker::Bounded, || {
            format!("vm {vm}: {held_bytes} bytes in memory, of {}", of.memory_bytes)
        })?;
        let (segments, on_disk_bytes) = backlog.on_disk();
        let headers = (segments * backlog::HEADER_BYTES) as u64;
        // One that is not full, and two that local writes may keep which hang.
        let segments_bytes = 3 * of.segment_bytes;
        let most = plan.backlog_limit_bytes + segments_bytes + 2 * RECORD_MAX_BYTES + headers;
        check(on_disk_bytes <= most, Checker::Bounded, || {
            format!("vm {vm}: {on_disk_bytes} bytes on disk, of {most}")
        })
    }
}

/// Guests' records that an earlier process has left, with what they cost.
pub(crate) fn left_unacked(waiting: &[backlog::Waiting]) -> impl Iterator<Item = (Seq, u64)> + '_ {
    waiting.iter().map(|record| (record.seq, record.payload_bytes + RECORD_OVERHEAD_BYTES))
}
