//! The rules in nftables: one table per member and family, replaced in one transaction.
//!
//! A table of our own needs no place among the user's rules: every table's chains see the packet,
//! and ours see it before the usual filter priority. Counters show the operator that packets come.

#[cfg(test)]
mod tests;

use super::names::table;
use super::tool::{find, run};
use super::{MemberRules, RulesError, Topology};
use crate::packet::NEIGHBOUR_DISCOVERY_TYPES;
use std::path::PathBuf;

pub(super) const NAME: &str = "nft";
const PROBE_TABLE: &str = "tidelock_probe";
/// Before the filter priority of its family (0 for inet; bridges filter at -200).
const PRIORITY_INET: i32 = -150;
const PRIORITY_BRIDGE: i32 = -250;
/// Before anybody else looks, iptables' queue among them.
const PRIORITY_CUT_OFF: i32 = -350;

/// nftables.
#[derive(Clone, Debug)]
pub(super) struct Nft {
    tool: PathBuf,
    /// The families that this kernel has, be it without a queue.
    inet: bool,
    bridge: bool,
}

impl Nft {
    pub(super) fn find() -> Option<Nft> {
        Some(Nft { tool: find("nft")?, inet: false, bridge: false })
    }

    /// Whether it can filter what such a member sends, be it without a queue.
    pub(super) fn has(&self, topology: Topology) -> bool {
        match topology {
            Topology::Routed => self.inet,
            Topology::Bridged => self.bridge,
        }
    }

    /// Builds and removes a scratch table with what will be needed, in one transaction.
    pub(super) fn try_queue(&mut self) -> Result<(), RulesError> {
        self.inet = self.probe("inet", "drop").is_ok();
        self.bridge = self.probe("bridge", "ether type ip drop").is_ok();
        self.probe("inet", "queue num 0")?;
        if self.bridge {
            self.probe("bridge", "queue num 0")?;
        }
        Ok(())
    }

    fn probe(&self, family: &str, rule: &str) -> Result<(), RulesError> {
        let script = format!(
            "table {family} {PROBE_TABLE} {{\n chain probe {{ {rule}\n }}\n}}\n\
             delete table {family} {PROBE_TABLE}\n"
        );
        self.script(&script, "queue packets (its queue statement)")
    }

    pub(super) fn install(&self, rules: &MemberRules) -> Result<(), RulesError> {
        let chains = match rules.topology {
            Topology::Routed => routed(rules),
            Topology::Bridged => bridged(rules),
        };
        let script = self.replace(family(rules.topology), &rules.member, &chains);
        self.script(&script, "install the rules")
    }

    /// Beside iptables: drops what iptables does not see or cannot tell. In the place of whatever
    /// there was of the member.
    pub(super) fn install_companion(&self, rules: &MemberRules) -> Result<(), RulesError> {
        let script = self.replace(family(rules.topology), &rules.member, &companion(rules));
        self.script(&script, "install the rules that drop what iptables cannot see")
    }

    pub(super) fn listing(&self, rules: &MemberRules) -> Result<Vec<String>, RulesError> {
        let family = family(rules.topology);
        let arguments = ["--stateless", "list", "table", family, &table(&rules.member)];
        let listed = run(&self.tool, &arguments, "", "list the rules")?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    pub(super) fn remove(&self, member: &str) -> Result<(), RulesError> {
        self.script(&self.clear(member), "remove the rules")
    }

    fn script(&self, script: &str, doing: &'static str) -> Result<(), RulesError> {
        run(&self.tool, &["-f", "-"], script, doing).map(drop)
    }

    fn replace(&self, family: &str, member: &str, chains: &str) -> String {
        format!("{}table {family} {} {{\n{chains}}}\n", self.clear(member), table(member))
    }

    fn clear(&self, member: &str) -> String {
        let families = [("bridge", self.bridge), ("inet", self.inet)];
        let families = families.into_iter().filter(|(_, is_there)| *is_there);
        families.map(|(family, _)| clear_family(family, member)).collect()
    }
}

/// The family that sees what such a member sends.
pub(super) fn family(topology: Topology) -> &'static str {
    match topology {
        Topology::Routed => "inet",
        Topology::Bridged => "bridge",
    }
}

/// The first rules of each chain. They drop what a rule that goes by the member's name would take for something else,
/// and let go at once what is nobody's business here: what is left comes from the guest, and is to be judged. `iif` and
/// `oif` are indices, which cost less than names; an interface's name may change, its index may not.
#[derive(Default)]
struct First {
    forward: String,
    input: String,
    /// What the host itself sends: the other chains do not see it.
    output: String,
    /// For forward and input alike, what comes after these: needed only where more rules follow.
    others: String,
}

impl First {
    fn of(rules: &MemberRules) -> First {
        let MemberRules { interface, index, pass_mark, only_that_index, .. } = rules;
        let others = format!("  iifname != \"{interface}\" accept\n");
        let Some(index) = index else { return First { others, ..First::default() } };
        let marked = |mark| format!("  iif {index} meta mark & {mark:#x} == {mark:#x} accept\n");
        let renamed = format!("  iif {index} iifname != \"{interface}\" counter drop\n");
        let from = pass_mark.map_or(String::new(), marked) + &renamed;
        if !only_that_index {
            return First { forward: from.clone(), input: from, output: String::new(), others };
        }
        // Whatever comes to the interface that is watched was judged where it came from, and is seen where it leaves.
        let to = format!("  oif {index} iif != {index} accept\n");
        let from_another = format!("  iif != {index} iifname \"{interface}\" counter drop\n");
        let to_another = format!("  oif != {index} oifname \"{interface}\" counter drop\n");
        First {
            forward: format!("{from}{to}{from_another}{to_another}"),
            input: from + &from_another,
            output: to_another,
            others: format!("  iif != {index} accept\n"),
        }
    }

    /// The chains of a table: with `from_guest`, and `to_host` before it in the input chain.
    fn chains(&self, priority: i32, from_guest: &str, to_host: &str) -> String {
        let others = if from_guest.is_empty() { "" } else { &self.others };
        let First { forward, input, output, .. } = self;
        chain("forward", priority, &format!("{forward}{others}{from_guest}"))
            + &chain("input", priority, &format!("{input}{others}{to_host}{from_guest}"))
            + &chain("output", priority, output)
    }
}

/// A base chain. Without rules none: each one costs every packet of the host something.
fn chain(hook: &str, priority: i32, rules: &str) -> String {
    if rules.is_empty() {
        return String::new();
    }
    format!(" chain {hook} {{ type filter hook {hook} priority {priority};\n{rules} }}\n")
}

/// Deletes a table whether or not it is there.
fn clear_family(family: &str, member: &str) -> String {
    let table = table(member);
    format!("add table {family} {table}\ndelete table {family} {table}\n")
}

fn discovery() -> String {
    let (first, last) = NEIGHBOUR_DISCOVERY_TYPES.into_inner();
    format!("icmpv6 type {first}-{last} accept")
}

fn routed(rules: &MemberRules) -> String {
    let queued = format!("  counter queue num {}\n", rules.queue);
    First::of(rules).chains(PRIORITY_INET, &queued, &format!("  {}\n", discovery()))
}

fn bridged(rules: &MemberRules) -> String {
    let (queue, discovery) = (rules.queue, discovery());
    let queued = format!(
        "  ether type arp accept\n\
         \x20 ether type ip6 {discovery}\n\
         \x20 ether type {{ ip, ip6 }} counter queue num {queue}\n\
         \x20 drop\n"
    );
    First::of(rules).chains(PRIORITY_BRIDGE, &queued, "")
}

/// Beside the queue of iptables, which comes later.
fn companion(rules: &MemberRules) -> String {
    let unseen = match rules.topology {
        Topology::Routed => "",
        Topology::Bridged => "  ether type != { ip, ip6, arp } drop\n",
    };
    First::of(rules).chains(PRIORITY_CUT_OFF, unseen, "")
}
