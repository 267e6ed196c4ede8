//! The policy of a group as the daemon follows it: looks at the gate and at C, opens it and holds again as
//! [`crate::degrade`] says, and keeps on record that it is open.

use super::launch::is_one_of_several;
use super::{Host, HostGroup, HostMember};
use crate::clock;
use crate::config::{Config, Group};
use crate::degrade::{Degrade, Record, Sight, Standing, Step, mode_at_start};
use crate::durable;
use crate::link::port::ToLink;
use crate::owner::{Phase, ToOwner};
use crate::stats::LinkStats;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidelock_netfilter::release_queue::GateState;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::{Form, Mode, Policy};

/// How often a group is looked at: often enough for the shortest time that can be configured.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How a group stands, and where that is kept.
#[derive(Debug)]
pub(super) struct Degrading(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    degrade: Degrade,
    path: PathBuf,
    /// What went wrong with the record was said.
    said: bool,
}

/// Since when the group is degraded, as a run before has put on record.
pub(super) fn on_record(config: &Config, group: &Group) -> io::Result<Option<u64>> {
    read(&record_path(config, group))
}

fn record_path(config: &Config, group: &Group) -> PathBuf {
    // No member has such a name: they begin with a letter or digit.
    config.host.state_dir.join(group.name.as_str()).join("_degraded.json")
}

fn read(path: &Path) -> io::Result<Option<u64>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let record: Record = serde_json::from_slice(&bytes)?;
    if record.format != Record::FORMAT {
        let text = format!("format {}, this daemon knows {}", record.format, Record::FORMAT);
        return Err(io::Error::other(text));
    }
    Ok(Some(record.since_unix_ms))
}

fn write(path: &Path, since_unix_ms: u64) -> io::Result<()> {
    let record = Record { format: Record::FORMAT, since_unix_ms };
    durable::replace(path, &serde_json::to_vec_pretty(&record).expect("plain data"))
}

impl Degrading {
    /// Of this group, as the run before left it. What cannot be read was written when the gate was open, so
    /// it has been since some time.
    pub(super) fn open(config: &Config, group: &Group) -> Self {
        let since_unix_ms = on_record(config, group).unwrap_or_else(|error| {
            let path = record_path(config, group);
            tracing::error!(
                group = group.name.as_str(), path = %path.display(), %error,
                "since when the group is degraded cannot be read; it is taken to be so until all is covered"
            );
            Some(0)
        });
        if since_unix_ms.is_some() {
            tracing::warn!(
                group = group.name.as_str(),
                "degraded when the last run ended: clients may have seen what the backup does not have"
            );
        }
        let degrade = Degrade::new(group.when_unreachable.after_ms(), since_unix_ms);
        Self(Mutex::new(Inner { degrade, path: record_path(config, group), said: false }))
    }

    /// How the group stands.
    pub(super) fn standing(&self) -> Standing {
        self.0.lock().expect("no panic while held").degrade.standing()
    }

    /// Since when clients may have seen what a disaster would undo, by the wall clock.
    pub(super) fn since_unix_ms(&self) -> Option<u64> {
        self.0.lock().expect("no panic while held").degrade.since_unix_ms()
    }

    /// Whether what has left keeps the group from being switched over, where the operator wants this mode.
    pub(super) fn hinders_switch(&self, wanted: Mode) -> bool {
        self.0.lock().expect("no panic while held").degrade.hinders_switch(wanted)
    }

    /// The gate was opened before the backup was reached, and that is not over.
    pub(super) fn is_unreached(&self) -> bool {
        self.0.lock().expect("no panic while held").degrade.is_unreached()
    }

    /// The mode in force where the operator wants this one.
    pub(super) fn mode(&self, wanted: Mode) -> Mode {
        self.0.lock().expect("no panic while held").degrade.mode(wanted)
    }
}

impl HostGroup {
    /// Before the link runs: the mode of the configuration comes into force, if it may.
    pub(super) fn begin_mode(&self) {
        let wanted = *self.mode.lock().expect("no panic while held");
        let mut inner = self.degrading.0.lock().expect("no panic while held");
        if self.members.iter().any(|member| member.writer.is_some()) {
            inner.degrade.await_contact();
        }
        self.change_mode(mode_at_start(self.config.mode), inner.degrade.mode(wanted));
    }

    /// What becomes of writes and packets now.
    pub(super) fn mode_in_force(&self) -> Mode {
        self.degrading.mode(*self.mode.lock().expect("no panic while held"))
    }

    /// Mode async is wanted, and not in force before the backup has heard of this run.
    pub(super) fn awaits_contact(&self) -> bool {
        let wanted = *self.mode.lock().expect("no panic while held");
        let inner = self.degrading.0.lock().expect("no panic while held");
        wanted == Mode::Async && inner.degrade.awaits_contact()
    }

    /// Whether the backup counts no writer here as gone that is not.
    fn is_in_contact(&self) -> bool {
        let mut links = self.members.iter().filter_map(HostMember::link_stats);
        links.all(LinkStats::is_policy_kept)
    }

    /// The mode in force has changed.
    fn change_mode(&self, before: Mode, mode: Mode) {
        if before == mode {
            return;
        }
        // The gate first: towards async nothing is lost by it; away from async nothing that
        // depends on later writes can leave any more.
        if let Some(gate) = &self.gate {
            gate.set_mode(mode);
        }
        for writer in self.members.iter().filter_map(|m| m.writer.as_ref()) {
            writer.port.send(ToOwner::SetMode(mode));
        }
    }
}

impl Host {
    /// Follows the policy of every group. Runs as long as the daemon does.
    pub(super) async fn follow_policies(&self) {
        for group in &self.groups {
            // What a run that was killed had let out is asked for, also on behalf of others.
            if group.degrading.since_unix_ms().is_some() && is_one_of_several(&group.config) {
                group.members.iter().for_each(|member| self.ask_floor(member, true));
            }
        }
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.groups.iter().for_each(|group| self.follow_policy(group));
        }
    }

    fn follow_policy(&self, group: &HostGroup) {
        let wanted = group.mode.lock().expect("no panic while held");
        let mut inner = group.degrading.0.lock().expect("no panic while held");
        let opens_unreached = self.opens_unreached(group);
        if inner.degrade.awaits_contact() && (opens_unreached || group.is_in_contact()) {
            let before = inner.degrade.mode(*wanted);
            inner.degrade.has_contact();
            let mode = inner.degrade.mode(*wanted);
            self.change_mode(group, before, mode);
            if mode != before {
                tracing::info!(group = group.config.name.as_str(), %mode, "in force from now on");
            }
        }
        if opens_unreached && inner.degrade.mode(*wanted) != Mode::Async {
            return self.open_unreached(group, *wanted, &mut inner);
        }
        let is_hold = group.config.when_unreachable.after_ms().is_none();
        if is_hold && inner.degrade.standing() == Standing::Holding {
            return;
        }
        let sight = self.sight(group, *wanted, inner.degrade.mode(*wanted));
        let before = inner.degrade.mode(*wanted);
        let since_unix_ms = match inner.degrade.standing() {
            Standing::Holding => sight.unix_ms,
            _ => inner.degrade.since_unix_ms().expect("it is degraded"),
        };
        // On record first: nothing leaves that a run after this one does not know of.
        if inner.degrade.is_about_to_open(&sight)
            && let Err(error) = write(&inner.path, since_unix_ms)
        {
            if !std::mem::replace(&mut inner.said, true) {
                let (name, path) = (group.config.name.as_str(), inner.path.display());
                tracing::error!(group = name, %path, %error, "cannot degrade: it cannot be put on record");
            }
            return;
        }
        let Some(step) = inner.degrade.look(&sight) else { return };
        let policy = inner.degrade.policy(*wanted);
        self.tell_policy(group, policy);
        self.change_mode(group, before, inner.degrade.mode(*wanted));
        let name = group.config.name.as_str();
        match step {
            Step::Open { .. } => tracing::error!(
                group = name,
                policy = %group.config.when_unreachable,
                "DEGRADED: replies have waited for the backup for too long and leave now; from here on clients \
                 may see what a disaster undoes"
            ),
            Step::Hold => tracing::warn!(
                group = name,
                "the backup has caught up: replies are held again; degraded until it has all that has left"
            ),
            Step::Covered => {
                if let Err(error) = durable::remove(&inner.path) {
                    let path = inner.path.display();
                    tracing::warn!(group = name, %path, %error, "the next start takes it to be degraded");
                }
                group.history.is_protected_again();
                tracing::info!(
                    group = name,
                    "no longer degraded: the backup has all that has left"
                );
            }
        }
    }

    /// Whether clients are to be answered although the backup was not reached since the start.
    fn opens_unreached(&self, group: &HostGroup) -> bool {
        let writers = || group.members.iter().filter_map(|m| m.writer.as_ref());
        writers().any(|writer| writer.view.phase() == Phase::Unrecorded)
            && writers().all(|writer| writer.state.may_answer_unreached())
            && !self.stopping.load(Ordering::SeqCst)
    }

    fn open_unreached(&self, group: &HostGroup, wanted: Mode, inner: &mut Inner) {
        let unix_ms = clock::wall_ms();
        let since_unix_ms = inner.degrade.since_unix_ms().unwrap_or(unix_ms);
        if let Err(error) = write(&inner.path, since_unix_ms) {
            if !std::mem::replace(&mut inner.said, true) {
                let (name, path) = (group.config.name.as_str(), inner.path.display());
                tracing::error!(
                    group = name, %path, %error,
                    "replies are held: it cannot be put on record that they would not be"
                );
            }
            return;
        }
        let before = inner.degrade.mode(wanted);
        inner.degrade.open_unreached(unix_ms);
        let policy = inner.degrade.policy(wanted);
        self.tell_policy(group, policy);
        self.change_mode(group, before, inner.degrade.mode(wanted));
        tracing::error!(
            group = group.config.name.as_str(),
            "UNPROTECTED: the backup was not reached since the start, and clients are answered all the same; from \
             here on they may see what a disaster undoes. If the group was recovered at the backup meanwhile, both \
             sites answer"
        );
    }

    fn tell_policy(&self, group: &HostGroup, policy: Policy) {
        if let Some(link) = &*self.link.lock().expect("no panic while held") {
            for member in &group.members {
                // A link that has ended tells nobody.
                let _ = link.send((member.channel, ToLink::Policy(policy)));
            }
        }
    }

    /// The operator wants another mode.
    pub(super) fn mode_is_wanted(&self, group: &HostGroup, before: Mode, mode: Mode) {
        let mut inner = group.degrading.0.lock().expect("no panic while held");
        let in_force = inner.degrade.mode(before);
        // Who gives this order knows what it gives up, but not for other members.
        if mode == Mode::Async && !is_one_of_several(&group.config) {
            inner.degrade.has_contact();
        }
        self.change_mode(group, in_force, inner.degrade.mode(mode));
        self.tell_policy(group, inner.degrade.policy(mode));
    }

    fn sight(&self, group: &HostGroup, wanted: Mode, in_force: Mode) -> Sight {
        let now = clock::mono_now();
        let writers = || group.members.iter().filter_map(|m| m.writer.as_ref());
        let links = || group.members.iter().filter_map(HostMember::link_stats);
        let is_in = |phase| writers().any(|w| w.view.phase() == phase);
        let (committed, watermark) = match &group.gate {
            Some(gate) => gate.committed(),
            None => writers()
                .map(|writer| writer.port.told())
                .reduce(|(mut committed, watermark), told| {
                    committed.merge(&told.0);
                    (committed, watermark.max(told.1))
                })
                .unwrap_or_default(),
        };
        Sight {
            now,
            unix_ms: clock::wall_ms(),
            may_open: wanted != Mode::Async
                && links().all(|link| link.is_policy_kept())
                && !is_in(Phase::Fenced)
                && !group.switching.is_shut()
                && !self.stopping.load(Ordering::SeqCst),
            is_open: match &group.gate {
                Some(gate) => gate.state(now) == GateState::Open,
                None => {
                    self.is_answered(group, now)
                        && !is_in(Phase::Resyncing)
                        && !is_in(Phase::Overflowed)
                }
            },
            is_whole: ![
                Phase::WaitingForBackup,
                Phase::Unrecorded,
                Phase::Overflowed,
                Phase::Initialising,
                Phase::Resyncing,
            ]
            .into_iter()
            .any(is_in),
            is_complete: in_force != Mode::Async
                && group.members.iter().all(|m| m.control.awaits_floor().is_none()),
            is_applied: group.gate.as_ref().is_none_or(|gate| gate.is_applied()),
            form: if group.config.is_tagged() { group.config.form } else { Form::Vector },
            write_age_ns: links().map(|link| link.lag_ns(now)).max().unwrap_or(0),
            round_trip_ns: links().map(|link| link.round_trip_ns()).max().unwrap_or(0),
            pending: group.members.iter().map(|m| m.control.pending()).collect(),
            committed,
            watermark,
        }
    }

    /// A group that nobody outside hears of has a lease all the same.
    fn is_answered(&self, group: &HostGroup, now: MonoNanos) -> bool {
        let period_ms = group.config.lease.as_millis() as u64;
        let mut links = group.members.iter().filter_map(HostMember::link_stats);
        links.all(|link| link.lease_sent_at().is_some_and(|at| now < at.plus_ms(period_ms)))
    }

    /// The mode in force has changed.
    fn change_mode(&self, group: &HostGroup, before: Mode, mode: Mode) {
        group.change_mode(before, mode);
        // What members have heard in mode async may say nothing of what it depends on, here
        // and on other hosts: they are held until every writer has said how far it is.
        if before == Mode::Async && mode != before && is_one_of_several(&group.config) {
            group.members.iter().for_each(|member| self.ask_floor(member, true));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_record_is_found_by_the_next_run() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shop/_degraded.json");
        assert_eq!(read(&path).unwrap(), None);
        write(&path, 1_800_000_000_123).unwrap();
        assert_eq!(read(&path).unwrap(), Some(1_800_000_000_123));
        // As format 1 was written.
        fs::write(&path, r#"{"format": 1, "since_unix_ms": 7}"#).unwrap();
        assert_eq!(read(&path).unwrap(), Some(7));
        fs::write(&path, r#"{"format": 2, "since_unix_ms": 7}"#).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("format 2"));
        durable::remove(&path).unwrap();
        durable::remove(&path).unwrap();
        assert_eq!(read(&path).unwrap(), None);
    }
}
