//! Rules that somebody takes away, as `nft flush ruleset` does, and with it each restart of a packet filter whose
//! configuration begins so.
//!
//! Without its rules a guest's packets leave unheld, and the promise of rule 1 is broken: by whoever took them away,
//! but we must end it and say it. It is ended in two steps. As soon as the rules may be gone, a member's kernel programs
//! drop what they would leave to them; what is covered, or tagged, they let pass as ever. Then rules that are not as they
//! were installed are installed again, and the operator is told that clients may have been told what a disaster can
//! undo. What had waited in the queue the kernel drops together with the rules that queued it. TCP sends all of it
//! again.
//!
//! When to look is the caller's: when the kernel tells of a change ([`RuleChanges`](crate::rules::RuleChanges)), and
//! now and then, because it does not tell of all of them.

use super::{Gate, MemberGate, install};
use crate::rules::{Firewall, RulesError};
use tidelock_tagging::interface_index;

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

impl Gate {
    /// Members' rules may be gone: until [`follow_rules`](Self::follow_rules) has found them in place, or put them
    /// back, the kernel programs drop what they would leave to them. A member without programs goes on.
    pub fn doubt_rules(&self) {
        self.rules_are_gone(true);
    }

    fn rules_are_gone(&self, gone: bool) {
        self.handles.iter().for_each(|(_, handle)| handle.rules_are_gone(gone));
    }

    /// Looks at every member's rules, and installs those again that somebody has changed. Runs the packet filter's
    /// tools, in the network namespace of the calling thread.
    pub fn follow_rules(&mut self) -> RulesFound {
        // All of them before the first is put back: with its table come those of others.
        let looked = self.look_at_rules();
        if looked.iter().any(|looked| matches!(looked, Err(RulesError::Changed { .. }))) {
            self.doubt_rules();
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
        self.rules_are_gone(false);
        found
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
                return RulesFound::InPlace;
            }
            Err(RulesError::Changed { what, .. }) => {
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
