//! The planned switch to the backup site: everything to the backup, the gate shut, the lease given up.
//!
//! ```text
//!            no requests taken     on record        shut, in force      told to the backup
//!  idle ──▶ draining ──[awaiting]──▶ written ───────▶ fenced ───────────▶ over
//!    ▲          │          │
//!    └──────────┴──────────┘ not drained in time, or nobody waits: requests are taken again, nothing has changed
//! ```
//!
//! A group that is spread over several hosts is handed over by all of them: each is told by its operator, and once it is
//! drained it says so to the backup, which tells all to go on when all are (`backup-server/src/group/switching.rs`).
//! Nobody who was told so goes back by itself, and nobody goes on without.
//!
//! Invariant (rule 4): the lease is given up only after the gate is shut and is known to stay so, also by the next run
//! of the daemon: the record is on stable storage first. A crash before the record leaves a group that goes on as it was,
//! one after it a group that is shut here for good.

use super::launch::is_one_of_several;
use super::{Host, HostGroup, HostMember, Writer};
use crate::clock;
use crate::config::{Config, Group};
use crate::control::{ControlError, ControlErrorKind, SwitchState, SwitchWish, Switching as Begun};
use crate::durable;
use crate::link::port::{Agreement, ToLink};
use crate::owner::{Drained, Phase, ToOwner};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tidelock_protocol::ids::Epoch;
use tidelock_protocol::message::{Form, PROTOCOL_OF_JOINT_SWITCHES, PROTOCOL_OF_SWITCHES};
use tidelock_protocol::vector::CountVector;
use tokio::sync::oneshot;

/// Who has not looked for so long does not wait any more.
const LOOKED_WITHIN: Duration = Duration::from_secs(5);
/// So long the gate's thread may take to shut, and the backup to answer, once nothing can be taken back.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How often what has no wake-up is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The longest drain that may be asked for, and the longest wait for other hosts.
const DRAIN_MAX: Duration = Duration::from_secs(3600);

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

/// What all hosts have agreed on.
struct Others {
    /// `None`: there is only this host.
    agreement: Option<Arc<Agreement>>,
    took: Duration,
}

impl Others {
    fn none() -> Self {
        Self { agreement: None, took: Duration::ZERO }
    }
}

/// What a drain has come to.
struct Quiet {
    drained: Vec<Drained>,
    took: Duration,
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
        let spoken = match is_spread(group) {
            true => PROTOCOL_OF_JOINT_SWITCHES,
            false => PROTOCOL_OF_SWITCHES,
        };
        for member in &group.members {
            let name = member.config.name.as_str();
            let Some(link) = member.link_stats() else { continue };
            if !link.is_attached() {
                return Err(format!("{name} is not attached to the backup"));
            }
            if link.protocol() < u64::from(spoken) {
                return Err(
                    "the backup server is too old for this: upgrade it, or stop the guest and the \
                     daemon, and let tidelock-backup recover wait out the grace"
                        .to_owned(),
                );
            }
            if let Some(why) = link.stalled() {
                return Err(format!("the backup does not acknowledge: {why}"));
            }
            let phase = member.writer.as_ref().map(|writer| writer.view.phase());
            if phase.is_some_and(|phase| phase != Phase::Replicating) {
                return Err(format!("the backup does not have all of {name}'s disks"));
            }
            if member.writer.as_ref().is_some_and(Writer::differs) {
                return Err(format!(
                    "the backup's disks of {name} were found to differ: see tidelock verify"
                ));
            }
        }
        if group.degrading.since_unix_ms().is_some() {
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
        let limit = Duration::from_millis(wish.timeout_ms).min(DRAIN_MAX);
        let quiet = self.drain(group, limit).await?;
        self.check_switch(group)?;
        let others = match is_spread(group) {
            true => self.await_others(group, Duration::from_millis(wish.others_ms)).await?,
            false => Others::none(),
        };
        let (began, at_unix_ms) = (Instant::now(), clock::wall_ms());
        let epochs = writers(group).map(|writer| writer.state.epoch());
        // On record first: no run after this one opens the gate.
        if let Err(error) =
            write(&group.switching.path, epochs.max().unwrap_or_default(), at_unix_ms)
        {
            let why = format!("the switch cannot be put on record: {error}");
            return Err(self.leave_others(group, &others, why));
        }
        group.switching.set(Stage::GivingUp);
        let (shut, given_up) = self.give_up(group).await;
        let gave_up_ms = began.elapsed().as_millis() as u64;
        let problem = given_up.as_ref().err().cloned();
        let seqs = group.members.iter().filter(|member| member.writer.is_some());
        let seqs = seqs.zip(&quiet.drained).map(|(m, of)| (m.config.name.to_string(), of.seq.0));
        let over = SwitchState::Over {
            seqs: seqs.collect(),
            drained_ms: quiet.took.as_millis() as u64,
            others_ms: others.took.as_millis() as u64,
            shut_ms: shut.map_or(gave_up_ms, |at| (at - began).as_millis() as u64),
            gave_up_ms,
            problem,
        };
        match &given_up {
            Ok(()) => tracing::warn!(
                group = group.config.name.as_str(),
                drained_ms = quiet.took.as_millis() as u64,
                gave_up_ms,
                "switched over: the gate is shut for good, and the lease is given up"
            ),
            Err(why) => tracing::error!(
                group = group.config.name.as_str(),
                why,
                "the gate is shut for good, but the backup may not know it yet"
            ),
        }
        group.switching.set(Stage::Over(over, at_unix_ms));
        Ok(())
    }

    /// Lets no request in until everything is at the backup, and nothing is held that waits for it.
    async fn drain(&self, group: &HostGroup, limit: Duration) -> Result<Quiet, String> {
        let began = Instant::now();
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
            drains.push(drained);
        }
        let mut drained = Vec::new();
        for mut of in drains {
            let done = loop {
                if let Ok(done) = of.try_recv() {
                    break done;
                }
                self.look_on(group, began, limit).await?;
            };
            if !done.whole {
                return Err("the local disk failed its last flush, or the sites differ".to_owned());
            }
            drained.push(done);
        }
        while self.held_packets(group) > 0 {
            self.look_on(group, began, limit).await?;
        }
        Ok(Quiet { drained, took: began.elapsed() })
    }

    /// Says that this host is drained, and waits until all hosts are. From then on there is no way back but by an error.
    async fn await_others(&self, group: &HostGroup, limit: Duration) -> Result<Others, String> {
        let (began, limit) = (Instant::now(), limit.min(DRAIN_MAX));
        let agreement = Arc::new(Agreement::default());
        self.say_ready(group, true, &agreement);
        let why = loop {
            let took = began.elapsed();
            if agreement.is_reached() {
                return Ok(Others { agreement: Some(agreement), took });
            }
            let awaited = with_hosts(group, agreement.awaited());
            group.switching.set(Stage::Awaiting(awaited.clone()));
            if let Err(why) = self.is_wanted(group) {
                break why;
            }
            if took >= limit {
                let who = match awaited.is_empty() {
                    true => "the backup did not answer".to_owned(),
                    false => format!("{} did not get ready", awaited.join(", ")),
                };
                break format!("{who} within {limit:?}");
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        // The backup may have told all of them to go on by now.
        self.say_ready(group, false, &agreement);
        let until = Instant::now() + ANSWER_MAX;
        while agreement.released() < group.members.len() {
            if agreement.is_reached() {
                return Ok(Others { agreement: Some(agreement), took: began.elapsed() });
            }
            let links = group.members.iter().filter_map(HostMember::link_stats);
            if !links.into_iter().all(|link| link.is_attached()) || Instant::now() >= until {
                return Err(format!(
                    "{why}. The backup could not be asked whether the other hosts go on: if tidelock-backup status \
                     says that a part of the group is switched over, run this again"
                ));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        Err(why)
    }

    /// What was agreed on cannot be done here.
    fn leave_others(&self, group: &HostGroup, others: &Others, why: String) -> String {
        let Some(agreement) = &others.agreement else { return why };
        self.say_ready(group, false, agreement);
        format!("{why}. The other hosts have switched over: mend this, and run it again")
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

    /// Whether somebody still waits for the switch.
    fn is_wanted(&self, group: &HostGroup) -> Result<(), String> {
        if self.stopping.load(Ordering::SeqCst) {
            return Err("the daemon is stopping".to_owned());
        }
        if !group.switching.is_waited_for() {
            return Err("whoever has asked for it does not wait any more".to_owned());
        }
        Ok(())
    }

    /// Waits a moment, if somebody waits for the switch and there is time left.
    async fn look_on(
        &self,
        group: &HostGroup,
        began: Instant,
        limit: Duration,
    ) -> Result<(), String> {
        self.is_wanted(group)?;
        if began.elapsed() >= limit {
            let links = group.members.iter().filter_map(HostMember::link_stats);
            let why = match links.clone().all(|link| link.is_attached()) {
                true => format!(
                    "it still lacks {} writes, and {} packets wait",
                    links.map(|link| link.lag_writes()).sum::<u64>(),
                    self.held_packets(group)
                ),
                false => "it is not connected".to_owned(),
            };
            return Err(format!("the backup did not get everything within {limit:?}: {why}"));
        }
        tokio::time::sleep(LOOK_EVERY).await;
        Ok(())
    }

    fn held_packets(&self, group: &HostGroup) -> u64 {
        let gate = self.gate.lock().expect("no panic while held");
        let Some(gate) = gate.as_ref() else { return 0 };
        let is_ours = |name: &str| group.members.iter().any(|m| m.config.name.as_str() == name);
        let ours = gate.members().iter().filter(|member| is_ours(member.name()));
        ours.map(|member| member.stats().snapshot().held_packets).sum()
    }

    /// Shuts the gate, and tells the backup. From here on there is no way back. Also when the gate was shut.
    async fn give_up(&self, group: &HostGroup) -> (Option<Instant>, Result<(), String>) {
        let until = Instant::now() + ANSWER_MAX;
        group.members.iter().for_each(|member| member.control.fence());
        while !group.members.iter().all(|member| member.control.is_applied()) {
            if Instant::now() >= until {
                let why = "the gate's thread does not answer: the lease is not given up";
                return (None, Err(why.to_owned()));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        (Some(Instant::now()), self.tell_given_up(group, until).await)
    }

    async fn tell_given_up(&self, group: &HostGroup, until: Instant) -> Result<(), String> {
        let mut answers = Vec::new();
        for member in &group.members {
            let (given_up, answer) = oneshot::channel::<CountVector>();
            if let Some(link) = &*self.link.lock().expect("no panic while held") {
                // A link that has ended answers nothing.
                let _ = link.send((member.channel, ToLink::GiveUpLease(Some(given_up))));
            }
            answers.push(answer);
        }
        for answer in answers {
            let left = until.saturating_duration_since(Instant::now());
            if !matches!(tokio::time::timeout(left, answer).await, Ok(Ok(_))) {
                return Err("the backup has not answered; it is told again until it does".into());
            }
        }
        Ok(())
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
