//! How a run takes over what the run before left. Sans-I/O: a file's bytes in, the change that must
//! be on stable storage before anything is admitted out.

use super::ActivityLog;
use super::comparing::Before;
use super::format::{self, Found, Head, Identity, Unusable};
use super::geometry::{Entry, Geometry};
use super::table::Table;
use tidelock_protocol::ids::{DiskId, Epoch, Incarnation, Seq};

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
    Unclean {
        /// The runs that the log may be of: that one, and the one whose log it had taken over.
        runs: [Incarnation; 2],
    },
}

impl LastEnd {
    /// No log is believed.
    pub const UNKNOWN: Self = Self::Unclean { runs: [Incarnation(0); 2] };
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
        age: 0,
    };
    let is_removed = |((.., now), had): (&(DiskId, String, u64), &u64)| now < had;
    let lacks_one = |found: &Found| identity.disks.iter().zip(&found.disk_bytes).any(is_removed);
    // A log is believed if that run has written it, or one that had taken it over. A run that began without a log has
    // everything to compare, and may have been killed before it was attached.
    let is_of_last = |Head { incarnation, confirmed, .. }: &Head| match last_end {
        LastEnd::Clean { incarnation: last, .. } => [incarnation, confirmed].contains(&&last),
        LastEnd::Unclean { runs } => runs.contains(confirmed) && *confirmed != Incarnation(0),
    };
    let found = match (found, last_end) {
        (Ok(found), _) if !is_of_last(&found.head) => {
            let mut opening = new(nothing);
            opening.log.unusable = Some(Unusable::Foreign("run of the daemon").to_string());
            return opening;
        }
        (Ok(_), LastEnd::Clean { incarnation: confirmed, epoch, seq }) => {
            return new(Head { confirmed, epoch, covered: seq, everything: false, ..nothing });
        }
        (Ok(found), LastEnd::Unclean { .. }) if !lacks_one(&found) => found,
        (Ok(_), LastEnd::Unclean { .. }) => {
            let mut opening = new(nothing);
            let why = Unusable::Foreign(format::OTHER_DISKS);
            opening.log.unusable = Some(why.to_string());
            return opening;
        }
        // After a clean end, too: a log of other disks says that the backup has never seen one of
        // these, and without a log nobody knows.
        (Err(why), _) => {
            let mut opening = new(nothing);
            opening.log.unusable = Some(why.to_string());
            return opening;
        }
    };
    let Found { id, geometry, head: last, slots, .. } = found;
    let head = Head { number: last.number + 1, incarnation, ..last };
    let mut log = ActivityLog::on(geometry, id, head, disk_bytes);
    log.inherit(&slots);
    log.before = Some(Before::of(&last));
    let slot = |slot: u32| slots[slot as usize];
    let block = format::transaction(id, &geometry, &head, &[], slot);
    let offset = geometry.place_of(head.number);
    Opening { log, change: FileChange::Append { offset, block } }
}

impl ActivityLog {
    /// Takes over a map, of which nothing has been compared.
    fn inherit(&mut self, slots: &[Option<Entry>]) {
        self.table = Table::inherited(self.geometry, self.disk_bytes.clone(), slots);
        let uncompared = |slot: &u32| self.table.slot(*slot).uncompared_bytes > 0;
        let all: Vec<u32> = (0..self.geometry.slots).filter(uncompared).collect();
        self.uncompared = all.len() as u32;
        let is_wide = |slot: &u32| self.table.slot(*slot).entry.is_some_and(|e| !e.is_narrow());
        self.uncompared_wide = all.into_iter().filter(is_wide).collect();
    }
}

impl Before {
    pub(super) fn of(head: &Head) -> Self {
        let Head { epoch, covered, everything, .. } = *head;
        Self { epoch, covered, everything }
    }
}
