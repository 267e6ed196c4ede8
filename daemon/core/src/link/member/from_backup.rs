//! What the backup tells a member: where its stream stands, what is committed, and whether it is wanted.

use super::super::Refusal;
use super::super::port::{AttachedStream, FromLink};
use super::super::queue::Queue;
use super::judging::ANSWERS_MAX;
use super::standing::{Contact, Conversation, LeaseTalk, Recording, Refusing, Switching};
use super::{Member, MemberError};
use tidelock_protocol::ids::{Epoch, GroupId, MonoNanos, Seq};
use tidelock_protocol::lease::HoldReason;
use tidelock_protocol::message::{
    Attached, Basis, CopyState, Message, Mode, Progress, RefusalKind, StreamState, Writing,
};

/// A backup can stop and begin to acknowledge as often as it likes: a change is logged once in so long.
const STALL_SAID_EVERY_NS: u64 = 10_000_000_000;

/// The log lines about a backup that acknowledges or does not.
#[derive(Debug, Default)]
pub(super) struct StallLog {
    is_stalled: bool,
    said_at: Option<MonoNanos>,
}

impl StallLog {
    /// `true` if there is news, and it may be logged now. It counts as logged then; else the next beacon asks again.
    fn may_say(&mut self, is_stalled: bool, now: MonoNanos) -> bool {
        let is_late = |at: MonoNanos| now.since_ns(at) >= STALL_SAID_EVERY_NS;
        let may = is_stalled != self.is_stalled && self.said_at.is_none_or(is_late);
        if may {
            (self.is_stalled, self.said_at) = (is_stalled, Some(now));
        }
        may
    }
}

impl<T> Member<T> {
    /// A message of the backup for this member.
    pub fn receive(&mut self, message: Message, now: MonoNanos) -> Result<(), MemberError> {
        match (message, self.conversation) {
            (
                Message::Attached(attached),
                Conversation::Attaching | Conversation::Attached { .. },
            ) if self.awaits(&attached) => self.attached(attached, now),
            (Message::Progress(progress), Conversation::Attached { .. }) => {
                self.progress(&progress, now)
            }
            (Message::Sound { id }, Conversation::Attached { .. }) => {
                self.has_room_for_answer()?;
                self.sounded(id);
                Ok(())
            }
            (Message::Floor { pending, hlc }, Conversation::Attached { .. }) => {
                self.port.send((self.to_owner)(FromLink::Floor { pending, hlc }));
                Ok(())
            }
            (Message::FloorIs { mark, pending, hlc }, Conversation::Attached { .. }) => {
                // Of an older question: then it is asked again.
                if self.gate.awaits_floor() == Some(mark) {
                    self.floor_for_everyone = false;
                }
                self.gate.floor(mark, &pending, hlc);
                Ok(())
            }
            (Message::TagTerms(terms), Conversation::Attached { .. }) => {
                self.gate.tag_terms(&terms);
                Ok(())
            }
            (Message::Lease { sent_at }, Conversation::Attached { .. }) => {
                self.lease_talk.leased();
                self.gate.lease_renewed(sent_at);
                self.stats.lease_renewed(sent_at, now);
                Ok(())
            }
            (Message::DigestResult { disk, offset, equal }, Conversation::Attached { .. }) => {
                self.port.send((self.to_owner)(FromLink::Digest { disk, offset, equal }));
                Ok(())
            }
            (Message::PolicyKept(kept), Conversation::Attached { .. }) => {
                // Also if it is not what was said: then it has no room, and the group holds.
                self.lease_talk.policy_heard();
                let is_kept = kept.after_ms == self.policy.after_ms
                    && (kept.mode == Mode::Async || self.policy.mode != Mode::Async);
                self.stats.set_policy_kept(is_kept);
                Ok(())
            }
            (Message::ServesUnreachedKept { serves }, Conversation::Attached { .. }) => {
                if let Err(error) = self.keeper.keep_serves_unreached(serves) {
                    let member = &self.attach.member;
                    tracing::error!(
                        member, %error,
                        "that the backup knows who serves without it cannot be put on record"
                    );
                }
                Ok(())
            }
            (Message::Unheard, Conversation::Attached { .. }) => {
                // Who has been here all the time was told what there is to be told.
                if self.lease_talk != LeaseTalk::Had {
                    self.has_room_for_answer()?;
                    self.gate.mark_incomplete();
                    self.ask_floor();
                }
                Ok(())
            }
            (Message::Bookmarked { id, outcome }, Conversation::Attached { .. }) => {
                self.bookmarks.answered(id, outcome.map(|point| *point));
                Ok(())
            }
            (Message::LeaseGivenUp { committed }, Conversation::Attached { .. })
                if matches!(self.switching, Switching::GivesUp { .. }) =>
            {
                if let Switching::GivesUp { answer } = &mut self.switching
                    && let Some(answer) = answer.take()
                {
                    // Nobody may wait for it any more.
                    let _ = answer.send(committed);
                }
                Ok(())
            }
            (Message::SwitchAwaits { members }, Conversation::Attached { .. }) => {
                // Nobody may ask any more.
                if let Switching::Prepares { agreement, .. } = &self.switching {
                    agreement.told(&self.attach.member, members);
                }
                Ok(())
            }
            (Message::Stalled { reason }, Conversation::Attached { wants_lease, .. }) => {
                let is_stalled = reason.is_some();
                self.conversation = Conversation::Attached { wants_lease, is_stalled };
                self.stats.set_stalled(reason);
                self.say_stall(now);
                Ok(())
            }
            (
                Message::Refused { kind, reason },
                Conversation::Attaching | Conversation::Attached { .. },
            ) => {
                self.refused(Refusal { kind, reason });
                Ok(())
            }
            (_, Conversation::Refused { .. }) => Ok(()),
            _ => Err(self.unexpected("message")),
        }
    }

    /// Logs whether the backup acknowledges, if that has changed since it was logged last.
    pub(super) fn say_stall(&mut self, now: MonoNanos) {
        let is_stalled = self.conversation.is_stalled();
        if !self.conversation.is_attached() || !self.stall_log.may_say(is_stalled, now) {
            return;
        }
        let member = &self.attach.member;
        match self.stats.stalled() {
            Some(reason) => tracing::warn!(member, reason, "the backup has stopped acknowledging"),
            None => tracing::info!(member, "the backup goes on"),
        }
    }

    /// A backup that asks and does not read takes bounded memory.
    fn has_room_for_answer(&self) -> Result<(), MemberError> {
        match self.answers.len() < ANSWERS_MAX {
            true => Ok(()),
            false => Err(self.unexpected("question, while it reads no answers")),
        }
    }

    /// True if this answers a question: to be attached, or on the same connection to compare. A writer has a stream, and
    /// nobody else.
    fn awaits(&self, attached: &Attached) -> bool {
        let is_asked = self.conversation == Conversation::Attaching
            || self.recording == Recording::AsksToCompare;
        is_asked && attached.stream.is_some() == self.writer().is_some()
    }

    fn attached(&mut self, attached: Attached, now: MonoNanos) -> Result<(), MemberError> {
        let Attached { group_id, epoch, progress, stream } = attached;
        if !self.is_same_group(group_id) {
            return Ok(());
        }
        let compares = self.recording == Recording::AsksToCompare;
        if compares && stream.as_ref().is_some_and(|stream| stream.copy == CopyState::Whole) {
            return Err(self.unexpected("whole copy"));
        }
        self.keep_granted(epoch, group_id, stream.as_ref().map(|stream| &stream.basis))?;
        let first = match &stream {
            Some(stream) => self.stream_goes_on(progress.durable, stream, compares)?,
            None => false,
        };
        // A group that was opened anew since it stalled does not say that it goes on; one that
        // is still stalled says so right after this.
        self.conversation = Conversation::JUST_ATTACHED;
        (self.refusing, self.contact) = (Refusing::No, Contact::Had);
        self.stats.set_stalled(None);
        self.heard_progress(&progress, now);
        if let Some(stream) = stream {
            let attached = AttachedStream { epoch, durable: progress.durable, stream };
            let message = FromLink::Attached { attached, first, compares };
            self.port.send((self.to_owner)(message));
            self.answers.push_back(Message::Begun);
            self.answers.push_back(Message::Logged(self.log));
        }
        self.say_policy();
        self.ask_floor();
        self.ask_for_bookmarks();
        self.say_switch();
        Ok(())
    }

    /// Before anything is sent or admitted: the backup goes by the run before until it is told that this one is here.
    /// `basis`: what it has attached a writer by.
    fn keep_granted(
        &mut self,
        epoch: Epoch,
        group_id: GroupId,
        basis: Option<&Basis>,
    ) -> Result<(), MemberError> {
        let run = self.attach.writing().map(Writing::run);
        let kept = match (run, basis) {
            (Some(run), Some(basis)) => self.keeper.begin(run, epoch, group_id, basis),
            _ => self.keeper.keep(epoch, group_id),
        };
        kept.map_err(|source| MemberError::Epoch { member: self.attach.member.clone(), source })?;
        (self.attach.epoch, self.attach.group_id) = (epoch, Some(group_id));
        if let Some(writing) = self.attach.writing_mut() {
            writing.before = run;
        }
        Ok(())
    }

    /// The stream goes on after what is durable, or begins there. Returns whether it begins.
    fn stream_goes_on(
        &mut self,
        durable: Seq,
        stream: &StreamState,
        compares: bool,
    ) -> Result<bool, MemberError> {
        if self.contact != Contact::Had && stream.basis != Basis::Continues {
            // The backup has not accepted the stream that an earlier process left on disk: nothing of it is sent.
            self.sender = None;
        }
        // Before the first lease: nothing leaves that may depend on what the backup lacks.
        let must_compare = stream.copy == CopyState::Resyncing
            || (self.is_of_several() && stream.copy.told() == CopyState::Partial);
        if must_compare || (self.sender.is_none() && self.held_to.is_some()) {
            self.gate.hold(HoldReason::Gap, true);
            // The end of the comparison lets all go.
            self.let_gate_go(Seq(u64::MAX));
        }
        if must_compare && self.is_of_several() {
            // During a resync C stands still, and what the guest tells others waits by its tag.
            // In the middle of an initial copy C goes on. And P of the old run may be lost.
            self.gate.mark_incomplete();
        }
        let first = self.sender.is_none();
        let on_disk = &self.on_disk;
        let sender = self.sender.get_or_insert_with(|| Queue::new(durable, on_disk.clone()));
        if compares {
            self.recording = Recording::Records;
            self.compared_from = sender.admitted().next();
        }
        match sender.attached(durable, stream.begun) {
            Ok(()) => Ok(first),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// Another group of this name is as good as a refusal: nothing is sent to it.
    fn is_same_group(&mut self, told: GroupId) -> bool {
        let Some(known) = self.attach.group_id.filter(|known| *known != told) else { return true };
        let group = &self.attach.group;
        let reason = format!(
            "the backup has group {group} as {told}, and this host knows it as {known}: the backup's data was replaced, or \
             this host's state directory comes from another installation. Nothing is sent. Check backup.address. If this \
             backup is the one to protect to, stop tidelockd, remove the group's directory below state_dir, and start it: \
             the disks are compared"
        );
        self.refused(Refusal { kind: RefusalKind::Mismatch, reason });
        false
    }

    fn progress(&mut self, progress: &Progress, now: MonoNanos) -> Result<(), MemberError> {
        if let Some(sender) = &mut self.sender
            && let Err(error) = sender.committed(progress.durable)
        {
            return Err(self.broken(error));
        }
        self.heard_progress(progress, now);
        Ok(())
    }

    fn heard_progress(&mut self, progress: &Progress, now: MonoNanos) {
        // The gate first: clients wait for it.
        self.gate.committed(&progress.committed);
        self.gate.watermark(progress.watermark);
        self.port.set_told(&progress.committed, progress.watermark);
        self.port.set_frontier(progress.frontier);
        if let Some(writer) = self.writer() {
            let (durable, committed) = (progress.durable, progress.committed.get(writer));
            self.let_gate_go(committed);
            self.port.set_acked(durable, committed);
            self.are_durable(durable, now);
        }
        self.stats.set_watermark(progress.watermark, progress.frontier);
        self.publish_stats();
    }

    /// Guests' writes up to here wait no longer.
    fn are_durable(&mut self, durable: Seq, now: MonoNanos) {
        while let Some((_, at)) = self.admitted.front().filter(|(seq, _)| *seq <= durable) {
            self.stats.commit_latency(now.since_ns(*at));
            self.admitted.pop_front();
        }
    }

    /// Another writer resyncs: what may it have known of this one? What was published was handed
    /// to a guest, what was admitted may have been.
    fn sounded(&mut self, id: u64) {
        let (mut pending, hlc) = self.gate.pending();
        if let (Some(sender), Some(writer)) = (&self.sender, self.writer()) {
            let admitted = sender.admitted();
            // What has no record is there with what is recorded next: C reaches that when all is compared.
            let reaches = match self.recording {
                Recording::Records => admitted,
                _ => admitted.next(),
            };
            pending.raise(writer, reaches.max(self.compared_from));
        }
        self.answers.push_back(Message::Sounded { id, pending, hlc });
    }

    fn refused(&mut self, refusal: Refusal) {
        if self.refusing.refused(&refusal) {
            tracing::error!(
                member = self.attach.member,
                kind = ?refusal.kind,
                reason = refusal.reason,
                "the backup refuses this member"
            );
        }
        if let Contact::None { is_unwanted, .. } = &mut self.contact {
            *is_unwanted |= refusal.kind != RefusalKind::Stopping;
        }
        if refusal.is_final() {
            self.shut_for_good(&refusal.reason);
        }
        if refusal.kind == RefusalKind::Fenced
            && let Err(error) = self.keeper.keep_fenced(&refusal.reason)
        {
            let member = &self.attach.member;
            tracing::error!(member, %error, "that this primary was replaced cannot be put on record");
        }
        if let Some(sender) = &mut self.sender {
            sender.detached();
        }
        let must_connect_anew = self.recording.unanswered() && !refusal.is_final();
        self.tell_refusal(refusal);
        self.conversation = Conversation::Refused { must_connect_anew };
    }

    /// This run is never taken back.
    pub(super) fn shut_for_good(&mut self, reason: &str) {
        self.gate.fence();
        self.refusing = Refusing::ForGood { reason: reason.to_owned() };
        self.bookmarks.give_up(reason);
    }

    pub(super) fn tell_refusal(&mut self, refusal: Refusal) {
        self.conversation = Conversation::Refused { must_connect_anew: false };
        if self.writer().is_none() {
            self.stats.set_refusal(Some(refusal.reason.clone()));
        }
        self.port.send((self.to_owner)(FromLink::Refused(refusal)));
    }

    pub(super) fn let_gate_go(&mut self, committed: Seq) {
        if self.held_to.take_if(|held_to| committed >= *held_to).is_some() {
            self.gate.hold(HoldReason::LeftBacklog, false);
        }
    }

    pub(super) fn unexpected(&self, what: &'static str) -> MemberError {
        MemberError::Unexpected { member: self.attach.member.clone(), what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backup_that_stalls_again_and_again_fills_no_log() {
        let mut log = StallLog::default();
        let at = |ms: u64| MonoNanos(1 + ms * 1_000_000);
        let said = (0..2000).filter(|n| log.may_say(n % 2 == 0, at(n * 10))).count();
        assert_eq!(said, 2, "two thousand changes in 20 s");
        // The last one is logged later, also if nothing changes any more.
        let last = log.is_stalled;
        assert!(!log.may_say(last, at(60_000)) && log.may_say(!last, at(60_000)));
    }
}
