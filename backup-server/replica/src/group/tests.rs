//! A group against a host that is played by the test, on a disk that crashes.

mod attaching;
mod chosen;
mod disks;
mod limits;
mod lives;
mod machines;
mod marks;
mod owned;
mod recovering;
mod seeded;
mod switched;

use super::attach::after_attach;
use super::*;
use crate::history::At;
use bytes::Bytes;
use proptest::prelude::*;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Incarnation, Nonce, RunId, Seq};
use tidelock_protocol::message::{
    Attach, Attached, CleanEnd, DiskSpec, Form, LastRun, LogAge, Mode, Role, Tagging, Writing,
};
use tidelock_protocol::record::{DiskChange, Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::StorageFile;
use tidelock_storage::memory::{Faults, Memory};
use tidelock_store::journal::KeptMachine;

const SIZE: u64 = 8192;
const WRITER: WriterId = WriterId(0);
const KEY: DiskKey = DiskKey { writer: WRITER, disk: DiskId(0) };
const LINK: Link = Link { connection: ConnectionId(1), channel: Channel(1) };
const OTHER: Link = Link { connection: ConnectionId(2), channel: Channel(1) };
const LATEST: Link = Link { connection: ConnectionId(3), channel: Channel(1) };
const GRACE_MS: u64 = 15_000;

fn at_ms(ms: u64) -> Now {
    Now { mono: MonoNanos(ms * 1_000_000), unix_ms: 1_700_000_000_000 + ms }
}

fn options() -> GroupOptions {
    GroupOptions {
        journal: journal::Options { segment_bytes: 2000 },
        unfolded_max_bytes: 1 << 30,
        fold_min_bytes: 1,
        fold_rate_bytes_s: None,
        retention: Retention::default(),
        compress: None,
        hosts: None,
        members: BTreeMap::new(),
        clock_bound_ms: tidelock_protocol::bounds::CLOCK_BOUND_MS,
        parts: Arc::default(),
    }
}

fn attach_message(incarnation: u64, epoch: u64, last_run: LastRun) -> Attach {
    Attach {
        group: "g".into(),
        group_id: None,
        member: "vm".into(),
        writers: vec!["vm".into()],
        epoch: Epoch(epoch),
        lease_ms: 10_000,
        grace_ms: GRACE_MS,
        machine: Some(serde_json::from_str(r#"{"memory_mib": 64}"#).unwrap()),
        tagging: None,
        role: Role::Writer(Writing {
            writer: WRITER,
            disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: SIZE }],
            incarnation: Incarnation(incarnation),
            nonce: Nonce(incarnation, 0),
            before: Some(run(before(incarnation, last_run))),
            marks: marks(),
            last_run,
            mode: Mode::Pipelined,
        }),
    }
}

/// The same with other disks or another run.
pub(super) fn but(mut attach: Attach, change: impl FnOnce(&mut Writing)) -> Attach {
    change(attach.writing_mut().expect("a writer"));
    attach
}

/// A host of these tests ends each run before it begins the next, or goes on with it.
fn before(incarnation: u64, last_run: LastRun) -> u64 {
    match last_run {
        LastRun::Continues { .. } => incarnation,
        _ => incarnation - 1,
    }
}

fn run(number: u64) -> RunId {
    RunId { number: Incarnation(number), nonce: Nonce(number, 0) }
}

fn marks() -> Vec<String> {
    vec!["root image inode=7".to_owned()]
}

/// The run in force ends cleanly.
fn end(group: &mut Group<Memory>, link: Link, seq: u64) {
    let end = CleanEnd { seq: Seq(seq), marks: marks() };
    for message in [Message::Begun, Message::Detach { end: Some(end) }] {
        assert!(group.receive(at_ms(0), link, Frame::Control(link.channel, message)).is_none());
    }
    group.flush();
}

fn create(disk: &Memory) -> Result<Group<Memory>, GroupCreateError> {
    let attach = attach_message(1, 0, LastRun::Unknown);
    Group::create(disk.clone(), "host-a", &attach, at_ms(0), options())
}

fn reopen(disk: &Memory) -> Group<Memory> {
    Group::open(disk.clone(), at_ms(0), options()).unwrap().unwrap().0
}

fn attached(outputs: &[Output]) -> Option<Attached> {
    outputs.iter().find_map(|output| match output {
        Output::Send(_, Message::Attached(attached)) => Some(attached.clone()),
        _ => None,
    })
}

fn refusal(outputs: &[Output]) -> Option<(Link, RefusalKind)> {
    outputs.iter().find_map(|output| match output {
        Output::Refuse(link, kind, _) => Some((*link, *kind)),
        _ => None,
    })
}

fn acked(outputs: &[Output]) -> Option<(u64, u64)> {
    outputs.iter().rev().find_map(|output| match output {
        Output::Send(_, Message::Progress(progress)) => {
            Some((progress.durable.0, progress.committed.get(WRITER).0))
        }
        _ => None,
    })
}

fn join(group: &mut Group<Memory>, link: Link, incarnation: u64, run: LastRun) -> Attached {
    let attach = attach_message(incarnation, 0, run);
    group.as_if_ended(&attach);
    group.attach(at_ms(0), link, "host-a", &attach);
    let outputs = group.take_outputs();
    attached(&outputs).unwrap_or_else(|| panic!("{outputs:?}"))
}

fn copy_of(attached: &Attached) -> CopyState {
    attached.stream.as_ref().expect("a writer").copy
}

fn write(seq: u64, offset: u64, byte: u8, len: usize) -> Record {
    Record {
        writer: WRITER,
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(seq),
        deps: CountVector::new(),
        body: DiskChange {
            disk: DiskId(0),
            offset,
            copy: false,
            flushed: false,
            effect: Effect::Write(Payload::new(Bytes::from(vec![byte; len]))),
        },
    }
}

fn copy_done(seq: u64) -> Record {
    Record {
        body: DiskChange { copy: true, effect: Effect::CopyDone, ..write(seq, 0, 0, 1).body },
        ..write(seq, 0, 0, 1)
    }
}

fn send(group: &mut Group<Memory>, link: Link, record: Record) -> bool {
    group.receive(at_ms(0), link, Frame::Record(link.channel, record)).is_none()
}

fn check_digest(
    group: &mut Group<Memory>,
    link: Link,
    range: std::ops::Range<u64>,
    of: &[u8],
) -> bool {
    let message = Message::DigestCheck {
        disk: DiskId(0),
        offset: range.start,
        len_bytes: (range.end - range.start) as u32,
        digest: *blake3::hash(of).as_bytes(),
    };
    assert!(group.receive(at_ms(0), link, Frame::Control(link.channel, message)).is_none());
    group.flush();
    let outputs = group.take_outputs();
    let result = outputs.iter().find_map(|output| match output {
        Output::Send(_, Message::DigestResult { equal, .. }) => Some(*equal),
        _ => None,
    });
    result.unwrap_or_else(|| panic!("{outputs:?}"))
}

fn read_disk(group: &mut Group<Memory>) -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    group.view(KEY).unwrap().read(0, &mut content).unwrap();
    content
}

fn fold(group: &mut Group<Memory>) -> bool {
    let Some(job) = group.fold_job(at_ms(0)) else { return false };
    let cut = job.cut.clone();
    let result = job.run();
    group.fold_done(cut, result);
    true
}

/// A group that holds a whole copy: zeroes with a few writes, up to seq 3.
fn whole(disk: &Memory) -> Group<Memory> {
    let mut group = create(disk).unwrap();
    assert_eq!(copy_of(&join(&mut group, LINK, 1, LastRun::Unknown)), CopyState::Empty);
    send(&mut group, LINK, write(1, 0, 1, 1000));
    send(&mut group, LINK, write(2, 500, 2, 1000));
    send(&mut group, LINK, copy_done(3));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((3, 3)));
    group
}

#[test]
fn nothing_is_acknowledged_before_the_sync_and_repetitions_do_no_harm() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    send(&mut group, LINK, write(4, 0, 4, 100));
    assert_eq!(acked(&group.take_outputs()), None, "staged");
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((4, 4)));
    group.connection_lost(LINK.connection);
    send(&mut group, LINK, write(5, 0, 5, 100));
    group.flush();
    assert_eq!(group.committed().get(WRITER), Seq(4), "the link is gone");
    let again = join(&mut group, OTHER, 1, LastRun::Continues { from: Seq(3) });
    assert_eq!((copy_of(&again), again.progress.durable), (CopyState::Whole, Seq(4)));
    for seq in 3..=6 {
        send(&mut group, OTHER, write(seq, 0, 40 + seq as u8, 100));
    }
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((6, 6)));
    assert_eq!(read_disk(&mut group)[..2], [46, 46]);
}

#[test]
fn gaps_other_epochs_and_foreign_extents_end_the_link() {
    let cases: [(&str, Record, RefusalKind); 5] = [
        ("gap", write(5, 0, 0, 1), RefusalKind::Invalid),
        ("epoch", Record { epoch: Epoch(9), ..write(4, 0, 0, 1) }, RefusalKind::Invalid),
        (
            "an epoch that has ended",
            Record { epoch: Epoch(0), ..write(4, 0, 0, 1) },
            RefusalKind::Fenced,
        ),
        ("extent", write(4, SIZE, 0, 1), RefusalKind::Invalid),
        (
            "disk",
            Record {
                body: DiskChange { disk: DiskId(3), ..write(4, 0, 0, 1).body },
                ..write(4, 0, 0, 1)
            },
            RefusalKind::Invalid,
        ),
    ];
    for (name, record, kind) in cases {
        let disk = Memory::new();
        let mut group = whole(&disk);
        send(&mut group, LINK, record);
        assert_eq!(refusal(&group.take_outputs()), Some((LINK, kind)), "{name}");
        send(&mut group, LINK, write(4, 0, 0, 1));
        group.flush();
        assert_eq!(group.committed().get(WRITER), Seq(3), "{name}: the link has ended");
    }
}

#[test]
fn the_cut_of_two_writers_is_downward_closed_also_for_the_fold() {
    let disk = Memory::new();
    let of = |member: &str, writer| {
        let attach = Attach {
            member: member.into(),
            writers: vec!["vm".into(), "app".into()],
            tagging: Some(Tagging { form: Form::Vector, peers: Vec::new() }),
            ..attach_message(1, 0, LastRun::Unknown)
        };
        but(attach, |of| of.writer = WriterId(writer))
    };
    let mut group =
        Group::create(disk.clone(), "host-a", &of("vm", 0), at_ms(0), options()).unwrap();
    group.attach(at_ms(0), LINK, "host-a", &of("vm", 0));
    send(&mut group, LINK, copy_done(1));
    let missing = group.recover(at_ms(0), true).unwrap_err();
    assert!(missing.to_string().contains("app"), "{missing}");
    group.attach(at_ms(0), OTHER, "host-a", &of("app", 1));
    send(&mut group, OTHER, Record { writer: WriterId(1), ..copy_done(1) });
    // The first writer's second record depends on one of the other that has not arrived.
    let deps = CountVector::of(WriterId(1), Seq(2));
    send(&mut group, LINK, Record { deps, ..write(2, 0, 7, 100) });
    send(&mut group, LINK, write(3, 100, 8, 100));
    group.flush();
    assert_eq!(group.committed().get(WRITER), Seq(3), "durable for each writer by itself");
    while fold(&mut group) {}
    let mut image = [9; 200];
    disk.open("images/vm.root.img").unwrap().read_at(&mut image, 0).unwrap();
    assert_eq!(image, [0; 200], "not in the cut");
    for crashed in [disk.crash(&mut || true), disk.crash(&mut || false)] {
        let mut group = reopen(&crashed);
        let recovery = group.recover(at_ms(0), true).unwrap();
        assert_eq!((recovery.writers[0].recovered, recovery.writers[0].left_out), (Seq(1), 2));
        assert!(recovery.writers[0].why.as_ref().unwrap().contains("depend"));
        assert_eq!(read_disk(&mut group)[..200], [0; 200]);
    }
    send(&mut group, OTHER, Record { writer: WriterId(1), ..write(2, 0, 5, 10) });
    group.flush();
    while fold(&mut group) {}
    disk.open("images/vm.root.img").unwrap().read_at(&mut image, 0).unwrap();
    assert_eq!((image[0], image[199]), (7, 8));
    assert_eq!(group.recover(at_ms(0), true).unwrap().writers[0].recovered, Seq(3));
}

#[test]
fn a_resync_holds_c_and_the_images_until_it_is_done() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    while fold(&mut group) {}
    let before = read_disk(&mut group);
    let again = join(&mut group, OTHER, 2, LastRun::Unknown);
    assert_eq!((copy_of(&again), again.progress.durable), (CopyState::Resyncing, Seq(3)));
    assert!(check_digest(&mut group, OTHER, 0..4096, &before[..4096]));
    send(&mut group, OTHER, write(4, 100, 7, 50));
    assert!(!check_digest(&mut group, OTHER, 0..4096, &before[..4096]), "a record came before");
    let durable = group.commit.durable_of(WRITER);
    assert_eq!((durable, group.committed().get(WRITER)), (Seq(4), Seq(3)), "C stands still");
    while fold(&mut group) {}
    // A crash now: still resyncing, and what would be recovered is the state before.
    let mut crashed = reopen(&disk.crash(&mut || true));
    assert_eq!(crashed.committed().get(WRITER), Seq(3));
    let recovery = crashed.recover(at_ms(0), true).unwrap();
    assert_eq!((recovery.writers[0].recovered, recovery.writers[0].left_out), (Seq(3), 1));
    assert!(recovery.writers[0].why.as_ref().unwrap().contains("resync"));
    assert_eq!(read_disk(&mut crashed), before);
    // Without a crash it ends.
    send(&mut group, OTHER, copy_done(5));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((5, 5)));
    while fold(&mut group) {}
    assert_eq!(read_disk(&mut group)[100..102], [7, 7]);
    assert_eq!(reopen(&disk.killed()).state().writers[0].copy, CopyState::Whole);
}

/// At exactly this point of the stream, whether it is durable or in the images.
#[test]
fn zeroes_are_known_without_reading() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let check = |group: &mut Group<Memory>, range: std::ops::Range<u64>| {
        let (offset, len_bytes) = (range.start, range.end - range.start);
        let message = Message::ZeroCheck { disk: DiskId(0), offset, len_bytes };
        assert!(group.receive(at_ms(0), LINK, Frame::Control(LINK.channel, message)).is_none());
        group.flush();
        let outputs = group.take_outputs();
        outputs
            .iter()
            .find_map(|output| match output {
                Output::Send(_, Message::DigestResult { equal, .. }) => Some(Ok(*equal)),
                Output::Refuse(_, kind, _) => Some(Err(*kind)),
                _ => None,
            })
            .unwrap_or_else(|| panic!("{outputs:?}"))
    };
    // The images of this test know no holes: what they have counts as data.
    assert_eq!(check(&mut group, 4096..SIZE), Ok(false));
    let zero = Effect::Zero { len_bytes: 4096, no_hole: false };
    send(
        &mut group,
        LINK,
        Record {
            body: DiskChange { effect: zero, ..write(4, 4096, 0, 1).body },
            ..write(4, 4096, 0, 1)
        },
    );
    assert_eq!(check(&mut group, 4096..SIZE), Ok(true), "staged");
    assert_eq!(check(&mut group, 4095..SIZE), Ok(false));
    send(&mut group, LINK, write(5, 6000, 4, 100));
    group.flush();
    group.take_outputs();
    assert_eq!(check(&mut group, 4096..SIZE), Ok(false));
    assert_eq!(check(&mut group, 4096..6000), Ok(true));
    assert_eq!(check(&mut group, 6100..SIZE), Ok(true));
    for (offset, len_bytes) in [(0, 0), (0, SIZE + 1), (u64::MAX, 2)] {
        let mut group = whole(&Memory::new());
        let message = Message::ZeroCheck { disk: DiskId(0), offset, len_bytes };
        assert!(group.receive(at_ms(0), LINK, Frame::Control(LINK.channel, message)).is_none());
        group.flush();
        let outputs = group.take_outputs();
        assert_eq!(refusal(&outputs), Some((LINK, RefusalKind::Invalid)));
    }
}
