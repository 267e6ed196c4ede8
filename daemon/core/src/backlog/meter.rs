//! How much of a backlog is in memory, and whether some of it is on disk only: the owner loop decides by it where a
//! record goes, the link keeps it.

use crate::sequencer::RECORD_OVERHEAD_BYTES;
use std::sync::atomic::{AtomicU64, Ordering};
use tidelock_protocol::record::Record;

/// Shared by the owner loop and the link.
#[derive(Debug)]
pub struct Meter {
    limit_bytes: u64,
    held_bytes: AtomicU64,
    /// Records that are on disk and not in memory.
    spilled: AtomicU64,
}

/// What a record costs memory.
#[must_use]
pub fn cost_bytes(record: &Record) -> u64 {
    record.payload().map_or(0, |payload| payload.data().len() as u64) + RECORD_OVERHEAD_BYTES
}

impl Meter {
    /// With this much memory.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, held_bytes: AtomicU64::new(0), spilled: AtomicU64::new(0) }
    }

    /// The owner: whether a record may stay in memory. Not while others before it are on disk only: the
    /// order would be lost, and the link would have no room to bring them back.
    #[must_use]
    pub fn may_hold(&self, cost_bytes: u64) -> bool {
        self.spilled.load(Ordering::SeqCst) == 0 && self.has_room(cost_bytes)
    }

    /// Whether memory has room for it.
    #[must_use]
    pub fn has_room(&self, cost_bytes: u64) -> bool {
        self.held_bytes.load(Ordering::SeqCst) + cost_bytes <= self.limit_bytes
    }

    /// A record is in memory.
    pub fn hold(&self, cost_bytes: u64) {
        self.held_bytes.fetch_add(cost_bytes, Ordering::SeqCst);
    }

    /// The backup has records that were.
    pub fn release(&self, cost_bytes: u64) {
        self.held_bytes.fetch_sub(cost_bytes, Ordering::SeqCst);
    }

    /// So many records more are on disk only.
    pub fn spill(&self, records: u64) {
        self.spilled.fetch_add(records, Ordering::SeqCst);
    }

    /// So many are not any more.
    pub fn unspill(&self, records: u64) {
        self.spilled.fetch_sub(records, Ordering::SeqCst);
    }

    /// Records that are on disk only.
    #[must_use]
    pub fn spilled(&self) -> u64 {
        self.spilled.load(Ordering::SeqCst)
    }

    /// Bytes in memory.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.load(Ordering::SeqCst)
    }
}
