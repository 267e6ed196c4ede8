//! Rules as a packet filter lists them, to be compared with what they were: each of them, as often and in the order in
//! which it was. One chain of ours has rules that another one has, too.

/// What is different, by the first line of it.
pub(super) fn difference(was: &[String], is: &[String]) -> Option<String> {
    let mut missing: Vec<&String> = was.iter().collect();
    let mut added = None;
    for line in is {
        match missing.iter().position(|missing| *missing == line) {
            Some(at) => drop(missing.remove(at)),
            None => added = added.or(Some(line)),
        }
    }
    let moved = || was.iter().zip(is).find(|(was, is)| was != is);
    match (missing.first(), added) {
        (Some(line), _) => Some(format!("missing: {}", line.trim())),
        (None, Some(line)) => Some(format!("added: {}", line.trim())),
        (None, None) => moved().map(|(_, is)| format!("in another order: {}", is.trim())),
    }
}

/// nftables shows an interface's index by the name that the interface has at the moment, or by the number if there is
/// none. The rule is the same: here it is the number, for interfaces that are known by both.
pub(super) fn with_indices(lines: &[String], known: &[(u32, Option<String>)]) -> Vec<String> {
    /// Where in a rule: behind `iif` or `oif`, or within the braces behind it.
    #[derive(PartialEq)]
    enum At {
        Elsewhere,
        Value,
        Braces,
    }
    let number = |word: &str| {
        let (value, end) = word.strip_suffix(',').map_or((word, ""), |value| (value, ","));
        let name = value.strip_prefix('"')?.strip_suffix('"')?;
        let (index, _) = known.iter().find(|(_, is)| is.as_deref() == Some(name))?;
        Some(format!("{index}{end}"))
    };
    let mut at = At::Elsewhere;
    let mut shown = |word: &str| {
        let is_value = match (word.trim(), &at) {
            ("iif" | "oif", _) => {
                at = At::Value;
                false
            }
            ("!=" | "vmap" | "", At::Value) => false,
            ("{", At::Value) => {
                at = At::Braces;
                false
            }
            ("}", At::Braces) => {
                at = At::Elsewhere;
                false
            }
            (_, At::Value) => {
                at = At::Elsewhere;
                true
            }
            (_, At::Braces) => true,
            (_, At::Elsewhere) => false,
        };
        if !is_value {
            return word.to_owned();
        }
        let indent = &word[..word.len() - word.trim_start().len()];
        number(word.trim_start()).map_or(word.to_owned(), |number| format!("{indent}{number}"))
    };
    let line = |line: &String| line.split(' ').map(&mut shown).collect::<Vec<_>>().join(" ");
    lines.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_rule_of_two_chains_that_one_of_them_has_lost_is_missed() {
        let of = |found: &str| difference(&lines("f\nqueue\ni\naccept\nqueue"), &lines(found));
        assert_eq!(of("f\nqueue\ni\naccept\nqueue"), None);
        assert_eq!(of("f\ni\naccept\nqueue").unwrap(), "missing: queue");
        assert_eq!(of("f\naccept\nqueue\ni\naccept\nqueue").unwrap(), "added: accept");
        assert_eq!(of("f\nqueue\ni\nqueue\naccept").unwrap(), "in another order: queue");
        assert_eq!(of("").unwrap(), "missing: f");
    }

    #[test]
    fn an_index_is_told_whatever_it_is_shown_by() {
        let listed = |one: &str, other: &str| {
            lines(&format!(
                "\t\tiif {one} meta mark & 0x00000010 == 0x00000010 accept\n\
                 \t\toif {one} accept\n\
                 \t\tiifname \"tap0\" goto cut_off\n\
                 \t\toif != {{ {one}, {other} }} oifname {{ \"tap0\", \"tap1\" }} counter drop\n\
                 \t\tiif vmap {{ {one} : goto from_a, {other} : goto from_b,\n\
                 \t\t\t     {one} : goto from_c }}\n\
                 \t\tiifname != \"tap0\" counter drop comment \"tap0 index 5\""
            ))
        };
        let known = [(5, Some("tap0".to_owned())), (6, Some("other0".to_owned())), (7, None)];
        for (one, other) in [("\"tap0\"", "\"other0\""), ("5", "6"), ("\"tap0\"", "6")] {
            assert_eq!(with_indices(&listed(one, other), &known), listed("5", "6"));
        }
        let strange = listed("\"tap0\"", "\"eth0\"");
        assert_eq!(with_indices(&strange, &known), listed("5", "\"eth0\""));
    }
}
