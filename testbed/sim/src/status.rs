//! Status of groups (rule 6): it never claims more than is durable, and agrees with everything that hosts were told.

use crate::failure::{Checked, Checker, check};
use crate::world::World;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::CopyState;
use tidelock_replica::group::{Group, GroupStatus};
use tidelock_storage::memory::Memory;
use tidelock_store::journal::Standing;

impl World {
    /// The status of a group, or of a copy that was opened after a crash.
    pub(crate) fn check_status(&self, group: usize, of: &Group<Memory>) -> Checked {
        let status = of.status(self.backup_now());
        let slot = &self.backup.groups[group];
        let is_of = |what: &'static str, holds: bool| {
            check(holds, Checker::NoFalseSync, || format!("group {group}: {what}: {status:?}"))
        };
        let json = serde_json::to_string(&status).expect("plain data");
        let again = serde_json::from_str::<GroupStatus>(&json).ok();
        is_of("it is told as something else", again.as_ref() == Some(&status))?;
        is_of("it is open", status.broken.is_none() && status.id.is_some())?;
        is_of(
            "nothing was damaged",
            status.damaged.is_empty() && status.latest_damaged.is_empty(),
        )?;
        is_of("nothing was damaged", status.scrub.damaged.is_none())?;
        is_of("the epoch", status.epoch == of.epoch())?;
        let (stored, compressed) = (status.journal_stored_bytes, &status.compressed);
        let fits = status.unfolded_bytes <= status.journal_bytes
            && compressed.bytes <= status.journal_bytes
            && compressed.stored_bytes <= stored
            && compressed.segments <= status.journal_segments
            && status.scrub.segments_left <= status.journal_segments
            && status.journal_segments > 0;
        is_of("parts of the journal are no larger than all of it", fits)?;
        let past = &status.past;
        let window = past.oldest <= past.newest && past.oldest_unix_ms <= past.newest_unix_ms;
        is_of("the window", window && past.seen_ms <= past.newest_unix_ms)?;
        // The note of a recovery may be on its way to the disk.
        let recovered = of.state().recovered();
        let is_right = match recovered {
            Some(start) if slot.recovered.is_none() => status.cut == start.cut,
            _ => status.cut.covers(&slot.told),
        };
        check(is_right, Checker::OutputCommit, || {
            format!("group {group}: C was told as {}: {status:?}", slot.told)
        })?;
        let is_recovered = recovered.is_some() || slot.recovered.is_some();
        let mut beyond = 0;
        for (nth, writer) in status.writers.iter().enumerate() {
            let id = WriterId(nth as u16);
            let (durable, in_cut) = (writer.durable, status.cut.get(id));
            beyond += durable.0.saturating_sub(in_cut.0);
            is_of("C of a writer is durable", writer.committed.max(in_cut) <= durable)?;
            if is_recovered {
                continue;
            }
            let told = slot.told_durable.get(id);
            is_of("acknowledged records are durable", told <= durable)?;
            is_of("durable records have arrived", durable <= slot.contiguous.get(id))?;
            let vm = self.plan.groups[group].vms.get(nth);
            let may_be_whole = writer.copy != CopyState::Whole
                || writer.standing == Standing::Removed
                || vm.is_none_or(|vm| self.vms[*vm].oracle.is_whole_at(durable));
            is_of("a whole copy is one", may_be_whole)?;
        }
        is_of("records beyond the cut", is_recovered || status.beyond_the_cut <= beyond)?;
        let is_there = |vm| self.is_whole(vm, &status.cut) || self.is_left_out(vm, &status.cut);
        let is_whole = slot.shown || self.plan.groups[group].writers().all(is_there);
        is_of("recoverable groups are whole", is_recovered || !status.recoverable || is_whole)
    }
}
