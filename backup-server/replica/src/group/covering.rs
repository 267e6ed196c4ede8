//! Waiting until the cut has all that was written so far, by whichever writer: a bookmark that is set at the primary names
//! a point that has everything up to the command.
//!
//! Each writer that is connected is asked how far it has admitted ([`Message::Sound`]), after the command and so after
//! whatever it is to contain; when the cut covers the answers, it is reached. What is durable alone would not do: a record that
//! waits for another writer's is in no point yet. In the HLC form the cut covers an answer when the watermark has reached its time,
//! and the frontier rises to that, so that writers which have nothing to write pass it.
//!
//! A writer whose host is not connected cannot be asked: it is named, and nothing waits for it but what depends on it. In the HLC
//! form that is all that was written after it was heard last: then whoever has asked waits until it is back or removed, or
//! gives up.

use super::durable::Immediate;
use super::floor::Answers;
use super::{Group, Link};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::Form;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::journal::Standing;

/// One that waits.
#[derive(Debug)]
pub(super) struct Covering {
    id: u64,
    link: Link,
    answers: Answers,
}

/// What is to be in the cut.
#[derive(Debug, Default)]
struct Written {
    /// In the HLC form: of writers that resync alone, which are in the cut with all of it.
    seqs: CountVector,
    /// In the HLC form: it may end with idle records, which need not be in the cut.
    durable: CountVector,
    /// In the HLC form. 0 of who is alone in its group.
    hlc: Hlc,
    without: Vec<String>,
}

/// The cut has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Covered {
    /// What [`Group::cover`] returned.
    pub id: u64,
    /// Writers that were not connected.
    pub without: Vec<String>,
}

impl<S: Storage> Group<S> {
    /// Asks every writer how far it is, on behalf of an attached member. `None`: it is not attached.
    pub fn cover(&mut self, link: Link) -> Option<u64> {
        if !self.all_links().contains(&link) {
            return None;
        }
        self.last_sound += 1;
        let id = self.last_sound;
        self.covering.push(Covering { id, link, answers: Answers::new() });
        for (_, link) in self.links().collect::<Vec<_>>() {
            self.say_now(link, Immediate::Sound(id));
        }
        Some(id)
    }

    /// Those that wait no longer. Who has gone is forgotten.
    pub fn take_covered(&mut self) -> Vec<Covered> {
        let links = self.all_links();
        let mut waiting = std::mem::take(&mut self.covering);
        waiting.retain(|covering| links.contains(&covering.link));
        let mut covered = Vec::new();
        waiting.retain(|covering| {
            let written = self.written_by_all(&covering.answers);
            let Some(written) = written.filter(|written| self.is_in_the_cut(written)) else {
                return true;
            };
            covered.push(Covered { id: covering.id, without: written.without });
            false
        });
        self.covering = waiting;
        covered
    }

    fn is_in_the_cut(&self, Written { seqs, durable, hlc, .. }: &Written) -> bool {
        let is_durable = self.committed().covers(durable);
        is_durable && self.told().covers(seqs) && self.cut.watermark() >= *hlc
    }

    pub(super) fn is_asked_to_cover(&self, writer: WriterId) -> bool {
        self.covering.iter().any(|covering| !covering.answers.contains_key(&writer))
    }

    /// A writer has answered.
    pub(super) fn covering_has_answer(
        &mut self,
        writer: WriterId,
        id: u64,
        pending: &CountVector,
        hlc: Hlc,
    ) {
        let mut asked = false;
        for covering in self.covering.iter_mut().filter(|covering| covering.id <= id) {
            covering.answers.insert(writer, (pending.clone(), hlc));
            asked = true;
        }
        if asked {
            self.awaited(&CountVector::new(), hlc);
        }
    }

    /// What all that are connected had written, and who is not; `None`: one has not answered.
    fn written_by_all(&self, answers: &Answers) -> Option<Written> {
        let state = self.journal.state();
        let (mut written, has_times) = (Written::default(), state.form == Form::Hlc);
        for (i, of) in state.writers.iter().enumerate() {
            let writer = WriterId(i as u16);
            let is_member = self.manifest.member(writer).is_some();
            if of.standing == Standing::Removed || !is_member {
                continue;
            }
            match answers.get(&writer) {
                Some((said, hlc)) if has_times => {
                    written.durable.raise(writer, said.get(writer));
                    written.hlc = written.hlc.max(*hlc);
                }
                // It has what had come from it by then. What came later need not be there.
                Some((said, _)) => drop(written.seqs.merge(said)),
                None if self.slots[i].link.is_some() => return None,
                // It has left when the cut had all that it wrote. The idle record that it has ended with may be beyond.
                None if self.slots[i].has_left && has_times => {}
                // One that has left has nothing that is not here.
                None if self.slots[i].has_left => drop(written.seqs.raise(writer, of.seq)),
                // What has come of it may wait for what never comes.
                None => {
                    written.without.push(self.manifest.name_of(writer).to_owned());
                    continue;
                }
            }
            if let Some(from) = self.resync_from(writer) {
                written.seqs.raise(writer, from.next());
            }
        }
        Some(written)
    }
}
