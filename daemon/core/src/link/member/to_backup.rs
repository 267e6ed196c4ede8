//! What a member tells the backup and asks it.

use super::standing::{Conversation, LeaseTalk, Recording, Refusing, Switching};
use super::{Member, MemberError};
use bytes::BytesMut;
use tidelock_protocol::frame;
use tidelock_protocol::ids::MonoNanos;
use tidelock_protocol::message::{Form, LastRun, Message, Tagging, UNASKED};
use tidelock_protocol::sender::Transmit;

impl<T> Member<T> {
    pub(super) fn ask_to_be_attached(&mut self, out: &mut BytesMut) {
        if self.recording == Recording::WantsComparison {
            self.recording = Recording::AsksToCompare;
        }
        let mut attach = self.attach.clone();
        if let (Some(sender), Some(writing)) = (&self.sender, attach.writing_mut()) {
            writing.last_run = match self.recording {
                Recording::AsksToCompare => LastRun::Unclean { log: self.log },
                _ => sender.last_run(),
            };
        }
        let message = Message::Attach(Box::new(attach));
        frame::encode_control(self.channel, &message, out);
    }

    /// Appends frames until `out` holds `limit_bytes` or nothing is left. Returns whether anything
    /// was appended.
    pub fn fill(&mut self, out: &mut BytesMut, limit_bytes: usize) -> Result<bool, MemberError> {
        let before = out.len();
        if self.conversation.is_attached() && self.recording == Recording::WantsComparison {
            self.ask_to_be_attached(out);
        }
        self.answer(out);
        if let Some(sender) = &mut self.sender {
            while out.len() < limit_bytes && !self.conversation.is_stalled() {
                let next = match sender.poll_transmit() {
                    Ok(next) => next,
                    Err(error) => return Err(self.broken(error.into())),
                };
                match next {
                    Some(Transmit::Record(record)) => {
                        out.reserve(frame::HEADER_BYTES + record.encoded_len());
                        frame::encode_record_head(self.channel, &record, out);
                        if let Some(payload) = record.payload() {
                            out.extend_from_slice(payload.data());
                        }
                    }
                    Some(Transmit::Part(part)) => frame::encode_part(self.channel, &part, out),
                    Some(Transmit::InOrder(message)) => {
                        frame::encode_control(self.channel, &message, out);
                    }
                    None => break,
                }
            }
            self.port.set_taken(sender.taken());
        }
        Ok(out.len() > before)
    }

    /// Asks for the lease to be renewed; a member that was refused for now asks to be attached.
    pub fn beacon(&mut self, now: MonoNanos, out: &mut BytesMut) {
        self.say_stall(now);
        if self.conversation.is_refused() {
            if self.refusing.asks_again() {
                self.connected(out);
            }
        } else if let Switching::GivesUp { .. } = self.switching {
            // It may be a new server, which has to hear of it.
            self.control(Message::GiveUpLease, out);
        } else if self.lease_talk != LeaseTalk::PolicyUnheard {
            self.say_what_is_awaited(out);
            self.control(Message::Beacon { sent_at: now }, out);
            if let Conversation::Attached { wants_lease, .. } = &mut self.conversation {
                *wants_lease = false;
                self.beacon_sent_at = Some(now);
            }
        }
    }

    /// Packets of this member may wait for records that were lost with a run of their writer, or
    /// for a time that nobody has a reason to reach. Only the backup can see that. Mostly they are
    /// on their way, and nothing comes of it.
    fn say_what_is_awaited(&mut self, out: &mut BytesMut) {
        let Some(Tagging { form, .. }) = self.attach.tagging else { return };
        let (pending, hlc) = self.gate.pending();
        let (committed, watermark) = self.port.told();
        let is_covered = match form {
            Form::Vector => committed.covers(&pending),
            Form::Hlc => watermark >= hlc,
        };
        if !is_covered {
            self.control(Message::Sounded { id: UNASKED, pending, hlc }, out);
        }
    }

    pub(super) fn say_policy(&mut self) {
        self.answers.push_back(Message::Policy(self.policy));
        if let Some(serves) = self.says_unreached {
            self.answers.push_back(Message::ServesUnreached { serves });
        }
    }

    /// Why no bookmark can be set; `None`: it can, or it is not known.
    pub(super) fn cannot_bookmark(&self) -> Option<&str> {
        match &self.refusing {
            Refusing::ForGood { reason } => Some(reason),
            Refusing::No | Refusing::ForNow { .. } => None,
        }
    }

    pub(super) fn ask_for_bookmarks(&mut self) {
        match self.cannot_bookmark().map(str::to_owned) {
            Some(reason) => self.bookmarks.give_up(&reason),
            None => self.answers.extend(self.bookmarks.again()),
        }
    }

    pub(super) fn ask_floor(&mut self) {
        if let Some(mark) = self.gate.awaits_floor() {
            let everyone = self.floor_for_everyone;
            self.answers.push_back(Message::AskFloor { mark, everyone });
        }
    }

    /// Whether a beacon is due at once: replies are held since before the attachment, and a quarter
    /// of a lease is long for the clients that wait for them.
    #[must_use]
    pub fn wants_lease(&self) -> bool {
        matches!(self.conversation, Conversation::Attached { wants_lease: true, .. })
            && !matches!(self.switching, Switching::GivesUp { .. })
            && self.lease_talk != LeaseTalk::PolicyUnheard
    }

    pub(super) fn say_switch(&mut self) {
        match &self.switching {
            Switching::GivesUp { .. } => self.answers.push_back(Message::GiveUpLease),
            Switching::Prepares { is_ready: true, .. } => {
                self.answers.push_back(Message::ReadyToSwitch { ready: true });
            }
            Switching::Prepares { is_ready: false, .. } | Switching::Not => {}
        }
    }

    /// Says it now. What was to be said before comes before: of two policies the last one counts.
    pub(super) fn control(&mut self, message: Message, out: &mut BytesMut) {
        self.answer(out);
        if self.conversation.is_attached() {
            frame::encode_control(self.channel, &message, out);
        }
    }

    fn answer(&mut self, out: &mut BytesMut) {
        if self.conversation.is_attached() {
            for answer in self.answers.drain(..) {
                frame::encode_control(self.channel, &answer, out);
            }
        }
    }
}
