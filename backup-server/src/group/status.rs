//! What a group says of itself: from what is durable, never from a flag (rule 6).

use super::{Group, Now};
use crate::storage::Storage;
use serde::{Deserialize, Serialize};
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::message::{CopyState, Mode};

use super::recovery::Recovery;

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
}

/// One writer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterStatus {
    /// Its name.
    pub member: String,
    /// The host that attached it last.
    pub host: Option<String>,
    /// Its mode.
    pub mode: Option<Mode>,
    /// Its last durable seq.
    pub durable: Seq,
    /// Its entry of C.
    pub committed: Seq,
    /// How much of its disks is here.
    pub copy: CopyState,
    /// Since when it is connected, in milliseconds since the Unix epoch.
    pub connected_since_unix_ms: Option<u64>,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupStatus {
    /// Its name.
    pub group: String,
    /// The epoch in force.
    pub epoch: Epoch,
    /// Whether it can be recovered now, and by `recover` alone.
    pub recoverable: bool,
    /// Its writers.
    pub writers: Vec<WriterStatus>,
    /// The recovery that made this site the primary.
    pub recovered: Option<Recovery>,
    /// Until a recovery need not wait any more.
    pub grace_remaining_ms: u64,
    /// Bytes of the journal.
    pub journal_bytes: u64,
    /// Those that are not in the images.
    pub unfolded_bytes: u64,
    /// Segments of the journal.
    pub journal_segments: u64,
    /// Why folding does not work.
    pub fold_error: Option<String>,
    /// Why it does not acknowledge for now.
    pub stalled: Option<String>,
    /// Why it does not work at all.
    pub broken: Option<String>,
}

impl GroupStatus {
    /// Of a group that cannot be opened.
    #[must_use]
    pub fn of_broken(group: &str, reason: &str) -> Self {
        Self {
            group: group.to_owned(),
            epoch: Epoch(0),
            recoverable: false,
            writers: Vec::new(),
            recovered: None,
            grace_remaining_ms: 0,
            journal_bytes: 0,
            unfolded_bytes: 0,
            journal_segments: 0,
            fold_error: None,
            stalled: None,
            broken: Some(reason.to_owned()),
        }
    }
}

impl<S: Storage> Group<S> {
    /// Its status now.
    #[must_use]
    pub fn status(&self, now: Now) -> GroupStatus {
        let state = self.journal.state();
        let writers = self.manifest.writers.iter().enumerate().map(|(i, name)| {
            let writer = WriterId(i as u16);
            let member = self.manifest.member(writer);
            let disks = member.map_or(&[][..], |m| &m.disks).iter();
            let slot = &self.slots[i];
            WriterStatus {
                member: name.clone(),
                host: member.map(|m| m.host.clone()),
                mode: member.map(|m| m.mode),
                durable: self.commit.durable_of(writer),
                committed: self.commit.committed().get(writer),
                copy: self.durable_copies[i],
                connected_since_unix_ms: slot
                    .link
                    .and(slot.attached_at)
                    .map(|attached| attached.unix_ms),
                disks: disks
                    .map(|d| DiskStatus { name: d.name.clone(), size_bytes: d.size_bytes })
                    .collect(),
            }
        });
        GroupStatus {
            group: self.manifest.group.clone(),
            epoch: state.epoch,
            recoverable: self.broken.is_none()
                && self
                    .durable_copies
                    .iter()
                    .all(|copy| matches!(copy, CopyState::Whole | CopyState::Resyncing)),
            writers: writers.collect(),
            recovered: self.recovery(),
            grace_remaining_ms: self.grace.remaining_ms(now.mono),
            journal_bytes: self.journal.bytes(),
            unfolded_bytes: self.unfolded_bytes(),
            journal_segments: self.journal.segments().len() as u64,
            fold_error: self.fold.last_error.clone(),
            stalled: self.stall_reason(),
            broken: self.broken.clone(),
        }
    }
}
