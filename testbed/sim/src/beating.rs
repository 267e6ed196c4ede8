//! Heartbeats: production's watch ([`tidelock_daemon_core::heartbeat`]) over each writer, on the host's clock, and the
//! checkers of what it says ([`Checker::Silence`]): replication that has stopped without a word is missed within the
//! configured time, and nothing is missed while it goes on.
//!
//! In the seeds that have them two things stop without a word now and then: a writer's owner loop, and a sync of the
//! backup's disk, behind which everything waits that is to be acknowledged.

use crate::failure::{Checked, Checker, check};
use crate::owner::MemberRun;
use crate::rng::Rng;
use crate::scenario::Scenario;
use crate::schedule::{MS, S};
use crate::world::{Event, Run, World, note};
use std::time::Duration;
use tidelock_daemon_core::heartbeat::{
    HeartbeatSettings, LOOK_EVERY, Missing, Sight, Step, Watched,
};
use tidelock_protocol::ids::{MonoNanos, Seq};

const LOOK_NS: u64 = LOOK_EVERY.as_nanos() as u64;
/// Between two things that stop, about.
const SILENT_EVERY_NS: u64 = 4 * S;

/// The heartbeats of one writer in one run of its daemon.
pub(crate) struct Beating {
    settings: HeartbeatSettings,
    watched: Watched,
    /// The loop does not turn.
    pub(crate) hangs: bool,
    /// For the checker.
    seen: Option<Seen>,
}

/// What the checker has seen, by its own count.
#[derive(Clone, Copy, Debug)]
struct Seen {
    durable: Seq,
    acknowledged: Seq,
    /// The last heartbeat that the loop had taken.
    taken: u64,
    /// So often the backup has said that bytes of a record arrive.
    arrivals: u64,
    /// No acknowledgement has risen since, no bytes have arrived, nothing explained that, and somebody looked.
    silent_since: MonoNanos,
    acknowledged_at: MonoNanos,
    /// The loop did not turn, at the last look that saw that.
    hung_at: Option<MonoNanos>,
}

/// Draws which groups have them. It draws its own numbers.
pub fn draw(rng: &mut Rng, plan: &mut Scenario) {
    if !rng.chance(1, 4) {
        return;
    }
    let interval_ms = rng.range(100..500);
    let alarm_after_ms = interval_ms * rng.range(3..6) + rng.range(0..1500);
    let settings = HeartbeatSettings {
        interval: Duration::from_millis(interval_ms),
        alarm_after: Duration::from_millis(alarm_after_ms),
    };
    plan.groups.iter_mut().for_each(|group| group.heartbeat = Some(settings));
}

impl Beating {
    /// Of a run that begins.
    pub(crate) fn new(settings: HeartbeatSettings, watched: Watched) -> Self {
        Self { settings, watched, hangs: false, seen: None }
    }

    fn alarm_after_ns(&self) -> u64 {
        self.settings.alarm_after.as_nanos() as u64
    }

    /// What has stopped is missed.
    fn check_missed(&self, vm: usize, now: MonoNanos) -> Checked {
        let Some(seen) = &self.seen else { return Ok(()) };
        // The one that is missed may have been begun an interval later, and looks come when they come.
        let patience_ns =
            self.settings.interval.as_nanos() as u64 + self.alarm_after_ns() + 4 * LOOK_NS;
        let silent_ns = now.since_ns(seen.silent_since);
        let is_late = silent_ns >= patience_ns;
        check(!is_late || self.watched.pulse().lost().is_some(), Checker::Silence, || {
            format!("vm {vm}: silent for {} ms, and nothing is missed: {seen:?}", silent_ns / MS)
        })
    }

    /// What is missed has stopped.
    fn check_alarm(&self, vm: usize, now: MonoNanos, missing: Missing) -> Checked {
        let seen = self.seen.as_ref().expect("it has looked");
        let least_ns = self.alarm_after_ns() - self.alarm_after_ns().min(2 * LOOK_NS);
        let holds = match missing {
            Missing::Backup => now.since_ns(seen.acknowledged_at) >= least_ns,
            Missing::Owner => {
                seen.hung_at.is_some_and(|at| now.since_ns(at) <= self.alarm_after_ns())
            }
        };
        check(holds, Checker::Silence, || {
            format!("vm {vm}: {missing:?} is missed although it goes on: {seen:?}")
        })
    }

    fn see(&mut self, sight: &Sight, durable: Seq) {
        let now = sight.now;
        let is_news = self.seen.is_none_or(|seen| {
            // One that was taken while nothing can be admitted, or needs to be, stands for what is there already.
            let (number, seq) = sight.taken;
            let is_back = number > seen.taken && seq <= sight.acknowledged;
            is_back
                || sight.is_explained
                || durable > seen.durable
                || sight.arrivals > seen.arrivals
                || sight.acknowledged > seen.acknowledged
        });
        let before = self.seen.unwrap_or(Seen {
            durable,
            acknowledged: sight.acknowledged,
            taken: sight.taken.0,
            arrivals: sight.arrivals,
            silent_since: now,
            acknowledged_at: now,
            hung_at: None,
        });
        let rises = sight.acknowledged > before.acknowledged;
        self.seen = Some(Seen {
            durable: durable.max(before.durable),
            acknowledged: sight.acknowledged.max(before.acknowledged),
            taken: sight.taken.0,
            arrivals: sight.arrivals,
            silent_since: if is_news { now } else { before.silent_since },
            acknowledged_at: if rises { now } else { before.acknowledged_at },
            hung_at: if self.hangs { Some(now) } else { before.hung_at },
        });
    }
}

impl MemberRun {
    /// Whether its loop does not turn.
    pub(crate) fn hangs(&self) -> bool {
        self.beating.as_ref().is_some_and(|beating| beating.hangs)
    }
}

impl World {
    /// A daemon begins to watch over its writers.
    pub(crate) fn begin_watch(&mut self, host: usize, run: Run) {
        let has_some = |vm: &usize| self.plan.groups[self.plan.vms[*vm].group].heartbeat.is_some();
        if self.vms_of(host).iter().any(has_some) {
            self.schedule.after(LOOK_NS, Event::Watch { host, run });
        }
    }

    /// It looks.
    pub(crate) fn watch(&mut self, host: usize, run: Run) -> Checked {
        // While guests begin nothing any more everything comes to rest.
        if self.hosts[host].daemon.as_ref().is_none_or(|daemon| daemon.run != run) || !self.busy {
            return Ok(());
        }
        self.schedule.after(LOOK_NS, Event::Watch { host, run });
        for vm in self.vms_of(host) {
            self.watch_vm(host, vm)?;
        }
        Ok(())
    }

    fn watch_vm(&mut self, host: usize, vm: usize) -> Checked {
        let now = self.host_now(host);
        let Some(run) = self.vms[vm].run.as_mut().filter(|run| !run.ended) else { return Ok(()) };
        let durable = run.port.acked().0;
        let Some(beating) = &mut run.beating else { return Ok(()) };
        let sight = beating.watched.sight(now, run.draining);
        beating.see(&sight, durable);
        match beating.watched.look(&sight) {
            Some(Step::Ask(_)) => self.counts.heartbeats += 1,
            Some(Step::Lost(missing)) => {
                self.counts.missed += 1;
                note!(self, "vm {vm}: no heartbeat: {missing:?}");
                beating.check_alarm(vm, now, missing)?;
            }
            Some(Step::Back) => note!(self, "vm {vm}: heartbeats come back"),
            None => {}
        }
        beating.check_missed(vm, now)
    }

    /// Things begin to stop without a word.
    pub(crate) fn begin_silences(&mut self) {
        if self.plan.groups.iter().any(|group| group.heartbeat.is_some()) {
            let after = self.rng.span(SILENT_EVERY_NS);
            self.schedule.after(after, Event::Silence);
        }
    }

    /// Something stops without a word, for a while.
    pub(crate) fn silence(&mut self) {
        if !self.faulty {
            return;
        }
        self.begin_silences();
        let span = self.rng.range(500 * MS..9 * S);
        if self.rng.chance(1, 2) {
            let group = self.rng.index(self.plan.groups.len());
            note!(self, "a sync of group {group} hangs for {} ms", span / MS);
            let until_ns = self.schedule.now_ns() + span;
            let slot = &mut self.backup.groups[group];
            slot.hangs_until_ns = slot.hangs_until_ns.max(until_ns);
            return;
        }
        let vm = self.rng.index(self.vms.len());
        let Some(run) = self.vms[vm].run.as_mut() else { return };
        let (id, Some(beating)) = (run.run, &mut run.beating) else { return };
        if !beating.hangs {
            beating.hangs = true;
            note!(self, "the loop of vm {vm} hangs for {} ms", span / MS);
            self.schedule.after(span, Event::LoopGoesOn { vm, run: id });
        }
    }

    /// A loop goes on.
    pub(crate) fn loop_goes_on(&mut self, vm: usize, run: Run) -> Checked {
        if !self.runs_as(vm, run) {
            return Ok(());
        }
        let member = self.vms[vm].run.as_mut().expect("runs");
        member.beating.as_mut().expect("it hung").hangs = false;
        note!(self, "the loop of vm {vm} goes on");
        self.owner_woken(vm, run)?;
        self.clients_go_on(vm)
    }
}
