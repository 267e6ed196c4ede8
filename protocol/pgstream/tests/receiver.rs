//! The receiver against servers that are played by hand: the ways of a stream, and the names of what goes wrong.

mod common;

use common::*;
use std::time::Duration;
use tidelock_pgstream::limits::STATUS_BACKLOG_BYTES;
use tidelock_pgstream::{
    Event, Failure, Login, PasswordMethod, Phase, Receiver, SlotUse, Start, Timing,
};
use tidelock_wal::{Lsn, TimelineId};

fn slot(create: bool) -> Option<SlotUse> {
    Some(SlotUse { name: "tidelock".parse().unwrap(), create })
}

/// A receiver that streams on timeline 1 from a position.
fn streaming(from: u64) -> Receiver {
    let mut receiver = receiver(None);
    feed(&mut receiver, &greeting(1, "0/9000000"));
    receiver.start(Start { slot: None, from: Some(at(1, from)) }).unwrap();
    assert_eq!(feed(&mut receiver, &copy_both()), [Event::Started(at(1, from))]);
    receiver.output().clear();
    receiver
}

/// The failure that bytes lead to.
fn failure(receiver: &mut Receiver, bytes: &[u8]) -> Failure {
    match feed(receiver, bytes).pop() {
        Some(Event::Failed(failure)) => {
            assert!(!failure.to_string().is_empty() && !failure.kind().is_empty());
            assert_eq!(feed(receiver, &copy_both()), [], "nothing comes behind a failure");
            failure
        }
        other => panic!("no failure: {other:?}"),
    }
}

/// Positions and the wish for a reply in the last status update of the output.
fn status(receiver: &mut Receiver) -> Option<([u64; 3], bool)> {
    let output = receiver.output().split();
    let last = output.len().checked_sub(39)?;
    let number =
        |at: usize| u64::from_be_bytes(output[last + at..last + at + 8].try_into().unwrap());
    assert_eq!(&output[last..last + 6], b"d\0\0\0\x26r");
    Some(([number(6), number(14), number(22)], output[last + 38] == 1))
}

#[test]
fn a_first_stream_makes_its_slot_and_begins_with_what_the_slot_keeps() {
    let mut receiver = receiver(None);
    assert_eq!(&receiver.output()[4..8], &[0, 3, 0, 0]);
    receiver.output().clear();
    let events = feed(&mut receiver, &greeting(1, "0/3500000"));
    let [Event::Identified(identity)] = events[..] else { panic!("{events:?}") };
    assert_eq!((identity.system, identity.end), (SYSTEM, at(1, 0x350_0000)));
    assert_eq!((identity.version, identity.segment_bytes), (150_013, 1 << 20));

    receiver.start(Start { slot: slot(true), from: None }).unwrap();
    assert_eq!(sent(&mut receiver), "READ_REPLICATION_SLOT \"tidelock\"");
    assert_eq!(feed(&mut receiver, &answer(&[None, None, None])), []);
    assert_eq!(sent(&mut receiver), "CREATE_REPLICATION_SLOT \"tidelock\" PHYSICAL RESERVE_WAL");
    let created = answer(&[Some("tidelock"), Some("0/0"), None, None]);
    assert_eq!(feed(&mut receiver, &created), [Event::SlotCreated("tidelock".parse().unwrap())]);
    feed(&mut receiver, &answer(&[Some("physical"), Some("0/3400028"), Some("1")]));
    assert_eq!(
        sent(&mut receiver),
        "START_REPLICATION SLOT \"tidelock\" PHYSICAL 0/3400000 TIMELINE 1"
    );
    let bytes = [copy_both(), wal(0x340_0000, b"abc"), wal(0x340_0003, b"d")].concat();
    let events = feed(&mut receiver, &bytes);
    assert_eq!(events[0], Event::Started(at(1, 0x340_0000)));
    let parts = events[1..].iter().map(|event| match event {
        Event::Wal { start, bytes, .. } => (start.0, &bytes[..]),
        other => panic!("{other:?}"),
    });
    assert_eq!(parts.collect::<Vec<_>>(), [(0x340_0000, &b"abc"[..]), (0x340_0003, b"d")]);
}

#[test]
fn no_more_is_reported_than_was_received_and_nothing_is_taken_back() {
    let mut receiver = streaming(SEGMENT);
    feed(&mut receiver, &wal(SEGMENT, &[0; 100]));
    receiver.flushed(Lsn(SEGMENT + 60));
    assert_eq!(status(&mut receiver), Some(([SEGMENT + 100, SEGMENT + 60, 0], false)));
    assert_eq!(status(&mut receiver), None);
    receiver.flushed(Lsn(SEGMENT + 10));
    assert_eq!(status(&mut receiver), None);
    receiver.applied(Lsn(u64::MAX));
    receiver.flushed(Lsn(u64::MAX));
    let all = SEGMENT + 100;
    assert_eq!(status(&mut receiver), Some(([all, all, SEGMENT + 60], false)));
    // Asked for a sign, the receiver gives it at once; one for many questions if they come together.
    feed(&mut receiver, &keepalive(0));
    assert_eq!(status(&mut receiver), None);
    feed(&mut receiver, &keepalive(1).repeat(10_000));
    assert_eq!(status(&mut receiver), Some(([all, all, SEGMENT + 60], false)));
    assert_eq!(status(&mut receiver), None);
}

#[test]
fn a_server_that_asks_and_does_not_read_costs_no_memory() {
    let mut receiver = streaming(SEGMENT);
    for place in 0..2000 {
        feed(&mut receiver, &[wal(SEGMENT + place, b"a"), keepalive(1)].concat());
        receiver.flushed(Lsn(SEGMENT + place));
        assert!(receiver.output().len() < 2 * STATUS_BACKLOG_BYTES);
    }
    receiver.output().clear();
    let end = SEGMENT + 2000;
    assert_eq!(
        status(&mut receiver),
        Some(([end, end - 1, 0], false)),
        "the last word is not lost"
    );
}

#[test]
fn a_silent_server_is_asked_and_then_given_up() {
    let mut receiver = streaming(0);
    receiver.tick(now(9));
    assert_eq!(status(&mut receiver), None);
    assert_eq!(receiver.deadline(), Some(Duration::from_secs(10)));
    receiver.tick(now(10));
    assert_eq!(status(&mut receiver), Some(([0; 3], false)));
    receiver.tick(now(30));
    assert_eq!(status(&mut receiver), Some(([0; 3], true)));
    receiver.tick(now(59));
    assert_eq!(receiver.poll(), None);
    // A sign starts the time anew.
    feed(&mut receiver, &keepalive(0));
    receiver.tick(now(118));
    assert_eq!(receiver.poll(), None);
    receiver.tick(now(119));
    assert_eq!(receiver.poll(), Some(Event::Failed(Failure::Silent { seconds: 60 })));
}

#[test]
fn the_end_of_a_timeline_leads_to_the_next_one() {
    let mut receiver = streaming(SEGMENT);
    feed(&mut receiver, &wal(SEGMENT, &[0; 16]));
    receiver.output().clear();
    assert_eq!(feed(&mut receiver, &message(b'c', &[])), []);
    let output = receiver.output().split();
    assert!(output.ends_with(&message(b'c', &[])), "{output:?}");
    let next = [row(&[Some("2"), Some("0/100010")]), complete(), complete(), ready()].concat();
    let events = feed(&mut receiver, &next);
    let next = at(2, SEGMENT + 16);
    assert_eq!(events, [Event::TimelineEnds { timeline: TimelineId(1), next }]);
    assert_eq!(sent(&mut receiver), "IDENTIFY_SYSTEM");
    let events = feed(&mut receiver, &identity(2, "0/9000000"));
    assert!(matches!(events[..], [Event::Identified(identity)] if identity.end.timeline.0 == 2));
    receiver.start(Start { slot: None, from: Some(next) }).unwrap();
    assert_eq!(sent(&mut receiver), "TIMELINE_HISTORY 2");
    let file = "1\t0/100010\tno recovery target specified\n";
    let events = feed(&mut receiver, &answer(&[Some("00000002.history"), Some(file)]));
    assert!(matches!(&events[..], [Event::History { history, .. }]
        if history.left_at(TimelineId(1)) == Some(next.at)));
    assert_eq!(sent(&mut receiver), "START_REPLICATION PHYSICAL 0/100010 TIMELINE 2");

    // A server does not become another one on the way.
    let mut changed = streaming(SEGMENT);
    let next = [row(&[Some("2"), Some("0/100000")]), complete(), ready()].concat();
    let other = answer(&[Some("5"), Some("2"), Some("0/900000"), None]);
    let bytes = [message(b'c', &[]), next, other].concat();
    assert_eq!(failure(&mut changed, &bytes), Failure::WrongSystem { found: 5, expected: SYSTEM });

    // A start at the very end of a timeline is answered without a stream.
    let mut receiver = streaming_to_be(1, SEGMENT + 16);
    let next = [row(&[Some("2"), Some("0/100010")]), complete(), complete(), ready()].concat();
    let events = feed(&mut receiver, &next);
    let next = at(2, SEGMENT + 16);
    assert_eq!(events, [Event::TimelineEnds { timeline: TimelineId(1), next }]);
}

/// A receiver that has asked for a stream.
fn streaming_to_be(timeline: u32, from: u64) -> Receiver {
    let mut receiver = receiver(None);
    feed(&mut receiver, &greeting(1, "0/9000000"));
    receiver.start(Start { slot: None, from: Some(at(timeline, from)) }).unwrap();
    receiver
}

#[test]
fn lies_about_the_log_have_names() {
    let name = |bytes: &[u8]| failure(&mut streaming(SEGMENT), bytes).kind();
    assert_eq!(name(&wal(SEGMENT + 1, b"a")), "gap");
    assert_eq!(name(&wal(SEGMENT - 1, b"a")), "backwards");
    assert_eq!(name(&[wal(SEGMENT, b"ab"), wal(SEGMENT + 1, b"b")].concat()), "backwards");
    let head = [&u64::MAX.to_be_bytes()[..], &[0; 16]].concat();
    let last = message(b'd', &[b"w", &head[..], b"a"].concat());
    let mut at_the_end = receiver(None);
    feed(&mut at_the_end, &greeting(1, "FFFFFFFF/FFFFFFFF"));
    at_the_end.start(Start { slot: None, from: Some(at(1, u64::MAX)) }).unwrap();
    feed(&mut at_the_end, &copy_both());
    assert_eq!(failure(&mut at_the_end, &last).kind(), "position-overflow");
    for (next, said) in [("2", "0/100001"), ("1", "0/100000"), ("0", "0/100000")] {
        let end = [row(&[Some(next), Some(said)]), complete(), complete(), ready()].concat();
        assert_eq!(name(&[message(b'c', &[]), end].concat()), "wrong-end");
    }
    for text in ["", "x", "-1"] {
        let end = [row(&[Some(text), Some("0/100000")]), complete(), ready()].concat();
        assert_eq!(name(&[message(b'c', &[]), end].concat()), "malformed-message");
    }
    assert_eq!(name(&[message(b'c', &[]), complete(), ready()].concat()), "server-ended");
    assert_eq!(name(&complete()), "server-ended");
}

#[test]
fn messages_out_of_place_or_form_have_names() {
    let name = |bytes: &[u8]| failure(&mut streaming(SEGMENT), bytes).kind();
    for body in [&b""[..], b"w", b"k", &[b'w'; 24], &[b'k'; 17], &[b'k'; 19]] {
        assert_eq!(name(&message(b'd', body)), "malformed-message", "{body:?}");
    }
    assert_eq!(name(&message(b'd', b"z")), "unexpected-message");
    assert_eq!(name(&copy_both()), "unexpected-message");
    assert_eq!(name(&authentication(0, &[])), "unexpected-message");
    assert_eq!(name(&message(b'E', b"C")), "malformed-message");
    assert_eq!(name(&message(b'?', b"")), "malformed-message");
    assert_eq!(name(b"d\0\0\0\0"), "frame");
    assert_eq!(name(b"d\x7f\xff\xff\xff"), "frame");
    for bytes in [wal(0, b"a"), copy_both(), ready(), answer(&[None]), message(b'c', &[])] {
        assert_eq!(failure(&mut receiver(None), &bytes).kind(), "unexpected-message");
        let mut idle = receiver(None);
        feed(&mut idle, &greeting(1, "0/0"));
        assert_eq!(failure(&mut idle, &bytes).kind(), "unexpected-message", "{bytes:?}");
    }
    // An answer has one row.
    let login = [authentication(0, &[]), ready()].concat();
    let two = [login, row(&[None]), row(&[None])].concat();
    assert_eq!(failure(&mut receiver(None), &two).kind(), "unexpected-message");
}

#[test]
fn facts_that_cannot_be_are_refused() {
    let login = [authentication(0, &[]), ready()].concat();
    let system = SYSTEM.to_string();
    for row in [
        [Some("x"), Some("1"), Some("0/0")],
        [Some(&system[..]), Some("0"), Some("0/0")],
        [Some(&system), Some("1"), None],
    ] {
        let bytes = [login.clone(), answer(&row)].concat();
        assert_eq!(failure(&mut receiver(None), &bytes).kind(), "setting");
    }
    for size in ["", "0", "3MB", "16TB", "2GB", "4096GB", "512kB"] {
        let bytes = [login.clone(), identity(1, "0/0"), answer(&[Some(size)])].concat();
        assert_eq!(failure(&mut receiver(None), &bytes).kind(), "setting", "{size}");
    }
    let old = answer(&[Some("140020")]);
    let bytes = [login, identity(1, "0/0"), answer(&[Some("16MB")]), old].concat();
    assert_eq!(failure(&mut receiver(None), &bytes), Failure::Version { found: 140_020 });
    let mut expects =
        Receiver::new(common::login(None), Some(5), Timing::default(), now(0)).unwrap();
    assert_eq!(
        failure(&mut expects, &greeting(1, "0/0")),
        Failure::WrongSystem { found: SYSTEM, expected: 5 }
    );
}

#[test]
fn a_start_is_compared_with_the_history_of_the_server() {
    let begin = |server: u32, end: &str, ours| {
        let mut receiver = receiver(None);
        feed(&mut receiver, &greeting(server, end));
        receiver.start(Start { slot: None, from: Some(ours) }).unwrap();
        receiver
    };
    let named = |mut receiver: Receiver, bytes: &[u8]| failure(&mut receiver, bytes).kind();
    let history = |text: &str| answer(&[Some("00000003.history"), Some(text)]);
    assert_eq!(named(begin(1, "0/100000", at(1, SEGMENT + 1)), &[]), "server-behind");
    assert_eq!(named(begin(1, "0/100000", at(2, 0)), &[]), "old-timeline");
    let branch = history("1\t0/100000\tx\n2\t0/200000\tx\n");
    assert_eq!(named(begin(3, "0/900000", at(1, SEGMENT + 1)), &branch), "diverged");
    assert_eq!(named(begin(3, "0/900000", at(1, 0)), &history("2\t0/200000\tx\n")), "diverged");
    assert_eq!(named(begin(3, "0/900000", at(1, 0)), &history("?")), "history");
    assert_eq!(named(begin(3, "0/900000", at(3, 0x90_0001)), &branch), "server-behind");
    let mut good = begin(3, "0/900000", at(1, SEGMENT));
    feed(&mut good, &branch);
    assert_eq!(sent(&mut good), "START_REPLICATION PHYSICAL 0/100000 TIMELINE 1");
}

#[test]
fn slots_that_cannot_be_used_have_names() {
    let begin = |create, from| {
        let mut receiver = receiver(None);
        feed(&mut receiver, &greeting(1, "0/900000"));
        receiver.start(Start { slot: slot(create), from }).unwrap();
        receiver
    };
    let name = |create, from, bytes: &[u8]| failure(&mut begin(create, from), bytes).kind();
    let (absent, from) = (answer(&[None, None, None]), Some(at(1, 0)));
    let nothing_kept = answer(&[Some("physical"), None, None]);
    let kept = answer(&[Some("physical"), Some("0/0"), Some("1")]);
    assert_eq!(name(false, from, &absent), "slot-missing");
    assert_eq!(name(false, from, &answer(&[Some("logical"), None, None])), "slot-kind");
    assert_eq!(name(false, None, &nothing_kept), "slot-lost");
    let removed = error("58P01", "requested WAL segment has already been removed");
    assert_eq!(name(false, from, &[nothing_kept, removed.clone()].concat()), "slot-lost");
    assert_eq!(name(false, from, &[kept.clone(), removed].concat()), "wal-removed");
    for (sqlstate, kind) in [
        ("55006", "slot-in-use"),
        ("42704", "slot-missing"),
        ("55000", "slot-lost"),
        ("XX000", "server-error"),
        ("57P01", "server-ended"),
    ] {
        let bytes = [kept.clone(), error(sqlstate, "no")].concat();
        assert_eq!(name(false, from, &bytes), kind);
    }
    assert_eq!(name(true, from, &[absent.clone(), error("53400", "full")].concat()), "slots-full");
    // A slot that is made and is still not there: no circle.
    let created = answer(&[Some("tidelock"), Some("0/0"), None, None]);
    assert_eq!(name(true, from, &[absent.clone(), created, absent].concat()), "slot-missing");
    let text = failure(&mut begin(false, from), &[kept, error("55006", "busy\nbusy")].concat());
    assert_eq!(
        text.to_string(),
        "slot \"tidelock\" is in use by another connection; the server says: busy busy: more (55006)"
    );
}

#[test]
fn refusals_at_the_login_have_names() {
    for (sqlstate, kind, is_passing) in [
        ("28P01", "password-wrong", false),
        ("28000", "not-allowed", false),
        ("42501", "not-allowed", false),
        ("53300", "no-place", true),
        ("57P03", "not-ready", true),
        ("42000", "server-error", false),
    ] {
        let failure = failure(&mut receiver(None), &error(sqlstate, "no"));
        assert_eq!((failure.kind(), failure.is_passing()), (kind, is_passing), "{sqlstate}");
    }
    let mut ended = receiver(None);
    // Messages from before the end of the connection still count.
    ended.received(&error("57P03", "starting up"));
    ended.closed();
    assert!(matches!(ended.poll(), Some(Event::Failed(Failure::NotReady(_)))));
    let mut ended = receiver(None);
    ended.closed();
    assert_eq!(ended.poll(), Some(Event::Failed(Failure::Closed { phase: Phase::Login })));
}

#[test]
fn a_password_is_not_given_to_whoever_asks() {
    let scram = || authentication(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0");
    let ways = [
        (PasswordMethod::Cleartext, authentication(3, &[])),
        (PasswordMethod::Md5, authentication(5, b"salt")),
        (PasswordMethod::Scram, scram()),
    ];
    for (method, question) in &ways {
        for weakest in [PasswordMethod::Cleartext, PasswordMethod::Md5, PasswordMethod::Scram] {
            let login = Login { weakest, ..login(Some("secret")) };
            let mut receiver = Receiver::new(login, None, Timing::default(), now(0)).unwrap();
            receiver.output().clear();
            let events = feed(&mut receiver, question);
            let answers = receiver.output().starts_with(b"p");
            assert_eq!(answers, *method >= weakest, "{method:?} {weakest:?}");
            assert_eq!(answers, events.is_empty());
        }
        let failure = failure(&mut receiver(None), question);
        assert_eq!(failure.kind(), "authentication", "no password is configured");
    }
    // A server that lets in without having proved that it knows the password is an impostor.
    let mut cheated = receiver(Some("secret"));
    let bytes = [scram(), authentication(0, &[])].concat();
    assert_eq!(failure(&mut cheated, &bytes), Failure::ServerNotProven);
    for unknown in [authentication(7, &[]), authentication(99, &[]), authentication(10, b"X\0\0")] {
        assert_eq!(failure(&mut receiver(Some("secret")), &unknown).kind(), "authentication");
    }
    let twice = [authentication(3, &[]), authentication(3, &[])].concat();
    assert_eq!(failure(&mut receiver(Some("secret")), &twice).kind(), "unexpected-message");
    let hashed = [authentication(5, &[0x2a, 0x3d, 0x8f, 0xe0])].concat();
    let login = Login { user: "md5_user".into(), ..login(Some("password")) };
    let mut receiver = Receiver::new(login, None, Timing::default(), now(0)).unwrap();
    receiver.output().clear();
    feed(&mut receiver, &hashed);
    assert_eq!(&receiver.output()[5..], b"md562af4dd09bbb41884907a838a3233294\0");
}

#[test]
fn logins_that_cannot_be_written_are_refused() {
    let new = |login| Receiver::new(login, None, Timing::default(), now(0));
    assert!(new(Login { user: "a\0b".into(), ..login(None) }).is_err());
    assert!(new(Login { user: String::new(), ..login(None) }).is_err());
    assert!(new(login(Some("a\0b"))).is_err());
    let secret = format!("{:?}", login(Some("secret")));
    assert!(!secret.contains("secret"), "{secret}");
}

#[test]
fn the_history_of_a_promoted_server_is_told_before_a_start_and_asked_for_once() {
    let mut first = receiver(None);
    feed(&mut first, &greeting(1, "0/350000"));
    first.ask_history().unwrap();
    assert_eq!(first.poll(), None, "a first timeline has none");
    let mut receiver = receiver(None);
    feed(&mut receiver, &greeting(2, "0/350000"));
    receiver.ask_history().unwrap();
    assert_eq!(sent(&mut receiver), "TIMELINE_HISTORY 2");
    let file = answer(&[Some("00000002.history"), Some("1\t0/340000\tpromoted\n")]);
    let events = feed(&mut receiver, &file);
    assert!(matches!(&events[..], [Event::History { timeline: TimelineId(2), .. }]));
    receiver.start(Start { slot: None, from: Some(at(1, 0x34_0008)) }).unwrap();
    let events = std::iter::from_fn(|| receiver.poll()).collect::<Vec<_>>();
    assert!(matches!(&events[..], [Event::Failed(Failure::Diverged { .. })]), "{events:?}");
}

#[test]
fn silence_counts_for_nothing_while_nothing_is_read_on_purpose() {
    let mut receiver = streaming(0);
    for seconds in (0..600).step_by(50) {
        receiver.not_reading(now(seconds));
        receiver.tick(now(seconds));
        assert_eq!(receiver.poll(), None);
    }
    receiver.tick(now(550 + 60));
    assert!(matches!(receiver.poll(), Some(Event::Failed(Failure::Silent { .. }))));
}
