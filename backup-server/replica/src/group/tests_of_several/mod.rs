//! Groups of several members on several hosts, which are played by the tests.

mod cold;
mod covering;
mod damage;
mod histories;
mod hosts;
mod indexes;
mod left_out;
mod past;
mod policies;
mod removed;
mod repairs;
mod resyncs;
mod shapes;
mod switches;
mod tags;

use super::tests::but;
use super::*;
use proptest::prelude::*;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::{DiskId, Incarnation, Nonce, RunId, Seq};
use tidelock_protocol::message::{
    Attach, Attached, DiskSpec, Form, LastRun, Mode, Progress, Role, Tagging, UNASKED, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_storage::StorageFile;
use tidelock_storage::memory::{Faults, Memory};

const SIZE: u64 = 4096;
const GRACE_MS: u64 = 15_000;
const NAMES: [&str; 3] = ["a", "b", "c"];

fn at_ms(ms: u64) -> Now {
    Now { mono: MonoNanos(ms * 1_000_000), unix_ms: 1_700_000_000_000 + ms }
}

fn link(writer: u16) -> Link {
    Link { connection: ConnectionId(u64::from(writer) + 1), channel: Channel(1) }
}

fn host(writer: u16) -> String {
    format!("host-{writer}")
}

fn options() -> GroupOptions {
    GroupOptions {
        journal: journal::Options { segment_bytes: 1500 },
        unfolded_max_bytes: 1 << 30,
        fold_min_bytes: 1,
        fold_rate_bytes_s: None,
        retention: Retention::default(),
        compress: None,
        hosts: Some((0..4).map(host).collect()),
        members: BTreeMap::new(),
        clock_bound_ms: tidelock_protocol::bounds::CLOCK_BOUND_MS,
        parts: Arc::default(),
    }
}

/// What the hosts' configurations say.
#[derive(Clone, Copy)]
struct Shape {
    writers: usize,
    form: Form,
}

impl Shape {
    fn peers(self) -> Vec<String> {
        let names = NAMES[..self.writers].iter().chain(&["web"]);
        names.map(|name| format!("{name}=10.0.0.{}", name.len())).collect()
    }

    fn tagging(self) -> Tagging {
        Tagging { form: self.form, peers: self.peers() }
    }

    fn writer(self, writer: u16, incarnation: u64, last_run: LastRun) -> Attach {
        let disk = DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: SIZE };
        Attach {
            group: "g".into(),
            group_id: None,
            member: NAMES[usize::from(writer)].into(),
            writers: NAMES[..self.writers].iter().map(|n| (*n).to_owned()).collect(),
            epoch: Epoch(0),
            lease_ms: 10_000,
            grace_ms: GRACE_MS,
            machine: None,
            tagging: Some(self.tagging()),
            role: Role::Writer(Writing {
                writer: WriterId(writer),
                disks: vec![disk],
                incarnation: Incarnation(incarnation),
                nonce: Nonce(incarnation, 0),
                before: Some(before(incarnation, last_run)),
                marks: Vec::new(),
                last_run,
                mode: Mode::Pipelined,
            }),
        }
    }

    fn follower(self) -> Attach {
        Attach {
            member: "web".into(),
            machine: Some(serde_json::from_str(r#"{"memory_mib": 64}"#).unwrap()),
            role: Role::Follower,
            ..self.writer(0, 1, LastRun::Unknown)
        }
    }

    fn create(self, disk: &Memory) -> Option<Group<Memory>> {
        self.create_with(disk, options())
    }

    fn create_with(self, disk: &Memory, options: GroupOptions) -> Option<Group<Memory>> {
        let attach = self.writer(0, 1, LastRun::Unknown);
        Group::create(disk.clone(), &host(0), &attach, at_ms(0), options).ok()
    }
}

fn reopen(disk: &Memory) -> Group<Memory> {
    Group::open(disk.clone(), at_ms(0), options()).unwrap().unwrap().0
}

fn record(writer: u16, seq: u64, hlc: u64, deps: &[(u16, u64)]) -> Record {
    Record {
        writer: WriterId(writer),
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(hlc),
        deps: deps.iter().map(|(w, s)| (WriterId(*w), Seq(*s))).collect(),
        body: DiskChange {
            disk: DiskId(0),
            offset: 0,
            copy: false,
            flushed: false,
            effect: Effect::Write(Payload::new(vec![seq as u8; 64].into())),
        },
    }
}

fn done(writer: u16, seq: u64, hlc: u64, deps: &[(u16, u64)]) -> Record {
    Record {
        body: DiskChange {
            copy: true,
            effect: Effect::CopyDone,
            ..record(writer, seq, hlc, deps).body
        },
        ..record(writer, seq, hlc, deps)
    }
}

/// It arrives when it was written, by its HLC.
fn send(group: &mut Group<Memory>, record: Record) {
    let ms = record.hlc.physical_ms().saturating_sub(past::T0);
    send_at(group, at_ms(ms), record);
}

fn send_at(group: &mut Group<Memory>, now: Now, record: Record) {
    let link = link(record.writer.0);
    assert!(group.receive(now, link, Frame::Record(link.channel, record)).is_none());
}

fn say(group: &mut Group<Memory>, writer: u16, message: Message) {
    let link = link(writer);
    assert!(group.receive(at_ms(0), link, Frame::Control(link.channel, message)).is_none());
}

/// What one link was told.
fn told(outputs: &[Output], to: Link) -> Vec<Message> {
    let of = |output: &Output| match output {
        Output::Send(link, message) if *link == to => Some(message.clone()),
        Output::Refuse(link, kind, reason) if *link == to => {
            Some(Message::Refused { kind: *kind, reason: reason.clone() })
        }
        _ => None,
    };
    outputs.iter().filter_map(of).collect()
}

fn progress(messages: &[Message]) -> Option<Progress> {
    messages.iter().rev().find_map(|message| match message {
        Message::Progress(progress) => Some(progress.clone()),
        Message::Attached(Attached { progress, .. }) => Some(progress.clone()),
        _ => None,
    })
}

fn copy_of(messages: &[Message]) -> CopyState {
    let of = |message: &Message| match message {
        Message::Attached(Attached { stream, .. }) => Some(stream.as_ref()?.copy),
        _ => None,
    };
    messages.iter().find_map(of).unwrap_or_else(|| panic!("{messages:?}"))
}

fn refused(messages: &[Message]) -> Option<(RefusalKind, String)> {
    messages.iter().find_map(|message| match message {
        Message::Refused { kind, reason } => Some((*kind, reason.clone())),
        _ => None,
    })
}

/// Attaches a writer, and gives what was said to it.
fn attach(group: &mut Group<Memory>, now: Now, attach: &Attach) -> Vec<Message> {
    let writer = attach.writing().unwrap().writer.0;
    group.as_if_ended(attach);
    group.attach(now, link(writer), &host(writer), attach);
    let outputs = group.take_outputs();
    let mut mine = told(&outputs, link(writer));
    // Questions to the others are part of what follows.
    mine.extend(outputs.iter().filter_map(|output| match output {
        Output::Send(to, sound @ Message::Sound { .. }) if *to != link(writer) => {
            Some(sound.clone())
        }
        _ => None,
    }));
    mine
}

fn vector(seqs: &[u64]) -> CountVector {
    seqs.iter().enumerate().map(|(i, s)| (WriterId(i as u16), Seq(*s))).collect()
}

/// Two writers on two hosts, both whole: a at seq 1, b at seq 1.
fn two(disk: &Memory, form: Form) -> Group<Memory> {
    two_with(disk, form, options())
}

fn two_with(disk: &Memory, form: Form, options: GroupOptions) -> Group<Memory> {
    let shape = Shape { writers: 2, form };
    let mut group = shape.create_with(disk, options).unwrap();
    for writer in 0..2 {
        let said = attach(&mut group, at_ms(0), &shape.writer(writer, 1, LastRun::Unknown));
        assert_eq!(copy_of(&said), CopyState::Empty);
        send(&mut group, done(writer, 1, 10 + u64::from(writer), &[]));
    }
    group.flush();
    group
}

#[test]
fn every_host_hears_c_and_what_depends_on_a_silent_writer_is_not_in_it() {
    let mut group = two(&Memory::new(), Form::Vector);
    group.take_outputs();
    send(&mut group, record(0, 2, 20, &[]));
    // b has heard of a's third record, which has not come.
    send(&mut group, record(1, 2, 21, &[(0, 3)]));
    group.flush();
    let outputs = group.take_outputs();
    for writer in 0..2 {
        let progress = progress(&told(&outputs, link(writer))).unwrap();
        assert_eq!(progress.committed, vector(&[2, 1]), "b's second waits for a");
        assert_eq!(progress.durable, Seq(2), "but it need not be sent again");
    }
    // a's host dies. Recovery leaves out what depends on what it had.
    group.connection_lost(link(0).connection);
    let recovery = group.recover(at_ms(0), true).unwrap();
    let seqs: Vec<_> = recovery.writers.iter().map(|w| (w.recovered.0, w.left_out)).collect();
    assert_eq!(seqs, [(2, 0), (1, 1)]);
    assert_eq!(recovery.writers[0].why, None);
}

#[test]
fn the_watermark_is_the_least_of_all_writers_and_survives_a_restart() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Hlc);
    group.take_outputs();
    send(&mut group, record(0, 2, 500, &[]));
    group.flush();
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(10 + 1), Hlc(500)), "b holds it back");
    assert_eq!(said.committed, vector(&[1, 1]));
    // b has nothing to write, and says so.
    send(
        &mut group,
        Record {
            body: DiskChange { effect: Effect::Idle, ..record(1, 2, 600, &[]).body },
            ..record(1, 2, 600, &[])
        },
    );
    group.flush();
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!((said.watermark, said.frontier), (Hlc(500), Hlc(500)), "idle is no frontier");
    assert_eq!(said.committed, vector(&[2, 1]));
    let group = reopen(&disk.killed());
    assert_eq!((group.cut.watermark(), group.cut()), (Hlc(500), &vector(&[2, 1])));
    // A time that does not grow breaks what the watermark says.
    let mut group = two(&Memory::new(), Form::Hlc);
    group.take_outputs();
    send(&mut group, record(0, 2, 10, &[]));
    assert_eq!(refused(&told(&group.take_outputs(), link(0))).unwrap().0, RefusalKind::Invalid);
}

/// A host of these tests ends each run before it begins the next, or goes on with it.
fn before(incarnation: u64, last_run: LastRun) -> RunId {
    let number = match last_run {
        LastRun::Continues { .. } => incarnation,
        _ => incarnation - 1,
    };
    RunId { number: Incarnation(number), nonce: Nonce(number, 0) }
}
