use super::super::tests::rules;
use super::*;

type Build = fn(&MemberRules) -> String;
const ROUTED: [Build; 2] =
    [|rules| routed(rules, Way::Statement), |rules| routed(rules, Way::Target)];

#[test]
fn old_tables_go_in_the_transaction_in_which_the_new_one_comes() {
    let nft = Nft { tool: PathBuf::new(), way: None, inet: true, bridge: true };
    let chains = routed(&rules(Topology::Routed), Way::Statement);
    let script = nft.replace("inet", "web", &chains);
    let table = table("web");
    let at = |line: &str| script.find(line).expect(line);
    assert!(at(&format!("delete table bridge {table}")) < at(&format!("table inet {table} {{")));
    assert!(at(&format!("delete table inet {table}")) < at(&format!("table inet {table} {{")));
    assert_eq!(script.matches("queue num 40").count(), 2);
    assert!(!script.contains("bypass"));
    let bridge_less = Nft { bridge: false, ..nft };
    assert!(!bridge_less.clear("web").contains("bridge"));
}

/// What comes between the two transactions, too.
#[test]
fn without_a_queue_a_table_drops_until_the_target_is_put_in_front() {
    let script = routed(&rules(Topology::Routed), Way::Target);
    assert!(script.contains(" chain held {\n  drop\n }\n"), "{script}");
    assert_eq!(script.matches("goto held").count(), 2);
    assert!(!script.contains("queue"), "{script}");
}

#[test]
fn what_queues_by_a_target_does_not_on_bridges() {
    let nft = |way| Nft { tool: PathBuf::new(), way, inet: true, bridge: true };
    let on = |way| [Topology::Routed, Topology::Bridged].map(|t| nft(way).queues(t));
    assert_eq!(on(Some(Way::Statement)), [true, true]);
    assert_eq!(on(Some(Way::Target)), [true, false]);
    assert_eq!(on(None), [false, false]);
    assert_eq!(nft(Some(Way::Target)).name(), "nft-xt");
}

#[test]
fn no_chain_is_made_for_nothing() {
    assert_eq!(companion(&rules(Topology::Routed)), "");
}

const INTERFACE: &str = "tap0";
const INDEX: u32 = 17;
const MARK: u32 = 0x10;

/// What rules look at.
#[derive(Clone, Copy, Debug)]
struct Packet {
    iif: (u32, &'static str),
    /// Not in the input hook.
    oif: Option<(u32, &'static str)>,
    mark: u32,
    ethertype: &'static str,
    is_discovery: bool,
}

impl Packet {
    fn all() -> Vec<Packet> {
        let interfaces = [(INDEX, INTERFACE), (18, INTERFACE), (INDEX, "renamed"), (18, "eth0")];
        let kinds = [("ip", false), ("ip6", false), ("ip6", true), ("arp", false), ("vlan", false)];
        let mut all = Vec::new();
        for iif in interfaces {
            for oif in interfaces.map(Some).into_iter().chain([None]) {
                // Neither a name nor an index is there twice.
                let can_be = |oif: (u32, &str)| (oif.0 == iif.0) == (oif.1 == iif.1);
                if !oif.is_none_or(can_be) {
                    continue;
                }
                for mark in [0, MARK, 0x20, MARK | 0x20] {
                    for (ethertype, is_discovery) in kinds {
                        all.push(Packet { iif, oif, mark, ethertype, is_discovery });
                    }
                }
            }
        }
        all
    }

    /// Whether a condition holds, with the words that it has.
    fn is(&self, words: &[&str]) -> (bool, usize) {
        let (wanted, negated) = match words[1] {
            "!=" => (words[2], true),
            word => (word, false),
        };
        let end = if negated { 3 } else { 2 };
        let named = |found: Option<&str>| found.map(|name| format!("\"{name}\"") == wanted);
        let numbered = |found: Option<u32>| found.map(|index| index.to_string() == wanted);
        let holds = match words[0] {
            "iifname" => named(Some(self.iif.1)),
            "oifname" => named(self.oif.map(|oif| oif.1)),
            "iif" => numbered(Some(self.iif.0)),
            "oif" => numbered(self.oif.map(|oif| oif.0)),
            "icmpv6" => return (self.is_discovery, 3),
            "ether" => {
                let from = if words[2] == "!=" { 3 } else { 2 };
                let to = match words[from] {
                    "{" => words.iter().position(|word| *word == "}").expect("its end"),
                    _ => from,
                };
                let is_there = |word: &&str| word.trim_end_matches(',') == self.ethertype;
                return (words[from..=to].iter().any(is_there) == (from == 2), to + 1);
            }
            "meta" => {
                assert_eq!((words[3], words[5]), (format!("{MARK:#x}").as_str(), words[3]));
                return (self.mark & MARK == MARK, 6);
            }
            word => panic!("{word} is no condition"),
        };
        (holds.expect("that hook knows it") != negated, end)
    }

    /// What a chain does with it.
    fn verdict(&self, chain: &str) -> &'static str {
        for rule in chain.lines() {
            let words: Vec<_> = rule.split_whitespace().filter(|word| *word != "counter").collect();
            let mut at = 0;
            loop {
                match words[at] {
                    "accept" => return "accept",
                    "drop" => return "drop",
                    "queue" | "goto" => return "queue",
                    _ => {}
                }
                let (holds, next) = self.is(&words[at..]);
                if !holds {
                    break;
                }
                at += next;
            }
        }
        "accept"
    }

    fn wanted(&self, rules: &MemberRules) -> &'static str {
        let is_ours = |of: (u32, &str)| rules.index == Some(of.0);
        let is_another =
            |of: (u32, &str)| rules.only_that_index && of.1 == INTERFACE && of.0 != INDEX;
        let is_bridged = rules.topology == Topology::Bridged;
        let is_known = is_bridged && self.ethertype == "arp"
            || self.is_discovery && (is_bridged || self.oif.is_none());
        let is_marked = rules.pass_mark.is_some_and(|mark| self.mark & mark == mark);
        match self.ethertype {
            // What the programs have judged.
            _ if is_ours(self.iif) && is_marked => "accept",
            _ if is_ours(self.iif) && self.iif.1 != INTERFACE => "drop",
            // Where it comes to the interface that is watched, the programs judge it.
            _ if rules.only_that_index && self.oif.is_some_and(is_ours) && !is_ours(self.iif) => {
                "accept"
            }
            _ if is_another(self.iif) || self.oif.is_some_and(is_another) => "drop",
            _ if self.iif.1 != INTERFACE || is_known => "accept",
            "ip" | "ip6" => "queue",
            _ if is_bridged => "drop",
            _ => "queue",
        }
    }

    /// How many rules look at a name of it until its fate is known.
    fn names_met(&self, chain: &str) -> usize {
        let lines: Vec<_> = chain.lines().collect();
        let decided = |n: &usize| {
            let with = |last: &str| format!("{}\n  {last}\n", lines[..*n].join("\n"));
            self.verdict(&with("accept")) == self.verdict(&with("drop"))
        };
        let until = (1..=lines.len()).find(decided).expect("a rule decides");
        let looked_at = |line: &&&str| {
            let words: Vec<_> = line.split_whitespace().collect();
            let mut at = 0;
            while let Some(word) = words.get(at) {
                if word.ends_with("name") {
                    return true;
                }
                if ["accept", "drop", "queue", "goto", "counter"].contains(word) {
                    return false;
                }
                let (holds, next) = self.is(&words[at..]);
                if !holds {
                    return false;
                }
                at += next;
            }
            false
        };
        lines[..until].iter().filter(looked_at).count()
    }
}

/// What a member may have asked for.
fn all_rules(topology: Topology) -> Vec<MemberRules> {
    let kinds =
        [(false, false, false), (true, false, false), (true, false, true), (true, true, true)];
    let of = |(indexed, only_that_index, marking): (bool, bool, bool)| MemberRules {
        pass_mark: marking.then_some(MARK),
        index: indexed.then_some(INDEX),
        only_that_index,
        ..rules(topology)
    };
    kinds.map(of).into()
}

fn chain_of<'a>(script: &'a str, hook: &str) -> &'a str {
    let chain = script.split(&format!("hook {hook} ")).nth(1).expect(hook);
    chain.split_once(";\n").expect("rules").1.split(" }\n").next().expect("its end")
}

#[test]
fn each_packet_meets_what_is_meant_for_it() {
    let [statement, target] = ROUTED.map(|build| (Topology::Routed, build));
    for (topology, build) in [statement, target, (Topology::Bridged, bridged)] {
        for rules in all_rules(topology) {
            let script = build(&rules);
            for packet in Packet::all() {
                let hook = if packet.oif.is_some() { "forward" } else { "input" };
                let verdict = packet.verdict(chain_of(&script, hook));
                assert_eq!(verdict, packet.wanted(&rules), "{packet:?} {rules:?}\n{script}");
            }
        }
    }
}

#[test]
fn beside_the_queue_of_iptables_only_what_it_cannot_see_is_dropped() {
    for rules in [Topology::Routed, Topology::Bridged].into_iter().flat_map(all_rules) {
        let script = companion(&rules);
        if script.is_empty() {
            assert!(rules.topology == Topology::Routed && rules.index.is_none());
            continue;
        }
        // Nothing else is ever marked.
        let may_be = |of: &Packet| of.mark & MARK == 0 || matches!(of.ethertype, "ip" | "ip6");
        for packet in Packet::all().into_iter().filter(may_be) {
            let hook = if packet.oif.is_some() { "forward" } else { "input" };
            let wanted = match packet.wanted(&rules) {
                "queue" => "accept",
                verdict => verdict,
            };
            assert_eq!(packet.verdict(chain_of(&script, hook)), wanted, "{packet:?}\n{script}");
        }
    }
}

#[test]
fn the_host_itself_sends_nothing_to_an_interface_of_another_index() {
    for build in ROUTED.into_iter().chain([bridged as Build, companion]) {
        for rules in all_rules(Topology::Bridged) {
            let script = build(&rules);
            if !rules.only_that_index {
                assert!(!script.contains("hook output"), "{script}");
                continue;
            }
            for packet in Packet::all().into_iter().filter(|packet| packet.oif.is_some()) {
                let is_another = packet.oif == Some((18, INTERFACE));
                let wanted = if is_another { "drop" } else { "accept" };
                assert_eq!(packet.verdict(chain_of(&script, "output")), wanted, "{packet:?}");
            }
        }
    }
}

/// What is covered, and what comes to the guest, is told by numbers; names cost more.
#[test]
fn most_packets_of_a_member_are_compared_with_no_name() {
    for build in ROUTED.into_iter().chain([bridged as Build, companion]) {
        for topology in [Topology::Routed, Topology::Bridged] {
            let script = build(&all_rules(topology).pop().expect("with tags"));
            let names_met = |iif, oif, mark| {
                let packet =
                    Packet { iif, oif: Some(oif), mark, ethertype: "ip", is_discovery: false };
                packet.names_met(&format!("{}  accept\n", chain_of(&script, "forward")))
            };
            let (ours, other) = ((INDEX, INTERFACE), (18, "eth0"));
            assert_eq!(names_met(ours, other, MARK), 0, "{script}");
            assert_eq!(names_met(other, ours, 0), 0, "{script}");
            assert_eq!(names_met(other, (19, "eth1"), 0), 2, "{script}");
        }
    }
}
