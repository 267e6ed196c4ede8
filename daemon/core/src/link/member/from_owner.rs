//! What the owner loop tells a member.

use super::super::port::{FromLink, ToLink};
use super::Member;
use super::standing::{Contact, Conversation, Recording, Switching};
use bytes::BytesMut;
use tidelock_protocol::ids::Seq;
use tidelock_protocol::message::{LastRun, Message, Writing};
use tidelock_protocol::record::{Record, Role};

impl<T> Member<T> {
    /// From the owner loop.
    pub fn hear_owner(&mut self, message: ToLink, out: &mut BytesMut) {
        match message {
            ToLink::Records { records, admitted_at } => {
                let sender = self.sender.as_mut().expect("admitted after the start");
                let is_guests = |r: &&Record| r.role() == Role::Change;
                if let Some(last) = records.iter().rev().find(is_guests) {
                    self.admitted.push_back((last.seq, admitted_at));
                }
                for record in records {
                    sender.push(record);
                }
                self.publish_stats();
            }
            ToLink::Spilled { spilled, last_of_guest, admitted_at } => {
                let sender = self.sender.as_mut().expect("admitted after the start");
                self.admitted.extend(last_of_guest.map(|seq| (seq, admitted_at)));
                sender.spill(spilled);
                self.publish_stats();
            }
            ToLink::InOrder(message) => {
                if let Some(sender) = &mut self.sender {
                    sender.push_in_order(message);
                }
            }
            ToLink::Mode(mode) => {
                if let Some(writing) = self.attach.writing_mut() {
                    writing.mode = mode;
                }
                self.control(Message::ModeChanged { mode }, out);
            }
            ToLink::Policy(policy) => {
                self.policy = policy;
                self.control(Message::Policy(policy), out);
            }
            ToLink::Bookmark(wanted, done) => {
                let message = self.bookmarks.begin(wanted, done);
                match self.cannot_bookmark().map(str::to_owned) {
                    Some(reason) => self.bookmarks.give_up(&reason),
                    // If it is not attached, it asks when it is.
                    None => self.control(message, out),
                }
            }
            ToLink::ReadyToSwitch(ready, agreement) => {
                if !matches!(self.switching, Switching::GivesUp { .. }) {
                    self.switching = Switching::Prepares { is_ready: ready, agreement };
                }
                // If it is not attached, it says so when it is; nobody counts on one that is not.
                self.control(Message::ReadyToSwitch { ready }, out);
            }
            ToLink::GiveUpLease(answer) => {
                self.switching = Switching::GivesUp { answer };
                // If it is not attached, it says so when it is.
                self.control(Message::GiveUpLease, out);
            }
            ToLink::Adopted => self.adopted(out),
            ToLink::LeaveOpen => {
                self.says_unreached = Some(true);
                // If it is not attached, it says so when it is.
                if self.conversation.is_attached() {
                    self.say_policy();
                }
            }
            ToLink::Logged(age) => {
                self.log = age;
                self.control(Message::Logged(age), out);
            }
            ToLink::Detach(end) => self.control(Message::Detach { end }, out),
            ToLink::ServeUnrecorded => {
                if let Contact::None { wants_unrecorded, .. } = &mut self.contact {
                    *wants_unrecorded = true;
                }
                self.let_serve_unrecorded();
            }
            ToLink::Stands => self.recording = Recording::Stands,
            // It is asked with what is sent next.
            ToLink::AskToCompare => self.recording = Recording::WantsComparison,
            ToLink::AskFloor { everyone } => {
                self.floor_for_everyone |= everyone;
                // If it is not attached, it asks when it is.
                if self.conversation.is_attached() {
                    self.ask_floor();
                }
            }
        }
    }

    pub(super) fn adopted(&mut self, out: &mut BytesMut) {
        let is_connected = self.conversation != Conversation::Detached;
        if std::mem::take(&mut self.awaits_adoption) && is_connected {
            self.connected(out);
        }
    }

    /// True if its attachment says that the last run ended cleanly.
    fn says_clean(&self) -> bool {
        let writing = self.attach.writing();
        writing.is_some_and(|writing| matches!(writing.last_run, LastRun::Clean { .. }))
    }

    /// While an answer to "the last run ended cleanly" may come, nothing may be written that makes it untrue. The
    /// connection ends when nothing comes, and then it was not said.
    pub(super) fn let_serve_unrecorded(&mut self) {
        let may_be_attached = match self.conversation {
            Conversation::Attached { .. } => true,
            Conversation::Attaching => self.sender.is_some() || self.says_clean(),
            Conversation::Detached | Conversation::Quiet | Conversation::Refused { .. } => false,
        };
        let is_wanted = Contact::None { wants_unrecorded: true, is_unwanted: false };
        if self.contact != is_wanted || may_be_attached {
            return;
        }
        if let Err(error) = self.keeper.keep_served() {
            let member = &self.attach.member;
            tracing::error!(
                member, %error,
                "guests wait for the backup: that they were served without it cannot be put on record"
            );
            return;
        }
        self.contact = Contact::None { wants_unrecorded: false, is_unwanted: false };
        self.sender = None;
        // The backlog of an earlier process is given up here.
        self.let_gate_go(Seq(u64::MAX));
        if let Some(Writing { last_run: LastRun::Clean { served, .. }, .. }) =
            self.attach.writing_mut()
        {
            *served = true;
        }
        self.port.send((self.to_owner)(FromLink::MayServeUnrecorded));
    }
}
