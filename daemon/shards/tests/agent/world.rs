//! A primary that is played by hand, on any number of hosts, and a backup in memory.

use crate::messages::{answer, authentication, copy_both, message, ready};
use crate::writer::{Parts, SEGMENT, SYSTEM, TRANSACTIONS, Writer, end};
use std::collections::VecDeque;
use std::time::Duration;
use tidelock_clock::{Verdict, Why};
use tidelock_pgstream::{Login, Now, PasswordMethod};
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::link::Origin;
use tidelock_shard::{Backup, Bsa, Closing, Entry, LogIndex, LogPoint, Reply, Standing, stamp_at};
use tidelock_shard_agent::{Action, Config, Conn, ShardAgent};
use tidelock_wal::{Ending, Kind, Lsn, PgTimestamp};

pub const START: u64 = SEGMENT as u64;
pub const EPSILON_NS: u64 = 100_000;
pub const CLOCK_ERROR_MAX_NS: u64 = 1_000_000;
/// Manager of messages that clients put into the log.
const MESSAGES: u8 = 21;
const WALL_US: i64 = 850_000_000_000_000;
pub const GOOD: Verdict = Verdict::Believed { epsilon_ns: EPSILON_NS };
pub const BAD: Verdict = Verdict::NotBelieved { why: Why::NoMaster };

/// A server.
#[derive(Clone)]
pub struct Host {
    pub is_up: bool,
    pub is_in_recovery: bool,
    /// True: a start is not answered before [`World::release`].
    pub is_slow: bool,
    pub system: u64,
    pub log: Writer,
    /// Content of the history file of its timeline.
    pub history: Option<String>,
    /// Position of the slot.
    pub slot: Option<u64>,
    pub wal_status: &'static str,
    /// First position that the server still has.
    pub oldest: u64,
    pub standby_names: String,
    /// Ends of what synchronous standbys have.
    pub standbys: Vec<u64>,
}

impl Host {
    pub fn new() -> Host {
        let mut log = Writer::new(START);
        log.other(100);
        Host {
            is_up: true,
            is_in_recovery: false,
            is_slow: false,
            system: SYSTEM,
            log,
            history: None,
            slot: None,
            wal_status: "reserved",
            oldest: START,
            standby_names: String::new(),
            standbys: vec![],
        }
    }

    pub fn end(&self) -> u64 {
        self.log.at()
    }

    /// Appends a commit that was stamped at this time; returns its end.
    pub fn commit(&mut self, at_us: i64) -> u64 {
        self.ends(Ending::Commit, at_us)
    }

    pub fn ends(&mut self, ending: Ending, at_us: i64) -> u64 {
        let (info, content) = end(ending, WALL_US + at_us, &Parts::default());
        self.log.content(TRANSACTIONS, info, 800, &content, Kind::Other);
        self.end()
    }

    pub fn nop(&mut self, at_us: i64) -> u64 {
        let lengths = [9_u64.to_le_bytes(), 0_u64.to_le_bytes()].concat();
        let content = [&[0, 0, 0, 0, 1, 0, 0, 0], &lengths[..], b"tidelock\0"].concat();
        self.log.content(MESSAGES, 0, 800, &content, Kind::Other);
        self.commit(at_us)
    }

    /// Begins another timeline.
    pub fn promote(&mut self, timeline: u32) {
        let before = self.history.take().unwrap_or_default();
        let of = self.log.timeline;
        self.history = Some(format!("{before}{of}\t{}\tno reason\n", Lsn(self.end())));
        self.log.branch(timeline);
        self.is_in_recovery = false;
        self.slot = None;
    }
}

/// The server's side of a connection.
#[derive(Default)]
struct Socket {
    host: usize,
    input: Vec<u8>,
    has_logged_in: bool,
    /// Position of the next byte of the log to be sent, and where the stream ends.
    streams: Option<(u64, u32)>,
    /// A stream that waits to begin.
    waits: Option<(u64, u32)>,
}

pub struct World {
    pub agent: ShardAgent,
    pub ms: u64,
    pub verdict: Verdict,
    pub hosts: Vec<Host>,
    sockets: [Option<Socket>; 2],
    pub backup: Bsa,
    pub entries: Vec<Entry>,
    pub origins: Vec<Origin>,
    pub doubts: Vec<(Hlc, Hlc)>,
    pub failures: Vec<(usize, &'static str)>,
    pub stands: Vec<Option<String>>,
    /// Messages to the backup that have not arrived.
    pub under_way: VecDeque<Backup>,
    pub delays: bool,
    /// Queries and commands, as the servers got them.
    pub commands: Vec<String>,
    /// Flushed positions, as they were reported.
    pub flushed: Vec<u64>,
    pub wal_bytes: usize,
}

pub fn time(ms: u64) -> Now {
    Now { mono: Duration::from_millis(ms), wall: PgTimestamp(WALL_US + ms as i64 * 1000) }
}

pub fn stamp(at_us: i64) -> Hlc {
    let ns = PgTimestamp(WALL_US + at_us).unix_ns().unwrap();
    stamp_at(ns as u64)
}

pub fn config(hosts: usize) -> Config {
    let login = Login {
        user: "postgres".into(),
        password: None,
        application_name: "tidelock".into(),
        weakest: PasswordMethod::Scram,
    };
    Config::new(hosts, login, "tidelock".parse().unwrap(), CLOCK_ERROR_MAX_NS)
}

impl World {
    pub fn of(hosts: Vec<Host>, config: Config, at: LogPoint, origin: Option<Origin>) -> World {
        let standing = Standing { append: at, commit: at };
        let mut world = World {
            agent: ShardAgent::new(config, time(0)),
            ms: 0,
            verdict: GOOD,
            hosts,
            sockets: [None, None],
            backup: Bsa::leading(standing, Closing::Open),
            entries: vec![],
            origins: vec![],
            doubts: vec![],
            failures: vec![],
            stands: vec![],
            under_way: VecDeque::new(),
            delays: false,
            commands: vec![],
            flushed: vec![],
            wal_bytes: 0,
        };
        world.agent.clock(world.verdict, time(0));
        world.agent.backup_connected(origin, time(0));
        world.run();
        world
    }

    /// A world of one host, whose stamps are believed from 2 s on.
    pub fn settled() -> World {
        World::settled_with(config(1))
    }

    pub fn settled_with(config: Config) -> World {
        let mut world = World::of(vec![Host::new()], config, LogPoint::default(), None);
        world.wait(2000);
        assert!(world.agent.status().is_clock_trusted, "{:?}", world.agent.status());
        world
    }

    /// Lets time pass, in steps, and everything happen.
    pub fn wait(&mut self, ms: u64) {
        for _ in 0..ms / 50 {
            self.ms += 50;
            self.tick();
        }
    }

    pub fn tick(&mut self) {
        self.agent.clock(self.verdict, time(self.ms));
        self.agent.tick(time(self.ms));
        self.run();
    }

    /// Lets everything happen that needs no time.
    pub fn run(&mut self) {
        for _ in 0..100_000 {
            if !self.step() {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    fn step(&mut self) -> bool {
        if let Some(action) = self.agent.poll() {
            self.carry_out(action);
            return true;
        }
        if !self.delays
            && let Some(message) = self.under_way.pop_front()
        {
            self.deliver(message);
            return true;
        }
        [Conn::Look, Conn::Stream].into_iter().any(|conn| self.serve(conn))
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Connect { conn, host } if self.hosts[host].is_up => {
                self.sockets[conn as usize] = Some(Socket { host, ..Socket::default() });
                self.agent.connected(conn, time(self.ms));
            }
            Action::Connect { conn, .. } => {
                self.agent.unreachable(conn, "refused", time(self.ms));
            }
            Action::Disconnect(conn) => self.sockets[conn as usize] = None,
            Action::Origin(origin) => self.origins.push(origin),
            Action::Doubt { after, through } => self.doubts.push((after, through)),
            Action::Backup(message) => self.under_way.push_back(message),
            Action::Stands(reason) => self.stands.push(reason),
            Action::Failed { host, failure, advice } => {
                assert!(!advice.is_empty() && !failure.to_string().is_empty());
                self.failures.push((host, failure.kind()));
            }
        }
    }

    /// A message arrives at the backup, and all of it is durable at once.
    pub fn deliver(&mut self, message: Backup) {
        assert!(!self.origins.is_empty(), "the backup must know which log it gets");
        let mut received = self.backup.received(message).unwrap();
        if let Some(last) = received.append.last() {
            self.backup.committed(last.point());
        }
        self.entries.append(&mut received.append);
        if let tidelock_shard::Verdict::Taken(standing) = &mut received.reply.verdict {
            *standing = self.backup.standing().unwrap();
        }
        self.reply(&received.reply);
    }

    pub fn reply(&mut self, reply: &Reply) {
        self.agent.reply(reply, time(self.ms)).unwrap();
    }

    /// Answers a start that waits.
    pub fn release(&mut self) {
        let socket = self.sockets[Conn::Stream as usize].as_mut().unwrap();
        socket.streams = Some(socket.waits.take().unwrap());
        self.arrive(Conn::Stream, &copy_both());
        self.run();
    }

    /// Ends both connections.
    pub fn cut(&mut self) {
        for conn in [Conn::Look, Conn::Stream] {
            if self.sockets[conn as usize].take().is_some() {
                self.agent.closed(conn, time(self.ms));
            }
        }
        self.run();
    }

    /// Bytes arrive on a connection, if it is there.
    pub fn arrive(&mut self, conn: Conn, bytes: &[u8]) {
        if self.sockets[conn as usize].is_some() {
            self.agent.clock(self.verdict, time(self.ms));
            self.agent.received(conn, bytes, time(self.ms));
        }
    }

    fn serve(&mut self, conn: Conn) -> bool {
        let Some(socket) = &mut self.sockets[conn as usize] else { return false };
        let output = self.agent.output(conn).map(|output| output.split()).unwrap_or_default();
        socket.input.extend_from_slice(&output);
        if !self.agent.wants(conn) {
            return false;
        }
        let reply = match next(&mut socket.input, &mut socket.has_logged_in) {
            None => self.more_log(conn),
            Some((0, _)) => {
                let mut hello = [authentication(0, &[]), ready()].concat();
                hello.splice(0..0, message(b'S', b"server_version\x0015.1\0"));
                Some(hello)
            }
            Some((b'Q', body)) => {
                let text = String::from_utf8(body[..body.len() - 1].to_vec()).unwrap();
                let socket = self.sockets[conn as usize].as_mut().unwrap();
                let reply = command(&mut self.hosts[socket.host], socket, &text);
                self.commands.push(text);
                Some(reply)
            }
            Some((b'd', body)) if body[0] == b'r' => {
                let number = |at: usize| u64::from_be_bytes(body[at..at + 8].try_into().unwrap());
                let socket = self.sockets[conn as usize].as_ref().unwrap();
                let host = &mut self.hosts[socket.host];
                if number(9) > 0 {
                    self.flushed.push(number(9));
                    host.slot = Some(number(9));
                }
                let at = socket.streams.map_or(0, |(at, _)| at);
                // Also by a server that lacks the log, before it finds that out.
                let asks = body[33] == 1;
                let sign = [&b"k"[..], &at.to_be_bytes(), &[0; 8], &[0]].concat();
                Some(if asks { message(b'd', &sign) } else { vec![] })
            }
            Some((b'c', _)) => {
                let socket = self.sockets[conn as usize].as_mut().unwrap();
                let host = &self.hosts[socket.host];
                socket.streams = None;
                let branch = host.history.as_ref().unwrap().trim_end().rsplit('\n').next().unwrap();
                let branch = branch.split('\t').nth(1).unwrap();
                let timeline = host.log.timeline.to_string();
                let complete = message(b'C', b"X\0");
                let rows = crate::messages::row(&[Some(&timeline), Some(branch)]);
                Some([rows, complete.clone(), complete, ready()].concat())
            }
            Some((b'X', _)) => {
                self.sockets[conn as usize] = None;
                Some(vec![])
            }
            Some((tag, _)) => panic!("{:?}", char::from(tag)),
        };
        let Some(reply) = reply else { return false };
        self.arrive(conn, &reply);
        true
    }

    /// The next part of the log, if the agent reads.
    fn more_log(&mut self, conn: Conn) -> Option<Vec<u8>> {
        let socket = self.sockets[conn as usize].as_mut()?;
        let (at, timeline) = socket.streams.filter(|_| self.agent.wants(conn))?;
        let host = &self.hosts[socket.host];
        if at < host.oldest {
            socket.streams = None;
            return Some(crate::messages::error("58P01", "removed"));
        }
        let is_old = timeline < host.log.timeline;
        let branch =
            host.history.as_ref().filter(|_| is_old).map(|history| left(history, timeline));
        let end = branch.unwrap_or(host.end());
        if at >= end {
            return branch.map(|_| {
                socket.streams = Some((at, u32::MAX));
                message(b'c', &[])
            });
        }
        let from = (at - host.log.start.0) as usize;
        let bytes = &host.log.bytes[from..(from + 30_000).min((end - host.log.start.0) as usize)];
        socket.streams = Some((at + bytes.len() as u64, timeline));
        self.wal_bytes += bytes.len();
        let head = [at.to_be_bytes(), host.end().to_be_bytes(), [0; 8]].concat();
        Some(message(b'd', &[b"w", &head[..], bytes].concat()))
    }

    /// Ends, stamps and NOPs of the entries that are the end of a transaction or a jump.
    pub fn stamped(&self) -> Vec<(u64, Hlc, bool)> {
        let mut last = Hlc::default();
        let is_new = |entry: &&Entry| std::mem::replace(&mut last, entry.stamp) != entry.stamp;
        let plain = |entry: &Entry| (entry.end.0, entry.stamp, entry.nop);
        self.entries.iter().filter(is_new).map(plain).collect()
    }

    /// The bytes that the backup has got are a host's log.
    pub fn check(&self, host: usize) {
        let log = &self.hosts[host].log;
        let first = self.entries.first().expect("entries");
        assert!(first.data.is_none());
        let bytes: Vec<u8> = self.entries[1..]
            .iter()
            .flat_map(|entry| entry.data.as_ref().unwrap().data().to_vec())
            .collect();
        let from = (first.end.0 - log.start.0) as usize;
        assert_eq!(bytes, log.bytes[from..from + bytes.len()]);
        let end = self.entries.last().map(|entry| entry.end);
        assert_eq!(end, Some(LogIndex(first.end.0 + bytes.len() as u64)));
    }

    pub fn kind(&self) -> Option<&'static str> {
        self.agent.status().stands.map(|stands| stands.kind)
    }

    pub fn count(&self, begin: &str) -> usize {
        self.commands.iter().filter(|text| text.starts_with(begin)).count()
    }
}

/// Position at which a timeline was left.
fn left(history: &str, timeline: u32) -> u64 {
    let line = history.lines().find(|line| line.starts_with(&format!("{timeline}\t"))).unwrap();
    line.split('\t').nth(1).unwrap().parse::<Lsn>().unwrap().0
}

/// Cuts the next message out of what a client sends. Tag 0: the start-up message.
fn next(input: &mut Vec<u8>, has_logged_in: &mut bool) -> Option<(u8, Vec<u8>)> {
    let head = usize::from(*has_logged_in);
    let length = u32::from_be_bytes(input.get(head..head + 4)?.try_into().ok()?) as usize;
    let whole: Vec<u8> = input.drain(..length + head).collect();
    let tag = if *has_logged_in { whole[0] } else { 0 };
    *has_logged_in = true;
    Some((tag, whole[4 + head..].to_vec()))
}

fn command(host: &mut Host, socket: &mut Socket, text: &str) -> Vec<u8> {
    let timeline = host.log.timeline.to_string();
    let end = Lsn(host.end()).to_string();
    if text == "IDENTIFY_SYSTEM" {
        return answer(&[Some(&host.system.to_string()), Some(&timeline), Some(&end), None]);
    }
    if text == "SHOW wal_segment_size" {
        return answer(&[Some("1MB")]);
    }
    if text == "SHOW server_version_num" {
        return answer(&[Some("150001")]);
    }
    if text.starts_with("TIMELINE_HISTORY") {
        return answer(&[Some("history"), host.history.as_deref()]);
    }
    if text.starts_with("READ_REPLICATION_SLOT") {
        let at = host.slot.map(|at| Lsn(at).to_string());
        let kind = host.slot.map(|_| "physical");
        return answer(&[kind, at.as_deref(), host.slot.map(|_| &*timeline)]);
    }
    if text.starts_with("CREATE_REPLICATION_SLOT") {
        host.slot = Some(host.oldest);
        host.wal_status = "reserved";
        return answer(&[Some("tidelock"), Some("0/0"), None, None]);
    }
    if text.starts_with("START_REPLICATION") {
        let words: Vec<&str> = text.split(' ').collect();
        let at = words.iter().find_map(|word| word.parse::<Lsn>().ok()).unwrap().0;
        let timeline = words.last().unwrap().parse().unwrap();
        assert!(at <= host.end(), "{text}");
        if host.is_slow {
            socket.waits = Some((at, timeline));
            return vec![];
        }
        socket.streams = Some((at, timeline));
        return copy_both();
    }
    if text.starts_with("SELECT pg_logical_emit_message") {
        return answer(&[Some("0/0")]);
    }
    if text.starts_with("SELECT pg_drop_replication_slot") {
        host.slot = host.slot.filter(|_| host.wal_status != "lost");
        return answer(&[Some("")]);
    }
    assert!(text.starts_with("SELECT pg_is_in_recovery"), "{text}");
    let yes = |is: bool| Some(if is { "t" } else { "f" });
    let slot = host.slot.map(|at| Lsn(at).to_string());
    let of_slot = |text| host.slot.map(|_| text);
    let standbys: Vec<_> = host.standbys.iter().map(|at| Lsn(*at).to_string()).collect();
    let mut rows = vec![];
    for standby in standbys.iter().map(|at| Some(&**at)).chain([None]).take(standbys.len().max(1)) {
        rows.extend(crate::messages::row(&[
            yes(host.is_in_recovery),
            Some(&*end).filter(|_| !host.is_in_recovery),
            Some(&host.standby_names),
            yes(true),
            yes(host.slot.is_some()),
            of_slot(host.wal_status),
            None,
            slot.as_deref(),
            None,
            yes(standby.is_some()),
            standby,
        ]));
    }
    [rows, message(b'C', b"X\0"), ready()].concat()
}
