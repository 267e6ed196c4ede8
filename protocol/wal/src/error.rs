//! Faults of a log.

use crate::item::Xid;
use crate::lsn::Lsn;
use crate::page::{PAGE_BYTES, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN};
use crate::record::RECORD_BYTES_MAX;
use crate::timeline::TimelineId;

/// The log is not what PostgreSQL writes, or not the log that was asked for. Nothing from the faulty record on was
/// handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("log at {lsn}: {fault}")]
pub struct WalError {
    /// Begin of the page or record at which the fault was found.
    pub lsn: Lsn,
    /// The fault.
    pub fault: Fault,
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The caller's size of segments cannot be one.
    #[error(
        "segments of {bytes} bytes: possible are powers of two, {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
    )]
    SegmentSize {
        /// Size that the caller gave.
        bytes: u32,
    },
    /// The caller's start cannot be one.
    #[error(
        "no record and no page can begin here: begin at the end of a record, or at a multiple of {PAGE_BYTES}"
    )]
    Start,
    /// The page was written by a version that is not read here, or is no page of a log.
    #[error(
        "page with magic {magic:04X}: not the log of PostgreSQL 15, 16 or 17, or the stream lost its place"
    )]
    Magic {
        /// Magic on the page.
        magic: u16,
    },
    /// The page was written by another version than the pages before it.
    #[error(
        "page with magic {magic:04X} behind pages with {before:04X}: one log has one version of PostgreSQL"
    )]
    VersionChanged {
        /// Magic on the page.
        magic: u16,
        /// Magic of the pages before.
        before: u16,
    },
    /// The flags of the page do not exist, or not here.
    #[error("page with flags {flags:04X}, which cannot be here: the page is damaged")]
    PageFlags {
        /// Flags of the page.
        flags: u16,
    },
    /// The page belongs elsewhere.
    #[error(
        "page with address {address}: a reused segment file's old content, or the stream lost its place"
    )]
    PageAddress {
        /// Address on the page.
        address: Lsn,
    },
    /// The page was written by a timeline that does not reach here.
    #[error(
        "page of timeline {found} where the log is timeline {expected}'s: the server has another history"
    )]
    PageTimeline {
        /// Timeline of the page.
        found: TimelineId,
        /// Timeline by the history.
        expected: TimelineId,
    },
    /// The segment belongs to another database system.
    #[error("segment of system {found}, not of {expected}: this is the log of another database")]
    System {
        /// System in the segment's head.
        found: u64,
        /// System of the segments before, or that the caller demands.
        expected: u64,
    },
    /// The segment says that segments or pages have another size.
    #[error(
        "segment of {segment_bytes} bytes with pages of {page_bytes}: expected {expected}, and {PAGE_BYTES}"
    )]
    Sizes {
        /// Size of segments in the head.
        segment_bytes: u32,
        /// Size of pages in the head.
        page_bytes: u32,
        /// The caller's size of segments.
        expected: u32,
    },
    /// The page and the record that reaches into it disagree on how much of the record is left.
    #[error(
        "page that goes on with {found} bytes of a record, of which {expected} are left: the page is damaged"
    )]
    Continuation {
        /// Number on the page; 0 if the page does not go on with a record.
        found: u32,
        /// Number by the record's length.
        expected: u32,
    },
    /// The record's length cannot be one. Zero: the log ends here.
    #[error(
        "record of {bytes} bytes, possible are 24 to {RECORD_BYTES_MAX}: the log ends here, or is damaged"
    )]
    RecordLength {
        /// Length in the record's head.
        bytes: u32,
    },
    /// The record is not linked to the record before it.
    #[error(
        "record linked to {found}, where the record before is at {expected}: the log ends here, or is damaged"
    )]
    Link {
        /// Begin of the record before, by this one.
        found: Lsn,
        /// Begin of the record before.
        expected: Lsn,
    },
    /// The first record that is read is linked to one that is not before it.
    #[error("record linked to {found}, which is not before it: the record is damaged")]
    LinkForwards {
        /// Begin of the record before, by this one.
        found: Lsn,
    },
    /// The checksum of the record is wrong.
    #[error("record with checksum {found:08X}, its bytes have {computed:08X}: the log is damaged")]
    Checksum {
        /// Checksum in the record's head.
        found: u32,
        /// Checksum of the record's bytes.
        computed: u32,
    },
    /// The record is whole, and has other content than its head says.
    #[error(
        "record of transaction {xid} whose content is none that PostgreSQL 15, 16 or 17 writes"
    )]
    Content {
        /// Transaction by the record's head.
        xid: Xid,
    },
    /// The record names a timeline that does not reach here.
    #[error(
        "record of timeline {found} where the log is timeline {expected}'s: the server has another history"
    )]
    RecordTimeline {
        /// Timeline in the record.
        found: TimelineId,
        /// Timeline by the history.
        expected: TimelineId,
    },
    /// A record was given up, and the record in its place names another one.
    #[error(
        "record in place of one at {found}, where the one at {expected} was given up: the log is damaged"
    )]
    Overwrites {
        /// Begin of the record that was given up, by the one in its place.
        found: Lsn,
        /// Begin of the record that was given up.
        expected: Lsn,
    },
    /// A record was given up, and another kind of record stands in its place; or none was given up.
    #[error(
        "a record given up without one in its place that says so, or the reverse: the log is damaged"
    )]
    NotOverwritten,
    /// The rest of a segment after a switch is not zeroes.
    #[error(
        "bytes behind the switch to the next segment: the rest of a segment is zeroes, the log is damaged"
    )]
    BehindSwitch,
}

impl Fault {
    /// A stable name for logs and metrics.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::SegmentSize { .. } => "segment-size",
            Self::Start => "start",
            Self::Magic { .. } => "magic",
            Self::VersionChanged { .. } => "version-changed",
            Self::PageFlags { .. } => "page-flags",
            Self::PageAddress { .. } => "page-address",
            Self::PageTimeline { .. } => "page-timeline",
            Self::System { .. } => "system",
            Self::Sizes { .. } => "sizes",
            Self::Continuation { .. } => "continuation",
            Self::RecordLength { .. } => "record-length",
            Self::Link { .. } => "link",
            Self::LinkForwards { .. } => "link-forwards",
            Self::Checksum { .. } => "checksum",
            Self::Content { .. } => "content",
            Self::RecordTimeline { .. } => "record-timeline",
            Self::Overwrites { .. } => "overwrites",
            Self::NotOverwritten => "not-overwritten",
            Self::BehindSwitch => "behind-switch",
        }
    }
}
