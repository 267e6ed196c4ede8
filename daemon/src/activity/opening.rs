//! How a run takes over what the run before left. Sans-I/O: a file's bytes in, the change that must
//! be on stable storage before anything is admitted out.

use super::format::{self, Found, Head, Identity, Unusable};
use super::geometry::Geometry;
use super::table::Table;
use super::{ActivityLog, Before};
use tidelock_protocol::ids::{Epoch, Incarnation, Seq};

/// How the run before ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastEnd {
    /// With equal disks, which are on stable storage at both sites.
    Clean {
        /// Its number.
        incarnation: Incarnation,
        /// The epoch in force.
        epoch: Epoch,
        /// Its last record.
        seq: Seq,
    },
    /// In any other way, or there was none.
    Unclean,
}

/// What must be done to the file first.
#[derive(Debug, PartialEq, Eq)]
pub enum FileChange {
    /// Put this in its place, as a whole.
    Replace(Vec<u8>),
    /// Write this block.
    Append {
        /// Where, in bytes.
        offset: u64,
        /// The block.
        block: Vec<u8>,
    },
}

/// A log that is open once the change is on stable storage.
#[derive(Debug)]
pub struct Opening {
    /// The log.
    pub log: ActivityLog,
    /// The change.
    pub change: FileChange,
}

/// Opens the log of a member for the run `incarnation`. `geometry` is that of a new file; a map that
/// must be kept keeps its own.
#[must_use]
pub fn open(
    found: Result<Found, Unusable>,
    geometry: Geometry,
    identity: &Identity,
    incarnation: Incarnation,
    last_end: LastEnd,
) -> Opening {
    let disk_bytes: Vec<u64> = identity.disks.iter().map(|(.., bytes)| *bytes).collect();
    let numbered =
        identity.disks.iter().enumerate().all(|(nth, disk)| usize::from(disk.0.0) == nth);
    assert!(numbered, "disks are numbered in order");
    let new = |head: Head| {
        let file = format::new_file(incarnation.0, &geometry, identity, &head);
        let log = ActivityLog::on(geometry, incarnation.0, head, disk_bytes.clone());
        Opening { log, change: FileChange::Replace(file) }
    };
    let nothing = Head {
        number: 1,
        incarnation,
        confirmed: Incarnation(0),
        epoch: Epoch(0),
        covered: Seq::ZERO,
        everything: true,
    };
    let found = match (found, last_end) {
        (Ok(_), LastEnd::Clean { incarnation: confirmed, epoch, seq }) => {
            return new(Head { confirmed, epoch, covered: seq, everything: false, ..nothing });
        }
        (Ok(found), LastEnd::Unclean) => found,
        // After a clean end, too: a log of other disks says that the backup has never seen one of
        // these, and without a log nobody knows.
        (Err(why), _) => {
            let mut opening = new(nothing);
            opening.log.unusable = Some(why.to_string());
            return opening;
        }
    };
    let Found { id, geometry, head: last, slots } = found;
    let head = Head { number: last.number + 1, incarnation, ..last };
    let mut log = ActivityLog::on(geometry, id, head, disk_bytes.clone());
    log.table = Table::inherited(geometry, disk_bytes, &slots);
    let uncompared = |slot: &u32| log.table.slot(*slot).uncompared_bytes > 0;
    let all: Vec<u32> = (0..geometry.slots).filter(uncompared).collect();
    log.uncompared = all.len() as u32;
    let is_wide = |slot: &u32| log.table.slot(*slot).entry.is_some_and(|e| !e.is_narrow());
    log.uncompared_wide = all.into_iter().filter(is_wide).collect();
    log.before = Some(Before {
        confirmed: last.confirmed,
        latest: last.incarnation,
        epoch: last.epoch,
        covered: last.covered,
        everything: last.everything,
        clean: false,
    });
    let slot = |slot: u32| slots[slot as usize];
    let block = format::transaction(id, &geometry, &head, &[], slot);
    let offset = geometry.place_of(head.number);
    Opening { log, change: FileChange::Append { offset, block } }
}
