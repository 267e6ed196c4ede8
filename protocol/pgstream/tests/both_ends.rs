//! Both ends, connected: a log arrives as it is, up to the bound, over timelines, whatever the pieces; and bytes that
//! are anything.

mod common;

use bytes::{Bytes, BytesMut};
use common::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use tidelock_pgstream::{
    Access, Event, Lineage, Position, Proof, Receiver, ScramVerifier, Sender, SenderEvent, Served,
    SlotUse, Start, Timing,
};
use tidelock_wal::{Lsn, TimelineId};

/// A log of three timelines, and where the later ones begin.
const LOG_BYTES: u64 = 3 * SEGMENT;
const BRANCHES: [u64; 2] = [SEGMENT + 0x2468, 2 * SEGMENT];

fn byte_at(position: u64) -> u8 {
    (position ^ (position >> 8) ^ (position >> 16)) as u8
}

fn lineage() -> Lineage {
    let file = |count: usize| {
        let line = |id: usize| format!("{}\t{}\tx\n", id + 1, Lsn(BRANCHES[id]));
        Bytes::from((0..count).map(line).collect::<String>())
    };
    let files = BTreeMap::from([(TimelineId(2), file(1)), (TimelineId(3), file(2))]);
    Lineage::new(TimelineId(3), files).unwrap()
}

/// A connection whose bytes arrive in pieces of any length.
struct Connection {
    receiver: Receiver,
    sender: Sender,
    to_sender: BytesMut,
    to_receiver: BytesMut,
    pieces: std::iter::Cycle<std::vec::IntoIter<usize>>,
    /// Log that has arrived, from here on.
    begin: u64,
    log: Vec<u8>,
    next: Option<Position>,
    switches: Vec<u32>,
}

impl Connection {
    fn new(begin: u64, bound: u64, pieces: Vec<usize>, proof: Proof) -> Connection {
        let (version, segment_bytes, lineage) = (160_002, 1 << 20, lineage());
        let served = Served { system: SYSTEM, version, segment_bytes, lineage, bound: Lsn(bound) };
        let access = Access { user: Some("postgres".into()), proof };
        Connection {
            receiver: receiver(Some("secret")),
            sender: Sender::new(served, access, Timing::default(), [9; 18], now(0)),
            to_sender: BytesMut::new(),
            to_receiver: BytesMut::new(),
            pieces: pieces.into_iter().cycle(),
            begin,
            log: vec![],
            next: None,
            switches: vec![],
        }
    }

    /// Carries bytes until nothing moves any more.
    fn settle(&mut self) {
        loop {
            self.to_sender.unsplit(self.receiver.output().split());
            while let Some(wanted) = self.sender.wanted() {
                let length = wanted.bytes_max.min(self.pieces.next().unwrap() * 100);
                let from = wanted.from.at.0;
                let bytes: Vec<u8> = (from..from + length as u64).map(byte_at).collect();
                self.sender.wal(wanted.from.at, &bytes).unwrap();
            }
            self.to_receiver.unsplit(self.sender.output().split());
            if self.to_sender.is_empty() && self.to_receiver.is_empty() {
                return;
            }
            let mut piece = |bytes: &mut BytesMut| {
                let length = self.pieces.next().unwrap().min(bytes.len());
                bytes.split_to(length)
            };
            let (there, back) = (piece(&mut self.to_sender), piece(&mut self.to_receiver));
            self.sender.received(&there);
            while let Some(event) = self.sender.poll() {
                assert!(!matches!(event, SenderEvent::Ended(_)), "{event:?}");
            }
            self.receiver.received(&back);
            while let Some(event) = self.receiver.poll() {
                self.act(event);
            }
        }
    }

    fn act(&mut self, event: Event) {
        match event {
            Event::Identified(identity) => {
                assert_eq!((identity.system, identity.version), (SYSTEM, 160_002));
                let from = self.next.unwrap_or(at(1, self.begin));
                let slot = SlotUse { name: "shard".parse().unwrap(), create: true };
                self.receiver.start(Start { slot: Some(slot), from: Some(from) }).unwrap();
            }
            Event::Started(position) => {
                assert_eq!(position.at.0, self.begin + self.log.len() as u64);
                self.next = Some(position);
            }
            Event::Wal { start, bytes, .. } => {
                assert_eq!(start.0, self.begin + self.log.len() as u64);
                self.log.extend(bytes);
                self.receiver.flushed(Lsn(self.begin + self.log.len() as u64));
            }
            Event::TimelineEnds { timeline, next } => {
                self.switches.push(timeline.0);
                self.next = Some(next);
            }
            Event::Failed(failure) => panic!("{failure}"),
            Event::History { .. } | Event::SlotCreated(_) | Event::Keepalive { .. } => {}
        }
    }
}

fn proof() -> impl Strategy<Value = Proof> {
    prop_oneof![
        Just(Proof::Trust),
        Just(Proof::Cleartext("secret".into())),
        Just(Proof::Scram(ScramVerifier::of_password("secret").unwrap())),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_log_arrives_as_it_is_up_to_each_bound(
        begin in 0..SEGMENT,
        mut bounds in prop::collection::vec(SEGMENT..LOG_BYTES, 1..6),
        near in prop::collection::vec((0..2_usize, 0..3_u64), 0..3),
        pieces in prop::collection::vec(1..40_000_usize, 1..6),
        proof in proof(),
    ) {
        // Bounds beside and at the places where timelines branch.
        bounds.extend(near.iter().map(|&(branch, beside)| BRANCHES[branch] + beside - 1));
        bounds.sort_unstable();
        let mut connection = Connection::new(begin, bounds[0], pieces, proof);
        for bound in bounds {
            connection.sender.advance(Lsn(bound));
            connection.settle();
            prop_assert_eq!(begin + connection.log.len() as u64, bound);
            let passed = BRANCHES.iter().filter(|&&branch| branch <= bound).count() as u32;
            prop_assert_eq!(&connection.switches, &(1..=passed).collect::<Vec<_>>());
        }
        let expected: Vec<u8> = (begin..begin + connection.log.len() as u64).map(byte_at).collect();
        prop_assert!(connection.log == expected);
    }

    #[test]
    fn anything_may_be_received(
        damages in prop::collection::vec((0..2000_usize, any::<u8>()), 0..4),
        extra in prop::collection::vec(any::<u8>(), 0..60),
        piece in 1..80_usize,
    ) {
        let history = answer(&[Some("00000002.history"), Some("1\t0/100000\tx\n")]);
        let end = [row(&[Some("2"), Some("0/100003")]), complete(), complete(), ready()].concat();
        let wal = wal(SEGMENT, b"abc");
        let mut stream = [greeting(2, "0/900000"), history, copy_both(), wal, keepalive(1)].concat();
        stream.extend([message(b'c', &[]), end, extra].concat());
        for (place, byte) in damages {
            let place = place % stream.len();
            stream[place] ^= byte;
        }
        let run = |piece: usize| {
            let (mut receiver, mut events) = (receiver(Some("secret")), vec![]);
            for bytes in stream.chunks(piece) {
                receiver.received(bytes);
                while let Some(event) = receiver.poll() {
                    if matches!(event, Event::Identified(_)) {
                        let from = Some(at(1, SEGMENT));
                        receiver.start(Start { slot: None, from }).unwrap();
                    }
                    events.push(event);
                }
                receiver.output().clear();
            }
            events
        };
        prop_assert_eq!(run(piece), run(stream.len()));
    }
}
