//! Tests of the tag terms that hosts get: the keys of seals, and the greatest reachable seq of each writer.

use super::*;
use tidelock_protocol::tag::{KEY_PERIOD_MS, TagTerms};

/// As in `group/tags.rs`.
const LOST_MAX: u64 = 1 << 24;
const BACKLOG_MAX: u64 = 1 << 30;

fn terms(said: &[Message]) -> TagTerms {
    let of = |message: &Message| match message {
        Message::TagTerms(terms) => Some(terms.clone()),
        _ => None,
    };
    said.iter().find_map(of).expect("they are told")
}

fn after_a_beacon(group: &mut Group<Memory>, now: Now, writer: u16) -> TagTerms {
    group.beacon(now, link(writer), MonoNanos(1));
    terms(&told(&group.take_outputs(), link(writer)))
}

#[test]
fn every_member_is_told_the_same_keys_which_change_with_time() {
    let disk = Memory::new();
    let mut group = two(&disk, Form::Vector);
    group.take_outputs();
    let shape = Shape { writers: 2, form: Form::Vector };
    let web = Link { connection: ConnectionId(9), channel: Channel(3) };
    group.attach(at_ms(0), web, &host(2), &shape.follower());
    let first = terms(&told(&group.take_outputs(), web));
    assert_eq!(after_a_beacon(&mut group, at_ms(1), 0), first);
    assert_ne!(first.keys.current, first.keys.next);

    let day = |days| Now { unix_ms: at_ms(1).unix_ms + days * KEY_PERIOD_MS, ..at_ms(1) };
    let next = after_a_beacon(&mut group, day(1), 0).keys;
    assert_eq!((next.previous, next.current), (first.keys.current, first.keys.next));
    assert_eq!(next.period, first.keys.period + 1);
    // A host that hears of it later, and one that attaches to a server that was started again.
    assert_eq!(after_a_beacon(&mut group, day(1), 1).keys, next);
    let mut again = reopen(&disk.crash(&mut || false));
    let said = attach(&mut again, day(1), &shape.writer(0, 1, LastRun::Continues { from: Seq(2) }));
    assert_eq!(terms(&said).keys, next);
}

/// A member's claim about another writer does not raise the reachable seq of that writer.
#[test]
fn a_writer_can_be_as_far_as_it_says_itself_and_what_a_backlog_holds() {
    let mut group = two(&Memory::new(), Form::Vector);
    let reachable = |group: &mut Group<Memory>| {
        let terms = after_a_beacon(group, at_ms(1), 1);
        [0, 1].map(|writer| terms.reachable.get(WriterId(writer)).0)
    };
    let says = |group: &mut Group<Memory>, writer: u16, of: u16, seq: u64| {
        let pending = CountVector::of(WriterId(of), Seq(seq));
        say(group, writer, Message::Sounded { id: UNASKED, pending, hlc: Hlc(0) });
        group.take_outputs()
    };
    assert_eq!(reachable(&mut group), [1 + LOST_MAX, 1 + LOST_MAX]);
    says(&mut group, 1, 0, 5000);
    assert_eq!(reachable(&mut group), [1 + LOST_MAX, 1 + LOST_MAX]);
    says(&mut group, 0, 0, 1000);
    says(&mut group, 0, 0, 900);
    assert_eq!(reachable(&mut group), [1000 + LOST_MAX, 1 + LOST_MAX]);

    // Whoever waits for what was believed does not wait for ever: the writer is asked for it.
    let awaited = says(&mut group, 1, 0, 1000 + LOST_MAX);
    let pending = CountVector::of(WriterId(0), Seq(1000 + LOST_MAX));
    assert_eq!(told(&awaited, link(0)), [Message::Floor { pending, hlc: Hlc(0) }]);
    assert_eq!(told(&says(&mut group, 1, 0, 1001 + LOST_MAX), link(0)), []);

    says(&mut group, 0, 0, 1 << 36);
    assert_eq!(reachable(&mut group)[0], 1 + BACKLOG_MAX + LOST_MAX);
    // Somebody may wait for a number that its last run has lost.
    let shape = Shape { writers: 2, form: Form::Vector };
    attach(&mut group, at_ms(2), &shape.writer(0, 2, LastRun::Unknown));
    assert_eq!(reachable(&mut group)[0], 1 + BACKLOG_MAX + LOST_MAX);
}
