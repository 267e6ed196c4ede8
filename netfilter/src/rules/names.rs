//! The names of a member's chains and tables. They follow from its name alone, so that a new
//! daemon finds what a crashed one has left.

use tidelock_protocol::record::crc32c;

/// Every chain of ours begins so.
pub(super) const CHAIN_PREFIX: &str = "TL-";
/// iptables allows 28 characters.
const CHAIN_NAME_MAX: usize = 28;
const READABLE_MAX: usize = 12;

/// A short name for a member that is readable and its own.
pub(super) fn short(member: &str) -> String {
    let readable: String =
        member.chars().filter(char::is_ascii_alphanumeric).take(READABLE_MAX).collect();
    format!("{readable}-{:08x}", crc32c(member.as_bytes()))
}

/// The chain of packets that are forwarded.
pub(super) fn forward_chain(member: &str) -> String {
    format!("{CHAIN_PREFIX}{}-F", short(member))
}

/// The chain of packets to the host itself.
pub(super) fn input_chain(member: &str) -> String {
    format!("{CHAIN_PREFIX}{}-I", short(member))
}

/// nftables' table.
pub(super) fn table(member: &str) -> String {
    format!("tidelock_{}", short(member).replace('-', "_"))
}

const _: () = assert!(CHAIN_PREFIX.len() + READABLE_MAX + 1 + 8 + 2 <= CHAIN_NAME_MAX);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_short_and_different() {
        let long = "m".repeat(64);
        for member in ["web", "we b", "we.b", "", "日本", "a;b{", &long] {
            let chain = forward_chain(member);
            assert!(chain.len() <= CHAIN_NAME_MAX, "{chain}");
            assert!(chain.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{chain}");
            let table = table(member);
            assert!(table.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{table}");
        }
        assert_ne!(short("we b"), short("we.b"));
        assert_eq!(forward_chain("web"), "TL-web-".to_owned() + &short("web")[4..] + "-F");
    }
}
