//! Attachments: where the stream goes on, with a backup of this version or an older one, and what ends it.

use super::*;
use crate::link::LinkState;
use crate::link::connection::{Connection, ConnectionError, Hello, hear};
use crate::link::host_link::HostLink;
use tidelock_protocol::message::PROTOCOL;

#[test]
fn the_gate_is_held_for_a_resync_before_there_can_be_a_lease() {
    let mut b = bench(UNCLEAN);
    assert_eq!(b.connect(), UNCLEAN);
    b.member.receive(attached(7, 5, CopyState::Resyncing), NOW).unwrap();
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "hold Gap true", "C <5>", "lease 0"]);
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));
    assert_eq!(b.port.acked(), (Seq(7), Seq(5)));
    b.admit(8..=9);
    assert_eq!(b.sent(), [8, 9]);
}

/// After a clean stop, too, writes wait for the backup: nothing that is known here alone says that the disks are as they were.
#[test]
fn a_clean_run_goes_on_where_the_backup_says() {
    let mut b = bench(CLEAN);
    assert_eq!(b.connect(), CLEAN);
    b.member.disconnected();
    assert_eq!(b.connect(), CLEAN);
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));
    b.admit(5..=6);
    assert_eq!(b.sent(), [5, 6]);
    b.member.disconnected();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Detached)));
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(5) });
    b.member.receive(attached(5, 5, CopyState::Whole), NOW).unwrap();
    assert_eq!(b.sent(), [6], "what had arrived is not sent again");
}

/// The backup goes by the run before until it hears that this one is on record here, and by its log from then on.
/// A server that stops greets a host and refuses it with one write.
#[test]
fn a_backup_that_refuses_right_after_its_greeting_is_asked_again_soon() {
    let hello = Hello { host: "h".to_owned(), software: "s".to_owned() };
    let (_, protocol) = PROTOCOL;
    let welcome = Message::Welcome { protocol, server: "b".to_owned(), software: "s".to_owned() };
    let (kind, reason) = (RefusalKind::Stopping, "it stops".to_owned());
    let greets_and = |message: Message| {
        let mut members: [Member<FromLink>; 0] = [];
        let mut connection = Connection::open(&hello, &members, MonoNanos(1));
        let mut input = BytesMut::new();
        frame::encode_control(Channel(0), &welcome, &mut input);
        frame::encode_control(Channel(0), &message, &mut input);
        connection.received(&mut input, &mut members, MonoNanos(2), 1).unwrap_err()
    };
    let refused = greets_and(Message::Refused { kind, reason });
    assert!(matches!(refused, ConnectionError::Refused { kind: RefusalKind::Stopping, .. }));
    assert!(!refused.is_of_words());
    assert!(greets_and(Message::Arriving).is_of_words(), "nothing else comes before an attachment");
}

#[test]
fn a_run_is_on_record_before_it_says_so_and_says_so_first() {
    let run = RunId { number: Incarnation(1), nonce: Nonce(1, 2) };
    let mut b = bench(UNCLEAN);
    let before = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.connected(&mut out);
        match frame::decode(&mut out).unwrap() {
            Some(Frame::Control(_, Message::Attach(attach))) => attach.writing().unwrap().before,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(before(&mut b), None);
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(b.told.take()[0], "epoch 1");
    assert_eq!(of_the_run(&mut b), [Message::Begun, Message::Logged(LOG)]);
    let older = LogAge { number: 4, ..LOG };
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Logged(older), &mut out);
    let said = frame::decode(&mut out).unwrap();
    assert_eq!(said, Some(Frame::Control(Channel(1), Message::Logged(older))), "at once");
    b.member.disconnected();
    assert_eq!(before(&mut b), Some(run));
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    let now = [Message::Begun, Message::Logged(older)];
    assert_eq!(of_the_run(&mut b), now, "as far as it is now");
}

/// A guest that writes no more would be taken for one that waits, and a degraded group would never come back.
#[test]
fn what_had_arrived_when_the_connection_broke_does_not_lag() {
    let (admitted_at, later) = (MonoNanos(1000), MonoNanos(9000));
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    let records = vec![record(5), record(6)];
    b.member.hear_owner(ToLink::Records { records, admitted_at }, &mut BytesMut::new());
    assert_eq!(b.sent(), [5, 6]);
    b.member.disconnected();
    assert_eq!((b.stats.lag_writes(), b.stats.lag_ns(later)), (2, 8000));
    b.connect();
    b.member.receive(attached(6, 6, CopyState::Whole), later).unwrap();
    assert_eq!((b.stats.lag_writes(), b.stats.lag_ns(later)), (0, 0));
}

#[test]
fn a_backup_that_lost_data_ends_the_run() {
    let mut b = bench(CLEAN);
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    b.member.disconnected();
    b.connect();
    let lost = b.member.receive(attached(3, 3, CopyState::Resyncing), NOW);
    assert!(matches!(lost, Err(MemberError::Stream { .. })), "{lost:?}");
}

/// Two copies of a backup's data have gone on in turns. The run was turned away as a liar's victim, again and again.
#[test]
fn a_backup_that_has_the_stream_of_another_run_ends_the_run() {
    // Also if as many records wait here by now.
    for durable in [5, 9] {
        let mut b = bench(CLEAN);
        b.connect();
        b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
        b.member.disconnected();
        b.admit(5..=6);
        b.connect();
        let why = "the record is of another run".to_owned();
        let told = attached_but(&attached(durable, durable, CopyState::Resyncing), |told| {
            told.stream.as_mut().unwrap().basis = Basis::Everything { why };
        });
        let judged = b.member.judge(&told, u64::MAX);
        assert!(matches!(judged, Err(MemberError::Stream { .. })), "{durable}: {judged:?}");
    }
}

#[test]
fn fenced_is_for_good_and_other_refusals_are_asked_again() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    let refused = |kind| Message::Refused { kind, reason: "why".into() };
    b.member.receive(refused(RefusalKind::Mismatch), NOW).unwrap();
    assert_eq!(b.told.take(), [""; 0]);
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    assert!(matches!(frame::decode(&mut out), Ok(Some(Frame::Control(_, Message::Attach(_))))));
    assert!(b.member.expects_answers());
    b.member.receive(refused(RefusalKind::Fenced), NOW).unwrap();
    assert!(!b.member.expects_answers(), "or the connection would be taken for dead");
    assert_eq!(b.told.take(), ["fence", "kept fenced"]);
    b.member.disconnected();
    for _ in 0..2 {
        b.member.connected(&mut out);
        b.member.beacon(NOW, &mut out);
    }
    assert!(out.is_empty(), "a fenced member does not ask again");
}

/// A server that stops is back soon. Whatever else it is, somebody has to act first.
#[test]
fn a_member_that_is_refused_again_and_again_lets_more_and_more_beacons_pass() {
    let growing = [0, 1, 3, 7, 15, 15];
    for (kind, passed) in [(RefusalKind::Mismatch, growing), (RefusalKind::Stopping, [0; 6])] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        for passes in passed {
            b.member.receive(Message::Refused { kind, reason: "why".into() }, NOW).unwrap();
            let asks = |_: &usize| {
                let mut out = BytesMut::new();
                b.member.beacon(NOW, &mut out);
                !out.is_empty()
            };
            assert_eq!((0..20).find(asks), Some(passes), "{kind:?}");
        }
    }
}

/// The backup may have been reverted to a copy that knows nothing of the recovery.
#[test]
fn what_a_run_before_was_fenced_for_holds_from_the_start_and_nothing_is_asked() {
    for attach in [alone(CLEAN), follower(Form::Vector)] {
        let mut b = bench_with(attach, None, None, Some("it was recovered"));
        assert_eq!(b.told.take(), ["fence"], "before anything else");
        match b.heard.try_recv() {
            Ok(FromLink::Refused(refusal)) => assert_eq!(refusal.reason, "it was recovered"),
            other => panic!("{other:?}"),
        }
        let mut out = BytesMut::new();
        b.member.connected(&mut out);
        b.member.beacon(NOW, &mut out);
        b.member.fill(&mut out, 1 << 20).unwrap();
        assert!(out.is_empty() && !b.member.expects_answers());
    }
}

#[test]
fn another_group_of_the_same_name_gets_nothing() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Empty), NOW).unwrap();
    b.told.take();
    b.member.disconnected();
    b.connect();
    let known = attached(0, 0, CopyState::Empty);
    let other = attached_but(&known, |told| told.group_id = GroupId([8; 16]));
    while b.heard.try_recv().is_ok() {}
    b.member.receive(other, NOW).unwrap();
    match b.heard.try_recv() {
        Ok(FromLink::Refused(refusal)) => {
            assert_eq!(refusal.kind, RefusalKind::Mismatch);
            assert!(refusal.reason.contains("08080808-0808"), "{}", refusal.reason);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(b.told.take(), [""; 0], "no epoch is kept of it");
    b.admit(1..=2);
    assert_eq!(b.sent(), [0; 0]);
}

#[test]
fn a_bookmark_is_asked_for_on_each_connection_until_it_is_answered() {
    use futures_channel::oneshot;
    let wanted = |id| Bookmark { id, name: "deploy".into(), expires_in_ms: None, moves: false };
    let asked = |b: &mut Bench| {
        let bookmarks = controls(b).into_iter();
        bookmarks.filter(|m| matches!(m, Message::Bookmark(_))).collect::<Vec<_>>()
    };
    let mut b = bench(LastRun::Unknown);
    let (done, mut outcome) = oneshot::channel();
    let mut out = BytesMut::new();
    b.member.hear_owner(ToLink::Bookmark(wanted(7), done), &mut out);
    let (forgotten, _) = oneshot::channel();
    b.member.hear_owner(ToLink::Bookmark(wanted(8), forgotten), &mut out);
    assert!(out.is_empty(), "there is no connection");
    for _ in 0..2 {
        b.connect();
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        assert_eq!(asked(&mut b), [Message::Bookmark(Box::new(wanted(7)))]);
        b.member.disconnected();
    }
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    let point = BookmarkPoint { hlc: Hlc(3), seqs: vec![], without: vec![] };
    let answer = Message::Bookmarked { id: 7, outcome: Ok(Box::new(point.clone())) };
    b.member.receive(answer, NOW).unwrap();
    assert_eq!(outcome.try_recv(), Ok(Some(Ok(point))));

    // While it is attached, at once.
    b.sent();
    let (done, _waits) = oneshot::channel();
    b.member.hear_owner(ToLink::Bookmark(wanted(9), done), &mut out);
    let said = frame::decode(&mut out).unwrap();
    assert_eq!(said, Some(Frame::Control(Channel(1), Message::Bookmark(Box::new(wanted(9))))));
}

#[test]
fn nothing_is_sent_to_a_backup_that_takes_nothing_but_beacons_are() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    b.member.receive(Message::PolicyKept(POLICY), NOW).unwrap();
    b.member.fill(&mut BytesMut::new(), 1 << 20).unwrap();
    b.member.receive(Message::Stalled { reason: Some("full".into()) }, NOW).unwrap();
    b.admit(1..=2);
    assert_eq!(b.sent(), [0; 0]);
    let mut out = BytesMut::new();
    b.member.beacon(NOW, &mut out);
    assert!(!out.is_empty());
    b.member.receive(Message::Stalled { reason: None }, NOW).unwrap();
    assert_eq!(b.sent(), [1, 2]);
    b.member.receive(Message::Stalled { reason: Some("full".into()) }, NOW).unwrap();
    b.member.disconnected();
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    assert_eq!(b.sent(), [1, 2], "a new attachment says anew if it is still so");
}

#[test]
fn acknowledgements_reach_the_gate_first_and_are_never_for_what_was_not_sent() {
    let mut b = bench(LastRun::Unknown);
    b.connect();
    b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
    b.admit(1..=3);
    assert_eq!(b.sent(), [1, 2, 3]);
    b.told.take();
    b.member.receive(acked(2), NOW).unwrap();
    assert_eq!(b.told.take(), ["C <2>"]);
    assert_eq!(b.port.acked(), (Seq(2), Seq(2)));
    assert!(matches!(b.member.receive(acked(4), NOW), Err(MemberError::Stream { .. })));
}

/// A member of which an earlier process has left records 4 to 9 on disk.
fn bench_that_goes_on(directory: &std::path::Path) -> Bench {
    let run = Incarnation(1);
    let files = Directory::at(directory);
    let mut journal = Journal::begin(files.clone(), 1 << 20, run, [0; 16], [0; 32]).unwrap();
    let at = (4..=9).map(|seq| journal.append(&record(seq), || Seq(seq)).unwrap()).min().unwrap();
    journal.set_sound(true).unwrap();
    let meter = Arc::new(Meter::new(1 << 20));
    meter.spill(6);
    let on_disk = OnDisk { files, meter };
    let left = Spilled { at, first: Seq(4), last: Seq(9), payload_bytes: 6 * 512 };
    bench_with(alone(LastRun::Unknown), None, Some((on_disk, left)), None)
}

#[test]
fn what_an_earlier_process_left_is_sent_and_the_gate_is_let_go_when_the_backup_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench_that_goes_on(dir.path());
    assert_eq!((b.stats.lag_writes(), b.stats.lag_bytes()), (6, 6 * 512), "it is said at once");
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(4) });
    b.member.receive(attached(5, 5, CopyState::Whole), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: false, .. })));
    assert_eq!(b.sent(), [6, 7, 8, 9]);
    b.member.receive(acked(8), NOW).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "C <5>", "C <8>"], "clients may know of 9");
    b.member.receive(acked(9), NOW).unwrap();
    assert_eq!(b.told.take(), ["C <9>", "hold LeftBacklog false"]);
    b.admit(10..=10);
    assert_eq!(b.sent(), [10]);
}

/// Another run has had the disks since, or the backup has lost something: the stream begins where the backup says.
#[test]
fn what_an_earlier_process_left_is_dropped_if_the_backup_does_not_confirm_it() {
    for durable in [2, 700] {
        let dir = tempfile::tempdir().unwrap();
        let mut b = bench_that_goes_on(dir.path());
        b.connect();
        b.member.receive(attached(durable, 2, CopyState::Resyncing), NOW).unwrap();
        assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));
        b.admit(durable + 1..=durable + 1);
        assert_eq!(b.sent(), [durable + 1]);
    }
}

#[test]
fn what_goes_on_and_is_compared_all_the_same_keeps_the_gate_shut_until_that_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let mut b = bench_that_goes_on(dir.path());
    b.connect();
    b.member.receive(attached(9, 9, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(b.told.take(), ["epoch 1", "hold Gap true", "hold LeftBacklog false", "C <9>"]);
}

#[test]
fn what_the_backup_cannot_go_on_with_is_not_gone_on_with_again() {
    for durable in [2, 10] {
        let dir = tempfile::tempdir().unwrap();
        let mut b = bench_that_goes_on(dir.path());
        b.connect();
        assert!(dir.path().join("sound").exists());
        let refused = b.member.receive(attached(durable, 2, CopyState::Whole), NOW);
        assert!(matches!(refused, Err(MemberError::Stream { .. })), "{durable}");
        assert!(!dir.path().join("sound").exists());
    }
}

/// While the guest's disks are elsewhere the backup hears nothing, on whatever connection; guests may be served.
#[test]
fn a_member_that_awaits_its_adoption_is_not_attached() {
    let adopt = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.hear_owner(ToLink::Adopted, &mut out);
        out
    };
    let mut b = bench(LastRun::Unknown);
    b.member.await_adoption();
    b.member.hear_owner(ToLink::ServeUnrecorded, &mut BytesMut::new());
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::MayServeUnrecorded)));
    for _ in 0..2 {
        let mut out = BytesMut::new();
        b.member.connected(&mut out);
        b.member.beacon(NOW, &mut out);
        assert!(!b.member.fill(&mut out, 1 << 20).unwrap() && out.is_empty());
        assert!(!b.member.expects_answers());
        b.member.disconnected();
    }
    b.member.connected(&mut BytesMut::new());
    assert!(!adopt(&mut b).is_empty(), "it asks to be attached at once");
    assert!(b.member.expects_answers());
    assert!(adopt(&mut b).is_empty(), "and once");
    b.member.receive(attached(0, 0, CopyState::Partial), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));

    // Or with the next connection.
    let mut b = bench(UNCLEAN);
    b.member.await_adoption();
    assert!(adopt(&mut b).is_empty() && !b.member.awaits_adoption());
    assert_eq!(b.connect(), UNCLEAN);
}

/// A connection is of no use to members that await their adoption: none of them says anything.
#[test]
fn a_host_makes_no_connection_before_one_of_its_groups_is_adopted() {
    let members = [(); 2].map(|()| {
        let mut member = bench(LastRun::Unknown).member;
        member.await_adoption();
        member
    });
    let hello = Hello { host: "h".to_owned(), software: "s".to_owned() };
    let mut link = HostLink::new("backup".into(), hello, Vec::from(members), 7, NOW);
    for _ in 0..3 {
        assert!(!link.wants_connection());
        assert!(matches!(link.news(), Some(LinkState::Down { retry_at: None, .. }) | None));
        link.tick(link.deadline()).unwrap();
    }
    link.owner_says(Channel(2), ToLink::Adopted).unwrap();
    link.tick(link.deadline()).unwrap();
    assert!(link.wants_connection());
}

/// A slow link is not a dead one: the watch over heartbeats counts on it.
#[test]
fn a_backup_that_receives_a_large_record_is_heard_by_every_member() {
    let benches = [bench(LastRun::Unknown), bench(LastRun::Unknown)];
    let stats = benches.each_ref().map(|b| b.stats.clone());
    let mut members = benches.map(|b| b.member);
    for count in 1..=2 {
        hear(Frame::Control(Channel(0), Message::Arriving), &mut members, NOW, 1).unwrap();
        assert_eq!(stats.each_ref().map(|stats| stats.arrivals()), [count; 2]);
    }
}
