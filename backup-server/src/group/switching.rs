//! A primary that gives up its lease: the planned switch to this site.
//!
//! Invariant (rule 4): the grace is not waited for only while every member that may have a lease has said that its gate is
//! shut for good. It is kept in memory alone: after a restart of this server hosts say it again, or the grace is waited out.

use super::{Group, Link, Output};
use crate::journal::Standing;
use crate::storage::Storage;
use tidelock_protocol::message::Message;

impl<S: Storage> Group<S> {
    /// A member has shut its gate for good in this epoch.
    pub(super) fn lease_given_up(&mut self, link: Link) {
        let Some(name) = self.name_of_link(link) else { return };
        self.flush();
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.link == Some(link)) {
            // Nothing comes after it, so nobody need be asked what it has.
            slot.has_left = true;
        }
        self.policy_has_left(&name);
        self.given_up.insert(name);
        if self.has_no_lease() {
            self.grace.give_up();
        }
        if self.broken.is_none() {
            let committed = self.told();
            self.outputs.push(Output::Send(link, Message::LeaseGivenUp { committed }));
        }
        self.tell_floors();
    }

    /// A member is attached: it may ask for a lease.
    pub(super) fn may_have_lease(&mut self, member: &str) {
        self.given_up.remove(member);
        self.grace.take_up();
    }

    /// Whether all members have given up their leases.
    pub(super) fn has_no_lease(&self) -> bool {
        let writers = self.manifest.writers.iter().zip(&self.journal.state().writers);
        let writers = writers.filter(|(_, of)| of.standing != Standing::Removed).map(|(w, _)| w);
        let mut all = writers.chain(self.manifest.followers.keys());
        all.all(|name| self.given_up.contains(name))
    }
}
