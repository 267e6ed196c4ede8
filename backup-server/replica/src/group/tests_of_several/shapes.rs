//! Members, writers and disks that come and go, and members without disks.

use super::*;

#[test]
fn members_without_disks_hear_c_hold_the_grace_and_are_fenced() {
    let form = Form::Vector;
    let disk = Memory::new();
    let shape = Shape { writers: 2, form };
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let mut group = two(&disk, form);
    group.attach(at_ms(0), web, "host-3", &shape.follower());
    let said = told(&group.take_outputs(), web);
    assert_eq!(progress(&said).unwrap().committed, vector(&[1, 1]));
    // What its daemon had sent before it connected anew.
    let before = Link { connection: ConnectionId(8), ..web };
    group.attach(at_ms(0), before, "host-3", &shape.follower());
    let outputs = group.take_outputs();
    assert_eq!(refused(&told(&outputs, before)).unwrap().0, RefusalKind::Stopping);
    assert!(told(&outputs, web).is_empty());
    send(&mut group, record(0, 2, 20, &[]));
    group.flush();
    let said = told(&group.take_outputs(), web);
    assert_eq!(progress(&said).unwrap().committed, vector(&[2, 1]));
    // Its beacon is what the recovery waits for.
    group.beacon(at_ms(20_000), web, MonoNanos(7));
    assert_eq!(told(&group.take_outputs(), web)[0], Message::Lease { sent_at: MonoNanos(7) });
    let early = group.recover(at_ms(20_001), false).unwrap_err();
    assert!(matches!(early, RecoverError::Grace { remaining_ms, .. } if remaining_ms > 14_000));
    let recovery = group.recover(at_ms(35_001), false).unwrap();
    assert_eq!(recovery.followers, ["web"]);
    assert_eq!(refused(&told(&group.take_outputs(), web)).unwrap().0, RefusalKind::Fenced);
    assert!(group.machine("web").described.is_some());
}

#[test]
fn members_are_added_when_no_host_can_be_ignorant_of_it_and_removed_by_the_operator() {
    let form = Form::Vector;
    let disk = Memory::new();
    let mut group = two(&disk, form);
    group.take_outputs();
    let three = Shape { writers: 3, form };
    for writer in 0..2 {
        group.beacon(at_ms(1000), link(writer), MonoNanos(1));
    }
    let said = attach(&mut group, at_ms(2000), &three.writer(2, 1, LastRun::Unknown));
    let (kind, reason) = refused(&said).unwrap();
    assert_eq!(kind, RefusalKind::Mismatch, "{reason}");
    assert!(reason.contains("host-0"), "{reason}");
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let said = attach(&mut group, at_ms(2000), &three.writer(2, 1, LastRun::Unknown));
    assert_eq!(refused(&said).unwrap().0, RefusalKind::Stopping, "a lease may hold");
    let now = at_ms(16_001);
    let said = attach(&mut group, now, &three.writer(2, 1, LastRun::Unknown));
    assert!(refused(&said).is_none(), "{said:?}");
    assert_eq!(group.state().writers[2].standing, Standing::Joining);
    // The old shape is refused from now on, the new one is taken.
    let two_again =
        Shape { writers: 2, form }.writer(0, 2, LastRun::Clean { seq: Seq(1), served: false });
    let said = attach(&mut group, now, &two_again);
    assert_eq!(refused(&said).unwrap().0, RefusalKind::Mismatch);
    let said =
        attach(&mut group, now, &three.writer(0, 2, LastRun::Clean { seq: Seq(1), served: false }));
    assert!(refused(&said).is_none(), "{said:?}");
    let said =
        attach(&mut group, now, &three.writer(1, 2, LastRun::Clean { seq: Seq(1), served: false }));
    assert!(refused(&said).is_none(), "{said:?}");
    // Still recoverable, without the new one.
    send(&mut group, record(2, 1, 30, &[]));
    group.flush();
    assert!(group.status(now).recoverable);
    let recovery = reopen(&disk.killed()).recover(at_ms(0), true).unwrap();
    assert!(recovery.writers[0].is_recovered && !recovery.writers[2].is_recovered);
    // Removed: what depended on what never came is in the cut now, and nothing waits.
    send(&mut group, record(0, 2, 40, &[(2, 7)]));
    group.flush();
    assert_eq!(group.cut().get(WriterId(0)), Seq(1));
    assert!(matches!(group.remove("c"), Err(RemoveError::Attached { .. })));
    assert!(matches!(group.remove("x"), Err(RemoveError::Unknown { .. })));
    group.connection_lost(link(2).connection);
    group.take_outputs();
    group.remove("c").unwrap();
    let said = progress(&told(&group.take_outputs(), link(0))).unwrap();
    assert_eq!(said.committed, vector(&[2, 1, u64::MAX]));
    let said = attach(&mut group, now, &three.writer(2, 3, LastRun::Unknown));
    assert!(refused(&said).unwrap().1.contains("removed"));
    let mut group = reopen(&disk.killed());
    assert_eq!(group.cut().get(WriterId(0)), Seq(2), "also after a restart");
    let recovery = group.recover(at_ms(0), true).unwrap();
    assert!(recovery.writers[2].why.as_ref().unwrap().contains("removed"));
    assert_eq!(group.recovered_disks().unwrap().len(), 2);
}

#[test]
fn a_host_that_is_configured_otherwise_is_told_in_what() {
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = two(&Memory::new(), Form::Vector);
    let mut refuses = |change: &dyn Fn(&mut Tagging), differs: &str| {
        let mut other = shape.writer(1, 2, LastRun::Clean { seq: Seq(1), served: false });
        change(other.tagging.as_mut().unwrap());
        let said = attach(&mut group, at_ms(1), &other);
        let (kind, reason) = refused(&said).unwrap();
        assert_eq!(kind, RefusalKind::Mismatch, "{reason}");
        assert!(reason.contains("host-1") && reason.contains("host-0, which is conn"), "{reason}");
        assert!(reason.contains(differs), "{reason}");
    };
    // Of the number of the tags' option, too: who does not know it would not find them.
    let first = ": the first has tag.option=222.";
    refuses(&|other| other.peers.insert(0, "tag.option=222".into()), first);
    refuses(&|other| other.form = Form::Hlc, ": the first has form=hlc, the second form=vector.");
    refuses(
        &|other| other.peers[1].push('0'),
        ": the first has b=10.0.0.10, the second b=10.0.0.1.",
    );
    refuses(&|other| drop(other.peers.remove(1)), ": the second has b=10.0.0.1.");
    refuses(&|other| other.peers.reverse(), ": the members are in another order.");
}

#[test]
fn who_is_left_alone_is_let_in_without_the_others() {
    for form in [Form::Vector, Form::Hlc] {
        let shape = Shape { writers: 1, form };
        let mut group = shape.create(&Memory::new()).unwrap();
        let first = shape.writer(0, 1, LastRun::Unknown);
        assert!(refused(&attach(&mut group, at_ms(0), &first)).is_none());
        send(&mut group, done(0, 1, 10, &[]));
        group.flush();
        let web = Link { connection: ConnectionId(9), channel: Channel(3) };
        group.attach(at_ms(0), web, "host-3", &shape.follower());
        group.take_outputs();
        group.connection_lost(link(0).connection);
        // "web" is taken out of the configuration: what is left speaks of no group.
        let alone = shape.writer(0, 2, LastRun::Clean { seq: Seq(1), served: false });
        let alone = Attach { tagging: None, ..alone };
        group.as_if_ended(&alone);
        let attach = |group: &mut Group<Memory>, now| {
            group.attach(now, link(0), &host(0), &alone);
            told(&group.take_outputs(), link(0))
        };
        let said = attach(&mut group, at_ms(1000));
        assert_eq!(refused(&said).unwrap().0, RefusalKind::Mismatch, "web's host is connected");
        group.connection_lost(web.connection);
        let said = attach(&mut group, at_ms(16_001));
        assert_eq!(copy_of(&said), CopyState::Whole, "{form}");
        assert_eq!(group.state().form, form);
        assert_eq!(group.recover(at_ms(16_001), true).unwrap().followers, [""; 0]);
    }
}

/// Two writers, and a member without disks on a host of its own, which is not connected any more.
fn two_and_a_follower(disk: &Memory, name: &str, peers: &[String]) -> Group<Memory> {
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = two(disk, shape.form);
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let link = Link { connection: ConnectionId(9), channel: Channel(3) };
    let tagging = Some(Tagging { form: shape.form, peers: peers.to_vec() });
    let follower = Attach { member: name.into(), tagging, ..shape.follower() };
    group.attach(at_ms(16_000), link, &host(2), &follower);
    assert!(refused(&told(&group.take_outputs(), link)).is_none());
    group.connection_lost(link.connection);
    assert_eq!(group.manifest.followers.keys().collect::<Vec<_>>(), [name]);
    group
}

/// Its place would be there for good, and hosts that do not name it would be refused.
#[test]
fn no_host_adds_a_writer_that_the_operator_s_list_does_not_name() {
    let disk = Memory::new();
    let [two, three] = [2, 3].map(|writers| Shape { writers, form: Form::Vector });
    let list =
        |writers: u16| (0..writers).map(|n| (NAMES[usize::from(n)].to_owned(), host(n))).collect();
    let with = |members| GroupOptions { members, ..options() };
    assert!(three.create_with(&disk, with(list(2))).is_none(), "it is not made with one either");
    drop(two.create_with(&disk, with(list(2))).unwrap());
    let mut group = Group::open(disk.clone(), at_ms(0), with(list(2))).unwrap().unwrap().0;
    attach(&mut group, at_ms(0), &two.writer(0, 1, LastRun::Unknown));
    group.connection_lost(link(0).connection);
    let alone = at_ms(40_000);
    let said = attach(&mut group, alone, &three.writer(1, 1, LastRun::Unknown));
    let (kind, reason) = refused(&said).unwrap();
    assert_eq!(kind, RefusalKind::Forbidden);
    assert!(reason.contains("adds the writer c to group g"), "{reason}");
    let said = attach(&mut group, alone, &two.writer(0, 1, LastRun::Unknown));
    assert!(refused(&said).is_none(), "who was away comes back: {said:?}");
    group.connection_lost(link(0).connection);
    let mut group = Group::open(disk.killed(), at_ms(0), with(list(3))).unwrap().unwrap().0;
    let said = attach(&mut group, alone, &three.writer(1, 1, LastRun::Unknown));
    assert!(refused(&said).is_none(), "{said:?}");
}

#[test]
fn a_member_that_gets_its_first_disk_is_a_writer_and_no_follower_any_more() {
    let disk = Memory::new();
    let three = Shape { writers: 3, form: Form::Vector };
    let mut group = two_and_a_follower(&disk, "c", &three.peers());
    let said = attach(&mut group, at_ms(40_000), &three.writer(2, 1, LastRun::Unknown));
    assert!(refused(&said).is_none(), "{said:?}");
    send(&mut group, done(2, 1, 30, &[]));
    group.flush();
    let is_a_writer_alone = |group: &mut Group<Memory>| {
        let recovery = group.recover(at_ms(40_000), true).unwrap();
        assert_eq!(recovery.followers, [""; 0]);
        assert!(recovery.writers[2].is_recovered);
    };
    let killed = disk.killed();
    is_a_writer_alone(&mut reopen(&killed));
    is_a_writer_alone(&mut group);
}

#[test]
fn who_is_to_become_a_writer_is_a_follower_until_the_journal_says_so() {
    let disk = Memory::new();
    let three = Shape { writers: 3, form: Form::Vector };
    let mut group = two_and_a_follower(&disk, "c", &three.peers());
    // As far as the small file goes; then the server is killed.
    group.manifest.writers.push("c".into());
    group.manifest.members.push(None);
    group.manifest.write(&disk).unwrap();
    let recovery = reopen(&disk.killed()).recover(at_ms(0), true).unwrap();
    assert_eq!(recovery.followers, ["c"]);
}

#[test]
fn a_member_without_disks_that_is_taken_out_of_the_configuration_is_forgotten() {
    let disk = Memory::new();
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = two_and_a_follower(&disk, "web", &shape.peers());
    let without = |writer| {
        let clean = LastRun::Clean { seq: Seq(1), served: false };
        let peers = ["boundary=member", "a=10.0.0.1", "b=10.0.0.1,fd00::1"];
        let peers = peers.map(str::to_owned).to_vec();
        let tagging = Some(Tagging { form: shape.form, peers });
        Attach { tagging, ..shape.writer(writer, 2, clean) }
    };
    for writer in 0..2 {
        let said = attach(&mut group, at_ms(40_000), &without(writer));
        assert!(refused(&said).is_none(), "{said:?}");
    }
    // Nor is it waited for in a switch of all.
    for writer in 0..2 {
        say(&mut group, writer, Message::ReadyToSwitch { ready: true });
    }
    let said = told(&group.take_outputs(), link(0));
    assert_eq!(said.last(), Some(&Message::SwitchAwaits { members: Vec::new() }), "{said:?}");
    assert_eq!(group.recover(at_ms(40_000), true).unwrap().followers, [""; 0]);
}

#[test]
fn who_is_said_to_be_removed_is_also_after_a_power_loss() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    group.connection_lost(link(1).connection);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    for _ in 0..2 {
        assert!(matches!(group.remove("b"), Err(RemoveError::Journal(_))), "there is no room");
    }
    let standing = |group: &Group<Memory>| group.state().writers[1].standing;
    assert_eq!(standing(&reopen(&disk.crash(&mut || false))), Standing::Member);
    disk.set_faults(Faults::default());
    group.remove("b").unwrap();
    assert_eq!(standing(&reopen(&disk.crash(&mut || false))), Standing::Removed);
}

#[test]
fn a_writer_that_is_added_takes_nothing_from_the_cut_that_was_told() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = two(&disk, form);
        send(&mut group, record(0, 2, 500, &[]));
        send(&mut group, record(1, 2, 501, &[]));
        group.flush();
        let told = group.told();
        (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
        let three = Shape { writers: 3, form };
        let said = attach(&mut group, at_ms(16_001), &three.writer(2, 1, LastRun::Unknown));
        assert!(refused(&said).is_none(), "{said:?}");
        send(&mut group, record(2, 1, 600, &[]));
        group.flush();
        assert!(told.get(WriterId(0)) >= Seq(2) && group.told().covers(&told));
        let group = reopen(&disk.killed());
        assert!(group.told().covers(&told), "{form}: {} of {told}", group.told());
    }
}

#[test]
fn a_disk_is_added_by_a_resync_and_the_form_changes_when_everything_is_in_the_cut() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    let shape = Shape { writers: 2, form: Form::Vector };
    group.take_outputs();
    let more = shape.writer(0, 2, LastRun::Clean { seq: Seq(1), served: false });
    let data = DiskSpec { id: DiskId(1), name: "data".into(), size_bytes: SIZE };
    let more = but(more, |of| of.disks.push(data.clone()));
    let said = attach(&mut group, at_ms(0), &more);
    assert_eq!(copy_of(&said), CopyState::Resyncing);
    let write = Record {
        body: DiskChange { disk: DiskId(1), ..record(0, 2, 20, &[]).body },
        ..record(0, 2, 20, &[])
    };
    send(&mut group, write);
    send(&mut group, done(0, 3, 21, &[]));
    group.flush();
    assert_eq!(group.cut().get(WriterId(0)), Seq(3));
    let fewer = shape.writer(0, 3, LastRun::Clean { seq: Seq(3), served: false });
    assert_eq!(refused(&attach(&mut group, at_ms(0), &fewer)).unwrap().0, RefusalKind::Mismatch);
    // The form: with a record beyond the cut it must not change.
    send(&mut group, record(1, 2, 22, &[(0, 9)]));
    group.flush();
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let hlc = Shape { writers: 2, form: Form::Hlc };
    let hlc = hlc.writer(0, 4, LastRun::Clean { seq: Seq(3), served: false });
    let hlc = but(hlc, |of| of.disks.push(data));
    let now = at_ms(60_000);
    assert_eq!(refused(&attach(&mut group, now, &hlc)).unwrap().0, RefusalKind::Mismatch);
    let mut group = two(&Memory::new(), Form::Vector);
    group.take_outputs();
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let hlc = but(hlc, |of| {
        of.disks.truncate(1);
        of.last_run = LastRun::Clean { seq: Seq(1), served: false };
    });
    let said = attach(&mut group, now, &hlc);
    assert!(refused(&said).is_none(), "{said:?}");
    assert_eq!((group.state().form, group.cut()), (Form::Hlc, &vector(&[1, 1])));
}

/// a and b are whole, c was added and has copied its disks; but b's host is dead, and so the end of that is not in the
/// cut. In the vector form it depends on what b never sends.
fn copied_beyond_the_cut(disk: &Memory, form: Form) -> Group<Memory> {
    let mut group = two(disk, form);
    (0..2).for_each(|writer| send(&mut group, record(writer, 2, 500, &[])));
    group.flush();
    (0..2).for_each(|writer| group.connection_lost(link(writer).connection));
    let three = Shape { writers: 3, form };
    let said = attach(&mut group, at_ms(16_001), &three.writer(2, 1, LastRun::Unknown));
    assert!(refused(&said).is_none(), "{said:?}");
    attach(
        &mut group,
        at_ms(16_001),
        &three.writer(0, 2, LastRun::Clean { seq: Seq(2), served: false }),
    );
    send(
        &mut group,
        Record {
            body: DiskChange { copy: true, ..record(2, 1, 600, &[]).body },
            ..record(2, 1, 600, &[])
        },
    );
    group.flush();
    assert!(group.status(at_ms(0)).recoverable);
    let deps: &[_] = if form == Form::Vector { &[(1, 3)] } else { &[] };
    send(&mut group, done(2, 2, 601, deps));
    send(&mut group, record(0, 3, 602, &[]));
    assert!(group.status(at_ms(0)).recoverable, "it has come and is not durable");
    group.flush();
    assert_eq!(group.state().writers[2].standing, Standing::Member);
    assert!(group.cut().get(WriterId(2)) < Seq(2));
    group
}

#[test]
fn who_was_added_is_not_waited_for_before_the_end_of_its_copy_is_in_the_cut() {
    for form in [Form::Vector, Form::Hlc] {
        let disk = Memory::new();
        let mut group = copied_beyond_the_cut(&disk, form);
        for group in [&mut reopen(&disk.crash(&mut || false)), &mut group] {
            let status = group.status(at_ms(0));
            assert!(status.recoverable, "{form}: it was before the copy ended");
            let standings: Vec<_> = status.writers.iter().map(|w| w.standing).collect();
            assert_eq!(standings, [Standing::Member, Standing::Member, Standing::Joining]);
            let pinned: Vec<_> =
                group.pin().unwrap().disks.into_iter().map(|(name, _)| name).collect();
            assert_eq!(pinned, ["a.root", "b.root"]);
        }
        // b comes back: then it is as the others.
        let mut whole = reopen(&disk.killed());
        let clean = LastRun::Clean { seq: Seq(2), served: false };
        attach(&mut whole, at_ms(0), &Shape { writers: 3, form }.writer(1, 2, clean));
        send(&mut whole, record(1, 3, 700, &[]));
        whole.flush();
        let standings: Vec<_> = whole.status(at_ms(0)).writers.iter().map(|w| w.standing).collect();
        assert_eq!(standings, [Standing::Member; 3]);
        let recovery = whole.recover(at_ms(0), true).unwrap();
        assert!(recovery.writers.iter().all(|of| of.is_recovered));
    }
}

#[test]
fn a_recovery_without_one_that_was_added_says_so_and_its_past_shows_the_same() {
    for (form, chosen) in
        [Form::Vector, Form::Hlc].into_iter().flat_map(|f| [(f, false), (f, true)])
    {
        let disk = Memory::new();
        let mut group = copied_beyond_the_cut(&disk, form);
        let point = group.history().unwrap().newest().unwrap();
        let recovery = match chosen {
            true => group.recover_at(at_ms(0), true, &point).unwrap(),
            false => group.recover(at_ms(0), true).unwrap(),
        };
        let recovered: Vec<_> = recovery.writers.iter().map(|of| of.is_recovered).collect();
        assert_eq!(recovered, [true, true, false], "{form}");
        let why = recovery.writers[2].why.clone().unwrap();
        assert!(why.contains("initial copy"), "{why}");
        assert_eq!(group.recovered_disks().unwrap().len(), 2);
        let key = DiskKey { writer: WriterId(0), disk: DiskId(0) };
        for n in 0..40 {
            let effect = GuestEffect::Write(vec![n; 64].into());
            assert!(group.guest_write(at_ms(100_000 + u64::from(n)), key, 0, effect));
            group.flush();
        }
        for _ in 0..2 {
            let past = group.history().unwrap();
            let newest = past.newest_time();
            for time in past.oldest_time().0.max(newest.0 - 30)..=newest.0 {
                let point = past.resolve(&crate::history::At::Hlc(Hlc(time))).unwrap();
                assert_eq!(point.writers, [WriterId(0), WriterId(1)], "{form}, {time}");
            }
            assert_eq!(past.newest().unwrap().writers, [WriterId(0), WriterId(1)]);
            drop(past);
            while past::fold(&mut group, at_ms(200_000)) {}
        }
        let mut group = reopen(&disk.crash(&mut || false));
        assert_eq!(group.recovery(), Some(recovery));
        assert_eq!(group.recovered_disks().unwrap().len(), 2);
    }
}

/// There is no room for the recovery, and then it is lost.
#[test]
fn who_was_left_out_of_a_recovery_that_is_lost_is_there_still() {
    let disk = Memory::new();
    let mut group = copied_beyond_the_cut(&disk, Form::Hlc);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    assert!(matches!(group.recover(at_ms(0), true), Err(RecoverError::NoRoom(_))));
    disk.set_faults(Faults::default());
    let lost = reopen(&disk.killed());
    assert_eq!((lost.epoch(), lost.standing(WriterId(2))), (Epoch(1), Standing::Joining));
    group.retry();
    group.flush();
    for group in [&reopen(&disk.killed()), &group] {
        let recovery = group.recovery().unwrap();
        assert!(!recovery.writers[2].is_recovered && recovery.writers[1].is_recovered);
        assert!(recovery.writers[2].why.as_ref().unwrap().contains("initial copy"));
    }
}

#[test]
fn a_member_without_disks_belongs_to_a_host_and_is_one_that_the_configuration_names() {
    let disk = Memory::new();
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = two_and_a_follower(&disk, "web", &shape.peers());
    let link = Link { connection: ConnectionId(11), channel: Channel(3) };
    let tried = |group: &mut Group<Memory>, host_of: u16, follower: &Attach| {
        group.attach(at_ms(40_000), link, &host(host_of), follower);
        refused(&told(&group.take_outputs(), link)).map(|(kind, _)| kind)
    };
    let machine = Some(serde_json::from_str(r#"{"memory_mib": 32}"#).unwrap());
    let taken = Attach { machine, ..shape.follower() };
    assert_eq!(tried(&mut group, 3, &taken), Some(RefusalKind::Forbidden));
    assert_eq!(group.machine("web").described, shape.follower().machine);
    let unknown = Attach { member: "m1".into(), ..shape.follower() };
    assert_eq!(tried(&mut group, 3, &unknown), Some(RefusalKind::Invalid));
    assert_eq!(group.manifest.followers.keys().collect::<Vec<_>>(), ["web"]);
    group.move_member(at_ms(40_000), "web", &host(3)).unwrap();
    assert_eq!(tried(&mut group, 2, &shape.follower()), Some(RefusalKind::Forbidden));
    assert_eq!(tried(&mut group, 3, &shape.follower()), None);
}
