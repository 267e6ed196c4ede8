//! Client and server against each other over real sockets.

use super::*;
use crate::example_status;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

struct Fake {
    mode: Mutex<Mode>,
    stopping: AtomicBool,
}

impl ControlTarget for Fake {
    fn stores(&self) -> Vec<crate::stores::StoreReport> {
        Vec::new()
    }

    fn status(&self) -> Status {
        let mut status = example_status::status();
        status.groups[0].mode = *self.mode.lock().unwrap();
        status
    }

    fn set_mode(&self, group: &str, mode: Mode) -> Result<ModeChange, ControlError> {
        if group != "shop" {
            return Err(ControlError::unknown_group(group, &["shop"]));
        }
        let before = std::mem::replace(&mut *self.mode.lock().unwrap(), mode);
        Ok(ModeChange { group: group.to_owned(), before, after: mode })
    }

    fn verify(&self, group: &str, wish: &VerifyWish) -> Result<VerifyBegun, ControlError> {
        let member = wish.member.clone().unwrap_or_else(|| "db".to_owned());
        Ok(VerifyBegun { members: vec![format!("{group}/{member} {} {}", wish.repair, wish.stop)] })
    }

    fn bookmark(&self, _: &str, wish: BookmarkWish) -> Result<Bookmarking, ControlError> {
        Ok(Bookmarking { id: wish.expires_in_ms.unwrap_or(7) })
    }

    fn bookmarked(&self, group: &str, id: u64) -> Result<BookmarkState, ControlError> {
        match id {
            7 => Ok(BookmarkState::Waiting { why: format!("{group} is behind") }),
            _ => Err(ControlError::new(ControlErrorKind::Refused, "that name is taken")),
        }
    }

    fn switchover(&self, group: &str, wish: SwitchWish) -> Result<Switching, ControlError> {
        match (group, wish.guest_is_stopped) {
            ("shop", true) => Ok(Switching { connections: wish.timeout_ms + wish.others_ms }),
            _ => Err(ControlError::new(ControlErrorKind::Refused, "a guest has its disks open")),
        }
    }

    fn switched(&self, _: &str) -> Result<SwitchState, ControlError> {
        Ok(SwitchState::Over {
            seqs: [("db".to_owned(), 7)].into(),
            drained_ms: 1,
            others_ms: 0,
            shut_ms: 1,
            gave_up_ms: 2,
            problem: None,
        })
    }

    fn adopt(&self, group: &str) -> Result<Adopting, ControlError> {
        if group != "shop" {
            return Err(ControlError::new(ControlErrorKind::Refused, "its disks are here already"));
        }
        let (member, disk) = ("db".to_owned(), "root".to_owned());
        let disks = vec![AdoptedDisk { member, disk, size_bytes: 7, socket: "/s".into() }];
        Ok(Adopting { disks })
    }

    fn adopted(&self, group: &str) -> Result<(), ControlError> {
        self.adopt(group).map(drop)
    }

    fn leave_open(&self, group: &str) -> Result<bool, ControlError> {
        self.adopt(group).map(|_| true)
    }

    fn stop(&self) -> Result<(), ControlError> {
        self.stopping.store(true, Ordering::SeqCst);
        Ok(())
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    target: Arc<Fake>,
    runtime: tokio::runtime::Runtime,
}

impl Fixture {
    fn new() -> Self {
        let target =
            Arc::new(Fake { mode: Mutex::new(Mode::Pipelined), stopping: AtomicBool::new(false) });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let fixture = Self { dir: tempfile::tempdir().unwrap(), target, runtime };
        fixture.serve().unwrap();
        fixture
    }

    fn serve(&self) -> std::io::Result<tokio::task::JoinHandle<()>> {
        let _in_runtime = self.runtime.enter();
        server::serve(&self.path(), self.target.clone())
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("control.sock")
    }

    fn client(&self) -> Client {
        Client::connect(&self.path()).unwrap()
    }

    fn raw(&self) -> UnixStream {
        UnixStream::connect(self.path()).unwrap()
    }
}

/// Sends one line and returns the answer's line.
fn ask(stream: &mut UnixStream, line: &str) -> String {
    stream.write_all(line.as_bytes()).unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    answer
}

#[test]
fn a_bookmark_is_asked_for_and_looked_after() {
    let fixture = Fixture::new();
    let mut client = Client::connect(&fixture.path()).unwrap();
    let wish = |expires_in_ms| BookmarkWish { name: "deploy".into(), expires_in_ms, moves: true };
    let id = client.bookmark("shop", wish(None)).unwrap();
    let state = client.bookmarked("shop", id).unwrap();
    assert_eq!(state, BookmarkState::Waiting { why: "shop is behind".into() });
    let id = client.bookmark("shop", wish(Some(60_000))).unwrap();
    let error = client.bookmarked("shop", id).unwrap_err();
    assert_eq!(error.to_string(), "that name is taken");
}

#[test]
fn a_verification_is_begun_and_ended() {
    let fixture = Fixture::new();
    let members = |wish| fixture.client().verify("shop", wish).unwrap().members;
    assert_eq!(members(VerifyWish::default()), ["shop/db false false"]);
    let wish = VerifyWish { member: Some("web".into()), repair: true, stop: false };
    assert_eq!(members(wish), ["shop/web true false"]);
    let line = "{\"command\":\"verify\",\"group\":\"shop\",\"stop\":true}\n";
    assert!(ask(&mut fixture.raw(), line).contains("shop/db false true"));
}

#[test]
fn status_mode_and_stop_do_what_they_say() {
    let fixture = Fixture::new();
    let mut client = fixture.client();
    assert_eq!(client.status().unwrap(), example_status::status());
    let change = client.set_mode("shop", Mode::Sync).unwrap();
    assert_eq!((change.before, change.after), (Mode::Pipelined, Mode::Sync));
    assert_eq!(client.status().unwrap().groups[0].mode, Mode::Sync);
    let refused = client.set_mode("shp", Mode::Sync).unwrap_err();
    assert!(refused.to_string().contains("there is no group \"shp\""), "{refused}");
    client.stop().unwrap();
    assert!(fixture.target.stopping.load(Ordering::SeqCst));
}

#[test]
fn the_socket_is_private_and_one_daemons_alone() {
    let fixture = Fixture::new();
    let mode = fixture.path().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let second = fixture.serve().unwrap_err();
    assert!(second.to_string().contains("another daemon answers"), "{second}");
}

#[test]
fn a_socket_left_by_a_crash_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let gone = Client::connect(&path).unwrap_err();
    assert!(matches!(gone, ClientError::NotRunning { .. }), "{gone}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _in_runtime = runtime.enter();
    let server = Server::bind(&path).unwrap();
    drop(server);
    assert!(!path.exists(), "removed at the end");
}

#[test]
fn nonsense_is_answered_and_does_not_end_the_conversation() {
    let fixture = Fixture::new();
    let mut stream = fixture.raw();
    for nonsense in [
        "hello\n",
        "{}\n",
        "{\"command\":\"format\"}\n",
        "{\"command\":\"mode\",\"group\":\"shop\",\"mode\":\"fast\"}\n",
        "{\"command\":\"mode\",\"group\":\"shop\",\"mode\":\"sync\",\"now\":1}\n",
        "\u{0}\n",
    ] {
        let answer = ask(&mut stream, nonsense);
        assert!(answer.starts_with("{\"error\":{\"kind\":\"malformed\""), "{nonsense}: {answer}");
    }
    assert!(
        ask(&mut stream, "{\"command\":\"status\"}\n").starts_with("{\"status\":{\"schema\":1")
    );
}

#[test]
fn a_request_without_end_is_cut_off() {
    let fixture = Fixture::new();
    let mut stream = fixture.raw();
    let answer = ask(&mut stream, &"x".repeat(REQUEST_MAX_BYTES + 1));
    assert!(answer.contains("at most"), "{answer}");
    let mut rest = Vec::new();
    // The server has closed; whether that shows as end or as reset depends on what was in flight.
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
}

#[test]
fn connections_are_bounded_and_come_free_again() {
    let fixture = Fixture::new();
    let mut held: Vec<_> = (0..CONNECTIONS_MAX).map(|_| fixture.raw()).collect();
    for stream in &mut held {
        assert!(ask(stream, "{\"command\":\"status\"}\n").starts_with("{\"status\""));
    }
    let mut answer = String::new();
    BufReader::new(fixture.raw()).read_line(&mut answer).unwrap();
    assert!(answer.contains("\"busy\""), "{answer}");
    drop(held);
    // Room comes back when the server has seen the ends: ask until it has.
    while fixture.client().status().is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn a_switch_is_asked_for_and_followed() {
    let fixture = Fixture::new();
    let wish =
        SwitchWish { guest_is_stopped: true, check_only: true, timeout_ms: 9, others_ms: 90 };
    assert_eq!(fixture.client().switchover("shop", wish.clone()).unwrap(), 99);
    let open = SwitchWish { guest_is_stopped: false, ..wish };
    let refused = fixture.client().switchover("shop", open).unwrap_err();
    assert!(matches!(refused, ClientError::Refused(_)), "{refused}");
    let over = fixture.client().switched("shop").unwrap();
    assert!(matches!(over, SwitchState::Over { drained_ms: 1, .. }), "{over:?}");
}

#[test]
fn the_disks_that_are_to_be_adopted_are_told() {
    let fixture = Fixture::new();
    let disks = fixture.client().adopt("shop").unwrap();
    assert_eq!((disks[0].disk.as_str(), disks[0].size_bytes), ("root", 7));
    fixture.client().adopted("shop").unwrap();
    let error = fixture.client().adopted("other").unwrap_err();
    assert!(matches!(error, ClientError::Refused(_)), "{error}");
}
