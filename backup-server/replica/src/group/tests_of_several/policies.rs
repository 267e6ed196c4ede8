//! What members do without this server: kept, told to who attaches, and said at a recovery.

use super::*;
use tidelock_protocol::message::Policy;
use tidelock_store::journal::Exposure;

const AFTER_MS: u64 = 30_000;
const HOLDS: Policy =
    Policy { mode: Mode::Pipelined, after_ms: Some(AFTER_MS), degraded_since_unix_ms: None };
const OPEN: Policy =
    Policy { mode: Mode::Async, after_ms: Some(AFTER_MS), degraded_since_unix_ms: Some(777) };

fn two(disk: &Memory) -> Group<Memory> {
    let shape = Shape { writers: 2, form: Form::Vector };
    let mut group = shape.create(disk).unwrap();
    for writer in 0..2 {
        attach(&mut group, at_ms(0), &shape.writer(writer, 1, LastRun::Unknown));
        send(&mut group, done(writer, 1, 10, &[]));
    }
    group.flush();
    group.take_outputs();
    group
}

fn tell(group: &mut Group<Memory>, writer: u16, policy: Policy) -> Vec<Message> {
    say(group, writer, Message::Policy(policy));
    group.flush();
    let told = told(&group.take_outputs(), link(writer)).into_iter();
    told.filter(|of| matches!(of, Message::PolicyKept(_) | Message::Unheard)).collect()
}

fn comes_back(group: &mut Group<Memory>, writer: u16, policy: Policy) -> Vec<Message> {
    let shape = Shape { writers: 2, form: Form::Vector };
    let seq = group.committed().get(WriterId(writer));
    attach(group, at_ms(0), &shape.writer(writer, 2, LastRun::Clean { seq, served: false }));
    tell(group, writer, policy)
}

fn leave(group: &mut Group<Memory>, writer: u16) {
    say(group, writer, Message::Detach { end: None });
    group.flush();
    group.take_outputs();
}

#[test]
fn it_is_on_stable_storage_before_the_host_hears_so() {
    let disk = Memory::new();
    let mut group = two(&disk);
    say(&mut group, 0, Message::Policy(HOLDS));
    assert_eq!(told(&group.take_outputs(), link(0)), []);
    assert!(group.policies().is_empty());
    group.flush();
    assert!(told(&group.take_outputs(), link(0)).contains(&Message::PolicyKept(HOLDS)));
    let kept = reopen(&disk.crash(&mut || false)).policies()["a"].clone();
    assert_eq!((kept.after_ms, kept.mode), (Some(AFTER_MS), Mode::Pipelined));
    // Without room the host hears what is kept instead, and holds by it.
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let hold = Policy::holding(Mode::Pipelined);
    assert_eq!(tell(&mut group, 1, HOLDS), [Message::PolicyKept(hold)]);
    let open = Policy::holding(Mode::Async);
    assert_eq!(tell(&mut group, 1, open), [Message::PolicyKept(hold)], "nor the mode");
    let more = Policy { after_ms: Some(1), ..HOLDS };
    let said = tell(&mut group, 0, more);
    assert_eq!(
        said,
        [Message::Unheard, Message::PolicyKept(HOLDS)],
        "the other has said that it is open"
    );
    disk.set_faults(Faults::default());
    group.retry();
    group.flush();
    let all = group.take_outputs();
    for (writer, policies) in [(0, vec![more]), (1, vec![HOLDS, open])] {
        let kept: Vec<_> = policies.into_iter().map(Message::PolicyKept).collect();
        let told = told(&all, link(writer)).into_iter();
        let told: Vec<_> = told.filter(|of| matches!(of, Message::PolicyKept(_))).collect();
        assert_eq!(told, kept, "in the order in which it was said");
    }
    assert_eq!(reopen(&disk.crash(&mut || false)).policies()["a"].after_ms, Some(1));
}

/// Bounds for words of a host that wait for room; the last word that was taken is kept.
#[test]
fn what_waits_for_room_is_bounded() {
    let disk = Memory::new();
    let mut group = two(&disk);
    tell(&mut group, 0, HOLDS);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    let mut n = 0;
    let back = loop {
        n += 1;
        let policy = Policy { after_ms: Some(n), ..HOLDS };
        let frame = Frame::Control(link(0).channel, Message::Policy(policy));
        let back = group.receive(at_ms(0), link(0), frame);
        if back.is_some() || n > 1_000 {
            break back;
        }
        group.take_outputs();
    };
    assert!(back.is_some(), "it comes back and is told again");
    disk.set_faults(Faults::default());
    group.retry();
    group.flush();
    assert_eq!(reopen(&disk.crash(&mut || false)).policies()["a"].after_ms, Some(n - 1));
}

#[test]
fn a_member_that_is_removed_is_forgotten() {
    let disk = Memory::new();
    let mut group = two(&disk);
    let shape = Shape { writers: 2, form: Form::Vector };
    for writer in 0..2 {
        tell(&mut group, writer, HOLDS);
        group.connection_lost(link(writer).connection);
        let run = shape.writer(writer, 1, LastRun::Continues { from: Seq(2) });
        attach(&mut group, at_ms(0), &Attach { machine: shape.follower().machine, ..run });
    }
    let known = |group: &Group<Memory>| {
        let members = &group.state().members;
        [
            members.policies.keys().cloned().collect::<Vec<_>>(),
            members.machines.keys().cloned().collect(),
        ]
    };
    group.forget_strangers();
    let both = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(known(&group), [both.clone(), both], "both are members");
    leave(&mut group, 1);
    group.remove("b").unwrap();
    let a = vec!["a".to_owned()];
    assert_eq!(known(&reopen(&disk.crash(&mut || false))), [a.clone(), a]);
}

#[test]
fn who_attaches_while_others_are_in_mode_async_is_told() {
    let mut group = two(&Memory::new());
    let hold = Policy::holding(Mode::Pipelined);
    tell(&mut group, 0, hold);
    tell(&mut group, 1, hold);
    leave(&mut group, 1);
    assert_eq!(comes_back(&mut group, 1, hold), [Message::PolicyKept(hold)]);
    // By the operator, or degraded and heard of.
    for policy in [Policy::holding(Mode::Async), OPEN] {
        leave(&mut group, 1);
        tell(&mut group, 0, policy);
        let said = comes_back(&mut group, 1, hold);
        assert_eq!(said, [Message::Unheard, Message::PolicyKept(hold)], "{policy:?}");
    }
    // It cannot be heard, and may have opened its gate since; or not, if it has left.
    for (policy, leaves, is_told) in
        [(HOLDS, false, true), (HOLDS, true, false), (hold, false, false)]
    {
        leave(&mut group, 1);
        let shape = Shape { writers: 2, form: Form::Vector };
        let seq = group.committed().get(WriterId(0));
        attach(&mut group, at_ms(0), &shape.writer(0, 3, LastRun::Clean { seq, served: false }));
        tell(&mut group, 0, policy);
        if leaves {
            leave(&mut group, 0);
        } else {
            group.connection_lost(link(0).connection);
        }
        let said = comes_back(&mut group, 1, hold);
        assert_eq!(said.contains(&Message::Unheard), is_told, "{policy:?} {leaves}");
    }
    // It has come back, and has not said yet that its gate is open.
    leave(&mut group, 1);
    let shape = Shape { writers: 2, form: Form::Vector };
    let seq = group.committed().get(WriterId(0));
    for run in [4, 5] {
        group.connection_lost(link(0).connection);
        attach(&mut group, at_ms(0), &shape.writer(0, run, LastRun::Clean { seq, served: false }));
        if run == 4 {
            tell(&mut group, 0, HOLDS);
        }
    }
    assert!(comes_back(&mut group, 1, hold).contains(&Message::Unheard));
    tell(&mut group, 0, HOLDS);
    leave(&mut group, 1);
    assert!(!comes_back(&mut group, 1, hold).contains(&Message::Unheard));
}

/// It had left on record, and there was no room to say that it is back.
#[test]
fn who_is_back_has_not_left_also_where_that_could_not_be_kept() {
    let disk = Memory::new();
    let mut group = two(&disk);
    let (hold, is_async) = (Policy::holding(Mode::Pipelined), Policy::holding(Mode::Async));
    tell(&mut group, 0, is_async);
    tell(&mut group, 1, hold);
    leave(&mut group, 0);
    assert_eq!(group.exposed(at_ms(90_000)), []);
    let shape = Shape { writers: 2, form: Form::Vector };
    let seq = group.committed().get(WriterId(0));
    attach(&mut group, at_ms(0), &shape.writer(0, 3, LastRun::Clean { seq, served: false }));
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    assert_eq!(tell(&mut group, 0, is_async), [Message::PolicyKept(hold)], "nobody keeps it");
    group.connection_lost(link(0).connection);
    disk.set_faults(Faults::default());
    leave(&mut group, 1);
    let said = comes_back(&mut group, 1, hold);
    assert_eq!(said, [Message::Unheard, Message::PolicyKept(hold)]);
    assert_eq!(group.exposed(at_ms(90_000)).len(), 1);
    // With room it is on record, and it can leave again.
    attach(&mut group, at_ms(0), &shape.writer(0, 4, LastRun::Clean { seq, served: false }));
    assert!(tell(&mut group, 0, is_async).contains(&Message::PolicyKept(is_async)));
    assert!(!reopen(&disk.crash(&mut || false)).policies()["a"].has_left);
    leave(&mut group, 0);
    assert_eq!(group.exposed(at_ms(90_000)), []);
}

/// Else the last record would say that it has held until then.
#[test]
fn what_there_was_no_room_for_is_on_record_before_records_that_came_after_it() {
    let disk = Memory::new();
    let mut group = two(&disk);
    tell(&mut group, 0, HOLDS);
    tell(&mut group, 1, Policy::holding(Mode::Pipelined));
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    say(&mut group, 0, Message::Policy(OPEN));
    send(&mut group, record(0, 2, Hlc::new(at_ms(50_000).unix_ms, 0).0, &[]));
    group.flush();
    let is_kept = |said: &[Message]| said.contains(&Message::PolicyKept(OPEN));
    let said = told(&group.take_outputs(), link(0));
    assert!(said.contains(&Message::PolicyKept(HOLDS)) && !is_kept(&said), "{said:?}");
    disk.set_faults(Faults::default());
    group.retry();
    group.flush();
    assert!(is_kept(&told(&group.take_outputs(), link(0))));
    let exposed = reopen(&disk.crash(&mut || false)).exposed(at_ms(90_000));
    assert_eq!(exposed[0].since_unix_ms, OPEN.degraded_since_unix_ms);
}

#[test]
fn a_recovery_says_what_may_have_been_told_without_it() {
    let lease_ms = 10_000;
    let recovered = |policies: [Option<Policy>; 2], left: bool| {
        let disk = Memory::new();
        let mut group = two(&disk);
        for (writer, policy) in (0..).zip(policies) {
            if let Some(policy) = policy {
                tell(&mut group, writer, policy);
            }
            group.beacon(at_ms(1), link(writer), MonoNanos(1));
            // On its way for a minute.
            group.beacon(at_ms(70_000), link(writer), MonoNanos(20_000 * 1_000_000 + 1));
            if left {
                leave(&mut group, writer);
            }
        }
        let first = group.recover(at_ms(90_000), false).unwrap().exposed;
        let again = reopen(&disk.crash(&mut || false)).recovery().unwrap().exposed;
        assert_eq!(first, again, "asked again, by another process");
        // The time after which a member degrades is told of one that has, or that may have.
        let is_waited_for =
            |of: &&Exposure| of.since_unix_ms.is_some_and(|ms| ms == 777) || !of.is_known;
        assert!(first.iter().filter(is_waited_for).all(|of| of.after_ms == Some(AFTER_MS)));
        let brief = |e: &Exposure| (e.member.clone(), e.is_known, e.since_unix_ms);
        first.iter().map(brief).collect::<Vec<_>>()
    };
    let hold = Policy::holding(Mode::Pipelined);
    assert_eq!(recovered([None, Some(hold)], false), []);
    let last_word = Some(at_ms(20_000 - lease_ms).unix_ms);
    let (a, b) = ("a".to_owned(), "b".to_owned());
    assert_eq!(
        recovered([Some(HOLDS), Some(OPEN)], false),
        [(a.clone(), false, last_word), (b.clone(), true, Some(777))]
    );
    assert_eq!(recovered([Some(HOLDS), Some(OPEN)], true), [(b, true, Some(777))]);
    let since = Some(at_ms(0).unix_ms - lease_ms);
    assert_eq!(recovered([Some(Policy::holding(Mode::Async)), None], false), [(a, true, since)]);
}

/// A stalled group renews leases, but what the member has said since then waits behind what cannot be taken.
#[test]
fn a_beacon_that_overtakes_what_was_sent_before_it_does_not_say_that_packets_were_held() {
    let mut group = two(&Memory::new());
    tell(&mut group, 0, HOLDS);
    tell(&mut group, 1, Policy::holding(Mode::Pipelined));
    group.beacon(at_ms(1_000), link(0), MonoNanos(1));
    let held_until = group.exposed(at_ms(90_000))[0].since_unix_ms;
    group.take_outputs();
    let sent_at = MonoNanos(60_000 * 1_000_000);
    group.beacon_ahead(at_ms(61_000), link(0), sent_at);
    assert_eq!(told(&group.take_outputs(), link(0))[0], Message::Lease { sent_at });
    assert_eq!(group.exposed(at_ms(90_000))[0].since_unix_ms, held_until);
    group.beacon(at_ms(61_000), link(0), sent_at);
    assert!(group.exposed(at_ms(90_000))[0].since_unix_ms > held_until);
}

/// A link that is about to be given up delivers late.
#[test]
fn mode_async_has_been_in_force_since_the_host_was_heard_to_hold_and_not_since_it_said_so() {
    let disk = Memory::new();
    let is_async = Policy { mode: Mode::Async, ..HOLDS };
    let mut group = two(&disk);
    tell(&mut group, 0, HOLDS);
    group.beacon(at_ms(1_000), link(0), MonoNanos(1_000_000_000));
    group.beacon(at_ms(70_000), link(0), MonoNanos(20_000_000_000));
    let say = Frame::Control(link(0).channel, Message::Policy(is_async));
    assert!(group.receive(at_ms(80_000), link(0), say).is_none());
    let exposed = group.exposed(at_ms(90_000)).remove(0);
    let last_word = 19_000 - 10_000;
    assert_eq!(
        (exposed.is_known, exposed.after_ms),
        (true, None),
        "it has not said that it degraded"
    );
    assert_eq!(exposed.since_unix_ms, Some(at_ms(last_word).unix_ms));
    // The server is started again, and it says so only then.
    tell(&mut group, 0, HOLDS);
    let mut group = reopen(&disk.crash(&mut || false));
    let shape = Shape { writers: 2, form: Form::Vector };
    attach(&mut group, at_ms(0), &shape.writer(0, 1, LastRun::Unknown));
    tell(&mut group, 0, is_async);
    assert_eq!(group.exposed(at_ms(90_000))[0].since_unix_ms, None, "nobody knows");
}

#[test]
fn after_a_restart_the_last_record_says_when_it_was_heard() {
    let disk = Memory::new();
    let mut group = two(&disk);
    tell(&mut group, 0, HOLDS);
    let at = Hlc::new(at_ms(50_000).unix_ms, 0);
    send(&mut group, record(0, 2, at.0, &[]));
    group.flush();
    let exposed = reopen(&disk.crash(&mut || false)).exposed(at_ms(0));
    assert_eq!(exposed[0].since_unix_ms, Some(at_ms(40_000).unix_ms));
}

/// Kept like a policy, and said also of a host that has left: nobody hears of its next start.
#[test]
fn who_serves_without_this_server_is_said_at_a_recovery() {
    let disk = Memory::new();
    let mut group = two(&disk);
    let says = |group: &mut Group<Memory>, serves| {
        say(group, 0, Message::ServesUnreached { serves });
        group.flush();
        let told = told(&group.take_outputs(), link(0)).into_iter();
        let mut kept = told.filter(|of| matches!(of, Message::ServesUnreachedKept { .. }));
        // Before it comes the answer to what had waited for room.
        kept.next_back().into_iter().collect::<Vec<_>>()
    };
    let kept = |serves| [Message::ServesUnreachedKept { serves }];
    assert_eq!(says(&mut group, true), kept(false), "it has not said its policy");
    let hold = Policy::holding(Mode::Pipelined);
    tell(&mut group, 0, hold);
    tell(&mut group, 1, hold);
    disk.set_faults(Faults { capacity_bytes: Some(0), ..Faults::default() });
    assert_eq!(says(&mut group, true), kept(false), "there is no room");
    disk.set_faults(Faults::default());
    assert_eq!(says(&mut group, true), kept(true));
    tell(&mut group, 0, Policy { after_ms: Some(1), ..hold });
    tell(&mut group, 0, hold);
    let mut after_crash = reopen(&disk.crash(&mut || false));
    assert!(after_crash.policies()["a"].serves_unreached, "another word does not take it back");
    group.beacon(at_ms(1), link(0), MonoNanos(1));
    leave(&mut group, 0);
    for exposed in
        [group.exposed(at_ms(90_000)), after_crash.recover(at_ms(90_000), true).unwrap().exposed]
    {
        assert_eq!(exposed.len(), 1, "{exposed:?}");
        let Exposure { member, is_known, serves_unreached, .. } = &exposed[0];
        assert_eq!((member.as_str(), *is_known, *serves_unreached), ("a", false, true));
    }
    comes_back(&mut group, 0, hold);
    assert_eq!(says(&mut group, false), kept(false));
    assert_eq!(group.exposed(at_ms(90_000)), []);
}

/// The rules of its interface can be removed, too.
#[test]
fn a_member_without_disks_that_answers_without_its_gate_is_named_as_well() {
    let disk = Memory::new();
    let mut group = two(&disk);
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    let shape = Shape { writers: 2, form: Form::Vector };
    group.attach(at_ms(0), web, &host(2), &shape.follower());
    let says = |group: &mut Group<Memory>, message| {
        assert!(group.receive(at_ms(0), web, Frame::Control(web.channel, message)).is_none());
        group.flush();
        let mut told = told(&group.take_outputs(), web).into_iter();
        told.rfind(|of| !matches!(of, Message::Progress(_)))
    };
    says(&mut group, Message::Policy(Policy::holding(Mode::Pipelined)));
    let kept = says(&mut group, Message::ServesUnreached { serves: true });
    assert_eq!(kept, Some(Message::ServesUnreachedKept { serves: true }));
    let exposed = reopen(&disk.crash(&mut || false)).recover(at_ms(90_000), true).unwrap().exposed;
    assert_eq!(exposed.iter().map(|of| of.member.as_str()).collect::<Vec<_>>(), ["web"]);
    says(&mut group, Message::ServesUnreached { serves: false });
    assert_eq!(group.exposed(at_ms(90_000)), []);
}
