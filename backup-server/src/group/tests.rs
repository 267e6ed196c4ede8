//! A group against a host that is played by the test, on a disk that crashes.

mod chosen;
mod disks;
mod seeded;
mod switched;

use super::attach::after_attach;
use super::*;
use crate::history::At;
use crate::storage::memory::{Faults, Memory};
use bytes::Bytes;
use proptest::prelude::*;
use tidelock_protocol::frame::Frame;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{DiskId, Incarnation, Seq};
use tidelock_protocol::message::{Attach, Attached, DiskSpec, LastRun, Machine, Mode};
use tidelock_protocol::record::{Effect, Payload, Record};
use tidelock_protocol::vector::CountVector;

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
    }
}

fn attach_message(incarnation: u64, epoch: u64, last_run: LastRun) -> Attach {
    Attach {
        group: "g".into(),
        member: "vm".into(),
        writer: WRITER,
        writers: vec!["vm".into()],
        disks: vec![DiskSpec { id: DiskId(0), name: "root".into(), size_bytes: SIZE }],
        incarnation: Incarnation(incarnation),
        epoch: Epoch(epoch),
        last_run,
        mode: Mode::Pipelined,
        lease_ms: 10_000,
        grace_ms: GRACE_MS,
        machine: Some(Machine::Json("{}".into())),
    }
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
        Output::Send(_, Message::Committed { durable, committed }) => {
            Some((durable.0, committed.get(WRITER).0))
        }
        _ => None,
    })
}

fn join(group: &mut Group<Memory>, link: Link, incarnation: u64, run: LastRun) -> Attached {
    group.attach(at_ms(0), link, "host-a", &attach_message(incarnation, 0, run));
    let outputs = group.take_outputs();
    attached(&outputs).unwrap_or_else(|| panic!("{outputs:?}"))
}

fn write(seq: u64, offset: u64, byte: u8, len: usize) -> Record {
    Record {
        writer: WRITER,
        seq: Seq(seq),
        epoch: Epoch(1),
        hlc: Hlc(seq),
        deps: CountVector::new(),
        disk: DiskId(0),
        offset,
        copy: false,
        flushed: false,
        effect: Effect::Write(Payload::new(Bytes::from(vec![byte; len]))),
    }
}

fn copy_done(seq: u64) -> Record {
    Record { copy: true, effect: Effect::CopyDone, ..write(seq, 0, 0, 1) }
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
    assert_eq!(join(&mut group, LINK, 1, LastRun::Unknown).copy, CopyState::Empty);
    send(&mut group, LINK, write(1, 0, 1, 1000));
    send(&mut group, LINK, write(2, 500, 2, 1000));
    send(&mut group, LINK, copy_done(3));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((3, 3)));
    group
}

#[test]
fn the_table_of_copy_states_after_an_attachment() {
    use CopyState::{Empty, Partial, Resyncing, Whole};
    let five = Seq(5);
    let runs = [
        ("continues", LastRun::Continues { from: Seq(6) }, true),
        ("continues earlier", LastRun::Continues { from: Seq(2) }, true),
        ("continues after a gap", LastRun::Continues { from: Seq(7) }, true),
        ("continues, another run", LastRun::Continues { from: Seq(6) }, false),
        ("clean", LastRun::Clean { seq: five }, false),
        ("clean elsewhere", LastRun::Clean { seq: Seq(4) }, false),
        ("unknown", LastRun::Unknown, true),
    ];
    let mut table = String::new();
    for (name, run, same) in runs {
        let row = [Empty, Partial, Whole, Resyncing].map(|c| after_attach(c, run, same, five));
        table += &format!("{name}: {row:?}\n");
    }
    assert_eq!(
        table,
        "continues: [Empty, Partial, Whole, Resyncing]\n\
         continues earlier: [Empty, Partial, Whole, Resyncing]\n\
         continues after a gap: [Empty, Partial, Resyncing, Resyncing]\n\
         continues, another run: [Empty, Partial, Resyncing, Resyncing]\n\
         clean: [Empty, Partial, Whole, Resyncing]\n\
         clean elsewhere: [Empty, Partial, Resyncing, Resyncing]\n\
         unknown: [Empty, Partial, Resyncing, Resyncing]\n"
    );
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
    assert_eq!((again.copy, again.durable), (CopyState::Whole, Seq(4)));
    for seq in 3..=6 {
        send(&mut group, OTHER, write(seq, 0, 40 + seq as u8, 100));
    }
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((6, 6)));
    assert_eq!(read_disk(&mut group)[..2], [46, 46]);
}

#[test]
fn gaps_other_epochs_and_foreign_extents_end_the_link() {
    let cases: [(&str, Record, RefusalKind); 4] = [
        ("gap", write(5, 0, 0, 1), RefusalKind::Invalid),
        ("epoch", Record { epoch: Epoch(9), ..write(4, 0, 0, 1) }, RefusalKind::Invalid),
        ("extent", write(4, SIZE, 0, 1), RefusalKind::Invalid),
        ("disk", Record { disk: DiskId(3), ..write(4, 0, 0, 1) }, RefusalKind::Invalid),
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
fn newer_runs_take_over_and_older_ones_are_refused() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.attach(at_ms(0), OTHER, "host-a", &attach_message(2, 1, LastRun::Clean { seq: Seq(3) }));
    let outputs = group.take_outputs();
    assert_eq!(attached(&outputs).unwrap().copy, CopyState::Whole);
    assert_eq!(refusal(&outputs), Some((LINK, RefusalKind::Superseded)));
    group.attach(at_ms(0), LINK, "host-a", &attach_message(1, 1, LastRun::Unknown));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Superseded)));
    let mut group = reopen(&disk.killed());
    group.attach(at_ms(0), LINK, "host-a", &attach_message(1, 1, LastRun::Unknown));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Superseded)));
}

#[test]
fn what_a_run_sent_before_it_connected_anew_does_not_take_the_member_from_it() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let first = attach_message(1, 1, LastRun::Unknown);
    let goes_on = |from| attach_message(1, 1, LastRun::Continues { from: Seq(from) });
    group.attach(at_ms(0), OTHER, "host-a", &goes_on(4));
    assert_eq!(
        refusal(&group.take_outputs()),
        Some((LINK, RefusalKind::Superseded)),
        "the newer one has it"
    );
    group.attach(at_ms(0), LINK, "host-a", &first);
    let outputs = group.take_outputs();
    assert_eq!(refusal(&outputs), Some((LINK, RefusalKind::Stopping)), "and keeps it");
    assert!(attached(&outputs).is_none());
    send(&mut group, OTHER, write(4, 0, 0, 1));
    group.flush();
    assert_eq!(acked(&group.take_outputs()).unwrap().0, 4);
    // Also after the end of the newer one: what the run knew then says nothing about the copy now.
    group.connection_lost(OTHER.connection);
    group.attach(at_ms(0), LINK, "host-a", &first);
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Stopping)));
    assert_eq!(group.state().writers[0].copy, CopyState::Whole);
    // Also if it broke since, and this server has opened it again.
    let attached_by = group.attached_by().clone();
    let mut group = reopen(&disk.killed());
    group.was_attached_by(attached_by);
    group.attach(at_ms(0), LINK, "host-a", &first);
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Stopping)));
    group.attach(at_ms(0), LATEST, "host-a", &goes_on(5));
    assert_eq!(attached(&group.take_outputs()).unwrap().copy, CopyState::Whole);
}

#[test]
fn strangers_and_other_shapes_are_refused() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let good = || attach_message(2, 1, LastRun::Unknown);
    let other_size = DiskSpec { size_bytes: SIZE / 2, ..good().disks[0].clone() };
    let other_name = DiskSpec { name: "data".into(), ..good().disks[0].clone() };
    let cases = [
        ("host", "host-b", good(), RefusalKind::Forbidden),
        ("epoch", "host-a", Attach { epoch: Epoch(7), ..good() }, RefusalKind::Mismatch),
        ("size", "host-a", Attach { disks: vec![other_size], ..good() }, RefusalKind::Mismatch),
        ("disk", "host-a", Attach { disks: vec![other_name], ..good() }, RefusalKind::Mismatch),
        (
            "writers",
            "host-a",
            Attach { writers: vec!["vm".into(), "x".into()], ..good() },
            RefusalKind::Mismatch,
        ),
        ("group", "host-a", Attach { group: "h".into(), ..good() }, RefusalKind::Mismatch),
        ("path", "host-a", Attach { group: "../x".into(), ..good() }, RefusalKind::Invalid),
        ("lease", "host-a", Attach { lease_ms: GRACE_MS, ..good() }, RefusalKind::Invalid),
        ("no disk", "host-a", Attach { disks: vec![], ..good() }, RefusalKind::Invalid),
    ];
    for (name, host, attach, kind) in cases {
        group.attach(at_ms(0), OTHER, host, &attach);
        assert_eq!(refusal(&group.take_outputs()), Some((OTHER, kind)), "{name}");
    }
    assert_eq!(group.state().writers[0].copy, CopyState::Whole, "nothing was touched");
    let listed = GroupOptions { hosts: Some(vec!["host-b".into()]), ..options() };
    let mut group = Group::open(disk, at_ms(0), listed).unwrap().unwrap().0;
    group.attach(at_ms(0), OTHER, "host-b", &good());
    assert!(attached(&group.take_outputs()).is_some());
}

#[test]
fn the_cut_of_two_writers_is_downward_closed_also_for_the_fold() {
    let disk = Memory::new();
    let of = |member: &str, writer| Attach {
        member: member.into(),
        writer: WriterId(writer),
        writers: vec!["vm".into(), "app".into()],
        ..attach_message(1, 0, LastRun::Unknown)
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
fn a_lost_manifest_never_makes_the_next_attachment_erase_the_data() {
    let disk = Memory::new();
    drop(whole(&disk));
    disk.remove("group.json").unwrap();
    let refused = create(&disk).map(|_| ()).unwrap_err();
    assert_eq!(refused.refusal().0, RefusalKind::Damaged, "{refused}");
    assert!(!disk.list("images").unwrap().is_empty() && !disk.list("journal").unwrap().is_empty());
}

#[test]
fn a_resync_holds_c_and_the_images_until_it_is_done() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    while fold(&mut group) {}
    let before = read_disk(&mut group);
    let again = join(&mut group, OTHER, 2, LastRun::Unknown);
    assert_eq!((again.copy, again.durable), (CopyState::Resyncing, Seq(3)));
    assert!(check_digest(&mut group, OTHER, 0..4096, &before[..4096]));
    send(&mut group, OTHER, write(4, 100, 7, 50));
    assert!(!check_digest(&mut group, OTHER, 0..4096, &before[..4096]), "a record came before");
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((4, 3)), "durable, but C stands still");
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

#[test]
fn nothing_can_be_recovered_before_the_initial_copy_is_durable() {
    let disk = Memory::new();
    let mut group = create(&disk).unwrap();
    let refused = group.recover(at_ms(100_000), false).unwrap_err();
    assert!(matches!(refused, RecoverError::Initialising { .. }), "{refused}");
    join(&mut group, LINK, 1, LastRun::Unknown);
    send(&mut group, LINK, write(1, 0, 1, 10));
    let refused = group.recover(at_ms(100_000), true).unwrap_err();
    assert!(matches!(refused, RecoverError::Initialising { .. }), "{refused}");
    assert!(matches!(group.pin(), Err(RecoverError::Initialising { .. })));
    group.connection_lost(LINK.connection);
    assert_eq!(join(&mut group, OTHER, 2, LastRun::Unknown).copy, CopyState::Partial);
    send(&mut group, OTHER, copy_done(2));
    assert!(!group.status(at_ms(0)).recoverable, "only staged");
    group.flush();
    assert!(group.status(at_ms(0)).recoverable);
}

#[test]
fn recovery_waits_for_the_grace_fences_for_good_and_repeats_itself() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.beacon(at_ms(50_000), LINK, MonoNanos(1));
    assert_eq!(
        group.take_outputs(),
        [Output::Send(LINK, Message::Lease { sent_at: MonoNanos(1) })]
    );
    let early = group.recover(at_ms(50_000 + GRACE_MS - 1), false);
    assert!(matches!(early, Err(RecoverError::Grace { remaining_ms: 1, .. })), "{early:?}");
    let recovery = group.recover(at_ms(50_000 + GRACE_MS), false).unwrap();
    assert_eq!((recovery.epoch, recovery.primary_declared_dead), (Epoch(2), false));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Fenced)));
    send(&mut group, LINK, write(4, 0, 9, 10));
    group.beacon(at_ms(50_000), LINK, MonoNanos(2));
    group.flush();
    assert_eq!(group.take_outputs(), [], "no lease and no acknowledgement for the old primary");
    assert_eq!(group.recover(at_ms(99_000), true).unwrap(), recovery);
    let mut group = reopen(&disk.crash(&mut || false));
    assert_eq!(group.recover(at_ms(99_000), true).unwrap(), recovery);
    for epoch in [0, 1, 2] {
        group.attach(at_ms(0), OTHER, "host-a", &attach_message(9, epoch, LastRun::Unknown));
        assert_eq!(refusal(&group.take_outputs()), Some((OTHER, RefusalKind::Fenced)));
    }
    // A restarted server counts the grace anew: it may have answered a beacon right before.
    let restarted = Memory::new();
    whole(&restarted);
    let early = reopen(&restarted).recover(at_ms(GRACE_MS - 1), false);
    assert!(matches!(early, Err(RecoverError::Grace { .. })));
}

#[test]
fn guests_of_a_recovered_group_keep_what_they_flushed() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    send(&mut group, LINK, write(4, 0, 4, 600));
    group.recover(at_ms(0), true).unwrap();
    let mut expected = read_disk(&mut group);
    assert_eq!(expected[0], 4, "what had arrived is part of it");
    let data = GuestEffect::Write(Bytes::from(vec![9; 700]));
    assert!(group.guest_write(at_ms(1), KEY, 300, data));
    let zero = GuestEffect::Zero { len_bytes: 64, no_hole: false };
    assert!(group.guest_write(at_ms(1), KEY, 320, zero));
    assert!(group.guest_written());
    expected[300..1000].fill(9);
    expected[320..384].fill(0);
    assert_eq!(read_disk(&mut group), expected, "readable before it is durable");
    group.flush();
    let mut crashed = reopen(&disk.crash(&mut || false));
    assert_eq!(read_disk(&mut crashed), expected);
    while fold(&mut crashed) {}
    assert_eq!(crashed.unfolded_bytes(), 0);
    assert_eq!(read_disk(&mut crashed), expected, "folding changes nothing");
    assert!(crashed.guest_write(at_ms(2), KEY, 0, GuestEffect::Write(Bytes::from_static(b"x"))));
    crashed.flush();
    assert_eq!(crashed.state().writers[0].seq, Seq(7), "seqs go on after the cut");
    // A write while a fold runs stays visible when the fold is done.
    let job = crashed.fold_job(at_ms(0)).unwrap();
    assert!(crashed.guest_write(at_ms(2), KEY, 9, GuestEffect::Write(Bytes::from_static(b"y"))));
    assert!(crashed.guest_written());
    let cut = job.cut.clone();
    crashed.fold_done(cut, job.run());
    (expected[0], expected[9]) = (b'x', b'y');
    assert_eq!(read_disk(&mut crashed), expected);
    let beyond = GuestEffect::Write(Bytes::from_static(b"xx"));
    assert!(!crashed.guest_write(at_ms(2), KEY, SIZE - 1, beyond));
}

#[test]
fn what_a_recovered_guest_writes_says_where_it_flushed() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.options.retention.window_ms = 1_000_000;
    group.recover(at_ms(0), true).unwrap();
    let from = group.history().unwrap().resolve(&At::Latest).unwrap();
    for ms in 1..=4 {
        let byte = GuestEffect::Write(Bytes::from_static(b"x"));
        assert!(group.guest_write(at_ms(ms), KEY, ms, byte));
        if ms == 2 {
            group.guest_flush(WRITER);
        }
    }
    group.flush();
    let history = group.history().unwrap();
    let to = history.resolve(&At::Latest).unwrap();
    let spans = history.timeline(&from, &to, 1).unwrap();
    assert_eq!((spans[0].records, spans[0].flushes), (4, 1));
    let last = spans[0].last_flush.unwrap();
    assert_eq!((last.writer, last.seq.0), (WRITER, from.cut.get(WRITER).0 + 2));
}

#[test]
fn folding_keeps_to_its_rate_while_nothing_presses() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    while fold(&mut group) {}
    group.options.fold_rate_bytes_s = Some(1000);
    let mut next = 4;
    let mut feed = |group: &mut Group<Memory>| {
        for _ in 0..10 {
            assert!(send(group, LINK, write(next, 0, 1, 500)));
            group.flush();
            next += 1;
        }
    };
    let fold_at = |group: &mut Group<Memory>, ms| {
        let before = group.unfolded_bytes();
        let job = group.fold_job(at_ms(ms))?;
        let cut = job.cut.clone();
        group.fold_done(cut, job.run());
        Some(before - group.unfolded_bytes())
    };
    feed(&mut group);
    // Two seconds' worth, then nothing until they have passed.
    let first = fold_at(&mut group, 0).unwrap();
    assert!((2000..3000).contains(&first), "{first}");
    assert!(group.fold_is_paced(at_ms(1999)));
    assert_eq!(fold_at(&mut group, 1999), None);
    assert!(!group.fold_is_paced(at_ms(3000)));
    assert!(fold_at(&mut group, 3000).is_some());
    // What waits is half of what may wait: it goes as fast as it can.
    feed(&mut group);
    group.options.unfolded_max_bytes = 2 * group.unfolded_bytes();
    assert!(fold_at(&mut group, 3001).unwrap() > 3000);
    assert_eq!(group.unfolded_bytes(), 0);
}

#[test]
fn a_pinned_view_stands_still_while_everything_goes_on() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    while fold(&mut group) {}
    send(&mut group, LINK, write(4, 0, 4, 600));
    let pin = group.pin().unwrap();
    let held = group.journal().durable_end();
    let mut then = vec![0; SIZE as usize];
    pin.disks[0].1.read(0, &mut then).unwrap();
    assert_eq!(then[0], 4);
    for seq in 5..30 {
        send(&mut group, LINK, write(seq, seq * 100, seq as u8, 600));
        group.flush();
        fold(&mut group);
        assert!(group.fold_position() <= held, "images do not pass the cut");
    }
    let mut now = vec![0; SIZE as usize];
    pin.disks[0].1.read(0, &mut now).unwrap();
    assert_eq!(now, then);
    drop(pin);
    assert!(fold(&mut group));
}

#[test]
fn at_the_limit_of_unfolded_bytes_the_group_stalls_and_comes_back() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    group.options.unfolded_max_bytes = group.unfolded_bytes() + 3000;
    let pin = group.pin().unwrap();
    let mut next = 4;
    while !pin.is_revoked() {
        assert!(send(&mut group, LINK, write(next, 0, 1, 500)));
        group.flush();
        next += 1;
        assert!(next < 20, "the pin must give way");
    }
    assert!(group.accepts(), "an export does not stop replication");
    drop(pin);
    while group.accepts() {
        assert!(send(&mut group, LINK, write(next, 0, 1, 500)));
        group.flush();
        next += 1;
        assert!(next < 20, "it must stall");
    }
    assert!(!send(&mut group, LINK, write(next, 0, 1, 500)), "it comes back to the caller");
    let told = |outputs: &[Output], stalled: bool| {
        outputs.iter().any(|output| {
            matches!(output, Output::Send(_, Message::Stalled { reason }) if reason.is_some() == stalled)
        })
    };
    assert!(told(&group.take_outputs(), true));
    while fold(&mut group) {}
    assert!(told(&group.take_outputs(), false));
    assert!(send(&mut group, LINK, write(next, 0, 1, 500)));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((next, next)));
}

#[test]
fn a_recovery_without_room_is_on_record_when_there_is() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    for _ in 0..2 {
        let error = group.recover(at_ms(0), true).unwrap_err();
        assert!(matches!(error, RecoverError::NoRoom(_)), "{error}");
        assert_eq!(group.recovery(), None, "nothing is told before it is durable");
    }
    disk.set_faults(Faults::default());
    group.retry();
    let recovery = group.recover(at_ms(0), true).unwrap();
    assert_eq!(recovery.epoch, Epoch(2), "it is begun once");
    assert_eq!(reopen(&disk.crash(&mut || false)).recovery(), Some(recovery));
}

#[test]
fn a_full_disk_stalls_and_nothing_is_lost_or_doubled() {
    for room in (0..4000).step_by(61) {
        let disk = Memory::new();
        let mut group = whole(&disk);
        let used: u64 = group.journal().bytes() + SIZE + 2000;
        disk.set_faults(Faults { capacity_bytes: Some(used + room), ..Faults::default() });
        let (mut next, mut stalls) = (4, 0);
        while next < 20 {
            if send(&mut group, LINK, write(next, next * 50, next as u8, 400)) {
                next += 1;
            }
            group.flush();
            assert_eq!(group.broken(), None);
            if !group.accepts() {
                stalls += 1;
                // A new run cannot be told where the stream ends.
                group.attach(at_ms(0), OTHER, "host-a", &attach_message(2, 1, LastRun::Unknown));
                let kind = refusal(&group.take_outputs()).map(|(_, kind)| kind);
                assert_eq!(kind, Some(RefusalKind::Stopping));
                disk.set_faults(Faults::default());
                group.retry();
                assert!(group.accepts());
                assert_eq!(acked(&group.take_outputs()), Some((next - 1, next - 1)));
            }
        }
        assert!(stalls <= 1 && (stalls == 1 || room > 1000), "room {room}: {stalls} stalls");
        let mut expected = vec![0; SIZE as usize];
        expected[..1000].fill(1);
        expected[500..1500].fill(2);
        (4..20usize).for_each(|n| expected[n * 50..n * 50 + 400].fill(n as u8));
        let mut group = reopen(&disk.crash(&mut || false));
        assert_eq!(read_disk(&mut group), expected);
    }
}

#[test]
fn a_failing_disk_breaks_the_group_and_opening_it_again_mends_it() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    disk.set_faults(Faults { sync_fails: true, ..Faults::default() });
    send(&mut group, LINK, write(4, 0, 4, 10));
    group.flush();
    let outputs = group.take_outputs();
    assert_eq!((acked(&outputs), refusal(&outputs)), (None, Some((LINK, RefusalKind::Stopping))));
    assert!(group.broken().is_some() && !group.accepts());
    disk.set_faults(Faults::default());
    group.flush();
    assert_eq!(acked(&group.take_outputs()), None, "never again");
    let mut group = reopen(&disk);
    let again = join(&mut group, LINK, 1, LastRun::Continues { from: Seq(4) });
    assert!(again.durable >= Seq(3) && again.copy == CopyState::Whole);
    send(&mut group, LINK, write(4, 0, 4, 10));
    send(&mut group, LINK, write(5, 0, 5, 10));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((5, 5)));
}

/// One step of a random life.
#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: u64 },
    Zero { offset: u64, len: u64 },
    Flush,
    Fold,
    Resync,
    CopyDone,
}

fn step() -> impl Strategy<Value = Step> {
    let extent = (0u64..SIZE - 1).prop_flat_map(|o| (Just(o), 1..(SIZE - o).min(1500)));
    prop_oneof![
        6 => extent.clone().prop_map(|(offset, len)| Step::Write { offset, len }),
        1 => extent.prop_map(|(offset, len)| Step::Zero { offset, len }),
        3 => Just(Step::Flush),
        3 => Just(Step::Fold),
        1 => Just(Step::Resync),
        1 => Just(Step::CopyDone),
    ]
}

/// What the test knows of the group's life.
#[derive(Default)]
struct Life {
    /// The disk after each seq.
    disks: Vec<Vec<u8>>,
    /// The greatest entry of C that was acknowledged.
    committed: u64,
    durable: u64,
}

impl Life {
    fn listen(&mut self, group: &mut Group<Memory>) {
        if let Some((durable, committed)) = acked(&group.take_outputs()) {
            self.durable = self.durable.max(durable);
            self.committed = self.committed.max(committed);
        }
    }

    fn run(&mut self, disk: &Memory, steps: &[Step]) -> Option<()> {
        self.disks.push(vec![0; SIZE as usize]);
        let mut group = create(disk).ok()?;
        let mut incarnation = 1;
        group.attach(at_ms(0), LINK, "host-a", &attach_message(1, 0, LastRun::Unknown));
        attached(&group.take_outputs())?;
        for step in steps {
            let seq = self.disks.len() as u64;
            let mut content = self.disks.last().unwrap().clone();
            let byte = (seq % 255) as u8 + 1;
            let record = match step {
                Step::Write { offset, len } => {
                    content[*offset as usize..(offset + len) as usize].fill(byte);
                    write(seq, *offset, byte, *len as usize)
                }
                Step::Zero { offset, len } => {
                    content[*offset as usize..(offset + len) as usize].fill(0);
                    let effect = Effect::Zero { len_bytes: *len as u32, no_hole: false };
                    Record { effect, ..write(seq, *offset, 0, 1) }
                }
                Step::CopyDone => copy_done(seq),
                Step::Flush => {
                    group.flush();
                    self.listen(&mut group);
                    continue;
                }
                Step::Fold => {
                    fold(&mut group);
                    continue;
                }
                Step::Resync => {
                    incarnation += 1;
                    let attach = attach_message(incarnation, 1, LastRun::Unknown);
                    group.attach(at_ms(0), LINK, "host-a", &attach);
                    attached(&group.take_outputs())?;
                    continue;
                }
            };
            self.disks.push(content);
            send(&mut group, LINK, record);
            if group.broken().is_some() {
                return None;
            }
        }
        group.flush();
        self.listen(&mut group);
        Some(())
    }

    /// Rules 1, 2 and 9: what was acknowledged is found, and the recovered disk is one that the
    /// primary had, at or after what was committed.
    fn check(&self, disk: &Memory) {
        let opened = Group::open(disk.clone(), at_ms(0), options()).expect("opens");
        let Some((mut group, _)) = opened else {
            assert_eq!(self.durable, 0);
            return;
        };
        let state = group.state().writers[0];
        if group.manifest().member(WRITER).is_none() {
            // The power went off before the first attachment was answered.
            assert_eq!((self.durable, state.seq.0), (0, 0));
            return;
        }
        assert!(state.seq.0 >= self.durable && state.committed.0 >= self.committed);
        assert_eq!(read_disk(&mut group), self.disks[state.seq.0 as usize], "all that arrived");
        drop(group);
        let mut group = reopen(disk);
        match group.recover(at_ms(0), true) {
            Ok(recovery) => {
                let cut = recovery.writers[0].recovered.0;
                assert!(cut >= self.committed);
                assert_eq!(read_disk(&mut group), self.disks[cut as usize], "cut {cut}");
                while fold(&mut group) {}
                assert_eq!(read_disk(&mut group), self.disks[cut as usize], "folded");
            }
            Err(RecoverError::Initialising { .. }) => {
                assert!(matches!(state.copy, CopyState::Empty | CopyState::Partial));
            }
            Err(e) => panic!("{e}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_happens_the_recovered_disk_is_one_that_was(
        steps in prop::collection::vec(step(), 1..60),
        at in 0u64..200,
        seed: u64,
    ) {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        let mut life = Life::default();
        life.run(&disk, &steps);
        let mut state = seed | 1;
        for threshold in [0, u64::MAX / 8, u64::MAX / 2, u64::MAX / 8 * 7, u64::MAX] {
            life.check(&disk.crash(&mut || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state < threshold
            }));
        }
    }
}

/// A host that knows where its disks may differ asks whether another run has written since.
#[test]
fn an_unclean_run_is_told_which_run_was_there_before() {
    let mut group = create(&Memory::new()).unwrap();
    let told = |group: &mut Group<Memory>, incarnation, run| {
        group.attach(at_ms(0), LINK, "host-a", &attach_message(incarnation, 0, run));
        let outputs = group.take_outputs();
        let messages: Vec<_> = outputs
            .iter()
            .filter_map(|output| match output {
                Output::Send(_, Message::LastAttached { incarnation }) => Some(incarnation.0),
                Output::Send(_, Message::Attached(_)) => Some(u64::MAX),
                _ => None,
            })
            .collect();
        messages
    };
    assert_eq!(told(&mut group, 3, LastRun::Unclean), [0, u64::MAX], "right before the answer");
    assert_eq!(told(&mut group, 5, LastRun::Unclean), [3, u64::MAX]);
    assert_eq!(told(&mut group, 6, LastRun::Unknown), [u64::MAX], "an older host is not told");
    assert_eq!(told(&mut group, 9, LastRun::Unclean), [6, u64::MAX]);
    assert_eq!(told(&mut group, 9, LastRun::Unclean), [9, u64::MAX], "the answer was lost");
}

/// What is beyond the old end is zeroes until it has come, at earlier points, too; and the size is on record before.
#[test]
fn a_disk_that_has_grown_is_brought_across_and_never_shrinks() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let before = read_disk(&mut group);
    let grown = |incarnation, epoch, size_bytes| {
        let spec = DiskSpec { id: DiskId(0), name: "root".into(), size_bytes };
        let clean = LastRun::Clean { seq: Seq(3) };
        Attach { disks: vec![spec], ..attach_message(incarnation, epoch, clean) }
    };
    group.attach(at_ms(0), OTHER, "host-a", &grown(2, 1, SIZE * 2));
    let answer = attached(&group.take_outputs()).expect("disks may grow");
    assert_eq!((answer.copy, answer.committed.get(WRITER)), (CopyState::Resyncing, Seq(3)));
    let all = |group: &mut Group<Memory>| {
        let view = group.view(KEY).unwrap();
        let mut content = vec![0xff; view.size_bytes() as usize];
        view.read(0, &mut content).unwrap();
        content
    };
    let mut after_crash = reopen(&disk.crash(&mut || false));
    for group in [&mut group, &mut after_crash] {
        let content = all(group);
        assert_eq!(content.len() as u64, SIZE * 2);
        assert!(
            content[..SIZE as usize] == before && content[SIZE as usize..].iter().all(|b| *b == 0)
        );
    }
    send(&mut group, OTHER, Record { copy: true, ..write(4, SIZE + 100, 9, 500) });
    send(&mut group, OTHER, copy_done(5));
    group.flush();
    assert_eq!(acked(&group.take_outputs()), Some((5, 5)));
    while fold(&mut group) {}
    let content = all(&mut reopen(&disk));
    assert!(
        content[SIZE as usize + 100..][..500] == [9; 500] && content[..SIZE as usize] == before
    );

    group.attach(at_ms(0), LINK, "host-a", &grown(3, 1, SIZE));
    assert_eq!(refusal(&group.take_outputs()), Some((LINK, RefusalKind::Mismatch)));
    // Made larger for an attachment that was not put on record.
    disk.open("images/vm.root.img").unwrap().set_size(SIZE * 3).unwrap();
    assert_eq!(all(&mut reopen(&disk)).len() as u64, SIZE * 2);
}
