//! The machine: its inputs, and its actions.

use crate::backlog::Backlog;
use crate::belief::Belief;
use crate::config::Config;
use crate::cutter::Cutter;
use crate::failure::{HostFailure, Stand};
use crate::look::Look;
use crate::server::{Home, Query};
use bytes::BytesMut;
use std::collections::VecDeque;
use std::time::Duration;
use tidelock_clock::Verdict;
use tidelock_pgstream::{Identity, Now, Receiver, SqlClient};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::MonoNanos;
use tidelock_shard::link::{ENTRY_MAX_BYTES, Origin};
use tidelock_shard::{Backup, IdleShard, LogIndex, LogPoint, Psa, PsaError, Reply, Terms};
use tidelock_wal::{Lsn, TimelineHistory, TimelineId};

/// The two connections to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Conn {
    /// Streams the log.
    Stream,
    /// Looks at the server, and appends NOPs.
    Look,
}

/// Work for the caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Connect to a host of the list; then [`ShardAgent::connected`] or [`ShardAgent::unreachable`].
    Connect {
        /// Connection that is wanted.
        conn: Conn,
        /// Host, from 0.
        host: usize,
    },
    /// Send what output is left, if that can be done at once, and close the connection. Nothing of it is given to the
    /// agent any more.
    Disconnect(Conn),
    /// Tell the backup which log it gets. Before any message.
    Origin(Origin),
    /// Tell the backup that a cut at a stamp later than `after` and earlier than `through` is no prefix, and is never
    /// to be served. Before the message that follows; the backup must have it as durable as that.
    Doubt {
        /// Last stamp before the time of doubt.
        after: Hlc,
        /// First stamp behind it. What was placed meanwhile has the one before: several entries have that stamp, so
        /// that a cut at it can have some of them only.
        through: Hlc,
    },
    /// Send this to the backup shard.
    Backup(Backup),
    /// The shard's log at the backup stands still, and why; or goes on. For status and log, at both sites.
    Stands(Option<String>),
    /// A server has failed, by the name of the failure. For the log.
    Failed {
        /// The host.
        host: usize,
        /// The failure.
        failure: HostFailure,
        /// Advice to the operator.
        advice: String,
    },
}

/// Progress towards a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The next host is tried then.
    Pausing { until: Duration },
    /// The server is looked at: is it a primary?
    Looking,
    /// The stream is being made.
    Opening,
    /// The server waits to be told where to start.
    Identified,
    /// The start is ordered; the server has not sent anything yet.
    Starting,
    /// The log streams.
    Streaming,
    /// The store was recovered.
    Ended,
}

/// Orders that the next start obeys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orders {
    pub make_slot: bool,
    pub may_jump: bool,
    /// The log is gone where it would go on.
    pub jumps: bool,
    /// The slot is there, and is of no use any more.
    pub drops_slot: bool,
}

/// The agent of one shard.
#[derive(Debug)]
pub struct ShardAgent {
    pub(crate) config: Config,
    pub(crate) now: Now,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) psa: Psa,
    pub(crate) idle: IdleShard,
    pub(crate) belief: Belief,

    pub(crate) host: usize,
    pub(crate) phase: Phase,
    pub(crate) sql: Option<SqlClient>,
    pub(crate) asked: Option<(Query, Duration)>,
    /// Begin of the last look.
    pub(crate) looked: Option<Duration>,
    pub(crate) look: Option<Look>,
    pub(crate) home: Home,
    pub(crate) stream: Option<Receiver>,
    pub(crate) identity: Option<Identity>,
    pub(crate) history: Option<TimelineHistory>,
    pub(crate) failures: Vec<Option<HostFailure>>,
    pub(crate) orders: Orders,
    /// Place at which the start that was ordered goes on.
    pub(crate) resume: Option<LogIndex>,
    /// Host and timeline whose stamps are judged.
    pub(crate) judged: Option<(usize, TimelineId)>,

    pub(crate) cutter: Option<Cutter>,
    pub(crate) backlog: Option<Backlog>,
    /// Timeline of the last byte that was received.
    pub(crate) timeline: Option<TimelineId>,
    pub(crate) server_end: Lsn,
    /// Position at which the stream began.
    pub(crate) stream_from: Lsn,

    pub(crate) is_backup_there: bool,
    /// Bytes that the link to the backup takes now.
    pub(crate) room_bytes: usize,
    /// Origin that the backup has, by its own word.
    pub(crate) known_origin: Option<Origin>,
    pub(crate) origin: Option<Origin>,
    /// End of the time of doubt that the backup was told of.
    pub(crate) doubt_told: Option<Hlc>,
    /// End of what the backup has committed, by its last reply.
    pub(crate) committed: LogPoint,
    pub(crate) watermark: Hlc,
    stands_told: Option<String>,
    stands_since: Option<(Duration, &'static str)>,
}

impl ShardAgent {
    /// An agent that knows nothing yet. Its first actions are there at once.
    #[must_use]
    pub fn new(mut config: Config, now: Now) -> Self {
        config.hosts = config.hosts.max(1);
        config.entry_max_bytes = config.entry_max_bytes.clamp(1, ENTRY_MAX_BYTES);
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let terms = Terms {
            replicas: 1,
            unacked_max: config.unacked_max_bytes,
            patience_ns: ns(config.patience),
        };
        let belief = Belief::new(config.settle, config.verdict_age_max, config.clock_error_max_ns);
        let mut agent = Self {
            psa: Psa::new(terms),
            idle: IdleShard::new(ns(config.nop_every)),
            belief,
            now,
            actions: VecDeque::new(),
            host: 0,
            phase: Phase::Pausing { until: now.mono },
            sql: None,
            asked: None,
            looked: None,
            look: None,
            home: Home::Unknown,
            stream: None,
            identity: None,
            history: None,
            failures: vec![None; config.hosts],
            orders: Orders::default(),
            resume: None,
            judged: None,
            cutter: None,
            backlog: None,
            timeline: None,
            server_end: Lsn(0),
            stream_from: Lsn(0),
            is_backup_there: false,
            room_bytes: usize::MAX,
            known_origin: None,
            origin: None,
            doubt_told: None,
            committed: LogPoint::default(),
            watermark: Hlc::default(),
            stands_told: None,
            stands_since: None,
            config,
        };
        agent.work();
        agent
    }

    /// The next action.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Tells the time.
    pub fn tick(&mut self, now: Now) {
        self.begin(now);
        self.poll_stream();
        self.poll_sql();
        self.work();
    }

    /// Time (of [`Now::mono`]) of the next [`tick`](Self::tick) if nothing else happens.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let psa = self.psa.deadline().filter(|_| self.is_backup_there && self.origin.is_some());
        let times = [
            match self.phase {
                Phase::Pausing { until } => Some(until),
                _ => None,
            },
            self.sql.as_ref().and_then(SqlClient::deadline),
            self.stream.as_ref().and_then(Receiver::deadline),
            self.next_query_at(),
            psa.map(|at| Duration::from_nanos(at.0)),
        ];
        times.into_iter().flatten().min()
    }

    /// A connection that was ordered has been made.
    pub fn connected(&mut self, conn: Conn, now: Now) {
        self.begin(now);
        self.open(conn);
        self.work();
    }

    /// A connection that was ordered cannot be made. `reason`: for people.
    pub fn unreachable(&mut self, conn: Conn, reason: &str, now: Now) {
        self.begin(now);
        let is_wanted = match conn {
            Conn::Look => self.phase == Phase::Looking,
            Conn::Stream => self.phase == Phase::Opening,
        };
        if is_wanted {
            self.fail(HostFailure::Unreachable(reason.chars().take(400).collect()));
        }
        self.work();
    }

    /// Bytes have arrived on a connection.
    pub fn received(&mut self, conn: Conn, bytes: &[u8], now: Now) {
        self.begin(now);
        match conn {
            Conn::Stream => {
                if let Some(stream) = &mut self.stream {
                    stream.received(bytes);
                }
                self.poll_stream();
            }
            Conn::Look => {
                if let Some(sql) = &mut self.sql {
                    sql.received(bytes);
                }
                self.poll_sql();
            }
        }
        self.work();
    }

    /// The server has ended a connection.
    pub fn closed(&mut self, conn: Conn, now: Now) {
        self.begin(now);
        match conn {
            Conn::Stream => {
                if let Some(stream) = &mut self.stream {
                    stream.closed();
                }
                self.poll_stream();
            }
            Conn::Look => {
                if let Some(sql) = &mut self.sql {
                    sql.closed();
                }
                self.poll_sql();
            }
        }
        self.work();
    }

    /// Bytes to be sent on a connection. The caller takes them off the front as they leave.
    pub fn output(&mut self, conn: Conn) -> Option<&mut BytesMut> {
        match conn {
            Conn::Stream => self.stream.as_mut().map(Receiver::output),
            Conn::Look => self.sql.as_mut().map(SqlClient::output),
        }
    }

    /// False: nothing is to be read from a connection now. The server's slot keeps the log.
    #[must_use]
    pub fn wants(&self, conn: Conn) -> bool {
        conn == Conn::Look || !self.is_full()
    }

    /// The clock guard's verdict on the clock of the host of the server that is connected ([`host`](Self::host)), taken
    /// from a reading of now. To be told before each piece of the log, and whenever it changes.
    pub fn clock(&mut self, verdict: Verdict, now: Now) {
        self.begin(now);
        self.belief.judged(verdict, now);
        self.work();
    }

    /// The connection to the backup is up. `origin`: the log that the backup has of this shard, if it says so.
    pub fn backup_connected(&mut self, origin: Option<Origin>, now: Now) {
        self.begin(now);
        self.is_backup_there = true;
        self.known_origin = origin;
        self.doubt_told = None;
        self.psa.reconnected();
        self.tell_origin();
        self.work();
    }

    /// Bytes of entries that the link to the backup takes from now on, until this is told again; the last message may
    /// exceed it. At first there is no bound.
    pub fn backup_room(&mut self, bytes: usize, now: Now) {
        self.begin(now);
        self.room_bytes = bytes;
        self.work();
    }

    /// The connection to the backup has ended.
    pub fn backup_lost(&mut self, now: Now) {
        self.begin(now);
        self.is_backup_there = false;
        self.psa.reconnected();
        self.work();
    }

    /// The backup shard has answered.
    ///
    /// # Errors
    /// The backup says what cannot be true; the connection to it must end.
    pub fn reply(&mut self, reply: &Reply, now: Now) -> Result<(), PsaError> {
        self.begin(now);
        self.psa.received(0, reply, self.mono())?;
        if let Some(standing) = reply.verdict.standing() {
            self.committed = self.committed.max_by_index(standing.commit);
            self.idle.appended(standing.append.stamp);
        }
        self.work();
        Ok(())
    }

    /// Progress of the store, by the backup: its watermark, and the greatest stamp of an update of any shard.
    pub fn progress(&mut self, watermark: Hlc, updated: Hlc, now: Now) {
        self.begin(now);
        self.watermark = self.watermark.max(watermark);
        self.idle.heard(updated);
        self.work();
    }

    /// The operator orders a slot that was dropped to be made again. While the log streams there is nothing to do.
    pub fn make_slot(&mut self, now: Now) {
        self.begin(now);
        self.orders.make_slot |= self.phase != Phase::Streaming;
        self.retry_now();
    }

    /// The operator orders the log to go on behind a gap, if there is one: the shard is copied anew, and the copy
    /// covers it. Also makes the slot again. While the log streams there is no gap, and nothing to do.
    pub fn copied_anew(&mut self, now: Now) {
        self.begin(now);
        self.orders.make_slot |= self.phase != Phase::Streaming;
        self.orders.may_jump |= self.phase != Phase::Streaming;
        self.retry_now();
    }

    fn retry_now(&mut self) {
        if matches!(self.phase, Phase::Pausing { .. }) {
            self.phase = Phase::Pausing { until: self.now.mono };
        }
        self.work();
    }

    /// Host of the list that is tried or used, from 0.
    #[must_use]
    pub fn host(&self) -> usize {
        self.host
    }

    /// True if the store was recovered at the backup: this agent does nothing any more.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.psa.is_fenced()
    }

    pub(crate) fn mono(&self) -> MonoNanos {
        MonoNanos(u64::try_from(self.now.mono.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(crate) fn is_full(&self) -> bool {
        let bytes = self.backlog.as_ref().map_or(0, Backlog::bytes);
        self.phase == Phase::Streaming && bytes >= self.config.backlog_max_bytes
    }

    fn begin(&mut self, now: Now) {
        self.now = now;
        self.belief.tick(now);
        let is_full = self.is_full();
        if let Some(stream) = &mut self.stream {
            if is_full {
                stream.not_reading(now);
            }
            stream.tick(now);
        }
        if let Some(sql) = &mut self.sql {
            sql.tick(now);
        }
    }

    /// Goes on with everything that an input may have made possible.
    fn work(&mut self) {
        if self.psa.is_fenced() && self.phase != Phase::Ended {
            self.disconnect();
            self.phase = Phase::Ended;
        }
        self.connect();
        self.start();
        self.ship();
        self.ask();
        self.tell_stands();
    }

    fn tell_stands(&mut self) {
        let stand = self.stand();
        let kind = stand.as_ref().map(Stand::kind);
        if self.stands_since.map(|(_, kind)| kind) != kind {
            self.stands_since = kind.map(|kind| (self.now.mono, kind));
        }
        // Numbers change all the time: the backup is told when the reason does.
        let failures = self.failures.iter().map(|of| of.as_ref().map_or("", HostFailure::kind));
        let key = stand.as_ref().map(|stand| {
            let of_server = if *stand == Stand::NoServer { failures.collect() } else { vec![] };
            [&[stand.kind()], &of_server[..]].concat().join(",")
        });
        if key != self.stands_told {
            self.stands_told = key;
            let text = stand.map(|stand| self.stand_text(&stand));
            self.actions.push_back(Action::Stands(text));
        }
    }

    pub(crate) fn stands_since(&self) -> Option<Duration> {
        self.stands_since.map(|(since, _)| since)
    }
}

trait MaxByIndex {
    fn max_by_index(self, other: Self) -> Self;
}

impl MaxByIndex for LogPoint {
    fn max_by_index(self, other: Self) -> Self {
        if other.index > self.index { other } else { self }
    }
}

/// Position as the store counts.
pub(crate) fn index(lsn: Lsn) -> LogIndex {
    LogIndex(lsn.0)
}
