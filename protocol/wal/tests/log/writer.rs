//! Writes logs by PostgreSQL's rules, and knows the items that a reader must find in them. The tests and the fuzz target
//! use it.
//!
//! The writer follows the documented layout, not the crate's own code, so that it can write what is wrong, too.

use tidelock_wal::{Ending, Kind, Lsn, TimelineChange, TimelineId, WalItem, Xid};

pub const PAGE: u64 = 8192;
pub const SEGMENT: u32 = 1 << 20;
pub const SYSTEM: u64 = 7_000_000_000_000_000_001;

pub const LOG: u8 = 0;
pub const TRANSACTIONS: u8 = 1;
/// Manager and info of a record that nothing is known about.
pub const HEAP_INSERT: (u8, u8) = (10, 0);

const CONTINUES: u16 = 1;
const LONG: u16 = 2;
const OVERWRITES: u16 = 8;

/// A log, from some position on.
#[derive(Clone)]
pub struct Writer {
    pub start: Lsn,
    pub bytes: Vec<u8>,
    /// The items that a reader finds.
    pub items: Vec<WalItem>,
    pub segment: u32,
    pub magic: u16,
    pub timeline: u32,
    pub before: Lsn,
    /// Places of bytes, and bits of them, on which nothing depends.
    pub slack: Vec<(usize, u8)>,
}

impl Writer {
    /// A log that begins at a position.
    pub fn new(start: u64) -> Writer {
        Writer {
            start: Lsn(start),
            bytes: vec![],
            items: vec![],
            segment: SEGMENT,
            magic: 0xd110,
            timeline: 1,
            before: Lsn(start.saturating_sub(160)),
            slack: vec![],
        }
    }

    pub fn at(&self) -> u64 {
        self.start.0 + self.bytes.len() as u64
    }

    /// A record that is not understood, with so many bytes of data.
    pub fn other(&mut self, data_bytes: usize) {
        let data: Vec<u8> = (0..data_bytes).map(|at| (at * 7 + 1) as u8).collect();
        let (manager, info) = HEAP_INSERT;
        self.record(manager, info, 700, &data, Kind::Other);
    }

    /// A record of the log's manager or of transactions, with this content.
    pub fn content(&mut self, manager: u8, info: u8, xid: u32, content: &[u8], kind: Kind) {
        self.record(manager, info, xid, &part(content), kind);
    }

    /// A record.
    pub fn record(&mut self, manager: u8, info: u8, xid: u32, data: &[u8], kind: Kind) {
        self.page_head(Front::Record);
        let begin = Lsn(self.at());
        let record = sealed(manager, info, xid, self.before, data);
        self.put(&record);
        self.before = begin;
        self.align();
        if kind == Kind::Switch {
            let segment = u64::from(self.segment);
            self.bytes.resize(
                self.bytes.len() + (segment - self.at() % segment) as usize % segment as usize,
                0,
            );
        }
        self.items.push(WalItem { begin, end: Lsn(self.at()), xid: Xid(xid), kind });
    }

    /// The log goes on in the next segment.
    pub fn switch(&mut self) {
        self.record(LOG, 0x40, 0, &[], Kind::Switch);
    }

    /// A record of which only the parts on so many pages are there; later log stands in the place of the rest.
    pub fn given_up(&mut self, pages: u64) {
        self.page_head(Front::Record);
        let begin = Lsn(self.at());
        let rest_of_page = PAGE - begin.0 % PAGE;
        let record = sealed(10, 0, 701, self.before, &vec![3; ((pages + 1) * PAGE) as usize]);
        let whole = self.bytes.len();
        self.put(&record);
        self.bytes.truncate(whole + (rest_of_page + (pages - 1) * PAGE) as usize);
        self.slack.retain(|&(at, _)| at < self.bytes.len());
        let end = Lsn(self.at());
        self.items.push(WalItem { begin, end, xid: Xid(0), kind: Kind::GivenUp });
        self.page_head(Front::Overwrites);
        let content = [&begin.0.to_le_bytes()[..], &[0; 8]].concat();
        self.content(LOG, 0xd0, 0, &content, Kind::Overwrites { given_up: begin });
    }

    /// The end of a recovery: the timeline is another one from here on.
    pub fn branch(&mut self, timeline: u32) {
        let before = std::mem::replace(&mut self.timeline, timeline);
        let change = TimelineChange { timeline: TimelineId(timeline), before: TimelineId(before) };
        let content = [&[9; 8][..], &timeline.to_le_bytes(), &before.to_le_bytes()].concat();
        self.content(LOG, 0x90, 0, &content, Kind::EndOfRecovery(change));
    }

    /// Goes on with the bytes of a record, over as many pages as it takes.
    fn put(&mut self, record: &[u8]) {
        let mut rest = record;
        while !rest.is_empty() {
            self.page_head(Front::Continuation(rest.len() as u32));
            let on_page = ((PAGE - self.at() % PAGE) as usize).min(rest.len());
            self.bytes.extend_from_slice(&rest[..on_page]);
            rest = &rest[on_page..];
        }
    }

    fn align(&mut self) {
        while !self.at().is_multiple_of(8) {
            self.slack.push((self.bytes.len(), 0xff));
            self.bytes.push(0);
        }
    }

    /// Writes the head of a page, if one begins here.
    fn page_head(&mut self, front: Front) {
        let page = self.at();
        if !page.is_multiple_of(PAGE) {
            return;
        }
        let is_long = page.is_multiple_of(u64::from(self.segment));
        let (flags, left) = match front {
            Front::Record => (0, 0),
            Front::Continuation(left) => (CONTINUES, left),
            Front::Overwrites => (OVERWRITES, 0),
        };
        let flags = flags | if is_long { LONG } else { 0 };
        self.slack.push((self.bytes.len() + 2, 4));
        self.slack.extend((20..24).map(|at| (self.bytes.len() + at, 0xff)));
        self.bytes.extend_from_slice(&self.magic.to_le_bytes());
        self.bytes.extend_from_slice(&flags.to_le_bytes());
        self.bytes.extend_from_slice(&self.timeline.to_le_bytes());
        self.bytes.extend_from_slice(&page.to_le_bytes());
        self.bytes.extend_from_slice(&left.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        if is_long {
            self.bytes.extend_from_slice(&SYSTEM.to_le_bytes());
            self.bytes.extend_from_slice(&self.segment.to_le_bytes());
            self.bytes.extend_from_slice(&(PAGE as u32).to_le_bytes());
        }
    }
}

enum Front {
    Record,
    Continuation(u32),
    Overwrites,
}

/// Data with nothing but this content.
pub fn part(content: &[u8]) -> Vec<u8> {
    match u8::try_from(content.len()) {
        Ok(len) => [&[255, len], content].concat(),
        Err(_) => [&[254][..], &(content.len() as u32).to_le_bytes(), content].concat(),
    }
}

/// A record with its head and checksum.
pub fn sealed(manager: u8, info: u8, xid: u32, before: Lsn, data: &[u8]) -> Vec<u8> {
    let mut record = ((24 + data.len()) as u32).to_le_bytes().to_vec();
    record.extend_from_slice(&xid.to_le_bytes());
    record.extend_from_slice(&before.0.to_le_bytes());
    record.extend_from_slice(&[info, manager, 0, 0]);
    let checksum = crc32c(&[data, &record].concat());
    record.extend_from_slice(&checksum.to_le_bytes());
    record.extend_from_slice(data);
    record
}

/// The parts of a commit or an abort that follow its stamp.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    pub place: bool,
    pub subtransactions: Option<u32>,
    pub files: Option<u32>,
    pub statistics: Option<u32>,
    pub messages: Option<u32>,
    pub prepared: Option<u32>,
    pub gid: Option<Vec<u8>>,
    pub origin: bool,
}

/// The info of a record that ends a transaction, and its content.
pub fn end(ending: Ending, stamp: i64, parts: &Parts) -> (u8, Vec<u8>) {
    let mut content = stamp.to_le_bytes().to_vec();
    let mut flags = 0_u32;
    let mut rest = vec![];
    if parts.place {
        flags |= 1;
        rest.extend_from_slice(&[5; 8]);
    }
    let lists = [
        (parts.subtransactions, 2, 4),
        (parts.files, 4, 12),
        (parts.statistics, 0x100, 12),
        (parts.messages, 8, 16),
    ];
    for (count, flag, bytes) in lists {
        if let Some(count) = count {
            flags |= flag;
            rest.extend_from_slice(&count.to_le_bytes());
            rest.extend((0..count as usize * bytes).map(|at| at as u8));
        }
    }
    if let Some(xid) = parts.prepared {
        flags |= 0x10;
        rest.extend_from_slice(&xid.to_le_bytes());
    }
    if let Some(gid) = &parts.gid {
        flags |= 0x80;
        rest.extend_from_slice(gid);
        rest.push(0);
    }
    if parts.origin {
        flags |= 0x20;
        rest.extend_from_slice(&[6; 16]);
    }
    let info = match ending {
        Ending::Commit => 0,
        Ending::Abort => 0x20,
        Ending::CommitPrepared => 0x30,
        Ending::AbortPrepared => 0x40,
        Ending::Prepare => panic!("a prepare has other parts"),
    };
    if flags == 0 {
        return (info, content);
    }
    content.extend_from_slice(&flags.to_le_bytes());
    content.extend_from_slice(&rest);
    (info | 0x80, content)
}

/// The content of a prepare, with so many bytes behind the identifier.
pub fn prepare(stamp: i64, xid: u32, gid: &[u8], behind: usize) -> Vec<u8> {
    let mut content = vec![7; 72];
    content[0..4].copy_from_slice(&0x57f9_4534_u32.to_le_bytes());
    content[8..12].copy_from_slice(&xid.to_le_bytes());
    content[16..24].copy_from_slice(&stamp.to_le_bytes());
    content[54..56].copy_from_slice(&(gid.len() as u16 + 1).to_le_bytes());
    content.extend_from_slice(gid);
    content.push(0);
    content.resize(content.len() + behind, 0xcc);
    content
}

/// Castagnoli's checksum, bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| TABLE[usize::from(crc as u8 ^ byte)] ^ crc >> 8)
}

const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut at = 0;
    while at < 256 {
        let mut crc = at as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
};
