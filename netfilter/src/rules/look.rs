//! Whether rules stand as they were installed: each of them, as often and in the order in which it was. One chain of
//! ours has rules that another one has, too.
//!
//! nftables shows a rule that goes by an interface's index by the name that the interface has at the moment of the
//! listing, or by the number if there is no such interface. The rule is the same.

use super::{Firewall, Installed, RulesError};

impl Firewall {
    /// Whether they stand, seen while the interface of their index has this name, or is gone.
    pub(crate) fn look(&self, installed: &Installed, name: Option<&str>) -> Result<(), RulesError> {
        let listing = self.listing(&installed.rules)?;
        let changed = |what| RulesError::Changed { tool: installed.backend.clone(), what };
        difference(&installed.shown_with(name).listing, &listing)
            .map_or(Ok(()), |d| Err(changed(d)))
    }
}

/// What is different, by the first line of it.
fn difference(installed: &[String], found: &[String]) -> Option<String> {
    let mut missing: Vec<&String> = installed.iter().collect();
    let mut added = None;
    for line in found {
        match missing.iter().position(|missing| *missing == line) {
            Some(at) => drop(missing.remove(at)),
            None => added = added.or(Some(line)),
        }
    }
    let moved = || installed.iter().zip(found).find(|(was, is)| was != is);
    match (missing.first(), added) {
        (Some(line), _) => Some(format!("missing: {}", line.trim())),
        (None, Some(line)) => Some(format!("added: {}", line.trim())),
        (None, None) => moved().map(|(_, is)| format!("in another order: {}", is.trim())),
    }
}

impl Installed {
    /// As they are listed while the interface of their index has this name, or is gone.
    fn shown_with(&self, name: Option<&str>) -> Installed {
        let Some(index) = self.rules.index else { return self.clone() };
        let shown = name.map_or_else(|| index.to_string(), |name| format!("\"{name}\""));
        let listing = self.listing.iter().map(|line| with_index_shown(line, &shown)).collect();
        Installed { listing, ..self.clone() }
    }
}

/// Every index in our rules is that of the member's interface.
fn with_index_shown(line: &str, shown: &str) -> String {
    let mut words: Vec<&str> = line.split(' ').collect();
    for at in 0..words.len() {
        if matches!(words[at].trim_start(), "iif" | "oif") {
            let negated = words.get(at + 1) == Some(&"!=");
            if let Some(index) = words.get_mut(at + 1 + usize::from(negated)) {
                *index = shown;
            }
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::MemberRules;
    use super::super::tests::rules;
    use super::*;
    use crate::rules::Topology;

    #[test]
    fn a_rule_of_two_chains_that_one_of_them_has_lost_is_missed() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let of = |found: &str| difference(&lines("f\nqueue\ni\naccept\nqueue"), &lines(found));
        assert_eq!(of("f\nqueue\ni\naccept\nqueue"), None);
        assert_eq!(of("f\ni\naccept\nqueue").unwrap(), "missing: queue");
        assert_eq!(of("f\naccept\nqueue\ni\naccept\nqueue").unwrap(), "added: accept");
        assert_eq!(of("f\nqueue\ni\nqueue\naccept").unwrap(), "in another order: queue");
        assert_eq!(of("").unwrap(), "missing: f");
    }

    #[test]
    fn only_indices_are_shown_by_another_name() {
        let listed = |shown: &str| {
            vec![
                format!("\t\tiif {shown} meta mark & 0x00000010 == 0x00000010 accept"),
                format!("\t\toif {shown} iif != {shown} accept"),
                format!("\t\tiifname \"tap0\" iif != {shown} counter drop"),
                "\t\tiifname != \"tap0\" accept".to_owned(),
                "V4 -A FORWARD -i tap0 -j TL-F-web".to_owned(),
            ]
        };
        let installed = |index, shown: &str| Installed {
            rules: MemberRules { index, ..rules(Topology::Routed) },
            backend: "nft".into(),
            notes: Vec::new(),
            listing: listed(shown),
        };
        let named = installed(Some(7), "\"tap0\"");
        assert_eq!(named.shown_with(Some("tap0")), named);
        assert_eq!(named.shown_with(Some("other0")), installed(Some(7), "\"other0\""));
        assert_eq!(named.shown_with(None), installed(Some(7), "7"));
        assert_eq!(installed(Some(7), "7").shown_with(Some("tap0")), named);
        let without = installed(None, "\"tap0\"");
        assert_eq!(without.shown_with(Some("other0")), without);
    }
}
