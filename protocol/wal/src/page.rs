//! Heads of pages. The layout is in the crate's documentation.

use crate::error::Fault;
use crate::lsn::Lsn;
use crate::record::{u16_at, u32_at, u64_at};
use crate::timeline::TimelineId;

/// Bytes of a page, in every packaged PostgreSQL.
pub const PAGE_BYTES: u32 = 8192;
/// The least size of a segment.
pub const SEGMENT_BYTES_MIN: u32 = 1 << 20;
/// The greatest size of a segment.
pub const SEGMENT_BYTES_MAX: u32 = 1 << 30;

pub(crate) const SHORT_HEAD_BYTES: usize = 24;
pub(crate) const LONG_HEAD_BYTES: usize = 40;

const CONTINUES: u16 = 1;
const LONG: u16 = 2;
const OVERWRITES: u16 = 8;
const ALL_FLAGS: u16 = 15;

/// A version of PostgreSQL whose log is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Version {
    /// PostgreSQL 15.
    V15,
    /// PostgreSQL 16.
    V16,
    /// PostgreSQL 17.
    V17,
}

impl Version {
    const ALL: [Version; 3] = [Version::V15, Version::V16, Version::V17];

    /// Magic number of the pages of its log.
    #[must_use]
    pub const fn magic(self) -> u16 {
        match self {
            Version::V15 => 0xd110,
            Version::V16 => 0xd113,
            Version::V17 => 0xd116,
        }
    }
}

/// Facts that all pages of a log have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Common {
    pub segment_bytes: u32,
    pub version: Option<Version>,
    pub system: Option<u64>,
}

/// Kinds of bytes that follow the head of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Front {
    /// A record.
    Record,
    /// Bytes of an earlier record, on this page and further ones. Not 0.
    Continuation(u32),
    /// A record in the place of the rest of an earlier one.
    Overwrites,
}

impl Common {
    /// Length of the head of the page that begins at a position.
    pub fn head_bytes(&self, page: Lsn) -> usize {
        if page.0.is_multiple_of(u64::from(self.segment_bytes)) {
            LONG_HEAD_BYTES
        } else {
            SHORT_HEAD_BYTES
        }
    }

    /// Verifies the head of the page that begins at a position and belongs to a timeline.
    pub fn verify(&mut self, page: Lsn, timeline: TimelineId, head: &[u8]) -> Result<Front, Fault> {
        let (magic, flags, left) = (u16_at(head, 0), u16_at(head, 2), u32_at(head, 16));
        let version = Version::ALL.into_iter().find(|version| version.magic() == magic);
        let version = version.ok_or(Fault::Magic { magic })?;
        if let Some(before) = self.version.filter(|&before| before != version) {
            return Err(Fault::VersionChanged { magic, before: before.magic() });
        }
        let address = Lsn(u64_at(head, 8));
        if address != page {
            return Err(Fault::PageAddress { address });
        }
        let is_long = head.len() == LONG_HEAD_BYTES;
        let continues = flags & CONTINUES != 0;
        let overwrites = flags & OVERWRITES != 0;
        if flags & !ALL_FLAGS != 0 || (flags & LONG != 0) != is_long || (continues && overwrites) {
            return Err(Fault::PageFlags { flags });
        }
        let found = TimelineId(u32_at(head, 4));
        if found != timeline {
            return Err(Fault::PageTimeline { found, expected: timeline });
        }
        if is_long {
            self.verify_segment(head)?;
        }
        self.version = Some(version);
        match (continues, left) {
            (true, 0) => Err(Fault::PageFlags { flags }),
            (true, left) => Ok(Front::Continuation(left)),
            (false, 0) if overwrites => Ok(Front::Overwrites),
            (false, 0) => Ok(Front::Record),
            (false, _) => Err(Fault::PageFlags { flags }),
        }
    }

    fn verify_segment(&mut self, head: &[u8]) -> Result<(), Fault> {
        let found = u64_at(head, 24);
        let expected = *self.system.get_or_insert(found);
        if found != expected {
            return Err(Fault::System { found, expected });
        }
        let (segment_bytes, page_bytes) = (u32_at(head, 32), u32_at(head, 36));
        if (segment_bytes, page_bytes) != (self.segment_bytes, PAGE_BYTES) {
            return Err(Fault::Sizes { segment_bytes, page_bytes, expected: self.segment_bytes });
        }
        Ok(())
    }
}
