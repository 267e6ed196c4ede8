use super::super::Marks;
use super::super::tests::rules;
use super::*;
use crate::nfqueue::QueueNumber;
use std::collections::HashMap;

const MARKS: Marks = Marks { mask: 0xf0, pass: 0x10 };
const TOPOLOGIES: [Topology; 2] = [Topology::Routed, Topology::Bridged];

fn table(topology: Topology, purpose: Purpose) -> Table {
    Table::of("host-1", topology, purpose)
}

fn tables() -> impl Iterator<Item = Table> {
    let all = TOPOLOGIES.into_iter().flat_map(|t| Purpose::ALL.map(|p| (t, p)));
    all.map(|(topology, purpose)| table(topology, purpose))
}

/// What a member may have asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Its interface was not there.
    Nameless,
    /// Without programs.
    Indexed,
    /// Alone in its group.
    Marking,
    /// One of several in its group.
    Watched,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Nameless, Kind::Indexed, Kind::Marking, Kind::Watched];

    fn member(self, interface: &str, index: u32) -> MemberRules {
        MemberRules {
            member: format!("m-{interface}"),
            interface: interface.to_owned(),
            queue: QueueNumber(index as u16 + 100),
            marks: matches!(self, Kind::Marking | Kind::Watched).then_some(MARKS),
            index: (self != Kind::Nameless).then_some(index),
            only_that_index: self == Kind::Watched,
            ..rules(Topology::Routed)
        }
    }
}

/// One member, two, and twelve, of all kinds.
fn hosts() -> Vec<Vec<MemberRules>> {
    let mut hosts = Vec::new();
    for one in Kind::ALL {
        hosts.push(vec![one.member("tap0", 17)]);
        for other in Kind::ALL {
            let two = vec![one.member("tap0", 17), other.member("tap1", 19)];
            let more = (0..10).map(|n| Kind::ALL[n % 4].member(&format!("more{n}"), 50 + n as u32));
            hosts.push(two.clone());
            hosts.push(two.into_iter().chain(more).collect());
        }
    }
    hosts
}

fn each_host() -> impl Iterator<Item = (Table, Vec<MemberRules>)> {
    tables().flat_map(|table| hosts().into_iter().map(move |host| (table.clone(), host)))
}

fn entries(members: &[MemberRules]) -> Vec<Entry> {
    members.iter().map(Entry::from).collect()
}

fn script(table: &Table, members: &[MemberRules]) -> String {
    table.replace(&Content::default(), &entries(members))
}

/// What rules look at.
#[derive(Clone, Copy, Debug)]
struct Packet {
    iif: (u32, &'static str),
    oif: (u32, &'static str),
    mark: u32,
    ethertype: &'static str,
}

/// What became of one, and on what way.
#[derive(Debug, Default)]
struct Judged {
    verdict: &'static str,
    /// The programs' mark was taken from it.
    is_cleared: bool,
    rules_met: usize,
    names_met: usize,
}

/// The rules of a script as words, by chain.
struct Chains(HashMap<String, Vec<Vec<String>>>);

impl Chains {
    fn of(script: &str) -> Chains {
        let mut chains = HashMap::new();
        for chain in script.split("\n chain ").skip(1) {
            let (name, rules) = chain.split_once(" {\n").expect("a chain");
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
            let rules = rules.lines().take_while(|line| *line != " }").map(words).collect();
            chains.insert(name.to_owned(), rules);
        }
        Chains(chains)
    }

    fn judge(&self, packet: &Packet, hook: &str) -> Judged {
        let mut judged = Judged { verdict: "accept", ..Judged::default() };
        let mut chain = Some(hook.to_owned());
        while let Some(name) = chain.take() {
            let rules = self.0.get(&name).unwrap_or_else(|| panic!("there is a chain {name}"));
            if name.starts_with("held_") {
                judged.verdict = "queue";
                return judged;
            }
            for rule in rules {
                judged.rules_met += 1;
                match packet.meets(rule, &mut judged) {
                    None => {}
                    Some(word @ ("accept" | "drop")) => {
                        judged.verdict = if word == "drop" { "drop" } else { "accept" };
                        return judged;
                    }
                    Some(to) => {
                        chain = Some(to.to_owned());
                        break;
                    }
                }
            }
        }
        judged
    }
}

impl Packet {
    fn all() -> Vec<Packet> {
        let interfaces = [
            (17, "tap0"),
            (19, "tap1"),
            // Made anew.
            (18, "tap0"),
            (20, "tap1"),
            // Renamed.
            (17, "renamed"),
            (19, "tap0"),
            (3, "eth0"),
        ];
        let mut all = Vec::new();
        for iif in interfaces {
            for oif in interfaces {
                // Neither a name nor an index is there twice.
                if (oif.0 == iif.0) != (oif.1 == iif.1) {
                    continue;
                }
                for mark in [0, 0x10, 0x20, 0x30, 0x50, 0x110] {
                    for ethertype in ["ip", "ip6", "arp", "vlan"] {
                        all.push(Packet { iif, oif, mark, ethertype });
                    }
                }
            }
        }
        all
    }

    /// Where a rule leads it, or `accept` or `drop`, if its conditions hold.
    fn meets<'a>(&self, rule: &'a [String], judged: &mut Judged) -> Option<&'a str> {
        let words: Vec<&str> = rule.iter().map(String::as_str).collect();
        let mut at = 0;
        loop {
            match words[at] {
                "counter" => at += 1,
                "accept" | "drop" => return Some(words[at]),
                "goto" => return Some(words[at + 1]),
                // meta mark set meta mark & 0x..
                "meta" if words[at + 2] == "set" => {
                    assert_eq!(words[at + 6], format!("{:#x}", !MARKS.mask));
                    judged.is_cleared = true;
                    at += 7;
                }
                what => {
                    judged.names_met += usize::from(what.ends_with("name"));
                    if words[at + 1] == "vmap" {
                        let value = self.value(what);
                        // { value : goto chain, value : goto chain }
                        let way = words[at + 3..].chunks(4).find(|way| way[0] == value);
                        return way.map(|way| way[3].trim_end_matches(','));
                    }
                    let (holds, next) = self.is(&words[at..]);
                    if !holds {
                        return None;
                    }
                    at += next;
                }
            }
        }
    }

    fn value(&self, what: &str) -> String {
        match what {
            "iif" => self.iif.0.to_string(),
            "iifname" => format!("\"{}\"", self.iif.1),
            "oif" => self.oif.0.to_string(),
            "oifname" => format!("\"{}\"", self.oif.1),
            "type" => self.ethertype.to_owned(),
            _ => panic!("{what} is no condition"),
        }
    }

    /// Whether a condition holds, and how many words it has.
    fn is(&self, words: &[&str]) -> (bool, usize) {
        match words[0] {
            "meta" => {
                let number = |word: &str| u32::from_str_radix(&word[2..], 16).expect("hex");
                return (self.mark & number(words[3]) == number(words[5]), 6);
            }
            "ether" => {
                let (holds, next) = self.is(&words[1..]);
                return (holds, next + 1);
            }
            _ => {}
        }
        let from = if words[1] == "!=" { 2 } else { 1 };
        let to = match words[from] {
            "{" => words.iter().position(|word| *word == "}").expect("its end"),
            _ => from,
        };
        let value = self.value(words[0]);
        let is_there = |word: &&str| word.trim_end_matches(',') == value;
        (words[from..=to].iter().any(is_there) == (from == 1), to + 1)
    }

    /// Whether it goes to an interface that was made anew.
    fn is_to_another(&self, members: &[MemberRules]) -> bool {
        let watched: Vec<_> = members.iter().filter(|m| m.only_that_index).collect();
        watched.iter().any(|m| m.interface == self.oif.1)
            && watched.iter().all(|m| m.index != Some(self.oif.0))
    }

    /// What is to become of it before it is routed.
    fn wanted(&self, table: &Table, members: &[MemberRules]) -> &'static str {
        let is_bridged = table.topology == Topology::Bridged;
        let from_member = match self.ethertype {
            "arp" if is_bridged => "accept",
            "ip" | "ip6" | "arp" => "queue",
            _ if is_bridged => "drop",
            _ => "queue",
        };
        // Iptables sees to that.
        let from_member = match table.purpose {
            Purpose::Beside if from_member == "queue" => "accept",
            _ => from_member,
        };
        if let Some(member) = members.iter().find(|m| m.index == Some(self.iif.0)) {
            return match () {
                () if self.is_passed(member) => "accept",
                () if member.interface != self.iif.1 => "drop",
                () => from_member,
            };
        }
        match members.iter().find(|m| m.interface == self.iif.1) {
            Some(member) if member.only_that_index => "drop",
            // Nothing else is dropped of such a one: it is iptables' own.
            Some(_) if table.purpose == Purpose::Beside && !is_bridged => "accept",
            Some(_) => from_member,
            None => "accept",
        }
    }

    /// Whether the programs of this member, on whose interface it came, let it pass.
    fn is_passed(&self, member: &MemberRules) -> bool {
        member.marks.is_some() && self.mark & MARKS.mask == MARKS.pass
    }
}

#[test]
fn each_packet_meets_what_is_meant_for_it() {
    for (table, members) in each_host() {
        let script = script(&table, &members);
        let chains = Chains::of(&script);
        for packet in Packet::all() {
            // Beside iptables nothing else is ever marked.
            let is_usual =
                packet.mark & MARKS.mask == 0 || matches!(packet.ethertype, "ip" | "ip6");
            if table.purpose == Purpose::Beside && !is_usual {
                continue;
            }
            let judged = chains.judge(&packet, "prerouting");
            assert_eq!(judged.verdict, packet.wanted(&table, &members), "{packet:?}\n{script}");
            // Iptables has yet to look at it.
            let member = members.iter().find(|m| m.index == Some(packet.iif.0));
            let is_passed = member.is_some_and(|member| packet.is_passed(member));
            assert_eq!(judged.is_cleared, is_passed && table.purpose == Purpose::Queue);
        }
        assert!(
            script.contains("prerouting { type filter hook prerouting priority -2147483648; }")
        );
    }
}

/// Nobody reads there what a tag says.
#[test]
fn nothing_goes_to_an_interface_of_another_index_not_even_what_the_host_sends() {
    for (table, members) in each_host() {
        let script = script(&table, &members);
        let chains = Chains::of(&script);
        let watched: Vec<_> = members.iter().filter(|m| m.only_that_index).collect();
        let deleted = format!("delete chain {} output\n", table.place());
        assert_eq!(script.contains(&deleted), watched.is_empty(), "{script}");
        for packet in Packet::all() {
            let wanted = if packet.is_to_another(&members) { "drop" } else { "accept" };
            assert_eq!(chains.judge(&packet, "output").verdict, wanted, "{packet:?}\n{script}");
            // A member alone sends nothing to itself.
            let is_own = members.len() == 1 && members[0].index == Some(packet.iif.0);
            if !is_own {
                let forwarded = chains.judge(&packet, "forward").verdict;
                assert_eq!(forwarded, wanted, "{packet:?}\n{script}");
            }
        }
    }
}

/// What is covered, and what comes to the guest of a host with one, is told by numbers; names cost more.
#[test]
fn most_packets_are_compared_with_no_name() {
    let (ours, other) = ((17, "tap0"), (3, "eth0"));
    for table in tables() {
        let of = |members: &[MemberRules], iif, oif, hook| {
            let packet = Packet { iif, oif, mark: MARKS.pass, ethertype: "ip" };
            Chains::of(&script(&table, members)).judge(&packet, hook)
        };
        let one = [Kind::Watched.member("tap0", 17)];
        assert_eq!(of(&one, ours, other, "prerouting").names_met, 0);
        assert_eq!(of(&one, ours, other, "forward").names_met, 0);
        assert_eq!(of(&one, other, ours, "forward").names_met, 0);
        assert_eq!(of(&one, other, (4, "eth1"), "prerouting").names_met, 1);
        assert_eq!(of(&one, other, (4, "eth1"), "forward").names_met, 1);
        let many = |n| -> Vec<_> {
            (0..n).map(|n| Kind::Watched.member(&format!("tap{n}"), 17 + n)).collect()
        };
        for n in [2, 8, 9, 40] {
            assert_eq!(of(&many(n), ours, other, "prerouting").names_met, 0, "{n}");
            assert_eq!(of(&many(n), other, ours, "forward").names_met, 0, "{n}");
        }
        // The way is no longer where there are more.
        let met = |n| of(&many(n), other, (4, "eth1"), "prerouting").rules_met;
        assert_eq!((met(40), met(9)), (2, 2));
        assert_eq!(met(8), 9);
    }
}

#[test]
fn a_table_tells_from_what_it_was_made() {
    for (table, members) in each_host() {
        let script = script(&table, &members);
        let lines: Vec<_> = script.lines().map(str::to_owned).collect();
        let content = Content::read(&lines).expect("its own words");
        let entries = entries(&members);
        assert_eq!(content.entries, entries);
        let queues = table.purpose == Purpose::Queue;
        assert!(entries.iter().all(|entry| content.queues_for(entry) == queues), "{script}");
    }
    for comment in [
        "tap0 queue",
        "tap0 queue x",
        "tap0 marks 7",
        "tap0 marks 7 x",
        "tap0 index -1",
        "tap0 what",
    ] {
        let lines = [" chain from_web_1 {".to_owned(), format!("  goto x comment \"{comment}\"")];
        assert_eq!(Content::read(&lines).unwrap_err(), lines[1].trim(), "{comment}");
    }
}

#[test]
fn an_interface_and_an_index_are_those_of_one_member() {
    let of = |name: &str, interface, index| {
        let rules = Kind::Watched.member(interface, index);
        Entry::from(&MemberRules { member: name.to_owned(), ..rules })
    };
    let mut entries = vec![of("web", "tap0", 17), of("db", "tap1", 19)];
    of("shop", "tap0", 17).put_into(&mut entries);
    assert_eq!(entries, [of("db", "tap1", 19), of("shop", "tap0", 17)], "another name");
    of("db", "tap1", 23).put_into(&mut entries);
    assert_eq!(entries, [of("db", "tap1", 23), of("shop", "tap0", 17)], "made anew");
    of("files", "tap2", 17).put_into(&mut entries);
    assert_eq!((entries.len(), &entries[2]), (3, &of("files", "tap2", 17)));
    assert_eq!(entries.iter().filter(|entry| entry.index() == Some(17)).count(), 1, "renamed");
}

#[test]
fn what_queues_is_left_alone_and_what_is_gone_goes() {
    let table = table(Topology::Routed, Purpose::Queue);
    let both = [Kind::Watched.member("tap0", 17), Kind::Watched.member("tap1", 19)];
    let lines: Vec<_> = script(&table, &both).lines().map(str::to_owned).collect();
    let was = Content::read(&lines).unwrap();
    let [one, other] = both.each_ref().map(Entry::from);
    let anew = Entry::from(&MemberRules { index: Some(23), ..both[0].clone() });

    let script = table.replace(&was, &[anew.clone(), other.clone()]);
    assert!(!script.contains(&format!("chain {}", one.held())), "{script}");
    assert!(script.contains("iif 23 goto") && !script.contains("iif 17 "), "{script}");

    let script = table.replace(&was, std::slice::from_ref(&other));
    let (flushed, deleted) = (
        format!("flush chain {} {}\n", table.place(), one.held()),
        format!("delete chain {} {}\n", table.place(), one.held()),
    );
    assert!(script.find(&flushed).unwrap() < script.find(&deleted).unwrap(), "{script}");
    assert!(!script.contains("\"tap0"), "{script}");

    let moved = MemberRules { queue: QueueNumber(9), ..both[0].clone() };
    let script = table.replace(&was, &[Entry::from(&moved), other]);
    assert_eq!(script.matches("queue num").count(), 1, "{script}");
    assert!(script.contains("queue num 9\n"), "{script}");

    let cleared = table.replace(&was, &[]);
    assert_eq!(cleared, clear_table("inet tidelock_host_host1_bf933149"));
}

/// Whoever deletes a rule that queues opens nothing.
#[test]
fn what_is_held_is_dropped_where_no_rule_queues() {
    let members = [Kind::Watched.member("tap0", 17)];
    let held = Entry::from(&members[0]).held();
    let script = script(&table(Topology::Routed, Purpose::Queue), &members);
    let chain = format!(" chain {held} {{\n  counter queue num 117\n  drop\n }}\n");
    assert!(script.contains(&chain) && !script.contains("bypass"), "{script}");
}

#[test]
fn nftables_queues_in_the_families_that_the_kernel_has() {
    let nft = |queues, bridge| Nft {
        tool: PathBuf::new(),
        host: "host-1".to_owned(),
        queues,
        inet: true,
        bridge,
        written: Vec::new(),
    };
    let on = |queues, bridge| TOPOLOGIES.map(|t| nft(queues, bridge).queues(t));
    assert_eq!(on(true, true), [true, true]);
    assert_eq!(on(true, false), [true, false]);
    assert_eq!(on(false, true), [false, false]);
    let cleared = nft(false, true).clear_members_own("web");
    assert!(cleared.contains("delete table bridge tidelock_web_") && cleared.contains("inet"));
    assert!(!nft(false, false).clear_members_own("web").contains("bridge"));
}

#[test]
fn tables_are_known_by_their_names() {
    for table in tables() {
        assert_eq!(Table::listed(&format!("table {}", table.place())), Some(table));
    }
    for line in ["table inet filter", "table ip tidelock_host_a", "table inet tidelock_web_1", ""] {
        assert_eq!(Table::listed(line), None, "{line}");
    }
}
