//! The end of the time in which clients may have been told what a disaster would undo.

use super::around::Host;
use super::settings;
use crate::group::*;
use tidelock_protocol::ids::WriterId;

/// Replies have left unheld, of which C does not have all, and are held from now on.
fn held_again(mode: Mode) -> (GroupLoop, Host) {
    let (mut group, mut host) = (GroupLoop::new(settings(mode), None, None), Host::new());
    group.begin(&mut host);
    host.left_unheld = true;
    host.fall_silent();
    group.look(&mut host);
    assert!(group.view().told.unwrap().leaves);
    host.left_unheld = false;
    (group, host)
}

fn is_told(group: &mut GroupLoop, host: &mut Host) -> bool {
    group.look(host);
    let told = group.view().told;
    assert!(!told.is_some_and(|told| told.leaves));
    told.is_some()
}

#[test]
fn it_is_over_when_the_backup_has_all_that_a_guest_knew_when_replies_were_held_again() {
    let (mut group, mut host) = held_again(Mode::Pipelined);
    let since = group.view().told.unwrap().since_unix_ms;
    host.pass_ms(100);
    assert!(is_told(&mut group, &mut host));
    assert_eq!(group.view().told.unwrap().since_unix_ms, since, "since the first of it");
    // Replies to later writes are held.
    let later = CountVector::of(WriterId(0), Seq(20));
    host.members[0].gate.state.lock().unwrap().pending.0 = later;
    host.gate.as_mut().unwrap().committed = CountVector::of(WriterId(0), Seq(8));
    assert!(is_told(&mut group, &mut host));
    host.gate.as_mut().unwrap().is_open = false;
    host.catch_up();
    assert!(
        is_told(&mut group, &mut host),
        "no lease: C may be of a backup that goes on without this host"
    );
    host.gate.as_mut().unwrap().is_open = true;
    assert!(!is_told(&mut group, &mut host));
    host.gate.as_mut().unwrap().committed = CountVector::new();
    assert!(!is_told(&mut group, &mut host), "for good");
}

#[test]
fn what_a_guest_knew_is_looked_at_when_it_is_complete_and_the_gate_has_shut() {
    let changes: [fn(&mut Host, bool); 2] = [
        |host, is_so| host.gate.as_mut().unwrap().is_applied = is_so,
        |host, is_so| {
            let floor = (!is_so).then_some(3);
            host.members[1].gate.state.lock().unwrap().awaits_floor = floor;
        },
    ];
    for change in changes {
        let (mut group, mut host) = held_again(Mode::Pipelined);
        host.catch_up();
        change(&mut host, false);
        assert!(is_told(&mut group, &mut host));
        // P turns out to be more than C has.
        let more = CountVector::of(WriterId(0), Seq(10));
        host.members[0].gate.state.lock().unwrap().pending.0 = more.clone();
        change(&mut host, true);
        assert!(is_told(&mut group, &mut host));
        host.gate.as_mut().unwrap().committed = more;
        assert!(!is_told(&mut group, &mut host));
    }
}

/// A second time while it is not over: what has left since then counts.
#[test]
fn replies_that_leave_again_are_waited_for_anew() {
    let (mut group, mut host) = held_again(Mode::Pipelined);
    assert!(is_told(&mut group, &mut host));
    let more = CountVector::of(WriterId(0), Seq(10));
    host.members[0].gate.state.lock().unwrap().pending.0 = more.clone();
    host.left_unheld = true;
    group.look(&mut host);
    host.left_unheld = false;
    host.catch_up();
    assert!(is_told(&mut group, &mut host));
    host.gate.as_mut().unwrap().committed = more;
    assert!(!is_told(&mut group, &mut host));
}

#[test]
fn what_left_while_the_sites_were_not_equal_is_waited_for_until_they_are() {
    for (gap_then, gap_later) in [(true, true), (true, false), (false, true)] {
        let (mut group, mut host) = (GroupLoop::new(settings(Mode::Sync), None, None), Host::new());
        host.writer(0).gap = gap_then.then_some(Gap::STARTED);
        host.left_unheld = true;
        group.look(&mut host);
        host.left_unheld = false;
        host.writer(0).gap = gap_later.then_some(Gap::STARTED);
        assert_eq!(is_told(&mut group, &mut host), gap_then && gap_later);
        host.writer(0).gap = None;
        assert!(!is_told(&mut group, &mut host));
    }
}
