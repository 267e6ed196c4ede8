//! What is asked when a host attaches, and what it is told.

use super::*;

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
