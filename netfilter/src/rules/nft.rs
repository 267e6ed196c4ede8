//! The rules in nftables: one table per host, family and purpose ([`table`]), changed in one transaction.
//!
//! A table of our own needs no place among the user's rules: every table's chains see the packet,
//! and ours see it before the usual filter priority. Counters show the operator that packets come.

mod table;
#[cfg(test)]
mod tests;

use super::listing::{difference, with_indices};
use super::names::{members_own_table, word};
use super::tool::{find, run};
use super::{MemberRules, RulesError, Topology};
use std::path::PathBuf;
use table::{Content, Entry, Purpose, Table};
use tidelock_tagging::interface_name;

/// The rules of this packet filter.
pub(super) const NAME: &str = "nft";
const PROBE_TABLE: &str = "tidelock_probe";

/// A table as this process has left it.
#[derive(Clone, Debug)]
struct Written {
    table: Table,
    entries: Vec<Entry>,
    /// In nftables' own words, but for indices.
    lines: Vec<String>,
}

/// Where a member has rules.
pub(super) struct LeftoverRules {
    pub(super) queue: bool,
    pub(super) beside: bool,
}

/// What is different in the tables that this process has written.
pub(super) struct Look(Vec<(Table, Option<String>)>);

/// nftables.
#[derive(Clone, Debug)]
pub(super) struct Nft {
    tool: PathBuf,
    /// Whose tables it makes.
    host: String,
    /// It can queue, and is wanted to.
    queues: bool,
    /// The families that this kernel has, be it without a queue.
    inet: bool,
    bridge: bool,
    written: Vec<Written>,
}

impl Nft {
    pub(super) fn find(host: &str) -> Option<Nft> {
        let (tool, host) = (find("nft")?, host.to_owned());
        Some(Nft { tool, host, queues: false, inet: false, bridge: false, written: Vec::new() })
    }

    /// Whether it can filter what such a member sends, be it without a queue.
    pub(super) fn has(&self, topology: Topology) -> bool {
        match topology {
            Topology::Routed => self.inet,
            Topology::Bridged => self.bridge,
        }
    }

    pub(super) fn queues(&self, topology: Topology) -> bool {
        self.queues && self.has(topology)
    }

    /// Finds out what this kernel has, and, if that is wanted, whether it can queue, and if not, why.
    pub(super) fn look(&mut self, is_wanted: bool) -> Option<RulesError> {
        self.inet = self.probe("inet", "drop").is_ok();
        self.bridge = self.probe("bridge", "ether type ip drop").is_ok();
        if !is_wanted {
            return None;
        }
        let tried = self.try_queue();
        self.queues = tried.is_ok();
        tried.err()
    }

    /// Builds and removes a scratch table with what will be needed, in one transaction.
    fn try_queue(&self) -> Result<(), RulesError> {
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

    /// The rules of a member that it queues for.
    pub(super) fn install(&mut self, rules: &MemberRules) -> Result<(), RulesError> {
        debug_assert!(self.queues(rules.topology), "{self:?} is chosen for what it can");
        self.put(rules, Purpose::Queue, "install the rules")
    }

    /// Beside iptables: drops what iptables does not see or cannot tell. In the place of whatever
    /// there was of the member.
    pub(super) fn install_companion(&mut self, rules: &MemberRules) -> Result<(), RulesError> {
        self.put(rules, Purpose::Beside, "install the rules that drop what iptables cannot see")
    }

    fn put(
        &mut self,
        rules: &MemberRules,
        purpose: Purpose,
        doing: &'static str,
    ) -> Result<(), RulesError> {
        let table = Table::of(&self.host, rules.topology, purpose);
        self.settle(&rules.member, Some((table, Entry::from(rules))), doing)
    }

    pub(super) fn remove(&mut self, member: &str) -> Result<(), RulesError> {
        self.settle(member, None, "remove the rules")
    }

    /// Puts a member into a table, and takes it out of all others, in one transaction.
    fn settle(
        &mut self,
        member: &str,
        into: Option<(Table, Entry)>,
        doing: &'static str,
    ) -> Result<(), RulesError> {
        let id = word(member);
        let mut script = self.clear_members_own(member);
        let mut changed = Vec::new();
        for (table, was) in self.read(into.as_ref().map(|(table, _)| table))? {
            let mut entries = was.entries.clone();
            // Somebody may have taken others away: they come back together.
            let known = self.written_of(&table).map_or(&[][..], |written| &written.entries);
            let is_there = |entry: &&Entry| was.entries.iter().all(|there| there.id != entry.id);
            entries.extend(known.iter().filter(is_there).cloned());
            let at = entries.iter().position(|entry| entry.id == id);
            match (into.as_ref().filter(|(into, _)| *into == table), at) {
                (Some((_, entry)), _) => entry.clone().put_into(&mut entries),
                (None, Some(at)) => drop(entries.remove(at)),
                (None, None) => continue,
            }
            script += &table.replace(&was, &entries);
            changed.push((table, entries));
        }
        self.script(&script, doing)?;
        for (table, entries) in changed {
            self.written.retain(|written| written.table != table);
            if !entries.is_empty() {
                let lines = self.list_as_numbers(&table, &entries)?;
                self.written.push(Written { table, entries, lines });
            }
        }
        Ok(())
    }

    fn written_of(&self, table: &Table) -> Option<&Written> {
        self.written.iter().find(|written| written.table == *table)
    }

    /// What there is, of whatever host name, what there was, and this one.
    fn read(&self, and: Option<&Table>) -> Result<Vec<(Table, Content)>, RulesError> {
        let mut found = Vec::new();
        for table in self.tables()? {
            let content = Content::read(&self.list(&table)?)
                .map_err(|line| RulesError::NotOurs { table: table.place(), line })?;
            found.push((table, content));
        }
        for table in self.written.iter().map(|written| &written.table).chain(and) {
            if found.iter().all(|(there, _)| there != table) {
                found.push((table.clone(), Content::default()));
            }
        }
        Ok(found)
    }

    /// Those of ours.
    fn tables(&self) -> Result<Vec<Table>, RulesError> {
        let listed = self.run(&["list", "tables"])?;
        Ok(listed.iter().filter_map(|line| Table::listed(line)).collect())
    }

    /// In which tables an earlier run has left rules of this member.
    pub(super) fn left_of(&self, member: &str) -> Result<LeftoverRules, RulesError> {
        let (id, own) = (word(member), members_own_table(member));
        let listed = self.run(&["list", "tables"])?;
        // It was of either purpose.
        let is_old = listed.iter().any(|line| line.split_whitespace().next_back() == Some(&own));
        let mut left = LeftoverRules { queue: is_old, beside: is_old };
        for (table, content) in self.read(None)? {
            let has = content.entries.iter().any(|entry| entry.id == id);
            match table.purpose {
                Purpose::Queue => left.queue |= has,
                Purpose::Beside => left.beside |= has,
            }
        }
        Ok(left)
    }

    /// Looks at all tables that this process has written.
    pub(super) fn look_at_tables(&self) -> Result<Look, RulesError> {
        let there = if self.written.is_empty() { Vec::new() } else { self.tables()? };
        let of = |Written { table, entries, lines }: &Written| {
            if !there.contains(table) {
                return Ok((table.clone(), Some(format!("missing: table {}", table.place()))));
            }
            let what = match self.list_as_numbers(table, entries) {
                Ok(listed) => difference(lines, &listed),
                // Gone by now.
                Err(RulesError::Refused { output, .. }) => Some(output),
                Err(e) => return Err(e),
            };
            Ok((table.clone(), what))
        };
        self.written.iter().map(of).collect::<Result<_, _>>().map(Look)
    }

    /// Whether a member's table is as this process has left it, with the member in it.
    pub(super) fn verify(
        &self,
        rules: &MemberRules,
        queues: bool,
        look: &Look,
    ) -> Result<(), RulesError> {
        let purpose = if queues { Purpose::Queue } else { Purpose::Beside };
        let (table, entry) = (Table::of(&self.host, rules.topology, purpose), Entry::from(rules));
        let is_in = |written: &Written| written.entries.contains(&entry);
        let looked = look.0.iter().find(|(looked, _)| *looked == table);
        match looked.filter(|_| self.written_of(&table).is_some_and(is_in)) {
            Some((_, None)) => Ok(()),
            Some((_, Some(what))) => Err(self.changed(what.clone())),
            None => Err(self.changed(format!("missing: the rules of {}", rules.member))),
        }
    }

    /// While it is listed an interface's name may change.
    fn list_as_numbers(&self, table: &Table, entries: &[Entry]) -> Result<Vec<String>, RulesError> {
        let names = || -> Vec<_> {
            let indices = entries.iter().filter_map(Entry::index);
            indices.map(|index| (index, interface_name(index))).collect()
        };
        loop {
            let before = names();
            let listed = self.list(table)?;
            if names() == before {
                return Ok(with_indices(&listed, &before));
            }
        }
    }

    fn changed(&self, what: String) -> RulesError {
        RulesError::Changed { tool: NAME.to_owned(), what }
    }

    fn list(&self, table: &Table) -> Result<Vec<String>, RulesError> {
        self.run(&["list", "table", family(table.topology), &table.name])
    }

    fn run(&self, command: &[&str]) -> Result<Vec<String>, RulesError> {
        let listed = run(&self.tool, &[&["--stateless"], command].concat(), "", "list the rules")?;
        Ok(listed.lines().map(str::to_owned).collect())
    }

    fn script(&self, script: &str, doing: &'static str) -> Result<(), RulesError> {
        run(&self.tool, &["-f", "-"], script, doing).map(drop)
    }

    /// Earlier daemons had a table for each member.
    fn clear_members_own(&self, member: &str) -> String {
        let families = [("bridge", self.bridge), ("inet", self.inet)];
        let families = families.into_iter().filter(|(_, is_there)| *is_there);
        families
            .map(|(family, _)| clear_table(&format!("{family} {}", members_own_table(member))))
            .collect()
    }
}

/// The family that sees what such a member sends.
pub(super) fn family(topology: Topology) -> &'static str {
    match topology {
        Topology::Routed => "inet",
        Topology::Bridged => "bridge",
    }
}

/// Deletes a table whether or not it is there.
fn clear_table(place: &str) -> String {
    format!("add table {place}\ndelete table {place}\n")
}
