//! The backlog on disk: a bounded journal of the records that the backup does not have yet, on this host.
//!
//! Each admitted record is appended here before its local write is begun, and leaves when the backup has it on stable
//! storage. So an outage may last until `size` is used and memory holds no more than `group.backlog`: what does not fit
//! there is read back from here, in order, when the link has room for it. The stream stays whole, and the backup passes
//! through consistent states only: nothing is compared.
//!
//! The files are written to the page cache and never synced. The kernel keeps them when the daemon is killed, and the next
//! process goes on with them ([`find`]); after a power loss they are not believed (the boot id says so), and the [activity
//! log](crate::activity) says what to compare.
//!
//! Invariants:
//! - Segments hold the records of one run of the stream in seq order without a gap.
//! - A segment goes when the backup has its last record, never before; the one that is written to stays.
//! - What is read back has passed its checksums, and is the record of the seq that was asked for.
//!
//! The bound is kept where records are admitted (the sequencer's limit), as for the backlog in memory.
//! The bytes are in `docs/backlog-on-disk.md`.

mod format;
mod journal;
mod left;
mod meter;
mod reader;
#[cfg(test)]
mod tests;

pub use format::{HEADER_BYTES, Header, Unusable};
pub use journal::{BacklogError, Journal, mark, segment_bytes};
pub use left::{Expected, Left, Redo, Waiting, WhyNot, find};
pub use meter::{Meter, cost_bytes};
pub use reader::Reader;

/// Where a record begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The segment's number, from 1.
    pub segment: u64,
    /// In bytes from its beginning.
    pub offset: u64,
}
