//! A group that goes on without the backup: when, what is done in which order, and the way back.

use super::around::{Act, Host, LEASE_MS, SECOND, WALL_MS};
use super::settings;
use crate::degrade::{Sight, Standing, Step};
use crate::group::*;
use tidelock_protocol::ids::{MonoNanos, WriterId};

const AFTER_MS: u64 = 1_000;

fn with_policy(mode: Mode, is_of_several: bool) -> GroupLoop {
    let settings = GroupSettings { after_ms: Some(AFTER_MS), is_of_several, ..settings(mode) };
    GroupLoop::new(settings, None, None)
}

/// A group that held, and whose backup has not answered for as long as the policy says.
fn about_to_open(mode: Mode, is_of_several: bool) -> (GroupLoop, Host) {
    let (mut group, mut host) = (with_policy(mode, is_of_several), Host::new());
    group.begin(&mut host);
    assert_eq!(group.look(&mut host), None);
    host.fall_silent();
    assert_eq!(group.look(&mut host), None);
    host.pass_ms(1);
    assert_eq!(group.look(&mut host), None);
    host.pass_ms(AFTER_MS - 2);
    assert_eq!(group.look(&mut host), None, "not yet");
    host.pass_ms(1);
    host.acts();
    (group, host)
}

fn told_links(policy: Policy) -> [Act; 3] {
    [0, 1, 2].map(|nth| Act::Policy(nth, policy))
}

fn in_force(mode: Mode) -> [Act; 3] {
    [Act::GateMode(mode), Act::SetMode(0, mode), Act::SetMode(2, mode)]
}

const FLOOR: [Act; 3] = [Act::AskFloor(0), Act::AskFloor(1), Act::AskFloor(2)];

#[test]
fn a_group_opens_on_record_first_and_comes_back_when_the_backup_has_all_that_has_left() {
    for is_of_several in [false, true] {
        let (mut group, mut host) = about_to_open(Mode::Pipelined, is_of_several);
        host.can_keep = false;
        for _ in 0..3 {
            assert_eq!(group.look(&mut host), None, "nothing leaves that is not on record");
            assert!(host.acts().is_empty() && group.view().told.is_none());
        }
        host.can_keep = true;
        let since_unix_ms = host.wall_ms();
        assert_eq!(group.look(&mut host), Some(Step::Open { since_unix_ms }));
        let kept = [Act::KeepDegraded(since_unix_ms)];
        let degraded_since_unix_ms = Some(since_unix_ms);
        let policy = |mode| Policy { mode, after_ms: Some(AFTER_MS), degraded_since_unix_ms };
        let (told, opened) = (told_links(policy(Mode::Async)), in_force(Mode::Async));
        assert_eq!(host.acts(), [&kept[..], &told, &opened].concat());
        let view = group.view();
        assert_eq!((view.mode, view.wanted), (Mode::Async, Mode::Pipelined));
        assert_eq!(view.degraded_since_unix_ms(), degraded_since_unix_ms);
        assert!(view.told.unwrap().leaves && !view.is_unreached);
        assert!(group.check_switch(&host).is_err(), "the backup does not have all that has left");

        // The gate holds again once the lag has been small for a while.
        host.catch_up();
        assert_eq!(group.look(&mut host), None);
        host.pass_ms(2 * AFTER_MS);
        assert_eq!(group.look(&mut host), Some(Step::Hold));
        let (told, held) = (told_links(policy(Mode::Pipelined)), in_force(Mode::Pipelined));
        let floor = if is_of_several { &FLOOR[..] } else { &[] };
        assert_eq!(host.acts(), [&told[..], &held, floor].concat());
        assert_eq!(group.view().standing, Standing::Returning { since_unix_ms });
        assert!(!group.view().told.unwrap().leaves);

        assert_eq!(group.look(&mut host), Some(Step::Covered));
        let policy = Policy { degraded_since_unix_ms: None, ..policy(Mode::Pipelined) };
        assert_eq!(host.acts(), [&told_links(policy)[..], &[Act::ForgetDegraded]].concat());
        assert_eq!((group.view().standing, group.view().told), (Standing::Holding, None));
        assert!(group.check_switch(&host).is_ok());
    }
}

/// The backup has the policy on stable storage, and the host may answer clients.
#[test]
fn a_group_opens_only_where_it_may() {
    let opens = |change: fn(&mut Host)| {
        let (mut group, mut host) = about_to_open(Mode::Pipelined, true);
        change(&mut host);
        let step = group.look(&mut host);
        assert_eq!(step.is_some(), !host.acts().is_empty(), "nothing is done by halves");
        step.is_some()
    };
    assert!(opens(|_| ()));
    assert!(!opens(|host| host.members[1].link.set_policy_kept(false)));
    assert!(!opens(|host| host.writer(2).phase = Phase::Fenced));
    assert!(!opens(|host| host.is_stopping = true));
    assert!(opens(|host| host.writer(2).phase = Phase::Disconnected));

    // Nor one that was switched over, one that is open anyway, or one without the policy.
    let opens = |settings: GroupSettings, switched_at| {
        let (mut group, mut host) = (GroupLoop::new(settings, None, switched_at), Host::new());
        group.begin(&mut host);
        group.look(&mut host);
        host.fall_silent();
        group.look(&mut host);
        host.pass_ms(10 * AFTER_MS);
        group.look(&mut host).is_some()
    };
    let policy = |mode| GroupSettings { after_ms: Some(AFTER_MS), ..settings(mode) };
    assert!(opens(policy(Mode::Sync), None));
    assert!(!opens(policy(Mode::Sync), Some(WALL_MS)));
    assert!(!opens(policy(Mode::Async), None));
    assert!(!opens(settings(Mode::Sync), None));
}

#[test]
fn a_look_sees_the_group_as_its_gate_and_its_members_are() {
    let sight = |mode, change: fn(&mut Host)| -> Sight {
        let (mut group, mut host) = (with_policy(mode, true), Host::new());
        group.begin(&mut host);
        group.look(&mut host);
        change(&mut host);
        group.sight(&host.members(), &host)
    };
    let held = |change| sight(Mode::Pipelined, change);
    let plain = held(|_| ());
    assert!(plain.is_open && plain.is_whole && plain.is_complete && plain.is_applied);
    assert_eq!((plain.write_age_ns, plain.round_trip_ns), (0, 0));
    assert_eq!(plain.pending, vec![(CountVector::of(WriterId(0), Seq(7)), Hlc(7)); 3]);

    assert!(!held(|host| host.gate.as_mut().unwrap().is_open = false).is_open);
    assert!(!held(|host| host.gate.as_mut().unwrap().is_applied = false).is_applied);
    assert!(!held(|host| host.writer(2).gap = Some(Gap::STARTED)).is_whole);
    let awaits_floor = |host: &mut Host| {
        host.members[1].gate.state.lock().unwrap().awaits_floor = Some(3);
    };
    assert!(!held(awaits_floor).is_complete);
    assert!(!sight(Mode::Async, |_| ()).is_complete, "tags say nothing there");

    // The oldest write of any member, and the longest round trip.
    let slow = held(|host| {
        host.members[2].link.set_lag(1, 512, Some(host.now));
        host.pass_ms(30);
        host.members[0].link.set_lag(1, 512, Some(host.now));
        host.members[1].link.lease_renewed(MonoNanos(SECOND), host.now);
    });
    assert_eq!((slow.write_age_ns, slow.round_trip_ns), (30_000_000, 30_000_000));
}

#[test]
fn a_group_that_nobody_outside_hears_of_is_open_under_a_lease_and_not_while_the_sites_are_compared()
{
    let sight = |change: fn(&mut Host)| {
        let mut host = Host { gate: None, ..Host::new() };
        change(&mut host);
        with_policy(Mode::Pipelined, true).sight(&host.members(), &host)
    };
    assert!(sight(|_| ()).is_open && sight(|_| ()).is_applied);
    assert!(sight(|host| host.pass_ms(LEASE_MS - 1)).is_open);
    assert!(!sight(|host| host.pass_ms(LEASE_MS)).is_open, "the lease has ended");
    assert!(!sight(|host| host.members[1].link = Arc::default()).is_open, "it never had one");
    for phase in Phase::ALL {
        let mut host = Host { gate: None, ..Host::new() };
        host.writer(2).phase = phase;
        let is_open = with_policy(Mode::Pipelined, true).sight(&host.members(), &host).is_open;
        let is_compared = matches!(phase, Phase::Resyncing | Phase::Overflowed);
        assert_eq!(is_open, !is_compared, "{phase:?}");
    }
    // C is all that any writer was told of it.
    let told = sight(|host| {
        host.writer(0).told = (CountVector::of(WriterId(0), Seq(4)), Hlc(9));
        host.writer(2).told = (CountVector::of(WriterId(2), Seq(5)), Hlc(8));
    });
    assert_eq!(told.committed.get(WriterId(0)), Seq(4));
    assert_eq!(told.committed.get(WriterId(2)), Seq(5));
    assert_eq!(told.watermark, Hlc(9));
}

#[test]
fn a_run_that_finds_the_group_degraded_asks_how_far_the_others_are() {
    for (since, is_of_several, asks) in
        [(Some(WALL_MS), true, true), (Some(WALL_MS), false, false), (None, true, false)]
    {
        let settings = GroupSettings { is_of_several, ..settings(Mode::Pipelined) };
        let (mut group, mut host) = (GroupLoop::new(settings, since, None), Host::new());
        group.begin(&mut host);
        assert_eq!(host.acts(), if asks { &FLOOR[..] } else { &[] });
        assert_eq!(group.view().told.map(|told| told.since_unix_ms), since);
        // The record goes when the backup has everything.
        let step = group.look(&mut host);
        assert_eq!(step, since.map(|_| Step::Covered));
        assert_eq!(group.view().told, None);
    }
}

/// A run that cannot be counted as gone needs no contact.
#[test]
fn mode_async_waits_for_contact_only_where_a_member_writes() {
    let mut host = Host::new();
    host.members[0].link.set_policy_kept(false);
    let begun = |host: &mut Host| {
        let mut group = GroupLoop::new(settings(Mode::Async), None, None);
        group.begin(host);
        (group, host.acts())
    };
    let (mut group, acts) = begun(&mut host);
    assert!(group.view().awaits_contact && acts.is_empty());
    group.look(&mut host);
    assert!(group.view().awaits_contact && host.acts().is_empty(), "one link is enough");
    host.members[0].link.set_policy_kept(true);
    group.look(&mut host);
    assert!(!group.view().awaits_contact);
    assert_eq!(host.acts(), in_force(Mode::Async));

    host.members.iter_mut().for_each(|member| member.writer = None);
    let (group, acts) = begun(&mut host);
    assert!(!group.view().awaits_contact && group.view().mode == Mode::Async);
    assert_eq!(acts, [Act::GateMode(Mode::Async)]);
}

#[test]
fn an_order_of_the_operator_is_in_force_at_once_but_for_other_members() {
    for is_of_several in [false, true] {
        let settings = GroupSettings { is_of_several, ..settings(Mode::Pipelined) };
        let (mut group, mut host) = (GroupLoop::new(settings, None, None), Host::new());
        host.members[0].link.set_policy_kept(false);
        group.begin(&mut host);
        let policy = |mode| Policy { mode, after_ms: None, degraded_since_unix_ms: None };
        group.want_mode(Mode::Async, &mut host);
        let told = told_links(policy(Mode::Async));
        match is_of_several {
            true => assert_eq!(host.acts(), told),
            false => assert_eq!(host.acts(), [in_force(Mode::Async), told].concat()),
        }
        assert_eq!(group.view().awaits_contact, is_of_several);
        assert_eq!(group.view().told.is_some(), !is_of_several);

        host.members[0].link.set_policy_kept(true);
        group.look(&mut host);
        let opened = in_force(Mode::Async);
        assert_eq!(host.acts(), if is_of_several { &opened[..] } else { &[] });
        group.want_mode(Mode::Sync, &mut host);
        let (held, told) = (in_force(Mode::Sync), told_links(policy(Mode::Sync)));
        let floor = if is_of_several { &FLOOR[..] } else { &[] };
        assert_eq!(host.acts(), [&held[..], floor, &told].concat());
        group.want_mode(Mode::Pipelined, &mut host);
        let (held, told) = (in_force(Mode::Pipelined), told_links(policy(Mode::Pipelined)));
        assert_eq!(host.acts(), [held, told].concat(), "nothing left unheld");
    }
}

#[test]
fn clients_are_answered_before_the_backup_was_reached_only_if_every_writer_says_so() {
    let unreached = |host: &mut Host| {
        host.writer(0).phase = Phase::Unrecorded;
        host.writer(0).gap = Some(Gap::STARTED);
        host.writer(0).may_answer_unreached = true;
        host.writer(2).may_answer_unreached = true;
        host.members.iter().for_each(|member| member.link.set_policy_kept(false));
    };
    let opens = |mode, change: fn(&mut Host)| {
        let (mut group, mut host) = (GroupLoop::new(settings(mode), None, None), Host::new());
        unreached(&mut host);
        change(&mut host);
        group.begin(&mut host);
        let step = group.look(&mut host);
        assert_eq!(group.view().is_unreached, step.is_some());
        step.is_some()
    };
    assert!(opens(Mode::Pipelined, |_| ()));
    assert!(!opens(Mode::Pipelined, |host| host.writer(0).phase = Phase::WaitingForBackup));
    assert!(!opens(Mode::Pipelined, |host| host.writer(2).may_answer_unreached = false));
    assert!(!opens(Mode::Pipelined, |host| host.is_stopping = true));
    assert!(!opens(Mode::Pipelined, |host| host.can_keep = false), "on record first");
    assert!(!opens(Mode::Async, |_| ()), "it leaves anyway");

    let (mut group, mut host) = (GroupLoop::new(settings(Mode::Sync), None, None), Host::new());
    unreached(&mut host);
    group.begin(&mut host);
    let since_unix_ms = host.wall_ms();
    assert_eq!(group.look(&mut host), Some(Step::Open { since_unix_ms }));
    let policy =
        Policy { mode: Mode::Async, after_ms: None, degraded_since_unix_ms: Some(since_unix_ms) };
    let kept = [Act::KeepDegraded(since_unix_ms)];
    let (told, opened) = (told_links(policy), in_force(Mode::Async));
    assert_eq!(host.acts(), [&kept[..], &told, &opened].concat());
    assert_eq!(group.look(&mut host), None, "once");
    assert_eq!(group.view().mode, Mode::Async);
}
