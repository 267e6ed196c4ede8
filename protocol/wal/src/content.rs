//! Content of the records that are understood, taken as the data passes. The layout is in the crate's documentation.
//!
//! Lists in a commit's record can be long (a transaction with 100,000 subtransactions), and a global identifier stands
//! behind them. So the data is read field by field: a field is gathered, or a number of bytes is skipped, and never more
//! than [`FIELD_BYTES_MAX`] are kept.

use crate::item::{Ending, Gid, Kind, TimelineChange, Transaction, TwoPhase, Xid};
use crate::lsn::Lsn;
use crate::record::{
    Head, MANAGER_LOG, MANAGER_MESSAGES, MANAGER_TRANSACTIONS, u16_at, u32_at, u64_at,
};
use crate::stamp::PgTimestamp;
use crate::timeline::TimelineId;

/// The longest field: a global identifier with its zero byte.
const FIELD_BYTES_MAX: usize = 200;

const PART_CONTENT: u8 = 255;
const PART_LONG_CONTENT: u8 = 254;
const PART_ORIGIN: u8 = 253;
const PART_TOP_LEVEL: u8 = 252;
const ORIGIN_BYTES: u64 = 2;
const TOP_LEVEL_BYTES: u64 = 4;

/// Bits of the info that tell records about the log itself apart, and their values.
const KIND_OF_LOG: u8 = 0xf0;
const SHUTDOWN_CHECKPOINT: u8 = 0x00;
const SWITCH: u8 = 0x40;
const END_OF_RECOVERY: u8 = 0x90;
const OVERWRITES: u8 = 0xd0;

/// Bits of the info that tell transactions' records apart, their values, and the bit for flags behind the stamp.
const KIND_OF_TRANSACTION: u8 = 0x70;
const COMMIT: u8 = 0x00;
const PREPARE: u8 = 0x10;
const ABORT: u8 = 0x20;
const COMMIT_PREPARED: u8 = 0x30;
const ABORT_PREPARED: u8 = 0x40;
const HAS_FLAGS: u8 = 0x80;

/// Bits of the info of a message, and their value.
const KIND_OF_MESSAGE: u8 = 0xf0;
const MESSAGE: u8 = 0x00;

/// Flags of the parts that follow a stamp.
const PLACE: u32 = 1 << 0;
const SUBTRANSACTIONS: u32 = 1 << 1;
const FILES: u32 = 1 << 2;
const MESSAGES: u32 = 1 << 3;
const PREPARED: u32 = 1 << 4;
const ORIGIN: u32 = 1 << 5;
const IDENTIFIER: u32 = 1 << 7;
const STATISTICS: u32 = 1 << 8;

const PLACE_BYTES: u64 = 8;
const PLACE_AT_ORIGIN_BYTES: u64 = 16;
/// Flag and bytes of an element of each list, in the order in which they stand.
const LISTS: [(u32, u64); 4] =
    [(SUBTRANSACTIONS, 4), (FILES, 12), (STATISTICS, 12), (MESSAGES, 16)];

const PREPARE_MAGIC: u32 = 0x57f9_4534;
const PREPARE_BYTES: usize = 72;
/// The fixed part of a message.
const MESSAGE_BYTES: usize = 24;

/// The data is not what the head of the record says.
#[derive(Debug, PartialEq, Eq)]
struct NotAsAnnounced;

/// The next field, if there is one, and how long it is.
type Next = Result<Option<(Field, usize)>, NotAsAnnounced>;

/// The records whose content is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Transaction(Ending),
    ShutdownCheckpoint,
    EndOfRecovery,
    Overwrites,
    Message,
}

/// A field that is gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    /// The number that a part of the data begins with.
    Part,
    /// The length of the content, in 1 or 4 bytes.
    ContentLength,
    /// The stamp of a commit or an abort.
    Stamp,
    /// The flags that say which parts follow.
    Flags,
    /// The number of elements of the list with this place in [`LISTS`].
    Count(usize),
    /// The number of a prepared transaction.
    Prepared,
    /// A global identifier, one byte more at a time, up to its zero byte.
    Identifier,
    /// The fixed part of a prepare.
    Prepare,
    /// The global identifier in a prepare, with its zero byte.
    PrepareIdentifier,
    /// A position.
    GivenUp,
    /// A position or a stamp, and two timelines.
    Timelines,
    /// The fixed part of a message.
    Message,
    /// The prefix of a message, with its zero byte.
    Prefix,
}

/// Reads the data of one record.
#[derive(Debug)]
pub(crate) struct Content {
    subject: Subject,
    has_flags: bool,
    is_as_announced: bool,
    /// Bytes of data that have not passed yet.
    left: u64,
    /// Bytes to be passed over before the field.
    skip: u64,
    /// The next field, and how long it is. `None`: nothing more is wanted.
    field: Option<(Field, usize)>,
    gathered: [u8; FIELD_BYTES_MAX],
    len: usize,
    flags: u32,
    stamp: PgTimestamp,
    two_phase: Option<TwoPhase>,
    given_up: Lsn,
    timelines: TimelineChange,
    is_transactional: bool,
    prefix: Box<[u8]>,
}

impl Content {
    /// Reads a record with so many bytes of data. `None`: nothing of its data is wanted.
    pub fn of(head: &Head, data_bytes: u32) -> Option<Content> {
        Some(Content {
            subject: subject(head)?,
            has_flags: head.info & HAS_FLAGS != 0,
            is_as_announced: true,
            left: data_bytes.into(),
            skip: 0,
            field: Some((Field::Part, 1)),
            gathered: [0; FIELD_BYTES_MAX],
            len: 0,
            flags: 0,
            stamp: PgTimestamp(0),
            two_phase: None,
            given_up: Lsn(0),
            timelines: TimelineChange { timeline: TimelineId(0), before: TimelineId(0) },
            is_transactional: false,
            prefix: Box::default(),
        })
    }

    /// Takes the next bytes of the data. Those that are not as announced count only if the record's checksum is right.
    pub fn take(&mut self, mut bytes: &[u8]) {
        self.left = self.left.saturating_sub(bytes.len() as u64);
        while self.is_as_announced && !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len() as u64);
                self.skip -= skipped;
                bytes = &bytes[skipped as usize..];
                continue;
            }
            let Some((field, wanted)) = self.field else { break };
            let (taken, later) = bytes.split_at((wanted - self.len).min(bytes.len()));
            self.gathered[self.len..self.len + taken.len()].copy_from_slice(taken);
            self.len += taken.len();
            bytes = later;
            if self.len == wanted {
                let behind = self.left + bytes.len() as u64;
                match self.after(field, wanted, behind) {
                    Ok(next) => {
                        self.field = next;
                        self.is_as_announced = next.is_some() || self.can_end(behind);
                    }
                    Err(NotAsAnnounced) => self.is_as_announced = false,
                }
            }
        }
    }

    /// Returns the kind of the record, after all of its data. `None`: the data is not what the head says.
    pub fn finish(self) -> Option<Kind> {
        let is_whole = self.field.is_none() && self.skip == 0;
        (self.is_as_announced && is_whole).then_some(match self.subject {
            Subject::Transaction(ending) => {
                let (stamp, two_phase) = (self.stamp, self.two_phase);
                Kind::Transaction(Transaction { ending, stamp, two_phase })
            }
            Subject::ShutdownCheckpoint => Kind::ShutdownCheckpoint(self.timelines),
            Subject::EndOfRecovery => Kind::EndOfRecovery(self.timelines),
            Subject::Overwrites => Kind::Overwrites { given_up: self.given_up },
            Subject::Message => {
                let (is_transactional, prefix) = (self.is_transactional, self.prefix);
                Kind::Message { is_transactional, prefix }
            }
        })
    }

    /// Acts on a field that is whole, with so many bytes of data behind it. Returns the next one.
    fn after(&mut self, field: Field, len: usize, behind: u64) -> Next {
        self.len = 0;
        let gathered = self.gathered;
        let number = u32_at(&gathered, 0);
        match field {
            Field::Part => {
                let (skip, next) = match gathered[0] {
                    PART_CONTENT => (0, (Field::ContentLength, 1)),
                    PART_LONG_CONTENT => (0, (Field::ContentLength, 4)),
                    PART_ORIGIN => (ORIGIN_BYTES, (Field::Part, 1)),
                    PART_TOP_LEVEL => (TOP_LEVEL_BYTES, (Field::Part, 1)),
                    _ => return Err(NotAsAnnounced),
                };
                self.skip = skip;
                Ok(Some(next))
            }
            Field::ContentLength => {
                let length = if len == 1 { u32::from(gathered[0]) } else { number };
                let next = match self.subject {
                    Subject::Transaction(Ending::Prepare) => (Field::Prepare, PREPARE_BYTES),
                    Subject::Transaction(_) => (Field::Stamp, 8),
                    Subject::Overwrites => (Field::GivenUp, 8),
                    Subject::Message => (Field::Message, MESSAGE_BYTES),
                    Subject::ShutdownCheckpoint | Subject::EndOfRecovery => (Field::Timelines, 16),
                };
                if u64::from(length) == behind { Ok(Some(next)) } else { Err(NotAsAnnounced) }
            }
            Field::Stamp => {
                self.stamp = PgTimestamp(u64_at(&gathered, 0) as i64);
                if self.has_flags { Ok(Some((Field::Flags, 4))) } else { self.behind_lists() }
            }
            Field::Flags => {
                self.flags = number;
                self.skip = if number & PLACE != 0 { PLACE_BYTES } else { 0 };
                self.list(0)
            }
            Field::Count(list) => {
                // A count that cannot be leads beyond the end of the record.
                self.skip = u64::from(number) * LISTS[list].1;
                self.list(list + 1)
            }
            Field::Prepared => {
                self.two_phase = Some(TwoPhase { xid: Xid(number), gid: None });
                Ok((self.flags & IDENTIFIER != 0).then_some((Field::Identifier, 1)))
            }
            Field::Identifier if gathered[len - 1] == 0 => self.identifier(&gathered[..len]),
            Field::Identifier if len == FIELD_BYTES_MAX => Err(NotAsAnnounced),
            Field::Identifier => {
                self.len = len;
                Ok(Some((Field::Identifier, len + 1)))
            }
            Field::Prepare => {
                let gid_bytes = usize::from(u16_at(&gathered, 54));
                if number != PREPARE_MAGIC || !(1..=FIELD_BYTES_MAX).contains(&gid_bytes) {
                    return Err(NotAsAnnounced);
                }
                self.two_phase = Some(TwoPhase { xid: Xid(u32_at(&gathered, 8)), gid: None });
                self.stamp = PgTimestamp(u64_at(&gathered, 16) as i64);
                Ok(Some((Field::PrepareIdentifier, gid_bytes)))
            }
            Field::PrepareIdentifier => self.identifier(&gathered[..len]),
            Field::GivenUp => {
                self.given_up = Lsn(u64_at(&gathered, 0));
                Ok(None)
            }
            Field::Timelines => {
                let (timeline, before) = (u32_at(&gathered, 8), u32_at(&gathered, 12));
                self.timelines =
                    TimelineChange { timeline: TimelineId(timeline), before: TimelineId(before) };
                Ok(None)
            }
            Field::Message => {
                self.is_transactional = gathered[4] != 0;
                let (prefix, message) = (u64_at(&gathered, 8), u64_at(&gathered, 16));
                if prefix == 0 || prefix.checked_add(message) != Some(behind) {
                    return Err(NotAsAnnounced);
                }
                let kept = usize::try_from(prefix).unwrap_or(usize::MAX).min(FIELD_BYTES_MAX);
                Ok(Some((Field::Prefix, kept)))
            }
            Field::Prefix => {
                let prefix = gathered[..len].split(|&byte| byte == 0).next();
                self.prefix = prefix.unwrap_or_default().into();
                Ok(None)
            }
        }
    }

    /// The count of the next list that is there, from this one on, or what stands behind all lists.
    fn list(&self, from: usize) -> Next {
        match LISTS[from..].iter().position(|(flag, _)| self.flags & flag != 0) {
            Some(next) => Ok(Some((Field::Count(from + next), 4))),
            None => self.behind_lists(),
        }
    }

    fn behind_lists(&self) -> Next {
        let ends_prepared = matches!(
            self.subject,
            Subject::Transaction(Ending::CommitPrepared | Ending::AbortPrepared)
        );
        match (self.flags & PREPARED != 0, ends_prepared) {
            (true, true) => Ok(Some((Field::Prepared, 4))),
            (false, false) => Ok(None),
            _ => Err(NotAsAnnounced),
        }
    }

    /// True if nothing follows that is not known, behind the last field that is wanted: a commit that was misread would
    /// leave something.
    fn can_end(&self, behind: u64) -> bool {
        let origin = if self.flags & ORIGIN != 0 { PLACE_AT_ORIGIN_BYTES } else { 0 };
        match self.subject {
            Subject::Transaction(Ending::Prepare) => true,
            Subject::Transaction(_) => behind == self.skip + origin,
            Subject::ShutdownCheckpoint
            | Subject::EndOfRecovery
            | Subject::Overwrites
            | Subject::Message => true,
        }
    }

    /// Takes a global identifier with its zero byte, which is the only one.
    fn identifier(&mut self, bytes: &[u8]) -> Next {
        let (Some((0, gid)), Some(two_phase)) = (bytes.split_last(), &mut self.two_phase) else {
            return Err(NotAsAnnounced);
        };
        if gid.contains(&0) {
            return Err(NotAsAnnounced);
        }
        two_phase.gid = Some(Gid::new(gid));
        Ok(None)
    }
}

/// True of a record behind which the log goes on in the next segment.
pub(crate) fn is_switch(head: &Head) -> bool {
    head.manager == MANAGER_LOG && head.info & KIND_OF_LOG == SWITCH
}

fn subject(head: &Head) -> Option<Subject> {
    match (head.manager, head.info & KIND_OF_LOG) {
        (MANAGER_LOG, SHUTDOWN_CHECKPOINT) => Some(Subject::ShutdownCheckpoint),
        (MANAGER_LOG, END_OF_RECOVERY) => Some(Subject::EndOfRecovery),
        (MANAGER_LOG, OVERWRITES) => Some(Subject::Overwrites),
        (MANAGER_TRANSACTIONS, _) => ending(head.info).map(Subject::Transaction),
        (MANAGER_MESSAGES, _) if head.info & KIND_OF_MESSAGE == MESSAGE => Some(Subject::Message),
        _ => None,
    }
}

fn ending(info: u8) -> Option<Ending> {
    match info & KIND_OF_TRANSACTION {
        COMMIT => Some(Ending::Commit),
        PREPARE => Some(Ending::Prepare),
        ABORT => Some(Ending::Abort),
        COMMIT_PREPARED => Some(Ending::CommitPrepared),
        ABORT_PREPARED => Some(Ending::AbortPrepared),
        _ => None,
    }
}
