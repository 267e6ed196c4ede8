//! Serves the log in a directory of `wal-receive` to standbys, up to a bound.
//!
//! `wal-serve DIRECTORY ADDRESS:PORT USER`, with the standbys' password in PGPASSWORD (SCRAM), or none. Each line of
//! the standard input is a bound, as X/X: what is before it must be durable in the directory. The first connection is
//! accepted after the first line; at the end of the input the program ends. Events are JSON, one a line.

mod segments;

use segments::{Segments, files, histories};
use serde_json::json;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, thread};
use tidelock_pgstream::{
    Access, Lineage, Now, Proof, ScramVerifier, Sender, SenderEvent, Served, Timing,
};
use tidelock_wal::{Lsn, PgTimestamp, TimelineId};

/// Input of a connection's thread.
enum Input {
    Received(Vec<u8>),
    Closed,
    /// The bound, or the timelines, have moved.
    Moved,
}

/// Facts that all connections share.
struct Shared {
    served: Served,
    connections: Vec<SyncSender<Input>>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [directory, address, user] = &words[..] else {
        return Err("wal-serve DIRECTORY ADDRESS:PORT USER".into());
    };
    let directory = PathBuf::from(directory);
    let proof = match env::var("PGPASSWORD") {
        Ok(password) => Proof::Scram(ScramVerifier::of_password(&password)?),
        Err(_) => Proof::Trust,
    };
    let access = Access { user: Some(user.clone()), proof };
    let listener = TcpListener::bind(address)?;
    say(json!({"event": "listening", "port": listener.local_addr()?.port()}));
    let mut shared: Option<Arc<Mutex<Shared>>> = None;
    let mut listener = Some(listener);
    for line in io::stdin().lock().lines() {
        let served = served(&directory, line?.trim().parse()?)?;
        say(json!({"event": "bound", "lsn": served.bound.to_string()}));
        match &shared {
            None => {
                let all = Arc::new(Mutex::new(Shared { served, connections: vec![] }));
                shared = Some(all.clone());
                let (directory, access) = (directory.clone(), access.clone());
                if let Some(listener) = listener.take() {
                    thread::spawn(move || accept(&listener, &directory, &access, &all));
                }
            }
            Some(all) => {
                let mut all = all.lock().map_err(|_| "a thread has failed")?;
                all.served = served;
                // Full queues do no harm: a connection that has something to do looks for itself before it waits again.
                all.connections.retain(|connection| {
                    !matches!(connection.try_send(Input::Moved), Err(TrySendError::Disconnected(_)))
                });
            }
        }
    }
    Ok(())
}

/// Looks at the directory: whose log it is, and which timelines it has.
fn served(directory: &Path, bound: Lsn) -> Result<Served, Box<dyn Error>> {
    let names = files(directory)?;
    let segment_names: Vec<_> = names.iter().filter(|name| name.len() == 24).collect();
    let first = segment_names.first().ok_or("no segment is there")?;
    let mut head = [0; 40];
    File::open(directory.join(first))?.read_exact(&mut head)?;
    let number = |at: usize, bytes: usize| {
        head[at..at + bytes].iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte))
    };
    let version = match number(0, 2) {
        0xD110 => 150_000,
        0xD113 => 160_000,
        0xD116 => 170_000,
        magic => return Err(format!("{first}: unknown magic {magic:04X}").into()),
    };
    let histories = histories(directory)?;
    let last = histories.keys().next_back().copied().unwrap_or(TimelineId(1));
    let histories = histories.into_iter().map(|(id, file)| (id, file.into())).collect();
    Ok(Served {
        system: number(24, 8),
        version,
        segment_bytes: u32::try_from(number(32, 4))?,
        lineage: Lineage::new(last, histories)?,
        bound,
    })
}

fn accept(listener: &TcpListener, directory: &Path, access: &Access, all: &Arc<Mutex<Shared>>) {
    for (number, socket) in listener.incoming().enumerate() {
        let Ok(socket) = socket else { continue };
        let (directory, access) = (directory.to_path_buf(), access.clone());
        let (input, inputs) = sync_channel(4);
        let Ok(mut shared) = all.lock() else { return };
        shared.connections.push(input.clone());
        let served = shared.served.clone();
        drop(shared);
        let shared = all.clone();
        let Ok(readable) = socket.try_clone() else { continue };
        thread::spawn(move || read(readable, &input));
        thread::spawn(move || {
            let mut connection = Connection {
                number,
                segments: Segments::new(&directory, served.segment_bytes),
                socket,
                shared,
            };
            if let Err(error) = connection.serve(served, access, &inputs) {
                say(json!({"event": "error", "connection": number, "text": error.to_string()}));
            }
        });
    }
}

fn read(mut socket: TcpStream, inputs: &SyncSender<Input>) {
    let mut bytes = vec![0; 8 << 10];
    while let Ok(length @ 1..) = socket.read(&mut bytes) {
        if inputs.send(Input::Received(bytes[..length].to_vec())).is_err() {
            return;
        }
    }
    let _ = inputs.send(Input::Closed);
}

struct Connection {
    number: usize,
    segments: Segments,
    socket: TcpStream,
    shared: Arc<Mutex<Shared>>,
}

impl Connection {
    fn serve(
        &mut self,
        mut served: Served,
        access: Access,
        inputs: &Receiver<Input>,
    ) -> Result<(), Box<dyn Error>> {
        self.socket.set_nodelay(true)?;
        let begun = Instant::now();
        let mut nonce = [0; 18];
        File::open("/dev/urandom")?.read_exact(&mut nonce)?;
        let mut sender = Sender::new(served.clone(), access, Timing::default(), nonce, now(begun));
        let mut bytes = vec![0; tidelock_pgstream::limits::WAL_MESSAGE_BYTES_MAX];
        loop {
            let now_served = self.shared.lock().map_err(|_| "a thread has failed")?.served.clone();
            if now_served.lineage != served.lineage {
                sender.extend(now_served.lineage.clone());
            }
            sender.advance(now_served.bound);
            served = now_served;
            let mut has_ended = false;
            while let Some(event) = sender.poll() {
                has_ended |= matches!(event, SenderEvent::Ended(_));
                self.say(&event);
            }
            while let Some(wanted) = sender.wanted() {
                let timelines: Vec<_> = (1..wanted.from.timeline.0).map(TimelineId).collect();
                let part = &mut bytes[..wanted.bytes_max];
                let length = self.segments.read(wanted.from, &timelines, part)?;
                if length == 0 {
                    return Err(format!("the directory does not have {}", wanted.from).into());
                }
                sender.wal(wanted.from.at, &part[..length])?;
                self.socket.write_all(&sender.output().split())?;
            }
            self.socket.write_all(&sender.output().split())?;
            if has_ended {
                return Ok(self.socket.shutdown(std::net::Shutdown::Both)?);
            }
            let wait = sender.deadline().map_or(Duration::from_secs(3600), |at| {
                at.saturating_sub(begun.elapsed()).max(Duration::from_millis(1))
            });
            let input = inputs.recv_timeout(wait);
            sender.tick(now(begun));
            match input {
                Ok(Input::Received(bytes)) => sender.received(&bytes),
                Ok(Input::Closed) => sender.closed(),
                Ok(Input::Moved) => {}
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    fn say(&self, event: &SenderEvent) {
        let mut line = match event {
            SenderEvent::LoggedIn(client) => {
                json!({"event": "logged-in", "user": client.user, "name": client.application_name})
            }
            SenderEvent::Started { slot, from } => json!({"event": "started",
                "slot": slot.as_ref().map(ToString::to_string),
                "timeline": from.timeline.0, "at": from.at.to_string()}),
            SenderEvent::Status(status) => json!({"event": "status",
                "written": status.written.to_string(), "flushed": status.flushed.to_string(),
                "applied": status.applied.to_string()}),
            SenderEvent::TimelineEnded { timeline, next } => json!({"event": "timeline-ended",
                "timeline": timeline.0, "next": next.timeline.0, "at": next.at.to_string()}),
            SenderEvent::Stopped => json!({"event": "stopped"}),
            SenderEvent::Identified => json!({"event": "identified"}),
            SenderEvent::Refused { command, reason, .. } => {
                json!({"event": "refused", "command": command, "reason": reason})
            }
            SenderEvent::Ended(end) => {
                json!({"event": "ended", "kind": end.kind(), "text": end.to_string()})
            }
        };
        line["connection"] = self.number.into();
        say(line);
    }
}

fn now(begun: Instant) -> Now {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall = i64::try_from(wall.as_nanos()).unwrap_or(i64::MAX);
    Now { mono: begun.elapsed(), wall: PgTimestamp::from_unix_ns(wall) }
}

fn say(line: serde_json::Value) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}
