//! Policies of members for the time when this server cannot be reached, kept durably for that day: notes of the
//! journal ([`MemberPolicy`]), in one order with the records.
//!
//! A host whose policy is `async after T` opens its gate without a lease, so a recovery must know of it:
//! clients may have seen what the cut does not have, and the old primary may go on answering until it
//! hears of the new epoch. Invariant: a host is told that its policy is kept only when it is on stable
//! storage, and it neither asks for a lease nor degrades before.
//!
//! Without room a host is told at once what of it is on stable storage, and holds by that; what it has said waits with
//! the records that came after it, and a recovery puts it on record in the reserve's room.
//!
//! In the same way it is kept whether a start of a host's daemon that does not reach this server serves guests all the
//! same: such a host needs no lease either, also after it has left.
//!
//! A member in mode async tells others what no tag names (`docs/causality.md`, section 5), so whoever attaches while
//! that lasts, or may last, is told ([`Unheard`](tidelock_protocol::message::Message::Unheard)) and asks for a floor
//! before anything of it leaves.

use super::durable::{Immediate, OfDurable};
use super::{Group, Link, Now, Output};
use crate::manifest::is_of;
use std::collections::{BTreeMap, BTreeSet};
use tidelock_planted::Bug;
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::limits::RECORD_MAX_BYTES;
use tidelock_protocol::message::{Mode, Policy, RefusalKind};
use tidelock_storage::Storage;
use tidelock_store::journal::{
    BATCH_TARGET_BYTES, Exposure, MemberPolicy, NAMES_MAX, Note, Standing, StateError,
};

/// Answers to one member that may wait for stable storage. What it says beyond them waits in the order of its link.
const ANSWERS_MAX: usize = 16;
/// A batch that the disk has no room for takes policies up to this. Notes that recoveries and attachments need still fit.
const STAGED_MAX_BYTES: usize = BATCH_TARGET_BYTES + RECORD_MAX_BYTES as usize + (1 << 20);

/// One member, as [`Group`] sees it beside its policy.
struct Peer {
    name: String,
    host: String,
    /// The mode that it had said before there were policies.
    mode: Mode,
    /// It is attached, and has said since what it does.
    is_heard: bool,
    has_left: bool,
    lease_ms: u64,
    /// The time of its last record, in milliseconds; 0: none.
    last_record_ms: u64,
}

impl<S: Storage> Group<S> {
    /// Policies of members, as far as they are on stable storage.
    #[must_use]
    pub fn policies(&self) -> &BTreeMap<String, MemberPolicy> {
        &self.durable_state.members.policies
    }

    /// The last word of a member, on stable storage or not.
    fn said(&self, name: &str) -> Option<&MemberPolicy> {
        self.journal.state().members.policies.get(name)
    }

    /// True if a member's word can be staged. If not, the member's frames wait.
    pub(super) fn takes_policies(&self, link: Link) -> bool {
        let has_room = || self.journal.staged_bytes() < STAGED_MAX_BYTES;
        let answers = || self.outputs.waiting_of(link, &self.journal.durable());
        self.broken.is_some() || has_room() && answers() < ANSWERS_MAX
    }

    /// A member says what it does without this server.
    pub(super) fn policy(&mut self, now: Now, link: Link, policy: Policy) {
        let Some(name) = self.name_of_link(link) else { return };
        if let Some(since_ms) = policy.degraded_since_unix_ms {
            let judged =
                self.plausible.wall("the time of a degrade", since_ms, self.judging_ms(now));
            if let Err(error) = judged {
                return self.implausible(link, &error);
            }
        }
        let old = self.said(&name);
        let mode_since_unix_ms = match old {
            Some(old) if old.mode == policy.mode => old.mode_since_unix_ms,
            // This may come long after it was said.
            Some(_) => self.held_at_unix_ms(&name, now).unwrap_or(0),
            None => now.unix_ms,
        };
        let Policy { mode, after_ms, degraded_since_unix_ms } = policy;
        let known = MemberPolicy {
            mode,
            mode_since_unix_ms,
            after_ms,
            degraded_since_unix_ms,
            has_left: false,
            // It says that itself.
            serves_unreached: old.is_some_and(|old| old.serves_unreached),
        };
        let is_forgotten = tidelock_planted::is(Bug::PolicyForgotten);
        if let Some(Err(error)) = (!is_forgotten).then(|| self.note_policy(&name, known)) {
            return self.end_link(link, RefusalKind::Quota, error.to_string());
        }
        self.held.says_policy(&name, link);
        if self.broken.is_some() {
            return;
        }
        // Alone in its group as its host has it, it has nobody to hear of.
        let has_others = self.slots.iter().all(|s| s.link != Some(link) || s.is_of_several);
        if has_others
            && self.others_may_be_async(&name)
            && !tidelock_planted::is(Bug::NewcomerNotTold)
        {
            self.say_now(link, Immediate::Unheard);
        }
        if is_forgotten {
            return self.say_of_durable(link, OfDurable::PolicyKept(policy));
        }
        if self.goes_by_record(&name) {
            self.tell_policy_on_record(link, &name);
        }
        self.say_of_policy(link, &name, OfDurable::PolicyKept(policy));
    }

    /// A member says whether a start that does not reach this server serves its guest. It has said its policy.
    pub(super) fn serves_unreached(&mut self, link: Link, serves: bool) {
        let Some(name) = self.name_of_link(link) else { return };
        let Some(known) = self.said(&name).cloned() else {
            return self.say_of_durable(link, OfDurable::ServesUnreachedKept(false));
        };
        let known = MemberPolicy { serves_unreached: serves, ..known };
        if let Err(error) = self.note_policy(&name, known) {
            return self.end_link(link, RefusalKind::Quota, error.to_string());
        }
        if self.broken.is_some() {
            return;
        }
        if self.goes_by_record(&name) {
            let serves = self.serves_on_record(&name);
            self.say_of_durable(link, OfDurable::ServesUnreachedKept(serves));
        }
        self.say_of_policy(link, &name, OfDurable::ServesUnreachedKept(serves));
    }

    /// A member has ended cleanly: nothing of it was let out that is not here.
    pub(super) fn policy_has_left(&mut self, name: &str) {
        if let Some(known) = self.said(name).cloned() {
            let known = MemberPolicy { has_left: true, ..known };
            self.note_policy(name, known).expect("it is known already");
        }
    }

    /// Puts it into the journal if it is not the last word there.
    fn note_policy(&mut self, name: &str, known: MemberPolicy) -> Result<(), StateError> {
        if self.said(name) == Some(&known) {
            return Ok(());
        }
        let note = Note::Policy { member: name.to_owned(), policy: Some(known) };
        if self.stage_of_member(&note).is_err() {
            // The manifest may be of another moment than the journal.
            self.forget_strangers();
            self.stage_of_member(&note)?;
        }
        let durable = self.journal.durable();
        self.policies_noted.retain(|_, ticket| !durable.covers(*ticket));
        self.policies_noted.insert(name.to_owned(), self.journal.ticket());
        Ok(())
    }

    pub(super) fn stage_of_member(&mut self, note: &Note) -> Result<(), StateError> {
        self.journal.stage_note(note)?;
        if self.journal.staged_bytes() >= BATCH_TARGET_BYTES && !self.is_stuck() {
            self.write();
        }
        Ok(())
    }

    /// Forgets what is known of members that are none any more.
    pub(super) fn forget_strangers(&mut self) {
        let state = self.journal.state();
        let removed =
            |i: usize| state.writers.get(i).is_some_and(|of| of.standing == Standing::Removed);
        let writers = self.manifest.writers.iter().enumerate();
        let writers = writers.filter(|(i, _)| !removed(*i)).map(|(_, name)| name);
        let members: BTreeSet<_> = writers.chain(self.manifest.followers.keys()).collect();
        // A member without disks that is about to attach may have its machine on record first.
        let is_named = |name: &str| self.manifest.peers.iter().any(|peer| is_of(peer, name));
        let is_to_come = |name: &String| !self.manifest.writers.contains(name) && is_named(name);
        let is_member = |name: &String| members.contains(name) || is_to_come(name);
        let policies = state.members.policies.keys().filter(|name| !is_member(name));
        let policies = policies.map(|of| Note::Policy { member: of.clone(), policy: None });
        let machines = state.members.machines.keys().filter(|name| !is_member(name));
        let machines = machines.map(|of| Note::Machine { member: of.clone(), machine: None });
        for note in policies.chain(machines).collect::<Vec<_>>() {
            self.stage_of_member(&note).expect("what is forgotten needs no room");
        }
    }

    /// True if all that a member has said is on stable storage.
    fn is_policy_on_record(&self, name: &str) -> bool {
        self.policies_noted.get(name).is_none_or(|ticket| self.is_durable(*ticket))
    }

    /// Answers a member's word once all of it is on stable storage: at once, if it is.
    fn say_of_policy(&mut self, link: Link, name: &str, message: OfDurable) {
        match self.is_policy_on_record(name) {
            true => self.say_of_durable(link, message),
            false => self.say(Output::Send(link, message.into())),
        }
    }

    /// True if a member goes by what is on stable storage, because there is no room for all of its word. Nothing but that
    /// and its last word can be found after a crash: all that is not durable is in one batch.
    fn goes_by_record(&self, name: &str) -> bool {
        self.is_stuck() && !self.journal.is_unreported() && !self.is_policy_on_record(name)
    }

    fn tell_policy_on_record(&mut self, link: Link, name: &str) {
        let kept = match self.policies().get(name) {
            // A policy on record does not count for a member that has left.
            Some(known) if known.has_left => Policy::holding(Mode::Pipelined),
            Some(known) => known.policy(),
            // No room for its first word.
            None => {
                let peer = self.peers().into_iter().find(|peer| peer.name == name);
                Policy::holding(peer.map_or(Mode::Pipelined, |peer| peer.mode))
            }
        };
        self.say_of_durable(link, OfDurable::PolicyKept(kept));
    }

    fn serves_on_record(&self, name: &str) -> bool {
        self.policies().get(name).is_some_and(|known| known.serves_unreached)
    }

    /// Called when there may be no room: whoever waits to hear that its word is kept goes by what is on stable storage.
    pub(super) fn tell_policies_on_record(&mut self) {
        for link in self.all_links() {
            let Some(name) = self.name_of_link(link) else { continue };
            if !self.held.has_said(link) || !self.goes_by_record(&name) {
                continue;
            }
            self.tell_policy_on_record(link, &name);
            let serves = self.serves_on_record(&name);
            if self.said(&name).is_some_and(|said| said.serves_unreached != serves) {
                self.say_of_durable(link, OfDurable::ServesUnreachedKept(serves));
            }
        }
    }

    pub(super) fn name_of_link(&self, link: Link) -> Option<String> {
        let writer = self.links().find(|(_, other)| *other == link);
        let writer = writer.map(|(i, _)| self.manifest.writers[i].clone());
        let follower = self.followers.iter().find(|follower| follower.link == link);
        writer.or_else(|| Some(follower?.member.clone()))
    }

    fn peers(&self) -> Vec<Peer> {
        let state = self.journal.state();
        let lease_max_ms =
            self.manifest.members.iter().flatten().map(|m| m.lease_ms).max().unwrap_or(0);
        let writers = self.manifest.writers.iter().enumerate().filter_map(|(i, name)| {
            let member = self.manifest.member(WriterId(i as u16)).filter(|m| !m.is_seeded())?;
            let of = state.writers[i];
            (of.standing != Standing::Removed).then(|| Peer {
                name: name.clone(),
                host: member.host.clone(),
                mode: member.mode,
                is_heard: self.slots[i].link.is_some_and(|link| self.held.has_said(link)),
                has_left: self.slots[i].has_left,
                lease_ms: member.lease_ms,
                last_record_ms: of.hlc.physical_ms(),
            })
        });
        let link_of = |name: &str| {
            let follower = self.followers.iter().find(|follower| follower.member == name);
            follower.map(|follower| follower.link)
        };
        let followers = self.manifest.followers.iter().map(|(name, host)| Peer {
            name: name.clone(),
            host: host.clone(),
            mode: Mode::Pipelined,
            is_heard: link_of(name).is_some_and(|link| self.held.has_said(link)),
            has_left: false,
            lease_ms: lease_max_ms,
            last_record_ms: 0,
        });
        writers.chain(followers).collect()
    }

    /// Whether somebody else tells others what no tag names: a host that cannot be heard may have opened
    /// its gate since, and one that has just come back may not have said so yet.
    fn others_may_be_async(&self, name: &str) -> bool {
        self.peers().iter().filter(|peer| peer.name != name).any(|peer| {
            let known = self.said(&peer.name);
            let is_async = known.map_or(peer.mode, |known| known.mode) == Mode::Async;
            if peer.is_heard {
                return is_async;
            }
            let has_left = peer.has_left || known.is_some_and(|known| known.has_left);
            !has_left && (is_async || known.is_some_and(|known| known.after_ms.is_some()))
        })
    }

    /// What clients may have seen that a recovery now does not have.
    #[must_use]
    pub fn exposed(&self, now: Now) -> Vec<Exposure> {
        let exposed = self.peers().into_iter().filter_map(|peer| {
            let known = self.said(&peer.name);
            let mode = known.map_or(peer.mode, |known| known.mode);
            let (after_ms, degraded) =
                known.map_or((None, None), |known| (known.after_ms, known.degraded_since_unix_ms));
            let has_left = peer.has_left || known.is_some_and(|known| known.has_left);
            let serves_unreached = known.is_some_and(|known| known.serves_unreached);
            let before = |unix_ms: u64| unix_ms.saturating_sub(peer.lease_ms);
            let (is_known, since_unix_ms) = match degraded {
                Some(since_unix_ms) => (true, Some(since_unix_ms)),
                // It may have been started again.
                None if has_left && !serves_unreached => return None,
                None if mode == Mode::Async => {
                    let since = known.map(|known| known.mode_since_unix_ms);
                    (true, since.filter(|since| *since > 0).map(before))
                }
                // What it says comes in order with its beacons: when it sent the last one it held.
                None => (false, self.held_until_unix_ms(&peer, now).map(before)),
            };
            let is_exposed = is_known || after_ms.is_some() || serves_unreached;
            let after_ms = after_ms.filter(|_| degraded.is_some() || !is_known);
            let Peer { name: member, host, .. } = peer;
            is_exposed.then_some(Exposure {
                member,
                host,
                after_ms,
                is_known,
                since_unix_ms,
                serves_unreached,
            })
        });
        exposed.take(NAMES_MAX).collect()
    }

    /// When the member certainly held, by this server's wall clock, or by the time of its last record.
    fn held_until_unix_ms(&self, peer: &Peer, now: Now) -> Option<u64> {
        let held = self.held_at_unix_ms(&peer.name, now);
        // The server has been started since.
        held.or(Some(peer.last_record_ms).filter(|ms| *ms > 0))
    }

    /// The same, if it was heard since the server was started.
    fn held_at_unix_ms(&self, name: &str, now: Now) -> Option<u64> {
        let ago_ms = now.mono.since_ns(self.held.at(name)?).div_ceil(1_000_000);
        Some(now.unix_ms.saturating_sub(ago_ms))
    }
}
