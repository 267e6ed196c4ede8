//! Which host a member belongs to, and which group a host knows.

use super::*;
use tidelock_protocol::ids::GroupId;

fn listed(disk: &Memory) -> Group<Memory> {
    open_with(disk, &[])
}

fn open_with(disk: &Memory, members: &[(&str, &str)]) -> Group<Memory> {
    let hosts = Some(vec!["host-a".into(), "host-b".into()]);
    let members = members.iter().map(|(m, h)| ((*m).to_owned(), (*h).to_owned())).collect();
    let options = GroupOptions { hosts, members, ..options() };
    Group::open(disk.clone(), at_ms(0), options).unwrap().unwrap().0
}

/// A run number that is the time of the clock here, in microseconds.
const GREATEST: u64 = 1_700_000_000_000_000;

/// The host's clock, state and run are of no moment: [`GREATEST`] is the greatest run that is believed.
fn hijack() -> Attach {
    let machine = Some(serde_json::from_str(r#"{"memory_mib": 32}"#).unwrap());
    Attach { machine, ..attach_message(GREATEST, 1, LastRun::Clean { seq: Seq(3), served: false }) }
}

fn tried(
    group: &mut Group<Memory>,
    host: &str,
    attach: &Attach,
) -> Result<Attached, (RefusalKind, String)> {
    group.attach(at_ms(0), OTHER, host, attach);
    let outputs = group.take_outputs();
    let refused = outputs.iter().find_map(|output| match output {
        Output::Refuse(link, kind, reason) if *link == OTHER => Some((*kind, reason.clone())),
        _ => None,
    });
    match refused {
        Some(refused) => Err(refused),
        None => Ok(attached(&outputs).expect("an answer")),
    }
}

#[test]
fn a_listed_host_takes_no_member_of_another_whatever_it_says() {
    let disk = Memory::new();
    drop(whole(&disk));
    let mut group = listed(&disk);
    join(&mut group, LINK, 2, LastRun::Clean { seq: Seq(3), served: false });
    let before = tidelock_storage::read_all(&disk, "group.json").unwrap();
    let (kind, reason) = tried(&mut group, "host-b", &hijack()).unwrap_err();
    assert_eq!(kind, RefusalKind::Forbidden);
    assert!(
        reason.contains("belongs to host host-a")
            && reason.contains("member move g vm --to host-b"),
        "{reason}"
    );
    assert_eq!(tidelock_storage::read_all(&disk, "group.json").unwrap(), before);
    assert_eq!(group.machine("vm").described.unwrap().memory_mib, 64);
    send(&mut group, LINK, write(4, 0, 0, 1));
    group.flush();
    assert_eq!(acked(&group.take_outputs()).unwrap().0, 4, "its owner goes on");
    let next = attach_message(3, 1, LastRun::Clean { seq: Seq(4), served: false });
    group.as_if_ended(&next);
    assert_eq!(copy_of(&tried(&mut group, "host-a", &next).unwrap()), CopyState::Whole);
}

#[test]
fn the_operator_gives_a_member_to_another_host_and_its_disks_are_compared() {
    let disk = Memory::new();
    drop(whole(&disk));
    let mut group = listed(&disk);
    join(&mut group, LINK, 2, LastRun::Clean { seq: Seq(3), served: false });
    let error = group.move_member(at_ms(0), "vm", "host-b").unwrap_err();
    assert!(matches!(error, MoveError::Attached { .. }), "{error}");
    group.connection_lost(LINK.connection);
    let error = group.move_member(at_ms(0), "vm", "host-b").unwrap_err();
    let MoveError::Lease { remaining_ms, .. } = error else { panic!("{error}") };
    assert_eq!(remaining_ms, GRACE_MS, "it may answer clients as long");
    let later = at_ms(GRACE_MS);
    for (member, host) in [("vm", "host-c"), ("no", "host-b")] {
        assert!(group.move_member(later, member, host).is_err(), "{member} to {host}");
    }
    let moved = group.move_member(later, "vm", "host-b").unwrap();
    assert_eq!((moved.from.as_deref(), &*moved.to), (Some("host-a"), "host-b"));
    let mut group = listed(&disk.killed());
    let (kind, reason) =
        tried(&mut group, "host-a", &attach_message(3, 1, LastRun::Unknown)).unwrap_err();
    assert_eq!(kind, RefusalKind::Forbidden, "{reason}");
    // Its own record says that all is equal: it is of other disks, or of other times.
    let first = attach_message(1, 1, LastRun::Clean { seq: Seq(3), served: false });
    let first = but(first, |of| of.before = None);
    assert_eq!(copy_of(&tried(&mut group, "host-b", &first).unwrap()), CopyState::Resyncing);
}

#[test]
fn a_host_that_was_installed_anew_is_told_so_and_locks_nobody_out() {
    let disk = Memory::new();
    drop(whole(&disk));
    let mut group = listed(&disk);
    // Its clock was ahead, or it lied.
    join(&mut group, LINK, GREATEST, LastRun::Clean { seq: Seq(3), served: false });
    group.connection_lost(LINK.connection);
    for incarnation in [5, GREATEST - 1] {
        let anew = attach_message(incarnation, 0, LastRun::Unknown);
        let anew = but(anew, |of| of.before = None);
        let (kind, reason) = tried(&mut group, "host-a", &anew).unwrap_err();
        assert_eq!(kind, RefusalKind::Mismatch, "not fenced, and not superseded: {reason}");
        assert!(
            reason.contains("installed anew") && reason.contains("member move g vm --to host-a"),
            "{reason}"
        );
    }
    group.move_member(at_ms(GRACE_MS), "vm", "host-a").unwrap();
    let anew = but(attach_message(5, 0, LastRun::Unknown), |of| of.before = None);
    assert_eq!(copy_of(&tried(&mut group, "host-a", &anew).unwrap()), CopyState::Resyncing);
    // The answer to its first attachment was lost.
    let again = but(attach_message(6, 0, LastRun::Unknown), |of| of.before = Some(run(5)));
    assert!(tried(&mut group, "host-a", &again).is_ok());
}

#[test]
fn only_the_host_of_the_operators_list_claims_a_member() {
    let disk = Memory::new();
    drop(create(&disk).unwrap());
    let mut group = open_with(&disk, &[("vm", "host-b")]);
    let message = attach_message(1, 0, LastRun::Unknown);
    let (kind, reason) = tried(&mut group, "host-a", &message).unwrap_err();
    assert_eq!(kind, RefusalKind::Forbidden);
    assert!(reason.contains("gives it to host-b"), "{reason}");
    assert!(tried(&mut group, "host-b", &message).is_ok());
    group.connection_lost(OTHER.connection);
    assert!(matches!(
        group.move_member(at_ms(GRACE_MS), "vm", "host-a"),
        Err(MoveError::Forbidden(_))
    ));
    let mut group = open_with(&disk, &[("other", "host-b")]);
    assert_eq!(tried(&mut group, "host-b", &message).unwrap_err().0, RefusalKind::Forbidden);
    let hosts = Some(vec!["host-a".into()]);
    let members = [("vm".to_owned(), "host-b".to_owned())].into();
    let options = GroupOptions { hosts, members, ..options() };
    let error = Group::create(Memory::new(), "host-a", &message, at_ms(0), options)
        .map(|_| ())
        .unwrap_err();
    assert_eq!(error.refusal().0, RefusalKind::Forbidden);
}

#[test]
fn another_group_of_the_same_name_is_noticed_at_each_attachment() {
    let (disk, other) = (Memory::new(), Memory::new());
    drop(whole(&disk));
    let mut group = reopen(&disk);
    let told = join(&mut group, LINK, 2, LastRun::Unknown).group_id;
    assert_eq!((told, reopen(&disk.killed()).id()), (group.id(), group.id()), "it stays");
    let knows =
        |id: GroupId| Attach { group_id: Some(id), ..attach_message(3, 1, LastRun::Unknown) };
    assert!(tried(&mut group, "host-a", &knows(told)).is_ok());
    other.fresh_id();
    let mut anew = create(&other).unwrap();
    assert_ne!(anew.id(), told);
    let (kind, reason) = tried(&mut anew, "host-a", &knows(told)).unwrap_err();
    assert_eq!(kind, RefusalKind::Mismatch);
    assert!(
        reason.contains(&told.to_string()) && reason.contains(&anew.id().to_string()),
        "{reason}"
    );
    // The group was removed: it is not made anew behind the operator's back.
    let gone = Group::create(Memory::new(), "host-a", &knows(told), at_ms(0), options());
    assert_eq!(gone.map(|_| ()).unwrap_err().refusal().0, RefusalKind::Mismatch);
}
