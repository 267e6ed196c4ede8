//! A group whose guest still runs on other disks: that is on record ([`tidelock_daemon_core::records`]) until they are here.
//!
//! ```text
//!                  `tidelock adopt --prepare`            `tidelock adopt`: the guest writes here
//!  no such group ──────────────────────────▶ on record ──────────────────────────────────────▶ begun
//! ```
//!
//! Invariants (rules 1 and 6):
//! - While it is on record no member of the group is attached to the backup. So the copy that is there stays what it was, to
//!   be compared with, and nobody calls disks `protected` that are not the guests'.
//! - All members of the group are on one host. What one tells another meanwhile no tag names. On one host they begin
//!   together, clients are answered until the disks of all are at the backup, and only then, when what has left is covered,
//!   the group is called protected; another host could call its members that before.

use crate::config::Group;

/// Members of the group that are on other hosts: with them it cannot be adopted.
pub fn elsewhere(group: &Group) -> Vec<&str> {
    let is_here = |name: &str| group.members.iter().any(|member| member.name.as_str() == name);
    group.present().map(|peer| peer.name.value.as_str()).filter(|name| !is_here(name)).collect()
}
