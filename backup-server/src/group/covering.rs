//! Waiting until the cut has all that was written so far, by whichever writer: a bookmark that is set at the primary names
//! a point that has everything up to the command.
//!
//! Each writer that is connected is asked how far it has admitted ([`Message::Sound`]), after the command and so after
//! whatever it is to contain; when the cut covers the answers, it is reached. A writer whose host is not connected cannot be asked:
//! it is named, and nothing waits for it but what depends on it.

use super::floor::Answers;
use super::{Group, Link, Output};
use crate::journal::Standing;
use crate::storage::Storage;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::Message;
use tidelock_protocol::vector::CountVector;

/// One that waits.
#[derive(Debug)]
pub(super) struct Covering {
    id: u64,
    link: Link,
    answers: Answers,
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
        // Also one that speaks version 1: then it is the only writer, and its host has asked.
        for link in self.slots.iter().filter_map(|slot| slot.link) {
            self.outputs.push(Output::Send(link, Message::Sound { id }));
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
            let without = match self.written_by_all(&covering.answers) {
                Some((all, without)) if self.committed().covers(&all) => without,
                _ => return true,
            };
            covered.push(Covered { id: covering.id, without });
            false
        });
        self.covering = waiting;
        covered
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
        for covering in self.covering.iter_mut().filter(|covering| covering.id <= id) {
            covering.answers.insert(writer, (pending.clone(), hlc));
        }
    }

    /// What all that are connected had written, and who is not; `None`: one has not answered.
    fn written_by_all(&self, answers: &Answers) -> Option<(CountVector, Vec<String>)> {
        let (mut all, mut without) = (CountVector::new(), Vec::new());
        for (i, of) in self.journal.state().writers.iter().enumerate() {
            let writer = WriterId(i as u16);
            let is_member = self.manifest.member(writer).is_some();
            if of.standing == Standing::Removed || !is_member {
                continue;
            }
            match answers.get(&writer) {
                Some((said, _)) => {
                    all.merge(said);
                }
                None if self.slots[i].link.is_some() => return None,
                // One that has left has nothing that is not here.
                None if self.slots[i].has_left => {}
                // What has come of it may wait for what never comes.
                None => {
                    without.push(self.manifest.name_of(writer).to_owned());
                    continue;
                }
            }
            all.raise(writer, of.seq);
            if let Some(from) = self.resync_from(writer) {
                all.raise(writer, from.next());
            }
        }
        Some((all, without))
    }
}
