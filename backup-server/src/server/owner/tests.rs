//! Connections that ask for much work share a group's thread with others.

use super::*;
use crate::server::orders::Asker;
use std::collections::VecDeque;
use std::time::Duration;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{
    Channel, DiskId, Epoch, Incarnation, MonoNanos, Nonce, RunId, WriterId,
};
use tidelock_protocol::limits;
use tidelock_protocol::message::{Attach, DiskSpec, LastRun, Message, Mode, Role, Writing};
use tidelock_replica::connection::outbox::Outbox;
use tidelock_replica::connection::room::Taken;
use tidelock_replica::group::{ConnectionId, Link, RecoverError};
use tidelock_replica::group_loop::{Answer, HostEvent, Order};

const LINK: Link = Link { connection: ConnectionId(1), channel: Channel(1) };
const CHECKS: u64 = 40;
const CHECK_BYTES: u32 = limits::DIGEST_CHUNK_MAX_BYTES;

fn attach() -> Box<Attach> {
    let size_bytes = CHECKS * u64::from(CHECK_BYTES);
    Box::new(Attach {
        group: "g".into(),
        group_id: None,
        member: "vm".into(),
        writers: vec!["vm".into()],
        epoch: Epoch(0),
        lease_ms: 400,
        grace_ms: 600,
        machine: None,
        tagging: None,
        role: Role::Writer(Writing {
            writer: WriterId(0),
            disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes }],
            incarnation: Incarnation(1),
            nonce: Nonce(1, 0),
            before: Some(RunId { number: Incarnation(0), nonce: Nonce(0, 0) }),
            marks: Vec::new(),
            last_run: LastRun::Unknown,
            mode: Mode::Pipelined,
        }),
    })
}

fn checks() -> VecDeque<Frame> {
    let check = |n: u64| Message::DigestCheck {
        disk: DiskId(0),
        offset: n * u64::from(CHECK_BYTES),
        len_bytes: CHECK_BYTES,
        digest: [0; 32],
    };
    (0..CHECKS).map(|n| Frame::Control(LINK.channel, check(n))).collect()
}

fn sent(outbox: &Outbox) -> Vec<Message> {
    outbox.take().into_iter().map(|(_, message)| message).collect()
}

fn compared(messages: &[Message]) -> Vec<u64> {
    let offset = |message: &Message| match message {
        Message::DigestResult { offset, .. } => Some(*offset / u64::from(CHECK_BYTES)),
        _ => None,
    };
    messages.iter().filter_map(offset).collect()
}

impl Owner {
    fn turns(&mut self) {
        self.state.turn(clock::now(), &mut self.driver);
        self.sync();
    }
}

struct Attached {
    owner: Owner,
    outbox: Arc<Outbox>,
    _dir: tempfile::TempDir,
}

impl Attached {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let reserve = Arc::new(Reserve::open(dir.path(), 0).unwrap());
        let (group, snapshots) = (dir.path().join("g"), dir.path().join("snapshots"));
        let options = GroupOptions::default();
        let mut owner = Owner::new("g", &group, &snapshots, options, 1 << 20, reserve);
        let outbox = Arc::new(Outbox::default());
        let (host, attach, to) = ("host-a".to_owned(), attach(), Arc::clone(&outbox));
        let room = Taken::default();
        let event = HostEvent::Attach { link: LINK, host, attach, outbox: to, room };
        owner.handle(Event::Host(event));
        owner.turns();
        let answer = sent(&outbox);
        assert!(answer.iter().any(|of| matches!(of, Message::Attached(_))), "{answer:?}");
        Self { owner, outbox, _dir: dir }
    }

    fn floods(&mut self) {
        self.owner.state.begin_turn();
        let event = HostEvent::Frames { link: LINK, frames: checks(), room: Taken::default() };
        self.owner.handle(Event::Host(event));
    }
}

/// 4,000 checks of 60 bytes each have read 16 GiB before the next beacon of an honest host, and its lease ran out.
#[tokio::test]
async fn beacons_do_not_wait_for_all_the_checks_that_arrived_before_them() {
    let mut of = Attached::new();
    of.floods();
    let (sent_at, room) = (MonoNanos(7), Taken::default());
    of.owner.handle(Event::Host(HostEvent::Beacon { link: LINK, sent_at, room }));
    of.owner.handle(Event::Host(HostEvent::Lost(LINK.connection)));
    of.owner.turns();
    let first = sent(&of.outbox);
    assert!(first.contains(&Message::Lease { sent_at: MonoNanos(7) }), "{first:?}");
    let mut all = compared(&first);
    assert!((1..=3).contains(&all.len()), "{all:?}");
    // The rest follows by itself, in order, and the end of the connection comes after it.
    let mut turns = 1;
    while of.owner.state.timeout(clock::now()) == Some(Duration::ZERO) {
        assert!(of.owner.state.has_waiting());
        of.owner.state.begin_turn();
        of.owner.turns();
        all.extend(compared(&sent(&of.outbox)));
        turns += 1;
    }
    assert!(turns > 10, "{turns}");
    // Outputs of the last turn have no outbox any more.
    assert!(
        all.len() as u64 + 3 > CHECKS && all.iter().copied().eq(0..all.len() as u64),
        "{all:?}"
    );
    assert!(!of.owner.state.has_waiting());
}

#[tokio::test]
async fn a_recovery_takes_what_arrived_and_compares_nothing_for_it() {
    let mut of = Attached::new();
    of.floods();
    let (asker, _, answer) = Asker::new();
    let order = Order::Recover { primary_declared_dead: true, point: None, accepts_damage: false };
    of.owner.handle(Event::Order { order, asker });
    of.owner.turns();
    let answer = answer.await.unwrap();
    assert!(
        matches!(answer, Answer::Recovered(Err(RecoverError::Initialising { .. }))),
        "{answer:?}"
    );
    assert!(!of.owner.state.has_waiting());
    assert_eq!(compared(&sent(&of.outbox)).len() as u64, CHECKS, "each has its answer");
}
