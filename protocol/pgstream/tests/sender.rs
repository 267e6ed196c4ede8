//! The sender against standbys that are played by hand: the bound, the commands, and the names of what goes wrong.

mod common;

use bytes::Bytes;
use common::*;
use std::collections::BTreeMap;
use std::time::Duration;
use tidelock_pgstream::limits::{
    CLIENT_MESSAGE_BYTES_MAX, OUTPUT_BYTES_HIGH, WAL_MESSAGE_BYTES_MAX,
};
use tidelock_pgstream::{
    Access, Client, Lineage, LineageError, Proof, Sender, SenderEnd, SenderEvent, Served, Timing,
    Wanted,
};
use tidelock_wal::{Lsn, TimelineId};

const BRANCH: u64 = 3 * SEGMENT + 0x100;

fn lineage(last: u32) -> Lineage {
    let file = Bytes::from(format!("1\t{}\treason\n", Lsn(BRANCH)));
    let files = (2..=last).map(|id| (TimelineId(id), file.clone())).collect();
    Lineage::new(TimelineId(last), files).unwrap()
}

fn served(bound: u64, last: u32) -> Served {
    let (version, segment_bytes) = (150_013, 1 << 20);
    Served { system: SYSTEM, version, segment_bytes, lineage: lineage(last), bound: Lsn(bound) }
}

fn sender_of(served: Served, user: Option<&str>, proof: Proof) -> Sender {
    let access = Access { user: user.map(Into::into), proof };
    Sender::new(served, access, Timing::default(), [7; 18], now(0))
}

fn startup(parameters: &[&str]) -> Vec<u8> {
    let mut body = 0x3_0000_u32.to_be_bytes().to_vec();
    parameters.iter().for_each(|text| body.extend([text.as_bytes(), b"\0"].concat()));
    body.push(0);
    untagged(&body)
}

fn untagged(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32 + 4).to_be_bytes()[..], body].concat()
}

const STANDBY: [&str; 6] = ["user", "far", "replication", "true", "application_name", "standby"];

fn query(text: &str) -> Vec<u8> {
    message(b'Q', &[text.as_bytes(), b"\0"].concat())
}

fn report(written: u64, reply: u8) -> Vec<u8> {
    let positions = [written, written / 2, written / 4, 5].map(u64::to_be_bytes).concat();
    message(b'd', &[b"r", &positions[..], &[reply]].concat())
}

fn give(sender: &mut Sender, bytes: &[u8]) -> Vec<SenderEvent> {
    sender.received(bytes);
    std::iter::from_fn(|| sender.poll()).collect()
}

/// A sender that has let a standby in, with an empty output.
fn ready_at(bound: u64, last: u32) -> Sender {
    let mut sender = sender_of(served(bound, last), None, Proof::Trust);
    let client = Client { user: "far".into(), application_name: "standby".into() };
    assert_eq!(give(&mut sender, &startup(&STANDBY)), [SenderEvent::LoggedIn(client)]);
    sender.output().clear();
    sender
}

/// Tags of the messages in the output, which is taken, and their bodies.
fn messages(sender: &mut Sender) -> Vec<(char, Vec<u8>)> {
    let (output, mut found) = (sender.output().split(), vec![]);
    let mut rest = &output[..];
    while let [tag, a, b, c, d, ..] = *rest {
        let end = 1 + u32::from_be_bytes([a, b, c, d]) as usize;
        found.push((char::from(tag), rest[5..end].to_vec()));
        rest = &rest[end..];
    }
    assert!(rest.is_empty());
    found
}

fn tags(sender: &mut Sender) -> String {
    messages(sender).into_iter().map(|(tag, _)| tag).collect()
}

/// Texts of the columns of a row.
fn columns(body: &[u8]) -> Vec<Option<String>> {
    let mut rest = &body[2..];
    let mut found = vec![];
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let length = usize::try_from(i32::from_be_bytes(*length)).ok();
        let (value, behind) = behind.split_at(length.unwrap_or(0));
        found.push(length.map(|_| String::from_utf8(value.to_vec()).unwrap()));
        rest = behind;
    }
    found
}

/// Code and message of the error in the output.
fn error_told(sender: &mut Sender) -> (String, String) {
    let (_, body) = messages(sender).into_iter().find(|(tag, _)| *tag == 'E').unwrap();
    let text = String::from_utf8(body).unwrap();
    let field = |letter| text.split('\0').find_map(|field| field.strip_prefix(letter)).unwrap();
    (field('C').into(), field('M').into())
}

fn ended(sender: &mut Sender, bytes: &[u8]) -> SenderEnd {
    match give(sender, bytes).pop() {
        Some(SenderEvent::Ended(end)) => {
            assert!(!end.to_string().is_empty() && !end.kind().is_empty());
            assert_eq!(give(sender, &startup(&STANDBY)), [], "nothing comes behind the end");
            end
        }
        other => panic!("no end: {other:?}"),
    }
}

#[test]
fn not_a_byte_at_the_bound_or_behind_it_is_taken() {
    let (start, bound) = (SEGMENT, SEGMENT + 0x1235);
    let mut sender = ready_at(bound, 1);
    assert_eq!(sender.wanted(), None);
    let events = give(&mut sender, &query("START_REPLICATION SLOT \"far\" 0/100000 TIMELINE 1"));
    let slot = Some("far".parse().unwrap());
    assert_eq!(events, [SenderEvent::Started { slot, from: at(1, start) }]);
    assert_eq!(tags(&mut sender), "Wd");
    assert_eq!(sender.wanted(), Some(Wanted { from: at(1, start), bytes_max: 0x1235 }));
    sender.advance(Lsn(bound - 8));
    assert_eq!(sender.wanted().unwrap().bytes_max, 0x1235, "a bound does not go back");
    assert!(sender.wal(Lsn(start), &[0; 0x1236]).is_err());
    assert!(sender.wal(Lsn(start + 1), &[0]).is_err());
    assert!(sender.wal(Lsn(start - 1), &[0]).is_err());
    assert!(sender.output().is_empty());
    sender.wal(Lsn(start), &[1; 0x1000]).unwrap();
    sender.wal(Lsn(start + 0x1000), &[2; 0x235]).unwrap();
    assert_eq!(sender.wanted(), None);
    assert!(sender.wal(Lsn(bound), &[0]).is_err());
    for (_, body) in messages(&mut sender) {
        let end = u64::from_be_bytes(body[9..17].try_into().unwrap());
        assert_eq!(end, bound, "nothing behind the bound is spoken of");
    }
    sender.advance(Lsn(bound + 1));
    assert_eq!(sender.wanted(), Some(Wanted { from: at(1, bound), bytes_max: 1 }));
}

#[test]
fn long_logs_are_sent_in_whole_pages_and_not_faster_than_they_leave() {
    let mut sender = ready_at(64 * SEGMENT, 1);
    give(&mut sender, &query("START_REPLICATION 0/100010"));
    sender.output().clear();
    let mut sent = 0;
    while let Some(wanted) = sender.wanted() {
        assert!(wanted.bytes_max <= WAL_MESSAGE_BYTES_MAX);
        assert_eq!((wanted.from.at.0 + wanted.bytes_max as u64) % 8192, 0);
        sender.wal(wanted.from.at, &vec![0; wanted.bytes_max]).unwrap();
        sent += wanted.bytes_max;
        assert!(sent < 2 * OUTPUT_BYTES_HIGH);
    }
    // A standby that asks and does not read is not listened to.
    assert!(!sender.takes_input());
    assert_eq!(give(&mut sender, &report(1, 1)), []);
    sender.output().clear();
    assert_eq!(give(&mut sender, &[]).len(), 1);
    assert!(sender.wanted().is_some() && sender.takes_input());
}

#[test]
fn a_standby_learns_of_a_timeline_when_the_bound_is_there() {
    let mut sender = ready_at(BRANCH - 8, 2);
    give(&mut sender, &query("IDENTIFY_SYSTEM"));
    let answer = messages(&mut sender);
    let (system, end) = (SYSTEM.to_string(), Lsn(BRANCH - 8).to_string());
    assert_eq!(columns(&answer[1].1), [Some(system), Some("1".into()), Some(end), None]);
    assert_eq!(give(&mut sender, &query("TIMELINE_HISTORY 2")).len(), 1);
    assert_eq!(error_told(&mut sender).0, "58P01");
    give(&mut sender, &query("START_REPLICATION 0/300000 TIMELINE 2"));
    assert_eq!(error_told(&mut sender).0, "55000");

    let from = Lsn(3 * SEGMENT);
    give(&mut sender, &query(&format!("START_REPLICATION {from} TIMELINE 1")));
    sender.wal(from, &[0; 0xf8]).unwrap();
    assert_eq!(tags(&mut sender), "Wdd");
    sender.advance(Lsn(BRANCH + 100));
    let wanted = Wanted { from: at(1, BRANCH - 8), bytes_max: 8 };
    assert_eq!(sender.wanted(), Some(wanted), "the timeline's own end bounds it as well");
    sender.wal(Lsn(BRANCH - 8), &[0; 8]).unwrap();
    assert_eq!((sender.wanted(), tags(&mut sender)), (None, "dc".into()));
    // The standby may still report before it answers.
    assert_eq!(give(&mut sender, &report(BRANCH, 0)).len(), 1);
    let ended = SenderEvent::TimelineEnded { timeline: TimelineId(1), next: at(2, BRANCH) };
    assert_eq!(give(&mut sender, &message(b'c', &[])), std::slice::from_ref(&ended));
    let answer = messages(&mut sender);
    assert_eq!(answer.iter().map(|(tag, _)| *tag).collect::<String>(), "TDCCZ");
    let row = [Some("2".into()), Some(Lsn(BRANCH).to_string())];
    assert_eq!(columns(&answer[1].1), row);
    give(&mut sender, &query("TIMELINE_HISTORY 2"));
    let answer = messages(&mut sender);
    assert_eq!(columns(&answer[1].1)[0].as_deref(), Some("00000002.history"));
    // A start at the end of timeline 1 finds nothing left of it.
    let text = format!("START_REPLICATION {} TIMELINE 1", Lsn(BRANCH));
    assert_eq!(give(&mut sender, &query(&text)), [ended]);
    assert_eq!(tags(&mut sender), "TDCCZ");
    let text = format!("START_REPLICATION {} TIMELINE 1", Lsn(BRANCH + 8));
    give(&mut sender, &query(&text));
    assert_eq!(error_told(&mut sender).0, "55000");
    // A walreceiver begins with the segment, whose front is the earlier timeline's as well.
    give(&mut sender, &query(&format!("START_REPLICATION {from} TIMELINE 2")));
    assert_eq!(sender.wanted(), Some(Wanted { from: at(2, from.0), bytes_max: 0x100 + 100 }));
}

#[test]
fn a_timeline_that_ends_while_it_streams_is_ended_by_the_owners_word() {
    let from = Lsn(3 * SEGMENT);
    let start = query(&format!("START_REPLICATION {from} TIMELINE 1"));
    let mut sender = ready_at(BRANCH, 1);
    give(&mut sender, &start);
    sender.wal(from, &[0; 0x100]).unwrap();
    sender.output().clear();
    sender.extend(lineage(2));
    assert_eq!(tags(&mut sender), "c");

    let mut beyond = ready_at(BRANCH + 8, 1);
    give(&mut beyond, &start);
    beyond.wal(from, &[0; 0x108]).unwrap();
    beyond.extend(lineage(2));
    let sent = Lsn(BRANCH + 8);
    assert_eq!(
        ended(&mut beyond, &[]),
        SenderEnd::HistoryChanged { timeline: TimelineId(1), sent }
    );
    // A lineage that the timeline does not belong to.
    let mut elsewhere = ready_at(BRANCH, 1);
    give(&mut elsewhere, &start);
    let file = Bytes::from_static(b"2\t0/300000\tx\n");
    let files = BTreeMap::from([(TimelineId(3), file)]);
    elsewhere.extend(Lineage::new(TimelineId(3), files).unwrap());
    assert_eq!(ended(&mut elsewhere, &[]).kind(), "history-changed");
}

#[test]
fn what_a_standby_never_asks_is_refused_and_the_connection_goes_on() {
    let mut sender = ready_at(SEGMENT, 1);
    for (text, code) in [
        ("BASE_BACKUP", "0A000"),
        ("START_REPLICATION SLOT a LOGICAL 0/0", "0A000"),
        ("VACUUM", "42601"),
        ("SHOW password", "42704"),
        ("TIMELINE_HISTORY 7", "58P01"),
        ("START_REPLICATION 0/100001", "55000"),
        ("START_REPLICATION 0/0 TIMELINE 2", "55000"),
    ] {
        let events = give(&mut sender, &query(text));
        assert!(matches!(&events[..], [SenderEvent::Refused { .. }]), "{text}: {events:?}");
        assert_eq!(error_told(&mut sender).0, code, "{text}");
    }
    for (text, value) in [("wal_segment_size", "1MB"), ("server_version_num", "150013")] {
        assert_eq!(give(&mut sender, &query(&format!("SHOW {text}"))), []);
        assert_eq!(columns(&messages(&mut sender)[1].1), [Some(value.into())]);
    }
}

#[test]
fn an_owner_that_does_not_have_the_log_gives_the_connection_up() {
    let mut sender = ready_at(BRANCH, 1);
    assert_eq!(give(&mut sender, &query("IDENTIFY_SYSTEM")), [SenderEvent::Identified]);
    let events =
        give(&mut sender, &query(&format!("START_REPLICATION {} TIMELINE 1", Lsn(BRANCH + 1))));
    let asked = Some(at(1, BRANCH + 1));
    assert!(matches!(&events[..], [SenderEvent::Refused { start, .. }] if *start == asked));
    sender.output().clear();
    give(&mut sender, &query(&format!("START_REPLICATION {} TIMELINE 1", Lsn(SEGMENT))));
    sender.output().clear();
    let end = SenderEnd::LogRemoved { at: Lsn(SEGMENT) };
    sender.give_up(end.clone());
    assert_eq!(sender.wanted(), None);
    assert_eq!(sender.poll(), Some(SenderEvent::Ended(end)));
    assert_eq!(error_told(&mut sender).0, "58P01");
    assert_eq!(sender.poll(), None);
}

#[test]
fn a_slot_is_said_to_be_there_when_it_was_asked_for() {
    let mut sender = ready_at(SEGMENT, 1);
    give(&mut sender, &query("READ_REPLICATION_SLOT far"));
    assert_eq!(columns(&messages(&mut sender)[1].1), [None, None, None]);
    give(&mut sender, &query("CREATE_REPLICATION_SLOT far TEMPORARY PHYSICAL (RESERVE_WAL)"));
    assert_eq!(columns(&messages(&mut sender)[1].1)[0].as_deref(), Some("far"));
    give(&mut sender, &query("START_REPLICATION SLOT far 0/0"));
    let events = give(&mut sender, &report(4096, 0));
    let SenderEvent::Status(status) = events[0].clone() else { panic!("{events:?}") };
    assert_eq!((status.written, status.flushed, status.applied), (Lsn(4096), Lsn(2048), Lsn(1024)));
    assert_eq!(give(&mut sender, &message(b'c', &[])), [SenderEvent::Stopped]);
    assert_eq!(tags(&mut sender), "WcCCZ");
    give(&mut sender, &query("READ_REPLICATION_SLOT far"));
    let row = ["physical", "0/800", "1"].map(|text| Some(text.into()));
    assert_eq!(columns(&messages(&mut sender)[1].1), row);
}

#[test]
fn a_silent_standby_is_asked_and_then_given_up() {
    let mut sender = ready_at(SEGMENT, 1);
    assert_eq!(sender.deadline(), None, "a standby that waits for itself may be silent");
    give(&mut sender, &query("START_REPLICATION 0/0"));
    sender.output().clear();
    assert_eq!(sender.deadline(), Some(Duration::from_secs(30)));
    sender.tick(now(30));
    let question = messages(&mut sender);
    assert_eq!((question.len(), question[0].1[0], question[0].1[17]), (1, b'k', 1));
    give(&mut sender, &report(0, 1));
    assert_eq!(messages(&mut sender)[0].1[17], 0, "an answer asks for none");
    sender.tick(now(89));
    assert_eq!(sender.poll(), None);
    sender.tick(now(90));
    assert_eq!(sender.poll(), Some(SenderEvent::Ended(SenderEnd::Silent { seconds: 60 })));
    let mut mute = sender_of(served(0, 1), None, Proof::Trust);
    mute.tick(now(60));
    assert_eq!(mute.poll(), Some(SenderEvent::Ended(SenderEnd::Silent { seconds: 60 })));
}

#[test]
fn a_standby_that_asks_and_does_not_read_costs_no_memory() {
    let mut sender = ready_at(SEGMENT, 1);
    give(&mut sender, &query("START_REPLICATION 0/0"));
    let questions = report(1, 1).repeat(100);
    while sender.takes_input() {
        give(&mut sender, &questions);
        assert!(sender.output().len() < OUTPUT_BYTES_HIGH + 100);
        while let Some(wanted) = sender.wanted() {
            sender.wal(wanted.from.at, &vec![0; wanted.bytes_max]).unwrap();
        }
        assert!(sender.output().len() < OUTPUT_BYTES_HIGH + 2 * WAL_MESSAGE_BYTES_MAX);
    }
    let mut asks = ready_at(SEGMENT, 1);
    while asks.takes_input() {
        give(&mut asks, &query("IDENTIFY_SYSTEM").repeat(100));
        assert!(asks.output().len() < OUTPUT_BYTES_HIGH + 1000);
    }
}

#[test]
fn only_standbys_with_the_right_password_come_in() {
    let new = || sender_of(served(0, 1), Some("far"), Proof::Cleartext("secret".into()));
    let password = |text: &str| message(b'p', &[text.as_bytes(), b"\0"].concat());
    let mut good = new();
    give(&mut good, &startup(&STANDBY));
    assert_eq!(messages(&mut good), [('R', vec![0, 0, 0, 3])]);
    assert!(matches!(give(&mut good, &password("secret"))[..], [SenderEvent::LoggedIn(_)]));
    let mut other = STANDBY;
    other[1] = "near";
    for (parameters, text) in
        [(STANDBY, "secre"), (STANDBY, "secrett"), (STANDBY, ""), (other, "secret")]
    {
        let mut wrong = new();
        give(&mut wrong, &startup(&parameters));
        wrong.output().clear();
        let user = parameters[1].into();
        assert_eq!(ended(&mut wrong, &password(text)), SenderEnd::PasswordWrong { user });
        assert_eq!(error_told(&mut wrong).0, "28P01");
    }
    let mut trusts = sender_of(served(0, 1), Some("far"), Proof::Trust);
    assert_eq!(ended(&mut trusts, &startup(&other)).kind(), "wrong-user");
    // Commands before the login are not carried out.
    let mut early = new();
    let bytes = [startup(&STANDBY), query("IDENTIFY_SYSTEM")].concat();
    assert_eq!(ended(&mut early, &bytes), SenderEnd::Unexpected { tag: 'Q' });
    let secret = format!("{:?}", new());
    assert!(!secret.contains("secret"), "{secret}");
}

#[test]
fn beginnings_that_are_none_have_names() {
    let new = || sender_of(served(0, 1), None, Proof::Trust);
    let kind = |bytes: &[u8]| ended(&mut new(), bytes).kind();
    let number = |number: u32| untagged(&number.to_be_bytes());
    let mut polite = new();
    let both = [number(80_877_104), number(80_877_103)].concat();
    assert_eq!(give(&mut polite, &both), []);
    assert_eq!(&polite.output().split()[..], b"NN");
    assert!(matches!(give(&mut polite, &startup(&STANDBY))[..], [SenderEvent::LoggedIn(_)]));
    assert_eq!(kind(&number(80_877_103).repeat(3)), "version");
    assert_eq!(kind(&number(80_877_102)), "cancel");
    assert_eq!(kind(&number(2 << 16)), "version");
    assert_eq!(kind(&startup(&["user", "far"])), "not-replication");
    assert_eq!(kind(&startup(&["user", "far", "replication", "database"])), "not-replication");
    assert_eq!(kind(&startup(&["replication", "true"])), "malformed-message");
    assert_eq!(kind(&startup(&["user"])), "malformed-message");
    assert_eq!(kind(&untagged(&[0, 3, 0, 0, b'a'])), "malformed-message");
    assert_eq!(kind(&[0, 0, 0, 3]), "frame");
    let long = u32::try_from(CLIENT_MESSAGE_BYTES_MAX + 1).unwrap().to_be_bytes();
    assert_eq!(kind(&long), "frame");
    // A hello of TLS without a question before it.
    assert_eq!(kind(&[0x16, 3, 1, 2, 0, 1, 0]), "frame");
    // A later minor version, and extensions: 3.0 without them is offered.
    let mut body = 0x3_0002_u32.to_be_bytes().to_vec();
    body.extend(b"user\0far\0replication\0true\0_pq_.x\x001\0\0");
    let mut later = new();
    assert_eq!(give(&mut later, &untagged(&body)).len(), 1);
    let offer = messages(&mut later).remove(0);
    assert_eq!(offer, ('v', [&[0, 3, 0, 0, 0, 0, 0, 1][..], b"_pq_.x\0"].concat()));
}

#[test]
fn messages_that_mean_nothing_end_the_connection() {
    let streaming = || {
        let mut sender = ready_at(SEGMENT, 1);
        give(&mut sender, &query("START_REPLICATION 0/0"));
        sender
    };
    for (bytes, kind) in [
        (message(b'P', b"\0\0\0\0"), "unexpected-message"),
        (message(b'd', b"r"), "unexpected-message"),
        (message(b'Q', b"no end"), "malformed-message"),
        (message(b'Q', b"two\0texts\0"), "malformed-message"),
        (message(b'Q', b"\xff\0"), "malformed-message"),
        (message(b'X', b""), "goodbye"),
    ] {
        assert_eq!(ended(&mut ready_at(0, 1), &bytes).kind(), kind);
    }
    for (bytes, kind) in [
        (query("IDENTIFY_SYSTEM"), "unexpected-message"),
        (message(b'd', b""), "malformed-message"),
        (message(b'd', &[b'r'; 33]), "malformed-message"),
        (message(b'd', &[b'r'; 35]), "malformed-message"),
        (message(b'd', b"z"), "unexpected-message"),
        (message(b'f', b"failed\0"), "unexpected-message"),
        (message(b'X', b""), "goodbye"),
    ] {
        assert_eq!(ended(&mut streaming(), &bytes).kind(), kind);
    }
    let mut closed = streaming();
    closed.received(&report(1, 0));
    closed.closed();
    assert!(matches!(closed.poll(), Some(SenderEvent::Status(_))));
    assert_eq!(closed.poll(), Some(SenderEvent::Ended(SenderEnd::Closed)));
}

#[test]
fn a_lineage_has_the_history_of_its_last_timeline() {
    let missing = Lineage::new(TimelineId(2), BTreeMap::new());
    assert_eq!(missing, Err(LineageError::Missing { timeline: TimelineId(2) }));
    let wrong = BTreeMap::from([(TimelineId(2), Bytes::from_static(b"?"))]);
    assert!(matches!(Lineage::new(TimelineId(2), wrong), Err(LineageError::History(_))));
    assert_eq!(lineage(2).timeline_at(Lsn(BRANCH - 1)), TimelineId(1));
    assert_eq!(lineage(2).timeline_at(Lsn(BRANCH)), TimelineId(2));
}
