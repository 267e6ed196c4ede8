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

/// Lets go at once what the other rules of a chain have nothing to say about, which is nearly all: names cost more than
/// numbers, and the chain is every packet's of the host.
struct Early {
    forward: String,
    input: String,
}

impl Early {
    fn of(rules: &MemberRules) -> Early {
        let interface = &rules.interface;
        let other = format!("iifname != \"{interface}\"");
        let Some(index) = rules.only_index else {
            let rule = format!("  {other} accept\n");
            return Early { forward: rule.clone(), input: rule };
        };
        let not_to = format!("oifname != \"{interface}\"");
        let passed =
            rules.pass_mark.map(|mark| format!("meta mark & {mark:#x} == {mark:#x} accept"));
        let covered = |to: &str| {
            passed.as_ref().map_or(String::new(), |passed| format!("  iif {index} {to}{passed}\n"))
        };
        Early {
            forward: covered(&format!("{not_to} "))
                + &format!("  oif {index} {other} accept\n  {other} {not_to} accept\n"),
            input: covered("") + &format!("  {other} accept\n"),
        }
    }
}

/// Cuts off an interface that has the member's name and is not the one that is watched. `iif` and
/// `oif` are indices, the names beside them are looked at for each packet.
#[derive(Default)]
struct CutOff {
    /// Rules for what comes from it.
    from: String,
    /// Rules for what goes to it.
    to: String,
}

impl CutOff {
    fn of(rules: &MemberRules) -> CutOff {
        let MemberRules { interface, .. } = rules;
        rules.only_index.map_or_else(CutOff::default, |index| CutOff {
            from: format!("  iif != {index} iifname \"{interface}\" counter drop\n"),
            to: format!("  oif != {index} oifname \"{interface}\" counter drop\n"),
        })
    }

    /// What the host itself sends: the other chains do not see it.
    fn output(&self, priority: i32) -> String {
        chain("output", priority, &self.to)
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

/// What the member's kernel programs have let pass.
fn marked(rules: &MemberRules) -> String {
    let interface = &rules.interface;
    rules.pass_mark.map_or(String::new(), |mark| {
        format!("  iifname \"{interface}\" meta mark & {mark:#x} == {mark:#x} accept\n")
    })
}

fn routed(rules: &MemberRules) -> String {
    let MemberRules { interface, queue, .. } = rules;
    let (cut_off, discovery, marked) = (CutOff::of(rules), discovery(), marked(rules));
    let CutOff { from, to } = &cut_off;
    let Early { forward, input } = Early::of(rules);
    let queued = format!("{marked}  iifname \"{interface}\" counter queue num {queue}\n");
    chain("forward", PRIORITY_INET, &format!("{forward}{from}{to}{queued}"))
        + &chain(
            "input",
            PRIORITY_INET,
            &format!("{input}{from}  iifname \"{interface}\" {discovery}\n{queued}"),
        )
        + &cut_off.output(PRIORITY_INET)
}

fn bridged(rules: &MemberRules) -> String {
    let MemberRules { interface, queue, .. } = rules;
    let (cut_off, discovery, marked) = (CutOff::of(rules), discovery(), marked(rules));
    let CutOff { from, to } = &cut_off;
    let Early { forward, input } = Early::of(rules);
    let queued = format!(
        "  iifname \"{interface}\" ether type arp accept\n\
         \x20 iifname \"{interface}\" ether type ip6 {discovery}\n{marked}\
         \x20 iifname \"{interface}\" ether type {{ ip, ip6 }} counter queue num {queue}\n\
         \x20 iifname \"{interface}\" drop\n"
    );
    chain("forward", PRIORITY_BRIDGE, &format!("{forward}{from}{to}{queued}"))
        + &chain("input", PRIORITY_BRIDGE, &format!("{input}{from}{queued}"))
        + &cut_off.output(PRIORITY_BRIDGE)
}

/// Beside the queue of iptables, which comes later.
fn companion(rules: &MemberRules) -> String {
    let cut_off = CutOff::of(rules);
    let CutOff { from, to } = &cut_off;
    let (forward, input) = match rules.topology {
        Topology::Routed => (format!("{from}{to}"), from.clone()),
        Topology::Bridged => {
            let Early { forward, input } = Early::of(rules);
            let interface = &rules.interface;
            let unseen =
                format!("  iifname \"{interface}\" ether type != {{ ip, ip6, arp }} drop\n");
            (format!("{forward}{from}{to}{unseen}"), format!("{input}{from}{unseen}"))
        }
    };
    chain("forward", PRIORITY_CUT_OFF, &forward)
        + &chain("input", PRIORITY_CUT_OFF, &input)
        + &cut_off.output(PRIORITY_CUT_OFF)
}
