//! Guests that are served without records, and the comparison that follows.

use super::*;

/// What it says next is that its disks may differ, so the owner may make them differ.
#[test]
fn guests_are_served_unrecorded_only_when_no_clean_end_can_be_believed_any_more() {
    const SERVED: LastRun = LastRun::Clean { seq: Seq(4), served: true };
    let ask = |b: &mut Bench| b.member.hear_owner(ToLink::ServeUnrecorded, &mut BytesMut::new());
    let may = |b: &Bench| matches!(b.heard.try_recv(), Ok(FromLink::MayServeUnrecorded));

    let mut b = bench(CLEAN);
    ask(&mut b);
    assert!(may(&b), "nobody was told");
    assert_eq!(b.told.take(), ["served"], "and that is on record");
    assert_eq!(b.connect(), SERVED);
    b.member.receive(attached(4, 4, CopyState::Resyncing), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));

    // The answer may be on its way, or already there.
    let mut b = bench(CLEAN);
    assert_eq!(b.connect(), CLEAN);
    ask(&mut b);
    assert!(!may(&b));
    b.member.disconnected();
    assert!(may(&b));
    assert_eq!(b.connect(), SERVED);

    let mut b = bench(CLEAN);
    b.connect();
    ask(&mut b);
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Attached { first: true, .. })));
    b.member.disconnected();
    assert!(matches!(b.heard.try_recv(), Ok(FromLink::Detached)));
    assert!(!may(&b), "the backup was reached");

    // After an unclean end there is nothing to take back.
    let mut b = bench(UNCLEAN);
    assert_eq!(b.connect(), UNCLEAN);
    ask(&mut b);
    assert!(may(&b));
}

/// A backup that was reached and refuses may have been promoted.
#[test]
fn guests_are_not_served_unrecorded_while_the_backup_refuses() {
    for (kind, serves) in [
        (RefusalKind::Fenced, false),
        (RefusalKind::Mismatch, false),
        (RefusalKind::Stopping, true),
    ] {
        let mut b = bench(LastRun::Unknown);
        b.connect();
        b.member.receive(Message::Refused { kind, reason: String::new() }, NOW).unwrap();
        assert!(matches!(b.heard.try_recv(), Ok(FromLink::Refused(_))));
        b.member.hear_owner(ToLink::ServeUnrecorded, &mut BytesMut::new());
        b.member.disconnected();
        let heard = b.heard.try_recv();
        assert_eq!(matches!(heard, Ok(FromLink::MayServeUnrecorded)), serves, "{kind:?}");
        let is_fenced = b.told.take().contains(&"kept fenced".to_owned());
        assert_eq!(is_fenced, kind == RefusalKind::Fenced);
    }
}

/// The backup is told once it is attached, and what it has kept of that is put on record.
#[test]
fn the_backup_is_told_who_serves_without_it() {
    for says in [None, Some(false), Some(true)] {
        let mut b = bench_with(alone(LastRun::Unknown), says, None, None);
        b.member.connected(&mut BytesMut::new());
        b.member.receive(attached(0, 0, CopyState::Whole), NOW).unwrap();
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let sent = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let said: Vec<_> = sent
            .filter_map(|frame| match frame {
                Frame::Control(_, Message::ServesUnreached { serves }) => Some(serves),
                _ => None,
            })
            .collect();
        assert_eq!(said, says.into_iter().collect::<Vec<_>>());
        b.told.take();
        b.member.receive(Message::ServesUnreachedKept { serves: true }, NOW).unwrap();
        assert_eq!(b.told.take(), ["serves unreached true"]);
    }
}

/// A backlog on disk was full: the stream stands, and the backup is asked on the same connection to compare the rest.
#[test]
fn a_stream_that_stood_goes_on_with_a_comparison() {
    let attaches = |b: &mut Bench| {
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let asked = frames.filter_map(|frame| match frame {
            Frame::Control(_, Message::Attach(attach)) => Some(attach.writing().unwrap().last_run),
            _ => None,
        });
        asked.collect::<Vec<_>>()
    };
    let say = |b: &mut Bench, message| b.member.hear_owner(message, &mut BytesMut::new());
    let heard = |b: &Bench| match b.heard.try_recv() {
        Ok(FromLink::Attached { compares, first, .. }) => (compares, first),
        other => panic!("{other:?}"),
    };

    let mut b = bench(CLEAN);
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert_eq!(heard(&b), (false, true));
    b.admit(5..=6);
    say(&mut b, ToLink::Stands);
    b.member.disconnected();
    b.heard.try_recv().unwrap();
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(5) }, "the stream first");
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert_eq!(heard(&b), (false, false));
    assert_eq!(b.sent(), [5, 6]);
    assert!(attaches(&mut b).is_empty());
    b.member.receive(acked(6), NOW).unwrap();

    say(&mut b, ToLink::AskToCompare);
    assert_eq!(attaches(&mut b), [UNCLEAN]);
    assert!(attaches(&mut b).is_empty(), "once");
    // What the backup had on its way.
    b.member.receive(Message::Lease { sent_at: NOW }, NOW).unwrap();
    b.member.receive(acked(6), NOW).unwrap();
    // The answer is lost with the connection.
    b.member.disconnected();
    b.heard.try_recv().unwrap();
    assert_eq!(b.connect(), UNCLEAN);
    b.told.take();
    b.member.receive(attached(6, 6, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(heard(&b), (true, false));
    assert_eq!(b.told.take()[1], "hold Gap true", "before the owner hears of it");
    b.member.disconnected();
    b.heard.try_recv().unwrap();
    assert_eq!(b.connect(), LastRun::Continues { from: Seq(7) }, "it was asked, and goes on");
    b.member.receive(attached(6, 6, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(heard(&b), (false, false));
    b.admit(7..=7);
    assert_eq!(b.sent(), [7]);
}

#[test]
fn a_backup_that_would_not_compare_ends_the_run() {
    let mut b = bench(CLEAN);
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    let again = b.member.receive(attached(4, 4, CopyState::Whole), NOW);
    assert!(matches!(again, Err(MemberError::Unexpected { .. })), "it was not asked");
    let mut b = bench(CLEAN);
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    b.member.disconnected();
    b.member.hear_owner(ToLink::Stands, &mut BytesMut::new());
    b.member.hear_owner(ToLink::AskToCompare, &mut BytesMut::new());
    assert_eq!(b.connect(), UNCLEAN);
    let whole = b.member.receive(attached(4, 4, CopyState::Whole), NOW);
    assert!(matches!(whole, Err(MemberError::Unexpected { .. })), "it would be called in sync");
}

/// A bookmark has all that guests had written when it was set, also what has no record.
#[test]
fn what_has_no_record_is_behind_the_next_one() {
    let reaches = |b: &mut Bench| {
        b.member.receive(Message::Sound { id: 1 }, NOW).unwrap();
        let mut out = BytesMut::new();
        b.member.fill(&mut out, 1 << 20).unwrap();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let sounded = frames.filter_map(|frame| match frame {
            Frame::Control(_, Message::Sounded { pending, .. }) => Some(pending.get(WRITER)),
            _ => None,
        });
        sounded.collect::<Vec<_>>()
    };
    let mut b = bench(CLEAN);
    b.connect();
    b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
    assert_eq!(reaches(&mut b), [Seq(4)]);
    b.member.hear_owner(ToLink::Stands, &mut BytesMut::new());
    assert_eq!(reaches(&mut b), [Seq(5)]);
    b.member.hear_owner(ToLink::AskToCompare, &mut BytesMut::new());
    b.member.fill(&mut BytesMut::new(), 1 << 20).unwrap();
    b.member.receive(attached(4, 4, CopyState::Resyncing), NOW).unwrap();
    assert_eq!(reaches(&mut b), [Seq(5)], "nothing is recorded yet");
    b.admit(5..=6);
    assert_eq!(reaches(&mut b), [Seq(6)]);
}

#[test]
fn a_refusal_that_crosses_with_the_question_for_a_comparison_ends_the_connection() {
    let refused = |kind| Message::Refused { kind, reason: "its disk failed".into() };
    let asking = || {
        let mut b = bench(CLEAN);
        b.connect();
        b.member.receive(attached(4, 4, CopyState::Whole), NOW).unwrap();
        let say = |b: &mut Bench, message| b.member.hear_owner(message, &mut BytesMut::new());
        say(&mut b, ToLink::Stands);
        say(&mut b, ToLink::AskToCompare);
        b.member.fill(&mut BytesMut::new(), 1 << 20).unwrap();
        b
    };
    let mut b = asking();
    assert!(!b.member.must_connect_anew());
    b.member.receive(refused(RefusalKind::Stopping), NOW).unwrap();
    assert!(b.member.must_connect_anew(), "the question may still be answered");
    b.member.disconnected();
    assert!(!b.member.must_connect_anew());
    assert_eq!(b.connect(), UNCLEAN, "it is asked again");

    let mut b = asking();
    b.member.receive(refused(RefusalKind::Fenced), NOW).unwrap();
    assert!(!b.member.must_connect_anew(), "nothing is asked any more");
}
