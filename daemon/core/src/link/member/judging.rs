//! Judges the backup's messages before anything of them is believed. A certificate says who speaks, not that it is true.

use super::standing::Contact;
use super::{Member, MemberError};
use crate::link::queue::QueueError;
use tidelock_protocol::bounds::{self, Implausible, Plausible, SEQ_OF_REMOVED};
use tidelock_protocol::hlc::Hlc;
use tidelock_protocol::ids::{Epoch, Seq};
use tidelock_protocol::message::{Attached, Basis, Message, StreamState};
use tidelock_protocol::sender::SenderError;
use tidelock_protocol::vector::CountVector;

/// Answers that may wait for a backup which asks and does not read.
pub(super) const ANSWERS_MAX: usize = 4096;

impl<T> Member<T> {
    /// Refuses what cannot be true: times ahead of the clock here, counts that nobody can have reached, acknowledgements
    /// of records and beacons that were never sent. `wall_ms`: the wall clock here.
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
        self.is_granted(message)?;
        self.may_be_renewed(message)?;
        self.may_be_durable(message)
    }

    /// A seq that somebody waits for is given out by a record that does nothing, and all before it.
    fn own_entry(&self, message: &Message) -> Result<(), Implausible> {
        let (Message::Floor { pending, .. } | Message::FloorIs { pending, .. }) = message else {
            return Ok(());
        };
        let Some(writer) = self.writer() else { return Ok(()) };
        let admitted = self.sender.as_ref().map_or(Seq::ZERO, |sender| sender.admitted());
        let own = CountVector::of(writer, pending.get(writer));
        let have = CountVector::of(writer, admitted);
        bounds::within_reach("the seq that somebody waits for", &own, &have)
    }

    /// Nothing is durable that was never sent, and C has nothing of this writer that is not durable.
    fn may_be_durable(&self, message: &Message) -> Result<(), MemberError> {
        let (progress, is_known) = match message {
            // The count of an earlier process is not known here.
            Message::Attached(attached) => (&attached.progress, self.contact == Contact::Had),
            Message::Progress(progress) => (progress, self.conversation.is_attached()),
            _ => return Ok(()),
        };
        let Some(writer) = self.writer() else { return Ok(()) };
        let (durable, own) = (progress.durable, progress.committed.get(writer));
        if own > durable && own != SEQ_OF_REMOVED {
            return Err(self.unexpected("cut that has more than is durable"));
        }
        match &self.sender {
            // A backup whose data is of another moment has the stream of another run: this one cannot go on there.
            Some(sender) if is_known && !sender.may_be_durable(durable) => match message {
                Message::Attached(Attached {
                    stream: Some(StreamState { basis: Basis::Everything { .. }, .. }),
                    ..
                }) => {
                    let source = SenderError::Unsent { durable, sent: sender.admitted() };
                    Err(self.broken(QueueError::Stream(source)))
                }
                _ => Err(self.unexpected("acknowledgement of records that were never sent")),
            },
            _ => Ok(()),
        }
    }

    /// Epochs count from 1: no record of another one can be sent.
    fn is_granted(&self, message: &Message) -> Result<(), MemberError> {
        match message {
            Message::Attached(Attached { epoch: Epoch(0), .. }) => {
                Err(self.unexpected("attachment without an epoch"))
            }
            _ => Ok(()),
        }
    }

    /// A lease is the answer to a beacon.
    fn may_be_renewed(&self, message: &Message) -> Result<(), MemberError> {
        match message {
            Message::Lease { sent_at } if Some(*sent_at) > self.beacon_sent_at => {
                Err(self.unexpected("answer to a beacon that was never sent"))
            }
            _ => Ok(()),
        }
    }
}
