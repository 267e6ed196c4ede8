//! Rules that somebody takes away, as `nft flush ruleset` does, and with it each restart of a packet filter whose
//! configuration begins so.
//!
//! Without its rules a guest's packets leave unheld, and the promise of rule 1 is broken: by whoever took them away,
//! but we must end it and say it. So rules that are not as they were installed are installed again at once, and the
//! operator is told that clients may have been told what a disaster can undo. What had waited in the queue the kernel
//! drops together with the rules that queued it; TCP sends it again.
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
    /// Looks at every member's rules, and installs those again that somebody has changed. Runs the packet filter's
    /// tools, in the network namespace of the calling thread.
    pub fn follow_rules(&mut self) -> RulesFound {
        // All of them before the first is put back: with its table come those of others.
        let looked = self.look_at_rules();
        let members = self.members.iter_mut().zip(looked);
        let found = members.map(|(member, looked)| member.follow_rules(&mut self.firewall, looked));
        found.max().unwrap_or(RulesFound::InPlace)
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
                    tracing::warn!(member = self.name, "gate: its rules cannot be looked at: {e}");
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
                    "gate: somebody had changed its rules ({what}), and its packets may have left unheld since then: \
                     a disaster can undo what they told clients; the rules are back; find out what changes the packet \
                     filter (a restart or reload of nftables.service?), and keep it from that"
                );
                RulesFound::PutBack
            }
            Err(e) => {
                let said = format!("({what}), and they cannot be put back: {}", with_source(&e));
                if self.is_news(&said) {
                    tracing::error!(
                        member = self.name,
                        packet_filter = self.installed.backend,
                        "gate: somebody has changed its rules {said}; its packets may leave unheld, and a disaster can \
                         undo what they tell clients; it is tried again: mend this, or cut the guest off"
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
