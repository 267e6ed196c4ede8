//! A host that is played by the test, and the real server as a process.
use bytes::{Bytes, BytesMut};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Incarnation, Nonce, RunId, Seq, WriterId};
use tidelock_protocol::message::{
    Attach, Attached, DiskSpec, LastRun, Message, Mode, Role, StreamState, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

pub const DISK_BYTES: u64 = 4 << 20;
pub const CHANNEL: Channel = Channel(1);
/// Nothing here takes this long unless it hangs.
pub const HANG: Duration = Duration::from_secs(60);

pub fn config(dir: &Path, extra: &str) -> PathBuf {
    // QEMU runs as another user than a server that is root.
    let passable = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    std::fs::set_permissions(dir, passable).unwrap();
    let path = dir.join("backup.toml");
    let data = dir.join("data");
    let text = format!(
        "plaintext = true\n[server]\nname = \"backup\"\nlisten = \"127.0.0.1:0\"\n\
         data_dir = \"{}\"\n{extra}",
        data.display()
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// The server process. Killed when dropped.
pub struct Process {
    pub child: Child,
    pub address: SocketAddr,
}

impl Process {
    /// Starts it and waits until it listens.
    pub fn start(config: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
            .args(["--config", config.to_str().unwrap(), "serve"])
            .env("RUST_LOG", "info")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        use std::io::BufRead;
        let mut log = std::io::BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "the server ended");
            if let Some(at) = line.find("address=") {
                let rest = line[at + 8..].trim_start_matches("Some(").trim_start_matches('"');
                let end = rest.find(['"', ' ', '\n']).unwrap_or(rest.len());
                break rest[..end].parse().unwrap_or_else(|e| panic!("{e}: {line}"));
            }
        };
        // Its log must not fill the pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Self { child, address }
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; it must end by itself with success.
    pub fn terminate(mut self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the command line.
pub fn cli(config: &Path, args: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_tidelock-backup"))
        .args(["--config", config.to_str().unwrap()])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

pub fn cli_json(config: &Path, args: &[&str]) -> serde_json::Value {
    let output = cli(config, args);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {errors}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

/// Runs a command that must fail. Returns what it says.
pub fn refused(config: &Path, args: &[&str]) -> String {
    let output = cli(config, args);
    assert!(!output.status.success(), "{args:?}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Further configuration: a past.
pub const WINDOW: &str = "[retention]\nwindow = \"1h\"\n";

/// Further configuration: folds as soon as there is a MiB, and keeps no window.
pub const NO_WINDOW: &str =
    "[journal]\nsegment = \"1MiB\"\nfold_min = \"1MiB\"\n[retention]\nwindow = \"0s\"\n";

/// Records are a millisecond apart, from the beginning of 1970 on: seq and time are the same number.
pub fn at(seq: u64) -> String {
    format!("hlc:{seq}.0")
}

/// A server, and a host that has sent it records up to this one.
pub async fn replicated(config: &Path, to: u64) -> (Process, Host<TcpStream>) {
    let server = Process::start(config);
    let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
    host.record(&copy_done(1)).await.unwrap();
    send(&mut host, 2, to).await;
    (server, host)
}

/// Sends records, in batches that are smaller than the smallest segment here, until they are durable.
pub async fn send(host: &mut Host<TcpStream>, from: u64, to: u64) {
    for seq in from..=to {
        host.record(&record(seq)).await.unwrap();
        if seq % 150 == 0 || seq == to {
            host.durable(seq).await;
        }
    }
}

/// The group's disk at a point in time, exported and read.
pub fn exported(config: &Path, at: &str, dir: &Path) -> Vec<u8> {
    let image = dir.join("exported.img");
    let output = cli(config, &["export", "shop", "db.root", image.to_str().unwrap(), "--at", at]);
    assert!(output.status.success(), "{at}: {output:?}");
    let content = std::fs::read(&image).unwrap();
    std::fs::remove_file(image).unwrap();
    content
}

/// Files of the group's journal whose names end like this, in order.
pub fn journal_files(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let journal = dir.join("data/groups/shop/journal");
    let entries = std::fs::read_dir(journal).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> =
        entries.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    found.sort();
    found
}

/// Waits for something that happens beside.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < HANG, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a program is there; says so if not, and the test ends without a result.
pub fn has(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
    if !found {
        eprintln!("SKIPPED: {program} is not installed");
    }
    found
}

/// A host on any stream.
pub struct Host<T> {
    pub stream: T,
    input: BytesMut,
}

impl Host<TcpStream> {
    pub async fn plain(address: SocketAddr) -> Self {
        Self::new(TcpStream::connect(address).await.unwrap())
    }

    /// Connected, greeted, attached.
    pub async fn attached(address: SocketAddr, incarnation: u64, run: LastRun) -> (Self, Attached) {
        let mut host = Self::plain(address).await;
        host.hello("host-a").await;
        let attached = host.attach(attach(incarnation, run)).await.unwrap();
        (host, attached)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Host<T> {
    pub fn new(stream: T) -> Self {
        Self { stream, input: BytesMut::new() }
    }

    pub async fn send(&mut self, channel: Channel, message: &Message) {
        let mut bytes = BytesMut::new();
        frame::encode_control(channel, message, &mut bytes);
        self.stream.write_all(&bytes).await.unwrap();
    }

    pub async fn record(&mut self, record: &Record) -> std::io::Result<()> {
        let mut bytes = BytesMut::new();
        encode(record, &mut bytes);
        self.stream.write_all(&bytes).await
    }

    /// The next message; `None`: the server has closed.
    pub async fn next(&mut self) -> Option<(Channel, Message)> {
        let next = async {
            loop {
                match frame::decode(&mut self.input).unwrap() {
                    // Said on a busy machine while a record takes a second to arrive.
                    Some(Frame::Control(_, Message::Arriving)) => continue,
                    // Sent after each attachment of the group, whoever made it.
                    Some(Frame::Control(_, Message::TagTerms(_))) => continue,
                    Some(Frame::Control(channel, message)) => return Some((channel, message)),
                    Some(other) => panic!("{other:?}"),
                    None => {}
                }
                match self.stream.read_buf(&mut self.input).await {
                    Ok(1..) => {}
                    Ok(0) | Err(_) => return None,
                }
            }
        };
        tokio::time::timeout(HANG, next).await.expect("an answer")
    }

    /// The next byte, whatever it is.
    pub async fn next_raw(&mut self) -> Option<u8> {
        let read = tokio::time::timeout(HANG, self.stream.read_u8()).await;
        read.expect("an answer or the end").ok()
    }

    pub async fn hello(&mut self, name: &str) {
        let hello =
            Message::Hello { oldest: 1, newest: 1, host: name.into(), software: "test".into() };
        self.send(Channel(0), &hello).await;
        let answer = self.next().await;
        assert!(matches!(answer, Some((_, Message::Welcome { .. }))), "{answer:?}");
    }

    pub async fn attach(&mut self, attach: Attach) -> Result<Attached, Message> {
        self.send(CHANNEL, &Message::Attach(Box::new(attach))).await;
        loop {
            match self.next().await.expect("an answer") {
                (CHANNEL, Message::Attached(attached)) => return Ok(attached),
                // Of the attachment before.
                (CHANNEL, Message::Progress(_)) => {}
                (_, other) => return Err(other),
            }
        }
    }

    /// Reads until this seq is durable. Returns C.
    pub async fn durable(&mut self, seq: u64) -> u64 {
        loop {
            match self.next().await {
                Some((_, Message::Progress(told))) if told.durable.0 >= seq => {
                    return told.committed.get(WriterId(0)).0;
                }
                Some((_, Message::Progress(_))) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Reads to the end. Returns the last refusal.
    pub async fn refused(&mut self) -> Option<Message> {
        let mut last = None;
        while let Some((_, message)) = self.next().await {
            if matches!(message, Message::Refused { .. }) {
                last = Some(message);
            }
        }
        last
    }
}

pub fn encode(record: &Record, bytes: &mut BytesMut) {
    frame::encode_record_head(CHANNEL, record, bytes);
    bytes.extend_from_slice(record.payload().map_or(&[][..], |p| p.data()));
}

pub fn attach(incarnation: u64, last_run: LastRun) -> Attach {
    Attach {
        group: "shop".into(),
        group_id: None,
        member: "db".into(),
        writers: vec!["db".into()],
        epoch: Epoch(0),
        lease_ms: 400,
        grace_ms: 600,
        machine: Some(serde_json::from_str(r#"{"memory_mib": 64}"#).unwrap()),
        tagging: None,
        role: Role::Writer(Writing {
            writer: WriterId(0),
            disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: DISK_BYTES }],
            incarnation: Incarnation(incarnation),
            nonce: Nonce(incarnation, 0),
            before: Some(before(incarnation, last_run)),
            marks: Vec::new(),
            last_run,
            mode: Mode::Pipelined,
        }),
    }
}

/// The same with other disks or another run.
pub fn but(mut attach: Attach, change: impl FnOnce(&mut Writing)) -> Attach {
    change(attach.writing_mut().expect("a writer"));
    attach
}

/// The backup's answer to a writer.
pub fn stream(attached: &Attached) -> &StreamState {
    attached.stream.as_ref().expect("a writer")
}

/// The record of a seq: the same each time, so that it can be sent again.
pub fn record(seq: u64) -> Record {
    let mix = seq.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let len = 512 * (1 + mix % 8);
    let offset = (mix >> 20) % ((DISK_BYTES - len) / 512) * 512;
    let data: Bytes = vec![(seq % 251) as u8; len as usize].into();
    let effect = if seq.is_multiple_of(17) {
        Effect::Zero { len_bytes: len as u32, no_hole: false }
    } else {
        Effect::Write(Payload::new(data))
    };
    Record {
        writer: WriterId(0),
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(seq << 16),
        deps: CountVector::new(),
        body: DiskChange {
            disk: DiskId(0),
            offset,
            copy: false,
            flushed: seq.is_multiple_of(10),
            effect,
        },
    }
}

pub fn copy_done(seq: u64) -> Record {
    Record {
        body: DiskChange {
            offset: 0,
            copy: true,
            flushed: false,
            effect: Effect::CopyDone,
            ..record(seq).body
        },
        ..record(seq)
    }
}

/// The disk after the records up to a seq, of which the first is a `CopyDone`.
pub fn disk_after(seq: u64) -> Vec<u8> {
    let mut disk = vec![0; DISK_BYTES as usize];
    for record in (2..=seq).map(record) {
        let range = record.body.offset as usize
            ..(record.body.offset as usize + record.body.len_bytes() as usize);
        match record.payload() {
            Some(payload) => disk[range].copy_from_slice(payload.data()),
            None => disk[range].fill(0),
        }
    }
    disk
}

/// A host of these tests ends each run before it begins the next, or goes on with it.
fn before(incarnation: u64, last_run: LastRun) -> RunId {
    let number = match last_run {
        LastRun::Continues { .. } => incarnation,
        _ => incarnation - 1,
    };
    RunId { number: Incarnation(number), nonce: Nonce(number, 0) }
}
