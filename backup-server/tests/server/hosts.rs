//! Two hosts of one group against the real server process: one dies or its link is slow, and what
//! depends on it waits, at every host, while the rest goes on.

use crate::common::{
    CHANNEL, Host, Process, attach, but, cli, cli_json, config, encode, has, stream,
};
use bytes::BytesMut;
use std::path::Path;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, Epoch, MonoNanos, Seq, WriterId};
use tidelock_protocol::message::{
    Attach, CopyState, Form, LastRun, Message, PROTOCOL, Progress, RefusalKind, Role, Tagging,
};
use tidelock_protocol::record::{DiskChange, Effect, Record};
use tidelock_protocol::vector::CountVector;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const HOSTS: &str = "[[group]]\nname = \"shop\"\nhosts = [\"host-0\", \"host-1\", \"host-2\"]\n";
const MEMBERS: [&str; 2] = ["db", "app"];

fn tagging(form: Form) -> Option<Tagging> {
    let peers = ["db=10.0.0.1", "app=10.0.0.2", "web=10.0.0.3"].map(str::to_owned).to_vec();
    Some(Tagging { form, peers })
}

/// A writer that is one of several members.
fn writer(index: u16, run: u64, form: Form, last: LastRun) -> Attach {
    let attach = Attach {
        member: MEMBERS[usize::from(index)].into(),
        writers: MEMBERS.map(str::to_owned).to_vec(),
        tagging: tagging(form),
        ..attach(run, last)
    };
    but(attach, |of| of.writer = WriterId(index))
}

/// One member on its host.
struct Member {
    host: Host<TcpStream>,
    writer: u16,
    progress: Progress,
}

impl Member {
    async fn connect(server: &Process, host: &str) -> Host<TcpStream> {
        let mut link = Host::plain(server.address).await;
        let (oldest, newest) = PROTOCOL;
        let hello = Message::Hello { oldest, newest, host: host.into(), software: "test".into() };
        link.send(Channel(0), &hello).await;
        let welcome = link.next().await;
        let spoken = match &welcome {
            Some((_, Message::Welcome { protocol, .. })) => Some(*protocol),
            _ => None,
        };
        assert_eq!(spoken, Some(newest), "{welcome:?}");
        link
    }

    /// A writer that is attached, and its copy state.
    async fn attached(
        server: &Process,
        index: u16,
        run: u64,
        form: Form,
        last: LastRun,
    ) -> (Self, CopyState) {
        let mut host = Self::connect(server, &format!("host-{index}")).await;
        let attached = host.attach(writer(index, run, form, last)).await.unwrap();
        let copy = stream(&attached).copy;
        (Self { host, writer: index, progress: attached.progress }, copy)
    }

    async fn send(&mut self, record: Record) {
        let mut bytes = BytesMut::new();
        encode(&record, &mut bytes);
        self.host.stream.write_all(&bytes).await.unwrap();
    }

    async fn next_progress(&mut self) {
        loop {
            match self.host.next().await {
                Some((_, Message::Progress(progress))) => {
                    self.progress = progress;
                    return;
                }
                Some((_, Message::Lease { .. })) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Until this is durable; C by then.
    async fn durable(&mut self, seq: u64) -> CountVector {
        while self.progress.durable < Seq(seq) {
            self.next_progress().await;
        }
        self.progress.committed.clone()
    }

    async fn until_committed(&mut self, writer: u16, seq: u64) {
        while self.progress.committed.get(WriterId(writer)) < Seq(seq) {
            self.next_progress().await;
        }
    }

    fn record(&self, seq: u64, hlc: u64, deps: &[(u16, u64)]) -> Record {
        Record {
            writer: WriterId(self.writer),
            hlc: Hlc(hlc),
            deps: deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect(),
            ..crate::common::record(seq)
        }
    }

    fn done(&self, seq: u64, hlc: u64) -> Record {
        let record = self.record(seq, hlc, &[]);
        Record {
            body: DiskChange { offset: 0, copy: true, effect: Effect::CopyDone, ..record.body },
            ..record
        }
    }
}

async fn two(server: &Process, form: Form) -> (Member, Member) {
    let (mut db, copy) = Member::attached(server, 0, 1, form, LastRun::Unknown).await;
    assert_eq!(copy, CopyState::Empty);
    let (mut app, _) = Member::attached(server, 1, 1, form, LastRun::Unknown).await;
    let (of_db, of_app) = (db.done(1, 10), app.done(1, 11));
    db.send(of_db).await;
    app.send(of_app).await;
    db.durable(1).await;
    app.durable(1).await;
    (db, app)
}

/// A member without disks.
fn follower(form: Form) -> Attach {
    Attach {
        member: "web".into(),
        epoch: Epoch(1),
        machine: None,
        role: Role::Follower,
        ..writer(0, 1, form, LastRun::Unknown)
    }
}

fn vector(seqs: [u64; 2]) -> CountVector {
    (0..).map(WriterId).zip(seqs.map(Seq)).collect()
}

fn recovered(config: &Path) -> (Vec<u64>, Vec<u64>, serde_json::Value) {
    let json = cli_json(config, &["recover", "shop", "--primary-is-dead", "--json"]);
    let writers = json["recovery"]["writers"].as_array().unwrap().clone();
    let of = |key: &str| writers.iter().map(|w| w[key].as_u64().unwrap()).collect();
    (of("recovered"), of("left_out"), json)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_depends_on_a_dead_host_waits_at_the_other_and_the_rest_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), HOSTS);
    let server = Process::start(&config);
    let (mut db, mut app) = two(&server, Form::Vector).await;
    // db has admitted its second record and told app of it; its host dies before it is sent.
    drop(db.host.stream.shutdown().await);
    let first = app.record(2, 20, &[]);
    app.send(first).await;
    assert_eq!(app.durable(2).await, vector([1, 2]), "it depends on nobody");
    let told = app.record(3, 21, &[(0, 2)]);
    app.send(told).await;
    assert_eq!(app.durable(3).await, vector([1, 2]), "durable, and in nobody's C");
    // Nor after the server was killed.
    server.kill();
    let server = Process::start(&config);
    let last = LastRun::Continues { from: Seq(1) };
    let (app, copy) = Member::attached(&server, 1, 1, Form::Vector, last).await;
    assert_eq!((copy, &app.progress.committed), (CopyState::Whole, &vector([1, 2])));
    let status = cli_json(&config, &["status", "--json"]);
    assert_eq!(status["groups"][0]["beyond_the_cut"], 1);
    let text = cli(&config, &["status"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("1 durable records are not in the cut"), "{text}");
    let (seqs, left_out, json) = recovered(&config);
    assert_eq!((seqs, left_out), (vec![1, 2], vec![0, 1]));
    let why = json["recovery"]["writers"][1]["why"].as_str().unwrap();
    assert!(why.contains("depends on db's 2"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn crossing_dependencies_with_one_slow_link_come_in_together() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), HOSTS);
    let server = Process::start(&config);
    let (mut db, mut app) = two(&server, Form::Vector).await;
    // Each of app's writes follows one of db's, and the other way round; db's link is slow, so
    // app is always ahead.
    const ROUNDS: u64 = 50;
    for n in 0..ROUNDS {
        let deps = [(0, 2 + n)];
        let record = app.record(2 + n, 100 + 2 * n, &deps);
        app.send(record).await;
    }
    assert_eq!(app.durable(1 + ROUNDS).await, vector([1, 1]), "all of it waits for db");
    for n in 0..ROUNDS {
        let deps = if n == 0 { vec![] } else { vec![(1, 1 + n)] };
        let record = db.record(2 + n, 101 + 2 * n, &deps);
        db.send(record).await;
        app.until_committed(0, 2 + n).await;
        let c = &app.progress.committed;
        assert_eq!(c.get(WriterId(1)), Seq(2 + n), "each of db's lets one of app's in: {c}");
    }
    db.until_committed(1, 1 + ROUNDS).await;
    server.terminate();
    let _server = Process::start(&config);
    let (seqs, left_out, _) = recovered(&config);
    assert_eq!((seqs, left_out), (vec![1 + ROUNDS; 2], vec![0, 0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_holds_the_watermark_until_it_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), HOSTS);
    let server = Process::start(&config);
    let (mut db, app) = two(&server, Form::Hlc).await;
    let record = db.record(2, 1000, &[]);
    db.send(record).await;
    db.durable(2).await;
    assert_eq!(db.progress.watermark, Hlc(11), "app has said nothing since 11");
    assert_eq!(db.progress.frontier, Hlc(1000));
    let attached = cli(&config, &["remove", "shop", "app"]);
    assert!(!attached.status.success());
    let reason = String::from_utf8(attached.stderr).unwrap();
    assert!(reason.contains("attached by host-1"), "{reason}");
    drop(app);
    // The server hears of the end of the connection by itself.
    loop {
        let removed = cli(&config, &["remove", "shop", "app"]);
        if removed.status.success() {
            break;
        }
        let reason = String::from_utf8(removed.stderr).unwrap();
        assert!(reason.contains("attached"), "{reason}");
    }
    while db.progress.watermark < Hlc(1000) {
        db.next_progress().await;
    }
    assert_eq!(db.progress.committed, vector([2, u64::MAX]));
}

#[tokio::test(flavor = "multi_thread")]
async fn members_without_disks_follow_and_a_resync_asks_every_writer() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), HOSTS);
    let server = Process::start(&config);
    let (db, mut app) = two(&server, Form::Vector).await;
    let mut web = Member::connect(&server, "host-2").await;
    // Another form than the other hosts', which are connected.
    let refused = web.attach(follower(Form::Hlc)).await;
    let Err(Message::Refused { kind: RefusalKind::Mismatch, reason }) = refused else {
        panic!("{refused:?}")
    };
    assert!(reason.contains("form=hlc, the second form=vector"), "{reason}");
    assert_eq!(web.attach(follower(Form::Vector)).await.unwrap().stream, None);
    web.send(CHANNEL, &Message::Beacon { sent_at: MonoNanos(5) }).await;
    assert_eq!(web.next().await, Some((CHANNEL, Message::Lease { sent_at: MonoNanos(5) })));
    // db's daemon is killed, and starts again.
    drop(db);
    let (mut db, copy) = Member::attached(&server, 0, 2, Form::Vector, LastRun::Unknown).await;
    assert_eq!(copy, CopyState::Resyncing);
    let id = loop {
        match app.host.next().await {
            Some((_, Message::Sound { id })) => break id,
            Some((_, Message::Progress(_))) => {}
            other => panic!("{other:?}"),
        }
    };
    let sounded = Message::Sounded { id, pending: vector([7, 3]), hlc: Hlc(99) };
    app.host.send(CHANNEL, &sounded).await;
    loop {
        match db.host.next().await {
            Some((_, Message::Floor { pending, hlc })) => {
                assert_eq!((pending, hlc), (vector([7, 3]), Hlc(99)));
                break;
            }
            Some((_, Message::Progress(_))) => {}
            other => panic!("{other:?}"),
        }
    }
    let status = cli_json(&config, &["status", "--json"]);
    assert_eq!(status["groups"][0]["followers"][0]["member"], "web");
    // One that does not say how packets are tagged.
    let mut alone = Host::plain(server.address).await;
    alone.hello("host-0").await;
    let untagged = Attach { tagging: None, ..writer(0, 9, Form::Vector, LastRun::Unknown) };
    let refused = alone.attach(untagged).await.unwrap_err();
    assert!(matches!(refused, Message::Refused { kind: RefusalKind::Invalid, .. }), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_machines_of_a_group_are_booted_and_who_is_not_is_named() {
    if !has("qemu-system-x86_64") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), HOSTS);
    let server = Process::start(&config);
    let (_db, _app) = two(&server, Form::Vector).await;
    let mut web = Member::connect(&server, "host-2").await;
    assert_eq!(web.attach(follower(Form::Vector)).await.unwrap().stream, None);
    let boot = |more: &[&str]| {
        let words = ["recover", "shop", "--primary-is-dead", "--boot", "--dry-run"];
        let output = cli(&config, &[&words[..], &["--accelerator", "tcg"], more].concat());
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let lines: Vec<_> = text(&output.stdout).lines().map(str::to_owned).collect();
        let machines = lines.into_iter().filter(|line| line.starts_with("qemu-")).collect();
        (output.status.success(), machines, text(&output.stderr))
    };

    // Its host sent no description of web, which has nothing here that could be lost: the others must not wait for it.
    let (good, machines, said): (bool, Vec<String>, String) = boot(&[]);
    assert!(good && machines.len() == 2, "{machines:?} {said}");
    assert!(machines[0].contains("-name db ") && machines[0].contains("export=db.root"));
    assert!(machines[1].contains("-name app ") && machines[1].contains("export=app.root"));
    assert!(said.contains("web is not booted") && said.contains("--machine web=FILE"), "{said}");

    let file = dir.path().join("lan.json");
    std::fs::write(&file, r#"{"memory_mib": 64, "networks": [{"name": "lan"}]}"#).unwrap();
    let with_lan = |member: &str| format!("--machine={member}={}", file.display());
    let (web_file, app_file) = (with_lan("web"), with_lan("app"));
    let (wbe_file, nobodys_file) = (with_lan("wbe"), format!("--machine={}", file.display()));
    let (good, machines, said) = boot(&[&web_file, &app_file, "--network", "lan=user"]);
    assert!(good && machines.len() == 3, "{machines:?} {said}");
    assert!(machines[2].contains("-name web ") && !machines[2].contains("-blockdev"));
    let connected = machines.iter().filter(|line| line.contains("user,id=net0")).count();
    assert_eq!(connected, 2, "db has no network: {machines:?}");
    // What is said of one machine comes before what is said of all.
    let networks = ["--network", "lan=user", "--network", "web.lan=none"];
    let (_, machines, _) = boot(&[&[&*web_file, &app_file], &networks[..]].concat());
    assert!(
        machines[1].contains("user,id=net0") && !machines[2].contains("netdev"),
        "{machines:?}"
    );

    for (wrong, told) in [
        (vec![&*web_file, &app_file, "--network", "lan=tap:t0"], "write --network app.lan=tap:t0"),
        (vec![&web_file, "--network", "wan=tap:t0"], "web.lan"),
        (vec![&wbe_file], "there is no wbe to boot, but db, app, web"),
        (vec![&nobodys_file], "say whose it is, as --machine db=FILE"),
        (vec!["--network", "lan"], "write NAME=tap:INTERFACE"),
    ] {
        let (good, machines, said) = boot(&wrong);
        assert!(!good && machines.is_empty() && said.contains(told), "{wrong:?}: {said}");
    }
}

/// A hijack with the greatest run number that there is, and with a member that no configuration names.
#[tokio::test(flavor = "multi_thread")]
async fn a_listed_host_takes_no_member_of_another_until_the_operator_moves_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), HOSTS);
    let server = Process::start(&config);
    let (mut db, _app) = two(&server, Form::Vector).await;
    let as_db = |run, last| {
        let machine = Some(serde_json::from_str(r#"{"memory_mib": 1}"#).unwrap());
        Attach { machine, ..writer(0, run, Form::Vector, last) }
    };
    let mut thief = Member::connect(&server, "host-1").await;
    let clean = LastRun::Clean { seq: Seq(1), served: false };
    match thief.attach(as_db(greatest_run(), clean)).await {
        Err(Message::Refused { kind: RefusalKind::Forbidden, reason }) => {
            assert!(reason.contains("belongs to host host-0"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let unnamed = Attach { member: "m1".into(), ..follower(Form::Vector) };
    let refused = thief.attach(unnamed).await.unwrap_err();
    assert!(matches!(refused, Message::Refused { kind: RefusalKind::Invalid, .. }), "{refused:?}");
    let write = db.record(2, 20, &[]);
    db.send(write).await;
    db.durable(2).await;
    let of = |json: &serde_json::Value| {
        let group = &json["groups"][0];
        (group["writers"][0]["host"].clone(), group["followers"].as_array().unwrap().len())
    };
    assert_eq!(of(&cli_json(&config, &["status", "--json"])), ("host-0".into(), 0));

    let move_it = ["member", "move", "shop", "db", "--to", "host-1", "--json"];
    let asked = cli(&config, &move_it);
    assert!(!asked.status.success() && String::from_utf8_lossy(&asked.stderr).contains("--yes"));
    let move_it = [&move_it[..], &["--yes"]].concat();
    let connected = cli(&config, &move_it);
    let reason = String::from_utf8_lossy(&connected.stderr);
    assert!(!connected.status.success() && reason.contains("is attached by host-0"), "{reason}");
    db.host.stream.shutdown().await.unwrap();
    drop(db);
    let connected = || {
        let json = cli_json(&config, &["status", "--json"]);
        !json["groups"][0]["writers"][0]["connected_since_unix_ms"].is_null()
    };
    while connected() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let moved = cli_json(&config, &move_it);
    assert_eq!((&moved["from"], &moved["to"]), (&"host-0".into(), &"host-1".into()));
    let taken = thief.attach(as_db(7, LastRun::Clean { seq: Seq(2), served: false })).await;
    assert_eq!(stream(&taken.unwrap()).copy, CopyState::Resyncing);
}

/// The greatest run number that the server believes: the time of its clock, in microseconds.
fn greatest_run() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(now.unwrap().as_micros()).unwrap()
}
