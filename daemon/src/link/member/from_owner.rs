//! What the owner loop tells a member.

use super::super::port::{FromLink, ToLink};
use super::{Member, Phase};
use bytes::BytesMut;
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
                self.is_ready = ready;
                self.agreement = Some(agreement);
                // If it is not attached, it says so when it is; nobody counts on one that is not.
                self.control(Message::ReadyToSwitch { ready }, out);
            }
            ToLink::GiveUpLease(given_up) => {
                self.gives_up = true;
                self.is_ready = false;
                self.agreement = None;
                self.given_up = given_up;
                // If it is not attached, it says so when it is.
                self.control(Message::GiveUpLease, out);
            }
            ToLink::Adopted => self.adopted(out),
            ToLink::LeaveOpen => {
                self.says_unreached = Some(true);
                // If it is not attached, it says so when it is.
                if self.phase == Phase::Attached {
                    self.say_policy();
                }
            }
            ToLink::Logged(age) => {
                self.log = age;
                self.control(Message::Logged(age), out);
            }
            ToLink::Detach(end) => self.control(Message::Detach { end }, out),
            ToLink::ServeUnrecorded => {
                self.wants_unrecorded = true;
                self.let_serve_unrecorded();
            }
            ToLink::Stands => self.stands = true,
            // It is asked with what is sent next.
            ToLink::AskToCompare => self.wants_compare = true,
            ToLink::AskFloor { everyone } => {
                self.floor_for_everyone |= everyone;
                // If it is not attached, it asks when it is.
                if self.phase == Phase::Attached {
                    self.ask_floor();
                }
            }
        }
    }

    pub(super) fn adopted(&mut self, out: &mut BytesMut) {
        if std::mem::take(&mut self.awaits_adoption) && self.is_connected {
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
        let may_be_attached = match self.phase {
            Phase::Attached => true,
            Phase::Attaching => self.sender.is_some() || self.says_clean(),
            Phase::Detached | Phase::Refused => false,
        };
        if !self.wants_unrecorded || self.was_attached || self.is_unwanted || may_be_attached {
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
        self.wants_unrecorded = false;
        self.sender = None;
        if self.held_to.take().is_some() {
            // The gate was held for the backlog of an earlier process, which is given up here.
            self.gate.hold_for_resync(false);
        }
        if let Some(Writing { last_run: LastRun::Clean { served, .. }, .. }) =
            self.attach.writing_mut()
        {
            *served = true;
        }
        self.port.send((self.to_owner)(FromLink::MayServeUnrecorded));
    }
}
