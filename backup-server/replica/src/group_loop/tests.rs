//! Operators' orders against a group's loop, on a disk in memory and at times that the test gives. A group that fails, and
//! what waits meanwhile: `failing`, `queues`.

mod failing;
mod queues;

use super::waiting::TURN_WORK_BYTES;
use super::*;
use crate::group::{AtSizeMax, GuestEffect, MoveError, Retention};
use crate::history::At;
use std::collections::BTreeSet;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Channel, DiskId, Epoch, Incarnation, Nonce, RunId, Seq, WriterId};
use tidelock_protocol::message::{
    Basis, CleanEnd, CopyState, DiskSpec, LastRun, LogAge, Message, Mode, Role, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::memory::{Faults, Memory, MemoryFile};
use tidelock_store::extents::DiskKey;
use tidelock_store::journal::{Mark, MarkKind};

const LINK: Link = Link { connection: ConnectionId(1), channel: Channel(1) };
const GRACE_MS: u64 = 15_000;

fn at_ms(ms: u64) -> Now {
    Now { mono: MonoNanos(ms * 1_000_000), unix_ms: 1_700_000_000_000 + ms }
}

#[derive(Default)]
struct TestDriver {
    disk: Memory,
    gone: BTreeSet<u32>,
    waits: Vec<(u32, Wait)>,
    answers: Vec<(u32, Answer)>,
    /// A sync under way.
    sync: Option<(u64, SyncJob<MemoryFile>)>,
    /// Answers to guests, by number.
    guests: Vec<u32>,
    /// Guests' requests that have failed.
    failed: Vec<(u32, io::ErrorKind)>,
    /// Jobs that were begun, with the opening that they belong to.
    jobs: Vec<(u64, Job<Memory>)>,
    openings: u32,
    removals: u32,
}

impl Driver for TestDriver {
    type Storage = Memory;
    type Done = u32;
    type Asker = u32;

    fn storage(&self) -> Memory {
        self.disk.clone()
    }

    fn exists(&self) -> bool {
        !matches!(crate::manifest::Manifest::read(&self.disk), Ok(None))
    }

    fn make_directory(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn remove_directory(&mut self) {
        self.removals += 1;
    }

    fn opened(&mut self, _: &mut Group<Memory>, _: Option<TornTail>) {
        self.openings += 1;
    }

    fn broke(&mut self, _: &str) {}

    fn tend(&mut self, _: &mut Group<Memory>, _: Now) {}

    fn send(&mut self, outbox: &Arc<Outbox>, output: Output) {
        output.send(outbox);
    }

    fn sync(&mut self, generation: u64, job: SyncJob<MemoryFile>) {
        assert!(self.sync.is_none(), "one at a time");
        self.sync = Some((generation, job));
    }

    fn answer(&mut self, done: u32, result: io::Result<()>) {
        match result {
            Ok(()) => self.guests.push(done),
            Err(error) => self.failed.push((done, error.kind())),
        }
    }

    fn is_gone(&self, asker: &u32) -> bool {
        self.gone.contains(asker)
    }

    fn waits(&mut self, asker: &u32, wait: Wait) {
        self.waits.push((*asker, wait));
    }

    fn answer_order(&mut self, asker: u32, answer: Answer) {
        self.answers.push((asker, answer));
    }

    fn begin(&mut self, generation: u64, job: Job<Memory>) {
        self.jobs.push((generation, job));
    }
}

fn attach() -> Box<Attach> {
    Box::new(Attach {
        group: "g".into(),
        group_id: None,
        member: "vm".into(),
        writers: vec!["vm".into()],
        epoch: Epoch(0),
        lease_ms: 10_000,
        grace_ms: GRACE_MS,
        machine: None,
        tagging: None,
        role: Role::Writer(Writing {
            writer: WriterId(0),
            disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: 8192 }],
            incarnation: Incarnation(1),
            nonce: Nonce(1, 0),
            before: Some(RunId { number: Incarnation(0), nonce: Nonce(0, 0) }),
            marks: Vec::new(),
            last_run: LastRun::Unknown,
            mode: Mode::Pipelined,
        }),
    })
}

fn copy_done() -> Record {
    Record {
        writer: WriterId(0),
        seq: Seq(1),
        epoch: Epoch(1),
        hlc: Hlc(1),
        deps: CountVector::new(),
        body: DiskChange {
            disk: DiskId(0),
            offset: 0,
            copy: true,
            flushed: false,
            effect: Effect::CopyDone,
        },
    }
}

struct Looped {
    state: GroupLoop<TestDriver>,
    driver: TestDriver,
    outbox: Arc<Outbox>,
}

impl Looped {
    /// A group with a whole copy, whose host was heard at zero.
    fn new() -> Self {
        Self::with(GroupOptions::default())
    }

    fn with(options: GroupOptions) -> Self {
        let mut driver = TestDriver::default();
        let mut state = GroupLoop::new("g", options);
        state.open(at_ms(0), &mut driver);
        let mut of = Self { state, driver, outbox: Arc::default() };
        let (outbox, room) = (Arc::clone(&of.outbox), Taken::default());
        let host = "host-a".to_owned();
        of.host(0, HostEvent::Attach { link: LINK, host, attach: attach(), outbox, room });
        let frames = VecDeque::from([Frame::Record(LINK.channel, copy_done())]);
        of.host(0, HostEvent::Frames { link: LINK, frames, room: Taken::default() });
        of.turn(0);
        of.beacon(0);
        of
    }

    fn host(&mut self, ms: u64, event: HostEvent) {
        self.state.host(event, at_ms(ms), &mut self.driver);
    }

    fn beacon(&mut self, ms: u64) {
        let sent_at = MonoNanos(ms);
        self.host(ms, HostEvent::Beacon { link: LINK, sent_at, room: Taken::default() });
        self.turn(ms);
    }

    /// A turn, and the end of the sync that it has begun, and so on.
    fn turn(&mut self, ms: u64) {
        self.turn_alone(ms);
        while self.sync_ends(ms) {
            self.turn_alone(ms);
        }
    }

    fn turn_alone(&mut self, ms: u64) {
        self.state.begin_turn();
        self.state.turn(at_ms(ms), &mut self.driver);
    }

    /// The sync under way ends. `false`: there is none.
    fn sync_ends(&mut self, ms: u64) -> bool {
        let Some((generation, job)) = self.driver.sync.take() else { return false };
        self.state.synced(generation, job.run(), at_ms(ms), &mut self.driver);
        true
    }

    fn sent(&self) -> Vec<Message> {
        self.outbox.take().into_iter().map(|(_, message)| message).collect()
    }

    fn record(&mut self, seq: u64) {
        let effect = Effect::Zero { len_bytes: 512, no_hole: false };
        let body = DiskChange { copy: false, effect, ..copy_done().body };
        let record = Record { seq: Seq(seq), hlc: Hlc(seq), body, ..copy_done() };
        let frames = VecDeque::from([Frame::Record(LINK.channel, record)]);
        self.host(0, HostEvent::Frames { link: LINK, frames, room: Taken::default() });
    }

    /// The run says how far its log is, and that it has ended.
    fn ends(&mut self, seq: Seq) {
        let end = Some(CleanEnd { seq, marks: Vec::new() });
        let logged = Message::Logged(LogAge { file: 1, number: 1 });
        let frame = |message| Frame::Control(LINK.channel, message);
        let frames = [Message::Begun, logged, Message::Detach { end }].map(frame).into();
        self.host(0, HostEvent::Frames { link: LINK, frames, room: Taken::default() });
    }

    /// The next run asks on another connection to be attached.
    fn begins_after(&mut self, seq: Seq) {
        let mut attach = attach();
        let run = attach.writing_mut().unwrap();
        run.before = Some(run.run());
        (run.incarnation, run.nonce) = (Incarnation(2), Nonce(2, 0));
        run.last_run = LastRun::Clean { seq, served: false };
        let link = Link { connection: ConnectionId(2), ..LINK };
        let (host, outbox) = ("host-a".to_owned(), Arc::clone(&self.outbox));
        let room = Taken::default();
        self.host(0, HostEvent::Attach { link, host, attach, outbox, room });
    }

    /// What hosts were told since of an attachment.
    fn attached(&self) -> Option<(CopyState, Basis)> {
        let stream = |message| match message {
            Message::Attached(attached) => attached.stream.map(|of| (of.copy, of.basis)),
            _ => None,
        };
        self.sent().into_iter().find_map(stream)
    }

    fn order(&mut self, ms: u64, asker: u32, order: Order) {
        self.state.order(order, asker, at_ms(ms));
        assert_eq!(self.state.timeout(at_ms(ms)), Some(Duration::ZERO));
        self.turn(ms);
    }

    fn waits(&mut self) -> Vec<(u32, u64)> {
        let waits = std::mem::take(&mut self.driver.waits).into_iter();
        let remaining = |(asker, wait)| match wait {
            Wait::Lease { remaining_ms, .. } => (asker, remaining_ms),
            Wait::Room(reason) => panic!("{reason}"),
        };
        waits.map(remaining).collect()
    }

    fn is_recovered(&self) -> bool {
        self.state.group().unwrap().recovery().is_some()
    }
}

fn recover() -> Order {
    Order::Recover { primary_declared_dead: false, point: None, accepts_damage: false }
}

#[test]
fn a_recovery_waits_for_its_deadline_and_tells_it_only_when_it_moves() {
    let mut of = Looped::new();
    of.order(5_000, 1, recover());
    assert_eq!(of.waits(), [(1, 10_000)]);
    assert_eq!(of.state.deadline(), Some(at_ms(15_000).mono));
    // Turns for another reason say nothing new.
    of.turn(6_000);
    assert_eq!(of.waits(), []);
    assert_eq!(of.state.deadline(), Some(at_ms(15_000).mono));
    // A beacon that was on its way.
    of.beacon(7_000);
    assert_eq!(of.waits(), [(1, 15_000)]);
    of.turn(21_999);
    assert!(of.driver.answers.is_empty() && !of.is_recovered());
    assert_eq!(of.state.timeout(at_ms(21_999)), Some(Duration::from_millis(1)));
    of.turn(22_000);
    let answers = std::mem::take(&mut of.driver.answers);
    assert!(matches!(&*answers, [(1, Answer::Recovered(Ok(_)))]), "{answers:?}");
    assert_eq!(of.state.deadline(), None);
}

#[test]
fn nothing_is_recovered_for_an_operator_who_is_gone() {
    let mut of = Looped::new();
    of.order(0, 1, recover());
    of.driver.gone.insert(1);
    of.turn(GRACE_MS);
    assert!(!of.is_recovered() && of.driver.answers.is_empty());
    // Not in the turn after the order either.
    of.driver.gone.insert(2);
    of.order(GRACE_MS, 2, recover());
    assert!(!of.is_recovered() && of.driver.answers.is_empty());
    of.order(GRACE_MS, 3, recover());
    assert!(of.is_recovered());
    assert!(matches!(&*of.driver.answers, [(3, Answer::Recovered(Ok(_)))]));
}

#[test]
fn all_who_wait_for_a_recovery_have_the_same_answer() {
    let mut of = Looped::new();
    of.order(0, 1, recover());
    of.order(1, 2, recover());
    of.turn(GRACE_MS);
    let recovered = |(_, answer): &(u32, Answer)| match answer {
        Answer::Recovered(Ok(recovery)) => recovery.clone(),
        other => panic!("{other:?}"),
    };
    let answers: Vec<_> = of.driver.answers.iter().map(recovered).collect();
    assert!(answers.len() == 2 && answers[0] == answers[1], "{answers:?}");
}

#[test]
fn a_primary_that_is_heard_after_the_order_lives() {
    let mut of = Looped::new();
    of.order(1_000, 1, recover());
    of.beacon(4_000);
    assert!(of.driver.answers.is_empty(), "it may have been on its way");
    of.beacon(4_001);
    let [(1, Answer::Recovered(Err(lives)))] = &*of.driver.answers else { panic!() };
    let lives = lives.to_string();
    assert!(
        lives.contains("host-a was heard 0.0 s ago") && lives.contains("switchover g"),
        "{lives}"
    );
    of.turn(60_000);
    assert!(!of.is_recovered(), "the order is over");
}

#[test]
fn a_move_waits_for_the_lease_of_the_host_that_has_the_member() {
    let mut of = Looped::new();
    let to_b = || Order::Move { member: "vm".into(), to: "host-a".into() };
    of.order(0, 1, to_b());
    let attached = std::mem::take(&mut of.driver.answers);
    assert!(matches!(&*attached, [(1, Answer::Moved(Err(MoveError::Attached { .. })))]));
    of.host(1_000, HostEvent::Lost(LINK.connection));
    of.order(1_000, 2, to_b());
    assert_eq!(of.waits(), [(2, GRACE_MS - 1_000)]);
    of.turn(GRACE_MS - 1);
    assert!(of.driver.answers.is_empty());
    of.turn(GRACE_MS);
    assert!(matches!(&*of.driver.answers, [(2, Answer::Moved(Ok(_)))]), "{:?}", of.driver.answers);
}

fn durable_of(messages: &[Message]) -> Vec<u64> {
    let durable = |message: &Message| match message {
        Message::Progress(progress) => Some(progress.durable.0),
        _ => None,
    };
    messages.iter().filter_map(durable).collect()
}

#[test]
fn records_are_acknowledged_when_the_sync_that_covers_them_has_ended() {
    let mut of = Looped::new();
    of.sent();
    of.record(2);
    of.turn_alone(0);
    // A record arrives while the sync runs, and a beacon is answered meanwhile.
    of.record(3);
    let sent_at = MonoNanos(7);
    of.host(0, HostEvent::Beacon { link: LINK, sent_at, room: Taken::default() });
    of.turn_alone(0);
    let sent = of.sent();
    assert!(sent.contains(&Message::Lease { sent_at }) && durable_of(&sent).is_empty(), "{sent:?}");
    assert!(of.sync_ends(0));
    assert_eq!(durable_of(&of.sent()), [2], "3 is of the next one");
    assert_eq!(of.state.timeout(at_ms(0)), Some(Duration::ZERO));
    of.turn_alone(0);
    assert!(durable_of(&of.sent()).is_empty());
    assert!(of.sync_ends(0));
    assert_eq!(durable_of(&of.sent()), [3]);
}

#[test]
fn a_crash_before_the_end_of_a_sync_takes_nothing_that_was_told() {
    let mut of = Looped::new();
    of.record(2);
    of.turn_alone(0);
    assert_eq!(durable_of(&of.sent()).last(), Some(&1));
    let crashed = of.driver.disk.crash(&mut || false);
    let reopened = Group::open(crashed, at_ms(0), GroupOptions::default()).unwrap().unwrap().0;
    assert_eq!(reopened.committed().get(WriterId(0)), Seq(1));
}

#[test]
fn a_recovery_is_answered_when_it_is_durable_and_takes_what_had_arrived() {
    let mut of = Looped::new();
    of.record(2);
    of.turn_alone(0);
    let order = Order::Recover { primary_declared_dead: true, point: None, accepts_damage: false };
    of.record(3);
    of.state.order(order, 1, at_ms(0));
    of.turn_alone(0);
    assert!(of.driver.answers.is_empty() && of.sync_ends(0));
    of.turn_alone(0);
    // 3 is durable now, and the recovery is written.
    assert!(of.driver.answers.is_empty() && of.sync_ends(0));
    of.turn_alone(0);
    assert!(of.driver.answers.is_empty() && !of.is_recovered());
    let crashed = of.driver.disk.crash(&mut || false);
    let reopened = Group::open(crashed, at_ms(0), GroupOptions::default()).unwrap().unwrap().0;
    assert!(reopened.recovery().is_none() && reopened.committed().get(WriterId(0)) == Seq(3));
    of.sent();
    assert!(of.sync_ends(0) && of.is_recovered());
    let fenced =
        |message: &Message| matches!(message, Message::Refused { kind: RefusalKind::Fenced, .. });
    assert!(of.sent().iter().any(fenced));
    of.turn_alone(0);
    let [(1, Answer::Recovered(Ok(recovery)))] = &*of.driver.answers else { panic!() };
    assert_eq!(recovery.writers[0].recovered, Seq(3));
}

#[test]
fn an_attachment_waits_for_what_the_run_has_sent_before() {
    let mut of = Looped::new();
    of.record(2);
    of.turn_alone(0);
    of.sent();
    let (link, outbox) = (Link { connection: ConnectionId(2), ..LINK }, Arc::clone(&of.outbox));
    let (host, room) = ("host-a".to_owned(), Taken::default());
    of.host(0, HostEvent::Attach { link, host, attach: attach(), outbox, room });
    of.turn_alone(0);
    assert_eq!(of.sent(), []);
    of.turn(0);
    let sent = of.sent();
    assert!(matches!(&sent[..], [Message::Progress(_), ..]), "{sent:?}");
    let attached = sent.iter().find_map(|message| match message {
        Message::Attached(attached) => Some(attached.progress.durable),
        _ => None,
    });
    assert_eq!(attached, Some(Seq(2)));
}

/// The end says that the sites are equal: a start that is judged before it would compare them.
#[test]
fn a_run_is_attached_when_the_end_of_the_one_before_is_on_record() {
    let mut of = Looped::new();
    of.ends(Seq(1));
    of.sent();
    of.begins_after(Seq(1));
    of.turn_alone(0);
    assert_eq!(of.attached(), None);
    of.turn(0);
    assert_eq!(of.attached(), Some((CopyState::Whole, Basis::Clean)));
}

/// The connection is gone before the window has passed, and so was the end that came on it: the next run has compared
/// the disks.
#[test]
fn a_group_that_stands_at_its_size_hears_that_a_run_has_ended() {
    let at_size_max = AtSizeMax::Stop;
    let retention = Retention { window_ms: 1_000_000, size_max_bytes: 8000, at_size_max };
    let journal = tidelock_store::journal::Options { segment_bytes: 2000 };
    let mut of = Looped::with(GroupOptions { retention, journal, ..GroupOptions::default() });
    let mut last = 1;
    while of.state.group().unwrap().accepts() {
        last += 1;
        of.record(last);
        of.turn(0);
        assert!(last < 500, "it must stop");
    }
    of.ends(Seq(last));
    of.host(0, HostEvent::Lost(LINK.connection));
    of.turn(0);
    of.sent();
    of.begins_after(Seq(last));
    of.turn(0);
    assert!(!of.state.group().unwrap().accepts());
    assert_eq!(of.attached(), Some((CopyState::Whole, Basis::Clean)));
}

#[test]
fn a_removal_waits_for_its_note_and_guests_for_their_flushes() {
    let mut of = Looped::new();
    of.state.order(Order::Remove { member: "nobody".into() }, 1, at_ms(0));
    of.turn_alone(0);
    assert!(matches!(&*of.driver.answers, [(1, Answer::Removed(Err(_)))]));
    of.driver.answers.clear();
    let order = Order::Recover { primary_declared_dead: true, point: None, accepts_damage: false };
    of.order(0, 2, order);
    assert!(of.is_recovered());
    let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
    let effect = || GuestEffect::Zero { len_bytes: 512, no_hole: false };
    let write = |durable| GuestRequest::Write { key, offset: 0, effect: effect(), durable };
    of.state.guest(write(false), 1, at_ms(0), &mut of.driver);
    of.turn_alone(0);
    assert_eq!(of.driver.guests, [1]);
    assert!(of.driver.sync.is_none(), "nobody waits for it");
    of.state.guest(write(true), 2, at_ms(0), &mut of.driver);
    of.state.guest(write(false), 3, at_ms(0), &mut of.driver);
    of.turn_alone(0);
    assert_eq!(of.driver.guests, [1, 3]);
    assert!(of.sync_ends(0));
    assert_eq!(of.driver.guests, [1, 3, 2]);
}

fn mark(of: &Looped, set_at_unix_ms: u64) -> Mark {
    let point = of.state.group().unwrap().history().unwrap().resolve(&At::Latest).unwrap();
    let kind = MarkKind::Bookmark;
    Mark { kind, point, set_at_unix_ms, expires_at_unix_ms: None, asked_by: None }
}

fn set(of: &Looped, set_at_unix_ms: u64) -> Order {
    Order::SetMark { name: "deploy".into(), mark: mark(of, set_at_unix_ms), moves: true }
}

#[test]
fn orders_that_change_one_mark_are_carried_out_once_each_and_answered_when_that_is_durable() {
    let mut of = Looped::new();
    let (first, second) = (set(&of, 1), set(&of, 2));
    of.state.order(first, 1, at_ms(0));
    of.state.order(second, 2, at_ms(0));
    of.turn_alone(0);
    assert!(of.driver.answers.is_empty() && of.state.group().unwrap().marks().is_empty());
    assert!(of.sync_ends(0));
    of.turn_alone(0);
    assert!(of.driver.sync.is_none(), "nothing is set again");
    let set_at = |(asker, answer): &(u32, Answer)| match answer {
        Answer::Marked(Ok(mark)) => (*asker, mark.set_at_unix_ms),
        other => panic!("{other:?}"),
    };
    assert_eq!(of.driver.answers.iter().map(set_at).collect::<Vec<_>>(), [(1, 1), (2, 2)]);
    assert_eq!(of.state.group().unwrap().marks()[0].mark.set_at_unix_ms, 2);

    of.driver.answers.clear();
    let removal = || Order::RemoveMark { name: "deploy".into(), kind: MarkKind::Bookmark };
    of.order(0, 3, removal());
    of.order(0, 4, removal());
    let answers = &*of.driver.answers;
    let removed = matches!(answers, [(3, Answer::Unmarked(Ok(()))), (4, Answer::Unmarked(Err(_)))]);
    assert!(removed, "{answers:?}");
}

#[test]
fn an_order_that_cannot_become_durable_is_answered_so() {
    let mut of = Looped::new();
    let order = set(&of, 1);
    of.driver.disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    of.order(0, 1, order);
    of.turn(1_000);
    let answers = std::mem::take(&mut of.driver.answers);
    let [(1, Answer::Marked(Err(full)))] = &*answers else { panic!("{answers:?}") };
    assert!(full.to_string().contains("make room"), "{full}");

    let mut of = Looped::new();
    let order = set(&of, 1);
    of.state.order(order, 1, at_ms(0));
    of.turn_alone(0);
    of.driver.disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    of.turn(0);
    assert!(of.state.broken_because().is_some());
    of.turn(1);
    let answers = std::mem::take(&mut of.driver.answers);
    assert!(matches!(&*answers, [(1, Answer::Marked(Err(_)))]), "{answers:?}");
}

#[test]
fn a_look_at_the_past_waits_for_what_has_arrived_and_not_for_what_comes_later() {
    let mut of = Looped::new();
    of.record(2);
    of.state.order(Order::Settle, 1, at_ms(0));
    of.turn_alone(0);
    assert!(of.driver.answers.is_empty());
    of.record(3);
    of.turn_alone(0);
    assert!(of.sync_ends(0));
    of.turn_alone(0);
    assert!(matches!(&*of.driver.answers, [(1, Answer::Settled)]), "{:?}", of.driver.answers);
    assert!(of.driver.sync.is_some(), "that of the later record");
    let newest = of.state.group().unwrap().history().unwrap().resolve(&At::Latest).unwrap();
    assert_eq!(newest.cut.get(WriterId(0)), Seq(2));
}

#[test]
fn a_look_at_the_past_does_not_wait_for_room() {
    let mut of = without_room();
    of.order(0, 1, Order::Settle);
    of.turn(1_000);
    assert!(matches!(&*of.driver.answers, [(1, Answer::Settled)]), "{:?}", of.driver.answers);
}

#[test]
fn a_group_that_nobody_has_made_came_to_nothing() {
    let mut driver = TestDriver::default();
    let mut state: GroupLoop<TestDriver> = GroupLoop::new("g", GroupOptions::default());
    state.open(at_ms(0), &mut driver);
    assert!(state.came_to_nothing());
    assert!(!Looped::new().state.came_to_nothing());
}

/// So many of these messages are as much work as a connection may cause in a turn.
#[test]
fn a_server_that_stops_takes_all_that_has_arrived_whatever_the_work() {
    let mut of = Looped::new();
    let work = || Frame::Control(LINK.channel, Message::ModeChanged { mode: Mode::Async });
    let turn_of_work = || (0..TURN_WORK_BYTES.div_ceil(work_bytes(&work()))).map(|_| work());
    of.state.begin_turn();
    for seq in 2..6 {
        let frames = turn_of_work().collect();
        of.host(0, HostEvent::Frames { link: LINK, frames, room: Taken::default() });
        of.record(seq);
    }
    assert!(of.state.has_waiting());
    of.state.stop(at_ms(0), &mut of.driver);
    assert!(!of.state.has_waiting());
    assert_eq!(of.state.group().unwrap().committed().get(WriterId(0)), Seq(5));
}

/// Frames wait because the group has no room.
fn without_room() -> Looped {
    let mut of = Looped::new();
    of.driver.disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    for seq in 2..6 {
        of.record(seq);
        of.turn(0);
    }
    assert!(of.state.has_waiting());
    of
}

#[test]
fn a_server_that_stops_does_not_wait_for_room() {
    let mut of = without_room();
    of.state.stop(at_ms(0), &mut of.driver);
    assert!(of.state.has_waiting());
}

#[test]
fn the_end_of_a_connection_does_not_wait_for_room() {
    let mut of = without_room();
    of.host(1_000, HostEvent::Lost(LINK.connection));
    of.order(1_000, 1, Order::Move { member: "vm".into(), to: "host-a".into() });
    assert_eq!(of.waits(), [(1, GRACE_MS - 1_000)], "it is not attached");
}
