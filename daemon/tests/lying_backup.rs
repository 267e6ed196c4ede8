//! `tidelockd` against a backup that lies in well-formed messages: the daemon lives, believes nothing of it, and protects
//! its member as soon as the truth is told.

use bytes::BytesMut;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, Epoch, GroupId, Seq, WriterId};
use tidelock_protocol::message::{
    Attached, Basis, CopyState, Message, PROTOCOL, Progress, StreamState,
};
use tidelock_protocol::record::Role;
use tidelock_protocol::vector::CountVector;

/// Far more than anything here takes; only a failure lasts so long.
const PATIENCE: Duration = Duration::from_secs(120);
const DISK_BYTES: u64 = 1 << 20;
const FAR_MS: u64 = 8 * 3_600_000;
const MEMBER: Channel = Channel(1);

/// A process that is killed when the test ends, however it ends.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One connection, from the backup's side.
struct Connection {
    stream: TcpStream,
    input: BytesMut,
}

impl Connection {
    /// Greeted, and asked to attach the member.
    fn accept(listener: &TcpListener) -> Self {
        // A daemon that has ended connects no more.
        let until = Instant::now() + PATIENCE;
        listener.set_nonblocking(true).unwrap();
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    assert!(Instant::now() < until, "nobody connects");
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => panic!("{error}"),
            }
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut connection = Self { stream, input: BytesMut::new() };
        let hello = connection.next();
        assert!(matches!(hello, Some(Frame::Control(_, Message::Hello { .. }))), "{hello:?}");
        let (server, software) = ("backup".to_owned(), "a test".to_owned());
        connection.send(Channel(0), &Message::Welcome { protocol: PROTOCOL.1, server, software });
        let attach = connection.next();
        assert!(matches!(attach, Some(Frame::Control(MEMBER, Message::Attach(_)))), "{attach:?}");
        connection
    }

    fn send(&mut self, channel: Channel, message: &Message) {
        let mut out = BytesMut::new();
        frame::encode_control(channel, message, &mut out);
        self.stream.write_all(&out).unwrap();
    }

    /// `None`: the host has closed the connection.
    fn next(&mut self) -> Option<Frame> {
        let mut bytes = [0; 64 << 10];
        loop {
            if let Some(frame) = frame::decode(&mut self.input).unwrap() {
                return Some(frame);
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => return None,
                Ok(count) => self.input.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The host closes the connection, whatever was under way.
    fn hears_the_end(mut self) {
        while self.next().is_some() {}
    }
}

fn attached(last_hlc: Hlc, copy: CopyState) -> Message {
    Message::Attached(Attached {
        group_id: GroupId([7; 16]),
        epoch: Epoch(1),
        progress: Progress::default(),
        stream: Some(StreamState { last_hlc, copy, begun: None, basis: Basis::Log }),
    })
}

fn wall_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(now.unwrap().as_millis()).unwrap()
}

fn files_of(directory: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_of(&path) } else { vec![path] }).collect()
}

#[test]
fn a_backup_that_lies_ends_connections_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = directory.path().display();
    fs::File::create(file("d.img")).unwrap().set_len(DISK_BYTES).unwrap();
    fs::write(
        file("host.toml"),
        format!(
            "[host]\nname = \"h\"\nruntime_dir = \"{at}/run\"\nstate_dir = \"{at}/state\"\n[backup]\n\
             address = \"{}\"\nplaintext = true\n[[group]]\nname = \"g\"\n[[group.member]]\nname = \"m\"\n\
             roles = [\"writer\"]\n[[group.member.disk]]\nname = \"d\"\npath = \"{at}/d.img\"\n",
            listener.local_addr().unwrap()
        ),
    )
    .unwrap();
    let log = fs::File::create(file("log")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidelockd"));
    command.arg("--config").arg(file("host.toml")).stdin(Stdio::null());
    command.stdout(log.try_clone().unwrap()).stderr(log);
    let mut daemon = Process(command.spawn().unwrap());

    for last_hlc in [Hlc(u64::MAX), Hlc(u64::MAX), Hlc::new(wall_ms() + FAR_MS, 0)] {
        let mut liar = Connection::accept(&listener);
        liar.send(MEMBER, &attached(last_hlc, CopyState::Empty));
        liar.hears_the_end();
    }
    for lie in [
        Message::Progress(Progress { durable: Seq(u64::MAX), ..Progress::default() }),
        Message::Floor { pending: CountVector::new(), hlc: Hlc(u64::MAX) },
        Message::Detach { end: None },
    ] {
        let mut liar = Connection::accept(&listener);
        liar.send(MEMBER, &attached(Hlc(0), CopyState::Empty));
        liar.send(MEMBER, &lie);
        liar.hears_the_end();
    }

    let mut honest = Connection::accept(&listener);
    honest.send(MEMBER, &attached(Hlc(0), CopyState::Partial));
    let end = loop {
        match honest.next().expect("nothing ends the connection") {
            Frame::Record(_, record) => {
                assert!(record.hlc.physical_ms() < wall_ms() + FAR_MS / 2, "{}", record.hlc);
                let committed = CountVector::of(WriterId(0), record.seq);
                let progress = Progress { durable: record.seq, committed, ..Progress::default() };
                honest.send(MEMBER, &Message::Progress(progress));
                if record.role() == Role::CopyDone {
                    break record.seq;
                }
            }
            Frame::Control(
                _,
                Message::DigestCheck { disk, offset, .. } | Message::ZeroCheck { disk, offset, .. },
            ) => honest.send(MEMBER, &Message::DigestResult { disk, offset, equal: true }),
            Frame::Control(_, Message::Policy(policy)) => {
                honest.send(MEMBER, &Message::PolicyKept(policy));
            }
            Frame::Control(_, Message::Beacon { sent_at }) => {
                honest.send(MEMBER, &Message::Lease { sent_at });
            }
            _ => {}
        }
    };
    assert!(end > Seq::ZERO);
    assert!(daemon.0.try_wait().unwrap().is_none(), "the same process all the time");

    let log = fs::read_to_string(file("log")).unwrap();
    let said = log.lines().filter(|line| line.contains("ahead of the clock of this host"));
    assert_eq!(said.count(), 2, "of the times once each, though there were four:\n{log}");
    let mut ceilings = 0;
    for path in
        files_of(&file("state")).iter().filter(|p| p.extension().is_some_and(|e| e == "json"))
    {
        let state: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        if let Some(ceiling_ms) = state["hlc_ceiling_ms"].as_u64() {
            assert!(ceiling_ms < wall_ms() + FAR_MS / 2, "{}", path.display());
            ceilings += 1;
        }
    }
    assert_eq!(ceilings, 1);
}
