//! Receives the log of a PostgreSQL server into segment files, and reports as flushed what is durable in them.
//!
//! `wal-receive DIRECTORY SLOT USER HOST...`, with the password in PGPASSWORD. A host is `unix:PATH` or `ADDRESS:PORT`;
//! if a connection fails in a way that may pass, the next one is tried, over and over. The slot is made on a host that
//! is not known to have had it (file `slots` in the directory). Events are JSON, one a line.
//!
//! A program to try the protocol with: it accepts every method of authentication, and encrypts nothing.

mod segments;

use segments::{Segments, last_segment};
use serde_json::json;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, thread};
use tidelock_pgstream::{
    Event, Failure, Login, Now, PasswordMethod, Position, Receiver, SlotName, SlotUse, Start,
    Timing,
};
use tidelock_wal::PgTimestamp;

/// Pause before the next host is tried.
const PAUSE: Duration = Duration::from_millis(100);

/// Facts that outlive a connection.
struct Shard {
    directory: PathBuf,
    slot: SlotName,
    login: Login,
    /// System of the first server.
    system: Option<u64>,
    /// Position of the next byte.
    next: Option<Position>,
    begun: Instant,
}

trait Socket: Read + Write {
    fn wait_at_most(&self, time: Duration) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn wait_at_most(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))
    }
}

impl Socket for UnixStream {
    fn wait_at_most(&self, time: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(time))
    }
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [directory, slot, user, hosts @ ..] = &words[..] else {
        return Err("wal-receive DIRECTORY SLOT USER HOST...".into());
    };
    let login = Login {
        user: user.clone(),
        password: env::var("PGPASSWORD").ok(),
        application_name: slot.clone(),
        weakest: PasswordMethod::Cleartext,
    };
    let mut shard = Shard {
        directory: directory.into(),
        slot: slot.parse()?,
        login,
        system: None,
        next: None,
        begun: Instant::now(),
    };
    for host in hosts.iter().cycle() {
        say(json!({"event": "connecting", "host": host}));
        let failure = match connect(host) {
            Ok(mut socket) => shard.receive(host, &mut *socket)?,
            Err(error) => {
                say(json!({"event": "unreachable", "host": host, "text": error.to_string()}));
                thread::sleep(PAUSE);
                continue;
            }
        };
        let (kind, is_passing) = (failure.kind(), failure.is_passing());
        say(json!({"event": "failed", "host": host, "kind": kind, "passing": is_passing,
            "text": failure.to_string()}));
        if !is_passing {
            return Ok(ExitCode::FAILURE);
        }
        thread::sleep(PAUSE);
    }
    Err("no host is named".into())
}

fn connect(host: &str) -> io::Result<Box<dyn Socket>> {
    match host.strip_prefix("unix:") {
        Some(path) => Ok(Box::new(UnixStream::connect(path)?)),
        None => {
            let socket = TcpStream::connect(host)?;
            socket.set_nodelay(true)?;
            Ok(Box::new(socket))
        }
    }
}

impl Shard {
    /// Streams from one server, until it cannot go on.
    fn receive(&mut self, host: &str, socket: &mut dyn Socket) -> Result<Failure, Box<dyn Error>> {
        let (login, timing) = (self.login.clone(), Timing::default());
        let mut receiver = Receiver::new(login, self.system, timing, now(self.begun))?;
        let mut segments = Segments::new(&self.directory, 1 << 24);
        let mut input = vec![0; 256 << 10];
        loop {
            let before = self.next;
            while let Some(event) = receiver.poll() {
                if let Event::Failed(failure) = event {
                    return Ok(failure);
                }
                self.act(host, event, &mut receiver, &mut segments)?;
            }
            if let Some(next) = self.next.filter(|_| self.next != before) {
                receiver.flushed(next.at);
                let timeline = next.timeline.0;
                say(json!({"event": "flushed", "lsn": next.at.to_string(), "timeline": timeline}));
            }
            let output = receiver.output().split();
            if socket.write_all(&output).is_err() {
                receiver.closed();
                continue;
            }
            let time = now(self.begun).mono;
            let wait =
                receiver.deadline().map_or(Duration::from_secs(1), |at| at.saturating_sub(time));
            socket.wait_at_most(wait.max(Duration::from_millis(1)))?;
            match socket.read(&mut input) {
                Ok(0) => receiver.closed(),
                Ok(bytes) => {
                    receiver.tick(now(self.begun));
                    receiver.received(&input[..bytes]);
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {
                        receiver.tick(now(self.begun));
                    }
                    _ => receiver.closed(),
                },
            }
        }
    }

    fn act(
        &mut self,
        host: &str,
        event: Event,
        receiver: &mut Receiver,
        segments: &mut Segments,
    ) -> Result<(), Box<dyn Error>> {
        match event {
            Event::Identified(identity) => {
                say(json!({"event": "identified", "system": identity.system.to_string(),
                    "timeline": identity.end.timeline.0, "end": identity.end.at.to_string(),
                    "version": identity.version, "segment_bytes": identity.segment_bytes}));
                self.system = Some(identity.system);
                *segments = Segments::new(&self.directory, identity.segment_bytes);
                if self.next.is_none() {
                    self.next = last_segment(&self.directory, identity.segment_bytes)?;
                }
                let create = !self.slots()?.iter().any(|known| known == host);
                let slot = Some(SlotUse { name: self.slot.clone(), create });
                receiver.start(Start { slot, from: self.next })?;
            }
            Event::History { timeline, file, .. } => {
                say(json!({"event": "history", "timeline": timeline.0}));
                let name = format!("{:08X}.history", timeline.0);
                replace(&self.directory, &name, &file)?;
            }
            Event::SlotCreated(name) => {
                say(json!({"event": "slot-created", "slot": name.as_str(), "host": host}));
                let slots = [self.slots()?, vec![host.into()]].concat();
                replace(&self.directory, "slots", slots.join("\n").as_bytes())?;
            }
            Event::Started(from) => {
                say(json!({"event": "started", "timeline": from.timeline.0,
                    "at": from.at.to_string()}));
                if let Some(before) = self.next.filter(|next| next.timeline < from.timeline) {
                    segments.branch(before.timeline, from)?;
                }
                self.next = Some(from);
            }
            Event::Wal { bytes, .. } => {
                let next = self.next.as_mut().ok_or("log before the start")?;
                segments.append(*next, &bytes)?;
                next.at.0 += bytes.len() as u64;
            }
            Event::TimelineEnds { timeline, next } => {
                say(json!({"event": "timeline-ends", "timeline": timeline.0,
                    "next": next.timeline.0, "at": next.at.to_string()}));
                segments.branch(timeline, next)?;
                self.next = Some(next);
            }
            Event::Keepalive { .. } | Event::Failed(_) => {}
        }
        Ok(())
    }

    /// Hosts that have had the slot.
    fn slots(&self) -> io::Result<Vec<String>> {
        match fs::read_to_string(self.directory.join("slots")) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(vec![]),
            Err(error) => Err(error),
        }
    }
}

/// Writes a small file so that it is there as a whole or not at all.
fn replace(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let new = directory.join(format!("{name}.new"));
    let mut file = File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(new, directory.join(name))?;
    File::open(directory)?.sync_all()
}

fn now(begun: Instant) -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = i64::try_from(wall.as_nanos()).unwrap_or(i64::MAX);
    Now { mono: begun.elapsed(), wall: PgTimestamp::from_unix_ns(wall) }
}

fn say(line: serde_json::Value) {
    // Nobody listens any more: the log is what matters.
    let _ = writeln!(io::stdout().lock(), "{line}");
}
