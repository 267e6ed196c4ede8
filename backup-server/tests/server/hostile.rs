//! Hosts with a valid name that say what no host says: the server lives on, and nobody but they pays for it.

use crate::common::{CHANNEL, Host, Process, attach, but, config, copy_done, record, stream};

use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, Epoch, Seq, WriterId};
use tidelock_protocol::limits;
use tidelock_protocol::machine::{Bus, Machine, MachineDisk};
use tidelock_protocol::message::{
    Attach, Bookmark, Form, LastRun, Message, PROTOCOL, RefusalKind, Role, Tagging, UNASKED,
};
use tidelock_protocol::record::Record;
use tidelock_protocol::vector::CountVector;
use tidelock_replica::places;
use tidelock_store::journal::machine_bytes;
use tokio::net::TcpStream;

fn hello(host: &str, software: &str) -> Message {
    let (oldest, newest) = PROTOCOL;
    Message::Hello { oldest, newest, host: host.into(), software: software.into() }
}

fn kind(message: &Option<Message>) -> Option<RefusalKind> {
    match message {
        Some(Message::Refused { kind, reason }) => {
            assert!(reason.len() <= limits::TEXT_MAX_BYTES, "{} bytes", reason.len());
            Some(*kind)
        }
        _ => None,
    }
}

/// The group of a host that is there all the time: it commits on.
struct Witness {
    host: Host<TcpStream>,
    seq: u64,
}

impl Witness {
    async fn attached(server: &Process) -> Self {
        let (mut host, _) = Host::attached(server.address, 1, LastRun::Unknown).await;
        host.record(&copy_done(1)).await.unwrap();
        assert_eq!(host.durable(1).await, 1);
        Self { host, seq: 1 }
    }

    async fn commits_on(&mut self) {
        self.seq += 1;
        self.host.record(&record(self.seq)).await.unwrap();
        assert_eq!(self.host.durable(self.seq).await, self.seq);
    }
}

/// A refusal that quotes a name of 1 MiB has outgrown its frame, and an assertion has ended the server.
#[tokio::test(flavor = "multi_thread")]
async fn no_name_however_long_ends_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = Process::start(&config(dir.path(), ""));
    let mut witness = Witness::attached(&server).await;
    let long = "a".repeat(limits::CONTROL_MAX_BYTES as usize - 200);

    for host in [&*long, "host b\n", ""] {
        let mut liar = Host::plain(server.address).await;
        liar.send(Channel(0), &hello(host, "x")).await;
        assert_eq!(kind(&liar.refused().await), Some(RefusalKind::Invalid));
        witness.commits_on().await;
    }
    // What goes out is cut to its bound also by this host, so this is a good hello.
    let mut talkative = Host::plain(server.address).await;
    talkative.send(Channel(0), &hello("host-c", &long)).await;
    assert!(matches!(talkative.next().await, Some((_, Message::Welcome { .. }))));
    let messages = [
        Message::Attach(Box::new(Attach { group: long.clone(), ..attach(1, LastRun::Unknown) })),
        Message::Attach(Box::new(Attach {
            group: long.clone(),
            writers: vec!["db".into(), "app".into()],
            ..attach(1, LastRun::Unknown)
        })),
        Message::Bookmark(Box::new(Bookmark {
            id: 1,
            name: long.clone(),
            expires_in_ms: None,
            moves: false,
        })),
    ];
    for message in messages {
        let mut liar = Host::plain(server.address).await;
        liar.hello("host-b").await;
        liar.send(CHANNEL, &message).await;
        assert_eq!(kind(&liar.refused().await), Some(RefusalKind::Invalid));
        witness.commits_on().await;
    }
    server.terminate();
}

/// One host has taken every place of others: 1,024 connections after the hello.
#[tokio::test(flavor = "multi_thread")]
async fn one_host_takes_no_connection_from_another() {
    let dir = tempfile::tempdir().unwrap();
    let server = Process::start(&config(dir.path(), ""));
    let mut witness = Witness::attached(&server).await;
    let mut liars = Vec::new();
    for _ in 0..3 * places::PER_HOST_MAX {
        let mut liar = Host::plain(server.address).await;
        liar.hello("host-b").await;
        liars.push(liar);
    }
    witness.commits_on().await;
    // Those that were too many have ended, the last ones have not.
    for liar in &mut liars[..2 * places::PER_HOST_MAX] {
        assert!(liar.refused().await.is_some(), "it was the oldest");
    }
    let last = liars.last_mut().unwrap();
    let mut own = Attach { group: "own".into(), ..attach(1, LastRun::Unknown) };
    own.machine = None;
    last.attach(own).await.unwrap();

    // Strangers: they say nothing, from one address, and a host comes in all the same.
    let mut strangers = Vec::new();
    for _ in 0..3 * places::STRANGERS_MAX {
        strangers.push(TcpStream::connect(server.address).await.unwrap());
    }
    let mut guest = Host::plain(server.address).await;
    guest.hello("host-c").await;
    witness.commits_on().await;
    server.terminate();
}

/// One host has made so many groups that a listed one was refused to its owner.
#[tokio::test(flavor = "multi_thread")]
async fn groups_have_quotas_and_can_be_removed() {
    let dir = tempfile::tempdir().unwrap();
    let more = "[limits]\ngroups_per_host = 3\n\
                [[group]]\nname = \"shop\"\nhosts = [\"host-a\"]\n\
                [[group]]\nname = \"own\"\nhosts = [\"host-b\"]\n";
    let config = config(dir.path(), more);
    let server = Process::start(&config);
    let mut host = Host::plain(server.address).await;
    host.hello("host-b").await;
    let mut make = async |n: u16, group: &str| {
        let attach = Attach { group: group.into(), ..attach(1, LastRun::Unknown) };
        host.send(Channel(n), &Message::Attach(Box::new(attach))).await;
        match host.next().await {
            Some((_, Message::Attached(_))) => None,
            Some((_, Message::Refused { kind, .. })) => Some(kind),
            other => panic!("{other:?}"),
        }
    };
    for n in 1..=3 {
        assert_eq!(make(n, &format!("g{n}")).await, None);
    }
    assert_eq!(make(4, "g4").await, Some(RefusalKind::Quota));
    assert_eq!(make(5, "own").await, None, "for a listed group there is room");
    // A certificate speaks for its host in any case of letters, and it has one share.
    let mut shouting = Host::plain(server.address).await;
    shouting.hello("HOST-B").await;
    let another = Attach { group: "g4".into(), ..attach(1, LastRun::Unknown) };
    assert_eq!(kind(&shouting.attach(another).await.err()), Some(RefusalKind::Quota));
    assert!(!dir.path().join("data/groups/g4").exists());
    let mut witness = Witness::attached(&server).await;
    witness.commits_on().await;

    // The command: not while it is in use, not without a word, and then for good.
    let in_use = crate::common::refused(&config, &["remove", "g1", "--everything"]);
    assert!(in_use.contains("is attached by host-b"), "{in_use}");
    drop(host);
    crate::common::wait_until("the lease has ended", || {
        !crate::common::refused(&config, &["remove", "g1"]).contains("in use")
    });
    let told = crate::common::refused(&config, &["remove", "g1"]);
    assert!(told.contains("db.root") && told.contains("Nothing was removed"), "{told}");
    assert!(dir.path().join("data/groups/g1").exists());
    let output = crate::common::cli(&config, &["remove", "g1", "--everything"]);
    assert!(output.status.success(), "{output:?}");
    assert!(!dir.path().join("data/groups/g1").exists());
    let mut host = Host::plain(server.address).await;
    host.hello("host-b").await;
    host.attach(Attach { group: "g4".into(), ..attach(1, LastRun::Unknown) }).await.unwrap();
    witness.commits_on().await;
    server.terminate();
}

const FAR_MS: u64 = 8 * 3_600_000;

fn wall_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    u64::try_from(now.unwrap().as_millis()).unwrap()
}

/// A time of one host has ended the daemons of others: the backup told it to them, and they could not go on from there.
#[tokio::test(flavor = "multi_thread")]
async fn times_and_counts_that_cannot_be_are_refused_and_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), "");
    let server = Process::start(&config);
    let mut witness = Witness::attached(&server).await;
    let far = Hlc::new(wall_ms() + FAR_MS, 0);

    // A run, before the group is there and after.
    let mut liar = Host::plain(server.address).await;
    liar.hello("host-b").await;
    let own = |run: u64| Attach { group: "own".into(), ..attach(run, LastRun::Unknown) };
    for run in [u64::MAX, (wall_ms() + FAR_MS) * 1000] {
        let refused = liar.attach(own(run)).await.unwrap_err();
        let Message::Refused { kind: RefusalKind::Implausible, reason } = refused else {
            panic!("{refused:?}")
        };
        assert!(reason.contains("ahead of the clock of the backup server"), "{reason}");
    }
    assert!(!dir.path().join("data/groups/own").exists());
    let mut refused = 0;
    for last_run in [
        LastRun::Clean { seq: Seq(u64::MAX), served: false },
        LastRun::Continues { from: Seq(u64::MAX) },
    ] {
        liar.attach(but(own(1), |of| of.last_run = last_run)).await.unwrap_err();
        refused += 1;
    }
    liar.attach(Attach { epoch: Epoch(u64::MAX), ..own(1) }).await.unwrap_err();
    liar.attach(own(1)).await.unwrap();
    liar.attach(own(u64::MAX)).await.unwrap_err();
    refused += 1;
    // What it was refused for was not kept: the true run attaches again.
    liar.attach(own(2)).await.unwrap();

    let group = |name: &str| {
        let status = crate::common::cli_json(&config, &["status", "--json"]);
        let groups = status["groups"].as_array().unwrap().clone();
        groups.into_iter().find(|group| group["group"] == name).unwrap()
    };
    for lie in [
        Record { hlc: far, ..copy_done(1) },
        Record { hlc: Hlc(u64::MAX), ..copy_done(1) },
        Record { deps: CountVector::of(WriterId(5), Seq(u64::MAX)), ..copy_done(1) },
    ] {
        liar.record(&lie).await.unwrap();
        let answer = liar.next().await;
        assert!(
            matches!(answer, Some((_, Message::Refused { kind: RefusalKind::Implausible, .. }))),
            "{answer:?}"
        );
        liar.attach(own(3)).await.unwrap();
    }
    for (pending, hlc) in [
        (CountVector::new(), Hlc(u64::MAX)),
        (CountVector::new(), far),
        (CountVector::of(WriterId(0), Seq(u64::MAX)), Hlc(0)),
    ] {
        liar.send(CHANNEL, &Message::Sounded { id: UNASKED, pending, hlc }).await;
        let answer = liar.next().await;
        assert!(
            matches!(answer, Some((_, Message::Refused { kind: RefusalKind::Implausible, .. }))),
            "{answer:?}"
        );
        liar.attach(own(3)).await.unwrap();
    }
    let attached = liar.attach(own(3)).await.unwrap();
    let (durable, last_hlc) = (attached.progress.durable, stream(&attached).last_hlc);
    assert_eq!((durable, last_hlc), (Seq(0), Hlc(0)), "nothing was stored");
    let counted = group("own")["implausible"].as_u64().unwrap();
    assert!(counted >= 6, "{counted} after {refused} attachments");
    assert_eq!(group("shop")["implausible"], 0);
    liar.record(&copy_done(1)).await.unwrap();
    assert_eq!(liar.durable(1).await, 1, "the truth is taken");
    witness.commits_on().await;
    server.terminate();
}

fn small_machine() -> Machine {
    serde_json::from_str(r#"{"memory_mib": 64}"#).unwrap()
}

/// 300 members that nobody had configured were taken, with 58 MB of machine descriptions.
#[tokio::test(flavor = "multi_thread")]
async fn members_without_disks_must_be_in_the_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let more = "[[group]]\nname = \"shop\"\nhosts = [\"host-a\", \"host-b\"]\n";
    let server = Process::start(&config(dir.path(), more));
    let mut host = Host::plain(server.address).await;
    let (oldest, newest) = PROTOCOL;
    let hello = Message::Hello { oldest, newest, host: "host-a".into(), software: "test".into() };
    host.send(Channel(0), &hello).await;
    host.next().await.unwrap();
    let mut peers = vec!["db=10.0.0.1".to_owned()];
    peers.extend((0..60).map(|n| format!("web{n}=10.0.1.{n}")));
    let tagging = Some(Tagging { form: Form::Vector, peers });
    let writer = Attach { tagging, ..attach(1, LastRun::Unknown) };
    host.send(CHANNEL, &Message::Attach(Box::new(writer.clone()))).await;
    assert!(matches!(host.next().await, Some((_, Message::Attached(_)))));

    let disk = |n: usize| MachineDisk {
        name: format!("{n:x<64}"),
        bus: Bus::Virtio,
        serial: Some("x".repeat(36)),
    };
    let large = Machine { disks: (0..64).map(disk).collect(), ..small_machine() };
    assert_eq!(large.check(), Ok(()));
    let bytes = machine_bytes(&large);
    let follower = |member: &str, machine: Machine| {
        let (member, machine) = (member.into(), Some(machine));
        Message::Attach(Box::new(Attach {
            member,
            machine,
            role: Role::Follower,
            ..writer.clone()
        }))
    };
    let mut answer = async |channel: u16, message: Message| {
        host.send(Channel(channel), &message).await;
        loop {
            match host.next().await.unwrap() {
                (at, Message::Refused { kind, .. }) if at == Channel(channel) => return Some(kind),
                (at, Message::Attached(_)) if at == Channel(channel) => return None,
                _ => {}
            }
        }
    };
    for n in 0..30 {
        let kind = answer(2 + n, follower(&format!("m{n}"), large.clone())).await;
        assert_eq!(kind, Some(RefusalKind::Invalid));
    }
    let mut taken = 0;
    let kind = loop {
        match answer(40 + taken, follower(&format!("web{taken}"), large.clone())).await {
            None => taken += 1,
            Some(kind) => break kind,
        }
    };
    assert_eq!(kind, RefusalKind::Quota);
    assert_eq!(u64::from(taken), limits::MACHINES_MAX_BYTES / bytes);
    assert_eq!(answer(120, follower("web59", small_machine())).await, None, "a small one fits");
    server.terminate();
}
