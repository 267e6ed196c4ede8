//! The primary side of a PostgreSQL shard, with a backup in memory and in files.
//!
//! `shard-agent DIRECTORY SLOT USER HOST...`, with the password in PGPASSWORD. A host is `ADDRESS:PORT`. The backup's
//! log is the file `log` in the directory, its standing `state.json`; a later run goes on from there. Events are
//! JSON, one a line. Lines of the standard input are commands:
//!
//! | command | meaning |
//! |---|---|
//! | `clock good`, `clock bad` | the guard's verdict from now on; at first it is good |
//! | `updated` | another shard of the store has written now |
//! | `backup up`, `backup down` | the connection to the backup; at first it is up |
//! | `make-slot`, `copied-anew` | the operator's orders |
//! | `status` | prints the status |
//!
//! A program to try the agent with: it accepts every method of authentication, and encrypts nothing.

use serde_json::json;
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, thread};
use tidelock_clock::{Verdict, Why};
use tidelock_pgstream::{Login, Now, PasswordMethod};
use tidelock_protocol::hlc::Hlc;
use tidelock_shard::link::Origin;
use tidelock_shard::{Backup, Bsa, Closing, LogPoint, Reply, Standing, stamp_at, unix_ns_of};
use tidelock_shard_agent::{Action, Config, Conn, ShardAgent};
use tidelock_wal::{Lsn, PgTimestamp};

/// Time between two verdicts of the clock, if nothing happens.
const VERDICT_EVERY: Duration = Duration::from_millis(100);
const CLOCK_ERROR_MAX_NS: u64 = 1_000_000;
/// Numbers of connections tell late input of an earlier one apart.
type Number = usize;

/// Input of the loop.
enum Input {
    Connected(Number, Conn, io::Result<TcpStream>),
    Received(Number, Conn, io::Result<Vec<u8>>),
    Command(String),
    End,
}

/// A connection, whose thread reads once for each permit.
struct Socket {
    number: Number,
    stream: Option<TcpStream>,
    permit: Option<Sender<()>>,
    is_reading: bool,
}

/// The backup: everything is durable at once.
struct FarSite {
    directory: PathBuf,
    bsa: Bsa,
    origin: Option<Origin>,
    log: File,
    is_up: bool,
}

struct Driver {
    agent: ShardAgent,
    far: FarSite,
    hosts: Vec<String>,
    begun: Instant,
    verdict: Verdict,
    input: Sender<Input>,
    sockets: [Option<Socket>; 2],
    numbers: Number,
    replies: Vec<Reply>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [directory, slot, user, hosts @ ..] = &words[..] else {
        return Err("shard-agent DIRECTORY SLOT USER HOST...".into());
    };
    let login = Login {
        user: user.clone(),
        password: env::var("PGPASSWORD").ok(),
        application_name: slot.clone(),
        weakest: PasswordMethod::Cleartext,
    };
    let mut config = Config::new(hosts.len(), login, slot.parse()?, CLOCK_ERROR_MAX_NS);
    config.look_every = Duration::from_millis(200);
    let begun = Instant::now();
    let (input, inputs) = channel();
    let mut driver = Driver {
        agent: ShardAgent::new(config, now(begun)),
        far: FarSite::open(Path::new(directory))?,
        hosts: hosts.to_vec(),
        begun,
        verdict: Verdict::Believed { epsilon_ns: 50_000 },
        input: input.clone(),
        sockets: [None, None],
        numbers: 0,
        replies: vec![],
    };
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if input.send(Input::Command(line)).is_err() {
                return;
            }
        }
        let _ = input.send(Input::End);
    });
    driver.agent.backup_connected(driver.far.origin.clone(), now(begun));
    driver.run(&inputs)
}

impl Driver {
    fn now(&self) -> Now {
        now(self.begun)
    }

    fn run(&mut self, inputs: &Receiver<Input>) -> Result<(), Box<dyn Error>> {
        loop {
            self.act()?;
            let time = self.now().mono;
            let wait = self.agent.deadline().map_or(VERDICT_EVERY, |at| at.saturating_sub(time));
            let input = inputs.recv_timeout(wait.min(VERDICT_EVERY));
            let now = self.now();
            self.agent.clock(self.verdict, now);
            match input {
                Ok(Input::Connected(number, conn, result)) => self.connected(number, conn, result),
                Ok(Input::Received(number, conn, result)) => self.received(number, conn, result),
                Ok(Input::Command(command)) => self.command(&command)?,
                Err(RecvTimeoutError::Timeout) => self.agent.tick(now),
                Ok(Input::End) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Carries out what the agent wants, and sends what there is.
    fn act(&mut self) -> Result<(), Box<dyn Error>> {
        loop {
            while let Some(action) = self.agent.poll() {
                self.carry_out(action)?;
            }
            for conn in [Conn::Look, Conn::Stream] {
                self.send(conn);
                self.permit(conn);
            }
            if self.replies.is_empty() {
                return Ok(());
            }
            for reply in std::mem::take(&mut self.replies) {
                let now = self.now();
                self.agent.reply(&reply, now)?;
            }
        }
    }

    fn carry_out(&mut self, action: Action) -> Result<(), Box<dyn Error>> {
        match action {
            Action::Connect { conn, host } => self.connect(conn, host),
            Action::Disconnect(conn) => {
                if let Some(Socket { stream: Some(stream), .. }) = self.sockets[place(conn)].take()
                {
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
            Action::Origin(origin) => {
                say(json!({"event": "origin", "system": origin.system_id.to_string(),
                    "timeline": origin.timeline, "history": origin.history}));
                self.far.origin = Some(origin);
                self.far.save()?;
            }
            Action::Doubt { after, through } => {
                say(json!({"event": "doubt", "after": after.0, "through": through.0}));
            }
            Action::Backup(message) if self.far.is_up => {
                self.replies.push(self.far.received(message)?);
            }
            Action::Backup(_) => {}
            Action::Stands(reason) => say(json!({"event": "stands", "reason": reason})),
            Action::Failed { host, failure, advice } => {
                say(json!({"event": "failed", "host": host, "kind": failure.kind(),
                    "passing": failure.is_passing(), "text": failure.to_string(), "advice": advice}));
            }
        }
        Ok(())
    }

    fn connect(&mut self, conn: Conn, host: usize) {
        self.numbers += 1;
        let (number, address) = (self.numbers, self.hosts[host].clone());
        self.sockets[place(conn)] =
            Some(Socket { number, stream: None, permit: None, is_reading: false });
        let input = self.input.clone();
        thread::spawn(move || {
            let socket = TcpStream::connect(address);
            if let Ok(socket) = &socket {
                let _ = socket.set_nodelay(true);
            }
            let _ = input.send(Input::Connected(number, conn, socket));
        });
    }

    fn connected(&mut self, number: Number, conn: Conn, result: io::Result<TcpStream>) {
        let now = self.now();
        let Some(socket) = self.sockets[place(conn)].as_mut().filter(|of| of.number == number)
        else {
            return;
        };
        let stream = result.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let (readable, stream) = match stream {
            Ok(both) => both,
            Err(error) => {
                self.sockets[place(conn)] = None;
                return self.agent.unreachable(conn, &error.to_string(), now);
            }
        };
        let (permit, permits) = channel();
        (socket.stream, socket.permit) = (Some(stream), Some(permit));
        let input = self.input.clone();
        thread::spawn(move || read(readable, number, conn, &permits, &input));
        self.agent.connected(conn, now);
    }

    fn received(&mut self, number: Number, conn: Conn, result: io::Result<Vec<u8>>) {
        let now = self.now();
        let Some(socket) = self.sockets[place(conn)].as_mut().filter(|of| of.number == number)
        else {
            return;
        };
        socket.is_reading = false;
        match result {
            Ok(bytes) if !bytes.is_empty() => self.agent.received(conn, &bytes, now),
            Ok(_) | Err(_) => {
                socket.permit = None;
                self.agent.closed(conn, now);
            }
        }
    }

    /// Sends what the agent has for a server. A server that is gone is noticed by the thread that reads.
    fn send(&mut self, conn: Conn) {
        let Some(Socket { stream: Some(stream), .. }) = &mut self.sockets[place(conn)] else {
            return;
        };
        if let Some(output) = self.agent.output(conn).filter(|output| !output.is_empty()) {
            let _ = stream.write_all(&output.split());
        }
    }

    fn permit(&mut self, conn: Conn) {
        let wants = self.agent.wants(conn);
        let Some(socket) = self.sockets[place(conn)].as_mut() else { return };
        if let Some(permit) = socket.permit.as_ref().filter(|_| wants && !socket.is_reading) {
            socket.is_reading = permit.send(()).is_ok();
        }
    }

    fn command(&mut self, command: &str) -> Result<(), Box<dyn Error>> {
        let now = self.now();
        match command.trim() {
            "clock good" => self.verdict = Verdict::Believed { epsilon_ns: 50_000 },
            "clock bad" => self.verdict = Verdict::NotBelieved { why: Why::NoMaster },
            "updated" => {
                let wall = u64::try_from(now.wall.unix_ns().unwrap_or(0)).unwrap_or(0);
                self.agent.progress(Hlc(0), stamp_at(wall), now);
            }
            "backup up" => {
                self.far.is_up = true;
                self.agent.backup_connected(self.far.origin.clone(), now);
            }
            "backup down" => {
                self.far.is_up = false;
                self.replies.clear();
                self.agent.backup_lost(now);
            }
            "make-slot" => self.agent.make_slot(now),
            "copied-anew" => self.agent.copied_anew(now),
            "status" => say(json!({"event": "status", "status": self.agent.status()})),
            _ => return Err(format!("unknown command: {command}").into()),
        }
        self.agent.clock(self.verdict, now);
        say(json!({"event": "command", "command": command.trim()}));
        Ok(())
    }
}

impl FarSite {
    fn open(directory: &Path) -> Result<FarSite, Box<dyn Error>> {
        let (mut at, mut origin) = (LogPoint::default(), None);
        if let Ok(text) = fs::read_to_string(directory.join("state.json")) {
            (at, origin) = serde_json::from_str(&text)?;
        }
        let log = OpenOptions::new().create(true).append(true).open(directory.join("log"))?;
        let standing = Standing { append: at, commit: at };
        let bsa = Bsa::leading(standing, Closing::Open);
        Ok(FarSite { directory: directory.into(), bsa, origin, log, is_up: true })
    }

    fn received(&mut self, message: Backup) -> Result<Reply, Box<dyn Error>> {
        let mut received = self.bsa.received(message)?;
        for entry in &received.append {
            let bytes = entry.data.as_ref().map(|data| data.data().clone()).unwrap_or_default();
            self.log.write_all(&bytes)?;
            say(
                json!({"event": "entry", "end": Lsn(entry.end.0).to_string(), "stamp": entry.stamp.0,
                "unix_ns": unix_ns_of(entry.stamp), "bytes": bytes.len(), "nop": entry.nop,
                "jump": entry.data.is_none()}),
            );
        }
        if let Some(entry) = received.append.last() {
            self.bsa.committed(entry.point());
            self.save()?;
        }
        if let tidelock_shard::Verdict::Taken(standing) = &mut received.reply.verdict {
            *standing = self.bsa.standing().unwrap_or_default();
        }
        Ok(received.reply)
    }

    fn save(&self) -> Result<(), Box<dyn Error>> {
        let at = self.bsa.standing().unwrap_or_default().commit;
        let text = serde_json::to_string(&(at, &self.origin))?;
        fs::write(self.directory.join("state.new"), text)?;
        Ok(fs::rename(self.directory.join("state.new"), self.directory.join("state.json"))?)
    }
}

fn read(
    mut socket: TcpStream,
    number: Number,
    conn: Conn,
    permits: &Receiver<()>,
    input: &Sender<Input>,
) {
    let mut bytes = vec![0; 256 << 10];
    while permits.recv().is_ok() {
        let result = socket.read(&mut bytes).map(|read| bytes[..read].to_vec());
        let is_over = result.as_ref().map_or(true, Vec::is_empty);
        if input.send(Input::Received(number, conn, result)).is_err() || is_over {
            return;
        }
    }
}

fn place(conn: Conn) -> usize {
    match conn {
        Conn::Look => 0,
        Conn::Stream => 1,
    }
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
