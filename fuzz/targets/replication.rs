//! PostgreSQL's replication: whatever a server or a standby sends, neither end panics; a receiver hands out log without
//! a gap and acknowledges no more than it handed out; a sender sends nothing behind its bound; pieces make no
//! difference, and an end is final.
//!
//! Input: mode (bit 0: which end is attacked, bit 1: a program or the stream itself, the rest: the login), two bytes
//! for the pieces, the rest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;
use tidelock_fuzz::replication::{START, client, server};
use tidelock_pgstream::{
    Access, Event, Lineage, Login, Now, PasswordMethod, Position, Proof, Receiver, ScramVerifier,
    Sender, SenderEvent, Served, SlotUse, Start, Timing,
};
use tidelock_wal::{Lsn, PgTimestamp, TimelineId};

const NOW: Now = Now { mono: Duration::ZERO, wall: PgTimestamp(0) };
/// Begin of the second timeline of the served log.
const BRANCH: u64 = 0x2345;

static VERIFIER: LazyLock<ScramVerifier> =
    LazyLock::new(|| ScramVerifier::of_password("secret").expect("a password"));

fuzz_target!(|data: &[u8]| {
    let [mode, first, second, rest @ ..] = data else { return };
    let pieces = tidelock_fuzz::pieces(*first, *second);
    let (is_program, login) = (mode & 2 == 0, mode >> 2);
    if mode & 1 == 0 {
        let stream = if is_program { server(rest) } else { rest.to_vec() };
        assert_eq!(receive(&stream, &[usize::MAX], login), receive(&stream, &pieces, login));
    } else {
        let stream = if is_program { client(rest) } else { rest.to_vec() };
        assert_eq!(send(&stream, &[usize::MAX], login), send(&stream, &pieces, login));
    }
});

/// The stream in pieces of these lengths, over and over.
fn in_pieces<'a>(stream: &'a [u8], pieces: &'a [usize]) -> impl Iterator<Item = &'a [u8]> {
    let (mut rest, mut lengths) = (stream, pieces.iter().cycle());
    std::iter::from_fn(move || {
        let length = lengths.next().map_or(1, |&length| length.min(rest.len()));
        let (piece, later) = rest.split_at(length);
        rest = later;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Messages of the output, which must be whole ones.
fn messages(mut output: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = output.split_first_chunk::<5>()?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let (body, behind) = rest.split_at(length - 4);
        output = behind;
        Some((head[0], body))
    })
}

fn number(body: &[u8], at: usize) -> u64 {
    body[at..at + 8].iter().fold(0, |all, &byte| all << 8 | u64::from(byte))
}

fn receive(stream: &[u8], pieces: &[usize], login: u8) -> Vec<Event> {
    let login_as = Login {
        user: "far".into(),
        password: (login & 1 == 0).then(|| "secret".into()),
        application_name: String::new(),
        weakest: PasswordMethod::Cleartext,
    };
    let mut receiver =
        Receiver::new(login_as, None, Timing::default(), NOW).expect("a login that can be written");
    receiver.output().clear();
    let slot = (login & 2 == 0)
        .then(|| SlotUse { name: "far".parse().expect("a name"), create: login & 4 == 0 });
    let mut next = Position { timeline: TimelineId(1), at: Lsn(START) };
    let mut events = vec![];
    for piece in in_pieces(stream, pieces) {
        receiver.received(piece);
        while let Some(event) = receiver.poll() {
            match &event {
                Event::Identified(_) => {
                    let from = (login & 8 == 0).then_some(next);
                    receiver
                        .start(Start { slot: slot.clone(), from })
                        .expect("it waits for a start");
                }
                Event::Started(from) => next = *from,
                Event::Wal { start, bytes, .. } => {
                    assert_eq!(*start, next.at, "log without a gap");
                    next.at.0 += bytes.len() as u64;
                    receiver.flushed(Lsn(u64::MAX));
                }
                Event::TimelineEnds { next: begin, .. } => {
                    assert_eq!(begin.at, next.at);
                    next = *begin;
                }
                Event::Failed(failure) => {
                    assert!(!failure.to_string().is_empty() && !failure.kind().is_empty());
                    events.push(event);
                    receiver.received(stream);
                    assert_eq!(receiver.poll(), None);
                    return events;
                }
                _ => {}
            }
            events.push(event);
            let output = receiver.output().split();
            for (tag, body) in messages(&output) {
                if tag == b'd' {
                    assert!(number(body, 9) <= next.at.0, "more is acknowledged than was received");
                }
            }
        }
        assert!(receiver.output().len() < 100_000);
        receiver.output().clear();
    }
    events
}

fn send(stream: &[u8], pieces: &[usize], login: u8) -> Vec<SenderEvent> {
    let proof = match login % 3 {
        0 => Proof::Trust,
        1 => Proof::Cleartext("secret".into()),
        _ => Proof::Scram(VERIFIER.clone()),
    };
    let access = Access { user: (login & 4 != 0).then(|| "far".into()), proof };
    let file = format!("1\t{}\tx\n", Lsn(BRANCH)).into_bytes().into();
    let lineage = Lineage::new(TimelineId(2), BTreeMap::from([(TimelineId(2), file)]));
    let mut bound = 0x2000;
    let served = Served {
        system: 7,
        version: 150_013,
        segment_bytes: 1 << 20,
        lineage: lineage.expect("a history that can be"),
        bound: Lsn(bound),
    };
    let mut sender = Sender::new(served, access, Timing::default(), [7; 18], NOW);
    let mut events = vec![];
    let check = |sender: &mut Sender, bound: u64, is_open: bool| {
        let output = sender.output().split();
        if is_open {
            for (tag, body) in messages(&output) {
                let end = match body.first() {
                    Some(b'w') if tag == b'd' => number(body, 1) + (body.len() - 25) as u64,
                    _ => 0,
                };
                assert!(end <= bound, "log behind the bound");
            }
        }
    };
    let mut is_open = false;
    for piece in in_pieces(stream, pieces) {
        sender.received(piece);
        loop {
            // Everything that is wanted is given before the next message is looked at.
            while let Some(wanted) = sender.wanted() {
                let bytes = vec![0; wanted.bytes_max];
                sender.wal(wanted.from.at, &bytes).expect("what is wanted is taken");
                let beyond = Lsn(wanted.from.at.0 + bytes.len() as u64 + 1);
                assert!(sender.wal(beyond, &[0]).is_err());
                check(&mut sender, bound, is_open);
            }
            check(&mut sender, bound, is_open);
            let Some(event) = sender.poll() else { break };
            is_open |= matches!(event, SenderEvent::LoggedIn(_));
            events.push(event);
            match &events[events.len() - 1] {
                SenderEvent::LoggedIn(_) => sender.output().clear(),
                SenderEvent::Status(_) => {
                    bound += 100;
                    sender.advance(Lsn(bound));
                }
                SenderEvent::Ended(end) => {
                    assert!(!end.to_string().is_empty() && !end.kind().is_empty());
                    sender.received(stream);
                    assert_eq!((sender.poll(), sender.wanted()), (None, None));
                    return events;
                }
                _ => {}
            }
        }
    }
    events
}
