//! What is asked when a host attaches, and what it is told.

use super::super::judging::{OnRecord, judge};
use super::*;
use tidelock_protocol::message::Basis;

#[test]
fn the_table_of_copy_states_after_an_attachment() {
    use CopyState::{Empty, Partial, Resyncing, Whole};
    let bases = [
        ("continues", Basis::Continues),
        ("clean", Basis::Clean),
        ("log", Basis::Log),
        ("everything", Basis::Everything { why: String::new() }),
    ];
    let mut table = String::new();
    for (name, basis) in bases {
        let row = [Empty, Partial, Whole, Resyncing].map(|copy| after_attach(copy, &basis));
        table += &format!("{name}: {row:?}\n");
    }
    assert_eq!(
        table,
        "continues: [Empty, Partial, Whole, Resyncing]\n\
         clean: [Empty, Partial, Whole, Resyncing]\n\
         log: [Empty, Partial, Resyncing, Resyncing]\n\
         everything: [Empty, Partial, Resyncing, Resyncing]\n"
    );
}

/// Each line is a host that tells the truth as its state directory has it, which may be that of another moment.
#[test]
fn the_table_of_what_an_attachment_may_go_by() {
    let (other, three, four) = (run(9), run(3), run(4));
    let log = |number| LogAge { file: 3, number };
    let clean = |seq, served| LastRun::Clean { seq: Seq(seq), served };
    let unclean = |number| LastRun::Unclean { log: log(number) };
    let continues = |from| LastRun::Continues { from: Seq(from) };
    // The run 3 is in force and has sent 50 records; its log was told to be at 20.
    let killed =
        OnRecord { run: Some(three), log: log(20), durable: Seq(50), ..OnRecord::default() };
    let end = CleanEnd { seq: Seq(50), marks: marks() };
    let ended = OnRecord { clean: Some(end), ..killed.clone() };
    let proposed = OnRecord { proposed: Some(four), ..ended.clone() };
    let never = OnRecord::default();
    let as_it_was = marks();
    let restored = vec!["root image inode=8".to_owned()];
    let added: Vec<_> = marks().into_iter().chain(["data image inode=5".to_owned()]).collect();
    let cases = [
        ("no record at the host", &ended, None, LastRun::Unknown, &as_it_was),
        ("no record at the backup", &never, Some(three), clean(50, false), &as_it_was),
        ("killed", &killed, Some(three), unclean(20), &as_it_was),
        ("killed, the log has gone on", &killed, Some(three), unclean(25), &as_it_was),
        ("killed, restored from a snapshot", &killed, Some(three), unclean(19), &as_it_was),
        ("killed, another run since", &killed, Some(other), unclean(30), &as_it_was),
        ("killed, the log says nothing", &killed, Some(three), LastRun::Unknown, &as_it_was),
        ("clean", &ended, Some(three), clean(50, false), &as_it_was),
        ("clean, a disk restored", &ended, Some(three), clean(50, false), &restored),
        ("clean, a disk added", &ended, Some(three), clean(50, false), &added),
        ("clean, served since", &ended, Some(three), clean(50, true), &as_it_was),
        ("clean, served on a restored disk", &ended, Some(three), clean(50, true), &restored),
        ("clean, all of it older", &ended, Some(run(2)), clean(40, false), &as_it_was),
        ("clean, the state older", &ended, Some(three), clean(40, false), &as_it_was),
        ("clean, the backup has not heard", &killed, Some(three), clean(50, false), &as_it_was),
        ("clean, ran elsewhere", &ended, Some(other), clean(50, false), &as_it_was),
        ("clean, a start cut short", &proposed, Some(three), clean(50, false), &as_it_was),
        ("a start on record here alone", &proposed, Some(four), unclean(21), &as_it_was),
        ("a start on record here, clean", &proposed, Some(four), clean(50, false), &as_it_was),
        ("backlog on disk", &killed, Some(three), continues(51), &as_it_was),
        ("backlog on disk, some sent", &killed, Some(three), continues(40), &as_it_was),
        ("backlog on disk, a gap", &killed, Some(three), continues(52), &as_it_was),
        ("backlog on disk, ran elsewhere", &killed, Some(other), continues(51), &as_it_was),
    ];
    let mut table = String::new();
    for (name, record, before, last_run, marks) in cases {
        let attach = but(attach_message(5, 1, last_run), |of| {
            (of.before, of.marks) = (before, marks.clone());
        });
        let basis = match judge(record, attach.writing().unwrap()) {
            Basis::Everything { why } => format!("everything: {}", &why[..why.len().min(48)]),
            other => format!("{other:?}").to_lowercase(),
        };
        table += &format!("{name} | {basis}\n");
    }
    println!("{table}");
    assert_eq!(
        table,
        "no record at the host | everything: the host has no record of how this member's last\n\
         no record at the backup | everything: the backup has no record of a run of this member\n\
         killed | log\n\
         killed, the log has gone on | log\n\
         killed, restored from a snapshot | everything: the activity log is older than the backup has he\n\
         killed, another run since | everything: the host's record is not of the run that the bac\n\
         killed, the log says nothing | everything: the host has no record of how this member's last\n\
         clean | clean\n\
         clean, a disk restored | everything: a disk is not as it was when the daemon stopped:\n\
         clean, a disk added | clean\n\
         clean, served since | log\n\
         clean, served on a restored disk | everything: a disk is not as it was when the daemon stopped:\n\
         clean, all of it older | everything: the host's record is not of the run that the bac\n\
         clean, the state older | everything: the last run ended at 40 by the host's record an\n\
         clean, the backup has not heard | everything: the backup has not heard that the last run ended\n\
         clean, ran elsewhere | everything: the host's record is not of the run that the bac\n\
         clean, a start cut short | clean\n\
         a start on record here alone | log\n\
         a start on record here, clean | everything: the backup has not heard that the last run ended\n\
         backlog on disk | continues\n\
         backlog on disk, some sent | continues\n\
         backlog on disk, a gap | everything: the host can send from 52 on, and the backup has\n\
         backlog on disk, ran elsewhere | everything: the host's record is not of the run that the bac\n"
    );
}

/// The run in force is the last one that its host has on record, also after a restart of the server.
#[test]
fn a_start_that_is_cut_short_costs_nothing_and_one_that_is_refused_is_no_evidence() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    end(&mut group, LINK, 3);
    let clean = LastRun::Clean { seq: Seq(3), served: false };
    let start = |number, before, last_run| {
        but(attach_message(number, 1, last_run), |of| of.before = Some(run(before)))
    };
    let copy = |group: &mut Group<Memory>, attach: &Attach| {
        group.attach(at_ms(0), OTHER, "host-a", attach);
        copy_of(&attached(&group.take_outputs()).unwrap())
    };
    // Cut short before the host has it on record.
    for number in 2..4 {
        assert_eq!(copy(&mut group, &start(number, 1, clean)), CopyState::Whole);
        group.connection_lost(OTHER.connection);
    }
    let disk = disk.killed();
    let mut group = reopen(&disk);
    assert_eq!(copy(&mut group, &start(4, 1, clean)), CopyState::Whole);
    let begun = Frame::Control(OTHER.channel, Message::Begun);
    assert!(group.receive(at_ms(0), OTHER, begun).is_none());
    let age = LogAge { file: 4, number: 9 };
    let logged = Frame::Control(OTHER.channel, Message::Logged(age));
    assert!(group.receive(at_ms(0), OTHER, logged).is_none());
    group.flush();
    let mut group = reopen(&disk.killed());
    assert_eq!(group.state().log_of(WRITER), age);
    // The host and its disks as they were before: the first start says so, and so does the next one.
    for number in 5..7 {
        group.attach(at_ms(0), OTHER, "host-a", &start(number, 1, clean));
        let told = attached(&group.take_outputs()).unwrap().stream.unwrap();
        assert_eq!(told.copy, CopyState::Resyncing);
        assert!(matches!(told.basis, Basis::Everything { .. }), "{told:?}");
        group.connection_lost(OTHER.connection);
    }
    // The one that was there goes by its log.
    group.attach(at_ms(0), OTHER, "host-a", &start(7, 4, LastRun::Unclean { log: age }));
    assert_eq!(attached(&group.take_outputs()).unwrap().stream.unwrap().basis, Basis::Log);
}

/// A daemon that lives while a clone of its host was started.
#[test]
fn who_was_replaced_by_another_run_does_not_come_back() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let begun = |group: &mut Group<Memory>, link: Link| {
        let begun = Frame::Control(link.channel, Message::Begun);
        assert!(group.receive(at_ms(0), link, begun).is_none());
    };
    begun(&mut group, LINK);
    let clone = LastRun::Unclean { log: LogAge::default() };
    group.attach(at_ms(0), OTHER, "host-a", &attach_message(2, 1, clone));
    assert!(attached(&group.take_outputs()).is_some());
    begun(&mut group, OTHER);
    let goes_on = |number| {
        but(attach_message(number, 1, LastRun::Continues { from: Seq(4) }), |of| {
            of.nonce = Nonce(1, 0);
            of.before = Some(of.run());
        })
    };
    // Also if both were started at the same time of their clocks.
    for number in [1, 2] {
        group.attach(at_ms(0), LATEST, "host-a", &goes_on(number));
        assert_eq!(refusal(&group.take_outputs()), Some((LATEST, RefusalKind::Superseded)));
    }
    // A number above all that were heard of: what is here is of a moment before that run.
    group.attach(at_ms(0), LATEST, "host-a", &goes_on(3));
    let told = attached(&group.take_outputs()).unwrap().stream.unwrap();
    assert_eq!(told.copy, CopyState::Resyncing);
    assert!(matches!(told.basis, Basis::Everything { .. }), "{told:?}");
}

#[test]
fn newer_runs_take_over_and_older_ones_are_refused() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let unclean = LastRun::Unclean { log: LogAge::default() };
    group.attach(at_ms(0), OTHER, "host-a", &attach_message(2, 1, unclean));
    let outputs = group.take_outputs();
    assert_eq!(copy_of(&attached(&outputs).unwrap()), CopyState::Resyncing);
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
    assert_eq!(copy_of(&attached(&group.take_outputs()).unwrap()), CopyState::Whole);
}

#[test]
fn strangers_and_other_shapes_are_refused() {
    let disk = Memory::new();
    let mut group = whole(&disk);
    let good = || attach_message(2, 1, LastRun::Unknown);
    let other_size = but(good(), |of| of.disks[0].size_bytes = SIZE / 2);
    let other_name = but(good(), |of| of.disks[0].name = "data".into());
    let cases = [
        ("host", "host-b", good(), RefusalKind::Forbidden),
        ("epoch", "host-a", Attach { epoch: Epoch(7), ..good() }, RefusalKind::Mismatch),
        ("size", "host-a", other_size, RefusalKind::Mismatch),
        ("disk", "host-a", other_name, RefusalKind::Mismatch),
        (
            "writers",
            "host-a",
            Attach { writers: vec!["vm".into(), "x".into()], ..good() },
            RefusalKind::Invalid,
        ),
        ("follower", "host-a", Attach { role: Role::Follower, ..good() }, RefusalKind::Invalid),
        ("group", "host-a", Attach { group: "h".into(), ..good() }, RefusalKind::Mismatch),
        ("path", "host-a", Attach { group: "../x".into(), ..good() }, RefusalKind::Invalid),
        ("lease", "host-a", Attach { lease_ms: GRACE_MS, ..good() }, RefusalKind::Invalid),
        ("no disk", "host-a", but(good(), |of| of.disks.clear()), RefusalKind::Invalid),
    ];
    for (name, host, attach, kind) in cases {
        group.attach(at_ms(0), OTHER, host, &attach);
        assert_eq!(refusal(&group.take_outputs()), Some((OTHER, kind)), "{name}");
    }
    assert_eq!(group.state().writers[0].copy, CopyState::Whole, "nothing was touched");
}

#[test]
fn a_creation_that_was_cut_short_anywhere_is_begun_anew() {
    for at in 0.. {
        let disk = Memory::new();
        disk.set_faults(Faults { power_off_at: Some(at), ..Faults::default() });
        if create(&disk).is_ok() {
            assert!(at > 5);
            break;
        }
        for persists in [true, false] {
            let left = disk.crash(&mut || persists);
            let exists = Group::open(left.clone(), at_ms(0), options()).unwrap().is_some();
            assert!(exists || create(&left).is_ok(), "cut at {at}, {persists}");
        }
    }
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
