//! The backup side of one PostgreSQL shard, for tests: a store's journal that is filled from a directory of
//! `wal-receive`, and servers that follow it.
//!
//! `shard-lab DIRECTORY WAL-DIRECTORY BIN-DIRECTORY USER`. Each line of the standard input is a command; each
//! event is JSON, one a line. The store has a second shard, without data, which holds the watermark.

#[path = "../../../protocol/pgstream/examples/segments/mod.rs"]
mod segments;

use segments::{Segments, files, histories};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, BufRead, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{env, thread};
use tidelock_pgstream::Position as WalPosition;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Payload;
use tidelock_shard::link::Origin;
use tidelock_shard::{Backup, Doubts, Entry, LogIndex};
use tidelock_shard_logs::{Agent, Limits, Recovery, StoreLog};
use tidelock_standbys::{ConnectionId, Event, Listening, ShardWal, Standbys};
use tidelock_storage::files::{Files, OpenFile};
use tidelock_store::journal::{Options, Position};
use tidelock_targets::postgres::{Expected, Role, Server, Settings, Site, Source, State};
use tidelock_wal::{Lsn, TimelineId};

type Failed = Box<dyn Error + Send + Sync>;

const SHARD: u16 = 0;
const OTHER: u16 = 1;
/// Small, so that a short test has several.
const OPTIONS: Options = Options { segment_bytes: 1 << 20 };
/// Bytes of log that become one entry.
const ENTRY_BYTES: usize = 100_000;

enum Message {
    Line(String),
    /// A standby needs a reader of the journal.
    Wake,
    End,
}

struct Lab {
    dir: PathBuf,
    wal_dir: PathBuf,
    site: Site,
    log: StoreLog<Files>,
    standbys: Standbys<OpenFile>,
    /// Sockets, by the names of servers.
    sockets: BTreeMap<String, Listening>,
    servers: BTreeMap<String, Arc<tokio::sync::Mutex<Server>>>,
    runtime: tokio::runtime::Runtime,
}

fn main() -> Result<(), Failed> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [dir, wal_dir, bin_dir, user] = &words[..] else {
        return Err("shard-lab DIRECTORY WAL-DIRECTORY BIN-DIRECTORY USER".into());
    };
    let (tell, told) = channel();
    let mut lab = Lab::open(dir.into(), wal_dir.into(), bin_dir.into(), user, &tell)?;
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let _ = tell.send(Message::Line(line));
        }
        let _ = tell.send(Message::End);
    });
    say(json!({"event": "ready"}));
    lab.run(&told);
    Ok(())
}

impl Lab {
    fn open(
        dir: PathBuf,
        wal_dir: PathBuf,
        bin_dir: PathBuf,
        user: &str,
        tell: &Sender<Message>,
    ) -> Result<Self, Failed> {
        let tell = Mutex::new(tell.clone());
        let wake = move || {
            if let Ok(tell) = tell.lock() {
                let _ = tell.send(Message::Wake);
            }
        };
        let standbys = Standbys::new(16, wake, |id, _, event| say(heard(id, event)));
        let storage = Files::make(dir.join("journal"))?;
        let limits = Limits::default();
        let log = if dir.join("journal/s").exists() {
            StoreLog::open(storage, "s", Position::default(), OPTIONS, limits, Doubts::default())?.0
        } else {
            StoreLog::create(storage, "s", 2, OPTIONS, limits)?
        };
        let site = Site { bin_dir, user: user.to_owned(), superuser: "postgres".to_owned() };
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let (sockets, servers) = (BTreeMap::new(), BTreeMap::new());
        let mut lab = Self { dir, wal_dir, site, log, standbys, sockets, servers, runtime };
        if !files(&lab.wal_dir)?.is_empty() {
            lab.standbys.set_wal(SHARD, lab.wal()?);
        }
        for entry in fs::read_dir(&lab.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let server: Server = serde_json::from_slice(&fs::read(&path)?)?;
                let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                lab.listen(&name, &server)?;
                lab.servers.insert(name, Arc::new(tokio::sync::Mutex::new(server)));
            }
        }
        lab.standbys.tend(&lab.log);
        Ok(lab)
    }

    fn run(&mut self, told: &Receiver<Message>) {
        while let Ok(message) = told.recv() {
            match message {
                Message::Wake => self.standbys.tend(&self.log),
                Message::End => return,
                Message::Line(line) => {
                    if let Err(error) = self.command(&line) {
                        say(json!({"event": "failed", "command": line, "text": error.to_string()}));
                    }
                    self.standbys.tend(&self.log);
                }
            }
        }
    }

    fn command(&mut self, line: &str) -> Result<(), Failed> {
        let words: Vec<_> = line.splitn(3, ' ').collect();
        match words[..] {
            ["wal"] => self.standbys.set_wal(SHARD, self.wal()?),
            ["begin", at, stamp] => {
                let entry = entry(at.parse()?, stamp.parse()?, None);
                self.take(SHARD, vec![entry])?;
            }
            ["take", up_to, stamp] => self.take_wal(up_to.parse()?, stamp.parse()?)?,
            ["allow", stamp] => {
                let end = self.log.standing(OTHER).unwrap_or_default().append.index.0 + 1;
                self.take(OTHER, vec![entry(Lsn(end), stamp.parse()?, None)])?;
            }
            ["recover"] => {
                self.log.recover(Recovery { at_unix_ms: 1, primary_declared_dead: true });
                self.commit()?;
            }
            ["forget"] => {
                let ends: Vec<_> = (0..2).filter_map(|shard| self.log.apply_to(shard)).collect();
                self.log.forget(&ends)?;
            }
            ["server", name, rest] => self.server(name, rest)?,
            [verb, name, ..] => return self.drive(verb, name, words.get(2).copied(), line),
            _ => return Err("no such command".into()),
        }
        let apply_to = self.log.apply_to(SHARD).unwrap_or_default();
        say(json!({"event": "done", "command": line, "apply_to": Lsn(apply_to.0).to_string()}));
        Ok(())
    }

    /// Identity of the log: see `wal-serve`.
    fn wal(&self) -> Result<ShardWal, Failed> {
        let names = files(&self.wal_dir)?;
        let first = names.iter().find(|name| name.len() == 24).ok_or("no segment is there")?;
        let mut head = [0; 40];
        File::open(self.wal_dir.join(first))?.read_exact(&mut head)?;
        let number = |at: usize, bytes: usize| {
            head[at..at + bytes].iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte))
        };
        let last = histories(&self.wal_dir)?.pop_last();
        let (timeline, history) = last.unwrap_or((TimelineId(1), Vec::new()));
        Ok(ShardWal::of(&Origin {
            system_id: number(24, 8),
            timeline: timeline.0,
            history: String::from_utf8(history)?,
            segment_bytes: u32::try_from(number(32, 4))?,
            version: 15,
        })?)
    }

    /// Takes log out of the directory, all with one stamp.
    fn take_wal(&mut self, up_to: Lsn, stamp: u64) -> Result<(), Failed> {
        let wal = self.wal()?;
        let segments = Segments::new(&self.wal_dir, wal.segment_bytes);
        let mut at = self.log.standing(SHARD).unwrap_or_default().append.index.0;
        let mut bytes = vec![0; ENTRY_BYTES];
        while at < up_to.0 {
            let timeline = wal.lineage.timeline_at(Lsn(at));
            let earlier: Vec<_> = (1..timeline.0).map(TimelineId).collect();
            let left = usize::try_from(up_to.0 - at)?.min(ENTRY_BYTES);
            let from = WalPosition { timeline, at: Lsn(at) };
            let count = segments.read(from, &earlier, &mut bytes[..left])?;
            if count == 0 {
                return Err(format!("the directory does not have {from}").into());
            }
            at += count as u64;
            self.take(SHARD, vec![entry(Lsn(at), stamp, Some(&bytes[..count]))])?;
        }
        Ok(())
    }

    fn take(&mut self, shard: u16, entries: Vec<Entry>) -> Result<(), Failed> {
        let after = self.log.standing(shard).unwrap_or_default().append.index;
        if let Some(reply) =
            self.log.received(Agent(0), shard, Backup { attempt: 1, after, entries })?
        {
            return Err(format!("{reply:?}").into());
        }
        self.commit()
    }

    fn commit(&mut self) -> Result<(), Failed> {
        loop {
            self.log.write()?;
            let Some(job) = self.log.sync_job() else { return Ok(()) };
            self.log.synced(job.run())?;
        }
    }

    /// Puts a server on record: `server NAME PORT [CUT [SYSTEM]]`.
    fn server(&mut self, name: &str, rest: &str) -> Result<(), Failed> {
        let words: Vec<_> = rest.split(' ').collect();
        let cut = words.get(1).filter(|word| **word != "-").map(|word| word.parse()).transpose()?;
        let system = match words.get(2) {
            Some(system) => system.parse()?,
            None => self.wal()?.system,
        };
        let settings = Settings {
            name: name.to_owned(),
            upstream: Some(self.dir.join(format!("{name}.wal"))),
            cut,
            port: words[0].parse()?,
            ..Settings::default()
        };
        let expected = Expected { major: 15, system };
        let (dir, site) = (self.dir.join(name), self.site.clone());
        let server = self.runtime.block_on(Server::new(dir, site, expected, settings))?;
        self.listen(name, &server)?;
        record(&self.dir, name, &server)?;
        self.servers.insert(name.to_owned(), Arc::new(tokio::sync::Mutex::new(server)));
        Ok(())
    }

    fn listen(&mut self, name: &str, server: &Server) -> Result<(), Failed> {
        let dir = self.dir.join(format!("{name}.wal"));
        self.sockets.remove(name);
        let socket = self.standbys.listen(SHARD, server.settings.cut, &dir, server.user())?;
        self.sockets.insert(name.to_owned(), socket);
        Ok(())
    }

    /// Has a server do something, while the store goes on.
    fn drive(
        &mut self,
        verb: &str,
        name: &str,
        rest: Option<&str>,
        line: &str,
    ) -> Result<(), Failed> {
        let server = Arc::clone(self.servers.get(name).ok_or("no such server")?);
        let base = rest.and_then(|base| self.servers.get(base)).map(Arc::clone);
        let (verb, name, line) = (verb.to_owned(), name.to_owned(), line.to_owned());
        let (rest, dir) = (rest.unwrap_or_default().to_owned(), self.dir.clone());
        self.runtime.spawn(async move {
            let mut server = server.lock().await;
            let done = act(&mut server, &verb, &name, &rest, base).await;
            let recorded = record(&dir, &name, &server);
            say(match done.and_then(|done| recorded.map(|()| done)) {
                Ok(done) => json!({"event": "done", "command": line, "result": done}),
                Err(error) => {
                    json!({"event": "failed", "command": line, "text": error.to_string()})
                }
            });
        });
        Ok(())
    }
}

async fn act(
    server: &mut Server,
    verb: &str,
    name: &str,
    rest: &str,
    base: Option<Arc<tokio::sync::Mutex<Server>>>,
) -> Result<Value, Failed> {
    Ok(match verb {
        "check" => {
            let problems = server.check(rest.parse().unwrap_or(0)).await;
            json!(problems.iter().map(ToString::to_string).collect::<Vec<_>>())
        }
        "bootstrap" => {
            let source = Source {
                conninfo: rest.to_owned(),
                password: None,
                fast_checkpoint: true,
                rate_max_kib: None,
            };
            let copied = server.bootstrap(&source, |copying| {
                say(json!({"event": "copying", "server": name, "done_kib": copying.done_kib,
                    "all_kib": copying.all_kib}));
            });
            let copied = copied.await?;
            json!({"usable_from": copied.usable_from.to_string(),
                "needs_from": copied.needs_from.to_string(), "timeline": copied.timeline})
        }
        "copy" => {
            let base = base.ok_or("no such base")?;
            let copied = server.copy_of(&*base.lock().await).await?;
            json!({"usable_from": copied.usable_from.to_string(),
                "needs_from": copied.needs_from.to_string(), "timeline": copied.timeline})
        }
        "start" => {
            let role = if rest == "primary" { Role::Primary } else { Role::Standby };
            server.start(role).await?;
            Value::Null
        }
        "status" => match server.status().await? {
            State::Stopped => json!({"state": "stopped"}),
            State::Recovering { said } => json!({"state": "recovering", "said": said}),
            State::Unknown { said } => json!({"state": "unknown", "said": said}),
            State::Standby { received, replayed, is_paused } => json!({"state": "standby",
                "received": received.map(|at| at.to_string()),
                "replayed": replayed.map(|at| at.to_string()), "is_paused": is_paused}),
            State::Primary { timeline, replayed } => json!({"state": "primary",
                "timeline": timeline, "replayed": replayed.map(|at| at.to_string())}),
        },
        "promote" => {
            let done = server.promote(rest.parse()?, Duration::from_secs(60)).await?;
            server.settings.upstream = None;
            json!({"replayed": done.replayed.map(|at| at.to_string()), "timeline": done.timeline,
                "waited_ms": done.waited_ms, "promoted_ms": done.promoted_ms})
        }
        "stop" => json!(format!("{:?}", server.stop().await?)),
        "remove" => {
            server.remove().await?;
            Value::Null
        }
        _ => return Err("no such command".into()),
    })
}

fn entry(end: Lsn, stamp: u64, data: Option<&[u8]>) -> Entry {
    let data = data.map(|data| Payload::new(data.to_vec().into()));
    Entry { end: LogIndex(end.0), stamp: Hlc(stamp), data, nop: false }
}

fn record(dir: &Path, name: &str, server: &Server) -> Result<(), Failed> {
    Ok(fs::write(dir.join(format!("{name}.json")), serde_json::to_vec(server)?)?)
}

fn heard(id: ConnectionId, event: &Event) -> Value {
    let mut line = match event {
        Event::LoggedIn { name } => json!({"event": "logged-in", "name": name}),
        Event::Started { from } => json!({"event": "started", "timeline": from.timeline.0,
            "at": from.at.to_string()}),
        Event::Status(status) => json!({"event": "status", "written": status.written.to_string(),
            "flushed": status.flushed.to_string(), "applied": status.applied.to_string()}),
        Event::TimelineEnded { timeline, next } => json!({"event": "timeline-ended",
            "timeline": timeline.0, "next": next.timeline.0, "at": next.at.to_string()}),
        Event::Stopped => json!({"event": "stopped"}),
        Event::Refused { command, reason } => {
            json!({"event": "refused", "command": command, "reason": reason})
        }
        Event::Ended(failure) => json!({"event": "ended", "kind": failure.kind(),
            "text": failure.to_string(), "needs_copy": failure.needs_copy()}),
    };
    line["connection"] = id.0.into();
    line
}

fn say(line: Value) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}
