//! The driver of a host's link: production's [`HostLink`] on simulated connections, with the schedule for its timer.

use crate::failure::{Checked, Checker, fail};
use crate::net::{ConnId, Way};
use crate::schedule::{MS, S, US};
use crate::world::{Event, Run, World, note};
use bytes::BytesMut;
use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use tidelock_daemon_core::link::connection::{ConnectionError, Hello};
use tidelock_daemon_core::link::host_link::HostLink;
use tidelock_daemon_core::link::member::Member;
use tidelock_daemon_core::link::port::ToLink;
use tidelock_daemon_core::owner::ToOwner;
use tidelock_daemon_core::stats::LinkStats;
use tidelock_daemon_core::status::LinkHistory;
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_protocol::message::{Attached, CopyState, Message};

/// The least that is put on a narrow link while there is more.
const PIECE_MIN_BYTES: usize = 1 << 10;
/// After so long an attempt to connect knocks again where nothing comes through (RFC 6298, 2.1).
const KNOCKS_AGAIN_NS: u64 = S;

/// The link of one daemon.
pub struct LinkDriver {
    vms: Vec<usize>,
    link: HostLink<ToOwner>,
    stats: Vec<Arc<LinkStats>>,
    history: LinkHistory,
    /// From the owner loops.
    pub inbox: VecDeque<(Channel, ToLink)>,
    conn: Option<ConnId>,
    /// The number of the attempt to connect that is under way.
    attempt: Option<u64>,
    attempts: u64,
    input: BytesMut,
    /// The same bytes once more, for the checkers.
    heard: BytesMut,
    /// The deadline for which there is an event.
    timer_at: Option<MonoNanos>,
}

/// The members of a daemon that starts, in the order of their channels.
#[derive(Default)]
pub struct NewMembers {
    members: Vec<Member<ToOwner>>,
    stats: Vec<Arc<LinkStats>>,
}

impl NewMembers {
    /// Adds one. It counts for itself.
    pub fn add(&mut self, member: Member<ToOwner>, stats: Arc<LinkStats>) {
        self.members.push(member);
        self.stats.push(stats);
    }
}

impl LinkDriver {
    /// The link of a host for these VMs.
    #[must_use]
    pub fn new(host: usize, vms: Vec<usize>, new: NewMembers, noise: u64, now: MonoNanos) -> Self {
        let NewMembers { members, stats } = new;
        let hello = Hello { host: format!("h{host}"), software: "sim".into() };
        Self {
            vms,
            link: HostLink::new("the backup".to_owned(), hello, members, noise, now),
            stats,
            history: LinkHistory::new(now),
            inbox: VecDeque::new(),
            conn: None,
            attempt: None,
            attempts: 0,
            input: BytesMut::new(),
            heard: BytesMut::new(),
            timer_at: None,
        }
    }

    /// The connection, if there is one.
    #[must_use]
    pub fn conn(&self) -> Option<ConnId> {
        self.conn
    }

    /// What it says of a member.
    #[must_use]
    pub fn stats_of(&self, vm: usize) -> Option<&Arc<LinkStats>> {
        let nth = self.vms.iter().position(|other| *other == vm)?;
        self.stats.get(nth)
    }

    /// Past of the link, as status tells of it.
    #[must_use]
    pub fn history(&self) -> &LinkHistory {
        &self.history
    }

    /// Whether the first message waits: the loop must look.
    #[must_use]
    pub fn wants_turn(&self) -> bool {
        self.inbox.len() == 1
    }

    /// What is encoded and not sent, for the bound.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.link.out_bytes()
    }
}

impl World {
    fn link(&mut self, host: usize) -> Option<&mut LinkDriver> {
        self.hosts[host].daemon.as_mut().map(|daemon| &mut daemon.link)
    }

    fn link_runs(&self, host: usize, run: Run) -> bool {
        self.hosts[host].daemon.as_ref().is_some_and(|daemon| daemon.run == run)
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
        if !self.link_runs(host, run) {
            return Ok(());
        }
        self.link_turn(host)
    }

    /// The link's timer has run out.
    pub fn link_timer(&mut self, host: usize, run: Run, deadline: MonoNanos) -> Checked {
        if !self.link_runs(host, run) {
            return Ok(());
        }
        self.set_gate_clocks(host);
        let now = self.host_now(host);
        let link = self.link(host).expect("runs");
        if link.timer_at != Some(deadline) {
            return Ok(());
        }
        link.timer_at = None;
        match link.link.tick(now) {
            Ok(()) => self.link_turn(host),
            Err(error) => self.link_lost(host, error),
        }
    }

    /// One turn: take what the owner loops say, send what there is room for.
    pub fn link_turn(&mut self, host: usize) -> Checked {
        let Some(link) = self.link(host) else { return Ok(()) };
        while let Some((channel, message)) = link.inbox.pop_front() {
            if let Err(error) = link.link.owner_says(channel, message) {
                return self.link_lost(host, error);
            }
        }
        if link.link.wants_connection() && link.attempt.is_none() {
            self.begin_attempt(host);
        }
        loop {
            let window_bytes = self.plan.window_bytes;
            let Some(link) = self.link(host) else { return Ok(()) };
            let Some(conn_id) = link.conn else { break };
            let waiting = match link.link.output() {
                Ok(out) => out.len(),
                Err(error) => return self.link_lost(host, error),
            };
            let conn = self.net.conns.get(&conn_id).expect("open at this end");
            let count = window_bytes.saturating_sub(conn.up.held_bytes()).min(waiting);
            // A link that is full for long is not filled byte by byte (RFC 9293, 3.8.6.2.1).
            let is_narrow = self.net.paths[host].bytes_per_ms.is_some();
            let least = if is_narrow { PIECE_MIN_BYTES } else { 1 };
            if waiting == 0 || count < least.min(waiting) {
                break;
            }
            let link = self.link(host).expect("just looked at");
            let data = link.link.output().expect("just asked for").split_to(count);
            self.send(conn_id, Way::Up, &data);
        }
        self.set_link_timer(host);
        Ok(())
    }

    fn set_link_timer(&mut self, host: usize) {
        let now = self.host_now(host);
        let Some(daemon) = &mut self.hosts[host].daemon else { return };
        if let Some(news) = daemon.link.link.news() {
            daemon.link.history.follow(&news, now);
        }
        let (run, deadline) = (daemon.run, daemon.link.link.deadline());
        if daemon.link.timer_at != Some(deadline) {
            daemon.link.timer_at = Some(deadline);
            // The host's clock may run slow: then the event comes early, and again.
            let after = deadline.since_ns(now).max(US);
            self.schedule.after(after, Event::LinkTimer { host, run, deadline });
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

    /// The link knocks at the backup's door.
    fn begin_attempt(&mut self, host: usize) {
        let round_trip = 2 * (self.plan.delay_ns + self.rng.below(self.plan.jitter_ns + 1));
        let daemon = self.hosts[host].daemon.as_mut().expect("it knocks");
        daemon.link.attempts += 1;
        let (run, attempt) = (daemon.run, daemon.link.attempts);
        daemon.link.attempt = Some(attempt);
        self.schedule.after(round_trip, Event::Connect { host, run, attempt });
    }

    /// An answer to an attempt would be there by now.
    pub fn connect(&mut self, host: usize, run: Run, attempt: u64) -> Checked {
        if !self.link_runs(host, run) || self.link(host).expect("runs").attempt != Some(attempt) {
            return Ok(());
        }
        let path = self.net.paths[host];
        if path.up_stopped || path.down_stopped {
            self.schedule.after(KNOCKS_AGAIN_NS, Event::Connect { host, run, attempt });
            return Ok(());
        }
        if !self.backup.is_up() {
            let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
            return self.link_lost(host, refused.into());
        }
        let conn = self.net.connect(host);
        note!(self, "host {host} connects: {conn}");
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, host as u8));
        self.backup_accepts(conn, &format!("h{host}"), address)?;
        let now = self.host_now(host);
        let link = self.link(host).expect("runs");
        link.attempt = None;
        link.conn = Some(conn);
        link.link.connected(now);
        if self.plan.late_ends && self.faulty && self.rng.chance(1, 3) {
            // While what it asks first is under way.
            let delay_ns = self.plan.delay_ns;
            let after = 2 * delay_ns + self.rng.below(2 * delay_ns + self.plan.jitter_ns);
            self.schedule.after(after, Event::HostHangup { conn });
        }
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
            Way::Down if conn.host_open => {
                self.host_reads(host, id)?;
                // Likewise.
                self.backup_writes(id)
            }
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
        if self.host_conn(host) != Some(id) {
            return Ok(());
        }
        self.set_gate_clocks(host);
        let clocks = self.clocks(host);
        let conn = self.net.conns.get_mut(&id).expect("looked up by the caller");
        let arrived = std::mem::take(&mut conn.down.arrived);
        let link = self.link(host).expect("has a connection");
        link.input.extend_from_slice(&arrived);
        link.heard.extend_from_slice(&arrived);
        let LinkDriver { link: host_link, input, .. } = link;
        let received = host_link.received(input, clocks.now, clocks.wall_ms);
        for vm in self.whole_at(host)? {
            self.goes_on_whole(vm)?;
        }
        match received {
            Ok(()) => self.link_turn(host),
            Err(error) => self.link_lost(host, error),
        }
    }

    /// The VMs that the backup has just told that it has their disks whole.
    fn whole_at(&mut self, host: usize) -> Checked<Vec<usize>> {
        let link = self.link(host).expect("has a connection");
        let mut vms = Vec::new();
        loop {
            match frame::decode(&mut link.heard) {
                Ok(None) => return Ok(vms),
                Ok(Some(Frame::Control(channel, Message::Attached(attached)))) => {
                    let Attached { stream, .. } = attached;
                    if stream.is_some_and(|stream| stream.copy == CopyState::Whole) {
                        vms.push(link.vms[usize::from(channel.0) - 1]);
                    }
                }
                Ok(Some(_)) => {}
                Err(error) => {
                    return fail(Checker::Stream, format!("the backup sends garbage: {error}"));
                }
            }
        }
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

    /// A host's end of a connection is gone: by the other end's decision, or by the network's.
    pub fn host_hangup(&mut self, id: ConnId) -> Checked {
        let Some(conn) = self.net.conns.get(&id) else { return Ok(()) };
        let host = conn.host;
        if self.host_conn(host) != Some(id) {
            return Ok(());
        }
        self.link_lost(host, ConnectionError::Closed)
    }

    /// The connection, or the attempt to make one, has ended.
    fn link_lost(&mut self, host: usize, error: ConnectionError) -> Checked {
        note!(self, "host {host} loses the backup: {error}");
        if self.power_has_failed(host) {
            return Ok(());
        }
        // This backup says nothing that it must not say.
        if error.is_of_words() || matches!(error, ConnectionError::Member(_)) {
            return fail(Checker::Stream, format!("host {host}: {error}"));
        }
        self.set_gate_clocks(host);
        let now = self.host_now(host);
        let link = self.link(host).expect("it has a link");
        link.attempt = None;
        link.input.clear();
        link.heard.clear();
        let conn = link.conn.take();
        if let Err(error) = link.link.lost(error, now) {
            return fail(Checker::Stream, format!("host {host}: {error}"));
        }
        if let Some(conn) = conn {
            self.host_closes(conn);
        }
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
    pub fn backup_hangup(&mut self, id: ConnId) -> Checked {
        let now_ns = self.schedule.now_ns();
        let Some(conn) = self.net.conns.get(&id) else { return Ok(()) };
        if conn.host_open || !conn.backup_open {
            return Ok(());
        }
        if self.net.paths[conn.host].up_stopped || conn.up.next_at_ns().is_some() {
            // It hears of the end after everything that came before.
            let next = conn.up.next_at_ns().unwrap_or(0).saturating_sub(now_ns);
            self.schedule.after(next + 50 * MS, Event::BackupHangup { conn: id });
            return Ok(());
        }
        note!(self, "the backup loses {id}");
        self.backup_loses(id)?;
        self.net.conns.remove(&id);
        Ok(())
    }
}
