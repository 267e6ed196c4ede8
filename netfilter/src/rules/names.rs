//! The names of chains and tables. They follow from a member's or a host's name alone, so that a new daemon finds what
//! a crashed one has left.

use tidelock_protocol::record::crc32c;

/// Every table of ours in nftables begins so.
pub(super) const TABLE_PREFIX: &str = "tidelock_";
/// Every chain of ours in iptables begins so.
pub(super) const CHAIN_PREFIX: &str = "TL-";
/// iptables allows 28 characters.
const CHAIN_NAME_MAX: usize = 28;
const READABLE_MAX: usize = 12;

/// A short name that is readable and nobody else's.
fn short(name: &str) -> String {
    let readable: String =
        name.chars().filter(char::is_ascii_alphanumeric).take(READABLE_MAX).collect();
    format!("{readable}-{:08x}", crc32c(name.as_bytes()))
}

/// As [`short`], of what nftables allows in a name (but not at its beginning).
pub(super) fn word(name: &str) -> String {
    short(name).replace('-', "_")
}

/// iptables' chain of a member.
pub(super) fn chain(member: &str) -> String {
    format!("{CHAIN_PREFIX}{}", short(member))
}

/// nftables' table of a member, as daemons before this one had it.
pub(super) fn members_own_table(member: &str) -> String {
    format!("{TABLE_PREFIX}{}", word(member))
}

const _: () = assert!(CHAIN_PREFIX.len() + READABLE_MAX + 1 + 8 <= CHAIN_NAME_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_short_and_different() {
        let long = "m".repeat(64);
        for member in ["web", "we b", "we.b", "", "日本", "a;b{", &long] {
            let chain = chain(member);
            assert!(chain.len() <= CHAIN_NAME_MAX, "{chain}");
            assert!(chain.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{chain}");
            let table = members_own_table(member);
            assert!(table.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{table}");
        }
        assert_ne!(short("we b"), short("we.b"));
        assert_eq!(chain("web"), "TL-web-".to_owned() + &short("web")[4..]);
    }
}
