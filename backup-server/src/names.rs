//! Names that become names of files: hostile ones end here.

use tidelock_protocol::limits;

/// Whether a group, member, disk or host may be called so: letters, digits, `.`, `_`, `-`, not
/// beginning with a dot, at most [`limits::NAME_MAX_BYTES`].
#[must_use]
pub fn is_valid(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    !name.is_empty()
        && name.len() <= limits::NAME_MAX_BYTES
        && !name.starts_with(['.', '-'])
        && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::is_valid;

    #[test]
    fn nothing_that_leads_elsewhere_is_a_name() {
        for good in ["a", "db-1", "vm_2.data", &"x".repeat(64)] {
            assert!(is_valid(good), "{good}");
        }
        for bad in ["", ".", "..", ".x", "-x", "a/b", "a b", "a\0", "ü", &"x".repeat(65)] {
            assert!(!is_valid(bad), "{bad:?}");
        }
    }
}
