//! Leases, and what is said with them: the policy, what is awaited, a switch.

use super::*;

#[test]
fn the_first_lease_is_asked_for_at_once() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    assert!(!b.member.wants_lease());
    for _ in 0..2 {
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
        assert!(b.member.wants_lease());
        let beacon = Message::Beacon { sent_at: NOW };
        assert_eq!(controls(&mut b), [Message::Policy(POLICY), beacon]);
        assert!(!b.member.wants_lease());
        b.member.disconnected();
        b.connect();
    }
}

/// The gate may open without the backup only if that knows of it, so nobody answers clients before.
#[test]
fn the_policy_is_told_and_kept_before_there_is_a_lease() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(controls(&mut b), [Message::Policy(POLICY)], "no beacon");
    assert!(!b.member.wants_lease() && !b.stats.is_policy_kept());
    let other = Policy::holding(Mode::Pipelined);
    b.member.receive(Message::PolicyKept(other), NOW).unwrap();
    assert!(b.member.wants_lease() && !b.stats.is_policy_kept(), "it had no room: the group holds");
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert!(b.stats.is_policy_kept());
    assert_eq!(controls(&mut b), [Message::Beacon { sent_at: NOW }]);
    let open = Policy { mode: Mode::Async, degraded_since_unix_ms: Some(7), ..POLICY };
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Policy(open), &mut out);
    let said = frame::decode(&mut out).unwrap();
    assert_eq!(said, Some(Frame::Control(Channel(1), Message::Policy(open))));
    b.member.disconnected();
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    // It has had no lease: it may have to be told who is in mode async.
    assert_eq!(controls(&mut b), [Message::Policy(open)]);
    b.member.receive(Message::PolicyKept(open), NOW).unwrap();
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    b.member.disconnected();
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(controls(&mut b), [Message::Policy(open), Message::Beacon { sent_at: NOW }]);
}

/// The connection has had no room for the policy at the attachment when the mode changes.
#[test]
fn the_backup_hears_the_newest_policy_last() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    let newer = Policy::holding(Mode::Async);
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Policy(newer), &mut out);
    b.member.fill(&mut out, usize::MAX).unwrap();
    let mut said = Vec::new();
    while let Some(frame) = frame::decode(&mut out).unwrap() {
        said.extend(match frame {
            Frame::Control(_, Message::Policy(policy)) => Some(policy),
            _ => None,
        });
    }
    assert_eq!(said, [POLICY, newer]);
}

#[test]
fn what_was_heard_while_others_were_in_mode_async_is_asked_for_by_who_comes_then() {
    let mut b = bench_of(tagged(Form::Vector, LastRun::Clean { seq: Seq(0), served: false }));
    b.member.connected(&mut BytesMut::new());
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::Unheard, NOW).unwrap();
    assert!(controls(&mut b).contains(&Message::AskFloor { mark: 5, everyone: false }));
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    *b.told.mark.lock().unwrap() = None;
    b.member.receive(Message::Unheard, NOW).unwrap();
    assert_eq!(*b.told.mark.lock().unwrap(), None, "it has been here since");
}

#[test]
fn a_beacon_says_what_the_member_waits_for() {
    for form in [Form::Vector, Form::Hlc] {
        let mut b = bench_of(follower(form));
        let mut out = BytesMut::new();
        b.member.connected(&mut out);
        out.clear();
        let progress = |seq, hlc| Progress {
            committed: CountVector::of(WRITER, Seq(seq)),
            watermark: Hlc(hlc),
            ..Progress::default()
        };
        b.member.receive(followed(progress(6, 60)), NOW).unwrap();
        b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
        b.sent();
        let pending = CountVector::of(WRITER, Seq(7));
        *b.told.pending.lock().unwrap() = (pending.clone(), Hlc(70));
        let mut said = |b: &mut Bench| {
            b.member.beacon(NOW, &mut out);
            let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
            let control = |frame| match frame {
                Frame::Control(_, message) => message,
                Frame::Record(..) | Frame::Part(..) => panic!("a follower has none"),
            };
            frames.map(control).collect::<Vec<_>>()
        };
        let beacon = Message::Beacon { sent_at: NOW };
        let waits = Message::Sounded { id: UNASKED, pending, hlc: Hlc(70) };
        assert_eq!(said(&mut b), [waits, beacon.clone()], "{form}");
        b.member.receive(Message::Progress(progress(7, 70)), NOW).unwrap();
        assert_eq!(said(&mut b), [beacon], "{form}: all of it is in C");
    }
}

#[test]
fn a_member_of_whom_it_was_not_seen_what_it_heard_asks_until_it_is_told() {
    let mut b = bench_of(tagged(Form::Vector, LastRun::Unknown));
    let asked = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let questions = frames.filter_map(|frame| match frame {
            Frame::Control(_, Message::AskFloor { mark, everyone }) => Some((mark, everyone)),
            _ => None,
        });
        questions.collect::<Vec<_>>()
    };
    let attach = |b: &mut Bench, copy| {
        b.member.connected(&mut BytesMut::new());
        b.member.receive(attached(0, 0, copy), NOW).unwrap();
        b.told.take();
    };
    attach(&mut b, CopyState::Whole);
    assert_eq!(asked(&mut b), [], "all was seen");
    b.member.disconnected();
    // In the middle of an initial copy: C goes on, and P of the run before may be lost.
    attach(&mut b, CopyState::Partial);
    assert_eq!(asked(&mut b), [(5, false)]);
    b.member.disconnected();
    // A switch from mode async while the link is down is not forgotten.
    b.member.hear_owner(ToLink::AskFloor { everyone: true }, &mut BytesMut::new());
    assert_eq!(asked(&mut b), []);
    attach(&mut b, CopyState::Whole);
    assert_eq!(asked(&mut b), [(5, true)]);
    let floor =
        |mark| Message::FloorIs { mark, pending: CountVector::of(WRITER, Seq(3)), hlc: Hlc(9) };
    b.member.receive(floor(0), NOW).unwrap();
    b.member.receive(floor(5), NOW).unwrap();
    assert_eq!(b.told.take().len(), 2);
    b.member.hear_owner(ToLink::AskFloor { everyone: false }, &mut BytesMut::new());
    assert_eq!(asked(&mut b), [(5, false)], "everyone was told");
}

/// Control messages that the link sends when the beacon's timer fires, without those about its policy and its run.
fn beat(b: &mut Bench) -> Vec<Message> {
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    b.member.fill(&mut out, 1 << 20).unwrap();
    let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
    let messages = frames.filter_map(|frame| match frame {
        Frame::Control(_, Message::Policy(_) | Message::Begun | Message::Logged(_)) => None,
        Frame::Control(_, message) => Some(message),
        Frame::Record(..) | Frame::Part(..) => None,
    });
    messages.collect()
}

#[test]
fn who_gives_up_its_lease_asks_for_none_and_says_so_again_and_again() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }]);
    let (given_up, mut answer) = futures_channel::oneshot::channel();
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::GiveUpLease(Some(given_up)), &mut out);
    let said = Frame::Control(Channel(1), Message::GiveUpLease);
    assert_eq!(frame::decode(&mut out).unwrap(), Some(said));
    assert!(!b.member.wants_lease());
    assert_eq!(beat(&mut b), [Message::GiveUpLease], "in the place of a beacon");
    // Not answered, and on the next connection the attachment comes first.
    b.member.disconnected();
    assert_eq!(beat(&mut b), []);
    b.connect();
    b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    assert!(!b.member.wants_lease());
    assert_eq!(answer.try_recv(), Ok(None));
    let committed = CountVector::of(WRITER, Seq(7));
    b.member.receive(Message::LeaseGivenUp { committed: committed.clone() }, NOW).unwrap();
    assert_eq!(answer.try_recv(), Ok(Some(committed)));
    assert_eq!(beat(&mut b), [Message::GiveUpLease, Message::GiveUpLease]);
}

#[test]
fn who_is_ready_to_switch_says_so_on_each_connection_and_hears_of_the_others() {
    let mut b = bench(LastRun::Unknown);
    let attach = |b: &mut Bench| {
        b.connect();
        b.member.receive(attached(7, 7, CopyState::Whole), NOW).unwrap();
        b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    };
    let awaits = |b: &mut Bench, members: &[&str]| {
        let members = members.iter().map(|name| (*name).to_owned()).collect();
        b.member.receive(Message::SwitchAwaits { members }, NOW).unwrap();
    };
    attach(&mut b);
    b.sent();
    let agreement = Arc::new(Agreement::default());
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::ReadyToSwitch(true, agreement.clone()), &mut out);
    let said = |ready| Some(Frame::Control(Channel(1), Message::ReadyToSwitch { ready }));
    assert_eq!(frame::decode(&mut out).unwrap(), said(true));
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }], "its lease is still its own");
    awaits(&mut b, &["other"]);
    assert_eq!((agreement.awaited(), agreement.is_reached()), (vec!["other".to_owned()], false));
    b.member.disconnected();
    attach(&mut b);
    let ready = Message::ReadyToSwitch { ready: true };
    assert_eq!(beat(&mut b), [ready, Message::Beacon { sent_at: NOW }]);
    // Taken back: only what the backup says of it counts.
    b.member.hear_owner(ToLink::ReadyToSwitch(false, agreement.clone()), &mut out);
    assert_eq!(frame::decode(&mut out).unwrap(), said(false));
    awaits(&mut b, &["other"]);
    assert_eq!(agreement.released(), 0, "an answer to what was said before");
    awaits(&mut b, &["m", "other"]);
    assert_eq!((agreement.released(), agreement.is_reached()), (1, false));
    b.member.disconnected();
    attach(&mut b);
    assert_eq!(beat(&mut b), [Message::Beacon { sent_at: NOW }], "it is not ready any more");
    // Once all were ready, nothing that is said later changes that.
    b.member.hear_owner(ToLink::ReadyToSwitch(true, agreement.clone()), &mut out);
    awaits(&mut b, &[]);
    awaits(&mut b, &["other"]);
    assert!(agreement.is_reached());
}
