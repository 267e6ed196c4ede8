//! What the daemon says of itself, made from what the loops and the backup say now.
//!
//! A monitor looks twice a second, so that a change of state is logged when it happens and the
//! time since when clients may have seen what a disaster would undo is known without anybody
//! asking.

use super::backlog_files::backlog_limit_bytes;
use super::disk_hangs::{disk_hang, said};
use super::launch::is_one_of_several;
use super::{Host, HostGroup, HostMember, MemberState, SOFTWARE, Writer};
use crate::cli::human;
use crate::clock;
use crate::config::{Roles, Security};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tidelock_daemon_core::copy_job::{self, Purpose};
use tidelock_daemon_core::degrade::Standing;
use tidelock_daemon_core::heartbeat::Missing;
use tidelock_daemon_core::link::LinkState;
use tidelock_daemon_core::owner::Phase;
use tidelock_daemon_core::stats::{LATENCY_BOUNDS_US, LatencySnapshot, LinkStats, OwnerStats};
use tidelock_daemon_core::status::{
    ActivityStatus, BacklogOnDiskStatus, BacklogStatus, CopyKindStatus, CopyStatus, DiskStatus,
    ElsewhereStatus, GateStatus, GroupStatus, GuestIo, HeartbeatStatus, Kind, LagStatus,
    LeaseStatus, LinkState as LinkWord, LinkStatus, MemberStatus, Risk, Role, SCHEMA, Status,
    TaggingStatus, VerifyStatus, WriterStatus,
};
use tidelock_daemon_core::verified::Verified;
use tidelock_netfilter::gate::{
    Gate, GateSnapshot, HOLD_BUCKETS_MS, MemberGate, MemberTagging, TaggingStats,
};
use tidelock_netfilter::release_queue::ShutWhy;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::message::{Form, Mode, RefusalKind};
use tokio::sync::watch;

/// How often the monitor looks.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How the link has been.
#[derive(Debug, Default)]
pub struct LinkHistory(Mutex<History>);

#[derive(Clone, Debug)]
struct History {
    connects: u64,
    /// Since when it has been up, or not.
    since: MonoNanos,
    now: LinkState,
}

impl Default for History {
    fn default() -> Self {
        Self { connects: 0, since: clock::mono_now(), now: LinkState::Connecting { after: None } }
    }
}

impl LinkHistory {
    /// Follows the link.
    pub async fn follow(&self, mut state: watch::Receiver<LinkState>) {
        loop {
            {
                let state = state.borrow_and_update();
                let mut history = self.0.lock().expect("no panic while held");
                let is_up = matches!(*state, LinkState::Up { .. });
                if is_up != matches!(history.now, LinkState::Up { .. }) {
                    history.since = clock::mono_now();
                    history.connects += u64::from(is_up);
                }
                history.now = state.clone();
            }
            if state.changed().await.is_err() {
                return;
            }
        }
    }
}

/// How a group has been.
#[derive(Debug, Default)]
pub struct GroupHistory {
    past: Mutex<GroupPast>,
    /// Packets that left beside the gate, as far as it was seen.
    unheld: Mutex<Unheld>,
}

#[derive(Clone, Debug, Default)]
struct GroupPast {
    kind: Option<Kind>,
    since: MonoNanos,
    told: bool,
}

/// Packets that left beside a gate.
#[derive(Clone, Copy, Debug, Default)]
struct Unheld {
    /// The number of times that packets may have left so.
    may_have_left: u64,
    /// The last answer.
    is_unheld: bool,
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
        let link = self.link_status(now);
        let groups = self.groups.iter().map(|group| self.group_status(group, now)).collect();
        Status {
            schema: SCHEMA,
            host: self.config.host.name.to_string(),
            software: SOFTWARE.to_owned(),
            uptime_ms: ms(now.since_ns(self.started_at)),
            virtual_machine: self.virtual_machine.clone(),
            link,
            groups,
        }
    }

    fn link_status(&self, now: MonoNanos) -> LinkStatus {
        let history = self.link_history.0.lock().expect("no panic while held").clone();
        let (state, problem, retry_at) = match history.now {
            LinkState::Up { .. } => (LinkWord::Connected, None, None),
            LinkState::Connecting { after } => (LinkWord::Connecting, after, None),
            LinkState::Down { reason, retry_at } => {
                (LinkWord::Disconnected, Some(reason), retry_at)
            }
        };
        LinkStatus {
            backup: self.config.backup.address.to_string(),
            state,
            state_age_ms: ms(now.since_ns(history.since)),
            tls: matches!(self.config.backup.security, Security::Tls { .. }),
            certificate_valid_s: match &self.config.backup.security {
                Security::Tls { files, .. } => {
                    let valid = files.load().map(|own| own.valid_for(SystemTime::now()));
                    Some(valid.map_or(0, |valid| valid.as_secs()))
                }
                Security::Plaintext => None,
            },
            connects: history.connects,
            problem,
            retry_in_ms: retry_at.map(|at| ms(at.since_ns(now))),
        }
    }

    fn group_status(&self, group: &HostGroup, now: MonoNanos) -> GroupStatus {
        let view = group.view();
        let gates = self.gates_of(group, now);
        let risk = self.risk(group);
        let since = note(group, &risk, now);
        let period_ms = group.config.lease.as_millis() as u64;
        let until = match &group.gate {
            Some(gate) => gate.lease_until(),
            None => group
                .members
                .iter()
                .filter_map(|m| m.link_stats()?.lease_sent_at())
                .max()
                .map(|sent_at| sent_at.plus_ms(period_ms)),
        };
        let left_ms = until.map_or(0, |until| ms(until.since_ns(now)));
        let epoch = group.members.iter().filter_map(|m| Some(m.state()?.epoch()));
        let is_alone = group.config.roster.len() < 2;
        let told = group.members.iter().filter_map(|m| Some(m.link_stats()?.watermark()));
        let (watermark, frontier) = told.max().unwrap_or_default();
        let is_shut_for_good = risk.why.kind == Kind::Fenced;
        GroupStatus {
            name: group.config.name.to_string(),
            protected: risk.is_protected(),
            risk,
            why_age_ms: ms(now.since_ns(since)),
            detail: self.detail(group, &gates, now),
            mode: view.mode,
            wanted_mode: view.wanted,
            configured_mode: group.config.mode,
            when_unreachable: group.config.when_unreachable.to_string(),
            switched_over_unix_ms: view.switched_at_unix_ms,
            awaits_adoption: group.adopting.waits(),
            epoch: epoch.max().unwrap_or_default(),
            lease: LeaseStatus {
                held: left_ms > 0 && !is_shut_for_good,
                left_ms: if is_shut_for_good { 0 } else { left_ms },
                period_ms,
                grace_ms: group.config.grace.as_millis() as u64,
            },
            members: group
                .members
                .iter()
                .zip(gates)
                .map(|(member, gates)| self.member_status(group, member, gates, now))
                .collect(),
            elsewhere: (group.config.roster.iter())
                .filter(|peer| peer.removed || peer.host.is_some())
                .map(|peer| ElsewhereStatus {
                    name: peer.name.to_string(),
                    host: peer.host.as_ref().filter(|_| !peer.removed).map(ToString::to_string),
                    roles: roles(peer.roles),
                })
                .collect(),
            form: (!is_alone).then_some(group.config.form),
            tagged: group.config.is_tagged(),
            watermark_lag_ms: (!is_alone && group.config.form == Form::Hlc)
                .then(|| frontier.physical_ms().saturating_sub(watermark.physical_ms())),
        }
    }

    /// Of each member of a group, its gates.
    fn gates_of(&self, group: &HostGroup, now: MonoNanos) -> Vec<Vec<GateStatus>> {
        let gate = self.gate.lock().expect("no panic while held");
        let all = gate.as_ref().map_or(&[][..], Gate::members);
        let gates = group.members.iter().map(|member| {
            let own = all.iter().filter(|gate| gate.name() == member.config.name.as_str());
            own.map(|gate| gate_status(group, member, gate, now)).collect()
        });
        gates.collect()
    }

    fn member_status(
        &self,
        group: &HostGroup,
        member: &HostMember,
        gates: Vec<GateStatus>,
        now: MonoNanos,
    ) -> MemberStatus {
        let name = member.config.name.as_str();
        let gate = self.gate.lock().expect("no panic while held");
        let all = gate.as_ref().map_or(&[][..], Gate::members);
        let own = all.iter().filter(|gate| gate.name() == name && group.config.is_tagged());
        // Counters that cannot be read are said to be unknown, not 0.
        let tagging = own.filter_map(|gate| Some(tagging_status(&gate.tagging().stats()?.ok()?)));
        MemberStatus {
            name: name.to_owned(),
            writer: member.writer.as_ref().map(|writer| writer_status(group, member, writer, now)),
            gates,
            roles: roles(member.config.roles),
            tagging: tagging.reduce(TaggingStatus::plus),
        }
    }
}

/// Logs what has changed of a group's risk. Returns since when it has this kind.
fn note(group: &HostGroup, risk: &Risk, now: MonoNanos) -> MonoNanos {
    let (name, kind, text) = (group.config.name.as_str(), risk.why.kind, &risk.why.text);
    let mut past = group.history.past.lock().expect("no panic while held");
    if past.kind != Some(kind) {
        (past.since, past.kind) = (now, Some(kind));
        match kind {
            Kind::Following => tracing::info!(group = name, why = %kind, "{text}"),
            _ => tracing::warn!(group = name, why = %kind, "{text}"),
        }
    }
    let told = risk.told.is_some();
    match (std::mem::replace(&mut past.told, told), told) {
        (false, true) => {
            tracing::warn!(group = name, "clients may be told what a disaster would undo");
        }
        (true, false) => {
            tracing::info!(group = name, "the backup has all that clients may have been told");
        }
        _ => {}
    }
    past.since
}

impl Writer {
    /// The number of writes that the backup lacks.
    pub(super) fn lag_writes(&self) -> u64 {
        self.seen().lag_writes(&self.link_stats)
    }
}

impl HostMember {
    pub(super) fn link_stats(&self) -> Option<&LinkStats> {
        self.link().map(|stats| &**stats)
    }

    pub(super) fn link(&self) -> Option<&Arc<LinkStats>> {
        let writer = self.writer.as_ref().map(|w| &w.link_stats);
        writer.or_else(|| Some(&self.follower.as_ref()?.link_stats))
    }

    pub(super) fn state(&self) -> Option<&MemberState> {
        let writer = self.writer.as_ref().map(|w| &w.state);
        writer.or_else(|| Some(&self.follower.as_ref()?.state))
    }
}

/// What the policy does now, or why it cannot.
fn policy_detail(group: &HostGroup) -> Option<String> {
    let policy = group.config.when_unreachable;
    let mut links = group.members.iter().filter_map(HostMember::link_stats);
    if group.adopting.waits() {
        let name = group.config.name.as_str();
        return Some(format!(
            "the guest's disks are elsewhere still: `tidelock adopt {name}` brings them here; until then nothing goes to \
             the backup, and replies leave"
        ));
    }
    if let Some(text) = unreached_detail(group) {
        return Some(text);
    }
    if group.view().awaits_contact {
        let why = "replies are held although the mode is async: the last run may have left with everything at the \
                   backup, which counts on no more from here before it has heard of this one";
        let way_out = match is_one_of_several(&group.config) {
            false => ". `tidelock mode` with async lets them out",
            true => ", and what the other members are covered by goes by that",
        };
        return Some(format!("{why}{way_out}"));
    }
    match group.view().standing {
        Standing::Degraded { .. } => Some(format!(
            "nothing is held ({policy}): replies had waited for the backup for too long"
        )),
        Standing::Returning { .. } => {
            Some("replies are held again; not all that has left before is at the backup".to_owned())
        }
        Standing::Holding if policy.after_ms().is_none() => None,
        Standing::Holding => {
            let is_told = links.all(|link| !link.is_attached() || link.is_policy_kept());
            (!is_told)
                .then(|| format!("\"{policy}\" is not in force: the backup has no room to keep it"))
        }
    }
}

/// What becomes of replies while, and after, guests are served without the backup.
fn unreached_detail(group: &HostGroup) -> Option<String> {
    let is_unrecorded = |member: &HostMember| {
        member.writer.as_ref().is_some_and(|writer| writer.view.phase() == Phase::Unrecorded)
    };
    let is_unrecorded = group.members.iter().any(is_unrecorded);
    let is_returning = matches!(group.view().standing, Standing::Returning { .. });
    let text = match (is_unrecorded, group.view().is_unreached) {
        (true, true) => "guests are served and replies leave, the backup has nothing of it yet",
        (true, false) if group.view().mode == Mode::Async => {
            "guests are served and replies leave (async), the backup has nothing of it yet"
        }
        (true, false) => {
            "guests are served, replies are held: the backup has not confirmed that it knows that this host serves \
             without it, and somebody may have recovered the group there. `tidelock mode` with async lets them out"
        }
        (false, true) if is_returning => return None,
        (false, true) => "nothing is held until the backup has all of the disks",
        (false, false) => return None,
    };
    Some(text.to_owned())
}

impl Host {
    /// More about the state, for people.
    fn detail(
        &self,
        group: &HostGroup,
        gates: &[Vec<GateStatus>],
        now: MonoNanos,
    ) -> Option<String> {
        let mut parts: Vec<String> = policy_detail(group).into_iter().collect();
        if self.stopping.load(Ordering::SeqCst) {
            parts.push("the daemon is ending".to_owned());
        }
        for (member, gates) in group.members.iter().zip(gates) {
            let why = gates.iter().filter_map(|gate| gate.unheld_because.as_ref());
            parts.extend(why.map(|why| format!("{}: {why}", member.config.name.as_str())));
        }
        if let Some(at) = group.view().switched_at_unix_ms {
            parts.push(format!(
                "switched over to the backup site at {}: this host has given up its lease",
                human::utc(at)
            ));
        }
        for member in &group.members {
            if let Some(follower) = &member.follower {
                let said = follower.link_stats.stalled().or_else(|| follower.link_stats.refusal());
                parts.extend(said.map(|text| format!("{}: {text}", member.config.name.as_str())));
            }
            let Some(writer) = &member.writer else { continue };
            let trouble = writer.view.trouble();
            let mut say =
                |text: String| parts.push(format!("{}: {text}", member.config.name.as_str()));
            writer.link_stats.stalled().into_iter().for_each(&mut say);
            writer.link_stats.refusal().into_iter().for_each(&mut say);
            writer.pulse.lost().map(missing).into_iter().for_each(&mut say);
            disk_hang(group, member, now).iter().map(said).for_each(&mut say);
            trouble.refusal.into_iter().for_each(|refusal| say(refusal.reason));
            if writer.owner_stats.backlog_full.load(Ordering::Relaxed) {
                say("the backlog is full, guests' writes wait".to_owned());
            }
            if writer.owner_stats.backlog_disk_failed.load(Ordering::Relaxed) {
                say("the backlog on disk has failed: it is in memory only, and full sooner"
                    .to_owned());
            }
            if writer.owner_stats.waits_for_ceiling.load(Ordering::Relaxed) {
                say("guests' writes wait until the state file has a greater time".to_owned());
            }
            let refused_ms = writer.owner_stats.clock_refused_ms.load(Ordering::Relaxed);
            if refused_ms != 0 {
                say(format!(
                    "the wall clock has jumped by {refused_ms} ms and is not believed: set it right, or, after a correction that \
                 is meant, start the daemon again"
                ));
            }
            let lead_ms = writer.owner_stats.clock_lead_ms.load(Ordering::Relaxed);
            if u128::from(lead_ms) > group.config.max_clock_lead.as_millis() {
                say(format!(
                    "another member's clock is {lead_ms} ms ahead of this host's, more than `max_clock_lead`: set the clocks of \
                 the hosts"
                ));
            }
            if let Some(verified) = writer.state.verified().filter(Verified::differs) {
                let name = group.config.name.as_str();
                say(format!(
                    "the sites differed in {} bytes when they were compared last, first at {}; `tidelock verify {name} \
                 --repair` copies what differs from here to the backup",
                    verified.differing_bytes - verified.repaired_bytes,
                    verified.first()
                ));
            }
            let unreadable_bytes = writer.view.copy().map_or(0, |copy| copy.unreadable_bytes);
            if unreadable_bytes > 0 {
                say(format!(
                    "the local disk does not let {unreadable_bytes} bytes be read: the copy cannot end before it does, and is \
                 not protected until then; replace the disk, or restore what cannot be read"
                ));
            }
            let suspect_bytes = writer.view.suspect_bytes();
            if suspect_bytes > 0 {
                say(format!(
                    "the local disk failed; the sites may differ in {suspect_bytes} bytes"
                ));
            }
            for (disk, why) in trouble.failed_disks {
                say(format!("disk {disk} failed a flush, so flushes fail: {why}"));
            }
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// Where a heartbeat is missing, for people.
fn missing(missing: Missing) -> String {
    match missing {
        Missing::Owner => "a heartbeat is missing: this daemon's loop admits nothing",
        Missing::Backup => {
            "a heartbeat is missing: the backup acknowledges nothing and does not say why"
        }
    }
    .to_owned()
}

fn writer_status(
    group: &HostGroup,
    member: &HostMember,
    writer: &Writer,
    now: MonoNanos,
) -> WriterStatus {
    let stats = &writer.owner_stats;
    let get = |value: &std::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
    let lag_writes = writer.lag_writes();
    let (_, committed) = writer.port.acked();
    WriterStatus {
        disks: member
            .config
            .disks
            .iter()
            .zip(&writer.disk_sizes_bytes)
            .map(|(disk, size_bytes)| DiskStatus {
                name: disk.name.to_string(),
                path: disk.path.value.clone(),
                size_bytes: *size_bytes,
                socket: disk.socket.value.clone(),
            })
            .collect(),
        pending: writer.view.published(),
        committed,
        backup_has_all: writer.seen().has_all(&writer.link_stats),
        lag: LagStatus {
            writes: lag_writes,
            bytes: writer.link_stats.lag_bytes(),
            ms: ms(writer.link_stats.lag_ns(now)),
        },
        backlog: BacklogStatus {
            // An idle loop has not looked at the last acknowledgements.
            used_bytes: match lag_writes {
                0 => 0,
                _ => get(&stats.backlog_bytes),
            },
            limit_bytes: stats_limit_bytes(group, stats),
            writes_wait: stats.backlog_full.load(Ordering::Relaxed),
            waiting_requests: get(&stats.waiting),
            full_count: get(&stats.backlog_full_count),
            on_disk: backlog_on_disk(group, writer),
        },
        copy: writer.view.copy().map(|copy| copy_status(&copy, writer.view.compares_all_because())),
        commit_latency: writer.link_stats.commit_latencies(),
        guest_io: GuestIo {
            reads: get(&stats.reads),
            read_bytes: get(&stats.read_bytes),
            writes: get(&stats.writes),
            written_bytes: get(&stats.written_bytes),
            flushes: get(&stats.flushes),
            disk_errors: get(&stats.disk_errors),
            connections: get(&stats.connections),
        },
        clock_refused_ms: Some(stats.clock_refused_ms.load(Ordering::Relaxed))
            .filter(|off| *off != 0),
        clock_lead_ms: get(&stats.clock_lead_ms),
        activity: ActivityStatus::of(&stats.activity, writer.disk_sizes_bytes.iter().sum()),
        verify: VerifyStatus {
            running: writer.view.verify().map(|progress| copy_status(&progress, None)),
            every_ms: group.config.verify.every.map(|every| every.as_millis() as u64),
            ..writer.verify_status()
        },
        heartbeat: HeartbeatStatus::of(&writer.pulse, group.config.heartbeat, now),
        disk_hang: disk_hang(group, member, now),
    }
}

fn stats_limit_bytes(group: &HostGroup, stats: &OwnerStats) -> u64 {
    match stats.backlog_limit_bytes.load(Ordering::Relaxed) {
        0 => backlog_limit_bytes(&group.config),
        limit_bytes => limit_bytes,
    }
}

fn backlog_on_disk(group: &HostGroup, writer: &Writer) -> Option<BacklogOnDiskStatus> {
    group.config.backlog_on_disk.as_ref()?;
    let stats = &writer.owner_stats;
    Some(BacklogOnDiskStatus {
        file_bytes: stats.backlog_disk_bytes.load(Ordering::Relaxed),
        records: stats.backlog_spilled.load(Ordering::Relaxed),
        memory_bytes: stats.backlog_memory_bytes.load(Ordering::Relaxed),
        memory_limit_bytes: group.config.backlog.bytes,
        failed: stats.backlog_disk_failed.load(Ordering::Relaxed),
        overflowed: writer.view.phase() == Phase::Overflowed,
        overflows: stats.overflows.load(Ordering::Relaxed),
    })
}

fn copy_status(copy: &copy_job::Progress, because: Option<String>) -> CopyStatus {
    CopyStatus {
        kind: match copy.purpose {
            Purpose::Initial => CopyKindStatus::Initial,
            Purpose::Compare => CopyKindStatus::Resync,
            Purpose::Verify { .. } => CopyKindStatus::Verify,
        },
        done_bytes: copy.done_bytes,
        total_bytes: copy.total_bytes,
        rate_bytes_per_s: copy.rate_bytes_per_s,
        left_ms: copy.seconds_left().map(|s| s * 1000),
        because,
    }
}

pub(super) fn writers_of(group: &HostGroup) -> impl Iterator<Item = &Writer> {
    group.members.iter().filter_map(|member| member.writer.as_ref())
}

/// A newer run of this host's daemon has the member.
pub(super) fn is_superseded(writer: &Writer) -> bool {
    writer.view.trouble().refusal.is_some_and(|of| of.kind == RefusalKind::Superseded)
}

fn gate_status(
    group: &HostGroup,
    member: &HostMember,
    gate: &MemberGate,
    now: MonoNanos,
) -> GateStatus {
    let GateSnapshot {
        held_packets,
        held_bytes,
        oldest_arrival,
        released_packets,
        passed_covered,
        passed_pure_acks,
        passed_never_held,
        passed_async,
        refused,
        shut,
        rules_restored,
        may_have_left,
        ..
    } = gate.stats().snapshot();
    let kernel = gate.kernel_counters().unwrap_or_default();
    // What the kernel programs let out, or drop, never comes to the queue.
    let programs = gate.tagging().stats().and_then(Result::ok).unwrap_or_default();
    let covered = programs.covered;
    GateStatus {
        interface: gate.interface().to_owned(),
        open: shut.is_none(),
        shut_because: shut.map(|(why, _)| {
            match why {
                ShutWhy::NoLease => "the host holds no lease from the backup",
                ShutWhy::Held(HoldReason::Gap) => "the sites have not been compared",
                ShutWhy::Held(HoldReason::LeftBacklog) => {
                    "the backup does not have what a daemon that was killed had left in its backlog on disk"
                }
                ShutWhy::FloorUnknown => {
                    "what the guest may have heard of other members is not known until every writer has said \
                     how far it is"
                }
                ShutWhy::Fenced if group.view().switched_at_unix_ms.is_some() => {
                    "the group was switched over to the backup site"
                }
                ShutWhy::Fenced if writers_of(group).any(is_superseded) => {
                    "another run of this host's daemon has taken over"
                }
                ShutWhy::Fenced => "the group was recovered at the backup site",
            }
            .to_owned()
        }),
        held_packets,
        held_bytes,
        oldest_hold_ms: oldest_arrival.map_or(0, |at| ms(now.since_ns(at))),
        released_packets,
        passed_packets: covered
            + passed_covered
            + passed_pure_acks
            + passed_never_held
            + passed_async,
        dropped_packets: refused
            + kernel.dropped_full
            + kernel.dropped_socket
            + programs.dropped_no_rules,
        rules_restored,
        may_have_left,
        unheld_because: unheld_because(member, gate),
        unwatched_because: match gate.tagging() {
            MemberTagging::Unavailable(why) => Some(why.clone()),
            MemberTagging::On(_) | MemberTagging::Off => None,
        },
        hold_time: hold_times(&gate.stats().snapshot()),
    }
}

/// Why packets of the guest may leave unheld now.
fn unheld_because(member: &HostMember, gate: &MemberGate) -> Option<String> {
    let connections = |writer: &Writer| writer.owner_stats.connections.load(Ordering::Relaxed);
    let is_in_use = member.writer.as_ref().is_some_and(|writer| connections(writer) > 0);
    let interface = gate.interface();
    if gate.is_open_to_all() {
        let trouble = gate.trouble().unwrap_or_default();
        return Some(format!(
            "what {interface} sends leaves unheld, because its packet-filter rules are gone and no kernel programs stop it: \
             {trouble}"
        ));
    }
    (is_in_use && !gate.is_interface_there()).then(|| {
        format!(
            "a guest uses its disk, and there is no interface {interface}: whatever the guest sends by another one leaves \
             unheld; set `interface` in [[group.member.network]] to the guest's tap (`ip link` lists them), or give the tap \
             that name"
        )
    })
}

impl HostGroup {
    /// True if packets of a guest may leave beside the gate, or may have since the last time that this was asked.
    pub(super) fn left_unheld(&self, host: &Host) -> bool {
        let mut unheld = self.history.unheld.lock().expect("no panic while held");
        // While its rules are looked at, which runs tools, it is not waited for.
        let Ok(gate) = host.gate.try_lock() else { return unheld.is_unheld };
        let all = gate.as_ref().map_or(&[][..], Gate::members);
        let gates = self.members.iter().flat_map(|member| {
            let own = all.iter().filter(|gate| gate.name() == member.config.name.as_str());
            own.map(move |gate| (member, gate))
        });
        let (mut may_have_left, mut is_unheld) = (0, false);
        for (member, gate) in gates {
            may_have_left += gate.stats().snapshot().may_have_left;
            is_unheld |= unheld_because(member, gate).is_some();
        }
        let has_left = is_unheld || may_have_left != unheld.may_have_left;
        *unheld = Unheld { may_have_left, is_unheld };
        has_left
    }
}

fn tagging_status(stats: &TaggingStats) -> TaggingStatus {
    let mut status = TaggingStatus {
        tagged_packets: stats.tagged,
        here_packets: stats.merged_here,
        covered_packets: stats.untagged_covered,
        merged_packets: stats.merged,
        foreign_packets: stats.stripped_foreign,
        ..TaggingStatus::default()
    };
    for (name, count) in stats.named() {
        if let Some(reason) = name.strip_prefix("gated_") {
            status.gated_packets.insert(reason.to_owned(), count);
        } else if let Some(reason) = name.strip_prefix("dropped_") {
            status.dropped_packets.insert(reason.to_owned(), count);
        }
    }
    status
}

fn roles(roles: Roles) -> Vec<Role> {
    let all = [
        (roles.writer, Role::Writer),
        (roles.intermediate, Role::Intermediate),
        (roles.outbound, Role::Outbound),
    ];
    all.into_iter().filter_map(|(has, role)| has.then_some(role)).collect()
}

/// The gate's histogram in the form that status uses for all latencies.
fn hold_times(gate: &GateSnapshot) -> LatencySnapshot {
    let mut buckets = vec![0; LATENCY_BOUNDS_US.len() + 1];
    for (i, count) in gate.hold_buckets.iter().enumerate() {
        // Each of the gate's bounds falls into one of these buckets; the last has no bound.
        let to = HOLD_BUCKETS_MS.get(i).map_or(LATENCY_BOUNDS_US.len(), |bound_ms| {
            LATENCY_BOUNDS_US.partition_point(|us| *us < bound_ms * 1000)
        });
        buckets[to] += count;
    }
    LatencySnapshot { buckets, sum_ns: gate.hold_ns_sum, max_ns: gate.hold_ns_longest }
}

fn ms(ns: u64) -> u64 {
    ns / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each counter of the programs that a packet's fate depends on is in the status.
    #[test]
    fn counters_come_by_reason() {
        let stats = TaggingStats {
            tagged: 1,
            merged: 2,
            stripped_foreign: 3,
            untagged_covered: 7,
            gated_mtu: 4,
            gated_path: 5,
            dropped_malformed: 6,
            ..TaggingStats::default()
        };
        let status = tagging_status(&stats);
        let few = (status.tagged_packets, status.merged_packets, status.foreign_packets);
        assert_eq!(few, (1, 2, 3));
        assert_eq!(status.covered_packets, 7);
        assert_eq!((status.gated_packets["mtu"], status.gated_packets["path"]), (4, 5));
        assert_eq!(status.gated_packets.values().sum::<u64>(), 9);
        assert_eq!(status.dropped_packets["malformed"], 6);
        assert_eq!(status.dropped_packets.values().sum::<u64>(), 6);
    }
}
