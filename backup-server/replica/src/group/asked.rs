//! Members of whom it was not seen what their guests have heard (`docs/causality.md`): the host has
//! started after the guest, has lost what it knew, or comes from mode async, in which packets reach others
//! without saying what they depend on.
//!
//! Such a member asks for the most that it can be: all that any writer has admitted by now. Every
//! writer is asked ([`floor`](super::floor)), after the question and so after whatever the guest has heard. Until all
//! have answered the member is held by its host.

use super::floor::Answers;
use super::{Group, Link, Output};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::Message;
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;

/// A question that has not been answered.
#[derive(Debug)]
pub(super) struct Asked {
    link: Link,
    mark: u64,
    /// All members are to hear the answer.
    everyone: bool,
    /// Answers of writers to this question of ours or a later one count.
    id: u64,
    answers: Answers,
}

impl<S: Storage> Group<S> {
    /// A member asks. An older question of it is forgotten.
    pub(super) fn ask_floor(&mut self, link: Link, mark: u64, everyone: bool) {
        let was_for_everyone = self.asked.iter().any(|a| a.link == link && a.everyone);
        self.asked.retain(|asked| asked.link != link);
        self.last_sound += 1;
        let (id, answers) = (self.last_sound, Answers::new());
        let everyone = everyone || was_for_everyone;
        self.asked.push(Asked { link, mark, everyone, id, answers });
        (0..self.slots.len()).for_each(|i| self.ask(WriterId(i as u16)));
        self.tell_asked();
    }

    pub(super) fn is_asked_for(&self, writer: WriterId) -> bool {
        self.asked.iter().any(|asked| !asked.answers.contains_key(&writer))
    }

    /// A writer has answered.
    pub(super) fn asked_has_answer(
        &mut self,
        writer: WriterId,
        id: u64,
        pending: &CountVector,
        hlc: Hlc,
    ) {
        for asked in self.asked.iter_mut().filter(|asked| asked.id <= id) {
            asked.answers.insert(writer, (pending.clone(), hlc));
        }
    }

    /// A member has attached: it may have heard, while its daemon was away, of one that was in mode async.
    pub(super) fn tell_for_everyone(&mut self, link: Link) {
        if let Some((pending, hlc)) = self.for_everyone.clone() {
            self.say(Output::Send(link, Message::FloorIs { mark: 0, pending, hlc }));
        }
    }

    /// Tells whoever has asked, as soon as every writer has answered.
    pub(super) fn tell_asked(&mut self) {
        let links = self.all_links();
        let mut waiting = std::mem::take(&mut self.asked);
        // Who comes back asks again.
        waiting.retain(|asked| links.contains(&asked.link));
        waiting.retain(|asked| {
            let Some((pending, hlc)) = self.heard_of(&asked.answers, None) else { return true };
            if asked.everyone {
                let (all, newest) = self.for_everyone.get_or_insert_default();
                all.merge(&pending);
                *newest = hlc.max(*newest);
            }
            let others = links.iter().filter(|link| asked.everyone && **link != asked.link);
            for (link, mark) in others.map(|link| (*link, 0)).chain([(asked.link, asked.mark)]) {
                let pending = pending.clone();
                self.say(Output::Send(link, Message::FloorIs { mark, pending, hlc }));
            }
            false
        });
        self.asked = waiting;
    }
}
