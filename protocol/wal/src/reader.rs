//! The reader.
//!
//! ```text
//!                     ┌── page begins with the rest of a record, at the start only ──► Rest ──┐
//!                     │                                                                       │ its end
//!  ──► Between ───────┴── first byte ──► Record ── last byte ──► Padding, or Zeroes ──► item ◄┘
//!        ▲                                 │                     (behind a switch)        │
//!        │                                 └── page says that it was given up ──► item    │
//!        └────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Heads of pages are taken out of the stream in every state but Zeroes. Bytes are not kept: of a page and of a record
//! the head, of a record's data what [`Content`] gathers.

use crate::content::{Content, is_switch};
use crate::error::{Fault, WalError};
use crate::item::{Kind, WalItem, Xid};
use crate::lsn::Lsn;
use crate::page::{
    Common, Front, LONG_HEAD_BYTES, PAGE_BYTES, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, Version,
};
use crate::record::{CHECKED_BYTES, HEAD_BYTES, Head, RECORD_BYTES_MAX, is_possible, u32_at};
use crate::timeline::TimelineHistory;
use crc_fast::{CrcAlgorithm, Digest};
use std::collections::VecDeque;

const PAGE: u64 = PAGE_BYTES as u64;
/// The greatest start. No log is so long, and positions behind it need no checks for overflow.
const START_MAX: Lsn = Lsn(1 << 62);

/// Reads a log from a stream of bytes that arrives in pieces.
///
/// The bytes that [`push`](WalReader::push) is given are read at once and not kept. Items that they complete wait to be
/// taken by the iterator, at most one for each 24 bytes pushed. After the first error, the error is all that comes.
#[derive(Debug)]
pub struct WalReader {
    common: Common,
    history: TimelineHistory,
    start: Lsn,
    /// The position of the next byte.
    at: Lsn,
    state: State,
    page_head: [u8; LONG_HEAD_BYTES],
    /// Head of the record that is being read.
    head: [u8; HEAD_BYTES],
    digest: Digest,
    content: Option<Content>,
    /// Begin of the last whole record.
    before: Option<Lsn>,
    in_place_of: InPlaceOf,
    items: VecDeque<Result<WalItem, WalError>>,
    failed: Option<WalError>,
}

/// Kinds of bytes that come next, but for heads of pages.
#[derive(Clone, Debug)]
enum State {
    /// A record begins.
    Between,
    /// A record, of which some bytes have passed. The length is 0 until it has.
    Record { begin: Lsn, passed: u32, length: u32 },
    /// The rest of a record that began before the start.
    Rest { begin: Lsn, left: u32 },
    /// Bytes between a record and the next multiple of 8, the end of the item.
    Padding(WalItem),
    /// The rest of a segment behind a switch, without heads of pages, up to the end of the item.
    Zeroes(WalItem),
}

/// Record that was given up, and in whose place the next one stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InPlaceOf {
    Nothing,
    /// A record that began before the start.
    Unknown,
    Record(Lsn),
}

impl WalReader {
    /// A reader of the stream that begins at a position: at the end of an item, or at a multiple of [`PAGE_BYTES`],
    /// where the rest of an earlier record is passed over. The history is that of the timeline which the server writes
    /// or, of files, of the last one.
    ///
    /// Within a switch nothing can be begun: neither its rest nor the zeroes behind it can be told from damage.
    ///
    /// # Errors
    /// No record and no page can begin there, or segments cannot have this size.
    pub fn new(
        start: Lsn,
        segment_bytes: u32,
        history: TimelineHistory,
    ) -> Result<WalReader, WalError> {
        let error = |fault| Err(WalError { lsn: start, fault });
        let sizes = SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX;
        if !segment_bytes.is_power_of_two() || !sizes.contains(&segment_bytes) {
            return error(Fault::SegmentSize { bytes: segment_bytes });
        }
        let common = Common { segment_bytes, version: None, system: None };
        let in_page = start.0 % PAGE;
        let is_behind_head = in_page >= head_bytes(&common, start);
        let can_begin = in_page == 0 || (start.0.is_multiple_of(8) && is_behind_head);
        if start > START_MAX || !can_begin {
            return error(Fault::Start);
        }
        Ok(WalReader {
            common,
            history,
            start,
            at: start,
            state: State::Between,
            page_head: [0; LONG_HEAD_BYTES],
            head: [0; HEAD_BYTES],
            digest: Digest::new(CrcAlgorithm::Crc32Iscsi),
            content: None,
            before: None,
            in_place_of: InPlaceOf::Nothing,
            items: VecDeque::new(),
            failed: None,
        })
    }

    /// Demands that the first record is linked to this one, which the caller has from [`last_record`] of a reader that
    /// ended where this one starts.
    ///
    /// [`last_record`]: WalReader::last_record
    #[must_use]
    pub fn after(mut self, record: Lsn) -> WalReader {
        self.before = Some(record);
        self
    }

    /// Demands that the log is this database system's. Without it, all segments must name the system of the first.
    #[must_use]
    pub fn of_system(mut self, identifier: u64) -> WalReader {
        self.common.system = Some(identifier);
        self
    }

    /// Goes on with another history: the server, or the one that took its place, has begun a new timeline. What was read
    /// must be in it; the caller knows that from its server.
    pub fn follow(&mut self, history: TimelineHistory) {
        self.history = history;
    }

    /// Reads the next bytes of the stream.
    pub fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.failed.is_none() {
            match self.step(bytes) {
                Ok(taken) => bytes = &bytes[taken..],
                Err(error) => self.failed = Some(error),
            }
        }
        if let Some(error) = self.failed {
            self.items.push_back(Err(error));
        }
    }

    /// The position behind the last byte that was pushed. Behind a fault, some position within the record.
    #[must_use]
    pub fn position(&self) -> Lsn {
        self.at
    }

    /// Begin of the record that the next one is linked to. `None` before the first record.
    #[must_use]
    pub fn last_record(&self) -> Option<Lsn> {
        self.before
    }

    /// The version of the server, as soon as the head of a page has passed.
    #[must_use]
    pub fn version(&self) -> Option<Version> {
        self.common.version
    }

    /// The database system, as soon as the head of a segment has passed, or as demanded.
    #[must_use]
    pub fn system(&self) -> Option<u64> {
        self.common.system
    }

    /// The error, after which nothing is read any more.
    #[must_use]
    pub fn failed(&self) -> Option<WalError> {
        self.failed
    }

    /// Takes bytes of one kind, at least one. Returns their number.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, WalError> {
        if let State::Zeroes(item) = &self.state {
            let (begin, end) = (item.begin, item.end);
            return self.zeroes(begin, end, bytes);
        }
        let in_page = self.at.0 % PAGE;
        let head_bytes = head_bytes(&self.common, self.at);
        if in_page < head_bytes {
            return self.page_head(in_page as usize, head_bytes as usize, bytes);
        }
        let on_page = usize::try_from(PAGE - in_page).unwrap_or(usize::MAX).min(bytes.len());
        let bytes = &bytes[..on_page];
        match self.state {
            State::Between => {
                self.digest.reset();
                self.record(self.at, 0, 0, bytes)
            }
            State::Record { begin, passed, length } => self.record(begin, passed, length, bytes),
            State::Rest { begin, left } => {
                let taken = bytes.len().min(left as usize);
                self.at.0 += taken as u64;
                let left = left - taken as u32;
                self.state = State::Rest { begin, left };
                if left == 0 {
                    self.ended(begin, Xid(0), Kind::Rest);
                }
                Ok(taken)
            }
            State::Padding(ref item) => {
                let taken = bytes.len().min((item.end.0 - self.at.0) as usize);
                self.at.0 += taken as u64;
                self.hand_out_if_ended();
                Ok(taken)
            }
            State::Zeroes(_) => Ok(0),
        }
    }

    fn zeroes(&mut self, begin: Lsn, end: Lsn, bytes: &[u8]) -> Result<usize, WalError> {
        let left = usize::try_from(end.0 - self.at.0).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(left)];
        if bytes.iter().fold(0, |all, byte| all | byte) != 0 {
            return Err(WalError { lsn: begin, fault: Fault::BehindSwitch });
        }
        self.at.0 += bytes.len() as u64;
        self.hand_out_if_ended();
        Ok(bytes.len())
    }

    /// Takes bytes of the head of a page, of which some have passed.
    fn page_head(
        &mut self,
        passed: usize,
        head_bytes: usize,
        bytes: &[u8],
    ) -> Result<usize, WalError> {
        let taken = bytes.len().min(head_bytes - passed);
        self.page_head[passed..passed + taken].copy_from_slice(&bytes[..taken]);
        self.at.0 += taken as u64;
        if passed + taken == head_bytes {
            let page = Lsn(self.at.0 - head_bytes as u64);
            self.page_begun(page, head_bytes).map_err(|fault| WalError { lsn: page, fault })?;
        }
        Ok(taken)
    }

    /// Acts on the whole head of a page.
    fn page_begun(&mut self, page: Lsn, head_bytes: usize) -> Result<(), Fault> {
        let timeline = self.history.timeline_at(page);
        let front = self.common.verify(page, timeline, &self.page_head[..head_bytes])?;
        let left = match self.state {
            State::Record { passed, length, .. } => length - passed,
            State::Rest { left, .. } => left,
            _ => 0,
        };
        // The caller may know of no record before, and then the stream may begin within one.
        let is_start = page == self.start && self.before.is_none();
        match (front, &self.state) {
            (Front::Record, State::Between) => {}
            (Front::Continuation(found), _) if found == left => {}
            (Front::Continuation(left), State::Between) if is_start && left <= RECORD_BYTES_MAX => {
                self.state = State::Rest { begin: page, left };
            }
            (Front::Overwrites, State::Between) if page == self.start => {
                self.in_place_of = InPlaceOf::Unknown;
            }
            (Front::Overwrites, &State::Record { begin, .. }) => {
                self.given_up(begin, page, Kind::GivenUp);
                self.in_place_of = InPlaceOf::Record(begin);
            }
            (Front::Overwrites, &State::Rest { begin, .. }) => {
                self.given_up(begin, page, Kind::Rest);
                self.in_place_of = InPlaceOf::Unknown;
            }
            (Front::Overwrites, _) => return Err(Fault::NotOverwritten),
            (Front::Record, _) => return Err(Fault::Continuation { found: 0, expected: left }),
            (Front::Continuation(found), _) => {
                return Err(Fault::Continuation { found, expected: left });
            }
        }
        Ok(())
    }

    /// Hands out what there is of a record that ends before its end.
    fn given_up(&mut self, begin: Lsn, end: Lsn, kind: Kind) {
        self.items.push_back(Ok(WalItem { begin, end, xid: Xid(0), kind }));
        self.state = State::Between;
    }

    /// Takes bytes of a record, of which some have passed, all on one page.
    fn record(
        &mut self,
        begin: Lsn,
        passed: u32,
        length: u32,
        bytes: &[u8],
    ) -> Result<usize, WalError> {
        let error = |fault| WalError { lsn: begin, fault };
        let in_head = passed as usize;
        let (taken, length) = if in_head < HEAD_BYTES {
            let taken = bytes.len().min(HEAD_BYTES - in_head);
            let whole = in_head + taken;
            self.head[in_head..whole].copy_from_slice(&bytes[..taken]);
            let length = if whole < 4 { 0 } else { u32_at(&self.head, 0) };
            if whole >= 4 && !is_possible(length) {
                return Err(error(Fault::RecordLength { bytes: length }));
            }
            if whole == HEAD_BYTES {
                self.head_passed(begin, length).map_err(error)?;
            }
            (taken, length)
        } else {
            let taken = bytes.len().min((length - passed) as usize);
            let data = &bytes[..taken];
            self.digest.update(data);
            if let Some(content) = &mut self.content {
                content.take(data);
            }
            (taken, length)
        };
        let passed = passed + taken as u32;
        self.at.0 += taken as u64;
        self.state = State::Record { begin, passed, length };
        if passed == length {
            self.record_passed(begin).map_err(error)?;
        }
        Ok(taken)
    }

    /// Acts on the whole head of a record.
    fn head_passed(&mut self, begin: Lsn, length: u32) -> Result<(), Fault> {
        let head = Head::decode(&self.head);
        let found = head.before;
        match self.before {
            Some(expected) if found != expected => return Err(Fault::Link { found, expected }),
            None if found >= begin => return Err(Fault::LinkForwards { found }),
            _ => {}
        }
        self.content = Content::of(&head, length - HEAD_BYTES as u32);
        Ok(())
    }

    /// Acts on a whole record.
    fn record_passed(&mut self, begin: Lsn) -> Result<(), Fault> {
        let head = Head::decode(&self.head);
        self.digest.update(&self.head[..CHECKED_BYTES]);
        let computed = self.digest.finalize() as u32;
        if computed != head.checksum {
            return Err(Fault::Checksum { found: head.checksum, computed });
        }
        let kind = match self.content.take() {
            Some(content) => content.finish().ok_or(Fault::Content { xid: head.xid })?,
            None if is_switch(&head) => Kind::Switch,
            None => Kind::Other,
        };
        self.check_place(begin, &kind)?;
        if let Kind::EndOfRecovery(change) | Kind::ShutdownCheckpoint(change) = &kind {
            let (found, expected) = (change.timeline, self.history.timeline_at(begin));
            if found != expected {
                return Err(Fault::RecordTimeline { found, expected });
            }
        }
        self.before = Some(begin);
        self.ended(begin, head.xid, kind);
        Ok(())
    }

    /// A record that stands in the place of another one says so, and no other record does.
    fn check_place(&mut self, begin: Lsn, kind: &Kind) -> Result<(), Fault> {
        let in_place_of = std::mem::replace(&mut self.in_place_of, InPlaceOf::Nothing);
        match (kind, in_place_of) {
            (&Kind::Overwrites { given_up: found }, InPlaceOf::Record(expected))
                if found != expected =>
            {
                Err(Fault::Overwrites { found, expected })
            }
            (Kind::Overwrites { .. }, InPlaceOf::Nothing) if begin != self.start => {
                Err(Fault::NotOverwritten)
            }
            (Kind::Overwrites { .. }, _) | (_, InPlaceOf::Nothing) => Ok(()),
            _ => Err(Fault::NotOverwritten),
        }
    }

    /// Hands out the item whose last byte has passed, as soon as what stands behind it has, too.
    fn ended(&mut self, begin: Lsn, xid: Xid, kind: Kind) {
        let segment = u64::from(self.common.segment_bytes);
        self.state = if kind == Kind::Switch {
            let end = Lsn(self.at.0.next_multiple_of(segment));
            State::Zeroes(WalItem { begin, end, xid, kind })
        } else {
            State::Padding(WalItem { begin, end: self.at.aligned(), xid, kind })
        };
        self.hand_out_if_ended();
    }

    fn hand_out_if_ended(&mut self) {
        let (State::Padding(item) | State::Zeroes(item)) = &self.state else { return };
        if item.end == self.at {
            let state = std::mem::replace(&mut self.state, State::Between);
            if let State::Padding(item) | State::Zeroes(item) = state {
                self.items.push_back(Ok(item));
            }
        }
    }
}

impl Iterator for WalReader {
    type Item = Result<WalItem, WalError>;

    /// The next item that what was pushed has completed. An error comes once for each time that something is pushed.
    fn next(&mut self) -> Option<Self::Item> {
        self.items.pop_front()
    }
}

/// Length of the head of the page that a position is on.
fn head_bytes(common: &Common, at: Lsn) -> u64 {
    common.head_bytes(Lsn(at.0 - at.0 % PAGE)) as u64
}
