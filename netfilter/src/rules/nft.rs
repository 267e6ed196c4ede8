//! The rules in nftables: one table per member and family, replaced in one transaction.
//!
//! A kernel whose nftables has no `queue` may still call iptables' target NFQUEUE. The `nft` tool
//! cannot write that, so there a table has a chain `held` that drops, and a second transaction puts
//! the rule that queues in front: in between, packets of the guest are dropped.
//!
//! A table of our own needs no place among the user's rules: every table's chains see the packet,
//! and ours see it before the usual filter priority. Counters show the operator that packets come.

#[cfg(test)]
mod tests;
mod xt;

use super::names::table;
use super::tool::{find, run};
use super::{MemberRules, RulesError, Topology};
use crate::nfqueue::QueueNumber;
use crate::packet::NEIGHBOUR_DISCOVERY_TYPES;
use std::path::PathBuf;

/// Where [`Way::Target`] puts its rule.
const HELD: &str = "held";
const PROBE_TABLE: &str = "tidelock_probe";
/// Before the filter priority of its family (0 for inet; bridges filter at -200).
const PRIORITY_INET: i32 = -150;
const PRIORITY_BRIDGE: i32 = -250;
/// Before anybody else looks, iptables' queue among them.
const PRIORITY_CUT_OFF: i32 = -350;

/// How a rule queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By `queue`.
    Statement,
    /// By iptables' target. Not on bridges: in their family the kernel takes a target that was made
    /// for bridges only ("ebtables emulation must reject non-bridge targets", 2026).
    Target,
}

impl Way {
    /// The packet filter's name.
    fn name(self) -> &'static str {
        match self {
            Way::Statement => "nft",
            Way::Target => "nft-xt",
        }
    }

    /// What a rule does with packets that are to be queued.
    fn queued(self, queue: QueueNumber) -> String {
        match self {
            Way::Statement => format!("counter queue num {queue}"),
            Way::Target => format!("goto {HELD}"),
        }
    }

    /// What a table has besides its chains of packets.
    fn beside(self) -> String {
        match self {
            Way::Statement => String::new(),
            Way::Target => format!(" chain {HELD} {{\n  drop\n }}\n"),
        }
    }
}

/// nftables.
#[derive(Clone, Debug)]
pub(super) struct Nft {
    tool: PathBuf,
    /// `None`: it cannot queue, or is not wanted to.
    way: Option<Way>,
    /// The families that this kernel has, be it without a queue.
    inet: bool,
    bridge: bool,
}

impl Nft {
    pub(super) fn find() -> Option<Nft> {
        Some(Nft { tool: find("nft")?, way: None, inet: false, bridge: false })
    }

    /// Whether it can filter what such a member sends, be it without a queue.
    pub(super) fn has(&self, topology: Topology) -> bool {
        match topology {
            Topology::Routed => self.inet,
            Topology::Bridged => self.bridge,
        }
    }

    pub(super) fn name(&self) -> &'static str {
        self.way.unwrap_or(Way::Statement).name()
    }

    pub(super) fn queues(&self, topology: Topology) -> bool {
        match self.way {
            Some(Way::Statement) => self.has(topology),
            Some(Way::Target) => topology == Topology::Routed,
            None => false,
        }
    }

    /// Finds out what this kernel has, and the first wanted way to queue. Each that does not do, and why.
    pub(super) fn look(
        &mut self,
        wanted: impl Fn(&str) -> bool,
    ) -> Vec<(&'static str, RulesError)> {
        self.inet = self.probe("inet", "drop").is_ok();
        self.bridge = self.probe("bridge", "ether type ip drop").is_ok();
        let mut unable = Vec::new();
        for way in [Way::Statement, Way::Target].into_iter().filter(|way| wanted(way.name())) {
            let tried = match way {
                Way::Statement => self.try_statement(),
                Way::Target => self.try_target(),
            };
            match tried {
                Ok(()) => {
                    self.way = Some(way);
                    break;
                }
                Err(e) => unable.push((way.name(), e)),
            }
        }
        unable
    }

    /// Builds and removes a scratch table with what will be needed, in one transaction.
    fn try_statement(&self) -> Result<(), RulesError> {
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

    /// In several transactions, with a table of this process alone: the kernel judges a target by the
    /// hook that leads to it, and only in a table that stays. No packet comes as far as that here.
    fn try_target(&self) -> Result<(), RulesError> {
        let table = format!("{PROBE_TABLE}_{}", std::process::id());
        let clear = clear_table("inet", &table);
        let script = format!(
            "{clear}table inet {table} {{\n{} chain probe {{ type filter hook output priority 0;\n  \
             accept\n  goto {HELD}\n }}\n}}\n",
            Way::Target.beside()
        );
        let tried = self
            .script(&script, "build a scratch table")
            .and_then(|()| queue_by_target(&table, QueueNumber(0)))
            .and_then(|()| self.check_listing(&table));
        tried.and(self.script(&clear, "remove a scratch table"))
    }

    /// Whether `nft` shows a rule that it cannot write: otherwise nobody would see that it is gone.
    fn check_listing(&self, table: &str) -> Result<(), RulesError> {
        let listed = self.list("inet", table)?;
        if listed.iter().any(|line| line.contains("counter ") && is_queueing(line)) {
            return Ok(());
        }
        Err(refused("show a rule of xt_NFQUEUE", listed.join(" ")))
    }

    pub(super) fn install(&self, rules: &MemberRules) -> Result<(), RulesError> {
        debug_assert!(self.queues(rules.topology), "{self:?} is chosen for what it can");
        let way = self.way.unwrap_or(Way::Statement);
        let chains = match rules.topology {
            Topology::Routed => routed(rules, way),
            Topology::Bridged => bridged(rules),
        };
        let script = self.replace(family(rules.topology), &rules.member, &chains);
        self.script(&script, "install the rules")?;
        match way {
            Way::Statement => Ok(()),
            Way::Target => queue_by_target(&table(&rules.member), rules.queue),
        }
    }

    /// Beside iptables: drops what iptables does not see or cannot tell. In the place of whatever
    /// there was of the member.
    pub(super) fn install_companion(&self, rules: &MemberRules) -> Result<(), RulesError> {
        let script = self.replace(family(rules.topology), &rules.member, &companion(rules));
        self.script(&script, "install the rules that drop what iptables cannot see")
    }

    pub(super) fn listing(&self, rules: &MemberRules) -> Result<Vec<String>, RulesError> {
        self.list(family(rules.topology), &table(&rules.member))
    }

    fn list(&self, family: &str, table: &str) -> Result<Vec<String>, RulesError> {
        let arguments = ["--stateless", "list", "table", family, table];
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
        families.map(|(family, _)| clear_table(family, &table(member))).collect()
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
///
/// Every packet of the host meets them, once for each member: most of what they look at should settle it.
#[derive(Default)]
struct First {
    forward: String,
    input: String,
    /// What the host itself sends: the other chains do not see it.
    output: String,
    /// For forward and input alike, what comes after these: needed only where more rules follow.
    others: String,
    /// The last of them: no other packets come as far as this.
    renamed: String,
}

impl First {
    fn of(rules: &MemberRules) -> First {
        let MemberRules { interface, index, pass_mark, only_that_index, .. } = rules;
        let others = format!("  iifname != \"{interface}\" accept\n");
        let Some(index) = index else { return First { others, ..First::default() } };
        let marked = |mark| format!("  iif {index} meta mark & {mark:#x} == {mark:#x} accept\n");
        let marked = pass_mark.map_or(String::new(), marked);
        let renamed = format!("  iif {index} iifname != \"{interface}\" counter drop\n");
        if !only_that_index {
            let from = marked + &renamed;
            return First { forward: from.clone(), input: from, others, ..First::default() };
        }
        // Whatever comes to the interface that is watched was judged where it came from, and is seen where it leaves.
        let to = format!("  oif {index} iif != {index} accept\n");
        let from_another = format!("  iifname \"{interface}\" iif != {index} counter drop\n");
        let to_another = format!("  oifname \"{interface}\" oif != {index} counter drop\n");
        First {
            forward: format!("{marked}{to}{from_another}{to_another}"),
            input: marked + &from_another,
            output: to_another,
            others: format!("  iif != {index} accept\n"),
            renamed,
        }
    }

    /// The chains of a table: with `from_guest`, and `to_host` before it in the input chain.
    fn chains(&self, priority: i32, from_guest: &str, to_host: &str) -> String {
        let others = if from_guest.is_empty() { "" } else { &self.others };
        let First { forward, input, output, renamed, .. } = self;
        chain("forward", priority, &format!("{forward}{others}{renamed}{from_guest}"))
            + &chain("input", priority, &format!("{input}{others}{renamed}{to_host}{from_guest}"))
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
fn clear_table(family: &str, table: &str) -> String {
    format!("add table {family} {table}\ndelete table {family} {table}\n")
}

/// Puts the rule that queues before the one that drops.
fn queue_by_target(table: &str, queue: QueueNumber) -> Result<(), RulesError> {
    let doing = "queue packets (xt_NFQUEUE by way of nft_compat)";
    xt::queue_first(table, HELD, queue).map_err(|e| match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            RulesError::NotAllowed { tool: Way::Target.name().to_owned() }
        }
        Some(libc::ENOENT) => refused(doing, "the kernel lacks one of the two".to_owned()),
        _ => refused(doing, e.to_string()),
    })
}

fn refused(doing: &'static str, output: String) -> RulesError {
    RulesError::Refused { tool: Way::Target.name().to_owned(), doing, output }
}

/// By its name, or, where `nft` can translate the target, in its own words.
fn is_queueing(line: &str) -> bool {
    line.contains("NFQUEUE") || line.contains("queue ")
}

fn discovery() -> String {
    let (first, last) = NEIGHBOUR_DISCOVERY_TYPES.into_inner();
    format!("icmpv6 type {first}-{last} accept")
}

fn routed(rules: &MemberRules, way: Way) -> String {
    let queued = format!("  {}\n", way.queued(rules.queue));
    let to_host = format!("  {}\n", discovery());
    way.beside() + &First::of(rules).chains(PRIORITY_INET, &queued, &to_host)
}

fn bridged(rules: &MemberRules) -> String {
    let (queued, discovery) = (Way::Statement.queued(rules.queue), discovery());
    let from_guest = format!(
        "  ether type arp accept\n\
         \x20 ether type ip6 {discovery}\n\
         \x20 ether type {{ ip, ip6 }} {queued}\n\
         \x20 drop\n"
    );
    First::of(rules).chains(PRIORITY_BRIDGE, &from_guest, "")
}

/// Beside the queue of iptables, which comes later.
fn companion(rules: &MemberRules) -> String {
    let unseen = match rules.topology {
        Topology::Routed => "",
        Topology::Bridged => "  ether type != { ip, ip6, arp } drop\n",
    };
    First::of(rules).chains(PRIORITY_CUT_OFF, unseen, "")
}
