//! Rules that somebody takes away, as `nft flush ruleset` does, and with it each restart of a packet filter whose
//! configuration begins so.
//!
//! Without its rules a guest's packets leave unheld, and the promise of rule 1 is broken: by whoever took them away,
//! but we must end it and say it. It is ended in two steps. As soon as the rules may be gone, a member's kernel programs
//! drop what they would leave to them; what is covered, or tagged, they let pass as ever. Then rules that are not as they
//! were installed are installed again, and the operator is told that clients may have been told what a disaster can
//! undo. What had waited in the queue the kernel drops together with the rules that queued it. TCP sends all of it
//! again. Rules that were put back are relied on again after a second in which nobody has taken them away once more:
//! whoever flushes them again and again gets one moment in which packets leave, not one with each flush.
//!
//! When to look is the caller's: when the kernel tells of a change ([`RuleChanges`](crate::rules::RuleChanges)), and
//! now and then, because it does not tell of all of them.

use super::{Gate, GateHandle, MemberGate, install};
use crate::rules::{Firewall, RulesError};
use crate::sys::now;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tidelock_tagging::interface_index;

/// How long rules that were put back must stand before anything is left to them.
const RELY_AFTER_MS: u64 = 1000;

/// What a look at the rules has found; of several, the last of these counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RulesFound {
    /// They stand as they were installed.
    InPlace,
    /// Somebody had changed them; they are back.
    PutBack,
    /// They could not be looked at, or not be put back. Look again soon.
    Failing,
}

/// Says that members' rules may be gone. It needs no lock on the gate, which somebody may have who looks at the rules or
/// puts them back at this moment.
#[derive(Clone, Debug)]
pub struct RulesDoubt {
    groups: Vec<GateHandle>,
    /// How often they were doubted.
    count: Arc<AtomicU64>,
}

impl RulesDoubt {
    pub(super) fn of(groups: Vec<GateHandle>) -> Self {
        Self { groups, count: Arc::default() }
    }

    /// Until [`Gate::follow_rules`] has begun after this and found the rules in place, or put them back, the kernel
    /// programs drop what they would leave to them. A member without programs goes on.
    pub fn doubt(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.set(true);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// The rules stand, unless they were doubted after this count was read.
    fn end(&self, count: u64) {
        if self.count() == count {
            self.set(false);
        }
        // Whoever doubts counts first.
        if self.count() != count {
            self.set(true);
        }
    }

    fn set(&self, are_gone: bool) {
        self.groups.iter().for_each(|group| group.rules_are_gone(are_gone));
    }
}

impl Gate {
    /// Members' rules may be gone: see [`RulesDoubt::doubt`].
    #[must_use]
    pub fn rules_doubt(&self) -> RulesDoubt {
        self.rules_doubt.clone()
    }

    /// Looks at every member's rules, and installs those again that somebody has changed. Runs the packet filter's
    /// tools, in the network namespace of the calling thread.
    pub fn follow_rules(&mut self) -> RulesFound {
        let mut doubts = self.rules_doubt.count();
        // All of them before the first is put back: with its table come those of others.
        let looked = self.look_at_rules();
        if looked.iter().any(|looked| matches!(looked, Err(RulesError::Changed { .. }))) {
            self.rules_doubt.doubt();
            // One look ends what it has begun itself.
            doubts += 1;
            self.relies_at = now().plus_ms(RELY_AFTER_MS);
        }
        let members = self.members.iter_mut().zip(looked);
        let found = members.map(|(member, looked)| member.follow_rules(&mut self.firewall, looked));
        let found = found.max().unwrap_or(RulesFound::InPlace);
        let are_in_place = match found {
            RulesFound::InPlace => true,
            // Who has taken them away may have done so again: a restart of nftables.service does it twice.
            RulesFound::PutBack => self.look_at_rules().iter().all(Result::is_ok),
            RulesFound::Failing => false,
        };
        if !are_in_place {
            return RulesFound::Failing;
        }
        if self.relies_on_rules() {
            self.rules_doubt.end(doubts);
        }
        found
    }

    /// Whether rules that were put back have stood for long enough to be relied on, if the next
    /// [`follow_rules`](Self::follow_rules) finds them in place.
    #[must_use]
    pub fn relies_on_rules(&self) -> bool {
        now() >= self.relies_at
    }

    /// Of each member, whether its rules stand as they were installed.
    pub(super) fn look_at_rules(&self) -> Vec<Result<(), RulesError>> {
        self.firewall.verify(self.members.iter().map(|member| &member.installed))
    }
}

impl MemberGate {
    fn follow_rules(
        &mut self,
        firewall: &mut Firewall,
        looked: Result<(), RulesError>,
    ) -> RulesFound {
        let what = match looked {
            Ok(()) => {
                self.rules_trouble = None;
                self.rules_are_gone = false;
                return RulesFound::InPlace;
            }
            Err(RulesError::Changed { what, .. }) => {
                if !std::mem::replace(&mut self.rules_are_gone, true) {
                    self.stats.may_have_left();
                }
                let rules = &self.installed.rules;
                self.has_heard_unseen |=
                    rules.only_that_index && interface_index(&rules.interface) != rules.index;
                what
            }
            Err(e) => {
                let e = with_source(&e);
                if self.is_news(&e) {
                    tracing::warn!(
                        member = self.name,
                        "gate: its rules cannot be looked at: {e}; if the kernel has told of a change of them, what is \
                         not covered is dropped until they can"
                    );
                }
                return RulesFound::Failing;
            }
        };
        match install(firewall, &self.installed.rules) {
            Ok(installed) => {
                self.installed = installed;
                self.rules_trouble = None;
                self.rules_are_gone = false;
                self.stats.rules_restored();
                tracing::error!(
                    member = self.name,
                    packet_filter = self.installed.backend,
                    "gate: somebody had changed its rules ({what}), and its packets may have left unheld until this was \
                     seen: a disaster can undo what they told clients; the rules are back; find out what changes the \
                     packet filter (a restart or reload of nftables.service?), and keep it from that"
                );
                RulesFound::PutBack
            }
            Err(e) => {
                let meanwhile = match self.tagging.tags() {
                    Some(_) => "what is not covered is dropped until they are back: mend this",
                    None => {
                        "its packets may leave unheld, and a disaster can undo what they tell clients: mend this, or \
                         cut the guest off"
                    }
                };
                let said = format!("({what}), and they cannot be put back: {}", with_source(&e));
                if self.is_news(&said) {
                    tracing::error!(
                        member = self.name,
                        packet_filter = self.installed.backend,
                        "gate: somebody has changed its rules {said}; it is tried again, and {meanwhile}"
                    );
                }
                RulesFound::Failing
            }
        }
    }

    /// Whether this was not what was said last.
    fn is_news(&mut self, trouble: &str) -> bool {
        self.rules_trouble.replace(trouble.to_owned()).as_deref() != Some(trouble)
    }
}

fn with_source(error: &RulesError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
