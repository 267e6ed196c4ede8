//! The link's loop of a host: production's members on a simulated connection. What production's
//! `connection.rs` and `connector.rs` do with sockets and timers is done here with pipes and the
//! schedule, in the same order.

use crate::failure::{Checked, Checker, fail};
use crate::net::{ConnId, Way};
use crate::scenario::Scenario;
use crate::schedule::{MS, S, US};
use crate::world::{Event, Run, World, note};
use bytes::BytesMut;
use std::collections::VecDeque;
use std::sync::Arc;
use tidelock_daemon::link::GateControl;
use tidelock_daemon::link::member::{Member, MemberParts};
use tidelock_daemon::link::port::{EpochKeeper, OwnerPort, ToLink};
use tidelock_daemon::link::queue::{OnDisk, Spilled};
use tidelock_daemon::link::turns::Turns;
use tidelock_daemon::owner::ToOwner;
use tidelock_daemon::stats::LinkStats;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::{Channel, DiskId, Epoch, GroupId};
use tidelock_protocol::message::{
    Attach, Attached, CopyState, DiskSpec, LogAge, Message, PROTOCOL, Policy, Role, Tagging,
};

/// The least that is put on a narrow link while there is more.
const PIECE_MIN_BYTES: usize = 1 << 10;
const PAUSE_FIRST_NS: u64 = 100 * MS;
const PAUSE_MAX_NS: u64 = 5 * S;
const STEADY_NS: u64 = 10 * S;
const CONNECT_TIMEOUT_NS: u64 = 10 * S;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Down,
    Greeting,
    Serving,
}

/// The link of one daemon.
pub struct LinkLoop {
    vms: Vec<usize>,
    members: Vec<Member<ToOwner>>,
    stats: Vec<Arc<LinkStats>>,
    /// From the owner loops.
    pub inbox: VecDeque<(Channel, ToLink)>,
    conn: Option<ConnId>,
    state: State,
    input: BytesMut,
    out: BytesMut,
    turns: Turns,
    began_ns: u64,
    last_heard_ns: u64,
    pause_ns: u64,
    lease_ms: u64,
}

/// A VM's disks, as its host gives them.
#[must_use]
pub fn disks_of(plan: &Scenario, vm: usize) -> Vec<DiskSpec> {
    let disk = |(nth, disk): (usize, &crate::scenario::DiskPlan)| DiskSpec {
        id: DiskId(nth as u16),
        name: format!("d{nth}"),
        size_bytes: disk.content.len() as u64,
    };
    plan.vms[vm].disks.iter().enumerate().map(disk).collect()
}

/// A VM's attachment.
#[must_use]
pub fn attach_of(
    plan: &Scenario,
    vm: usize,
    group_id: Option<GroupId>,
    epoch: Epoch,
    role: Role,
) -> Attach {
    let of = &plan.vms[vm];
    let group = &plan.groups[of.group];
    let peers = || group.members().map(|vm| format!("{}=10.0.0.{vm}", plan.vms[vm].name)).collect();
    Attach {
        group: group.name.clone(),
        group_id,
        member: of.name.clone(),
        writers: group.vms.iter().map(|vm| plan.vms[*vm].name.clone()).collect(),
        epoch,
        lease_ms: group.lease_ms,
        grace_ms: group.grace_ms,
        machine: None,
        tagging: group.has_several().then(|| Tagging { form: group.form, peers: peers() }),
        role,
    }
}

impl LinkLoop {
    /// A link for these VMs, which are added in this order.
    #[must_use]
    pub fn new(vms: Vec<usize>) -> Self {
        Self {
            vms,
            members: Vec::new(),
            stats: Vec::new(),
            inbox: VecDeque::new(),
            conn: None,
            state: State::Down,
            input: BytesMut::new(),
            out: BytesMut::new(),
            turns: Turns::default(),
            began_ns: 0,
            last_heard_ns: 0,
            pause_ns: PAUSE_FIRST_NS,
            lease_ms: 10_000,
        }
    }

    /// Adds a member.
    #[allow(clippy::too_many_arguments)] // The parts of the one thing that it makes.
    pub fn add_member(
        &mut self,
        attach: Attach,
        log: LogAge,
        policy: Policy,
        says_unreached: Option<bool>,
        channel: Channel,
        port: Arc<OwnerPort<ToOwner>>,
        gate: Arc<dyn GateControl>,
        gives_up: bool,
        fenced: Option<String>,
        keeper: Box<dyn EpochKeeper>,
        on_disk: Option<OnDisk>,
        left: Option<Spilled>,
    ) {
        let least = if self.members.is_empty() { u64::MAX } else { self.lease_ms };
        self.lease_ms = least.min(attach.lease_ms);
        let stats = Arc::<LinkStats>::default();
        self.stats.push(stats.clone());
        self.members.push(Member::new(MemberParts {
            says_unreached,
            attach,
            log,
            policy,
            channel,
            port,
            to_owner: ToOwner::Link,
            gate,
            gives_up,
            fenced,
            keeper,
            stats,
            on_disk,
            left,
        }));
    }

    /// The connection, if there is one.
    #[must_use]
    pub fn conn(&self) -> Option<ConnId> {
        self.conn
    }

    /// What it says of a member.
    #[must_use]
    pub fn stats_of(&self, vm: usize) -> Option<&LinkStats> {
        let nth = self.vms.iter().position(|other| *other == vm)?;
        self.stats.get(nth).map(|stats| &**stats)
    }

    /// Whether the first message waits: the loop must look.
    #[must_use]
    pub fn wants_turn(&self) -> bool {
        self.inbox.len() == 1
    }

    /// What is encoded and not sent, for the bound.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.out.len()
    }
}

impl World {
    fn link(&mut self, host: usize, run: Run) -> Option<&mut LinkLoop> {
        let daemon = self.hosts[host].daemon.as_mut()?;
        (daemon.run == run).then_some(&mut daemon.link)
    }

    /// The gates of a host learn its time: what is told next happens now.
    fn set_gate_clocks(&mut self, host: usize) {
        let clocks = self.clocks(host);
        for vm in self.vms_of(host) {
            if let Some(run) = &self.vms[vm].run {
                run.gate.set_clocks(clocks);
            }
        }
    }

    /// The link's loop was woken.
    pub fn link_event(&mut self, host: usize, run: Run) -> Checked {
        if self.link(host, run).is_none() {
            return Ok(());
        }
        self.link_turn(host)
    }

    /// One turn: take what the owner loops say, send what there is room for.
    pub fn link_turn(&mut self, host: usize) -> Checked {
        let Some(daemon) = &mut self.hosts[host].daemon else { return Ok(()) };
        let link = &mut daemon.link;
        // Without a connection nothing can be said.
        let mut nowhere = BytesMut::new();
        let serving = link.state == State::Serving;
        while let Some((channel, message)) = link.inbox.pop_front() {
            let member = &mut link.members[usize::from(channel.0) - 1];
            member.hear_owner(message, if serving { &mut link.out } else { &mut nowhere });
        }
        let Some(conn_id) = link.conn else { return Ok(()) };
        loop {
            let Some(daemon) = &mut self.hosts[host].daemon else { return Ok(()) };
            let link = &mut daemon.link;
            if link.out.is_empty() && link.state == State::Serving {
                let filled = link.turns.fill(&mut link.members, &mut link.out);
                if let Err(error) = filled {
                    return fail(Checker::Stream, error.to_string());
                }
            }
            if link.out.is_empty() {
                return Ok(());
            }
            let conn = self.net.conns.get(&conn_id).expect("open at this end");
            let room = self.plan.window_bytes.saturating_sub(conn.up.held_bytes());
            let count = room.min(link.out.len());
            // A link that is full for long is not filled byte by byte (RFC 9293, 3.8.6.2.1).
            let is_narrow = self.net.paths[host].bytes_per_ms.is_some();
            let least = if is_narrow { PIECE_MIN_BYTES } else { 1 };
            if count < least.min(link.out.len()) {
                return Ok(());
            }
            let data = link.out.split_to(count);
            self.send(conn_id, Way::Up, &data);
        }
    }

    /// Bytes go out on a connection.
    pub fn send(&mut self, id: ConnId, way: Way, data: &[u8]) {
        let Some(conn) = self.net.conns.get_mut(&id) else { return };
        let path = self.net.paths[conn.host];
        let delay = self.plan.delay_ns + self.rng.below(self.plan.jitter_ns + 1);
        let slow = path.slow_factor.max(1);
        let narrow = path.bytes_per_ms.filter(|_| way == Way::Up);
        let rate = (narrow.unwrap_or(self.plan.bytes_per_ms) / slow).max(16);
        let now_ns = self.schedule.now_ns();
        let times = conn.pipe(way).send(&mut self.rng, now_ns, delay * slow, rate, data);
        if conn.mangled && way == Way::Up && self.rng.chance(1, 4) {
            conn.up.damage(&mut self.rng);
        }
        for at in times {
            self.schedule.after(at - now_ns, Event::Deliver { conn: id, way });
        }
    }

    /// The link's loop connects, or tries to.
    pub fn connect(&mut self, host: usize, run: Run) -> Checked {
        let now_ns = self.schedule.now_ns();
        let path = self.net.paths[host];
        let backup_up = self.backup.is_up();
        let Some(link) = self.link(host, run) else { return Ok(()) };
        if link.conn.is_some() {
            return Ok(());
        }
        link.began_ns = now_ns;
        if path.up_stopped || path.down_stopped {
            self.retry_connect(host, CONNECT_TIMEOUT_NS);
            return Ok(());
        }
        if !backup_up {
            let refused_after = self.plan.delay_ns * 2;
            self.retry_connect(host, refused_after);
            return Ok(());
        }
        let conn = self.net.connect(host);
        note!(self, "host {host} connects: {conn}");
        self.backup.accept(conn);
        let mut out = BytesMut::new();
        let (oldest, newest) = PROTOCOL;
        let hello =
            Message::Hello { oldest, newest, host: format!("h{host}"), software: "sim".into() };
        frame::encode_control(Channel(0), &hello, &mut out);
        let link = self.link(host, run).expect("just looked at");
        link.conn = Some(conn);
        link.state = State::Greeting;
        link.input.clear();
        link.out = out;
        link.last_heard_ns = now_ns;
        let lease_ms = link.lease_ms;
        self.schedule.after(lease_ms * MS / 4, Event::Beacon { host, run, conn });
        if self.plan.late_ends && self.faulty && self.rng.chance(1, 3) {
            // While what it asks first is under way.
            let delay_ns = self.plan.delay_ns;
            let after = 2 * delay_ns + self.rng.below(2 * delay_ns + self.plan.jitter_ns);
            self.schedule.after(after, Event::HostHangup { conn });
        }
        self.link_turn(host)
    }

    fn retry_connect(&mut self, host: usize, after_ns: u64) {
        let now_ns = self.schedule.now_ns();
        let jitter = self.rng.below(1000);
        let Some(daemon) = &mut self.hosts[host].daemon else { return };
        let link = &mut daemon.link;
        let steady = now_ns - link.began_ns > STEADY_NS;
        link.pause_ns = if steady { PAUSE_FIRST_NS } else { (link.pause_ns * 2).min(PAUSE_MAX_NS) };
        let pause = link.pause_ns / 2 + link.pause_ns / 2 * jitter / 1000;
        let run = daemon.run;
        self.schedule.after(after_ns + pause, Event::Connect { host, run });
    }

    /// Beacons are due.
    pub fn beacon(&mut self, host: usize, run: Run, conn: ConnId) -> Checked {
        let (now_ns, now) = (self.schedule.now_ns(), self.host_now(host));
        let Some(link) = self.link(host, run) else { return Ok(()) };
        if link.conn != Some(conn) {
            return Ok(());
        }
        if now_ns - link.last_heard_ns > link.lease_ms * MS {
            note!(self, "host {host} hears nothing on {conn}");
            return self.host_hangup(conn);
        }
        if link.state == State::Serving {
            for member in &mut link.members {
                member.beacon(now, &mut link.out);
            }
        }
        let lease_ms = link.lease_ms;
        self.schedule.after(lease_ms * MS / 4, Event::Beacon { host, run, conn });
        self.link_turn(host)
    }

    /// Bytes may have arrived.
    pub fn deliver(&mut self, id: ConnId, way: Way) -> Checked {
        let now_ns = self.schedule.now_ns();
        let Some(conn) = self.net.conns.get_mut(&id) else { return Ok(()) };
        let host = conn.host;
        if self.net.paths[host].is_stopped(way) {
            // Sent again once the network goes on: see `network_goes_on`.
            return Ok(());
        }
        if !conn.pipe(way).deliver(now_ns) {
            return Ok(());
        }
        match way {
            Way::Up => {
                self.backup_reads(id)?;
                // What was read makes room.
                if self.host_conn(host) == Some(id) {
                    self.link_turn(host)?;
                }
                Ok(())
            }
            Way::Down if conn.host_open => self.host_reads(host, id),
            Way::Down => Ok(()),
        }
    }

    /// A stopped direction goes on.
    pub fn network_goes_on(&mut self, host: usize) {
        let now_ns = self.schedule.now_ns();
        let mut due = Vec::new();
        for (id, conn) in &mut self.net.conns {
            for way in [Way::Up, Way::Down] {
                if conn.host == host
                    && let Some(at) = conn.pipe(way).next_at_ns()
                {
                    due.push((at.saturating_sub(now_ns), *id, way));
                }
            }
        }
        for (after, conn, way) in due {
            let retransmission = self.rng.range(1..200 * MS);
            self.schedule.after(after + retransmission, Event::Deliver { conn, way });
        }
        // What a host sends again is answered with a reset where the other end was closed meanwhile.
        let conns = self.net.conns.iter();
        let closed = conns.filter(|(_, of)| of.host == host && of.host_open && !of.backup_open);
        for conn in closed.map(|(id, _)| *id).collect::<Vec<_>>() {
            let retransmission = self.rng.range(1..200 * MS);
            self.schedule.after(retransmission, Event::HostHangup { conn });
        }
    }

    fn host_conn(&self, host: usize) -> Option<ConnId> {
        self.hosts[host].daemon.as_ref().and_then(|d| d.link.conn)
    }

    fn host_reads(&mut self, host: usize, id: ConnId) -> Checked {
        self.set_gate_clocks(host);
        let (now_ns, now) = (self.schedule.now_ns(), self.host_now(host));
        if self.host_conn(host) != Some(id) {
            return Ok(());
        }
        let conn = self.net.conns.get_mut(&id).expect("looked up by the caller");
        let arrived = std::mem::take(&mut conn.down.arrived);
        let link = &mut self.hosts[host].daemon.as_mut().expect("has a connection").link;
        link.last_heard_ns = now_ns;
        link.input.extend_from_slice(&arrived);
        loop {
            let link = &mut self.hosts[host].daemon.as_mut().expect("has a connection").link;
            let frame = match frame::decode(&mut link.input) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(error) => {
                    return fail(Checker::Stream, format!("the backup sends garbage: {error}"));
                }
            };
            match (link.state, frame) {
                (State::Greeting, Frame::Control(Channel(0), Message::Welcome { .. })) => {
                    link.state = State::Serving;
                    for member in &mut link.members {
                        member.connected(&mut link.out);
                    }
                }
                (State::Serving, Frame::Control(Channel(0), Message::Refused { kind, reason })) => {
                    note!(self, "host {host} is refused: {kind:?} {reason}");
                    return self.host_hangup(id);
                }
                (State::Serving, Frame::Control(channel, message)) => {
                    let nth = usize::from(channel.0).wrapping_sub(1);
                    let (Some(member), Some(vm)) = (link.members.get_mut(nth), link.vms.get(nth))
                    else {
                        return fail(Checker::Stream, format!("unknown channel {channel}"));
                    };
                    let vm = *vm;
                    let told = format!("{message:?}");
                    let is_whole = match &message {
                        Message::Attached(Attached { stream: Some(stream), .. }) => {
                            stream.copy == CopyState::Whole
                        }
                        _ => false,
                    };
                    let result = member.receive(message, now);
                    if member.wants_lease() {
                        member.beacon(now, &mut link.out);
                    }
                    if let Err(error) = result {
                        return fail(Checker::Stream, format!("vm {vm}: {error} ({told})"));
                    }
                    if member.must_connect_anew() {
                        return self.host_hangup(id);
                    }
                    if is_whole {
                        self.goes_on_whole(vm)?;
                    }
                }
                (state, frame) => {
                    let what = format!("{frame:?} while {state:?}");
                    return fail(Checker::Stream, what);
                }
            }
        }
        self.link_turn(host)
    }

    /// The backup has everything up to where this run began. The member's loop may hang, and hear of it later.
    fn goes_on_whole(&mut self, vm: usize) -> Checked {
        let state = &mut self.vms[vm];
        let has_begun = {
            let owner = state.run.as_ref().and_then(|run| run.owner.as_ref());
            owner.is_some_and(|owner| owner.sequencer().is_started())
        };
        if has_begun && state.oracle.continues_whole()? {
            self.counts.clean_starts += 1;
        }
        Ok(())
    }

    /// A host's end of a connection is gone: by its own decision, or the other end's.
    pub fn host_hangup(&mut self, id: ConnId) -> Checked {
        let Some(conn) = self.net.conns.get(&id) else { return Ok(()) };
        let host = conn.host;
        if self.host_conn(host) != Some(id) {
            return Ok(());
        }
        note!(self, "host {host} loses {id}");
        self.host_closes(id);
        let link = &mut self.hosts[host].daemon.as_mut().expect("has a connection").link;
        link.conn = None;
        link.state = State::Down;
        link.input.clear();
        link.out.clear();
        for member in &mut link.members {
            member.disconnected();
        }
        self.retry_connect(host, 0);
        self.link_turn(host)
    }

    /// The host's end is closed. Some of what was under way may still arrive, late.
    pub fn host_closes(&mut self, id: ConnId) {
        let Some(conn) = self.net.conns.get_mut(&id) else { return };
        conn.host_open = false;
        conn.down.clear();
        let is_late = self.plan.late_ends && self.rng.chance(1, 2);
        if is_late {
            // As of a server that was stopped, and reads what both connections have brought.
            let now_ns = self.schedule.now_ns();
            let until_ns = now_ns + self.rng.range(100 * MS..3 * S);
            if let Some(at) = conn.up.delay(until_ns) {
                self.schedule.after(at - now_ns, Event::Deliver { conn: id, way: Way::Up });
            }
        } else {
            conn.up.cut(&mut self.rng);
        }
        if !conn.backup_open {
            self.net.conns.remove(&id);
            return;
        }
        let late = self.rng.range(US..2 * S);
        self.schedule.after(late, Event::BackupHangup { conn: id });
    }

    /// The backup's end is closed.
    pub fn backup_closes(&mut self, id: ConnId) {
        self.backup.forget(id);
        let Some(conn) = self.net.conns.get_mut(&id) else { return };
        conn.backup_open = false;
        conn.up.clear();
        if !conn.host_open {
            self.net.conns.remove(&id);
            return;
        }
        if self.net.paths[conn.host].down_stopped {
            // It finds out when the network goes on, or when its lease has ended.
            return;
        }
        let after = self.plan.delay_ns + self.rng.below(self.plan.jitter_ns + 1);
        self.schedule.after(after, Event::HostHangup { conn: id });
    }

    /// The backup learns that a connection is gone.
    pub fn backup_hangup(&mut self, id: ConnId) {
        let now_ns = self.schedule.now_ns();
        let Some(conn) = self.net.conns.get(&id) else { return };
        if conn.host_open || !conn.backup_open {
            return;
        }
        if self.net.paths[conn.host].up_stopped || conn.up.next_at_ns().is_some() {
            // It hears of the end after everything that came before.
            let next = conn.up.next_at_ns().unwrap_or(0).saturating_sub(now_ns);
            self.schedule.after(next + 50 * MS, Event::BackupHangup { conn: id });
            return;
        }
        note!(self, "the backup loses {id}");
        self.backup_loses(id);
        self.net.conns.remove(&id);
    }
}
