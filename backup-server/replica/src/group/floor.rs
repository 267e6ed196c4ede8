//! What a resyncing writer may have known before its stop (`docs/causality.md`).
//!
//! After an unclean stop a writer's disk, and its guest if that lives on, may hold what followed
//! from other writers' records, and nothing says from which: P of the old run may be lost, and so
//! are the records that carried it. So every other writer is asked how far it has admitted. The
//! question is asked after the new run has attached, and so after the old one has ended: the
//! answers are an upper bound of what the old run can have heard of. The record that ends the copy
//! depends on them, and a resync is in the cut as a whole or not at all.
//!
//! A writer that is resyncing itself has lost the numbers of its old run. Its answer stands for
//! its whole resync: the first record of that, because it is in the cut only with the last. In the HLC form a time
//! above all that are here stands for it.
//!
//! # Lost numbers
//! Somebody may wait for a seq that a writer's old run had given out and that never came here, and
//! that the new run has no reason to reach. The floor names such a seq as far as it is known by
//! then. It may come up later: a packet was late, or a host could not be reached. So each member
//! says with its beacons what it waits for, and the writer is told to give the number out again,
//! for a record that says nothing. That never releases anything too early: C moves past a resync
//! only with all of it. In the HLC form the frontier rises to what is awaited, and writers pass it.

use super::durable::Immediate;
use super::tags::LOST_MAX;
use super::{Group, Link, Now, Output};
use std::collections::BTreeMap;
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Seq, WriterId};
use tidelock_protocol::message::{CopyState, Form, Message, UNASKED};
use tidelock_protocol::vector::CountVector;
use tidelock_storage::Storage;
use tidelock_store::journal::Standing;

/// The questions of one resync.
#[derive(Debug)]
pub(super) struct Floor {
    writer: WriterId,
    /// Answers to this question or a later one count.
    id: u64,
    answers: Answers,
}

/// P of a writer, its own entry as far as it has admitted records.
pub(super) type Answer = (CountVector, Hlc);
/// Of each writer that has answered.
pub(super) type Answers = BTreeMap<WriterId, Answer>;

impl Floor {
    pub(super) fn is_of(&self, writer: WriterId) -> bool {
        self.writer == writer
    }
}

impl<S: Storage> Group<S> {
    /// A writer has attached. If its copy must end with a record that depends on what it may have
    /// known, the others are asked; and it is asked for others that wait for it.
    pub(super) fn sound(&mut self, writer: WriterId, copy: CopyState) {
        self.floors.retain(|floor| floor.writer != writer);
        if matches!(copy.told(), CopyState::Partial | CopyState::Resyncing) {
            self.last_sound += 1;
            let (id, answers) = (self.last_sound, BTreeMap::new());
            self.floors.push(Floor { writer, id, answers });
            (0..self.slots.len()).for_each(|i| self.ask(WriterId(i as u16)));
        } else {
            self.ask(writer);
        }
        self.tell_floors();
    }

    pub(super) fn ask(&mut self, writer: WriterId) {
        let is_waited_for =
            |floor: &Floor| floor.writer != writer && !floor.answers.contains_key(&writer);
        let slot = &self.slots[writer.index()];
        let Some(link) = slot.link.filter(|_| slot.is_of_several) else { return };
        if self.floors.iter().any(is_waited_for)
            || self.is_asked_for(writer)
            || self.is_asked_to_cover(writer)
        {
            self.say_now(link, Immediate::Sound(self.last_sound));
        }
    }

    /// A writer has answered, or says what it waits for.
    pub(super) fn sounded(&mut self, writer: WriterId, id: u64, pending: &CountVector, hlc: Hlc) {
        if id > self.last_sound {
            // An answer to no question of this server.
            return;
        }
        self.has_admitted(writer, pending.get(writer));
        if id == UNASKED {
            return self.awaited(pending, hlc);
        }
        for floor in self.floors.iter_mut().filter(|f| f.writer != writer && f.id <= id) {
            floor.answers.insert(writer, (pending.clone(), hlc));
        }
        self.asked_has_answer(writer, id, pending, hlc);
        self.covering_has_answer(writer, id, pending, hlc);
        self.tell_floors();
    }

    /// Some member waits for this, or soon may.
    pub(super) fn awaited(&mut self, pending: &CountVector, hlc: Hlc) {
        for (writer, seq) in pending.entries() {
            self.ask_for(writer, seq);
        }
        if self.journal.state().form == Form::Hlc && hlc > self.frontier {
            self.frontier = hlc;
            self.tell_committed();
        }
    }

    /// A member was heard. If it is a writer: records of others may wait for what it has lost,
    /// though nobody remembers why.
    pub(super) fn ask_for_awaited(&mut self, link: Link) {
        let writer = self.links().find(|(_, other)| *other == link);
        if let Some((i, _)) = writer {
            let writer = WriterId(i as u16);
            self.ask_for(writer, self.cut.waited_for(writer));
        }
    }

    /// The writer must give out this seq. It may have, and it is on its way: then this does
    /// nothing. Not before a resync's own floor is known, of which this is a part.
    fn ask_for(&mut self, writer: WriterId, seq: Seq) {
        let Some(slot) = self.slots.get(writer.index()) else { return };
        let Some(link) = slot.link.filter(|_| slot.is_of_several) else { return };
        let has_come = self.journal.state().writers[writer.index()].seq >= seq;
        if has_come
            || self.is_out_of_reach(writer, seq)
            || self.floors.iter().any(|floor| floor.writer == writer)
        {
            return;
        }
        let message = Message::Floor { pending: CountVector::of(writer, seq), hlc: Hlc(0) };
        self.say(Output::Send(link, message));
    }

    /// What a writer's answer says, but for entries of others that neither a record here nor their own answers make
    /// possible.
    fn believed<'a>(
        &'a self,
        answers: &'a Answers,
        writer: WriterId,
        said: &'a CountVector,
    ) -> impl Iterator<Item = (WriterId, Seq)> + 'a {
        said.entries().filter(move |(of, seq)| {
            let own = answers.get(of).map_or(Seq::ZERO, |(own, _)| own.get(*of));
            let is_within = seq.0.saturating_sub(own.0) <= LOST_MAX;
            *of == writer || is_within || !self.is_out_of_reach(*of, *seq)
        })
    }

    fn is_out_of_reach(&self, writer: WriterId, seq: Seq) -> bool {
        seq > self.reachable(writer)
    }

    /// Tells each resyncing writer its floor as soon as everybody has answered.
    pub(super) fn tell_floors(&mut self) {
        let mut floors = std::mem::take(&mut self.floors);
        floors.retain(|floor| {
            let Some((pending, hlc)) = self.floor_of(floor) else { return true };
            if let Some(link) = self.slots[floor.writer.index()].link {
                self.say(Output::Send(link, Message::Floor { pending, hlc }));
            }
            false
        });
        self.floors = floors;
        self.tell_asked();
    }

    /// P of a member, if it can be true. If not, its link has ended.
    pub(super) fn plausible_sounded(
        &mut self,
        now: Now,
        link: Link,
        pending: CountVector,
        hlc: Hlc,
    ) -> Option<(CountVector, Hlc)> {
        let have = self.heard_at_most();
        let wall_ms = self.judging_ms(now);
        match self.plausible.sounded(&pending, hlc, &have, wall_ms) {
            Ok(()) => Some((pending, hlc)),
            Err(error) => {
                self.implausible(link, &error);
                None
            }
        }
    }

    fn floor_of(&self, floor: &Floor) -> Option<Answer> {
        let (mut pending, hlc) = self.heard_of(&floor.answers, Some(floor.writer))?;
        // Who has heard of its old run may have forgotten it since, but has said so in records.
        let of = floor.writer;
        pending.raise(of, self.cut.waited_for(of));
        if self.is_out_of_reach(of, pending.get(of)) {
            pending = pending.entries().filter(|(writer, _)| *writer != of).collect();
        }
        Some((pending, hlc))
    }

    /// What all writers but one may have told, if all have answered that must.
    pub(super) fn heard_of(&self, answers: &Answers, but: Option<WriterId>) -> Option<Answer> {
        let state = self.journal.state();
        let (mut pending, mut hlc) = (CountVector::new(), state.last_hlc);
        for (i, of) in state.writers.iter().enumerate() {
            let writer = WriterId(i as u16);
            if Some(writer) == but || of.standing == Standing::Removed {
                continue;
            }
            match answers.get(&writer) {
                Some((said, at)) => {
                    for (of, seq) in self.believed(answers, writer, said) {
                        pending.raise(of, seq);
                    }
                    hlc = hlc.max(*at);
                }
                // Everything that it ever admitted is here.
                None if self.slots[i].has_left => {}
                // It never was here, and so has admitted nothing.
                None if self.manifest.member(writer).is_none() => {}
                None => return None,
            }
            pending.raise(writer, of.seq);
            if let Some(from) = self.resync_from(writer) {
                pending.raise(writer, from.next());
                // It may have answered before its own P has risen so far.
                hlc = hlc.max(state.last_hlc.next());
            }
        }
        Some((pending, hlc))
    }

    /// The last seq before a resync that is not in the cut.
    pub(super) fn resync_from(&self, writer: WriterId) -> Option<Seq> {
        let of = self.journal.state().writers[writer.index()];
        let begun = (of.copy == CopyState::Resyncing).then_some(of.committed);
        begun.or_else(|| self.cut.resync_from(writer))
    }
}
