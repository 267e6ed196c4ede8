//! Links that carry a little less than guests write, or a little more: in a part of the seeds from the first moment
//! on, between all that goes wrong, and in all of them once the faults are over, for a while each, with what must
//! hold then (rule 8):
//!
//! - On a link that carries *less*, what is under way goes on: the backlog moves, and a copy that was begun makes
//!   progress beside it ([`Checker::GoesOn`]). How often a group swings is bounded as ever ([`Checker::Steady`]).
//! - On one that carries a little *more*, every group comes back while its guests write on ([`Checker::ComesBack`]),
//!   and stays ([`Checker::Steady`]).
//!
//! While links are narrow guests write as much as was drawn, and nothing else, so that more and less are known.

use crate::failure::{Checked, Checker, check};
use crate::rng::Rng;
use crate::scenario::{FAULTS, Fault, Scenario};
use crate::schedule::{MS, S};
use crate::world::{Event, Run, World, note};
use bytes::Bytes;
use std::collections::BTreeMap;
use tidelock_daemon_core::degrade::{CALM, STRIKES_MAX};
use tidelock_daemon_core::owner::Phase;
use tidelock_daemon_core::sequencer::{Extent, RECORD_OVERHEAD_BYTES};
use tidelock_protocol::ids::{DiskId, Seq};
use tidelock_protocol::message::Mode;
use tidelock_protocol::record::{Effect, Payload};
use tidelock_replica::group::AtSizeMax;

/// What a guest writes at a time.
const WRITE_BYTES: u64 = 4096;
/// What a writer's stream carries besides, at most: records without an effect, beacons, digests.
const BESIDES_BYTES_S: u64 = 6_000;
/// What a link may hold in front of a record, besides the backlog: a copy's first window, and a piece.
const COPIES_BYTES: u64 = 256 << 10;
/// One committed state in so many is compared once the faults are over.
const PROBE_ONE_IN: u64 = 300;
/// The smallest piece of a copy that is not the last of its extent.
const PIECE_BYTES: u64 = 32 << 10;

/// Links that carry about as much as guests write.
#[derive(Clone, Copy, Debug)]
pub struct NarrowPlan {
    /// What links carry from the first moment on, in percent of what guests write.
    pub from_start: Option<u64>,
    /// After the faults, for a while: less.
    pub slower: Option<u64>,
    /// And then: a little more.
    pub faster: Option<u64>,
    /// They stay as narrow when guests write less again.
    pub stays: bool,
}

/// Links are narrow now.
#[derive(Clone, Copy, Debug)]
pub struct Squeeze {
    number: Run,
}

/// How far a member was when it last went on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Steps {
    run: Run,
    durable: Seq,
    /// Of the copy that is under way.
    copied: Option<(u64, u64)>,
}

/// Draws them, and makes the rest of the scenario such that links are what is narrow. It draws its own numbers: seeds
/// without such links do not depend on them.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) -> Option<NarrowPlan> {
    if !rng.chance(1, 4) {
        return None;
    }
    let slower = (!rng.chance(1, 4)).then(|| rng.range(40..80));
    let faster = (slower.is_none() || !rng.chance(1, 4)).then(|| rng.range(115..150));
    let from_start = rng.chance(1, 2).then(|| *rng.pick(&[45, 75, 120, 150]));
    let round_ms = 2 * (plan.delay_ns + plan.jitter_ns) / MS + 20;
    for vm in &mut plan.vms {
        vm.press_ns = rng.range(16 * MS..64 * MS);
        vm.queue_depth = vm.queue_depth.max(16);
        vm.copy_rate_bytes_per_s = 0;
    }
    let least = from_start.into_iter().chain(slower).chain(faster).min().expect("one was drawn");
    let slowest_bytes_s = (0..plan.hosts.len())
        .filter_map(|host| plan.written_on(host).checked_mul(least).filter(|rate| *rate > 0))
        .min()
        .map_or(u64::MAX, |rate| rate / 100);
    let after_ms = 4 * round_ms + rng.range(400..1000);
    for vm in &mut plan.vms {
        let in_that_time = vm.written_bytes_s() * after_ms / 1000;
        vm.backlog_limit_bytes = in_that_time * rng.range(3..5);
    }
    let queued = |host: usize| {
        let here = plan.vms.iter().filter(|vm| vm.host == host);
        here.map(|vm| vm.backlog_limit_bytes + COPIES_BYTES).sum::<u64>()
    };
    let queued = (0..plan.hosts.len()).map(queued).max().unwrap_or(0);
    for group in &mut plan.groups {
        group.degrade_after_ms = (!rng.chance(1, 5)).then_some(after_ms);
        if group.mode == Mode::Async {
            group.mode = Mode::Pipelined;
        }
        // Beacons queue behind all that the link holds.
        group.lease_ms = 2 * (round_ms + queued.saturating_mul(1000) / slowest_bytes_s) + 500;
        group.grace_ms = group.lease_ms * 3 / 2;
        group.fold_rate_bytes_s = None;
        group.unfolded_max_bytes = 8 << 20;
        group.retention.at_size_max = AtSizeMax::Shorten;
    }
    // Where it is lost there is nothing to come back.
    if !rng.chance(1, 4) {
        plan.fault_weights[FAULTS.iter().position(|f| *f == Fault::Disaster).expect("is one")] = 0;
    }
    // What is judged is how it goes while a link stays as it is.
    plan.late_ends = false;
    plan.window_bytes = plan.window_bytes.max(plan.vms.len() * (64 << 10)).min(256 << 10);
    Some(NarrowPlan { from_start, slower, faster, stays: rng.chance(1, 2) })
}

impl crate::scenario::VmPlan {
    /// What a guest writes while links are narrow, with all that it costs the link.
    fn written_bytes_s(&self) -> u64 {
        match self.press_ns {
            0 => 0,
            every_ns if self.is_writer() => {
                (WRITE_BYTES + RECORD_OVERHEAD_BYTES) * S / every_ns + BESIDES_BYTES_S
            }
            _ => 0,
        }
    }
}

impl Scenario {
    /// What all guests on a host write, also those that may come.
    fn written_on(&self, host: usize) -> u64 {
        self.vms.iter().filter(|vm| vm.host == host).map(|vm| vm.written_bytes_s()).sum()
    }
}

impl World {
    /// What goes on after the faults while links are narrow, if they are in this seed.
    pub fn live_narrow(&mut self) -> Checked {
        let Some(narrow) = self.plan.narrow else { return Ok(()) };
        if let Some(percent) = narrow.slower {
            self.begin_squeeze(percent, false);
            self.restart_some();
            self.goes_on_beside_a_full_link()?;
        }
        if let Some(percent) = narrow.faster {
            self.begin_squeeze(percent, true);
            self.comes_back_while_guests_write()?;
        }
        self.end_squeeze(narrow.stays);
        Ok(())
    }

    /// Links carry so much of what guests write, from now on. `all`: of what those write, too, that may come yet.
    pub fn begin_squeeze(&mut self, percent: u64, all: bool) {
        let number = self.new_run();
        self.squeeze = Some(Squeeze { number });
        if !self.faulty {
            // This lasts long, and is about what guests see meanwhile.
            self.plan.probe_one_in = PROBE_ONE_IN;
        }
        for host in 0..self.hosts.len() {
            let here = self.vms_of(host).into_iter().map(|vm| self.plan.vms[vm].written_bytes_s());
            let written = if all { self.plan.written_on(host) } else { here.sum() };
            let rate = (written > 0).then(|| written * percent / 100 / 1000);
            self.net.paths[host].bytes_per_ms = rate;
            note!(self, "host {host}: guests write {written}/s, its link carries {rate:?}/ms");
        }
        for vm in 0..self.vms.len() {
            if self.plan.vms[vm].is_writer() {
                self.schedule.after(MS, Event::Press { vm, number });
            }
        }
    }

    fn end_squeeze(&mut self, stays: bool) {
        self.squeeze = None;
        if !stays {
            self.net.paths.iter_mut().for_each(|path| path.bytes_per_ms = None);
        }
    }

    /// A guest writes what it is to write while links are narrow.
    pub fn press(&mut self, vm: usize, number: Run) -> Checked {
        if self.squeeze.is_none_or(|squeeze| squeeze.number != number) {
            return Ok(());
        }
        let every_ns = self.plan.vms[vm].press_ns;
        let after = every_ns / 2 + self.rng.below(every_ns);
        self.schedule.after(after, Event::Press { vm, number });
        if !self.vms[vm].guest.alive || !self.is_awake(vm) || self.is_at_depth(vm) {
            return Ok(());
        }
        let disk = self.rng.index(self.vms[vm].disks.len());
        let size = match disk {
            0 => self.plan.vms[vm].ledger().start,
            _ => self.vms[vm].disks[disk].size_bytes(),
        };
        let len_bytes = WRITE_BYTES.min(size);
        let at = self.rng.below((size - len_bytes) / 512 + 1) * 512;
        let mut data = self.rng.number().to_le_bytes().repeat(len_bytes.div_ceil(8) as usize);
        data.truncate(len_bytes as usize);
        let extent = Extent { disk: DiskId(disk as u16), offset: at, len_bytes };
        self.ask_write(vm, extent, Effect::Write(Payload::new(Bytes::from(data))), false, None)
    }

    /// Some daemons are killed: there is something to compare while the link is full.
    fn restart_some(&mut self) {
        for host in 0..self.hosts.len() {
            if self.hosts[host].daemon.is_some()
                && !self.hosts[host].changes
                && self.rng.chance(2, 3)
            {
                self.end_daemon(host);
                let after = self.rng.range(20 * MS..300 * MS);
                self.later(crate::faults::Later::DaemonStarts { host }, after);
            }
        }
    }

    /// Groups whose primary site goes on.
    fn staying(&self) -> Vec<usize> {
        let groups = 0..self.plan.groups.len();
        let stays = |group: &usize| {
            self.backup.groups[*group].recovered.is_none() && !self.is_leaving(*group)
        };
        groups.filter(stays).collect()
    }

    /// How long the slowest link takes until a record has gone out behind all that may be in front of it: what its writer has
    /// queued, while the others of its host send as much.
    fn queue_ns(&self) -> u64 {
        let of_host = |host: usize| {
            let here = self.vms_of(host).into_iter().map(|vm| &self.plan.vms[vm]);
            let queued = here.filter(|vm| vm.is_writer()).map(|vm| {
                vm.backlog_limit_bytes + vm.queue_depth as u64 * WRITE_BYTES + COPIES_BYTES
            });
            let (writers, longest) =
                queued.fold((0, 0), |(n, longest), of| (n + 1, of.max(longest)));
            let rate = self.net.paths[host].bytes_per_ms.unwrap_or(self.plan.bytes_per_ms);
            writers * longest * MS / rate.max(1)
        };
        (0..self.hosts.len()).map(of_host).max().unwrap_or(0)
    }

    fn step_many(&mut self) -> Checked {
        for _ in 0..64 {
            self.step()?;
        }
        // A group that stops at its size waits for whoever holds a point.
        self.backup.groups.iter_mut().for_each(crate::backup::GroupSlot::forget_views);
        Ok(())
    }

    /// The link is slower than guests write: what is under way goes on all the same.
    fn goes_on_beside_a_full_link(&mut self) -> Checked {
        // A group whose members change does not attach anybody before leases have ended.
        let attached_until = self.schedule.now_ns() + self.longest_grace_ns() + 20 * S;
        while !self.is_attached() && self.schedule.now_ns() < attached_until {
            self.step_many()?;
        }
        // A copy leaves no backlog: after each a lag may be small for a calm, once.
        let copies = self.counts.copies;
        let patience = 2 * self.queue_ns() + 12 * S;
        let settled = self.schedule.now_ns() + patience / 2;
        let until = self.schedule.now_ns() + patience * 3 / 2;
        let mut degraded = None;
        let mut last: BTreeMap<usize, (Steps, u64)> = BTreeMap::new();
        while self.schedule.now_ns() < until {
            self.step_many()?;
            let now_ns = self.schedule.now_ns();
            if now_ns >= settled {
                let before = degraded.get_or_insert_with(|| self.degraded_runs(true));
                self.check_no_swing(before, self.counts.copies - copies)?;
            }
            for group in self.staying() {
                for vm in self.plan.groups[group].writers().collect::<Vec<_>>() {
                    let Some(steps) = self.steps(vm) else {
                        last.remove(&vm);
                        continue;
                    };
                    let (before, since) = last.entry(vm).or_insert((steps, now_ns));
                    if has_gone_on(before, &steps) {
                        (*before, *since) = (steps, now_ns);
                    }
                    let waits_ns = now_ns - *since;
                    check(waits_ns < patience, Checker::GoesOn, || {
                        format!(
                            "vm {vm}: nothing has gone on for {} ms beside a full link: {steps:?}",
                            waits_ns / MS
                        )
                    })?;
                }
            }
        }
        Ok(())
    }

    fn longest_grace_ns(&self) -> u64 {
        self.plan.groups.iter().map(|of| of.grace_ms).max().unwrap_or(0) * MS
    }

    /// Whether the backup has every writer, and no group is being switched over: what its guests write meanwhile comes all
    /// at once.
    fn is_attached(&self) -> bool {
        let groups = self.staying();
        if groups.iter().any(|group| self.is_switching(*group)) {
            return false;
        }
        let mut writers = groups.iter().flat_map(|group| self.plan.groups[*group].writers());
        writers.all(|vm| self.vms[vm].run.as_ref().is_some_and(|run| run.attached))
    }

    /// How often each group has degraded in the run of each daemon. `only_now`: of those that are degraded now where
    /// they write.
    fn degraded_runs(&self, only_now: bool) -> Vec<(usize, Run, BTreeMap<usize, u64>)> {
        let daemons = self
            .hosts
            .iter()
            .enumerate()
            .filter_map(|(host, of)| Some((host, of.daemon.as_ref()?)));
        daemons.map(|(host, daemon)| (host, daemon.run, self.degraded_on(host, only_now))).collect()
    }

    /// Groups have not degraded again more often than so, where no daemon was started since. Of one that follows another
    /// host's switch all that its guests write while it tries comes at once.
    fn check_no_swing(&self, before: &[(usize, Run, BTreeMap<usize, u64>)], most: u64) -> Checked {
        let now = self.degraded_runs(false);
        if !before.iter().map(|of| (of.0, of.1)).eq(now.iter().map(|of| (of.0, of.1))) {
            return Ok(());
        }
        for ((host, _, before), (_, _, now)) in before.iter().zip(&now) {
            for (group, times) in before.iter().filter(|(group, _)| !self.is_leaving(**group)) {
                check(now[group] <= times + most, Checker::Steady, || {
                    format!(
                        "host {host}: group {group} swings while its link is as narrow as before"
                    )
                })?;
            }
        }
        Ok(())
    }

    /// How far a member is, while the backup has it attached.
    fn steps(&self, vm: usize) -> Option<Steps> {
        let run = self.vms[vm].run.as_ref().filter(|run| run.attached && !run.draining)?;
        let owner = run.owner.as_ref()?;
        let progress = owner.copying().progress(self.host_now(self.plan.vms[vm].host));
        let copied = progress.map(|p| (p.done_bytes, p.total_bytes));
        Some(Steps { run: run.run, durable: owner.sequencer().durable(), copied })
    }

    /// The link is a little faster than guests write: every group comes back, and stays.
    fn comes_back_while_guests_write(&mut self) -> Checked {
        let began = self.schedule.now_ns();
        let patience = self.return_ns();
        let longest_ms = self.plan.groups.iter().filter_map(|of| of.degrade_after_ms).max();
        let longest_ns = longest_ms.unwrap_or(1000) * MS;
        let mut away_at = began;
        // What waits has not been seen for long where the link was just down.
        while self.schedule.now_ns() < away_at + 2 * longest_ns {
            self.step_many()?;
            let now_ns = self.schedule.now_ns();
            let Some(why) = self.not_back() else { continue };
            away_at = now_ns;
            check(now_ns - began < patience, Checker::ComesBack, || {
                let waits_ms = (now_ns - began) / MS;
                format!("{waits_ms} ms on a link that carries more than guests write: {why}")
            })?;
        }
        note!(self, "everything is back while guests write");
        self.counts.narrow_returns += 1;
        let before = self.degraded_runs(false);
        let until = self.schedule.now_ns() + 8 * longest_ns;
        while self.schedule.now_ns() < until {
            self.step_many()?;
            self.check_no_swing(&before, 0)?;
        }
        Ok(())
    }

    /// Within this it must be back: what is queued and what is to be compared is carried beside what guests write, and
    /// the longest calm passes.
    fn return_ns(&self) -> u64 {
        let of_host = |host: usize| {
            let vms = self.vms_of(host).into_iter().filter(|vm| self.plan.vms[*vm].is_writer());
            let (mut bytes, mut pieces) = (0, 0);
            for vm in vms {
                let disks = self.vms[vm].disks.iter().map(|disk| disk.size_bytes()).sum::<u64>();
                bytes += self.plan.vms[vm].backlog_limit_bytes + COPIES_BYTES + disks;
                pieces += disks / PIECE_BYTES + 256;
            }
            let written = self.plan.written_on(host);
            let rate = self.net.paths[host].bytes_per_ms.unwrap_or(self.plan.bytes_per_ms) * 1000;
            let round_ns = 2 * (self.plan.delay_ns + self.plan.jitter_ns) + self.plan.sync_ns * 2;
            bytes * S / (rate - written).max(1)
                + pieces * (round_ns + PIECE_BYTES * S / rate.max(1))
        };
        let carried = (0..self.hosts.len()).map(of_host).max().unwrap_or(0);
        let after_ms = self.plan.groups.iter().filter_map(|of| of.degrade_after_ms).max();
        let calm_ns = (CALM << STRIKES_MAX) * after_ms.unwrap_or(0) * MS;
        2 * (carried + calm_ns + self.longest_grace_ns()) + 60 * S
    }

    /// Why not every group is as its operator wants it, if so.
    fn not_back(&self) -> Option<String> {
        self.staying().into_iter().find_map(|group| {
            if self.is_switching(group) {
                return Some(format!("group {group} is being switched over"));
            }
            // Nothing has waited for long where it has just begun to hang.
            if self.backup.groups[group].hangs_until_ns > self.schedule.now_ns() {
                return Some(format!("a sync of group {group} hangs"));
            }
            self.plan.groups[group].members().find_map(|vm| {
                let why = self.not_back_vm(group, vm)?;
                Some(format!("vm {vm}: {why}"))
            })
        })
    }

    fn not_back_vm(&self, group: usize, vm: usize) -> Option<String> {
        let host = self.plan.vms[vm].host;
        let Some(run) = &self.vms[vm].run else { return Some("no daemon runs".to_owned()) };
        if self.plan.vms[vm].is_writer() && run.phase() != Phase::Replicating {
            let progress = run.copied(self.host_now(host));
            return Some(format!("{:?} {progress:?}", run.phase()));
        }
        if run.hangs() {
            return Some("its loop hangs".to_owned());
        }
        // In mode async nobody asks for it.
        if run.pending.incomplete().is_some() && run.gate.handle().mode() != Mode::Async {
            return Some("it is not known what its guest has heard".to_owned());
        }
        if let Some(why) = self.stands_otherwise(host, group, run.gate.handle().mode()) {
            return Some(why);
        }
        (!run.gate.is_open(self.host_now(host))).then(|| "the gate is shut".to_owned())
    }
}

/// The backlog has moved, and the copy, if there is one.
fn has_gone_on(before: &Steps, now: &Steps) -> bool {
    let is_other_run = before.run != now.run;
    let is_complete = now.copied.is_some_and(|(done, total)| done == total);
    let copy_has = now.copied.is_none() || is_complete || before.copied != now.copied;
    is_other_run || before.durable < now.durable && copy_has
}
