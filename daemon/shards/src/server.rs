//! The two connections to the shard's primary.
//!
//! ```text
//!  Pausing ─▶ Looking ── it is a primary ─▶ Opening ─▶ Identified ── place known ─▶ Starting ─▶ Streaming
//!     ▲          │                            │            ▲            (backup)       │            │
//!     │          │                            │            └──── the timeline ends ────┴────────────┤
//!     └──────────┴──────────── failure of either connection: the next host ─────────────────────────┘
//! ```

use crate::agent::{Action, Conn, Phase, ShardAgent, index};
use crate::backlog::{Backlog, Piece, Stamp};
use crate::cutter::{Cutter, Ended};
use crate::failure::HostFailure;
use crate::look::{self, Look, NotALook, TooFewStandbys, WalStatus};
use std::time::Duration;
use tidelock_pgstream::{
    Event, Failure, Identity, Position, Receiver, Row, SlotUse, SqlClient, SqlEvent, Start,
};
use tidelock_shard::LogIndex;
use tidelock_shard::link::Origin;
use tidelock_wal::{Lsn, TimelineHistory, TimelineId, WalReader};

/// Queries of the connection that looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Query {
    Look,
    Nop,
    /// Drops a slot that is lost.
    DropSlot,
}

/// Progress of the log at home: what no failover inside the site loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Home {
    /// The server has not been looked at.
    Unknown,
    /// No standby is synchronous: what is durable at the primary.
    All,
    /// End of what enough synchronous standbys have.
    UpTo(Lsn),
}

impl ShardAgent {
    pub(crate) fn connect(&mut self) {
        if matches!(self.phase, Phase::Pausing { until } if until <= self.now.mono) {
            self.phase = Phase::Looking;
            self.actions.push_back(Action::Connect { conn: Conn::Look, host: self.host });
        }
    }

    pub(crate) fn open(&mut self, conn: Conn) {
        let (login, timing) = (self.config.login.clone(), self.config.timing);
        let opened = match conn {
            Conn::Look if self.phase == Phase::Looking && self.sql.is_none() => {
                let (database, settings) = (&self.config.database, look::SETTINGS);
                SqlClient::new(login, database, settings, timing, self.now)
                    .map(|sql| self.sql = Some(sql))
            }
            Conn::Stream if self.phase == Phase::Opening && self.stream.is_none() => {
                let known = self.known_origin.as_ref().map(|origin| origin.system_id);
                let system = self.config.system.or(known);
                Receiver::new(login, system, timing, self.now)
                    .map(|stream| self.stream = Some(stream))
            }
            _ => Ok(()),
        };
        if let Err(error) = opened {
            self.fail(HostFailure::Unreachable(error.to_string()));
        }
    }

    /// Gives the server up, and goes on with the next one.
    pub(crate) fn fail(&mut self, failure: HostFailure) {
        if matches!(failure, HostFailure::Wal(_)) {
            self.cutter = None;
        }
        let is_gap = matches!(
            failure,
            HostFailure::Stream(Failure::WalRemoved { .. } | Failure::SlotLost { .. })
        );
        let is_slot = matches!(failure, HostFailure::Stream(Failure::SlotMissing { .. }));
        self.orders.make_slot |= self.config.mends && (is_gap || is_slot);
        self.orders.may_jump |= self.config.mends && is_gap;
        self.orders.jumps |= is_gap && self.orders.may_jump;
        self.disconnect();
        let advice = failure.advice(&self.config.slot);
        let host = self.host;
        self.actions.push_back(Action::Failed { host, failure: failure.clone(), advice });
        self.failures[host] = Some(failure);
        self.host = (host + 1) % self.config.hosts;
        let passes = self.failures.iter().flatten().all(HostFailure::is_passing);
        let is_long = self.host == 0 && !passes && !self.orders.jumps;
        let pause = if is_long { self.config.retry_long } else { self.config.retry };
        self.phase = Phase::Pausing { until: self.now.mono + pause };
    }

    pub(crate) fn disconnect(&mut self) {
        let (looks, streams) = match self.phase {
            Phase::Pausing { .. } | Phase::Ended => (false, false),
            Phase::Looking => (true, false),
            _ => (true, true),
        };
        for (conn, _) in [(Conn::Look, looks), (Conn::Stream, streams)].iter().filter(|of| of.1) {
            self.actions.push_back(Action::Disconnect(*conn));
        }
        (self.sql, self.stream, self.asked) = (None, None, None);
        (self.identity, self.history, self.look, self.looked) = (None, None, None, None);
        self.home = Home::Unknown;
    }

    /// The backlog does not reach back to where the backup stands: the log is received again from there. The slot has
    /// it.
    pub(crate) fn rewind(&mut self) {
        (self.cutter, self.backlog, self.timeline) = (None, None, None);
        self.disconnect();
        self.phase = Phase::Pausing { until: self.now.mono };
        self.connect();
    }

    pub(crate) fn poll_sql(&mut self) {
        while let Some(event) = self.sql.as_mut().and_then(SqlClient::poll) {
            match event {
                SqlEvent::Ready => {}
                SqlEvent::Rows(rows) => match self.asked.take() {
                    Some((Query::Look, asked)) => self.looked(&rows, asked),
                    Some((Query::DropSlot, _)) => self.looked = None,
                    Some((Query::Nop, _)) | None => {}
                },
                SqlEvent::Refused(error) => self.fail(HostFailure::Refused(error)),
                SqlEvent::Failed(failure) => self.fail(HostFailure::Look(failure)),
            }
        }
    }

    fn looked(&mut self, rows: &[Row], asked: Duration) {
        let look = match Look::of(rows) {
            Ok(look) => look,
            Err(NotALook) => return self.fail(HostFailure::NotALook),
        };
        if look.is_in_recovery {
            return self.fail(HostFailure::InRecovery);
        }
        let slot = self.config.slot.clone();
        if self.phase == Phase::Streaming {
            match look.slot {
                None => return self.fail(HostFailure::Stream(Failure::SlotMissing { slot })),
                Some(standing) if standing.wal_status == WalStatus::Lost => {
                    let error = None;
                    return self.fail(HostFailure::Stream(Failure::SlotLost { slot, error }));
                }
                Some(_) => {}
            }
        }
        let is_lost = look.slot.is_some_and(|slot| slot.wal_status == WalStatus::Lost);
        if self.phase == Phase::Looking && is_lost && self.orders.jumps && self.config.mends {
            // Another look follows.
            self.orders.drops_slot = true;
            return;
        }
        match look.synchronous() {
            Ok(None) => self.home = Home::All,
            _ if !look.sees_standbys => return self.fail(HostFailure::StandbysHidden),
            Ok(Some(at)) => {
                let before = if let Home::UpTo(before) = self.home { before } else { Lsn(0) };
                self.home = Home::UpTo(at.max(before));
            }
            Err(TooFewStandbys { .. }) => {
                let before = if let Home::UpTo(before) = self.home { before } else { Lsn(0) };
                self.home = Home::UpTo(before);
            }
        }
        // Positions of a server count only once its log is known to be the shard's.
        if let Some(end) = look.end.filter(|_| self.phase == Phase::Streaming) {
            self.server_end = self.server_end.max(end);
            let last = self.psa.reached().unwrap_or(self.committed).stamp;
            if let Some(stamp) = self.belief.placed(end, asked, last, self.now)
                && self.backlog.as_mut().is_some_and(|backlog| backlog.settle(stamp))
            {
                self.idle.appended(stamp);
            }
        }
        self.look = Some(look);
        if self.phase == Phase::Looking {
            self.phase = Phase::Opening;
            self.actions.push_back(Action::Connect { conn: Conn::Stream, host: self.host });
        }
    }

    /// Time of the next query, unless one is under way.
    pub(crate) fn next_query_at(&self) -> Option<Duration> {
        if self.asked.is_some() || !self.sql.as_ref()?.is_idle() {
            return None;
        }
        if self.orders.drops_slot {
            return Some(self.now.mono);
        }
        let nop = self.idle.deadline().filter(|_| self.appends_nops());
        let nop = nop.map(|at| Duration::from_nanos(at.0));
        nop.into_iter().chain(self.next_look_at()).min()
    }

    fn next_look_at(&self) -> Option<Duration> {
        let Some(looked) = self.looked else { return Some(self.now.mono) };
        let is_held = match (self.home, &self.backlog) {
            (Home::UpTo(at), Some(backlog)) => index(at) < backlog.sendable(),
            _ => false,
        };
        let pause = if is_held { self.config.look_pause } else { self.config.look_every };
        let settled = self.belief.settles_at().filter(|_| self.phase == Phase::Streaming);
        // A look at the moment at which the clock has settled, and then at the usual pace.
        let settled = settled.filter(|at| *at > looked);
        settled.into_iter().chain([looked + pause]).min()
    }

    /// True if a NOP would count: it must be stamped, and received.
    fn appends_nops(&self) -> bool {
        self.phase == Phase::Streaming && self.belief.is_trusted() && !self.is_full()
    }

    /// Sends the query that is due.
    pub(crate) fn ask(&mut self) {
        if self.next_query_at().is_none_or(|at| at > self.now.mono) {
            return;
        }
        let mono = self.mono();
        let nop = self.appends_nops() && self.idle.poll(mono);
        let Some(sql) = &mut self.sql else { return };
        let slot = &self.config.slot;
        let (query, text) = match nop {
            true => (Query::Nop, look::nop()),
            false if self.orders.drops_slot => (Query::DropSlot, look::drop_lost(slot)),
            false => (Query::Look, look::query(slot)),
        };
        if sql.query(&text).is_ok() {
            self.asked = Some((query, self.now.mono));
            self.orders.drops_slot = false;
            if query == Query::Look {
                self.looked = Some(self.now.mono);
            }
        }
    }

    pub(crate) fn poll_stream(&mut self) {
        while let Some(event) = self.stream.as_mut().and_then(Receiver::poll) {
            match event {
                Event::Identified(identity) => self.identified(identity),
                Event::History { file, history, .. } => {
                    let text = String::from_utf8_lossy(&file).into_owned();
                    self.known(history, text);
                }
                Event::SlotCreated(_) => self.orders.make_slot = false,
                Event::Started(from) => self.started(from),
                Event::Wal { bytes, server_end, .. } => {
                    self.server_end = self.server_end.max(server_end);
                    self.going_on();
                    self.wal(&bytes);
                }
                Event::Keepalive { server_end, .. } => {
                    self.server_end = self.server_end.max(server_end);
                    // A server without anything to send says no more than this. One that lacks the log says it, too.
                    let at = self.cutter.as_ref().map(Cutter::position);
                    if at >= self.identity.map(|identity| identity.end.at) {
                        self.going_on();
                    }
                }
                Event::TimelineEnds { next, .. } => {
                    self.timeline = Some(next.timeline);
                    self.phase = Phase::Opening;
                }
                Event::Failed(failure) => self.fail(HostFailure::Stream(failure)),
            }
        }
    }

    fn identified(&mut self, identity: Identity) {
        self.identity = Some(identity);
        self.history = None;
        self.server_end = identity.end.at;
        let of = (self.host, identity.end.timeline);
        if self.judged.replace(of) != Some(of) {
            self.belief.begin_anew(self.now);
        }
        if identity.end.timeline == TimelineId(1) {
            self.known(TimelineHistory::only(TimelineId(1)), String::new());
        } else if let Some(stream) = &mut self.stream {
            // A receiver that has just said so is idle.
            let _ = stream.ask_history();
        }
    }

    /// The server's history is known, so the backup can be told which log it gets.
    fn known(&mut self, history: TimelineHistory, text: String) {
        let Some(identity) = self.identity else { return };
        self.history = Some(history);
        // The backup never hears of a server that is not the shard's primary.
        if let Err(failure) = self.check_server() {
            return self.fail(failure);
        }
        let origin = Origin {
            system_id: identity.system,
            timeline: identity.end.timeline.0,
            history: text,
            segment_bytes: identity.segment_bytes,
            version: identity.version / 10_000,
        };
        if self.origin.as_ref() != Some(&origin) {
            self.origin = Some(origin.clone());
            if self.is_backup_there {
                self.actions.push_back(Action::Origin(origin));
            }
        }
        self.phase = Phase::Identified;
    }

    /// Tells the backup which log it gets, unless it has a later one.
    pub(crate) fn tell_origin(&mut self) {
        let is_older = |of: &Origin, known: &Origin| {
            of.system_id != known.system_id || of.timeline < known.timeline
        };
        self.origin = self
            .origin
            .take()
            .filter(|of| self.known_origin.as_ref().is_none_or(|known| !is_older(of, known)));
        match &self.origin {
            Some(origin) => self.actions.push_back(Action::Origin(origin.clone())),
            None => {
                if self.identity.is_some()
                    && let Err(failure) = self.check_server()
                {
                    self.fail(failure);
                }
            }
        }
    }

    /// Compares the server with what is known of the log.
    fn check_server(&self) -> Result<(), HostFailure> {
        let Some(Identity { system: found, end: server, .. }) = self.identity else {
            return Ok(());
        };
        let received = self.cutter.as_ref().map(Cutter::position);
        let place = received.or(self.place().map(|place| Lsn(place.0)));
        let origins = [&self.known_origin, &self.origin];
        if let Some(of) = &self.known_origin
            && of.system_id != found
        {
            let expected = of.system_id;
            return Err(HostFailure::Stream(Failure::WrongSystem { found, expected }));
        }
        let origins = origins.into_iter().flatten().map(|origin| TimelineId(origin.timeline));
        if let Some(timeline) = origins.max().filter(|timeline| *timeline > server.timeline) {
            let ours = Position { timeline, at: place.unwrap_or(Lsn(0)) };
            return Err(HostFailure::Stream(Failure::OldTimeline { server, ours }));
        }
        match place.filter(|at| at.0 > 0 && !self.orders.jumps) {
            Some(at) => self.reread(at).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Place at which the log goes on, as far as it is known.
    fn place(&self) -> Option<LogIndex> {
        self.backlog.as_ref().map(Backlog::end).or(self.psa.reached().map(|at| at.index))
    }

    /// Starts the stream, once it is known where.
    pub(crate) fn start(&mut self) {
        if self.phase != Phase::Identified {
            return;
        }
        let Some(resume) = self.place() else { return };
        if let Err(failure) = self.check_server() {
            return self.fail(failure);
        }
        let is_first = resume == LogIndex(0);
        let begins = is_first || self.orders.jumps;
        let position = match (begins, &self.cutter) {
            (true, _) => Ok(None),
            (false, Some(cutter)) => self.continued(cutter.position()).map(Some),
            (false, None) => self.reread(Lsn(resume.0)).map(Some),
        };
        let (Ok(from), Some(stream)) = (&position, &mut self.stream) else {
            if let Err(failure) = position {
                self.fail(failure);
            }
            return;
        };
        let server = self.identity.map_or(TimelineId(0), |identity| identity.end.timeline);
        let is_promoted = from.is_some_and(|from| from.timeline < server);
        let create = begins || is_promoted || self.orders.make_slot;
        let slot = Some(SlotUse { name: self.config.slot.clone(), create });
        self.phase = Phase::Starting;
        self.resume = Some(resume);
        // A receiver that was identified is idle.
        let _ = stream.start(Start { slot, from: *from });
        self.poll_stream();
    }

    /// The position behind what was received. The receiver compares it with the server's history.
    fn continued(&self, at: Lsn) -> Result<Position, HostFailure> {
        let server = self.identity.map_or(TimelineId(1), |identity| identity.end.timeline);
        Ok(Position { timeline: self.timeline.unwrap_or(server), at })
    }

    /// The begin of the segment of a position, from which the log is read again: at the position itself, the begin of a
    /// record may be missing.
    fn reread(&self, at: Lsn) -> Result<Position, HostFailure> {
        let (Some(identity), Some(history)) = (self.identity, &self.history) else {
            return Err(HostFailure::NotALook);
        };
        let known = self.known_origin.as_ref().and_then(|origin| {
            let id = TimelineId(origin.timeline);
            let of = TimelineHistory::parse(id, origin.history.as_bytes()).ok()?;
            Some(of.timeline_at(at))
        });
        let timeline = self.timeline.or(known).unwrap_or_else(|| history.timeline_at(at));
        let (ours, server) = (Position { timeline, at }, identity.end);
        if timeline > server.timeline {
            return Err(HostFailure::Stream(Failure::OldTimeline { server, ours }));
        }
        if timeline < server.timeline {
            let left_at = history.left_at(timeline);
            if left_at.is_none_or(|left_at| left_at < at) {
                let server = server.timeline;
                return Err(HostFailure::Stream(Failure::Diverged { server, ours, left_at }));
            }
        } else if at > server.at {
            return Err(HostFailure::BehindBackup { server: server.at, backup: at });
        }
        let segment = Lsn(at.0 - at.0 % u64::from(identity.segment_bytes.max(1)));
        Ok(Position { timeline: history.timeline_at(segment), at: segment })
    }

    fn started(&mut self, from: Position) {
        self.timeline = Some(from.timeline);
        self.stream_from = from.at;
        let (Some(identity), Some(history)) = (self.identity, self.history.clone()) else { return };
        if let Some(cutter) = self.cutter.as_mut().filter(|cutter| cutter.position() == from.at) {
            cutter.follow(history);
            return;
        }
        let jumps = std::mem::take(&mut self.orders.jumps);
        let resume = match self.resume {
            // A log that begins, or goes on behind a gap.
            Some(end) if end < index(from.at) => {
                if !jumps && end != LogIndex(0) {
                    let (found, expected) = (from.at, Lsn(end.0));
                    return self.fail(HostFailure::Stream(Failure::Gap { found, expected }));
                }
                let end_of_jump = index(from.at);
                let stamp = self.belief.stamp(from.at, None, self.now);
                let jump = Piece { begin: end, end: end_of_jump, data: None, stamp, nop: true };
                self.backlog.get_or_insert_with(|| Backlog::at(end)).push(jump);
                from.at
            }
            Some(end) => {
                self.backlog.get_or_insert_with(|| Backlog::at(end));
                Lsn(end.0)
            }
            None => return,
        };
        match WalReader::new(from.at, identity.segment_bytes, history) {
            Ok(reader) => {
                let reader = reader.of_system(identity.system);
                self.cutter = Some(Cutter::new(reader, resume, self.config.entry_max_bytes));
            }
            Err(error) => self.fail(HostFailure::Wal(error)),
        }
    }

    /// The server streams: it has the log that was asked for.
    fn going_on(&mut self) {
        if self.phase != Phase::Starting || self.cutter.is_none() {
            return;
        }
        self.phase = Phase::Streaming;
        self.config.system = self.config.system.or(self.identity.map(|identity| identity.system));
        self.failures[self.host] = None;
        self.orders.make_slot = false;
        self.orders.may_jump = false;
        // A look at once: positions count from here on.
        self.looked = None;
    }

    fn wal(&mut self, bytes: &[u8]) {
        let (Some(cutter), Some(backlog)) = (&mut self.cutter, &mut self.backlog) else { return };
        let (belief, now) = (&mut self.belief, self.now);
        let mut pieces = vec![];
        let stamp = |end: Lsn, ended: Ended| match ended {
            Ended::At(stamp) => belief.stamp(end, Some(stamp), now),
            Ended::Unread => belief.stamp(end, None, now),
        };
        let result = cutter.push(bytes, stamp, &mut pieces);
        for piece in pieces {
            if let Stamp::Taken(stamp) | Stamp::Doubted(stamp) = piece.stamp {
                self.idle.appended(stamp);
            }
            backlog.push(piece);
        }
        if let Err(error) = result {
            // The part that was verified leaves.
            self.ship();
            self.fail(HostFailure::Wal(error));
        }
    }
}
