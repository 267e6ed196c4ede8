//! The planned switch to the backup site: everything to the backup, the gate shut, the lease given up. What is done when
//! is [`Handover`]'s to say; this asks the writers, the gate and the link.
//!
//! A crash before the record leaves a group that goes on as it was, one after it a group that is shut here for good.

use super::{GroupLoop, GroupSettings, Surroundings};
use crate::handover::{Handover, LinkEnded, Sight, Step};
use crate::link::port::{LeaseGivenUp, ToLink};
use crate::owner::{Drained, Phase, ToOwner};
use futures_channel::oneshot;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use tidelock_planted::Bug;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::Form;
use tidelock_protocol::vector::CountVector;

/// Why there is no switch, for people.
pub type SwitchError = String;

/// Progress of a switch, as an operator is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum SwitchState {
    /// The backup does not have everything yet. It can still end without a change.
    Draining,
    /// The backup has everything of this host. Other hosts of the group are not so far, and until they are this one can
    /// still end without a change.
    Awaiting {
        /// Members, with their hosts.
        members: Vec<String>,
    },
    /// The gate is being shut, and the backup told.
    GivingUp,
    /// The host answers no client of the group any more.
    Over {
        /// The last seq of each writer: the backup has all of it.
        seqs: BTreeMap<String, u64>,
        /// From the last request taken until the backup had everything and nothing was held.
        drained_ms: u64,
        /// From then until all other hosts of the group were so far, too.
        #[serde(default)]
        others_ms: u64,
        /// From then until it was on record, and the gate was shut.
        #[serde(default)]
        shut_ms: u64,
        /// The same until the backup has answered that it knows the lease to be given up.
        gave_up_ms: u64,
        /// Why it is not certain that the backup knows.
        problem: Option<String>,
    },
    /// The same, by a run of the daemon before this one.
    Before,
}

/// The progress of a group's switch.
#[derive(Debug)]
pub(super) enum Stage {
    Idle,
    UnderWay(Box<Switch>),
    Over {
        how: SwitchState,
        at_unix_ms: u64,
    },
    /// Told once.
    Failed(SwitchError),
}

impl Stage {
    pub(super) fn found(switched_at_unix_ms: Option<u64>) -> Self {
        match switched_at_unix_ms {
            None => Self::Idle,
            Some(at_unix_ms) => Self::Over { how: SwitchState::Before, at_unix_ms },
        }
    }
}

/// A switch that is under way.
#[derive(Debug)]
pub(super) struct Switch {
    handover: Handover,
    asked_at: MonoNanos,
    /// Writers that have not said yet that the backup has everything.
    drains: Vec<Option<oneshot::Receiver<Drained>>>,
    /// The others' last seqs, by member.
    drained: Vec<(String, u64)>,
    /// Answers that have not come, of members that have given up their leases.
    answers: Vec<oneshot::Receiver<CountVector>>,
    at_unix_ms: u64,
    is_shut: bool,
}

/// The sight of a switch that is under way.
struct Seen<'a> {
    group: &'a GroupLoop,
    around: &'a mut dyn Surroundings,
    drains: &'a mut Vec<Option<oneshot::Receiver<Drained>>>,
    drained: &'a mut Vec<(String, u64)>,
    answers: &'a mut Vec<oneshot::Receiver<CountVector>>,
    is_asked_for: bool,
}

impl Sight for Seen<'_> {
    fn unwanted(&self) -> Option<String> {
        if self.around.is_stopping() {
            return Some("the daemon is stopping".to_owned());
        }
        let why = "whoever has asked for it does not wait any more";
        (!self.is_asked_for).then(|| why.to_owned())
    }

    fn is_drained(&mut self) -> Result<bool, String> {
        let members = self.around.members();
        let writers = members.iter().filter(|member| member.writer.is_some());
        for (member, drain) in writers.zip(&mut *self.drains) {
            let Some(of) = drain else { continue };
            let Ok(Some(done)) = of.try_recv() else { return Ok(false) };
            if done.marks.is_none() {
                return Err("the local disk failed its last flush, or the sites differ".to_owned());
            }
            *drain = None;
            self.drained.push((member.name.clone(), done.seq.0));
        }
        Ok(true)
    }

    fn is_held(&self) -> bool {
        self.around.held_packets() != Some(0)
    }

    fn obstacle(&self) -> Option<String> {
        self.group.check_switch(self.around).err()
    }

    fn lacks(&self) -> String {
        if let Some(hang) = self.around.disk_hang() {
            return hang;
        }
        if !self.is_attached() {
            return "it is not connected".to_owned();
        }
        let members = self.around.members();
        let lag_writes =
            members.iter().filter_map(|of| Some(of.writer.as_ref()?.lag_writes(&of.link)));
        format!(
            "it still lacks {} writes, and {} packets wait",
            lag_writes.sum::<u64>(),
            self.around.held_packets().unwrap_or(0)
        )
    }

    fn is_attached(&self) -> bool {
        self.around.members().iter().all(|member| member.link.is_attached())
    }

    fn with_hosts(&self, members: Vec<String>) -> Vec<String> {
        self.group.settings.with_hosts(members)
    }

    fn is_shut(&self) -> bool {
        self.around.members().iter().all(|member| member.control.is_applied())
    }

    fn is_answered(&mut self) -> Result<bool, LinkEnded> {
        let mut is_lost = false;
        self.answers.retain_mut(|answer| match answer.try_recv() {
            Ok(Some(_)) => false,
            Ok(None) => true,
            // A link that has ended answers nothing.
            Err(oneshot::Canceled) => {
                is_lost = true;
                true
            }
        });
        if is_lost { Err(LinkEnded) } else { Ok(self.answers.is_empty()) }
    }
}

impl GroupSettings {
    /// These members, and where they are.
    fn with_hosts(&self, members: Vec<String>) -> Vec<String> {
        let words = |name: String| match self.elsewhere.get(&name) {
            Some(host) => format!("{name} on {host}"),
            None => name,
        };
        members.into_iter().map(words).collect()
    }
}

impl GroupLoop {
    pub(super) fn switched_at_unix_ms(&self) -> Option<u64> {
        match self.stage {
            Stage::Over { at_unix_ms, .. } => Some(at_unix_ms),
            _ => None,
        }
    }

    /// True if nothing of the group leaves this host any more.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        match &self.stage {
            Stage::UnderWay(switch) => switch.is_shut,
            Stage::Over { .. } => true,
            Stage::Idle | Stage::Failed(_) => false,
        }
    }

    /// True if a switch is under way.
    #[must_use]
    pub fn is_switching(&self) -> bool {
        matches!(self.stage, Stage::UnderWay(_))
    }

    /// Why the group cannot be switched over now.
    pub fn check_switch(&self, around: &dyn Surroundings) -> Result<(), SwitchError> {
        if around.is_stopping() {
            return Err("the daemon is stopping".to_owned());
        }
        for member in around.members() {
            let name = &member.name;
            if !member.link.is_attached() {
                return Err(format!("{name} is not attached to the backup"));
            }
            if let Some(why) = member.link.stalled() {
                return Err(format!("the backup does not acknowledge: {why}"));
            }
            let Some(writer) = &member.writer else { continue };
            if writer.phase != Phase::Replicating {
                return Err(format!("the backup does not have all of {name}'s disks"));
            }
            if let Some((disk, why)) = &writer.failed_disk {
                return Err(format!(
                    "disk {disk} of {name} has failed a flush ({why}), and nobody knows what it has kept: mend or \
                     replace it, start the daemon again, and switch when the sites have been compared"
                ));
            }
            if writer.differs {
                return Err(format!(
                    "the backup's disks of {name} were found to differ: see tidelock verify"
                ));
            }
        }
        if self.degrade.hinders_switch(self.wanted) {
            return Err("the group is degraded: the backup does not have all that has left".into());
        }
        Ok(())
    }

    /// True if a switch could begin: none was made, and none is under way.
    pub fn may_begin_switch(&self) -> Result<(), SwitchError> {
        match &self.stage {
            Stage::Idle | Stage::Failed(_) => Ok(()),
            Stage::Over { .. } => Err(format!(
                "the group was switched over already: at the backup site, tidelock-backup recover {}",
                self.settings.name
            )),
            Stage::UnderWay(_) => Err("a switch of this group is under way".to_owned()),
        }
    }

    /// Begins a switch: no requests are taken. `drain_max`: how long the backup may take to get everything;
    /// `others_max`: how long the other hosts of the group may take after that.
    pub fn begin_switch(
        &mut self,
        drain_max: Duration,
        others_max: Duration,
        around: &mut dyn Surroundings,
    ) {
        let now = around.clocks().now;
        let members = around.members();
        let is_spread = !self.settings.elsewhere.is_empty();
        let handover = Handover::begin(members.len(), is_spread, drain_max, others_max, now);
        tracing::info!(group = self.settings.name, "switching over: no requests are taken");
        let writers = || members.iter().enumerate().filter(|(_, member)| member.writer.is_some());
        // With times what one holds waits for all the others.
        let together = Arc::new(AtomicUsize::new(writers().count()));
        let mut drains = Vec::new();
        for (nth, _) in writers() {
            let (reply, drained) = oneshot::channel();
            let not_ready = match self.settings.form {
                Form::Hlc if self.settings.is_of_several => together.clone(),
                _ => Arc::new(AtomicUsize::new(1)),
            };
            around.tell_owner(nth, ToOwner::Hold(reply, not_ready));
            drains.push(Some(drained));
        }
        self.stage = Stage::UnderWay(Box::new(Switch {
            handover,
            asked_at: now,
            drains,
            drained: Vec::new(),
            answers: Vec::new(),
            at_unix_ms: 0,
            is_shut: false,
        }));
    }

    /// The progress of the switch. A failure is told once. An operator who asks waits for it.
    pub fn switch_state(&mut self, now: MonoNanos) -> Result<SwitchState, SwitchError> {
        match &mut self.stage {
            Stage::Idle => Err("no switch of this group is under way".to_owned()),
            Stage::UnderWay(switch) => {
                switch.asked_at = now;
                Ok(if switch.is_shut {
                    SwitchState::GivingUp
                } else if switch.handover.is_awaiting() {
                    let members = self.settings.with_hosts(switch.handover.awaited());
                    SwitchState::Awaiting { members }
                } else {
                    SwitchState::Draining
                })
            }
            Stage::Over { how, .. } => Ok(how.clone()),
            Stage::Failed(why) => {
                let why = std::mem::take(why);
                self.stage = Stage::Idle;
                Err(why)
            }
        }
    }

    /// One step of the switch that is under way, if one is. The driver calls it again soon.
    pub fn look_at_switch(&mut self, around: &mut dyn Surroundings) -> Option<Step> {
        let mut switch = match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::UnderWay(switch) => switch,
            other => {
                self.stage = other;
                return None;
            }
        };
        let step = self.switch_step(&mut switch, around);
        self.stage = match &step {
            Step::Over => {
                let over = over(&self.settings.name, &switch);
                for (nth, member) in around.members().iter().enumerate() {
                    if member.writer.is_some() {
                        around.tell_owner(nth, ToOwner::SwitchedOver);
                    }
                }
                Stage::Over { how: over, at_unix_ms: switch.at_unix_ms }
            }
            Step::GoOn(why) => {
                let group = &self.settings.name;
                tracing::warn!(group, why, "not switched over: the group goes on");
                for (nth, member) in around.members().iter().enumerate() {
                    if member.writer.is_some() {
                        around.tell_owner(nth, ToOwner::LetGo);
                    }
                }
                Stage::Failed(why.clone())
            }
            _ => Stage::UnderWay(switch),
        };
        Some(step)
    }

    fn switch_step(&self, switch: &mut Switch, around: &mut dyn Surroundings) -> Step {
        let clocks = around.clocks();
        let asked_ns = u128::from(clocks.now.since_ns(switch.asked_at));
        let Switch { handover, drains, drained, answers, .. } = switch;
        let is_asked_for = asked_ns < self.settings.asked_within.as_nanos();
        let mut seen = Seen { group: self, around, drains, drained, answers, is_asked_for };
        let mut step = handover.look(&mut seen, clocks.now);
        if step == Step::Record {
            switch.at_unix_ms = clocks.wall_ms;
            let kept = around.keep_switched(clocks.wall_ms);
            let kept = kept.map_err(|error| format!("the switch cannot be put on record: {error}"));
            step = switch.handover.recorded(kept);
            if let Step::GoOn(_) = step {
                say_ready(switch, false, around);
            }
        }
        match &step {
            Step::Say(ready) => say_ready(switch, *ready, around),
            Step::Shut => {
                switch.is_shut = true;
                if !tidelock_planted::is(Bug::GivenUpBeforeShut) {
                    // Also when the gate was shut.
                    around.members().iter().for_each(|member| member.control.fence());
                }
            }
            Step::GiveUp => {
                for member in 0..around.members().len() {
                    let (given_up, answer): (LeaseGivenUp, _) = oneshot::channel();
                    around.tell_link(member, ToLink::GiveUpLease(Some(given_up)));
                    switch.answers.push(answer);
                }
            }
            Step::Wait | Step::Record | Step::Over | Step::GoOn(_) => {}
        }
        step
    }
}

fn say_ready(switch: &Switch, ready: bool, around: &mut dyn Surroundings) {
    // Nobody else has to be told where all members are here.
    let Some(agreement) = switch.handover.agreement() else { return };
    for member in 0..around.members().len() {
        around.tell_link(member, ToLink::ReadyToSwitch(ready, agreement.clone()));
    }
}

fn over(group: &str, switch: &Switch) -> SwitchState {
    let took = switch.handover.took();
    let problem = switch.handover.problem().map(str::to_owned);
    let [drained_ms, others_ms, shut_ms, gave_up_ms] =
        [took.drained, took.others, took.shut, took.gave_up].map(|span| span.as_millis() as u64);
    match &problem {
        None => tracing::warn!(
            group,
            drained_ms,
            gave_up_ms,
            "switched over: the gate is shut for good, and the lease is given up"
        ),
        Some(why) => tracing::error!(
            group,
            why,
            "the gate is shut for good, but the backup may not know it yet"
        ),
    }
    let seqs = switch.drained.iter().cloned().collect();
    SwitchState::Over { seqs, drained_ms, others_ms, shut_ms, gave_up_ms, problem }
}
