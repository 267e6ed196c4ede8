//! A scripted standby of a store in memory.

mod machine;
mod threads;

use crate::{Event, Failure, Need, ShardWal, Standby};
use bytes::Buf;
use std::time::Duration;
use tidelock_pgstream::{Now, Timing};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::record::Payload;
use tidelock_shard::link::Origin;
use tidelock_shard::{Backup, Entry, LogIndex};
use tidelock_shard_logs::{Agent, Limits, StoreLog};
use tidelock_storage::memory::Memory;
use tidelock_store::journal::Options;
use tidelock_wal::{Lsn, PgTimestamp};

const SHARD: u16 = 0;
/// The shard that holds the watermark where a test wants it.
const OTHER: u16 = 1;
const SYSTEM: u64 = 7_000_000_000_000_000_007;
const SEGMENT: u64 = 1 << 20;
/// Begin of the shard's log.
const BEGIN: u64 = 3 * SEGMENT;
/// So small that every few entries begin a segment of the journal.
const OPTIONS: Options = Options { segment_bytes: 700 };

/// The byte of the log at a position.
fn byte_at(at: u64) -> u8 {
    (at ^ (at >> 8)).wrapping_mul(167) as u8
}

fn wal_between(from: u64, to: u64) -> Vec<u8> {
    (from..to).map(byte_at).collect()
}

/// A store with the log of one shard, whose entries have as stamps their ends.
struct Store {
    disk: Memory,
    log: StoreLog<Memory>,
    end: u64,
    other: u64,
    allowed: u64,
}

impl Store {
    fn new() -> Self {
        let disk = Memory::new();
        let log = StoreLog::create(disk.clone(), "s", 2, OPTIONS, Limits::default()).unwrap();
        let mut store = Self { disk, log, end: 0, other: 0, allowed: 0 };
        store.jump(BEGIN);
        store.allow(BEGIN);
        store
    }

    fn take(&mut self, shard: u16, after: u64, entry: Entry) {
        let message = Backup { attempt: 1, after: LogIndex(after), entries: vec![entry] };
        assert_eq!(self.log.received(Agent(1), shard, message), Ok(None));
        self.commit();
    }

    fn commit(&mut self) {
        loop {
            self.log.write().unwrap();
            let Some(job) = self.log.sync_job() else { return };
            self.log.synced(job.run()).unwrap();
        }
    }

    /// The next bytes of the log are durable.
    fn append(&mut self, bytes: u64) {
        let (after, end) = (self.end, self.end + bytes);
        let data = Some(Payload::new(wal_between(after, end).into()));
        self.take(SHARD, after, Entry { end: LogIndex(end), stamp: Hlc(end), data, nop: false });
        self.end = end;
    }

    fn jump(&mut self, end: u64) {
        let entry = Entry { end: LogIndex(end), stamp: Hlc(end), data: None, nop: false };
        self.take(SHARD, self.end, entry);
        self.end = end;
    }

    /// Entries that end up to here may be applied.
    fn allow(&mut self, stamp: u64) {
        let end = self.other + 1;
        self.allowed = stamp;
        self.take(
            OTHER,
            self.other,
            Entry { end: LogIndex(end), stamp: Hlc(stamp), data: None, nop: false },
        );
        self.other = end;
    }

    fn apply_to(&self) -> Lsn {
        Lsn(self.log.apply_to(SHARD).unwrap().0)
    }
}

fn shard_wal(timeline: u32, history: Option<&str>) -> ShardWal {
    ShardWal::of(&Origin {
        system_id: SYSTEM,
        timeline,
        history: history.unwrap_or_default().to_owned(),
        segment_bytes: SEGMENT as u32,
        version: 15,
    })
    .unwrap()
}

fn startup() -> Vec<u8> {
    let parameters = b"user\0standby\0replication\0true\0application_name\0far\0\0";
    let length = (8 + parameters.len()) as u32;
    [&length.to_be_bytes()[..], &196_608u32.to_be_bytes(), parameters].concat()
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    [&[tag][..], &(4 + body.len() as u32).to_be_bytes(), body].concat()
}

fn query(text: &str) -> Vec<u8> {
    message(b'Q', format!("{text}\0").as_bytes())
}

fn start(at: u64, timeline: u32) -> Vec<u8> {
    query(&format!("START_REPLICATION {} TIMELINE {timeline}", Lsn(at)))
}

fn status(end: u64) -> Vec<u8> {
    let number = end.to_be_bytes();
    message(b'd', &[&b"r"[..], &number, &number, &number, &[0; 8], &[0]].concat())
}

/// Messages that a standby was sent.
#[derive(Debug, Default)]
struct Heard {
    tags: String,
    /// Position of the first byte of the log, and the log.
    wal: Option<(u64, Vec<u8>)>,
    /// Greatest position that was named.
    named: u64,
    errors: Vec<String>,
    rest: Vec<u8>,
}

impl Heard {
    /// Takes bytes. Log that does not follow is a failed test.
    fn take(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        loop {
            let Some(length) = self.rest.get(1..5) else { return };
            let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if self.rest.len() <= length {
                return;
            }
            let after = self.rest.split_off(1 + length);
            let message = std::mem::replace(&mut self.rest, after);
            self.message(message[0], &message[5..]);
        }
    }

    fn message(&mut self, tag: u8, mut body: &[u8]) {
        self.tags.push(char::from(tag));
        match (tag, body.first()) {
            (b'd', Some(b'w')) => {
                body.advance(1);
                let at = body.get_u64();
                self.named = self.named.max(body.get_u64());
                body.advance(8);
                let (begin, wal) = self.wal.get_or_insert((at, Vec::new()));
                assert_eq!(*begin + wal.len() as u64, at, "the log has no gap");
                wal.extend_from_slice(body);
            }
            (b'd', Some(b'k')) => {
                body.advance(1);
                self.named = self.named.max(body.get_u64());
            }
            (b'E', _) => self.errors.push(String::from_utf8_lossy(body).into_owned()),
            _ => {}
        }
    }

    /// End of the log that has come.
    fn end(&self) -> u64 {
        self.wal.as_ref().map_or(0, |(begin, wal)| begin + wal.len() as u64)
    }

    /// Checks what has come from a position on.
    fn check(&self, from: u64, bound: u64) {
        if let Some((begin, wal)) = &self.wal {
            assert_eq!(*begin, from);
            assert!(*wal == wal_between(from, self.end()), "the bytes are those of the log");
        }
        assert!(self.end() <= bound && self.named <= bound, "{self:?} is beyond {bound}");
    }
}

/// A standby, driven without threads.
struct Driven<F> {
    standby: Standby<F>,
    heard: Heard,
    events: Vec<Event>,
}

impl Driven<tidelock_storage::memory::MemoryFile> {
    fn new(store: &Store, wal: &ShardWal) -> Self {
        let now = Now { mono: Duration::ZERO, wall: PgTimestamp(0) };
        let standby = Standby::new(SHARD, wal, store.apply_to(), Timing::default(), [7; 18], now);
        let mut this = Self { standby, heard: Heard::default(), events: Vec::new() };
        this.say(store, &startup());
        this
    }

    fn started(store: &Store, wal: &ShardWal, at: u64) -> Self {
        let mut this = Self::new(store, wal);
        this.say(store, &start(at, 1));
        this
    }

    fn say(&mut self, store: &Store, bytes: &[u8]) {
        self.standby.received(bytes);
        self.settle(store);
    }

    /// Apply-to has moved.
    fn follow(&mut self, store: &Store) {
        self.standby.advance(store.apply_to());
        self.settle(store);
    }

    fn settle(&mut self, store: &Store) {
        loop {
            while let Some(event) = self.standby.poll() {
                self.events.push(event);
            }
            let asked = self.standby.ask().filter(|(_, need)| *need == Need::Now);
            let supply = asked.and_then(|(ask, _)| Some((ask, ask.answer(&store.log, SHARD)?)));
            let is_supplied = supply.is_some();
            if let Some((ask, supply)) = supply {
                self.standby.supply(ask, supply);
            }
            let output = self.standby.output().split();
            if output.is_empty() && !is_supplied {
                return;
            }
            self.heard.take(&output);
        }
    }

    /// The failure that it has ended with.
    fn failure(&self) -> &Failure {
        match self.events.last() {
            Some(Event::Ended(failure)) => failure,
            _ => panic!("{:?}", self.events),
        }
    }
}
