//! One seed from beginning to end: faults for so many steps, then none, and then everything must
//! come back.

use crate::counts::Counts;
use crate::failure::{self, Checked, Checker, Failure, check, fail};
use crate::plant::{self, Plant};
use crate::schedule::S;
use crate::shards;
use crate::world::World;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tidelock_daemon_core::activity::{Standing, Why};
use tidelock_daemon_core::owner::Phase;
use tidelock_protocol::message::Mode;
use tidelock_replica::group::AtSizeMax;

/// How long guests go on after the last fault.
const CALM_S: u64 = 3;
/// Time within which everything has come back.
const PATIENCE_S: u64 = 480;

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Events until the faults stop.
    pub steps: u64,
    /// A bug to plant.
    pub plant: Option<Plant>,
    /// Print every line of the trace as it comes.
    pub live_trace: bool,
    /// A checker that looks away: to see whether those behind it notice, too.
    pub without: Option<Checker>,
}

impl Default for Options {
    fn default() -> Self {
        Self { steps: 12_000, plant: None, live_trace: false, without: None }
    }
}

/// What came of a seed.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// What was broken, if anything.
    pub failure: Option<Failure>,
    /// Counts.
    pub counts: Counts,
    /// The trace's hash.
    pub hash: u64,
    /// Its last lines.
    pub tail: Vec<String>,
}

/// Runs a seed. A panic of production code is a failure like any other, where panics unwind.
#[must_use]
pub fn run(seed: u64, options: &Options) -> Outcome {
    plant::in_this_thread(options.plant);
    failure::look_away(options.without);
    let mut world = World::new(seed, options.plant, options.live_trace);
    let result = catch_unwind(AssertUnwindSafe(|| {
        live(&mut world, options)?;
        shards::live(seed, &mut world.counts)
    }));
    plant::in_this_thread(None);
    failure::look_away(None);
    let failure = match result {
        Ok(result) => result.err(),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            let what = text.unwrap_or("a panic without a message").to_owned();
            Some(Failure { checker: Checker::Panic, what })
        }
    };
    let (counts, hash) = (world.counts, world.trace.hash());
    Outcome { seed, failure, counts, hash, tail: world.trace.into_tail() }
}

/// The longest that a world lives, in its own seconds.
const LIVE_MAX_S: u64 = 600;

fn live(world: &mut World, options: &Options) -> Checked {
    world.boot()?;
    // Where nobody is left to do anything, events are few.
    while world.counts.events < options.steps + world.more_steps
        && world.schedule.now_ns() < LIVE_MAX_S * S
    {
        world.step()?;
    }
    world.heal()?;
    world.live_narrow()?;
    let calm_until = world.schedule.now_ns() + CALM_S * S;
    while world.schedule.now_ns() < calm_until {
        world.step()?;
    }
    world.busy = false;
    world.comes_back()?;
    world.check_end()?;
    if world.verify_all()? {
        world.comes_back()?;
        world.check_repaired()?;
    }
    // The first hosts are back, and their guests may overflow a backlog, before the last one has ended.
    let stood = world.counts.stood;
    let ends_whole = world.ends_cleanly()?;
    let copies = world.counts.copies;
    world.comes_back()?;
    let compares = world.counts.copies > copies && world.counts.stood == stood;
    check(!(ends_whole && compares), Checker::NothingCompared, || {
        "disks are compared after a clean end".to_owned()
    })
}

impl World {
    /// Everything comes back when guests have ended what they do.
    fn comes_back(&mut self) -> Checked {
        self.settles(Checker::ComesBack, Self::restless)
    }

    /// Goes on, without faults, while there is something to wait for.
    pub(crate) fn settles(
        &mut self,
        checker: Checker,
        restless: impl Fn(&Self) -> Option<String>,
    ) -> Checked {
        // A group that stops at its size takes in as much as its window lets go of, and clocks may be half a minute apart.
        let stops = self.plan.groups.iter().any(|of| of.retention.at_size_max == AtSizeMax::Stop);
        let patience_s = if stops { 3 * PATIENCE_S } else { PATIENCE_S };
        let until = self.schedule.now_ns() + patience_s * S;
        loop {
            for vm in 0..self.vms.len() {
                // Loops that nobody has to wake know of the last acknowledgements in their next turn.
                self.owner_turn(vm)?;
                self.gate_turn(vm)?;
            }
            let Some(why) = restless(self) else { return Ok(()) };
            let late = self.schedule.now_ns() >= until;
            check(!late, checker, || {
                let stalls = self.backup.groups.iter().filter_map(crate::backup::GroupSlot::group);
                let now = self.backup_now();
                let stalls: Vec<_> = stalls.filter_map(|group| group.status(now).stalled).collect();
                format!("{patience_s} s later: {why} {stalls:?}")
            })?;
            for slot in &mut self.backup.groups {
                // A group that stops at its size waits for whoever holds a point.
                slot.forget_views();
            }
            self.take_marks_out();
            // The answer costs more than a step.
            for _ in 0..64 {
                self.step()?;
            }
        }
    }

    /// Why not everything is as it should be, if so (rule 8).
    fn restless(&self) -> Option<String> {
        for group in 0..self.plan.groups.len() {
            if self.backup.groups[group].is_on_its_way {
                return Some(format!("group {group} is on its way back"));
            }
            if self.is_switching(group) {
                return Some(format!("a switch of group {group} is under way"));
            }
            for vm in self.plan.groups[group].members().collect::<Vec<_>>() {
                if let Some(why) = self.restless_vm(group, vm) {
                    return Some(format!("vm {vm}: {why}"));
                }
            }
        }
        None
    }

    fn restless_vm(&self, group: usize, vm: usize) -> Option<String> {
        let host = self.plan.vms[vm].host;
        let slot = &self.backup.groups[group];
        if self.hosts[host].lost || self.is_switched(group) && slot.recovered.is_none() {
            // Who had come before the others were whole is one of them, and may never have been.
            let whole = self.is_recoverable(group) && !slot.initialising;
            let must = slot.recovered.is_none() && whole;
            return must.then(|| "the group was not recovered".to_owned());
        }
        let Some(run) = &self.vms[vm].run else { return Some("no daemon runs".to_owned()) };
        if slot.recovered.is_some() {
            let fenced = run.refusal.as_ref().is_some_and(|r| r.is_final());
            let knows = fenced && run.gate.is_fenced();
            return (!knows).then(|| "the old primary does not know of the recovery".to_owned());
        }
        let writer = self.plan.vms[vm].writer_id();
        // A follower is not told that it is taken back: its gate is.
        if let Some(refusal) = run.refusal.as_ref().filter(|_| writer.is_some()) {
            return Some(format!("refused: {:?}: {}", refusal.kind, refusal.reason));
        }
        if writer.is_some() && run.phase() != Phase::Replicating {
            let progress = run.copied(self.host_now(host));
            return Some(format!("{:?} {progress:?}", run.phase()));
        }
        if let Some(writer) = writer {
            if !run.is_settled() {
                let owner = run.owner.as_ref().expect("a writer has one");
                let (waiting, lag) = (owner.sequencer().waiting(), owner.sequencer().lag());
                return Some(format!("{waiting} requests wait, lag {lag:?}"));
            }
            // Nobody waits for what a writer says last only because others have written.
            let (last, told) = (self.vms[vm].oracle.last_effect(), slot.told.get(writer));
            if told < last {
                return Some(format!("committed {told} of {last}"));
            }
        }
        if self.plan.vms[vm].log.is_some() && writer.is_some() {
            let owner = run.owner.as_ref().expect("a writer has one");
            let standing = owner.activity().standing();
            let is_back = matches!(
                standing,
                Standing::Mapped | Standing::Off | Standing::Everything(Why::FlushFailed)
            );
            if !is_back {
                return Some(format!("its activity log stands at {standing:?}"));
            }
        }
        if let Some(why) = self.stands_otherwise(host, group, run.gate.handle().mode()) {
            return Some(why);
        }
        if run.pending.incomplete().is_some() && run.gate.handle().mode() != Mode::Async {
            return Some("it is not known what the guest has heard".to_owned());
        }
        if run.gate.waiting(vm) > 0 {
            return Some(format!("{} packets wait", run.gate.waiting(vm)));
        }
        if !run.gate.is_open(self.host_now(host)) {
            return Some("the gate is shut".to_owned());
        }
        let asked = self.vms[vm].guest.asked.len();
        (asked > 0).then(|| format!("{asked} requests have no answer"))
    }

    /// What was changed behind everyone's back is gone: a recovery has what the disks here have.
    fn check_repaired(&mut self) -> Checked {
        for group in 0..self.plan.groups.len() {
            if self.backup.groups[group].recovered.is_some() || self.is_leaving(group) {
                continue;
            }
            let storage = self.backup.groups[group].storage.crash(&mut || false);
            self.rehearse(group, storage)?;
            for vm in self.plan.groups[group].writers().collect::<Vec<_>>() {
                check(self.vms[vm].oracle.spoilt().is_empty(), Checker::VerifyTruthful, || {
                    format!("vm {vm}: the sites still differ after a repair")
                })?;
            }
        }
        Ok(())
    }

    /// Nothing is under way any more: both sites hold the same, and what would be recovered now
    /// is all of it.
    fn check_end(&mut self) -> Checked {
        for group in 0..self.plan.groups.len() {
            self.probe(group)?;
            if self.backup.groups[group].recovered.is_some() {
                continue;
            }
            let lost = self.is_leaving(group);
            check(lost || self.is_recoverable(group), Checker::ComesBack, || {
                format!("group {group} is not whole")
            })?;
            if lost {
                continue;
            }
            for vm in self.plan.groups[group].writers().collect::<Vec<_>>() {
                let state = &self.vms[vm];
                let disks: Vec<_> = state.disks.iter().map(|d| d.live()).collect();
                if !state.oracle.equals(&disks) {
                    return fail(
                        Checker::SitesEqual,
                        format!("the local disks of vm {vm} are not what its guest wrote"),
                    );
                }
            }
        }
        Ok(())
    }
}
