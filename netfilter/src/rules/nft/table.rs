//! What stands in nftables: one table for the members of a host, in each family and for each purpose.
//!
//! Every packet of the host enters each base chain once, so there is one for all members, and what it compares comes
//! first. A few indices, or two names, are compared one after the other, which is quicker than to look them up. So a
//! packet's way is about as long with twenty members as with one:
//!
//! ```text
//! chain prerouting { iif 5 goto from_web     what comes from a member's interface
//!                    iif 6 goto from_db
//!                    iifname vmap { .. } }   from an interface of its name with another index
//! chain forward { oif != 5 oif != 6 oifname { .. } drop }    to one (output: the same)
//! chain from_web { meta mark & .. meta mark set .. accept    what the programs let pass
//!                  iifname != "tap0" drop    renamed
//!                  goto held_web comment ".." }
//! chain held_web { queue num 7100
//!                  drop }                    if somebody deletes the rule before it
//! ```
//!
//! Indices cost less than names; an interface's name may change, its index may not.
//!
//! Prerouting has the earliest priority there is: what the programs have said of a packet is read, and cleared, before any
//! other rule could change it.
//!
//! # The comment
//! The comment of `from_web` says what the rules were made from, so that a table is itself what is known of the
//! members in it: they are left there as they were when one of them changes. What is queued is left untouched, too,
//! with its counter.

use super::super::names::word;
use super::super::{Marks, MemberRules, Topology};
use crate::nfqueue::QueueNumber;
use std::collections::HashSet;
use std::fmt::Write;

/// So many indices are compared one after the other.
const COMPARED_MAX: usize = 8;
/// And so many names: each takes longer.
const NAMES_COMPARED_MAX: usize = 2;
/// The earliest priority.
const FIRST: i32 = i32::MIN;
/// Where what comes from an interface of the right name and the wrong index goes.
const CUT_OFF: &str = "cut_off";

/// What a table is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// It queues.
    Queue,
    /// Iptables queues, later; it drops what iptables cannot see or tell.
    Beside,
}

impl Purpose {
    pub(super) const ALL: [Purpose; 2] = [Purpose::Queue, Purpose::Beside];

    /// How the names of such tables begin.
    fn prefix(self) -> &'static str {
        match self {
            Purpose::Queue => "tidelock_host_",
            Purpose::Beside => "tidelock_beside_",
        }
    }
}

/// A table's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) topology: Topology,
    pub(super) purpose: Purpose,
    pub(super) name: String,
}

impl Table {
    /// That of a host.
    pub(super) fn of(host: &str, topology: Topology, purpose: Purpose) -> Table {
        Table { topology, purpose, name: format!("{}{}", purpose.prefix(), word(host)) }
    }

    /// From a line of `nft list tables`, if it is one of ours, of whatever host name.
    pub(super) fn listed(line: &str) -> Option<Table> {
        let mut words = line.split_whitespace().skip(1);
        let (family, name) = (words.next()?, words.next()?);
        let topologies = [Topology::Routed, Topology::Bridged];
        let topology = topologies.into_iter().find(|t| super::family(*t) == family)?;
        let purpose = Purpose::ALL.into_iter().find(|p| name.starts_with(p.prefix()))?;
        Some(Table { topology, purpose, name: name.to_owned() })
    }

    pub(super) fn place(&self) -> String {
        format!("{} {}", super::family(self.topology), self.name)
    }

    /// Before the filter priority of its family (0 for inet; bridges filter at -200).
    fn priority(&self) -> i32 {
        match self.topology {
            Topology::Routed => -150,
            Topology::Bridged => -250,
        }
    }

    /// A script that makes it hold these members, where it has held `was`.
    pub(super) fn replace(&self, was: &Content, entries: &[Entry]) -> String {
        let place = self.place();
        if entries.is_empty() {
            return super::clear_table(&place);
        }
        let chains = self.chains(was, entries);
        let mut script = format!("add table {place}\n");
        for chain in &chains {
            writeln!(script, "add chain {place} {}", chain.head()).expect("writing to a string");
            writeln!(script, "flush chain {place} {}", chain.name).expect("writing to a string");
        }
        writeln!(script, "table {place} {{").expect("writing to a string");
        for chain in &chains {
            let Chain { name, rules, .. } = chain;
            writeln!(script, " chain {name} {{\n{rules} }}").expect("writing to a string");
        }
        script.push_str("}\n");
        let is_gone = |gone: &&Entry| entries.iter().all(|entry| entry.id != gone.id);
        let gone = was.entries.iter().filter(is_gone);
        let mut unused: Vec<String> = gone.flat_map(|gone| self.chains_of(gone)).collect();
        // Each base chain costs every packet of the host something.
        unused.extend(
            chains
                .iter()
                .filter(|c| c.hook.is_some() && c.rules.is_empty())
                .map(|c| c.name.clone()),
        );
        for command in ["flush", "delete"] {
            for chain in &unused {
                writeln!(script, "{command} chain {place} {chain}").expect("writing to a string");
            }
        }
        script
    }

    fn chains_of(&self, entry: &Entry) -> Vec<String> {
        let held = (self.purpose == Purpose::Queue).then(|| entry.held());
        [entry.from()].into_iter().chain(held).collect()
    }

    /// All that it has, but for what queues already. What is led to comes before what leads there.
    fn chains(&self, was: &Content, entries: &[Entry]) -> Vec<Chain> {
        let to_another = to_another(entries);
        let mut chains = vec![Chain::new(CUT_OFF.to_owned(), "  counter drop\n".to_owned())];
        for entry in entries {
            if self.purpose == Purpose::Queue && !was.queues_for(entry) {
                chains.push(Chain::new(entry.held(), held(entry.queue)));
            }
            chains.push(Chain::new(entry.from(), self.judge(entry)));
        }
        let to_another = match &*to_another {
            "" => String::new(),
            rule => format!("  {rule}\n"),
        };
        let prerouting = by_index(entries, Entry::from) + &self.by_name(entries, Entry::from);
        let forward = from_the_only_one(entries) + &to_another;
        for (hook, priority, rules) in [
            ("prerouting", FIRST, prerouting),
            ("forward", self.priority(), forward),
            ("output", self.priority(), to_another),
        ] {
            chains
                .push(Chain { hook: Some((hook, priority)), ..Chain::new(hook.to_owned(), rules) });
        }
        chains
    }

    /// What becomes of a packet from a member.
    fn judge(&self, entry: &Entry) -> String {
        let Entry { interface, index, marks, only_that_index, .. } = entry;
        let mut rules = String::new();
        let mut rule = |text: &str| writeln!(rules, "  {text}").expect("writing to a string");
        if let Some(index) = index {
            if let Some(Marks { mask, pass }) = marks {
                // By its name one may come here that has no programs yet.
                let iif = if *only_that_index { String::new() } else { format!("iif {index} ") };
                // Iptables has yet to look at it.
                let clear = match self.purpose {
                    Purpose::Queue => format!(" meta mark set meta mark & {:#x}", !mask),
                    Purpose::Beside => String::new(),
                };
                rule(&format!("{iif}meta mark & {mask:#x} == {pass:#x}{clear} accept"));
            }
            rule(&format!("iifname != \"{interface}\" counter drop"));
        }
        match (self.purpose, self.topology) {
            (_, Topology::Routed) => {}
            (Purpose::Queue, Topology::Bridged) => {
                rule("ether type arp accept");
                rule("ether type != { ip, ip6 } drop");
            }
            (Purpose::Beside, Topology::Bridged) => rule("ether type != { ip, ip6, arp } drop"),
        }
        match self.purpose {
            Purpose::Queue => {
                rule(&format!("goto {} comment \"{}\"", entry.held(), entry.comment()))
            }
            Purpose::Beside => rule(&format!("accept comment \"{}\"", entry.comment())),
        }
        rules
    }

    /// Those that go by their name, and those that are cut off by it.
    fn by_name(&self, entries: &[Entry], chain: fn(&Entry) -> String) -> String {
        let is_left = |entry: &&Entry| match (self.purpose, self.topology) {
            // Nothing is dropped of such a one: its index is all that is looked at.
            (Purpose::Beside, Topology::Routed) => entry.only_that_index,
            _ => true,
        };
        let to = |entry: &Entry| {
            let to = if entry.only_that_index { CUT_OFF.to_owned() } else { chain(entry) };
            (format!("\"{}\"", entry.interface), to)
        };
        led("iifname", entries.iter().filter(is_left).map(to).collect(), NAMES_COMPARED_MAX)
    }
}

fn held(queue: QueueNumber) -> String {
    format!("  counter queue num {queue}\n  drop\n")
}

fn by_index(entries: &[Entry], chain: fn(&Entry) -> String) -> String {
    let known = entries.iter().filter_map(|entry| Some((entry.index?.to_string(), chain(entry))));
    led("iif", known.collect(), COMPARED_MAX)
}

/// Leads what is equal to one of these values to its chain.
fn led(what: &str, ways: Vec<(String, String)>, compared_max: usize) -> String {
    if ways.len() <= compared_max {
        return ways.iter().map(|(value, to)| format!("  {what} {value} goto {to}\n")).collect();
    }
    let ways: Vec<_> = ways.iter().map(|(value, to)| format!("{value} : goto {to}")).collect();
    format!("  {what} vmap {{ {} }}\n", ways.join(", "))
}

/// A member alone sends nothing to itself: what comes from it need not be compared with its name.
fn from_the_only_one(entries: &[Entry]) -> String {
    match entries {
        [Entry { only_that_index: true, index: Some(index), .. }] => {
            format!("  iif {index} accept\n")
        }
        _ => String::new(),
    }
}

/// What goes to an interface that was made anew: nobody sees yet what its guest hears.
fn to_another(entries: &[Entry]) -> String {
    let watched: Vec<_> = entries.iter().filter(|entry| entry.only_that_index).collect();
    if watched.is_empty() {
        return String::new();
    }
    let indices: Vec<_> =
        watched.iter().filter_map(|entry| Some(entry.index?.to_string())).collect();
    let names = watched.iter().map(|entry| format!("\"{}\"", entry.interface)).collect();
    let not_watched: String = match indices.len() {
        ..=COMPARED_MAX => indices.iter().map(|index| format!("oif != {index} ")).collect(),
        _ => format!("oif != {} ", one_of(indices)),
    };
    format!("{not_watched}oifname {} counter drop", one_of(names))
}

fn one_of(values: Vec<String>) -> String {
    match &*values {
        [value] => value.clone(),
        values => format!("{{ {} }}", values.join(", ")),
    }
}

struct Chain {
    name: String,
    /// Of a base chain: its hook and priority.
    hook: Option<(&'static str, i32)>,
    rules: String,
}

impl Chain {
    fn new(name: String, rules: String) -> Chain {
        Chain { name, hook: None, rules }
    }

    fn head(&self) -> String {
        let Chain { name, hook, .. } = self;
        hook.map_or(name.clone(), |(hook, priority)| {
            format!("{name} {{ type filter hook {hook} priority {priority}; }}")
        })
    }
}

/// A member in a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// What its chains are called by.
    pub(super) id: String,
    interface: String,
    pub(super) queue: QueueNumber,
    marks: Option<Marks>,
    index: Option<u32>,
    only_that_index: bool,
}

impl From<&MemberRules> for Entry {
    fn from(rules: &MemberRules) -> Entry {
        let MemberRules { member, interface, queue, marks, index, only_that_index, .. } = rules;
        Entry {
            id: word(member),
            interface: interface.clone(),
            queue: *queue,
            marks: *marks,
            index: *index,
            only_that_index: *only_that_index,
        }
    }
}

const FROM: &str = "from_";
const HELD: &str = "held_";

impl Entry {
    fn from(&self) -> String {
        format!("{FROM}{}", self.id)
    }

    pub(super) fn index(&self) -> Option<u32> {
        self.index
    }

    /// The chain of what is queued.
    pub(super) fn held(&self) -> String {
        format!("{HELD}{}", self.id)
    }

    /// In the place of what there was of the member, and of another one that had its interface: the configuration may
    /// give that to a member of another name. An index is that of one interface.
    pub(super) fn put_into(self, entries: &mut Vec<Entry>) {
        entries.retain(|other| other.id == self.id || other.interface != self.interface);
        let others = entries.iter_mut().filter(|other| other.id != self.id);
        others.filter(|other| other.index == self.index).for_each(|other| other.index = None);
        match entries.iter_mut().find(|other| other.id == self.id) {
            Some(was) => *was = self,
            None => entries.push(self),
        }
    }

    /// `tap0 queue 7100 marks 134217728 67108864 index 5 only`
    fn comment(&self) -> String {
        let Entry { interface, queue, marks, index, only_that_index, .. } = self;
        let mark =
            marks.map_or(String::new(), |Marks { mask, pass }| format!(" marks {mask} {pass}"));
        let index = index.map_or(String::new(), |index| format!(" index {index}"));
        let only = if *only_that_index { " only" } else { "" };
        format!("{interface} queue {queue}{mark}{index}{only}")
    }

    fn from_comment(id: &str, comment: &str) -> Option<Entry> {
        let mut words = comment.split(' ');
        let interface = words.next()?.to_owned();
        let mut entry = Entry {
            id: id.to_owned(),
            interface,
            queue: QueueNumber(0),
            marks: None,
            index: None,
            only_that_index: false,
        };
        while let Some(word) = words.next() {
            let mut number = || words.next()?.parse().ok();
            match word {
                "queue" => entry.queue = QueueNumber(words.next()?.parse().ok()?),
                "marks" => entry.marks = Some(Marks { mask: number()?, pass: number()? }),
                "index" => entry.index = Some(number()?),
                "only" => entry.only_that_index = true,
                _ => return None,
            }
        }
        Some(entry)
    }
}

/// What a table holds, as it is listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) entries: Vec<Entry>,
    /// In whose chain something queues.
    queueing: HashSet<String>,
}

impl Content {
    /// `Err`: a line that is not of our making.
    pub(super) fn read(lines: &[String]) -> Result<Content, String> {
        let mut content = Content::default();
        let mut chain = "";
        for line in lines {
            let line = line.trim();
            if let Some(name) = line.strip_prefix("chain ") {
                chain = name.trim_end_matches(" {");
            }
            if let Some(id) = chain.strip_prefix(FROM)
                && let Some((_, comment)) = line.split_once(" comment \"")
            {
                let entry = Entry::from_comment(id, comment.trim_end_matches('"'));
                content.entries.push(entry.ok_or_else(|| line.to_owned())?);
            }
            if let Some(id) = chain.strip_prefix(HELD)
                && line.contains("queue ")
            {
                content.queueing.insert(id.to_owned());
            }
        }
        Ok(content)
    }

    /// Whether its chain queues as it is to.
    pub(super) fn queues_for(&self, entry: &Entry) -> bool {
        let is_as_it_was = |was: &Entry| was.id == entry.id && was.queue == entry.queue;
        self.queueing.contains(&entry.id) && self.entries.iter().any(is_as_it_was)
    }
}
