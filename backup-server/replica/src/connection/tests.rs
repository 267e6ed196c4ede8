//! A connection against a peer that is played by the test, and groups that are lists.

use super::*;
use crate::group_loop::HostEvent;
use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};
use tidelock_protocol::frame::Frame;
use tidelock_protocol::ids::Epoch;
use tidelock_protocol::limits::HELLO_MAX_BYTES;
use tidelock_protocol::message::{Attach, PROTOCOL, Role};

const CHANNEL: Channel = Channel(1);
const S_NS: u64 = 1_000_000_000;

/// Groups of two names, which take what they are given only when the test says so.
struct Groups {
    rooms: BTreeMap<String, InputRoom>,
    given: Vec<(String, HostEvent)>,
    bookmarks: usize,
}

impl Server for Groups {
    type Group = (String, InputRoom);

    fn speaks_for(&self, host: &str) -> Result<(), String> {
        if host == "host" { Ok(()) } else { Err("host".to_owned()) }
    }

    fn enter(&mut self, _: &str, _: &str) -> Result<(), Refusal> {
        Ok(())
    }

    fn group(&mut self, name: &str, _: &str) -> Result<Self::Group, Refusal> {
        let room = self.rooms.get(name).cloned();
        room.map(|room| (name.to_owned(), room)).ok_or((RefusalKind::Quota, "no room".to_owned()))
    }

    fn is_same(one: &Self::Group, other: &Self::Group) -> bool {
        one.0 == other.0
    }

    fn is_closed(_: &Self::Group) -> bool {
        false
    }

    fn room(group: &Self::Group) -> InputRoom {
        group.1.clone()
    }

    fn give(&mut self, group: &Self::Group, event: HostEvent) -> bool {
        self.given.push((group.0.clone(), event));
        true
    }

    fn bookmark(&mut self, _: Channel, _: &Self::Group, _: &str, _: Bookmark) {
        self.bookmarks += 1;
    }
}

struct Bench {
    connection: Connection<Groups>,
    groups: Groups,
    now: MonoNanos,
}

impl Bench {
    fn new() -> Self {
        let room = |name: &str| (name.to_owned(), InputRoom::new(4096));
        let rooms = [room("g"), room("h")].into();
        let groups = Groups { rooms, given: Vec::new(), bookmarks: 0 };
        let now = MonoNanos(S_NS);
        Self { connection: Connection::new(ConnectionId(7), "b", "test", now), groups, now }
    }

    fn greeted() -> Self {
        let mut bench = Self::new();
        assert!(matches!(bench.says(&[(Channel(0), hello("host"))]), Poll::Ready(Ok(()))));
        assert!(matches!(bench.sent()[..], [(Channel(0), Message::Welcome { .. })]));
        bench
    }

    fn attached() -> Self {
        let mut bench = Self::greeted();
        assert!(matches!(bench.says(&[(CHANNEL, attach("g"))]), Poll::Ready(Ok(()))));
        bench.groups.given.clear();
        bench
    }

    fn hears(&mut self, bytes: &[u8]) -> Poll<Result<(), ConnectionError>> {
        self.connection.input().extend_from_slice(bytes);
        self.goes_on()
    }

    fn goes_on(&mut self) -> Poll<Result<(), ConnectionError>> {
        let mut context = Context::from_waker(Waker::noop());
        self.connection.take(&mut self.groups, self.now, &mut context)
    }

    fn says(&mut self, messages: &[(Channel, Message)]) -> Poll<Result<(), ConnectionError>> {
        self.hears(&encoded(messages))
    }

    fn refusal(&mut self, messages: &[(Channel, Message)]) -> Option<RefusalKind> {
        match self.says(messages) {
            Poll::Ready(Err(error)) => Some(error.refusal().0),
            _ => None,
        }
    }

    fn sent(&mut self) -> Vec<(Channel, Message)> {
        let mut out = BytesMut::new();
        self.connection.output(&mut out, self.now).unwrap();
        self.connection.wrote_all();
        let frames = std::iter::from_fn(|| frame::decode(&mut out).unwrap());
        let message = |frame| match frame {
            Frame::Control(channel, message) => (channel, message),
            other => panic!("{other:?}"),
        };
        frames.map(message).collect()
    }

    /// The group and the link of each event, and the number of its frames.
    fn runs(&mut self) -> Vec<(String, Channel, usize)> {
        let run = |(group, event)| match event {
            HostEvent::Frames { link, frames, .. } => (group, link.channel, frames.len()),
            HostEvent::Attach { link, .. } => (group, link.channel, 0),
            other => panic!("{other:?}"),
        };
        std::mem::take(&mut self.groups.given).into_iter().map(run).collect()
    }

    fn after_s(&mut self, s: u64) -> Result<(), ConnectionError> {
        self.now = MonoNanos(self.now.0 + s * S_NS);
        self.connection.tick(self.now)
    }
}

fn hello(host: &str) -> Message {
    let (oldest, newest) = PROTOCOL;
    Message::Hello { oldest, newest, host: host.to_owned(), software: "test".to_owned() }
}

fn attach(group: &str) -> Message {
    Message::Attach(Box::new(Attach {
        group: group.to_owned(),
        group_id: None,
        member: "vm".to_owned(),
        writers: vec!["vm".to_owned()],
        epoch: Epoch(0),
        lease_ms: 10_000,
        grace_ms: 15_000,
        machine: None,
        tagging: None,
        role: Role::Follower,
    }))
}

fn resumes() -> Message {
    Message::Detach { end: None }
}

fn encoded(messages: &[(Channel, Message)]) -> BytesMut {
    let mut bytes = BytesMut::new();
    for (channel, message) in messages {
        frame::encode_control(*channel, message, &mut bytes);
    }
    bytes
}

#[test]
fn frames_go_to_the_group_of_their_channel_wherever_they_are_cut() {
    let other = Channel(2);
    let frames = [
        (CHANNEL, attach("g")),
        (CHANNEL, resumes()),
        (CHANNEL, resumes()),
        (other, attach("h")),
        (other, resumes()),
        (CHANNEL, resumes()),
    ];
    let group = |channel| if channel == CHANNEL { "g" } else { "h" }.to_owned();
    let expected = [(CHANNEL, 0), (CHANNEL, 2), (other, 0), (other, 1), (CHANNEL, 1)];
    let expected = expected.map(|(channel, count)| (group(channel), channel, count));
    let bytes = encoded(&frames);
    for at in 0..bytes.len() {
        let mut bench = Bench::greeted();
        assert!(matches!(bench.hears(&bytes[..at]), Poll::Ready(Ok(()))));
        let mut runs = bench.runs();
        assert!(matches!(bench.hears(&bytes[at..]), Poll::Ready(Ok(()))));
        runs.extend(bench.runs());
        // Frames of one channel that came in two reads are two runs.
        runs.dedup_by(|next, run| {
            let joins = next.1 == run.1 && run.2 > 0 && next.2 > 0;
            run.2 += if joins { next.2 } else { 0 };
            joins
        });
        assert_eq!(runs, expected, "cut at {at}");
    }
}

#[test]
fn a_group_without_room_stops_the_input_and_nothing_overtakes() {
    let mut bench = Bench::attached();
    assert!(matches!(bench.says(&[(CHANNEL, resumes())]), Poll::Ready(Ok(()))));
    let (_, all) = bench.groups.given.pop().unwrap();
    let rest = bench.groups.rooms["g"].clone().take(3072);
    let mut rest = std::pin::pin!(rest);
    let mut context = Context::from_waker(Waker::noop());
    let Poll::Ready(Some(rest)) = rest.as_mut().poll(&mut context) else { panic!("it is free") };
    let behind = [(CHANNEL, resumes()), (Channel(2), attach("h"))];
    assert!(bench.says(&behind).is_pending() && bench.connection.is_full());
    assert!(bench.goes_on().is_pending() && bench.groups.given.is_empty());
    bench.after_s(1000).unwrap();
    drop(rest);
    assert!(matches!(bench.goes_on(), Poll::Ready(Ok(()))) && !bench.connection.is_full());
    assert_eq!(bench.runs().len(), 2);
    drop(all);
    // The peer is silent from then on.
    bench.after_s(119).unwrap();
    assert!(matches!(bench.after_s(1), Err(ConnectionError::Silent(_))));
}

#[test]
fn a_damaged_frame_costs_nothing_that_came_before_it() {
    let mut bench = Bench::attached();
    let mut bytes = encoded(&[(CHANNEL, resumes()), (CHANNEL, resumes())]);
    *bytes.last_mut().unwrap() ^= 1;
    assert!(matches!(bench.hears(&bytes), Poll::Ready(Err(ConnectionError::Frame(_)))));
    assert_eq!(bench.runs(), [("g".to_owned(), CHANNEL, 1)]);
}

#[test]
fn a_peer_is_refused_what_is_not_its_own() {
    let kind = |messages: &[(Channel, Message)]| Bench::new().refusal(messages);
    assert_eq!(kind(&[(Channel(0), hello("other"))]), Some(RefusalKind::Forbidden));
    assert_eq!(kind(&[(CHANNEL, hello("host"))]), Some(RefusalKind::Invalid));
    assert_eq!(kind(&[(CHANNEL, attach("g"))]), Some(RefusalKind::Invalid));
    let kind = |messages: &[(Channel, Message)]| Bench::greeted().refusal(messages);
    assert_eq!(kind(&[(CHANNEL, resumes())]), Some(RefusalKind::Invalid), "nobody is attached");
    assert_eq!(kind(&[(Channel(0), attach("g"))]), Some(RefusalKind::Invalid));
    let mut bench = Bench::attached();
    assert_eq!(bench.refusal(&[(CHANNEL, attach("h"))]), Some(RefusalKind::Invalid));
    assert!(bench.groups.given.is_empty(), "the channel is another group's");
    let mut bench = Bench::attached();
    assert_eq!(bench.refusal(&[(CHANNEL, attach("none")), (CHANNEL, resumes())]), None);
    assert!(matches!(bench.sent()[..], [(CHANNEL, Message::Refused { .. })]));
}

#[test]
fn each_silence_has_its_end() {
    let mut bench = Bench::new();
    assert!(bench.hears(&frame::MAGIC).is_ready() && bench.after_s(9).is_ok());
    assert!(matches!(bench.after_s(1), Err(ConnectionError::Silent(HELLO_MAX))));
    let mut bench = Bench::greeted();
    bench.after_s(29).unwrap();
    assert!(matches!(bench.after_s(1), Err(ConnectionError::Refused(RefusalKind::Invalid, _))));
    // A host that does not read.
    let mut bench = Bench::attached();
    let mut out = BytesMut::new();
    bench.connection.outbox().send(CHANNEL, Message::Arriving);
    bench.connection.output(&mut out, bench.now).unwrap();
    assert_eq!(bench.connection.deadline(), bench.now.plus_ms(60_000));
    bench.after_s(59).unwrap();
    assert!(matches!(bench.after_s(1), Err(ConnectionError::Unread)));
}

#[test]
fn a_host_hears_once_a_second_that_parts_of_a_frame_arrive() {
    let mut bench = Bench::attached();
    let bytes = encoded(&[(CHANNEL, resumes())]);
    let arriving = [(Channel(0), Message::Arriving)];
    let last = bytes.len() - 1;
    for (part, after_s, is_told) in
        [(0..1, 1, true), (1..2, 0, false), (2..last, 1, true), (last..last + 1, 1, false)]
    {
        bench.after_s(after_s).unwrap();
        assert!(bench.hears(&bytes[part.clone()]).is_ready());
        assert_eq!(bench.sent(), if is_told { &arriving[..] } else { &[] }, "bytes {part:?}");
    }
    assert_eq!(bench.runs().len(), 1);
}

#[test]
fn bookmarks_that_wait_are_few() {
    let mut bench = Bench::attached();
    let wanted = |id| {
        let name = "b".to_owned();
        Message::Bookmark(Box::new(Bookmark { id, name, expires_in_ms: None, moves: false }))
    };
    for id in 0..=BOOKMARKS_MAX as u64 {
        assert!(bench.says(&[(CHANNEL, wanted(id))]).is_ready());
    }
    assert_eq!(bench.groups.bookmarks, BOOKMARKS_MAX);
    assert!(matches!(bench.sent()[..], [(_, Message::Bookmarked { id: 64, outcome: Err(_) })]));
    bench.connection.bookmarked(CHANNEL, 3, Err("gone".to_owned()));
    assert!(bench.says(&[(CHANNEL, wanted(99))]).is_ready());
    assert_eq!(bench.groups.bookmarks, BOOKMARKS_MAX + 1);
}

#[test]
fn groups_and_the_host_hear_of_the_end() {
    let mut bench = Bench::attached();
    bench.connection.end(Some(&ConnectionError::stopping()), &mut bench.groups);
    let [(group, HostEvent::Lost(ConnectionId(7)))] = &bench.groups.given[..] else {
        panic!("{:?}", bench.groups.given)
    };
    assert_eq!(group, "g");
    bench.connection.outbox().send(CHANNEL, Message::Arriving);
    let refused =
        |message: &Message| matches!(message, Message::Refused { kind: RefusalKind::Stopping, .. });
    let sent = bench.sent();
    assert!(sent.len() == 1 && refused(&sent[0].1), "nothing comes after the last word: {sent:?}");
}

/// A peer that has not said who it is gets no memory for a larger message.
#[test]
fn a_first_message_larger_than_a_hello_is_refused_before_it_has_arrived() {
    let first = encoded(&[(Channel(0), hello(&"h".repeat(HELLO_MAX_BYTES)))]);
    let begun = first.len() - HELLO_MAX_BYTES;
    assert!(matches!(Bench::new().hears(&first[..begun]), Poll::Ready(Ok(()))));
    let Poll::Ready(Err(error)) = Bench::new().hears(&first[..begun - 1]) else { panic!() };
    assert_eq!(error.refusal().0, RefusalKind::Invalid);
    assert!(!matches!(Bench::greeted().hears(&first[..begun - 1]), Poll::Ready(Err(_))));
}
