//! Sends tag terms to hosts: the keys of seals, and the greatest reachable seq of each writer
//! (`tidelock_protocol::tag`).

use super::durable::Immediate;
use super::{Group, Link, Now};
use tidelock_protocol::bounds;
use tidelock_protocol::ids::{Epoch, Seq, WriterId};
use tidelock_protocol::tag::{TagKeys, TagTerms};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::journal::Standing;

/// No run has lost more seqs than this: its backlog had no room for them. Who waits for more than that
/// has been misled, and is not to keep a writer busy for ever. No writer admits more between two beacons, either.
pub(super) const LOST_MAX: u64 = 1 << 24;
/// A host says how far it has admitted records. More than this, which take half a tebibyte of a backlog, are not believed.
const BACKLOG_MAX: u64 = 1 << 30;

impl<S: Storage> Group<S> {
    /// A member is told with each answer to a beacon, so that it hears of a new key within a period and a lease.
    pub(super) fn tell_tag_terms(&mut self, now: Now, link: Link) {
        let is_of_several = self.slots.iter().all(|s| s.link != Some(link) || s.is_of_several);
        if is_of_several {
            let terms = self.tag_terms(now);
            self.say_now(link, Immediate::TagTerms(terms));
        }
    }

    fn tag_terms(&self, now: Now) -> TagTerms {
        let keys = TagKeys::at(self.manifest.tag_secret, self.epoch(), now.unix_ms);
        let writers = (0..self.slots.len()).map(|i| WriterId(i as u16));
        let reachable = writers.map(|writer| (writer, self.reachable(writer)));
        TagTerms { keys, reachable: reachable.collect::<CountVector>() }
    }

    /// The greatest seq that any member can depend on of a writer. Whatever is not beyond it, the writer can be made to
    /// give out.
    pub(super) fn reachable(&self, writer: WriterId) -> Seq {
        let of = self.journal.state().writers[writer.index()];
        if self.durable_standing(writer.index()) == Some(Standing::Removed) {
            return bounds::SEQ_OF_REMOVED;
        }
        let (epoch, said) = self.slots[writer.index()].admitted;
        let said = if epoch == self.epoch() { said.0 } else { 0 };
        let admitted = said.min(of.seq.0.saturating_add(BACKLOG_MAX)).max(of.seq.0);
        Seq(admitted.saturating_add(LOST_MAX).min(bounds::SEQ_MAX.0))
    }

    /// A writer's own word of how far it has admitted records.
    pub(super) fn has_admitted(&mut self, writer: WriterId, seq: Seq) {
        let now: Epoch = self.epoch();
        let (epoch, said) = &mut self.slots[writer.index()].admitted;
        *said = if *epoch == now { seq.max(*said) } else { seq };
        *epoch = now;
    }
}
