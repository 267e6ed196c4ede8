//! Status of the daemon: the gate, the link and the members of each group as they are now, of which
//! [`tidelock_daemon_core::status`] makes the status.
//!
//! A monitor looks twice a second, so that a change of state is logged when it happens and the
//! time since when clients may have seen what a disaster would undo is known without anybody
//! asking.

use super::backlog_files::backlog_limit_bytes;
use super::{Host, HostGroup, HostMember, MemberState, SOFTWARE, Writer};
use crate::clock;
use crate::config::{Group, Member, Roles, Security};
use crate::gate_seen::{gate_seen, tagging_status};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};
use tidelock_daemon_core::link::LinkState;
use tidelock_daemon_core::stats::LinkStats;
use tidelock_daemon_core::status::{
    self, DiskStatus, ElsewhereStatus, GateSeen, GroupSeen, GroupTerms, LinkTerms, MemberSeen,
    Role, SCHEMA, Status, TaggingStatus, WriterSeen,
};
use tidelock_netfilter::gate::{Gate, MemberGate, MemberTagging, TaggingStats};
use tidelock_netfilter::nfqueue::KernelCounters;
use tokio::sync::watch;

/// How often the monitor looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How the link has been.
#[derive(Debug)]
pub struct LinkHistory(Mutex<status::LinkHistory>);

impl Default for LinkHistory {
    fn default() -> Self {
        Self(Mutex::new(status::LinkHistory::new(clock::mono_now())))
    }
}

impl LinkHistory {
    fn lock(&self) -> MutexGuard<'_, status::LinkHistory> {
        self.0.lock().expect("no panic while held")
    }

    /// Follows the link.
    pub async fn follow(&self, mut state: watch::Receiver<LinkState>) {
        loop {
            self.lock().follow(&state.borrow_and_update(), clock::mono_now());
            if state.changed().await.is_err() {
                return;
            }
        }
    }
}

impl Host {
    /// Looks at everything again and again, and says what changes. Ends with the daemon.
    pub async fn monitor(&self) {
        loop {
            self.status();
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Everything, now.
    pub fn status(&self) -> Status {
        let now = clock::mono_now();
        Status {
            schema: SCHEMA,
            host: self.config.host.name.to_string(),
            software: SOFTWARE.to_owned(),
            uptime_ms: now.since_ns(self.started_at) / 1_000_000,
            virtual_machine: self.virtual_machine.clone(),
            link: self.link_history.lock().status(self.link_terms(), now),
            groups: self.groups.iter().map(|group| self.group_status(group)).collect(),
        }
    }

    fn link_terms(&self) -> LinkTerms {
        LinkTerms {
            backup: self.config.backup.address.to_string(),
            tls: matches!(self.config.backup.security, Security::Tls { .. }),
            certificate_valid_s: match &self.config.backup.security {
                Security::Tls { files, .. } => {
                    let valid = files.load().map(|own| own.valid_for(SystemTime::now()));
                    Some(valid.map_or(0, |valid| valid.as_secs()))
                }
                Security::Plaintext => None,
            },
        }
    }

    /// A group beyond what its loop sees.
    pub(super) fn seen(&self, group: &HostGroup) -> GroupSeen {
        let gate = self.gate.lock().expect("no panic while held");
        let member = |member: &HostMember| {
            let of = gates_of(gate.as_ref(), member);
            // Counters that cannot be read are said to be unknown, not 0.
            let tagging = of.iter().filter(|_| group.config.is_tagged());
            let tagging =
                tagging.filter_map(|gate| Some(tagging_status(&gate.tagging().stats()?.ok()?)));
            MemberSeen {
                roles: roles(member.config.roles),
                epoch: member.state().map(MemberState::epoch).unwrap_or_default(),
                tagging: tagging.reduce(TaggingStatus::plus),
                gates: of.into_iter().map(seen_of).collect(),
                writer: member.writer.as_ref().map(|writer| writer.status_seen(&member.config)),
            }
        };
        GroupSeen {
            terms: terms(&group.config),
            awaits_adoption: group.adopting.waits(),
            members: group.members.iter().map(member).collect(),
        }
    }
}

/// The configuration of a group, as far as its loop does not go by it.
fn terms(group: &Group) -> GroupTerms {
    let elsewhere = group.roster.iter().filter(|peer| peer.removed || peer.host.is_some());
    GroupTerms {
        when_unreachable: group.when_unreachable.to_string(),
        grace_ms: group.grace.as_millis() as u64,
        elsewhere: elsewhere
            .map(|peer| ElsewhereStatus {
                name: peer.name.to_string(),
                host: peer.host.as_ref().filter(|_| !peer.removed).map(ToString::to_string),
                roles: roles(peer.roles),
            })
            .collect(),
        form: group.form,
        is_tagged: group.is_tagged(),
        heartbeat: group.heartbeat,
        verify_every: group.verify.every,
        max_clock_lead_ms: group.max_clock_lead.as_millis() as u64,
        backlog_limit_bytes: backlog_limit_bytes(group),
        backlog_memory_bytes: group.backlog_on_disk.as_ref().map(|_| group.backlog.bytes),
    }
}

impl Writer {
    /// The number of writes that the backup lacks.
    pub(super) fn lag_writes(&self) -> u64 {
        self.seen().lag_writes(&self.link_stats)
    }

    fn status_seen(&self, member: &Member) -> WriterSeen {
        let disk = |(disk, size_bytes): (&crate::config::Disk, &u64)| DiskStatus {
            name: disk.name.to_string(),
            path: disk.path.value.clone(),
            size_bytes: *size_bytes,
            socket: disk.socket.value.clone(),
        };
        WriterSeen {
            disks: member.disks.iter().zip(&self.disk_sizes_bytes).map(disk).collect(),
            stats: self.owner_stats.clone(),
            view: self.view.clone(),
            pulse: self.pulse.clone(),
            committed: self.port.acked().1,
            verified: self.state.verified(),
            verifications: self.verifications().clone(),
        }
    }
}

impl HostMember {
    pub(super) fn link(&self) -> Option<&Arc<LinkStats>> {
        let writer = self.writer.as_ref().map(|w| &w.link_stats);
        writer.or_else(|| Some(&self.follower.as_ref()?.link_stats))
    }

    pub(super) fn state(&self) -> Option<&MemberState> {
        let writer = self.writer.as_ref().map(|w| &w.state);
        writer.or_else(|| Some(&self.follower.as_ref()?.state))
    }

    fn is_in_use(&self) -> bool {
        let writer = self.writer.as_ref();
        writer.is_some_and(|writer| writer.owner_stats.is_in_use())
    }
}

pub(super) fn writers_of(group: &HostGroup) -> impl Iterator<Item = &Writer> {
    group.members.iter().filter_map(|member| member.writer.as_ref())
}

fn gates_of<'a>(gate: Option<&'a Gate>, member: &HostMember) -> Vec<&'a MemberGate> {
    let all = gate.map_or(&[][..], Gate::members).iter();
    all.filter(|gate| gate.name() == member.config.name.as_str()).collect()
}

/// A gate with what its thread counts.
fn counted(gate: &MemberGate, kernel: KernelCounters, programs: &TaggingStats) -> GateSeen {
    let is_open_to_all = gate.is_open_to_all();
    GateSeen {
        open_to_all: is_open_to_all.then(|| gate.trouble().unwrap_or_default()),
        is_interface_there: gate.is_interface_there(),
        unwatched_because: match gate.tagging() {
            MemberTagging::Unavailable(why) => Some(why.clone()),
            MemberTagging::On(_) | MemberTagging::Off => None,
        },
        ..gate_seen(gate.interface(), &gate.stats().snapshot(), kernel, programs)
    }
}

/// The same with what the kernel counts.
fn seen_of(gate: &MemberGate) -> GateSeen {
    let programs = gate.tagging().stats().and_then(Result::ok).unwrap_or_default();
    counted(gate, gate.kernel_counters().unwrap_or_default(), &programs)
}

impl HostGroup {
    /// True if packets of a guest may leave beside the gate, or may have since the last time that this was asked.
    pub(super) fn left_unheld(&self, host: &Host) -> bool {
        let mut unheld = self.unheld.lock().expect("no panic while held");
        // While its rules are looked at, which runs tools, it is not waited for.
        let Ok(gate) = host.gate.try_lock() else { return unheld.is_unheld() };
        let of = |member: &HostMember| {
            let gates = gates_of(gate.as_ref(), member);
            let is_in_use = member.is_in_use();
            let seen = |gate| counted(gate, KernelCounters::default(), &TaggingStats::default());
            gates.into_iter().map(move |gate| (seen(gate), is_in_use)).collect::<Vec<_>>()
        };
        let gates: Vec<_> = self.members.iter().flat_map(of).collect();
        unheld.look(gates.iter().map(|(gate, is_in_use)| (gate, *is_in_use)))
    }
}

fn roles(roles: Roles) -> Vec<Role> {
    let all = [
        (roles.writer, Role::Writer),
        (roles.intermediate, Role::Intermediate),
        (roles.outbound, Role::Outbound),
    ];
    all.into_iter().filter_map(|(has, role)| has.then_some(role)).collect()
}
