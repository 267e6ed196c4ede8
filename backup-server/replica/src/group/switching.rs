//! A primary that gives up its lease: the planned switch to this site.
//!
//! Invariant (rule 4): the grace is not waited for only while every member that may have a lease has said that its gate is
//! shut for good. It is kept in memory alone: after a restart of this server hosts say it again, or the grace is waited out.
//!
//! Hosts of one group have no channel between them, so this server is where they agree:
//!
//! ```text
//!  member:   going on ──ready──▶ ready ──────── all are ready ────────▶ told to go ──▶ lease given up
//!               ▲                  │                                        │
//!               └──── taken back, or attached anew ◀── attached anew ───────┘
//! ```
//!
//! Invariant: who was ready when all were is told to go, also if it wants to go on by then, until a member attaches anew.
//! Readiness is the word of a run on its connection, and ends with either.

use super::durable::{Immediate, Later, OfDurable};
use super::{Group, Link};
use std::collections::BTreeMap;

use tidelock_storage::Storage;
use tidelock_store::journal::Standing;

/// A switch that the hosts of a group make together.
#[derive(Debug, Default)]
pub(super) struct Joint {
    /// Members that have everything here, and the links that say so.
    ready: BTreeMap<String, Link>,
    /// All were ready at once, or had given up already.
    agreed: bool,
}

impl<S: Storage> Group<S> {
    /// A member has shut its gate for good in this epoch.
    pub(super) fn lease_given_up(&mut self, link: Link) {
        let Some(name) = self.name_of_link(link) else { return };
        self.joint.ready.remove(&name);
        let is_news = self.given_up.insert(name.clone());
        if self.has_no_lease() {
            self.grace.give_up();
        }
        if is_news {
            self.look_for_agreement();
        }
        self.later(name, Later::GaveUp(link));
    }

    /// Everything that it sent before that is durable.
    pub(super) fn has_given_up(&mut self, name: &str, link: Link) {
        if let Some(i) = self.manifest.writers.iter().position(|writer| writer == name) {
            // No record comes after it, so nobody need be asked what it has.
            self.slots[i].has_left = true;
        }
        self.policy_has_left(name);
        if self.broken.is_none() {
            let committed = self.told();
            self.say_of_durable(link, OfDurable::LeaseGivenUp(committed));
        }
        self.tell_floors();
    }

    /// A member is about to give up its lease as soon as all are, or goes on as before.
    pub(super) fn ready_to_switch(&mut self, link: Link, ready: bool) {
        let Some(name) = self.name_of_link(link) else { return };
        if ready {
            self.joint.ready.insert(name, link);
        } else {
            let was_told_to_go = self.joint.ready.remove(&name).is_some() && self.joint.agreed;
            let members = if was_told_to_go { Vec::new() } else { self.not_ready() };
            self.say_now(link, Immediate::SwitchAwaits(members));
        }
        self.look_for_agreement();
    }

    fn look_for_agreement(&mut self) {
        let not_ready = self.not_ready();
        let all_agree = self.joint.agreed || not_ready.is_empty();
        self.joint.agreed = all_agree && !self.joint.ready.is_empty();
        let members = if self.joint.agreed { Vec::new() } else { not_ready };
        for link in self.joint.ready.values().copied().collect::<Vec<_>>() {
            self.say_now(link, Immediate::SwitchAwaits(members.clone()));
        }
    }

    /// A member is attached: it may ask for a lease.
    pub(super) fn may_have_lease(&mut self, member: &str) {
        self.given_up.remove(member);
        self.grace.take_up();
        self.joint.ready.remove(member);
        self.joint.agreed = false;
        self.look_for_agreement();
    }

    /// Links have ended, and with them the word of their members.
    pub(super) fn readiness_ends(&mut self) {
        let (links, before) = (self.all_links(), self.joint.ready.len());
        self.joint.ready.retain(|_, link| links.contains(link));
        if self.joint.ready.len() != before {
            self.look_for_agreement();
        }
    }

    /// Members that neither have given up nor are ready to.
    fn not_ready(&self) -> Vec<String> {
        let is_ready =
            |name: &String| self.given_up.contains(name) || self.joint.ready.contains_key(name);
        self.may_have_leases().filter(|(name, _)| !is_ready(name)).map(|(n, _)| n.clone()).collect()
    }

    /// Every member that was ever attached, or is a writer, and its host as far as that is known.
    fn may_have_leases(&self) -> impl Iterator<Item = (&String, Option<&String>)> {
        let state = self.journal.state();
        let hosts = self.manifest.members.iter().map(|member| member.as_ref().map(|m| &m.host));
        let writers = self.manifest.writers.iter().zip(hosts).zip(&state.writers);
        let writers = writers.filter(|(_, of)| of.standing != Standing::Removed).map(|(w, _)| w);
        writers.chain(self.manifest.followers.iter().map(|(name, host)| (name, Some(host))))
    }

    /// Whether all members have given up their leases.
    pub(super) fn has_no_lease(&self) -> bool {
        self.may_have_leases().all(|(name, _)| self.given_up.contains(name))
    }

    /// While a part of the group is switched over: who is not, with its host.
    pub(super) fn lease_kept_by(&self) -> Vec<String> {
        if self.given_up.is_empty() {
            return Vec::new();
        }
        let others = self.may_have_leases().filter(|(name, _)| !self.given_up.contains(*name));
        let words = |(name, host): (&String, Option<&String>)| match host {
            Some(host) => format!("{name} on {host}"),
            None => name.clone(),
        };
        others.map(words).collect()
    }
}
