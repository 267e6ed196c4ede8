//! What stands in nftables: one table for the members of a host, in each family and for each purpose.
//!
//! Every packet of the host enters each base chain once, so there is one for all members, and what it compares comes
//! first. A few indices, or two names, are compared one after the other, which is quicker than to look them up. So a
//! packet's way is about as long with twenty members as with one:
//!
//! ```text
//! chain forward { iif 5 goto from_web        what comes from a member's interface
//!                 iif 6 goto from_db
//!                 iifname vmap { .. }        from an interface of its name with another index
//!                 oif != 5 oif != 6 oifname { .. } drop }    to one
//! chain from_web { meta mark & .. accept     what the programs let pass
//!                  iifname != "tap0" drop    renamed
//!                  goto held_web comment ".." }
//! chain held_web { queue num 7100
//!                  drop }                    if somebody deletes the rule before it
//! ```
//!
//! (`to_host_web` is like `from_web`, for the input hook.) Indices cost less than names; an interface's name may
//! change, its index may not.
//!
//! # Marks
//! What the programs of a member let pass without a tag says nothing that its receiver's P does not name: it is
//! covered, or the receiver is here and P was raised when it was sent. So it may go wherever it goes. What has a tag
//! is dropped before an interface of the right name and the wrong index, where nobody reads tags yet; so is whatever
//! comes from elsewhere.
//!
//! # The comment
//! The comment of `from_web` says what the rules were made from, so that a table is itself what is known of the
//! members in it: they are left there as they were when one of them changes. What is queued is left untouched, too,
//! with its counter.

use super::super::names::word;
use super::super::{Marks, MemberRules, Topology};
use super::Way;
use crate::nfqueue::QueueNumber;
use crate::packet::NEIGHBOUR_DISCOVERY_TYPES;
use std::collections::HashSet;
use std::fmt::Write;

/// So many indices are compared one after the other.
const COMPARED_MAX: usize = 8;
/// And so many names: each takes longer.
const NAMES_COMPARED_MAX: usize = 2;
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
        match (self.purpose, self.topology) {
            (Purpose::Queue, Topology::Routed) => -150,
            (Purpose::Queue, Topology::Bridged) => -250,
            // Before anybody else looks, iptables' queue among them.
            (Purpose::Beside, _) => -350,
        }
    }

    /// A script that makes it hold these members, where it has held `was`.
    pub(super) fn replace(&self, was: &Content, entries: &[Entry], way: Way) -> String {
        let place = self.place();
        if entries.is_empty() {
            return super::clear_table(&place);
        }
        let chains = self.chains(was, entries, way);
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
        [entry.from(), entry.to_host()].into_iter().chain(held).collect()
    }

    /// All that it has, but for what queues already. What is led to comes before what leads there.
    fn chains(&self, was: &Content, entries: &[Entry], way: Way) -> Vec<Chain> {
        let to_another = to_another(entries);
        // A member alone sends nothing to itself.
        let tagged_to_another = if entries.len() > 1 { &*to_another } else { "" };
        let mut chains = vec![Chain::new(CUT_OFF.to_owned(), "  counter drop\n".to_owned())];
        for entry in entries {
            if self.purpose == Purpose::Queue && !was.queues_for(entry) {
                chains.push(Chain::new(entry.held(), held(entry.queue, way)));
            }
            chains.push(Chain::new(entry.from(), self.judge(entry, false, tagged_to_another)));
            chains.push(Chain::new(entry.to_host(), self.judge(entry, true, "")));
        }
        let to_another = match &*to_another {
            "" => String::new(),
            rule => format!("  {rule}\n"),
        };
        let forward = by_index(entries, Entry::from)
            + &to_the_only_one(entries)
            + &self.by_name(entries, Entry::from)
            + &to_another;
        let input = by_index(entries, Entry::to_host) + &self.by_name(entries, Entry::to_host);
        for (hook, rules) in [("forward", forward), ("input", input), ("output", to_another)] {
            chains.push(Chain {
                hook: Some((hook, self.priority())),
                ..Chain::new(hook.to_owned(), rules)
            });
        }
        chains
    }

    /// What becomes of a packet from a member: forwarded, or to the host itself.
    fn judge(&self, entry: &Entry, is_to_host: bool, to_another: &str) -> String {
        let Entry { interface, index, marks, only_that_index, .. } = entry;
        let mut rules = String::new();
        let mut rule = |text: &str| writeln!(rules, "  {text}").expect("writing to a string");
        if let Some(index) = index {
            if let Some(Marks { pass, tagged }) = marks {
                let marked = |of: u32, as_this: u32| format!("meta mark & {of:#x} == {as_this:#x}");
                let passes = marked(*pass, *pass);
                if !only_that_index {
                    // By its name one may come here that has no programs yet.
                    rule(&format!("iif {index} {passes} accept"));
                } else if is_to_host || to_another.is_empty() {
                    rule(&format!("{passes} accept"));
                } else {
                    rule(&format!("{} accept", marked(pass | tagged, *pass)));
                    rule(&format!("{passes} {to_another}"));
                    rule(&format!("{passes} accept"));
                }
            }
            rule(&format!("iifname != \"{interface}\" counter drop"));
        }
        let (first, last) = NEIGHBOUR_DISCOVERY_TYPES.into_inner();
        let discovery = format!("icmpv6 type {first}-{last} accept");
        match (self.purpose, self.topology) {
            // Genuine discovery never crosses a router.
            (Purpose::Queue, Topology::Routed) if is_to_host => rule(&discovery),
            (Purpose::Queue, Topology::Routed) | (Purpose::Beside, Topology::Routed) => {}
            (Purpose::Queue, Topology::Bridged) => {
                rule("ether type arp accept");
                rule(&format!("ether type ip6 {discovery}"));
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

fn held(queue: QueueNumber, way: Way) -> String {
    match way {
        Way::Statement => format!("  counter queue num {queue}\n  drop\n"),
        Way::Target => "  drop\n".to_owned(),
    }
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

/// What comes to the interface that is watched was judged where it came from, and is seen where it leaves. Where there
/// are several members it may come from one that was made anew.
fn to_the_only_one(entries: &[Entry]) -> String {
    match entries {
        [Entry { only_that_index: true, index: Some(index), .. }] => {
            format!("  oif {index} accept\n")
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

    fn to_host(&self) -> String {
        format!("to_host_{}", self.id)
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
            marks.map_or(String::new(), |Marks { pass, tagged }| format!(" marks {pass} {tagged}"));
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
                "marks" => entry.marks = Some(Marks { pass: number()?, tagged: number()? }),
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
                && is_queueing(line)
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

/// By its name, or, where `nft` can translate the target, in its own words.
pub(super) fn is_queueing(line: &str) -> bool {
    line.contains("NFQUEUE") || line.contains("queue ")
}
