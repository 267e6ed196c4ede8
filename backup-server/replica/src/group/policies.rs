//! What members do when this server cannot be reached, kept durably for the day on which it matters:
//! `policies.json` beside the group's journal.
//!
//! A host whose policy is `async after T` opens its gate without a lease, so a recovery must know of it:
//! clients may have seen what the cut does not have, and the old primary may go on answering until it
//! hears of the new epoch. Invariant: a host is told that its policy is kept only when it is on stable
//! storage, and it neither asks for a lease nor degrades before.
//!
//! In the same way it is kept whether a start of a host's daemon that does not reach this server serves guests all the
//! same: such a host needs no lease either, also after it has left.
//!
//! The same file says who of the group is in mode async. Such a member tells others what no tag names
//! (`docs/causality.md`, section 5), so whoever attaches while that lasts, or may last, is told
//! ([`Unheard`](tidelock_protocol::message::Message::Unheard)) and asks for a floor before anything of it leaves.

use super::durable::Immediate;
use super::{Group, Link, Now};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidelock_planted::Bug;
use tidelock_protocol::ids::{Epoch, WriterId};
use tidelock_protocol::message::{Mode, Policy};
use tidelock_storage::Storage;
use tidelock_storage::json::{self, FileError};
use tidelock_store::FORMAT;
use tidelock_store::journal::Standing;

pub(super) const FILE: &str = "policies.json";

/// What is known of one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// The mode in force, as it said last.
    pub mode: Mode,
    /// Since when at the earliest, by this server's wall clock in milliseconds since the Unix epoch; 0: nobody knows.
    pub mode_since_unix_ms: u64,
    /// Its gate opens when something has waited so long for this server, in milliseconds; `None`: never.
    pub after_ms: Option<u64>,
    /// It has said that its gate was opened then, by its own wall clock in milliseconds since the Unix
    /// epoch, and not that this is over.
    pub degraded_since_unix_ms: Option<u64>,
    /// Its last run has ended with everything committed.
    pub has_left: bool,
    /// A run of it that has not reached this server answers clients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub serves_unreached: bool,
}

impl Known {
    fn policy(&self) -> Policy {
        let Self { mode, after_ms, degraded_since_unix_ms, .. } = *self;
        Policy { mode, after_ms, degraded_since_unix_ms }
    }
}

/// What clients of a member may have seen that a recovery does not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exposure {
    /// The member.
    pub member: String,
    /// The host that attached it last.
    pub host: String,
    /// The policy of its group there, in milliseconds; `None`: it holds, or what is known is that it was in mode async.
    pub after_ms: Option<u64>,
    /// The host has said that it does not hold. If not, it may have begun since it sent what was heard last.
    pub is_known: bool,
    /// Since when at the earliest, in milliseconds since the Unix epoch: by the host's wall clock if it is
    /// known to have degraded, else by this server's. If the server was started since the host was heard
    /// last, it is the time of the member's last record, as far as the hosts' clocks are right. `None`: nobody
    /// knows.
    pub since_unix_ms: Option<u64>,
    /// It answers clients also if it was started and has not reached this server, or after its gate was removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub serves_unreached: bool,
}

/// The file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Policies {
    format: u32,
    members: BTreeMap<String, Known>,
    /// What was said since, and there was no room for. It is tried again before anything that came after it is durable: who is
    /// not on record as degraded has held when it sent its last record.
    #[serde(skip)]
    unkept: BTreeMap<String, Known>,
    /// What was found out when the group was recovered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    recovery: Option<AtRecovery>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct AtRecovery {
    epoch: Epoch,
    exposed: Vec<Exposure>,
}

impl Default for Policies {
    fn default() -> Self {
        Self { format: FORMAT, members: BTreeMap::new(), unkept: BTreeMap::new(), recovery: None }
    }
}

impl Policies {
    pub(super) fn read<S: Storage>(storage: &S) -> Result<Self, FileError> {
        Ok(json::read(storage, FILE, FORMAT)?.unwrap_or_default())
    }

    /// What a member has said last, also if it could not be kept.
    fn said(&self, name: &str) -> Option<&Known> {
        self.unkept.get(name).or_else(|| self.members.get(name))
    }
}

/// One member, as [`Group`] sees it beside its policy.
struct Peer {
    name: String,
    host: String,
    /// The mode that it had said before there were policies.
    mode: Mode,
    /// It is attached, and has said since what it does.
    is_heard: bool,
    /// It has said that its gate is open, and there was no room for that.
    is_open: bool,
    has_left: bool,
    lease_ms: u64,
    /// The time of its last record, in milliseconds; 0: none.
    last_record_ms: u64,
}

impl<S: Storage> Group<S> {
    /// What each member has said that it does without this server.
    #[must_use]
    pub fn policies(&self) -> &BTreeMap<String, Known> {
        &self.policies.members
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
        let old = self.policies.said(&name);
        let mode_since_unix_ms = match old {
            Some(old) if old.mode == policy.mode => old.mode_since_unix_ms,
            // This may come long after it was said.
            Some(_) => self.held_at_unix_ms(&name, now).unwrap_or(0),
            None => now.unix_ms,
        };
        let Policy { mode, after_ms, degraded_since_unix_ms } = policy;
        let known = Known {
            mode,
            mode_since_unix_ms,
            after_ms,
            degraded_since_unix_ms,
            has_left: false,
            // It says that itself.
            serves_unreached: old.is_some_and(|old| old.serves_unreached),
        };
        if !tidelock_planted::is(Bug::PolicyForgotten) {
            self.keep_policy(&name, known);
        }
        let holds = mode != Mode::Async && degraded_since_unix_ms.is_none();
        let is_on_record = self
            .policies
            .members
            .get(&name)
            .is_some_and(|known| known.policy() == policy && !known.has_left);
        match holds || is_on_record {
            true => self.held.says_policy(&name, link),
            false => self.held.says_it_is_open(&name, link),
        }
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
        let kept = match self.policies.members.get(&name) {
            Some(_) if tidelock_planted::is(Bug::PolicyForgotten) => policy,
            // What is on record does not count for who has left.
            Some(known) if known.has_left => Policy::holding(Mode::Pipelined),
            Some(known) => known.policy(),
            None if tidelock_planted::is(Bug::PolicyForgotten) => policy,
            // There was no room for its first word.
            None => {
                let peer = self.peers().into_iter().find(|peer| peer.name == name);
                Policy::holding(peer.map_or(Mode::Pipelined, |peer| peer.mode))
            }
        };
        self.say_now(link, Immediate::PolicyKept(kept));
    }

    /// A member says whether a start that does not reach this server serves its guest. It has said its policy.
    pub(super) fn serves_unreached(&mut self, link: Link, serves: bool) {
        let Some(name) = self.name_of_link(link) else { return };
        if let Some(known) = self.policies.said(&name).cloned() {
            self.keep_policy(&name, Known { serves_unreached: serves, ..known });
        }
        if self.broken.is_none() {
            let known = self.policies.members.get(&name);
            let serves = known.is_some_and(|known| known.serves_unreached);
            self.say_now(link, Immediate::ServesUnreachedKept(serves));
        }
    }

    /// A member has ended cleanly: nothing of it was let out that is not here.
    pub(super) fn policy_has_left(&mut self, name: &str) {
        if let Some(mut known) = self.policies.said(name).cloned() {
            known.has_left = true;
            self.keep_policy(name, known);
        }
    }

    /// Makes it durable. Without room the old one stays in force, and the host hears so.
    fn keep_policy(&mut self, name: &str, known: Known) {
        let mut policies = self.policies.clone();
        policies.unkept.remove(name);
        policies.members.insert(name.to_owned(), known.clone());
        if policies == self.policies {
            return;
        }
        match json::write(&self.storage, "", FILE, &policies) {
            Ok(()) => self.policies = policies,
            Err(error) if error.is_full() => {
                self.policies.unkept.insert(name.to_owned(), known);
            }
            Err(error) => self.break_down(&error.into()),
        }
    }

    /// There may be room by now for what was said before the records that are to become durable.
    pub(super) fn keep_unkept(&mut self) {
        for (name, known) in self.policies.unkept.clone() {
            self.keep_policy(&name, known);
            if self.broken.is_some() || self.policies.unkept.contains_key(&name) {
                return;
            }
            let kept = self.policies.members[&name].clone();
            let mut links = self.all_links().into_iter();
            let link = links.find(|link| self.name_of_link(*link).as_ref() == Some(&name));
            // Who has come back since has something to say for itself.
            if let Some(link) = link.filter(|link| self.held.has_said(*link) && !kept.has_left) {
                self.held.says_policy(&name, link);
                self.say_now(link, Immediate::PolicyKept(kept.policy()));
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
                is_open: self.slots[i].link.is_some_and(|link| self.held.is_open(link)),
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
            is_open: link_of(name).is_some_and(|link| self.held.is_open(link)),
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
            let known = self.policies.said(&peer.name);
            let is_async = known.map_or(peer.mode, |known| known.mode) == Mode::Async;
            if peer.is_heard {
                return is_async || peer.is_open;
            }
            let has_left = peer.has_left || known.is_some_and(|known| known.has_left);
            !has_left && (is_async || known.is_some_and(|known| known.after_ms.is_some()))
        })
    }

    /// What clients may have seen that a recovery now does not have.
    #[must_use]
    pub fn exposed(&self, now: Now) -> Vec<Exposure> {
        self.exposed_as_of(Some(now))
    }

    /// What the recovery with this epoch has said. It may have been put on record without this: then it is
    /// what members had said last, because nothing of them was heard since.
    pub(super) fn exposed_at(&self, epoch: Epoch) -> Vec<Exposure> {
        match self.policies.recovery.as_ref().filter(|recovery| recovery.epoch == epoch) {
            Some(recovery) => recovery.exposed.clone(),
            None => {
                let mut exposed = self.exposed_as_of(None);
                exposed.retain(|of| self.policies.members.contains_key(&of.member));
                exposed
            }
        }
    }

    /// `None`: by what is on stable storage alone.
    fn exposed_as_of(&self, now: Option<Now>) -> Vec<Exposure> {
        let exposed = self.peers().into_iter().filter_map(|peer| {
            let known = self.policies.said(&peer.name);
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
        exposed.collect()
    }

    /// When the member certainly held, by this server's wall clock, or by the time of its last record.
    fn held_until_unix_ms(&self, peer: &Peer, now: Option<Now>) -> Option<u64> {
        let held = now.and_then(|now| self.held_at_unix_ms(&peer.name, now));
        // The server has been started since.
        held.or(Some(peer.last_record_ms).filter(|ms| *ms > 0))
    }

    /// The same, if it was heard since the server was started.
    fn held_at_unix_ms(&self, name: &str, now: Now) -> Option<u64> {
        let ago_ms = now.mono.since_ns(self.held.at(name)?).div_ceil(1_000_000);
        Some(now.unix_ms.saturating_sub(ago_ms))
    }

    /// Before the recovery of this epoch: what it will have to say.
    pub(super) fn remember_exposed(&mut self, epoch: Epoch, now: Now) {
        let exposed = self.exposed(now);
        self.policies.recovery = Some(AtRecovery { epoch, exposed });
        // No recovery fails for want of a file. If the disk does, the journal will tell.
        let _ = json::write(&self.storage, "", FILE, &self.policies);
    }
}
