//! The planned switch to the backup site: everything to the backup, the gate shut, the lease given up. What is done when is
//! [`Handover`]'s to say; this asks the writers, the gate and the link, and keeps the record.
//!
//! A crash before the record leaves a group that goes on as it was, one after it a group that is shut here for good.

use super::disk_hangs::{self, disk_hang};
use super::launch::is_one_of_several;
use super::{Host, HostGroup, HostMember, Writer};
use crate::clock;
use crate::config::{Config, Group};
use crate::control::{ControlError, ControlErrorKind, SwitchState, SwitchWish, Switching as Begun};
use crate::durable;
use crate::handover::{Handover, LinkEnded, Sight, Step};
use crate::link::port::{Agreement, LeaseGivenUp, ToLink};
use crate::owner::{Drained, Phase, ToOwner};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tidelock_protocol::ids::Epoch;
use tidelock_protocol::message::Form;
use tidelock_protocol::vector::CountVector;
use tokio::sync::oneshot::{self, error::TryRecvError};

/// Who has not looked for so long does not wait any more.
const LOOKED_WITHIN: Duration = Duration::from_secs(5);
/// How often what has no wake-up is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(2);

const FORMAT: u32 = 1;

/// What is on record of a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    format: u32,
    epoch: Epoch,
    at_unix_ms: u64,
}

/// How far the switch of a group is.
#[derive(Debug)]
pub(super) struct Switching {
    path: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    stage: Stage,
    looked_at: Instant,
}

#[derive(Clone, Debug)]
enum Stage {
    Idle,
    /// Asked for, and not begun yet.
    Wanted(SwitchWish),
    Draining,
    /// Drained; these members are not, with their hosts.
    Awaiting(Vec<String>),
    GivingUp,
    Over(SwitchState, u64),
    /// Told once.
    Failed(String),
}

/// When a run before has switched the group over, by the wall clock.
pub(super) fn on_record(config: &Config, group: &Group) -> io::Result<Option<u64>> {
    let bytes = match fs::read(record_path(config, group)) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let record: Record = serde_json::from_slice(&bytes)?;
    match record.format {
        FORMAT => Ok(Some(record.at_unix_ms)),
        found => Err(io::Error::other(format!("format {found}, this daemon knows {FORMAT}"))),
    }
}

fn record_path(config: &Config, group: &Group) -> PathBuf {
    // No member has such a name: they begin with a letter or digit.
    config.host.state_dir.join(group.name.as_str()).join("_switched.json")
}

/// True if this host has handed the group to the backup site.
pub(crate) fn switched_over(config: &Config, group: &Group) -> bool {
    record_path(config, group).exists()
}

fn write(path: &Path, epoch: Epoch, at_unix_ms: u64) -> io::Result<()> {
    let record = Record { format: FORMAT, epoch, at_unix_ms };
    durable::replace(path, &serde_json::to_vec_pretty(&record).expect("plain data"))
}

fn refused(text: impl Into<String>) -> ControlError {
    ControlError::new(ControlErrorKind::Refused, text)
}

impl Switching {
    /// Of this group, as the run before left it. What cannot be read was written when the gate was shut for good.
    pub(super) fn open(config: &Config, group: &Group) -> Self {
        let path = record_path(config, group);
        let at_unix_ms = on_record(config, group).unwrap_or_else(|error| {
            tracing::error!(
                group = group.name.as_str(), path = %path.display(), %error,
                "the record of a switch cannot be read: the group stays shut here"
            );
            Some(0)
        });
        let stage = at_unix_ms.map_or(Stage::Idle, |at| Stage::Over(SwitchState::Before, at));
        let inner = Mutex::new(Inner { stage, looked_at: Instant::now() });
        Self { path, inner }
    }

    /// When the group was switched over, by the wall clock, if it was.
    pub(super) fn over_since_unix_ms(&self) -> Option<u64> {
        match self.lock().stage {
            Stage::Over(_, at) => Some(at),
            _ => None,
        }
    }

    /// Whether nothing of the group leaves this host any more.
    pub(super) fn is_shut(&self) -> bool {
        matches!(self.lock().stage, Stage::GivingUp | Stage::Over(..))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while held")
    }

    fn set(&self, stage: Stage) {
        self.lock().stage = stage;
    }

    /// The wish, once.
    fn take_wish(&self) -> Option<SwitchWish> {
        let mut inner = self.lock();
        let Stage::Wanted(wish) = &inner.stage else { return None };
        let wish = wish.clone();
        inner.stage = Stage::Draining;
        Some(wish)
    }

    fn is_waited_for(&self) -> bool {
        self.lock().looked_at.elapsed() < LOOKED_WITHIN
    }
}

/// What is seen of a switch that is under way.
struct Seen<'a> {
    host: &'a Host,
    group: &'a HostGroup,
    /// Writers that have not said yet that the backup has everything.
    drains: Vec<Option<oneshot::Receiver<Drained>>>,
    drained: Vec<Option<Drained>>,
    /// Answers that have not come, of members that have given up their leases.
    answers: Vec<oneshot::Receiver<CountVector>>,
}

impl Sight for Seen<'_> {
    fn unwanted(&self) -> Option<String> {
        if self.host.stopping.load(Ordering::SeqCst) {
            return Some("the daemon is stopping".to_owned());
        }
        let why = "whoever has asked for it does not wait any more";
        (!self.group.switching.is_waited_for()).then(|| why.to_owned())
    }

    fn is_drained(&mut self) -> Result<bool, String> {
        for (drain, drained) in self.drains.iter_mut().zip(&mut self.drained) {
            let Some(of) = drain else { continue };
            let Ok(done) = of.try_recv() else { return Ok(false) };
            if done.marks.is_none() {
                return Err("the local disk failed its last flush, or the sites differ".to_owned());
            }
            (*drain, *drained) = (None, Some(done));
        }
        Ok(true)
    }

    fn is_held(&self) -> bool {
        self.host.held_packets(self.group) > 0
    }

    fn obstacle(&self) -> Option<String> {
        self.host.check_switch(self.group).err()
    }

    fn lacks(&self) -> String {
        let writers = self.group.members.iter().filter_map(|member| member.writer.as_ref());
        let now = clock::mono_now();
        if let Some(hang) = self.group.members.iter().find_map(|m| disk_hang(self.group, m, now)) {
            return disk_hangs::said(&hang);
        }
        match self.is_attached() {
            true => format!(
                "it still lacks {} writes, and {} packets wait",
                writers.map(Writer::lag_writes).sum::<u64>(),
                self.host.held_packets(self.group)
            ),
            false => "it is not connected".to_owned(),
        }
    }

    fn is_attached(&self) -> bool {
        let mut links = self.group.members.iter().filter_map(HostMember::link_stats);
        links.all(|link| link.is_attached())
    }

    fn with_hosts(&self, members: Vec<String>) -> Vec<String> {
        with_hosts(self.group, members)
    }

    fn is_shut(&self) -> bool {
        self.group.members.iter().all(|member| member.control.is_applied())
    }

    fn is_answered(&mut self) -> Result<bool, LinkEnded> {
        let mut is_lost = false;
        self.answers.retain_mut(|answer| match answer.try_recv() {
            Ok(_) => false,
            Err(TryRecvError::Empty) => true,
            // A link that has ended answers nothing.
            Err(TryRecvError::Closed) => {
                is_lost = true;
                true
            }
        });
        if is_lost { Err(LinkEnded) } else { Ok(self.answers.is_empty()) }
    }
}

impl Host {
    /// Begins a switch, or only says why there can be none.
    pub(super) fn switchover(
        &self,
        group: &HostGroup,
        wish: SwitchWish,
    ) -> Result<Begun, ControlError> {
        let mut inner = group.switching.lock();
        match &inner.stage {
            Stage::Idle | Stage::Failed(_) => {}
            Stage::Over(..) => {
                return Err(refused(format!(
                    "the group was switched over already: at the backup site, tidelock-backup recover {}",
                    group.config.name.as_str()
                )));
            }
            _ => return Err(refused("a switch of this group is under way")),
        }
        self.check_switch(group).map_err(refused)?;
        let connections = connections(group);
        if wish.check_only {
            return Ok(Begun { connections });
        }
        if connections > 0 && !wish.guest_is_stopped {
            return Err(refused(format!(
                "a guest has its disks open ({connections} connections): stop it, give --stop-command, or cut it off \
                 with --guest-is-stopped"
            )));
        }
        *inner = Inner { stage: Stage::Wanted(wish), looked_at: Instant::now() };
        drop(inner);
        self.switch_asked.notify_one();
        Ok(Begun { connections })
    }

    /// Why the group cannot be switched over now.
    fn check_switch(&self, group: &HostGroup) -> Result<(), String> {
        if self.stopping.load(Ordering::SeqCst) {
            return Err("the daemon is stopping".to_owned());
        }
        for member in &group.members {
            let name = member.config.name.as_str();
            let Some(link) = member.link_stats() else { continue };
            if !link.is_attached() {
                return Err(format!("{name} is not attached to the backup"));
            }
            if let Some(why) = link.stalled() {
                return Err(format!("the backup does not acknowledge: {why}"));
            }
            let phase = member.writer.as_ref().map(|writer| writer.view.phase());
            if phase.is_some_and(|phase| phase != Phase::Replicating) {
                return Err(format!("the backup does not have all of {name}'s disks"));
            }
            let failed = member.writer.as_ref().map(|writer| writer.view.trouble().failed_disks);
            if let Some((disk, why)) = failed.unwrap_or_default().first() {
                return Err(format!(
                    "disk {disk} of {name} has failed a flush ({why}), and nobody knows what it has kept: mend or \
                     replace it, start the daemon again, and switch when the sites have been compared"
                ));
            }
            if member.writer.as_ref().is_some_and(Writer::differs) {
                return Err(format!(
                    "the backup's disks of {name} were found to differ: see tidelock verify"
                ));
            }
        }
        let wanted = *group.mode.lock().expect("no panic while held");
        if group.degrading.hinders_switch(wanted) {
            return Err("the group is degraded: the backup does not have all that has left".into());
        }
        Ok(())
    }

    /// How far it is. That it has failed is told once.
    pub(super) fn switched(&self, group: &HostGroup) -> Result<SwitchState, ControlError> {
        let mut inner = group.switching.lock();
        inner.looked_at = Instant::now();
        match &inner.stage {
            Stage::Idle => Err(refused("no switch of this group is under way")),
            Stage::Wanted(_) | Stage::Draining => Ok(SwitchState::Draining),
            Stage::Awaiting(members) => Ok(SwitchState::Awaiting { members: members.clone() }),
            Stage::GivingUp => Ok(SwitchState::GivingUp),
            Stage::Over(state, _) => Ok(state.clone()),
            Stage::Failed(_) => {
                let Stage::Failed(why) = std::mem::replace(&mut inner.stage, Stage::Idle) else {
                    unreachable!("just seen")
                };
                Err(refused(why))
            }
        }
    }

    /// Carries out the switches that are asked for. Runs as long as the daemon does.
    pub(super) async fn follow_switches(&self) {
        loop {
            self.switch_asked.notified().await;
            for group in &self.groups {
                if let Some(wish) = group.switching.take_wish() {
                    let name = group.config.name.as_str();
                    tracing::info!(group = name, "switching over: no requests are taken");
                    if let Err(why) = self.switch_over(group, &wish).await {
                        tracing::warn!(group = name, why, "not switched over: the group goes on");
                        for writer in writers(group) {
                            writer.port.send(ToOwner::LetGo);
                        }
                        group.switching.set(Stage::Failed(why));
                    }
                }
            }
        }
    }

    /// `Err`: it has not come to pass, and nothing has changed.
    async fn switch_over(&self, group: &HostGroup, wish: &SwitchWish) -> Result<(), String> {
        let drain_max = Duration::from_millis(wish.timeout_ms);
        let others_max = Duration::from_millis(wish.others_ms);
        let (members, spread, now) = (group.members.len(), is_spread(group), clock::mono_now());
        let mut handover = Handover::begin(members, spread, drain_max, others_max, now);
        let mut seen = self.hold(group);
        let mut at_unix_ms = 0;
        loop {
            let mut step = handover.look(&mut seen, clock::mono_now());
            if step == Step::Record {
                at_unix_ms = clock::wall_ms();
                step = handover.recorded(put_on_record(group, at_unix_ms));
                if let (Step::GoOn(_), Some(agreement)) = (&step, handover.agreement()) {
                    self.say_ready(group, false, agreement);
                }
            }
            match step {
                Step::Wait | Step::Record => {
                    if handover.is_awaiting() {
                        let awaited = with_hosts(group, handover.awaited());
                        group.switching.set(Stage::Awaiting(awaited));
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
                Step::Say(ready) => {
                    let agreement = handover.agreement().expect("it waits for other hosts");
                    self.say_ready(group, ready, agreement);
                }
                Step::Shut => {
                    group.switching.set(Stage::GivingUp);
                    // Also when the gate was shut.
                    group.members.iter().for_each(|member| member.control.fence());
                }
                Step::GiveUp => seen.answers = self.give_up(group),
                Step::Over => {
                    is_over(group, &handover, &seen.drained, at_unix_ms);
                    return Ok(());
                }
                Step::GoOn(why) => return Err(why),
            }
        }
    }

    /// Lets no request in.
    fn hold<'a>(&'a self, group: &'a HostGroup) -> Seen<'a> {
        let all = || writers(group);
        // With times what one holds waits for all the others.
        let together = Arc::new(AtomicUsize::new(all().count()));
        let mut drains = Vec::new();
        for writer in all() {
            let (reply, drained) = oneshot::channel();
            let not_ready = match group.config.form {
                Form::Hlc if is_one_of_several(&group.config) => together.clone(),
                _ => Arc::new(AtomicUsize::new(1)),
            };
            writer.port.send(ToOwner::Hold(reply, not_ready));
            drains.push(Some(drained));
        }
        let drained = drains.iter().map(|_| None).collect();
        Seen { host: self, group, drains, drained, answers: Vec::new() }
    }

    fn say_ready(&self, group: &HostGroup, ready: bool, agreement: &Arc<Agreement>) {
        if let Some(link) = &*self.link.lock().expect("no panic while held") {
            for member in &group.members {
                // A link that has ended answers nothing.
                let message = ToLink::ReadyToSwitch(ready, agreement.clone());
                let _ = link.send((member.channel, message));
            }
        }
    }

    fn held_packets(&self, group: &HostGroup) -> u64 {
        let gate = self.gate.lock().expect("no panic while held");
        let Some(gate) = gate.as_ref() else { return 0 };
        let is_ours = |name: &str| group.members.iter().any(|m| m.config.name.as_str() == name);
        let ours = gate.members().iter().filter(|member| is_ours(member.name()));
        ours.map(|member| member.stats().snapshot().held_packets).sum()
    }

    /// Tells the backup. The answers come once it knows.
    fn give_up(&self, group: &HostGroup) -> Vec<oneshot::Receiver<CountVector>> {
        let mut answers = Vec::new();
        for member in &group.members {
            let (given_up, answer): (LeaseGivenUp, _) = oneshot::channel();
            if let Some(link) = &*self.link.lock().expect("no panic while held") {
                // A link that has ended answers nothing.
                let _ = link.send((member.channel, ToLink::GiveUpLease(Some(given_up))));
            }
            answers.push(answer);
        }
        answers
    }
}

/// No run after this one opens the gate.
fn put_on_record(group: &HostGroup, at_unix_ms: u64) -> Result<(), String> {
    let epochs = writers(group).map(|writer| writer.state.epoch());
    write(&group.switching.path, epochs.max().unwrap_or_default(), at_unix_ms)
        .map_err(|error| format!("the switch cannot be put on record: {error}"))
}

fn is_over(group: &HostGroup, handover: &Handover, drained: &[Option<Drained>], at_unix_ms: u64) {
    let (name, took) = (group.config.name.as_str(), handover.took());
    let problem = handover.problem().map(str::to_owned);
    let (drained_ms, gave_up_ms) =
        (took.drained.as_millis() as u64, took.gave_up.as_millis() as u64);
    match &problem {
        None => tracing::warn!(
            group = name,
            drained_ms,
            gave_up_ms,
            "switched over: the gate is shut for good, and the lease is given up"
        ),
        Some(why) => tracing::error!(
            group = name,
            why,
            "the gate is shut for good, but the backup may not know it yet"
        ),
    }
    let members = group.members.iter().filter(|member| member.writer.is_some());
    let seqs = members.zip(drained.iter().flatten());
    let over = SwitchState::Over {
        seqs: seqs.map(|(member, of)| (member.config.name.to_string(), of.seq.0)).collect(),
        drained_ms,
        others_ms: took.others.as_millis() as u64,
        shut_ms: took.shut.as_millis() as u64,
        gave_up_ms,
        problem,
    };
    group.switching.set(Stage::Over(over, at_unix_ms));
    for writer in writers(group) {
        writer.port.send(ToOwner::SwitchedOver);
    }
}

fn writers(group: &HostGroup) -> impl Iterator<Item = &Writer> {
    group.members.iter().filter_map(|member| member.writer.as_ref())
}

/// Whether other hosts have members of the group.
fn is_spread(group: &HostGroup) -> bool {
    group.config.roster.iter().any(|peer| !peer.removed && peer.host.is_some())
}

/// These members, and where they are.
fn with_hosts(group: &HostGroup, members: Vec<String>) -> Vec<String> {
    let host = |name: &str| {
        let peer = group.config.roster.iter().find(|peer| peer.name.as_str() == name)?;
        peer.host.as_ref()
    };
    let words = |name: String| match host(&name) {
        Some(host) => format!("{name} on {}", host.as_str()),
        None => name,
    };
    members.into_iter().map(words).collect()
}

/// Connections of guests to the group's disks.
fn connections(group: &HostGroup) -> u64 {
    writers(group).map(|writer| writer.owner_stats.connections.load(Ordering::Relaxed)).sum()
}
