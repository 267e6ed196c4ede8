//! The driver of the loops of groups ([`GroupLoop`]): a host as they see it, and the control API's orders.

use super::launch::is_one_of_several;
use super::{Host, HostGroup, HostMember, Writer};
use crate::clock;
use crate::config::Group;
use crate::control::{ControlError, ControlErrorKind, SwitchState, SwitchWish, Switching as Begun};
use std::io;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidelock_daemon_core::group::{
    self, GateSight, GroupLoop, GroupSettings, GroupView, Member, Surroundings,
};
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::owner::{Clocks, ToOwner};
use tidelock_daemon_core::records::Records;
use tidelock_daemon_core::status::{DiskHangStatus, GroupStatus};
use tidelock_netfilter::release_queue::GateState;
use tidelock_protocol::message::{Form, Mode};
use tidelock_storage::files::Files;

/// Pause between two looks at a group: often enough for the shortest time that can be configured.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Pause between two looks at a switch that is under way.
const LOOK_AT_SWITCH_EVERY: Duration = Duration::from_millis(2);
/// An operator who has not asked for so long how far a switch is does not wait for it any more.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

/// The loop of a group, as the runs before have left it.
pub(super) fn open(group: &Group, records: &Records<Files>) -> GroupLoop {
    let elsewhere = group.roster.iter().filter(|peer| !peer.removed);
    let elsewhere = elsewhere.filter_map(|peer| {
        let host = peer.host.as_ref()?;
        Some((peer.name.to_string(), host.to_string()))
    });
    let settings = GroupSettings {
        name: group.name.to_string(),
        mode: group.mode,
        form: if group.is_tagged() { group.form } else { Form::Vector },
        is_of_several: is_one_of_several(group),
        elsewhere: elsewhere.collect(),
        after_ms: group.when_unreachable.after_ms(),
        lease_ms: group.lease.as_millis() as u64,
        asked_within: ASKED_WITHIN,
    };
    let degraded = records.degraded_since_unix_ms();
    if degraded.is_some() {
        tracing::warn!(
            group = settings.name,
            "degraded when the last run ended: clients may have seen what the backup does not have"
        );
    }
    GroupLoop::new(settings, degraded, records.switched_at_unix_ms())
}

/// This host, as the loop of one group sees it.
struct Here<'a> {
    host: &'a Host,
    group: &'a HostGroup,
}

impl Surroundings for Here<'_> {
    fn clocks(&self) -> Clocks {
        Clocks { now: clock::mono_now(), wall_ms: clock::wall_ms() }
    }

    fn is_stopping(&self) -> bool {
        self.host.stopping.load(Ordering::SeqCst)
    }

    fn members(&self) -> Vec<Member> {
        self.group.members.iter().map(HostMember::seen).collect()
    }

    fn gate(&self) -> Option<GateSight> {
        let gate = self.group.gate.as_ref()?;
        let (committed, watermark) = gate.committed();
        Some(GateSight {
            is_open: gate.state(clock::mono_now()) == GateState::Open,
            committed,
            watermark,
            is_applied: gate.is_applied(),
            lease_until: gate.lease_until(),
        })
    }

    fn left_unheld(&mut self) -> bool {
        self.group.left_unheld(self.host)
    }

    fn held_packets(&self) -> Option<u64> {
        // While its rules are looked at, which runs tools, it is not waited for.
        let gate = self.host.gate.try_lock().ok()?;
        let Some(gate) = gate.as_ref() else { return Some(0) };
        let mut members = self.group.members.iter();
        let mut is_ours = |name: &str| members.any(|member| member.config.name.as_str() == name);
        let ours = gate.members().iter().filter(|member| is_ours(member.name()));
        Some(ours.map(|member| member.stats().snapshot().held_packets).sum())
    }

    fn disk_hang(&self) -> Option<String> {
        let (heartbeat, now) = (self.group.config.heartbeat, clock::mono_now());
        let hang = self.group.members.iter().find_map(|member| {
            let wait = &member.writer.as_ref()?.owner_stats.disk_wait;
            let name_of = |nth: usize| Some(member.config.disks.get(nth)?.name.to_string());
            DiskHangStatus::of(wait, heartbeat, name_of, now)
        })?;
        Some(hang.to_string())
    }

    fn set_gate_mode(&mut self, mode: Mode) {
        if let Some(gate) = &self.group.gate {
            gate.set_mode(mode);
        }
    }

    fn tell_owner(&mut self, member: usize, message: ToOwner) {
        if let Some(writer) = &self.group.members[member].writer {
            writer.port.send(message);
        }
    }

    fn tell_link(&mut self, member: usize, message: ToLink) {
        if let Some(link) = &*self.host.link.lock().expect("no panic while held") {
            // A link that has ended hears nothing.
            let _ = link.send((self.group.members[member].channel, message));
        }
    }

    fn keep_degraded(&mut self, since_unix_ms: u64) -> io::Result<()> {
        self.group.records.keep_degraded(since_unix_ms)
    }

    fn forget_degraded(&mut self) -> io::Result<()> {
        self.group.records.forget_degraded()
    }

    fn keep_switched(&mut self, at_unix_ms: u64) -> io::Result<()> {
        let writers = self.group.members.iter().filter_map(|member| member.writer.as_ref());
        let epochs = writers.map(|writer| writer.state.epoch());
        self.group.records.keep_switched(epochs.max().unwrap_or_default(), at_unix_ms)
    }
}

impl HostMember {
    fn seen(&self) -> Member {
        Member {
            name: self.config.name.to_string(),
            link: self.link().expect("a member has an owner loop, or follows").clone(),
            control: self.control.clone(),
            writer: self.writer.as_ref().map(Writer::seen),
        }
    }
}

impl Writer {
    /// The owner loop, as it is now.
    pub(super) fn seen(&self) -> group::Writer {
        group::Writer::of(&self.view, &self.port, &self.state, &self.pulse)
    }
}

impl HostGroup {
    fn state(&self) -> MutexGuard<'_, GroupLoop> {
        self.state.lock().expect("no panic while held")
    }

    /// The state of the group.
    pub(super) fn view(&self) -> GroupView {
        self.state().view()
    }
}

impl Host {
    /// Before the link runs.
    pub(super) fn begin_groups(&self) {
        for group in &self.groups {
            group.state().begin(&mut Here { host: self, group });
        }
    }

    /// Follows the policy of every group. Runs as long as the daemon does.
    pub(super) async fn follow_policies(&self) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            for group in &self.groups {
                group.state().look(&mut Here { host: self, group });
            }
        }
    }

    /// The status of a group.
    pub(super) fn group_status(&self, group: &HostGroup) -> GroupStatus {
        // Before its loop is locked, which itself looks at the gate.
        let seen = self.seen(group);
        group.state().status(&Here { host: self, group }, seen)
    }

    /// The operator wants another mode. Returns the one before.
    pub(super) fn want_mode(&self, group: &HostGroup, mode: Mode) -> Result<Mode, ControlError> {
        let mut state = group.state();
        if state.is_shut() {
            let name = group.config.name.as_str();
            return Err(refused(format!(
                "group {name} was switched over: its mode does not matter here any more"
            )));
        }
        let before = state.view().wanted;
        state.want_mode(mode, &mut Here { host: self, group });
        Ok(before)
    }

    /// Begins a switch, or only says why there can be none.
    pub(super) fn switchover(
        &self,
        group: &HostGroup,
        wish: &SwitchWish,
    ) -> Result<Begun, ControlError> {
        let mut here = Here { host: self, group };
        let mut state = group.state();
        state.may_begin_switch().and_then(|()| state.check_switch(&here)).map_err(refused)?;
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
        let [drain_max, others_max] = [wish.timeout_ms, wish.others_ms].map(Duration::from_millis);
        state.begin_switch(drain_max, others_max, &mut here);
        self.switch_asked.notify_one();
        Ok(Begun { connections })
    }

    /// The progress of the switch. A failure is told once.
    pub(super) fn switched(&self, group: &HostGroup) -> Result<SwitchState, ControlError> {
        group.state().switch_state(clock::mono_now()).map_err(refused)
    }

    /// Carries out the switches that are asked for. Runs as long as the daemon does.
    pub(super) async fn follow_switches(&self) {
        loop {
            self.switch_asked.notified().await;
            while self.groups.iter().any(|group| group.state().is_switching()) {
                for group in &self.groups {
                    group.state().look_at_switch(&mut Here { host: self, group });
                }
                tokio::time::sleep(LOOK_AT_SWITCH_EVERY).await;
            }
        }
    }
}

fn refused(text: impl Into<String>) -> ControlError {
    ControlError::new(ControlErrorKind::Refused, text)
}

/// Connections of guests to the group's disks.
fn connections(group: &HostGroup) -> u64 {
    let writers = group.members.iter().filter_map(|member| member.writer.as_ref());
    writers.map(|writer| writer.owner_stats.connections.load(Ordering::Relaxed)).sum()
}
