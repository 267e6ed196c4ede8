//! The rules in nftables: one table per member and family, replaced in one transaction.
//!
//! A table of our own needs no place among the user's rules: every table's chains see the packet,
//! and ours see it before the usual filter priority. Counters show the operator that packets come.

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
            from: format!("  iifname \"{interface}\" iif != {index} counter drop\n"),
            to: format!("  oifname \"{interface}\" oif != {index} counter drop\n"),
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
    let queued = format!("{marked}  iifname \"{interface}\" counter queue num {queue}\n");
    chain("forward", PRIORITY_INET, &format!("{from}{to}{queued}"))
        + &chain(
            "input",
            PRIORITY_INET,
            &format!("{from}  iifname \"{interface}\" {discovery}\n{queued}"),
        )
        + &cut_off.output(PRIORITY_INET)
}

fn bridged(rules: &MemberRules) -> String {
    let MemberRules { interface, queue, .. } = rules;
    let (cut_off, discovery, marked) = (CutOff::of(rules), discovery(), marked(rules));
    let CutOff { from, to } = &cut_off;
    let queued = format!(
        "  iifname \"{interface}\" ether type arp accept\n\
         \x20 iifname \"{interface}\" ether type ip6 {discovery}\n{marked}\
         \x20 iifname \"{interface}\" ether type {{ ip, ip6 }} counter queue num {queue}\n\
         \x20 iifname \"{interface}\" drop\n"
    );
    chain("forward", PRIORITY_BRIDGE, &format!("{from}{to}{queued}"))
        + &chain("input", PRIORITY_BRIDGE, &format!("{from}{queued}"))
        + &cut_off.output(PRIORITY_BRIDGE)
}

/// Beside the queue of iptables, which comes later.
fn companion(rules: &MemberRules) -> String {
    let MemberRules { interface, topology, .. } = rules;
    let (cut_off, unseen) = (
        CutOff::of(rules),
        match topology {
            Topology::Routed => String::new(),
            Topology::Bridged => {
                format!("  iifname \"{interface}\" ether type != {{ ip, ip6, arp }} drop\n")
            }
        },
    );
    let CutOff { from, to } = &cut_off;
    chain("forward", PRIORITY_CUT_OFF, &format!("{from}{to}{unseen}"))
        + &chain("input", PRIORITY_CUT_OFF, &format!("{from}{unseen}"))
        + &cut_off.output(PRIORITY_CUT_OFF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfqueue::QueueNumber;

    type Build = fn(&MemberRules) -> String;

    fn rules(topology: Topology) -> MemberRules {
        MemberRules {
            member: "web".into(),
            interface: "tap0".into(),
            topology,
            queue: QueueNumber(40),
            pass_mark: None,
            only_index: None,
        }
    }

    #[test]
    fn old_tables_go_in_the_transaction_in_which_the_new_one_comes() {
        let nft = Nft { tool: PathBuf::new(), inet: true, bridge: true };
        let script = nft.replace("inet", "web", &routed(&rules(Topology::Routed)));
        let table = table("web");
        let at = |line: &str| script.find(line).expect(line);
        assert!(
            at(&format!("delete table bridge {table}")) < at(&format!("table inet {table} {{"))
        );
        assert!(at(&format!("delete table inet {table}")) < at(&format!("table inet {table} {{")));
        assert_eq!(script.matches("queue num 40").count(), 2);
        assert!(!script.contains("bypass"));
        let bridge_less = Nft { bridge: false, ..nft };
        assert!(!bridge_less.clear("web").contains("bridge"));
    }

    #[test]
    fn marked_packets_are_accepted_before_the_queue() {
        for (topology, build) in [(Topology::Routed, routed as Build), (Topology::Bridged, bridged)]
        {
            assert!(!build(&rules(topology)).contains("mark"));
            let script = build(&MemberRules { pass_mark: Some(0x10), ..rules(topology) });
            for chain in script.split(" chain ").skip(1) {
                let at = |what: &str| chain.find(what).expect(what);
                assert!(at("meta mark & 0x10 == 0x10 accept\n") < at("queue num 40"), "{chain}");
            }
        }
    }

    #[test]
    fn an_interface_of_another_index_is_cut_off_both_ways() {
        let all: [(Topology, Build); 4] = [
            (Topology::Routed, routed),
            (Topology::Bridged, bridged),
            (Topology::Routed, companion),
            (Topology::Bridged, companion),
        ];
        for (topology, build) in all {
            assert!(!build(&rules(topology)).contains("if !="));
            let script = build(&MemberRules { only_index: Some(17), ..rules(topology) });
            let from = "iifname \"tap0\" iif != 17 counter drop\n";
            let to = "oifname \"tap0\" oif != 17 counter drop\n";
            for (hook, wanted) in [
                ("forward", format!("  {from}  {to}")),
                ("input", format!("  {from}")),
                ("output", format!("  {to}")),
            ] {
                // First, before any rule that lets pass.
                let chain = script.split(&format!("hook {hook} ")).nth(1).expect(hook);
                let rules = chain.split_once(";\n").expect("rules").1;
                assert!(rules.starts_with(&wanted), "{script}");
            }
        }
    }

    #[test]
    fn no_chain_is_made_for_nothing() {
        assert_eq!(companion(&rules(Topology::Routed)), "");
    }

    #[test]
    fn on_a_bridge_only_arp_and_discovery_are_not_queued() {
        let script = bridged(&rules(Topology::Bridged));
        assert_eq!(script.matches(" accept").count(), 4);
        assert_eq!(script.matches("\" drop").count(), 2);
        assert_eq!(script.matches("queue num 40").count(), 2);
        assert!(!routed(&rules(Topology::Routed)).contains("arp"));
    }
}
