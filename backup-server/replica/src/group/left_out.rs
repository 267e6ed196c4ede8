//! What a recovery took of each writer, what it left out, and who held that back.
//!
//! The reasons are found in what waits beyond the cut, which the recovery makes void. So they are
//! kept in `group.json`, for whoever asks again.

use super::{Group, Now};
use crate::manifest::LeftOut;
use crate::text;
use serde::{Deserialize, Serialize};
use tidelock_cut::{Awaited, HeldBack};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::message::CopyState;
use tidelock_storage::Storage;
use tidelock_store::journal::{EpochStart, Standing};

/// What a recovery took of one writer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryWriter {
    /// Its name.
    pub member: String,
    /// Its last seq that counts.
    pub recovered: Seq,
    /// Records in the journal that were left out.
    pub left_out: u64,
    /// Why they were, in words.
    pub why: Option<String>,
    /// Who held them back, if it was another writer.
    pub held_back_by: Option<HeldBackBy>,
    /// Whether its disks are part of the recovery.
    pub is_recovered: bool,
}

/// The writer that held records of another one back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBackBy {
    /// Its name.
    pub member: String,
    /// The host that it ran on.
    pub host: String,
    /// The record that depends on it: the first one left out, or the end of the resync that was.
    pub waiting_seq: Seq,
    /// What that depends on, in the vector form.
    pub needs_seq: Option<Seq>,
    /// In the HLC form: by so much it is later than all that this writer had said.
    pub later_by_ms: Option<u64>,
    /// The last seq of this writer that the backup has.
    pub has_seq: Seq,
    /// And the last one that was recovered.
    pub recovered_seq: Seq,
}

impl HeldBackBy {
    /// In words, for records of which `first` is the first.
    fn explain(&self, first: Seq) -> String {
        let Self { member, host, waiting_seq, needs_seq, has_seq, recovered_seq, .. } = self;
        let which = if *waiting_seq == first {
            format!("the first (seq {first})")
        } else {
            format!("they belong to a resync; its end (seq {waiting_seq})")
        };
        match needs_seq {
            Some(needs) if needs > has_seq => format!(
                "{which} depends on {member}'s {needs}, of which the backup has {has_seq} \
                 (host {host})"
            ),
            Some(needs) => format!(
                "{which} depends on {member}'s {needs}, which is here and left out itself: of \
                 {member} everything up to {recovered_seq} is recovered (host {host})"
            ),
            None => format!(
                "{which} is {} ms later than what {member} had said by then, with its seq \
                 {has_seq} (host {host}): it might have come after something that is missing",
                self.later_by_ms.unwrap_or_default()
            ),
        }
    }
}

impl<S: Storage> Group<S> {
    /// Before the recovery of this epoch: why it leaves out what it does.
    pub(super) fn remember_left_out(
        &mut self,
        epoch: Epoch,
        chosen: Option<Hlc>,
        last_write_unix_ms: Option<u64>,
        now: Now,
    ) {
        let committed = self.commit.committed();
        let writers = (0..self.manifest.writers.len() as u16).map(WriterId);
        let held_back = writers.map(|writer| self.cut.held_back(writer, committed)).collect();
        self.manifest.left_out = Some(LeftOut {
            epoch,
            held_back,
            chosen,
            last_write_unix_ms,
            last_heard_unix_ms: self.last_heard_unix_ms(now),
        });
        // No recovery fails for want of an explanation. If the disk does, the journal will tell.
        let _ = self.manifest.write(&self.storage);
    }

    /// What a recovery took of a writer.
    pub(super) fn taken_of(&self, writer: WriterId, start: &EpochStart) -> RecoveryWriter {
        let of = self.journal.state().writers[writer.index()];
        let recovered = start.cut.get(writer);
        let has = start.journaled.get(writer);
        let left_out = has.0.saturating_sub(recovered.0);
        let is_chosen = self.manifest.chosen(start.epoch).is_some();
        let held_back_by = self.held_back_by(writer, start).filter(|_| left_out > 0 && !is_chosen);
        // Of those that were removed before a recovery has no list.
        let is_newcomer = of.standing == Standing::Removed && start.resyncing.contains(&writer);
        let why = if is_newcomer {
            Some("the end of its initial copy is left out: it is not recovered".to_owned())
        } else if of.standing == Standing::Removed {
            Some("it was removed from the group".to_owned())
        } else if of.copy != CopyState::Whole {
            Some("its initial copy was not complete: it is not recovered".to_owned())
        } else if left_out == 0 {
            None
        } else if let Some(chosen) = self.manifest.chosen(start.epoch) {
            Some(format!(
                "they are later than what was asked for, {} (hlc:{chosen})",
                text::utc_ms(chosen.physical_ms())
            ))
        } else if start.resyncing.contains(&writer) {
            Some(format!(
                "they belong to a resync of host {} that had not ended (the last one here is seq \
                 {has}): the disks were whole before it",
                self.host_of_writer(writer)
            ))
        } else {
            let unknown = "they depend on records of other members that had not arrived";
            Some(
                held_back_by.as_ref().map_or(unknown.to_owned(), |by| by.explain(recovered.next())),
            )
        };
        let is_recovered = self.is_served(writer);
        let member = self.manifest.name_of(writer).to_owned();
        RecoveryWriter { member, recovered, left_out, why, held_back_by, is_recovered }
    }

    fn held_back_by(&self, writer: WriterId, start: &EpochStart) -> Option<HeldBackBy> {
        let known = self.manifest.left_out.as_ref().filter(|known| known.epoch == start.epoch)?;
        let HeldBack { seq, by, awaited } = (*known.held_back.get(writer.index())?)?;
        let (needs_seq, later_by_ms) = match awaited {
            Awaited::Record(needs) => (Some(needs), None),
            Awaited::Time { of, reached } => {
                (None, Some(of.physical_ms().saturating_sub(reached.physical_ms())))
            }
        };
        Some(HeldBackBy {
            member: self.manifest.name_of(by).to_owned(),
            host: self.host_of_writer(by),
            waiting_seq: seq,
            needs_seq,
            later_by_ms,
            has_seq: start.journaled.get(by),
            recovered_seq: start.cut.get(by),
        })
    }

    fn host_of_writer(&self, writer: WriterId) -> String {
        let member = self.manifest.member(writer);
        member.map_or_else(|| "unknown".to_owned(), |member| member.host.clone())
    }
}
