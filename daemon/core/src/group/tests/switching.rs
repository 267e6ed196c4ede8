//! The planned switch of a group with two writers on this host.

use super::around::{Act, Host, not_ready};
use super::settings;
use crate::group::*;
use crate::handover::Step;
use crate::owner::Drained;

const HOUR: Duration = Duration::from_secs(3600);

fn drained(seq: u64, marks: Option<Vec<String>>) -> Drained {
    Drained { seq: Seq(seq), hlc: Hlc(seq), marks }
}

fn begun() -> (GroupLoop, Host) {
    let (mut group, mut host) =
        (GroupLoop::new(settings(Mode::Pipelined), None, None), Host::new());
    group.begin_switch(HOUR, HOUR, &mut host);
    assert_eq!(host.acts(), [Act::Hold(0), Act::Hold(2)]);
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait));
    (group, host)
}

fn all_at_the_backup(host: &mut Host) {
    for (seq, (reply, _)) in (7..).zip(std::mem::take(&mut host.holds)) {
        reply.send(drained(seq, Some(Vec::new()))).unwrap();
    }
}

const LET_GO: [Act; 2] = [Act::LetGo(0), Act::LetGo(2)];

fn goes_on(group: &mut GroupLoop, host: &mut Host) -> String {
    let Some(Step::GoOn(why)) = group.look_at_switch(host) else { panic!("it does not go on") };
    assert_eq!(host.acts(), LET_GO);
    assert!(!group.is_switching() && !group.is_shut() && group.may_begin_switch().is_ok());
    assert_eq!(group.switch_state(host.now), Err(why.clone()), "whoever asks is told");
    assert!(group.switch_state(host.now).is_err_and(|next| next != why), "once");
    assert_eq!(group.look_at_switch(host), None);
    why
}

#[test]
fn a_group_is_switched_over_on_record_then_shut_then_without_its_lease() {
    let (mut group, mut host) = begun();
    assert!(group.is_switching() && group.may_begin_switch().is_err());
    let (first, _) = host.holds.remove(0);
    first.send(drained(7, Some(Vec::new()))).unwrap();
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait), "the other is not drained");
    let (second, _) = host.holds.remove(0);
    second.send(drained(8, Some(Vec::new()))).unwrap();
    for held in [Some(1), None] {
        host.held_packets = held;
        assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait), "packets are held");
    }
    assert_eq!(group.switch_state(host.now), Ok(SwitchState::Draining));
    host.held_packets = Some(0);
    let at_unix_ms = host.wall_ms();
    assert!(host.acts().is_empty());

    assert_eq!(group.look_at_switch(&mut host), Some(Step::Shut));
    let fences = [Act::Fence(0), Act::Fence(1), Act::Fence(2)];
    assert_eq!(host.acts(), [&[Act::KeepSwitched(at_unix_ms)][..], &fences].concat());
    assert!(group.is_shut() && group.is_switching());
    assert_eq!(group.switch_state(host.now), Ok(SwitchState::GivingUp));
    assert_eq!(group.view().switched_at_unix_ms, None, "not over");

    host.members[1].gate.state.lock().unwrap().is_applied = false;
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait), "a gate has not shut yet");
    assert!(host.acts().is_empty());
    host.members[1].gate.state.lock().unwrap().is_applied = true;
    assert_eq!(group.look_at_switch(&mut host), Some(Step::GiveUp));
    assert_eq!(host.acts(), [Act::GiveUp(0), Act::GiveUp(1), Act::GiveUp(2)]);

    host.pass_ms(20);
    for given_up in host.given_up.split_off(1) {
        given_up.send(CountVector::new()).unwrap();
    }
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait), "the first is not answered");
    host.given_up.remove(0).send(CountVector::new()).unwrap();
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Over));
    assert_eq!(host.acts(), [Act::SwitchedOver(0), Act::SwitchedOver(2)]);
    assert!(group.is_shut() && !group.is_switching() && group.may_begin_switch().is_err());
    assert_eq!(group.view().switched_at_unix_ms, Some(at_unix_ms));
    let Ok(SwitchState::Over { seqs, gave_up_ms, problem, .. }) = group.switch_state(host.now)
    else {
        panic!("it is over")
    };
    assert_eq!(seqs, [("db".to_owned(), 7), ("web".to_owned(), 8)].into());
    assert_eq!((gave_up_ms, problem), (20, None));
    assert_eq!(group.look_at_switch(&mut host), None);
    assert!(group.is_shut());
}

#[test]
fn a_link_that_ends_before_the_backup_answers_leaves_a_doubt_and_the_gate_shut() {
    let (mut group, mut host) = begun();
    all_at_the_backup(&mut host);
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Shut));
    assert_eq!(group.look_at_switch(&mut host), Some(Step::GiveUp));
    drop(host.given_up.pop());
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Over));
    let state = group.switch_state(host.now);
    assert!(matches!(state, Ok(SwitchState::Over { problem: Some(_), .. })), "{state:?}");
    assert!(group.is_shut());
}

#[test]
fn a_switch_that_cannot_be_put_on_record_lets_the_group_go_on() {
    let (mut group, mut host) = begun();
    all_at_the_backup(&mut host);
    host.can_keep = false;
    assert!(goes_on(&mut group, &mut host).contains("put on record"));
}

#[test]
fn a_disk_that_is_not_at_the_backup_as_it_is_lets_the_group_go_on() {
    let (mut group, mut host) = begun();
    let (reply, _) = host.holds.remove(0);
    reply.send(drained(7, None)).unwrap();
    assert!(goes_on(&mut group, &mut host).contains("last flush"));
}

#[test]
fn a_backup_that_does_not_get_everything_in_time_lets_the_group_go_on() {
    let (mut group, mut host) = begun();
    let asked = Duration::from_millis(100);
    for _ in 0..HOUR.as_millis() / asked.as_millis() - 1 {
        host.pass_ms(asked.as_millis() as u64);
        group.switch_state(host.now).unwrap();
        assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait));
    }
    host.members[2].link.set_lag(3, 512, None);
    host.members[0].link.set_lag(2, 512, None);
    host.pass_ms(asked.as_millis() as u64);
    group.switch_state(host.now).unwrap();
    assert!(goes_on(&mut group, &mut host).contains("lacks 5 writes"));
}

/// A driver looks at all groups of its host while any of them is switched over.
#[test]
fn a_look_at_a_group_without_a_switch_under_way_changes_nothing() {
    let mut host = Host::new();
    let mut over = GroupLoop::new(settings(Mode::Pipelined), None, Some(7));
    assert_eq!(over.look_at_switch(&mut host), None);
    assert_eq!(over.switch_state(host.now), Ok(SwitchState::Before));
    assert_eq!(over.view().switched_at_unix_ms, Some(7));
    assert!(over.is_shut() && over.may_begin_switch().is_err());

    let (mut failed, mut host) = begun();
    host.is_stopping = true;
    assert!(matches!(failed.look_at_switch(&mut host), Some(Step::GoOn(_))));
    assert_eq!(failed.look_at_switch(&mut host), None);
    let why = failed.switch_state(host.now).unwrap_err();
    assert!(why.contains("the daemon is stopping"), "whoever asks is still told");
}

/// Obstacles count also if they came up while the writers were drained.
#[test]
fn a_group_is_not_switched_over_while_anything_is_not_at_the_backup_as_it_is() {
    let obstacles: [fn(&mut Host); 7] = [
        |host| host.is_stopping = true,
        |host| host.members[1].link.set_attached(false),
        |host| host.members[1].link.set_stalled(Some("no room".into())),
        |host| host.writer(2).phase = Phase::Resyncing,
        |host| host.writer(2).phase = Phase::Disconnected,
        |host| host.writer(0).failed_disk = Some(("root".into(), "EIO".into())),
        |host| host.writer(0).differs = true,
    ];
    for obstacle in obstacles {
        let (mut group, mut host) = begun();
        assert_eq!(group.check_switch(&host), Ok(()));
        obstacle(&mut host);
        let why = group.check_switch(&host).unwrap_err();
        all_at_the_backup(&mut host);
        assert_eq!(goes_on(&mut group, &mut host), why);
    }
    let group = GroupLoop::new(settings(Mode::Pipelined), Some(1), None);
    assert!(group.check_switch(&Host::new()).is_err(), "degraded");
    let group = GroupLoop::new(settings(Mode::Pipelined), None, Some(1));
    assert!(group.may_begin_switch().is_err() && group.is_shut());
}

/// Held packets of one writer wait for all the others in the form of times: they are ready together or not at all.
#[test]
fn writers_hold_together_in_the_form_of_times() {
    for (form, is_of_several, counted) in [
        (Form::Hlc, true, [2, 2]),
        (Form::Hlc, false, [1, 1]),
        (Form::Vector, true, [1, 1]),
        (Form::Vector, false, [1, 1]),
    ] {
        let settings = GroupSettings { form, is_of_several, ..settings(Mode::Pipelined) };
        let (mut group, mut host) = (GroupLoop::new(settings, None, None), Host::new());
        group.begin_switch(HOUR, HOUR, &mut host);
        assert_eq!(not_ready(&host), counted);
        host.holds[0].1.store(9, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(not_ready(&host)[1] == 9, counted[1] == 2, "one count, or one for each");
    }
}

#[test]
fn a_group_that_is_spread_goes_over_when_the_backup_says_that_all_hosts_are_ready() {
    let elsewhere = [("mail".to_owned(), "host-b".to_owned())].into();
    let spread = GroupSettings { is_of_several: true, elsewhere, ..settings(Mode::Pipelined) };
    let (mut group, mut host) = (GroupLoop::new(spread, None, None), Host::new());
    group.begin_switch(HOUR, HOUR, &mut host);
    host.acts();
    all_at_the_backup(&mut host);
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Say(true)));
    assert_eq!(host.acts(), [0, 1, 2].map(|nth| Act::Ready(nth, true)));
    host.agreements[0].told("db", vec!["mail".into()]);
    assert_eq!(group.look_at_switch(&mut host), Some(Step::Wait));
    let members = vec!["mail on host-b".to_owned()];
    assert_eq!(group.switch_state(host.now), Ok(SwitchState::Awaiting { members }));
    assert!(!group.is_shut());
    host.agreements[2].told("web", Vec::new());
    host.can_keep = false;
    let Some(Step::GoOn(why)) = group.look_at_switch(&mut host) else { panic!() };
    assert!(why.contains("The other hosts have switched over"));
    let unsaid = [0, 1, 2].map(|nth| Act::Ready(nth, false));
    assert_eq!(host.acts(), [&unsaid[..], &LET_GO].concat(), "nobody counts on them");
}
