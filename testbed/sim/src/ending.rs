//! The planned end, once all has come back: every daemon is asked to end, and none is killed. Each ends by itself, the
//! backup has all that its guests have written, and the next run compares nothing.

use crate::failure::{Checked, Checker, check};
use crate::faults::Later;
use crate::schedule::MS;
use crate::world::{Run, World, note};
use tidelock_daemon_core::owner::{Drained, Phase};

impl World {
    /// Every daemon ends while guests write, and starts again. Returns whether all have ended with everything at the
    /// backup.
    pub(crate) fn ends_cleanly(&mut self) -> Checked<bool> {
        let run_of = |host: usize| {
            let daemon = self.hosts[host].daemon.as_ref().filter(|_| !self.vms_of(host).is_empty());
            Some((host, daemon?.run))
        };
        let running: Vec<(usize, Run)> = (0..self.hosts.len()).filter_map(run_of).collect();
        if running.is_empty() {
            return Ok(false);
        }
        note!(self, "all is ended");
        self.ends_whole = Some(true);
        self.guests_go_on();
        let ends_at = self.schedule.now_ns() + self.rng.range(0..500 * MS);
        while self.schedule.now_ns() < ends_at {
            self.step()?;
        }
        running.iter().for_each(|(host, _)| self.drain(*host));
        self.settles(Checker::EndsCleanly, |world| {
            running.iter().filter(|(host, run)| world.has_run(*host, *run)).find_map(|(host, _)| {
                let vms = world.vms_of(*host);
                let waiting: Vec<_> = vms.into_iter().filter(|vm| !world.has_ended(*vm)).collect();
                let is_given_up = waiting.iter().any(|vm| world.has_gap(world.plan.vms[*vm].group));
                (!is_given_up).then(|| format!("host {host}: vms {waiting:?} have not drained"))
            })
        })?;
        // Writes without a record are not drained: an operator, or production's patience, ends the daemon.
        for (host, run) in running {
            if self.has_run(host, run) {
                self.ends_whole = Some(false);
                self.later(Later::DaemonEnds { host, run }, 0);
            }
        }
        self.busy = false;
        Ok(self.ends_whole.take() == Some(true))
    }

    fn has_run(&self, host: usize, run: Run) -> bool {
        self.hosts[host].daemon.as_ref().is_some_and(|daemon| daemon.run == run)
    }

    fn has_ended(&self, vm: usize) -> bool {
        self.vms[vm].run.as_ref().is_some_and(|run| run.ended)
    }

    /// True if a writer of a group has a gap in its stream.
    fn has_gap(&self, group: usize) -> bool {
        let mut runs = self.plan.groups[group].writers().filter_map(|vm| self.vms[vm].run.as_ref());
        runs.any(|run| run.view.gap().is_some())
    }

    /// A writer has ended: after the faults nothing of it is only here, and its next run knows that.
    pub(crate) fn check_drained(&mut self, vm: usize, drained: &Drained) -> Checked {
        let group = self.plan.vms[vm].group;
        let slot = &self.backup.groups[group];
        let goes = slot.recovered.is_some() || self.is_leaving(group);
        let Some(ends_whole) = self.ends_whole.as_mut().filter(|_| !goes) else { return Ok(()) };
        let of = &self.vms[vm];
        let run = of.run.as_ref().expect("it has just ended");
        if drained.marks.is_some() {
            let last = of.oracle.last_effect();
            let writer = self.plan.vms[vm].writer_id().expect("a writer");
            let durable = slot.told_durable.get(writer);
            return check(durable >= last, Checker::EndsCleanly, || {
                format!(
                    "vm {vm} has ended with writes up to {last}, of which the backup has {durable}"
                )
            });
        }
        *ends_whole = false;
        // Guests may write more at last than a backlog holds: then the stream stands.
        let may_be = run.phase() == Phase::Replicating && run.poisoned.is_empty();
        check(!may_be, Checker::EndsCleanly, || {
            format!("vm {vm} does not end whole: {:?}", run.refusal)
        })
    }
}
