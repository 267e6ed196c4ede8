//! A group whose guest still runs on other disks: what is on record of it until they are here.
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

use crate::config::{Config, Group};
use crate::durable;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const FORMAT: u32 = 1;

/// What is on record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    format: u32,
    prepared_unix_ms: u64,
}

/// Where what a host knows of a group is.
pub fn state_dir(config: &Config, group: &Group) -> PathBuf {
    config.host.state_dir.join(group.name.as_str())
}

/// Where it is on record that a group is to be adopted.
pub fn record_path(config: &Config, group: &Group) -> PathBuf {
    // No member has such a name: they begin with a letter or digit.
    state_dir(config, group).join("_adopting.json")
}

/// Whether the group's disks are elsewhere still.
pub fn is_on_record(path: &Path) -> io::Result<bool> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let record: Record = serde_json::from_slice(&bytes)?;
    match record.format {
        FORMAT => Ok(true),
        found => Err(io::Error::other(format!("format {found}, this version knows {FORMAT}"))),
    }
}

/// Members of the group that are on other hosts: with them it cannot be adopted.
pub fn elsewhere(group: &Group) -> Vec<&str> {
    let is_here = |name: &str| group.members.iter().any(|member| member.name.as_str() == name);
    group.present().map(|peer| peer.name.value.as_str()).filter(|name| !is_here(name)).collect()
}

/// Puts it on record.
pub fn put_on_record(path: &Path, prepared_unix_ms: u64) -> io::Result<()> {
    let record = Record { format: FORMAT, prepared_unix_ms };
    durable::replace(path, &serde_json::to_vec_pretty(&record).expect("plain data"))
}

/// The disks are here, for good.
pub fn remove_record(path: &Path) -> io::Result<()> {
    durable::remove(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_on_record_is_found_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shop/_adopting.json");
        assert!(!is_on_record(&path).unwrap());
        put_on_record(&path, 7).unwrap();
        assert!(is_on_record(&path).unwrap());
        fs::write(&path, r#"{"format": 2, "prepared_unix_ms": 7}"#).unwrap();
        assert!(is_on_record(&path).unwrap_err().to_string().contains("format 2"));
        remove_record(&path).unwrap();
        assert!(!is_on_record(&path).unwrap());
    }
}
