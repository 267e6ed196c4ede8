//! What members hear that no tag names: from hosts in mode async, or degraded, and by way of clients.
//!
//! `docs/causality.md`, section 5, says when a member answers for it. Until then it is *hearsay*, and the
//! checkers do not hold what the member tells against it. From then on it is among the guest's rumours, and so
//! must be covered by whatever leaves once P is complete:
//! - all that it had heard before it asked for a floor, when that is answered;
//! - all that it had heard before its run attached, if the backup had to tell it that somebody may be in
//!   mode async ([`Message::Unheard`](tidelock_protocol::message::Message::Unheard));
//! - all that a host had let out, when that host has asked on behalf of everyone and the answer has come here.
//!   The backup keeps that answer in memory: who has not heard it when the group is opened anew does not.

use crate::failure::{Checked, Checker, check};
use crate::guest::{Known, Packet, learn};
use crate::oracle::Point;
use crate::scenario::VmPlan;
use crate::world::World;
use std::collections::{BTreeMap, BTreeSet};
use tidelock_protocol::ids::WriterId;
use tidelock_protocol::message::{CopyState, Message, Mode, Policy};
use tidelock_replica::group::{ConnectionId, Group, Link};
use tidelock_store::journal::Standing;

/// What a host has let out, as long as nobody has said so to the others.
#[derive(Clone, Debug, Default)]
pub struct Leak {
    let_out: Known,
    /// It has asked on behalf of everyone when it had let out this.
    asked: Option<Known>,
}

/// An answer for everyone, which was given while the group was open for the nth time.
#[derive(Clone, Debug)]
pub struct Answer {
    at_ns: u64,
    opening: u64,
    let_out: Known,
}

/// Who tells what no tag names, by group.
#[derive(Debug, Default)]
pub struct Leaks {
    by_host: BTreeMap<usize, Leak>,
    answers: Vec<Answer>,
}

/// What the backup was told of its members, as it has to keep it.
#[derive(Debug, Default)]
pub struct Said {
    policies: BTreeMap<usize, Policy>,
    /// What it was told last, and has not said that it keeps.
    not_kept: BTreeMap<usize, Policy>,
    attached: BTreeMap<usize, Link>,
    /// By which connection each member was attached, or has spoken, last.
    newest: BTreeMap<usize, ConnectionId>,
    has_left: BTreeMap<usize, bool>,
    /// Who has left, and is not attached again. The server keeps it in memory.
    gone: BTreeSet<usize>,
    /// Hosts whose questions were answered, and in which opening.
    answered: BTreeMap<usize, u64>,
    /// Who has said so since the group was opened.
    heard: BTreeSet<usize>,
    /// And in the opening before.
    was_heard: BTreeSet<usize>,
    /// Who must be told that others may be in mode async, before it has a lease.
    owed: BTreeSet<Link>,
}

/// What both know.
#[must_use]
pub fn shared(mine: &Known, theirs: &Known) -> Known {
    mine.iter().zip(theirs).map(|(a, b)| *a.min(b)).collect()
}

impl Said {
    /// The group is shut: nobody is attached.
    pub fn reset(&mut self) {
        self.attached.clear();
        self.answered.clear();
        self.was_heard = std::mem::take(&mut self.heard);
        self.gone.clear();
        self.owed.clear();
    }

    /// Whether a member was heard since the group was opened.
    #[must_use]
    pub fn has_heard(&self, vm: usize) -> bool {
        self.heard.contains(&vm)
    }

    /// True if a member was heard in the opening before.
    #[must_use]
    pub fn was_heard(&self, vm: usize) -> bool {
        self.was_heard.contains(&vm)
    }

    /// A connection is gone.
    pub fn lost(&mut self, connection: ConnectionId) {
        self.attached.retain(|_, link| link.connection != connection);
    }
}

impl World {
    /// A member of a host tells others what nobody has waited for.
    pub fn leaks(&mut self, vm: usize, known: &Known) {
        let plan = &self.plan.vms[vm];
        let leak = self.leaks[plan.group].by_host.entry(plan.host).or_default();
        leak.let_out.resize(known.len(), Point::default());
        learn(&mut leak.let_out, known);
    }

    /// A member tells others what nobody has waited for. The backup asks no floor of a writer that has left, because
    /// it has all that this one ever wrote, and a recovery does not name it: that must be so. Of one that is not
    /// whole it knows that it does not have all.
    pub fn check_not_gone(&self, vm: usize, known: &Known) -> Checked {
        let VmPlan { host, group, .. } = self.plan.vms[vm];
        // The backup has it on record, or the operator has taken it upon himself.
        if self.plan.groups[group].serves_unreached || self.is_ordered_async(host, group) {
            return Ok(());
        }
        let said = &self.backup.groups[group].said;
        self.check_has_all_of(vm, known, |vm| said.has_left.get(&vm).copied().unwrap_or(false))
    }

    /// A member tells another one by a tag, or on its host: who resyncs next would not be asked to wait for what it tells of a
    /// writer that has left.
    pub fn check_hands_over(&self, vm: usize, known: &Known) -> Checked {
        let group = self.plan.vms[vm].group;
        if self.plan.groups[group].serves_unreached {
            return Ok(());
        }
        let said = &self.backup.groups[group].said;
        self.check_has_all_of(vm, known, |vm| said.gone.contains(&vm))
    }

    /// The backup has all that is known of these writers, as far as they are on the host of the member.
    fn check_has_all_of(
        &self,
        vm: usize,
        known: &Known,
        is_gone: impl Fn(usize) -> bool,
    ) -> Checked {
        let VmPlan { host, group, .. } = self.plan.vms[vm];
        let slot = &self.backup.groups[group];
        let Some(state) = slot.group().map(Group::state) else { return Ok(()) };
        let gone = |vm: &usize| {
            let plan = &self.plan.vms[*vm];
            let Some(of) = state.writers.get(usize::from(plan.writer)) else { return false };
            let is_counted = of.standing != Standing::Removed && of.copy == CopyState::Whole;
            is_counted && is_gone(*vm)
        };
        let writers = self.plan.groups[group].vms.iter().zip(known);
        let mut here = writers.filter(|(vm, _)| self.plan.vms[**vm].host == host && gone(vm));
        let untold = here.find(|(vm, point)| {
            let have = slot.contiguous.get(WriterId(self.plan.vms[**vm].writer));
            !self.vms[**vm].oracle.has(**point, have)
        });
        check(untold.is_none(), Checker::Degraded, || {
            let (of, point) = untold.expect("just seen");
            format!("vm {vm} lets out {point:?} of vm {of}, which has left, as the backup has it")
        })
    }

    /// A host asks on behalf of everyone.
    pub fn asks_for_everyone(&mut self, host: usize, group: usize) {
        if let Some(leak) = self.leaks[group].by_host.get_mut(&host) {
            leak.asked = Some(leak.let_out.clone());
        }
    }

    /// A daemon starts. What it asks then is for everyone. If it has no question, the last one was answered.
    pub fn asks_at_start(&mut self, host: usize, group: usize, in_force: Mode, asks: bool) {
        match asks && in_force != Mode::Async {
            true => self.asks_for_everyone(host, group),
            false if asks => {}
            false => drop(self.leaks[group].by_host.remove(&host)),
        }
    }

    /// The daemon of a host is gone, and its questions with it.
    pub fn asks_nothing(&mut self, host: usize) {
        for leaks in &mut self.leaks {
            if let Some(leak) = leaks.by_host.get_mut(&host) {
                leak.asked = None;
            }
        }
    }

    /// A member of a host has an answer.
    pub fn is_answered(&mut self, vm: usize) {
        let (host, group) = (self.plan.vms[vm].host, self.plan.vms[vm].group);
        let slot = &self.backup.groups[group];
        let opening = slot.said.answered.get(&host).copied();
        let leaks = &mut self.leaks[group];
        let Some(leak) = leaks.by_host.get_mut(&host) else { return };
        let Some(let_out) = leak.asked.take() else { return };
        leaks.by_host.remove(&host);
        if let Some(opening) = opening.filter(|opening| *opening == slot.opening()) {
            leaks.answers.push(Answer { at_ns: self.schedule.now_ns(), opening, let_out });
        }
    }

    /// The backup answers a question.
    pub fn answers(&mut self, group: usize, link: Link) {
        let Some(host) = self.net.conns.get(&link.connection.0).map(|conn| conn.host) else {
            return;
        };
        let slot = &mut self.backup.groups[group];
        let opening = slot.opening();
        slot.said.answered.insert(host, opening);
    }

    /// Who attaches while others may be in mode async is told so before its first lease.
    pub fn check_unheard(&mut self, group: usize, link: Link, message: &Message) -> Checked {
        if let (Message::Attached(_), Some(vm)) =
            (message, self.backup.groups[group].vms.get(&link).copied())
        {
            // What comes of an older connection after this is late.
            let said = &mut self.backup.groups[group].said;
            said.newest.insert(vm, link.connection);
            said.gone.remove(&vm);
            // An attachment before it that was refused came to nothing.
            said.owed.remove(&link);
        }
        let owed = &mut self.backup.groups[group].said.owed;
        match message {
            Message::Unheard => drop(owed.remove(&link)),
            Message::PolicyKept(kept) => {
                let Some(vm) = self.backup.groups[group].vms.get(&link).copied() else {
                    return Ok(());
                };
                let said = &mut self.backup.groups[group].said;
                if let Some(policy) = said.not_kept.get(&vm).filter(|policy| *policy == kept) {
                    said.policies.insert(vm, *policy);
                }
            }
            Message::Lease { .. } => check(!owed.contains(&link), Checker::Degraded, || {
                format!(
                    "group {group}: {link:?} has a lease, and does not know who is in mode async"
                )
            })?,
            _ => {}
        }
        Ok(())
    }

    /// A member hears what others know: what was known to be in P, and what was not.
    pub fn hears_unsaid(&mut self, vm: usize, unsaid: &Known) {
        self.notice_question(vm);
        let guest = &mut self.vms[vm].guest;
        learn(&mut guest.hearsay, unsaid);
        let vouched = shared(unsaid, &guest.vouched);
        learn(&mut guest.rumours, &vouched);
    }

    /// Whether the member has a question by now that it had not: all that it has heard is answered with it.
    pub fn notice_question(&mut self, vm: usize) {
        let Some(run) = &mut self.vms[vm].run else { return };
        let asks = run.pending.incomplete().filter(|_| run.gate.handle().mode() != Mode::Async);
        let before = std::mem::replace(&mut run.asks, asks);
        if asks.is_none() || asks == before {
            return;
        }
        // What waits is stamped anew with the answer.
        run.gate.for_each_waiting(vm, Packet::is_answered_for);
        let guest = &mut self.vms[vm].guest;
        let (hearsay, on_disk) = (guest.hearsay.clone(), guest.hearsay_on_disk.clone());
        guest.answers_for(&hearsay, &on_disk);
    }

    /// The member has a lease: it has heard what the backup had to tell it before.
    pub fn notice_lease(&mut self, vm: usize) {
        let (host, group) = (self.plan.vms[vm].host, self.plan.vms[vm].group);
        let Some(run) = &mut self.vms[vm].run else { return };
        let Some(sent_at) = run.gate.answered_at() else { return };
        if !std::mem::replace(&mut run.was_leased, true)
            && let Some(before) = run.heard_before.take()
        {
            learn(&mut self.vms[vm].guest.rumours, &before);
        }
        let clock = self.plan.hosts[host];
        let opening = self.backup.groups[group].opening();
        let guest = &mut self.vms[vm].guest;
        while let Some(answer) = self.leaks[group].answers.get(guest.answers_heard)
            && clock.mono(answer.at_ns) <= sent_at
        {
            guest.answers_heard += 1;
            if answer.opening == opening {
                guest.is_vouched_for(&answer.let_out);
            }
        }
    }

    /// The backup is told what a member does without it.
    pub fn is_told_policy(&mut self, group: usize, link: Link, message: &Message) {
        let Some(vm) = self.backup.groups[group].vms.get(&link).copied() else { return };
        // Late bytes of an older connection have no say, nor what comes of one that is attached no more.
        let said = &mut self.backup.groups[group].said;
        let newest = *said.newest.entry(vm).or_insert(link.connection);
        let says_policy = matches!(message, Message::Policy(_));
        if newest > link.connection || (!says_policy && said.attached.get(&vm) != Some(&link)) {
            return;
        }
        said.newest.insert(vm, link.connection);
        let must_tell = match message {
            Message::Policy(_) => self.others_may_be_async(group, vm),
            _ => false,
        };
        let slot = &mut self.backup.groups[group];
        let said = &mut slot.said;
        let mut is_first = false;
        match message {
            Message::Policy(policy) => {
                is_first = said.attached.insert(vm, link) != Some(link);
                said.heard.insert(vm);
                said.has_left.insert(vm, false);
                // It counts when the backup says that it keeps it: it may have no room.
                said.policies.remove(&vm);
                said.not_kept.insert(vm, *policy);
            }
            Message::Detach { .. } => {
                said.attached.remove(&vm);
                said.has_left.insert(vm, true);
                said.gone.insert(vm);
            }
            // Its gate is shut for good.
            Message::GiveUpLease => {
                said.has_left.insert(vm, true);
            }
            _ => {}
        }
        // What a run has said may be taken when it has ended, and another one runs.
        let daemon = self.hosts[self.plan.vms[vm].host].daemon.as_ref();
        if daemon.is_none_or(|daemon| daemon.link.conn() != Some(link.connection.0)) {
            return;
        }
        let has_leased = self.vms[vm].run.as_ref().is_none_or(|run| run.was_leased);
        if must_tell && is_first && !has_leased {
            said.owed.insert(link);
        }
        let guest = &self.vms[vm].guest;
        let hearsay = must_tell.then(|| guest.hearsay.clone());
        if let Some(run) = self.vms[vm].run.as_mut().filter(|run| !run.was_leased)
            && run.heard_before.is_none()
        {
            run.heard_before = hearsay;
        }
    }

    /// Whether a member is in mode async for all that the backup knows, or may be because it cannot be
    /// heard.
    fn others_may_be_async(&self, group: usize, vm: usize) -> bool {
        let (of, said) = (&self.plan.groups[group], &self.backup.groups[group].said);
        let others = of.members().filter(|other| *other != vm && !of.leaving.contains(other));
        others.filter_map(|other| Some((other, said.policies.get(&other)?))).any(
            |(other, policy)| {
                let has_left = said.has_left.get(&other).copied().unwrap_or(false);
                let is_async = policy.mode == Mode::Async;
                match said.attached.contains_key(&other) {
                    true => is_async && !has_left,
                    false => !has_left && (is_async || policy.after_ms.is_some()),
                }
            },
        )
    }
}
