//! Judges the backup's messages before anything of them is believed. A certificate says who speaks, not that it is true.

use super::{Member, MemberError, Phase};
use tidelock_protocol::bounds::{self, Implausible, Plausible};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::Message;
use tidelock_protocol::vector::CountVector;

/// Answers that may wait for a backup which asks and does not read.
pub(super) const ANSWERS_MAX: usize = 4096;

impl<T> Member<T> {
    /// Refuses what cannot be true: times ahead of the clock here, counts that nobody can have reached, acknowledgements
    /// of records that were never sent. `wall_ms`: the wall clock here.
    pub fn judge(&self, message: &Message, wall_ms: u64) -> Result<(), MemberError> {
        let judged_with = |known| {
            Plausible::of_backup(bounds::CLOCK_BOUND_OF_BACKUPS_MS, known)
                .message_of_backup(message, wall_ms)
        };
        let judged = judged_with(Hlc(0)).or_else(|error| match error {
            // Times that were given out or taken over before stay true when the clock is put right.
            Implausible::Time { .. } => judged_with(self.keeper.greatest()),
            Implausible::Count { .. } => Err(error),
        });
        judged.and_then(|()| self.own_entry(message)).map_err(|source| {
            MemberError::Implausible { member: self.attach.member.clone(), source }
        })?;
        self.may_be_durable(message)
    }

    /// A seq that somebody waits for is given out by a record that does nothing, and all before it.
    fn own_entry(&self, message: &Message) -> Result<(), Implausible> {
        let (Message::Floor { pending, .. } | Message::FloorIs { pending, .. }) = message else {
            return Ok(());
        };
        let admitted = self.sender.as_ref().map_or(Seq::ZERO, |sender| sender.admitted());
        let own = CountVector::of(self.attach.writer, pending.get(self.attach.writer));
        let is_writer = !self.is_follower();
        let have = CountVector::of(self.attach.writer, admitted);
        if is_writer {
            bounds::within_reach("the seq that somebody waits for", &own, &have)
        } else {
            Ok(())
        }
    }

    fn may_be_durable(&self, message: &Message) -> Result<(), MemberError> {
        let durable = match message {
            Message::Committed { durable, .. } => *durable,
            Message::Progress(progress) if !self.is_follower() => progress.durable,
            _ => return Ok(()),
        };
        match &self.sender {
            Some(sender) if self.phase == Phase::Attached && !sender.may_be_durable(durable) => {
                Err(self.unexpected("acknowledgement of records that were never sent"))
            }
            _ => Ok(()),
        }
    }
}
