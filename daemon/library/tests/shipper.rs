//! The shipper against a backup that is played by hand, frame by frame.

use bytes::BytesMut;
use std::sync::{Arc, Mutex};
use tidelock_protocol::frame::{self, Frame};
use tidelock_protocol::ids::{Channel, MonoNanos};
use tidelock_shard::link::{StoreFrame, StoreMessage, VERSION, decode};
use tidelock_shard::{Backup, Reply, Standing, Verdict};
use tidelock_shard_library::{
    Entry, Hlc, LogIndex, LogPoint, Names, Origin, Pace, Payload, ReadError, ShardLog, Shipper,
    Stand,
};

const ID: u64 = 7;
const OWN: Origin =
    Origin { system_id: ID, timeline: 1, history: String::new(), segment_bytes: 0, version: 0 };
const PACE: Pace =
    Pace { nop_after_ns: 1000, nop_every_ns: 5000, unacked_max: 1 << 20, patience_ns: 1 << 40 };

#[derive(Default)]
struct Kept {
    /// Stamp of each entry, and whether it is a NOP; the first has the number 1.
    entries: Vec<(u64, bool)>,
    head: u64,
    trimmed: Vec<u64>,
    nops: usize,
    is_fenced: bool,
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Kept>>);

impl Log {
    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap()
    }

    fn of(stamps: &[u64]) -> Self {
        let log = Self::default();
        log.kept().entries.extend(stamps.iter().map(|stamp| (*stamp, false)));
        log
    }
}

impl ShardLog for Log {
    fn id(&self) -> u64 {
        ID
    }

    fn read(
        &mut self,
        after: LogIndex,
        up_to: LogIndex,
        _max_bytes: usize,
    ) -> Result<Vec<Entry>, ReadError> {
        let kept = self.kept();
        if after.0 < kept.head {
            return Err(ReadError::Trimmed(after));
        }
        let read =
            (1..).zip(&kept.entries).filter(|(index, _)| (after.0 + 1..=up_to.0).contains(index));
        let entry = |(index, (stamp, nop)): (u64, &(u64, bool))| {
            let payload = Payload::new(vec![index as u8].into());
            Entry { nop: *nop, ..Entry::update(LogIndex(index), Hlc(*stamp), payload) }
        };
        Ok(read.map(entry).collect())
    }

    fn trim(&mut self, b_commit: LogIndex) {
        self.kept().trimmed.push(b_commit.0);
    }

    fn nop(&mut self) {
        self.kept().nops += 1;
    }

    fn fenced(&mut self) {
        self.kept().is_fenced = true;
    }
}

fn point(index: u64, stamp: u64) -> LogPoint {
    LogPoint { index: LogIndex(index), stamp: Hlc(stamp) }
}

fn at(ns: u64) -> MonoNanos {
    MonoNanos(1_000_000_000 + ns)
}

struct Played {
    shipper: Shipper,
}

impl Played {
    /// Shards s0, s1, of which the given logs are led here, with so much of them committed.
    fn new(logs: &[(&Log, LogPoint)]) -> Self {
        let names = Names {
            host: "h0".into(),
            software: "test".into(),
            store: "orders".into(),
            shards: vec!["s0".into(), "s1".into()],
        };
        let mut shipper = Shipper::new(names, PACE, at(0));
        for (nth, (log, committed)) in (0..).zip(logs) {
            shipper.lead(nth, Box::new((*log).clone()), *committed, at(0));
        }
        Self { shipper }
    }

    fn say(&mut self, shard: u16, message: &StoreMessage, now: MonoNanos) {
        let mut bytes = BytesMut::new();
        frame::encode_control(Channel(shard), message, &mut bytes);
        self.shipper.link().unwrap().input().extend_from_slice(&bytes);
        self.shipper.link_received(0, now);
    }

    fn reply(&mut self, shard: u16, attempt: u64, verdict: Verdict, now: MonoNanos) {
        self.say(shard, &StoreMessage::Reply(Reply { attempt, verdict }), now);
    }

    fn heard(&mut self) -> Vec<StoreFrame> {
        let Some(link) = self.shipper.link() else { return Vec::new() };
        std::iter::from_fn(|| frame::decode_of(link.output()).unwrap()).collect()
    }

    /// What agents have sent.
    fn sent(&mut self) -> Vec<(u16, Backup)> {
        self.heard().into_iter().filter_map(|frame| decode(frame).ok()).collect()
    }

    /// Connected, with each shard's log on record; returns what agents have sent then: their questions.
    fn connect(&mut self, shards: u16, on_record: Option<&Origin>) -> Vec<(u16, Backup)> {
        assert!(self.shipper.wants_link(at(0)));
        self.shipper.linked(at(0));
        let (server, software) = ("b".to_owned(), "test".to_owned());
        self.say(0, &StoreMessage::Welcome { protocol: VERSION, server, software }, at(0));
        let asked =
            |frame: &StoreFrame| matches!(frame, Frame::Control(_, StoreMessage::AskOrigin));
        assert_eq!(self.heard().iter().filter(|frame| asked(frame)).count(), usize::from(shards));
        for shard in 0..shards {
            let origin = on_record.cloned();
            self.say(shard, &StoreMessage::OnRecord { origin }, at(0));
        }
        self.sent()
    }

    /// Connected to a backup that stands there; returns the first entries, and the attempt.
    fn begin(&mut self, shards: u16, standing: LogPoint) -> Vec<(u16, Backup)> {
        let questions = self.connect(shards, Some(&OWN));
        assert_eq!(questions.len(), usize::from(shards));
        for (shard, question) in questions {
            let asked = Verdict::Asked(Standing { append: standing, commit: standing });
            self.reply(shard, question.attempt, asked, at(0));
        }
        self.sent()
    }
}

#[test]
fn what_is_committed_goes_with_effective_stamps_from_where_the_backup_stands() {
    let log = Log::of(&[50, 30, 20, 90, 95]);
    let mut played = Played::new(&[(&log, point(4, 90))]);
    let sent = played.begin(1, point(1, 50));
    let stamps = |sent: &[(u16, Backup)]| -> Vec<_> {
        let entries = sent.iter().flat_map(|(_, backup)| &backup.entries);
        entries.map(|entry| (entry.end.0, entry.stamp.0)).collect()
    };
    assert_eq!(stamps(&sent), [(2, 50), (3, 50), (4, 90)], "the fifth is not committed");
    played.shipper.committed(0, point(5, 95), at(1));
    assert_eq!(stamps(&played.sent()), [(5, 95)], "at once");
    // The link is lost, and what was under way with it.
    played.shipper.link_lost("reset".into(), at(2));
    let retry = played.shipper.deadline().unwrap();
    assert!(!played.shipper.wants_link(at(2)) && played.shipper.wants_link(retry));
    played.shipper.linked(retry);
    let (server, software) = ("b".to_owned(), "test".to_owned());
    played.say(0, &StoreMessage::Welcome { protocol: VERSION, server, software }, retry);
    played.say(0, &StoreMessage::OnRecord { origin: Some(OWN) }, retry);
    let question = played.sent().pop().unwrap().1;
    let standing = Standing { append: point(3, 50), commit: point(3, 50) };
    played.reply(0, question.attempt, Verdict::Asked(standing), retry);
    assert_eq!(stamps(&played.sent()), [(4, 90), (5, 95)]);
}

#[test]
fn the_log_is_trimmed_as_far_as_the_backup_has_committed_and_no_further() {
    let log = Log::of(&[1, 2, 3]);
    let mut played = Played::new(&[(&log, point(3, 3))]);
    let sent = played.begin(1, point(0, 0));
    let attempt = sent[0].1.attempt;
    let taken = |append, commit| {
        Verdict::Taken(Standing { append: point(append, append), commit: point(commit, commit) })
    };
    played.reply(0, attempt, taken(3, 0), at(1));
    assert_eq!(log.kept().trimmed, [], "it was received");
    played.reply(0, attempt, taken(3, 2), at(2));
    played.reply(0, attempt, taken(3, 2), at(3));
    assert_eq!(log.kept().trimmed, [2]);
    let state = played.shipper.status().shards["s0"];
    assert_eq!((state.b_commit, state.committed, state.stands), (LogIndex(2), LogIndex(3), None));
}

#[test]
fn a_log_that_is_not_the_one_on_record_is_not_shipped() {
    let log = Log::of(&[1]);
    let mut played = Played::new(&[(&log, point(1, 1))]);
    let other = Origin { system_id: ID + 1, ..OWN };
    assert_eq!(played.connect(1, Some(&other)), []);
    played.shipper.committed(0, point(1, 1), at(1));
    played.shipper.tick(at(1 << 50));
    assert_eq!(played.sent(), []);
    assert_eq!(played.shipper.status().shards["s0"].stands, Some(Stand::OtherLog));
}

#[test]
fn a_log_that_was_trimmed_too_far_stands_and_the_others_go_on() {
    let (gone, good) = (Log::of(&[1, 2]), Log::of(&[1, 2]));
    gone.kept().head = 1;
    let mut played = Played::new(&[(&gone, point(2, 2)), (&good, point(2, 2))]);
    let sent = played.begin(2, point(0, 0));
    assert!(sent.iter().all(|(shard, _)| *shard == 1) && sent.len() == 2, "{sent:?}");
    let shards = played.shipper.status().shards;
    assert_eq!((shards["s0"].stands, shards["s1"].stands), (Some(Stand::Trimmed), None));
}

#[test]
fn a_shard_that_writes_nothing_appends_a_nop_after_another_one_has_written() {
    let (busy, idle) = (Log::of(&[10]), Log::of(&[5]));
    let mut played = Played::new(&[(&busy, point(0, 0)), (&idle, point(1, 5))]);
    played.begin(2, point(0, 0));
    played.shipper.tick(at(0));
    let nops = |played: &mut Played, ns: u64| {
        played.shipper.tick(at(ns));
        (busy.kept().nops, idle.kept().nops)
    };
    let before = nops(&mut played, 100_000);
    // An update of one shard: the other one has a moment to write itself.
    busy.kept().entries[0] = (100, false);
    played.shipper.committed(0, point(1, 100), at(200_000));
    assert_eq!(nops(&mut played, 200_000), before);
    assert_eq!(played.shipper.deadline(), Some(at(201_000)), "nothing else is waited for");
    assert_eq!(nops(&mut played, 201_000), (before.0, before.1 + 1));
    // The NOP is no reason for another one, and a store without updates is silent.
    idle.kept().entries.push((101, true));
    played.shipper.committed(1, point(2, 101), at(202_000));
    let silent = nops(&mut played, 203_000);
    assert_eq!(silent, (before.0, before.1 + 1));
    assert_eq!(nops(&mut played, 90_000_000), silent);
}

#[test]
fn a_primary_whose_store_was_recovered_ships_nothing_and_is_told() {
    let log = Log::of(&[1]);
    let mut played = Played::new(&[(&log, point(1, 1))]);
    let question = played.connect(1, None).pop().unwrap().1;
    played.reply(0, question.attempt, Verdict::Fenced, at(1));
    assert!(log.kept().is_fenced);
    played.shipper.committed(0, point(1, 1), at(2));
    assert_eq!(played.sent(), []);
    assert_eq!(played.shipper.status().shards["s0"].stands, Some(Stand::Fenced));
}
